"""VQAScore on a tiny random CLIP and FLAN-T5 in the published layout."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from tiny_clip import assert_pointwise, inputs_of, random_images, vision_tower

from flowrl.rewards import build_reward, reward_options, to_uint8
from flowrl.rewards.metrics import vqa_score

PIECES = "abcdefghijklmnopqrstuvwxyzYACDUSERINT?.:,'\""
WIDTH = 32
PROMPTS = ["a dog", "two cats on a sofa", "the sea"]


def write_clip(folder: Path) -> Path:
    torch.manual_seed(1)
    vision = transformers.CLIPVisionModel(transformers.CLIPVisionConfig(**vision_tower()))
    with torch.no_grad():
        for parameter in vision.parameters():
            parameter.mul_(4.0) if parameter.ndim > 1 else None
    vision.save_pretrained(folder)
    sizes = {"size": {"shortest_edge": 32}, "crop_size": {"height": 32, "width": 32}}
    transformers.CLIPImageProcessor(**sizes).save_pretrained(folder)
    return folder


def write_clip_t5(folder: Path, clip: Path) -> Path:
    """Two files of weights with an index, an output layer of its own, and T5's table under three names."""
    vocab = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0), ("▁Yes", -1.0), *((c, -3.0) for c in PIECES)]
    transformers.T5Tokenizer(vocab=vocab, extra_ids=0).save_pretrained(folder)
    config = {
        "vocab_size": len(vocab) + 8, "d_model": WIDTH, "d_kv": 16, "d_ff": 48, "num_layers": 2, "num_heads": 2,
        "num_decoder_layers": 2, "feed_forward_proj": "gated-gelu", "decoder_start_token_id": 0, "pad_token_id": 0,
        "tie_word_embeddings": False,
    }  # fmt: skip
    torch.manual_seed(2)
    names = transformers.T5ForConditionalGeneration(transformers.T5Config(**config)).state_dict()
    weights = {name: torch.randn(weight.shape) * 0.3 for name, weight in names.items()}
    weights |= {name: weights["shared.weight"] for name in vqa_score.SHARED}
    for name, shape in (
        ("0.weight", (WIDTH, 32)),
        ("0.bias", (WIDTH,)),
        ("2.weight", (WIDTH, WIDTH)),
        ("2.bias", (WIDTH,)),
    ):
        weights[f"mm_projector.{name}"] = torch.randn(shape) * 0.5
    tower = transformers.CLIPVisionModel.from_pretrained(clip).state_dict()
    for name, weight in tower.items():
        weights[f"vision_tower.vision_tower.vision_model.{name}"] = weight + 0.01
    halves = [dict(list(weights.items())[i::2]) for i in range(2)]
    for i, half in enumerate(halves):
        torch.save(half, folder / f"pytorch_model-{i}.bin")
    index = {"weight_map": {name: f"pytorch_model-{i}.bin" for i, half in enumerate(halves) for name in half}}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    settings = {"model_type": "clip_t5", "mm_vision_select_layer": -2, "mm_hidden_size": 32, "mm_vision_tower": "x"}
    (folder / "config.json").write_text(json.dumps({**config, **settings}))
    return folder


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    root = tmp_path_factory.mktemp("vqa")
    clip = write_clip(root / "clip")
    return {"model": str(write_clip_t5(root / "t5", clip)), "vision": str(clip), "dtype": "float32"}


@torch.no_grad()
def test_value_by_hand(options: dict[str, Any]) -> None:
    """Probability of Yes, then of the end after it, step by step; the checkpoint's own output layer and tower."""
    folder = Path(options["model"])
    weights = torch.load(folder / "pytorch_model-0.bin") | torch.load(folder / "pytorch_model-1.bin")
    tokenizer = transformers.T5Tokenizer.from_pretrained(folder)
    network = vqa_score.load_clip_t5(folder, options["vision"], torch.float32, torch.device("cpu"))
    torch.testing.assert_close(network.language.lm_head.weight, weights["lm_head.weight"], rtol=0, atol=0)
    assert not network.language.config.scale_decoder_outputs
    name = "vision_tower.vision_tower.vision_model.embeddings.patch_embedding.weight"
    torch.testing.assert_close(network.vision.state_dict()["embeddings.patch_embedding.weight"], weights[name])
    processor = transformers.CLIPImageProcessor.from_pretrained(options["vision"])
    inputs = inputs_of(random_images(3, 40, 56), PROMPTS)
    values = build_reward("vqa_score", options=options)(inputs).values
    text = (Path(vqa_score.__file__).parents[1] / "templates/published/t2v_metrics/clip_flant5.txt").read_text()
    for image, prompt, value in zip(to_uint8(inputs.images), PROMPTS, values.tolist(), strict=True):
        square = Image.new("RGB", (56, 56), tuple(int(255 * m) for m in processor.image_mean))
        square.paste(Image.fromarray(image), (0, 8))
        seen = network.vision(processor(square, return_tensors="pt")["pixel_values"], output_hidden_states=True)
        x = seen.hidden_states[-2][0, 1:] @ weights["mm_projector.0.weight"].T + weights["mm_projector.0.bias"]
        x = torch.nn.functional.gelu(x) @ weights["mm_projector.2.weight"].T + weights["mm_projector.2.bias"]
        pieces = text.replace("{prompt}", prompt).split("<image>")
        before, after = (weights["shared.weight"][tokenizer(piece).input_ids] for piece in pieces)
        embeds = torch.cat([before, x, after])[None]
        yes = tokenizer.convert_tokens_to_ids("▁Yes")
        steps = []
        for given, wanted in (([0], yes), ([0, yes], 1)):
            logits = network.language(inputs_embeds=embeds, decoder_input_ids=torch.tensor([given])).logits[0, -1]
            steps.append(float(torch.softmax(logits.double(), -1)[wanted]))
        assert value == pytest.approx(np.sqrt(np.prod(steps)), rel=1e-4)


def test_pointwise_and_another_answer(options: dict[str, Any], tmp_path: Path) -> None:
    inputs = inputs_of(random_images(3, 40, 56), PROMPTS)
    reward = build_reward("vqa_score", options=options)
    assert_pointwise(reward, inputs, atol=1e-6)
    own = tmp_path / "own.txt"
    own.write_text("<image> {prompt}?")
    for change in ({"answer": "a"}, {"template": str(own)}):
        other = build_reward("vqa_score", options={**options, **change})
        assert float((other(inputs).values - reward(inputs).values).abs().max()) > 1e-6
        assert other.version != reward.version


@pytest.mark.slow
def test_the_version_knows_image_tower_and_tokenizer(options: dict[str, Any], tmp_path: Path) -> None:
    version = build_reward("vqa_score", options=options).version
    moved, spoken = tmp_path / "t5", tmp_path / "tokenizer"
    for place in (moved, spoken):
        shutil.copytree(options["model"], place)
    for change in ({"vision": str(shutil.copytree(options["vision"], tmp_path / "clip"))}, {"tokenizer": str(spoken)}):
        assert build_reward("vqa_score", options={**options, **change}).version != version
    seen = []
    for factor in (1.0, 1.5):  # of the image tower alone, in a folder of one name
        for file in moved.glob("pytorch_model-*.bin"):
            weights = torch.load(file)
            torch.save({n: w * factor if "patch_embedding" in n else w for n, w in weights.items()}, file)
        seen.append(vqa_score.load_clip_t5(moved, options["vision"], torch.float32, torch.device("cpu")))
    assert vqa_score.fingerprint_of(seen[0]) != vqa_score.fingerprint_of(seen[1])


def test_what_is_missing_is_named(options: dict[str, Any], tmp_path: Path) -> None:
    own = tmp_path / "own.txt"
    own.write_text("{prompt}?")
    with pytest.raises(ValueError, match="must hold <image> exactly once"):
        reward_options("vqa_score", {"template": str(own)})
    with pytest.raises(ValueError, match="answer must be a word"):
        reward_options("vqa_score", {"answer": " "})
    folder = tmp_path / "folder"
    transformers.T5Tokenizer.from_pretrained(options["model"]).save_pretrained(folder)
    (folder / "config.json").write_text((Path(options["model"]) / "config.json").read_text())
    given = {**options, "model": str(folder)}
    with pytest.raises(ValueError, match=r"holds none of model\.safetensors\.index\.json"):
        build_reward("vqa_score", options=given)
    torch.save({"shared.weight": torch.zeros(4, 4)}, folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match="is not a CLIP-FlanT5"):
        build_reward("vqa_score", options=given)
    weights = torch.load(Path(options["model"]) / "pytorch_model-0.bin")
    weights |= torch.load(Path(options["model"]) / "pytorch_model-1.bin")
    for lost, words in (("lm_head.weight", "not a CLIP-FlanT5"), ("encoder.final_layer_norm.weight", "first: encoder")):
        torch.save({name: w for name, w in weights.items() if name != lost}, folder / "pytorch_model.bin")
        with pytest.raises(ValueError, match=words):
            build_reward("vqa_score", options=given)
