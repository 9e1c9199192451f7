"""Sampling of one iteration's stochastic paths: trajectories, branches of an ODE anchor, or trees."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from flowrl.config.sections import SamplerConfig
from flowrl.config.train import TrainConfig
from flowrl.credit import CREDIT, Method
from flowrl.pipelines.weights.trained_weights import Held
from flowrl.runtime.placement import host_rows, put, settle
from flowrl.runtime.randomness import counter_integers
from flowrl.samplers import Kernel, rollout
from flowrl.samplers.branching import NodeNoise, sample_branches
from flowrl.samplers.completion import complete, sample_trajectories
from flowrl.samplers.tree import sample_tree, sibling_noise, window_law, window_start
from flowrl.samplers.windows import flash_tail, mixgrpo_window
from flowrl.training.checkpoints import AHEAD
from flowrl.training.draws import HOST, Batch, Draws, EvalRequest, Request, batch_of, without_texts
from flowrl.training.heldout import final_of
from flowrl.training.kept_graphs import KeptGradients, KeptGraphs
from flowrl.training.loop import Loop
from flowrl.training.parts import at_eval_size, eval_schedule, sampler_of
from flowrl.training.processes.mesh import data_ranks
from flowrl.training.prompting import caching
from flowrl.training.scoring import Scoring
from flowrl.trajectory import Sampled, Schedule, Trajectory

_TREE_WINDOW_RATIO = 0.5  # TreeGRPO's law for the places of splits


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Paths:
    """How an iteration samples its paths."""

    kernel: Kernel
    """Of the stochastic steps."""
    schedule: Schedule
    """Levels of all steps."""
    steps: tuple[int, ...] = ()
    """Stochastic ones; none is sampling by the ODE."""
    keep_means: bool = False
    """Whether to keep means of the stochastic steps."""
    keep_states: tuple[int, ...] = ()
    """States to keep besides those of the stochastic steps, the same in every iteration."""
    graphs: KeptGraphs | KeptGradients | None = None
    """Keeps the evaluations at them with graphs or gradients, if configured."""


def sampler_at(loop: Loop, iteration: int) -> tuple[Kernel, Schedule, tuple[int, ...]]:
    """Kernel, schedule and stochastic steps of an iteration."""
    steps = stochastic_steps(loop.config.sampler, loop.config.seed, iteration)
    return *sampler_with(loop, steps, loop.memory.get("noise_levels")), steps


def sampler_with(draws: Draws, steps: tuple[int, ...], levels: Sequence[float] | None) -> tuple[Kernel, Schedule]:
    """Kernel and schedule for some stochastic steps; `levels` are those of a calibration."""
    settings = draws.config.sampler
    kernel, schedule = sampler_of(settings, draws.pipeline, levels)
    if settings.flash_tail is not None and steps:
        # The shift of an evenly spaced grid, read off its second sigma: sigma = k u / (1 + (k - 1) u) at u = 1 - 1 / T.
        even, sigma = 1 - 1 / schedule.num_steps, float(schedule.sigma[1])
        shift = sigma * (1 - even) / (even * (1 - sigma))
        schedule = flash_tail(settings.num_steps, max(steps), settings.flash_tail, shift=shift)
    return kernel, schedule


def stochastic_steps(settings: SamplerConfig, seed: int, iteration: int, group: int = 0) -> tuple[int, ...]:
    """Stochastic steps of an iteration: the whole range, or a window placed by (seed, iteration), and with
    `sde_window_by: prompt` by the prompt's group too; each prompt has equally many."""
    low, high = settings.stochastic_range
    size = settings.sde_window_size or high - low
    if settings.sde_window == "uniform":
        of_prompt = (group,) if settings.sde_window_by == "prompt" else ()
        start = counter_integers(low, high - size + 1, seed, "window", iteration, *of_prompt)
        return tuple(range(start, start + size))
    return mixgrpo_window(
        iteration, settings.num_steps, size, strategy=settings.sde_window, interval=settings.sde_window_interval,
        stride=settings.sde_window_stride, seed=seed, published_off_by_one=settings.published_window,
    )  # fmt: skip


def sample(loop: Loop, batch: Batch, how: Paths, scoring: Scoring | None) -> Trajectory:
    """This process's images with the current weights, `rollout_batch_size` at once; call it without gradient.

    The record is on the host. Each piece is copied there as it is drawn, so the device holds one piece, not an
    iteration. `scoring` gets each piece's finished latents. If the run has workers, they draw the pieces. With
    `sampler.sde_window_by: prompt` kept states and steps have the names of the last prompt's.
    """
    pieces = _pieces(loop, batch, how) if loop.run.rollouts is None else _draw_elsewhere(loop, batch, how)
    rows, start = dict[str, Any](), 0
    for part in pieces:
        own, kept, steps = slice(start, start + len(part)), part.kept, part.steps
        _keep(rows, start, len(batch.own), part.columns())
        if scoring is not None:
            scoring.add(part.final, batch.group[own], batch.own[own])
        start = own.stop
        del part  # the device has room for the next one
    settle(loop.device)
    return Trajectory(kept=kept, steps=steps, **rows)


def _keep(rows: dict[str, Tensor], start: int, count: int, columns: Mapping[str, Tensor]) -> None:
    """Copies a piece's columns into those of all `count` samples on the host; the first piece allocates them."""
    for name, column in columns.items():
        if name not in rows:
            rows[name] = host_rows(column, count, column.device)
        put(rows[name], start, column)


def _drawn_at_once(
    config: TrainConfig, batch: Batch, steps: tuple[int, ...], size: int
) -> Iterator[tuple[range, tuple[int, ...]]]:
    """Numbers of at most `size` images with their stochastic steps, of one prompt with `sde_window_by: prompt`."""
    own, by_prompt = batch.own, bool(steps) and config.sampler.sde_window_by == "prompt"
    start = own.start
    while start < own.stop:
        group, stop = start // config.group_size, min(start + size, own.stop)
        if by_prompt:
            stop = min(stop, (group + 1) * config.group_size)
            steps = stochastic_steps(config.sampler, config.seed, batch.iteration, group)
        yield range(start, stop), steps
        start = stop


def _pieces(draws: Draws, batch: Batch, how: Paths, *, keep_velocity: bool = False) -> Iterator[Trajectory]:
    size, solver = draws.geometry.rollout_batch_size, draws.config.sampler.solver
    for images, steps in _drawn_at_once(draws.config, batch, how.steps, size):
        start = images.start - batch.own.start
        group = batch.group[start : start + len(images)]
        velocity = draws.velocity(batch.asked.cond_of(group))
        noise, step_noise = draws.start_noise(batch, images), draws.step_noise(batch, images)
        if how.graphs is not None:
            given = velocity, step_noise, start, how.schedule, how.kernel, steps
            velocity, step_noise = how.graphs.recording(*given)
        keep: dict[str, Any] = {"keep_means": how.keep_means, "keep_states": how.keep_states}
        keep["keep_velocity"] = keep_velocity
        with caching(draws.pipeline, draws.config.sampler.first_block_cache) as cached:
            path = rollout(
                cached(velocity), noise, how.schedule, how.kernel, step_noise, stochastic=steps, solver=solver, **keep
            )
        yield path
        del path  # the next one needs the room


def _draw_elsewhere(loop: Loop, batch: Batch, how: Paths, *, plan: bool = False) -> Iterator[Any]:
    """A batch from the run's workers, piece by piece in order: trajectories, or parts of a method's plan.

    With `workers.staleness` k it asks for the next k iterations too. Iteration j is drawn under the oldest weights that
    are at most k iterations old by then: those at the start of j - k, of the run, or of the first iteration after j - k
    that samples. The run's memory keeps the weights of those in flight, so a run continued from a checkpoint asks for
    the same images again. `loop` has its network under the sampling weights; pieces are parts of the method's `plan`
    (`Sampled`), else trajectories.
    """
    workers = loop.run.rollouts
    iteration, config, sent = batch.iteration, loop.config, dict[int, Any]()
    staleness, weights = config.workers.staleness, weights_in_flight(loop, batch.iteration)
    for later in range(iteration, min(iteration + staleness + 1, config.num_iterations)):
        steps = stochastic_steps(config.sampler, config.seed, later) if how.steps and later > iteration else how.steps
        if later in loop.ahead or (how.steps and not steps):  # or it samples nothing
            continue
        asked = requests_of(loop, batch if later == iteration else loop.batch(later), steps, how, plan)
        begun = min(begun for begun in weights if begun >= later - staleness)
        if begun not in sent:
            sent[begun] = workers.send(weights[begun], loop.policy.split)
        loop.ahead[later] = workers.submit(asked, sent[begun]), sent[begun]
    tickets, loop.sent = loop.ahead.pop(iteration)
    for drawn in workers.collect(tickets):
        loop.network.take_over(drawn.evaluations)
        yield drawn.found


def weights_in_flight(loop: Loop, iteration: int) -> dict[int, dict[str, Held]]:
    """What this process holds of the weights that iterations from this one on are drawn with, by the iteration that
    began with them: the network's own, or copies on the host, which the run's memory keeps for later ones."""
    staleness, kept, held = loop.config.workers.staleness, loop.memory.pop(AHEAD, {}), loop.policy.held()
    if "weights" in kept:  # of a version that had one copy, named by the iteration that it draws
        kept = {kept["iteration"] - 1: kept["weights"]}
    found = {begun: tensors for begun, tensors in kept.items() if begun >= iteration - staleness}
    found[iteration] = {
        name: one.values.to("cpu", one.dtype, copy=True) if staleness else one.values for name, one in held.items()
    }
    if staleness:
        loop.memory[AHEAD] = {begun: tensors for begun, tensors in found.items() if begun > iteration - staleness}
    return {
        begun: {name: replace(one, values=tensors[name]) for name, one in held.items()}
        for begun, tensors in found.items()
    }


def requests_of(loop: Loop, batch: Batch, steps: tuple[int, ...], how: Paths, plan: bool) -> list[Request]:
    """The pieces of a batch for workers: plain trajectories or parts of a method's `plan`."""
    keep: dict[str, Any] = {"keep_means": how.keep_means, "keep_states": how.keep_states}
    levels, found = loop.memory.get("noise_levels"), list[Request]()
    levels = None if levels is None else tuple(levels)
    size = loop.geometry.rollout_batch_size
    if plan:
        size = images_of_part(loop.config, size, len(batch.own))
    for images, of_images in _drawn_at_once(loop.config, batch, steps, size):
        start = images.start - batch.own.start
        asked = without_texts(batch.asked, batch.group[start : start + len(images)])
        one = Request(iteration=batch.iteration, images=images, asked=asked, steps=of_images, levels=levels)
        found.append(replace(one, plan=plan, **keep))
    return found


def images_of_part(config: TrainConfig, batch_size: int, images: int) -> int:
    """Images of a part of a process's plan that is drawn as in the whole: no network call has rows of two parts.

    A call has `batch_size` rows of one level of trees or of the anchors of branches, in the order of the groups, so
    that a part is as many groups as have a multiple of that at the narrowest level. Completions of branches stand
    behind those of the step before, so that parts have to fill up the whole too.
    """
    method, size = CREDIT[config.credit.method], config.group_size
    if method.plan == "trajectories":
        return batch_size
    narrowest = size // (config.credit.branches or size) if method.plan == "branches" else 1
    part = size * batch_size // math.gcd(batch_size, narrowest)
    return images if method.plan == "branches" and images % part else part


def draw_request(draws: Draws, request: Request | EvalRequest) -> Trajectory | Sampled | Tensor:
    """Draws a request with the current weights, onto the host; call it without gradient."""
    if isinstance(request, EvalRequest):
        resized = at_eval_size(draws.config, draws.pipeline)
        return final_of(resized, request, eval_schedule(draws.config, draws.pipeline, resized)).cpu()
    batch = batch_of(request, draws.config.group_size, draws.device)
    kernel, schedule = sampler_with(draws, request.steps, request.levels)
    keep: dict[str, Any] = {"keep_means": request.keep_means, "keep_states": request.keep_states}
    how = Paths(kernel=kernel, schedule=schedule, steps=request.steps, **keep)
    if not request.plan:
        (drawn,) = _pieces(draws, batch, how)
        columns: dict[str, Any] = {name: column.cpu() for name, column in drawn.columns().items()}
        return replace(drawn, **columns)
    return _plan(draws, batch, CREDIT[draws.config.credit.method], how).on_host()


def sample_paths(loop: Loop, batch: Batch, method: Method, how: Paths, scoring: Scoring) -> Sampled:
    """Samples what a credit method needs, with the current weights, and gives finished latents to `scoring`. Call it
    without gradient. Latents are on the host; the device holds one batch."""
    if method.plan == "trajectories" and not method.values:
        sampled = sample_trajectories(sample(loop, batch, how, scoring), batch.group, None)
        if loop.config.sampler.sde_window_by == "prompt":
            settings, seed = loop.config.sampler, loop.config.seed
            own = [stochastic_steps(settings, seed, batch.iteration, group) for group in batch.group.tolist()]
            sampled = replace(sampled, step=torch.tensor(own).flatten())
    elif loop.run.rollouts is None:
        sampled = _plan(loop, batch, method, how)
    else:
        found = [cast(Sampled, part) for part in _draw_elsewhere(loop, batch, how, plan=True)]
        sampled = Sampled.cat(found)
        if method.plan != "trajectories" and len(found) > 1:
            sampled = sampled.by_step()
    if not method.of_outcomes:  # rewards of all finished latents at once, which may outnumber the images
        count = len(sampled.finished)
        first = batch.own.start // len(batch.own) * count
        scoring.add(sampled.finished, sampled.finished_group, range(first, first + count))
    return sampled


def _plan(draws: Draws, batch: Batch, method: Method, how: Paths) -> Sampled:
    """What a method needs besides plain trajectories, for a whole process at once."""
    if method.plan == "branches":
        return _branches(draws, batch, how)
    if method.plan == "tree":
        return _trees(draws, batch, how)
    mode, size = draws.config.credit.completion or method.completion, draws.geometry.rollout_batch_size
    rows, start = dict[str, Any](), 0
    for part in _pieces(draws, batch, how, keep_velocity=True):
        group, columns = batch.group[start : start + len(part)], part.columns()
        with draws.network.counting("completion"):  # images are finished from every step too, by the ODE
            columns["values"] = complete(
                lambda index, group=group: draws.velocity(batch.asked.cond_of(group[index.cpu()])),  # type: ignore[misc]
                part,
                how.schedule,
                mode=mode,
                batch_size=size,
            )
        del columns["velocity"], columns["final"]
        _keep(rows, start, len(batch.own), columns)
        start, kept, steps = start + len(part), part.kept, part.steps
        del part, columns
    settle(draws.device)
    values = rows.pop("values")
    return sample_trajectories(Trajectory(kept=kept, steps=steps, final=values[:, -1], **rows), batch.group, values)


def _branches(draws: Draws, batch: Batch, how: Paths) -> Sampled:
    config, groups = draws.config, batch.asked.groups
    branches = config.credit.branches or config.group_size
    seeds = config.group_size // branches
    anchors = [(int(group), k) for group in groups for k in range(seeds)]

    def noise(step: int, nodes: range) -> Tensor:
        return draws.normals("branch", batch, [(*anchors[i // branches], i % branches, step) for i in nodes])

    starts = [(group, k // config.images_per_start) for group, k in anchors]
    return sample_branches(
        lambda index: draws.velocity(batch.asked.cond[index.cpu()]),
        draws.normals("start", batch, starts, device=HOST),
        torch.arange(len(groups)).repeat_interleave(seeds),
        groups.repeat_interleave(seeds),
        how.schedule,
        how.kernel,
        noise,
        steps=how.steps,
        branches=branches,
        strides=config.credit.strides,
        batch_size=draws.geometry.rollout_batch_size,
        finish_anchors=CREDIT[config.credit.method].against_ode,
        keep_means=how.keep_means,
        device=draws.device,
    )


def _trees(draws: Draws, batch: Batch, how: Paths) -> Sampled:
    credit, groups = draws.config.credit, batch.asked.groups.tolist()
    splits, stochastic = tree_steps(draws.config, how.schedule.num_steps, batch.iteration, how.steps)

    def normals(tag: str, *, after: int) -> NodeNoise:
        """Of the nodes before a step, or of those after it."""

        def drawn(step: int, nodes: range) -> Tensor:
            each = children ** sum(split < step + after for split in splits)  # nodes of a tree
            return draws.normals(tag, batch, [(groups[i // each], i % each, step) for i in nodes])

        return drawn

    noise, children = normals("node", after=1), credit.children
    if credit.split_noise is not None:
        shared = normals("siblings", after=0)
        noise = sibling_noise(noise, shared, splits=splits, children=children, scale=credit.split_noise)
    return sample_tree(
        lambda index: draws.velocity(batch.asked.cond[index.cpu()]),
        draws.normals("start", batch, [(group, 0) for group in groups], device=HOST),
        torch.arange(len(groups)),
        batch.asked.groups,
        how.schedule,
        how.kernel,
        noise,
        splits=splits,
        children=children,
        stochastic=stochastic,
        batch_size=draws.geometry.rollout_batch_size,
        keep_means=how.keep_means,
        device=draws.device,
    )


def tree_steps(
    config: TrainConfig, num_steps: int, iteration: int, steps: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The steps at which an iteration's trees split, and its stochastic steps; `steps` are the sampler's."""
    credit = config.credit
    if credit.splits is not None:
        return credit.splits, tuple(sorted({*steps, *credit.splits}))
    depth = tree_depth(config.group_size, credit.children)
    first = window_start(num_steps, depth, _TREE_WINDOW_RATIO, config.seed, iteration)
    splits = tuple(range(first, first + depth))
    return splits, splits


def tree_depth(leaves: int, children: int) -> int:
    """Splits of a tree with so many leaves; 0 if no number of splits gives that many."""
    depth = round(math.log(leaves, children))
    return depth if children**depth == leaves else 0


def shared_sources(config: TrainConfig, method: Method) -> int:
    """Most latents that the transitions of one step start at, on one process of this run."""
    images = config.num_images // data_ranks(config)
    if method.plan == "branches":
        return images // (config.credit.branches or config.group_size)
    return images // config.credit.children if method.plan == "tree" else images


def readers_of(config: TrainConfig) -> list[str]:
    """Readers of configuration keys in a credit method and its sampling (`flowrl.config.readers`)."""
    method = CREDIT[config.credit.method]
    found = {
        method.plan: True,
        "values": method.values,
        "advantages": not method.against_ode,  # whose credit is the advantage
        "outcomes": method.of_outcomes,
        "tail": method.of_outcomes,
        "thinned": method.plan != "tree",
        "window": method.plan != "tree" or config.credit.splits is not None,  # else a tree draws its own steps
    }
    return [name for name, reads in found.items() if reads]


def check_graphs(config: TrainConfig) -> None:
    """Refuses to keep the rollout's graphs or gradients if the update could not use them unchanged."""
    geometry = config.resolve_batch(data_ranks(config))
    micro, rollout_batch = geometry.micro_batch_size, geometry.rollout_batch_size
    if micro != rollout_batch:
        raise ValueError(
            "keep_graphs walks the rollout's own evaluations back, batch by batch, but micro_batch_size is "
            f"{micro} and rollout_batch_size {rollout_batch}: set keep_graphs=false, or give equal batches"
        )


def check_engine(config: TrainConfig, method: Method, *, means: bool) -> None:
    """Refuses an engine if the run needs more than states of plain trajectories, such as `means` of steps."""
    needs = {
        f"credit.method={config.credit.method}": method.plan != "trajectories" or method.values,
        f"objective.name={config.objective.name or 'clip'}": means,
        "rewards.routes": any(config.routes),
        "shaping.options.clip=dynamic": config.shaping.options.get("clip") == "dynamic",
    }
    if config.workers.engine is not None and (more := ", ".join(key for key, asked in needs.items() if asked)):
        raise ValueError(
            f"workers.engine returns the states of plain trajectories, without means and densities, and {more} needs "
            "more: remove workers.engine, or what needs more"
        )


def check_plan(config: TrainConfig, method: Method) -> None:
    """Refuses settings of the method's way of sampling that do not fit each other or the group."""
    if config.keep_graphs:
        check_graphs(config)
    credit, name, sampler = config.credit, config.credit.method, config.sampler
    steps = stochastic_steps(sampler, config.seed, 0)  # refuses a window that does not fit
    if sampler.trained_fraction != 1 and int(len(steps) * sampler.trained_fraction) < 1:
        raise ValueError(
            f"sampler.trained_fraction ({sampler.trained_fraction:g}) of {len(steps)} stochastic steps is none: raise "
            f"it to at least {1 / len(steps):.2g}"
        )
    if sampler.flash_tail is not None and sampler.grid != "linspace":
        raise ValueError("sampler.flash_tail thins out an evenly spaced grid: set sampler.grid=linspace")
    if sampler.flash_tail is not None:
        flash_tail(sampler.num_steps, max(sampler.stochastic_range[1] - 1, *steps), sampler.flash_tail)
    if len(set(credit.strides)) != len(credit.strides):
        raise ValueError(f"credit.strides {list(credit.strides)} names a stride twice: give each once")
    size, world = config.group_size, data_ranks(config)
    if not method.whole_paths and config.prompts_per_step % world:
        raise ValueError(
            f"credit method {name} samples a group as a whole on one process, so prompts_per_step "
            f"({config.prompts_per_step}) must divide by the {world} processes"
        )
    if method.plan == "branches" and size % (credit.branches or size):
        raise ValueError(f"group_size ({size}) must be a multiple of credit.branches ({credit.branches}): change one")
    if method.plan == "tree":
        _check_tree(config)


def _check_tree(config: TrainConfig) -> None:
    credit, size, num_steps = config.credit, config.group_size, config.sampler.num_steps
    splits = len(credit.splits) if credit.splits is not None else tree_depth(size, credit.children)
    if splits < 1 or credit.children**splits != size:
        raise ValueError(
            f"a tree of {credit.children} children per split has {credit.children}^splits leaves, and group_size "
            f"is {size}: choose credit.splits, credit.children and group_size so that they agree"
        )
    if credit.splits is None:
        window_law(num_steps, splits, _TREE_WINDOW_RATIO)
    given = credit.splits or ()
    if len(set(given)) != len(given) or any(not 0 <= step < num_steps - 1 for step in given):
        raise ValueError(
            f"credit.splits {list(given)} must be distinct and lie in 0 .. {num_steps - 2}: the last step adds no noise"
        )
