"""Every method on the toy pipeline gives, in five iterations, the numbers recorded for it (`golden_runs.py`)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from golden_runs import compare, differences_of, first_update, leftovers, machine, record_of, reproducible, text_of
from toy_pipeline import reward_list, write_pairs, write_toy

from flowrl.cli import main
from flowrl.pipelines import PIPELINES
from flowrl.rewards import REWARDS

TWICE = ("updates_per_rollout=2", "clip_range=1e-3")  # lr moves the ratio that far: some rows are clipped
SAMPLES = (*TWICE, "loss_aggregation=samples")
EVALUATED = ("prompts.eval=FOLDER/prompts.txt", "eval_every=2", "eval.num_images=0")
NOISY = "{reward: noisy, options: {reward: smooth_brightness, std: 0.02}}"
WINDOW = ("sampler.sde_window=progressive", "sampler.sde_window_size=2", "sampler.sde_window_interval=2")
ODE = ("sampler.kernel=ode",)
FORWARD = ("recipe=forward", *ODE, "times.count=3", "prompts_per_step=4", "micro_batch_size=8")
PAIRS = ("recipe=preference", "prompts_per_step=4", "micro_batch_size=4")
GRADIENT = ("recipe=backprop", *ODE, "rewards=[{name: smooth_brightness}]", "micro_batch_size=4")
CASES: dict[str, tuple[str, ...]] = {
    # Recipe grpo: advantages, ratio, loss
    "outcome": EVALUATED,
    "micro-batches": ("micro_batch_size=2", "rollout_batch_size=4"),
    "guidance": ("sampler.guidance_scale=3",),
    "one-latent": ("same_latent=true",),
    "several-updates": TWICE,
    "asymmetric-clip": ("updates_per_rollout=2", "clip_range=[5e-4, 2e-3]"),
    "sequence-ratio": ("ratio=sequence", *SAMPLES),
    "mixed-ratio": ("ratio=mixed", *SAMPLES, "micro_batch_size=2"),
    "summed-log-ratio": (*TWICE, "log_ratio=sum", "loss_aggregation=sum_of_samples"),
    "balanced": (*TWICE, "loss_aggregation=balanced", "adv_virtual_max=1"),
    "guard": ("objective.name=guard", *TWICE),
    "guard-published": ("objective.name=guard", "objective.options={delta: published}", *TWICE),
    "dppo": ("objective.name=dppo", *TWICE),
    "reinforce": ("objective.name=reinforce", "adv_baseline=leave_one_out", "adv_std=none"),
    "global-std": ("adv_std=global", "adv_correction=1"),
    "virtual-max": ("adv_virtual_max=1",),
    "a-grae": ("shaping.name=a_grae",),
    "dcpo": ("shaping.name=dcpo", "curriculum.sampling=gaussian"),
    "best-of": ("best_of=2",),
    "kl": ("kl_coef=0.1",),
    "kl-no-dt": ("kl_coef=0.1", "kl_type=no_dt", *TWICE),
    "accuracy-scaled-kl": ("curriculum.accuracy_scaled_kl=true", "kl_coef=0.1", "FUNCTIONS success"),
    "ema": ("policy.ema_decay=0.9", *EVALUATED),
    # Rewards
    "invalid": ("FUNCTIONS broken_by_value",),
    "pairwise": (f"rewards=[{{name: win_rate, options: {{comparator: {NOISY}}}}}]",),
    "tournament": (f"rewards=[{{name: tournament, options: {{comparator: {NOISY}, scheme: swiss}}}}]",),
    "ranks": ("rewards=[{name: rank, options: {reward: smooth_brightness}}]",),
    "logistic": ("reward_map.name=logistic", "reward_map.options={p25: 0.4, p50: 0.45, p75: 0.5}"),
    "two-rewards": ("FUNCTIONS brightness redness", *EVALUATED),
    "two-rewards-each": ("FUNCTIONS brightness redness", "reward_aggregation=each"),
    "gdpo": ("FUNCTIONS brightness redness", "reward_aggregation=gdpo"),
    "log-tame": ("FUNCTIONS brightness redness", "reward_aggregation=log_tame"),
    "geometric": ("FUNCTIONS brightness redness", "reward_aggregation=geometric"),
    # Credit
    "tp-grpo": ("credit.method=tp_grpo",),
    "stepwise": ("credit.method=stepwise", "credit.completion=2"),
    "dense": ("credit.method=dense_grpo", "kl_coef=0.1"),
    "vgpo": ("credit.method=vgpo", "loss_aggregation=samples"),
    "g2rpo": ("credit.method=g2rpo", "credit.strides=[1, 2]"),
    "tempflow": ("credit.method=tempflow", "credit.branches=2"),
    "branch-grpo": ("credit.method=branch_grpo", "credit.splits=[0, 1]", "credit.split_noise=4"),
    "tree-grpo": ("credit.method=tree_grpo",),
    # Sampling
    "flow-sde": ("sampler.kernel=flow_sde", "sampler.noise_level=0.9"),
    "dance-sde": ("sampler.kernel=dance_sde",),
    "cps": ("sampler.kernel=cps", *EVALUATED),
    "ddim-flow": ("sampler.kernel=ddim_flow",),
    "wan-sde": ("sampler.kernel=wan_sde",),
    "dpm-sde": ("sampler.kernel=dpm_sde", "sampler.noise_level=0.5"),  # at 1 it is ddim_flow
    "window": ("sampler.sde_window_size=2",),
    "mixgrpo": (*WINDOW, "same_latent=true"),
    "mixgrpo-flash": (*WINDOW, "sampler.num_steps=8", "sampler.flash_tail=0.5", "sampler.grid=linspace",
                      "sampler.solver=dpm2"),
    "random-steps": ("sampler.trained_fraction=0.67", "sampler.trained_steps=random"),
    # Prompts
    "replay": ("curriculum.sampling=replay", "curriculum.options={cooldown: 1, band: [0.2, 0.8]}"),
    "gaussian": ("curriculum.sampling=gaussian", "curriculum.options={momentum: 0.5, width: 0.1}"),
    "rounds": ("FUNCTIONS half_fail", "curriculum.max_rounds=3"),
    # Recipe forward
    "nft": (*FORWARD, "objective.name=nft", "kl_coef=0.1", "sampler.solver=dpm2", *EVALUATED),
    "awm": (*FORWARD, "objective.name=awm", "objective.options={old_kl_coef: 1.0}", "slots.old_decay=awm",
            "times.kind=discrete_wo_init", "times.fraction=0.9"),
    "rft": (*FORWARD, "objective.name=rft", "times.kind=logit_normal"),
    "rwr": (*FORWARD, "objective.name=rwr"),
    "dgpo": (*FORWARD, "objective.name=dgpo", "kl_coef=1e-3", "times.kind=discrete"),
    "crd": (*FORWARD, "objective.name=crd", "slots.old_decay=crd"),
    # Recipe preference
    "dpo": (*PAIRS, *ODE, "times.count=2", "objective.options={beta: 100.0, ref_update_every: 2}", *EVALUATED),
    "dpo-offline": ("recipe=preference", *ODE, "times.count=2", "group_size=2", "objective.name=dpo_offline",
                    "objective.options.pairs=FOLDER/pairs", *EVALUATED),
    "d3po": (*PAIRS, "same_latent=true", "group_size=2", "objective.name=d3po"),
    # Recipe backprop
    "draft": (*GRADIENT, "objective.name=draft", "objective.options.count=2", *EVALUATED),
    "alignprop": (*GRADIENT, "objective.name=alignprop"),
    "refl": (*GRADIENT, "objective.name=refl", "objective.options={target: 1, scale: 1}"),
    "drtune": (*GRADIENT, "objective.name=drtune", "objective.options.count=2", "objective.options.early_stop=1"),
    # Recipe visited
    "opd": ("recipe=visited", *ODE, "policy.teachers=[{guidance_scale: 3}]", *EVALUATED),
    "opd-kl": ("recipe=visited", "policy.teachers=[{guidance_scale: 3}]", "policy.ema_decay=0.9", "rewards=[]",
               "objective.options={weight: kl, states: 2, query: [5, 2]}"),
}  # fmt: skip


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The toy's configuration, with the toy in the place of a model family, a reward with gradient, and pairs."""
    folder = tmp_path_factory.mktemp("golden")
    write_pairs(folder / "pairs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(PIPELINES, "sd3", "toy_pipeline")
        patch.setitem(REWARDS, "smooth_brightness", "toy_pipeline:SmoothBrightness")
        yield write_toy(folder, num_iterations=5, checkpoint_every=5)


@pytest.fixture(autouse=True)
def _reproducible() -> Iterator[None]:
    with reproducible():
        yield


def _train(toy: Path, out: Path, settings: tuple[str, ...]) -> Path:
    """Trains with settings in which FOLDER and FUNCTIONS stand for the toy's folder and functions of its rewards."""
    overrides = [
        reward_list(toy.parent, *text.split()[1:]) if text.startswith("FUNCTIONS ")
        else text.replace("FOLDER", str(toy.parent)) for text in settings
    ]  # fmt: skip
    assert main(["train", str(toy), f"out={out}", *overrides]) == 0
    return out


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_run_gives_the_recorded_numbers(toy: Path, tmp_path: Path, name: str) -> None:
    compare("toy", name, _train(toy, tmp_path / "run", CASES[name]))


def test_every_record_belongs_to_a_case() -> None:
    assert leftovers("toy", list(CASES)) == []


def test_a_difference_is_named(toy: Path, tmp_path: Path) -> None:
    """A last bit counts on the same machine; on another a thousandth up to the first update, after it what the settings
    decide; a count, a name or a missing row always."""
    record = record_of(_train(toy, tmp_path / "run", ("num_iterations=2", *EVALUATED)))
    assert json.loads(text_of(record)) == record
    assert "seconds" not in text_of(record)
    assert str(tmp_path) not in text_of(record)
    assert record["machine"] == machine()
    assert list(differences_of(record, record, exact=True)) == []

    def changed(key: str, value: float | None) -> list[list[str]]:
        rows = [dict(row) for row in record["rows"]]
        rows[1] = {name: old for name, old in rows[1].items() if name != key}
        if value is not None:
            rows[1][key] = value
        return [list(differences_of(record, {**record, "rows": rows}, exact=exact)) for exact in (True, False)]

    reward = record["rows"][1]["reward"]
    bit = float(np.nextafter(reward, 1))
    assert changed("reward", bit) == [[f"row 1, iteration 0, key 'reward': recorded {reward!r}, found {bit!r}"], []]
    for key, value in (("reward", reward + 0.01), ("live_rows", 23), ("loss", None), ("new", 1.0)):
        strict, lenient = changed(key, value)
        assert len(strict) == len(lenient) == 1
        assert f"key '{key}'" in lenient[0]
    shorter = {**record, "rows": record["rows"][:-1]}
    assert list(differences_of(record, shorter, exact=False)) == ["4 rows recorded, 3 found"]
    moved = {**record, "lora": record["lora"] | {"sha256": "0"}}
    assert len(list(differences_of(record, moved, exact=True))) == 1
    assert list(differences_of(record, moved, exact=False)) == []
    for part in ("first", "lora"):
        fewer = dict(list(record[part].items())[:-1])
        assert len(list(differences_of(record, {**record, part: fewer}, exact=False))) == 1


@pytest.mark.parametrize(
    ("key", "factor", "told"),
    [("size 0", 1 + 1e-5, False), ("size 0", 1 + 1e-3, True), ("signed 0", -1.0, True),
     ("gradient times step", 1 + 1e-3, True), ("updates", 2, True)],
)  # fmt: skip
def test_the_first_update_is_compared_by_the_size_of_its_sums(key: str, factor: float, told: bool) -> None:
    gradient = torch.linspace(-1, 2, 100, dtype=torch.float64)
    first = {"updates": 1, **first_update([(gradient, -0.1 * gradient.sign())])}
    record = {"rows": [{"iteration": 0, "grad_norm": 1.0}], "first": first, "lora": {"norm a": 1.0}}
    changed = {**record, "first": first | {key: first[key] * factor}}
    assert len(list(differences_of(record, changed, exact=False))) == told
    assert len(list(differences_of(record, changed, exact=True))) == 1


@pytest.mark.parametrize(
    ("row", "updates", "key", "told"),
    [
        (0, 2, "grad_norm", True),
        (0, 4, "grad_norm", False),
        (0, 4, "reward", True),
        (1, 2, "reward", False),
        (1, 2, "nfe/total", True),
    ],
)
def test_what_rounding_is_multiplied_into_is_not_compared(row: int, updates: int, key: str, told: bool) -> None:
    """A row's means over several updates hold more than the first; later rows hold what the settings decide."""
    rows = [{"iteration": i, "grad_norm": 1.0, "reward": 0.5, "nfe/total": 8} for i in range(2)]
    record = {"rows": rows, "first": {"updates": updates}, "lora": {"norm a": 1.0}}
    other = [dict(one) for one in rows]
    other[row][key] *= 2
    found = list(differences_of(record, {**record, "rows": other}, exact=False))
    assert [f"row {row}, iteration {row}, key '{key}'" in line for line in found] == [True] * told
