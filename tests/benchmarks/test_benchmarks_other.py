"""The other benchmarks' arithmetic, without models: the numbers that their rules give for cases worked by hand."""

from __future__ import annotations

import csv
import json
import math
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st

from flowrl.benchmarks import dpg_bench, t2i_compbench, vbench
from flowrl.benchmarks.diversity import diversity
from flowrl.benchmarks.editing import (
    JudgedPair,
    VIEScore,
    both_orders,
    gedit_mean,
    imgedit,
    imgedit_image,
    pair_accuracy,
    rank_agreement,
    rank_by_score,
    viescore,
)
from flowrl.benchmarks.geneval.detections import Detection
from flowrl.benchmarks.panels import PANELS, distinct, panel_differences, panel_means
from flowrl.rewards import REWARDS

# ---- T2I-CompBench ---------------------------------------------------------------------------------------------------

LEFT = Detection("cat", (0, 0, 100, 100), 0.9)
RIGHT = Detection("dog", (150, 0, 250, 100), 0.8)


@pytest.mark.parametrize(
    ("subject", "reference", "relation", "expected"),
    [
        (LEFT, RIGHT, "on the left of", 0.925),
        (LEFT, Detection("dog", (50, 0, 150, 100), 0.8), "left of", 0.425 + 0.15),
        (LEFT, None, "left of", 0.0),  # 0.225, below one half
        (None, RIGHT, "left of", 0.0),
        (None, None, "left of", 0.0),
        (LEFT, RIGHT, "on the right of", 0.0),  # 0.425 without the relation
        (RIGHT, LEFT, "right", 0.925),
        (LEFT, Detection("dog", (150, 200, 250, 300), 0.8), "left of", 0.0),  # farther below than beside
        (LEFT, Detection("dog", (0, 150, 100, 250), 0.8), "on the top of", 0.925),
        (LEFT, Detection("dog", (0, 150, 100, 250), 0.8), "on the bottom of", 0.0),
        (LEFT, Detection("dog", (400, 0, 500, 100), 0.8), "next to", 0.925),  # 0 pixels apart in height
        (LEFT, Detection("dog", (400, 200, 500, 300), 0.8), "near", 0.425 + 0.5 * 150 / 400),
    ],
)
def test_two_objects_and_their_relation(
    subject: Detection | None, reference: Detection | None, relation: str, expected: float
) -> None:
    assert t2i_compbench.spatial_2d(subject, reference, relation) == pytest.approx(expected)


def test_an_unknown_relation_is_refused() -> None:
    with pytest.raises(ValueError, match="relation"):
        t2i_compbench.spatial_2d(LEFT, RIGHT, "inside")


def test_attributes_multiply() -> None:
    assert t2i_compbench.attribute_score([0.9, 0.5]) == pytest.approx(0.45)
    assert t2i_compbench.attribute_score([]) == 1.0


def test_numeracy_pays_half_for_being_there_and_half_for_the_count() -> None:
    cats = [Detection("cat", (200 * k, 0, 200 * k + 100, 100), 0.9) for k in range(3)]
    assert t2i_compbench.numeracy({"cat": 3, "dog": 1}, [*cats, RIGHT]) == 1.0
    assert t2i_compbench.numeracy({"cat": 2, "dog": 1}, [*cats, RIGHT]) == 0.75
    assert t2i_compbench.numeracy({"cat": 3, "dog": 1}, cats) == 0.5
    assert t2i_compbench.numeracy({"cat": 1}, []) == 0.0
    # The same place again, and a box within another, are one object; another class at that place is another.
    again = [*cats, Detection("cat", (1, 0, 101, 100), 0.5), Detection("cat", (210, 10, 280, 90), 0.5)]
    assert t2i_compbench.numeracy({"cat": 3}, again) == 1.0
    assert t2i_compbench.numeracy({"cat": 3, "dog": 1}, [*cats, Detection("dog", (0, 0, 100, 100), 0.5)]) == 1.0
    with pytest.raises(ValueError, match="needs the objects"):
        t2i_compbench.numeracy({}, cats)


def test_three_in_one() -> None:
    assert t2i_compbench.three_in_one(0.8, 0.4, None) == pytest.approx(0.6)
    assert t2i_compbench.three_in_one(0.8, None, 0.3) == pytest.approx(0.55)
    assert t2i_compbench.three_in_one(0.8, 0.4, 0.3) == pytest.approx(0.5)
    with pytest.raises(ValueError, match="neither"):
        t2i_compbench.three_in_one(0.8, None, None)


def test_the_overall_of_eight_categories() -> None:
    """Flow-GRPO's base on T2I-CompBench++, with a complex score added to make eight."""
    scores = (0.7994, 0.5669, 0.7338, 0.2850, 0.3739, 0.5927, 0.3146, 0.38)
    found = dict(zip(t2i_compbench.CATEGORIES, scores, strict=True))
    assert t2i_compbench.overall(found) == pytest.approx(50.57875)
    del found["complex"]
    with pytest.raises(ValueError, match="needs all of"):
        t2i_compbench.overall(found)


@settings(max_examples=40, deadline=None)
@given(
    prompt=st.text(st.characters(codec="utf-8", exclude_characters="/_\x00\n\r"), min_size=1, max_size=40),
    number=st.integers(0, 10**7),
)
def test_names_of_images_come_back(prompt: str, number: int) -> None:
    assert t2i_compbench.parse_file_name(t2i_compbench.file_name(prompt, number)) == (prompt, number)
    assert vbench.parse_file_name(vbench.file_name(prompt, number)) == (prompt, number)


def test_bad_names_are_refused() -> None:
    for prompt in ("", "a/b", "a_b", "x" * 300):
        with pytest.raises(ValueError, match="cannot name a file"):
            t2i_compbench.file_name(prompt, 0)
    with pytest.raises(ValueError, match="cannot name a file"):
        vbench.file_name("a/b", 0)
    with pytest.raises(ValueError, match="is named"):
        t2i_compbench.parse_file_name("image.png")
    with pytest.raises(ValueError, match="is named"):
        vbench.parse_file_name("video.mp4")


def test_result_files_of_the_scripts(tmp_path: Path) -> None:
    path = tmp_path / "vqa_result.json"
    path.write_text(t2i_compbench.results_text({1: 0.25, 0: 0.5}))
    assert json.loads(path.read_text())[0] == {"question_id": 0, "answer": 0.5}
    assert t2i_compbench.read_results(path) == {0: 0.5, 1: 0.25}
    path.write_text('[{"question_id": 0, "answer": "0.1250"}]')  # the BLIP script writes texts
    assert t2i_compbench.read_results(path) == {0: 0.125}
    for text in ("[]", "{}", '[{"answer": 1}]', "nonsense", '[{"question_id": 0, "answer": 1}] '.replace("]", "") + ", "
                 '{"question_id": 0, "answer": 1}]'):  # fmt: skip
        path.write_text(text)
        with pytest.raises(ValueError, match=r"vqa_result\.json"):
            t2i_compbench.read_results(path)


# ---- DPG-Bench -------------------------------------------------------------------------------------------------------


def question(number: int, parents: tuple[int, ...] = (), category: str = "entity - whole") -> dpg_bench.Question:
    return dpg_bench.Question(id=number, text=f"q{number}?", parents=parents, category=category)


def test_answers_without_their_parents_do_not_count() -> None:
    first, second, third = question(1), question(2, (1,)), question(3, (2,))
    answers = {1: 0.0, 2: 1.0, 3: 1.0}
    assert dpg_bench.item_score([answers], [first, second, third]) == 0.0
    assert dpg_bench.item_score([answers], [first, third, second]) == pytest.approx(1 / 3)  # one pass, in order
    assert dpg_bench.item_score([answers, {1: 1.0, 2: 1.0, 3: 1.0}], [first, second, third]) == 0.5
    assert answers == {1: 0.0, 2: 1.0, 3: 1.0}
    assert dpg_bench.after_dependencies({2: 1.0}, [second]) == {2: 1.0}  # its parent was lost with the first row


def write_dpg(path: Path, rows: list[tuple[str, str, int, str, str, str]]) -> Path:
    with path.open("w", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(["item_id", "text", "keywords", "proposition_id", "dependency", "category_broad",
                         "category_detailed", "tuple", "question_natural_language"])  # fmt: skip
        for item, text, number, parents, category, asked in rows:
            writer.writerow([item, text, "", number, parents, "", "", category, asked])
    return path


DPG_ROWS = [
    ("a", "a red cube", 1, "0", "entity - whole (cube)", "Is there a cube?"),
    ("a", "a red cube", 2, "1", "attribute - color (cube, red)", "Is it red?"),
    ("b", "two dogs, one cat", 1, "0", "entity - whole (dogs)", "Are there dogs?"),
    ("b", "two dogs, one cat", 2, "1, 1", "other - count (dogs)", "Are there two?"),
]


def test_items_of_the_published_file(tmp_path: Path) -> None:
    path = write_dpg(tmp_path / "dpg.csv", DPG_ROWS)
    first, second = dpg_bench.read_items(path)
    assert [q.text for q in first.questions] == ["Is it red?"]  # the published loader loses the first row
    assert (second.prompt, second.questions[1].parents, second.questions[1].category) == (
        "two dogs, one cat", (1, 1), "other - count"
    )  # fmt: skip
    assert [q.id for q in dpg_bench.read_items(path, skip_first=False)[0].questions] == [1, 2]


def test_sums_of_dpg_bench(tmp_path: Path) -> None:
    items = dpg_bench.read_items(write_dpg(tmp_path / "dpg.csv", DPG_ROWS), skip_first=False)
    answers = {"a": [{1: 0.0, 2: 1.0}, {1: 1.0, 2: 0.0}], "b": [{1: 1.0, 2: 1.0}, {1: 0.0, 2: 1.0}]}
    scores = dpg_bench.aggregate(items, answers)
    assert scores.score == pytest.approx(100 * ((0 + 0.5) / 2 + (1 + 0) / 2) / 2)
    # Of the last sample, before dependencies: cube yes, red no; dogs no, two yes.
    assert scores.details == {"attribute - color": 0.0, "entity - whole": 50.0, "other - count": 100.0}
    assert scores.categories == {"attribute": 0.0, "entity": 50.0, "other": 100.0}
    assert dpg_bench.aggregate(items, {"a": answers["a"], "b": None}).skipped == 1


def test_bad_dpg_input_is_refused(tmp_path: Path) -> None:
    items = dpg_bench.read_items(write_dpg(tmp_path / "dpg.csv", DPG_ROWS), skip_first=False)
    with pytest.raises(ValueError, match="no answers"):
        dpg_bench.aggregate(items, {"a": None})
    with pytest.raises(ValueError, match="every sample needs"):
        dpg_bench.aggregate(items, {"a": [{1: 1.0}], "b": None})
    with pytest.raises(ValueError, match="none of the 2"):
        dpg_bench.aggregate(items, {"a": None, "b": None})
    with pytest.raises(ValueError, match="TencentQQGYLab/ELLA"):
        dpg_bench.read_items(tmp_path / "missing.csv")
    with pytest.raises(ValueError, match="do not stand together"):
        dpg_bench.read_items(write_dpg(tmp_path / "dpg.csv", [*DPG_ROWS, DPG_ROWS[0]]))
    with pytest.raises(ValueError, match="whole numbers"):
        dpg_bench.read_items(write_dpg(tmp_path / "dpg.csv", [*DPG_ROWS, ("c", "x", 1, "none", "e (x)", "x?")]))
    (tmp_path / "dpg.csv").write_text("item_id,text\na,b\n")
    with pytest.raises(ValueError, match="lacks"):
        dpg_bench.read_items(tmp_path / "dpg.csv")


def test_the_grid_is_read_row_by_row() -> None:
    assert dpg_bench.boxes((8, 4)) == [(0, 0, 4, 2), (4, 0, 8, 2), (0, 2, 4, 4), (4, 2, 8, 4)]
    assert dpg_bench.boxes((8, 4), 1) == [(0, 0, 4, 2)]
    with pytest.raises(ValueError, match="grid of 2 x 2"):
        dpg_bench.boxes((7, 4))


# ---- VBench ----------------------------------------------------------------------------------------------------------

RAW = {
    "subject_consistency": 0.96, "background_consistency": 0.97, "temporal_flickering": 0.99,
    "motion_smoothness": 0.985, "aesthetic_quality": 0.62, "imaging_quality": 0.66, "dynamic_degree": 0.40,
    "object_class": 0.88, "multiple_objects": 0.60, "human_action": 0.95, "color": 0.85,
    "spatial_relationship": 0.70, "scene": 0.45, "appearance_style": 0.22, "temporal_style": 0.24,
    "overall_consistency": 0.26,
}  # fmt: skip


def test_quality_semantic_and_total() -> None:
    scores = vbench.aggregate(RAW)
    assert scores.quality == pytest.approx(0.81887, abs=5e-6)
    assert scores.semantic == pytest.approx(0.74120, abs=5e-6)
    assert scores.total == pytest.approx(0.80334, abs=5e-6)
    assert scores.missing == ()


def test_a_missing_dimension_counts_as_nothing_and_is_named() -> None:
    scores = vbench.aggregate({name: value for name, value in RAW.items() if name != "scene"})
    assert scores.missing == ("scene",)
    assert scores.semantic == pytest.approx(0.74120 - 0.45 / 0.8222 / 9, abs=5e-6)
    assert vbench.aggregate({}).dimensions["subject_consistency"] == pytest.approx(-0.1462 / 0.8538)


def test_bad_dimensions_are_refused() -> None:
    with pytest.raises(ValueError, match="did you mean 'scene'"):
        vbench.aggregate({"scenes": 0.5})
    with pytest.raises(ValueError, match="finite"):
        vbench.normalise("scene", math.nan)


def test_seeds_of_videos() -> None:
    assert vbench.video_seed(42, 3, 2) == 42 + 3 * 5 + 2


# ---- editing and judges ----------------------------------------------------------------------------------------------


def test_viescore_takes_the_worst_of_each_side() -> None:
    score = viescore([8, 6], [9, 7])
    assert (score.semantic, score.quality) == (6, 7)
    assert score.overall == pytest.approx(6.480741, abs=5e-7)
    for semantic, quality in (([], [1.0]), ([11.0], [1.0]), ([1.0], [-1.0])):
        with pytest.raises(ValueError, match="sub-scores"):
            viescore(semantic, quality)


def test_failed_judgements_of_edits_are_left_out_unless_asked() -> None:
    scores = [VIEScore(6, 7), None, VIEScore(4, 9)]
    found = gedit_mean(scores)
    assert (found.semantic, found.quality, found.judged, found.failed) == (5, 8, 2, 1)
    assert found.overall == pytest.approx((math.sqrt(42) + 6) / 2)
    assert gedit_mean(scores, failed_as_zero=True).overall == pytest.approx((math.sqrt(42) + 6) / 3)
    with pytest.raises(ValueError, match="none of the 1"):
        gedit_mean([None])


@pytest.mark.parametrize(("scores", "expected"), [((1, 4, 4), 3.0), ((1, 4, 5), 3.333333), ((1, 5, 5), 3.666667)])
def test_imgedit_of_an_image(scores: tuple[float, ...], expected: float) -> None:
    assert imgedit_image(scores) == pytest.approx(expected, abs=5e-7)


def test_imgedit_is_the_mean_of_categories() -> None:
    found = imgedit([("add", (5, 5, 5)), ("add", (3, 3, 3)), ("remove", (1, 1, 1)), ("remove", None)])
    assert found.categories == {"add": 4.0, "remove": 1.0}
    assert (found.overall, found.failed) == (2.5, 1)
    with pytest.raises(ValueError, match="three scores"):
        imgedit_image((1, 6, 1))
    with pytest.raises(ValueError, match="none of the 1"):
        imgedit([("add", None)])


def test_pairs_of_edits() -> None:
    pairs: dict[str, list[tuple[float | None, float | None]]] = {}
    pairs |= {"add": [(2.0, 1.0), (1.0, 1.0), (0.0, 1.0), (None, 1.0)], "style": [(1.0, 0.0), (1.0, math.nan)]}
    mean, shares, failed = pair_accuracy(pairs)
    assert mean == pytest.approx((1 / 3 + 1) / 2)
    assert failed == 2
    assert shares == {"add": pytest.approx(1 / 3), "style": 1.0}
    assert pair_accuracy(pairs, ties_win=True)[0] == pytest.approx((2 / 3 + 1) / 2)
    with pytest.raises(ValueError, match="none of the 1"):
        pair_accuracy({"add": [(None, 1.0)]})


def test_agreement_of_two_orders() -> None:
    found = rank_agreement([0, 1, 2, 3], [0, 1, 3, 2])
    assert (found.accuracy, found.footrule, found.top_bottom) == (0.5, 2, 0.5)
    assert found.kendall == pytest.approx(0.6667, abs=5e-5)
    assert found.spearman == pytest.approx(0.8)
    assert rank_by_score([0.1, 0.9, 0.9, 0.5]) == [1, 2, 3, 0]
    for predicted, truth in (([0, 0], [0, 1]), ([0], [0]), ([0, 1], [0, 1, 2])):
        with pytest.raises(ValueError, match="permutations"):
            rank_agreement(predicted, truth)


@settings(max_examples=30, deadline=None)
@given(predicted=st.permutations(range(5)), truth=st.permutations(range(5)))
def test_correlations_of_orders_are_those_of_scipy(predicted: list[int], truth: list[int]) -> None:
    found = rank_agreement(predicted, truth)
    assert found.kendall == pytest.approx(float(scipy.stats.kendalltau(predicted, truth).statistic))
    assert found.spearman == pytest.approx(float(scipy.stats.spearmanr(predicted, truth).statistic))


def test_pairs_judged_in_both_orders() -> None:
    assert both_orders([JudgedPair("A", "A", "B")]) == (2, 2)
    assert both_orders([JudgedPair("A", "A", "A")]) == (1, 2)
    assert both_orders([JudgedPair("A", None, "B")]) == (1, 1)
    assert both_orders([JudgedPair("B", "B", "A"), JudgedPair("B", None, None)]) == (2, 2)


# ---- panels and diversity --------------------------------------------------------------------------------------------


def test_panel_means_leave_failures_out_and_count_them() -> None:
    prompts = ["a", "a", "b", "b", "c", "c"]
    found = panel_means({"one": [1, 2, 3, math.nan, 5, 6], "none": [math.nan] * 6}, prompts)
    assert found["one"].interval.mean == pytest.approx(17 / 5)
    assert (found["one"].scored, found["one"].failed, found["none"].failed) == (5, 1, 6)
    assert math.isnan(found["none"].interval.mean)
    change = panel_differences({"one": [0.0] * 6}, {"one": [1, 2, 3, math.nan, 5, 6], "two": [1.0] * 6}, prompts)
    assert list(change) == ["one"]
    assert change["one"].mean == pytest.approx(17 / 5)
    with pytest.raises(ValueError, match="one for each"):
        panel_means({"one": [1.0]}, prompts)


def test_panels_name_rewards_that_exist() -> None:
    assert {name for panel in PANELS.values() for name in panel.rewards} <= REWARDS.keys()
    assert distinct(["a", "b", "a"]) == ["a", "b"]


def test_diversity_is_the_mean_over_pairs_within_prompts() -> None:
    rng = np.random.default_rng(0)
    features, prompts = rng.normal(size=(9, 4)), ["a"] * 4 + ["b"] * 3 + ["c"] * 2

    def cosine(i: int, j: int) -> float:
        return 1 - float(features[i] @ features[j]) / math.sqrt(
            float(features[i] @ features[i]) * float(features[j] @ features[j])
        )

    expected = [np.mean([cosine(i, j) for i, j in combinations(places, 2)])
                for places in (range(4), range(4, 7), range(7, 9))]  # fmt: skip
    found = diversity(features, prompts)
    assert list(found.by_prompt.values()) == pytest.approx(expected)
    assert found.interval.mean == pytest.approx(np.mean(expected))
    assert found.interval.low < found.interval.mean < found.interval.high
    euclidean = diversity(np.array([[0.0, 0.0], [3.0, 4.0], [9.0, 9.0]]), ["a", "a", "b"], distance="euclidean")
    assert (euclidean.by_prompt, euclidean.alone) == ({"a": 5.0}, 1)


def test_bad_features_are_refused() -> None:
    with pytest.raises(ValueError, match="shape"):
        diversity(np.zeros((2, 3)), ["a"])
    with pytest.raises(ValueError, match="no direction"):
        diversity(np.zeros((2, 3)), ["a", "a"])
    with pytest.raises(ValueError, match="no prompt has two"):
        diversity(np.ones((2, 3)), ["a", "b"])
    with pytest.raises(ValueError, match="cosine or euclidean"):
        diversity(np.ones((2, 3)), ["a", "a"], distance="manhattan")  # type: ignore[arg-type]
