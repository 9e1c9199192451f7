"""On-policy distillation: weights of steps against worked numbers and the KL itself, and which states are drawn; the
direction, target and mask of DiffusionART."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from flowrl.advantages import group_advantages
from flowrl.objectives.distillation import Art, Opd, distribution_matching, noise_level, reward_direction
from flowrl.objectives.policy_gradient import Reinforce, Scored, kernel_sensitivity
from flowrl.objectives.terms import velocity_kl
from flowrl.runtime.randomness import counter_normal
from flowrl.samplers import KERNELS, Kernel, build_schedule
from flowrl.samplers.transition import Transition, gaussian_kl, gaussian_log_prob

NOW, AFTER = 0.8, 0.6
X, STUDENT, TEACHER = (
    torch.tensor([row], dtype=torch.float64)
    for row in ((0.3, -0.2, 0.5, 1.0), (0.1, 0.4, -0.6, 0.2), (0.0, 0.5, -0.5, 0.6))
)
DISTANCE = 0.0475  # mean square of student less teacher
# Noise level, c, KL by element, half the mean square distance of the means.
WORKED: dict[str, tuple[float, float, float | None, float]] = {
    "ode": (0.0, -0.2, None, 0.00095),
    "flow_sde": (0.7, -0.249, 0.003756438138, 0.001472523750),
    "dance_sde": (0.3, -0.20225, 0.053971957465, 0.000971495234),
    "cps": (0.8, -0.2829179607, 0.005838072716, 0.001901011096),
    "dpm_sde": (1.0, -0.275, 0.005805555556, 0.001796093750),
    "wan_sde": (1.0, -0.21444, 0.009454052961, 0.001092132198),
}


def kernel(name: str) -> Kernel:
    return replace(KERNELS[name], noise_level=WORKED[name][0], sigma_max=0.95)


def loss(name: str, weight: Any, velocity: Tensor = STUDENT) -> Tensor:
    return Opd(weight=weight).weight_of(kernel(name), NOW, AFTER) * velocity_kl(velocity, TEACHER)


@pytest.mark.parametrize("name", WORKED)
def test_weights_give_the_worked_numbers(name: str) -> None:
    _, sensitivity, kl, mean = WORKED[name]
    assert kernel_sensitivity(kernel(name), NOW, AFTER) == pytest.approx(sensitivity, abs=1e-10)
    assert float(loss(name, "velocity")) == pytest.approx(DISTANCE, abs=1e-15)
    assert float(loss(name, "mean")) == pytest.approx(mean, abs=5e-13)
    assert float(loss(name, "transition")) == pytest.approx(mean if kl is None else kl, abs=5e-13)
    if kl is None:
        with pytest.raises(ValueError, match="one without noise has none: set weight=mean"):
            loss(name, "kl")
    else:
        assert float(loss(name, "kl")) == pytest.approx(kl, abs=5e-13)


@pytest.mark.parametrize("name", [name for name in WORKED if name != "ode"])
def test_the_weight_kl_is_the_kl_of_the_steps(name: str) -> None:
    steps = [kernel(name)(X, velocity, NOW, AFTER) for velocity in (STUDENT, TEACHER)]
    torch.testing.assert_close(loss(name, "kl"), gaussian_kl(*steps) / X.numel(), rtol=1e-12, atol=0)
    half = (steps[0].mean - steps[1].mean).square().mean(1) / 2
    torch.testing.assert_close(loss(name, "mean"), half, rtol=1e-12, atol=0)


def test_the_gradient_is_the_worked_one_and_leaves_the_teacher_alone() -> None:
    student, teacher = STUDENT.clone().requires_grad_(), TEACHER.clone().requires_grad_()
    weight = Opd(weight="kl").weight_of(kernel("flow_sde"), NOW, AFTER)
    (X.numel() * weight * velocity_kl(student, teacher)).sum().backward()
    worked = torch.tensor([[0.015816581633, -0.015816581633, -0.015816581633, -0.063266326531]], dtype=torch.float64)
    assert student.grad is not None
    torch.testing.assert_close(student.grad, worked, rtol=0, atol=1e-12)
    assert teacher.grad is None


def test_weights_of_a_whole_path_pile_up_at_its_end() -> None:
    """Ten steps of shift 3, evenly spaced before it and as SD3's own: the share of the last trained step's weight."""
    even, own = (build_schedule({"shift": 3.0}, 10, grid=grid).sigma for grid in ("linspace", "diffusers"))
    shares: list[tuple[str, Any, int, float, float]] = [
        ("flow_sde", "kl", 9, 0.527, 0.641),
        ("cps", "kl", 9, 0.628, 0.998),
        ("ode", "mean", 10, 0.436, 0.0005),
        ("flow_sde", "velocity", 9, 0.111, 0.111),
    ]
    for name, weight, steps, *expected in shares:
        for sigma, share in zip((even, own), expected, strict=True):
            bound = replace(KERNELS[name], sigma_max=float(sigma[1]))
            weights = [Opd(weight=weight).weight_of(bound, sigma[k], sigma[k + 1]) for k in range(steps)]
            assert weights[-1] / sum(weights) == pytest.approx(share, abs=6e-4), name


def test_the_policy_gradient_on_a_detached_kl_is_void() -> None:
    """Over antithetic draws it is 0; with `log p_T - log p` of each draw as advantage its mean is the KL's, but far
    noisier."""
    student, count = STUDENT.clone().requires_grad_(), 4000
    new, teacher = (kernel("flow_sde")(X, v, NOW, AFTER) for v in (student, TEACHER))
    half = counter_normal((count, 4), "draws").double()
    drawn = (new.mean + new.std * torch.cat([half, -half])).detach()
    log_prob, log_teacher = (
        gaussian_log_prob(drawn, Transition(one.mean.expand_as(drawn), one.std)) for one in (new, teacher)
    )
    ones = torch.ones(2 * count, dtype=torch.float64)
    given: dict[str, Any] = {"clip_low": ones, "clip_high": ones, "old_mean": None, "produced": drawn}
    given["new"] = Transition(new.mean.expand_as(drawn), new.std)
    c = kernel_sensitivity(kernel("flow_sde"), NOW, AFTER)

    def gradients(advantage: Tensor) -> Tensor:
        """[draws, 4] of each draw, whose sum is that of objective reinforce."""
        ratio = log_prob - log_prob.detach()
        scored = Scored(log_ratio=ratio, advantage=advantage.detach(), step_size=NOW - AFTER, sensitivity=c, **given)
        (whole,) = torch.autograd.grad(Reinforce()(scored).sum(), student, retain_graph=True)
        each = -advantage.detach()[:, None] * c * (drawn - new.mean.detach()) / new.std**2
        torch.testing.assert_close(each.sum(0, keepdim=True), whole, rtol=1e-9, atol=1e-9)
        return each

    kl = gaussian_kl(new, teacher)
    assert float(gradients(-kl.expand(2 * count)).mean(0).abs().max()) < 1e-12
    each = gradients(log_teacher - log_prob)
    (wanted,) = torch.autograd.grad(kl.sum(), student)
    error = each.std(0) / (2 * count) ** 0.5
    assert bool(((each.mean(0) - wanted[0]).abs() < 5 * error).all())
    assert float(each.std(0).mean()) == pytest.approx(0.07, abs=0.02)


# ---- distribution matching -------------------------------------------------------------------------------------------


def matched(drawn: Tensor, real: Tensor, fake: Tensor) -> tuple[Tensor, Tensor]:
    """The loss, and its gradient by what was drawn."""
    clean = drawn.clone().requires_grad_()
    loss = distribution_matching(clean, drawn, real, fake)
    (gradient,) = torch.autograd.grad(loss.sum(), clean)
    return loss.detach(), gradient


def test_distribution_matching_gives_the_worked_numbers_and_exactly_0_where_both_agree() -> None:
    rows = (torch.tensor([row], dtype=torch.float64) for row in ((1.0, 2.0), (0.0, 1.0), (0.5, 1.5)))
    drawn, real, fake = rows  # Z = 1, g = (.5, .5)
    loss, gradient = matched(drawn, real, fake)
    assert loss.tolist() == [0.125]
    assert gradient.tolist() == [[0.25, 0.25]]
    for dtype in (torch.float32, torch.bfloat16):
        one = torch.randn(3, 5, generator=torch.Generator().manual_seed(0)).to(dtype)
        assert [float(part.abs().max()) for part in matched(one, one / 3, one / 3)] == [0, 0]
    loss, _ = matched(drawn, drawn, fake)  # the teacher's estimate is the image itself
    assert float(loss) == pytest.approx(0.25e12 / 2)


@pytest.mark.parametrize("level", [0.02, 0.3, 0.98])
def test_of_two_gaussians_the_gradient_is_the_difference_of_means(level: float) -> None:
    """E[clean | x] under N(m, 1) is m + (1 - s) (x - (1 - s) m) / ((1 - s)^2 + s^2), so that before the division
    x_f - x_r = (nu - mu) s^2 / ((1 - s)^2 + s^2), whatever was drawn."""
    mu, nu, spread = 0.7, -0.4, (1 - level) ** 2 + level**2
    drawn, noise = torch.randn(2, 6, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    x = (1 - level) * (drawn + nu) + level * noise
    real, fake = (m + (1 - level) * (x - (1 - level) * m) / spread for m in (mu, nu))
    _, gradient = matched(drawn + nu, real, fake)
    size = (drawn + nu - real).abs().mean(1, keepdim=True)
    torch.testing.assert_close(gradient, (nu - mu) * level**2 / spread / size.expand(-1, 4) / 4, rtol=1e-9, atol=0)
    assert bool((gradient < 0).all())  # a descent leads from nu up to mu


def test_noise_levels_are_even_and_below_what_a_network_knows() -> None:
    drawn = torch.tensor([noise_level(1.0, "level", image) for image in range(2000)])
    assert 0.02 <= float(drawn.min()) < 0.03
    assert 0.97 < float(drawn.max()) <= 0.98
    for share in (0.25, 0.5, 0.75):
        assert float((drawn < 0.02 + 0.96 * share).double().mean()) == pytest.approx(share, abs=0.05)
    assert max(noise_level(0.9, "level", image) for image in range(200)) == 0.9


# ---- which states ----------------------------------------------------------------------------------------------------


def test_all_states_are_all_and_drawn_ones_are_different_and_of_their_counters() -> None:
    assert Opd().places(4, 0) == (0, 1, 2, 3)
    three = Opd(states=3, query=(5.0, 2.0))
    for image in range(50):
        found = three.places(6, 7, image)
        assert found == tuple(sorted(set(found)))
        assert len(found) == 3
        assert set(found) <= set(range(6))
        assert found == three.places(6, 7, image)
    assert len({three.places(6, 7, image) for image in range(50)}) > 5
    assert three.places(3, 0) == (0, 1, 2)


@pytest.mark.parametrize("query", [(1.0, 1.0), (5.0, 2.0), (0.5, 3.0)])
def test_one_state_has_the_odds_of_the_law(query: tuple[float, float]) -> None:
    count, steps = 2000, 5
    drawn = Counter(Opd(states=1, query=query).places(steps, "odds", image)[0] for image in range(count))
    (a, b), middle = query, [(place + 0.5) / steps for place in range(steps)]
    density = [m ** (a - 1) * (1 - m) ** (b - 1) for m in middle]
    for place in range(steps):
        odds = density[place] / sum(density)
        assert drawn[place] / count == pytest.approx(odds, abs=4 * (odds * (1 - odds) / count) ** 0.5)


def test_a_share_of_the_states_is_off_the_path() -> None:
    count = 2000
    for share in (0.0, 0.3, 1.0):
        drawn = sum(Opd(off_policy=share).noised_again(1, image, 0) for image in range(count)) / count
        assert drawn == pytest.approx(share, abs=4 * (share * (1 - share) / count) ** 0.5)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"off_policy": -0.1}, "share of states, from 0 to 1, got -0.1"),
        ({"off_policy": 1.5}, "share of states, from 0 to 1, got 1.5"),
        ({"off_policy": float("nan")}, "share of states, from 0 to 1, got nan"),
        ({"states": 0}, "at least 1 state of a path, got 0"),
        ({"states": 1, "query": (0.0, 1.0)}, "above 0, got [0.0, 1.0]"),
        ({"query": (5.0, 2.0)}, "states is all, so none is drawn"),
    ],
)
def test_options_without_meaning_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        Opd(**options)


# ---- DiffusionART ----------------------------------------------------------------------------------------------------

PAIR = torch.tensor([[1.0, 2.0], [3.0, 0.0]], dtype=torch.float64)
THREE = torch.tensor([[1, 2, 0, -1], [3, 0, 1, 1], [-1, 1, 2, 0]], dtype=torch.float64)
OLD = torch.tensor([[0.5, -0.5, 1.0, 0.0]], dtype=torch.float64)
OF_THREE = torch.tensor([1.407195, -0.985037, 0.281439, 0.985037], dtype=torch.float64)


def centred(*rewards: float) -> Tensor:
    return group_advantages(torch.tensor(rewards, dtype=torch.float64), len(rewards), scope="none")


def covariance(reward: Tensor, clean: Tensor) -> Tensor:
    centred = reward - reward.mean(), clean - clean.mean(0)
    return torch.from_numpy(np.einsum("i,i...->...", *centred) / len(reward))


def test_the_direction_of_a_group_is_the_worked_one() -> None:
    def close(found: Tensor, *worked: float) -> None:
        torch.testing.assert_close(found, torch.tensor(worked, dtype=torch.float64), rtol=0, atol=5e-7)

    of_pair, of_three = (torch.tensor(rewards, dtype=torch.float64) for rewards in ((1.0, 0.0), (0.2, 0.9, 0.4)))
    close(covariance(of_pair, PAIR), -0.5, 0.5)
    close(reward_direction(centred(1, 0), PAIR), -1, 1)
    close(covariance(of_three, THREE), 0.333333, -0.233333, 0.066667, 0.233333)
    close(reward_direction(centred(0.2, 0.9, 0.4), THREE), *OF_THREE.tolist())


def test_the_direction_is_that_of_deviations_from_both_means_whatever_the_rewards_scale() -> None:
    reward, clean = counter_normal((5,), "reward").double(), counter_normal((5, 3, 2), "clean").double()
    worked = covariance(reward, clean)
    found = reward_direction(reward - reward.mean(), clean)
    assert float(found.square().mean()) == pytest.approx(1, abs=1e-12)
    torch.testing.assert_close(found, worked / worked.square().mean().sqrt())
    for scale, shift in ((1e-6, 0.0), (40.0, 7.0)):
        moved = scale * reward + shift
        torch.testing.assert_close(reward_direction(moved - moved.mean(), clean), found, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(("rewards", "labels"), [((0.7, 0.2), (1, 0)), ((-3, 5), (0, 1)), ((0.4, 0.4), (0.5, 0.5))])
def test_a_pair_teaches_which_one_is_better_and_a_tie_nothing(
    rewards: tuple[float, ...], labels: tuple[float, ...]
) -> None:
    found = reward_direction(centred(*rewards), PAIR)
    torch.testing.assert_close(found, reward_direction(centred(*labels), PAIR), rtol=1e-12, atol=0)
    assert bool(found.any()) == (rewards[0] != rewards[1])


def test_the_target_and_the_two_parts_of_the_gradient_are_the_worked_ones() -> None:
    method, sigma = Art(space="velocity"), torch.tensor([0.8], dtype=torch.float64)
    target = method.target(OLD, OF_THREE[None], sigma)
    worked = torch.tensor([[0.324101, -0.376870, 0.964820, -0.123130]], dtype=torch.float64)
    torch.testing.assert_close(target, worked, rtol=0, atol=5e-7)
    moved = torch.tensor([[0.05, 0.05, -0.05, 0.0]], dtype=torch.float64)
    velocity = (OLD + moved).requires_grad_()
    weight = method.weight_of(kernel("ode"), 0.8, 0.6)
    (weight * velocity_kl(velocity, target) * velocity.numel() / 2).sum().backward()
    assert velocity.grad is not None
    worked = torch.tensor([[0.225899, -0.073130, -0.014820, 0.123130]], dtype=torch.float64)
    torch.testing.assert_close(velocity.grad, worked, rtol=0, atol=5e-7)
    guidance = torch.tensor([[0.175899, -0.123130, 0.035180, 0.123130]], dtype=torch.float64)
    torch.testing.assert_close(velocity.grad, moved + guidance, rtol=0, atol=5e-7)


def test_spaces_weigh_the_error_of_the_clean_estimate_or_of_the_velocity() -> None:
    sigma, x = torch.tensor([0.8], dtype=torch.float64), X
    target, error = Art().target(OLD, OF_THREE[None], sigma), {}
    for space in ("clean", "velocity", "sigma_velocity"):
        method: Any = Art(space=space)  # type: ignore[arg-type]
        error[space] = float(method.weight_of(kernel("ode"), sigma[0], 0.6) * velocity_kl(STUDENT, target))
    clean_target = x - 0.8 * OLD + 0.1 * OF_THREE
    assert error["clean"] == pytest.approx(float((x - 0.8 * STUDENT - clean_target).square().mean()), rel=1e-12)
    assert error["velocity"] == pytest.approx(error["clean"] / 0.64, rel=1e-12)
    assert error["sigma_velocity"] == pytest.approx(error["clean"] / 0.8, rel=1e-12)


def test_steps_that_lead_further_away_are_left_out_beyond_the_threshold_alone() -> None:
    """The old velocity is at 0 and the target at 1, of one element; a threshold of 0.04 is a distance of 0.2."""
    places = torch.tensor([[-0.5], [-0.1], [0.0], [0.19], [0.21], [0.9], [1.1]], dtype=torch.float64)
    zero, one = torch.zeros_like(places), torch.ones_like(places)
    assert Art(threshold=0.04).left_out(places, zero, one).tolist() == [False] * 4 + [True, True, False]
    assert not Art(threshold=None).left_out(places, zero, one).any()
    sideways = torch.tensor(
        [[0.0, 3.0], [0.0, -3.0], [0.6, 0.4]], dtype=torch.float64
    )  # of which the third is not past the target
    target = torch.tensor([[1.0, 0.0]], dtype=torch.float64).expand(3, 2)
    assert Art().left_out(sideways, torch.zeros_like(sideways), target).tolist() == [False, False, True]


def test_the_noisiest_states_alone_are_trained_where_so_many_are_asked_for() -> None:
    assert Art().places(4, 0) == (0, 1, 2, 3)
    assert Art(high_noise=2).places(4, 0) == (0, 1)
    assert Art(high_noise=9).places(4, 0) == (0, 1, 2, 3)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"magnitude": 0.0}, "option magnitude is a finite number above 0, got 0.0"),
        ({"magnitude": float("nan")}, "option magnitude is a finite number above 0, got nan"),
        ({"threshold": float("inf")}, "option threshold is a finite number above 0, got inf"),
        ({"high_noise": 0}, "at least 1 state of a path, got 0"),
    ],
)
def test_options_of_art_without_meaning_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        Art(**options)
