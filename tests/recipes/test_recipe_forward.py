"""Recipe forward end to end: NFT, AWM, DGPO, CRD, RWR, RFT and SFT on images that are noised again."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import toy_pipeline
from recorded_gradients import recorded_gradients
from tiny_runs import TinyRuns, differences, lasting, lora, lora_tensors, metrics, state
from torch import Tensor
from toy_pipeline import QuickRun, on_threads, toy_runs, write_pairs

from flowrl.cli import main
from flowrl.config.base import find_config
from flowrl.config.train import load_config
from flowrl.objectives.forward_losses import FORWARD, Matched
from flowrl.prompts.loading import Prompt
from flowrl.prompts.pairs import load_images, read_shown
from flowrl.recipes import forward
from flowrl.recipes.forward import Images, check
from flowrl.session.preflight import resolve
from flowrl.training.loop import Loop
from flowrl.training.prompting import RunPrompts

pytestmark = pytest.mark.usefixtures("numbers_alone")

VALUES = [0.0, 1.0, 2.0, 7.0, 3.0, 3.0, 1.0, 0.0]  # of the two groups of four
SAMPLING = sorted(FORWARD.keys() - {"sft"})
FIXED = f"def reward(images, prompts, metadata):\n    return {VALUES}\n"
FAILED = """
import torch
from flowrl.rewards import RewardOutput

def reward(inputs):
    values = 100 * inputs.images.mean((1, 2, 3))
    valid = inputs.sample_ids != 1
    return RewardOutput(values=torch.where(valid, values, torch.nan), valid=valid)
"""
TWO = """
def bright(images, prompts, metadata):
    return 100 * images.mean((1, 2, 3))

def red(images, prompts, metadata):
    return images[:, 0].mean((1, 2))
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinyRuns]:
    settings: dict[str, Any] = {
        "recipe": "forward", "sampler": {"kernel": "ode", "num_steps": 3}, "times": {"count": 2}, "num_iterations": 1,
    }  # fmt: skip
    yield from toy_runs(tmp_path_factory.mktemp("forward"), **settings)


@pytest.fixture(scope="module")
def start(runs: TinyRuns) -> dict[str, Tensor]:
    """The LoRA before training."""
    untrained: dict[str, Tensor] = state(runs.train("untrained", "optim.lr=0"))["policy"]
    return untrained


@pytest.fixture
def gradients(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The gradient of every optimizer update, as one vector."""
    return recorded_gradients(monkeypatch)


@pytest.fixture
def matched(monkeypatch: pytest.MonkeyPatch) -> list[Matched]:
    """What the losses were given, in order."""
    seen: list[Matched] = []

    def watched(options: type[Any]) -> Callable[..., Any]:
        called = options.__call__

        def call(loss: Any, given: Matched) -> Any:
            seen.append(given)
            return called(loss, given)

        monkeypatch.setattr(options, "__call__", call)
        return call

    for method in FORWARD.values():
        watched(method.options)
    return seen


def named(name: str, *overrides: str) -> tuple[str, ...]:
    return (f"objective.name={name}", *overrides)


def advantages(values: list[float], group_size: int = 4, clip: float = 5.0) -> Any:
    groups = np.array(values).reshape(-1, group_size)
    return ((groups - groups.mean(1, keepdims=True)) / (groups.std(1, keepdims=True) + 1e-4)).clip(-clip, clip)


def errors(given: Matched) -> Any:
    """Mean squared error of each velocity, in numpy."""
    difference = given.velocity.detach().double() - (given.noise - given.clean).double()
    return difference.square().flatten(1).mean(1).numpy()


# ---- the loss before the first update --------------------------------------------------------------------------------


@pytest.mark.parametrize("beta", [1.0, 0.1])
def test_nft_starts_where_both_branches_are_one(runs: TinyRuns, beta: float, tmp_path: Path) -> None:
    run = runs.train(str(tmp_path / "run"), f"objective.options.beta={beta}", "num_iterations=2", "kl_coef=0.1")
    first, second = metrics(run)
    assert first["positive_error"] == first["negative_error"]
    assert first["loss"] == pytest.approx(5 / beta * first["positive_error"], rel=1e-6)
    assert first["optimality"] == pytest.approx(0.5, abs=1e-6)
    assert (first["old_kl"], first["kl"], first["velocity_norm_ratio"]) == (0, 0, 1)
    assert first["grad_norm"] > 0
    assert second["kl"] > 0
    assert second["loss"] == pytest.approx(second["policy_loss"] + 0.1 * second["kl"], rel=1e-6)
    assert second["loss"] != pytest.approx(5 / beta * second["positive_error"], rel=1e-9)  # they have parted


def test_the_first_gradient_of_nft_does_not_depend_on_beta(runs: TinyRuns, gradients: list[Tensor]) -> None:
    for beta in (1, 0.1):
        runs.train(f"beta-{beta}", f"objective.options.beta={beta}")
    torch.testing.assert_close(gradients[1], gradients[0], rtol=0, atol=1e-5 * float(gradients[0].abs().max()))


def test_awm_starts_at_minus_the_mean_advantage(runs: TinyRuns) -> None:
    row = metrics(runs.train("awm", *named("awm", "adv_clip_range=0.5"), runs.rewards(FIXED)))[0]
    expected = -float(advantages(VALUES, clip=0.5).mean()) / 5
    assert abs(expected) > 0.01
    assert row["loss"] == pytest.approx(expected, rel=1e-5)
    assert row["ratio_mean"] == 1
    assert row["advantage_abs"] == pytest.approx(float(np.abs(advantages(VALUES, clip=0.5)).mean()), rel=1e-6)
    assert row["grad_norm"] > 0


def test_crd_starts_at_the_variance_of_the_optimality(runs: TinyRuns) -> None:
    row = metrics(runs.train("crd", *named("crd"), runs.rewards(FIXED)))[0]
    r = advantages(VALUES) / 10 + 0.5
    assert row["implicit_reward"] == 0
    assert row["loss"] == pytest.approx(5 * float(r.var(1).mean()), rel=1e-5)


def test_dgpo_starts_with_an_open_gate_on_shared_noise(runs: TinyRuns, matched: list[Matched]) -> None:
    run = runs.train("dgpo", *named("dgpo", "micro_batch_size=4"), runs.rewards(FIXED))
    row, advantage = metrics(run)[0], advantages(VALUES)
    assert row["gate"] == 0.5
    assert (row["kl"], row["velocity_norm_ratio"]) == (0, 1)
    assert "old_kl" not in row
    assert len(matched) == 4  # two groups, two levels
    for given in matched:
        assert len(set(given.group.tolist())) == 1
        assert len(given.sigma.unique()) == 1
        assert bool((given.noise == given.noise[:1]).all())
        assert not bool((given.clean[0] == given.clean[1]).all())
    losses = [0.5 * advantage[int(given.group[0])] * errors(given) for given in matched]
    assert row["loss"] == pytest.approx(float(np.mean(losses)), rel=1e-5)
    assert not bool((matched[0].noise == matched[1].noise).all())  # each level has its own noise


@pytest.mark.parametrize("weights", ["raw", "softmax"])
def test_rwr_weighs_the_matching_error(runs: TinyRuns, weights: str, matched: list[Matched]) -> None:
    run = runs.train(f"rwr-{weights}", *named("rwr", f"objective.options.weights={weights}"), runs.rewards(FIXED))
    weight = np.array(VALUES)
    if weights == "softmax":
        exponential = np.exp(weight.reshape(2, 4))
        weight = (4 * exponential / exponential.sum(1, keepdims=True)).flatten()
    row = metrics(run)[0]
    assert row["loss"] == pytest.approx(float(np.mean([weight * errors(given) for given in matched])), rel=1e-5)
    assert row["weight"] == pytest.approx(float(weight.mean()), rel=1e-6)
    assert all(given.old is None and given.reference is None for given in matched)


def test_rft_trains_the_best_images_alone(runs: TinyRuns, matched: list[Matched]) -> None:
    run = runs.train("rft", *named("rft", "micro_batch_size=2"), runs.rewards(FIXED))
    assert [given.reward.tolist() for given in matched] == [[7.0, 3.0]] * 2 + [[3.0]] * 2  # refilled micro-batches
    row = metrics(run)[0]
    assert row["live_rows"] == 6
    assert row["loss"] == pytest.approx(float(np.concatenate([errors(given) for given in matched]).mean()), rel=1e-6)


def test_rft_divides_by_its_best_images_or_by_all(runs: TinyRuns, gradients: list[Tensor]) -> None:
    """Three of eight are the best of their prompts."""
    runs.train("rft-best", *named("rft"), runs.rewards(FIXED))
    runs.train("rft-all", *named("rft"), runs.rewards(FIXED), "loss_denominator=all")
    best, every = gradients
    torch.testing.assert_close(every, best * 3 / 8, rtol=0, atol=1e-6 * float(best.abs().max()))


def test_the_best_and_the_worst_of_each_group_alone_can_be_trained(runs: TinyRuns, matched: list[Matched]) -> None:
    """Advantages come from all images; middling ones are left out after."""

    def rows() -> dict[tuple[int, float], float]:
        return {
            (int(group), float(reward)): float(advantage)
            for given in matched
            for group, reward, advantage in zip(given.group, given.reward, given.advantage, strict=True)
        }

    runs.train("every", runs.rewards(FIXED), "micro_batch_size=8")
    every = rows()
    matched.clear()
    run = runs.train("extremes", runs.rewards(FIXED), "best_of=2", "micro_batch_size=2")
    assert rows() == pytest.approx({key: every[key] for key in ((0, 0.0), (0, 7.0), (1, 0.0), (1, 3.0))})
    assert metrics(run)[0]["live_rows"] == 2 * 2 * 2  # groups, images, levels


# ---- what is noised, and with which networks -------------------------------------------------------------------------


def test_levels_come_from_the_schedule_and_differ_between_images(runs: TinyRuns, matched: list[Matched]) -> None:
    runs.train("levels", "times.count=3", "num_iterations=2")
    sigmas = torch.stack([given.sigma for given in matched[:3]], 1)
    assert bool((sigmas.sort(1).values == sigmas[0].sort().values).all())  # each image sees all three, in its own order
    assert len({tuple(row) for row in sigmas.tolist()}) > 1
    noises = torch.cat([given.noise for given in matched]).flatten(1)
    assert len(noises.unique(dim=0)) == len(noises) == 48


def test_levels_may_be_drawn_beside_the_schedule(runs: TinyRuns, matched: list[Matched]) -> None:
    runs.train("continuous", *named("crd"), "times.kind=logit_normal", "times.count=5")
    sigma = torch.stack([given.sigma for given in matched])
    assert len(sigma.unique()) == 10  # crd compares the images of a group: they share five levels
    assert bool(((sigma >= 0.01) & (sigma < 1)).all())


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ((), {"rollout": 24, "reference": 16, "update": 16, "backward": 16}),
        (("kl_coef=0.1",), {"rollout": 24, "reference": 32, "update": 16, "backward": 16}),
        (named("awm"), {"rollout": 24, "update": 16, "backward": 16}),
        (("sampler.guidance_scale=3",), {"rollout": 48, "reference": 32, "update": 32, "backward": 32}),
        (
            (*named("dgpo"), "sampler.guidance_scale=3", "objective.options={guidance_scale: 1, clip: 0.0}"),
            {"rollout": 48, "reference": 32, "update": 16, "backward": 16},
        ),
        (
            (*named("dgpo"), "objective.options.reference_guidance_scale=4.5"),
            {"rollout": 24, "reference": 32, "update": 16, "backward": 16},
        ),
    ],
    ids=["nft", "nft with kl", "awm", "guided", "dgpo without guidance", "dgpo with guided reference"],
)
def test_evaluations_are_those_of_the_method(
    runs: TinyRuns, overrides: tuple[str, ...], expected: dict[str, int], tmp_path: Path
) -> None:
    row = metrics(runs.train(str(tmp_path / "run"), *overrides))[0]
    counted = {key.removeprefix("nfe/"): value for key, value in row.items() if key.startswith("nfe/")}
    assert counted == expected | {"total": sum(expected.values())}


def test_solver_and_rewards_of_several_are_read(runs: TinyRuns, matched: list[Matched]) -> None:
    file = runs.folder / "two.py"
    file.write_text(TWO)
    members = [f"{{file: {file}, function: {name}, weight: {w}}}" for name, w in (("bright", 1), ("red", 2))]
    each = ("sampler.num_steps=4", f"rewards=[{', '.join(members)}]", "reward_aggregation=each", "num_iterations=1")
    first, second = (metrics(runs.train(s, *each, f"sampler.solver={s}"))[0] for s in ("euler", "dpm2"))
    assert first["reward"] != second["reward"]
    clean, given = matched[0].clean, matched[0].advantage
    assert not bool((clean == matched[-1].clean).all())
    assert given.shape == (8,)
    expected = first["reward/bright"] + 2 * first["reward/red"]
    assert first["reward"] == pytest.approx(expected, rel=1e-6)
    assert float(given.abs().max()) > 1.8  # z of one plus twice z of the other


# ---- images of files ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An image for each of the toy's prompts."""
    write_pairs(folder := tmp_path_factory.mktemp("shown") / "images")
    return folder


def sft(shown: Path, *overrides: str) -> tuple[str, ...]:
    return named("sft", f"objective.options.images={shown}", *overrides)


def test_sft_trains_on_the_images_of_a_file_and_samples_nothing(
    runs: TinyRuns, shown: Path, matched: list[Matched], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(forward, "sample", lambda *_: pytest.fail("images were sampled"))
    told, encode = list[str](), toy_pipeline.Toy.encode

    def noted(self: Any, prompts: Sequence[str], sources: Any = None) -> Any:
        told.extend(filter(None, prompts))
        return encode(self, prompts, sources)

    monkeypatch.setattr(toy_pipeline.Toy, "encode", noted)
    row = metrics(runs.train(str(tmp_path / "run"), *sft(shown, "micro_batch_size=4")))[0]
    assert "reward" not in row
    assert row.get("nfe/rollout", 0) == 0
    assert row["images"] == 0
    assert row["live_rows"] == 16  # eight images, two levels
    assert row["grad_norm"] > 0
    assert row["loss"] == row["error"] == pytest.approx(float(np.mean([errors(given) for given in matched])), rel=1e-6)
    records = {one.prompt: one for one in read_shown(shown)}
    latents = torch.logit(load_images([records[prompt].image for prompt in told[-8:]]))
    assert torch.equal(torch.cat([matched[0].clean, matched[2].clean]), latents)  # each image beside its own prompt
    assert Counter(told[-8:]) == dict.fromkeys(records, 2)  # two passes over the file
    assert all(given.old is None and given.reference is None for given in matched)
    assert len({float(sigma) for given in matched for sigma in given.sigma}) > 2


def test_sft_lowers_its_error_and_a_resumed_run_is_the_same_to_the_bit(
    runs: TinyRuns, shown: Path, tmp_path: Path
) -> None:
    whole = runs.train(str(tmp_path / "whole"), *sft(shown, "num_iterations=12", "times.count=3", "optim.lr=0.05"))
    rows = metrics(whole)
    assert np.mean([row["error"] for row in rows[-3:]]) < 0.9 * np.mean([row["error"] for row in rows[:3]])
    part = runs.train(str(tmp_path / "part"), *sft(shown, "num_iterations=5", "times.count=3", "optim.lr=0.05"))
    assert main(["train", f"resume={part}", "num_iterations=12"]) == 0
    assert lora(part) == lora(whole)


def test_processes_share_the_images_of_an_iteration(runs: TinyRuns, shown: Path) -> None:
    config, records = load_config(runs.config, ["recipe=forward", *sft(shown)]), read_shown(shown)
    prompts = RunPrompts(train=(), more=tuple(Prompt(text=one.prompt, metadata={}) for one in records))

    def drawn(run: Any) -> tuple[list[Prompt], Images]:
        batch, images = forward.images_of_files(Loop(resolve(config, prompts), run), records, 1)
        assert batch.group.tolist() == list(batch.own) == batch.asked.groups.tolist()
        return batch.asked.prompts_of(images.group), images

    (whole, images), parts = drawn(QuickRun(Path())), on_threads(2, Path(), drawn)
    assert [prompt for own, _ in parts for prompt in own] == whole
    assert torch.equal(torch.cat([own.clean for _, own in parts]), images.clean)


def test_files_of_images_are_read_and_bad_ones_refused(shown: Path) -> None:
    found = read_shown(shown)
    assert found == read_shown(shown / "images.jsonl")
    assert [one.prompt for one in found] == toy_pipeline.PROMPTS
    for line, message in (
        ("", 'holds no images: write one {"prompt": ..., "image": ...} per line'),
        ("[]", "line 1: needs an object with prompt and image"),
        ('{"prompt": "a"}', "what is wrong: image"),
        ('{"prompt": "a", "image": "none.png"}', "there is no image"),
    ):
        (shown / "bad.jsonl").write_text(line)
        with pytest.raises(ValueError, match=re.escape(message)):
            read_shown(shown / "bad.jsonl")
    with pytest.raises(ValueError, match="a folder that holds images"):
        read_shown(shown / "bad.csv")


# ---- copies of the policy --------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_old_policy_follows_by_its_schedule(runs: TinyRuns, start: dict[str, Tensor]) -> None:
    for name, decays in (("linear", (0.001, 0.002)), ("copy", (0, 0)), ("constant", (0.7, 0.7))):
        old, settings = start, (f"slots.old_decay={name}", "slots.old_decay_value=0.7", "num_iterations=2")
        run = runs.train(f"slot-{name}", *settings, "keep_checkpoints=2")
        assert [row["old_decay"] for row in metrics(run)] == pytest.approx(decays)
        for number, decay in zip((1, 2), decays, strict=True):
            saved = state(run, number)
            old = {key: decay * old[key] + (1 - decay) * saved["policy"][key] for key in old}
            assert differences(saved["slots"]["old"], old) <= 1e-6
        assert differences(old, start) > 1e-3


def test_crd_keeps_two_copies(runs: TinyRuns, start: dict[str, Tensor]) -> None:
    saved = state(runs.train("copies", *named("crd"), "slots.old_decay=constant", "slots.old_decay_value=1"))
    assert differences(saved["slots"]["sampling"], saved["policy"]) == 0
    assert differences(saved["slots"]["old"], start) == 0
    assert differences(saved["slots"]["old"], saved["policy"]) > 1e-3


@pytest.mark.parametrize(
    ("overrides", "still"),
    [(named("nft"), True), (named("awm", "objective.options.off_policy=true"), True), (named("crd"), False),
     (named("awm", "objective.options.old_kl_coef=1"), False)],
    ids=["nft", "awm off policy", "crd", "awm"],
)  # fmt: skip
def test_who_samples(runs: TinyRuns, overrides: tuple[str, ...], still: bool, tmp_path: Path) -> None:
    """With an old policy that never moves, methods which sample from it see the first policy's images for ever."""
    frozen = ("slots.old_decay=constant", "slots.old_decay_value=1", "num_iterations=2")
    moving, resting = (
        metrics(runs.train(str(tmp_path / f"lr-{lr}"), *overrides, *frozen, f"optim.lr={lr}")) for lr in (0.1, 0)
    )
    assert moving[0]["reward"] == resting[0]["reward"]
    assert (moving[1]["reward"] == resting[1]["reward"]) == still
    assert moving[1]["old_kl"] > 0


def test_the_proximal_term_is_part_of_the_loss(runs: TinyRuns) -> None:
    settings = ("objective.options.old_kl_coef=2", "slots.old_decay=constant", "num_iterations=2", "optim.lr=0.1")
    row = metrics(runs.train("proximal", *named("awm"), *settings))[1]
    assert row["loss"] - row["policy_loss"] == pytest.approx(2 * row["old_kl"], rel=1e-4)


# ---- sums, parts, failures, resume -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["nft", "dgpo", "rft"])
def test_micro_batches_add_up_to_the_gradient_of_one(runs: TinyRuns, name: str, gradients: list[Tensor]) -> None:
    for size in (8, 4):
        runs.train(f"micro-{name}-{size}", *named(name), f"micro_batch_size={size}", "rollout_batch_size=8")
    whole, part = gradients
    assert float(whole.abs().max()) > 0
    torch.testing.assert_close(part, whole, rtol=0, atol=2e-6 * float(whole.abs().max()) + 1e-9)


@pytest.mark.parametrize("name", SAMPLING)
def test_two_updates_and_a_failed_image(runs: TinyRuns, name: str, matched: list[Matched], tmp_path: Path) -> None:
    run = runs.train(str(tmp_path / "run"), *named(name), runs.rewards(FAILED), "updates_per_rollout=2")
    row = metrics(run)[0]
    assert state(run)["counters"]["updates"] == 2
    assert row["invalid_ratio"] == 0.125
    assert row["live_rows"] == (4 if name == "rft" else 14)
    assert row["grad_norm"] > 0
    assert all(bool(given.reward.isfinite().all()) for given in matched)
    groups = [set(given.group.tolist()) for given in matched]
    assert groups == [{0}, {0}, {1}, {1}]


def test_dgpo_with_clip_and_a_moved_policy(runs: TinyRuns) -> None:
    row = metrics(runs.train("clip", *named("dgpo"), "objective.options.clip=0.0", "updates_per_rollout=2"))[0]
    assert 0 < row["clip_fraction"] < 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    [("policy.ema_decay=0.9", "updates_per_rollout=2"), named("crd"), named("dgpo", "objective.options.clip=0.01")],
    ids=["nft", "crd", "dgpo"],
)
def test_a_resumed_run_is_the_same_to_the_bit(runs: TinyRuns, overrides: tuple[str, ...], tmp_path: Path) -> None:
    whole = runs.train(str(tmp_path / "whole"), *overrides, "num_iterations=3")
    part = runs.train(str(tmp_path / "part"), *overrides, "num_iterations=1")
    assert main(["train", f"resume={part}", "num_iterations=3"]) == 0
    assert metrics(part) == metrics(whole)
    assert lora(part) == lora(whole)
    assert differences(lasting(part), lasting(whole)) == 0
    assert any(float(tensor.abs().max()) > 0 for name, tensor in lora_tensors(part).items() if "lora_B" in name)


# ---- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (named("ntf"), "unknown objective of recipe forward 'ntf' (did you mean 'nft'?)"),
        (("objective.options.betta=1",), "unknown option 'betta' (did you mean 'beta'?)"),
        (("objective.options.guidance=1",), "did you mean 'guidance_scale'?"),
        (("objective.options.adaptive=1",), "adaptive must be true or false, got 1"),
        (("objective.options.beta=-1",), "option beta must be above 0, got -1"),
        (named("rwr", "objective.options.temperature=0"), "option temperature must be above 0, got 0"),
        (("objective.options.old_kl_coef=-1",), "old_kl_coef must not be negative"),
        (("objective.options.reference_guidance_scale=4",), "no reference is evaluated: set kl_coef above 0"),
        (("sampler.kernel=cps",), "set sampler.kernel=ode"),
        (("clip_range=1e-3",), "clip_range is set to 0.001, but objective nft of recipe forward does not read it"),
        (named("dgpo", "best_of=2"), "best_of is set to 2, but objective dgpo of recipe forward does not read it"),
        (("loss_denominator=all",), "loss_denominator is set to 'all', but objective nft"),
        (named("rft", "slots.old_decay=copy"), "slots.old_decay is set to 'copy', but objective rft"),
        (named("rwr", "adv_std=global"), "adv_std is set to 'global', but objective rwr"),
        (("times.kind=logit_normal", "times.fraction=0.5"), "times.fraction is set to 0.5"),
        (("times.count=4",), "4 different steps cannot be taken of the first 3 of the schedule"),
        (("times.count=3", "times.fraction=0.7"), "of the first 2 of the schedule: lower times.count, or raise times."),
        (("times.kind=discrete", "times.fraction=0"), "times.fraction is the share of the schedule"),
        (("times.kind=discrete_wo_init", "times.fraction=0.4"), "raise times.fraction or the number of steps"),
        (("reward_aggregation=each",), "needs two rewards of nonzero weight"),
        (named("sft"), "required key 'images' is missing"),
        (named("sft", "objective.options.images=none"), "there is no 'none'"),
        (
            named("sft", "objective.options.images=SHOWN", "adv_std=global"),
            "adv_std is set to 'global', but objective sft",
        ),
        (named("sft", "objective.options.images=SHOWN", "sampler.solver=dpm2"), "sampler.solver is set to 'dpm2'"),
        (named("sft", "objective.options.images=SHOWN", "workers.rollouts=1"), "reads its images from files"),
        (named("dgpo", "micro_batch_size=2"), "micro_batch_size (2) must be a multiple of group_size (4)"),
        (named("crd", "prompts_per_step=1", "updates_per_rollout=2"), "make prompts_per_step a multiple of 2"),
    ],
    ids=lambda given: given[-1] if isinstance(given, tuple) else "",
)
def test_refused_before_a_model_loads(
    runs: TinyRuns, overrides: tuple[str, ...], said: str, shown: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    def load(*arguments: Any, **options: Any) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(toy_pipeline, "load", load)
    capsys.readouterr()
    overrides = tuple(text.replace("SHOWN", str(shown)) for text in overrides)
    assert main(["train", str(runs.config), f"out={tmp_path / 'run'}", *overrides]) == 1
    assert said in re.sub(r"\s+", " ", capsys.readouterr().err)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", SAMPLING)
def test_the_shipped_configuration_is_accepted(name: str) -> None:
    config = load_config(find_config(f"tiny_{name}"))
    check(config)
    assert config.recipe == "forward"
    assert config.objective.name == name
