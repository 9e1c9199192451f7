"""Rows of other toolkits' prompt files: what they call the prompt and the images that it is about.

    image, images            Flow-Factory and flow_grpo: a path or a list of paths
    source_image             DanceGRPO, with the prompt under `instruction`
    ctrl_image, ref_image    flow_grpo with two references, in this order
    media, media_refs        UniRL: `[{"modality": "image", "role": "condition", "uri": PATH}]`

A row's own `prompt` and `source` come first; these keys are then metadata like all others, as is a value that names no
image file. Paths start at the file's folder, or at `images` in it, where Flow-Factory and DanceGRPO look.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

PROMPTS = ("instruction",)
"""What a prompt is called elsewhere."""
SOURCES = ("image", "images", "source_image", "ctrl_image", "media", "media_refs")
"""What source images are called elsewhere."""
LISTS = ("images",)
"""Those that hold several, in a CSV cell too."""
FOLDER = "images"
SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff")
_SECOND = {"ctrl_image": "ref_image"}  # the second image of a pair, under a key that means nothing alone


def foreign_prompt(row: Mapping[str, Any]) -> Any:
    """What stands under another toolkit's key for the prompt; None where there is none."""
    return next((row[key] for key in PROMPTS if row.get(key) is not None), None)


def foreign_sources(row: Mapping[str, Any], where: str, find: Callable[[str], Path]) -> tuple[str, list[str]]:
    """The key of a row that names its source images, and their paths as written; no key where there is none.

    Args:
        row: the record; None stands for a key that is not there.
        where: file and line, for messages.
        find: the file that a path means.

    Raises:
        ValueError: two keys name different images.
    """
    found = {key: names for key in SOURCES if (names := image_names(row.get(key)))}
    for key, second in _SECOND.items():
        if key in found:
            found[key] += image_names(row.get(second))
    if len({tuple(map(find, names)) for names in found.values()}) > 1:
        raise ValueError(
            f"{where}: {' and '.join(found)} name different images, and each is another toolkit's name of the source: "
            "remove one of them, or say under 'source' which is meant"
        )
    return next(iter(found.items()), ("", []))


def beside_or_in_images(find: Callable[[str], Path]) -> Callable[[str], Path]:
    """Looks in the folder `images` for what is not beside the file."""

    def found(name: str) -> Path:
        path = find(name)
        other = path if path.is_file() else find(f"{FOLDER}/{name}")
        return other if other.is_file() else path

    return found


def image_names(value: Any) -> list[str]:
    """Paths of image files that a value of a record names, alone, in a list, or as UniRL's media; none else."""
    entries = value if isinstance(value, list) else [value]
    names = [_uri(entry) if isinstance(entry, Mapping) else entry for entry in entries]
    if all(isinstance(name, str) and name.lower().endswith(SUFFIXES) for name in names):
        return list(names)
    return []


def _uri(entry: Mapping[str, Any]) -> Any:
    return entry.get("uri") if (entry.get("modality"), entry.get("role")) == ("image", "condition") else None
