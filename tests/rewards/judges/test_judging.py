"""Scores from judges' answers, and the reward `yes_no` on a judge that is scripted."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scripted_judges import JUDGE, ScriptedJudge, levels, script, text_of

from flowrl.rewards import Reward, RewardInputs, build_reward, reward_options
from flowrl.rewards.base.outputs import check_output
from flowrl.rewards.judges.answers import (
    answer_forms,
    answer_mass,
    expected_level,
    logsumexp,
    merge,
    parse_score,
    parse_winner,
    parse_word,
    yes_no,
)
from flowrl.rewards.judges.asking import geometric_mean
from flowrl.rewards.judges.chat import Answer, Question

LEVELS = {"excellent": 5.0, "good": 4.0, "fair": 3.0, "poor": 2.0, "bad": 1.0}
Q_ALIGN = {"excellent": 1.0, "good": 0.75, "fair": 0.5, "poor": 0.25, "bad": 0.0}
DIGITS = {str(i): i / 5 for i in range(6)}


def test_candidates_that_differ_in_case_and_space_add_up() -> None:
    found = merge({"Yes": math.log(0.2), " yes": math.log(0.1), "YES\n": math.log(0.05), "\u0120No": math.log(0.3)})
    assert set(found) == {"yes", "no"}
    assert found["yes"] == pytest.approx(math.log(0.35), abs=1e-12)
    assert found["no"] == pytest.approx(math.log(0.3), abs=1e-12)
    assert logsumexp([]) == -math.inf
    assert logsumexp([-1000.0, -1000.0]) == pytest.approx(-1000 + math.log(2), abs=1e-12)


def test_yes_no_is_the_share_of_yes_among_the_two() -> None:
    assert yes_no({"Yes": math.log(0.6), "No": math.log(0.2)}) == pytest.approx(0.75, abs=1e-12)
    split = {"Yes": math.log(0.3), " yes": math.log(0.2), "YES": math.log(0.1), "no": math.log(0.2), "The": -0.1}
    assert yes_no(split) == pytest.approx(0.75, abs=1e-12)
    assert yes_no({"Yes": 17.5, "No": 26.0}, yes="no", no="yes") == pytest.approx(0.999797, abs=5e-7)
    assert yes_no({"Yes": 17.5, "No": 26.0}) == pytest.approx(1 - 0.999797, abs=5e-7)
    assert yes_no({"oui": -1.0, "non": -1.0}, yes="oui", no="non") == pytest.approx(0.5)


def test_yes_no_with_a_side_missing() -> None:
    assert yes_no({"Yes": -3.0, "Maybe": -0.1}) == 1.0
    assert yes_no({"No": -3.0}) == 0.0
    assert yes_no({"No": -3.0}, yes="no", no="yes") == 1.0
    assert yes_no({"Maybe": -0.1}) is None
    assert yes_no({}) is None
    assert yes_no({"Yes": -9999.0, "No": -0.0}) == 0.0  # far apart: no overflow on the way
    assert yes_no({"Yes": -0.0, "No": -9999.0}) == 1.0


@pytest.mark.parametrize(
    ("logits", "value"),
    [([0.0] * 6, 0.5), ([0, 0, 0, 0, 0, math.log(5)], 0.7), ([-math.inf] * 5 + [3.0], 1.0)],
)
def test_expected_digit(logits: list[float], value: float) -> None:
    lp = {str(i): z for i, z in enumerate(logits) if z > -math.inf}
    assert expected_level(lp | {"The": 50.0}, DIGITS) == pytest.approx(value, abs=1e-12)


@pytest.mark.parametrize(
    ("logits", "levels", "value"),
    [
        ([0.0] * 5, LEVELS, 3.0),
        ([2, 1, 0, -1, -2], LEVELS, 4.451942),
        ([2, 1, 0, -1, -2], Q_ALIGN, 0.862985),
    ],
)
def test_expected_level_of_words(logits: list[float], levels: dict[str, float], value: float) -> None:
    lp = {f" {word.capitalize()}": float(z) for word, z in zip(levels, logits, strict=True)}
    assert expected_level(lp, levels) == pytest.approx(value, abs=5e-7)


def test_expected_level_with_levels_missing() -> None:
    assert expected_level({" excellent": -4.0}, LEVELS) == 5.0
    assert expected_level({"bad": -4.0, "x": 0.0}, LEVELS) == 1.0
    assert expected_level({"x": 0.0}, LEVELS) is None


def test_answer_mass_is_not_renormalised() -> None:
    lp = {"2": math.log(0.4), "Two": math.log(0.2), " two": math.log(0.1), "3": math.log(0.2)}
    assert answer_forms("Two") == ("two", "2")
    assert answer_forms(2) == ("2", "two")
    assert answer_forms("11") == ("11",)
    assert answer_mass(lp, answer_forms("two")) == pytest.approx(0.7, abs=1e-12)
    assert answer_mass(lp, ("2",)) == pytest.approx(0.4, abs=1e-12)
    assert answer_mass(lp, answer_forms(5)) == 0.0
    assert answer_mass({"Yes": math.log(0.7), "yes": math.log(0.3000001)}, ("yes",)) == 1.0


def test_answer_mass_of_a_word_that_is_several_tokens() -> None:
    lp = {" tur": math.log(0.5), " Tur": math.log(0.1), "tu": math.log(0.2), "t": math.log(0.1), "1": math.log(0.1)}
    assert answer_mass(lp, ("turquoise",)) == pytest.approx(0.6, abs=1e-12)
    assert answer_mass(lp | {"turquoise": math.log(0.01)}, ("turquoise",)) == pytest.approx(0.01, abs=1e-12)
    assert answer_mass({"10": -0.1, "1": -0.2, "b": -0.1}, ("100", "blue")) == 0.0


def test_soft_tifa_mean() -> None:
    assert geometric_mean([0.9, 0.8, 0.5]) == pytest.approx(0.711379, abs=5e-7)
    assert geometric_mean([0.9, 0.0, 0.5]) == 0.0


@pytest.mark.parametrize(
    ("text", "options", "value"),
    [
        ("On a scale of 1 to 5 ... Final Score: 4", {"pattern": r"final score:\s*([\d.]+)"}, 4.0),
        ("Final Score: 2. No wait. FINAL SCORE: 4.", {"pattern": r"final score:\s*([\d.]+)"}, 4.0),
        ("first 2 then 3", {}, 3.0),
        ("11", {}, 5.0),
        ("-3", {}, 1.0),
        ("3.75 of it", {}, 3.75),
        ("no number", {}, None),
        ("Final Score: ...", {"pattern": r"final score:\s*([\d.]+)"}, None),
        ("", {}, None),
    ],
)
def test_parse_score(text: str, options: dict[str, Any], value: float | None) -> None:
    found = parse_score(text, low=1, high=5, **{"pattern": r"([-+]?\d+(?:\.\d+)?)", **options})
    assert found == value
    if found == 4.0:  # the two ways in which UnifiedReward's number becomes a reward
        assert found is not None
        assert (found / 5, (found - 1) / 4) == (0.8, 0.75)


def test_parse_word_takes_the_last_that_stands_alone() -> None:
    assert parse_word("Yes? The hand is not right, so: No.", ("yes", "no")) == "no"
    assert parse_word("nothing known, eyes", ("yes", "no")) is None
    assert parse_word("**YES**", ("yes", "no")) == "yes"


@pytest.mark.parametrize(
    ("text", "winner"),
    [
        ("<answer>Image 1</answer>", "A"),
        ("<think>Image 1 is better lit</think><answer>Image 2 is better</answer>", "B"),
        ("<ANSWER> picture b </ANSWER>", "B"),
        ("<answer>1</answer>", "A"),
        ("<answer>B.", "B"),
        ("<answer>image 1</answer> on reflection <answer>image 2</answer>", "B"),
        ("<answer>Image 1 is better than Image 2</answer>", "A"),
        ("<answer>Both are equally good</answer>", "tie"),
        ("<answer>Tie</answer>", "tie"),
        ("Both follow the text.\nThe second image is slightly better.", "B"),
        ("Both are fine, but Image 1 wins over Image 2", "A"),
        ("I compared Image 1 with Image 2.\n**Image 2**", "B"),
        ("I prefer the first picture.", "A"),
        ("Image 1 shows a dog and Image 2 a cat", None),
        ("<answer></answer>", None),
        ("A dog sits on a bench", None),
        ("", None),
    ],
)
def test_parse_winner(text: str, winner: str | None) -> None:
    assert parse_winner(text) == winner


def level_of(question: Question, place: int = 0) -> int:
    """The grey level of an image of a question."""
    return levels(question)[place]


def odds_of(probability: float) -> Answer:
    return Answer(logprobs=({"Yes": math.log(probability), " no": math.log1p(-probability)},))


def inputs_of(levels: Sequence[int], metadata: list[dict[str, Any]] | None = None, **more: Any) -> RewardInputs:
    batch = len(levels)
    return RewardInputs(
        prompts=[f"image {level}" for level in levels],
        images=torch.tensor(levels, dtype=torch.float32).reshape(batch, 1, 1, 1).expand(batch, 3, 2, 2) / 255,
        metadata=metadata or [{} for _ in levels],
        group_ids=torch.zeros(batch, dtype=torch.int64),
        sample_ids=torch.tensor(levels, dtype=torch.int64),
        **more,
    )


@pytest.fixture
def build(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Reward, ScriptedJudge]]:
    def make(reply: Callable[[Question], Answer], **options: Any) -> tuple[Reward, ScriptedJudge]:
        chat = script(monkeypatch, reply)
        return build_reward("yes_no", options={"judge": JUDGE, **options}), chat

    return make


Build = Callable[..., tuple[Reward, ScriptedJudge]]


def test_yes_no_reward_asks_for_one_greedy_token_about_each_image(build: Build) -> None:
    reward, chat = build(lambda question: odds_of(level_of(question) / 100))
    output = check_output(reward(inputs_of([20, 60, 90])), 3, "yes_no")
    torch.testing.assert_close(output.values, torch.tensor([0.2, 0.6, 0.9]), rtol=0, atol=1e-6)
    torch.testing.assert_close(reward(inputs_of([90, 20])).values, torch.tensor([0.9, 0.2]), rtol=0, atol=1e-6)
    assert {(q.max_tokens, q.temperature, q.top_logprobs, q.seed) for q in chat.asked} == {(1, 0.0, 20, None)}
    image, text = chat.asked[1].parts
    assert isinstance(image, np.ndarray)
    assert isinstance(text, str)
    assert image.dtype == np.uint8
    assert "image 60" in text
    assert "{" not in text
    assert reward.kind == "remote"
    assert reward.needs == {"images", "prompts"}
    assert "scripted" in reward.version


def test_yes_no_reward_variants(build: Build, tmp_path: Path) -> None:
    answer = Answer(logprobs=({"Yes": math.log(0.5), "yes": math.log(0.1), "No": math.log(0.2), "A": math.log(0.2)},))
    template = tmp_path / "mine.txt"
    template.write_text("You judge.\n=== user ===\nIs <image> {prompt}? {json}")
    cases: list[tuple[dict[str, Any], float]] = [
        ({}, 0.75),
        ({"inverted": True}, 0.25),
        ({"score": "mass"}, 0.6),
        ({"score": "mass", "inverted": True}, 0.2),
        ({"template": str(template)}, 0.75),
    ]
    versions = set()
    for options, value in cases:
        reward, chat = build(lambda _: answer, **options)
        assert reward(inputs_of([7])).values.item() == pytest.approx(value, abs=1e-6)
        versions.add(reward.version)
    assert len(versions) == len(cases)
    assert chat.asked[0].system == "You judge."
    assert [type(part) for part in chat.asked[0].parts] == [str, np.ndarray, str]
    assert text_of(chat.asked[0]) == "Is  image 7? {json}"


def test_yes_no_reward_shows_sources_then_references_then_frames(build: Build) -> None:
    def grey(level: int) -> torch.Tensor:
        return torch.full((3, 4, 5), level / 255)

    videos = torch.tensor([10.0, 11, 12, 13, 14]).reshape(1, 5, 1, 1, 1).expand(1, 5, 3, 2, 2) / 255
    inputs = inputs_of([10], videos=videos, source_images=[[grey(1), grey(2)]], reference_images=[[grey(3)]])
    reward, chat = build(lambda _: odds_of(0.5), with_sources=True, with_references=True, num_frames=3)
    assert bool(reward(inputs).valid.all())
    assert [level_of(chat.asked[0], place) for place in range(6)] == [1, 2, 3, 10, 12, 14]
    assert isinstance(chat.asked[0].parts[-1], str)
    assert reward.needs == {"images", "prompts", "videos", "source_images", "reference_images"}


def test_soft_tifa_reward_asks_every_question_of_the_record(build: Build) -> None:
    replies = {
        "How many dogs?": {"2": math.log(0.5), " Two": math.log(0.4), "3": math.log(0.1)},  # 0.9 for two
        "Colour?": {"Red": math.log(0.8), "blue": math.log(0.2)},
        "Is it night?": {"No": math.log(0.5), "Yes": math.log(0.5)},
    }

    def reply(question: Question) -> Answer:
        return Answer(logprobs=(next(lp for text, lp in replies.items() if text in text_of(question)),))

    record = {"vqa": [["How many dogs?", "two"], {"question": "Colour?", "answer": "red"}, ("Is it night?", False)]}
    metadata: list[dict[str, Any]] = [record, {"vqa": [["Colour?", "green"], ["How many dogs?", 2]]}, {}]
    metadata += [{"vqa": "Colour?"}, {"vqa": [["Colour?", ""]]}]
    inputs = inputs_of([1, 2, 3, 4, 5], metadata)
    reward, chat = build(reply, questions_field="vqa", aggregation="gm")
    output = check_output(reward(inputs), 5, "yes_no")
    torch.testing.assert_close(output.parts["am"][:2], torch.tensor([0.733333, 0.45]), rtol=0, atol=1e-6)
    torch.testing.assert_close(output.values[:2], torch.tensor([0.711379, 0.0]), rtol=0, atol=1e-6)
    assert output.valid.tolist() == [True, True, False, False, False]
    assert output.errors == {"missing_field": 1, "bad_field": 2}
    assert len(chat.asked) == 5
    mean, _ = build(reply, questions_field="vqa")
    assert mean(inputs).values[0].item() == pytest.approx(0.733333, abs=1e-6)


def test_words_are_averaged_over_draws_with_their_own_seeds(build: Build) -> None:
    verdicts = iter(["I think so. Yes.", "no", "Yes", "yes, there is", "who knows", "Yes", "No", "no"])
    reward, chat = build(lambda _: Answer(text=next(verdicts)), score="word", average=4, temperature=0.7)
    output = reward(inputs_of([5, 6]))
    torch.testing.assert_close(output.values, torch.tensor([3 / 4, 1 / 3]), rtol=0, atol=1e-6)
    seeds = [question.seed for question in chat.asked]
    assert len(set(seeds)) == 8
    assert {(q.max_tokens, q.temperature, q.top_logprobs) for q in chat.asked} == {(512, 0.7, 0)}
    again, other = build(lambda _: Answer(text="no"), score="word", average=4, temperature=0.7)
    assert again(inputs_of([6])).values.tolist() == [0.0]
    assert [question.seed for question in other.asked] == seeds[4:]  # they go by the sample, not by its place


def test_failed_answers_are_errors_and_never_zeros(build: Build) -> None:
    answers = {
        1: Answer(error="timeout"),
        2: Answer(logprobs=({"Perhaps": -0.1},)),
        3: Answer(text="Yes"),
        4: odds_of(0.5),
    }
    reward, _ = build(lambda question: answers[level_of(question)])
    output = check_output(reward(inputs_of([1, 2, 3, 4])), 4, "yes_no")
    assert output.valid.tolist() == [False, False, False, True]
    assert output.errors == {"timeout": 1, "unparsed": 2}
    reward, _ = build(lambda question: odds_of(0.5), with_sources=True)
    assert reward(inputs_of([1, 2], source_images=[[], [torch.zeros(3, 2, 2)]])).errors == {"missing_field": 1}
    reward, _ = build(lambda _: Answer(error="truncated"), score="word", average=2, temperature=1.0)
    assert reward(inputs_of([1])).errors == {"truncated": 1}
    atoms = iter([odds_of(0.5), Answer(error="status_500")])
    reward, _ = build(lambda _: next(atoms), questions_field="q")
    assert reward(inputs_of([1], [{"q": [["a", "yes"], ["b", "no"]]}])).errors == {"status_500": 1}


def test_yes_no_reward_refuses_contradictions(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text(" \n")
    (tmp_path / "plain.txt").write_text("Is it {prompt}?")
    cases: list[tuple[dict[str, Any], str]] = [
        ({"judge": {"server": "http://127.0.0.1:9"}}, "judge: required key 'model' is missing"),
        (
            {"judge": {**JUDGE, "modle": 1}},
            r"judge: unknown option 'modle' \(did you mean 'model'\?\); allowed: .* size",
        ),
        ({"questions_field": "q", "score": "odds"}, "goes with score: mass"),
        ({"questions_field": "q", "inverted": True}, "goes with score: mass and inverted: false"),
        ({"aggregation": "gm"}, "set questions_field too"),
        ({"average": 2, "temperature": 1.0}, "are for score: word"),
        ({"score": "word", "average": 2}, "temperature above 0"),
        ({"score": "word", "average": 0}, "average must be 1"),
        ({"score": "word", "temperature": -1.0}, "temperature must be at least 0"),
        ({"score": "word", "max_tokens": 0}, "max_tokens must be at least 1"),
        ({"num_frames": 0}, "num_frames must be at least 1"),
        ({"score": "chance"}, "score must be one of odds, mass, word or null"),
        ({"template": "no/such.txt"}, "cannot be read as UTF-8 text"),
        ({"template": str(tmp_path / "empty.txt")}, "is empty"),
        ({"template": str(tmp_path / "plain.txt"), "questions_field": "q"}, "must hold {question}"),
    ]
    for options, message in cases:
        with pytest.raises(ValueError, match=message):
            reward_options("yes_no", {"judge": JUDGE, **options})


def test_num_frames_of_images_is_an_error(build: Build) -> None:
    reward, _ = build(lambda _: odds_of(0.5), num_frames=2)
    with pytest.raises(ValueError, match="images are made, not videos"):
        reward(inputs_of([1]))
