"""CLIP as rewards use it: unit embeddings of images and texts, from transformers or open_clip, and scores of both.

Scorers run in float32 with autocast off: scores of a group differ by about 0.01, which half precision would round away.

Shapes: b images, d the width of the embeddings.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from PIL import Image
from torch import Tensor

from flowrl.config.strict_yaml import read_mapping
from flowrl.rewards.base import FunctionReward, RewardInputs, RewardOutput, tensor_output, to_uint8
from flowrl.rewards.networks import pretrained
from flowrl.rewards.networks.pretrained import check_shapes
from flowrl.runtime.precision import network_autocast
from flowrl.runtime.shapes import Float

CLIP_MODEL = "openai/clip-vit-large-patch14"
CLIP_MEAN, CLIP_STD = [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]

Library = Literal["transformers", "open_clip"]
Preprocess = Literal["processor", "bilinear", "bicubic"]
"""How an image becomes the network's input. `processor`: rounded to 8 bits, then as the checkpoint's own processor
does it; no gradient. `bilinear` and `bicubic`: the float image, short side to the network's size (antialiased), the
middle square, OpenAI's mean and deviation; the gradient flows."""

Scaling = Callable[[Tensor, float], Tensor]
"""Cosines [b] and exp(logit_scale) -> scores [b]."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ClipEncoder:
    """A loaded CLIP."""

    images: Callable[[Float[Tensor, " b 3 h w"]], Float[Tensor, " b d"]]
    """Float [b, 3, H, W] in [0, 1], on any device -> unit embeddings [b, d] on `device`."""
    texts: Callable[[list[str]], Float[Tensor, " b d"]]
    """b texts -> unit embeddings [b, d] on `device`."""
    logit_scale: float
    """Exp of the checkpoint's `logit_scale`."""
    device: torch.device
    """The network's device."""
    differentiable: bool
    """Whether `images` lets the gradient through."""
    version: str
    """Fingerprint of the weights and the preprocessing, for `Reward.version`."""


# ---- transformers ----------------------------------------------------------------------------------------------------


def transformers_clip(
    model: str, *, device: torch.device, revision: str | None, preprocess: Preprocess, owner: str
) -> ClipEncoder:
    """A `CLIPModel` from a folder or the hub, shared with every reward that asks for the same. Raises ValueError: if it
    cannot be had; `model` is named as the option to change."""
    network, processor = pretrained.load_clip(model, revision=revision, device=device, owner=owner)
    size = network.config.vision_config.image_size

    def pixels(images: Tensor) -> Tensor:
        if preprocess == "processor":
            return pretrained.process_images(processor.image_processor, to_uint8(images))
        return float_pixels(images, size=size, interpolation=preprocess)

    how = type(processor.image_processor).__name__ if preprocess == "processor" else f"float-{preprocess}"
    return encoder_of(
        network, processor.tokenizer, pixels, device=device, differentiable=preprocess != "processor", how=how
    )


def encoder_of(
    network: Any,
    tokenizer: Any,
    pixels: Callable[[Tensor], Tensor],
    *,
    device: torch.device,
    differentiable: bool,
    how: str,
) -> ClipEncoder:
    """A `CLIPModel` of transformers with the given preprocessing, which `how` names."""
    return ClipEncoder(
        images=lambda images: pretrained.clip_image(network, pixels(images).to(device)),
        texts=lambda texts: pretrained.clip_text(network, tokenizer, texts, device),
        logit_scale=float(network.logit_scale.exp()),
        device=device,
        differentiable=differentiable,
        version=f"{pretrained.clip_fingerprint(network)}:{how}:float32",
    )


def float_pixels(
    images: Float[Tensor, " b 3 h w"], *, size: int, interpolation: Literal["bilinear", "bicubic"]
) -> Float[Tensor, " b 3 size size"]:
    """CLIP's input without rounding to 8 bits: short side to `size`, the middle square, normalised."""
    from torchvision.transforms import functional as vision  # a second, and most options are only checked

    mode = vision.InterpolationMode(interpolation)
    square = vision.center_crop(vision.resize(images, [size], mode, antialias=True), [size, size])
    return vision.normalize(square, CLIP_MEAN, CLIP_STD)


def clip_pixels(image: Image.Image, size: int) -> Float[Tensor, " 3 size size"]:
    """CLIP's input from an 8-bit image: short side to `size` (Pillow's bicubic), the middle square, normalised."""
    from torchvision.transforms import functional as vision

    square = vision.center_crop(vision.resize(image, [size], vision.InterpolationMode.BICUBIC), [size, size])
    return vision.normalize(vision.pil_to_tensor(square).float() / 255.0, CLIP_MEAN, CLIP_STD)


def _half(tower: Callable[[Tensor], Tensor], given: Tensor) -> Tensor:
    """Unit embeddings in float32 of one of a model's two towers."""
    with network_autocast(given.device):
        found = tower(given)
    return pretrained.unit(found.float())


# ---- open_clip -------------------------------------------------------------------------------------------------------

_HUB, _FOLDER = "hf-hub:", "local-dir:"


def check_open_clip(model: str) -> None:
    """Refuses a name that open_clip cannot know, without loading it; see `open_clip_encoder`."""
    if importlib.util.find_spec("open_clip") is None:
        raise ValueError("library open_clip needs a package: in flowrl's folder, pip install -e '.[open-clip]'.")
    if model.startswith(_FOLDER):
        if not Path(model.removeprefix(_FOLDER)).is_dir():
            raise ValueError(f"there is no folder {model.removeprefix(_FOLDER)!r}: give one that open_clip wrote.")
    elif not model.startswith(_HUB) and [bool(part) for part in model.split("/")] != [True, True]:
        raise ValueError(
            f"of library open_clip, model must be architecture/weights such as ViT-H-14/laion2b_s32b_b79k, "
            f"{_HUB}owner/name or {_FOLDER}folder, got {model!r}."
        )


def open_clip_encoder(model: str, *, device: torch.device, owner: str) -> ClipEncoder:
    """A model of open_clip with its preprocessing and tokenizer, shared as networks of transformers are; `model` is
    open_clip's `architecture/weights`, `hf-hub:owner/name`, or `local-dir:folder`."""
    import open_clip  # type: ignore[import-untyped]
    from open_clip.transform import PreprocessCfg, image_transform_v2  # type: ignore[import-untyped]

    name, _, weights = (model, "", "") if model.startswith((_HUB, _FOLDER)) else model.partition("/")

    def load() -> Any:
        made = open_clip.create_model(
            name, pretrained=weights or None, precision="fp32", device=device, require_pretrained=True
        )
        return made.eval().requires_grad_(False)

    try:
        network = pretrained.shared_network(("open_clip", model, str(device)), load)
        tokenizer = open_clip.get_tokenizer(name)
    except (RuntimeError, OSError, ValueError) as error:
        raise ValueError(
            f"{owner} could not load the open_clip model {model!r}: {pretrained.first_line(error)} Give model: "
            f"architecture/weights as open_clip.list_pretrained() names them, or {_HUB}owner/name "
            f"while the hub can be reached."
        ) from error
    config = PreprocessCfg(**network.visual.preprocess_cfg)
    transform = image_transform_v2(config, is_train=False)

    def pixels(images: Tensor) -> Tensor:
        return torch.stack([transform(Image.fromarray(image)) for image in to_uint8(images)]).to(device)

    # Of the last matrix of each tower: open_clip has towers of many kinds and names for their projections.
    last = {name.startswith("visual."): weight for name, weight in network.named_parameters() if weight.ndim == 2}
    weights = pretrained.fingerprint(last[tower] for tower in sorted(last))
    return ClipEncoder(
        images=lambda images: _half(network.encode_image, pixels(images)),
        texts=lambda texts: _half(network.encode_text, tokenizer(texts).to(device)),
        logit_scale=float(network.logit_scale.exp()),
        device=device,
        differentiable=False,
        version=f"{weights}:open_clip-{config.resize_mode}-{config.interpolation}:float32",
    )


def load_encoder(
    library: Library, model: str, *, device: torch.device, revision: str | None, preprocess: Preprocess, owner: str
) -> ClipEncoder:
    """The model of either library; see `transformers_clip` and `open_clip_encoder`."""
    if library == "open_clip":
        return open_clip_encoder(model, device=device, owner=owner)
    return transformers_clip(model, device=device, revision=revision, preprocess=preprocess, owner=owner)


# ---- scores ----------------------------------------------------------------------------------------------------------


def prompt_reward(
    name: str, encoder: ClipEncoder, scaling: Scaling, *, threshold: float | None, version: str
) -> FunctionReward:
    """The reward `scaling(cos(image, prompt), exp(logit_scale))`, as 0 or 1 if a threshold is given."""

    def score(inputs: RewardInputs) -> RewardOutput:
        with gradient_of(inputs, encoder), torch.autocast(encoder.device.type, enabled=False):
            # Only the pairs that belong together: the matrix of all pairs has the same diagonal and costs B^2.
            cosine = (encoder.images(inputs.images) * encoder.texts(inputs.prompts)).sum(-1)
            return score_output(scaling(cosine, encoder.logit_scale), inputs, threshold)

    return FunctionReward(
        name=name,
        score=score,
        needs=frozenset({"images", "prompts"}),
        version=f"{name}:{version}:{encoder.version}" + ("" if threshold is None else f":above-{threshold:g}"),
        differentiable=encoder.differentiable and threshold is None,
    )


def gradient_of(inputs: RewardInputs, encoder: ClipEncoder) -> torch.set_grad_enabled:
    """Records a graph only if the images need one and the encoder supports it; the weights are frozen."""
    return torch.set_grad_enabled(torch.is_grad_enabled() and encoder.differentiable and inputs.images.requires_grad)


def score_output(score: Float[Tensor, " b"], inputs: RewardInputs, threshold: float | None = None) -> RewardOutput:
    """Scores as an output on the images' device; with a threshold `1[score > threshold]`, the score as a part."""
    score = score.to(inputs.images.device)
    # A NaN may be outside the crop; the image is broken all the same.
    valid = torch.isfinite(score.detach()) & torch.isfinite(inputs.images.detach()).flatten(1).all(1)
    if threshold is None:
        return tensor_output(score, valid=valid)
    return tensor_output((score > threshold).float(), {"score": torch.where(valid, score, torch.nan)}, valid)


# ---- open_clip's names -----------------------------------------------------------------------------------------------


_NAMES = read_mapping(Path(__file__).with_name("clip_keys.yaml"))
_BLOCK = re.compile(r"(visual\.)?transformer\.resblocks\.(\d+)\.(.+)\.(weight|bias)")
_QKV = re.compile(r"(visual\.)?transformer\.resblocks\.(\d+)\.attn\.in_proj_(weight|bias)")


def to_transformers(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights of an open_clip `CLIP` with two transformers under the names of transformers' `CLIPModel`."""
    renamed: dict[str, Tensor] = {}
    unknown = []
    for name, tensor in state.items():
        if name in _NAMES["whole"]:
            renamed[_NAMES["whole"][name]] = tensor
        elif name in _NAMES["transposed"]:
            renamed[_NAMES["transposed"][name]] = tensor.T.contiguous()
        elif match := _QKV.fullmatch(name):
            layer, kind = _layer(match[1], match[2]), match[3]
            for letter, part in zip("qkv", tensor.chunk(3), strict=True):
                renamed[f"{layer}.self_attn.{letter}_proj.{kind}"] = part.contiguous()
        elif (match := _BLOCK.fullmatch(name)) and match[3] in _NAMES["in_block"]:
            renamed[f"{_layer(match[1], match[2])}.{_NAMES['in_block'][match[3]]}.{match[4]}"] = tensor
        else:
            unknown.append(name)
    if unknown:
        raise ValueError(
            f"{len(unknown)} of {len(state)} weights have no place in a CLIP model with two transformers (first: "
            f"{sorted(unknown)[0]}): give a checkpoint of open_clip's CLIP, such as one of HPSv2."
        )
    return renamed


def _layer(visual: str | None, number: str) -> str:
    return f"{'vision' if visual else 'text'}_model.encoder.layers.{number}"


def clip_from_open_clip(state: Mapping[str, Tensor], config: Any, *, owner: str) -> Any:
    """A frozen `CLIPModel` in float32 and evaluation mode, on all weights of the checkpoint."""
    from transformers import CLIPModel

    with torch.device("meta"):
        wanted = {name: tuple(tensor.shape) for name, tensor in CLIPModel(config).state_dict().items()}
    try:
        renamed = to_transformers(state)
    except ValueError as error:
        raise ValueError(f"{owner}: {error}") from error
    check_shapes(renamed, wanted, owner=owner, give="the checkpoint that this reward names")
    network = CLIPModel.from_pretrained(None, config=config, state_dict=renamed, dtype=torch.float32)
    return network.eval().requires_grad_(False)
