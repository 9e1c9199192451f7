"""The last words of a run: what improved, by how much, where the files are, what to try next."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from flowrl.benchmarks.geneval import TASKS
from flowrl.config import TrainConfig
from flowrl.evaluate import read_rows, score_rows
from flowrl.run import write_atomically
from flowrl.statistics import Interval, paired_difference, stratified_score, task_scores


def print_summary(folder: Path, config: TrainConfig, report: Path, *, finished: bool) -> None:
    """Prints what came out, at most 80 columns but for long paths; writes `summary.json` of a finished run."""
    rows = _rows(folder)
    rewards = [row["reward"] for row in rows if "reward" in row]
    lines, scores = _scores(folder)
    lines = lines or _held_out_rewards(rows)
    if rewards:  # training on pairs of files has none
        lines = [*lines, f"Mean training reward {rewards[0]:.3f} -> {rewards[-1]:.3f}"]
    print("\n" + "\n".join(lines))
    if finished:
        ends = {"reward": {"first": rewards[0], "last": rewards[-1]}} if rewards else {}
        summary: dict[str, Any] = {"iterations": config.num_iterations, **ends, **scores}
        write_atomically(folder / "summary.json", json.dumps(summary, indent=1) + "\n")
    else:
        print(f"\nStopped before the end. Continue with:\n  flowrl train resume={folder}")
    print(f"\nReport    {report}")
    if (folder / "samples").exists():
        print(f"Samples   {folder / 'samples'}")
    print(f"LoRA      {folder / 'lora'}  (pipe.load_lora_weights)")
    if finished:
        print(f'Try       flowrl sample {folder} \\\n            --prompt "a photo of a red circle"')
        if config.eval_every and _still_rising(rows):
            print(f"Longer    flowrl train resume={folder} \\\n            num_iterations={2 * config.num_iterations}")


def _held_out_rewards(rows: list[dict[str, float]]) -> list[str]:
    """First and last evaluation of every reward with its interval, where there are no GenEval verdicts."""
    evaluations = [row for row in rows if any(key.startswith("eval/") for key in row)]
    if len(evaluations) < 2:
        return []
    lines = ["Held-out rewards (95 % interval), same prompts and seeds", ""]
    for key in (key.removesuffix("_low") for key in evaluations[0] if key.endswith("_low")):
        before, after = (f"{row[key]:.4g} ({row[f'{key}_low']:.4g} to {row[f'{key}_high']:.4g})" for row in
                         (evaluations[0], evaluations[-1]))  # fmt: skip
        lines += [f"  {key.removeprefix('eval/reward/')}", f"    before  {before}", f"    after   {after}"]
    return [*lines, ""]


def _scores(folder: Path) -> tuple[list[str], dict[str, Any]]:
    """The table of GenEval scores before and after, and its numbers; nothing where there are not two evaluations."""
    numbers = sorted(int(path.stem.removeprefix("iteration_")) for path in (folder / "eval").glob("iteration_*.jsonl"))
    if len(numbers) < 2:
        return [], {}
    before, after = (score_rows(read_rows(folder, number)) for number in (numbers[0], numbers[-1]))
    if not before:
        return [], {}
    change, tasks, later = paired_difference(before, after), task_scores(before), task_scores(after)
    start, end = stratified_score(before), stratified_score(after)
    lines = [f"Held-out GenEval score, {len(after)} images, same prompts and seeds", ""]
    lines.append(f"  {'task':<15}{'before':>8}{'after':>8}{'change':>9}")
    for task in (task for task in TASKS if task in tasks):
        lines.append(_line(task, tasks[task].mean, later[task].mean))
    lines += [_line("score", start.mean, end.mean), "", f"  {_verdict(change)}", ""]
    return lines, {
        "before": _plain(start), "after": _plain(end), "change": _plain(change),
        "tasks": {task: {"before": tasks[task].mean, "after": later[task].mean} for task in tasks},
    }  # fmt: skip


def _line(name: str, before: float, after: float) -> str:
    return f"  {name:<15}{before:>8.3f}{after:>8.3f}{after - before:>+9.3f}"


def _verdict(change: Interval) -> str:
    numbers = f"{change.mean:+.3f}, 95 % interval {change.low:+.3f} to {change.high:+.3f}"
    if change.low > 0:
        return f"Better: {numbers}"
    if change.high < 0:
        return f"Worse: {numbers}"
    return f"Not established: {numbers} includes 0"


def _plain(interval: Interval) -> dict[str, float]:
    return {"mean": interval.mean, "low": interval.low, "high": interval.high}


def _rows(folder: Path) -> list[dict[str, float]]:
    path = folder / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def _still_rising(rows: list[dict[str, float]]) -> bool:
    """Whether the last evaluation was the best one."""
    scores = [row["eval/geneval/score"] for row in rows if "eval/geneval/score" in row]
    return len(scores) > 1 and scores[-1] == max(scores)
