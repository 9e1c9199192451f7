"""Edits judged against their instruction: by one score, or point by point. Both need the source image.

`edit_score` asks for a digit and takes its expectation (UniWorld-V2, Edit-R1, arXiv 2510.16888), or for ratings of
semantic consistency and perceptual quality (EditScore, VIEScore), in the published words of PKU-YuanGroup/Edit-R1 and
VectorSpaceLab/EditScore; see `flowrl.rewards.judges.templates`. Their own servers are sent images as JPEG.

`edit_principles` checks one by one what an instruction asks to keep, to change and to get right: the first half of
Edit-R1 with a reasoning verifier (arXiv 2604.27505). The paper's texts, its range of scores and its aggregation are not
published; those here are our own.
"""

from __future__ import annotations

import hashlib
import math
import re
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean
from typing import Any, ClassVar, Literal

import torch

from flowrl.config.sections import at_least
from flowrl.prompts.loading import Prompt
from flowrl.rewards.base import FunctionReward, Model, Reward, RewardInputs, RewardOutput
from flowrl.rewards.base.prompt_needs import no_source
from flowrl.rewards.judges import asking
from flowrl.rewards.judges.answers import expected_level, parse_score
from flowrl.rewards.judges.chat import (
    TOP_LOGPROBS,
    Answer,
    Chat,
    OneJudge,
    Pixels,
    Question,
    build_chat,
    check_chat,
    is_server,
    judge_models,
    score_schema,
)
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


# ---- principles ------------------------------------------------------------------------------------------------------


Verify = Literal["reasoned", "yes_no"]
Aggregate = Literal["mean", "geometric", "min"]
Plan = tuple["Principle", ...]
KINDS = ("keep", "follow", "quality")
MAX_PLANS = 4096
SCORE = r"(?m)^\W*score\W{0,4}[:\uff1a]\W{0,4}?(\d+(?:\.\d+)?)"


@dataclass(frozen=True, kw_only=True, slots=True)
class Principle:
    """One statement that an edited image must satisfy, of a kind in `KINDS`."""

    kind: str
    text: str


def parse_principles(text: str, limit: int) -> Plan:
    """The principles in a judge's list, each on a line such as "KEEP: the sky is unchanged". At most `limit` distinct
    ones: where there are more, each kind is cut in turn, so that none is lost to the length of another."""
    found = re.findall(rf"(?im)^[^\w\n]*(?:\d+[^\w\n]+)?({'|'.join(KINDS)})[^\w\n:]*[:\uff1a][^\w\n]*(\w.*?)\s*$", text)
    distinct = dict.fromkeys(Principle(kind=kind.lower(), text=words) for kind, words in found)
    ranked = [
        (place, KINDS.index(kind), principle)
        for kind in KINDS
        for place, principle in enumerate(p for p in distinct if p.kind == kind)
    ]
    kept = {principle for _, _, principle in sorted(ranked, key=lambda row: row[:2])[:limit]}
    return tuple(principle for principle in distinct if principle in kept)


def aggregate_principles(
    principles: Sequence[Principle], scores: Sequence[float], weights: Mapping[str, float], aggregate: Aggregate
) -> tuple[float, dict[str, float]]:
    """One score from those of the principles, each in [0, 1], and the mean of each kind.

    `mean`: `sum_k w_k m_k / sum_k w_k` over the kinds k that have principles, m_k the mean of kind k, so a kind does
    not count more for being longer. `geometric`: `prod_k m_k^(w_k / sum w)`. `min`: the lowest score of all whose kind
    has weight. Raises ValueError: no principle is of a kind with weight.
    """
    kinds = [kind for kind in KINDS if weights[kind] > 0 and kind in {p.kind for p in principles}]
    if not kinds:
        raise ValueError(f"no principle is of a kind with weight: {[p.kind for p in principles]}, weights {weights}.")
    by_kind = {kind: [score for p, score in zip(principles, scores, strict=True) if p.kind == kind] for kind in kinds}
    means = {kind: fmean(values) for kind, values in by_kind.items()}
    if aggregate == "min":
        return min(min(values) for values in by_kind.values()), means
    if aggregate == "mean":
        return asking.weighted_mean(means, weights), means
    return asking.weighted_geometric_mean(means, weights), means


class Planner:
    """Turns instructions into principles, each pair of instruction and source image once.

    All samples of a group thus are held to the same principles, and a batch costs one question per prompt. Failed
    decompositions are not kept. Greedy answers, so that processes that ask separately agree. Safe to use from several
    threads: one asks while the others wait for its plans.
    """

    def __init__(self, chat: Chat, words: Template, *, limit: int, max_tokens: int) -> None:
        self.chat, self.words, self.limit, self.max_tokens = chat, words, limit, max_tokens
        self.plans: dict[str, Plan] = {}
        self._lock = threading.Lock()

    def plan(self, instructions: Sequence[str], sources: Sequence[Pixels]) -> list[Plan | str]:
        """The principles of each edit, or the short word that says why there are none."""
        keys = [
            hashlib.sha256(f"{instruction}\0{source.shape}\0".encode() + source.tobytes()).hexdigest()
            for instruction, source in zip(instructions, sources, strict=True)
        ]
        with self._lock:
            new = {
                key: self.words.question([source], {"prompt": instruction}, max_tokens=self.max_tokens)
                for key, instruction, source in zip(keys, instructions, sources, strict=True)
                if key not in self.plans
            }
            fresh: dict[str, Plan | str] = {
                key: answer.error or parse_principles(answer.text, self.limit) or asking.UNPARSED
                for key, answer in zip(new, asking.ask_all(self.chat, list(new.values())), strict=True)
            }
            plans = [fresh[key] if key in fresh else self.plans[key] for key in keys]
            self.plans |= {key: plan for key, plan in fresh.items() if not isinstance(plan, str)}
            for key in list(self.plans)[: max(0, len(self.plans) - MAX_PLANS)]:
                del self.plans[key]
        return plans

    def plans_of(self, inputs: RewardInputs) -> list[Plan | str]:
        """The principles of each item, those of its record before the planner's, or why it has none."""
        sources = [asking.pixels_of(own[0]) if own else None for own in inputs.source_images or [[]] * len(inputs)]
        given = [given_principles(record, self.limit) for record in inputs.metadata]
        plans: list[Plan | str] = [
            asking.MISSING if source is None else own or () for source, own in zip(sources, given, strict=True)
        ]
        open_items = [item for item, plan in enumerate(plans) if not plan]
        images = [source for item in open_items if (source := sources[item]) is not None]
        made = self.plan([inputs.prompts[item] for item in open_items], images)
        for item, plan in zip(open_items, made, strict=True):
            plans[item] = plan
        return plans


def given_principles(record: Mapping[str, Any], limit: int) -> Plan | None:
    """The principles of a prompt's record, `principles: ["KEEP: the sky is unchanged", ...]`, None where it has none.
    Raises ValueError: if there is such a field, and no principle in it."""
    lines = record.get("principles")
    if lines is None:
        return None
    texts = [line for line in lines if isinstance(line, str)] if isinstance(lines, list) else []
    plan = parse_principles("\n".join(texts), limit)
    if not plan or len(texts) != len(lines):
        raise ValueError(
            f'metadata field principles must be a list of texts such as "KEEP: the sky is unchanged", each with KEEP, '
            f"FOLLOW or QUALITY, got {lines!r}."
        )
    return plan


@dataclass(frozen=True, kw_only=True, slots=True)
class EditPrinciples:
    """How far an edit keeps to the principles that a judge derives from its instruction, in [0, 1] (Edit-R1).

    A planner reads the instruction and the source image and writes principles of three kinds: what must be kept, what
    must follow the instruction, what must look right. A prompt's metadata may bring them instead, as `principles:
    ["KEEP: the sky is unchanged", ...]`. The judge checks each on the source and the edited image; the checks are put
    together as `aggregate` says, and the sub-scores are the means of the kinds. An item fails if a check fails.
    """

    judges: ClassVar[tuple[str, ...]] = ("edits",)
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
        at_least(1, self, "max_principles")
        asking.full_weights(self.weights, KINDS)
        if self.verify == "yes_no" and self.temperature != 0:
            raise ValueError("temperature means nothing with verify yes_no: leave it out.")
        asking.check_answer_options(self.max_tokens, self.temperature)
        self.templates()
        check_chat(self.judge)
        if self.planner is not None:
            check_chat(self.planner, owner="planner")

    def templates(self) -> dict[str, Template]:
        """The templates of the list and of the checks, by name."""
        return load_templates({"principle_list": 1, f"principle_{self.verify}": 2}, self.template)

    @property
    def models(self) -> tuple[Model, ...]:
        return judge_models(self.judge, *(() if self.planner is None else (self.planner,)))

    def lacks(self, prompt: Prompt) -> str | None:
        """A source image; principles that can be read, where the record brings some."""
        if (lack := no_source(prompt)) is not None:
            return lack
        try:
            given_principles(prompt.metadata, self.max_principles)
        except ValueError as error:
            return f"needs other principles: {error}"
        return None

    def build(self, device: torch.device) -> Reward:
        """Makes the reward; loads the judge, if it runs here."""
        templates, weights = self.templates(), asking.full_weights(self.weights, KINDS)
        chat = build_chat(self.judge, device=device)
        plans = chat if self.planner is None else build_chat(self.planner, device=device, owner="planner")
        planner = Planner(plans, templates["principle_list"], limit=self.max_principles, max_tokens=self.max_tokens)
        listed = ",".join(f"{kind}-{weights[kind]:g}" for kind in KINDS)
        # A planner in this process must not run in threads beside the rollout, wherever the judge is.
        remote = is_server(self.judge) and is_server(self.planner or self.judge)
        return FunctionReward(
            name="edit_principles",
            score=partial(self._score, chat=chat, planner=planner, words=templates[f"principle_{self.verify}"]),
            kind="remote" if remote else "pointwise",
            waits=remote,
            needs=frozenset({"images", "prompts", "source_images", "metadata"}),
            version=f"edit_principles:{self.verify}:{self.aggregate}:{listed}:at_most-{self.max_principles}:"
            f"max_tokens-{self.max_tokens}:temperature-{self.temperature:g}:template-{digest_of(templates)}:"
            f"{chat.version}:planner-{plans.version}",
        )

    def _score(self, inputs: RewardInputs, *, chat: Chat, planner: Planner, words: Template) -> RewardOutput:
        plans, weights = planner.plans_of(inputs), asking.full_weights(self.weights, KINDS)
        checked: dict[int, Plan] = {}
        reasoned = self.verify == "reasoned"

        def ask(item: int) -> list[Question]:
            found = plans[item]
            if isinstance(found, str):
                raise asking.NoScore(found)
            plan = tuple(principle for principle in found if weights[principle.kind] > 0)  # others are not asked about
            if not plan:
                raise asking.NoScore(asking.UNPARSED)
            checked[item] = plan
            images = [asking.source_of(inputs, item), asking.pixels_of(inputs.images[item])]
            return [
                words.question(
                    images,
                    {"prompt": inputs.prompts[item], "principle": principle.text, "kind": principle.kind},
                    max_tokens=self.max_tokens if reasoned else 1,
                    temperature=self.temperature,
                    top_logprobs=0 if reasoned else TOP_LOGPROBS,
                    seed=asking.draw_seed("principle", inputs, item, self.temperature, number),
                )
                for number, principle in enumerate(plan)
            ]

        def read(item: int, answers: list[Answer]) -> asking.JudgedItem:
            if reasoned:  # from 0 to 10
                found = [parse_score(answer.text, pattern=SCORE, low=0, high=10) for answer in answers]
                scores = [score / 10 for score in asking.all_of(answers, found)]
            else:
                scores = asking.all_of(answers, [asking.probability_of_yes(answer) for answer in answers])
            value, means = aggregate_principles(checked[item], scores, weights, self.aggregate)
            return asking.JudgedItem(value=value, parts=means)

        return asking.judge_items(inputs, chat, ask, read, parts=[kind for kind in KINDS if weights[kind] > 0])
