"""The tables of other toolkits' keys name keys, rewards and configurations that there are."""

from __future__ import annotations

from typing import get_args

import pytest

from flowrl.config.foreign import foreign_words
from flowrl.config.rewards import built_in_rewards
from flowrl.config.strict_yaml import dotted_keys
from flowrl.config.train import TrainConfig
from flowrl.migrating.foreign_files import Kind
from flowrl.pipelines.places.known_checkpoints import published

WORDS = foreign_words()
OURS = set(dotted_keys(TrainConfig))


@pytest.mark.parametrize("kind", WORDS.toolkits)
def test_what_is_taken_over_has_a_key_here(kind: str) -> None:
    toolkit = WORDS.toolkits[kind]
    entries = [entry for table in (toolkit.keys, *toolkit.of.values()) for entry in table.values()]
    taken = [entry.partition(" | ")[0] for entry in entries if not entry.startswith(("- ", "! ", "= "))]
    plain = {name for ours in taken for name in ours.split(", ")}
    said = {*plain, *toolkit.always, *(name for made in toolkit.methods.values() for name in made)}
    assert {name.partition(".options.")[0] for name in said} - OURS - {"objective"} == set()
    assert all(len(entry) > 5 for entry in entries if entry[0] in "-!=")  # a reason, not a sign alone
    assert toolkit.defaults.keys() <= toolkit.keys.keys()
    assert {*toolkit.of, *toolkit.methods} <= WORDS.methods.keys()


def test_rewards_models_and_configurations_exist() -> None:
    names = {reward["name"] for toolkit in WORDS.toolkits.values() for reward in toolkit.rewards.values()}
    assert names <= built_in_rewards().keys()
    assert set(WORDS.algorithms.values()) == WORDS.methods.keys()
    assert {name.partition(".options.")[0] for made in WORDS.methods.values() for name in made} - OURS <= {"objective"}
    assert all(published(model) is not None for model in WORDS.models.values())
    assert set(WORDS.toolkits) == set(get_args(Kind))
