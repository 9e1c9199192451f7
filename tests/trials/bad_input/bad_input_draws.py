"""Trials of bad input that are drawn: values no key can have, keys with a slip, wrong flags, damaged files."""

from __future__ import annotations

import argparse
import dataclasses
import os
import random
import types
import typing
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from bad_input_folder import TRAIN

from flowrl.cli import COMMANDS, command_module
from flowrl.config.train import TrainConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """One bad input.

    Attributes:
        name: of the trial, unique.
        words: of the command line.
        expect: that it is refused, that it works, or that either is right.
        says: words that a refusal must have, in any case; each may name alternatives with a bar.
        prepare: changes the trial's folder first.
        changes: files and folders (beginnings of their paths) that the command may change.
    """

    name: str
    words: Sequence[str]
    expect: Literal["refused", "works", "either"] = "refused"
    says: tuple[str, ...] = ()
    prepare: Callable[[Path], None] | None = None
    changes: tuple[str, ...] = ()


def written(name: str, text: str | bytes) -> Callable[[Path], None]:
    """What writes a file before a trial."""

    def prepare(folder: Path) -> None:
        (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())

    return prepare


# ---- values and keys -------------------------------------------------------------------------------------------------

_NEVER: dict[Any, tuple[str, ...]] = {
    int: ("many", "1.5", "[1]", "true", "-7", "{a: 1}", ".nan", "1e400"),
    float: ("many", "[[1]]", "true", ".nan", ".inf", "-.inf", "{a: 1}", "1e400"),
    bool: ("maybe", "1", "[true]", "yes please", "0.0"),
    str: ("[a]", "{a: 1}"),
}
"""Values that no key of a type takes; negative whole numbers have no meaning in any key but `seed`."""
_SIGNED = ("seed", "adv_correction")


def _leaves(cls: type[Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        hint = hints[field.name]
        if dataclasses.is_dataclass(hint):
            yield from _leaves(typing.cast(type[Any], hint), f"{prefix}{field.name}.")
        elif not (typing.get_origin(hint) is tuple and dataclasses.is_dataclass(typing.get_args(hint)[0])):
            yield f"{prefix}{field.name}", hint


def _bad_values(key: str, hint: Any) -> list[str]:
    union = typing.get_args(hint) if typing.get_origin(hint) in (types.UnionType, typing.Union) else (hint,)
    kinds = [kind for kind in union if kind is not type(None)]
    if len(kinds) > 1:
        return []
    kind = kinds[0]
    if typing.get_origin(kind) is Literal:
        return ["nonsense", "3.5", "[a]"]
    if kind in _NEVER:
        return [value for value in _NEVER[kind] if not (value == "-7" and key.split(".")[-1] in _SIGNED)]
    return ["7", "word"] if typing.get_origin(kind) in (dict, tuple) else []


def value_trials(rng: random.Random, count: int) -> Iterator[Trial]:
    """A value that the key cannot have, on the command line of train and plan, or in a file."""
    pool = [(key, value) for key, hint in _leaves(TrainConfig) for value in _bad_values(key, hint)]
    for key, value in rng.sample(pool, count):
        command = rng.choice(["train", "train", "plan"])
        yield Trial(
            name=f"value {command} {key}={value}", words=[command, "tiny.yaml", f"{key}={value}"],
            says=(key.split(".")[-1],),
        )  # fmt: skip


def slip_trials(rng: random.Random, count: int) -> Iterator[Trial]:
    """A key with one letter dropped, doubled, exchanged or added."""
    keys = [key for key, _ in _leaves(TrainConfig)]
    known = set(keys)
    for key in rng.sample(keys, count):
        *rest, last = key.split(".")
        place = rng.randrange(len(last))
        slipped = rng.choice(
            [last[:place] + last[place + 1 :], last[:place] + last[place] + last[place:], last + rng.choice("sx_"),
             last[:place] + rng.choice("qzx") + last[place + 1 :]]
        )  # fmt: skip
        wrong = ".".join([*rest, slipped or "x"])
        if wrong not in known:
            yield Trial(name=f"slip {wrong}", words=[*TRAIN, f"{wrong}=1"], says=(slipped or "x",))


# ---- flags -----------------------------------------------------------------------------------------------------------

_JPEG = "jpeg_compressibility"
_POSITIONALS: dict[str, list[str]] = {
    "train": ["tiny.yaml"], "plan": ["tiny.yaml"], "compare": ["tiny.yaml", "--out", "compared"],
    "sample": ["run", "--prompt=a"], "eval": ["run"],
    "sweep": ["run", f"--rewards=target={_JPEG},heldout=jpeg_incompressibility"], "report": ["run"], "serve": [_JPEG],
    "reward score": [_JPEG, "images"], "reward card": [_JPEG, "images"], "reward train": ["pairs.jsonl"],
    "reward rubric": ["pairs.jsonl", "--judge", "{server: 'http://127.0.0.1:9', model: m}"],
    "reward realism": ["run"], "reward published": [], "pretrain": ["prompts"],
}  # fmt: skip


def _flags(command: str) -> list[argparse.Action]:
    parser = argparse.ArgumentParser(prog=f"flowrl {command}")
    module = command_module(command)
    module.add_arguments(parser)
    return [a for a in parser._actions if a.option_strings and a.nargs != 0]


def flag_trials(rng: random.Random, count: int) -> Iterator[Trial]:
    """A flag with a value of another kind, and flags that there are not."""
    pool: list[tuple[str, list[str], str]] = []
    for command in (name for name in COMMANDS if name in _POSITIONALS):
        begin = [*command.split(), *_POSITIONALS[command]]
        pool.append((command, [*begin, "--nonsense", "1"], "--nonsense"))
        pool.append((command, [*begin, f"--{rng.choice(['lr', 'bs', 'gpus'])}=1"], "--"))
        for action in _flags(command):
            flag = action.option_strings[-1]
            if action.type in (int, float) or getattr(action.type, "__name__", "") == "count":
                values = ["x", "1e", "", "--", "[1]"]
                values += ["0", "-3", "1.5"] if action.type not in (int, float) else ["nan"]
                values += ["1.5"] if action.type is int else []
                pool += [(command, [*begin, f"{flag}={value}"], flag) for value in values]
            elif action.choices:
                pool.append((command, [*begin, f"{flag}=nonsense"], flag))
    for command, words, flag in rng.sample(pool, count):
        yield Trial(name=f"flag {command}: {' '.join(words[-2:])}", words=words, says=(flag,))


# ---- damaged files ---------------------------------------------------------------------------------------------------

_READERS: dict[str, tuple[list[str], tuple[str, ...]]] = {
    "tiny.yaml": (TRAIN, ()),
    "prompts.txt": (TRAIN, ()),
    "eval.jsonl": (TRAIN, ()),
    "brightness.py": (TRAIN, ()),
    "model/model_index.json": (TRAIN, ()),
    "model/transformer/config.json": (TRAIN, ()),
    "model/transformer/diffusion_pytorch_model.safetensors": (TRAIN, ()),
    "model/vae/config.json": (TRAIN, ()),
    "model/scheduler/scheduler_config.json": (TRAIN, ()),
    "run/config.yaml": (["train", "resume=run", "num_iterations=3"], ("run",)),
    "run/manifest.json": (["train", "resume=run", "num_iterations=3"], ("run",)),
    "run/metrics.jsonl": (["report", "run"], ("run/report.html",)),
    "run/metrics.jsonl ": (["train", "resume=run", "num_iterations=3"], ("run",)),
    "run/summary.json": (["report", "run"], ("run/report.html",)),
    "run/lora/pytorch_lora_weights.safetensors": (
        ["sample", "run", "--steps=1", "--prompt=a red circle"],
        ("samples",),
    ),
    "run/checkpoints/000002/checkpoint.json": (["train", "resume=run", "num_iterations=3"], ("run",)),
    "run/checkpoints/000002/state.pt": (["train", "resume=run", "num_iterations=3"], ("run",)),
    "pairs.jsonl": (["reward", "train", "pairs.jsonl", "backbone=attributes"], ("preference",)),
    "images/0.png": (["reward", "score", "jpeg_compressibility", "images", "--prompt=a"], ("scores.csv",)),
}
"""A file, the command that reads it, and what that may change."""


def _cut(data: bytes, rng: random.Random) -> bytes:
    return data[: rng.randrange(len(data))]


def _flip(data: bytes, rng: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(8):
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


_DAMAGE: dict[str, Callable[[bytes, random.Random], bytes]] = {
    "empty": lambda data, rng: b"",
    "cut": _cut,
    "flipped": _flip,
    "noise": lambda data, rng: rng.randbytes(2000),
    "zeros": lambda data, rng: bytes(len(data)),
    "nested": lambda data, rng: b"[" * 100_000,
    "list": lambda data, rng: b"[1, 2, 3]\n",
    "null": lambda data, rng: b"null\n",
    "strings": lambda data, rng: b'{"format": "x", "iteration": "y", "prompt": {"a": []}}\n',
    "utf-16": lambda data, rng: "prompt: \u00e4".encode("utf-16"),
    "surrogate": lambda data, rng: b'{"prompt": "\\ud800"}\n',
}


def _damaged(name: str, how: str, seed: int) -> Callable[[Path], None]:
    def prepare(folder: Path) -> None:
        path = folder / name
        if how == "folder":
            path.unlink()
            path.mkdir()
        elif how == "missing":
            path.unlink()
        elif how == "loop":
            path.unlink()
            path.symlink_to(path.name)
        elif how == "pipe":
            path.unlink()
            os.mkfifo(path)
        else:
            path.write_bytes(_DAMAGE[how](path.read_bytes(), random.Random(seed)))

    return prepare


def file_trials(rng: random.Random, count: int) -> Iterator[Trial]:
    """A file that is damaged, or is something else; a refusal must name it."""
    pool = [(name, how) for name in _READERS for how in (*_DAMAGE, "folder", "missing", "loop", "pipe")]
    for number, (name, how) in enumerate(rng.sample(pool, count)):
        words, changes = _READERS[name]
        yield Trial(
            name=f"file {name.strip()} {how} ({words[0]})", words=words, expect="either",
            says=(Path(name.strip()).name.split(".")[0] + "|" + name.strip().split("/")[0],),
            prepare=_damaged(name.strip(), how, number), changes=changes,
        )  # fmt: skip
