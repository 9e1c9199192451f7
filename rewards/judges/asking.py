"""Rewards made of judges: what they have in common, from an item's images to the score read from its answers.

A mapping `lp` holds natural log-probabilities of candidate tokens by their text, as in `Answer.logprobs[i]`. Candidates
that differ only in case or in the space around them ("Yes", " yes", "YES") are one answer: their probabilities add up.
What cannot be read is None, never a 0; all arithmetic is plain float64.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import fmean
from typing import Any, Literal

import torch
from torch import Tensor

from flowrl.rewards.base import FunctionReward, RewardInputs, RewardOutput, output_of, to_uint8
from flowrl.rewards.base.frames import frame_places
from flowrl.rewards.judges.chat import Answer, Chat, Pixels, Question, build_chat, is_server
from flowrl.runtime.randomness import counter_seed

Winner = Literal["A", "B", "tie"]

_NUMBER_WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
_SPACES = " \t\r\n\u0120\u2581"  # the last two stand for a space in vocabularies of GPT-2 and of SentencePiece


def merge(lp: Mapping[str, float]) -> dict[str, float]:
    """Candidates without case and surrounding space, `log sum exp` over those that become the same."""
    return by_text((_plain(text), value) for text, value in lp.items())


def by_text(candidates: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Log-probabilities of texts, `log sum exp` over the tokens that are written alike."""
    groups: dict[str, list[float]] = {}
    for text, value in candidates:
        groups.setdefault(text, []).append(value)
    return {text: logsumexp(values) for text, values in groups.items()}


def logsumexp(values: Iterable[float]) -> float:
    """`log sum_i exp(v_i)`, minus infinity for no values."""
    values = list(values)
    top = max(values, default=-math.inf)
    return top if math.isinf(top) else top + math.log(math.fsum(math.exp(v - top) for v in values))


def yes_no(lp: Mapping[str, float], *, yes: str = "yes", no: str = "no") -> float | None:
    """`sigmoid(lp_yes - lp_no)`, the probability of yes among the two, in [0, 1]. A side that is no candidate is
    improbable: the score is 1 or 0. With both missing there is none. Logits give the same as log-probabilities."""
    candidates = merge(lp)
    lp_yes, lp_no = (candidates.get(form, -math.inf) for form in (yes, no))
    if math.isinf(lp_yes) and math.isinf(lp_no):
        return None
    margin = lp_yes - lp_no
    return 1 / (1 + math.exp(-margin)) if margin >= 0 else math.exp(margin) / (1 + math.exp(margin))


def expected_level(lp: Mapping[str, float], levels: Mapping[str, float]) -> float | None:
    """`sum_k v_k softmax(lp over the levels)_k`: the mean level, other candidates left out. `levels` has the value v_k
    of each level's word: {"0": 0, ..., "5": 5}, {"excellent": 5, ..., "bad": 1}. A level that is not among the
    candidates (or logits) counts as improbable; with all of them missing there is no score."""
    candidates = merge(lp)
    found = {word: candidates.get(_plain(word), -math.inf) for word in levels}
    total = logsumexp(found.values())
    if math.isinf(total):
        return None
    return math.fsum(value * math.exp(found[word] - total) for word, value in levels.items())


def answer_mass(lp: Mapping[str, float], forms: Sequence[str]) -> float:
    """`sum exp(lp)` over the candidates that are one of the forms, not renormalised, in [0, 1].

    A judge's vocabulary may have no token for a rare word ("turquoise"). Where no candidate is a form, the longest one
    that begins a form with two letters or more is taken for it; numbers must be whole. Nothing found is 0: what is not
    among the likeliest candidates is improbable. `forms` is what counts as the answer, see `answer_forms`.
    """
    candidates = merge(lp)
    wanted = {_plain(form) for form in forms}
    found = [value for text, value in candidates.items() if text in wanted]
    if not found:
        beginnings = [t for t in candidates if len(t) > 1 and t.isalpha() and any(w.startswith(t) for w in wanted)]
        found = [candidates[max(beginnings, key=len)]] if beginnings else []
    return min(math.exp(logsumexp(found)), 1.0)  # log-probabilities are rounded, so the sum may pass 1 by a hair


def answer_forms(expected: str | int) -> tuple[str, ...]:
    """The forms of an expected answer: itself, and a count from 0 to 10 also as a digit or as a word."""
    text = _plain(str(expected))
    if text in _NUMBER_WORDS:
        return text, str(_NUMBER_WORDS.index(text))
    if text.isdecimal() and int(text) < len(_NUMBER_WORDS):
        return text, _NUMBER_WORDS[int(text)]
    return (text,)


def parse_score(text: str, *, pattern: str, low: float, high: float) -> float | None:
    """The last number in a text, clamped to [low, high]; None where the pattern does not match.

    The last, because judges quote the scale before they rate.

    Args:
        text: the judge's answer.
        pattern: a regular expression, case ignored, whose first group is the number: r"final score:\\s*([\\d.]+)".
        low: lower bound.
        high: upper bound.
    """
    found = list(re.finditer(pattern, text, flags=re.IGNORECASE))
    if not found:
        return None
    try:
        number = float(found[-1].group(1).rstrip("."))
    except ValueError:
        return None
    return min(max(number, low), high) if math.isfinite(number) else None


def parse_word(text: str, words: Sequence[str]) -> str | None:
    """The last of some words that stands alone in a text, case ignored: whether a reasoned answer ends in yes or no."""
    options = "|".join(re.escape(_plain(word)) for word in words)
    found = re.findall(rf"(?<!\w)(?:{options})(?!\w)", text.casefold())
    return found[-1] if found else None


def parse_winner(text: str) -> Winner | None:
    """Which of two images a judge prefers: "A" the first, "B" the second, "tie", or None where it cannot be read.

    Read is what stands in the last `<answer>`; where there is none, the last line and then the whole answer. "Image 1",
    "picture A", "the second image", "1" alone and the like name a side. A side that is said to be better or to win is
    preferred; else "tie", "equal", "neither" and the like are a tie; else a side that is named alone is preferred.
    """
    tagged = re.findall(r"<answer>(.*?)(?:</answer>|$)", text, flags=re.IGNORECASE | re.DOTALL)
    for place in tagged[-1:] or [text.rstrip().rpartition("\n")[2], text]:
        said = place.strip(_SPACES + "*_`\"'.:[](){}")
        if alone := _ALONE.fullmatch(said):
            return _side(alone.group(1))
        preferred = {_side(m.group(1) or m.group(2)) for m in _BETTER.finditer(said)}
        if len(preferred) == 1:
            return preferred.pop()
        if not preferred and re.search(_TIE, said, flags=re.IGNORECASE):
            return "tie"
        named = {_side(m.group(1) or m.group(2)) for m in _NAMED.finditer(said)}
        if len(named) == 1:
            return named.pop()
    return None


_THING = r"(?:image|picture|photo|video|clip|edit|option|candidate|response)s?"
_NAME = rf"(?:{_THING}\W{{0,3}}\b(1|2|A|B|one|two)\b|\b(1st|2nd|first|second)\s+(?:{_THING}|one)\b)"
_NAMED = re.compile(_NAME, flags=re.IGNORECASE)
_ALONE = re.compile(r"(1|2|A|B|one|two|first|second)", flags=re.IGNORECASE)
_BETTER = re.compile(
    rf"{_NAME}\W{{0,3}}(?:\s+(?:is|are|was|clearly|slightly|much|the|overall|far|a|bit)\b){{0,4}}"
    r"\s+(?:better|best|wins?|winner|preferred|superior|preferable)\b",
    flags=re.IGNORECASE,
)
_TIE = r"\b(?:tie|tied|draw|equal|equally|neither|same|both)\b"


def _side(name: str) -> Winner:
    return "A" if name.casefold() in ("1", "a", "one", "1st", "first") else "B"


def _plain(text: str) -> str:
    return text.strip(_SPACES).casefold()


MISSING = "missing_field"
UNPARSED = "unparsed"
"""Why an item failed: it lacks a field; the judge answered, but not what was asked for."""


class NoScore(Exception):
    """An item has no score; the text is the short word for why. `judge_items` catches it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JudgedItem:
    """What became of an item: its value, or the short word for why it has none, and its sub-scores."""

    value: float | None = None
    error: str | None = None
    parts: Mapping[str, float] = field(default_factory=dict)


def judged_reward(
    name: str,
    score: Callable[..., RewardOutput],
    *,
    judge: Mapping[str, Any],
    device: torch.device,
    needs: set[str],
    version: str,
) -> FunctionReward:
    """A reward made of the answers of a judge, which `score` is given as `chat` and which is loaded if it runs here.
    One that asks a server runs beside the next rollout. `needs` is besides images and prompts, `version` besides the
    reward's name and the judge's version."""
    chat, remote = build_chat(judge, device=device), is_server(judge)
    return FunctionReward(
        name=name,
        score=partial(score, chat=chat),
        needs=frozenset({"images", "prompts"} | needs),
        version=f"{name}:{version}:{chat.version}",
        kind="remote" if remote else "pointwise",
        waits=remote,
    )


def judge_items(
    inputs: RewardInputs,
    chat: Chat,
    ask: Callable[[int], list[Question]],
    read: Callable[[int, list[Answer]], JudgedItem],
    *,
    parts: Sequence[str] = (),
) -> RewardOutput:
    """Asks all questions about all items at once, and scores every item by its answers. Both may raise `NoScore`.

    Args:
        ask: the questions about the item at a place.
        read: what the answers to them, in their order, are worth.
        parts: names of the sub-scores; NaN where an item has none.
    """
    asked: dict[int, list[Question]] = {}
    rows: list[JudgedItem] = []
    for item in range(len(inputs)):
        try:
            asked[item] = ask(item)
            rows.append(JudgedItem())
        except NoScore as error:
            rows.append(JudgedItem(error=str(error)))
    answers = iter(ask_all(chat, [question for questions in asked.values() for question in questions]))
    for item, questions in asked.items():
        try:
            rows[item] = read(item, [next(answers) for _ in questions])
        except NoScore as error:
            rows[item] = JudgedItem(error=str(error))
    return output_of(
        [row.value for row in rows],
        inputs,
        {name: [row.parts.get(name, math.nan) for row in rows] for name in parts},
        [row.error for row in rows],
    )


def ask_all(chat: Chat, questions: Sequence[Question]) -> list[Answer]:
    """The answers to some questions; no judge is called for none. Raises ValueError: another number of answers."""
    answers = chat.ask(questions) if questions else []
    if len(answers) != len(questions):
        raise ValueError(
            f"the judge was asked {len(questions)} questions and gave {len(answers)} answers: it must match."
        )
    return answers


def first_error(answers: Sequence[Answer]) -> str | None:
    """Why the first failed answer failed, None if all are there."""
    return next((answer.error for answer in answers if answer.error is not None), None)


def all_of(answers: Sequence[Answer], scores: Sequence[float | None]) -> list[float]:
    """The scores that some answers were read as; raises `NoScore` where one has none."""
    found = [score for score in scores if score is not None]
    if (error := first_error(answers)) or len(found) < len(scores):
        raise NoScore(error or UNPARSED)
    return found


def probability_of_yes(answer: Answer) -> float | None:
    """P(yes) at the first answered token, None where the judge failed or said neither yes nor no."""
    return yes_no(answer.logprobs[0]) if answer.error is None and answer.logprobs else None


def pixels_of(image: Tensor) -> Pixels:
    """One float image [3, H, W] as 8-bit [H, W, 3]."""
    pixels: Pixels = to_uint8(image[None])[0]
    return pixels


def shown_of(inputs: RewardInputs, item: int, num_frames: int | None = None) -> list[Pixels]:
    """The image of an item, or so many frames of its video, spread evenly."""
    if num_frames is None:
        return [pixels_of(inputs.images[item])]
    if inputs.videos is None:
        raise ValueError(
            f"a judge is to see {num_frames} frames, but images are made, not videos: leave the option out."
        )
    return list(to_uint8(inputs.videos[item, frame_places(inputs.videos.shape[1], policy="uniform", count=num_frames)]))


def source_of(inputs: RewardInputs, item: int) -> Pixels:
    """The image that an editing instruction is about, of several the first; raises `NoScore` where there is none."""
    if not inputs.source_images or not inputs.source_images[item]:
        raise NoScore(MISSING)
    return pixels_of(inputs.source_images[item][0])


def draw_seed(name: str, inputs: RewardInputs, item: int, temperature: float, draw: int = 0) -> int | None:
    """A seed for a sampled answer that goes by the sample alone, in any batch; None for a greedy one."""
    if temperature <= 0:
        return None
    return counter_seed(name, inputs.iteration, int(inputs.sample_ids[item]), draw) % 2**31  # 31 bits fit every server


def number_list(
    text: str, count: int, low: float = -math.inf, high: float = math.inf, *, brackets: bool = True
) -> list[float] | None:
    """The `count` ratings of an answer such as `{"reasoning": "...", "score": [20, 18]}`, cut to low .. high; None
    where there is no such list. They stand under score or scores in the last JSON object that has one; else, with
    `brackets`, in the last list of numbers in brackets, as some judges write no JSON."""
    record = json_record(text, "score", "scores")
    given = record.get("score", record.get("scores"))
    found = given if isinstance(given, list) else None
    if found is None and not brackets:
        return None
    if found is None:
        lists = re.findall(r"\[\s*(-?\d+(?:\.\d+)?(?:\s*,\s*-?\d+(?:\.\d+)?)*)\s*\]", text)
        found = [float(number) for number in lists[-1].split(",")] if lists else []
    numbers = [float(n) for n in found if isinstance(n, int | float) and not isinstance(n, bool) and abs(n) < 1e308]
    if len(numbers) != count or len(found) != count:
        return None
    return [min(max(number, low), high) for number in numbers]


def json_record(text: str, *lists: str) -> dict[str, Any]:
    """The widest JSON object in an answer, else the last without another in it; empty where there is none. One that has
    no list under the first of the names `lists` that it holds is passed over."""
    whole = text[text.find("{") : text.rfind("}") + 1]
    for piece in (whole, *reversed(re.findall(r"\{[^{}]*\}", text))):
        try:
            record = json.loads(piece)
        except ValueError:
            continue
        named = next((name for name in lists if isinstance(record, dict) and name in record), None)
        if isinstance(record, dict) and (not lists or (named and isinstance(record[named], list))):
            return record
    return {}


def geometric_mean(values: Sequence[float]) -> float:
    """`(prod_i x_i)^(1/n)` of one value or more; any 0 gives 0."""
    return math.exp(fmean(math.log(value) for value in values)) if min(values) > 0 else 0.0


def weighted_mean(scores: Mapping[str, float], weights: Mapping[str, float]) -> float:
    """`sum w_k x_k / sum w_k` over the names in `scores`."""
    total = sum(weights[name] for name in scores)
    return sum(weights[name] * score for name, score in scores.items()) / total


def weighted_geometric_mean(scores: Mapping[str, float], weights: Mapping[str, float]) -> float:
    """`prod_k x_k^(w_k / sum w)` over the names in `scores`; any 0 gives 0."""
    if min(scores.values()) <= 0:
        return 0.0
    return math.exp(weighted_mean({name: math.log(score) for name, score in scores.items()}, weights))


def full_weights(weights: Mapping[str, Any] | None, names: Sequence[str]) -> dict[str, float]:
    """The option `weights` with 0 for what it leaves out; None gives 1 to all. Raises ValueError: for another name, a
    negative or infinite weight, or none above 0."""
    if weights is None:
        return dict.fromkeys(names, 1.0)
    good = all(
        name in names and isinstance(w, int | float) and not isinstance(w, bool) and math.isfinite(w) and w >= 0
        for name, w in weights.items()
    )
    if not good or not any(weights.values()):
        raise ValueError(
            f"weights must be a mapping of {', '.join(names)} to numbers of at least 0, one above 0, got {weights!r}."
        )
    return {name: float(weights.get(name, 0.0)) for name in names}


def check_answer_options(max_tokens: int | None, temperature: float | None) -> None:
    """Refuses lengths and temperatures that no judge takes; None is the style's own."""
    if max_tokens is not None and max_tokens < 1:
        raise ValueError(f"max_tokens must be at least 1, got {max_tokens}.")
    if temperature is not None and not temperature >= 0:
        raise ValueError(f"temperature must be at least 0 (greedy), got {temperature}.")
