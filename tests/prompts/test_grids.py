"""Grids: what prompts say of them, how images are cut, and those of the embedded world."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from drawn_grids import draw_grid, random_grid

from flowrl.prompts.grids import (
    MAX_CELLS,
    cell_pairs,
    cell_prompts,
    check_grid,
    grid_shape,
    split_grid,
    sub_prompts,
    theme,
)
from flowrl.world.scene_grids import (
    asked_objects,
    grid_record,
    grid_records,
    grid_verdict,
)
from flowrl.world.scenes import COLORS, SHAPES, Shape

ASSETS = Path(__file__).resolve().parents[2] / "assets" / "prompts"


@pytest.mark.parametrize(
    ("text", "shape"),
    [
        ("a 2x2 grid of cats", (2, 2)),
        ("3 X 4 panels, then 2x2", (3, 4)),
        ("1\u00d73 strip", (1, 3)),
        ("at 1024x1024, a 2 \u2a09 1 grid", (2, 1)),
        ("(2  x 3)", (2, 3)),
        ("\u751f\u62102x2\u7f51\u683c", (2, 2)),
        ("6x6", (6, 6)),
        ("6x7 is too many", None),
        ("1920x2 and 2x1080", None),
        ("2x2.5 cm", None),
        ("a 2x3x4 block", None),
        ("one 1x1 cell", None),
        ("a grid", None),
        ("0x4", None),
    ],
)
def test_grid_shapes(text: str, shape: tuple[int, int] | None) -> None:
    assert grid_shape(text) == shape


def test_a_grid_option_that_names_no_grid_is_refused() -> None:
    check_grid(None)
    check_grid("2x2")
    with pytest.raises(ValueError, match=rf"grid must be ROWSxCOLUMNS of 2 to {MAX_CELLS} cells.*'1x1'"):
        check_grid("1x1")


def test_cells_are_cut_row_by_row_and_the_rest_is_dropped() -> None:
    images = torch.rand(2, 3, 7, 11, generator=torch.Generator().manual_seed(0), requires_grad=True)
    cells = split_grid(images, 2, 3)
    pixels = images.detach().numpy()
    expected = [pixels[:, :, 3 * r : 3 * r + 3, 3 * c : 3 * c + 3] for r in range(2) for c in range(3)]
    assert np.array_equal(cells.detach().numpy(), np.stack(expected, axis=1))
    cells.sum().backward()
    assert images.grad is not None
    assert images.grad.sum() == 2 * 3 * 6 * 9
    levels = torch.arange(2 * 3 * 4 * 4, dtype=torch.uint8).reshape(2, 3, 4, 4)
    assert split_grid(levels, 2, 2)[1, 3].tolist() == levels[1, :, 2:, 2:].tolist()


@pytest.mark.parametrize(("rows", "columns"), [(8, 1), (1, 12), (0, 2), (2, -1)])
def test_more_cells_than_pixels_are_refused(rows: int, columns: int) -> None:
    with pytest.raises(ValueError, match=rf"\[7, 11\] pixels has no {rows}x{columns} cells"):
        split_grid(torch.zeros(1, 3, 7, 11), rows, columns)


def test_pairs_are_all_pairs_once() -> None:
    pairs = cell_pairs(4)
    assert len(pairs) == 6
    assert {frozenset(pair) for pair in pairs} == {frozenset(pair) for pair in combinations(range(4), 2)}
    assert all(first < second for first, second in pairs)


def test_sub_prompts_follow_labels() -> None:
    labelled = 'A 1x2 grid "pets". [TOP]-[LEFT]: a cat. It sits. RIGHT-2: a dog'
    assert sub_prompts(labelled) == ["a cat. It sits.", "a dog."]
    assert theme(labelled) == 'A 1x2 grid "pets".'
    assert sub_prompts("a plain prompt: a cat") == []
    assert theme("a plain prompt: a cat") == "a plain prompt: a cat."
    assert sub_prompts('1x2 "pets" [LEFT]: a cat. [RIGHT]: b.') == ["a cat.", "b."]


def test_own_sub_prompts_come_before_those_of_the_prompt() -> None:
    record = {"prompt": "a dog", "tag": "single_object"}
    found = cell_prompts("1x2. [A]: x. [B]: y", {"sub_prompts": ["a cat", record]})
    assert [(cell.text, cell.metadata) for cell in found] == [("a cat", {}), ("a dog", record)]
    assert [cell.text for cell in cell_prompts("1x2. [A]: x. [B]: y", {})] == ["x.", "y."]
    assert cell_prompts("a cat", {"sub_prompts": []}) == []


@pytest.mark.parametrize("own", ["no", {"prompt": "a"}, ["a", 1], [{"text": "a"}], [None]])
def test_sub_prompts_of_another_kind_are_refused(own: Any) -> None:
    with pytest.raises(ValueError, match="sub_prompts must be a list of texts, or of objects"):
        cell_prompts("a 2x2 grid", {"sub_prompts": own})


# ---- the embedded world ----------------------------------------------------------------------------------------------


def every_record() -> list[dict[str, Any]]:
    return [record for part in grid_records() for record in part]


def test_records_ask_for_every_shape_and_colour_once() -> None:
    train, held_out = grid_records()
    asked = [asked_objects(record) for record in [*train, *held_out]]
    assert sorted(own[0] for own in asked) == sorted((label, color) for label in SHAPES for color in COLORS)
    assert all(len(own) == 4 and len(set(own)) == 1 for own in asked)
    assert (len(train), len(held_out)) == (8, 4)
    for record in every_record():
        assert grid_shape(record["prompt"]) == (2, 2)
    assert grid_record("circle", "red")["prompt"] == "a 2x2 grid of photos of a red circle"


def test_detector_reads_cells_of_a_quarter_image() -> None:
    """Drawn grids, as they are and blurred with noise of 8 levels."""
    rng = np.random.default_rng(0)
    records, right, noisy = every_record(), 0, 0
    for i in range(120):
        record = records[i % len(records)]
        image = draw_grid(random_grid(record, rng))
        assert image.shape == (64, 64, 3)
        right += grid_verdict(image, record).correct
        soft = np.stack([(image + np.roll(image, 1, axis).astype(float)) / 2 for axis in (0, 1)]).mean(0)
        rough = np.clip(soft + rng.normal(0, 8, image.shape), 0, 255).astype(np.uint8)
        noisy += grid_verdict(rough, record).correct
    assert right == 120
    assert noisy >= 117


def grid_of(*cells: tuple[str, str]) -> np.ndarray:
    return draw_grid([Shape(label=label, color=color, x=32.0, y=32.0, radius=18.0) for label, color in cells])


RED, BLUE = ("circle", "red"), ("square", "blue")


def test_verdict_tells_right_cells_from_cells_that_agree() -> None:
    record = grid_record(*RED)
    all_right = grid_verdict(grid_of(RED, RED, RED, RED), record)
    assert (all_right.correct, all_right.share, all_right.consistency) == (True, 1.0, 1.0)
    agree = grid_verdict(grid_of(BLUE, BLUE, BLUE, BLUE), record)
    assert (agree.correct, agree.share, agree.consistency) == (False, 0.0, 1.0)
    mixed = grid_verdict(grid_of(RED, BLUE, ("circle", "blue"), RED), record)
    assert mixed.cells == (True, False, False, True)
    assert (mixed.share, mixed.consistency) == (0.5, 1 / 6)
    assert mixed.seen == ((RED,), (BLUE,), (("circle", "blue"),), (RED,))
    each = {"sub_prompts": [grid_record(*cell)["sub_prompts"][0] for cell in (RED, BLUE, BLUE, RED)]}
    different = grid_verdict(grid_of(RED, BLUE, BLUE, RED), each)
    assert different.correct
    assert different.consistency == pytest.approx(2 / 6)


def test_empty_cells_agree_with_nothing_and_a_second_object_is_wrong() -> None:
    record, image = grid_record(*RED), grid_of(RED, RED, RED, RED)
    ground = image[0, 0]
    empty = image.copy()
    empty[:32] = ground
    found = grid_verdict(empty, record)
    assert found.cells == (False, False, True, True)
    assert found.consistency == pytest.approx(1 / 6)
    crowded = image.copy()
    crowded[:9, :9] = COLORS["red"]
    crowded[10:12, :12] = ground
    seen = grid_verdict(crowded, record)
    assert seen.cells == (False, True, True, True)
    assert len(seen.seen[0]) == 2


@pytest.mark.parametrize(
    "record",
    [
        {},
        {"sub_prompts": ["a photo of a red circle"] * 4},
        {"sub_prompts": grid_record(*RED)["sub_prompts"][:3]},
        {"sub_prompts": [{"tag": "single_object", "include": [{"class": "circle", "count": 1}], "prompt": "x"}] * 4},
        {"sub_prompts": grid_record(*RED)["sub_prompts"] * 2},
    ],
)
def test_another_record_is_refused(record: dict[str, Any]) -> None:
    with pytest.raises(
        ValueError, match=r"needs sub_prompts: 4 GenEval records|GenEval record .*lacks tag and include"
    ):
        grid_verdict(grid_of(RED, RED, RED, RED), record)
