"""A worker that draws: the run's pipeline and policy in a process of its own, without rewards and text encoders."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flowrl.config.train import TrainConfig
from flowrl.pipelines.weights.loading_choices import Loading
from flowrl.rewards.base.user_code import load_function
from flowrl.runtime.process_settings import take_deterministic_kernels
from flowrl.training.draws import Drawn, Draws, EvalRequest, Request
from flowrl.training.learner import NetworkCounter
from flowrl.training.parts import init_lora, load_pipeline, load_policy
from flowrl.training.paths import draw_request
from flowrl.workers.engine import Engine, drawn_by


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


class RolloutWorker(Draws):
    """Draws pieces of rollouts; lives in a process of Ray's. It loads nothing as it is made, so that what fails there
    comes back as an answer."""

    def load(self, duty: Duty) -> str:
        """Loads what draws; returns where this is, in words."""
        self._version = 0  # of the weights: none
        if Path(duty.folder).is_dir():  # another machine need not have it
            os.chdir(duty.folder)
        torch.set_num_threads(duty.threads)
        if duty.config.deterministic:
            take_deterministic_kernels()
        self.config, self.geometry = duty.config, duty.config.resolve_batch(duty.learners)
        place = duty.config.workers.engine
        kind = duty.device if place is None else "cpu"
        self.device = torch.device(kind, 0) if kind == "cuda" else torch.device(kind)
        self.pipeline = load_pipeline(duty.config.pipeline, self.device, Loading(later=True))
        if place is not None:
            self.engine: Engine = load_function(place, "Engine", what="engine")()
            self.engine.load(duty.config)
            return platform.node()
        self.pipeline.load_denoiser()  # alone: prompts come encoded, so that no text encoder is read
        self.pipeline.free_text_encoders()
        self.policy = load_policy(duty.config, self.pipeline, init_lora(duty.config))
        self.network = NetworkCounter(self.pipeline.network, {})
        return platform.node()

    def take(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Draws with these weights from now on."""
        (self.policy.load if self.config.workers.engine is None else self.engine.take)(weights)
        self._version = version

    @torch.no_grad()
    def draw(self, request: Request | EvalRequest, version: int, weights: list[Any]) -> Drawn:
        """Draws a piece under a version of the weights; `weights` is a list of one reference to them."""
        if version != self._version:
            import ray

            self.take(ray.get(weights[0]), version)
        if isinstance(request, Request) and self.config.workers.engine is not None:
            return drawn_by(self.engine, self, request)
        found = draw_request(self, request)
        return Drawn(found=found, evaluations=self.network.hand_over())
