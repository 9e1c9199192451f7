"""The text of a first configuration: what one changes first, each line with what the key means."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from flowrl.config.base import config_files, read_with_base
from flowrl.config.key_docs import first_sentence, key_docs
from flowrl.config.strict_yaml import apply_override
from flowrl.config.train import TrainConfig
from flowrl.migrating.bases import Wish
from flowrl.planning.catalogue import head_of
from flowrl.rendering.terminal_text import cut

SHOWN = ("seed", "num_iterations", "prompts_per_step", "group_size", "policy.lora_rank", "sampler.num_steps",
         "sampler.guidance_scale", "optim.lr", "eval_every", "checkpoint_every")  # fmt: skip
"""What is written even where it is as the base has it: what one changes first."""
COLUMN = 46
WIDTH = 120


def text_of(wish: Wish, base: str, overrides: Sequence[str]) -> str:
    """YAML with a comment for each key, the first sentence of its docstring.

    Args:
        wish: what it is for.
        base: name of the configuration that it builds on.
        overrides: ``key=value`` of the plan, what makes the run fit the card.
    """
    path = config_files()[base]
    below = read_with_base(path)
    data: dict[str, Any] = {"base": base}
    for key in SHOWN:
        value = _at(below, key)
        if value is not None:
            _set(data, key, value)
    _set(data, "pipeline.model", wish.model)
    if wish.model != below["pipeline"]["model"] and "revision" in below["pipeline"]:
        _set(data, "pipeline.revision", None)
    if wish.prompts is not None:
        _set(data, "prompts.train", _placed(wish.prompts))
        _set(data, "prompts.eval", None if wish.eval_prompts is None else _placed(wish.eval_prompts))
        if wish.eval_prompts is None:
            data["eval_every"] = 0
            if _at(below, "budget.evals"):
                _set(data, "budget.evals", 0)
    else:
        _set(data, "prompts", dict(below["prompts"]))
        if wish.eval_prompts is not None:
            _set(data, "prompts.eval", _placed(wish.eval_prompts))
    own = [reward.get("name") for reward in below["rewards"]]
    data["rewards"] = below["rewards"] if wish.reward is None or own == [wish.reward] else [_reward(wish.reward)]
    for override in overrides:
        apply_override(data, override)
    sized = {override.partition("=")[0] for override in overrides}
    top = [
        f"# Written by flowrl init for {wish.model} on one card of {wish.card} GB.",
        f"# It builds on {base}:",
        cut(f"#   {first_sentence(head_of(path.read_text(encoding='utf-8')))}.", WIDTH),
        "# What it does not say is as there; 'flowrl list keys' names all keys.",
    ]
    return "\n".join([*top, *_lines(_plain(data), sized), ""])


def written_keys(base: str, keys: dict[str, Any], overrides: Sequence[str]) -> list[str]:
    """Lines of dotted keys on top of a base, then of ``key=value`` of the plan, with comments."""
    data: dict[str, Any] = {"base": base}
    below = read_with_base(config_files()[base])
    if keys["pipeline.model"] != below["pipeline"]["model"] and "revision" in below["pipeline"]:
        _set(data, "pipeline.revision", None)
    for key, value in keys.items():
        _set(data, key, value)
    for override in overrides:
        apply_override(data, override)
    return _lines(_plain(data), {override.partition("=")[0] for override in overrides})


def _reward(given: str) -> dict[str, Any]:
    file, colon, function = given.rpartition(":")
    return {"file": _placed(file), "function": function} if colon else {"name": given}


def _placed(file: str) -> str:
    """A file as it is found from any folder; assets stay as they are named."""
    return file if file.startswith("asset:") else str(Path(file).expanduser().resolve())


def _at(data: Any, dotted: str) -> Any:
    for part in dotted.split("."):
        data = data.get(part) if isinstance(data, dict) else None
    return data


def _set(data: dict[str, Any], dotted: str, value: Any) -> None:
    *sections, last = dotted.split(".")
    for section in sections:
        data = data.setdefault(section, {})
    data[last] = value


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
        if isinstance(value, dict):
            lines.append(f"{key}:")
            lines += [_line(f"  {name}", inner, f"{key}.{name}", docs, sized) for name, inner in value.items()]
        elif key == "rewards":
            lines += ["rewards:", *(f"- {_flow(item)}" for item in value)]
        else:
            lines.append(_line(key, value, key, docs, sized))
    return lines


def _line(name: str, value: Any, key: str, docs: dict[str, str], sized: set[str]) -> str:
    text, said = f"{name}: {_flow(value)}", docs.get(key, "").partition(";")[0]
    said = "; ".join([*([said] if said else []), *(["set for the card"] if key in sized else [])])
    return cut(f"{text:<{COLUMN}}  # {said}", WIDTH) if said and len(text) < WIDTH - len("  # a word") else text


def _flow(value: Any) -> str:
    text: str = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=10_000, allow_unicode=True)
    return text.removesuffix("\n").removesuffix("\n...")
