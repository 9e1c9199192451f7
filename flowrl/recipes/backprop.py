"""Gradients of a differentiable reward through the sampler: `flowrl train tiny_draft [key=value ...]`

An iteration samples G images for each of P prompts by the ODE, decodes and scores them with gradient, and updates the
LoRA with the reward's own gradient: no density, no advantage. Methods differ in which network calls keep their gradient
and in where the sampling ends (`flowrl.objectives.gradient_paths.PATHS`): refl, draft, alignprop, drtune. Gradient
flows through both branches of guidance, unless `sampler.train_negative` is false.

Sampling, reward and backward pass are one, `micro_batch_size` images at a time: the graph of a micro-batch is all that
memory must hold. `pipeline.gradient_checkpointing` makes it smaller. With `updates_per_rollout` the images are split
evenly and the then current policy samples each part. The log has the rewards of the trained images, which refl and
drtune with early_stop take before sampling has ended.

Letters: P prompts, G images per prompt, B = P * G, b images of a micro-batch.

Deviations from the published code: the steps that keep their gradient are drawn once per iteration, not for each batch,
so batch sizes do not change the result; the loss is divided by the number of images with a valid reward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flowrl.config.options import build_parts, entry_of
from flowrl.config.readers import refuse_unread
from flowrl.config.train import Geometry, TrainConfig
from flowrl.objectives.gradient_paths import PATHS, Path, RewardLoss, backprop_sample
from flowrl.recipes.counting import Counts, Passes, RecipeCounts, trained_scale, walked
from flowrl.rewards import RewardOutput, can_be_differentiable
from flowrl.rewards.base.outputs import join_outputs
from flowrl.rewards.compose import WeightedSum
from flowrl.runtime.private_names import foreach_mul_
from flowrl.training.learner import Statistics, total_of
from flowrl.training.loop import Loop
from flowrl.training.parts import Ready, sampler_of
from flowrl.training.run import Run

__all__ = ["REGRESSES", "THROUGH_REWARDS", "check", "counts", "main", "objective_of", "only_here", "trained_scale"]

REGRESSES, THROUGH_REWARDS = False, True


def only_here(config: TrainConfig) -> str:
    """Why workers cannot draw for a run."""
    return "recipe backprop sends the gradient through its own sampling, which cannot be done elsewhere"


def main(ready: Ready, run: Run) -> bool:
    """Trains to the end or to an interrupt; returns whether it finished. Writes only into the run folder."""
    config, (path_of, loss_of), loop = ready.config, ready.objective, Loop(ready, run)
    check_reward(loop.scorer.reward)
    for iteration in loop:
        batch, schedule = loop.batch(iteration), sampler_of(config.sampler, loop.pipeline, kernel=ready.kernel)[1]
        path = path_of(schedule.num_steps, seed=config.seed, iteration=iteration)
        outputs: list[RewardOutput] = []
        stats = Statistics()
        share = len(batch.own) // config.updates_per_rollout
        for part in range(config.updates_per_rollout):
            # 1. Sample, decode, score and back-propagate, one micro-batch after another.
            gradient = loop.gradient()
            live: Tensor | int = 0
            for start in range(part * share, (part + 1) * share, loop.geometry.micro_batch_size):
                index = range(start, start + loop.geometry.micro_batch_size)
                own = slice(index.start, index.stop)
                with loop.clock("rollout"):
                    how: dict[str, Any] = {"train_steps": path.train_steps, "last_step": path.last_step}
                    velocity = loop.velocity(batch.asked.cond_of(batch.group[own]))
                    noise = loop.start_noise(batch, batch.own[own])
                    latents = backprop_sample(velocity, noise, schedule, **how, stop_input=path.stop_input)
                with loop.clock("reward"):
                    images = loop.pipeline.decode(latents, gradient=True)
                    output = loop.scorer.with_gradient(batch, images, batch.group[own], batch.own[own])
                with loop.clock("update"):
                    loss_b = loss_of(output.values)
                    stats.mean(output.valid, loss=loss_b)
                    if loss_b.requires_grad:  # a reward that fails may have no graph
                        gradient.add(torch.where(output.valid, loss_b, 0).sum() / (share * run.world))
                    elif loop.shards is not None:  # walks its calls back with those of the other processes
                        gradient.add(latents[:0].sum())
                    live = live + output.valid.sum()  # where it is: reading it would wait for the device
                parts = {name: part.detach() for name, part in output.parts.items()}
                outputs.append(RewardOutput(values=output.values.detach(), valid=output.valid, parts=parts))

            # 2. Update: the mean over the images that have a reward, on all processes.
            with loop.clock("update"):
                count = total_of(run, int(live))
                if count == 0:
                    continue
                foreach_mul_(gradient.total, share * run.world / count)
                loop.update(gradient, stats)

        # 3. Log.
        output = join_outputs(outputs)
        loop.rewards_of_all(output, compared=False)
        row = loop.scorer.row(output, batch.group) | stats.row(run)
        loop.log(iteration, row | {"trained_calls": len(path.train_steps), "last_step": path.last_step})
    return loop.finished


def counts(config: TrainConfig) -> RecipeCounts:
    """What a run counts before it starts."""
    path_of, sampler, images = objective_of(config)[0], config.sampler, config.num_images

    def path(iteration: int) -> Path:
        return path_of(sampler.num_steps, seed=config.seed, iteration=iteration)

    def of_iteration(iteration: int, passes: Passes, geometry: Geometry) -> Counts:
        own, scale = path(iteration), sampler.guidance_scale
        return Counts(
            rollout=images * passes(scale) * (own.last_step + 1),
            images=images,
            backward=images * walked(sampler.train_negative, scale, passes) * len(own.train_steps),
        )

    return RecipeCounts(
        objective=config.objective.name or "draft",
        of_iteration=of_iteration,
        exact=True,
        through_rewards=True,
        graphs=lambda: max(len(path(iteration).train_steps) for iteration in range(config.num_iterations)),
    )


# ---- what is refused -------------------------------------------------------------------------------------------------


def check(config: TrainConfig) -> None:
    """Refuses settings of this recipe that cannot work, before a model loads. Raises ValueError: an unknown path or
    option, a reward without gradient, or a combination without meaning."""
    sampler = config.sampler
    objective_of(config)[0](sampler.num_steps, seed=config.seed, iteration=0)
    for reward in config.rewards:
        if reward.weight and not can_be_differentiable(reward.name):
            what = reward.name or f"{reward.file}:{reward.function}"
            raise ValueError(_no_gradient(f"reward {what}"))
    if sampler.kernel != "ode":
        raise ValueError(
            f"recipe backprop follows the ODE, but sampler.kernel is {sampler.kernel}: set sampler.kernel=ode"
        )
    if sampler.train_negative is False and sampler.guidance_scale != 1:
        refuse_broken_chain(config)
    refuse_unread(config, (), "recipe backprop")


def refuse_broken_chain(config: TrainConfig) -> None:
    """Refuses a constant negative half if gradient must come through it from later steps. It is then left out of
    dv/dx as well, `scale dv_pos/dx` in the place of `scale dv_pos/dx + (1 - scale) dv_neg/dx`: another chain than that
    of the samples. A single trained step and stopped inputs have no such product."""
    path_of, _ = objective_of(config)
    paths = (path_of(config.sampler.num_steps, seed=config.seed, iteration=i) for i in range(config.num_iterations))
    if any(len(path.train_steps) > 1 and not path.stop_input for path in paths):
        raise ValueError(
            f"sampler.train_negative is false, and objective {config.objective.name or 'draft'} sends the gradient of "
            "several steps through the network's input, where the negative half counts: set it to recompute, which "
            "takes as little memory, or train one step, or take objective drtune"
        )


def check_reward(reward: WeightedSum) -> None:
    """Refuses rewards whose lack of a gradient only shows after loading."""
    wrong = [term.key for term in reward.terms if term.weight and not term.reward.differentiable]
    if wrong:
        raise ValueError(_no_gradient(f"reward {', '.join(wrong)}"))
    if reward.kind not in ("pointwise", "remote"):
        raise ValueError(
            f"recipe backprop scores micro-batches, and reward {reward.name} is {reward.kind}: take rewards "
            "that judge each image by itself"
        )


def _no_gradient(what: str) -> str:
    return (
        f"recipe backprop trains on the gradient of the reward, and {what} has none: take a differentiable one, such "
        "as attributes, or another recipe; with weight 0 any reward is computed and logged"
    )


def objective_of(config: TrainConfig) -> tuple[Callable[..., Path], RewardLoss]:
    """The path and the loss of a run; refl has the hinge and its published scale by default. Raises ValueError: an
    unknown name or option, or a bad value."""
    name, options = config.objective.name or "draft", config.objective.options
    path = entry_of(PATHS, name, "objective of recipe backprop", owner="objective.name")
    if name == "refl" and options.get("loss", "hinge") == "hinge":
        options = {"loss": "hinge", "scale": 1e-3} | options
    path_of, loss_of = build_parts((path, RewardLoss), options, owner=f"objective {name!r}")
    return path_of, loss_of
