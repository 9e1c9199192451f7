"""The last words of a run: what improved, by how much, where the files are, what to try next."""

from __future__ import annotations

import json
from pathlib import Path

from flowrl.benchmarks.geneval import TASKS
from flowrl.config import TrainConfig
from flowrl.evaluate import read_rows, score_rows
from flowrl.run import write_atomically
from flowrl.statistics import Interval, paired_difference, stratified_score, task_scores


def print_summary(folder: Path, config: TrainConfig, report: Path, *, finished: bool) -> None:
    """Prints at most 80 columns, and writes the numbers to `summary.json`."""
    print()
    lines = _score_lines(folder)
    print("\n".join(lines))
    if not finished:
        print(f"\nStopped before the end. Continue with:\n  flowrl train resume={folder}")
    print(f"\nReport    {report}")
    print(f"Samples   {folder / 'samples'}")
    print(f"LoRA      {folder / 'lora'}  (pipe.load_lora_weights)")
    if finished:
        print(f'Try       flowrl sample {folder} --prompt "a photo of a red circle"')
        if config.eval_every and _still_rising(folder):
            print(f"Longer    flowrl train resume={folder} num_iterations={2 * config.num_iterations}")


def _score_lines(folder: Path) -> list[str]:
    """The table of scores before and after; a sentence where the run has no evaluations to compare."""
    numbers = sorted(int(path.stem.removeprefix("iteration_")) for path in (folder / "eval").glob("iteration_*.jsonl"))
    rewards = [row["reward"] for row in _rows(folder) if "reward" in row]
    trained = f"Mean training reward {rewards[0]:.3f} -> {rewards[-1]:.3f}." if rewards else "Nothing was trained."
    if len(numbers) < 2:
        return [trained]
    before, after = (score_rows(read_rows(folder, number)) for number in (numbers[0], numbers[-1]))
    if not before:
        return [trained]
    change, tasks, later = paired_difference(before, after), task_scores(before), task_scores(after)
    start, end = stratified_score(before), stratified_score(after)
    lines = [f"Held-out GenEval score, {len(after)} images, same prompts and seeds", ""]
    lines.append(f"  {'task':<15}{'before':>8}{'after':>8}{'change':>9}")
    for task in (task for task in TASKS if task in tasks):
        lines.append(_line(task, tasks[task].mean, later[task].mean))
    lines += [_line("score", start.mean, end.mean), "", f"  {_verdict(change)}", "", trained]
    summary = {
        "iterations": numbers[-1],
        "before": _plain(start), "after": _plain(end), "change": _plain(change),
        "tasks": {task: {"before": tasks[task].mean, "after": later[task].mean} for task in tasks},
    }  # fmt: skip
    write_atomically(folder / "summary.json", json.dumps(summary, indent=1) + "\n")
    return lines


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


def _still_rising(folder: Path) -> bool:
    """Whether the last evaluation was the best one."""
    scores = [row["eval/geneval/score"] for row in _rows(folder) if "eval/geneval/score" in row]
    return len(scores) > 1 and scores[-1] == max(scores)
