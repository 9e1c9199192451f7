"""UniGenBench: replies, sums, prompt files and result files. U1 to U12 and the sums are the benchmark's own results."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from unigenbench_files import record, whole_file, write

from flowrl.benchmarks.unigenbench.items import (
    ENGLISH,
    LABELS,
    MEANINGS,
    PRIMARIES,
    Language,
    primary_of,
    published_counts,
    read_prompt_file,
)
from flowrl.benchmarks.unigenbench.point_scores import Tally, aggregate, paired_intervals, score_intervals
from flowrl.benchmarks.unigenbench.replies import Judged, Reply, read_reply, results_text, summary_text

POINTS = ["Style", "World Knowledge", "Attribute - Quantity"]
LOOKS = "['ink wash look', 'pyramids are visible', 'only one panda']"
# By ranges: for categories Hypothesis makes a table of all characters, which takes seconds.
CONTROLS = st.integers(0x00, 0x1F) | st.integers(0x7F, 0x9F) | st.integers(0xFFFE, 0xFFFF)
"""What no prompt may hold, but line breaks."""
_RANGES = (0x20, 0x7E), (0xA0, 0xD7FF), (0xE000, 0xFFFD), (0x10000, 0x10FFFF)
OTHERS = st.one_of(*(st.integers(*ends) for ends in _RANGES))
"""All others that are no surrogates."""


def texts(letters: st.SearchStrategy[int], most: int) -> st.SearchStrategy[str]:
    return st.lists(letters.map(chr), max_size=most).map("".join)


def reply(analysis: str = LOOKS, score: str = "[1, 1, 0]") -> str:
    return f"<description><analysis>{analysis}</analysis>\n<score>{score}</score></description>"


# ---- replies ---------------------------------------------------------------------------------------------------------


def test_u1_a_plain_reply() -> None:
    assert read_reply(reply(), 3) == Reply(["ink wash look", "pyramids are visible", "only one panda"], [1, 1, 0])


@pytest.mark.parametrize(
    ("text", "scores"),
    [
        pytest.param(f"Sure!\n```xml\n{reply()}\n```\nDone.", [1, 1, 0], id="U2 prose and a fence"),
        pytest.param(f"<analysis>{LOOKS}</analysis>", None, id="U3 no score"),
        pytest.param(reply(score="[1, 1]"), None, id="U4 length"),
        pytest.param(reply(analysis="['a', 'b']"), None, id="U4 length of the analysis"),
        pytest.param(reply(analysis="[ink wash look, pyramids, one panda]"), None, id="U5 no quotes"),
        pytest.param(reply('["the panda\'s hat", "b", "c"]', "[1,0,1]"), [1, 0, 1], id="U6 apostrophe, double quotes"),
        pytest.param(reply("['the panda's hat', 'b', 'c']", "[1,0,1]"), None, id="U7 apostrophe, single quotes"),
        pytest.param(reply(score="['1','1','0']"), ["1", "1", "0"], id="U8 texts"),
        pytest.param(reply("[\n 'a',\n 'b',\n 'c'\n]", "[\n1,\n0,\n1\n]"), [1, 0, 1], id="U9 lines"),
        pytest.param(reply(score="[0,0,0]") + reply(score="[1,1,1]"), [0, 0, 0], id="U10 the first one"),
        pytest.param(reply(score="[1.0, 0.5, 2]"), [1.0, 0.5, 2], id="U11 not range-checked"),
        pytest.param(None, None, id="U12 nothing"),
        pytest.param(reply(score="(1, 1, 0)"), None, id="a tuple"),
        pytest.param(reply(score="{1: 1}"), None, id="a mapping"),
        pytest.param(reply(score="[1, 1, __import__('os')]"), None, id="code"),
        pytest.param(reply(score="[" * 5000), None, id="nested beyond all measure"),
        pytest.param(reply(analysis=r"['a \d', 'b', 'c']"), [1, 1, 0], id="an escape that Python does not know"),
        pytest.param("", None, id="empty"),
    ],
)
def test_what_can_be_read_of_a_reply(text: str | None, scores: list[Any] | None) -> None:
    reply = read_reply(text, 3)
    assert (None if reply is None else reply.score) == scores


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    entries=st.lists(
        st.tuples(texts(CONTROLS | OTHERS, 30).filter(lambda text: "<" not in text), st.sampled_from([0, 1])),
        max_size=8,
    ),
    before=texts(CONTROLS | OTHERS, 20).filter(lambda text: "<" not in text),
)
def test_a_reply_written_by_the_rules_is_read_back(entries: list[tuple[str, int]], before: str) -> None:
    analysis, score = [text for text, _ in entries], [value for _, value in entries]
    text = f"{before}<analysis>{analysis!r}</analysis>{before}<score>{score}</score>"
    assert read_reply(text, len(entries)) == Reply(analysis, score)
    assert read_reply(text, len(entries) + 1) is None


def test_a_reply_that_is_json() -> None:
    """Of a judge that is held to a form."""
    text = '{"analysis": ["a <score> is 1", "b"], "score": [1, 0]}'
    assert read_reply(text, 2) == Reply(["a <score> is 1", "b"], [1, 0])
    assert read_reply(text, 3) is None
    assert all(
        read_reply(other, 2) is None for other in ('{"score": [1, 0]}', '["analysis", "score"]', "3", '{"analysis": 1')
    )


# ---- sums ------------------------------------------------------------------------------------------------------------

ROWS: list[tuple[list[str], list[Any] | None]] = [
    (POINTS, [1, 1, 0]),
    (POINTS, [1, 0, 1]),
    (["Attribute - Color", "Attribute - Quantity"], [1, 0]),
    (["Action - Full-body (Character/Anthropomorphic)", "Grammar - Negation"], [1, 0]),
    (POINTS, None),
    (["Attribute - Color"], ["1"]),
    (["Attribute - Color"], [1.0]),
]


def test_the_published_sums() -> None:
    scores = aggregate(ROWS)
    assert scores.primary == {"Style": Tally(2, 2), "World Knowledge": Tally(1, 2), "Attribute": Tally(3, 6),
                              "Action": Tally(1, 1), "Grammar": Tally(0, 1)}  # fmt: skip
    assert scores.sub == {
        "Style": Tally(2, 2), "World Knowledge": Tally(1, 2), "Attribute - Quantity": Tally(1, 3),
        "Attribute - Color": Tally(2, 3), "Action - Full-body (Character/Anthropomorphic)": Tally(1, 1),
        "Grammar - Negation": Tally(0, 1),
    }  # fmt: skip
    assert scores.skipped == 1
    assert scores.overall == pytest.approx((1 + 0.5 + 0.5 + 1 + 0) / 5)


def test_chinese_labels_have_no_spaces_around_their_hyphen() -> None:
    assert aggregate([(["属性-数量", "风格"], [1, 0])]).primary == {"属性": Tally(1, 1), "风格": Tally(0, 1)}


def test_only_a_one_counts() -> None:
    scores = aggregate([(["Style"], [value]) for value in (1, 1.0, True, 0, 2, 0.5, "1", None, [1], 1 + 0j)])
    assert scores.primary["Style"] == Tally(3, 10)


def test_names_are_stripped_and_pool() -> None:
    assert aggregate([([" Attribute - Color "], [1]), (["Attribute - Color"], [0])]).sub == {
        "Attribute - Color": Tally(1, 2)
    }


def test_rows_without_scores_are_skipped_and_counted() -> None:
    scores = aggregate([(POINTS, None), (POINTS, [1, 1])])
    assert (scores.primary, scores.skipped) == ({}, 2)
    assert math.isnan(scores.overall)
    assert math.isnan(Tally(0, 0).accuracy)


def test_no_rows_are_refused() -> None:
    with pytest.raises(ValueError, match="one row"):
        aggregate([])


def of_share(label: str, percent: float, points: int) -> list[tuple[list[str], list[int]]]:
    """Rows of one test point each, 4 images for each of `points` prompts, with the published share of them met."""
    met = round(percent / 100 * 4 * points)
    return [([label], [int(k < met)]) for k in range(4 * points)]


def test_a_primary_pools_its_test_points() -> None:
    """FLUX.1-dev's Attribute: 67.84 on the leaderboard; the mean of the sub-dimensions would be 69.45."""
    published = {"Quantity": (72.22, 36), "Expression": (53.85, 39), "Material": (58.96, 53), "Size": (75.0, 36),
                 "Shape": (65.0, 40), "Color": (91.67, 30)}  # fmt: skip
    rows = [row for name, (share, count) in published.items() for row in of_share(f"Attribute - {name}", share, count)]
    scores = aggregate(rows)
    assert 100 * scores.primary["Attribute"].accuracy == pytest.approx(67.84, abs=0.005)
    assert 100 * np.mean([tally.accuracy for tally in scores.sub.values()]) == pytest.approx(69.45, abs=0.005)


def test_the_overall_is_the_unweighted_mean_of_the_primaries() -> None:
    """FLUX.1-dev's row of the leaderboard: 60.97."""
    row = (85.00, 87.50, 67.20, 62.26, 66.88, 45.75, 62.30, 70.90, 29.77, 32.18)
    counts = (250, 158, 234, 263, 197, 194, 187, 134, 110, 87)
    rows = [part for name, share, count in zip(PRIMARIES, row, counts, strict=True)
            for part in of_share(name, share, count)]  # fmt: skip
    assert 100 * aggregate(rows).overall == pytest.approx(60.974, abs=0.005)


@settings(max_examples=30, deadline=None)
@given(order=st.permutations(range(len(ROWS))))
def test_the_order_of_images_does_not_matter(order: list[int]) -> None:
    shuffled, scores = aggregate([ROWS[i] for i in order]), aggregate(ROWS)
    assert (shuffled.primary, shuffled.sub, shuffled.skipped) == (scores.primary, scores.sub, scores.skipped)


# ---- intervals -------------------------------------------------------------------------------------------------------


def many_rows(share: float, seed: int, prompts: int = 100) -> tuple[list[tuple[list[str], list[int]]], list[int]]:
    rng = np.random.default_rng(seed)
    rows, labels = [], []
    for prompt in range(prompts):
        for _ in range(4):
            rows.append((["Style", "Attribute - Color"], (rng.random(2) < share).astype(int).tolist()))
            labels.append(prompt)
    return rows, labels


def test_intervals_are_about_the_sums_and_as_wide_as_theory_says() -> None:
    rows, prompts = many_rows(0.5, seed=1)
    found = score_intervals(rows, prompts)
    scores = aggregate(rows)
    assert found["overall"].mean == pytest.approx(scores.overall)
    for name, tally in scores.primary.items():
        assert found[name].mean == pytest.approx(tally.accuracy)
        half = 1.96 * math.sqrt(0.25 / 400)  # 400 independent points
        assert (found[name].high - found[name].low) / 2 == pytest.approx(half, rel=0.2)


def test_a_dimension_of_one_prompt_has_no_bounds() -> None:
    found = score_intervals([(["Style"], [1]), (["Style", "Logical Reasoning"], [0, 1])], ["a", "b"])
    assert found["Logical Reasoning"].mean == 1.0
    assert not found["Logical Reasoning"].known
    assert found["overall"].mean == pytest.approx(0.75)


def test_a_paired_change_of_nothing_is_nothing_and_order_does_not_matter() -> None:
    rows, prompts = many_rows(0.6, seed=2)
    turned = (rows[::-1], prompts[::-1])
    change = paired_intervals((rows, prompts), turned)
    assert all(interval.mean == 0.0 and not interval.known for interval in change.values())


def test_points_that_are_all_met_are_no_certainty() -> None:
    found = score_intervals([(["Style"], [1]), (["Style", "Grammar"], [1, 0]), (["Grammar"], [1])], ["a", "b", "c"])
    assert found["Style"].mean == 1.0
    assert not found["Style"].known
    assert found["Grammar"].known


def test_a_paired_change_is_after_minus_before() -> None:
    before, after = many_rows(0.3, seed=3), many_rows(0.8, seed=4)
    change = paired_intervals(before, after)
    assert change["Style"].mean == pytest.approx(
        aggregate(after[0]).primary["Style"].accuracy - aggregate(before[0]).primary["Style"].accuracy
    )
    assert change["overall"].low > 0.3


def test_intervals_refuse_what_cannot_be_compared() -> None:
    rows, prompts = many_rows(0.5, seed=5, prompts=3)
    with pytest.raises(ValueError, match="one for each"):
        score_intervals(rows, prompts[:-1])
    with pytest.raises(ValueError, match="no image was judged"):
        score_intervals([(["Style"], None)], ["a"])
    with pytest.raises(ValueError, match="one side only"):
        paired_intervals((rows, prompts), (rows, [prompt + 1 for prompt in prompts]))


# ---- dimensions ------------------------------------------------------------------------------------------------------


def test_the_published_counts() -> None:
    assert len(LABELS["en"]) == len(LABELS["zh"]) == len(set(LABELS["en"])) == len(set(LABELS["zh"])) == 27
    assert sum(published_counts("en", long=False).values()) == sum(published_counts("zh", long=False).values()) == 1813
    assert sum(published_counts("en", long=True).values()) == sum(published_counts("zh", long=True).values()) == 3920
    assert published_counts("en", long=False, published=True)["Logical Reasoning"] == 110
    assert published_counts("zh", long=False, published=True)["逻辑推理"] == 109


@pytest.mark.parametrize(
    ("long", "expected"),
    [
        (False, (250, 158, 234, 263, 197, 194, 187, 134, 109, 87)),
        (True, (301, 173, 1311, 622, 464, 343, 197, 315, 102, 92)),
    ],
)
def test_test_points_of_each_primary(long: bool, expected: tuple[int, ...]) -> None:
    for language in ("en", "zh"):
        sums: dict[str, int] = {}
        for label, count in published_counts(language, long=long).items():
            name = primary_of(label)
            sums[ENGLISH.get(name, name)] = sums.get(ENGLISH.get(name, name), 0) + count
        assert tuple(sums[name] for name in PRIMARIES) == expected


def test_every_test_point_is_explained_in_its_language() -> None:
    assert tuple(MEANINGS["en"]) == LABELS["en"]
    assert tuple(MEANINGS["zh"]) == LABELS["zh"]
    assert all(text.isascii() for text in MEANINGS["en"].values())
    assert not any(text.isascii() for text in MEANINGS["zh"].values())


# ---- prompt files ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("language", "long", "track", "total"),
    [
        ("en", False, "en", 1813),
        ("en", True, "en_long", 3920),
        ("zh", False, "zh", 1813),
        ("zh", True, "zh_long", 3920),
    ],
)
def test_whole_files(tmp_path: Path, language: Language, long: bool, track: str, total: int) -> None:
    file = read_prompt_file(whole_file(tmp_path / "prompts.csv", language, long=long))
    assert (file.track, len(file.items), file.differences) == (track, 600, ())
    assert sum(len(item.points) for item in file.items) == total
    assert (file.items[7].theme, file.items[7].subject) == ("Art", "Animal")


def test_a_missing_comma_is_inserted_and_told(tmp_path: Path) -> None:
    file = read_prompt_file(whole_file(tmp_path / "prompts.csv", "en", long=True))
    item = file.items[509]
    assert item.points == ("Style", "Grammar - Negation", "Attribute - Color", "World Knowledge", "Action - State")
    assert len(item.descriptions) == 5
    assert len(file.repairs) == 1
    assert "509" in file.repairs[0]


def test_the_published_variant_has_one_more_test_point(tmp_path: Path) -> None:
    path = whole_file(tmp_path / "prompts.csv", "en", long=False)
    assert read_prompt_file(path).items[428].points == ("Style",)
    assert read_prompt_file(path).repairs == ()
    published = read_prompt_file(path, en_variant="published")
    assert published.items[428].points == ("Style", "Logical Reasoning")
    assert len(published.items[428].descriptions) == 2
    assert published.differences == ()
    assert "428" in published.repairs[0]
    assert "Pref-GRPO" in published.repairs[0]


def test_a_copy_with_the_point_serves_both_variants(tmp_path: Path) -> None:
    rows = {428: ("a prompt", record(["Style", "Logical Reasoning"], descriptions=["pencil", "theirs"]))}
    path = write(tmp_path / "prompts.csv", rows)
    published = read_prompt_file(path, en_variant="published")
    assert published.items[0].descriptions == ("pencil", "theirs")
    assert published.repairs == ()
    head = read_prompt_file(path)
    assert (head.items[0].points, head.items[0].descriptions) == (("Style",), ("pencil",))
    assert "left out" in head.repairs[0]


def test_another_version_of_a_file_is_told(tmp_path: Path) -> None:
    path = whole_file(tmp_path / "prompts.csv", "zh", long=False)
    path.write_text(path.read_text(encoding="utf-8").replace("属性-颜色", "属性-形状", 1), encoding="utf-8")
    assert len(read_prompt_file(path).differences) == 2


def test_a_part_of_a_file_is_told(tmp_path: Path) -> None:
    path = write(tmp_path / "prompts.csv", {0: ("a panda in Egypt", record(POINTS))})
    file = read_prompt_file(path)
    assert file.items[0].points == ("Style", "World Knowledge", "Attribute - Quantity")
    assert "1 prompts" in file.differences[0]


@settings(max_examples=25, deadline=None)
@given(
    prompt=texts(OTHERS, 40).map("a{}".format),
    points=st.lists(st.sampled_from(LABELS["zh"]), min_size=1, max_size=6),
    suffix=st.sampled_from(["_zh", ""]),
)
def test_any_row_comes_back_as_it_was_written(
    tmp_path_factory: pytest.TempPathFactory, prompt: str, points: list[str], suffix: str
) -> None:
    path = tmp_path_factory.mktemp("rows") / "prompts.csv"
    descriptions = [f'"{prompt}" {number}, "" \\' for number in range(len(points))]
    (item,) = read_prompt_file(write(path, {5: (prompt, record(points, "zh", descriptions))}, suffix)).items
    assert (item.index, item.prompt, list(item.points)) == (5, prompt, points)
    assert list(item.descriptions) == descriptions


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (record(["Styl"]), "did you mean 'Style'"),
        (record(["Style"], descriptions=["a", "b"]), "1 test points have 2 descriptions"),
        (record([]), "list of texts"),
        ('["Style"]', "JSON object"),
        ('{"Testpoints": ["Style" "Style"]}', "not JSON"),
        ('{"Testpoints": ["Style"]}', "Testpoint Description"),
        ('{"Testpoints": ["Grammar - Negation" "Attribute - Color" 3]}', "not JSON"),
    ],
)
def test_bad_rows_are_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        read_prompt_file(write(tmp_path / "prompts.csv", {17: ("a prompt", text)}))
    assert "index 17" in str(caught.value)


def test_bad_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="CodeGoat24/UniGenBench"):
        read_prompt_file(tmp_path / "missing.csv")
    with pytest.raises(ValueError, match=r"not a \.csv file"):
        read_prompt_file(tmp_path / "prompts.txt")
    other = tmp_path / "other.csv"
    other.write_text("index,text\n1,hello\n")
    with pytest.raises(ValueError, match="index, text"):
        read_prompt_file(other)
    other.write_bytes(b"index,prompt_en,sub_dims_en\n\xff\xfe,\n")
    with pytest.raises(ValueError, match="UTF-8"):
        read_prompt_file(other)
    other.write_text("index,prompt_en,sub_dims_en\nseven,hello,{}\n")
    with pytest.raises(ValueError, match="whole number"):
        read_prompt_file(other)
    good = record(["Style"]).replace('"', '""')
    other.write_text(f'index,prompt_en,sub_dims_en\n3,a,"{good}"\n3.0,b,"{good}"\n')
    with pytest.raises(ValueError, match="index 3 occurs 2 times"):
        read_prompt_file(other)
    with pytest.raises(ValueError, match="head or published"):
        read_prompt_file(other, en_variant="new")  # type: ignore[arg-type]


# ---- result files ----------------------------------------------------------------------------------------------------


def judged(reply: Reply | None = None, index: int = 3) -> Judged:
    return Judged(index=index, prompt='a "quoted" prompt', points=tuple(POINTS), output="raw, reply",
                  reply=reply, image="m/3_0.png")  # fmt: skip


def test_the_result_file_has_the_published_form(tmp_path: Path) -> None:
    rows = [judged(Reply(["a", "b", "it's"], [1, 1, 0])), judged()]
    path = tmp_path / "results.csv"
    path.write_text(results_text(rows), encoding="utf-8")
    with path.open(newline="") as stream:
        read = list(csv.DictReader(stream))
    assert list(read[0]) == ["index", "prompt", "testpoint", "output", "result_json", "img_path"]
    assert read[0]["testpoint"] == "['Style', 'World Knowledge', 'Attribute - Quantity']"
    assert json.loads(read[0]["result_json"]) == {
        "prompt": 'a "quoted" prompt', "testpoint": POINTS, "analysis": ["a", "b", "it's"], "score": [1, 1, 0],
    }  # fmt: skip
    assert read[1]["result_json"] == "null"


def test_what_json_does_not_know_is_kept_as_text() -> None:
    assert "{1}" in results_text([judged(Reply(["a", "b", "c"], [1, {1}, b"0"]))])


def test_the_summary_rounds_to_four_digits() -> None:
    summary = json.loads(summary_text(aggregate(ROWS)))
    assert summary["primary_dimensions"]["Attribute"] == {"correct": 3, "total": 6, "accuracy": 0.5}
    assert summary["sub_dimensions"]["Attribute - Quantity"] == {"correct": 1, "total": 3, "accuracy": 0.3333}
