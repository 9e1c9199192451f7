"""GenEval's detector for photos: Mask2Former finds objects, CLIP names colours (Ghosh et al. 2023, arXiv 2310.11513).

Preprocessing, scores, boxes and colours are GenEval's; the weights are not. GenEval detects with OpenMMLab's training
of Mask2Former Swin-S, which `openmmlab` loads; this one takes Meta's own, as transformers loads it. Training against it
and comparing runs that use it is sound, but its numbers were not compared with the reference detector's: label them
"GenEval rules, transformers detector", and expect counting to differ most, by its threshold of 0.9.

Licence: Meta's Mask2Former weights are CC BY-NC 4.0, for non-commercial use only.

Shapes: b images [H, W], Q queries, C = 80 classes; n <= 100 detections of an image.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional

from flowrl.benchmarks.geneval.metadata import COLORS
from flowrl.benchmarks.geneval.published import CLASSES
from flowrl.benchmarks.geneval.rules import Detection
from flowrl.rewards.base import Model
from flowrl.rewards.networks import pretrained
from flowrl.rewards.networks.clip_encoder import CLIP_MODEL as DEFAULT_CLIP
from flowrl.rewards.networks.clip_encoder import clip_pixels
from flowrl.rewards.networks.detectors import Detector
from flowrl.rewards.networks.pretrained import model_of
from flowrl.runtime.precision import network_autocast
from flowrl.runtime.shapes import Bool, Float, Int32, Int64, UInt8

DEFAULT_DETECTOR = "facebook/mask2former-swin-small-coco-instance"

SHORT_SIDE, LONG_SIDE, MULTIPLE, PADDING = 800, 1333, 32, 128
PIXEL_MEAN, PIXEL_STD = (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)
MAX_DETECTIONS = 100
BACKGROUND = 153  # grey, #999
BATCH = 8  # images that the detector sees at once
MASK_SCORE = 0.05  # far below GenEval's threshold of 0.3

NOT_REFERENCE = (
    "The judge follows GenEval's rules with the detector of transformers, whose weights are not those of the "
    "benchmark's own: compare numbers of this judge with each other, not with published ones. The judge openmmlab has "
    "the benchmark's own."
)
UNREAD = ("model.pixel_level_module.encoder.swin.layernorm.*",)
"""Parameters of transformers 5's class that no output depends on, and that checkpoints of transformers 4 lack: the
backbone hands out its four stages under norms of their own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Mask2Former:
    """Options of the detector, which runs in float32."""

    detector: str = DEFAULT_DETECTOR
    """A Mask2Former for COCO instances with its 80 classes, a folder or an id on the hub."""
    clip_model: str = DEFAULT_CLIP
    """A CLIP model, likewise; GenEval's is ViT-L/14 of OpenAI, the default here."""

    def __post_init__(self) -> None:
        pretrained.check_model(self.detector, what="Mask2Former", option="detector")
        pretrained.check_model(self.clip_model, what="CLIP", option="clip_model")

    @property
    def models(self) -> tuple[Model, ...]:
        return model_of(self.detector), model_of(self.clip_model)

    def build(self, device: torch.device) -> Detector:
        """Loads both models."""
        from transformers import Mask2FormerForUniversalSegmentation

        owner = "judge 'mask2former'"
        network = pretrained.load_network(
            Mask2FormerForUniversalSegmentation,
            self.detector,
            device=device,
            owner=owner,
            option="detector",
            what="Mask2Former",
            unread=UNREAD,
        )
        check_classes(network, self.detector, owner=owner)
        clip, processor = pretrained.load_clip(self.clip_model, device=device, owner=owner, option="clip_model")
        return Mask2FormerDetector(
            network=network,
            clip=clip,
            tokenizer=processor.tokenizer,
            device=device,
            remarks=(NOT_REFERENCE,),
            version=f"mask2former-2:{self.detector}@{pretrained.fingerprint([network.class_predictor.weight])}:"
            f"{self.clip_model}@{pretrained.clip_fingerprint(clip)}:float32",
        )


def check_classes(network: Any, model: str, *, owner: str) -> None:
    """Refuses a detector of other classes than COCO's, by their number."""
    if (number := network.config.num_labels) != len(CLASSES):
        raise ValueError(
            f"{owner}: {model!r} knows {number} classes, GenEval's rules need COCO's {len(CLASSES)} in COCO's order: "
            f"give detector: a checkpoint for COCO instances, such as {DEFAULT_DETECTOR}."
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Mask2FormerDetector:
    """A `Detector` on loaded models."""

    network: Any
    clip: Any
    tokenizer: Any
    device: torch.device
    version: str
    remarks: tuple[str, ...]
    swapped: bool = False
    """Whether the detector is shown red as blue and blue as red."""
    colors: dict[str, Tensor] = field(default_factory=dict)
    """The text embeddings of the ten colours, by class name."""

    @torch.no_grad()
    def detect(self, images: UInt8[np.ndarray, " b h w 3"]) -> list[list[Detection]]:
        """The 100 best detections of each image, unfiltered; those below 0.05, which no threshold of GenEval lets
        through, have no mask: a hundred of every image would fill the memory."""
        found = list[list[Detection]]()
        for start in range(0, len(images), BATCH):
            part = torch.from_numpy(np.ascontiguousarray(images[start : start + BATCH])).to(self.device)
            pixels, fitted = preprocess(part.flip(-1) if self.swapped else part)
            with network_autocast(self.device):
                output = self.network(pixel_values=pixels)
            logits = output.class_queries_logits.float(), output.masks_queries_logits.float()
            for classes, masks in zip(*logits, strict=True):
                best = post_process(classes, masks, pixels.shape[-2:], fitted, part.shape[1:3])
                scores, queries = best.score.tolist(), best.query.tolist()
                # Detections of one query share its mask.
                shown = sorted({query for query, score in zip(queries, scores, strict=True) if score > MASK_SCORE})
                mask_of = dict(zip(shown, best.masks[shown].cpu().numpy(), strict=True))
                found.append([])
                rows = zip(best.label.tolist(), best.box.tolist(), scores, queries, strict=True)
                for label, box, score, query in rows:
                    mask = mask_of[query] if score > MASK_SCORE else None
                    found[-1].append(Detection(label=CLASSES[label], box=tuple(box), score=score, mask=mask))
        return found

    @torch.no_grad()
    def color_of(self, image: UInt8[np.ndarray, " h w 3"], detection: Detection) -> str:
        """The colour whose texts are nearest to the object: `argmax_c 100 cos(crop, text_c)`, nothing else allowed."""
        # An elongated object loses its ends here, as in GenEval.
        if detection.mask is not None:  # everything outside it is grey
            image = np.where(detection.mask[..., None], image, np.uint8(BACKGROUND))
        x1, y1, x2, y2 = (round(side) for side in detection.box)
        shown = Image.fromarray(image).crop((x1, y1, x2, y2))
        pixels = clip_pixels(shown, self.clip.config.vision_config.image_size)
        label = detection.label
        with torch.autocast(self.device.type, enabled=False):
            if label not in self.colors:
                # For each colour the mean of the unit embeddings of GenEval's three wordings, at length 1.
                wordings = (f"{{color}} {label}", f"{{color}}-colored {label}", "{color} object")
                texts = ["a photo of a " + wording.format(color=color) for color in COLORS for wording in wordings]
                vectors = pretrained.clip_text(self.clip, self.tokenizer, texts, self.device)
                self.colors[label] = pretrained.unit(vectors.unflatten(0, (len(COLORS), -1)).mean(1))
            crop = pretrained.clip_image(self.clip, pixels[None].to(self.device))
            logits = 100.0 * crop @ self.colors[label].T
        return COLORS[int(logits.argmax())]


def detector_size(height: int, width: int) -> tuple[int, int]:
    """Size with the same ratio whose short side is 800, or whose long side is 1333 if that is the smaller one."""
    scale = min(LONG_SIDE / max(height, width), SHORT_SIDE / min(height, width))
    return int(height * scale + 0.5), int(width * scale + 0.5)


def preprocess(images: UInt8[Tensor, " b h w 3"]) -> tuple[Float[Tensor, " b 3 hp wp"], tuple[int, int]]:
    """The detector's input, resized to 8 bits as in OpenCV and padded with grey, then normalised; and the size of the
    image in its top left."""
    fitted = detector_size(images.shape[1], images.shape[2])
    pixels = opencv_resize(images.permute(0, 3, 1, 2), *fitted).float()
    missing = [-side % MULTIPLE for side in fitted]
    pixels = functional.pad(pixels, (0, missing[1], 0, missing[0]), value=float(PADDING))
    mean, std = (pixels.new_tensor(values).view(3, 1, 1) for values in (PIXEL_MEAN, PIXEL_STD))
    return (pixels - mean) / std, fitted


def opencv_resize(images: UInt8[Tensor, " b 3 h w"], height: int, width: int) -> Int32[Tensor, " b 3 height width"]:
    """Bilinear without antialiasing in OpenCV's arithmetic for 8 bits, bit for bit: exact rounding gives another level
    in one pixel of eight.

    With columns x0, x1 and weights a0 + a1 = 2048 of an output column, likewise rows and b:
    `H = a0 S[x0] + a1 S[x1]`, then `((b0 (H[y0] >> 4) >> 16) + (b1 (H[y1] >> 4) >> 16) + 2) >> 2`.
    """
    x0, x1, a0, a1 = _taps(images.shape[3], width, images.device, columns=True)
    y0, y1, b0, b1 = _taps(images.shape[2], height, images.device, columns=False)
    given = images.int()
    across = (a0 * given[..., x0] + a1 * given[..., x1]) >> 4
    b0, b1 = b0[:, None], b1[:, None]
    return ((b0 * across[:, :, y0] >> 16) + (b1 * across[:, :, y1] >> 16) + 2) >> 2


def _taps(size: int, target: int, device: torch.device, *, columns: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """For each of `target` outputs its two inputs of `size`, and their weights in 2048ths. Beyond the edge the outer
    input counts twice: of columns with the whole weight, of rows with OpenCV's split, which shows in the rounding."""
    place = ((torch.arange(target, dtype=torch.float64) + 0.5) * (size / target) - 0.5).float()
    first = place.floor()
    rest = place - first
    if columns:
        rest[(first < 0) | (first >= size - 1)] = 0.0
    weights = ((2048 * (1 - rest)).round().int(), (2048 * rest).round().int())
    inputs = (first.long().clamp(0, size - 1), (first.long() + 1).clamp(0, size - 1))
    x0, x1, a0, a1 = (tensor.to(device) for tensor in (*inputs, *weights))
    return x0, x1, a0, a1


@dataclass(frozen=True, kw_only=True, slots=True)
class MaskFindings:
    """Detections of one image, best class probability first; `query` picks one of the queries' `masks`."""

    label: Int64[Tensor, " n"]
    query: Int64[Tensor, " n"]
    score: Float[Tensor, " n"]
    box: Int64[Tensor, " n 4"]
    masks: Bool[Tensor, " q h w"]


def post_process(
    class_logits: Float[Tensor, " q c_and_none"],
    mask_logits: Float[Tensor, " q hm wm"],
    padded: Sequence[int],
    fitted: Sequence[int],
    size: Sequence[int],
) -> MaskFindings:
    """Detections as GenEval's detector makes them (OpenMMLab's rules, not those of transformers' post-processing).

    `P = softmax(class_logits)` without the last class; the 100 largest P of all (query, class), so a query may appear
    under several classes. Mask `B = M > 0`, with M the logits at image size; the score is `P` times the mean of
    `sigmoid(M)` over B. The box is (x_min, y_min, x_max + 1, y_max + 1) of B, zeros if B is empty.

    Args:
        class_logits: [Q, C + 1], "no object" last.
        mask_logits: [Q, h, w] at the network's own, lower, resolution.
        padded: (height, width) of the network's input.
        fitted: (height, width) of the image in it.
        size: (height, width) of the image as it was given.
    """
    probability = class_logits.float().softmax(-1)[:, :-1]
    best, index = probability.flatten().topk(min(MAX_DETECTIONS, probability.numel()))
    query, label = index // probability.shape[1], index % probability.shape[1]
    logits = functional.interpolate(mask_logits.float()[None], size=tuple(padded), mode="bilinear", align_corners=False)
    logits = logits[..., : fitted[0], : fitted[1]]
    logits = functional.interpolate(logits, size=tuple(size), mode="bilinear", align_corners=False)[0]
    masks = logits > 0
    quality = (logits.sigmoid() * masks).flatten(1).sum(1) / (masks.flatten(1).sum(1) + 1e-6)
    sides = []
    for used in (masks.any(1), masks.any(2)):  # columns, rows
        first = used.int().argmax(1)
        end = used.shape[1] - used.int().flip(1).argmax(1)
        sides.append((first, end))
    (x1, x2), (y1, y2) = sides
    boxes = torch.stack([x1, y1, x2, y2], dim=1) * masks.flatten(1).any(1)[:, None]
    return MaskFindings(label=label, query=query, score=best * quality[query], box=boxes[query], masks=masks)
