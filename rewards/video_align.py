"""VideoAlign (VideoReward): visual quality, motion quality and text alignment of clips (Liu et al. 2025).

arXiv 2501.13918. A Qwen2-VL 2B reads up to some frames per second of the clip and a text with the tokens
`<|VQ_reward|>`, `<|MQ_reward|>` and `<|TA_reward|>`; a linear head without bias reads the last hidden state at each.
With the means and standard deviations that the checkpoint's model_config.json holds,

    value = sum over the chosen dimensions k of (output_k - mean_k) / std_k

which for all three is the published Overall. Each normalised dimension is about N(0, 1) and also given as a part.

A checkpoint is a folder with model_config.json and checkpoint-<n>/, which holds model.pth with all weights, or LoRA
matrices (adapter_model.safetensors) and the other trained weights (non_lora_state_dict.pth), which change a base model.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from flowrl.config.options import unknown_name
from flowrl.rewards.base import FunctionReward, Reward, RewardInputs, RewardOutput, output_of, to_uint8
from flowrl.rewards.judges.templates import read_template, template_name
from flowrl.rewards.networks import pretrained, qwen_vl
from flowrl.rewards.networks.qwen_vl import DTYPES, Checkpoint, CheckpointOptions, Dtype, PositionMode, newer_name
from flowrl.runtime.files import read_json

DIMENSIONS = ("VQ", "MQ", "TA")
OWNER = "reward 'video_align'"
_LORA = re.compile(r"(.+)\.lora_([AB])(?:\.\w+)?\.weight")
TOKENS = tuple(f"<|{name}_reward|>" for name in DIMENSIONS)
MIN_PIXELS = 128 * 28 * 28  # of a frame, even if the checkpoint's maximum is lower: Qwen's own code resizes by this


def _head(_: int, weights: Mapping[str, Tensor]) -> nn.Module:
    outputs, width = weights["weight"].shape if "weight" in weights else (0, 0)
    if outputs not in (1, len(DIMENSIONS)):
        raise ValueError(f"{OWNER}: the checkpoint's head must have 1 or 3 outputs per token, it has {outputs}.")
    return nn.Linear(width, outputs, bias=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class VideoAlign(CheckpointOptions):
    """VideoAlign's score of clip and prompt: the sum of the chosen dimensions VQ, MQ and TA, each logged by itself.

    Frames go to the model as they are; the reference reads an encoded file, which differs. Needs 5 GB in bfloat16.

    The checkpoint was trained on one text, its template of type detailed_special, and this reward uses it.
    """

    judges: ClassVar[tuple[str, ...]] = ("videos",)
    published: ClassVar[Checkpoint] = Checkpoint(name="video_align", tokens=TOKENS, make_head=_head)
    model: str = "KwaiVGI/VideoReward"
    """The checkpoint's folder, or a hub id."""
    revision: str | None = None
    """Branch, tag or commit of `model` on the hub."""
    checkpoint: int | None = None
    """The number n of checkpoint-<n>, null for the largest."""
    base: str = "Qwen/Qwen2-VL-2B-Instruct"
    """The Qwen2-VL 2B that it was trained from, a folder or a hub id."""
    base_revision: str | None = None
    """Likewise of `base`."""
    dimensions: tuple[str, ...] = DIMENSIONS
    """Which of VQ, MQ and TA the value sums."""
    normalise: bool = True
    """Whether means and standard deviations of the checkpoint are applied."""
    template: str | None = None
    """A text file instead of the published one, or `own`; see `flowrl.rewards.judges.templates`."""
    position_mode: PositionMode = "sequential"
    """`sequential` as trained, or `mrope` as some ports run it; see `flowrl.rewards.networks.qwen_vl`."""
    dtype: Dtype = "bfloat16"
    """Precision of the backbone; the head runs in float32."""
    batch_size: int = 1
    """Clips that the model sees at once. With one, no score depends on the others; in bfloat16 larger batches change
    the last digits."""

    def __post_init__(self) -> None:
        if not self.dimensions:
            raise ValueError(f"dimensions must be a list of some of {', '.join(DIMENSIONS)}, got an empty one.")
        for name in self.dimensions:
            if name not in DIMENSIONS:
                raise ValueError(unknown_name("dimension", name, DIMENSIONS))
        if len(set(self.dimensions)) != len(self.dimensions):
            raise ValueError(f"dimensions names one twice: {', '.join(self.dimensions)}.")
        self.text()
        self.check()

    def text(self) -> str:
        """The text that the model reads, with `{prompt}` in it."""
        return read_template("video_align", self.template, source="video_align", once=(qwen_vl.PROMPT, *TOKENS))

    def build(self, device: torch.device) -> Reward:
        """Loads model and processor."""
        folder = pretrained.fetch_file(self.model, None, revision=self.revision, owner=OWNER, option="model")
        settings = read_settings(folder, normalise=self.normalise)
        chosen = checkpoint_of(folder, self.checkpoint)
        # Two rewards of one run often differ in their dimensions only: they share the network.
        text = self.text()
        (scorer,) = self.scorers(
            [text],
            device,
            weights=lambda: read_trained_weights(chosen, settings, self.base, self.base_revision, DTYPES[self.dtype]),
            identity=(str(chosen),),
            position_mode=self.position_mode,
        )

        def score(inputs: RewardInputs) -> RewardOutput:
            if inputs.videos is None or inputs.fps is None:
                raise ValueError(
                    f"{OWNER} judges videos and their frames per second: use it with a pipeline that makes them."
                )
            videos = inputs.videos
            places = qwen_vl.clip_places(
                videos.shape[1], inputs.fps, target_fps=settings.fps, count=settings.num_frames
            )

            def clips(part: slice) -> list[Tensor]:
                return [
                    qwen_vl.resize_frames(to_uint8(clip[places]), min_pixels=MIN_PIXELS, max_pixels=settings.max_pixels)
                    for clip in videos[part]
                ]

            outputs = scorer.outputs(inputs.prompts, batch_size=self.batch_size, videos=clips)
            # Three outputs per token: each dimension's own at its own token. One: only the token tells them apart.
            chosen = outputs.diagonal(dim1=1, dim2=2) if outputs.shape[-1] == len(DIMENSIONS) else outputs[..., 0]
            rows = chosen.cpu().double().tolist()
            normal = [
                [(x - mean) / std for x, (mean, std) in zip(row, settings.constants, strict=True)] for row in rows
            ]
            parts = {name: [row[k] for row in normal] for k, name in enumerate(DIMENSIONS)}
            values = [sum(parts[name][i] for name in self.dimensions) for i in range(len(inputs))]
            return output_of(values, inputs, parts=parts)

        version = (
            f"video_align:{self.model}/{chosen.name}@{pretrained.fingerprint(scorer.network.head.parameters())}:"
            f"{'+'.join(self.dimensions)}:{'normalised' if self.normalise else 'raw'}:{template_name(text)}:"
            f"{self.position_mode}:{settings.fps:g}fps:{settings.max_pixels}px:{self.dtype}"
        )
        return FunctionReward(name="video_align", score=score, needs=frozenset({"videos", "prompts"}), version=version)


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointSettings:
    """Settings in a checkpoint's model_config.json: frames, pixels, LoRA, and (mean, std) of each dimension."""

    constants: tuple[tuple[float, float], ...]
    fps: float
    num_frames: int | None
    max_pixels: int
    lora_alpha: float
    rslora: bool


def read_settings(folder: Path, *, normalise: bool) -> CheckpointSettings:
    """The settings of a checkpoint; without `normalise` the constants are (0, 1). Raises ValueError: if the file is
    missing or lacks something, or is of a model that samples or reads out otherwise."""
    file = folder / "model_config.json"
    try:
        content = read_json(file)
    except ValueError as error:
        raise ValueError(f"{OWNER}: cannot read {str(file)!r}: {error}. Give model: a VideoReward folder.") from error
    data, model, lora = (content.get(part) or {} for part in ("data_config", "model_config", "peft_lora_config"))
    if data.get("sample_type", "uniform") != "uniform" or not model.get("use_special_tokens", True):
        raise ValueError(f"{OWNER}: {str(file)!r} must have sample_type uniform and use_special_tokens true.")
    identity = ((0.0, 1.0),) * len(DIMENSIONS)
    return CheckpointSettings(
        constants=_constants(content.get("inference_config") or {}, file) if normalise else identity,
        fps=float(data.get("fps") or 2.0),
        num_frames=data.get("num_frames"),
        max_pixels=int(data.get("max_frame_pixels") or 240 * 320),
        lora_alpha=float(lora.get("lora_alpha", 32)),
        rslora=bool(lora.get("use_rslora", False)),
    )


def _constants(known: Mapping[str, Any], file: Path) -> tuple[tuple[float, float], ...]:
    """(mean, std) of each dimension."""
    wanted = [f"{name}_{what}" for name in DIMENSIONS for what in ("mean", "std")]
    if missing := [name for name in wanted if name not in known]:
        raise ValueError(
            f"{OWNER}: {str(file)!r} has no {missing[0]} under inference_config: set normalise: false, or give a "
            f"checkpoint with its constants."
        )
    constants = tuple((float(known[f"{name}_mean"]), float(known[f"{name}_std"])) for name in DIMENSIONS)
    if not all(math.isfinite(mean) and math.isfinite(std) and std > 0 for mean, std in constants):
        raise ValueError(f"{OWNER}: {str(file)!r}: means must be finite and standard deviations positive.")
    return constants


def checkpoint_of(folder: Path, number: int | None) -> Path:
    """The folder checkpoint-<n> with the given or the largest n."""
    found = {int(path.name.removeprefix("checkpoint-")): path for path in folder.glob("checkpoint-*[0-9]")}
    wanted = max(found, default=None) if number is None else number
    if wanted not in found:
        have = ", ".join(str(n) for n in sorted(found)) or "none"
        raise ValueError(
            f"{OWNER}: {str(folder)!r} has no checkpoint-{'<n>' if number is None else number}; n: {have}."
        )
    return found[wanted]


def merge_lora(weights: Mapping[str, Tensor], *, alpha: float, rslora: bool) -> dict[str, Tensor]:
    """Weights as peft names them under the model's own names, W + alpha / r B A for each pair of matrices of A's r rows
    (rank-stabilised LoRA: root of r). Names without anything of peft stay as they are."""
    plain: dict[str, Tensor] = {}
    pairs: dict[str, dict[str, Tensor]] = {}
    for given, weight in weights.items():
        name = _plain_name(given)
        if found := _LORA.fullmatch(name):
            pairs.setdefault(found[1], {})[found[2]] = weight
        elif ".original_module." not in name:
            plain[re.sub(r"\.modules_to_save\.(?:default\.)?", ".", name.replace(".base_layer.", "."))] = weight
    for module, pair in pairs.items():
        name = f"{module}.weight"
        if set(pair) != {"A", "B"} or name not in plain:
            raise ValueError(
                f"{OWNER}: the checkpoint's LoRA of {module} lacks a matrix or the weight that it changes."
            )
        rank = pair["A"].shape[0]
        change = pair["B"].float() @ pair["A"].float() * (alpha / (math.sqrt(rank) if rslora else rank))
        plain[name] = (plain[name].float() + change).to(plain[name].dtype)
    return plain


def _plain_name(name: str) -> str:
    return newer_name(name.removeprefix("base_model.model."))


def read_trained_weights(
    checkpoint: Path, settings: CheckpointSettings, base: str, base_revision: str | None, dtype: torch.dtype
) -> dict[str, Tensor]:
    """All weights of backbone and head, with LoRA merged; of the base model if the checkpoint keeps only changes."""
    merge = partial(merge_lora, alpha=settings.lora_alpha, rslora=settings.rslora)
    if (checkpoint / "model.pth").is_file():
        return merge(pretrained.read_weights(checkpoint / "model.pth", owner=OWNER))
    from transformers import Qwen2VLModel

    trained: dict[str, Tensor] = {}
    for name in ("adapter_model.safetensors", "non_lora_state_dict.pth"):
        if not (checkpoint / name).is_file():
            raise ValueError(f"{OWNER}: {str(checkpoint)!r} holds neither model.pth nor {name}: fetch it again.")
        trained |= pretrained.read_weights(checkpoint / name, owner=OWNER)
    network = pretrained.load_network(
        Qwen2VLModel,
        base,
        device=torch.device("cpu"),
        revision=base_revision,
        owner=OWNER,
        option="base",
        what="Qwen2-VL",
        shared=False,
        dtype=dtype,
    )
    # Pairs are merged only once trained weights have taken the base's place.
    return merge(network.state_dict() | {_plain_name(name): weight for name, weight in trained.items()})
