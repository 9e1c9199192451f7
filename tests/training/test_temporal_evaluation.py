"""Diagnostics of videos in a run's evaluations: only where they are asked for, as metrics with bounds and in rows;
and evaluations on several processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import toy_pipeline
from toy_pipeline import FRAMES, QuickRun, VideoToy, on_threads, toy_config, write_toy

from flowrl.benchmarks.temporal import NAMES, diagnose
from flowrl.pipelines import PIPELINES
from flowrl.prompts.loading import EvalItem, Prompt
from flowrl.runs.evaluation_rows import score_rows
from flowrl.session.preflight import preflight
from flowrl.training.heldout import Drawing, evaluate


def evaluated(folder: Path, **options: Any) -> dict[str, Any]:
    return evaluated_by(QuickRun(folder), **options)


def evaluated_by(run: Any, **options: Any) -> dict[str, Any]:
    pipeline: Any = VideoToy()
    items = [
        EvalItem(prompt=Prompt(text=text, metadata={}), prompt_id=number, sample=sample)
        for number, text in enumerate(toy_pipeline.PROMPTS[:3]) for sample in range(2)
    ]  # fmt: skip
    how = Drawing(schedule=pipeline.schedule(2, "diffusers"), guidance_scale=1.0, seed=0, batch_size=4)
    row = evaluate(run, pipeline, None, items, how, iteration=0, num_images=0, show=False, **options)
    assert row is not None
    return row


def test_diagnostics_are_metrics_with_bounds_and_lie_in_the_rows(tmp_path: Path) -> None:
    row = evaluated(tmp_path, temporal=True)
    names = [f"eval/temporal/{name}" for name in NAMES]
    assert set(row) == {f"{name}{end}" for name in names for end in ("", "_low", "_high")}
    kept = [json.loads(line) for line in (tmp_path / "eval" / "iteration_000000.jsonl").read_text().splitlines()]
    for name in NAMES:
        values = [one["temporal"][name] for one in kept]
        assert row[f"eval/temporal/{name}"] == pytest.approx(sum(values) / len(values))
        assert [part.value for part in score_rows(kept, f"eval/temporal/{name}")] == values
    assert row["eval/temporal/flicker"] > 0
    assert row["eval/temporal/flicker_low"] < row["eval/temporal/flicker"] < row["eval/temporal/flicker_high"]
    assert kept[0]["temporal"].keys() == diagnose(torch.zeros(FRAMES, 3, 2, 2)).keys()


def test_nothing_is_added_unless_asked_for(tmp_path: Path) -> None:
    assert evaluated(tmp_path) == {}
    assert "temporal" not in (tmp_path / "eval" / "iteration_000000.jsonl").read_text()


@pytest.mark.parametrize("world", [2, 4])
def test_several_processes_share_all_images(tmp_path: Path, world: int) -> None:
    """Six images are three for each of two processes; of four, three have two and the last has none."""
    rows = []
    for name, processes in (("alone", 1), ("together", world)):
        on_threads(processes, tmp_path / name, evaluated_by)
        rows.append((tmp_path / name / "eval" / "iteration_000000.jsonl").read_text().splitlines())
    assert len(rows[0]) == 6
    assert rows[0] == rows[1]


def test_a_family_of_images_refuses_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PIPELINES, "sd3", "toy_pipeline")
    with pytest.raises(ValueError, match=r"eval\.temporal measures videos, but family sd3 makes images"):
        preflight(toy_config(write_toy(tmp_path), "eval.temporal=true"))
