"""VideoAlign on a tiny random Qwen2-VL with its real processor: read-out, constants, and the layouts of checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tiny_vlm import PROMPTS, WIDTH, backbone_state, inputs_of, older_name, tiny_processor, write_tiny_vlm

from flowrl.rewards import build_reward, reward_options, to_uint8, video_align

DIMENSIONS = ("VQ", "MQ", "TA")
CONSTANTS = {
    "VQ_mean": 3.6757, "VQ_std": 2.2476, "MQ_mean": 1.1646, "MQ_std": 1.3811, "TA_mean": 0.25, "TA_std": 0.5,
}  # fmt: skip


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_vlm(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def align(base: Path) -> dict[str, Any]:
    """The options of a VideoReward whose weights are complete, under the names that peft gives them."""
    folder = base.with_name("video_align")
    for step in (2, 10):
        (folder / f"checkpoint-{step}").mkdir(parents=True)
    weights = {f"base_model.model.{older_name(name)}": weight for name, weight in backbone_state(base).items()}
    weights["base_model.model.rm_head.weight"] = torch.randn(1, WIDTH, generator=torch.Generator().manual_seed(2))
    torch.save(weights, folder / "checkpoint-10" / "model.pth")
    content = {
        "data_config": {"fps": 2.0, "max_frame_pixels": 200704, "sample_type": "uniform", "num_frames": None},
        "model_config": {"use_special_tokens": True, "output_dim": 1},
        "peft_lora_config": {"lora_alpha": 128, "lora_r": 64, "use_rslora": False},
        "inference_config": CONSTANTS,
    }
    (folder / "model_config.json").write_text(json.dumps(content))
    return {"model": str(folder), "base": str(base), "dtype": "float32"}


@torch.no_grad()
def test_video_align_is_the_sum_of_normalised_outputs(base: Path, align: dict[str, Any]) -> None:
    """By hand: frames 0, 2, 3, 5 of 6 at 28 x 28 multiples, the template, the stock model, the constants."""
    import transformers

    inputs = inputs_of(videos=True)
    assert inputs.videos is not None
    output = build_reward("video_align", options=align)(inputs)
    model = transformers.Qwen2VLForConditionalGeneration.from_pretrained(base).eval()
    processor = tiny_processor()
    processor.tokenizer.add_tokens([f"<|{name}_reward|>" for name in DIMENSIONS], special_tokens=True)
    head = torch.randn(1, WIDTH, generator=torch.Generator().manual_seed(2))[0]
    template = (
        Path(video_align.__file__).parent / "templates" / "published" / "video_align" / "video_align.txt"
    ).read_text()
    for i in range(len(PROMPTS)):
        frames = to_uint8(inputs.videos[i])[[0, 2, 3, 5]]
        pixels = torch.stack([torch.from_numpy(f.copy()).permute(2, 0, 1) for f in frames])
        size = (28 * 10, 28 * 14)  # of 48 x 72: at least 100,352 pixels, both sides rounded up
        pixels = torch.nn.functional.interpolate(pixels.float(), size=size, mode="bicubic", antialias=True)
        pixels = pixels.round().clamp(0, 255).to(torch.uint8)
        text = "<|im_start|>user\n<|vision_start|><|video_pad|><|vision_end|>" + template.replace(
            "{prompt}", PROMPTS[i]
        )
        batch = processor(
            text=text + "<|im_end|>\n<|im_start|>assistant\n", videos=[pixels], return_tensors="pt",
            videos_kwargs={"do_resize": False, "do_sample_frames": False},
        )  # fmt: skip
        assert batch["video_grid_thw"].tolist() == [[2, 20, 28]]
        positions = torch.arange(batch["input_ids"].shape[1]).expand(3, 1, -1)
        hidden = model.model(**batch, position_ids=positions).last_hidden_state[0]
        total = 0.0
        for k, name in enumerate(DIMENSIONS):
            place = int(torch.nonzero(batch["input_ids"][0] == len(processor.tokenizer) - 3 + k))
            value = (float(hidden[place] @ head) - CONSTANTS[f"{name}_mean"]) / CONSTANTS[f"{name}_std"]
            assert output.parts[name][i].item() == pytest.approx(value, abs=2e-2)  # 8-bit rounding of resized frames
            total += output.parts[name][i].item()
        assert output.values[i].item() == pytest.approx(total, abs=1e-5)


@pytest.mark.slow
def test_video_align_dimensions_and_constants(align: dict[str, Any]) -> None:
    inputs = inputs_of(videos=True)
    whole = build_reward("video_align", options=align)(inputs)
    for names in (["MQ"], ["TA", "VQ"]):
        some = build_reward("video_align", options={**align, "dimensions": names})(inputs)
        torch.testing.assert_close(some.values, torch.stack([whole.parts[name] for name in names]).sum(0))
        assert set(some.parts) == set(DIMENSIONS)
    raw = build_reward("video_align", options={**align, "normalise": False})(inputs)
    for name in DIMENSIONS:
        expected = (raw.parts[name] - CONSTANTS[f"{name}_mean"]) / CONSTANTS[f"{name}_std"]
        torch.testing.assert_close(whole.parts[name], expected, rtol=0, atol=1e-5)


@pytest.mark.slow
def test_video_align_is_pointwise_and_reads_the_prompt_for_text_alignment_only(align: dict[str, Any]) -> None:
    """Its template names the text after the two other tokens, and the model is causal."""
    inputs, reward = inputs_of(videos=True), build_reward("video_align", options=align)
    whole = reward(inputs)
    torch.testing.assert_close(reward(inputs[[2, 0, 1]]).values, whole.values[[2, 0, 1]], rtol=0, atol=1e-5)
    batched = build_reward("video_align", options={**align, "batch_size": 2})(inputs)
    torch.testing.assert_close(batched.values, whole.values, rtol=0, atol=1e-5)
    other = reward(inputs_of(videos=True, prompts=["a cat", *PROMPTS[1:]])).parts
    torch.testing.assert_close(other["VQ"], whole.parts["VQ"], rtol=0, atol=1e-6)
    torch.testing.assert_close(other["MQ"], whole.parts["MQ"], rtol=0, atol=1e-6)
    assert abs(float(other["TA"][0] - whole.parts["TA"][0])) > 1e-3


def test_three_outputs_a_token_are_read_on_the_diagonal(align: dict[str, Any], tmp_path: Path) -> None:
    """A head whose three rows are 1, 2 and 3 times the single one gives 1, 2 and 3 times its raw outputs."""
    folder = Path(align["model"])
    weights = torch.load(folder / "checkpoint-10" / "model.pth", weights_only=True)
    (tmp_path / "checkpoint-1").mkdir()
    (tmp_path / "model_config.json").write_text((folder / "model_config.json").read_text())
    row = weights["base_model.model.rm_head.weight"]
    weights["base_model.model.rm_head.weight"] = torch.cat([row, 2 * row, 3 * row])
    torch.save(weights, tmp_path / "checkpoint-1" / "model.pth")
    inputs, raw = inputs_of(videos=True), {**align, "normalise": False}
    one = build_reward("video_align", options=raw)(inputs).parts
    three = build_reward("video_align", options={**raw, "model": str(tmp_path)})(inputs).parts
    for k, name in enumerate(DIMENSIONS):
        torch.testing.assert_close(three[name], (k + 1) * one[name], rtol=0, atol=1e-4)


@pytest.mark.slow
def test_lora_checkpoints_change_the_base_model(base: Path, align: dict[str, Any], tmp_path: Path) -> None:
    """LoRA matrices and other trained weights in two files, against the same change made to all weights in one."""
    generator = torch.Generator().manual_seed(3)
    module = "model.layers.1.self_attn.q_proj"
    a, b = torch.randn(4, WIDTH, generator=generator), torch.randn(WIDTH, 4, generator=generator)
    head = torch.randn(1, WIDTH, generator=generator)
    rows = backbone_state(base)["model.language_model.embed_tokens.weight"]
    rows = rows[: len(tiny_processor().tokenizer) + 3] + 0.1
    config = json.loads((Path(align["model"]) / "model_config.json").read_text())
    values = []
    for kind in ("lora", "whole"):
        folder = tmp_path / kind
        (folder / "checkpoint-7").mkdir(parents=True)
        (folder / "model_config.json").write_text(json.dumps(config))
        prefix = "base_model.model."
        if kind == "lora":
            pair = {f"{prefix}{module}.lora_A.weight": a, f"{prefix}{module}.lora_B.weight": b}
            save_file(pair, folder / "checkpoint-7" / "adapter_model.safetensors")
            other = {f"{prefix}rm_head.weight": head, f"{prefix}model.embed_tokens.weight": rows}
            torch.save(other, folder / "checkpoint-7" / "non_lora_state_dict.pth")
        else:
            weights = {older_name(name): weight for name, weight in backbone_state(base).items()}
            weights |= {"rm_head.weight": head, "model.embed_tokens.weight": rows}
            weights[f"{module}.weight"] = weights[f"{module}.weight"] + 128 / 4 * b @ a
            torch.save(weights, folder / "checkpoint-7" / "model.pth")
        values.append(
            build_reward("video_align", options={**align, "model": str(folder)})(inputs_of(videos=True)).values
        )
    torch.testing.assert_close(values[0], values[1], rtol=0, atol=1e-4)
    plain = build_reward("video_align", options=align)(inputs_of(videos=True)).values
    assert float((plain - values[0]).abs().min()) > 1e-3


def test_merging_names_of_peft() -> None:
    a, b, w = torch.ones(4, 3), torch.ones(2, 4), torch.zeros(2, 3)
    names = {
        "base_model.model.visual.x.base_layer.weight": w,
        "base_model.model.visual.x.base_layer.bias": torch.ones(2),
        "base_model.model.visual.x.lora_A.default.weight": a,
        "base_model.model.visual.x.lora_B.default.weight": b,
        "base_model.model.rm_head.original_module.weight": torch.zeros(1, 3),
        "base_model.model.rm_head.modules_to_save.default.weight": torch.ones(1, 3),
        "base_model.model.model.norm.weight": torch.ones(3),
    }
    merged = video_align.merge_lora(names, alpha=8.0, rslora=False)
    assert set(merged) == {"visual.x.weight", "visual.x.bias", "rm_head.weight", "language_model.norm.weight"}
    torch.testing.assert_close(merged["visual.x.weight"], torch.full((2, 3), 8.0))  # 8 / 4 * 4
    torch.testing.assert_close(merged["rm_head.weight"], torch.ones(1, 3))
    stable = video_align.merge_lora(names, alpha=8.0, rslora=True)
    torch.testing.assert_close(stable["visual.x.weight"], torch.full((2, 3), 16.0))  # 8 / 2 * 4
    del names["base_model.model.visual.x.lora_B.default.weight"]
    with pytest.raises(ValueError, match=r"LoRA of visual\.x lacks"):
        video_align.merge_lora(names, alpha=8.0, rslora=False)


def test_video_align_errors(align: dict[str, Any], tmp_path: Path) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"dimensions": "VQ"}, "dimensions must be a list"),
        ({"dimensions": []}, "dimensions must be a list"),
        ({"dimensions": ["VG"]}, r"unknown dimension 'VG'; allowed: MQ, TA, VQ"),
        ({"dimensions": ["VQ", "VQ"]}, "names one twice"),
        ({"batch_size": 0}, "batch_size must be at least 1"),
        ({"model": "./none"}, "there is no file or folder"),
    ]
    for options, message in cases:
        with pytest.raises(ValueError, match=message):
            reward_options("video_align", options)
    with pytest.raises(ValueError, match="has no checkpoint-3; n: 2, 10"):
        build_reward("video_align", options={**align, "checkpoint": 3})
    with pytest.raises(ValueError, match=r"holds neither model\.pth nor adapter_model\.safetensors"):
        build_reward("video_align", options={**align, "checkpoint": 2})
    with pytest.raises(ValueError, match="judges videos"):
        build_reward("video_align", options=align)(inputs_of())
    content = json.loads((Path(align["model"]) / "model_config.json").read_text())
    for change, message in (
        ({"inference_config": None}, "has no VQ_mean under inference_config: set normalise: false"),
        ({"inference_config": CONSTANTS | {"TA_std": 0.0}}, "standard deviations positive"),
        ({"data_config": {"sample_type": "multi_pts"}}, "must have sample_type uniform"),
    ):
        (tmp_path / "model_config.json").write_text(json.dumps(content | change))
        with pytest.raises(ValueError, match=message):
            video_align.read_settings(tmp_path, normalise=True)
    (tmp_path / "model_config.json").unlink()
    with pytest.raises(ValueError, match="cannot read"):
        video_align.read_settings(tmp_path, normalise=True)


def test_what_the_reward_says_of_itself(align: dict[str, Any]) -> None:
    reward = build_reward("video_align", options=align)
    assert reward.needs == {"videos", "prompts"}
    assert ":VQ+MQ+TA:normalised:" in reward.version
    assert ":template-" in reward.version
    assert reward.version.endswith(":float32")
