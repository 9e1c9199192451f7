"""Benchmarks in which a judge reads each image, drawn, asked and summed up by one runner: its table and its parts."""
