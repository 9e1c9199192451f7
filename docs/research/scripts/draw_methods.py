"""Draws docs/research/methods/comparison.png of a comparison: score over cost, and differences to the baseline.

    .venv/bin/python docs/research/scripts/draw_methods.py docs/research/claims/methods.json

Needs `make docs` (or matplotlib) once.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import matplotlib
from drawing import plain
from page_parts import committed

matplotlib.use("Agg")
from matplotlib import pyplot

OUT = Path(__file__).resolve().parents[1] / "methods" / "comparison.png"


def draw(results: dict[str, Any], path: Path) -> None:
    """Curves on the left, a row for each difference on the right, the largest on top; one colour a method."""
    methods = sorted(results["methods"].items(), key=lambda item: item[1]["score"]["mean"])
    colors = dict(zip((name for name, _ in methods), pyplot.get_cmap("tab20").colors, strict=False))
    names = {name: name.removeprefix("tiny_") for name in colors}
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 5), layout="constrained")
    for name, row in reversed(methods):
        x, y = zip(*row["curve"], strict=True)
        left.plot([value / 1000 for value in x], y, marker="o", markersize=4, color=colors[name], label=names[name])
    left.set(xlabel="thousand network evaluations", ylabel="GenEval, held out", title="Score over cost")
    left.legend(frameon=False, fontsize=8)
    shown = [(name, row["difference"]) for name, row in methods if row["difference"] is not None]
    for place, (name, found) in enumerate(shown):
        right.plot(found["interval"], [place, place], color=colors[name], linewidth=2)
        right.plot([found["mean"]], [place], marker="o", color=colors[name])
    right.axvline(0, color="black", linewidth=0.8)
    right.set_yticks(range(len(shown)), [names[name] for name, _ in shown])
    right.set(xlabel="score, 95 % over seeds and prompts", title=f"Difference to {names[results['baseline']]}")
    for axes in (left, right):
        plain(axes)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    draw(committed(Path(sys.argv[1])), OUT)
