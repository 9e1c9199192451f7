"""What recipe grpo counts: network evaluations of sampling, completions and updates, for each credit method."""

from __future__ import annotations

from dataclasses import dataclass

from flowrl.config.train import Geometry, TrainConfig
from flowrl.credit import CREDIT, Method
from flowrl.credit.trees import BranchGrpo
from flowrl.objectives.policy_gradient import OBJECTIVES
from flowrl.recipes.counting import STEP, Counts, Passes, RecipeCounts, RolloutRecord, walked
from flowrl.samplers.windows import flash_tail, thinned_steps
from flowrl.training.assignment import credit_options
from flowrl.training.kept_graphs import by_step, walks
from flowrl.training.paths import stochastic_steps, tree_steps


def keeps_pieces(config: TrainConfig, geometry: Geometry) -> bool:
    """Whether an update takes all rows in the batches of their sampling."""
    sampler, sizes = config.sampler, {geometry.micro_batch_size, geometry.rollout_batch_size}
    subset = sampler.trained_fraction < 1 and sampler.trained_steps == "random"
    alike = len(sizes) == 1 and sampler.sde_window_by == "iteration" and not subset
    return alike and CREDIT[config.credit.method].whole_paths


def needs_means(config: TrainConfig) -> bool:
    """Whether the rollout keeps the means of its steps: for credit, an objective, or the ratio of parts of a state."""
    of_credit = CREDIT[config.credit.method].against_ode
    return of_credit or OBJECTIVES[config.objective.name or "clip"].needs_old_mean or any(config.routes)


def counts(config: TrainConfig) -> RecipeCounts:
    """What a run counts before it starts."""
    sampler, method, dmd = config.sampler, CREDIT[config.credit.method], config.dmd

    def of_iteration(iteration: int, passes: Passes, geometry: Geometry) -> Counts:
        steps = stochastic_steps(sampler, config.seed, iteration)
        if not steps:  # sampler.published_window, at the end of a round
            return Counts()
        paths = _paths(config, method, iteration, steps)
        if iteration < sampler.calibration.iterations:  # noise levels are calibrated before training
            rows = passes(sampler.guidance_scale)
            return Counts(rollout=paths.rollout * rows, completion=paths.completion * rows, images=paths.images)
        everything = sum(paths.sources.values())
        trained = _trained(config, iteration, paths.sources)
        # Every update but the first one compares with its own evaluations of before, where the rollout's are of other
        # batches or weights, or may differ; and a ratio of whole trajectories takes all of its steps before each of
        # them.
        updates = config.updates_per_rollout
        subset = sampler.trained_fraction < 1 and sampler.trained_steps == "random"
        times = (not keeps_pieces(config, geometry) or not rounds_alike(config)) + (config.ratio != "step")
        again = times * (trained if subset else everything) * (updates - 1) // updates
        rows = passes(sampler.guidance_scale)
        replayed = 0 if config.keep_graphs else again + trained
        backwards = trained * walks(config, geometry.rollout_batch_size)
        matched = config.num_images * (dmd.weight > 0)
        fake = matched * dmd.fake_updates * passes(1.0)
        return Counts(
            rollout=paths.rollout * rows,
            completion=paths.completion * rows,
            update=(replayed + matched) * rows + fake,
            reference=trained * rows * (config.kl_coef > 0) + matched * (passes(dmd.guidance_scale) + passes(1.0)),
            images=paths.images,
            backward=(backwards + matched) * walked(sampler.train_negative, sampler.guidance_scale, passes) + fake,
        )

    sets = (1 + (config.kl_coef > 0)) * (config.keep_graphs == "gradients")

    def steps() -> int:
        return len(stochastic_steps(sampler, config.seed, 0))

    return RecipeCounts(
        objective=config.objective.name or "clip",
        credit=config.credit.method,
        graphs=steps if config.keep_graphs is True else lambda: 1,
        gradients=lambda: (sets * (steps() if by_step(config) else 1), sets),
        exact=sets > 0,
        slots=3 * (dmd.weight > 0),  # the fake score and its two moments
        of_iteration=of_iteration,
        record=lambda: _record(config, method, sets),
    )


def _record(config: TrainConfig, method: Method, sets: int) -> RolloutRecord:
    sampler, kept = config.sampler, needs_means(config)
    windows = {stochastic_steps(sampler, config.seed, iteration) for iteration in range(config.num_iterations)}
    found = [_paths(config, method, 0, steps) for steps in sorted(windows - {()})]
    paths = max(found, key=lambda one: one.states + one.images + one.transitions * kept)
    means, batches = paths.transitions * kept, paths.batches
    if method.whole_paths:  # states, means, start noise, the last latent; of each step output and value
        each = paths.states + means + 2 * config.num_images + method.values * (paths.transitions + paths.images)
        batches = ((each // config.num_images + STEP, config.num_images),)
    return RolloutRecord(
        # Answers of the networks too, if gradients are kept for each image.
        columns=(paths.states, paths.images, means, *paths.passing, *[paths.transitions] * sets),
        rounds=config.curriculum.max_rounds,
        batches=batches,
        finished=paths.images * (not method.of_outcomes),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Paths:
    """What one way of sampling evaluates: rows of the rollout and of completions without guidance, images, and the
    latents that the transitions of each stochastic step start at; and what it records:
    states and transitions. What else is on the host at once, and the batches of `RolloutRecord`."""

    rollout: int
    completion: int
    images: int
    sources: dict[int, int]
    states: int
    transitions: int
    passing: tuple[int, ...] = ()
    batches: tuple[tuple[int, int], ...] = ()


def rounds_alike(config: TrainConfig) -> bool:
    """Whether rollout and update surely compute the same numbers of the same batch: both in float32 on one CPU, by the
    same code. On other devices and in other dtypes building a graph may choose other kernels."""
    pipeline = config.pipeline
    plain = (pipeline.dtype, pipeline.quantize, pipeline.compile) == ("float32", "none", "none")
    alone = config.parallel.shard * config.parallel.context == 1 and not config.workers.rollouts
    return pipeline.device == "cpu" and plain and alone


def _trained(config: TrainConfig, iteration: int, sources: dict[int, int]) -> int:
    """Rows of the trained stochastic steps."""
    sampler, steps = config.sampler, sorted(sources)
    count = int(len(steps) * sampler.trained_fraction)
    if sampler.trained_fraction < 1 and sampler.trained_steps == "random":
        return config.num_images * count
    credit = credit_options(config) if CREDIT[config.credit.method].options is BranchGrpo else None
    pruned = credit.pruned(iteration) if isinstance(credit, BranchGrpo) else frozenset()  # depths of trees
    kept = steps[: count if sampler.trained_fraction < 1 else None]
    return sum(sources[step] for step in kept if step + 1 not in pruned)


def _paths(config: TrainConfig, method: Method, iteration: int, steps: tuple[int, ...]) -> _Paths:
    sampler, images = config.sampler, config.num_images
    num_steps = sampler.num_steps
    if sampler.flash_tail is not None:
        num_steps = flash_tail(num_steps, max(steps), sampler.flash_tail).num_steps
    if method.plan == "branches":
        return _branches(config, num_steps, steps, finished=method.against_ode)
    if method.plan == "tree":
        return _tree(config, iteration, num_steps, steps)
    completion = 0
    if method.values:
        mode = config.credit.completion or method.completion
        each = {"full": [num_steps - step - 1 for step in steps], "clean": [0 for _ in steps]}
        completion = images * sum(each[mode] if isinstance(mode, str) else [mode - 1 for _ in steps])
    return _Paths(
        rollout=images * num_steps,
        completion=completion,
        images=images * (1 + len(steps) * method.values),
        sources=dict.fromkeys(steps, images),
        states=images * len({state for step in steps for state in (step, step + 1)}),
        transitions=images * len(steps),
    )


def _branches(config: TrainConfig, num_steps: int, steps: tuple[int, ...], *, finished: bool) -> _Paths:
    """Anchors run to their last branching, or are `finished`; completions that coincide are evaluated once."""
    width = config.credit.branches or config.group_size
    anchors, strides = config.num_images // width, config.credit.strides
    images = anchors * (width * len(steps) * len(strides) + finished)
    completion = 0
    for branched in steps:
        evaluated = [thinned_steps(num_steps, branched, stride) for stride in strides]
        for step in range(branched + 1, num_steps):
            paths = sum(step in own for own in evaluated)
            completion += min(paths, 1) if step <= branched + 2 else paths
    return _Paths(
        rollout=anchors * ((num_steps if finished else max(steps) + 1) + width * completion),
        completion=0,
        images=images,
        sources=dict.fromkeys(steps, anchors),
        states=anchors * (1 + width) * len(steps),
        transitions=anchors * width * len(steps),
        passing=(anchors, anchors),  # start noise and the anchors of a step
        batches=((2 + width * max(STEP, 2 + len(strides)), anchors), (STEP * (1 + len(strides)), images)),
    )


def _tree(config: TrainConfig, iteration: int, num_steps: int, steps: tuple[int, ...]) -> _Paths:
    """The network evaluates a node once, however many children it gets."""
    splits, stochastic = tree_steps(config, num_steps, iteration, steps)
    nodes, rollout, sources, states, transitions = config.prompts_per_step, 0, {}, 0, 0
    for step in range(num_steps):
        rollout += nodes
        children = nodes * (config.credit.children if step in splits else 1)
        if step in stochastic:
            sources[step] = nodes
            states += children + nodes * (step - 1 not in stochastic)  # else it was kept as a product
            transitions += children
        nodes = children
    return _Paths(
        rollout=rollout,
        completion=0,
        images=nodes,
        sources=sources,
        states=states,
        transitions=transitions,
        passing=(config.prompts_per_step,),  # start noise
        batches=((2 + STEP * config.credit.children, nodes),),
    )
