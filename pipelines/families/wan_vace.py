"""Wan VACE, clips drawn along a control video: any checkpoint that stock `WanVACEPipeline` loads.

Sources of a prompt are told apart by their dimensions. Clips `[F, 3, h, w]` come first: the control video, then its
mask, white where the clip is drawn and black where the control video stays; images `[3, h, w]` are references. Without
a mask all is drawn, without a control video from grey. Clips are scaled to cover the drawn size and cut to it, and as
many of their first frames are read as are drawn.

Beside the blocks of Wan there are control blocks, which read the normalised latents of what stays and of what is drawn
and the mask's pixels, folded into channels; their answers are added behind some of the blocks, `conditioning_scale`
times. Each reference image, on white, is a latent frame before the clip's: these frames are part of a state, denoised
with it and dropped before decoding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from diffusers import WanVACETransformer3DModel
from PIL import Image
from torch import Tensor, nn

from flowrl.media.images import to_pixels
from flowrl.pipelines.families import wan
from flowrl.pipelines.shared import common
from flowrl.pipelines.shared.cards import Card, VideoOptions, check_channels
from flowrl.pipelines.shared.family_pipeline import FamilyPipeline
from flowrl.trajectory import Conditioning

_CLIPS = ("source_video", "mask_video")
"""Keys of a prompt's row that name its clips, in this order."""


@dataclass(frozen=True, kw_only=True)
class VaceOptions(VideoOptions):
    """Options of Wan VACE, whose network does not read `fps`."""

    guidance_scale_2: float | None = None
    """Guidance of the second expert, if there is one; None takes the first's scale."""
    image_to_video: None = None
    """Nothing to choose: a source image is a reference, and first frames are given in a control video with a mask."""
    num_references: int = 0
    """Reference images of every prompt."""
    conditioning_scale: float = 1.0
    """Factor of the control blocks' answers."""

    def __post_init__(self) -> None:
        if self.num_references < 0:
            raise ValueError(f"pipeline.options.num_references must be at least 0, got {self.num_references}")


def _embed_sources(p: FamilyPipeline, sources: Sequence[Tensor]) -> dict[str, Tensor]:
    """What control blocks read, `[1, 2 C + f^2, R + F', h, w]`: of R references, then of the clip."""
    frames, _rgb, height, width = p.image_shape
    given = [source for source in sources if source.ndim == 4]
    if len(given) == len(_CLIPS):
        common.check_mask(given[0], given[1], "a control video")
    clips = [fit(p, clip, p.image_shape[2:]) for clip in given]
    images = [Image.fromarray(to_pixels(image)) for image in sources if image.ndim == 3]
    if len(images) != p.options.num_references or len(clips) > len(_CLIPS):
        raise ValueError(
            f"a prompt has {len(images)} reference images and {len(clips)} clips, and wan_vace as loaded with "
            f"pipeline.options.num_references={p.options.num_references} takes so many images and up to "
            f"{len(_CLIPS)} clips: set num_references to the number of images under 'sources', one for all prompts"
        )
    video, mask, references = p.pipe.preprocess_conditions(
        None, None, images or None, 1, height, width, frames, torch.float32, p.device
    )
    if clips:
        video = 2 * clips[0] - 1
    if len(clips) > 1:
        mask = clips[1]
    latents = p.pipe.prepare_video_latents(video, mask, references, None, p.device)
    # Pixels become channels, of the frames nearest to latents: [1, f^2, F', h, w].
    folded = nn.functional.pixel_unshuffle(mask[0, 0][:, None], p.card.factors[0]).transpose(0, 1)[None]
    size = (p.grid_shape[1], *folded.shape[3:])
    folded = nn.functional.interpolate(folded, size=size, mode="nearest-exact")
    folded = nn.functional.pad(folded, (0, 0, 0, 0, len(images), 0))
    return {"control": torch.cat([latents.float(), folded], dim=1).to(p.dtype)}


def fit(p: FamilyPipeline, clip: Tensor, size: tuple[int, ...]) -> Tensor:
    """The first frames of a clip, as many as are drawn, at a height and width, `[1, 3, F, h, w]`."""
    frames = p.image_shape[0]
    if len(clip) < frames:
        raise ValueError(
            f"a clip that a prompt names has {len(clip)} frames, and {frames} are drawn: give longer ones, or set "
            f"pipeline.num_frames to at most {len(clip)}"
        )
    fitted = [common.covering(frame.float(), *size) for frame in clip[:frames]]
    return torch.stack(fitted, dim=1)[None].to(p.device)


def _arguments(p: FamilyPipeline, x: Tensor, timestep: Tensor, cond: Conditioning) -> dict[str, Any]:
    given = wan.FAMILY.arguments(p, x, timestep, cond) | {"control_hidden_states": cond.tensors["control"].to(x)}
    if p.options.conditioning_scale != 1:
        scale = x.new_full((len(p.card.network.vace_layers),), p.options.conditioning_scale)
        given["control_hidden_states_scale"] = scale
    return given


def _encode(p: FamilyPipeline, x: Tensor) -> Tensor:
    if p.options.num_references:
        raise ValueError(
            f"finished clips have no latents of {p.options.num_references} reference images, which are a part of what "
            "is drawn: set pipeline.options.num_references=0"
        )
    return wan.FAMILY.encode(p, x)


def _refuse(card: Card) -> None:
    wan.FAMILY.refuse(card)
    channels = card.network.out_channels
    control = 2 * channels + card.factors[0] ** 2
    check_channels(card, "those of a Wan VACE with its VAE", in_channels=channels, vace_in_channels=control)


FAMILY = replace(
    wan.FAMILY, name="wan_vace", title="Wan VACE", network=WanVACETransformer3DModel, exact=("vae",),
    options=VaceOptions, clips=_CLIPS, embed_sources=_embed_sources, arguments=_arguments,
    # Without references, each of which costs a latent frame more
    conditioning=lambda p, tokens: {
        **wan.FAMILY.conditioning(p, tokens),
        "control": common.meta(1, p.card.network.vace_in_channels, *p.latent_shape[1:]),
    },
    count_sources=lambda card, options: (options.num_references, options.num_references + len(_CLIPS)),
    # Latent frames of the references, then those of the clip
    state=lambda p: (p.grid_shape[0], p.options.num_references + p.grid_shape[1], *p.grid_shape[2:]),
    decode=lambda p, z: wan.FAMILY.decode(p, z[:, :, p.options.num_references :]), encode=_encode, refuse=_refuse,
    suits=wan.suits_experts, stock_class=lambda card, options: card.stock,
)  # fmt: skip
