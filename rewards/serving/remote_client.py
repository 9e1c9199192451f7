"""Asking a reward server: whether it is ready, and for the scores of some items, again where that may help."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from flowrl.rewards.serving.http_client import Body, Lines, ServerLine
from flowrl.rewards.serving.retries import (
    VERSION_CHANGED,
    Failure,
    ServerPool,
    call_with_retries,
    failed_status,
    retry_delay,
)
from flowrl.rewards.serving.wire import ScoreReply, WireItem
from flowrl.rewards.serving.wire_adapters import Adapter, RequestRoom, Way
from flowrl.rewards.serving.wire_images import short
from flowrl.runtime.disk_errors import WORDS
from flowrl.runtime.randomness import counter_seed
from flowrl.runtime.scrubbing import one_line

# What repeating cannot help and no item is to blame for: the run should stop and say so.
_ADVICE: Mapping[str, str] = WORDS["server_refusals"]
_NO_ROOM = "status_429"
_HEALTH_TIMEOUT = 10.0
_BACK_TIMEOUT = 2.0  # of the question whether a server is back, which is asked again


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardFacts:
    """What the server said about the reward, as far as it says such things; `room` and `videos` may change."""

    name: str | None = None
    version: str | None = None
    kind: str = "remote"
    needs: frozenset[str] = frozenset()
    room: RequestRoom = field(default=RequestRoom(), compare=False)
    videos: bool = field(default=False, compare=False)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RewardServer:
    """A server with everything needed to ask it; `timeout` and `retries` are of one request."""

    lines: Lines
    line: ServerLine
    adapter: Adapter
    timeout: float
    retries: int

    @property
    def url(self) -> str:
        """Its address."""
        return self.line.url


def ask_scores(
    pool: ServerPool[RewardServer], about: RewardFacts, chunk: Sequence[WireItem], iteration: int, end: float, way: Way
) -> ScoreReply | Failure:
    """One request, to another server or again where that may help, until the time `end`.

    A server without room (429) is no failure: the request waits and comes again, as often as the time allows.

    Raises ValueError: the refusal of a server that only the configuration can be blamed for.
    """
    first = pool.servers[0]
    body = first.adapter.encode(chunk, about.name, iteration, way)
    if not isinstance(body, Body):
        body = Body(data=json.dumps(body, allow_nan=False).encode())
    ids = [item.id for item in chunk]

    def send(server: RewardServer) -> ScoreReply | Failure:
        seconds = end - time.monotonic()
        if seconds <= 0:
            return Failure(error="timeout")
        timeout = min(server.timeout, seconds)
        answer = server.lines.wait_for(server.line.post(server.adapter.score, body, timeout=timeout))
        if isinstance(answer, Failure):
            if answer.error in _ADVICE:
                status = answer.error.replace("_", " ")
                asked = f"{server.url}{server.adapter.score}"
                raise wrong(f"{asked} answered {status} ({_detail(answer.message)}): {_ADVICE[answer.error]}")
            return answer
        try:
            reply = server.adapter.decode(answer, ids, about.name)
        except ValueError as error:
            return Failure(error="garbage", message=str(error))
        if about.version is not None and reply.version != about.version:
            # Another model answers than at the start: its scores must not mix with those of the first.
            return Failure(error=VERSION_CHANGED, again=False)
        return reply

    left = end - time.monotonic()
    if left <= 0:
        return Failure(error="timeout")
    seed = counter_seed("remote", iteration, ids[0])

    def ask(attempt: int, seconds: float) -> ScoreReply | Failure:
        waits = 0
        while isinstance(result := pool.ask(send), Failure) and result.error == _NO_ROOM:
            # A little later than told, each by its own counter: all that were refused together would come together.
            delay = (result.retry_after or 0.0) + retry_delay(0, counter_seed("room", seed, attempt, waits))
            if time.monotonic() + delay >= end:
                return replace(result, again=False)
            time.sleep(delay)
            waits += 1
        return result

    return call_with_retries(ask, deadline=left, retries=first.retries, seed=seed)


def ask_all(servers: Sequence[RewardServer], reward: str | None, deadline: float) -> RewardFacts:
    """What all servers say of the reward, as `ask_health`, and the room that each of them has. Raises ValueError: as
    `ask_health`, or they do not say the same."""
    said = [ask_health(server, reward, deadline) for server in servers]
    for server, told in zip(servers, said, strict=True):
        if told != said[0]:
            raise wrong(
                f"the servers serve different rewards: {servers[0].url} says {_words(said[0])}, and {server.url} "
                f"{_words(told)}: start them with the same reward, options and flowrl, or list one of the two"
            )
    rooms = [told.room for told in said]
    least = RequestRoom(
        **{
            one.name: min((number for room in rooms if (number := getattr(room, one.name)) is not None), default=None)
            for one in fields(RequestRoom)
        }
    )
    return replace(said[0], room=least, videos=all(told.videos for told in said))


def _words(told: RewardFacts) -> str:
    needs = ", ".join(sorted(told.needs)) or "nothing that is known"
    return f"{told.name or 'a reward'} ({told.kind}, needs {needs}), version {told.version or 'unknown'}"


def is_back(server: RewardServer, reward: str | None, told: RewardFacts) -> bool:
    """Whether a server that did not answer takes requests again and still serves what it did."""
    try:
        once = replace(server, retries=0)
        return ask_health(once, reward, _BACK_TIMEOUT) == told
    except ValueError:
        return False


def ask_health(server: RewardServer, reward: str | None, deadline: float) -> RewardFacts:
    """Waits, as long as retries go, until the server is ready, and reads what it says of the reward."""
    url, adapter = server.url, server.adapter

    def send(attempt: int, seconds: float) -> Any | Failure:
        reply = server.lines.wait_for(server.line.ask(adapter.health, timeout=min(_HEALTH_TIMEOUT, seconds)))
        if isinstance(reply, Failure):
            return reply
        text = reply.content.decode(errors="replace")
        if reply.status != 200:
            return failed_status(reply.status, reply.headers, text)
        try:
            return {} if adapter.health_says == "nothing" else json.loads(text)
        except (ValueError, RecursionError):
            return Failure(error="garbage", again=False, message=text[:200])

    health = call_with_retries(send, deadline=deadline, retries=server.retries, seed=counter_seed("health", url))
    if isinstance(health, Failure):
        cure = "start it first (flowrl serve NAME), correct url or token_env, or set wait: false"
        if health.error in ("status_404", "status_405"):
            cure = f"this protocol asks url{adapter.health} and url{adapter.score}, so url ends before these paths"
        raise wrong(
            f"no reward server is ready at {url}{adapter.health} ({health.error.replace('_', ' ')}: "
            f"{_detail(health.message)}): {cure}"
        )
    return RewardFacts() if adapter.health_says == "nothing" else read_health(health, server, reward)


def read_health(health: Any, server: RewardServer, reward: str | None) -> RewardFacts:
    """What a server's answer says of the reward. Raises ValueError: it names no rewards, or not this one."""
    url, adapter = server.url, server.adapter
    rewards: Any = health.get("rewards") if isinstance(health, dict) else None
    if not isinstance(rewards, dict if adapter.health_says == "all" else list) or not rewards:
        also = ", or token_env is missing" if isinstance(health, dict) and health.keys() == {"status"} else ""
        raise wrong(f"{url} does not say which rewards it serves: protocol must be that of the server{also}")
    name = reward if reward is not None or len(rewards) > 1 else next(iter(rewards))
    if name is None or name not in rewards:
        raise wrong(f"reward must be one of {', '.join(map(str, rewards))}, which {url} serves, got {reward!r}")
    if adapter.health_says == "names":
        return RewardFacts(name=name)
    limits = health["limits"]
    about: dict[str, Any] = dict(rewards)[name]
    kind = "remote" if about["kind"] == "pointwise" else about["kind"]
    return RewardFacts(
        name=name,
        version=one_line(str(about["version"])),
        kind=kind,
        needs=frozenset(about["needs"]),
        room=RequestRoom(**{one.name: limits.get(one.name) for one in fields(RequestRoom)}),
        videos="ffv1" in about.get("videos", health.get("videos", ())),
    )


def _detail(message: str) -> str:
    """The sentence in a server's refusal."""
    try:
        return str(json.loads(message)["detail"])
    except (ValueError, LookupError, TypeError):
        return short(message)


def wrong(message: str) -> ValueError:
    """A mistake in the options; `message` without its full stop."""
    return ValueError(f"reward 'remote': {message}.")
