"""Rewards: what a picture is worth, higher is better.

A reward is a function object `reward(inputs: RewardInputs) -> RewardOutput` with the attributes of `Reward`. `REWARDS`
names the built-in ones, `build_reward` makes one, `flowrl.rewards.compose` reads a run's list of rewards and sums them,
and a user's own file is loaded by `flowrl.rewards.user_file`.

Shapes: B images of one batch, [H, W] their size.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from jaxtyping import Bool, Float, Int64, UInt8
from torch import Tensor

from flowrl.rewards.options import check_options, unknown_name

KINDS = ("pointwise", "remote", "groupwise", "pairwise", "adversarial")
"""How a reward looks at a batch: item by item, item by item elsewhere, whole groups, pairs, or trained along."""

REWARDS: dict[str, str] = {
    "attributes": "flowrl.rewards.attributes:attributes",
    "clip_score": "flowrl.rewards.clip:clip_score",
    "geneval": "flowrl.rewards.geneval:geneval",
    "jpeg_compressibility": "flowrl.rewards.jpeg:jpeg_compressibility",
    "jpeg_incompressibility": "flowrl.rewards.jpeg:jpeg_incompressibility",
}
"""Name -> "module:factory"; a factory takes `device` and its options, keyword-only, and returns a `Reward`."""

CHECKS: dict[str, str] = {
    "attributes": "flowrl.rewards.attributes:check",
    "clip_score": "flowrl.rewards.clip:check",
    "geneval": "flowrl.rewards.geneval:check",
}
"""Name -> "module:function" that takes the options given and refuses bad values; it loads no weights."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardInputs:
    """What rewards are given: `prompts` [B], `images` float32 [B, 3, H, W] in [0, 1], `metadata` [B], ids int64 [B].

    `metadata` is the prompt's record, `{}` for plain prompts. Samples of one prompt share a group id; groups need not
    be contiguous.
    """

    prompts: list[str]
    images: Float[Tensor, " b 3 h w"]
    metadata: list[dict[str, Any]]
    group_ids: Int64[Tensor, " b"]
    sample_ids: Int64[Tensor, " b"]

    def __post_init__(self) -> None:
        if self.images.ndim != 4 or self.images.shape[1] != 3 or self.images.dtype != torch.float32:
            raise ValueError(
                f"images must be float32 [B, 3, H, W], got {self.images.dtype} {list(self.images.shape)}: convert them "
                f"where the pipeline decodes."
            )
        batch = len(self.images)
        lengths = {"prompts": len(self.prompts), "metadata": len(self.metadata)}
        lengths |= {"group_ids": len(self.group_ids), "sample_ids": len(self.sample_ids)}
        if wrong := {name: length for name, length in lengths.items() if length != batch}:
            raise ValueError(f"every field needs one entry for each of the {batch} images, got {wrong}.")
        for name, ids in (("group_ids", self.group_ids), ("sample_ids", self.sample_ids)):
            if ids.dtype != torch.int64 or ids.ndim != 1:
                # Ids kept as float32 collide above 2^24.
                raise ValueError(f"{name} must be int64 [B], got {ids.dtype} {list(ids.shape)}.")

    def __len__(self) -> int:
        return len(self.prompts)


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardOutput:
    """What a reward returns: `values` float32 [B], `valid` bool [B], and named sub-scores, float32 [B] each.

    A failed item has `valid` False and the value NaN; it enters no statistic. Sub-scores are for the log only.
    """

    values: Float[Tensor, " b"]
    valid: Bool[Tensor, " b"]
    parts: dict[str, Float[Tensor, " b"]] = field(default_factory=dict)


class Reward(Protocol):
    """What a reward looks like.

    `kind` is one of `KINDS`; `needs` names the fields of `RewardInputs` that it reads; `differentiable` says that
    images which carry gradient give values that do; `version` says in the run's manifest exactly what was computed.
    """

    @property
    def name(self) -> str: ...
    @property
    def kind(self) -> str: ...
    @property
    def needs(self) -> frozenset[str]: ...
    @property
    def differentiable(self) -> bool: ...
    @property
    def version(self) -> str: ...

    def __call__(self, inputs: RewardInputs) -> RewardOutput: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class FunctionReward:
    """A `Reward` made of a function and its description."""

    name: str
    score: Callable[[RewardInputs], RewardOutput]
    needs: frozenset[str]
    version: str
    kind: str = "pointwise"
    differentiable: bool = False

    def __call__(self, inputs: RewardInputs) -> RewardOutput:
        return self.score(inputs)


def output_of(
    values: list[float], inputs: RewardInputs, parts: Mapping[str, list[float]] | None = None
) -> RewardOutput:
    """The output of a scorer that works on plain numbers and never fails: all valid, on the device of the images."""
    device = inputs.images.device
    return RewardOutput(
        values=torch.tensor(values, dtype=torch.float32, device=device),
        valid=torch.ones(len(values), dtype=torch.bool, device=device),
        parts={k: torch.tensor(v, dtype=torch.float32, device=device) for k, v in (parts or {}).items()},
    )


def to_uint8(images: Float[Tensor, " b 3 h w"]) -> UInt8[np.ndarray, " b h w 3"]:
    """8-bit pictures `clip(round(255 x), 0, 255)`, channels last, on the host.

    Rounded, not cut off: truncation darkens by half a level and shifts JPEG sizes and text recognition.

    Raises:
        ValueError: if a pixel is NaN or infinite; the cast would turn it into an arbitrary colour.
    """
    images = images.detach()
    finite = torch.isfinite(images).flatten(1).all(dim=1)
    if not bool(finite.all()):
        broken = torch.nonzero(~finite).flatten().tolist()
        raise ValueError(
            f"{len(broken)} of {len(images)} images hold NaN or infinity (first: item {broken[0]}): the policy or the "
            f"decoder has diverged; lower the learning rate or decode in float32."
        )
    pixels = (images * 255.0).round().clamp(0, 255).to(torch.uint8)
    array: UInt8[np.ndarray, " b h w 3"] = pixels.permute(0, 2, 3, 1).contiguous().cpu().numpy()
    return array


def load_target(target: str) -> Any:
    """The object behind "module:name"; the module is imported now."""
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)


def check_reward(name: str, options: Mapping[str, Any]) -> None:
    """Checks a built-in reward's name, the names, types and values of its options. Loads no weights.

    Raises:
        ValueError: naming what was given, the nearest valid name and all that are allowed.
    """
    if name not in REWARDS:
        raise ValueError(unknown_name("reward", name, REWARDS) + " For your own use file: and function:.")
    check_options(load_target(REWARDS[name]), options, owner=f"reward {name!r}")
    if name in CHECKS:
        load_target(CHECKS[name])(**options)


def build_reward(name: str, *, device: torch.device | str = "cpu", options: Mapping[str, Any] | None = None) -> Reward:
    """Makes a built-in reward; loads its weights, if any, on `device`.

    Args:
        name: a key of `REWARDS`.
        device: where a reward with weights runs.
        options: the reward's own options; see its factory.

    Raises:
        ValueError: for an unknown name, an unknown option or a bad value, before anything is loaded.
    """
    options = dict(options or {})
    check_reward(name, options)
    reward: Reward = load_target(REWARDS[name])(device=torch.device(device), **options)
    return reward
