"""What a run keeps outlasts a power cut, damage to it is found before anything is trained, and nothing of a run is
written or read outside its folder."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tiny_runs import differences, lasting, lora, metrics
from toy_pipeline import toy_in_place, write_toy

from flowrl.cli import main
from flowrl.runs.run_folder import refuse_taken
from flowrl.runtime.files import LOCK, at_work, is_taken, leads_out, locked, replacing, sync
from flowrl.training.checkpoints import check_newest, checkpoints
from flowrl.training.trackers.metric_rows import MetricRows


@pytest.fixture(scope="module")
def toys(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    yield from toy_in_place(tmp_path_factory.mktemp("damage"))


@pytest.fixture(scope="module")
def whole(toys: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three iterations, each with its checkpoint."""
    place = tmp_path_factory.mktemp("whole")
    write_toy(place, rewards=[{"file": str(place / "toy_rewards.py"), "function": "brightness"}], num_iterations=3)
    assert main(["train", str(place / "toy.yaml"), f"out={place / 'run'}"]) == 0
    return place / "run"


@pytest.fixture
def run(whole: Path, tmp_path: Path) -> Path:
    """A copy of it, ended before its report, as a killed run is."""
    run = shutil.copytree(whole, tmp_path / "run")
    (run / "summary.json").unlink()
    return run


def resume(run: Path, *overrides: str) -> int:
    return main(["train", f"resume={run}", *overrides])


def same(a: Path, b: Path) -> None:
    assert metrics(a) == metrics(b)
    assert lora(a) == lora(b)
    assert differences(lasting(a), lasting(b)) == 0


def files(folder: Path) -> dict[str, bytes]:
    """Every file with its content, but for the lock, which each command takes."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*"))
            if path.is_file() and path.name != LOCK}  # fmt: skip


def as_older(run: Path) -> None:
    """Seals as versions wrote them that had no checksums of rows and of the seal."""
    for folder in checkpoints(run):
        seal = json.loads((folder / "checkpoint.json").read_text())
        old = {key: value for key, value in seal.items() if key not in ("metrics_sha256", "seal_sha256")}
        (folder / "checkpoint.json").write_text(json.dumps(old) + "\n")


# ---- on the disk, in this order --------------------------------------------------------------------------------------


def test_a_file_and_its_name_are_synced_and_a_folder_that_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done, fsync = list[str](), os.fsync

    def noted(number: int) -> None:
        done.append(Path(os.readlink(f"/proc/self/fd/{number}")).name)
        fsync(number)

    monkeypatch.setattr(os, "fsync", noted)
    with replacing(tmp_path / "a" / "b" / "file") as stream:
        stream.write(b"x")
        assert done == [tmp_path.name, "a"]
    assert [name.partition(".file.")[0] for name in done] == [tmp_path.name, "a", "", "b"]
    done.clear()
    with replacing(tmp_path / "cheap", durable=False) as stream:
        stream.write(b"x")
    assert done == []


def test_a_file_system_that_syncs_no_folders_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(number: int) -> None:
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr(os, "fsync", none)
    sync(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="Invalid"):
        sync(tmp_path / "file")


def test_a_seal_is_written_over_what_the_disk_has(toys: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was synced and renamed last before each checkpoint: rows and LoRA, state, seal, name."""
    events, fsync, replace = list[str](), os.fsync, os.replace

    def synced(number: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{number}"))
        events.append(path.name.partition(".json.")[0].removeprefix(".").partition(" ")[0])
        fsync(number)

    def renamed(source: Any, target: Any) -> None:
        events.append(f"name {Path(target).name}")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", renamed)
    config = write_toy(tmp_path)
    assert main(["train", str(config), f"out={tmp_path / 'run'}"]) == 0
    wanted = ["pytorch_lora_weights.safetensors", "lora", "metrics.jsonl", "state.pt", "checkpoint",
              "name checkpoint.json", "000001", "name 000001", "checkpoints"]  # fmt: skip
    places = [events.index(wanted[0])]
    for name in wanted[1:]:
        places.append(events.index(name, places[-1] + 1))
    assert places == sorted(places)


# ---- damage ----------------------------------------------------------------------------------------------------------


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def _empty(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()


def _seal(key: str, value: Any) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        path = folder / "checkpoint.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))

    return change


NEWEST: dict[str, tuple[Callable[[Path], object], str]] = {
    "state flipped": (lambda folder: _flip(folder / "state.pt"), "its checksum does not fit"),
    "state gone": (lambda folder: (folder / "state.pt").unlink(), "it has no state.pt"),
    "seal empty": (lambda folder: (folder / "checkpoint.json").write_text(""), "its checkpoint.json is empty or"),
    "seal zeroed": (lambda folder: (folder / "checkpoint.json").write_bytes(bytes(300)), "is empty or damaged"),
    "seal gone": (lambda folder: (folder / "checkpoint.json").unlink(), "it has no checkpoint.json"),
    "seal nested": (lambda folder: (folder / "checkpoint.json").write_text("[" * 9999), "is empty or damaged"),
    "folder empty": (_empty, "it has no checkpoint.json"),
    "rows half": (_seal("metrics_bytes", 300), "does not fit its own checksum"),
    "rows negative": (_seal("metrics_bytes", -5), "does not fit its own checksum"),
    "rows in part": (_seal("metrics_bytes", 12.7), "does not fit its own checksum"),
    "other number": (_seal("iteration", 2), "does not fit its own checksum"),
    "a key renamed": (_seal("seal_sha256", None), "does not fit its own checksum"),
}


@pytest.mark.parametrize("name", NEWEST)
def test_the_checkpoint_before_a_damaged_one_is_taken_and_said(
    run: Path, whole: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    change, words = NEWEST[name]
    change(run / "checkpoints" / "000003")
    before = files(run / "checkpoints" / "000003")
    if name != "state flipped":  # weights are not read for that
        with pytest.raises(ValueError, match=r"000003 cannot be read .*takes the newest that is whole"):
            check_newest(run)
    capsys.readouterr()
    assert resume(run) == 0
    said = [line for line in capsys.readouterr().out.splitlines() if "cannot be used" in line]
    assert len(said) == 1
    assert words in said[0]
    assert "the run goes on from checkpoint 000002" in said[0]
    assert f"is kept in {run / 'damaged-1'}" in said[0]
    assert files(run / "damaged-1" / "checkpoints" / "000003") == before
    same(run, whole)
    assert resume(run, "num_iterations=4") == 0  # nothing of it is in the way any more
    assert "damaged" in json.loads((run / "manifest.json").read_text())["resumed"][0]


@pytest.mark.parametrize("seals", ["seals", "older seals"])
def test_where_no_checkpoint_is_left_it_begins_again_and_nothing_is_lost(
    run: Path, whole: Path, seals: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if seals == "older seals":
        as_older(run)
    for folder in checkpoints(run):
        (folder / "checkpoint.json").write_text("")
    before = files(run)
    capsys.readouterr()
    assert resume(run) == 0
    (said,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("Note: Checkpoint")]
    assert "no other is left: the run begins at iteration 0" in said
    same(run, whole)
    kept = files(run / "damaged-1")
    assert {name for name in before if name not in kept} == {"config.yaml", "manifest.json"}
    assert all(kept[name] == before[name] for name in kept)


def test_checkpoints_that_were_removed_are_said(run: Path, whole: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(run / "checkpoints")
    rows = (run / "metrics.jsonl").read_bytes()
    assert resume(run) == 0
    assert "There are trained weights and no checkpoint: the run begins at iteration 0" in capsys.readouterr().out
    assert (run / "damaged-1" / "metrics.jsonl").read_bytes() == rows
    same(run, whole)


def _in_line(run: Path, number: int) -> None:
    """Flips a bit of a row that is JSON all the same: a digit of its seconds."""
    lines = (run / "metrics.jsonl").read_bytes().split(b"\n")
    at = lines[number].index(b'"seconds": ') + len(b'"seconds": ')
    lines[number] = (
        lines[number][:at] + (b"8" if lines[number][at : at + 1] != b"8" else b"9") + lines[number][at + 1 :]
    )
    (run / "metrics.jsonl").write_bytes(b"\n".join(lines))


ROWS: dict[str, tuple[Callable[[Path], object], str]] = {
    "a digit": (lambda run: _in_line(run, 0), "does not match its checksum: a row has changed"),
    "a bit": (lambda run: _flip_first(run / "metrics.jsonl"), "line 1 of metrics.jsonl cannot be read"),
    "not UTF-8": (lambda run: _put(run / "metrics.jsonl", b"\xff"), "line 1 of metrics.jsonl cannot be read"),
    "zeroed": (lambda run: _zero(run / "metrics.jsonl"), "line 1 of metrics.jsonl cannot be read"),
    "emptied": (lambda run: (run / "metrics.jsonl").write_text(""), "metrics.jsonl has 0 bytes, and "),
    "cut": (lambda run: os.truncate(run / "metrics.jsonl", 100), "metrics.jsonl has 100 bytes, and "),
    "gone": (lambda run: (run / "metrics.jsonl").unlink(), "metrics.jsonl is not there"),
}


def _flip_first(path: Path) -> None:
    _put(path, bytes([path.read_bytes()[0] ^ 1]))


def _put(path: Path, data: bytes) -> None:
    path.write_bytes(data + path.read_bytes()[len(data) :])


def _zero(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


@pytest.mark.parametrize("name", ROWS)
def test_rows_that_no_checkpoint_can_do_without_are_refused_before_anything_changes(
    run: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    change, words = ROWS[name]
    change(run)
    before = files(run)
    capsys.readouterr()
    assert resume(run) == 1
    said = capsys.readouterr().err
    assert len(said.strip().splitlines()) == 1
    assert words in said
    assert "edited" not in said
    assert f"flowrl train resume={run} resume_changed=true" in said
    assert files(run) == before


def test_the_way_on_without_damaged_rows_keeps_the_others(
    run: Path, whole: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _put(run / "metrics.jsonl", b"\xff")
    broken = (run / "metrics.jsonl").read_bytes()
    assert resume(run, "resume_changed=true") == 0
    assert "Rows are lost (line 1 of metrics.jsonl cannot be read): the run goes on from checkpoint 000003" in (
        capsys.readouterr().out
    )
    assert metrics(run) == metrics(whole)[1:]
    assert (run / "damaged-1" / "metrics.jsonl").read_bytes() == broken
    assert lora(run) == lora(whole)
    assert resume(run, "num_iterations=4") == 0


@pytest.mark.parametrize("seals", ["seals", "older seals"])
def test_damage_in_a_later_row_costs_the_iterations_after_it(
    run: Path, whole: Path, seals: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if seals == "older seals":
        as_older(run)
    data = (run / "metrics.jsonl").read_bytes()
    (run / "metrics.jsonl").write_bytes(data[:-30] + bytes(30))
    capsys.readouterr()
    assert resume(run) == 0
    said = capsys.readouterr().out
    assert "Checkpoint 000003 cannot be used (line 3 of metrics.jsonl cannot be read): the run goes on from" in said
    same(run, whole)


def test_a_damaged_end_that_no_checkpoint_counts_is_cut_and_said(
    run: Path, whole: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with (run / "metrics.jsonl").open("ab") as file:
        file.write(b'{"iteration": 3, "rew\xff' + bytes(4096))
    assert resume(run) == 0
    assert "cannot be read and is cut off: the run goes on from checkpoint 000003" in capsys.readouterr().out
    same(run, whole)


@pytest.mark.parametrize("number", [300, -5, 12.7, None, "9", True])
def test_numbers_of_an_older_seal_are_looked_at(run: Path, whole: Path, number: Any) -> None:
    as_older(run)
    _seal("metrics_bytes", number)(run / "checkpoints" / "000003")
    assert resume(run) == 0
    assert (run / "damaged-1" / "checkpoints" / "000003").is_dir()
    same(run, whole)


def test_a_run_of_an_older_version_goes_on(run: Path, whole: Path, capsys: pytest.CaptureFixture[str]) -> None:
    as_older(run)
    assert resume(run) == 0
    assert "Note: Checkpoint" not in capsys.readouterr().out
    same(run, whole)


@pytest.mark.parametrize("how", ["removed", "cut", "replaced", "a folder"])
def test_rows_that_are_taken_away_while_a_run_works_are_put_back(
    how: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, rows = tmp_path / "metrics.jsonl", MetricRows(tmp_path)
    for number in range(20):
        rows.append({"iteration": number})
    if how != "cut":
        path.unlink()
    if how == "cut":
        os.truncate(path, 100)
    elif how == "replaced":
        path.symlink_to(tmp_path / "elsewhere")
    elif how == "a folder":
        path.mkdir()
    rows.append({"iteration": 20})
    assert [row["iteration"] for row in metrics(tmp_path)] == list(range(21))
    assert f"{path} was " in (said := capsys.readouterr().err)
    assert "all rows were put back" in said
    assert not (tmp_path / "elsewhere").exists()
    path.unlink()
    assert rows.seal().size == path.stat().st_size
    assert len(metrics(tmp_path)) == 21


# ---- the first moment ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("left", ["lock", "half a file", "an empty configuration", "all of its first files"])
def test_a_run_that_ended_in_its_first_moment_starts_again_with_its_command(
    toys: Path, whole: Path, tmp_path: Path, left: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config, out = write_toy(tmp_path), tmp_path / "run"
    command = ["train", str(config), f"out={out}"]
    if left == "all of its first files":
        assert main(command) == 0
        for path in out.iterdir():
            if path.name not in ("config.yaml", "manifest.json", LOCK):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
    else:
        out.mkdir()
        (out / LOCK).write_text('{"pid": 1')
        if left != "lock":
            (out / ".config.yaml.0123456789abcdef.tmp").write_text("num_it")
        if left == "an empty configuration":
            (out / "config.yaml").write_bytes(bytes(100))
        capsys.readouterr()
        assert main(["train", f"resume={out}"]) == 1
        assert f"start it again with the same command and out={out}" in capsys.readouterr().err
    assert main([*command, "num_iterations=9"]) == 1 or left != "all of its first files"  # another run than that
    if left == "all of its first files":
        assert main(command) == 0
    assert (out / "summary.json").is_file()
    assert not [*out.glob(".*.tmp")]


def test_resume_says_what_is_missing(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "config.yaml").write_text("")
    assert resume(run) == 1
    assert (
        "config.yaml is empty): put its config.yaml back; manifest.json lists every setting" in capsys.readouterr().err
    )
    assert resume(tmp_path / "absent") == 1
    assert "no folder is there" in capsys.readouterr().err
    assert resume(run / "manifest.json") == 1  # the run has an empty config.yaml
    assert "is not a run folder (a file is there): did you mean" in capsys.readouterr().err
    assert main(["train", str(run)]) == 1
    assert f"or resume={run} to continue that run?" in capsys.readouterr().err


# ---- nothing outside -------------------------------------------------------------------------------------------------


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """A folder of somebody else."""
    folder = tmp_path / "outside"
    (folder / "lora").mkdir(parents=True)
    for name in ("file", "lora/pytorch_lora_weights.safetensors"):
        (folder / name).write_text("precious")
    return folder


@pytest.mark.parametrize("name", [LOCK, "config.yaml", "error.log", "metrics.jsonl", "tensorboard"])
def test_a_new_run_writes_through_no_link(
    toys: Path, tmp_path: Path, outside: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    out.mkdir()
    (out / name).symlink_to(outside / ("lora" if name == "tensorboard" else "file"))
    before = files(outside)
    assert is_taken(out)
    assert main(["train", str(write_toy(tmp_path)), f"out={out}"]) == 1
    said = capsys.readouterr().err
    assert len(said.strip().splitlines()) == 1
    assert "is a link" in said or "is not empty" in said
    assert files(outside) == before


LINKS = (LOCK, "error.log", "metrics.jsonl", "report.html", "lora", "checkpoints", "samples", "config.yaml",
         "manifest.json", "lora/pytorch_lora_weights.safetensors", "checkpoints/000003/state.pt", "summary.json",
         "samples/iteration_000000/0000.png", ".lora.good")  # fmt: skip


@pytest.mark.parametrize("name", LINKS)
def test_a_link_out_of_a_run_folder_is_refused(
    run: Path, outside: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = run / name
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    (run / "inner").symlink_to(outside / ("lora" if name in ("lora", "checkpoints", "samples") else "file"))
    path.symlink_to(os.path.relpath(run / "inner", path.parent))  # a link to a link
    before, was = files(outside), files(run)
    for command in (["train", f"resume={run}"], ["report", str(run)], ["push", str(run), "--dry-run"]):
        assert main(command) == 1
        assert "is a link out of the run folder" in capsys.readouterr().err
    assert files(outside) == before
    assert files(run) == was


@pytest.mark.parametrize("name", [LOCK, "metrics.jsonl", "error.log", "samples"])
def test_a_pipe_in_a_run_folder_is_refused(
    run: Path, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(run / name) if (run / name).is_dir() else (run / name).unlink(missing_ok=True)
    os.mkfifo(run / name)
    for command in (["train", f"resume={run}"], ["report", str(run)]):
        assert main(command) == 1
        assert f"{name} is a pipe or a device" in capsys.readouterr().err
    assert at_work(run) is None
    new = tmp_path / "new"
    new.mkdir()
    os.mkfifo(new / LOCK)
    with pytest.raises(ValueError, match=r"\.lock is a pipe or a device, and flowrl writes nothing through it"):
        refuse_taken(new)


def test_a_lock_that_is_somebodys_file_is_left_alone(tmp_path: Path, outside: Path) -> None:
    """A second name of a file cannot be told from the first."""
    os.link(outside / "file", tmp_path / LOCK)
    with pytest.raises(ValueError, match="is not a lock of flowrl"), locked(tmp_path, "another run"):
        pass
    assert (outside / "file").read_text() == "precious"


def test_links_that_stay_inside_and_a_run_folder_that_is_a_link_are_taken(
    run: Path, whole: Path, tmp_path: Path
) -> None:
    (run / "lora").rename(run / "weights")
    (run / "lora").symlink_to("weights")
    (run / "rows").symlink_to("metrics.jsonl")
    (tmp_path / "link").symlink_to(run)
    assert leads_out(tmp_path / "link") == ""
    assert resume(tmp_path / "link") == 0
    same(run, whole)
    assert (run / "lora").is_symlink()
    assert main(["report", str(tmp_path / "link")]) == 0


def test_an_error_log_that_became_a_link_is_replaced(
    toys: Path, run: Path, outside: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """After the look at the folder: a run's own reward makes it, and then raises."""
    reward = run.parent / "linking.py"
    reward.write_text(
        f"import os\n\ndef reward(images, prompts, metadata):\n"
        f"    os.symlink({str(outside / 'file')!r}, {str(run / 'error.log')!r})\n    raise KeyError('x')\n"
    )
    settings = ("num_iterations=4", "resume_changed=true", "max_invalid_ratio=0")
    assert resume(run, *settings, f"rewards=[{{file: {reward}, function: reward}}]") == 1
    assert (outside / "file").read_text() == "precious"
