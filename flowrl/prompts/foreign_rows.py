"""Reads rows of other toolkits' prompt files: their keys for the prompt and its source images.

    image, images            Flow-Factory and flow_grpo: a path or a list of paths
    source_image             DanceGRPO, with the prompt under `instruction`
    ctrl_image, ref_image    flow_grpo with two references, in this order
    media, media_refs        UniRL: `[{"modality": "image", "role": "condition", "uri": PATH}]`

A row's own `prompt` and `source` come first; the other keys are then metadata, and so are values that name no image. A
value that holds an image in another form than a path is refused. Paths start at the file's folder, or at `images` in
it, as in Flow-Factory and DanceGRPO.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

PROMPTS = ("instruction",)
"""Keys of the prompt elsewhere."""
SOURCES = ("image", "images", "source_image", "ctrl_image", "media", "media_refs")
"""Keys of source images elsewhere."""
LISTS = ("images",)
"""Keys with several images, also in a CSV cell."""
FOLDER = "images"
SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff")
_HOLDERS = ("bytes", "path", "url", "uri", "base64", "image", "image_url")  # of an image in an object
_IMAGE = re.compile(
    r"^(data:image|https?://|file:|s3:|gs:)|^[A-Za-z0-9+/=_-]{200,}$|"
    r"\.(png|jpe?g|jfif|webp|bmp|gif|tiff?|heic|heif|avif|jp2)$",
    re.IGNORECASE,
)
_SECOND = {"ctrl_image": "ref_image"}  # the second image of a pair, under a key that means nothing alone


def foreign_sources(row: Mapping[str, Any], where: str, find: Callable[[str], Path]) -> tuple[str, list[str]]:
    """The key of a row that names its source images, and their paths as written; no key if there is none.

    Args:
        row: the record; None stands for a key that is not there.
        where: file and line, for messages.
        find: the file that a path means.

    Raises ValueError: two keys name different images, or one holds an image that is no path of a file.
    """
    given = [key for key in SOURCES if key in row]
    found = {key: names for key in given if (names := image_names(row[key], find))}
    for key in given:
        if key not in found and _is_image(row[key]):
            raise ValueError(
                f"{where}: {key} holds {str(row[key])[:60]!r}, which says something of an image and is no path of an "
                f"image file ({', '.join(SUFFIXES)}) or list of such: save the image as one, "
                "and give its path"
            )
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
    """Looks in the folder `images` for files that are not beside the prompt file."""

    def found(name: str) -> Path:
        path = find(name)  # of any text, of which Path.is_file refuses some
        other = path if os.path.isfile(path) else find(f"{FOLDER}/{name}")
        return other if os.path.isfile(other) else path

    return found


def image_names(value: Any, find: Callable[[str], Path] | None = None) -> list[str]:
    """Paths of image files that a value of a record names, alone, in a list, or as UniRL's media; none else. `find`
    gives the file that a path means, so that one that is there is taken whatever its name ends with."""
    names = list[str]()
    for entry in _entries(value):
        name = entry
        if isinstance(entry, Mapping):
            conditions = (entry.get("modality"), entry.get("role")) == ("image", "condition")
            name = entry.get("uri") if conditions else None
        if not isinstance(name, str):
            return []
        if not name.lower().endswith(SUFFIXES) and (find is None or not os.path.isfile(find(name))):
            return []
        names.append(name)
    return names


def _entries(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _is_image(value: Any) -> bool:
    """Whether a value refers to an image: an address, an image's bytes, or an object with one of these."""
    return any(
        entry.get("role") in (None, "condition")
        and any(_is_image(entry.get(key)) or entry.get(key) for key in _HOLDERS)
        if isinstance(entry, Mapping)
        else isinstance(entry, str) and _IMAGE.search(entry.strip()) is not None
        for entry in _entries(value)
    )
