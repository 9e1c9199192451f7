"""Whether a rollout's velocity equals an update's bit for bit, so that the importance ratio starts at exactly 1.

    python tests/trials/exact_ratio.py --out docs/research/trials/exact_ratio.json

Tiny networks of five families with a LoRA that acts, once without gradient and once with it: every attention word that
a CPU has, eager and compiled blocks (traced, without generated code), guidance 1 and 3, every way of
`sampler.train_negative`, float32 and bfloat16.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
from origin import origin

from flowrl.pipelines import family
from flowrl.pipelines.arithmetic.attention import give_kernel
from flowrl.pipelines.arithmetic.compiling import compile_blocks
from flowrl.pipelines.family_pipeline import FamilyPipeline
from flowrl.samplers.guidance import TrainNegative

sys.path[:0] = [str(Path(__file__).parents[1] / place) for place in ("pipelines", "helpers", "helpers/families")]
from family_sampling import adapted, start_noise  # noqa: E402
from tiny_folders import SETTINGS, save_tiny  # noqa: E402

FAMILIES = ("sd3", "flux", "qwen_image", "wan", "sd")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
WORDS = {"float32": ("native", "math"), "bfloat16": ("native", "float32", "math")}
GUIDANCE: tuple[tuple[float, TrainNegative], ...] = ((1.0, True), (3.0, True), (3.0, False), (3.0, "recompute"))
PROMPTS = ["a red fox", "a red fox"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One combination; scale 1 has no negative half."""

    family: str
    dtype: str
    compiled: bool
    attention: str
    scale: float
    train_negative: TrainNegative


def cases() -> list[Case]:
    """The full product, the cases of one network beside each other."""
    return [
        Case(family=name, dtype=dtype, compiled=compiled, attention=word, scale=scale, train_negative=way)
        for name, dtype, compiled in product(FAMILIES, DTYPES, (False, True))
        for word, (scale, way) in product(WORDS[dtype], GUIDANCE)
    ]


def measure(chosen: Sequence[Case], folder: Path) -> Iterator[dict[str, Any]]:
    """The largest difference of the velocities of each case; a network is built where it is not the last one's."""
    last, pipeline = None, None
    for case in chosen:
        network = (case.family, case.dtype, case.compiled)
        if network != last:
            last, pipeline = network, _loaded(case, folder)
        assert pipeline is not None
        yield asdict(case) | {"max_difference": _difference(pipeline, case)}


def _loaded(case: Case, folder: Path) -> FamilyPipeline:
    torch.compiler.reset()
    place = folder / case.family
    if not place.exists():
        save_tiny(case.family, place)
    settings: Any = SETTINGS.get(case.family, {})
    pipeline: Any = family(case.family).load(str(place), dtype=DTYPES[case.dtype], **settings)
    adapted(pipeline)
    if case.compiled:
        compile_blocks(pipeline.denoiser, backend="aot_eager")
    return pipeline


def _difference(pipeline: FamilyPipeline, case: Case) -> float:
    known = pipeline.family.attends(pipeline.model)
    give_kernel([pipeline.denoiser], case.attention, known, DTYPES[case.dtype], "cpu")
    cond, negative = pipeline.encode(PROMPTS), pipeline.encode([""])
    velocity = pipeline.guided(pipeline.network, cond, negative, case.scale, case.train_negative)
    given = start_noise(pipeline), torch.tensor(0.7), torch.tensor(700.0)
    with torch.no_grad():
        rolled = velocity(*given)
    updated = velocity(*given)
    if not updated.requires_grad or not bool(rolled.any()):
        raise RuntimeError(f"{case} has no gradient, or a velocity of zeros")
    return float((updated.detach() - rolled).abs().max())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=FAMILIES)
    given = parser.parse_args()
    torch.set_num_threads(1)
    results = []
    with tempfile.TemporaryDirectory() as folder:
        for result in measure([case for case in cases() if case.family in given.families], Path(folder)):
            results.append(result)
            if result["max_difference"]:
                print(json.dumps(result), flush=True)
    unequal = sum(result["max_difference"] != 0 for result in results)
    facts = origin() | {"cases": len(results), "unequal": unequal, "cpu_s": round(time.process_time())}
    given.out.write_text(json.dumps(facts | {"results": results}, indent=1) + "\n", encoding="utf-8")
    print(f"{len(results)} cases, {unequal} unequal")


if __name__ == "__main__":
    main()
