"""The parts of a pipeline that load later: its text encoders, and after them the denoiser."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from flowrl.pipelines.arithmetic.attention import give_kernel
from flowrl.pipelines.arithmetic.compiling import compile_blocks
from flowrl.pipelines.arithmetic.wide_products import checkpoint_blocks
from flowrl.pipelines.weights import stock_loading
from flowrl.pipelines.weights.loading_choices import Loading
from flowrl.pipelines.weights.stock_loading import Read
from flowrl.runtime.placement import Resting


def _present(p: Any, names: Sequence[str]) -> list[str]:
    """Those of some parts that the checkpoint has."""
    return [name for name in names if (p.card.index.get(name) or [None])[0] is not None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Later:
    """How to load the rest of a `FamilyPipeline` `p`; `Family.load` explains each."""

    read: Read
    how: Loading
    attention: str
    compile: str

    def text_encoders(self, p: Any) -> bool:
        """Loads missing text encoders onto the device; returns whether there were any. They load together: stock
        classes use all of them for every prompt."""
        names = [name for name in _present(p, p.family.encoders) if getattr(p.pipe, name) is None]
        if names:
            stock_loading.load_parts(p.pipe, self.read, names)
            self.encoders_ready(p)
        return bool(names)

    def encoders_ready(self, p: Any) -> None:
        """Moves loaded text encoders to their device."""
        rests = "text_encoders" in self.how.offload
        stock_loading.freeze(p.pipe, "cpu" if rests else p.device, p.family.encoders)
        p.family.prepare_encoders(p)
        if rests:
            self._rest(p, "text_encoders", p.family.encoders)

    def rest(self, p: Any) -> None:
        """Moves what encodes and decodes images to the host."""
        if "text_encoders" in self.how.offload:
            self._rest(p, "image_encoder", ("image_encoder",))
        if "vae" in self.how.offload:
            self._rest(p, "vae", ("vae", "audio_vae", "vocoder"))

    def _rest(self, p: Any, what: str, names: Sequence[str]) -> None:
        networks = [part for name in names if isinstance(part := getattr(p.pipe, name, None), nn.Module)]
        p.resting[what] = Resting(networks, p.device)

    def denoiser(self, p: Any) -> None:
        """Loads the denoiser, or all experts, ready to be called."""
        names = _present(p, p.family.denoisers)
        found = stock_loading.load_denoisers(
            p.pipe, self.read, p.family.network, p.card.model, names, p.device, self.how
        )
        for part in found.values() if p.options.gradient_checkpointing else ():
            checkpoint_blocks(part, p.device, p.dtype)
        p.take(found)
        p.family.prepare(p)
        known = p.family.attention.known(p.card.network)
        p.take(found, give_kernel(found.values(), self.attention, known, p.dtype, p.device))
        if self.compile == "blocks":
            compile_blocks(p.denoiser)
