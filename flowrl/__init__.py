"""Reinforcement learning for diffusion and flow-matching generators.

    import flowrl

    run = flowrl.train("tiny_recommended", num_iterations=10)
    flowrl.sample(run, "a photo of a red circle", seeds=range(4)).grid

Importing this package is light: torch and the model libraries load with what needs them. The functions are described in
`flowrl.interface.python_calls`; types are in `__init__.pyi`.
"""

from __future__ import annotations

import importlib
from typing import Any

from flowrl.runtime.versions import version_of

__version__ = version_of("flowrl-toolkit") or "0.0"

_CALLS = "flowrl.interface.python_calls"
_PLACES: dict[str, str] = {
    **dict.fromkeys(("compare", "evaluate", "plan", "read_run", "sample", "train"), _CALLS),
    "FlowrlError": "flowrl.runtime.failures",
}
"""Name -> the module that it is imported from when it is first asked for."""


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'flowrl' has no attribute {name!r}: there are {', '.join(sorted(_PLACES))}")
    return getattr(importlib.import_module(_PLACES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_PLACES])
