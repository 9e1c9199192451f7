"""The other benchmarks' arithmetic, without models: the numbers that their rules give for cases worked by hand."""

from __future__ import annotations

import csv
import json
import math
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

from flowrl.benchmarks import dpg_bench, t2i_compbench
from flowrl.benchmarks.diversity import diversity
from flowrl.benchmarks.panels import PANELS, distinct, panel_differences, panel_means
from flowrl.rewards import REWARDS

# ---- T2I-CompBench ---------------------------------------------------------------------------------------------------


def test_the_overall_of_eight_categories() -> None:
    """Flow-GRPO's base on T2I-CompBench++, with a complex score added to make eight."""
    scores = (0.7994, 0.5669, 0.7338, 0.2850, 0.3739, 0.5927, 0.3146, 0.38)
    found = dict(zip(t2i_compbench.CATEGORIES, scores, strict=True))
    assert t2i_compbench.overall(found) == pytest.approx(50.57875)
    del found["complex"]
    with pytest.raises(ValueError, match="needs all of"):
        t2i_compbench.overall(found)


def test_images_are_named_by_prompt_and_number() -> None:
    assert t2i_compbench.file_name("a red cube", 12) == "a red cube_000012.png"
    for prompt in ("", "a/b", "a_b", "x" * 300):
        with pytest.raises(ValueError, match="cannot name a file"):
            t2i_compbench.file_name(prompt, 0)


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


def test_changes_of_verdicts_and_single_prompts_in_a_panel() -> None:
    prompts = ["a", "b", "c", "d"]
    still = panel_differences({"right": [1, 0, 1, 1]}, {"right": [1, 0, 1, 1]}, prompts)["right"]
    assert still.low < 0 < still.high
    assert panel_means({"level": [0.1, 0.2, 0.4]}, ["a"] * 3)["level"].interval.known  # of this prompt


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
