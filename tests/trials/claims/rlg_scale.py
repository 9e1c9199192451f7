"""RLG on three trainings of one method: does a scale above 1 help, and is a scale below 1 a weaker training?

    python tests/trials/claims/rlg_scale.py runs/methods --out docs/research/claims/rlg_scale.json

RUNS is a finished `flowrl compare` with tiny_g2rpo. `flowrl sweep` draws 120 held-out prompts twice at scales 0, 0.5,
1, 1.5 and 2 from the same start noise (arXiv 2508.21016). Decided before: `above_one` is the verdict at 1.5 less that
at 1, `two` the same at 2, `attributes_above_one` the same for the scorer that nothing was trained on, and
`drift_halved` is how much of the drift from the base (mean square difference of velocities) scale 0.5 saves, less the
share of the gain that it gives up: above 0 means that a scale below 1 is the better trade, as a stronger KL penalty
is meant to be.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1])]

from origin import origin  # noqa: E402

from flowrl.cli import main as flowrl  # noqa: E402
from flowrl.runtime.files import read_json, write_atomically  # noqa: E402

SCALES = (0.0, 0.5, 1.0, 1.5, 2.0)
TARGET, HELD_OUT = "geneval:official", "attributes"


def sweep(run: Path) -> dict[float, dict[str, Any]]:
    """Scale -> what was measured there."""
    scales = ",".join(f"{scale:g}" for scale in SCALES)
    options = ["--rlg", scales, "--num-prompts", "120", "--samples", "2", "--dtype", "bfloat16", "--features", "none"]
    if flowrl(["sweep", str(run), *options]):
        raise SystemExit(f"flowrl sweep {run} failed")
    found = read_json(run / "sweep" / "sweep.json")
    return {row["scale"]: row for row in found["settings"] if row["kind"] == "rlg"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    runs = sorted(given.runs.glob("tiny_g2rpo-s*"))
    seeds = [sweep(run) for run in runs]

    def at(scale: float, name: str) -> list[float]:
        return [found[scale]["scores"][name]["mean"] for found in seeds]

    def less(high: float, low: float, name: str) -> list[float]:
        return [a - b for a, b in zip(at(high, name), at(low, name), strict=True)]

    drift = [(found[0.5]["drift"], found[1.0]["drift"]) for found in seeds]
    kept = [half / whole for half, whole in zip(less(0.5, 0.0, TARGET), less(1.0, 0.0, TARGET), strict=True)]
    effects = {
        "above_one": less(1.5, 1.0, TARGET),
        "two": less(2.0, 1.0, TARGET),
        "attributes_above_one": less(1.5, 1.0, HELD_OUT),
        "drift_halved": [share - half / whole for share, (half, whole) in zip(kept, drift, strict=True)],
    }
    written = origin() | {
        "scores": {f"{scale:g}": {name: at(scale, name) for name in (TARGET, HELD_OUT)} for scale in SCALES},
        "drift": {f"{scale:g}": [found[scale]["drift"] for found in seeds] for scale in SCALES},
        "effects": {name: {"per_seed": values} for name, values in effects.items()},
    }  # fmt: skip
    write_atomically(given.out, json.dumps(written, indent=1) + "\n")
    print(json.dumps(written["effects"], indent=1))


if __name__ == "__main__":
    main()
