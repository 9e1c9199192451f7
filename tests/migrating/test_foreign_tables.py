"""The tables of other toolkits' keys name keys, rewards and configurations that there are."""

from __future__ import annotations

from typing import get_args

import pytest

from flowrl.config.base import config_files
from flowrl.config.foreign import foreign_words
from flowrl.config.source_syntax import table_of
from flowrl.config.strict_yaml import dotted_keys
from flowrl.config.train import TrainConfig
from flowrl.migrating.foreign_files import Kind
from flowrl.pipelines.known_checkpoints import published

WORDS = foreign_words()
OURS = set(dotted_keys(TrainConfig))


@pytest.mark.parametrize("kind", WORDS.toolkits)
def test_what_is_taken_over_has_a_key_here(kind: str) -> None:
    toolkit = WORDS.toolkits[kind]
    plain = {name for entry in toolkit.keys.values() if not entry.startswith(("- ", "! ", "= "))
             for name in entry.split(", ")}  # fmt: skip
    assert plain - OURS == set()
    assert all(len(entry) > 5 for entry in toolkit.keys.values() if entry[0] in "-!=")  # a reason, not a sign alone
    assert toolkit.defaults.keys() <= toolkit.keys.keys()


def test_rewards_models_and_configurations_exist() -> None:
    names = {reward["name"] for toolkit in WORDS.toolkits.values() for reward in toolkit.rewards.values()}
    assert names <= table_of("flowrl.rewards", "REWARDS").keys()
    assert set(WORDS.algorithms.values()) <= config_files().keys()
    assert all(published(model) is not None for model in WORDS.models.values())
    assert set(WORDS.toolkits) == set(get_args(Kind))
