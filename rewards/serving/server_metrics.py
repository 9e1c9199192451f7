"""Counts of a reward server, as Prometheus metrics.

Where the environment variable `DIRECTORY` names a folder when prometheus_client is first imported, the processes of one
server keep their counts in files there, and each of them answers for all, the ended ones too.
"""

from __future__ import annotations

import os

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
