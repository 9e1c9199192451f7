"""The last words of a run: what improved, by how much, where the files are, what to try next."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from statistics import fmean
from typing import Any

from flowrl.benchmarks.geneval.metadata import TASKS
from flowrl.commands.report.result import conclusion
from flowrl.config.train import TrainConfig
from flowrl.files import write_atomically
from flowrl.statistics.bootstrap import UNKNOWN, Interval
from flowrl.statistics.means import ScoreRow, claim, partners, stratified_score, task_scores, unknown_because
from flowrl.training.evaluation_rows import SCORE, Row, evaluations, read_rows, score_interval, score_rows

_WORDS = {
    "established improvement": "Better", "established loss": "Worse", "not established": "Not established",
    "not testable": "Not testable",
}  # fmt: skip


def print_summary(folder: Path, config: TrainConfig, report: Path, *, finished: bool) -> None:
    """Prints what came out, at most 80 columns but for long paths; writes `summary.json` of a finished run."""
    rows = _rows(folder)
    rewards = [row["reward"] for row in rows if "reward" in row]
    lines, scores = _scores(folder)
    if not lines:
        lines, scores = _held_out_rewards(folder, rows)
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
        print(_try(folder))
        if config.eval_every and _still_rising(rows):
            print(f"Longer    flowrl train resume={folder} \\\n            num_iterations={2 * config.num_iterations}")


def _held_out_rewards(folder: Path, rows: list[dict[str, float]]) -> tuple[list[str], dict[str, Any]]:
    """First and last evaluation of every reward and their difference by prompts, where no GenEval verdicts are."""
    numbers = evaluations(folder)
    names = [
        key.removeprefix("eval/reward/").removesuffix("_low")
        for key in next((row for row in rows if any(key.startswith("eval/reward/") for key in row)), {})
        if key.endswith("_low")
    ]
    if len(numbers) < 2 or not names:
        return [], {}
    before, after = read_rows(folder, numbers[0]), read_rows(folder, numbers[-1])
    lines = [f"Held-out rewards, {len(after)} samples, same prompts and seeds", ""]
    lines.append(f"  {'reward':<24}{'before':>9}{'after':>9}    change, 95 % interval")
    found = {}
    for name in names:
        start, end, change = _change(before, after, f"eval/reward/{name}")
        lines.append(
            f"  {name:<24}{start:>9.4g}{end:>9.4g}  {change.mean:>+8.3g} ({change.low:+.3g} to {change.high:+.3g})"
        )
        found[name] = {"before": start, "after": end, "change": _plain(change)}
    return [*lines, ""], {"rewards": found}


def _change(before: list[Row], after: list[Row], metric: str) -> tuple[float, float, Interval]:
    """Means of a reward and its mean difference over the samples with a score both times."""
    start, end = partners(score_rows(before, metric), score_rows(after, metric))
    if not start:
        return UNKNOWN.mean, UNKNOWN.mean, UNKNOWN
    change = score_interval(end, metric, base=start)
    return fmean(row.value for row in start), fmean(row.value for row in end), change


def _try(folder: Path) -> str:
    """A command that samples from the run, with a prompt that it was evaluated on where it was."""
    listed = folder / "samples" / "prompts.json"
    asked = json.loads(listed.read_text(encoding="utf-8"))[0] if listed.exists() else {"prompt": "PROMPT"}
    images = [f"--source {shlex.quote(path)}" for path in asked.get("sources", [])]
    words = [f"Try       flowrl sample {folder}", f"--prompt {shlex.quote(asked['prompt'])}", *images]
    return " \\\n            ".join(words)


def _scores(folder: Path) -> tuple[list[str], dict[str, Any]]:
    """The table of GenEval scores before and after, and its numbers; nothing where there are not two evaluations."""
    numbers = evaluations(folder)
    if len(numbers) < 2:
        return [], {}
    before, after = (score_rows(read_rows(folder, number), SCORE) for number in (numbers[0], numbers[-1]))
    pair = partners(before, after)
    if not pair[0]:
        return [], {}
    change, tasks, later = stratified_score(pair[1], base=pair[0]), task_scores(before), task_scores(after)
    start, end = stratified_score(before), stratified_score(after)
    lines = [f"Held-out GenEval score, {len(after)} images, same prompts and seeds", ""]
    lines.append(f"  {'task':<15}{'before':>8}{'after':>8}{'change':>9}")
    for task in (task for task in TASKS if task in tasks and task in later):
        lines.append(_line(task, tasks[task].mean, later[task].mean))
    lines += [_line("score", start.mean, end.mean), "", *(f"  {line}" for line in _verdict(change, pair[0])), ""]
    return lines, {
        "before": _plain(start), "after": _plain(end), "change": _plain(change),
        "tasks": {task: {"before": tasks[task].mean, "after": later[task].mean} for task in tasks if task in later},
    }  # fmt: skip


def _line(name: str, before: float, after: float) -> str:
    return f"  {name:<15}{before:>8.3f}{after:>8.3f}{after - before:>+9.3f}"


def _verdict(change: Interval, rows: list[ScoreRow]) -> list[str]:
    """What the interval of a change says, and of what it speaks."""
    word = conclusion(change)
    if not change.known:
        return [f"{_WORDS[word]}: {change.mean:+.3f}, {unknown_because(rows)}"]
    said = f"{_WORDS[word]}: {change.mean:+.3f}, 95 % interval {change.low:+.3f} to {change.high:+.3f}"
    said += " includes 0" if word == "not established" else ""
    return [said, f"The interval speaks of {claim(rows)}, not of another training."]


def _plain(interval: Interval) -> dict[str, float]:
    return {"mean": interval.mean, "low": interval.low, "high": interval.high}


def _rows(folder: Path) -> list[dict[str, float]]:
    path = folder / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def _still_rising(rows: list[dict[str, float]]) -> bool:
    """Whether the last evaluation was the best one."""
    scores = [row["eval/geneval/score"] for row in rows if "eval/geneval/score" in row]
    return len(scores) > 1 and scores[-1] == max(scores)
