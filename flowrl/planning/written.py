"""Writes the text of a configuration: the keys that you change first, each with its meaning."""

from __future__ import annotations

import dataclasses
import os
import textwrap
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from flowrl.config.base import config_files, find_config, read_with_base
from flowrl.config.key_docs import first_sentence, key_docs
from flowrl.config.strict_yaml import apply_override
from flowrl.config.train import TrainConfig, load_config, mapping_of, resolve_path

SHOWN = ("seed", "num_iterations", "prompts_per_step", "group_size", "pipeline.model", "policy.lora_rank",
         "sampler.num_steps", "sampler.guidance_scale", "optim.lr", "prompts.train", "prompts.eval", "rewards",
         "eval_every", "checkpoint_every")  # fmt: skip
"""Keys that you change first; they are written even if the base has the same value."""
COLUMN = 40
WIDTH = 120


def text_of(config: TrainConfig, base: str | None, head: Sequence[str], sized: Collection[str] = ()) -> str:
    """YAML of a configuration's differences to its base (None writes all settings), and of `SHOWN`, with each key's
    meaning. `head` are the first paragraphs, as comments; `sized` are keys that were set for the card or the time."""
    own = mapping_of(config)
    data: dict[str, Any] = own
    if base is not None:  # a shipped one by its name, so that another machine finds it
        name = Path(base).stem
        data = {"base": name if config_files().get(name) in (Path(base), find_config(base)) else os.path.abspath(base)}
    differing = set() if base is None else set(_differing(config, load_config(find_config(base))))
    for key in (*SHOWN, *sorted(differing - set(SHOWN))) if base is not None else ():
        value: Any = own
        for part in key.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        if value is not None or key in differing:
            if key.endswith("rewards"):  # without what they have by default
                value = [{name: one for name, one in entry.items() if one not in (None, {}, [])} for entry in value]
            set_at(data, key, value)
    wrapper = textwrap.TextWrapper(WIDTH, initial_indent="# ", subsequent_indent="#   ", break_on_hyphens=False)
    comments = [line for part in head for line in wrapper.wrap(part)]
    return "\n".join([*comments, *_lines(data, set(sized)), ""])


def written_keys(base: str, keys: dict[str, Any], overrides: Sequence[str]) -> list[str]:
    """Lines of dotted keys on top of a base, then of ``key=value`` of the plan, with comments."""
    data = settings_on(base, keys)
    for override in overrides:
        apply_override(data, override)
    return _lines(_plain(data), {override.partition("=")[0] for override in overrides})


def settings_on(base: str, keys: dict[str, Any]) -> dict[str, Any]:
    """Dotted keys on top of a base, section by section."""
    data: dict[str, Any] = {"base": base}
    below = read_with_base(config_files()[base])
    if keys["pipeline.model"] != below["pipeline"]["model"] and "revision" in below["pipeline"]:
        set_at(data, "pipeline.revision", None)
    for key, value in keys.items():
        set_at(data, key, value)
    return data


def placed(file: str) -> str:
    """A file by a path that works from any folder; assets and data sets keep their names. Raises ConfigError: none."""
    return file if file.startswith(("asset:", "dataset:")) else str(resolve_path(file).resolve())


def set_at(data: dict[str, Any], dotted: str, value: Any) -> None:
    """Sets a dotted key, in place; makes missing sections."""
    *sections, last = dotted.split(".")
    for section in sections:
        data = data.setdefault(section, {})
    data[last] = value


def _differing(one: Any, other: Any, prefix: str = "") -> Iterator[str]:
    """Dotted keys in which two configurations differ, section by section; options and lists are compared as a whole."""
    for field in dataclasses.fields(one):
        mine, theirs = getattr(one, field.name), getattr(other, field.name)
        if dataclasses.is_dataclass(mine):
            yield from _differing(mine, theirs, f"{prefix}{field.name}.")
        elif mine != theirs:
            yield f"{prefix}{field.name}"


def _plain(value: Any) -> Any:
    """Values without the marks of overrides."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return getattr(value, "value", value)


def _lines(data: dict[str, Any], sized: set[str]) -> list[str]:
    docs = {doc.key: first_sentence(doc.text) for doc in key_docs(TrainConfig)}
    lines = []
    for key, value in sorted(data.items(), key=lambda item: (item[0] != "base", isinstance(item[1], (dict, list)))):
        if isinstance(value, dict) and value:
            lines.append(f"{key}:")
            for name, inner in value.items():
                lines += _line(f"  {name}", inner, f"{key}.{name}", docs, sized)
        elif key == "rewards" and value:
            lines += ["rewards:", *(f"- {_flow(item)}" for item in value)]
        else:
            lines += _line(key, value, key, docs, sized)
    return lines


def _line(name: str, value: Any, key: str, docs: dict[str, str], sized: set[str]) -> list[str]:
    """A key and its value, with its meaning beside it, or above if there is no room."""
    text, indent = f"{name}: {_flow(value)}", name[: len(name) - len(name.lstrip())]
    said, mark = docs.get(key, "").replace("`", "").partition(";")[0], " [fitted]" if key in sized else ""
    if not said:
        return [text]
    for told in (said, said.partition(": ")[0]):  # what is before a colon says it in short
        if len(beside := f"{text:<{COLUMN}}  # {told}{mark}") <= WIDTH:
            return [beside]
    return [*textwrap.wrap(said + mark, WIDTH, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}# "), text]


def _flow(value: Any) -> str:
    text: str = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=10_000, allow_unicode=True)
    return text.removesuffix("\n").removesuffix("\n...")
