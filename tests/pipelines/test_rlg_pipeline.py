"""Guidance between a base and its adapters in stock pipelines, in ours, and by `flowrl sample --rlg`.

After a single step latents are affine in what the scheduler is given, so `out(w) = (1 - w) out(0) + w out(1)` holds for
every pipeline exactly if each network's own guidance was finished before the mixture.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from diffusers import (
    DDIMScheduler,
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    FluxTransformer2DModel,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
    StableDiffusionPipeline,
    UNet2DConditionModel,
)
from family_sampling import fill_lora, start_noise
from peft import LoraConfig
from rounding import assert_same_sum
from tiny_models import ALPHA, PROMPTS, RANK, adapted, load_tiny, sample_ode
from torch import Tensor

import flowrl
from flowrl.generation.rlg import RLG, add_experts, rlg_velocity
from flowrl.pipelines import rlg_pipeline as module
from flowrl.pipelines.rlg_network import acting, active_adapters, adapter_layers, add_adapter, slot_network
from flowrl.pipelines.rlg_pipeline import rlg_pipeline
from flowrl.pipelines.weights.lora import Policy
from flowrl.pretraining.tiny_sd3 import CONTEXT
from flowrl.runtime.randomness import counter_normal
from flowrl.samplers import KERNELS, rollout
from flowrl.samplers.guidance import conditioned, rl_first, rl_outside, rlg

Draw = Callable[[Any, int], Tensor]
TUNED = LoraConfig(r=2, lora_alpha=8, target_modules=["to_q", "to_k", "to_v"], init_lora_weights=False)


@pytest.fixture(autouse=True)
def _quiet() -> None:
    diffusers.utils.logging.set_verbosity_error()


def draw_sd3(pipe: Any, num_steps: int) -> Tensor:
    """Images of two prompts, guided, by the stock call."""
    x = counter_normal((2, 8, 8, 8), "start")
    return torch.as_tensor(
        pipe(
            PROMPTS[:2], num_inference_steps=num_steps, guidance_scale=4.0, latents=x, output_type="pt",
            max_sequence_length=CONTEXT,
        ).images
    )  # fmt: skip


def finished(pipe: Any, adapter: bool, network: torch.nn.Module) -> Any:
    pipe.set_progress_bar_config(disable=True)
    if adapter:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            network.add_adapter(TUNED, "tuned")  # type: ignore[operator]
    return pipe


def stable_diffusion(prediction: str, adapter: bool) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        unet = UNet2DConditionModel(
            sample_size=8, layers_per_block=1, block_out_channels=(8, 16), norm_num_groups=4, cross_attention_dim=16,
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), attention_head_dim=4,
            up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        )  # fmt: skip
    scheduler = DDIMScheduler(
        beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", clip_sample=False, set_alpha_to_one=False,
        steps_offset=1, prediction_type=prediction,
    )  # fmt: skip
    pipe = StableDiffusionPipeline(
        vae=None, text_encoder=None, tokenizer=None, unet=unet, scheduler=scheduler, safety_checker=None,
        feature_extractor=None, requires_safety_checker=False,
    )  # fmt: skip
    return finished(pipe, adapter, unet)


def draw_sd(pipe: Any, num_steps: int) -> Tensor:
    images = pipe(
        prompt_embeds=counter_normal((2, 5, 16), "with"), negative_prompt_embeds=counter_normal((2, 5, 16), "without"),
        latents=counter_normal((2, 4, 8, 8), "start"), num_inference_steps=num_steps, guidance_scale=4.0,
        output_type="latent", height=64, width=64,
    ).images  # fmt: skip
    return torch.as_tensor(images)


def flux(adapter: bool) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        transformer = FluxTransformer2DModel(
            in_channels=16, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
            joint_attention_dim=32, pooled_projection_dim=32, guidance_embeds=True, axes_dims_rope=(4, 4, 8),
        )  # fmt: skip
    pipe = FluxPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0), vae=None, text_encoder=None, tokenizer=None,
        text_encoder_2=None, tokenizer_2=None, transformer=transformer,
    )  # fmt: skip
    return finished(pipe, adapter, transformer)


def draw_flux(pipe: Any, num_steps: int) -> Tensor:
    images = pipe(
        prompt_embeds=counter_normal((2, 5, 32), "with"), pooled_prompt_embeds=counter_normal((2, 32), "pooled"),
        latents=counter_normal((2, 16, 16), "start"), num_inference_steps=num_steps, guidance_scale=3.5,
        output_type="latent", height=64, width=64,
    ).images  # fmt: skip
    return torch.as_tensor(images)


def qwen(adapter: bool) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        transformer = QwenImageTransformer2DModel(
            in_channels=16, out_channels=4, num_layers=1, attention_head_dim=16, num_attention_heads=2,
            joint_attention_dim=32, axes_dims_rope=(4, 6, 6),
        )  # fmt: skip
    pipe = QwenImagePipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True), vae=None, text_encoder=None,
        tokenizer=None, transformer=transformer,
    )  # fmt: skip
    return finished(pipe, adapter, transformer)


def draw_qwen(pipe: Any, num_steps: int) -> Tensor:
    mask = torch.ones(2, 5, dtype=torch.long)
    images = pipe(
        prompt_embeds=counter_normal((2, 5, 32), "with"), prompt_embeds_mask=mask, true_cfg_scale=4.0,
        negative_prompt_embeds=counter_normal((2, 5, 32), "without"), negative_prompt_embeds_mask=mask,
        latents=counter_normal((2, 16, 16), "start"), num_inference_steps=num_steps,
        output_type="latent", height=64, width=64,
    ).images  # fmt: skip
    return torch.as_tensor(images)


FAMILIES: dict[str, tuple[Callable[[bool], Any], Draw, dict[str, Any]]] = {
    "epsilon": (lambda adapter: stable_diffusion("epsilon", adapter), draw_sd, {}),
    "v": (lambda adapter: stable_diffusion("v_prediction", adapter), draw_sd, {}),
    "flux": (flux, draw_flux, {}),
    "qwen": (qwen, draw_qwen, {"true_cfg_scale": 4.0}),
}


# ---- stock pipelines -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", list(FAMILIES))
def test_scale_0_is_the_base_1_the_tuned_model_and_a_step_is_affine_between(family: str) -> None:
    build, draw, options = FAMILIES[family]
    pipe, plain = build(True), build(False)
    for num_steps in (1, 3):
        base, tuned = draw(plain, num_steps), draw(pipe, num_steps)
        assert not torch.equal(base, tuned)
        for scale, wanted in ((0.0, base), (1.0, tuned)):
            with rlg_pipeline(pipe, "tuned", scale, **options):
                assert torch.equal(draw(pipe, num_steps), wanted)
        if num_steps == 1:
            for scale in (-0.5, 1.6, 3.0):
                with rlg_pipeline(pipe, "tuned", scale, **options):
                    mixed = draw(pipe, 1)
                spread = float((tuned - base).abs().max())
                torch.testing.assert_close(mixed, (1 - scale) * base + scale * tuned, rtol=0, atol=1e-4 * spread + 1e-5)


def test_qwen_needs_the_exact_path(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe, plain = qwen(True), qwen(False)
    wanted = -0.6 * draw_qwen(plain, 1) + 1.6 * draw_qwen(pipe, 1)
    with rlg_pipeline(pipe, "tuned", 1.6, true_cfg_scale=4.0):
        exact = draw_qwen(pipe, 1)
    monkeypatch.setattr(module._Guided, "_exact", lambda self, model_output: model_output)
    with rlg_pipeline(pipe, "tuned", 1.6, true_cfg_scale=4.0):
        afterwards = draw_qwen(pipe, 1)
    assert float((afterwards - wanted).abs().max()) > 20 * float((exact - wanted).abs().max())


def test_sd3_images_are_those_of_our_own_guidance(tiny_sd3_folder: Path) -> None:
    pipeline, _ = adapted(tiny_sd3_folder)
    base, tuned = draw_sd3(load_tiny(tiny_sd3_folder).pipe, 3), draw_sd3(pipeline.pipe, 3)
    assert not torch.equal(base, tuned)
    for scale, wanted in ((0, base), (1, tuned)):
        with rlg_pipeline(pipeline.pipe, "default", scale) as pipe:
            assert torch.equal(draw_sd3(pipe, 3), wanted)
    with rlg_pipeline(pipeline.pipe, "default", 2.5) as pipe:
        guided = draw_sd3(pipe, 3)
    schedule, x = pipeline.schedule(3, "diffusers"), start_noise(pipeline, 2)
    velocity = rlg_velocity(pipeline, ["default"], PROMPTS[:2], [2.5], guidance_scale=4.0)
    with torch.no_grad():
        own = pipeline.decode(rollout(velocity, x, schedule, KERNELS["ode"], lambda step: x, stochastic=()).final)
    torch.testing.assert_close(guided, own, rtol=0, atol=1e-4)
    assert float((guided - tuned).abs().max()) > 1e-3


def test_the_pipeline_is_left_as_it_was(tiny_sd3_folder: Path) -> None:
    pipeline, policy = adapted(tiny_sd3_folder)
    pipe, transformer = pipeline.pipe, pipeline.denoiser
    before = draw_sd3(pipe, 2)
    with rlg_pipeline(pipe, "default", 1.6):
        assert not torch.equal(draw_sd3(pipe, 2), before)
    with pytest.raises(TypeError), rlg_pipeline(pipe, "default", 1.6):
        pipe(prompt=PROMPTS[0], no_such_option=1)
    assert "forward" not in vars(transformer)
    assert not {"step", "set_timesteps"} & set(vars(pipe.scheduler))
    assert all(parameter.requires_grad for parameter in policy.parameters.values())
    assert torch.equal(draw_sd3(pipe, 2), before)
    # One within another: the outer one's forward is taken for the network, and put back.
    with rlg_pipeline(pipe, "default", 0.0):
        with rlg_pipeline(pipe, "default", 1.0):
            pass
        assert torch.equal(draw_sd3(pipe, 2), draw_sd3(load_tiny(tiny_sd3_folder).pipe, 2))


def test_a_schedule_by_step_or_noise_and_its_cost() -> None:
    pipe, calls = flux(True), [0]
    pipe.transformer.x_embedder.register_forward_hook(lambda *_: calls.__setitem__(0, calls[0] + 1))
    tuned, drawn = draw_flux(pipe, 4), []
    pipe.scheduler.set_timesteps(4, mu=0.0, sigmas=[1.0, 0.75, 0.5, 0.25])
    edge = float(pipe.scheduler.timesteps[2]) / 1000
    for scale, by in ((rl_first(1.6, 2), "step"), (rl_outside(1.6, 0.0, edge), "noise")):
        for _ in range(2):  # steps are counted again in each generation
            calls[0] = 0
            with rlg_pipeline(pipe, "tuned", scale, by=by):  # type: ignore[arg-type]
                drawn.append(draw_flux(pipe, 4))
            assert calls[0] == 2 * 1 + 2 * 2
    assert all(torch.equal(images, drawn[0]) for images in drawn)
    assert not torch.equal(drawn[0], tuned)
    with rlg_pipeline(pipe, "tuned", lambda step: 1.0, by="step"):
        assert torch.equal(draw_flux(pipe, 4), tuned)


@pytest.mark.filterwarnings("ignore:Already found a `peft_config`")
def test_several_adapters_and_one_that_stays_under_both() -> None:
    pipe = flux(True)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        for name in ("second", "style"):
            pipe.transformer.add_adapter(TUNED, name)
    alone = {}
    for names in ((), ("tuned",), ("second",), ("style",), ("style", "tuned")):
        with acting(adapter_layers(pipe.transformer), names):
            alone[names] = draw_flux(pipe, 1)
    layers = adapter_layers(pipe.transformer)
    pipe.transformer.set_adapters(["tuned", "second"])
    with rlg_pipeline(pipe, ["tuned", "second"], [0.5, 2.0]):
        mixed = draw_flux(pipe, 1)
    wanted = alone[()] + 0.5 * (alone["tuned",] - alone[()]) + 2.0 * (alone["second",] - alone[()])
    torch.testing.assert_close(mixed, wanted, rtol=0, atol=1e-4)
    pipe.transformer.set_adapters(["style", "tuned"])
    with rlg_pipeline(pipe, "tuned", 3.0):
        mixed = draw_flux(pipe, 1)
    torch.testing.assert_close(mixed, -2 * alone["style",] + 3 * alone["style", "tuned"], rtol=0, atol=1e-4)
    assert active_adapters(layers) == ["style", "tuned"]


def test_the_wrapper_refuses(tiny_sd3_folder: Path) -> None:
    pipe = flux(True)
    cases: list[tuple[Any, Any, dict[str, Any], str]] = [
        ("other", 1.6, {}, "no adapter 'other'"),
        (["tuned", "tuned"], [1.0, 1.0], {}, "different adapters"),
        ("tuned", [1.0, 1.0], {}, "one scale for each"),
        ("tuned", float("nan"), {}, "finite"),
        ("tuned", 1.6, {"by": "sigma"}, "by must be"),
        ("tuned", 1.6, {"true_cfg_scale": 4.0}, "Qwen-Image pipelines"),
    ]
    for adapter, scale, options, message in cases:
        with pytest.raises(ValueError, match=message), rlg_pipeline(pipe, adapter, scale, **options):
            pass
    with pytest.raises(ValueError, match="Qwen-Image pipelines"), rlg_pipeline(qwen(True), "tuned", 1.6):
        pass
    for wrong in (3.0, 1.0):  # the pipeline is called with 4
        qwen_pipe = qwen(True)
        with (
            rlg_pipeline(qwen_pipe, "tuned", 1.6, true_cfg_scale=wrong),
            pytest.raises(ValueError, match="called with"),
        ):
            draw_qwen(qwen_pipe, 1)
    with rlg_pipeline(pipe, "tuned", 1.6):
        pipe.scheduler = FlowMatchEulerDiscreteScheduler()
        with pytest.raises(ValueError, match="another scheduler"):
            draw_flux(pipe, 1)
    x = torch.zeros(2, 16, 16)
    with rlg_pipeline(pipe, "tuned", rl_outside(1.6, 0.0, 0.5)):
        with pytest.raises(ValueError, match="own loop"):
            pipe.transformer(x)
        pipe.scheduler.set_timesteps(4)
        with pytest.raises(ValueError, match="image-to-image"):
            pipe.scheduler.step(x, pipe.scheduler.timesteps[1], x)
    layer = adapter_layers(pipe.transformer)[0]
    layer.merge()
    with pytest.raises(ValueError, match="unfuse"), rlg_pipeline(pipe, "tuned", 1.6):
        pass
    layer.unmerge()
    pipe.transformer.enable_cache(diffusers.FirstBlockCacheConfig(threshold=0.1))
    with pytest.raises(ValueError, match="caches"), rlg_pipeline(pipe, "tuned", 1.6):
        pass
    pipeline, _ = adapted(tiny_sd3_folder)
    pipeline.pipe.text_encoder.add_adapter(LoraConfig(r=2, target_modules=["q_proj"]), "default")
    with pytest.raises(ValueError, match="also changes the text_encoder"), rlg_pipeline(pipeline.pipe, "default", 1.6):
        pass


# ---- our own pipelines -----------------------------------------------------------------------------------------------


def write_lora(folder: Path, model: Path, *, seed: int, rank: int = RANK) -> Path:
    """A LoRA that does something, as a run saves it."""
    pipeline = load_tiny(model)
    policy = Policy(pipeline.denoiser, rank=rank, alpha=ALPHA, targets=pipeline.lora_targets, seed=seed)
    fill_lora(policy, seed)
    folder.mkdir()
    pipeline.save_lora(folder, policy.peft_tensors(), policy.config)
    return folder


@pytest.mark.slow
def test_saved_loras_guide_side_by_side(tiny_sd3_folder: Path, tmp_path: Path) -> None:
    folders = [write_lora(tmp_path / f"lora{k}", tiny_sd3_folder, seed=k, rank=RANK + k) for k in range(2)]
    pipeline = load_tiny(tiny_sd3_folder)
    names = add_experts(pipeline, folders)
    schedule, x = pipeline.schedule(1, "diffusers"), start_noise(pipeline, 2)

    def latents(*scales: float) -> Tensor:
        velocity = rlg_velocity(pipeline, names, PROMPTS[:2], scales, guidance_scale=4.0)
        with torch.no_grad():
            return rollout(velocity, x, schedule, KERNELS["ode"], lambda step: x, stochastic=()).final

    base = sample_ode(load_tiny(tiny_sd3_folder), PROMPTS[:2], 4.0, 1)
    assert torch.equal(latents(0, 0), base)
    alone = []
    for k, folder in enumerate(folders):
        single = load_tiny(tiny_sd3_folder)
        add_adapter(single.denoiser, folder, "only")
        alone.append(sample_ode(single, PROMPTS[:2], 4.0, 1))
        assert torch.equal(latents(*(float(j == k) for j in range(2))), alone[k])
        assert not torch.equal(alone[k], base)
    wanted = base + 0.5 * (alone[0] - base) + 1.5 * (alone[1] - base)
    assert_same_sum(latents(0.5, 1.5), wanted)
    assert not any(parameter.requires_grad for parameter in pipeline.denoiser.parameters())


def test_slots_of_a_policy_guide(tiny_sd3_folder: Path) -> None:
    pipeline, policy = adapted(tiny_sd3_folder)
    policy.add_slot("old")
    fill_lora(policy, 7)
    cond, x = pipeline.encode(PROMPTS[:2]), start_noise(pipeline, 2)
    half, time = torch.tensor(0.5), torch.tensor(500.0)
    with torch.no_grad():
        found = [
            conditioned(slot_network(pipeline.network, policy, slot), cond) for slot in ("reference", "policy", "old")
        ]
        base, tuned, old = (velocity(x, half, time) for velocity in found)
        assert not torch.equal(tuned, old)
        assert_same_sum(rlg(found[0], found[1], 2.0)(x, half, time), 2 * tuned - base)
        assert_same_sum(rlg(found[2], found[1], 2.0)(x, half, time), 2 * tuned - old)


def test_adapters_refuse_what_does_not_fit(tiny_sd3_folder: Path, tmp_path: Path) -> None:
    folder = write_lora(tmp_path / "lora", tiny_sd3_folder, seed=0)
    transformer = load_tiny(tiny_sd3_folder).denoiser
    add_adapter(transformer, folder, "one")
    for name in ("one", "a.b"):
        with pytest.raises(ValueError, match="new and without a dot"):
            add_adapter(transformer, folder, name)
    (tmp_path / "none").mkdir()
    with pytest.raises(ValueError, match="no LoRA"):
        add_adapter(transformer, tmp_path / "none", "two")


# ---- flowrl sample ---------------------------------------------------------------------------------------------------


def sample(source: Path, out: Path, **given: Any) -> None:
    """Draws one prompt and seed."""
    plain: dict[str, Any] = {"steps": 3, "guidance": 2.0, "max_sequence_length": CONTEXT, "device": "cpu"}
    flowrl.sample(source, "a red circle", out=out, **plain | given)


@pytest.mark.slow
def test_sample_under_guidance(tiny_sd3_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders = [write_lora(tmp_path / f"lora{k}", tiny_sd3_folder, seed=k) for k in range(2)]

    def files(name: str, **given: Any) -> list[bytes]:
        sample(tiny_sd3_folder, tmp_path / name, **given)
        return [path.read_bytes() for path in sorted((tmp_path / name).glob("0*.png"))]

    base, tuned = files("base"), files("tuned", lora=[folders[0]])
    assert base != tuned
    assert files("zero", lora=folders, rlg="0,0") == base
    assert files("one", lora=folders, rlg="1,0") == tuned
    capsys.readouterr()
    guided = files("guided", lora=[folders[0]], rlg="3")
    assert "RLG 3: 4 network rows per image and step, 2 for the tuned model alone" in capsys.readouterr().out
    late = files("late", lora=[folders[0]], rlg="3", rlg_from=2)
    freer = files("freer", lora=[folders[0]], rlg="3", rlg_interval="0,1", base_guidance=1.0)
    assert "RLG 3 at sigma 0 to 1: 3 network rows" in capsys.readouterr().out
    assert all(a != b for a, b in combinations([base, tuned, guided, late, freer], 2))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"rlg": "1.6"}, "none was given"),
        ({"rlg": "1.6", "lora": ["a", "b"]}, "one scale for each LoRA"),
        ({"lora": ["a", "b"]}, "add `rlg` with a scale for each"),
        ({"rlg": "1.6,1", "lora": ["a", "b"], "rlg_from": 1}, "tuned model alone"),
        ({"rlg": "1.6", "lora": ["a"], "rlg_from": 1, "rlg_interval": "0,1"}, "give one of them"),
        ({"rlg": "much", "lora": ["a"]}, "numbers separated by commas"),
        ({"rlg": "nan", "lora": ["a"]}, "finite"),
        ({"rlg": "2", "lora": ["a"], "rlg_interval": "0.5"}, "LOW,HIGH"),
        ({"rlg": "2", "lora": ["a"], "rlg_interval": "0.8,0.2"}, "low <= high"),
        ({"rlg": "2", "lora": ["a"], "rlg_from": -1}, "negative"),
        ({"rlg": "2", "lora": ["a"], "rlg_from": 3}, "leaves no step"),
        ({"rlg_from": 2}, "`rlg_from` says how"),
        ({"rlg": "2", "before_training": True}, "`before_training`"),
    ],
)
def test_sample_refuses(tiny_sd3_folder: Path, tmp_path: Path, given: dict[str, Any], message: str) -> None:
    given = given | {"lora": [tmp_path / name for name in given.get("lora", [])]}
    with pytest.raises(flowrl.FlowrlError, match=message):
        sample(tiny_sd3_folder, tmp_path / "out", **given)


@pytest.mark.slow
def test_what_is_said_of_guidance(tiny_sd3_folder: Path) -> None:
    settings = RLG(loras=(Path("a"),), scales=(1.6,), first_steps=1)
    assert settings.describe(load_tiny(tiny_sd3_folder).schedule(2, "diffusers"), 1.0) == (
        "RLG 1.6 after 1 of 2 steps: 2 network rows per image and step, 1 for the tuned model alone"
    )
