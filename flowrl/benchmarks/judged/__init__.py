"""Benchmarks in which a judge reads each image: cases, questions, how replies are read, and what they add up to."""
