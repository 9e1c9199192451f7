"""Rubrics: the reward, the l1 path of the weights, and learning one from pairs that a scripted judge tells apart."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from scripted_judges import JUDGE, ScriptedJudge, grey, level, script, yes
from tiny_clip import assert_pointwise, inputs_of

from flowrl.cli import main
from flowrl.config.options import build_options
from flowrl.prompts.pairs import read_pairs
from flowrl.rewards import build_reward, reward_options
from flowrl.rewards.image_files import read_image
from flowrl.rewards.judges import rubric as autorubric
from flowrl.rewards.judges.chat import Answer, Question
from flowrl.rewards.judges.rubric import RubricTraining, Rule, load_rubric, parse_rules, save_rubric, train_rubric
from flowrl.rewards.judges.rubric_fit import (
    accuracy,
    complete_part,
    distinct_rules,
    fit_weights,
    hard_pairs,
    largest_penalty,
    seed_pairs,
    select_rules,
)
from flowrl.rewards.judges.server_chat import ServerChat

DELTA = np.array([[1, 0.2, -0.1], [0.8, -0.2, 0.1], [0.9, 0.1, 0], [-0.3, 0.1, -0.2]])


def write(path: Path, rules: list[Any], **record: Any) -> str:
    path.write_text(json.dumps({"schema": 1, "rules": rules, **record}))
    return str(path)


def by_rule(question: Question) -> Answer:
    text = str(question.parts[-1])
    return yes(level(question) / 255) if "bright" in text else yes(0.2 if "fingers" in text else 0.5)


RULES = [
    {"text": "is it bright?", "weight": 2},
    {"text": "extra fingers?", "weight": 0.5, "answer": "no"},
    {"text": "x"},
]


def test_rubric_sums_weighted_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    judge = script(monkeypatch, by_rule)
    path = write(tmp_path / "r.json", RULES)
    inputs = inputs_of(grey([51, 102, 204]))
    reward = build_reward("rubric", options={"judge": JUDGE, "rules": path})
    output = reward(inputs)
    bright = np.array([51, 102, 204]) / 255
    np.testing.assert_allclose(output.values, 2 * bright + 0.5 * 0.8 + 0.5, rtol=1e-6)
    np.testing.assert_allclose(output.parts["rule_01"], bright, rtol=1e-6)
    np.testing.assert_allclose(output.parts["rule_02"], 0.8, rtol=1e-6)
    assert len(judge.asked) == 9
    assert (judge.asked[0].max_tokens, judge.asked[0].top_logprobs) == (1, 20)
    assert "image 0" in str(judge.asked[0].parts[-1])
    assert_pointwise(reward, inputs)
    mean = build_reward("rubric", options={"judge": JUDGE, "rules": path, "normalise": True})
    np.testing.assert_allclose(mean(inputs).values, output.values / 3.5, rtol=1e-6)
    other = build_reward("rubric", options={"judge": JUDGE, "rules": write(tmp_path / "o.json", RULES[:2])})
    assert len({reward.version, mean.version, other.version}) == 3


def test_rubric_items_fail_with_any_of_their_rules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {51: Answer(error="timeout"), 102: Answer(logprobs=({"maybe": -0.1},)), 204: yes(0.25)}
    script(monkeypatch, lambda q: answers[level(q)] if "bright" in str(q.parts[-1]) else yes(0.5))
    options = {"judge": JUDGE, "rules": write(tmp_path / "r.json", RULES)}
    output = build_reward("rubric", options=options)(inputs_of(grey([51, 102, 204])))
    assert output.valid.tolist() == [False, False, True]
    assert output.errors == {"timeout": 1, "unparsed": 1}
    assert float(output.values[2]) == pytest.approx(2 * 0.25 + 0.25 + 0.5)
    assert output.parts["rule_01"].isnan().tolist() == [True, True, False]


def test_rubrics_refused(tmp_path: Path) -> None:
    good = {"text": "a", "weight": 1}
    cases: list[tuple[Any, str]] = [
        ([], "rules must hold one rule or more"),
        ([{"text": " "}], r"rules\.0: text must be a question"),
        ([good, {"text": "b", "wieght": 1}], r"unknown key 'rules\.1\.wieght': did you mean 'rules\.1\.weight'"),
        ([good, {"text": "b", "weight": True}], r"rules\.1\.weight must be a finite number, got True"),
        ([{"text": "b", "answer": "maybe"}], r"rules\.0\.answer must be one of yes, no"),
        ([{"text": "b", "weight": -1}], r"rules\.0: weight is -1\.0: it must be above 0"),
        ([{"text": "b", "weight": math.nan}], "JSON knows no NaN: write a number"),
    ]
    for rules, message in cases:
        with pytest.raises(ValueError, match=message):
            reward_options("rubric", {"judge": JUDGE, "rules": write(tmp_path / "r.json", rules)})
    with pytest.raises(ValueError, match="there is no rubric"):
        reward_options("rubric", {"judge": JUDGE, "rules": str(tmp_path / "none.json")})
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(ValueError, match="is not JSON"):
        load_rubric(tmp_path / "broken.json")
    with pytest.raises(ValueError, match="schema must be one of 1"):
        load_rubric(write(tmp_path / "r.json", [good], schema=2))


def test_rubrics_are_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rules = (Rule(text="a \u00fc?", weight=0.25), Rule(text="b?", weight=3.0, answer="no"))
    path = save_rubric(tmp_path / "new" / "r.json", rules, {"judge": "x"})
    assert load_rubric(path) == rules
    assert json.loads(path.read_text())["info"] == {"judge": "x"}

    def full(*arguments: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(OSError, match="disk full"):
        save_rubric(path, rules[:1])
    assert load_rubric(path) == rules
    assert [p.name for p in path.parent.iterdir()] == ["r.json"]


def test_weights_follow_the_l1_path() -> None:
    assert largest_penalty(DELTA) == pytest.approx(0.3)
    cases: dict[float, list[float]] = {
        0.31: [0, 0, 0],
        0.2: [0.6478, 0, 0],
        0.1: [1.4286, 0, 0],
        0.01: [4.0624, 0, -11.5332],
    }
    for penalty, weights in cases.items():
        np.testing.assert_allclose(fit_weights(DELTA, penalty), weights, atol=5e-5)


def test_weights_satisfy_the_conditions_of_a_minimum() -> None:
    """The loss's slope is -penalty sign(w) where w is not 0, and at most penalty where it is."""
    delta = np.random.default_rng(0).normal(0.05, 0.3, (60, 30))
    weights = fit_weights(delta, 0.02)
    slope = -(delta / (1 + np.exp(delta @ weights))[:, None]).mean(0)
    kept = weights != 0
    assert 0 < kept.sum() < 30
    np.testing.assert_allclose(slope[kept], -0.02 * np.sign(weights[kept]), atol=1e-6)
    assert np.abs(slope[~kept]).max() <= 0.02


def test_negative_weights_are_rejected_or_flipped() -> None:
    """Without the rule of weight -11.5 the other two are fitted again, and both satisfy the conditions."""
    rejected = select_rules(DELTA, 0.01)
    assert rejected[2] == 0
    assert (rejected[:2] > 0).all()
    slope = -(DELTA[:, :2] / (1 + np.exp(DELTA @ rejected))[:, None]).mean(0)
    np.testing.assert_allclose(slope, -0.01, atol=1e-6)
    np.testing.assert_allclose(select_rules(DELTA, 0.01, negative="flip"), [4.0624, 0, -11.5332], atol=5e-5)
    np.testing.assert_allclose(select_rules(DELTA, 0.01, negative="flip", top=1), [0, 0, -11.5332], atol=5e-5)
    assert select_rules(-DELTA[:, :1], 0.01).tolist() == [0.0]


def test_fits_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for penalty in (0.0, -1.0, math.nan):
        with pytest.raises(ValueError, match="penalty must be positive"):
            fit_weights(DELTA, penalty)
    with pytest.raises(ValueError, match="delta must be finite"):
        fit_weights(np.array([[math.nan]]), 0.1)
    monkeypatch.setattr("importlib.metadata.version", lambda name: "1.7.2")
    with pytest.raises(ValueError, match=r"scikit-learn 1\.8 or newer, got 1\.7\.2"):
        fit_weights(DELTA, 0.1)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install -e '\.\[rubrics\]'"):
        fit_weights(DELTA, 0.1)


def test_hard_pairs_and_accuracy() -> None:
    weights = np.array([1.0, 1.0, 0.0])  # margins 1.2, 0.6, 1.0, -0.2
    assert hard_pairs(DELTA, weights, 2).tolist() == [3, 1]
    assert accuracy(DELTA, weights) == 0.75
    assert accuracy(np.zeros((2, 3)), weights) == 0.5


def test_failed_answers_cost_a_rule_or_a_pair() -> None:
    scores = np.zeros((20, 2, 3))
    scores[4, 1, 0] = math.nan  # 5 % of rule 0: the pair goes
    scores[:3, 0, 1] = math.nan  # 15 % of rule 1: the rule goes
    pairs, rules = complete_part(scores)
    assert rules.tolist() == [0, 2]
    assert pairs.tolist() == [i for i in range(20) if i != 4]


def test_seed_pairs_are_clear_and_diverse() -> None:
    prompts = ["a red cat", "a red cat", "blue house", "a red dog"]
    assert seed_pairs(prompts, [0.9, 1.0, 0.4, 0.8], 3) == [1, 2, 3]  # 0.4 * 1, then 0.8 * (1 - 2/4), last 0.9 * 0
    assert seed_pairs(prompts, [1.0] * 4, 9) == [0, 2, 3, 1]


def test_rules_are_read_and_deduplicated() -> None:
    text = "So:\n1. RULE: Are the hands well formed?\n**RULE:** Is it sharp?**\nrule - no\nRULE:\nRULE: Is it bright? "
    assert parse_rules(text) == ["Are the hands well formed?", "Is it sharp?", "Is it bright?"]
    proposed = ["Is it sharp?", "Is the sky blue?", "IS the sky: blue!", "Is it dark?", "?"]
    assert distinct_rules(proposed, ["is it dark"], similarity=0.8, limit=9) == ["Is the sky blue?", "Is it sharp?"]
    assert distinct_rules(proposed, [], similarity=0.8, limit=1) == ["Is the sky blue?"]


@pytest.fixture
def pairs_file(tmp_path: Path) -> Path:
    """40 pairs whose winner is brighter (level / 255 is what the judge sees), except every tenth."""
    rows = []
    for i in range(40):
        high, low = 150 + i, 60 + i
        for name, shade in (("a", high), ("b", low)):
            Image.new("RGB", (4, 4), (shade, shade, shade)).save(tmp_path / f"{i}{name}.png")
        winner, loser = ("b", "a") if i % 10 == 9 else ("a", "b")
        rows.append({"prompt": f"thing {i}", "winner": f"{i}{winner}.png", "loser": f"{i}{loser}.png"})
    path = tmp_path / "pairs.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    return path


def critic(question: Question) -> Answer:
    """Proposes a rule that tells the pairs apart, its opposite and two that do not; the hard pairs give a fifth."""
    text = str(question.parts[-1])
    if "Two pictures" not in "".join(map(str, question.parts)):
        shade = level(question) / 255
        rule = text.partition("rule: ")[2].partition("\n")[0]
        noise = 0.5 + 0.1 * math.sin(level(question) * len(rule))
        return yes({"Is it bright?": shade, "Is it gloomy throughout?": 1 - shade}.get(rule, noise))
    shades = [part for part in question.parts if isinstance(part, np.ndarray)]
    hard = int(shades[0][0, 0, 0]) < int(shades[1][0, 0, 0])
    rules = ["Are there defects of form?"] if hard else ["Is it bright?", "Is it gloomy throughout?", "Has it charm?"]
    return Answer(text="\n".join(f"RULE: {rule}" for rule in rules))


def train(pairs: Path, out: Path, **options: Any) -> autorubric.TrainedRubric:
    given = {"judge": JUDGE, "rounds": 2, "num_hard": 4, **options}
    return train_rubric(pairs, out, build_options(RubricTraining, given, owner="rubric training"))


def test_training_finds_the_rule_and_the_reward_takes_it(
    pairs_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    judge = script(monkeypatch, critic)
    trained = train(pairs_file, tmp_path / "out" / "rubric.json", rules_per_round=3)
    assert trained.rules[0].text == "Is it bright?"
    assert trained.rules[0].answer == "yes"
    assert all(rule.text != "Is it gloomy throughout?" and rule.weight > 0 for rule in trained.rules)
    assert trained.num_pairs == 32
    assert trained.num_candidates == 4
    assert trained.errors == {}
    assert 0.8 <= trained.accuracy <= 1
    assert 0.7 <= trained.held_out_accuracy <= 1
    proposals = [q for q in judge.asked if "Two pictures" in "".join(map(str, q.parts))]
    assert len(proposals) == 32 + 4, "the first round explains all pairs, the second the hard ones"
    hardest = [[int(p[0, 0, 0]) for p in q.parts if isinstance(p, np.ndarray)] for q in proposals[32:]]
    assert sum(winner < loser for winner, loser in hardest) >= 3, "pairs that the first rubric got wrong"
    assert load_rubric(trained.path) == trained.rules
    info = json.loads(trained.path.read_text())["info"]
    assert info["judge"] == "scripted-judge"
    assert info["held_out_accuracy"] == trained.held_out_accuracy
    script(monkeypatch, critic)
    reward = build_reward("rubric", options={"judge": JUDGE, "rules": str(trained.path)})
    values = reward(inputs_of(grey([60, 200]))).values
    assert values[1] > values[0]


def test_training_flips_rules_that_speak_against_images(
    pairs_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gloomy(question: Question) -> Answer:
        answer = critic(question)
        return Answer(text="RULE: Is it gloomy throughout?") if "RULE" in answer.text else answer

    script(monkeypatch, gloomy)
    trained = train(pairs_file, tmp_path / "r.json", negative="flip", held_out=0.0, rounds=1)
    assert [(rule.text, rule.answer) for rule in trained.rules] == [("Is it gloomy throughout?", "no")]
    assert trained.accuracy == 0.9
    assert math.isnan(trained.held_out_accuracy)
    assert trained.num_pairs == 40
    with pytest.raises(ValueError, match=r"no rule got a weight with penalty 0\.01: .* negative: flip"):
        train(pairs_file, tmp_path / "r.json", held_out=0.0)


def test_training_goes_on_where_it_was_broken_off(
    pairs_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answers are kept in a file: a killed run is not asked twice, and a broken last line costs that answer alone."""
    out = tmp_path / "r.json"
    monkeypatch.setattr("flowrl.rewards.judges.rubric.QUESTIONS_AT_ONCE", 50)

    class Killed(ScriptedJudge):
        def ask(self, questions: Any) -> list[Answer]:
            if len(self.asked) > 120:
                raise KeyboardInterrupt
            return super().ask(questions)

    killed = Killed(critic)
    monkeypatch.setattr(ServerChat, "build", lambda *_: killed)
    with pytest.raises(KeyboardInterrupt):
        train(pairs_file, out)
    cache = out.with_name("r.json.cache.jsonl")
    kept = len(cache.read_text().splitlines())
    assert kept == 100
    assert not out.exists()
    cache.write_text(cache.read_text()[:-10])
    judge = script(monkeypatch, critic)
    first = train(pairs_file, out)
    again = script(monkeypatch, critic)
    second = train(pairs_file, out)
    assert first.rules == second.rules

    def answered(asked: list[Question]) -> int:
        return sum("Two pictures" not in "".join(map(str, question.parts)) for question in asked)

    total = 2 * 32 * 4 + 2 * 8 * len(first.rules)
    assert answered(judge.asked) == total - 99
    assert answered(again.asked) == 0
    fewer = train(pairs_file, tmp_path / "s.json", penalty=0.05)
    assert sum(rule.weight for rule in fewer.rules) < sum(rule.weight for rule in first.rules)


def test_training_counts_failures_and_leaves_them_out(
    pairs_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(question: Question) -> Answer:
        text = "".join(map(str, question.parts))
        if "Has it charm" in text or ("Is it bright?" in text and level(question) == 150):
            return Answer(error="timeout")
        return critic(question)

    script(monkeypatch, failing)
    trained = train(pairs_file, tmp_path / "r.json", held_out=0.0, rules_per_round=3)
    assert trained.num_pairs == 39
    assert trained.errors["timeout"] == 2 * (80 + 1), "asked again in the second round"
    assert "Has it charm?" not in [rule.text for rule in trained.rules]
    script(monkeypatch, lambda question: Answer(error="status_401"))
    with pytest.raises(ValueError, match=r"proposed no rule for 32 pairs \(status_401: 32\)"):
        train(pairs_file, tmp_path / "r2.json")
    script(monkeypatch, lambda q: critic(q) if q.max_tokens > 1 else Answer(text="Yes"))
    with pytest.raises(ValueError, match=r"answered too little: 0 pairs|answered too little: \d+ pairs and 0 rules"):
        train(pairs_file, tmp_path / "r3.json")


def test_held_out_pairs_share_no_prompt_with_the_others(
    tmp_path: Path, pairs_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = pairs_file.read_text().splitlines()[:40]
    rows = [json.loads(line) | {"prompt": f"thing {i // 4}"} for i, line in enumerate(lines)]
    pairs_file.write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(ValueError, match=r"leaves 1 of 1 pairs to fit to, and it takes two at least"):
        autorubric._split(read_pairs(pairs_file)[:1], 40, 0.2, 7)
    fitted, unseen = autorubric._split(read_pairs(pairs_file), 40, 0.2, 7)
    assert len(unseen) == 8
    assert len(fitted) == 32
    assert not {pair.prompt for pair in fitted} & {pair.prompt for pair in unseen}
    assert autorubric._split(read_pairs(pairs_file), 40, 0.2, 7) == (fitted, unseen)


def test_pairs_refused(tmp_path: Path) -> None:
    Image.new("RGBA", (2, 1), (255, 0, 0, 0)).save(tmp_path / "a.png")
    assert read_image(tmp_path / "a.png", owner="x").tolist() == [[[255, 255, 255]] * 2], (
        "white where it is transparent"
    )
    Image.new("RGB", (2, 1)).save(tmp_path / "b.png")
    good = {"prompt": "p", "winner": "a.png", "loser": "b.png"}
    cases: list[tuple[list[Any], str]] = [
        ([good, {"prompt": "p", "winner": "a.png"}], "line 2: needs an object with prompt, winner and loser"),
        ([good | {"margin": "x"}], "line 1: margin must be a finite number"),
        ([good | {"margin": 10**400}], "line 1: 100000000... is beyond 1e308"),
        ([good | {"source": ["a.png"]}], "line 1: there is no image .*the source"),
        ([good, good | {"loser": "c.png"}], r"line 2: there is no image .*c\.png"),
    ]
    file = tmp_path / "p.jsonl"
    for rows, message in cases:
        file.write_text("\n".join(map(json.dumps, rows)))
        with pytest.raises(ValueError, match=message):
            read_pairs(file)
    file.write_text(json.dumps(good | {"margin": None, "source": None}))
    (row,) = read_pairs(file)
    assert (row.margin, row.record["source"]) == (1.0, None), "as if neither was there"
    file.write_text("{")
    with pytest.raises(ValueError, match=r"p\.jsonl, line 1: not valid JSON"):
        read_pairs(file)
    with pytest.raises(ValueError, match=r"none\.jsonl: cannot be read"):
        read_pairs(tmp_path / "none.jsonl")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rounds": 0}, "rounds must be at least 1"),
        ({"num_pairs": 1}, "num_pairs must be at least 2"),
        ({"similarity": 0}, "`similarity` must be above 0"),
        ({"penalty": 0}, "`penalty` must be a positive number"),
        ({"held_out": 1.0}, r"held_out must lie in \[0, 1\), got 1"),
        ({"held_out": 0.99}, "leaves 0 of 40 pairs|leaves 1 of 40 pairs"),
        ({"negative": "drop"}, "negative must be one of reject, flip"),
        ({"top": 1.5}, "top must be an integer"),
        ({"temperature": -1.0}, "temperature must be at least 0"),
        ({"proposer": {}}, "proposer: required key 'model' is missing"),
        ({"template": "./nowhere"}, "template must be a folder"),
    ],
)
def test_training_options_refused(
    options: dict[str, Any], message: str, pairs_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    judge = script(monkeypatch, critic)
    with pytest.raises(ValueError, match=message):
        train(pairs_file, tmp_path / "r.json", **options)
    assert judge.asked == [], "refused before anything is asked"


def test_rubrics_are_used_without_scikit_learn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "sklearn"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "sklearn", None)  # an import of it now fails
    script(monkeypatch, by_rule)
    reward = build_reward("rubric", options={"judge": JUDGE, "rules": write(tmp_path / "r.json", RULES)})
    assert bool(reward(inputs_of(grey([51]))).valid.all())


def test_the_command_trains_and_says_what_it_found(
    pairs_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script(monkeypatch, critic)
    out = tmp_path / "rules.json"
    arguments = ["reward", "rubric", str(pairs_file), "--out", str(out), "--rounds", "1"]
    assert main([*arguments, "--judge", "{model: m, server: 'http://127.0.0.1:9/v1'}"]) == 0
    printed = capsys.readouterr().out
    assert load_rubric(out)[0].text in printed
    assert "rules; accuracy" in printed
    assert main([*arguments, "--judge", "m"]) == 1
    assert "unknown judge 'm'" in capsys.readouterr().err
