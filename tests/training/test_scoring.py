"""Rewards within a run: what is scored together, what waits, what fails, what is only measured, what learns."""

from __future__ import annotations

import contextlib
import gc
import json
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from reward_inputs import weighted_sum
from tiny_runs import metrics, state
from torch import Tensor
from toy_pipeline import PROMPTS, QuickRun, Toy, reward_list, toy_config, write_toy

from flowrl.cli import main
from flowrl.pipelines import PIPELINES
from flowrl.rewards import FunctionReward, RewardInputs, RewardOutput
from flowrl.rewards.compose import WeightedSum
from flowrl.runtime.randomness import counter_normal
from flowrl.training import parts
from flowrl.training import scoring as scoring_module
from flowrl.training.reward_watch import too_many_failures
from flowrl.training.scoring import Scorer
from flowrl.training.stages import Stages

Change = Callable[[WeightedSum], WeightedSum]


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setitem(PIPELINES, "sd3", "toy_pipeline")
    return write_toy(tmp_path)


@pytest.fixture
def changed(monkeypatch: pytest.MonkeyPatch) -> Callable[[Change], None]:
    """Puts something else in the place of a run's rewards."""
    load = parts.load_rewards

    def change(how: Change) -> None:
        monkeypatch.setattr(parts, "load_rewards", lambda config, run: how(load(config, run)))

    return change


def train(toy: Path, name: str, *overrides: str) -> Path:
    out = toy.parent / name
    assert main(["train", str(toy), f"out={out}", *overrides]) == 0
    return out


def brightness(seen: list[RewardInputs], kind: str = "pointwise", *, waits: bool = False) -> FunctionReward:
    def score(inputs: RewardInputs) -> RewardOutput:
        seen.append(inputs)
        values = inputs.images.mean((1, 2, 3))
        return RewardOutput(values=values, valid=torch.ones(len(inputs), dtype=torch.bool))

    return FunctionReward(name="brightness", score=score, needs=frozenset(), version="1", kind=kind, waits=waits)


def test_a_reward_that_waits_gives_the_numbers_of_one_that_does_not(toy: Path, changed: Any) -> None:
    settings = ("num_iterations=3", "rollout_batch_size=2", "micro_batch_size=2")
    runs = []
    for waits in (False, True):
        seen: list[RewardInputs] = []
        changed(lambda total, seen=seen, waits=waits: weighted_sum([brightness(seen, waits=waits)], [1.0]))
        runs.append(metrics(train(toy, f"waits-{waits}", *settings)))
        assert sorted(inputs.sample_ids.tolist() for inputs in seen[:4]) == [[0, 1], [2, 3], [4, 5], [6, 7]]
        assert [inputs.iteration for inputs in seen] == [i for i in range(3) for _ in range(4)]
    assert runs[0] == runs[1]


@pytest.fixture
def beside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces are scored in a thread, as on CUDA."""
    monkeypatch.setattr("flowrl.training.loop.scored_beside", lambda *given: True)


def _threads() -> list[str]:
    gc.collect()
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("beside")]


@pytest.mark.slow
def test_pieces_that_are_scored_beside_the_sampling_give_the_same_numbers(
    toy: Path, changed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = ("num_iterations=3", "rollout_batch_size=2", "micro_batch_size=2")
    runs, threads = [], set[str]()
    for aside in (False, True):
        monkeypatch.setattr("flowrl.training.loop.scored_beside", lambda *given, aside=aside: aside)
        seen: list[RewardInputs] = []
        made: list[Learning] = []

        def both(total: WeightedSum, seen: Any = seen, made: Any = made) -> WeightedSum:
            made.append(Learning())
            waiting = brightness(seen, waits=True)

            def noted(inputs: RewardInputs) -> RewardOutput:
                threads.add(threading.current_thread().name.partition("_")[0])
                assert not torch.is_grad_enabled()
                return brightness([])(inputs)

            mine = FunctionReward(name="mine", score=noted, needs=frozenset(), version="1")
            return weighted_sum([mine, waiting, made[-1]], [1.0, 0.5, 0.25])

        changed(both)
        runs.append(metrics(train(toy, f"beside-{aside}", *settings)))
        assert made[0].shown == [list(range(8))] * 3
        assert _threads() == []
    assert runs[0] == runs[1]
    assert threads == {"MainThread", "beside"}


@pytest.mark.usefixtures("beside")
def test_what_fails_beside_the_sampling_ends_the_run_in_its_own_words(
    toy: Path, changed: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[int] = []

    def broken(inputs: RewardInputs) -> RewardOutput:
        asked.append(int(inputs.sample_ids[0]))
        raise ValueError("the scorer has lost its glasses")

    changed(lambda total: weighted_sum([FunctionReward(name="x", score=broken, needs=frozenset(), version="1")], [1.0]))
    arguments = ["train", str(toy), f"out={toy.parent / 'lost'}", "rollout_batch_size=2", "micro_batch_size=2"]
    assert main(arguments) == 1
    assert "the scorer has lost its glasses" in " ".join(capsys.readouterr().err.split())
    assert asked[0] == 0
    assert _threads() == []


@pytest.mark.usefixtures("beside")
def test_an_interrupted_rollout_leaves_no_thread(
    toy: Path, changed: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    changed(lambda total: weighted_sum([brightness([])], [1.0]))
    add, pieces = scoring_module.Scoring.add, [0]

    def stopped(self: Any, *arguments: Any) -> None:
        add(self, *arguments)
        pieces[0] += 1
        if pieces[0] == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(scoring_module.Scoring, "add", stopped)
    arguments = ["train", str(toy), f"out={toy.parent / 'stopped'}", "rollout_batch_size=2", "micro_batch_size=2"]
    with contextlib.suppress(KeyboardInterrupt):
        assert main(arguments) != 0
    capsys.readouterr()
    assert pieces == [2]
    assert _threads() == []


@pytest.mark.parametrize(
    ("override", "aside"),
    [
        ("seed=0", True), ("reward_dtype=bfloat16", True),
        ("reward_dtype=tf32", False), ("pipeline.vae_dtype=tf32", False),
        ("rewards=[{file: my.py, function: f}]", False),
        ("rewards=[{name: win_rate, options: {comparator: {file: my.py, function: f}}}]", False),
    ],
)  # fmt: skip
def test_what_is_scored_beside_the_sampling(
    toy: Path, monkeypatch: pytest.MonkeyPatch, override: str, aside: bool
) -> None:
    config = toy_config(toy, "rewards=[{name: smooth_brightness}]", override)
    given = config.rewards, (config.reward_dtype, config.pipeline.vae_dtype)
    assert not scoring_module.scored_beside(*given, torch.device("cuda"))  # there is none
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert scoring_module.scored_beside(*given, torch.device("cuda")) == aside
    assert not scoring_module.scored_beside(*given, torch.device("cpu"))


def test_the_error_of_the_mean_reward_is_over_prompts(toy: Path, changed: Any) -> None:
    def score(inputs: RewardInputs) -> RewardOutput:
        values = inputs.group_ids.float() + 0.01 * inputs.sample_ids.remainder(4)  # images of a prompt are alike
        return RewardOutput(values=values, valid=inputs.sample_ids != 3)

    reward = FunctionReward(name="alike", score=score, needs=frozenset(), version="1", kind="pointwise")
    changed(lambda total: weighted_sum([reward], [1.0]))
    (row,) = [row for row in metrics(train(toy, "alike", "num_iterations=1")) if "reward" in row]
    means = torch.tensor([0.01, 1.015], dtype=torch.float64)  # the first prompt's last image failed
    assert row["reward_error"] == pytest.approx(float(means.std()) / 2**0.5, abs=1e-6)
    assert row["reward_error"] > 1.5 * row["reward_std"] / 7**0.5  # what independent images would give


def test_groups_stay_together_where_a_reward_looks_at_them(toy: Path, changed: Any) -> None:
    seen: list[RewardInputs] = []
    changed(lambda total: weighted_sum([brightness(seen, "groupwise")], [1.0]))
    train(toy, "groups", "rollout_batch_size=2", "micro_batch_size=2")
    assert [inputs.group_ids.tolist() for inputs in seen] == [[0] * 4, [1] * 4]
    seen.clear()
    train(toy, "two at once", "prompts_per_step=3", "rollout_batch_size=6", "micro_batch_size=6")
    assert [inputs.group_ids.tolist() for inputs in seen] == [[0] * 4, [1] * 4 + [2] * 4]


def test_groups_over_processes_are_refused_where_a_reward_looks_at_them(toy: Path) -> None:
    config = toy_config(toy, "prompts_per_step=3")
    total = weighted_sum([brightness([], "pairwise")], [1.0])
    scoring_module.check_groups(config.group_size, config.resolve_batch(1), total)
    with pytest.raises(ValueError, match="6 images per process are not whole groups of 4"):
        scoring_module.check_groups(config.group_size, config.resolve_batch(2), total)
    scoring_module.check_groups(config.group_size, config.resolve_batch(2), weighted_sum([brightness([])], [1.0]))


# ---- decoding --------------------------------------------------------------------------------------------------------


def test_completions_that_coincide_are_decoded_once(toy: Path, changed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 4 steps, branches at steps 1 and 2 finish over steps (2, 3) and (3), on stride 2 over (2) and (3)."""
    seen: list[RewardInputs] = []
    sizes: list[int] = []

    def decode(self: Toy, latents: Tensor, *, gradient: bool = False) -> Tensor:
        sizes.append(len(latents))
        return torch.sigmoid(latents.float())

    monkeypatch.setattr(Toy, "decode", decode)
    changed(lambda total: weighted_sum([brightness(seen)], [1.0]))
    settings = ("credit.method=g2rpo", "credit.strides=[1, 2]", "sampler.sde_window_range=[1, 3]")
    (row,) = [row for row in metrics(train(toy, "late", *settings)) if "images" in row]
    scored = sum(len(inputs) for inputs in seen)
    assert row["images"] == scored == 8 * 2 * 2  # every completion has a reward of its own
    assert sum(sizes) == 8 * (2 + 1)
    images = torch.cat([inputs.images for inputs in seen]).unflatten(0, (2, 8, 2))  # step, branch, stride
    alike = (images[:, :, 0] == images[:, :, 1]).flatten(2).all(2)
    assert alike.tolist() == [[False] * 8, [True] * 8]


def test_images_that_were_decoded_once_stand_where_their_latents_do() -> None:
    latents = counter_normal((5, 3, 2, 2), "latents")[[0, 0, 1, 2, 2, 2, 0, 3, 4]]
    images = scoring_module.decode_once(Toy(), latents)
    assert torch.equal(images, torch.sigmoid(latents))


# ---- failures --------------------------------------------------------------------------------------------------------


def test_failures_are_counted_over_ten_iterations() -> None:
    assert not too_many_failures([(10, 100)] * 10, 0.1)
    assert too_many_failures([(10, 100)] * 9 + [(11, 100)], 0.1)
    assert not too_many_failures([(90, 100)], 0.1)  # a bad moment, not a broken reward
    assert too_many_failures([(60, 100)] * 2, 0.1)
    assert not too_many_failures([(100, 100)] + [(0, 100)] * 10, 0.1)
    assert not too_many_failures([(50, 100)] * 99, 1.0)


def test_a_run_whose_reward_fails_too_often_is_stopped_with_the_reason_and_goes_on_later(
    toy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = toy.parent / "failing"
    arguments = [str(toy), f"out={out}", "num_iterations=30", "checkpoint_every=30", reward_list(toy.parent, "broken")]
    assert main(["train", *arguments, "max_invalid_ratio=0.1"]) == 1
    message = " ".join(capsys.readouterr().err.split())
    rows = metrics(out)
    assert 0 < len(rows) < 10
    assert "of 8 images got no valid reward" in message
    assert "max_invalid_ratio is 0.1, the share that may fail in 10 iterations" in message
    assert f"resume={out}" in message.replace(" ", "")
    for row in rows:
        assert row["invalid_ratio"] > 0
        assert row["reward/broken/invalid_ratio"] == row["invalid_ratio"]
    stopped_at = len(rows)
    assert state(out)["iteration"] == stopped_at
    allowed = ("resume_changed=true", "max_invalid_ratio=1.0")
    assert main(["train", f"resume={out}", f"num_iterations={stopped_at + 1}", *allowed]) == 0
    assert metrics(out)[:stopped_at] == rows


def test_a_run_without_any_valid_reward_stops_with_the_words_of_the_rewards(
    toy: Path, changed: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    def dead(inputs: RewardInputs) -> RewardOutput:
        nothing = torch.full((len(inputs),), torch.nan)
        return RewardOutput(values=nothing, valid=torch.isfinite(nothing), errors={"timeout": len(inputs)})

    reward = FunctionReward(name="far", score=dead, needs=frozenset(), version="1", waits=True)
    changed(lambda total: weighted_sum([reward], [1.0]))
    assert main(["train", str(toy), f"out={toy.parent / 'dead'}"]) == 1
    message = " ".join(capsys.readouterr().err.split())
    assert "8 of 8 images got no valid reward" in message
    assert "far/timeout 8" in message


def test_sub_scores_that_some_pieces_lack_are_those_of_the_others(toy: Path, changed: Any) -> None:
    def named(inputs: RewardInputs) -> RewardOutput:
        values = inputs.images.mean((1, 2, 3))
        told = {"detail": torch.full_like(values, 3.0)} if int(inputs.sample_ids[0]) else {}
        return RewardOutput(values=values, valid=torch.ones(len(inputs), dtype=torch.bool), parts=told)

    reward = FunctionReward(name="far", score=named, needs=frozenset(), version="1")
    changed(lambda total: weighted_sum([reward], [1.0]))
    evaluated = (f"prompts.eval={toy.parent / 'prompts.txt'}", "eval_every=1", "eval.batch_size=1")
    rows = metrics(train(toy, "named", "rollout_batch_size=2", "micro_batch_size=2", *evaluated))
    assert [row["reward/far/detail"] for row in rows if "reward" in row] == [3.0]


def test_reasons_of_failed_images_are_logged(toy: Path, changed: Any) -> None:
    def half(inputs: RewardInputs) -> RewardOutput:
        valid = inputs.sample_ids % 2 == 0
        values = torch.where(valid, inputs.images.mean((1, 2, 3)), torch.nan)
        return RewardOutput(values=values, valid=valid, errors={"status_500": int((~valid).sum())})

    reward = FunctionReward(name="far", score=half, needs=frozenset(), version="1")
    changed(lambda total: weighted_sum([reward], [1.0]))
    (row,) = metrics(train(toy, "half"))
    assert row["reward_errors/far/status_500"] == 4
    assert row["reward/far/invalid_ratio"] == row["invalid_ratio"] == 0.5


# ---- evaluation ------------------------------------------------------------------------------------------------------


def test_rewards_that_are_only_measured_never_train(toy: Path) -> None:
    measured = reward_list(toy.parent, "redness").replace("rewards=", "eval.rewards=")
    evaluated = (f"prompts.eval={toy.parent / 'prompts.txt'}", "eval_every=1")
    plain, more = train(toy, "plain", *evaluated), train(toy, "more", *evaluated, measured)
    trained = [[row for row in metrics(run) if "reward" in row] for run in (plain, more)]
    assert trained[0] == trained[1]
    assert "reward/redness" not in trained[1][0]
    (before, _) = (row for row in metrics(more) if "eval/kl" in row)
    assert {"eval/reward/brightness", "eval/reward/redness", "eval/reward/redness_low"} < set(before)


def test_what_an_evaluation_would_ignore_is_refused(toy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    evaluated = (f"prompts.eval={toy.parent / 'prompts.txt'}", "eval_every=1")
    for key, value in (("weight", "2"), ("clip", "[0, 1]"), ("gate", "0.1"), ("schedule", "[[0, 1]]")):
        rewards = reward_list(toy.parent, "redness").replace("rewards=", "eval.rewards=")
        rewards = rewards.replace("}]", f", {key}: {value}" + "}]")
        assert main(["train", str(toy), f"out={toy.parent / 'refused'}", *evaluated, rewards]) != 0
        assert f"{key} is set for eval.rewards redness" in " ".join(capsys.readouterr().err.split())


def test_rewards_that_compare_images_are_not_evaluated(toy: Path, changed: Any) -> None:
    judged: list[RewardInputs] = []
    changed(lambda total: weighted_sum([*total.rewards, brightness(judged, "pairwise")], [1.0, 1.0]))
    out = train(toy, "pairs", f"prompts.eval={toy.parent / 'prompts.txt'}", "eval_every=1")
    rows = [row for row in metrics(out) if "eval/kl" in row]
    assert all(key != "eval/reward/brightness_2" for row in rows for key in row)
    assert "eval/reward/brightness" in rows[0]
    assert sum(len(inputs) for inputs in judged) == 8


def test_images_that_fail_in_an_evaluation_are_null_and_counted(toy: Path) -> None:
    evaluated = (f"prompts.eval={toy.parent / 'prompts.txt'}", "eval_every=1", "eval.samples_per_prompt=4")
    out = train(toy, "nulls", *evaluated, reward_list(toy.parent, "broken"))
    rows = [json.loads(line) for line in (out / "eval" / "iteration_000000.jsonl").read_text().splitlines()]
    values = [row["rewards"]["broken"] for row in rows]
    known = [value for value in values if value is not None]
    assert len(values) == 4 * len(PROMPTS)
    assert 0 < len(known) < len(values)
    first = next(row for row in metrics(out) if "eval/kl" in row)
    assert first["eval/reward/broken_invalid_ratio"] == pytest.approx(1 - len(known) / len(values))
    assert first["eval/reward/broken"] == pytest.approx(sum(known) / len(known))


# ---- rewards that learn ----------------------------------------------------------------------------------------------


class Learning:
    """Brightness times a factor that learns: it grows by the mean of the images that it is shown."""

    name, kind, version, waits, differentiable = "learning", "adversarial", "1", False, False
    needs = frozenset({"images"})

    def __init__(self) -> None:
        self.factor, self.shown = 1.0, list[list[int]]()

    def __call__(self, inputs: RewardInputs) -> RewardOutput:
        return brightness([])(replace(inputs, images=inputs.images * self.factor))

    def trains_policy(self, iteration: int) -> bool:
        return iteration % 2 == 1

    def learn(self, inputs: RewardInputs) -> dict[str, float]:
        self.shown.append(inputs.sample_ids.tolist())
        self.factor += float(inputs.images.mean())
        return {"factor": self.factor}

    def state(self) -> dict[str, Any]:
        return {"factor": self.factor}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.factor = state["factor"]

    learned, follow = state, restore


def test_a_reward_that_learns_is_shown_every_image_once_and_is_saved(toy: Path, changed: Any) -> None:
    made: list[Learning] = []

    def learning(total: WeightedSum) -> WeightedSum:
        made.append(Learning())
        return weighted_sum([made[-1]], [1.0])

    changed(learning)
    whole = train(toy, "whole", "num_iterations=4", "rollout_batch_size=2", "micro_batch_size=2")
    assert made[0].shown == [list(range(8))] * 4
    rows = metrics(whole)
    factors = [row["reward/learning/factor"] for row in rows]
    assert factors == sorted(set(factors))
    assert [row["live_rows"] > 0 for row in rows] == [False, True, False, True]
    half = train(toy, "half", "num_iterations=2", "rollout_batch_size=2", "micro_batch_size=2")
    assert state(half)["rewards"] == {"learning": {"factor": factors[1]}}
    assert main(["train", f"resume={half}", "num_iterations=4"]) == 0
    assert metrics(half) == rows


def test_a_reward_learns_from_images_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    """Whichever process made them: one of several has numbers apart in every round."""
    run: Any = QuickRun(tmp_path)
    pipeline: Any = Toy()
    learning: Any = Learning()
    reward = weighted_sum([learning], [1.0])
    scorer = Scorer(run, pipeline, reward, group_size=2, counters={}, stages=Stages(run.device), beside=False)
    for numbers in ([4, 5], [0, 1]):
        two = {"prompts": ["a", "b"], "metadata": [{}, {}], "group_ids": torch.zeros(2, dtype=torch.int64)}
        scorer.seen.append(RewardInputs(images=torch.ones(2, 3, 2, 2), sample_ids=torch.tensor(numbers), **two))  # type: ignore[arg-type]
    scorer.learn(0)
    assert learning.shown == [[0, 1, 4, 5]]
