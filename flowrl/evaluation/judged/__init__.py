"""Benchmarks whose images a judge reads."""
