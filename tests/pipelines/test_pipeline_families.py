"""What every model family owes: a whole module, a published configuration, and a training iteration from end to end.

A new family is found by its entry in `PIPELINES` alone; what it lacks fails here by name.
"""

from __future__ import annotations

import importlib
import inspect
import json
import typing
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from PIL import Image

from flowrl.commands.train.run import train
from flowrl.config.sections import Family
from flowrl.config.train import load_config
from flowrl.pipelines import PIPELINES, STOCK, Pipeline, family, family_of
from flowrl.pipelines.lora import check_targets

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
TINY = {
    "cogvideox": "tiny_cogvideox", "flux": "tiny_flux", "flux2": "tiny_flux2", "hunyuan_video": "tiny_hunyuan_video",
    "kontext": "tiny_flux:save_tiny_kontext", "ltx_video": "tiny_ltx_video", "qwen_image": "tiny_qwen_image",
    "qwen_image_edit": "tiny_qwen_image:save_tiny_qwen_image_edit", "sana": "tiny_sana", "sd": "tiny_sd",
    "sd3": "tiny_models:save_tiny_sd3", "sdxl": "tiny_sd:save_tiny_sdxl", "wan": "tiny_wan", "z_image": "tiny_z_image",
}  # fmt: skip
"""Family -> module in tests/ that writes its smallest folder, and the function where it is not `save_tiny_<family>`."""
_CLIP = {"height": 32, "width": 48, "num_frames": 5, "fps": 8.0, "max_sequence_length": 16}
SETTINGS: dict[str, dict[str, Any]] = {
    "cogvideox": {**_CLIP, "num_frames": 9}, "hunyuan_video": _CLIP, "wan": _CLIP,
    "ltx_video": {**_CLIP, "width": 64, "num_frames": 9},
    "flux": {"height": 32, "width": 32, "max_sequence_length": 16},
    "flux2": {"height": 64, "width": 64, "max_sequence_length": 64},
    "kontext": {"height": 32, "width": 32, "max_sequence_length": 16},
    "qwen_image": {"height": 16, "width": 16, "max_sequence_length": 24},
    "qwen_image_edit": {"height": 16, "width": 16, "max_sequence_length": 128},
    "sana": {"max_sequence_length": 16},
    "sd3": {"max_sequence_length": 16},
    "z_image": {"height": 16, "width": 16, "max_sequence_length": 24},
}  # fmt: skip
"""Family -> settings of its tiny folder that are not the family's own."""

REWARDS = """
def darkness(images, prompts, metadata):
    return -images.mean((1, 2, 3))
"""


def save_tiny(name: str, folder: Path) -> Path:
    module, _, function = TINY[name].partition(":")
    saved: Path = getattr(importlib.import_module(module), function or f"save_tiny_{name}")(folder)
    return saved


def test_tables_name_the_same_families() -> None:
    assert set(typing.get_args(Family)) == set(PIPELINES) == set(TINY)
    assert set(STOCK.values()) == set(PIPELINES)


@pytest.mark.parametrize("name", PIPELINES)
def test_module_is_whole(name: str) -> None:
    module = family(name)
    wanted = "load check meta_denoiser LORA_TARGETS KNOWN LICENCES meta_call default_size".split()
    assert [part for part in wanted if not hasattr(module, part)] == []
    assert module.KNOWN, "name at least one published checkpoint"
    assert set(module.KNOWN) == set(module.LICENCES)
    options = inspect.signature(module.load).parameters
    assert all(options[key].kind is inspect.Parameter.KEYWORD_ONLY for key in options if key != "model")
    assert {"dtype", "device", "height", "width", "vae_slice", "gradient_checkpointing"} <= set(options)
    returned = inspect.signature(module.load).return_annotation
    built = getattr(module, returned) if isinstance(returned, str) else returned
    methods = [part for part in vars(Pipeline) if not part.startswith("_") and callable(getattr(Pipeline, part))]
    assert [part for part in methods if not hasattr(built, part)] == []
    for model in module.KNOWN:
        assert family_of(model) == name


@pytest.mark.parametrize("name", PIPELINES)
def test_published_checkpoints_take_the_default_targets(name: str) -> None:
    module = family(name)
    for model in module.KNOWN:
        check_targets(module.meta_denoiser(model), module.LORA_TARGETS)


@pytest.mark.parametrize("name", PIPELINES)
def test_a_configuration_at_published_settings_is_shipped(name: str) -> None:
    found = [path for path in CONFIGS.glob("*.yaml") if not path.name.startswith("tiny_") and _family(path) == name]
    assert found, f"write configs/<model>_....yaml with pipeline.name {name}"
    models = {load_config(path).pipeline.model for path in found}
    assert models & set(family(name).KNOWN), f"none of {models} is in KNOWN"


def _family(path: Path) -> str:
    return load_config(path).pipeline.name


@pytest.mark.slow
@pytest.mark.parametrize("name", PIPELINES)
def test_one_training_iteration(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Command to LoRA file: roll out, score, update, evaluate, save; the first ratio is exactly 1."""
    folder = save_tiny(name, tmp_path / "model")
    module, sources = family(name), _sources(tmp_path)
    loaded = module.load(str(folder), dtype=torch.float32, **SETTINGS.get(name, {}))
    least = loaded.num_sources[0]
    rows = [{"prompt": text, **({"sources": sources[:least]} if least else {})} for text in ("a red fox", "a blue cat")]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "rewards.py").write_text(REWARDS)
    config: dict[str, Any] = {
        "num_iterations": 1, "prompts_per_step": 2, "group_size": 2, "eval_every": 1, "progress": False,
        "out": str(tmp_path / "run"), "threads": 1,
        "pipeline": {"name": name, "model": str(folder), "dtype": "float32", "device": "cpu",
                     **SETTINGS.get(name, {})},
        "policy": {"lora_rank": 2},
        "sampler": {"kernel": "flow_sde", "noise_level": 0.3, "num_steps": 3, "guidance_scale": 2.0,
                    "sde_window_range": [0, 2]},
        "prompts": {"train": str(tmp_path / "prompts.jsonl"), "eval": str(tmp_path / "prompts.jsonl")},
        "rewards": [{"file": str(tmp_path / "rewards.py"), "function": "darkness"}],
        "eval": {"num_images": 2},
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
