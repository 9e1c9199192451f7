"""What the noise of stochastic steps leaves in an image: Flow-SDE against Flow-CPS (arXiv 2509.05952), untrained.

    python tests/trials/claims/cps_noise.py --out docs/research/claims/cps_noise.json

120 held-out prompts, spread, by `asset:tiny-sd3` at guidance 3 from the same start noise: every step but the last
stochastic, noise level 0.7, in 6, 10 and 20 steps, three seeds of start noise and noise. Decided before any of it was
drawn: *residue* is the mean distance of a pixel from the median of the nine around it, in 1/255, less that of the
deterministic image of the same start, since drawn shapes are flat; `residue_10` is Flow-SDE's less CPS's at ten steps,
`residue_6` and `residue_20` the same at others, and `score_*` CPS's share of right images less Flow-SDE's.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

sys.path[:0] = [str(Path(__file__).parents[1])]

from origin import origin  # noqa: E402

from flowrl.config.train import resolve_path  # noqa: E402
from flowrl.generation.models import find_source, load_source  # noqa: E402
from flowrl.pipelines import Pipeline  # noqa: E402
from flowrl.prompts.loading import Prompt, read_prompts, spread  # noqa: E402
from flowrl.rewards import RewardInputs  # noqa: E402
from flowrl.rewards.geneval import Geneval, Judge  # noqa: E402
from flowrl.runtime.files import write_atomically  # noqa: E402
from flowrl.runtime.randomness import counter_normal  # noqa: E402
from flowrl.samplers import KERNELS  # noqa: E402
from flowrl.samplers.rollout import rollout  # noqa: E402
from flowrl.training.prompting import encode_prompts, guided  # noqa: E402

STEPS, SEEDS, PROMPTS, BATCH = (6, 10, 20), 3, 120, 24
KINDS = ("ode", "flow_sde", "cps")
NOISE = 0.7


def residue(images: Tensor) -> float:
    """Mean distance of a pixel from the median of the nine around it, in 1/255."""
    padded = torch.nn.functional.pad(images, (1, 1, 1, 1), mode="replicate")
    nine = padded.unfold(2, 3, 1).unfold(3, 3, 1).flatten(4)
    return 255 * float((images - nine.median(-1).values).abs().mean())


@torch.no_grad()
def drawn(pipeline: Pipeline, prompts: list[Prompt], kind: str, num_steps: int, seed: int) -> Tensor:
    """The images of one kernel, [n, 3, H, W]."""
    schedule = pipeline.schedule(num_steps, "diffusers")
    kernel = KERNELS[kind]
    if kind != "ode":
        kernel = replace(kernel, noise_level=NOISE, sigma_max=schedule.sigma[1])
    images = []
    for first in range(0, len(prompts), BATCH):
        batch = prompts[first : first + BATCH]

        def noise(step: int, first: int = first, batch: list[Prompt] = batch) -> Tensor:
            keys = range(first, first + len(batch))
            return torch.cat([counter_normal((1, *pipeline.latent_shape), seed, "claims", step, key) for key in keys])

        velocity = guided(pipeline, pipeline.network, encode_prompts(pipeline, batch), 3.0)
        steps = () if kind == "ode" else range(num_steps - 1)
        images.append(pipeline.decode(rollout(velocity, noise(-1), schedule, kernel, noise, stochastic=steps).final))
    return torch.cat(images)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    rows = read_prompts(resolve_path("asset:prompts/world_heldout.jsonl"))
    prompts = [rows[place] for place in spread(len(rows), PROMPTS)]
    pipeline = load_source(find_source("asset:tiny-sd3"), "cpu")
    judge: Judge = Geneval(credit="official").load(torch.device("cpu"))
    places = torch.arange(len(prompts))
    measured: dict[str, Any] = {f"{kind}_{steps}": {"residue": [], "score": []} for kind in KINDS for steps in STEPS}
    for seed in range(SEEDS):
        for steps in STEPS:
            for kind in KINDS:
                images = drawn(pipeline, prompts, kind, steps, seed)
                inputs = RewardInputs(
                    images=images, prompts=[row.text for row in prompts], metadata=[row.metadata for row in prompts],
                    group_ids=places, sample_ids=places,
                )  # fmt: skip
                found = measured[f"{kind}_{steps}"]
                found["residue"].append(residue(images))
                found["score"].append(fmean(judge(inputs, quirk=False)["official"]))
                print(seed, steps, kind, found["residue"][-1], found["score"][-1], flush=True)

    def less(name: str, more: str, fewer: str, steps: int) -> list[float]:
        return [
            a - b for a, b in zip(measured[f"{more}_{steps}"][name], measured[f"{fewer}_{steps}"][name], strict=True)
        ]

    effects = {f"residue_{steps}": {"per_seed": less("residue", "flow_sde", "cps", steps)} for steps in STEPS}
    effects |= {f"score_{steps}": {"per_seed": less("score", "cps", "flow_sde", steps)} for steps in STEPS}
    write_atomically(given.out, json.dumps(origin() | {"measured": measured, "effects": effects}, indent=1) + "\n")


if __name__ == "__main__":
    main()
