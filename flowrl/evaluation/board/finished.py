"""Reads finished evaluations for a leaderboard: from folders and names on the command line to entries.

An entry is one side of a result.json: its model, or the base it was compared to. It also reads `rows.jsonl` (verdicts),
`images/drawn.json` (how the images were drawn) and the journals (what judged them).

Benchmarks write different rows. Each column is tried, and kept only if its mean is the reported number. If no column
fits, or the number is not a mean, the benchmark is compared only by its reported numbers and intervals.
"""

from __future__ import annotations

import json
import math
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from flowrl.benchmarks.unigenbench import point_scores
from flowrl.generation.folders import read_drawn
from flowrl.runtime.files import parse_json, read_json, read_json_lines
from flowrl.statistics.bootstrap import Interval, point
from flowrl.statistics.means import ScoreRow, pooled, stratified_score

SAME = 1e-6
"""Largest relative difference of the rows' mean from the reported number, which JSON rounds."""
UNITS = ("correct", "score")
"""Columns of rows with one value per image."""
SCORES = "scores"
COLUMNS = (SCORES, "values")
"""Columns of rows with values by name."""
DIVERSITY = "diversity"


@dataclass(frozen=True, kw_only=True, slots=True)
class Values:
    """The values whose mean a number is."""

    rows: tuple[ScoreRow, ...] = ()
    by_task: bool = False
    """Whether the number is the mean over tasks of the mean over a task's images."""
    pooled: bool = True
    """Whether it is the mean over all images; both hold if all tasks have equally many images."""
    files: Mapping[tuple[str, int | str, int], str] = field(default_factory=dict)
    """(task, prompt, sample) -> the image's file."""
    part: bool = False
    """Whether this is one task of another score in the result."""
    points: tuple[tuple[point_scores.Row, int | str], ...] = ()
    """Test points of every image with its prompt, for a score that is not a mean over images (UniGenBench)."""


def values_of(rows: Sequence[Mapping[str, Any]], metrics: Mapping[str, float]) -> dict[str, Values]:
    """Values by metric, only for metrics whose number they give."""
    found = {}
    for names, values in _candidates(rows):
        for name in names:
            if name in metrics and name not in found and (fitting := _fitting(values, metrics[name])) is not None:
                found[name] = fitting
    return found


def _candidates(rows: Sequence[Mapping[str, Any]]) -> Iterator[tuple[Sequence[str], Values]]:
    """Possible names of a metric, and its possible values."""
    first = rows[0] if rows else {}
    for key in COLUMNS:
        names = dict.fromkeys(name for row in rows if isinstance(row.get(key), Mapping) for name in row[key])
        for name in names:
            column = _column(rows, lambda row, key=key, name=name: (row.get(key) or {}).get(name))
            yield (name, name.replace(" ", "_")), column
            if key == SCORES and name == next(iter(names)):  # its tasks have no name of their own before them
                yield from _tasks(column)
    if any(DIVERSITY in row for row in rows):
        spread = _column(rows, lambda row: row.get(DIVERSITY))
        yield (DIVERSITY,), Values(rows=spread.rows)  # of all images of a prompt: no single one shows it
    for key in UNITS:
        if key in first:
            column = _column(rows, lambda row, key=key: row.get(key))
            yield ("score", "overall"), column
            yield from _tasks(column)
    if {"points", "met", "index"} <= first.keys():
        points = tuple(((tuple(row["points"]), row["met"]), prompt_of(row)) for row in rows)
        yield (point_scores.OVERALL,), Values(points=points, files=_files(rows))


def _tasks(column: Values) -> Iterator[tuple[Sequence[str], Values]]:
    for task in dict.fromkeys(row.task for row in column.rows if row.task):
        rows = tuple(row for row in column.rows if row.task == task)
        files = {key: file for key, file in column.files.items() if key[0] == task}
        yield (task, task.replace(" ", "_")), Values(rows=rows, part=True, files=files)


def _column(rows: Sequence[Mapping[str, Any]], read: Any) -> Values:
    """One value per row; rows without one (failed images) are left out, and the others keep their number."""
    found = {
        key: ScoreRow(task=key[0], prompt=key[1], sample=key[2], value=float(value))
        for key, row in _keyed(rows)
        if isinstance(value := read(row), int | float) and math.isfinite(value)
    }
    return Values(rows=tuple(found.values()), files={key: f for key, f in _files(rows).items() if key in found})


def _files(rows: Sequence[Mapping[str, Any]]) -> dict[tuple[str, int | str, int], str]:
    return {key: row["file"] for key, row in _keyed(rows) if isinstance(row.get("file"), str)}


def _keyed(rows: Sequence[Mapping[str, Any]]) -> Iterator[tuple[tuple[str, int | str, int], Mapping[str, Any]]]:
    """Numbers rows within task and prompt, because folders made row by row repeat a prompt."""
    seen: Counter[tuple[str, str]] = Counter()
    for row in rows:
        prompt = (str(row.get("task", "")), prompt_of(row))
        yield (*prompt, seen[prompt]), row
        seen[prompt] += 1


def prompt_of(row: Mapping[str, Any]) -> str:
    """The key of a row's prompt: its text, and the case if one text belongs to several."""
    text = str(row.get("prompt", row.get("index", "")))
    return f"{text} ({row['key']})" if "key" in row else text


def _fitting(values: Values, reported: float) -> Values | None:
    """The values with the kind of mean that gives the reported number; None if neither does."""
    if values.points:
        score = point_scores.aggregate(row for row, _ in values.points).overall
        return values if _is_same(score, reported) else None
    if not values.rows:
        return None
    by_task = _is_same(stratified_score(values.rows).mean, reported)
    over_all = _is_same(pooled(values.rows).mean, reported)
    return replace(values, by_task=by_task, pooled=over_all) if by_task or over_all else None


def _is_same(found: float, reported: float) -> bool:
    return math.isclose(found, reported, rel_tol=SAME, abs_tol=SAME)


RESULT = "result.json"
NEEDED = {"benchmark": str, "names": list, "metrics": dict, "intervals": dict, "facts": dict}
"""Required keys of a result.json."""
SIDES = {"model": "", "base": "base_"}
"""Folder of a side -> prefix of its keys in result.json."""
DEEPEST = 4
"""Depth of the search for results in folders."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BoardEntry:
    """One model's finished evaluation on one benchmark."""

    benchmark: str
    label: str
    folder: Path
    """Folder of the result.json."""
    side: str
    """`model` or `base`."""
    pool: str = ""
    """Name of the method whose trainings are pooled; empty for a separate entry."""
    metrics: Mapping[str, float]
    """Metrics, without `eval/<benchmark>/` in their names."""
    intervals: Mapping[str, Interval]
    values: Mapping[str, Values]
    """Metric -> the values of all images, if they give the reported number."""
    rows: Sequence[Mapping[str, Any]] = field(repr=False)
    facts: Mapping[str, Any]
    drawn: Mapping[str, Any] | None
    """How this toolkit drew the images; None for images of other programs."""
    images: Path | None
    """Where the images lie."""
    judged: Mapping[str, Any]
    """Facts about the judge in the journal of answers, besides its name."""
    version: str | None


def find_entries(given: Sequence[str | Path]) -> list[BoardEntry]:
    """Finds the entries of all given files, folders and `NAME=PATH,PATH` (trainings of one method), and each base once.
    Raises ValueError: nothing is found, a file cannot be read, or one result is named twice."""
    entries, seen = [], dict[Path, str]()
    for text in map(str, given):
        for pool, file in _results(text):
            place = file.parent.resolve()
            if place in seen:
                where = f"{seen[place]} and {text}" if seen[place] != text else text
                raise ValueError(f"{file} is named twice ({where}): one result counts once, leave one of them out.")
            seen[place] = text
            entries += entries_of(file, pool)
    # Bases that several results share, once.
    kept: dict[str, BoardEntry] = {}
    for entry in sorted(entries, key=lambda entry: entry.side == "base"):  # models first
        # The same for two entries that are one: of one model, drawn alike and judged alike.
        drawn = {key: value for key, value in (entry.drawn or {}).items() if key not in ("model", "lora")}
        unknown = drawn.get("fingerprint") in (None, "unknown")
        home = str((entry.images or entry.folder).resolve()) if unknown else ""
        known = [entry.benchmark, home, drawn, entry.rows, entry.judged, dict(entry.metrics)]
        key = json.dumps(known, sort_keys=True, default=str)
        if key not in kept:
            kept[key] = entry
        elif entry.side == "model":
            raise ValueError(
                f"{kept[key].folder} and {entry.folder} hold the same result (one model, the same images, the same "
                f"verdicts): leave one of them out."
            )
    return list(kept.values())


def _results(text: str) -> Iterator[tuple[str, Path]]:
    """Result files of the given paths, each with the name of its method."""
    pool, equals, rest = text.partition("=")
    paths = [part for part in rest.split(",") if part]
    if not equals or Path(text).exists():
        pool, paths = "", [text]
    elif not pool or not paths:
        raise ValueError(f"{text!r}: several trainings of one method are written NAME=FOLDER,FOLDER.")
    for path in map(Path, paths):
        if path.is_file():
            if path.name != RESULT:
                raise ValueError(f"{path} is not a {RESULT}: give the folder of a finished `flowrl eval`.")
            path = path.parent
        if not path.is_dir():
            raise ValueError(f"there is no {path}: give the folder of a finished `flowrl eval`, one with a {RESULT}.")
        found = list(_search(path, pool, 0))
        if not found:
            raise ValueError(
                f"{path} holds no {RESULT}, and no folder within it does: give folders that `flowrl eval` has finished."
            )
        yield from found


def _search(folder: Path, pool: str, depth: int) -> Iterator[tuple[str, Path]]:
    file = folder / RESULT
    if file.is_file() and (folder / "model").is_dir():
        yield pool, file
        return
    inner = sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
    if file.is_file():  # of several models: each has its own folder
        parts = [path / RESULT for path in inner if (path / RESULT).is_file()]
        try:
            own = NEEDED.keys() <= read_json(file).keys()
        except ValueError:
            own = True
        if not parts and own:
            raise ValueError(f"{file} has no rows beside it (model/rows.jsonl): the evaluation was moved in part.")
        yield from ((pool or folder.name, part) for part in parts)
        return
    if depth < DEEPEST:
        for path in inner:
            yield from _search(path, pool, depth + 1)


def entries_of(file: Path, pool: str = "") -> list[BoardEntry]:
    """The model of a result.json, and its base if it has one."""
    found = read_json(file, "run the evaluation again, or leave it out.")
    if missing := [key for key, kind in NEEDED.items() if not isinstance(found.get(key), kind)]:
        raise ValueError(f"{file} lacks {', '.join(missing)}: it is no result of `flowrl eval`; leave it out.")
    names = [str(name) for name in found["names"]]
    entries = []
    for place, (side, prefix) in enumerate(SIDES.items()):
        metrics = found.get(f"{prefix}metrics") or {}
        if place < len(names) and metrics:
            label, model = names[place], str(found["facts"].get("model", ""))
            if side == "base" == label and model:
                label = f"{model.rsplit('/', 1)[-1].rsplit(':', 1)[-1]} before training"
            entries.append(_entry(file.parent, found, side, label, metrics, pool if side == "model" else ""))
    if not entries:
        raise ValueError(f"{file} holds no numbers: the evaluation drew images and judged none.")
    return entries


def _entry(
    folder: Path, found: Mapping[str, Any], side: str, label: str, metrics: Mapping[str, Any], pool: str
) -> BoardEntry:
    benchmark, prefix = found["benchmark"], SIDES[side]
    short = {str(name).removeprefix(f"eval/{benchmark}/"): _float(value) for name, value in metrics.items()}
    home = folder / side
    if side == "base" and not home.is_dir():  # that of several models lies beside their folders
        home = folder.parent / side
    verdicts = home / "rows.jsonl"
    if not verdicts.is_file():
        raise ValueError(f"there is no {verdicts}, the verdicts of a finished evaluation: run the evaluation again.")
    rows = read_json_lines(verdicts)
    images = _images(home, found, side)
    given, intervals = found.get(f"{prefix}intervals") or {}, {}
    for name, mean in short.items():  # its own bounds, or those of the score of that name
        own = given.get(name, given.get(f"overall ({name})"))  # as GenEval calls the mean over images
        low, high = short.get(f"{name}_low", math.nan), short.get(f"{name}_high", math.nan)
        if math.isnan(low) and isinstance(own, Mapping):
            low, high = _float(own.get("low")), _float(own.get("high"))
        intervals[name] = Interval(mean=mean, low=low, high=high) if low <= mean <= high else point(mean)
    return BoardEntry(
        benchmark=benchmark, label=label, folder=folder, side=side, pool=pool, metrics=short,
        intervals=intervals, values=values_of(rows, short), rows=rows,
        facts=found["facts"], drawn=None if images is None else read_drawn(images), images=images,
        judged=_judged(home, benchmark, found["facts"]), version=found.get("version"),
    )  # fmt: skip


def _float(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else math.nan


def _images(home: Path, found: Mapping[str, Any], side: str) -> Path | None:
    """The folder of images: drawn by the evaluation, or given to it."""
    if (home / "images").is_dir():
        return home / "images"
    given = dict(found.get("images") or {}).get(side)
    if given is None and "images" not in found:  # older versions name the folder in their command alone
        words = shlex.split(str(found.get("command", "")))
        flag = {"model": "--images", "base": "--baseline"}[side]
        given = next((after for word, after in pairwise(words) if word == flag), None)
    return Path(given) if given is not None and Path(given).is_dir() else None


def _judged(folder: Path, benchmark: str, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Identity of the benchmark's own journal of answers. It is empty if several could be meant, or if the journal
    tells judges apart by more than the name in the facts; such results state in their facts how they asked."""
    found = []
    for path in sorted(folder.glob("journal-*.jsonl")):
        with path.open(encoding="utf-8", errors="replace") as file:
            first = file.readline()
        try:
            identity = parse_json(first, str(path))["identity"]
        except (ValueError, KeyError, TypeError):
            continue
        if (
            isinstance(identity, dict)
            and identity.get("benchmark") == benchmark
            and "reward" not in identity
            and identity.get("judge") in (None, facts.get("judge"))
        ):
            found.append({key: value for key, value in identity.items() if key not in ("benchmark", "judge")})
    return found[0] if len(found) == 1 else {}


def tell_apart(entries: Sequence[BoardEntry]) -> list[BoardEntry]:
    """Gives entries of one benchmark distinct labels: equal ones get their folder's name, or a number."""
    count = Counter((entry.benchmark, entry.label) for entry in entries if not entry.pool)
    named = []
    for entry in entries:
        alone = entry.pool or count[entry.benchmark, entry.label] == 1
        named.append(entry if alone else replace(entry, label=f"{entry.label} ({entry.folder.name})"))
    seen: Counter[tuple[str, str]] = Counter()
    result = []
    for entry in named:
        key = (entry.benchmark, entry.label)
        seen[key] += not entry.pool
        result.append(entry if entry.pool or seen[key] == 1 else replace(entry, label=f"{entry.label} #{seen[key]}"))
    return result
