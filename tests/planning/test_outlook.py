"""The verdict of a plan: memory and time in the first lines, and what makes a run end sooner."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from counted_operations import measured_once

import flowrl
from flowrl import cli
from flowrl.config.base import find_config
from flowrl.config.train import load_config
from flowrl.pipelines import family_for
from flowrl.planning.bases import Wish
from flowrl.planning.first_run import first_run
from flowrl.planning.hours import Hours, Speed, Work, in_time, rounded, speed_of, work_of
from flowrl.planning.plan import make_plan, number_and_memory
from flowrl.planning.recommended import recommended
from flowrl.planning.shorter import LEAST_GROUP, LEAST_ITERATIONS, LEAST_PROMPTS, RESERVE, batches_of, length_within

ONE = Speed(name="4090", slow=1.0, fast=4.0, cards=1)
HOUR = 3600e12
"""FLOPs of an hour at the slow end of `ONE`."""
QUICK = {"pipeline.model": "asset:tiny-sd3", "pipeline.height": 64, "pipeline.width": 64}


@pytest.fixture(autouse=True)
def _measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    measured_once(monkeypatch)


# ---- numbers ---------------------------------------------------------------------------------------------------------


def test_hours_are_flops_over_the_pace_of_all_cards() -> None:
    hours = Speed(name="A100", slow=2.0, fast=8.0, cards=4).hours(64 * HOUR)
    assert (hours.most, hours.least, hours.middle) == (8.0, 2.0, 4.0)


@pytest.mark.parametrize(
    ("hours", "said"),
    [
        (0.001, "3.6 s"),
        (0.1, "6 min"),
        (9.04, "9 h"),
        (47.0, "47 h"),
        (222 * 24.0, "220 days"),
        (34_000.0, "3.9 years"),
    ],
)
def test_a_time_has_two_digits_and_a_unit(hours: float, said: str) -> None:
    assert in_time(hours) == said
    assert str(Hours(least=hours, most=hours)) == f"about {said}"


def test_numbers_are_rounded_to_two_digits() -> None:
    assert [rounded(value) for value in (0.123, 5.25, 222.0, 12_345.0)] == ["0.12", "5.2", "220", "12,000"]


def test_a_card_of_unusual_memory_is_named_by_the_class_below_it() -> None:
    plan: Any = SimpleNamespace(pace=SimpleNamespace(range=None))
    named = [str(speed_of(plan, card, cards)) for card, cards in ((24, 1), (36, 1), (12, 3), (None, 2))]
    assert named == ["one 4090", "one 4090-class card", "3 4090-class cards", "2 4090s"]


# ---- the rule --------------------------------------------------------------------------------------------------------


def work(iteration: float, iterations: int = 100, evaluation: float = 0.0, evaluations: int = 0) -> Work:
    """In hours of `ONE` at its slow end."""
    return Work(
        iteration=iteration * HOUR, iterations=iterations, evaluation=evaluation * HOUR, evaluations=evaluations
    )


def batches(prompts: int, group: int) -> list[tuple[int, int]]:
    fewer = [(n, group) for n in range(prompts, LEAST_PROMPTS - 1, -1)]
    return fewer + [(LEAST_PROMPTS, n) for n in range(group - 1, LEAST_GROUP - 1, -1)]


def test_a_run_that_ends_in_time_stays_as_it_is() -> None:
    found = length_within(work(0.05), ONE, batch=batches(48, 24), within=10)
    assert found is not None
    assert (found.batch, found.iterations, found.hours.most) == ((48, 24), 100, 5.0)


def test_evaluations_go_first() -> None:
    found = length_within(work(0.05, evaluation=1.0, evaluations=9), ONE, batch=batches(48, 24), within=10)
    assert found is not None
    assert (found.batch, found.iterations, found.evaluations, found.share) == ((48, 24), 100, 2, 1.0)


def test_then_prompts_as_many_as_leave_all_iterations() -> None:
    # 48 prompts take 24 h; 9 h of 10 are to be had: 18 prompts
    found = length_within(work(0.24), ONE, batch=batches(48, 24), within=10)
    assert found is not None
    assert (found.batch, found.iterations) == ((18, 24), 100)
    assert found.hours.most == pytest.approx(9.0)


def test_then_iterations_then_the_group_then_nothing() -> None:
    found = length_within(work(1.0), ONE, batch=batches(48, 24), within=10)  # 8 prompts: an iteration is 1/6 h
    assert found is not None
    assert (found.batch, found.iterations) == ((8, 24), 54)
    found = length_within(work(3.0), ONE, batch=batches(48, 24), within=10)  # 1/2 h: 18 iterations are too few
    assert found is not None
    assert found.batch == (8, 12)
    assert found.iterations == LEAST_ITERATIONS == 36
    assert length_within(work(7.0), ONE, batch=batches(48, 24), within=10) is None


def test_evaluations_take_a_quarter_at_most() -> None:
    found = length_within(work(0.24, evaluation=9.0, evaluations=5), ONE, batch=batches(48, 24), within=10)
    assert found is not None
    assert found.share == pytest.approx(0.25 * 9 / 18)
    assert found.hours.most <= 10 * (1 - RESERVE)


def test_batches_divide_by_processes_and_updates() -> None:
    config = load_config(find_config("flux_recommended"))  # 48 x 24, 6 updates
    assert batches_of(config, 1)[:2] == [(48, 24), (47, 24)]
    eight = batches_of(config, 8)
    assert eight[:3] == [(48, 24), (40, 24), (32, 24)]
    assert all(prompts * group // 8 % 6 == 0 for prompts, group in eight)


# ---- the recommended recipe ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("plain", "shipped"),
    [
        ("flux_grpo_pickscore", "flux_recommended"),
        ("qwen_image_grpo_pickscore", "qwen_image_recommended"),
        ("wan_t2v_grpo_ocr", "wan_recommended"),
    ],
)
def test_the_recommended_recipe_is_that_of_the_configurations_that_ship(plain: str, shipped: str) -> None:
    config = load_config(find_config(plain))
    family = family_for(config.pipeline.name or "", config.pipeline.model)
    made, theirs = recommended(config, partial(family.rows, config.pipeline.model)), load_config(find_config(shipped))
    for key in (
        *("recipe", "num_iterations", "updates_per_rollout", "adv_std", "kl_coef", "sampler", "optim", "times"),
        *("slots", "objective", "credit", "policy", "rewards", "prompts"),
    ):
        assert getattr(made, key) == getattr(theirs, key), key


def test_work_is_that_of_the_plan_of_each_recipe() -> None:
    config = load_config(find_config("tiny_grpo_geneval"))
    made = make_plan(config, "own", 1)[0]
    other = recommended(config, made.passes)
    for settings in (config, other):
        found, theirs = work_of(made, settings), make_plan(settings, "theirs", 1)[0]
        assert theirs.cost is not None
        assert found.iterations == theirs.run.iterations
        assert found.iteration == pytest.approx(theirs.cost.training / theirs.run.iterations)
    assert work_of(made, other).iteration != work_of(made, config).iteration


# ---- what is printed -------------------------------------------------------------------------------------------------


def lines_of(*words: str, capsys: pytest.CaptureFixture[str]) -> list[str]:
    assert cli.main(["plan", *words]) == 0
    return capsys.readouterr().out.rstrip("\n").split("\n")


def quick(*words: str) -> list[str]:
    return [*words, *(f"{key}={value}" for key, value in QUICK.items())]


def test_the_first_line_says_memory_and_time_and_there_are_forty(capsys: pytest.CaptureFixture[str]) -> None:
    lines = lines_of(
        *quick("sd35m_grpo_pickscore", "--card", "24", "--price", "0.5", "--tflops", "0.01"), capsys=capsys
    )
    assert lines[0].startswith("sd35m_grpo_pickscore: fits 24 GB, but takes about ")
    assert len(lines) <= 40
    text = " ".join(" ".join(lines).split())
    spans = ("To end sooner", "an evening, 10 h", "a weekend, 60 h", "a week, 168 h", "whole in a week")
    for part in (*spans, "too long to wait for", "costs about", "at 0.5 an hour", "recommended recipe", "--long"):
        assert part in text, part


def test_the_price_is_that_of_all_cards_for_the_time() -> None:
    given: dict[str, Any] = {"tflops": 1.0, "price": 3.0, **QUICK}
    made = flowrl.plan("sd35m_grpo_pickscore", processes=4, **given)
    assert made.hours is not None
    least, middle, most = made.hours
    assert least == middle == most
    assert made.flops is not None
    assert middle == pytest.approx(made.flops / 4 / HOUR)
    assert f"costs about {rounded(middle * 4 * 3.0)} " in " ".join(made.text.split())


def test_the_run_in_time_is_written_and_planned(tmp_path: Path) -> None:
    given: dict[str, Any] = {"tflops": 0.02, "card": 24, **QUICK}
    file = tmp_path / "my.yaml"
    whole = flowrl.plan("sd35m_recommended", **given)
    made = flowrl.plan("sd35m_recommended", hours=10, out=file, **given)
    assert whole.hours is not None
    assert made.hours is not None
    assert whole.hours[2] > 20
    assert 5 < made.hours[2] <= 10
    assert file.read_text() == made.configuration
    config = load_config(file)
    assert config.budget.seconds == 36000
    assert config.pipeline.model == "asset:tiny-sd3"
    assert config.num_iterations == made.iterations >= LEAST_ITERATIONS
    again = flowrl.plan(str(file), card=24, tflops=0.02)
    assert again.hours == pytest.approx(made.hours)
    with pytest.raises(flowrl.FlowrlError, match="exists already"):
        flowrl.plan("sd35m_recommended", hours=10, out=file, **given)


def test_a_run_that_cannot_end_in_time_is_refused() -> None:
    given: dict[str, Any] = {"hours": 0.01, "tflops": 0.02, "card": 24, **QUICK}
    with pytest.raises(flowrl.FlowrlError, match=r"does not end within 0\.01 h .* the least that is planned"):
        flowrl.plan("sd35m_recommended", **given)


def test_a_model_is_planned_by_its_first_run() -> None:
    made = flowrl.plan("asset:tiny-sd3", card=24, tflops=1.0)
    assert made.name == "tiny-sd3"
    assert "forward, objective nft" in made.text


def test_clips_are_counted_where_clips_are_drawn(capsys: pytest.CaptureFixture[str]) -> None:
    text = " ".join(lines_of("tiny_wan_recommended", "--long", capsys=capsys))
    assert "8 prompts x 12 = 96 clips" in " ".join(text.split())
    assert " images of 1 process" not in text


def test_numbers_above_zero_are_asked_for() -> None:
    for given in ({"price": 0.0}, {"hours": -1.0}, {"tflops": 0.0}):
        wrong: dict[str, Any] = dict(given)
        with pytest.raises(flowrl.FlowrlError, match=f"`{next(iter(given))}` must be above 0"):
            flowrl.plan("tiny_g2rpo", **wrong)
    assert number_and_memory("2xH100", None, None) == number_and_memory("2x80gb", None, None) == (2, 80)
    for cards, why in (
        ("8 of 80", "`cards` is a number of cards and the GB of each, such as 8x80"),
        ("8x0", "by its GB"),
    ):
        with pytest.raises(flowrl.FlowrlError, match=why):
            flowrl.plan("tiny_g2rpo", cards=cards)
    with pytest.raises(flowrl.FlowrlError, match="`cards` is 8x80, and `processes` or `card` says something else"):
        flowrl.plan("tiny_g2rpo", cards="8x80", card=24)
    with pytest.raises(flowrl.FlowrlError, match="`out` is written for some `hours`"):
        flowrl.plan("tiny_g2rpo", out=os.devnull)


@pytest.mark.slow
def test_what_does_not_fit_takes_no_time_and_files_name_their_command() -> None:
    planned = flowrl.plan("wan22_i2v_grpo", card=16)
    assert planned.text.startswith("wan22_i2v_grpo: does not fit 16 GB\n")
    assert planned.hours is None
    assert "too long" not in planned.text
    assert "'flowrl data list i2v' says how to get it" in " ".join(planned.missing)


@pytest.mark.slow
def test_a_first_run_takes_a_smaller_lora_where_nothing_else_fits() -> None:
    text = " ".join(flowrl.plan("Qwen/Qwen-Image", card=24).text.split())
    assert text.startswith("Qwen-Image: fits 24 GB")
    assert "set for this card: policy.lora_rank=32 policy.lora_alpha=64" in text


def test_plain_prompts_are_scored_by_a_reward_that_they_serve(tmp_path: Path) -> None:
    plain = tmp_path / "plain.txt"
    plain.write_text("a red circle\na blue square\n")
    made = first_run(Wish(model="asset:tiny-sd3", card=24, prompts=str(plain), recommended=True))
    assert [reward.name for reward in made.config.rewards] == ["clip_score", "jpeg_compressibility"]
    assert any(note.startswith("its reward is CLIPScore, because geneval") for note in made.notes)
    wished = first_run(Wish(model="asset:tiny-sd3", card=24, prompts=str(plain), reward="aesthetic", recommended=True))
    assert wished.config.rewards[0].name == "aesthetic"


@pytest.mark.parametrize("model", ["black-forest-labs/FLUX.1-schnell", "stabilityai/stable-diffusion-3.5-large-turbo"])
def test_a_distilled_model_starts_with_noise_that_is_finite(model: str) -> None:
    made = first_run(Wish(model=model, card=24, recommended=True))
    sampler = made.config.sampler
    assert (sampler.kernel, sampler.num_steps, sampler.sde_window_size, sampler.sde_window_range) == (
        "cps",
        4,
        2,
        (0, 3),
    )
    assert made.config.clip_bounds == (1e-5, 1e-5)
    advice = made.notes[-1]
    assert advice.startswith("what helps: steps and guidance as published")
    assert "jpeg_compressibility" not in advice  # which the run has already
