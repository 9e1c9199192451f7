"""Best of N with any reward, and candidates pruned by the reward of the predicted clean image.

Search works in the same way for a base model, a tuned one and RLG. Cost is network evaluations per kept image:
`Pruning.evaluations` times the rows of a velocity per step (2 with classifier-free guidance, 4 with RLG on top).

Letters: P prompts, N candidates each.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flowrl.generation.drawing import Make, draw
from flowrl.pipelines import Pipeline
from flowrl.prompts.loading import Prompt
from flowrl.rewards import Reward
from flowrl.rewards.base.outputs import check_output
from flowrl.runtime.shapes import Float, Int64
from flowrl.samplers.search import Pruning, best, search
from flowrl.training.prompting import reward_inputs
from flowrl.trajectory import Schedule


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class KeptImages:
    """The images a search kept."""

    images: Float[Tensor, " p 3 h w"]
    """float32 [P, 3, H, W] on the host."""
    chosen: Int64[Tensor, " p"]
    """[P] numbers of the kept candidates."""
    scores: Float[Tensor, " c p n"]
    """[C+1, P, N] float64, scores at each cut and at the end; NaN for candidates that failed or were not scored."""
    evaluations: int
    """Candidates times steps per kept image."""
    looks: int
    """Images decoded and scored per kept image."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Candidates:
    """All images of best of N, and their scores: float32 [P, N, 3, H, W] and float64 [P, N], on the host."""

    images: Float[Tensor, " p n 3 h w"]
    scores: Float[Tensor, " p n"]

    def best(self, count: int) -> Int64[Tensor, " p"]:
        """The best of the first `count` candidates of each prompt: the first of equal ones, never a failed one."""
        return best(self.scores[:, :count])


def candidates(
    pipeline: Pipeline, make: Make, prompts: Sequence[Prompt], x: Float[Tensor, " p n *latent"], schedule: Schedule,
    reward: Reward, *, part: str | None = None,
) -> Candidates:  # fmt: skip
    """Draws and scores N images of each prompt.

    Args:
        make: the velocity to draw with.
        prompts: P prompts with their negative ones and images, and what the reward reads.
        schedule: of the deterministic sampler.
        reward: any of `flowrl.rewards`; those that compare get the candidates of a prompt as a group.
        part: a sub-score of the reward by which to choose, instead of its value.

    Raises ValueError: x does not fit the prompts, or the reward has no such part.
    """
    count = _check(prompts, x)
    rows = torch.arange(x[:, :, 0].shape[:2].numel())
    images = draw(pipeline, make, [prompts[row // count] for row in rows], x.flatten(0, 1), schedule)
    scores = _score(pipeline, reward, part, prompts, images, rows, count)
    return Candidates(images=images.unflatten(0, (len(prompts), count)), scores=scores.reshape(len(prompts), count))


@torch.no_grad()
def prune_steps(
    pipeline: Pipeline, make: Make, prompts: Sequence[Prompt], x: Float[Tensor, " p n *latent"], schedule: Schedule,
    reward: Reward, plan: Pruning, *, part: str | None = None,
) -> KeptImages:  # fmt: skip
    """Keeps the best candidate after dropping some by the clean image's reward at the plan's cuts; best of N without
    cuts. Arguments as `candidates`. A failed score never wins; the first of equal ones, or of all failed ones, does."""
    count = _check(prompts, x)

    def score(clean: Tensor, rows: Tensor) -> Tensor:
        return _score(pipeline, reward, part, prompts, pipeline.decode(clean).cpu(), rows, count)

    found = search(lambda rows: make([prompts[row // count] for row in rows]), x, schedule, plan, score)
    return KeptImages(
        images=pipeline.decode(found.final).cpu(),
        chosen=found.chosen,
        scores=found.scores,
        evaluations=plan.evaluations(schedule.num_steps),
        looks=plan.looks,
    )


def _check(prompts: Sequence[Prompt], x: Tensor) -> int:
    if x.ndim < 3 or len(x) != len(prompts) or not prompts:
        raise ValueError(f"start noise [P, N, *latent] of {len(prompts)} prompts is needed, got {list(x.shape)}")
    return x.shape[1]


def _score(
    pipeline: Pipeline,
    reward: Reward,
    part: str | None,
    prompts: Sequence[Prompt],
    images: Tensor,
    rows: Tensor,
    count: int,
) -> Tensor:
    """Scores [b] of candidates by their numbers; NaN if the reward failed."""
    inputs = reward_inputs(
        pipeline,
        [prompts[row // count] for row in rows],
        images.float(),
        group=rows // count,
        numbers=(rows % count).tolist(),
        iteration=0,
    )
    output = check_output(reward(inputs), len(inputs), reward.name)
    if part is not None and part not in output.parts:
        known = ", ".join(sorted(output.parts)) or "none"
        raise ValueError(f"reward {reward.name!r} has no sub-score {part!r}: there are {known}")
    values = output.values if part is None else output.parts[part]
    return torch.where(output.valid, values, math.nan).double().cpu()
