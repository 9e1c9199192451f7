"""Another toolkit's configuration in our keys, with one line for each of its own."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from flowrl.config.foreign import foreign_words
from flowrl.config.strict_yaml import parse_yaml
from flowrl.config.together import as_word
from flowrl.migrating.foreign_files import Foreign, Made
from flowrl.migrating.foreign_rules import apply_rules
from flowrl.planning.bases import configs_of

Fate = Literal["translated", "without counterpart", "dropped", "unknown"]
FATE_OF: dict[str, Fate] = {"- ": "without counterpart", "! ": "dropped", "? ": "unknown"}
"""First characters of an entry of `foreign_words.yaml` -> what becomes of its key; the reason follows them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """One key of the given file."""

    key: str
    """Key in its own words."""
    value: Any
    made: dict[str, Any]
    """Our keys with their values; empty if it was not translated."""
    fate: Fate
    """What became of the key."""
    why: str = ""
    """The reason if it, or a part of it, was not translated."""
    unsaid: bool = False
    """Whether it is the toolkit's default and not in the file."""

    @property
    def told(self) -> str:
        """Our keys for it, or why there are none."""
        made = ", ".join(
            f"{name}: {' and '.join(one['name'] for one in item) if name.endswith('rewards') else as_word(item)}"
            for name, item in self.made.items()
        )
        return "; ".join(part for part in (made, self.why) if part)


@dataclass(frozen=True, kw_only=True, slots=True)
class Translated:
    """Lines for the toolkit's defaults and for all given keys, and what the toolkit always does."""

    lines: tuple[Line, ...]
    always: dict[str, Any]

    @property
    def keys(self) -> dict[str, Any]:
        """Our keys, dotted, with their values; the later line wins."""
        return {
            name: value for made in (self.always, *(line.made for line in self.lines)) for name, value in made.items()
        }

    def without(self, ours: str, why: str) -> Translated:
        """The same without one of our keys, with the reason at each line that set it."""
        lines = []
        for line in self.lines:
            if ours in line.made:
                made = {name: value for name, value in line.made.items() if name != ours}
                line = replace(line, made=made, fate="translated" if made else "dropped", why=why)
            lines.append(line)
        return Translated(lines=tuple(lines), always={key: v for key, v in self.always.items() if key != ours})


def translate(given: Foreign) -> Translated:
    """Translates a file: our keys or the reason for every key. Raises ValueError: the algorithm is not translated."""
    words = foreign_words()
    toolkit, method = words.toolkits[given.kind], method_of(given)
    unsaid = {key: value for key, value in toolkit.defaults.items() if key not in given.keys}
    given = replace(given, keys=unsaid | given.keys)
    always = {**words.methods[method], **toolkit.always, **toolkit.methods.get(method, {})}
    said: Made = {key: always[key] for key in ("recipe", "objective.name") if key in always}
    by_rule: dict[str, Made] = {**apply_rules(given, method), **dict.fromkeys(toolkit.algorithm.split(", "), said)}
    table, lines = {**toolkit.keys, **toolkit.of.get(method, {})}, []
    for key, value in given.keys.items():
        made = _by_table(table, by_rule, key, value)
        if isinstance(made, dict):
            lines.append(Line(key=key, value=value, made=made, fate="translated", unsaid=key in unsaid))
        else:
            sign, why = made[:2], made[2:]
            lines.append(Line(key=key, value=value, made={}, fate=FATE_OF[sign], why=why, unsaid=key in unsaid))
    return Translated(lines=tuple(lines), always=always)


def method_of(given: Foreign) -> str:
    """The method of a file: the first in its keys besides plain GRPO. Raises ValueError: it is not translated."""
    words, found = foreign_words(), []
    toolkit = words.toolkits[given.kind]
    for key in toolkit.algorithm.split(", "):
        if (word := str(given.keys.get(key) or "").rpartition(".")[2]) and word not in words.algorithms:
            ships = ", ".join(configs_of(words.values["recipe"].get(word, "")))
            raise ValueError(
                f"its algorithm is {word}, and `source` translates {', '.join(words.methods)}: "
                + (f"build on {ships}, which ship for it" if ships else "'flowrl list configs' names what ships")
            )
        found += [words.algorithms[word]] if word else [key] if key in words.methods else []
    method = next((one for one in found if one != "grpo"), "grpo")
    offline = method == "dpo" and given.keys.get("algorithm.sample_source") == "offline"
    return "dpo_offline" if offline else method


def _by_table(table: Mapping[str, str], by_rule: Mapping[str, Made], key: str, value: Any) -> Made:
    name = re.sub(r"\[\d+\]", "[]", key)
    entry = table.get(name)
    if entry is None:
        sections = [part for part in table if part.endswith(".") and name.startswith(part)]
        elsewhere = foreign_words().keys.get(key.rpartition(".")[2])
        unknown = "? not known of this toolkit" + (f"; elsewhere it is {elsewhere}" if elsewhere else "")
        entry = table[max(sections, key=len)] if sections else unknown
    if entry.startswith("= "):
        return by_rule.get(key, f"! it would be {entry[2:]}")
    if entry[:2] in FATE_OF:
        return entry
    if value is None or value in ("", {}, []):
        return "! it is empty"
    ours, _, pairs = entry.partition(" | ")
    if ours.startswith("prompts.") and str(value).startswith("$"):
        return "- a variable that the file does not set: name a file of prompts"
    own, words = dict(pair.split("=") for pair in pairs.split(", ") if pair), foreign_words()
    value = parse_yaml(own[str(value)], entry) if str(value) in own else value
    tables = {**words.values, "pipeline.model": words.models, "sampler.kernel": words.kernels}
    return {one: tables.get(one, {}).get(str(value), value) for one in ours.split(", ")}
