"""Rubrics: rules that a judge answers with yes or no, summed with weights (AutoRubric-T2I, arXiv 2605.17602).

A rubric is a JSON file, written by hand or by `flowrl.rewards.judges.rubric`:

    {"schema": 1, "rules": [{"text": "Is every object named in the prompt visible?", "weight": 1.3},
                            {"text": "Are there extra fingers?", "weight": 0.6, "answer": "no"}]}

Learning one: a judge says why the winners of some pairs win, in the form of yes/no rules; another (or the same) answers
every rule for both images of every pair; an l1-penalised logistic regression keeps the few rules that predict the
winners; the pairs that these get wrong give rise to new rules, and so on. A few hundred pairs are enough. The paper's
prompts and penalty are not published; those here are our own. Answers are kept in OUT.cache.jsonl beside the rubric, so
a run that was broken off, or one with another penalty, asks only for what is not there.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from flowrl.config.options import build_options
from flowrl.config.sections import at_least, share
from flowrl.config.train import option_path
from flowrl.media.reading import read_image
from flowrl.prompts.pairs import Pair, read_pairs
from flowrl.rewards.base import Reward, RewardInputs, RewardOutput
from flowrl.rewards.judges import asking, rubric_fit
from flowrl.rewards.judges.asking import UNPARSED, check_answer_options, probability_of_yes
from flowrl.rewards.judges.chat import TOP_LOGPROBS, Answer, Chat, OneJudge, Pixels, Question, build_chat, check_chat
from flowrl.rewards.judges.rubric_fit import Negative
from flowrl.rewards.judges.templates import Template, load_template, load_templates
from flowrl.runtime.files import parse_json, read_text, replacing
from flowrl.runtime.progress import progress
from flowrl.runtime.randomness import counter_choice
from flowrl.runtime.shapes import Float64


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


# ---- learning a rubric -----------------------------------------------------------------------------------------------


QUESTIONS_AT_ONCE = 256  # between two lines of the cache: what a broken-off run asks again at most
MAX_TOKENS = 1024


def parse_rules(text: str) -> list[str]:
    """The rules in a judge's answer, one per line: "RULE: Are the hands well formed?"."""
    return re.findall(r"(?im)^[^\w\n]*(?:\d+[^\w\n]+)?RULE[^\w\n:]*:[^\w\n]*(\w.*?)[*_\s]*$", text)


def propose_rules(
    chat: Chat, pairs: Sequence[Pair], words: Template, *, count: int, temperature: float
) -> tuple[list[str], Counter[str]]:
    """What a judge says sets winners apart from losers, all answers in a row, and why some failed."""
    rules: list[str] = []
    errors: Counter[str] = Counter()
    with progress("rubric: reasons", len(pairs)) as advance:
        for start in range(0, len(pairs), 16):
            some = pairs[start : start + 16]
            questions = [
                words.question(
                    [_pixels(pair.winner), _pixels(pair.loser)],
                    {"prompt": pair.prompt, "count": str(count)},
                    max_tokens=MAX_TOKENS,
                    temperature=temperature,
                    seed=start + i if temperature > 0 else None,
                )
                for i, pair in enumerate(some)
            ]
            for answer in chat.ask(questions):
                found = [] if answer.error else parse_rules(answer.text)
                rules += found
                errors.update([] if found else [answer.error or UNPARSED])
                advance("")
    return rules, errors


def _pixels(path: Path) -> Pixels:
    return read_image(path, owner="preference pairs")


class AnswerCache:
    """Probabilities of yes by judge, template, image, prompt and rule, in a file that only grows; without failures."""

    def __init__(self, path: Path, *, judge: str, words: Template) -> None:
        self.path, self.prefix = path, f"{judge}\0{words.digest}"
        self.values: dict[str, float] = {}
        self.digests: dict[Path, str] = {}
        text = path.read_text(encoding="utf-8") if path.is_file() else ""
        for line in text.splitlines():
            try:
                key, value = json.loads(line)
            except ValueError:  # half a line, of a run that was killed while it wrote
                continue
            self.values[key] = float(value)
        if text and not text.endswith("\n"):
            with path.open("a", encoding="utf-8") as stream:
                stream.write("\n")

    def key(self, image: Path, prompt: str, rule: str) -> str:
        """The name of one answer; the image goes by its content."""
        if image not in self.digests:
            self.digests[image] = hashlib.sha256(image.read_bytes()).hexdigest()
        return hashlib.sha256("\0".join((self.prefix, self.digests[image], prompt, rule)).encode()).hexdigest()

    def add(self, new: Mapping[str, float]) -> None:
        """Keeps answers, in memory and in the file."""
        self.values |= new
        with self.path.open("a", encoding="utf-8") as stream:
            stream.writelines(f"{json.dumps([key, value])}\n" for key, value in new.items())


def score_rules(
    chat: Chat, pairs: Sequence[Pair], rules: Sequence[str], words: Template, cache: AnswerCache
) -> tuple[Float64[np.ndarray, " n 2 m"], Counter[str]]:
    """P(yes) of every rule on the winner [:, 0] and the loser [:, 1] of every pair, NaN where it failed, and why. Only
    what the cache does not hold is asked."""
    needed = {
        cache.key(image, pair.prompt, rule): (image, pair.prompt, rule)
        for pair in pairs
        for image in (pair.winner, pair.loser)
        for rule in rules
    }
    open_keys = [key for key in needed if key not in cache.values]
    errors: Counter[str] = Counter()
    with progress("rubric: answers", len(open_keys), enabled=bool(open_keys)) as advance:
        for start in range(0, len(open_keys), QUESTIONS_AT_ONCE):
            keys = open_keys[start : start + QUESTIONS_AT_ONCE]
            images = {path: _pixels(path) for path in {needed[key][0] for key in keys}}
            questions = [rule_question(words, images[needed[key][0]], *needed[key][1:]) for key in keys]
            new: dict[str, float] = {}
            for key, answer in zip(keys, chat.ask(questions), strict=True):
                probability = probability_of_yes(answer)
                if probability is None:
                    errors[answer.error or UNPARSED] += 1
                else:
                    new[key] = probability
                advance("")
            cache.add(new)
    scores = [
        [cache.values.get(cache.key(image, pair.prompt, rule), math.nan) for rule in rules]
        for pair in pairs
        for image in (pair.winner, pair.loser)
    ]
    return np.array(scores, dtype=np.float64).reshape(len(pairs), 2, len(rules)), errors


OWNER = "rubric training"


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainedRubric:
    """A learned rubric."""

    path: Path
    rules: tuple[Rule, ...]
    """Those kept, heaviest first."""
    accuracy: float
    """Fraction of the pairs it was fitted to whose winner scores higher."""
    held_out_accuracy: float
    """Of pairs that it has not seen, NaN where none were held out."""
    num_pairs: int
    """Pairs fitted to."""
    num_candidates: int
    """Rules that were tried."""
    errors: dict[str, int]
    """Failed answers by reason."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RubricTraining:
    """How a rubric is learned. About `2 num_pairs rules_per_round` questions are asked per round."""

    judge: Mapping[str, Any]
    """Who answers the rules, here and later in the reward, see `flowrl.rewards.judges.chat`; best a batching server."""
    proposer: Mapping[str, Any] | None = None
    """Who writes the rules; null for the judge. It is asked once per pair, so it may be a larger model."""
    num_pairs: int = 256
    """Pairs that are fitted to, chosen by margin and by how unlike their prompts are."""
    rounds: int = 3
    """Rounds of proposing and fitting; the first explains all pairs, the others the hardest."""
    num_hard: int = 64
    """Pairs of the smallest margin that a later round explains."""
    rules_per_pair: int = 5
    """Rules asked for on each pair."""
    rules_per_round: int = 60
    """New rules taken up per round, those proposed most often first."""
    similarity: float = 0.8
    """Overlap of words, in (0, 1], from which on two rules are the same."""
    penalty: float = 0.01
    """Penalty of the l1 norm of the weights; more of it keeps fewer rules."""
    top: int = 20
    """Rules kept at most."""
    negative: Negative = "reject"
    """What becomes of rules whose yes speaks against an image: `reject` leaves them out and fits again, `flip` keeps
    them with the good answer no."""
    held_out: float = 0.2
    """Fraction of the pairs on which the finished rubric is measured, and which it never sees."""
    temperature: float = 0.0
    """Temperature of the proposals; 0 is greedy."""
    seed: int = 0
    """Which pairs are held out."""
    template: str | None = None
    """A folder with rubric_propose.txt or rubric_rule.txt to replace; the latter must then be the reward's option
    template as well."""

    def __post_init__(self) -> None:
        at_least(1, self, "rounds num_hard rules_per_pair rules_per_round top")
        at_least(2, self, "num_pairs")
        if not 0 < self.similarity <= 1:
            raise ValueError(f"`similarity` must be above 0 and at most 1, got {self.similarity}.")
        if not (math.isfinite(self.penalty) and self.penalty > 0):
            raise ValueError(f"`penalty` must be a positive number, got {self.penalty}.")
        share("held_out", self.held_out, open_end=True)
        check_answer_options(None, self.temperature)
        self.templates()
        check_chat(self.judge)
        if self.proposer is not None:
            check_chat(self.proposer, owner="proposer")

    def templates(self) -> dict[str, Template]:
        """The templates of proposals and of rules, by name."""
        return load_templates({"rubric_propose": 2, "rubric_rule": 1}, self.template)


def train_rubric(
    pairs: str | Path, out: str | Path, options: RubricTraining, *, device: torch.device | str = "cpu"
) -> TrainedRubric:
    """Learns a rubric and writes it to `out`, for the reward `rubric`. Raises ValueError: for bad pairs, before the
    judge is asked; if the judge proposes or answers nothing that can be used; if the penalty leaves no rule."""
    rubric_fit.require_scikit_learn()
    fitted, unseen = _split(read_pairs(Path(pairs).expanduser()), options.num_pairs, options.held_out, options.seed)
    out = Path(out).expanduser()
    out.parent.mkdir(parents=True, exist_ok=True)

    chat = build_chat(options.judge, device=torch.device(device))
    author = chat
    if options.proposer is not None:
        author = build_chat(options.proposer, device=torch.device(device), owner="proposer")
    templates = options.templates()
    words = templates["rubric_rule"]
    cache = AnswerCache(out.with_name(f"{out.name}.cache.jsonl"), judge=chat.version, words=words)
    errors: Counter[str] = Counter()
    candidates: list[str] = []
    explained: Sequence[Pair] = fitted
    delta, weights = np.zeros((0, 0)), np.zeros(0)
    for _ in range(options.rounds):
        proposed, failed = propose_rules(
            author,
            explained,
            templates["rubric_propose"],
            count=options.rules_per_pair,
            temperature=options.temperature,
        )
        errors += failed
        fresh = rubric_fit.distinct_rules(
            proposed, candidates, similarity=options.similarity, limit=options.rules_per_round
        )
        if not fresh:
            break
        candidates += fresh
        scores, failed = score_rules(chat, fitted, candidates, words, cache)
        errors += failed
        places, rules = rubric_fit.complete_part(scores)
        if len(places) < 2 or not len(rules):
            raise ValueError(
                f"{OWNER}: the judge answered too little: {len(places)} pairs and {len(rules)} rules are without "
                f"failures ({_reasons(errors)})."
            )
        # Only of pairs without failed answers; a rule that failed too often has weight 0, and differences of 0.
        delta = np.zeros((len(places), scores.shape[2]))
        delta[:, rules] = scores[places][:, 0, rules] - scores[places][:, 1, rules]
        weights = rubric_fit.select_rules(delta, options.penalty, top=options.top, negative=options.negative)
        if not weights.any():
            raise ValueError(
                f"{OWNER}: no rule got a weight with penalty {options.penalty}: all are 0 from "
                f"{rubric_fit.largest_penalty(delta):.4g} on; choose a smaller penalty, negative: flip, or a judge "
                f"that tells the pairs apart."
            )
        explained = [fitted[places[i]] for i in rubric_fit.hard_pairs(delta, weights, options.num_hard)]
    if not candidates:
        raise ValueError(f"{OWNER}: the judge proposed no rule for {len(fitted)} pairs ({_reasons(errors)}).")

    order = [int(j) for j in np.argsort(-np.abs(weights), kind="stable") if weights[j] != 0]
    kept = [candidates[j] for j in order]
    measured, failed = score_rules(chat, unseen, kept, words, cache)
    errors += failed
    unseen_delta = measured[:, 0] - measured[:, 1]
    unseen_delta = unseen_delta[np.isfinite(unseen_delta).all(axis=1)]  # the pairs with all answers
    held_out_accuracy = rubric_fit.accuracy(unseen_delta, weights[order]) if len(unseen_delta) else math.nan
    result = TrainedRubric(
        path=out,
        rules=tuple(
            Rule(text=candidates[j], weight=abs(float(weights[j])), answer="yes" if weights[j] > 0 else "no")
            for j in order
        ),
        accuracy=rubric_fit.accuracy(delta, weights),
        held_out_accuracy=held_out_accuracy,
        num_pairs=len(delta),
        num_candidates=len(candidates),
        errors=dict(errors),
    )
    info = {
        "judge": chat.version,
        "proposer": author.version,
        "template": words.digest,
        "penalty": options.penalty,
        "negative": options.negative,
        "seed": options.seed,
        "num_pairs": result.num_pairs,
        "num_candidates": result.num_candidates,
        "accuracy": result.accuracy,
        "errors": result.errors,
        "held_out_accuracy": None if math.isnan(held_out_accuracy) else held_out_accuracy,
    }
    save_rubric(out, result.rules, info)
    return result


def _split(pairs: Sequence[Pair], num_pairs: int, held_out: float, seed: int) -> tuple[list[Pair], list[Pair]]:
    """Pairs to fit to, and pairs to measure on; whole prompts are held out, or the same question would be in both. As
    many are held out as the fraction asks of the pairs that are fitted to, since each costs as much."""
    by_prompt: dict[str, list[Pair]] = {}
    for pair in pairs:
        by_prompt.setdefault(pair.prompt, []).append(pair)
    prompts = sorted(by_prompt)
    wanted = round(held_out * min(len(pairs), num_pairs))
    held: set[str] = set()
    unseen: list[Pair] = []
    for place in counter_choice(len(prompts), len(prompts), "held out", seed):
        more = by_prompt[prompts[place]]
        if len(unseen) + len(more) <= wanted:
            held.add(prompts[place])
            unseen += more
    rest = [pair for pair in pairs if pair.prompt not in held]
    if len(rest) < 2:
        raise ValueError(
            f"{OWNER}: held_out {held_out} leaves {len(rest)} of {len(pairs)} pairs to fit to, and it takes two at "
            f"least, a few hundred to be good: lower it, or give more pairs."
        )
    chosen = rubric_fit.seed_pairs([pair.prompt for pair in rest], [pair.margin for pair in rest], num_pairs)
    return [rest[i] for i in chosen], unseen


def _reasons(errors: Mapping[str, int]) -> str:
    return ", ".join(f"{word}: {count}" for word, count in errors.items()) or "no errors"
