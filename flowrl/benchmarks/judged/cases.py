"""Common parts of the judged benchmarks: cases, questions about an image, words, scores, and the rules as data.

A benchmark is one `Protocol`. Its reader makes `Case`s from the user's copy of the published data; each case says which
questions its image raises (`Ask`); replies become numbers (`Protocol.read_reply`), numbers become scores (`Score`),
and scores are averaged over images, over tasks, or with published weights of tasks.

None of the published data is shipped. Words that a judge is asked in are shipped where their licence allows it, and
read from the user's copy of the repository otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from flowrl.runtime.files import read_json

Values = Mapping[str, Mapping[str, float]]
"""Numbers read from the replies about one image: name of the question -> name -> number."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ask:
    """One question about an image."""

    name: str
    """Name of the question, unique within a case."""
    words: str
    """The name of the words that it is asked in."""
    fields: Mapping[str, str]
    """Values of the fields in the words."""
    source: bool = False
    """Whether the judge sees the source image too, before the result."""
    forms: tuple[str, ...] = ()
    """Answers whose probability at the first token is the value; none: the reply is read as text."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One prompt or editing instruction, and what is asked about its image."""

    key: str
    """Tells it from all others of the benchmark."""
    prompt: str
    """The prompt to draw."""
    task: str
    """The kind that published tables list it under."""
    asks: tuple[Ask, ...]
    """The questions about its image."""
    source: Path | None = None
    """Path of the image that is edited."""
    record: Mapping[str, Any] = field(default_factory=dict)
    """Further published data about it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CaseFile:
    """The cases of a benchmark, in the published order, and what is to be said of the user's copy."""

    cases: tuple[Case, ...]
    notes: tuple[str, ...] = ()
    number: int | None = None
    """Number of published cases, if the copy says which of several sets it is."""
    keep_sources: bool = False
    """Whether source images lie in files of this process, which go when it ends."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Words:
    """A user turn with `{fields}` and marks `<image>` for images, and the system turn before it."""

    user: str
    system: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    """One number of an image, or several averaged with those of all others (the unit is the prompt), from `low` to
    `high`; None if it does not apply to the image."""

    name: str
    low: float
    high: float
    of: Callable[[Case, Values], float | Sequence[float] | None]
    tasks: bool = True
    """Whether its mean over the images of each task is listed."""
    subset: bool = False
    """Whether it is another score over some of the images: examples leave it out."""
    shares: Literal["images", "tasks"] | Mapping[str, float] | Callable[[Collection[str]], Mapping[str, float]] = (
        "images"
    )
    """What its overall number is: the mean over images, the mean over tasks, or a mean with these weights of tasks;
    they may be a function of the tasks that have images."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Judgement:
    """A case with the numbers of its replies; `values` is None if one of them could not be read."""

    case: Case
    replies: Mapping[str, str]
    values: Values | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Protocol:
    """A benchmark's rules."""

    title: str
    """As it is printed."""
    where: str
    """What `prompts` must name, for the message if you left it out."""
    number: int
    """Published cases."""
    read: Callable[[str, Path | None], CaseFile]
    """Cases from `prompts` and, for benchmarks that keep them apart, the folder of source images."""
    words: Callable[[Sequence[Path]], Mapping[str, Words]]
    """The words of all names, from the first of some folders that holds them; it may hold other names too."""
    read_reply: Callable[[str, str], dict[str, float] | None]
    """Reads the numbers of a reply, given question and text; None if it cannot be read."""
    scores: tuple[Score, ...]
    """The first is the headline."""
    judges: Sequence[str]
    """The published ones."""
    folder: str
    """Where in the subject's folder images and result files are put under the published names."""
    files: Callable[[Sequence[Judgement], str], Mapping[str, str]]
    """Result files in the published formats, by name, from all judgements and the subject folder's name."""
    image_name: Callable[[Case], str] = lambda case: f"{case.key}.png"
    """Where the benchmark's own scripts look for the image of a case."""
    source_name: Callable[[Case], str] | None = None
    """Where they look for its source, None for nowhere."""
    max_tokens: int = 1400
    """Largest number of tokens of a reply."""
    resize: bool = False
    """Whether the judge sees the result at its source's size."""
    edits: bool = False
    """Whether cases have source images."""
    images_dir: bool = False
    """Whether source images lie apart from the list of cases."""
    note: str = ""
    """Below the table."""
    fits: Callable[[Case, Values], bool] | None = None
    """Whether what was read of a case's replies is an answer to all that was asked; None: always."""
    remarks: Callable[[Sequence[Judgement]], list[str]] | None = None
    """What is to be said of a subject's judgements."""


FACTS: Mapping[str, Mapping[str, Any]] = read_json(Path(__file__).with_name("protocols.json"))
"""What `Protocol`s say in words and numbers, by benchmark."""
