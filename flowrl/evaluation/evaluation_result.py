"""Writes a benchmark's result as text and files (rows, result.json), and joins results of several models."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import replace
from pathlib import Path

from flowrl.evaluation.benchmark import BENCHMARKS, Result, are_shares
from flowrl.generation.subject import Settings
from flowrl.rendering.markup import bounds, estimate, number, signed
from flowrl.rendering.terminal_text import Table, with_note, wrapped
from flowrl.runtime.call import call_words
from flowrl.runtime.files import plain, read_json, refuse_foreign, write_atomically
from flowrl.runtime.versions import version_of
from flowrl.statistics.paired import over_runs

Page = Callable[..., str]
"""Maps (result, title, names, command) to the page as HTML."""


def with_notes(result: Result, settings: Settings) -> Result:
    """Adds a note on settings that differ between subject and base."""
    ours, theirs = settings.subject.source, settings.base.source if settings.base is not None else None
    notes = list(result.notes)
    if ours is not None and theirs is not None:
        names = ("num_steps", "guidance_scale", "grid", "dtype", "max_sequence_length", "height", "width")
        differ = [
            f"{name} {getattr(ours, name)} and {getattr(theirs, name)}"
            for name in names
            if getattr(ours, name) != getattr(theirs, name)
        ]
        if differ:
            notes.append(
                f"Model and base were sampled differently ({'; '.join(differ)}): not the weights alone differ."
            )
    if ours is not None and ours.first_block_cache:
        notes.append(
            f"Drawn with First-Block Cache {ours.first_block_cache:g}: images are not those of the whole network, and "
            "the numbers are no measure of it."
        )
    sampling = {} if ours is None else {
        "model": ours.model, "num_steps": ours.num_steps, "guidance_scale": ours.guidance_scale, "dtype": ours.dtype,
        **({"first_block_cache": ours.first_block_cache} if ours.first_block_cache else {}),
    }  # fmt: skip
    return replace(result, notes=tuple(notes), facts={**sampling, **result.facts})


def as_text(result: Result) -> str:
    """Headline, tables with their notes, then the notes, for a terminal of 80 columns."""
    notes = (wrapped(f"Note: {note}") for note in result.notes)
    return "\n\n".join([wrapped(result.headline), *map(with_note, result.tables), *notes])


def write(result: Result, settings: Settings, page: Page | None) -> None:
    """Writes rows of both subjects, result.json and the page."""
    for subject, rows in zip(settings.subjects, (result.rows, result.base_rows), strict=False):
        subject.folder.mkdir(parents=True, exist_ok=True)
        write_atomically(subject.folder / "rows.jsonl", "".join(json.dumps(plain(row)) + "\n" for row in rows))
    images = {
        side: str(subject.images.resolve())
        for side, subject in zip(("model", "base"), settings.subjects, strict=False)
        if subject.images is not None
    }
    names = [subject.label for subject in settings.subjects]
    write_result(result, settings.out, settings.benchmark, names, images, page)


def refuse_foreign_files(folder: Path, names: Sequence[str], keys: Set[str]) -> None:
    """Refuses a folder with foreign files of these names. The first is JSON, and ours if it has these keys."""
    try:
        own = keys <= read_json(folder / names[0]).keys()
    except ValueError:
        own = False
    for name in names:
        refuse_foreign(folder / name, own=own)


def write_result(
    result: Result, out: Path, benchmark: str, names: Sequence[str], images: Mapping[str, str], page: Page | None = None
) -> None:
    """Writes result.json, and the page if `page` is given; `images` are the given folders, by side."""
    out.mkdir(parents=True, exist_ok=True)
    command = call_words()
    content = {
        "benchmark": benchmark, "names": list(names), "command": command, "version": version_of("flowrl-toolkit"),
        "reproduces": BENCHMARKS[benchmark].reproduces, "images": dict(images),
        **{key: plain(getattr(result, key)) for key in ("headline", "metrics", "base_metrics", "intervals",
           "base_intervals", "differences", "tables", "notes", "facts")},
    }  # fmt: skip
    write_atomically(out / "result.json", json.dumps(content, indent=1, ensure_ascii=False) + "\n")
    if page is not None:
        title = f"{benchmark}: {' against '.join(names)}"
        write_atomically(out / "page.html", page(result, title=title, names=names, command=command))


def over_models(results: Sequence[Result], labels: Sequence[str]) -> Result:
    """Joins several trainings of one method: means of all metrics and of their changes, with t intervals."""
    notes = tuple(dict.fromkeys(note for result in results for note in result.notes))
    if not any(result.metrics for result in results):  # drawn for a judge that is to come
        headline = " ".join(result.headline for result in results)
        return Result(headline=headline, rows=(), metrics={}, tables=(), notes=notes)
    means = over_runs([one.metrics for one in results], shares=are_shares(results[0].metrics))
    changes = over_runs([*map(_changes, results)])
    short = {name: name.split("/", 2)[-1] for name in means if not name.endswith(("_low", "_high"))}
    first = next(iter(short))
    head: tuple[str, ...] = ("", "mean", "95 %")
    body = {name: [short[name], number(means[name].mean), bounds(means[name])] for name in short}
    if changes:
        head += ("change", "95 %")
        body = {
            name: [*body[name], signed(change.mean), bounds(change, sign=True)]
            for name, change in changes.items()
            if name in body
        }
    single = [(label, number(result.metrics[first])) for label, result in zip(labels, results, strict=True)]
    return Result(
        headline=f"{short[first]} {estimate(means[first])}, mean of {len(results)} models.",
        rows=(),
        claim="other trainings of the same kind, on these prompts",
        metrics={name: interval.mean for name, interval in means.items()},
        intervals={text: means[name] for name, text in short.items()},
        differences={text: changes[name] for name, text in short.items() if name in changes},
        tables=(
            Table(
                title=f"Means over {len(results)} models",
                head=head,
                rows=tuple(map(tuple, body.values())),
                note="Student's t interval over models: it covers another training, with these prompts.",
            ),
            Table(title="Each model", head=("", short[first]), rows=tuple(single)),
        ),
        notes=notes,
    )


def _changes(result: Result) -> dict[str, float]:
    """Every metric minus the base's."""
    base = result.base_metrics
    return {name: value - base[name] for name, value in result.metrics.items() if name in base}
