"""Qwen-Image-2.1 and its Turbo: any checkpoint that stock `QwenImage21Pipeline` loads, from text alone.

Velocity network `QwenImage21Transformer2DModel`, fed sigma and one token per latent pixel of 16 x 16 image pixels; one
Qwen3-VL text encoder. The prompt's tokens stand before the image's in one causal sequence, so that the image's position
is the prompt's length: a padded prompt would move the image, and stock draws a prompt otherwise in a batch with longer
ones. Here the rows of a call are evaluated apart by the lengths of their prompts, so that each is drawn as stock
draws it alone. Stock's cache of the prompt's keys over steps is left out, since an update changes them.

Guidance is two-pass and linear. Stock guides at scales above 1 only and ignores the others, here 1 alone is none and
scales below it mix. Checkpoints that name their own noise levels (`sample_sigmas`, the Turbo) are distilled for these
and for no guidance: their "diffusers" grid has exactly so many steps. The autoencoder has a channel of opacity; images
are drawn without it and encoded as opaque. Stock's source images are not read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from diffusers import QwenImage21Transformer2DModel
from torch import Tensor, nn

from flowrl.pipelines.arithmetic.attention_words import Attends
from flowrl.pipelines.families import qwen_image
from flowrl.pipelines.shared import common, stock_schedules
from flowrl.pipelines.shared.cards import Grid, Size, given
from flowrl.pipelines.shared.family_pipeline import Family, FamilyPipeline
from flowrl.trajectory import Conditioning, Schedule

LORA_TARGETS = (
    "attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0", "img_mlp.proj", "img_mlp.gate_layer", "img_mlp.out",
)  # fmt: skip
"""Attention and MLP of every block."""

SLOT = 4
"""Tokens of the image that one of its marks in the sequence stands for."""


class Marks(Tensor):
    """Marks of a sequence's image tokens on the host, for a network without numbers: it counts with them."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """A choice between tensors without numbers has none either."""
        if func is torch.where and any(isinstance(given, Tensor) and given.is_meta for given in args[1:]):
            args = (common.meta(*args[0].shape).bool(), *args[1:])
        return super().__torch_function__(func, types, args, dict(kwargs or {}))  # type: ignore[no-untyped-call]


def _arguments(p: FamilyPipeline, x: Tensor, timestep: Tensor, cond: Conditioning) -> dict[str, Any]:
    """Rows whose prompts are of one length, that of the first."""
    n, (height, width) = int(cond.tensors["length_on_host"][0]), x.shape[-2:]
    places = torch.arange(n + height * width // SLOT, device="cpu" if x.is_meta else x.device)
    marks = (places >= n)[None].expand(len(x), -1)
    return {
        "hidden_states": x.flatten(2).transpose(1, 2),
        "timestep": timestep / 1000,
        "encoder_hidden_states": cond.tensors["embeds"][:, :n],
        "img_shapes": [[(1, height, width)]] * len(x),
        "img_mask": marks.as_subclass(Marks) if x.is_meta else marks,
    }


def _schedule(p: FamilyPipeline, num_steps: int, grid: str, shift: float | None) -> Schedule:
    """Stock's levels; a distilled checkpoint's own ones, through its scheduler, as grid "diffusers". Raises ValueError:
    another number of steps than the checkpoint has levels, or a shift of them."""
    own, scheduler, (height, width) = p.card.index.get("sample_sigmas"), p.pipe.scheduler, p.latent_shape[1:]
    mu = stock_schedules.own_mu(scheduler.config, height * width)
    if not own or grid != "diffusers":
        return stock_schedules.stock_schedule(scheduler.config, num_steps, grid, mu, shift)
    if num_steps != len(own) or shift is not None:
        raise ValueError(
            f"{p.model} is distilled for {len(own)} noise levels of its own, got num_steps={num_steps} and "
            f"shift={shift}: take {len(own)} and null, or set sampler.grid=linspace for others"
        )
    levels = type(scheduler).from_config(scheduler.config)
    levels.set_timesteps(sigmas=list(own), mu=mu)
    return Schedule(sigma=levels.sigmas.float().cpu(), timestep=levels.timesteps.float().cpu())


FAMILY = Family(
    name="qwen_image_21", title="Qwen-Image-2.1", network=QwenImage21Transformer2DModel, lora_targets=LORA_TARGETS,
    encoders=("text_encoder",), own_size=lambda card: Size(height=1024, width=1024),
    grid=lambda config: Grid(channels=config.in_channels, multiple=32), factors=lambda vae: (16, 1),
    constants=common.latent_statistics, arguments=_arguments,
    embed=lambda p, prompt, _: qwen_image.pad_embeddings(
        p.pipe.encode_prompt([prompt], device=p.device)[0][:, : p.max_sequence_length].to(p.dtype),
        p.max_sequence_length,
    ),
    read=lambda p, output, x: output[:, -x.shape[-2] * x.shape[-1] :].transpose(1, 2).reshape(x.shape),
    # A call for each length of prompts among the rows
    evaluate=lambda p, x, t, cond: common.predict_by_kind(p, x, t, cond, cond.tensors["length_on_host"].tolist()),
    conditioning=given("context_in_dim", length=True), schedule=_schedule,
    guided=lambda p, asked: common.distilled_guidance(asked, embeds=False, model=p.model)
    if p.card.index.get("sample_sigmas") else common.two_pass_guidance(asked, apart=True),
    # Opacity is dropped, and what is encoded is opaque
    decode=lambda p, z: qwen_image.decode(p, z)[:, :3],
    encode=lambda p, x: qwen_image.encode(
        p, nn.functional.pad(x, (0, 0, 0, 0, 0, p.pipe.vae.config.in_channels - x.shape[1]), value=1.0)
    ),
    # the prompt is causal: keys that are read differ from token to token
    attention=Attends(mask="bias"),
)  # fmt: skip
