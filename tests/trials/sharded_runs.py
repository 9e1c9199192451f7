"""Runs whose weights are split over two processes (`parallel.shard`) against runs of one process, on gloo.

    python tests/trials/sharded_runs.py --out docs/research/trials/sharded_runs.json

Every family of `tests/helpers/split_runs.py` with every recipe, where the two processes have unequal work: the largest
difference of metrics (relative where above 1), LoRA and optimizer state, the ratio before the first update, and the
bytes of weights that a process holds.
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
from split_runs import FAMILIES, RECIPES, command  # noqa: E402
from tiny_runs import differences, lora_tensors, metrics, state  # noqa: E402
from two_processes import train_on_two  # noqa: E402

from flowrl.cli import main  # noqa: E402
from flowrl.rewards import REWARDS  # noqa: E402

SECONDS = 900


def largest(a: Path, b: Path) -> float:
    """Largest difference of two runs' metrics, relative to what is above 1; infinite where their keys differ."""
    rows = list(zip(metrics(a), metrics(b), strict=True))
    if any(mine.keys() != theirs.keys() for mine, theirs in rows):
        return float("inf")
    return max(
        abs(mine[key] - theirs[key]) / max(1.0, abs(mine[key]))
        for mine, theirs in rows
        for key in mine
        if not isinstance(mine[key], list)
    )


def compared(one: Path, two: Path) -> dict[str, Any]:
    """What two runs differ by, and what a process held."""
    held = json.loads((two / "manifest.json").read_text())["denoiser_bytes"]
    return {
        "metrics": largest(one, two), "lora": differences(lora_tensors(one), lora_tensors(two)),
        "optimizer": differences(state(one)["optimizer"]["state"], state(two)["optimizer"]["state"]),
        "ratio_first_deviation": max(row.get("ratio_first_deviation", 0.0) for row in metrics(two)),
        "share_of_weights": held["held"] / held["whole"],
    }  # fmt: skip


def run(folder: Path, families: list[str], recipes: list[str]) -> dict[str, Any]:
    """Results by "family recipe"."""
    chosen = [(family, recipe) for family in families for recipe in recipes]
    REWARDS["smooth_brightness"] = "toy_pipeline:SmoothBrightness"
    for family, recipe in chosen:
        assert main(["train", *command(folder, family, recipe, folder / "one" / f"{family}-{recipe}")]) == 0
    train_on_two(folder, [
        (0, False, command(folder, family, recipe, folder / "two" / f"{family}-{recipe}", "parallel.shard=2"))
        for family, recipe in chosen
    ], seconds=SECONDS)  # fmt: skip
    return {
        f"{family} {recipe}": compared(folder / "one" / f"{family}-{recipe}", folder / "two" / f"{family}-{recipe}")
        for family, recipe in chosen
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="JSON file of the results")
    parser.add_argument("--families", nargs="+", default=list(FAMILIES), choices=list(FAMILIES))
    parser.add_argument("--recipes", nargs="+", default=list(RECIPES), choices=list(RECIPES))
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        found = run(Path(place), given.families, given.recipes)
    given.out.write_text(json.dumps({**origin(), "runs": found}, indent=1) + "\n")
