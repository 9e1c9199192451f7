"""Classifier-free guidance and conditioned networks."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from flowrl.runtime.randomness import counter_normal
from flowrl.samplers.guidance import TrainNegative, classifier_free_guidance, conditioned, is_uncounted
from flowrl.samplers.guidance_rules import qwen_norm_rescale
from flowrl.trajectory import Conditioning


def network(x: Tensor, timestep: Tensor, cond: Conditioning) -> Tensor:
    """Answers in bfloat16, as a real network may, and depends on everything it is given."""
    assert timestep.shape == (len(x),)
    assert len(cond) == len(x)
    return (x * cond.tensors["gain"][:, None] + timestep[:, None] / 1000).bfloat16()


def test_classifier_free_guidance() -> None:
    calls: list[int] = []

    def counted(x: Tensor, timestep: Tensor, cond: Conditioning) -> Tensor:
        calls.append(len(x))
        return network(x, timestep, cond)

    x = counter_normal((3, 4), 8)
    cond, negative = Conditioning({"gain": torch.tensor([1.0, 2.0, 3.0])}), Conditioning({"gain": torch.tensor([0.5])})
    for timestep in (torch.tensor(400.0), torch.tensor([400.0, 300.0, 200.0])):
        with_prompt = network(x, timestep.expand(3), cond).float()
        without = network(x, timestep.expand(3), negative.expand(3)).float()
        for scale in (0.0, 1.0, 4.5):
            calls.clear()
            guided = classifier_free_guidance(counted, cond, negative, scale)(x, torch.tensor(0.4), timestep)
            assert guided.dtype == torch.float32
            torch.testing.assert_close(guided, without + scale * (with_prompt - without), rtol=0, atol=1e-6)
            assert calls == ([3] if scale == 1 else [6])
        alone = conditioned(network, cond)(x, torch.tensor(0.4), timestep)
        assert torch.equal(
            classifier_free_guidance(network, cond, negative, 1.0)(x, torch.tensor(0.4), timestep), alone
        )


def test_guidance_carries_gradient_through_both_branches() -> None:
    gain = torch.tensor([2.0], requires_grad=True)

    def scaled(x: Tensor, timestep: Tensor, cond: Conditioning) -> Tensor:
        return gain * x * cond.tensors["gain"][:, None]

    cond, negative = Conditioning({"gain": torch.ones(1)}), Conditioning({"gain": torch.full((1,), 0.5)})
    out = classifier_free_guidance(scaled, cond, negative, 3.0)(
        torch.ones(1, 1), torch.tensor(0.5), torch.tensor(500.0)
    )
    out.sum().backward()
    assert gain.grad is not None
    assert float(gain.grad) == pytest.approx(0.5 + 3 * 0.5)


@pytest.mark.parametrize(
    ("train", "slope", "calls"),
    [
        (True, 0.5 + 3 * (1 - 0.5), ["negative", "positive"]),
        (False, 3 * 1, ["negative, constant", "positive"]),
        ("recompute", 0.5 + 3 * (1 - 0.5), ["negative", "positive", "negative, again"]),
    ],
)
def test_the_negative_half_is_trained_or_a_constant(train: TrainNegative, slope: float, calls: list[str]) -> None:
    """A network w g x with g 1 for the prompt and 1/2 without: at scale 3 dv/dw is 2 x, or 3 x with a constant half."""
    gain, seen = torch.tensor(2.0, requires_grad=True), []

    def scaled(x: Tensor, timestep: Tensor, cond: Conditioning) -> Tensor:
        half = "positive" if cond.tensors["gain"][0] == 1 else "negative"
        constant = "" if torch.is_grad_enabled() else ", constant"
        seen.append(half + (", again" if is_uncounted() else constant))
        return (gain * x * cond.tensors["gain"][:, None]).sin().asin()  # what is linear keeps nothing to recompute

    cond, negative = Conditioning({"gain": torch.ones(2)}), Conditioning({"gain": torch.full((1,), 0.5)})
    velocity = classifier_free_guidance(scaled, cond, negative, 3.0, train_negative=train, apart=True)
    x, sigma, timestep = torch.tensor([[0.1], [0.2]], requires_grad=True), torch.tensor(0.5), torch.tensor(500.0)
    out = velocity(x, sigma, timestep)
    torch.testing.assert_close(out, 2.0 * 2.0 * x, rtol=0, atol=1e-6)  # (1/2 + 3 (1 - 1/2)) w x in any case
    by_weight, by_input = torch.autograd.grad(out.sum(), [gain, x])
    assert float(by_weight) == pytest.approx(slope * 0.3, abs=1e-6)
    torch.testing.assert_close(by_input, torch.full((2, 1), slope * 2.0), rtol=0, atol=1e-5)
    assert seen == calls
    seen.clear()
    with torch.no_grad():
        assert torch.equal(velocity(x, sigma, timestep), out)
    assert [call.partition(",")[0] for call in seen] == ["negative", "positive"]
    assert not is_uncounted()


def test_a_rule_that_reads_norms_guides_a_constant_half_alike() -> None:
    weight = counter_normal((4, 4), "weight").requires_grad_()

    def mixed(x: Tensor, timestep: Tensor, cond: Conditioning) -> Tensor:
        return torch.tanh(x @ weight + cond.tensors["gain"][:, None, None])

    cond, negative = Conditioning({"gain": torch.tensor([1.0, 2.0])}), Conditioning({"gain": torch.tensor([0.5])})
    x, time = counter_normal((2, 3, 4), "x"), torch.tensor(500.0)

    def gradient(out: Tensor) -> Tensor:
        return torch.autograd.grad((out * counter_normal(out.shape, "out")).sum(), weight)[0]

    constant = torch.tanh(x @ weight + 0.5).detach()
    by_hand = gradient(qwen_norm_rescale(constant, mixed(x, time, cond), 4.0))
    ways: list[tuple[TrainNegative, Tensor | None]] = [(False, by_hand), ("recompute", None)]
    for train, wanted in ways:
        velocity = classifier_free_guidance(mixed, cond, negative, 4.0, rule=qwen_norm_rescale, train_negative=train)
        whole = classifier_free_guidance(mixed, cond, negative, 4.0, rule=qwen_norm_rescale)(x, time, time)
        out = velocity(x, time, time)
        torch.testing.assert_close(out, whole, rtol=0, atol=1e-6)
        torch.testing.assert_close(gradient(out), gradient(whole) if wanted is None else wanted, rtol=1e-5, atol=1e-6)


def test_guidance_refuses() -> None:
    cond, one = Conditioning({"gain": torch.ones(3)}), Conditioning({"gain": torch.ones(1)})
    time = torch.tensor(500.0)
    with pytest.raises(ValueError, match="finite"):
        classifier_free_guidance(network, cond, one, math.inf)
    with pytest.raises(ValueError, match="expanded"):
        classifier_free_guidance(network, cond, cond[:2], 2.0)
    with pytest.raises(ValueError, match="names and shapes"):
        classifier_free_guidance(network, cond, Conditioning({"other": torch.ones(1)}), 2.0)
    with pytest.raises(ValueError, match="batch of 2"):
        conditioned(network, cond)(torch.ones(2, 4), time, time)
    for wrong in (lambda x, t, c: x[:, :1], lambda x, t, c: x[:1]):
        with pytest.raises(ValueError, match="shape of x"):
            conditioned(wrong, cond)(torch.ones(3, 4), time, time)
        with pytest.raises(ValueError, match="shape of x"):
            classifier_free_guidance(wrong, cond, one, 2.0)(torch.ones(3, 4), time, time)
