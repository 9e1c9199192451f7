"""Distribution matching beside the policy loss: what it adds, what the fake score learns, and what is refused."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from recorded_gradients import recorded_gradients
from tiny_runs import TinyRuns, differences, lasting, lora, metrics, state
from torch import Tensor
from toy_pipeline import (
    PROMPTS,
    Net,
    Process,
    QuickRun,
    Toy,
    on_threads,
    quick_run,
    reward_list,
    toy_config,
    toy_in_place,
)
from two_processes import close, train_on_two

from flowrl.cli import main
from flowrl.config.together import refuse_together
from flowrl.objectives.distillation import distribution_matching, noise_level
from flowrl.recipes import fake_score, grpo
from flowrl.runtime.randomness import counter_normal
from flowrl.session.preflight import resolve
from flowrl.training.optimizers import FAKE
from flowrl.training.parts import read_run_prompts

pytestmark = pytest.mark.usefixtures("numbers_alone")

CPS = ("sampler.kernel=cps", "sampler.num_steps=3", "sampler.noise_level=0.9")
DMD = (*CPS, "dmd={weight: 0.1, guidance_scale: 3.0, fake_lr: 0.01}")


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    yield from toy_in_place(tmp_path_factory.mktemp("matching"))


@pytest.fixture
def runs(toy: Path, tmp_path: Path) -> TinyRuns:
    return TinyRuns(folder=tmp_path, config=toy)


@pytest.fixture
def gradients(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The gradient of every optimizer update, as one vector: two of the fake score, then one of the policy."""
    return recorded_gradients(monkeypatch)


def rows(toy: Path, *overrides: str) -> list[dict[str, Any]]:
    return quick_run(toy_config(toy, *overrides), toy.parent)


# ---- what it adds to an update ---------------------------------------------------------------------------------------


def test_each_side_is_asked_about_the_image_that_the_policy_drew(toy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Teacher and, before it has learned, fake score are the network itself: its velocities, worked out here."""
    seen = list[tuple[Tensor, ...]]()

    def recorded(*given: Tensor) -> Tensor:
        seen.append(given)
        return distribution_matching(*given)

    monkeypatch.setattr(fake_score, "distribution_matching", recorded)
    monkeypatch.setattr(grpo, "learn", lambda *_: None)
    (row,) = rows(toy, *DMD, "prompts_per_step=4", "group_size=2", "micro_batch_size=8")
    ((student, clean, real, fake),) = seen
    torch.testing.assert_close(student.detach(), clean, rtol=0, atol=1e-6)  # the last step again, now with its graph

    net, pipeline = Net(), Toy()
    keys = [(0, "matching", 0, 0, image) for image in range(8)]
    sigma = torch.tensor([noise_level(1.0, "level", *key) for key in keys])
    noise, s = torch.stack([counter_normal((3, 2, 2), *key) for key in keys]), sigma[:, None, None, None]
    x = (1 - s) * clean + s * noise
    order = [PROMPTS[i] for i in prompts_of(toy)]
    texts = pipeline.encode([text for text in order for _ in range(2)]).tensors["text"]
    nothing = pipeline.encode([""] * 8).tensors["text"]
    with torch.no_grad():
        asked, unasked = (net(x, 1000 * sigma, text) for text in (texts, nothing))
    torch.testing.assert_close(fake, x - s * asked, rtol=0, atol=1e-5)
    torch.testing.assert_close(real, x - s * (unasked + 3 * (asked - unasked)), rtol=0, atol=1e-5)
    assert row["dmd_loss"] == pytest.approx(
        float(distribution_matching(student.detach(), clean, real, fake).mean()), rel=1e-6
    )
    assert "fake_error" not in row


def prompts_of(toy: Path) -> list[int]:
    """Lines of the prompts of the first iteration, all four of the file."""
    from flowrl.prompts.loading import prompts_of_iteration

    return [int(line) for line in prompts_of_iteration(4, 4, 0, 0)]


def test_where_fake_and_teacher_agree_nothing_is_added(
    toy: Path, monkeypatch: pytest.MonkeyPatch, gradients: list[Tensor]
) -> None:
    monkeypatch.setattr(grpo, "learn", lambda *_: None)
    rows(toy, *CPS)
    (row,) = rows(toy, *CPS, "dmd={weight: 5.0, guidance_scale: 1.0}")
    assert row["dmd_loss"] == 0
    assert torch.equal(*gradients)


def test_the_gradient_is_the_policys_and_the_weight_times_the_matchings(toy: Path, gradients: list[Tensor]) -> None:
    for weight in (0, 1, 3):
        rows(toy, *CPS, f"dmd.weight={weight}")
    policy, (once, thrice) = gradients[0], gradients[3::3]
    assert float((once - policy).abs().max()) > 1e-3
    torch.testing.assert_close(thrice - policy, 3 * (once - policy), rtol=1e-6, atol=1e-9)


def test_groups_of_equal_rewards_are_matched_all_the_same(toy: Path, gradients: list[Tensor]) -> None:
    file = toy.parent / "equal.py"
    file.write_text("def equal(images, prompts, metadata):\n    return 0 * images.mean((1, 2, 3))\n")
    (row,) = rows(toy, *DMD, f"rewards=[{{file: {file}, function: equal}}]")
    assert (row["live_rows"], row["zero_std_ratio"]) == (0, 1)
    assert row["dmd_loss"] > 0
    assert float(gradients[-1].abs().max()) > 0


def test_sizes_of_batches_and_processes_do_not_change_the_result(
    toy: Path, gradients: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two rounds of sampling: an image has the noise of its number, whichever process drew it in which round."""
    given = (*DMD, "curriculum.max_rounds=2", reward_list(toy.parent, "half_fail"))
    (whole,) = rows(toy, *given)
    one = list(gradients)
    gradients.clear()
    rows(toy, *given, "micro_batch_size=1", "rollout_batch_size=2")
    assert len(one) == len(gradients) == 3
    for mine, theirs in zip(one, gradients, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
    monkeypatch.setattr(Process, "total_gradient", Process.total)
    for row in on_threads(2, toy.parent, lambda run: trained(run, toy, *given)):
        for key in ("dmd_loss", "fake_error", "grad_norm", "nfe/total"):
            assert row[key] == pytest.approx(whole[key], rel=1e-6, abs=1e-6), key


def trained(run: QuickRun, toy: Path, *overrides: str) -> dict[str, Any]:
    """The last row of a run of one process."""
    config: Any = toy_config(toy, *overrides)
    assert grpo.main(resolve(config, read_run_prompts(config.prompts)), run)  # type: ignore[arg-type]
    return run.logged[-1]


# ---- the fake score --------------------------------------------------------------------------------------------------


def test_the_fake_score_learns_what_the_policy_draws(toy: Path) -> None:
    """Of a policy that stands still, beside a fake score that does too, at the same images and noise."""
    still = (*DMD, "optim.lr=1e-9", "num_iterations=4", "dmd.fake_updates=15", "policy.lora_rank=8")
    idle, learned = (rows(toy, *still, f"dmd.fake_lr={rate}")[-1]["fake_error"] for rate in (1e-9, 0.03))
    assert learned < 0.97 * idle


def test_it_moves_nothing_of_the_policy(runs: TinyRuns) -> None:
    """A weight that no float64 sum sees: the same LoRA, average and moments to the bit as without any."""
    given = (*CPS, "num_iterations=3", "policy.ema_decay=0.9")
    without, beside = runs.train("without", *given), runs.train("beside", *given, "dmd.weight=1e-40")
    assert lora(without) == lora(beside)
    (mine, theirs) = (state(run) for run in (without, beside))
    assert theirs["slots"].keys() == {"ema", FAKE}
    assert differences(mine["slots"]["ema"], theirs["slots"]["ema"]) == 0
    assert differences(mine["optimizer"], theirs["optimizer"]) == 0
    assert mine["learners"] == {}
    assert theirs["learners"][FAKE]["state"][0]["step"] == 6  # two before each of the policy's


def test_a_run_goes_on_to_the_bit(runs: TinyRuns, capsys: pytest.CaptureFixture[str]) -> None:
    given = (*DMD, "updates_per_rollout=2")
    whole, run = runs.train("whole", "num_iterations=4", *given), runs.train("run", "num_iterations=2", *given)
    assert main(["train", f"resume={run}", "num_iterations=4"]) == 0
    assert metrics(run) == metrics(whole)
    assert lora(run) == lora(whole)
    assert differences(lasting(run), lasting(whole)) == 0
    capsys.readouterr()
    assert main(["train", f"resume={run}", "num_iterations=5", "dmd.fake_lr=0.02"]) == 1
    assert "dmd.fake_lr" in capsys.readouterr().err
    assert main(["train", f"resume={run}", "num_iterations=5", "dmd.fake_lr=0.02", "resume_changed=true"]) == 0
    assert state(run)["learners"][FAKE]["param_groups"][0]["lr"] == 0.02  # a setting, no state


@pytest.mark.slow
def test_two_processes_train_what_one_does(runs: TinyRuns, tmp_path: Path, warm_python: str) -> None:
    given = (*DMD, "num_iterations=3", "micro_batch_size=2", "updates_per_rollout=2")
    one = runs.train("one", *given)
    told = [
        (0, True, [str(runs.config), *given, f"out={tmp_path / name}", f"parallel.{name}=2"])
        for name in ("shard", "replicate")
    ]
    train_on_two(tmp_path, told, python=warm_python)
    for name in ("shard", "replicate"):
        close(one, tmp_path / name)
        assert (
            differences(state(one)["learners"][FAKE]["state"], state(tmp_path / name)["learners"][FAKE]["state"]) < 1e-6
        )


# ---- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ((*DMD, "sampler.sde_window_size=1"), "set sampler.sde_window_size=0, and let sampler.sde_window"),
        ((*DMD, "sampler.sde_window_range=[0,1]"), "let sampler.sde_window_range end at 2 or be null"),
        ((*CPS, "dmd.fake_lr=0.1"), "dmd.weight is 0, so there is no fake score"),
        ((*DMD, "credit.method=dense_grpo"), "credit method dense_grpo does not read it"),
        ((*DMD, "recipe=forward", "sampler.kernel=ode", "sampler.noise_level=null"), "recipe forward"),
        ((*DMD, "dmd.fake_updates=0"), "dmd.fake_updates must be at least 1, got 0"),
        ((*DMD, "dmd.weight=-1"), "dmd.weight must be at least 0, got -1"),
        ((*DMD, "dmd.weight=.nan"), "dmd.weight"),
        ((*DMD, "dmd.fake_lr=0"), "dmd.fake_lr must be above 0, got 0"),
        ((*DMD, "policy.train=full"), "dmd.weight=0.1 and policy.train=full do not go together"),
        ((*DMD, "keep_graphs=true"), "keep_graphs=true do not go together, because the fake score takes"),
        ((*DMD, "pipeline.dtype=float16"), "pipeline.dtype=float16 do not go together"),
        ((*DMD, "workers.rollouts=1", "workers.staleness=1"), "those of the policy one update ago"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_loads(
    runs: TinyRuns, given: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", str(runs.config), f"out={runs.folder / 'none'}", *given]) == 1
    assert re.sub(r"\s+", " ", said) in re.sub(r"\s+", " ", capsys.readouterr().err)
    assert not (runs.folder / "none").exists()


def test_without_it_nothing_is_refused() -> None:
    refuse_together({"policy.train": "full", "keep_graphs": True})
