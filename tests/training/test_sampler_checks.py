"""What a sampler's settings have to satisfy before a model loads, and the published log-probability in a run."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from toy_pipeline import QuickRun, quick_run, toy_config, write_toy

from flowrl.cli import main
from flowrl.config.foreign import foreign_words
from flowrl.config.train import find_config, load_config
from flowrl.credit import CREDIT
from flowrl.pipelines import PIPELINES
from flowrl.recipes import grpo
from flowrl.samplers import KERNELS
from flowrl.session.preflight import preflight, resolve
from flowrl.training.loop import Loop
from flowrl.training.parts import read_run_prompts
from flowrl.training.paths import Paths, sample_paths, sampler_at

ALL = "flow_sde, dance_sde, cps, ddim_flow, wan_sde, dpm_sde"


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setitem(PIPELINES, "sd3", "toy_pipeline")
    return write_toy(tmp_path)


def refusal(toy: Path, *overrides: str) -> str:
    with pytest.raises(ValueError, match="sampler") as caught:
        grpo.check(toy_config(toy, *overrides))
    return str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (("kernel=ode",), ["ode has no density", "recipe grpo needs one", f"choose one of {ALL}"]),
        (("kernel=flow_sd",), [f"one of ode, {ALL}", "'flow_sd'", "did you mean 'flow_sde'"]),
        (("kernel=ode", "noise_level=0.7"), ["0.7", "kernel ode adds no noise"]),
        (("noise_level=0",), ["noise_level 0", "no density"]),
        (("noise_level=-0.5",), ["sampler.noise_level of flow_sde", "at least 0, got -0.5"]),
        (("kernel=cps", "noise_level=1.2"), ["sampler.noise_level of cps must be in [0, 1]", "1.2"]),
        (("kernel=ddim_flow", "noise_level=1.2"), ["of ddim_flow must be in [0, 1]", "1.2"]),
        (("sde_window_size=4",), ["(4)", "[0, 3]", "3 steps"]),
        (("sde_window_range=[0,5]",), ["[0, 5]", "num_steps (4)"]),
        (("sde_window_range=[3,3]",), ["[3, 3]", "low < high"]),
        (("sde_window_range=[-1,3]",), ["[-1, 3]", "0 <= low"]),
        (("num_steps=1",), ["[0, 0]", "num_steps (1)"]),
        (("kernel=cps", "sde_window_range=[0,4]"), ["last of 4 steps", "end the range at 3"]),
        (("kernel=dpm_sde", "sde_window_range=[0,4]"), ["last of 4 steps", "end the range at 3"]),
        (("log_prob=published",), ["sampler.kernel is flow_sde", "set sampler.kernel=cps, or sampler.log_prob="]),
        (("kernel=ode", "log_prob=published"), ["sampler.kernel is ode"]),
    ],
    ids=lambda case: " ".join(case) if isinstance(case, tuple) else "",
)
def test_refusals_teach(toy: Path, overrides: tuple[str, ...], parts: list[str]) -> None:
    message = refusal(toy, *(f"sampler.{text}" for text in overrides))
    assert [part for part in parts if part not in message] == []


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (
            ("sampler.train_negative=false",),
            ["train_negative is false", "at guidance scale 1 (sampler.guidance_scale)", "family sd3", "remove"],
        ),
        (
            ("recipe=forward", "sampler.kernel=ode", "sampler.guidance_scale=3", "sampler.train_negative=recompute",
             "objective.options.guidance_scale=1"),
            ["train_negative is recompute", "at guidance scale 1 (objective.options.guidance_scale)"],
        ),
        (("sampler.train_negative=sometimes",), ["must be true or false or one of recompute, got 'sometimes'"]),
    ],
)  # fmt: skip
def test_a_negative_half_that_is_not_there_is_refused(toy: Path, overrides: tuple[str, ...], parts: list[str]) -> None:
    with pytest.raises(ValueError, match="train_negative") as caught:
        preflight(toy_config(toy, *overrides))
    assert [part for part in parts if part not in str(caught.value)] == []


def test_a_family_without_negative_prompts_has_no_such_half() -> None:
    overrides = ("prompts.train=asset:prompts/world_train.jsonl", "prompts.eval=null", "eval_every=0")
    config = load_config(
        find_config("flux_grpo_pickscore"), (*overrides, "pipeline.device=cpu", "sampler.train_negative=false")
    )
    with pytest.raises(ValueError, match="this model of family flux is evaluated with the prompt alone"):
        preflight(config)


def test_names_of_other_toolkits_are_answered_with_ours(toy: Path) -> None:
    for theirs, ours in foreign_words().kernels.items():
        assert ours in KERNELS
        assert f"got {theirs!r}: did you mean {ours!r}?" in refusal(toy, f"sampler.kernel={theirs}")


@pytest.mark.parametrize("command", ["train", "plan"])
@pytest.mark.parametrize("recipe", ["grpo", "forward", "preference", "backprop"])
def test_every_recipe_and_command_refuses_an_unknown_kernel(
    toy: Path, capsys: pytest.CaptureFixture[str], command: str, recipe: str
) -> None:
    out = () if command == "plan" else (f"out={toy.parent / 'run'}",)
    assert main([command, str(toy), f"recipe={recipe}", "sampler.kernel=dance", *out]) == 1
    assert "did you mean 'dance_sde'" in capsys.readouterr().err


def test_the_published_log_probability_of_cps(toy: Path) -> None:
    """Minus the squared deviation, summed; the ratio is 1 before the first update, and moves after it."""
    config = toy_config(toy, "sampler.kernel=cps", "sampler.log_prob=published", "updates_per_rollout=2")
    run: Path = toy.parent
    (row,) = quick_run(config, run)
    assert row["ratio_first_deviation"] == 0.0
    assert row["ratio_max_deviation"] > 0
    assert math.isfinite(row["grad_norm"])
    loop = Loop(resolve(config, read_run_prompts(config.prompts)), QuickRun(run))  # type: ignore[arg-type]
    kernel, schedule, steps = sampler_at(loop, 0)
    batch = loop.batch(0)
    how = Paths(kernel=kernel, schedule=schedule, steps=steps, keep_means=True)
    with torch.no_grad():
        sampled = sample_paths(loop, batch, CREDIT["outcome"], how, loop.scorer.start(batch))
    assert sampled.mean is not None
    deviation = (sampled.states[sampled.produced] - sampled.mean).double().square().flatten(1).sum(1)
    torch.testing.assert_close(sampled.log_prob.double(), -deviation, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "name", ["sd35m_flow_grpo_fast", "flux_flow_grpo_fast", "sd35m_tp_grpo", "sd35m_grpo_clip_24gb"]
)
def test_configurations_that_publish_flow_cps_start_at_a_ratio_of_one(toy: Path, name: str) -> None:
    """With their sampler, credit, clip range and KL the ratio is 1 to the bit before the first update, at every step
    that they train, and the second update sees it move."""
    wanted = load_config(find_config(name))
    sampler = wanted.sampler
    assert (sampler.kernel, sampler.log_prob, wanted.log_ratio) == ("cps", "published", "mean")
    overrides = [f"{key}={getattr(wanted, key)}" for key in ("clip_range", "kl_coef", "kl_type", "adv_std")]
    overrides += [
        f"sampler.{key}={getattr(sampler, key)}"
        for key in ("kernel", "log_prob", "noise_level", "num_steps", "guidance_scale", "grid", "sde_window_size")
    ]
    overrides += [f"sampler.sde_window_range={list(sampler.stochastic_range)}", f"credit.method={wanted.credit.method}"]
    (row,) = quick_run(toy_config(toy, *overrides, "updates_per_rollout=2", "optim.lr=0.05"), toy.parent)
    assert row["ratio_first_deviation"] == 0.0
    assert row["ratio_max_deviation"] > 0
    steps = sampler.sde_window_size or sampler.stochastic_range[1]
    assert row["live_rows"] == 8 * steps
