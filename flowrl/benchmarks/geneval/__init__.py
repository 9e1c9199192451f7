"""GenEval: its rules, prompts, metadata and scores."""

from flowrl.benchmarks.geneval.rules import Detection, Verdict, verdict

__all__ = ["Detection", "Verdict", "verdict"]
