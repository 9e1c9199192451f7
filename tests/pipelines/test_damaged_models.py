"""A model folder or LoRA that is damaged is refused in a sentence that names the file, and runs no code."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from flowrl.pipelines import family_for, family_of
from flowrl.pipelines.places.lora_places import LORA_FILE
from flowrl.pipelines.weights.lora_files import read_lora
from flowrl.pipelines.weights.stock_loading import load_stock
from flowrl.runtime.files import read_json


class Code:
    """Unpickling it would leave a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (str(self.path),)


def weights(folder: Path) -> Path:
    (path,) = folder.glob("*.safetensors")
    return path


def change(folder: Path, how: Callable[[dict[str, Tensor], str], object]) -> None:
    """Changes the tensors of a part, in which a key is named."""
    path = weights(folder)
    tensors = load_file(path)
    how(tensors, sorted(tensors)[len(tensors) // 2])
    save_file(tensors, path, metadata={"format": "pt"})


def without_one(folder: Path) -> None:
    change(folder, lambda tensors, key: tensors.pop(key))


def of_another_shape(folder: Path) -> None:
    change(folder, lambda tensors, key: tensors.update({key: torch.zeros(*[n + 1 for n in tensors[key].shape])}))


def cut_short(folder: Path) -> None:
    weights(folder).write_bytes(weights(folder).read_bytes()[:-100])


def pickled(folder: Path) -> None:
    path = weights(folder)
    name = "pytorch_model.bin" if path.name == "model.safetensors" else "diffusion_pytorch_model.bin"
    torch.save({**load_file(path), "code": Code(folder / "ran")}, path.with_name(name))
    path.unlink()


def not_json(folder: Path) -> None:
    (folder / "config.json").write_text('{\n  "a": 1,\n')


def a_list(folder: Path) -> None:
    (folder / "config.json").write_text("[]")


def mistyped(folder: Path) -> None:
    config = read_json(folder / "config.json")
    key = next(key for key in ("num_layers", "num_hidden_layers") if key in config)
    (folder / "config.json").write_text(json.dumps(config | {key: "two"}))


def no_json_index(folder: Path) -> None:
    (folder.parent / "model_index.json").write_text("{")


@pytest.mark.filterwarnings("ignore:It is deprecated:FutureWarning")  # diffusers, of a config.json that holds a list
@pytest.mark.parametrize(
    ("part", "damage", "said"),
    [
        ("transformer", without_one, "transformer lacks weights that its config.json asks for (1, first "),
        ("text_encoder", without_one, "text_encoder lacks weights that its config.json asks for (1, first "),
        ("transformer", of_another_shape, "transformer holds weights of another shape"),
        ("text_encoder", of_another_shape, "text_encoder holds weights of another shape"),
        ("vae", cut_short, "vae/diffusion_pytorch_model.safetensors is damaged or cut short"),
        ("text_encoder_2", cut_short, "text_encoder_2/model.safetensors is damaged or cut short"),
        ("transformer", pickled, "transformer/diffusion_pytorch_model.bin is a pickle"),
        ("text_encoder", pickled, "text_encoder/pytorch_model.bin is a pickle"),
        ("transformer", not_json, "transformer/config.json: not valid JSON"),
        ("vae", a_list, "vae/config.json: must hold an object {...}, it holds a list"),
        (
            "transformer",
            mistyped,
            "transformer: 'str' object cannot be interpreted as an integer; num_layers is 'two' in",
        ),
        (
            "text_encoder",
            mistyped,
            "text_encoder: Validation error for field 'num_hidden_layers'",
        ),
        ("transformer", no_json_index, "model_index.json: not valid JSON"),
    ],
)
def test_damaged_parts_are_named(
    part: str, damage: Callable[[Path], None], said: str, tiny_sd3_folder: Path, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_sd3_folder, model)
    damage(model / part)
    with pytest.raises(ValueError, match="model") as refused:
        load_stock("StableDiffusion3Pipeline", str(model), title="SD3", dtype=torch.float32, exact=["vae"])
    shown = str(refused.value)
    assert said in shown
    assert "\n" not in shown
    assert not (model / part / "ran").exists()
    if damage is mistyped and part == "transformer":  # a plan or a check reads it first
        with pytest.raises(
            ValueError, match=r"num_layers is 'two' in config\.json, and 18 by default: download the model again"
        ):
            family_for("sd3", str(model)).meta_denoiser(str(model))


def test_out_of_memory_is_not_told_as_a_bad_folder(tiny_sd3_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from diffusers import StableDiffusion3Pipeline

    def full(*_: object, **__: object) -> None:
        raise OSError("Unable to load weights from checkpoint file") from MemoryError()

    monkeypatch.setattr(StableDiffusion3Pipeline, "from_pretrained", full)
    with pytest.raises(OSError, match="Unable to load"):
        load_stock("StableDiffusion3Pipeline", str(tiny_sd3_folder), title="SD3", dtype=torch.float32, exact=["vae"])


def test_the_family_of_a_damaged_index(tmp_path: Path) -> None:
    (tmp_path / "model_index.json").write_text('{"_class_name": "FluxPipeline",}')
    with pytest.raises(ValueError, match=r"model_index\.json: not valid JSON .*download the model again"):
        family_of(str(tmp_path))


PAIR = {"transformer.a.lora_A.weight": torch.ones(2, 3), "transformer.a.lora_B.weight": torch.ones(3, 2)}


@pytest.mark.parametrize(
    ("metadata", "tensors", "said"),
    [
        ("{", {"transformer.a.lora_A.weight": torch.ones(2, 3)}, "metadata of .* not valid JSON"),
        ("[]", {"transformer.a.lora_A.weight": torch.ones(2, 3)}, "is not an object"),
        ('{"transformer.lora_alpha": "8"}', PAIR, "lora_alpha '8'"),
        ("{}", {"transformer.a.lora_A.weight": torch.ones(2, 3)}, "has no lora_B of a: it is damaged"),
        ("{}", {"a": torch.ones(2)}, "holds no LoRA"),
    ],
)
def test_a_bad_lora_is_named(metadata: str, tensors: dict[str, Tensor], said: str, tmp_path: Path) -> None:
    save_file(tensors, tmp_path / LORA_FILE, metadata={"lora_adapter_metadata": metadata})
    with pytest.raises(ValueError, match=said):
        read_lora(tmp_path)
    whole = (tmp_path / LORA_FILE).read_bytes()
    (tmp_path / LORA_FILE).write_bytes(whole[: len(whole) - 4])
    with pytest.raises(ValueError, match=f"{LORA_FILE} cannot be read .*damaged or cut short"):
        read_lora(tmp_path)


def test_the_config_of_a_peft_lora_names_its_file(tmp_path: Path) -> None:
    pair = {"lora_A": torch.ones(2, 3), "lora_B": torch.ones(3, 2)}
    save_file(
        {f"base_model.model.a.{side}.weight": one for side, one in pair.items()}, tmp_path / "adapter_model.safetensors"
    )
    (tmp_path / "adapter_config.json").write_text('{"r": 2, "r": 3}')
    with pytest.raises(ValueError, match=r"adapter_config\.json: names 'r' twice"):
        read_lora(tmp_path)
    (tmp_path / "adapter_config.json").write_text(json.dumps({"r": 2}))
    assert read_json(tmp_path / "adapter_config.json") == {"r": 2}
    assert read_lora(tmp_path).alpha == 8  # PEFT's own default
