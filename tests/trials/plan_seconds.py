"""How long `flowrl plan` takes, in seconds of this process's CPU, beside the import of torch alone.

    python tests/trials/plan_seconds.py --out docs/research/trials/plan_seconds.json

Each plan is a process of its own on one thread, after one that is not counted; told is the median of so many.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
from pathlib import Path

from origin import origin

CONFIGS = (
    "sd35m_grpo_geneval", "sdxl_ddpo_pickscore", "flux_grpo_pickscore", "flux2_klein_grpo", "qwen_image_grpo_pickscore",
    "z_image_grpo", "sana_grpo_pickscore", "wan_t2v_grpo_ocr", "hunyuan_video_dance_grpo", "ltx2_grpo_sound",
)  # fmt: skip


def seconds(words: list[str], repeats: int) -> dict[str, float]:
    """User's and system's CPU of a Python process with these words, the median."""
    found = []
    for _ in range(repeats + 1):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(
            [sys.executable, *words], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        found.append((after.ru_utime - before.ru_utime, after.ru_stime - before.ru_stime))
    user, system = (statistics.median(column) for column in zip(*found[1:], strict=True))
    return {"user": round(user, 2), "system": round(system, 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    rows = {"import torch": seconds(["-c", "import torch"], given.repeats)}
    for name in CONFIGS:
        rows[name] = seconds(["-m", "flowrl", "plan", name], given.repeats)
        print(name, rows[name])
    told = {**origin(), "repeats": given.repeats, "seconds": rows}
    given.out.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
