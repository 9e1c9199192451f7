"""Networks of rewards: what is beside a weight and not read is refused, towers that are left out are not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tiny_clip import write_tiny_clip

from flowrl.rewards.networks.pretrained import load_clip, load_network

GIVEN: dict[str, Any] = {"device": torch.device("cpu"), "owner": "reward 'clip_score'"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_tiny_clip(tmp_path / "clip")


def test_scales_beside_weights_are_refused_by_name(folder: Path) -> None:
    path = folder / "model.safetensors"
    key = "vision_model.encoder.layers.1.mlp.fc1.weight_scale"
    save_file(load_file(path) | {key: torch.ones(())}, path, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=rf"reward 'clip_score': .* holds 1 weights beside .*first: {key}"):
        load_clip(str(folder), **GIVEN)


def test_a_tower_of_a_whole_model_loads(folder: Path) -> None:
    found = load_network(transformers.CLIPVisionModel, str(folder), what="CLIP", **GIVEN)
    whole, own = load_file(folder / "model.safetensors"), dict(found.named_parameters())
    key = next(key for key in whole if key.endswith("layers.1.mlp.fc1.weight") and "vision" in key)
    assert torch.equal(own[next(name for name in own if key.endswith(name))], whole[key])


def test_a_tokenizer_without_words_is_refused(folder: Path) -> None:
    for name in ("tokenizer.json", "vocab.json", "merges.txt"):
        (folder / name).unlink(missing_ok=True)
    with pytest.raises(ValueError, match=r"is a tokenizer of \d+ entries|could not load the CLIP"):
        load_clip(str(folder), **GIVEN)
