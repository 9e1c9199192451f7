"""How many tokens of a prompt a reward's model reads, and how many prompts are longer: known before weights load."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from flowrl.runtime.files import read_json

CLIP_TOKENS = 77
# Every tokenizer makes at least one token of a word with a mark before it, or of marks alone.
_LEAST = re.compile(r"[^\w\s]?\w+|[^\w\s]+")


@dataclass(frozen=True, kw_only=True, slots=True)
class TextLimit:
    """How much of a prompt a model reads."""

    tokens: int
    """Most tokens that it reads, including those that are not text."""
    tokenizer: str
    """Folder or hub id of the model."""
    added: int = 2
    """Number of tokens that are not text, such as those of the beginning and end."""


@runtime_checkable
class LimitsText(Protocol):
    """Options of a reward that reads only the beginning of a prompt."""

    @property
    def text_limit(self) -> TextLimit | None:
        """How much is read; None if nothing is cut."""


def clip_limit(model: str) -> TextLimit:
    """How much a CLIP reads; for a folder, by its configuration."""
    config = Path(model).expanduser() / "config.json"
    text = (read_json(config).get("text_config") or {}) if config.is_file() else {}
    return TextLimit(tokens=int(text.get("max_position_embeddings", CLIP_TOKENS)), tokenizer=model)


def cut_line(called: str, options: object, prompts: Sequence[str]) -> str:
    """A sentence on how many prompts a reward does not read to the end; empty if none is known. The tokenizer counts if
    its file is here; otherwise words and marks count, never more than tokens."""
    limit = limit_of(options)
    if limit is None:
        return ""
    long = [text for text in prompts if len(text.encode()) > limit.tokens - limit.added]  # a token is a byte or more
    tokenizer = kept_tokenizer(limit.tokenizer) if long else None
    if tokenizer is None:
        count = sum(len(_LEAST.findall(text)) > limit.tokens - limit.added for text in long)
    else:
        count = sum(len(one.ids) > limit.tokens for one in tokenizer.encode_batch(long))
    if not count:
        return ""
    least = "at least " if tokenizer is None else ""
    verb = "is" if count == 1 and not least else "are"
    return f"{called} reads {limit.tokens} tokens of a prompt: {least}{count} of {len(prompts)} prompts {verb} longer"


def limit_of(options: object) -> TextLimit | None:
    """How much of a prompt a reward of these options reads; None if it states no limit."""
    return options.text_limit if isinstance(options, LimitsText) else None


def kept_tokenizer(model: str, part: str = "") -> Any:
    """The fast tokenizer of a model here or in the hub's cache, or of its folder `part`; None if there is no file."""
    place = f"{part}/" if part else ""
    home = Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser()
    cache = Path(os.environ.get("HF_HUB_CACHE", str(home / "hub"))).expanduser()
    snapshots = (cache / f"models--{model.replace('/', '--')}").glob(f"snapshots/*/{place}tokenizer.json")
    places = (Path(model).expanduser() / f"{place}tokenizer.json", *snapshots)
    file = next((path for path in places if path.is_file()), None)
    if file is None:
        return None
    from tokenizers import Tokenizer

    found = Tokenizer.from_file(str(file))
    found.no_padding()
    found.no_truncation()
    return found
