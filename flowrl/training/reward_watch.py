"""When a reward stops a run: it says nothing (one value for all, or for each group), or fails too often."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor

from flowrl.advantages.normalise import set_statistics
from flowrl.rewards import ABSENT
from flowrl.runs.vital_signs import COMPARED, EQUAL, EQUAL_LIMIT, alarm

_SAID = {"not_finite": " (NaN or infinity)", "garbage": " (a reply of another form)", "bad_value": " (no number)"}
WINDOW = 10  # iterations over which to count failed images
CONSTANT_LIMIT = 3  # iterations in a row whose images all got the same reward before the run stops
_ALIKE = 12  # images, beyond the first of their groups, that must agree to rule out chance

Compared = tuple[Tensor, Tensor]
"""What a method compares: rewards [n] of all processes, or [K, n] where each counts by itself, NaN where one failed;
and the group [n] of each image."""


class RewardWatch:
    """Looks at every iteration's rewards; its memory is in the run's counters, and so in checkpoints."""

    def __init__(self, counters: dict[str, Any], *, max_invalid_ratio: float) -> None:
        """`counters` need `constant` and `failed`; `equal`, of iterations whose groups all agreed, is added."""
        self.counters, self.max_invalid_ratio = counters, max_invalid_ratio

    def complaint(
        self, reward_B: Tensor, iteration: int, errors: Counter[str], drawn: str = "", compared: Compared | None = None
    ) -> str:
        """Why the run cannot go on; empty if it can.

        Args:
            reward_B: [B] of all processes, NaN where an image failed.
            errors: why images failed, on all processes.
            drawn: numbers of images and prompts behind the rewards, if completions on the way are scored too.
            compared: the values that are learned from if images are compared only within groups; else None.
        """
        values = reward_B[~reward_B.isnan()]
        absent = max((errors[word] for word in errors if word.endswith(ABSENT)), default=0)
        failures = max(0, len(reward_B) - len(values) - absent)
        history: list[tuple[int, int]] = [*self.counters["failed"], (failures, len(reward_B))]
        recent = self.counters["failed"] = history[-WINDOW:]
        if len(values) + absent == 0 or too_many_failures(recent, self.max_invalid_ratio):
            failed, scored = (sum(column) for column in zip(*recent, strict=True))
            reasons = [f"{word} {many}{_SAID.get(word.rpartition('/')[2], '')}" for word, many in errors.most_common()]
            why = ", ".join(reasons) or "no reason was given"
            images = f"scored images ({drawn}, and completions on their way)" if drawn else "images"
            last = "iteration" if len(recent) == 1 else f"{len(recent)} iterations"
            return (
                f"iteration {iteration}: {len(reward_B) - len(values)} of {len(reward_B)} {images} got no valid reward "
                f"({failed} of {scored} in the last {last}; max_invalid_ratio is {self.max_invalid_ratio:g}, the share "
                f"that may fail in {WINDOW} iterations): {why}. Fix the reward or its server"
            )
        if absent:  # a few votes may well agree
            return ""
        rows = values[None] if compared is None else compared[0].reshape(-1, len(compared[1]))
        constant = bool((rows.nan_to_num(-torch.inf).amax(1) <= rows.nan_to_num(torch.inf).amin(1)).all())
        self.counters["constant"] = self.counters["constant"] + 1 if constant else 0
        if self.counters["constant"] >= CONSTANT_LIMIT:
            return (
                f"the reward was {float(values[0]):g} for every image in {CONSTANT_LIMIT} iterations in a row, so "
                "nothing can be learned: check that the reward reads the images, and prefer one that grades partial "
                "success"
            )
        return "" if compared is None else self._of_groups(*compared)

    def warning(self) -> str:
        """What is wrong with an iteration that does not yet stop the run; empty for none."""
        iterations, _, values = self._equal
        return alarm("equal_groups", iterations, values, iterations=iterations).get("equal_groups", "")

    @property
    def _equal(self) -> tuple[int, int, list[float]]:
        """Iterations in a row whose groups all agreed, images of them beyond the first of a group, and up to three
        different values that they had."""
        found: tuple[int, int, list[float]] = self.counters.get("equal", (0, 0, []))
        return found

    def _of_groups(self, reward: Tensor, group: Tensor) -> str:
        """Why the run cannot go on if the images of every group get the same reward; empty if it can. A verdict of two
        values is equal by chance too, and where a policy always or never succeeds: it has more iterations."""
        _, place = group.unique(return_inverse=True)
        sets = set_statistics(reward.double().reshape(-1, len(group)), place, int(place.max()) + 1)
        several = sets.count > 1
        if not bool(several.any()):
            return ""
        if not bool(sets.constant[several].all()):
            self.counters["equal"] = (0, 0, [])
            return ""
        iterations, alike, values = self._equal
        alike += int((sets.count[several] - 1).sum())
        values = sorted({*values, *reward[~reward.isnan()].tolist()})[:3]
        self.counters["equal"] = iterations + 1, alike, values
        verdict = len(values) <= 2 and (0.0 in values or sum(values) == 0)
        if iterations + 1 < (WINDOW if verdict else EQUAL_LIMIT) or alike < _ALIKE or len(values) < 2:
            return ""
        return f"{EQUAL} in {iterations + 1} iterations in a row, so nothing can be learned: {COMPARED}"


def too_many_failures(history: list[tuple[int, int]], limit: float) -> bool:
    """Whether the failed images of the last `WINDOW` iterations exceed a share `limit` of that many iterations' images;
    `history` has (failed, all) images of each, oldest first."""
    recent = history[-WINDOW:]
    failed, scored = sum(f for f, _ in recent), sum(n for _, n in recent)
    return failed > limit * scored * WINDOW / len(recent)
