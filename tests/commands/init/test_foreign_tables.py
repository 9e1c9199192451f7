"""The tables of other toolkits' keys name keys, rewards and configurations that there are."""

from __future__ import annotations

import pytest

from flowrl.commands.init.foreign_tables import DEFAULTS, ELSEWHERE, MODELS, REWARDS, TABLES
from flowrl.commands.list.entries import config_files
from flowrl.config.source_syntax import table_of
from flowrl.config.strict_yaml import dotted_keys
from flowrl.config.train import TrainConfig
from flowrl.pipelines.places.known_checkpoints import published

OURS = set(dotted_keys(TrainConfig))


@pytest.mark.parametrize("kind", TABLES)
def test_what_is_taken_over_has_a_key_here(kind: str) -> None:
    plain = {name for entry in TABLES[kind].values() if not entry.startswith(("- ", "! ", "= "))
             for name in entry.split(", ")}  # fmt: skip
    assert plain - OURS == set()
    assert all(len(entry) > 5 for entry in TABLES[kind].values() if entry[0] in "-!=")  # a reason, not a sign alone
    assert DEFAULTS[kind].keys() <= TABLES[kind].keys()


def test_rewards_models_and_configurations_exist() -> None:
    names = {reward["name"] for table in REWARDS.values() for reward in table.values()}
    assert names <= table_of("flowrl.rewards", "REWARDS").keys()
    assert set(ELSEWHERE.values()) <= config_files().keys()
    assert all(published(model) is not None for model in MODELS.values())
    assert REWARDS.keys() == TABLES.keys() == DEFAULTS.keys()
