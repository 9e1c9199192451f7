"""Readers of benchmarks' files: what is of another version or benchmark, twice there or no text is refused by place."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from judged_files import write_geneval2, write_tiif, write_wise

from flowrl.benchmarks import dpg_bench, t2i_compbench, vbench
from flowrl.benchmarks.judged import geneval2, tiif_bench, wise_bench
from flowrl.benchmarks.unigenbench.items import read_prompt_file

HEADER = ("item_id", "text", "proposition_id", "dependency", "tuple", "question_natural_language")
ROW = ("a", "a cat", 1, "0", "entity (cat)", "A cat?")


def write_csv(path: Path, rows: Sequence[Sequence[Any]]) -> Path:
    with path.open("w", newline="", encoding="utf-8") as stream:
        csv.writer(stream).writerows(rows)
    return path


def test_wise_refuses_the_other_versions_ids(tmp_path: Path) -> None:
    legacy = write_wise(tmp_path, [1, 530, 650, 870])
    verified = write_wise(tmp_path, [1, 530, 650, 870], verified=True)
    merged = [record for file in sorted(verified.glob("*.json")) for record in json.loads(file.read_text())]
    (tmp_path / "cases.json").write_text(json.dumps(merged))
    assert len(wise_bench.WISE_VERIFIED.read(str(tmp_path / "cases.json"), None).cases) == 4
    said = r"cases.json, record \d: prompt_id \d+ is of .* other version.* `benchmark` wise_verified takes the latter"
    with pytest.raises(ValueError, match=said):
        wise_bench.WISE.read(str(tmp_path / "cases.json"), None)
    (tmp_path / "old.json").write_text((legacy / "spatio-temporal_reasoning.json").read_text())
    with pytest.raises(ValueError, match=r"other version.* `benchmark` wise takes the latter"):
        wise_bench.WISE_VERIFIED.read(str(tmp_path / "old.json"), None)
    for name, protocol in (
        ("cultural_common_sense", wise_bench.WISE_VERIFIED),
        ("cultural_common_sense_verified", wise_bench.WISE),
    ):
        file = (verified if "verified" in name else legacy) / f"{name}.json"  # of 400 ids that both versions have
        with pytest.raises(ValueError, match="is a file of the other version"):
            protocol.read(str(file), None)
    with pytest.raises(ValueError, match=r"give the folder WISE_legacy/data .*`benchmark` wise_verified takes"):
        wise_bench.WISE.read(str(verified), None)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"Category": "Sports"}, "record 0: Category must be one of cultural knowledge, .* got 'Sports'"),
        ({"prompt_id": 1001}, "record 0: needs prompt_id 1 to 1000"),
        ({"prompt_id": True}, "record 0: needs prompt_id 1 to 1000"),
        ({"Prompt": "\u200b"}, r"record 0: the prompt has nothing that is seen \(U\+200B\)"),
    ],
)
def test_wise_refuses_records_of_another_kind(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    record = {"prompt_id": 1, "Prompt": "p", "Explanation": "e", "Category": "Cultural knowledge", "Subcategory": "y"}
    (tmp_path / "w.json").write_text(json.dumps([record | change]))
    with pytest.raises(ValueError, match=said):
        wise_bench.WISE.read(str(tmp_path / "w.json"), None)


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([HEADER, ROW, ROW], r"dpg.csv, row 3: an item has one id, .* each proposition_id once, got item 'a' with 1"),
        ([HEADER, ROW, ("a", "a dog", 2, "0", "entity (dog)", "A dog?")], "row 3: an item has one id, one text"),
        ([HEADER, ROW, ("a", "a cat", 2, "0")], "row 3: has 4 cells for 6 columns"),
        ([HEADER, ("a", "x" * 140_000, 1, "0", "e (x)", "?")], r"dpg.csv, row 2: cannot be read as CSV \(field larger"),
        ([HEADER], "dpg.csv: has no row below its header: take dpg_bench/dpg_bench.csv"),
        ([HEADER, ("a", "\x1bcat", 1, "0", "e (x)", "?")], r"row 2: the prompt holds U\+001B"),
        ([HEADER[:-1], ROW[:-1]], "lacks the column question_natural_language"),
        ([("prompt",), ("a",)], "lacks the columns item_id, text"),
    ],
)
def test_dpg_refuses_by_row(tmp_path: Path, rows: Sequence[Sequence[Any]], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        dpg_bench.read_items(write_csv(tmp_path / "dpg.csv", rows), skip_first=False)


def test_tables_of_other_encodings_and_with_empty_rows(tmp_path: Path) -> None:
    path = write_csv(tmp_path / "dpg.csv", [HEADER, ROW, ("",) * 6, (), ("a", "a cat", 2, "1", "e (x)", "?")])
    assert [question.id for question in dpg_bench.read_items(path, skip_first=False)[0].questions] == [1, 2]
    with pytest.raises(ValueError, match="has one row, which the published loader leaves out"):
        dpg_bench.read_items(write_csv(path, [HEADER, ROW]))
    path.write_bytes(path.read_bytes().replace(b"a cat", "ein Kätzchen".encode("latin-1")))
    for read in (dpg_bench.read_items, read_prompt_file):
        with pytest.raises(ValueError, match=r"dpg.csv: cannot be read as UTF-8"):
            read(path)


def test_vbench_refuses_lists_of_other_benchmarks(tmp_path: Path) -> None:
    path = tmp_path / "VBench2_full_info.json"
    path.write_text(json.dumps([{"prompt_en": "a", "dimension": ["color", "Human_Anatomy"]}]))
    with pytest.raises(ValueError, match=r"entry 0: the dimension 'Human_Anatomy' is not one of VBench's 16"):
        vbench.read_entries(path, ["color"])


def test_tiif_and_geneval2_refuse_what_is_twice_or_no_text(tmp_path: Path) -> None:
    place = write_tiif(tmp_path)
    beside = place.with_name("testmini_eval_prompts")
    for folder, name in ((place, "text{}_prompts.jsonl"), (beside, "text{}_eval_prompts.jsonl")):
        (folder / name.format("_copy")).write_text((folder / name.format("")).read_text())
    with pytest.raises(ValueError, match="two files hold prompts of the type 'text'"):
        tiif_bench.TIIF_SHORT.read(str(place), None)
    path = write_geneval2(tmp_path)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text(json.dumps(lines[0] | {"prompt": "\ufeffa cat"}))
    with pytest.raises(ValueError, match=r"record 1: the prompt begins with U\+FEFF"):
        geneval2.GENEVAL2.read(str(path), None)


@pytest.mark.parametrize("row", [{"question_id": 1.5, "answer": 1}, {"question_id": 1, "answer": "nan"}])
def test_results_of_t2i_compbench_are_numbers(tmp_path: Path, row: dict[str, Any]) -> None:
    path = tmp_path / "vqa_result.json"
    path.write_text(json.dumps([row]))
    with pytest.raises(ValueError, match=r"vqa_result.json: needs a list of"):
        t2i_compbench.read_results(path)
