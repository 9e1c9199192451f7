"""Several servers of one reward: who is asked, what becomes of a dead one, and whose word counts."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from reward_servers import Answer, Scripted, health, noise, running, samples, scores, scripted, until

from flowrl.rewards import Reward, RewardInputs, build_reward
from flowrl.rewards.serving.retries import Failure, ServerPool


@pytest.fixture(autouse=True)
def _short_delays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flowrl.rewards.serving.retries.FIRST_DELAY", 0.01)
    monkeypatch.setattr("flowrl.rewards.serving.retries.FIRST_ASIDE", 0.05)


def at(*servers: Scripted, **options: Any) -> Reward:
    return build_reward("remote", options={"url": [server.url for server in servers], **options})


def good(path: str, body: Any, number: int) -> Answer:
    return health() if path == "/health" else Answer(scores(body))


def sizes(server: Scripted) -> list[int]:
    return [len(body["items"]) for body in server.bodies()]


# ---- the choice ------------------------------------------------------------------------------------------------------


def test_each_request_goes_to_the_server_with_the_fewest_in_flight() -> None:
    pool = ServerPool(("a", "b", "c"), lambda _: True)
    free, entered, taken = threading.Event(), threading.Semaphore(0), list[str]()

    def send(server: str) -> str:
        taken.append(server)
        entered.release()
        if server != "b":
            assert free.wait(10)
        return server

    with ThreadPoolExecutor(8) as threads:
        jobs = []
        for _ in range(8):  # one after the other: a and c keep theirs, b answers at once
            jobs.append(threads.submit(pool.ask, send))
            assert entered.acquire(timeout=10)
            until(lambda: taken[-1] != "b" or jobs[-1].done())
        free.set()
        assert [job.result() for job in jobs] == taken
    assert taken == ["a", "b", "c", *["b"] * 5]


def test_a_server_that_does_not_answer_is_left_alone_until_it_says_that_it_is_back() -> None:
    alive, asked, probed = {"a": False, "b": True}, list[str](), list[str]()

    def is_back(server: str) -> bool:
        probed.append(server)
        return alive[server]

    def send(server: str) -> str | Failure:
        asked.append(server)
        return server if alive[server] else Failure(error="connection")

    pool = ServerPool(("a", "b"), is_back)
    assert [pool.ask(send) for _ in range(4)] == ["b"] * 4
    assert asked == ["a", "b", "b", "b", "b"]  # the request that a lost went to b at once
    time.sleep(0.06)
    assert pool.ask(send) == "b"
    until(lambda: probed == ["a"])
    time.sleep(0.06)  # its time is twice as long now, so nobody asks
    assert pool.ask(send) == "b"
    assert probed == ["a"]
    alive["a"] = True
    time.sleep(0.06)
    assert pool.ask(send) == "b"
    until(lambda: probed == ["a", "a"])
    until(lambda: pool.ask(send) == "a")


def test_what_another_server_would_refuse_too_is_not_sent_to_it() -> None:
    asked: list[str] = []

    def send(server: str) -> Failure:
        asked.append(server)
        return Failure(error="status_422", again=False)

    assert ServerPool(("a", "b"), lambda _: True).ask(send) == Failure(error="status_422", again=False)
    assert asked == ["a"]


# ---- the reward ------------------------------------------------------------------------------------------------------


def test_two_servers_share_the_chunks_and_say_one_version() -> None:
    def slow(path: str, body: Any, number: int) -> Answer:
        return health() if path == "/health" else Answer(scores(body), delay=0.02)

    with scripted(slow) as a, scripted(slow) as b:
        reward = at(a, b, batch_size=2, concurrency=1)
        assert reward(samples(24)).values.tolist() == [float(i) for i in range(24)]
        assert sum(sizes(a)) + sum(sizes(b)) == 24
        assert min(len(sizes(a)), len(sizes(b))) >= 4
        assert reward.version == at(a).version == "remote:flowrl:level:level:1:png-8bit"


def test_groups_stay_whole_on_whatever_server() -> None:
    def grouped(path: str, body: Any, number: int) -> Answer:
        return health("groupwise") if path == "/health" else Answer(scores(body))

    with scripted(grouped) as a, scripted(grouped) as b:
        assert at(a, b, batch_size=2)(samples(12)).valid.all()
        groups = [body["group_ids"] for server in (a, b) for body in server.bodies()]
    assert sorted(groups) == [[i, i] for i in range(6)]


def test_servers_that_differ_are_refused_at_the_start() -> None:
    def other(path: str, body: Any, number: int) -> Answer:
        return health(version="level:2")

    with scripted(good) as a, scripted(other) as b:
        message = rf"serve different rewards: {a.url} says .*level:1, and {b.url} .*level:2: start them with the same"
        with pytest.raises(ValueError, match=message):
            at(a, b)
        url = b.url
    with scripted(good) as a, pytest.raises(ValueError, match=f"no reward server is ready at {url}"):
        build_reward("remote", options={"url": [a.url, url], "retries": 0})


def test_a_server_that_comes_back_with_another_model_is_passed_over() -> None:
    def changed(path: str, body: Any, number: int) -> Answer:
        return health() if path == "/health" else Answer(scores(body, version="level:2"))

    with scripted(good) as a, scripted(changed) as b:
        output = at(b, a, batch_size=1)(samples(8))
        assert output.valid.all()
        assert sum(sizes(a)) == 8


def noisy(batch: int) -> RewardInputs:
    base = samples(batch)
    return RewardInputs(
        prompts=base.prompts, images=torch.from_numpy(noise(batch, 3, 24, 24)).float() / 255, metadata=base.metadata,
        group_ids=base.group_ids, sample_ids=base.sample_ids,
    )  # fmt: skip


def test_of_two_real_servers_one_stops_in_the_middle_and_nothing_is_lost() -> None:
    local, inputs = build_reward("jpeg_compressibility"), noisy(48)
    with running({"jpeg": local}) as a, running({"jpeg": local}, grace=0.1) as b:
        reward = build_reward("remote", options={"url": [a.url, b.url], "batch_size": 2})
        items = b.service.metrics.items.labels("jpeg")

        def stop() -> None:
            until(lambda: items._value.get() >= 4)
            b.service.stop()

        stopping = threading.Thread(target=stop)
        stopping.start()
        there = reward(inputs)
        again = reward(inputs)
        stopping.join()
        assert not b.service.active
        assert 4 <= items._value.get() < 48
    here = local(inputs)
    assert not there.errors
    assert there.values.tolist() == again.values.tolist() == here.values.tolist()


def test_where_all_servers_are_dead_items_fail() -> None:
    with scripted(good) as a, scripted(good) as b:
        reward = at(a, b, retries=1)
        assert reward(samples(2)).valid.all()
    assert reward(samples(2)).errors == {"connection": 2}
