"""The order in which prompts are met, the images of an evaluation, and where prompts may come from."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from flowrl.config.train import ConfigError, PromptsConfig, resolve_path
from flowrl.prompts.loading import (
    Prompt,
    eval_items,
    load_prompts,
    load_sources,
    prompts_of_iteration,
    read_prompts,
    spread,
)
from flowrl.prompts.source_images import read_image
from flowrl.runtime import randomness
from flowrl.runtime.randomness import counter_choice


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


def test_one_instruction_for_two_images_is_two_prompts() -> None:
    def edit(*sources: str) -> Prompt:
        return Prompt(text="make it blue", metadata={}, sources=sources)

    items = eval_items([edit("/a.png"), edit("/b.png"), edit("/a.png"), edit(), edit("/a.png", "/b.png")])
    assert [(item.prompt_id, item.sample) for item in items] == [(0, 0), (1, 0), (0, 1), (2, 0), (3, 0)]


def test_an_asset_a_path_and_a_default_negative_prompt(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(
        '{"prompt": "a"}\n{"prompt": "b", "negative_prompt": "blur"}\n{"prompt": "c", "negative_prompt": ""}'
    )
    rows = load_prompts(str(path), "low quality", resolve=resolve_path)
    assert [(row.text, row.negative) for row in rows] == [("a", "low quality"), ("b", "blur"), ("c", "")]
    everyday = load_prompts("asset:prompts/everyday_eval.txt", resolve=resolve_path)
    assert everyday == read_prompts(resolve_path("asset:prompts/everyday_eval.txt"))
    assert {row.negative for row in everyday} == {""}
    with pytest.raises(ValueError, match=r"there is no 'absent\.txt'"):
        load_prompts("absent.txt", resolve=resolve_path)


def test_images_of_a_prompt_come_in_its_order_and_size(tmp_path: Path) -> None:
    for name, colour in (("red.png", (255, 0, 0)), ("blue.png", (0, 0, 255))):
        Image.new("RGB", (6, 4), colour).save(tmp_path / name)
    (tmp_path / "p.jsonl").write_text('{"prompt": "a", "sources": ["blue.png", "red.png"], "reference": "red.png"}')
    (row,) = read_prompts(tmp_path / "p.jsonl")
    blue, red = load_sources(row)
    assert blue.shape == red.shape == (3, 4, 6)
    assert (blue[:, 0, 0].tolist(), red[:, 0, 0].tolist()) == ([0, 0, 1], [1, 0, 0])
    assert [tuple(read_image(path, (8, 2)).shape) for path in row.sources] == [(3, 8, 2), (3, 8, 2)]
    assert [read_image(path, (2, 2))[:, 1, 1].tolist() for path in row.references] == [[1, 0, 0]]
    assert load_sources(Prompt(text="a", metadata={})) == []


@pytest.mark.parametrize(
    "text",
    ["p.txt", "p.jsonl", "asset:prompts/p.csv", "dataset:org/name", "dataset:./folder:test", "dataset:a:train[:9]"],
)
def test_a_configuration_names_a_file_or_a_dataset(text: str) -> None:
    assert PromptsConfig(train=text, eval=text).eval == text


@pytest.mark.parametrize("text", ["p.parquet", "p", "", "dataset:", "dataset::", "datasets:a"])
def test_other_names_are_refused_by_the_configuration(text: str) -> None:
    for given in ({"train": text}, {"train": "p.txt", "eval": text}):
        with pytest.raises(ConfigError, match=r"must be a \.txt, \.jsonl or \.csv file or dataset:") as error:
            PromptsConfig(**given)
        assert f"prompts.{list(given)[-1]}" in str(error.value)


def test_a_million_prompts_are_ordered_as_far_as_they_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn, draw = list[int](), randomness.counter_integers

    def counted(low: int, high: int, *parts: Any) -> int:
        drawn.append(low)
        return draw(low, high, *parts)

    monkeypatch.setattr(randomness, "counter_integers", counted)
    total, seed = 10**6, 91  # a seed that no other test has
    chosen = [number for iteration in range(4) for number in prompts_of_iteration(total, 48, seed, iteration)]
    assert len(drawn) == len(set(chosen)) == 4 * 48
    assert prompts_of_iteration(total, 48, seed, 1) == chosen[48:96]  # kept
    assert len(drawn) == 4 * 48
    assert tuple(chosen) == counter_choice(total, 4 * 48, seed, "prompt order", 0)


@pytest.mark.parametrize(("total", "count"), [(5, 3), (7, 7), (3, 8)])
def test_orders_are_those_of_whole_shuffles(total: int, count: int) -> None:
    for iteration in (4, 0, 9, 3):
        positions = range(iteration * count, (iteration + 1) * count)
        wanted = [counter_choice(total, total, 5, "prompt order", p // total)[p % total] for p in positions]
        assert prompts_of_iteration(total, count, 5, iteration) == wanted
