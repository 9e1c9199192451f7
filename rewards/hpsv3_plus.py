"""HPSv3++: human preference that knows how able a generator is and how far it was trained (arXiv 2606.14657).

HPSv3's reading on Qwen3-VL 8B: image and text, the last hidden state h at `<|Reward|>`, the same head. Before the head,
h is modulated by two numbers, how able the image's generator looks, and the share of 1000 steps of training behind it:

    c = sigmoid(out(proj(h))),     (gamma, beta) = film(cond([c, t])),     value = head(h (1 + gamma) + beta)[0]
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor, nn

from flowrl.config.sections import share
from flowrl.rewards.base import FunctionReward, Reward, RewardInputs, RewardOutput, output_of
from flowrl.rewards.hpsv3 import PIXELS, TOKEN, preference_head, read_images
from flowrl.rewards.judges.templates import read_template, template_name
from flowrl.rewards.networks import pretrained, qwen_vl
from flowrl.rewards.networks.qwen_vl import QWEN3_VL, Checkpoint, CheckpointOptions, Dtype
from flowrl.runtime.shapes import Float

HEADS = ("rm_head.", "cond_encoder.", "film_gen.", "cap_encoder.")
STEPS = 1000
OWNER = "reward 'hpsv3_plus'"


class ModulatedHead(nn.Module):
    """[..., d] hidden states to [..., 3]: score, log of its spread, how able the generator looks; weights named as in
    the checkpoint."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.rm_head = preference_head(width)
        self.cond_encoder = nn.Sequential(nn.Linear(2, inner), nn.GELU(), nn.Linear(inner, inner))
        self.film_gen = nn.Sequential(nn.Linear(inner, width), nn.ReLU(), nn.Linear(width, 2 * width))
        # pool_attn, its weights over several images, is 1 for one image.
        self.cap_encoder = nn.ModuleDict(
            {"proj": nn.Linear(width, inner), "pool_attn": nn.Linear(inner, 1), "out_proj": nn.Linear(inner, 1)}
        )

    def forward(self, hidden: Float[Tensor, " *b d"], trained: float = 0.0) -> Float[Tensor, " *b 3"]:
        able = torch.sigmoid(self.cap_encoder["out_proj"](self.cap_encoder["proj"](hidden)))
        known = torch.cat([able, torch.full_like(able, trained)], -1)
        gamma, beta = self.film_gen(self.cond_encoder(known)).chunk(2, -1)
        return torch.cat([self.rm_head(hidden * (1 + gamma) + beta), able], -1)


def _head(width: int, weights: Mapping[str, Tensor]) -> ModulatedHead:
    """The head, as wide inside as its weights say."""
    if (name := "cond_encoder.0.bias") not in weights:
        raise ValueError(f"{OWNER}: the checkpoint lacks {name}, so it is not HPSv3++ (a plain HPSv3 is reward hpsv3).")
    return ModulatedHead(width, len(weights[name]))


@dataclass(frozen=True, kw_only=True, slots=True)
class Hpsv3Plus(CheckpointOptions):
    """HPSv3++'s score of image and prompt, on its own scale; needs about 18 GB in bfloat16.

    The generator's ability is judged from each image alone, as the repository does for batches of one. In larger
    batches the repository pools images, so a score depends on its neighbours. Part: `capability`, c above. The
    text is HPSv3's (MIT) without its half on agreement with the prompt, as the checkpoint was trained; the repository
    states no licence of weights and code.
    """

    published: ClassVar[Checkpoint] = Checkpoint(
        name="hpsv3_plus", tokens=(TOKEN,), make_head=_head, family=QWEN3_VL, heads=HEADS, file="hpsv3++.pth"
    )
    model: str = "Junjun2333/HPSv3-PlusPlus"
    """The file hpsv3++.pth, a folder that holds it, or a hub id."""
    revision: str | None = None
    """Branch, tag or commit of `model` on the hub."""
    base: str = "Qwen/Qwen3-VL-8B-Instruct"
    """The Qwen3-VL 8B, a folder or a hub id; only its configuration and processor are used, not its weights."""
    base_revision: str | None = None
    """Likewise of `base`."""
    trained: float | None = 0.0
    """t above, min(1, steps / 1000) of the generator's own training; 0 for any image, as published scores have it; null
    takes the run's iteration."""
    dtype: Dtype = "bfloat16"
    """Precision of the backbone; the head and what modulates it run in float32."""
    batch_size: int = 1
    """Images that the model sees at once; with one, no score depends on the others."""

    def __post_init__(self) -> None:
        if self.trained is not None:
            share("trained", self.trained)
        self.check()

    def build(self, device: torch.device) -> Reward:
        """Loads model and processor."""
        text = read_template("hpsv3_plus", None, source="hpsv3", once=(qwen_vl.PROMPT, TOKEN))
        (scorer,) = self.scorers([text], device, position_mode="mrope", resize=True)

        def score(inputs: RewardInputs) -> RewardOutput:
            trained = min(1.0, inputs.iteration / STEPS) if self.trained is None else self.trained
            reader = replace(scorer, read=partial(scorer.network.head, trained=trained))
            values, _, able = read_images(inputs, reader, self.batch_size).unbind(-1)
            return output_of(values.tolist(), inputs, {"capability": able.tolist()})

        version = (
            f"hpsv3_plus:{self.model}@{pretrained.fingerprint(scorer.network.head.parameters())}:"
            f"{template_name(text)}:trained-{'run' if self.trained is None else format(self.trained, 'g')}:{PIXELS}px:"
            f"{self.dtype}"
        )
        return FunctionReward(name="hpsv3_plus", score=score, needs=frozenset({"images", "prompts"}), version=version)
