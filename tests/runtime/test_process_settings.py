"""What is set for a process before libraries read it, and kernels that give the same bits."""

from __future__ import annotations

import logging
import os

import pytest
import torch

from flowrl.config.base import config_files
from flowrl.config.train import load_config
from flowrl.runtime.private_names import NOTES
from flowrl.runtime.process_settings import before_libraries_load, deterministic_kernels, usable_cores


@pytest.mark.parametrize(
    ("given", "allocator"),
    [
        ({}, "expandable_segments:True"),
        ({"PYTORCH_ALLOC_CONF": "backend:cudaMallocAsync"}, "backend:cudaMallocAsync"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:512"}, None),  # its former name, which torch still reads
    ],
)
def test_segments_grow_unless_the_user_says_how_memory_is_taken(given: dict[str, str], allocator: str | None) -> None:
    environment = dict(given)
    before_libraries_load(environment)
    assert environment.get("PYTORCH_ALLOC_CONF") == allocator
    assert given.items() <= environment.items()


def test_python_calls_hide_what_torch_says_of_torchaos_classes() -> None:
    notes = logging.getLogger("torch.utils._pytree")
    for _ in range(2):
        before_libraries_load({})
    said = [logging.LogRecord(notes.name, logging.WARNING, "", 0, text, (), None) for text in ("a", NOTES[notes.name])]
    assert [bool(notes.filter(record)) for record in said] == [True, False]
    assert len(notes.filters) == 1


@pytest.mark.parametrize("before", [False, True])
def test_deterministic_kernels_end_with_the_run(before: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    now = torch.are_deterministic_algorithms_enabled()
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    try:
        torch.use_deterministic_algorithms(before)
        with deterministic_kernels(False):
            assert torch.are_deterministic_algorithms_enabled() is before
            assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ
        with deterministic_kernels(True):
            assert torch.are_deterministic_algorithms_enabled()
            assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
        assert torch.are_deterministic_algorithms_enabled() is before
    finally:
        torch.use_deterministic_algorithms(now)
        monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)


def test_the_key_is_off_unless_it_is_set() -> None:
    settings = config_files()["tiny_recommended"]
    assert not load_config(settings).deterministic
    assert load_config(settings, ("deterministic=true",)).deterministic


def test_cores_are_those_that_a_scheduler_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 64)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {3, 5, 8}, raising=False)
    assert usable_cores() == 3
    monkeypatch.delattr("os.sched_getaffinity")  # as on macOS
    assert usable_cores() == 64
