"""What reward servers of different projects are asked and how they answer, as pure functions of items and replies.

    flowrl         POST /v1/score/multipart   see `flowrl.rewards.serving.wire`
    flow_factory   POST /compute    lists by field -> {"rewards": [...]} in their order; one reward per server
    unirl          POST /score      one entry per item -> {"results": [{reward: {metric: number}}], "errors": [{...}]}

The second follows the reward client of X-GenGroup/Flow-Factory, the third the reward service of Tencent-Hunyuan/UniRL;
of several metrics the first is the value, all are parts.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from flowrl.rewards.serving.http_client import Body
from flowrl.rewards.serving.wire import (
    ItemScore,
    ScoreReply,
    WireItem,
    decode_reply,
    encode_request,
    json_metadata,
    read_value,
)
from flowrl.rewards.serving.wire_images import ImageFormat, Pixels, encode_image, encode_video, image_file, short


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Adapter:
    """One kind of server."""

    score: str
    """Path of the request for scores."""
    health: str
    """Path that answers 200 when the server is ready."""
    health_says: str
    """Either "all": names, versions, kinds and needs of the rewards; "names": a list; or "nothing"."""
    encode: Callable[[Sequence[WireItem], str | None, int, Way], Any]
    """The body for items, or what `json.dumps` makes it of; the name of the reward, None where the server knows; the
    iteration; the way of images and videos."""
    decode: Callable[[Any, Sequence[int], str | None], ScoreReply]
    """The scores in the reply's JSON, by the ids asked for; raises ValueError if it is not a reply."""
    fields: frozenset[str]
    """Of `RewardInputs` that the format can carry."""
    groups: str
    """How groups are kept whole: several in one request, one per request, or not at all."""


def _encode_flow_factory(items: Sequence[WireItem], reward: str | None, iteration: int, way: Way) -> dict[str, Any]:
    videos = [[encode_image(frame, way.image_format) for frame in item.frames] for item in items]
    conditions = [[encode_image(image, way.image_format) for image in item.source_images] for item in items]
    return {
        "prompt": [item.prompt for item in items],
        "image": None if any(videos) else [encode_image(item.image, way.image_format) for item in items],
        "video": videos if any(videos) else None,
        "condition_images": conditions if any(conditions) else None,
        "condition_videos": None,
    }


def _decode_flow_factory(reply: Any, ids: Sequence[int], reward: str | None) -> ScoreReply:
    values = [read_value(value) for value in _listed(reply, "rewards", ids)]
    return ScoreReply(
        version=None,
        scores=[ItemScore(id=i, value=value, error=error) for i, (value, error) in zip(ids, values, strict=True)],
    )


def _listed(reply: Any, key: str, ids: Sequence[int]) -> list[Any]:
    """A list of a reply; without ids one of another length says nothing about any item."""
    found = reply.get(key) if isinstance(reply, dict) else None
    if not isinstance(found, list) or len(found) != len(ids):
        raise ValueError(f"the reply has no list of {len(ids)} {key}: {short(reply)}.")
    return found


def _encode_unirl(items: Sequence[WireItem], reward: str | None, iteration: int, way: Way) -> dict[str, Any]:
    def turns(item: WireItem) -> list[dict[str, str]]:
        # An image to be edited comes as an earlier turn; scorers of images look at the last one.
        images = (*item.source_images, item.image)
        return [{"text": item.prompt, "image_b64": encode_image(image, way.image_format)} for image in images]

    return {
        "requests": [
            {"history": turns(item), "required_rewards": [reward], "metadata": json_metadata(item)} for item in items
        ]
    }


def _decode_unirl(reply: Any, ids: Sequence[int], reward: str | None) -> ScoreReply:
    results, errors = _listed(reply, "results", ids), reply.get("errors")
    errors = errors if isinstance(errors, list) and len(errors) == len(ids) else [None] * len(ids)
    scores = []
    for number, result, error in zip(ids, results, errors, strict=True):
        metrics = result.get(reward) if isinstance(result, dict) else None
        if isinstance(error, dict) and error.get(reward):
            scores.append(ItemScore(id=number, value=None, error="server_error", detail=short(error[reward])))
        elif not isinstance(metrics, dict) or not metrics:
            scores.append(ItemScore(id=number, value=None, error="missing_reward"))
        else:
            read = {str(name): read_value(value) for name, value in metrics.items()}
            value, word = next(iter(read.values()))
            parts = {name: number for name, (number, _) in read.items() if number is not None}
            scores.append(ItemScore(id=number, value=value, parts=parts, error=word))
    return ScoreReply(version=None, scores=scores)


ADAPTERS: dict[str, Adapter] = {
    "flowrl": Adapter(
        score="/v1/score/multipart", health="/health", health_says="all", encode=pack_request,
        decode=lambda reply, ids, reward: decode_reply(reply, ids), groups="several",
        fields=frozenset({
            "prompts", "images", "metadata", "group_ids", "sample_ids", "videos", "fps", "source_images",
            "reference_images", "iteration",
        }),
    ),
    "flow_factory": Adapter(
        score="/compute", health="/health", health_says="nothing", encode=_encode_flow_factory,
        decode=_decode_flow_factory, fields=frozenset({"prompts", "images", "videos", "source_images"}), groups="one",
    ),
    "unirl": Adapter(
        score="/score", health="/rewards", health_says="names", encode=_encode_unirl, decode=_decode_unirl,
        fields=frozenset({"prompts", "images", "metadata", "source_images"}), groups="none",
    ),
}  # fmt: skip
"""Option `protocol` -> how its servers are spoken to."""
