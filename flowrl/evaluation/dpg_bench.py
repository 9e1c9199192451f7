"""DPG-Bench: a grid of four images per dense prompt, under the names that its script reads, and a judge.

Without a judge, it only draws images and writes the grids; with one, it asks a judge of this toolkit. The published
judge is mPLUG-large in the benchmark's own script, which takes the folder of grids. **Another judge gives another
metric**: compare its numbers only with each other. Options: see `GridOptions`.

In the subject's folder: `dpg_bench/<item>.png`, and the journal of the answers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

from flowrl.benchmarks.dpg_bench import YES, Item, Scores, aggregate, boxes, item_score, read_items
from flowrl.config.train import resolve_path
from flowrl.evaluation.benchmark import Result, SideResult, result_of
from flowrl.evaluation.kept_answers import Asking, ask_kept
from flowrl.evaluation.named_judges import load_judge, read_judge, weights_of
from flowrl.evaluation.runner import Rules, SubjectVerdicts
from flowrl.evaluation.summing import options_of
from flowrl.generation.folders import ImageFile
from flowrl.generation.generate import some
from flowrl.generation.subject import Settings, Subject
from flowrl.media.images import save_png
from flowrl.prompts.loading import Prompt
from flowrl.rendering.markup import bounds, number, plural, signed
from flowrl.rendering.terminal_text import Table
from flowrl.rewards.judges.answers import parse_word
from flowrl.rewards.judges.asking import UNPARSED
from flowrl.rewards.judges.chat import Answer, Chat, Question, identity_of
from flowrl.runtime.files import read_json, write_atomically
from flowrl.runtime.journal import Journal, Row
from flowrl.statistics.means import Range, mean_interval

FOLDER = "dpg_bench"
MADE_OF = "dpg_bench_grids.json"
"""File in the subject's folder that names the images of the grids."""
GRID = 4
ASKED = "{question}\nAnswer with one word, yes or no."
_VERSION = 1

Answers = dict[str, list[dict[int, float]] | None]
"""1 or 0 for every question about every sample, by item; None if a question has no answer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GridOptions:
    """The benchmark's `options`."""

    all_rows: bool = False
    """Keep the first row of the file, which the published loader skips."""
    crops: int = GRID
    """Number of images of a grid to judge, 1 to 4."""

    def __post_init__(self) -> None:
        if not 1 <= self.crops <= GRID:
            raise ValueError(f"crops must be 1 to {GRID}, got {self.crops}.")


@dataclass(frozen=True, kw_only=True, slots=True)
class GridPlan:
    """All that is known before a model or judge loads; `judge` is None if you want only grids."""

    items: tuple[Item, ...]
    judge: dict[str, Any] | None
    crops: int


def plan_of(settings: Settings) -> GridPlan:
    """Reads prompts, judge and options."""
    options = options_of(settings, GridOptions)
    if settings.prompts is None:
        raise ValueError("dpg_bench needs `prompts`: dpg_bench/dpg_bench.csv of the repository TencentQQGYLab/ELLA.")
    if settings.subject.images is not None:
        raise ValueError("dpg_bench draws its own images, since a grid holds four of a prompt: leave `images` out.")
    if settings.samples != GRID:
        raise ValueError(f"dpg_bench puts {GRID} images of a prompt on a grid, got `samples` {settings.samples}.")
    items = some(read_items(resolve_path(settings.prompts), skip_first=not options.all_rows), settings.num_prompts)
    judge = None if settings.judge is None else read_judge(settings.judge, {}, owner="dpg_bench")
    return GridPlan(items=tuple(items), judge=judge, crops=options.crops)


def place(subject: Subject, plan: GridPlan, images: list[ImageFile]) -> list[ImageFile]:
    """Writes `dpg_bench/<item>.png` from every four images, row by row; keeps files that hold these images."""
    folder, note = subject.folder / FOLDER, subject.folder / MADE_OF
    known = read_json(note, "delete it, the grids are made again") if note.is_file() else {}
    for row, item in enumerate(plan.items):
        path, shown = folder / f"{item.id}.png", images[row * GRID : (row + 1) * GRID]
        stamps = [image.stamp for image in shown]
        if path.is_file() and known.get(item.id) == stamps:
            continue
        four = [image.pixels() for image in shown]
        grid = np.concatenate([np.concatenate(four[:2], axis=1), np.concatenate(four[2:], axis=1)], axis=0)
        assert boxes((grid.shape[1], grid.shape[0]))[3][2:] == (grid.shape[1], grid.shape[0])
        save_png(Image.fromarray(grid), path)
        known[item.id] = stamps
    write_atomically(note, json.dumps(known) + "\n")
    return images


def ask(settings: Settings, plan: GridPlan, chat: Chat, subject: Subject, images: Sequence[ImageFile]) -> Answers:
    """Asks the judge about every sample. Keeps only answers yes or no: the next run asks again for the others."""
    assert plan.judge is not None
    work = [
        (item, question, images[place * GRID + crop])
        for place, item in enumerate(plan.items)
        for crop in range(plan.crops)
        for question in item.questions
    ]
    identity = {
        "benchmark": "dpg_bench",
        "version": _VERSION,
        "judge": identity_of(plan.judge),
        "asked": ASKED,
        **weights_of(plan.judge, chat.version),
    }

    def build(place: int, attempt: int, temperature: float) -> Question:
        _, question, image = work[place]
        return Question(parts=(image.pixels(), ASKED.format(question=question.text)), max_tokens=8)

    def read(place: int, answer: Answer) -> tuple[str | None, Row]:
        word = None if answer.error is not None else parse_word(answer.text, (YES, "no"))
        return (answer.error or UNPARSED, {}) if word is None else (None, {"yes": word == YES})

    keys = [image.key_with(question.text) for _, question, image in work]
    with Journal(subject.folder, identity) as journal:
        rows = ask_kept(
            chat, keys, build, read, journal, Asking(), label=subject.label, lost="without answers", kept=(None,)
        )
    found: Answers = {item.id: [{} for _ in range(plan.crops)] for item in plan.items}
    for (item, question, image), row in zip(work, rows, strict=True):
        crops = found[item.id]
        if "yes" not in row:
            found[item.id] = None
        elif crops is not None:
            crops[image.sample][question.id] = float(row["yes"])
    return found


def grid_result(settings: Settings, plan: GridPlan, chat: Chat, parts: Sequence[SubjectVerdicts[Answers]]) -> Result:
    """Scores of a subject, and of a base if there is one."""
    scores = [aggregate(plan.items, part.found) for part in parts]
    by_item = [
        {item.id: 100 * item_score(crops, item.questions) for item in plan.items if (crops := part.found[item.id])}
        for part in parts
    ]
    intervals = [{"score": mean_interval(list(part.values()), ends=Range(0.0, 100.0))} for part in by_item]
    said = f"DPG-Bench {number(scores[0].score, 2)} of 100 (95 % {bounds(intervals[0]['score'])}) for {parts[0].label}"
    changes = {}
    if len(parts) > 1:
        shared = [name for name in by_item[0] if name in by_item[1]]
        change = mean_interval([by_item[0][name] - by_item[1][name] for name in shared], ends=Range(-100.0, 100.0))
        said += f"; against {parts[1].label} {signed(change.mean, 2)} (95 % {bounds(change, sign=True)})"
        changes["score"] = change
    metrics = [{"score": part.score, "skipped": float(part.skipped), **part.categories} for part in scores]
    rows = [
        {"index": place, "item": item.id, "prompt": item.prompt, "score": by_item[0].get(item.id)}
        for place, item in enumerate(plan.items)
    ]
    listed: list[Sequence[Mapping[str, Any]]] = [rows, ()]
    return result_of(
        settings.benchmark,
        f"{said}: {plural(len(plan.items), 'prompt')}, {plan.crops} images each.",
        [
            SideResult(rows=own, metrics=numbers, intervals=bounded)
            for own, numbers, bounded in zip(listed[: len(parts)], metrics, intervals, strict=True)
        ],
        changes=changes,
        tables=(_table([part.label for part in parts], scores),),
        notes=(
            "The judge is not mPLUG-large, the published one: compare numbers of this judge with each other only.",
            *(
                f"{part.label}: {found.skipped} of {len(plan.items)} items have a question without answer and are in "
                f"no number."
                for part, found in zip(parts, scores, strict=True)
                if found.skipped
            ),
        ),
        facts={"judge": chat.version, "items": len(plan.items), "crops": plan.crops},
    )


def _table(labels: Sequence[str], scores: Sequence[Scores]) -> Table:
    names = [*scores[0].categories, "score"]
    columns = [{**part.categories, "score": part.score} for part in scores][::-1]  # base first
    rows = tuple((name, *(number(column[name], 2) if name in column else "-" for column in columns)) for name in names)
    note = "Categories take the answers about an item's last image, before dependencies, as the published script does."
    return Table(title="Scores", head=("", *labels[::-1]), rows=rows, note=note)


RULES: Rules[GridPlan, Any, Answers] = Rules(
    plan=plan_of,
    prompts=lambda settings, subject, plan: [
        Prompt(text=item.prompt, metadata={"item_id": item.id}) for item in plan.items
    ],
    place=place,
    judge=load_judge,
    ask=ask,
    result=grid_result,
    unjudged=lambda plan: (f"DPG-Bench: {plural(len(plan.items), 'grid')} of 2 x 2 images", FOLDER),
)
