"""Small GenEval cases: clauses, records and detections by hand."""

from __future__ import annotations

from typing import Any

from flowrl.benchmarks.geneval.rules import Box, Detection

SQUARE: Box = (0, 0, 40, 40)


def clause(name: str, count: int = 1, **more: Any) -> dict[str, Any]:
    return {"class": name, "count": count, **more}


def record(*include: dict[str, Any], tag: str = "single_object", **more: Any) -> dict[str, Any]:
    return {"tag": tag, "prompt": "a photo", "include": list(include), **more}


def objects(label: str, number: int, *, first: float = 0.99, box: Box = SQUARE) -> list[Detection]:
    """Detections by falling score, so that their order is known."""
    return [Detection(label, box=box, score=first - 0.001 * i) for i in range(number)]
