"""Optional parts are probed without importing them."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from flowrl.runtime.capabilities import capabilities, xformers_state


def package(folder: Path, torch_version: str | None) -> Path:
    folder.mkdir()
    if torch_version is not None:
        (folder / "cpp_lib.json").write_text(json.dumps({"version": {"torch": torch_version}}), encoding="utf-8")
    return folder


def test_xformers_built_for_another_torch_is_said_in_one_line(tmp_path: Path) -> None:
    line = xformers_state(package(tmp_path / "old", "1.13.0+cu117"))
    assert "built for torch 1.13.0+cu117" in line
    assert torch.__version__ in line
    assert "\n" not in line
    assert "without compiled operators" in xformers_state(package(tmp_path / "bare", None))
    assert xformers_state(package(tmp_path / "fits", torch.__version__)).startswith("operators built for")


def test_probing_imports_nothing() -> None:
    before = "xformers" in sys.modules
    found = capabilities()
    assert set(found) == {"cuda", "bfloat16", "xformers", "flash-attn", "flash_attn_3", "kernels"}
    assert ("xformers" in sys.modules) == before
