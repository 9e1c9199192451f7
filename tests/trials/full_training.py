"""All weights of the embedded model beside a LoRA, at equal network evaluations.

    python tests/trials/full_training.py --runs runs/full_training --out docs/trials/full_training.json

DRaFT on the embedded model (`configs/tiny_draft.yaml`), which learns within minutes: the LoRA at the rate that the
configuration has, all weights at several. Runs that are finished in the folder are not made again.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from origin import origin

from flowrl.files import read_json, read_json_lines

FULL = ("policy.train=full", "policy.lora_rank=null")
CASES: dict[str, tuple[str, ...]] = {
    "lora": (),
    "full_3e-5": (*FULL, "optim.lr=3e-5"),
    "full_1e-4": (*FULL, "optim.lr=1e-4"),
    "full_3e-4": (*FULL, "optim.lr=3e-4"),
}
"""Name of a run -> what it changes."""


def train(folder: Path, overrides: tuple[str, ...], iterations: int) -> None:
    """A run of the real command in a process of its own."""
    settings = [f"num_iterations={iterations}", "eval_every=12", "threads=1", "progress=false", "checkpoint_every=100"]
    command = [sys.executable, "-m", "flowrl", "train", "tiny_draft", f"out={folder}", *overrides, *settings]
    subprocess.run(command, check=True)


def result_of(folder: Path) -> dict[str, Any]:
    """What a finished run says: held-out scores, distance from the base, network evaluations."""
    rows = read_json_lines(folder / "metrics.jsonl")
    summary, last = read_json(folder / "summary.json"), [row for row in rows if "loss" in row][-1]
    evaluations = {row["iteration"]: row["eval/geneval/score"] for row in rows if "eval/geneval/score" in row}
    distances = {row["iteration"]: row["eval/kl"] for row in rows if "eval/kl" in row}
    return {
        "scores": evaluations, "change": summary["change"], "kl": distances, "nfe": last["nfe/total"],
        "trained_weights_mib": round(_size(folder) / 2**20, 2), "reward": summary["reward"],
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
    parser.add_argument("--iterations", type=int, default=24)
    options = parser.parse_args()
    results = {}
    for name, overrides in CASES.items():
        folder = options.runs / name
        if not (folder / "summary.json").is_file():
            train(folder, overrides, options.iterations)
        results[name] = result_of(folder)
    text = json.dumps({**origin(), "iterations": options.iterations, "runs": results}, indent=1)
    options.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
