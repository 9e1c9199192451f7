"""A judge that is shown two samples side by side and says which is better.

The question is a text file with `{prompt}` and, in the place for the wanted form of the answer, `{answer}`. Ask a
checkpoint that was trained on one wording in that wording: name it by `template`. Images come in the order
source, first sample, second sample; see `flowrl.rewards.judges.templates`.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch

from flowrl.prompts.loading import Prompt
from flowrl.rewards.base import RewardInputs
from flowrl.rewards.base.prompt_needs import no_source
from flowrl.rewards.comparing.comparators import Comparator, Gives, Pairs, Verdicts
from flowrl.rewards.judges.answers import parse_winner, yes_no
from flowrl.rewards.judges.asking import ask_all, json_record, number_list, pixels_of, shown_of
from flowrl.rewards.judges.chat import TOP_LOGPROBS, Answer, Pixels, build_chat, check_chat, is_server, score_schema
from flowrl.rewards.judges.templates import load_template, read_template

_TEMPLATES = {"image": "pairwise", "video": "pairwise_video", "edit": "pairwise_edit"}
_NEEDS = {"image": ("images",), "video": ("videos",), "edit": ("images", "source_images")}
_MAX_TOKENS = {"answer_tag": 2048, "scores_json": 1024, "categories": 4096, "logprobs": 1}
_FRAMES = 8  # of each video, as Pref-GRPO shows them
_ANSWERS = {
    "answer_tag": "Reason step by step first. Then end with one line, which is <answer>{name} 1 is better</answer> or "
    "<answer>{name} 2 is better</answer>, or, if there is nothing to choose between them, <answer>tie</answer>.",
    "scores_json": "Rate each from 0 (useless) to 10 (flawless) by these points. You may reason first. End with one "
    'line of JSON that holds the score of {name} 1 and then that of {name} 2: {"scores": [first, second]}',
    "categories": "Sort the points into three categories and judge each by itself. Reply with one JSON object, with "
    'the winners, {name} 1 or {name} 2, after the reasons: {"categories": [{"name": ..., "reason": ..., "cat_winner": '
    '...}, ...], "reason": ..., "winner": ...}',
    "logprobs": "Reply with one digit and nothing else: 1 if {name} 1 is better, 2 if {name} 2 is better.",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class JudgeComparator:
    """Asks a judge about every pair, all pairs of a call at once."""

    judge: Mapping[str, Any]
    """The model, see `flowrl.rewards.judges.chat`."""
    style: Literal["answer_tag", "scores_json", "categories", "logprobs"] = "answer_tag"
    """`answer_tag`: it reasons and names the winner in <answer>...</answer>. `scores_json`: it ends with {"scores": [a,
    b]}, and the greater wins. `categories`: JSON that names a `cat_winner` of each of its `categories`, the first three
    of which count, and an overall `winner` (UnifiedReward-Flex). `logprobs`: one digit, and the verdict is
    `sigmoid(lp_1 - lp_2)` of its log-probabilities; cheap, no reasoning, and smooth with `soft: true`."""
    media: Literal["image", "video", "edit"] = "image"
    """What is compared: images; videos by some frames of each; or edits, shown with their source."""
    template: str | None = None
    """A text file of your own, or a published text: `published/unified_reward/pairwise_think.txt` for
    UnifiedReward-Think (Pref-GRPO), `published/unified_reward/pairwise.txt` for UnifiedReward, both with style
    answer_tag; `published/unified_reward/pairwise_flex.txt` with style categories. Null takes our own words."""
    frames: int | None = None
    """Frames of each video, spread evenly; null takes 8."""
    max_tokens: int | None = None
    """Length of the answer; null takes 2048, 1024, 4096 and 1, by style."""
    unparsed: Literal["failed", "tie"] = "failed"
    """If an answer names no winner, it has `failed`, or counts as a `tie` (Pref-GRPO)."""

    def __post_init__(self) -> None:
        if self.frames is not None and (self.media != "video" or self.frames < 1):
            raise ValueError(
                f"frames is a number of at least 1 for media: video, got {self.frames} for {self.media!r}."
            )
        one = self.style == "logprobs"
        if self.max_tokens is not None and (self.max_tokens < 1 or (one and self.max_tokens != 1)):
            bound = "1 with style: logprobs, which reads one digit" if one else "at least 1"
            raise ValueError(f"max_tokens must be {bound}, got {self.max_tokens}.")
        check_chat(self.judge)
        self.text()

    @property
    def gives(self) -> Gives:
        """Any with log-probabilities, otherwise wins."""
        return "either" if self.style == "logprobs" else "wins"

    def lacks(self, prompt: Prompt) -> str | None:
        """A source image, if edits are compared."""
        return no_source(prompt) if self.media == "edit" else None

    def text(self) -> str:
        """The template, ours or the user's."""
        return read_template(_TEMPLATES[self.media], self.template)

    def build(self, device: torch.device) -> Comparator:
        """Makes the comparator."""
        chat, text = build_chat(self.judge, device=device), self.text()
        tokens, count = self.max_tokens or _MAX_TOKENS[self.style], self.frames or _FRAMES
        shown = f":frames-{count}" if self.media == "video" else ""
        digest = hashlib.sha256((text + _ANSWERS[self.style]).encode()).hexdigest()[:12]
        words = load_template(_TEMPLATES[self.media], self.template)

        def compare(inputs: RewardInputs, pairs: Pairs) -> Verdicts:
            wanted = _ANSWERS[self.style].replace("{name}", "Video" if self.media == "video" else "Image")
            shown = {place: self._images(inputs, place) for place in np.unique(pairs).tolist()}
            errors: list[str | None] = [None] * len(pairs)
            questions, asked = [], []
            for number, (first, second) in enumerate(pairs.tolist()):
                sources = inputs.source_images[first] if inputs.source_images and self.media == "edit" else []
                if self.media == "edit" and not sources:
                    errors[number] = "missing_field"
                    continue
                images = [*(pixels_of(source) for source in sources), *shown[first], *shown[second]]
                fields = {"prompt": inputs.prompts[first], "answer": wanted}
                top = TOP_LOGPROBS if self.style == "logprobs" else 0
                asked_one = words.question(images, fields, max_tokens=tokens, top_logprobs=top)
                schema = score_schema(2, 0, 10, key="scores", whole=False) if self.style == "scores_json" else None
                questions.append(replace(asked_one, schema=schema))
                asked.append(number)
            wins = np.full(len(pairs), np.nan)
            categories: list[Mapping[str, float]] = [{}] * len(pairs)
            for number, answer in zip(asked, ask_all(chat, questions), strict=True):
                wins[number], errors[number], categories[number] = self._read(answer)
            return Verdicts(first_wins=wins, errors=tuple(errors), categories=tuple(categories))

        return Comparator(
            compare=compare,
            needs=frozenset({"prompts", *_NEEDS[self.media]}),
            version=f"judge:{chat.version}:{self.style}:{self.media}{shown}:template-{digest}:max_tokens-{tokens}:"
            f"unparsed-{self.unparsed}",
            waits=is_server(self.judge),
        )

    def _read(self, answer: Answer) -> tuple[float, str | None, Mapping[str, float]]:
        """The probability that the first is better, or NaN and why the answer does not say; and that by category."""
        by_category: dict[str, float] = {}
        if answer.error:
            return math.nan, answer.error, {}
        if self.style == "logprobs" and not answer.logprobs:
            return math.nan, "no_logprobs", {}
        if self.style == "logprobs":
            verdict = yes_no(answer.logprobs[0], yes="1", no="2")
        elif self.style == "scores_json":
            scores = number_list(answer.text, 2, brackets=False)
            verdict = None if scores is None else 0.5 * (1 + (scores[0] > scores[1]) - (scores[0] < scores[1]))
        elif self.style == "categories":
            said = json_record(answer.text)
            verdict, by_category = named_winner(said["winner"]) if "winner" in said else None, category_winners(said)
        else:
            winner = parse_winner(answer.text)
            verdict = None if winner is None else {"A": 1.0, "B": 0.0, "tie": 0.5}[winner]
        if verdict is not None:
            return verdict, None, by_category
        return (0.5, None, by_category) if self.unparsed == "tie" else (math.nan, "unparsable", {})

    def _images(self, inputs: RewardInputs, place: int) -> list[Pixels]:
        if self.media == "video":
            if inputs.videos is None:
                raise ValueError("comparator: media is video, but images are made: set media: image.")
            return shown_of(inputs, place, self.frames or _FRAMES)
        if self.media == "edit" and inputs.source_images is None:
            raise ValueError("comparator: media is edit, but the samples have no source images: set media: image.")
        return shown_of(inputs, place)


def named_winner(text: object) -> float:
    """1 where "Image 1" or "Video 1" is named, 0 where it is the second; 1/2 where neither or both are."""
    named = set(re.findall(r"\b(?:video|image)\s*([12])\b", str(text).casefold()))
    return {"1": 1.0, "2": 0.0}[named.pop()] if len(named) == 1 else 0.5


def category_winners(said: Mapping[str, Any]) -> dict[str, float]:
    """Whether the first wins in each of the first three categories of an answer in JSON."""
    found = said.get("categories")
    listed = [one for one in found[:3] if isinstance(one, Mapping)] if isinstance(found, list) else []
    return {str(one.get("name") or "category").strip(): named_winner(one.get("cat_winner")) for one in listed}
