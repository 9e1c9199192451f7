"""Evaluations beside each other: what may be compared, ranks, rows."""
