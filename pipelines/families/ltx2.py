"""LTX-2, videos with sound: any checkpoint that stock `LTX2Pipeline` or `LTX2ImageToVideoPipeline` loads.

One network `LTX2VideoTransformer3DModel` answers for tokens of video and of sound, both fed 1000 * sigma on one grid,
which is shifted by the number of video tokens. A state is `[tokens, channels]`: the video's tokens, then the sound's,
which have equally many channels. Gemma 3 and connectors embed a prompt, once for each kind. Guidance is two-pass
classifier-free guidance, with a scale of its own for the sound where one is set. Left out are the stock call's other
kinds of guidance (`stg_scale`, `modality_scale`, which ask the network twice more) and its rescale: our deterministic
sampler draws what stock draws with them off. From a source image, compressed as the model's own clips were, the video's
first tokens are held at the image's and fed at time 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from diffusers import LTX2VideoTransformer3DModel
from torch import Tensor

from flowrl.media.images import to_pixels
from flowrl.pipelines.arithmetic.attention_words import Attends
from flowrl.pipelines.families import ltx_video, wan
from flowrl.pipelines.families.ltx_video import LTXVideoOptions
from flowrl.pipelines.shared import common
from flowrl.pipelines.shared.cards import Card, FirstFrameOptions, Size, from_first_frame, read_part
from flowrl.pipelines.shared.family_pipeline import Family, FamilyPipeline
from flowrl.pipelines.shared.stock_schedules import check_flow_scheduler, flow_levels_of
from flowrl.runtime.capabilities import at_least_version
from flowrl.runtime.private_names import apply_image_conditioning_crf
from flowrl.runtime.versions import version_of
from flowrl.samplers.guidance_rules import linear_cfg
from flowrl.trajectory import Conditioning

LORA_TARGETS = ("to_q", "to_k", "to_v", "to_out.0")
"""All attention: of either kind, to the text, and of each kind to the other."""

LEAST = "5.10.1"
"""The first release of transformers with Gemma 4, which diffusers imports beside Gemma 3."""


@dataclass(frozen=True, kw_only=True)
class LTX2Options(LTXVideoOptions, FirstFrameOptions):
    """Options of LTX-2, whose network reads `fps`."""

    sound_guidance_scale: float | None = None
    """Guidance of the sound, if the video's is not 1; None takes the video's scale."""

    def __post_init__(self) -> None:
        if not at_least_version(found := version_of("transformers") or "0", LEAST):
            raise ValueError(f"stock LTX-2 needs transformers {LEAST} or newer, and {found} is installed: update it")


def _video_tokens(p: FamilyPipeline) -> int:
    return math.prod(p.grid_shape[1:])


def _packed(p: FamilyPipeline) -> tuple[int, ...]:
    """Tokens of the video and of a sound as long: 25 a second of the published checkpoints."""
    config = p.card.network
    per_second = config.audio_sampling_rate / config.audio_hop_length / float(config.audio_scale_factor)
    return _video_tokens(p) + round(p.image_shape[0] / (p.fps or 24.0) * per_second), p.grid_shape[0]


def _refuse(card: Card) -> None:
    """States hold one token after the other, whichever kind: all of one width, and of one latent pixel."""
    config = card.network
    patches = {config.patch_size, config.patch_size_t, config.audio_patch_size, config.audio_patch_size_t}
    if patches != {1} or config.in_channels != config.audio_in_channels:
        raise ValueError(
            f"{card.model} has patches of {sorted(patches)} and {config.in_channels} channels of video and "
            f"{config.audio_in_channels} of sound: this family takes networks with patches of 1 and as many channels "
            "of both, as all published ones have"
        )


def _tokens(card: Card, options: LTX2Options) -> int:
    """Connectors fill up prompts with registers that repeat: a whole number of times."""
    length = 1024 if options.max_sequence_length is None else options.max_sequence_length
    config = read_part(card.model, "connectors/config.json") or {}
    registers = config.get("video_connector_num_learnable_registers", 128) or 1
    if length < 1 or length % registers:
        raise ValueError(
            f"pipeline.max_sequence_length ({length}) must be a multiple of {registers} for {card.model}, the "
            "registers of its connectors"
        )
    return length


def _embed(p: FamilyPipeline, prompt: str, _: Sequence[Tensor]) -> dict[str, Tensor]:
    hidden, mask, _none, _nomask = p.pipe.encode_prompt(
        [prompt], do_classifier_free_guidance=False, max_sequence_length=p.max_sequence_length, device=p.device
    )
    side = p.pipe.tokenizer.padding_side
    video, sound, read = p.pipe.connectors(hidden, mask, padding_side=side)
    return {"embeds": video.to(p.dtype), "sound_embeds": sound.to(p.dtype), "mask": read}


def _conditioning(p: FamilyPipeline, tokens: int) -> dict[str, Tensor]:
    config = p.card.network
    widths = (config.caption_channels, config.caption_channels)
    if not config.use_prompt_embeddings:  # LTX-2.3's connectors give the network's own widths
        widths = (config.cross_attention_dim, config.audio_cross_attention_dim)
    video, sound = (common.meta(1, tokens, width) for width in widths)
    found = {"embeds": video, "sound_embeds": sound, "mask": common.meta(1, tokens)}
    if p.num_sources[1]:
        found["first_frame"] = common.meta(1, math.prod(p.grid_shape[2:]), p.grid_shape[0])
    return found


def _embed_sources(p: FamilyPipeline, sources: Sequence[Tensor]) -> dict[str, Tensor]:
    """A first frame's tokens, of the image at the quality of the clips that the model learned from."""
    quality = 18 if "Gemma4" in str(p.card.index.get("text_encoder")) else 33
    pixels = apply_image_conditioning_crf(to_pixels(sources[0]), quality)
    return {"first_frame": wan.encode(p, wan.as_clip(p, pixels)).flatten(2).transpose(1, 2)}


def _arguments(p: FamilyPipeline, x: Tensor, timestep: Tensor, cond: Conditioning) -> dict[str, Any]:
    frames, height, width = p.grid_shape[1:]
    count, times = _video_tokens(p), common.token_times(timestep, cond, (frames, height, width))
    return {
        "hidden_states": x[:, :count], "audio_hidden_states": x[:, count:],
        "encoder_hidden_states": cond.tensors["embeds"], "audio_encoder_hidden_states": cond.tensors["sound_embeds"],
        "timestep": times, "audio_timestep": timestep, "sigma": timestep, "use_cross_timestep": True,
        "encoder_attention_mask": cond.tensors["mask"], "audio_encoder_attention_mask": cond.tensors["mask"],
        "num_frames": frames, "height": height, "width": width,
        "fps": p.fps or 24.0, "audio_num_frames": x.shape[1] - count,
    }  # fmt: skip


def _evaluate(p: FamilyPipeline, x: Tensor, timestep: Tensor, cond: Conditioning) -> Tensor:
    """Velocity of both kinds in float32."""
    with common.autocast(p.device, p.dtype):
        given = _arguments(p, common.shown(x.to(p.dtype), cond), timestep, cond)
        video, sound = p.experts["transformer"](**given, return_dict=False)
    return torch.cat([video, sound], dim=1).float()


def _of_each_kind(negative: Tensor, positive: Tensor, scale: float, *, count: int, sound: float | None) -> Tensor:
    """Linear guidance of the first `count` tokens, and of the others at the sound's scale."""
    if sound is None:
        return linear_cfg(negative, positive, scale)
    parts = [
        linear_cfg(negative[:, part], positive[:, part], own)
        for part, own in ((slice(None, count), scale), (slice(count, None), sound))
    ]
    return torch.cat(parts, dim=1)


def _encode(p: FamilyPipeline, x: Tensor) -> Tensor:
    raise ValueError(
        f"clips cannot be turned into latents of {p.model}, which hold their sound too: take a method that trains on "
        "what the model draws itself"
    )


def _decode_sound(p: FamilyPipeline, z: Tensor) -> Tensor:
    """By the sound's autoencoder to a mel spectrogram, by the vocoder to a wave."""
    vae = p.pipe.audio_vae
    tokens = z[:, _video_tokens(p) :] * vae.latents_std + vae.latents_mean
    bins = vae.config.mel_bins // vae.mel_compression_ratio
    mel = vae.decode(tokens.unflatten(2, (-1, bins)).transpose(1, 2), return_dict=False)[0]
    sound: Tensor = p.pipe.vocoder(mel)
    return sound


FAMILY = Family(
    name="ltx2", title="LTX-2", network=LTX2VideoTransformer3DModel, lora_targets=LORA_TARGETS, options=LTX2Options,
    encoders=("text_encoder", "connectors"), exact=("vae", "audio_vae", "vocoder"), length=1024,
    own_size=lambda card: Size(height=512, width=768, num_frames=121, fps=24.0), grid=ltx_video.grid,
    factors=ltx_video.factors, tokens=_tokens, embed=_embed, arguments=_arguments, evaluate=_evaluate,
    conditioning=_conditioning, schedule=flow_levels_of(sigmas="linspace", tokens=_video_tokens),
    constants=ltx_video.constants,
    guided=lambda p, asked: common.two_pass_guidance(
        asked, rule=partial(_of_each_kind, count=_video_tokens(p), sound=p.options.sound_guidance_scale)
    ),
    decode=lambda p, z: ltx_video.decode(
        p, z[:, : _video_tokens(p)].transpose(1, 2).unflatten(2, p.grid_shape[1:])
    ),
    encode=_encode, refuse=_refuse, embed_sources=_embed_sources,
    **from_first_frame("LTX2Pipeline", "LTX2ImageToVideoPipeline"),
    suits=ltx_video.suits, check_scheduler=check_flow_scheduler,
    attention=Attends(
        head_sizes=lambda config: (config.attention_head_dim, config.audio_attention_head_dim), mask="bias"
    ),
    sound=common.Sound(
        packed=_packed, rate=lambda p: int(p.pipe.vocoder.config.output_sampling_rate), decode=_decode_sound
    ),
    parts={
        "video": lambda p: (..., slice(None, _video_tokens(p)), slice(None)),
        "sound": lambda p: (..., slice(_video_tokens(p), None), slice(None)),
    },
)  # fmt: skip
