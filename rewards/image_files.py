"""Image files that options name: a folder, or a JSON file of images by prompt; they are read by `read_image`."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

from flowrl.config.train import option_path
from flowrl.media.name_order import is_hidden
from flowrl.media.reading import read_image
from flowrl.runtime.digests import file_stamp, files_below
from flowrl.runtime.files import parse_json, read_text

__all__ = ["SUFFIXES", "image_files", "read_image"]

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp")


def image_files(source: str, *, other: str = "") -> dict[str | None, list[Path]]:
    """Files of a folder (or `asset:NAME`) and the folders in it, under None, or of a JSON file {prompt: file or files}.

    Paths in the JSON file are relative to itself.

    `other` names what else the option `references` takes, for messages.

    Raises:
        ValueError: nothing there, no images, a JSON file of another form, or a listed file that is missing.
    """
    path = option_path(source)
    if path.is_dir():
        files = [
            file for file in files_below(path).values() if file.suffix.lower() in SUFFIXES and not is_hidden(file, path)
        ]
        if not files:
            raise ValueError(f"the folder {source} holds no images ({', '.join(SUFFIXES)}): fill it.")
        return {None: files}
    if path.suffix != ".json" or not path.is_file():
        raise ValueError(
            f"references must be a folder of images, or a .json file that maps prompts to files{other}, got "
            f"{source!r}, which is neither."
        )
    found = _listed_files(path, source)
    missing = [file for files in found.values() for file in files if not file.is_file()]
    if missing:
        raise ValueError(f"{source} lists {len(missing)} files that are not there (first: {missing[0]}).")
    return found


def _listed_files(path: Path, source: str) -> dict[str | None, list[Path]]:
    """The files that a JSON file lists for each prompt, whether they exist or not."""
    try:
        listed: Any = parse_json(read_text(path), source)
    except ValueError as error:
        raise ValueError(f"{error}: write {{prompt: [files]}}.") from error
    found: dict[str | None, list[Path]] = {}
    for prompt, names in listed.items() if isinstance(listed, dict) else ():
        names = [names] if isinstance(names, str) else names
        if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
            raise ValueError(f"{source} must give each prompt a file or a list of files, got {names!r} for {prompt!r}.")
        found[prompt] = [path.parent / Path(name).expanduser() for name in names]
    if not found:
        raise ValueError(f"{source} lists no references: write {{prompt: [files]}}.")
    return found


def no_listed(prompt: str, source: str) -> str | None:
    """The lack of a file for a prompt; one end of a sentence, as of `flowrl.rewards.base.prompt_needs`."""
    path = option_path(source)
    if path.is_dir():  # its images serve every prompt
        return None
    if prompt in _prompts(source, file_stamp(path.stat())):
        return None
    return f"needs a reference in {source}, which lists none for it: add some, or give a folder, for all prompts"


@lru_cache(maxsize=8)
def _prompts(source: str, stamp: tuple[int, ...]) -> frozenset[str | None]:
    return frozenset(image_files(source))
