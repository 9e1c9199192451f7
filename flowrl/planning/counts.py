"""Computes a run's network evaluations in advance, as `flowrl.training.learner.NetworkCounter` counts them in training.

Each recipe states the counts of an iteration (`flowrl.recipes.counting`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flowrl.config.train import Geometry, TrainConfig
from flowrl.recipes.counting import Counts, Passes
from flowrl.session.preflight import recipe_of
from flowrl.training.budget import Budget
from flowrl.training.drift import KL_PROMPTS, KL_SIGMAS


@dataclass(frozen=True, kw_only=True, slots=True)
class RunCounts:
    """A whole run: its iterations, their sum, and evaluations with the rows of one. `base_rows` count once, at the
    first evaluation, for the base that policies are compared with."""

    iterations: int
    total: Counts
    evaluations: int
    evaluation_rows: int | None
    evaluation_images: int | None
    base_rows: int | None


def of_iteration(config: TrainConfig, iteration: int, passes: Passes, geometry: Geometry) -> Counts:
    """An iteration (or one of its rounds) over all processes; `geometry` is `config.resolve_batch` of these."""
    return recipe_of(config).counts(config).of_iteration(iteration, passes, geometry)


def of_run(config: TrainConfig, passes: Passes, processes: int, num_eval_items: int | None) -> RunCounts:
    """All iterations in a budget (but for seconds), and evaluations of `num_eval_items` images, None if unknown."""
    geometry, total, done = config.resolve_batch(processes), Counts(), 0
    recipe = recipe_of(config).counts(config)
    counters: dict[str, Any] = {"images": 0, "seconds": 0.0, "evals": 0, "evaluated": -1}
    often = {"evals": config.budget.evals, "num_iterations": config.num_iterations, "eval_every": config.eval_every}
    budget = Budget(config.budget.limits, counters, **often)
    evaluations = int(budget.evaluates and config.eval.initial)
    for iteration in range(config.num_iterations):
        total = total + recipe.of_iteration(iteration, passes, geometry)
        done = iteration + 1
        counters |= {"nfe/all": total.total, "images": total.images}
        last = done == config.num_iterations or budget.spent() >= 1
        evaluations += budget.evaluation_due(done, last=last)
        if last:
            break
    rows, base = None, None
    if num_eval_items is not None:  # every image by the ODE, and the policy where it is compared with the base
        settings, sampler = config.eval, config.sampler
        steps = settings.num_steps or sampler.num_steps
        each = passes(sampler.guidance_scale if settings.guidance_scale is None else settings.guidance_scale)
        compared = {quarter * steps // KL_SIGMAS for quarter in range(KL_SIGMAS)}
        prompts = min(KL_PROMPTS, num_eval_items // settings.samples_per_prompt)
        rows = (num_eval_items * steps + prompts * len(compared)) * each
        base = prompts * (max(compared) + 1) * each
    return RunCounts(
        iterations=done,
        total=total,
        evaluations=evaluations,
        evaluation_rows=rows,
        evaluation_images=num_eval_items,
        base_rows=base,
    )


def graph_rows(config: TrainConfig, passes: Passes) -> int:
    """Network rows whose activations a trained image holds at once.

    Recipes run each call's backward pass before they build the next graph. backprop keeps all trained calls' graphs,
    and `keep_graphs` the whole rollout's, for all images. A recomputed negative half replaces a freed positive one.
    """
    rows = passes(recipe_of(config).trained_scale(config)) if config.sampler.train_negative is True else 1
    return rows * recipe_of(config).counts(config).graphs()


def negative_again(config: TrainConfig, passes: Passes) -> float:
    """Additional forward passes of `sampler.train_negative: recompute` for a row of the backward pass."""
    twice = passes(recipe_of(config).trained_scale(config)) == 2
    return 0.5 if config.sampler.train_negative == "recompute" and twice else 0.0
