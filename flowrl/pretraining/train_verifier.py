"""Trains an image-and-text model to judge edits or sets of images: `flowrl pretrain verifier [key=value ...]`.

`task=edits` (Edit-R1, arXiv 2604.27505): a supervised start on reasoned checks of principles, then GCPO: several traces
of both images of a preference are sampled, each is rewarded by how many of the other image's it is ordered rightly
against, and the verifier learns from that by a clipped policy gradient. `task=consistency` (PaCo-Reward, arXiv
2512.04784): yes or no, then the reasons, by a likelihood that weighs the first token.

Without `model` a Qwen2-VL of 0.3 million weights learns from what the embedded world draws. What came out is a
folder of transformers, which is named as `judge: {model: FOLDER}`; the embedded one asks in short words, which lie in
the folder too: `template: FOLDER`. `report.json` has the agreement with preferences held out, before training and
after each stage. The same call goes on where it stopped.
"""

from __future__ import annotations

import copy
import json
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

from flowrl.generation.drawing import find_device
from flowrl.objectives.verifier import contrast_advantages, gcpo_loss, weighted_likelihood
from flowrl.pretraining.head_data import split_pairs
from flowrl.pretraining.making import prepare
from flowrl.pretraining.network_training import batch_of, train_network
from flowrl.pretraining.tiny_vlm import TABLES, build_tiny_vlm
from flowrl.pretraining.verifier_data import (
    TEMPLATES,
    Preference,
    Side,
    Task,
    drawn_edit,
    drawn_set,
    pair_of_file,
)
from flowrl.prompts.pairs import read_pairs
from flowrl.rewards.judges.answers import parse_score
from flowrl.rewards.judges.asking import probability_of_yes
from flowrl.rewards.judges.chat import Question
from flowrl.rewards.judges.edit_judge import SCORE
from flowrl.rewards.judges.local_chat import LocalChat, LocalJudge, load_vision_language
from flowrl.rewards.judges.templates import Template, load_templates
from flowrl.rewards.networks.pretrained import check_model
from flowrl.runtime.files import read_json, write_atomically
from flowrl.runtime.progress import progress
from flowrl.runtime.randomness import counter_seed
from flowrl.statistics.means import mean_interval


@dataclass(frozen=True, kw_only=True, slots=True)
class VerifierConfig:
    """Settings of a verifier's training."""

    out: str = "runs/verifier"
    """Folder of checkpoints and of the finished verifier."""
    task: Task = "edits"
    """`edits` (Edit-R1) or `consistency` (PaCo-Reward)."""
    model: str | None = None
    """A folder or hub id of an image-and-text model of transformers; null for a small, untrained Qwen2-VL."""
    pairs: str | None = None
    """A file of pairs (`flowrl.prompts.pairs`) with `source`, and, where supervision is wanted, `winner_answers` and
    `loser_answers`; edits may have `principles`. Null draws pairs of the embedded world."""
    template: str | None = None
    """As the option of the reward `edit_principles` or `grid_consistency`; null is our words, short without `model`."""
    seed: int = 0
    """Of first weights, pairs, batches and traces."""
    threads: int = 1
    """CPU threads."""
    num_pairs: int = 4096
    """Pairs drawn to learn from."""
    held_out: int = 192
    """Pairs drawn to measure on; of a file a fifth is held out."""
    sft_steps: int = 600
    """Updates of the supervised start; 0 leaves it out."""
    lr: float = 3e-3
    """Its peak learning rate; PaCo-Reward has 2e-4 for a LoRA."""
    batch_size: int = 32
    """Answers per update."""
    first_weight: float | None = None
    """Weight of an answer's first token; null is 0.1 for consistency, as published, and the plain mean for edits."""
    gcpo_steps: int | None = None
    """Updates of GCPO; null is 60 for edits and 0 for consistency, whose verdict is not sampled."""
    gcpo_lr: float = 2e-4
    """Its peak learning rate."""
    gcpo_pairs: int = 8
    """Pairs per update."""
    traces: int = 4
    """N, sampled answers for either image."""
    updates: int = 1
    """Updates from the same traces; it must divide `checkpoint_every`."""
    clip_range: float = 0.2
    """The ratio of a token is held within 1 -+ this."""
    kl_coef: float = 0.0
    """Weight of the KL to the supervised start, of which a copy is kept if it is above 0."""
    temperature: float = 1.0
    """Of the traces."""
    max_tokens: int = 48
    """Length of an answer at most; a reasoned one of a large model has some 512."""
    lora_rank: int = 0
    """Rank of a LoRA on all linear layers, merged at the end; 0 trains all weights. PaCo-Reward has 32."""
    checkpoint_every: int = 100
    """Updates between checkpoints."""
    device: str | None = None
    """Where it trains; null for cuda if there is one, else cpu."""

    def __post_init__(self) -> None:
        if self.task == "consistency" and self.gcpo_steps:
            raise ValueError("gcpo_steps is for task edits: the verdict of consistency is read off its first token.")
        if self.model is not None:
            check_model(self.model, what="vision-language", owner="pretrain verifier")
        if self.traces < 2 or self.updates < 1 or self.checkpoint_every % self.updates:
            raise ValueError(
                f"traces must be at least 2, to be compared, and updates ({self.updates}) must divide checkpoint_every "
                f"({self.checkpoint_every}), so that none is cut in two; got traces {self.traces}."
            )

    @property
    def stages(self) -> dict[str, int]:
        """Updates of each."""
        gcpo = self.gcpo_steps if self.gcpo_steps is not None else 60 * (self.task == "edits")
        return {"sft": self.sft_steps, "gcpo": gcpo}


class LearningJudge:
    """The judge that learns, what it learns from, and what it is measured on with the unit of each pair."""

    def __init__(self, config: VerifierConfig) -> None:
        """Reads or draws the pairs, and loads the model. Raises ValueError: as `main`."""
        self.config, self.note = config, ""  # of the newest update
        name, template = TEMPLATES[config.task], config.template or ("own" if config.model else config.out)
        if not (config.template or config.model):
            write_atomically(Path(config.out) / f"{name}.txt", TABLES["short"][config.task] + "\n")
        words = load_templates({name: 2}, template)[name]
        self.learn, self.held, self.unit = pairs_of(config, words)
        self.judge = untrained_judge(config)

    def scores(self, sides: Sequence[Side]) -> list[float]:
        """Each image's score in [0, 1] by greedy answers, the mean over its questions; NaN where one has none."""
        asked = [
            replace(q, max_tokens=1 if q.top_logprobs else self.config.max_tokens) for s in sides for q in s.questions
        ]
        found = [
            probability_of_yes(a) if a.logprobs else parsed("" if a.error else a.text) for a in self.judge.ask(asked)
        ]
        return joined(sides, [math.nan if score is None else score for score in found])

    def agreement(self, label: str) -> dict[str, float]:
        """Share of the pairs held out that are ordered as they were preferred, a tie half, with its interval."""
        with progress(f"agreement {label}", 1) as advance:
            sides = zip(*((pair.winner, pair.loser) for pair in self.held), strict=True)
            scores = zip(*map(self.scores, sides), strict=True)
            right = [(good > bad) + 0.5 * (not (good > bad or good < bad)) for good, bad in scores]
            found = mean_interval(right, self.unit)
            advance(f"{found.mean:.3f} ({found.low:.3f} to {found.high:.3f})")
        bounds = {"low": found.low, "high": found.high} if found.known else {}
        return {"agreement": found.mean, **bounds, "pairs": len(right)}

    def sft(self) -> Callable[[int], Tensor]:
        """The loss of an update of the supervised start by its number."""
        config, judge = self.config, self.judge
        sides = [side for pair in self.learn for side in (pair.winner, pair.loser)]
        shown = [row for side in sides for row in zip(side.questions, side.answers, strict=True)]
        first = config.first_weight if config.first_weight is not None or config.task == "edits" else 0.1
        end = judge.processor.tokenizer.eos_token

        def loss_of(step: int) -> Tensor:
            chosen = [shown[i] for i in batch_of(len(shown), config.batch_size, config.seed, step)]
            rows = [judge.processor.tokenizer(text + end)["input_ids"] for _, text in chosen]
            log_prob, mask = judge.log_probs([question for question, _ in chosen], rows)
            self.note = f"likelihood of a first token {float(log_prob[:, 0].detach().exp().mean()):.3f}"
            return weighted_likelihood(log_prob, mask, first).mean()

        return loss_of

    def gcpo(self) -> Callable[[int], Tensor]:
        """The loss of an update of GCPO by its number; every `updates` of them new traces are sampled."""
        config, judge, kept = self.config, self.judge, dict[str, Any]()
        start = replace(judge, network=copy.deepcopy(judge.network)) if config.kl_coef else None

        def loss_of(step: int) -> Tensor:
            if step % config.updates == 0:
                kept["traces"], kept["advantage"] = self.sample(step)
            log_prob, mask = judge.log_probs(*kept["traces"])
            if step % config.updates == 0:
                kept["old_log_prob"] = log_prob.detach()
            with torch.no_grad():
                reference = None if start is None else start.log_probs(*kept["traces"])[0]
            how: dict[str, Any] = {"clip_range": config.clip_range, "reference": reference, "kl_coef": config.kl_coef}
            return gcpo_loss(log_prob, kept["old_log_prob"], mask, kept["advantage"], **how).mean()

        return loss_of

    def sample(self, step: int) -> tuple[tuple[list[Question], list[list[int]]], Tensor]:
        """Traces of both images of some pairs, as questions and tokens, and their advantages."""
        config, judge = self.config, self.judge
        pairs = [self.learn[i] for i in batch_of(len(self.learn), config.gcpo_pairs, config.seed + 1, step)]
        sides = [side for pair in pairs for side in (pair.winner, pair.loser) for _ in range(config.traces)]
        owner = [trace for trace, side in enumerate(sides) for _ in side.questions]
        asked = [
            replace(
                question,
                max_tokens=config.max_tokens,
                temperature=config.temperature,
                seed=counter_seed(config.seed, "trace", step, trace, number) % 2**31,
            )
            for trace, side in enumerate(sides)
            for number, question in enumerate(side.questions)
        ]
        ends, rows, _, _ = judge.sample(asked)
        whole = [row if row[-1] in ends else [] for row in rows]  # half an answer says no score
        texts = judge.processor.tokenizer.batch_decode(whole, skip_special_tokens=True)
        found = [math.nan if score is None else score for score in map(parsed, texts)]
        scores = torch.tensor(joined(sides, found)).view(len(pairs), 2, config.traces)
        advantage = contrast_advantages(scores[:, 0], scores[:, 1]).flatten()
        right = (scores[:, 0, :, None] > scores[:, 1, None, :]).float().mean()
        self.note = f"traces ordered rightly {float(right):.3f}"
        return (asked, rows), advantage[owner].to(judge.device)


def parsed(text: str) -> float | None:
    """The score that an answer ends with, over 10."""
    score = parse_score(text, pattern=SCORE, low=0, high=10)
    return None if score is None else score / 10


def joined(sides: Sequence[Side], scores: Sequence[float]) -> list[float]:
    """The mean of each image's scores, which stand one after the other."""
    rest = iter(scores)
    return [fmean([next(rest) for _ in side.questions]) for side in sides]


def main(config: VerifierConfig) -> Path:
    """Trains a verifier; returns its folder, which holds `report.json`. Raises ValueError: bad pairs or too few, no
    model, supervision without answers, or `out` was begun with other settings."""
    out = prepare(config.out)
    report = read_report(out, config)
    trained = LearningJudge(config)
    judge, measured = trained.judge, report["measured"]
    learner = nn.ParameterList([weight for weight in judge.network.parameters() if weight.requires_grad])
    for stage, steps in {"before": 0, **config.stages}.items():
        if steps:
            train_network(
                stage,
                learner,
                trained.sft() if stage == "sft" else trained.gcpo(),
                out / f"{stage}.pt",
                steps=steps,
                lr=config.lr if stage == "sft" else config.gcpo_lr,
                checkpoint_every=config.checkpoint_every,
                ema_decay=0.0,
                note=lambda: trained.note,
            )
        if (steps or stage == "before") and stage not in measured:
            measured[stage] = trained.agreement(f"after {stage}" if steps else "before training")
            write_atomically(out / "report.json", json.dumps(report, indent=1) + "\n")
    network = judge.network.merge_and_unload() if config.lora_rank else judge.network
    network.save_pretrained(out)
    judge.processor.save_pretrained(out)
    return out


def pairs_of(config: VerifierConfig, words: Template) -> tuple[list[Preference], list[Preference], list[int]]:
    """Pairs to learn from and held-out ones, with their units: a file's prompts, or sets of pairs that share images."""
    if config.pairs is None:
        draw = partial(drawn_edit if config.task == "edits" else drawn_set, words, config.seed)
        held = [draw("held out", number) for number in range(config.held_out)]
        return [draw("learn", number) for number in range(config.num_pairs)], held, list(range(len(held)))
    rows = read_pairs(Path(config.pairs))
    split = split_pairs(rows, 0.2, seed=config.seed)
    pairs = [pair_of_file(config.task, words, row) for row in rows]
    places = [*split.stop, *split.measure]
    learn, held = ([pairs[i] for i in part] for part in (split.learn, places))
    if config.stages["sft"] and not all(pair.winner.answers and pair.loser.answers for pair in learn):
        raise ValueError(
            f"{config.pairs}: the supervised start needs winner_answers and loser_answers of every pair: add them, or "
            f"set sft_steps=0."
        )
    return learn, held, split.unit[places].tolist()


def untrained_judge(config: VerifierConfig) -> LocalJudge:
    """The model that learns, with a LoRA if one is asked for, as a judge."""
    device = find_device(config.device, "device=")
    if config.model is None:
        network, processor = build_tiny_vlm(config.seed)
        network.to(device).eval()
    else:
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        network, processor = load_vision_language(
            config.model, revision=None, dtype=dtype, device=device, owner="pretrain verifier"
        )
        network.requires_grad_(not config.lora_rank)
    if config.lora_rank:
        from peft import LoraConfig, get_peft_model

        with warnings.catch_warnings(action="ignore", category=FutureWarning):  # of names that peft still reads
            network = get_peft_model(network, LoraConfig(r=config.lora_rank, target_modules="all-linear"))
    known = config.model or str(Path(config.out).resolve())
    options = LocalChat(model=known, batch_size=64 if config.model is None else 8)
    processor.tokenizer.padding_side = "left"
    return LocalJudge(options=options, network=network, processor=processor, device=device)


def read_report(out: Path, config: VerifierConfig) -> dict[str, Any]:
    """What report.json has, or a new one's settings; those of an earlier session must be the same."""
    settings = {name: value for name, value in asdict(config).items() if name not in ("out", "threads", "device")}
    if not (out / "report.json").is_file():
        return {"settings": settings, "measured": {}}
    report: dict[str, Any] = read_json(out / "report.json")
    if changed := [name for name, value in settings.items() if report["settings"].get(name) != value]:
        raise ValueError(
            f"out={out} was begun with other settings ({', '.join(changed)}): give those, or another out=FOLDER."
        )
    return report
