"""The weighted sum, its rules for failed items, checks of outputs, and reward specs with errors that teach."""

from __future__ import annotations

import gc
import math
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from reward_inputs import inputs_of, jpeg_length, random_images, weighted_sum

from flowrl.config.rewards import RewardConfig
from flowrl.rewards import REWARDS, VERDICTS, FunctionReward, Reward, RewardOutput, gives_verdicts, output_of
from flowrl.rewards.base.outputs import check_output, join_outputs
from flowrl.rewards.base.specs import parse_reward_specs, validate_reward_specs
from flowrl.rewards.compose import Term, WeightedSum, build_weighted_sum, close_gates, sum_of


def weighted(rewards: list[Reward], *weights: float) -> list[tuple[Reward, RewardConfig]]:
    pairs = zip(rewards, weights, strict=True)
    return [(reward, RewardConfig(name=reward.name, weight=weight)) for reward, weight in pairs]


def fixed(name: str, values: list[float], *, invalid: tuple[int, ...] = (), **more: Any) -> Reward:
    """A reward that returns given numbers, NaN and invalid at the given items."""
    numbers = torch.tensor([math.nan if i in invalid else v for i, v in enumerate(values)])
    valid = torch.tensor([i not in invalid for i in range(len(values))])
    output = RewardOutput(values=numbers, valid=valid, parts={"half": numbers / 2})
    return FunctionReward(name=name, score=lambda inputs: output, needs=frozenset({"images"}), version="1", **more)


def test_weighted_sum_values_and_parts() -> None:
    total = weighted_sum([fixed("a", [1.0, 2.0, 3.0]), fixed("b", [10.0, 0.0, -10.0])], [1.0, 0.5])
    output = total(inputs_of(random_images(3)))
    assert output.values.tolist() == [6.0, 2.0, -2.0]
    assert sorted(output.parts) == ["reward/a", "reward/a/half", "reward/b", "reward/b/half"]
    assert output.parts["reward/b"].tolist() == [10.0, 0.0, -10.0]
    assert output.parts["reward/b/half"].tolist() == [5.0, 0.0, -5.0]
    assert (total.name, total.version) == ("a+b", "1 * 1 + 0.5 * 1")


def test_an_item_invalid_in_any_weighted_reward_is_invalid_in_the_sum() -> None:
    rewards = [fixed("a", [1.0, 2.0, 3.0], invalid=(0,)), fixed("b", [1.0] * 3, invalid=(1,)), fixed("c", [5.0] * 3)]
    output = check_output(weighted_sum(rewards, [1, 0, 2])(inputs_of(random_images(3))), 3, "sum")
    assert output.valid.tolist() == [False, True, True]
    assert output.values.isnan().tolist() == [True, False, False]
    assert output.values[1:].tolist() == [12.0, 13.0]
    assert output.parts["reward/b"].isnan().tolist() == [False, True, False]


def test_equal_names_get_distinct_keys() -> None:
    names = ["a", "a", "a_2", "a", "a_2"]
    total = weighted_sum([fixed(name, [float(i)]) for i, name in enumerate(names)], [1.0] * 5)
    assert len(set(total.keys)) == 5
    assert total.keys[:3] == ("a", "a_3", "a_2")
    assert total(inputs_of(random_images(1))).values.item() == 10.0


def test_labels_tell_rewards_of_one_name_apart() -> None:
    total = weighted_sum(
        [fixed("a", [1.0]), fixed("a", [2.0]), fixed("a", [3.0])], [1.0] * 3, ["strict", "graded", None]
    )
    assert total.keys == ("strict", "graded", "a")
    parts = total(inputs_of(random_images(1))).parts
    assert {"reward/strict", "reward/graded/half", "reward/a"} <= parts.keys()


def test_the_sum_has_the_most_demanding_kind_and_is_differentiable_only_if_all_members_are() -> None:
    smooth = FunctionReward(
        name="mean",
        score=lambda inputs: RewardOutput(
            values=inputs.images.mean(dim=(1, 2, 3)), valid=torch.ones(len(inputs), dtype=torch.bool)
        ),
        needs=frozenset({"images"}),
        version="1",
        differentiable=True,
    )
    rough = fixed("rough", [1.0, 2.0], kind="groupwise")
    assert weighted_sum([smooth, rough], [1, 1]).kind == "groupwise"
    assert not weighted_sum([smooth, rough], [1, 1]).differentiable
    total = weighted_sum([smooth, rough], [3, 0])
    assert total.differentiable
    images = random_images(2).requires_grad_()
    (gradient,) = torch.autograd.grad(total(inputs_of(images)).values.sum(), images)
    torch.testing.assert_close(gradient, torch.full_like(images, 3 / images[0].numel()))


def broken(**fields: Any) -> RewardOutput:
    good = {"values": torch.zeros(2), "valid": torch.ones(2, dtype=torch.bool), "parts": {}}
    return RewardOutput(**{**good, **fields})


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ([0.0, 1.0], "reward 'mine' must return a RewardOutput, got list"),
        (broken(values=torch.zeros(2, 1)), r"'mine': values must be torch.float32 of shape \[2\].*got .*\[2, 1\]"),
        (broken(values=torch.zeros(3)), r"values must be .*got torch.float32 \[3\]"),
        (broken(values=torch.zeros(2).double()), "got torch.float64"),
        (broken(values=[0.0, 1.0]), "values must be a tensor, got list"),
        (broken(valid=torch.ones(2)), "valid must be torch.bool"),
        (broken(parts={"x": torch.zeros(1)}), r"parts\['x'\] must be torch.float32"),
    ],
)
def test_broken_outputs_name_the_reward(output: Any, message: str) -> None:
    reward = FunctionReward(name="mine", score=lambda inputs: output, needs=frozenset(), version="1")
    with pytest.raises(ValueError, match=message):
        weighted_sum([reward], [1.0])(inputs_of(random_images(2)))


def test_specs_build_the_sum_they_describe(tmp_path: Path) -> None:
    file = tmp_path / "rewards.py"
    file.write_text(
        "def scaled(images, prompts, metadata, *, factor):\n    return factor * images.mean(dim=(1, 2, 3))\n",
        encoding="utf-8",
    )
    specs: list[dict[str, Any]] = [
        {"name": "jpeg_incompressibility", "weight": 2},
        {"name": "jpeg_compressibility", "options": {"scale": "ddpo"}},
        {"file": str(file), "function": "scaled", "weight": 0.5, "options": {"factor": 4.0}},
    ]
    inputs = inputs_of(random_images())
    output = build_weighted_sum(specs)(inputs)
    kilobytes = torch.tensor([jpeg_length(image) / 1000 for image in inputs.images])
    torch.testing.assert_close(output.values, kilobytes + 2 * inputs.images.mean(dim=(1, 2, 3)))
    assert {"reward/jpeg_incompressibility", "reward/scaled"} < set(output.parts)


@pytest.mark.parametrize(
    ("specs", "message"),
    [
        ([], "at least one entry"),
        ({"name": "geneval"}, "rewards must be a list"),
        (["geneval"], "a reward must be a mapping"),
        ([{"weight": 1.0}], r"either name \(a built-in\) or both file and function"),
        ([{"file": "a.py"}], r"either name \(a built-in\) or both file and function"),
        (
            [{"name": "geneval", "file": "a.py", "function": "f"}],
            r"either name \(a built-in\) or both file and function",
        ),
        ([{"name": 3}], "name must be text or null, got 3"),
        (
            [{"name": "genevil"}],
            r"unknown reward 'genevil' \(did you mean 'geneval'\?\); allowed: adversarial, aesthetic",
        ),
        ([{"name": "geneval", "weight": "1"}], "reward 'geneval': weight must be a finite number, got '1'"),
        ([{"name": "geneval", "weight": math.nan}], "must be a finite number"),
        ([{"name": "geneval", "weight": True}], "must be a finite number"),
        ([{"name": "geneval", "weight": 0}], "every weight in rewards is 0"),
        (
            [{"name": "geneval", "options": {"clipmin": 0}}],
            "reward 'geneval': unknown key 'clipmin': did you mean 'clip_min'",
        ),
        (
            [{"name": "geneval", "options": {"credit": "partial"}}],
            "credit must be one of graded, strict, official, got 'partial'",
        ),
        ([{"name": "geneval", "options": {"clip_min": "0"}}], "clip_min must be a finite number or null, got '0'"),
        ([{"name": "geneval", "options": {"clip_min": 1}}], "clip_min must be below 1"),
        (
            [{"name": "geneval", "options": {"judge": "shape"}}],
            r"unknown judge 'shape' \(did you mean 'shapes'\?\); allowed:",
        ),
        ([{"name": "geneval", "options": {"reference_position_quirk": 1}}], "must be true or false, got 1"),
        (
            [{"name": "geneval"}, {"name": "jpeg_compressibility", "options": {"scale": "dpo"}}],
            "scale must be one of ddpo, flow_grpo, got 'dpo': did you mean 'ddpo'",
        ),
        (
            [{"name": "jpeg_incompressibility", "options": {"device": "cpu"}}],
            "unknown key 'device': the keys here are half",
        ),
    ],
)
def test_specs_are_checked_without_weights(specs: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        validate_reward_specs(specs)
    with pytest.raises(ValueError, match=message):
        build_weighted_sum(specs)


def test_validation_loads_no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    def must_not_load(*arguments: Any, **options: Any) -> None:
        raise AssertionError("weights were loaded")

    monkeypatch.setattr("transformers.PreTrainedModel.from_pretrained", must_not_load)
    validate_reward_specs(
        [{"name": "clip_score", "options": {"model": "someone/clip", "scale": "logits_30"}}, {"name": "geneval"}]
    )


def test_numbers_that_are_not_finite_are_failed_items() -> None:
    values, valid = torch.tensor([0.5, math.nan, math.inf, 7.0]), torch.tensor([True, True, True, False])
    output = check_output(RewardOutput(values=values, valid=valid, errors={"timeout": 1}), 4, "mine")
    assert output.valid.tolist() == [True, False, False, False]
    assert output.values.isnan().tolist() == [False, True, True, True]
    assert output.errors == {"timeout": 1, "not_finite": 2}
    total = weighted_sum([fixed("a", [1.0, math.inf])], [1.0])(inputs_of(random_images(2)))
    assert total.valid.tolist() == [True, False]
    assert total.errors == {"a/not_finite": 1}


def test_missing_members_give_their_weight_to_the_others() -> None:
    rewards = [fixed("a", [1.0, 2.0, 3.0], invalid=(0,)), fixed("b", [10.0, 20.0, 30.0], invalid=(0, 1))]
    output = sum_of(weighted(rewards, 1.0, 3.0), partial="renormalise")(inputs_of(random_images(3)))
    assert output.valid.tolist() == [False, True, True]
    assert output.values.isnan().tolist() == [True, False, False]
    assert output.values[1:].tolist() == [2.0 * 4, 3.0 + 90.0]


def test_geometric_and_harmonic_means() -> None:
    rewards = [fixed("a", [4.0, -1.0]), fixed("b", [9.0, 1.0])]
    inputs = inputs_of(random_images(2))
    geometric = sum_of(weighted(rewards, 1.0, 1.0), merge="geometric")(inputs).values
    torch.testing.assert_close(geometric, torch.tensor([6.0, math.sqrt(1e-6)]))
    harmonic = sum_of(weighted(rewards, 1.0, 3.0), merge="harmonic")(inputs).values
    torch.testing.assert_close(harmonic, torch.tensor([4 / (1 / 4 + 3 / 9), 4 / (1e6 + 3)]))


def test_schedules_clips_and_weights_of_an_iteration(tmp_path: Path) -> None:
    file = tmp_path / "r.py"
    file.write_text("def level(images, prompts, metadata):\n    return [10.0] * len(prompts)\n", encoding="utf-8")
    spec = {"file": str(file), "function": "level", "weight": 2, "schedule": [[10, 0], [20, 1]], "clip": [None, 3]}
    total = build_weighted_sum([spec])
    inputs = inputs_of(random_images(1))
    found = {i: total(replace(inputs, iteration=i)).values.item() for i in (0, 10, 15, 20, 99)}
    assert found == {0: 0.0, 10: 0.0, 15: 3.0, 20: 6.0, 99: 6.0}
    assert total.weights_at(15) == (1.0,)


def test_a_gated_image_gets_the_lowest_total_of_its_group() -> None:
    total = torch.tensor([5.0, 3.0, 4.0, 9.0, 8.0, math.nan, 2.0])
    closed = torch.tensor([True, False, False, True, True, False, False])
    result = close_gates(total, closed, torch.tensor([0, 0, 0, 1, 1, 1, 0]))
    expected = torch.tensor([2.0, 3.0, 4.0, 8.0, 8.0, math.nan, 2.0])
    torch.testing.assert_close(result, expected, equal_nan=True)


def gate_on(reward: Reward, gate: float, *, other: Reward) -> WeightedSum:
    watched = RewardConfig(name="b", weight=0.0, gate=gate)
    terms = (Term(reward=other, key="a", entry=RewardConfig(name="a")), Term(reward=reward, key="b", entry=watched))
    return WeightedSum(terms=terms)


def test_an_image_whose_gate_failed_is_invalid() -> None:
    total = gate_on(fixed("b", [1.0, 0.0, 1.0, 1.0], invalid=(2,)), 0.5, other=fixed("a", [5.0, 9.0, 7.0, 8.0]))
    output = total(inputs_of(random_images(4)))
    assert output.valid.tolist() == [True, True, False, True]
    assert output.values.isnan().tolist() == [False, False, True, False]
    assert output.values[[0, 1, 3]].tolist() == [5.0, 5.0, 8.0]


def test_whole_groups_are_needed_beside_a_reward_that_learns_too() -> None:
    learns, plain = fixed("learns", [1.0], kind="adversarial"), fixed("plain", [1.0])
    pairs = fixed("pairs", [1.0], kind="pairwise")
    assert not weighted_sum([learns, plain], [1, 1]).whole_groups
    assert weighted_sum([learns, pairs], [1, 1]).whole_groups
    assert gate_on(plain, 0.5, other=learns).whole_groups


def scheduled(key: str, values: list[float], schedule: tuple[tuple[int, float], ...], **more: Any) -> Term:
    return Term(reward=fixed(key, values, **more), key=key, entry=RewardConfig(name=key, schedule=schedule))


def test_rewards_without_weight_now_make_up_for_nothing() -> None:
    terms = (scheduled("a", [1.0, 2.0], ((0, 0), (1, 1))), scheduled("b", [4.0, 4.0], (), invalid=(1,)))
    total, inputs = WeightedSum(terms=terms, partial="renormalise"), inputs_of(random_images(2))
    assert total(inputs).valid.tolist() == [True, False]
    assert total(inputs).values[0].item() == 4.0
    assert total(replace(inputs, iteration=1)).values.tolist() == [5.0, 4.0]


def test_means_of_no_weight_are_an_error() -> None:
    total = WeightedSum(terms=(scheduled("a", [1.0], ((3, 0), (9, 1))),), merge="geometric")
    with pytest.raises(ValueError, match="make every weight 0 in iteration 3"):
        total(replace(inputs_of(random_images(1)), iteration=3))
    entry = RewardConfig(name="a", schedule=((0, 1), (9, -1)))
    with pytest.raises(ValueError, match="schedules with factors down to -1"):
        sum_of([(fixed("a", [1.0]), entry)], merge="harmonic")


def test_pieces_that_lack_a_sub_score_have_none_there() -> None:
    first, second = fixed("a", [1.0, 2.0])(inputs_of(random_images(2))), broken(errors={"timeout": 2})
    whole = join_outputs([second, first, second])
    assert whole.values.tolist() == [0.0, 0.0, 1.0, 2.0, 0.0, 0.0]
    assert whole.parts["half"][2:4].tolist() == [0.5, 1.0]
    assert whole.parts["half"].isnan().tolist() == [True, True, False, False, True, True]
    assert whole.errors == {"timeout": 4}


def test_samples_are_not_chosen_by_a_mask_which_would_be_an_error() -> None:
    inputs = inputs_of(random_images(3))
    assert inputs[[2, 0]].sample_ids.tolist() == [2, 0]
    with pytest.raises(ValueError, match="by their places, not by a mask"):
        inputs[torch.tensor([True, False, True])]


@pytest.mark.slow
def test_what_is_on_its_way_holds_no_images_of_the_device() -> None:
    slow = FunctionReward(
        name="slow", score=lambda inputs: output_of([1.0] * len(inputs), inputs), needs=frozenset(), version="1",
        waits=True,
    )  # fmt: skip
    images = random_images(2).requires_grad_()  # a copy for the thread is another tensor
    gone = weakref.ref(images)
    with ThreadPoolExecutor(1) as executor:
        get = weighted_sum([slow], [1.0]).start(inputs_of(images), executor)
    del images
    gc.collect()
    assert gone() is None
    assert get().values.tolist() == [1.0, 1.0]


def test_waiting_rewards_change_no_number() -> None:
    slow = FunctionReward(
        name="slow", score=lambda inputs: output_of(inputs.images.mean((1, 2, 3)).tolist(), inputs),
        needs=frozenset(), version="1", waits=True,
    )  # fmt: skip
    total, inputs = weighted_sum([slow, fixed("b", [1.0, 2.0])], [1.0, 2.0]), inputs_of(random_images(2))
    with ThreadPoolExecutor(2) as executor:
        later = total.start(inputs, executor)()
    assert torch.equal(later.values, total(inputs).values)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"wieght": 2}, "reward 'geneval': unknown key 'wieght': did you mean 'weight'"),
        ({"schedule": [[5, 1], [5, 2]]}, "rising iterations"),
        ({"schedule": 3}, "schedule must be a list"),
        ({"clip": [1, 0]}, "lowest < highest"),
        ({"clip": 1}, "clip must be a list of 2 values"),
        ({"schedule": [[0.5, 1]]}, r"schedule\.0\.0 must be an integer, got 0\.5"),
        ({"schedule": [[5, True]]}, r"schedule\.0\.1 must be a finite number, got True"),
        ({"schedule": [[5, 1]], "weight": 0}, "go with its weight, which is 0"),
        ({"gate": "low"}, "gate must be a finite number or null"),
        ({"gate": 0.5, "clip": [0.5, None]}, "or every one, lies below the gate 0.5"),
        ({"gate": 2, "clip": [None, 1]}, "or every one, lies below the gate 2"),
        ({"options": 1}, "options must be a mapping"),
    ],
)
def test_what_an_entry_may_not_say_is_refused(more: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_reward_specs([{"name": "geneval", **more}])


def test_parsed_spec_leaves_its_source_alone() -> None:
    spec = {"name": "geneval", "weight": 2, "options": {"credit": "strict"}}
    (parsed,) = parse_reward_specs([spec])
    assert (parsed.name, parsed.weight, parsed.options) == ("geneval", 2.0, {"credit": "strict"})
    assert spec == {"name": "geneval", "weight": 2, "options": {"credit": "strict"}}


def test_a_reward_of_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="kind must be one of pointwise"):
        weighted_sum([fixed("a", [1.0], kind="global")], [1.0])


def test_the_first_reward_of_verdicts_is_known_by_its_key() -> None:
    plain, judge = fixed("a", [1.0]), fixed("geneval", [1.0])
    assert weighted_sum([plain, judge], [1.0, 1.0], [None, "rules"]).verdicts == "rules"
    assert weighted_sum([plain], [1.0]).verdicts == VERDICTS == "geneval"
    assert [name for name in REWARDS if gives_verdicts(name)] == ["geneval"]
