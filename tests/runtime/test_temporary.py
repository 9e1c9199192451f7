"""Temporary folders: gone at the end, and after a kill at the next start; nobody else's folder goes."""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
from pathlib import Path

import pytest

from flowrl.prompts import source_images
from flowrl.runtime.temporary import TemporaryFolder, claim, without_abandoned


def make_and_die(room: Path) -> None:
    """Makes the folder of source images, and is killed before it can remove it."""
    tempfile.tempdir = str(room)
    source_images._folder.cache_clear()
    source_images._folder()
    os.kill(os.getpid(), signal.SIGKILL)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_folders_that_killed_runs_left_behind_go_and_no_others(tmp_path: Path) -> None:
    held, left, foreign = (tmp_path / f"ray-{name}" for name in ("held", "left", "foreign"))
    for folder in (held, left, foreign):
        folder.mkdir()
    with claim(held):
        claim(left).close()  # as when its process has ended
        (tmp_path / "ray-link").symlink_to(left)
        assert without_abandoned(str(tmp_path), "ray-") == str(tmp_path)
        assert names(tmp_path) == ["ray-foreign", "ray-held", "ray-link"]


def test_a_folder_goes_at_its_end_or_after_a_kill_at_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed = multiprocessing.get_context("fork").Process(target=make_and_die, args=(tmp_path,))
    killed.start()
    killed.join(60)
    assert killed.exitcode == -signal.SIGKILL
    (left,) = tmp_path.glob("flowrl-images-*")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with TemporaryFolder("flowrl-other-") as other:
        assert left.is_dir()
        with TemporaryFolder("flowrl-images-") as first, TemporaryFolder("flowrl-images-") as second:
            assert names(tmp_path) == sorted(Path(folder).name for folder in (other, first, second))
    assert names(tmp_path) == []
