"""A run's inputs, kept in its manifest, and what of them a continued run may change (`RESUME_KEYS`).

config     every setting by its dotted key, except `RESUME_KEYS` and the addresses of servers
model      its files, each with a digest, or the commit of a hub repository
init_lora  its files
teachers   files of their LoRAs
prompts    eight letters of a digest for each row: its text, metadata, negative prompt and images
rewards    what every reward says is its version, in which the digests of users' files are, and those of files and
           folders that its options name
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flowrl.config.rewards import RewardConfig
from flowrl.config.train import TrainConfig, location_of, resolve_path
from flowrl.runtime.digests import text_digest
from flowrl.runtime.files import plain
from flowrl.runtime.former_names import KEYS
from flowrl.training.model_files import digest_of_file, digests_of, hub_commit, named_files, same_digest

if TYPE_CHECKING:
    from flowrl.rewards.compose import WeightedSum
    from flowrl.training.prompting import RunPrompts

RESUME_KEYS = (
    "resume", "num_iterations", "progress", "threads", "checkpoint_every", "keep_checkpoints", "prompts.cache",
    "pipeline.offload", "optim.offload", "parallel.shard", "parallel.replicate", "parallel.context",
    "workers.rollouts", "workers.shard", "workers.rewards", "workers.address", "workers.rollout_gpus",
    "workers.reward_gpus", "workers.reward_env", "logging.tensorboard", "logging.wandb", "logging.trackio",
    "logging.project", "logging.entity",
)  # fmt: skip
"""Settings that a resumed run may change: none of them moves what an iteration computes."""
MOVED = re.compile(r"(?:eval\.)?rewards\.\d+\.options\.(?:url|port|timeout)")
"""Likewise: where a reward is asked, and how long, which is no part of what it says."""
ALLOW = "resume_changed"
"""The setting that lets a run go on under anything else."""
_ROW = 8  # letters of a prompt row's digest
_FILES = ", files of "  # between a reward and its option; versions before this one sealed none
_NONE = object()


def inputs_of(config: TrainConfig, prompts: RunPrompts) -> dict[str, Any]:
    """A run's inputs, as far as they are known before anything loads."""
    from flowrl.pipelines.places.lora_places import folder_of_lora  # with it comes torch
    from flowrl.prompts.pairs import read_pairs, read_shown

    found = dict[str, str]()
    for key, rows in (("prompts.train", prompts.train), ("prompts.eval", prompts.held_out)):
        found[key] = "".join(
            _row_digest([row.noise_name, row.negative, row.metadata], [*row.sources, *row.references, *row.clips])
            for row in rows
        )
    pairs, images = (config.objective.options.get(key) for key in ("pairs", "images"))
    if isinstance(pairs, str):
        found["pairs"] = "".join(
            _row_digest([pair.prompt, pair.margin], [str(pair.winner), str(pair.loser)])
            for pair in read_pairs(resolve_path(pairs))
        )
    if isinstance(images, str):
        shown = read_shown(resolve_path(images))
        found["images"] = "".join(_row_digest([one.prompt], [str(one.image)]) for one in shown)
    lora = config.policy.init_lora
    settings = {key: value for key, value, _ in _settings(config)}
    files = {} if lora is None else digests_of(folder_of_lora(resolve_path(lora)))
    inputs = {"config": settings, "prompts": found, "model": model_of(config), "init_lora": files}
    inputs["teachers"] = {}
    for place, own in enumerate(teacher.lora for teacher in config.policy.teachers):
        held = {} if own is None else digests_of(folder_of_lora(resolve_path(own)))
        inputs["teachers"] |= {f"{place}/{name}": digest for name, digest in held.items()}
    return dict(json.loads(json.dumps(plain(inputs), default=str)))  # as JSON gives it back: tuples are lists


def model_of(config: TrainConfig) -> dict[str, str]:
    """The files of a run's model; the commit of one on the hub, which is known when it has been downloaded."""
    location = location_of(config.pipeline)
    if Path(location).exists():
        return digests_of(Path(location))
    commit = hub_commit(location)
    return {} if commit is None else {"commit": commit}


def versions_of(reward: WeightedSum, measured: WeightedSum | None) -> dict[str, str]:
    """What the rewards of training and evaluations say they are, and digests of the files that their options name."""
    found = {}
    for kind, terms in (("eval reward", () if measured is None else measured.terms), ("reward", reward.terms)):
        for term in terms:
            found[f"{kind} {term.key}"] = term.reward.version
            for option, digest in named_files(term.entry.options).items():
                found[f"{kind} {term.key}{_FILES}{option}"] = digest
    return found


def reproduced_in(reward: WeightedSum, measured: WeightedSum | None) -> dict[str, str]:
    """What those rewards reproduce that have a published name, and against what that was checked; by their keys. A
    reward that another one asks, such as the scorer of `win_rate`, stands under both names."""
    lines: dict[str, str] = {}
    for kind, terms in (("reward", reward.terms), ("eval reward", () if measured is None else measured.terms)):
        for term in terms:
            lines |= _lines(f"{kind} {term.key}", term.entry.name, term.entry.options)
    return lines


def _lines(key: str, name: str | None, options: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    from flowrl.rewards import reproduction_of

    if (line := reproduction_of(name, options)) is not None:
        yield key, line
    for place in (options, options.get("comparator")):
        if isinstance(place, Mapping) and isinstance(inner := place.get("reward"), str):
            yield from _lines(f"{key}/{inner}", inner, place.get("options") or {})


def digest_of(inputs: Mapping[str, Any]) -> str:
    """A short digest of a run's inputs, for its checkpoints."""
    return text_digest(json.dumps(inputs, sort_keys=True))


def changes(before: Mapping[str, Any], now: Mapping[str, Any], config: TrainConfig) -> list[str]:
    """What differs between two results of `inputs_of`, a line each; compares only what both have. A setting that a
    newer version added is no change at its default."""
    defaults = {key for key, _, default in _settings(config) if default}
    found = []
    for part in (part for part in now if part in before):
        old, new = before[part], now[part]
        if part == "config":
            old = {KEYS.get(key, key): value for key, value in old.items()}
        if part in ("model", "init_lora", "teachers"):
            found += _changed_files(part, old, new)
            continue
        for key in [key for key in {**old, **new} if old.get(key, _NONE) != new.get(key, _NONE)]:
            newly_known = key not in old and (key in defaults or (part == "rewards" and _FILES in key))
            if not newly_known:
                found.append(_change(part, key, old.get(key, _NONE), new.get(key, _NONE)))
    return found


def _changed_files(part: str, old: Mapping[str, str], new: Mapping[str, str]) -> list[str]:
    """What changed in the files of a model or LoRA, in a line; empty if nothing did."""
    if part == "model" and not (old and new):
        return []  # on the hub, and not downloaded at one of the two times
    names = [name for name in {**old, **new} if not same_digest(old.get(name), new.get(name))]
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return [f"{part}: changed are {', '.join(names[:3])}{more}"] if names else []


def _change(part: str, key: str, old: Any, new: Any) -> str:
    """What changed in a setting, the prompt rows, or a reward's version, in a line."""
    if part == "prompts":
        texts = ("" if rows is _NONE else str(rows) for rows in (old, new))
        before, now = (Counter(text[at : at + _ROW] for at in range(0, len(text), _ROW)) for text in texts)
        gone, come = (before - now).total(), (now - before).total()
        both = min(gone, come)
        counts = {"changed": both, "added": come - both, "removed": gone - both}
        words = [f"{count} {word}" for word, count in counts.items() if count]
        return f"{key}: of {before.total()} rows {', '.join(words) or 'the order changed'}"
    shown = ["not there" if value is _NONE else json.dumps(value, ensure_ascii=False) for value in (old, new)]
    return f"{f'config: {key}' if part == 'config' else f'{key}: version'} {' -> '.join(shown)}"


def settings_of(config: TrainConfig) -> dict[str, Any]:
    """Every setting by its dotted key, those that a resumed run may change too; but for the addresses of servers."""
    return {key: value for key, value, _ in _settings(config, left_out=())}


def _settings(
    value: Any, key: str = "", *, left_out: Sequence[str] = (*RESUME_KEYS, ALLOW, "out")
) -> Iterator[tuple[str, Any, bool]]:
    """Dotted keys of a configuration, their values, and whether they are the defaults."""
    for field in fields(value):
        name, part = f"{key}{field.name}", getattr(value, field.name)
        if name in left_out:
            continue
        if isinstance(value, RewardConfig) and field.name == "options" and value.name is not None:
            from flowrl.rewards import addresses_of  # it imports torch, which a mistake in a key need not wait for
            from flowrl.rewards.judges.chat import with_identities

            part = {option: given for option, given in part.items() if option not in addresses_of(value.name)}
            part = with_identities(part)
        if is_dataclass(part):
            yield from _settings(part, f"{name}.", left_out=left_out)
        elif isinstance(part, tuple) and any(is_dataclass(one) for one in part):
            for number, one in enumerate(part):
                yield from _settings(one, f"{name}.{number}.", left_out=left_out)
        else:
            default = field.default_factory() if field.default_factory is not MISSING else field.default
            yield name, part, bool(part == default)


def _row_digest(words: Sequence[Any], images: Sequence[str]) -> str:
    text = json.dumps([*words, *(digest_of_file(Path(image)) for image in images)], sort_keys=True, default=str)
    return text_digest(text, _ROW)
