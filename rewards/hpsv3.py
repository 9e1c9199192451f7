"""HPSv3: human preference by a fine-tuned Qwen2-VL 7B with a regression head (Ma et al. 2025, arXiv 2508.03789).

The image, resized to about 200,704 pixels (256 merged tokens), comes first in one user turn; the text asks for a
rating of quality and agreement with the prompt and ends in the token `<|Reward|>`. The head

    Linear(3584, 1024), ReLU, Dropout 0.05, Linear(1024, 16), ReLU, Linear(16, 2)        3,687,474 parameters

reads the last hidden state there. Its first output is the score, unbounded, about 0 to 15; its second a spread.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from flowrl.rewards.base import FunctionReward, Reward, RewardInputs, RewardOutput, output_of, to_uint8
from flowrl.rewards.judges.templates import read_template, template_name
from flowrl.rewards.networks import pretrained, qwen_vl
from flowrl.rewards.networks.qwen_vl import Checkpoint, CheckpointOptions, Dtype, PositionMode, TokenScorer
from flowrl.runtime.shapes import Float

_FACTORS = {"raw": 1.0, "verl_omni": 0.1}
TOKEN = "<|Reward|>"
PIXELS = 256 * 28 * 28


def preference_head(width: int, weights: Any = None) -> nn.Sequential:
    """The untrained head on hidden states of a width; its weights have the checkpoint's names."""
    return nn.Sequential(
        nn.Linear(width, 1024), nn.ReLU(), nn.Dropout(0.05), nn.Linear(1024, 16), nn.ReLU(), nn.Linear(16, 2)
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Hpsv3(CheckpointOptions):
    """HPSv3's score of image and prompt, times 0.1 with `scale: verl_omni`; needs about 16 GB in bfloat16. It was
    trained on one text, used here. The weights' licence is not established: look at their page."""

    published: ClassVar[Checkpoint] = Checkpoint(
        name="hpsv3", tokens=(TOKEN,), make_head=preference_head, file="HPSv3.safetensors"
    )
    model: str = "MizzenAI/HPSv3"
    """The file HPSv3.safetensors, a folder that holds it, or a hub id."""
    revision: str | None = None
    """Branch, tag or commit of `model` on the hub."""
    base: str = "Qwen/Qwen2-VL-7B-Instruct"
    """The Qwen2-VL 7B, a folder or a hub id; only its configuration and processor are used, not its weights."""
    base_revision: str | None = None
    """Likewise of `base`."""
    scale: Literal["raw", "verl_omni"] = "raw"
    """`raw`, or `verl_omni` for a tenth."""
    template: str | None = None
    """A text file instead of the published one, or `own`; see `flowrl.rewards.judges.templates`."""
    position_mode: PositionMode = "sequential"
    """`sequential` as trained, or `mrope` as some ports run it; see `flowrl.rewards.networks.qwen_vl`."""
    dtype: Dtype = "bfloat16"
    """Precision of the backbone; the head runs in float32."""
    batch_size: int = 1
    """Images that the model sees at once. One, of some 700 tokens, keeps a GPU busy, and then no score depends on the
    others; in bfloat16 larger batches change the last digits."""

    def __post_init__(self) -> None:
        self.text()
        self.check()

    def text(self) -> str:
        """What the model reads, with `{prompt}` in it."""
        return read_template("hpsv3", self.template, source="hpsv3", once=(qwen_vl.PROMPT, TOKEN))

    def build(self, device: torch.device) -> Reward:
        """Loads model and processor."""
        text = self.text()
        (scorer,) = self.scorers([text], device, position_mode=self.position_mode)

        def score(inputs: RewardInputs) -> RewardOutput:
            outputs = read_images(inputs, scorer, self.batch_size)
            return output_of((_FACTORS[self.scale] * outputs[:, 0]).tolist(), inputs)

        version = (
            f"hpsv3:{self.model}@{pretrained.fingerprint(scorer.network.head.parameters())}:{self.scale}:"
            f"{template_name(text)}:{self.position_mode}:{PIXELS}px:{self.dtype}"
        )
        return FunctionReward(name="hpsv3", score=score, needs=frozenset({"images", "prompts"}), version=version)


def read_images(inputs: RewardInputs, scorer: TokenScorer, batch_size: int) -> Float[Tensor, " b o"]:
    """The head's outputs for each image and prompt, float64 on the host."""
    images = [qwen_vl.resize_image(i, min_pixels=PIXELS, max_pixels=PIXELS) for i in to_uint8(inputs.images)]
    return scorer.outputs(inputs.prompts, batch_size=batch_size, images=images.__getitem__)[:, 0].cpu().double()
