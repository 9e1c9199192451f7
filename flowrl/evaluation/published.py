"""Writes what rewards and benchmarks with a published name reproduce, as a page of Markdown: docs/published.md.

The sentences are `reproduces` of rewards in `rewards/built_in.yaml` and of benchmarks in `benchmarks.yaml`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from flowrl.evaluation.benchmark import BENCHMARKS
from flowrl.rewards import REWARDS, reproduction_of
from flowrl.runtime.files import read_text


def published_page() -> str:
    """The page docs/published.md."""
    rewards = {name: line for name in REWARDS if (line := reproduction_of(name)) is not None}
    benchmarks = {name: known.reproduces for name, known in BENCHMARKS.items() if known.reproduces is not None}
    head = read_text(Path(__file__).with_suffix(".md"))
    return f"{head}\n## Rewards\n\n{_table(rewards)}\n## Benchmarks\n\n{_table(benchmarks)}"


def _table(lines: Mapping[str, str]) -> str:
    rows = "".join(f"| `{name}` | {lines[name].replace('|', '&#124;')} |\n" for name in sorted(lines))
    return f"| name | what it reproduces, and against what that was checked |\n|---|---|\n{rows}"
