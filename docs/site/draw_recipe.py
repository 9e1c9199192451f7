"""Writes what docs/methods.md says of the searches for a recipe, and draws docs/methods/recipe.png of the last one.

    .venv/bin/python docs/site/draw_recipe.py

The numbers are those of `tests/trials/claims/recipe_search.py`. Needs `make docs` (or matplotlib) once.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from drawing import COLORS, plain
from page_parts import fill, table

from flowrl.statistics.means import over_seeds

matplotlib.use("Agg")
from matplotlib import pyplot

DOCS = Path(__file__).resolve().parents[1]
COSTS = ("thousand network evaluations", "minutes of training on one core")


def draw(found: dict[str, Any], path: Path) -> None:
    """Score over network evaluations and over minutes: every seed thin, their mean thick."""
    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4.2), layout="constrained", sharey=True)
    for axis, column, unit, label in zip(axes, (0, 1), (1000, 60), COSTS, strict=True):
        for (name, curves), color in zip(found["curves"].items(), COLORS, strict=False):
            points = np.array(curves)
            for run in points:
                axis.plot(run[:, column] / unit, run[:, 2], color=color, linewidth=0.8, alpha=0.4)
            mean = points.mean(axis=0)
            axis.plot(mean[:, column] / unit, mean[:, 2], color=color, marker="o", linewidth=2, label=name)
        axis.axhline(np.array(found["curves"]["flow_grpo"])[:, -1, 2].mean(), color="black", linewidth=0.8, ls=":")
        axis.set_xlabel(label)
        plain(axis)
    axes[0].set_ylabel("GenEval, held out")
    axes[0].legend(frameon=False, loc="lower right")
    figure.savefig(path, dpi=110)


def ratio(found: dict[str, Any]) -> str:
    """A ratio with its interval."""
    if found["mean"] is None:
        return "not reached"
    bounds = found["interval"]
    return f"{found['mean']:.1f}x" + (f" ({bounds[0]:.1f} to {bounds[1]:.1f})" if bounds else "")


def written(found: dict[str, Any]) -> str:
    """The tables."""
    rungs = found["rungs"]
    last = {name: rung for rung in rungs for name in rung["scores"]}
    order = sorted(last, key=lambda name: (-len(last[name]["seeds"]), -np.mean(last[name]["scores"][name])))
    first = rungs[0]
    candidates = [
        (f"`{name}`", " ".join(found["candidates"][name]), f"{first['nfe'][name] / 1000:.1f}k",
         f"{first['seconds'][name]:.0f} s", " ".join(f"{score:.3f}" for score in last[name]["scores"][name]))
        for name in order
    ]  # fmt: skip
    finals = []
    for name, curves in found["curves"].items():
        ends = [run[-1] for run in curves]
        less = [ratio(found[key][name]) if name in found[key] else "" for key in ("fewer", "faster")]
        score = over_seeds([end[2] for end in ends])
        finals.append((f"`{name}`: {found['final'][name]}", f"{np.mean([end[0] for end in ends]) / 1000:.1f}k",
                       f"{np.mean([end[1] for end in ends]):.0f} s", f"{score.mean:.3f}",
                       f"{score.low:.3f} to {score.high:.3f}" if score.known else "one seed",
                       " ".join(f"{end[2]:.3f}" for end in ends), *less))  # fmt: skip
    return "\n\n".join([
        table(("candidate", "settings", "network evaluations", "time", "score on prompts for choosing, each seed"),
              candidates),
        "With other seeds, on all training prompts; held-out score before training "
        f"{np.mean([run[0][2] for curves in found['curves'].values() for run in curves]):.3f}:",
        table(
            ("recipe", "network evaluations", "time", "final score", "95 % over seeds", "each seed", "fewer", "faster"),
            finals,
        ),
        "Fewer, faster: how many times fewer network evaluations and how much less time it takes until the mean of its "
        "seeds has Flow-GRPO's final score, with 95 % intervals over seeds.",
        f"{found['date']}, commit {found['commit'][:12]}, {found['machine']}, two trainings at a time:\n\n"
        f"```\n{found['command']}\n```",
    ])  # fmt: skip


if __name__ == "__main__":
    for name in ("recipe", "recipe_second", "recipe_first"):
        results = json.loads((DOCS / "methods" / f"{name}.json").read_text(encoding="utf-8"))
        fill(DOCS / "methods.md", name, written(results))
        if name == "recipe":
            draw(results, DOCS / "methods" / "recipe.png")
