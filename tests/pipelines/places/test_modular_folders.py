"""Repositories with the index of a modular pipeline alone: the words say what makes a stock pipeline of them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from fake_hub import Repository, serve_hub
from tiny_models import save_tiny_sd3

from flowrl.pipelines import family, family_of
from flowrl.pipelines.places.modular_folders import MODULAR


def modular(index: dict[str, Any], name: str = "StableDiffusion3ModularPipeline", **elsewhere: str) -> dict[str, Any]:
    """The index that diffusers writes of parts: none is loaded, each in the repository or `elsewhere`."""
    parts = {
        part: [
            None,
            None,
            {
                "pretrained_model_name_or_path": elsewhere.get(part, "me/model"),
                "subfolder": part,
                "variant": None,
                "revision": None,
                "type_hint": entry,
            },
        ]
        for part, entry in index.items()
        if isinstance(entry, list) and entry[0] is not None
    }
    return {"_blocks_class_name": "AutoBlocks", "_class_name": name, "_diffusers_version": "0.42.1", **parts}


def told(model: str) -> str:
    with pytest.raises(ValueError, match="modular") as refusal:
        family_of(model)
    return str(refusal.value)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_tiny_sd3(tmp_path / "model")


def test_the_index_that_is_told_makes_the_folder_load(folder: Path) -> None:
    index = json.loads((folder / "model_index.json").read_text())
    (folder / "model_index.json").unlink()
    (folder / MODULAR).write_text(json.dumps(modular(index)), encoding="utf-8")
    words = told(str(folder))
    assert f"write {folder}/model_index.json, and set pipeline.model to {folder}: " in words
    assert "copy " not in words
    with pytest.raises(ValueError, match="is a modular repository"):
        family("sd3").check(str(folder), None)
    written = words[words.index(": {") + 2 :]
    named = {part: entry for part, entry in index.items() if isinstance(entry, list) and entry[0] is not None}
    assert json.loads(written) == {"_class_name": "StableDiffusion3Pipeline", **named}
    (folder / "model_index.json").write_text(written, encoding="utf-8")
    assert family_of(str(folder)) == "sd3"
    known = family("sd3")
    known.check(str(folder), known.lora_targets)


def test_parts_in_other_repositories_are_fetched_first(folder: Path) -> None:
    index = json.loads((folder / "model_index.json").read_text())
    (folder / "model_index.json").unlink()
    (folder / "vae").rename(folder.parent / "vae")
    (folder / MODULAR).write_text(json.dumps(modular(index, vae="other/vaes")), encoding="utf-8")
    assert f"copy vae of other/vaes to {folder}/vae; write {folder}/model_index.json" in told(str(folder))
    del index["vae"]
    (folder / MODULAR).write_text(json.dumps(modular(index)), encoding="utf-8")
    assert "which has no vae for StableDiffusion3Pipeline: take a checkpoint" in told(str(folder))


def test_a_class_without_a_stock_one_is_refused(folder: Path) -> None:
    (folder / "model_index.json").unlink()
    (folder / MODULAR).write_text(json.dumps(modular({}, "Flux3ModularPipeline")), encoding="utf-8")
    assert re.search(
        r"diffusers [\d.]+ has no stock pipeline Flux3Pipeline, which a model is trained by", told(str(folder))
    )


def test_a_repository_on_the_hub_is_told_the_same(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    index = {"transformer": ["diffusers", "SD3Transformer2DModel"], "vae": ["diffusers", "AutoencoderKL"]}
    small = {MODULAR: modular(index)}
    with serve_hub(monkeypatch, tmp_path, {"me/model": Repository(small=small)}):
        words = told("me/model")
    assert "me/model on the hub is no diffusers pipeline: it has no model_index.json; me/model is a modular" in words
    assert "has no scheduler, text_encoder" in words
