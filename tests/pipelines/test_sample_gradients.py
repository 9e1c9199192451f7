"""Gradients of a LoRA by sample against a backward pass for each sample, in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from diffusers import SD3Transformer2DModel
from torch import Tensor, nn

from flowrl.config.train import resolve_path
from flowrl.pipelines.arithmetic.sample_gradients import SampleGradients
from flowrl.pipelines.weights.lora import JOINT_ATTENTION, Policy
from flowrl.runtime.randomness import counter_normal

SAMPLES, TOKENS, WIDTH = 3, 4, 6
Answer = Callable[[Tensor], Tensor]


def normal(*shape: int) -> Tensor:
    return counter_normal(shape, "sample gradients", *shape).double()


def with_lora(network: nn.Module, targets: tuple[str, ...], variant: str = "lora") -> list[Tensor]:
    """The parameters of a LoRA that acts, in float64 like the network."""
    policy = Policy(network.double(), rank=2, alpha=4, targets=list(targets), seed=0, variant=variant)
    for place, weight in enumerate(policy.parameters.values()):
        weight.data = weight.data.double() + counter_normal(weight.shape, "lora", place).double() / 4
    return policy.trained


def taken(network: nn.Module, trained: list[Tensor], answer: Answer, x: Tensor, halves: int) -> tuple[Tensor, Any, int]:
    """Gradients of the samples' losses twice over, who took them, and how often the graph was walked back."""
    gradients = SampleGradients(network, trained)
    total = torch.zeros(len(x), gradients.count, dtype=torch.float64)
    for _ in range(2):
        with gradients.recording([halves * len(x)], len(x)):
            loss_b = answer(x).square().flatten(1).sum(1)
        times = gradients.walk(loss_b, total)
    return total / 2, gradients, times


def alone(trained: list[Tensor], answer: Answer, x: Tensor) -> Tensor:
    """The same, a backward pass for each sample."""
    found = [torch.autograd.grad(answer(x)[i].square().sum(), trained, materialize_grads=True) for i in range(len(x))]
    return torch.stack([torch.cat([one.flatten() for one in own]) for own in found])


@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_guided_transformer(checkpointed: bool) -> None:
    network = SD3Transformer2DModel.from_pretrained(resolve_path("asset:tiny-sd3"), subfolder="transformer")
    trained = with_lora(network, JOINT_ATTENTION)
    if checkpointed:
        network.enable_gradient_checkpointing()
    config = network.config
    text, pooled = normal(2 * SAMPLES, 5, config.joint_attention_dim), normal(2 * SAMPLES, config.pooled_projection_dim)
    time = torch.full((2 * SAMPLES,), 300.0, dtype=torch.float64)

    def answer(x: Tensor) -> Tensor:
        both = network(torch.cat([x, x]), text, pooled, time, return_dict=False)[0]
        without, with_prompt = both.chunk(2)
        return without + 3 * (with_prompt - without)

    x = normal(SAMPLES, config.in_channels, 4, 4)
    found, _, times = taken(network, trained, answer, x, 2)
    wanted = alone(trained, answer, x)
    assert times == 1
    assert (found - wanted).abs().max() < 1e-10 * wanted.abs().max()


class Mixer(nn.Module):
    """A layer on tokens; one that has the samples behind the tokens, or all of them in one row of rows; one unused."""

    def __init__(self, order: str) -> None:
        super().__init__()
        self.first, self.second, self.unused = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.order = order

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.first(x))
        if self.order == "tokens first":
            return self.second(y.transpose(0, 1).reshape(-1, 1, WIDTH)).view(TOKENS, -1, WIDTH).transpose(0, 1)
        return self.second(y.reshape(-1, WIDTH)).view(x.shape) if self.order == "one row" else self.second(y)


@pytest.mark.parametrize(
    ("order", "variant", "times"),
    [("samples first", "lora", 1), ("tokens first", "lora", 4), ("one row", "rslora", 4), ("samples first", "dora", 3)],
)
def test_layers_of_other_inputs_get_a_pass_for_each_sample(order: str, variant: str, times: int) -> None:
    """One pass for what is served, and one a sample for what is not."""
    network = Mixer(order)
    trained, x = with_lora(network, ("first", "second", "unused"), variant), normal(SAMPLES, TOKENS, WIDTH)
    found, _, walked = taken(network, trained, network, x, 1)
    wanted = alone(trained, network, x)
    assert walked == times
    assert (found - wanted).abs().max() < 1e-12 * wanted.abs().max()
    layer: Any = network.first
    assert layer.apart(x) is None  # an evaluation after it sums over samples again
