"""Branches and trees: what is sampled, what it costs, that it replays to the bit; credit of branches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise, product

import numpy as np
import pytest
import torch
from torch import Tensor

from flowrl.credit.branches import G2rpo, SelfOpd, TempFlow
from flowrl.credit.values import Context
from flowrl.objectives.policy_gradient import Reinforce, Scored
from flowrl.runtime.randomness import counter_normal, sample_normals
from flowrl.samplers import KERNELS, Kernel, Transition, Velocity, build_schedule, gaussian_log_prob, rollout
from flowrl.samplers.branching import sample_branches
from flowrl.samplers.tree import sample_tree
from flowrl.samplers.windows import thinned_steps
from flowrl.trajectory import Sampled, Schedule

LATENT = (2, 3)


@dataclass
class Network:
    """A closed-form velocity for data N(prompt, 1/4), with a log of its calls: (step, batch size) each.

    With `coupling` an answer depends a little on who else is in the batch, as answers of real networks do.
    """

    schedule: Schedule
    coupling: float = 0.0
    calls: list[tuple[int, int]] = field(default_factory=list)

    def velocity_of(self, index: Tensor) -> Velocity:
        def velocity(x: Tensor, sigma: Tensor, timestep: Tensor) -> Tensor:
            assert len(index) == len(x)
            self.calls.append((self.schedule.timestep.tolist().index(float(timestep)), len(x)))
            mean = index.to(x.dtype).reshape(-1, *[1] * (x.ndim - 1))
            gain = (sigma - (1 - sigma) / 4) / ((1 - sigma) ** 2 / 4 + sigma**2)
            return -mean + gain * (x - (1 - sigma) * mean) + self.coupling * x.mean()

        return velocity

    @property
    def rows(self) -> int:
        return sum(count for _, count in self.calls)


def schedule_of(num_steps: int) -> Schedule:
    return build_schedule({"shift": 3.0}, num_steps, grid="linspace")


def kernel_of(schedule: Schedule, name: str = "flow_sde") -> Kernel:
    return replace(KERNELS[name], noise_level=0.7, sigma_max=schedule.sigma_max)


def node_noise(step: int, nodes: range) -> Tensor:
    return sample_normals(LATENT, [("node", step, node) for node in nodes])


def branches_of(network: Network, anchors: int, branches: int, steps: tuple[int, ...], **options: object) -> Sampled:
    """Branches of anchors, two per prompt."""
    index = torch.arange(anchors) // 2
    return sample_branches(
        network.velocity_of, counter_normal((anchors, *LATENT), "start"), index, index + 10, network.schedule,
        kernel_of(network.schedule), node_noise, steps=steps, branches=branches, **{"batch_size": 5, **options},  # type: ignore[arg-type]
    )  # fmt: skip


def trees_of(network: Network, trees: int, **options: object) -> Sampled:
    index = torch.arange(trees) // 2
    return sample_tree(
        network.velocity_of, counter_normal((trees, *LATENT), "start"), index, index + 10, network.schedule,
        kernel_of(network.schedule, "dance_sde"), node_noise, **{"batch_size": 5, **options},  # type: ignore[arg-type]
    )  # fmt: skip


SHAPES: dict[str, Callable[..., Sampled]] = {
    "branches": lambda network, **options: branches_of(network, 4, 3, (0, 1, 4), strides=(1, 2), **options),
    "tree": lambda network, **options: trees_of(
        network, 3, splits=(0, 2), children=2, stochastic=(0, 1, 2, 4, 5), **options
    ),
    "forked": lambda network, **options: trees_of(network, 4, splits=(1,), children=3, stochastic=(1, 2), **options),
}


@pytest.mark.parametrize("batch_size", [1, 3, 100])
@pytest.mark.parametrize("shape", SHAPES)
def test_ratio_is_exactly_one_by_the_replay_rule(shape: str, batch_size: int) -> None:
    """Also for a network that answers a little differently in other company."""
    network = Network(schedule_of(6), coupling=1e-3)
    sampled = SHAPES[shape](network, batch_size=batch_size, keep_means=True)
    kernel = kernel_of(network.schedule, "flow_sde" if shape == "branches" else "dance_sde")
    assert sampled.mean is not None
    assert max(count for _, count in network.calls) <= batch_size
    seen = 0
    for step in sampled.step.unique().tolist():
        of_step = torch.nonzero(sampled.step == step).flatten()
        for sources in sampled.source[of_step].unique(sorted=True).split(batch_size):
            rows = of_step[torch.isin(sampled.source[of_step], sources)]
            place = torch.searchsorted(sources, sampled.source[rows])
            prompt = torch.stack([sampled.group[sampled.source == source][0] - 10 for source in sources])
            x, sigma, sigma_next = (
                sampled.states[sources],
                network.schedule.sigma[step],
                network.schedule.sigma[step + 1],
            )
            velocity = network.velocity_of(prompt)(x, sigma, network.schedule.timestep[step])
            new = kernel(x[place], velocity[place], sigma, sigma_next)
            log_prob = gaussian_log_prob(sampled.states[sampled.produced[rows]], new)
            assert torch.equal(log_prob, sampled.log_prob[rows])
            assert torch.equal(new.mean, sampled.mean[rows])
            seen += len(rows)
    assert seen == len(sampled)


def test_every_branch_is_a_rollout_with_one_stochastic_step() -> None:
    network = Network(schedule_of(6))
    steps, anchors, branches = (3, 0, 5), 4, 2  # the last step too: its product is the image
    sampled = branches_of(network, anchors, branches, steps)
    assert len(sampled) == len(sampled.finished) == 3 * 4 * 2
    assert sampled.mean is None
    start = counter_normal((anchors, *LATENT), "start")
    places = product((0, 3, 5), range(anchors), range(branches))
    for row, (step, anchor, branch) in enumerate(places):
        own = slice(anchor * branches + branch, anchor * branches + branch + 1)

        def noise(step: int, own: slice = own) -> Tensor:
            return node_noise(step, range(anchors * branches))[own]

        plain = rollout(
            network.velocity_of(torch.tensor([anchor // 2])), start[anchor : anchor + 1], network.schedule,
            kernel_of(network.schedule), noise, stochastic=[step],
        )  # fmt: skip
        assert int(sampled.step[row]) == step
        assert int(sampled.group[row]) == int(sampled.finished_group[row]) == 10 + anchor // 2
        assert torch.equal(sampled.states[sampled.source[row]], plain.states[0, 0])
        assert torch.equal(sampled.states[sampled.produced[row]], plain.states[0, 1])
        assert torch.equal(sampled.log_prob[row], plain.log_prob[0, 0])
        assert torch.equal(sampled.finished[row], plain.final[0])
    assert torch.equal(sampled.sample, torch.arange(24))
    assert torch.equal(sampled.finished_after, torch.arange(24))
    assert bool((sampled.parent == -1).all())
    assert sampled.source.unique().tolist() == list(range(3 * anchors))


def test_every_leaf_is_a_rollout() -> None:
    network = Network(schedule_of(6))
    splits, stochastic, trees = (1, 3), (1, 2, 3, 5), 3
    sampled = trees_of(network, trees, splits=splits, children=2, stochastic=stochastic)
    assert len(sampled.finished) == trees * 4
    start = counter_normal((trees, *LATENT), "start")
    for leaf, end in enumerate(sampled.finished_after.tolist()):

        def noise(step: int, leaf: int = leaf) -> Tensor:
            later = 2 ** sum(split > step for split in splits)  # leaves below each node that the step produces
            return node_noise(step, range(trees * 4 // later))[leaf // later].unsqueeze(0)

        tree = leaf // 4
        plain = rollout(
            network.velocity_of(torch.tensor([tree // 2])), start[tree : tree + 1], network.schedule,
            kernel_of(network.schedule, "dance_sde"), noise, stochastic=stochastic,
        )  # fmt: skip
        path, row = [], end
        while row >= 0:
            path.append(row)
            row = int(sampled.parent[row])
        rows = torch.tensor(path[::-1])
        assert sampled.step[rows].tolist() == list(stochastic)
        assert torch.equal(sampled.log_prob[rows], plain.log_prob[0])
        for row, step in zip(rows.tolist(), stochastic, strict=True):
            assert torch.equal(sampled.states[sampled.source[row]], plain.states[0, plain.kept.index(step)])
            assert torch.equal(sampled.states[sampled.produced[row]], plain.states[0, plain.kept.index(step + 1)])
            assert int(sampled.sample[row]) == (leaf if step >= 3 else -1)
            assert int(sampled.group[row]) == int(sampled.finished_group[leaf]) == 10 + tree // 2
        assert torch.equal(sampled.finished[leaf], plain.final[0])


def test_thinned_schedule_of_the_worked_example() -> None:
    assert thinned_steps(6, 1, 1) == (2, 3, 4, 5)
    assert thinned_steps(6, 1, 2) == (2, 3)
    assert thinned_steps(6, 4, 2) == (5,)
    assert thinned_steps(6, 5, 2) == ()
    assert [sum(len(thinned_steps(16, k, stride)) for k in range(8)) for stride in (1, 2)] == [92, 48]
    network = Network(schedule_of(6))
    sampled = branches_of(network, 2, 3, (1,), strides=(1, 2, 4), batch_size=100)
    assert network.calls == [(0, 2), (1, 2), (2, 6), (3, 6), (4, 6), (5, 6)]
    # Stride 2 jumps from state 3 to the clean estimate there, stride 4 already from state 2.
    sigma, timestep = network.schedule.sigma, network.schedule.timestep
    x = sampled.states[sampled.produced]
    velocity = network.velocity_of(torch.zeros(6))
    early = x - sigma[2] * velocity(x, sigma[2], timestep[2])
    x = x - (sigma[2] - sigma[3]) * velocity(x, sigma[2], timestep[2])
    late = x - sigma[3] * velocity(x, sigma[3], timestep[3])
    torch.testing.assert_close(sampled.finished[1::3], late, rtol=0, atol=1e-5)
    torch.testing.assert_close(sampled.finished[2::3], early, rtol=0, atol=1e-5)
    assert sampled.finished_after.tolist() == [row for row in range(6) for _ in range(3)]


def test_tempflow_costs_what_the_arithmetic_says() -> None:
    """4 start noises, 6 branches at each of 9 steps: 4 (9 + 45 * 6) = 1116 evaluations and 216 images a prompt."""
    network = Network(schedule_of(10))
    sampled = branches_of(network, 4, 6, tuple(range(9)), batch_size=100)
    assert network.rows == 1116
    assert len(sampled) == len(sampled.finished) == 216
    assert len(sampled.source.unique()) == 36


def test_g2rpo_costs_what_the_arithmetic_says() -> None:
    """8 anchor steps, 12 branches a step; 92 and 48 completion steps a branch index; two shared by both strides."""

    def cost(*strides: int) -> int:
        network = Network(schedule_of(16))
        sampled = branches_of(network, 1, 12, tuple(range(8)), strides=strides, batch_size=100)
        assert len(sampled) == 96
        assert len(sampled.finished) == 96 * len(strides)
        assert len(sampled.source.unique()) == 8
        return network.rows

    assert (cost(1), cost(2), cost(1, 2)) == (8 + 12 * 92, 8 + 12 * 48, 8 + 12 * 140 - 96 * 2)


@pytest.mark.parametrize(
    ("num_steps", "splits", "children", "stochastic", "evaluations", "rows", "sources", "leaves"),
    [
        pytest.param(20, (0, 3, 6, 9), 2, range(20), 203, 218, 203, 16, id="branch_grpo"),
        pytest.param(10, (0, 1, 2), 3, range(3), 202, 39, 13, 27, id="tree_grpo"),
        pytest.param(10, (4,), 9, range(4, 6), 4 + 1 + 9 * 5, 18, 10, 9, id="flow_grpo_fast_branch_form"),
    ],
)
def test_trees_cost_what_the_arithmetic_says(
    num_steps: int, splits: tuple[int, ...], children: int, stochastic: range, evaluations: int, rows: int,
    sources: int, leaves: int,
) -> None:  # fmt: skip
    network = Network(schedule_of(num_steps))
    sampled = trees_of(network, 1, splits=splits, children=children, stochastic=stochastic)
    counted = (network.rows, len(sampled), len(sampled.source.unique()), len(sampled.finished))
    assert counted == (evaluations, rows, sources, leaves)


def test_refuses_what_cannot_be_branched() -> None:
    network = Network(schedule_of(4))
    for bad in ((), (4,), (-1,), (1, 1)):
        with pytest.raises(ValueError, match=r"steps must be distinct.* 0 \.\. 3"):
            branches_of(network, 2, 2, bad)
    with pytest.raises(ValueError, match="at least 1"):
        branches_of(network, 2, 0, (1,))
    for strides in ((), (0,), (2, 2)):
        with pytest.raises(ValueError, match="strides distinct"):
            branches_of(network, 2, 2, (1,), strides=strides)
    with pytest.raises(ValueError, match="batch_size"):
        branches_of(network, 2, 2, (1,), batch_size=0)
    index, x = torch.zeros(2, dtype=torch.long), torch.zeros(2, *LATENT)
    run = partial(
        sample_branches, network.velocity_of, x, schedule=network.schedule, steps=(3,), branches=2, batch_size=2
    )
    with pytest.raises(ValueError, match=r"prompt_a \(1,\)"):
        run(index[:1], index, kernel=KERNELS["cps"], noise=lambda step, nodes: x)
    with pytest.raises(ValueError, match=r"noise\(3, range\(0, 4\)\)"):
        run(index, index, kernel=KERNELS["cps"], noise=lambda step, nodes: x)
    with pytest.raises(ValueError, match="std 0"):
        run(index, index, kernel=KERNELS["cps"], noise=lambda step, nodes: torch.zeros(4, *LATENT))


# ---- credit ----------------------------------------------------------------------------------------------------------


def standardised(raw: Tensor, norm: Tensor, ddof: int, eps: float) -> np.ndarray:
    """Each channel relative to its normalisation set."""
    values, sets = raw.double().numpy().copy(), norm.numpy()
    for number in np.unique(sets):
        own = values[:, sets == number]
        values[:, sets == number] = (own - own.mean(1, keepdims=True)) / (own.std(1, ddof=ddof, keepdims=True) + eps)
    return values


def rewards(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_g2rpo_of_the_worked_example() -> None:
    sampled = branches_of(Network(schedule_of(6)), 1, 3, (1,), strides=(1, 2))
    first, second = rewards(0.2, 0.5, 0.8), rewards(0.1, 0.1, 0.4)
    credit = G2rpo()(sampled, torch.stack([first, second], 1).reshape(1, 6))
    assert torch.equal(credit.raw, torch.stack([first, second]))
    z = standardised(credit.raw, credit.norm, 1, 0)
    np.testing.assert_allclose(z, [[-1.0, 0.0, 1.0], [-0.577350, -0.577350, 1.154701]], atol=5e-7)
    np.testing.assert_allclose(z.sum(0), [-1.577350, -0.577350, 2.154701], atol=5e-7)
    np.testing.assert_allclose(z.sum(0).clip(-2, 2)[2], 2)
    assert credit.weight is credit.scale is credit.offset is credit.keep is None


def test_g2rpo_channels_stand_reward_by_reward_and_sets_are_prompt_and_step() -> None:
    sampled = branches_of(Network(schedule_of(6)), 4, 2, (0, 2), strides=(1, 2, 3))
    reward_KF = torch.arange(2 * 16 * 3).double().reshape(2, 48)
    reward_KF[1, 7] = torch.nan  # row 2, stride index 1
    credit = G2rpo()(sampled, reward_KF)
    assert credit.raw.shape == (6, 16)
    for k in range(2):
        for stride in range(3):
            torch.testing.assert_close(credit.raw[3 * k + stride], reward_KF[k, stride::3], equal_nan=True)
    assert torch.nonzero(credit.raw.isnan()).tolist() == [[4, 2]]
    sets: dict[int, set[tuple[int, int]]] = {}
    for number, group, step in zip(credit.norm.tolist(), sampled.group.tolist(), sampled.step.tolist(), strict=True):
        sets.setdefault(number, set()).add((group, step))
    assert sorted(map(tuple, sets.values())) == [((g, s),) for g in (10, 11) for s in (0, 2)]


def test_tempflow_of_the_worked_example() -> None:
    sigma = [0.9, 0.5, 0.1, 0.0]
    step_std = torch.stack(
        [KERNELS["flow_sde"](torch.zeros(1, 1), torch.zeros(1, 1), s, n, 0.7).std for s, n in pairwise(sigma)]
    ).double()
    np.testing.assert_allclose(step_std, [1.328157, 0.442719, 0.073786], atol=1e-6)
    network = Network(Schedule(sigma=torch.tensor(sigma), timestep=1000 * torch.tensor(sigma[:-1])))
    sampled = branches_of(network, 2, 2, (0, 1, 2))
    credit = TempFlow()(sampled, torch.zeros(1, 12), Context(step_std=step_std))
    assert credit.weight is not None
    np.testing.assert_allclose(credit.weight[::4], [2.16, 0.72, 0.12], atol=1e-6)
    assert float(credit.weight.mean()) == pytest.approx(1, abs=1e-6)

    sampled = branches_of(network, 2, 2, (0, 1))  # rows: step, seed, branch
    reward = rewards(0.6, 0.4, 0.9, 0.7, 0.5, 0.7, 0.3, 0.3)[None]
    z = standardised((seeds := TempFlow(noise_weights=False)(sampled, reward)).raw, seeds.norm, 0, 1e-4)
    one = 0.999001
    np.testing.assert_allclose(z[0], [one, -one, one, -one, -one, one, 0, 0], atol=5e-7)
    prompts = TempFlow(seed_groups=False, noise_weights=False)(sampled, reward)
    z = standardised(prompts.raw, prompts.norm, 0, 1e-4)
    prompt_z = [-0.277196, -1.385982, 1.385982, 0.277196, 0.301330, 1.506648, -0.903989, -0.903989]
    np.testing.assert_allclose(z[0], prompt_z, atol=5e-7)
    assert seeds.weight is None


def test_the_released_tempflow_constant_is_the_mean_of_the_stds() -> None:
    """SD3.5, T 10, a 0.7, diffusers' default grid: the release multiplies the std by 2.25."""
    schedule = build_schedule({"shift": 3.0}, 10)
    kernel, zero = kernel_of(schedule), torch.zeros(1, 1)
    step_std = torch.stack([kernel(zero, zero, schedule.sigma[j], schedule.sigma[j + 1]).std for j in range(10)])
    sampled = branches_of(Network(schedule), 1, 2, tuple(range(9)))
    credit = TempFlow()(sampled, torch.zeros(1, 18), Context(step_std=step_std))
    assert credit.weight is not None
    np.testing.assert_allclose(credit.weight / step_std[sampled.step], 2.252, atol=5e-4)


def test_tempflow_sets_are_start_noise_and_step() -> None:
    sampled = branches_of(Network(schedule_of(6)), 4, 2, (0, 2))
    credit = TempFlow(noise_weights=False)(sampled, torch.zeros(1, 16))
    assert len(credit.norm.unique()) == 8
    assert torch.equal(credit.norm[0::2], credit.norm[1::2])
    assert len(TempFlow(noise_weights=False, seed_groups=False)(sampled, torch.zeros(1, 16)).norm.unique()) == 4


def test_finished_anchors_are_the_images_of_the_ode_and_change_nothing_else() -> None:
    network, steps = Network(schedule_of(6)), (1, 3)
    plain, before = branches_of(network, 4, 2, steps, keep_means=True), network.rows
    sampled = branches_of(network, 4, 2, steps, keep_means=True, finish_anchors=True)
    assert network.rows - 2 * before == 4 * (6 - 1 - 3)
    velocity = network.velocity_of(torch.arange(4) // 2)
    start = counter_normal((4, *LATENT), "start")
    ode = rollout(velocity, start, network.schedule, KERNELS["ode"], lambda step: start, stochastic=())
    torch.testing.assert_close(sampled.finished[:4], ode.final)
    assert sampled.finished_after[:4].tolist() == [-1] * 4
    assert torch.equal(sampled.finished_group[:4], torch.arange(4) // 2 + 10)
    assert not sampled.ends[:4].any()
    assert sampled.ends[4:].all()
    for name in ("finished", "finished_group", "finished_after"):
        assert torch.equal(getattr(sampled, name)[4:], getattr(plain, name))
    assert torch.equal(sampled.states, plain.states)


def self_opd(*reward: float, moved: object = ((1, 0), (0, 1), (-1, 0)), anchors: int = 1) -> Tensor:
    """Advantages of branches of one step, from the rewards of the anchors' own images and then of the branches."""
    shift, count = torch.tensor(moved, dtype=torch.float32), len(reward) - anchors
    sources, row = counter_normal((anchors, 2), "sources"), torch.arange(count)
    mean, width = counter_normal((anchors, 2), "means").repeat_interleave(count // anchors, 0), count // anchors
    sampled = Sampled(
        states=torch.cat([sources, mean + shift]),
        source=row // width,
        produced=anchors + row,
        step=torch.zeros_like(row),
        sample=row,
        group=torch.zeros_like(row),
        parent=torch.full_like(row, -1),
        log_prob=torch.zeros(count),
        mean=mean,
        finished=torch.zeros(anchors + count, 2),
        finished_group=torch.zeros(anchors + count, dtype=torch.long),
        finished_after=torch.cat([torch.full((anchors,), -1), row]),
    )
    credit = SelfOpd()(sampled, rewards(*reward)[None])
    assert credit.offset is not None
    assert credit.weight is credit.scale is credit.keep is None
    assert torch.equal(credit.raw[0].isnan(), credit.offset.isnan())
    assert not credit.raw.nan_to_num().any()
    return credit.offset


def test_self_opd_gives_the_worked_weights() -> None:
    np.testing.assert_allclose(self_opd(0.45, 0.5, 0.7, 0.2), [0.19868, 0.99340, -0.49670], atol=5e-6)
    # A bad branch that points the way of the best one counts nothing, one that points away counts whole.
    ahead = self_opd(0.45, 0.5, 0.7, 0.2, moved=((1, 0), (0, 1), (0, 3)))
    np.testing.assert_allclose(ahead, [0.19868, 0.99340, 0], atol=5e-6)
    back = self_opd(0.45, 0.5, 0.7, 0.2, moved=((1, 0), (0, 1), (0, -3)))
    np.testing.assert_allclose(back, [0.19868, 0.99340, -0.99340], atol=5e-6)
    # Weights are at most 1, and the ODE's image may be the best.
    np.testing.assert_allclose(self_opd(0.1, 0.5, 0.7, 0.2), [1, 1, 0.39736], atol=5e-6)
    np.testing.assert_allclose(self_opd(0.8, 0.5, 0.7, 0.2), [-0.59604, 0, -1], atol=5e-6)
    # The std of equal rewards is taken as 1e-4.
    np.testing.assert_allclose(self_opd(0.5, 0.50004, 0.50004, 0.50004), [0.4] * 3, atol=1e-6)


def test_self_opd_compares_each_anchor_with_its_own_image_and_leaves_out_what_has_no_reward() -> None:
    moved, nan = (*((1, 0), (0, 1), (-1, 0)),) * 2, float("nan")
    two = self_opd(0.45, 0.8, 0.5, 0.7, 0.2, 0.5, 0.7, 0.2, moved=moved, anchors=2)
    alone = [self_opd(ode, 0.5, 0.7, 0.2) for ode in (0.45, 0.8)]
    torch.testing.assert_close(two, torch.cat(alone))
    for bad in ((nan, 0.8, 0.5, 0.7, 0.2), (0.45, 0.8, 0.5, nan, 0.2)):
        found = self_opd(*bad, 0.5, 0.7, 0.2, moved=moved, anchors=2)
        assert found[:3].isnan().all()
        torch.testing.assert_close(found[3:], alone[1])


def test_the_loss_of_self_opd_has_the_gradient_of_reinforce() -> None:
    """`mean_k w_k mean (mu - x_k)^2 / (2 std^2)`, by the mean over the latent's elements, at a policy that drew."""
    mean, std, weight = counter_normal((1, 5), "mu").double(), 0.3, torch.tensor([0.2, 1.0, -0.5]).double()
    x = mean + std * counter_normal((3, 5), "branches").double()
    mu = mean.expand(3, 5).clone().requires_grad_()
    released = (weight * (mu - x).square().mean(1) / (2 * std**2)).mean()
    (wanted,) = torch.autograd.grad(released, mu)
    log_prob = gaussian_log_prob(x, Transition(mu, torch.tensor(std).double()))
    ones = torch.ones(3).double()
    scored = Scored(
        log_ratio=(log_prob - log_prob.detach()) / 5,
        advantage=weight,
        clip_low=ones,
        clip_high=ones,
        old_mean=None,
        new=Transition(mu, torch.tensor(std).double()),
        produced=x,
        step_size=0.1,
        sensitivity=0.5,
    )
    (found,) = torch.autograd.grad(Reinforce()(scored).mean(), mu)
    torch.testing.assert_close(found, wanted)


def test_credit_of_branches_refuses_other_tables() -> None:
    network = Network(schedule_of(6))
    sampled = branches_of(network, 2, 2, (0, 1), strides=(1, 2))
    with pytest.raises(ValueError, match=r"\[K, 16\]"):
        G2rpo()(sampled, torch.zeros(1, 8))
    given: tuple[tuple[Sampled, int], ...]
    given = (
        (branches_of(network, 2, 2, (0, 1), keep_means=True), 8),
        (branches_of(network, 2, 2, (0, 1), finish_anchors=True), 10),
        (branches_of(network, 2, 1, (0, 1), keep_means=True, finish_anchors=True), 6),
        (branches_of(network, 2, 2, (0, 1), strides=(1, 2), keep_means=True, finish_anchors=True), 18),
    )
    for table, count in given:
        with pytest.raises(ValueError, match="self_opd compares at least 2 branches"):
            SelfOpd()(table, torch.zeros(1, count))
    with pytest.raises(ValueError, match="2 strides"):
        TempFlow(noise_weights=False)(sampled, torch.zeros(1, 16))
    tree = trees_of(network, 1, splits=(0,), children=2, stochastic=(0, 1))
    with pytest.raises(ValueError, match="as sample_branches leaves them"):
        G2rpo()(tree, torch.zeros(1, 2))
    sampled = branches_of(network, 2, 2, (0, 1))
    for bad in (None, torch.ones(1), torch.ones(6, 1)):
        with pytest.raises(ValueError, match=r"step_std \[T\]"):
            TempFlow()(sampled, torch.zeros(1, 8), Context(step_std=bad))
    with pytest.raises(ValueError, match="positive"):
        TempFlow()(sampled, torch.zeros(1, 8), Context(step_std=torch.tensor([1.0, 0.0, 1.0])))
