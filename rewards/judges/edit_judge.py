"""Edits judged against their instruction: one score, or a list of principles that are checked one by one.

`edit_score` asks for a digit and takes its expectation (UniWorld-V2, Edit-R1, arXiv 2510.16888), or for ratings of
semantic consistency and perceptual quality (EditScore, VIEScore). `edit_principles` first turns the instruction into
principles (Edit-R1 with a reasoning verifier, arXiv 2604.27505). Both need the source image.

The shipped templates are our own words. Scores of a published checkpoint need its published template: PKU-YuanGroup/
Edit-R1 for digits, X-GenGroup/PaCo-RL for the ratings; see `flowrl.rewards.judges.templates`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch

from flowrl.rewards import Reward, RewardInputs, RewardOutput
from flowrl.rewards.judges.answers import expected_level
from flowrl.rewards.judges.asking import (
    MISSING,
    UNPARSED,
    Scored,
    all_of,
    check_answer_options,
    draw_seed,
    first_error,
    full_weights,
    judge_items,
    judged_reward,
    mean,
    number_list,
    pixels_of,
    source_of,
)
from flowrl.rewards.judges.chat import TOP_LOGPROBS, Answer, Chat, Question, build_chat, check_chat, is_server
from flowrl.rewards.judges.principles import KINDS, Aggregate, Planner, Verify, score_principles
from flowrl.rewards.judges.templates import Template, digest_of, load_templates

DIGITS = {str(digit): float(digit) for digit in range(6)}


@dataclass(frozen=True, kw_only=True, slots=True)
class EditScore:
    """How well an edit carries out its instruction, in [0, 1].

    `digits`: `sum_i i p_i / 5`, with p the judge's probabilities of the digits 0 to 5 as the first answered token,
    renormalised. `ratings`: `sqrt(SC PQ)`; semantic consistency SC and perceptual quality PQ are the means of two
    ratings of 0 to 25 each, over 25, and are the sub-scores `consistency` and `quality`.
    """

    judge: Mapping[str, Any]
    """Which one, see `flowrl.rewards.judges.chat`; for `digits` one that gives log-probabilities."""
    method: Literal["digits", "ratings"] = "digits"
    """`digits` or `ratings`."""
    requirement: str | None = "requirement"
    """Of `digits`: the field of the metadata that says what a good result must satisfy. An item without it has failed
    ("missing_field"); null asks without a requirement."""
    draws: int = 1
    """Of `ratings`: sampled answers whose scores are averaged; those that failed are left out, and the item has failed
    if all have."""
    template: str | None = None
    """A text file that takes the place of edit_score.txt (edit_score_plain.txt without a requirement); for `ratings` a
    folder with edit_instruction.txt and edit_quality.txt."""
    max_tokens: int | None = None
    """Of `ratings`: length of an answer; null is 512."""
    temperature: float | None = None
    """Of `ratings`: 0 is greedy; null is 0.7."""

    def __post_init__(self) -> None:
        if self.method == "digits" and (self.max_tokens is not None or self.temperature is not None):
            raise ValueError("max_tokens and temperature mean nothing with method digits: leave them out.")
        if self.draws < 1 or (self.draws > 1 and (self.method == "digits" or self.temperature == 0)):
            raise ValueError(
                f"draws must be at least 1, and above 1 only with method ratings and temperature above 0, since all "
                f"draws agree otherwise; got {self.draws}."
            )
        check_answer_options(self.max_tokens, self.temperature)
        self.templates()
        check_chat(self.judge)

    def templates(self) -> dict[str, Template]:
        """The method's templates, or those that take their place, by name."""
        if self.method == "ratings":
            return load_templates({"edit_instruction": 2, "edit_quality": 1}, self.template)
        return load_templates({"edit_score" if self.requirement else "edit_score_plain": 2}, self.template)

    def build(self, device: torch.device) -> Reward:
        """Makes the reward; loads the judge, if it runs here."""
        templates, chat = self.templates(), build_chat(self.judge, device=device)
        if self.method == "digits":
            (words,) = templates.values()
            score = partial(_score_digits, chat=chat, words=words, requirement=self.requirement)
            settings = f"requirement-{self.requirement}"
        else:
            tokens, temperature = self.max_tokens or 512, 0.7 if self.temperature is None else self.temperature
            score = partial(
                _score_ratings, chat=chat, templates=templates, draws=self.draws, max_tokens=tokens,
                temperature=temperature,
            )  # fmt: skip
            settings = f"draws-{self.draws}:max_tokens-{tokens}:temperature-{temperature:g}"
        return judged_reward(
            "edit_score",
            score,
            judge=self.judge,
            needs={"source_images"} | ({"metadata"} if self.method == "digits" and self.requirement else set()),
            version=f"edit_score:{self.method}:{settings}:template-{digest_of(templates)}:{chat.version}",
        )


def _score_digits(inputs: RewardInputs, *, chat: Chat, words: Template, requirement: str | None) -> RewardOutput:
    def ask(item: int) -> list[Question] | str:
        source, wanted = source_of(inputs, item), inputs.metadata[item].get(requirement) if requirement else ""
        if source is None or not isinstance(wanted, str):
            return MISSING
        fields = {"prompt": inputs.prompts[item], "requirement": wanted}
        return [words.question([source, pixels_of(inputs.images[item])], fields, top_logprobs=TOP_LOGPROBS)]

    def read(item: int, answers: list[Answer]) -> Scored:
        level = all_of(answers, [expected_level(a.logprobs[0], DIGITS) if a.logprobs else None for a in answers])
        return Scored(error=level) if isinstance(level, str) else Scored(value=level[0] / 5)

    return judge_items(inputs, chat, ask, read)


def _score_ratings(
    inputs: RewardInputs,
    *,
    chat: Chat,
    templates: Mapping[str, Template],
    draws: int,
    max_tokens: int,
    temperature: float,
) -> RewardOutput:
    def ask(item: int) -> list[Question] | str:
        source, edited = source_of(inputs, item), pixels_of(inputs.images[item])
        if source is None:
            return MISSING
        shown = {"edit_instruction": [source, edited], "edit_quality": [edited]}
        return [
            templates[name].question(
                images,
                {"prompt": inputs.prompts[item]},
                max_tokens=max_tokens,
                temperature=temperature,
                seed=draw_seed(name, inputs, item, temperature, draw),
            )
            for draw in range(draws)
            for name, images in shown.items()
        ]

    def read(item: int, answers: list[Answer]) -> Scored:
        rated = []  # SC and PQ of each draw, in [0, 1]
        for k in range(0, len(answers), 2):
            lists = [None if answer.error else number_list(answer.text, 2, 0, 25) for answer in answers[k : k + 2]]
            if (pair := [mean(ratings) / 25 for ratings in lists if ratings is not None]) and len(pair) == 2:
                rated.append(pair)
        if not rated:
            return Scored(error=first_error(answers) or UNPARSED)
        consistency, quality = (mean(column) for column in zip(*rated, strict=True))
        value = mean([math.sqrt(sc * pq) for sc, pq in rated])
        return Scored(value=value, parts={"consistency": consistency, "quality": quality})

    return judge_items(inputs, chat, ask, read, parts=("consistency", "quality"))


@dataclass(frozen=True, kw_only=True, slots=True)
class EditPrinciples:
    """An edit held to the principles of its instruction, in [0, 1].

    A planner reads the instruction and the source image and writes principles of three kinds: what must be kept,
    what must follow the instruction, what must look right. A prompt's metadata may bring them instead, as
    `principles: ["KEEP: the sky is unchanged", ...]`. The judge checks each on the source and the edited image; the
    checks are put together as `aggregate` says, and the sub-scores are the means of the kinds. An item any of whose
    checks failed has failed.
    """

    judge: Mapping[str, Any]
    """Which model checks, see `flowrl.rewards.judges.chat`."""
    planner: Mapping[str, Any] | None = None
    """Which one writes principles; null for the judge."""
    verify: Verify = "reasoned"
    """`reasoned`, a short reasoning that ends in a score of 0 to 10, over 10; `yes_no`, the probability of yes at the
    first token, which is cheaper and needs a judge with log-probabilities."""
    weights: Mapping[str, float] | None = None
    """Weights of keep, follow and quality; null weighs all alike."""
    aggregate: Aggregate = "mean"
    """`mean` of the kinds' means; their weighted `geometric` mean; `min`, the worst principle."""
    max_principles: int = 10
    """Principles of an instruction at most."""
    template: str | None = None
    """A folder that holds principle_list.txt, principle_reasoned.txt or principle_yes_no.txt."""
    max_tokens: int = 512
    """Length of a reasoned check, and of the list."""
    temperature: float = 0.0
    """Temperature of a reasoned check; the list is greedy, so that all samples of a prompt get the same."""

    def __post_init__(self) -> None:
        if self.max_principles < 1:
            raise ValueError(f"max_principles must be at least 1, got {self.max_principles}.")
        full_weights(self.weights, KINDS)
        if self.verify == "yes_no" and self.temperature != 0:
            raise ValueError("temperature means nothing with verify yes_no: leave it out.")
        check_answer_options(self.max_tokens, self.temperature)
        self.templates()
        check_chat(self.judge)
        if self.planner is not None:
            check_chat(self.planner, owner="planner")

    def templates(self) -> dict[str, Template]:
        """The templates of the list and of the checks, by name."""
        return load_templates({"principle_list": 1, f"principle_{self.verify}": 2}, self.template)

    def build(self, device: torch.device) -> Reward:
        """Makes the reward; loads the judge, if it runs here."""
        templates, weights = self.templates(), full_weights(self.weights, KINDS)
        chat = build_chat(self.judge, device=device)
        plans = chat if self.planner is None else build_chat(self.planner, device=device, owner="planner")
        planner = Planner(plans, templates["principle_list"], limit=self.max_principles, max_tokens=self.max_tokens)
        listed = ",".join(f"{kind}-{weights[kind]:g}" for kind in KINDS)
        return judged_reward(
            "edit_principles",
            partial(
                score_principles, chat=chat, planner=planner, words=templates[f"principle_{self.verify}"],
                verify=self.verify, weights=weights, aggregate=self.aggregate, max_tokens=self.max_tokens,
                temperature=self.temperature,
            ),
            # A planner in this process must not run in threads beside the rollout, wherever the judge is.
            judge=self.judge if self.planner is None or is_server(self.planner) else self.planner,
            needs={"source_images", "metadata"},
            version=f"edit_principles:{self.verify}:{self.aggregate}:{listed}:at_most-{self.max_principles}:"
            f"max_tokens-{self.max_tokens}:temperature-{self.temperature:g}:template-{digest_of(templates)}:"
            f"{chat.version}:planner-{plans.version}",
        )  # fmt: skip
