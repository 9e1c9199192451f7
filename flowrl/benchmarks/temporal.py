"""Measures faults between the frames of a clip in closed form (flicker, freezing, teleporting), and its change.

Letters: F frames, d_t the difference of frames t + 1 and t. Luminance is Y = 0.2126 R + 0.7152 G + 0.0722 B (BT.709),
of values as they are stored. What is defined here for every clip:

    change     mean |d_t|, in [0, 1]. 1 - change is VBench's temporal flickering of the clip (arXiv 2311.17982, which
               takes it of still scenes only: motion counts as change)
    flicker    how far pixels go and come back at once, in [0, 1]; 0 where things move on evenly
    freeze     share of steps between frames in which nothing moves, in [0, 1]
    teleport   1 - median step / largest step of what moves, in [0, 1]; 0 of even motion
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import avg_pool2d

from flowrl.runtime.placement import widened, widest
from flowrl.runtime.shapes import Float

CELL = 8
STILL = 2 / 255
LEAST_STEP = 3e-4
NAMES = ("change", "flicker", "freeze", "teleport")
"""The diagnostics by name."""
LESS_IS_BETTER = ("flicker", "freeze", "teleport")
"""Those that rank clips, the least first; `change` says how much moves, and more of it is neither better nor worse."""
_LUMA = (0.2126, 0.7152, 0.0722)


def diagnose(video: Float[Tensor, " f 3 h w"]) -> dict[str, float]:
    """All of `NAMES` for one clip; NaN where frames are too few (`change` and `freeze` need one step, others two)."""
    steps = len(video) - 1
    return {
        "change": float(frame_change(video)) if steps > 0 else math.nan,
        "flicker": float(flicker(video)) if steps > 1 else math.nan,
        "freeze": float(freeze(video)) if steps > 0 else math.nan,
        "teleport": float(teleport(video)) if steps > 1 else math.nan,
    }


def frame_change(video: Float[Tensor, " f 3 h w"]) -> Float[Tensor, ""]:
    """Mean of |d_t| over all pixels, channels and t: a scalar in [0, 1], 0 for a frozen video."""
    return widened(video.diff(dim=0).abs()).mean()


def flicker(video: Float[Tensor, " f 3 h w"]) -> Float[Tensor, ""]:
    """Mean over pixels and t of min(|d_t|, |d_t+1|) of the luminance where the two have opposite signs, else 0.

    A scalar in [0, 1]: |a - b| for a clip whose brightness alternates between a and b, 0 for a frozen one, for a fade,
    and for an edge that passes, since each pixel goes one way. (The mean absolute second difference, which this
    resembles, is no less for a sharp edge that passes than for flicker.) What covers a pixel for one frame alone
    counts, as of a thing that moves by more than half its width in a step.
    """
    first = luminance(video).diff(dim=0)
    before, after = first[:-1], first[1:]
    back = torch.minimum(before.abs(), after.abs())
    return widened(torch.where(before * after < 0, back, torch.zeros_like(back))).mean()


def freeze(video: Float[Tensor, " f 3 h w"], *, cell: int = CELL, still: float = STILL) -> Float[Tensor, ""]:
    """Share of the F - 1 steps, in [0, 1], in which the mean luminance of every square of `cell` pixels changes by at
    most `still`. Cells' means ignore a decoder's noise; the largest still sees a small moving thing."""
    pooled = avg_pool2d(luminance(video)[:, None], cell, ceil_mode=True, count_include_pad=False)
    largest = pooled.diff(dim=0).abs().flatten(1).amax(dim=1)
    return widened(largest <= still).mean()


def teleport(video: Float[Tensor, " f 3 h w"], *, least: float = LEAST_STEP) -> Float[Tensor, ""]:
    """How far the largest step of what moves exceeds the median one: a scalar in [0, 1].

        1 - max(median_t m_t, least) / max(max_t m_t, least),    m_t = |mean over pixels of d_t r|

    with d_t the difference of two frames, r a pixel's place from the image's centre in halves of its longer side, and
    the norm over r and the channels. Where a thing of one colour moves over a ground of another by s, m_t is
    proportional to |s| whatever its shape and however its places overlap, so that the value is 1 - v / L for a thing
    that moves by v and jumps by L once, and 0 where it moves evenly. An even change of brightness has m_t = 0.

    Less than `least` is no motion: a frozen clip has 0, one that moves in a single step alone about 1. Things that move
    in opposite ways by equal amounts cancel; what appears or vanishes counts as having come from the centre.
    """
    height, width = video.shape[-2:]
    half = max(height, width) / 2
    steps, wide = video.diff(dim=0), widest(video.device)
    y = (torch.arange(height, device=video.device) - (height - 1) / 2) / half
    x = (torch.arange(width, device=video.device) - (width - 1) / 2) / half
    moments = [(steps * place).mean(dim=(-2, -1), dtype=wide) for place in (y[:, None], x)]  # [F-1, 3] each
    size = torch.stack(moments).square().sum(dim=(0, 2)).sqrt()
    middle = size.quantile(0.5)  # of an even number of steps the mean of the two in the middle
    return 1 - middle.clamp(min=least) / size.max().clamp(min=least)


def luminance(video: Float[Tensor, " f 3 h w"]) -> Float[Tensor, " f h w"]:
    """Y of BT.709."""
    return torch.einsum("fchw,c->fhw", video, torch.tensor(_LUMA, dtype=video.dtype, device=video.device))
