"""`flowrl plan`: what it prints of shipped configurations, what it refuses, and that it asks no network."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from counted_operations import measured_once

from flowrl import cli
from flowrl.commands.plan import run as plan
from flowrl.config.base import config_files, find_config
from flowrl.config.train import load_config
from flowrl.generation import prompt_checks
from flowrl.pipelines.places.known_checkpoints import checkpoints
from flowrl.planning import gather
from flowrl.planning.memory import GIB
from flowrl.planning.published_models import in_cache
from flowrl.prompts.loading import Prompt
from flowrl.runtime.call import answering
from flowrl.session.preflight import preflight
from flowrl.training import parts

ROOT = Path(__file__).resolve().parents[2]
TINY, CLIP, GENEVAL = "tiny_grpo_geneval", "sd35m_grpo_clip_24gb", "sd35m_grpo_geneval"
QUICK = ("pipeline.model=asset:tiny-sd3", "pipeline.height=64", "pipeline.width=64", "pipeline.max_sequence_length=16")


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any, **options: Any) -> None:
        raise AssertionError("a plan asked the network")

    for name in ("connect", "connect_ex", "sendto"):
        monkeypatch.setattr(socket.socket, name, refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.fixture(autouse=True)
def _measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    measured_once(monkeypatch)


def run(*arguments: str) -> int:
    with answering("flowrl plan"):  # as the command line calls it
        return plan(cli.parse("plan", arguments))


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """All that a plan prints, on one line, so that wrapping does not matter."""
    assert run(*arguments, "--long") == 0
    text = capsys.readouterr().out
    assert max(map(len, text.split("\n"))) <= 80
    return " ".join(text.split())


# ---- what it prints --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_plan_of_a_run_on_one_card(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, CLIP)
    for part in (
        "grpo, objective clip, credit outcome", "iterations 300", "512 x 512; latent [16, 64, 64], 205 text tokens",
        "8 prompts x 16 = 128 images", "32 batches of 4", "16 micro-batches of 4, 2 updates an iteration",
        "38,400 images, 600 updates",
        "rollout 10 1,280 384,000", "update 4.5 576 172,800", "backward 3 384 115,200", "all 17.5 2,240 672,000",
        # 64 images x 40 steps, and 24 prompts at 4 noise levels for eval/kl; whose base side is 24 x (30 + 1), once
        "13 of 64 images, 2,656 evaluations each and once 744 of the base",
        "2.25 TF forward, 4.78 TF with its backward pass",
        "one 4090", "one A100", "one H100", "one H200", "one B200", "At 21 to 46 % of a GPU's peak",
        "fits 24 GB as it is: at most 17.7 GiB of 23.6",
        "denoiser, bfloat16 4.18 GiB", "autoencoder, float32 320 MiB", "reward's clip-vit-large-patch14 1.59 GiB",
        "at the start 10.7 GiB of text encoders", "takes 2.29 GiB", "2 of 286 MiB", "LoRA 71.6 MiB",
        "about 14.7 GiB", "gated: accept it at huggingface.co/stabilityai/stable-diffusion-3.5-medium",
    ):  # fmt: skip
        assert part in text, part
    # 22.5 TF of rollout, 3 x 4.78 of updates, 1.5 x 2.25 of rows that are scored again, 2.57 of decoding: an iteration
    # of 128 images, of which there are 300;
    # evaluations (13 x 2,656 + 744) x 2.25 TF and 13 x 64 x 2.57 TF of decoding, 0.08 EF
    assert "all 42.8 TF 5.47 PF 1.72 EF" in text


def test_the_published_run_costs_what_was_reckoned_for_it(capsys: pytest.CaptureFixture[str]) -> None:
    """175 TF an image, and at most 20 more where rows of the second update are scored again."""
    text = printed(capsys, GENEVAL, "pipeline.dtype=bfloat16")
    assert "all 194 TF 224 PF" in text
    for stage, share in (("rollout", 23), ("update", 55), ("reference", 21), ("decoding", 1)):
        cost = text.split("Cost ")[1].split(f"{stage} ")[1]
        assert cost.split("%")[0].endswith(f" {share}")


def test_processes_divide_time_and_tflops_are_what_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    options = ("prompts.eval=null", "eval_every=0", *QUICK)
    text = printed(capsys, GENEVAL, *options, "--processes", "8", "--tflops", "400")
    assert "144 images of 8 process(es)" in text
    assert "6 micro-batches of 12" in text
    assert text.count("400 TFLOP/s") == 1
    assert "400 TFLOP/s is what --tflops says" in text
    assert " on 8 " in text
    assert "prompts.train: data/geneval_train.jsonl is not here" in text


@pytest.mark.slow
def test_processes_are_those_that_the_configuration_asks_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert "24 images of 6 process(es)" in printed(capsys, TINY, "parallel.replicate=3", "parallel.shard=2")


def test_processes_that_share_an_image_hold_whole_groups_together(capsys: pytest.CaptureFixture[str]) -> None:
    overrides = ("tiny_kontext_grpo", "rewards.0.gate=0.5", "parallel.context=2", "--processes")
    assert "12 images of 24 process(es)" in printed(capsys, *overrides, "24")
    assert run(*overrides, "48") == 1
    refused = capsys.readouterr().err
    assert "6 images per process are not whole groups of 12: make prompts_per_step a multiple of 24" in refused


NAMES = (
    "tiny_g2rpo", "tiny_nft", "tiny_sft", "tiny_dpo", "tiny_dpo_offline", "tiny_draft", "tiny_branch_grpo", "tiny_dapo",
    "tiny_adversarial", "sd35m_grpo_geneval", "sd35m_adv_grpo", "sd35m_mixgrpo_flash", "sd35m_dpo", "sd35m_tree_grpo",
)  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_shipped_configurations_have_a_plan(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The real ones on the small network: only the counting of its evaluations takes time."""
    text = printed(capsys, name, *(QUICK if name.startswith("sd35m") else ()))
    config = load_config(find_config(name))
    assert text.startswith(f"{name}: fits 24 GB")
    assert f"recipe {config.recipe}, objective" in text
    assert f"{'CPU' if config.pipeline.device == 'cpu' else 'GPU'} time" in text
    assert ("largest micro_batch_size 24 GB 40 GB 48 GB 80 GB 141 GB" in text) == (not config.keep_graphs)
    assert "licence Apache-2.0; ships with flowrl" in text
    assert "family does not say" not in text
    for absent in ("data/geneval_train.jsonl", "data/references.json"):
        uses = absent in find_config(name).read_text()
        assert not uses or absent in text


def once(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that remembers what it gave."""
    known: dict[str, Any] = {}

    def remembered(*given: Any, **options: Any) -> Any:
        if (key := str((given, options))) not in known:
            known[key] = function(*given, **options)
        return known[key]

    return remembered


@pytest.mark.slow
def test_every_configuration_that_ships_is_planned(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of embedded models that the test above leaves out; `test_plan_cards.py` plans those of real ones."""
    monkeypatch.setattr(parts, "read_prompts", once(parts.read_prompts))
    monkeypatch.setattr(gather, "read_prompts", parts.read_prompts)
    checked: dict[Any, list[str]] = {}  # prompts of one file for the same rewards

    def faults(rows: Sequence[Prompt], rewards: Sequence[Any], **options: Any) -> list[str]:
        key = (*(row.where for row in rows[:1]), len(rows), str((rewards, options)))
        if key not in checked:
            checked[key] = list(reward_faults(rows, rewards, **options))
        return checked[key]

    reward_faults = prompt_checks.reward_faults
    monkeypatch.setattr(prompt_checks, "reward_faults", faults)
    for path in (path for name, path in config_files().items() if name.startswith("tiny_") and name not in NAMES):
        assert run(path.stem, "--processes", str(_processes(path.stem))) == 0, path.stem
        assert capsys.readouterr().out.startswith(f"{path.stem}: fits ")


def _processes(name: str) -> int:
    parallel = load_config(find_config(name)).parallel
    return parallel.shard * parallel.context * (parallel.replicate or 1)


def test_a_latent_is_what_is_drawn_and_not_what_the_network_reads(capsys: pytest.CaptureFixture[str]) -> None:
    assert "latent [48, 21, 30, 52]" in printed(capsys, "lucy_edit_grpo")  # the network reads 96 channels


@pytest.mark.parametrize("name", ["tiny_wan_grpo", "tiny_wan_recommended", "tiny_kontext_grpo", "tiny_recommended"])
def test_embedded_models_have_a_plan(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "latent" in printed(capsys, name)


def test_an_asset_comes_before_what_is_known_of_published_models(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    medium = checkpoints()["stabilityai/stable-diffusion-3.5-medium"]
    monkeypatch.setitem(checkpoints(), "asset:tiny-sd3", medium)
    text = printed(capsys, TINY)
    assert "64 x 64; latent [8, 8, 8], 32 text tokens, 96 attend at once" in text  # 16 of CLIP, 16 of T5
    assert "download nothing" in text


def test_an_evaluation_at_another_size_costs_what_that_size_does(capsys: pytest.CaptureFixture[str]) -> None:
    def share(*overrides: str) -> int:
        text = printed(capsys, TINY, *overrides)
        return int(text.split("evaluation ")[-1].split("%")[0].split()[-1])

    assert share("eval.height=32", "eval.width=32") < share() / 2
    with pytest.raises(ValueError, match=r"eval\.height \(65\)"):
        run(TINY, "eval.height=65")


def test_a_model_that_nobody_knows_is_planned_as_its_familys_first(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, CLIP, "pipeline.model=nobody/unheard-of")
    assert "nothing is known of it here: counted as stabilityai/stable-diffusion-3.5-medium, the family's first" in text
    assert "rollout 10 1,280 384,000" in text
    assert "licence not known: see huggingface.co/nobody/unheard-of" in text
    text = printed(capsys, CLIP, "pipeline.model=stabilityai/stable-diffusion-3.5-medum@v2")
    assert "the family's first (did you mean stabilityai/stable-diffusion-3.5-medium" in text
    assert "licence not known: see huggingface.co/stabilityai/stable-diffusion-3.5-medum" in text


def test_what_is_smaller_than_it_seems_is_said(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    record = {"prompt": "a red circle", "tag": "colors", "include": [{"class": "circle", "count": 1, "color": "red"}]}
    (tmp_path / "few.jsonl").write_text(json.dumps(record))
    text = printed(
        capsys, "tiny_refl", "rewards=[{name: attributes}]", f"prompts.train={tmp_path / 'few.jsonl'}", "budget.nfe=1",
        "pipeline.device=cuda",
    )  # fmt: skip
    assert "prompts.train holds 1, fewer than prompts_per_step" in text
    assert "iterations 1; the budget ends it there" in text
    assert "budget it is used up by the first iteration" in text
    assert "device pipeline.device=cuda is not available on this machine" in text


def test_what_makes_a_run_faster_is_named_where_it_is_set(capsys: pytest.CaptureFixture[str]) -> None:
    assert " speed " not in printed(capsys, TINY)
    text = printed(capsys, TINY, "pipeline.vae_dtype=bfloat16", "pipeline.compile=blocks", "keep_graphs=true")
    assert "speed pipeline.vae_dtype: bfloat16, pipeline.compile: blocks, keep_graphs: true" in text


@pytest.mark.parametrize("key", ["pipeline.vae_dtype", "reward_dtype"])
def test_tf32_on_a_cpu_is_refused_by_train_and_told_by_plan(key: str, capsys: pytest.CaptureFixture[str]) -> None:
    overrides = (f"{key}=tf32", "pipeline.device=cpu")
    with pytest.raises(ValueError, match=rf"{key}=tf32 needs a CUDA device"):
        preflight(load_config(find_config(TINY), list(overrides)))
    assert f"device {key}=tf32 needs a CUDA device" in printed(capsys, TINY, *overrides)


def test_a_snapshot_in_the_cache_is_not_downloaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    model = "stabilityai/stable-diffusion-3.5-medium"
    assert not in_cache(model)
    snapshot = tmp_path / "models--stabilityai--stable-diffusion-3.5-medium" / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    (snapshot / "model_index.json").write_text("{}")
    assert not in_cache(model)  # the index alone is there once somebody asked for the model's class
    (snapshot / "transformer").mkdir()
    (snapshot / "transformer" / "model.safetensors").touch()
    assert in_cache(model)
    assert in_cache(f"{model}@v2")


@pytest.mark.slow
def test_memory_falls_with_checkpointing_and_grows_with_the_micro_batch(capsys: pytest.CaptureFixture[str]) -> None:
    def activations(*overrides: str) -> float:
        line = printed(capsys, TINY, *overrides).split("activations, ")[1]
        number, unit = line.split("images ")[1].split()[:2]
        return float(number) * {"GiB": GIB, "MiB": 2**20}[unit]

    each = activations("micro_batch_size=12", "rollout_batch_size=12")
    assert activations("micro_batch_size=24") == pytest.approx(2 * each, rel=0.02)
    assert activations("micro_batch_size=24", "pipeline.gradient_checkpointing=true") < each


# ---- what it refuses -------------------------------------------------------------------------------------------------

REFUSED = {
    "key": (("group_sise=4",), "group_size"),
    "density": (("sampler.kernel=ode", "sampler.noise_level=null"), "sampler.kernel"),
    "noise": (("sampler.noise_level=1.5",), "sampler.noise_level"),
    "group": (("group_size=1",), "group_size must be at least 2"),
    "foreign option": (("objective.options={beta: 1.0}",), "unknown key 'beta'"),
    "division": (("updates_per_rollout=7",), "updates_per_rollout"),
    "processes": (("--processes", "5"), "5 processes"),
    "split in three": (("parallel.shard=2", "--processes", "3"), "3 processes were launched, which is not a multiple"),
    "one of two": (("parallel.shard=2", "--processes", "1"), "1 process was launched, which is not a multiple"),
    "copies": (("parallel.replicate=2", "--processes", "3"), "set parallel.replicate to 3"),
    "no speed": (("--tflops", "0"), "--tflops"),
    "two speeds": (("--tflops", "9", "--bench", "runs"), "leave one of them out"),
    "no bench": (("--bench", "nowhere"), "there is no nowhere"),
    "LoRA target": (("policy.target_modules=[attn.to_kv]",), "attn.to_kv"),
    "folder": (("pipeline.model=./nowhere",), "./nowhere"),
    "family": (("pipeline.name=sd4",), "sd4"),
    "height": (("pipeline.height=65",), "pipeline.height"),
    "gate": (("rewards.0.gate=0.5", "--processes", "16"), "gate"),
    "video": (("rewards=[{name: temporal_smoothness}]",), "temporal_smoothness"),
    "sound": (("rewards=[{name: loudness}]",), "(loudness) judges sounds, and what the family sd3 draws is silent"),
    "configuration": (("nothing.yaml",), "no configuration"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_work_is_refused_with_the_key(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    overrides, key = REFUSED[name]
    first = overrides if overrides[0].endswith(".yaml") else (TINY, *overrides)
    try:
        code, message = run(*first), capsys.readouterr().err
    except ValueError as error:  # what the command line prints
        code, message = 1, cli.in_flags(str(error), "plan")
    assert code == 1
    assert key in message


def test_a_bad_prompt_file_is_refused_and_an_absent_one_is_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"text": "no prompt"}\n')
    assert run(TINY, f"prompts.train={bad}") == 1
    assert "line 1" in capsys.readouterr().err
    text = printed(capsys, TINY, "prompts.eval=somewhere.jsonl")
    assert "put in place prompts.eval: somewhere.jsonl is not here" in text
    assert "2 of prompts that are not here" in text


def test_the_number_of_processes_is_forgotten_afterwards(capsys: pytest.CaptureFixture[str]) -> None:
    before = os.environ.get("WORLD_SIZE")
    printed(capsys, TINY, "--processes", "2")
    assert os.environ.get("WORLD_SIZE") == before
