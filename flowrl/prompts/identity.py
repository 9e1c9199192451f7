"""Keys of prompts: digests of a row and of the content of the images and clips that it names.

There are three keys for three questions. None depends on paths or names of files.

    identity    whether two rows are the same row: text, negative prompt, record, sources, references, clips
    drawn_by    whether two rows ask for the same images: text, negative prompt, sources, clips
    asked_for   whether two rows are the same request, whatever guides and scores it: text, sources, clips
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from flowrl.prompts.prompt_files import Prompt
from flowrl.runtime.digests import content_digest, text_digest

_LETTERS = 32


def identity(prompt: Prompt) -> str:
    """A digest of a whole row, with its files by content; equal only for equal rows."""
    return _digest(drawn_by(prompt), prompt.metadata, contents(prompt.references))


def drawn_by(prompt: Prompt) -> str:
    """A digest of all that a row's images depend on besides model and noise."""
    return _digest(asked_for(prompt), prompt.negative)


def asked_for(prompt: Prompt) -> str:
    """The text, with digests of the content of images or clips that the prompt is about."""
    files = (contents(prompt.sources), contents(prompt.clips))
    return json.dumps([prompt.text, *files], ensure_ascii=False) if any(files) else prompt.text


def keys_of(prompts: Sequence[Prompt]) -> list[str]:
    """A key per row of a list, equal for equal rows only, the same on every machine: `asked_for` if unique in the list,
    so that older files with plain texts as keys can be read."""
    asked, own = [asked_for(prompt) for prompt in prompts], [identity(prompt) for prompt in prompts]
    several: dict[str, set[str]] = {}
    for text, row in zip(asked, own, strict=True):
        several.setdefault(text, set()).add(row)
    return [
        json.dumps([text, row], ensure_ascii=False) if len(several[text]) > 1 else text
        for text, row in zip(asked, own, strict=True)
    ]


def distinct(prompts: Iterable[Prompt]) -> list[Prompt]:
    """Each row once, in their order."""
    found: dict[str, Prompt] = {}
    for prompt in prompts:
        found.setdefault(identity(prompt), prompt)
    return list(found.values())


def contents(files: Iterable[str | Path]) -> list[str]:
    """Digests of the content of files, in order. A missing file gets its path; opening it raises an error."""
    paths = [Path(file) for file in files]
    return [content_digest(path)[:_LETTERS] if path.is_file() else str(path) for path in paths]


def _digest(*parts: Any) -> str:
    return text_digest(json.dumps(parts, sort_keys=True, default=str), _LETTERS)
