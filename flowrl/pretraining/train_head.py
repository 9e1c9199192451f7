"""Trains a preference head on pairs of images: `flowrl reward train PAIRS.jsonl [key=value ...]`.

Bradley and Terry (1952): the winner wins with probability sigmoid(s_w - s_l), so the loss is the mean of -log
sigmoid(s_w - s_l). The network below the head is frozen: features are computed once, in minutes.

1. Prompts are split into three parts: to learn from, to stop at and calibrate on, to measure on. Where there are too
   few prompts, the units are pairs joined by shared images; no image is in two parts either way.
2. The head with the lowest loss on the second part is kept; a temperature is fitted there.
3. Accuracy (with an interval over units), loss and calibration are those of the third part, which decided nothing.

All chance is drawn from counters of the seed: the same pairs and settings give the same head.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from scipy.optimize import brentq
from scipy.special import expit
from torch import Tensor
from torch.nn import functional as F

from flowrl.config.building import build_settings
from flowrl.generation.drawing import find_device
from flowrl.pretraining.head_data import PairSplit, pair_features, split_pairs
from flowrl.prompts.pairs import read_pairs
from flowrl.rewards.networks.preference_features import build_features, check_backbone
from flowrl.rewards.preference_head import (
    CONFIG,
    REPORT,
    WEIGHTS,
    Head,
    features_of,
    first_weights,
    head_scores,
    head_tensors,
)
from flowrl.runtime.files import is_taken
from flowrl.runtime.progress import progress
from flowrl.runtime.randomness import counter_seed
from flowrl.runtime.shapes import Float
from flowrl.statistics.bootstrap import Interval
from flowrl.statistics.means import mean_interval

FINEST, COARSEST = 1e-3, 1e3  # range of the temperature


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadConfig:
    """Settings of a preference head's training."""

    out: str = "runs/preference-head"
    """Folder of the head; it must be new."""
    backbone: Literal["clip", "dinov2", "attributes"] = "clip"
    """Whose features: see `flowrl.rewards.networks.preference_features`."""
    model: str | None = None
    """The backbone's folder or hub id; null for the usual one."""
    revision: str | None = None
    """Branch, tag or commit on the hub."""
    preprocess: Literal["processor", "bilinear", "bicubic"] = "processor"
    """Of clip: `bilinear` and `bicubic` let the reward's gradient through."""
    image_size: int = 224
    """Of dinov2."""
    head: Literal["linear", "mlp"] = "linear"
    """One layer, or one more with GELU below it."""
    hidden: int = 128
    """Width of the mlp."""
    lr: float = 0.05
    """Learning rate of AdamW, divided by the square root of a layer's inputs: so many weights move a score at once."""
    weight_decay: float = 0.1
    """Decoupled, of AdamW; features are many and pairs often few."""
    batch_size: int = 256
    """Pairs per update."""
    epochs: int = 200
    """Passes over the pairs, at most."""
    patience: int = 20
    """Passes without a lower held-out loss after which training ends."""
    held_out: float = 0.3
    """Share of the units that is not learned from; half of it stops and calibrates, half measures."""
    seed: int = 0
    """Of the split, the start and the order of pairs."""
    feature_batch_size: int = 32
    """Images at once through the backbone."""
    device: str | None = None
    """Where the backbone runs; null for cuda if there is one, else cpu."""

    def __post_init__(self) -> None:
        for name in ("hidden", "batch_size", "epochs", "patience", "feature_batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}.")
        if not 0 < self.held_out < 1:
            raise ValueError(f"held_out is a share between 0 and 1, got {self.held_out}.")
        if self.lr <= 0 or self.weight_decay < 0:
            raise ValueError(f"lr must be positive and weight_decay 0 or more, got {self.lr} and {self.weight_decay}.")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Fitted:
    """A trained head and what became of training."""

    head: Head
    temperature: float
    center: float
    epochs: int
    best_epoch: int


def head_config(overrides: Sequence[str]) -> HeadConfig:
    """Settings from `key=value` texts; unknown keys and wrong types are refused as in a training run."""
    return build_settings(HeadConfig, overrides, command="reward train")


def train_head(pairs: Path, config: HeadConfig) -> dict[str, Any]:
    """Trains a head and writes its folder; returns what report.json holds. Raises ValueError: bad pairs, too few of
    them, no backbone, or `out` is taken; before anything is trained."""
    from safetensors.torch import save

    out, start = Path(config.out), time.monotonic()
    if is_taken(out):
        raise ValueError(f"out={out} is there already and will not be overwritten: give another out=FOLDER.")
    check_backbone(config.backbone, config.model, config.image_size)
    rows = read_pairs(pairs)
    split = split_pairs(rows, config.held_out, seed=config.seed)
    device = find_device(config.device, "device=")
    features = build_features(
        config.backbone, model=config.model, revision=config.revision, preprocess=config.preprocess,
        image_size=config.image_size, device=device, owner="reward train",
    )  # fmt: skip
    winner, loser = pair_features(rows, features, batch_size=config.feature_batch_size)
    fitted = fit(winner, loser, split, config)
    report = {
        "pairs": len(rows), "units": int(split.unit.max()) + 1, "split_by": split.by,
        "learned_from": len(split.learn), "stopped_at": len(split.stop), "measured_on": len(split.measure),
        "temperature": fitted.temperature, "epochs": fitted.epochs, "best_epoch": fitted.best_epoch,
        "training": measure(fitted, winner, loser, split.learn, split.unit),
        "measured": measure(fitted, winner, loser, split.measure, split.unit),
        "seconds": round(time.monotonic() - start, 1), "settings": {**asdict(config), "pairs": str(pairs)},
    }  # fmt: skip
    local = config.model is not None and Path(config.model).expanduser().is_dir()
    described = asdict(config) | ({"model": str(Path(str(config.model)).expanduser().resolve())} if local else {})
    head = {"head": config.head, "temperature": fitted.temperature, "center": fitted.center}
    # The folder is there as a whole or not at all.
    temporary = out.with_name(f".{out.name}.writing")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    (temporary / WEIGHTS).write_bytes(save(head_tensors(fitted.head)))
    for name, content in ((CONFIG, {**features_of(described, features), **head}), (REPORT, report)):
        (temporary / name).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    os.replace(temporary, out)  # onto an empty folder too
    return report


def bradley_terry_loss(winner: Float[Tensor, " n"], loser: Float[Tensor, " n"]) -> Float[Tensor, ""]:
    """Mean of -log sigmoid(s_w - s_l)."""
    return F.softplus(loser - winner).mean()


def fit(winner: Tensor, loser: Tensor, split: PairSplit, config: HeadConfig) -> Fitted:
    """Trains on the pairs of `split.learn`, keeps the head that is best on `split.stop`, and calibrates it there.
    `winner` and `loser` are features [n, d]."""
    known = torch.cat([winner[split.learn], loser[split.learn]])
    deviation = known.std(dim=0, unbiased=False)
    scale = torch.where(deviation > 1e-6 * (1 + known.abs().mean(dim=0)), deviation, torch.ones_like(deviation))
    plain = Head(mean=known.mean(dim=0), std=scale, weights={})
    (win, lose), (held_win, held_lose) = (
        (plain.standardise(winner[part]), plain.standardise(loser[part])) for part in (split.learn, split.stop)
    )
    weights = first_weights(config.head, winner.shape[1], config.hidden, seed=config.seed)
    for weight in weights.values():
        weight.requires_grad_(True)
    inputs = {"out": weights["out"].shape[1]}  # the others look at the features
    optimizer = torch.optim.AdamW(
        [
            {"params": [weight], "lr": config.lr / math.sqrt(inputs.get(name, winner.shape[1]))}
            for name, weight in weights.items()
        ],
        weight_decay=config.weight_decay,
    )
    best, best_epoch, best_loss, epoch = weights, 0, math.inf, 0
    with progress("preference head", config.epochs) as advance:
        for epoch in range(1, config.epochs + 1):
            generator = torch.Generator().manual_seed(counter_seed(config.seed, "preference order", epoch))
            order = torch.randperm(len(win), generator=generator)
            for chosen in order.split(config.batch_size):
                loss = bradley_terry_loss(head_scores(weights, win[chosen]), head_scores(weights, lose[chosen]))
                optimizer.zero_grad(set_to_none=True)
                loss.backward()
                optimizer.step()
            with torch.no_grad():
                held = float(bradley_terry_loss(head_scores(weights, held_win), head_scores(weights, held_lose)))
            if held < best_loss:
                best = {name: weight.detach().clone() for name, weight in weights.items()}
                best_epoch, best_loss = epoch, held
            advance(f"held-out loss {held:.4f}")
            if epoch - best_epoch >= config.patience:
                break
    head = Head(mean=plain.mean, std=plain.std, weights={name: weight.detach() for name, weight in best.items()})
    with torch.no_grad():
        temperature = fit_temperature((head(winner[split.stop]) - head(loser[split.stop])).double().numpy())
        center = float(head(known).double().mean())
    return Fitted(head=head, temperature=temperature, center=center, epochs=epoch, best_epoch=best_epoch)


def fit_temperature(margin: Float[np.ndarray, " n"]) -> float:
    """The T in [1e-3, 1e3] that minimises the mean of -t log sigmoid(m / T) - (1 - t) log sigmoid(-m / T).

    m are the margins s_w - s_l of n held-out pairs, and t = (n + 1) / (n + 2) as in Platt scaling: with t = 1, pairs
    that are all ordered rightly would have T = 0 and boundless rewards. The loss is convex in 1/T, and T is where its
    derivative is 0. A head that is worse than chance gets the largest T.
    """
    target = (len(margin) + 1) / (len(margin) + 2)

    def slope(inverse: float) -> float:
        return float((margin * (expit(inverse * margin) - target)).mean())

    if slope(1 / COARSEST) >= 0:
        return COARSEST
    if slope(1 / FINEST) <= 0:
        return FINEST
    return 1 / float(brentq(slope, 1 / COARSEST, 1 / FINEST, xtol=1e-15))


def calibration_error(probability: Float[np.ndarray, " n"], bins: int = 10) -> float:
    """Expected calibration error of pairs whose first wins always: probabilities [n] that the model gave the winner. A
    pair is told as its more probable side p >= 1/2, which is right where the winner had it. Mean over equal bins of p
    in [1/2, 1], weighted by their pairs, of |share right - mean p|."""
    confidence, right = np.maximum(probability, 1 - probability), (probability > 0.5) + 0.5 * (probability == 0.5)
    place = np.minimum(((confidence - 0.5) * 2 * bins).astype(np.int64), bins - 1)
    gap = np.bincount(place, weights=right - confidence, minlength=bins)
    return float(np.abs(gap).sum() / len(probability))


@torch.no_grad()
def measure(fitted: Fitted, winner: Tensor, loser: Tensor, places: np.ndarray, unit: np.ndarray) -> dict[str, Any]:
    """Accuracy with its interval over units (a tie is half), loss and calibration error of some pairs."""
    margin = (fitted.head(winner[places]) - fitted.head(loser[places])).double().numpy() / fitted.temperature
    accuracy: Interval = mean_interval((margin > 0) + 0.5 * (margin == 0), unit[places])
    return {
        "accuracy": accuracy.mean,
        "accuracy_low": accuracy.low if accuracy.known else None,
        "accuracy_high": accuracy.high if accuracy.known else None,
        "loss": float(np.logaddexp(0.0, -margin).mean()),
        "loss_uncalibrated": float(np.logaddexp(0.0, -margin * fitted.temperature).mean()),
        "calibration_error": calibration_error(expit(margin)),
    }


def summary(report: Mapping[str, Any]) -> str:
    """What came out, for a terminal of 80 columns."""
    learned, held = report["training"], report["measured"]
    known = held["accuracy_low"] is not None
    interval = f" (95 %: {held['accuracy_low']:.3f} to {held['accuracy_high']:.3f})" if known else ""
    return "\n".join(
        [
            f"{report['pairs']} pairs in {report['units']} sets by {report['split_by']}: learned from "
            f"{report['learned_from']}, measured on {report['measured_on']}",
            f"held-out accuracy    {held['accuracy']:.3f}{interval}",
            f"training accuracy    {learned['accuracy']:.3f}",
            f"held-out loss        {held['loss']:.4f} ({held['loss_uncalibrated']:.4f} uncalibrated; chance is 0.6931)",
            f"calibration error    {held['calibration_error']:.3f}, temperature {report['temperature']:.3g}",
            f"best epoch           {report['best_epoch']} of {report['epochs']}, {report['seconds']:g} s",
        ]
    )
