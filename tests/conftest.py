"""One thread, no network, shapes checked: what every test can count on."""

from __future__ import annotations

import gc
import os
import random
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path

# Before anything imports torch or the model libraries.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_OFFLINE"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest

# Imports make a million objects, which all stay: collections look at them seldom, here and where a test starts Python.
CHILDREN = Path(__file__).parent / "helpers" / "children"
os.environ["PYTHONPATH"] = os.pathsep.join([str(CHILDREN), *filter(None, [os.environ.get("PYTHONPATH")])])
runpy.run_path(str(CHILDREN / "sitecustomize.py"))

# What must outlast a power cut waits for the disk, twenty times a checkpoint; tests see that it asks, and cut no power.
vars(os)["fsync"] = os.fstat

# The pure layer says its shapes in annotations; here every call is checked against them.
CHECKED = ("samplers", "advantages", "credit", "objectives", "prompts.curriculum")

pytest_plugins = ("durations",)
"""What tests take, and which files go first."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shuffle", type=int, metavar="SEED", help="files, and tests within each, in an order by chance")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What passes because of what ran before fails in another order."""
    if (seed := config.getoption("shuffle")) is not None:
        chance = random.Random(seed)
        places = {path: chance.random() for path in dict.fromkeys(item.path for item in items)}
        chance.shuffle(items)
        items.sort(key=lambda item: places[item.path])


def pytest_configure(config: pytest.Config) -> None:
    """Where tests run: the process that hands them to others imports no torch, and they begin seconds earlier."""
    if config.getoption("numprocesses", None) and not hasattr(config, "workerinput"):
        return
    import jaxtyping
    import shape_checks
    import torch

    from flowrl.runtime.process_settings import before_libraries_load

    before_libraries_load()  # as the command does: a second and a half of imports less
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    vars(jaxtyping)["jaxtyped"] = shape_checks.jaxtyped
    jaxtyping.install_import_hook([f"flowrl.{name}" for name in CHECKED], "shape_checks.check")


def pytest_collection_finish() -> None:
    """What is settled once everything is imported, before the first test.

    A run that frees its text encoders looks for garbage, 0.4 s each time if that goes through all that was imported.
    Hypothesis draws some values from constants of the source, others from a list of its own, which stays. The first
    test that drew one parsed all of flowrl that was imported: seconds, for values that depended on what that was.
    """
    gc.collect()
    gc.freeze()
    if (providers := sys.modules.get("hypothesis.internal.conjecture.providers")) is not None:
        vars(providers)["is_local_module_file"] = lambda path: False


def pytest_runtest_setup() -> None:
    """Tiny models are read from the same files hundreds of times."""
    from kept_networks import install

    install()


def pytest_unconfigure() -> None:
    """The end of Python frees what was kept from collections, and libraries tell of what it does not."""
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _wrong_shapes_where_refusals_are_tested(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test with ``refuse`` or ``error`` in its name gives wrong input on purpose, to see our own message for it."""
    import jaxtyping

    on_purpose = any(word in request.node.name for word in ("refuse", "error"))
    jaxtyping.config.update("jaxtyping_disable", on_purpose)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture(autouse=True)
def _arithmetic_as_before() -> Iterator[None]:
    """A test that leaves torch other threads makes those after it round otherwise, and forks of this process wait."""
    import torch

    yield
    assert (torch.get_num_threads(), torch.get_default_dtype()) == (1, torch.float32), (
        "the test changed how torch computes"
    )
    assert torch.are_deterministic_algorithms_enabled(), "the test changed how torch computes"


@pytest.fixture(scope="session")
def tiny_sd3_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a random SD3 pipeline, written once; copy it before changing anything in it."""
    from tiny_models import save_tiny_sd3  # imports diffusers, which most tests do without

    return save_tiny_sd3(tmp_path_factory.mktemp("tiny") / "sd3")


@pytest.fixture
def numbers_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs without what no number comes from: their page, and the row of their newest images."""
    import flowrl
    import flowrl.training.loop

    monkeypatch.delitem(vars(flowrl)["_PAGES"], "train")
    monkeypatch.setattr(flowrl.training.loop, "write_latest", lambda *_: [])


@pytest.fixture(scope="session")
def warm_python() -> Iterator[str]:
    """A command that stands for `python` and has imported everything; for launches that are not about a cold start."""
    from two_processes import warm_interpreter

    with warm_interpreter() as command:
        yield command
