"""What all rewards share: their inputs and outputs, their options, and the table of the built-in ones.

Shapes: B images of one batch, [H, W] their size.
"""

from __future__ import annotations

import importlib
import math
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from flowrl.config.options import build_options, unknown_name
from flowrl.config.rewards import built_in_rewards
from flowrl.runtime.placement import sent
from flowrl.runtime.shapes import Bool, Float, Int64, UInt8

ABSENT = ("no_vote", "skipped")
"""Errors of items that nobody has judged: the items are invalid, but the reward did not fail."""

KINDS = ("pointwise", "remote", "groupwise", "pairwise", "adversarial")
"""How a reward looks at a batch: item by item, item by item elsewhere, whole groups, pairs, or jointly trained."""

JUDGED = ("groups", "videos", "edits", "sounds")
"""What a reward may need besides single images: all images of a prompt, frames, the edited image, a clip's sound."""

VERDICTS = "geneval"
"""The name that evaluations give to the verdicts of a reward that `gives_verdicts`."""

REWARDS = {name: row["place"] for name, row in built_in_rewards().items()}
"""Name -> "module:Class" of the reward's options, a frozen dataclass. Its fields are the options, its `__post_init__`
refuses bad values without loading anything, and its `build(device)` makes the `Reward`."""


@dataclass(frozen=True, kw_only=True, slots=True, weakref_slot=True)
class RewardInputs:
    """The inputs of a reward, B samples."""

    prompts: list[str]
    """[B] texts."""
    images: Float[Tensor, " b 3 h w"]
    """float32 [B, 3, H, W] in [0, 1]; of a video, its first frame."""
    metadata: list[dict[str, Any]]
    """[B] the prompt's record, `{}` for plain prompts."""
    group_ids: Int64[Tensor, " b"]
    """int64 [B]; samples of one prompt share an id, and groups need not be contiguous."""
    sample_ids: Int64[Tensor, " b"]
    """int64 [B]."""
    videos: Float[Tensor, " b f 3 h w"] | None = None
    """float32 [B, F, 3, H, W] in [0, 1], F frames, or None if the run makes images."""
    fps: float | None = None
    """Frames per second of the videos."""
    sounds: Float[Tensor, " b channels samples"] | None = None
    """float32 [B, channels, samples] in [-1, 1], or None if the videos are silent."""
    sound_rate: int | None = None
    """Samples per second of the sounds."""
    source_images: list[list[Tensor]] | None = None
    """[B] for editing: the images that the prompt's instruction is about, float32 [3, h, w] each."""
    reference_images: list[list[Tensor]] | None = None
    """[B] images that a sample should resemble, float32 [3, h, w] each."""
    iteration: int = 0
    """Iteration of the run, from 0; schedules and seeded choices depend on it."""

    def __post_init__(self) -> None:
        if self.images.ndim != 4 or self.images.shape[1] != 3 or self.images.dtype != torch.float32:
            raise ValueError(
                f"images must be float32 [B, 3, H, W], got {self.images.dtype} {list(self.images.shape)}: convert them "
                f"where the pipeline decodes."
            )
        batch = len(self.images)
        lengths = {name: len(value) for name in _PER_SAMPLE if (value := getattr(self, name)) is not None}
        if wrong := {name: length for name, length in lengths.items() if length != batch}:
            raise ValueError(f"every field needs one entry for each of the {batch} images, got {wrong}.")
        for name, ids in (("group_ids", self.group_ids), ("sample_ids", self.sample_ids)):
            if ids.dtype != torch.int64 or ids.ndim != 1:
                # Ids kept as float32 collide above 2^24.
                raise ValueError(f"{name} must be int64 [B], got {ids.dtype} {list(ids.shape)}.")

    def __len__(self) -> int:
        return len(self.prompts)

    def __getitem__(self, index: Tensor | Sequence[int]) -> RewardInputs:
        """Some samples, by their places (int64 [n] or a list)."""
        place = torch.as_tensor(index)
        if place.dtype == torch.bool:
            raise ValueError("samples are chosen by their places, not by a mask: give torch.nonzero(mask).flatten().")
        place = place.to(torch.int64)

        def of(values: Any) -> Any:
            if isinstance(values, Tensor):
                return values[place.to(values.device)]
            return None if values is None else [values[i] for i in place.tolist()]

        return replace(self, **{name: of(getattr(self, name)) for name in _PER_SAMPLE})


def with_images(inputs: RewardInputs, change: Callable[[Tensor], Tensor]) -> RewardInputs:
    """The same inputs with each of their images, videos and sounds changed."""

    def of(given: Any) -> Any:
        if isinstance(given, list):
            return [[change(image) for image in few] for few in given]
        return None if given is None else change(given)

    names = ("images", "videos", "sounds", "source_images", "reference_images")
    return replace(inputs, **{name: of(getattr(inputs, name)) for name in names})


_PER_SAMPLE = tuple(one.name for one in fields(RewardInputs) if one.name not in ("fps", "sound_rate", "iteration"))


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardOutput:
    """What a reward returns: `values` float32 [B], `valid` bool [B], and named sub-scores, float32 [B] each.

    A failed item has `valid` False and the value NaN; it enters no statistic. Sub-scores are for the log only; NaN in
    one says that the item has none. `errors` counts why items failed, by a word such as "timeout" or "missing_field".
    """

    values: Float[Tensor, " b"]
    valid: Bool[Tensor, " b"]
    parts: dict[str, Float[Tensor, " b"]] = field(default_factory=dict)
    errors: dict[str, int] = field(default_factory=dict)


class Model(NamedTuple):
    """A model that a reward holds on its device: its folder or hub id, bytes per weight, and `parameters`, how many
    weights (None if unknown). `networks.pretrained.model_of` makes one."""

    name: str
    bytes_per_weight: int = 4
    parameters: int | None = None


class RewardOptions(Protocol):
    """The options of a built-in reward; see `REWARDS`.

    Set `differentiable = True` if values can carry the gradient of the images, at least with some options. Set `judges`
    to one of `JUDGED` if the reward always looks at more than an image. Set `verdicts = True` if its parts are a
    benchmark's verdicts, see `gives_verdicts`.
    """

    def build(self, device: torch.device) -> Reward:
        """Makes the reward; loads its weights, if any."""


@runtime_checkable
class NamesModels(RewardOptions, Protocol):
    """Options that say which models their reward holds, None if they cannot; others never can."""

    @property
    def models(self) -> tuple[Model, ...] | None: ...


@runtime_checkable
class SharesPart(RewardOptions, Protocol):
    """Options of a reward that uses a part, such as a loaded model, which other entries of the run can share."""

    @property
    def shared(self) -> Hashable:
        """Identifies the part: entries of one class with the same answer share it."""

    def load(self, device: torch.device) -> Any:
        """Makes the part; loads its weights, if any."""

    def on(self, part: Any) -> Reward:
        """Makes the reward on a part."""


def models_of(options: RewardOptions) -> tuple[Model, ...] | None:
    """The models that a reward holds; None if that is not known before it is built."""
    return options.models if isinstance(options, NamesModels) else None


class Reward(Protocol):
    """What a reward looks like."""

    @property
    def name(self) -> str:
        """Its name in logs."""

    @property
    def kind(self) -> str:
        """One of `KINDS`."""

    @property
    def needs(self) -> frozenset[str]:
        """The fields of `RewardInputs` that it reads."""

    @property
    def differentiable(self) -> bool:
        """Whether the values carry gradient if the images do."""

    @property
    def waits(self) -> bool:
        """Whether it mostly waits for another program, so it may run during the next rollout."""

    @property
    def version(self) -> str:
        """Identifies exactly what was computed, for the run's manifest."""

    def __call__(self, inputs: RewardInputs) -> RewardOutput: ...


@runtime_checkable
class AskedReward(Reward, Protocol):
    """A reward that asks people at once; its result waits for their answers."""

    def ask(self, inputs: RewardInputs) -> Callable[[], RewardOutput]: ...


class TrainedReward(Reward, Protocol):
    """A reward of kind adversarial: it learns between the policy's updates, and is saved with checkpoints."""

    def trains_policy(self, iteration: int) -> bool:
        """Whether the policy is updated in this iteration; if not, only the reward learns."""

    def learn(self, inputs: RewardInputs) -> dict[str, float]:
        """Learns from the images of an iteration, of all processes, the same on each; returns numbers for the log."""

    def learned(self) -> dict[str, Any]:
        """What learning has changed, for the other processes."""

    def follow(self, learned: Mapping[str, Any]) -> None:
        """Takes over what the main process has learned."""

    def state(self) -> dict[str, Any]:
        """Everything a continued run needs: tensors and plain numbers."""

    def restore(self, state: Mapping[str, Any]) -> None:
        """Puts `state()` back."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FunctionReward:
    """A `Reward` made of a function and its description."""

    name: str
    score: Callable[[RewardInputs], RewardOutput]
    needs: frozenset[str]
    version: str
    kind: str = "pointwise"
    differentiable: bool = False
    waits: bool = False

    def __call__(self, inputs: RewardInputs) -> RewardOutput:
        return self.score(inputs)


def changed(inner: Reward, score: Callable[[RewardInputs], RewardOutput], **told: Any) -> FunctionReward:
    """A reward that asks another one and has its properties, except for those given."""
    own = {name: getattr(inner, name) for name in ("name", "needs", "version", "kind", "differentiable", "waits")}
    return FunctionReward(score=score, **own | told)


def output_of(
    values: Sequence[float | None],
    inputs: RewardInputs,
    parts: Mapping[str, Sequence[float]] | None = None,
    errors: Sequence[str | None] | None = None,
) -> RewardOutput:
    """The output of a scorer that works on plain numbers, on the device of the images.

    Args:
        values: [B]; None, NaN and infinity are failed items.
        parts: sub-scores [B] by name.
        errors: [B] why an item failed, None if it did not; a failed item without a reason counts as "not_finite".
    """
    device = inputs.images.device
    numbers = torch.tensor([math.nan if v is None else v for v in values], dtype=torch.float32)
    valid = torch.isfinite(numbers)
    reasons = errors or [None] * len(values)
    counts = Counter(r or "not_finite" for r, ok in zip(reasons, valid.tolist(), strict=True) if not ok)
    return RewardOutput(
        values=sent(torch.where(valid, numbers, torch.nan), device),
        valid=sent(valid, device),
        parts={k: sent(torch.tensor(v, dtype=torch.float32), device) for k, v in (parts or {}).items()},
        errors=dict(counts),
    )


def tensor_output(
    values: Float[Tensor, " b"],
    parts: Mapping[str, Float[Tensor, " b"]] | None = None,
    valid: Bool[Tensor, " b"] | None = None,
) -> RewardOutput:
    """The output of a scorer that works on tensors: values that are not finite are failed items, "not_finite".

    Args:
        values: [B], perhaps with gradient.
        parts: sub-scores [B] by name; their gradient is cut off.
        valid: [B] which items have not failed, if finite values do not show it.
    """
    known = torch.isfinite(values.detach()) if valid is None else valid
    failed = int((~known).sum())
    return RewardOutput(
        values=torch.where(known, values, torch.nan),
        valid=known,
        parts={name: part.detach() for name, part in (parts or {}).items()},
        errors={"not_finite": failed} if failed else {},
    )


def to_uint8(images: Float[Tensor, " b 3 h w"]) -> UInt8[np.ndarray, " b h w 3"]:
    """8-bit images `clip(round(255 x), 0, 255)`, channels last, on the host.

    Rounded, not cut off: truncation darkens by half a level and shifts JPEG sizes and text recognition.

    Raises ValueError: if a pixel is NaN or infinite; the cast would turn it into an arbitrary colour.
    """
    images = images.detach()
    finite = torch.isfinite(images).flatten(1).all(dim=1)
    pixels = (images * 255.0).round().clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1)
    # Verdict and pixels in one copy: a device is waited for once.
    copied = torch.cat([finite.to(torch.uint8)[:, None], pixels.flatten(1)], 1).cpu()
    if not bool(copied[:, 0].all()):
        broken = torch.nonzero(copied[:, 0] == 0).flatten().tolist()
        raise ValueError(
            f"{len(broken)} of {len(images)} images hold NaN or infinity (first: item {broken[0]}): the policy or the "
            f"decoder has diverged; lower the learning rate or decode in float32."
        )
    return copied[:, 1:].reshape(pixels.shape).numpy()


def load_target(target: str) -> Any:
    """The object behind "module:name"; the module is imported now."""
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)


def reward_options(name: str, options: Mapping[str, Any]) -> RewardOptions:
    """The checked options of a built-in reward. Loads no weights. Raises ValueError: an unknown name, with the nearest
    one and all that are allowed; an unknown option or a bad value."""
    if name not in REWARDS:
        raise ValueError(unknown_name("reward", name, REWARDS) + " For your own use file: and function:.")
    return build_options(load_target(REWARDS[name]), options, owner=f"reward {name!r}")


def option_names(name: str) -> list[str]:
    """The names of a built-in reward's options."""
    return [one.name for one in fields(load_target(REWARDS[name]))]


def addresses_of(name: str) -> tuple[str, ...]:
    """Options of a built-in reward that give a server's address; if the server moves, the reward stays the same."""
    return tuple(getattr(load_target(REWARDS[name]), "addresses", ())) if name in REWARDS else ()


def asks_people(name: str | None) -> bool:
    """Whether a built-in reward asks people while a run trains, and nowhere else."""
    return name in REWARDS and bool(getattr(load_target(REWARDS[name]), "asks_people", False))


def reproduction_of(name: str | None, options: Mapping[str, Any] | None = None) -> str | None:
    """What a built-in reward reproduces and was checked against here (`built_in.yaml`), or that options replace the
    published text by another one; None if it has no published name."""
    line = built_in_rewards().get(name or "", {}).get("reproduces")
    if line is None:
        return None
    line, template = f"{line.rstrip('.')}.", (options or {}).get("template")
    return line if template is None else f"{line} Here with template: {template}, for which that may not hold."


def aspects_of(name: str | None) -> tuple[str, ...]:
    """The one of `JUDGED` that a built-in reward always looks at."""
    own = getattr(load_target(REWARDS[name]), "judges", ()) if name in REWARDS else ()
    return tuple(word for word in JUDGED if word in own)


def gives_verdicts(name: str | None) -> bool:
    """Whether a built-in reward's parts `official` and `graded` are verdicts, by which evaluations judge an image."""
    return name in REWARDS and bool(getattr(load_target(REWARDS[name]), "verdicts", False))


def can_be_differentiable(name: str | None) -> bool:
    """Whether the values of a built-in reward can carry the gradient of the images, perhaps with some options only."""
    return name in REWARDS and bool(getattr(load_target(REWARDS[name]), "differentiable", False))


def build_reward(name: str, *, device: torch.device | str = "cpu", options: Mapping[str, Any] | None = None) -> Reward:
    """Makes a built-in reward; loads its weights, if any, on `device`."""
    return reward_options(name, options or {}).build(torch.device(device))
