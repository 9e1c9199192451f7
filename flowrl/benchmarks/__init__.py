"""Benchmarks: pure rules, prompts and parsers. They take what a detector or a judge said and know no model."""
