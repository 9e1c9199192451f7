"""HPSv3: human preference by a fine-tuned Qwen2-VL 7B with a regression head (Ma et al. 2025, arXiv 2508.03789).

The image, resized to about 200,704 pixels (256 merged tokens), comes first in one user turn; the text asks for a
rating of quality and agreement with the prompt and ends in the token `<|Reward|>`. The head

    Linear(3584, 1024), ReLU, Dropout 0.05, Linear(1024, 16), ReLU, Linear(16, 2)        3,687,474 parameters

reads the last hidden state there. Its first output is the score, unbounded, about 0 to 15; its second a spread.

HPSv3++ (arXiv 2606.14657) knows how able a generator is and how far it was trained. It reads likewise with Qwen3-VL 8B;
before the head, its hidden state h is modulated by two numbers, how able the image's generator looks, and the share of
1000 steps of training behind it:

    c = sigmoid(out(proj(h))),     (gamma, beta) = film(cond([c, t])),     value = head(h (1 + gamma) + beta)[0]
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from flowrl.config.sections import share
from flowrl.rewards.base import FunctionReward, Reward, RewardInputs, RewardOutput, output_of, to_uint8
from flowrl.rewards.judges.templates import read_template, template_name
from flowrl.rewards.networks import pretrained, qwen_vl
from flowrl.rewards.networks.qwen_vl import QWEN3_VL, Checkpoint, CheckpointOptions, Dtype, PositionMode, TokenScorer
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


# ---- HPSv3++ ---------------------------------------------------------------------------------------------------------


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
