"""When a reward stops a run: it says nothing (one value for everything), or fails too often."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch import Tensor

WINDOW = 10  # iterations over which failed images are counted
CONSTANT_LIMIT = 3  # iterations in a row whose images all got the same reward before the run stops


class RewardWatch:
    """Looks at every iteration's rewards; what it remembers is in the run's counters, and so in checkpoints."""

    def __init__(self, counters: dict[str, Any], *, max_invalid_ratio: float) -> None:
        """`counters` need `constant` and `failed`."""
        self.counters, self.max_invalid_ratio = counters, max_invalid_ratio

    def complaint(self, reward_B: Tensor, iteration: int, errors: Counter[str], drawn: str = "") -> str:
        """Why the run cannot go on; empty where it can.

        Args:
            reward_B: [B] of all processes, NaN where an image failed.
            iteration: for the message.
            errors: why images failed, on all processes.
            drawn: of how many images and prompts the rewards are, where completions on the way are scored too.
        """
        values = reward_B[~reward_B.isnan()]
        history: list[tuple[int, int]] = [*self.counters["failed"], (len(reward_B) - len(values), len(reward_B))]
        recent = self.counters["failed"] = history[-WINDOW:]
        if len(values) == 0 or too_many_failures(recent, self.max_invalid_ratio):
            failed, scored = (sum(column) for column in zip(*recent, strict=True))
            why = ", ".join(_said(word, count) for word, count in errors.most_common()) or "no reason was given"
            images = f"scored images ({drawn}, and completions on their way)" if drawn else "images"
            last = "iteration" if len(recent) == 1 else f"{len(recent)} iterations"
            return (
                f"iteration {iteration}: {len(reward_B) - len(values)} of {len(reward_B)} {images} got no valid reward "
                f"({failed} of {scored} in the last {last}; max_invalid_ratio is "
                f"{self.max_invalid_ratio:g} of {WINDOW} iterations): {why}. Fix the reward or its server"
            )
        self.counters["constant"] = self.counters["constant"] + 1 if bool((values == values[0]).all()) else 0
        if self.counters["constant"] >= CONSTANT_LIMIT:
            return (
                f"the reward was {float(values[0]):g} for every image in {CONSTANT_LIMIT} iterations in a row, so "
                "nothing can be learned: check that the reward reads the images, and prefer one that grades partial "
                "success"
            )
        return ""


def _said(word: str, count: int) -> str:
    """A reason with its number."""
    return f"{word} {count}{' (NaN or infinity)' if word.endswith('not_finite') else ''}"


def too_many_failures(history: list[tuple[int, int]], limit: float) -> bool:
    """Whether the failed images of the last `WINDOW` iterations exceed `limit` of that many iterations' images.

    Args:
        history: (failed, all) images of iterations, oldest first.
        limit: share in [0, 1].
    """
    recent = history[-WINDOW:]
    failed, scored = sum(f for f, _ in recent), sum(n for _, n in recent)
    return failed > limit * scored * WINDOW / len(recent)
