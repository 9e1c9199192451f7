"""Writes docs/composing.md's tables of settings that go together, or do not, from flowrl/config/together.yaml.

.venv/bin/python docs/research/scripts/write_together.py
"""

from __future__ import annotations

from pathlib import Path

from page_parts import fill, table

from flowrl.config.together import EXCLUSIONS, OFF

PAGE, PART = Path(__file__).resolve().parents[2] / "composing.md", "together"
SETTINGS = (
    "parallel.shard", "parallel.context", "workers.rollouts", "pipeline.quantize", "policy.lora_variant",
    "keep_graphs=true", "keep_graphs=gradients", "pipeline.compile=blocks", "policy.train=full",
)  # fmt: skip
"""Those of which each stands beside each other one: a key alone for all of its values."""


def refused(*settings: str) -> list[int]:
    """Numbers of what refuses settings together, from 1."""
    keys = {key: value or "given" for key, _, value in (setting.partition("=") for setting in settings)}
    return [number for number, one in enumerate(EXCLUSIONS, 1) if one.met({**OFF, **keys})]


def text() -> str:
    """Both tables: of all pairs, and of the reasons."""
    rows = []
    for place, name in enumerate(SETTINGS[1:], 1):
        key = name.partition("=")[0]
        cells = [
            "" if other.startswith(key) else ", ".join(map(str, refused(name, other))) or "yes"
            for other in SETTINGS[:place]
        ]
        rows.append([f"`{name}`", *cells, *[""] * (len(SETTINGS) - 1 - place)])
    pairs = table(["", *(f"`{name}`" for name in SETTINGS[:-1])], rows)
    reasons = [
        [str(number), " beside ".join(f"`{setting}`" for setting in one.settings), one.why]
        for number, one in enumerate(EXCLUSIONS, 1)
    ]
    return f"{pairs}\n\n{table(['', 'refused', 'because'], reasons)}"


if __name__ == "__main__":
    fill(PAGE, PART, text())
