"""Pipeline folders of older releases of diffusers and transformers, as the hub has them, load to the same model."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from diffusers import AutoencoderKL
from safetensors.torch import load_file, save_file
from tiny_sd import save_tiny_sd
from torch import Tensor, nn

from flowrl.pipelines.families.sd import FAMILY
from flowrl.runtime.files import read_json

OLDER_ATTENTION = {"to_q": "query", "to_k": "key", "to_v": "value", "to_out.0": "proj_attn"}
"""Names of a VAE's attention since diffusers 0.18, and those before it: Stable Diffusion 1 and 2, XL."""


def renamed(path: Path, how: Callable[[str], str], *, pickled: bool, more: dict[str, Tensor] | None = None) -> None:
    """Changes the names of a file's tensors, adds some, and perhaps keeps them as diffusers did before safetensors."""
    found = {how(name): tensor for name, tensor in load_file(path).items()} | (more or {})
    if pickled:
        name = "pytorch_model.bin" if path.name == "model.safetensors" else "diffusion_pytorch_model.bin"
        torch.save(found, path.with_name(name))
        path.unlink()
    else:
        save_file(found, path, metadata={"format": "pt"})


def older_attention(name: str) -> str:
    for new, old in OLDER_ATTENTION.items():
        name = name.replace(f"attentions.0.{new}.", f"attentions.0.{old}.")
    return name


@pytest.fixture(scope="module")
def today(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Stable Diffusion 1 as this release saves it, with attention in the middle of its VAE."""
    folder = save_tiny_sd(tmp_path_factory.mktemp("sd") / "today")
    torch.manual_seed(1)
    config = dict(AutoencoderKL.load_config(folder / "vae"))
    AutoencoderKL.from_config(config | {"mid_block_add_attention": True}).save_pretrained(folder / "vae")
    return folder


def older(today: Path, folder: Path, *, pickled: bool) -> Path:
    """The same model in the layout of 2022."""
    shutil.copytree(today, folder)
    vae = folder / "vae" / "diffusion_pytorch_model.safetensors"
    names = [older_attention(name) for name in load_file(vae)]
    assert sum(name.endswith("attentions.0.query.weight") for name in names) == 2
    renamed(vae, older_attention, pickled=pickled)
    text = folder / "text_encoder" / "model.safetensors"
    positions = {"text_model.embeddings.position_ids": torch.arange(16)[None]}
    renamed(text, lambda name: f"text_model.{name.removeprefix('text_model.')}", pickled=pickled, more=positions)
    unet = folder / "unet" / "diffusion_pytorch_model.safetensors"
    renamed(unet, str, pickled=pickled)
    index = read_json(folder / "model_index.json")
    index |= {
        "_diffusers_version": "0.2.2", "feature_extractor": ["transformers", "CLIPFeatureExtractor"],
        "safety_checker": ["stable_diffusion", "StableDiffusionSafetyChecker"],
    }  # fmt: skip
    for key in ("image_encoder", "requires_safety_checker"):
        index.pop(key, None)
    (folder / "model_index.json").write_text(json.dumps(index))
    config = read_json(folder / "vae" / "config.json")
    for key in ("mid_block_add_attention", "scaling_factor", "shift_factor", "use_quant_conv", "use_post_quant_conv"):
        config.pop(key, None)
    (folder / "vae" / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("pickled", [False, True])
def test_stable_diffusion_of_2022_is_the_same_model(today: Path, tmp_path: Path, pickled: bool) -> None:
    """Every weight of text encoder, denoiser and autoencoder, to the bit, and the scale of latents."""
    wanted, found = (
        FAMILY.load(str(folder), dtype=torch.float32)
        for folder in (today, older(today, tmp_path / "older", pickled=pickled))
    )
    for name in ("text_encoder", "vae"):
        equal(getattr(wanted.pipe, name), getattr(found.pipe, name))
    equal(wanted.denoiser, found.denoiser)
    assert found.pipe.vae.config.scaling_factor == wanted.pipe.vae.config.scaling_factor == 0.18215
    assert any("attentions.0.to_q" in name for name, _ in found.pipe.vae.named_parameters())


def equal(one: nn.Module, other: nn.Module) -> None:
    weights = dict(one.named_parameters())
    assert weights.keys() == dict(other.named_parameters()).keys()
    assert all(torch.equal(weights[name], value) for name, value in other.named_parameters())
