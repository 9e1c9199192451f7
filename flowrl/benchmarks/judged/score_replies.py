"""Reads ratings in judges' replies, in the forms that the published prompts ask for; None if they cannot be read."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

_THOUGHT = re.compile(r"<think>.*?</think>|^.*?</think>", flags=re.DOTALL)
_WHOLE = r"\b(?!\.\d)"  # "1.5" and "10" are no 1
_LABELLED = re.compile(r"^\W*[^:\n]*[^:\n\d\s][^:\n]*:[\s*]*(\d)(?:\s*/\s*5)?[\s.*]*$")


def strip_thought(text: str) -> str:
    """A reply without what a judge thought aloud in <think> before it."""
    return _THOUGHT.sub("", text).strip()


def rating_list(text: str, count: int, high: int) -> list[float] | None:
    """The list `score` of a JSON object, or a bare list: `count` numbers of 0 to `high`.

    As VIEScore's published reader it takes the object from the first brace to the last, or bare lists; it guesses none.
    """
    reply = strip_thought(text)
    first, last = reply.find("{"), reply.rfind("}")
    found = None
    if 0 <= first < last:
        try:
            record = json.loads(reply[first : last + 1].replace("\n", " "))
        except ValueError:
            inside = re.search(r"[\"']?score[\"']?\s*:\s*(\[[^\]]*\])", reply)
            record = {"score": _list(inside[1])} if inside is not None else None
        found = record.get("score") if isinstance(record, dict) else None
    elif re.fullmatch(r"\[[^\]]*\]", reply):
        found = _list(reply)
    if not isinstance(found, list) or len(found) != count:
        return None
    numbers = [float(n) for n in found if isinstance(n, int | float) and not isinstance(n, bool) and 0 <= n <= high]
    return numbers if len(numbers) == count else None


def _list(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        return None


def labelled_ratings(text: str, count: int, low: int, high: int) -> list[float] | None:
    """The ratings of lines such as "Prompt Compliance: 4", in their order; None unless there are exactly `count`."""
    found = [match[1] for line in strip_thought(text).splitlines() if (match := _LABELLED.match(line.strip()))]
    numbers = [float(number) for number in found if low <= int(number) <= high]
    return numbers if len(numbers) == len(found) == count else None


def named_ratings(text: str, names: Sequence[str], high: int) -> dict[str, float] | None:
    """The rating after each of some names in lower case, the last of several; None unless all are there. A name may
    stand in asterisks, and a colon may follow it."""
    listed = "|".join(re.escape(name) for name in names)
    pairs = re.findall(rf"({listed})[*\s]*[:\uff1a]?[*\s]*(\d){_WHOLE}", strip_thought(text), flags=re.IGNORECASE)
    found = {name.lower(): float(digit) for name, digit in pairs if int(digit) <= high}
    return found if found.keys() == {name.lower() for name in names} else None


def verdict(text: str) -> float | None:
    """1 or 0 after the word score, the first of several as in the published script, or alone on the only such line."""
    reply = strip_thought(text)
    match = re.search(rf"score[*\s]*[:\uff1a]?[*\s]*([01]){_WHOLE}", reply, flags=re.IGNORECASE)
    if match is not None:
        return float(match[1])
    alone = re.findall(r"^\s*([01])\s*$", reply, flags=re.MULTILINE)
    return float(alone[0]) if len(alone) == 1 else None


def yes_no_lines(text: str) -> list[str]:
    """Yes or no, in lower case, of every line that begins with one of them, after a number at most."""
    lines = (
        re.match(r"(?:\d+[.):]\s*)?\W*(yes|no)\b", line.strip(), flags=re.IGNORECASE)
        for line in strip_thought(text).splitlines()
    )
    return [match[1].lower() for match in lines if match is not None]
