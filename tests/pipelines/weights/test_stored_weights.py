"""Every weight of a part's files is read, left over, or refused by name; eight-bit floats come with their scales."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from flowrl.pipelines.weights.loading_choices import Loading
from flowrl.pipelines.weights.stock_loading import load_stock
from flowrl.runtime.files import read_json

Tensors = dict[str, Tensor]
LAYER = "transformer_blocks.0.attn.to_q"


def load(model: Path, **given: Any) -> Any:
    return load_stock("StableDiffusion3Pipeline", str(model), title="SD3", **{
        "dtype": torch.float32, "exact": ["vae"], **given
    })  # fmt: skip


@pytest.fixture
def model(tiny_sd3_folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_sd3_folder, tmp_path / "model"))


def changed(model: Path, part: str, how: Callable[[Tensors], object]) -> Tensors:
    """Changes a part's tensors; gives them as they were."""
    (path,) = (model / part).glob("*.safetensors")
    tensors = load_file(path)
    before = dict(tensors)
    how(tensors)
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, path, metadata={"format": "pt"})
    return before


def attends(key: str) -> bool:
    return "attn" in key or "SelfAttention" in key


def scaled(name: str, *, rows: bool = False, more: Callable[[str], Tensors] = lambda layer: {}) -> Any:
    """Attention's weights divided by their largest value, in eight bits, with what they were divided by."""

    def how(tensors: Tensors) -> None:
        for key in [key for key in tensors if attends(key) and key.endswith(".weight") and tensors[key].ndim == 2]:
            layer, weight = key.removesuffix(".weight"), tensors[key].float()
            scale = (weight.abs().amax(1, keepdim=True) if rows else weight.abs().max()) / 448
            tensors[key] = (weight / scale).to(torch.float8_e4m3fn)
            tensors |= {f"{layer}.{name}": scale, **more(layer)}

    return how


def comfy(layer: str, **said: Any) -> Tensors:
    text = json.dumps({"format": "float8_e4m3fn", **said}).encode()
    return {f"{layer}.comfy_quant": torch.tensor(list(text), dtype=torch.uint8)}


@pytest.mark.parametrize("part", ["transformer", "text_encoder", "text_encoder_3"])
@pytest.mark.parametrize(
    "how",
    [
        scaled("scale_weight"),
        scaled("weight_scale", rows=True),
        scaled("scale_weight", more=lambda layer: {f"{layer}.scale_input": torch.ones(1),
                                                   "scaled_fp8": torch.empty(0).to(torch.float8_e4m3fn)}),
        scaled("weight_scale", more=comfy),
    ],
    ids=["number", "rows", "marked", "form"],
)  # fmt: skip
def test_scaled_eight_bit_weights_are_what_they_were(part: str, how: Any, model: Path) -> None:
    """Each within half a step of an eight-bit float with three bits of mantissa: 2^-4 of itself."""
    before = changed(model, part, how)
    own, seen = getattr(load(model), part).state_dict(), 0
    for key, weight in before.items():
        step = 2**-4 * attends(key)
        found = own[next(name for name in own if key == name or key.endswith(f".{name}"))]
        assert bool(((found - weight).abs() <= step * (weight.abs() + weight.abs().max() / 448)).all()), key
        seen += attends(key)
    assert seen >= 4


def test_plain_eight_bit_weights_are_what_is_stored(model: Path) -> None:
    def how(tensors: Tensors) -> None:
        tensors[f"{LAYER}.weight"] = tensors[f"{LAYER}.weight"].to(torch.float8_e4m3fn)

    before = changed(model, "transformer", how)[f"{LAYER}.weight"]
    assert torch.equal(load(model).transformer.get_parameter(f"{LAYER}.weight"), before.to(torch.float8_e4m3fn).float())


def blocks(tensors: Tensors) -> None:
    tensors[f"{LAYER}.weight_scale_inv"] = torch.ones(1, 1)


def two_scales(tensors: Tensors) -> None:
    scaled("scale_weight", more=lambda layer: {f"{layer}.weight_scale_2": torch.ones(())})(tensors)


def whole_numbers(tensors: Tensors) -> None:
    tensors[f"{LAYER}.weight_scale"] = torch.ones(())  # the weight is stored in float32


def columns(tensors: Tensors) -> None:
    scaled("scale_weight")(tensors)
    tensors[f"{LAYER}.scale_weight"] = torch.ones(1, tensors[f"{LAYER}.weight"].shape[1])


def other_form(tensors: Tensors) -> None:
    scaled("weight_scale", more=lambda layer: comfy(layer, format="mxfp8"))(tensors)


@pytest.mark.parametrize(
    ("part", "how", "named"),
    [
        ("transformer", blocks, "weight_scale_inv"),
        ("transformer", two_scales, "weight_scale_2"),
        ("transformer", whole_numbers, "to_q.weight_scale"),
        ("transformer", columns, "scale_weight"),
        ("transformer", other_form, "comfy_quant"),
        ("transformer", lambda t: t.update({f"{LAYER}.scale_input": torch.ones(1)}), "scale_input"),
        ("transformer", lambda t: t.update({"transformer_blocks.7.attn.to_q.weight": torch.ones(2)}), "blocks.7"),
        ("transformer", lambda t: t.update({f"{LAYER}.lora_A.weight": torch.ones(2, 2)}), "lora_A"),
        ("transformer", lambda t: t.update({"lm_head.weight": torch.ones(2)}), "lm_head"),
        ("vae", lambda t: t.update({"decoder.conv_in.weight_scale": torch.ones(1)}), "conv_in.weight_scale"),
        ("text_encoder", lambda t: t.update({"text_model.encoder.layers.9.mlp.fc1.bias": torch.ones(2)}), "layers.9"),
        ("text_encoder", lambda t: t.update({"text_model.scale_weight": torch.ones(1)}), "scale_weight"),
    ],
)
def test_weights_that_nothing_reads_are_named(part: str, how: Any, named: str, model: Path) -> None:
    changed(model, part, how)
    with pytest.raises(ValueError, match=rf"/{part} holds weights that its network, a \w+, does not read") as refused:
        load(model)
    assert named in str(refused.value)
    assert "could not load" not in str(refused.value)


def one(part: str, key: str, how: Callable[[Tensor], Tensor]) -> tuple[str, Callable[[Path], object]]:
    return part, lambda model: changed(model, part, lambda tensors: tensors.update({key: how(tensors[key])}))


@pytest.mark.parametrize(
    ("part", "change", "said"),
    [
        (
            *one("transformer", f"{LAYER}.weight", lambda w: w.to(torch.int8)),
            rf"weights as whole numbers .*{LAYER}.weight: I8",
        ),
        (
            *one("text_encoder_3", "shared.weight", lambda w: w.bool()),
            r"weights as whole numbers or truth values .*BOOL",
        ),
        (
            *one("vae", "encoder.conv_in.bias", lambda w: w * float("nan")),
            r"NaN or infinity \(encoder\.conv_in\.bias\)",
        ),
        (*one("transformer", f"{LAYER}.bias", lambda w: w + float("inf")), rf"NaN or infinity \({LAYER}\.bias\)"),
    ],
)
def test_weights_that_are_no_numbers_are_refused(
    part: str, change: Callable[[Path], object], said: str, model: Path
) -> None:
    change(model)
    with pytest.raises(ValueError, match=rf"/{part} holds {said}"):
        load(model)


@pytest.mark.slow
def test_numbers_that_only_float16_cannot_hold_are_refused_there(model: Path) -> None:
    changed(model, "transformer", lambda tensors: tensors[f"{LAYER}.weight"].fill_(1e6))
    with pytest.raises(ValueError, match=r"read as float16: .*set pipeline\.dtype=bfloat16"):
        load(model, dtype=torch.float16)
    load(model, dtype=torch.bfloat16)


def test_names_with_a_wrapper_before_them_are_shown(model: Path) -> None:
    def how(tensors: Tensors) -> None:
        for key in list(tensors):
            tensors[f"module.{key}"] = tensors.pop(key)

    for part in ("transformer", "text_encoder_3"):
        changed(model, part, how)
        with pytest.raises(ValueError, match=rf"/{part} lacks weights .*and holds others .*first module\."):
            load(model)


def larger(part: nn.Module) -> Tensors:
    return {f"vision_model.{key}": value for key, value in list(part.state_dict().items())[:4]}


def test_what_larger_models_leave_over_loads(model: Path) -> None:
    """Encoders cut out of whole models, and tables that older releases saved."""
    config = transformers.CLIPTextConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=1)
    tower = larger(transformers.CLIPTextModel(config))
    places = {"text_model.embeddings.position_ids": torch.arange(16)[None], "logit_scale": torch.ones(())}
    before = changed(model, "text_encoder", lambda tensors: tensors.update({**tower, **places}))
    before_t5 = changed(
        model, "text_encoder_3",
        lambda tensors: tensors.update({"lm_head.weight": torch.ones(2, 2), "decoder.norm.weight": torch.ones(2)}),
    )  # fmt: skip
    pipe = load(model)
    for part, old in (("text_encoder", before), ("text_encoder_3", before_t5)):
        own = getattr(pipe, part).state_dict()
        for key, value in old.items():
            assert torch.equal(own[next(name for name in own if key == name or key.endswith(f".{name}"))], value)


# ---- which files -----------------------------------------------------------------------------------------------------


def as_variant(place: Path, *, pieces: str = "") -> None:
    (path,) = place.glob("*.safetensors")
    stem = path.name.removesuffix(".safetensors")
    if not pieces:
        path.rename(place / f"{stem}.fp16.safetensors")
        return
    name = pieces.format(stem=stem)
    entries = dict.fromkeys(load_file(path), name)
    path.rename(place / name)
    index = {"metadata": {"total_size": 1}, "weight_map": entries}
    (place / f"{stem}.safetensors.index.fp16.json").write_text(json.dumps(index))


@pytest.mark.parametrize(
    "pieces", ["", "{stem}.fp16-00001-of-00001.safetensors", "{stem}-00001-of-00001.fp16.safetensors"]
)
@pytest.mark.parametrize("part", ["transformer", "text_encoder", "vae"])
def test_a_variant_is_chosen_part_by_part(part: str, pieces: str, model: Path) -> None:
    as_variant(model / part, pieces=pieces)
    load(model, how=Loading(variant="fp16"))
    with pytest.raises(ValueError, match=rf"/{part} has weights of the variant fp16 alone: set pipeline\.variant=fp16"):
        load(model)
    with pytest.raises(ValueError, match=r"no part of .* has files of weights of the variant bf16"):
        load(model, how=Loading(variant="bf16"))


def test_few_bits_of_another_library_are_told_as_such(model: Path) -> None:
    config = read_json(model / "transformer" / "config.json")
    config["quantization_config"] = {"quant_method": "svdquant", "precision": "nvfp4"}
    (model / "transformer" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"/transformer is kept in few bits by svdquant .*set pipeline\.quantize"):
        load(model)


def test_a_hub_id_is_accounted_for_as_a_folder_is(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    place, commit = tmp_path / "cache" / "models--me--tiny", "0" * 40
    (place / "refs").mkdir(parents=True)
    (place / "refs" / "main").write_text(commit)
    kept = Path(shutil.copytree(model, place / "snapshots" / commit))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    load(Path("me/tiny"))
    changed(kept, "text_encoder", blocks_of_text)
    with pytest.raises(ValueError, match=r"/text_encoder holds weights that its network.*weight_scale_inv"):
        load(Path("me/tiny"))


def blocks_of_text(tensors: Tensors) -> None:
    layer = next(key for key in tensors if key.endswith("fc1.weight")).removesuffix(".weight")
    tensors[f"{layer}.weight_scale_inv"] = torch.ones(1, 1)
