"""A head that learned people's choices: `flowrl reward train` makes it, from pairs of images.

The value is the calibrated log-odds of the head, `(s(f) - s_mean) / T`: if it learned from enough pairs, an image
wins over another with probability `sigmoid(r_1 - r_2)`. f are frozen features
(`flowrl.rewards.networks.preference_features`), standardised; s is linear, or one hidden layer with GELU. `s_mean`
centres the values of the training images at 0.

A folder holds config.json (what the features are, the head's shape, T), head.safetensors and report.json.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional as F

from flowrl.rewards.base import FunctionReward, Model, Reward, RewardInputs, RewardOutput
from flowrl.rewards.networks.clip_encoder import score_output
from flowrl.rewards.networks.preference_features import MODELS, Backbone, Features, build_features, check_backbone
from flowrl.rewards.networks.pretrained import fingerprint, model_of, read_weights
from flowrl.runtime.files import read_json
from flowrl.runtime.randomness import counter_normal
from flowrl.runtime.shapes import Float

HeadKind = Literal["linear", "mlp"]

CONFIG, WEIGHTS, REPORT = "config.json", "head.safetensors", "report.json"
OWNER = "reward 'preference_head'"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Head:
    """Parameters: `mean` and `std` [d] of the features, `weights` linear (`out` [1, d]) or mlp (`hidden` [h, d],
    `hidden_bias` [h], `out` [1, h]). A last bias would cancel in every pair."""

    mean: Float[Tensor, " d"]
    std: Float[Tensor, " d"]
    weights: Mapping[str, Tensor]

    def standardise(self, features: Float[Tensor, " b d"]) -> Float[Tensor, " b d"]:
        """Features with the training images' mean 0 and deviation 1."""
        return (features - self.mean) / self.std

    def __call__(self, features: Float[Tensor, " b d"]) -> Float[Tensor, " b"]:
        """Scores s of features as the backbone gives them."""
        return head_scores(self.weights, self.standardise(features))


def head_scores(weights: Mapping[str, Tensor], features: Float[Tensor, " b d"]) -> Float[Tensor, " b"]:
    """Scores of standardised features."""
    if "hidden" in weights:
        features = F.gelu(F.linear(features, weights["hidden"], weights["hidden_bias"]))
    return F.linear(features, weights["out"]).squeeze(-1)


def first_weights(kind: HeadKind, width: int, hidden: int, *, seed: int) -> dict[str, Tensor]:
    """A head before training: 0 for every image, so chance decides no pair."""
    if kind == "linear":
        return {"out": torch.zeros(1, width)}
    return {
        "hidden": counter_normal((hidden, width), seed, "preference head") / math.sqrt(width),
        "hidden_bias": torch.zeros(hidden),
        "out": torch.zeros(1, hidden),
    }


def read_config(folder: Path) -> dict[str, Any]:
    """The configuration of a head's folder."""
    if not folder.is_dir():
        raise ValueError(f"there is no folder {str(folder)!r}: give one that 'flowrl reward train' wrote.")
    for name in (CONFIG, WEIGHTS):
        if not (folder / name).is_file():
            raise ValueError(f"{folder} holds no {name}: give a folder that 'flowrl reward train' wrote.")
    try:
        config: Any = read_json(folder / CONFIG)
    except ValueError as error:
        raise ValueError(f"{folder / CONFIG} is not JSON ({error}): train the head again.") from error
    kinds = {
        "backbone": str,
        "model": str | None,
        "revision": str | None,
        "preprocess": str,
        "image_size": int,
        "features": str,
        "temperature": float,
        "center": float,
    }
    wrong = [key for key, kind in kinds.items() if not isinstance(config.get(key), kind)]
    if wrong or config["backbone"] not in get_args(Backbone) or not config["temperature"] > 0:
        raise ValueError(f"{folder / CONFIG} does not describe a head ({', '.join(wrong)}): train it again.")
    return dict(config)


@dataclass(frozen=True, kw_only=True, slots=True)
class PreferenceHead:
    """Calibrated log-odds of a preference head that you trained, in float32; differentiable if its features are."""

    model: str
    """The folder that `flowrl reward train` wrote."""
    backbone_model: str | None = None
    """Path of the backbone's weights, if they have moved since training; they must be the same."""
    differentiable: ClassVar[bool] = True

    def __post_init__(self) -> None:
        config = self.config()
        check_backbone(config["backbone"], self.backbone_model or config["model"], config["image_size"])

    @property
    def models(self) -> tuple[Model, ...]:
        config = self.config()
        if config["backbone"] == "attributes":
            return ()
        return (model_of(self.backbone_model or config["model"] or MODELS[config["backbone"]]),)

    def config(self) -> dict[str, Any]:
        """The head's description in its folder."""
        return read_config(Path(self.model).expanduser())

    def build(self, device: torch.device) -> Reward:
        """Loads head and backbone."""
        folder, config = Path(self.model).expanduser(), self.config()
        features = build_features(
            config["backbone"],
            model=self.backbone_model or config["model"],
            revision=config["revision"],
            preprocess=config["preprocess"],
            image_size=config["image_size"],
            device=device,
            owner=OWNER,
        )
        if features.version != config["features"]:
            raise ValueError(
                f"{OWNER}: the head of {folder} was trained on features {config['features']}, and these are "
                f"{features.version}: give backbone_model: the weights it was trained with, or train it again."
            )
        head = load_head(folder / WEIGHTS, features.width, device)
        center, temperature = float(config["center"]), float(config["temperature"])

        def score(inputs: RewardInputs) -> RewardOutput:
            asked = torch.is_grad_enabled() and features.differentiable and inputs.images.requires_grad
            with torch.set_grad_enabled(asked), torch.autocast(device.type, enabled=False):
                return score_output((head(features.of(inputs.images, inputs.prompts)) - center) / temperature, inputs)

        return FunctionReward(
            name="preference_head",
            score=score,
            needs=frozenset({"images", "prompts"} if features.reads_prompts else {"images"}),
            version=f"preference_head:{fingerprint(head.weights.values())}:T-{temperature:.4g}:{features.version}",
            differentiable=features.differentiable,
        )


def load_head(path: Path, width: int, device: torch.device) -> Head:
    """A head from its file of weights."""
    tensors = {name: tensor.float().to(device) for name, tensor in read_weights(path, owner=OWNER).items()}
    hidden = tensors["hidden"].shape[0] if tensors.get("hidden", torch.zeros(0)).ndim == 2 else 0
    shapes: dict[str, tuple[int, ...]] = {"mean": (width,), "std": (width,), "out": (1, hidden or width)}
    shapes |= {"hidden": (hidden, width), "hidden_bias": (hidden,)} if hidden else {}
    if {name: tuple(tensor.shape) for name, tensor in tensors.items()} != shapes:
        raise ValueError(f"{OWNER}: {path} holds no head for {width} features: train it again.")
    return Head(mean=tensors.pop("mean"), std=tensors.pop("std"), weights=tensors)


def head_tensors(head: Head) -> dict[str, Tensor]:
    """The tensors of a head in the form in which they are written."""
    tensors = {"mean": head.mean, "std": head.std, **head.weights}
    return {name: tensor.detach().float().cpu().contiguous() for name, tensor in tensors.items()}


def features_of(config: Mapping[str, Any], features: Features) -> dict[str, Any]:
    """The part of a head's configuration about its features."""
    kept = {key: config[key] for key in ("backbone", "model", "revision", "preprocess", "image_size")}
    return {**kept, "features": features.version}
