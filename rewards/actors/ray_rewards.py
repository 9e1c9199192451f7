"""Rewards that workers on Ray compute (`workers.rewards`); the run asks them like its own rewards.

    workers = start_workers(settings, entries, ...)         # M actors that build the rewards of the entries
    workers.of(entry)                                       # a `Reward` that sends its inputs to one of them

Each call goes whole, images as floats bit for bit, to the worker with the fewest open calls. So a reward sees the same
batches and groups as in the run's own process, and gives the same numbers. If a worker dies, Ray starts it again; its
call goes to another worker at once, or waits until one is back if none is left.

Ray alone makes a `RewardActor`. It builds nothing before the first call, so a worker that was started again builds its
rewards again, and errors arrive in words.
"""

from __future__ import annotations

import os
import platform
import sys
import time
import traceback
import uuid
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml

from flowrl.config.rewards import RewardConfig
from flowrl.config.sections import WorkersConfig
from flowrl.rewards.base import Reward, RewardInputs, RewardOutput, with_images
from flowrl.rewards.base.outputs import check_output, move_output
from flowrl.rewards.base.specs import check_reward
from flowrl.rewards.serving.retries import Failure, ServerPool, call_with_retries
from flowrl.runtime.cluster import check_extra, connect, refuse_ended
from flowrl.runtime.placement import sent
from flowrl.runtime.precision import arithmetic, refuse_unable
from flowrl.runtime.randomness import counter_seed
from flowrl.runtime.scrubbing import say as print


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


OWN = ("adversarial", "remote", "votes")
"""Rewards that stay in the run's own process: the one that learns with the policy, and those that ask a server."""
_NAMESPACE = "flowrl"
_DEADLINE = 1800.0  # seconds of one call: a worker that was started again loads its models first
_RETRIES = 1000  # of a call whose worker died, after the other workers: more than fit into the deadline
_SAID = 5  # tries, some 15 s, after which the run reports a call that still waits
_STARTS = 900.0  # seconds in which workers have to start; packages of an environment may have to be installed
_BUILDS = 1800.0  # seconds in which they have to build their rewards; models may have to be downloaded
_LOOK = 0.5  # seconds between looks whether Ray itself is still there
_READY = 120.0  # seconds in which a worker that was set aside has to answer


def goes_to_workers(entry: RewardConfig) -> bool:
    """Whether workers compute a reward."""
    return entry.name not in OWN


def check_reward_workers(settings: WorkersConfig, rewards: Sequence[RewardConfig], recipe: str) -> None:
    """Refuses workers for rewards that cannot have them, before anything loads."""
    if not settings.rewards:
        if settings.reward_env is not None:
            raise ValueError("workers.reward_env is the environment of workers that score, and workers.rewards is 0")
        return
    check_extra("workers.rewards")
    if recipe == "backprop":
        raise ValueError(
            "recipe backprop takes the gradient of its reward, and none comes back from a worker: set workers.rewards=0"
        )
    if not any(map(goes_to_workers, rewards)):
        names = ", ".join(entry.called for entry in rewards)
        raise ValueError(
            f"workers.rewards is {settings.rewards}, and {names} stays in the learner (rewards that learn with the "
            "policy, and those of a server): set workers.rewards=0"
        )
    if settings.reward_env is not None:
        read_environment(settings.reward_env)


def read_environment(path: str) -> dict[str, Any]:
    """The Ray runtime environment in a YAML file, such as `{pip: [open_clip_torch], env_vars: {HF_HOME: /data/hf}}`."""
    where = f"workers.reward_env ({path})"
    try:
        given = yaml.safe_load(Path(path).expanduser().read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"{where} cannot be read: {error}: give a YAML file of a Ray runtime environment") from error
    if not isinstance(given, Mapping) or not all(isinstance(key, str) for key in given):
        raise ValueError(f"{where} must hold a mapping such as {{pip: [open_clip_torch]}}, got {given!r}")
    return dict(given)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RewardWorkers:
    """The workers of a run; `about` are the descriptions that the rewards of `entries` give of themselves."""

    entries: tuple[RewardConfig, ...]
    about: tuple[About, ...]
    pool: ServerPool[Any]

    def of(self, entry: RewardConfig) -> Reward:
        """The reward of one of the entries."""
        place = next(i for i, one in enumerate(self.entries) if one is entry)
        return WorkerReward(place=place, workers=self, **asdict(self.about[place]))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class WorkerReward:
    """A `Reward` that workers compute: it has their description, waits, and has no gradient."""

    place: int
    workers: RewardWorkers
    name: str
    kind: str
    needs: frozenset[str]
    version: str
    differentiable: bool = False
    waits: bool = True

    def __call__(self, inputs: RewardInputs) -> RewardOutput:
        # Drops the videos and further images that a reward does not read: they are most of the traffic.
        unread = [name for name in ("videos", "sounds", "source_images", "reference_images") if name not in self.needs]
        nothing: dict[str, Any] = dict.fromkeys(unread)
        given = inputs_on(replace(inputs, **nothing), torch.device("cpu"))
        seed = counter_seed("worker", inputs.iteration, *given.sample_ids[:1].tolist())

        def send(attempt: int, seconds: float) -> RewardOutput | Refusal | Failure:
            if attempt == _SAID:
                print(
                    f"flowrl: reward {self.name!r}: no worker that scores is there; its {len(inputs)} images are sent "
                    f"again until one is, for {seconds / 60:.0f} minutes at most",
                    file=sys.stderr,
                    flush=True,
                )
            until = time.monotonic() + seconds
            return self.workers.pool.ask(partial(self._scores, inputs=given, until=until))

        found: RewardOutput | Refusal | Failure = call_with_retries(
            send, deadline=_DEADLINE, retries=_RETRIES, seed=seed
        )
        if isinstance(found, Failure):
            minutes = f"{_DEADLINE / 60:g} minutes"
            if found.error == "timeout":
                raise ValueError(
                    f"reward {self.name!r}: a worker did not answer for {len(inputs)} images within {minutes}: it "
                    "hangs, or has more to do than it gets through: raise workers.rewards or lower "
                    "rollout_batch_size, then continue the run"
                )
            raise ValueError(
                f"reward {self.name!r}: no worker scored {len(inputs)} images within {minutes}; of the last it is "
                f"known: {found.message}. Either its machine is gone ('ray status' tells which are there), or its "
                "process ends each time: by lack of memory (lower rollout_batch_size or workers.rewards, or raise "
                "workers.reward_gpus) or by a fault of the reward's code (set workers.rewards=0 to see it). Then "
                "continue the run"
            )
        if isinstance(found, Refusal):
            raise _error_of(f"reward {self.name!r}", found)
        return move_output(found, inputs.images.device)

    def _scores(self, actor: Any, *, inputs: RewardInputs, until: float) -> RewardOutput | Refusal | Failure:
        import ray

        try:
            refuse_ended()
            asked = actor.score.remote(self.place, inputs)
            while True:
                refuse_ended()
                left = until - time.monotonic()
                try:
                    found: RewardOutput | Refusal = ray.get(asked, timeout=max(min(left, _LOOK), 0.001))
                    return found
                except ray.exceptions.GetTimeoutError as error:
                    if left <= _LOOK:  # the time of the call is over, for other workers too
                        return Failure(error="timeout", again=False, message=_first_line(error))
        except ray.exceptions.RayTaskError:  # not dead: the message could not be read there, or its answer here
            raise
        except ray.exceptions.RayError as error:
            return Failure(error="connection", message=_first_line(error))


def _is_ready(actor: Any) -> bool:
    import ray

    refuse_ended()
    try:
        return bool(ray.get(actor.ready.remote(), timeout=_READY))
    except ray.exceptions.RayError:
        return False


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Started:
    """Requested workers: the cluster's address and their names there; they live as long as something holds `actors`."""

    address: str
    names: tuple[str, ...]
    actors: tuple[Any, ...] = ()


def start_workers(
    settings: WorkersConfig, entries: Sequence[RewardConfig], *, dtype: str, device: torch.device
) -> Started:
    """Starts the workers; one process of a run does.

    Args:
        entries: rewards, each of which `goes_to_workers`.
        dtype: `reward_dtype`.
        device: of the run's own process: on a GPU, workers have GPUs too, unless `workers.reward_gpus` is 0.
    """
    import ray

    cluster = connect(settings.address, workers=settings.rollouts + settings.rewards)
    gpus = settings.reward_gpus if device.type == "cuda" else 0.0
    have: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
    for what, each in (("CPU", 1.0), ("GPU", gpus)):
        need, there = each * settings.rewards, have.get(what, 0.0)
        if need > there:  # Ray would wait without a word
            raise ValueError(
                f"workers.rewards={settings.rewards} needs {need:g} {what}s in the Ray cluster, which has {there:g}: "
                f"lower workers.rewards{' or workers.reward_gpus' if what == 'GPU' else ''}"
            )
    wanted = WorkerTask(
        entries=tuple(one if one.file is None else replace(one, file=os.path.abspath(one.file)) for one in entries),
        device="cuda" if gpus else "cpu",
        dtype=dtype,
        threads=torch.get_num_threads(),
        folder=os.getcwd(),
    )
    environment = None if settings.reward_env is None else read_environment(settings.reward_env)
    maker, own = ray.remote(RewardActor), uuid.uuid4().hex  # several runs may share a cluster
    names = tuple(f"rewards-{own}-{number}" for number in range(settings.rewards))
    actors = [
        maker.options(
            name=name,
            namespace=_NAMESPACE,
            num_cpus=1,
            num_gpus=gpus,
            max_restarts=-1,
            max_task_retries=0,
            runtime_env=environment,
        ).remote(wanted)
        for name in names
    ]
    return Started(address=cluster.address, names=names, actors=tuple(actors))


def find_workers(settings: WorkersConfig, entries: Sequence[RewardConfig], started: Started) -> RewardWorkers:
    """The workers that one process of the run started, for any of them; waits until all have built their rewards."""
    import ray

    connect(started.address, workers=settings.rollouts + settings.rewards)
    actors = started.actors or [ray.get_actor(name, namespace=_NAMESPACE) for name in started.names]
    begun = False
    try:
        ray.get([actor.ready.remote() for actor in actors], timeout=_STARTS)
        begun = True
        said = ray.get([actor.about.remote() for actor in actors], timeout=_BUILDS)
    except ray.exceptions.GetTimeoutError as error:
        if begun:
            raise ValueError(
                f"not all of the {len(actors)} workers that score had built their rewards within {_BUILDS:g} s: models "
                "that are downloaded there take longer, or their machines do not answer ('ray status' tells): download "
                "them first on every machine, then start again"
            ) from error
        raise ValueError(
            f"not all of the {len(actors)} workers that score started within {_STARTS:g} s: other workers hold what "
            "the cluster has ('ray status' tells), or their environment takes longer: lower workers.rewards "
            "or workers.reward_gpus"
        ) from error
    except ray.exceptions.RayError as error:
        raise ValueError(
            f"a worker that scores did not start ({str(error).strip().splitlines()[-1][:300]}): its environment "
            "(workers.reward_env, else the cluster's) needs flowrl and what the rewards need"
        ) from error
    for about in said:
        if isinstance(about, Refusal):
            raise _error_of("rewards", about)
        if about != said[0]:
            differ = next((a, b) for a, b in zip(said[0], about, strict=True) if a != b)
            raise ValueError(
                f"workers build different rewards: {differ[0].version} and {differ[1].version}: files that the rewards "
                "read must be the same at the same place on every machine of the cluster"
            )
    return RewardWorkers(entries=tuple(entries), about=tuple(said[0]), pool=ServerPool(actors, _is_ready))


def _error_of(owner: str, refused: Refusal) -> Exception:
    """A worker's error as an error of this process."""
    message = f"{owner} on {refused.message}"
    return ValueError(message) if refused.expected else RuntimeError(message)


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0][:300]
