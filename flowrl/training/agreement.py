"""Processes train together only if they were given the same run: what they compare, and the words for differences.

Before anything loads (`facts_of`): every setting but those of `OWN`, prompts by their content, files that settings
name, the model's files, versions of libraries, the kind of device. After loading: versions of rewards, the commit of a
model from the hub. Differing attention kernels and cards only give a note, because they move numbers by rounding.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from flowrl.config.locations import is_path
from flowrl.config.train import ConfigError, TrainConfig, resolve_path
from flowrl.runtime.digests import text_digest
from flowrl.runtime.versions import numbers, versions
from flowrl.training.model_files import digest_of_file, files_of
from flowrl.training.processes.devices import device_kind
from flowrl.training.processes.meeting import process_words
from flowrl.training.resume_check import settings_of

OWN = ("out", "progress", "threads", "pipeline.device")
"""Settings that each process may have for itself: process 0's folder and progress are those of the run, threads and
device are of a machine. Addresses of reward servers are a process's own too; what answers there is compared later."""
_ONLY_WHETHER = ("resume", "prompts.cache")
"""Places on a machine's own disks, of which it matters only whether they are set."""
_MOST = 8  # differences to list
_LONGEST = 60  # characters shown of a value

Facts = Mapping[str, str]


def facts_of(config: TrainConfig, inputs: Mapping[str, Any], *, resumed: bool) -> dict[str, str]:
    """What a process was given, by name and in short form. `inputs` are
    `flowrl.training.resume_check.inputs_of` them; `resumed`: a run is continued."""
    settings = settings_of(config)
    settings |= {key: settings.get(key) is not None for key in _ONLY_WHETHER} | {"resume": resumed}
    settings = {key: value for key, value in settings.items() if key not in OWN}
    found = {key: json.dumps(value, ensure_ascii=False, default=str) for key, value in settings.items()}
    for key, value in settings.items():
        if not key.startswith(("prompts.", "pipeline.model", "policy.init_lora")):  # their content is in the inputs
            found |= {f"content of {key} ({text})": digest for text, digest in _contents(value)}
    for key, rows in inputs["prompts"].items():
        found[f"content of {key}"] = f"{len(str(rows)) // 8} rows ({text_digest(str(rows), 8)})"
    for part in ("model", "init_lora"):
        files = {name: digest for name, digest in inputs[part].items() if name != "commit"}  # it may yet be downloaded
        found |= {f"{part} file {name}": digest for name, digest in files.items()}
    for name, version in versions().items():
        exact = version is None or name.startswith("flowrl")
        found[f"version of {name}"] = str(version) if exact else ".".join(map(str, numbers(str(version))[:2]))
    found["version of Python"] = ".".join(platform.python_version_tuple()[:2])
    return found | {"kind of device": device_kind(config.pipeline.device)}


def loaded_facts(inputs: Mapping[str, Any]) -> dict[str, str]:
    """What is known of a process after loading: the commit of its model, the versions of its rewards."""
    commit = {"commit of the model": str(inputs["model"]["commit"])} if "commit" in inputs["model"] else {}
    return commit | {f"version of {name}": str(version) for name, version in inputs["rewards"].items()}


def difference(given: Sequence[Facts]) -> str:
    """Why processes cannot train together: what differs between their facts (by rank), with the values; or ""."""
    lines = list(_lines(given))
    if not lines:
        return ""
    more = f"\n  and {len(lines) - _MOST} more" if len(lines) > _MOST else ""
    return (
        "the processes of this run were given different inputs, so none of them trains:\n  "
        + "\n  ".join(lines[:_MOST])
        + f"{more}\nEach process needs the same command, config.yaml, files and versions; only "
        f"{', '.join(OWN)} and the places of {' and '.join(_ONLY_WHETHER)} may differ"
    )


def rounding_note(given: Sequence[Facts]) -> str:
    """A line for what may differ but moves numbers by rounding; empty if nothing does."""
    lines = list(_lines(given))
    return f"Note: processes differ, so their numbers may differ by rounding: {'; '.join(lines)}." if lines else ""


def _lines(given: Sequence[Facts]) -> Iterator[str]:
    for name in dict.fromkeys(name for facts in given for name in facts):
        held: dict[str, list[int]] = {}
        for rank, facts in enumerate(given):
            held.setdefault(facts.get(name, "not there"), []).append(rank)
        said = []
        for value, ranks in held.items():
            short = value if len(value) <= _LONGEST else f"{value[: _LONGEST - 16]} ... ({text_digest(value, 8)})"
            said.append(f"{short} in {process_words(ranks, 4)}")
        if len(said) > 1:
            yield f"{name}: {', '.join(said)}"


def _contents(value: Any) -> Iterator[tuple[str, str]]:
    """Files and folders that a setting names, each with a digest."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for one in value:
            yield from _contents(one)
    if not isinstance(value, str) or not 0 < len(value) < 1000:
        return
    try:
        path = resolve_path(value)
        if path.is_file():
            yield value, digest_of_file(path)
        elif is_path(value) and path.is_dir():  # a word that happens to be a folder's name is not one
            held = "".join(f"{name}:{digest_of_file(file)};" for name, file in files_of(path).items())
            yield value, text_digest(held)
    except (ConfigError, OSError, ValueError):  # no path
        return
