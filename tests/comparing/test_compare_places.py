"""Where `flowrl compare --jobs N` runs its trainings: GPUs in turn, cores divided."""

from __future__ import annotations

from pathlib import Path

import pytest

from flowrl.comparing.trainings import TrainingPlace, shared_gpus, start_process, visible_gpus


def test_gpus_are_dealt_out_in_turn_and_cores_divided() -> None:
    places = [TrainingPlace.of(slot, 3, ["0", "1"], cores=8) for slot in range(3)]
    assert [place.environment for place in places] == [{"CUDA_VISIBLE_DEVICES": gpu} for gpu in ("0", "1", "0")]
    assert [place.threads for place in places] == [2, 2, 2]
    assert TrainingPlace.of(0, 16, [], cores=2) == TrainingPlace(threads=1, environment={})
    assert TrainingPlace.of(0, 1, ["0", "1"], cores=4) == TrainingPlace(
        threads=4, environment={}
    )  # one training sees them all


def test_gpus_are_those_that_the_user_has_left_visible() -> None:
    assert visible_gpus(None, 3) == ["0", "1", "2"]
    assert visible_gpus("4, GPU-7a", 2) == ["4", "GPU-7a"]
    assert visible_gpus("", 0) == visible_gpus(None, 0) == []


@pytest.mark.parametrize(("jobs", "gpus", "words"), [
    (2, 1, "2 trainings share one GPU"), (3, 2, "3 trainings share 2 GPUs"), (2, 2, ""), (1, 1, ""), (4, 0, ""),
])  # fmt: skip
def test_it_is_said_when_trainings_share_gpus(jobs: int, gpus: int, words: str) -> None:
    assert shared_gpus(jobs, gpus).startswith(words)
    assert bool(shared_gpus(jobs, gpus)) == bool(words)


def test_a_training_sees_its_gpu_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = "#!/bin/sh\necho $CUDA_VISIBLE_DEVICES $KEPT\n"
    (tmp_path / "python").write_text(script)
    (tmp_path / "python").chmod(0o755)
    monkeypatch.setattr("sys.executable", str(tmp_path / "python"))
    monkeypatch.setenv("KEPT", "ours")
    with (tmp_path / "lock").open("w") as lock:
        process = start_process(["train"], tmp_path / "log", lock, {"CUDA_VISIBLE_DEVICES": "5"})
        assert process.wait(timeout=60) == 0
    assert (tmp_path / "log").read_text() == "5 ours\n"
