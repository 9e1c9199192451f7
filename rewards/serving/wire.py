"""The format in which images go to a reward server and scores come back: JSON, schema 1, no pickle.

    request  {"schema": 1, "reward": name, "iteration": 0, "group_ids": [...], "items": [{"id": 0, "prompt": "...",
              "images": [image], "source_images": [...], "reference_images": [...], "frames": [...], "video": file,
              "fps": 8.0, "metadata": {}, "sample_id": 0}]}
    reply    {"schema": 1, "version": "...", "items": [{"id": 0, "value": 0.5 or null, "parts": {}, "error": null}]}

An image is base64 of a PNG (JPEG and WebP are read too), or in a multipart request the name of the part that holds the
file. A video is a list of such images, `frames`, or one file, `video` (see `wire_images`). Replies are matched by id,
never by position. `id`, `prompt` and either one image, frames or a video must be given; the rest may be left out.
Everything here is a pure function of bytes; what a stranger sent is refused with `WireError`.
"""

from __future__ import annotations

import base64
import binascii
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from flowrl.config.sections import at_least, positive
from flowrl.rewards.base.outputs import log_word
from flowrl.rewards.serving.wire_images import (
    Pixels,
    WireError,
    bad_request,
    decode_image,
    decode_video,
    encode_image,
    short,
    too_many_images,
)
from flowrl.runtime.files import parse_json
from flowrl.runtime.scrubbing import one_line

SCHEMA = 1

_INT64 = 2**63
_IMAGES = ("images", "source_images", "reference_images", "frames")
_ITEM_KEYS = ("id", "prompt", *_IMAGES, "video", "fps", "metadata", "sample_id")
_REQUEST_KEYS = ("schema", "reward", "iteration", "group_ids", "items")

SMALL_REQUEST = 16_000_000
"""Pixels that any request may hold, whatever its length."""
PIXELS_A_BYTE = 500
"""Beyond that, a request buys its pixels with bytes: an RGB image of one colour has 350 a byte as PNG."""
VIDEO_PIXELS_A_BYTE = 4000
"""The same for videos: one of one colour has 800 a byte as FFV1 at 720 x 1280, and 2,900 at 2160 x 3840."""
MOST_VALUES = 1_000_000
"""Commas and brackets of a request's JSON."""
IN_FLIGHT = 8
"""Bodies of full size that may be in memory at once, queued pixels and the videos of a request likewise."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What a server takes: in one request, of waiting items, and in one call of a reward."""

    max_bytes: int = 64 * 2**20
    """Bytes of a request's body; without videos."""
    max_pixels: int = 64_000_000
    """Pixels of all images of a request together, and of one call of a pointwise reward that gets several items."""
    max_video_bytes: int = 256 * 2**20
    """Bytes of a multipart body with a video: 81 frames of 720 x 1280 of pure noise have 236 MiB as FFV1, by
    extrapolation from three frames."""
    max_video_pixels: int = 128_000_000
    """Pixels of all frames of one item's video; those of a request have 8 * max_pixels together, or one has this."""
    max_images: int = 4096
    """Images and frames of all items of a request together, however small they are."""
    max_items: int = 256
    """Items of a request."""
    queue_size: int = 1024
    """Items of each reward that may wait; a request that finds them waiting gets 429."""
    batch_size: int = 16
    """Items of one call of a pointwise reward."""
    max_connections: int = 256
    """Connections of one address; a new one takes the place of one that waits, or is closed."""
    header_timeout: float = 20.0
    """Seconds in which a request's headers must have arrived; the connection is closed then."""
    body_timeout: float = 20.0
    """Seconds in which a request's body must have arrived; one more for every 64 KiB of it that have."""

    def __post_init__(self) -> None:
        at_least(1, self, "max_bytes max_pixels max_video_bytes max_video_pixels max_images max_items queue_size")
        at_least(1, self, "batch_size max_connections")
        positive(self, "header_timeout body_timeout")

    @property
    def most_bytes(self) -> int:
        """Bytes of any body."""
        return max(self.max_bytes, self.max_video_bytes)

    @property
    def most_held(self) -> int:
        """Bytes of all bodies that are in memory at once."""
        return max(IN_FLIGHT * self.max_bytes, 2 * self.most_bytes)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class WireItem:
    """One sample; images are 8-bit RGB [H, W, 3], and `image` is the first frame where there are `frames`."""

    id: int
    prompt: str
    image: Pixels
    frames: tuple[Pixels, ...] = ()
    fps: float | None = None
    source_images: tuple[Pixels, ...] = ()
    reference_images: tuple[Pixels, ...] = ()
    metadata: dict[str, Any] = field(default_factory=dict)
    group_id: int = 0
    sample_id: int = 0

    @property
    def num_pixels(self) -> int:
        """Pixels of all its images."""
        images = (*(self.frames or (self.image,)), *self.source_images, *self.reference_images)
        return sum(image.shape[0] * image.shape[1] for image in images)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ScoreRequest:
    """A decoded request; `reward` is None where the sender left it to the server."""

    reward: str | None
    items: tuple[WireItem, ...]
    iteration: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class ItemScore:
    """What one item is worth: a finite `value`, or None with the short word `error` and perhaps a sentence."""

    id: int
    value: float | None
    parts: dict[str, float] = field(default_factory=dict)
    error: str | None = None
    detail: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoreReply:
    """Scores in the order of the ids that were asked for; `version` is None where the server does not say."""

    version: str | None
    scores: list[ItemScore]


def encode_request(
    items: Sequence[WireItem],
    reward: str | None,
    iteration: int = 0,
    *,
    image: Callable[[Pixels], str] = encode_image,
    video: Callable[[Sequence[Pixels]], str] | None = None,
) -> dict[str, Any]:
    """The body of a request, for `json.dumps`.

    Args:
        reward: which reward; None leaves it to the server.
        image: what stands for an image: base64 of it, or the name of a part.
        video: what stands for a video; None sends its frames as images.

    Raises ValueError: an item's metadata cannot be written as JSON.
    """
    body: dict[str, Any] = {"schema": SCHEMA, "iteration": iteration}
    if reward is not None:
        body["reward"] = reward
    body |= {"items": [], "group_ids": [item.group_id for item in items]}
    for item in items:
        images = {
            "images": () if item.frames else (item.image,),
            "frames": () if video else item.frames,
            "source_images": item.source_images,
            "reference_images": item.reference_images,
        }
        encoded: dict[str, Any] = {"id": item.id, "prompt": item.prompt, "sample_id": item.sample_id}
        encoded |= {key: [image(one) for one in value] for key, value in images.items() if value}
        if item.frames and video is not None:
            encoded["video"] = video(item.frames)
        if item.fps is not None:
            encoded["fps"] = item.fps
        if item.metadata:
            encoded["metadata"] = json_metadata(item)
        body["items"].append(encoded)
    return body


def json_metadata(item: WireItem) -> dict[str, Any]:
    """An item's metadata, once it is known that JSON can hold it."""
    try:
        json.dumps(item.metadata, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(
            f"the metadata of prompt {item.prompt!r} cannot be sent as JSON ({error}): keep to texts, finite numbers, "
            f"lists and mappings."
        ) from error
    return item.metadata


def decode_request(body: bytes, limits: Limits, files: Mapping[str, bytes] | None = None) -> ScoreRequest:
    """Reads a request. `files` are those of a multipart request by the names of their parts; images in the JSON are
    such names. Raises WireError: 413 for more than `limits` allows, 422 for anything else than the module describes."""
    size = len(body) + sum(map(len, (files or {}).values()))
    if size > limits.most_bytes:
        raise too_many_bytes(limits)
    data = _mapping(read_json_body(body), "the request", _REQUEST_KEYS)
    if data.get("schema", SCHEMA) != SCHEMA:
        raise bad_request(
            f"schema must be {SCHEMA}, got {data['schema']!r}: client and server are of different versions"
        )
    reward, iteration, groups = data.get("reward"), data.get("iteration", 0), data.get("group_ids")
    if not (reward is None or isinstance(reward, str)):
        raise bad_request(f"reward must be text, got {short(reward)}")
    items = _listed_items(data.get("items"), groups, limits)
    videos = [item.get("frames") or item.get("video") for item in items if isinstance(item, dict)]
    if size > limits.max_bytes and (files is None or not any(videos)):
        raise too_many_bytes(limits)
    purse = _Purse(limits, size, files)
    decoded = [
        _item(item, f"items[{i}]", None if groups is None else _integer(groups[i], f"group_ids[{i}]"), purse)
        for i, item in enumerate(items)
    ]
    if len({item.id for item in decoded}) != len(decoded):
        raise bad_request("two items have the same id: ids tell the items of a request apart")
    return ScoreRequest(reward=reward, items=tuple(decoded), iteration=_integer(iteration, "iteration"))


def _listed_items(items: Any, groups: Any, limits: Limits) -> list[Any]:
    """The items of a request, once it is known that they and their groups are lists of a right length."""
    if not isinstance(items, list) or not items:
        raise bad_request("items must be a list with at least one item")
    if len(items) > limits.max_items:
        raise WireError(
            413, "too_many_items", f"a request may hold {limits.max_items} items, got {len(items)}: send fewer."
        )
    if groups is not None and not (isinstance(groups, list) and len(groups) == len(items)):
        raise bad_request(f"group_ids must be a list with one whole number for each of the {len(items)} items")
    return items


def too_many_bytes(limits: Limits) -> WireError:
    """The refusal of a body that is too long."""
    return WireError(
        413,
        "too_many_bytes",
        f"a request may hold {limits.max_bytes} bytes, and {limits.max_video_bytes} with a video as a part of its own: "
        f"send fewer items.",
    )


class _Purse:
    """What a request may still unpack: pixels of images, of all its videos and of each of them, and how many."""

    def __init__(self, limits: Limits, size: int, files: Mapping[str, bytes] | None) -> None:
        most_of_videos = max(IN_FLIGHT * limits.max_pixels, limits.max_video_pixels)
        self.files, self.of_item = files, limits.max_video_pixels
        self.count = self.most = limits.max_images
        self.images = min(limits.max_pixels, max(SMALL_REQUEST, PIXELS_A_BYTE * size))
        self.videos = min(most_of_videos, max(SMALL_REQUEST, VIDEO_PIXELS_A_BYTE * size))

    def _take(self, count: int) -> None:
        if count > self.count:
            raise too_many_images(f"a request may hold {self.most} images and frames, and this one has more")
        self.count -= count

    def image(self, value: Any, where: str) -> Pixels:
        self._take(1)
        decoded = decode_image(_file(value, self.files, where), self.images, where)
        self.images -= decoded.shape[0] * decoded.shape[1]
        return decoded

    def frames(self, value: Sequence[Any], where: str) -> tuple[Pixels, ...]:
        self._take(len(value))
        left, found = min(self.of_item, self.videos), []
        for j, one in enumerate(value):
            found.append(decode_image(_file(one, self.files, f"{where}.frames[{j}]"), left, f"{where}.frames[{j}]"))
            left -= found[-1].shape[0] * found[-1].shape[1]
        return self._paid(tuple(found), where)

    def video(self, value: Any, where: str) -> tuple[Pixels, ...]:
        data = _file(value, self.files, f"{where}.video")
        self._take(1)
        frames = decode_video(data, min(self.of_item, self.videos), f"{where}.video", self.count + 1)
        self._take(len(frames) - 1)
        return self._paid(frames, where)

    def _paid(self, frames: tuple[Pixels, ...], where: str) -> tuple[Pixels, ...]:
        if len({frame.shape for frame in frames}) > 1:
            raise bad_request(f"{where}.frames must all have one size")
        self.videos -= sum(frame.shape[0] * frame.shape[1] for frame in frames)
        return frames


def _item(value: Any, where: str, group: int | None, purse: _Purse) -> WireItem:
    data = _mapping(value, where, _ITEM_KEYS)
    number, prompt, fps = _integer(data.get("id"), f"{where}.id"), data.get("prompt"), data.get("fps")
    if not isinstance(prompt, str) or any("\ud800" <= letter <= "\udfff" for letter in prompt):
        raise bad_request(f"{where}.prompt must be text, got {short(prompt)}")
    if fps is not None and not (_is_number(fps) and fps > 0):
        raise bad_request(f"{where}.fps must be a positive number, got {short(fps)}")
    metadata = data.get("metadata")
    if not (metadata is None or isinstance(metadata, dict)):
        raise bad_request(f"{where}.metadata must be a mapping, got {short(metadata)}")
    images, shown = _item_images(data, where, purse)
    return WireItem(
        id=number,
        prompt=prompt,
        image=(images["images"] or shown)[0],
        frames=shown,
        fps=None if fps is None else float(fps),
        source_images=images["source_images"],
        reference_images=images["reference_images"],
        metadata=metadata or {},
        group_id=number if group is None else group,
        sample_id=_integer(data.get("sample_id", number), f"{where}.sample_id"),
    )


def _item_images(
    data: Mapping[str, Any], where: str, purse: _Purse
) -> tuple[dict[str, tuple[Pixels, ...]], tuple[Pixels, ...]]:
    """The images of an item by their keys, and its frames."""
    lists: dict[str, Any] = {key: data.get(key) or [] for key in _IMAGES}
    for key, given in lists.items():
        if not isinstance(given, list):
            raise bad_request(f"{where}.{key} must be a list of images, got {short(given)}")
        if len(given) > purse.count:
            raise too_many_images(f"{where}.{key} has {len(given)} images where {purse.count} are left")
    frames, video = lists.pop("frames"), data.get("video")
    if len(lists["images"]) > 1 or not (lists["images"] or frames or video):
        raise bad_request(f"{where} must have one image in images, or frames, got {len(lists['images'])} images")
    if frames and video:
        raise bad_request(f"{where} has frames and a video: send one of them")
    images = {
        key: tuple(purse.image(value, f"{where}.{key}[{j}]") for j, value in enumerate(given))
        for key, given in lists.items()
    }
    return images, purse.video(video, where) if video else purse.frames(frames, where)


def _file(value: Any, files: Mapping[str, bytes] | None, where: str) -> bytes:
    if not isinstance(value, str):
        raise bad_request(f"{where} must be text, got {short(value)}")
    if files is not None:
        if value not in files:
            raise bad_request(f"{where} names the part {short(value)}, which the request does not have")
        return files[value]
    try:
        return base64.b64decode(value, validate=True)
    except (binascii.Error, ValueError) as error:
        raise bad_request(f"{where} is not valid base64 ({error}); it may have been cut off") from error


def encode_reply(version: str, scores: Sequence[ItemScore]) -> bytes:
    """The reply as JSON text; numbers that are not finite become null."""
    items = [
        {"id": score.id, "value": score.value, "error": score.error}
        | {"parts": {key: value if math.isfinite(value) else None for key, value in score.parts.items()}}
        | ({} if score.detail is None else {"detail": score.detail})
        for score in scores
    ]
    return json.dumps({"schema": SCHEMA, "version": version, "items": items}, allow_nan=False).encode()


def decode_reply(reply: Any, ids: Sequence[int]) -> ScoreReply:
    """Reads a reply's JSON; an item that is missing, given twice, null or not finite is a failed one."""
    if not isinstance(reply, dict) or reply.get("schema") != SCHEMA or not isinstance(reply.get("items"), list):
        raise ValueError(f"the reply is not of schema {SCHEMA}: {short(reply)}.")
    found: dict[Any, list[dict[str, Any]]] = {}
    for entry in reply["items"]:
        if isinstance(entry, dict) and isinstance(entry.get("id"), int):
            found.setdefault(entry["id"], []).append(entry)
    scores = []
    for number in ids:
        entries = found.get(number, [])
        entry = entries[0] if len(entries) == 1 else {"error": "duplicate_id" if entries else "missing_id"}
        detail, parts = entry.get("detail"), entry.get("parts")
        value, error = read_value(entry.get("value"))
        numbers = {
            str(key): part
            for key, given in (parts if isinstance(parts, dict) else {}).items()
            if (part := read_value(given)[0]) is not None
        }
        score = ItemScore(id=number, value=value, parts=numbers, error=error)
        if entry.get("error") is not None:
            said = detail if isinstance(detail, str) else None
            score = ItemScore(id=number, value=None, error=log_word(str(entry["error"])), detail=said)
        scores.append(score)
    version = reply.get("version")
    return ScoreReply(version=one_line(version) if isinstance(version, str) else None, scores=scores)


def read_value(value: Any) -> tuple[float | None, str | None]:
    """A number of a reply, or None and the word that says why it is none."""
    if value is None:
        return None, "null"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None, "bad_value"
    return (float(value), None) if _is_number(value) else (None, "not_finite")


def read_json_body(body: bytes) -> Any:
    """What JSON text of a stranger says. Raises WireError: 422 where it is none, 413 for more values in it than
    `MOST_VALUES`, which would fill the memory."""
    if sum(map(body.count, (b",", b"[", b"{"))) > MOST_VALUES:
        raise WireError(413, "too_many_values", f"a request may hold {MOST_VALUES} values in its JSON: send fewer.")

    try:
        return parse_json(body.decode(), "its JSON")
    except ValueError as error:
        raise bad_request(f"the body cannot be read ({short(str(error))})") from error


def _mapping(value: Any, where: str, keys: Sequence[str]) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise bad_request(f"{where} must be a mapping, got {short(value)}")
    if unknown := [key for key in value if key not in keys]:
        raise bad_request(f"{where} has the unknown key {short(unknown[0])}; keys are {', '.join(keys)}")
    return value


def _integer(value: Any, where: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not -_INT64 <= value < _INT64:
        raise bad_request(f"{where} must be a whole number of 64 bits, got {short(value)}")
    return value


def _is_number(value: Any) -> bool:
    """Whether it is a finite number; 10**400 is not, as it fits no float."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e308
