"""The statistics and tables of `flowrl compare`, on numbers with known answers and on run folders made by hand."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from xml.etree import ElementTree

import numpy as np
import pytest
from scipy import stats

from flowrl.comparing.compare import numbers
from flowrl.comparing.comparison_result import Results, read_results, short_names
from flowrl.comparing.comparison_table import amount_text, markdown, number_form, ratio_text, text
from flowrl.comparing.question import ComparisonQuestion
from flowrl.pages.comparison_page import render
from flowrl.runs.evaluation_rows import SCORE
from flowrl.statistics.bootstrap import DETECTABLE_ERRORS, Interval, point
from flowrl.statistics.crossed import (
    crossed_difference,
    crossed_estimate,
    estimate_of,
    holm,
    independent_difference,
)
from flowrl.statistics.means import CHANGES, ScoreRow, stratified_score

TASKS = ("colors", "counting", "single_object")


def question(*methods: str, seeds: int = 2) -> ComparisonQuestion:
    return ComparisonQuestion(
        methods={name: f"{name}.yaml" for name in methods}, settings={}, seeds=seeds, budget="nfe", limit=120_000.0,
        evals=2, overrides=(),
    )  # fmt: skip


def write_run(folder: Path, level: float, seed: int, *, initial: bool, prompts: int = 90) -> None:
    """A finished run whose GenEval score rises from 0.4 to `level` in two evaluations."""
    (folder / "eval").mkdir(parents=True)
    (folder / "config.yaml").write_text("num_iterations: 20\n")
    (folder / "summary.json").write_text("{}")
    (folder / "manifest.json").write_text(json.dumps({"git_commit": "abc123", "device": "cpu", "started": "2025"}))
    rows = []
    ease = np.random.default_rng(0).uniform(size=prompts)
    luck = np.random.default_rng(seed + 1).uniform(-0.05, 0.05, size=prompts)
    for iteration, share in ((0, 0.0), (10, 0.5), (20, 1.0)):
        nfe, wanted = 6000 * iteration, 0.4 + share * (level - 0.4)
        if iteration or initial:
            correct = (ease + (luck if iteration else 0)) < wanted
            images = [
                {"prompt_id": k, "prompt": f"p{k}", "task": TASKS[k % 3], "sample": 0, "correct": bool(correct[k]),
                 "graded": float(correct[k]), "rewards": {"geneval": float(correct[k])}}
                for k in range(prompts)
            ]  # fmt: skip
            (folder / "eval" / f"iteration_{iteration:06d}.jsonl").write_text(
                "".join(json.dumps(row) + "\n" for row in images)
            )
            score = float(np.mean([correct[k::3].mean() for k in range(3)]))
            rows.append({"iteration": iteration, "eval/reward/geneval": float(correct.mean()), SCORE: score,
                         "nfe/total": nfe, "images": 10 * iteration, "seconds/total": iteration * 3.0})  # fmt: skip
        rows += [
            {"iteration": k, "reward": wanted + 0.01 * (k - iteration), "nfe/total": 6000 * (k + 1),
             "images": 10 * (k + 1), "seconds/total": (k + 1) * 3.0}
            for k in range(iteration, min(iteration + 10, 20))
        ]  # fmt: skip
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "measure.json").write_text(
        json.dumps(
            {"kl": 0.1 * level**2, "diversity": 0.2 - 0.1 * level} | ({"base_diversity": 0.2} if initial else {})
        )
    )


def write_comparison(folder: Path, levels: dict[str, float], *, seeds: int = 2) -> ComparisonQuestion:
    """A folder in which every method has reached its level; the first run made the evaluation before training."""
    asked = question(*levels, seeds=seeds)
    runs = {}
    for number, (method, seed) in enumerate(asked.runs):
        name = f"{method}-s{seed}"
        write_run(folder / name, levels[method] + 0.01 * seed, seed, initial=number == 0)
        runs[name] = {"method": method, "seed": seed, "state": "finished", "base": "k", "initial": number == 0,
                      "wall_seconds": 70.0}  # fmt: skip
    journal = {"question": asdict(asked), "runs": runs, "jobs": 1, "view": {}, "created": "2025-11-21"}
    (folder / "compare.json").write_text(json.dumps(journal))
    return asked


def rows(values: np.ndarray, task: str = "") -> list[ScoreRow]:
    """An image for each value."""
    return [ScoreRow(task=task, prompt=k, sample=0, value=float(v)) for k, v in enumerate(values)]


def test_one_seed_has_the_interval_over_prompts_and_no_test() -> None:
    values = np.random.default_rng(3).normal(size=40)
    found = crossed_estimate([rows(values)])
    assert found.interval == stratified_score(rows(values))
    assert not found.seeds.known
    assert math.isnan(found.p)
    assert math.isnan(found.detectable)


def test_seeds_alone_give_students_interval_over_seeds() -> None:
    levels = np.array([0.2, 0.5, 0.4, 0.9, 0.7])
    found = crossed_estimate([rows(np.full(30, level)) for level in levels])
    low, high = stats.t.interval(0.95, 4, 0.54, stats.sem(levels))
    for interval in (found.interval, found.seeds):
        assert (interval.mean, interval.low, interval.high) == pytest.approx((0.54, low, high), abs=1e-9)
    assert found.p == pytest.approx(stats.ttest_1samp(levels, 0).pvalue, rel=1e-9)


def test_seeds_and_prompts_add_up_where_their_effects_do() -> None:
    prompt = np.random.default_rng(0).normal(size=20)
    seeds = np.array([-0.3, 0.1, 0.2, 0.0])
    found = crossed_estimate([rows(prompt + seed) for seed in seeds])
    over_seeds, over_prompts = seeds.var(ddof=1) / 4, prompt.var(ddof=1) / 20
    degrees = (over_seeds + over_prompts) ** 2 / (over_seeds**2 / 3 + over_prompts**2 / 19)
    half = stats.t.ppf(0.975, degrees) * math.sqrt(over_seeds + over_prompts)
    assert found.interval.high - found.mean == pytest.approx(half, rel=1e-9)


def test_noise_is_counted_once() -> None:
    # Neither seeds nor prompts have an effect: the spread of seeds and that of prompts are the same noise.
    noise = np.random.default_rng(2).normal(size=(6, 60))
    found = crossed_estimate([rows(values) for values in noise])
    alone = 2 * stats.t.ppf(0.975, 5) * stats.sem(noise.mean(axis=1))
    assert found.interval.high - found.interval.low <= 1.3 * alone


def test_tasks_weigh_the_same_whatever_their_size_unless_images_are_asked_for() -> None:
    images = [*rows(np.ones(30), "a"), *rows(np.zeros(60), "b")]
    assert crossed_estimate([images, images]).mean == 0.5
    assert crossed_estimate([images, images], by_task=False).mean == pytest.approx(1 / 3)


def test_what_both_sides_share_cancels_in_a_difference() -> None:
    hard = np.random.default_rng(1).normal(size=50)
    found = crossed_difference({0: rows(hard), 1: rows(hard + 5)}, {0: rows(hard + 0.2), 1: rows(hard + 5.3)})
    half = stats.t.ppf(0.975, 1) * 0.05
    assert (found.mean, found.interval.low, found.interval.high) == pytest.approx((0.25, 0.25 - half, 0.25 + half))
    assert found.p == pytest.approx(stats.ttest_1samp([0.2, 0.3], 0).pvalue, rel=1e-6)


def test_seeds_that_all_agree_are_no_certainty() -> None:
    hard = np.random.default_rng(1).normal(size=50)
    found = crossed_difference({0: rows(hard), 1: rows(hard + 5)}, {0: rows(hard + 0.25), 1: rows(hard + 5.25)})
    assert found.mean == pytest.approx(0.25)
    assert not found.interval.known
    assert not found.seeds.known
    assert math.isnan(found.p)
    assert math.isnan(found.detectable)


def test_trainings_are_paired_by_seed_and_in_no_other_order() -> None:
    one, two, three = rows(np.arange(3.0)), rows(np.array([0.0, 5.0, 1.0])), rows(np.array([2.0, 2.0, 7.0]))
    swapped = crossed_difference({0: one, 1: two}, {1: three, 0: two})
    assert swapped == crossed_difference({1: two, 0: one}, {0: two, 1: three})
    with pytest.raises(ValueError, match=r"seed 101 was trained on one side only.*independent_difference.*Welch"):
        crossed_difference({11: one, 12: two}, {101: two, 102: three})
    with pytest.raises(ValueError, match="seed 1 was trained on one side only"):
        crossed_difference({0: one, 1: two}, {0: two})


@pytest.mark.parametrize(("first", "second"), [((0.5, 0.75, 0.625), (0.25, 0.375)), ((0.5, 0.75), (0.25, 0.875, 0.5))])
def test_trainings_of_unlike_seeds_have_welchs_test(first: tuple[float, ...], second: tuple[float, ...]) -> None:
    found = independent_difference([rows(np.full(30, s)) for s in second], [rows(np.full(30, s)) for s in first])
    wanted = stats.ttest_ind(first, second, equal_var=False)
    low, high = wanted.confidence_interval(0.95)
    assert found.p == pytest.approx(wanted.pvalue, rel=1e-9)
    for interval in (found.interval, found.seeds):
        assert (interval.mean, interval.low, interval.high) == pytest.approx(
            (np.mean(first) - np.mean(second), low, high)
        )


def test_prompts_of_unlike_seeds_are_paired() -> None:
    hard = 10 * np.random.default_rng(3).normal(size=40)
    sides = [[rows(hard + level) for level in levels] for levels in ((0.0, 0.1, 0.2), (1.0, 1.2, 1.1))]
    found = independent_difference(*sides)
    assert found.interval.low > 0.5  # what prompts differ by cancels
    alone = independent_difference(sides[0][:1], sides[1][:1])
    assert not alone.seeds.known
    assert math.isnan(alone.p)
    one_side = independent_difference(sides[0][:1], sides[1])
    assert one_side.seeds.high - one_side.mean == pytest.approx(stats.t.ppf(0.975, 2) * 0.1 / math.sqrt(3))


def test_bounds_of_shares_lie_between_0_and_1() -> None:
    right = [rows(np.repeat([1.0, 0.0], [38 + seed, 2 - seed])) for seed in (0, 2)]
    graded = [rows(np.repeat([1.0, level], [20, 20])) for level in (0.9, 1.0)]
    for runs in (right, graded):
        found = crossed_estimate(runs)
        assert found.seeds.high == found.interval.high == 1.0
    assert crossed_estimate([rows(np.full(4, -0.5)), rows(np.full(4, 0.9))]).seeds.high > 1.0
    apart = independent_difference([rows(np.zeros(9))] * 2, [rows(np.repeat([1.0, 0.0], [k, 9 - k])) for k in (4, 9)])
    assert apart.interval.high == 1.0


def test_two_seeds_that_agree_to_the_image_have_a_spread() -> None:
    # Both seeds find 2 more of 10 right: the spread is that of rounding to a tenth, with one degree of freedom.
    before = dict.fromkeys((0, 1), rows(np.repeat([0.0, 1.0], 5)))
    found = crossed_difference(before, dict.fromkeys((0, 1), rows(np.repeat([0.0, 1.0], [3, 7]))))
    error = 0.1 / math.sqrt(12) / math.sqrt(2)
    assert found.p == pytest.approx(2 * stats.t.sf(0.2 / error, 1), rel=1e-9)
    assert found.p > 0.05
    assert found.seeds.high == pytest.approx(0.2 + stats.t.ppf(0.975, 1) * error, rel=1e-9)


def test_prompts_that_seeds_explain_leave_degrees_of_freedom() -> None:
    """Two seeds of six tasks whose prompts vary by a hair more than the seeds do: Satterthwaite's degrees are 0.002."""
    changes = ["00001 00000", "00000 m0000", "10000 00000", "000m0 000m0", "m0000 11m00", "00000 00010"]
    value = {"m": -1.0, "0": 0.0, "1": 1.0}
    tables = [np.array([[value[one] for one in run] for run in runs.split()]) for runs in changes]
    parts = {str(task): (table, np.arange(5)) for task, table in enumerate(tables)}
    found = estimate_of(parts, CHANGES, by_task=True)
    assert found.mean == 0.0
    assert 0 < found.interval.high <= found.seeds.high * 1.5 < 1


def test_tasks_of_single_images_add_images_together_over_seeds_too() -> None:
    right = [row for k in range(50) for row in rows(np.ones(1), task=f"t{k}")]
    assert 0.9 < crossed_estimate([right, right]).interval.low < 0.97


def test_no_difference_has_p_one() -> None:
    same = dict.fromkeys((0, 1), rows(np.arange(30.0) % 2))
    assert crossed_difference(same, same).p == 1.0


def test_the_detectable_difference_is_found_in_four_of_five() -> None:
    scores = np.array([0.1, -0.2, 0.4])
    found = crossed_estimate([rows(np.full(4, score)) for score in scores])
    sizes = found.detectable / (scores.std(ddof=1) / math.sqrt(3))
    assert stats.nct.sf(stats.t.ppf(0.975, 2), 2, sizes) == pytest.approx(0.8, abs=1e-4)


def test_a_single_image_leaves_its_spread_unknown() -> None:
    found = crossed_estimate([rows(np.full(1, 0.25)), rows(np.full(1, 0.75))])
    assert found.mean == 0.5
    assert not found.interval.known


def test_different_images_are_refused() -> None:
    with pytest.raises(ValueError, match="different images"):
        crossed_estimate([rows(np.ones(3)), rows(np.ones(4))])
    with pytest.raises(ValueError, match="twice"):
        crossed_estimate([[*rows(np.ones(3)), *rows(np.ones(3))]])
    with pytest.raises(ValueError, match="no rows to score"):
        crossed_estimate([])


def test_the_detectable_difference_is_2_80_standard_errors() -> None:
    assert DETECTABLE_ERRORS == pytest.approx(1.959964 + 0.841621, abs=1e-6)


def test_holm() -> None:
    adjusted = holm({"a": 0.01, "b": 0.04, "c": 0.03, "d": 0.005, "e": math.nan})
    assert adjusted["d"] == pytest.approx(0.02)
    assert adjusted["a"] == pytest.approx(0.03)
    assert adjusted["c"] == pytest.approx(0.06)
    assert adjusted["b"] == pytest.approx(0.06)
    assert math.isnan(adjusted["e"])
    assert holm({"a": 0.7, "b": 0.9}) == {"a": 1.0, "b": 1.0}


def test_a_ratio_in_words() -> None:
    assert ratio_text(Interval(mean=3.0, low=2.04, high=4.4)) == "3.00x (2.0 to 4.4)"
    assert ratio_text(Interval(mean=3.0, low=2.04, high=math.inf)) == "3.00x (2.0 or more)"
    assert ratio_text(Interval(mean=0.5, low=0.0, high=2.0)) == "0.50x (at most 2.0)"
    assert ratio_text(Interval(mean=0.5, low=0.0, high=math.inf)) == ratio_text(point(0.5)) == "0.50x"
    assert ratio_text(point(math.nan)) == "\u2013"


def test_the_results_of_folders_made_by_hand(tmp_path: Path) -> None:
    asked = write_comparison(tmp_path, {"tiny_nft": 0.6, "tiny_gspo": 0.8})
    found = read_results(tmp_path, asked)
    assert (found.metric, found.baseline, found.base_diversity) == (SCORE, "tiny_nft", 0.2)
    best, reference = found.methods
    assert [found.label(row.name) for row in found.methods] == ["gspo", "nft"]
    finals = [np.mean([row["correct"] for row in last_rows(tmp_path / f"tiny_gspo-s{seed}")]) for seed in (0, 1)]
    assert best.seed_scores == pytest.approx(finals)
    assert best.score.mean == pytest.approx(np.mean(finals))
    assert reference.difference is None
    assert best.difference is not None
    assert found.base is not None
    assert best.difference.mean == pytest.approx(best.score.mean - reference.score.mean)
    assert best.gain is not None
    assert best.gain.mean == pytest.approx(best.score.mean - found.base.mean)
    assert best.difference.interval.excludes(0)
    assert best.holm == best.difference.p < 0.05
    assert dict(best.spent) == pytest.approx({"nfe": 120_000, "images": 200, "seconds": 60, "iterations": 20})
    gain = reference.score.mean - found.base.mean
    assert found.targets == pytest.approx([found.base.mean + share * gain for share in (1 / 3, 2 / 3, 0.9)])
    assert 60_000 < reference.reach["nfe"][-1] < 120_000
    assert [(reference.speed[cost].mean, reference.speed[cost].known) for cost in ("nfe", "seconds")] == [
        (1.0, False)
    ] * 2
    assert best.reach["nfe"][-1] < 120_000
    assert best.speed["nfe"].mean == pytest.approx(reference.reach["nfe"][-1] / best.reach["nfe"][-1])
    assert best.speed["nfe"].low < best.speed["nfe"].mean < best.speed["nfe"].high
    assert best.kl == pytest.approx(0.05 * (0.8**2 + 0.81**2))


def last_rows(run: Path) -> list[dict[str, Any]]:
    text = (run / "eval" / "iteration_000020.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def test_unfinished_runs_are_listed_and_seeds_without_a_partner_left_out(tmp_path: Path) -> None:
    asked = write_comparison(tmp_path, {"a": 0.6, "b": 0.8})
    (tmp_path / "a-s1" / "summary.json").unlink()
    found = read_results(tmp_path, asked)
    by_name = {row.name: row for row in found.methods}
    assert found.missing == (("a-s1", "its folder is gone"),)
    assert len(by_name["a"].runs) == 1
    assert len(by_name["b"].runs) == 2
    difference = by_name["b"].difference
    assert difference is not None  # of seed 0 alone
    assert difference.mean == pytest.approx(by_name["b"].seed_scores[0] - by_name["a"].seed_scores[0])
    assert "1 to 2 training seeds" in text(found)
    assert "a-s1" in text(found)


def test_holm_counts_the_comparisons_that_have_a_p(tmp_path: Path) -> None:
    asked = write_comparison(tmp_path, {"a": 0.6, "b": 0.8, "c": 0.7})
    (tmp_path / "c-s1" / "summary.json").unlink()
    shown = markdown(read_results(tmp_path, asked), command="", provenance=())
    assert "allows for the number of comparisons, 1: below 0.05" in shown


def test_prompts_that_were_trained_on_are_not_called_held_out(tmp_path: Path) -> None:
    asked = write_comparison(tmp_path, {"a": 0.6, "b": 0.8}, seeds=1)
    assert "Held-out GenEval score at the end" in text(read_results(tmp_path, asked))
    manifest = tmp_path / "b-s0" / "manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"eval_prompts": {"number": 9, "trained_on": 3}}))
    found = read_results(tmp_path, asked)
    for said in (
        text(found),
        markdown(found, command="", provenance=()),
        render(found, command="", provenance=(), title="x"),
    ):
        assert "valuation GenEval score" in said
        assert "eld-out" not in said


@pytest.mark.parametrize("metric", [None, "eval/reward/geneval"])
def test_one_seed_is_said_and_other_metrics_are_read(tmp_path: Path, metric: str | None) -> None:
    found = read_results(tmp_path, write_comparison(tmp_path, {"a": 0.6, "b": 0.8}, seeds=1), metric=metric)
    shown = " ".join(text(found).split())
    assert "one training seed: 95 % intervals cover prompts of this kind, and these runs only" in shown
    assert "One training seed says which of a pair of runs scored higher, not which method is better." in shown
    assert "Holm p allows" not in markdown(found, command="", provenance=())
    assert "Holm p below" not in shown.partition("Difference to")[0]
    difference = found.methods[0].difference
    assert difference is not None
    assert difference.interval.excludes(0)  # and yet no verdict
    assert math.isnan(found.methods[0].holm)
    assert found.metric == (metric or SCORE)
    wanted = np.mean([row["correct"] for row in last_rows(tmp_path / "b-s0")])
    assert found.methods[0].score.mean == pytest.approx(wanted)  # the tasks are of one size


def change_rows(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    path = folder / "eval" / "iteration_000020.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    change(rows[7])
    path.write_text("".join(json.dumps(row) + "\n" for row in rows[::-1]))  # pairs go by prompt, not by line


@pytest.mark.parametrize(
    ("metric", "change"),
    [
        (None, {"correct": None}), ("eval/reward/geneval", {"rewards": {"geneval": None}}),
        ("eval/reward/geneval", {"rewards": {}}),
    ],
)  # fmt: skip
def test_a_failed_image_is_left_out_everywhere_and_counted(
    tmp_path: Path, metric: str | None, change: dict[str, Any]
) -> None:
    asked = write_comparison(tmp_path, {"a": 0.6, "b": 0.8}, seeds=2)
    whole = read_results(tmp_path, asked, metric=metric)
    change_rows(tmp_path / "b-s1", lambda row: row.update(change))
    found = read_results(tmp_path, asked, metric=metric)
    assert whole.notes == ()
    assert found.notes == ("Left out everywhere: 1 of 90 images, for which one evaluation or more has no score.",)
    kept = [row for row in last_rows(tmp_path / "a-s0") if row["prompt_id"] != 7]
    by_task = [np.mean([row["correct"] for row in kept if row["task"] == task]) for task in TASKS]
    wanted = np.mean(by_task) if metric is None else np.mean([row["correct"] for row in kept])
    seeds = next(row for row in found.methods if row.name == "a").seed_scores
    assert seeds[0] == pytest.approx(wanted)


def test_a_reward_that_failed_everywhere_is_told(tmp_path: Path) -> None:
    asked = write_comparison(tmp_path, {"a": 0.6, "b": 0.8}, seeds=1)
    path = tmp_path / "b-s0" / "eval" / "iteration_000020.jsonl"
    rows = [json.loads(line) | {"correct": None} for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(ValueError, match="no image has a value of eval/geneval/score in all 4 evaluations"):
        read_results(tmp_path, asked)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"metric": "eval/reward/genval"}, "did you mean eval/reward/geneval"), ({"targets": "high"}, "such as 0.6,0.7")],
)
def test_wrong_views_are_refused(tmp_path: Path, options: dict[str, str], message: str) -> None:
    asked = write_comparison(tmp_path, {"a": 0.6, "b": 0.8}, seeds=1)
    with pytest.raises(ValueError, match=message):
        read_results(tmp_path, asked, **options)


def test_the_tables_fit_a_terminal_and_say_what_is_not_reached(tmp_path: Path) -> None:
    levels = {f"tiny_{name}": 0.7 - 0.05 * k for k, name in enumerate(("base", "b" * 60, "c", "d", "e", "f", "g", "h"))}
    found = read_results(tmp_path, write_comparison(tmp_path, levels, seeds=3), targets="0.4,0.6")
    shown = text(found)
    assert max(len(line) for line in shown.splitlines()) <= 80
    assert "to 0.400" in shown
    assert "not reached" in shown
    assert "base *" in shown
    assert "bbb\u2026" in shown
    page = render(found, command="flowrl compare", provenance=["seeds 0 to 2"], title="T & T")
    assert "T &amp; T" in page
    assert "://" not in page
    assert "2 others" in page
    ElementTree.fromstring(page[page.index("<svg") : page.index("</svg>") + 6])
    document = markdown(found, command="flowrl compare", provenance=["seeds 0 to 2"])
    tables = [line for line in document.splitlines() if line.startswith("|")]
    assert len(tables) == 5 * 2 + 8 + 7 + 8 + 8 + 9


@pytest.mark.parametrize(("value", "wanted"), [(7, "7"), (9999, "9999"), (52_100, "52.1k"), (1.2e6, "1.2M")])
def test_counts_are_written_short(value: float, wanted: str) -> None:
    assert amount_text(value) == wanted


def test_names_lose_what_they_share() -> None:
    assert short_names(["tiny_a_b", "tiny_a_c"]) == {"tiny_a_b": "b", "tiny_a_c": "c"}
    assert short_names(["tiny_a"]) == {"tiny_a": "tiny_a"}
    assert short_names(["tiny", "tin"]) == {"tiny": "tiny", "tin": "tin"}


def test_the_numbers_of_a_comparison_are_a_json_object(tmp_path: Path) -> None:
    found = read_results(tmp_path, write_comparison(tmp_path, {"a": 0.4, "b": 0.8}, seeds=3))
    written = json.loads(json.dumps(numbers(found), allow_nan=False))
    rows = {row.name: row for row in found.methods}
    assert list(written["methods"]) == ["a", "b"]
    assert (written["metric"], written["baseline"], written["missing"]) == (found.metric, "a", [])
    difference = rows["b"].difference
    assert difference is not None
    first, second = written["methods"]["a"], written["methods"]["b"]
    assert first["difference"] is None
    assert second["difference"]["mean"] == difference.mean == pytest.approx(0.4, abs=0.1)
    assert second["difference"]["interval"] == [difference.interval.low, difference.interval.high]
    assert list(second["each_seed"].values()) == list(rows["b"].seed_scores)
    assert second["curve"][-1][1] == pytest.approx(rows["b"].score.mean, abs=0.02)


def test_of_a_single_seed_p_is_null(tmp_path: Path) -> None:
    found = read_results(tmp_path, write_comparison(tmp_path, {"a": 0.4, "b": 0.8}, seeds=1))
    difference = json.loads(json.dumps(numbers(found), allow_nan=False))["methods"]["b"]["difference"]
    assert (difference["p"], difference["seeds"], difference["detectable"]) == (None, None, None)


def test_small_numbers_are_not_written_as_zero() -> None:
    write = number_form(cast(Results, SimpleNamespace(methods=())), "+")
    assert [write(value) for value in (-0.00003, 0.0, 0.0032, -0.25)] == ["-3e-05", "+0.000", "+0.003", "-0.250"]
