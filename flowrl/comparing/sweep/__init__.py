"""Measures guidance scales and searches: quality, diversity, cost."""
