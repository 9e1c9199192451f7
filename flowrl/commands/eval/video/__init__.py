"""Evaluations of models that make videos: panels of rewards with temporal diagnostics, VBench, and clips to look at."""
