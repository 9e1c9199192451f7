"""Which folders a run may be written into or go on in, by what their files hold."""

from __future__ import annotations

from pathlib import Path

import pytest

from flowrl.runs.run_folder import CONFIG, MANIFEST, refuse_no_run, refuse_taken

OWN = "num_iterations: 1\n"
"""What a run would write as its configuration."""
EMPTY = {"nothing": b"", "zeros of a power cut": bytes(100)}


@pytest.mark.parametrize("what", EMPTY)
def test_a_configuration_that_a_power_cut_emptied_is_none(tmp_path: Path, what: str) -> None:
    """The run that began it begins again, and there is nothing to go on with."""
    (tmp_path / CONFIG).write_bytes(EMPTY[what])
    (tmp_path / MANIFEST).write_bytes(EMPTY[what])
    refuse_taken(tmp_path, OWN)
    with pytest.raises(ValueError, match="holds nothing of a run yet, because it ended in its first moment"):
        refuse_no_run(tmp_path)


def test_a_whole_configuration_is_one(tmp_path: Path) -> None:
    (tmp_path / CONFIG).write_text(OWN)
    refuse_no_run(tmp_path)
    refuse_taken(tmp_path, OWN)  # its own command, killed before it trained
    with pytest.raises(ValueError, match="is not empty"):
        refuse_taken(tmp_path, "num_iterations: 2\n")


def test_a_run_that_was_killed_while_it_loaded_leaves_its_name_free(tmp_path: Path) -> None:
    """Whatever the next run under the name is set to; a run that had trained keeps it, whatever is left of it."""
    (tmp_path / CONFIG).write_text(OWN)
    (tmp_path / MANIFEST).write_text('{"run": "ab12", "inputs": {}}')
    refuse_taken(tmp_path, "num_iterations: 2\n")
    for end in ("finished", "stopped", "failed", "resumed"):
        (tmp_path / MANIFEST).write_text(f'{{"run": "ab12", "{end}": "2026"}}')
        with pytest.raises(ValueError, match="is not empty"):
            refuse_taken(tmp_path, "num_iterations: 2\n")
    (tmp_path / MANIFEST).write_text('{"run": "ab12"}')
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    with pytest.raises(ValueError, match="is not empty"):
        refuse_taken(tmp_path, OWN)


def test_a_file_is_no_run_folder_and_stays(tmp_path: Path) -> None:
    place = tmp_path / "mine.txt"
    place.write_text("mine")
    with pytest.raises(ValueError, match="is a file, and a run needs a folder"):
        refuse_taken(place)
    (tmp_path / "link").symlink_to("nowhere")
    with pytest.raises(ValueError, match="link is a link that leads nowhere, and a run needs a folder"):
        refuse_taken(tmp_path / "link")
    assert place.read_text() == "mine"
