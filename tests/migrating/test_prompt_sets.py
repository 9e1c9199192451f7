"""`flowrl data list`: what it says of published prompt sets, and docs/data.md, which is made from the same table."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from flowrl.config.base import find_config
from flowrl.config.prompt_sets import PROMPT_SETS, advice_on, set_of_file
from flowrl.config.train import load_config, resolve_path
from flowrl.migrating.prompt_sets import in_full, lines, page

ROOT = Path(__file__).parents[2]


def test_the_page_has_the_table() -> None:
    assert page() in (ROOT / "docs" / "data.md").read_text(), "docs/data.md: put in what page() gives"


def test_lines_fit_a_terminal() -> None:
    told = [*lines(), *(line for name in PROMPT_SETS for line in in_full(name))]
    assert max(map(len, told)) <= 80


def test_every_file_that_a_configuration_needs_is_of_a_set() -> None:
    texts = [path.read_text() for path in (ROOT / "configs").rglob("*.yaml")]
    named = {found for text in texts for found in re.findall(r"^\s+\w+: (data/[\w.]+\.\w+)$", text, re.MULTILINE)}
    assert len(named) >= 25
    assert not {path for path in named if set_of_file(path) is None}


def test_every_file_of_a_set_is_named_by_a_configuration() -> None:
    used = "".join(path.read_text() for path in (ROOT / "configs").rglob("*.yaml"))
    files = {file for found in PROMPT_SETS.values() for file in (*found.names, *found.files)}
    assert not {file for file in files if f"data/{file}" not in used and "_test" not in file}


@pytest.mark.parametrize("name", [name for name, found in PROMPT_SETS.items() if found.ships])
def test_what_ships_instead_is_there(name: str) -> None:
    assert all(resolve_path(text).is_file() for text in PROMPT_SETS[name].ships or [""])


def test_a_missing_file_names_the_command_the_source_and_what_ships() -> None:
    with pytest.raises(ValueError, match="looked for") as caught:
        resolve_path("data/pickscore_train.txt")
    for word in ("flowrl data get pickscore", "yifan123/flow_grpo", "MIT", "asset:prompts/everyday.txt"):
        assert word in str(caught.value)
    with pytest.raises(ValueError, match="asset:NAME"):
        resolve_path("mine/pickscore_train.txt")
    assert "everyday_eval" in advice_on("data/pickscore_test.txt")
    assert "'flowrl data list edit' says how" in advice_on("data/edit_train.jsonl")


@pytest.mark.parametrize("name", ["sd14_dance_grpo", "flux_dance_grpo_full"])
def test_presets_of_one_paper_share_its_prompts(name: str) -> None:
    assert load_config(find_config(name)).prompts.train == "data/hpd_train.txt"
