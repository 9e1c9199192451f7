"""Rubrics: rules that a judge answers with yes or no, summed with weights (AutoRubric-T2I, arXiv 2605.17602).

A rubric is a JSON file, written by hand or by `flowrl.rewards.judges.autorubric`:

    {"schema": 1, "rules": [{"text": "Is every object named in the prompt visible?", "weight": 1.3},
                            {"text": "Are there extra fingers?", "weight": 0.6, "answer": "no"}]}
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch

from flowrl.config.options import build_options
from flowrl.config.train import option_path
from flowrl.rewards.base import Reward, RewardInputs, RewardOutput
from flowrl.rewards.judges import asking
from flowrl.rewards.judges.chat import TOP_LOGPROBS, Answer, Chat, OneJudge, Pixels, Question, check_chat
from flowrl.rewards.judges.templates import Template, load_template
from flowrl.runtime.files import parse_json, read_text, replacing


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """A question about one image and its prompt, the answer that speaks for the image, and what it counts."""

    text: str
    weight: float = 1.0
    answer: Literal["yes", "no"] = "yes"

    def __post_init__(self) -> None:
        if not self.text.strip():
            raise ValueError("text must be a question, got an empty one.")
        if not self.weight > 0:
            raise ValueError(
                f"weight is {self.weight}: it must be above 0. A rule that speaks against an image takes "
                f'"answer": "no" with a positive weight.'
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class RubricFile:
    """What a rubric's file holds; `info` is for people."""

    schema: Literal[1]
    rules: tuple[Rule, ...]
    info: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.rules:
            raise ValueError("rules must hold one rule or more.")


def load_rubric(path: str | Path) -> tuple[Rule, ...]:
    """The rules of a rubric file. Raises ValueError: no such file, or something in it is wrong; names the rule."""
    file = option_path(str(path))
    if not file.is_file():
        raise ValueError(f"there is no rubric {str(path)!r}: write one by hand or with `flowrl reward rubric`.")
    try:
        record = parse_json(read_text(file), str(path))
    except ValueError as error:
        raise ValueError(f"the rubric {str(path)!r} is not JSON: {error}.") from None
    if not isinstance(record, dict):
        raise ValueError(f'the rubric {str(path)!r} must hold {{"schema": 1, "rules": [...]}}.')
    loaded = build_options(RubricFile, record, owner=f"the rubric {str(path)!r}")
    return tuple(replace(rule, text=rule.text.strip()) for rule in loaded.rules)


def save_rubric(path: str | Path, rules: Sequence[Rule], info: Mapping[str, Any] | None = None) -> Path:
    """Writes a rubric, and under "info" what is known about it. The file appears whole or not at all."""
    path = Path(path).expanduser()
    file = RubricFile(schema=1, rules=tuple(rules), info=dict(info or {}))
    text = json.dumps(asdict(file), indent=2, ensure_ascii=False) + "\n"
    with replacing(path) as stream:
        stream.write(text.encode("utf-8"))
    return path


def rule_question(words: Template, image: Pixels, prompt: str, rule: str) -> Question:
    """What the judge is asked about one rule."""
    return words.question([image], {"prompt": prompt, "rule": rule}, top_logprobs=TOP_LOGPROBS)


@dataclass(frozen=True, kw_only=True, slots=True)
class Rubric(OneJudge):
    """`s(x) = sum_j w_j P(the good answer to rule j)`, in [0, sum w], one question per rule. The sub-scores `rule_01`,
    `rule_02` ... are the probabilities: the log shows which rule a run learns or exploits. If one rule failed, so has
    the item: a sum over the others would be another score."""

    judge: Mapping[str, Any]
    """Which one, see `flowrl.rewards.judges.chat`; one that gives log-probabilities. Weights that were fitted to one
    judge mean little for another."""
    rules: str
    """The rubric's JSON file, see the module; or `asset:NAME`."""
    normalise: bool = False
    """Divide by the sum of the weights, which brings the score to [0, 1]."""
    template: str | None = None
    """A text file that takes the place of rubric_rule.txt; the one that the weights were fitted with."""

    def __post_init__(self) -> None:
        load_rubric(self.rules)
        self.words()
        check_chat(self.judge)

    def words(self) -> Template:
        """The template of a question."""
        return load_template("rubric_rule", self.template, images=1)

    def build(self, device: torch.device) -> Reward:
        """Makes the reward; loads the judge, if it runs here."""
        rules, words = load_rubric(self.rules), self.words()
        digest = hashlib.sha256(repr(rules).encode()).hexdigest()[:12]

        def score(inputs: RewardInputs, *, chat: Chat) -> RewardOutput:
            total = math.fsum(rule.weight for rule in rules) if self.normalise else 1.0
            names = [f"rule_{number:02d}" for number in range(1, len(rules) + 1)]

            def ask(item: int) -> list[Question]:
                image = asking.pixels_of(inputs.images[item])
                return [rule_question(words, image, inputs.prompts[item], rule.text) for rule in rules]

            def read(item: int, answers: list[Answer]) -> asking.JudgedItem:
                yes = [math.nan if p is None else p for p in map(asking.probability_of_yes, answers)]
                agreed = [p if rule.answer == "yes" else 1.0 - p for p, rule in zip(yes, rules, strict=True)]
                score = math.fsum(rule.weight * value for rule, value in zip(rules, agreed, strict=True))
                error = asking.first_error(answers) or (asking.UNPARSED if math.isnan(score) else None)
                return asking.JudgedItem(value=score / total, error=error, parts=dict(zip(names, agreed, strict=True)))

            return asking.judge_items(inputs, chat, ask, read, parts=names)

        return asking.judged_reward(
            "rubric",
            score,
            judge=self.judge,
            device=device,
            needs=set(),
            version=f"{len(rules)}-rules@{digest}:{'normalised' if self.normalise else 'sum'}:template-{words.digest}",
        )
