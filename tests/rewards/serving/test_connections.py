"""Connections of the reward server that send no request, too slowly, too many, or a bad one."""

from __future__ import annotations

import socket
import time
from contextlib import suppress

import pytest
from reward_servers import Running, body_of, reward_of, running, values

from flowrl.rewards.serving import connections


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
        half.sendall(b"POST /v1/score HTTP/1.1\r\nHost: a\r\n")
        second.sendall(b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n")
        assert second.recv(65536).startswith(b"HTTP/1.1 200")
        second.sendall(b"GET /hea")  # kept alive, then half a request
        assert values(server.post(body_of(1))) == [0.0]
        assert (_said(silent), _said(half)) == (b"", b"")
        assert b"HTTP/1.1" not in _said(second)
        for connection in (silent, half, second):
            connection.close()
        assert values(server.post(body_of(1))) == [0.0]


def test_connections_without_number_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "MOST_CONNECTIONS", 2)
    with running(reward_of()) as server:
        kept = [_connected(server) for _ in range(2)]
        surplus = _connected(server)
        with suppress(ConnectionResetError):
            assert _said(surplus) == b""
        for connection in (*kept, surplus):
            connection.close()
        time.sleep(0.1)
        assert values(server.post(body_of(1))) == [0.0]


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
            b"POST /v1/score HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n" + headers + b"\r\n\r\n"
        )
        with suppress(ConnectionResetError):  # it closes while there is more to read
            assert _said(connection).startswith(b"HTTP/1.1 " + status)
