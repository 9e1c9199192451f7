"""DPO and GRPO on prompts of a kind that neither trained on: is GRPO the one that generalises (arXiv 2505.17017)?

    python tests/trials/claims/out_of_domain.py runs/methods --out docs/research/claims/out_of_domain.json

RUNS is a finished `flowrl compare` with tiny_flow_grpo and tiny_dpo. Training asks for a colour, or for a place, or for
two colours; here every prompt asks for two things with a colour each, one beside the other: 96 of the 288, spread, two
images each at the model's default sampling. The effect is Flow-GRPO's mean graded credit less DPO's, seed by seed, and
beside it each one's gain over the model before training. The verdict was to be the measure; the model before training
had 1 of 24 images right, so that it could tell nothing, and graded credit was taken before any tuned model was drawn.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
from pathlib import Path
from statistics import fmean
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1])]

from origin import origin  # noqa: E402

import flowrl  # noqa: E402
from flowrl.benchmarks.geneval.metadata import RELATIONS  # noqa: E402
from flowrl.prompts.loading import spread  # noqa: E402
from flowrl.runtime.files import write_atomically  # noqa: E402
from flowrl.world.scenes import COLORS, SHAPES  # noqa: E402

METHODS = {"grpo": "tiny_flow_grpo", "dpo": "tiny_dpo"}
PROMPTS, SAMPLES = 96, 2


def records() -> list[dict[str, Any]]:
    """Prompts that join what training asks for apart: a colour for each of two things, and where they are."""
    found = []
    for (a, b), (first, second), relation in itertools.product(
        itertools.permutations(SHAPES, 2), itertools.permutations(COLORS, 2), RELATIONS
    ):
        found.append({
            "tag": "position",
            "include": [
                {"class": b, "count": 1, "color": second},
                {"class": a, "count": 1, "color": first, "position": [relation, 0]},
            ],
            "prompt": f"a photo of a {first} {a} {relation} a {second} {b}",
        })  # fmt: skip
    return [found[place] for place in spread(len(found), PROMPTS)]


def score(model: str | Path, prompts: Path, out: Path) -> float:
    """Mean graded credit of the images: how much of what was asked they show."""
    found = flowrl.evaluate(
        model, prompts=prompts, samples=SAMPLES, out=out, seed=1, steps=10, guidance=3.0, dtype="bfloat16", show=False
    )
    return fmean(float(row["graded"]) for row in found.rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    seeds = sorted(int(path.name.rpartition("-s")[2]) for path in given.runs.glob(f"{METHODS['dpo']}-s*"))
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        prompts = work / "prompts.jsonl"
        write_atomically(prompts, "".join(json.dumps(record) + "\n" for record in records()))
        before = score("asset:tiny-sd3", prompts, work / "base")
        after = {
            name: [score(given.runs / f"{method}-s{seed}", prompts, work / f"{name}{seed}") for seed in seeds]
            for name, method in METHODS.items()
        }
    effects = {
        "grpo_over_dpo": [a - b for a, b in zip(after["grpo"], after["dpo"], strict=True)],
        **{f"{name}_gain": [value - before for value in values] for name, values in after.items()},
    }
    written = origin() | {
        "before": before, "after": after, "seeds": seeds,
        "effects": {name: {"per_seed": values} for name, values in effects.items()},
    }  # fmt: skip
    write_atomically(given.out, json.dumps(written, indent=1) + "\n")
    print(json.dumps(written, indent=1))


if __name__ == "__main__":
    main()
