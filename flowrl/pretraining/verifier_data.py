"""Preferences that a verifier learns from: drawn in the embedded world, or pairs of a file.

`edits`: a source, an instruction, and two results, of which one is better; each is asked about principle by principle,
and an answer reasons and ends in a score. `consistency`: an image and two others, of which one belongs to it; the
answer is yes or no, then the reasons.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from flowrl.pretraining.tiny_vlm import TABLES
from flowrl.prompts.pairs import Pair
from flowrl.prompts.source_images import read_image
from flowrl.rewards.base import to_uint8
from flowrl.rewards.judges.chat import TOP_LOGPROBS, Pixels, Question
from flowrl.rewards.judges.edit_judge import Plan, Principle, given_principles
from flowrl.rewards.judges.templates import Template
from flowrl.runtime.randomness import counter_seed
from flowrl.world.edits import TASKS, edit_verdict, edited_scene, failed_scene, random_edit, source_scene
from flowrl.world.scenes import LOOKS_LIKE, SHAPES, Shape, draw_scene, random_scene

Task = Literal["edits", "consistency"]
TEMPLATES = {"edits": "principle_reasoned", "consistency": "consistency"}
"""The template that a task asks with."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Side:
    """One image of a preference: what is asked about it, and what a verifier should answer, () where unknown."""

    questions: tuple[Question, ...]
    answers: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Preference:
    """An image that was preferred, and the other."""

    winner: Side
    loser: Side


def drawn_edit(words: Template, seed: int, split: str, number: int) -> Preference:
    """An edit of the embedded world, carried out or failed (`flowrl.world.edits.FAILED`), with the verdict in words."""
    rng = np.random.default_rng(counter_seed(seed, "verifier edit", split, number))
    record = random_edit(rng, TASKS[number % len(TASKS)])
    before, prompt = source_scene(record), str(record["prompt"])
    source = draw_scene(before)
    plan = (Principle(kind="keep", text=TABLES["keep"]), Principle(kind="follow", text=prompt))

    def side(after: Sequence[Shape]) -> Side:
        image = draw_scene(after)
        found = edit_verdict(image, source, record)
        shown = f"second shows {described(after)}"
        said = {"keep": f"first shows {described(before)}, {shown}", "follow": shown}
        scores = {"keep": found.kept, "follow": found.done}
        answers = tuple(f"{said[p.kind]}.\nScore: {round(10 * scores[p.kind])}" for p in plan)
        return Side(questions=edit_questions(words, source, image, prompt, plan), answers=answers)

    return Preference(winner=side(edited_scene(record)), loser=side(failed_scene(record, rng)))


def drawn_set(words: Template, seed: int, split: str, number: int) -> Preference:
    """A shape, the same elsewhere, and one that differs in colour or kind."""
    rng = np.random.default_rng(counter_seed(seed, "verifier set", split, number))
    (first,), (second,) = (random_scene({"include": [{"class": "circle", "count": 1}]}, rng) for _ in range(2))
    first = replace(first, label=SHAPES[int(rng.integers(len(SHAPES)))])
    same = replace(second, label=first.label, color=first.color)
    if rng.random() < 0.5:
        other = replace(same, color=LOOKS_LIKE[same.color])
    else:
        other = replace(same, label=SHAPES[(SHAPES.index(same.label) + 1) % len(SHAPES)])
    image, shown = draw_scene([first]), described([first])
    yes, no = f"Yes, both show {shown}.", f"No, first shows {shown}, second shows {described([other])}."
    return Preference(
        winner=Side(questions=set_question(words, image, draw_scene([same]), ""), answers=(yes,)),
        loser=Side(questions=set_question(words, image, draw_scene([other]), ""), answers=(no,)),
    )


def described(scene: Sequence[Shape]) -> str:
    """What a scene shows, from left to right."""
    return " and ".join(f"a {s.color} {s.label}" for s in sorted(scene, key=lambda s: s.x)) or "nothing"


def edit_questions(
    words: Template, source: Pixels, image: Pixels, prompt: str, plan: Sequence[Principle]
) -> tuple[Question, ...]:
    """A question for each principle, as the reward `edit_principles` asks it."""
    fields = [{"prompt": prompt, "principle": one.text, "kind": one.kind} for one in plan]
    return tuple(words.question([source, image], own) for own in fields)


def set_question(words: Template, first: Pixels, second: Pixels, prompt: str) -> tuple[Question, ...]:
    """The question about two images that the reward `grid_consistency` asks."""
    fields = {"prompt": prompt, "theme": prompt, "criterion": TABLES["criterion"]}
    return (words.question([first, second], fields, top_logprobs=TOP_LOGPROBS),)


def pair_of_file(task: Task, words: Template, row: Pair) -> Preference:
    """A pair of a file: its images, its principles (one that follows the prompt where it has none), its answers. Raises
    ValueError: there is no source, a principle cannot be read, or answers are not as many texts as questions."""
    record = row.record
    if record.get("source") is None:
        raise ValueError(f"the pair of {row.winner} needs source, the image that both are compared with.")
    source = to_uint8(read_image(record["source"])[None])[0]
    plan: Plan = given_principles(record, 10) or (Principle(kind="follow", text=row.prompt),)

    def side(name: str, path: Path, verdict: str) -> Side:
        image = to_uint8(read_image(path)[None])[0]
        asked = set_question(words, source, image, row.prompt) if task == "consistency" else ()
        questions = asked or edit_questions(words, source, image, row.prompt, plan)
        return Side(questions=questions, answers=answers_of(record, f"{name}_answers", len(questions), verdict))

    yes, no = ("Yes.", "No.") if task == "consistency" else ("", "")
    return Preference(winner=side("winner", row.winner, yes), loser=side("loser", row.loser, no))


def answers_of(record: Mapping[str, Any], key: str, count: int, usual: str) -> tuple[str, ...]:
    """The texts under a key of a pair, a text for each question; the usual one where there is none."""
    given = record.get(key, [usual] if usual else [])
    if not isinstance(given, list) or (given and len(given) != count) or not all(isinstance(t, str) for t in given):
        raise ValueError(f"{key} must be a list of {count} texts, one for each question, got {given!r}.")
    return tuple(given)
