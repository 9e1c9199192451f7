"""UniGenBench: its test points, prompt files, a judge's replies, scores and result files."""
