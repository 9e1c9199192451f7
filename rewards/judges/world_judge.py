"""A judge that ships: it reads the embedded world's drawings from pixels, without a server or weights.

    judge: {model: world:shapes, wrong: 0.1}

It answers what `rubric`, `yes_no`, `edit_score` (`digits`), `edit_principles` (`yes_no`) and comparators of style
`categories` ask about prompts and edits in `asset:prompts`, whatever words stand around them.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import chain

import torch

from flowrl.benchmarks.geneval.rules import strict, verdict
from flowrl.config.sections import share
from flowrl.rewards.judges.chat import Answer, Chat, Pixels, Question
from flowrl.world.detector import color_of, detect_shapes
from flowrl.world.edits import draw_edit, edit_records, edit_verdict
from flowrl.world.scene_prompts import Record, eval_records, train_records

RULES = {
    "Is every kind of object there that is asked for?": "class",
    "Are there exactly as many objects as asked for?": "count",
    "Has every object the colour that is asked for?": "color",
    "Is every object where it is asked to be?": "position",
    "Is the light soft?": "",
    "Has the image charm?": "",
}
"""The rules that it proposes, and the field of a GenEval record that each looks at; chance answers the last two."""
CATEGORIES = {"kinds": "class", "numbers": "count", "colours": "color", "winner": None}
"""The categories by which it compares two images, and the field that each looks at; last the verdict on all."""


@cache
def world_records() -> dict[str, dict[bytes, Record]]:
    """Records by prompt, the longest first, since some begin like others, and by the pixels of the source image."""
    found: dict[str, dict[bytes, Record]] = {}
    for record in chain(train_records(), eval_records(), *edit_records()):
        source = draw_edit(record)[0].tobytes() if "scene" in record else b""
        found.setdefault(record["prompt"], {})[source] = record
    return dict(sorted(found.items(), key=lambda item: -len(item[0])))


def holds(image: Pixels, record: Record, field: str | None) -> bool:
    """GenEval's verdict; with a field, whether that alone is as the record asks."""
    include = [{"class": c["class"], "count": 1} | {k: c[k] for k in c if k == field} for c in record["include"]]
    asked = record if field is None else {"tag": record["tag"], "include": include}
    found, colors = detect_shapes(image), partial(color_of, image)
    return strict(found, asked, colors) if field == "count" else verdict(found, asked, colors).correct


def score_of(images: Sequence[Pixels], record: Record, text: str, chance: int) -> float:
    """How far a question's answer is yes, in [0, 1]; an even `chance` is no to a rule that looks at nothing."""
    if "scene" in record:
        found = edit_verdict(images[-1], images[0], record)
        return found.kept if "(keep)" in text else found.done if "(follow)" in text else found.graded
    field = next((field for rule, field in RULES.items() if rule in text), None)
    return float(chance % 2 if field == "" else holds(images[-1], record, field))


@dataclass(frozen=True, kw_only=True, slots=True)
class WorldJudge:
    """The judge and its options; asked the same again about the same images, it answers the same."""

    model: str
    """`world:shapes`."""
    wrong: float = 0.0
    """Share of the answers that say the opposite, drawn by images and question, in steps of 1/256."""

    def __post_init__(self) -> None:
        share("wrong", self.wrong)

    @property
    def version(self) -> str:
        return f"{self.model}-1:wrong-{self.wrong:g}"

    def build(self, device: torch.device) -> Chat:
        """Itself; it runs on the host."""
        return self

    def ask(self, questions: Sequence[Question]) -> list[Answer]:
        """Answers in the order of the questions; "other_world" where one is about no prompt and no edit of this one."""
        return [self._answer(question) for question in questions]

    def _answer(self, question: Question) -> Answer:
        text = "".join(part for part in question.parts if isinstance(part, str))
        images = [part for part in question.parts if not isinstance(part, str)]
        sources = next((found for prompt, found in world_records().items() if prompt in text), {})
        record = sources.get(images[0].tobytes(), sources.get(b""))
        if record is None:
            return Answer(error="other_world")
        chance = hashlib.sha256(b"".join(image.tobytes() for image in images) + text.encode()).digest()
        wrong = chance[1] / 256 < self.wrong
        if "cat_winner" in text:
            shown = images[::-1] if wrong else images
            named = {
                name: ("neither", "Image 1", "Image 2")[holds(shown[0], record, field) - holds(shown[1], record, field)]
                for name, field in CATEGORIES.items()
            }
            listed = [{"name": name, "cat_winner": named[name]} for name in named if name != "winner"]
            return Answer(text=json.dumps({"categories": listed, "winner": named["winner"]}))
        if question.is_text:
            principles = ["KEEP: what the instruction does not name is as it was", f"FOLLOW: {record['prompt']}"]
            return Answer(text="\n".join(principles if "scene" in record else [f"RULE: {rule}" for rule in RULES]))
        score = score_of(images, record, text, chance[0])
        yes = 0.02 + 0.96 * (1 - score if wrong else score)  # never quite sure
        return Answer(text="Yes", logprobs=({"Yes": math.log(yes), "No": math.log(1 - yes), f"{5 * yes:.0f}": 0.0},))
