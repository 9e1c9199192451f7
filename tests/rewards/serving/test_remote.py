"""The remote reward, against servers that answer from a script and against the real one."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from reward_servers import Answer, Scripted, health, level_of, noise, reward_of, running, samples, scores, scripted

from flowrl.rewards import Reward, RewardInputs, RewardOutput, build_reward, output_of, reward_options
from flowrl.rewards.base.outputs import check_output


@pytest.fixture(autouse=True)
def _short_delays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flowrl.rewards.serving.retries.FIRST_DELAY", 0.01)


def reward_at(url: str, **options: Any) -> Reward:
    return build_reward("remote", options={"url": url, **options})


def answers(*script: Answer, kind: str = "pointwise", **about: Any) -> Any:
    """Health, then one answer after the other, the last for ever; body None stands for good scores."""

    def decide(path: str, body: Any, number: int) -> Answer:
        if path == "/health":
            return health(kind, **about)
        answer = script[min(number, len(script) - 1)]
        return Answer(scores(body), answer.status, answer.headers, answer.delay) if answer.body is None else answer

    return decide


def judged(server: Scripted, batch: int = 3, **options: Any) -> RewardOutput:
    return check_output(reward_at(server.url, **options)(samples(batch)), batch, "remote")


GOOD = Answer()


def test_a_healthy_server_is_asked_in_chunks() -> None:
    with scripted(answers(GOOD)) as server:
        reward = reward_at(server.url, batch_size=4, concurrency=2)
        assert (reward.kind, reward.waits) == ("remote", True)
        assert sorted(reward.needs) == ["images", "prompts"]
        assert reward.version == "remote:flowrl:level:level:1:png-8bit"
        output = check_output(reward(samples(10)), 10, "remote")
        assert output.values.tolist() == [float(i) for i in range(10)]  # the script's value is the id
        assert output.valid.all()
        assert not output.errors
        assert sorted(len(body["items"]) for body in server.bodies()) == [2, 4, 4]
        first = min(server.bodies(), key=lambda body: body["items"][0]["id"])
        assert (first["schema"], first["reward"], first["iteration"]) == (1, "level", 0)
        assert first["group_ids"] == [0, 0, 1, 1]
        assert {key: first["items"][1][key] for key in ("id", "prompt", "sample_id")} == {
            "id": 1, "prompt": "image 1", "sample_id": 101,
        }  # fmt: skip
        assert "metadata" not in first["items"][0]  # the server's reward does not need it


def test_status_500_twice_then_success() -> None:
    with scripted(answers(Answer({}, 500), Answer({}, 500), GOOD)) as server:
        assert judged(server).values.tolist() == [0.0, 1.0, 2.0]
        assert len(server.bodies()) == 3


def test_status_500_for_ever_fails_items_in_bounded_time() -> None:
    with scripted(answers(Answer({}, 500))) as server:
        start = time.monotonic()
        output = judged(server, retries=2)
        assert time.monotonic() - start < 5
        assert len(server.bodies()) == 3
    assert output.values.isnan().all()
    assert not output.valid.any()
    assert output.errors == {"status_500": 3}


@pytest.mark.slow
def test_a_slow_server_meets_the_deadline_and_others_keep_their_scores() -> None:
    def decide(path: str, body: Any, number: int) -> Answer:
        if path == "/health":
            return health()
        return Answer(scores(body), delay=8.0 if body["items"][0]["id"] == 2 else 0.0)

    with scripted(decide) as server:
        start = time.monotonic()
        output = judged(server, 6, batch_size=2, deadline=1.0, concurrency=2)
        assert time.monotonic() - start < 4
    assert output.valid.tolist() == [True, True, False, False, True, True]
    assert output.errors == {"timeout": 2}


def test_one_request_has_its_own_timeout_within_the_deadline() -> None:
    with scripted(answers(Answer(delay=8.0), GOOD)) as server:
        assert judged(server, timeout=0.3, deadline=20.0).values.tolist() == [0.0, 1.0, 2.0]
        assert len(server.bodies()) == 2


@pytest.mark.slow
def test_more_chunks_than_time_are_given_up_together() -> None:
    with scripted(answers(GOOD, Answer(delay=8.0))) as server:
        output = judged(server, 6, batch_size=1, concurrency=1, deadline=1.0)
    assert output.valid.tolist() == [True] + [False] * 5
    assert output.errors == {"timeout": 5}


def test_items_are_matched_by_id_not_by_position() -> None:
    def decide(path: str, body: Any, number: int) -> Answer:
        if path == "/health":
            return health()
        reply = scores(body, values=lambda i: i * 10.0)
        reply["items"].reverse()
        reply["items"].insert(1, {"id": 999, "value": 5.0})
        return Answer(reply)

    with scripted(decide) as server:
        assert judged(server).values.tolist() == [0.0, 10.0, 20.0]


def test_what_is_wrong_with_items_fails_them_alone() -> None:
    def decide(path: str, body: Any, number: int) -> Answer:
        if path == "/health":
            return health()
        items: list[dict[str, Any]] = scores(body)["items"]
        items[1]["value"] = None
        items[2]["value"] = float("nan")  # written as NaN, which is no JSON
        items[3] |= {"value": 7.0, "error": "missing_field"}
        items[4]["value"] = "3"
        items[5]["id"] = 6
        items[0]["parts"] = {"a": 1.5, "b": None}
        return Answer({"schema": 1, "version": "level:1", "items": items})

    with scripted(decide) as server:
        output = judged(server, 8)
    assert output.valid.tolist() == [True] + [False] * 6 + [True]
    assert output.errors == {
        "null": 1, "not_finite": 1, "missing_field": 1, "bad_value": 1, "missing_id": 1, "duplicate_id": 1,
    }  # fmt: skip
    assert list(output.parts) == ["a"]
    assert output.parts["a"][0] == 1.5
    assert output.parts["a"][1:].isnan().all()


@pytest.mark.parametrize("status", [408, 425, 429, 503])
def test_refusals_for_now_are_tried_again(status: int) -> None:
    with scripted(answers(Answer({}, status, {"Retry-After": "0.3"}), GOOD)) as server:
        start = time.monotonic()
        assert judged(server).valid.all()
        assert time.monotonic() - start >= 0.3
        assert len(server.bodies()) == 2


def test_a_wait_beyond_the_deadline_is_not_begun() -> None:
    with scripted(answers(Answer({}, 429, {"Retry-After": "60"}))) as server:
        assert judged(server, deadline=2.0).errors == {"status_429": 3}
        assert len(server.bodies()) == 1


@pytest.mark.parametrize("body", [b'{"schema": 1, "items": [', b"<html>", b"", b"[1]", b'{"schema": 2, "items": []}'])
def test_replies_that_cannot_be_read_are_tried_again(body: bytes) -> None:
    with scripted(answers(Answer(body), GOOD)) as server:
        assert judged(server).valid.all()
    with scripted(answers(Answer(body))) as server:
        assert judged(server, retries=1).errors == {"garbage": 3}
        assert len(server.bodies()) == 2


def test_other_refusals_are_final() -> None:
    with scripted(answers(Answer({"detail": "no such record"}, 422))) as server:
        assert judged(server).errors == {"status_422": 3}
        assert len(server.bodies()) == 1


@pytest.mark.parametrize(
    ("status", "advice"),
    [(401, "give token_env"), (403, "give token_env"), (404, "check url"), (413, "raise the server's limits")],
)
def test_refusals_that_are_the_configurations_fault_are_an_error(status: int, advice: str) -> None:
    with (
        scripted(answers(Answer({"error": "x", "detail": "so it is."}, status))) as server,
        pytest.raises(ValueError, match=rf"answered status {status} \(so it is\.\): {advice}"),
    ):
        judged(server)


def test_another_version_in_the_middle_of_a_run_fails_its_items() -> None:
    def decide(path: str, body: Any, number: int) -> Answer:
        return health() if path == "/health" else Answer(scores(body, version="level:2" if number else "level:1"))

    with scripted(decide) as server:
        reward = reward_at(server.url)
        assert reward(samples(2)).valid.all()
        assert reward(samples(2)).errors == {"version_changed": 2}


def test_groups_are_sent_whole() -> None:
    inputs = samples(7)
    mixed = RewardInputs(
        prompts=inputs.prompts, images=inputs.images, metadata=inputs.metadata, sample_ids=inputs.sample_ids,
        group_ids=torch.tensor([5, 3, 5, 3, 5, 8, 2**40]),
    )  # fmt: skip
    with scripted(answers(GOOD, kind="groupwise")) as server:
        reward = reward_at(server.url, batch_size=2, concurrency=1)
        assert reward.kind == "groupwise"
        assert reward(mixed).values.tolist() == [float(i) for i in range(7)]
        assert [body["group_ids"] for body in server.bodies()] == [[5, 5, 5], [3, 3], [8, 2**40]]
        assert [[item["id"] for item in body["items"]] for body in server.bodies()] == [[0, 2, 4], [1, 3], [5, 6]]


def test_the_token_is_sent_and_no_proxy_gets_in_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # nobody listens there
    monkeypatch.setenv("REWARD_TOKEN", " s3cret ")
    with scripted(answers(GOOD)) as server:
        assert judged(server, token_env="REWARD_TOKEN").valid.all()
        assert [headers["Authorization"] for _, _, headers in server.requests] == ["Bearer s3cret"] * 2
        judged(server)
        assert "Authorization" not in server.requests[-1][2]


def test_servers_that_are_not_ready_are_waited_for_and_then_an_error() -> None:
    def decide(path: str, body: Any, number: int) -> Answer:
        asked = sum(path == "/health" for path, _, _ in state.requests)
        return Answer({"status": "loading"}, 503) if asked < 3 else health(max_items=8)

    with scripted(decide) as state:
        reward_at(state.url, batch_size=8)
        assert len(state.requests) == 3
        with pytest.raises(ValueError, match=r"reward must be one of level, which .* serves, got 'hps'"):
            reward_at(state.url, reward="hps")
        url = state.url
    with pytest.raises(ValueError, match=r"no reward server is ready at .*connection.*flowrl serve NAME"):
        reward_at(url, retries=1)
    late = reward_at(url, wait=False, retries=0)
    assert late.version == "remote:flowrl:default:unknown:png-8bit"
    assert late(samples(2)).errors == {"connection": 2}
    refusing: list[tuple[Answer, str]] = [
        (Answer({"error": "unauthorized", "detail": "the token is wrong."}, 401), r"status 401: the token is wrong\."),
        (Answer(b"<html>"), "garbage"),
        (
            Answer({}, 404),
            r"ready at http://[\d.:]+/health \(status 404: .*asks url/health and url/v1/score/multipart, so",
        ),
        (Answer({"status": "ok"}), "protocol must be that of the server, or token_env is missing"),
        (Answer({"rewards": ["clip"]}), "does not say which rewards"),
        (Answer({"rewards": {"a": {}, "b": {}}}), "reward must be one of a, b, which .* serves, got None"),
    ]
    for answer, message in refusing:
        with (
            scripted(lambda path, body, number, answer=answer: answer) as server,  # type: ignore[misc]
            pytest.raises(ValueError, match=message),
        ):
            reward_at(server.url)


def test_the_formats_of_other_servers() -> None:
    def flow_factory(path: str, body: Any, number: int) -> Answer:
        return (
            Answer({"status": "ok"})
            if path == "/health"
            else Answer({"rewards": [0.5, None, 2][: len(body["prompt"])]})
        )

    with scripted(flow_factory) as server:
        output = judged(server, protocol="flow_factory")
        assert output.values.nan_to_num(-1).tolist() == [0.5, -1.0, 2.0]
        assert output.errors == {"null": 1}
        assert server.requests[-1][0] == "/compute"
        grouped = reward_at(server.url, protocol="flow_factory", kind="groupwise", concurrency=1)
        grouped(samples(4))
        assert [len(body["prompt"]) for body in server.bodies()[1:]] == [2, 2]  # one group a request

    def unirl(path: str, body: Any, number: int) -> Answer:
        if path == "/rewards":
            return Answer({"rewards": ["clip", "hpsv2"]})
        results = [{"clip": {"clip": 0.25, "other": i}} for i in range(len(body["requests"]))]
        errors: list[dict[str, str]] = [{} for _ in results]
        errors[1] = {"clip": "RuntimeError('out of memory')"}
        return Answer({"results": results, "errors": errors})

    with scripted(unirl) as server:
        output = judged(server, protocol="unirl", reward="clip")
        assert output.values.nan_to_num(-1).tolist() == [0.25, -1.0, 0.25]
        assert output.errors == {"server_error": 1}
        assert output.parts["other"].nan_to_num(-1).tolist() == [0.0, -1.0, 2.0]
        with pytest.raises(ValueError, match="reward must be one of clip, hpsv2"):
            reward_at(server.url, protocol="unirl", reward="ocr")


def test_through_the_real_server_a_reward_gives_what_it_gives_here() -> None:
    local = build_reward("jpeg_compressibility")
    pixels = torch.from_numpy(noise(9, 3, 24, 24)).float() / 255
    base = samples(9)
    inputs = RewardInputs(
        prompts=base.prompts, images=pixels, metadata=base.metadata, group_ids=base.group_ids,
        sample_ids=base.sample_ids,
    )  # fmt: skip
    here = local(inputs)
    assert len(set(here.values.tolist())) > 1
    with running({"jpeg": local}) as server:
        far = reward_at(server.url, batch_size=4)
        there = check_output(far(inputs), 9, "remote")
        order = [3, 8, 0, 5]
        part = far(inputs[order])
    assert there.values.tolist() == here.values.tolist()
    assert there.parts["kilobytes"].tolist() == here.parts["kilobytes"].tolist()
    assert part.values.tolist() == here.values[order].tolist()


def test_videos_and_images_to_edit_reach_the_real_server() -> None:
    videos = torch.from_numpy(noise(3, 4, 3, 5, 6)).float() / 255
    sources = [[torch.from_numpy(noise(3, 2, 2 + i)).float() / 255] for i in range(3)]
    base = samples(3)
    inputs = RewardInputs(
        prompts=base.prompts, images=videos[:, 0], metadata=base.metadata, group_ids=base.group_ids,
        sample_ids=base.sample_ids, videos=videos, fps=8.0, source_images=sources, iteration=4,
    )  # fmt: skip

    def judge(given: RewardInputs) -> RewardOutput:
        assert given.videos is not None
        assert given.source_images is not None
        assert (given.fps, given.iteration) == (8.0, 4)
        values = [float(v.sum() + s[0].sum()) for v, s in zip(given.videos, given.source_images, strict=True)]
        return output_of(values, given)

    served = reward_of(judge, needs=frozenset({"videos", "source_images"}))
    with running(served) as server:
        reward = reward_at(server.url)
        assert sorted(reward.needs) == ["source_images", "videos"]
        there = reward(inputs)
        with pytest.raises(ValueError, match="needs videos, and there are none"):
            reward(base)
    expected = [float(v.sum() + s[0].sum()) for v, s in zip(videos, sources, strict=True)]
    torch.testing.assert_close(there.values, torch.tensor(expected), rtol=1e-5, atol=0)  # float32 sums


def test_a_server_of_a_server_keeps_values_apart() -> None:
    """Two requests with the same ids and sample ids, scored in one batch by a reward that is remote itself."""
    with running(reward_of(level_of)) as inner, running({"outer": reward_at(inner.url)}) as outer:
        reward = reward_at(outer.url, batch_size=3, concurrency=4)
        assert reward.kind == "remote"
        assert reward(samples(12, first=40)).values.tolist() == [40.0 + i for i in range(12)]


def wrong_options() -> Iterator[tuple[dict[str, Any], str]]:
    yield {}, "required key 'url' is missing"
    for url in ("127.0.0.1:8190", "ftp://x", "http://", "http://x/?a=1", 5):
        yield {"url": url}, "url must be"
    yield {"url": "http://user:pass@x"}, "url must not hold a user name or a password"
    good = {"url": "http://x"}
    yield {"url": []}, "url is an empty list"
    yield {"url": ["http://x", "y"]}, "url must be the address of a server"
    yield {"url": ["http://x", "http://x/"]}, "url names an address twice"
    yield {"url": ["http://x", "http://y"], "wait": False}, "wait: false leaves unknown"
    yield {**good, "protocol": "grpc"}, "protocol must be one of flowrl, flow_factory, unirl, got 'grpc'"
    yield {**good, "protocol": "unirl"}, "protocol unirl needs reward"
    yield {**good, "protocol": "flow_factory", "reward": "a"}, "has one reward per server"
    yield {**good, "protocol": "unirl", "reward": "a", "kind": "groupwise"}, "kind must be remote, got groupwise"
    yield {**good, "token_env": "NOT_THERE_AT_ALL"}, "NOT_THERE_AT_ALL is not set"
    yield {**good, "needs": "images"}, r"needs must be a list \(text each\) or null, got 'images'"
    yield {**good, "needs": ["depths"]}, "protocol flowrl cannot send depths"
    yield {**good, "protocol": "unirl", "reward": "a", "needs": ["videos"]}, "protocol unirl cannot send videos"
    yield {**good, "batch_size": 0}, "batch_size must be at least 1, got 0"
    yield {**good, "concurrency": 0}, "concurrency must be at least 1"
    yield {**good, "retries": -1}, "retries must be at least 0, got -1"
    yield {**good, "timeout": 0}, "timeout must be above 0, got 0"
    yield {**good, "deadline": float("inf")}, "deadline must be a finite number, got inf"


def test_option_errors() -> None:
    for options, message in wrong_options():
        with pytest.raises(ValueError, match=message):
            reward_options("remote", options)
