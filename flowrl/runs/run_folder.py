"""Checks where a run may be written: to a free or empty folder, or to one in which nothing was trained yet, and without
links to elsewhere. Nothing heavy is imported here."""

from __future__ import annotations

import json
import os
import shlex
from pathlib import Path

from flowrl.runtime.files import LOCK, contents, is_taken, leads_out, locked, make_folder, sync
from flowrl.training.trackers.tracker import FOLDERS

RUNS = Path("runs")
"""Folder of runs without a folder of their own."""
CONFIG, MANIFEST = "config.yaml", "manifest.json"
_FIRST = {CONFIG, MANIFEST, *FOLDERS}
"""What a run writes before it trains."""
_ENDS = {"resumed", "finished", "stopped", "failed"}
"""What the manifest of a run that has trained says."""
_LOOSE = (
    "model .model.good model.diverged .model.writing .model.aside .shipped.keeping .shipped.restoring wandb".split()
)
"""Folders of a run that may hold links to elsewhere: frozen parts of a model, and what W&B keeps."""


def make_free_folder(name: str, parent: Path = RUNS) -> Path:
    """Makes `runs/<name>-<n>` with the first free n; two runs that start at once get two folders."""
    make_folder(parent)
    number = 1
    while True:
        folder = parent / f"{name}-{number}"
        try:
            folder.mkdir()
        except FileExistsError:
            number += 1
        else:
            sync(parent)
            return folder


def refuse_links(folder: Path) -> None:
    """Refuses a run folder with a link out of it: writing there would change files elsewhere, and reading would show
    them. Links that stay inside are allowed, and so is a folder that is itself a link."""
    if found := leads_out(folder, loose=_LOOSE):
        raise ValueError(
            f"{folder}: {found}, and nothing is read or written through it: put the file itself there, or remove it. "
            "To keep a run on another disk, make the run folder itself the link"
        )


def refuse_taken(folder: Path, config: str = "") -> None:
    """Refuses a run folder that holds anything (it may be missing); says which process uses it, if any. `config` is the
    text that the run would write as `config.yaml`. Raises ValueError: with the ways on."""
    if is_taken(folder) and os.path.lexists(folder / LOCK) and not _only_begun(folder, config):
        with locked(folder, "another run"):
            pass
    refuse_full(folder, config)
    refuse_links(folder)


def refuse_full(folder: Path, config: str = "") -> None:
    """Refuses a run folder that holds anything, except what a run leaves if killed before it trained. Raises
    ValueError: with the two ways on."""
    if os.path.lexists(folder) and not folder.is_dir():
        what = "a file" if folder.exists() else "a link that leads nowhere"
        raise ValueError(f"out={folder} is {what}, and a run needs a folder: give another name")
    if is_taken(folder) and not _only_begun(folder, config):
        way = f"continue it with 'flowrl train resume={shlex.quote(str(folder))}', or "
        raise ValueError(
            f"the run folder {folder} is not empty, and nothing in it will be overwritten: "
            f"{way if (folder / CONFIG).is_file() else ''}choose another folder with out="
        )


def _only_begun(folder: Path, config: str) -> bool:
    """Whether a folder holds only what a run writes before it trains: one with this configuration, or any that was
    killed while it loaded."""
    if not folder.is_dir() or {path.name for path in contents(folder)} - _FIRST:
        return False
    if any((folder / name).is_dir() for name in (CONFIG, MANIFEST)):
        return False
    text, manifest = (_text(folder / name) for name in (CONFIG, MANIFEST))
    own = text in ("", config)
    if not manifest:
        return own  # else it is somebody's own file
    try:
        said = json.loads(manifest)
    except ValueError:
        return False
    return isinstance(said, dict) and "run" in said and (own or not _ENDS & said.keys())


def _text(path: Path) -> str:
    """The text of a file; "" if it is missing, or if a power cut has left zeros or nothing."""
    return path.read_bytes().strip(b"\0").decode("utf-8", "replace") if path.is_file() else ""


def refuse_no_run(folder: Path, hint: str = "") -> None:
    """Refuses to continue a folder that is not a run; `hint` says what to do if several nodes need the folder. Raises
    ValueError: with the way on."""
    refuse_links(folder)
    path = folder / CONFIG
    if path.is_file() and _text(path):
        return
    if around := [one for one in folder.parents if (one / MANIFEST).is_file()]:
        hint = f": did you mean {around[0]}?"
    if not folder.is_dir():
        raise ValueError(
            f"{folder} is not a run folder ({'a file' if folder.exists() else 'no folder'} is there){hint}"
        )
    inside = {entry.name for entry in contents(folder)}
    if not inside - _FIRST and (inside or (folder / LOCK).exists()):
        raise ValueError(
            f"{folder} holds nothing of a run yet, because it ended in its first moment: start it again with the "
            f"same command and out={folder}"
        )
    what = f"{CONFIG} is empty" if path.exists() else f"no {CONFIG}"
    if "checkpoints" in inside:
        raise ValueError(
            f"{folder} is not a whole run folder ({what}): put its {CONFIG} back; {MANIFEST} lists every setting under "
            "inputs"
        )
    raise ValueError(f"{folder} is not a run folder ({what}){hint}")
