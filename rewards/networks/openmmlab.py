"""GenEval's own detector: OpenMMLab's Mask2Former Swin-S from its released file, in transformers' class.

mmdet itself, which GenEval runs, does not install on today's Python. The network is the same one: `openmmlab_keys` has
its names. Its input and output are processed as in `mask2former`, which follows OpenMMLab's pipeline.

The files are not shipped here and are not on the hub. Those that OpenMMLab released, by the first digits of their
sha256, which end their names:

    743b7d99    https://download.openmmlab.com/mmdetection/v2.0/mask2former/mask2former_swin-s-p4-w7-224_lsj_8x2_50e_coco/
    c9d0c4f2    https://download.openmmlab.com/mmdetection/v3.0/mask2former/mask2former_swin-s-p4-w7-224_8xb2-lsj-50e_coco/
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import torch

from flowrl.rewards.networks import pretrained
from flowrl.rewards.networks.clip_encoder import CLIP_MODEL as DEFAULT_CLIP
from flowrl.rewards.networks.detectors import Detector
from flowrl.rewards.networks.mask2former import UNREAD, Mask2Former, Mask2FormerDetector, check_classes
from flowrl.rewards.networks.openmmlab_keys import network_of

RELEASED = {
    "743b7d99": "mask2former_swin-s-p4-w7-224_lsj_8x2_50e_coco_20220504_001756-743b7d99.pth",
    "c9d0c4f2": "mask2former_swin-s-p4-w7-224_8xb2-lsj-50e_coco_20220504_001756-c9d0c4f2.pth",
}
"""First digits of the sha256 of a released file -> its name: that of mmdet 2, which GenEval's script fetches, and the
same training under the names of mmdet 3."""
OWNER = "judge 'openmmlab'"
_GIVE = (
    f"give detector: the path of {RELEASED['743b7d99']}, which OpenMMLab offers at download.openmmlab.com (the address "
    f"is in docs/benchmarks.md)"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenMMLab(Mask2Former):
    """Options of the detector, which runs in float32."""

    detector: str = ""
    """The released file, or another one of mmdet 2 or 3 of the same network and COCO's 80 classes."""
    clip_model: str = DEFAULT_CLIP
    """A CLIP model, a folder or an id on the hub; GenEval's is ViT-L/14 of OpenAI, the default here."""
    rgb_as_bgr: bool = False
    """Whether the detector sees red as blue and blue as red, as with Flow-GRPO's reward server, which hands arrays in
    RGB to a pipeline that takes arrays for BGR. Colours are named from the image as it is. GenEval's own script reads
    files and is not affected."""

    def __post_init__(self) -> None:
        if not self.detector:
            raise ValueError(f"{OWNER} has no file to load: {_GIVE}.")
        if not Path(self.detector).expanduser().is_file():
            raise ValueError(f"{OWNER}: there is no file {self.detector!r}: {_GIVE}.")
        pretrained.check_model(self.clip_model, what="CLIP", option="clip_model")

    def build(self, device: torch.device) -> Detector:
        """Loads both models."""
        path = Path(self.detector).expanduser()

        def load() -> torch.nn.Module:
            weights = pretrained.read_weights(path, owner=OWNER, others=True)
            network: torch.nn.Module = network_of(weights, unread=UNREAD, owner=OWNER).to(device)
            return network

        network = pretrained.shared_network(("openmmlab", str(path.resolve()), str(device)), load)
        check_classes(network, self.detector, owner=OWNER)
        clip, processor = pretrained.load_clip(self.clip_model, device=device, owner=OWNER, option="clip_model")
        with path.open("rb") as stream:
            digits = hashlib.file_digest(stream, "sha256").hexdigest()[:8]
        weights = f"released-{digits}" if digits in RELEASED else f"{path.name}@{digits}"
        apart = []  # what sets the judge apart from GenEval's own, a sentence each
        if digits not in RELEASED:
            apart.append(
                f"The detector's file (sha256 {digits}...) is not one that OpenMMLab released: numbers of this judge "
                f"are not GenEval's own."
            )
        if self.clip_model != DEFAULT_CLIP:
            apart.append(f"GenEval names colours by {DEFAULT_CLIP}, this judge by {self.clip_model}.")
        if self.rgb_as_bgr:
            apart.append(
                "The detector was shown red as blue, as by Flow-GRPO's reward server: compare with numbers of that "
                "server."
            )
        own = (
            "Rules, detector and colour model are GenEval's own: published numbers of the same prompts and images per "
            "prompt compare with these (network checked on random weights, not on this file)."
        )
        return Mask2FormerDetector(
            network=network,
            clip=clip,
            tokenizer=processor.tokenizer,
            device=device,
            swapped=self.rgb_as_bgr,
            remarks=tuple(apart) or (own,),
            version=f"openmmlab-1:{weights}:{'rgb_as_bgr' if self.rgb_as_bgr else 'rgb'}:"
            f"{self.clip_model}@{pretrained.clip_fingerprint(clip)}:float32",
        )
