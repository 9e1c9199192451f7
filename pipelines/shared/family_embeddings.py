"""Embeddings of a family's pipeline: of prompts, and of their source images if those are encoded separately."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from flowrl.pipelines.shared.prompt_embeddings import Embedded, Sources, check_sources
from flowrl.pipelines.weights.embedding_cache import cache_of
from flowrl.trajectory import Conditioning


class FamilyEmbeddings:
    """What a `FamilyPipeline` `p` has embedded, each distinct prompt and image once. All sizes of a pipeline share the
    prompts. Source images become latents of the drawn size, so that each size has its own of them, which can be made
    after the text encoders are freed too."""

    def __init__(self, p: Any, *, like: FamilyEmbeddings | None = None) -> None:
        """Of a pipeline, or of one that draws another size than that of `like`."""
        self.p = p
        self.texts: Embedded = Embedded(self._embedded) if like is None else like.texts
        self.images = Embedded(self._embedded_sources)
        self.kept_in: tuple[Path, str] | None = None if like is None else like.kept_in
        if self.kept_in is not None:
            self.images.cache = cache_of(p, *self.kept_in, sources=True)

    def keep_in(self, folder: Path, encoders: str) -> None:
        """Reads from a folder and writes into it; `encoders` identifies the encoders."""
        self.kept_in = folder, encoders
        self.texts.cache = cache_of(self.p, folder, encoders, sources=False)
        self.images.cache = cache_of(self.p, folder, encoders, sources=True)

    def encode(self, prompts: Sequence[str], sources: Sources | None) -> Conditioning:
        """Conditioning of prompts with their source images, one row each."""
        tensors: dict[str, Tensor] = {}
        for kept, texts, given in self._asked(prompts, sources):
            tensors |= kept(texts, given, self.p.device).tensors
        return Conditioning(tensors)

    def keeps(self, prompts: Sequence[str], sources: Sources | None) -> bool:
        """Whether `encode` of these needs no network."""
        return all(kept.keeps(texts, given) for kept, texts, given in self._asked(prompts, sources))

    def _asked(self, prompts: Sequence[str], sources: Sources | None) -> list[tuple[Embedded, Sequence[str], Sources]]:
        """What embeds these, and the items of each."""
        family, count = self.p.family, self.p.num_sources
        given = check_sources(sources, prompts, count, family.name, family.sources_option)
        if family.embed_sources is None:
            return [(self.texts, prompts, given)]
        asked: list[tuple[Embedded, Sequence[str], Sources]] = [(self.texts, prompts, [()] * len(prompts))]
        if count[1]:
            asked.append((self.images, [""] * len(prompts), given))
        return asked

    def _embedded(self, prompt: str, sources: Sequence[Tensor]) -> Conditioning:
        with self.p.awake("text_encoders", *(("vae",) if sources else ())):
            found = self.p.family.embed(self.p, prompt, sources)
        self._check_widths(found)
        return Conditioning(found)

    def _check_widths(self, found: dict[str, Tensor]) -> None:
        """Refuses embeddings whose width the denoiser does not read."""
        tokens = self.p.family.seen_tokens(self.p.card, self.p.max_sequence_length)
        for name, wanted in self.p.family.conditioning(self.p, tokens).items():
            if name in ("embeds", "pooled") and name in found and found[name].shape[-1] != wanted.shape[-1]:
                raise ValueError(
                    f"the text encoders of {self.p.model} embed prompts in {found[name].shape[-1]} numbers ({name}), "
                    f"and its denoiser reads {wanted.shape[-1]}: one of them is of another model"
                )

    def _embedded_sources(self, prompt: str, sources: Sequence[Tensor]) -> Conditioning:
        with self.p.awake("image_encoder", "vae"):
            return Conditioning(self.p.family.embed_sources(self.p, sources))
