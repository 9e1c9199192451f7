"""How well an image matches its prompt, by the cosine of CLIP's embeddings: CLIPScore and PickScore.

CLIPScore: Hessel et al. 2021, arXiv 2104.08718. PickScore: CLIP ViT-H/14 trained on people's choices between two images
of a prompt, Kirstain et al. 2023, arXiv 2305.01569. Published uses differ in the model, its preprocessing and the
scaling, see `SCALES`. Group-relative methods see a factor only by the floor of the deviation and in sums.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from flowrl.rewards.base import Reward
from flowrl.rewards.base.text_limits import TextLimit, clip_limit
from flowrl.rewards.networks import clip_encoder
from flowrl.rewards.networks.clip_encoder import CLIP_MODEL, Library, Preprocess
from flowrl.rewards.networks.pretrained import OneModel, check_model

PICK_SCORE_MODEL = "yuvalkirstain/PickScore_v1"

SCALES: dict[str, Callable[[Tensor, float], Tensor]] = {
    "cosine": lambda cosine, scale: cosine,  # Flow-Factory, Pref-GRPO, MixGRPO (CLIP); DanceGRPO, Pref-GRPO (PickScore)
    "logits": lambda cosine, scale: scale * cosine,  # the model's own logits
    "logits_100": lambda cosine, scale: scale * cosine / 100.0,  # DiffusionNFT, Edit-R1
    "logits_30": lambda cosine, scale: scale * cosine / 30.0,  # Adv-GRPO, PaCo-RL, UniRL
    "paper": lambda cosine, scale: 2.5 * cosine.clamp(min=0.0),  # the original metric
    "flow_grpo": lambda cosine, scale: scale * cosine / 26.0,  # Flow-GRPO, PaCo-RL, Flow-Factory, verl-omni, UniRL
    "mixgrpo": lambda cosine, scale: (scale * cosine - 18.0) / 8.0,  # MixGRPO
    "raw": lambda cosine, scale: scale * cosine,  # the checkpoint's own logit
}
"""The score from a cosine, with its users; `scale` is exp(logit_scale), 100 in OpenAI's checkpoints."""


class ClipOptions(OneModel):
    """What rewards from a CLIP's cosine have in common; each states its fields itself."""

    __slots__ = ()
    name: ClassVar[str]
    differentiable: ClassVar[bool] = True
    library: Library = "transformers"
    revision: str | None
    preprocess: Preprocess
    scale: str
    threshold: float | None

    @property
    def text_limit(self) -> TextLimit:
        """What CLIP reads."""
        return clip_limit(self.model)

    def build(self, device: torch.device) -> Reward:
        """Loads the model."""
        encoder = clip_encoder.load_encoder(
            self.library,
            self.model,
            device=device,
            revision=self.revision,
            preprocess=self.preprocess,
            owner=f"reward {self.name!r}",
        )
        version = f"{self.model}:{self.scale}"
        return clip_encoder.prompt_reward(
            self.name, encoder, SCALES[self.scale], threshold=self.threshold, version=version
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ClipScore(ClipOptions):
    """CLIP's scaled cosine of image and prompt, in float32; differentiable with `preprocess` bilinear or bicubic."""

    model: str = CLIP_MODEL
    """With transformers a local folder or an id on the hub; with open_clip `architecture/weights` such as
    ViT-H-14/laion2b_s32b_b79k, `hf-hub:owner/name` or `local-dir:folder`."""
    revision: str | None = None
    """Branch, tag or commit on the hub."""
    library: Library = "transformers"
    """What loads the model and prepares the images."""
    preprocess: Preprocess = "processor"
    """`processor`, the checkpoint's own on 8-bit images; `bilinear` or `bicubic`, on float images. DiffusionNFT,
    Edit-R1, Adv-GRPO and PaCo-RL use `bilinear`."""
    scale: Literal["cosine", "logits", "logits_100", "logits_30", "paper"] = "cosine"
    """See `SCALES`."""
    threshold: float | None = None
    """Makes the reward `1[score > threshold]`; DanceGRPO's binary reward takes 0.39 of the cosine."""
    name: ClassVar[str] = "clip_score"

    def __post_init__(self) -> None:
        if self.library == "transformers":
            return check_model(self.model, what="CLIP")
        for option, value, default in (("revision", self.revision, None), ("preprocess", self.preprocess, "processor")):
            if value != default:
                raise ValueError(f"{option} is for library transformers; open_clip takes its own: leave it out.")
        return clip_encoder.check_open_clip(self.model)


@dataclass(frozen=True, kw_only=True, slots=True)
class PickScore(ClipOptions):
    """PickScore under a published scaling, differentiable with `preprocess` bilinear or bicubic. In float32: half
    precision changes the third decimal, and scores of a group differ by 0.005 to 0.02."""

    model: str = PICK_SCORE_MODEL
    """A CLIP of transformers with tokenizer and preprocessor, a local folder or an id on the hub."""
    revision: str | None = None
    """Branch, tag or commit on the hub."""
    preprocess: Preprocess = "processor"
    """`processor`, the checkpoint's own on 8-bit images; `bilinear` or `bicubic`, on float images."""
    scale: Literal["flow_grpo", "cosine", "mixgrpo", "raw"] = "flow_grpo"
    """See `SCALES`."""
    threshold: float | None = None
    """Makes the reward `1[score > threshold]`."""
    name: ClassVar[str] = "pick_score"

    def __post_init__(self) -> None:
        check_model(self.model, what="CLIP")
