"""Benchmarks of videos."""
