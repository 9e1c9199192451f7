"""Questions to people, what they answered, and the file that keeps it.

A line of the file is an answer. It is on the disk before the voter hears that it counts:

    {"iteration": 3, "group": 1, "prompt": "a red circle", "samples": [4, 6], "looks": ["8f…", "90…"],
     "answer": "first", "voter": "5c1d…", "time": "2026-11-27T19:20:21"}

An `answer` of null closes the question: time was over. A run that goes on takes what the file says of an image that
looks the same: at 8 x 8 pixels each level is within `ALIKE` of 255, since kernels of a GPU may round apart.
"""

from __future__ import annotations

import json
import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flowrl.runtime.disk_errors import disk_words
from flowrl.runtime.files import opened, parse_json, read_text, sync

VALUES = {"first": 1.0, "second": 0.0, "tie": 0.5, "good": 1.0, "bad": 0.0}
"""What an answer says of the first image, or of the only one; `skip` says nothing."""
ALIKE = 3
Row = dict[str, Any]


class Refused(Exception):
    """An answer that is not taken: a status of HTTP, and words."""

    def __init__(self, status: int, words: str) -> None:
        super().__init__(words)
        self.status = status


@dataclass(kw_only=True, slots=True, eq=False)
class Question:
    """A question about the samples of one prompt.

    Attributes:
        about: what the file says of it: `iteration`, `group`, `prompt`, `samples`, `looks`.
        shown: numbers of the images, in the order of `samples`, on the page.
        beside: numbers of what is shown for comparison: other candidates, and sources.
        number: on the page.
        answers: by voter; None for the time that was over.
    """

    about: Row
    shown: Sequence[int]
    beside: dict[str, list[int]] = field(default_factory=dict)
    number: int = -1
    answers: dict[str | None, str | None] = field(default_factory=dict)

    @property
    def value(self) -> float:
        """The mean over voters; NaN without any."""
        known = [VALUES[said] for said in self.answers.values() if said in VALUES]
        return sum(known) / len(known) if known else math.nan


class Ballot:
    """The questions of a run. One thread asks and waits, those of a server answer."""

    def __init__(self, *, voters: int, timeout: float | None, allowed: Sequence[str]) -> None:
        self.voters, self.timeout, self.allowed = voters, timeout, allowed
        self.path = Path()
        self.changed = threading.Condition()
        self._kept: dict[str, list[Row]] = {}
        self._open: dict[int, Question] = {}
        self._next = 0  # number of the next question
        self._deadline = math.inf
        self._fault: ValueError | None = None
        self._iteration, self._all, self._missing = -1, 0, 0  # of the newest questions

    def open(self, path: Path) -> None:
        """Reads what a run before this one was told; a line that a crash cut off was promised to nobody, and goes.

        Raises:
            ValueError: something else is there, or a line is no vote.
        """
        self.path = path
        if not os.path.lexists(path):
            return
        with opened(path) as file:
            file.seek(0)
            data = file.read()
            file.truncate(data.rfind(b"\n") + 1)
        for number, line in enumerate(read_text(path).split("\n")[:-1], start=1):
            row = parse_json(line, f"{path} line {number}")
            if not _is_vote(row, self.allowed):
                raise ValueError(
                    f"{path} line {number} is no vote of this run: put the file back as it was, or remove the line"
                )
            self._kept.setdefault(_key(row), []).append(row)

    def put(self, questions: Sequence[Question]) -> None:
        """Asks, but for what the file answers."""
        with self.changed:
            self._deadline = math.inf
            for question in questions:
                question.number, self._next = self._next, self._next + 1
                if question.about["iteration"] != self._iteration:
                    self._iteration, self._all, self._missing = question.about["iteration"], 0, 0
                for row in self._kept.get(_key(question.about), ()):
                    if _alike(row["looks"], question.about["looks"]):
                        question.answers[row["voter"]] = row["answer"]
                self._all += 1
                self._open[question.number] = question
            self.changed.notify_all()

    def wait(self, questions: Sequence[Question], tell: Callable[[int, float], None]) -> None:
        """Waits until questions are answered or time is over, and closes them.

        Time counts from the first wait after questions were put: from when all images of an iteration are there.

        Raises:
            ValueError: an answer could not be written.
        """
        with self.changed:
            left, told = self._left(questions), False
            if left and self._deadline == math.inf:
                self._deadline, told = time.monotonic() + (self.timeout or math.inf), True
        if told:
            tell(len(self._left(self._open.values())), self._deadline)
        with self.changed:
            while (left := self._left(questions)) and not self._fault and time.monotonic() < self._deadline:
                self.changed.wait(min(0.5, max(0.0, self._deadline - time.monotonic())))
            if self._fault is None and left:
                self._keep([row_of(question, None, None) for question in left])
            if self._fault is not None:
                raise self._fault
            for question in questions:
                del self._open[question.number]
                self._missing += math.isnan(question.value)
            self.changed.notify_all()

    def answer(self, number: int, voter: str, said: str) -> None:
        """Takes an answer.

        Raises:
            Refused: there is no such question, time is over, the voter has answered, or nothing can be written.
        """
        with self.changed:
            question = self._open.get(number)
            if question is None and not 0 <= number < self._next:
                raise Refused(404, f"there is no question {number}: load the page again.")
            if question is None or time.monotonic() >= self._deadline:
                raise Refused(409, "this answer came too late and is not counted: training went on without it.")
            if voter in question.answers:
                raise Refused(409, "you have answered this question already: your first answer counts.")
            if self._fault is None:
                self._keep([row_of(question, voter, said)])
            if self._fault is not None:
                raise Refused(507, f"this answer is not counted, and the run ends: {self._fault}")
            question.answers[voter] = said
            self.changed.notify_all()

    def state(self, voter: str) -> dict[str, Any]:
        """What the page shows a voter: the open question with the fewest answers, how far all of them are."""
        with self.changed:
            left = self._left(self._open.values())
            mine = sorted((one for one in left if voter not in one.answers), key=lambda one: len(one.answers))
            found: dict[str, Any] = {"iteration": self._iteration, "all": self._all, "missing": self._missing}
            found |= {"stage": "vote" if mine else "wait" if left else "train", "done": self._all - len(left)}
            if left and self._deadline < math.inf:
                found["seconds"] = max(0.0, self._deadline - time.monotonic())
            if mine:
                about = mine[0].about
                found["question"] = {"number": mine[0].number, "prompt": about["prompt"], "shown": list(mine[0].shown)}
                found["question"] |= mine[0].beside
                found["next"] = [image for one in mine[1:2] for image in one.shown]
            return found

    def _left(self, questions: Sequence[Question] | Any) -> list[Question]:
        return [one for one in questions if None not in one.answers and len(one.answers) < self.voters]

    def _keep(self, rows: Sequence[Row]) -> None:
        """Appends rows and has the disk keep them, all or none; what prevents it becomes the fault."""
        data, new = "".join(json.dumps(row) + "\n" for row in rows).encode(), not self.path.exists()
        try:
            with opened(self.path) as file:
                begun = os.fstat(file.fileno()).st_size
                try:
                    while data:
                        data = data[os.write(file.fileno(), data) :]
                    os.fsync(file.fileno())
                except OSError:
                    os.ftruncate(file.fileno(), begun)
                    raise
            if new:
                sync(self.path.parent)
        except OSError as error:
            self._fault = ValueError(f"{self.path}: votes cannot be written: {disk_words(error)}")
        except ValueError as error:
            self._fault = error


def row_of(question: Question, voter: str | None, said: str | None) -> Row:
    """A line of the file."""
    return question.about | {"answer": said, "voter": voter, "time": time.strftime("%Y-%m-%dT%H:%M:%S")}


def _key(row: Row) -> str:
    return json.dumps([row["iteration"], row["group"], row["prompt"], row["samples"]])


def _alike(looks: Sequence[str], others: Sequence[str]) -> bool:
    pairs = [(bytes.fromhex(a), bytes.fromhex(b)) for a, b in zip(looks, others, strict=True)]
    return all(len(a) == len(b) and max(abs(x - y) for x, y in zip(a, b, strict=True)) <= ALIKE for a, b in pairs)


def _is_vote(row: Any, allowed: Sequence[str]) -> bool:
    """Whether a value has all that is read of a line."""
    if not isinstance(row, dict):
        return False
    kinds = {"iteration": int, "group": int, "prompt": str, "samples": list, "looks": list, "voter": str}
    closed = row.get("answer") is None and row.get("voter") is None and {"answer", "voter"} <= row.keys()
    if not all(isinstance(row.get(key), kind) for key, kind in kinds.items() if key != "voter" or not closed):
        return False
    try:
        looks = [bytes.fromhex(look) for look in row["looks"]]
        return (closed or row.get("answer") in allowed) and len(looks) == len(row["samples"])
    except (TypeError, ValueError):
        return False
