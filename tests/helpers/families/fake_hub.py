"""A model hub on loopback that holds configurations alone, and remembers what it was asked for."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass(frozen=True, slots=True)
class Repository:
    """What a repository holds: small files, names of others, and what its page says."""

    small: Mapping[str, Any] = field(default_factory=dict)
    others: tuple[str, ...] = ()
    licence: str | None = None
    gated: bool = False
    """Whether it is refused to those without a token."""
    revisions: tuple[str, ...] = ("main",)


@dataclass(frozen=True, slots=True)
class FakeHub:
    """A hub that is being served; `asked` are the requests: method and path."""

    address: str
    repositories: dict[str, Repository]
    asked: list[str] = field(default_factory=list)

    def files(self) -> set[str]:
        """Names of files that were asked for, by repository."""
        paths = [line.split(" ")[1] for line in self.asked if "/resolve/" in line]
        parts = [path[1:].partition("/resolve/") for path in paths]
        return {f"{name} {rest.partition('/')[2]}" for name, _, rest in parts}


@contextmanager
def serve_hub(
    monkeypatch: pytest.MonkeyPatch, cache: Path, repositories: Mapping[str, Repository]
) -> Iterator[FakeHub]:
    """Serves repositories to huggingface_hub in this process, with an empty cache and no token."""
    from huggingface_hub import constants

    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    hub = FakeHub(f"http://127.0.0.1:{server.server_address[1]}", dict(repositories))
    server.hub = hub  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    monkeypatch.setattr(constants, "ENDPOINT", hub.address)
    monkeypatch.setattr(
        constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.address + "/{repo_id}/resolve/{revision}/{filename}"
    )
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_IMPLICIT_TOKEN", True)
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    def log_message(self, *given: Any) -> None:
        """Nothing is printed."""

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, *, body: bool) -> None:
        hub: FakeHub = self.server.hub  # type: ignore[attr-defined]
        hub.asked.append(f"{self.command} {self.path}")
        path = self.path.partition("?")[0]
        if path.startswith("/api/models/"):
            name = path.removeprefix("/api/models/").partition("/revision/")[0]
            self._page(hub.repositories.get(name), name)
            return
        name, _, rest = path[1:].partition("/resolve/")
        revision, _, file = rest.partition("/")
        found = hub.repositories.get(name)
        if found is None:
            self._refuse(401, "RepoNotFound")
        elif found.gated:
            self._refuse(403, "GatedRepo")
        elif revision not in (*found.revisions, COMMIT):
            self._refuse(404, "RevisionNotFound")
        elif file not in found.small:
            self._refuse(404, "EntryNotFound")
        else:
            self._send(json.dumps(found.small[file]).encode(), body=body)

    def _page(self, found: Repository | None, name: str) -> None:
        if found is None:
            self._refuse(401, "RepoNotFound")
            return
        files = [{"rfilename": file} for file in (*found.small, *found.others)]
        page = {"id": name, "sha": COMMIT, "gated": "auto" if found.gated else False, "siblings": files,
                "cardData": {} if found.licence is None else {"license": found.licence}}  # fmt: skip
        self._send(json.dumps(page).encode(), body=True)

    def _send(self, data: bytes, *, body: bool) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Content-Type", "application/json")
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", f'"{sha256(data).hexdigest()[:40]}"')
        self.end_headers()
        if body:
            self.wfile.write(data)

    def _refuse(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", "0")
        self.send_header("X-Error-Code", code)
        self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()
