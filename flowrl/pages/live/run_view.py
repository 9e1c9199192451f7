"""The views of the page: its frame, the list of runs; of a run its row, curves, vital signs, samples, log, commands."""

from __future__ import annotations

import math
import re
import shlex
import socket
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from flowrl.pages.live.followed_runs import Followed
from flowrl.pages.run_curves import (
    curves,
    evaluation_series,
    figure,
    health,
    summary,
    tasks,
    tiles,
    time_by_stage,
    training_series,
)
from flowrl.rendering.charts import NARROW, Series, draw_lines, finite_ends, smooth_series
from flowrl.rendering.document import document
from flowrl.rendering.markup import DASH, card, duration, esc, number, plural, section, signed, table
from flowrl.rewards.serving.own_page import POLICY
from flowrl.runs.held_out_result import held_out
from flowrl.runs.run_data import Row, RunData, column, iteration_of, keys_below, shown_prompts
from flowrl.runs.vital_signs import RECENT, SIGNS
from flowrl.runtime.failures import LOG
from flowrl.runtime.scrubbing import without_secrets

SPARK = 60
"""Points of a curve in the list."""
SAID = 40
"""Lines of a traceback."""
_LOGGED = ("loss", "kl", "clip_fraction", "grad_norm")


def state(followed: Followed, run: RunData) -> tuple[str, str]:
    """The state of a run in words, and the style of its mark: good, bad or none."""
    holder = followed.holder()
    if holder is not None:
        silent = followed.silent_for(usual_seconds(run))
        if silent:
            return f"! running, silent for {duration(silent)}", "bad"
        return ("running" if _is_here(holder) else f"running on {holder['host']}"), "good"
    if run.finished:
        return "✓ finished", ""
    if run.manifest.get("error"):
        return "! stopped by an error", "bad"
    return "stopped", ""


def _is_here(holder: Mapping[str, Any]) -> bool:
    return bool(holder["host"] == socket.gethostname())


def usual_seconds(run: RunData) -> float:
    """Median seconds of an iteration, 0 before the first."""
    seconds = column(run.train, "seconds")[1]
    return float(np.median(seconds)) if len(seconds) else 0.0


def list_row(followed: Followed) -> str:
    """The row of a run that has been read."""
    run = followed.run()
    said, style = state(followed, run)
    cells = followed.kept.get("cells")
    if cells is None or cells[0] != followed.version:
        iteration, reward = column(run.train, "reward")
        planned = run.config.get("num_iterations")
        reach = f"{run.done} of {planned}" if isinstance(planned, int) else str(run.done)
        last = number(float(reward[-RECENT:].mean())) if len(reward) else DASH
        warned = sorted(run.warnings)
        words = f'<span class="mark bad">! {esc(", ".join(warned).replace("_", " "))}</span>' if warned else "none"
        pace = duration(usual_seconds(run)) if run.train else DASH
        texts = (reach, last, _spark(iteration, reward), pace, words)
        cells = followed.kept["cells"] = (followed.version, "".join(f"<td>{text}</td>" for text in texts))
    return _row(followed, f'<span class="mark {style}">{esc(said)}</span>', cells[1])


def waiting_row(followed: Followed, words: str) -> str:
    """The row of a run that has not been read, and why."""
    return _row(followed, f'<span class="mark">{esc(words)}</span>', f"<td>{DASH}</td>" * 5)


def _row(followed: Followed, mark: str, cells: str) -> str:
    button = f'<button type="button" data-run="{followed.number}">{esc(followed.name)}</button>'
    return f'<tr data-run="{followed.number}"><th scope="row">{button}</th><td>{mark}</td>{cells}</tr>'


def _spark(x: np.ndarray, y: np.ndarray) -> str:
    """A small curve without axes, to find a run at a glance."""
    if len(y) < 2:
        return DASH
    count = min(SPARK, len(y))
    x, y = (np.array([part.mean() for part in np.array_split(values, count)]) for values in (x, y))
    low, high = finite_ends(y)
    across, up = (x - x[0]) / (x[-1] - x[0] or 1) * 96 + 2, 22 - (y - low) / ((high - low) or 1) * 20
    path = "L".join(f"{a:.1f} {b:.1f}" for a, b in zip(across, up, strict=True))
    return (
        f'<svg class="spark" viewBox="0 0 100 24" role="img" aria-label="from {number(float(y[0]))} to '
        f'{number(float(y[-1]))}"><path class="line c1" d="M{path}"/></svg>'
    )


def view(followed: Followed) -> str:
    """All views of one run except its samples, log and commands."""
    run = followed.run()
    made = followed.kept.get("view")
    if made is None or made[0] != followed.version:
        held = held_out(run)
        notes = "".join(f"<li>{esc(note)}</li>" for note in run.notes)
        html = "".join([
            summary(run, held), f'<ul class="notes">{notes}</ul>' if notes else "", tiles(run, held),
            curves(run, held), health(run), pace(run), tasks(held), time_by_stage(run),
        ])  # fmt: skip
        made = followed.kept["view"] = (followed.version, html)
    return made[1]


def pace(run: RunData) -> str:
    """Seconds and memory of the iterations."""
    shown = [("seconds", "Seconds of an iteration", "s")]
    shown += [
        (key, f"Memory, {key.removeprefix('memory/').removesuffix('_gib')}", "GiB")
        for key in keys_below(run.train, "memory/")
    ]
    cards = ""
    for key, title, unit in shown:
        x, y = column(run.train, key)
        if len(y):
            text = f"{title} over {plural(len(y), 'iteration')}, last {number(float(y[-1]))} {unit}"
            chart = draw_lines([smooth_series(title, x, y, color=1)], NARROW, 150, "iteration", "", text)
            recent = number(float(y[-RECENT:].mean()))
            cards += card(f'<p class="value">{recent} {unit}</p>{chart}', title=esc(title))
    lead = "Memory is what tensors have taken up at once on the device, logged on CUDA devices only."
    return section("pace", "Pace and memory", f'<div class="three">{cards}</div>' if cards else "", lead)


def commands(followed: Followed) -> list[tuple[str, str]]:
    """Possible next steps: words and the command, to copy into a terminal."""
    run, holder = followed.run(), followed.holder()
    folder, again = shlex.quote(str(followed.folder)), shlex.quote(f"{followed.folder}-again")
    settings = shlex.quote(f"{followed.folder}/config.yaml")
    found = []
    if holder is not None:
        there = "" if _is_here(holder) else f"ssh {shlex.quote(holder['host'])} "
        words = "Stop it after this iteration and save (a second time: at once)"
        found.append((words, f"{there}kill -INT {holder['pid']}"))
    elif run.finished:
        longer = 2 * max(run.done, 1)
        found.append(("Go on with more iterations", f"flowrl train resume={folder} num_iterations={longer}"))
    else:
        found.append(("Continue from the last complete checkpoint", f"flowrl train resume={folder}"))
    found.append(("The same settings in a new folder", f"flowrl train {settings} out={again}"))
    found.append(("A page of this run that can be sent", f"flowrl report {folder}"))
    return found


def log_lines(rows: Sequence[Row]) -> list[str]:
    """Rows as lines of text, with warnings below them."""
    lines = []
    for row in rows:
        head = f"iteration {row.get('iteration', DASH)}"
        evaluated = [key for key in row if key.startswith("eval/") and key.count("/") <= 2]
        if evaluated:
            ends = ("_low", "_high")
            shown = [key for key in evaluated if not key.endswith(ends)][:4]
            parts = [f"{key.removeprefix('eval/')} {_value(row[key])}" for key in shown]
            lines.append(f"{head}  evaluation  {'  '.join(parts)}")
        else:
            parts = [f"{key} {_value(row[key])}" for key in ("reward", *_LOGGED) if key in row]
            seconds = row.get("seconds")
            parts += [duration(float(seconds))] if isinstance(seconds, int | float) else []
            lines.append(f"{head}  {'  '.join(parts)}")
        said = row.get("warnings")
        if isinstance(said, dict):
            lines += [f"  ! {name}: {sentence}" for name, sentence in said.items()]
    return lines


def _value(value: object) -> str:
    known = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return number(float(value), 4) if known and isinstance(value, int | float) else str(value)


def traceback_of(followed: Followed) -> str:
    """The last lines of the error that stopped the run, if known."""
    try:
        with (followed.folder / LOG).open("rb") as stream:
            stream.seek(0, 2)
            stream.seek(max(0, stream.tell() - 16_384))
            text = stream.read().decode("utf-8", "replace")
    except OSError:
        return ""
    return without_secrets("\n".join(text.splitlines()[-SAID:]))


FOOTER = "Served by <code>flowrl watch</code> to this machine only. It reads run folders and changes nothing."
HEAD = ("Run", "State", "Iterations", "Reward", "Curve", "Per iteration", "Warnings")


def page() -> str:
    """The frame of the page."""
    body = (Path(__file__).parent / "frame.html").read_text(encoding="utf-8").removesuffix("\n")
    return document("flowrl watch", body, footer=FOOTER, policy=POLICY)


def list_of(rows: Sequence[str]) -> str:
    """The table of runs; rows are HTML."""
    if not rows:
        return (
            '<p class="muted">There is no run yet. It appears here when <code>flowrl train</code> has made its '
            "folder.</p>"
        )
    head = "".join(f'<th scope="col">{esc(text)}</th>' for text in HEAD)
    counted = plural(len(rows), "run")
    return f"<table><caption>{counted}</caption><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def command_list(commands: Sequence[tuple[str, str]]) -> str:
    """Commands with what they do, each with a button that copies it."""
    items = "".join(
        f'<div><dt>{esc(words)}</dt><dd><pre tabindex="0"><code>{esc(command)}</code></pre>'
        '<button type="button" class="copy">Copy</button></dd></div>'
        for words, command in commands
    )
    return f'<dl class="commands">{items}</dl>'


MOST_PROMPTS = 64
_FILE = re.compile(r"\d{1,6}\.(png|mp4)")


def samples_of(folder: Path) -> dict[str, Any]:
    """`prompts`, texts with seeds by number, and `iterations`, the names of files of each sampling that is there."""
    samples = folder / "samples"
    found: dict[int, list[str]] = {}
    for path in samples.glob("iteration_*"):
        number = iteration_of(path)
        if number is not None and path.is_dir() and not path.is_symlink():
            names = sorted(file.name for file in path.iterdir() if _FILE.fullmatch(file.name))
            if names:
                found[number] = [name for name in names if int(name.partition(".")[0]) < MOST_PROMPTS]
    prompts = shown_prompts(samples, [])[:MOST_PROMPTS]
    return {
        "prompts": [
            {"prompt": str(entry.get("prompt", number)), "seed": str(entry.get("seed", ""))}
            for number, entry in enumerate(prompts)
        ],
        "iterations": {str(number): found[number] for number in sorted(found)},
    }


def sample_file(folder: Path, iteration: int, name: str) -> Path | None:
    """The file of a sample; None if there is none, or if it lies outside the folder."""
    if not _FILE.fullmatch(name):
        return None
    path = folder / "samples" / f"iteration_{iteration:06d}" / name
    inside = path.resolve().is_relative_to((folder / "samples").resolve()) and not (folder / "samples").is_symlink()
    return path if inside and path.is_file() else None


Pair = tuple[RunData, RunData]
MOST_EVALUATED = 8
"""Metrics of evaluations that get a chart."""


def view_of_two(one: RunData, other: RunData, names: tuple[str, str]) -> str:
    """Charts and a table; names are those of the list."""
    pair = (one, other)
    found = (training_series(run, label=names[k], color=k + 1) for k, run in enumerate(pair))
    charts = [_chart("Training reward", [series for series, _ in filter(None, found)])]
    for key in _evaluations(pair)[:MOST_EVALUATED]:
        evaluated = [
            replace(evaluation_series(run, key, names[k], color=k + 1), dashed=k == 1)
            for k, run in enumerate(pair)
            if len(column(run.evaluations, key)[1])
        ]
        charts.append(_chart(_title(key), evaluated))
    signs = [*((sign.key, sign.title) for sign in SIGNS), ("seconds", "Seconds of an iteration")]
    signs += [
        (key, f"Memory, {key.split('/')[1].removesuffix('_gib')} (GiB)")
        for key in dict.fromkeys(key for run in pair for key in keys_below(run.train, "memory/"))
    ]
    small = []
    for key, title in signs:
        columns = [(k, *column(run.train, key)) for k, run in enumerate(pair)]
        small.append(_chart(title, [smooth_series(names[k], x, y, color=k + 1) for k, x, y in columns if len(y)]))
    lead = (
        "Blue is the first run, orange the second. Points behind a line are iterations, or means of some. That one "
        "line lies above the other is no test: <code>flowrl compare</code> trains methods to one budget and tests them."
    )
    return "".join([
        section("curves", "Side by side", f'<div class="two">{"".join(charts)}</div>' if any(charts) else "", lead),
        section("numbers", "Last values", _numbers(pair, names, signs),
                f"Means of the last {RECENT} iterations; of evaluations the last one."),
        section("health", "Vital signs", f'<div class="two">{"".join(small)}</div>' if any(small) else ""),
    ])  # fmt: skip


def _evaluations(pair: Pair) -> list[str]:
    """Means with their own bounds; first those that both runs have."""
    keys = dict.fromkeys(key for run in pair for key in keys_below(run.evaluations, "eval/"))
    known = [key for key in keys if f"{key}_low" in keys]
    return sorted(known, key=lambda key: not all(len(column(run.evaluations, key)[1]) for run in pair))


def _title(key: str) -> str:
    return f"Evaluation: {key.removeprefix('eval/').removeprefix('reward/')}"


def _chart(title: str, series: list[Series]) -> str:
    if not series:
        return ""
    text = f"{title} of {' and '.join(line.label for line in series)}"
    key = [(line.label, line.color, "dash" if line.dashed else "line") for line in series]
    return figure(title, series, "", text, key)


def _numbers(pair: Pair, names: tuple[str, str], signs: list[tuple[str, str]]) -> str:
    rows = []
    for key, title in [("reward", "Training reward"), *signs]:
        values = [column(run.train, key)[1][-RECENT:] for run in pair]
        rows.append(_row_of_two(title, [float(found.mean()) if len(found) else None for found in values]))
    for key in _evaluations(pair):
        values = [column(run.evaluations, key)[1] for run in pair]
        rows.append(_row_of_two(_title(key), [float(found[-1]) if len(found) else None for found in values]))
    rows = [row for row in rows if row]
    head = ["Metric", esc(names[0]), esc(names[1]), "Second less first"]
    return table("Last values of both runs", head, rows) if rows else ""


def _row_of_two(title: str, values: list[float | None]) -> list[str]:
    one, other = values
    if one is None and other is None:
        return []
    difference = DASH if one is None or other is None else signed(other - one, 4)
    return [esc(title), *(DASH if value is None else number(value, 4) for value in values), difference]
