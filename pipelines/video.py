"""What video families share: numbers of frames, clips through an autoencoder, grids of flow schedulers.

Latents are `[b, C, F, h, w]` and clips `[b, F, 3, H, W]` in [0, 1]; stock autoencoders take and give `[b, 3, F, H, W]`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from flowrl.pipelines.common import decode_slices, encode_slices


def check_frames(model: str, num_frames: int, factor: int, multiple: int = 1) -> int:
    """Latent frames of a clip: the first frame and then `factor` to one, `multiple` of them to a patch.

    Raises:
        ValueError: no whole number of latent frames or patches; names the nearest numbers of frames.
    """
    latent, rest = divmod(num_frames - 1, factor)
    if num_frames >= 1 and rest == 0 and (latent + 1) % multiple == 0:
        return latent + 1
    step, first = factor * multiple, factor * (multiple - 1) + 1
    below = max(first, first + (num_frames - first) // step * step)
    raise ValueError(
        f"pipeline.num_frames ({num_frames}) must be {first} plus a multiple of {step} for {model}: the nearest are "
        f"{below} and {below + step}"
    )


def decode_clips(latents: Tensor, size: int, decode: Callable[[Tensor], Tensor], *, gradient: bool) -> Tensor:
    """Clips in [0, 1] of latents, `size` at a time; `decode` is the autoencoder's, to `[b, 3, F, H, W]` in [-1, 1]."""
    return decode_slices(latents, size, lambda part: decode(part).transpose(1, 2), gradient=gradient)


def encode_clips(
    clips: Tensor, wanted: tuple[int, ...], size: int, encode: Callable[[Tensor], Tensor], device: torch.device
) -> Tensor:
    """Latents of clips in [0, 1], `size` at a time; `encode` is the autoencoder's, of `[b, 3, F, H, W]` in [-1, 1]."""
    return encode_slices(clips, wanted, size, lambda part: encode(part.transpose(1, 2)), device)


def in_float32(module: nn.Module) -> None:
    """Keeps a float32 module's arithmetic in float32 under autocast, as it is in the stock pipeline."""
    forward = module.forward

    def exact(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast(args[0].device.type, enabled=False):
            return forward(*args, **kwargs)

    module.forward = exact
