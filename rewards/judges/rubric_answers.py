"""What learning a rubric asks a judge: why winners win, and every rule of both images of every pair.

Pairs are those of `flowrl.prompts.pairs`; their `margin` is another reward's lead of the winner.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from flowrl.media.reading import read_image
from flowrl.prompts.pairs import Pair
from flowrl.rewards.judges.asking import UNPARSED, probability_of_yes
from flowrl.rewards.judges.chat import Chat, Pixels
from flowrl.rewards.judges.rubric import rule_question
from flowrl.rewards.judges.templates import Template
from flowrl.runtime.progress import progress
from flowrl.runtime.shapes import Float64

QUESTIONS_AT_ONCE = 256  # between two lines of the cache: what a broken-off run asks again at most
MAX_TOKENS = 1024


def parse_rules(text: str) -> list[str]:
    """The rules in a judge's answer, one per line: "RULE: Are the hands well formed?"."""
    return re.findall(r"(?im)^[^\w\n]*(?:\d+[^\w\n]+)?RULE[^\w\n:]*:[^\w\n]*(\w.*?)[*_\s]*$", text)


def propose_rules(
    chat: Chat, pairs: Sequence[Pair], words: Template, *, count: int, temperature: float
) -> tuple[list[str], Counter[str]]:
    """What a judge says sets winners apart from losers, all answers in a row, and why some failed."""
    rules: list[str] = []
    errors: Counter[str] = Counter()
    with progress("rubric: reasons", len(pairs)) as advance:
        for start in range(0, len(pairs), 16):
            some = pairs[start : start + 16]
            questions = [
                words.question(
                    [_pixels(pair.winner), _pixels(pair.loser)],
                    {"prompt": pair.prompt, "count": str(count)},
                    max_tokens=MAX_TOKENS,
                    temperature=temperature,
                    seed=start + i if temperature > 0 else None,
                )
                for i, pair in enumerate(some)
            ]
            for answer in chat.ask(questions):
                found = [] if answer.error else parse_rules(answer.text)
                rules += found
                errors.update([] if found else [answer.error or UNPARSED])
                advance("")
    return rules, errors


def _pixels(path: Path) -> Pixels:
    return read_image(path, owner="preference pairs")


class AnswerCache:
    """Probabilities of yes by judge, template, image, prompt and rule, in a file that only grows; without failures."""

    def __init__(self, path: Path, *, judge: str, words: Template) -> None:
        self.path, self.prefix = path, f"{judge}\0{words.digest}"
        self.values: dict[str, float] = {}
        self.digests: dict[Path, str] = {}
        text = path.read_text(encoding="utf-8") if path.is_file() else ""
        for line in text.splitlines():
            try:
                key, value = json.loads(line)
            except ValueError:  # half a line, of a run that was killed while it wrote
                continue
            self.values[key] = float(value)
        if text and not text.endswith("\n"):
            with path.open("a", encoding="utf-8") as stream:
                stream.write("\n")

    def key(self, image: Path, prompt: str, rule: str) -> str:
        """The name of one answer; the image goes by its content."""
        if image not in self.digests:
            self.digests[image] = hashlib.sha256(image.read_bytes()).hexdigest()
        return hashlib.sha256("\0".join((self.prefix, self.digests[image], prompt, rule)).encode()).hexdigest()

    def add(self, new: Mapping[str, float]) -> None:
        """Keeps answers, in memory and in the file."""
        self.values |= new
        with self.path.open("a", encoding="utf-8") as stream:
            stream.writelines(f"{json.dumps([key, value])}\n" for key, value in new.items())


def score_rules(
    chat: Chat, pairs: Sequence[Pair], rules: Sequence[str], words: Template, cache: AnswerCache
) -> tuple[Float64[np.ndarray, " n 2 m"], Counter[str]]:
    """P(yes) of every rule on the winner [:, 0] and the loser [:, 1] of every pair, NaN where it failed, and why. Only
    what the cache does not hold is asked."""
    needed = {
        cache.key(image, pair.prompt, rule): (image, pair.prompt, rule)
        for pair in pairs
        for image in (pair.winner, pair.loser)
        for rule in rules
    }
    open_keys = [key for key in needed if key not in cache.values]
    errors: Counter[str] = Counter()
    with progress("rubric: answers", len(open_keys), enabled=bool(open_keys)) as advance:
        for start in range(0, len(open_keys), QUESTIONS_AT_ONCE):
            keys = open_keys[start : start + QUESTIONS_AT_ONCE]
            images = {path: _pixels(path) for path in {needed[key][0] for key in keys}}
            questions = [rule_question(words, images[needed[key][0]], *needed[key][1:]) for key in keys]
            new: dict[str, float] = {}
            for key, answer in zip(keys, chat.ask(questions), strict=True):
                probability = probability_of_yes(answer)
                if probability is None:
                    errors[answer.error or UNPARSED] += 1
                else:
                    new[key] = probability
                advance("")
            cache.add(new)
    scores = [
        [cache.values.get(cache.key(image, pair.prompt, rule), math.nan) for rule in rules]
        for pair in pairs
        for image in (pair.winner, pair.loser)
    ]
    return np.array(scores, dtype=np.float64).reshape(len(pairs), 2, len(rules)), errors
