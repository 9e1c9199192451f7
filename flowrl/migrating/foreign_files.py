"""Reads configurations of other toolkits: which toolkit a file belongs to, and its keys and values."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from flowrl.config.strict_yaml import dotted_items, parse_yaml, read_mapping
from flowrl.migrating.foreign_python import Reader, choose_function

Made = dict[str, Any] | str
"""Our keys with their values, or why there are none, as in the tables (``- why``, ``! why``)."""
Kind = Literal["flow_grpo", "DiffusionNFT", "DanceGRPO", "MixGRPO", "Flow-Factory", "verl-omni", "UniRL"]
SIGNS = (
    "a .py file with functions that fill a ConfigDict (flow_grpo, DiffusionNFT), YAML with 'model' and 'train', which "
    "names a trainer_type (Flow-Factory), YAML whose algorithm is a class of unirl (UniRL), a shell script that starts "
    "verl_omni with key=value (verl-omni), or one that starts train_grpo_….py with --flags (DanceGRPO, MixGRPO)"
)
_SCRIPT = re.compile(r"train_grpo_\w+\.py")
_PLACE = re.compile(r"\$\{([^${}]*)\}")
_LONGEST = 10_000  # characters of a variable: lines that double one have no end else


@dataclass(frozen=True, kw_only=True, slots=True)
class Foreign:
    """A file of another toolkit: dotted key -> value in its own words, and further facts."""

    kind: Kind
    keys: dict[str, Any]
    said: frozenset[str] = frozenset()
    """Keys that the file itself sets, if others are the toolkit's defaults (flow_grpo)."""
    processes: int | None = None
    """GPUs that the file is for; None if it does not say."""
    script: str = ""
    """The program that a shell script starts (DanceGRPO)."""


def read_foreign(given: str) -> Foreign:
    """Reads ``FILE`` or ``FILE.py:FUNCTION``; runs none of it. Raises ValueError: there is no such file, no toolkit has
    such files, or it cannot be read."""
    file, _, function = given.partition(".py:")
    path = Path(f"{file}.py" if function else given)
    if not path.is_file():
        raise ValueError(f"there is no file {path}: `source` is FILE, or FILE.py:FUNCTION")
    if path.suffix == ".py":
        reader = Reader(path)
        tree = reader.call(path, choose_function(path, function or None))
        try:
            keys = _flat(tree)
        except RecursionError:
            raise ValueError(f"{path}: its configuration holds itself, so it has no end") from None
        processes = reader.numbers.get("gpu_number", reader.numbers.get("n_gpus"))
        kind: Kind = "DiffusionNFT" if "decay_type" in keys else "flow_grpo"
        return Foreign(kind=kind, keys=keys, said=frozenset(reader.said), processes=processes)
    if path.suffix in (".yaml", ".yml"):
        return _yaml(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (UnicodeDecodeError, OSError):
        raise ValueError(f"{path} is no text that can be read; `source` reads {SIGNS}") from None
    lines = [line for line in text.replace("\\\n", " ").splitlines() if not line.lstrip().startswith("#")]
    for line in lines:
        if "verl_omni" in line and re.search(r"\s\+*[\w.]+=", line):
            return _hydra(path, text, line)
        if _SCRIPT.search(line) and " --" in line:
            return _flags(path, text, line)
    raise ValueError(f"{path} is of no toolkit that is known here; looked for {SIGNS}")


def _yaml(path: Path) -> Foreign:
    data = read_mapping(path)
    train, algorithm = data.get("train"), data.get("algorithm")
    if isinstance(algorithm, dict) and str(algorithm.get("_target_")).startswith("unirl."):
        return Foreign(kind="UniRL", keys=_resolved(_flat(data)), processes=data.get("num_devices"))
    if not isinstance(train, dict) or "trainer_type" not in train or not isinstance(data.get("model"), dict):
        raise ValueError(f"{path} is of no toolkit that is known here; looked for {SIGNS}")
    for key in ("rewards", "eval_rewards"):  # one reward may stand without a list
        if isinstance(data.get(key), dict):
            data[key] = [data[key]]
    return Foreign(kind="Flow-Factory", keys=_flat(data), processes=data.get("num_processes"))


def _hydra(path: Path, text: str, line: str) -> Foreign:
    variables, keys = _variables(text), dict[str, Any]()
    for word in _words(path, line, variables):
        key, equals, value = word.lstrip("+").partition("=")
        if equals and "." in key:
            keys[key] = _parsed(_filled(value, variables))
    return Foreign(kind="verl-omni", keys=keys)


def _flags(path: Path, text: str, line: str) -> Foreign:
    variables = _variables(text)
    words = _words(path, line, variables)
    place = next(k for k, word in enumerate(words) if _SCRIPT.search(word))
    started, keys = _options(words[:place], variables), _options(words[place + 1 :], variables)
    nodes, each = started.get("nnodes", 1), started.get("nproc_per_node")
    known = isinstance(nodes, int) and isinstance(each, int)
    kind: Kind = "MixGRPO" if "iters_per_group" in keys else "DanceGRPO"
    return Foreign(kind=kind, keys=keys, processes=nodes * each if known else None, script=Path(words[place]).name)


def _options(words: list[str], variables: dict[str, str]) -> dict[str, Any]:
    """``--flags`` with their values, true of those without."""
    found = dict[str, Any]()
    for word, after in zip(words, [*words[1:], "--"], strict=True):
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            found[name] = _parsed(_filled(value if equals else "true" if after.startswith("--") else after, variables))
    return found


def _words(path: Path, line: str, variables: dict[str, str]) -> list[str]:
    line = re.sub(r"\$\(\(.*?\)\)", lambda found: _filled(found[0], variables), line.rstrip().rstrip("\\"))
    if line.count('"') % 2:  # of a command that another machine is told in quotes
        line = line.removesuffix('"')
    try:
        return shlex.split(line, comments=True)
    except ValueError as error:
        raise ValueError(f"{path}: the command cannot be read: {error}") from None


def _variables(text: str) -> dict[str, str]:
    """Variables that a script sets; later lines win."""
    found: dict[str, str] = {}
    for name, value in re.findall(r"^\s*(?:export )?(\w+)=(\S*)", text, flags=re.MULTILINE):
        plain = re.sub(r":\?.*", "}", value.strip("'\""))  # ${NAME:?what is said where it is not set
        filled = _filled(plain, found)
        found[name] = filled if len(filled) <= _LONGEST else plain
    return found


def _filled(text: str, variables: dict[str, str]) -> str:
    """A word with its variables filled in and a sum of two whole numbers computed; unknown parts stay unchanged."""
    text = re.sub(r"\$\{(\w+):-([^}]*)\}", lambda m: variables.get(m[1], m[2]), text)
    text = re.sub(r"\$\{?(\w+)\}?", lambda m: variables.get(m[1], m[0]), text)
    filled = re.sub(r"[A-Za-z_]\w*", lambda m: variables.get(m[0], m[0]), text)
    sum_of_two = re.fullmatch(r"\$\(\(\s*(\d{1,9})\s*([*/+-])\s*(\d{1,9})\s*\)\)", filled)
    if sum_of_two is None:
        return text
    left, sign, right = int(sum_of_two[1]), sum_of_two[2], int(sum_of_two[3])
    if sign == "/":
        return str(left // right) if right else text
    return str({"*": left * right, "+": left + right, "-": left - right}[sign])


def _parsed(text: str) -> Any:
    try:
        return parse_yaml(text, "a value")
    except ValueError:
        return text


def _resolved(keys: dict[str, Any]) -> dict[str, Any]:
    """Keys with what ``${oc.env:NAME,value}`` and ``${section.key}`` stand for, in place."""

    def told(found: re.Match[str]) -> str:
        name, _, rest = found[1].partition(":")
        variable, comma, default = rest.partition(",")
        return (default if comma else f"${variable}") if name == "oc.env" else rest or str(keys.get(name, name))[:1000]

    for key, value in keys.items():
        while isinstance(value, str) and len(value) <= _LONGEST and (text := _PLACE.sub(told, value)) != value:
            keys[key] = _parsed(value := text)
    return keys


def _flat(data: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted key -> value, ``rewards[0].name`` within lists of mappings; empty sections stay whole."""
    found: dict[str, Any] = {}
    for name, value in dotted_items(data, prefix):
        if isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
            for place, item in enumerate(value):
                found |= _flat(item, f"{name}[{place}].")
        else:
            found[name] = value
    return found
