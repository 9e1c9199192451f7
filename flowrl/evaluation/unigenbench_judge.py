"""How a judge is asked UniGenBench's questions: template, test points, repeated tries, journal.

One question per image. Its words come from a template with the fields {prompt}, {testpoints} (a Python list),
{definitions} and {descriptions} (a line "test point: text" for each); `<image>` marks where the image stands, else it
comes first, or last where the judge is a hosted Gemini, as in the published code.

Template and definitions are the published ones (CC BY 4.0, `rewards/templates/published/unigenbench`), on which the
benchmark's offline judges were trained: a judge that is asked in other words is another judge. The options `template`
and `definitions` put other words in their place; `own` takes this package's.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flowrl.benchmarks.unigenbench.items import Item
from flowrl.benchmarks.unigenbench.points import MEANINGS, Language
from flowrl.benchmarks.unigenbench.replies import Reply, read_reply
from flowrl.evaluation.kept_answers import Tries, ask_kept
from flowrl.generation.folders import ImageFile
from flowrl.generation.journal import Journal, Row
from flowrl.rewards.judges.asking import UNPARSED
from flowrl.rewards.judges.chat import Answer, Chat, Question, array_schema, object_schema
from flowrl.rewards.judges.templates import IMAGE, OWN, Template, load_template, published_file
from flowrl.runtime.files import read_json
from flowrl.runtime.randomness import counter_seed

SOURCE = "unigenbench"


@dataclass(frozen=True, kw_only=True, slots=True)
class Wording:
    """What a judge is told besides the item: a template, and what each test point means."""

    template: Template
    meanings: Mapping[str, str]
    own: bool
    """Whether any of it is other than the published wording."""

    @property
    def digest(self) -> str:
        """A short hash of all words."""
        listed = json.dumps([self.template.digest, dict(self.meanings)], sort_keys=True)
        return hashlib.sha256(listed.encode()).hexdigest()[:8]

    def question(self, item: Item, image: Any, *, max_tokens: int, temperature: float, seed: int) -> Question:
        """The question about one image of an item."""
        described = zip(item.points, item.descriptions, strict=True)
        fields = {
            "prompt": item.prompt,
            "testpoints": str(list(item.points)),
            "definitions": "\n".join(f"{point}: {self.meanings[point]}" for point in item.points),
            "descriptions": "\n".join(f"{point}: {text}" for point, text in described),
        }
        asked = self.template.question([image], fields, max_tokens=max_tokens, temperature=temperature, seed=seed)
        lists = {
            "analysis": array_schema({"type": "string"}, len(item.points)),
            "score": array_schema({"type": "integer", "enum": [0, 1]}, len(item.points)),
        }
        return replace(asked, schema=object_schema(lists))


def read_wording(
    language: Language, template: str | None, definitions: str | None, *, image_last: bool = False
) -> Wording:
    """The published words, our own, or those of the user's files.

    Args:
        language: of the prompts.
        template: a text file with the four fields, `own`, or None for the published one.
        definitions: a JSON file `{test point: what it means}` with all 27 of the language, `own`, or None likewise.
        image_last: whether the image follows the text where the template does not mark its place.

    Raises:
        ValueError: a file that is not there, a field or a test point that is missing.
    """
    try:
        words = load_template(f"unigenbench_{language}", template, source=SOURCE, images=1)
    except ValueError as error:
        raise ValueError(f"--option template={template}: {error}") from error
    if image_last and IMAGE not in words.user:
        words = replace(words, user=words.user + IMAGE)
    if definitions == OWN:
        meanings: Mapping[str, str] = MEANINGS[language]
    else:
        file = published_file(SOURCE, f"definitions_{language}.json") if definitions is None else Path(definitions)
        meanings = _definitions(file.expanduser(), language)
    return Wording(template=words, meanings=meanings, own=template is not None or definitions is not None)


def _definitions(path: Path, language: Language) -> dict[str, str]:
    try:
        found = read_json(path)
    except ValueError as error:
        raise ValueError(f"--option definitions: {error}") from error
    if not all(isinstance(text, str) for text in found.values()):
        raise ValueError(f"--option definitions={path}: must be an object {{test point: what it means}}.")
    known = {label.strip(): text for label, text in found.items()}
    if missing := [label for label in MEANINGS[language] if label not in known]:
        raise ValueError(f"--option definitions={path}: lacks {len(missing)} test points, such as {missing[0]!r}.")
    return {label: known[label] for label in MEANINGS[language]}


@dataclass(frozen=True, kw_only=True, slots=True)
class Asking:
    """How answers are asked for.

    Attributes:
        attempts: tries for an image; each after the first has another seed.
        max_tokens: length of an answer.
        temperature: of the first try; 0 is greedy.
        seed: of sampled answers.
    """

    attempts: int = 11
    max_tokens: int = 4096
    temperature: float = 0.0
    seed: int = 0


def judge_key(image: ImageFile, item: Item) -> str:
    """A key for the answer about an image: the file as it is, and what was asked about it."""
    return image.key_with(json.dumps([item.prompt, item.points, item.descriptions]))


def ask_images(
    chat: Chat,
    wording: Wording,
    work: Sequence[tuple[ImageFile, Item]],
    journal: Journal,
    asking: Asking,
    *,
    label: str,
    show: bool = True,
) -> list[Row]:
    """The judge's answer about every image, in their order; those in the journal are not asked for again.

    A row holds `output` (the last reply), `attempts`, `error` (None, or why there are no scores), `tokens` and
    `seconds` (its share of the time). An answer that cannot be read is asked for again, with another seed, up to
    `attempts` times. Then it is kept as failed, and so is one that was cut off; an image whose server failed is not
    kept: the next run asks for it.

    Raises:
        ValueError: the judge answers nothing at all: it is not there, or refuses. What it said before is kept.
    """
    keys = [judge_key(image, item) for image, item in work]

    def build(place: int, attempt: int, temperature: float) -> Question:
        image, item = work[place]
        return wording.question(
            item, image.pixels(), max_tokens=asking.max_tokens, temperature=temperature,
            seed=_seed(asking, image, attempt),
        )  # fmt: skip

    def read(place: int, answer: Answer) -> tuple[str | None, Row]:
        return _error(answer, work[place][1]), {}

    tries = Tries(attempts=asking.attempts, temperature=asking.temperature)
    return ask_kept(chat, keys, build, read, journal, tries, label=label, show=show)


def _seed(asking: Asking, image: ImageFile, attempt: int) -> int:
    return counter_seed("unigenbench", asking.seed, image.index, image.sample, attempt) % 2**31


def _error(answer: Answer, item: Item) -> str | None:
    if read_reply(answer.text, len(item.points)) is not None:
        return None  # cut off after its end, or not at all
    return answer.error or UNPARSED


def reply_of(row: Row, item: Item) -> Reply | None:
    """The lists in a row's reply, None where it has no scores."""
    return read_reply(row["output"], len(item.points)) if row["error"] is None else None
