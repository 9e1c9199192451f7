"""What may be set beside what: every pair passes the checks of `flowrl train`, or is refused for its reason."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations
from pathlib import Path

import pytest
from page_parts import fill
from split_runs import command
from write_together import PAGE, PART, SETTINGS, refused, text

from flowrl.config.together import EXCLUSIONS, OFF, Exclusion, check_together
from flowrl.config.train import TrainConfig, load_config
from flowrl.session.preflight import look

GIVEN = {
    "parallel.shard": ("parallel.shard=2",),
    "parallel.context": ("parallel.context=2",),
    "workers.rollouts": ("workers.rollouts=2",),
    "pipeline.quantize": ("pipeline.quantize=nf4",),
    "policy.lora_variant": ("policy.lora_variant=rslora", "policy.lora_variant=dora"),
    "keep_graphs": ("keep_graphs=true",),
}
"""Values of a key that stands for all of them."""
PAIRS = [
    (one, other)
    for names in combinations(SETTINGS, 2)
    if names[0].partition("=")[0] != names[1].partition("=")[0]
    for one in GIVEN.get(names[0], names[:1])
    for other in GIVEN.get(names[1], names[1:])
]
Load = Callable[..., TrainConfig]


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Load:
    """Reads the configuration of a tiny FLUX.1, whose tokens can be split, with settings on top."""
    folder = tmp_path_factory.mktemp("together")

    def loaded(*settings: str) -> TrainConfig:
        config, _out, *own = command(folder, "flux", "grpo", folder / "run", "sampler.noise_level=0.7")
        own += ["policy.lora_rank=null"] * ("policy.train=full" in settings)
        drawn = {"workers.staleness=1", "workers.engine=engine.py", "workers.shard=2"}
        own += ["workers.rollouts=1"] * bool(drawn & {*settings})
        own += ["sampler.sde_window_size=1"] * ("sampler.sde_window_by=prompt" in settings)
        return load_config(config, [*own, *settings])

    return loaded


@pytest.mark.parametrize("pair", PAIRS, ids=" ".join)
def test_a_pair_is_allowed_or_refused_for_its_reason(load: Load, pair: tuple[str, str]) -> None:
    faults = look(load(*pair), here=False).faults
    reasons = [EXCLUSIONS[number - 1].why for number in refused(*pair)]
    assert len(faults) == len(reasons) <= 1
    for fault, why in zip(faults, reasons, strict=True):
        keys = sorted((setting.partition("=")[0] for setting in pair), key=list(OFF).index)
        assert fault.startswith(tuple(pair))
        assert why in fault
        assert all(f"{key}={OFF[key]}" in fault for key in keys)


OTHERS = {
    "optim.name": "optim.name=paged_adamw",
    "ratio": "ratio=sequence",
    "policy.lora_rank": "policy.lora_rank=4",
    "policy.lora_alpha": "policy.lora_alpha=4",
    "policy.init_lora": "policy.init_lora=runs/a/lora",
    "optim.offload": "optim.offload=true",
    "workers.shard": "workers.shard=2",
    "workers.staleness": "workers.staleness=1",
    "workers.engine": "workers.engine=engine.py",
    "curriculum.sampling": "curriculum.sampling=replay",
    "curriculum.max_rounds": "curriculum.max_rounds=2",
    "sampler.trained_fraction": "sampler.trained_fraction=0.5",
    "updates_per_rollout": "updates_per_rollout=2",
    "rewards.routes": "rewards.0.routes=[left]",
    "best_of": "best_of=2",
    "shaping.name": "shaping.name=dcpo",
    "reward_partial": "reward_partial=renormalise",
    "sampler.calibration.iterations": "sampler.calibration.iterations=1",
    "dmd.weight": "dmd.weight=0.1",
    "sampler.first_block_cache": "sampler.first_block_cache=0.1",
}
OTHER_PAIRS = [one.settings for one in EXCLUSIONS if not {*one.settings} <= {*SETTINGS}]


@pytest.mark.parametrize("settings", OTHER_PAIRS, ids=" ".join)
def test_what_else_is_refused_says_so(load: Load, settings: tuple[str, ...]) -> None:
    given = [GIVEN.get(setting, (OTHERS.get(setting, setting),))[0] for setting in settings]
    cached = ["recipe=forward"] * ("sampler.first_block_cache" in settings)  # which is not grpo
    with pytest.raises(ValueError, match="do not go together") as raised:
        check_together(load(*cached, *given))
    assert next(one.why for one in EXCLUSIONS if one.settings == settings) in str(raised.value)
    for left in given:
        check_together(load(*cached, *(setting for setting in given if setting != left)))


@pytest.mark.parametrize("key", ["parallel.shard", "workers.shard"])
def test_stock_pipelines_are_not_split(load: Load, key: str) -> None:
    faults = look(load("pipeline.name=generic", f"{key}=2"), here=False).faults
    assert "pipeline.name=generic loads a model whole onto one device" in str(faults)
    assert "onto one device" not in str(look(load("pipeline.name=generic"), here=False).faults)


def test_a_refusal_is_met_where_all_of_its_settings_are() -> None:
    one = Exclusion(settings=("parallel.shard", "policy.train=full"), why="there is one")
    assert one.met({**OFF, "parallel.shard": "3", "policy.train": "full"}) == ["parallel.shard=3", "policy.train=full"]
    assert one.met({**OFF, "parallel.shard": "3"}) == one.met({**OFF, "policy.train": "full"}) == []
    assert one.said(["parallel.shard=3", "policy.train=full"]) == (
        "parallel.shard=3 and policy.train=full do not go together, because there is one: set policy.train=lora or "
        "parallel.shard=1"
    )


def test_the_page_has_these_tables(tmp_path: Path) -> None:
    copy = tmp_path / "composing.md"
    copy.write_text(PAGE.read_text())
    fill(copy, PART, text())
    assert copy.read_text() == PAGE.read_text(), "run docs/research/scripts/write_together.py"
