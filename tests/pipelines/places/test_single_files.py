"""A checkpoint in one file, with the keys that communities use: what it is, that it loads and draws the same."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import diffusers
import pytest
import torch
from diffusers.loaders.single_file_utils import DIFFUSERS_TO_LDM_MAPPING
from safetensors.torch import load_file, save_file
from tiny_sd import save_tiny_sd
from torch import Tensor

from flowrl.generation.models import find_source, fingerprint
from flowrl.pipelines import Pipeline, family, family_name, family_of
from flowrl.pipelines.places import single_files
from flowrl.pipelines.weights.loading_choices import Loading
from flowrl.runtime.randomness import counter_normal

UNET = [
    (r"^down_blocks\.(\d+)\.resnets\.(\d+)", lambda b, i: f"input_blocks.{1 + 2 * b + i}.0"),
    (r"^down_blocks\.(\d+)\.attentions\.(\d+)", lambda b, i: f"input_blocks.{1 + 2 * b + i}.1"),
    (r"^down_blocks\.(\d+)\.downsamplers\.(\d+)\.conv", lambda b, i: f"input_blocks.{2 + 2 * b}.0.op"),
    (r"^mid_block\.resnets\.(\d+)", lambda i: f"middle_block.{2 * i}"),
    (r"^mid_block\.attentions\.(\d+)", lambda i: "middle_block.1"),
    (r"^up_blocks\.(\d+)\.resnets\.(\d+)", lambda b, i: f"output_blocks.{2 * b + i}.0"),
    (r"^up_blocks\.(\d+)\.attentions\.(\d+)", lambda b, i: f"output_blocks.{2 * b + i}.1"),
    (r"^up_blocks\.(\d+)\.upsamplers\.(\d+)\.conv", lambda b, i: f"output_blocks.{2 * b + 1}.2.conv"),
]
"""Blocks of a UNet with one layer in each, in the names of the first Stable Diffusion."""
RESNET = {"norm1": "in_layers.0", "conv1": "in_layers.2", "norm2": "out_layers.0", "conv2": "out_layers.3",
          "time_emb_proj": "emb_layers.1", "conv_shortcut": "skip_connection"}  # fmt: skip
VAE = [
    (r"^encoder\.down_blocks\.(\d+)\.resnets\.(\d+)", lambda b, i: f"encoder.down.{b}.block.{i}"),
    (r"^encoder\.down_blocks\.(\d+)\.downsamplers\.(\d+)", lambda b, i: f"encoder.down.{b}.downsample"),
    (r"^encoder\.mid_block\.resnets\.(\d+)", lambda i: f"encoder.mid.block_{i + 1}"),
    (r"^decoder\.up_blocks\.(\d+)\.resnets\.(\d+)", lambda b, i: f"decoder.up.{3 - b}.block.{i}"),
    (r"^decoder\.up_blocks\.(\d+)\.upsamplers\.(\d+)", lambda b, i: f"decoder.up.{3 - b}.upsample"),
    (r"^decoder\.mid_block\.resnets\.(\d+)", lambda i: f"decoder.mid.block_{i + 1}"),
]


def renamed(key: str, blocks: list, layers: dict[str, str], plain: dict[str, str]) -> str:  # type: ignore[type-arg]
    for pattern, name in blocks:
        if found := re.match(pattern, key):
            rest = key[found.end() :]
            for new, old in layers.items():
                rest = re.sub(rf"^\.{new}\.", f".{old}.", rest)
            return str(name(*map(int, found.groups()))) + rest
    return plain[key]


def in_one_file(folder: Path, file: Path) -> Path:
    """The weights of a Stable Diffusion folder in one file, as they were published first."""
    pipe = diffusers.StableDiffusionPipeline.from_pretrained(folder)
    tensors: dict[str, Tensor] = {}
    for key, tensor in pipe.unet.state_dict().items():
        name = renamed(key, UNET, RESNET, DIFFUSERS_TO_LDM_MAPPING["unet"]["layers"])
        tensors[f"model.diffusion_model.{name}"] = tensor.contiguous()
    for key, tensor in pipe.vae.state_dict().items():
        name = renamed(key, VAE, {"conv_shortcut": "nin_shortcut"}, DIFFUSERS_TO_LDM_MAPPING["vae"])
        tensors[f"first_stage_model.{name}"] = tensor.contiguous()
    for key, tensor in pipe.text_encoder.state_dict().items():
        name = key if key.startswith("text_model.") else f"text_model.{key}"
        tensors[f"cond_stage_model.transformer.{name}"] = tensor.contiguous()
    save_file(tensors, file)
    return file


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_sd(tmp_path_factory.mktemp("stock") / "sd")


@pytest.fixture(scope="module")
def file(stock: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A single file with a folder of small files beside it."""
    place = tmp_path_factory.mktemp("single")
    ignore = shutil.ignore_patterns("*.safetensors", "*.bin")
    shutil.copytree(stock, place / "dreams", ignore=ignore)
    return in_one_file(stock, place / "dreams.safetensors")


def drawn(pipeline: Pipeline) -> tuple[Tensor, Tensor]:
    """A velocity and an image of a pipeline."""
    cond = pipeline.encode(["a photo of a red circle"])
    x = counter_normal((1, *pipeline.latent_shape), "single file")
    with torch.no_grad():
        return pipeline.network(x, torch.tensor([500.0]), cond), pipeline.decode(x)


@pytest.mark.parametrize("later", [False, True])
def test_a_single_file_gives_what_its_folder_gives(stock: Path, file: Path, later: bool) -> None:
    assert family_of(str(file)) == family_name("sd", str(file)) == "sd"
    made = family("sd")
    made.check(str(file), made.lora_targets, 4)
    assert made.planned_size(str(file), {}) == made.planned_size(str(stock), {})
    pipelines = [
        made.load(str(place), dtype=torch.float32, how=Loading(later=later), max_sequence_length=16)
        for place in (stock, file)
    ]
    for pipeline in pipelines:
        pipeline.load_text_encoders()
        pipeline.load_denoiser()
    for part in ("unet", "vae", "text_encoder"):
        whole, single = (getattr(pipeline.pipe, part).state_dict() for pipeline in pipelines)  # type: ignore[attr-defined]
        assert whole.keys() == single.keys()
        assert all(torch.equal(whole[key], single[key]) for key in whole)
    for one, other in zip(*map(drawn, pipelines), strict=True):
        assert (one - other).abs().max() <= 1e-5 * one.abs().max()  # weights lie elsewhere in memory: other kernels


@pytest.mark.parametrize("beside", ["scale_weight", "weight_scale_inv", "comfy_quant", "weight.absmax", "lora_A"])
def test_scaled_weights_are_refused_by_name(beside: str, file: Path, tmp_path: Path) -> None:
    """A loader of single files takes the weights and leaves the scales."""
    key = "model.diffusion_model.input_blocks.1.1.proj_in"
    shutil.copytree(file.with_suffix(""), tmp_path / "config")
    save_file(load_file(file) | {f"{key}.{beside}": torch.ones(1)}, tmp_path / "few.safetensors")
    for ask in (family_of, lambda model: family("sd").load(model, dtype=torch.float32)):
        with pytest.raises(ValueError, match=rf"beside its weights \(1, first {key}\.{beside}\)"):
            ask(str(tmp_path / "few.safetensors"))


def test_a_wrong_family_of_a_file_is_refused(file: Path) -> None:
    with pytest.raises(ValueError, match=r"is of the family sd, got pipeline\.name=sdxl"):
        family_name("sdxl", str(file))


def test_without_small_files_it_says_which_and_where(file: Path, tmp_path: Path) -> None:
    alone = Path(shutil.copy(file, tmp_path / "alone.safetensors"))
    known = "stable-diffusion-v1-5/stable-diffusion-v1-5"
    assert single_files.config_of(str(alone)) == known
    assert family_of(str(alone)) == "sd"
    assert family("sd").planned_size(str(alone), {}) == family("sd").planned_size(known, {})
    with pytest.raises(ValueError, match=rf"holds weights alone, as {known} has them.*scheduler, tokenizers.*/alone"):
        family("sd").load(str(alone), dtype=torch.float32)
    source = find_source(str(alone))
    assert (source.family, fingerprint(source)) == ("sd", fingerprint(find_source(str(alone))))


def test_only_the_header_is_read_and_other_files_are_refused(tmp_path: Path) -> None:
    sparse = tmp_path / "large.safetensors"  # a header, and a gigabyte that is not there
    keys = {"model.diffusion_model.input_blocks.0.0.weight": [320, 4, 3, 3],
            "conditioner.embedders.1.model.transformer.resblocks.9.mlp.c_proj.bias": [1280]}  # fmt: skip
    at, entries = 0, {}
    for key, shape in keys.items():
        size = 4 * torch.Size(shape).numel()
        entries[key] = {"dtype": "F32", "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(entries | {"rest": {"dtype": "F32", "shape": [2**28], "data_offsets": [at, at + 2**30]}}).encode()
    with sparse.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        stream.truncate(8 + len(text) + at + 2**30)
    assert family_of(str(sparse)) == "sdxl"
    damaged = tmp_path / "damaged.safetensors"
    damaged.write_bytes(b"<html>not found</html>")
    with pytest.raises(ValueError, match=r"damaged\.safetensors is damaged or no file of weights"):
        family_of(str(damaged))
    save_file({"unet.down.lora_A.weight": torch.zeros(2, 2)}, tmp_path / "lora.safetensors")
    with pytest.raises(ValueError, match=r"of no model that diffusers knows in a single file .* set policy\.init_lora"):
        family_of(str(tmp_path / "lora.safetensors"))
