"""Network evaluations of a run before it starts, as `flowrl.training.learner.NetworkCounter` counts them while it runs.

One evaluation is one row of a batch, so guidance in two passes counts twice. Rollouts, completions and images are
known exactly. Updates are the most there can be: a micro-batch is left out where no row of it is trained, because all
groups of it got equal rewards, an image failed, or a method chose others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from flowrl.config.train import Geometry, TrainConfig
from flowrl.credit import CREDIT, Method
from flowrl.credit.trees import BranchGrpo
from flowrl.objectives.gradient_paths import Path
from flowrl.recipes import backprop, preference_settings
from flowrl.recipes.forward_settings import objective_of, trained_scale
from flowrl.recipes.preference_settings import Offline, Steps
from flowrl.samplers.windows import flash_tail, thinned_steps
from flowrl.training.assignment import credit_options
from flowrl.training.budget import Budget
from flowrl.training.drift import KL_PROMPTS, KL_SIGMAS
from flowrl.training.paths import stochastic_steps, tree_steps

Passes = Callable[[float], int]
"""Network rows that a family's guidance takes per sample at a scale."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Counts:
    """Rows that the network evaluates, by what for; `backward` are rows walked back, `images` those decoded and scored.

    `update` includes what is scored again without gradient.
    """

    rollout: int = 0
    completion: int = 0
    update: int = 0
    reference: int = 0
    backward: int = 0
    images: int = 0

    def __add__(self, other: Counts) -> Counts:
        return Counts(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(Counts)})

    @property
    def forward(self) -> int:
        """Forward passes, with or without gradient."""
        return self.rollout + self.completion + self.update + self.reference

    @property
    def total(self) -> int:
        """What budgets count."""
        return self.forward + self.backward


@dataclass(frozen=True, kw_only=True, slots=True)
class RunCounts:
    """A whole run: iterations until its end or its budget's, their sum, and evaluations with the rows of one.

    `base_rows` come once: at the first evaluation, of the base that policies are compared with.
    """

    iterations: int
    total: Counts
    evaluations: int
    evaluation_rows: int | None
    evaluation_images: int | None
    base_rows: int | None


def of_iteration(config: TrainConfig, iteration: int, passes: Passes, geometry: Geometry) -> Counts:
    """One iteration over all processes; with `curriculum.max_rounds` above 1, one of its rounds.

    `geometry` is `config.resolve_batch` of the run's processes.
    """
    if config.recipe == "forward":
        return _forward(config, passes)
    if config.recipe == "preference":
        return _preference(config, iteration, passes)
    if config.recipe == "backprop":
        return _backprop(config, iteration, passes)
    return _grpo(config, iteration, passes, geometry)


def of_run(config: TrainConfig, passes: Passes, processes: int, num_eval_items: int | None) -> RunCounts:
    """All iterations, as far as the budget reaches (seconds are not foreseen), and the evaluations between them.

    `num_eval_items` are the images of an evaluation; None where that is not known.
    """
    geometry, total, done = config.resolve_batch(processes), Counts(), 0
    counters: dict[str, Any] = {"images": 0, "seconds": 0.0, "evals": 0, "evaluated": -1}
    budget = Budget(config.budget, counters, num_iterations=config.num_iterations, eval_every=config.eval_every)
    evaluations = int(budget.evaluates and config.eval.initial)
    for iteration in range(config.num_iterations):
        total = total + of_iteration(config, iteration, passes, geometry)
        done = iteration + 1
        counters |= {"nfe/all": total.total, "images": total.images}
        last = done == config.num_iterations or budget.spent() >= 1
        evaluations += budget.evaluation_due(done, last=last)
        if last:
            break
    rows, base = (None, None) if num_eval_items is None else _of_evaluation(config, num_eval_items, passes)
    return RunCounts(
        iterations=done, total=total, evaluations=evaluations, evaluation_rows=rows, evaluation_images=num_eval_items,
        base_rows=base,
    )  # fmt: skip


def _pruned_depths(config: TrainConfig, iteration: int) -> frozenset[int]:
    """Depths of trees that are not trained in an iteration."""
    credit = credit_options(config)
    return credit.pruned(iteration) if isinstance(credit, BranchGrpo) else frozenset()


def _of_evaluation(config: TrainConfig, num_items: int, passes: Passes) -> tuple[int, int]:
    """Rows of one evaluation, every image by the ODE and the policy where it is compared; rows of the base there."""
    settings, sampler = config.eval, config.sampler
    steps = settings.num_steps or sampler.num_steps
    scale = sampler.guidance_scale if settings.guidance_scale is None else settings.guidance_scale
    compared = {quarter * steps // KL_SIGMAS for quarter in range(KL_SIGMAS)}
    prompts = min(KL_PROMPTS, num_items // settings.samples_per_prompt)
    rows, base = num_items * steps + prompts * len(compared), prompts * (max(compared) + 1)
    return rows * passes(scale), base * passes(scale)


# ---- recipe grpo -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class _Paths:
    """What one way of sampling evaluates: rows of the rollout and of completions without guidance, images, and the
    latents that the transitions of each stochastic step start at."""

    rollout: int
    completion: int
    images: int
    sources: dict[int, int]


def _grpo(config: TrainConfig, iteration: int, passes: Passes, geometry: Geometry) -> Counts:
    sampler, method = config.sampler, CREDIT[config.credit.method]
    steps = stochastic_steps(sampler, config.seed, iteration)
    if not steps:  # sampler.published_window, at the end of a round
        return Counts()
    paths = _paths(config, method, iteration, steps)
    if iteration < sampler.calibration.iterations:  # noise levels are found before anything is trained
        rows = passes(sampler.guidance_scale)
        return Counts(rollout=paths.rollout * rows, completion=paths.completion * rows, images=paths.images)
    everything = sum(paths.sources.values())
    trained = _trained(config, iteration, paths.sources)
    updates, again = config.updates_per_rollout, 0
    if sampler.trained_fraction < 1 and sampler.trained_steps == "random":
        again = trained
    elif geometry.micro_batch_size != geometry.rollout_batch_size or (updates > 1 and not method.whole_paths):
        again = everything
    if config.ratio != "step":  # whole trajectories are scored before every update but the first
        again += everything * (updates - 1) // updates
    rows = passes(sampler.guidance_scale)
    replayed = 0 if config.keep_graphs else again + trained
    return Counts(
        rollout=paths.rollout * rows, completion=paths.completion * rows, update=replayed * rows,
        reference=trained * rows if config.kl_coef > 0 else 0, backward=trained * walked(config, passes),
        images=paths.images,
    )  # fmt: skip


def _trained(config: TrainConfig, iteration: int, sources: dict[int, int]) -> int:
    """Rows of the stochastic steps that are trained."""
    sampler, steps = config.sampler, sorted(sources)
    count = int(len(steps) * sampler.trained_fraction)
    if sampler.trained_fraction < 1 and sampler.trained_steps == "random":
        return config.num_images * count
    pruned = _pruned_depths(config, iteration)
    kept = [step for step in steps[: count if sampler.trained_fraction < 1 else None] if step + 1 not in pruned]
    return sum(sources[step] for step in kept)


def _paths(config: TrainConfig, method: Method, iteration: int, steps: tuple[int, ...]) -> _Paths:
    sampler, images = config.sampler, config.num_images
    num_steps = sampler.num_steps
    if sampler.flash_tail is not None:
        num_steps = flash_tail(num_steps, max(steps), sampler.flash_tail).num_steps
    if method.plan == "branches":
        return _branches(config, num_steps, steps)
    if method.plan == "tree":
        return _tree(config, iteration, num_steps, steps)
    completion = 0
    if method.values:
        mode = config.credit.completion or method.completion
        each = {"full": [num_steps - step - 1 for step in steps], "clean": [0 for _ in steps]}
        completion = images * sum(each[mode] if isinstance(mode, str) else [mode - 1 for _ in steps])
    return _Paths(
        rollout=images * num_steps, completion=completion, images=images * (1 + len(steps) * method.values),
        sources=dict.fromkeys(steps, images),
    )  # fmt: skip


def _branches(config: TrainConfig, num_steps: int, steps: tuple[int, ...]) -> _Paths:
    """Anchors run to their last branching; completions that coincide are evaluated once (`samplers.branching`)."""
    width = config.credit.branches or config.group_size
    anchors, strides = config.num_images // width, config.credit.strides
    completion = 0
    for branched in steps:
        evaluated = [thinned_steps(num_steps, branched, stride) for stride in strides]
        for step in range(branched + 1, num_steps):
            paths = sum(step in own for own in evaluated)
            completion += min(paths, 1) if step <= branched + 2 else paths
    return _Paths(
        rollout=anchors * (max(steps) + 1 + width * completion), completion=0,
        images=anchors * width * len(steps) * len(strides), sources=dict.fromkeys(steps, anchors),
    )  # fmt: skip


def _tree(config: TrainConfig, iteration: int, num_steps: int, steps: tuple[int, ...]) -> _Paths:
    """A node is evaluated once, however many children it gets."""
    splits, stochastic = tree_steps(config, num_steps, iteration, steps)
    nodes, rollout, sources = config.prompts_per_step, 0, {}
    for step in range(num_steps):
        rollout += nodes
        if step in stochastic:
            sources[step] = nodes
        nodes *= config.credit.children if step in splits else 1
    return _Paths(rollout=rollout, completion=0, images=nodes, sources=sources)


# ---- the other recipes -----------------------------------------------------------------------------------------------


def _forward(config: TrainConfig, passes: Passes) -> Counts:
    objective, sampler = objective_of(config), config.sampler
    options, method = objective.options, objective.method
    scale = sampler.guidance_scale if options.guidance_scale is None else options.guidance_scale
    reference = scale if options.reference_guidance_scale is None else options.reference_guidance_scale
    images = 1 if method.best_only else config.best_of or config.group_size
    trained = config.prompts_per_step * images * config.times.count
    others = passes(scale) if objective.keeps_old else 0
    others += passes(reference) if method.needs_reference or config.kl_coef > 0 else 0
    return Counts(
        rollout=config.num_images * sampler.num_steps * passes(sampler.guidance_scale),
        update=trained * passes(scale), backward=trained * walked(config, passes), reference=trained * others,
        images=config.num_images,
    )  # fmt: skip


def _preference(config: TrainConfig, iteration: int, passes: Passes) -> Counts:
    """Both images of a pair per prompt; groups whose rewards are all equal have none."""
    options = preference_settings.objective_of(config)
    draws, num_steps = config.times.count, config.sampler.num_steps
    if isinstance(options, Steps):
        steps = stochastic_steps(config.sampler, config.seed, iteration)
        draws = len(steps)
        if config.sampler.flash_tail is not None and steps:
            num_steps = flash_tail(num_steps, max(steps), config.sampler.flash_tail).num_steps
    drawn = 0 if isinstance(options, Offline) else config.num_images
    rows = passes(config.sampler.guidance_scale)
    compared = 2 * config.prompts_per_step * draws
    return Counts(
        rollout=drawn * num_steps * rows, update=compared * rows, backward=compared * walked(config, passes),
        reference=compared * rows, images=drawn,
    )  # fmt: skip


def _backprop(config: TrainConfig, iteration: int, passes: Passes) -> Counts:
    path = backprop_path(config, iteration)
    rows = config.num_images * passes(config.sampler.guidance_scale)
    return Counts(
        rollout=rows * (path.last_step + 1), images=config.num_images,
        backward=config.num_images * walked(config, passes) * len(path.train_steps),
    )  # fmt: skip


def backprop_path(config: TrainConfig, iteration: int) -> Path:
    """The path of an iteration of recipe backprop."""
    path_of, _ = backprop.objective_of(config)
    return path_of(config.sampler.num_steps, seed=config.seed, iteration=iteration)


def graph_rows(config: TrainConfig, passes: Passes) -> int:
    """Network rows whose activations an image that is trained holds at once.

    Recipes walk the graph of one call per row back before they build the next; backprop keeps those of all that are
    trained, and `keep_graphs` those of the whole rollout, for all its images. A negative half that is recomputed takes
    the place of a positive one that is freed.
    """
    rows = passes(trained_scale(config)) if config.sampler.train_negative is True else 1
    if config.keep_graphs:
        return rows * len(stochastic_steps(config.sampler, config.seed, 0))
    if config.recipe != "backprop":
        return rows
    return rows * max(len(backprop_path(config, i).train_steps) for i in range(config.num_iterations))


def walked(config: TrainConfig, passes: Passes) -> int:
    """Network rows of a trained velocity that the backward pass goes through."""
    return 1 if config.sampler.train_negative is False else passes(trained_scale(config))


def negative_again(config: TrainConfig, passes: Passes) -> float:
    """Forward passes that `sampler.train_negative: recompute` costs for a row of the backward pass."""
    return 0.5 if config.sampler.train_negative == "recompute" and passes(trained_scale(config)) == 2 else 0.0
