"""The questions to a judge about the image of a case (words, images, tries), and how its answers are read."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import starmap
from pathlib import Path

import numpy as np
from PIL import Image

from flowrl.benchmarks.judged.cases import Ask, Case, Judgement, Protocol
from flowrl.evaluation.kept_answers import Asking, ask_kept
from flowrl.generation.folders import ImageFile
from flowrl.media.reading import read_image
from flowrl.rewards.judges.answers import answer_mass
from flowrl.rewards.judges.asking import UNPARSED
from flowrl.rewards.judges.chat import TOP_LOGPROBS, Answer, Chat, Pixels, Question
from flowrl.rewards.judges.templates import BLANK, Template, digest_of, load_template
from flowrl.runtime.digests import content_digest
from flowrl.runtime.journal import Journal, Row
from flowrl.runtime.randomness import counter_seed

VALUES = "values"
"""Key, in a row of the journal, of the numbers read from a reply."""
_MASS = "mass"


@dataclass(frozen=True, kw_only=True, slots=True)
class WordsOf:
    """The words of all questions by name, and their source."""

    templates: Mapping[str, Template]
    origin: str

    @property
    def digest(self) -> str:
        """A short hash of all words."""
        return digest_of(self.templates)


def find_words(protocol: Protocol, asks: Iterable[Ask], given: Path | None, beside: Sequence[Path]) -> WordsOf:
    """Finds the words of questions.

    Args:
        given: the folder of the option template_dir; its NAME.txt replaces the published file.
        beside: where published files may lie if it was not given.

    Raises ValueError: words are missing, lack a field, or mark places for another number of images.
    """
    published = protocol.words([given] if given is not None else beside)
    templates, own = {}, []
    for ask in asks:
        file = given / f"{ask.words}.txt" if given is not None else None
        if file is not None and file.is_file():
            templates[ask.words] = load_template(ask.words, str(file))
            own.append(ask.words)
        elif ask.words in published:
            words = published[ask.words]
            templates[ask.words] = Template(user=words.user, system=words.system)
        else:
            raise ValueError(
                f"{protocol.title}: the judge is asked in published words, which are not shipped. Give `options` "
                f"template_dir=FOLDER, your copy of the repository that the prompts are from, or a folder with "
                f"{ask.words}.txt, a template with {', '.join(f'{{{name}}}' for name in ask.fields) or 'no field'}."
            )
        if lacking := [name for name in ask.fields if f"{{{name}}}" not in templates[ask.words].user]:
            raise ValueError(f"the words {ask.words} must hold {{{lacking[0]}}}, so that the judge is told.")
        templates[ask.words].parts([BLANK] * (2 if ask.source else 1), {})
    return WordsOf(templates=templates, origin=f"own words: {', '.join(own)}" if own else "published words")


def ask_cases(
    chat: Chat, protocol: Protocol, cases: Sequence[Case], images: Sequence[ImageFile], words: WordsOf, asking: Asking,
    journal: Journal, *, label: str,
) -> tuple[list[Judgement], list[Row]]:  # fmt: skip
    """Asks what the journal does not answer yet; returns verdicts on each case, and the rows of all questions."""
    work = [(case, image, ask) for case, image in zip(cases, images, strict=True) for ask in case.asks]

    def build(place: int, attempt: int, temperature: float) -> Question:
        case, image, ask = work[place]
        source = _source_of(case)
        shown = [_source(*source)] if ask.source and source is not None else []
        shown.append(_result(image.path, image.stamp, source if protocol.resize else None))
        if ask.forms:
            return words.templates[ask.words].question(shown, ask.fields, top_logprobs=TOP_LOGPROBS)
        seed = counter_seed("judged", asking.seed, case.key, ask.name, attempt) % 2**31
        return words.templates[ask.words].question(
            shown, ask.fields, max_tokens=asking.max_tokens, temperature=temperature, seed=seed
        )

    def read(place: int, answer: Answer) -> tuple[str | None, Row]:
        case, _, ask = work[place]
        found = read_answer(protocol, case, ask, answer)
        if found is not None:
            return None, {VALUES: found}
        return (UNPARSED if ask.forms else answer.error or UNPARSED), {}

    def key_of(case: Case, image: ImageFile, ask: Ask) -> str:
        source = _source_of(case)
        asked = [words.templates[ask.words].digest, ask.name, dict(ask.fields), list(ask.forms), source and source[1]]
        return image.key_with(json.dumps(asked))

    keys = list(starmap(key_of, work))
    # A question whose first token is read comes out the same at every try.
    once = all(ask.forms for _, _, ask in work)
    rows = ask_kept(chat, keys, build, read, journal, replace(asking, attempts=1) if once else asking, label=label)
    listed = iter(rows)
    return [_judgement(case, [next(listed) for _ in case.asks]) for case in cases], rows


def _source_of(case: Case) -> tuple[Path, str] | None:
    """The image that an edit starts from, with a digest of its content."""
    return None if case.source is None else (case.source, content_digest(case.source))


def read_answer(protocol: Protocol, case: Case, ask: Ask, answer: Answer) -> Mapping[str, float] | None:
    """Reads the numbers in a judge's answer; None if it cannot be read, or does not fit the case."""
    if ask.forms:
        return {_MASS: answer_mass(answer.logprobs[0], ask.forms)} if answer.logprobs else None
    found = protocol.read_reply(ask.name, answer.text)
    if found is not None and protocol.fits is not None and not protocol.fits(case, {ask.name: found}):
        return None
    return found


def _judgement(case: Case, rows: Sequence[Row]) -> Judgement:
    whole = all(row["error"] is None for row in rows)
    return Judgement(
        case=case,
        replies={ask.name: row["output"] for ask, row in zip(case.asks, rows, strict=True)},
        values={ask.name: row[VALUES] for ask, row in zip(case.asks, rows, strict=True)} if whole else None,
    )


@lru_cache(maxsize=8)  # the questions about one image stand together
def _source(path: Path, content: str) -> Pixels:
    return read_image(path)


@lru_cache(maxsize=64)
def _result(path: Path, stamp: str, source: tuple[Path, str] | None) -> Pixels:
    """The image, resized to its source's size if that is given, with Pillow's default."""
    pixels = ImageFile(file=stamp, path=path, prompt="", index=0).pixels()
    if source is None:
        return pixels
    height, width = _source(*source).shape[:2]
    if pixels.shape[:2] == (height, width):
        return pixels
    return np.asarray(Image.fromarray(pixels).resize((width, height)))
