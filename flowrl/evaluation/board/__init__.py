"""Compares evaluations: which are comparable, ranks, rows."""
