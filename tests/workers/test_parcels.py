"""Weights that are laid down arrive bit for bit, or not at all; no network takes part."""

from __future__ import annotations

import errno
import os
import signal
import sys
from collections.abc import Mapping
from dataclasses import replace
from multiprocessing import Pipe
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from toy_pipeline import toy_config, write_toy

from flowrl.pipelines.weights.trained_weights import Held
from flowrl.workers import parcels, rollouts
from flowrl.workers.parcels import Version, lay_down, reachable, read
from flowrl.workers.ray_backend import RayBackend
from flowrl.workers.rollouts import Rollouts


def weights() -> dict[str, Tensor]:
    """Several dtypes, a number alone, an empty one, and one that no bundle of the tests holds."""
    made = torch.Generator().manual_seed(0)
    return {
        "large": torch.randn(100, 7, generator=made),
        "narrow": torch.randn(9, 3, generator=made).bfloat16(),
        "number": torch.tensor(2.5),
        "empty": torch.zeros(0, 4),
        "last": torch.randn(5, generator=made).bfloat16(),
    }


def held(tensors: Mapping[str, Tensor]) -> dict[str, Held]:
    return {name: Held(values=one, dtype=one.dtype, shape=tuple(one.shape)) for name, one in tensors.items()}


def nowhere(_: Any) -> Any:
    raise AssertionError("there is memory")


@pytest.mark.parametrize("most", [256, 2**20])
def test_what_is_read_is_what_was_laid_down(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parcels, "BUNDLE", most)
    sent = weights()
    part, memory = lay_down(held(sent), [], nowhere)
    own = {name: torch.full_like(one, torch.nan) for name, one in sent.items()}
    read([part], own)
    for name, one in read([part], None).items():  # an engine has none of its own
        assert torch.equal(one, own[name])
    assert all(torch.equal(own[name], one) for name, one in sent.items())
    assert memory is not None
    assert memory.size == sum(bundle.size for bundle in part.bundles)
    assert len(part.bundles) == (1 if most > 256 else 12)
    assert max(bundle.size for bundle in part.bundles) < most + 512  # names, and bytes up to the next multiple


def test_memory_is_used_again() -> None:
    part, memory = lay_down(held(weights()), [], nowhere)
    assert memory is not None
    again, same = lay_down(held({name: one + 1 for name, one in weights().items()}), [memory], nowhere)
    assert same is memory
    assert torch.equal(read([again], None)["large"], weights()["large"] + 1)
    with pytest.raises(ValueError, match="damaged"):  # what is not there any more is not taken for it
        read([part], None)


@pytest.mark.parametrize("number", [2, 3, 4])
def test_parts_of_several_learners_make_the_whole(number: int) -> None:
    """Rows as torch deals them out; of five rows the fourth of four processes has none. Masters are rounded."""
    whole = {"a": torch.randn(5, 3), "b": torch.randn(1), "c": torch.randn(8, 2, 2)}
    parts, kept = [], []
    for place in range(number):
        own = {}
        for name, one in whole.items():
            each = -(-len(one) // number)
            rows = one[place * each : (place + 1) * each]
            first = min(place * each, len(one)) * one[0].numel()
            own[name] = Held(values=rows, dtype=torch.bfloat16, shape=tuple(one.shape), first=first)
        part, memory = lay_down(own, [], nowhere)
        parts.append(part)
        kept.append(memory)
    found = {name: torch.zeros_like(one).bfloat16() for name, one in whole.items()}
    read(parts, found)
    assert all(torch.equal(found[name], one.bfloat16()) for name, one in whole.items())
    with pytest.raises(ValueError, match="did not arrive whole"):
        read(parts[1:], found)


def test_what_does_not_arrive_whole_is_refused() -> None:
    sent = weights()
    part, memory = lay_down(held(sent), [], nowhere)
    assert memory is not None
    for place in (100, memory.size - 60):
        memory.bytes[place] ^= 1
        with pytest.raises(ValueError, match="arrived damaged"):
            read([part], None)
        memory.bytes[place] ^= 1
    with pytest.raises(ValueError, match=r"large \[100, 7\], which this worker's policy has not"):
        read([part], {**sent, "large": torch.zeros(7, 100)})
    with pytest.raises(ValueError, match=r"1 weights did not arrive whole \(first: more\)"):
        read([part], {**sent, "more": torch.zeros(1)})


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.ENOMEM])
def test_where_there_is_no_room_bundles_go_by_references(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    def full(*_: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "posix_fallocate", full)
    monkeypatch.setattr(parcels, "BUNDLE", 256)
    open_files = len(os.listdir("/proc/self/fd"))
    store = list[Any]()
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(get=lambda reference: store[reference]))

    def put(data: Any) -> int:
        store.append(data.copy())
        return len(store) - 1

    part, memory = lay_down(held(weights()), [], put)
    assert memory is None
    assert not reachable(part)
    assert all(torch.equal(one, weights()[name]) for name, one in read([part], None).items())
    assert len(os.listdir("/proc/self/fd")) == open_files


def test_what_other_machines_get_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(get=lambda reference: reference))
    part, memory = lay_down(held(weights()), [], nowhere)
    assert memory is not None
    far = part.by_ray(lambda data: data.copy())
    memory.bytes.zero_()
    assert all(torch.equal(one, weights()[name]) for name, one in read([far], None).items())


def test_a_killed_learner_leaves_nothing() -> None:
    before, (here, there) = sorted(os.listdir("/dev/shm")), Pipe()
    if not (pid := os.fork()):
        part, kept = lay_down(held(weights()), [], nowhere)
        there.send((part, kept is not None))
        signal.pause()
    try:
        part, kept = here.recv()
        assert kept
        assert reachable(part)
        assert torch.equal(read([part], None)["large"], weights()["large"])  # of another process
        assert sorted(os.listdir("/dev/shm")) == before
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    assert not Path(f"/proc/{pid}").exists()
    assert not reachable(part)
    assert sorted(os.listdir("/dev/shm")) == before


def test_what_learners_hold_between_them_reaches_other_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    """The part of this learner and that of another, which this one maps, each once; a part that is not there is not
    sent."""
    whole, store, (here, there) = weights(), dict[int, Any](), Pipe()
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(get=lambda reference: store[reference]))
    rows = {"first": slice(0, 50), "second": slice(50, 100)}
    halves = {
        name: Held(values=whole["large"][part], dtype=torch.float32, shape=(100, 7), first=part.start * 7)
        for name, part in rows.items()
    }

    def put(data: Any) -> int:
        store[len(store)] = data.copy()
        return len(store) - 1

    if not (pid := os.fork()):
        other, kept = lay_down({"large": halves["second"]}, [], nowhere)
        there.send((other, kept is not None))
        signal.pause()
    try:
        mine, memory = lay_down({"large": halves["first"]}, [], nowhere)
        backend: Any = SimpleNamespace(_sent={}, put=put)
        version = Version(number=1, parts=(mine, here.recv()[0]), memory=memory)
        for _ in range(2):
            parts = RayBackend._parts(backend, version)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    assert memory is not None
    memory.bytes.zero_()
    assert len(store) == 2
    assert torch.equal(read(parts, None)["large"], whole["large"])
    with pytest.raises(OSError, match=str(pid)):
        RayBackend._parts(backend, replace(version, parts=version.parts[1:]))


def test_learners_that_do_not_reach_each_other_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Before Ray is asked, and so before a model loads; one that reaches all ends because another does not."""
    config = toy_config(write_toy(tmp_path), "workers.rollouts=2", "policy.train=full", "policy.lora_rank=null")
    run: Any = SimpleNamespace(device=torch.device("cpu"), layout=None)
    far = replace(lay_down(held(weights()), [], nowhere)[0], process=2**22 + 1)  # above the largest number of a process
    others: Any = SimpleNamespace(gather=lambda mine: [mine, far], any_needs=lambda flags: flags)
    monkeypatch.setattr(rollouts, "join_cluster", nowhere)
    monkeypatch.setattr(rollouts, "shards_of", lambda *_: others)
    with pytest.raises(ValueError, match=r"do not reach each other's: launch as many processes a machine as"):
        Rollouts(config, run)
    others.gather, others.any_needs = (lambda mine: [mine, mine]), (lambda flags: [True])
    with pytest.raises(ValueError, match="do not reach each other's"):
        Rollouts(config, run)


def test_a_learner_without_memory_for_its_part_ends() -> None:
    part, _ = lay_down(held(weights()), [], nowhere)
    given: Any = SimpleNamespace(_versions=0, _spare=[], backend=SimpleNamespace(put=nowhere), _by_memory=True)
    split: Any = SimpleNamespace(gather=lambda mine: [mine, replace(part, memory=-1)])
    with pytest.raises(ValueError, match=r"found no memory to lay it down for workers: free some"):
        Rollouts.send(given, held(weights()), split)
