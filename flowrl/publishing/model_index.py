"""Writes evaluations into the metadata of a model card for the hub: `model-index` in the front matter of README.md.

A result has task, dataset (the benchmark, with the conditions as its `args`) and metrics (with the 95 % interval as
their `args`), built by the hub's own library. In an existing README.md only this block changes: all other bytes stay,
results of others and of other conditions stay in the block, and results of the same conditions get new numbers.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from flowrl.benchmarks.judged.protocols import PROTOCOLS
from flowrl.evaluation.board.board import of_one_model
from flowrl.evaluation.board.comparable import PROMPTS, conditions, judge_of
from flowrl.evaluation.board.finished import BoardEntry
from flowrl.media.lossless import CLIPS
from flowrl.rendering.markup import plural
from flowrl.runtime.files import plain, read_text, write_atomically
from flowrl.runtime.public import public
from flowrl.statistics.bootstrap import LEVEL, point

__all__ = ["WrittenCard", "model_card"]

INDEX = "model-index"
NOT_NUMBERS = ("_low", "_high", "_failed", "skipped", "skipped_ratio")
"""Endings of metrics that describe how another one was found."""
_KEY = re.compile(rf"""(?:{INDEX}|"{INDEX}"|'{INDEX}')\s*:""")
_FENCE = re.compile(r"---[ \t]*\r?\n?")

Block = dict[str, Any]


def add_to_card(path: Path, name: str, entries: Sequence[BoardEntry]) -> tuple[str, int]:
    """Merges evaluations into the README.md; creates a missing one, under `name` if the card has none.

    Returns the new block, and how many numbers were written. Raises ValueError: its front matter cannot be read, or
    cannot be changed without loss; nothing was written.
    """
    text = ""
    if path.exists():
        read_text(path)  # says what is wrong with it
        text = path.read_bytes().decode("utf-8")  # with its mark and line ends as they are
    changed, block = text_with(text, name, entries, str(path))
    write_atomically(path, changed)
    return block, sum(len(numbers_of(entry)) for entry in entries)


def text_with(text: str, name: str, entries: Sequence[BoardEntry], place: str) -> tuple[str, str]:
    """The text of a card with evaluations, and the block in it; errors as in `add_to_card` name the `place`."""
    head, front, rest = split_front(text, place)
    known = _mapping(front, place)
    block = dump_yaml({INDEX: merge_index(known.get(INDEX), model_index(name, entries), place)})
    changed = _replace_block(front, block.replace("\n", "\r\n") if "\r\n" in head + front else block, place)
    if _mapping(changed, place) != {**known, INDEX: yaml.safe_load(block)[INDEX]}:
        raise ValueError(
            f"{place}: its front matter is written in a way that cannot be changed without loss (such as anchors in "
            f"{INDEX} that other keys use); add this by hand:\n{block}"
        )
    return head + changed + rest, block


def model_index(name: str, entries: Sequence[BoardEntry]) -> list[Block]:
    """Builds the block for one model. Raises ValueError: two results of one benchmark under the same conditions."""
    from huggingface_hub.repocard_data import EvalResult, eval_results_to_model_index

    results: list[Block] = []
    for entry in entries:
        known = {key: len(value) if key == PROMPTS else value for key, value in conditions(entry, "").items()}
        if entry.drawn is not None:
            known |= {"prompts_hash": entry.drawn.get("prompts"), "seed": entry.drawn.get("seed")}
        known = {key.replace(" ", "_").replace("'s", ""): value for key, value in plain(known).items()}
        if isinstance(entry.facts.get("versions"), Mapping):  # each number says its own
            known.pop("judge", None)
        known = {key: value for key, value in known.items() if value is not None}
        # The library takes results for one where task, dataset and its config are the same, whatever their args say.
        mark = hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()[:8]
        config = f"{known[PROMPTS]} prompts, {mark}"
        listed = [
            EvalResult(
                task_type=task_of(entry), dataset_type=entry.benchmark, dataset_name=entry.benchmark,
                dataset_config=config, dataset_args=known,
                metric_type=metric, metric_name=f"{entry.benchmark} {metric.replace('_', ' ')}",
                metric_value=value, metric_args=_metric_args(entry, metric),
            )
            for metric, value in numbers_of(entry).items()
        ]  # fmt: skip
        if not listed:
            raise ValueError(f"{entry.folder} has no number to write into a card: nothing was judged.")
        results += eval_results_to_model_index(name, listed)[0]["results"]
    kept: list[Block] = []
    for result, entry in zip(results, entries, strict=True):
        if any(_conditions_of(other) == _conditions_of(result) for other in kept):
            raise ValueError(
                f"{entry.folder} and another result measure {entry.benchmark} under the same conditions: a card has "
                f"one number for these, leave one out."
            )
        kept.append(result)
    return [{"name": name, "results": kept}]


def numbers_of(entry: BoardEntry) -> dict[str, float]:
    """Known metrics, without those that describe how another was found."""
    return {
        name: value for name, value in entry.metrics.items() if math.isfinite(value) and not name.endswith(NOT_NUMBERS)
    }


def task_of(entry: BoardEntry) -> str:
    """The hub's name of the model's task, from its kind of images."""
    row = entry.rows[0] if entry.rows else {}
    if str(row.get("file", "")).lower().endswith(CLIPS):
        return "text-to-video"
    rules = PROTOCOLS.get(entry.benchmark)
    return "image-to-image" if rules is not None and rules.edits else "text-to-image"


def merge_index(old: Any, new: Sequence[Block], where: str) -> list[Block]:
    """Puts results into the old block, replacing equal conditions. Raises ValueError: the hub cannot read it."""
    from huggingface_hub.repocard_data import model_index_to_eval_results

    if not old:
        return list(new)
    try:
        model_index_to_eval_results(old)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(
            f"{where}: the hub does not understand its {INDEX} ({type(error).__name__}: {error}): correct or "
            f"remove it first."
        ) from error
    place = next((k for k, model in enumerate(old) if model["name"] == new[0]["name"]), 0)
    results = list(old[place]["results"])
    for result in new[0]["results"]:
        same = next((k for k, other in enumerate(results) if _conditions_of(other) == _conditions_of(result)), None)
        if same is None:
            results.append(result)
            continue
        fresh = {metric["type"] for metric in result["metrics"]}
        kept = [metric for metric in results[same]["metrics"] if metric["type"] not in fresh]
        results[same] = {**results[same], "metrics": [*result["metrics"], *kept]}
    return [{**model, "results": results} if k == place else model for k, model in enumerate(old)]


def split_front(text: str, where: str) -> tuple[str, str, str]:
    """Splits a card into the part before the metadata (with the opening line), the metadata, and all from the closing
    line. Raises ValueError: the metadata is never closed."""
    lines = text.splitlines(keepends=True)
    start = next((k for k, line in enumerate(lines) if line.lstrip("\ufeff").strip()), None)
    if start is None or not _FENCE.fullmatch(lines[start].lstrip("\ufeff")):
        end = "\r\n" if "\r\n" in text else "\n"
        mark = "\ufeff" if text.startswith("\ufeff") else ""
        body = text.removeprefix("\ufeff")
        return f"{mark}---{end}", "", f"---{end}" + (end + body if body.strip() else body)
    for k in range(start + 1, len(lines)):
        if _FENCE.fullmatch(lines[k]):
            return "".join(lines[: start + 1]), "".join(lines[start + 1 : k]), "".join(lines[k:])
    raise ValueError(f"{where}: its front matter begins with --- and has no second --- that ends it: add one.")


def dump_yaml(value: Mapping[str, Any]) -> str:
    """Writes YAML in the order of the keys, like the hub's library."""
    return str(yaml.safe_dump(dict(value), sort_keys=False, allow_unicode=True))


def _mapping(front: str, where: str) -> dict[str, Any]:
    try:
        found = yaml.safe_load(front)
    except yaml.YAMLError as error:
        raise ValueError(f"{where}: its front matter is not YAML ({' '.join(str(error).split())}).") from error
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise ValueError(f"{where}: its front matter is not a mapping of keys to values.")
    return found


def _replace_block(front: str, block: str, where: str) -> str:
    """Replaces the block in the metadata, or adds one at its end; keeps all other lines."""
    lines = front.splitlines(keepends=True)
    starts = [k for k, line in enumerate(lines) if _KEY.match(line)]
    if len(starts) > 1:
        raise ValueError(f"{where}: its front matter has {INDEX} {len(starts)} times: keep one of them.")
    if not starts:
        if lines and not lines[-1].endswith("\n"):
            lines[-1] += "\n"
        return "".join(lines) + block
    end = starts[0] + 1
    while end < len(lines) and (not lines[end].strip() or lines[end][0] in " \t-#"):
        end += 1
    while lines[end - 1].strip() == "" or lines[end - 1].startswith("#"):  # they belong to what follows
        end -= 1
    return "".join(lines[: starts[0]]) + block + "".join(lines[end:])


def _metric_args(entry: BoardEntry, metric: str) -> dict[str, Any] | None:
    found: dict[str, Any] = {}
    interval = entry.intervals.get(metric, point(math.nan))
    if interval.known:
        found |= {"low": interval.low, "high": interval.high, "level": LEVEL}
    if judge := judge_of(entry, metric):
        found["judge"] = str(judge)
    return found or None


def _conditions_of(result: Mapping[str, Any]) -> tuple[Any, Any]:
    """The key by which results in one block are told apart."""
    dataset = {key: value for key, value in result["dataset"].items() if key != "name"}
    return result["task"]["type"], yaml.safe_load(yaml.safe_dump(dataset))


@dataclass(frozen=True, kw_only=True, slots=True)
class WrittenCard:
    """A README.md with evaluations in its metadata."""

    path: Path
    block: str
    """Its model-index as it is now."""
    text: str
    """The block, and a line on what was written."""


@public
def model_card(results: Sequence[str | Path], *, out: str | Path | None = None) -> WrittenCard:
    """Adds finished evaluations of one model to the front matter of a README.md.

    Args:
        results: result folders, folders that contain some, or `NAME=FOLDER,FOLDER` for trainings of one method.
        out: the README.md or its folder; None is the folder of the first result.

    Raises:
        FlowrlError: the results are of several models, or the README.md cannot be changed without loss.
    """
    name, entries = of_one_model(results)
    place = entries[0].folder if out is None else Path(out)
    path = place / "README.md" if place.is_dir() or place.suffix != ".md" else place
    block, added = add_to_card(path, name, entries)
    said = f"wrote {path}: model-index with {plural(added, 'number')} of {plural(len(entries), 'evaluation')}"
    return WrittenCard(path=path, block=block, text=f"{block}\n{said}")
