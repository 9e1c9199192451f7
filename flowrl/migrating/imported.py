"""Translates another toolkit's configuration to our YAML, and reports what became of each key."""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from flowrl.config.base import config_files, read_with_base
from flowrl.config.foreign import foreign_words
from flowrl.config.key_docs import key_docs
from flowrl.config.readers import UnreadError, is_read, keys_of
from flowrl.config.strict_yaml import dotted_items, parse_yaml
from flowrl.config.together import as_word
from flowrl.config.train import TrainConfig, load_config
from flowrl.migrating.foreign_files import Foreign, Made, read_foreign
from flowrl.migrating.foreign_rules import apply_rules
from flowrl.planning.bases import Wish, base_for, configs_of
from flowrl.planning.written import WIDTH, settings_on, written_keys
from flowrl.rendering.terminal_text import wrapped
from flowrl.session.preflight import recipe_of

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


FATES: tuple[Fate, ...] = ("translated", *FATE_OF.values())
OF_METHODS = (
    *keys_of("trajectories", "tail", "thinned", "window"),
    *"ratio loss_aggregation kl_reference same_latent reward_aggregation".split(),
    *"adv_virtual_max adv_min_std adv_baseline".split(),
)
"""Keys of a method: if a file does not set them, they are as without a method, whatever the base has."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Import:
    """A translated file of another toolkit."""

    name: str
    """Name of the file, without its folder."""
    kind: str
    base: str
    """The configuration that ours builds on, which fills in what the file does not set."""
    done: Translated

    @property
    def given(self) -> list[Line]:
        """The keys that the file itself sets."""
        return [line for line in self.done.lines if not line.unsaid]

    @property
    def notes(self) -> list[str]:
        """Notes on values that are not the file's, although you may expect it."""
        left = {
            "rewards": "rewards",
            "prompts.train": "prompts",
            "prompts_per_step": "prompts of an iteration",
            "num_iterations": "iterations",
        }
        return [
            f"the {what} are those of {self.base}, because {self.name} names none that is known here: set {key}"
            for key, what in left.items()
            if key not in self.done.keys
        ] + [
            f"{self.base} is for {own}: check what it says of {model}"
            for own in [read_with_base(config_files()[self.base])["pipeline"]["model"]]
            if own != (model := self.done.keys["pipeline.model"])
        ]


def import_foreign(given: str, model: str | None, reward: str | None) -> Import:
    """Translates a file to our keys, and finds the configuration that these build on. Raises ValueError: the file
    belongs to no known toolkit, trains by another algorithm or names no model, or nothing ships for its model."""
    foreign = read_foreign(given)
    try:
        done = translate(foreign)
    except ValueError as error:
        raise ValueError(f"{given}: {error}") from None
    for key, value in (("pipeline.model", model), ("rewards", reward)):
        if value is not None:
            done = done.without(key, "it was said otherwise")
            done.always[key] = value if key == "pipeline.model" else [{"name": value}]
    done = read_alone(done)
    keys = done.keys
    if "pipeline.model" not in keys:
        raise ValueError(f"{given} names no model: say it with `model`")
    wish = Wish(
        model=keys["pipeline.model"],
        card=0,
        reward=keys["rewards"][0]["name"] if keys.get("rewards") else None,
        train=keys.get("policy.train", "lora"),
        kernel=keys.get("sampler.kernel", "flow_sde"),
    )
    try:
        base = base_for(wish)
    except ValueError as error:
        raise ValueError(f"{given}: {error}; or say with `model` which published model it is") from None
    return Import(name=Path(given).name, kind=foreign.kind, base=base, done=on_base(done, base))


def on_base(done: Translated, base: str) -> Translated:
    """The keys on top of a configuration without its own method."""
    keys, below = done.keys, read_with_base(config_files()[base])
    if "prompts.eval" not in keys and below["prompts"].get("eval") is None:
        done = done.without("eval_every", "there are no held-out prompts: choose prompts.eval and eval_every")
    if "reward_aggregation" in keys and len(keys.get("rewards", below["rewards"])) < 2:
        done = done.without("reward_aggregation", "one reward has no other to be weighed against: it is sum")
        done.always["reward_aggregation"] = "sum"
    if "eval.rewards" in done.keys and all(one in done.keys.get("rewards", []) for one in done.keys["eval.rewards"]):
        done = done.without("eval.rewards", "rewards are measured at evaluations too")
        done.always["eval.rewards"] = []
    usual, full = usual_values(), keys.get("policy.train") == "full"
    for key, value in dotted_items(below):
        own = key in OF_METHODS or (full and key.startswith("policy.lora_"))
        if own and key not in done.keys and value != usual[key]:
            done.always[key] = usual[key]
    return done


def read_alone(done: Translated) -> Translated:
    """The keys that the file's method reads."""
    recipe, objective = done.keys["recipe"], done.keys.get("objective.name", "")
    for key in done.keys:
        if not is_read(key, recipe, objective):
            done = done.without(key, f"{objective or recipe} does not read {key}")
    if done.keys.get("sampler.kernel") == "ode":
        done = done.without("sampler.noise_level", "the ODE draws without noise")
        done.always["sampler.noise_level"] = None
    return done


def settled(found: Import, overrides: Sequence[str]) -> Import:
    """The same without keys that its method does not read, from the file or the base; a plan finds other faults. Raises
    ValueError: it cannot be read, or an override is not read."""
    usual = usual_values()
    while True:
        config = load_config(settings_on(found.base, found.done.keys), overrides)
        try:
            recipe_of(config).check(config)
        except UnreadError as error:
            if any(word.partition("=")[0] == error.key for word in overrides):
                raise
            done = found.done.without(error.key, f"its method does not read {error.key}")
            if found.done.keys.get(error.key, usual[error.key]) == usual[error.key]:
                done.always[error.key] = usual[error.key]
            found = replace(found, done=done)
        except ValueError:
            return found
        else:
            return found


@functools.cache
def usual_values() -> dict[str, object]:
    """The defaults of keys; required keys have none."""
    unsaid = {doc.key: doc.default for doc in key_docs(TrainConfig) if doc.default not in ("", "required")}
    return {key: parse_yaml(text, key) for key, text in unsaid.items()}


def text_of_import(found: Import, overrides: Sequence[str]) -> str:
    """YAML of the keys, followed by a comment for each key of the given file."""
    top = [
        f"# Made by flowrl init from {found.name}, a configuration of {found.kind}.",
        f"# What neither it nor the defaults of {found.kind} say is as in {found.base}.",
        *(f"# Look: {note}." for note in found.notes),
    ]
    rows = [row for fate in FATES for row in _table(fate, found.given, fate)]
    unsaid = [line for line in found.done.lines if line.unsaid]
    rows += _table(f"not in it, but {found.kind}'s default", unsaid, "translated")
    return "\n".join(
        [*top, *written_keys(found.base, found.done.keys, overrides), "", f"# {count_fates(found)}", *rows, ""]
    )


def describe_import(found: Import) -> str:
    """Describes in 80 columns what was not translated, by reason, then what you should check."""
    rows = []
    for fate in FATES[1:]:
        reasons: dict[str, list[str]] = {}
        for line in found.done.lines:
            if line.fate == fate and not line.unsaid:
                reasons.setdefault(line.why, []).append(line.key)
        rows += [f"{fate}:"] if reasons else []
        rows += [wrapped(f"{', '.join(keys)}: {why}", "  ", "    ") for why, keys in reasons.items()]
    return "\n".join([*rows, count_fates(found), *(wrapped(f"look: {note}", "", "  ") for note in found.notes)])


def count_fates(found: Import) -> str:
    """Counts keys by what became of them."""
    of = Counter(line.fate for line in found.given)
    return f"{len(found.given)} keys of {found.name}: " + ", ".join(f"{of[fate]} {fate}" for fate in FATES)


def _table(title: str, lines: Sequence[Line], fate: Fate) -> list[str]:
    """Comments, the lines of one fate under a title; nothing is cut."""
    texts = [f"{line.key} = {line.value}: {line.told}" for line in lines if line.fate == fate]
    rows = [wrapped(text, "#   ", "#     ", width=WIDTH) for text in texts]
    return [f"# {title}:", *rows] if rows else []
