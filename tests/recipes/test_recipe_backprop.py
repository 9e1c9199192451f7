"""Recipe backprop end to end: its gradient against differences of the loss, its paths, and what it refuses."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from diffusers import AutoencoderKL, DiffusionPipeline
from tiny_models import load_tiny
from tiny_runs import TinyRuns, differences, lasting, lora, metrics, tiny_runs
from torch import Tensor
from toy_pipeline import toy_runs

from flowrl import rewards
from flowrl.cli import main
from flowrl.pipelines.weights.lora import Policy
from flowrl.prompts.loading import prompts_of_iteration
from flowrl.rewards import FunctionReward, Reward, RewardInputs, RewardOutput
from flowrl.runtime.randomness import counter_integers, sample_normals
from flowrl.samplers.guidance import classifier_free_guidance
from flowrl.training.learner import GradientSum

METHOD = ("recipe=backprop", "sampler.kernel=ode", "num_iterations=2")
ALL_STEPS = ("objective.name=alignprop", "objective.options.truncation=none")
ROUNDING = 1e-4
"""Of the largest entry of a gradient: other batches add in another order. One thread was off by 7e-6, two by 2.1e-5; an
image that counts twice would be by 0.1."""
SETTINGS: dict[str, tuple[str, ...]] = {
    "refl": ("objective.name=refl", "objective.options.target=100"),
    "draft": ("objective.name=draft", "objective.options.count=2"),
    "alignprop": ("objective.name=alignprop",),
    "drtune": ("objective.name=drtune", "objective.options.count=2", "objective.options.early_stop=1"),
}


def _score(inputs: RewardInputs, *, failing: bool, still: bool) -> RewardOutput:
    values, most = 100 * inputs.images.mean((1, 2, 3)), inputs.sample_ids % 4 != 1
    values = torch.where(most, values, values.detach()) if still else values
    valid = most if failing else torch.ones(len(inputs), dtype=torch.bool)
    lost = int((~valid).sum())
    return RewardOutput(
        values=torch.where(valid, values, torch.nan), valid=valid, parts={"plain": values},
        errors={"dropped": lost} if lost else {},
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Glow:
    """Brightness with gradient; an image of every group fails if it is `failing`, or has none if it is `still`."""

    failing: bool = False
    still: bool = False
    differentiable: ClassVar[bool] = True

    def build(self, device: torch.device) -> Reward:
        score = partial(_score, failing=self.failing, still=self.still)
        return FunctionReward(name="glow", score=score, needs=frozenset({"images"}), version="1", differentiable=True)


@dataclass(frozen=True, kw_only=True)
class Dull:
    """Brightness that says it has no gradient once it is built."""

    differentiable: ClassVar[bool] = True

    def build(self, device: torch.device) -> Reward:
        return replace(Glow().build(device), name="dull", differentiable=False)  # type: ignore[type-var]


@pytest.fixture(autouse=True)
def _known_rewards(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("glow", "dull"):
        monkeypatch.setitem(rewards.REWARDS, name, f"{__name__}:{name.capitalize()}")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, tiny_sd3_folder: Path) -> Path:
    """The tiny SD3 with a pale decoder: at the edge of [0, 1] rounding would switch a pixel's gradient on or off."""
    folder = shutil.copytree(tiny_sd3_folder, tmp_path_factory.mktemp("pale") / "sd3")
    vae = AutoencoderKL.from_pretrained(folder / "vae")
    for parameter in vae.decoder.conv_out.parameters():
        parameter.data.mul_(0.1)
    vae.save_pretrained(folder / "vae")
    return folder


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, model: Path) -> TinyRuns:
    return tiny_runs(tmp_path_factory.mktemp("backprop"), model, rewards=[{"name": "glow"}])


@pytest.fixture
def toys(tmp_path: Path) -> Iterator[TinyRuns]:
    """Of the toy, for what is not about a network or a decoder."""
    yield from toy_runs(tmp_path, rewards=[{"name": "glow"}])


@pytest.fixture
def gradients(monkeypatch: pytest.MonkeyPatch) -> list[list[Tensor]]:
    """The gradient of every optimizer update, a tensor a parameter."""
    seen: list[list[Tensor]] = []
    apply = GradientSum.apply

    def record(self: GradientSum, *arguments: Any) -> Tensor | None:
        seen.append([total.clone() for total in self.total])
        return apply(self, *arguments)

    monkeypatch.setattr(GradientSum, "apply", record)
    return seen


def flat(gradient: list[Tensor]) -> Tensor:
    return torch.cat([part.flatten() for part in gradient])


@torch.no_grad()
def loss_by_hand(folder: Path, prompts: list[str], move: list[Tensor], num_steps: int) -> float:
    """-mean brightness of the first iteration's eight images at guidance 3, the LoRA moved off its start."""
    pipeline = load_tiny(folder)
    policy = Policy(pipeline.denoiser, rank=2, alpha=4, targets=pipeline.lora_targets, seed=0)
    for parameter, step in zip(policy.parameters.values(), move, strict=True):
        parameter.add_(step.float())
    order = [prompts[i] for i in prompts_of_iteration(len(prompts), 2, 0, 0) for _ in range(4)]
    keys = [(0, "start", 0, group, k) for group in range(2) for k in range(4)]
    x, schedule = sample_normals(pipeline.latent_shape, keys), pipeline.schedule(num_steps, "diffusers")
    velocity = classifier_free_guidance(pipeline.network, pipeline.encode(order), pipeline.encode([""]), 3.0)
    for now, after, timestep in zip(schedule.sigma[:-1], schedule.sigma[1:], schedule.timestep, strict=True):
        x = torch.add(x, (after - now) * velocity(x, now, timestep))
    return -float(100 * pipeline.decode(x).double().mean())


@pytest.mark.slow
def test_the_gradient_is_that_of_the_reward_through_guidance_sampler_and_decoder(
    runs: TinyRuns, model: Path, gradients: list[list[Tensor]]
) -> None:
    run = runs.train("exact", *METHOD, *ALL_STEPS, "sampler.guidance_scale=3", "num_iterations=1", "micro_batch_size=2")
    prompts = (runs.folder / "prompts.txt").read_text().split("\n")[:4]
    gradient, row = gradients[0], metrics(run)[0]
    norm = float(flat(gradient).norm())

    def loss(h: float) -> float:
        return loss_by_hand(model, prompts, [h * part / norm for part in gradient], 3)

    assert row["loss"] == pytest.approx(loss(0), abs=1e-4)
    assert row["loss"] == pytest.approx(-row["reward"], abs=1e-4)
    assert (loss(0.02) - loss(-0.02)) / 0.04 == pytest.approx(norm, rel=2e-2)  # float32, and third derivatives
    # 8 images x 3 steps x 2 branches, every call with its graph
    assert (row["nfe/rollout"], row["nfe/backward"], row["images"]) == (48, 48, 8)


@pytest.mark.parametrize("name", SETTINGS)
def test_every_path_trains(toys: TinyRuns, name: str) -> None:
    run = toys.train(name, *METHOD, *SETTINGS[name], "sampler.num_steps=4", "num_iterations=3")
    rows = metrics(run)
    assert all(row["grad_norm"] > 0 for row in rows)
    calls = [row["trained_calls"] for row in rows]
    if name == "refl":
        assert all(row["loss"] == pytest.approx(1e-3 * (100 - row["reward"]), rel=1e-5) for row in rows)
        assert calls == [1] * 3
        assert {row["last_step"] for row in rows} == {3}
    else:
        assert all(row["loss"] == pytest.approx(-row["reward"], rel=1e-6) for row in rows)
    if name in ("draft", "drtune"):
        assert calls == [2] * 3
    if name == "drtune":
        assert [row["last_step"] for row in rows] == [3 - counter_integers(0, 2, 0, "drtune end", i) for i in range(3)]
    assert rows[-1]["nfe/backward"] == 8 * sum(calls)
    assert rows[-1]["nfe/rollout"] == 8 * sum(row["last_step"] + 1 for row in rows)


def test_training_makes_images_brighter(toys: TinyRuns) -> None:
    rows = metrics(toys.train("brighter", *METHOD, "num_iterations=5", "optim.lr=0.02", "prompts_per_step=4"))
    assert rows[-1]["reward"] > rows[0]["reward"]


def test_a_reward_beyond_the_hinge_has_no_gradient(toys: TinyRuns) -> None:
    row = metrics(toys.train("hinge", *METHOD, "objective.name=refl", "num_iterations=1"))[0]
    assert row["reward"] > 2
    assert (row["loss"], row["grad_norm"]) == (0, 0)


def test_micro_batches_change_nothing_but_rounding(runs: TinyRuns, gradients: list[list[Tensor]]) -> None:
    for size in (8, 1):
        runs.train(f"micro-{size}", *METHOD, f"micro_batch_size={size}", "num_iterations=1")
    whole, parts = (flat(gradient) for gradient in gradients)
    torch.testing.assert_close(parts, whole, rtol=0, atol=ROUNDING * float(whole.abs().max()))


def test_checkpointing_changes_no_gradient(runs: TinyRuns, gradients: list[list[Tensor]]) -> None:
    for on in ("false", "true"):
        runs.train(f"checkpointed-{on}", *METHOD, *ALL_STEPS, f"pipeline.gradient_checkpointing={on}",
                   "num_iterations=1")  # fmt: skip
    assert torch.equal(flat(gradients[0]), flat(gradients[1]))


def test_two_updates_sample_with_the_policy_of_then(toys: TinyRuns, gradients: list[list[Tensor]]) -> None:
    sizes = ("micro_batch_size=4", "num_iterations=1", "sampler.num_steps=2")
    row = metrics(toys.train("updates", *METHOD, *sizes, "updates_per_rollout=2"))[0]
    once = metrics(toys.train("once", *METHOD, *sizes))[0]
    assert len(gradients) == 3
    assert row["images"] == once["images"] == 8
    assert row["reward"] != once["reward"]  # its second half was sampled after an update


def test_images_whose_reward_failed_are_left_out(toys: TinyRuns, gradients: list[list[Tensor]]) -> None:
    """Two of eight fail: the gradient is the mean over the other six, whatever the size of micro-batches."""
    failing = "rewards=[{name: glow, options: {failing: true}}]"
    rows = [metrics(toys.train(f"failing-{size}", *METHOD, failing, f"micro_batch_size={size}"))
            for size in (8, 1)]  # fmt: skip
    assert [row["invalid_ratio"] for row in rows[0]] == [0.25, 0.25]
    assert [row["reward_errors/glow/dropped"] for row in rows[0] + rows[1]] == [2] * 4
    assert rows[0][0]["loss"] == pytest.approx(-rows[0][0]["reward"], rel=1e-6)
    assert rows[1][0]["loss"] == pytest.approx(rows[0][0]["loss"], rel=1e-6)
    first, other = flat(gradients[0]), flat(gradients[2])
    assert bool(first.isfinite().all())
    torch.testing.assert_close(other, first, rtol=0, atol=ROUNDING * float(first.abs().max()))
    toys.train("still", *METHOD, "rewards=[{name: glow, options: {still: true}}]", "num_iterations=1")
    torch.testing.assert_close(first, flat(gradients[-1]) * 8 / 6, rtol=0, atol=ROUNDING * float(first.abs().max()))


def test_a_run_that_stops_after_its_update_saves_no_state_from_before_it(toys: TinyRuns) -> None:
    failing = ("rewards=[{name: glow, options: {failing: true}}]", "max_invalid_ratio=0.04", "checkpoint_every=9")
    with pytest.raises(AssertionError):  # it ends with an error in its second iteration, whose update is made by then
        toys.train("stopped", *METHOD, *failing)
    assert len(metrics(toys.folder / "stopped")) == 1
    assert list((toys.folder / "stopped" / "checkpoints").glob("*")) == []


def test_a_reward_of_weight_zero_is_logged_whatever_it_is(toys: TinyRuns) -> None:
    watched = f"rewards=[{{name: glow}}, {{file: {toys.folder / 'brightness.py'}, function: brightness, weight: 0}}]"
    row = metrics(toys.train("watched", *METHOD, watched, "num_iterations=1"))[0]
    assert row["reward/brightness"] == pytest.approx(row["reward/glow"], rel=1e-6)
    assert row["reward/glow/plain"] == row["reward/glow"] == row["reward"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["alignprop", "drtune"])
def test_a_resumed_run_is_the_run_that_was_never_stopped(toys: TinyRuns, name: str) -> None:
    settings = (*METHOD, *SETTINGS[name], "policy.ema_decay=0.5")
    whole = toys.train(f"{name}-whole", *settings, "num_iterations=4")
    run = toys.train(f"{name}-part", *settings)
    assert main(["train", f"resume={run}", "num_iterations=4"]) == 0
    assert metrics(run) == metrics(whole)
    assert lora(run) == lora(whole)
    assert differences(lasting(run), lasting(whole)) == 0


# ---- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("objective.name=drafty",), "unknown objective of recipe backprop 'drafty' (did you mean 'draft'?)"),
        (("objective.options.cout=1",), "unknown option 'cout' (did you mean 'count'?)"),
        (("objective.options.count=4",), "draft trains between 1 and 3 steps here, got count 4"),
        (("objective.options.count=a",), "count must be an integer, got 'a'"),
        (("objective.options.loss=plain",), "loss must be one of negative, hinge, got 'plain'"),
        (("objective.options.scale=0",), "scale of the loss must be above 0"),
        (("objective.options.seed=0",), "unknown option 'seed'"),
        (("sampler.kernel=cps",), "sampler.kernel is cps: set sampler.kernel=ode"),
        (("kl_coef=0.1",), "kl_coef is set to 0.1, but recipe backprop does not read it"),
        (("sampler.solver=dpm2",), "sampler.solver is set to 'dpm2'"),
        (
            ("objective.options.count=2", "sampler.guidance_scale=3", "sampler.train_negative=false"),
            "objective draft sends the gradient of several steps through the network's input",
        ),
        (("rewards=[{name: jpeg_compressibility}]",), "reward jpeg_compressibility has none"),
        (("rewards=[{name: glow}, {name: jpeg_compressibility}]",), "reward jpeg_compressibility has none"),
        (("rewards=[{file: BRIGHTNESS, function: brightness}]",), "brightness has none"),
    ],
)
def test_mistakes_are_refused_before_a_model_loads(
    runs: TinyRuns, overrides: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    def loads(*arguments: Any, **options: Any) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(DiffusionPipeline, "from_pretrained", loads)
    overrides = tuple(text.replace("BRIGHTNESS", str(runs.folder / "brightness.py")) for text in overrides)
    assert main(["train", str(runs.config), f"out={runs.folder / 'refused'}", *METHOD, *overrides]) == 1
    assert message in re.sub(r"\s+", " ", capsys.readouterr().err)
    assert not (runs.folder / "refused").exists()


def test_a_reward_that_turns_out_to_have_no_gradient_is_refused(
    runs: TinyRuns, capsys: pytest.CaptureFixture[str]
) -> None:
    out = runs.folder / "dull"
    assert main(["train", str(runs.config), f"out={out}", *METHOD, "rewards=[{name: dull}]"]) == 1
    assert "reward dull has none" in re.sub(r"\s+", " ", capsys.readouterr().err)
    assert not out.exists()
