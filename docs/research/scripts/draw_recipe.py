"""Writes what docs/research/methods.md says of the default recipe and of the searches for one, and draws recipe.png.

    .venv/bin/python docs/research/scripts/draw_recipe.py

The numbers are those of `tests/trials/claims/default_recipe.py` and `recipe_search.py`; the figure shows the default
beside the last search. Needs `make docs` (or matplotlib) once.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from drawing import COLORS, plain
from page_parts import committed, fill, table

from flowrl.comparing.comparison_result import SHARES
from flowrl.comparing.comparison_table import ratio_text
from flowrl.statistics.crossed import Curve, cost_interval, cost_ratio
from flowrl.statistics.means import over_seeds

matplotlib.use("Agg")
from matplotlib import pyplot

RESEARCH = Path(__file__).resolve().parents[1]
IMAGE = 1 / 480  # what one image of a held-out evaluation counts
COSTS = ("thousand network evaluations", "minutes of training on one core")
HEAD = ("network evaluations", "time", "final score", "95 % over seeds", "each seed", "fewer", "faster")
BASE = "flow_grpo"
RATIOS = (
    "Fewer, faster: how many times fewer network evaluations and how much less time it takes until the mean of its "
    "seeds has nine tenths of Flow-GRPO's gain, {:.3f}, interpolated linearly, with 95 % intervals over seeds; *or "
    "more* where Flow-GRPO's seeds leave open whether others would get there."
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


def columns(runs: list[Any], column: int) -> list[Curve]:
    """(cost, score) of every training."""
    return [([row[column] for row in run], [row[2] for row in run]) for run in runs]


def target_of(found: dict[str, Any], share: float = SHARES[-1]) -> float:
    """The score at a share of Flow-GRPO's mean gain."""
    score_N = np.array(found["curves"][BASE])[:, :, 2].mean(axis=0)
    return float(score_N[0] + share * (score_N[-1] - score_N[0]))


def strictest(found: dict[str, Any], name: str) -> str:
    """Costs of a recipe by the strictest reading: where it was first measured above the score that Flow-GRPO keeps from
    some evaluation on, over where Flow-GRPO's mean first has that score but for what one image counts."""
    mean_N, own_N = (np.array(found["curves"][key]).mean(axis=0) for key in (BASE, name))
    place = int(np.flatnonzero(mean_N[:, 2] >= mean_N[-1, 2] - IMAGE)[0])
    level = min(float(mean_N[place, 2]), float(mean_N[-1, 2]))
    first = int(np.flatnonzero(own_N[:, 2] >= level)[0])
    until, own = (cost_interval(columns(found["curves"][key], 0), level) for key in (BASE, name))
    assert own.high <= own_N[first, 0], "other seeds might not have it there"
    times, least = mean_N[place, 0] / own_N[first, 0], until.low / own_N[first, 0]
    return (
        f"By the strictest reading: {times:.1f} times fewer, {least:.1f} or more (95 %). `{name}` is counted where it "
        f"was first measured above {level:.3f}, at {own_N[first, 0] / 1000:.0f}k, and Flow-GRPO where it first had "
        f"that, at {mean_N[place, 0] / 1000:.0f}k; it ends at {mean_N[-1, 2]:.3f}, so that no upper end is known."
    )


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
        RATIOS.format(target_of(found)),
        made(found),
    ])  # fmt: skip


def final(found: dict[str, Any], name: str) -> tuple[str, ...]:
    """Where the trainings of a recipe end, and how much less they cost than the baseline."""
    ends = [run[-1] for run in found["curves"][name]]
    runs, target = found["curves"], target_of(found)
    ratios = [cost_ratio(columns(runs[BASE], column), columns(runs[name], column), target) for column in (0, 1)]
    less = ["" if name == BASE else "not reached" if np.isnan(ratio.mean) else ratio_text(ratio) for ratio in ratios]
    score = over_seeds([end[2] for end in ends], shares=True)
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
        RATIOS.format(target_of(found)),
        strictest(found, "tiny_recommended"),
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
    return committed(RESEARCH / name)


if __name__ == "__main__":
    for name in ("recipe", "recipe_second", "recipe_first"):
        fill(RESEARCH / "methods.md", name, written(read(f"methods/{name}.json")))
    default = read("claims/default_recipe.json")
    fill(RESEARCH / "methods.md", "default", of_default(default))
    draw(beside(read("methods/recipe.json"), default), RESEARCH / "methods" / "recipe.png")
