"""What tests keep of networks that they read again: a copy as if it were read, of these files and no others."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import diffusers
import kept_networks
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tiny_models import load_tiny, probe
from torch import nn

WEIGHTS = "transformer/diffusion_pytorch_model.safetensors"


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Classes that were truly read, from nothing kept on."""
    seen: list[str] = []
    for cls in (diffusers.ModelMixin, transformers.PreTrainedModel):
        stock: Any = vars(cls)["from_pretrained"].__func__.__wrapped__

        def noted(own: Any, *args: Any, stock: Any = stock, **options: Any) -> Any:
            seen.append(own.__name__)
            return stock(own, *args, **options)

        monkeypatch.setattr(cls, "from_pretrained", kept_networks.keeping(noted))
    monkeypatch.setattr(kept_networks, "_kept", type(kept_networks._kept)())
    return seen


def test_equal_files_are_read_once_and_nothing_is_shared(
    reads: list[str], tiny_sd3_folder: Path, tmp_path: Path
) -> None:
    first = load_tiny(tiny_sd3_folder)
    assert sorted(reads) == sorted(
        type(part).__name__ for part in first.pipe.components.values() if isinstance(part, nn.Module)
    )
    seen, expected = len(reads), probe(first)
    again = load_tiny(Path(shutil.copytree(tiny_sd3_folder, tmp_path / "elsewhere")))
    assert len(reads) == seen
    torch.testing.assert_close(probe(again), expected, rtol=0, atol=0)
    assert again.pipe.transformer.config["_name_or_path"] != first.pipe.transformer.config["_name_or_path"]
    with torch.no_grad():
        for parameter in again.pipe.transformer.parameters():
            parameter.zero_()
    torch.testing.assert_close(probe(load_tiny(tiny_sd3_folder)), expected, rtol=0, atol=0)


def test_other_bytes_or_another_dtype_are_read(reads: list[str], tiny_sd3_folder: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_sd3_folder, tmp_path / "changed"))
    load_tiny(folder)
    seen = len(reads)
    tensors = load_file(folder / WEIGHTS)
    name = next(iter(tensors))
    save_file(tensors | {name: tensors[name] + 1}, folder / WEIGHTS, metadata={"format": "pt"})
    changed = load_tiny(folder)
    assert reads[seen:] == ["SD3Transformer2DModel"]
    assert torch.equal(dict(changed.pipe.transformer.named_parameters())[name], tensors[name] + 1)
    load_tiny(folder, torch.bfloat16)
    assert "SD3Transformer2DModel" in reads[seen + 1 :]
    assert "AutoencoderKL" not in reads[seen:]  # in float32 at any dtype
    (folder / WEIGHTS).write_bytes(b"damaged")
    with pytest.raises(ValueError, match="damaged"):
        load_tiny(folder)
