"""Benchmarks: pure rules, prompts and parsers. They take the results of a detector or a judge and know no model."""
