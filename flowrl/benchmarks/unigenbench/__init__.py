"""UniGenBench: its test points, prompt files, a judge's replies, scores and result files."""

from flowrl.benchmarks.unigenbench.point_scores import Scores, Tally, aggregate
from flowrl.benchmarks.unigenbench.replies import parse_reply

__all__ = ["Scores", "Tally", "aggregate", "parse_reply"]
