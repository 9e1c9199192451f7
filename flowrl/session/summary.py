"""The summary at the end of a run: what improved, by how much, where the files are, what to try next."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

from flowrl.benchmarks.geneval.metadata import TASKS
from flowrl.config.rewards import told_apart
from flowrl.config.train import TrainConfig, resolve_path
from flowrl.prompts.loading import load_prompts
from flowrl.prompts.overlap import held_out_or_shared
from flowrl.rendering.markup import plural, settled
from flowrl.rendering.terminal_text import align, wrapped
from flowrl.runs.evaluation_rows import SCORE, Row, evaluations, read_rows, score_interval, score_rows
from flowrl.runs.held_out_result import conclusion, untold
from flowrl.runs.manifest import read_manifest
from flowrl.runs.run_data import failure_reasons, shown_prompts, warnings_by_kind
from flowrl.runtime.files import plain, read_json_lines, write_atomically
from flowrl.statistics.bootstrap import UNKNOWN, Interval
from flowrl.statistics.means import claim, partners, stratified_score, task_scores
from flowrl.training.model_files import MODEL

_WORDS = {
    "established improvement": "Better",
    "established loss": "Worse",
    "not established": "Not established",
    "not testable": "Not testable",
}

OFFLINE = "wandb/offline-run-*"
"""What W&B keeps in a run folder and sends later."""


def summarise(folder: Path, config: TrainConfig, report: Path | None, *, finished: bool) -> str:
    """The results in at most 80 columns, except for long paths; writes `summary.json` of a finished run."""
    path, quoted = folder / "metrics.jsonl", shlex.quote(str(folder))
    rows = read_json_lines(path) if path.exists() else []
    rewards = [row["reward"] for row in rows if "reward" in row]
    word, shared = held_out_or_shared(read_manifest(folder).get("eval_prompts"))
    numbers = evaluations(folder)
    lines, scores = [f"{shared}.", ""] if shared and numbers else [], dict[str, Any]()
    if len(numbers) > 1:
        sides = read_rows(folder, numbers[0]), read_rows(folder, numbers[-1])
        table, scores = _scores(*sides, word.capitalize())
        told = told_apart(asdict(config))
        more, found = _held_out_rewards(*sides, rows, word.capitalize(), told, besides_geneval=bool(table))
        lines, scores = [*lines, *table, *more], scores | found
    if rewards:  # training on pairs of files has none
        lines = [*lines, f"Mean training reward {' -> '.join(map(_number, rewards[:1] + rewards[1:][-1:]))}"]
    failed = failure_reasons(rows)
    lines += [f"Warning   rewards failed, and what failed taught nothing: {failed}"] * bool(failed)
    for name, said in warnings_by_kind(rows).items():
        times = f"{plural(len(said), 'time')}, from iteration {said[0][0]} on (see the report)"
        lines.append(f"Warning   {name.replace('_', ' ')}: {times}")
    if finished:
        ends = {"reward": {"first": rewards[0], "last": rewards[-1]}} if rewards else {}
        summary: dict[str, Any] = {"iterations": config.num_iterations, **ends, **scores}
        write_atomically(folder / "summary.json", json.dumps(plain(summary), indent=1) + "\n")
    else:
        lines += ["", "Stopped before the end. Continue with:", f"  flowrl train resume={quoted}"]
    lines += ["", *_places(folder, config, report)]
    if finished:
        lines.append(_try(folder, config))
        official = [row["eval/geneval/score"] for row in rows if "eval/geneval/score" in row]
        if config.eval_every and len(official) > 1 and official[-1] == max(official):  # it still rises
            longer = 2 * config.num_iterations
            lines.append(f"Longer    flowrl train resume={quoted} \\\n            num_iterations={longer}")
    return "\n".join(["", *lines])


def _places(folder: Path, config: TrainConfig, report: Path | None) -> list[str]:
    offline = config.logging.wandb == "offline" and any(folder.glob(OFFLINE))  # the shell finds those of a resumed run
    places = {
        f"Report    {report}": report is not None,
        f"Samples   {folder / 'samples'}": (folder / "samples").exists(),
        f"LoRA      {folder / 'lora'}  (pipe.load_lora_weights)": (folder / "lora").exists(),
        f"Model     {folder / MODEL}  (DiffusionPipeline.from_pretrained)": (folder / MODEL).exists(),
        f"W&B       wandb sync {shlex.quote(str(folder))}/{OFFLINE}": offline,
    }
    return [line for line, there in places.items() if there]


def _number(value: float | None) -> str:
    """A number with three decimals, or in scientific notation if these would hide it; a dash if it is unknown."""
    if value is None or not math.isfinite(value):
        return "-"
    return f"{value:.3f}" if value == 0 or 1e-2 <= abs(value) < 1e6 else f"{value:.3g}"


def _held_out_rewards(
    before: list[Row], after: list[Row], rows: list[Row], word: str, told: Mapping[str, str], *, besides_geneval: bool
) -> tuple[list[str], dict[str, Any]]:
    """First and last evaluation of every reward and their difference over prompts, which are called `word`; rewards
    are `told` apart. GenEval's may be left out, because its verdicts have a table of their own."""
    names = [
        key.removeprefix("eval/reward/").removesuffix("_low")
        for key in next((row for row in rows if any(key.startswith("eval/reward/") for key in row)), {})
        if key.startswith("eval/reward/")
        and key.endswith("_low")
        and not (besides_geneval and any(f"{key.removesuffix('_low')}/official" in row for row in rows))
    ]
    if not names:
        return [], {}
    lines = [f"{word} rewards, {plural(len(after), 'sample')}, same prompts and seeds", ""]
    cells: list[tuple[str, ...]] = []
    found: dict[str, Any] = {}
    reasons: dict[str, list[str]] = {}
    for name in names:
        start, end, change, reason = _change(before, after, f"eval/reward/{name}")
        bounds = f"{change.low:+.3g} to {change.high:+.3g}" if change.known else "-"
        if reason:
            reasons.setdefault(reason, []).append(name)
        figures = _cell(start, ".4g"), _cell(end, ".4g"), _cell(change.mean, "+.3g"), f"({bounds})"
        cells.append((told.get(name, name), *figures))
        found[name] = {"before": start, "after": end, "change": change}
    lines += align(("reward", "before", "after", "change", "95 % interval"), cells, "  ").splitlines()
    lines += [wrapped(f"No interval for {', '.join(those)}: {reason}", "  ", "  ") for reason, those in reasons.items()]
    return [*lines, ""], {"rewards": found}


def _cell(value: float, form: str) -> str:
    return f"{value:{form}}" if math.isfinite(value) else "-"


def _change(before: list[Row], after: list[Row], metric: str) -> tuple[float, float, Interval, str]:
    """Both means of a reward, the mean difference over samples scored twice, and why it has no interval (or "")."""
    start, end = partners(score_rows(before, metric), score_rows(after, metric))
    if not start:
        return UNKNOWN.mean, UNKNOWN.mean, UNKNOWN, untold(start, end)
    change = score_interval(end, metric, base=start)
    first, last = (fmean(row.value for row in side) for side in (start, end))
    return first, last, change, "" if change.known else untold(start, end)


def _try(folder: Path, config: TrainConfig) -> str:
    """A command that samples from the run with one of its evaluation prompts, or with a training prompt."""
    first = shown_prompts(folder / "samples", [])[:1]
    asked: Mapping[str, Any] = first[0] if first else {}
    if not first:
        with suppress(ValueError, OSError):  # it cannot be read any more
            prompt = load_prompts(config.prompts.train, resolve=resolve_path)[0]
            asked = {"prompt": prompt.text, "sources": [*prompt.sources]}
    images = [f"--source {shlex.quote(str(path))}" for path in asked.get("sources", [])]
    words = [
        f"Try       flowrl sample {shlex.quote(str(folder))}",
        f"--prompt {shlex.quote(str(asked.get('prompt', 'PROMPT')))}",
        *images,
    ]
    return " \\\n            ".join(words)


def _scores(first: list[Row], last: list[Row], word: str) -> tuple[list[str], dict[str, Any]]:
    """The table of GenEval scores before and after, and its numbers; empty if there are no verdicts."""
    before, after = score_rows(first, SCORE), score_rows(last, SCORE)
    pair = partners(before, after)
    if not pair[0]:
        return [], {}
    change, tasks, later = stratified_score(pair[1], base=pair[0]), task_scores(before), task_scores(after)
    start, end = stratified_score(before), stratified_score(after)
    lines = [f"{word} GenEval score, {plural(len(after), 'image')}, same prompts and seeds", ""]
    lines.append(f"  {'task':<15}{'before':>8}{'after':>8}{'change':>9}")
    for task in (task for task in TASKS if task in tasks and task in later):
        lines.append(_line(task, tasks[task].mean, later[task].mean))
    found = conclusion(change)
    lines += [_line("score", start.mean, end.mean), ""]
    if change.known:
        bounds = f"{change.low:+.3f} to {change.high:+.3f}{' includes 0' * (found == 'not established')}"
        lines.append(f"  {_WORDS[found]}: {settled(change.mean):+.3f}, 95 % interval {bounds}")
        lines.append(f"  The interval covers {claim(pair[0])}, not another training.")
    else:
        lines.append(f"  {_WORDS[found]}: {settled(change.mean):+.3f}, {untold(*pair)}")
    return [*lines, ""], {
        "before": start,
        "after": end,
        "change": change,
        "tasks": {task: {"before": tasks[task].mean, "after": later[task].mean} for task in tasks if task in later},
    }


def _line(name: str, before: float, after: float) -> str:
    return f"  {name:<15}{before:>8.3f}{after:>8.3f}{settled(after - before):>+9.3f}"
