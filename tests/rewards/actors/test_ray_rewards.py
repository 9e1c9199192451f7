"""Rewards that workers on Ray compute: the same numbers, whoever computes them and whoever dies."""

from __future__ import annotations

import itertools
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from kept_workers import start_warm
from reward_servers import noise, samples
from tiny_runs import lora, metrics
from toy_pipeline import toy_in_place, write_toy

pytest.importorskip("ray")

import ray

from flowrl.cli import main
from flowrl.config.rewards import RewardConfig
from flowrl.config.sections import WorkersConfig
from flowrl.rewards import RewardInputs, RewardOutput
from flowrl.rewards.actors import ray_rewards
from flowrl.rewards.actors.ray_rewards import (
    About,
    RewardWorkers,
    Started,
    WorkerReward,
    check_reward_workers,
    find_workers,
    start_workers,
)
from flowrl.rewards.compose import build_weighted_sum
from flowrl.rewards.serving import retries
from flowrl.rewards.serving.retries import ServerPool
from flowrl.runtime.cluster import disconnect

FUNCTIONS = """
import os, time

import torch
from flowrl.rewards import RewardOutput

def place(images, prompts, metadata):
    time.sleep(0.05)
    return [float(os.getpid())] * len(images)

def told(images, prompts, metadata):
    return [float(os.environ["TOLD"])] * len(images)

def exact(inputs):  # of every field that a user's function is given, and of whole groups
    value = inputs.images.double().sum((1, 2, 3)) + inputs.group_ids + 2 * inputs.sample_ids + inputs.iteration
    value = value + torch.tensor([len(p) + one.get("number", 0) for p, one in zip(inputs.prompts, inputs.metadata)])
    value = value - value.mean()
    inputs.images.zero_()  # what travelled is writable, and a copy
    return RewardOutput(values=value.float(), valid=inputs.sample_ids != 101, parts={"half": value.float() / 2},
                        errors={"unlucky": int((inputs.sample_ids == 101).sum())})

def refuses(images, prompts, metadata):
    raise ValueError("no such luck")
"""


def inputs(batch: int = 8, first: int = 0) -> RewardInputs:
    base = samples(batch, first=first)
    images = torch.from_numpy(noise(batch, 3, 24, 24)).float() / 255 + 1e-4 * torch.arange(24)  # no 8 bits hold these
    return RewardInputs(
        prompts=base.prompts, images=images, metadata=base.metadata, group_ids=base.group_ids,
        sample_ids=base.sample_ids, iteration=3,
    )  # fmt: skip


def same(a: RewardOutput, b: RewardOutput) -> None:
    assert a.values.nan_to_num(-1).tolist() == b.values.nan_to_num(-1).tolist()
    assert a.valid.tolist() == b.valid.tolist()
    assert {name: part.nan_to_num(-1).tolist() for name, part in a.parts.items()} == {
        name: part.nan_to_num(-1).tolist() for name, part in b.parts.items()
    }
    assert a.errors == b.errors


@pytest.fixture(scope="module")
def entries(tmp_path_factory: pytest.TempPathFactory) -> dict[str, RewardConfig]:
    file = tmp_path_factory.mktemp("functions") / "functions.py"
    file.write_text(FUNCTIONS)
    made = {name: RewardConfig(file=str(file), function=name) for name in ("place", "told", "exact", "refuses")}
    return made | {"jpeg": RewardConfig(name="jpeg_compressibility")}


@pytest.fixture(scope="module")
def warm(warm_python: str) -> Iterator[None]:
    """Workers that have imported everything."""
    with pytest.MonkeyPatch.context() as patch:
        start_warm(patch, warm_python)
        yield


@pytest.fixture(scope="module")
def workers(
    warm: None, entries: dict[str, RewardConfig], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RewardWorkers]:
    environment = tmp_path_factory.mktemp("environment") / "env.yaml"
    environment.write_text(yaml.safe_dump({"env_vars": {"TOLD": "7"}}))
    settings = WorkersConfig(rewards=2, reward_env=str(environment))
    try:
        wanted = list(entries.values())
        started = start_workers(settings, wanted, dtype="float32", device=torch.device("cpu"))
        yield find_workers(settings, wanted, started)
    finally:
        disconnect()


@pytest.mark.slow
def test_values_are_those_of_this_process(workers: RewardWorkers, entries: dict[str, RewardConfig]) -> None:
    for name in ("exact", "jpeg"):
        here = build_weighted_sum([entries[name]]).terms[0].reward
        there = workers.of(entries[name])
        assert (there.name, there.kind, there.needs, there.version) == (here.name, here.kind, here.needs, here.version)
        assert there.waits
        given, kept = inputs(), inputs()
        same(there(given), here(inputs()))
        assert torch.equal(given.images, kept.images)
    assert workers.of(entries["told"])(inputs()).values.tolist() == [7.0] * 8  # its environment


@pytest.mark.slow
def test_calls_in_flight_are_shared_out_and_a_dead_workers_calls_are_asked_again(
    workers: RewardWorkers, entries: dict[str, RewardConfig]
) -> None:
    place = workers.of(entries["place"])
    found = list[int]()

    def ask() -> None:
        found.append(int(place(inputs(2)).values[0]))

    def together(count: int) -> None:
        threads = [threading.Thread(target=ask) for _ in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    together(8)
    processes = sorted(set(found))
    assert [found.count(process) for process in processes] == [4, 4]
    assert os.getpid() not in processes

    jpeg = workers.of(entries["jpeg"])
    here = build_weighted_sum([entries["jpeg"]]).terms[0].reward(inputs())
    killing = threading.Timer(0.12, os.kill, (processes[0], signal.SIGKILL))
    found.clear()
    killing.start()
    together(12)
    killing.join()
    assert len(found) == 12  # none is lost
    assert processes[1] in found
    same(jpeg(inputs()), here)
    end = time.monotonic() + 60
    while len(set(found) - {processes[0]}) < 2:  # it was started again, as another process
        assert time.monotonic() < end
        found.clear()
        together(4)
    same(jpeg(inputs()), here)


@pytest.mark.slow
def test_an_error_in_a_worker_is_told_as_one_here(workers: RewardWorkers, entries: dict[str, RewardConfig]) -> None:
    with pytest.raises(ValueError, match=r"reward 'refuses' on a worker on .*no such luck"):
        workers.of(entries["refuses"])(inputs())


@pytest.mark.slow
def test_a_run_with_workers_is_the_run_without(warm: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole groups, two rewards of which one is measured only, and a run that goes on without its workers."""
    disconnect()  # the workers above hold what their instance has
    monkeypatch.chdir(tmp_path)
    for _ in toy_in_place(tmp_path):
        rewards: list[dict[str, Any]] = [
            {"file": "toy_rewards.py", "function": "brightness", "gate": 0.2},
            {"file": "toy_rewards.py", "function": "redness", "weight": 0.5, "label": "red"},
        ]
        measured = {"rewards": [{"file": "toy_rewards.py", "function": "success"}], "num_images": 0}
        write_toy(tmp_path, rewards=rewards, eval=measured, prompts={"train": "prompts.txt", "eval": "prompts.txt"})
        settings = ("rollout_batch_size=4", "eval_every=1")
        for out, more in (("here", ()), ("there", ("workers.rewards=1",))):
            assert main(["train", "toy.yaml", f"out={out}", "num_iterations=2", *settings, *more]) == 0
        assert main(["train", "resume=here", "num_iterations=3"]) == 0
        assert main(["train", "resume=there", "num_iterations=3", "workers.rewards=0"]) == 0
        assert metrics(Path("here")) == metrics(Path("there"))
        assert lora(Path("here")) == lora(Path("there"))
        manifest = json.loads(Path("there/manifest.json").read_text())
        assert "sha256" in json.dumps(manifest)


def asked(monkeypatch: pytest.MonkeyPatch, *answers: Any) -> RewardOutput:
    """What a reward of two pretended workers gives whose calls are answered so; the last answer holds from then on."""
    calls = itertools.count()

    def get(reference: Any, timeout: float | None = None) -> Any:
        assert timeout is not None
        answer = answers[min(next(calls), len(answers) - 1)]
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(ray, "get", get)
    monkeypatch.setattr(retries, "FIRST_DELAY", 1e-3)
    monkeypatch.setattr(retries, "LONGEST_DELAY", 1e-3)
    actors = [SimpleNamespace(score=SimpleNamespace(remote=lambda *_: None)) for _ in range(2)]
    about = About(name="far", kind="pointwise", needs=frozenset(), version="1")
    pool = ServerPool[Any](actors, lambda actor: False)
    workers = RewardWorkers(entries=(), about=(about,), pool=pool)
    return WorkerReward(place=0, workers=workers, **asdict(about))(inputs(2))


def test_a_call_waits_for_workers_that_start_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    dead = ray.exceptions.ActorUnavailableError("it is restarting", None)
    output = RewardOutput(values=torch.ones(2), valid=torch.ones(2, dtype=torch.bool), errors={"a": 1})
    same(asked(monkeypatch, *[dead] * 30, output), output)
    assert "reward 'far': no worker that scores is there; its 2 images are sent again" in capsys.readouterr().err


def test_a_call_that_nobody_answers_ends_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_rewards, "_DEADLINE", 0.2)
    with pytest.raises(ValueError, match=r"no worker scored 2 images .*it is restarting.*'ray status'.*lack of mem"):
        asked(monkeypatch, ray.exceptions.ActorUnavailableError("it is restarting", None))
    with pytest.raises(ValueError, match=r"reward 'far': a worker did not answer for 2 images .*it hangs"):
        asked(monkeypatch, ray.exceptions.GetTimeoutError("late"))


def test_workers_that_never_build_their_rewards_are_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([[True], None])

    def get(references: Any, timeout: float | None = None) -> Any:
        assert timeout is not None
        if (answer := next(answers)) is None:
            raise ray.exceptions.GetTimeoutError("late")
        return answer

    monkeypatch.setattr(ray, "get", get)
    monkeypatch.setattr(ray_rewards, "connect", lambda *_, **__: None)
    remote = SimpleNamespace(remote=lambda: None)
    started = Started(address="", names=("one",), actors=(SimpleNamespace(ready=remote, about=remote),))
    with pytest.raises(ValueError, match=r"not all of the 1 workers that score had built their rewards within 1800 s"):
        find_workers(WorkersConfig(rewards=1), [], started)


def test_what_cannot_have_workers_is_refused(tmp_path: Path) -> None:
    jpeg, learns = RewardConfig(name="jpeg_compressibility"), RewardConfig(name="adversarial")
    environment = tmp_path / "env.yaml"
    environment.write_text("- pip\n")
    cases: list[tuple[dict[str, Any], RewardConfig, str, str]] = [
        ({"rewards": 1}, jpeg, "backprop", "recipe backprop takes the gradient"),
        ({"rewards": 2}, learns, "grpo", r"workers.rewards is 2, and adversarial stays in the learner"),
        ({"reward_env": "x"}, jpeg, "grpo", "workers.reward_env is .* workers.rewards is 0"),
        ({"rewards": 1, "reward_env": "not there"}, jpeg, "grpo", r"reward_env \(not there\) cannot be read"),
        ({"rewards": 1, "reward_env": str(environment)}, jpeg, "grpo", "must hold a mapping"),
    ]
    for settings, reward, recipe, message in cases:
        with pytest.raises(ValueError, match=message):
            check_reward_workers(WorkersConfig(**settings), [reward], recipe)
    check_reward_workers(WorkersConfig(), [jpeg], "backprop")
    check_reward_workers(WorkersConfig(rewards=1), [jpeg, learns], "grpo")
