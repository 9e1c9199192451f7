"""Edits judged against their instruction by one score; `flowrl.rewards.judges.principles` checks them point by point.

`edit_score` asks for a digit and takes its expectation (UniWorld-V2, Edit-R1, arXiv 2510.16888), or for ratings of
semantic consistency and perceptual quality (EditScore, VIEScore). It needs the source image.

Both ask in the published words, of PKU-YuanGroup/Edit-R1 and VectorSpaceLab/EditScore; see
`flowrl.rewards.judges.templates`. Their own servers are sent images as JPEG.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean
from typing import Any, ClassVar, Literal

import torch

from flowrl.prompts.loading import Prompt
from flowrl.rewards.base import Reward, RewardInputs, RewardOutput
from flowrl.rewards.base.prompt_needs import no_source
from flowrl.rewards.judges import asking
from flowrl.rewards.judges.answers import expected_level
from flowrl.rewards.judges.chat import TOP_LOGPROBS, Answer, Chat, OneJudge, Question, check_chat, score_schema
from flowrl.rewards.judges.templates import Template, digest_of, load_templates

DIGITS = {str(digit): float(digit) for digit in range(6)}


@dataclass(frozen=True, kw_only=True, slots=True)
class EditScore(OneJudge):
    """How well a judge finds an edit to carry out its instruction, in [0, 1].

    `digits`: `sum_i i p_i / 5`, with p the judge's probabilities of the digits 0 to 5 as the first answered token,
    renormalised. `ratings`: `sqrt(SC PQ)`, a tenth of the published overall; semantic consistency SC and perceptual
    quality PQ are each of two ratings of 0 to 25, over 25, and are the sub-scores `consistency` and `quality`.
    """

    judges: ClassVar[tuple[str, ...]] = ("edits",)
    judge: Mapping[str, Any]
    """Which one, see `flowrl.rewards.judges.chat`; for `digits` one that gives log-probabilities."""
    method: Literal["digits", "ratings"] = "digits"
    """`digits` or `ratings`."""
    requirement: str | None = "requirement"
    """Of `digits`: the field of the metadata that says what a good result must satisfy. An item without it has failed
    ("missing_field"); null asks without a requirement."""
    draws: int = 1
    """Of `ratings`: sampled answers whose scores are averaged, without those that failed; an item fails if all do."""
    of_pair: Literal["lowest", "mean"] = "lowest"
    """Of `ratings`: what two ratings come to, the `lowest` (EditScore, VIEScore) or their `mean` (PaCo-RL)."""
    template: str | None = None
    """A text file that takes the place of the published text; for `ratings` a folder with edit_instruction.txt and
    edit_quality.txt; or `own`."""
    max_tokens: int | None = None
    """Of `ratings`: length of an answer; null is 512."""
    temperature: float | None = None
    """Of `ratings`: 0 is greedy; null is 0.7."""

    def __post_init__(self) -> None:
        if self.method == "digits" and (self.max_tokens is not None or self.temperature is not None):
            raise ValueError("max_tokens and temperature mean nothing with method digits: leave them out.")
        if self.method == "digits" and self.of_pair != "lowest":
            raise ValueError("of_pair means nothing with method digits: leave it out.")
        if self.draws < 1 or (self.draws > 1 and (self.method == "digits" or self.temperature == 0)):
            raise ValueError(
                f"draws must be at least 1, and above 1 only with method ratings and temperature above 0, since all "
                f"draws agree otherwise; got {self.draws}."
            )
        asking.check_answer_options(self.max_tokens, self.temperature)
        self.templates()
        check_chat(self.judge)

    def templates(self) -> dict[str, Template]:
        """The method's templates, or those that take their place, by name."""
        if self.method == "ratings":
            return load_templates({"edit_instruction": 2, "edit_quality": 1}, self.template, source="edit_score")
        name = "edit_score" if self.requirement else "edit_score_plain"
        return load_templates({name: 2}, self.template, source="edit_r1")

    @property
    def tokens(self) -> int:
        """Length of a rating at most."""
        return self.max_tokens or 512

    @property
    def heat(self) -> float:
        """Temperature of a rating."""
        return 0.7 if self.temperature is None else self.temperature

    def lacks(self, prompt: Prompt) -> str | None:
        """A source image; of `digits`, the requirement too."""
        field = self.requirement if self.method == "digits" else None
        if (lack := no_source(prompt)) is not None or field is None:
            return lack
        if isinstance(prompt.metadata.get(field), str):
            return None
        return f"needs a text in the field {field!r} of its record, and has none: give it, or set requirement: null"

    def build(self, device: torch.device) -> Reward:
        """Makes the reward; loads the judge, if it runs here."""
        templates = self.templates()
        settings = f"requirement-{self.requirement}"
        if self.method == "ratings":
            settings = f"{self.of_pair}:draws-{self.draws}:max_tokens-{self.tokens}:temperature-{self.heat:g}"
        score = self._score_digits if self.method == "digits" else self._score_ratings
        return asking.judged_reward(
            "edit_score",
            partial(score, templates=templates),
            judge=self.judge,
            device=device,
            needs={"source_images"} | ({"metadata"} if self.method == "digits" and self.requirement else set()),
            version=f"{self.method}:{settings}:template-{digest_of(templates)}",
        )

    def _score_digits(self, inputs: RewardInputs, *, chat: Chat, templates: Mapping[str, Template]) -> RewardOutput:
        (words,), field = templates.values(), self.requirement

        def ask(item: int) -> list[Question]:
            source, wanted = asking.source_of(inputs, item), inputs.metadata[item].get(field) if field else ""
            if not isinstance(wanted, str):
                raise asking.NoScore(asking.MISSING)
            fields = {"prompt": inputs.prompts[item], "requirement": wanted}
            return [words.question([source, asking.pixels_of(inputs.images[item])], fields, top_logprobs=TOP_LOGPROBS)]

        def read(item: int, answers: list[Answer]) -> asking.JudgedItem:
            (level,) = asking.all_of(
                answers, [expected_level(a.logprobs[0], DIGITS) if a.logprobs else None for a in answers]
            )
            return asking.JudgedItem(value=level / 5)

        return asking.judge_items(inputs, chat, ask, read)

    def _score_ratings(self, inputs: RewardInputs, *, chat: Chat, templates: Mapping[str, Template]) -> RewardOutput:
        def ask(item: int) -> list[Question]:
            source, edited = asking.source_of(inputs, item), asking.pixels_of(inputs.images[item])
            shown = {"edit_instruction": [source, edited], "edit_quality": [edited]}
            return [
                replace(
                    templates[name].question(
                        images,
                        {"prompt": inputs.prompts[item]},
                        max_tokens=self.tokens,
                        temperature=self.heat,
                        seed=asking.draw_seed(name, inputs, item, self.heat, draw),
                    ),
                    schema=score_schema(2, 0, 25),
                )
                for draw in range(self.draws)
                for name, images in shown.items()
            ]

        def read(item: int, answers: list[Answer]) -> asking.JudgedItem:
            rated = []  # SC and PQ of each draw, in [0, 1]
            of_pair = min if self.of_pair == "lowest" else fmean
            for k in range(0, len(answers), 2):
                lists = [
                    None if answer.error else asking.number_list(answer.text, 2, 0, 25) for answer in answers[k : k + 2]
                ]
                if (pair := [of_pair(ratings) / 25 for ratings in lists if ratings is not None]) and len(pair) == 2:
                    rated.append(pair)
            if not rated:
                raise asking.NoScore(asking.first_error(answers) or asking.UNPARSED)
            consistency, quality = (fmean(column) for column in zip(*rated, strict=True))
            value = fmean([math.sqrt(sc * pq) for sc, pq in rated])
            return asking.JudgedItem(value=value, parts={"consistency": consistency, "quality": quality})

        return asking.judge_items(inputs, chat, ask, read, parts=("consistency", "quality"))
