"""Workers of several processes: what each is asked for, how they end together, and the bits of no workers."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kept_workers import Kept, start_warm, without_toy
from split_runs import command
from test_parcels import nowhere
from tiny_runs import differences, lora_tensors, metrics, model_tensors

import flowrl.runtime.cluster
from flowrl.cli import main
from flowrl.pipelines.weights.parallelize import denoiser_bytes
from flowrl.pipelines.weights.trained_weights import Held
from flowrl.runtime.cluster import connect, disconnect
from flowrl.training.draws import EvalRequest, Request
from flowrl.trajectory import Conditioning
from flowrl.workers import parcels, rollouts
from flowrl.workers.dispatch import PieceDone, PieceFailed, WorkerGone, WorkerReady
from flowrl.workers.parcels import lay_down, read
from flowrl.workers.ray_backend import Order, RayBackend, _Group, bundled

# ---- pieces ----------------------------------------------------------------------------------------------------------


def piece(images: range, *steps: int) -> Request:
    asked: Any = None
    return Request(iteration=0, images=images, asked=asked, steps=steps)


def test_a_worker_gets_pieces_of_equally_many_calls() -> None:
    """In their order, at most one for each process: the last of an iteration may be shorter, and prompts may differ in
    their steps."""
    whole = [piece(range(4 * i, 4 * i + 4), 0, 1) for i in range(5)]
    short, other = piece(range(20, 22), 0, 1), [piece(range(4), 1, 2), piece(range(4, 8), 1, 2)]
    for most, sizes in ((1, [1] * 8), (2, [2, 2, 1, 1, 2]), (4, [4, 1, 1, 2]), (9, [5, 1, 2])):
        found = list(bundled([*whole, short, *other], most))
        assert [len(some) for some in found] == sizes
        assert [one for some in found for one in some] == [*whole, short, *other]
    assert list(bundled([], 2)) == []
    cond = Conditioning({"text": torch.zeros(1)})
    shown = [EvalRequest(cond=cond, keys=((0,),) * rows, scale=1.0) for rows in (2, 2, 1)]
    assert [len(some) for some in bundled(shown, 2)] == [2, 1]


@pytest.mark.parametrize(("place", "number"), [(0, 1), (0, 2), (1, 2), (2, 4), (3, 4)])
@pytest.mark.parametrize("learners", [1, 2, 3])
def test_each_process_takes_its_rows_alone(
    place: int, number: int, learners: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of weights in bundles that begin within rows, of what a process has no row of, and of learners whose parts
    begin elsewhere."""
    monkeypatch.setattr(parcels, "BUNDLE", 256)
    whole = {"a": torch.randn(50, 3), "b": torch.randn(1), "c": torch.randn(6, 2, 2).bfloat16()}

    def rows_of(one: torch.Tensor, place: int, number: int) -> tuple[int, torch.Tensor]:
        each = -(-len(one) // number)
        return min(place * each, len(one)), one[place * each :][:each]

    parts = []
    for learner in range(learners):
        dealt = {name: rows_of(one, learner, learners) for name, one in whole.items()}
        own = {
            name: Held(
                values=rows, dtype=rows.dtype, shape=tuple(whole[name].shape), first=first * whole[name][0].numel()
            )
            for name, (first, rows) in dealt.items()
        }
        parts.append(lay_down(own, [], nowhere))
    first, mine = {}, {}
    for one in whole.values():
        first[one.data_ptr()], mine[one.data_ptr()] = rows_of(one, place, number)
    taken = {key: torch.full_like(rows, torch.nan) for key, rows in mine.items()}
    monkeypatch.setattr(parcels, "own_part", lambda one: taken[one.data_ptr()])
    monkeypatch.setattr(parcels, "first_held", lambda one: first[one.data_ptr()] * one[0].numel())
    read([part for part, _ in parts], whole)
    assert all(torch.equal(taken[key], rows) for key, rows in mine.items())


# ---- answers ---------------------------------------------------------------------------------------------------------


class Died(Exception):
    """In the place of Ray's error of an actor that is gone, as Ray's others."""


class Raised(Exception):
    """In the place of Ray's error of a task."""

    def __init__(self, cause: Exception) -> None:
        self.cause = cause


class Actors:
    """What answers in the place of Ray: results and errors by reference."""

    def __init__(self) -> None:
        self.answers, self.killed, self.removed = dict[Any, Any](), list[Any](), list[Any]()
        self.exceptions = SimpleNamespace(RayTaskError=Raised, RayError=(Died, Raised))
        self.util = SimpleNamespace(remove_placement_group=self.removed.append)

    def kill(self, actor: Any) -> None:
        self.killed.append(actor.name)

    def wait(self, references: list[Any], *, num_returns: int, timeout: float) -> tuple[list[Any], list[Any]]:
        return [one for one in references if one in self.answers][:num_returns], []

    def get(self, reference: Any) -> Any:
        if isinstance(self.answers[reference], Exception):
            raise self.answers[reference]
        return self.answers[reference]

    def actor(self, name: str) -> Any:
        def asked(request: Any, version: int, parts: Any, *, idle: bool) -> Any:
            return name, request, idle

        return SimpleNamespace(name=name, draw=SimpleNamespace(remote=asked))


@pytest.fixture
def ray_of_two() -> tuple[Actors, Any]:
    """A worker of two processes, "a" and "b", that has loaded and is asked for ticket 5: one piece, "x"."""
    actors = Actors()
    backend: Any = object.__new__(RayBackend)
    backend._ray, backend._awaited, backend._near, backend._groups = actors, {}, set(), {}
    backend._groups[0] = _Group([actors.actor("a"), actors.actor("b")], "room")
    version: Any = SimpleNamespace(number=1, parts=(), memory=None)
    asked: Any = ["x"]
    backend.submit(0, 5, Order(asked, version))
    return actors, backend


def test_a_ticket_is_done_when_all_processes_have_answered(ray_of_two: tuple[Actors, Any]) -> None:
    actors, backend = ray_of_two
    assert list(backend._awaited) == [("a", "x", False), ("b", "x", True)]  # the other makes the same calls
    actors.answers[("b", "x", True)] = None
    assert backend.wait(0) == []
    actors.answers[("a", "x", False)] = "drawn"
    assert backend.wait(0) == [PieceDone(0, 5, ["drawn"])]
    backend._awaited = {"one": (0, None, 0), "two": (0, None, 1)}
    actors.answers |= {"one": ("node", True), "two": ("node", False)}
    assert backend.wait(0) == [WorkerReady(0, "node")]
    assert backend._near == set()  # for that one of them has to map the learner's memory too


def test_where_one_process_is_gone_all_end(ray_of_two: tuple[Actors, Any]) -> None:
    """Though the other says first that its neighbour does not answer."""
    actors, backend = ray_of_two
    actors.answers[("a", "x", False)] = Raised(RuntimeError("connection closed by peer"))
    assert backend.wait(0) == []
    actors.answers[("b", "x", True)] = Died()
    assert backend.wait(0) == [WorkerGone(0, "Died")]
    assert (actors.killed, actors.removed) == (["a", "b"], ["room"])
    assert backend._awaited == backend._groups == {}


@pytest.mark.parametrize("answers", [False, True])
def test_an_error_of_one_process_ends_all(
    ray_of_two: tuple[Actors, Any], answers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others wait for it in a gathering and say nothing; or they raise too, so that nobody need be waited for."""
    actors, backend = ray_of_two
    error = ValueError("no room")
    actors.answers[("a", "x", False)] = Raised(error)
    if answers:
        actors.answers[("b", "x", True)] = Raised(ValueError("its first said so"))
    else:
        assert backend.wait(0) == []
        now = backend.now()
        monkeypatch.setattr(RayBackend, "now", lambda backend: now + 31)
    failed, gone = backend.wait(0)
    assert failed == PieceFailed(0, 5, error)
    assert gone == WorkerGone(0, "one of its processes failed: no room")
    assert (actors.killed, actors.removed) == (["a", "b"], ["room"])


# ---- runs ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def there(warm_python: str) -> Iterator[None]:
    """Ray, started as runs start it, with kept actors of a real family."""
    pytest.importorskip("ray")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parents[1] / "helpers"), prepend=os.pathsep)
        start_warm(patch, warm_python)
        connect(None, workers=2)
        patch.setattr(flowrl.runtime.cluster, "disconnect", lambda: None)  # at the end of a run
        patch.setattr(rollouts, "RayBackend", Kept)
        patch.setattr(Kept, "family", staticmethod(without_toy))
        patch.setattr(Kept, "idle", [])
        yield
    disconnect()


RUNS = {
    "sd3": ("sampler.guidance_scale=3",),
    "flux": ("pipeline.dtype=bfloat16", "pipeline.quantize=int8", "credit.method=g2rpo", "sampler.kernel=cps"),
    "wan": ("pipeline.dtype=bfloat16", "policy.train=full", "policy.lora_rank=null"),
}


def rows(run: Path) -> list[dict[str, Any]]:
    return [{key: value for key, value in row.items() if not key.startswith("workers/")} for row in metrics(run)]


@pytest.mark.slow
@pytest.mark.usefixtures("numbers_alone")
@pytest.mark.parametrize("family", RUNS)
def test_two_processes_draw_what_the_learner_would_have_drawn(
    family: str, there: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A process that dies in the middle; codes and branches; all weights of two experts. Of three batches of an
    evaluation the last is one process's alone."""
    settings = (*RUNS[family], "threads=1", "eval_every=2")
    assert main(["train", *command(tmp_path, family, "grpo", tmp_path / "here", *settings)]) == 0
    monkeypatch.setattr(Kept, "dies_at", 3 if family == "sd3" else None)
    more = ("workers.rollouts=1", "workers.shard=2")
    assert main(["train", *command(tmp_path, family, "grpo", tmp_path / "there", *settings, *more)]) == 0
    assert rows(tmp_path / "here") == rows(tmp_path / "there")
    shipped = model_tensors if family == "wan" else lora_tensors
    assert differences(shipped(tmp_path / "here"), shipped(tmp_path / "there")) == 0
    assert Kept.dies_at is None
    assert ("was lost (its process ended)" in capsys.readouterr().err) is (family == "sd3")

    import ray

    (group,) = Kept.idle
    told = [
        actor.__ray_call__.remote(lambda worker: denoiser_bytes(worker.pipeline.denoiser)) for actor in group.actors
    ]
    sizes = [sum(each.values()) if "held" not in each else each for each in ray.get(told)]
    assert [one["held"] / one["whole"] for one in sizes] == pytest.approx([0.5, 0.5], abs=0.02)
