"""What a judge's answer is worth: scores from the log-probabilities of one token, or from the text.

A mapping `lp` holds natural log-probabilities of candidate tokens by their text, as in `Answer.logprobs[i]`. Candidates
that differ only in case or in the space around them ("Yes", " yes", "YES") are one answer: their probabilities add up.
All functions are plain float64 and return None where the answer cannot be read, never a 0.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

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
