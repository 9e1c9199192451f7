"""One process of a reward server, which loads rewards and answers requests; and the settings of all processes."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from flowrl.config.bounds import GRACE, IMAGES, THREADS, check_counts
from flowrl.generation.scorers import load_rewards
from flowrl.rewards.serving import server
from flowrl.rewards.serving.wire import Limits
from flowrl.runtime.process_settings import usable_cores
from flowrl.runtime.scrubbing import printable, without_secrets

if TYPE_CHECKING:
    from fastapi import FastAPI


_FIRST_WAIT, _LONGEST_WAIT = 1.0, 30.0  # seconds before a dead process is started again, twice as long each time
_LIVED = 60.0  # seconds after which a process counts as one that can live


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerSettings:
    """The settings of a reward server."""

    host: str = "127.0.0.1"
    """Address to listen at."""
    port: int = 8190
    """Port; 0 for a free one."""
    allow_host: tuple[str, ...] = ()
    """Names besides localhost that clients may use for a server without token."""
    token_env: str | None = None
    """Environment variable with the token that clients must send."""
    threads: int | None = None
    """CPU threads of torch; None is half of the cores, shared by the replicas."""
    replicas: int = 1
    """Processes with a copy of the rewards each, behind the one port."""
    devices: str | None = None
    """Devices of the replicas in turn, such as "cuda:0,cuda:1"; None is all GPUs, or the CPU."""
    device: str | None = None
    """Device of one process, or of all."""
    batch_size: int = 16
    """Images scored at once."""
    queue_size: int = 1024
    """Images per reward that may wait."""
    max_items: int = 256
    """Images per request."""
    max_mib: int = 64
    """MiB per request."""
    max_mpixels: int = 64
    """Million pixels per request."""
    max_images: int = 4096
    """Images and frames per request, of any size."""
    max_connections: int = 256
    """Connections per address."""
    max_video_mib: int = 256
    """MiB per request with videos."""
    max_video_mpixels: int = 128
    """Million pixels per video."""
    grace: float = 30.0
    """Seconds to finish accepted requests after a signal."""

    def __post_init__(self) -> None:
        check_counts(THREADS, threads=self.threads)
        check_counts(IMAGES, batch_size=self.batch_size)
        counts = ("replicas", "queue_size", "max_items", "max_mib", "max_mpixels", "max_images", "max_connections",
                  "max_video_mib", "max_video_mpixels")  # fmt: skip
        check_counts(**{name: getattr(self, name) for name in counts})
        if not 0 <= self.grace <= GRACE:
            raise ValueError(f"`grace` must lie between 0 and {GRACE:g} seconds, a day, got {self.grace:g}")

    @property
    def limits(self) -> Limits:
        """The limits of a request."""
        return Limits(
            max_bytes=self.max_mib * 2**20, max_pixels=self.max_mpixels * 10**6, max_items=self.max_items,
            max_video_bytes=self.max_video_mib * 2**20, max_video_pixels=self.max_video_mpixels * 10**6,
            queue_size=self.queue_size, batch_size=self.batch_size, max_images=self.max_images,
            max_connections=self.max_connections,
        )  # fmt: skip

    @property
    def hosts(self) -> set[str]:
        """Names besides those of this machine that clients may use for a server without token."""
        return {name.lower().rstrip(".") for name in (self.host, *self.allow_host)}


class _Plain(logging.Formatter):
    """Formats log lines and tracebacks without secrets and control characters."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(without_secrets(super().format(record)))


Rows = Sequence[Sequence[str]]
"""Name, kind, needs and version of each reward."""


def load_app(
    asked: ServerSettings, specs: Sequence[Mapping[str, Any]], device: torch.device, token: str | None
) -> tuple[FastAPI, Rows]:
    """Loads the rewards; returns the application that serves them, and what it serves."""
    rewards = load_rewards(specs, device)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Plain("%(asctime)s %(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    rows = [[name, one.kind, ", ".join(sorted(one.needs)), one.version] for name, one in rewards.items()]
    return server.make_app(rewards, token=token, limits=asked.limits, hosts=asked.hosts), rows


def count_death(before: int, lived: float) -> tuple[int, float]:
    """Counts deaths of a process in a row, given its seconds of life, and the wait before its restart."""
    deaths = 0 if lived > _LIVED else before + 1
    return deaths, min(_LONGEST_WAIT, _FIRST_WAIT * 2.0 ** min(max(deaths - 1, 0), 30))


def threads_of(asked: ServerSettings) -> int:
    """Torch's threads of one process; by default the other half of the cores decodes images and handles HTTP, since
    torch's threads wait for each other if both compete for cores."""
    return asked.threads or max(1, usable_cores() // 2 // asked.replicas)
