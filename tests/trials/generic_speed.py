"""What a guided velocity costs by a stock pipeline's own call, beside the family that is written for it.

    python tests/trials/generic_speed.py --out docs/research/trials/generic_speed.json

Tiny models, where what is done around the network weighs most: CPU milliseconds of one thread, the median of calls
taken in turns, of two images of one prompt with guidance, without a gradient and with that of a LoRA.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

sys.path += [str(Path(__file__).resolve().parents[1] / place) for place in ("helpers", "helpers/families")]

import torch
from origin import origin
from tiny_folders import SETTINGS, save_tiny

from flowrl.pipelines import family
from flowrl.pipelines.weights.lora import Policy
from flowrl.runtime.randomness import counter_normal

FAMILIES = ("sd3", "flux", "qwen_image", "wan", "sana")
PROMPTS = ["a red fox in the snow"] * 2


class Timed:
    """Calls of one route to one model."""

    def __init__(self, route: str, folder: Path, scale: float, **settings: Any) -> None:
        self.p: Any = family(route).load(str(folder), dtype=torch.float32, **settings)
        self.policy = Policy(self.p.denoiser, rank=2, alpha=4, targets=self.p.lora_targets, seed=1)
        cond, negative = self.p.encode(PROMPTS), self.p.encode([""])
        self.velocity = self.p.guided(self.p.network, cond, negative, scale)
        self.schedule = self.p.schedule(4, "diffusers")
        self.x = counter_normal((2, *self.p.latent_shape), "x")

    def call(self, gradient: bool) -> float:
        """CPU milliseconds of one call, and of the way back with a gradient."""
        begun = time.process_time()
        with torch.set_grad_enabled(gradient):
            found = self.velocity(self.x, self.schedule.sigma[1], self.schedule.timestep[1])
            if gradient:
                torch.autograd.grad(found.sum(), list(self.policy.parameters.values()), allow_unused=True)
        return 1000 * (time.process_time() - begun)


def measure(name: str, room: Path, calls: int) -> dict[str, Any]:
    """One family and the generic route, in turns."""
    folder, usual = save_tiny(name, room / name), SETTINGS.get(name, {})
    scale = 3.5 if name == "flux" else 2.5
    own = Timed(name, folder, scale, **usual)
    height, width = own.p.image_shape[-2:]
    generic = Timed("generic", folder, scale, **{**usual, "height": height, "width": width})
    found: dict[str, Any] = {"family": name, "calls": calls}
    for gradient in (False, True):
        times: tuple[list[float], list[float]] = ([], [])
        for number in range(calls + 2):
            for of, one in zip(times, (own, generic), strict=True):
                taken = one.call(gradient)
                if number >= 2:  # the first calls warm up
                    of.append(taken)
        ours, theirs = (statistics.median(of) for of in times)
        found["with gradient" if gradient else "without gradient"] = {
            "family_ms": round(ours, 2), "generic_ms": round(theirs, 2), "more_ms": round(theirs - ours, 2),
            "times": round(theirs / ours, 2),
        }  # fmt: skip
    return found


def main() -> None:
    """Measures and writes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--calls", type=int, default=15)
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as room:
        rows = [measure(name, Path(room), arguments.calls) for name in arguments.families]
    arguments.out.write_text(json.dumps({**origin(), "rows": rows}, indent=1) + "\n", encoding="utf-8")
    for row in rows:
        print(json.dumps(row))


if __name__ == "__main__":
    main()
