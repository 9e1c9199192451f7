"""What goes wrong in a run is said by name, and a policy that has diverged never replaces the last good LoRA."""

from __future__ import annotations

import math
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import toy_pipeline
from safetensors.torch import load_file, save_file
from tiny_runs import lora, metrics, state
from torch import Tensor
from toy_pipeline import QuickRun, Toy, toy_config, write_toy

from flowrl.cli import main
from flowrl.config.train import TrainConfig
from flowrl.pages.report import report
from flowrl.pipelines import PIPELINES
from flowrl.rewards import REWARDS
from flowrl.training.checkpoints import checkpoints
from flowrl.training.run import Run
from flowrl.training.watchdog import (
    LATELY,
    LEVELS,
    comparable,
    diversity_of,
    evaluation_warnings,
    iteration_warnings,
    keep_good,
    largest_weight,
    look_at,
    new_history,
    put_back_good,
    say,
    stop_on_absurd_weights,
)

EVEN = torch.tensor([0.2, 0.4, 0.6, 0.8, 0.1, 0.3, 0.5, 0.7])


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setitem(PIPELINES, "sd3", "toy_pipeline")
    return write_toy(tmp_path)


@pytest.fixture
def config(toy: Path) -> TrainConfig:
    """Groups of four, divided by their standard deviation plus 1e-4."""
    return toy_config(toy)


def written(toy: Path, line: str) -> str:
    """The override that takes a reward of which this is the last line; `b` is the images' brightness."""
    file = toy.parent / "written.py"
    file.write_text(
        f"import torch\ndef reward(images, prompts, metadata):\n    b = images.mean((1, 2, 3))\n    {line}\n"
    )
    return f"rewards=[{{file: {file}, function: reward}}]"


# ---- images ----------------------------------------------------------------------------------------------------------


def test_images_are_looked_at_one_by_one() -> None:
    images = torch.rand(5, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    images[1, 0, 3, 3], images[2, 2, 0, 0] = torch.nan, torch.inf
    images[3] = torch.tensor([0.1, 0.5, 1.7])[:, None, None]  # one colour, beyond the range
    look = look_at(images)
    assert look.broken.tolist() == [False, True, True, False, False]
    assert look.constant.tolist() == [False, False, False, True, False]
    assert look.small.shape == (5, 3 * 8 * 8)
    assert look.small[3].unique().tolist() == [round(0.1 * LEVELS), round(0.5 * LEVELS), LEVELS]
    video = images[:, None].repeat(1, 2, 1, 1, 1)
    video[4, 0, 0, 0, 0] = torch.nan
    video[:, 0] = video[:, 0] * 0
    seen = look_at(video)
    assert seen.broken.tolist() == [False, True, True, False, True]
    assert torch.equal(seen.small, look.small)  # by the last frame: the first may have been given


def test_diversity_is_the_distance_of_images_of_one_prompt() -> None:
    small = torch.randint(0, LEVELS + 1, (7, 192), dtype=torch.int32, generator=torch.Generator().manual_seed(0))
    group = torch.tensor([4, 4, 9, 4, 9, 2, 4])
    values = []
    for number in (4, 9):
        own = small[group == number].double() / LEVELS
        pairs = [(own[i] - own[j]).square().mean() for i in range(len(own)) for j in range(i)]
        values.append(math.sqrt(sum(pairs) / len(pairs)))
    found = diversity_of(small, group)
    assert found == pytest.approx(sum(values) / 2, abs=1e-12)
    order = torch.tensor([6, 2, 0, 5, 3, 4, 1])
    assert diversity_of(small[order], group[order]) == found  # bit for bit
    assert diversity_of(small, torch.arange(7)) is None
    assert diversity_of(small[:1].repeat(4, 1), torch.zeros(4, dtype=torch.int64)) == 0


# ---- warnings of an iteration ----------------------------------------------------------------------------------------


def found_in(config: TrainConfig, reward_B: Tensor | None = EVEN, *earlier: Tensor, **row: Any) -> dict[str, str]:
    history = new_history()
    for rewards in earlier:
        assert iteration_warnings(history, {}, rewards, config) == {}
    return iteration_warnings(history, row, reward_B, config)


HEALTHY = {
    "even": EVEN,
    "one success": torch.eye(8)[0],
    "one success of 100": 100 * torch.eye(8)[0],
    "all equal": torch.full((8,), 0.3),
    "a likely one among unlikely ones": torch.tensor([0.9, *[1e-6] * 6, 2e-6]),
    "heavy tails": EVEN + 6 * torch.eye(8)[2],
    "bytes of a file": -1e6 * EVEN,
    "failed images": torch.where(EVEN > 0.4, EVEN, torch.nan),
    "none valid": torch.full((8,), torch.nan),
}


@pytest.mark.parametrize("name", HEALTHY)
def test_healthy_rewards_give_no_warning(config: TrainConfig, name: str) -> None:
    assert found_in(config, HEALTHY[name]) == {}
    assert found_in(config, 0.1 * HEALTHY[name], HEALTHY[name], grad_norm=0.1, live_rows=8, diversity=0.2) == {}


@pytest.mark.parametrize(
    ("rewards", "names", "said"),
    [
        (torch.where(torch.arange(8) == 5, 1e30, EVEN), ["exploding_rewards", "one_image"], "image 5: 1e+30, the oth"),
        (torch.where(EVEN > 0.4, 3e38, -3e38), ["exploding_rewards"], "a reward reaches 3e+38"),
        (torch.where(torch.arange(8) == 5, -5e4, EVEN), ["one_image"], "one image of 8 holds 87% of the rewards' var"),
        (EVEN * 1e-30, ["vanishing_rewards"], "below adv_eps (0.0001), so advantages vanish"),
        (0.7 + EVEN * 1e-5, ["vanishing_rewards"], "have a standard deviation of 2.2e-06 at most"),
    ],
)
def test_rewards_that_explode_or_vanish(config: TrainConfig, rewards: Tensor, names: list[str], said: str) -> None:
    found = found_in(config, rewards)
    assert list(found) == names
    assert any(said in sentence for sentence in found.values()), found


def test_a_jump_is_seen_against_the_iterations_before(config: TrainConfig) -> None:
    assert list(found_in(config, 1e4 * EVEN, EVEN, EVEN)) == ["exploding_rewards"]
    assert found_in(config, 100 * EVEN, EVEN, EVEN) == {}
    assert found_in(config, EVEN, torch.zeros(8)) == {}  # a first success


def test_rewards_that_nothing_divides_by_may_be_close_together(toy: Path) -> None:
    assert found_in(toy_config(toy, "adv_std=none"), EVEN * 1e-30) == {}
    art = toy_config(toy, "recipe=visited", "objective.name=art", "sampler.kernel=ode")
    assert found_in(art, EVEN * 1e-30) == {}


def test_a_gradient_of_zero_is_said_where_there_is_something_to_learn(config: TrainConfig) -> None:
    assert list(found_in(config, grad_norm=0.0, live_rows=8, zero_std_ratio=0.5)) == ["zero_gradient"]
    assert found_in(config, grad_norm=0.0, live_rows=0) == {}
    assert found_in(config, grad_norm=0.0, live_rows=8, zero_std_ratio=1.0) == {}  # no group has contrast
    assert found_in(config, grad_norm=1e-9, live_rows=8) == {}
    assert found_in(config, None, live_rows=8) == {}


@pytest.mark.parametrize(
    ("overrides", "check", "other"),
    [
        ((), "scale of the reward against adv_eps", "policy.teachers"),
        (("policy.teachers=[{guidance_scale: 3}]", "rewards=[]"), "lora of policy.teachers", "reward"),
        (("objective.name=art",), "check that the reward reads the images", "adv_eps"),
    ],
)
def test_a_gradient_of_zero_is_put_down_to_what_the_run_learns_from(
    toy: Path, overrides: tuple[str, ...], check: str, other: str
) -> None:
    recipe = ("recipe=visited", "sampler.kernel=ode") if overrides else ()
    said = found_in(toy_config(toy, *recipe, *overrides), None, grad_norm=0.0, live_rows=8)["zero_gradient"]
    assert check in said
    assert other not in said


def test_images_of_one_colour_are_said_where_they_are_most(config: TrainConfig) -> None:
    assert "75% of the images have one colour" in found_in(config, constant_ratio=0.75)["constant_images"]
    assert found_in(config, constant_ratio=0.5) == {}


def test_large_weights_are_said_before_they_are_absurd(config: TrainConfig) -> None:
    found = iteration_warnings(new_history(), {}, None, config, largest_weight=30.0)
    assert "weights of the LoRA reach 30, and" in found["large_weights"]
    assert iteration_warnings(new_history(), {}, None, config, largest_weight=5.0) == {}
    assert largest_weight([torch.tensor([1.0, -3.0]), torch.tensor([[2.0]])]) == 3
    assert math.isnan(largest_weight([torch.tensor([1.0, torch.nan]), torch.tensor([[2.0]])]))
    for largest in (math.nan, math.inf, 2000.0):
        with pytest.raises(ValueError, match=re.escape(f"since iteration 7: weights of the LoRA reach {largest:.3g}")):
            stop_on_absurd_weights(QuickRun(Path("nowhere")), 7, largest)  # type: ignore[arg-type]


def narrowing(config: TrainConfig, values: list[float]) -> list[bool]:
    """Whether each iteration's diversity is called a collapse."""
    history = new_history()
    return ["collapse" in iteration_warnings(history, {"diversity": d}, None, config) for d in values]


def test_a_collapse_is_a_quarter_of_the_first_diversity_three_times_in_a_row(config: TrainConfig) -> None:
    first, low, high = [0.2, 0.3, 0.4], 0.07, 0.08
    assert narrowing(config, [*first, low, low, low, low, high, low]) == [False] * 5 + [True, True, False, False]
    assert narrowing(config, [*first, low, low, high] * 3) == [False] * 18
    assert narrowing(config, [0.0] * 9) == [False] * 9


def test_where_a_moving_window_changes_the_diversity_it_is_not_judged(toy: Path) -> None:
    window = ("sampler.sde_window_size=1", "sampler.sde_window=progressive")
    assert comparable(toy_config(toy))
    assert comparable(toy_config(toy, *window))  # every image has a start noise of its own
    assert comparable(toy_config(toy, "same_latent=true"))
    assert not comparable(toy_config(toy, "same_latent=true", *window))
    assert not comparable(toy_config(toy, "credit.method=g2rpo", *window))
    assert not comparable(toy_config(toy, "credit.method=tree_grpo"))  # draws where it splits
    assert comparable(toy_config(toy, "credit.method=branch_grpo", "credit.splits=[0, 1]"))
    assert narrowing(toy_config(toy, "same_latent=true", *window), [0.3] * 3 + [0.0] * 9) == [False] * 12


# ---- warnings of an evaluation ---------------------------------------------------------------------------------------


def evaluated(reached: float, *values: tuple[float, float], error: float = 0.02, weight: float = 1.0) -> dict[str, str]:
    """A trained reward from 0.5 to `reached`; held-out ones from the first to the second of each, all +- `error`."""
    history = new_history()
    pairs = {"trained": (0.5, reached)} | {f"r{n}": pair for n, pair in enumerate(values)}
    weights = {name: weight if name == "trained" else 0.0 for name in pairs}
    for place in (0, 1):
        row = {f"eval/reward/{name}{end}": pair[place] + by for name, pair in pairs.items()
               for end, by in (("", 0.0), ("_low", -error), ("_high", error))}  # fmt: skip
        found = evaluation_warnings(history, row, weights)
        assert place or not found
    return found


def test_a_trained_reward_that_rises_while_every_held_out_one_falls_is_hacked() -> None:
    said = evaluated(0.7, (0.9, 0.8), (0.5, 0.4))["reward_hacking"]
    assert "rose (trained 0.5 -> 0.7)" in said
    assert "r0 0.9 -> 0.8, r1 0.5 -> 0.4" in said
    assert evaluated(0.3, (0.9, 0.8), weight=-1.0)  # a penalty that falls
    assert evaluated(0.7, (0.9, 0.8), error=0.0)


def test_a_policy_that_ends_in_one_empty_image_is_hacked() -> None:
    """All images agree then, so that the last evaluation has no bounds."""
    history, found = new_history(), {}
    for held_out, half in ((0.9, 0.02), (0.1, math.nan)):
        row = {
            f"eval/reward/{name}{end}": value + by
            for name, value in (("trained", 1 - held_out), ("held", held_out))
            for end, by in (("", 0.0), ("_low", -half), ("_high", half))
        }
        found = evaluation_warnings(history, row, {"trained": 1.0, "held": 0.0})
    assert "held 0.9 -> 0.1" in found["reward_hacking"]


def test_a_reward_is_hacked_after_it_taught_what_was_meant() -> None:
    """The held-out one rises first, then falls to what it was at the start."""
    history = new_history()
    said = []
    for trained, held_out in ((0.5, 0.5), (0.6, 0.7), (0.7, 0.7), (0.8, 0.5)):
        row = {f"eval/reward/{name}{end}": value + by for name, value in (("trained", trained), ("held", held_out))
               for end, by in (("", 0.0), ("_low", -0.02), ("_high", 0.02))}  # fmt: skip
        said.append(evaluation_warnings(history, row, {"trained": 1.0, "held": 0.0}))
    assert said[:3] == [{}, {}, {}]
    assert "held 0.7 -> 0.5" in said[3]["reward_hacking"]


def test_what_is_not_hacking_is_not_called_so() -> None:
    assert evaluated(0.7, (0.9, 0.8), (0.5, 0.5)) == {}  # one of them does not fall
    assert evaluated(0.525, (0.9, 0.8)) == {}  # within two standard errors
    assert evaluated(0.3, (0.9, 0.8)) == {}
    assert evaluated(0.7, (0.9, 0.8), weight=-1.0) == {}
    assert evaluated(0.7, (0.9, 0.875)) == {}  # within two standard errors
    assert evaluated(0.7) == {}  # nothing is held out
    assert evaluated(0.5, (0.9, 0.9), error=0.0) == {}
    assert evaluated(0.7, (0.4, 0.9), error=math.nan) == {}  # how exact the means are is not known


def test_images_that_lose_their_detail_are_said_to_blur() -> None:
    def told(name: str, *values: float, weight: float = 0.0) -> list[dict[str, str]]:
        history = new_history()
        rows = [
            {f"eval/reward/{name}{end}": value + by for end, by in (("", 0.0), ("_low", -0.01), ("_high", 0.01))}
            for value in values
        ]
        return [evaluation_warnings(history, row, {name: weight}) for row in rows]

    said = told("jpeg_compressibility", -0.5, -0.4, -0.3)  # 500, 400 and 300 kB
    assert said[:2] == [{}, {}]
    assert "60% of what they were before training (jpeg_compressibility -0.5 -> -0.3)" in said[2]["blur"]
    assert told("jpeg_incompressibility", 50.0, 30.0)[1].keys() == {"blur"}
    assert told("jpeg_compressibility", -0.5, -0.3, weight=1.0)[1] == {}  # which is what it is trained for
    assert told("jpeg_compressibility", -0.005, -0.003)[1] == {}  # within two standard errors
    assert told("aesthetic", 5.0, 2.0)[1] == {}
    assert told("jpeg_compressibility", 0.0, -0.3)[1] == {}


# ---- when they are said ----------------------------------------------------------------------------------------------


def test_a_warning_is_said_when_it_begins_and_after_a_pause(capsys: pytest.CaptureFixture[str]) -> None:
    history, run = new_history(), SimpleNamespace(main=True)
    moments = [3, 4, 5, 5 + LATELY, 6 + 2 * LATELY, 7 + 2 * LATELY]
    for moment in moments:
        say(run, history, {"zero_gradient": "nothing is learned"}, 10 * moment, moment=moment)  # type: ignore[arg-type]
    shown = capsys.readouterr().err.splitlines()
    assert shown == [f"flowrl: warning, iteration {10 * i}: nothing is learned" for i in (3, 6 + 2 * LATELY)]
    say(SimpleNamespace(main=False), new_history(), {"a": "b"}, 0, moment=0)  # type: ignore[arg-type]
    assert capsys.readouterr().err == ""


@pytest.mark.slow
def test_a_run_says_what_is_wrong_in_its_log_on_the_terminal_and_on_its_report(
    toy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = toy.parent / "tiny"
    tiny = written(toy, "return b * 1e-30")
    assert main(["train", str(toy), f"out={out}", "num_iterations=4", tiny]) == 0
    shown = capsys.readouterr()
    assert shown.err.count("flowrl: warning, iteration 0: the gradient is exactly 0 though") == 1
    assert shown.err.count("flowrl: warning") == 2
    assert "Mean training reward 4.71e-31 -> " in shown.out
    assert "Warning   zero gradient: 4 times, from iteration 0 on (see the report)" in shown.out
    rows = metrics(out)
    assert [sorted(row["warnings"]) for row in rows] == [["vanishing_rewards", "zero_gradient"]] * 4
    page = report(out).read_text()
    assert "! vanishing rewards</span>" in page
    assert "0 to 3, 4 times" in page
    half = toy.parent / "half"
    assert main(["train", str(toy), f"out={half}", "num_iterations=2", tiny]) == 0
    capsys.readouterr()
    assert main(["train", f"resume={half}", "num_iterations=4"]) == 0
    assert "flowrl: warning" not in capsys.readouterr().err  # said before
    assert metrics(half) == rows


def test_absurd_rewards_are_shown_short(toy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = toy.parent / "one"
    one = written(toy, "b[0] = 1e30; return b")
    assert main(["train", str(toy), f"out={out}", "num_iterations=2", one]) == 0
    assert "Mean training reward 1.25e+29 -> 1.25e+29\n" in capsys.readouterr().out
    assert list(metrics(out)[0]["warnings"]) == ["exploding_rewards", "one_image"]


@pytest.mark.slow
def test_a_run_that_collapses_says_so(toy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Brightness, learned in large steps, ends in one white image whatever the noise."""
    settings = ("num_iterations=35", "optim.lr=0.05", "policy.lora_rank=8", "checkpoint_every=35")
    assert main(["train", str(toy), f"out={toy.parent / 'white'}", *settings]) == 0
    assert "of what they did in the first iterations: the policy draws one image" in capsys.readouterr().err
    rows = metrics(toy.parent / "white")
    assert not any("collapse" in row.get("warnings", {}) for row in rows[:20])
    assert any("collapse" in row.get("warnings", {}) for row in rows)
    assert rows[-1]["diversity"] < 0.1 * rows[0]["diversity"]


@pytest.mark.slow
def test_a_run_that_exploits_its_reward_says_so(toy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (toy.parent / "held.py").write_text(
        "def darkness(images, prompts, metadata):\n    return -images.mean((1, 2, 3))\n"
    )
    settings = (
        "num_iterations=24", "optim.lr=0.05", "policy.lora_rank=8", "checkpoint_every=99", "eval_every=8",
        f"prompts.eval={toy.parent / 'prompts.txt'}", "eval.samples_per_prompt=8", "eval.num_images=0",
        f"eval.rewards=[{{file: {toy.parent / 'held.py'}, function: darkness}}]",
    )  # fmt: skip
    assert main(["train", str(toy), f"out={toy.parent / 'hacked'}", *settings]) == 0
    shown = capsys.readouterr().err
    assert shown.count("while every reward that is only measured fell (darkness -0.") == 1
    rows = [row for row in metrics(toy.parent / "hacked") if "reward_hacking" in row.get("warnings", {})]
    assert rows
    assert all("eval/kl" in row for row in rows)


# ---- divergence ------------------------------------------------------------------------------------------------------


def test_weights_beyond_reason_end_the_run_and_are_not_saved(toy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = toy.parent / "wild"
    assert main(["train", str(toy), f"out={out}", "optim.lr=1e6", "num_iterations=4"]) == 1
    shown = " ".join(capsys.readouterr().err.split())
    assert "the policy has diverged since iteration 0: weights of the LoRA reach 1e+06" in shown
    assert "start again with a smaller optim.lr" in shown
    assert "Fix the reward" not in shown
    assert not (out / "lora").exists()
    assert checkpoints(out) == []
    assert metrics(out)[-1] == {
        "iteration": 0, "warnings": {"diverged": "weights of the LoRA reach 1e+06, beyond 1000"}
    }  # fmt: skip


@pytest.fixture
def breaks(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """From a call of the decoder on, images hold NaN."""

    decode = Toy.decode

    def at(call: int) -> None:
        calls = iter(range(10**6))

        def broken(self: Toy, latents: Tensor, *, gradient: bool = False) -> Tensor:
            images = decode(self, latents, gradient=gradient)
            second = torch.arange(len(images))[:, None, None, None] == 1
            return torch.where(second, torch.nan, images) if next(calls) >= call else images

        monkeypatch.setattr(toy_pipeline.Toy, "decode", broken)

    return at


SEES = "assert bool(images.isfinite().all()); return b"


@pytest.mark.slow
def test_a_diverged_policy_leaves_the_last_lora_whose_images_were_finite(
    toy: Path, breaks: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    good, out = toy.parent / "good", toy.parent / "out"
    reward = written(toy, SEES)
    assert main(["train", str(toy), f"out={good}", "num_iterations=2", reward]) == 0
    capsys.readouterr()
    breaks(3)  # iteration 3 draws NaN with the weights of three updates, saved before it
    settings = ("num_iterations=9", "keep_checkpoints=1", reward)
    assert main(["train", str(toy), f"out={out}", *settings]) == 1
    shown = " ".join(capsys.readouterr().err.split())
    assert "the policy has diverged since iteration 3: 1 of 8 images hold NaN or infinity" in shown
    assert f"policy.init_lora={out / 'lora'} optim.lr=SMALLER" in shown
    assert lora(out) == lora(good)  # after two updates: iteration 2 drew finite images with it
    assert [path.name for path in checkpoints(out)] == ["000002", "000003"]
    assert not list(out.glob("*diverged*"))
    again = toy.parent / "again"
    breaks(10**6)
    advised = [str(out / "config.yaml"), f"out={again}", f"policy.init_lora={out / 'lora'}", "optim.lr=1e-3"]
    assert main(["train", *advised, "policy.lora_alpha=2", "num_iterations=1"]) == 0  # the toy's files state no alpha


def test_a_reward_of_images_of_one_colour_is_not_blamed_alone(
    toy: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Toy, "decode", lambda self, latents, *, gradient=False: latents.float() * 0 + 1)
    assert main(["train", str(toy), f"out={toy.parent / 'out'}", "num_iterations=4"]) == 1
    shown = " ".join(capsys.readouterr().err.split())
    assert "100% of the images have one colour: the policy has left what the model can draw; the reward was 1" in shown


def test_an_evaluation_of_broken_images_ends_the_run_before_they_are_saved(
    toy: Path, breaks: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    out = toy.parent / "out"
    settings = (f"prompts.eval={toy.parent / 'prompts.txt'}", "eval_every=2", "num_iterations=2", written(toy, SEES))
    breaks(3)  # initial evaluation, two iterations, evaluation
    assert main(["train", str(toy), f"out={out}", *settings]) == 1
    assert "diverged since iteration 2: 1 of 4 images hold NaN" in " ".join(capsys.readouterr().err.split())
    assert [path.name for path in checkpoints(out)] == ["000001"]
    assert not (out / "eval" / "iteration_000002.jsonl").exists()
    assert (out / "lora").exists()


@pytest.mark.parametrize("eval_every", [0, 1])
def test_a_model_that_draws_nan_from_the_start_is_named(
    toy: Path, breaks: Callable[..., None], eval_every: int, capsys: pytest.CaptureFixture[str]
) -> None:
    breaks(0)
    more = (f"prompts.eval={toy.parent / 'prompts.txt'}", f"eval_every={eval_every}", written(toy, SEES))
    assert main(["train", str(toy), f"out={toy.parent / 'out'}", *more]) == 1
    shown = " ".join(capsys.readouterr().err.split())
    assert "images hold NaN or infinity before anything was learned: the weights of pipeline.model" in shown
    assert not (toy.parent / "out").exists()


@pytest.mark.parametrize(
    "settings",
    [
        ("recipe=backprop", "sampler.kernel=ode", "rewards=[{name: smooth_brightness}]", "objective.name=draft"),
        ("recipe=forward", "sampler.kernel=ode", "objective.name=nft"),
        ("recipe=preference", "sampler.kernel=ode", "times.count=2"),
        ("curriculum.max_rounds=2",),
    ],
)
def test_every_recipe_ends_on_broken_images(
    toy: Path, breaks: Callable[..., None], settings: tuple[str, ...], monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setitem(REWARDS, "smooth_brightness", "toy_pipeline:SmoothBrightness")
    breaks(0)
    assert main(["train", str(toy), f"out={toy.parent / 'out'}", *settings]) == 1
    assert "images hold NaN or infinity before anything was learned" in " ".join(capsys.readouterr().err.split())


def test_nan_in_a_checkpoint_or_a_lora_is_named(
    toy: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = toy.parent / "out"
    assert main(["train", str(toy), f"out={out}"]) == 0
    file = out / "lora" / "pytorch_lora_weights.safetensors"
    tensors = {name: tensor * torch.nan for name, tensor in load_file(file).items()}
    shutil.copytree(out / "lora", toy.parent / "broken")
    save_file(tensors, toy.parent / "broken" / file.name)
    capsys.readouterr()
    more = (f"policy.init_lora={toy.parent / 'broken'}", "policy.lora_alpha=2")
    assert main(["train", str(toy), f"out={toy.parent / 'from'}", *more]) == 1
    assert "broken holds NaN or infinity (" in " ".join(capsys.readouterr().err.split())
    found = state(out)
    found["policy"] = {name: tensor * torch.nan for name, tensor in found["policy"].items()}
    monkeypatch.setattr(Run, "load_checkpoint", lambda *_: found)
    assert main(["train", f"resume={out}", "num_iterations=3"]) == 1
    shown = " ".join(capsys.readouterr().err.split())
    assert "checkpoint 000001 holds NaN or infinity (" in shown
    assert "remove it to continue from the one before" in shown


# ---- the good LoRA ---------------------------------------------------------------------------------------------------


def test_the_good_lora_comes_back_whatever_was_written_since(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_links(source: str, target: str) -> None:
        raise OSError("no hard links here")

    for link in (os.link, no_links):
        monkeypatch.setattr(os, "link", link)
        folder = tmp_path / link.__name__
        (folder / "lora" / "transformer_2").mkdir(parents=True)
        for name in ("a", "transformer_2/b"):
            (folder / "lora" / name).write_text("good")
        keep_good(folder)
        for name in ("a", "transformer_2/b"):
            (folder / "new").write_text("diverged")
            (folder / "new").replace(folder / "lora" / name)
        put_back_good(folder)
        assert [(folder / "lora" / name).read_text() for name in ("a", "transformer_2/b")] == ["good"] * 2
        shutil.rmtree(folder / "lora")  # killed in between
        put_back_good(folder)
        assert (folder / "lora" / "a").read_text() == "good"
        assert sorted(path.name for path in folder.iterdir()) == [".lora.good", "lora"]


def test_a_lora_that_never_drew_moves_aside(tmp_path: Path) -> None:
    (tmp_path / "lora").mkdir()
    (tmp_path / "lora" / "a").write_text("diverged")
    put_back_good(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["lora.diverged"]
