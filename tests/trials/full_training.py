"""All weights of the embedded model beside a LoRA, at equal network evaluations.

    python tests/trials/full_training.py --runs runs/full_training --out docs/research/trials/full_training.json

DRaFT on the embedded model (`tiny_draft`), which learns within minutes: the LoRA at the rate that the
configuration has, all weights at several. One run is evaluated before training too; the others share that evaluation,
since all start as the same model. Runs that were evaluated at the end are not made again.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from origin import origin

from flowrl.runs.evaluation_rows import read_rows, score_rows
from flowrl.runtime.files import read_json_lines
from flowrl.statistics.means import partners, stratified_score

FULL = ("policy.train=full", "policy.lora_rank=null")
CASES: dict[str, tuple[str, ...]] = {
    "full_1e-4": (*FULL, "optim.lr=1e-4"),
    "full_3e-5": (*FULL, "optim.lr=3e-5", "eval.initial=false"),
    "lora": ("eval.initial=false",),
}
"""Name of a run -> what it changes."""


def train(folder: Path, overrides: tuple[str, ...], iterations: int) -> None:
    """A run of the real command in a process of its own."""
    settings = [f"num_iterations={iterations}", "eval_every=12", "threads=1", "progress=false", "checkpoint_every=100"]
    command = [sys.executable, "-m", "flowrl", "train", "tiny_draft", f"out={folder}", *overrides, *settings]
    subprocess.run(command, check=True)


def result_of(folder: Path, first: Path, iterations: int) -> dict[str, Any]:
    """What a run says: held-out scores against those before training, distance from the base, network evaluations.

    Args:
        folder: of the run.
        first: of the run that was evaluated before training.
        iterations: after which both are looked at.
    """
    rows = read_json_lines(folder / "metrics.jsonl")
    evaluated = next(row for row in rows if row["iteration"] == iterations and "eval/kl" in row)
    trained = [row for row in rows if "loss" in row and row["iteration"] < iterations]
    before, after = partners(score_rows(read_rows(first, 0)), score_rows(read_rows(folder, iterations)))
    start, end, change = stratified_score(before), stratified_score(after), stratified_score(after, base=before)
    return {
        "score_before": start.mean, "score_after": end.mean, "change": [change.mean, change.low, change.high],
        "attributes_after": evaluated["eval/reward/attributes"], "kl": evaluated["eval/kl"],
        "nfe": trained[-1]["nfe/total"], "seconds": round(sum(row["seconds"] for row in trained), 1),
        "trained_mib": round(_size(folder) / 2**20, 2),
    }  # fmt: skip


def _size(folder: Path) -> int:
    """Bytes of what was trained, as it is shipped."""
    trained = folder / "lora" if (folder / "lora").is_dir() else folder / "model" / "transformer"
    return sum(path.stat().st_size for path in trained.glob("*.safetensors"))


def main() -> None:
    """Trains what is missing and writes the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--iterations", type=int, default=12)
    options = parser.parse_args()
    results, first = {}, options.runs / next(iter(CASES))
    for name, overrides in CASES.items():
        folder = options.runs / name
        if not (folder / "eval" / f"iteration_{options.iterations:06d}.jsonl").is_file():
            train(folder, overrides, options.iterations)
        results[name] = result_of(folder, first, options.iterations)
    text = json.dumps({**origin(), "iterations": options.iterations, "runs": results}, indent=1)
    options.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
