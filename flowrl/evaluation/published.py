"""What rewards and benchmarks with a published name reproduce, as a page of Markdown: docs/published.md.

The sentences stand in one place: `reproduces` of a reward in `rewards/built_in.yaml`, of a benchmark in
`benchmarks.yaml`.
"""

from __future__ import annotations

from collections.abc import Mapping

from flowrl.evaluation.benchmark import BENCHMARKS
from flowrl.rewards import REWARDS, reproduction_of

_HEAD = """# What published names reproduce

A scorer or benchmark that carries a published name says here what it reproduces, and against what that was checked.
The same line stands in `manifest.json` of a run, in the card of `flowrl reward card` and in `result.json` of
`flowrl eval`.
Weights on hubs could not be had where this was written: what is "not checked against the released weights" is left to
somebody who has them. Rewards that are not listed have no published number to meet.

Written by `flowrl reward published > docs/published.md`. Published code that was run: [trials](research/trials.md).
"""


def published_page() -> str:
    """The page docs/published.md."""
    rewards = {name: line for name in REWARDS if (line := reproduction_of(name)) is not None}
    benchmarks = {name: known.reproduces for name, known in BENCHMARKS.items() if known.reproduces is not None}
    return f"{_HEAD}\n## Rewards\n\n{_table(rewards)}\n## Benchmarks\n\n{_table(benchmarks)}"


def _table(lines: Mapping[str, str]) -> str:
    rows = "".join(f"| `{name}` | {lines[name].replace('|', '&#124;')} |\n" for name in sorted(lines))
    return f"| name | what it reproduces, and against what that was checked |\n|---|---|\n{rows}"
