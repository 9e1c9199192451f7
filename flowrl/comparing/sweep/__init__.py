"""Guidance scales and searches measured: quality, diversity, cost."""
