"""Cases: run folders that other programs, disks and people have changed, and links in them."""

from __future__ import annotations

import atexit
import functools
import gzip
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tiny_runs import lora, metrics
from toy_pipeline import write_toy
from unlisted_case import Case, Outcome, Silent, command, refused

from flowrl.pipelines import PIPELINES

Damage = Callable[[Path], object]
_SEAL, _STATE, _ROWS = "checkpoints/000003/checkpoint.json", "checkpoints/000003/state.pt", "metrics.jsonl"
_LATER = "num_iterations=5"


@contextmanager
def toy() -> Iterator[None]:
    """The toy in the place of a model family."""
    before = PIPELINES["sd3"]
    PIPELINES["sd3"] = "toy_pipeline"
    try:
        yield
    finally:
        PIPELINES["sd3"] = before


def train(*words: str) -> tuple[int, str]:
    """`flowrl train` of the toy."""
    with toy():
        return command("train", *words)


@functools.cache
def runs() -> Path:
    """A folder with `run`, stopped after three iterations; `whole`, which went on to five undisturbed; `other`, of
    another seed; all of one configuration."""
    place = Path(tempfile.mkdtemp(prefix="unlisted-runs-"))
    atexit.register(shutil.rmtree, place, ignore_errors=True)
    write_toy(place, num_iterations=3)
    for name, words in {"run": (), "other": ("seed=5",)}.items():
        code, said = train(str(place / "toy.yaml"), f"out={place / name}", *words)
        assert code == 0, said
    shutil.copytree(place / "run", place / "whole")
    code, said = train(f"resume={place / 'whole'}", _LATER)
    assert code == 0, said
    return place


def files(folder: Path) -> dict[str, bytes]:
    """Every file with its bytes, but for the lock."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*")) if path.is_file() and path.name != ".lock"
    }  # fmt: skip


def judged(run: Path, code: int, said: str, before: dict[str, bytes], *words: str) -> Outcome:
    """A run that went on has the numbers of the undisturbed one; one that was refused is as it was."""
    if code:
        if files(run) != before:
            raise Silent(f"refused, and files changed: {said[-200:]}")
        return refused(code, said, *words)
    whole = runs() / "whole"
    if metrics(run) != metrics(whole) or lora(run) != lora(whole):
        raise Silent(f"trained on to other numbers: {said[-300:]}")
    kept = {data for name, data in files(run).items() if "damaged" in name} | set(files(run).values())
    lost = [name for name, data in before.items() if name.startswith("checkpoints/") and data not in kept]
    if lost:
        raise Silent(f"{lost} are gone: {said[-300:]}")
    return "right", " ".join(line for line in said.splitlines() if line.startswith("Note: "))[-200:]


def damaged(name: str, damage: Damage, *words: str) -> Case:
    """A run that was damaged, then continued."""

    def run(folder: Path) -> Outcome:
        place = shutil.copytree(runs() / "run", folder / "run", symlinks=True)
        damage(place)
        before = files(place)
        code, said = train(f"resume={place}", _LATER)
        return judged(place, code, said, before, *words)

    return Case(f"folders: {name}", run)


def edit(name: str, change: Callable[[bytes], bytes]) -> Damage:
    """Writes a file with other bytes."""
    return lambda run: (run / name).write_bytes(change((run / name).read_bytes()))


def as_folder(name: str) -> Damage:
    """A folder where a file was."""

    def change(run: Path) -> None:
        (run / name).unlink()
        (run / name).mkdir()

    return change


def gzipped(name: str) -> Damage:
    """`gzip FILE`, as people do to make room."""

    def change(run: Path) -> None:
        (run / f"{name}.gz").write_bytes(gzip.compress((run / name).read_bytes()))
        (run / name).unlink()

    return change


def _swapped(data: bytes) -> bytes:
    rows = data.splitlines(keepends=True)
    return b"".join([rows[1], rows[0], *rows[2:]])


def _doubled(data: bytes) -> bytes:
    rows = data.splitlines(keepends=True)
    return b"".join([rows[0], rows[0], *rows[1:]])


def _digit(data: bytes) -> bytes:
    found = re.search(rb'"reward": 0\.\d\d\d\d', data)
    assert found is not None
    last = found.end() - 1
    return data[:last] + (b"1" if data[last : last + 1] != b"1" else b"2") + data[last + 1 :]


def _sorted(data: bytes) -> bytes:
    rows = [json.dumps(json.loads(line), sort_keys=True) for line in data.splitlines()]
    return ("\n".join(rows) + "\n").encode()


_EDITS: dict[str, Callable[[bytes], bytes]] = {
    "cut in its first row": lambda data: data[:20], "cut in its last row": lambda data: data[:-20],
    "cut behind a row": lambda data: b"".join(data.splitlines(keepends=True)[:1]),
    "without its last line's end": lambda data: data.rstrip(b"\n"),
    "with a blank line at the end": lambda data: data + b"\n",
    "with the line ends of Windows": lambda data: data.replace(b"\n", b"\r\n"),
    "with a byte order mark": lambda data: b"\xef\xbb\xbf" + data,
    "in UTF-16": lambda data: data.decode().encode("utf-16"),
    "with words of a merge": lambda data: b"<<<<<<< HEAD\n" + data + b"=======\n>>>>>>> main\n",
    "twice": lambda data: data + data, "with zeros at its end": lambda data: data + b"\0" * 512,
    "of zeros": lambda data: b"\0" * len(data), "with a letter behind": lambda data: data + b"x",
    "empty": lambda data: b"",
}  # fmt: skip
_ROW_EDITS: dict[str, Callable[[bytes], bytes]] = {
    "with two rows swapped": _swapped, "with a row doubled": _doubled, "with one digit changed": _digit,
    "with its keys sorted by jq": _sorted,
    "with a NaN": lambda data: data.replace(b'"loss": ', b'"loss": NaN, "l": ', 1),
    "with rows of a later run behind": lambda data: data + data.splitlines(keepends=True)[-1],
}  # fmt: skip


def _renamed(source: str, target: str) -> Damage:
    return lambda run: (run / source).rename(run / target)


def _copied(source: str, target: str) -> Damage:
    return lambda run: shutil.copytree(run / source, run / target)


def _foreign(name: str) -> Damage:
    """A checkpoint of a run with the same shapes in the place of the run's own."""

    def change(run: Path) -> None:
        shutil.rmtree(run / name)
        shutil.copytree(runs() / "other" / name, run / name)

    return change


def _foreign_state(run: Path) -> None:
    shutil.copy(runs() / "other" / _STATE, run / _STATE)


def _foreign_rows(run: Path) -> None:
    shutil.copy(runs() / "other" / _ROWS, run / _ROWS)


def _foreign_lora(run: Path) -> None:
    shutil.copytree(runs() / "other/lora", run / "lora", dirs_exist_ok=True)


def _partly(run: Path) -> None:
    """What rsync leaves that was ended: a file under a name of its own, and no seal."""
    data = (run / _STATE).read_bytes()
    (run / _STATE).unlink()
    (run / "checkpoints/000003/.state.pt.Xq1w2E").write_bytes(data[: len(data) // 2])


def _older_state(run: Path) -> None:
    shutil.copy(run / "checkpoints/000002/state.pt", run / _STATE)


def _later_clock(run: Path) -> None:
    for path in run.rglob("*"):
        os.utime(path, (4_000_000_000, 4_000_000_000))


def _small_letters(run: Path) -> None:
    (run / _ROWS).rename(run / "METRICS.JSONL")


def _seal_number(run: Path) -> None:
    seal = json.loads((run / _SEAL).read_text())
    (run / _SEAL).write_text(json.dumps(seal | {"metrics_bytes": seal["metrics_bytes"] - 40}))


def _two_numbers(run: Path) -> None:
    shutil.copytree(run / "checkpoints/000002", run / "checkpoints/3")


def _no_manifest(run: Path) -> None:
    (run / "manifest.json").unlink()


def _yaml(old: str, new: str) -> Damage:
    def change(run: Path) -> None:
        text = (run / "config.yaml").read_text()
        assert old in text, text
        (run / "config.yaml").write_text(text.replace(old, new, 1))

    return change


FOLDERS: dict[str, Damage] = {
    "the newest checkpoint renamed": _renamed("checkpoints/000003", "checkpoints/000003.bak"),
    "the newest checkpoint under a later number": _renamed("checkpoints/000003", "checkpoints/000004"),
    "the newest checkpoint copied by a file manager": _copied("checkpoints/000003", "checkpoints/000003 (copy)"),
    "the newest checkpoint copied under a later number": _copied("checkpoints/000003", "checkpoints/000009"),
    "an older checkpoint copied with another number of digits": _two_numbers,
    "a checkpoint of another run": _foreign("checkpoints/000003"),
    "all checkpoints of another run": _foreign("checkpoints"), "the state of another run": _foreign_state,
    "the state of an older checkpoint": _older_state, "rows of another run": _foreign_rows,
    "the LoRA of another run": _foreign_lora, "a checkpoint partly copied by rsync": _partly,
    "files of the far future": _later_clock, "rows under a name in capitals": _small_letters,
    "a seal with other bytes of rows": _seal_number, "no manifest": _no_manifest, "rows compressed": gzipped(_ROWS),
    "a state compressed": gzipped(_STATE), "a seal that is a folder": as_folder(_SEAL),
    "a state that is a folder": as_folder(_STATE), "rows that are a folder": as_folder(_ROWS),
    "a manifest that is a folder": as_folder("manifest.json"), "settings that are a folder": as_folder("config.yaml"),
    "another learning rate in the settings": _yaml("lr: 0.01", "lr: 0.1"),
    "another seed in the settings": _yaml("seed: 0", "seed: 1"),
    "an unknown setting": _yaml("seed: 0", "seed: 0\nsede: 1"),
    "no checkpoints folder": lambda run: shutil.rmtree(run / "checkpoints"),
    "no LoRA": lambda run: shutil.rmtree(run / "lora"),
    "junk of systems": lambda run: [
        (run / name / ".DS_Store").write_bytes(b"x") for name in ("", "checkpoints", "lora")
    ]
}  # fmt: skip


# ---- links -----------------------------------------------------------------------------------------------------------


def _outside(folder: Path) -> Path:
    place = folder / "outside"
    place.mkdir()
    (place / "file").write_bytes(b"theirs")
    (place / "deep").mkdir()
    (place / "deep" / "state.pt").write_bytes(b"theirs")
    return place


def _link(name: str, target: str, *, remove: bool = True) -> Damage:
    def change(run: Path) -> None:
        path = run / name
        if remove and os.path.lexists(path):
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to(target.format(outside=run.parent / "outside", run=run))

    return change


LINKS: dict[str, Damage] = {
    "an absolute one for the lock": _link(".lock", "{outside}/file"),
    "a relative one for the rows": _link(_ROWS, "../outside/file"),
    "one by way of the run itself": _link("error.log", "lora/../../outside/file"),
    "a dangling one": _link("error.log", "{outside}/nothing"),
    "a folder for the LoRA": _link("lora", "{outside}/deep"),
    "a folder for checkpoints": _link("checkpoints", "{outside}"),
    "one checkpoint": _link("checkpoints/000003", "../../outside/deep"),
    "a state": _link(_STATE, "../../../outside/file"),
    "a file of the next checkpoint": _link("checkpoints/000004", "{outside}/deep"),
    "half of a next checkpoint": _link("checkpoints/.000004", "{outside}/deep"),
    "an older one aside": _link("checkpoints/.000003.old", "{outside}/deep"),
    "what is staged": _link(".lora.writing", "{outside}/deep"), "samples": _link("samples", "{outside}"),
    "a sample": _link("samples/iteration_000000/0000.png", "/etc/hostname"),
    "a folder of samples": _link("samples/iteration_000000", "{outside}"), "evaluations": _link("eval", "{outside}"),
    "the report": _link("report.html", "{outside}/file"),
    "a chain that ends outside": lambda run: (
        _link("a", "b")(run),
        _link("b", "{outside}/file")(run),
        _link("error.log", "a")(run),
    ),
    "to the folder above": _link("lora", ".."),
    "a place that damaged things would move to": _link("damaged-1", "{outside}"),
    "tensorboard": _link("tensorboard", "{outside}"), "the summary": _link("summary.json", "{outside}/file"),
}  # fmt: skip


def linked(name: str, damage: Damage, word: str) -> Case:
    """A run with a link out of its folder, given to a command: what lies outside is not changed nor shown."""

    def run(folder: Path) -> Outcome:
        place, outside = shutil.copytree(runs() / "run", folder / "run"), _outside(folder)
        damage(place)
        theirs = files(outside)
        if word == "train":
            code, said = train(f"resume={place}", _LATER)
        elif word == "new":
            with_links = folder / "new"
            with_links.mkdir()
            damage(with_links)
            code, said = train(str(runs() / "toy.yaml"), f"out={with_links}")
        elif word == "push":
            code, said = command("push", str(place), str(folder / "share"))
        else:
            code, said = command("report", str(place), "--out", str(folder / "page.html"))
        if files(outside) != theirs:
            raise Silent(f"what lies outside changed: {[*files(outside)]}; {said[-200:]}")
        shown = [path for path in (folder / "page.html", *(folder / "share").rglob("*")) if path.is_file()]
        if any(b"theirs" in path.read_bytes() for path in shown):
            raise Silent("what lies outside is shown")
        return refused(code, said, "link|circle|not empty|nothing")

    return Case(f"folders: {word} with a link, {name}", run)


def hard_link(folder: Path) -> Outcome:
    """A hard link to a file elsewhere, which no name tells: the file is replaced or grows, never emptied."""
    place, outside = shutil.copytree(runs() / "run", folder / "run"), _outside(folder)
    (place / "error.log").unlink(missing_ok=True)
    os.link(outside / "file", place / ".lock2")
    (place / ".lock").unlink(missing_ok=True)
    os.link(outside / "file", place / ".lock")
    code, said = train(f"resume={place}", _LATER)
    if (outside / "file").read_bytes() != b"theirs":
        raise Silent(f"the file has changed: {(outside / 'file').read_bytes()[:80]!r}")
    return refused(code, said, "not a lock of flowrl")


def run_is_a_link(folder: Path) -> Outcome:
    """A run folder on another disk, reached by a link: it goes on, and numbers are those of the whole run."""
    place = shutil.copytree(runs() / "run", folder / "disk/run")
    (folder / "run").symlink_to(place)
    code, said = train(f"resume={folder / 'run'}", _LATER)
    return judged(place, code, said, {})


def inner_link(folder: Path) -> Outcome:
    """`checkpoints/latest`, as other trainers make it: a link that stays inside."""
    place = shutil.copytree(runs() / "run", folder / "run")
    (place / "checkpoints/latest").symlink_to("000003")
    (place / "last.jsonl").symlink_to(_ROWS)
    code, said = train(f"resume={place}", _LATER)
    return judged(place, code, said, {})


def loop(folder: Path) -> Outcome:
    """Links in a circle, which lead nowhere: the run goes on."""
    place = shutil.copytree(runs() / "run", folder / "run")
    (place / "error.log").symlink_to("b")
    (place / "b").symlink_to("error.log")
    code, said = train(f"resume={place}", _LATER)
    return judged(place, code, said, {})


def cases() -> Iterator[Case]:
    """Every case of this file."""
    for file in (_ROWS, _SEAL, "manifest.json", "config.yaml"):
        for name, change in _EDITS.items():
            yield damaged(f"{file} {name}", edit(file, change))
    for name, change in _ROW_EDITS.items():
        yield damaged(f"rows {name}", edit(_ROWS, change))
    for name, damage in FOLDERS.items():
        yield damaged(name, damage)
    for name, damage in LINKS.items():
        yield linked(name, damage, "train")
    for name in ("an absolute one for the lock", "a folder for the LoRA", "tensorboard", "the report", "samples"):
        yield linked(name, LINKS[name], "new")
    for name in ("a relative one for the rows", "samples", "a sample", "a folder for the LoRA", "the summary"):
        yield linked(name, LINKS[name], "report")
        yield linked(name, LINKS[name], "push")
    yield Case("folders: a hard link for the lock", hard_link)
    yield Case("folders: a run folder that is a link", run_is_a_link)
    yield Case("folders: links that stay inside", inner_link)
    yield Case("folders: links in a circle", loop)
