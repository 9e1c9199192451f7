"""Fetches published prompt sets into the files that configurations name; lists them for a terminal and docs/data.md."""

from __future__ import annotations

import hashlib
import json
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowrl.config.options import unknown_name
from flowrl.config.prompt_sets import HUB, PROMPT_SETS, PromptSet, PublishedFile
from flowrl.rendering.terminal_text import wrapped
from flowrl.runtime.files import make_folder, replacing
from flowrl.runtime.public import public

RAW = "https://raw.githubusercontent.com"
"""Address at which GitHub serves the files of a commit."""
TIMEOUT = 30.0
"""Seconds without an answer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FetchedPrompts:
    """A prompt set on this machine."""

    files: Mapping[Path, int]
    """File -> the prompts in it."""
    kept: tuple[Path, ...]
    """Files that existed before, and were left unchanged."""


@public
def fetch_prompts(name: str, *, out: str | Path = "data") -> FetchedPrompts:
    """Fetches a published prompt set. Existing files stay unchanged.

    Args:
        name: of the set, from `flowrl.config.prompt_sets.PROMPT_SETS`.
        out: folder for the files; configurations look in `data`.

    Raises:
        flowrl.FlowrlError: no such set, nobody may fetch it, its server is silent, or its file is another one.
    """
    if name not in PROMPT_SETS:
        raise ValueError(unknown_name("prompt set", name, list(PROMPT_SETS)))
    found, folder = PROMPT_SETS[name], Path(out)
    if not found.place:
        raise ValueError(f"prompt set {name}: nothing fetches it from {found.publisher}. {found.how}")
    files: dict[Path, int] = {}
    kept = tuple(folder / local for local in found.files if (folder / local).exists())
    make_folder(folder)
    for local, published in found.files.items():
        if (folder / local) in kept:
            continue
        data = fetch_file(name, found, published)
        if published.path.endswith(".json"):  # a list of pairs: each text under `prompt`, once
            lines = list(dict.fromkeys(" ".join(str(row.get("prompt", "")).split()) for row in json.loads(data)))
        else:
            lines = data.decode("utf-8-sig").splitlines()
        prompts = [line for line in lines if line.strip()][: published.first]
        if not prompts:
            raise ValueError(f"prompt set {name}: {published.path} of {found.publisher} holds no prompt any more")
        with replacing(folder / local) as file:
            file.write("".join(f"{row}\n" for row in prompts).encode())
        files[folder / local] = len(prompts)
    return FetchedPrompts(files=files, kept=kept)


def fetch_file(name: str, found: PromptSet, published: PublishedFile) -> bytes:
    """Fetches a set's file from its publisher. Raises ValueError: no answer, no such file, or not the published one."""
    where = f"{found.publisher}/{published.path}"
    advice = f"try again when it can be reached, or get the file by hand: 'flowrl data list {name}' says where it is"
    try:
        if found.place == HUB:
            from huggingface_hub import constants, hf_hub_download

            settings: Any = {"repo_type": "dataset", "revision": found.revision, "endpoint": constants.ENDPOINT}
            path = hf_hub_download(found.publisher, published.path, etag_timeout=TIMEOUT, **settings)
            data = Path(path).read_bytes()
        else:
            url = f"{RAW}/{found.publisher}/{found.revision}/{published.path}"
            with urllib.request.urlopen(url, timeout=TIMEOUT) as answer:
                data = answer.read()
    except (OSError, ValueError) as error:  # what the hub's client raises are both
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"prompt set {name}: {where} cannot be fetched ({reason[:200]}); {advice}") from error
    digest = hashlib.sha256(data).hexdigest()
    if published.sha256 and digest != published.sha256:
        raise ValueError(
            f"prompt set {name}: what came for {where} is not the published file (sha256 {digest[:12]} instead of "
            f"{published.sha256[:12]}); {advice}"
        )
    return data


def lines() -> Iterator[str]:
    """One line for each set, 80 columns at most."""
    width = max(map(len, PROMPT_SETS))
    for name, found in PROMPT_SETS.items():
        way = f"get: {_download(found)}" if found.place else "by hand"
        yield f"{name:<{width}}  {way:<17}  {found.licence.split(';')[0].split(',')[0]:<14}  {found.publisher}"
    yield ""
    yield "Licences are as publishers state them; prompts that ship are Apache-2.0."
    yield "'flowrl data get NAME' fetches a set; 'flowrl data list NAME' says more."


def in_full(name: str) -> Iterator[str]:
    """Describes a set in full. Raises ValueError: there is no set of that name."""
    if name not in PROMPT_SETS:
        raise ValueError(unknown_name("prompt set", name, list(PROMPT_SETS)))
    found = PROMPT_SETS[name]
    facts = {
        "what": found.about,
        "publisher": f"{found.publisher}, {found.place or 'by hand'}, {found.revision[:12]}",
        "licence": found.licence,
    }
    for local, published in found.files.items():
        rows = f"{published.rows:,} prompts" if published.rows else "prompts not counted"
        size = "size unknown" if published.megabytes is None else f"{published.megabytes:g} MB"
        facts[f"data/{local}"] = f"{published.path}, {rows}, {size}"
    if not found.place:
        facts["files"] = ", ".join(f"data/{local}" for local in found.names)
    facts["get it"] = f"flowrl data get {name}" if found.place else found.how
    if found.ships:
        facts["ships instead"] = " and ".join(found.ships)
    yield name
    for word, text in facts.items():
        yield from wrapped(f"{word}: {text}", "  ", "    ").splitlines()


def _download(found: PromptSet) -> str:
    size = found.megabytes
    return "size unknown" if size is None else f"{max(size, 0.1):.1f} MB"


def page() -> str:
    """docs/data.md's table, in Markdown."""
    rows = [
        "| set | files | what | publisher | licence | get it | ships instead |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, found in PROMPT_SETS.items():
        get = f"`flowrl data get {name}`, {_download(found)}" if found.place else found.how.replace("|", "\\|")
        files = ", ".join(f"`{local}`" for local in found.names)
        ships = " ".join(f"`{text}`" for text in found.ships or ())
        rows.append(f"| {name} | {files} | {found.about} | {found.publisher} | {found.licence} | {get} | {ships} |")
    return "\n".join(rows) + "\n"
