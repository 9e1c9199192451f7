"""Writes `tests/rewards/networks/older_layouts/`: small checkpoints as transformers 4 saves them, and their outputs.

    pip install --target DIR --no-deps transformers==4.57.1 tokenizers==0.22.2 huggingface_hub==0.36.0
    PYTHONPATH=DIR python tests/trials/save_older_layouts.py

Every class that a reward or a stock pipeline loads is saved by transformers 4 from a small random model; names and
shapes are taken from the file that it wrote, the weights replaced by `older_layouts.weight`, and the outputs are those
of transformers 4 on that very file.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.modules["datasets"] = None  # type: ignore[assignment]  # a newer one in the environment asks for a newer hub client
sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))

import torch  # noqa: E402
import transformers  # noqa: E402
from older_layouts import FOLDER, dtype_of, outputs_of, write_checkpoint  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

TOKENS = [[5, 9, 3, 17, 2, 11], [7, 1, 12, 4, 8, 30]]
TEXT = {"input_ids": TOKENS, "attention_mask": [[1] * 6, [1] * 4 + [0] * 2]}
CLIP_TEXT = {
    "vocab_size": 32, "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "max_position_embeddings": 8, "eos_token_id": 30, "bos_token_id": 0, "pad_token_id": 1,
}  # fmt: skip
CLIP_VISION = {
    "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 8,
    "patch_size": 4,
}  # fmt: skip
T5 = {"vocab_size": 32, "d_model": 8, "d_kv": 4, "d_ff": 16, "num_layers": 2, "num_heads": 2}
DECODER = {
    "vocab_size": 40, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 0,
    "eos_token_id": 1,
}  # fmt: skip
QWEN = {
    **{key: value for key, value in DECODER.items() if key != "head_dim"}, "image_token_id": 36, "video_token_id": 37,
    "vision_start_token_id": 34, "vision_end_token_id": 35, "tie_word_embeddings": False,
    "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]},
}  # fmt: skip
PLAIN = [0, 1, 2, 3, 4, 5, 6, 7]
SIGHT = {  # an image of two merged patches; positions on three axes, then plain ones, as reward models trained
    "input_ids": [[5, 34, 36, 36, 35, 9, 33, 7]] * 2, "image_grid_thw": [[1, 2, 4]] * 2,
    "position_ids": [[[0, 1, 2, 2, 4, 5, 6, 7], PLAIN], [[0, 1, 2, 2, 4, 5, 6, 7], PLAIN], [PLAIN, PLAIN]],
    "pixel_values": {"shape": [16, 1176]},
}  # fmt: skip
SWIN = {
    "embed_dim": 4, "depths": [1, 1, 2, 1], "num_heads": [1, 1, 2, 2], "window_size": 2, "drop_path_rate": 0.0,
    "out_features": ["stage1", "stage2", "stage3", "stage4"],
}  # fmt: skip

HOW = {"gemma2": {"attn_implementation": "eager"}}
"""The default kernel of transformers 4 drops Gemma 2's soft capping, transformers 5 does not."""
DTYPE = {"mask2former_swin": "float64", "t5": "float64", "umt5": "float64"}
"""Where float32 does not hold the tolerance: masked attention cuts at a threshold, T5's logits are not scaled."""


def qwen2_vl(**other: Any) -> Any:
    """Configuration in the flat layout of 2024, which the hub's files of Qwen2-VL have."""
    vision = {"depth": 1, "embed_dim": 16, "hidden_size": 16, "num_heads": 2, "mlp_ratio": 1}
    return transformers.Qwen2VLConfig(**QWEN, vision_config=vision, **other)


def qwen25_vl() -> Any:
    vision = {
        "depth": 2, "hidden_size": 16, "out_hidden_size": 16, "num_heads": 2, "intermediate_size": 16,
        "fullatt_block_indexes": [1], "window_size": 56,
    }  # fmt: skip
    return transformers.Qwen2_5_VLConfig(**QWEN, vision_config=vision)


def cases() -> dict[str, tuple[str, Any, dict[str, Any], tuple[str, ...]]]:
    """Name -> class, configuration, inputs, outputs that are kept."""
    of = transformers
    square = {"pixel_values": {"shape": [1, 3, 8, 8]}}
    return {
        "mask2former_swin": (
            "Mask2FormerForUniversalSegmentation",
            of.Mask2FormerConfig(
                backbone_config=of.SwinConfig(**SWIN), feature_size=32, mask_feature_size=32, hidden_dim=32,
                encoder_feedforward_dim=8, encoder_layers=1, decoder_layers=2, num_attention_heads=2,
                dim_feedforward=8, num_queries=3, num_labels=4,
            ),
            {"pixel_values": {"shape": [1, 3, 32, 64]}}, ("class_queries_logits", "masks_queries_logits"),
        ),
        "dinov2": (
            "Dinov2Model",
            of.Dinov2Config(hidden_size=8, num_hidden_layers=2, num_attention_heads=2, image_size=28, patch_size=14),
            {"pixel_values": {"shape": [1, 3, 28, 28]}}, ("last_hidden_state", "pooler_output"),
        ),
        "vit_classifier": (
            "ViTForImageClassification",
            of.ViTConfig(
                hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16, image_size=8,
                patch_size=4, num_labels=2,
            ),
            square, ("logits",),
        ),
        "clip": (
            "CLIPModel", of.CLIPConfig(text_config=CLIP_TEXT, vision_config=CLIP_VISION, projection_dim=6),
            {**TEXT, **square}, ("text_embeds", "image_embeds", "logits_per_image"),
        ),
        "clip_text": ("CLIPTextModel", of.CLIPTextConfig(**CLIP_TEXT), TEXT, ("last_hidden_state", "pooler_output")),
        "clip_text_projected": (
            "CLIPTextModelWithProjection", of.CLIPTextConfig(**CLIP_TEXT, projection_dim=6), TEXT, ("text_embeds",),
        ),
        "clip_vision": ("CLIPVisionModel", of.CLIPVisionConfig(**CLIP_VISION), square, ("last_hidden_state",)),
        "vjepa2": (
            "VJEPA2Model",
            of.VJEPA2Config(
                hidden_size=24, num_hidden_layers=2, num_attention_heads=2, crop_size=8, patch_size=4,
                frames_per_clip=4, tubelet_size=2, mlp_ratio=1.0, pred_hidden_size=24, pred_num_attention_heads=2,
                pred_num_hidden_layers=1, pred_mlp_ratio=1.0,
            ),
            {"pixel_values_videos": {"shape": [1, 4, 3, 8, 8]}}, ("last_hidden_state",),
        ),
        "qwen2_vl": (
            "Qwen2VLForConditionalGeneration", qwen2_vl(),
            SIGHT, ("logits",),
        ),
        "qwen25_vl": (
            "Qwen2_5_VLForConditionalGeneration", qwen25_vl(),
            SIGHT, ("logits",),
        ),
        "t5": ("T5EncoderModel", of.T5Config(**T5), TEXT, ("last_hidden_state",)),
        "umt5": ("UMT5EncoderModel", of.UMT5Config(**T5), TEXT, ("last_hidden_state",)),
        "gemma2": ("Gemma2Model", of.Gemma2Config(**DECODER), TEXT, ("last_hidden_state",)),
        "llama": ("LlamaModel", of.LlamaConfig(**DECODER), TEXT, ("last_hidden_state",)),
        "qwen3": ("Qwen3ForCausalLM", of.Qwen3Config(**DECODER), TEXT, ("logits",)),
    }  # fmt: skip


def main() -> None:
    assert transformers.__version__.startswith("4."), transformers.__version__
    FOLDER.mkdir(exist_ok=True)
    for name, (kind, config, inputs, outputs) in cases().items():
        cls = getattr(transformers, kind)
        with tempfile.TemporaryDirectory() as folder:
            cls(config).save_pretrained(folder)
            saved = load_file(Path(folder) / "model.safetensors")
            case = {
                "class": kind, "transformers": transformers.__version__, "dtype": DTYPE.get(name, "float32"),
                "config": json.loads((Path(folder) / "config.json").read_text()),
                "shapes": {key: list(value.shape) for key, value in saved.items() if value.is_floating_point()},
                "integers": {key: value.tolist() for key, value in saved.items() if not value.is_floating_point()},
                "inputs": inputs, "outputs": dict.fromkeys(outputs),
            }  # fmt: skip
            network, info = cls.from_pretrained(
                write_checkpoint(case, Path(folder) / "again"), output_loading_info=True, dtype=dtype_of(case),
                **HOW.get(name, {}),
            )  # fmt: skip
        assert not info["missing_keys"], (name, info["missing_keys"])
        found = outputs_of(case, network.eval())
        case["outputs"] = {key: rounded(value.tolist()) for key, value in found.items()}
        path = FOLDER / f"{name}.json"
        path.write_text(json.dumps(case, separators=(",", ":")) + "\n")
        sizes = {key: (list(value.shape), round(float(value.abs().max()), 3)) for key, value in found.items()}
        print(f"{path.name} {path.stat().st_size} bytes: {sizes}")


def rounded(values: Any) -> Any:
    """Nested numbers to 9 decimals, which is beyond float32 for numbers of the order of 1."""
    return [rounded(value) for value in values] if isinstance(values, list) else round(values, 9)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
