"""A queue in front of a reward: items of many requests are scored together, by one thread.

While a batch is scored the next one gathers, so batches are small when there is little to do and full when there is
much, without any waiting. Items of pointwise rewards are taken one by one, in order of arrival, as many as have the
same sizes and fit into one call, a video that is larger alone; one for any other reward is scored whole and by itself.

Where the environment variable `DIRECTORY` names a folder when prometheus_client is first imported, the processes of one
server keep their counts in files there, and each of them answers for all, the ended ones too.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from flowrl.rewards.base import Reward, RewardInputs, RewardOutput
from flowrl.rewards.base.outputs import check_output
from flowrl.rewards.serving.wire import IN_FLIGHT, ItemScore, Limits, ScoreRequest, WireItem
from flowrl.rewards.serving.wire_images import Pixels, queue_full
from flowrl.runtime.scrubbing import one_line

DIRECTORY = "PROMETHEUS_MULTIPROC_DIR"

BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
"""Upper bounds of the latency histogram, seconds."""


class Metrics:
    """Metrics of one server, in a registry of its own; any thread may add to them."""

    def __init__(self) -> None:
        from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

        self.registry = own = CollectorRegistry()
        self.requests = Counter(
            "flowrl_requests", "Requests answered, by reward and HTTP status.", ("reward", "status"), registry=own
        )
        self.items = Counter("flowrl_items", "Items scored, failed ones too.", ("reward",), registry=own)
        self.item_failures = Counter(
            "flowrl_item_failures", "Items that failed, by error word.", ("reward", "error"), registry=own
        )
        self.batches = Counter("flowrl_batches", "Calls of the reward.", ("reward",), registry=own)
        self.seconds = Histogram(
            "flowrl_request_seconds",
            "Seconds from arrival to answer of scored requests.",
            ("reward",),
            buckets=BUCKETS,
            registry=own,
        )
        self.queued = Gauge(
            "flowrl_queue_items",
            "Items that wait to be scored.",
            ("reward",),
            multiprocess_mode="livesum",
            registry=own,
        )

    def text(self, accept: str) -> tuple[bytes, str]:
        """Everything so far, and its content type: the newest format that the header `Accept` names, else 0.0.4."""
        from prometheus_client import CollectorRegistry
        from prometheus_client.exposition import choose_encoder
        from prometheus_client.multiprocess import MultiProcessCollector

        encode, content_type = choose_encoder(accept)
        if DIRECTORY not in os.environ:
            return encode(self.registry), content_type
        of_all = CollectorRegistry()
        MultiProcessCollector(of_all)  # type: ignore[no-untyped-call]
        return encode(of_all), content_type


POINTWISE = ("pointwise", "remote")
_LOG = logging.getLogger("flowrl.commands.serve")


@dataclass(kw_only=True, slots=True, eq=False)
class _Job:
    """A request that waits; a cancelled future says that nobody waits for it any more."""

    items: tuple[WireItem, ...]
    iteration: int
    future: Future[list[ItemScore]] = field(default_factory=Future)
    scores: dict[int, ItemScore] = field(default_factory=dict)  # by place

    def enter(self, place: int, score: ItemScore) -> None:
        self.scores[place] = score
        if len(self.scores) == len(self.items):
            with suppress(InvalidStateError):  # given up meanwhile
                self.future.set_result([self.scores[i] for i in range(len(self.items))])


_Entry = tuple[_Job, int]  # an item by its place in its request


class RewardQueue:
    """The queue of one reward and the thread that empties it.

    Args:
        reward: called by the thread only, without gradient.
        limits: how many items may wait and go into one call; requests that stay whole may be larger. A request is let
            in while there is room for its first item.
        metrics: where items, failures, calls and the queue are counted.
    """

    def __init__(self, name: str, reward: Reward, *, limits: Limits, metrics: Metrics) -> None:
        self.name, self.reward, self._limits, self._metrics = name, reward, limits, metrics
        self._queued = metrics.queued.labels(name)
        self._whole = reward.kind not in POINTWISE
        self._entries: deque[_Entry] = deque()
        self._pixels = 0
        self._seconds_per_item = 0.0
        self._changed = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._work, name=f"reward-{name}", daemon=True)

    def __len__(self) -> int:
        return len(self._entries)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def check_room(self) -> None:
        """Raises a `WireError` where `submit` would."""
        given = self._limits
        if len(self._entries) >= given.queue_size or self._pixels >= IN_FLIGHT * given.max_pixels:
            raise queue_full(min(30, 1 + int(self._seconds_per_item * len(self._entries))))

    def submit(self, request: ScoreRequest) -> Future[list[ItemScore]]:
        """Queues a request; the future gives one score per item, in their order. Cancel it to give the request up.
        Raises WireError: there is no room."""
        job = _Job(items=request.items, iteration=request.iteration)
        with self._changed:
            self.check_room()
            self._entries.extend((job, place) for place in range(len(job.items)))
            self._pixels += sum(item.num_pixels for item in job.items)
            self._queued.set(len(self))
            self._changed.notify()
        return job.future

    def close(self, timeout: float) -> None:
        """Finishes what is queued, for `timeout` seconds at most, and ends the thread; the rest is cancelled."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        if self._thread.ident is not None:
            self._thread.join(timeout)
        with self._changed:
            for job, _ in self._entries:
                job.future.cancel()
            self._entries.clear()
            self._queued.set(0)

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._entries) or self._closing)
                batch = self._take_together()
                self._queued.set(len(self))
                if not batch and self._closing and not self._entries:
                    return
            if not batch:  # all that waited was given up
                continue
            start = time.perf_counter()
            with torch.no_grad():
                scores = self._score(batch, first=True)
            spent = (time.perf_counter() - start) / len(batch)
            self._seconds_per_item = spent if not self._seconds_per_item else 0.8 * self._seconds_per_item + 0.2 * spent
            self._metrics.items.labels(self.name).inc(len(batch))
            for (job, place), score in zip(batch, scores, strict=True):
                if score.error is not None:
                    self._metrics.item_failures.labels(self.name, score.error).inc()
                job.enter(place, score)

    def _take_together(self) -> list[_Entry]:
        """Takes from the queue what goes into one call with its first entry."""
        batch: list[_Entry] = []
        kept: deque[_Entry] = deque()
        pixels = 0
        while self._entries and (self._whole or len(batch) < self._limits.batch_size):
            entry = self._entries.popleft()
            size = entry[0].items[entry[1]].num_pixels
            if entry[0].future.cancelled():
                self._pixels -= size
                continue
            fits = not batch or (entry[0] is batch[0][0] if self._whole else _sizes(entry) == _sizes(batch[0]))
            full = bool(batch) and not self._whole and pixels + size > self._limits.max_pixels
            if fits and not full:
                batch.append(entry)
                pixels += size
                continue
            kept.append(entry)
            if fits or self._whole:
                break
        self._entries.extendleft(reversed(kept))
        self._pixels -= pixels
        return batch

    def _score(self, batch: Sequence[_Entry], *, first: bool = False) -> list[ItemScore]:
        """Scores of a batch. One that fails is scored again by halves, so that a bad item harms itself alone."""
        items = [job.items[place] for job, place in batch]
        try:
            sizes = {_sizes(entry) for entry in batch}
            if len(sizes) > 1:
                raise ValueError(f"the items of one {self.reward.kind} request must have the same sizes")
            self._metrics.batches.labels(self.name).inc()
            output = check_output(self.reward(inputs_of(items, batch[0][0].iteration)), len(items), self.name)
        except (Exception, SystemExit) as error:  # whatever a reward does, the server goes on
            if first:
                expected = isinstance(error, ValueError)
                _LOG.warning("reward %s failed: %s: %s", self.name, type(error).__name__, error, exc_info=not expected)
            if len(batch) > 1 and not self._whole:
                middle = len(batch) // 2
                return [*self._score(batch[:middle]), *self._score(batch[middle:])]
            word = "refused" if isinstance(error, ValueError) else "exception"
            detail = one_line(f"{type(error).__name__}: {error}", 500)
            return [ItemScore(id=item.id, value=None, error=word, detail=detail) for item in items]
        return scores_of(output, items)


def _sizes(entry: _Entry) -> Hashable:
    """What items of one batch have in common, to be stacked."""
    job, place = entry
    item = job.items[place]
    frames = (len(item.frames), item.frames[0].shape, item.fps) if item.frames else None
    return item.image.shape, frames, bool(item.source_images), bool(item.reference_images), job.iteration


def inputs_of(items: Sequence[WireItem], iteration: int = 0) -> RewardInputs:
    """Items as a reward takes them, on the host; all must have the same sizes."""
    first = items[0]

    def lists(pick: Callable[[WireItem], Sequence[Pixels]]) -> list[list[Tensor]]:
        return [[_floats([image])[0] for image in pick(item)] for item in items]

    videos = _floats([frame for item in items for frame in item.frames]) if first.frames else None
    return RewardInputs(
        prompts=[item.prompt for item in items],
        images=_floats([item.image for item in items]),
        metadata=[item.metadata for item in items],
        group_ids=torch.tensor([item.group_id for item in items], dtype=torch.int64),
        sample_ids=torch.tensor([item.sample_id for item in items], dtype=torch.int64),
        videos=None if videos is None else videos.unflatten(0, (len(items), len(first.frames))),
        fps=first.fps,
        source_images=lists(lambda item: item.source_images) if first.source_images else None,
        reference_images=lists(lambda item: item.reference_images) if first.reference_images else None,
        iteration=iteration,
    )


def _floats(images: Sequence[Pixels]) -> Tensor:
    """Float32 [n, 3, H, W] in [0, 1] of images of one size; `to_uint8` gives the same images back."""
    pixels = torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2)
    return torch.empty(pixels.shape, dtype=torch.float32).copy_(pixels).div_(255.0)


def scores_of(output: RewardOutput, items: Sequence[WireItem]) -> list[ItemScore]:
    """A reward's output by item. An output counts its errors and does not say which item had which: failed items share
    its word where there is only one, and have the word "mixed" and all the words as detail where there are several."""
    words = sorted(output.errors) or ["not_finite"]
    word, detail = (words[0], None) if len(words) == 1 else ("mixed", ", ".join(words))
    parts = {name: numbers.cpu().double().tolist() for name, numbers in output.parts.items()}
    rows = zip(items, output.values.cpu().double().tolist(), output.valid.tolist(), strict=True)
    return [
        ItemScore(
            id=item.id,
            value=value if valid else None,
            parts={name: numbers[i] for name, numbers in parts.items()},
            error=None if valid else word,
            detail=None if valid else detail,
        )
        for i, (item, value, valid) in enumerate(rows)
    ]
