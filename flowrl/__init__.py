"""Reinforcement learning for diffusion and flow-matching generators.

    import flowrl

    run = flowrl.train("tiny_recommended", num_iterations=10)
    flowrl.sample(run, "a photo of a red circle", seeds=range(4)).grid

Importing this package is light: torch and the model libraries load with the first call that needs them. Types are in
`__init__.pyi`, and docs/python.md lists every function with its command and its result.
"""

from __future__ import annotations

import importlib
from functools import wraps
from typing import Any

from flowrl.runtime.versions import version_of

__version__ = version_of("flowrl-toolkit") or "0.0"

_PLACES: dict[str, str] = {
    "compare": "flowrl.comparing.compare",
    **{name: f"flowrl.publishing.{name}" for name in ("export", "merge", "push")},
    "sample": "flowrl.generation.sample",
    "serve": "flowrl.serving.serve",
    "sweep": "flowrl.comparing.sweep.sweep",
    "evaluate": "flowrl.evaluation.evaluate",
    "leaderboard": "flowrl.evaluation.board.board",
    "model_card": "flowrl.publishing.model_index",
    "realism": "flowrl.evaluation.realism",
    "reward_card": "flowrl.evaluation.reward_card.reward_card",
    "rubric": "flowrl.evaluation.rubric",
    "score": "flowrl.evaluation.score",
    "init": "flowrl.migrating.init",
    "report": "flowrl.pages.report",
    "FlowrlError": "flowrl.runtime.failures",
    "bench": "flowrl.profiling.bench",
    "fetch_prompts": "flowrl.migrating.prompt_sets",
    "plan": "flowrl.planning.plan",
    "pretrain": "flowrl.pretraining.pretrain",
    "doctor": "flowrl.health.doctor",
    "read_run": "flowrl.runs.trained_run",
    "train": "flowrl.session.train",
}
"""Name -> its module, which is imported when you first use the name."""
_PAGES: dict[str, tuple[str, str]] = {
    "compare": ("flowrl.pages.comparison_page", "write_page"),
    "sweep": ("flowrl.pages.sweep_page", "write_page"),
    "evaluate": ("flowrl.pages.evaluation_page", "render"),
    "leaderboard": ("flowrl.pages.board_page", "render"),
    "reward_card": ("flowrl.pages.reward_card_page", "render"),
    "train": ("flowrl.pages.report", "report"),
    "bench": ("flowrl.pages.bench_page", "write_page"),
}
"""Function -> module and function that write the page of its result; it gets them as `page`."""

_FITS: dict[str, tuple[str, str]] = {"train": ("flowrl.planning.plan", "for_card")}
"""Function -> module and function that find the settings with which a run fits a card; it gets them as `fit`."""


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        from flowrl.runtime.former_names import FUNCTIONS, name_of_today

        name = name_of_today(name, FUNCTIONS, "flowrl.{}")
    if name not in _PLACES:
        raise AttributeError(f"module 'flowrl' has no attribute {name!r}: there are {', '.join(sorted(_PLACES))}")
    found = getattr(importlib.import_module(_PLACES[name]), name)
    handed = {key: _later(*places[name]) for key, places in (("page", _PAGES), ("fit", _FITS)) if name in places}
    if not handed:
        return found

    @wraps(found)
    def call(*args: Any, **kwargs: Any) -> Any:
        return found(*args, **{**handed, **kwargs})

    return call


def _later(module: str, name: str) -> Any:
    """A function whose module, with all that it imports, loads when it is first called."""
    return lambda *args, **kwargs: getattr(importlib.import_module(module), name)(*args, **kwargs)


def __dir__() -> list[str]:
    return sorted([*globals(), *_PLACES])
