"""Consistency of the cells of a grid and of edits, by a judge and by CLIP."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from scripted_judges import JUDGE, edits, grey, level, script, yes
from tiny_clip import assert_pointwise, inputs_of, random_images, write_tiny_clip

from flowrl.rewards import RewardInputs, build_reward, to_uint8
from flowrl.rewards.judges import templates as judge_templates
from flowrl.rewards.judges.chat import Answer, Question


def grids(levels: Sequence[Sequence[float]], prompts: list[str]) -> RewardInputs:
    """2x2 grids of flat cells."""
    images = torch.stack([
        torch.cat([torch.cat([cell[0], cell[1]], 2), torch.cat([cell[2], cell[3]], 2)], 1) for cell in map(grey, levels)
    ])  # fmt: skip
    return inputs_of(images, prompts)


def test_grid_consistency_is_the_mean_over_pairs_and_criteria(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(question: Question) -> Answer:
        first, second = (int(part[0, 0, 0]) for part in question.parts if not isinstance(part, str))
        return yes((first + 2 * second) / 1000 + (0.1 if "identity" in str(question.parts[-1]) else 0.0))

    judge = script(monkeypatch, answer)
    levels = [[10, 20, 30, 40], [200, 100, 50, 90], [10, 20, 30, 40]]
    inputs = grids(levels, ["2x2 cats", "2x2 dogs", "one cat"])
    reward = build_reward(
        "grid_consistency", options={"judge": JUDGE, "template": "own", "criteria": ["style", "identity"]}
    )
    output = reward(inputs)
    expected = [np.mean([(a + 2 * b) / 1000 for a, b in combinations(row, 2)]) + 0.05 for row in levels[:2]]
    np.testing.assert_allclose(output.values[:2], expected, rtol=1e-5)
    assert output.errors == {"missing_field": 1}
    assert len(judge.asked) == 2 * 6 * 2
    assert judge.asked[0].top_logprobs == 20
    assert judge.asked[0].max_tokens == 1
    assert_pointwise(reward, inputs[[0, 1]])
    inputs.metadata[0]["criteria"] = "logic"
    fixed = build_reward("grid_consistency", options={"judge": JUDGE, "template": "own", "grid": "1x2"})
    judge.asked.clear()
    assert fixed(inputs).valid.all()
    assert len(judge.asked) == 3
    assert "in this respect: logic" in str(judge.asked[0].parts[-1])
    judge.answer = lambda question: Answer(error="timeout") if level(question) == 100 else yes(0.5)
    assert reward(inputs[[0, 1]]).errors == {"timeout": 1}


def test_criteria_by_dimension_count_as_dimensions(monkeypatch: pytest.MonkeyPatch) -> None:
    """T2IS-Bench: the mean over a dimension's criteria, then over dimensions."""
    odds = {"colours": 0.2, "light": 0.4, "face": 0.9, "logic": 0.5}

    def answer(question: Question) -> Answer:
        return yes(next(p for word, p in odds.items() if f"respect: {word}" in str(question.parts[-1])))

    judge = script(monkeypatch, answer)
    inputs = grids([[10, 20, 30, 40]], ["2x2 cats"])
    reward = build_reward("grid_consistency", options={"judge": JUDGE, "template": "own"})
    inputs.metadata[0]["criteria"] = {"style": {"a": "colours", "b": "light"}, "identity": ["face"], "logic": "logic"}
    np.testing.assert_allclose(reward(inputs).values, [(0.3 + 0.9 + 0.5) / 3], rtol=1e-5)
    assert len(judge.asked) == 4 * 6
    edit = build_reward("grid_consistency", options={"judge": JUDGE, "template": "own", "mode": "edit"})
    changed = edits([50])
    changed.metadata[0]["criteria"] = inputs.metadata[0]["criteria"]
    judge.answer = lambda q: yes(0.36) if "Instruction:" in str(q.parts[-1]) else answer(q)
    np.testing.assert_allclose(edit(changed).values, [np.sqrt(0.36 * (0.3 + 0.9 + 0.5) / 3)], rtol=1e-5)
    refused: list[Any] = [{}, [], {"style": {}}, {"style": [1]}, 7]
    for wrong in refused:
        inputs.metadata[0]["criteria"] = wrong
        with pytest.raises(ValueError, match="criteria must be a text or a list of texts, or a mapping"):
            reward(inputs)


def test_a_template_without_criterion_asks_once_a_pair_about_the_theme(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(judge_templates.FIELDS, "consistency", frozenset())
    judge = script(monkeypatch, lambda question: yes(0.25))
    (tmp_path / "own.txt").write_text("Of one set about {theme} Yes or No?")
    inputs = grids([[10, 20, 30, 40]], ["A 2x2 grid of one fox. [TOP]: it runs. [END]: it sleeps"])
    inputs.metadata[0]["criteria"] = ["style", "identity"]
    options = {"judge": JUDGE, "template": str(tmp_path / "own.txt")}
    np.testing.assert_allclose(build_reward("grid_consistency", options=options)(inputs).values, [0.25], rtol=1e-5)
    assert [question.parts[-1] for question in judge.asked] == [
        "Of one set about A 2x2 grid of one fox. Yes or No?"
    ] * 6


def test_consistency_of_edits_is_the_geometric_mean_with_following(monkeypatch: pytest.MonkeyPatch) -> None:
    judge = script(monkeypatch, lambda q: yes(0.36 if "Instruction:" in str(q.parts[-1]) else level(q) / 250))
    reward = build_reward("grid_consistency", options={"judge": JUDGE, "template": "own", "mode": "edit"})
    output = reward(edits())
    kept = np.array([50, 100, 150, 200]) / 250
    np.testing.assert_allclose(output.values, np.sqrt(0.36 * kept), rtol=1e-5)
    np.testing.assert_allclose(output.parts["consistency"], kept, rtol=1e-5)
    assert len(judge.asked) == 8
    assert reward(inputs_of(grey([1]))).errors == {"missing_field": 1}


def test_consistency_of_cells_by_clip(tmp_path: Path) -> None:
    """Against the model's own forward pass on cells cut by hand."""
    folder = write_tiny_clip(tmp_path)
    prompts = ["2x1 pets. [A]: a cat. [B]: a dog", "a 2x1 strip. [A]: red. [B]: a red hat", "2x1 of one. [A]: red"]
    inputs = inputs_of(random_images(3, 80, 48), prompts)
    by_text = build_reward("grid_consistency", options={"mode": "clip_text", "model": str(folder)})
    by_image = build_reward("grid_consistency", options={"mode": "clip_image", "model": str(folder)})
    model = transformers.CLIPModel.from_pretrained(folder).eval()
    processor = transformers.CLIPProcessor.from_pretrained(folder)
    texts = [["a cat.", "a dog."], ["red.", "a red hat."]]
    for item, words in enumerate(texts):
        pixels = to_uint8(inputs.images)[item]
        cells = [Image.fromarray(pixels[:40]), Image.fromarray(pixels[40:])]
        batch = processor(text=words, images=cells, padding=True, return_tensors="pt")
        with torch.no_grad():
            out = model(**batch)
        cosine = (out.image_embeds * out.text_embeds).sum(-1).mean()
        torch.testing.assert_close(by_text(inputs).values[item], cosine, rtol=0, atol=1e-5)
        across = (out.image_embeds[0] * out.image_embeds[1]).sum()
        torch.testing.assert_close(by_image(inputs).values[item], across, rtol=0, atol=1e-5)
    assert by_text(inputs).errors == {"missing_field": 1}
    assert by_image(inputs).valid.all()
    inputs.metadata[2]["sub_prompts"] = ["red", "blue"]
    assert by_text(inputs).valid.all()
    assert_pointwise(by_image, inputs)
    inputs.metadata[2]["sub_prompts"] = "no"  # two letters are no two texts
    with pytest.raises(ValueError, match=r"sub_prompts must be a list of texts, or .* one per cell, got 'no'"):
        by_text(inputs)
