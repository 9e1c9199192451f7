"""Any credit with any advantages, any policy-gradient objective and any kernel that has a density.

The product has 9 x 9 x 4 x 7 choices, and more with what else can be set. It is covered in two ways:

- on the functions that an iteration consists of: sampled paths, credit, advantages, and the loss of each transition
  with its gradient, which at ratio 1 has a closed form: each objective with each credit by each kernel, each advantage
  with each credit by some kernel and, with the credit of finished images, by each;
- by whole iterations of the recipe over a covering array: every two levels of every two factors meet in some run.

Pairs without meaning are listed in `WITHOUT_MEANING`, and exactly these are refused, before a model loads.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from toy_pipeline import QuickRun, quick_run, reward_list, toy_config, toy_in_place

from flowrl.cli import main
from flowrl.config.train import TrainConfig
from flowrl.credit import CREDIT
from flowrl.objectives.policy_gradient import OBJECTIVES, Scored
from flowrl.recipes import grpo
from flowrl.samplers import KERNELS
from flowrl.session.preflight import resolve
from flowrl.training.assignment import advantages, all_ends, credit_of
from flowrl.training.loop import Loop
from flowrl.training.parts import read_run_prompts
from flowrl.training.paths import Paths, sample_paths, sampler_at
from flowrl.training.record import Recording

TREES, MERGED = ("branch_grpo", "tree_grpo"), ("tp_grpo", "vgpo")
TWO_REWARDS = ("gdpo", "log_tame")
UNREAD = dict.fromkeys(("global", "none"), "adv_std") | dict.fromkeys(TWO_REWARDS, "reward_aggregation")
UNREAD |= {"leave_one_out": "adv_baseline", "ngrpo": "adv_virtual_max"}
FACTORS: dict[str, dict[str, tuple[str, ...]]] = {
    "credit": {
        "outcome": (), "tp_grpo": (), "dense_grpo": (), "stepwise": ("credit.completion=2",), "vgpo": (),
        "g2rpo": ("credit.strides=[1, 2]",), "tempflow": ("credit.branches=2",), "self_opd": ("credit.branches=2",),
        "branch_grpo": ("credit.splits=[0, 1]", "credit.split_noise=4"), "tree_grpo": (),
    },
    "advantage": {
        "group": (), "global": ("adv_std=global",), "none": ("adv_std=none",),
        "leave_one_out": ("adv_baseline=leave_one_out",), "gdpo": ("reward_aggregation=gdpo",),
        "log_tame": ("reward_aggregation=log_tame",), "ngrpo": ("adv_virtual_max=1",),
        "a_grae": ("shaping.name=a_grae",), "dcpo": ("shaping.name=dcpo",),
    },
    "objective": {name: (f"objective.name={name}",) for name in ("clip", "guard", "dppo", "reinforce")},
    "kernel": {
        **{name: (f"sampler.kernel={name}",) for name, kernel in KERNELS.items() if kernel.stochastic},
        "published_cps": ("sampler.kernel=cps", "sampler.log_prob=published"),
    },
    "average": {
        name: (f"loss_aggregation={name}",) for name in ("rows", "samples", "sum_of_samples", "balanced")
    },
    "log_ratio": {"mean": (), "sum": ("log_ratio=sum",)},
    "guidance": {"1": (), "3": ("sampler.guidance_scale=3",)},
    "micro": {"one": (), "several": ("micro_batch_size=2",)},
    "kl": {"0": (), "0.1": ("kl_coef=0.1",)},
}  # fmt: skip
WITHOUT_MEANING: dict[tuple[str, str, str, str], str] = {
    **{("credit", c, "advantage", "gdpo"): "reward_aggregation" for c in MERGED},
    **{("credit", c, "advantage", "ngrpo"): "adv_virtual_max" for c in CREDIT if c != "outcome"},
    **{("credit", c, "advantage", "dcpo"): "credit.method=outcome" for c in CREDIT if c != "outcome"},
    **{("credit", "self_opd", "advantage", a): key for a, key in UNREAD.items()},
    **{("credit", c, "average", a): "loss_aggregation=rows" for c in TREES for a in FACTORS["average"] if a != "rows"},
    ("objective", "guard", "log_ratio", "sum"): "log_ratio=mean",
}
Choice = dict[str, str]


def test_every_method_has_its_line() -> None:
    assert FACTORS["credit"].keys() == CREDIT.keys()
    assert FACTORS["objective"].keys() == OBJECTIVES.keys()


def meaningful(choice: Choice) -> bool:
    return not any(choice.get(f) == a and choice.get(g) == b for f, a, g, b in WITHOUT_MEANING)


def pairs_of(choice: Choice) -> set[tuple[str, str, str, str]]:
    return {(f, choice[f], g, choice[g]) for f, g in combinations(FACTORS, 2)}


def all_pairs() -> list[tuple[str, str, str, str]]:
    found = ((f, a, g, b) for f, g in combinations(FACTORS, 2) for a, b in product(FACTORS[f], FACTORS[g]))
    return [pair for pair in found if pair not in WITHOUT_MEANING]


@cache
def covering() -> tuple[Choice, ...]:
    """Greedy: start a row with a pair that none has, then take for each factor the level that adds most new pairs."""
    left, rows = dict.fromkeys(all_pairs()), list[Choice]()
    while left:
        f, a, g, b = next(iter(left))
        row = {f: a, g: b}
        for factor in sorted(FACTORS, key=lambda name: -len(FACTORS[name])):
            if factor in row:
                continue
            levels = [level for level in FACTORS[factor] if meaningful({**row, factor: level})]
            turn = len(rows) % len(levels)  # ties go round, so that rows differ
            levels = levels[turn:] + levels[:turn]
            row[factor] = max(levels, key=lambda level: _new(left, row, factor, level))
        rows.append({factor: row[factor] for factor in FACTORS})
        for pair in pairs_of(rows[-1]):
            left.pop(pair, None)
    return tuple(rows)


def _new(left: dict[tuple[str, str, str, str], None], row: Choice, factor: str, level: str) -> int:
    order = list(FACTORS)
    ends = ((other, row[other]) for other in row)
    ordered = (
        ((factor, level), end) if order.index(factor) < order.index(end[0]) else (end, (factor, level)) for end in ends
    )
    return sum((*first, *second) in left for first, second in ordered)


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The toy's configuration, with the toy in the place of a model family."""
    yield from toy_in_place(tmp_path_factory.mktemp("product"))


def config_of(toy: Path, choice: Choice, *more: str) -> TrainConfig:
    overrides = [f"credit.method={choice['credit']}"] if "credit" in choice else []
    overrides += [text for factor, level in choice.items() for text in FACTORS[factor][level]]
    if choice.get("advantage") in TWO_REWARDS:
        overrides.append(reward_list(toy.parent, "brightness", "redness"))
    return toy_config(toy, *overrides, *more)


# ---- whole iterations ------------------------------------------------------------------------------------------------


def test_the_covering_array_covers() -> None:
    met = set().union(*(pairs_of(row) for row in covering()))
    assert met == set(all_pairs())
    assert all(meaningful(row) for row in covering())
    assert len(covering()) < 100  # 63 is the least: credits x advantages that go together


@pytest.mark.slow
@pytest.mark.usefixtures("numbers_alone")
@pytest.mark.parametrize("choice", covering(), ids=lambda choice: "-".join(choice.values()))
def test_an_iteration_of_any_combination(toy: Path, choice: Choice) -> None:
    (row,) = quick_run(config_of(toy, choice), toy.parent)
    # Some processors round other batches otherwise.
    assert row["ratio_first_deviation"] <= (1e-4 if choice["micro"] == "several" else 0.0)
    assert row["ratio_max_deviation"] == 0.0
    assert all(math.isfinite(value) for value in row.values())
    assert row["grad_norm"] > 0
    assert row["live_rows"] > 0
    assert row.get("kl", 0.0) == 0.0  # the policy is still its reference


# ---- function by function --------------------------------------------------------------------------------------------


def advantages_of(credit: str, kernel: str) -> list[str]:
    """Those that are tried with both. An advantage is a number of a row, whichever kernel drew it: so only outcome's go
    through all kernels, and those of another credit are dealt to them in turn, beginning elsewhere for each credit."""
    known = [name for name in FACTORS["advantage"] if meaningful({"credit": credit, "advantage": name})]
    kernels, turn = (
        list(FACTORS["kernel"]),
        list(FACTORS["credit"]).index(credit) + list(FACTORS["kernel"]).index(kernel),
    )
    if credit == "outcome":
        return known
    return known[turn % len(kernels) :: len(kernels)] or [known[turn % len(known)]]


def test_every_advantage_is_tried_with_every_credit_and_every_kernel() -> None:
    tried = {(c, k, a) for c, k in product(FACTORS["credit"], FACTORS["kernel"]) for a in advantages_of(c, k)}
    wanted = {(f, a, g, b) for f, a, g, b in all_pairs() if (f, g) == ("credit", "advantage")}
    assert {("credit", c, "advantage", a) for c, _, a in tried} == wanted
    assert {(k, a) for _, k, a in tried} == set(product(FACTORS["kernel"], FACTORS["advantage"]))
    assert {(c, k) for c, k, _ in tried} == set(product(FACTORS["credit"], FACTORS["kernel"]))


@pytest.mark.slow
@pytest.mark.parametrize("kernel", FACTORS["kernel"])
@pytest.mark.parametrize("credit", FACTORS["credit"])
def test_every_pair_has_the_closed_form_gradient_at_ratio_one(toy: Path, credit: str, kernel: str) -> None:
    """d loss / d mean is `-A (produced - mean) / (std^2 D)`; guard's has std in place of std^2, and 1 / abs(c).

    The published log-probability of CPS has 1/2 in place of std^2, which guard does not see.
    """
    known = advantages_of(credit, kernel)
    for two in sorted({advantage in TWO_REWARDS for advantage in known}):
        rewards = (reward_list(toy.parent, "brightness", "redness"),) if two else ()
        loop, table = _sampled(config_of(toy, {"credit": credit, "kernel": kernel}, *rewards))
        for advantage in known:
            if (advantage in TWO_REWARDS) == two:
                loop.config = config_of(toy, {"credit": credit, "kernel": kernel, "advantage": advantage})
                _check_objectives(loop, *table)


def _sampled(config: TrainConfig) -> tuple[Loop, tuple[Any, ...]]:
    run: Any = QuickRun(Path())
    loop, method = Loop(resolve(config, read_run_prompts(config.prompts)), run), CREDIT[config.credit.method]
    kernel, schedule, steps = sampler_at(loop, 0)
    batch = loop.batch(0)
    scoring = loop.scorer.start(batch)
    with torch.no_grad():
        how = Paths(kernel=kernel, schedule=schedule, steps=steps, keep_means=True)
        sampled = sample_paths(loop, batch, method, how, scoring)
    output = scoring.result()
    return loop, (batch, sampled, output, kernel, schedule)


def _check_objectives(loop: Loop, batch: Any, sampled: Any, output: Any, kernel: Any, schedule: Any) -> None:
    method, ends = CREDIT[loop.config.credit.method], all_ends(loop, batch, sampled, output)
    credit = credit_of(loop, sampled, output, kernel, schedule)
    record = Recording(loop, batch.asked, sampled, kernel, schedule)
    advantage_PM, trained_M, signal_M, dead = advantages(loop, method, batch.asked, sampled, credit, output, ends)
    live_M = trained_M & signal_M
    assert bool(advantage_PM.isfinite().all())
    assert bool(live_M.any())
    assert 0 <= dead < 1
    rows = grpo.rows_of(sampled, credit, advantage_PM, live_M, (1e-4, 1e-4))
    (blocks,) = grpo.micro_batches(rows, loop.geometry.micro_batch_size, 1)
    assert sorted(torch.cat(blocks).tolist()) == list(range(len(sampled)))
    for index in blocks:
        with torch.no_grad():
            new = record.replay(rows[index])
        leaf = replace(new, mean=new.mean.clone().requires_grad_())
        scored = record.scored_rows(rows[index], index, leaf)
        assert not scored.log_ratio.detach().any()
        for name, objective in OBJECTIVES.items():
            loss = objective.options()(scored)
            (gradient,) = torch.autograd.grad(loss.sum(), leaf.mean, retain_graph=True)
            torch.testing.assert_close(
                gradient, _gradient(name, scored, loop.config.sampler.log_prob), atol=1e-6, rtol=2e-4
            )
            scale = 1 / abs(scored.sensitivity) if name == "guard" else 1.0
            torch.testing.assert_close(loss.detach(), -scale * scored.advantage, atol=1e-6, rtol=1e-5)


def _gradient(name: str, scored: Scored, log_prob: str) -> Tensor:
    mean, std, dims = scored.new.mean.detach(), scored.new.std, scored.produced[0].numel()
    xi = (scored.produced - mean) / std
    each = xi / std if log_prob == "gaussian" else 2 * xi * std
    towards = xi / abs(scored.sensitivity) if name == "guard" else each
    return -scored.advantage.view(-1, *[1] * (mean.ndim - 1)) * towards / dims


# ---- what has no meaning ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pair", "key"), WITHOUT_MEANING.items(), ids=lambda value: "-".join(value) if isinstance(value, tuple) else ""
)
def test_pairs_without_meaning_are_refused(toy: Path, pair: tuple[str, str, str, str], key: str) -> None:
    with pytest.raises(ValueError, match=key):
        grpo.check(config_of(toy, {pair[0]: pair[1], pair[2]: pair[3]}))


@pytest.mark.slow
def test_exactly_the_pairs_without_meaning_are_refused(toy: Path) -> None:
    """Of a credit, an advantage and one of three other factors, and of those three together."""
    factors, usual = (
        ("objective", "average", "log_ratio"),
        {"objective": "clip", "average": "rows", "log_ratio": "mean"},
    )
    alone = [{**usual, factor: level} for factor in factors for level in FACTORS[factor]]
    together = [dict(zip(factors, levels, strict=True)) for levels in product(*(FACTORS[factor] for factor in factors))]
    for credit, advantage in product(FACTORS["credit"], FACTORS["advantage"]):
        base = config_of(toy, {"credit": credit, "advantage": advantage})
        for other in together if (credit, advantage) == ("outcome", "group") else alone:
            changes: dict[str, Any] = {"loss_aggregation": other["average"], "log_ratio": other["log_ratio"]}
            config = replace(base, objective=replace(base.objective, name=other["objective"]), **changes)
            choice = {"credit": credit, "advantage": advantage, **other}
            try:
                grpo.check(config)
                refused = False
            except ValueError:
                refused = True
            assert refused != meaningful(choice), choice


PROGRESSIVE = ("sampler.sde_window=progressive", "sampler.sde_window_interval=1")
REFUSALS: list[tuple[list[str], tuple[str, ...]]] = [
    (["objective.name=clipp"], ("clipp", "did you mean 'clip'", "reinforce")),
    (["credit.method=dense"], ("credit.method", "'dense_grpo'", "tree_grpo")),
    (["objective.options={delta: exact}"], ("objective 'clip'", "'delta'")),
    (["objective.name=guard", "objective.options={delta: exakt}"], ("'guard'", "published", "'exact'")),
    (["credit.options={gamma: 0.5}"], ("credit 'outcome'", "'gamma'")),
    (["credit.method=tempflow", "credit.options={step_std: 1}"], ("'step_std'",)),
    (["credit.completion=clean"], ("credit.completion", "outcome")),
    (["credit.method=dense_grpo", "credit.branches=2"], ("credit.branches", "dense_grpo")),
    (["credit.method=tempflow", "credit.branches=3"], ("group_size (4)", "credit.branches (3)")),
    (["credit.method=g2rpo", "credit.strides=[1,1]"], ("credit.strides", "twice")),
    (["credit.method=tree_grpo", "credit.children=3"], ("group_size is 4", "credit.children")),
    (["credit.method=tree_grpo", "sampler.num_steps=2"], ("2 of 2 steps",)),
    (["credit.method=tree_grpo", "sampler.sde_window_size=2"], ("sampler.sde_window_size", "tree_grpo")),
    (["credit.method=branch_grpo", "credit.splits=[0,3]"], ("credit.splits", "0 .. 2")),
    (["credit.method=branch_grpo", "credit.splits=[1,1]"], ("distinct",)),
    (["credit.method=tempflow", "best_of=2"], ("best_of", "tempflow")),
    (["credit.method=dense_grpo", "sampler.solver=dpm2"], ("sampler.solver", "dense_grpo")),
    (["credit.method=tree_grpo", "sampler.trained_fraction=0.5"], ("sampler.trained_fraction",)),
    (["sampler.trained_fraction=0.2"], ("sampler.trained_fraction (0.2) of 3", "0.33")),
    (["sampler.flash_tail=0.5"], ("sampler.grid=linspace",)),
    (["sampler.flash_tail=0.5", "sampler.grid=linspace", "credit.method=tree_grpo"], ("sampler.flash_tail",)),
    (["sampler.flash_tail=0.0", "sampler.grid=linspace"], ("(0, 1]",)),
    ([*PROGRESSIVE, "sampler.sde_window_size=3", "sampler.published_window=true"], ("window of 3",)),
    (["ratio=sequence"], ("loss_aggregation=samples",)),
    (["ratio=sequence", "loss_aggregation=samples", "credit.method=dense_grpo"], ("ratio=step", "method=outcome")),
    (["ratio=mixed", "loss_aggregation=samples", "objective.name=guard"], ("guard",)),
    (["credit.method=tempflow", "updates_per_rollout=4"], ("2 latents", "updates_per_rollout (4)")),
    (["adv_virtual_max=1", "adv_std=global"], ("adv_std to group",)),
    (["reward_aggregation=each"], ("two rewards",)),
    (["reward_map.options={k: 1}"], ("reward_map.name",)),
    (["reward_map.name=logistic"], ("p25",)),
    (["shaping.options={alpha: 1}"], ("shaping.name",)),
    (["shaping.name=a_grae", "shaping.options={omega: 1}"], ("'omega'",)),
    (["shaping.name=dcpo", "shaping.options={merge: half}"], ("pooled, release",)),
    (["shaping.name=dcpo", "curriculum.max_rounds=2"], ("curriculum.max_rounds=1",)),
    (["shaping.name=real", "updates_per_rollout=2"], ("set it to 1",)),
    (["best_of=2", "curriculum.max_rounds=2"], ("best_of",)),
    (["curriculum.accuracy_scaled_kl=true"], ("kl_coef",)),
    (["curriculum.options={share: 1}"], ("curriculum 'shuffled'", "'share'")),
    (["curriculum.sampling=replay", "curriculum.options={band: [0.8, 0.2]}"], ("ascends",)),
    (["curriculum.sampling=gaussian", "curriculum.options={width: 0}"], ("width",)),
    (["curriculum.sampling=gaussian", "curriculum.options={momentum: 1}"], ("momentum",)),
]  # fmt: skip


@pytest.mark.parametrize(("overrides", "parts"), REFUSALS, ids=[" ".join(given) for given, _ in REFUSALS])
def test_settings_that_cannot_work_are_refused(toy: Path, overrides: list[str], parts: tuple[str, ...]) -> None:
    with pytest.raises(ValueError) as error:  # noqa: PT011 - the parts are compared below
        grpo.check(toy_config(toy, *overrides))
    for part in parts:
        assert part in str(error.value)


def test_a_refusal_comes_before_a_model_loads(
    toy: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import toy_pipeline

    monkeypatch.setattr(toy_pipeline, "load", lambda *_, **__: pytest.fail("a model was loaded"))
    out = toy.parent / "refused"
    assert main(["train", str(toy), f"out={out}", "credit.method=tp_grpo", "adv_virtual_max=1"]) == 1
    assert "adv_virtual_max is the highest reward of a finished image" in capsys.readouterr().err
    assert not out.exists()


# ---- the other choices -----------------------------------------------------------------------------------------------

SEQUENCE = ("loss_aggregation=samples", "updates_per_rollout=2", "optim.lr=0.1")
OTHERS: dict[str, tuple[tuple[str, ...], int]] = {  # overrides, live rows of an iteration
    "sequence": (("ratio=sequence", *SEQUENCE), 24),
    "mixed": (("ratio=mixed", *SEQUENCE, "micro_batch_size=2"), 24),
    "step, samples": ((*SEQUENCE, "micro_batch_size=1"), 24),
    "several updates of branches": (("credit.method=tempflow", "updates_per_rollout=2"), 24),
    "several updates of trees": (("credit.method=tree_grpo", "updates_per_rollout=2"), 12),
    "several updates, guard": (("objective.name=guard", "updates_per_rollout=2", "micro_batch_size=2"), 24),
    "best of 2": (("best_of=2",), 12),
    "leading steps": (("sampler.trained_fraction=0.67",), 16),
    "random steps": (("sampler.trained_fraction=0.67", "sampler.trained_steps=random"), 16),
    "random steps of dense credit": (
        ("sampler.trained_fraction=0.67", "sampler.trained_steps=random", "credit.method=dense_grpo"), 16
    ),
    "window": (("sampler.sde_window_size=2",), 16),
    "window in a range": (("sampler.sde_window_size=1", "sampler.sde_window_range=[1, 3]"), 8),
    "dense credit in a window": (("sampler.sde_window_size=2", "credit.method=vgpo"), 16),
    "branches in a window": (("sampler.sde_window_size=2", "credit.method=g2rpo"), 16),
    "progressive": ((*PROGRESSIVE, "sampler.sde_window_size=2"), 16),
    "random window": (("sampler.sde_window_size=1", "sampler.sde_window=random"), 8),
    "decay": (("sampler.sde_window_size=1", "sampler.sde_window=decay"), 8),
    "exp_decay": (("sampler.sde_window_size=1", "sampler.sde_window=exp_decay"), 8),
    "frozen": (("sampler.sde_window_size=2", "sampler.sde_window=frozen"), 16),
    "flash": (
        (*PROGRESSIVE, "sampler.num_steps=8", "sampler.sde_window_size=2", "sampler.flash_tail=0.5",
         "sampler.grid=linspace", "sampler.solver=dpm2"), 16,
    ),
    "flash, dense credit": (
        ("sampler.num_steps=8", "sampler.sde_window_size=2", "sampler.flash_tail=0.5", "sampler.grid=linspace",
         "credit.method=stepwise"), 16,
    ),
    "one latent a group": (("same_latent=true",), 24),
    "logistic": (("reward_map.name=logistic", "reward_map.options={p25: 0.4, p50: 0.45, p75: 0.5}"), 24),
    "klexpo": (("curriculum.accuracy_scaled_kl=true", "kl_coef=0.1", "optim.lr=0.1"), 24),
    "asymmetric clip": (("clip_range=[1e-4, 2e-4]", "updates_per_rollout=2"), 24),
    "clean completions": (("credit.method=tp_grpo", "credit.completion=clean"), 24),
    "stepwise trees": (("credit.method=tree_grpo", "credit.splits=[0, 2]"), 24),
    "published guard": (("objective.name=guard", "objective.options={delta: published}"), 24),
    "gaussian prompts": (("curriculum.sampling=gaussian", "curriculum.max_rounds=2"), 24),
    "replayed prompts": (("curriculum.sampling=replay", "curriculum.options={cooldown: 1, band: [0.2, 0.8]}"), 24),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_the_other_choices_run(toy: Path, name: str) -> None:
    overrides, live = OTHERS[name]
    first, second = quick_run(toy_config(toy, "num_iterations=2", *overrides), toy.parent)
    again = any("updates_per_rollout" in override for override in overrides)
    for row in (first, second):
        assert row["ratio_first_deviation"] < 1e-6  # batches of updates are others than the rollout's
        assert (row["ratio_max_deviation"] > 0) == again  # the second update sees a policy that has moved
        assert all(math.isfinite(value) for value in row.values())
        assert row["grad_norm"] > 0
    if name not in ("several updates of trees", "stepwise trees", "clean completions"):
        assert (first["live_rows"], second["live_rows"]) == (live, live)


def test_published_windows_run_empty_at_the_end_of_a_round(toy: Path) -> None:
    window = (*PROGRESSIVE, "sampler.sde_window_size=1")
    rows = quick_run(toy_config(toy, *window, "sampler.published_window=true", "num_iterations=4"), toy.parent)
    assert [row["live_rows"] for row in rows] == [8, 8, 0, 8]
    assert "reward" not in rows[2]
    assert rows[2]["nfe/total"] == rows[1]["nfe/total"]


@pytest.mark.parametrize("credit", ["outcome", "dense_grpo", "tempflow", "tree_grpo"])
def test_rounds_go_on_until_enough_groups_disagree(toy: Path, credit: str) -> None:
    """Two of the four prompts never teach. A round samples two prompts; three rounds are the most."""
    choice = {"credit": credit}
    overrides = (reward_list(toy.parent, "half_fail"), "curriculum.max_rounds=3", "num_iterations=4")
    rows = quick_run(config_of(toy, choice, *overrides), toy.parent)
    once = quick_run(config_of(toy, choice, "num_iterations=1"), toy.parent)[0]["num_scored"]
    rounds = [row["num_scored"] // once for row in rows]
    assert set(rounds) <= {1, 2, 3}
    assert max(rounds) > 1
    # Levels of a tree are evaluated in other batches than they are trained in, which some processors round otherwise.
    assert all(row["ratio_first_deviation"] <= (1e-4 if credit == "tree_grpo" else 0.0) for row in rows)
    assert any(row["grad_norm"] > 0 for row in rows if row["live_rows"])


@pytest.mark.parametrize(
    ("credit", "advantage"),
    [pair for pair in product(CREDIT, ("group", "global")) if ("credit", pair[0], "advantage", pair[1]) in all_pairs()],
)
def test_images_without_a_reward_take_no_part(toy: Path, credit: str, advantage: str) -> None:
    """Half of the images of every call have none."""
    choice = {"credit": credit, "advantage": advantage}
    (row,) = quick_run(config_of(toy, choice, reward_list(toy.parent, "broken"), "sampler.kernel=cps"), toy.parent)
    (whole,) = quick_run(config_of(toy, choice, "sampler.kernel=cps"), toy.parent)
    assert 0 < row["invalid_ratio"] < 1
    assert row["live_rows"] < whole["live_rows"]
    assert math.isfinite(row["loss"]) if row["live_rows"] else "loss" not in row
