"""Embeddings of prompts and of their source images: each computed once and by itself, kept on the host."""

from __future__ import annotations

import gc
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from flowrl.pipelines.weights.embedding_cache import EmbeddingCache, cache_of
from flowrl.trajectory import Conditioning

Sources = Sequence[Sequence[Tensor]]
"""The source images of each prompt, float32 [3, h, w] in [0, 1]."""

EMBEDDING_CACHE = 2048
"""Prompts whose embeddings are kept on the host while the text encoders are at hand."""

CACHED_BYTES = 2**30
"""Embeddings on the host of those that a cache has on disk."""


class Embedded:
    """Embeddings of prompts, each computed once and by itself, so that it does not depend on its batch.

    `encode_one(prompt, sources)` gives a Conditioning of one row; rows are kept on the host, the newest `limit` of them
    while they can be computed again. With a cache they are read from it and written into it, and those that were used
    last stay on the host, `CACHED_BYTES` of them.
    """

    limit: ClassVar[int | None] = EMBEDDING_CACHE

    def __init__(
        self, encode_one: Callable[[str, Sequence[Tensor]], Conditioning], cache: EmbeddingCache | None = None
    ) -> None:
        self.encode_one, self.cache = encode_one, cache
        self.rows: dict[tuple[str, ...], Conditioning] = {}
        self.freed = False

    @torch.no_grad()
    def __call__(self, prompts: Sequence[str], sources: Sources, device: torch.device) -> Conditioning:
        """Conditioning of prompts, one row each. Raises ValueError: a prompt is new and the text encoders are gone."""
        keys = [(prompt, *map(digest, images)) for prompt, images in zip(prompts, sources, strict=True)]
        for key, images in zip(keys, sources, strict=True):
            self.rows[key] = self.rows.pop(key) if key in self.rows else self._row(key, images)
        cond = Conditioning.cat([self.rows[key] for key in keys]).to(device)
        while self._too_many():
            del self.rows[next(iter(self.rows))]  # the oldest; it can be read or computed again
        return cond

    def keeps(self, prompts: Sequence[str], sources: Sources) -> bool:
        """Whether all of these are known without an encoder."""
        keys = [(prompt, *map(digest, images)) for prompt, images in zip(prompts, sources, strict=True)]
        cache = self.cache
        return all(key in self.rows or (cache is not None and cache.has(cache.key(key[0], key[1:]))) for key in keys)

    def _row(self, key: tuple[str, ...], images: Sequence[Tensor]) -> Conditioning:
        name = "" if self.cache is None else self.cache.key(key[0], key[1:])
        found = None if self.cache is None else self.cache.read(name)
        if found is not None:
            return found
        if self.freed and self.cache is not None:
            self.cache.path(name).unlink(missing_ok=True)  # so that the next start finds it missing
            raise ValueError(
                f"the embedding of prompt {key[0]!r} was in prompts.cache when the run began, and can no longer be "
                f"read from {self.cache.path(name)}: continue with resume, or start again, which makes it again"
            )
        if self.freed:
            raise ValueError(
                f"prompt {key[0]!r} was not encoded before the text encoders were freed: set "
                "pipeline.free_text_encoders=false"
            )
        made = self.encode_one(key[0], images).to("cpu")
        if self.cache is not None:
            self.cache.write(name, made)
        return made

    def _too_many(self) -> bool:
        if self.cache is not None:
            each = next(iter(self.rows.values())).tensors.values() if self.rows else ()  # rows are alike
            return len(self.rows) > 1 and len(self.rows) * sum(tensor.nbytes for tensor in each) > CACHED_BYTES
        return not self.freed and Embedded.limit is not None and len(self.rows) > Embedded.limit

    def free(self, pipe: Any, parts: Sequence[str]) -> None:
        """Drops encoders from a stock pipeline; afterwards only what was encoded before is available."""
        self.freed = True
        pipe.register_modules(**dict.fromkeys(parts))
        gc.collect()  # of networks that hold themselves
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


@contextmanager
def keeping_all() -> Iterator[None]:
    """Inside, embeddings have no limit: for encoding everything before the text encoders go."""
    Embedded.limit, usual = None, Embedded.limit
    try:
        yield
    finally:
        Embedded.limit = usual


def num_cut(parts: Mapping[str, Any], limit: int, prompts: Sequence[str]) -> int:
    """How many prompts have more than `limit` tokens; the rest is not read. Where a CLIP encoder with its
    short context stands beside another one, the other's tokens are counted; where a processor of words and images
    stands in place of tokenizers, those of its own."""
    found = [part for name, part in parts.items() if name.startswith("tokenizer") and part is not None]
    found = found or [part for part in (getattr(parts.get("processor"), "tokenizer", None),) if part is not None]
    chosen = next((one for one in found if "CLIP" not in type(one).__name__), next(iter(found), None))
    long = [text for text in prompts if len(text.encode()) >= limit - 1]  # a token is at least a byte; two are added
    if chosen is None or not long:
        return 0
    return sum(len(tokens) > limit for tokens in chosen(long, truncation=False, verbose=False)["input_ids"])


def digest(image: Tensor) -> str:
    """An image's fingerprint."""
    data = image.detach().cpu().contiguous()
    return f"{tuple(data.shape)} {hashlib.sha256(data.numpy().tobytes()).hexdigest()}"


def check_sources(
    sources: Sources | None, prompts: Sequence[str], allowed: tuple[int, int], family: str, option: str | None
) -> Sources:
    """The source images of each prompt, or none for each. Raises ValueError: a prompt has more or fewer images than the
    loaded pipeline takes; see `source_fault`."""
    given = [()] * len(prompts) if sources is None else sources
    for prompt, images in zip(prompts, given, strict=True):
        if fault := source_fault(len(images), allowed, family, option):
            raise ValueError(f"prompt {prompt!r} {fault}")
    return given


def source_fault(count: int, allowed: tuple[int, int], family: str, option: str | None, key: str = "") -> str:
    """What is wrong with a number of source images, as the end of a sentence about a prompt; empty if nothing is.
    `allowed` are the least and the most, `option` is that of `pipeline.options` which sets how many there are, if any,
    and `key` the one of the prompt's row that names them."""
    least, most = allowed
    if least <= count <= most:
        return ""
    wanted = "no source image" if not most else f"{least}" if least == most else f"{least} to {most}"
    loaded = "" if option is None else f" as loaded with pipeline.options.{option}={most}"
    other = "" if option is None else f"set pipeline.options.{option}={count}, "
    named = f" (under {key!r})" if key else ""
    give = "give them with `source` FILE, in a prompt file under 'source' or 'sources'"
    if count > most:
        give = f"take {key!r} out of the row" if key else "give fewer"
    return (
        f"has {count} source images{named}, and {family}{loaded} takes {wanted}: {other}{give}, or take another model"
    )


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
