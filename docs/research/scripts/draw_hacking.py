"""Writes docs/research/hacking.md's table, curves and samples from the runs of docs/research/hacking/*.yaml.

    .venv/bin/python docs/research/scripts/draw_hacking.py RUNS

RUNS holds one run folder for each configuration, called as its file is. Needs `make docs` (or matplotlib) once.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import torch
from drawing import COLORS, plain
from page_parts import fill, table
from PIL import Image

from flowrl.media.images import as_tensor, grid, save_png
from flowrl.runs.run_data import RunData, read_run
from flowrl.runtime.files import write_atomically
from flowrl.training.watchdog import evaluation_warnings, new_history

matplotlib.use("Agg")
from matplotlib import pyplot

RESEARCH = Path(__file__).resolve().parents[1]
OUT, PAGE = RESEARCH / "hacking", RESEARCH / "hacking.md"
RUNS = {
    "jpeg": "file size alone",
    "brightness": "brightness alone",
    "judge": "a judge that likes colour",
    "judge_mild": "one that likes it less",
    "jpeg_kl": "file size, KL to the base",
    "jpeg_guard": "file size, GRPO-Guard",
    "jpeg_both": "file size and the verdict",
}
HELD_OUT = "eval/geneval/score"
ENDS = {"score": "", "low": "_low", "high": "_high"}
SHOWN = (0, 6, 12, 18, 24)


def facts(run: RunData) -> dict[str, Any]:
    """What the page says of a run: its evaluations, when it was named, and where it was best."""
    rows = [
        {"iteration": row["iteration"], **{key: row[f"{HELD_OUT}{end}"] for key, end in ENDS.items()}}
        for row in run.evaluations
    ]
    named, history, weights = [], new_history(), weights_of(run)
    for row in run.evaluations:
        named += [(row["iteration"], said) for said in evaluation_warnings(history, row, weights).values()]
    rewards = [float(row["reward"]) for row in run.train]
    return {
        "evaluations": rows,
        "reward": rewards,
        "named": min(named, default=None),
        "best": max(rows, key=lambda row: row["score"])["iteration"],
        "drift": run.evaluations[-1].get("eval/kl", math.nan),
        "commit": run.manifest.get("git_commit"),
        "started": str(run.manifest.get("started", ""))[:10],
    }


def weights_of(run: RunData) -> dict[str, float]:
    """The weights of what was measured, by name, 0 for what was not trained on."""
    keys = {key.split("/")[2] for key in run.evaluations[0] if key.startswith("eval/reward/")}
    trained = {entry.get("name") or entry["function"]: float(entry["weight"]) for entry in run.config["rewards"]}
    return {key: trained.get(key, 0.0) for key in keys if not key.endswith(("_low", "_high"))}


def rows_of(found: Mapping[str, Mapping[str, Any]]) -> list[list[str]]:
    """The table: what was trained on, when it was named, and what was left of what was asked."""
    rows = []
    for name, run in found.items():
        scores = {row["iteration"]: row["score"] for row in run["evaluations"]}
        first, last = run["evaluations"][0], run["evaluations"][-1]
        named = None if run["named"] is None else run["named"][0]
        rows.append([
            f"[{RUNS[name]}](hacking/{name}.yaml)",
            f"{run['reward'][0]:.3g} to {run['reward'][-1]:.3g}",
            *(f"{row['score']:.3f} ({row['low']:.3f} to {row['high']:.3f})" for row in (first, last)),
            "never" if named is None else f"{named}, at {scores[named]:.3f}",
            f"{scores[run['best']]:.3f} at {run['best']}",
            f"{run['drift']:.2f}",
        ])  # fmt: skip
    return rows


def draw_curves(found: Mapping[str, Mapping[str, Any]], path: Path) -> None:
    """The held-out score and the trained reward over iterations, one line a run; a cross where it was named."""
    figure, (above, below) = pyplot.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    for (name, run), color in zip(found.items(), COLORS, strict=False):
        x = [row["iteration"] for row in run["evaluations"]]
        above.plot(
            x, [row["score"] for row in run["evaluations"]], color=color, marker="o", markersize=4, label=RUNS[name]
        )
        if run["named"] is not None:
            at = run["named"][0]
            score = next(row["score"] for row in reversed(run["evaluations"]) if row["iteration"] <= at)
            above.plot([at], [score], marker="x", markersize=11, markeredgewidth=2.5, color=color)
        low, high = min(run["reward"]), max(run["reward"])
        share = [(value - low) / (high - low) for value in run["reward"]]
        below.plot(range(len(share)), share, color=color, label=RUNS[name])
    above.set(
        xlabel="iteration",
        ylabel="GenEval, held out",
        ylim=(-0.03, None),
        title="What is asked (x: named by the watchdog)",
    )
    below.set(xlabel="iteration", ylabel="share of its range in the run", title="What is trained on")
    for axes in (above, below):
        plain(axes)
    above.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=110)


def draw_samples(folder: Path, names: Sequence[str], path: Path) -> None:
    """A row for each run: two prompts, the same start noise after 0, 6, … iterations."""
    images, captions = [], []
    for name in names:
        for number in (3, 8):
            for iteration in SHOWN:
                with Image.open(
                    folder / name / "samples" / f"iteration_{iteration:06d}" / f"{number:04d}.png"
                ) as image:
                    images.append(as_tensor(image.convert("RGB")))
                captions.append(f"{RUNS[name]}, {iteration}")
    save_png(grid(torch.stack(images), columns=2 * len(SHOWN), captions=captions, scale=2), path)


def main(folder: Path) -> None:
    """Writes runs.json, curves.png, samples.png and the page's table."""
    found = {name: facts(read_run(folder / name)) for name in RUNS if (folder / name / "summary.json").is_file()}
    OUT.mkdir(exist_ok=True)
    write_atomically(OUT / "runs.json", json.dumps(found, indent=1) + "\n")
    draw_curves(found, OUT / "curves.png")
    draw_samples(folder, list(found), OUT / "samples.png")
    head = ("trained on", "its reward", "GenEval before", "after 24", "named at iteration", "best", "drift")
    fill(PAGE, "runs", table(head, rows_of(found), right=6))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
