"""Checkpoints that transformers 4 wrote, as the hub has them: loaded here they compute what they computed there."""

from __future__ import annotations

from pathlib import Path

import older_layouts
import pytest
import torch
import transformers
from older_layouts import DEPTH, FOLDER, expected, inputs_of, outputs_of, stored, weights_of, write_checkpoint
from rounding import assert_same_sum
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from flowrl.rewards.hpsv3 import preference_head
from flowrl.rewards.networks import mask2former, qwen_vl
from flowrl.rewards.networks.pretrained import load_network

CPU = torch.device("cpu")
NAMES = sorted(path.stem for path in FOLDER.glob("*.json"))
UNREAD = {"mask2former_swin": mask2former.UNREAD}
KINDS = [(name, stored(name)["class"]) for name in NAMES]
KINDS += [(name, "AutoModelForImageTextToText") for name in ("qwen2_vl", "qwen25_vl")]  # as judges load them

pytestmark = pytest.mark.filterwarnings("ignore:`rope_scaling` is deprecated:FutureWarning")  # what the files hold


def load(name: str, folder: Path, kind: str | None = None, *, unread: tuple[str, ...] | None = None) -> nn.Module:
    case = stored(name)
    network: nn.Module = load_network(
        getattr(transformers, kind or case["class"]), str(folder), device=CPU, owner="reward 'x'", what="small",
        shared=False, dtype=older_layouts.dtype_of(case), unread=UNREAD.get(name, ()) if unread is None else unread,
    )  # fmt: skip
    return network


def test_every_class_that_is_loaded_from_the_hub_is_here() -> None:
    assert {stored(name)["transformers"] for name in NAMES} == {"4.57.1"}
    assert {stored(name)["class"] for name in NAMES} >= {
        "Mask2FormerForUniversalSegmentation", "Dinov2Model", "ViTForImageClassification", "CLIPModel", "VJEPA2Model",
        "Qwen2VLForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration",
        "CLIPTextModel", "CLIPTextModelWithProjection", "CLIPVisionModel", "T5EncoderModel", "UMT5EncoderModel",
        "Gemma2Model", "LlamaModel", "Qwen3ForCausalLM",
    }  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kind"), KINDS)
def test_outputs_are_those_of_transformers_4(name: str, kind: str, tmp_path: Path) -> None:
    case = stored(name)
    found = outputs_of(case, load(name, write_checkpoint(case, tmp_path), kind))
    for output, wanted in expected(case).items():
        assert wanted.abs().max() > 0.1, "outputs near zero would show nothing"
        assert_same_sum(found[output], wanted, depth=DEPTH)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(UNREAD))
def test_no_output_depends_on_what_may_be_missing(name: str, tmp_path: Path) -> None:
    """Missing parameters are random; here they are made huge, and not a bit of the outputs moves."""
    from fnmatch import fnmatchcase

    case = stored(name)
    network = load(name, write_checkpoint(case, tmp_path))
    before = outputs_of(case, network)
    changed = 0
    for parameter, value in network.named_parameters():
        if any(fnmatchcase(parameter, pattern) for pattern in UNREAD[name]):
            value.fill_(1e6)
            changed += 1
    after = outputs_of(case, network)
    assert changed == 2
    assert all(torch.equal(before[output], after[output]) for output in before)


def test_what_is_missing_and_read_is_refused(tmp_path: Path) -> None:
    """Without the list, and with it where another weight is missing."""
    name = "mask2former_swin"
    folder = write_checkpoint(stored(name), tmp_path)
    with pytest.raises(ValueError, match=r"lacks 2 weights .*swin\.layernorm\.bias"):
        load(name, folder, unread=())
    weights = load_file(folder / "model.safetensors")
    del weights["class_predictor.bias"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"lacks 1 weights .*class_predictor\.bias"):
        load(name, folder)


def test_buffers_of_still_older_releases_do_no_harm(tmp_path: Path) -> None:
    """CLIP checkpoints before transformers 4.31 hold `position_ids`, as OpenAI's on the hub do."""
    case = stored("clip")
    case["integers"] |= {
        "text_model.embeddings.position_ids": [list(range(8))],
        "vision_model.embeddings.position_ids": [list(range(5))],
    }
    found = outputs_of(case, load("clip", write_checkpoint(case, tmp_path)))
    assert_same_sum(found["image_embeds"], expected(case)["image_embeds"], depth=DEPTH)


# ---- Qwen2-VL with a reward head -------------------------------------------------------------------------------------


def test_qwen2_vl_with_a_head_reads_the_old_names(tmp_path: Path) -> None:
    """HPSv3's and VideoAlign's way in, on both kinds of positions. The head is the language model's own output layer,
    so that what it says of a token is what transformers 4 said."""
    case = stored("qwen2_vl")
    weights = weights_of(case)
    assert any(name.startswith("visual.") for name in weights)
    assert any(name.startswith("model.layers.") for name in weights)
    weights["rm_head.weight"] = weights["lm_head.weight"]
    ids = (34, 33)
    network = qwen_vl.build_network(
        config_of(tmp_path), weights, lambda _: nn.Linear(16, 40, bias=False), ids, dtype="float32", device=CPU,
        owner="reward 'video_align'",
    )  # fmt: skip
    for row, mode in enumerate(("mrope", "sequential")):
        with torch.no_grad():
            found = network(sight(row), ids, position_mode=mode)
        wanted = expected(case)["logits"][row, [1, 6]]
        assert_same_sum(found[0], wanted, depth=DEPTH)
    assert (expected(case)["logits"][0] - expected(case)["logits"][1]).abs().max() > 1e-3, "the modes must differ"


def test_hpsv3s_head_reads_the_old_names(tmp_path: Path) -> None:
    """The hidden state is recovered from the recorded logits, whose layer has full rank."""
    case = stored("qwen2_vl")
    weights = weights_of(case)
    head = preference_head(16)
    weights |= {f"rm_head.{name}": value.detach().clone() for name, value in head.state_dict().items()}
    network = qwen_vl.build_network(
        config_of(tmp_path), weights, lambda _: preference_head(16), (33,), dtype="float32", device=CPU,
        owner="reward 'hpsv3'",
    )  # fmt: skip
    hidden = torch.linalg.lstsq(weights["lm_head.weight"], expected(case)["logits"][1, 6][:, None]).solution[:, 0]
    with torch.no_grad():
        found = network(sight(1), (33,), position_mode="sequential")[0, 0]
        wanted = head.eval()(hidden)
    assert_same_sum(found, wanted, depth=DEPTH)


def config_of(folder: Path) -> transformers.Qwen2VLConfig:
    """The configuration in the flat layout of 2024, read from its file."""
    write_checkpoint(stored("qwen2_vl"), folder)
    found: transformers.Qwen2VLConfig = transformers.Qwen2VLConfig.from_pretrained(folder)
    return found


def sight(row: int) -> dict[str, Tensor]:
    """One sample as a processor would give it."""
    inputs = inputs_of(stored("qwen2_vl"))
    ids = inputs["input_ids"][row : row + 1]
    return {
        "input_ids": ids, "attention_mask": torch.ones_like(ids), "mm_token_type_ids": (ids == 36).long(),
        "pixel_values": inputs["pixel_values"][8 * row : 8 * row + 8],
        "image_grid_thw": inputs["image_grid_thw"][row : row + 1],
    }  # fmt: skip
