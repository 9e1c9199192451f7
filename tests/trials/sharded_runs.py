"""Runs whose weights are split over processes (`parallel.shard`) against runs of one process, on gloo.

    python tests/trials/sharded_runs.py --out docs/research/trials/sharded_runs.json

Every family of `tests/helpers/split_runs.py` with every recipe, a LoRA over two processes, and all weights over two and
four, where the processes have unequal work: the largest difference of metrics (relative where above 1), of what is
shipped and of the optimizer's state, the ratio before the first update, and the shares of bytes of the weights that the
first process holds and, where all are trained, that the largest part of a checkpoint has. `first_above` has the metrics
of the first row in which any differs by more than 1e-6: of one process, of those that split the weights, and of as many
that each hold a copy, with rewards and their spread. `beyond_rounding` says what is not as near as the tests ask, which
allow for the rounding of rewards (`two_processes.close`).

Each family with one recipe also trains all weights for four iterations, of which one process does all, or: four, two,
one and four processes one each; two halves, two copies and two halves again (1, 1, 2); two processes of which one is
killed with half of its part of the second checkpoint on the disk, and which then go on.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

HELPERS = Path(__file__).resolve().parents[1] / "helpers"
sys.path[:0] = [str(HELPERS), str(HELPERS / "families")]

from origin import origin  # noqa: E402
from split_runs import FAMILIES, FULL, KILLING, RECIPES, RUNS, bytes_of, command, sizes_of_parts  # noqa: E402
from tiny_runs import differences, lora_tensors, metrics, model_tensors, state  # noqa: E402
from toy_pipeline import REWARDS  # noqa: E402
from two_processes import TOLERANCE, close, train_on_two, warm_interpreter  # noqa: E402

SECONDS = 1800
LAYOUTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "LoRA, 2 processes": (2, ()), "all weights, 2 processes": (2, FULL), "all weights, 4 processes": (4, FULL),
}  # fmt: skip
"""Number of processes that share a copy, and settings."""
EVERY = ("eval_every=1", "checkpoint_every=1", "keep_checkpoints=9")
ENDS = {"iterations by 4, 2, 1 and 4 processes": "chain", "halves, copies, halves": "swap", "killed": "killed"}


def differing(a: Path, b: Path) -> list[dict[str, float]]:
    """Difference of two runs' metrics by row, relative to what is above 1; infinite where keys differ."""
    return [
        {
            key: abs(mine[key] - theirs[key]) / max(1.0, abs(mine[key]))
            for key in mine
            if isinstance(mine[key], int | float)
        }
        if mine.keys() == theirs.keys()
        else {"keys": float("inf")}
        for mine, theirs in zip(metrics(a), metrics(b), strict=True)
    ]


def nearness(one: Path, two: Path, copies: Path | None = None) -> dict[str, Any]:
    """What two runs differ by, and what `copies` has where they first differ."""
    rows = differing(one, two)
    difference, where = max((value, key) for row in rows for key, value in row.items())
    shipped = lora_tensors if (one / "lora").exists() else model_tensors
    first = next((place for place, row in enumerate(rows) if max(row.values()) > TOLERANCE), None)
    above = {} if first is None else {key: value for key, value in rows[first].items() if value > TOLERANCE}
    beyond = ""
    try:
        close(one, two)
    except AssertionError as error:
        beyond = str(error).partition("\n")[0]
    runs = (one, two, *([] if copies is None else [copies]))
    shown = {*above, *({"reward", "reward_std"} & rows[first].keys())} if first is not None else set[str]()
    return {
        "metrics": difference, "metric": where, "shipped": differences(shipped(one), shipped(two)),
        "optimizer": differences(state(one)["optimizer"]["state"], state(two)["optimizer"]["state"]),
        "beyond_rounding": beyond,
        "first_above": {key: [metrics(run)[first or 0][key] for run in runs] for key in sorted(shown)},
    }  # fmt: skip


def compared(one: Path, two: Path, copies: Path | None) -> dict[str, Any]:
    """What a run that splits the weights differs by, and what a process held."""
    held = json.loads((two / "manifest.json").read_text())["denoiser_bytes"]
    saved = {key: state(one)[key] for key in ("policy", "slots", "optimizer")}
    return {
        **nearness(one, two, copies),
        "ratio_first_deviation": max(row.get("ratio_first_deviation", 0.0) for row in metrics(two)),
        "share_of_weights": held["held"] / held["whole"],
        **({"share_of_checkpoint": max(sizes_of_parts(two)) / bytes_of(saved)} if copies else {}),
    }


def courses(folder: Path, families: list[str], python: str) -> dict[str, Any]:
    """Results of runs that went on in other layouts, by "family recipe, how"."""
    folder.mkdir()
    told = list[tuple[int, bool, list[str]]]

    def all_of(processes: int, *launched: Callable[[str], list[str]]) -> None:
        commands: told = [(0, False, make(family)) for family in families for make in launched]
        train_on_two(folder, commands, seconds=SECONDS, processes=processes, python=python)

    def begun(name: str, iterations: int, *more: str) -> Callable[[str], list[str]]:
        last = f"num_iterations={iterations}"
        return lambda family: command(folder, family, RUNS[family], folder / name / family, *FULL, *EVERY, last, *more)

    def resumed(name: str, iterations: int, *more: str) -> Callable[[str], list[str]]:
        return lambda family: [f"resume={folder / name / family}", f"num_iterations={iterations}", *more]

    one, two, four = (f"parallel.shard={number}" for number in (1, 2, 4))
    all_of(1, begun("whole", 4))
    all_of(4, begun("chain", 1, four))
    all_of(2, resumed("chain", 2, two), begun("swap", 1, two), resumed("swap", 2, one), resumed("swap", 4, two))
    all_of(1, resumed("chain", 3, one))
    all_of(4, resumed("chain", 4, four))
    rewarded = {
        family: text.removeprefix("FUNCTION=")
        for family in families
        for text in RECIPES[RUNS[family]]
        if text.startswith("FUNCTION=")
    }
    for family, function in rewarded.items():
        killing = folder / f"killing_{family}.py"
        killing.write_text(REWARDS + KILLING)
        rewards = f"rewards=[{{file: {killing}, function: {function}}}]"
        with suppress(AssertionError):
            train_on_two(folder, [(0, False, begun("killed", 4, two, rewards)(family))], processes=2, python=python)
        assert killing.with_suffix(".was").exists()
        there = sorted(path.name for path in (folder / "killed" / family / "checkpoints").iterdir())
        assert there == [".000002", "000001"]
    commands: told = [(0, False, resumed("killed", 4)(family)) for family in rewarded]
    train_on_two(folder, commands, seconds=SECONDS, processes=2, python=python)
    return {
        f"{family} {RUNS[family]}, {words}": nearness(folder / "whole" / family, folder / name / family)
        for words, name in ENDS.items()
        for family in (rewarded if name == "killed" else families)
    }


def run(folder: Path, families: list[str], recipes: list[str], layouts: list[str], python: str) -> dict[str, Any]:
    """Results by "family recipe, layout"."""
    chosen = [(family, recipe) for family in families for recipe in recipes]

    def train(name: str, processes: int, *settings: str) -> None:
        told = [
            (0, False, command(folder, family, recipe, folder / name / f"{family}-{recipe}", *settings))
            for family, recipe in chosen
        ]
        train_on_two(folder, told, seconds=SECONDS, processes=processes, python=python)

    found = {}
    for settings in {LAYOUTS[layout][1] for layout in layouts}:
        train(f"one-{bool(settings)}", 1, *settings)
    for layout in layouts:
        processes, settings = LAYOUTS[layout]
        train(layout, processes, f"parallel.shard={processes}", *settings)
        if settings:
            train(f"{layout}, copies", processes, f"parallel.replicate={processes}", *settings)
        for name in (f"{family}-{recipe}" for family, recipe in chosen):
            copies = folder / f"{layout}, copies" / name if settings else None
            one = folder / f"one-{bool(settings)}" / name
            found[f"{name.replace('-', ' ')}, {layout}"] = compared(one, folder / layout / name, copies)
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSON file of the results")
    parser.add_argument("--families", nargs="+", default=list(FAMILIES), choices=list(FAMILIES))
    parser.add_argument("--recipes", nargs="+", default=list(RECIPES), choices=list(RECIPES))
    parser.add_argument("--layouts", nargs="*", default=list(LAYOUTS), choices=list(LAYOUTS))
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as place, warm_interpreter() as python:
        found = run(Path(place), given.families, given.recipes, given.layouts, python)
        found |= courses(Path(place) / "courses", given.families, python)
    given.out.write_text(json.dumps({**origin(), "runs": found}, indent=1) + "\n")
