"""The cheapest settings with which a run fits a card."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace

import pytest
from test_plan_memory import FAMILY, SETTINGS, facts

from flowrl.config.base import find_config
from flowrl.config.train import load_config
from flowrl.planning import gather as gathering
from flowrl.planning.fits import Choices, Fit, card_gib, fit
from flowrl.planning.memory import GIB, Facts, memory_of
from flowrl.session.preflight import recipe_of

CHOICES = Choices(
    sizes={1: [1, 2, 4], 2: [1, 2], 4: [1], 8: [1]}, encoders=True, checkpoints=True, videos=False, rewards=True,
    splits=True, forms=("int8", "nf4"),
)  # fmt: skip


def least(card: int, own: Facts | None = None) -> Fit:
    return fit(own or facts(), SETTINGS, CHOICES, card)


def test_the_cheapest_settings_that_fit_are_found() -> None:
    assert least(40).overrides == ()
    assert least(31).overrides == ("pipeline.free_text_encoders=true",)
    assert least(24).overrides == ("pipeline.free_text_encoders=true", "rollout_batch_size=2", "micro_batch_size=2")
    for card in (16, 18, 20, 24, 31):
        found = least(card)
        assert found.overrides is not None
        assert found.memory.peak <= card_gib(card) * GIB


def test_each_change_is_needed_and_its_gain_is_what_the_run_takes_without_it() -> None:
    for card in (16, 18, 20, 24, 31):
        found, room = least(card), card_gib(card) * GIB
        assert [overrides for overrides, _ in found.gains] == list(changes(found))
        for overrides, gain in found.gains:
            assert found.memory.peak + gain > room, overrides
    only = least(31)
    plain = memory_of(facts(), SETTINGS).peak
    assert only.gains == (("pipeline.free_text_encoders=true", plain - only.memory.peak),)


def changes(found: Fit) -> Iterator[str]:
    """Changes of a fit, those of both batches as one."""
    for text in found.overrides or ():
        if text.startswith("rollout_batch_size"):
            yield f"{text} {text.replace('rollout', 'micro')}"
        elif not text.startswith("micro_batch_size"):
            yield text


def test_a_dear_setting_is_not_changed_where_cheap_ones_will_do() -> None:
    whole = replace(CHOICES, forms=())  # in few bits this network gains nothing by parts
    seen = [fit(facts(), SETTINGS, whole, card).overrides for card in range(12, 41)]
    dear = [place for place, found in enumerate(seen) if found and any("shard" in text for text in found)]
    assert dear, "weights are split on the smallest cards"
    assert max(dear) < min(place for place, found in enumerate(seen) if found is not None and not found)
    assert [found for place, found in enumerate(seen) if place > max(dear) and found is None] == []


def test_a_form_is_only_changed_for_a_smaller_one() -> None:
    own = CHOICES.forms
    for form in ("int8", "fp8", "int8_bnb"):
        found = fit(facts(), replace(SETTINGS, quantize=form), replace(CHOICES, splits=False, forms=own), 14)
        assert found.overrides is not None
        assert "pipeline.quantize=nf4" in found.overrides
        assert found.memory.peak <= card_gib(14) * GIB
    assert fit(facts(), replace(SETTINGS, quantize="nf4"), CHOICES, 8).overrides is None


def test_copies_take_cards_of_their_own() -> None:
    found = fit(facts(), SETTINGS, replace(CHOICES, forms=(), copies=2), 14)
    assert found.overrides is not None
    assert any(text.startswith("parallel.shard") for text in found.overrides)
    assert found.settings.processes == 2 * found.settings.shard


@pytest.mark.parametrize(("overrides", "lacking"), [
    ((), ()),
    (("policy.lora_variant=dora",), ()),
    (("pipeline.device=mps",), ("splits", "forms")),
    (("pipeline.compile=blocks",), ("forms",)),
    (("parallel.context=2",), ("splits",)),
    (("workers.rollouts=1",), ()),
    (("rewards=[{file: own.py, function: shade}]",), ("rewards",)),
    (("eval.rewards=[{name: adversarial}]",), ("rewards",)),
])  # fmt: skip
def test_what_train_refuses_is_not_advised(overrides: tuple[str, ...], lacking: tuple[str, ...]) -> None:
    config = load_config(find_config("tiny_grpo_geneval"), list(overrides))
    plan = SimpleNamespace(config=config, facts=facts(), processes=2, counts=recipe_of(config).counts(config))
    found = gathering._choices(plan, FAMILY)  # type: ignore[arg-type]
    assert {name for name in ("splits", "forms", "rewards") if not getattr(found, name)} == set(lacking)


def test_what_fits_no_card_says_what_is_in_the_way() -> None:
    found = least(8)
    assert found.overrides is None
    assert found.memory.peak > card_gib(8) * GIB
