"""Prompt files and the order in which prompts are met."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from flowrl.prompts import Prompt, eval_items, prompts_of_iteration, read_prompts, spread


def test_a_text_file_has_a_prompt_a_line(tmp_path: Path) -> None:
    path = tmp_path / "p.txt"
    path.write_bytes("\ufeffa red circle\r\n\r\n  two squares \nein grüner Stern".encode())
    rows = read_prompts(path)
    assert [row.text for row in rows] == ["a red circle", "two squares", "ein grüner Stern"]
    assert [row.metadata for row in rows] == [{}, {}, {}]


def test_a_jsonl_file_keeps_each_object_whole(tmp_path: Path) -> None:
    records = [{"prompt": "a\u2028b\x85c", "tag": "counting", "include": [1]}, {"prompt": "d"}]
    path = tmp_path / "p.jsonl"
    path.write_text("\n".join(json.dumps(record, ensure_ascii=False) for record in records) + "\n\n", encoding="utf-8")
    rows = read_prompts(path)
    assert [row.metadata for row in rows] == records
    assert [row.text for row in rows] == ["a\u2028b\x85c", "d"]


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("p.jsonl", '{"prompt": "a"}\n\n{"prompt": }\n', "p.jsonl, line 3: no valid JSON"),
        ("p.jsonl", '{"prompt": "a"}\n["a"]\n', "p.jsonl, line 2: needs an object"),
        ("p.jsonl", '{"prompt": "  "}\n', "p.jsonl, line 1: needs an object with a non-empty string"),
        ("p.jsonl", '{"text": "a"}\n', "p.jsonl, line 1: needs an object"),
        ("p.txt", "\n  \n", "p.txt: holds no prompt"),
        ("p.csv", "a\n", ".txt (a prompt a line) or .jsonl"),
    ],
)
def test_what_cannot_be_read_is_refused_with_its_place(tmp_path: Path, name: str, content: str, said: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=r"^/") as error:
        read_prompts(tmp_path / name)
    assert said in str(error.value)


def test_other_encodings_and_missing_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_bytes("Grün".encode("latin-1"))
    for name in ("p.txt", "absent.txt"):
        with pytest.raises(ValueError, match="cannot be read as UTF-8"):
            read_prompts(tmp_path / name)


@pytest.mark.parametrize(("total", "count"), [(7, 3), (5, 5), (4, 6), (1, 2), (12, 1)])
def test_a_pass_meets_every_prompt_once(total: int, count: int) -> None:
    met = [number for iteration in range(3 * total) for number in prompts_of_iteration(total, count, 0, iteration)]
    passes = [met[start : start + total] for start in range(0, len(met) - total + 1, total)]
    assert len(passes) == 3 * count
    assert all(sorted(one) == list(range(total)) for one in passes)


def test_the_order_depends_on_seed_and_iteration_alone() -> None:
    later_first = [prompts_of_iteration(50, 4, 3, iteration) for iteration in (9, 2)]
    assert later_first == [prompts_of_iteration(50, 4, 3, iteration) for iteration in (9, 2)]
    assert prompts_of_iteration(50, 50, 3, 0) != prompts_of_iteration(50, 50, 4, 0)
    assert prompts_of_iteration(50, 50, 3, 0) != prompts_of_iteration(50, 50, 3, 1)


def test_first_prompts_are_evenly_spread_over_seeds() -> None:
    first = Counter(prompts_of_iteration(4, 1, seed, 0)[0] for seed in range(800))
    assert all(150 < first[number] < 250 for number in range(4))  # 4 standard deviations of 12.2


def test_evaluation_items_count_the_samples_of_a_prompt(tmp_path: Path) -> None:
    path = tmp_path / "p.txt"
    path.write_text("a\nb\na\nc\n")
    rows = read_prompts(path)
    once = eval_items(rows)
    assert [(item.prompt.text, item.prompt_id, item.sample) for item in once] == [
        ("a", 0, 0), ("b", 1, 0), ("a", 0, 1), ("c", 2, 0),
    ]  # fmt: skip
    twice = eval_items(rows[:3], samples_per_prompt=2)
    assert [(item.prompt_id, item.sample) for item in twice] == [(0, 0), (0, 1), (1, 0), (1, 1), (0, 2), (0, 3)]
    places = [(item.prompt_id, item.sample) for item in twice]
    assert len(set(places)) == len(places)


def test_fewer_evaluation_prompts_come_from_the_whole_file() -> None:
    rows = [Prompt(text=f"prompt {number}", metadata={}) for number in range(12)]
    assert [item.prompt.text for item in eval_items(rows, num_prompts=3)] == ["prompt 2", "prompt 6", "prompt 10"]
    assert eval_items(rows, num_prompts=12) == eval_items(rows) == eval_items(rows, num_prompts=99)
    for count in range(1, 13):  # a sorted file of four tasks: each gets its share, to within one
        tasks = Counter(place // 3 for place in spread(12, count))
        assert sum(tasks.values()) == len(set(spread(12, count))) == count
        assert max(tasks.values()) - min(tasks[task] for task in range(4)) <= 1
