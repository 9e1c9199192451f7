"""A worker on Ray that scores images: it builds the rewards of a run from the run's configuration.

Ray alone makes a `RewardActor`; the run speaks to it through `flowrl.rewards.actors.ray_rewards`. Nothing is built
before the first call. So a worker that was started again builds its rewards again, and errors arrive in words.
"""

from __future__ import annotations

import os
import platform
import traceback
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from flowrl.config.rewards import RewardConfig
from flowrl.rewards.base import Reward, RewardInputs, RewardOutput, with_images
from flowrl.rewards.base.outputs import check_output, move_output
from flowrl.rewards.base.specs import check_reward
from flowrl.runtime.placement import sent
from flowrl.runtime.precision import arithmetic, refuse_unable


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerTask:
    """What a worker needs to be the rewards of a run."""

    entries: tuple[RewardConfig, ...]
    """Of the configuration, those that workers compute."""
    device: str
    """Either "cpu", or "cuda", the first GPU that Ray lends to the worker."""
    dtype: str
    """`reward_dtype` of the run."""
    threads: int
    """Number of torch's threads in the run's own process; sums on a CPU may depend on it."""
    folder: str
    """The folder in which the run was started; relative paths begin there if the worker's machine has it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class About:
    """A built reward's description of itself."""

    name: str
    kind: str
    needs: frozenset[str]
    version: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Refusal:
    """An error of a reward: its words, and whether they are for whoever wrote the configuration."""

    message: str
    expected: bool


class RewardActor:
    """The rewards of a run in a process of their own."""

    def __init__(self, wanted: WorkerTask) -> None:
        self.wanted = wanted
        self.device = torch.device(wanted.device)
        self._built: list[Reward] = []

    def ready(self) -> bool:
        """Answers, as soon as the worker is up again."""
        return True

    def about(self) -> list[About] | Refusal:
        """Builds the rewards; returns their descriptions, in the order of the entries."""
        try:
            return [
                About(name=one.name, kind=one.kind, needs=frozenset(one.needs), version=one.version)
                for one in self._rewards()
            ]
        except (Exception, SystemExit) as error:  # the run reports anything that a reward raises
            return _refused(error)

    def score(self, place: int, inputs: RewardInputs) -> RewardOutput | Refusal:
        """The output of one reward, on the host."""
        try:
            reward = self._rewards()[place]
            with torch.no_grad(), arithmetic(self.wanted.dtype):
                output = check_output(reward(inputs_on(inputs, self.device)), len(inputs), reward.name)
            return move_output(output, torch.device("cpu"))
        except (Exception, SystemExit) as error:
            return _refused(error)

    def _rewards(self) -> list[Reward]:
        if not self._built:
            if os.path.isdir(self.wanted.folder):
                os.chdir(self.wanted.folder)
            torch.set_num_threads(self.wanted.threads)
            refuse_unable(self.wanted.dtype, self.device, "reward_dtype")
            parts = dict[Hashable, Any]()
            self._built = [check_reward(entry).build(self.device, parts) for entry in self.wanted.entries]
        return self._built


def inputs_on(inputs: RewardInputs, device: torch.device) -> RewardInputs:
    """The same inputs with their images on a device."""
    return with_images(inputs, lambda images: sent(images, device))


def _refused(error: BaseException) -> Refusal:
    where = f"a worker on {platform.node()}"
    if isinstance(error, ValueError):
        return Refusal(message=f"{where}: {error}", expected=True)
    return Refusal(message=f"{where}: {type(error).__name__}: {error}\n{traceback.format_exc()}", expected=False)


def with_whole_paths(entries: Sequence[RewardConfig]) -> tuple[RewardConfig, ...]:
    """Entries with absolute paths to users' files."""
    return tuple(entry if entry.file is None else replace(entry, file=os.path.abspath(entry.file)) for entry in entries)
