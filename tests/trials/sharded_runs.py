"""Runs whose weights are split over processes (`parallel.shard`) against runs of one process, on gloo.

    python tests/trials/sharded_runs.py --out docs/research/trials/sharded_runs.json

Every family of `tests/helpers/split_runs.py` with every recipe, a LoRA over two processes, and all weights over two and
four, where the processes have unequal work: the largest difference of metrics (relative where above 1), of what is
shipped and of the optimizer's state, the ratio before the first update, and the shares of bytes of the weights that the
first process holds and, where all are trained, that the largest part of a checkpoint has.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

HELPERS = Path(__file__).resolve().parents[1] / "helpers"
sys.path[:0] = [str(HELPERS), str(HELPERS / "families")]

from origin import origin  # noqa: E402
from split_runs import FAMILIES, FULL, RECIPES, bytes_of, command, sizes_of_parts  # noqa: E402
from tiny_runs import differences, lora_tensors, metrics, model_tensors, state  # noqa: E402
from two_processes import train_on_two, warm_interpreter  # noqa: E402

SECONDS = 900
LAYOUTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "LoRA, 2 processes": (2, ()), "all weights, 2 processes": (2, FULL), "all weights, 4 processes": (4, FULL),
}  # fmt: skip
"""Number of processes that share a copy, and settings."""


def largest(a: Path, b: Path) -> tuple[float, str]:
    """Largest difference of two runs' metrics, relative to what is above 1, and where; infinite where keys differ."""
    rows = list(zip(metrics(a), metrics(b), strict=True))
    if any(mine.keys() != theirs.keys() for mine, theirs in rows):
        return float("inf"), "keys"
    return max(
        (abs(mine[key] - theirs[key]) / max(1.0, abs(mine[key])), key)
        for mine, theirs in rows
        for key in mine
        if not isinstance(mine[key], list)
    )


def compared(one: Path, two: Path) -> dict[str, Any]:
    """What two runs differ by, and what a process held."""
    held = json.loads((two / "manifest.json").read_text())["denoiser_bytes"]
    shipped = lora_tensors if (one / "lora").exists() else model_tensors
    difference, where = largest(one, two)
    saved = {key: state(one)[key] for key in ("policy", "slots", "optimizer")}
    return {
        "metrics": difference, "metric": where, "shipped": differences(shipped(one), shipped(two)),
        "optimizer": differences(state(one)["optimizer"]["state"], state(two)["optimizer"]["state"]),
        "ratio_first_deviation": max(row.get("ratio_first_deviation", 0.0) for row in metrics(two)),
        "share_of_weights": held["held"] / held["whole"],
        **({} if shipped is lora_tensors else {"share_of_checkpoint": max(sizes_of_parts(two)) / bytes_of(saved)}),
    }  # fmt: skip


def run(folder: Path, families: list[str], recipes: list[str], layouts: list[str]) -> dict[str, Any]:
    """Results by "family recipe, layout"."""
    chosen = [(family, recipe) for family in families for recipe in recipes]

    def train(name: str, processes: int, *settings: str) -> None:
        told = [
            (0, False, command(folder, family, recipe, folder / name / f"{family}-{recipe}", *settings))
            for family, recipe in chosen
        ]
        train_on_two(folder, told, seconds=SECONDS, processes=processes, python=python)

    found = {}
    with warm_interpreter() as python:
        for settings in {LAYOUTS[layout][1] for layout in layouts}:
            train(f"one-{bool(settings)}", 1, *settings)
        for layout in layouts:
            processes, settings = LAYOUTS[layout]
            train(layout, processes, f"parallel.shard={processes}", *settings)
            for name in (f"{family}-{recipe}" for family, recipe in chosen):
                one = folder / f"one-{bool(settings)}" / name
                found[f"{name.replace('-', ' ')}, {layout}"] = compared(one, folder / layout / name)
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="JSON file of the results")
    parser.add_argument("--families", nargs="+", default=list(FAMILIES), choices=list(FAMILIES))
    parser.add_argument("--recipes", nargs="+", default=list(RECIPES), choices=list(RECIPES))
    parser.add_argument("--layouts", nargs="+", default=list(LAYOUTS), choices=list(LAYOUTS))
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        found = run(Path(place), given.families, given.recipes, given.layouts)
    given.out.write_text(json.dumps({**origin(), "runs": found}, indent=1) + "\n")
