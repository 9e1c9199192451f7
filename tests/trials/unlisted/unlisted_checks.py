"""Files of prompts, edits and benchmarks as other programs leave them; batches that do not fit."""

from __future__ import annotations

import base64
import contextlib
import functools
import gzip
import io
import json
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from PIL import Image
from tiny_folders import SETTINGS, save_tiny
from unlisted_case import Case, Outcome, Silent, command, refused, refused_call, same

from flowrl.benchmarks.judged.protocols import PROTOCOLS
from flowrl.config.train import TrainConfig, find_config, load_config
from flowrl.prompts.loading import read_prompts
from flowrl.session.preflight import preflight

# ---- texts -----------------------------------------------------------------------------------------------------------

TEXTS: dict[str, tuple[str, bytes, list[str] | None]] = {
    "CRLF": ("a.txt", b"a cat\r\na dog\r\n", ["a cat", "a dog"]),
    "CR alone": ("a.txt", b"a cat\ra dog\r", ["a cat", "a dog"]),
    "form feed between pages": ("a.txt", b"a cat\n\x0ca dog\n", None),
    "vertical tab of PowerPoint": ("a.txt", b"a cat\x0bon a mat\n", None),
    "next line in a prompt": ("a.txt", "a cat\u0085a dog\n".encode(), ["a cat\u0085a dog"]),
    "tabs": ("a.txt", b"\ta cat\ton a mat\n", ["a cat\ton a mat"]),
    "UTF-8 with a mark": ("a.txt", "\ufeffa cat\n".encode(), ["a cat"]),
    "two files joined, each with a mark": ("a.txt", "\ufeffa cat\n\ufeffa dog\n".encode(), None),
    "two files joined without a line break": ("a.txt", "\ufeffa cat\ufeffa dog\n".encode(), None),
    "UTF-16 of Notepad": ("a.txt", "a cat\na dog\n".encode("utf-16"), None),
    "UTF-32": ("a.txt", "a cat\n".encode("utf-32"), None),
    "UTF-16 without a mark": ("a.txt", "a cat\n".encode("utf-16-le"), None),
    "Windows-1252": ("a.txt", "ein Bär, “groß”\n".encode("cp1252", "replace"), None),
    "gzip": ("a.txt", gzip.compress(b"a cat\n"), None),
    "gzip by its name": ("a.txt.gz", gzip.compress(b"a cat\n"), None),
    "empty": ("a.txt", b"", None),
    "a mark alone": ("a.txt", "\ufeff".encode(), None),
    "soft hyphens alone": ("a.txt", "a cat\n\u00ad\u00ad\n".encode(), None),
    "variation selectors alone": ("a.txt", "a cat\n\ufe0f\n".encode(), None),
    "tags alone": ("a.txt", "a cat\n\U000e0061\U000e007f\n".encode(), None),
    "NUL of a block that was lost": ("a.txt", b"a cat\n\0\0\0\0\na dog\n", None),
    "colours of a terminal": ("a.txt", b"\x1b[31ma cat\x1b[0m\n", None),
    "JSON lines under the name of a text": ("a.txt", b'{"prompt": "a cat"}\n{"prompt": "a dog"}\n', None),
    "a JSON list under the name of a text": ("a.txt", b'[\n  "a cat",\n  "a dog"\n]\n', None),
    "AppleDouble": ("a.txt", b"\0\5\x16\7\0\2\0\0Mac OS X        \0\2", None),
    "U+2028 in JSON": ("a.jsonl", '{"prompt": "a cat\u2028on a mat"}\n'.encode(), ["a cat\u2028on a mat"]),
    "trailing comma": ("a.jsonl", b'{"prompt": "a cat",}\n', None),
    "comments": ("a.jsonl", b'// mine\n{"prompt": "a cat"}\n', None),
    "NaN": ("a.jsonl", b'{"prompt": "a cat", "score": NaN}\n', None),
    "a key twice": ("a.jsonl", b'{"prompt": "a cat", "prompt": "a dog"}\n', None),
    "single quotes of Python": ("a.jsonl", b"{'prompt': 'a cat'}\n", None),
    "two objects on a line": ("a.jsonl", b'{"prompt": "a cat"}{"prompt": "a dog"}\n', None),
    "commas between lines": ("a.jsonl", b'{"prompt": "a cat"},\n{"prompt": "a dog"}\n', None),
    "a mark in the middle": ("a.jsonl", '{"prompt": "a cat"}\n\ufeff{"prompt": "a dog"}\n'.encode(), None),
    "texts": ("a.jsonl", b'"a cat"\n"a dog"\n', None),
    "a list of prompts in a row": ("a.jsonl", b'{"prompt": ["a cat", "a dog"]}\n', None),
    "caption": ("a.jsonl", b'{"caption": "a cat"}\n', None),
    "half a character": ("a.jsonl", b'{"prompt": "a cat \\ud83d"}\n', None),
    "a whole character by halves": ("a.jsonl", b'{"prompt": "a cat \\ud83d\\ude3a"}\n', ["a cat \U0001f63a"]),
    "escaped NUL": ("a.jsonl", b'{"prompt": "a cat\\u0000"}\n', None),
    "a negative prompt in a list": ("a.jsonl", b'{"prompt": "a cat", "negative_prompt": ["blur"]}\n', None),
    "indented JSON": ("a.jsonl", b'{\n  "prompt": "a cat"\n}\n', None),
    "cells with quotes, commas and breaks": (
        "a.csv",
        b'id,prompt\r\n1,"a ""big"" cat,\r\non a mat"\r\n2,a dog\r\n',
        ['a "big" cat,\non a mat', "a dog"],
    ),
    "semicolons": ("a.csv", b"id;prompt\n1;a cat\n", None),
    "sep= of Excel": ("a.csv", "\ufeffsep=;\r\nid;prompt\r\n1;a cat, big\r\n".encode(), ["a cat, big"]),
    "tabs in a table": ("a.csv", b"id\tprompt\n1\ta cat\n", None),
    "TSV": ("a.tsv", b"id\tprompt\n1\ta cat\n", None),
    "tables joined": ("a.csv", b"id,prompt\n1,a cat\nid,prompt\n2,a dog\n", None),
    "tables joined, one column": ("a.csv", b"prompt\na cat\nprompt\na dog\n", None),
    "tables joined with a mark": ("a.csv", "\ufeffid,prompt\n1,a cat\n\ufeffid,prompt\n2,a dog\n".encode(), None),
    "an open quote": ("a.csv", b'id,prompt\n1,"a cat\n2,a dog\n', None),
    "quotes by backslashes": ("a.csv", b'id,prompt\n1,"a \\"big\\" cat"\n', None),
    "no header": ("a.csv", b"1,a cat\n2,a dog\n", None),
    "an index without a name, of pandas": ("a.csv", b",prompt\n0,a cat\n", None),
    "empty rows of Excel": ("a.csv", b"prompt,tag\r\na cat,x\r\n,\r\n,\r\n", ["a cat"]),
    "a header in capitals": ("a.csv", b"ID,Prompt\n1,a cat\n", None),
}


def text_case(name: str, data: bytes, expected: list[str] | None, folder: Path) -> Outcome:
    (folder / name).write_bytes(data)
    if expected is None:
        return refused_call(lambda: [row.text for row in read_prompts(folder / name)], name)
    return same([row.text for row in read_prompts(folder / name)], expected)


# ---- edits -----------------------------------------------------------------------------------------------------------


@functools.cache
def models() -> Path:
    folder = tempfile.TemporaryDirectory()
    models.kept = folder  # type: ignore[attr-defined]
    return Path(folder.name)


@functools.cache
def tiny(family: str) -> Path:
    return save_tiny(family, models() / family)


def config(family: str, prompts: Path, *rewards: dict[str, Any], **more: Any) -> TrainConfig:
    rewards = rewards or ({"name": "jpeg_compressibility"},)
    where = {"pipeline": {"name": family, "model": str(tiny(family)), "device": "cpu", **SETTINGS[family]}}
    if family == "flux2":
        where["pipeline"]["options"] = {"max_references": 2}
    settings = {
        "prompts": {"train": str(prompts)},
        "rewards": list(rewards),
        **where,
        "sampler": {"kernel": "flow_sde", "num_steps": 2},
    }
    return load_config({"num_iterations": 1, "prompts_per_step": 1, "group_size": 2, **settings, **more})


FORMS: dict[str, Callable[[Path], Any]] = {
    "a path": lambda folder: {"image": "a.png"},
    "a path of capitals": lambda folder: {"image": "B.PNG"},
    "a list of one": lambda folder: {"images": ["a.png"]},
    "an absolute path": lambda folder: {"image": str(folder / "a.png")},
    "a path by ./": lambda folder: {"source_image": "./a.png"},
    "another ending": lambda folder: {"image": "c.jp2"},
    "no ending": lambda folder: {"image": "d"},
    "a space behind it": lambda folder: {"image": "a.png "},
    "Windows' separator": lambda folder: {"image": "sub\\e.png"},
    "a web address": lambda folder: {"image": "https://example.org/a.png"},
    "an address with a question": lambda folder: {"image": "https://example.org/a?size=large"},
    "a file address": lambda folder: {"image": f"file://{folder}/a.png"},
    "base64": lambda folder: {"image": base64.b64encode((folder / "a.png").read_bytes()).decode()},
    "a data address": lambda folder: {
        "image": f"data:image/png;base64,{base64.b64encode((folder / 'a.png').read_bytes()).decode()}"
    },
    "bytes of datasets": lambda folder: {"image": {"bytes": base64.b64encode(b"x").decode(), "path": None}},
    "a path in an object": lambda folder: {"image": {"path": "a.png"}},
    "a path in objects": lambda folder: {"images": [{"path": "a.png"}]},
    "UniRL's without a role": lambda folder: {"media": [{"modality": "image", "uri": "a.png"}]},
    "HEIC": lambda folder: {"image": "photo.heic"},
    "a list with a text": lambda folder: {"images": ["a.png", "caption.txt"]},
    "a list with nothing": lambda folder: {"images": ["a.png", None]},
    "input_image": lambda folder: {"input_image": "a.png"},
    "input_images": lambda folder: {"input_images": ["a.png"]},
    "image_path": lambda folder: {"image_path": "a.png"},
    "control_image": lambda folder: {"control_image": "a.png"},
    "conditioning_image": lambda folder: {"conditioning_image": "sub/e.png"},
}
READ = tuple(FORMS)[:5]


def edit_case(family: str, form: str, folder: Path) -> Outcome:
    """The image is the source, or the row is refused, or a line says that it is left out; never silently text alone."""
    for name in ("a.png", "B.PNG", "sub/e.png", "c.jp2", "d"):
        (folder / name).parent.mkdir(exist_ok=True)
        Image.new("RGB", (64, 64), (255, 0, 0)).save(folder / name, format="JPEG2000" if name == "c.jp2" else "PNG")
    row = {"prompt": "make it blue", **FORMS[form](folder)}
    (folder / "rows.jsonl").write_text(json.dumps(row) + "\n")
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            (found,) = preflight(config(family, folder / "rows.jsonl")).prompts.train
    except ValueError as error:
        if form in READ and family != "sd3":
            raise Silent(f"refused: {error}") from error
        return refused(1, str(error), next(iter(FORMS[form](folder))))
    if found.sources:
        return same((len(found.sources), Image.open(found.sources[0]).size), (1, (64, 64)))
    return refused(1, said.getvalue(), next(iter(FORMS[form](folder))))


def count_case(family: str, counts: tuple[int, int], folder: Path) -> Outcome:
    """Row 97 of 120 has another number of sources than the others."""
    usual, odd = counts
    Image.new("RGB", (64, 64)).save(folder / "a.png")
    rows = [{"prompt": f"edit {k}", "source": ["a.png"] * (odd if k == 96 else usual)} for k in range(120)]
    rows = [row if row["source"] else {"prompt": row["prompt"]} for row in rows]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    made = config(family, folder / "rows.jsonl")
    return refused_call(lambda: preflight(made), "line 97", str(odd), "120")


# ---- rewards ---------------------------------------------------------------------------------------------------------

RECORD = {"tag": "single_object", "include": [{"class": "circle", "count": 1}]}
LACKS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "ocr": ({"name": "ocr"}, {"prompt": 'a sign "OK"'}, {"prompt": "a sign OK"}),
    "ocr's own field": (
        {"name": "ocr", "options": {"target_field": "text"}},
        {"prompt": "a", "text": "OK"},
        {"prompt": "a", "text": ""},
    ),
    "ocr's field of a number": (
        {"name": "ocr", "options": {"target_field": "text"}},
        {"prompt": "a", "text": "OK"},
        {"prompt": "a", "text": 7},
    ),
    "geneval": ({"name": "geneval"}, {"prompt": "a", **RECORD}, {"prompt": "a"}),
    "geneval, an empty list": (
        {"name": "geneval"},
        {"prompt": "a", **RECORD},
        {"prompt": "a", "tag": "single_object", "include": []},
    ),
    "attributes, two objects": (
        {"name": "attributes"},
        {"prompt": "a red circle", "tag": "colors", "include": [{"class": "circle", "count": 1, "color": "red"}]},
        {"prompt": "a red cow", "tag": "colors", "include": [{"class": "cow", "count": 1, "color": "red"}]},
    ),
    "references": ({"name": "similarity"}, {"prompt": "a", "reference": "a.png"}, {"prompt": "a"}),
    "references of nothing": (
        {"name": "similarity"},
        {"prompt": "a", "reference": "a.png"},
        {"prompt": "a", "reference": []},
    ),
    "questions": (
        {
            "name": "yes_no",
            "options": {"judge": {"server": "http://127.0.0.1:9/v1", "model": "m"}, "questions_field": "asked"},
        },
        {"prompt": "a", "asked": [["is it red?", "yes"]]},
        {"prompt": "a", "asked": []},
    ),
}


def lack_case(name: str, part: str, folder: Path) -> Outcome:
    """Row 97 of 120 lacks what the reward needs: of training, of evaluation, or of a second reward."""
    reward, good, bad = LACKS[name]
    Image.new("RGB", (64, 64)).save(folder / "a.png")
    for file, odd in (("good", -1), ("bad", 96)):
        rows = [bad if k == odd else good for k in range(120)]
        (folder / f"{file}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = [f"pipeline.model={tiny('sd3')}", "pipeline.device=cpu"]
    ours, other = json.dumps(reward), '{"name": "jpeg_compressibility"}'
    settings += {
        "training": ["prompts.train=bad.jsonl", "prompts.eval=null", "eval_every=0", f"rewards=[{other}, {ours}]"],
        "evaluation": ["prompts.train=good.jsonl", "prompts.eval=bad.jsonl", f"rewards=[{ours}]"],
        "a reward of evaluation": [
            "prompts.train=good.jsonl",
            "prompts.eval=bad.jsonl",
            f"rewards=[{other}]",
            f"eval.rewards=[{ours}]",
        ],
    }[part]
    made = load_config(find_config("tiny_flow_grpo"), settings)
    return refused_call(lambda: preflight(made), "bad.jsonl, line 97", "120")


# ---- batches ---------------------------------------------------------------------------------------------------------

BATCHES = [
    (6, 4, 1, 1, 1, 1),
    (6, 4, 7, 7, 1, 1),
    (7, 3, 5, 4, 1, 1),
    (1, 13, 12, 12, 1, 1),
    (2, 4, 1000, 999, 1, 1),
    (5, 6, 4, 4, 2, 1),
    (5, 6, 11, 11, 3, 2),
    (12, 8, 31, 17, 4, 3),
]
"""Prompts, group, rollout batch, micro batch, updates, processes."""


def batch_case(numbers: tuple[int, ...], folder: Path) -> Outcome:
    """By search: the largest that divides and is no more than was asked for."""
    prompts, group, rollout, micro, updates, processes = numbers
    (folder / "p.txt").write_text("\n".join(f"prompt {k}" for k in range(prompts)))
    made = load_config(
        find_config("tiny_flow_grpo"),
        [
            f"prompts_per_step={prompts}",
            f"group_size={group}",
            f"rollout_batch_size={rollout}",
            f"micro_batch_size={micro}",
            f"updates_per_rollout={updates}",
            "prompts.train=p.txt",
        ],
    )
    total = prompts * group
    if total % processes or total // processes % updates:
        return refused_call(lambda: made.resolve_batch(processes), "divide")
    own = total // processes
    best = [
        max(k for k in range(1, most + 1) if part % k == 0)
        for part, most in ((own, min(rollout, own)), (own // updates, min(micro, own // updates)))
    ]
    found = made.resolve_batch(processes)
    return same(
        (
            found.rollout_batch_size,
            found.micro_batch_size,
            found.micro_batches_per_update * updates * found.micro_batch_size,
        ),
        (*best, own),
    )


def said_case(folder: Path) -> Outcome:
    """`plan` says the batch that is taken in place of the one that was asked for."""
    code, said = command(
        "plan", "tiny_flow_grpo", "prompts_per_step=6", "group_size=6", "rollout_batch_size=7", "micro_batch_size=5"
    )
    if code != 0:
        raise Silent(said[-300:])
    lines = [line for line in said.splitlines() if "rollout_batch_size" in line or "micro_batch_size" in line]
    return ("right", " ".join(lines)) if any("7" in line and "6" in line for line in lines) else refused(0, said)


# ---- benchmarks ------------------------------------------------------------------------------------------------------


def wise(number: Any, category: str = "Cultural knowledge", **more: Any) -> dict[str, Any]:
    return {
        "prompt_id": number,
        "Prompt": "a festival",
        "Explanation": "lanterns",
        "Category": category,
        "Subcategory": "x",
        **more,
    }


BENCHES: dict[str, tuple[str, list[Any], bool]] = {
    "WISE, of 2025": ("wise", [wise(1), wise(560, "Time"), wise(650, "Space")], True),
    "WISE, an id twice": ("wise", [wise(1), wise(2), wise(1)], False),
    "WISE, an id as a text": ("wise", [wise("1")], False),
    "WISE, an id as a fraction": ("wise", [wise(1.0)], False),
    "WISE, the verified edition's space": ("wise", [wise(1), wise(530, "Space")], False),
    "WISE verified, the legacy edition's time": ("wise_verified", [wise(1), wise(560, "Time")], False),
    "WISE, an invisible prompt": ("wise", [wise(1, Prompt="\u200b\u200b")], False),
    "WISE, a control character in a prompt": ("wise", [wise(1, Prompt="a\u0007b")], False),
    "WISE, no prompt": ("wise", [wise(1, Prompt="")], False),
    "WISE, an explanation of nothing": ("wise", [wise(1, Explanation=None)], False),
    "WISE, records under ids": ("wise", {"1": wise(1)}, False),  # type: ignore[dict-item]
}


def bench_case(name: str, folder: Path) -> Outcome:
    benchmark, records, good = BENCHES[name]
    (folder / "records.json").write_text(json.dumps(records))
    if good:
        return same(len(PROTOCOLS[benchmark].read(str(folder / "records.json"), None).cases), len(records))
    return refused_call(lambda: PROTOCOLS[benchmark].read(str(folder / "records.json"), None), "records.json")


def cases() -> list[Case]:
    return [
        *(Case(f"text: {name}", partial(text_case, *how)) for name, how in TEXTS.items()),
        *(
            Case(f"edit: {name}, {family}", partial(edit_case, family, name))
            for name in FORMS
            for family in ("kontext", "flux2", "sd3")
        ),
        *(
            Case(
                f"edit: {counts[1]} sources where others have {counts[0]}, {family}",
                partial(count_case, family, counts),
            )
            for family, counts in (
                ("kontext", (1, 0)),
                ("kontext", (1, 2)),
                ("sd3", (0, 1)),
                ("qwen_image_edit", (1, 0)),
            )
        ),
        *(
            Case(f"lack: {name}, {part}", partial(lack_case, name, part))
            for name in LACKS
            for part in ("training", "evaluation", "a reward of evaluation")
        ),
        *(Case(f"batch: {numbers}", partial(batch_case, numbers)) for numbers in BATCHES),
        Case("batch: plan says it", said_case),
        *(Case(f"bench: {name}", partial(bench_case, name)) for name in BENCHES),
    ]
