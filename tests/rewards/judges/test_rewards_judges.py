"""Rewards made of judges that rate images and edits: what they ask, what they read, and what fails."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scripted_judges import JUDGE, ScriptedJudge, edits, grey, level, script, yes
from tiny_clip import assert_pointwise, inputs_of

from flowrl.rewards import build_reward, reward_options, to_uint8
from flowrl.rewards.judges import unified
from flowrl.rewards.judges.asking import full_weights, number_list
from flowrl.rewards.judges.chat import Answer, Question
from flowrl.rewards.judges.edit_judge import Planner, Principle, aggregate_principles, parse_principles
from flowrl.rewards.judges.templates import FIELDS, Template, load_template, load_templates

ONES = dict.fromkeys(("alignment", "coherence", "style"), 1.0)


def digits(numbers: Sequence[float]) -> tuple[dict[str, float]]:
    return ({str(digit): number for digit, number in enumerate(numbers)},)


@pytest.mark.parametrize("name", sorted(FIELDS))
def test_shipped_templates_hold_their_fields(name: str) -> None:
    """Every field of the question reaches the judge's eyes, and nothing else is left open."""
    template = load_template(name, None)
    images = [np.zeros((1, 1, 3), np.uint8)] * max(template.user.count("<image>"), 1)
    known = FIELDS[name] | {"prompt", "kind", "count", "criterion", "answer"}
    text = "".join(p for p in template.parts(images, {f: f"<{f}>" for f in known}) if isinstance(p, str))
    assert all(f"<{field}>" in text for field in FIELDS[name])
    assert not re.search(r"\{\w+\}", text)
    assert template.system is None


def test_templates_fill_once_and_place_images(tmp_path: Path) -> None:
    """What is filled in is never read again: a prompt with a field's name or a mark in it stays as it is."""
    first, second = np.zeros((1, 1, 3), np.uint8), np.ones((1, 1, 3), np.uint8)
    literal = Template(user="\\<image>\nLook: <image> and {prompt}.").parts([first], {"prompt": "\\<image>"})
    assert (literal[0], literal[2]) == ("<image>\nLook: ", " and \\<image>.")
    assert Template(user="\\<image>\n{prompt}").parts([first], {"prompt": "p"})[1:] == ("<image>\np",)
    template = Template(user='A <image> then <image>: {prompt} {"json": {other}}')
    parts = template.parts([first, second], {"prompt": "say <image> {other} {prompt}"})
    assert parts[0] == "A "
    assert parts[1] is first
    assert parts[2] == " then "
    assert parts[3] is second
    assert parts[4:] == (': say <image> {other} {prompt} {"json": {other}}',)
    assert Template(user="x {prompt}").parts([first, second], {"prompt": "y"}) == (first, second, "x y")
    (tmp_path / "mine.txt").write_text("You judge {prompt}.\n=== user ===\nRule {rule}\n")
    loaded = load_template("rubric_rule", str(tmp_path / "mine.txt"), images=1)
    assert (loaded.system, loaded.user) == ("You judge {prompt}.", "Rule {rule}")
    assert loaded.question([], {"prompt": "p"}).system == "You judge p."
    assert loaded.digest != replace(loaded, system=None).digest


def test_templates_refuse_what_cannot_work(tmp_path: Path) -> None:
    file = tmp_path / "x.txt"
    file.write_text("no field")
    (tmp_path / "empty.txt").write_text(" \n")
    cases: list[tuple[list[str], str, str]] = [
        (["rubric_rule"], str(file), r"must hold \{rule\}"),
        (["rubric_rule"], str(tmp_path / "none.txt"), "cannot be read as UTF-8 text"),
        (["aesthetic"], str(tmp_path / "empty.txt"), "is empty"),
        (["edit_quality", "edit_instruction"], str(file), "template must be a folder"),
    ]
    for names, template, message in cases:
        with pytest.raises(ValueError, match=message):
            load_templates(dict.fromkeys(names, 1), template)
    with pytest.raises(ValueError, match=r"marks 1 places .* 2 images"):
        Template(user="<image>").parts([np.zeros((1, 1, 3), np.uint8)] * 2, {})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"reasoning": "a [1, 2] b", "score": [20, 18]}', [20, 18]),
        ('Sure:\n```json\n{"score": [30, -4.5]}\n```', [25, 0]),  # cut to the scale
        ("naturalness and artefacts are [1, 2], so [12.5, 7]", [12.5, 7]),
        ('{"score": [20]}', None),
        ('{"score": [20, "x"]}', None),
        ('{"score": [20, true]}', None),
        (f'{{"score": [20, {10**400}]}}', None),
        ("20 and 18", None),
        ("", None),
    ],
)
def test_number_lists(text: str, expected: list[float] | None) -> None:
    assert number_list(text, 2, 0, 25) == expected


@pytest.mark.parametrize(
    ("style", "text", "expected"),
    [
        ("final_score", "Score of 2?\n**Final Score:** 4", {"score": 4}),
        ("final_score", "Final Score: 3.5/5", {"score": 3.5}),
        ("final_score", "final score: 9", {"score": 5}),
        ("final_score", "Score: 4", None),
        ("dimensions", "Alignment Score (1-5): 4\nCoherence Score (1-5): 3.5\nStyle Score (1-5): 5",
         {"alignment": 4, "coherence": 3.5, "style": 5}),
        ("dimensions", "**Alignment**\uff1a 4\n- coherence: 2\nin a style: 9 lives\nStyle score: **3**",
         {"alignment": 4, "coherence": 2, "style": 3}),
        ("dimensions", "Alignment: 4\nCoherence: 3", None),
        ("aesthetic", "<Score>2</Score> no, <Score> 4 </Score>", {"score": 4}),
        ("aesthetic", "Score 4", None),
        ("rational", "1. Text Faithfulness:\n## Score: 3.4\n2. Physical:\n## Score: 5\n3. Text:\n## Score: N/A\n"
         "# Summary: \nScore: 1", {"mean": 3.7}),
        ("rational", "## Score: N/A", None),
    ],
)  # fmt: skip
def test_ratings_are_read_from_answers(style: unified.Style, text: str, expected: dict[str, float] | None) -> None:
    found = unified.read_ratings(style, {unified.STYLES[style].templates[0]: text}, ONES)
    assert found == (None if expected is None else pytest.approx(expected))


def test_rating_scales() -> None:
    """The norms of UnifiedReward, 4 of 5 as 0.8 and 0.75, and of RationalRewards, 3.7 of 4 as 0.9."""
    assert unified.scale_rating(4, low=1, high=5, scale="divided") == pytest.approx(0.8)
    assert unified.scale_rating(4, low=1, high=5, scale="unit") == pytest.approx(0.75)
    assert unified.scale_rating(3.7, low=1, high=4, scale="unit") == pytest.approx(0.9)
    assert unified.scale_rating(4, low=1, high=5, scale="raw") == 4


def dimensions(question: Question) -> Answer:
    rating = 1 + level(question) / 100
    return Answer(text=f"Alignment: {rating}\nCoherence: {rating / 2 + 1}\nStyle: 2")


def test_unified_reward_weighs_dimensions_and_is_pointwise(monkeypatch: pytest.MonkeyPatch) -> None:
    judge = script(monkeypatch, dimensions)
    inputs = inputs_of(grey([0, 100, 250, 400]).clamp(max=1), ["a", "b", "c", "d"])
    options = {"judge": JUDGE, "weights": {"alignment": 1.4, "style": 0.7}}
    reward = build_reward("unified_reward", options=options)
    output = reward(inputs)
    alignment = 1 + np.array([0, 100, 250, 255]) / 100
    np.testing.assert_allclose(output.values, (1.4 * alignment + 0.7 * 2) / 2.1, rtol=1e-6)
    assert sorted(output.parts) == ["alignment", "style"]
    np.testing.assert_allclose(output.parts["alignment"], alignment, rtol=1e-6)
    assert_pointwise(reward, inputs)
    scaled = build_reward("unified_reward", options=options | {"scale": "unit"})(inputs).values
    np.testing.assert_allclose(scaled, (output.values - 1) / 4, rtol=1e-5)
    question = judge.asked[0]
    image, text = question.parts
    assert isinstance(image, np.ndarray)
    assert np.array_equal(image, to_uint8(inputs.images)[0])
    assert isinstance(text, str)
    assert text.endswith("Your task is provided as follows:\nText Caption: [a]")
    assert (question.max_tokens, question.temperature, question.seed) == (4096, 0.0, None)
    assert (reward.kind, reward.waits, sorted(reward.needs)) == ("remote", True, ["images", "prompts"])
    assert "alignment-1.4,coherence-0,style-0.7" in reward.version
    assert judge.version in reward.version
    assert build_reward("unified_reward", options={"judge": {"model": "here"}}).kind == "pointwise"


def test_unified_reward_failures_are_counted_and_never_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {50: Answer(error="timeout"), 100: Answer(text="Final Score: none"), 150: Answer(text="Final Score: 4")}
    script(monkeypatch, lambda question: answers[level(question)])
    output = build_reward("unified_reward", options={"judge": JUDGE, "style": "final_score"})(
        inputs_of(grey([50, 100, 150]))
    )
    assert output.valid.tolist() == [False, False, True]
    assert output.values.isnan().tolist() == [True, True, False]
    assert float(output.values[2]) == pytest.approx(0.8)
    assert output.errors == {"timeout": 1, "unparsed": 1}


def test_sampled_answers_are_seeded_by_sample_and_iteration(monkeypatch: pytest.MonkeyPatch) -> None:
    judge = script(monkeypatch, lambda question: Answer(text="Score: 2"))
    reward = build_reward("unified_reward", options={"judge": JUDGE, "style": "rational"})
    inputs = inputs_of(grey([1, 2, 3]))
    assert reward(inputs).values.tolist() == pytest.approx([1 / 3] * 3)
    seeds = [question.seed for question in judge.asked]
    assert len(set(seeds)) == 3
    assert all(seed is not None and 0 <= seed < 2**31 for seed in seeds)
    reward(inputs[[2, 0]])
    assert [question.seed for question in judge.asked[3:]] == [seeds[2], seeds[0]]
    reward(replace(inputs, iteration=1))
    assert not set(seeds) & {question.seed for question in judge.asked[5:]}


def test_unified_reward_of_edits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Quality is judged from the edited image alone, the instruction from source and edited image."""

    def rate(question: Question) -> Answer:
        images = [part for part in question.parts if not isinstance(part, str)]
        high = level(question) // 10
        return Answer(text=f'{{"score": [{high}, 5]}}' if len(images) == 1 else f"[{high}, {images[0][0, 0, 0]}]")

    judge = script(monkeypatch, rate)
    inputs = edits()
    options = {"judge": JUDGE, "style": "edit", "weights": {"quality": 0.5, "instruction": 1.5}}
    output = build_reward("unified_reward", options=options)(inputs)
    high = np.array([5.0, 10, 15, 20])
    quality, instruction = (high + 5) / 2, (high + np.arange(10, 14)) / 2
    np.testing.assert_allclose(output.parts["quality"], quality)
    np.testing.assert_allclose(output.parts["instruction"], instruction)
    np.testing.assert_allclose(output.values, (0.5 * quality + 1.5 * instruction) / 2)
    assert len(judge.asked) == 8
    build_reward("unified_reward", options=options | {"weights": {"quality": 1}})(inputs)
    assert len(judge.asked) == 12, "a dimension without weight is not asked for"
    assert inputs.source_images is not None
    lacking = build_reward("unified_reward", options=options)(
        replace(inputs, source_images=[[], *inputs.source_images[1:]])
    )
    assert lacking.errors == {"missing_field": 1}
    assert lacking.valid.tolist() == [False, True, True, True]


def test_unified_reward_shows_frames_of_videos(monkeypatch: pytest.MonkeyPatch) -> None:
    judge = script(monkeypatch, lambda question: Answer(text="Final Score: 1"))
    videos = torch.stack([grey([10 * f + b for f in range(9)]) for b in range(2)])
    options = {"judge": JUDGE, "style": "final_score", "num_frames": 3}
    build_reward("unified_reward", options=options)(inputs_of(videos[:, 0], videos=videos))
    shown = [[int(part[0, 0, 0]) for part in q.parts if not isinstance(part, str)] for q in judge.asked]
    assert shown == [[0, 40, 80], [1, 41, 81]]
    with pytest.raises(ValueError, match="images are made, not videos"):
        build_reward("unified_reward", options=options)(inputs_of(grey([1])))


@pytest.mark.parametrize(
    ("logits", "expected"),
    [([0.0] * 6, 0.5), ([0, 0, 0, 0, 0, math.log(5)], 0.7), ([-math.inf] * 5 + [0.0], 1.0)],
)
def test_edit_score_is_the_expected_digit(
    logits: list[float], expected: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    judge = script(monkeypatch, lambda question: Answer(logprobs=digits(logits)))
    inputs = edits()
    output = build_reward("edit_score", options={"judge": JUDGE})(inputs)
    assert output.values.tolist() == pytest.approx([expected] * 4)
    source, edited, text = judge.asked[1].parts
    assert isinstance(source, np.ndarray)
    assert isinstance(edited, np.ndarray)
    assert isinstance(text, str)
    assert (int(source[0, 0, 0]), int(edited[0, 0, 0])) == (11, 100)
    assert "image 1" in text
    assert "need 1" in text
    assert (judge.asked[1].max_tokens, judge.asked[1].top_logprobs, judge.asked[1].temperature) == (1, 20, 0.0)


def test_edit_score_failures_and_items_that_lack_a_field(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {100: Answer(error="status_500"), 150: Answer(logprobs=({"good": -0.1},)), 200: Answer(text="5")}
    judge = script(monkeypatch, lambda question: answers[level(question)])
    inputs = edits()
    inputs.metadata[0].clear()
    output = build_reward("edit_score", options={"judge": JUDGE})(inputs)
    assert output.errors == {"missing_field": 1, "status_500": 1, "unparsed": 2}
    assert not output.valid.any()
    assert output.values.isnan().all()
    assert len(judge.asked) == 3
    no_sources = build_reward("edit_score", options={"judge": JUDGE})(replace(inputs, source_images=None))
    assert no_sources.errors == {"missing_field": 4}
    assert len(judge.asked) == 3
    judge.answer = lambda question: Answer(logprobs=digits([0, 0, 0, 0, 0, level(question) / 100]))
    plain = build_reward("edit_score", options={"judge": JUDGE, "requirement": None})
    assert_pointwise(plain, inputs)
    assert "must satisfy" not in str(judge.asked[-1].parts[-1])


def test_edit_ratings_are_the_geometric_mean_averaged_over_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """sqrt(SC PQ) of each draw; a failed draw is left out, and an item fails with all of them."""

    def rate(question: Question) -> Answer:
        if level(question) == 200 or (level(question) == 150 and question.seed in seen[:2]):
            return Answer(error="timeout")
        alone = sum(not isinstance(part, str) for part in question.parts) == 1
        return Answer(text='{"score": [9, 7]}' if alone else '{"score": [25, 25]}')

    seen: list[int | None] = []
    judge = script(monkeypatch, rate)
    reward = build_reward("edit_score", options={"judge": JUDGE, "method": "ratings", "draws": 2})
    reward(edits([150]))
    seen += [question.seed for question in judge.asked]
    assert len(set(seen)) == 4
    assert judge.asked[0].temperature == 0.7
    assert judge.asked[0].max_tokens == 512
    output = reward(edits([150, 200]))
    assert output.valid.tolist() == [True, False]
    assert output.errors == {"timeout": 1}
    assert float(output.values[0]) == pytest.approx(math.sqrt(1.0 * 0.28)), "the lower of 9 and 7, of 25"
    assert float(output.parts["consistency"][0]) == 1.0
    assert float(output.parts["quality"][0]) == pytest.approx(0.28)
    mean = build_reward("edit_score", options={"judge": JUDGE, "method": "ratings", "of_pair": "mean"})(edits([90]))
    assert float(mean.values[0]) == pytest.approx(math.sqrt(1.0 * 0.32))


PLAN = """Here they are:
1. **KEEP**: the sky is unchanged
FOLLOW: the dog is red
- Follow: no second dog
QUALITY: edges are clean
KEEP: the sky is unchanged
FOLLOW:
"""


def test_principles_are_read_and_cut_evenly() -> None:
    sky, red = Principle(kind="keep", text="the sky is unchanged"), Principle(kind="follow", text="the dog is red")
    second, clean = Principle(kind="follow", text="no second dog"), Principle(kind="quality", text="edges are clean")
    assert parse_principles(PLAN, 10) == (sky, red, second, clean)
    assert parse_principles(PLAN, 3) == (sky, red, clean)
    assert parse_principles("nothing", 3) == ()


def test_principles_are_aggregated_by_kind() -> None:
    principles = [Principle(kind=kind, text=str(i)) for i, kind in enumerate(["keep", "follow", "follow", "quality"])]
    scores, weights = [0.9, 0.2, 0.6, 0.5], {"keep": 1.0, "follow": 2.0, "quality": 0.0}
    value, means = aggregate_principles(principles, scores, weights, "mean")
    assert value == pytest.approx((0.9 + 2 * 0.4) / 3)
    assert means == pytest.approx({"keep": 0.9, "follow": 0.4})
    assert aggregate_principles(principles, scores, weights, "geometric")[0] == pytest.approx((0.9 * 0.4**2) ** (1 / 3))
    assert aggregate_principles(principles, scores, weights, "min")[0] == 0.2
    assert aggregate_principles(principles, [0.0, *scores[1:]], weights, "geometric")[0] == 0.0
    with pytest.raises(ValueError, match="no principle is of a kind with weight"):
        aggregate_principles(principles[3:], scores[3:], weights, "mean")


def test_edit_principles_plan_once_and_check_each(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(question: Question) -> Answer:
        text = str(question.parts[-1])
        if "Write down" in text:
            return Answer(text=PLAN)
        return Answer(text=f"I think so. Score: 1\nScore: {level(question) / 25 if 'the dog is red' in text else 10}")

    judge = script(monkeypatch, answer)
    inputs = edits()
    sources = [[image] for image in grey([10, 10, 10, 30])]
    inputs = replace(inputs, prompts=["paint it red"] * 4, source_images=sources)
    reward = build_reward("edit_principles", options={"judge": JUDGE})
    output = reward(inputs)
    lists = [question for question in judge.asked if "Write down" in str(question.parts[-1])]
    assert len(lists) == 2
    assert len(judge.asked) == 2 + 4 * 4
    red = np.array([50, 100, 150, 200]) / 250
    np.testing.assert_allclose(output.values, (1 + (red + 1) / 2 + 1) / 3, rtol=1e-6)
    np.testing.assert_allclose(output.parts["follow"], (red + 1) / 2, rtol=1e-6)
    assert_pointwise(reward, inputs)
    assert sum("Write down" in str(question.parts[-1]) for question in judge.asked) == 2, "plans are kept"


def test_edit_principles_of_the_record_by_yes_and_no(monkeypatch: pytest.MonkeyPatch) -> None:
    """A record's own principles are checked as they are, kinds without weight not at all."""
    judge = script(monkeypatch, lambda question: yes(level(question) / 255))
    inputs = edits()
    for record in inputs.metadata:
        record["principles"] = ["FOLLOW: it is red", "QUALITY: it is sharp"]
    options = {"judge": JUDGE, "verify": "yes_no", "weights": {"follow": 1.0}}
    output = build_reward("edit_principles", options=options)(inputs)
    np.testing.assert_allclose(output.values, np.array([50, 100, 150, 200]) / 255, rtol=1e-5)
    assert len(judge.asked) == 4
    assert "it is red" in str(judge.asked[0].parts[-1])
    assert sorted(output.parts) == ["follow"]
    inputs.metadata[0]["principles"] = ["it is red"]
    with pytest.raises(ValueError, match="field principles must be a list of texts"):
        build_reward("edit_principles", options=options)(inputs)


def test_edit_principles_failures_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(question: Question) -> Answer:
        planned = "Write down" in str(question.parts[-1])
        by_level = {10: Answer(error="timeout"), 11: Answer(text="no list"), 100: Answer(), 150: Answer(text="hm")}
        by_level |= {50: Answer(), 200: Answer(error="status_500")}
        return by_level.get(level(question), Answer(text=PLAN)) if planned else by_level[level(question)]

    script(monkeypatch, answer)
    inputs = edits([50, 100, 150, 200, 250])
    assert inputs.source_images is not None
    inputs = replace(inputs, source_images=[*inputs.source_images[:4], []])
    output = build_reward("edit_principles", options={"judge": JUDGE})(inputs)
    assert not output.valid.any()
    assert output.errors == {"timeout": 1, "unparsed": 2, "status_500": 1, "missing_field": 1}


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("unified_reward", {"judge": {}}, "judge: required key 'model' is missing"),
        ("unified_reward", {"judge": JUDGE, "style": "aesthetic", "weights": {"style": 1}}, "weights mean nothing"),
        ("unified_reward", {"judge": JUDGE, "weights": {"beauty": 1}}, "alignment, coherence, style to numbers"),
        ("unified_reward", {"judge": JUDGE, "style": "edit", "num_frames": 2}, "num_frames must be at least 1, and 1"),
        ("unified_reward", {"judge": JUDGE, "temperature": -1}, "temperature must be at least 0"),
        ("edit_score", {"judge": JUDGE, "draws": 3}, "draws must be at least 1, and above 1 only"),
        ("edit_score", {"judge": JUDGE, "temperature": 0.5}, "mean nothing with method digits"),
        ("edit_principles", {"judge": JUDGE, "max_principles": 0}, "max_principles must be at least 1"),
        ("edit_principles", {"judge": JUDGE, "verify": "yes_no", "temperature": 1}, "means nothing with verify yes_no"),
        (
            "edit_principles",
            {"judge": JUDGE, "planner": {"server": "http://a"}},
            "planner: required key 'model' is missing",
        ),
        ("grid_consistency", {}, "mode 'grid' needs judge"),
        ("grid_consistency", {"judge": JUDGE, "mode": "clip_text"}, "asks no judge"),
        ("grid_consistency", {"judge": JUDGE, "grid": "1x1"}, "grid must be ROWSxCOLUMNS"),
        ("grid_consistency", {"judge": JUDGE, "criteria": []}, "criteria must be a list of texts"),
    ],
)
def test_options_refused(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        reward_options(name, options)


def test_a_planner_in_this_process_keeps_a_reward_out_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    script(monkeypatch, lambda question: Answer())
    local = {"model": "somewhere/here"}
    waits = [
        build_reward("edit_principles", options={"judge": judge, "planner": planner}).waits
        for judge in (JUDGE, local)
        for planner in (None, JUDGE, local)
    ]
    assert waits == [True, True, False, False, False, False]


def test_threads_share_one_plan_of_an_instruction(monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(question: Question) -> Answer:
        time.sleep(0.05)
        return Answer(text="KEEP: the sky is unchanged")

    judge = ScriptedJudge(slow)
    words = load_template("principle_list", None)
    planner, image = Planner(judge, words, limit=3, max_tokens=9), np.zeros((2, 2, 3), dtype=np.uint8)
    with ThreadPoolExecutor(4) as executor:
        plans = list(executor.map(lambda _: planner.plan(["make it red"], [image])[0], range(4)))
    assert len(judge.asked) == 1
    assert plans == [(Principle(kind="keep", text="the sky is unchanged"),)] * 4


def test_weights_refused_or_filled_up() -> None:
    assert full_weights(None, ("a", "b")) == {"a": 1.0, "b": 1.0}
    assert full_weights({"b": 2}, ("a", "b")) == {"a": 0.0, "b": 2.0}
    refused: list[dict[str, Any]] = [{}, {"a": 0}, {"a": -1, "b": 2}, {"a": True}, {"a": math.inf}]
    for wrong in refused:
        with pytest.raises(ValueError, match="weights must be a mapping"):
            full_weights(wrong, ("a", "b"))


def test_judges_that_answer_too_few_questions_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    judge = script(monkeypatch, dimensions)
    monkeypatch.setattr(ScriptedJudge, "ask", lambda self, questions: [Answer()])
    with pytest.raises(ValueError, match="asked 2 questions and gave 1 answers"):
        build_reward("unified_reward", options={"judge": JUDGE})(inputs_of(grey([1, 2])))
    assert judge.asked == []
