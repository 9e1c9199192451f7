"""What one process of `flowrl serve` does: loads rewards and answers for them."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from flowrl.generation.scorers import load_rewards
from flowrl.rewards import Reward
from flowrl.rewards.serving import server
from flowrl.rewards.serving.wire import Limits
from flowrl.runtime.scrubbing import printable, without_secrets

if TYPE_CHECKING:
    from fastapi import FastAPI


class _Plain(logging.Formatter):
    """Lines and tracebacks without secrets and control characters."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(without_secrets(super().format(record)))


Rows = Sequence[Sequence[str]]
"""Name, kind, needs and version of each reward."""


def load_app(
    parsed: argparse.Namespace, specs: Sequence[Mapping[str, Any]], device: torch.device, token: str | None,
    replica: int | None = None,
) -> tuple[FastAPI, Rows]:  # fmt: skip
    """Loads the rewards; the application that serves them, and what it serves."""
    torch.set_num_threads(parsed.threads or default_threads(parsed.replicas))
    rewards = load_rewards(specs, device)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Plain("%(asctime)s %(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    return server.make_app(
        rewards, token=token, limits=limits_of(parsed), replica=replica, hosts=hosts_of(parsed)
    ), rows_of(rewards)


def limits_of(parsed: argparse.Namespace) -> Limits:
    """The limits that a command line asks for."""
    return Limits(
        max_bytes=parsed.max_mib * 2**20, max_pixels=parsed.max_mpixels * 10**6, max_items=parsed.max_items,
        max_video_bytes=parsed.max_video_mib * 2**20, max_video_pixels=parsed.max_video_mpixels * 10**6,
        queue_size=parsed.queue_size, batch_size=parsed.batch_size, max_images=parsed.max_images,
        max_connections=parsed.max_connections,
    )  # fmt: skip


def hosts_of(parsed: argparse.Namespace) -> set[str]:
    """Names under which a server without token may be asked, besides those of this machine."""
    return {name.lower().rstrip(".") for name in (parsed.host, *parsed.allow_host)}


def rows_of(rewards: Mapping[str, Reward]) -> Rows:
    """What is said of rewards."""
    return [[name, one.kind, ", ".join(sorted(one.needs)), one.version] for name, one in rewards.items()]


def default_threads(replicas: int) -> int:
    """Threads of torch in one process: the other half of the cores decodes images and speaks HTTP.

    Where both fight for cores, torch's threads wait for each other.
    """
    return max(1, (os.cpu_count() or 1) // 2 // replicas)
