"""What First-Block Cache saves and changes on the embedded model: processor seconds, steps cut short, pixels.

.venv/bin/python docs/research/scripts/measure_first_block.py --out docs/research/trials/first_block.json
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flowrl.config.train import resolve_path
from flowrl.generation.models import EMBEDDED, find_source, load_source, schedule_of
from flowrl.prompts.loading import load_prompts
from flowrl.runtime.files import write_atomically
from flowrl.runtime.randomness import sample_normals
from flowrl.training.heldout import finished
from flowrl.training.prompting import encode_prompts

sys.path.append(str(Path(__file__).resolve().parents[3] / "tests" / "trials"))
from origin import origin

THRESHOLDS = (0.0, 0.05, 0.1, 0.2, 0.4)
IMAGES, REPEATS = 8, 3


def main() -> None:
    """Measures all thresholds and writes what came of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parsed = parser.parse_args()
    torch.set_num_threads(1)
    source = find_source(EMBEDDED)
    pipeline = load_source(source, "cpu")
    prompts = load_prompts("asset:prompts/world_heldout.jsonl", "", resolve=resolve_path)[:IMAGES]
    x = sample_normals(pipeline.latent_shape, [(0, "first block", i) for i in range(IMAGES)])
    schedule, whole = schedule_of(source, pipeline), list[int]()
    blocks: Any = pipeline.denoiser.transformer_blocks
    next(blocks[1].children()).register_forward_hook(lambda *_: whole.append(1))

    def drawn(threshold: float) -> Tensor:
        cond = encode_prompts(pipeline, prompts)
        return pipeline.decode(finished(pipeline, cond, x, schedule, source.guidance_scale, threshold))

    exact, rows = drawn(0.0), list[dict[str, Any]]()
    seconds: dict[float, list[float]] = {threshold: [] for threshold in THRESHOLDS}
    for _ in range(REPEATS):  # in turn, so that whatever else the machine does is shared
        for threshold in THRESHOLDS:
            begun = time.process_time()
            drawn(threshold)
            seconds[threshold].append(time.process_time() - begun)
    for threshold in THRESHOLDS:
        whole.clear()
        images = drawn(threshold)
        error = (images - exact).square().flatten(1).mean(1)
        mean = float(error.mean())
        rows.append(
            {
                "threshold": threshold,
                "steps_cut_short": schedule.num_steps - len(whole),
                "seconds": round(statistics.median(seconds[threshold]), 3),
                "seconds_range": [round(one(seconds[threshold]), 3) for one in (min, max)],
                "psnr_db": None if mean == 0 else round(-10 * math.log10(mean), 1),
                "largest_pixel": round(float((images - exact).abs().max()), 4),
            }
        )
        print(json.dumps(rows[-1]), flush=True)
    about = {"model": EMBEDDED, "images": IMAGES, "steps": schedule.num_steps, "guidance": source.guidance_scale,
             "blocks": len(blocks), "repeats": REPEATS}  # fmt: skip
    write_atomically(parsed.out, json.dumps({**origin(), **about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
