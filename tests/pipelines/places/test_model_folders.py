"""What a model folder lacks, holds too much of or says wrong is told before any weight is read, by part and cure."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from flowrl.pipelines import family, family_name
from flowrl.prompts.tokenizer_checks import check_tokenizer, check_tokenizer_files
from flowrl.runtime.files import read_json


@pytest.fixture
def model(tiny_sd3_folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_sd3_folder, tmp_path / "model"))


def checked(model: Path | str) -> None:
    """What train, doctor, plan and sample ask before they load."""
    name = family_name(None, str(model))
    family(name).check(str(model), None)


def index(model: Path, **changes: Any) -> None:
    path = model / "model_index.json"
    whole = read_json(path) | changes
    path.write_text(json.dumps({key: value for key, value in whole.items() if value != "gone"}))


# ---- tokenizers ------------------------------------------------------------------------------------------------------


def without_words(folder: Path) -> None:
    for path in folder.iterdir():
        if path.name != "tokenizer_config.json":
            path.unlink()


@pytest.mark.parametrize("part", ["tokenizer", "tokenizer_2", "tokenizer_3"])
def test_a_tokenizer_without_its_files_is_refused(part: str, model: Path) -> None:
    without_words(model / part)
    with pytest.raises(ValueError, match=rf"model/{part} is a tokenizer without words: it has none of tokenizer\.json"):
        checked(model)
    with pytest.raises(ValueError, match=rf"model/{part} is a tokenizer without words"):
        family("sd3").load(str(model), dtype=torch.float32)


def test_an_empty_file_of_words_and_missing_merges_are_refused(model: Path) -> None:
    whole = model / "tokenizer" / "tokenizer.json"
    said = read_json(whole)
    whole.write_text(json.dumps(said | {"model": {**said["model"], "vocab": {"<unk>": 0}}}))
    with pytest.raises(ValueError, match=r"tokenizer\.json has no words"):
        checked(model)
    without_words(model / "tokenizer")
    (model / "tokenizer" / "vocab.json").write_text(json.dumps(said["model"]["vocab"]))
    with pytest.raises(ValueError, match=r"model/tokenizer has vocab\.json and no merges\.txt"):
        checked(model)
    (model / "tokenizer" / "merges.txt").write_text("#version: 0.2\n")
    checked(model)


def test_a_loaded_tokenizer_tells_texts_apart_or_is_refused(model: Path) -> None:
    """The check by effect, which does not go by the names of files."""
    for made in ("CLIPTokenizer", "T5Tokenizer", "Qwen2Tokenizer", "LlamaTokenizer", "GemmaTokenizer", "BertTokenizer"):
        with pytest.raises(ValueError, match=r"PLACE is a tokenizer of \d+ entries, which gives .* the same tokens"):
            check_tokenizer(getattr(transformers, made)(), "PLACE", "download it again")
    check_tokenizer(transformers.ByT5Tokenizer(), "PLACE", "")
    for part in ("tokenizer", "tokenizer_3"):
        check_tokenizer(transformers.AutoTokenizer.from_pretrained(model / part), part, "")


def test_tokenizers_of_bytes_need_no_file_of_words(tmp_path: Path) -> None:
    transformers.ByT5Tokenizer().save_pretrained(tmp_path)
    check_tokenizer_files(tmp_path, "")


# ---- parts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda m: shutil.rmtree(m / "vae"), r"has no folder vae, which its model_index\.json names \(AutoencoderKL\)"),
        (lambda m: shutil.rmtree(m / "scheduler"), r"has no folder scheduler, .*\(FlowMatchEulerDiscreteScheduler\)"),
        (lambda m: shutil.rmtree(m / "tokenizer_2"), "has no folder tokenizer_2"),
        (lambda m: (m / "vae" / "config.json").unlink(), r"model/vae has no config\.json"),
        (lambda m: (m / "scheduler" / "scheduler_config.json").unlink(), r"scheduler has no scheduler_config\.json"),
        (lambda m: index(m, vae=[None, None]), r"has no vae, its model_index\.json says \[None, None\]"),
        (lambda m: index(m, text_encoder_2=[None, None]), "has no text_encoder_2"),
        (lambda m: index(m, scheduler="gone"), "has no scheduler"),
        (lambda m: index(m, vae="AutoencoderKL"), r"model_index\.json: vae is 'AutoencoderKL', and a part is"),
        (lambda m: index(m, vae=["diffusers"]), r"vae is \['diffusers'\]"),
        (lambda m: index(m, vae=["diffusers", None]), r"vae is \['diffusers', None\]"),
        (lambda m: index(m, vae={"a": 1}), r"vae is \{'a': 1\}"),
        (lambda m: index(m, _class_name=["pipeline", "MyPipe"]), r"names a class in code of its own"),
        (lambda m: index(m, _class_name=None), r"has the _class_name None"),
        (lambda m: index(m, _class_name=3), r"has the _class_name 3"),
        (lambda m: index(m, _class_name={}), r"has the _class_name \{\}"),
        (lambda m: index(m, _class_name="gone"), r"has the _class_name None"),
        (lambda m: (m / "model_index.json").unlink(), r"it holds the parts .*vae.* without it"),
    ],
)
def test_what_a_folder_lacks_or_says_wrong(change: Callable[[Path], object], said: str, model: Path) -> None:
    change(model)
    with pytest.raises(ValueError, match=said) as refused:
        checked(model)
    assert "\n" not in str(refused.value)


def test_a_folder_without_weights_of_a_part(model: Path) -> None:
    (model / "vae" / "diffusion_pytorch_model.safetensors").rename(model / "vae" / "vae.ckpt")
    with pytest.raises(ValueError, match=r"model/vae has no weights .*, but vae\.ckpt, which is not read"):
        family("sd3").load(str(model), dtype=torch.float32)


@pytest.mark.parametrize("later", [False, True])
def test_a_model_saved_without_t5_embeds_as_stock_does(model: Path, tmp_path: Path, later: bool) -> None:
    import diffusers

    from flowrl.pipelines.weights.loading_choices import Loading

    stock = diffusers.StableDiffusion3Pipeline.from_pretrained(model, text_encoder_3=None, tokenizer_3=None)
    for part in ("text_encoder_3", "tokenizer_3"):
        shutil.rmtree(model / part)
        index(model, **{part: [None, None]})
    checked(model)
    loaded = family("sd3").load(str(model), dtype=torch.float32, how=Loading(later=later), max_sequence_length=16)
    loaded.load_text_encoders()
    found = loaded.encode(["a red circle"]).tensors
    with torch.no_grad():
        embeds, _, pooled, _ = stock.encode_prompt(
            "a red circle", None, None, do_classifier_free_guidance=False, max_sequence_length=16
        )
    assert torch.equal(found["embeds"], embeds)
    assert torch.equal(found["pooled"], pooled)
    loaded.load_denoiser()


def stated(model: Path, path: str, **changes: Any) -> None:
    (model / path).write_text(json.dumps(read_json(model / path, finite=False) | changes))


@pytest.mark.parametrize(
    ("path", "changes", "said"),
    [
        ("vae/config.json", {"latent_channels": 4}, "latents have 4 channels, and the denoiser of .* takes 8"),
        ("vae/config.json", {"scaling_factor": "1.5"}, "scaling_factor '1.5', which is not such a number"),
        ("vae/config.json", {"shift_factor": True}, "shift_factor True"),
        ("vae/config.json", {"latents_std": [1.0]}, "has 1 latents_std for 8 channels"),
        (
            "tokenizer/tokenizer_config.json",
            {"model_max_length": 77},
            "model/tokenizer pads prompts to 77 tokens .* 16 pos",
        ),
        (
            "scheduler/scheduler_config.json",
            {"shift": None},
            r"cannot be made of its scheduler_config\.json \(shift=None\)",
        ),
    ],
)
def test_parts_that_do_not_fit_each_other(path: str, changes: dict[str, Any], said: str, model: Path) -> None:
    stated(model, path, **changes)
    ask = checked if path.startswith("scheduler") else lambda place: family("sd3").load(str(place), dtype=torch.float32)
    with pytest.raises(ValueError, match=said):
        ask(model)


def test_a_part_that_a_library_cannot_read_is_named(model: Path) -> None:
    (model / "vae" / "diffusion_pytorch_model.safetensors").rename(model / "vae" / "Diffusion.safetensors")
    with pytest.raises(ValueError, match=r"\(.*model/vae: Error no file named"):
        family("sd3").load(str(model), dtype=torch.float32)


def test_tokens_beyond_the_embedding_are_refused_at_once_and_later(model: Path) -> None:
    """A prompt's own token is seen when it comes: on a GPU it would end the process."""
    path = model / "tokenizer_3" / "tokenizer.json"
    said = read_json(path)
    entry = dict.fromkeys(("special", "normalized", "lstrip", "rstrip", "single_word"), False)
    path.write_text(
        json.dumps({**said, "added_tokens": [*said["added_tokens"], {**entry, "id": 900, "content": "fox"}]})
    )
    loaded: Any = family("sd3").load(str(model), dtype=torch.float32, max_sequence_length=16)
    loaded.encode(["a red circle"])
    with pytest.raises(ValueError, match=r"model/tokenizer_3 gives token \d+, and the text encoder beside it has 138"):
        loaded.encode(["a red fox"])
    path.write_text(
        json.dumps({**said, "added_tokens": [*said["added_tokens"], {**entry, "id": 900, "content": "red"}]})
    )
    with pytest.raises(ValueError, match="model/tokenizer_3 gives token"):
        family("sd3").load(str(model), dtype=torch.float32)


def test_embeddings_of_another_width_are_refused(model: Path) -> None:
    config = transformers.T5Config(**{**read_json(model / "text_encoder_3" / "config.json"), "d_model": 64})
    transformers.T5EncoderModel(config).save_pretrained(model / "text_encoder_3")
    loaded: Any = family("sd3").load(str(model), dtype=torch.float32, max_sequence_length=16)
    with pytest.raises(ValueError, match=r"embed prompts in 64 numbers \(embeds\), and its denoiser reads 32"):
        loaded.encode(["a red circle"])


# ---- what is no folder -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("flux1-Q4_K.gguf", r"is a GGUF file, whose weights are kept in few bits .*pipeline\.quantize"),
        ("dreams.ckpt", r"is a pickle, .*convert it to a diffusers folder"),
        ("dreams.pt", "is a pickle"),
        ("pytorch_model.bin", "is a pickle"),
        ("flux1-dev.sft", r"is a file of safetensors under another ending: rename it to .*flux1-dev\.safetensors"),
        ("notes.txt", r"is no diffusers pipeline: give a folder"),
    ],
)
def test_other_files_are_told_with_what_to_do(name: str, said: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"GGUF")
    with pytest.raises(ValueError, match=said):
        family_name(None, str(tmp_path / name))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("pytorch_lora_weights.safetensors", r"it holds a LoRA: set policy\.init_lora"),
        ("dreams.safetensors", r"it holds files of weights: set pipeline\.model to .*dreams\.safetensors"),
        ("readme.md", r"give the folder that holds model_index\.json"),
    ],
)
def test_other_folders_are_told_with_what_to_do(name: str, said: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"")
    with pytest.raises(ValueError, match=said):
        family_name(None, str(tmp_path))
