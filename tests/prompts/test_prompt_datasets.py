"""Prompts of datasets in folders, as the library `datasets` reads them without a network."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from flowrl.config.train import resolve_path
from flowrl.prompts.loading import Prompt, eval_items, load_prompts, load_sources, read_prompts


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No progress bars, and the library's copies under the test's folder."""
    import datasets  # type: ignore[import-untyped]

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()
    yield
    datasets.enable_progress_bars()


def image(red: int) -> Image.Image:
    return Image.new("RGB", (8, 6), (red, 0, 0))


def reds(row: Prompt) -> list[int]:
    return [round(float(one[0, 0, 0]) * 255) for one in load_sources(row)]


def editing(**more: list[object]) -> Any:
    import datasets

    columns = {"prompt": ["x", "x", "y"], "source": [image(10), image(20), image(10)], "n": [1, 2, 3]}
    return datasets.Dataset.from_dict(columns | more)


def test_a_folder_of_jsonl_reads_like_the_file(tmp_path: Path) -> None:
    image(30).save(tmp_path / "a.png")
    rows: list[dict[str, Any]] = [
        {"prompt": "x", "include": [{"class": "cup", "n": 1}, {"class": "cat", "color": "red"}], "source": "../a.png"},
        {"prompt": "y", "negative_prompt": "blur", "when": "2024-05-01"},
    ]
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "p.jsonl").write_text("\n".join(map(json.dumps, rows)))
    read = read_prompts(f"dataset:{folder}", "default")
    rows[1]["when"] = "2024-05-01 00:00:00"  # the library reads a date, which is written as text
    assert [row.metadata for row in read] == rows
    assert read[0] == read_prompts(folder / "p.jsonl", "default")[0]
    assert [row.negative for row in read] == ["default", "blur"]
    assert reds(read[0]) == [30]


def test_a_folder_of_csv_and_its_splits(tmp_path_factory: pytest.TempPathFactory) -> None:
    tmp_path = tmp_path_factory.mktemp("rows")  # the library finds splits by names in the path, this test's too
    for split, prompts in (("train", "a\nb\nc"), ("test", "d")):
        (tmp_path / f"{split}.csv").write_text(f"prompt\n{prompts}\n")
    for text, expected in ((f"dataset:{tmp_path}", "abc"), (f"dataset:{tmp_path}:test", "d"),
                           (f"dataset:{tmp_path}:train[:2]", "ab")):  # fmt: skip
        assert "".join(row.text for row in load_prompts(text, resolve=resolve_path)) == expected


def test_images_in_columns_become_files_with_names_of_their_content(tmp_path: Path) -> None:
    table = editing(image=[image(99)] * 3, when=["1", None, "3"], sound=[b"1", b"2", b"3"])
    table.save_to_disk(str(tmp_path / "saved"))
    (tmp_path / "parquet").mkdir()
    table.to_parquet(str(tmp_path / "parquet" / "rows.parquet"))
    saved, parquet = (read_prompts(f"dataset:{tmp_path / name}") for name in ("saved", "parquet"))
    assert saved == parquet
    assert [reds(row) for row in saved] == [[10], [20], [10]]
    assert saved[0].sources == saved[2].sources
    assert [Path(row.sources[0]).name for row in saved] == [row.metadata["source"] for row in saved]
    assert saved[1].metadata == {"prompt": "x", "source": saved[1].metadata["source"], "n": 2}  # nulls, other media go
    assert [item.prompt_id for item in eval_items(saved)] == [0, 1, 2]
    assert str(Path(saved[0].sources[0]).parent) not in saved[0].noise_name


def test_lists_of_images_and_rows_without_one(tmp_path: Path) -> None:
    import datasets

    columns = {"prompt": ["x", "y", "z"], "sources": [[image(1), image(2)], [], None]}
    columns["reference"] = [None, image(3), None]
    datasets.Dataset.from_dict(columns).save_to_disk(str(tmp_path / "saved"))
    rows = read_prompts(f"dataset:{tmp_path / 'saved'}")
    assert [reds(row) for row in rows] == [[1, 2], [], []]
    assert [len(row.references) for row in rows] == [0, 1, 0]


def test_a_folder_of_images_with_their_prompts_is_for_editing(tmp_path: Path) -> None:
    folder = tmp_path / "images"
    folder.mkdir()
    for red in (1, 2):
        image(red).save(folder / f"{red}.png")
    lines = [{"file_name": f"{red}.png", "prompt": f"edit {red}"} for red in (2, 1)]
    (folder / "metadata.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert sorted((row.text, reds(row)) for row in read_prompts(f"dataset:{folder}")) == [
        ("edit 1", [1]),
        ("edit 2", [2]),
    ]


def test_splits_of_a_saved_dataset(tmp_path: Path) -> None:
    import datasets

    table = datasets.Dataset.from_dict({"prompt": ["a"]})
    held_out = datasets.Dataset.from_dict({"prompt": ["b"]})
    datasets.DatasetDict({"train": table, "test": held_out}).save_to_disk(str(tmp_path / "both"))
    table.save_to_disk(str(tmp_path / "one"))
    for name, text in (("both", "a"), ("both:test", "b"), ("one", "a")):
        assert [row.text for row in read_prompts(f"dataset:{tmp_path / name}")] == [text]
    with pytest.raises(ValueError, match="there is no split 'dev', only train, test"):
        read_prompts(f"dataset:{tmp_path / 'both'}:dev")
    with pytest.raises(ValueError, match="saved as one table without splits: leave out ':test'"):
        read_prompts(f"dataset:{tmp_path / 'one'}:test")


def test_datasets_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    contents = {"text": '{"text": "a"}', "blank": '{"prompt": "a"}\n{"prompt": " "}', "broken": '{"prompt": "a"\n',
                "absent": '{"prompt": "a", "source": "no.png"}'}  # fmt: skip
    for name, content in contents.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "p.jsonl").write_text(content)
    (tmp_path / "empty").mkdir()
    cases = {
        str(tmp_path / "text"): "text: needs a column 'prompt' of text, got text",
        str(tmp_path / "blank"): "blank, row 1: needs text under 'prompt'",
        str(tmp_path / "absent"): "absent, row 0: source names 'no.png', which is not there: looked for",
        str(tmp_path / "broken"): "JSON",
        str(tmp_path / "empty"): "cannot be read",
        f"{tmp_path / 'text'}:dev": "Unknown split",
        str(tmp_path / "text" / "p.jsonl"): "is a file; give the folder that holds it",
        str(tmp_path / "none"): "there is no folder",
        "./none": "there is no folder",
        "org/none": "dataset:org/none: the dataset cannot be read",
        "": "write dataset:ID_OR_FOLDER or dataset:ID_OR_FOLDER:SPLIT",
        "org/name:": "write dataset:ID_OR_FOLDER or dataset:ID_OR_FOLDER:SPLIT",
    }
    for text, said in cases.items():
        with pytest.raises(ValueError, match="dataset:") as error:
            read_prompts(f"dataset:{text}")
        assert said in str(error.value)


def test_bytes_that_are_no_image_are_refused_with_their_row(tmp_path: Path) -> None:
    import datasets

    features = datasets.Features({"prompt": datasets.Value("string"), "source": datasets.Image()})
    columns = {"prompt": ["x", "y"], "source": [image(1), {"bytes": b"none", "path": None}]}
    datasets.Dataset.from_dict(columns, features=features).save_to_disk(str(tmp_path / "saved"))
    with pytest.raises(ValueError, match="saved, row 1: column 'source': the bytes are not an image"):
        read_prompts(f"dataset:{tmp_path / 'saved'}")


def test_without_the_library_the_error_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match=r"pip install -e '\.\[data\]'"):
        read_prompts(f"dataset:{tmp_path}")
