"""`flowrl train` end to end: its files, its repeatability, and what a step of the recipe must and must not do."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from recorded_gradients import recorded_gradients
from safetensors import safe_open
from tiny_runs import PROMPTS, TinyRuns, lora, lora_tensors, metrics, state, tiny_runs
from torch import Tensor
from toy_pipeline import toy_runs

import flowrl.session.train as train_run
from flowrl.cli import main
from flowrl.prompts.loading import prompts_of_iteration


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, tiny_sd3_folder: Path) -> TinyRuns:
    return tiny_runs(tmp_path_factory.mktemp("train"), tiny_sd3_folder)


@pytest.fixture
def toys(tmp_path: Path) -> Iterator[TinyRuns]:
    """Of the toy, for what is not about the rounding of a network."""
    yield from toy_runs(tmp_path)


@pytest.fixture(scope="module")
def plain(runs: TinyRuns) -> Path:
    """Two iterations with the defaults."""
    return runs.train("plain")


@pytest.fixture
def gradients(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The gradient of every optimizer update, as one vector."""
    return recorded_gradients(monkeypatch)


def test_a_run_folder_holds_what_is_documented(runs: TinyRuns, capsys: pytest.CaptureFixture[str]) -> None:
    run = runs.train("evaluated", f"prompts.eval={runs.folder / 'prompts.txt'}", "eval_every=1", "eval.num_images=3")
    files = {str(path.relative_to(run)) for path in run.rglob("*") if path.is_file()}
    numbers = ("000000", "000001", "000002")
    assert files == {
        ".lock", "config.yaml", "manifest.json", "metrics.jsonl", "report.html", "summary.json",
        *(f"{folder}/pytorch_lora_weights.safetensors" for folder in ("lora", ".lora.good")), "samples/prompts.json",
        "samples/latest.png",
        *(f"checkpoints/{n}/{name}" for n in numbers[1:] for name in ("state.pt", "checkpoint.json")),
        *(f"eval/iteration_{n}.jsonl" for n in numbers), *(f"samples/iteration_{n}.png" for n in numbers),
        *(f"samples/iteration_{n}/000{k}.png" for n in numbers for k in range(3)),
    }  # fmt: skip
    rows = metrics(run)
    assert [(row["iteration"], "reward" in row) for row in rows] == [
        (0, False), (0, True), (1, False), (1, True), (2, False),
    ]  # fmt: skip
    assert all(row["eval/reward/brightness_low"] <= row["eval/reward/brightness"] for row in rows[::2])
    assert yaml.safe_load((run / "config.yaml").read_text())["eval_every"] == 1
    manifest = json.loads((run / "manifest.json").read_text())
    assert manifest["finished"] >= manifest["started"]
    assert manifest["num_processes"] == 1
    assert manifest["reproduces"] == {}, "brightness is nobody's published scorer"
    assert json.loads((run / "summary.json").read_text())["reward"]["last"] == rows[3]["reward"]
    shown = capsys.readouterr().out
    assert shown.count("4 of 4 evaluation prompts were also trained on.") == 2, "at the start and at the end"
    assert "Evaluation rewards, 4 samples" in shown
    assert manifest["eval_prompts"] == {"number": 4, "trained_on": 4}
    page = (run / "report.html").read_text()
    assert "4 of 4 evaluation prompts were also trained on" in page
    assert "eld-out" not in page
    assert str(run / "report.html") in shown
    short = shown.replace(str(run), "runs/tiny_grpo_geneval-1").replace(str(runs.folder), ".")
    assert max(len(line) for line in short.splitlines()[1:]) <= 80


@pytest.mark.slow
def test_a_run_continues_from_a_lora_at_the_rank_and_alpha_of_its_file(
    runs: TinyRuns, plain: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(runs.folder))
    start, run = f"policy.init_lora={plain / 'lora'}", runs.folder / "continued"
    settings = ("policy.lora_rank=null", "num_iterations=1", "optim.lr=0")
    assert main(["train", str(runs.config), "out=~/continued", start, *settings]) == 0
    assert f"flowrl report {run}" in (run / "report.html").read_text()
    assert main(["train", "resume=~/continued"]) == 0
    assert "is finished (1 of 1 iteration)" in capsys.readouterr().out
    assert {name: tensor.tolist() for name, tensor in lora_tensors(run).items()} == {
        name: tensor.tolist() for name, tensor in lora_tensors(plain).items()
    }
    for key, given, found in (("rank", 4, 2), ("alpha", 3, 4)):
        wrong = [start, f"policy.lora_{key}={given}", f"out={runs.folder / 'wrong'}"]
        assert main(["train", str(runs.config), *wrong]) == 1
        shown = capsys.readouterr().err
        assert f"policy.lora_{key} is {given}, and the LoRA in" in shown
        assert f"has {key} {found}: remove policy.lora_{key}" in shown


@pytest.mark.usefixtures("numbers_alone")
def test_a_seed_repeats_itself_byte_for_byte(runs: TinyRuns, plain: Path) -> None:
    again, other = runs.train("again"), runs.train("other", "seed=1")
    assert metrics(again) == metrics(plain)
    assert lora(again) == lora(plain)
    assert metrics(other)[0]["reward"] != metrics(plain)[0]["reward"]
    assert lora(other) != lora(plain)


def test_the_lora_is_what_was_trained_with_its_alpha(plain: Path) -> None:
    with safe_open(plain / "lora" / "pytorch_lora_weights.safetensors", framework="pt") as file:
        assert json.loads(file.metadata()["lora_adapter_metadata"])["transformer.lora_alpha"] == 4
    trained = state(plain)["policy"]
    saved = lora_tensors(plain)
    assert len(saved) == len(trained)
    for name, tensor in trained.items():
        assert torch.equal(saved["transformer." + name.replace(".default.", ".")], tensor)
    assert any(tensor.abs().max() > 0 for name, tensor in saved.items() if "lora_B" in name)


@pytest.mark.usefixtures("numbers_alone")
@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("micro_batch_size=2", "rollout_batch_size=4"),
        ("micro_batch_size=8", "rollout_batch_size=2"),
        ("updates_per_rollout=2", "micro_batch_size=2", "rollout_batch_size=2", "same_latent=true"),
        ("sampler.guidance_scale=3", "sampler.kernel=dance_sde", "sampler.grid=linspace"),
        ("sampler.guidance_scale=3", "sampler.train_negative=false", "kl_coef=0.1", "pipeline.dtype=bfloat16"),
        ("sampler.guidance_scale=3", "sampler.train_negative=recompute", "pipeline.gradient_checkpointing=true",
         "pipeline.free_text_encoders=true"),
        ("sampler.kernel=cps", "sampler.num_steps=5", "sampler.sde_window_size=2", "sampler.sde_window_range=[0, 4]"),
    ],
    ids=lambda given: " ".join(given) or "plain",
)  # fmt: skip
def test_the_ratio_is_exactly_one_before_the_first_update(
    runs: TinyRuns, overrides: tuple[str, ...], tmp_path: Path
) -> None:
    run = runs.train(str(tmp_path / "run"), *overrides)
    rows = metrics(run)
    other_batches = overrides[0:1] in (("micro_batch_size=2",), ("micro_batch_size=8",))
    # Some processors round other batches otherwise.
    assert all(row["ratio_first_deviation"] <= other_batches * 1e-5 for row in rows)
    assert all(row["grad_norm"] > 0 for row in rows)
    two = "updates_per_rollout=2" in overrides
    assert all((row["ratio_max_deviation"] > 0) == two for row in rows)  # the second update sees a moved policy


@pytest.mark.usefixtures("numbers_alone")
def test_windows_choose_the_trained_steps(toys: TinyRuns, monkeypatch: pytest.MonkeyPatch) -> None:
    from flowrl.training import paths

    seen = []
    stochastic_steps = paths.stochastic_steps

    def record(*arguments: Any) -> tuple[int, ...]:
        seen.append(stochastic_steps(*arguments))
        return seen[-1]

    monkeypatch.setattr(paths, "stochastic_steps", record)
    run = toys.train("windows", "sampler.num_steps=4", "sampler.sde_window_size=1", "num_iterations=5")
    assert set(seen) <= {(0,), (1,), (2,)}
    assert len(set(seen)) > 1
    assert all(row["live_rows"] == 8 for row in metrics(run))


@pytest.mark.usefixtures("numbers_alone")
def test_kl_is_zero_until_the_policy_has_moved(toys: TinyRuns) -> None:
    rows = metrics(toys.train("kl", "kl_coef=0.1"))
    assert rows[0]["kl"] == 0.0
    assert rows[1]["kl"] > 0
    assert rows[1]["loss"] == pytest.approx(rows[1]["policy_loss"] + 0.1 * rows[1]["kl"], abs=1e-6)
    assert "kl" not in metrics(toys.train("no-kl", "kl_coef=0"))[1]


@pytest.mark.slow
@pytest.mark.usefixtures("numbers_alone")
def test_the_average_follows_the_policy_and_is_what_is_shipped(runs: TinyRuns) -> None:
    first, second = (runs.train(f"ema-{n}", "policy.ema_decay=0.9", f"num_iterations={n}") for n in (1, 2))
    start = {
        name: tensor if "lora_A" in name else torch.zeros_like(tensor)
        for name, tensor in state(runs.train("frozen", "optim.lr=0", "num_iterations=1"))["policy"].items()
    }
    expected = start
    for number, run in ((1, first), (2, second)):
        decay = (1 + number) / (10 + number)
        policy, ema = state(run)["policy"], state(run)["slots"]["ema"]
        expected = {name: decay * expected[name] + (1 - decay) * policy[name] for name in policy}
        for name, tensor in ema.items():
            torch.testing.assert_close(tensor, expected[name], rtol=0, atol=1e-6)
            assert torch.equal(lora_tensors(run)["transformer." + name.replace(".default.", ".")], tensor)


def _order(seed: int) -> list[str]:
    return [PROMPTS[i] for i in prompts_of_iteration(len(PROMPTS), 2, seed, 0)]


@pytest.mark.slow
@pytest.mark.usefixtures("numbers_alone")
def test_a_group_of_equal_rewards_leaves_the_gradient_alone(runs: TinyRuns, gradients: list[Tensor]) -> None:
    """The gradient with a dead second group is that of the first group by itself."""
    live, dead = _order(0)
    source = f"""
def reward(images, prompts, metadata):
    values = 100 * images.mean((1, 2, 3))
    return [7.0 if prompt == {dead!r} else float(value) for prompt, value in zip(prompts, values)]
"""
    alone = runs.folder / "alone.txt"
    alone.write_text(live + "\n")
    sizes = ("num_iterations=1", "micro_batch_size=4", "rollout_batch_size=4")
    run = runs.train("dead", runs.rewards(source), *sizes)
    runs.train("alone", runs.rewards(source), *sizes, f"prompts.train={alone}", "prompts_per_step=1")
    row = metrics(run)[0]
    assert (row["zero_std_ratio"], row["live_rows"]) == (0.5, 8)
    assert torch.equal(gradients[0], gradients[1])
    assert gradients[0].abs().max() > 0


@pytest.mark.usefixtures("numbers_alone")
def test_a_rollout_without_any_difference_takes_no_step(toys: TinyRuns, gradients: list[Tensor]) -> None:
    source = "def reward(images, prompts, metadata):\n    return [float(len(prompt)) for prompt in prompts]\n"
    run = toys.train("all-dead", toys.rewards(source), "num_iterations=3", "kl_coef=1")
    rows = metrics(run)
    assert gradients == []
    assert all(row["zero_std_ratio"] == 1 and row["live_rows"] == 0 and "grad_norm" not in row for row in rows)
    assert all(float(tensor.abs().max()) == 0 for name, tensor in lora_tensors(run).items() if "lora_B" in name)


@pytest.mark.slow
@pytest.mark.usefixtures("numbers_alone")
def test_micro_batches_add_up_to_the_gradient_of_one(runs: TinyRuns, gradients: list[Tensor]) -> None:
    for size in (8, 4, 1):
        runs.train(f"micro-{size}", f"micro_batch_size={size}", "rollout_batch_size=8", "num_iterations=1")
    whole, *parts = gradients
    for part in parts:
        torch.testing.assert_close(part, whole, rtol=0, atol=1e-6 * float(whole.abs().max()) + 1e-9)


def test_without_out_the_first_free_folder_is_taken(toys: TinyRuns, monkeypatch: pytest.MonkeyPatch) -> None:
    from flowrl.cli import main

    elsewhere = toys.folder / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    (elsewhere / "runs" / "tiny-1").mkdir(parents=True)
    assert main(["train", str(toys.config), "num_iterations=1"]) == 0
    assert (elsewhere / "runs" / "tiny-2" / "report.html").is_file()
    assert list((elsewhere / "runs" / "tiny-1").iterdir()) == []


def test_a_folder_that_cannot_be_made_is_refused_before_anything_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(train_run, "preflight", lambda config: pytest.fail("it takes seconds"))
    assert main(["train", "tiny_g2rpo", f"out={tmp_path / 'file' / 'run'}"]) == 1
    assert "give another out=" in capsys.readouterr().err
