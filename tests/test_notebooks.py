"""Notebooks: progress and images in a cell, and those that ship; `make notebooks` runs these whole."""

from __future__ import annotations

import ast
import json
import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from PIL import Image

import flowrl
from flowrl.media.terminal_images import protocol_here, show
from flowrl.runtime import progress

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))


class Cell:
    """What IPython's display functions were told to show; `display` gives this as the handle."""

    def __init__(self) -> None:
        self.shown: list[dict[str, str]] = []

    def display(self, bundle: dict[str, str], **how: Any) -> Cell:
        assert how == {"raw": True, "display_id": True}
        return self.update(bundle, raw=True)

    def update(self, bundle: dict[str, str], *, raw: bool) -> Cell:
        assert raw
        self.shown.append(dict(bundle))
        return self


@pytest.fixture
def cell(monkeypatch: pytest.MonkeyPatch) -> Cell:
    """This process as a notebook's kernel."""
    cell = Cell()
    shell: Any = ModuleType("IPython")
    shell.get_ipython = lambda: SimpleNamespace(kernel=object())
    display: Any = ModuleType("IPython.display")
    display.display = cell.display
    for name, module in (("ipykernel", ModuleType("ipykernel")), ("IPython", shell), ("IPython.display", display)):
        monkeypatch.setitem(sys.modules, name, module)
    return cell


def test_progress_is_one_line_of_the_cell_with_images_below(cell: Cell, capsys: pytest.CaptureFixture[str]) -> None:
    assert protocol_here() == "notebook"
    with progress.progress("training", 3) as advance:
        for note in ("reward <1>", "reward 2", "reward 3"):
            advance(note)
        show([Image.new("RGB", (8, 8), "red")] * 2, 600, "notebook")
    show([Image.new("RGB", (8, 8))], 600, "notebook")  # no progress is shown any more
    assert capsys.readouterr().err == ""
    assert cell.shown[-2]["text/plain"].startswith("training 3/3")
    assert cell.shown[-1]["text/html"].count("data:image/png;base64,") == 1
    assert "&lt;1&gt;" in cell.shown[1]["text/html"]
    assert len(cell.shown) <= 4, "at most once a second but for the first, the last and images"


@pytest.mark.parametrize("absent", ["ipykernel", "kernel"])
def test_elsewhere_lines_are_printed(
    absent: str, cell: Cell, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if absent == "ipykernel":
        monkeypatch.delitem(sys.modules, "ipykernel")
    else:  # IPython on a terminal
        monkeypatch.setattr(sys.modules["IPython"], "get_ipython", lambda: SimpleNamespace())
    with progress.progress("training", 1) as advance:
        advance("")
    assert capsys.readouterr().err.startswith("training 1/1")
    assert (cell.shown, protocol_here()) == ([], "none")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_kept_without_outputs_and_uses_public_names(path: Path) -> None:
    notebook = json.loads(path.read_text(encoding="utf-8"))
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)
    for cell in code:
        for node in ast.walk(ast.parse("".join(cell["source"]))):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "flowrl":
                assert hasattr(flowrl, node.attr)
    words = "".join("".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "markdown")
    for link in re.findall(r"\]\(([^)]*)\)", words):
        assert (path.parent / link).is_file(), link


def test_there_are_three_notebooks() -> None:
    assert [path.stem for path in NOTEBOOKS] == ["five_minutes", "own_reward", "read_a_run"]
