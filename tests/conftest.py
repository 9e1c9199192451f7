"""One thread, no network, shapes checked: what every test can count on."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

# Before anything imports torch or the model libraries.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_OFFLINE"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import jaxtyping
import pytest
import torch

torch.set_num_threads(1)
torch.use_deterministic_algorithms(True)

# The pure layer says its shapes in annotations; here every call is checked against them.
CHECKED = ("samplers", "advantages", "credit", "objectives", "prompts.curriculum")
jaxtyping.install_import_hook([f"flowrl.{name}" for name in CHECKED], "shape_checks.check")


LONGEST = (
    "training/test_seal.py", "training/test_processes.py", "pretraining/test_pretrain.py",
    "training/test_pretend_gpu.py", "training/test_sharded.py", "workers/test_rollouts.py",
    "rewards/actors/test_ray_rewards.py", "training/test_start_order.py", "serving/test_serve_replicas.py",
    "training/test_token_sharing.py", "training/test_full_training.py", "planning/test_plan_memory.py",
    "training/test_resume.py",
    "test_golden_embedded.py", "comparing/test_compare.py", "test_packaging.py", "rewards/judges/test_local_chat.py",
    "planning/test_plan_families.py", "statistics/test_interval_coverage.py", "test_golden_toy.py",
    "commands/test_imports.py", "pipelines/families/test_pipeline_families.py",
)  # fmt: skip
"""Files that take tens of seconds. They go first: one that begins last would keep one core at work and the others idle,
and pytest-xdist by itself begins with the files of many tests, which are the quick ones. `test_seal` is the very first:
it forks its worker, and a fork of a process in which other tests have had threads may wait for them for ever."""
assert all((Path(__file__).parent / name).is_file() for name in LONGEST)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts the longest files first; the order within a file stays."""
    places = {Path(__file__).parent / name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path, len(places)))


@pytest.fixture(autouse=True)
def _wrong_shapes_where_refusals_are_tested(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test with ``refuse`` or ``error`` in its name gives wrong input on purpose, to see our own message for it."""
    on_purpose = any(word in request.node.name for word in ("refuse", "error"))
    jaxtyping.config.update("jaxtyping_disable", on_purpose)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture(scope="session")
def tiny_sd3_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a random SD3 pipeline, written once; copy it before changing anything in it."""
    from tiny_models import save_tiny_sd3  # imports diffusers, which most tests do without

    return save_tiny_sd3(tmp_path_factory.mktemp("tiny") / "sd3")


@pytest.fixture(scope="session")
def warm_python() -> Iterator[str]:
    """A command that stands for `python` and has imported everything; for launches that are not about a cold start."""
    from two_processes import warm_interpreter

    with warm_interpreter() as command:
        yield command
