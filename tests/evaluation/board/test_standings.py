"""Tables of results that are written by hand: what is better, what is paired, what has no differences."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from flowrl.evaluation.board.board import table_of
from flowrl.evaluation.board.comparable import conditions, group_entries, judge_of, metrics_of
from flowrl.evaluation.board.finished import BoardEntry, find_entries
from flowrl.evaluation.board.standings import Ranking, rank
from flowrl.pages.strips import Room, strips_of
from flowrl.publishing.model_index import model_index, task_of

Rows = Sequence[Mapping[str, Any]]
CLIP = {"video_reward": "v1", "diagnostics": "temporal-1"}


def entry(
    place: Path, name: str, rows: Rows, metrics: Mapping[str, float], *, benchmark: str = "video",
    journals: Sequence[Mapping[str, Any]] = (), **facts: Any,
) -> BoardEntry:  # fmt: skip
    """A finished evaluation with these rows and numbers."""
    (place / name / "model" / "images").mkdir(parents=True)
    (place / name / "model" / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for number, identity in enumerate(journals):
        file = place / name / "model" / f"journal-{number}.jsonl"
        file.write_text(json.dumps({"identity": identity}) + "\n")
    content = {
        "benchmark": benchmark, "names": [name], "intervals": {}, "facts": facts,
        "metrics": {f"eval/{benchmark}/{metric}": value for metric, value in metrics.items()},
    }  # fmt: skip
    (place / name / "result.json").write_text(json.dumps(content))
    (found,) = find_entries([str(place / name)])
    return found


def clips(place: Path, name: str, flicker: float, versions: Mapping[str, str] = CLIP) -> BoardEntry:
    """A model's clips, all of about this flicker."""
    noise = random.Random(name)
    values = [flicker + noise.uniform(-0.01, 0.01) for _ in range(12)]
    rows = [{"file": f"{k}.mkv", "prompt": str(k), "values": {"change": value, "flicker": value}}
            for k, value in enumerate(values)]  # fmt: skip
    mean = sum(values) / len(values)
    return entry(place, name, rows, {"change": mean, "flicker": mean}, versions=dict(versions))


def table(entries: Sequence[BoardEntry], metric: str, *across: str) -> Ranking:
    (group,) = (group for group in group_entries(entries, across) if group.metric == metric)
    return rank(group)


def ranks(ranking: Ranking) -> dict[str, tuple[int, int]]:
    return {line.name: line.rank for line in ranking.standings}


def test_the_least_flicker_is_ranked_first(tmp_path: Path) -> None:
    models = [clips(tmp_path, name, flicker) for name, flicker in (("bad", 0.5), ("good", 0.1), ("fair", 0.3))]
    ranking = table(models, "flicker")
    assert ranks(ranking) == {"good": (1, 1), "fair": (2, 2), "bad": (3, 3)}
    assert list(ranks(ranking)) == ["good", "fair", "bad"]
    behind = ranking.standings[2].behind
    assert behind is not None
    assert behind.mean == pytest.approx(0.4, abs=0.02)
    assert "Less flicker is better: the lowest is ranked first." in table_of(ranking).note
    assert metrics_of(models[0]) == ["flicker"]  # `change` is neither better nor worse


def test_diagnostics_of_other_rewards_are_compared(tmp_path: Path) -> None:
    """A number's judge is what gave it, whatever else was measured in the same run."""
    one, other = clips(tmp_path, "one", 0.1), clips(tmp_path, "other", 0.2, {"diagnostics": "temporal-1"})
    assert len(table([one, other], "flicker").standings) == 2
    assert judge_of(one, "video_reward.motion") == "v1"
    assert judge_of(one, "other") is None
    assert conditions(one, "other")["judge"] == CLIP
    rows = [{"prompt": "a", "values": {"video_reward": 1.0}}]
    whole = entry(tmp_path, "whole", rows, {"video_reward": 1.0, "video_reward.motion": 0.5}, versions=CLIP)
    listed = model_index("m", [whole])[0]["results"][0]["metrics"]
    assert [metric["args"]["judge"] for metric in listed] == ["v1", "v1"]


def weighted(place: Path, name: str, missing: int) -> BoardEntry:
    """Two tasks, 3 to 1, with an image without a score: no mean over tasks or images gives the number."""
    rows: list[dict[str, Any]] = [
        {"prompt": f"{task}{k}", "task": task, "scores": {"wiscore": None if f"{task}{k}" == f"a{missing}" else k / 4}}
        for task in ("a", "b") for k in range(5)
    ]  # fmt: skip
    of = {task: [row["scores"]["wiscore"] for row in rows if row["task"] == task] for task in ("a", "b")}
    means = {task: sum(filter(None, values)) / (5 - values.count(None)) for task, values in of.items()}
    metrics = {"wiscore": 0.75 * means["a"] + 0.25 * means["b"], **means}
    return entry(place, name, rows, {**metrics, "wiscore_low": 0.0, "wiscore_high": 1.0}, benchmark="wise")


def test_a_weighted_headline_has_a_table_when_images_were_skipped(tmp_path: Path) -> None:
    models = [weighted(tmp_path, "one", 0), weighted(tmp_path, "other", 4)]
    assert [metrics_of(model) for model in models] == [["wiscore", "a", "b"]] * 2
    ranking = table(models, "wiscore")
    assert [(line.score.low, line.score.high) for line in ranking.standings] == [(0.0, 1.0)] * 2
    assert set(ranks(ranking).values()) == {(1, 2)}
    assert len(table(models, "a").standings) == 2


def tasks(place: Path, name: str, counts: Mapping[str, int], *, by_task: bool) -> BoardEntry:
    """All right in task a, none in b."""
    rows = [{"prompt": f"{task}{k}", "task": task, "score": float(task == "a")}
            for task, count in counts.items() for k in range(count)]  # fmt: skip
    mean = 0.5 if by_task else counts["a"] / len(rows)
    return entry(place, name, rows, {"score": mean}, benchmark="tasks")


@pytest.mark.parametrize("turned", [False, True])
def test_the_kind_of_mean_is_that_of_all_entries(tmp_path: Path, turned: bool) -> None:
    """Where tasks have equally many images both means give the number, and the others' decide."""
    equal = tasks(tmp_path, "equal", {"a": 3, "b": 3}, by_task=True)
    over_all = tasks(tmp_path, "all", {"a": 3, "b": 2}, by_task=False)
    over_tasks = tasks(tmp_path, "tasks", {"a": 3, "b": 2}, by_task=True)
    for other in (over_all, over_tasks):
        pair = [other, equal] if turned else [equal, other]
        means = {line.score.mean for line in table(pair, "score", "prompts", "images per prompt").standings}
        assert means == {0.6 if other is over_all else 0.5}  # on the five images that both have
    pair = [over_tasks, over_all] if turned else [over_all, over_tasks]
    ranking = table(pair, "score")
    assert set(ranks(ranking).values()) == {(1, 2)}
    assert "Some of these numbers are means over tasks and others over all samples" in ranking.notes[0]


def points(place: Path, name: str, prompts: Sequence[int], every: int) -> BoardEntry:
    """UniGenBench's rows: each prompt has a point of each of two dimensions, the first met but in each `every`th."""
    rows = [{"index": k, "prompt": str(k), "points": ["Style", "World Knowledge"], "met": [k % every > 0, True]}
            for k in prompts]  # fmt: skip
    share = sum(k % every > 0 for k in prompts) / len(prompts)
    return entry(place, name, rows, {"overall": (share + 1) / 2}, benchmark="unigenbench")


def test_test_points_of_other_prompts_are_compared_on_those_that_are_shared(tmp_path: Path) -> None:
    models = [points(tmp_path, "one", range(8), 2), points(tmp_path, "other", range(4, 10), 4)]
    ranking = table(models, "overall", "prompts")
    assert ranking.images == 4
    assert {line.name: line.score.mean for line in ranking.standings} == {"other": 0.875, "one": 0.75}
    assert ranking.standings[1].behind is not None
    assert ranking.notes == ("Scores and differences are of the 4 samples that all of these results have.",)
    apart = [models[0], points(tmp_path, "third", range(20, 28), 4)]
    ranking = table(apart, "overall", "prompts")
    assert (ranking.images, set(ranks(ranking).values())) == (0, {(1, 2)})
    assert "no samples in common" in ranking.notes[0]


def test_the_journal_of_the_benchmark_alone_says_how_was_judged(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "values": {"flicker": 0.5}}]
    temporal = {"benchmark": "temporal", "version": "temporal-1"}
    own = {"benchmark": "vbench", "version": "0.1.5"}
    assert entry(tmp_path, "panel", rows, {"flicker": 0.5}, journals=[temporal]).judged == {}
    both = entry(tmp_path, "vbench", rows, {"flicker": 0.5}, benchmark="vbench", journals=[temporal, own])
    assert both.judged == {"version": "0.1.5"}


def test_clips_are_shown_by_the_still_beside_them(tmp_path: Path) -> None:
    models = [clips(tmp_path, "one", 0.1), clips(tmp_path, "other", 0.3)]
    ranking = table(models, "flicker")
    assert strips_of(ranking, tmp_path, Room()) == ""
    for model in models:
        assert model.images is not None
        Image.new("RGB", (8, 8)).save(model.images / "3.png")
        (model.images / "3.mkv").write_bytes(b"clip")
    page = strips_of(ranking, tmp_path, Room())
    assert page.count('/3.mkv"><img') == 4  # where they differ, and evenly
    assert "mkv</a>" not in page


def test_tasks_of_models_are_those_of_the_benchmarks(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "file": "a.png", "score": 1.0}]
    for benchmark, task in {"gedit_cn": "image-to-image", "imgedit": "image-to-image", "wise": "text-to-image"}.items():
        assert task_of(entry(tmp_path, benchmark, rows, {"score": 1.0}, benchmark=benchmark)) == task
