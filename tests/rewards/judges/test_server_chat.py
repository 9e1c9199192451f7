"""Judges behind a server: what is sent, what is made of replies, and what happens when they fail."""

from __future__ import annotations

import base64
import contextlib
import email.utils
import io
import json
import logging
import math
import socketserver
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from flowrl.rewards import RewardInputs, build_reward
from flowrl.rewards.judges.chat import Answer, Question, build_chat, check_chat
from flowrl.rewards.judges.server_chat import ServerJudge
from flowrl.rewards.serving import retries
from flowrl.rewards.serving.http_client import Body, Lines
from flowrl.rewards.serving.retries import (
    Failure,
    call_with_retries,
    failed_status,
    is_loopback,
    retry_delay,
)

CPU = torch.device("cpu")


@dataclass
class Reply:
    """What the server does with one request; `body` may be text that is no JSON."""

    body: Any = None
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    hang: bool = False
    promised: int = 0  # bytes that the header says beyond those that come


class Scripted:
    """A server on this machine that gives the scripted replies, the last one for ever, and keeps the requests."""

    def __init__(self) -> None:
        self.script: list[Reply | Callable[[dict[str, Any]], Reply]] = []
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.paths: list[str] = []
        self.closing = threading.Event()
        self.lock = threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with outer.lock:
                    outer.requests.append(body)
                    outer.headers.append(dict(self.headers))
                    outer.paths.append(self.path)
                    step = outer.script.pop(0) if len(outer.script) > 1 else outer.script[0]
                reply = step if isinstance(step, Reply) else step(body)
                if reply.hang:
                    outer.closing.wait(10)
                    return
                content = (reply.body if isinstance(reply.body, str) else json.dumps(reply.body)).encode()
                self.send_response(reply.status)
                for name, value in reply.headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(content) + reply.promised))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self.server.server_address[1]}"
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01})

    def play(self, *script: Reply | Callable[[dict[str, Any]], Reply]) -> None:
        self.script = list(script)
        self.requests.clear()


@pytest.fixture
def server() -> Iterator[Scripted]:
    scripted = Scripted()
    scripted.thread.start()
    yield scripted
    scripted.closing.set()
    scripted.server.shutdown()
    scripted.thread.join()
    scripted.server.server_close()


class Waits:
    """A clock that only waiting moves, in the place of `time`."""

    def __init__(self) -> None:
        self.now = 0.0
        self.slept: list[float] = []

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


@pytest.fixture(autouse=True)
def waits(monkeypatch: pytest.MonkeyPatch) -> Waits:
    waits = Waits()
    monkeypatch.setattr(retries, "time", waits)

    async def pause(lines: Lines, seconds: float) -> None:
        waits.sleep(seconds)

    monkeypatch.setattr(Lines, "pause", pause)
    return waits


def chat_of(server: Scripted, **options: Any) -> tuple[ServerJudge, Waits]:
    judge = {"server": f"{server.address}/v1/", "model": "judge", **options}
    chat = build_chat(judge, device=CPU, owner="reward 'x'")
    assert isinstance(chat, ServerJudge)
    waits: Waits = vars(retries)["time"]
    waits.now, waits.slept = 0.0, []
    return chat, waits


def completion(text: str | None = "Yes", top: dict[str, float] | None = None, **more: Any) -> dict[str, Any]:
    choice: dict[str, Any] = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "length"}
    if top is not None:
        listed = [{"token": token, "logprob": value, "bytes": None} for token, value in top.items()]
        choice["logprobs"] = {"content": [{**listed[0], "top_logprobs": listed}]}
    return {"choices": [choice | more], "usage": {"total_tokens": 7}}


ASK = Question(parts=("Yes or no?",), top_logprobs=20)
GOOD = Reply(completion(top={"Yes": -0.5, " yes": -2.0, "No": -1.5}))


def test_request_of_a_judge(server: Scripted, monkeypatch: pytest.MonkeyPatch) -> None:
    """Images and texts in their order, greedy, one token, twenty candidates; no proxy to this machine."""
    monkeypatch.setenv("JUDGE_KEY", "secret")
    for proxy in ("http_proxy", "HTTP_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(proxy, "http://127.0.0.1:9")
    server.play(GOOD)
    chat, _ = chat_of(
        server,
        api_key_env="JUDGE_KEY",
        image_format="png",
        extra_body={"chat_template_kwargs": {"enable_thinking": False}},
    )
    images = [np.full((3, 5, 3), level, dtype=np.uint8) for level in (10, 200)]
    question = Question(parts=(images[0], "between", images[1], "Yes?"), system="Judge.", top_logprobs=20)
    (answer,) = chat.ask([question])
    assert answer == Answer(text="Yes", logprobs=({"Yes": -0.5, " yes": -2.0, "No": -1.5},), tokens=7)

    (body,) = server.requests
    messages = body.pop("messages")
    assert body == {
        "model": "judge", "max_tokens": 1, "temperature": 0.0, "logprobs": True, "top_logprobs": 20,
        "chat_template_kwargs": {"enable_thinking": False},
    }  # fmt: skip
    assert server.paths == ["/v1/chat/completions"]
    assert server.headers[0]["Authorization"] == "Bearer secret"
    assert messages[0] == {"role": "system", "content": "Judge."}
    assert messages[1]["role"] == "user"
    kinds = [part["type"] for part in messages[1]["content"]]
    assert kinds == ["image_url", "text", "image_url", "text"]
    for place, level in ((0, 10), (2, 200)):
        head, _, data = messages[1]["content"][place]["image_url"]["url"].partition(",")
        assert head == "data:image/png;base64"
        image = np.asarray(Image.open(io.BytesIO(base64.b64decode(data))))
        np.testing.assert_array_equal(image, np.full((3, 5, 3), level))
    assert chat.version == 'server_chat:judge:png:extra-{"chat_template_kwargs": {"enable_thinking": false}}'


def test_images_travel_as_jpeg_unless_asked(server: Scripted) -> None:
    server.play(Reply(completion("fine", finish_reason="stop")))
    chat, _ = chat_of(server, tokens_key="max_completion_tokens")
    image = np.full((16, 16, 3), 90, dtype=np.uint8)
    chat.ask([Question(parts=(image, "Well?"), max_tokens=9)])
    (body,) = server.requests
    assert (body["max_completion_tokens"], "max_tokens" in body, "logprobs" in body) == (9, False, False)
    head, _, data = body["messages"][0]["content"][0]["image_url"]["url"].partition(",")
    assert head == "data:image/jpeg;base64"
    assert Image.open(io.BytesIO(base64.b64decode(data))).format == "JPEG"
    assert server.headers[0].get("Authorization") is None


def test_answers_come_in_the_order_of_the_questions(server: Scripted) -> None:
    """Later questions are answered first, as many at a time as there are questions."""
    gate = threading.Barrier(6)

    def echo(body: dict[str, Any]) -> Reply:
        number = int(body["messages"][0]["content"][0]["text"])
        gate.wait(5)
        time.sleep(0.002 * (5 - number))
        return Reply(completion(str(number), finish_reason="stop"))

    server.play(echo)
    chat, _ = chat_of(server, concurrency=6)
    answers = chat.ask([Question(parts=(str(number),), max_tokens=5) for number in range(6)])
    assert [answer.text for answer in answers] == list("012345")
    assert chat.ask([]) == []


def test_yes_no_reward_of_an_edit_over_the_wire(server: Scripted) -> None:
    """Source, edited image, text; the three ways to write yes add up to 0.6 of 0.8."""
    top = {"Yes": math.log(0.3), " yes": math.log(0.2), "YES": math.log(0.1), "No": math.log(0.2), "The": math.log(0.1)}
    server.play(Reply(completion(top=top)), Reply(completion()))
    judge = {"server": f"{server.address}/v1", "model": "judge", "concurrency": 1, "image_format": "png"}
    reward = build_reward("yes_no", options={"judge": judge, "with_sources": True})
    inputs = RewardInputs(
        prompts=["make it red"] * 2, images=torch.ones(2, 3, 4, 4), metadata=[{}, {}],
        group_ids=torch.zeros(2, dtype=torch.int64), sample_ids=torch.arange(2),
        source_images=[[torch.zeros(3, 2, 2)]] * 2,
    )  # fmt: skip
    output = reward(inputs)
    assert output.values[0].item() == pytest.approx(0.75, abs=1e-6)
    assert output.valid.tolist() == [True, False]
    assert output.errors == {"no_logprobs": 1}
    content = server.requests[0]["messages"][0]["content"]
    levels = []
    for part in content[:2]:
        image = Image.open(io.BytesIO(base64.b64decode(part["image_url"]["url"].partition(",")[2])))
        levels.append((image.size, np.asarray(image).max()))
    assert levels == [((2, 2), 0), ((4, 4), 255)]
    assert "make it red" in content[2]["text"]
    assert {(r["temperature"], r["max_tokens"], r["top_logprobs"]) for r in server.requests} == {(0.0, 1, 20)}


def test_server_errors_are_tried_again(server: Scripted) -> None:
    server.play(Reply("busy", 500), Reply("busy", 503), GOOD)
    chat, waits = chat_of(server)
    assert chat.ask([ASK])[0].error is None
    assert len(server.requests) == 3
    assert 0.25 <= waits.slept[0] < 0.75 <= 2 * waits.slept[1] < 3.0
    assert len(waits.slept) == 2


def test_retry_after_is_honoured_after_errors(server: Scripted) -> None:
    server.play(Reply("slow down", 429, {"Retry-After": "17"}), GOOD)
    chat, waits = chat_of(server)
    assert chat.ask([ASK])[0].text == "Yes"
    assert waits.slept == [17.0]
    # Longer than there is time: given up at once.
    server.play(Reply("slow down", 429, {"Retry-After": "1000"}))
    assert chat.ask([ASK])[0].error == "status_429"
    assert waits.slept == [17.0]
    assert len(server.requests) == 1


def test_permanent_errors_end_in_bounded_time(server: Scripted, caplog: pytest.LogCaptureFixture) -> None:
    server.play(Reply("CUDA out of memory", 500))
    chat, waits = chat_of(server, concurrency=1)
    with caplog.at_level(logging.WARNING):
        answers = chat.ask([ASK, ASK])
    assert [answer.error for answer in answers] == ["status_500"] * 2
    assert len(server.requests) == 2 * 5
    assert waits.now < 2 * 1.5 * (0.5 + 1 + 2 + 4)
    assert [record.message.count("CUDA out of memory") for record in caplog.records] == [1]  # told once
    few, waits = chat_of(server, retries=100, deadline=20)
    server.play(Reply("x", 500))
    assert few.ask([ASK])[0].error == "status_500"
    assert waits.now < 20
    assert len(server.requests) < 10


@pytest.mark.parametrize("status", [400, 401, 404, 413, 422, 302])
def test_other_refusals_are_final_errors(server: Scripted, status: int) -> None:
    server.play(Reply("no", status, {"Location": "/elsewhere"}))
    chat, waits = chat_of(server)
    assert chat.ask([ASK])[0].error == f"status_{status}"
    assert (len(server.requests), waits.slept) == (1, [])


def test_server_that_hangs_or_is_not_there_is_an_error(server: Scripted) -> None:
    server.play(Reply(hang=True))
    chat, waits = chat_of(server, timeout=0.3, retries=1)
    assert chat.ask([ASK])[0].error == "timeout"
    assert (len(server.requests), len(waits.slept)) == (2, 1)
    nobody = replace(chat.options, server="http://127.0.0.1:9/v1", retries=2)  # the discard port: nobody listens
    assert nobody.build(CPU).ask([ASK])[0].error == "connection"
    assert len(waits.slept) == 3


NAN = Reply(json.dumps(completion(top={"Yes": math.nan, "No": -1.0})))


@pytest.mark.parametrize(
    "bad",
    [
        Reply('{"choices": [{"mess'),
        Reply(json.dumps(completion(top={"Yes": -0.1})), promised=100),
        Reply("<html>hello</html>"),
        Reply({"error": {"message": "overloaded"}}),
        Reply([]),
        Reply({"choices": []}),
        Reply({"choices": completion()["choices"] * 2}),
        Reply({"choices": [{"message": {"content": 3}}]}),
        Reply(completion(None)),
        Reply({"choices": [{"message": None}]}),
        Reply(completion(logprobs={"content": [{"token": "Yes"}]})),
        Reply(completion(top={"Yes": 0.7})),
        NAN,
    ],
)
def test_garbage_is_asked_for_again_and_then_an_error(server: Scripted, bad: Reply) -> None:
    server.play(bad, GOOD)
    chat, waits = chat_of(server, retries=2)
    assert chat.ask([ASK])[0].text == "Yes"
    assert len(waits.slept) == 1
    server.play(bad)
    assert chat.ask([ASK])[0].error == ("connection" if bad.promised else "garbage")
    assert len(server.requests) == 3


def test_missing_logprobs_and_cut_answers_are_errors(server: Scripted) -> None:
    without: list[Any] = [None, {}, {"content": []}, {"content": None}]
    for logprobs in without:
        server.play(Reply(completion(logprobs=logprobs)))
        chat, waits = chat_of(server)
        assert chat.ask([ASK])[0] == Answer(text="Yes", error="no_logprobs", tokens=7)
        assert (len(server.requests), waits.slept) == (1, [])  # it would leave them out again
    server.play(Reply(completion("Final Sc")))
    cut = Question(parts=("Rate it.",), max_tokens=3)
    assert chat.ask([cut])[0] == Answer(text="Final Sc", error="truncated", tokens=7)
    assert chat.ask([Question(parts=("Rate it.",))])[0].error is None  # one token is always all that was asked for
    server.play(Reply(completion(None, top={"Yes": -0.5})))
    assert chat.ask([ASK])[0] == Answer(text="", logprobs=({"Yes": -0.5},), tokens=7)


def test_candidates_written_alike_add_up(server: Scripted) -> None:
    listed = [{"token": "Yes", "logprob": math.log(p)} for p in (0.3, 0.2)]
    content = [{"token": "No", "logprob": math.log(0.1), "top_logprobs": listed}]
    server.play(Reply(completion(logprobs={"content": content})))
    chat, _ = chat_of(server)
    found = chat.ask([ASK])[0].logprobs[0]
    assert found == pytest.approx({"Yes": math.log(0.5), "No": math.log(0.1)}, abs=1e-12)


def test_sampled_answers_get_another_seed_after_an_error(server: Scripted) -> None:
    question = Question(parts=("Rate it.",), max_tokens=9, temperature=0.7, seed=2**40 + 5)
    done = Reply(completion("4", finish_reason="stop"))
    server.play(Reply("garbage"), Reply("garbage"), done)
    chat, _ = chat_of(server)
    chat.ask([question])
    seeds = [request["seed"] for request in server.requests]
    assert seeds[0] == 5
    assert len(set(seeds)) == 3
    assert max(seeds) < 2**31
    server.play(Reply("garbage"), Reply("garbage"), done)
    chat.ask([question])
    assert [request["seed"] for request in server.requests] == seeds
    server.play(Reply("garbage"), done)
    chat.ask([replace(question, temperature=0.0)])
    assert [request["seed"] for request in server.requests] == [5, 5]


def test_retry_policy(waits: Waits) -> None:
    delays = np.array([[retry_delay(k, seed) for k in range(8)] for seed in range(400)])
    base = np.minimum(8.0, 0.5 * 2.0 ** np.arange(8))
    spread = delays / base
    assert spread.min() >= 0.5
    assert spread.max() < 1.5
    assert abs(spread.mean() - 1.0) < 4 * math.sqrt(1 / 12 / spread.size)  # uniform: variance 1/12
    assert retry_delay(3, 7) == retry_delay(3, 7)

    tries: list[tuple[int, float]] = []

    def send(attempt: int, left: float) -> str | Failure:
        tries.append((attempt, left))
        waits.now += 10.0
        return Failure(error="timeout")

    result = call_with_retries(send, deadline=31.0, retries=9, seed=1)
    assert result == Failure(error="timeout")
    assert [attempt for attempt, _ in tries] == [0, 1, 2]
    assert [left for _, left in tries] == pytest.approx(
        [31.0, 21.0 - waits.slept[0], 11.0 - sum(waits.slept)], abs=1e-9
    )
    final = Failure(error="status_404", again=False)
    assert call_with_retries(lambda *_: final) == final
    assert call_with_retries(lambda *_: None) is None  # a result, not a failure


def test_retried_statuses_and_retry_after() -> None:
    again = [s for s in range(300, 600) if failed_status(s, {}).again]
    assert again == [408, 425, 429, *range(500, 600)]
    after = {
        text: failed_status(429, {"Retry-After": text}).retry_after for text in ("2.5", "-1", "soon", "nan", "inf")
    }
    assert after == {"2.5": 2.5, "-1": 0.0, "soon": None, "nan": None, "inf": None}
    date = failed_status(503, {"Retry-After": email.utils.formatdate(time.time() + 60, usegmt=True)}).retry_after
    assert date == pytest.approx(60, abs=5)


@pytest.mark.slow
def test_slow_reply_cannot_stretch_the_timeout() -> None:
    """A server that sends a byte of its reply every 50 ms, which is within any timeout between two bytes."""

    class Dripping(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            with contextlib.suppress(OSError):
                self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 40\r\n\r\n")
                for letter in b"{" + b" " * 38 + b"}":
                    self.wfile.write(bytes([letter]))
                    time.sleep(0.05)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Dripping) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        lines = Lines([f"http://127.0.0.1:{server.server_address[1]}"], api_key=None)
        (line,) = lines.lines
        assert lines.wait_for(line.post("/x", Body(data=b"{}"), timeout=0.5)) == Failure(error="timeout")
        assert lines.wait_for(line.post("/x", Body(data=b"{}"), timeout=20.0)) == {}
        server.shutdown()


def test_certificates_that_the_environment_names(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(tmp_path / "none.pem"))
    with pytest.raises(ValueError, match=r"REQUESTS_CA_BUNDLE .* names '.*none\.pem', which cannot be read"):
        Lines(["https://judge.example"], api_key=None)
    Lines(["http://127.0.0.1:9"], api_key=None)


def test_addresses_of_this_machine() -> None:
    def trusts(address: str) -> bool:
        trusted: bool = Lines([address], api_key=None).lines[0]._connect.keywords["trust_env"]  # type: ignore[attr-defined]
        return trusted

    own = ["http://localhost:1/v1", "http://127.0.0.1", "http://127.3.2.1:8", "http://[::1]:9/v1", "http://0.0.0.0:80"]
    assert all(is_loopback(address) and not trusts(address) for address in own)
    others = ["https://api.example.com/v1", "http://10.0.0.1:80", "http://localhost.example.com"]
    assert not any(is_loopback(address) or not trusts(address) for address in others)


def test_bad_options_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"server": "127.0.0.1:8000"}, "server must be the address"),
        ({"server": "http://me:pw@host/v1"}, "server must not hold a user name or a password"),
        ({"model": ""}, "model must be the name"),
        ({"concurrency": 0}, "concurrency must be at least 1"),
        ({"retries": -1}, "retries must be at least 0"),
        ({"timeout": 0}, "timeout must be above 0"),
        ({"deadline": math.inf}, "deadline must be a finite number"),
        ({"image_format": "jpeg"}, "image_format must be one of jpeg95, webp, png"),
        ({"server": []}, "server is an empty list"),
        ({"server": ["http://127.0.0.1:9/v1", "http://127.0.0.1:9/v1/"]}, "server names an address twice"),
        ({"down_after": 0}, "down_after must be a positive number, or null"),
        ({"requests_per_minute": -1}, "requests_per_minute must be a positive number, or null"),
        ({"tokens_per_minute": 0}, "tokens_per_minute must be a positive number"),
        ({"max_tokens_total": 0}, "max_tokens_total must be a positive number"),
        ({"structured": True, "extra_body": {"response_format": 1}}, "leave response_format to the reward"),
        ({"extra_body": [1]}, "extra_body must be a mapping"),
        ({"extra_body": {"temperature": 1, "top_p": 1}}, "leave temperature to the reward"),
    ]
    good = {"server": "http://127.0.0.1:9/v1", "model": "judge"}
    for options, message in cases:
        with pytest.raises(ValueError, match=message):
            check_chat(good | options, owner="reward 'x'")
    with pytest.raises(ValueError, match=r"NO_SUCH_KEY .* is not set"):
        build_chat(good | {"api_key_env": "NO_SUCH_KEY"}, device=CPU, owner="reward 'x'")
