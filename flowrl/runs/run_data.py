"""Reads a run folder in any state: finished, training, or cut off in the middle of a line."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from flowrl.prompts.overlap import held_out_or_shared
from flowrl.runs.run_folder import refuse_links
from flowrl.runtime.files import numbered_lines, parse_json, read_json
from flowrl.runtime.scrubbing import settings_without_secrets, without_secrets
from flowrl.runtime.shapes import Float

Row = Mapping[str, Any]
METRICS = "metrics.jsonl"


@dataclass(frozen=True, kw_only=True, slots=True)
class BeforeAfter:
    """One prompt and seed at the run's first and last sampling (`after` is None until there are two); videos beside the
    clips as rows of frames. Sources are the edited images."""

    prompt: str
    seed: str
    before: Path
    after: Path | None
    before_clip: Path | None = None
    after_clip: Path | None = None
    sources: tuple[Path, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class RunData:
    """The contents of a run folder. Missing parts are empty, and `notes` says what could not be read."""

    folder: Path
    name: str
    config_text: str
    config: Row
    manifest: Row
    finished: bool
    train: tuple[Row, ...]
    evaluations: tuple[Row, ...]
    warned: tuple[Row, ...]  # rows with warnings, of iterations and evaluations
    image_rows: Mapping[int, tuple[Row, ...]]  # evaluation -> one row per image; the first and the last one only
    pairs: tuple[BeforeAfter, ...]
    pair_iterations: tuple[int, ...]
    has_lora: bool
    has_model: bool
    notes: tuple[str, ...]

    @property
    def held_word(self) -> str:
        """The word for the prompts of evaluations."""
        return held_out_or_shared(self.manifest.get("eval_prompts"))[0]

    @property
    def warnings(self) -> dict[str, list[tuple[int, str]]]:
        """See `warnings_by_kind`."""
        return warnings_by_kind(self.warned)

    @property
    def done(self) -> int:
        """Iterations up to the last one that was logged."""
        return int(self.train[-1]["iteration"]) + 1 if self.train else 0

    @property
    def sample_word(self) -> str:
        """What the run makes: "image" or "video"."""
        return "video" if any(pair.before_clip for pair in self.pairs) else "image"


def read_run(folder: Path) -> RunData:
    """Read a run folder.

    Raises:
        FileNotFoundError: there is no such folder.
        ValueError: it holds neither metrics.jsonl nor config.yaml, or a name in it leads elsewhere.
    """
    if not folder.is_dir():
        raise FileNotFoundError(
            f"{folder} is not a folder: give the run folder that `flowrl train` printed, such as runs/NAME"
        )
    if not (folder / METRICS).is_file() and not (folder / "config.yaml").is_file():
        inside = sorted(path.name for path in folder.iterdir())[:6]
        runs = sorted(path.parent.name for path in folder.glob(f"*/{METRICS}"))[:3]
        hint = f"did you mean {folder / runs[0]}?" if runs else "give the folder that `flowrl train` printed"
        raise ValueError(
            f"{folder} is not a run: a run folder holds {METRICS} and config.yaml, this one holds "
            f"{', '.join(inside) or 'nothing'}; {hint}"
        )
    refuse_links(folder)
    return run_of(folder, *rows_of(_text(folder / METRICS), METRICS))


def run_of(folder: Path, rows: Sequence[Row], broken: int = 0) -> RunData:
    """The contents of a run folder, given the rows of its metrics; `broken` counts lines that could not be read."""
    notes: list[str] = []
    config_text = without_secrets(_text(folder / "config.yaml"))
    try:
        config = yaml.load(config_text, getattr(yaml, "CSafeLoader", yaml.SafeLoader)) or {}
    except yaml.YAMLError:
        config = {}
        notes.append("config.yaml is not valid YAML; it is shown as text only.")
    manifest: Row = {}
    try:
        if (path := folder / "manifest.json").is_file():
            manifest = settings_without_secrets(read_json(path))
    except ValueError:
        notes.append("manifest.json could not be read and is left out.")
    if error := manifest.get("error"):
        notes.append(f"An error stopped this run ({manifest.get('failed')}): {error}")
    notes += [*_unread(broken, METRICS), *_not_finite(rows)]
    if shared := held_out_or_shared(manifest.get("eval_prompts"))[1]:
        notes.append(f"{shared}: on those the scores say nothing about new prompts.")
    pairs, pair_iterations = _pairs(folder / "samples", notes)
    return RunData(
        folder=folder,
        name=folder.resolve().name,
        config_text=config_text,
        config=config if isinstance(config, dict) else {},
        manifest=manifest,
        finished=(folder / "summary.json").is_file() or bool(manifest.get("finished")),
        train=_last_attempt([row for row in rows if _is_number(row.get("reward")) or _is_number(row.get("loss"))]),
        evaluations=_last_attempt([row for row in rows if any(key.startswith("eval/") for key in row)]),
        warned=tuple(row for row in rows if isinstance(row.get("warnings"), dict)),
        image_rows=_image_rows(folder / "eval", notes),
        pairs=pairs,
        pair_iterations=pair_iterations,
        has_lora=(folder / "lora").is_dir(),
        has_model=(folder / "model").is_dir(),
        notes=tuple(notes),
    )


def warnings_by_kind(rows: Sequence[Row]) -> dict[str, list[tuple[int, str]]]:
    """Kind of a warning -> iteration and words of each, in the order of the rows."""
    found: dict[str, list[tuple[int, str]]] = {}
    for row in rows:
        if isinstance(said := row.get("warnings"), dict):
            for kind, sentence in said.items():
                found.setdefault(str(kind), []).append((int(row["iteration"]), without_secrets(str(sentence))))
    return found


def failure_reasons(rows: Sequence[Row]) -> str:
    """Why rewards failed, and how often, the most frequent first; empty if none did."""
    keys = keys_below(rows, "reward_errors/")
    counts = {key.partition("/")[2]: int(column(rows, key)[1].sum()) for key in keys}
    return ", ".join(f"{word} {count}" for word, count in Counter(counts).most_common())


def column(rows: Sequence[Row], key: str) -> tuple[Float[np.ndarray, " n"], Float[np.ndarray, " n"]]:
    """Iterations and values of one metric, from the rows that have it as a finite number."""
    found = [(row["iteration"], value) for row in rows if _is_number(value := row.get(key))]
    table = np.array(found, dtype=np.float64).reshape(-1, 2)
    return table[:, 0], table[:, 1]


def keys_below(rows: Sequence[Row], prefix: str) -> list[str]:
    """The metric names that start with `prefix`, in the order of their first appearance."""
    found: dict[str, None] = {}
    for row in rows:
        if not row.keys() <= found.keys():  # most rows have the keys of the one before
            found.update(dict.fromkeys(row))
    return [key for key in found if key.startswith(prefix)]


def _is_number(value: object) -> bool:
    return (type(value) is float or type(value) is int) and math.isfinite(value)  # not a bool, which is an int too


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""


def rows_of(text: str, name: str) -> tuple[list[Row], int]:
    """The objects in lines, and the number of lines without one, which a run killed while writing leaves."""
    rows: list[Row] = []
    broken = 0
    for _, line in numbered_lines(text):
        try:
            row = parse_json(line, name, finite=False)
        except ValueError:
            row = None
        if isinstance(row, dict):
            rows.append(row)
        else:
            broken += 1
    return rows, broken


def _unread(broken: int, name: str) -> list[str]:
    if not broken:
        return []
    lines = "1 line" if broken == 1 else f"{broken} lines"
    return [f"{lines} of {name} could not be read (a run stopped while writing?); all other lines are shown."]


def _not_finite(rows: Sequence[Row]) -> list[str]:
    """A note on values that are not finite, because charts leave them out."""
    broken = [
        f"{key} at iteration {row.get('iteration')}"
        for row in rows
        for key, value in row.items()
        if isinstance(value, float) and not math.isfinite(value) and not key.endswith(("_low", "_high"))
    ]
    if not broken:
        return []
    count = "1 logged number is" if len(broken) == 1 else f"{len(broken)} logged numbers are"
    return [f"{count} NaN or infinite and left out of the charts; first: {broken[0]}."]


def _last_attempt(rows: Sequence[Row]) -> tuple[Row, ...]:
    """Drop what a resumed run did again: a row replaces every earlier row of the same or a later iteration."""
    kept: list[Row] = []
    for row in rows:
        if not _is_number(row.get("iteration")):
            continue
        while kept and kept[-1]["iteration"] >= row["iteration"]:
            kept.pop()
        kept.append(row)
    return tuple(kept)


def iteration_of(path: Path) -> int | None:
    """The number in a name such as iteration_000020."""
    digits = path.stem.removeprefix("iteration_")
    return int(digits) if path.stem.startswith("iteration_") and digits.isdigit() else None


def _image_rows(folder: Path, notes: list[str]) -> dict[int, tuple[Row, ...]]:
    files = {number: path for path in sorted(folder.glob("*.jsonl")) if (number := iteration_of(path)) is not None}
    found: dict[int, tuple[Row, ...]] = {}
    for number in sorted({min(files), max(files)}) if files else ():
        path = files[number]
        rows, broken = rows_of(_text(path), path.name)
        notes += _unread(broken, path.name)
        found[number] = tuple(rows)
    return found


def _pairs(folder: Path, notes: list[str]) -> tuple[tuple[BeforeAfter, ...], tuple[int, ...]]:
    """Images of the first and last sampling that have the same number. A file being written has no final name yet."""
    found = {
        number: path
        for path in sorted(folder.glob("*"))
        if path.is_dir() and (number := iteration_of(path)) is not None
    }
    shots = {number: sorted(path.glob("[0-9]*.png")) for number, path in found.items()}
    shots = {number: files for number, files in shots.items() if files}
    if not shots:
        return (), ()
    prompts, sources = shown_prompts(folder, notes), folder / "sources"
    first, last = min(shots), max(shots)
    pairs = []
    for before in shots[first]:
        after = found[last] / before.name
        if first != last and not after.is_file():
            continue
        number = int(before.stem) if before.stem.isdigit() else len(prompts)
        entry = prompts[number] if number < len(prompts) else {}
        seed = entry.get("seed")
        pairs.append(
            BeforeAfter(
                prompt=str(entry.get("prompt", before.stem)),
                seed="" if seed is None else str(seed),
                before=before,
                after=after if first != last else None,
                before_clip=_clip(before),
                after_clip=_clip(after) if first != last else None,
                sources=(*sources.glob(f"{before.stem}.png"), *sorted(sources.glob(f"{before.stem}_*.png"))),
            )
        )
    return tuple(pairs), tuple(sorted({first, last}))


def shown_prompts(folder: Path, notes: list[str]) -> list[Row]:
    """Prompt, seed and sources of the images in a run's samples folder, in order."""
    try:
        found = parse_json(_text(folder / "prompts.json") or "[]", "samples/prompts.json")
    except ValueError:
        notes.append("samples/prompts.json could not be read; the images are shown without their prompts.")
        return []
    return [entry if isinstance(entry, dict) else {} for entry in found] if isinstance(found, list) else []


def _clip(image: Path) -> Path | None:
    clip = image.with_suffix(".mp4")
    return clip if clip.is_file() else None
