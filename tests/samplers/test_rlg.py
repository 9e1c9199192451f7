"""Reinforcement learning guidance: closed forms on Gaussians, identities, cost, and what it commutes with."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
from scipy.integrate import solve_ivp
from torch import Tensor

from flowrl.runtime.randomness import counter_normal
from flowrl.samplers import KERNELS, Velocity
from flowrl.samplers.guidance import (
    by_step,
    classifier_free_guidance,
    mix_outputs,
    network_rows,
    rl_first,
    rl_outside,
    rlg,
    rlg_experts,
)
from flowrl.samplers.guidance_rules import embedded_guidance, linear_cfg, qwen_norm_rescale, z_image
from flowrl.samplers.parametrization import clean_from_velocity, noise_from_velocity
from flowrl.trajectory import Conditioning

TIME = torch.tensor(500.0)


def gaussian(mean: float, variance: float) -> Velocity:
    """The exact velocity of data N(mean, variance), noised along x = (1 - t) clean + t noise."""

    def velocity(x: Tensor, sigma: Tensor, timestep: Tensor) -> Tensor:
        t = sigma
        k = (t - (1 - t) * variance) / ((1 - t) ** 2 * variance + t**2)
        return -mean + k * (x - (1 - t) * mean)

    return velocity


def solved(velocity: Velocity, start: list[float]) -> np.ndarray:
    """Where the ODE leads from these points at t = 1, in float64 by an adaptive solver."""

    def slope(t: float, x: np.ndarray) -> np.ndarray:
        time = torch.tensor(t, dtype=torch.float64)
        return velocity(torch.tensor(x), time, 1000 * time).numpy()

    return np.asarray(solve_ivp(slope, (1.0, 0.0), start, rtol=1e-10, atol=1e-12).y[:, -1])


def mixed(base: Tensor, tuned: Tensor, scale: float | Tensor) -> Tensor:
    return mix_outputs(base, [tuned], [scale])


def const(value: float) -> Velocity:
    return lambda x, sigma, timestep: torch.full_like(x, value)


def untouched(x: Tensor, sigma: Tensor, timestep: Tensor) -> Tensor:
    raise AssertionError("this network must not be called")


# ---- closed forms ----------------------------------------------------------------------------------------------------


def test_a_shifted_gaussian_is_shifted_further() -> None:
    base, tuned = gaussian(0, 1), gaussian(1, 1)
    x, half = torch.tensor([0.3], dtype=torch.float64), torch.tensor(0.5, dtype=torch.float64)
    assert float(base(x, half, TIME)) == 0
    assert float(tuned(x, half, TIME)) == -1
    assert float(rlg(base, tuned, 1.6)(x, half, TIME)) == pytest.approx(-1.6, abs=1e-15)
    for scale in (-0.5, 0.5, 1.6, 3.0):
        ends = solved(rlg(base, tuned, scale), [-1.2, 0.0, 0.7])
        np.testing.assert_allclose(ends, np.array([-1.2, 0.0, 0.7]) + scale, rtol=0, atol=1e-8)


def test_a_linear_reward_is_sampled_at_beta_over_the_scale() -> None:
    slope, beta, scale = 0.9, 2.0, 2.5
    exact_mean = slope / (beta / scale)  # of N(0, 1) exp(slope x / (beta / scale))
    ends = solved(rlg(gaussian(0, 1), gaussian(slope / beta, 1), scale), [-1.0, 1.0])
    assert ends.mean() == pytest.approx(exact_mean, abs=1e-8)
    assert (ends[1] - ends[0]) / 2 == pytest.approx(1, abs=1e-8)


@pytest.mark.parametrize(
    ("scale", "std", "product"), [(2.0, 0.25, 0.37796447), (0.5, 0.70710678, 0.63245553), (1.0, 0.5, 0.5)]
)
def test_unequal_spreads_give_the_geometric_mixture_and_not_the_product(
    scale: float, std: float, product: float
) -> None:
    low, high = solved(rlg(gaussian(0, 1), gaussian(0, 0.25), scale), [-1.0, 1.0])
    assert (high - low) / 2 == pytest.approx(std, abs=1e-8)
    assert high + low == pytest.approx(0, abs=1e-8)
    assert 1 / math.sqrt((1 - scale) / 1 + scale / 0.25) == pytest.approx(product, abs=1e-8)
    assert (scale == 1.0) == (abs(std - product) < 0.05)


# ---- identities ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_scales_0_and_1_are_the_models_and_leave_the_other_alone(dtype: torch.dtype) -> None:
    x = counter_normal((2, 3), 1)
    own = counter_normal((2, 3), 2).to(dtype)

    def model(x: Tensor, sigma: Tensor, timestep: Tensor) -> Tensor:
        return own

    assert torch.equal(rlg(model, untouched, 0)(x, TIME, TIME), own)
    assert torch.equal(rlg(untouched, model, 1.0)(x, TIME, TIME), own)


@pytest.mark.parametrize("scale", [-2.0, 0.3, 1.6, 7.0])
def test_equal_outputs_stay_what_they_are(scale: float) -> None:
    output = counter_normal((4, 5), 3)
    assert torch.equal(mixed(output, output, scale), output)
    assert mixed(output.bfloat16(), output.bfloat16(), scale).dtype == torch.float32


def test_a_scale_per_sample() -> None:
    base, tuned = counter_normal((3, 2), 4), counter_normal((3, 2), 5)
    got = mixed(base, tuned, torch.tensor([0.0, 1.0, 2.0]))
    torch.testing.assert_close(got, torch.stack([base[0], tuned[1], 2 * tuned[2] - base[2]]), rtol=0, atol=1e-6)


def test_velocity_noise_and_clean_mix_alike() -> None:
    x, base, tuned = (counter_normal((3, 4), 6, i).double() for i in range(3))
    sigma = torch.tensor([0.2, 0.5, 0.9], dtype=torch.float64)
    for convert in (noise_from_velocity, clean_from_velocity):
        alike = mixed(convert(x, base, sigma), convert(x, tuned, sigma), 1.6)
        torch.testing.assert_close(alike, convert(x, mixed(base, tuned, 1.6), sigma), rtol=0, atol=1e-12)


@pytest.mark.parametrize("kernel", ["ode", "flow_sde", "dance_sde", "cps"])
def test_a_step_mixes_means_and_keeps_its_std(kernel: str) -> None:
    x, base, tuned = (counter_normal((2, 6), 8, i).double() for i in range(3))
    step = partial(KERNELS[kernel], x, sigma=0.6, sigma_next=0.5)
    both = step(velocity=mixed(base, tuned, 2.5))
    torch.testing.assert_close(
        both.mean, -1.5 * step(velocity=base).mean + 2.5 * step(velocity=tuned).mean, rtol=0, atol=1e-12
    )
    assert torch.equal(both.std, step(velocity=tuned).std)


# ---- with classifier-free guidance -----------------------------------------------------------------------------------


class Net:
    """A network with weights of its own that counts the rows it is asked for."""

    def __init__(self, seed: int) -> None:
        self.seed, self.rows = seed, 0

    def __call__(self, x: Tensor, timestep: Tensor, cond: Conditioning) -> Tensor:
        self.rows += len(x)
        weight = counter_normal((x.shape[-1], x.shape[-1]), "net", self.seed).double()
        return torch.tanh(x @ weight + cond.tensors["text"][:, None, None])


COND = Conditioning({"text": torch.tensor([0.5, -1.0], dtype=torch.float64)})
NEGATIVE = Conditioning({"text": torch.tensor([0.1], dtype=torch.float64)})
X = counter_normal((2, 4, 3), "latent").double()


@pytest.mark.parametrize(
    ("scale", "base_scale", "tuned_scale", "rows"),
    [(1.6, 4.5, 4.5, 4), (1.6, 4.5, 1.0, 3), (1.6, 1.0, 1.0, 2), (0.0, 4.5, 1.0, 2), (1.0, 4.5, 1.0, 1)],
)
def test_each_network_has_its_guidance_and_no_row_is_wasted(
    scale: float, base_scale: float, tuned_scale: float, rows: int
) -> None:
    base, tuned = Net(0), Net(1)
    velocity = rlg(
        classifier_free_guidance(base, COND, NEGATIVE, base_scale),
        classifier_free_guidance(tuned, COND, NEGATIVE, tuned_scale),
        scale,
    )
    v = velocity(X, torch.tensor(0.5), TIME)
    assert base.rows + tuned.rows == rows * len(X)
    assert network_rows([scale], base_guidance_scale=base_scale, rl_guidance_scale=tuned_scale) == rows
    time = TIME.expand(2)
    u_b, c_b, u_r, c_r = (net(X, time, text) for net in (base, tuned) for text in (NEGATIVE.expand(2), COND))
    wanted = (1 - scale) * (u_b + base_scale * (c_b - u_b)) + scale * (u_r + tuned_scale * (c_r - u_r))
    torch.testing.assert_close(v, wanted, rtol=0, atol=1e-12)


def order_matters(rule: Callable[[Tensor, Tensor, float], Tensor]) -> float:
    """Largest difference between guiding two networks and then mixing, and mixing and then guiding."""
    u_b, c_b, u_r, c_r = (counter_normal((2, 4, 3), "order", i).double() for i in range(4))
    first = mixed(rule(u_b, c_b, 4.0), rule(u_r, c_r, 4.0), 1.6)
    second = rule(mixed(u_b, u_r, 1.6), mixed(c_b, c_r, 1.6), 4.0)
    return float((first - second).abs().max())


def test_bilinear_rules_commute_and_others_do_not() -> None:
    assert order_matters(linear_cfg) < 1e-12
    assert order_matters(z_image) < 1e-12
    assert order_matters(qwen_norm_rescale) > 0.1
    assert order_matters(partial(z_image, norm_cap=1.0)) > 0.1


def test_a_rule_that_is_not_linear_is_finished_before_the_mixture() -> None:
    base, tuned, time = Net(2), Net(3), TIME.expand(2)
    guided = [classifier_free_guidance(net, COND, NEGATIVE, 4.0, rule=qwen_norm_rescale) for net in (base, tuned)]
    velocity = rlg(guided[0], guided[1], 1.6)
    finished = []
    for net in (base, tuned):
        u, c = net(X, time, NEGATIVE.expand(2)).numpy(), net(X, time, COND).numpy()
        linear = u + 4.0 * (c - u)
        finished.append(linear * np.linalg.norm(c, axis=-1, keepdims=True) / np.linalg.norm(linear, axis=-1)[..., None])
    wanted = -0.6 * finished[0] + 1.6 * finished[1]
    np.testing.assert_allclose(velocity(X, torch.tensor(0.5), TIME).numpy(), wanted, rtol=0, atol=1e-12)
    # Scale 1 of another rule than the linear one is not a reason to leave the negative out: Z-Image's 1 is our 2.
    z = classifier_free_guidance(base, COND, NEGATIVE, 1.0, rule=z_image)(X, torch.tensor(0.5), TIME)
    linear = classifier_free_guidance(base, COND, NEGATIVE, 2.0)(X, torch.tensor(0.5), TIME)
    torch.testing.assert_close(z, -linear, rtol=0, atol=1e-12)


def test_rules_by_hand() -> None:
    negative, positive = torch.tensor([[[3.0, 0.0], [0.0, 0.0]]]), torch.tensor([[[0.0, 4.0], [3.0, 4.0]]])
    root = math.sqrt(73)  # norm of (-3, 8)
    wanted = torch.tensor([[[-3 * 4 / root, 8 * 4 / root], [3.0, 4.0]]])
    torch.testing.assert_close(qwen_norm_rescale(negative, positive, 2.0), wanted)
    assert z_image(negative, positive, 0.0).tolist() == (-positive).tolist()
    assert z_image(negative, positive, 1.0).tolist() == [[[3.0, -8.0], [-6.0, -8.0]]]
    capped = z_image(negative, positive, 1.0, norm_cap=0.5)  # positive has norm sqrt(41)
    assert float(capped.norm()) == pytest.approx(0.5 * math.sqrt(41), rel=1e-6)
    assert torch.equal(z_image(negative, positive, 1.0, norm_cap=9.0), z_image(negative, positive, 1.0))
    told = embedded_guidance(COND, 3.5)
    assert told.tensors["guidance"].tolist() == [3.5, 3.5]
    assert told.tensors["text"] is COND.tensors["text"]


# ---- several models, and when they guide -----------------------------------------------------------------------------


def test_several_tuned_models() -> None:
    x = torch.zeros(2, 1)
    assert rlg_experts(const(1), [const(2), const(5)], [0.5, 2.0])(x, TIME, TIME).tolist() == [[9.5], [9.5]]
    assert rlg_experts(untouched, [const(2), const(5)], [0.25, 0.75])(x, TIME, TIME).tolist() == [[4.25], [4.25]]
    assert rlg_experts(const(1), [untouched, const(5)], [0.0, 2.0])(x, TIME, TIME).tolist() == [[9.0], [9.0]]
    assert rlg_experts(const(1), [untouched, untouched], [0, 0])(x, TIME, TIME).tolist() == [[1.0], [1.0]]
    assert network_rows([0.5, 2.0], base_guidance_scale=1, rl_guidance_scale=1) == 3


def test_schedules() -> None:
    sigma_T = torch.tensor([1.0, 0.9, 0.6, 0.3, 0.0])
    late = by_step(rl_first(3.0, 2), sigma_T)
    assert [late(float(sigma)) for sigma in sigma_T[:-1]] == [1.0, 1.0, 3.0, 3.0]
    within = rl_outside(3.0, 0.3, 0.9)
    assert [within(float(sigma)) for sigma in sigma_T[:-1]] == [1.0, 3.0, 3.0, 3.0]
    x = torch.zeros(2, 1)
    assert rlg(untouched, const(5), late)(x, sigma_T[1], TIME).tolist() == [[5.0], [5.0]]
    assert rlg(const(1), const(5), late)(x, sigma_T[2], TIME).tolist() == [[13.0], [13.0]]
    # Samples at different levels, as branches of a tree are.
    assert rlg(const(1), const(5), late)(x, sigma_T[1:3], TIME).tolist() == [[5.0], [13.0]]
    assert rlg(untouched, const(5), late)(x, sigma_T[:2], TIME).tolist() == [[5.0], [5.0]]
    assert [rl_first(2.0, 0)(step) for step in range(2)] == [2.0, 2.0]


def test_what_it_refuses() -> None:
    x = torch.zeros(2, 1)
    for scale in (math.nan, math.inf):
        with pytest.raises(ValueError, match="finite"):
            rlg(const(0), const(1), scale)
        with pytest.raises(ValueError, match="finite"):
            rlg(const(0), const(1), lambda sigma, s=scale: s)(x, TIME, TIME)  # type: ignore[misc]
    with pytest.raises(ValueError, match="one shape"):
        mixed(x, x[:, 0], 2.0)
    with pytest.raises(ValueError, match="one value per sample"):
        mixed(x, x, torch.ones(3))
    for experts, scales in (([], []), ([const(1)], [1.0, 2.0])):
        with pytest.raises(ValueError, match="one scale per expert"):
            rlg_experts(const(0), experts, scales)
    for low, high in ((0.6, 0.4), (-0.1, 0.5), (0.5, 1.1), (math.nan, 1.0)):
        with pytest.raises(ValueError, match="low <= high"):
            rl_outside(2.0, low, high)
    with pytest.raises(ValueError, match="negative"):
        rl_first(2.0, -1)
    with pytest.raises(ValueError, match="norm_cap"):
        z_image(x, x, 1.0, norm_cap=0.0)
    with pytest.raises(ValueError, match="given once"):
        embedded_guidance(embedded_guidance(COND, 3.5), 3.5)
