"""DPG-Bench: four images of each dense prompt as a grid, under the names that its script reads, and a judge.

    flowrl eval MODEL --benchmark dpg_bench --prompts dpg_bench.csv                   draws, and writes the grids
    flowrl eval MODEL --benchmark dpg_bench --prompts dpg_bench.csv --judge MAPPING   and asks a judge of this toolkit

The published judge is mPLUG-large through the benchmark's own script, which takes the folder of grids. **Another judge
gives another metric**: its numbers compare with each other only. Options: see `Options`.

In the subject's folder: `dpg_bench/<item>.png`, and the journal of the answers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image

from flowrl.benchmarks.dpg_bench import YES, Item, Scores, aggregate, boxes, item_score, read_items
from flowrl.config.train import resolve_path
from flowrl.evaluation.benchmark import Result
from flowrl.evaluation.named_judges import check_alive, check_tokens, read_judge, weights_of
from flowrl.evaluation.runner_parts import metrics_of, options_of
from flowrl.generation.folders import ImageFile
from flowrl.generation.generate import images_of, some
from flowrl.generation.journal import Journal
from flowrl.generation.subject import Settings, Subject
from flowrl.media.images import save_png
from flowrl.prompts.loading import Prompt
from flowrl.rendering.markup import bounds, number, plural, signed
from flowrl.rendering.terminal_text import Table
from flowrl.rewards.judges.answers import parse_word
from flowrl.rewards.judges.asking import ask_all
from flowrl.rewards.judges.chat import Chat, Question, build_chat, identity_of
from flowrl.runtime.files import read_json, write_atomically
from flowrl.runtime.progress import progress
from flowrl.statistics.bootstrap import Interval
from flowrl.statistics.means import mean_interval

FOLDER = "dpg_bench"
MADE_OF = "dpg_bench_grids.json"
"""In the subject's folder: the images of which the grids were made."""
GRID = 4
ASKED = "{question}\nAnswer with one word, yes or no."
MAX_TOKENS = 8
AT_ONCE = 64
_VERSION = 1

Answers = dict[str, list[dict[int, float]] | None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """What `--option` sets."""

    all_rows: bool = False
    """Keep the first row of the file, which the published loader leaves out."""
    crops: int = GRID
    """Images of a grid that are judged, 1 to 4."""

    def __post_init__(self) -> None:
        if not 1 <= self.crops <= GRID:
            raise ValueError(f"crops must be 1 to {GRID}, got {self.crops}.")


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Everything that is known before a model or a judge is loaded; `judge` is None where only grids are wanted."""

    items: tuple[Item, ...]
    judge: dict[str, Any] | None
    crops: int


def check(settings: Settings) -> None:
    """Refuses what can be known to be wrong before weights load."""
    plan_of(settings)


def plan_of(settings: Settings) -> Plan:
    """Reads prompts, judge and options.

    Raises:
        ValueError: see `check`.
    """
    options = options_of(settings, Options)
    if settings.prompts is None:
        raise ValueError("dpg_bench needs --prompts: dpg_bench/dpg_bench.csv of the repository TencentQQGYLab/ELLA.")
    if settings.subject.images is not None:
        raise ValueError("dpg_bench draws its own images, since a grid holds four of a prompt: leave --images out.")
    if settings.samples != GRID:
        raise ValueError(f"dpg_bench puts {GRID} images of a prompt on a grid, got --samples {settings.samples}.")
    items = some(read_items(resolve_path(settings.prompts), skip_first=not options.all_rows), settings.num_prompts)
    judge = None if settings.judge is None else read_judge(settings.judge, {}, owner="dpg_bench")
    return Plan(items=tuple(items), judge=judge, crops=options.crops)


def run(settings: Settings) -> Result:
    """Draws, writes the grids, asks the judge if there is one, and sums up."""
    plan = plan_of(settings)
    subjects = settings.subjects
    prompts = [Prompt(text=item.prompt, metadata={"item_id": item.id}) for item in plan.items]
    drawn = [images_of(settings, subject, prompts) for subject in subjects]
    for subject, images in zip(subjects, drawn, strict=True):
        write_grids(subject, plan.items, images)
    folder = str(settings.subject.folder / FOLDER)
    count = len(plan.items)
    if plan.judge is None:
        return Result(
            headline=f"DPG-Bench: {plural(count, 'grid')} of 2 x 2 images in {folder}; no judge was named.",
            rows=(), metrics={}, tables=(),
            notes=("The benchmark's own script takes this folder; or give --judge.",), facts={"folder": folder},
        )  # fmt: skip
    chat = build_chat(plan.judge, device=torch.device(settings.device), owner="dpg_bench, --judge")
    answers = [
        ask_items(chat, plan, images, subject, show=settings.show)
        for subject, images in zip(subjects, drawn, strict=True)
    ]
    return _result(settings, plan, subjects, answers, chat.version)


def write_grids(subject: Subject, items: Sequence[Item], images: Sequence[ImageFile]) -> None:
    """`dpg_bench/<item>.png` of every four images, row by row; those that are there and are of these images stay."""
    folder, note = subject.folder / FOLDER, subject.folder / MADE_OF
    known = read_json(note, "delete it, the grids are made again") if note.is_file() else {}
    for place, item in enumerate(items):
        path, shown = folder / f"{item.id}.png", images[place * GRID : (place + 1) * GRID]
        stamps = [image.stamp for image in shown]
        if path.is_file() and known.get(item.id) == stamps:
            continue
        four = [image.pixels() for image in shown]
        grid = np.concatenate([np.concatenate(four[:2], axis=1), np.concatenate(four[2:], axis=1)], axis=0)
        assert boxes((grid.shape[1], grid.shape[0]))[3][2:] == (grid.shape[1], grid.shape[0])
        save_png(Image.fromarray(grid), path)
        known[item.id] = stamps
    write_atomically(note, json.dumps(known) + "\n")


def ask_items(chat: Chat, plan: Plan, images: Sequence[ImageFile], subject: Subject, *, show: bool = True) -> Answers:
    """1 or 0 for every question about every sample, by item; None where one of them had no answer.

    Answers that are neither yes nor no, and failures of the judge, are not kept: the next run asks again.
    """
    assert plan.judge is not None
    work = [
        (item, question.id, question.text, images[place * GRID + crop])
        for place, item in enumerate(plan.items) for crop in range(plan.crops) for question in item.questions
    ]  # fmt: skip
    keys = [image.key_with(text) for _, _, text, image in work]
    identity = {
        "benchmark": "dpg_bench", "version": _VERSION, "judge": identity_of(plan.judge), "asked": ASKED,
        **weights_of(plan.judge, chat.version),
    }  # fmt: skip
    with Journal(subject.folder, identity) as journal:
        missing = [place for place, key in enumerate(keys) if key not in journal.rows]
        batches = [missing[first : first + AT_ONCE] for first in range(0, len(missing), AT_ONCE)]
        with progress(f"judging {subject.label}", len(batches), enabled=show) as advance:
            for batch in batches:
                answers = ask_all(chat, [_question(work[place][2], work[place][3]) for place in batch])
                if not journal.rows:
                    check_alive(answers)
                for place, answer in zip(batch, answers, strict=True):
                    word = None if answer.error is not None else parse_word(answer.text, (YES, "no"))
                    if word is not None:
                        journal.add(keys[place], {"yes": word == YES})
                check_tokens(answer.error for answer in answers)
                advance("")
        found: Answers = {item.id: [{} for _ in range(plan.crops)] for item in plan.items}
        for (item, question, _, image), key in zip(work, keys, strict=True):
            crops = found[item.id]
            if key not in journal.rows:
                found[item.id] = None
            elif crops is not None:
                crops[image.sample][question] = float(journal.rows[key]["yes"])
    return found


def _question(text: str, image: ImageFile) -> Question:
    return Question(parts=(image.pixels(), ASKED.format(question=text)), max_tokens=MAX_TOKENS)


def _result(
    settings: Settings, plan: Plan, subjects: Sequence[Subject], answers: Sequence[Answers], judge: str
) -> Result:
    scores = [aggregate(plan.items, part) for part in answers]
    by_item = [
        {item.id: 100 * item_score(crops, item.questions) for item in plan.items if (crops := part[item.id])}
        for part in answers
    ]
    intervals = [mean_interval(list(part.values()), ends=None) for part in by_item]
    change: Interval | None = None
    if len(subjects) > 1:
        shared = [name for name in by_item[0] if name in by_item[1]]
        change = mean_interval([by_item[0][name] - by_item[1][name] for name in shared], ends=None)
    notes = ["The judge is not mPLUG-large, the published one: compare numbers of this judge with each other only."]
    for subject, found in zip(subjects, scores, strict=True):
        if found.skipped:
            notes.append(f"{subject.label}: {found.skipped} of {len(plan.items)} items have a question without answer "
                         f"and are in no number.")  # fmt: skip
    said = f"DPG-Bench {number(scores[0].score, 2)} of 100 (95 % {bounds(intervals[0])}) for {subjects[0].label}"
    if change is not None:
        said += f"; against {subjects[1].label} {signed(change.mean, 2)} (95 % {bounds(change, sign=True)})"
    return Result(
        headline=f"{said}: {plural(len(plan.items), 'prompt')}, {plan.crops} images each.",
        rows=tuple({"index": place, "item": item.id, "prompt": item.prompt, "score": by_item[0].get(item.id)}
                   for place, item in enumerate(plan.items)),
        metrics=_metrics(scores[0]), base_metrics=_metrics(scores[1]) if change is not None else {},
        intervals={"score": intervals[0]}, base_intervals={"score": intervals[1]} if change is not None else {},
        differences={"score": change} if change is not None else {},
        tables=(_table([subject.label for subject in subjects], scores),), notes=tuple(notes),
        facts={"judge": judge, "items": len(plan.items), "crops": plan.crops},
    )  # fmt: skip


def _metrics(scores: Scores) -> dict[str, float]:
    found: Mapping[str, float] = {"score": scores.score, "skipped": float(scores.skipped), **scores.categories}
    return metrics_of("dpg_bench", found)


def _table(labels: Sequence[str], scores: Sequence[Scores]) -> Table:
    names = [*scores[0].categories, "score"]
    columns = [{**part.categories, "score": part.score} for part in scores][::-1]  # base first
    rows = tuple((name, *(number(column[name], 2) if name in column else "-" for column in columns)) for name in names)
    note = "Categories take the answers about an item's last image, before dependencies, as the published script."
    return Table(title="Scores", head=("", *labels[::-1]), rows=rows, note=note)
