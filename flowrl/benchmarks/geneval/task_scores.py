"""GenEval's numbers from the verdicts of many images."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from flowrl.benchmarks.geneval.metadata import TASKS


@dataclass(frozen=True, slots=True)
class TaskScore:
    """Correct images of one task."""

    correct: int
    total: int

    @property
    def mean(self) -> float:
        return self.correct / self.total


@dataclass(frozen=True, kw_only=True, slots=True)
class Scores:
    """A benchmark run in numbers; macro and micro differ, and publications quote either without saying which.

    `macro` (the benchmark's own overall) is the unweighted mean of the task means, over the tasks that occur; `micro`
    is the mean over all images (what Flow-GRPO logs). `prompts_correct` is the share of distinct prompts with at
    least one correct image. `tasks` holds the tasks that occur, in the benchmark's order.
    """

    macro: float
    micro: float
    prompts_correct: float
    num_images: int
    num_prompts: int
    tasks: dict[str, TaskScore]


def aggregate(rows: Iterable[Mapping[str, Any]]) -> Scores:
    """Sums up verdicts, one row an image, as in the benchmark's result file: keys `tag`, `prompt`, `correct`.

    Raises:
        ValueError: for no rows, a row without these keys, or a tag that is no task.
    """
    outcomes: dict[str, list[bool]] = {task: [] for task in TASKS}
    solved: dict[str, bool] = {}
    for index, row in enumerate(rows):
        missing = [key for key in ("tag", "prompt", "correct") if key not in row]
        if missing or row["tag"] not in TASKS:
            raise ValueError(
                f"row {index} must have the keys tag (one of {', '.join(TASKS)}), prompt and correct, got "
                f"{dict(row)!r}: pass one mapping for each image."
            )
        correct = bool(row["correct"])
        outcomes[row["tag"]].append(correct)
        solved[row["prompt"]] = solved.get(row["prompt"], False) or correct
    tasks = {task: TaskScore(sum(results), len(results)) for task, results in outcomes.items() if results}
    if not tasks:
        raise ValueError("aggregate needs the verdict of at least one image, got no rows.")
    num_images = sum(score.total for score in tasks.values())
    return Scores(
        macro=sum(score.mean for score in tasks.values()) / len(tasks),
        micro=sum(score.correct for score in tasks.values()) / num_images,
        prompts_correct=sum(solved.values()) / len(solved),
        num_images=num_images,
        num_prompts=len(solved),
        tasks=tasks,
    )
