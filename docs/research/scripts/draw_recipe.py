"""Writes what docs/research/methods.md says of the default recipe and of the searches for one, and draws recipe.png.

    .venv/bin/python docs/research/scripts/draw_recipe.py

The numbers are those of `tests/trials/claims/default_recipe.py` and `recipe_search.py`; the figure shows the default
beside the last search. Needs `make docs` (or matplotlib) once.
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

RESEARCH = Path(__file__).resolve().parents[1]
COSTS = ("thousand network evaluations", "minutes of training on one core")
HEAD = ("network evaluations", "time", "final score", "95 % over seeds", "each seed", "fewer", "faster")
RATIOS = (
    "Fewer, faster: how many times fewer network evaluations and how much less time it takes until the mean of its "
    "seeds has Flow-GRPO's final score, with 95 % intervals over seeds."
)


def beside(found: dict[str, Any], default: dict[str, Any]) -> dict[str, Any]:
    """The curves of a search and of today's default, whose seconds are brought to the pace of the search's machine."""
    pace, name = default["pace"]["there"] / default["pace"]["here"], "tiny_recommended"
    today = [[(nfe, seconds * pace, score) for nfe, seconds, score in run] for run in default["curves"][name]]
    former = {f"{name} of then" if key == name else key: runs for key, runs in found["curves"].items()}
    return {"curves": former | {name: today}}


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
    finals = [(f"`{name}`: {found['final'][name]}", *final(found, name)) for name in found["curves"]]
    return "\n\n".join([
        table(("candidate", "settings", "network evaluations", "time", "score on prompts for choosing, each seed"),
              candidates),
        "With other seeds, on all training prompts; held-out score before training "
        f"{np.mean([run[0][2] for curves in found['curves'].values() for run in curves]):.3f}:",
        table(("recipe", *HEAD), finals),
        RATIOS,
        made(found),
    ])  # fmt: skip


def final(found: dict[str, Any], name: str) -> tuple[str, ...]:
    """Where the trainings of a recipe end, and how much less they cost than the baseline."""
    ends = [run[-1] for run in found["curves"][name]]
    less = [ratio(found[key][name]) if name in found[key] else "" for key in ("fewer", "faster")]
    score = over_seeds([end[2] for end in ends])
    return (
        f"{np.mean([end[0] for end in ends]) / 1000:.1f}k", f"{np.mean([end[1] for end in ends]):.0f} s",
        f"{score.mean:.3f}", f"{score.low:.3f} to {score.high:.3f}" if score.known else "one seed",
        " ".join(f"{end[2]:.3f}" for end in ends), *less,
    )  # fmt: skip


def made(found: dict[str, Any]) -> str:
    """Where numbers come from."""
    return (
        f"{found['date']}, commit {found['commit'][:12]}, {found['machine']}, two trainings at a time:\n\n"
        f"```\n{found['command']}\n```"
    )


def of_default(found: dict[str, Any]) -> str:
    """The default's table, on the way and at the end."""
    means = {name: np.array(runs).mean(axis=0) for name, runs in found["curves"].items()}
    way = [
        (f"`{name}`", *(f"{score:.3f} at {nfe / 1000:.0f}k, {seconds:.0f} s" for nfe, seconds, score in mean))
        for name, mean in means.items()
    ]
    ends = [(f"`{name}`", *final(found, name)) for name in found["curves"]]
    pace = found["pace"]
    return "\n\n".join([
        table(("recipe", *HEAD), ends),
        RATIOS,
        table(("mean of five seeds", "before", "after 9 iterations", "after 18", "after 27", "after 36"), way),
        f"Flow-GRPO's trainings are those of the search below; their seconds are multiplied by "
        f"{pace['here'] / pace['there']:.2f}, since a network evaluation of its training takes "
        f"{1000 * pace['here']:.2f} ms here, in float32 as the default, and took {1000 * pace['there']:.2f} there, in "
        "bfloat16. The interval of the time does not cover that factor. The figure's minutes are those of the other "
        "machine.",
        made(found),
    ])  # fmt: skip


def read(name: str) -> dict[str, Any]:
    """Numbers of a file of docs."""
    found: dict[str, Any] = json.loads((RESEARCH / name).read_text(encoding="utf-8"))
    return found


if __name__ == "__main__":
    for name in ("recipe", "recipe_second", "recipe_first"):
        fill(RESEARCH / "methods.md", name, written(read(f"methods/{name}.json")))
    default = read("claims/default_recipe.json")
    fill(RESEARCH / "methods.md", "default", of_default(default))
    draw(beside(read("methods/recipe.json"), default), RESEARCH / "methods" / "recipe.png")
