"""Requests of this project's format as binary bodies, and how many items go into one.

A body is multipart/form-data: the JSON in a part `request`, images and videos as files in parts that it names.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from flowrl.rewards.serving.http_client import Body
from flowrl.rewards.serving.wire import WireItem, encode_request, json_metadata
from flowrl.rewards.serving.wire_images import ImageFormat, Pixels, encode_video, image_file


@dataclass(frozen=True, kw_only=True, slots=True)
class Way:
    """How images and videos travel: the images' format, and whether a video is one file (JPEG: its frames)."""

    image_format: ImageFormat = "png"
    videos: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestRoom:
    """What one request may hold, as the server says it; None where it does not."""

    max_items: int | None = None
    max_bytes: int | None = None
    max_pixels: int | None = None


def pack_request(items: Sequence[WireItem], reward: str | None, iteration: int, way: Way) -> Body:
    """The body of a request. Raises ValueError: an item's metadata cannot be written as JSON."""
    files: list[bytes] = []

    def part(data: bytes) -> str:
        files.append(data)
        return f"file{len(files) - 1}"

    def image(pixels: Pixels) -> str:
        return part(image_file(pixels, way.image_format))

    def video(frames: Sequence[Pixels]) -> str:
        return part(encode_video(frames))

    as_file = way.videos and way.image_format == "png"
    told = encode_request(items, reward, iteration, image=image, video=video if as_file else None)
    text = json.dumps(told, allow_nan=False).encode()
    boundary = hashlib.sha256(text).hexdigest()  # no text can hold its own digest
    pieces = [_head(boundary, "request", None), text]
    for number, data in enumerate(files):
        pieces += [b"\r\n", _head(boundary, f"file{number}", "file"), data]
    pieces.append(f"\r\n--{boundary}--\r\n".encode())
    return Body(data=b"".join(pieces), content_type=f"multipart/form-data; boundary={boundary}")


def _head(boundary: str, name: str, filename: str | None) -> bytes:
    named = "" if filename is None else f'; filename="{filename}"'
    kind = "application/json" if filename is None else "application/octet-stream"
    return (
        f'--{boundary}\r\nContent-Disposition: form-data; name="{name}"{named}\r\nContent-Type: {kind}\r\n\r\n'
    ).encode()


def chunks_of(
    items: Sequence[WireItem], batch_size: int, groups: str | None, room: RequestRoom | None = None
) -> list[list[WireItem]]:
    """Requests of at most `batch_size` items and of what `room` allows. A request holds whole groups as
    `Adapter.groups` says, or any items where that is None. What is too large goes alone: the server says so."""
    room = room or RequestRoom()
    if groups is None:
        units = [[item] for item in items]
    else:
        members: dict[int, list[WireItem]] = {}
        for item in items:
            members.setdefault(item.group_id, []).append(item)
        units = list(members.values())
    most = (min(batch_size, room.max_items or batch_size), room.max_pixels, room.max_bytes)
    chunks: list[list[WireItem]] = []
    held = (0, 0, 0)
    for unit in units:
        more = (len(unit), sum(item.num_pixels for item in unit), sum(map(_most_bytes, unit)))
        both = tuple(a + b for a, b in zip(held, more, strict=True))
        fits = all(limit is None or number <= limit for number, limit in zip(both, most, strict=True))
        if chunks and groups != "one" and fits:
            chunks[-1].extend(unit)
            held = (both[0], both[1], both[2])
        else:
            chunks.append(list(unit))
            held = more
    return chunks


def _most_bytes(item: WireItem) -> int:
    """Bytes that an item cannot exceed on the way: noise as PNG or FFV1 is an eighth larger than its pixels at most."""
    files: Any = (*(item.frames or (item.image,)), *item.source_images, *item.reference_images)
    text = 6 * len(item.prompt) + (len(json.dumps(json_metadata(item))) if item.metadata else 0)
    return 27 * item.num_pixels // 8 + 1024 * (len(files) + 1) + text
