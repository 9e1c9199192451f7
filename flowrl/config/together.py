"""The only list of settings that exclude each other, with the reasons (`together.yaml`).

Both the refusals before a model loads and the tables of docs/composing.md come from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

from flowrl.config.strict_yaml import read_mapping
from flowrl.runtime.failures import Faults

_TABLE = read_mapping(Path(__file__).with_suffix(".yaml"))


def as_word(value: Any) -> str:
    """A value of a configuration as YAML writes it."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


ROUTES = "rewards.routes"
"""The key of all rewards' routes, `TrainConfig.routes`."""
OFF: Mapping[str, str] = {key: as_word(value) for key, value in _TABLE["off"].items()}
"""Key in a refusal -> the value that switches it off, or an alternative value."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Exclusion:
    """Settings that exclude each other."""

    settings: tuple[str, ...]
    """`key=value` of each, or a key for all of its values except the one in `OFF`."""
    why: str
    """The reason."""

    def met(self, given: Mapping[str, str]) -> list[str]:
        """These settings with the given values of their keys; empty if one of them is not set."""
        named = [setting.partition("=") for setting in self.settings]
        met = [given[key] == value if value else given[key] != OFF[key] for key, _, value in named]
        return [f"{key}={given[key]}" for key, _, _ in named] if all(met) else []

    def said(self, met: list[str]) -> str:
        """The refusal of such settings, and what to set instead."""
        *first, last = met
        cures = [f"{key}={OFF[key]}" for key in (setting.partition("=")[0] for setting in reversed(met))]
        cures = [cure for cure in cures if cure not in met]  # grpo is what other recipes are refused for
        return f"{', '.join(first)} and {last} do not go together, because {self.why}: set {' or '.join(cures)}"


EXCLUSIONS = tuple(Exclusion(settings=tuple(row["settings"]), why=row["why"]) for row in _TABLE["refused"])


def refuse_together(given: Mapping[str, Any]) -> None:
    """Refuses values of keys of `OFF` that exclude each other; missing keys are off. Raises Faults: a ValueError that
    names the settings, the reason, and what to set instead."""
    values = {**OFF, **{key: as_word(value) for key, value in given.items()}}
    if found := [one.said(met) for one in EXCLUSIONS if (met := one.met(values))]:
        raise Faults(*found)


def check_together(config: Any) -> None:
    """Refuses settings of a `TrainConfig` that exclude each other. Raises as `refuse_together`."""
    given = {key: attrgetter(key)(config) for key in OFF if key != ROUTES}
    refuse_together(given | {ROUTES: f"[{', '.join(dict.fromkeys(sum(config.routes, ())))}]"})
