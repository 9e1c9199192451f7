"""Splits held-out prompts, which a run is measured on and never trained on, off your own file."""

from __future__ import annotations

import csv
import json
from pathlib import Path

from flowrl.config.prompt_sets import PROMPT_SETS
from flowrl.prompts.foreign_rows import PROMPTS
from flowrl.prompts.prompt_files import SEPARATOR
from flowrl.runtime.files import read_text, write_atomically

SHARE = 10
"""One prompt in so many is held out."""
LEAST, MOST = 4, 64
"""Bounds of the number of held-out prompts: with fewer, none are held out; more cost time and tell little."""


def hold_out(prompts: str) -> tuple[str, str] | None:
    """Splits prompts (a .txt, .jsonl or .csv, or asset:NAME) into those to train on and every tenth; None if too few.

    They lie beside it, so that images in its lines are found. A repeated prompt is on one side only. Shipped prompts
    ship in pairs. Raises ValueError: one of the two exists with other contents, or the folder cannot be written.
    """
    for found in PROMPT_SETS.values():
        if found.ships is not None and found.ships[0] == prompts:
            return found.ships
    path = Path(prompts).expanduser()
    if path.suffix not in (".txt", ".jsonl", ".csv") or not path.is_file():
        return None
    texts = split_lines(path)
    if texts is None:
        return None
    files = {path.with_name(f"{path.stem}_{side}{path.suffix}"): text for side, text in texts.items()}
    for file, text in files.items():
        if file.exists() and file.read_text(encoding="utf-8") != text:
            raise ValueError(f"{file} exists already with other prompts: move it away, or name `eval_prompts`")
    for file, text in files.items():
        try:
            write_atomically(file, text)
        except OSError as error:
            raise ValueError(f"held-out prompts cannot be written to {file} ({error}): name `eval_prompts`") from error
    train, held_out = map(str, files)
    return train, held_out


def split_lines(path: Path) -> dict[str, str] | None:
    """Lines (of a .csv header and rows) to train on and held-out ones, each prompt on one side; None if too few."""
    head, keys = list[str](), dict[str, str]()
    if path.suffix == ".csv":
        head, keys = csv_rows(path)
        lines = list(keys)
    else:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        keys = {line: prompt_of(line, path.suffix) for line in lines}
    distinct = list(dict.fromkeys(keys.values()))
    step = max(SHARE, -(-len(distinct) // MOST))
    held = set(distinct[step - 1 :: step])
    if len(held) < LEAST:
        return None
    sides = {"train": [line for line in lines if keys[line] not in held]}
    sides["heldout"] = [line for line in keys if keys[line] in held]
    return {side: "\n".join([*head, *kept, ""]) for side, kept in sides.items()}


def csv_rows(path: Path) -> tuple[list[str], dict[str, str]]:
    """The lines of the header, and the text of each different row, which may go over several lines, with its prompt."""
    lines = read_text(path).rstrip("\n").split("\n")
    marked = SEPARATOR.match(f"{lines[0]}\n")
    first = 1 if marked else 0
    reader = csv.reader(lines[first:], delimiter=marked[1] if marked else ",", skipinitialspace=True)
    begins, names, rows = first, list[str](), dict[str, str]()
    head = list[str]()
    for row in reader:
        text, begins = "\n".join(lines[begins : first + reader.line_num]), first + reader.line_num
        if not any(cell.strip() for cell in row):
            continue
        if not names:
            names, head = [name.strip() for name in row], [*lines[:first], text]
            place = next((names.index(one) for one in ("prompt", *PROMPTS) if one in names), 0)
        else:
            rows[text] = row[place].strip() if place < len(row) else text
    return head, rows


def prompt_of(line: str, suffix: str) -> str:
    """The key of a line: its prompt, without blanks around it."""
    if suffix == ".jsonl":
        try:
            return str(json.loads(line)["prompt"]).strip()
        except (ValueError, KeyError, TypeError):  # which reading the file refuses, with the line
            pass
    return line.strip()
