"""The documentation site: everything public is on it, its sources' links resolve, and the checks can fail.

The site itself is built by `make docs`; here its sources are made, which takes two seconds.
"""

from __future__ import annotations

import doctest
import json
import re
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest
import site_interface
import site_links
from build_site import MADE, NAVIGATION, front_page, linked_files, main, sources, write_sources
from site_interface import functions, public
from site_links import broken_links, faults_of_site, markdown_links
from site_reference import CHOICES, keys
from site_syntax import ROOT, markdown, names_in, options_of

from flowrl.config.base import config_files
from flowrl.config.foreign import foreign_words
from flowrl.config.strict_yaml import dotted_keys
from flowrl.config.train import TrainConfig
from flowrl.pipelines import PIPELINES
from flowrl.runs.metric_names import METRICS, meaning_of

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


@cache
def made() -> dict[str, str]:
    return sources()


def headings(page: str) -> set[str]:
    return set(re.findall(r"^#+ `(?:flowrl )?(.+)`$", made()[page], re.MULTILINE))


# ---- everything is there ---------------------------------------------------------------------------------------------


def test_every_key_is_on_the_site_with_what_it_means() -> None:
    """Against the names that the loader itself knows, which are found by running the dataclasses."""
    by_name = dict(keys())
    more = set(by_name) - set(dotted_keys(TrainConfig))  # the loader's list leaves out sections that may be null
    assert set(dotted_keys(TrainConfig)) <= set(by_name)
    assert {name.removeprefix("eval.").rpartition(".")[0] for name in more} == {"rewards.0.frames"}
    plain = {name for name, option in by_name.items() if option.section is None}
    assert plain <= headings("reference/keys.md")
    assert not [name for name in plain if not by_name[name].meaning]


@pytest.mark.parametrize(
    ("key", "kind", "default"),
    [
        ("optim.lr", "number", "0.0003"),
        ("num_iterations", "integer", None),
        ("pipeline.vae_dtype", "`float32` or `tf32` or `bfloat16`", "float32"),  # through an alias
        ("policy.target_modules", "list of text or `null`", "null"),
        ("optim.betas", "[number, number]", "[0.9, 0.999]"),
        ("clip_range", "number or [number, number]", "0.0001"),
        ("rewards.0.frames.policy", "`first` or `uniform` or `every` or `all`", "all"),  # two sections down
        ("eval.initial", "`true` or `false`", "true"),
        ("prompts.negative", "text", '""'),
    ],
)
def test_a_key_says_its_type_and_default(key: str, kind: str, default: str | None) -> None:
    option = dict(keys())[key]
    assert (option.kind, option.default) == (kind, default)


def test_defaults_are_those_of_a_run(tmp_path: Path) -> None:
    """What the page says is what a file without the key gets."""
    import yaml

    from flowrl.config.train import load_config, to_yaml

    (tmp_path / "least.yaml").write_text(
        "{num_iterations: 1, prompts_per_step: 1, group_size: 2, pipeline: {model: m}, sampler: {kernel: flow_sde},"
        " prompts: {train: p.txt}, rewards: [{name: ocr}]}"
    )
    run = yaml.safe_load(to_yaml(load_config(tmp_path / "least.yaml")))
    checked = 0
    for name, option in keys():
        absent = ("rewards.0.frames.", "eval.rewards.0.", "policy.teachers.0.")
        if option.default in (None, "its own defaults") or name.startswith(absent):
            continue
        value = run
        for part in name.split("."):
            value = value[int(part)] if part.isdecimal() else value[part]
        if name != "rewards.0.name":
            said = yaml.safe_load(option.default or "")
            assert (float(said) if isinstance(value, float) else said) == value, name
            checked += 1
    assert checked > 150


def test_every_choice_is_on_the_site() -> None:
    from flowrl.samplers.kernels import KERNELS

    assert names_in("flowrl.samplers.kernels", "KERNELS") == list(KERNELS)
    for name, tables in CHOICES.items():
        section = made()["reference/keys.md"].split(f"### `{name}`")[1].split("\n### ")[0]
        assert all(f"`{one}`" in section for module, table in tables for one in names_in(module, table)), name


def test_every_reward_method_family_recipe_and_command_is_on_the_site() -> None:
    from flowrl.cli import COMMANDS
    from flowrl.config.base import config_files
    from flowrl.credit import CREDIT
    from flowrl.objectives.forward_losses import FORWARD
    from flowrl.objectives.gradient_paths import PATHS
    from flowrl.objectives.policy_gradient import OBJECTIVES
    from flowrl.pipelines import PIPELINES
    from flowrl.rewards import REWARDS

    assert headings("reference/rewards.md") == set(REWARDS)
    assert {*CREDIT, *FORWARD, *PATHS, *OBJECTIVES, "dpo", "d3po", "dcpo", "gaussian"} <= headings(
        "reference/methods.md"
    )
    assert headings("reference/families.md") == set(PIPELINES)
    assert headings("reference/commands.md") == set(COMMANDS)
    recipes = made()["reference/configurations.md"]
    for path in config_files().values():
        assert f"[`{path.stem}`](configurations/{path.stem}.md)" in recipes
        assert path.read_text().strip() in made()[f"reference/configurations/{path.stem}.md"]


def test_every_function_is_in_the_table_with_its_command_and_the_class_that_it_returns() -> None:
    """Against the functions themselves, which the table only reads as text."""
    import inspect

    import flowrl
    from flowrl.cli import COMMANDS

    assert {*functions(), "FlowrlError"} == {*flowrl._PLACES}
    rows = {
        found[1]: line
        for line in made()["docs/python.md"].splitlines()
        if (found := re.match(r"\| \[`flowrl\.(\w+)\(", line))
    }
    assert rows.keys() == functions().keys()
    for name, row in rows.items():
        command, said, returned = row.removesuffix(" |").split(" | ")[1:]
        assert said, name
        assert command.strip("`").removeprefix("flowrl ") in COMMANDS or (name, command) == ("read_run", "")
        annotation = str(inspect.signature(getattr(flowrl, name)).return_annotation)
        assert returned.startswith(f"`{annotation}`") or (name, returned) == ("serve", "nothing")
    reached = {row.split(" | ")[1].strip("`").removeprefix("flowrl ") for row in rows.values()} - {""}
    unreached = {"list", "data list", "watch", "completion", "reward train", "reward published"}
    assert COMMANDS.keys() - reached == unreached


def test_options_of_rewards_are_those_of_their_classes() -> None:
    """The syntax tells the same fields as the classes themselves, with their defaults."""
    import dataclasses
    import importlib

    import yaml

    from flowrl.rewards import REWARDS

    for place in REWARDS.values():
        module, _, name = place.partition(":")
        cls = getattr(importlib.import_module(module), name)
        found = {option.name: option for option in options_of(module, name)}
        assert list(found) == [field.name for field in dataclasses.fields(cls)], place
        for field in dataclasses.fields(cls):
            said = found[field.name].default
            if isinstance(field.default, str) and field.default:
                assert said == field.default, f"{place} {field.name}"
            elif isinstance(field.default, bool | int | float | str | None):
                value = yaml.safe_load(str(said))
                same = float(value) if isinstance(field.default, float) else value
                assert same == field.default, f"{place} {field.name}: {said!r} is not {field.default!r}"


def test_public_functions_and_classes_are_on_the_site() -> None:
    import importlib

    found = public()
    assert {"flowrl.config.train", "flowrl.rewards", "flowrl.samplers", "flowrl.pipelines.rlg_pipeline"} <= set(found)
    for name in found:
        shown = {heading.partition(".")[0] for heading in headings(f"reference/api/{name}.md")}
        module = importlib.import_module(name)
        assert set(found[name]) <= shown
        assert not set(getattr(module, "__all__", ())) - shown
        assert not [one for one in found[name] if not hasattr(module, one)]


# ---- metrics ---------------------------------------------------------------------------------------------------------


def test_every_metric_that_a_run_logged_has_a_meaning() -> None:
    """All columns of the golden records, of every recipe and objective."""
    logged = {
        key
        for path in (ROOT / "tests" / "golden").rglob("*.json")
        for row in json.loads(path.read_text()).get("rows", [])
        for key in row
    }
    assert len(logged) > 100
    assert sorted(name for name in logged if meaning_of(name) is None) == []
    page = made()["reference/metrics.md"]
    assert all(f"| `{name}` |" in page for group in METRICS.values() for name in group)


def test_no_metric_is_documented_that_nothing_logs() -> None:
    text = "".join(
        path.read_text()
        for folder in ("flowrl", "rewards")
        for path in (ROOT / folder).rglob("*.py")
        if path.name != "metric_names.py"
    )  # fmt: skip
    for name in (name for group in METRICS.values() for name in group):
        last = re.sub(r"<\w+>", "", name).split("/")[-1]
        assert re.sub(r"_(gib|low|high|decay)$", "", last) in text, name  # which are put behind names of others


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("reward/pick_score", "one reward"), ("reward/geneval/strict", "sub-score"), ("reward/a/gated", "gate"),
        ("eval/reward/clip_score_low", "lower end"), ("eval/geneval/score", "macro"),
        ("eval/geneval/colors", "six tasks"),
        ("memory/peak_gib", "since the start"), ("memory/rollout_gib", "in a stage"), ("seconds/eval", "evaluation"),
        ("seconds/rollout", "a stage"), ("reward_errors/timeout", "cause"), ("lr", "learning rate"),
    ],
)  # fmt: skip
def test_the_most_particular_meaning_is_taken(name: str, part: str) -> None:
    assert part in str(meaning_of(name))


def test_what_is_no_metric_has_no_meaning() -> None:
    assert meaning_of("rewards") is None
    assert meaning_of("eval/reward/a/b/c") is None


# ---- pages and links -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_and_anchors_of_a_page_resolve(path: Path) -> None:
    assert broken_links([path]) == []


def test_links_of_made_pages_resolve(tmp_path: Path) -> None:
    write_sources(tmp_path)
    assert broken_links([*sorted((tmp_path / "reference").rglob("*.md")), tmp_path / "index.md"]) == []
    assert (tmp_path / "docs" / "research" / "rlg" / "sweep.png").is_file()


def test_every_page_is_in_the_navigation_and_pages_that_are_not_there_are_left_out() -> None:
    front = front_page({"README.md": "# flowrl\n", "docs/new.md": "# A `new` page\n"})
    assert "[A new page](docs/new.md)" in front
    assert "A new page <docs/new>" in front
    assert "cards" not in front
    named = {page for found in NAVIGATION.values() for page in found}
    assert {name for name in made() if name.startswith("reference/") and name.count("/") == 1} <= named
    assert all(f"({path.relative_to(ROOT).as_posix()})" in made()["index.md"] for path in PAGES)


def test_the_tables_of_the_readme_name_every_family_and_configurations_that_ship() -> None:
    text = (ROOT / "README.md").read_text()
    table = text.partition("| model | family |")[2].partition("## Methods")[0].splitlines()[2:]
    rows = [line.split("|")[1:-1] for line in table if line]
    families, configurations = ([name for row in rows for name in row[k].split("`")[1::2]] for k in (1, 2))
    assert sorted(families) == sorted(PIPELINES)
    assert set(configurations) <= set(config_files())
    assert {config_files()[name].parent.name for name in configurations} == set(families)
    assert f"{len(PIPELINES)} families" in text


def test_words_of_other_toolkits_are_put_where_the_page_wants_them() -> None:
    by_hand, page = (ROOT / "docs" / "migrating.md").read_text(), made()["docs/migrating.md"]
    assert all(mark in by_hand and mark not in page for mark in MADE if "functions" not in mark)
    assert all(f"| `{theirs}` |" in page for theirs in foreign_words().keys)
    for toolkit in foreign_words().toolkits.values():
        assert all(f"| `{key}{'…' if key.endswith('.') else ''}` |" in page for key in toolkit.keys)


def test_linked_files_are_found() -> None:
    text = "[a](research/trials/kills.json) `[b](c.json)` [c](https://e.org/x.json) ![d](research/rlg/sweep.png)"
    pages = {"docs/memory.md": text}
    assert list(linked_files(pages)) == ["docs/research/rlg/sweep.png", "docs/research/trials/kills.json"]


def test_a_link_that_leads_nowhere_is_found(tmp_path: Path) -> None:
    page, other = tmp_path / "page.md", tmp_path / "other.md"
    other.write_text("# Here\n\n## It's `a` part\n\n## Twice\n\n## Twice\n\n```\n# no heading\n```\n")
    page.write_text(
        "# Page\n[a](other.md) [b](other.md#its-a-part) [c](other.md#twice-1) [d](#page) `[e](none.md)`\n"
        "[f](none.md) [g](other.md#twice-2) [h](#no-heading) ![i](none.png) [j](https://example.org/none)\n"
        "[k](other.md#no-heading)\n```\n[l](none.md)\n```\n"
    )
    assert broken_links([page]) == [
        "page.md: none.md leads to no file",
        "page.md: other.md#twice-2 leads to no heading of other.md",
        "page.md: #no-heading leads to no heading of page.md",
        "page.md: none.png leads to no file",
        "page.md: other.md#no-heading leads to no heading of other.md",
    ]
    assert list(markdown_links("[a [b] c](d)")) == ["d"]


def test_faults_of_a_built_site_are_found(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text(
        '<link rel="stylesheet" href="https://fonts.example/css"><link rel="canonical" href="https://e.org/a.html">'
        '<script src="//cdn.example/x.js"></script><script src="own.js"></script><img src="none.png">'
        '<h1 id="one">1</h1><a href="#one">1</a><a href="#two">2</a><a href="b.html#x">x</a><a href="c.html">c</a>'
        '<a href="https://example.org">out</a>'
    )
    (tmp_path / "b.html").write_text('<p id="y">')
    (tmp_path / "own.js").write_text("")
    (tmp_path / "own.css").write_text("@import 'https://e.org/x.css'; a{background:url(data:image/png;base64,x)}")
    count, wrong = faults_of_site(tmp_path)
    assert count == 6
    assert wrong == [
        "a.html loads https://fonts.example/css",
        "a.html loads //cdn.example/x.js",
        "a.html: #two leads to no anchor",
        "a.html: b.html#x leads to no anchor",
        "a.html: c.html leads to no file",
        "a.html: none.png leads to no file",
        "own.css loads https://e.org/x.css",
    ]


@pytest.mark.parametrize("module", [site_interface, site_links])
def test_examples_hold(module: ModuleType) -> None:
    assert doctest.testmod(module).attempted > 0
    assert doctest.testmod(module).failed == 0


def test_docstrings_become_markdown() -> None:
    text = "Does <a>, ``b`` and `<c>`.\n\nArgs:\n    x: first\n        and on.\n    y, z: others\n\nReturns:\n    One."
    assert markdown(text) == (
        "Does \\<a>, `b` and `<c>`.\n\n\n**Args**\n\n- `x`: first\n  and on.\n- `y, z`: others\n\n\n**Returns**\n\nOne."
    )


def test_without_sphinx_the_build_says_what_is_lacking(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "sphinx.application", None)
    assert main([str(tmp_path)]) == 1
    assert "make docs" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
