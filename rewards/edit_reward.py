"""EditReward: human preference between edits by a fine-tuned Qwen2.5-VL 7B (Wu et al. 2025, arXiv 2509.26346).

The model reads the source, the edited image, both at about 200,704 pixels, and the instruction, once under a text that
asks how well it was followed and once under one that asks for the quality. Each text ends in the token `<|Reward|>` and
has a head on the last hidden state there, of HPSv3's shape, which gives a mean and the logarithm of a spread:

    value = mean over the two of their means      (`pooling: mean`, as published)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from PIL import Image
from torch import Tensor, nn

from flowrl.prompts.loading import Prompt
from flowrl.rewards.base import FunctionReward, Reward, RewardInputs, RewardOutput, output_of, to_uint8
from flowrl.rewards.base.prompt_needs import no_source
from flowrl.rewards.hpsv3 import PIXELS, TOKEN, preference_head
from flowrl.rewards.judges.templates import read_template, template_name
from flowrl.rewards.networks import pretrained, qwen_vl
from flowrl.rewards.networks.qwen_vl import QWEN25_VL, Checkpoint, CheckpointOptions, Dtype
from flowrl.runtime.shapes import Float

FILES = ("model.safetensors", "model.pth")
HEADS = ("rm_heads.",)
ASPECTS = {"following": "dim1", "quality": "dim2"}
"""What the two heads judge, in their order, and the texts that they were trained on."""
POOLED: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda means: means.mean(0),
    "min": lambda means: means.amin(0),
    "sum": lambda means: means.sum(0),
}
OWNER = "reward 'edit_reward'"


class TwoHeads(nn.Module):
    """Both heads of a hidden state, [..., d] to [..., 4]: mean and log spread of following, then of quality."""

    def __init__(self, width: int, weights: Any = None) -> None:
        super().__init__()
        self.head_0 = preference_head(width)
        self.head_1 = preference_head(width)

    def forward(self, hidden: Float[Tensor, " *b d"]) -> Float[Tensor, " *b 4"]:
        return torch.cat([self.head_0(hidden), self.head_1(hidden)], -1)


@dataclass(frozen=True, kw_only=True, slots=True)
class EditReward(CheckpointOptions):
    """EditReward's score of source, edit and instruction, on its own scale; needs about 17 GB in bfloat16.

    The edit must have one source image; an item with none or several fails, "missing_source" or "several_sources".
    Parts: `following` and `quality`, the means of the two heads. Texts: repository TIGER-AI-Lab/EditReward (MIT).
    """

    judges: ClassVar[tuple[str, ...]] = ("edits",)
    published: ClassVar[Checkpoint] = Checkpoint(
        name="edit_reward", tokens=(TOKEN,), make_head=TwoHeads, family=QWEN25_VL, heads=HEADS
    )
    model: str = "TIGER-Lab/EditReward-Qwen2.5-VL-7B"
    """A file, or a folder or hub repository with model.safetensors or model.pth; or the MiMo one,
    TIGER-Lab/EditReward-MiMo-VL-7B-SFT-2508."""
    revision: str | None = None
    """Branch, tag or commit of `model` on the hub."""
    base: str = "Qwen/Qwen2.5-VL-7B-Instruct"
    """The model that it was trained from, a folder or a hub id; only its configuration and processor are used, not its
    weights. For the MiMo one XiaomiMiMo/MiMo-VL-7B-SFT-2508."""
    base_revision: str | None = None
    """Likewise of `base`."""
    pooling: Literal["mean", "min", "sum"] = "mean"
    """How two means become one value: `mean`, as in the published configurations; `min`, the worse of the two, the
    default of the published class; `sum`."""
    dtype: Dtype = "bfloat16"
    """Precision of the backbone; the heads run in float32."""
    batch_size: int = 1
    """Edits that the model sees at once; with one, no score depends on the others."""

    def __post_init__(self) -> None:
        self.check()

    def lacks(self, prompt: Prompt) -> str | None:
        """One source image."""
        return no_source(prompt, one=True)

    def read_weights(self) -> Mapping[str, Tensor]:
        """The weights of the checkpoint's one file."""
        path = Path(self.model).expanduser()
        if not path.is_file():
            folder = pretrained.fetch_file(self.model, None, revision=self.revision, owner=OWNER, option="model")
            files = [folder / name for name in FILES if (folder / name).is_file()]
            if not files:
                raise ValueError(
                    f"{OWNER}, option model: {self.model!r} holds neither {' nor '.join(FILES)}: give the file."
                )
            path = files[0]
        return pretrained.read_weights(path, owner=OWNER)

    def build(self, device: torch.device) -> Reward:
        """Loads model and processor."""
        texts = [
            read_template(name, None, source="edit_reward", once=(qwen_vl.PROMPT, TOKEN)) for name in ASPECTS.values()
        ]
        scorers = self.scorers(texts, device)

        def score(inputs: RewardInputs) -> RewardOutput:
            if inputs.source_images is None:
                raise ValueError(
                    f"{OWNER} judges edits, and the samples have no source_images: give them with the prompts."
                )
            counts = [len(sources) for sources in inputs.source_images]
            errors = [None if n == 1 else "several_sources" if n else "missing_source" for n in counts]
            places = [item for item, error in enumerate(errors) if error is None]
            values = [math.nan] * len(inputs)
            parts = {name: [math.nan] * len(inputs) for name in ASPECTS}
            if places:
                shown: list[Image.Image] = []  # source, edit, source, edit, ...
                chosen = inputs[places]
                for item, image in zip(places, to_uint8(chosen.images), strict=True):
                    both = (to_uint8(inputs.source_images[item][0][None])[0], image)
                    shown += [qwen_vl.resize_image(i, min_pixels=PIXELS, max_pixels=PIXELS) for i in both]

                def pairs(part: slice) -> list[Image.Image]:
                    return shown[2 * part.start : 2 * part.stop]

                following, quality = (
                    scorer.outputs(chosen.prompts, batch_size=self.batch_size, images=pairs)[:, 0] for scorer in scorers
                )
                means = torch.stack([following[:, 0], quality[:, 2]]).double().cpu()
                pooled = POOLED[self.pooling](means)
                for row, item in enumerate(places):
                    values[item] = float(pooled[row])
                    for part, mean in zip(parts.values(), means[:, row].tolist(), strict=True):
                        part[item] = mean
            return output_of(values, inputs, parts, errors)

        return FunctionReward(
            name="edit_reward",
            score=score,
            needs=frozenset({"images", "prompts", "source_images"}),
            version=f"edit_reward:{self.model}@{pretrained.fingerprint(scorers[0].network.head.parameters())}:{self.pooling}:"
            f"{template_name(chr(0).join(texts))}:{PIXELS}px:{self.dtype}",
        )
