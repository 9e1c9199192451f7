"""Layouts of processes, and what is refused of them."""

from __future__ import annotations

import pytest

from flowrl.config.sections import ParallelConfig
from flowrl.training.processes.mesh import Layout, layout_of


@pytest.mark.parametrize(
    ("settings", "world", "expected"),
    [
        ({}, 1, (1, 1, 1)),
        ({}, 6, (6, 1, 1)),
        ({"shard": 2}, 2, (1, 2, 1)),
        ({"shard": 2}, 8, (4, 2, 1)),
        ({"shard": 2, "context": 2, "replicate": 2}, 8, (2, 2, 2)),
    ],
)
def test_the_copies_are_what_the_processes_suffice_for(
    settings: dict[str, int], world: int, expected: tuple[int, int, int]
) -> None:
    layout = layout_of(ParallelConfig(**settings), world)
    assert (layout.replicate, layout.shard, layout.context) == expected
    assert layout.world == world


@pytest.mark.parametrize(
    ("settings", "world", "words"),
    [
        ({"shard": 2}, 1, "1 process was launched.*launch a multiple of 2"),
        ({"shard": 2, "context": 2}, 6, "over 4 processes, and 6 processes were launched"),
        ({"shard": 2, "replicate": 4}, 4, "set parallel.replicate to 2"),
        ({"replicate": 2}, 1, "set parallel.replicate to 1"),
    ],
)
def test_a_product_that_is_not_the_number_of_processes_is_refused(
    settings: dict[str, int], world: int, words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        layout_of(ParallelConfig(**settings), world)


def test_neighbours_share_an_image_then_a_copy() -> None:
    layout = Layout(replicate=2, shard=3, context=2)
    places = [layout.place(rank) for rank in range(layout.world)]
    assert places == [(r, s, c) for r in range(2) for s in range(3) for c in range(2)]
