"""Forward-process losses: worked values, identities, optima by minimisation, and gradients."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flowrl.config.base import find_config
from flowrl.config.train import load_config
from flowrl.objectives.forward_losses import FORWARD, Awm, Dgpo, Matched, Nft, Rwr, noised, old_decay
from flowrl.objectives.terms import matching_error, matching_log_prob, mean_squared_error, optimality, velocity_kl


def double(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def point(velocity: Any, old: Any = (-0.4, 2.5), advantage: float = 2.0) -> Matched:
    """The worked point: x = (.75, .5), true velocity (-.5, 3)."""
    return Matched(
        clean=double([[1.0, -1.0]]), noise=double([[0.5, 2.0]]), sigma=double([0.5]),
        velocity=velocity if isinstance(velocity, Tensor) else double([velocity]), old=double([old]),
        advantage=double([advantage]), reward=double([0.0]), group=torch.tensor([0]),
    )  # fmt: skip


def batch(seed: int = 0, b: int = 6, shape: tuple[int, ...] = (2, 3)) -> Matched:
    """Random images of two groups, everything set."""
    generator = torch.Generator().manual_seed(seed)
    latents = [torch.randn((b, *shape), generator=generator, dtype=torch.float64) for _ in range(5)]
    return Matched(
        clean=latents[0], noise=latents[1], velocity=latents[2], old=latents[2] + 0.3 * latents[3],
        reference=latents[4], sigma=torch.rand(b, generator=generator, dtype=torch.float64) * 0.9 + 0.1,
        advantage=3 * torch.randn(b, generator=generator, dtype=torch.float64),
        reward=torch.rand(b, generator=generator, dtype=torch.float64), group=torch.arange(b) % 2,
    )  # fmt: skip


def gradient(loss: Callable[[Tensor], Tensor], at: Tensor) -> Tensor:
    at = at.detach().clone().requires_grad_()
    (result,) = torch.autograd.grad(loss(at).sum(), at)
    return result


def method_gradient(name: str, matched: Matched, **options: Any) -> Tensor:
    return gradient(lambda v: FORWARD[name].options(**options)(replace(matched, velocity=v))[0], matched.velocity)


# ---- noise and errors ------------------------------------------------------------------------------------------------


def test_the_path_and_its_velocity() -> None:
    matched = point((0.0, 0.0))
    assert noised(matched.clean, matched.noise, matched.sigma).tolist() == [[0.75, 0.5]]
    assert matched.target.tolist() == [[-0.5, 3.0]]
    half = noised(torch.ones(1, 2, dtype=torch.bfloat16), torch.zeros(1, 2, dtype=torch.bfloat16), torch.tensor([0.3]))
    assert half.dtype == torch.float32
    assert half.flatten().tolist() == pytest.approx([0.7, 0.7])


def test_errors_are_means_in_float64() -> None:
    a, b = torch.full((2, 3, 4), 1.5, dtype=torch.bfloat16), torch.zeros(2, 3, 4)
    assert mean_squared_error(a, b).dtype == torch.float64
    assert mean_squared_error(a, b).tolist() == [2.25, 2.25]
    error = double([[0.2, -0.4], [0.0, 1e-7]])
    assert matching_error(error, adaptive=False).tolist() == pytest.approx([0.1, 5e-15])
    assert matching_error(error).tolist() == pytest.approx([0.1 / 0.3, 5e-15 / 1e-5])  # the second is at the floor


def test_velocity_kl() -> None:
    matched = batch()
    reference = matched.reference
    assert reference is not None
    expected = np.square(matched.velocity.numpy() - reference.numpy()).mean((1, 2))
    assert np.allclose(velocity_kl(matched.velocity, reference), expected, rtol=1e-12)
    trained = reference.clone().requires_grad_()
    assert not velocity_kl(matched.velocity, trained).requires_grad


# ---- DiffusionNFT ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("beta", "positive", "negative", "loss_2", "loss_0", "loss_minus_5", "slope"),
    [
        (1.0, 0.0833333333, 0.51, 1.0566666667, 1.4833333333, 2.55, (-1.4666666667, 3.5333333333)),
        (0.1, 0.1875490196, 0.2458695652, 10.2522591645, 10.8354646206, 12.2934782609, (0.2881500426, -1.7118499574)),
    ],
)
def test_nft_worked_point(
    beta: float, positive: float, negative: float, loss_2: float, loss_0: float, loss_minus_5: float,
    slope: tuple[float, float],
) -> None:  # fmt: skip
    for advantage, expected in ((2.0, loss_2), (0.0, loss_0), (-5.0, loss_minus_5)):
        loss, metrics = Nft(beta=beta)(point((-0.6, 3.2), advantage=advantage))
        assert float(loss) == pytest.approx(expected, abs=6e-11)
        assert float(metrics["positive_error"]) == pytest.approx(positive, abs=6e-11)
        assert float(metrics["negative_error"]) == pytest.approx(negative, abs=6e-11)
    assert float(Nft()(point((-0.6, 3.2)))[1]["optimality"]) == pytest.approx(0.7)
    assert method_gradient("nft", point((-0.6, 3.2)), beta=beta)[0].tolist() == pytest.approx(slope, abs=6e-11)


@pytest.mark.parametrize("beta", [1.0, 0.1, 3.0])
@pytest.mark.parametrize("advantage", [2.0, -5.0, 0.0])
def test_nft_on_the_old_policy(beta: float, advantage: float) -> None:
    matched = point((-0.4, 2.5), advantage=advantage)
    assert float(Nft(beta=beta)(matched)[0]) == pytest.approx(1.0833333333 / beta, abs=1e-10 / beta)
    r = 0.5 + advantage / 10
    expected = [(2 * r - 1) * 0.8333333333, (2 * r - 1) * -4.1666666667]
    assert method_gradient("nft", matched, beta=beta)[0].tolist() == pytest.approx(expected, abs=1e-10)


def test_nft_on_policy_is_advantage_weighted_matching_whatever_beta() -> None:
    matched = batch(1)
    matched = replace(matched, old=matched.velocity.clone(), advantage=matched.advantage.clamp(-5, 5))
    sigma = matched.sigma[:, None, None]
    size = (sigma * (matched.velocity - matched.target)).abs().mean((1, 2), keepdim=True)

    def weighted(v: Tensor) -> Tensor:
        return (matched.advantage[:, None, None] * (sigma * (v - matched.target)).square() / size).mean((1, 2))

    expected = gradient(weighted, matched.velocity)
    for beta in (0.1, 1.0, 2.5):
        assert torch.allclose(method_gradient("nft", matched, beta=beta), expected, atol=1e-12)
    even = replace(matched, advantage=torch.zeros(6, dtype=torch.float64))  # all rewards of a group equal
    assert float(method_gradient("nft", even).abs().max()) < 1e-14


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 1000), beta=st.sampled_from([0.1, 1.0]), adaptive=st.booleans())
def test_nft_mirrors_good_and_bad(seed: int, beta: float, adaptive: bool) -> None:
    matched = batch(seed)
    assert matched.old is not None
    mirrored = replace(matched, advantage=-matched.advantage, velocity=2 * matched.old - matched.velocity)
    loss, _ = Nft(beta=beta, adaptive=adaptive)(matched)
    assert torch.allclose(Nft(beta=beta, adaptive=adaptive)(mirrored)[0], loss, rtol=1e-10)


def two_points(advantage: tuple[float, float], reward: tuple[float, float]) -> tuple[Matched, Tensor]:
    """Data +1 or -1 alike, seen at x = .2, sigma = .5; and the odds of either."""
    x, sigma, clean = 0.2, 0.5, double([[1.0], [-1.0]])
    plus = 1 / (1 + math.exp(-0.8))
    assert plus == pytest.approx(0.6899744811, abs=1e-10)
    matched = Matched(
        clean=clean, noise=(x - (1 - sigma) * clean) / sigma, sigma=double([sigma, sigma]),
        velocity=double([[0.0], [0.0]]), old=double([[-0.3598979245]] * 2), advantage=double(advantage),
        reward=double(reward), group=torch.tensor([0, 0]),
    )  # fmt: skip
    assert matched.target.flatten().tolist() == pytest.approx([-1.6, 2.4])
    return matched, double([plus, 1 - plus])


def minimise(name: str, matched: Matched, odds: Tensor, **options: Any) -> float:
    """Gradient descent on one velocity for both points."""
    v = torch.zeros(1, 1, dtype=torch.float64)
    for _ in range(400):
        slope = gradient(
            lambda u: odds * FORWARD[name].options(**options)(replace(matched, velocity=u.expand(2, 1)))[0], v
        )
        v = v - 0.3 * slope
    return float(v)


@pytest.mark.parametrize(
    ("beta", "expected"), [(1.0, -2.0711754967), (0.1, -17.472673646), (1.3799489623, -1.6)]
)  # fmt: skip
def test_nft_optimum_without_the_adaptive_weight(beta: float, expected: float) -> None:
    matched, odds = two_points((5.0, -5.0), (1.0, 0.0))
    # The curvature is proportional to beta, so the scale is left as published and the rate suits all.
    found = minimise("nft", matched, odds, beta=beta, adaptive=False)
    assert found == pytest.approx(expected, abs=1e-8)
    alpha = float(odds[0])
    delta = -0.8556387861
    assert alpha * (-1.6 + 0.3598979245) == pytest.approx(delta, abs=1e-9)
    assert (1 - alpha) * (-0.3598979245 - 2.4) == pytest.approx(delta, abs=1e-9)
    assert -0.3598979245 + 2 / beta * delta == pytest.approx(found, abs=1e-7)


def test_optimality_modes() -> None:
    advantage = double([-7.0, -5.0, -1.0, 0.0, 2.0, 9.0])
    expected = {
        "all": [0, 0, 0.4, 0.5, 0.7, 1],
        "positive_only": [0.5, 0.5, 0.5, 0.5, 0.7, 1],
        "negative_only": [0, 0, 0.4, 0.5, 0.5, 0.5],
        "one_only": [0.5, 0.5, 0.5, 0.5, 0.6, 0.6],
        "binary": [0.4, 0.4, 0.4, 0.5, 0.6, 0.6],
    }
    for mode, values in expected.items():
        picked: Any = mode
        assert optimality(advantage, mode=picked).tolist() == pytest.approx(values)
    assert optimality(advantage, advantage_range=1.0, mode="binary").tolist() == [0, 0, 0, 0.5, 1, 1]


def test_nft_scale_is_optional() -> None:
    matched = batch(2)
    published, plain = Nft(beta=0.1)(matched)[0], Nft(beta=0.1, published_scale=False)(matched)[0]
    assert torch.allclose(published, 50 * plain)


# ---- AWM -------------------------------------------------------------------------------------------------------------


def test_awm_log_probabilities() -> None:
    error, t = double([0.04]).requires_grad_(), double([0.5])
    ghuber = matching_log_prob(error, t)
    (slope,) = torch.autograd.grad(ghuber, error)
    assert float(ghuber.detach()) == pytest.approx(-0.8881026362, abs=1e-10)
    assert float(slope) == pytest.approx(-0.5 * (0.04 + 1e-10) ** -0.75, abs=1e-13)
    assert float(slope) == pytest.approx(-5.59016993, abs=5e-9)
    error = error.detach()
    assert float(matching_log_prob(error, t, weighting="huber")) == pytest.approx(-0.0999950001, abs=1e-10)
    for weighting, expected in (("uniform", -0.04), ("t", -0.02), ("t2", -0.01)):
        picked: Any = weighting
        assert float(matching_log_prob(error, t, weighting=picked)) == pytest.approx(expected, abs=1e-15)
    assert float(matching_log_prob(double([0.1]), t)) == pytest.approx(-1.1183580953, abs=1e-10)
    assert float(matching_log_prob(double([0.12]), t)) == pytest.approx(-1.1708078275, abs=1e-10)


@pytest.mark.parametrize(("weighting", "ratio"), [("uniform", 1.0202013400), ("ghuber", 1.0538495860)])
def test_awm_off_policy_ratio(weighting: str, ratio: float) -> None:
    """Errors .10 and .12 of velocity and old velocity."""
    target = point((0.0, 0.0)).target
    matched = point(target + 0.1**0.5, old=(target + 0.12**0.5)[0].tolist(), advantage=-10.0)
    loss, metrics = FORWARD["awm"].options(weighting=weighting, off_policy=True)(matched)
    assert float(metrics["ratio"]) == pytest.approx(ratio, abs=1e-9)
    assert float(loss) == pytest.approx(ratio, abs=1e-9)  # A' = -1
    clipped, _ = Awm(off_policy=True, clip=0.01)(replace(matched, advantage=double([2.5])))
    assert float(clipped) == pytest.approx(-0.5 * 1.01)


def test_awm_on_policy_value_and_gradient() -> None:
    matched = batch(3)
    loss, metrics = Awm(advantage_max=2.0)(matched)
    expected = matched.advantage.clamp(-5, 5) / 5 * 2
    assert torch.allclose(loss, -expected, atol=1e-14)
    assert metrics["ratio"].tolist() == [1.0] * 6
    uniform = method_gradient("awm", matched, weighting="uniform", advantage_max=5.0)
    plain = (matched.velocity - matched.target) * 2 / 6 * matched.advantage.clamp(-5, 5)[:, None, None]
    assert torch.allclose(uniform, plain, atol=1e-14)  # advantage-weighted flow matching


def test_nft_awm_rvm_and_ram_have_one_gradient_on_policy() -> None:
    """`A (v - u)`; RVM and RAM add lambda (v - v_ref), RAM with lambda 1 and the reward as A."""
    velocity, reference = double([[0.1, 0.4, -0.6, 0.2]]), double([[-0.5, 1.2, -0.8, 0.1]])
    matched = Matched(
        clean=double([[0.2, -0.5, 1.0, 0.3]]),
        noise=double([[-0.4, 0.9, 0.1, 0.6]]),
        sigma=double([0.5]),
        velocity=velocity,
        old=velocity,
        reference=reference,
        advantage=double([0.75]),
        reward=double([0.75]),
        group=torch.tensor([0]),
    )
    shared = double([[0.525, -0.75, 0.225, -0.075]])
    awm = method_gradient("awm", matched, weighting="uniform", advantage_max=5.0)
    assert torch.allclose(awm * 4 / 2, shared, atol=1e-14)
    for beta in (0.1, 0.5, 1.0):
        nft = method_gradient("nft", matched, adaptive=False, beta=beta)
        assert torch.allclose(nft * 4 / (2 * 0.5**2), shared, atol=1e-12)
    held = gradient(lambda v: velocity_kl(v, reference), velocity)
    assert torch.allclose((awm + 0.25 * held) * 4 / 2, double([[0.675, -0.95, 0.275, -0.05]]), atol=1e-14)
    assert torch.allclose((awm + held) * 4 / 2, double([[1.125, -1.55, 0.425, 0.025]]), atol=1e-14)


@pytest.mark.parametrize(
    ("name", "advantage", "scaled", "coefficient"),
    [("tiny_rvm", 4.0, 0.4, 0.0), ("sd35m_rvm", -60.0, -0.5, 0.0), ("tiny_ram", 0.75, 0.75, 1.0)],
)
def test_presets_of_rvm_and_ram_have_its_scale_and_pull(
    name: str, advantage: float, scaled: float, coefficient: float
) -> None:
    """RVM: a tenth of the advantage, clipped, over the batch's spread, and no pull. RAM: the reward, and lambda 1."""
    config = load_config(find_config(name))
    matched = replace(point((-0.7, 3.5), advantage=advantage), old=None)
    found = method_gradient(config.objective.name or "", matched, **config.objective.options)
    assert torch.allclose(found, 2 / 2 * scaled * (matched.velocity - matched.target), rtol=1e-12)
    assert (config.adv_std, config.kl_coef) == ("global" if coefficient == 0 else "none", coefficient)


@pytest.mark.parametrize(("slope", "coefficient", "best_mean"), [(0.3, 1.0, 0.3), (0.5, 1.0, 0.5), (0.5, 2.0, 0.25)])
def test_the_fixed_point_of_ram_is_the_optimum_of_reward_minus_kl(
    slope: float, coefficient: float, best_mean: float
) -> None:
    """Base N(0, 1), reward a x: the optimum is N(a / coefficient, 1), of known velocity, and there the mean gradient is
    0. With a = 0.5 the reward is the logit of data N(0.5, 1) against the base, but for its constant."""
    a, sigma, x_sigma = best_mean, 0.8, 0.4
    scale = (1 - sigma) ** 2 + sigma**2
    nodes, weights = np.polynomial.hermite_e.hermegauss(40)
    mean = a + (1 - sigma) * (x_sigma - (1 - sigma) * a) / scale  # of clean given x_sigma under the optimum
    clean = double(mean + nodes * sigma / math.sqrt(scale))[:, None]
    noise = (x_sigma - (1 - sigma) * clean) / sigma
    best = float(((noise - clean)[:, 0] * double(weights)).sum() / weights.sum())
    base = x_sigma * (sigma - (1 - sigma)) / scale
    assert best - base == pytest.approx(-a * sigma / scale)
    assert a != 0.3 or best - base == pytest.approx(-0.352941, abs=5e-7)
    reward = slope * clean[:, 0] - slope**2 / 2
    b = len(nodes)
    matched = Matched(
        clean=clean,
        noise=noise,
        sigma=double([sigma] * b),
        velocity=double([[best]] * b),
        advantage=reward,
        reward=reward,
        group=torch.zeros(b, dtype=torch.long),
    )

    def ram(v: Tensor) -> Tensor:
        policy, _ = Awm(weighting="uniform", advantage_range=99.0, advantage_max=99.0)(replace(matched, velocity=v))
        return policy + coefficient * velocity_kl(v, double([[base]] * b))

    assert float((gradient(ram, matched.velocity)[:, 0] * double(weights)).sum()) == pytest.approx(0, abs=1e-12)


# ---- gradients, dtypes, refusals -------------------------------------------------------------------------------------


Array = np.ndarray[Any, Any]


def mean(error: Array) -> Array:
    return np.asarray(np.square(error).mean((1, 2)))


def adaptive(error: Array, at: Array) -> Array:
    return np.asarray(mean(error) / np.abs(at).mean((1, 2)))


def frozen(name: str, matched: Matched, v: Array) -> float:
    """Sum of the losses in numpy, with everything that carries no gradient taken at the batch's own velocity."""
    assert matched.old is not None
    assert matched.reference is not None
    old, reference, at, target = (m.numpy() for m in (matched.old, matched.reference, matched.velocity, matched.target))
    t, a, group = matched.sigma.numpy(), np.clip(matched.advantage.numpy(), -5, 5), matched.group.numpy()
    reward, r = matched.reward.numpy(), a / 10 + 0.5

    def of_group(values: Array) -> Array:
        return np.array([values[group == g].mean() for g in group])

    if name == "nft":
        error = [[t[:, None, None] * (old + s * 0.5 * (u - old) - target) for u in (v, at)] for s in (1, -1)]
        return float((5 / 0.5 * (r * adaptive(*error[0]) + (1 - r) * adaptive(*error[1]))).sum())
    if name == "dgpo":
        score = 2.0 * of_group(a * (mean(at - target) - mean(reference - target)))
        return float((a * mean(v - target) / (1 + np.exp(-score))).sum())
    if name == "crd":
        rho, rho_at = (adaptive(old - target, old - target) - adaptive(u - target, at - target) for u in (v, at))
        return float((5 / 2 * np.square(2 * (rho - of_group(rho_at)) - (r - of_group(r)))).sum())
    if name == "awm":
        psi, psi_old = (t / 0.25 * ((mean(u - target) + 1e-10) ** 0.25 - 1e-10**0.25) for u in (v, old))
        ratio = np.exp(psi_old - psi)
        return float(np.maximum(-a / 5 * ratio, -a / 5 * np.clip(ratio, 0.9, 1.1)).sum())
    best = np.array([reward[group == g].max() for g in group]) == reward
    return float(((reward if name == "rwr" else best) * mean(v - target)).sum())


@pytest.mark.parametrize(
    ("name", "options"),
    [("nft", {"beta": 0.5}), ("dgpo", {"beta": 2.0}), ("crd", {"beta": 2.0}), ("rwr", {"weights": "raw"}), ("rft", {}),
     ("awm", {"off_policy": True, "clip": 0.1})],
)  # fmt: skip
def test_values_and_gradients_against_numpy(name: str, options: dict[str, Any]) -> None:
    matched = batch(6)
    v = matched.velocity.numpy()
    assert float(FORWARD[name].options(**options)(matched)[0].sum()) == pytest.approx(frozen(name, matched, v))
    slope, step = np.zeros_like(v), 1e-6
    for index in np.ndindex(*v.shape):
        shift = np.zeros_like(v)
        shift[index] = step
        slope[index] = (frozen(name, matched, v + shift) - frozen(name, matched, v - shift)) / (2 * step)
    found = method_gradient(name, matched, **options).numpy()
    assert np.allclose(found, slope, rtol=1e-6, atol=1e-7)
    assert np.abs(found).max() > 1e-3


@pytest.mark.parametrize("name", sorted(FORWARD))
def test_only_the_trained_velocity_gets_gradient(name: str) -> None:
    matched = batch(7)
    assert matched.old is not None
    assert matched.reference is not None
    leaves = {n: getattr(matched, n).clone().requires_grad_() for n in ("velocity", "old", "reference")}
    needed: dict[str, dict[str, Any]] = {"awm": {"off_policy": True}, "dgpo": {"clip": 0.1}, "sft": {"images": ""}}
    options = needed.get(name, {})
    loss, metrics = FORWARD[name].options(**options)(replace(matched, **leaves))
    loss.sum().backward()
    assert leaves["velocity"].grad is not None
    assert leaves["old"].grad is None
    assert leaves["reference"].grad is None
    assert all(metric.shape == (6,) and not metric.requires_grad for metric in metrics.values())
    narrow = {n: getattr(matched, n).float() for n in ("clean", "noise", "velocity", "old", "reference")}
    single, _ = FORWARD[name].options(**options)(replace(matched, **narrow))
    assert single.dtype == torch.float32
    assert torch.allclose(single.double(), loss.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        ("linear", {0: 0, 1: 0.001, 100: 0.1, 500: 0.5, 1000: 0.5}),
        ("delayed", {74: 0, 75: 0, 76: 0.0075, 100: 0.1875, 208: 0.9975, 209: 0.999}),
        ("copy", {0: 0, 5000: 0}),
        ("awm", {0: 0, 100: 0.1, 300: 0.3, 1000: 0.3}),
        ("crd", {0: 0.25, 10: 0.3, 1000: 0.999}),
    ],
)
def test_decays_of_the_old_policy(kind: str, values: dict[int, float]) -> None:
    assert [old_decay(kind, step) for step in values] == pytest.approx(list(values.values()), abs=1e-12)


def test_losses_refuse_what_is_missing_or_out_of_range() -> None:
    matched = batch()
    without: list[tuple[str, dict[str, Any]]] = [
        ("nft", {}), ("crd", {}), ("awm", {"off_policy": True}), ("dgpo", {"clip": 0.1}),
    ]  # fmt: skip
    for name, options in without:
        with pytest.raises(ValueError, match="old policy"):
            FORWARD[name].options(**options)(replace(matched, old=None))
    with pytest.raises(ValueError, match="reference policy"):
        Dgpo()(replace(matched, reference=None))
    cases: list[tuple[str, dict[str, Any]]] = [
        ("nft", {"beta": 0.0}), ("nft", {"floor": 0.0}), ("nft", {"mode": "good"}), ("nft", {"advantage_range": 0.0}),
        ("awm", {"weighting": "elbo"}), ("awm", {"power": 0.0}), ("awm", {"advantage_max": 0.0}), ("awm", {"clip": -1}),
        ("dgpo", {"beta": -1.0}), ("crd", {"beta": 0.0}), ("crd", {"loss": "mse"}), ("crd", {"temperature": -1.0}),
        ("crd", {"temperature": 0.0}),
        ("rwr", {"weights": "top"}), ("rwr", {"temperature": 0.0}),
    ]  # fmt: skip
    for name, options in cases:
        with pytest.raises(ValueError, match=r"\bgot\b"):
            FORWARD[name].options(**options)(matched)
    with pytest.raises(ValueError, match="raw weights"):
        Rwr(weights="raw")(replace(matched, reward=-matched.reward))
    for wrong in ({"sigma": 1000 * matched.sigma}, {"sigma": torch.zeros(6)}):
        with pytest.raises(ValueError, match="noise fraction"):
            replace(matched, **wrong)
    for wrong in ({"noise": torch.zeros(6, 3)}, {"old": torch.zeros(1, 2, 3)}, {"advantage": torch.zeros(1)}):
        with pytest.raises(ValueError, match="one shape"):
            replace(matched, **wrong)
