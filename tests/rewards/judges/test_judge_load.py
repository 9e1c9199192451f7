"""Judges at full load: what is in flight, what is encoded, limits, several servers, dead ones, what the log says."""

from __future__ import annotations

import base64
import gc
import io
import json
import logging
import threading
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from scripted_judges import edits
from served_judge import Served, served_judge
from toy_pipeline import write_toy

from flowrl.cli import main
from flowrl.evaluation.kept_answers import Asking, ask_kept
from flowrl.pipelines import PIPELINES
from flowrl.rewards import build_reward
from flowrl.rewards.judges import call_limits
from flowrl.rewards.judges.call_limits import USAGE, AskingPace, CallLimits, Usage, usage_row
from flowrl.rewards.judges.chat import Answer, Chat, Question, build_chat, with_identities
from flowrl.rewards.judges.server_chat import ServerJudge, tokens_of
from flowrl.rewards.serving import retries
from flowrl.runtime.journal import Journal
from flowrl.runtime.randomness import counter_seed

CPU = torch.device("cpu")
REFUSES = "http://127.0.0.1:9/v1"  # the discard port: nobody listens


@pytest.fixture
def server() -> Iterator[Served]:
    with served_judge() as judge:
        yield judge


def chat_of(*servers: Served | str, **options: Any) -> ServerJudge:
    urls = [server if isinstance(server, str) else server.url for server in servers]
    chat = build_chat({"server": urls, "model": "stub", **options}, device=CPU)
    assert isinstance(chat, ServerJudge)
    return chat


def asks(count: int) -> list[Question]:
    return [Question(parts=(f"Is it good? ({number})",), top_logprobs=20) for number in range(count)]


def errors(answers: list[Answer]) -> set[str | None]:
    return {answer.error for answer in answers}


# ---- in flight -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_as_many_questions_are_in_flight_as_allowed_over_all_who_ask(server: Served) -> None:
    """Four threads of a run may ask one judge at a time: 64 in all, over connections that are kept."""
    server.behave(latency=1.0, read=False)
    chat = chat_of(server)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: chat.ask(asks(32)), range(4)))
    assert all(errors(answers) == {None} for answers in found)
    stats = server.stats()
    assert (stats["peak"], stats["requests"]) == (64, 128)
    assert stats["connections"] <= 64 + 2 + stats.get("probes", 0)  # two are of this test


def test_each_distinct_image_is_encoded_once(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """By content: rewards read an image again for each question. Those alike on a coarse grid are not confused."""
    encoded: list[np.ndarray] = []
    inner = call_limits.image_part

    def counted(image: np.ndarray, image_format: Any) -> bytes:
        encoded.append(image)
        return inner(image, image_format)

    monkeypatch.setattr(call_limits, "image_part", counted)
    flat = np.full((40, 40, 3), 90, dtype=np.uint8)
    other = flat.copy()
    other[1, 1] = 200  # off the coarse grid
    wide = np.full((40, 56, 3), 90, dtype=np.uint8)
    shown = [flat, flat.copy(), other, wide, other.copy(), flat]
    chat_of(server, image_format="png").ask([Question(parts=(image, "Well?"), max_tokens=9) for image in shown])
    assert len(encoded) == 3
    parts = [body["messages"][0]["content"][0] for body in server.bodies()]
    assert len({part["length"] for part in parts}) == 3


@pytest.mark.parametrize("image_format", ["webp", "png"])
def test_formats_without_loss_keep_the_pixels(image_format: Any) -> None:
    draws = np.random.default_rng(counter_seed("formats"))
    image = draws.integers(0, 256, (17, 23, 3), dtype=np.uint8)
    url = json.loads(call_limits.image_part(image, image_format))["image_url"]["url"]
    head, _, data = url.partition(",")
    assert head == f"data:image/{image_format};base64"
    np.testing.assert_array_equal(np.asarray(Image.open(io.BytesIO(base64.b64decode(data))).convert("RGB")), image)


def test_nothing_is_lost_where_one_request_in_ten_goes_wrong(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retries, "FIRST_DELAY", 0.01)
    USAGE.take()
    server.behave(status_500=0.05, garbage=0.05, busy=0.05, retry_after=0.01)
    assert errors(chat_of(server).ask(asks(200))) == {None}
    used, stats = USAGE.take(), server.stats()
    assert min(stats["status_500"], stats["garbage"], stats["status_429"]) > 0
    assert used.requests == stats["requests"]
    assert used.retries == stats["requests"] - 200
    assert (used.tokens, len(used.seconds)) == (200 * 100, 200)


def test_whoever_is_interrupted_leaves_no_requests_behind(server: Served) -> None:
    server.behave(latency=5.0)
    chat = chat_of(server, concurrency=2)

    def ask() -> None:
        with pytest.raises(CancelledError):
            chat.ask(asks(4))

    threading.Thread(target=ask, daemon=True).start()
    end = time.monotonic() + 5
    while server.stats().get("requests", 0) < 2 and time.monotonic() < end:
        time.sleep(0.02)
    thread = chat.lines._thread
    chat.lines.close()
    assert not thread.is_alive()
    assert server.stats()["requests"] == 2


# ---- dead servers, and several ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["hangs", "refuses"])
def test_a_dead_server_is_noticed_and_said_and_asked_again(
    server: Served, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """At a tenth of the default times, whose deadlines would have each question wait for two minutes."""
    if kind == "hangs":
        server.behave(hang=True)
    chat = chat_of(server if kind == "hangs" else REFUSES, down_after=0.5)
    begun = time.monotonic()
    with caplog.at_level(logging.WARNING):
        answers = chat.ask(asks(100))
        assert errors(answers) <= {"server_down", "connection"}
        assert "server_down" in errors(answers)
        assert time.monotonic() - begun < 5
        begun = time.monotonic()
        assert errors(chat.ask(asks(100))) == {"server_down"}
        assert time.monotonic() - begun < 0.5
        assert sum("has not answered for" in record.message for record in caplog.records) == 1
        if kind == "hangs":
            server.behave(hang=False)
            end = time.monotonic() + 10
            while chat.lines.dead and time.monotonic() < end:
                time.sleep(0.02)
            assert errors(chat.ask(asks(10))) == {None}
            assert sum("answers again after" in record.message for record in caplog.records) == 1


@pytest.mark.slow
def test_a_slow_server_is_not_taken_for_dead(server: Served) -> None:
    server.behave(latency=1.5)
    chat = chat_of(server, down_after=0.6)
    assert errors(chat.ask(asks(3))) == {None}
    assert server.stats()["probes"] >= 1


def test_questions_of_a_dead_server_go_to_the_other(server: Served) -> None:
    """Both take their share while they live."""
    with served_judge() as other:
        for one in (server, other):
            one.behave(latency=0.02, read=False)
        chat = chat_of(server, other, down_after=0.5)
        assert errors(chat.ask(asks(100))) == {None}
        shares = [one.stats()["requests"] for one in (server, other)]
        assert sum(shares) == 100
        assert min(shares) >= 30
        server.behave(hang=True)
        assert errors(chat.ask(asks(200))) == {None}
        assert other.stats()["requests"] >= shares[1] + 200
        assert chat.lines.lines[0].dead
        assert not chat.lines.lines[1].dead


# ---- limits ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_requests_and_tokens_a_minute(server: Served) -> None:
    """Ten questions at 1200 a minute take 9 pauses of 50 ms, and so do those of 100 tokens at 120,000 a minute."""
    for limit in ({"requests_per_minute": 1200}, {"tokens_per_minute": 120_000}):
        chat = chat_of(server, **limit)
        chat.ask(asks(1))  # from here on it knows how many tokens a question costs
        time.sleep(0.1)
        begun = time.monotonic()
        assert errors(chat.ask(asks(10))) == {None}
        assert time.monotonic() - begun >= 0.45


def test_pace_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(call_limits, "time", type("Clock", (), {"monotonic": staticmethod(lambda: now[0])}))
    question = Question(parts=("x" * 400, np.zeros((2, 2, 3), dtype=np.uint8)), max_tokens=100)
    pace = AskingPace(CallLimits.shared(60, 12_000, 1000, by=2))
    assert pace.limits == CallLimits(requests_per_minute=30, tokens_per_minute=6000, tokens=500)
    assert pace.book(question) == 1200  # 400 / 4 letters, 1000 for the image, 100 for the answer: a guess
    assert pace._next == {"requests": 102.0, "tokens": 112.0}
    pace.settle(1200, 400)
    assert pace._next["tokens"] == pytest.approx(104.0, abs=1e-9)
    assert pace.book(question) == 400  # as many as the one before
    assert pace._next == {"requests": 104.0, "tokens": pytest.approx(108.0, abs=1e-9)}
    pace.settle(400, 0)  # it failed
    assert pace._next["tokens"] == pytest.approx(104.0, abs=1e-9)
    assert not pace.spent
    pace.settle(0, 100)
    assert pace.spent


@pytest.mark.slow
def test_all_tokens_are_used(server: Served) -> None:
    chat = chat_of(server, concurrency=1, max_tokens_total=250)
    answers = chat.ask(asks(5))
    assert [answer.error for answer in answers] == [None, None, None, "max_tokens_total", "max_tokens_total"]
    with pytest.raises(ValueError, match="judge stub has used 300 tokens, and max_tokens_total is 250: raise it"):
        chat.ask(asks(1))
    del chat
    gc.collect()
    with pytest.raises(ValueError, match="has used 300 tokens"):  # a judge built again goes on counting
        chat_of(server, concurrency=1, max_tokens_total=250).ask(asks(1))


def test_a_command_ends_where_tokens_run_out_in_its_last_questions(server: Served, tmp_path: Path) -> None:
    chat = chat_of(server, concurrency=1, max_tokens_total=250)
    with Journal(tmp_path, {"judge": "stub"}) as journal:
        with pytest.raises(ValueError, match="has used all tokens that max_tokens_total gives it"):
            ask_kept(
                chat, list("abcde"), lambda place, *_: asks(5)[place], lambda *_: (None, {}), journal,
                Asking(attempts=3), label="it",
            )  # fmt: skip
        assert list(journal.rows) == ["a", "b", "c"]


def test_tokens_that_a_server_does_not_say_are_guessed(server: Served, caplog: pytest.LogCaptureFixture) -> None:
    server.behave(tokens=0)
    chat = chat_of(server, tokens_per_minute=1e6)
    with caplog.at_level(logging.WARNING):
        assert errors(chat.ask(asks(3))) == {None}
    assert chat.pace.used >= 3
    assert caplog.text.count("does not say how many tokens") == 1


def test_a_dead_judge_with_a_limit_fails_at_once() -> None:
    """Questions that wait for their turn wake, and what they booked is given back."""
    chat = chat_of(REFUSES, down_after=0.5, requests_per_minute=6, tokens_per_minute=6000)
    begun = time.monotonic()
    assert "server_down" in errors(chat.ask(asks(10)))
    assert errors(chat.ask(asks(10))) == {"server_down"}
    assert time.monotonic() - begun < 5
    assert chat.pace._next["requests"] - begun < 45  # of ten questions, 100 s


def test_every_request_is_booked_and_counted(server: Served) -> None:
    """Of one try too, which goes from a server that fails to the next; and the tokens of a reply of no use."""
    USAGE.take()
    with served_judge() as other:
        server.behave(status_500=1.0)
        chat = chat_of(server, other, requests_per_minute=60_000)
        booked: list[Question] = []
        inner = chat.pace.book
        chat.pace.book = lambda question: booked.append(question) or inner(question)  # type: ignore[method-assign,func-returns-value]
        assert errors(chat.ask(asks(1))) == {None}
        used = USAGE.take()
        assert (used.requests, used.retries, len(booked)) == (2, 1, 2)
    assert tokens_of({"choices": [], "usage": {"total_tokens": 70}}) == 70
    useless: list[Any] = [[], "no", {"usage": None}, {"usage": {"total_tokens": "x"}}]
    assert [tokens_of(reply) for reply in useless] == [0] * 4


def test_proxies_are_left_out_for_each_server_of_this_machine() -> None:
    lines = chat_of(REFUSES, "http://judge.example:1/v1").lines.lines
    assert [line._connect.keywords["trust_env"] for line in lines] == [False, True]  # type: ignore[attr-defined]


# ---- structured answers ----------------------------------------------------------------------------------------------


def test_structured_answers(server: Served, caplog: pytest.LogCaptureFixture) -> None:
    schema = {"type": "object"}
    question = Question(parts=("Rate it.",), max_tokens=9, schema=schema)
    wanted = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}
    chat_of(server).ask([question])
    chat_of(server, structured=True).ask([question, Question(parts=("Well?",), max_tokens=9)])
    assert sorted(str(body.get("response_format")) for body in server.bodies()) == sorted(["None", str(wanted), "None"])
    server.behave(refuses="response_format")
    with caplog.at_level(logging.WARNING):
        assert errors(chat_of(server, structured=True).ask([question])) == {"status_400"}
    assert "structured: true sends response_format; leave it out" in caplog.text


def test_judges_of_lists_ask_for_their_form(server: Served) -> None:
    """Ratings of an edit by the two rewards, and two images compared."""
    judge = {"server": server.url, "model": "stub", "structured": True}
    server.behave(answer='{"reasoning": "It {may} be.", "score": [20, 10]}')
    for name, options in (("edit_score", {"method": "ratings"}), ("unified_reward", {"style": "edit"})):
        output = build_reward(name, options={"judge": judge, **options})(edits([50]))
        assert output.errors == {}
    server.behave(answer='{"reasoning": "[1]", "scores": [2.5, 7]}')
    comparator = {"judge": judge, "style": "scores_json"}
    reward = build_reward("win_rate", options={"comparator": comparator})
    inputs = replace(edits([50, 100]), group_ids=torch.zeros(2, dtype=torch.int64))
    assert sorted(reward(inputs).values.tolist()) == [0.0, 1.0]
    forms = [body["response_format"]["json_schema"]["schema"]["properties"] for body in server.bodies()]
    ranges = [
        (key, form[key]["minItems"], form[key]["items"]["minimum"], form[key]["items"]["maximum"])
        for form in forms for key in form if key != "reasoning"
    ]  # fmt: skip
    assert ranges == [("score", 2, 0, 25)] * 4 + [("scores", 2, 0, 10)]


# ---- what it is, and what the log says -------------------------------------------------------------------------------


def test_a_judge_is_the_same_wherever_it_runs() -> None:
    def version(**judge: Any) -> str:
        chat: Chat = build_chat({"server": "http://a:1/v1", "model": "m", **judge}, device=CPU)
        return chat.version

    assert version() == version(server="http://b:2/v1") == version(server=["http://a:1/v1", "http://b:2/v1"])
    assert version() == version(concurrency=2, requests_per_minute=9, down_after=None)
    others = [version(**judge) for judge in ({"model": "n"}, {"image_format": "png"}, {"structured": True})]
    assert len({version(), *others}) == 4
    options = {"comparator": {"judge": {"server": "http://a:1/v1", "model": "m"}}, "parts": [1, {"x": 2}]}
    moved = {"comparator": {"judge": {"server": "http://b:2/v1", "model": "m", "retries": 1}}, "parts": [1, {"x": 2}]}
    assert with_identities(options) == with_identities(moved) != options


def test_rewards_with_one_judge_share_its_limits() -> None:
    one = chat_of(REFUSES, requests_per_minute=9)
    assert chat_of(REFUSES, requests_per_minute=9) is one
    assert chat_of(REFUSES, requests_per_minute=8) is not one


def test_usage_of_several_processes() -> None:
    assert usage_row([Usage().take(), Usage().take()]) == {}
    one, two = Usage(), Usage()
    for second in range(1, 20):
        one.add(tokens=10, seconds=float(second))
    two.add(tokens=10, seconds=20.0)
    two.add(again=True)
    row = usage_row([one.take(), two.take()])
    assert row == {
        "judge/requests": 21, "judge/retries": 1, "judge/tokens": 200,
        "judge/seconds": 10.5, "judge/seconds_p95": 19.05,
    }  # fmt: skip
    assert usage_row([one.take()]) == {}


def test_what_judges_cost_stands_in_the_log(server: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reward that judges every image once, by the log-probabilities of a server."""
    monkeypatch.setitem(PIPELINES, "sd3", "toy_pipeline")
    judge = f"{{server: {server.url}, model: stub}}"
    toy = write_toy(tmp_path)
    USAGE.take()
    reward = f"rewards=[{{name: yes_no, options: {{judge: {judge}}}}}]"
    assert main(["train", str(toy), f"out={tmp_path / 'run'}", reward, "num_iterations=1"]) == 0
    (row,) = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines() if "reward" in line
    ]
    assert row["judge/requests"] == server.stats()["requests"] > 0
    assert row["judge/tokens"] == 100 * row["judge/requests"]
    assert row["judge/retries"] == 0
    assert 0 < row["judge/seconds"] <= row["judge/seconds_p95"]
    probability = np.exp(-0.4) + np.exp(-2.0)
    assert row["reward"] == pytest.approx(probability / (probability + np.exp(-1.6)), abs=1e-6)
