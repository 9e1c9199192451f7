"""Makes a run end sooner by one rule: what costs least goes first.

| what goes | down to | what that gives up |
|---|---|---|
| evaluations | the first and the last | the curve between them |
| prompts of an evaluation | what a quarter of the time draws | the interval of before and after is wider |
| prompts of an iteration | 8, which flow_grpo takes on one GPU | each update is noisier |
| iterations | 36, those of the embedded run | less is learned |
| images of a prompt | 6, those of the embedded run | each image is compared with fewer |

Steps and size stay. A length must fit at the slow end of the pace, with a tenth in reserve for rewards, text encoders
and files, which no plan counts. The learning rate's schedule then ends with the run. If even that is too slow,
`budget.seconds` ends it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import attrgetter

from flowrl.config.train import TrainConfig
from flowrl.planning.gather import Plan
from flowrl.planning.hours import Hours, Speed, Work, changed, speed_of, work_of
from flowrl.planning.verdict import changes_for

SPANS = {"an evening": 10.0, "a weekend": 60.0, "a week": 168.0}
"""Usual waiting times, in hours."""
LEAST_PROMPTS, LEAST_ITERATIONS, LEAST_GROUP = 8, 36, 6
RESERVE = 0.1
"""Share of the time in reserve for uncounted work."""
EVALUATED = 0.25
"""Largest share of the time for evaluations in a shortened run."""
GIVES_UP = (
    f"First evaluations go, then prompts of an iteration, down to {LEAST_PROMPTS} (updates get noisier), then "
    f"iterations, to {LEAST_ITERATIONS} (less is learned), then the group, to {LEAST_GROUP} (comparisons get coarser). "
    "Size and steps stay."
)
SMALLER = (
    "Where nothing ends in time: a smaller size (pipeline.height, width, num_frames), fewer sampler.num_steps, more "
    "cards, or a smaller model."
)


Batch = tuple[int, int]
"""Prompts of an iteration, and images of each."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Length:
    """A run's length, and the time that it takes."""

    batch: Batch
    iterations: int
    evaluations: int
    """Number of evaluations before, during and after the run."""
    share: float
    """Share of an evaluation's prompts that is kept."""
    hours: Hours

    def __str__(self) -> str:
        return f"{self.batch[0]} x {self.batch[1]} x {self.iterations:,}"


def length_within(work: Work, speed: Speed, *, batch: Sequence[Batch], within: float) -> Length | None:
    """The longest run that ends within so many hours, by the rule of this file; None if none does. `work` is that of
    the run as it is; batches are tried in their order, the run's own first."""
    prompts, group = batch[0]
    each, evaluation = work.iteration / (prompts * group), work.evaluation
    second = speed.hours(1.0).most

    def length(size: Batch, iterations: int, evaluations: int, share: float) -> Length:
        flops = each * size[0] * size[1] * iterations + evaluation * evaluations * share
        return Length(batch=size, iterations=iterations, evaluations=evaluations, share=share, hours=speed.hours(flops))

    room = within * (1 - RESERVE) / second
    if work.total <= room:
        return length(batch[0], work.iterations, work.evaluations, 1.0)
    evaluations = min(work.evaluations, 2)
    share = min(1.0, EVALUATED * room / (evaluation * evaluations)) if evaluation * evaluations else 1.0
    left = room - evaluation * evaluations * share
    for size in batch:
        iterations = min(work.iterations, int(left / (each * size[0] * size[1]) + 1e-9))  # which rounding may miss
        whole = iterations == work.iterations
        # As many iterations as it has, as long as there are prompts to give up; then fewer, but not too few.
        enough = iterations >= min(LEAST_ITERATIONS, work.iterations)
        if whole or (enough and size[0] <= LEAST_PROMPTS):
            return length(size, iterations, evaluations, share)
    return None


def batches_of(config: TrainConfig, ranks: int) -> list[Batch]:
    """The run's own batch, then smaller ones that processes and updates divide, in whole groups: fewer prompts down to
    `LEAST_PROMPTS`, then fewer images of each."""
    prompts, group = config.prompts_per_step, config.group_size
    fewer = [(count, group) for count in range(prompts - 1, min(LEAST_PROMPTS, prompts) - 1, -1)]

    def allowed(size: Batch) -> bool:
        try:
            replace(config, prompts_per_step=size[0], group_size=size[1]).resolve_batch(ranks)
        except ValueError:
            return False
        return size[0] % ranks == 0

    found = [(prompts, group), *filter(allowed, fewer)]
    least = found[-1][0]
    coarser = [(least, count) for count in range(group - 1, min(LEAST_GROUP, group) - 1, -1)]
    return [*found, *filter(allowed, coarser)]


def length_settings(config: TrainConfig, found: Length, within: float, evaluated: int | None) -> tuple[str, ...]:
    """The settings, as `key=value`, that differ from a run's own and give it this length, and end it `within` hours
    whatever the pace. `evaluated` is the number of its held-out prompts; None if unknown."""
    settings = dict[str, int | float]()
    for key, count in zip(
        ("prompts_per_step", "group_size", "num_iterations"), (*found.batch, found.iterations), strict=True
    ):
        if count != getattr(config, key):
            settings[key] = count
    if "num_iterations" in settings:
        tenth = found.iterations * config.updates_per_rollout // 10
        settings["optim.warmup"] = min(config.optim.warmup, tenth)
        settings["checkpoint_every"] = min(config.checkpoint_every, max(1, found.iterations // 4))
    if config.budget.evals:
        settings["budget.evals"] = min(config.budget.evals, found.evaluations)
    elif config.eval_every and found.evaluations <= 2:
        settings["eval_every"] = found.iterations
    if found.share < 1 and evaluated:
        settings["eval.num_prompts"] = max(1, int(evaluated * found.share))
    settings["budget.seconds"] = min(config.budget.seconds or math.inf, within * 3600)
    return tuple(f"{key}={value:g}" for key, value in settings.items() if value != attrgetter(key)(config))


def settings_in_time(plan: Plan, card: int, hours: float | None) -> tuple[str, ...]:
    """Settings, as `key=value`, with which a run fits cards of so many GB and ends within so many hours (None leaves
    the length). Raises ValueError: it does not fit, nothing ends in time, or the model's dimensions are unknown."""
    overrides = changes_for(plan, card)
    if hours is None:
        return overrides
    config = changed(plan.config, overrides) if overrides else plan.config
    speed = speed_of(plan, card, max(plan.processes, config.parallel.shard * (config.parallel.replicate or 1)))
    work, batch = work_of(plan, config), batches_of(config, max(1, speed.cards // config.parallel.context))
    found = length_within(work, speed, batch=batch, within=hours)
    if found is None:
        (prompts, group), iterations = batch[-1], min(LEAST_ITERATIONS, work.iterations)
        height = 512 if plan.size is None else min(512, plan.size[0] // 2)
        size = "pipeline.num_frames=17" if plan.drawn == "clip" else f"pipeline.height={height}"
        least = speed.hours(work.iteration / config.num_images * prompts * group * iterations)
        raise ValueError(
            f"{plan.name} does not end within {hours:g} h on {speed}: {prompts} prompts x {group} {plan.drawn}s x "
            f"{iterations} iterations, the least that is planned, take {least}. Give more `hours`, a larger `card`, or "
            f"a smaller size, such as {size}"
        )
    images = plan.run.evaluation_images
    evaluated = None if images is None else images // config.eval.samples_per_prompt
    return (*overrides, *length_settings(config, found, hours, evaluated))
