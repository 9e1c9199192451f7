"""Binary bodies: videos as one file, JPEG on request, pieces by what a server has room for, and waiting for room."""

from __future__ import annotations

import io
import json
import time
from dataclasses import replace
from typing import Any

import av
import numpy as np
import pytest
import torch
from reward_servers import Answer, health, noise, reward_of, running, samples, scores, scripted

from flowrl.rewards import Reward, RewardInputs, RewardOutput, build_reward, output_of, to_uint8
from flowrl.rewards.serving.wire import Limits, WireItem, decode_request
from flowrl.rewards.serving.wire_adapters import RequestRoom, Way, chunks_of, pack_request
from flowrl.rewards.serving.wire_images import Pixels, WireError, decode_video, encode_video, image_file


@pytest.fixture(autouse=True)
def _short_delays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flowrl.rewards.serving.retries.FIRST_DELAY", 0.01)


def clip(frames: int, height: int, width: int) -> tuple[Pixels, ...]:
    return tuple(noise(frames, height, width, 3))


def of_size(pixels: int, number: int = 0, *, frames: int = 0, group: int = 0) -> WireItem:
    image = np.zeros((1, pixels, 3), np.uint8)
    return WireItem(id=number, prompt="", image=image, frames=(image,) * frames, group_id=group)


@pytest.mark.parametrize("size", [(1, 1, 1), (3, 5, 7), (2, 33, 64)])
def test_a_video_comes_back_bit_for_bit(size: tuple[int, int, int]) -> None:
    frames = clip(*size)
    back = decode_video(encode_video(frames), size[0] * size[1] * size[2])
    assert [frame.tolist() for frame in back] == [frame.tolist() for frame in frames]


def other_video(codec: str, layout: str, container: str, streams: int = 1) -> bytes:
    buffer = io.BytesIO()
    with av.open(buffer, "w", format=container) as file:
        made: Any = [file.add_stream(codec, rate=8) for _ in range(streams)]
        for stream in made:
            stream.width = stream.height = 16
            stream.pix_fmt = layout
        for stream in made:
            frame = av.VideoFrame.from_ndarray(noise(16, 16, 3), format="rgb24").reformat(format=layout)
            file.mux([*stream.encode(frame), *stream.encode(None)])
    return buffer.getvalue()


def test_videos_that_are_refused() -> None:
    good = encode_video(clip(4, 16, 16))
    for data, status, message in [
        (b"", 422, "the video is not FFV1 in Matroska that can be read"),
        (noise(1000).tobytes(), 422, "is not FFV1 in Matroska"),
        (good[: len(good) // 8], 422, "the video"),
        (other_video("mpeg4", "yuv420p", "matroska"), 422, "is coded as mpeg4: send FFV1"),
        (other_video("ffv1", "yuv420p", "matroska"), 422, "has the pixel format yuv420p"),
        (other_video("ffv1", "bgr0", "matroska", 2), 422, "must hold one video and nothing else"),
        (other_video("ffv1", "bgr0", "avi"), 422, "is not FFV1 in Matroska"),
    ]:
        with pytest.raises(WireError, match=message) as caught:
            decode_video(data, 4 * 256)
        assert caught.value.status == status
    for most, message in [(255, "frames of 16 x 16 where 255 are left"), (4 * 256 - 1, "4 frames or more of 256")]:
        with pytest.raises(WireError, match=message) as caught:
            decode_video(good, most)
        assert caught.value.status == 413
    for place in range(0, len(good), 61):  # whatever is damaged: frames, or a refusal
        damaged = bytearray(good)
        damaged[place] ^= 0x55
        try:
            decode_video(bytes(damaged), 4 * 256)
        except WireError as error:
            assert error.status in (413, 422)  # noqa: PT017


def decoded(data: bytes, content_type: str, limits: Limits | None = None) -> Any:
    """What the server makes of a body, with the parts taken apart by hand."""
    boundary = content_type.partition("boundary=")[2].encode()
    *parts, end = (b"\r\n" + data).split(b"\r\n--" + boundary)[1:]
    assert end == b"--\r\n"
    files = {}
    for part in parts:
        head, _, content = part.partition(b"\r\n\r\n")
        files[head.partition(b'name="')[2].partition(b'"')[0].decode()] = content
    text = files.pop("request")
    return json.loads(text), decode_request(text, limits or Limits(), files)


def test_what_a_body_holds() -> None:
    video = WireItem(id=1, prompt="ü", image=noise(4, 5, 3), frames=clip(2, 4, 5), fps=8.0, metadata={"a": 1})
    still = WireItem(id=2, prompt="", image=noise(4, 6, 3), source_images=(noise(2, 2, 3),))
    body = pack_request([video, still], "hps", 3, Way(videos=True))
    told, request = decoded(body.data, body.content_type)
    assert told["items"][0]["video"] == "file0"
    assert "frames" not in told["items"][0]
    assert [frame.tolist() for frame in request.items[0].frames] == [frame.tolist() for frame in video.frames]
    assert request.items[0].image.tolist() == video.frames[0].tolist()
    assert request.items[1].image.tolist() == still.image.tolist()
    assert request.items[1].source_images[0].tolist() == still.source_images[0].tolist()
    assert (request.reward, request.iteration, request.items[0].fps) == ("hps", 3, 8.0)
    for way in (Way(), Way(videos=True, image_format="jpeg95")):  # an older server; JPEG, which FFV1 would undo
        body = pack_request([video], "hps", 3, way)
        told, request = decoded(body.data, body.content_type)
        assert len(told["items"][0]["frames"]) == len(request.items[0].frames) == 2
    assert not np.array_equal(request.items[0].image, video.frames[0])
    with pytest.raises(WireError, match="has frames and a video"):
        decode_request(
            json.dumps({"items": [{"id": 0, "prompt": "", "frames": ["a"], "video": "b"}]}).encode(), Limits()
        )


def test_jpeg_is_smaller_and_close() -> None:
    ramp = np.linspace(0, 255, 64).round().astype(np.uint8)
    smooth = np.stack([ramp[:, None] + 0 * ramp, ramp + 0 * ramp[:, None], np.flip(ramp) + 0 * ramp[:, None]], -1)
    grain = (noise(64, 64, 3) // 32).astype(np.int16) - 4
    image = np.clip(smooth.astype(np.int16) + grain, 0, 255).astype(np.uint8)
    as_png, as_jpeg = image_file(image, "png"), image_file(image, "jpeg95")
    assert as_jpeg[:2] == b"\xff\xd8"
    assert len(as_jpeg) < len(as_png) / 1.5


def test_videos_have_limits_of_their_own() -> None:
    limits = Limits(max_pixels=40, max_video_pixels=64, max_bytes=2500)
    video = WireItem(id=0, prompt="", image=noise(4, 4, 3), frames=clip(4, 4, 4))  # 64 pixels

    def asked(*items: WireItem, given: Limits = limits) -> Any:
        body = pack_request(items, None, 0, Way(videos=True))
        return decoded(body.data, body.content_type, given)[1]

    assert len(asked(video).items) == 1
    assert len(asked(video, *(replace(video, id=i) for i in range(1, 5))).items) == 5  # 320 of 8 * 40
    for items, given, word in [
        ((video,), replace(limits, max_video_pixels=63), "too_many_pixels"),
        (tuple(replace(video, id=i) for i in range(6)), limits, "too_many_pixels"),
        ((of_size(41),), limits, "too_many_pixels"),
        ((video,), replace(limits, max_bytes=100, max_video_bytes=200), "too_many_bytes"),
        ((of_size(4),), replace(limits, max_bytes=100), "too_many_bytes"),
    ]:
        with pytest.raises(WireError) as caught:
            asked(*items, given=given)
        assert (caught.value.status, caught.value.word) == (413, word)


def test_pieces_go_by_what_the_server_has_room_for() -> None:
    items = [of_size(10, i, group=i // 2) for i in range(8)]

    def sizes(batch_size: int, groups: str | None = None, **room: int) -> list[int]:
        return [len(piece) for piece in chunks_of(items, batch_size, groups, RequestRoom(**room))]

    assert sizes(16) == [8]
    assert sizes(3) == [3, 3, 2]
    assert sizes(16, max_items=5) == [5, 3]
    assert sizes(16, max_pixels=25) == [2, 2, 2, 2]
    assert sizes(16, max_pixels=9) == [1] * 8  # too large alone goes alone
    assert sizes(16, max_bytes=3 * (27 * 10 // 8 + 2048)) == [3, 3, 2]
    assert sizes(16, "several", max_pixels=50) == [4, 4]
    assert sizes(3, "several") == [2, 2, 2, 2]
    assert sizes(16, "several", max_pixels=10) == [2, 2, 2, 2]  # a group stays whole
    assert sizes(16, "one") == [2, 2, 2, 2]
    heavy = [replace(of_size(1, i), metadata={"text": "x" * 5000}, prompt="ü" * 1000) for i in range(2)]
    assert len(chunks_of(heavy, 16, None, RequestRoom(max_bytes=20_000))) == 2
    for item in (
        WireItem(id=0, prompt="", image=noise(64, 64, 3)),
        WireItem(id=0, prompt="", image=RED, frames=clip(3, 64, 64)),
    ):
        body = pack_request([item], None, 0, Way(videos=True))
        assert (
            len(chunks_of([item, item], 16, None, RequestRoom(max_bytes=2 * len(body.data)))) == 2
        )  # noise is foreseen


RED = np.zeros((64, 64, 3), np.uint8)


def video_inputs(batch: int) -> RewardInputs:
    videos = torch.from_numpy(noise(batch, 3, 3, 8, 8)).float() / 255
    base = samples(batch)
    return RewardInputs(
        prompts=base.prompts, images=videos[:, 0], metadata=base.metadata, group_ids=base.group_ids,
        sample_ids=base.sample_ids, videos=videos, fps=8.0,
    )  # fmt: skip


def far(url: str, **options: Any) -> Reward:
    return build_reward("remote", options={"url": url, **options})


def test_videos_larger_than_a_request_reach_a_real_server_one_by_one() -> None:
    calls: list[int] = []

    def judge(given: RewardInputs) -> RewardOutput:
        assert given.videos is not None
        calls.append(len(given))
        return output_of([int(to_uint8(video).sum()) for video in given.videos], given)

    inputs = video_inputs(5)
    assert inputs.videos is not None
    expected = [int(to_uint8(video).sum()) for video in inputs.videos]
    served = reward_of(judge, needs=frozenset({"videos"}))
    with running(served, max_pixels=100, max_video_pixels=192) as server:  # a video has 3 * 64
        assert far(server.url)(inputs).values.tolist() == expected
        assert calls == [1] * 5
        # Four were on their way at once, in requests of one; those of one call fit into max_pixels together.
    with running(served, max_pixels=400) as server:
        calls.clear()
        assert far(server.url)(inputs).values.tolist() == expected
        assert max(calls) == 2
        jpeg = far(server.url, image_format="jpeg95")
        assert jpeg.version.endswith(":jpeg95")
        output = jpeg(inputs)
        assert output.valid.all()
        assert output.values.tolist() != expected
    with running(served, max_pixels=100, max_video_pixels=191) as server, pytest.raises(ValueError, match="video-mpix"):
        far(server.url)(inputs)


def test_a_server_that_knows_no_video_files_gets_frames() -> None:
    def decide(path: str, body: Any, number: int) -> Answer:
        said = health()
        said.body["rewards"]["level"]["needs"] = ["videos"]
        return said if path == "/health" else Answer(scores(body))

    with scripted(decide) as server:
        assert far(server.url)(video_inputs(2)).valid.all()
        assert [len(item["frames"]) for item in server.bodies()[0]["items"]] == [3, 3]
        assert server.requests[-1][0] == "/v1/score/multipart"


def test_a_full_queue_is_waited_for_without_counting_as_a_retry() -> None:
    def decide(path: str, body: Any, number: int) -> Answer:
        full = Answer({}, 429, {"Retry-After": "0.01"})
        return health() if path == "/health" else full if number < 9 else Answer(scores(body))

    with scripted(decide) as server:
        assert far(server.url, retries=0)(samples(2)).valid.all()
        assert len(server.bodies()) == 10
    with scripted(lambda path, body, number: health() if path == "/health" else Answer({}, 429)) as server:
        start = time.monotonic()
        errors = far(server.url, deadline=0.3, retries=0)(samples(2)).errors
        assert errors in ({"status_429": 2}, {"timeout": 2})  # the last one may be on its way when the time is up
        assert 0.1 < time.monotonic() - start < 2.0
