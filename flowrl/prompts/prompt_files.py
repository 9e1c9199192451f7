"""Prompts, and the files from which they are read.

    .txt     one prompt per line; a line that begins with # is one too
    .jsonl   one object with `prompt` per line; the whole object is its metadata
    .csv     a header with a column `prompt`; the whole row, as text, is its metadata. A first line `sep=;`, as
             spreadsheets write it, names what separates the columns; without one it is a comma

Lines of space alone and rows of empty cells are skipped. A prompt is a text as `flowrl.prompts.text_checks` says.

Besides `prompt`, an object or row may hold (all paths relative to the file):

    source, sources          images that the prompt's instruction is about (editing)
    reference, references    images that a sample is to resemble (for rewards)
    source_video             an .mp4, .webm or .gif that the instruction is about, or that a clip is drawn along
    mask_video               one that is white where `source_video` is drawn and black where it stays
    pose_video, face_video   of the movement, and of the face, that a character is drawn with
    negative_prompt          what guidance leads away from; without it, the run's `prompts.negative`

An image key takes a path or a list of paths; in CSV a list is written `a.png;b.png` in the plural columns, or as JSON.
`source_images` and `reference_images`, the names that rewards go by, are read too, and what other toolkits write
(`flowrl.prompts.foreign_rows`).
"""

from __future__ import annotations

import codecs
import csv
import io
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from flowrl.prompts import foreign_rows
from flowrl.prompts.source_images import check_image
from flowrl.prompts.text_checks import check_text
from flowrl.runtime.files import numbered_lines, parse_json, read_text
from flowrl.runtime.scrubbing import say as print

SOURCES = ("source", "sources", "source_images")
REFERENCES = ("reference", "references", "reference_images")
CLIPS = ("pose_video", "face_video", "source_video", "mask_video")
VIDEOS = (".mp4", ".webm", ".gif")

SEPARATOR = re.compile(r'"?sep=([,;\t|])"?\n', re.IGNORECASE)
"""A first line that names the column separator of a .csv file."""
_MISSING = "needs an object with a non-empty string under 'prompt'"

Find = Callable[[str], Path]
"""Maps a path as written to the file that it means."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """One row of a prompt file."""

    text: str
    """The prompt, or the instruction of an edit."""
    metadata: dict[str, Any]
    """The row's whole record, `{}` for plain prompts."""
    negative: str = ""
    """What guidance leads away from."""
    sources: tuple[str, ...] = ()
    """Absolute paths of the images that the instruction is about."""
    references: tuple[str, ...] = ()
    """Absolute paths of images that a sample is to resemble."""
    videos: Mapping[str, str] = field(default_factory=dict)
    """Absolute paths of the videos that the prompt is about, by their keys, in the order of `CLIPS`."""
    source_names: tuple[str, ...] = ()
    """`sources`, then `videos`, as the file writes them; empty takes the names of their files."""
    where: str = field(default="", compare=False)
    """File and line that it was read from, for messages."""

    def __post_init__(self) -> None:
        if self.text.strip():  # readers refuse empty ones, and say where
            check_text(self.text)
        if self.negative.strip():
            check_text(self.negative, f"the negative prompt {self.negative[:40]!r}")

    @property
    def noise_name(self) -> str:
        """What start noise depends on beside seed and sample: the text, and the names of what it is about. Rows may
        share it; `flowrl.prompts.identity` tells them apart."""
        names = self.source_names or tuple(Path(file).name for file in (*self.sources, *self.clips))
        return json.dumps([self.text, *names], ensure_ascii=False) if names else self.text

    @property
    def clips(self) -> tuple[str, ...]:
        """Absolute paths of the videos that it names."""
        return tuple(self.videos.values())

    @property
    def record(self) -> dict[str, Any]:
        """The metadata with the prompt, its images by absolute paths: a JSONL row that holds in any folder."""
        images = {"sources": list(self.sources), "references": list(self.references)}
        found = {key: value for key, value in {**images, **self.videos}.items() if value}
        moved = ((*SOURCES, *foreign_rows.SOURCES) if self.sources else ()) + (REFERENCES if self.references else ())
        kept = {key: value for key, value in self.metadata.items() if key not in moved}
        return {**kept, "prompt": self.text, **found}


def read_file(path: Path, negative: str = "") -> list[Prompt]:
    """Reads a prompt file, as the module says. Images are looked for and their headers opened.

    Args:
        path: the file; its ending says what it is.
        negative: for the rows without a negative prompt of their own.

    Raises ValueError: the file cannot be read, is empty, or a line is bad; names file and line.
    """
    if path.is_dir():
        raise ValueError(f"{path}: is a folder; if it holds a dataset, write dataset:{path}")
    if path.suffix not in (".txt", ".jsonl", ".csv"):
        raise ValueError(
            f"{path}: prompts come from .txt (one per line), .jsonl (one object per line), .csv (a column prompt) or "
            f"dataset:ID_OR_FOLDER, not {path.suffix or 'a file without an ending'}"
        )
    if path.suffix == ".csv":
        rows = list(_csv_prompts(path, negative))
    elif path.suffix == ".txt":
        rows = []
        if said := _json_under_txt(path):
            raise ValueError(said)
        joined = path.read_bytes().startswith(codecs.BOM_UTF8)
        for at, line in read_lines(path):
            check_text(line, at)
            if joined and "\ufeff" in line:  # one inside a prompt of a file without is in published lists
                raise ValueError(
                    f"{at}: holds U+FEFF, the byte order mark with which the file begins too: two files were joined "
                    "without a line break, put one in its place"
                )
            rows.append(Prompt(text=line.strip(), metadata={}, negative=negative, where=at))
        if hashes := sum(row.text.startswith("#") for row in rows):
            said = f"{path}: prompts that begin with #: {hashes}. They are prompts like all others; delete comments"
            say_once(said)
    else:
        find = relative_to(path.parent)
        rows = [prompt_of(row, at, find=find, negative=negative) for at, row in read_objects(path)]
    if not rows:
        raise ValueError(f"{path}: holds no prompt")
    return rows


@cache  # a file is read several times
def say_once(text: str) -> None:
    """Says something on standard error, unless it was said before."""
    print(f"flowrl: {text}.", file=sys.stderr, flush=True)


def read_objects(path: Path) -> list[tuple[str, Any]]:
    """The JSON values of a file with one a line, each with "FILE, line NUMBER", for messages. Raises ValueError: a line
    is no JSON; or all of the file is one list or object, with what to do about it."""
    rows: list[tuple[str, Any]] = []
    for at, line in read_lines(path):
        try:
            rows.append((at, parse_json(line, at)))
        except ValueError as error:
            raise ValueError(_of_one_value(path) or str(error)) from error
    if len(rows) == 1 and (said := _of_one_value(path)):
        raise ValueError(said)
    return rows


def _json_under_txt(path: Path) -> str:
    """What to do about a .txt file that is JSON, all of it or each line; nothing for other files."""
    lines = read_lines(path)
    if not lines or not lines[0][1].lstrip().startswith(("{", "[")):
        return ""
    for texts in ([line for _, line in lines], ["\n".join(line for _, line in lines)]):
        try:
            values = [parse_json(text, str(path)) for text in texts]
        except ValueError:
            continue
        if all(isinstance(value, dict | list) for value in values):
            return f"{path}: is JSON, of which a .txt file makes a prompt of each line: rename it to .jsonl"
    return ""


def _of_one_value(path: Path) -> str:
    """What to do about a file that is one JSON value with all rows in it; nothing for other files."""
    text = read_text(path)
    try:
        whole: Any = parse_json(text, str(path))
    except ValueError:
        return ""
    lists = whole.items() if isinstance(whole, dict) and "prompt" not in whole else [("", whole)]
    for key, rows in lists:
        if (
            isinstance(rows, list)
            and rows
            and (key in ("", "prompts") or (isinstance(rows[0], dict) and "prompt" in rows[0]))
        ):
            given, place = ("list", ".[]") if not key else (f"object with the list {key!r}", f".{key}[]")
            shape = " | {prompt: .}" if isinstance(rows[0], str) else ""
            break
    else:
        if not isinstance(whole, dict) or "\n" not in text.strip():
            return ""
        given, place, shape = "object over several lines", ".", ""
    return (
        f"{path}: is one JSON {given}, and a .jsonl file has an object on each line: jq -c '{place}{shape}' "
        f"{path.name} > rows.jsonl writes it so"
    )


def read_lines(path: Path) -> list[tuple[str, str]]:
    """The lines of a file that are not blank, each with "FILE, line NUMBER", for messages."""
    return [(f"{path}, line {number}", line) for number, line in numbered_lines(read_text(path))]


def relative_to(folder: Path) -> Find:
    """Paths that start at a folder."""
    return lambda name: Path(os.path.abspath(folder / Path(name).expanduser()))


def prompt_of(row: Any, where: str, *, find: Find, negative: str = "", missing: str = _MISSING) -> Prompt:
    """A prompt from its record, all of it checked.

    Args:
        row: the record; None stands for a key that is not there.
        where: file and line, for messages.
        find: where images lie.
        negative: used where the record has none.
        missing: what to say of a record without a prompt.

    Raises ValueError: a wrong type, an empty prompt, or an image or video that is not there or is not one.
    """
    keys = ("prompt", *foreign_rows.PROMPTS) if isinstance(row, dict) else ()
    text = next((row[key] for key in keys if row.get(key) is not None), None)
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f"{where}: {missing}")
    check_text(text, where)
    own = row.get("negative_prompt")
    if own is not None and not isinstance(own, str):
        raise ValueError(f"{where}: negative_prompt must be text, got {own!r}; leave it out to take prompts.negative")
    if own is not None and own.strip():
        check_text(own, f"{where}, negative_prompt")
    names, sources = _images(row, SOURCES, where, find)
    if not any(row.get(key) is not None for key in SOURCES):
        find_too = foreign_rows.beside_or_in_images(find)
        key, given = foreign_rows.foreign_sources(row, where, find_too)
        names, sources = _images({key: given or None}, (key,), where, find_too)
    _, references = _images(row, REFERENCES, where, find)
    videos = clips_of(row, where, find)
    return Prompt(
        text=text,
        metadata=row,
        negative=negative if own is None else own,
        sources=sources,
        references=references,
        videos=videos,
        source_names=(*names, *(row[key] for key in videos)),
        where=where,
    )


def clips_of(row: Mapping[str, Any], where: str, find: Find) -> dict[str, str]:
    """The videos that a record names, by their keys. Raises ValueError: as `prompt_of`."""
    videos: dict[str, str] = {}
    for key in CLIPS:
        if (name := row.get(key)) is not None:
            if not isinstance(name, str) or not name.lower().endswith(VIDEOS):
                raise ValueError(f"{where}: {key} must be the path of one {', '.join(VIDEOS)} file, got {name!r}")
            videos[key] = str(_existing(name, key, where, find))
    pose, face, video, mask = CLIPS
    if mask in videos and video not in videos:
        raise ValueError(f"{where}: {mask} says where a {video} is drawn, and there is none: give it, or remove {mask}")
    if (pose in videos) != (face in videos):
        raise ValueError(f"{where}: a character is drawn from a {pose} and a {face}: give both, or neither")
    return videos


def _csv_prompts(path: Path, negative: str) -> Iterator[Prompt]:
    rows = _csv_rows(path)
    line, names = next(rows, (1, []))
    header = [name.strip() for name in names]
    if not header:
        return
    where = f"{path}, line {line}"
    if not {"prompt", *foreign_rows.PROMPTS} & set(header):
        raise ValueError(
            f"{where}: the header needs a column 'prompt', got {', '.join(header)}; columns are separated by commas"
        )
    if twice := [name for name in dict.fromkeys(header) if name and header.count(name) > 1]:
        raise ValueError(f"{where}: the header names the column '{twice[0]}' twice; keep one of them")
    if "" in header:
        raise ValueError(f"{where}: column {header.index('') + 1} of the header has no name; give it one")
    find = relative_to(path.parent)
    for number, cells in rows:
        where = f"{path}, line {number}"
        if len(cells) != len(header):
            raise ValueError(
                f"{where}: has {len(cells)} cells for the header's {len(header)} columns ({', '.join(header)}); put a "
                "cell that holds commas or line breaks in double quotes, and leave empty cells in place"
            )
        if [cell.strip("\ufeff \t") for cell in cells] == header:
            raise ValueError(f"{where}: is the header again, of a file that was joined to another: delete this line")
        metadata = dict(zip(header, cells, strict=True))
        row = {name: _cell(name, cell.strip(), where) for name, cell in metadata.items()}
        prompt = prompt_of(row, where, find=find, negative=negative, missing="the cell under 'prompt' is empty")
        yield replace(prompt, metadata=dict(metadata))


def _csv_rows(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Rows that are not blank, each with the line that it begins on."""
    text = read_text(path)
    if named := SEPARATOR.match(text):
        text = text[named.end() :]
    delimiter = named[1] if named else ","
    reader = csv.reader(io.StringIO(text), delimiter=delimiter, strict=True, skipinitialspace=True)
    while True:
        line = reader.line_num + (2 if named else 1)
        try:
            row = next(reader, None)
        except csv.Error as error:
            raise ValueError(
                f"{path}, line {line}: not valid CSV ({error}); a cell that begins with a double quote ends with one, "
                'and quotes inside it are doubled ("")'
            ) from error
        if row is None:
            return
        if any(cell.strip() for cell in row):
            yield line, row


def _cell(name: str, cell: str, where: str) -> Any:
    """A cell as JSON would hold it: nothing where a key may be left out, lists of images as lists."""
    if name not in (*SOURCES, *foreign_rows.SOURCES, *REFERENCES, *CLIPS, "negative_prompt"):
        return cell
    if not cell:
        return None
    if name in (*SOURCES[1:], *foreign_rows.LISTS, *REFERENCES[1:]):
        if not cell.startswith("["):
            return [part.strip() for part in cell.split(";")]
        try:
            return parse_json(cell, where)
        except ValueError as error:
            raise ValueError(
                f"{where}: {name} begins like a JSON list and is not one ({str(error).removeprefix(f'{where}: ')}); "
                "write a.png;b.png instead, or a list whose double quotes CSV has doubled"
            ) from error
    return cell


def _images(
    row: Mapping[str, Any], keys: Sequence[str], where: str, find: Find
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The images that one of the keys names: as written, and as absolute paths."""
    given = [key for key in keys if row.get(key) is not None]
    if not given:
        return (), ()
    if len(given) > 1:
        raise ValueError(f"{where}: {' and '.join(given)} are names of the same thing: give one of them")
    key, value = given[0], row[given[0]]
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list) or not all(isinstance(name, str) and name.strip() for name in names):
        raise ValueError(f"{where}: {key} must be a path or a list of paths of images, got {value!r}")
    paths = [_existing(name, key, where, find) for name in names]
    for path in paths:
        try:
            check_image(path)
        except ValueError as error:
            raise ValueError(f"{where}: {key}: {error}") from error
    return tuple(names), tuple(map(str, paths))


def _existing(name: str, key: str, where: str, find: Find) -> Path:
    path = find(name)
    if not path.is_file():
        too = f", and in the folder {foreign_rows.FOLDER} there" if key in foreign_rows.SOURCES else ""
        raise ValueError(
            f"{where}: {key} names {name!r}, which is not there: looked for {path}. Paths start at the prompt file's "
            f"folder{too}; if '{key}' says something else here, rename it"
        )
    return path
