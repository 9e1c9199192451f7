"""The format between trainings and reward servers: images survive it exactly, and what strangers send is refused."""

from __future__ import annotations

import base64
import io
import json
import math
import pickle
import struct
import time
import zlib
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from reward_servers import noise

from flowrl.rewards import to_uint8
from flowrl.rewards.serving.batching import inputs_of
from flowrl.rewards.serving.wire import (
    ItemScore,
    Limits,
    WireItem,
    decode_reply,
    decode_request,
    encode_reply,
    encode_request,
)
from flowrl.rewards.serving.wire_adapters import ADAPTERS, Way
from flowrl.rewards.serving.wire_images import WireError, decode_image, decode_video, encode_image, encode_video
from flowrl.runtime.randomness import counter_integers

ROOMY = Limits()
RED = np.full((2, 3, 3), (200, 30, 10), dtype=np.uint8)


def file_of(image: Image.Image, format: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format=format, **options)
    return buffer.getvalue()


def text_of(data: bytes) -> str:
    return base64.b64encode(data).decode()


def body_of(item: dict[str, Any] | None = None, **request: Any) -> bytes:
    """A request of one item with a red image; None as a value takes a key away."""
    whole = {"id": 7, "prompt": "red", "images": [encode_image(RED)], **(item or {})}
    whole = {key: value for key, value in whole.items() if value is not None}
    return json.dumps({"schema": 1, "reward": "level", "items": [whole], **request}).encode()


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png_that_claims(width: int, height: int) -> bytes:
    """A small file whose header promises a huge image."""
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    pixels = chunk(b"IDAT", zlib.compress(bytes(10**6), 9))
    return b"\x89PNG\r\n\x1a\n" + header + pixels + chunk(b"IEND", b"")


def test_every_field_survives_the_way_there_and_back() -> None:
    full = WireItem(
        id=3, prompt="ein Hügel 🌄", image=noise(5, 4, 3), fps=7.5, frames=(noise(5, 4, 3), np.flip(noise(5, 4, 3), 0)),
        source_images=(noise(2, 9, 3),), reference_images=(noise(3, 3, 3), noise(1, 1, 3)),
        metadata={"tag": "counting", "include": [{"class": "dog", "count": 2}], "x": 0.1}, group_id=2**62, sample_id=-5,
    )  # fmt: skip
    plain = WireItem(id=-1, prompt="", image=noise(8, 6, 3), group_id=4, sample_id=9)
    body = json.dumps(encode_request([full, plain], reward="hps", iteration=12)).encode()
    request = decode_request(body, ROOMY)
    assert (request.reward, request.iteration, len(request.items)) == ("hps", 12, 2)
    for sent, came in zip((full, plain), request.items, strict=True):
        for name in ("id", "prompt", "fps", "metadata", "group_id", "sample_id"):
            assert getattr(came, name) == getattr(sent, name), name
        for name in ("frames", "source_images", "reference_images"):
            assert [p.tolist() for p in getattr(came, name)] == [p.tolist() for p in getattr(sent, name)], name
    assert request.items[0].image.tolist() == full.frames[0].tolist()  # of a video, its first frame
    assert request.items[1].image.tolist() == plain.image.tolist()


def test_pixels_reach_the_reward_exactly() -> None:
    """All 256 levels: as float32 in [0, 1], and back to 8 bits."""
    ramp = np.arange(256, dtype=np.uint8).reshape(16, 16, 1).repeat(3, 2)
    inputs = inputs_of(decode_request(body_of({"images": [encode_image(ramp)]}), ROOMY).items)
    assert to_uint8(inputs.images)[0].tolist() == ramp.tolist()
    torch.testing.assert_close(inputs.images[0, 0].flatten(), torch.arange(256) / 255.0, rtol=0, atol=0)


def test_what_may_be_left_out() -> None:
    request = decode_request(body_of(reward=None), ROOMY)
    item = request.items[0]
    assert (request.reward, request.iteration) == (None, 0)
    assert (item.group_id, item.sample_id, item.metadata, item.fps, item.frames) == (7, 7, {}, None, ())
    grouped = decode_request(body_of(group_ids=[40]), ROOMY)
    assert grouped.items[0].group_id == 40


def test_parts_of_a_multipart_request_are_named_by_the_json() -> None:
    files = {"a": file_of(Image.fromarray(RED))}
    assert decode_request(body_of({"images": ["a"]}), ROOMY, files).items[0].image.tolist() == RED.tolist()
    with pytest.raises(WireError, match="names the part b, which the request does not have"):
        decode_request(body_of({"images": ["b"]}), ROOMY, files)


@pytest.mark.parametrize(
    ("orientation", "transform"),
    [(1, lambda a: a), (3, lambda a: a[::-1, ::-1]), (6, lambda a: np.rot90(a, -1)), (8, lambda a: np.rot90(a))],
)
@pytest.mark.parametrize("format", ["PNG", "WEBP"])
def test_images_are_turned_as_their_exif_orientation_says(orientation: int, transform: Any, format: str) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    pixels = noise(4, 6, 3)
    options = {"lossless": True} if format == "WEBP" else {}
    data = file_of(Image.fromarray(pixels), format, exif=exif, **options)
    assert decode_image(data, 24).tolist() == transform(pixels).tolist()


def test_transparent_pixels_are_laid_on_white() -> None:
    """Over white a channel c with opacity a / 255 is 255 + (c - 255) a / 255."""
    pixels = np.array([[[200, 0, 100, 255], [200, 0, 100, 0], [200, 0, 100, 51]]], dtype=np.uint8)
    expected = [[200, 0, 100], [255, 255, 255], [244, 204, 224]]
    assert decode_image(file_of(Image.fromarray(pixels)), 9)[0].tolist() == expected
    grey = Image.fromarray(np.array([[[100, 51], [100, 0]]], dtype=np.uint8), "LA")
    assert decode_image(file_of(grey), 9)[0].tolist() == [[224] * 3, [255] * 3]
    palette = Image.fromarray(np.array([[0, 1]], dtype=np.uint8), "P")
    palette.putpalette([10, 20, 30, 40, 50, 60])
    assert decode_image(file_of(palette, transparency=1), 9)[0].tolist() == [[10, 20, 30], [255] * 3]
    key = Image.fromarray(np.array([[[1, 2, 3], [4, 5, 6]]], dtype=np.uint8))
    assert decode_image(file_of(key, transparency=(4, 5, 6)), 9)[0].tolist() == [[1, 2, 3], [255] * 3]


@pytest.mark.parametrize("mode", ["1", "L", "P", "CMYK"])
def test_other_8_bit_images_become_rgb(mode: str) -> None:
    white = Image.new("RGB", (4, 3), "white").convert(mode)
    decoded = decode_image(file_of(white, "JPEG" if mode == "CMYK" else "PNG"), 12)
    assert decoded.shape == (3, 4, 3)
    assert decoded.min() >= 254  # JPEG may be off by a level


PNG = file_of(Image.fromarray(noise(16, 16, 3)))
REFUSED: list[tuple[bytes, int, str]] = [
    (b"", 422, "not valid JSON"),
    (b'{"schema": 1, "items": [', 422, "not valid JSON"),
    (b"[" * 100_000, 422, "the body cannot be read .its JSON: brackets are nested more than 100 deep"),
    (b"\xff\xfe\xfa", 422, "the body cannot be read .'utf-8' codec"),
    (pickle.dumps({"images": []}), 422, "'utf-8' codec"),
    (b"[]", 422, "the request must be a mapping, got list"),
    (b"7", 422, "the request must be a mapping, got 7"),
    (body_of(schema=2), 422, "schema must be 1, got 2"),
    (body_of(rewards="x"), 422, "unknown key rewards"),
    (body_of(reward=3), 422, "reward must be text, got 3"),
    (body_of(iteration=1.5), 422, "iteration must be a whole number of 64 bits, got 1.5"),
    (body_of(items=[]), 422, "at least one item"),
    (body_of(items={"a": 1}), 422, "at least one item"),
    (body_of(group_ids=[1, 2]), 422, "one whole number for each of the 1 items"),
    (body_of(group_ids=["x"]), 422, r"group_ids\[0\] must be a whole number"),
    (body_of({"id": None}), 422, r"items\[0\]\.id must be a whole number of 64 bits, got None"),
    (body_of({"id": True}), 422, "got True"),
    (body_of({"id": 2**63}), 422, "64 bits"),
    (body_of({"id": 10**4000}), 422, r"100000000\.\.\. is beyond 1e308: write a smaller number"),
    (body_of({"id": 10**300}), 422, r"64 bits, got 1000.*\.\.\."),
    (body_of({"prompt": None}), 422, "prompt must be text, got None"),
    (body_of({"prompt": "\ud800"}), 422, r"\\ud800 is half a character"),
    (body_of({"\ud800": 1}), 422, r"\\ud800 is half a character"),
    (body_of({"metadata": [1]}), 422, "metadata must be a mapping, got list"),
    (body_of({"fps": 0}), 422, "fps must be a positive number, got 0"),
    (body_of({"fps": True}), 422, "fps must be a positive number"),
    (body_of({"fps": 3}).replace(b"3}", b"1e999}"), 422, "1e999... is beyond 1e308"),
    (body_of({"fps": 3}).replace(b"3}", b"NaN}"), 422, "JSON knows no NaN: write a number, or null"),
    (body_of({"images": None}), 422, "one image in images, or frames, got 0 images"),
    (body_of({"images": [encode_image(RED)] * 2}), 422, "got 2 images"),
    (body_of({"images": "abc"}), 422, "images must be a list of images, got abc"),
    (body_of({"images": [5]}), 422, r"images\[0\] must be text, got 5"),
    (body_of({"frames": [encode_image(RED), encode_image(noise(3, 2, 3))]}), 422, "all have one size"),
    (body_of({"images": ["ü"]}), 422, "not valid base64"),
    (body_of({"images": [text_of(PNG)[:-3]]}), 422, "not valid base64 .*cut off"),
    (body_of({"images": ["http://example.org/a.png"]}), 422, "not valid base64"),
    (body_of({"images": [""]}), 422, "not a PNG, JPEG or WebP"),
    (body_of({"images": [text_of(PNG[: len(PNG) // 2])]}), 422, "not a PNG, JPEG or WebP.*truncated"),
    (body_of({"images": [text_of(file_of(Image.fromarray(RED), "GIF"))]}), 422, "not a PNG, JPEG or WebP"),
    (
        body_of({"images": [text_of(file_of(Image.fromarray(RED[..., 0].astype(np.uint16))))]}),
        422,
        "8 bits per channel",
    ),
]


@pytest.mark.parametrize(("body", "status", "message"), REFUSED)
def test_decode_refuses(body: bytes, status: int, message: str) -> None:
    with pytest.raises(WireError, match=message) as caught:
        decode_request(body, ROOMY)
    assert (caught.value.status, caught.value.word) == (status, "bad_request")
    str(caught.value).encode()  # can be sent back
    assert len(str(caught.value)) < 300


def test_ids_that_repeat_are_refused() -> None:
    items = json.loads(body_of())["items"] * 2
    with pytest.raises(WireError, match="same id"):
        decode_request(body_of(items=items), ROOMY)


def test_limits_refuse_what_is_too_much() -> None:
    body = body_of({"source_images": [encode_image(RED)] * 3})  # 4 images of 6 pixels
    assert len(decode_request(body, Limits(max_pixels=24, max_bytes=len(body), max_items=1)).items) == 1
    cases = [
        (replace(ROOMY, max_pixels=23), "too_many_pixels"),
        (replace(ROOMY, max_bytes=len(body) - 1), "too_many_bytes"),
    ]
    items = [{"id": i, "prompt": "x"} for i in range(3)]
    for limits, word in cases:
        with pytest.raises(WireError) as caught:
            decode_request(body, limits)
        assert (caught.value.status, caught.value.word) == (413, word)
    with pytest.raises(WireError, match="may hold 2 items, got 3") as caught:
        decode_request(body_of(items=items), replace(ROOMY, max_items=2))
    assert caught.value.status == 413
    with pytest.raises(ValueError, match="max_pixels must be at least 1, got 0"):
        Limits(max_pixels=0)


@pytest.mark.parametrize("side", [9_000, 12_000, 60_000])
def test_decompression_bombs_are_refused_by_their_header(side: int) -> None:
    """Below Pillow's guard, where Pillow warns, and where it refuses by itself."""
    with pytest.raises(WireError) as caught:
        decode_image(png_that_claims(side, side), ROOMY.max_pixels)
    assert (caught.value.status, caught.value.word) == (413, "too_many_pixels")


def test_damaged_images_are_refused_and_never_raise_an_unexpected_error() -> None:
    """Five bytes of each file changed, 150 times: an image comes out, or a `WireError`."""
    refused = 0
    for format in ("PNG", "JPEG", "WEBP"):
        whole = file_of(Image.fromarray(noise(16, 16, 3)), format)
        for trial in range(150):
            data = bytearray(whole)
            for change in range(5):
                place = counter_integers(0, len(data), format, trial, change, "place")
                data[place] = counter_integers(0, 256, format, trial, change, "byte")
            try:
                assert decode_image(bytes(data), 10**6).shape[2] == 3
            except WireError:
                refused += 1
    assert refused > 100


def test_replies_are_matched_by_id() -> None:
    sent = [
        ItemScore(id=2, value=0.25, parts={"a": 1.5, "b": math.nan}),
        ItemScore(id=0, value=None, error="timeout", detail="d"),
    ]
    text = encode_reply("v1", sent)
    assert json.loads(text) == {
        "schema": 1, "version": "v1",
        "items": [
            {"id": 2, "value": 0.25, "parts": {"a": 1.5, "b": None}, "error": None},
            {"id": 0, "value": None, "parts": {}, "error": "timeout", "detail": "d"},
        ],
    }  # fmt: skip
    reply = decode_reply(json.loads(text), [0, 1, 2])
    assert reply.version == "v1"
    assert [(score.id, score.value, score.error) for score in reply.scores] == [
        (0, None, "timeout"), (1, None, "missing_id"), (2, 0.25, None),
    ]  # fmt: skip
    assert reply.scores[2].parts == {"a": 1.5}


@pytest.mark.parametrize(
    ("value", "word"),
    [("null", "null"), ("NaN", "not_finite"), ("-Infinity", "not_finite"), ("1e999", "not_finite"),
     ("1" + "0" * 400, "not_finite"), ('"0.5"', "bad_value"), ("true", "bad_value"), ("[1]", "bad_value")],
)  # fmt: skip
def test_values_that_are_no_finite_numbers_are_failed_items(value: str, word: str) -> None:
    reply = json.loads(f'{{"schema": 1, "items": [{{"id": 0, "value": {value}}}, {{"id": 1, "value": 2}}]}}')
    first, second = decode_reply(reply, [0, 1]).scores
    assert (first.value, first.error) == (None, word)
    assert (second.value, second.error) == (2.0, None)


def test_items_given_twice_and_replies_that_are_none() -> None:
    twice = {"schema": 1, "items": [{"id": 0, "value": 1}, {"id": 0, "value": 2}, "x", {"id": "0"}]}
    assert decode_reply(twice, [0]).scores[0].error == "duplicate_id"
    long = decode_reply({"schema": 1, "items": [{"id": 0, "error": "x" * 500}]}, [0])
    assert long.scores[0].error == "x" * 60
    others: list[Any] = [None, [], {}, {"schema": 2, "items": []}, {"schema": 1}, {"schema": 1, "items": {}}]
    for reply in others:
        with pytest.raises(ValueError, match="not of schema 1"):
            decode_reply(reply, [0])


def test_metadata_that_json_cannot_hold_is_refused() -> None:
    for metadata in ({"x": math.nan}, {"x": {1, 2}}):
        with pytest.raises(ValueError, match="metadata of prompt 'p' cannot be sent as JSON"):
            encode_request([WireItem(id=0, prompt="p", image=RED, metadata=metadata)], reward=None)


def test_flow_factory_bodies_and_replies() -> None:
    items = [WireItem(id=i, prompt=f"p{i}", image=noise(2, 2 + i, 3), source_images=(RED,)) for i in range(2)]
    adapter = ADAPTERS["flow_factory"]
    body = adapter.encode(items, None, 0, Way())
    assert body["prompt"] == ["p0", "p1"]
    assert [decode_image(base64.b64decode(text), 99).shape for text in body["image"]] == [(2, 2, 3), (2, 3, 3)]
    assert [len(images) for images in body["condition_images"]] == [1, 1]
    assert body["video"] is None
    video = adapter.encode([replace(items[0], frames=(RED, RED), source_images=())], None, 0, Way())
    assert (video["image"], len(video["video"][0]), video["condition_images"]) == (None, 2, None)
    reply = adapter.decode({"rewards": [0.5, None]}, [5, 6], None)
    assert [(s.id, s.value, s.error) for s in reply.scores] == [(5, 0.5, None), (6, None, "null")]
    for wrong in ({"rewards": [0.5]}, {"detail": "x"}, [0.5, 0.5]):
        with pytest.raises(ValueError, match="no list of 2 rewards"):
            adapter.decode(wrong, [5, 6], None)


def test_unirl_bodies_and_replies() -> None:
    adapter = ADAPTERS["unirl"]
    item = WireItem(id=4, prompt="p", image=noise(2, 3, 3), source_images=(RED,), metadata={"a": 1})
    (request,) = adapter.encode([item], "clip", 0, Way())["requests"]
    assert (request["required_rewards"], request["metadata"]) == (["clip"], {"a": 1})
    turns = [decode_image(base64.b64decode(turn["image_b64"]), 99) for turn in request["history"]]
    assert [turn.tolist() for turn in turns] == [RED.tolist(), item.image.tolist()]  # the generated one last
    reply = adapter.decode(
        {
            "results": [{"clip": {"overall": 0.5, "b": 2}}, {"clip": {"b": math.nan}}, {}, {"clip": {}}],
            "errors": [{}, {}, {"clip": "ValueError('x')"}, {}],
        },
        [0, 1, 2, 3],
        "clip",
    )
    assert [(s.value, s.error) for s in reply.scores] == [
        (0.5, None), (None, "not_finite"), (None, "server_error"), (None, "missing_reward"),
    ]  # fmt: skip
    assert reply.scores[0].parts == {"overall": 0.5, "b": 2.0}
    with pytest.raises(ValueError, match="no list of 1 results"):
        adapter.decode({"results": []}, [0], "clip")


def test_pixels_are_paid_for_with_bytes() -> None:
    def request(mode: str, side: int) -> bytes:
        image = text_of(file_of(Image.new(mode, (side, side))))
        return json.dumps({"items": [{"id": 0, "prompt": "a", "images": [image]}]}).encode()

    with pytest.raises(WireError, match="5000 x 5000 pixels where 16000000 are left"):
        decode_request(request("1", 5000), Limits())
    assert decode_request(request("RGB", 4100), Limits()).items[0].num_pixels == 4100**2  # one colour, 16.8 million


# ---- counts of small things ------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_video_of_many_small_frames_is_not_unpacked_to_its_end() -> None:
    frame = np.zeros((2, 2, 3), np.uint8)
    data = encode_video([frame] * 3000)
    begun = time.process_time()
    with pytest.raises(WireError, match="frames or more where 100 images are left") as refused:
        decode_video(data, 10**9, max_frames=100)
    assert refused.value.status == 413
    assert time.process_time() - begun < 1
    assert len(decode_video(encode_video([frame] * 100), 10**9, max_frames=100)) == 100


def test_a_request_holds_so_many_images_however_small() -> None:
    image = encode_image(np.zeros((1, 1, 3), np.uint8))
    limits = Limits(max_images=5)

    def decoded(**lists: list[str]) -> int:
        items = [{"id": number, "prompt": "p", "images": [image], **lists} for number in range(2)]
        return len(decode_request(json.dumps({"items": items}).encode(), limits).items)

    assert decoded(source_images=[image]) == 2
    for lists in ({"source_images": [image] * 2}, {"reference_images": [image] * 9}):
        with pytest.raises(WireError, match="images") as refused:
            decoded(**lists)
        assert (refused.value.status, refused.value.word) == (413, "too_many_images")
    with pytest.raises(WireError, match="images"):
        decode_request(json.dumps({"items": [{"id": 0, "prompt": "p", "frames": [image] * 6}]}).encode(), limits)


def test_json_of_many_values_is_not_read() -> None:
    begun = time.process_time()
    with pytest.raises(WireError, match="1000000 values") as refused:
        decode_request(b'{"items": [' + b"[]," * 1_000_001 + b"[]]}", Limits())
    assert refused.value.status == 413
    assert time.process_time() - begun < 1
    with pytest.raises(WireError, match="nested more than 100 deep"):
        decode_request(b"[" * 500_000, Limits())


def test_a_key_that_stands_twice_is_refused() -> None:
    with pytest.raises(WireError, match="names 'prompt' twice: keep one of them") as refused:
        decode_request(b'{"items": [{"id": 0, "prompt": "one", "prompt": "two", "images": []}]}', Limits())
    assert refused.value.status == 422


def _chunk(kind: bytes, content: bytes = b"") -> bytes:
    return len(content).to_bytes(4, "big") + kind + content + zlib.crc32(kind + content).to_bytes(4, "big")


@pytest.mark.parametrize("kind", ["chunks", "segments", "scans"])
def test_images_of_very_many_pieces_are_not_read(kind: str) -> None:
    buffer = io.BytesIO()
    Image.new("RGB", (4, 4)).save(buffer, format="PNG" if kind == "chunks" else "JPEG")
    data = buffer.getvalue()
    assert decode_image(data, 100).shape == (4, 4, 3)
    bombs = {
        "chunks": data[:33] + _chunk(b"teSt") * 500_000 + data[33:],
        "segments": data[:2] + b"\xff\xe9\x00\x02" * 500_000 + data[2:],
        "scans": data[:-2] + b"\xff\xda\x00\x02" * 500_000 + data[-2:],
    }
    begun = time.process_time()
    with pytest.raises(WireError, match="more pieces"):
        decode_image(bombs[kind], 100)
    assert time.process_time() - begun < 1
