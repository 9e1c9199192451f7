"""Pages of the site that are made of the code: keys, metrics, rewards, methods, families, configurations, commands.

They are written at every build and never committed. Nothing heavy is imported: what needs torch is read as syntax.
"""

from __future__ import annotations

import argparse
import ast
import re
from collections.abc import Iterator
from typing import Any

from site_syntax import ROOT, Option, cell, escaped, markdown, names_in, options_of

from flowrl.cli import COMMANDS, command_module
from flowrl.config.base import config_files
from flowrl.config.bounds import MOST
from flowrl.config.foreign import foreign_words
from flowrl.config.rewards import built_in_rewards
from flowrl.config.source_syntax import class_of, tree_of
from flowrl.migrating.imported import FATE_OF
from flowrl.planning.catalogue import METHODS, head_of
from flowrl.runs.metric_names import METRICS
from flowrl.runtime.files import read_json

CHOICES = {
    "sampler.kernel": [("flowrl.samplers.kernels", "KERNELS")],
    "credit.method": [("flowrl.credit", "CREDIT")],
    "objective.name": [
        ("flowrl.objectives.policy_gradient", "OBJECTIVES"), ("flowrl.objectives.forward_losses", "FORWARD"),
        ("flowrl.recipes.preference_settings", "OBJECTIVES"), ("flowrl.objectives.gradient_paths", "PATHS"),
        ("flowrl.objectives.distillation", "VISITED"),
    ],
}  # fmt: skip
"""Keys whose type is a text, and the tables that their values are entries of."""

_EVER = 1_000_000_000  # bounds from here on only catch slips

FORMULAS = {
    "Noise of a step": "flowrl.samplers.kernels",
    "Density of a step, and the KL of two": "flowrl.samplers.transition",
    "Which steps are stochastic": "flowrl.samplers.windows",
    "Guidance": "flowrl.samplers.guidance",
    "Advantages": "flowrl.advantages.normalise",
}
"""Heading -> the module whose text and functions have the formulas."""


def reference_pages() -> dict[str, str]:
    """Path within the site -> the page, in Markdown."""
    return {
        "reference/keys.md": keys_page(),
        "reference/metrics.md": metrics_page(),
        "reference/rewards.md": rewards_page(),
        "reference/methods.md": methods_page(),
        "reference/families.md": families_page(),
        "reference/configurations.md": configurations_page(),
        "reference/commands.md": commands_page(),
        **configuration_pages(),
    }


def keys() -> Iterator[tuple[str, Option]]:
    """Every key of a configuration by its dotted name, list items under 0, with what the code says of it."""
    yield from _keys("flowrl.config.train", "TrainConfig", "")


def keys_page() -> str:
    """Every key of a configuration with type, default, largest value and meaning."""
    out = [
        "# Keys of a configuration",
        "Every key that a YAML file or `key=value` on the command line may set. `null` stands for what the text says; "
        "keys without a default are required. Unknown keys and wrong types are refused before a model loads. In a "
        "list, such as `rewards`, items are counted from 0: `rewards.0.weight=2`.",
    ]
    section = ""
    for dotted, option in keys():
        head = dotted.rpartition(".")[0] or "run"
        if option.section is not None:
            continue
        if head != section:
            section = head
            out += [f"## {'Keys of the run itself' if head == 'run' else f'`{head}`'}", _section_text(head)]
        facts = [option.kind]
        choices = [name for module, table in CHOICES.get(dotted, []) for name in names_in(module, table)]
        if choices := list(built_in_rewards()) if dotted == "rewards.0.name" else choices:
            facts.append("one of " + ", ".join(f"`{name}`" for name in choices))
        facts.append("**required**" if option.default is None else f"default `{option.default}`")
        if (most := MOST.get(dotted, _EVER)) < _EVER:
            facts.append(f"at most {most:,}" if isinstance(most, int) else f"at most {most:g}")
        out += [f"### `{dotted}`", f"*{'; '.join(facts)}*", markdown(option.meaning)]
    return _joined(out)


def metrics_page() -> str:
    """Every metric of `metrics.jsonl` with its meaning."""
    out = [
        "# Metrics",
        "Names of the numbers in `metrics.jsonl`, in trackers and in charts. A row of the file is one iteration, or "
        "one evaluation: then its names begin with `eval/`. A name in angle brackets stands for what a run calls it: "
        "`reward/<name>` is `reward/pick_score` where `pick_score` is trained on. What is not finite is `null`.",
    ]
    for group, names in METRICS.items():
        out += [f"## `{group}`", _table(("metric", "meaning"), [(f"`{name}`", said) for name, said in names.items()])]
    return _joined(out)


def rewards_page() -> str:
    """Every built-in reward with its options."""
    out = [
        "# Every reward and its options",
        "Every built-in reward: what it measures, what a published name reproduces, and its options (`options:` of its "
        "entry in `rewards`). How to choose, combine and check them is in [Rewards](../docs/rewards.md).",
    ]
    told: dict[str, str] = {}
    for name, row in built_in_rewards().items():
        module, _, cls = row["place"].partition(":")
        out += [f"## `{name}`", *_class_text(module, cls)]
        if said := row.get("reproduces"):
            out.append(f"*Reproduces:* {markdown(said)}")
        out.append(_options_list(options_of(module, cls)))
        if module in told:
            out.append(f"More: see `{told[module]}`.")
        else:
            told[module] = name
            out.append(_module_text(module))
    return _joined(out)


def methods_page() -> str:
    """Every method with its formulas and options."""
    out = [
        "# Every method and its formula",
        "A method is a setting. What each computes, from the text of the code that computes it; measured side by side "
        "in [Methods compared](../docs/research/methods.md).",
    ]
    for heading, module in FORMULAS.items():
        out += [f"## {heading}", _module_text(module), _functions_list(module)]
    for choice in METHODS:
        recipe = f", recipe `{choice.recipe}`" if choice.recipe else ""
        out += [f"## {choice.heading}", f"Chosen by `{choice.key}`{recipe}."]
        module, home = "", choice.module
        for name, cls in choice.classes().items():
            found = home if choice.method else class_of(home, cls)[0]
            if found != module:
                module = found
                out.append(_module_text(module))
            out += [f"### `{name}`", *_class_text(home, cls)]
            if not choice.method:  # the fields of a section are keys of their own
                out.append(_options_list(options_of(home, cls)))
    return _joined(out)


def families_page() -> str:
    """Every model family with its published checkpoints."""
    tables = read_json(ROOT / "pipelines" / "published.json")
    out = [
        "# Every model family and checkpoint",
        "Every family that has a file of its own, and the checkpoints whose dimensions are known without a download. "
        "Any other checkpoint of these stock classes loads from a folder or the hub. How to choose by card is in "
        "[Cards](../docs/cards.md), what each needs and what was checked: [families](../docs/families.md).",
    ]
    for name, family in tables["families"].items():
        sampling = ", ".join(f"{key} {value}" for key, value in family.get("sampling", {}).items())
        out += [f"## `{name}`", _module_text(f"flowrl.pipelines.families.{name}")]
        out.append(f"Stock classes: {', '.join(f'`{one}`' for one in family['stock'])}.")
        if sampling:
            out.append(f"Usually sampled with {sampling.replace('_', ' ')}.")
        rows = [
            (f"`{place}`", one.get("licence", "not known"), "yes" if one.get("gated") else "no")
            for place, one in family["checkpoints"].items()
        ]
        out.append(_table(("checkpoint", "licence", "accept on the hub first"), rows) if rows else "")
    return _joined(out)


def configurations_page() -> str:
    """Every shipped configuration with the head of its file."""
    rows: dict[str, list[tuple[str, ...]]] = {}
    for path in config_files().values():
        text = path.read_text(encoding="utf-8")
        first = head_of(text).partition("\n\n")[0]
        base = found[1] if (found := re.search(r"^base: *(\S+)", text, re.MULTILINE)) else ""
        link = f"[`{path.stem}`](configurations/{path.stem}.md)"
        rows.setdefault(path.parent.name, []).append(
            (link, cell(first), f"[`{base}`](configurations/{base}.md)" if base else "")
        )
    out = [
        "# Every shipped configuration",
        "`flowrl train NAME` runs one, `flowrl plan NAME` says before any download what it needs, `base: NAME` builds "
        "on it. A heading is a folder of `configs/`: the bundled models, then one a family. Files for real checkpoints "
        "load in the tests and their networks are built there without weights; they have not been trained here.",
    ]
    for group, listed in rows.items():
        out += [f"## `{group}`", _table(("configuration", "what it is", "builds on"), listed, escape=False)]
    return _joined(out)


def configuration_pages() -> dict[str, str]:
    """A page for each shipped configuration: its file as it stands."""
    return {
        f"reference/configurations/{path.stem}.md": _joined([
            "---\norphan: true\n---", f"# `{path.stem}`", "One of the [recipes](../configurations.md).",
            f"```yaml\n{path.read_text(encoding='utf-8').rstrip()}\n```",
        ])
        for path in config_files().values()
    }  # fmt: skip


def commands_page() -> str:
    """Every command with its flags."""
    out = ["# Commands", "What `flowrl COMMAND --help` prints."]
    for name, said in COMMANDS.items():
        parser = argparse.ArgumentParser(
            prog=f"flowrl {name}", description=f"{said[0].upper()}{said[1:]}.", formatter_class=_Narrow
        )
        command_module(name).add_arguments(parser)
        out += [f"## `flowrl {name}`", f"```text\n{parser.format_help().rstrip()}\n```"]
    return _joined(out)


def vocabulary_tables() -> str:
    """What other toolkits call our keys and values, as tables."""
    words = foreign_words()
    out = [
        "### Keys",
        _table(("there", "here"), [(f"`{theirs}`", ours) for theirs, ours in sorted(words.keys.items())]),
    ]
    if words.absent:
        out += [
            "### Without counterpart",
            _table(("there", ""), [(f"`{key}`", said) for key, said in words.absent.items()]),
        ]
    rows = [
        (f"`{key}`", f"`{theirs}`", f"`{ours}`")
        for key, table in words.values.items()
        for theirs, ours in table.items()
    ]
    return _joined([*out, "### Values", _table(("key", "there", "here"), rows)])


def import_tables() -> str:
    """What `flowrl init --from` makes of each toolkit's keys and rewards."""
    out = []
    for kind, toolkit in foreign_words().toolkits.items():
        rows = [
            (f"`{key}…`" if key.endswith(".") else f"`{key}`", _becomes(entry)) for key, entry in toolkit.keys.items()
        ]
        names = ", ".join(f"`{name}` is `{reward['name']}`" for name, reward in toolkit.rewards.items())
        rows += [
            (f"`{key}` ({method})", _becomes(entry))
            for method, keys in toolkit.of.items()
            for key, entry in keys.items()
        ]
        out += [f"### Keys of {kind}", _table(("there", "here"), rows), f"Its rewards: {names}."]
    return _joined(out)


def _becomes(entry: str) -> str:
    """What `foreign_words.yaml` says of a key, in words."""
    sign, said = entry[:2], entry[2:]
    if sign in FATE_OF:
        return f"{FATE_OF[sign]}: {said}"
    ours, _, pairs = entry.partition(" | ")
    return said if sign == "= " else ", ".join(f"`{key}`" for key in ours.split(", ")) + (pairs and f" ({pairs})")


class _Narrow(argparse.HelpFormatter):
    """Help at 80 columns, whatever terminal the site is built in."""

    def __init__(self, prog: str, **words: Any) -> None:
        super().__init__(prog, width=80, **words)


def _keys(module: str, name: str, prefix: str) -> Iterator[tuple[str, Option]]:
    # Plain keys go before sections, so that a section's keys stand together.
    options = options_of(module, name)
    for option in [one for one in options if one.section is None] + [one for one in options if one.section is not None]:
        yield f"{prefix}{option.name}", option
        if option.section is not None:
            yield from _keys(*option.section, f"{prefix}{option.name}.{'0.' if option.listed else ''}")


def _section_text(dotted: str) -> str:
    """The docstring of the section that a dotted name leads to."""
    module, name = "flowrl.config.train", "TrainConfig"
    for part in [] if dotted == "run" else dotted.split("."):
        if part != "0":
            option = next(one for one in options_of(module, name) if one.name == part)
            module, name = option.section or (module, name)
    return "" if dotted == "run" else _joined(_class_text(module, name)).strip()


def _class_text(module: str, name: str) -> list[str]:
    return [markdown(ast.get_docstring(class_of(module, name)[1]) or "")]


def _module_text(module: str) -> str:
    """A module's docstring, its first line as a sentence."""
    return markdown(ast.get_docstring(tree_of(module)) or "")


def _functions_list(module: str) -> str:
    """The public functions of a module, each with the first paragraph of its text and the formulas that follow."""
    out = []
    for node in tree_of(module).body:
        said = ast.get_docstring(node) if isinstance(node, ast.FunctionDef) and not node.name.startswith("_") else None
        if said is not None and isinstance(node, ast.FunctionDef):
            text = re.split(r"\n\n?(?:Args|Returns|Raises|Attributes):\n", said)[0]
            out.append(f"**`{node.name}`**: {markdown(text)}")
    return "\n\n".join(out)


def _options_list(options: list[Option], prefix: str = "") -> str:
    """Options with type, default and meaning; those of a nested dataclass under its name. A list, since tables of four
    columns cannot be read on a phone."""
    lines = []
    for one in options:
        default = "**required**" if one.default is None else f"default `{one.default}`"
        lines.append(f"- `{prefix}{one.name}` (*{one.kind}; {default}*): {escaped(' '.join(one.meaning.split()))}")
        if one.section is not None:
            lines.append(_options_list(options_of(*one.section), f"{prefix}{one.name}.{'0.' if one.listed else ''}"))
    return "\n".join(lines) if lines else "No options."


def _table(head: tuple[str, ...], rows: list[Any], *, escape: bool = True) -> str:
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    return "\n".join([*lines, *(f"| {' | '.join(cell(one) if escape else one for one in row)} |" for row in rows)])


def _joined(parts: list[str]) -> str:
    return "\n\n".join(part for part in parts if part) + "\n"
