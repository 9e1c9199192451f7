"""Prompts of a benchmark that were trained on."""

from __future__ import annotations

import pytest

from flowrl.benchmarks.geneval.published import published_records
from flowrl.config.train import resolve_path
from flowrl.prompts.loading import read_prompts
from flowrl.prompts.overlap import overlap, overlap_of_rows, swapped


@pytest.mark.parametrize(
    ("text", "other"),
    [
        ("a photo of a dog and a cat", "a photo of a cat and a dog"),
        ("a photo of a dog left of a hot dog", "a photo of a hot dog right of a dog"),
        ("a photo of a dog above an apple", "a photo of an apple below a dog"),
        ("a red cup and a blue fork", "a blue fork and a red cup"),
        ("a photo of three dogs", None),
        ("a photo of a sand castle", None),
    ],
)
def test_prompts_with_their_things_swapped(text: str, other: str | None) -> None:
    assert swapped(text) == other
    assert other is None or swapped(other) == text


def test_prompts_in_common_are_found() -> None:
    train = ["A photo of a dog  and a cat.", "a photo of a cup left of a fork", "a photo of two cows"]
    benchmark = [
        "a photo of a cat and a dog",  # swapped
        "a photo of a dog and a cat",  # exact
        "a photo of a fork right of a cup",  # swapped
        "a photo of a fork left of a cup",  # another image
        "a photo of two cows",  # exact
        "a photo of two cows",  # again
        "a photo of three cows",
    ]
    found = overlap(train, benchmark)
    assert found.exact == ("a photo of a dog and a cat", "a photo of two cows")
    assert found.swapped == ("a photo of a cat and a dog", "a photo of a fork right of a cup")
    assert found.total == 6
    assert found
    assert not overlap(["something else"], benchmark)


def test_the_published_prompts_ask_for_one_thing_twice() -> None:
    prompts = [record["prompt"] for record in published_records()]
    itself = overlap(prompts, prompts)
    assert (len(itself.exact), len(itself.swapped)) == (553, 0)
    turned = [other for text in prompts if (other := swapped(text)) is not None]
    assert len(turned) == 299  # two_object 99, position 100, color_attr 100
    found = overlap(turned, prompts)
    assert found.exact == ("a photo of a laptop left of a cow", "a photo of a cow right of a laptop")
    assert len(found.swapped) == 297


def test_an_instruction_about_another_image_is_another_prompt() -> None:
    train, held_out = (read_prompts(resolve_path(f"asset:prompts/edits_{name}.jsonl")) for name in ("train", "heldout"))
    texts = overlap((row.text for row in train), (row.text for row in held_out))
    assert (len(texts.exact), texts.total) == (20, 20)
    assert not overlap_of_rows(train, held_out)
    assert len(overlap_of_rows(train[:5], train).exact) == 5
