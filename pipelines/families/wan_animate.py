"""Wan 2.2 Animate, a character that moves as in a video: any checkpoint that stock `WanAnimatePipeline` loads.

A prompt has one image, the character, and clips `[F, 3, h, w]` told apart by their order: the pose and the face video;
and where the character takes another's place, the video that stays and its mask, white where the character is drawn.
Clips are scaled to cover the drawn size (the face the motion encoder's) and cut to it, and as many of their first
frames are read as are drawn. Stock draws a long clip in segments, each from the last one's end; a state is the first.

The network is Wan's, image to video: beside the noisy channels stand the character's latents, as a latent frame before
the clip's, and those of what stays. That frame is part of a state, denoised with it and dropped before decoding. The
pose's latents are added to the patches, and a motion encoder reads the face. Guidance, which stock leaves off, is
two-pass classifier-free guidance whose negative half sees a black face.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from diffusers import WanAnimateTransformer3DModel
from PIL import Image
from torch import Tensor

from flowrl.media.images import to_pixels
from flowrl.pipelines.families import wan
from flowrl.pipelines.families.wan_vace import fit
from flowrl.pipelines.shared import common
from flowrl.pipelines.shared.cards import Size, VideoOptions
from flowrl.pipelines.shared.common import Guidance
from flowrl.pipelines.shared.family_pipeline import FamilyPipeline
from flowrl.samplers.guidance import Velocity
from flowrl.trajectory import Conditioning

_CLIPS = ("pose_video", "face_video", "source_video", "mask_video")
"""Keys of a prompt's row that name its clips, in this order."""


def embed_sources(p: FamilyPipeline, sources: Sequence[Tensor]) -> dict[str, Tensor]:
    """What stands beside the noise, `[1, f + C, 1 + F', h, w]`; the pose, the face's pixels and CLIP's tokens."""
    frames, _rgb, height, width = p.image_shape
    clips, images = ([one for one in sources if one.ndim == ndim] for ndim in (4, 3))
    if len(images) != 1 or len(clips) not in (2, 4):
        raise ValueError(
            f"a prompt of wan_animate has one image under 'source' and {_CLIPS[0]} and {_CLIPS[1]}, or all of "
            f"{', '.join(_CLIPS)}; got {len(images)} images and {len(clips)} clips"
        )
    face_size = 2 * (p.card.network.motion_encoder_size,)
    pose, face = (2 * fit(p, clip, size) - 1 for clip, size in zip(clips, ((height, width), face_size), strict=False))
    stays: dict[str, Any] = {"task": "animate"}
    if len(clips) > 2:
        common.check_mask(clips[2], clips[3], "a source video")
        background, mask = (fit(p, clip, (height, width)) for clip in clips[2:])
        stays = {"task": "replace", "background_video": 2 * background - 1, "mask_video": mask[:, :1]}
    image = Image.fromarray(to_pixels(images[0]))
    pixels = p.pipe.vae_image_processor.preprocess(image, height=height, width=width, resize_mode="fill")
    reference = p.pipe.prepare_reference_image_latents(pixels.float(), device=p.device)
    rest = p.pipe.prepare_prev_segment_cond_latents(
        segment_frame_length=frames, height=height, width=width, device=p.device, **stays
    )
    found = {
        "beside": torch.cat([reference, rest], dim=2),
        "pose": p.pipe.prepare_pose_latents(pose, device=p.device),
        "face": face,
        "image": p.pipe.encode_image(image, p.device),
    }
    return {name: tensor.to(p.dtype) for name, tensor in found.items()}


def guided(p: FamilyPipeline, asked: Guidance) -> Velocity:
    """In two passes, the negative one with a black face."""
    if asked.negative is not None:
        black = torch.full_like(asked.negative.tensors["face"], -1)
        asked = replace(asked, negative=Conditioning({**asked.negative.tensors, "face": black}))
    return common.two_pass_guidance(asked)


def encode(p: FamilyPipeline, x: Tensor) -> Tensor:
    """Refused."""
    raise ValueError(
        f"finished clips have no latents of the character's frame, a part of what {p.model} draws: choose a method "
        "that draws its own clips"
    )


FAMILY = replace(
    wan.FAMILY, name="wan_animate", title="Wan Animate", network=WanAnimateTransformer3DModel,
    denoisers=("transformer",), options=VideoOptions, clips=_CLIPS, needed_clips=_CLIPS[:2],
    own_size=lambda card: Size(height=720, width=1280, num_frames=77, fps=30.0),
    embed_sources=embed_sources, guided=guided,
    arguments=lambda p, x, timestep, cond: wan.FAMILY.arguments(p, x, timestep, cond) | {
        "pose_hidden_states": cond.tensors["pose"].to(x), "face_pixel_values": cond.tensors["face"].to(x),
    },
    conditioning=lambda p, tokens: wan.FAMILY.conditioning(p, tokens) | {
        "pose": common.meta(1, *p.grid_shape),
        "face": common.meta(1, 3, p.image_shape[0], *2 * (p.card.network.motion_encoder_size,)),
    },
    count_sources=lambda card, options: (1, 1 + len(_CLIPS)),
    # The character's frame, then those of the clip
    state=lambda p: (p.grid_shape[0], 1 + p.grid_shape[1], *p.grid_shape[2:]),
    decode=lambda p, z: wan.FAMILY.decode(p, z[:, :, 1:]), encode=encode, suits=lambda card, options: None,
    stock_class=lambda card, options: card.stock,
)  # fmt: skip
