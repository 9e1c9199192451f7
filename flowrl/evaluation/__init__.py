"""Benchmarks: draws, judges and sums up the images of models."""
