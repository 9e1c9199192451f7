"""Two processes give what one gives, and take over from each other."""

from __future__ import annotations

import shutil
import socket
from pathlib import Path

import pytest
from tiny_runs import TinyRuns, differences, lora_tensors, metrics, start, state, tiny_runs

from flowrl.cli import main

SIZES = ("num_iterations=3", "micro_batch_size=4", "rollout_batch_size=4", "keep_checkpoints=9", "kl_coef=0.1")
TOLERANCE = 1e-6


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, tiny_sd3_folder: Path) -> TinyRuns:
    return tiny_runs(tmp_path_factory.mktemp("processes"), tiny_sd3_folder)


@pytest.fixture(scope="module")
def one(runs: TinyRuns) -> Path:
    return runs.train("one", *SIZES, *_evaluated(runs))


@pytest.fixture(scope="module")
def two(runs: TinyRuns) -> Path:
    run = runs.folder / "two"
    _launch(runs, str(runs.config), f"out={run}", *SIZES, *_evaluated(runs))
    return run


def _evaluated(runs: TinyRuns) -> tuple[str, ...]:
    return ("eval_every=3", f"prompts.eval={runs.folder / 'prompts.txt'}", "eval.num_images=3", "eval.batch_size=2")


def _launch(runs: TinyRuns, *arguments: str) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node=2", "--master-addr=127.0.0.1", f"--master-port={port}"]
    process = start([*launcher, "-m", "flowrl", "train", *arguments], runs.folder, GLOO_SOCKET_IFNAME="lo")
    out, err = process.communicate(timeout=400)
    assert process.returncode == 0, err
    assert out.count("Report") == 1  # the main process alone speaks


def _close(a: Path, b: Path) -> None:
    for mine, theirs in zip(metrics(a), metrics(b), strict=True):
        assert mine.keys() == theirs.keys()
        for key in mine:
            scale = max(1.0, abs(mine[key]))  # rewards are hundreds
            assert abs(mine[key] - theirs[key]) <= TOLERANCE * scale, key
    assert differences(lora_tensors(a), lora_tensors(b)) <= TOLERANCE
    assert differences(state(a)["optimizer"]["state"], state(b)["optimizer"]["state"]) <= TOLERANCE


@pytest.mark.slow
def test_two_processes_train_what_one_trains(one: Path, two: Path) -> None:
    assert [row["ratio_first_deviation"] for row in metrics(two) if "reward" in row] == [0.0] * 3
    _close(one, two)
    assert (two / "samples" / "iteration_000003" / "0002.png").is_file()


@pytest.mark.slow
def test_one_process_continues_what_two_began(runs: TinyRuns, one: Path, two: Path) -> None:
    run = runs.folder / "two-one"
    shutil.copytree(two, run)
    shutil.rmtree(run / "checkpoints" / "000003")
    assert main(["train", f"resume={run}"]) == 0
    _close(one, run)


@pytest.mark.slow
def test_two_processes_continue_what_one_began(runs: TinyRuns, one: Path) -> None:
    run = runs.folder / "one-two"
    shutil.copytree(one, run)
    shutil.rmtree(run / "checkpoints" / "000003")
    shutil.rmtree(run / "checkpoints" / "000002")
    _launch(runs, f"resume={run}")
    _close(one, run)
