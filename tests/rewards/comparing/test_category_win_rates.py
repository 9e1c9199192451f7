"""Win rates by category (UnifiedReward-Flex in Pref-GRPO) against a table worked by hand."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from pairwise_fakes import close, inputs_of, levels_of, scores
from scripted_judges import JUDGE, script

from flowrl.rewards import build_reward, reward_options
from flowrl.rewards.comparing.judge_comparator import category_winners, named_winner
from flowrl.rewards.comparing.pairwise import blend
from flowrl.rewards.judges.asking import json_record, number_list
from flowrl.rewards.judges.chat import Answer, Question
from flowrl.world.scenes import Shape, draw_scene

LEVELS = [0.2, 0.4, 0.6]
TABLE: dict[tuple[float, float], str] = {
    (0.2, 0.4): json.dumps(
        {
            "categories": [{"name": "Meaning", "cat_winner": "Image 1"}, {"name": "Quality", "cat_winner": "Image 2"}],
            "winner": "Image 2",
        }
    ),
    (0.2, 0.6): json.dumps(
        {
            "categories": [
                {"name": "Meaning", "cat_winner": "Image 2"},
                {"name": "Quality", "cat_winner": "neither"},
                {"name": "Charm", "cat_winner": "image 2"},
                {"name": "A fourth", "cat_winner": "Image 1"},
            ],
            "winner": "Image 2",
        }
    ),
    (0.4, 0.6): 'Here it is:\n{"winner": "Image 1", "categories": [{"name": "Meaning", "cat_winner": "Image 1"}]}',
}
OVERALL: list[float | None] = [0.0, 1.0, 0.5]
MEANING: list[float | None] = [0.5, 0.5, 0.5]
QUALITY: list[float | None] = [0.25, 1.0, 0.5]
CHARM: list[float | None] = [0.0, None, 1.0]
MEANS = [0.25, 0.75, 2 / 3]


def answer(question: Question) -> Answer:
    first, second = (round(level, 1) for level in levels_of(question)[-2:])
    return Answer(text=TABLE[first, second])


def options(**more: Any) -> dict[str, Any]:
    return {"comparator": {"judge": JUDGE, "style": "categories"}, "orders": "single", **more}


@pytest.mark.parametrize("share", [0.0, 0.7, 1.0])
def test_the_table_worked_by_hand(monkeypatch: pytest.MonkeyPatch, share: float) -> None:
    script(monkeypatch, answer)
    got = scores("win_rate", inputs_of(LEVELS), **options(categories=share))
    close(got.values, [(1 - share) * rate + share * mean for rate, mean in zip([0.0, 1.0, 0.5], MEANS, strict=True)])
    nan = float("nan")
    wanted = {"overall": OVERALL, "Meaning": MEANING, "Quality": QUALITY, "Charm": CHARM}
    assert got.parts.keys() == wanted.keys() | {"comparisons", "failed", "cached"}
    for name, rates in wanted.items():
        close(got.parts[name], [nan if rate is None else rate for rate in rates])


def test_the_cache_keeps_categories(monkeypatch: pytest.MonkeyPatch) -> None:
    script(monkeypatch, answer)
    reward = build_reward("win_rate", options=options(categories=0.7))
    first, again = (reward(inputs_of(LEVELS)) for _ in range(2))
    assert torch.equal(first.values, again.values)
    assert again.parts["cached"].tolist() == [1.0] * 3


def test_a_category_never_takes_the_name_of_a_number_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """A judge that calls its categories as it likes; "overall" is the rate of winners, "failed" a count."""
    said = [{"name": name, "cat_winner": "Image 1"} for name in ("overall", "failed", "cached")]
    script(monkeypatch, lambda question: Answer(text=json.dumps({"categories": said, "winner": "Image 2"})))
    got = scores("win_rate", inputs_of(LEVELS), **options(categories=1.0))
    close(got.values, [1.0, 0.5, 0.0])  # the first of a pair is better in all
    close(got.parts["overall"], [0.0, 0.5, 1.0])
    close(got.parts["failed"], [0.0] * 3)


def test_both_orders_are_averaged_by_category(monkeypatch: pytest.MonkeyPatch) -> None:
    """A judge that always names the first image says nothing, once both orders are asked."""
    reply = json.dumps({"categories": [{"name": "Meaning", "cat_winner": "Image 1"}], "winner": "Image 1"})
    script(monkeypatch, lambda question: Answer(text=reply))
    got = scores("win_rate", inputs_of(LEVELS), **options(categories=0.5) | {"orders": "both"})
    close(got.parts["Meaning"], [0.5] * 3)
    close(got.parts["order_bias"], [0.5] * 3)


def test_what_cannot_be_read_has_failed_or_is_a_tie(monkeypatch: pytest.MonkeyPatch) -> None:
    script(monkeypatch, lambda question: Answer(text='no winner: {"categories": []}'))
    failed = scores("win_rate", inputs_of(LEVELS), **options(categories=0.7))
    assert failed.errors == {"unparsable": 3}
    tied = options(categories=0.7)
    tied["comparator"]["unparsed"] = "tie"
    close(scores("win_rate", inputs_of(LEVELS), **tied).values, [0.5] * 3)


def test_a_sample_without_categories_has_its_rate() -> None:
    by_category = np.array([[0.0, np.nan], [1.0, np.nan]])
    assert blend(np.array([1.0, 0.25]), by_category, 0.7).tolist() == pytest.approx([0.65, 0.25])


@pytest.mark.parametrize(
    ("text", "winner"),
    [("Image 1", 1), ("video 2 wins", 0), ("Image 1/2", 1), ("Image 1 and Image 2", 0.5), ("12", 0.5), (None, 0.5)],
)
def test_winners_are_named(text: str | None, winner: float) -> None:
    assert named_winner(text) == winner


def test_answers_are_read() -> None:
    assert category_winners({"categories": "none"}) == {}
    assert category_winners({"categories": [3, {"cat_winner": "Image 2"}]}) == {"category": 0.0}
    assert json_record('say {"a": 1} and {"b": 2}') == {"b": 2}
    assert number_list('{"scores": [1, 2]} {"score": 3}', 2) == [1, 2]


@pytest.mark.parametrize(
    "wrong",
    [
        {"categories": 1.5},
        {"categories": 0.5, "comparator": {"judge": JUDGE}},
        {"categories": 0.5, "comparator": {"reward": "jpeg_compressibility"}},
    ],
)
def test_a_share_without_categories_is_refused(wrong: Mapping[str, Any]) -> None:
    with pytest.raises(ValueError, match="categories is a share in"):
        reward_options("win_rate", options() | dict(wrong))


def test_the_embedded_judge_compares_by_category() -> None:
    """A red circle that was asked for beats a blue one by colour, and a square by kind and colour."""
    scenes = [[("circle", "red")], [("circle", "blue")], [("square", "red")]]
    drawn = [
        draw_scene([Shape(label=label, color=color, x=32, y=32, radius=12) for label, color in scene])
        for scene in scenes
    ]
    record = {"tag": "colors", "include": [{"class": "circle", "count": 1, "color": "red"}]}
    inputs = inputs_of([0.0] * 3)
    inputs.prompts[:] = ["a photo of a red circle"] * 3
    inputs.metadata[:] = [record | {"prompt": "a photo of a red circle"}] * 3
    inputs.images.resize_(3, 3, 64, 64).copy_(torch.from_numpy(np.stack(drawn)).permute(0, 3, 1, 2) / 255)
    given = options(categories=0.7) | {"comparator": {"judge": {"model": "world:shapes"}, "style": "categories"}}
    got = scores("win_rate", inputs, **given)
    close(got.parts["overall"], [1.0, 0.25, 0.25])
    close(got.parts["kinds"], [0.75, 0.75, 0.0])
    assert got.parts["colours"][0] == 1.0
