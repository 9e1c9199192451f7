"""A merged model draws what its base draws with the LoRA over it, within rounding; what cannot be merged is refused."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from diffusers import StableDiffusion3Pipeline
from rounding import assert_same_sum
from safetensors.torch import load_file, save_file
from tiny_models import load_tiny, probe
from torch import Tensor

from flowrl.cli import main
from flowrl.pipelines.places.lora_places import CARD
from flowrl.pipelines.weights.lora import VARIANTS, Policy, add_saved_lora
from flowrl.publishing.lora_exports import saved_loras
from flowrl.publishing.merge import MergedModel, joined, merge_files, merge_weight, weights_of
from flowrl.runtime.randomness import counter_normal

RANK = 2
WEIGHTS = Path("transformer", "diffusion_pytorch_model.safetensors")


def write_lora(base: Path, folder: Path, variant: str) -> Path:
    """A LoRA of a tiny model that changes what it draws, as a run saves it."""
    pipeline = load_tiny(base)
    policy = Policy(pipeline.denoiser, rank=RANK, alpha=3, targets=pipeline.lora_targets, seed=0, variant=variant)
    for name, parameter in policy.parameters.items():
        if "lora_B" in name:
            parameter.data.copy_(0.1 * counter_normal(parameter.shape, 1, name))
        elif "magnitude" in name:
            parameter.data.mul_(1 + 0.2 * counter_normal(parameter.shape, 2, name))
    pipeline.save_lora(folder, policy.tensors(), policy.config)
    return folder


def over_base(base: Path, lora: Path, dtype: torch.dtype) -> Tensor:
    pipeline = load_tiny(base, dtype)
    add_saved_lora(pipeline.denoiser, lora)
    return probe(pipeline).float()


def merged_into(base: Path, lora: Path, out: Path) -> MergedModel:
    return merge_files(base, saved_loras(lora), out)


@pytest.mark.parametrize("variant", VARIANTS)
def test_base_and_lora_become_one(variant: str, tiny_sd3_folder: Path, tmp_path: Path) -> None:
    lora = write_lora(tiny_sd3_folder, tmp_path / "lora", variant)
    done = merged_into(tiny_sd3_folder, lora, tmp_path / "merged")
    wanted, found = over_base(tiny_sd3_folder, lora, torch.float32), probe(load_tiny(tmp_path / "merged"))
    assert (wanted - probe(load_tiny(tiny_sd3_folder))).abs().max() > 0.02  # the LoRA does something
    assert_same_sum(found, wanted)
    assert done.dtypes == ("float32",)
    assert done.lost < 1e-5
    names = {path.relative_to(tmp_path / "merged") for path in (tmp_path / "merged").rglob("*") if path.is_file()}
    assert names == {path.relative_to(tiny_sd3_folder) for path in tiny_sd3_folder.rglob("*") if path.is_file()}
    old, new = load_file(tiny_sd3_folder / WEIGHTS), load_file(tmp_path / "merged" / WEIGHTS)
    changed = {name for name in old if not torch.equal(old[name], new[name])}
    assert old.keys() == new.keys()
    assert len(changed) == done.layers
    assert all(name.endswith(".weight") and ".attn" in name for name in changed)


@pytest.mark.slow
def test_the_dtype_is_kept_and_each_weight_is_rounded_once(tiny_sd3_folder: Path, tmp_path: Path) -> None:
    half = tmp_path / "half"
    StableDiffusion3Pipeline.from_pretrained(tiny_sd3_folder).to(torch.bfloat16).save_pretrained(half)
    lora = write_lora(tiny_sd3_folder, tmp_path / "lora", "lora")
    done = merged_into(half, lora, tmp_path / "merged")
    old, new = load_file(half / WEIGHTS), load_file(tmp_path / "merged" / WEIGHTS)
    assert {name: tensor.dtype for name, tensor in new.items()} == {name: tensor.dtype for name, tensor in old.items()}
    assert done.dtypes == ("bfloat16",)
    own = saved_loras(lora)[""]
    lost, change = 0.0, 0.0
    for layer, (down, up) in own.layers.items():  # half a unit in the last of 8 bits, of the exact sum
        exact = old[f"{layer}.weight"].double() + 1.5 * up.double() @ down.double()
        error = (new[f"{layer}.weight"].double() - exact).abs()
        assert bool((error <= exact.abs() * (2**-8 + 1e-6) + 1e-9).all())
        lost += float(error.square().sum())
        change += float((exact - old[f"{layer}.weight"].double()).square().sum())
    assert done.lost == pytest.approx((lost / change) ** 0.5, rel=1e-3)
    drawn = over_base(half, lora, torch.bfloat16)
    torch.testing.assert_close(
        probe(load_tiny(tmp_path / "merged", torch.bfloat16)).float(), drawn, rtol=2e-2, atol=2e-2
    )


@pytest.mark.slow
def test_stock_opens_the_merged_folder(tiny_sd3_folder: Path, tmp_path: Path) -> None:
    lora = write_lora(tiny_sd3_folder, tmp_path / "lora", "lora")
    merged_into(tiny_sd3_folder, lora, tmp_path / "merged")
    stock, apart = (StableDiffusion3Pipeline.from_pretrained(place) for place in (tmp_path / "merged", tiny_sd3_folder))
    apart.load_lora_weights(lora)
    options = {"num_inference_steps": 2, "max_sequence_length": 16, "output_type": "pt", "prompt": "a red circle"}
    one, other = (pipe(**options, generator=torch.Generator().manual_seed(3)).images for pipe in (stock, apart))
    torch.testing.assert_close(one, other, rtol=0, atol=1e-4)


def test_a_dora_has_rows_of_the_trained_length(tiny_sd3_folder: Path, tmp_path: Path) -> None:
    own = saved_loras(write_lora(tiny_sd3_folder, tmp_path / "lora", "dora"))[""]
    weights = load_file(tiny_sd3_folder / WEIGHTS)
    for layer in own.layers:
        rows = torch.linalg.norm(merge_weight(weights[f"{layer}.weight"], own, layer), dim=1)
        torch.testing.assert_close(rows, own.magnitudes[layer].flatten().abs(), rtol=1e-5, atol=1e-6)


def test_several_loras_are_added_by_their_weights(tiny_sd3_folder: Path, tmp_path: Path) -> None:
    """W + sum_i w_i s_i B_i A_i, of ranks, scales and layers of their own; a half of one LoRA twice is that LoRA."""
    first = saved_loras(write_lora(tiny_sd3_folder, tmp_path / "lora", "lora"))[""]
    (gone, *_), again = first.layers, saved_loras(write_lora(tiny_sd3_folder, tmp_path / "rslora", "rslora"))[""]
    second = replace(again, layers={name: parts for name, parts in again.layers.items() if name != gone})
    both, weights = joined([first, second], [0.75, -0.5]), load_file(tiny_sd3_folder / WEIGHTS)
    for layer, (down, up) in first.layers.items():
        exact = weights[f"{layer}.weight"].double() + 0.75 * 1.5 * up.double() @ down.double()
        if layer != gone:
            down, up = second.layers[layer]
            exact -= 0.5 * 3 / RANK**0.5 * up.double() @ down.double()
        assert_same_sum(merge_weight(weights[f"{layer}.weight"], both, layer), exact.float())
    alone, halves = joined([first], [1.0]), joined([first, first], [0.5, 0.5])
    assert alone is first
    for layer in first.layers:
        wanted = merge_weight(weights[f"{layer}.weight"], first, layer)
        assert_same_sum(merge_weight(weights[f"{layer}.weight"], halves, layer), wanted)
    other = replace(first, layers={gone: (torch.zeros(2, 3), torch.zeros(3, 2))})
    with pytest.raises(ValueError, match=f"{gone} has another shape in each"):
        joined([first, other], [0.5, 0.5])
    with pytest.raises(ValueError, match="a DoRA sets the length of each row"):
        joined([first, replace(first, variant="dora")], [0.5, 0.5])


def test_runs_are_merged_with_the_average_of_their_loras(
    tiny_sd3_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    loras = [str(write_lora(tiny_sd3_folder, tmp_path / name, name)) for name in ("lora", "rslora")]
    for place in loras:
        (Path(place) / CARD).write_text(json.dumps({"base_model_name_or_path": str(tiny_sd3_folder)}))
    to = tmp_path / "merged"
    assert main(["merge", loras[0], str(to), "--also", loras[1]]) == 0
    old, new = load_file(tiny_sd3_folder / WEIGHTS), load_file(to / WEIGHTS)
    found = [saved_loras(Path(place))[""] for place in loras]
    for layer in found[0].layers:
        parts = [merge_weight(old[f"{layer}.weight"], lora, layer) for lora in found]
        assert_same_sum(new[f"{layer}.weight"], sum(parts[1:], parts[0]) / 2)
    capsys.readouterr()
    wrong = ["merge", loras[0], str(tmp_path / "other"), "--also", loras[1], "--weights", "1"]
    assert main(wrong) == 1
    said = " ".join(capsys.readouterr().err.split())
    assert "--weights are one for each of the 2 LoRAs, finite and not all 0, got [1.0]" in said
    elsewhere = shutil.copytree(tiny_sd3_folder, tmp_path / "elsewhere")
    (Path(loras[1]) / CARD).write_text(json.dumps({"base_model_name_or_path": str(elsewhere)}))
    assert main(wrong) == 1
    assert "elsewhere: give the --base of all" in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "other").exists()


def test_what_cannot_be_merged_is_refused_and_leaves_nothing(
    tiny_sd3_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lora, out = write_lora(tiny_sd3_folder, tmp_path / "lora", "lora"), tmp_path / "merged"
    stated = tmp_path / "stated"
    shutil.copytree(tiny_sd3_folder, stated)
    config = json.loads((stated / "transformer" / "config.json").read_text())
    (stated / "transformer" / "config.json").write_text(json.dumps(config | {"quantization_config": {"bits": 4}}))
    with pytest.raises(ValueError, match=r"quantised weights.*bfloat16 or float32"):
        merged_into(stated, lora, out)
    eighth = tmp_path / "eighth"
    shutil.copytree(tiny_sd3_folder, eighth)
    tensors = {name: tensor.to(torch.float8_e4m3fn) for name, tensor in load_file(eighth / WEIGHTS).items()}
    save_file(tensors, eighth / WEIGHTS)
    with pytest.raises(ValueError, match="quantised weights"):
        merged_into(eighth, lora, out)
    other = tmp_path / "other"
    shutil.copytree(tiny_sd3_folder, other)
    wide = load_file(other / WEIGHTS)
    name = "transformer_blocks.0.attn.to_q.weight"
    save_file(wide | {name: torch.zeros(4, 4)}, other / WEIGHTS)
    with pytest.raises(ValueError, match=r"of another model: transformer_blocks\.0\.attn\.to_q .* shape \[4, 4\]"):
        merged_into(other, lora, out)
    with pytest.raises(ValueError, match="no folder in diffusers' layout"):
        merged_into(lora, lora, out)
    monkeypatch.setattr("shutil.disk_usage", lambda place: SimpleNamespace(free=1000))
    with pytest.raises(ValueError, match=r"has 0\.00 GB left: make room"):
        merged_into(tiny_sd3_folder, lora, out)
    assert {path.name for path in tmp_path.iterdir()} == {"lora", "stated", "eighth", "other"}


def test_files_of_a_variant_are_told_apart(tmp_path: Path) -> None:
    names = ["model.fp16.safetensors", "model.safetensors", "big.fp16-00001-of-00002.safetensors"]
    for name in names:
        (tmp_path / name).touch()
    assert [path.name for path in weights_of(tmp_path, None)] == ["model.safetensors"]
    assert [path.name for path in weights_of(tmp_path, "fp16")] == sorted(set(names) - {names[1]})
