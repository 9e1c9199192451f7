"""A reward that another program computes: `flowrl serve`, or a reward server of another project.

    {name: remote, options: {url: http://10.0.0.5:8190, reward: hps, token_env: REWARD_TOKEN}}
    {name: remote, options: {url: [http://10.0.0.5:8190, http://10.0.0.6:8190]}}     # two servers of the same reward

Images are sent as 8-bit PNG and videos as FFV1, without loss, so scorers that work on 8-bit images give what they give
in this process; `image_format: jpeg95` sends JPEG, with less bytes and other pixels. Items that
could not be scored (after retries) are failed items with the reason as error word; those that could keep their values.
"""

from __future__ import annotations

import math
import os
import time
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, Literal

import torch
from torch import Tensor

from flowrl.config.sections import at_least
from flowrl.rewards.base import FunctionReward, Model, Reward, RewardInputs, RewardOutput, output_of, to_uint8
from flowrl.rewards.networks.pretrained import look_for_servers
from flowrl.rewards.serving.http_client import Lines
from flowrl.rewards.serving.remote_client import RewardFacts, RewardServer, ask_all, ask_scores, is_back, wrong
from flowrl.rewards.serving.retries import Failure, ServerPool, addresses, check_calls, check_servers
from flowrl.rewards.serving.wire import ItemScore, WireItem
from flowrl.rewards.serving.wire_adapters import ADAPTERS, Way, chunks_of
from flowrl.rewards.serving.wire_images import ImageFormat, Pixels

_NEEDS = ("prompts", "images", "metadata")


@dataclass(frozen=True, kw_only=True, slots=True)
class Remote:
    """The scores that a server of rewards returns."""

    url: str | tuple[str, ...]
    """Address of the server, without path; a list if several servers have the same reward: each request goes to the
    one with the fewest open requests, or to another if one does not answer."""
    reward: str | None = None
    """Which of the server's rewards; null if it has only one."""
    protocol: Literal["flowrl", "flow_factory", "unirl"] = "flowrl"
    """The server's protocol; see `flowrl.rewards.serving.wire_adapters`."""
    token_env: str | None = None
    """Environment variable that holds the token, sent as `Authorization: Bearer`."""
    kind: Literal["remote", "groupwise", "pairwise"] | None = None
    """`remote` (item by item), `groupwise` or `pairwise` (groups are sent whole); null takes what the server says."""
    needs: tuple[str, ...] | None = None
    """Fields that are sent; null takes what the server says, or prompts, images and metadata."""
    image_format: ImageFormat = "png"
    """How images travel: `png` loses nothing; `jpeg95` (quality 95, full colour resolution) has about a quarter of the
    bytes and changes pixels a little, those of videos too."""
    batch_size: int = 16
    """Items of one request; more if a group has more, fewer if the server takes fewer items, bytes or pixels."""
    concurrency: int = 4
    """Requests at a time, for each server."""
    timeout: float = 60.0
    """Seconds of one request."""
    deadline: float = 120.0
    """Seconds of one call of the reward: all its items, with retries and waits between them."""
    retries: int = 4
    """After a failed connection, 408, 425, 5xx, or a reply that cannot be read. A full queue (429) is waited for
    as long as `deadline` allows."""
    wait: bool = True
    """Ask the servers at the start whether they are ready; false goes ahead without knowing, with one server only."""
    addresses: ClassVar[tuple[str, ...]] = ("url",)
    models: ClassVar[tuple[Model, ...]] = ()

    def __post_init__(self) -> None:
        adapter = ADAPTERS[self.protocol]
        check_servers("url", self.url, secret="token_env", example="http://127.0.0.1:8190")
        if len(self.urls) > 1 and not self.wait:
            raise ValueError("wait: false leaves unknown whether several servers have the same reward: remove it.")
        if self.protocol == "unirl" and not self.reward:
            raise ValueError("protocol unirl needs reward: the name of one that the server has.")
        if self.protocol == "flow_factory" and self.reward:
            raise ValueError(f"protocol flow_factory has one reward per server: leave out reward, got {self.reward!r}.")
        if self.token_env is not None and not os.environ.get(self.token_env, "").strip():
            raise ValueError(
                f"the environment variable {self.token_env} is not set: put the token there, or leave out token_env."
            )
        if self.kind not in (None, "remote") and adapter.groups == "none":
            raise ValueError(f"protocol {self.protocol} scores item by item: kind must be remote, got {self.kind}.")
        if unknown := sorted(set(self.needs or ()) - adapter.fields):
            fields = ", ".join(sorted(adapter.fields))
            raise ValueError(f"protocol {self.protocol} cannot send {unknown[0]}; fields are {fields}.")
        at_least(1, self, "batch_size")
        check_calls(self)
        look_for_servers(self.urls, option="url")

    @property
    def urls(self) -> tuple[str, ...]:
        """All addresses."""
        return addresses(self.url)

    def build(self, device: torch.device) -> Reward:
        """Asks the servers whether they are ready; values come back to the device of the images. Raises ValueError: a
        server is not there, not ready, refuses the token, or has no such reward, or they differ."""
        adapter = ADAPTERS[self.protocol]
        token = None if self.token_env is None else os.environ[self.token_env].strip()
        lines = Lines(self.urls, api_key=token)
        servers = [
            RewardServer(lines=lines, line=line, adapter=adapter, timeout=self.timeout, retries=self.retries)
            for line in lines.lines
        ]
        told = ask_all(servers, self.reward, self.deadline) if self.wait else RewardFacts()
        pool = ServerPool(servers, partial(is_back, reward=self.reward, told=told))
        sends = frozenset(self.needs or told.needs or (set(_NEEDS) & adapter.fields))
        if unknown := sorted(sends - adapter.fields):
            raise wrong(
                f"the server's reward needs {', '.join(unknown)}, which cannot be sent: is its version another?"
            )
        about = replace(told, name=self.reward or told.name, kind=self.kind or told.kind, needs=sends)
        pixels = "png-8bit" if self.image_format == "png" else self.image_format
        return FunctionReward(
            name="remote",
            score=partial(self._score, pool=pool, about=about),
            needs=about.needs,
            kind=about.kind,
            waits=True,
            # Without the address: a server that moves to another port stays the same.
            version=f"remote:{self.protocol}:{about.name or 'default'}:{about.version or 'unknown'}:{pixels}",
        )

    def _score(self, inputs: RewardInputs, *, pool: ServerPool[RewardServer], about: RewardFacts) -> RewardOutput:
        items = items_of(inputs, about.needs)
        groups = ADAPTERS[self.protocol].groups if about.kind != "remote" else None
        chunks = chunks_of(items, self.batch_size, groups, about.room)
        way = Way(image_format=self.image_format, videos=about.videos)
        end = time.monotonic() + self.deadline
        threads = ThreadPoolExecutor(self.concurrency * len(self.urls), thread_name_prefix="remote")
        try:
            jobs = [threads.submit(ask_scores, pool, about, chunk, inputs.iteration, end, way) for chunk in chunks]
            wait_for(jobs, timeout=self.deadline)
            # Looked at once: what arrives later than this must not make half of a request count.
            done = [job.done() for job in jobs]
        finally:
            threads.shutdown(wait=False, cancel_futures=True)
        scores: dict[int, ItemScore] = {}
        for job, chunk, finished in zip(jobs, chunks, done, strict=True):
            result = job.result() if finished else Failure(error="timeout")
            if isinstance(result, Failure):
                scores |= {item.id: ItemScore(id=item.id, value=None, error=result.error) for item in chunk}
            else:
                scores |= {score.id: score for score in result.scores}
        ordered = [scores[item.id] for item in items]
        names = sorted(set[str]().union(*(score.parts for score in ordered)))
        parts = {name: [score.parts.get(name, math.nan) for score in ordered] for name in names}
        return output_of([score.value for score in ordered], inputs, parts, [score.error for score in ordered])


def items_of(inputs: RewardInputs, needs: frozenset[str]) -> list[WireItem]:
    """Samples as items with their places as ids; metadata, videos and further images only if needed. Raises
    ValueError: a field that is needed was not given, or images are not finite."""
    for name in ("videos", "source_images", "reference_images"):
        if name in needs and getattr(inputs, name) is None:
            raise ValueError(
                f"reward 'remote' needs {name}, and there are none: the reward on the server is for another task; "
                f"serve one that fits, or set needs."
            )
    images = to_uint8(inputs.images)
    videos = None if inputs.videos is None or "videos" not in needs else [to_uint8(video) for video in inputs.videos]
    sources = _lists(inputs.source_images if "source_images" in needs else None, len(inputs))
    references = _lists(inputs.reference_images if "reference_images" in needs else None, len(inputs))
    groups, samples = inputs.group_ids.tolist(), inputs.sample_ids.tolist()
    return [
        WireItem(
            id=i,
            prompt=prompt,
            image=images[i],
            frames=() if videos is None else tuple(videos[i]),
            fps=None if videos is None else inputs.fps,
            source_images=sources[i],
            reference_images=references[i],
            metadata=inputs.metadata[i] if "metadata" in needs else {},
            group_id=groups[i],
            sample_id=samples[i],
        )
        for i, prompt in enumerate(inputs.prompts)
    ]


def _lists(images: list[list[Tensor]] | None, batch: int) -> list[tuple[Pixels, ...]]:
    if images is None:
        return [()] * batch
    return [tuple(to_uint8(image[None])[0] for image in of_one) for of_one in images]
