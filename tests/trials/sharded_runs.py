"""Runs whose weights are split over processes (`parallel.shard`) against runs of one process, on gloo.

    python tests/trials/sharded_runs.py --out docs/research/trials/sharded_runs.json

Every family of `tests/helpers/split_runs.py` with every recipe, a LoRA over two processes, and all weights over two and
four, where the processes have unequal work: the largest difference of metrics (relative where above 1), of what is
shipped and of the optimizer's state, the ratio before the first update, and the shares of bytes of the weights that the
first process holds and, where all are trained, that the largest part of a checkpoint has. `first_above` has the metrics
of the first row in which any differs by more than 1e-6: of one process, of those that split the weights, and of as many
that each hold a copy, with rewards and their spread; `first_iteration` has all that differs in the first iteration,
which begins with equal weights. `beyond_rounding` says what is not as near as the tests ask, which allow for the
rounding of rewards (`two_processes.close`).

Each family with one recipe also trains all weights for four iterations, of which one process does all, or: four, two,
one and four processes one each; two halves, two copies and two halves again (1, 1, 2); two processes of which one is
killed with half of its part of the second checkpoint on the disk, and which then go on. `parts` counts the parts of
each checkpoint; 0 is a checkpoint of one process.

Results that are in `--out` already are kept, with the commit and the command they came from, and those that are missing
are added to it, after each family; `added` says which a later command added. `--again` keeps none.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
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
    begun = next((row for row in rows if "grad_norm" in row), {})
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
        "beyond_rounding": beyond, "first_iteration": {key: value for key, value in begun.items() if value},
        "first_above": {key: [metrics(run)[first or 0][key] for run in runs] for key in sorted(shown)},
    }  # fmt: skip


def compared(one: Path, two: Path, copies: Path, *, full: bool) -> dict[str, Any]:
    """What a run that splits the weights differs by, and what a process held."""
    held = json.loads((two / "manifest.json").read_text())["denoiser_bytes"]
    saved = {key: state(one)[key] for key in ("policy", "slots", "optimizer")}
    return {
        **nearness(one, two, copies if copies.exists() else None),
        "ratio_first_deviation": max(row.get("ratio_first_deviation", 0.0) for row in metrics(two)),
        "share_of_weights": held["held"] / held["whole"],
        **({"share_of_checkpoint": max(sizes_of_parts(two)) / bytes_of(saved)} if full else {}),
    }


def parts(run: Path) -> list[int]:
    """How many parts each of a run's checkpoints has."""
    return [len(list(path.glob("part-*.pt"))) for path in sorted((run / "checkpoints").iterdir())]


def courses(folder: Path, family: str, python: str) -> dict[str, Any]:
    """Results of a family's runs that went on in other layouts, by "family recipe, how"."""
    recipe = RUNS[family]
    whole, chain, swap, killed = (folder / name / family for name in ("whole", "chain", "swap", "killed"))

    def launch(processes: int, *commands: list[str]) -> None:
        told = [(0, False, arguments) for arguments in commands]
        train_on_two(folder, told, seconds=SECONDS, processes=processes, python=python)

    def begun(run: Path, iterations: int, *more: str) -> list[str]:
        return command(folder, family, recipe, run, *FULL, *EVERY, f"num_iterations={iterations}", *more)

    def resumed(run: Path, iterations: int, *more: str) -> list[str]:
        return [f"resume={run}", f"num_iterations={iterations}", *more]

    one, two, four = (f"parallel.shard={number}" for number in (1, 2, 4))
    launch(4, begun(chain, 1, four))
    late: list[list[str]] = []
    functions = [text.removeprefix("FUNCTION=") for text in RECIPES[recipe] if text.startswith("FUNCTION=")]
    if functions:
        killing = folder / f"killing_{family}.py"
        killing.write_text(REWARDS + KILLING)
        rewards = f"rewards=[{{file: {killing}, function: {functions[0]}}}]"
        with suppress(AssertionError):
            launch(2, begun(killed, 4, two, rewards))
        assert killing.with_suffix(".was").exists()
        assert sorted(path.name for path in (killed / "checkpoints").iterdir()) == [".000002", "000001"]
        late = [resumed(killed, 4)]
    launch(2, resumed(chain, 2, two), begun(swap, 1, two), resumed(swap, 2, one), resumed(swap, 4, two), *late)
    launch(1, resumed(chain, 3, one), begun(whole, 4))
    launch(4, resumed(chain, 4, four))
    return {
        f"{family} {recipe}, {words}": {
            **nearness(whole, folder / name / family),
            "parts": parts(folder / name / family),
        }
        for words, name in ENDS.items()
        if functions or name != "killed"
    }


def layout_of(folder: Path, layout: str, family: str, recipes: list[str], python: str) -> dict[str, Any]:
    """Results of a family's runs in a layout, by "family recipe, layout". Copies are run where anything differs."""
    processes, settings = LAYOUTS[layout]
    ones, splits, copies = (
        {recipe: folder / name / f"{family}-{recipe}" for recipe in recipes}
        for name in (f"one-{bool(settings)}", layout, f"{layout}, copies")
    )

    def train(number: int, runs: dict[str, Path], *more: str) -> None:
        told = [(0, False, command(folder, family, recipe, run, *settings, *more)) for recipe, run in runs.items()]
        if told:
            train_on_two(folder, told, seconds=SECONDS, processes=number, python=python)

    train(1, {recipe: run for recipe, run in ones.items() if not run.exists()})
    train(processes, splits, f"parallel.shard={processes}")
    far = [recipe for recipe in recipes if settings and nearness(ones[recipe], splits[recipe])["first_above"]]
    train(processes, {recipe: copies[recipe] for recipe in far}, f"parallel.replicate={processes}")
    return {
        f"{family} {recipe}, {layout}": compared(ones[recipe], splits[recipe], copies[recipe], full=bool(settings))
        for recipe in recipes
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSON file of the results, and of those already there")
    parser.add_argument("--families", nargs="+", default=list(FAMILIES), choices=list(FAMILIES))
    parser.add_argument("--recipes", nargs="+", default=list(RECIPES), choices=list(RECIPES))
    parser.add_argument("--layouts", nargs="*", default=list(LAYOUTS), choices=list(LAYOUTS))
    parser.add_argument("--again", action="store_true", help="measure what is there already, too")
    given = parser.parse_args()
    own = origin()  # before the first result is written into the checkout
    kept = given.out.exists() and not given.again
    earlier: dict[str, Any] = json.loads(given.out.read_text()) if kept else {**own, "runs": {}}
    begun = list(earlier["runs"])

    def keep(found: dict[str, Any]) -> None:
        earlier["runs"] |= found
        made = [name for name in earlier["runs"] if name not in begun]
        told = {"added": [*added, {**own, "runs": made}]} if begun else {}
        given.out.write_text(json.dumps({**earlier, **told, "runs": earlier["runs"]}, indent=1) + "\n")
        print(*(f"{name}: {result['metrics']:.1e}" for name, result in found.items()), sep="\n", flush=True)

    added = earlier.pop("added", [])
    with tempfile.TemporaryDirectory() as place, warm_interpreter() as python:
        folder = Path(place)
        for family in given.families:
            if f"{family} {RUNS[family]}, {next(iter(ENDS))}" not in begun:
                keep(courses(folder / "courses", family, python))
        for layout in given.layouts:
            for family in given.families:
                left = [recipe for recipe in given.recipes if f"{family} {recipe}, {layout}" not in begun]
                if left:
                    keep(layout_of(folder, layout, family, left, python))


if __name__ == "__main__":
    main()
