"""What every model family owes: a whole module, a published configuration, and a training iteration from end to end.

A new family is found by its entry in `PIPELINES` alone; what it lacks fails here by name.
"""

from __future__ import annotations

import importlib
import json
from functools import cache
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
import yaml
from flow_family import published
from PIL import Image
from tiny_folders import SETTINGS, TINY, save_tiny
from torch import Tensor
from train_command import train

from flowrl.config.base import config_files
from flowrl.config.train import load_config
from flowrl.generation.prompt_checks import sources_taken
from flowrl.media.videos import save_mp4
from flowrl.pipelines import PIPELINES, Pipeline, family, family_name, family_of
from flowrl.pipelines.shared.family_pipeline import FamilyPipeline
from flowrl.runtime.randomness import counter_normal
from flowrl.trajectory import Conditioning

REWARDS = """
def darkness(images, prompts, metadata):
    return -images.mean((1, 2, 3))
"""


def test_every_family_has_a_tiny_one_here() -> None:
    assert set(PIPELINES) == set(TINY)


@pytest.mark.parametrize("name", PIPELINES)
def test_family_is_whole(name: str) -> None:
    known = importlib.import_module(PIPELINES[name]).FAMILY
    assert known.name == name
    assert published(known), "name at least one published checkpoint"
    assert {family_of(model) for model in published(known)} == {name}
    assert set(known.stock) <= set(dir(diffusers))  # which imports none: an older transformers may lack what one needs
    methods = [part for part in vars(Pipeline) if not part.startswith("_") and callable(getattr(Pipeline, part))]
    assert [part for part in methods if not hasattr(FamilyPipeline, part)] == []


@pytest.mark.parametrize("name", PIPELINES)
def test_published_checkpoints_pass_the_checks_with_the_default_targets(name: str) -> None:
    for model in published(family(name)):
        family(name).check(model, family(name).lora_targets)


@cache
def shipped() -> list[tuple[str | None, str]]:
    """Family, where it is named, and model of each configuration that is no tiny one's."""
    paths = [path for name, path in config_files().items() if not name.startswith("tiny_")]
    return [(found.name, found.model) for found in (load_config(path).pipeline for path in paths)]


@pytest.mark.slow
@pytest.mark.parametrize("name", PIPELINES)
def test_a_configuration_at_published_settings_is_shipped(name: str) -> None:
    models = {model for named, model in shipped() if named == name or model in published(family(name))}
    assert models & set(published(family(name))), f"write configs/{name}/<model>_....yaml for a published model"


# ---- which family a configuration means ------------------------------------------------------------------------------


def test_the_family_is_that_of_the_model_unless_it_is_named(tmp_path: Path) -> None:
    index = tmp_path / "model_index.json"
    index.write_text(json.dumps({"_class_name": "FluxKontextPipeline"}), encoding="utf-8")
    assert family_name(None, str(tmp_path)) == "kontext"
    assert family_name(None, "Qwen/Qwen-Image") == "qwen_image"
    assert family_name("sdxl", "someone/a-fine-tune") == "sdxl"


@pytest.mark.parametrize(
    ("name", "model", "message"),
    [
        ("sd3", "black-forest-labs/FLUX.1-dev", r"FLUX\.1-dev is of the family flux, got pipeline\.name=sd3: leave"),
        (
            "sd35",
            "someone/a-fine-tune",
            rf"unknown pipeline\.name 'sd35' \(did you mean 'sd3'\?\); allowed: {next(iter(PIPELINES))}, ",
        ),
        (None, "someone/a-fine-tune", rf"set pipeline\.name to its family, one of {', '.join(PIPELINES)}, or have it"),
    ],
)
def test_a_family_that_is_not_the_models_is_refused(name: str | None, model: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        family_name(name, model)


def test_options_that_have_a_key_of_their_own_or_none_are_refused() -> None:
    with pytest.raises(ValueError, match=r"pipeline\.options\.height is the key pipeline\.height"):
        family("sd3").check_options({"height": 64})
    with pytest.raises(ValueError, match=r"pipeline 'flux2': unknown key 'max_refrences'.*max_references"):
        family("flux2").check_options({"max_refrences": 1})


# ---- from end to end -------------------------------------------------------------------------------------------------


def check_plan_calls_the_network_as_it_is_called(name: str, folder: Path, loaded: Any, prompts: Any) -> None:
    """The arguments that `flowrl plan` measures have the names and shapes of a real call's."""
    known, settings = family(name), SETTINGS.get(name, {})
    size = known.planned_size(str(folder), settings)
    frames = () if size.num_frames is None else (size.num_frames,)
    assert (*frames, 3, size.height, size.width) == loaded.image_shape
    assert known.rows(str(folder), 2.0) == loaded.passes(2.0)
    planned = known.meta_call(str(folder), size, known.text_tokens(str(folder), settings))
    seen: list[dict[str, Any]] = []
    hook = loaded.denoiser.register_forward_pre_hook(lambda part, _, given: seen.append(given), with_kwargs=True)
    cond, negative = (loaded.encode([text], prompts) for text in ("a red fox", ""))
    x = torch.zeros(1, *loaded.latent_shape)
    with torch.no_grad():
        loaded.guided(loaded.network, cond, negative, 2.0)(x, torch.tensor([0.5]), torch.tensor([500.0]))
    hook.remove()
    called = {key for key, value in seen[0].items() if value is not None}
    assert called - {"encoder_hidden_states_mask"} == {key for key, value in planned.items() if value is not None}
    for key in {"hidden_states", "sample", "img_ids", "img_shapes"} & called:
        shapes = [
            value.shape[-2:] if isinstance(value, Tensor) else value[:1] for value in (seen[0][key], planned[key])
        ]
        assert shapes[0] == shapes[1], key


def check_the_negative_half_is_trained_as_told(loaded: Any, given: Any) -> None:
    """Values agree however the negative half is trained; its gradient is whole, or that of a constant."""
    cond, against = loaded.encode(["a red fox", "a red fox"], given), loaded.encode([""], given and given[:1])
    scale, b = 2.5, 2
    x = counter_normal((b, *loaded.latent_shape), "negative half").requires_grad_()
    noise, calls = counter_normal(x.shape, "weights"), list[int]()

    def detached(x: Tensor, timestep: Tensor, cond: Conditioning) -> Tensor:
        """The network, but what it says without the prompt, which it is asked first, is a constant."""
        calls.append(len(x))
        out: Tensor = loaded.network(x, timestep, cond)
        constant = b if len(calls) == 1 and loaded.passes(scale) == 2 else 0
        return torch.cat([out[:constant].detach(), out[constant:]])

    def answers(network: Any, train: Any = True) -> tuple[Tensor, Tensor]:
        out = loaded.guided(network, cond, against, scale, train)(x, torch.tensor(0.5), torch.tensor(500.0))
        return out.detach(), torch.autograd.grad((out * noise).sum(), x)[0]

    whole, by_hand = answers(loaded.network), answers(detached)
    constant, recomputed = answers(loaded.network, False), answers(loaded.network, "recompute")
    assert torch.equal(constant[0], recomputed[0])
    for found, wanted in ((recomputed, whole), (constant, by_hand)):
        for ours, exact in zip(found, wanted, strict=True):  # calls of b and of 2b rows round differently
            torch.testing.assert_close(ours, exact, rtol=1e-4, atol=1e-5 * float(exact.abs().max()))
    assert ((whole[1] - by_hand[1]).norm() > 1e-2 * whole[1].norm()) == (loaded.passes(scale) == 2)


@pytest.mark.slow
@pytest.mark.parametrize("name", PIPELINES)
def test_one_training_iteration(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Command to LoRA file: roll out, score, update, evaluate, save; the first ratio is exactly 1."""
    folder = save_tiny(name, tmp_path / "model")
    sources = _sources(tmp_path)
    loaded = family(name).load(str(folder), dtype=torch.float32, **SETTINGS.get(name, {}))
    taken, clips = sources_taken(family(name), str(folder), {}), family(name).needed_clips
    assert taken is not None
    least = taken[0]
    one_row = [*[torch.rand(5, 3, 32, 48)] * len(clips), *[torch.rand(3, 32, 40)] * least]
    given = [one_row] if one_row else None
    check_plan_calls_the_network_as_it_is_called(name, folder, loaded, given)
    check_the_negative_half_is_trained_as_told(loaded, given and given * 2)
    for clip in clips:
        save_mp4(torch.rand(5, 3, 64, 96), tmp_path / f"{clip}.mp4", 8.0)
    named: dict[str, Any] = {"sources": sources[:least]} if least else {}
    named |= {clip: f"{clip}.mp4" for clip in clips}
    rows = [{"prompt": text, **named} for text in ("a red fox", "a blue cat")]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "rewards.py").write_text(REWARDS)
    config: dict[str, Any] = {
        "num_iterations": 1, "prompts_per_step": 2, "group_size": 2, "eval_every": 1, "progress": False,
        "out": str(tmp_path / "run"), "threads": 1,
        "pipeline": {"model": str(folder), "dtype": "float32", "device": "cpu",
                     **SETTINGS.get(name, {})},
        "policy": {"lora_rank": 2},
        "sampler": {"kernel": "flow_sde", "noise_level": 0.3, "num_steps": 2, "guidance_scale": 2.0,
                    "sde_window_range": [0, 1]},
        "prompts": {"train": str(tmp_path / "prompts.jsonl"), "eval": str(tmp_path / "prompts.jsonl")},
        "rewards": [{"file": str(tmp_path / "rewards.py"), "function": "darkness"}],
        "eval": {"num_images": 1, "initial": False},
        "logging": {"tensorboard": False},
    }  # fmt: skip
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    assert train(str(tmp_path / "run.yaml"), []) == 0
    capsys.readouterr()
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    trained = next(row for row in lines if "ratio_first_deviation" in row)
    assert trained["ratio_first_deviation"] == 0
    assert trained["grad_norm"] > 0
    assert (tmp_path / "run" / "lora" / "pytorch_lora_weights.safetensors").is_file()
    kept = {path.suffix for path in (tmp_path / "run" / "samples" / "iteration_000001").iterdir()}
    assert kept == ({".mp4", ".png"} if loaded.fps else {".png"})
    assert (tmp_path / "run" / "samples" / "sources").is_dir() == bool(least)
    assert (tmp_path / "run" / "report.html").stat().st_size > 10_000


def _sources(folder: Path) -> list[str]:
    names = []
    for number, color in enumerate(("red", "blue", "green")):
        Image.new("RGB", (40, 32), color).save(folder / f"{number}.png")
        names.append(f"{number}.png")
    return names
