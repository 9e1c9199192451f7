"""Classifier-free guidance and conditioned networks."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from flowrl.randomness import counter_normal
from flowrl.samplers.guidance import classifier_free_guidance, conditioned
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
