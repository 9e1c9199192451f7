"""HunyuanImage against stock diffusers: guiders that remember earlier steps, quoted letters, the distilled network."""

from __future__ import annotations

import json
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import family_sampling
import flow_family as flow
import pytest
import torch
import yaml
from diffusers import HunyuanImagePipeline
from family_sampling import start_noise
from rounding import assert_same_sum
from safetensors.torch import load_file
from tiny_qwen_image import CHANNELS, OPTIONS, save_tiny_hunyuan_image
from torch import Tensor
from train_command import train

from flowrl.pipelines.families.hunyuan_image import FAMILY
from flowrl.pipelines.shared.cards import Size
from flowrl.pipelines.shared.family_pipeline import FamilyPipeline

PROMPTS = ["a red circle", 'a sign that says "GO"']
STEPS, SCALE = 5, 3.5


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("tiny")
    return {
        "base": save_tiny_hunyuan_image(root / "base"),
        "distilled": save_tiny_hunyuan_image(root / "distilled", distilled=True),
    }


load = partial(family_sampling.load, FAMILY, OPTIONS)
shared = cache(load)


def stock_call(pipe: Any, pipeline: FamilyPipeline, scale: float) -> tuple[Tensor, Tensor]:
    """Latents and images of stock, which draws with one guider for all prompts of a call: one at a time."""
    if pipe.guider is not None:
        pipe.guider = pipe.guider.new(guidance_scale=scale)
        pipe.ocr_guider = pipe.ocr_guider.new(guidance_scale=scale)
    pipe.tokenizer_max_length = OPTIONS["max_sequence_length"]
    _, height, width = pipeline.image_shape
    with patch.object(pipe.vae, "decode", wraps=pipe.vae.decode) as decode:
        drawn = [
            pipe(
                prompt=prompt,
                negative_prompt="",
                latents=noise[None],
                height=height,
                width=width,
                num_inference_steps=STEPS,
                distilled_guidance_scale=scale,
                output_type="pt",
            ).images
            for prompt, noise in zip(PROMPTS, start_noise(pipeline), strict=True)
        ]
    latents = torch.cat([call.args[0] for call in decode.call_args_list]) * pipe.vae.config.scaling_factor
    return latents, torch.cat(drawn)


def guided(pipeline: FamilyPipeline, scale: float) -> Any:
    negative = pipeline.encode(["", ""]) if pipeline.passes(scale) == 2 else None
    return pipeline.guided(pipeline.network, pipeline.encode(PROMPTS), negative, scale)


def sampled(pipeline: FamilyPipeline, scale: float) -> Tensor:
    return family_sampling.sample(pipeline, guided(pipeline, scale), pipeline.schedule(STEPS, "diffusers"))


@pytest.mark.parametrize(
    ("kind", "scale"),
    [("base", SCALE), pytest.param("base", 1.0, marks=pytest.mark.slow), ("distilled", 3.25)],
)
def test_images_are_those_of_the_stock_pipeline_its_scheduler_and_its_guiders(
    folders: dict[str, Path], kind: str, scale: float
) -> None:
    pipeline, pipe = shared(folders[kind]), family_sampling.stock(HunyuanImagePipeline, folders[kind])
    assert (pipeline.latent_shape, pipeline.image_shape) == ((CHANNELS, 4, 6), (3, 32, 48))
    final, (stock, images) = sampled(pipeline, scale), stock_call(pipe, pipeline, scale)
    assert_same_sum(final, stock)
    assert (stock - start_noise(pipeline)).abs().mean() > 0.1  # the network did something
    assert_same_sum(pipeline.decode(final), images)
    assert (sampled(pipeline, 2 * scale) - final).abs().amax(dim=(1, 2, 3)).min() > 1e-3
    if kind == "base" and scale != 1:
        linear = sampled(load(folders[kind], projected=False), scale)
        assert (linear - final).abs().amax(dim=(1, 2, 3)).min() > 1e-2  # of both prompts


@pytest.mark.slow
def test_steps_are_evaluated_again_with_what_guidance_had_kept(folders: dict[str, Path]) -> None:
    """As an update does it: the same numbers to the bit, gradient for every LoRA tensor, and other numbers without."""
    pipeline = load(folders["base"], gradient_checkpointing=True)
    policy = flow.adapted(pipeline)
    answers, velocity = [], partial(guided, pipeline, SCALE)
    for step, answer, alone in family_sampling.replayed_with_memory(pipeline, velocity(), velocity(), STEPS):
        answers.append(answer)
        differs = (alone - answer).abs().amax(dim=(1, 2, 3)) > 1e-3
        assert differs.tolist() == [step > 1, step > 2]
    assert not family_sampling.idle_tensors(policy, torch.stack(answers).square().sum())


@pytest.mark.slow
def test_the_distilled_network_reads_where_a_step_leads(folders: dict[str, Path]) -> None:
    pipeline = shared(folders["distilled"])
    assert (pipeline.passes(3.25), shared(folders["base"]).passes(3.25)) == (1, 2)
    schedule = pipeline.schedule(STEPS, "diffusers")
    assert torch.equal(schedule.timestep.imag, torch.cat([schedule.timestep.real[1:], torch.zeros(1)]))
    velocity, x = guided(pipeline, 3.25), start_noise(pipeline)
    sigma, times = schedule.sigma[1], (schedule.timestep[1], schedule.timestep_of(schedule.sigma[1]))
    with torch.no_grad():
        mean, there, plain = (velocity(x, sigma, time) for time in (*times, times[1].real))
    assert torch.equal(there, plain)  # without an end, the velocity at the level itself
    assert (mean - there).abs().max() > 1e-4
    pipe = family_sampling.stock(HunyuanImagePipeline, folders["distilled"])
    pipe.scheduler.set_timesteps(sigmas=[1 - i / STEPS for i in range(STEPS)])
    torch.testing.assert_close(schedule.sigma, pipe.scheduler.sigmas, atol=1e-6, rtol=0)


@pytest.mark.slow
def test_a_saved_lora_has_the_same_effect_in_the_stock_network(folders: dict[str, Path], tmp_path: Path) -> None:
    """The stock class has no loader, and its network has."""
    pipeline = load(folders["base"])
    policy = flow.adapted(pipeline)
    ours = sampled(pipeline, SCALE)
    assert (ours - sampled(shared(folders["base"]), SCALE)).abs().mean() > 1e-3
    pipeline.save_lora(tmp_path, policy.tensors(), policy.config)
    pipe = family_sampling.fresh_stock(HunyuanImagePipeline, folders["base"])
    pipe.transformer.load_lora_adapter(tmp_path, weight_name="pytorch_lora_weights.safetensors")
    assert_same_sum(ours, stock_call(pipe, pipeline, SCALE)[0])


@pytest.mark.slow
def test_images_go_into_latents_and_back(folders: dict[str, Path]) -> None:
    pipeline = shared(folders["base"])
    flow.check_autoencoder(
        pipeline, load(folders["base"], vae_slice=2), lambda vae, x: 0.75289 * vae.encode(x).latent_dist.mode()
    )


@pytest.mark.slow
def test_another_length_is_the_same_function(folders: dict[str, Path]) -> None:
    x, time = start_noise(shared(folders["base"])), torch.full((2,), 400.0)
    with torch.no_grad():
        short, long = (
            one.network(x, time, one.encode(PROMPTS))
            for one in (shared(folders["base"]), load(folders["base"], max_sequence_length=60))
        )
    assert_same_sum(short, long)


# ---- training --------------------------------------------------------------------------------------------------------


def config_of(folder: Path, out: Path, **sampler: Any) -> dict[str, Any]:
    (out.parent / "p.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in PROMPTS))
    (out.parent / "rewards.py").write_text(
        "def darkness(images, prompts, metadata):\n    return -images.mean((1, 2, 3))\n"
    )
    return {
        "num_iterations": 2,
        "prompts_per_step": 2,
        "group_size": 2,
        "eval_every": 0,
        "progress": False,
        "out": str(out),
        "threads": 1,
        "policy": {"lora_rank": 2},
        "checkpoint_every": 1,
        "updates_per_rollout": 2,
        "rollout_batch_size": 2,
        "micro_batch_size": 2,
        "pipeline": {"model": str(folder), "dtype": "float32", "device": "cpu", **OPTIONS},
        "sampler": {
            "kernel": "flow_sde",
            "noise_level": 0.3,
            "num_steps": STEPS,
            "guidance_scale": SCALE,
            "sde_window_range": [1, 4],
            **sampler,
        },
        "prompts": {"train": str(out.parent / "p.jsonl")},
        "rewards": [{"file": str(out.parent / "rewards.py"), "function": "darkness"}],
        "logging": {"tensorboard": False},
    }


@pytest.mark.slow
def test_rollout_update_and_resume_agree(
    folders: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run in one piece and one that stops and goes on: a first ratio of exactly 1, and the same LoRA to the bit."""
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config_of(folders["base"], tmp_path / "whole")), encoding="utf-8")
    assert train(str(tmp_path / "run.yaml"), []) == 0
    assert train(str(tmp_path / "run.yaml"), ["num_iterations=1", f"out={tmp_path / 'part'}"]) == 0
    assert train(f"resume={tmp_path / 'part'}", ["num_iterations=2"]) == 0
    capsys.readouterr()
    whole, part = (load_file(tmp_path / name / "lora/pytorch_lora_weights.safetensors") for name in ("whole", "part"))
    assert whole.keys() == part.keys()
    assert all(torch.equal(tensor, part[name]) for name, tensor in whole.items())
    assert first_deviations(tmp_path / "whole") == [0.0, 0.0]


@pytest.mark.slow
def test_a_distilled_run_begins_at_ratio_one(
    folders: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = config_of(folders["distilled"], tmp_path / "run") | {"num_iterations": 1}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    assert train(str(tmp_path / "run.yaml"), []) == 0
    capsys.readouterr()
    assert first_deviations(tmp_path / "run") == [0.0]


def first_deviations(run: Path) -> list[float]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row["ratio_first_deviation"] for row in rows if "ratio_first_deviation" in row]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"recipe": "forward"}, "recipe=forward evaluates steps by themselves"),
        ({"credit": {"method": "tempflow"}}, r"credit\.method=tempflow evaluates .*projected=false, fewer"),
        ({"credit": {"method": "tempflow"}, "projected": False}, ""),
        ({"credit": {"method": "tempflow"}, "num_steps": 2}, ""),
    ],
)
def test_methods_beside_whole_paths_are_refused(
    folders: dict[str, Path], tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    from flowrl.config.train import load_config
    from flowrl.session.preflight import check_memory

    config = config_of(folders["base"], tmp_path / "run") | {
        k: v for k, v in changes.items() if k in ("recipe", "credit")
    }
    config["pipeline"]["options"] = {"projected": changes.get("projected", True)}
    config["sampler"] |= {"num_steps": changes.get("num_steps", STEPS), "sde_window_range": None}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    loaded = load_config(tmp_path / "run.yaml")
    if not words:
        return check_memory(loaded, FAMILY)
    with pytest.raises(ValueError, match=words):
        check_memory(loaded, FAMILY)


# ---- what is known and what is refused -------------------------------------------------------------------------------


@pytest.mark.slow
def test_known_checkpoints_have_the_published_size_and_are_called_without_numbers() -> None:
    """17.45 billion, as others count the distilled one's files."""
    for model, parameters in zip(flow.published(FAMILY), (17_425_795_520, 17_453_334_976), strict=True):
        family_sampling.check_published(FAMILY, model, parameters)
        family_sampling.check_call(FAMILY, model, Size(height=1024, width=768), 60, (1, 64, 32, 24))


@pytest.mark.parametrize(
    ("file", "changes", "message"),
    [
        ("guider/guider_config.json", {"stop": 0.5}, r"with \{'stop': 0\.5\}"),
        ("ocr_guider/guider_config.json", {"_class_name": "SkipLayerGuidance"}, "is SkipLayerGuidance"),
        ("ocr_guider/guider_config.json", {"eta": 0.3}, "differ in eta, but only their first projected step"),
        ("transformer/config.json", {"patch_size": [1, 1, 1]}, "patches of 3 sides"),
        ("model_index.json", {"_class_name": "FluxPipeline"}, "loads HunyuanImagePipeline"),
    ],
)
def test_what_the_family_does_not_draw_is_refused(
    folders: dict[str, Path], tmp_path: Path, file: str, changes: dict[str, Any], message: str
) -> None:
    copied = flow.bare(folders["base"], tmp_path)
    FAMILY.check(str(copied), FAMILY.lora_targets)
    flow.edited(copied / file, **changes)
    with pytest.raises(ValueError, match=message):
        FAMILY.check(str(copied), None)
