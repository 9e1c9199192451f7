"""The same prompts of compared models side by side: those with the largest differences, and some unselected ones."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from urllib.parse import quote

from flowrl.evaluation.board.finished import Values
from flowrl.evaluation.board.standings import Ranking, Standing
from flowrl.media.lossless import CLIPS
from flowrl.prompts.loading import spread
from flowrl.rendering.embedded_images import image_element, image_table
from flowrl.rendering.markup import DASH, esc
from flowrl.statistics.means import Key

COLUMNS = 6
"""Number of models shown of a table: the first ones and the last."""
PROMPTS = 4
"""Prompts of each kind."""
EMBEDDED = 150
"""Images that a page holds; further ones are only links."""
WIDE = 208
"""Pixels of the longer side, twice the size at which they are shown."""


@dataclass(slots=True)
class Room:
    """How many images a page still takes."""

    left: int = EMBEDDED


def strips_of(ranking: Ranking, out: Path, room: Room) -> str:
    """Tables of images of a ranking as HTML; empty if no images are known or there is only one model. Links start from
    the page's folder `out`; `room` is how many images may still be embedded."""
    lines = ranking.standings
    shown = [*lines[: COLUMNS - 1], *lines[COLUMNS - 1 :][-1:]]
    sides = [side.entries[0].values.get(ranking.group.metric) for side in shown]
    known = [values for values in sides if values is not None and values.files]
    if len(known) < max(2, len(shown)) or any(line.entries[0].images is None for line in shown):
        return ""
    scores = [{(row.task, row.prompt, row.sample): float(row.value) for row in values.rows} for values in known]
    body = ""
    for title, keys in _chosen(scores, [_shown(line, values) for line, values in zip(shown, known, strict=True)]):
        columns = list(zip(shown, known, scores, strict=True))
        rows = [
            (str(key[1]), [_cell(line, values, found.get(key), key, out, room) for line, values, found in columns])
            for key in keys
        ]
        body += f"<h3>{esc(title)}</h3>{image_table([line.name for line in shown], rows)}" if rows else ""
    return body


def _shown(line: Standing, values: Values) -> Values:
    """The values with those files alone that a page can show: images, and clips that have a still beside them."""
    folder = line.entries[0].images
    assert folder is not None
    kept = {
        key: file
        for key, file in values.files.items()
        if not file.lower().endswith(CLIPS) or still_of(folder / file).is_file()
    }
    return replace(values, files=kept)


def still_of(path: Path) -> Path:
    """The image that stands for a file: itself, or of a clip NAME.mkv the image NAME.png beside it."""
    return path.with_suffix(".png") if path.name.lower().endswith(CLIPS) else path


def _chosen(scores: Sequence[Mapping[Key, float]], known: Sequence[Values]) -> list[tuple[str, list[Key]]]:
    """Images by how far the first model lies above and below the mean of the others, and evenly spread ones."""
    keys = [key for key in known[0].files if all(key in values.files for values in known)]
    scored = [key for key in keys if all(key in found for found in scores)]
    ahead = {key: scores[0][key] - fmean(found[key] for found in scores[1:]) for key in scored}
    order = sorted(ahead, key=lambda key: -ahead[key])
    best = _of_each_prompt([key for key in order if ahead[key] > 0])
    worst = _of_each_prompt([key for key in reversed(order) if ahead[key] < 0])
    prompts = _of_each_prompt(keys, limit=len(keys))
    evenly = [prompts[place] for place in spread(len(prompts), PROMPTS)]
    return [
        ("Where the first is furthest above the others", best),
        ("Where the first is furthest below the others", worst),
        ("Spread evenly over the prompts, not picked by scores", evenly),
    ]


def _of_each_prompt(keys: Sequence[Key], limit: int = PROMPTS) -> list[Key]:
    """The first image of each prompt, of so many prompts."""
    first: dict[tuple[str, int | str], Key] = {}
    for key in keys:
        first.setdefault(key[:2], key)
    return list(first.values())[:limit]


def _cell(line: Standing, values: Values, score: float | None, key: Key, out: Path, room: Room) -> str:
    """An image that links to its file, or a clip's still that links to the clip, with its value."""
    folder = line.entries[0].images
    assert folder is not None
    path = folder / values.files[key]
    if not path.is_file():
        return ""
    element = image_element(still_of(path), f"{line.name}: {key[1]}", WIDE) if room.left > 0 else ""
    room.left -= bool(element)
    said = DASH if score is None else f"{score:.4g}"
    link = quote(os.path.relpath(path.resolve(), out.resolve()))  # right wherever both are moved together
    return f'<a href="{esc(link)}">{element or esc(path.suffix.lstrip("."))}</a><small>{said}</small>'
