"""Recipe preference end to end: online and offline DPO, D3PO, and the reader of pairs."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import toy_pipeline
from family_sampling import start_noise
from PIL import Image
from recorded_gradients import recorded_gradients
from rounding import assert_same_sum
from tiny_models import load_tiny
from tiny_runs import PROMPTS, TinyRuns, differences, lasting, lora, lora_tensors, metrics, state, tiny_runs
from torch import Tensor
from toy_pipeline import toy_runs, write_pairs

from flowrl.cli import main
from flowrl.pipelines import PIPELINES
from flowrl.prompts.pairs import load_images, read_pairs
from flowrl.world.scenes import draw_scene, random_scene

pytestmark = pytest.mark.usefixtures("numbers_alone")

FAMILY = PIPELINES["sd3"]
ONLINE = ("recipe=preference", "sampler.kernel=ode", "times.count=2")
D3PO = ("recipe=preference", "objective.name=d3po", "same_latent=true", "group_size=2")
LOG_2 = math.log(2)
SOMETIMES = """
import torch
from flowrl.rewards import RewardOutput

def reward(inputs):
    values = 100 * inputs.images.mean((1, 2, 3))
    valid = inputs.sample_ids % 4 != 1
    return RewardOutput(values=torch.where(valid, values, torch.nan), valid=valid)
"""
EQUAL_FOR = """
def reward(images, prompts, metadata):
    values = 100 * images.mean((1, 2, 3))
    return [7.0 if prompt in EQUAL else float(value) for prompt, value in zip(prompts, values)]
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinyRuns]:
    yield from toy_runs(tmp_path_factory.mktemp("preference"))


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pair for each of the toy's prompts."""
    write_pairs(folder := tmp_path_factory.mktemp("toy") / "pairs")
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four pairs of drawn scenes: one that shows its prompt, one that shows another colour."""
    folder = tmp_path_factory.mktemp("pairs")
    rng, rows = np.random.default_rng(0), []
    for number, color in enumerate(("red", "yellow", "green", "blue")):
        for kind, shown in (("winner", color), ("loser", "blue" if color == "red" else "red")):
            scene = random_scene({"include": [{"class": "circle", "count": 1, "color": shown}]}, rng)
            Image.fromarray(draw_scene(scene)).save(folder / f"{kind}_{number}.png")
        rows.append({"prompt": f"a photo of a {color} circle", "winner": f"winner_{number}.png",
                     "loser": f"loser_{number}.png"})  # fmt: skip
    (folder / "pairs.jsonl").write_text("\n".join(json.dumps(row) for row in rows) + "\n\n")
    return folder


@pytest.fixture
def gradients(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The gradient of every optimizer update, as one vector."""
    return recorded_gradients(monkeypatch)


def offline(folder: Path) -> tuple[str, ...]:
    return (*ONLINE, "objective.name=dpo_offline", f"objective.options.pairs={folder}", "group_size=2")


def same(a: Path, b: Path) -> None:
    assert metrics(a) == metrics(b)
    assert lora(a) == lora(b)
    assert differences(lasting(a), lasting(b)) == 0


# ---- online DPO ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_at_the_start_the_loss_is_log_2_and_the_gradient_is_not_zero(runs: TinyRuns) -> None:
    rows = metrics(runs.train("dpo", *ONLINE, "num_iterations=3"))
    first = rows[0]
    assert first["loss"] == pytest.approx(LOG_2, abs=1e-7)
    assert (first["margin"], first["implicit_accuracy"]) == (0, 0)
    assert first["grad_norm"] > 0
    assert all(row["pairs"] == 2 and row["live_rows"] == 4 and row["zero_std_ratio"] == 0 for row in rows)
    assert all(row["loss"] != first["loss"] for row in rows[1:])  # the policy has left its reference
    # rollout 8 images x 3 steps; update and reference 2 pairs x 2 images x 2 draws, each iteration
    assert [rows[-1][f"nfe/{kind}"] for kind in ("rollout", "reference", "update", "backward")] == [72, 24, 24, 24]


@pytest.mark.slow
def test_the_gradient_at_the_start_is_beta_over_4_times_that_of_the_errors(
    runs: TinyRuns, gradients: list[Tensor]
) -> None:
    """dL/de_w = beta / 4, dL/de_l = -beta / 4: linear in beta, and clipped by nothing before it is recorded."""
    for beta in (100, 300):
        runs.train(f"beta-{beta}", *ONLINE, "num_iterations=1", f"objective.options.beta={beta}")
    assert_same_sum(gradients[1], 3 * gradients[0])


@pytest.mark.slow
def test_micro_batches_and_rollout_batches_change_nothing_but_rounding(runs: TinyRuns, gradients: list[Tensor]) -> None:
    for sizes in (("8", "8"), ("2", "4")):
        runs.train(f"micro-{sizes[0]}", *ONLINE, f"micro_batch_size={sizes[0]}", f"rollout_batch_size={sizes[1]}",
                   "num_iterations=1")  # fmt: skip
    whole, parts = gradients
    torch.testing.assert_close(parts, whole, rtol=0, atol=1e-5 * float(whole.abs().max()))


def test_two_updates_split_the_groups(runs: TinyRuns, gradients: list[Tensor]) -> None:
    rows = metrics(runs.train("updates", *ONLINE, "updates_per_rollout=2", "num_iterations=1"))
    assert len(gradients) == 2
    assert rows[0]["live_rows"] == 4
    assert rows[0]["margin"] != 0  # the second update meets a policy that has moved


def test_groups_without_a_difference_have_no_pair_and_leave_the_others_alone(
    runs: TinyRuns, gradients: list[Tensor]
) -> None:
    reward = runs.rewards(EQUAL_FOR.replace("EQUAL", repr([PROMPTS[0], PROMPTS[1]])))
    four = ("prompts_per_step=4", "micro_batch_size=4", "num_iterations=1")
    row = metrics(runs.train("half-equal", *ONLINE, reward, *four))[0]
    assert (row["pairs"], row["zero_std_ratio"], row["live_rows"]) == (2, 0.5, 4)
    assert len(gradients) == 1
    none = runs.rewards(EQUAL_FOR.replace("EQUAL", repr(PROMPTS)))
    row = metrics(runs.train("all-equal", *ONLINE, none, *four))[0]
    assert (row["pairs"], row["zero_std_ratio"], row["live_rows"]) == (0, 1, 0)
    assert "grad_norm" not in row
    assert len(gradients) == 1


def test_images_whose_reward_failed_are_no_candidates(runs: TinyRuns) -> None:
    rows = metrics(runs.train("failed", *ONLINE, runs.rewards(SOMETIMES)))
    assert all(row["invalid_ratio"] == 0.25 and row["pairs"] == 2 and math.isfinite(row["reward"]) for row in rows)


@pytest.mark.slow
def test_a_resumed_run_is_the_run_that_was_never_stopped(runs: TinyRuns) -> None:
    method = (*ONLINE, "objective.options.ref_update_every=2")
    whole = runs.train("whole", *method, "num_iterations=4")
    run = runs.train("part", *method, "num_iterations=3")
    assert main(["train", f"resume={run}", "num_iterations=4"]) == 0
    same(run, whole)


@pytest.mark.slow
def test_the_reference_is_copied_from_the_policy_when_it_is_due(runs: TinyRuns) -> None:
    never = runs.train("never", *ONLINE, "num_iterations=2")
    old = state(never)["slots"]["old"]
    assert all(float(tensor.abs().max()) == 0 for name, tensor in old.items() if "lora_B" in name)
    due = runs.train("due", *ONLINE, "num_iterations=2", "objective.options.ref_update_every=2")
    assert differences(state(due)["slots"]["old"], state(due)["policy"]) == 0
    rows = metrics(runs.train("each", *ONLINE, "num_iterations=3", "objective.options.ref_update_every=1"))
    assert [row["loss"] for row in rows] == pytest.approx([LOG_2] * 3, abs=1e-7)


@pytest.mark.slow
def test_the_behaviour_decides_who_samples(runs: TinyRuns) -> None:
    """Passes over four prompts: iteration 2 meets the prompts of iteration 0 and 1 again, from other noise."""
    rows = {
        name: metrics(runs.train(f"by-{name}", *ONLINE, f"objective.options.behaviour={name}", "optim.lr=0.05"))
        for name in ("old", "policy")
    }
    frozen = metrics(runs.train("by-nobody", *ONLINE, "optim.lr=0"))
    assert [row["reward"] for row in rows["old"]] == [row["reward"] for row in frozen]
    assert rows["policy"][0]["reward"] == frozen[0]["reward"]
    assert rows["policy"][1]["reward"] != frozen[1]["reward"]


@pytest.mark.parametrize("kind", ["schedule", "discrete", "logit_normal", "uniform"])
def test_guided_training_and_every_rule_of_times(runs: TinyRuns, kind: str) -> None:
    run = runs.train(f"times-{kind}", *ONLINE, f"times.kind={kind}", "sampler.guidance_scale=3", "num_iterations=1")
    row = metrics(run)[0]
    assert row["loss"] == pytest.approx(LOG_2, abs=1e-7)
    assert row["nfe/update"] == 16  # 2 pairs x 2 images x 2 draws x 2 branches


# ---- pairs from files ------------------------------------------------------------------------------------------------


def test_offline_pairs_train_without_sampling_an_image(runs: TinyRuns, pairs: Path) -> None:
    run = runs.train("offline", *offline(pairs), "num_iterations=4", "optim.lr=0.003", "times.count=3",
                     "prompts_per_step=4", f"prompts.eval={runs.folder / 'prompts.txt'}", "eval_every=4")  # fmt: skip
    rows = metrics(run)
    before, *trained, after = rows
    assert "eval/reward/brightness" in before
    assert "eval/reward/brightness" in after
    assert trained[0]["loss"] == pytest.approx(LOG_2, abs=1e-7)
    assert trained[-1]["loss"] < LOG_2  # four pairs can be learned by heart
    assert trained[-1]["implicit_accuracy"] > 0.5
    assert all("reward" not in row and row["images"] == 0 and "nfe/rollout" not in row for row in trained)
    assert "reward" not in json.loads((run / "summary.json").read_text())


@pytest.mark.slow
def test_a_resumed_offline_run_is_the_run_that_was_never_stopped(runs: TinyRuns, pairs: Path) -> None:
    whole = runs.train("offline-whole", *offline(pairs), "num_iterations=4")
    run = runs.train("offline-part", *offline(pairs), "num_iterations=2")
    assert main(["train", f"resume={run}", "num_iterations=4"]) == 0
    same(run, whole)


@pytest.mark.slow
def test_swapping_winner_and_loser_turns_the_gradient_round(
    runs: TinyRuns, pairs: Path, gradients: list[Tensor]
) -> None:
    rows = [json.loads(line) for line in (pairs / "pairs.jsonl").read_text().split("\n") if line]
    swapped = [row | {"winner": row["loser"], "loser": row["winner"]} for row in rows]
    (pairs / "swapped.jsonl").write_text("\n".join(json.dumps(row) for row in swapped))
    for path in (pairs, pairs / "swapped.jsonl"):
        runs.train(f"swap-{path.name}", *offline(path), "num_iterations=1")
    assert float(gradients[0].norm()) > 0
    torch.testing.assert_close(gradients[1], -gradients[0], rtol=1e-4, atol=1e-6)  # float32 sums


def test_a_folder_of_pairs_is_read_with_its_images(folder: Path) -> None:
    pairs = read_pairs(folder)
    assert pairs == read_pairs(folder / "pairs.jsonl")
    assert [pair.prompt for pair in pairs][:2] == ["a photo of a red circle", "a photo of a yellow circle"]
    images = load_images([pairs[0].winner, pairs[0].loser])
    assert images.shape == (2, 3, 64, 64)
    assert images.dtype == torch.float32
    with Image.open(pairs[0].winner) as image:
        assert np.array_equal(np.rint(255 * images[0].permute(1, 2, 0).numpy()), np.asarray(image))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "holds no pair"),
        ("{", "line 1: not valid JSON"),
        ("[]", "line 1: .* prompt, winner, loser"),
        ('{"prompt": "a", "winner": "winner_0.png"}', "wrong: loser"),
        ('{"prompt": "a", "winner": "winner_0.png", "loser": "winner_0.png"}', "the same image"),
        ('{"prompt": "a", "winner": "winner_0.png", "loser": "none.png"}', r"no image .*none\.png"),
    ],
)
def test_bad_files_of_pairs_are_refused(folder: Path, line: str, message: str) -> None:
    (folder / "bad.jsonl").write_text(line)
    with pytest.raises(ValueError, match=message):
        read_pairs(folder / "bad.jsonl")
    with pytest.raises(ValueError, match="a folder that holds pairs"):
        read_pairs(folder / "bad.csv")


def test_bad_images_are_refused(folder: Path) -> None:
    Image.new("RGB", (32, 64)).save(folder / "narrow.png")
    with pytest.raises(ValueError, match=r"narrow\.png: its size differs .*\(64 x 64 and 32 x 64\)"):
        load_images([folder / "winner_0.png", folder / "narrow.png"])
    (folder / "text.png").write_text("no image")
    with pytest.raises(ValueError, match=r"text\.png is not an image"):
        load_images([folder / "text.png"])


def test_encoding_undoes_decoding_up_to_the_vae(tiny_sd3_folder: Path, folder: Path) -> None:
    pipeline = load_tiny(tiny_sd3_folder)
    images = load_images([folder / f"winner_{n}.png" for n in range(4)])
    latents = pipeline.encode_images(images)
    assert latents.shape == (4, *pipeline.latent_shape)
    assert latents.dtype == torch.float32
    assert torch.equal(latents, pipeline.encode_images(images))  # the mean, nothing drawn
    pipeline.pipe.vae.register_to_config(scaling_factor=2.0, shift_factor=0.5)
    torch.testing.assert_close(pipeline.encode_images(images), 2 * (latents - 0.5), atol=1e-5, rtol=0)
    with torch.no_grad():
        stock = pipeline.pipe.vae.decode(latents, return_dict=False)[0] / 2 + 0.5
    torch.testing.assert_close(pipeline.decode(pipeline.encode_images(images)), stock.clamp(0, 1), atol=1e-5, rtol=0)
    pipeline.options = replace(pipeline.options, vae_slice=2)
    torch.testing.assert_close(pipeline.encode_images(images), 2 * (latents - 0.5), atol=1e-5, rtol=0)


def test_images_of_another_size_are_refused(tiny_sd3_folder: Path) -> None:
    with pytest.raises(ValueError, match=r"\[b, 3, 64, 64\].*set pipeline\.height"):
        load_tiny(tiny_sd3_folder).encode_images(torch.zeros(1, 3, 32, 64))


def test_decoding_carries_gradient_only_when_asked(tiny_sd3_folder: Path) -> None:
    pipeline = load_tiny(tiny_sd3_folder)
    latents = start_noise(pipeline, 2).requires_grad_()
    assert not pipeline.decode(latents).requires_grad
    with torch.no_grad():  # what a caller set before is not what counts
        images = pipeline.decode(latents, gradient=True)
    assert torch.equal(images, pipeline.decode(latents))
    (gradient,) = torch.autograd.grad(images.mean(), latents)
    direction = gradient / gradient.norm()
    with torch.no_grad():
        ends = [float(pipeline.decode(latents + h * direction).double().mean()) for h in (0.1, -0.1)]
    assert (ends[0] - ends[1]) / 0.2 == pytest.approx(float(gradient.norm()), rel=2e-2)


# ---- D3PO ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_d3po_starts_at_log_2_and_trains_every_stochastic_step(runs: TinyRuns) -> None:
    rows = metrics(runs.train("d3po", *D3PO, "sampler.num_steps=4", "num_iterations=3", "micro_batch_size=2"))
    assert rows[0]["loss"] == pytest.approx(LOG_2, abs=1e-7)
    assert rows[0]["grad_norm"] > 0
    assert all(row["live_rows"] == 6 for row in rows)  # 2 pairs x 3 steps
    assert rows[1]["loss"] != rows[0]["loss"]
    assert rows[-1]["nfe/reference"] == 3 * 12


@pytest.mark.slow
def test_d3po_resumes_and_splits_updates(runs: TinyRuns) -> None:
    method = (*D3PO, "updates_per_rollout=2", "sampler.sde_window_size=1", "objective.options.ref_update_every=3")
    whole = runs.train("d3po-whole", *method, "num_iterations=4")
    run = runs.train("d3po-part", *method, "num_iterations=2")
    assert main(["train", f"resume={run}", "num_iterations=4"]) == 0
    same(run, whole)
    assert all(row["live_rows"] == 2 for row in metrics(whole))


# ---- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("objective.name=dpoo",), "unknown objective of recipe preference 'dpoo' (did you mean 'dpo'?)"),
        (("objective.options.bta=1",), "unknown key 'bta': did you mean 'beta'?"),
        (("objective.options.beta=0",), "beta must be above 0, got 0"),
        (("objective.options.ref_update_every=0",), "ref_update_every counts iterations from 1"),
        (("objective.options.behaviour=ema",), "behaviour must be one of old, policy, got 'ema'"),
        (("sampler.kernel=cps",), "sampler.kernel is cps: set sampler.kernel=ode, or objective.name=d3po"),
        (("kl_coef=0.1",), "kl_coef is set to 0.1, but objective dpo of recipe preference does not read it"),
        (("credit.method=vgpo",), "credit.method is set to 'vgpo'"),
        (("times.count=4",), "lower times.count"),
        (("times.kind=discrete", "times.fraction=0.1"), "raise times.fraction"),
        (("prompts_per_step=3", "updates_per_rollout=2"), "prompts_per_step (3) must be a multiple of"),
        (("micro_batch_size=1",), "micro_batch_size (1) counts images, and pairs have two"),
        (
            ("objective.name=d3po", "times.count=4", "same_latent=true"),
            "objective d3po needs one",
        ),
        (("objective.name=d3po", "times.count=4", "sampler.kernel=cps"), "set same_latent=true"),
        (("objective.name=dpo_offline",), "required key 'pairs' is missing"),
        (("objective.name=dpo_offline", "objective.options.pairs=none.jsonl"), "there is no 'none.jsonl'"),
    ],
)
def test_mistakes_are_refused_before_a_model_loads(
    runs: TinyRuns, overrides: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    def loads(*arguments: Any, **options: Any) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(toy_pipeline, "load", loads)
    assert main(["train", str(runs.config), f"out={runs.folder / 'refused'}", *ONLINE, *overrides]) == 1
    shown = capsys.readouterr().err
    assert message in re.sub(r"\s+", " ", shown)
    assert not (runs.folder / "refused").exists()


def test_offline_settings_that_do_not_fit_are_refused(
    runs: TinyRuns, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for overrides, message in (
        (("group_size=4",), "so group_size is 2, got 4"),
        (("same_latent=true",), "same_latent is set to True"),
    ):
        out = f"out={runs.folder / 'refused'}"
        assert main(["train", str(runs.config), out, *offline(folder), *overrides]) == 1
        assert message in re.sub(r"\s+", " ", capsys.readouterr().err)


@pytest.mark.slow
def test_prompts_of_pairs_are_encoded_before_the_text_encoders_are_freed(
    folder: Path, tiny_sd3_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(PIPELINES, "sd3", FAMILY)  # the toy has no encoders
    runs = tiny_runs(tmp_path, tiny_sd3_folder)
    free = runs.train("freed", *offline(folder), "pipeline.free_text_encoders=true")
    kept = runs.train("kept", *offline(folder))
    assert [row["loss"] for row in metrics(free)] == [row["loss"] for row in metrics(kept)]


def test_the_lora_that_is_shipped_is_the_policy(runs: TinyRuns) -> None:
    run = runs.train("shipped", *ONLINE)
    trained = state(run)["policy"]
    for name, tensor in lora_tensors(run).items():
        assert torch.equal(trained[name.removeprefix("transformer.").replace(".weight", ".default.weight")], tensor)
