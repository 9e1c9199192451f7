"""`flowrl eval --compare`: finished evaluations to tables, ranks, a page; and what is not compared."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from evaluation_folders import empty, flowrl_eval, mixed, right, write_folder

from flowrl.evaluation.board.comparable import group_entries
from flowrl.evaluation.board.finished import find_entries, values_of
from flowrl.evaluation.board.standings import rank
from flowrl.pages import board_page
from flowrl.pages.strips import Room
from flowrl.rendering.markup import DASH
from flowrl.statistics.crossed import crossed_estimate
from flowrl.statistics.means import stratified_score

DRAWN = {
    "format": 1, "model": "toy", "num_steps": 20, "guidance_scale": 4.5, "grid": "diffusers", "dtype": "float32",
    "seed": 0, "samples": 4, "num_prompts": 6, "prompts": "0123456789abcdef",
}  # fmt: skip


def mostly(record: dict[str, Any], sample: int) -> np.ndarray:
    """Right but for the last of four."""
    return right(record, sample) if sample < 3 else empty(record, sample)


KINDS = {"good": right, "mostly": mostly, "half": mixed, "none": empty}


def evaluation(place: Path, name: str, *, samples: int = 4, **drawn: Any) -> Path:
    """A finished evaluation of images of this kind, as if this toolkit had drawn them."""
    images = write_folder(place / "images" / name, image=KINDS[name.partition("-")[0]], samples=samples)
    (images / "drawn.json").write_text(json.dumps({**DRAWN, "samples": samples, "fingerprint": name, **drawn}))
    assert flowrl_eval("--images", images, "--out", place / name) == 0
    return place / name


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Evaluations of four models under the same conditions."""
    place = tmp_path_factory.mktemp("four")
    for name in KINDS:
        evaluation(place, name)
    return place


def board(out: Path, *results: object, across: tuple[str, ...] = ()) -> dict[str, Any]:
    """The content of leaderboard.json."""
    flags = [word for name in across for word in ("--across", name)]
    assert flowrl_eval("--compare", *results, *flags, "--out", out) == 0
    found: dict[str, Any] = json.loads((out / "leaderboard.json").read_text())
    return found


def changed(folder: Path, place: Path, **facts: Any) -> Path:
    """A copy of a result with other facts."""
    copy = Path(shutil.copytree(folder, place))
    found = json.loads((copy / "result.json").read_text())
    found["facts"] |= facts
    found["names"] = [place.name]
    (copy / "result.json").write_text(json.dumps(found))
    return copy


def test_a_board_of_four(four: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = board(tmp_path / "out", *(four / name for name in ("half", "none", "good", "mostly")))
    (table,) = found["tables"]
    assert (table["benchmark"], table["metric"], table["paired_images"]) == ("geneval", "score", 24)
    assert table["shares_start_noise"]
    assert [line["name"] for line in table["standings"]] == ["good", "mostly", "half", "none"]
    assert [line["score"]["mean"] for line in table["standings"]] == pytest.approx([1.0, 0.75, 0.5, 0.0])
    ranks = [(line["rank"]["least"], line["rank"]["largest"]) for line in table["standings"]]
    assert ranks[0][0] == 1
    assert ranks[3] == (4, 4)  # always wrong, where all others are right at least half of the time
    rows = {entry.label: entry.values["score"].rows for entry in find_entries([str(four)])}
    alone = stratified_score(rows["half"], base=rows["good"])
    change = table["standings"][2]["difference_to_first"]
    assert change["mean"] == pytest.approx(alone.mean)
    assert change["low"] <= alone.low <= alone.high <= change["high"]
    assert change["high"] - alone.mean == pytest.approx(table["factor_for_all_pairs"] * (alone.high - alone.mean))
    printed = capsys.readouterr().out.split("\nwrote ")[0].splitlines()
    assert max(map(len, printed)) <= 80
    assert re.search(
        rf"^  good +1 to \d +1\.000 +0\.\d{{3}} to 1\.000 +{DASH} +{DASH}$", "\n".join(printed), re.MULTILINE
    )
    markdown = (tmp_path / "out" / "leaderboard.md").read_text()
    assert "| model | rank | score | 95 % | to first | 95 % of all pairs |\n|:--|--:" in markdown
    assert found["command"] in markdown


def test_the_page_runs_one_script_and_links_to_images(four: Path, tmp_path: Path) -> None:
    board(tmp_path / "out", four / "good", four / "half")
    page = (tmp_path / "out" / "leaderboard.html").read_text()
    (script,) = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'" in page
    assert not re.findall(r'src="(?!data:)', page)
    for link in re.findall(r'href="([^"#]+)"', page):
        assert (tmp_path / "out" / link).is_file(), link
    assert len(re.findall(r'<a href="[^"]*\.png"><img', page)) == 2 * (4 + 4)  # ahead, and evenly; behind there is none
    assert "furthest above the others" in page
    assert "furthest below" not in page
    assert '<data value="0.5">0.500</data>' in page


def test_embedded_images_are_bounded(four: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(board_page, "Room", lambda: Room(left=3))
    board(tmp_path / "out", four / "good", four / "half")
    page = (tmp_path / "out" / "leaderboard.html").read_text()
    assert page.count("<img") == 3
    assert len(re.findall(r'\.png">png</a>', page)) == 13


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"num_steps": 8}, "num_steps 8, not 20"),
        ({"height": 64, "first_block_cache": 0.1}, "height 64, not none; first_block_cache 0.1, not none"),
        ({"samples": 2}, "2 images per prompt, not 4"),
    ],
)
def test_other_conditions_lie_apart(four: Path, tmp_path: Path, change: dict[str, Any], said: str) -> None:
    other = evaluation(tmp_path, "mostly-2", **change)
    first, second = board(tmp_path / "out", four / "good", four / "half", other)["tables"]
    assert [len(table["standings"]) for table in (first, second)] == [2, 1]
    assert first["apart_because"] is None
    assert second["apart_because"] == said
    for name in ("leaderboard.html", "leaderboard.md"):
        assert said in (tmp_path / "out" / name).read_text()


def test_other_judges_prompts_and_versions_lie_apart(four: Path, tmp_path: Path) -> None:
    judge = changed(four / "half", tmp_path / "judge", judge="shapes-2")
    images = write_folder(tmp_path / "three", image=mixed, samples=4)
    for place in sorted(images.iterdir())[3:]:
        shutil.rmtree(place)
    (images / "drawn.json").write_text(json.dumps({**DRAWN, "num_prompts": 3}))
    assert flowrl_eval("--images", images, "--out", tmp_path / "prompts") == 0
    old = changed(four / "half", tmp_path / "old")
    found = json.loads((old / "result.json").read_text())
    (old / "result.json").write_text(json.dumps({**found, "version": "0.0.1", "images": {}}))
    tables = board(tmp_path / "out", four / "good", four / "mostly", judge, tmp_path / "prompts", old)["tables"]
    reasons = [table["apart_because"] for table in tables]
    assert reasons[1] == "another judge: shapes-2, not shapes-1; judge's version none, not 1"
    assert reasons[2] == "other prompts (3, of which 3 are among those 6)"
    assert re.fullmatch(r"images of another program, whose sampling is not known; flowrl 0\.0\.1, not .+", reasons[3])


def test_conditions_may_differ_where_that_is_asked_for(four: Path, tmp_path: Path) -> None:
    other = evaluation(tmp_path, "mostly-2", num_steps=8)
    (table,) = board(tmp_path / "out", four / "good", other, across=("num_steps",))["tables"]
    assert table["conditions"]["num_steps"] == "20 or 8"
    with pytest.raises(
        ValueError, match=r"--across: .* 'steps' \(did you mean 'num_steps'\?\); allowed: dtype, flowrl,"
    ):
        flowrl_eval("--compare", four, "--across", "steps", "--out", tmp_path / "out")


def test_other_prompts_are_compared_on_those_that_are_shared(four: Path, tmp_path: Path) -> None:
    """Three tasks of six, of which the two models have the same: what each scores elsewhere counts for neither."""
    images = write_folder(tmp_path / "three", image=mixed, samples=2)
    for place in sorted(images.iterdir())[3:]:
        shutil.rmtree(place)
    (images / "drawn.json").write_text(json.dumps({**DRAWN, "num_prompts": 3, "samples": 2}))
    assert flowrl_eval("--images", images, "--out", tmp_path / "half") == 0
    given = (four / "mostly", tmp_path / "half")
    (table,) = board(tmp_path / "out", *given, across=("prompts", "images per prompt"))["tables"]
    assert table["paired_images"] == 6
    first, second = table["standings"]
    assert (first["score"]["mean"], second["score"]["mean"]) == pytest.approx((1.0, 0.5))  # of each prompt's first two
    assert second["difference_to_first"]["mean"] == pytest.approx(-0.5)
    assert table["notes"] == ["Scores and differences are of the 6 samples that all of these results have."]


def test_other_start_noise_is_compared_by_prompts(four: Path, tmp_path: Path) -> None:
    other = evaluation(tmp_path, "mostly-2", seed=1)
    (table,) = board(tmp_path / "out", four / "good", other)["tables"]
    assert not table["shares_start_noise"]
    assert "start noise is not known to be shared" in (tmp_path / "out" / "leaderboard.md").read_text()


def test_trainings_of_one_method_are_one_row(four: Path, tmp_path: Path) -> None:
    (table,) = board(tmp_path / "out", f"ours={four / 'good'},{four / 'half'}", four / "none")["tables"]
    ours, none = table["standings"]
    assert (ours["name"], ours["trainings"], none["trainings"]) == ("ours", 2, 1)
    rows = {entry.label: entry.values["score"].rows for entry in find_entries([str(four)])}
    expected = crossed_estimate([rows["good"], rows["half"]]).interval
    assert (ours["score"]["low"], ours["score"]["high"]) == pytest.approx((expected.low, expected.high))
    assert ours["score"]["mean"] == 0.75
    assert none["difference_to_first"]["mean"] == -0.75


def test_a_folder_of_several_models_is_one_method(four: Path, tmp_path: Path) -> None:
    """As the command writes it: each model in its own folder, their base beside these."""
    method = tmp_path / "method"
    for name in ("good", "half"):
        flags = ("--baseline", four / "images" / "none", "--out", method / name)
        assert flowrl_eval("--images", four / "images" / name, *flags) == 0
    shutil.move(method / "good" / "base", method / "base")
    shutil.rmtree(method / "half" / "base")
    whole = json.loads((four / "good" / "result.json").read_text())
    (method / "result.json").write_text(json.dumps({**whole, "names": ["2 models"]}))
    entries = find_entries([str(method)])
    assert [(entry.label, entry.pool) for entry in entries] == [("good", "method"), ("half", "method"), ("none", "")]
    (table,) = board(tmp_path / "out", method)["tables"]
    assert [(line["name"], line["trainings"]) for line in table["standings"]] == [("method", 2), ("none", 1)]


def test_trainings_are_compared_whatever_their_numbers_and_in_no_order(four: Path, tmp_path: Path) -> None:
    names = [evaluation(tmp_path, f"none-{seed}", seed=seed) for seed in range(3)]
    first = [four / "good", four / "mostly"]
    found = []
    for order in (first, first[::-1]):
        given = [f"a={','.join(map(str, order))}", f"b={','.join(map(str, names))}"]
        (table,) = board(tmp_path / order[0].name, *given)["tables"]
        assert [line["name"] for line in table["standings"]] == ["a", "b"]
        found.append(table["standings"][1]["difference_to_first"])
    assert found[0] == pytest.approx(found[1])
    assert -1.0 <= found[0]["low"] < found[0]["mean"] < found[0]["high"] <= 1.0


def test_a_base_that_results_share_stands_once(four: Path, tmp_path: Path) -> None:
    base = four / "images" / "none"
    for name in ("good", "half"):
        arguments = ("--images", four / "images" / name, "--baseline", base, "--out", tmp_path / name)
        assert flowrl_eval(*arguments) == 0
    (table,) = board(tmp_path / "out", tmp_path / "good", tmp_path / "half")["tables"]
    assert [line["name"] for line in table["standings"]] == ["good", "half", "none"]
    (table,) = board(tmp_path / "out", tmp_path / "good", four / "none")["tables"]
    assert [line["results"][0]["side"] for line in table["standings"]] == ["model", "model"]


def test_two_benchmarks_and_a_number_that_is_no_mean_over_images(four: Path, tmp_path: Path) -> None:
    for name in ("mostly", "half"):
        arguments = ("--benchmark", "diversity", "--option", "features=pixels", "--out", tmp_path / name)
        assert flowrl_eval("--images", four / "images" / name, *arguments) == 0
    found = board(tmp_path / "out", four / "mostly", four / "half", tmp_path / "mostly", tmp_path / "half")
    tables = {table["benchmark"]: table for table in found["tables"]}
    assert tables["diversity"]["paired_images"] == 6  # prompts
    assert tables["diversity"]["standings"][1]["difference_to_first"]["low"] is not None
    page = (tmp_path / "out" / "leaderboard.html").read_text()
    assert 'id="overview"' in page
    assert 'href="#table-1"' in page


def test_rows_that_do_not_give_the_number_leave_all_ranks_open(four: Path, tmp_path: Path) -> None:
    copies = []
    for name in ("good", "half"):
        copy = changed(four / name, tmp_path / name)
        found = json.loads((copy / "result.json").read_text())
        (copy / "result.json").write_text(json.dumps({**found, "metrics": {"eval/geneval/other": 0.1}}))
        copies.append(copy)
    (table,) = board(tmp_path / "out", *copies)["tables"]
    assert table["metric"] == "other"
    assert [line["rank"]["largest"] for line in table["standings"]] == [2, 2]
    assert "do not give this number" in table["notes"][0]


def test_images_without_a_value_count_in_no_difference() -> None:
    rows = [{"prompt": str(k // 2), "values": {"clip": None if k == 3 else k / 8}} for k in range(8)]
    mean = float(np.mean([k / 8 for k in range(8) if k != 3]))
    (values,) = values_of(rows, {"clip": mean}).values()
    assert [(row.prompt, row.sample) for row in values.rows][2:4] == [("1", 0), ("2", 0)]
    assert values_of(rows, {"clip": mean + 0.01}) == {}


def test_scores_by_name_and_tasks_of_the_first() -> None:
    """Cases are told apart by their keys, where one text stands for several; a task has its own metric."""
    rows = [
        {"task": task, "prompt": "make it red", "key": f"{task}{k}", "scores": {"overall": 2.0 * k, "two words": k / 4}}
        for task in ("a b", "c") for k in range(4)
    ]  # fmt: skip
    found = values_of(rows, {"overall": 3.0, "two_words": 0.375, "a_b": 3.0, "c": 9.0})
    assert {name: values.part for name, values in found.items()} == {"overall": False, "a_b": True, "two_words": False}
    assert len({row.prompt for row in found["overall"].rows}) == 8


def test_test_points_are_paired_by_prompts() -> None:
    points = ["Style", "World Knowledge"]
    rows = [{"index": k, "prompt": str(k), "points": points, "met": [k % 2 == 0, True]} for k in range(6)]
    (values,) = values_of(rows, {"overall": 0.75}).values()
    assert len(values.points) == 6
    assert values_of(rows, {"overall": 0.8}) == {}


def test_what_cannot_be_compared_is_said(four: Path, tmp_path: Path) -> None:
    (tmp_path / "nothing").mkdir()
    broken = changed(four / "half", tmp_path / "broken")
    (broken / "result.json").write_text("{")
    foreign = changed(four / "half", tmp_path / "foreign")
    (foreign / "result.json").write_text('{"benchmark": "geneval"}')
    bare = changed(four / "half", tmp_path / "bare")
    (bare / "model" / "rows.jsonl").unlink()
    copy = Path(shutil.copytree(four / "good", tmp_path / "copy"))
    other = evaluation(tmp_path, "mostly-2", num_steps=8)
    good = four / "good"
    for given, words in {
        (tmp_path / "gone",): "there is no .*gone: give the folder of a finished",
        (tmp_path / "nothing",): "nothing holds no result.json, and no folder within it does",
        (broken, good): "broken/result.json: not valid JSON.*run the evaluation again, or leave it out",
        (foreign, good): "foreign/result.json lacks names, metrics, intervals, facts: it is no result of `flowrl eval`",
        (bare, good): "there is no .*rows.jsonl, the verdicts of a finished evaluation",
        (good,): "is the only result: name two or more",
        (good, four): "is named twice .*one result counts once",
        (good, copy): "hold the same result",
        (good, other): r"no two of these 2 results can be compared: geneval, mostly-2: num_steps 8, not 20. Conditions",
        ("name=", good): "are written NAME=FOLDER,FOLDER",
        (good / "page.html", good): "is not a result.json",
    }.items():
        with pytest.raises(ValueError, match=words):
            flowrl_eval("--compare", *given, "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    for flags, words in {
        ("--compare", four, "--steps", 3): "--compare reads finished evaluations, so --steps has no place beside it",
        ("--across", "dtype"): "--across says what may differ under --compare",
    }.items():
        with pytest.raises(ValueError, match=words):
            flowrl_eval(*flags)


def test_files_of_others_stay(four: Path, tmp_path: Path) -> None:
    (tmp_path / "leaderboard.md").write_text("mine")
    with pytest.raises(ValueError, match=r"will not be overwritten: give another --out"):
        board(tmp_path, four)
    assert (tmp_path / "leaderboard.md").read_text() == "mine"
    board(tmp_path / "own", four)
    board(tmp_path / "own", four)


def test_a_group_knows_its_entries(four: Path) -> None:
    (group,) = group_entries(find_entries([str(four)]))
    assert group.shares_noise
    assert rank(group).standings[0].name == "good"
