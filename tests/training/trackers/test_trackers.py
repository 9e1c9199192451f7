"""Trackers are told a run's numbers, samples and report, and never stop it."""

from __future__ import annotations

import json
import shutil
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from toy_pipeline import toy_in_place
from train_command import train

from flowrl.config.sections import LoggingConfig
from flowrl.media.videos import save_mp4
from flowrl.training.trackers.opening import TensorBoardTracker, TrackioTracker, as_gif, check_trackers
from flowrl.training.trackers.tracker import Numbers, Sample, Tracker, Trackers, samples_of

SETTINGS = ("num_iterations=2", "eval_every=1", "eval.num_images=2", "eval.num_prompts=2")
"""And the prompts that are trained on, to be evaluated too."""


@pytest.fixture
def config(tmp_path: Path) -> Iterator[Path]:
    yield from toy_in_place(tmp_path)


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def kinds(row: dict[str, Any]) -> dict[str, float]:
    numbers = {key: value for key, value in row.items() if isinstance(value, int | float)}
    return {key: value for key, value in numbers.items() if key != "iteration" and not isinstance(value, bool)}


def test_tensorboard_has_every_number_and_each_sample_of_each_evaluation(config: Path, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = tmp_path / "run"
    train(str(config), [f"out={folder}", "logging.tensorboard=true", f"prompts.eval={tmp_path}/prompts.txt", *SETTINGS])
    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    told = {
        (tag, event.step): event.value for tag in events.Tags()["scalars"] for event in events.Scalars(tag)
    }  # fmt: skip
    wanted = {(key, row["iteration"]): value for row in rows(folder) for key, value in kinds(row).items()}
    assert told.keys() == wanted.keys()
    assert all(told[place] == pytest.approx(value, rel=1e-6) for place, value in wanted.items())
    images = sorted(tag for tag in events.Tags()["images"] if tag.startswith("samples/"))
    assert [tag.split()[0] for tag in images] == ["samples/0", "samples/1"]
    for number, tag in enumerate(images):
        shown = events.Images(tag)
        assert [event.step for event in shown] == [0, 1, 2]
        last = folder / "samples" / "iteration_000002" / f"{number:04d}.png"
        assert shown[-1].encoded_image_string == last.read_bytes()


@pytest.mark.slow
def test_weights_and_biases_offline_keeps_all_in_the_run_folder(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "config"))
    monkeypatch.setenv("WANDB_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("WANDB_DATA_DIR", str(tmp_path / "data"))
    folder = tmp_path / "run"
    train(
        str(config),
        [
            f"out={folder}",
            "logging.wandb=offline",
            "logging.project=colours",
            f"prompts.eval={tmp_path}/prompts.txt",
            *SETTINGS,
        ],
    )
    (kept,) = (folder / "wandb").glob("offline-run-*")
    assert kept.name.endswith(json.loads((folder / "manifest.json").read_text())["run"])
    assert list(kept.glob("*.wandb"))
    media = sorted(path.parent.name for path in (kept / "files" / "media").rglob("*.*"))
    assert media.count("samples") == 6  # two at each of three evaluations
    assert media.count("html") == 1
    (file,) = kept.glob("*.wandb")
    given_up = time.monotonic() + 60  # W&B's own process may close the file a little later
    while not (read := history(file)) and time.monotonic() < given_up:
        time.sleep(0.2)
    told = {
        (key, row["iteration"]): value for row in read for key, value in row.items()
        if not key.startswith(("_", "samples/", "report/")) and key != "iteration"
    }  # fmt: skip
    wanted = {(key, row["iteration"]): value for row in rows(folder) for key, value in kinds(row).items()}
    assert told == pytest.approx(wanted)


def history(file: Path) -> list[dict[str, Any]]:
    """The rows in a file of W&B, none while it is being written: blocks of 32 KiB behind a header, in each records with
    7 bytes of their own, the one of the run's end behind all rows."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, place, record = file.read_bytes(), 7, b""
    found: list[dict[str, Any]] = []
    while place + 7 <= len(data):
        size, kind = int.from_bytes(data[place + 4 : place + 6], "little"), data[place + 6]
        record += data[place + 7 : place + 7 + size]
        place += 7 + size
        if place > len(data):
            break
        if kind in (1, 4):  # whole, or its last part
            told, record = Record.FromString(record), b""
            if told.HasField("exit"):
                return [row for row in found if "iteration" in row]
            items = told.history.item
            found.append({"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in items})
        if -place % 32768 < 7:  # too little is left of the block for a header
            place += -place % 32768
    return []


class Standing(ModuleType):
    """In the place of trackio, which keeps pillow below the version that flowrl needs: what it is asked for, in order.

    `Image` and `Video` tell what they are made of, and a run is the module itself.
    """

    def __init__(self) -> None:
        super().__init__("trackio")
        self.__spec__ = ModuleSpec("trackio", None)  # by which a check finds it
        self.begun: list[dict[str, Any]] = []
        self.rows: list[tuple[int, dict[str, Any]]] = []
        self.finished = 0

    def init(self, **settings: Any) -> Standing:
        self.begun.append(settings)
        return self

    def log(self, row: dict[str, Any], *, step: int) -> None:
        assert not self.finished
        self.rows.append((step, row))

    def finish(self) -> None:
        self.finished += 1

    def Image(self, path: str, *, caption: str) -> tuple[str, Path, str]:
        return "image", Path(path), caption

    def Video(self, path: str, *, caption: str) -> tuple[str, Path, str]:
        return "video", Path(path), caption


@pytest.fixture
def trackio(monkeypatch: pytest.MonkeyPatch) -> Standing:
    standing = Standing()
    monkeypatch.setitem(sys.modules, "trackio", standing)
    return standing


def test_trackio_is_sent_numbers_and_samples_over_iterations(config: Path, tmp_path: Path, trackio: Standing) -> None:
    folder, told = tmp_path / "run", ["logging.trackio=local", "logging.project=colours"]
    train(str(config), [f"out={folder}", *told, f"prompts.eval={tmp_path}/prompts.txt", *SETTINGS])
    (begun,) = trackio.begun
    assert begun.pop("config")["num_iterations"] == 2
    assert begun == {
        "project": "colours", "name": "run", "space_id": None, "resume": "never", "embed": False,
        "auto_log_gpu": False, "auto_log_cpu": False,
    }  # fmt: skip
    numbers = {
        (key, step): value for step, row in trackio.rows for key, value in row.items() if not key.startswith("samples/")
    }  # fmt: skip
    assert numbers == {(key, row["iteration"]): value for row in rows(folder) for key, value in kinds(row).items()}
    shown = {(key, step): value for step, row in trackio.rows for key, value in row.items() if isinstance(value, tuple)}
    prompts = [entry["prompt"] for entry in json.loads((folder / "samples" / "prompts.json").read_text())]
    assert shown == {
        (f"samples/{number}", step): ("image", folder / "samples" / f"iteration_{step:06d}" / f"{number:04d}.png", text)
        for number, text in enumerate(prompts) for step in (0, 1, 2)
    }  # fmt: skip
    assert all(path.is_file() for _, path, _ in shown.values())
    assert trackio.finished == 1


def test_trackio_is_sent_clips_and_goes_on_in_a_space(tmp_path: Path, trackio: Standing) -> None:
    check_trackers("none", "owner/space")
    tracker = TrackioTracker(tmp_path / "run", {"a": 1}, space="owner/space", project="colours", resumed=True)
    assert (trackio.begun[0]["space_id"], trackio.begun[0]["resume"]) == ("owner/space", "allow")
    tracker.show(3, [Sample(number=0, prompt="a ball", image=tmp_path / "0.png", video=tmp_path / "0.mp4")])
    tracker.close(None, failed=True)
    assert trackio.rows == [(3, {"samples/0": ("video", tmp_path / "0.mp4", "a ball")})]
    assert trackio.finished == 1


def test_trackio_keeps_numbers_over_iterations_on_this_machine(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    pytest.importorskip("trackio")
    folder = tmp_path / "run"
    train(
        str(config),
        [
            f"out={folder}",
            "logging.trackio=local",
            "logging.project=colours",
            f"prompts.eval={tmp_path}/prompts.txt",
            *SETTINGS,
        ],
    )
    from trackio.sqlite_storage import SQLiteStorage

    told = {
        (key, entry["step"]): value for entry in SQLiteStorage.get_logs("colours", "run")
        for key, value in entry.items() if isinstance(value, int | float) and key not in ("step",)
    }  # fmt: skip
    wanted = {(key, row["iteration"]): value for row in rows(folder) for key, value in kinds(row).items()}
    assert told == pytest.approx(wanted)
    assert len(list((tmp_path / "trackio").rglob("*.png"))) == 6


class Failing:
    """A tracker whose server goes away."""

    name = "Elsewhere"

    def __init__(self) -> None:
        self.told: list[int] = []

    def log(self, iteration: int, numbers: Numbers) -> None:
        self.told.append(iteration)
        if iteration == 1:
            raise ConnectionError("the server went away")

    def show(self, iteration: int, samples: Sequence[Sample]) -> None:
        raise AssertionError("nothing is shown where no samples are")

    def close(self, report: Path | None, *, failed: bool) -> None:
        raise AssertionError("it was left out before")


def test_one_that_fails_is_told_of_once_and_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    failing = Failing()
    other = TensorBoardTracker(tmp_path, "a: 1")
    trackers: list[Tracker] = [failing, other]
    both = Trackers(trackers)
    for iteration in range(4):
        both.log({"iteration": iteration, "reward": 0.5, "note": None, "warnings": ["x"], "fine": True})
    both.show(tmp_path, 0)
    both.close()
    assert failing.told == [0, 1]
    said = capsys.readouterr().err
    assert said.count("Elsewhere gets nothing more from this run") == 1
    assert "the server went away" in said


def test_clips_are_shown_as_clips(tmp_path: Path) -> None:
    folder = tmp_path / "samples" / "iteration_000003"
    save_mp4(torch.rand(5, 3, 16, 16), folder / "0000.mp4", 8.0)
    (folder / "0000.png").write_bytes(b"")
    (tmp_path / "samples" / "prompts.json").write_text(json.dumps([{"prompt": "a ball"}, {"prompt": "not kept"}]))
    (sample,) = samples_of(tmp_path, 3)
    assert (sample.prompt, sample.video) == ("a ball", folder / "0000.mp4")
    gif, width, height = as_gif(folder / "0000.mp4")
    assert gif.startswith(b"GIF89a")
    assert (width, height) == (192, 192)  # small clips are enlarged where they are written
    assert samples_of(tmp_path, 4) == []


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"wandb": "online"}, "logging.wandb=online "),
        ({"trackio": "owner/space/more"}, "logging.trackio=owner/space/more"),
        ({"trackio": "owner/"}, "logging.trackio=owner/"),
    ],
)
def test_what_cannot_be_told_is_refused_before_anything_loads(
    settings: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HOME", "WANDB_CONFIG_DIR"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.delenv("NETRC", raising=False)
    with pytest.raises(ValueError, match=message):
        check_trackers(settings.get("wandb", "none"), settings.get("trackio", "none"))


def test_nothing_is_told_anybody_by_default() -> None:
    assert (LoggingConfig().wandb, LoggingConfig().trackio) == ("none", "none")
    with pytest.raises(ValueError, match=r"logging\.project must be a name"):
        LoggingConfig(project=" ")


def test_a_disk_that_fails_under_tensorboard_is_told_in_one_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that writes meets it first: the folder of the run is gone."""
    monkeypatch.setattr(threading, "excepthook", threading.excepthook)
    trackers = Trackers([TensorBoardTracker(tmp_path / "run", "a: 1")])
    shutil.rmtree(tmp_path / "run")
    for iteration in range(3):
        trackers.log({"iteration": iteration, "reward": 0.5})
    trackers.close()
    said = capfd.readouterr().err
    assert "Traceback" not in said
    assert "Exception in thread" not in said
    assert said.count("TensorBoard gets nothing more from this run, which goes on without it: there is no") == 1
