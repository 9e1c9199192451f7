"""Trees of denoising: nodes that split into several stochastic children (BranchGRPO, TreeGRPO, Flow-GRPO-Fast).

| method | splits | children | stochastic |
|---|---|---|---|
| BranchGRPO, T = 20 | 0, 3, 6, 9 | 2 | every step |
| TreeGRPO, T = 10 | three steps from `window_start` on | 3 | the splits |
| Flow-GRPO-Fast, branch form | one step j | branches | j .. j + w - 1 |
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor

from flowrl.runtime.placement import host_rows, put, settle
from flowrl.runtime.randomness import counter_integers
from flowrl.runtime.shapes import Float, Int
from flowrl.samplers import branching
from flowrl.samplers.kernels import Kernel
from flowrl.samplers.step import Moved, check_steps, euler
from flowrl.trajectory import Sampled, Schedule, start_state


def sample_tree(
    velocity_of: branching.VelocityOf,
    x: Float[Tensor, " a *latent"],
    prompt_a: Int[Tensor, " a"],
    group_a: Int[Tensor, " a"],
    schedule: Schedule,
    kernel: Kernel,
    noise: branching.NodeNoise,
    *,
    splits: Sequence[int],
    children: int,
    stochastic: Sequence[int],
    batch_size: int,
    keep_means: bool = False,
    device: torch.device | None = None,
) -> Sampled:
    """Grow a tree from each start noise: splits give every node several stochastic children, other steps one.

    BranchGRPO (arXiv 2509.06040), TreeGRPO (OpenReview 3rZdp4TmUb), and the branch form of Flow-GRPO-Fast, an ODE
    prefix that splits once. Nodes of a level are numbered tree by tree, siblings next to each other, and are evaluated
    once, however many children they get. `children ** len(splits)` leaves per tree.

    Other arguments, precision and the replay rule are as in `branching.sample_branches`, with trees for anchors. Wrap
    the call in `torch.no_grad()`.

    Args:
        noise: `noise(step, nodes) -> [len(nodes), *latent]` standard normal for these of the n nodes that a stochastic
            step produces; node i belongs to tree `i // (n / a)`. Name each number by step, tree and place in the tree,
            so that it does not depend on the other trees.
        splits: Steps at which nodes split; at least one.
        children: Number of children of each node that splits; at least 2.
        stochastic: Stochastic steps, splits included; the others are ODE steps and leave no transition.

    Returns transitions ordered (step, node), and the states they join ordered (level, node). `parent` skips ODE steps;
    From the last split on, `sample` is the one leaf whose path contains the transition; before it is -1.

    Raises:
        ValueError: a step is out of range, given twice or deterministic; a split is not stochastic; a shape is wrong.
    """
    branching.check_start(x, prompt_a, group_a, batch_size)
    steps = check_steps(stochastic, schedule.num_steps, "stochastic steps")
    splits = _check_splits(check_steps(splits, schedule.num_steps, "splits"), steps, children)
    x, device = start_state(x, schedule), device or x.device
    prompt, group, incoming = prompt_a, group_a, torch.full((len(x),), -1)  # last transition on the way to each node
    sizes, begins = _levels(len(x), steps, splits, children, schedule.num_steps)
    states = host_rows(x, sum(sizes[level] for level in begins), device)
    mean = host_rows(x, sum(sizes[step + 1] for step in steps), device) if keep_means else None
    columns, log_probs, count = list[dict[str, Tensor]](), list[Tensor](), 0  # transitions so far
    loose: Tensor | None = None  # a level that is not kept; the next level replaces it
    if 0 in begins:
        put(states, 0, x)
    for step in range(schedule.num_steps):
        width, size = children ** (step in splits), sizes[step + 1]
        if step + 1 in begins:
            following, loose = states[begins[step + 1] : begins[step + 1] + size], None
        else:
            following = loose = host_rows(x, size, device) if loose is None else loose
        chunks = branching.chunked_velocities(velocity_of, x, prompt, schedule, step, batch_size, device)
        if step in steps:
            draw = partial(branching.draw_successors, kernel, schedule=schedule, step=step, noise=noise, width=width)
            log_probs += _drawn(draw, chunks, width, following, mean, count)
        else:
            for start, own, velocity in chunks:
                put(following, start, euler(own, velocity, schedule.sigma[step], schedule.sigma[step + 1]))
                del own, velocity  # the next chunk's network needs the room
        x = following
        prompt, group, incoming = (column.repeat_interleave(width) for column in (prompt, group, incoming))
        if step in steps:
            node = torch.arange(size)
            columns.append(
                {
                    "source": begins[step] + node // width,
                    "produced": begins[step + 1] + node,
                    "step": torch.full_like(node, step),
                    "sample": torch.where(torch.tensor(step >= splits[-1]), node, -1),
                    "group": group,
                    "parent": incoming,
                }
            )
            incoming, count = count + node, count + size
    settle(device)
    return Sampled(
        **{name: torch.cat([part[name] for part in columns]) for name in columns[0]},
        states=states,
        log_prob=torch.cat(log_probs),
        mean=mean,
        finished=x,
        finished_group=group,
        finished_after=incoming,
    )


def _levels(
    trees: int, steps: Sequence[int], splits: Sequence[int], children: int, num_steps: int
) -> tuple[list[int], dict[int, int]]:
    """Number of nodes of each level, and the place in the pool where each kept level begins."""
    sizes = [trees * children ** sum(split < level for split in splits) for level in range(num_steps + 1)]
    kept = sorted({level for step in steps for level in (step, step + 1)})
    return sizes, dict(zip(kept, accumulate((sizes[level] for level in kept), initial=0), strict=False))


def _drawn(
    draw: Callable[[Tensor, int, Tensor], Moved],
    chunks: Iterable[tuple[int, Tensor, Tensor]],
    width: int,
    following: Tensor,
    mean: Tensor | None,
    before: int,
) -> Iterator[Tensor]:
    """Puts the successors of a level's nodes into their places, their means behind those of `before` transitions, and
    gives the log-densities of each chunk."""
    for start, own, velocity in chunks:
        moved = draw(own, start, velocity)
        put(following, start * width, moved.x_next)
        if mean is not None:
            put(mean, before + start * width, moved.mean)
        yield moved.log_prob
        del own, velocity, moved  # the next chunk's network needs the room


def _check_splits(splits: tuple[int, ...], steps: Sequence[int], children: int) -> tuple[int, ...]:
    if children < 2 or not set(splits) <= set(steps):
        raise ValueError(
            f"splits {list(splits)} must be among the stochastic steps {list(steps)}, with at least 2 children, got "
            f"{children}: children of one ODE step would all be the same"
        )
    return splits


def sibling_noise(
    own: branching.NodeNoise, shared: branching.NodeNoise, *, splits: Sequence[int], children: int, scale: float
) -> branching.NodeNoise:
    """Noise of a tree whose siblings share a part: at splits `(shared + scale own) / sqrt(1 + scale^2)`.

    BranchGRPO (arXiv 2509.06040), scale 4. Taken alone, every child is drawn from the kernel's transition, so recorded
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

    def noise(step: int, nodes: range) -> Tensor:
        if step not in splits:
            return own(step, nodes)
        common = shared(step, range(nodes.start // children, nodes.stop // children)).repeat_interleave(children, 0)
        return (common + scale * own(step, nodes)) / (1 + scale**2) ** 0.5

    return noise


def window_law(num_steps: int, size: int, ratio: float) -> tuple[float, ...]:
    """Probability of each window start, `Pr[i] ~ ratio^i` for i = 0 .. T - size - 1 (TreeGRPO), never holding the last
    step; ratio 1 is uniform. Raises ValueError: no step is left free, or not 0 < ratio <= 1."""
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
