"""The rows of an evaluation: one per image, as `eval/iteration_<n>.jsonl` of a run folder holds them.

    {"prompt_id": 3, "prompt": "a photo of a red circle", "key": "a photo of a red circle", "task": "colors",
     "sample": 0, "seed": 5470183, "correct": true, "graded": 1.0,
     "rewards": {"geneval": 1.0, "geneval/official": 1.0}}

`key` is the prompt with the names of its images, `seed` that of the start noise: two evaluations are paired by both.
`prompt_id` is a prompt's place in this one; rows of older runs are paired by it and `sample`.
Videos of a run with `eval.temporal` have `"temporal": {"flicker": 0.01, ...}` too, null where a clip is too short.
A value is null where the reward failed, and `correct` and `graded` where no GenEval reward took part.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from flowrl.benchmarks.geneval.metadata import TASKS
from flowrl.runtime.files import read_json_lines
from flowrl.statistics.bootstrap import Interval
from flowrl.statistics.means import ScoreRow, pooled, stratified_score, task_scores

Row = dict[str, Any]

SCORE, REWARD, GENEVAL = "eval/geneval/score", "eval/reward/", "eval/geneval/"
"""The metric of GenEval's verdicts, and the prefixes of metrics with a value for every image."""
TEMPORAL = "eval/temporal/"
"""The prefix of diagnostics, with a value for every video."""


def main_metric(keys: Iterable[str]) -> str | None:
    """GenEval's score if it was measured, or else the first held-out reward; None if there is neither."""
    names = list(keys)
    return SCORE if SCORE in names else next((key for key in names if key.startswith(REWARD)), None)


def score_rows(rows: Sequence[Mapping[str, Any]], metric: str = SCORE) -> list[ScoreRow]:
    """An evaluation's images with their values of a metric, if they have one; of rows with one task, prompt and seed
    the last counts."""
    found = {}
    for row in rows:
        task, value = str(row.get("task")), row.get("correct")
        if metric != SCORE:
            name = metric.removeprefix(GENEVAL)
            if metric.startswith((REWARD, TEMPORAL)):
                prefix, kept = (REWARD, "rewards") if metric.startswith(REWARD) else (TEMPORAL, "temporal")
                value = (row.get(kept) or {}).get(metric.removeprefix(prefix))
            elif name == "graded":
                value = row.get("graded")
            elif name != task:
                continue
        prompt = row.get("key", row.get("prompt_id", row.get("prompt")))
        sample = row.get("seed", row.get("sample", 0))
        if isinstance(value, int | float) and math.isfinite(value) and isinstance(prompt, int | str):
            found[task, prompt, sample] = ScoreRow(task=task, prompt=prompt, sample=int(sample), value=float(value))
    return list(found.values())


def score_interval(rows: Sequence[ScoreRow], metric: str, *, base: Sequence[ScoreRow] | None = None) -> Interval:
    """The mean of a metric's `score_rows`, or of the differences to those of another evaluation (`base`) image by
    image, with its interval: the GenEval score over tasks, all others over images."""
    return (stratified_score if metric == SCORE else pooled)(rows, base=base)


def summary(rows: Sequence[Row]) -> Row:
    """Means with 95 % intervals of every reward, of diagnostics of videos if measured, and of the GenEval score (macro
    over tasks) if there are verdicts."""
    metrics: Row = {}
    for name in dict.fromkeys(name for row in rows for name in row["rewards"]):  # failed images may lack sub-scores
        known = score_rows(rows, f"{REWARD}{name}")
        if "/" not in name and len(known) < len(rows):
            metrics[f"{REWARD}{name}_invalid_ratio"] = 1 - len(known) / len(rows)
        if not known:
            continue
        interval = pooled(known)
        metrics[f"{REWARD}{name}"] = interval.mean
        if "/" not in name:
            metrics |= {f"{REWARD}{name}_low": interval.low, f"{REWARD}{name}_high": interval.high}
    for name in dict.fromkeys(name for row in rows for name in row.get("temporal", ())):
        if known := score_rows(rows, f"{TEMPORAL}{name}"):
            interval = pooled(known)
            low, high = f"{TEMPORAL}{name}_low", f"{TEMPORAL}{name}_high"
            metrics |= {f"{TEMPORAL}{name}": interval.mean, low: interval.low, high: interval.high}
    verdicts = score_rows(rows)
    if verdicts:
        score, by_task = stratified_score(verdicts), task_scores(verdicts)
        graded = sum(row["graded"] for row in rows if row["correct"] is not None) / len(verdicts)
        metrics |= {
            SCORE: score.mean,
            f"{SCORE}_low": score.low,
            f"{SCORE}_high": score.high,
            f"{GENEVAL}graded": graded,
            **{f"{GENEVAL}{task}": by_task[task].mean for task in TASKS if task in by_task},
        }
    return metrics


def evaluations(folder: Path) -> list[int]:
    """Iterations of a run that were evaluated, in order."""
    return sorted(int(path.stem.removeprefix("iteration_")) for path in (folder / "eval").glob("iteration_*.jsonl"))


def remove_evaluations(folder: Path, *, after: int) -> None:
    """Removes rows and samples of evaluations after an iteration from a run folder."""
    for number in [number for number in evaluations(folder) if number > after]:
        name = f"iteration_{number:06d}"
        shutil.rmtree(folder / "samples" / name, ignore_errors=True)
        for path in (folder / "samples").glob(f"{name}.*"):
            path.unlink()
        (folder / "eval" / f"{name}.jsonl").unlink()


def read_rows(folder: Path, iteration: int) -> list[Row]:
    """Rows of an evaluation that a run folder holds."""
    return read_json_lines(folder / "eval" / f"iteration_{iteration:06d}.jsonl")
