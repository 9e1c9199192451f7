"""A judge that is shown two samples side by side and says which is better.

What it is asked is a text file with `{prompt}` and, where the wanted form of the answer goes, `{answer}`. A checkpoint
that was trained on one wording should be asked in that: give your copy of it as `template`. All images come first, in
the order source, first sample, second sample, and then the text.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from flowrl.rewards import RewardInputs, to_uint8
from flowrl.rewards.comparing.comparators import Comparator, FunctionComparator, Pairs, Verdicts
from flowrl.rewards.frames import frame_places
from flowrl.rewards.judges.answers import parse_winner, yes_no
from flowrl.rewards.judges.chat import Answer, Chat, Question, build_chat, check_chat

Style = Literal["answer_tag", "scores_json", "logprobs"]
Media = Literal["image", "video", "edit"]
Unparsed = Literal["failed", "tie"]

_TEMPLATES = {"image": "pairwise.txt", "video": "pairwise_video.txt", "edit": "pairwise_edit.txt"}
_NEEDS = {"image": ("images",), "video": ("videos",), "edit": ("images", "source_images")}
_MAX_TOKENS = {"answer_tag": 2048, "scores_json": 1024, "logprobs": 1}
_FRAMES = 8  # of each video, as Pref-GRPO shows them
_TOP_LOGPROBS = 20  # the most that OpenAI-compatible servers give
_ANSWERS = {
    "answer_tag": "Reason step by step first. Then end with one line, which is <answer>{name} 1 is better</answer> or "
    "<answer>{name} 2 is better</answer>, or, if there is nothing to choose between them, <answer>tie</answer>.",
    "scores_json": "Rate each from 0 (useless) to 10 (flawless) by these points. You may reason first. End with one "
    'line of JSON that holds the score of {name} 1 and then that of {name} 2: {"scores": [first, second]}',
    "logprobs": "Reply with one digit and nothing else: 1 if {name} 1 is better, 2 if {name} 2 is better.",
}


def judge_comparator(
    *,
    device: torch.device,
    owner: str,
    judge: Mapping[str, Any],
    style: Style = "answer_tag",
    media: Media = "image",
    template: str | None = None,
    frames: int | None = None,
    max_tokens: int | None = None,
    unparsed: Unparsed = "failed",
) -> Comparator:
    """Asks a judge about every pair, all pairs of a call at once.

    Args:
        device: where a model in this process runs.
        owner: who wants it, for messages.
        judge: the model, see `flowrl.rewards.judges.chat`.
        style: `answer_tag`: it reasons and names the winner in <answer>...</answer>. `scores_json`: it ends with
            {"scores": [a, b]}, and the greater wins. `logprobs`: one digit, and the verdict is
            `sigmoid(lp_1 - lp_2)` of its log-probabilities; cheap, no reasoning, and smooth with `soft: true`.
        media: what is compared: images; videos by some frames of each; or edits, shown with their source.
        template: path of a text file of your own.
        frames: of each video, spread evenly; null takes 8.
        max_tokens: of the answer; null takes 2048, 1024 and 1, by style.
        unparsed: an answer in which no winner is found has `failed`, or counts as a `tie` (Pref-GRPO).

    Raises:
        ValueError: for options that cannot work; when called, if the batch has no videos or sources for `media`.
    """
    options: dict[str, Any] = {"style": style, "media": media, "unparsed": unparsed}
    check(
        owner=owner, judge=judge, template=template, frames=frames, max_tokens=max_tokens, **options
    )  # fmt: skip
    chat = build_chat(judge, device=device, owner=owner)
    text = _template(template, media, owner)
    tokens, count = max_tokens or _MAX_TOKENS[style], frames or _FRAMES
    shown = f":frames-{count}" if media == "video" else ""
    digest = hashlib.sha256((text + _ANSWERS[style]).encode()).hexdigest()[:12]
    return FunctionComparator(
        verdicts=partial(_compare, chat=chat, template=text, frames=count, max_tokens=tokens, **options),
        needs=frozenset({"prompts", *_NEEDS[media]}),
        version=f"judge:{chat.version}:{style}:{media}{shown}:template-{digest}:max_tokens-{tokens}:unparsed-{unparsed}",
        waits="server" in judge,
    )


def check(
    *,
    owner: str,
    judge: Mapping[str, Any],
    style: Style = "answer_tag",
    media: Media = "image",
    template: str | None = None,
    frames: int | None = None,
    max_tokens: int | None = None,
    unparsed: Unparsed = "failed",
) -> None:
    """Refuses option values that are wrong; reads the template, loads no model and calls no server."""
    if frames is not None and (media != "video" or frames < 1):
        raise ValueError(f"{owner}: frames is a number of at least 1 for media: video, got {frames} for {media!r}.")
    if max_tokens is not None and (max_tokens < 1 or (style == "logprobs" and max_tokens != 1)):
        bound = "1 with style: logprobs, which reads one digit" if style == "logprobs" else "at least 1"
        raise ValueError(f"{owner}: max_tokens must be {bound}, got {max_tokens}.")
    check_chat(judge, owner=owner)
    _template(template, media, owner)


def parse_scores(text: str) -> tuple[float, float] | None:
    """The two numbers of the last JSON object that has a list `scores` of two, None where there is none."""
    for found in reversed(re.findall(r"\{[^{}]*\}", text)):
        try:
            scores = json.loads(found).get("scores")
        except json.JSONDecodeError:
            continue
        numbers = scores if isinstance(scores, list) else []
        if len(numbers) == 2 and all(isinstance(n, (int, float)) and not isinstance(n, bool) for n in numbers):
            first, second = float(numbers[0]), float(numbers[1])
            if math.isfinite(first) and math.isfinite(second):
                return first, second
    return None


def _template(path: str | None, media: Media, owner: str) -> str:
    if path is None:
        return (resources.files("flowrl.rewards") / "templates" / _TEMPLATES[media]).read_text(encoding="utf-8")
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{owner}: template {path!r} cannot be read as UTF-8 text ({error}).") from error
    if "{prompt}" not in text:
        raise ValueError(f"{owner}: template {path!r} must say {{prompt}} where the prompt goes.")
    return text


def _compare(
    inputs: RewardInputs,
    pairs: Pairs,
    *,
    chat: Chat,
    template: str,
    style: Style,
    media: Media,
    frames: int,
    max_tokens: int,
    unparsed: Unparsed,
) -> Verdicts:
    wanted = _ANSWERS[style].replace("{name}", "Video" if media == "video" else "Image")
    shown = {place: _images(inputs, place, media, frames) for place in np.unique(pairs).tolist()}
    errors: list[str | None] = [None] * len(pairs)
    questions, asked = [], []
    for number, (first, second) in enumerate(pairs.tolist()):
        sources = inputs.source_images[first] if media == "edit" and inputs.source_images is not None else []
        if media == "edit" and not sources:
            errors[number] = "missing_field"
            continue
        text = _filled(template, prompt=inputs.prompts[first], answer=wanted)
        images = [*(to_uint8(source[None])[0] for source in sources), *shown[first], *shown[second]]
        top = _TOP_LOGPROBS if style == "logprobs" else 0
        questions.append(Question(parts=(*images, text), max_tokens=max_tokens, top_logprobs=top))
        asked.append(number)
    wins = np.full(len(pairs), np.nan)
    for number, answer in zip(asked, chat.ask(questions) if questions else [], strict=True):
        verdict, errors[number] = _verdict(answer, style)
        if errors[number] == "unparsable" and unparsed == "tie":
            verdict, errors[number] = 0.5, None
        wins[number] = np.nan if verdict is None else verdict
    return Verdicts(first_wins=wins, errors=tuple(errors))


def _filled(template: str, **words: str) -> str:
    """The template with its two places filled; braces of the words themselves stay as they are."""
    return re.sub(r"\{(prompt|answer)\}", lambda match: words[match[1]], template).strip()


def _images(inputs: RewardInputs, place: int, media: Media, frames: int) -> list[np.ndarray]:
    if media == "video":
        if inputs.videos is None:
            raise ValueError("comparator: media is video, but images are made: set media: image.")
        return list(
            to_uint8(inputs.videos[place, frame_places(inputs.videos.shape[1], policy="uniform", count=frames)])
        )
    if media == "edit" and inputs.source_images is None:
        raise ValueError("comparator: media is edit, but the samples have no source images: set media: image.")
    return list(to_uint8(inputs.images[place : place + 1]))


def _verdict(answer: Answer, style: Style) -> tuple[float | None, str | None]:
    """The probability that the first is better, or why there is none."""
    if answer.error is not None:
        return None, answer.error
    verdict: float | None = None
    if style == "logprobs":
        if not answer.logprobs:
            return None, "no_logprobs"
        verdict = yes_no(answer.logprobs[0], yes=("1",), no=("2",))
    elif style == "scores_json":
        scores = parse_scores(answer.text)
        verdict = None if scores is None else 0.5 * (1 + (scores[0] > scores[1]) - (scores[0] < scores[1]))
    else:
        winner = parse_winner(answer.text)
        verdict = None if winner is None else {"A": 1.0, "B": 0.0, "tie": 0.5}[winner]
    return verdict, "unparsable" if verdict is None else None
