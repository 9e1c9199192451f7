"""The weighted sum, its rules for failed items, checks of outputs, and reward specs with errors that teach."""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor

from flowrl.options import option_parameters
from flowrl.rewards import (
    REWARDS,
    FunctionReward,
    Reward,
    RewardInputs,
    RewardOutput,
    check_of,
    load_target,
)
from flowrl.rewards.compose import (
    build_weighted_sum,
    check_output,
    parse_reward_spec,
    validate_reward_specs,
    weighted_sum,
)


def inputs_of(
    images: Tensor, prompts: list[str] | None = None, metadata: list[dict[str, Any]] | None = None
) -> RewardInputs:
    batch = len(images)
    return RewardInputs(
        prompts=prompts or [f"picture {i}" for i in range(batch)],
        images=images,
        metadata=metadata or [{} for _ in range(batch)],
        group_ids=torch.arange(batch) // 2,
        sample_ids=torch.arange(batch),
    )


def random_images(batch: int = 4, size: int = 16) -> Tensor:
    return torch.rand(batch, 3, size, size, generator=torch.Generator().manual_seed(0))


def jpeg_length(image: Tensor) -> int:
    pixels = (image * 255).round().to(torch.uint8).permute(1, 2, 0).numpy()
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "JPEG", quality=95)
    return len(stream.getvalue())


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
        (broken(values=torch.tensor([0.0, math.nan])), r"'mine': item 1 is nan but marked valid \(1 of 2 items\)"),
        (broken(values=torch.tensor([math.inf, 0.0])), "item 0 is inf but marked valid"),
        (broken(valid=torch.tensor([True, False])), r"has a value: set values\[~valid\] = nan"),
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
        {"name": "jpeg_compressibility", "scale": "ddpo"},
        {"file": str(file), "function": "scaled", "weight": 0.5, "factor": 4.0},
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
        ([{"weight": 1.0}], "either name, or file and function"),
        ([{"file": "a.py"}], "either name, or file and function"),
        ([{"name": "geneval", "file": "a.py", "function": "f"}], "either name, or file and function"),
        ([{"name": 3}], "a reward's name must be text, got 3"),
        (
            [{"name": "genevil"}],
            r"unknown reward 'genevil' \(did you mean 'geneval'\?\); allowed: adversarial, aesthetic",
        ),
        ([{"name": "geneval", "weight": "1"}], "weight of reward 'geneval' must be a finite number, got '1'"),
        ([{"name": "geneval", "weight": math.nan}], "must be a finite number"),
        ([{"name": "geneval", "weight": True}], "must be a finite number"),
        ([{"name": "geneval", "weight": 0}], "every reward has weight 0"),
        (
            [{"name": "geneval", "clipmin": 0}],
            r"unknown option 'clipmin' \(did you mean 'clip_min'\?\); allowed: clip_min",
        ),
        ([{"name": "geneval", "credit": "partial"}], "must be 'graded' or 'strict' or 'official', got 'partial'"),
        ([{"name": "geneval", "clip_min": "0"}], "option clip_min must be a number or null, got '0'"),
        ([{"name": "geneval", "clip_min": 1}], "clip_min must be below 1"),
        (
            [{"name": "geneval", "judge": "shape"}],
            r"unknown judge 'shape' \(did you mean 'shapes'\?\); allowed:",
        ),
        ([{"name": "geneval", "reference_position_quirk": 1}], "must be true or false, got 1"),
        ([{"name": "geneval"}, {"name": "jpeg_compressibility", "scale": "dpo"}], "'ddpo' or 'flow_grpo', got 'dpo'"),
        ([{"name": "jpeg_incompressibility", "device": "cpu"}], "unknown option 'device'; allowed: none"),
    ],
)
def test_specs_are_checked_without_weights(specs: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        validate_reward_specs(specs)
    with pytest.raises(ValueError, match=message):
        build_weighted_sum(specs)


def test_validation_loads_no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    from flowrl.rewards import clip

    def must_not_load(*arguments: Any) -> None:
        raise AssertionError("weights were loaded")

    monkeypatch.setattr(clip, "_load", must_not_load)
    validate_reward_specs([{"name": "clip_score", "model": "someone/clip", "divisor": 30}, {"name": "geneval"}])


def test_every_check_takes_the_options_of_its_factory() -> None:
    for name, target in REWARDS.items():
        check = check_of(name)
        if check is not None:
            factory, checked = option_parameters(load_target(target)), option_parameters(check)
            assert {k: p.default for k, p in factory.items()} == {k: p.default for k, p in checked.items()}, name


def test_parsed_spec_leaves_its_source_alone() -> None:
    spec = {"name": "geneval", "weight": 2, "credit": "strict"}
    parsed = parse_reward_spec(spec)
    assert (parsed.name, parsed.weight, parsed.options) == ("geneval", 2.0, {"credit": "strict"})
    assert spec == {"name": "geneval", "weight": 2, "credit": "strict"}


def test_weighted_sum_checks_its_arguments() -> None:
    with pytest.raises(ValueError, match="1 rewards and 2 weights"):
        weighted_sum([fixed("a", [1.0])], [1.0, 2.0])
    with pytest.raises(ValueError, match="weights must be finite"):
        weighted_sum([fixed("a", [1.0])], [math.inf])
    with pytest.raises(ValueError, match="kind must be one of pointwise"):
        weighted_sum([fixed("a", [1.0], kind="global")], [1.0])
