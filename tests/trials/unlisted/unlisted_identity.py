"""Rows, files, folders and answers that differ in one thing, or only by name: what is told apart, and what is not."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from PIL import Image
from unlisted_case import Case, Outcome, Silent, command, same

from flowrl.generation.image_folder import read_items
from flowrl.generation.models import fingerprint
from flowrl.prompts.identity import asked_for, distinct, drawn_by, identity
from flowrl.prompts.loading import eval_items, read_prompts
from flowrl.prompts.source_images import read_image
from flowrl.runtime.digests import content_digest
from flowrl.training.model_files import digests_of, named_files

COLOURS = {"red": (255, 0, 0), "green": (0, 255, 0), "blue": (0, 0, 255)}


def bmp(path: Path, colour: str) -> Path:
    """Of one size in bytes whatever its colour."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (8, 8), COLOURS[colour]).save(path, format="BMP")
    return path


def colours(folder: Path) -> None:
    for colour in COLOURS:
        bmp(folder / f"{colour}.bmp", colour)


# ---- rows ------------------------------------------------------------------------------------------------------------

BASE: dict[str, Any] = {
    "prompt": "make it darker",
    "source": ["red.bmp", "green.bmp"],
    "reference": ["red.bmp", "green.bmp"],
}
ROWS: dict[str, dict[str, Any]] = {
    "a key": {"key": 7},
    "a target": {"target": "OPEN"},
    "a target in another case": {"target": "open"},
    "boxes": {"boxes": [[0, 0, 1, 1]]},
    "a box by a hair": {"boxes": [[0, 0, 1, 1.0000001]]},
    "a seed": {"seed": 1},
    "true and 1": {"flag": 1},
    "a negative prompt": {"negative_prompt": "blur"},
    "a negative prompt of nothing": {"negative_prompt": ""},
    "one reference of two": {"reference": ["red.bmp", "blue.bmp"]},
    "the order of references": {"reference": ["green.bmp", "red.bmp"]},
    "one source of two": {"source": ["red.bmp", "blue.bmp"]},
    "the order of sources": {"source": ["green.bmp", "red.bmp"]},
    "fewer sources": {"source": ["red.bmp"]},
    "a source twice": {"source": ["red.bmp", "red.bmp", "green.bmp"]},
    "a space in the prompt": {"prompt": "make it  darker"},
    "another form of a letter": {"prompt": "make it da\u0072\u0301ker"},
    "the order of questions": {"questions": ["b", "a"]},
    "a nested value": {"meta": {"a": {"b": 2}}},
    "a clip": {"source_video": "b.mp4"},
    "a mask": {"source_video": "a.mp4", "mask_video": "b.mp4"},
}
OTHER: dict[str, dict[str, Any]] = {
    "true and 1": {"flag": True},
    "a target in another case": {"target": "OPEN"},
    "boxes": {"boxes": []},
    "a box by a hair": {"boxes": [[0, 0, 1, 1]]},
    "the order of questions": {"questions": ["a", "b"]},
    "a nested value": {"meta": {"a": {"b": 1}}},
    "a clip": {"source_video": "a.mp4"},
    "a mask": {"source_video": "a.mp4", "mask_video": "a.mp4"},
}
DRAWN_ALIKE = (
    "a key",
    "a target",
    "a target in another case",
    "boxes",
    "a box by a hair",
    "a seed",
    "true and 1",
    "one reference of two",
    "the order of references",
    "the order of questions",
    "a nested value",
)


def row_case(name: str, folder: Path) -> Outcome:
    """Two rows are two, their copies are none more; images are shared where nothing that draws them differs."""
    colours(folder)
    (folder / "a.mp4").write_bytes(b"a clip")
    (folder / "b.mp4").write_bytes(b"another")
    one, other = {**BASE, **OTHER.get(name, {})}, {**BASE, **ROWS[name]}
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in (one, other, one, other)))
    rows = read_prompts(folder / "rows.jsonl", "ugly")
    found = (len(distinct(rows)), [item.prompt_id for item in eval_items(rows)], drawn_by(rows[0]) == drawn_by(rows[1]))
    same(found, (2, [0, 1, 0, 1], name in DRAWN_ALIKE), "rows, numbers, drawn alike")
    again = shutil.copytree(folder, folder / "moved")
    moved = read_prompts(again / "rows.jsonl", "ugly")
    return same([identity(row) for row in moved], [identity(row) for row in rows], "identity in another folder")


# ---- files -----------------------------------------------------------------------------------------------------------


def old_times(path: Path, before: os.stat_result) -> None:
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def in_place(path: Path, folder: Path) -> None:
    before = path.stat()
    bmp(path, "blue")
    old_times(path, before)


def moved_over(path: Path, folder: Path) -> None:
    before = path.stat()
    old_times(bmp(folder / "new.bmp", "blue"), before)
    os.replace(folder / "new.bmp", path)


def by_hard_link(path: Path, folder: Path) -> None:
    before = path.stat()
    os.link(path, folder / "other name.bmp")
    with (folder / "other name.bmp").open("r+b") as file:
        file.write(bmp(folder / "new.bmp", "blue").read_bytes())
    old_times(path, before)


def by_link(path: Path, folder: Path) -> None:
    before = path.stat()
    path.unlink()
    old_times(bmp(folder / "new.bmp", "blue"), before)
    path.symlink_to("new.bmp")


def by_chain(path: Path, folder: Path) -> None:
    bmp(folder / "deep" / "new.bmp", "blue")
    path.unlink()
    (folder / "deep" / "link.bmp").symlink_to("new.bmp")
    path.symlink_to(folder / "deep" / "link.bmp")


def cut_and_grown(path: Path, folder: Path) -> None:
    before, data = path.stat(), bmp(folder / "new.bmp", "blue").read_bytes()
    os.truncate(path, 10)
    with path.open("r+b") as file:
        file.write(data)
    old_times(path, before)


def by_map(path: Path, folder: Path) -> None:
    pixels = np.memmap(path, dtype=np.uint8, mode="r+")
    pixels[:] = np.frombuffer(bmp(folder / "new.bmp", "blue").read_bytes(), dtype=np.uint8)
    pixels.flush()
    del pixels


REPLACED = {
    "in place": in_place,
    "moved over": moved_over,
    "by a hard link": by_hard_link,
    "by a link": by_link,
    "by a chain of links": by_chain,
    "cut and grown": cut_and_grown,
    "by a memory map": by_map,
}


def replaced_case(change: Callable[[Path, Path], None], through: bool, folder: Path) -> Outcome:
    """Content is what is there now, for the digest, for the row and for the pixels."""
    red, link = bmp(folder / "a.bmp", "red"), folder / "link.bmp"
    link.symlink_to("a.bmp")
    name = "link.bmp" if through else "a.bmp"
    (folder / "rows.jsonl").write_text(json.dumps({"prompt": "edit", "source": name}))
    (row,) = read_prompts(folder / "rows.jsonl")
    before = content_digest(folder / name), asked_for(row), read_image(folder / name)[2, 0, 0].item()
    change(red, folder)
    after = content_digest(folder / name), asked_for(row), read_image(folder / name)[2, 0, 0].item()
    same((before[2], after[2]), (0.0, 1.0), "blue before and after")
    return same([one == other for one, other in zip(before, after, strict=True)], [False] * 3, "unchanged")


def in_one_tick(folder: Path) -> Outcome:
    """A file that is written and read again and again gives what was written last."""
    path = folder / "a.bmp"
    data = {name: bmp(folder / f"{name}.bmp", name).read_bytes() for name in COLOURS}
    wrong = 0
    for turn in range(300):
        name = list(COLOURS)[turn % 3]
        with path.open("r+b" if path.exists() else "wb") as file:
            file.write(data[name])
        wrong += int(tuple((read_image(path)[:, 0, 0] * 255).int().tolist()) != COLOURS[name])
        wrong += int(content_digest(path) != content_digest(folder / f"{name}.bmp"))
    return same(wrong, 0, "reads of what was there before")


def by_another_name(folder: Path) -> Outcome:
    """A copy and a touched file are the same image; the same pixels in another file are another content."""
    colours(folder)
    shutil.copy(folder / "red.bmp", folder / "copy.bmp")
    Image.open(folder / "red.bmp").save(folder / "red.png")
    rows = []
    for name in ("red.bmp", "copy.bmp", "red.png"):
        (folder / f"{name}.jsonl").write_text(json.dumps({"prompt": "edit", "source": name}))
        rows += read_prompts(folder / f"{name}.jsonl")
    before = asked_for(rows[0])
    os.utime(folder / "red.bmp")
    found = (asked_for(rows[0]) == before, asked_for(rows[1]) == before, asked_for(rows[2]) == before)
    return same(found, (True, True, False), "the same")


# ---- folders ---------------------------------------------------------------------------------------------------------


def model(folder: Path) -> Path:
    """A folder of a model with two experts, one part of it elsewhere and links that go in a circle."""
    place, shared = folder / "model", folder / "shared"
    for part in ("transformer", "transformer_2", "vae"):
        (place / part).mkdir(parents=True)
        (place / part / "config.json").write_text("{}")
        (place / part / "model.safetensors").write_bytes(bytes(5 * 2**20))
    (shared / "deep").mkdir(parents=True)
    (shared / "deep" / "encoder.safetensors").write_bytes(b"weights")
    (place / "text_encoder").symlink_to(shared)
    (place / "vae" / "again").symlink_to(place)
    (shared / "up").symlink_to(".")
    (place / "model_index.json").write_text("{}")
    return place


def middle_byte(path: Path) -> None:
    before = path.stat()
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        file.write(b"\1")
    old_times(path, before)


CHANGES: dict[str, tuple[Callable[[Path], object], bool]] = {
    "a byte amid the first expert": (lambda place: middle_byte(place / "transformer" / "model.safetensors"), True),
    "a byte amid the second expert": (lambda place: middle_byte(place / "transformer_2" / "model.safetensors"), True),
    "a byte in a part through links": (
        lambda place: middle_byte(place.parent / "shared" / "deep" / "encoder.safetensors"),
        True,
    ),
    "a file in a part through links": (
        lambda place: (place.parent / "shared" / "deep" / "more.bin").write_bytes(b"1"),
        True,
    ),
    "a configuration": (lambda place: (place / "vae" / "config.json").write_text("{ }"), True),
    "names of experts exchanged": (lambda place: exchange(place), False),
    "a file renamed": (
        lambda place: (place / "vae" / "model.safetensors").rename(place / "vae" / "other.safetensors"),
        True,
    ),
    "an empty file": (lambda place: (place / "vae" / "empty.json").write_text(""), True),
    "a readme": (lambda place: (place / "README.md").write_text("mine"), False),
    "a time of change": (lambda place: os.utime(place / "vae" / "model.safetensors"), False),
    "a part moved and linked": (lambda place: away(place), False),
}


def exchange(place: Path) -> None:
    for one, other in (("transformer", "x"), ("transformer_2", "transformer"), ("x", "transformer_2")):
        (place / one).rename(place / other)


def away(place: Path) -> None:
    shutil.move(place / "vae", place.parent / "vae of all")
    (place / "vae").symlink_to(place.parent / "vae of all")


def folder_case(name: str, folder: Path) -> Outcome:
    change, tells = CHANGES[name]
    place = model(folder)

    def known() -> tuple[Any, ...]:
        source: Any = SimpleNamespace(model=str(place), variant=None, lora=None)
        return fingerprint(source), named_files({"weights": str(place)}), digests_of(place)

    before = known()
    same(known(), before, "again")
    change(place)
    after = known()
    return same([one != other for one, other in zip(before, after, strict=True)], [tells] * 3, "told apart")


# ---- answers ---------------------------------------------------------------------------------------------------------

REWARD = """
import sys
from pathlib import Path
sys.path.insert(0, str(Path(__file__).parent))
import helper{number}

def level(images, prompts, metadata, *, factor: float = 1.0, weights: str = ""):
    with open({asked!r}, "a") as file:
        file.write("x" * len(prompts))
    return [factor * helper{number}.of(image) for image in images]
"""
_made = iter(range(10**6))


def judged(folder: Path, *more: str) -> tuple[int, list[float]]:
    """How many images the reward was asked about, and what the command says of them all."""
    asked = folder / "asked"
    asked.write_text("")
    code, said = command(
        "eval",
        "--images",
        "images",
        "--benchmark",
        "panel",
        "--prompts",
        "rows.jsonl",
        "--option",
        "rewards=rewards.yaml",
        "--out",
        "out",
        *more,
    )
    if code != 0:
        raise Silent(said[-400:])
    (file,) = (folder / "out").rglob("rows.jsonl")
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    return len(asked.read_text()), [row["values"]["level"] for row in rows]


def answers(folder: Path) -> None:
    number = next(_made)
    colours(folder)
    for k, colour in enumerate(("red", "green", "blue")):
        (folder / "images").mkdir(exist_ok=True)
        Image.new("RGB", (8, 8), COLOURS[colour]).save(folder / "images" / f"{k}.png")
    rows = [
        {"file": f"{k}.png", "prompt": f"prompt {k}", "text": "A", "source": "red.bmp", "reference": "green.bmp"}
        for k in range(3)
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / f"helper{number}.py").write_text("def of(image):\n    return float(image[0].mean())\n")
    (folder / "level.py").write_text(REWARD.format(number=number, asked=str(folder / "asked")))
    (folder / "weights.bin").write_bytes(bytes(3 * 2**20))
    (folder / "rewards.yaml").write_text(
        "rewards: [{file: level.py, function: level, options: {weights: weights.bin}}]"
    )


def edit(name: str, old: str, new: str) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        (path,) = folder.glob(name)
        path.write_text(path.read_text().replace(old, new, 1))

    return change


def painted(folder: Path) -> None:
    path = folder / "images" / "1.png"
    before = path.stat()
    Image.new("RGB", (8, 8), COLOURS["red"]).save(path)
    old_times(path, before)


def renamed(folder: Path) -> None:
    (folder / "images" / "0.png").rename(folder / "images" / "z.png")
    edit("rows.jsonl", '"0.png"', '"z.png"')(folder)


def turned(folder: Path) -> None:
    path = folder / "rows.jsonl"
    path.write_text("\n".join(reversed(path.read_text().split("\n")[:3])))


ANSWERS: dict[str, tuple[Callable[[Path], object], int, tuple[str, ...]]] = {
    "nothing": (lambda folder: None, 0, ()),
    "an option": (edit("rewards.yaml", "weights.bin", "weights.bin, factor: 2"), 3, ()),
    "the user's file": (edit("level.py", "factor *", "2 * factor *"), 3, ()),
    "a module beside the user's file": (edit("helper*.py", "mean()", "mean() * 2"), 3, ()),
    "weights that an option names": (lambda folder: middle_byte(folder / "weights.bin"), 3, ()),
    "an image under its old time": (painted, 1, ()),
    "an image's name": (renamed, 1, ()),
    "a prompt": (edit("rows.jsonl", "prompt 1", "prompt one"), 1, ()),
    "a field of a record": (edit("rows.jsonl", '"A"', '"B"'), 1, ()),
    "the content of a source": (lambda folder: in_place(folder / "red.bmp", folder), 3, ()),
    "the content of a reference": (lambda folder: in_place(folder / "green.bmp", folder), 3, ()),
    "the order of rows": (turned, 0, ()),
}


def answer_case(name: str, folder: Path) -> Outcome:
    """Kept answers are those that a fresh command gives."""
    change, expected, more = ANSWERS[name]
    answers(folder)
    first, _ = judged(folder)
    same(first, 3, "asked at first")
    change(folder)
    found, kept = judged(folder, *more)
    shutil.rmtree(folder / "out")
    _, fresh = judged(folder, *more)
    same(kept, fresh, "values kept and fresh")
    return same(found, expected, "asked again")


def groups(folder: Path) -> Outcome:
    """Images of one text about different images are different groups, and about copies of one image the same."""
    colours(folder)
    shutil.copy(folder / "red.bmp", folder / "copy.bmp")
    (folder / "images").mkdir()
    rows = []
    for k, source in enumerate(("red", "blue", "copy", "red")):
        Image.new("RGB", (4, 4)).save(folder / "images" / f"{k}.png")
        rows.append({"file": f"{k}.png", "prompt": "edit", "source": f"{source}.bmp"})
    (folder / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    items = read_items(folder / "images", prompts=folder / "rows.jsonl")
    return same([(item.index, item.sample) for item in items], [(0, 0), (1, 0), (0, 1), (0, 2)], "groups")


def cases() -> list[Case]:
    return [
        *(Case(f"rows: {name}", partial(row_case, name)) for name in ROWS),
        *(
            Case(
                f"files: replaced {name}{' and read through a link' * through}", partial(replaced_case, change, through)
            )
            for name, change in REPLACED.items()
            for through in (False, True)
        ),
        Case("files: written within a tick of the clock", in_one_tick),
        Case("files: copies, touched files, other encodings", by_another_name),
        *(Case(f"folders: {name}", partial(folder_case, name)) for name in CHANGES),
        *(Case(f"answers: {name}", partial(answer_case, name)) for name in ANSWERS),
        Case("answers: groups of edits", groups),
    ]
