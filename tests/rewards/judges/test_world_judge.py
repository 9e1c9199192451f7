"""The judge that ships: it says what is true of drawn scenes and edits, less the errors that it is told to make."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from tiny_clip import inputs_of

from flowrl.benchmarks.geneval.metadata import TASKS
from flowrl.rewards import RewardInputs, build_reward
from flowrl.rewards.judges.chat import Question, build_chat, check_chat
from flowrl.rewards.judges.edit_judge import parse_principles
from flowrl.rewards.judges.rubric import Rubric, load_rubric, parse_rules
from flowrl.rewards.judges.world_judge import RULES, holds
from flowrl.world.edits import draw_edit, edit_records, edit_verdict, edited_scene, failed_scene
from flowrl.world.scene_prompts import Record, eval_records, train_records
from flowrl.world.scenes import Shape, draw_scene, random_scene

JUDGE = {"model": "world:shapes"}
CPU = torch.device("cpu")
WORLD = {record["prompt"]: record for record in (*train_records(), *eval_records())}


def scene(record: Record, seed: int = 0) -> tuple[Shape, ...]:
    return random_scene(record, np.random.default_rng(seed))


def inputs_for(images: Sequence[np.ndarray], prompts: Sequence[str]) -> RewardInputs:
    return replace(
        inputs_of(torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2).float() / 255), prompts=list(prompts)
    )


def test_every_rule_holds_of_a_scene_that_is_drawn_for_its_prompt() -> None:
    records = list(WORLD.values())[::29]
    assert {record["tag"] for record in records} == set(TASKS)
    for record in records:
        image = draw_scene(scene(record))
        assert [holds(image, record, field) for field in (None, *filter(None, RULES.values()))] == [True] * 5


def test_each_rule_sees_its_own_fault() -> None:
    record = next(row for row in WORLD.values() if row["tag"] == "color_attr")
    (first, second), fields = record["include"], [field for field in RULES.values() if field]
    here, there = (
        Shape(label=clause["class"], color=clause["color"], x=x, y=x, radius=8)
        for clause, x in ((first, 14), (second, 48))
    )

    def faults(*shapes: Shape) -> list[str]:
        return [field for field in fields if not holds(draw_scene(shapes), record, field)]

    assert faults(here, there) == []
    assert faults(here) == ["class", "count", "color", "position"]  # what is not there is nowhere and of no colour
    assert faults(replace(here, color=there.color), there) == ["color"]
    assert faults(here, there, replace(there, x=14.0)) == ["count"]


def test_a_place_is_seen_by_its_rule_alone() -> None:
    record = next(row for row in WORLD.values() if row["include"][-1].get("position") == ["left of", 0])
    labels = [clause["class"] for clause in record["include"]]  # the second stands left of the first
    for right, places in ((True, (48, 14)), (False, (14, 48))):
        shown = zip(labels, places, strict=True)
        image = draw_scene([Shape(label=label, color="red", x=x, y=32, radius=8) for label, x in shown])
        assert [holds(image, record, field) for field in ("class", "count", "position")] == [True, True, right]


def test_shipped_edits_are_known_by_instruction_and_source_image() -> None:
    judge, rng = build_chat(JUDGE, device=CPU), np.random.default_rng(3)
    for number, record in enumerate(edit_records()[1][:24]):
        source, result = draw_edit(record)
        if number % 2:
            result = draw_scene(failed_scene(record, rng))
        asked = Question(parts=(source, result, f"How well? {record['prompt']}"), top_logprobs=20)
        (answer,) = judge.ask([asked])
        true = edit_verdict(result, source, record).graded
        assert math.exp(answer.logprobs[0]["Yes"]) == pytest.approx(0.02 + 0.96 * true)


def test_principles_of_an_edit_are_what_changes_and_what_stays() -> None:
    record = next(row for row in edit_records()[0] if row["tag"] == "recolor" and len(row["scene"]) == 2)
    source, done = draw_edit(record)
    lost = draw_scene([edited_scene(record)[record["target"]]])
    inputs = replace(
        inputs_for([done, source, lost], [record["prompt"]] * 3),
        source_images=[[torch.from_numpy(source.copy()).permute(2, 0, 1).float() / 255]] * 3,
    )
    checked = build_reward("edit_principles", options={"judge": JUDGE, "verify": "yes_no"})(inputs)
    assert checked.valid.all()
    assert checked.parts["follow"].tolist() == pytest.approx([0.98, 0.02, 0.98])
    assert checked.parts["keep"].tolist() == pytest.approx([0.98, 0.98, 0.02])  # neither the other shape nor the ground
    digits = build_reward("edit_score", options={"judge": JUDGE, "requirement": None})(inputs).values
    assert digits.tolist() == pytest.approx([1.0, 0.0, 0.4], abs=0.25)


def test_it_proposes_rules_and_principles_where_words_are_asked_for() -> None:
    judge = build_chat(JUDGE, device=CPU)
    image = draw_scene(())
    asked = Question(parts=("what sets them apart? a photo of a circle", image, image), max_tokens=64)
    assert parse_rules(judge.ask([asked])[0].text) == list(RULES)
    record = edit_records()[0][0]
    (answer,) = judge.ask([replace(asked, parts=(f"Instruction: {record['prompt']}", draw_edit(record)[0]))])
    assert [(p.kind, p.text) for p in parse_principles(answer.text, 10)][1] == ("follow", record["prompt"])


def test_a_share_of_answers_is_wrong_and_the_same_each_time() -> None:
    records = list(WORLD.values())[:400]
    images = [draw_scene(scene(record, number)) for number, record in enumerate(records)]
    inputs = inputs_for(images, [record["prompt"] for record in records])
    sure, erring = (build_reward("yes_no", options={"judge": {**JUDGE, "wrong": wrong}}) for wrong in (0.0, 0.25))
    right = sure(inputs).values > 0.5
    assert right.float().mean() > 0.99  # the detector misreads a drawn scene now and then
    wrong = (erring(inputs).values > 0.5) != right
    assert wrong.float().mean().item() == pytest.approx(0.25, abs=3 * (0.25 * 0.75 / 400) ** 0.5)
    assert torch.equal(wrong, (erring(inputs).values > 0.5) != right)


def test_what_is_not_of_this_world_fails() -> None:
    output = build_reward("yes_no", options={"judge": JUDGE})(
        inputs_for([draw_scene(())] * 2, ["a photo of a circle", "an owl"])
    )
    assert (output.valid.tolist(), output.errors) == ([True, False], {"other_world": 1})


def test_it_has_no_weights_and_refuses_what_it_does_not_know() -> None:
    assert Rubric(judge=JUDGE, rules="asset:rubrics/world.json").models == ()
    with pytest.raises(ValueError, match=r"wrong must lie in \[0, 1\]"):
        check_chat({**JUDGE, "wrong": 2.0})
    with pytest.raises(ValueError, match="dtype"):
        check_chat({**JUDGE, "dtype": "float32"})


def test_the_rubric_that_ships_goes_by_rules_that_look_at_the_image() -> None:
    weights = {rule.text: rule.weight for rule in load_rubric("asset:rubrics/world.json")}
    assert weights.keys() <= RULES.keys()
    assert min(weights[text] for text, field in RULES.items() if field) > 0.9
    assert max(weights.get(text, 0.0) for text, field in RULES.items() if not field) < 0.2
