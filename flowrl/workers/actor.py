"""A worker that draws: the run's pipeline and policy in a process of its own, without rewards and text encoders."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flowrl.config.train import TrainConfig
from flowrl.pipelines.weights.full_weights import working_weights
from flowrl.pipelines.weights.loading_choices import Loading, Split
from flowrl.rewards.base.user_code import load_function
from flowrl.runtime.process_settings import take_deterministic_kernels
from flowrl.training.draws import Drawn, Draws, EvalRequest, Request
from flowrl.training.learner import NetworkCounter
from flowrl.training.parts import init_lora, load_pipeline, load_policy
from flowrl.training.paths import draw_request
from flowrl.training.processes.devices import PATIENCE, backend_of
from flowrl.training.processes.mesh import Layout, shards_of
from flowrl.workers.engine import Engine, drawn_by
from flowrl.workers.parcels import Shard, reachable, read

_HERE = "127.0.0.1"  # all processes of a worker are on one machine


@dataclass(frozen=True, kw_only=True, slots=True)
class Duty:
    """What a worker is made with."""

    config: TrainConfig
    learners: int
    """Processes that learn, which the images of an iteration are divided over."""
    device: str
    """"cpu", "cuda" or "mps": the kind that the learner has."""
    threads: int
    """Of the learner; products of matrices are split over them, and so are their bits."""
    folder: str
    """That paths of the configuration start at."""
    probe: Shard
    """What a worker of the learner's machine can map."""


class RolloutWorker(Draws):
    """Draws pieces of rollouts, alone or with others that hold one model together; lives in a process of Ray's. It
    loads nothing as it is made, so that what fails there comes back as an answer."""

    _store: Any  # that all processes of a worker reach, in the first of them

    def meet(self) -> int:
        """Has the first process of a worker open the place where all of them meet; its port on their machine."""
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        self._store = TCPStore(_HERE, 0, None, is_master=True, wait_for_workers=False)
        return int(self._store.port)

    def _join(self, rank: int, number: int, port: int) -> Split | None:
        """Forms the group of this worker's processes, of which the learners know nothing."""
        import torch.distributed as dist

        store = dist.TCPStore(_HERE, port, None) if rank else self._store  # type: ignore[attr-defined]
        given: dict[str, Any] = {"store": store, "rank": rank, "world_size": number, "timeout": PATIENCE}
        dist.init_process_group(backend_of(self.device.type), **given)
        return shards_of(Layout(shard=number), self.device)

    def load(self, duty: Duty, rank: int = 0, port: int = 0) -> tuple[str, bool]:
        """Loads what draws; returns where this is, in words, and whether it maps what the learner lays down. `rank` is
        the process's number in its worker, and `port` what the first one's `meet` returned."""
        self._version = 0  # of the weights: none
        self.own: Mapping[str, Tensor] | None = None  # what they are copied into
        here = platform.node(), reachable(duty.probe)
        if Path(duty.folder).is_dir():  # another machine need not have it
            os.chdir(duty.folder)
        torch.set_num_threads(duty.threads)
        if duty.config.deterministic:
            take_deterministic_kernels()
        self.config, self.geometry = duty.config, duty.config.resolve_batch(duty.learners)
        place = duty.config.workers.engine
        kind = duty.device if place is None else "cpu"
        self.device = torch.device(kind, 0) if kind == "cuda" else torch.device(kind)
        number = duty.config.workers.shard
        split = self._join(rank, number, port) if number > 1 else None
        self.pipeline = load_pipeline(duty.config.pipeline, self.device, Loading(later=True, split=split))
        if place is not None:
            self.engine: Engine = load_function(place, "Engine", what="engine")()
            self.engine.load(duty.config)
            return here
        self.pipeline.load_denoiser()  # alone: prompts come encoded, so that no text encoder is read
        self.pipeline.free_text_encoders()
        if duty.config.policy.train == "full":  # without masters, which nobody needs who does not train
            self.own = dict(working_weights(self.pipeline.denoiser, duty.config.policy.target_modules))
        else:
            self.own = dict(load_policy(duty.config, self.pipeline, init_lora(duty.config)).parameters)
        self.network = NetworkCounter(self.pipeline.network, {})
        return here

    @torch.no_grad()
    def draw(
        self, request: Request | EvalRequest, version: int, parts: Sequence[Shard], *, idle: bool = False
    ) -> Drawn | None:
        """Draws a piece under a version of the weights, of which `parts` say where they lie; None if it is `idle`, and
        makes the calls of another process's piece alone. Raises ValueError, OSError: as `read`."""
        if version != self._version:
            self._version = 0  # what fails midway is no version
            weights = read(parts, self.own)
            if self.own is None:
                self.engine.take(weights)
            self._version = version
        if isinstance(request, Request) and self.config.workers.engine is not None:
            return drawn_by(self.engine, self, request)
        found = draw_request(self, request)
        drawn = Drawn(found=found, evaluations=self.network.hand_over())
        return None if idle else drawn
