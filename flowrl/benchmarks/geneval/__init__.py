"""GenEval: its rules, prompts, metadata and scores."""

from flowrl.benchmarks.geneval.detections import Detection
from flowrl.benchmarks.geneval.rules import Verdict, verdict

__all__ = ["Detection", "Verdict", "verdict"]
