"""Questions with a short answer: does the judge say yes, or what the prompt's record expects?

{name: yes_no, judge: {...}}                                              does the image match the prompt?
{name: yes_no, judge: {...}, score: mass}                                 VQAScore (arXiv 2404.01291)
{name: yes_no, judge: {...}, questions_field: vqa_list, aggregation: gm}  Soft-TIFA, of GenEval 2
{name: yes_no, judge: {...}, inverted: true, num_frames: 8}               anomalies in videos, as Cosmos-Reason1
{name: yes_no, judge: {...}, score: word, average: 4, temperature: 0.7}   of judges that reason, or lack logprobs
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import torch

from flowrl.rewards import Reward, RewardInputs, RewardOutput, output_of, to_uint8
from flowrl.rewards.frames import frame_places
from flowrl.rewards.judges.answers import answer_forms, answer_mass, parse_word, soft_tifa
from flowrl.rewards.judges.answers import yes_no as yes_no_score
from flowrl.rewards.judges.asking import MISSING, UNPARSED, ask_items, draw_seed, judged_reward, pixels_of
from flowrl.rewards.judges.chat import Answer, Chat, Pixels, Question, build_chat, check_chat
from flowrl.rewards.judges.templates import Template, parse_template

Score = Literal["odds", "mass", "word"]
Aggregation = Literal["am", "gm"]

OWNER = "reward 'yes_no'"
TOP_LOGPROBS = 20
"""Candidates asked for, the most that hosted servers give."""
WORD_TOKENS = 512
BAD = "bad_field"
"""Why an item failed: its field of questions is no list of questions with answers."""


def check(
    *,
    judge: Mapping[str, Any],
    template: str | None = None,
    score: Score | None = None,
    inverted: bool = False,
    questions_field: str | None = None,
    aggregation: Aggregation = "am",
    with_sources: bool = False,
    with_references: bool = False,
    num_frames: int | None = None,
    average: int = 1,
    temperature: float = 0.0,
    max_tokens: int | None = None,
) -> None:
    """Refuses option values that are wrong, without calling a server or loading weights."""
    check_chat(judge, owner=OWNER)
    if questions_field is not None and (score not in (None, "mass") or inverted):
        raise ValueError(
            f"{OWNER}: questions of the prompt's record are scored by the probability of the expected answer, so "
            f"questions_field goes with score: mass and inverted: false, got score: {score}, inverted: {inverted}."
        )
    if questions_field is None and aggregation != "am":
        raise ValueError(f"{OWNER}: aggregation {aggregation!r} is about several questions: set questions_field too.")
    if score != "word" and (average != 1 or temperature != 0.0 or max_tokens is not None):
        raise ValueError(
            f"{OWNER}: average, temperature and max_tokens are for score: word; the others read the log-probabilities "
            f"of the first token, which are the same in every draw."
        )
    if average < 1 or (average > 1 and not temperature > 0):
        raise ValueError(
            f"{OWNER}: average must be 1, or more draws with a temperature above 0, at which they differ, got average "
            f"{average} at temperature {temperature:g}."
        )
    if not (math.isfinite(temperature) and temperature >= 0):
        raise ValueError(f"{OWNER}: temperature must be at least 0 (greedy), got {temperature}.")
    for name, number in (("max_tokens", max_tokens), ("num_frames", num_frames)):
        if number is not None and number < 1:
            raise ValueError(f"{OWNER}: {name} must be 1 or more, got {number}.")
    _template(template, inverted=inverted, questions=questions_field is not None)


def yes_no(
    *,
    device: torch.device,
    judge: Mapping[str, Any],
    template: str | None = None,
    score: Score | None = None,
    inverted: bool = False,
    questions_field: str | None = None,
    aggregation: Aggregation = "am",
    with_sources: bool = False,
    with_references: bool = False,
    num_frames: int | None = None,
    average: int = 1,
    temperature: float = 0.0,
    max_tokens: int | None = None,
) -> Reward:
    """A judge's answer to a question about the image, in [0, 1]; greedy, one token, unless the word is read.

    Args:
        device: where a judge in this process runs.
        judge: which model answers, see `flowrl.rewards.judges.chat`.
        template: a text file with the question, see `flowrl.rewards.judges.templates`; its fields are {prompt}, and
            {question} with `questions_field`. Null takes ours: does the image match the prompt, for `inverted` is
            there an anomaly.
        score: `odds` (null without questions): `sigmoid(lp_yes - lp_no)`; `mass` (null with them): the probability of
            yes, or of the expected answer, as it is, so that a judge which would say something else gives little;
            `word`: 1 if the last yes or no in the text is the good one, else 0.
        inverted: whether no is the good answer: `sigmoid(lp_no - lp_yes)`, the probability of no, 1 for no.
        questions_field: field of the prompt's record with a list of [question, expected answer], or of mappings with
            the keys question and answer. A count is expected as a digit or as a word.
        aggregation: `am` arithmetic, `gm` geometric mean over the questions of a prompt; both are logged.
        with_sources: whether the judge first sees the images that the prompt's instruction is about.
        with_references: whether it then sees the reference images.
        num_frames: of a video, how many frames the judge sees, spread evenly; null for the image, or first frame.
        average: draws of which the mean is taken, for `word`; those that cannot be read are left out.
        temperature: of the draws.
        max_tokens: length of an answer at most, for `word`; null for 512.

    Raises:
        ValueError: as `check`, or a judge in this process cannot be loaded.
    """
    check(
        judge=judge,
        template=template,
        score=score,
        inverted=inverted,
        questions_field=questions_field,
        aggregation=aggregation,
        with_sources=with_sources,
        with_references=with_references,
        num_frames=num_frames,
        average=average,
        temperature=temperature,
        max_tokens=max_tokens,
    )
    chat = build_chat(judge, device=device, owner=OWNER)
    words = _template(template, inverted=inverted, questions=questions_field is not None)
    reads = score or ("odds" if questions_field is None else "mass")
    asking = Asking(
        template=words,
        score=reads,
        inverted=inverted,
        questions_field=questions_field,
        aggregation=aggregation,
        with_sources=with_sources,
        with_references=with_references,
        num_frames=num_frames,
        average=average,
        temperature=temperature,
        max_tokens=(max_tokens or WORD_TOKENS) if reads == "word" else 1,
    )
    needs = {
        "metadata": questions_field is not None,
        "source_images": with_sources,
        "reference_images": with_references,
        "videos": num_frames is not None,
    }
    seen = "+".join(name for name, needed in needs.items() if needed) or "images"
    return judged_reward(
        "yes_no",
        partial(_score, chat=chat, asking=asking),
        judge=judge,
        needs={name for name, needed in needs.items() if needed},
        version=f"yes_no:{reads}:{'no' if inverted else 'yes'}:{aggregation}:{seen}:{num_frames or 1}-frames:"
        f"{average}-draws:temperature-{temperature:g}:{asking.max_tokens}-tokens:{words.digest}:{chat.version}",
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Asking:
    """How images are asked about; fields as the options of `yes_no`, defaults filled in."""

    template: Template
    score: Score
    inverted: bool
    questions_field: str | None
    aggregation: Aggregation
    with_sources: bool
    with_references: bool
    num_frames: int | None
    average: int
    temperature: float
    max_tokens: int


Forms = tuple[str, ...]


def _score(inputs: RewardInputs, *, chat: Chat, asking: Asking) -> RewardOutput:
    asked = [_ask(inputs, item, asking) for item in range(len(inputs))]
    answers = ask_items(chat, [[] if isinstance(each, str) else [question for question, _ in each] for each in asked])
    errors: list[str | None] = []
    means: dict[str, list[float]] = {"am": [], "gm": []}
    for each, given in zip(asked, answers, strict=True):
        scores = each if isinstance(each, str) else _read([forms for _, forms in each], given, asking)
        errors.append(scores if isinstance(scores, str) else None)
        means["am"].append(math.nan if isinstance(scores, str) else soft_tifa(scores, aggregation="am"))
        means["gm"].append(math.nan if isinstance(scores, str) else soft_tifa(scores, aggregation="gm"))
    parts = means if asking.questions_field is not None else None
    return output_of(means[asking.aggregation], inputs, parts=parts, errors=errors)


def _ask(inputs: RewardInputs, item: int, asking: Asking) -> list[tuple[Question, Forms]] | str:
    """What is asked about an item, with the forms of each good answer; or the word for what is missing."""
    images = _images(inputs, item, asking)
    expected = _expected(inputs.metadata[item], asking)
    if isinstance(expected, str):
        return expected
    if images is None:
        return MISSING
    asked = []
    for text, forms in expected:
        fields = {"prompt": inputs.prompts[item]} | ({} if text is None else {"question": text})
        parts, system = asking.template.parts(images, **fields), asking.template.system_of(**fields)
        for draw in range(asking.average):
            question = Question(
                parts=parts,
                system=system,
                max_tokens=asking.max_tokens,
                temperature=asking.temperature,
                top_logprobs=0 if asking.score == "word" else TOP_LOGPROBS,
                seed=draw_seed("yes_no", inputs, item, draw) if asking.temperature > 0 else None,
            )
            asked.append((question, forms))
    return asked


def _expected(metadata: Mapping[str, Any], asking: Asking) -> list[tuple[str | None, Forms]] | str:
    """Questions of an item's record with the forms of their answers, or why there are none."""
    if asking.questions_field is None:
        return [(None, ("no",) if asking.inverted else ("yes",))]
    listed = metadata.get(asking.questions_field)
    if listed is None or listed == []:
        return MISSING
    found: list[tuple[str | None, Forms]] = []
    for entry in listed if isinstance(listed, list) else [None]:
        pair = [entry.get("question"), entry.get("answer")] if isinstance(entry, Mapping) else entry
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            return BAD
        question, answer = pair
        if isinstance(answer, bool):  # what an unquoted yes is to YAML
            answer = "yes" if answer else "no"
        if not isinstance(question, str) or not isinstance(answer, str | int) or not str(answer).strip():
            return BAD
        found.append((question, answer_forms(answer)))
    return found


def _images(inputs: RewardInputs, item: int, asking: Asking) -> list[Pixels] | None:
    """What the judge sees, in its order: sources, references, then what was made. None where an item lacks some."""
    images: list[Pixels] = []
    for wanted, given in (
        (asking.with_sources, inputs.source_images),
        (asking.with_references, inputs.reference_images),
    ):
        if wanted and (given is None or not given[item]):
            return None
        if wanted and given is not None:
            images += [pixels_of(image) for image in given[item]]
    if asking.num_frames is None:
        return [*images, pixels_of(inputs.images[item])]
    if inputs.videos is None:
        raise ValueError(f"{OWNER}: num_frames is about videos, and images are made: leave it out.")
    places = frame_places(inputs.videos.shape[1], policy="uniform", count=asking.num_frames)
    return [*images, *to_uint8(inputs.videos[item, places])]


def _read(forms: Sequence[Forms], answers: Sequence[Answer], asking: Asking) -> list[float] | str:
    """The scores of an item's questions, or why it has failed."""
    scores: list[float] = []
    failures: list[str] = []
    for good, answer in zip(forms, answers, strict=True):
        score = None if answer.error is not None else _one(good, answer, asking)
        if score is None:
            failures.append(answer.error or UNPARSED)
        else:
            scores.append(score)
    # Draws repeat one question, so a lost one costs precision; questions differ, so without one it is another mean.
    enough = scores if asking.score == "word" else not failures
    return scores if enough else failures[0]


def _one(good: Forms, answer: Answer, asking: Asking) -> float | None:
    if asking.score == "word":
        word = parse_word(answer.text, ("yes", "no"))
        return None if word is None else float(word in good)
    first = answer.logprobs[0] if answer.logprobs else {}
    if asking.score == "mass":
        return answer_mass(first, good) if first else None
    return yes_no_score(first, inverted=asking.inverted)


def _template(template: str | None, *, inverted: bool, questions: bool) -> Template:
    """The user's text, or ours for the case.

    Raises:
        ValueError: if there is no such file, it is empty, or it does not hold the field {question} that is asked.
    """
    shipped = "one_word" if questions else "anomaly" if inverted else "yes_no"
    path = Path(str(resources.files("flowrl.rewards") / "templates" / f"{shipped}.txt"))
    path = path if template is None else Path(template).expanduser()
    if not path.is_file():
        raise ValueError(f"{OWNER}: there is no template {str(path)!r}: give a text file, or leave template out.")
    words = parse_template(path.read_text(encoding="utf-8"))
    if not words.user:
        raise ValueError(f"{OWNER}: the template {str(path)!r} is empty.")
    if questions and "{question}" not in words.user:
        raise ValueError(f"{OWNER}: the template {str(path)!r} must hold {{question}}, for questions_field.")
    return words
