"""What a configuration of another toolkit says in our keys, with one line for each of its own."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any, Literal

from flowrl.config.foreign import foreign_words
from flowrl.migrating.foreign_files import Foreign
from flowrl.migrating.foreign_rules import Made, apply_rules

Fate = Literal["translated", "without counterpart", "dropped"]
FATE_OF: dict[str, Fate] = {"- ": "without counterpart", "! ": "dropped"}
"""Sign that an entry of `foreign_words.yaml` begins with -> what becomes of its key, for the reason behind the sign."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """One key of the given file.

    Attributes:
        key: in its own words.
        value: what it says.
        made: our keys with their values; empty where it was not translated.
        fate: what became of it.
        why: the reason where it, or a part of it, was not translated.
        unsaid: whether it is the toolkit's default and not in the file.
    """

    key: str
    value: Any
    made: dict[str, Any]
    fate: Fate
    why: str = ""
    unsaid: bool = False

    @property
    def told(self) -> str:
        """Where it is, or why it is not."""
        made = ", ".join(f"{name}: {_short(name, item)}" for name, item in self.made.items())
        return "; ".join(part for part in (made, self.why) if part)


@dataclass(frozen=True, kw_only=True, slots=True)
class Translated:
    """Lines for the toolkit's defaults and for all keys that were given; what it does whatever its files say."""

    lines: tuple[Line, ...]
    always: dict[str, Any]

    @property
    def keys(self) -> dict[str, Any]:
        """Our keys, dotted, with their values; the later line wins."""
        return {
            name: value for made in (*(line.made for line in self.lines), self.always) for name, value in made.items()
        }

    def without(self, ours: str, why: str) -> Translated:
        """The same but for one of our keys, with the reason at each line that said it."""
        lines = []
        for line in self.lines:
            if ours in line.made:
                made = {name: value for name, value in line.made.items() if name != ours}
                line = replace(line, made=made, fate="translated" if made else "dropped", why=why)
            lines.append(line)
        return Translated(lines=tuple(lines), always=self.always)


def translate(given: Foreign) -> Translated:
    """Every key of a file is translated, without counterpart, or dropped, each with where or why.

    Raises:
        ValueError: the file trains by an algorithm that is not translated.
    """
    unsaid = {
        key: value for key, value in foreign_words().toolkits[given.kind].defaults.items() if key not in given.keys
    }
    given = replace(given, keys=unsaid | given.keys)
    by_rule, lines = apply_rules(given), []
    for key, value in given.keys.items():
        made = by_rule.get(key) or _by_table(given, key, value)
        if isinstance(made, dict):
            lines.append(Line(key=key, value=value, made=made, fate="translated", unsaid=key in unsaid))
        else:
            sign, why = made[:2], made[2:]
            lines.append(Line(key=key, value=value, made={}, fate=FATE_OF[sign], why=why, unsaid=key in unsaid))
    always = {"policy.train": "full", "sampler.kernel": "dance_sde"} if given.kind == "DanceGRPO" else {}
    return Translated(lines=tuple(lines), always=always)


def _by_table(given: Foreign, key: str, value: Any) -> Made:
    table, name = foreign_words().toolkits[given.kind].keys, re.sub(r"\[\d+\]", "[]", key)
    entry = table.get(name)
    if entry is None:
        sections = [part for part in table if part.endswith(".") and name.startswith(part)]
        elsewhere = foreign_words().keys.get(key.rpartition(".")[2])
        unknown = "! not known of this toolkit" + (f"; elsewhere it is {elsewhere}" if elsewhere else "")
        entry = table[max(sections, key=len)] if sections else unknown
    if entry[:2] in FATE_OF:
        return entry
    if value is None or value in ("", {}, []):
        return "! it says nothing"
    if entry.startswith("= "):
        return f"! it would be {entry[2:]}"
    return {ours: _value(ours, value) for ours in entry.split(", ")}


def _value(ours: str, value: Any) -> Any:
    """A value in our words."""
    if ours == "recipe" and value not in ("grpo", "flow_grpo"):
        near = foreign_words().algorithms.get(str(value))
        hint = f"build on one that ships, base: {near}" if near else "'flowrl list configs' names those that ship"
        raise ValueError(f"its algorithm is {value}, and `source` translates Flow-GRPO and DanceGRPO alone: {hint}")
    if ours == "pipeline.model":
        return foreign_words().models.get(str(value), value)
    if ours == "sampler.kernel":
        return foreign_words().kernels.get(str(value), value)
    return foreign_words().values.get(ours, {}).get(str(value), value)


def _short(name: str, value: Any) -> str:
    if name.endswith("rewards"):
        return " and ".join(reward["name"] for reward in value)
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
