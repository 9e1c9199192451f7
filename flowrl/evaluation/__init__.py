"""Benchmarks: how models are drawn, judged and summed up."""
