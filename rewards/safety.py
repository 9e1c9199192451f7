"""How safe an image is for work: minus the probability that a classifier gives to its unsafe class.

The default is Falconsai/nsfw_image_detection, a ViT-B/16 at 224 with the classes normal and nsfw (Apache-2.0). No
published recipe trains on it. Use it as a gate: `gate: -0.5` in the list of rewards gives an unsafe sample
the lowest total of its group, rather than as one more term of a sum.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flowrl.rewards.base import FunctionReward, Reward, RewardInputs, RewardOutput, output_of, to_uint8
from flowrl.rewards.networks.pretrained import (
    OneModel,
    check_model,
    fingerprint,
    load_network,
    load_processor,
    process_images,
)
from flowrl.runtime.precision import network_autocast

OWNER, WHAT = "reward 'safety'", "ViT classifier"


@dataclass(frozen=True, kw_only=True, slots=True)
class Safety(OneModel):
    """A safety classifier's `-P(label)`, in [-1, 0]; 0 is safe. Of a video the first frame is judged; float32."""

    model: str = "Falconsai/nsfw_image_detection"
    """A `ViTForImageClassification`, a local folder or a hub id."""
    revision: str | None = None
    """Branch, tag or commit on the hub."""
    label: str = "nsfw"
    """The unsafe class, as the model's configuration names it."""

    def __post_init__(self) -> None:
        if not self.label:
            raise ValueError("label must name the unsafe class of the model, got an empty text.")
        check_model(self.model, what=WHAT)

    def build(self, device: torch.device) -> Reward:
        """Loads the model."""
        from transformers import ViTForImageClassification, ViTImageProcessor

        network = load_network(
            ViTForImageClassification, self.model, device=device, revision=self.revision, owner=OWNER, what=WHAT
        )
        processor = load_processor(ViTImageProcessor, self.model, revision=self.revision, owner=OWNER, what=WHAT)
        labels: dict[int, str] = network.config.id2label
        places = [place for place, name in labels.items() if name == self.label]
        if len(places) != 1:
            raise ValueError(
                f"{OWNER}: {self.model!r} has no class {self.label!r}; its classes: {', '.join(labels.values())}."
            )

        @torch.no_grad()
        def score(inputs: RewardInputs) -> RewardOutput:
            pixels = process_images(processor, to_uint8(inputs.images)).to(device)
            with network_autocast(device):
                logits = network(pixel_values=pixels).logits
            return output_of((-logits.cpu().double().softmax(-1)[:, places[0]]).tolist(), inputs)

        version = (
            f"safety:{self.model}@{fingerprint([network.classifier.weight])}:-P({self.label}):"
            f"{type(processor).__name__}:float32"
        )
        return FunctionReward(name="safety", score=score, needs=frozenset({"images"}), version=version)
