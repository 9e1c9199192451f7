"""Temporary folders: gone at the end, and after a kill at the next start; nobody else's folder goes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from flowrl.runtime.temporary import TemporaryFolder, claim, without_abandoned

KILLED = """
import os, signal
from flowrl.prompts.source_images import _folder
print(_folder().name, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


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
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    command = [sys.executable, "-c", KILLED]
    killed = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    assert killed.returncode == -signal.SIGKILL
    left = Path(killed.stdout.strip())
    assert left.parent == tmp_path
    assert left.is_dir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with TemporaryFolder("flowrl-other-") as other:
        assert left.is_dir()
        with TemporaryFolder("flowrl-images-") as first, TemporaryFolder("flowrl-images-") as second:
            assert names(tmp_path) == sorted(Path(folder).name for folder in (other, first, second))
    assert names(tmp_path) == []
