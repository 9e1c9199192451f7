"""LoRA files of many programs: what a network says with each as flowrl reads it, against stock and the formula.

    python tests/trials/loras/lora_forms.py --out docs/research/trials/lora_forms.json

Small random instances of the real classes, float32, CPU. A row is right where no difference is above 1e-5, which is
float32's rounding through a whole network, and the LoRA changes what the network says by more than 0.1.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import warnings
from pathlib import Path

import torch

sys.path[:0] = [str(Path(__file__).parents[2] / place) for place in ("trials", "helpers", "helpers/families")]
from lora_writers import FORMS, compared  # noqa: E402
from origin import origin  # noqa: E402
from tiny_folders import save_tiny  # noqa: E402


def main() -> None:
    """Tries and writes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    rows, models = [], dict[str, Path]()
    with tempfile.TemporaryDirectory() as place:
        room = Path(place)
        for number, form in enumerate(FORMS):
            if form.family not in models:
                models[form.family] = save_tiny(form.family, room / form.family)
            found = compared(form, models[form.family], room / str(number))
            worst = max(value for key, value in found.items() if key != "effect")
            rows.append({
                "form": form.name, "family": form.family, "written": form.written is not None, "read": True,
                "reader": form.stock, **found, "largest": worst,
                "verdict": "right" if worst < 1e-5 and found["effect"] > 0.1 else "wrong",
            })  # fmt: skip
            arguments.out.write_text(json.dumps({**origin(), "rows": rows}, indent=1) + "\n", encoding="utf-8")
            print(json.dumps(rows[-1]))


if __name__ == "__main__":
    main()
