"""How well a sound matches its prompt: the cosine of CLAP's embeddings.

CLAP: Wu et al. 2023, arXiv 2211.06687, in the classes of transformers. A sound is averaged over its channels, resampled
to the checkpoint's rate, and cut off after as many seconds as it reads; a shorter one is repeated, as published.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from flowrl.rewards.base import FunctionReward, Reward, RewardInputs, RewardOutput, tensor_output
from flowrl.rewards.networks.pretrained import OneModel, check_model, fingerprint, load_network, load_processor
from flowrl.rewards.sound.loudness import sounds_of

DEFAULT_MODEL = "laion/clap-htsat-unfused"


@dataclass(frozen=True, kw_only=True, slots=True)
class ClapScore(OneModel):
    """CLAP's cosine of sound and prompt, in float32."""

    judges: ClassVar[tuple[str, ...]] = ("sounds",)

    model: str = DEFAULT_MODEL
    """A CLAP of transformers with tokenizer and feature extractor, a local folder or an id on the hub."""
    revision: str | None = None
    """Branch, tag or commit on the hub."""

    def __post_init__(self) -> None:
        check_model(self.model, what="CLAP")

    def build(self, device: torch.device) -> Reward:
        """Loads the model."""
        from transformers import ClapModel, ClapProcessor

        given: dict[str, Any] = {"revision": self.revision, "owner": "reward 'clap_score'", "what": "CLAP"}
        network = load_network(ClapModel, self.model, device=device, **given)
        processor = load_processor(ClapProcessor, self.model, **given)
        ends = [half.linear2.weight for half in (network.audio_projection, network.text_projection)]

        @torch.no_grad()
        def score(inputs: RewardInputs) -> RewardOutput:
            sounds, rate = sounds_of(inputs, owner="reward 'clap_score'")
            finite = torch.isfinite(sounds).flatten(1).all(1)
            waves = prepare(torch.where(finite[:, None, None], sounds, 0.0), rate, processor.feature_extractor)
            extractor = processor.feature_extractor
            features = extractor(waves, sampling_rate=extractor.sampling_rate, return_tensors="pt").to(device)
            longest = network.config.text_config.max_position_embeddings - 2  # RoBERTa counts positions from 2
            text = processor.tokenizer(
                inputs.prompts, padding=True, truncation=True, max_length=longest, return_tensors="pt"
            )
            with torch.autocast(device.type, enabled=False):
                heard = network.get_audio_features(**features).pooler_output.float()
                said = network.get_text_features(**text.to(device)).pooler_output.float()
                cosine = torch.nn.functional.cosine_similarity(heard, said).to(inputs.images.device)
            return tensor_output(torch.where(finite.to(cosine.device), cosine, math.nan))

        version = f"clap_score:{self.model}:{fingerprint(ends)}:float32"
        return FunctionReward(name="clap_score", score=score, needs=frozenset({"prompts", "sounds"}), version=version)


def prepare(sounds: Tensor, rate: int, extractor: Any) -> list[np.ndarray]:
    """Sounds `[b, channels, samples]` in one channel at the extractor's rate, cut where it would pick at random."""
    from scipy.signal import resample_poly  # half a second, and most options are only checked

    mono = sounds.detach().float().mean(1).cpu().numpy()
    common = math.gcd(rate, extractor.sampling_rate)
    resampled = resample_poly(mono, extractor.sampling_rate // common, rate // common, axis=1)
    return [np.asarray(wave, dtype=np.float32) for wave in resampled[:, : extractor.nb_max_samples]]
