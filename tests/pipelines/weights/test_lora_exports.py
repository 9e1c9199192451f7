"""LoRAs in other programs' forms: stock diffusers loads every written file, and adds by it what the run's LoRA adds."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from diffusers import DiffusionPipeline
from peft import LoraConfig, PeftModel
from peft.tuners.lora import LoraLayer
from rounding import assert_same_sum
from safetensors.torch import load_file
from tiny_folders import save_tiny
from tiny_wan import save_tiny_wan
from torch import Tensor, nn

from flowrl.cli import main
from flowrl.generation.models import Source, find_source
from flowrl.pipelines import family
from flowrl.pipelines.shared.common import save_lora
from flowrl.publishing.export import files_of_form
from flowrl.publishing.lora_exports import SavedLora, comfyui_tensors, kohya_tensors

RANK, ALPHA = 2, 3.0  # a scale that is no power of two


def write_random(pipe: Any, name: str, folder: Path, variant: str = "lora") -> dict[str, Tensor]:
    """Writes a random LoRA on the family's own targets; returns what it adds to each layer's weight."""
    part = "unet" if hasattr(pipe, "unet") else "transformer"
    targets = family(name).lora_targets
    generator, tensors, added = torch.Generator().manual_seed(0), dict[str, Tensor](), dict[str, Tensor]()
    for layer, module in getattr(pipe, part).named_modules():
        if isinstance(module, nn.Linear) and layer.endswith(tuple(f".{target}" for target in targets)):
            down = torch.randn(RANK, module.in_features, generator=generator)
            up = torch.randn(module.out_features, RANK, generator=generator)
            tensors |= {f"{layer}.lora_A.weight": down, f"{layer}.lora_B.weight": up}
            added[layer] = (ALPHA / (RANK**0.5 if variant == "rslora" else RANK)) * up @ down
    config = {"r": RANK, "lora_alpha": ALPHA, "target_modules": list(targets)}
    card = config | ({"use_rslora": True} if variant == "rslora" else {})
    save_lora(type(pipe), folder, tensors, card, (part,), part)
    assert len(added) > 3
    return added


def added_by(network: nn.Module) -> dict[str, Tensor]:
    """What the loaded adapters of a network add to its weights."""
    found = {}
    for name, module in network.named_modules():
        if isinstance(module, LoraLayer) and module.lora_A:
            change = module.get_delta_weight(next(iter(module.lora_A))).detach()  # type: ignore[operator]
            if bool(change.any()):  # a part of a fused layer that was not trained is zero
                found[name.removeprefix("base_model.model.")] = change
    return found


def run_like(folder: Path, name: str, model: Path) -> Path:
    """A folder that looks like a run's, for the command."""
    size = {"height": 32, "width": 48, "num_frames": 5} if name == "wan" else {}
    config = {
        "num_iterations": 1, "prompts_per_step": 1, "group_size": 2,
        "pipeline": {"name": name, "model": str(model), "dtype": "float32"} | size,
        "policy": {"lora_rank": RANK}, "sampler": {"kernel": "flow_sde", "num_steps": 3}, "optim": {"lr": 0.01},
        "prompts": {"train": "asset:prompts/world_train.jsonl"}, "rewards": [{"name": "jpeg"}],
    }  # fmt: skip
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    return folder


WRITTEN = [
    ("sd3", "comfyui"), ("flux", "comfyui"), ("qwen_image", "comfyui"), ("wan", "comfyui"), ("sd", "comfyui"),
    ("sdxl", "comfyui"), ("sd", "kohya"), ("sdxl", "kohya"), ("qwen_image", "kohya"),
    ("sd3", "diffusers"), ("wan", "diffusers"), ("sdxl", "diffusers"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "form"), WRITTEN)
def test_stock_diffusers_takes_back_what_was_written(name: str, form: str, tmp_path: Path) -> None:
    model = save_tiny(name, tmp_path / "model")
    pipe: Any = DiffusionPipeline.from_pretrained(model)
    added = write_random(pipe, name, tmp_path / "lora", variant="rslora" if name == "sd" else "lora")
    run_like(tmp_path, name, model)
    assert main(["export", str(tmp_path), "--format", form]) == 0
    [file] = (tmp_path / f"export-{form}").glob("*.safetensors")
    pipe.load_lora_weights(file.parent, weight_name=file.name)
    found = added_by(pipe.unet if hasattr(pipe, "unet") else pipe.transformer)
    assert found.keys() == added.keys()
    for layer, change in added.items():
        assert_same_sum(found[layer], change)


def test_fused_layers_of_flux_come_apart_again() -> None:
    width, generator = 3072, torch.Generator().manual_seed(0)  # diffusers knows FLUX by its published width alone
    names = [f"transformer_blocks.7.attn.{part}" for part in ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj",
             "add_k_proj", "add_v_proj", "to_add_out")]  # fmt: skip
    names += [f"single_transformer_blocks.30.attn.{part}" for part in ("to_q", "to_k", "to_v")]
    layers = {
        name: (torch.randn(1, width, generator=generator), torch.randn(width, 1, generator=generator)) for name in names
    }
    lora = SavedLora(layers=layers, alpha=2.0, variant="lora", magnitudes={})
    from diffusers import FluxPipeline

    written = kohya_tensors(lora, "flux")
    assert written["lora_unet_double_blocks_7_img_attn_qkv.alpha"] == 6  # of rank 3
    assert written["lora_unet_single_blocks_30_linear1.lora_up.weight"].shape == (7 * width, 4)
    back: Any = FluxPipeline.lora_state_dict(dict(written))
    assert {name.removeprefix("transformer.").partition(".lora_")[0] for name in back} == {
        *names, "single_transformer_blocks.30.proj_mlp"
    }  # fmt: skip
    for name, (down, up) in layers.items():
        made = back[f"transformer.{name}.lora_B.weight"] @ back[f"transformer.{name}.lora_A.weight"]
        assert torch.equal(made, 2 * (up @ down))
    assert not back["transformer.single_transformer_blocks.30.proj_mlp.lora_B.weight"].any()


def test_two_experts_become_two_files(tmp_path: Path) -> None:
    model = save_tiny_wan(tmp_path / "model", "t2v-a14b")
    pipe: Any = DiffusionPipeline.from_pretrained(model)
    added = write_random(pipe, "wan", tmp_path / "lora")
    write_random(pipe, "wan", tmp_path / "lora" / "transformer_2")
    run_like(tmp_path, "wan", model)
    assert main(["export", str(tmp_path), "--format", "comfyui", "--save-dtype", "bfloat16"]) == 0
    files = sorted((tmp_path / "export-comfyui").iterdir())
    assert [file.name.rpartition("_noise")[0].rpartition("_")[2] for file in files] == ["high", "low"]
    assert all(tensor.dtype == torch.bfloat16 for tensor in load_file(files[0]).values())
    pipe.load_lora_weights(files[1].parent, weight_name=files[1].name, load_into_transformer_2=True)
    found = added_by(pipe.transformer_2)
    assert found.keys() == added.keys()
    for layer, change in added.items():
        torch.testing.assert_close(found[layer].float(), change, rtol=2e-2, atol=1e-1)


def test_a_pinned_base_is_named_as_peft_reads_it(tmp_path: Path) -> None:
    """PEFT asks the hub for `base_model_name_or_path` at `revision`: "ID@REVISION" is no id there."""
    layers = {"transformer_blocks.0.attn.to_q": (torch.ones(2, 4), torch.ones(4, 2))}
    lora = SavedLora(layers=layers, alpha=2.0, variant="lora", magnitudes={})
    pinned = "stabilityai/stable-diffusion-3.5-medium@b940f67"
    source = Source(
        model=pinned, lora=None, grid="diffusers", dtype="float32", family="sd3", num_steps=4, guidance_scale=1.0,
        max_sequence_length=None,
    )  # fmt: skip
    files = files_of_form({"": lora}, "peft", source, "x")
    card = files["adapter_config.json"]
    assert isinstance(card, str)
    (tmp_path / "adapter_config.json").write_text(card)
    said = LoraConfig.from_pretrained(tmp_path)
    assert (said.base_model_name_or_path, said.revision) == tuple(pinned.split("@"))
    (tmp_path / "adapter_model.safetensors").touch()
    assert find_source(str(tmp_path)).model == pinned


def test_peft_opens_its_own_form(tmp_path: Path) -> None:
    model = save_tiny("sd3", tmp_path / "model")
    pipe: Any = DiffusionPipeline.from_pretrained(model)
    added = write_random(pipe, "sd3", tmp_path / "lora")
    run_like(tmp_path, "sd3", model)
    assert main(["export", str(tmp_path), "--format", "peft"]) == 0
    assert str(tmp_path) not in (tmp_path / "export-peft" / "adapter_config.json").read_text()
    loaded = PeftModel.from_pretrained(pipe.transformer, tmp_path / "export-peft")
    found = added_by(loaded)
    assert found.keys() == added.keys()
    for layer, change in added.items():
        assert_same_sum(found[layer], change)


@pytest.mark.parametrize(
    ("name", "form", "words"),
    [("sd3", "kohya", "not written for sd3.*take `form` comfyui"), ("sana", "comfyui", "not written for sana")],
)
def test_what_diffusers_cannot_read_back_is_refused(name: str, form: str, words: str) -> None:
    layers = {"transformer_blocks.0.attn.to_q": (torch.ones(1, 4), torch.ones(4, 1))}
    lora = SavedLora(layers=layers, alpha=1.0, variant="lora", magnitudes={})
    with pytest.raises(ValueError, match=words):
        (kohya_tensors if form == "kohya" else comfyui_tensors)(lora, name)


def test_layers_and_variants_without_a_name_are_refused() -> None:
    pair = (torch.ones(1, 4), torch.ones(4, 1))
    odd = SavedLora(layers={"blocks.0.ffn.net.2": pair}, alpha=1.0, variant="lora", magnitudes={})
    with pytest.raises(ValueError, match=r"no name for the layer blocks\.0\.ffn"):
        comfyui_tensors(odd, "wan")
    part = SavedLora(layers={"transformer_blocks.0.attn.to_q": pair}, alpha=1.0, variant="lora", magnitudes={})
    with pytest.raises(ValueError, match="all three or on none"):
        kohya_tensors(part, "flux")
    dora = SavedLora(layers={"transformer_blocks.0.attn.to_q": pair}, alpha=1.0, variant="dora", magnitudes={})
    with pytest.raises(ValueError, match="drops the magnitudes"):
        comfyui_tensors(dora, "sd3")


def test_a_file_of_somebody_else_stays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = save_tiny("sd3", tmp_path / "model")
    write_random(DiffusionPipeline.from_pretrained(model), "sd3", tmp_path / "lora")
    run_like(tmp_path, "sd3", model)
    command = ["export", str(tmp_path), "--format", "peft", "--out", str(tmp_path / "out")]
    assert main(command) == main(command) == 0  # its own it replaces
    kept = (tmp_path / "out" / "adapter_model.safetensors").read_bytes()
    assert main([*command, "--save-dtype", "bfloat16"]) == 1  # but not by another one
    shutil.rmtree(tmp_path / "lora")
    write_random(DiffusionPipeline.from_pretrained(model), "sd3", tmp_path / "lora", variant="rslora")
    assert main(command) == 1
    said = capsys.readouterr().err
    assert said.count("holds another LoRA") == 2
    assert "--out" in said
    assert (tmp_path / "out" / "adapter_model.safetensors").read_bytes() == kept
    (tmp_path / "out" / "adapter_model.safetensors").write_bytes(b"mine")
    assert main(command) == 1
    assert "will not be overwritten" in capsys.readouterr().err
