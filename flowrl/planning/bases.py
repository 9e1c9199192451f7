"""Chooses the base of a first configuration: that of the model or its family with the nearest reward and card."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowrl.config.base import config_files, read_with_base
from flowrl.config.train import resolve_path

EVERYDAY, EVERYDAY_EVAL = "asset:prompts/everyday.txt", "asset:prompts/everyday_eval.txt"
"""Prompts that ship and belong to no benchmark."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Wish:
    """Wishes for a first configuration; None is its base's. `recommended` takes a base of that recipe if one ships."""

    model: str
    card: int
    reward: str | None = None
    prompts: str | None = None
    eval_prompts: str | None = None
    train: str = "lora"
    kernel: str = "flow_sde"
    recommended: bool = False


def base_for(wish: Wish) -> str:
    """The base's name; loads light stand-ins of torch. Raises ValueError: nothing ships for the model's family."""
    from flowrl.pipelines import known_family
    from flowrl.pipelines.places.hub_files import did_you_mean
    from flowrl.planning.verdict import card_of

    family = known_family(location(wish.model))
    ranked = []
    for name, path in config_files().items():
        if (card := card_of(name)) not in (None, wish.card):
            continue
        data = read_with_base(path)
        model = data["pipeline"]["model"]
        suits = wish.recommended and name.endswith("_recommended")
        same = model == wish.model
        if not (suits or is_plain(data)) or not (same or (family and known_family(location(model)) == family)):
            continue
        rewards = [reward.get("name") for reward in data["rewards"]]
        sampler = data["sampler"]
        other = (sampler["kernel"] != wish.kernel) + (sampler.get("sde_window_size", 0) > 0)  # than plain Flow-GRPO
        trained = data.get("policy", {}).get("train", "lora") != wish.train
        away = wish.reward not in (None, *rewards)
        embedded = model.startswith("asset:") != wish.model.startswith("asset:")
        served = any("server" in (reward.get("options", {}).get("judge") or ()) for reward in data["rewards"])
        first = (embedded, trained, wish.recommended and not suits, not same, away, served, card is None, other)
        ranked.append((*first, len(rewards), len(data), name))
    if not ranked:
        what = f", of the family {family}" if family else did_you_mean(wish.model)
        raise ValueError(
            f"no configuration ships for {wish.model}{what}: give a model of "
            "'flowrl list families', a folder of one, or write a file by docs/generic.md"
        )
    return min(ranked)[-1]


def configs_of(recipe: str) -> list[str]:
    """Names of the shipped configurations for a recipe, those of the embedded models last."""
    found = [name for name, path in config_files().items() if read_with_base(path).get("recipe", "grpo") == recipe]
    return sorted(found, key=lambda name: (name.startswith("tiny_"), name))


def is_plain(data: Mapping[str, Any]) -> bool:
    """Whether a configuration trains only by outcomes, like Flow-GRPO and DanceGRPO."""
    credit = data.get("credit", {}).get("method", "outcome")
    named = [data.get(section, {}).get("name") for section in ("objective", "shaping", "reward_map")]
    plain = data.get("recipe", "grpo") == "grpo" and credit == "outcome" and "curriculum" not in data
    return plain and not any(named)


def is_model(given: str) -> bool:
    """Whether the argument of a plan is a model: an asset, a hub id, a model folder or a file of weights."""
    if given in config_files() or given.endswith((".yaml", ".yml")):
        return False
    folder = Path(given).expanduser()
    if folder.is_dir():
        return (folder / "model_index.json").is_file()
    return given.startswith("asset:") or given.endswith(".safetensors") or given.count("/") == 1


def location(model: str) -> str:
    """Where a model is, as families are asked."""
    return str(resolve_path(model)) if model.startswith("asset:") else model
