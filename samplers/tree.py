"""Trees of denoising: nodes that split into several stochastic children (BranchGRPO, TreeGRPO, Flow-GRPO-Fast).

| method | splits | children | stochastic |
|---|---|---|---|
| BranchGRPO, T = 20 | 0, 3, 6, 9 | 2 | every step |
| TreeGRPO, T = 10 | three steps from `window_start` on | 3 | the splits |
| Flow-GRPO-Fast, branch form | one step j | branches | j .. j + w - 1 |
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from flowrl.runtime.randomness import counter_integers
from flowrl.runtime.shapes import Float, Int
from flowrl.samplers.branching import (
    VelocityOf,
    check_noise,
    check_start,
    check_steps,
    chunked_velocities,
    draw_successors,
)
from flowrl.samplers.kernels import Kernel
from flowrl.samplers.step import Moved, euler
from flowrl.trajectory import Sampled, Schedule, start_state

NodeNoise = Callable[[int, int], Tensor]  # (step, nodes) -> [nodes, *latent]


def sample_tree(
    velocity_of: VelocityOf,
    x: Float[Tensor, " a *latent"],
    prompt_a: Int[Tensor, " a"],
    group_a: Int[Tensor, " a"],
    schedule: Schedule,
    kernel: Kernel,
    noise: NodeNoise,
    *,
    splits: Sequence[int],
    children: int,
    stochastic: Sequence[int],
    batch_size: int,
    keep_means: bool = False,
) -> Sampled:
    """Grow a tree from each start noise: splits give every node several stochastic children, other steps one.

    BranchGRPO (arXiv 2509.06040), TreeGRPO (OpenReview 3rZdp4TmUb), and the branch form of Flow-GRPO-Fast, an ODE
    prefix that splits once. Nodes of a level are numbered tree by tree, siblings next to each other, and are evaluated
    once, however many children they get. `children ** len(splits)` leaves per tree.

    Arguments and precision are those of `branching.sample_branches` where nothing else is said, with trees for anchors;
    so is the replay rule. Wrap the call in `torch.no_grad()`.

    Args:
        noise: `noise(step, nodes) -> [nodes, *latent]` standard normal for all nodes that a stochastic step produces;
            node i belongs to tree `i // (nodes / a)`. Name each number by step, tree and place in the tree, so that it
            does not depend on the other trees.
        splits: Steps at which nodes split; at least one.
        children: Of each node that splits; at least 2.
        stochastic: Stochastic steps, splits included; the others are ODE steps and leave no transition.

    Returns transitions ordered (step, node), and the states they join ordered (level, node). `parent` skips ODE steps;
    `sample` is the leaf whose path alone a transition belongs to, from the last split on, and -1 before.

    Raises:
        ValueError: a step is out of range, given twice or deterministic; a split is not stochastic; a shape is wrong.
    """
    check_start(x, prompt_a, group_a, batch_size)
    steps = check_steps(stochastic, schedule.num_steps, "stochastic steps")
    splits = _check_splits(check_steps(splits, schedule.num_steps, "splits"), steps, children)
    x, device = start_state(x, schedule), x.device
    prompt, group = prompt_a.to(device), group_a.to(device)
    incoming = torch.full((len(x),), -1, device=device)  # last transition on the way to each node
    pool, pooled, count = [], 0, 0  # kept levels; states in them; transitions so far
    columns: list[dict[str, Tensor]] = []
    drawn: list[Moved] = []
    for step in range(schedule.num_steps):
        width = children if step in splits else 1
        if step in steps:
            if step - 1 not in steps:  # otherwise this level has been kept as products
                pool.append(x)
                pooled += len(x)
            xi = check_noise(noise(step, len(x) * width), (len(x) * width, *x.shape[1:]), f"noise({step}, nodes)")
        following = []
        for part, velocity in chunked_velocities(velocity_of, x, prompt, schedule, step, batch_size):
            if step in steps:
                drawn.append(draw_successors(kernel, x, part, velocity, schedule, step, xi, width))
                following.append(drawn[-1].x_next)
            else:
                following.append(euler(x[part], velocity, schedule.sigma[step], schedule.sigma[step + 1]))
        level, x = len(x), torch.cat(following)
        prompt, group, incoming = (column.repeat_interleave(width) for column in (prompt, group, incoming))
        if step in steps:
            node = torch.arange(len(x), device=device)
            alone = step >= splits[-1]
            columns.append(
                {
                    "source": pooled - level + node // width,
                    "produced": pooled + node,
                    "step": torch.full_like(node, step),
                    "sample": node if alone else torch.full_like(node, -1),
                    "group": group,
                    "parent": incoming,
                }
            )
            incoming = count + node
            pool.append(x)
            pooled, count = pooled + len(x), count + len(x)
    _, log_prob, mean = (torch.cat(parts) for parts in zip(*drawn, strict=True))
    return Sampled(
        **{name: torch.cat([part[name] for part in columns]) for name in columns[0]},
        states=torch.cat(pool),
        log_prob=log_prob,
        mean=mean if keep_means else None,
        finished=x,
        finished_group=group,
        finished_after=incoming,
    )


def _check_splits(splits: tuple[int, ...], steps: Sequence[int], children: int) -> tuple[int, ...]:
    if children < 2 or not set(splits) <= set(steps):
        raise ValueError(
            f"splits {list(splits)} must be among the stochastic steps {list(steps)}, with at least 2 children, got "
            f"{children}: children of one ODE step would all be the same"
        )
    return splits


def sibling_noise(
    own: NodeNoise, shared: NodeNoise, *, splits: Sequence[int], children: int, scale: float
) -> NodeNoise:
    """Noise of a tree whose siblings share a part: at splits `(shared + scale own) / sqrt(1 + scale^2)`.

    BranchGRPO (arXiv 2509.06040), scale 4. Every child alone is drawn from the transition the kernel says, so recorded
    log-densities hold; siblings are correlated by `1 / (1 + scale^2)`. The released code scales independent draws by 4
    instead and records the density of scale 1.

    Args:
        own: Noise of the nodes produced, see `sample_tree`.
        shared: Noise of the nodes that split, from counters of its own.
        splits, children: As in `sample_tree`.
        scale: Not negative; 0 makes siblings equal.
    """
    if not scale >= 0:
        raise ValueError(f"scale is the size of a sibling's own noise and must not be negative, got {scale}")

    def noise(step: int, nodes: int) -> Tensor:
        if step not in splits:
            return own(step, nodes)
        common = shared(step, nodes // children).repeat_interleave(children, 0)
        return (common + scale * own(step, nodes)) / (1 + scale**2) ** 0.5

    return noise


def window_law(num_steps: int, size: int, ratio: float) -> tuple[float, ...]:
    """Probability of each window start, `Pr[i] ~ ratio^i` for i = 0 .. T - size - 1 (TreeGRPO).

    A geometric law cut off where the window would hold the last step; ratio 1 is uniform. Raises ValueError: the window
    does not leave the last step free, or not 0 < ratio <= 1.
    """
    if not 1 <= size < num_steps or not 0 < ratio <= 1:
        raise ValueError(
            f"a window holds 1 .. T - 1 steps and 0 < ratio <= 1, got {size} of {num_steps} steps and ratio {ratio}"
        )
    weights = [ratio**start for start in range(num_steps - size)]
    return tuple(weight / sum(weights) for weight in weights)


def window_start(num_steps: int, size: int, ratio: float, seed: int, iteration: int) -> int:
    """First split of an iteration's tree, drawn from `window_law` by the counters (seed, iteration)."""
    u = counter_integers(0, 2**53, seed, "tree_window", iteration) / 2**53
    law, total = window_law(num_steps, size, ratio), 0.0
    for start, probability in enumerate(law):
        total += probability
        if u < total:
            return start
    return len(law) - 1  # the sum of the law fell short of 1 by rounding
