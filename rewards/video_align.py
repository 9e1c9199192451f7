"""VideoAlign (VideoReward): visual quality, motion quality and text alignment of clips (Liu et al. 2025).

arXiv 2501.13918. A Qwen2-VL 2B reads up to some frames per second of the clip and a text with the tokens
`<|VQ_reward|>`, `<|MQ_reward|>` and `<|TA_reward|>`; a linear head without bias reads the last hidden state at each.
With the means and standard deviations that the checkpoint's model_config.json holds,

    value = sum over the chosen dimensions k of (output_k - mean_k) / std_k

which for all three is the published Overall. Each normalised dimension is about N(0, 1) and also given as a part.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from flowrl.config.options import unknown_name
from flowrl.rewards.base import FunctionReward, Reward, RewardInputs, RewardOutput, output_of, to_uint8
from flowrl.rewards.judges.templates import read_template, template_name
from flowrl.rewards.networks import pretrained, qwen_vl
from flowrl.rewards.networks.qwen_vl import DTYPES, Checkpoint, CheckpointOptions, Dtype, PositionMode
from flowrl.rewards.networks.video_align_checkpoint import (
    DIMENSIONS,
    OWNER,
    checkpoint_of,
    read_settings,
    read_trained_weights,
)

TOKENS = tuple(f"<|{name}_reward|>" for name in DIMENSIONS)
MIN_PIXELS = 128 * 28 * 28  # of a frame, whatever the checkpoint's maximum says: Qwen's own code resizes by this


def _head(_: int, weights: Mapping[str, Tensor]) -> nn.Module:
    outputs, width = weights["weight"].shape if "weight" in weights else (0, 0)
    if outputs not in (1, len(DIMENSIONS)):
        raise ValueError(f"{OWNER}: the checkpoint's head must have 1 or 3 outputs per token, it has {outputs}.")
    return nn.Linear(width, outputs, bias=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class VideoAlign(CheckpointOptions):
    """VideoAlign's score of clip and prompt: the sum of the chosen dimensions VQ, MQ and TA, each logged by itself.

    Frames go to the model as they are; the reference reads an encoded file, whose compression changes them. Needs
    about 5 GB in bfloat16.

    The checkpoint was trained on one text, its template of type detailed_special, which is the one that is asked.
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
        """What the model reads, with `{prompt}` in it."""
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
            # Three outputs per token: each dimension's own at its own token. One: the token alone tells them apart.
            chosen = outputs.diagonal(dim1=1, dim2=2) if outputs.shape[-1] == len(DIMENSIONS) else outputs[..., 0]
            rows = chosen.cpu().double().tolist()
            normal = [
                [(x - mean) / std for x, (mean, std) in zip(row, settings.constants, strict=True)] for row in rows
            ]
            parts = {name: [row[k] for row in normal] for k, name in enumerate(DIMENSIONS)}
            values = [sum(parts[name][i] for name in self.dimensions) for i in range(len(inputs))]
            return output_of(values, inputs, parts=parts)

        return FunctionReward(
            name="video_align",
            score=score,
            needs=frozenset({"videos", "prompts"}),
            version=f"video_align:{self.model}/{chosen.name}@{pretrained.fingerprint(scorer.network.head.parameters())}:"
            f"{'+'.join(self.dimensions)}:{'normalised' if self.normalise else 'raw'}:{template_name(text)}:"
            f"{self.position_mode}:{settings.fps:g}fps:{settings.max_pixels}px:{self.dtype}",
        )
