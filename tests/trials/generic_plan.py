"""What `flowrl plan` counts of every stock class that was tried without a family, and what a real run of it counts.

    python tests/trials/generic_plan.py --out docs/research/trials/generic_plan.json

Small random instances of the real classes, float32, CPU; FLOPs by torch's own counter.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

sys.path += [str(Path(__file__).resolve().parents[1] / place) for place in ("helpers", "helpers/families")]

import torch
from generic_plan_proof import plan_proof
from generic_proof import SETTINGS
from origin import origin
from tiny_generic_later import save_tiny_generic


def main() -> None:
    """Counts and writes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as room:
        for name in SETTINGS:
            planned, found = plan_proof(name, save_tiny_generic(name, Path(room) / name))
            rows.append({"class": name, "equal": planned == found, "planned": planned, "counted": found})
            arguments.out.write_text(json.dumps({**origin(), "rows": rows}, indent=1) + "\n", encoding="utf-8")
            print(name, planned == found)


if __name__ == "__main__":
    main()
