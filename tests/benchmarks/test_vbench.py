"""VBench's constants, sums and files: the published arithmetic, and intervals whose closed form is known."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from flowrl.benchmarks.vbench import (
    DIMENSIONS,
    Entry,
    Measured,
    aggregate,
    intervals,
    normalise,
    read_entries,
    read_measured,
    shares,
    video_name,
)
from flowrl.statistics.means import mean_interval

QUALITY = {
    "subject_consistency": 0.96, "background_consistency": 0.97, "temporal_flickering": 0.99,
    "motion_smoothness": 0.985, "aesthetic_quality": 0.62, "imaging_quality": 0.66, "dynamic_degree": 0.40,
}  # fmt: skip
SEMANTIC = {
    "object_class": 0.88, "multiple_objects": 0.60, "human_action": 0.95, "color": 0.85, "spatial_relationship": 0.70,
    "scene": 0.45, "appearance_style": 0.22, "temporal_style": 0.24, "overall_consistency": 0.26,
}  # fmt: skip


def test_the_sums_of_a_worked_example() -> None:
    found = aggregate(QUALITY | SEMANTIC)
    assert found["quality"] == pytest.approx(0.81887, abs=5e-6)
    assert found["semantic"] == pytest.approx(0.74120, abs=5e-6)
    assert found["total"] == pytest.approx(0.80334, abs=5e-6)


def test_sums_that_lack_a_dimension_are_not_given() -> None:
    assert aggregate(QUALITY).keys() == {"quality"}
    assert aggregate({**SEMANTIC, "scene": 0.1}).keys() == {"semantic"}
    assert aggregate({}) == {}
    assert len(DIMENSIONS) == 16
    assert {name: sum(shares(name).values()) for name in ("quality", "semantic", "total")} == pytest.approx(
        {"quality": 1.0, "semantic": 1.0, "total": 1.0}
    )


def test_normalised_ends() -> None:
    for name, known in DIMENSIONS.items():
        assert (normalise(name, known.low), normalise(name, known.high)) == pytest.approx((0.0, 1.0))


# ---- files -----------------------------------------------------------------------------------------------------------


def entries_file(folder: Path, rows: Any) -> Path:
    path = folder / "VBench_full_info.json"
    path.write_text(json.dumps(rows))
    return path


def test_entries_of_the_wanted_dimensions_with_their_records(tmp_path: Path) -> None:
    rows = [
        {"prompt_en": "a red car", "dimension": ["color"], "auxiliary_info": {"color": {"color": "red"}}},
        {"prompt_en": "alley", "dimension": ["scene", "background_consistency"]},
        {"prompt_en": "a person", "dimension": ["object_class"]},
    ]
    found = read_entries(entries_file(tmp_path, rows), ["color", "background_consistency"])
    assert [entry.prompt for entry in found] == ["a red car", "alley"]
    assert found[0].record == rows[0]
    with pytest.raises(ValueError, match="has no prompt for human_action"):
        read_entries(tmp_path / "VBench_full_info.json", ["color", "human_action"])


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ({"prompt_en": "a"}, "is not VBench's list"),
        ([{"prompt": "a", "dimension": ["color"]}], "is not VBench's list"),
        ([{"prompt_en": "a/b", "dimension": ["color"]}], "cannot be part of a file"),
        ([{"prompt_en": "a" * 260, "dimension": ["color"]}], "cannot be part of a file"),
    ],
)
def test_other_lists_are_refused(tmp_path: Path, rows: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        read_entries(entries_file(tmp_path, rows), ["color"])


def test_results_as_the_package_writes_them(tmp_path: Path) -> None:
    path = tmp_path / "results_2026-01-01-00:00:00_eval_results.json"
    path.write_text(json.dumps({
        "imaging_quality": [0.65, [{"video_path": "/x/a-0.mp4", "video_results": 60.0},
                                   {"video_path": "/x/a-1.mp4", "video_results": 70.0}]],
        "human_action": [0.5, [{"video_path": "/x/b-0.mp4", "video_results": True, "cor_num_per_video": 1},
                               {"video_path": "/x/b-1.mp4", "video_results": False, "cor_num_per_video": 0}]],
        "color": [math.nan, []], "scene": {"score": 1},
    }))  # fmt: skip
    assert read_measured(path, "imaging_quality") == Measured(score=0.65, videos={"a-0.mp4": 0.6, "a-1.mp4": 0.7})
    assert read_measured(path, "human_action").videos == {"b-0.mp4": 1.0, "b-1.mp4": 0.0}
    for name, words in (
        ("color", "score of color is nan"),
        ("scene", "does not hold scene"),
        ("object_class", "does not"),
    ):
        with pytest.raises(ValueError, match=words):
            read_measured(path, name)


# ---- intervals -------------------------------------------------------------------------------------------------------


def measured_of(values: dict[str, dict[str, list[float]]]) -> tuple[dict[str, Measured], list[Entry]]:
    """Dimension -> prompt -> values of its videos, as what the package says and the list of prompts."""
    of_prompt: dict[str, list[str]] = {}
    found = {}
    for name, prompts in values.items():
        videos = {video_name(prompt, k): value for prompt, row in prompts.items() for k, value in enumerate(row)}
        found[name] = Measured(score=sum(videos.values()) / len(videos), videos=videos)
        for prompt in prompts:
            of_prompt.setdefault(prompt, []).append(name)
    entries = [Entry(prompt=prompt, dimensions=tuple(names), record={}) for prompt, names in of_prompt.items()]
    return found, entries


def test_a_dimension_has_the_interval_of_its_videos_by_prompt() -> None:
    rows = {"a": [0.4, 0.45], "b": [0.5, 0.6], "c": [0.45, 0.5]}
    measured, entries = measured_of({"scene": rows})
    expected = mean_interval([v for row in rows.values() for v in row], ["a", "a", "b", "b", "c", "c"])
    assert intervals(measured, entries)["scene"] == expected
    off = {"scene": Measured(score=expected.mean + 0.1, videos=measured["scene"].videos)}
    moved = intervals(off, entries)["scene"]  # the package's number stands, with bounds as wide
    assert moved.mean == expected.mean + 0.1
    assert moved.high - moved.low == pytest.approx(expected.high - expected.low)


def whole(shift: float = 0.0) -> tuple[dict[str, Measured], list[Entry]]:
    """All sixteen dimensions: those of quality share one list of three prompts, the others another."""
    values: dict[str, dict[str, list[float]]] = {}
    for number, (name, known) in enumerate(DIMENSIONS.items()):
        prompts = ("a", "b", "c") if known.quality else ("d", "e", "f")
        values[name] = {
            prompt: [0.2 + shift + 0.01 * number + 0.1 * place + 0.02 * k for k in range(2)]
            for place, prompt in enumerate(prompts)
        }
    return measured_of(values)


def test_a_sum_over_one_stratum_is_the_interval_of_what_videos_contribute() -> None:
    measured, entries = whole()
    found = intervals(measured, entries)
    contributions = [
        sum(share * normalise(name, measured[name].videos[video_name(prompt, k)])
            for name, share in shares("quality").items())
        for prompt in "abc" for k in range(2)
    ]  # fmt: skip
    expected = mean_interval(contributions, list("aabbcc"))
    assert found["quality"].mean == pytest.approx(aggregate({n: m.score for n, m in measured.items()})["quality"])
    assert (found["quality"].low, found["quality"].high) == pytest.approx((expected.low, expected.high))


def test_the_total_adds_variances_of_strata_that_share_no_prompt() -> None:
    measured, entries = whole()
    found = intervals(measured, entries)
    assert found["total"].mean == pytest.approx(0.8 * found["quality"].mean + 0.2 * found["semantic"].mean)
    quality, semantic = (found[name].high - found[name].mean for name in ("quality", "semantic"))
    half = found["total"].high - found["total"].mean
    # Each of the two has t(2) = 4.30 times its standard error; the sum has more degrees of freedom, so a smaller t.
    joined = math.hypot(0.8 * quality, 0.2 * semantic)
    assert 0.6 * joined < half <= joined


def test_a_dimension_keeps_its_bounds_from_0_to_1() -> None:
    measured, entries = measured_of({"scene": {"a": [0.8, 0.99], "b": [0.95, 0.97]}})
    assert intervals(measured, entries)["scene"].high == 1.0
    off = {"scene": Measured(score=0.999, videos=measured["scene"].videos)}
    assert intervals(off, entries)["scene"].high == 1.0


def test_a_constant_change_is_no_certainty() -> None:
    before, entries = whole()
    after, _ = whole(shift=0.05)
    change = intervals(after, entries, before)
    assert change["scene"].mean == pytest.approx(0.05)
    assert not change["scene"].known
    slope = sum(share / (DIMENSIONS[name].high - DIMENSIONS[name].low) for name, share in shares("total").items())
    assert change["total"].mean == pytest.approx(0.05 * slope)
    assert not change["total"].known


def test_videos_that_the_package_left_out_are_in_no_bound() -> None:
    measured, entries = measured_of({"color": {"a": [0.1, 0.2], "b": [0.5, 0.7]}})
    short = {"color": Measured(score=0.3, videos={k: v for k, v in measured["color"].videos.items() if k != "b-1.mp4"})}
    assert intervals(short, entries)["color"].mean == 0.3
    alone = {"color": Measured(score=0.3, videos={})}
    assert not intervals(alone, entries)["color"].known
