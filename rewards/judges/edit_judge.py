"""Edits judged against their instruction: one score, or a list of principles that are checked one by one.

`edit_score` asks for a digit and takes its expectation (UniWorld-V2, Edit-R1, arXiv 2510.16888), or for ratings of
semantic consistency and perceptual quality (EditScore, VIEScore). `edit_principles` first turns the instruction into
principles (Edit-R1 with a reasoning verifier, arXiv 2604.27505). Both need the source image.

The shipped templates are our own words. Scores of a published checkpoint need its published template: PKU-YuanGroup/
Edit-R1 for digits, X-GenGroup/PaCo-RL for the ratings; see `flowrl.rewards.judges.templates`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal

import torch

from flowrl.rewards import Reward, RewardInputs, RewardOutput, output_of
from flowrl.rewards.judges.answers import expected_level
from flowrl.rewards.judges.asking import (
    BLANK,
    MISSING,
    UNPARSED,
    ask_items,
    check_answer_options,
    check_weights,
    draw_seed,
    first_error,
    judged_reward,
    number_list,
    pixels_of,
    source_of,
)
from flowrl.rewards.judges.chat import Answer, Chat, Question, build_chat, check_chat
from flowrl.rewards.judges.principles import KINDS, TOP_LOGPROBS, Aggregate, Planner, Verify, score_principles
from flowrl.rewards.judges.templates import Template, digest_of, load_templates

Method = Literal["digits", "ratings"]
DIGITS = {str(digit): float(digit) for digit in range(6)}
SCORE_OWNER, PRINCIPLES_OWNER = "reward 'edit_score'", "reward 'edit_principles'"


def check_edit_score(
    *,
    judge: Mapping[str, Any],
    method: Method = "digits",
    requirement: str | None = "requirement",
    draws: int = 1,
    template: str | None = None,
    max_tokens: int | None = None,
    temperature: float | None = None,
) -> None:
    """Refuses option values that are wrong, without asking the judge."""
    if method == "digits" and (max_tokens is not None or temperature is not None):
        raise ValueError(f"{SCORE_OWNER}: max_tokens and temperature mean nothing with method digits: leave them out.")
    if draws < 1 or (draws > 1 and (method == "digits" or temperature == 0)):
        raise ValueError(
            f"{SCORE_OWNER}: draws must be at least 1, and above 1 only with method ratings and temperature above 0, "
            f"since all draws agree otherwise; got {draws}."
        )
    check_answer_options(max_tokens, temperature, owner=SCORE_OWNER)
    for name, words in load_templates(_score_templates(method, requirement), template, owner=SCORE_OWNER).items():
        words.parts([BLANK] * (1 if name == "edit_quality" else 2), prompt="", requirement="")
    check_chat(judge, owner=SCORE_OWNER)


def edit_score(
    *,
    device: torch.device,
    judge: Mapping[str, Any],
    method: Method = "digits",
    requirement: str | None = "requirement",
    draws: int = 1,
    template: str | None = None,
    max_tokens: int | None = None,
    temperature: float | None = None,
) -> Reward:
    """How well an edit carries out its instruction, in [0, 1].

    `digits`: `sum_i i p_i / 5`, with p the judge's probabilities of the digits 0 to 5 as the first answered token,
    renormalised. `ratings`: `sqrt(SC PQ)`; semantic consistency SC and perceptual quality PQ are the means of two
    ratings of 0 to 25 each, over 25, and are the sub-scores `consistency` and `quality`.

    Args:
        device: where a judge in this process runs.
        judge: which one, see `flowrl.rewards.judges.chat`; for `digits` one that gives log-probabilities.
        method: `digits` or `ratings`.
        requirement: of `digits`: the field of the metadata that says what a good result must satisfy. An item without
            it has failed ("missing_field"); null asks without a requirement.
        draws: of `ratings`: sampled answers whose scores are averaged; those that failed are left out, and the item has
            failed if all have.
        template: a text file that takes the place of edit_score.txt (edit_score_plain.txt without a requirement); for
            `ratings` a folder with edit_instruction.txt and edit_quality.txt.
        max_tokens: of `ratings`: length of an answer; null is 512.
        temperature: of `ratings`: 0 is greedy; null is 0.7.

    Raises:
        ValueError: for bad values, or a judge or template that is not there.
    """
    check_edit_score(
        judge=judge, method=method, requirement=requirement, draws=draws, template=template, max_tokens=max_tokens,
        temperature=temperature,
    )  # fmt: skip
    templates = load_templates(_score_templates(method, requirement), template, owner=SCORE_OWNER)
    chat = build_chat(judge, device=device, owner=SCORE_OWNER)
    if method == "digits":
        score = partial(_score_digits, chat=chat, words=next(iter(templates.values())), requirement=requirement)
        settings = f"requirement-{requirement}"
    else:
        answer = {"max_tokens": max_tokens or 512, "temperature": 0.7 if temperature is None else temperature}
        score = partial(_score_ratings, chat=chat, templates=templates, draws=draws, answer=answer)
        settings = f"draws-{draws}:max_tokens-{answer['max_tokens']}:temperature-{answer['temperature']:g}"
    return judged_reward(
        "edit_score",
        score,
        judge=judge,
        needs={"source_images"} | ({"metadata"} if method == "digits" and requirement else set()),
        version=f"edit_score:{method}:{settings}:template-{digest_of(templates)}:{chat.version}",
    )


def _score_templates(method: Method, requirement: str | None) -> tuple[str, ...]:
    if method == "ratings":
        return ("edit_instruction", "edit_quality")
    return ("edit_score",) if requirement else ("edit_score_plain",)


def _score_digits(inputs: RewardInputs, *, chat: Chat, words: Template, requirement: str | None) -> RewardOutput:
    questions: list[list[Question]] = []
    for item, prompt in enumerate(inputs.prompts):
        source, wanted = source_of(inputs, item), inputs.metadata[item].get(requirement) if requirement else ""
        if source is None or not isinstance(wanted, str):
            questions.append([])
            continue
        fields = {"prompt": prompt, "requirement": wanted}
        parts = words.parts([source, pixels_of(inputs.images[item])], **fields)
        questions.append([Question(parts=parts, system=words.system_of(**fields), top_logprobs=TOP_LOGPROBS)])
    levels = [_level(answers) for answers in ask_items(chat, questions)]
    return output_of([level for level, _ in levels], inputs, errors=[error for _, error in levels])


def _level(answers: Sequence[Answer]) -> tuple[float | None, str | None]:
    if not answers or answers[0].error:
        return None, answers[0].error if answers else MISSING
    level = expected_level(answers[0].logprobs[0], DIGITS) if answers[0].logprobs else None
    return (None, UNPARSED) if level is None else (level / 5, None)


def _score_ratings(
    inputs: RewardInputs, *, chat: Chat, templates: Mapping[str, Template], draws: int, answer: Mapping[str, Any]
) -> RewardOutput:
    questions: list[list[Question]] = []
    for item, prompt in enumerate(inputs.prompts):
        source, edited = source_of(inputs, item), pixels_of(inputs.images[item])
        shown = {"edit_instruction": [source, edited], "edit_quality": [edited]} if source is not None else {}
        questions.append([
            Question(
                parts=templates[name].parts([p for p in images if p is not None], prompt=prompt),
                system=templates[name].system_of(prompt=prompt),
                seed=draw_seed(name, inputs, item, draw) if answer["temperature"] > 0 else None,
                **answer,
            )
            for draw in range(draws)
            for name, images in shown.items()
        ])  # fmt: skip
    values: list[float | None] = []
    errors: list[str | None] = []
    parts: dict[str, list[float]] = {"consistency": [], "quality": []}
    for answers in ask_items(chat, questions):
        pairs = [_rated(answers[k : k + 2]) for k in range(0, len(answers), 2)]
        rated = [pair for pair in pairs if pair is not None]
        means = [math.fsum(column) / len(rated) for column in zip(*rated, strict=True)] or [math.nan, math.nan]
        for name, mean in zip(parts, means, strict=True):
            parts[name].append(mean)
        values.append(math.fsum(math.sqrt(sc * pq) for sc, pq in rated) / len(rated) if rated else None)
        errors.append(None if rated else (first_error(answers) or UNPARSED) if answers else MISSING)
    return output_of(values, inputs, parts=parts, errors=errors)


def _rated(answers: Sequence[Answer]) -> tuple[float, float] | None:
    """SC and PQ of one draw, each in [0, 1]."""
    lists = [None if a.error else number_list(a.text, 2, 0, 25) for a in answers]
    sc, pq = (None if pair is None else math.fsum(pair) / 50 for pair in lists)
    return None if sc is None or pq is None else (sc, pq)


def check_edit_principles(
    *,
    judge: Mapping[str, Any],
    planner: Mapping[str, Any] | None = None,
    verify: Verify = "reasoned",
    weights: Mapping[str, float] | None = None,
    aggregate: Aggregate = "mean",
    max_principles: int = 10,
    template: str | None = None,
    max_tokens: int = 512,
    temperature: float = 0.0,
) -> None:
    """Refuses option values that are wrong, without asking a judge."""
    if max_principles < 1:
        raise ValueError(f"{PRINCIPLES_OWNER}: max_principles must be at least 1, got {max_principles}.")
    check_weights(weights, KINDS, owner=PRINCIPLES_OWNER)
    if verify == "yes_no" and temperature != 0:
        raise ValueError(f"{PRINCIPLES_OWNER}: temperature means nothing with verify yes_no: leave it out.")
    check_answer_options(max_tokens, temperature, owner=PRINCIPLES_OWNER)
    names = ("principle_list", f"principle_{verify}")
    for name, words in load_templates(names, template, owner=PRINCIPLES_OWNER).items():
        words.parts([BLANK] * (1 if name == "principle_list" else 2), prompt="", principle="", kind="")
    check_chat(judge, owner=PRINCIPLES_OWNER)
    if planner is not None:
        check_chat(planner, owner=f"{PRINCIPLES_OWNER}, planner")


def edit_principles(
    *,
    device: torch.device,
    judge: Mapping[str, Any],
    planner: Mapping[str, Any] | None = None,
    verify: Verify = "reasoned",
    weights: Mapping[str, float] | None = None,
    aggregate: Aggregate = "mean",
    max_principles: int = 10,
    template: str | None = None,
    max_tokens: int = 512,
    temperature: float = 0.0,
) -> Reward:
    """An edit held to the principles of its instruction, in [0, 1].

    A planner reads the instruction and the source image and writes principles of three kinds: what must be kept,
    what must follow the instruction, what must look right. A prompt's metadata may bring them instead, as
    `principles: ["KEEP: the sky is unchanged", ...]`. The judge checks each on the source and the edited image; the
    checks are put together as `aggregate` says, and the sub-scores are the means of the kinds. An item any of whose
    checks failed has failed.

    Args:
        device: where judges in this process run.
        judge: which model checks, see `flowrl.rewards.judges.chat`.
        planner: which one writes principles; null for the judge.
        verify: `reasoned`, a short reasoning that ends in a score of 0 to 10, over 10; `yes_no`, the probability of yes
            at the first token, which is cheaper and needs a judge with log-probabilities.
        weights: of keep, follow and quality; null weighs all alike.
        aggregate: `mean` of the kinds' means; their weighted `geometric` mean; `min`, the worst principle.
        max_principles: of an instruction.
        template: a folder that holds principle_list.txt, principle_reasoned.txt or principle_yes_no.txt.
        max_tokens: of a reasoned check, and of the list.
        temperature: of a reasoned check; the list is greedy, so that all samples of a prompt get the same.

    Raises:
        ValueError: for bad values, or a judge or template that is not there.
    """
    check_edit_principles(
        judge=judge, planner=planner, verify=verify, weights=weights, aggregate=aggregate,
        max_principles=max_principles, template=template, max_tokens=max_tokens, temperature=temperature,
    )  # fmt: skip
    names = ("principle_list", f"principle_{verify}")
    templates = load_templates(names, template, owner=PRINCIPLES_OWNER)
    chat = build_chat(judge, device=device, owner=PRINCIPLES_OWNER)
    plans = chat if planner is None else build_chat(planner, device=device, owner=f"{PRINCIPLES_OWNER}, planner")
    own = check_weights(weights, KINDS, owner=PRINCIPLES_OWNER)
    listed = ",".join(f"{kind}-{own[kind]:g}" for kind in KINDS)
    return judged_reward(
        "edit_principles",
        partial(
            score_principles, chat=chat, words=templates[names[1]], verify=verify, weights=own, aggregate=aggregate,
            planner=Planner(plans, templates[names[0]], limit=max_principles, max_tokens=max_tokens),
            answer={"max_tokens": max_tokens, "temperature": temperature},
        ),
        # A planner in this process must not run in threads beside the rollout, wherever the judge is.
        judge=judge if planner is None or "server" in planner else planner,
        needs={"source_images", "metadata"},
        version=f"edit_principles:{verify}:{aggregate}:{listed}:at_most-{max_principles}:max_tokens-{max_tokens}:"
        f"temperature-{temperature:g}:template-{digest_of(templates)}:{chat.version}:planner-{plans.version}",
    )  # fmt: skip
