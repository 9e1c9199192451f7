"""Facts about a stock pipeline without a family in flowrl, counted while its own call runs without weights.

What the stock code cannot tell without weights stays unknown, with the reason; nothing is assumed.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from flowrl.pipelines import GENERIC, ModelFamily
from flowrl.pipelines.arithmetic.compiling import first_expert
from flowrl.pipelines.generic.generic_family import FAMILY
from flowrl.pipelines.generic.generic_pipeline import found_targets
from flowrl.pipelines.generic.stock_recording import WORD, Recorded, Recorder
from flowrl.planning.decoding import TILED, Size
from flowrl.planning.family_route import DrawnSample, Text
from flowrl.planning.published_models import Parts
from flowrl.planning.traces import Fused, Trace

_FAULTS = (
    ValueError, TypeError, AttributeError, KeyError, IndexError, RuntimeError, AssertionError, OSError, ImportError,
)  # fmt: skip
"""Errors of stock code that is called in a way that it does not know."""
_USUAL = 30
"""Assumed words of a prompt if none is available."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StockRoute:
    """A stock pipeline as a plan sees it."""

    recorder: Recorder
    """The pipeline without weights."""
    longest: str
    """A prompt with the maximum number of tokens."""
    recorded: Recorded
    """One evaluation of it at the size that is trained."""
    targets: tuple[str, ...]
    """Layers of its LoRA."""
    vae_dtype: str
    """`pipeline.vae_dtype`."""
    videos: bool
    """Whether it draws clips, which can be decoded in tiles."""
    parts_of: ClassVar[None] = None
    at_once: ClassVar[bool] = True

    @property
    def size(self) -> Size:
        """The size of samples."""
        return self.recorded.size

    @property
    def parts(self) -> Parts:
        """Parameters of the parts besides the denoiser."""
        return self.recorder.parts

    @property
    def uncounted(self) -> tuple[str, ...]:
        """Parts that are not counted, in words."""
        return self.recorder.uncounted

    def rows(self, scale: float) -> int:
        """Network rows that guidance takes per sample."""
        with _quiet():
            return self.recorder.rows(self.longest, scale)

    def drawn(self, size: Size, tokens: int) -> DrawnSample:
        """An image or clip of a size, with the longest prompt, whatever its tokens: they are as many as were recorded.
        Raises ValueError: the pipeline cannot draw it."""
        found = self.recorded
        if size != self.size:
            with _quiet():
                found = self.recorder.sized(*size[:2]).recorded(self.longest)
        decoding = partial(stock_decoding, found, dtype=self.vae_dtype, videos=self.videos)
        latents = [one for one in (*found.decoded[0], *found.decoded[1].values()) if isinstance(one, Tensor)]
        told = (one for name, one in found.call.items() if name.startswith(("encoder", "pooled")))
        prompt = sum(one.numel() for one in told if isinstance(one, Tensor))
        first = next((one.shape for one in latents), ())
        return DrawnSample(
            call=found.call,
            latent=tuple(first[1:] if first[:1] == (1,) else first),  # some pipelines decode frames as a batch
            elements=sum(one.numel() for one in latents),
            prompt=prompt,
            decoding=decoding,
        )

    def text(self, prompts: Sequence[str] | None) -> tuple[Text, dict[str, Any] | None]:
        """Tokens that the model reads of a prompt, and the call of a usual prompt if they depend on it."""
        most = self.recorded.text or 0
        with _quiet():
            short = self.recorder.recorded(WORD.strip())
        if _shapes(short.call) == _shapes(self.recorded.call):
            return Text(most=most), None
        usual = sorted(prompts, key=len)[len(prompts) // 2] if prompts else WORD * _USUAL
        with _quiet():
            found = self.recorder.recorded(usual)
        told = "that of middle length" if prompts else "assumed: prompts are not here"
        return Text(most=most, usual=found.text or most, told=told), found.call


def stock_route(
    family: ModelFamily, model: str, options: Mapping[str, Any], vae_dtype: str = "float32"
) -> StockRoute | str | None:
    """A stock pipeline, or why it is unknown; None if the model has a family in flowrl. `options` are the family's, as
    configured, and `vae_dtype` is `pipeline.vae_dtype`."""
    if family.name not in GENERIC:
        return None
    longest = WORD * FAMILY.text_tokens(model, options)
    try:
        with _quiet():
            recorder = FAMILY.recorder(model, options)
            found = recorder.recorded(longest)
            denoiser = FAMILY.meta_denoiser(model)
            targets = () if denoiser is None else found_targets(first_expert(denoiser))
            return StockRoute(
                recorder=recorder,
                longest=longest,
                recorded=found,
                targets=targets,
                vae_dtype=vae_dtype,
                videos=family.videos,
            )
    except _FAULTS as error:
        said = (str(error).strip() or type(error).__name__).splitlines()[0]
        return (
            f"what {model} calls its network with cannot be found without its weights ({said}): measure it with "
            "'flowrl bench'"
        )


def stock_decoding(found: Recorded, *, dtype: str, videos: bool) -> tuple[float, tuple[int, int]]:
    """FLOPs and peak bytes of decoding one image or clip in `pipeline.vae_dtype`, whole and (`videos`) tiled."""
    low = torch.bfloat16 if dtype == "bfloat16" else torch.float32
    vae: Any = found.vae
    given = (*found.decoded[0], *found.decoded[1].values())  # made of latents beside them, and there until the end
    beside = sum(one.numel() * one.element_size() for one in given if isinstance(one, Tensor))

    def made() -> tuple[float, int]:
        with torch.no_grad(), Fused(low) as fused, Trace() as trace:
            vae.decode(*found.decoded[0], **found.decoded[1])
        return trace.total + fused.attention, beside + trace.peak

    flops, whole = made()
    if not videos or whole < TILED or not hasattr(vae, "enable_tiling"):
        return flops, (whole, whole)
    vae.enable_tiling()
    tiled = made()[1]
    vae.disable_tiling()
    return flops, (whole, min(whole, tiled))


def _shapes(call: Mapping[str, Any]) -> dict[str, Any]:
    return {name: getattr(value, "shape", None) for name, value in call.items()}


@contextmanager
def _quiet() -> Iterator[None]:
    """A context in which stock code does not warn that a prompt was cut, which is intended here."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
