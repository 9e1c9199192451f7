"""Prompt files: what they may hold, and what of them is refused with its line."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from flowrl.prompts.loading import read_prompts
from flowrl.prompts.prompt_files import Prompt, read_file


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Images, a file that is called one, and a video, whose content nobody looks at here."""
    (tmp_path / "in").mkdir()
    for name in ("a.png", "b;c.png", "in/d.jpg"):
        Image.new("RGB", (4, 3)).save(tmp_path / name)
    Image.new("F", (4, 3)).save(tmp_path / "float.tiff")
    (tmp_path / "text.png").write_text("no image")
    (tmp_path / "clip.mp4").write_bytes(b"...")
    return tmp_path


def write(folder: Path, name: str, content: str) -> Path:
    path = folder / name
    path.write_text(content, encoding="utf-8")
    return path


def test_a_text_file_has_a_prompt_a_line(tmp_path: Path) -> None:
    path = tmp_path / "p.txt"
    path.write_bytes("\ufeffa red circle\r\n\r\n  two squares \nein grüner Stern".encode())
    rows = read_file(path, "blur")
    assert [row.text for row in rows] == ["a red circle", "two squares", "ein grüner Stern"]
    assert [(row.metadata, row.negative) for row in rows] == [({}, "blur")] * 3
    assert rows[0] == Prompt(text="a red circle", metadata={}, negative="blur")


def test_a_jsonl_file_keeps_each_object_whole(tmp_path: Path) -> None:
    records: list[dict[str, Any]] = [{"prompt": "a\u2028b\x85c", "tag": "counting", "include": [1]}, {"prompt": "d"}]
    path = tmp_path / "p.jsonl"
    path.write_text("\n".join(json.dumps(record, ensure_ascii=False) for record in records) + "\n\n", encoding="utf-8")
    rows = read_file(path)
    assert [row.metadata for row in rows] == records
    assert [row.text for row in rows] == ["a\u2028b\x85c", "d"]
    assert [row.noise_name for row in rows] == [row.text for row in rows]


def test_jsonl_rows_name_images_relative_to_their_file(folder: Path) -> None:
    rows = [
        {"prompt": "x", "source": "a.png", "negative_prompt": "blur"},
        {"prompt": "x", "sources": ["in/../b;c.png", str(folder / "a.png")], "references": ["in/d.jpg"]},
        {"prompt": "x", "source_images": ["a.png"], "reference_images": "in/d.jpg"},
        {"prompt": "x", "source_video": "clip.mp4", "source": None, "sources": []},
        {"prompt": "x", "source_video": "clip.mp4", "mask_video": "in/../clip.mp4", "source": "a.png"},
    ]
    path = write(folder, "p.jsonl", "\n".join(map(json.dumps, rows)))
    a, b, d = (str(folder / name) for name in ("a.png", "b;c.png", "in/d.jpg"))
    read = read_file(path, "default")
    assert [row.sources for row in read] == [(a,), (b, a), (a,), (), (a,)]
    assert [row.references for row in read] == [(), (d,), (d,), (), ()]
    clip = str(folder / "clip.mp4")
    assert [row.clips for row in read] == [(), (), (), (clip,), (clip, clip)]
    assert [row.negative for row in read] == ["blur", *["default"] * 4]
    assert read[4].noise_name == '["x", "a.png", "clip.mp4", "in/../clip.mp4"]'
    assert read[4].record == {"prompt": "x", "source_video": clip, "mask_video": clip, "sources": [a]}
    assert [row.metadata for row in read] == rows


def test_relative_files_give_absolute_paths(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(folder, "p.jsonl", '{"prompt": "x", "source": "a.png"}')
    monkeypatch.chdir(folder)
    assert read_file(Path("p.jsonl"))[0].sources == (os.path.abspath("a.png"),)


def test_keys_tell_images_apart_and_do_not_depend_on_the_machine(folder: Path, tmp_path_factory: Any) -> None:
    lines = [
        {"prompt": "x"}, {"prompt": "x", "source": "a.png"}, {"prompt": "x", "source": "in/d.jpg"},
        {"prompt": "x", "sources": ["a.png", "in/d.jpg"]}, {"prompt": "x", "sources": ["in/d.jpg", "a.png"]},
        {"prompt": "x", "source_video": "clip.mp4"}, {"prompt": "y", "source": "a.png"},
    ]  # fmt: skip
    content = "\n".join(map(json.dumps, lines))
    here = [row.noise_name for row in read_file(write(folder, "p.jsonl", content))]
    assert here[0] == "x"
    assert len(set(here)) == len(lines)
    other = tmp_path_factory.mktemp("other") / "deeper"
    folder.rename(other)
    assert [row.noise_name for row in read_file(other / "p.jsonl")] == here
    by_hand = [Prompt(text="x", metadata={}, sources=(f"/{place}/a.png",)) for place in ("home", "scratch")]
    assert by_hand[0].noise_name == by_hand[1].noise_name == here[1]
    assert Prompt(text="x", metadata={}, sources=("/a.png",), videos={"source_video": "/b.gif"}).noise_name != here[1]


def test_references_and_negative_prompts_are_no_part_of_the_key(folder: Path) -> None:
    path = write(folder, "p.jsonl", '{"prompt": "x", "reference": "a.png", "negative_prompt": "blur"}')
    assert read_file(path)[0].noise_name == "x"


def test_a_record_holds_in_another_folder(folder: Path, tmp_path_factory: Any) -> None:
    rows = [{"prompt": "x", "tag": "t"},
            {"prompt": "x", "source": "a.png", "reference": "in/d.jpg", "source_video": "clip.mp4"}]  # fmt: skip
    read = read_file(write(folder, "p.jsonl", "\n".join(map(json.dumps, rows))))
    assert read[0].record == rows[0]
    elsewhere = write(tmp_path_factory.mktemp("run"), "metadata.jsonl", json.dumps(read[1].record))
    (again,) = read_file(elsewhere)
    assert (again.sources, again.references, again.videos) == (read[1].sources, read[1].references, read[1].videos)
    assert again.text == "x"


def test_a_csv_file_has_a_header_and_text_as_metadata(folder: Path) -> None:
    path = write(
        folder, "p.csv",
        "\ufeffprompt, source,references,negative_prompt,count\r\n"
        '"make it ""blue"", please",a.png,,, 3\r\n'
        "\r\n"
        '"two\nlines",,"a.png; in/d.jpg",blur,\n',
    )  # fmt: skip
    first, second = read_file(path, "default")
    assert (first.text, first.negative, first.sources) == (
        'make it "blue", please',
        "default",
        (str(folder / "a.png"),),
    )
    assert first.metadata == {
        "prompt": 'make it "blue", please', "source": "a.png", "references": "", "negative_prompt": "", "count": "3",
    }  # fmt: skip
    assert (second.text, second.negative, second.sources) == ("two\nlines", "blur", ())
    assert second.references == (str(folder / "a.png"), str(folder / "in/d.jpg"))
    assert second.metadata["references"] == "a.png; in/d.jpg"


def test_a_csv_cell_names_one_image_or_a_list(folder: Path) -> None:
    rows = read_file(write(folder, "p.csv", 'prompt,sources\nx,a.png;in/d.jpg\nx,"[""b;c.png"", ""a.png""]"\n'))
    assert [[Path(path).name for path in row.sources] for row in rows] == [["a.png", "d.jpg"], ["b;c.png", "a.png"]]
    (one,) = read_file(write(folder, "q.csv", "source,prompt\nb;c.png,x\n"))  # the singular names a single file
    assert one.sources == (str(folder / "b;c.png"),)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("p.jsonl", '{"prompt": "a"}\n\n{"prompt": }\n', "p.jsonl, line 3: not valid JSON"),
        ("p.jsonl", '{"prompt": "a"}\n["a"]\n', "p.jsonl, line 2: needs an object"),
        ("p.jsonl", '{"prompt": "  "}\n', "p.jsonl, line 1: needs an object with a non-empty string"),
        ("p.jsonl", '{"text": "a"}\n', "p.jsonl, line 1: needs an object"),
        ("p.jsonl", '{"prompt": "a", "negative_prompt": ["b"]}', "line 1: negative_prompt must be text, got ['b']"),
        ("p.jsonl", '{"prompt": "a"}\n{"prompt": "a", "source": "no.png"}', "line 2: source names 'no.png', which is"),
        ("p.jsonl", '{"prompt": "a", "source": "laion"}', "if 'source' says something else here, rename it"),
        ("p.jsonl", '{"prompt": "a", "source": "in"}', "source names 'in', which is not there"),
        ("p.jsonl", '{"prompt": "a", "sources": ["a.png", 3]}', "sources must be a path or a list of paths"),
        ("p.jsonl", '{"prompt": "a", "sources": {"x": "a.png"}}', "sources must be a path or a list of paths"),
        ("p.jsonl", '{"prompt": "a", "source": " "}', "source must be a path or a list of paths of images, got ' '"),
        ("p.jsonl", '{"prompt": "a", "source": "a.png", "sources": ["a.png"]}', "source and sources are names of the"),
        ("p.jsonl", '{"prompt": "a", "source": "text.png"}', "text.png is not an image that Pillow can open"),
        ("p.jsonl", '{"prompt": "a", "reference": "float.tiff"}', "float.tiff has pixels of Pillow's mode F"),
        ("p.jsonl", '{"prompt": "a", "source_video": "no.mp4"}', "source_video names 'no.mp4', which is not there"),
        ("p.jsonl", '{"prompt": "a", "source_video": "a.png"}', "source_video must be the path of one .mp4, .webm,"),
        ("p.jsonl", '{"prompt": "a", "source_video": ["clip.mp4"]}', "source_video must be the path of one"),
        ("p.jsonl", '{"prompt": "a", "mask_video": "clip.mp4"}', "mask_video says where a source_video is drawn, and"),
        ("p.txt", "\n  \n", "p.txt: holds no prompt"),
        ("p.csv", "", "p.csv: holds no prompt"),
        ("p.csv", "prompt,tag\n", "p.csv: holds no prompt"),
        ("p.csv", "text,tag\na,b\n", "p.csv, line 1: the header needs a column 'prompt', got text, tag"),
        ("p.csv", "prompt;tag\na;b\n", "columns are separated by commas"),
        ("p.csv", "\nprompt,tag,tag\na,b,c\n", "p.csv, line 2: the header names the column 'tag' twice"),
        ("p.csv", "prompt,,tag\na,b,c\n", "p.csv, line 1: column 2 of the header has no name"),
        ("p.csv", 'prompt,tag\n"a\nb",c\nd\n', "p.csv, line 4: has 1 cells for the header's 2 columns (prompt, tag)"),
        ("p.csv", "prompt,tag\na,b,c\n", "p.csv, line 2: has 3 cells"),
        ("p.csv", "prompt,tag\n ,b\n", "p.csv, line 2: the cell under 'prompt' is empty"),
        ("p.csv", 'prompt\na\n"b" c\n', "p.csv, line 3: not valid CSV"),
        ("p.csv", 'prompt\na\n"b\nc\n', "p.csv, line 3: not valid CSV"),
        ("p.csv", "prompt,source\na,no.png\n", "p.csv, line 2: source names 'no.png'"),
        ("p.csv", "prompt,sources\na,a.png;\n", "p.csv, line 2: sources must be a path or a list of paths"),
        ("p.csv", 'prompt,sources\na,"[a.png]"\n', "p.csv, line 2: sources begins like a JSON list and is not one"),
        ("p.jsonl", '{"prompt": "a", "prompt": "b"}', "p.jsonl, line 1: names 'prompt' twice"),
        ("p.jsonl", '{"prompt": "a \\ud83d"}', "p.jsonl, line 1: \\ud83d is half a character"),
        ("p.jsonl", '{"prompt": "a", "x": ' + "[" * 9000, "p.jsonl, line 1: brackets are nested more than"),
        ("p.jsonl", '{"prompt": "a", "x": NaN}', "p.jsonl, line 1: JSON knows no NaN"),
        ("p.jsonl", '{"prompt": "' + "a " * 20_000 + '"}', "p.jsonl, line 1: a prompt of 40000 characters"),
        ("p.txt", "a\n" + "b" * 20_001, "p.txt, line 2: a prompt of 20001 characters; 20000 are the most"),
        ("p.tsv", "a\n", "(a column prompt) or dataset:ID_OR_FOLDER, not .tsv"),
        ("prompts", "a\n", "not a file without an ending"),
    ],
)
def test_what_cannot_be_read_is_refused_with_its_place(folder: Path, name: str, content: str, said: str) -> None:
    with pytest.raises(ValueError, match=r"^/") as error:
        read_file(write(folder, name, content))
    assert said in str(error.value)


def test_other_encodings_folders_and_missing_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_bytes("Grün".encode("latin-1"))
    for name in ("p.txt", "absent.txt"):
        with pytest.raises(ValueError, match="cannot be read"):
            read_file(tmp_path / name)
    os.mkfifo(tmp_path / "pipe.txt")
    with pytest.raises(ValueError, match="cannot be read, it is a pipe or a device"):
        read_file(tmp_path / "pipe.txt")
    with pytest.raises(ValueError, match=f"is a folder; if it holds a dataset, write dataset:{tmp_path}"):
        read_file(tmp_path)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("\u200b", "has nothing that is seen (U+200B)"),
        ("\u2060\u200d", "has nothing that is seen (U+2060, U+200D)"),
        ("\u3164", "has nothing that is seen (U+3164)"),
        ("\u0301", "has nothing that is seen (U+0301)"),
        ("\ufeffa dog", "begins with U+FEFF, the byte order mark of a file that was joined"),
        ("a \x1b[31mdog", "holds U+001B at place 3, a control character"),
        ("a\x00dog", "holds U+0000 at place 2, a control character"),
        ("a\x9bdog", "holds U+009B at place 2, a control character"),
        ("a\ufffe", "holds U+FFFE at place 2, a code without a character"),
    ],
)
def test_what_is_no_text_is_refused_everywhere(folder: Path, text: str, said: str) -> None:
    row = json.dumps({"prompt": text})
    negative = json.dumps({"prompt": "a dog", "negative_prompt": text})
    for name, content in (
        ("p.txt", f"a cat\n{text}\n"), ("p.jsonl", f'{{"prompt": "a cat"}}\n{row}\n'), ("p.csv", f"prompt\n{text}\n"),
        ("n.jsonl", f'{{"prompt": "a cat"}}\n{negative}\n'), ("n.csv", f"prompt,negative_prompt\na,{text}\n"),
    ):  # fmt: skip
        if not (name.endswith(".csv") and "\x00" in text):  # refused by Python's own reader
            with pytest.raises(ValueError, match=rf"{name}, line 2") as error:
                read_file(write(folder, name, content))
            assert said in str(error.value)
    for words, negative in ((text, ""), ("a dog", text)):
        with pytest.raises(ValueError, match=r"U\+"):
            Prompt(text=words, negative=negative, metadata={})


@pytest.mark.parametrize(
    "text",
    ["Cyber \u200b\u200bcutlet", "Bluesssatan\ufeff, Janice", "\U0001f469\u200d\U0001f3a4", "\u0645\u06cc\u200c\u062e",
     "\u200fabc", "a\tb", "\u4e00", "\ufffd", "\U0001f3f4\U000e0067\U000e007f", "#darkblue", "\u00a9"],
)  # fmt: skip
def test_texts_of_published_lists_and_of_all_scripts_are_taken(folder: Path, text: str) -> None:
    (row,) = read_file(write(folder, "p.txt", f"{text}\n"))
    assert row.text == text


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        (
            "p.txt",
            '{"prompt": "a cat"}\n{"prompt": "a dog"}\n',
            "is JSON, of which a .txt file makes a prompt of each line",
        ),
        ("p.txt", '[\n"a cat",\n"a dog"\n]\n', "is JSON, of which a .txt file"),
        (
            "p.txt",
            "\ufeffa cat\ufeffa dog\n",
            "p.txt, line 1: holds U+FEFF, the byte order mark with which the file begins",
        ),
        ("p.csv", "id,prompt\n1,a cat\nid,prompt\n2,a dog\n", "p.csv, line 3: is the header again"),
        ("p.csv", "\ufeffprompt\na cat\n\ufeffprompt\na dog\n", "p.csv, line 3: is the header again"),
    ],
)
def test_files_of_another_kind_and_files_joined_are_refused(folder: Path, name: str, content: str, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        read_file(write(folder, name, content))
    assert read_file(write(folder, "q.txt", "[a cat]\n{a dog}\n"))[1].text == "{a dog}"


def test_different_rows_with_one_id_are_told(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = ['{"prompt": "a", "id": 7}', '{"prompt": "a", "id": 7}', '{"prompt": "b"}', '{"prompt": "c"}']
    path = folder / "ids.jsonl"
    path.write_text("\n".join(rows), encoding="utf-8")
    assert len(read_prompts(path)) == 4
    assert capsys.readouterr().err == ""  # the same row twice
    path.write_text("\n".join([*rows, '{"prompt": "d", "id": 7}']), encoding="utf-8")
    assert len(read_prompts(path)) == 5
    assert "ids.jsonl: different rows share an id (1, such as '7')" in capsys.readouterr().err


def test_lines_with_a_hash_are_prompts_and_that_is_said(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = read_file(write(folder, "p.txt", "# my list\na dog\n#art cat\n"))
    assert [row.text for row in rows] == ["# my list", "a dog", "#art cat"]
    assert "p.txt: prompts that begin with #: 2. They are prompts like all others" in capsys.readouterr().err
    read_file(folder / "p.txt")
    assert capsys.readouterr().err == ""


def test_spreadsheets_rows_of_empty_cells_and_separators(folder: Path) -> None:
    rows = read_file(write(folder, "p.csv", "prompt,tag\na,b\n  \n,\n , \n,,,\nc,d\n"))
    assert [(row.text, row.metadata["tag"]) for row in rows] == [("a", "b"), ("c", "d")]
    for given in (",", ";", "\t"):
        (row,) = read_file(write(folder, "q.csv", f"sep={given}\nprompt{given}tag\na dog{given}b\n"))
        assert (row.text, row.metadata["tag"]) == ("a dog", "b")
    with pytest.raises(ValueError, match=r"q\.csv, line 3: has 1 cells"):
        read_file(write(folder, "q.csv", "sep=;\nprompt;tag\na\n"))


@pytest.mark.parametrize(
    ("content", "cure"),
    [
        ('[\n{"prompt": "a"},\n{"prompt": "b"}\n]', "is one JSON list, .*: jq -c '.[]' p.jsonl > rows"),
        ('[{"prompt": "a"}]', "jq -c '.[]' p.jsonl"),
        ('["a",\n"b"]', r"jq -c '.\[\] \| {prompt: .}' p.jsonl"),
        ('{"prompts": ["a"]}', r"the list 'prompts', .*: jq -c '.prompts\[\] \| {prompt: .}' p.jsonl"),
        ('{"rows": [\n{"prompt": "a"}]}', r"jq -c '.rows\[\]' p.jsonl"),
        ('{\n"prompt": "a"\n}', "is one JSON object over several lines, .*: jq -c '.' p.jsonl"),
        ('{"text": "a", "tags": ["b"], "sizes": [1]}', "p.jsonl, line 1: needs an object with a non-empty string"),
        ('{"prompt": "a"}\n[\n', "p.jsonl, line 2: not valid JSON"),
    ],
)
def test_a_file_that_is_one_json_value_is_refused_with_the_cure(folder: Path, content: str, cure: str) -> None:
    with pytest.raises(ValueError, match=cure.replace("[]'", r"\[\]'") if r"\[" not in cure else cure):
        read_file(write(folder, "p.jsonl", content))
