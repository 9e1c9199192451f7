"""Credit assignment: from a rollout and its advantages to training rows, one file a method."""

from __future__ import annotations

from flowrl.credit.outcome import outcome_rows

__all__ = ["outcome_rows"]
