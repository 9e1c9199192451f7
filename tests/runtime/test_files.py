"""Text and JSON files whose faults name their file; files that appear whole, with the mode of any new file."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from flowrl.runtime.files import (
    DEEPEST,
    parse_json,
    read_json,
    read_json_lines,
    read_text,
    refuse_unwritable,
    replacing,
    write_atomically,
)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "a.json: not valid JSON (Expecting property name enclosed in double quotes at column 2)"),
        ('{\n "a": 1,\n}', "a.json: not valid JSON (Illegal trailing comma|at line 3, column 1)"),
        ("[1]", "a.json: must hold an object {...}, it holds a list"),
        ("null", "it holds null"),
        ('{"a": 1, "b": 2, "a": 3}', "a.json: names 'a' twice: keep one of them"),
        ('{"a": NaN}', "a.json: JSON knows no NaN: write a number, or null"),
        ('{"a": -Infinity}', "JSON knows no -Infinity"),
        ("[" * 100_000, f"a.json: brackets are nested more than {DEEPEST} deep"),
        ('{"a": ' + "[" * 150 + "]" * 150 + "}", f"nested more than {DEEPEST} deep"),
        ('{"a": ' + "9" * 5000 + "}", "a.json: 999999999... is beyond 1e308"),
        ('{"a": -1' + "0" * 400 + "}", "a.json: -10000000... is beyond 1e308"),
        ('{"a": 1e400}', "a.json: 1e400... is beyond 1e308: write a smaller number, or null"),
        ('{"a": "\\ud83d"}', "a.json: \\ud83d is half a character"),
    ],
)
def test_bad_json_names_its_file(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"a\.json") as refused:
        read_json(path, "restore it")
    assert any(part in str(refused.value) for part in said.split("|"))
    assert str(refused.value).endswith(": restore it")


def test_good_json_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(b'\xef\xbb\xbf{"a": "\\ud83d\\ude00 [[", "b": ' + b"[" * 90 + b"]" * 90 + b"}")
    assert read_json(path)["a"] == "\U0001f600 [["
    path.write_text('{"lambda_min_clipped": -Infinity}')  # as in a scheduler's configuration
    assert read_json(path, finite=False) == {"lambda_min_clipped": float("-inf")}
    path.write_text('{"a": [12345678901234567890, -3, 0.1, 1e-400, -0, 2e3]}')
    assert [repr(number) for number in read_json(path)["a"]] == [
        "12345678901234567890",
        "-3",
        "0.1",
        "0.0",
        "0",
        "2000.0",
    ]
    assert parse_json("[" + "[]," * 500 + "[]]", "many, none in another")[0] == []


def test_lines_are_named(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"a": "x\u2028y"}\n\n{"b": 2}\n', encoding="utf-8")
    assert read_json_lines(path) == [{"a": "x\u2028y"}, {"b": 2}]
    path.write_text('{"a": 1}\n[2]\n')
    with pytest.raises(ValueError, match=r"a\.jsonl, line 2: must hold an object"):
        read_json_lines(path)
    path.write_text('{"a": 1}\n\n{"a": 1, "a": 2}\n')
    with pytest.raises(ValueError, match=r"a\.jsonl, line 3: names 'a' twice"):
        read_json_lines(path)


def test_what_is_no_text_file_is_refused_and_a_link_is_followed(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="pipe: cannot be read, it is a pipe or a device"):
        read_text(tmp_path / "pipe")
    with pytest.raises(ValueError, match="/dev/zero: cannot be read, it is a pipe or a device"):
        read_text(Path("/dev/zero"))
    with pytest.raises(ValueError, match="it is a folder"):
        read_text(tmp_path)
    with pytest.raises(ValueError, match="absent: cannot be read"):
        read_text(tmp_path / "absent")
    (tmp_path / "latin").write_bytes(b"\xe9")
    with pytest.raises(ValueError, match=r"latin: cannot be read as UTF-8 text .*: save it as UTF-8"):
        read_text(tmp_path / "latin")
    (tmp_path / "file").write_text("x")
    (tmp_path / "link").symlink_to("file")
    assert read_text(tmp_path / "link") == "x"


@pytest.mark.parametrize("umask", [0o022, 0o002, 0o077])
def test_files_have_the_mode_of_any_new_file(umask: int, tmp_path: Path) -> None:
    before = os.umask(umask)
    try:
        with pytest.MonkeyPatch.context() as patch, replacing(tmp_path / "a") as stream:
            patch.setattr(os, "umask", lambda mask: pytest.fail("files of other threads are made with this umask"))
            stream.write(b"x")
    finally:
        assert os.umask(before) == umask
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o666 & ~umask


def test_a_pipe_or_a_device_is_no_place_for_a_file(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(ValueError, match="is a pipe or a device"):
        write_atomically(pipe, "text")
    assert pipe.is_fifo()


def test_a_folder_that_could_not_be_made_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    refuse_unwritable(tmp_path / "new" / "deep")
    assert not (tmp_path / "new").exists()
    for folder in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(ValueError, match=f"since {tmp_path}/file is not one: give another `out`"):
            refuse_unwritable(folder)
    with pytest.raises(ValueError, match="nothing can be written into /proc: give another `out`"):
        refuse_unwritable(Path("/proc/run"))
    monkeypatch.setattr("os.access", lambda path, mode: path != tmp_path)
    with pytest.raises(ValueError, match=f"nothing can be written into {tmp_path}: give another out="):
        refuse_unwritable(tmp_path / "new", flag="out=")
