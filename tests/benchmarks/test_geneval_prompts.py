"""GenEval's 553 prompts are drawn again, byte for byte those of the published file."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from typing import Any

from flowrl.benchmarks.geneval.metadata import COLORS, RELATIONS, TASKS, parse_record
from flowrl.benchmarks.geneval.published import (
    CLASSES,
    published_records,
)
from flowrl.rewards.networks import mask2former

RECORDS = published_records()


def of_task(task: str) -> list[dict[str, Any]]:
    return [record for record in RECORDS if record["tag"] == task]


def test_the_text_is_the_published_file() -> None:
    text = "".join(json.dumps(record) + "\n" for record in RECORDS).encode()
    assert len(text) == 85_209
    assert hashlib.sha256(text).hexdigest() == "5c48e0813e812e3c373fa5c8ed07a8f0a483be30272b4427b0559c8048e67c13"
    assert text.count(b"\n") == 553
    assert [json.loads(line) for line in text.splitlines()] == RECORDS


def test_the_list_of_prompts_alone_has_its_published_length() -> None:
    assert len("".join(record["prompt"] + "\n" for record in RECORDS)) == 18_345
    assert len({record["prompt"] for record in RECORDS}) == 553


def test_tasks_stand_in_order_with_their_published_counts() -> None:
    counts = Counter(record["tag"] for record in RECORDS)
    assert list(counts) == list(TASKS)
    assert list(counts.values()) == [80, 99, 80, 94, 100, 100]
    first_rows = [next(i for i, record in enumerate(RECORDS) if record["tag"] == task) for task in TASKS]
    assert first_rows == [0, 80, 179, 259, 353, 453]


def test_every_class_once_and_the_first_three() -> None:
    names = [record["include"][0]["class"] for record in RECORDS[:80]]
    assert names[:3] == ["bench", "cow", "bicycle"]
    assert sorted(names) == sorted(CLASSES)
    assert len(CLASSES) == len(set(CLASSES)) == 80
    assert CLASSES[64:67] == ("computer mouse", "tv remote", "computer keyboard")


def test_classes_are_those_of_the_judge_by_index() -> None:
    assert vars(mask2former)["CLASSES"] is CLASSES


def test_shapes_of_records() -> None:
    for record in RECORDS:
        parse_record(record)
        assert list(record) == (["tag", "include", "exclude", "prompt"] if "exclude" in record else
                                ["tag", "include", "prompt"])  # fmt: skip
    counting = of_task("counting")
    assert Counter(r["include"][0]["count"] for r in counting) == {2: 26, 3: 28, 4: 26}
    for record in counting:
        wanted = record["include"][0]
        assert record["exclude"] == [{"class": wanted["class"], "count": wanted["count"] + 1}]
    assert all("exclude" not in record for record in RECORDS if record["tag"] != "counting")
    relations = Counter(record["include"][1]["position"][0] for record in of_task("position"))
    assert relations == {"below": 28, "right of": 27, "above": 26, "left of": 19}
    assert set(relations) == set(RELATIONS)
    colored = [clause for task in ("colors", "color_attr") for record in of_task(task) for clause in record["include"]]
    assert all(clause["color"] in COLORS and clause["class"] != "person" for clause in colored)
    for record in of_task("color_attr"):
        one, other = record["include"]
        assert one["class"] != other["class"]
        assert one["color"] != other["color"]


def test_wording() -> None:
    prompts = {record["prompt"] for record in RECORDS}
    assert "a photo of a bench" in prompts
    assert {prompt for prompt in prompts if " benchs" in prompt or " sheeps" in prompt}
    assert any(prompt.startswith("a photo of an orange ") for prompt in prompts)
    assert not any(" a apple" in prompt or " an bench" in prompt for prompt in prompts)
    scissors = [record["prompt"] for record in RECORDS if "scissorses" in record["prompt"]]
    assert all(record.startswith("a photo of ") for record in scissors)
