"""Every stock class that was tried without a family of its own: test at load, LoRA in stock, a training iteration.

    python tests/trials/generic_classes.py --out docs/research/trials/generic_classes.json

Small random instances of the real classes, float32, CPU.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

sys.path += [str(Path(__file__).resolve().parents[1] / place) for place in ("helpers", "helpers/families")]

import torch
from generic_proof import SETTINGS, one_iteration, proof
from origin import origin
from tiny_generic_later import save_tiny_generic


def tried(name: str, room: Path) -> dict[str, Any]:
    """One class."""
    folder = save_tiny_generic(name, room / name)
    found = {"class": name, **proof(name, folder, room / f"{name}-lora")}
    with contextlib.redirect_stdout(io.StringIO()):
        rows = one_iteration(name, folder, room / f"{name}-run", route="generic")
    trained = next(row for row in rows if "ratio_first_deviation" in row)
    return found | {"ratio_first_deviation": trained["ratio_first_deviation"], "grad_norm": trained["grad_norm"]}


def main() -> None:
    """Tries and writes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--classes", nargs="+", choices=list(SETTINGS), default=list(SETTINGS))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    rows = []
    with tempfile.TemporaryDirectory() as room:
        for name in arguments.classes:
            rows.append(tried(name, Path(room)))
            arguments.out.write_text(json.dumps({**origin(), "rows": rows}, indent=1) + "\n", encoding="utf-8")
            print(json.dumps(rows[-1]))


if __name__ == "__main__":
    main()
