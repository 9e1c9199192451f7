"""Which configuration a first one builds on: that of the model, else of its family, nearest in reward and card."""

from __future__ import annotations

from dataclasses import dataclass

from flowrl.config.base import config_files, read_with_base
from flowrl.config.train import is_here, resolve_path

EVERYDAY, EVERYDAY_EVAL = "asset:prompts/everyday.txt", "asset:prompts/everyday_eval.txt"
"""Prompts that ship and are of no benchmark."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Wish:
    """What a first configuration is for; None leaves a thing to the configuration that it builds on."""

    model: str
    card: int
    reward: str | None = None
    prompts: str | None = None
    eval_prompts: str | None = None
    train: str = "lora"
    kernel: str = "flow_sde"


def base_for(wish: Wish) -> str:
    """The name of the configuration to build on; asks for the model's family, which loads light stand-ins of torch.

    Raises:
        ValueError: none of those that ship is for the model or its family.
    """
    from flowrl.pipelines import known_family
    from flowrl.planning.verdict import card_of

    family = known_family(location(wish.model))
    ranked = []
    for name, path in config_files().items():
        card = card_of(name)
        if card not in (None, wish.card):
            continue
        data = read_with_base(path)
        model = data["pipeline"]["model"]
        # Whether it trains by outcomes alone, as Flow-GRPO and DanceGRPO do, from which the others differ.
        credit = data.get("credit", {}).get("method", "outcome")
        named = [data.get(section, {}).get("name") for section in ("objective", "shaping", "reward_map")]
        if not (data.get("recipe", "grpo") == "grpo" and credit == "outcome" and not any(named)):
            continue
        same = model == wish.model
        if not same and (family is None or known_family(location(model)) != family):
            continue
        rewards = [reward.get("name") for reward in data["rewards"]]
        sampler = data["sampler"]
        other = (sampler["kernel"] != wish.kernel) + (sampler.get("sde_window_size", 0) > 0)  # than plain Flow-GRPO
        trained = data.get("policy", {}).get("train", "lora") != wish.train
        away = wish.reward not in (None, *rewards)
        ranked.append((trained, not same, away, card is None, other, len(rewards), len(data), name))
    if not ranked:
        raise ValueError(
            f"no configuration ships for {wish.model}{f', of the family {family}' if family else ''}: give a model of "
            "'flowrl list families', a folder of one, or write a file by docs/generic.md"
        )
    return min(ranked)[-1]


def prompts_are_here(base: str) -> bool:
    """Whether the training prompts of a configuration that ships exist on this machine."""
    return is_here(read_with_base(config_files()[base])["prompts"]["train"])


def location(model: str) -> str:
    """Where a model is, as families are asked."""
    return str(resolve_path(model)) if model.startswith("asset:") else model
