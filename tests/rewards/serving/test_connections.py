"""Connections of the reward server that send no request, too slowly, too many, or a bad one."""

from __future__ import annotations

import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from email.message import Message
from http.client import HTTPResponse
from types import SimpleNamespace

import pytest
import requests
from reward_servers import Gate, Running, body_of, reward_of, running, until, values

from flowrl.rewards.serving import connections, score_server
from flowrl.rewards.serving.own_names import why_foreign


def _said(connection: socket.socket) -> bytes:
    """What comes until the other side closes."""
    connection.settimeout(5)
    received = b""
    while piece := connection.recv(65536):
        received += piece
    return received


def _connected(server: Running) -> socket.socket:
    return socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])))


def test_headers_that_do_not_come_to_an_end_are_not_waited_for() -> None:
    with running(reward_of(), header_timeout=0.5) as server:
        silent, half, second = (_connected(server) for _ in range(3))
        half.sendall(b"POST /v1/score HTTP/1.1\r\nHost: localhost\r\n")
        second.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert _status(second) == 200
        second.sendall(b"GET /hea")  # kept alive, then half a request
        assert values(server.post(body_of(1))) == [0.0]
        assert (_said(silent), _said(half)) == (b"", b"")
        assert b"HTTP/1.1" not in _said(second)
        for connection in (silent, half, second):
            connection.close()
        assert values(server.post(body_of(1))) == [0.0]


def _ask(connection: socket.socket) -> int:
    connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
    return _status(connection)


def _status(connection: socket.socket) -> int:
    """The status of an answer, which is read to its end: its head may come before its body."""
    connection.settimeout(30)
    answer = HTTPResponse(connection)
    answer.begin()
    answer.read()
    return answer.status


@pytest.mark.parametrize("of_one", [True, False])
def test_a_new_connection_takes_the_place_of_the_one_that_waits_longest(
    of_one: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not of_one:
        monkeypatch.setattr(connections, "MOST_CONNECTIONS", 2)
    with running(reward_of(), max_connections=2 if of_one else 256) as server:
        oldest, asking, newest = (_connected(server) for _ in range(3))
        with suppress(ConnectionResetError):
            assert _said(oldest) == b""
        for connection in (asking, newest):
            assert _ask(connection) == 200
            connection.close()
        oldest.close()
        assert values(server.post(body_of(1))) == [0.0]


def test_connections_of_one_address_leave_room_for_others() -> None:
    with running(reward_of(), max_connections=2) as server:
        port = int(server.url.rpartition(":")[2])
        other = socket.create_connection(("127.0.0.1", port), source_address=("127.0.0.2", 0))
        many = [_connected(server) for _ in range(5)]
        assert _ask(other) == 200
        assert _ask(many[-1]) == 200
        for connection in (other, *many):
            connection.close()


def test_connections_at_work_are_not_cut() -> None:
    gate = Gate()
    with running(reward_of(gate), max_connections=2) as server, ThreadPoolExecutor(2) as clients:
        asked = [clients.submit(server.post, body_of(1, first=number)) for number in (1, 2)]
        until(lambda: server.service.active == 2)
        surplus = _connected(server)
        with suppress(ConnectionResetError):
            assert _said(surplus) == b""
        surplus.close()
        gate.opened.set()
        assert [values(one.result()) for one in asked] == [[1.0], [2.0]]


@pytest.mark.slow
def test_who_asked_for_no_scores_is_kept_for_a_short_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "IDLE_SECONDS", 1.0)
    body = json.dumps(body_of(1)).encode()
    head = (
        f"POST /v1/score HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    )
    with running(reward_of()) as server, _connected(server) as served:
        served.sendall(head.encode() + b"\r\n\r\n" + body)
        assert _status(served) == 200
        idle = _connected(server)
        assert _ask(idle) == 200
        assert b"HTTP/1.1" not in _said(idle)
        idle.close()
        time.sleep(0.1)
        assert _ask(served) == 200


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ("Host: localhost", 200), ("Host: 127.0.0.1:80", 200), ("Host: [::1]:80", 200), ("Host: 127.8.9.1", 200),
        ("Host: allowed.example:80", 200), ("Host: evil.example", 400), ("Host: [::1", 400), ("Host: a b", 400),
        ("Host: 127.0.0.1.evil.example", 400), ("Host: localhost@evil.example", 400), ("Host: 10.0.0.1", 400),
        ("Host: localhost\r\nOrigin: http://localhost", 200), ("Host: localhost\r\nOrigin: http://evil.example", 403),
        ("Host: localhost\r\nOrigin: null", 403), ("Host: localhost\r\nOrigin: http://[::1", 403),
        ("Host: localhost:80\r\nOrigin: http://localhost:3000", 403),
        ("Host: localhost\r\nReferer: https://evil.example/page", 403),
        ("Host: localhost\r\nSec-Fetch-Site: cross-site", 403), ("Host: localhost\r\nSec-Fetch-Site: same-site", 403),
        ("Host: localhost\r\nSec-Fetch-Site: none", 200), ("Host: localhost\r\nSec-Fetch-Site: same-origin", 200),
    ],
)  # fmt: skip
@pytest.mark.parametrize("scheme", ["serve", "score_server"])
def test_a_server_without_token_answers_this_machine_alone(headers: str, status: int, scheme: str) -> None:
    given = [part.partition(": ") for part in headers.split("\r\n")]
    if scheme == "serve":
        why = why_foreign([(key.lower().encode(), value.encode()) for key, _, value in given], {"allowed.example"})
        assert (why == "", why.startswith("ask")) == (status == 200, status == 400)
    elif "allowed" not in headers and not (status == 200 and "Origin" in headers) and "Referer" not in headers:
        handler = score_server.Handler.__new__(score_server.Handler)
        handler.headers = Message()
        for key, _, value in given:
            handler.headers[key] = value
        scorer = score_server.ServedScorer("a", "a:1", len, "bytes", [], 1, 1, 100, 1, 1, None)
        handler.server = SimpleNamespace(scorer=scorer)  # type: ignore[assignment]
        refused = handler.foreign()
        assert (200 if refused is None else refused.args[0]) == status


def test_foreign_requests_are_refused_on_every_path_unless_there_is_a_token() -> None:
    with running(reward_of()) as server:
        for path, method in (("/health", "GET"), ("/metrics", "GET"), ("/v1/score", "POST")):
            for extra, status in (({"Host": "evil.example"}, 400), ({"Origin": "http://evil.example"}, 403)):
                reply = requests.request(method, server.url + path, headers=extra, json=body_of(1), timeout=10)
                assert reply.status_code == status
    with running(reward_of(), token="a token") as server:
        head = {"Host": "evil.example", "Authorization": "Bearer a token"}
        assert requests.get(server.url + "/health", headers=head, timeout=10).status_code == 200


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        (b"Content-Length: 99999999999999", b"413"),
        (b"Content-Length: 2\r\nTransfer-Encoding: chunked", b"400"),
        (b"X-Long: " + b"x" * 200_000, b"400"),
    ],
)
def test_bad_headers_are_answered_at_once_and_the_connection_closed(headers: bytes, status: bytes) -> None:
    with running(reward_of()) as server, _connected(server) as connection:
        connection.sendall(
            b"POST /v1/score HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n" + headers + b"\r\n\r\n"
        )
        with suppress(ConnectionResetError):  # it closes while there is more to read
            assert _said(connection).startswith(b"HTTP/1.1 " + status)
