"""LoRA files of other programs: the network says what stock and the formula say, and the rest is refused by name."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lora_writers import ALPHA, FORMS, RANK, Form, compared, exported_again, loaded, pairs_of, peft, single
from peft import LoraConfig, get_peft_model
from rounding import assert_same_sum
from safetensors.torch import save_file
from tiny_folders import save_tiny
from torch import Tensor, nn

from flowrl.config.base import find_config
from flowrl.config.train import load_config
from flowrl.generation.models import find_source, fingerprint
from flowrl.pipelines.places.lora_places import is_lora, lora_files
from flowrl.pipelines.weights.lora import add_saved_lora, refuse_other_network
from flowrl.pipelines.weights.lora_files import read_lora
from flowrl.pipelines.weights.lora_names import Stock

PAIR = (torch.ones(2, 3), torch.ones(4, 2))
SD3, SD, FLUX, WAN = (Stock(name=f"{name}Pipeline") for name in ("StableDiffusion3", "StableDiffusion", "Flux", "Wan"))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    room = tmp_path_factory.mktemp("models")
    return {name: save_tiny(name, room / name) for name in ("sd3", "flux", "sdxl", "sd", "wan", "qwen_image")}


def _tried(form: Form) -> bool:
    """Without those that other tests hold: what flowrl writes, read by stock."""
    return form.written is None or form.name.endswith("comfyui")


@pytest.mark.slow
@pytest.mark.parametrize(
    "form", [form for form in FORMS if _tried(form)], ids=lambda form: f"{form.family}-{form.name}"
)
def test_a_file_means_what_it_means_to_others(form: Form, models: dict[str, Path], tmp_path: Path) -> None:
    found = compared(form, models[form.family], tmp_path)
    assert found.keys() > {"effect"}
    assert found["effect"] > 0.1
    # float32 sums in another order, through a whole network whose answers are of order 1
    assert max(value for key, value in found.items() if key != "effect") < 1e-5


@pytest.mark.parametrize(
    ("name", "form"),
    [(name, form) for name in ("sd3", "flux", "sdxl", "wan", "qwen_image") for form in ("diffusers", "peft", "comfyui")]
    + [("sdxl", "kohya"), ("sd", "kohya"), ("qwen_image", "kohya")],
)
def test_what_is_exported_is_read_again(name: str, form: str, models: dict[str, Path], tmp_path: Path) -> None:
    pairs = pairs_of(loaded(name, models[name]), next(one for one in FORMS if one.family == name))
    assert exported_again(form, name, pairs, tmp_path) < 1e-6


def test_the_fused_layers_of_flux_are_read_again_at_its_published_width(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    names = ("transformer_blocks.3.attn.to_q", "transformer_blocks.3.attn.to_k", "transformer_blocks.3.attn.to_v",
             "single_transformer_blocks.5.attn.to_q", "single_transformer_blocks.5.attn.to_k",
             "single_transformer_blocks.5.attn.to_v", "transformer_blocks.3.attn.to_out.0")  # fmt: skip
    pairs = {
        name: (torch.randn(1, 3072, generator=generator), torch.randn(3072, 1, generator=generator)) for name in names
    }
    assert exported_again("kohya", "flux", pairs, tmp_path) < 1e-5  # of numbers up to 20


# ---- where a LoRA lies -----------------------------------------------------------------------------------------------


def test_a_lora_is_found_by_its_file_its_folder_and_its_run(tmp_path: Path) -> None:
    run, named = tmp_path / "run", tmp_path / "named"
    file = single(str, {"a": PAIR}, run / "lora", name="pytorch_lora_weights.safetensors")
    (run / "config.yaml").touch()
    other = single(str, {"a": PAIR}, tmp_path / "other")
    peft({"a": PAIR}, named / "style")
    for place, wanted in (
        (run, file), (run / "lora", file), (file, file), (other, other), (other.parent, other),
        (named, named / "style" / "adapter_model.safetensors"),
        (named / "style" / "adapter_config.json", named / "style" / "adapter_model.safetensors"),
    ):  # fmt: skip
        assert lora_files(place) == {"": wanted}
        assert read_lora(place).layers == ["a"]
    single(str, {"a": PAIR}, tmp_path / "other", name="more.safetensors")
    with pytest.raises(ValueError, match=r"holds 2 LoRAs \(more\.safetensors, my_lora\.safetensors\): give the path"):
        read_lora(other.parent)
    shutil.rmtree(run / "lora")
    with pytest.raises(ValueError, match="has no lora/ yet: finish it with 'flowrl train resume="):
        read_lora(run)
    (run / "model").mkdir()
    (run / "model" / "model_index.json").touch()
    with pytest.raises(ValueError, match=r"trained all weights and has no LoRA: set pipeline\.model to"):
        read_lora(run)
    with pytest.raises(ValueError, match="is a whole model, not a LoRA"):
        read_lora(run / "model")
    (tmp_path / "lora.gguf").touch()
    with pytest.raises(ValueError, match=r"is no LoRA that can be read: give a file that ends in \.safetensors"):
        read_lora(tmp_path / "lora.gguf")


def test_two_files_of_wan_are_its_two_experts(tmp_path: Path) -> None:
    for noise in ("low", "high"):
        single(lambda layer: f"diffusion_model.blocks.0.{layer}", {"self_attn.q": PAIR}, tmp_path,
               name=f"style_{noise}_noise.safetensors")  # fmt: skip
    assert read_lora(tmp_path, WAN).layers == [f"transformer{which}.blocks.0.attn1.to_q" for which in ("", "_2")]
    assert lora_files(tmp_path)["transformer"].name == "style_high_noise.safetensors"


def test_a_pickle_is_read_without_running_it(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> Any:
            return (Path.touch, (tmp_path / "ran",))

    torch.save({"transformer.a.lora_A.weight": Trap()}, tmp_path / "pytorch_lora_weights.bin")
    with pytest.raises(ValueError, match=r"cannot be read as a file of tensors alone .*safetensors"):
        read_lora(tmp_path)
    assert not (tmp_path / "ran").exists()


def test_a_file_beside_a_model_is_known_by_its_content(tmp_path: Path, models: dict[str, Path]) -> None:
    place = single(lambda layer: f"transformer.{layer}", {"a": PAIR}, tmp_path)
    source = find_source(str(models["sd3"]), lora=place)
    before = fingerprint(source)
    single(lambda layer: f"transformer.{layer}", {"a": (PAIR[0] + 1, PAIR[1])}, tmp_path)
    assert fingerprint(source) != before


# ---- strengths -------------------------------------------------------------------------------------------------------


def test_alpha_is_what_each_form_says(tmp_path: Path) -> None:
    kohya: dict[str, Any] = {"down": "lora_down", "up": "lora_up"}
    name = "lora_unet_down_blocks_0_attentions_0_transformer_blocks_0_attn1_to_q"
    assert read_lora(single(lambda _: name, {"a": PAIR}, tmp_path / "1", **kohya), SD).alpha == 2  # the rank
    assert read_lora(single(lambda _: name, {"a": PAIR}, tmp_path / "2", alpha=1.5, **kohya), SD).alpha == 1.5
    assert read_lora(single(str, {"a": PAIR}, tmp_path / "3")).alpha == 2
    assert read_lora(single(str, {"a": PAIR}, tmp_path / "4", alpha=5.0)).alpha == 5
    card = peft({"a": PAIR}, tmp_path / "5", lora_alpha=6) / "adapter_config.json"
    assert read_lora(card.parent).alpha == 6
    stated = json.loads(card.read_text())
    del stated["lora_alpha"]
    card.write_text(json.dumps(stated))
    assert read_lora(card.parent).alpha == 8  # PEFT's default
    both = single(str, {"a": PAIR}, tmp_path / "6", metadata={"transformer.r": 2, "transformer.lora_alpha": 7})
    assert read_lora(both).alpha == 7


def test_layers_of_several_ranks_and_alphas_act_as_they_did(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    tensors, wanted = dict[str, torch.Tensor](), dict[str, torch.Tensor]()
    for layer, rank, alpha in (("a", 1, 3.0), ("b", 3, 3.0), ("c", 3, 5.0)):
        down, up = torch.randn(rank, 6, generator=generator), torch.randn(5, rank, generator=generator)
        tensors |= {f"{layer}.lora_A.weight": down, f"{layer}.lora_B.weight": up, f"{layer}.alpha": torch.tensor(alpha)}
        wanted[layer] = alpha / rank * up @ down
    save_file(tensors, tmp_path / "one.safetensors")
    lora = read_lora(tmp_path)
    assert lora.rank == 3
    for layer, change in wanted.items():
        down, up = (lora.tensors[f"{layer}.lora_{side}.weight"] for side in "AB")
        torch.testing.assert_close(lora.alpha / lora.rank * up @ down, change)
    # rows and columns that were added are zero on both sides, so that neither ever gets a gradient
    assert not lora.tensors["a.lora_A.weight"][1:].any()
    assert not lora.tensors["a.lora_B.weight"][:, 1:].any()


# ---- refusals --------------------------------------------------------------------------------------------------------

KINDS: list[tuple[dict[str, Tensor], str]] = [
    ({"lora_unet_a.hada_w1_a": torch.ones(2, 2)}, r"holds a LoHa"),
    ({"lycoris_a.lokr_w1": torch.ones(2, 2)}, r"holds a LoKr"),
    ({"transformer.a.oft_R.weight": torch.ones(2, 2)}, r"holds an OFT"),
    ({"transformer.a.ia3_l": torch.ones(2)}, r"holds an IA3"),
    ({"lora_unet_a.a1.weight": torch.ones(2, 2)}, r"holds a GLoRA"),
    ({"lora_unet_a.diff": torch.ones(2, 2)}, r"holds whole differences of weights"),
    ({"lora_unet_a.diff_b": torch.ones(2)}, r"holds whole differences of weights"),
    ({"lora_unet_a.lora_mid.weight": torch.ones(2, 2, 1, 1)}, r"holds a LoCon"),
    ({"lora_unet_a.dora_scale": torch.ones(2, 1)}, r"holds a DoRA in the form of kohya"),
    ({"transformer.a.lora_B.bias": torch.ones(2)}, r"holds biases of lora_B \(lora_bias\)"),
    ({"transformer.norm_out.weight": torch.ones(2)}, r"holds whole weights beside the LoRA \(modules_to_save"),
    ({"transformer.b.bias": torch.ones(2)}, r"holds whole weights beside the LoRA"),
    ({"transformer.b.strange": torch.ones(2)}, r"holds 1 unknown tensors \(first: b\.strange\)"),
    ({"text_encoder.l.q_proj.lora_B.weight": torch.ones(2, 2)}, r"also trains text encoders \(1 of its 3 tensors"),
    ({"lora_te1_text_model_q.lora_up.weight": torch.ones(2, 2)}, r"also trains text encoders"),
    ({"transformer.b.lora_A.other.weight": torch.ones(2, 2), "transformer.b.lora_A.more.weight": torch.ones(2, 2)},
     r"holds 2 adapters \(more, other\)"),
    ({"transformer.b.lora_A.weight": torch.ones(2, 2)}, r"has no lora_B of b: it is damaged"),
    ({"transformer.b.lora_A.weight": torch.ones(2, 2, 1, 1), "transformer.b.lora_B.weight": torch.ones(2, 2, 1, 1)},
     r"also trains convolutions \(2 tensors"),
]  # fmt: skip


@pytest.mark.parametrize(("tensors", "said"), KINDS)
def test_what_is_no_lora_on_linear_layers_is_named(tensors: dict[str, Tensor], said: str, tmp_path: Path) -> None:
    whole = {"transformer.a.lora_A.weight": torch.ones(2, 3), "transformer.a.lora_B.weight": torch.ones(4, 2)}
    save_file(whole | tensors, tmp_path / "one.safetensors")
    with pytest.raises(ValueError, match=said):
        read_lora(tmp_path)


TWICE: list[tuple[dict[str, Tensor], str]] = [
    ({"a.lora_A.weight": torch.zeros(2, 3)}, r"two different tensors for a\.lora_A\.weight"),
    ({"transformer.a.lora_A.other.weight": torch.zeros(2, 3)}, r"two different tensors for a\.lora_A\.weight"),
    ({"transformer.a.lora_A.weight": torch.ones(2, 3, dtype=torch.int8)}, r"as int8 of shape \(2, 3\)"),
    ({"transformer.a.lora_A.weight": torch.ones(0, 3), "transformer.a.lora_B.weight": torch.ones(4, 0)}, "of rank 0"),
    ({"transformer.a.lora_A.weight": torch.ones(3, 3)}, "a lora_A of rank 3 and a lora_B of rank 2 for a"),
    ({"transformer.a.alpha": torch.ones(2)}, r"has 2 numbers in a\.alpha, and an alpha is one"),
]


@pytest.mark.parametrize(("tensors", "said"), TWICE)
def test_names_and_numbers_that_do_not_say_which_lora_are_refused(
    tensors: dict[str, Tensor], said: str, tmp_path: Path
) -> None:
    whole = {"transformer.a.lora_A.weight": torch.ones(2, 3), "transformer.a.lora_B.weight": torch.ones(4, 2)}
    save_file(whole | tensors, tmp_path / "one.safetensors")
    with pytest.raises(ValueError, match=said):
        read_lora(tmp_path)


def test_wrappers_within_names_are_taken_off(tmp_path: Path) -> None:
    wrapped = "transformer._fsdp_wrapped_module.a._checkpoint_wrapped_module.b"
    assert read_lora(single(lambda _: wrapped, {"a": PAIR}, tmp_path)).layers == ["a.b"]


def test_a_file_of_a_whole_model_is_no_lora(tmp_path: Path) -> None:
    save_file({"model.diffusion_model.a.weight": torch.ones(2)}, tmp_path / "whole.safetensors")
    assert not is_lora(tmp_path / "whole.safetensors")
    assert is_lora(single(str, {"a": PAIR}, tmp_path))


def test_parts_that_do_nothing_are_no_reason_to_refuse(tmp_path: Path) -> None:
    whole = {"transformer.a.lora_A.weight": torch.ones(2, 3), "transformer.a.lora_B.weight": torch.ones(4, 2)}
    nothing = {"text_encoder.q.lora_A.weight": torch.ones(2, 2), "text_encoder.q.lora_B.weight": torch.zeros(2, 2),
               "transformer.n.diff": torch.zeros(2), "transformer.a.lora_B.bias": torch.zeros(4)}  # fmt: skip
    save_file(whole | nothing, tmp_path / "one.safetensors")
    assert read_lora(tmp_path).layers == ["a"]


CARDS: list[tuple[dict[str, Any], str]] = [
    *(({"init_lora_weights": start}, rf"init_lora_weights='{start}'.*path_initial_model_for_weight_conversion")
      for start in ("pissa", "pissa_niter_4", "olora", "loftq", "corda", "lora_ga", "mica", "never_heard_of")),
    ({"bias": "all"}, "states bias='all'"),
    ({"modules_to_save": ["proj_out"]}, "states modules_to_save="),
    ({"layer_replication": [[0, 2]]}, "states layer_replication="),
    ({"trainable_token_indices": [3]}, "states trainable_token_indices="),
    ({"target_parameters": ["a.weight"]}, "states target_parameters="),
    ({"fan_in_fan_out": True, "lora_bias": True}, "states fan_in_fan_out=True, lora_bias=True"),
    ({"megatron_config": {"a": 1}}, "states megatron_config="),
    ({"a_key_of_the_future": 3}, "states a_key_of_the_future=3"),
    ({"peft_type": "LOHA"}, "of the type LOHA: only LORA is read"),
    ({"use_rslora": "false"}, "states use_rslora='false', which has to be true or false"),
    ({"alpha_pattern": "to_q"}, "states alpha_pattern='to_q', which has to be an object"),
    ({"lora_alpha": 0}, "lora_alpha 0: it must be a number above 0"),
]  # fmt: skip


@pytest.mark.parametrize(("stated", "said"), CARDS)
@pytest.mark.parametrize("where", ["card", "metadata"])
def test_a_card_that_makes_another_model_is_refused(
    stated: dict[str, Any], said: str, where: str, tmp_path: Path
) -> None:
    if where == "metadata":
        single(str, {"a": PAIR}, tmp_path, metadata={f"transformer.{key}": value for key, value in stated.items()})
    else:
        card = peft({"a": PAIR}, tmp_path) / "adapter_config.json"
        card.write_text(json.dumps(json.loads(card.read_text()) | stated))
    with pytest.raises(ValueError, match=said):
        read_lora(tmp_path)


def test_harmless_keys_of_a_card_are_taken(tmp_path: Path) -> None:
    card = peft({"a": PAIR}, tmp_path) / "adapter_config.json"
    free = {"task_type": "FEATURE_EXTRACTION", "lora_dropout": 0.1, "inference_mode": False, "peft_version": "9",
            "exclude_modules": ["b"], "layers_to_transform": [0], "auto_mapping": {"a": "b"},
            "new_key_that_is_off": None, "init_lora_weights": "orthogonal"}  # fmt: skip
    card.write_text(json.dumps(json.loads(card.read_text()) | free))
    assert read_lora(tmp_path).alpha == ALPHA


def test_a_pissa_adapter_that_peft_converted_is_read(tmp_path: Path) -> None:
    torch.manual_seed(0)
    base, x = nn.Sequential(nn.Linear(6, 5)), torch.randn(3, 6)
    untouched = nn.Sequential(nn.Linear(6, 5))
    untouched.load_state_dict(base.state_dict())
    tuned: Any = get_peft_model(base, LoraConfig(r=2, lora_alpha=4, target_modules=["0"], init_lora_weights="pissa"))  # type: ignore[arg-type]  # fmt: skip
    tuned.peft_config["default"].init_lora_weights = True
    tuned.save_pretrained(tmp_path / "start")
    tuned.peft_config["default"].init_lora_weights = "pissa"
    for name, parameter in tuned.named_parameters():
        if "lora_" in name:
            parameter.data += 0.3 * torch.randn(parameter.shape)
    wanted = tuned(x)
    tuned.save_pretrained(tmp_path / "raw")
    with pytest.raises(ValueError, match="init_lora_weights='pissa'"):
        read_lora(tmp_path / "raw")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tuned.save_pretrained(tmp_path / "plain", path_initial_model_for_weight_conversion=str(tmp_path / "start"))
    add_saved_lora(untouched, tmp_path / "plain")
    assert_same_sum(untouched(x), wanted)


def test_a_lora_of_another_model_is_named_by_its_first_layer(tmp_path: Path) -> None:
    network = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4))
    for layer, pair, said in (
        ("0", (torch.ones(2, 5), torch.ones(4, 2)), r"0 has shape \(4, 3\) in Sequential, .* changes one of \(4, 5\)"),
        ("7.q", PAIR, r"is of another model: 1 of its 1 layers are not in Sequential \(first: 7\.q\)"),
        ("1", PAIR, r"is on 1, a LayerNorm: only linear layers are trained"),
    ):
        with pytest.raises(ValueError, match=said):
            refuse_other_network(network, read_lora(single(str, {layer: pair}, tmp_path)))


@pytest.mark.parametrize(
    ("name", "stock"),
    [("lora_unet_double_blocks_0_img_attn_proj", SD), ("lora_unet_down_blocks_0_attn1_to_q", FLUX),
     ("lora_unet_joint_blocks_0_x_block_attn_qkv", SD3), ("lora_unet_anything", None)],
)  # fmt: skip
def test_foreign_names_that_no_reader_takes_are_refused(name: str, stock: Stock | None, tmp_path: Path) -> None:
    place = single(lambda _: name, {"a": PAIR}, tmp_path, down="lora_down", up="lora_up", alpha=1.0)
    # A reader may take any name for one of its own: the network then says that it has no such layer.
    with pytest.raises(ValueError, match=r"names layers in another program's way|is of another model"):
        refuse_other_network(nn.Sequential(nn.Linear(3, 4)), read_lora(place, stock))


def test_what_a_reader_would_lose_is_refused(tmp_path: Path) -> None:
    """diffusers' reader for FLUX drops layers of T5's position embedding without a word."""
    kohya = {"down": "lora_down", "up": "lora_up", "alpha": 1.0}
    names = {"a": "lora_unet_double_blocks_0_img_attn_proj", "b": "lora_unet_position_embedding"}
    with pytest.raises(ValueError, match="a part of it would be lost"):
        read_lora(single(names.__getitem__, {"a": PAIR, "b": PAIR}, tmp_path, **kohya), FLUX)  # type: ignore[arg-type]


# ---- a run that starts from one --------------------------------------------------------------------------------------


def test_a_run_starts_from_what_the_file_says(models: dict[str, Path], tmp_path: Path) -> None:
    from flowrl.training.parts import init_lora, load_policy

    pipeline = loaded("sd3", models["sd3"])
    pairs = pairs_of(pipeline, FORMS[0])
    place = single(lambda layer: f"diffusion_model.{layer}", pairs, tmp_path, alpha=ALPHA)
    config = load_config(find_config("tiny_grpo_geneval"), [
        f"pipeline.model={models['sd3']}", f"policy.init_lora={place}", "policy.lora_rank=null",
        "policy.lora_alpha=null", "policy.target_modules=null",
    ])  # fmt: skip
    policy: Any = load_policy(config, pipeline, init_lora(config))
    assert (policy.config["r"], policy.config["lora_alpha"]) == (RANK, ALPHA)
    own = policy.tensors()
    for layer, (down, up) in pairs.items():
        assert torch.equal(own[f"{layer}.lora_A.default.weight"], down)
        assert torch.equal(own[f"{layer}.lora_B.default.weight"], up)
    other = load_config(find_config("tiny_grpo_geneval"), [
        f"pipeline.model={models['sd3']}", f"policy.init_lora={place}", "policy.lora_rank=16",
    ])  # fmt: skip
    with pytest.raises(ValueError, match=r"policy\.lora_rank is 16, and the LoRA in .* has rank 2: remove"):
        init_lora(other)
