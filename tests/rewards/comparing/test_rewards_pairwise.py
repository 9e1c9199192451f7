"""Pairwise and ranking rewards with scripted judges: verdicts, orders, failures, the cache, options."""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pairwise_fakes import (
    SCORED,
    close,
    inputs_of,
    levels_of,
    register_brightness,
    says_brighter,
    says_first,
    scores,
)
from scripted_judges import JUDGE, ScriptedJudge, script

from flowrl.rewards import build_reward, reward_options
from flowrl.rewards.base import specs
from flowrl.rewards.comparing.comparators import Known, VerdictCache
from flowrl.rewards.judges.chat import Answer
from flowrl.runtime.randomness import counter_seed

NAN = math.nan
CPU = torch.device("cpu")


@pytest.fixture
def chat(monkeypatch: pytest.MonkeyPatch) -> ScriptedJudge:
    return script(monkeypatch, says_brighter)


@pytest.fixture(autouse=True)
def brightness(monkeypatch: pytest.MonkeyPatch) -> None:
    register_brightness(monkeypatch)


def by_judge(**more: Any) -> dict[str, Any]:
    return {"judge": JUDGE, **more}


BY_SCORE: dict[str, Any] = {"reward": "brightness"}
LEVELS = [0.2, 0.8, 0.4, 0.6, 0.0]
RATES = [0.25, 1.0, 0.5, 0.75, 0.0]


# ---- who wins ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("orders", ["single", "random", "both"])
@pytest.mark.parametrize("form", ["judge", "reward"])
def test_win_rate_of_a_fair_comparator_is_the_rank(form: str, orders: str, chat: ScriptedJudge) -> None:
    comparator = by_judge() if form == "judge" else BY_SCORE
    output = scores("win_rate", inputs_of(LEVELS), comparator=comparator, orders=orders)
    close(output.values, RATES)
    assert output.parts["comparisons"].tolist() == [4] * 5
    assert sum(chat.calls) == (0 if form == "reward" else 20 if orders == "both" else 10)
    assert len(chat.calls) <= 1, "all pairs are asked at once"
    if orders == "both":
        assert output.parts["order_bias"].tolist() == [0.0] * 5


def test_a_judge_that_always_names_the_first_image(chat: ScriptedJudge) -> None:
    """In one order the reward is the place in the group; in both it is 1/2 for all, and the bias shows."""
    chat.answer = says_first
    inputs = inputs_of(LEVELS)
    close(scores("win_rate", inputs, comparator=by_judge(), orders="single").values, [1, 0.75, 0.5, 0.25, 0])
    both = scores("win_rate", inputs, comparator=by_judge(), orders="both")
    close(both.values, [0.5] * 5)
    close(both.parts["order_bias"], [0.5] * 5)


def test_random_order_is_a_function_of_the_ids_and_fair_on_average(chat: ScriptedJudge) -> None:
    chat.answer = says_first
    reward = build_reward("win_rate", options={"comparator": by_judge(), "orders": "random", "cache": 0})
    inputs = inputs_of(LEVELS)
    values = torch.stack([reward(replace(inputs, iteration=k)).values for k in range(400)])
    again = reward(replace(inputs, iteration=7)).values
    assert torch.equal(again, values[7])
    # A rate is a mean of 4 coins: its mean over 400 draws has the standard error 0.25 / 20.
    assert float((values.mean(0) - 0.5).abs().max()) < 4 * 0.25 / 20
    assert counter_seed("order", 7, 0, 0, 1) % 2 == int(levels_of(chat.asked[70])[0] == pytest.approx(0.8, abs=0.01))


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({"scheme": "round_robin"}, RATES),
        ({"scheme": "anchor"}, [0.25, 0.75, 0.75, 0.75, 0]),  # three beat the first sample, which beats one of four
        ({"scheme": "anchor", "ties": "best"}, [0.25, 1, 1, 1, 0]),
        # Seeds 1 2 3 0 4. 0 beats 4; then 1 beats 0 and 3 beats 2; then 1 beats 3. Of 6 matches 0 won 2, of 2 2 won 1.
        ({"scheme": "single_elimination"}, [0.25, 1, 0.5, 0.75, 0]),
        # 1 beats 0, 3 beats 2, 4 idle; 1 beats 3, 0 beats 4, 2 idle; 1 beats 4, 2 beats 0, 3 idle. Points 1 3 2 2 1,
        # Buchholz of 2 and 3: 3 and 5, of 0 and 4: 6 and 4.
        ({"scheme": "swiss"}, RATES),
    ],
)
def test_tournaments_agree_with_a_fair_judge(options: dict[str, Any], wanted: list[float], chat: ScriptedJudge) -> None:
    close(scores("tournament", inputs_of(LEVELS), comparator=by_judge(), **options).values, wanted)
    close(scores("tournament", inputs_of(LEVELS), comparator=BY_SCORE, **options).values, wanted)


def test_single_elimination_of_the_published_example() -> None:
    """Soft verdicts seed like the strengths themselves."""
    comparator = {"reward": "brightness", "temperature": 0.1}
    inputs = inputs_of([0.3, 0.1, 0.4, 0.2])
    output = scores("tournament", inputs, comparator=comparator, soft=True)
    close(output.values, [2 / 3, 0, 1, 1 / 3])
    assert output.parts["comparisons"].sum() == 2 * 6


def test_rounds_of_all_groups_are_judged_together(chat: ScriptedJudge) -> None:
    """Seeds 1 2 3 0 in each group: 1 meets 0, which is known already, and 2 meets 3; then 1 meets 3."""
    inputs = inputs_of([0.1, 0.2, 0.3, 0.4] * 3, [0] * 4 + [1] * 4 + [2] * 4)
    output = scores("tournament", inputs, comparator=by_judge(), cache=0)
    assert chat.calls == [9, 3, 3]
    close(output.values, [0, 2 / 3, 1 / 3, 1] * 3)


def test_groups_need_not_be_contiguous_and_the_order_of_the_batch_means_nothing(chat: ScriptedJudge) -> None:
    chat.answer = says_first
    levels, groups = [0.5, 0.1, 0.9, 0.3, 0.7, 0.2, 0.6], [3, 1, 3, 1, 3, 1, 3]
    inputs = inputs_of(levels, groups)
    shuffle = [4, 1, 6, 3, 0, 5, 2]
    for name, options in (
        ("win_rate", {"comparator": BY_SCORE}),
        ("win_rate", {"comparator": BY_SCORE, "opponents": 2, "score": "bradley_terry"}),
        ("win_rate", {"comparator": by_judge()}),
        ("tournament", {"comparator": by_judge()}),
        ("tournament", {"comparator": BY_SCORE, "scheme": "swiss"}),
        ("rank", {"reward": "brightness"}),
    ):
        whole = scores(name, inputs, **options).values
        close(scores(name, inputs[shuffle], **options).values, whole[shuffle].tolist())
        own = [place for place, group in enumerate(groups) if group == 3]
        close(scores(name, inputs[own], **options).values, whole[own].tolist())
        assert len(set(whole.tolist())) > 1
        for group in (1, 3):
            members = [place for place, own_group in enumerate(groups) if own_group == group]
            wanted = 0.0 if options.get("score") == "bradley_terry" else 0.5
            assert float(whole[members].mean()) == pytest.approx(wanted, abs=1e-6)


def test_few_opponents_and_strengths() -> None:
    inputs = inputs_of([0.1 * k for k in range(8)])
    output = scores("win_rate", inputs, comparator=BY_SCORE, opponents=4, min_comparisons=4)
    assert output.parts["comparisons"].tolist() == [4] * 8
    assert (float(output.values[0]), float(output.values[7])) == (0.0, 1.0)
    strengths = scores("win_rate", inputs, comparator=BY_SCORE, score="bradley_terry").values
    assert strengths.tolist() == sorted(strengths.tolist())


def test_scorer_ties_and_probabilities() -> None:
    inputs = inputs_of([0.5, 0.52, 0.9])
    close(scores("win_rate", inputs, comparator=BY_SCORE).values, [0, 0.5, 1])
    close(scores("win_rate", inputs, comparator=BY_SCORE | {"tie_band": 0.05}).values, [0.25, 0.25, 1])
    soft = scores("win_rate", inputs, comparator=BY_SCORE | {"temperature": 0.2}, soft=True).values
    sigmoid = [[1 / (1 + math.exp(-(a - b) / 0.2)) for b in (0.5, 0.52, 0.9) if b != a] for a in (0.5, 0.52, 0.9)]
    close(soft, [sum(row) / 2 for row in sigmoid])
    SCORED.clear()
    scores("tournament", inputs_of(LEVELS), comparator=BY_SCORE, scheme="swiss", orders="both")
    assert SCORED == [5], "a scorer sees each sample once, not once a match"


# ---- judges ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("style", "answer", "wanted", "error"),
    [
        ("answer_tag", Answer(text="Image 2 has a flaw. <answer>Image 1 is better</answer>"), 1.0, None),
        ("answer_tag", Answer(text="<answer>tie</answer>"), 0.5, None),
        ("answer_tag", Answer(text="I cannot say."), NAN, "unparsable"),
        ("answer_tag", Answer(error="timeout"), NAN, "timeout"),
        ("scores_json", Answer(text='{"a": 1} so {"scores": [3, 7.5]}'), 0.0, None),
        ("scores_json", Answer(text='{"scores": [3, 3]}'), 0.5, None),
        ("scores_json", Answer(text='{"scores": [3, "x"]}'), NAN, "unparsable"),
        ("scores_json", Answer(text="{scores: 3}"), NAN, "unparsable"),
        ("logprobs", Answer(text="1", logprobs=({"1": math.log(0.6), "2": math.log(0.2)},)), 0.75, None),
        (
            "logprobs",
            Answer(text="1", logprobs=({"1": math.log(0.4), " 1": math.log(0.2), "2": math.log(0.2)},)),
            0.75,
            None,
        ),
        ("logprobs", Answer(text="1", logprobs=({"1": -0.1, "x": -3.0},)), 1.0, None),
        ("logprobs", Answer(text="I", logprobs=({"I": -0.1},)), NAN, "unparsable"),
        ("logprobs", Answer(text="1"), NAN, "no_logprobs"),
    ],
)
def test_what_an_answer_is_worth(
    style: str, answer: Answer, wanted: float, error: str | None, chat: ScriptedJudge
) -> None:
    chat.answer = lambda question: answer
    options = {"comparator": by_judge(style=style), "orders": "single", "soft": style == "logprobs"}
    output = scores("win_rate", inputs_of([0.1, 0.2]), **options)
    close(output.values, [wanted, 1 - wanted])
    assert output.errors == ({} if error is None else {error: 2})
    if error == "unparsable":
        tied = scores(
            "win_rate", inputs_of([0.1, 0.2]), **options | {"comparator": by_judge(style=style, unparsed="tie")}
        )
        close(tied.values, [0.5, 0.5])


def test_hard_verdicts_of_logprobs(chat: ScriptedJudge) -> None:
    chat.answer = lambda question: Answer(logprobs=({"1": math.log(0.6), "2": math.log(0.4)},))
    output = scores("win_rate", inputs_of([0.1, 0.2]), comparator=by_judge(style="logprobs"), orders="single")
    close(output.values, [1.0, 0.0])
    assert (chat.asked[0].max_tokens, chat.asked[0].top_logprobs, chat.asked[0].temperature) == (1, 20, 0)


def test_what_a_judge_is_shown(chat: ScriptedJudge, tmp_path: Path) -> None:
    inputs = inputs_of([0.2, 0.6])
    scores("win_rate", inputs, comparator=by_judge(), orders="single")
    *images, text = chat.asked[-1].parts
    assert [image.shape for image in images if isinstance(image, np.ndarray)] == [(4, 4, 3)] * 2
    assert levels_of(chat.asked[-1]) == pytest.approx([51 / 255, 153 / 255])
    assert isinstance(text, str)
    assert "Description: prompt 0 {answer}\n" in text, "braces in a prompt stay as they are"
    assert text.endswith("<answer>tie</answer>.")

    source = replace(inputs, source_images=[[torch.ones(3, 2, 2)], [torch.ones(3, 2, 2)]])
    scores("win_rate", source, comparator=by_judge(media="edit"), orders="single")
    assert levels_of(chat.asked[-1]) == pytest.approx([1.0, 0.2, 0.6])
    assert "Instruction: prompt 0" in str(chat.asked[-1].parts[-1])
    lacking = replace(inputs, source_images=[[], []])
    assert scores("win_rate", lacking, comparator=by_judge(media="edit")).errors == {"missing_field": 2}

    videos = torch.linspace(0, 1, 2 * 9).view(2, 9, 1, 1, 1).expand(2, 9, 3, 4, 4).contiguous()
    film = replace(inputs, videos=videos)
    scores("win_rate", film, comparator=by_judge(media="video", frames=3), orders="single")
    wanted = (torch.tensor([0, 4, 8, 9, 13, 17]) / 17 * 255).round() / 255
    assert levels_of(chat.asked[-1]) == pytest.approx(wanted.tolist())
    assert "<answer>Video 1 is better</answer>" in str(chat.asked[-1].parts[-1])

    (tmp_path / "mine.txt").write_text("Which shows {prompt}?\n")
    mine = by_judge(template=str(tmp_path / "mine.txt"))
    scores("win_rate", inputs, comparator=mine, orders="single")
    assert chat.asked[-1].parts[-1] == "Which shows prompt 0 {answer}?"
    versions = {
        build_reward("win_rate", options={"comparator": comparator}).version
        for comparator in (by_judge(), mine, by_judge(style="logprobs"), by_judge(media="video"))
    }
    assert len(versions) == 4
    reward = build_reward("win_rate", options={"comparator": by_judge(media="edit")})
    assert reward.needs >= {"images", "source_images", "prompts", "group_ids", "sample_ids"}
    assert (reward.kind, reward.waits) == ("pairwise", True)


# ---- failures ----------------------------------------------------------------------------------------------------


def test_a_failed_comparison_is_left_out_and_counted(chat: ScriptedJudge) -> None:
    """All comparisons with the darkest sample fail: it is invalid, nobody else has a loss or a win from it."""
    chat.answer = lambda q: Answer(error="status_500") if min(levels_of(q)) == 0 else says_brighter(q)
    output = scores("win_rate", inputs_of(LEVELS), comparator=by_judge())
    close(output.values, [0, 1, 1 / 3, 2 / 3, NAN])
    assert output.parts["comparisons"].tolist() == [3, 3, 3, 3, 0]
    assert output.parts["failed"].tolist() == [1, 1, 1, 1, 4]
    assert output.errors == {"status_500": 1}
    strict = scores("win_rate", inputs_of(LEVELS), comparator=by_judge(), min_comparisons=4)
    assert not strict.valid.any()
    assert strict.errors == {"status_500": 5}


def test_one_failed_order_of_two_leaves_no_verdict(chat: ScriptedJudge) -> None:
    """Half a verdict would bring the position bias back."""
    chat.answer = lambda q: says_first(q) if levels_of(q)[0] > levels_of(q)[1] else Answer(error="timeout")
    output = scores("win_rate", inputs_of([0.1, 0.9]), comparator=by_judge(), orders="both")
    assert not output.valid.any()
    assert output.errors == {"timeout": 2}


def test_groups_of_one_and_scorers_that_fail() -> None:
    inputs = inputs_of([0.1, 0.5, 0.9, 0.7], [0, 0, 0, 1])
    for name, options in (
        ("win_rate", {"comparator": BY_SCORE}),
        ("tournament", {"comparator": BY_SCORE, "scheme": "swiss"}),
        ("rank", {"reward": "brightness"}),
    ):
        output = scores(name, inputs, **options)
        close(output.values, [0, 0.5, 1, NAN])
        assert output.errors == {"group_of_one": 1}
    for name, options in (
        ("win_rate", {"comparator": BY_SCORE | {"options": {"fails_below": 0.3}}}),
        ("tournament", {"comparator": BY_SCORE | {"options": {"fails_below": 0.3}}}),
        ("rank", {"reward": "brightness", "options": {"fails_below": 0.3}}),
    ):
        output = scores(name, inputs, **options)
        close(output.values, [NAN, 0, 1, NAN])
        assert output.errors == {"group_of_one": 1, "too_dark": 1}
    alone = scores("rank", inputs, reward="brightness", options={"fails_below": 0.8})
    assert not alone.valid.any()
    assert alone.errors == {"too_dark": 3, "no_opponent": 1}


# ---- the cache ---------------------------------------------------------------------------------------------------


def test_a_pair_is_asked_once_and_failures_are_asked_again(chat: ScriptedJudge) -> None:
    reward = build_reward("win_rate", options={"comparator": by_judge(), "orders": "both"})
    inputs = inputs_of([0.2, 0.4, 0.6])
    first, again = reward(inputs), reward(replace(inputs, iteration=5))
    assert chat.calls == [6]
    assert torch.equal(first.values, again.values)
    assert first.parts["cached"].tolist() == [0.0] * 3
    assert again.parts["cached"].tolist() == [1.0] * 3
    reward(replace(inputs, prompts=["another"] * 3))
    assert chat.calls == [6, 6], "another prompt is another question"
    reward(inputs_of([0.2, 0.4, 0.8]))
    assert chat.calls == [6, 6, 4], "only what the new image takes part in"

    chat.answer = lambda question: Answer(error="timeout")
    assert not reward(inputs_of([0.1, 0.3])).valid.any()
    chat.answer = says_brighter
    close(reward(inputs_of([0.1, 0.3])).values, [0, 1])
    without = build_reward("win_rate", options={"comparator": by_judge(), "cache": 0})
    assert "cached" not in without(inputs).parts
    assert "cached" not in build_reward("win_rate", options={"comparator": BY_SCORE})(inputs).parts


def test_the_cache_forgets_what_was_used_least_and_takes_threads() -> None:
    cache = VerdictCache(2)
    b: Known = (0.0, None, {})
    c: Known = (0.5, None, {})
    a: Known = (1.0, None, {"Meaning": 1.0})
    cache.put(b"a", a)
    cache.put(b"b", b)
    cache.put(b"failed", (NAN, "timeout", {}))
    assert cache.get(b"a") == a
    cache.put(b"c", c)
    assert [cache.get(key) for key in (b"a", b"b", b"c", b"failed")] == [a, None, c, None]

    def fill(start: int) -> None:
        for number in range(start, start + 500):
            cache.put(str(number).encode(), b)
            cache.get(str(number).encode())

    threads = [threading.Thread(target=fill, args=(500 * k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(cache.get(str(number).encode()) is not None for number in range(2000)) == 2


# ---- a user's comparator -----------------------------------------------------------------------------------------


def test_comparator_of_a_users_file(tmp_path: Path) -> None:
    path = tmp_path / "judges.py"
    path.write_text(
        "def brighter(first, second, prompts, metadata, *, sign=1):\n"
        "    assert len(prompts) == len(metadata) == len(first) and not first.requires_grad\n"
        "    return [None if a == b else float(sign * a > sign * b)\n"
        "            for a, b in zip(first.mean(dim=(1, 2, 3)), second.mean(dim=(1, 2, 3)))]\n"
        "def short(first, second, prompts, metadata):\n    return []\n"
        "def large(first, second, prompts, metadata):\n    return [3.0] * len(first)\n"
        "def three(first, second, prompts):\n    return []\n"
        "def broken(first, second, prompts, metadata):\n    return prompts.nonsense\n"
    )

    def by(function: str, **more: Any) -> dict[str, Any]:
        return {"file": str(path), "function": function, **more}

    close(scores("win_rate", inputs_of(LEVELS), comparator=by("brighter")).values, RATES)
    turned = scores("win_rate", inputs_of([*LEVELS[:4], 0.2]), comparator=by("brighter", options={"sign": -1}))
    close(turned.values, [1, 0, 2 / 4, 1 / 4, 1])  # the two equal ones have no verdict on each other
    for function, message in (
        ("short", "must return 1 numbers, one per pair, got 0"),
        ("large", r"returned 3\.0: return the probability"),
        ("broken", r"AttributeError.*\n.*judges\.py:12: return prompts\.nonsense"),
    ):
        with pytest.raises(ValueError, match=message):
            scores("win_rate", inputs_of([0.1, 0.2]), comparator=by(function))
    with pytest.raises(ValueError, match=r"must be \(first_images, second_images, prompts, metadata\)"):
        reward_options("win_rate", {"comparator": by("three")})
    with pytest.raises(ValueError, match=r"unknown key 'sing'.*did you mean 'sign'"):
        reward_options("win_rate", {"comparator": by("brighter", options={"sing": 1})})


# ---- options -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("win_rate", {}, "required key 'comparator' is missing"),
        ("win_rate", {"comparator": "clip"}, "comparator must be a mapping of keys to values, got 'clip'"),
        ("win_rate", {"comparator": BY_SCORE | by_judge()}, "mapping with one of reward, judge, or file"),
        ("win_rate", {"comparator": BY_SCORE | {"tieband": 1}}, "'tieband': did you mean 'tie_band'"),
        ("win_rate", {"comparator": BY_SCORE | {"owner": "x"}}, "unknown key 'owner'"),
        ("win_rate", {"comparator": {"reward": "brightnes"}}, "unknown reward 'brightnes' .*did you mean 'brightness'"),
        ("win_rate", {"comparator": {"reward": "rank", "options": {}}}, "'rank' does not judge an item by itself"),
        ("win_rate", {"comparator": BY_SCORE | {"options": [1]}}, "options must be a mapping"),
        ("win_rate", {"comparator": BY_SCORE | {"tie_band": -1}}, "tie_band must be at least 0"),
        ("win_rate", {"comparator": BY_SCORE | {"temperature": 0}}, "temperature must be above 0"),
        ("win_rate", {"comparator": BY_SCORE | {"temperature": 1.0, "tie_band": 0.1}}, "tie_band means nothing with"),
        ("win_rate", {"comparator": BY_SCORE | {"temperature": 1.0}}, "means nothing without soft: true"),
        ("win_rate", {"comparator": BY_SCORE, "soft": True}, "gives 0, 1/2 and 1 only"),
        ("win_rate", {"comparator": by_judge(), "soft": True}, "gives 0, 1/2 and 1 only"),
        ("win_rate", {"comparator": by_judge(style="logprobs", max_tokens=2)}, "max_tokens must be 1 with style"),
        ("win_rate", {"comparator": by_judge(frames=4)}, "frames is a number of at least 1 for media: video"),
        ("win_rate", {"comparator": by_judge(template="none.txt")}, r"template 'none\.txt' cannot be read"),
        (
            "win_rate",
            {"comparator": by_judge(style="tag")},
            "style must be one of answer_tag, scores_json, categories, logprobs",
        ),
        ("win_rate", {"comparator": BY_SCORE, "opponents": 3}, "opponents must be an even number"),
        ("win_rate", {"comparator": BY_SCORE, "opponents": 2, "min_comparisons": 3}, r"at most opponents \(2\), got 3"),
        ("win_rate", {"comparator": BY_SCORE, "min_comparisons": 0}, "min_comparisons must be at least 1"),
        ("win_rate", {"comparator": BY_SCORE, "cache": -1}, "cache must be at least 0, got -1"),
        ("win_rate", {"comparator": BY_SCORE, "orders": "each"}, "orders must be one of single, random, both"),
        ("tournament", {"comparator": BY_SCORE, "scheme": "swiss", "byes": "published"}, "which has no bracket"),
        ("rank", {"reward": "tournament"}, "'tournament' does not judge an item by itself"),
        ("noisy", {"reward": "brightness", "std": -1.0}, "std must be at least 0"),
        ("noisy", {"reward": "brightness", "bias": NAN}, "bias must be"),
        ("noisy", {"reward": "brightness", "options": {"fails": 1}}, "'fails'"),
    ],
)
def test_option_errors(name: str, options: Mapping[str, Any], message: str, chat: ScriptedJudge) -> None:
    with pytest.raises(ValueError, match=message):
        reward_options(name, options)


def test_errors_when_made_or_called(chat: ScriptedJudge, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'brightness' does not judge an item by itself"):
        specs.build_nested("brightness", {"kind": "groupwise"}, device=CPU, owner="reward 'rank'")
    (tmp_path / "empty.txt").write_text("Which is better?")
    with pytest.raises(ValueError, match=r"must hold \{prompt\}"):
        reward_options("win_rate", {"comparator": by_judge(template=str(tmp_path / "empty.txt"))})
    for media, message in (("video", "set media: image"), ("edit", "no source images")):
        with pytest.raises(ValueError, match=message):
            scores("win_rate", inputs_of([0.1, 0.2]), comparator=by_judge(media=media))
