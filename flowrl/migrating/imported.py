"""Our YAML of another toolkit's configuration, and what became of each of its keys."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from flowrl.config.base import config_files, read_with_base
from flowrl.migrating.foreign_files import read_foreign
from flowrl.migrating.translated import Fate, Line, Translated, translate
from flowrl.planning.bases import Wish, base_for
from flowrl.planning.written import WIDTH, written_keys
from flowrl.rendering.terminal_text import COLUMNS

FATES: tuple[Fate, ...] = ("translated", "without counterpart", "dropped")


@dataclass(frozen=True, kw_only=True, slots=True)
class Import:
    """A file of another toolkit, in our words.

    Attributes:
        name: of the file, without its folder.
        kind: the toolkit.
        base: the configuration that ours builds on, which says what the file does not.
        done: its keys.
    """

    name: str
    kind: str
    base: str
    done: Translated

    @property
    def given(self) -> list[Line]:
        """The keys that the file itself says."""
        return [line for line in self.done.lines if not line.unsaid]

    @property
    def notes(self) -> list[str]:
        """What is not the file's although one would think so."""
        left = {
            "rewards": "rewards",
            "prompts.train": "prompts",
            "prompts_per_step": "prompts of an iteration",
            "num_iterations": "iterations",
        }
        return [
            f"the {what} are those of {self.base}, not of {self.name}: choose {key}"
            for key, what in left.items()
            if key not in self.done.keys
        ]


def import_foreign(given: str, model: str | None, reward: str | None) -> Import:
    """What a file asks for in our keys, and the configuration that these build on.

    Raises:
        ValueError: the file is of no known toolkit, trains by another algorithm or names no model, or nothing ships
            for its model.
    """
    foreign = read_foreign(given)
    try:
        done = translate(foreign)
    except ValueError as error:
        raise ValueError(f"{given}: {error}") from None
    for key, value in (("pipeline.model", model), ("rewards", reward)):
        if value is not None:
            done = done.without(key, "it was said otherwise")
            done.always[key] = value if key == "pipeline.model" else [{"name": value}]
    keys = done.keys
    if "pipeline.model" not in keys:
        raise ValueError(f"{given} names no model: say it with `model`")
    wish = Wish(
        model=keys["pipeline.model"],
        card=0,
        reward=keys["rewards"][0]["name"] if "rewards" in keys else None,
        train=keys.get("policy.train", "lora"),
        kernel=keys.get("sampler.kernel", "flow_sde"),
    )
    try:
        base = base_for(wish)
    except ValueError as error:
        raise ValueError(f"{given}: {error}; or say with `model` which published model it is") from None
    below = read_with_base(config_files()[base])
    if "prompts.eval" not in keys and below["prompts"].get("eval") is None:
        done = done.without("eval_every", "there are no held-out prompts: choose prompts.eval and eval_every")
    if "reward_aggregation" in keys and len(keys.get("rewards", below["rewards"])) < 2:
        done = done.without("reward_aggregation", "one reward has no other to be weighed against: it is sum")
        done.always["reward_aggregation"] = "sum"
    return Import(name=Path(given).name, kind=foreign.kind, base=base, done=done)


def text_of_import(found: Import, overrides: Sequence[str]) -> str:
    """YAML of the keys, and behind it a comment for each key of the given file."""
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
    """In 80 columns: what was not taken over, by reasons, then what is to be looked at."""
    rows = []
    for fate in FATES[1:]:
        reasons: dict[str, list[str]] = {}
        for line in found.done.lines:
            if line.fate == fate and not line.unsaid:
                reasons.setdefault(line.why, []).append(line.key)
        rows += [f"{fate}:"] if reasons else []
        rows += [_filled(f"{', '.join(keys)}: {why}", "  ", COLUMNS) for why, keys in reasons.items()]
    return "\n".join([*rows, count_fates(found), *(_filled(f"look: {note}", "", COLUMNS) for note in found.notes)])


def count_fates(found: Import) -> str:
    """How many keys met each fate."""
    of = Counter(line.fate for line in found.given)
    return f"{len(found.given)} keys of {found.name}: " + ", ".join(f"{of[fate]} {fate}" for fate in FATES)


def _table(title: str, lines: Sequence[Line], fate: Fate) -> list[str]:
    """Comments, the lines of one fate under a title; nothing is cut."""
    rows = [_filled(f"{line.key} = {line.value}: {line.told}", "#   ", WIDTH) for line in lines if line.fate == fate]
    return [f"# {title}:", *rows] if rows else []


def _filled(text: str, mark: str, width: int) -> str:
    return textwrap.fill(" ".join(text.split()), width, initial_indent=mark, subsequent_indent=f"{mark}  ",
                         break_on_hyphens=False, break_long_words=False)  # fmt: skip
