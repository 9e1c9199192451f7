"""Whole runs that train all weights: exact ratios, resuming, what stock diffusers draws with them, what reads them."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline
from family_sampling import start_noise
from PIL import Image
from rounding import assert_same_sum
from tiny_models import PROMPTS, load_tiny, sample_ode
from tiny_runs import TinyRuns, differences, lasting, metrics, state, tiny_runs

from flowrl.cli import main
from flowrl.comparing.measure import measure
from flowrl.generation.models import check_source, find_source, fingerprint, load_source
from flowrl.pipelines.shared.family_pipeline import FamilyPipeline
from flowrl.pipelines.shared.saved_model import put_back
from flowrl.pipelines.weights.full_weights import FullWeights
from flowrl.pretraining.tiny_sd3 import CONTEXT
from flowrl.training.watchdog import keep_good, put_back_good

FULL = {"train": "full"}
SHORT = ("num_iterations=1", "prompts_per_step=2", "group_size=2", "eval_every=0", "threads=1", "progress=false")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, tiny_sd3_folder: Path) -> TinyRuns:
    folder = tmp_path_factory.mktemp("full")
    (folder / "held_out.txt").write_text("two red circles\na blue star\n")
    return tiny_runs(
        folder, tiny_sd3_folder, policy={**FULL, "ema_decay": 0.5}, optim={"lr": 1e-3}, kl_coef=0.1, kl_reference=2,
        eval_every=2, prompts={"train": str(folder / "prompts.txt"), "eval": str(folder / "held_out.txt")},
        eval={"ema": False},
    )  # fmt: skip


@pytest.fixture(scope="module")
def whole(runs: TinyRuns) -> Path:
    """Four iterations in one go, in bfloat16."""
    return runs.train("whole", "num_iterations=4", "pipeline.dtype=bfloat16")


@pytest.fixture(scope="module")
def exact(runs: TinyRuns) -> Path:
    """Two iterations in float32."""
    return runs.train("exact")


def weights(run: Path) -> bytes:
    """The trained network's file; it holds no metadata that could be in another order."""
    return (run / "model" / "transformer" / "diffusion_pytorch_model.safetensors").read_bytes()


@pytest.mark.slow
def test_the_ratio_is_exactly_one_and_weights_move(whole: Path, exact: Path, tiny_sd3_folder: Path) -> None:
    for run in (whole, exact):
        trained = [row for row in metrics(run) if "loss" in row]
        assert [row["ratio_first_deviation"] for row in trained] == [0.0] * len(trained)
        assert all(row["grad_norm"] > 0 for row in trained)
        distances = [row["eval/kl"] for row in metrics(run) if "eval/kl" in row]
        assert distances[0] == 0 < distances[1]  # from the model before training


def test_the_reference_is_the_copy_of_every_second_iteration(whole: Path) -> None:
    """One update an iteration: the KL at an iteration that takes a copy is to the very same weights."""
    found = [row["kl"] for row in metrics(whole) if "loss" in row]
    assert (found[0], found[2]) == (0.0, 0.0)
    assert min(found[1], found[3]) > 0


@pytest.mark.slow
def test_a_run_that_is_continued_is_the_run_that_was_never_stopped(runs: TinyRuns, whole: Path) -> None:
    """Masters, moments, the average and the copy that the KL is taken to; stopped where no copy is taken."""
    run = runs.train("halves", "num_iterations=3", "pipeline.dtype=bfloat16", "eval_every=3")
    assert main(["train", f"resume={run}", "num_iterations=4"]) == 0
    trained = [[row for row in metrics(one) if "loss" in row] for one in (run, whole)]
    assert trained[0] == trained[1]
    found, expected = (lasting(one) for one in (run, whole))
    assert found["slots"].keys() == {"ema", "copy"}
    assert differences(*({key: one[key] for key in ("policy", "slots", "optimizer")} for one in (found, expected))) == 0
    assert weights(run) == weights(whole)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_stock_diffusers_draws_what_the_trained_network_draws(
    whole: Path, exact: Path, tiny_sd3_folder: Path, dtype: str
) -> None:
    """From the checkpoint's masters in the pipeline that trains, and from `RUN/model` by `from_pretrained`."""
    run, kind = (exact, torch.float32) if dtype == "float32" else (whole, torch.bfloat16)
    pipeline = load_tiny(tiny_sd3_folder, kind)
    before = sample_ode(pipeline, PROMPTS[:2], 4.5, 4)
    policy = FullWeights(pipeline.denoiser)
    policy.load(state(run)["policy"])
    shipped = DiffusionPipeline.from_pretrained(run / "model", dtype={"default": kind, "vae": torch.float32})
    network, trained = shipped.transformer.state_dict(), pipeline.denoiser.state_dict()
    assert network.keys() == trained.keys()
    assert all(torch.equal(network[name], trained[name]) for name in network)
    final = sample_ode(pipeline, PROMPTS[:2], 4.5, 4)
    assert float((final - before).abs().max()) > 1e-4
    if dtype == "float32":
        shipped.set_progress_bar_config(disable=True)
        images = shipped(
            prompt=PROMPTS[:2], negative_prompt=[""] * 2, latents=start_noise(pipeline, 2), guidance_scale=4.5,
            num_inference_steps=4, max_sequence_length=CONTEXT, output_type="pt",
        ).images  # fmt: skip
        # the weights are equal bit for bit; stock decodes in another memory layout and guides in another order
        assert_same_sum(pipeline.decode(final), images)


def test_the_average_is_shipped_where_it_is_evaluated(runs: TinyRuns) -> None:
    run = runs.train("average", "eval.ema=true", "num_iterations=1", "eval_every=0")
    shipped = DiffusionPipeline.from_pretrained(run / "model").transformer.state_dict()
    saved = state(run)
    for name, tensor in saved["slots"]["ema"].items():
        assert torch.equal(shipped[name], tensor)
    assert differences(saved["slots"]["ema"], saved["policy"]) > 0


# ---- what reads such a run -------------------------------------------------------------------------------------------


def test_commands_read_the_run(exact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def drawn(name: str, *more: str) -> np.ndarray:
        out = tmp_path / name
        assert main(["sample", *more, "--prompt", "two blue squares", "--out", str(out)]) == 0
        return np.asarray(Image.open(out / "000_seed0.png"))

    tuned = drawn("run", str(exact))
    assert np.array_equal(drawn("folder", str(exact / "model")), tuned)
    assert not np.array_equal(drawn("before", str(exact), "--before-training"), tuned)
    capsys.readouterr()
    for command in (["sample", str(exact), "--rlg", "1.5", "--prompt", "x"], ["sweep", str(exact)]):
        assert main([*command, "--out", str(tmp_path / "refused")]) == 1
        assert "trained all weights" in capsys.readouterr().err


def test_the_source_of_a_run_is_its_model_and_knows_where_it_came_from(exact: Path, tiny_sd3_folder: Path) -> None:
    source = find_source(str(exact))
    assert (source.model, source.lora, source.trained_from) == (str(exact / "model"), None, str(tiny_sd3_folder))
    assert source.tuned
    check_source(source)
    before = find_source(str(exact), base=True)
    assert before == source.before_training()
    assert (before.model, before.tuned) == (str(tiny_sd3_folder), False)
    assert fingerprint(before) != fingerprint(source)
    assert load_source(source, "cpu").model == str(exact / "model")


def test_a_comparison_measures_it(exact: Path) -> None:
    found = measure(exact, base=True)
    last = [row["eval/kl"] for row in metrics(exact) if "eval/kl" in row][-1]
    assert found["kl"] == pytest.approx(last, rel=1e-5)
    assert found["diversity"] != found["base_diversity"]


@pytest.mark.slow
def test_a_comparison_embeds_before_the_network_comes_where_the_run_does(
    exact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy, seen = tmp_path / "copy", list[bool]()
    shutil.copytree(exact, copy)
    (copy / "measure.json").unlink(missing_ok=True)
    written = (copy / "config.yaml").read_text()
    (copy / "config.yaml").write_text(written.replace("free_text_encoders: false", "free_text_encoders: true"))
    stock = FamilyPipeline.load_denoiser

    def load_denoiser(pipeline: FamilyPipeline) -> None:
        seen.append(pipeline.pipe.text_encoder is None)
        stock(pipeline)

    monkeypatch.setattr(FamilyPipeline, "load_denoiser", load_denoiser)
    assert measure(copy) == {key: value for key, value in measure(exact).items() if key != "base_diversity"}
    assert seen[0] is True


def test_page_and_last_words_say_how_it_is_loaded(runs: TinyRuns, capsys: pytest.CaptureFixture[str]) -> None:
    run = runs.train("words", "num_iterations=1", "eval_every=0")
    shown = capsys.readouterr().out
    assert f"Model     {run / 'model'}  (DiffusionPipeline.from_pretrained)" in shown
    assert "LoRA" not in shown
    page = (run / "report.html").read_text()
    assert "DiffusionPipeline.from_pretrained(" in page
    assert "load_lora_weights" not in page


# ---- files -----------------------------------------------------------------------------------------------------------


def test_what_a_kill_leaves_is_put_in_order(tmp_path: Path) -> None:
    """Between the two renames of a save the old folder has another name; anything half-written goes."""
    model = tmp_path / "model"
    for name in (".model.aside", ".model.writing"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model_index.json").write_text(name)
    put_back(model)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert (model / "model_index.json").read_text() == ".model.aside"
    (tmp_path / ".model.aside").mkdir()
    put_back(model)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_the_last_good_model_comes_back(tmp_path: Path) -> None:
    model = tmp_path / "model"
    (model / "transformer").mkdir(parents=True)
    (model / "transformer" / "weights").write_text("good")
    (tmp_path / "elsewhere").write_text("frozen")
    (model / "encoder").symlink_to(tmp_path / "elsewhere")
    keep_good(tmp_path)
    (model / "transformer" / "weights").unlink()
    (model / "transformer" / "weights").write_text("bad")
    put_back_good(tmp_path)
    assert (model / "transformer" / "weights").read_text() == "good"
    assert (model / "encoder").is_symlink()
    assert not (tmp_path / "model.diverged").exists()


def test_frozen_parts_are_linked_where_they_are_large(
    runs: TinyRuns, exact: Path, tiny_sd3_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flowrl.pipelines.shared.saved_model.SMALL", 0)
    run = runs.train("linked", "num_iterations=1", "eval_every=0")
    part = Path("vae") / "diffusion_pytorch_model.safetensors"
    assert os.path.samefile(run / "model" / part, tiny_sd3_folder / part)
    assert not os.path.samefile(exact / "model" / part, tiny_sd3_folder / part)  # a copy, which stands by itself
    assert (run / "model" / part).read_bytes() == (exact / "model" / part).read_bytes()


# ---- recipes ---------------------------------------------------------------------------------------------------------


RECIPES = {
    "nft": ("recipe=forward", "sampler.kernel=ode", "times.count=2", "kl_reference=1"),
    "dgpo": ("recipe=forward", "sampler.kernel=ode", "times.count=2", "objective.name=dgpo", "kl_reference=base"),
    "dpo": ("recipe=preference", "sampler.kernel=ode", "times.count=2", "kl_coef=0", "kl_reference=base"),
}


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_trains_all_weights(runs: TinyRuns, name: str) -> None:
    run = runs.train(name, "num_iterations=2", "eval_every=0", *RECIPES[name])
    rows, saved = metrics(run), state(run)
    assert all(row["grad_norm"] > 0 for row in rows)
    if name == "nft":  # the KL is to the policy at the iteration's start, and there is one update
        assert [row["kl"] for row in rows] == [0.0, 0.0]
        assert saved["slots"].keys() == {"ema", "old", "copy"}
    if name == "dgpo":
        assert rows[0]["kl"] == 0 < rows[1]["kl"]


@pytest.mark.slow
def test_gradients_of_rewards_reach_all_weights(tmp_path: Path) -> None:
    run = tmp_path / "run"
    full = ("policy.train=full", "policy.lora_rank=null", "optim.lr=1e-4")
    assert main(["train", "tiny_draft", f"out={run}", *full, *SHORT]) == 0
    assert metrics(run)[0]["grad_norm"] > 0
    assert json.loads((run / "model" / "model_index.json").read_text())["_class_name"] == "StableDiffusion3Pipeline"
