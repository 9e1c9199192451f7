"""Gradients of a differentiable reward through the sampler: `flowrl train configs/tiny_draft.yaml [key=value ...]`

An iteration samples G images for each of P prompts by the ODE, decodes and scores them with gradient, and updates the
LoRA with the reward's own gradient: no density, no advantage. Methods differ in which network calls keep their gradient
and in where the sampling ends (`flowrl.objectives.gradient_paths.PATHS`): refl, draft, alignprop, drtune. Gradient
flows through both branches of guidance.

Sampling, reward and backward pass are one, `micro_batch_size` images at a time: the graph of a micro-batch is all that
memory must hold. `pipeline.gradient_checkpointing` makes it smaller. With `updates_per_rollout` the images are split
evenly and each part is sampled by the policy of then. Rewards in the log are those of the images that were trained on,
which refl and drtune with early_stop take before sampling has ended.

Letters: P prompts, G images a prompt, B = P * G, b images of a micro-batch.

Deviations from the published code: which steps keep their gradient is drawn once an iteration, not for each batch, so
that sizes of batches do not change the result; the loss is divided by the number of images with a valid reward.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from flowrl.config.options import check_options, option_parameters, unknown_name
from flowrl.config.train import TrainConfig
from flowrl.objectives.gradient_paths import PATHS, Path, backprop_sample, refl_loss
from flowrl.recipes.unread import refuse_unread
from flowrl.rewards import RewardOutput, can_be_differentiable
from flowrl.rewards.outputs import joined
from flowrl.training.learner import GradientSum, Statistics
from flowrl.training.loop import Batch, Loop
from flowrl.training.parts import sampler_of
from flowrl.training.prompting import reward_inputs
from flowrl.training.run import Run
from flowrl.training.scoring import reward_row
from flowrl.trajectory import Schedule

_OF_RUN = ("seed", "iteration")  # arguments of a path that are no options
_UNREAD = (
    "clip_range", "adv_std", "adv_baseline", "adv_clip_range", "adv_eps", "adv_correction", "adv_virtual_max",
    "reward_aggregation", "ratio", "loss_aggregation", "best_of", "kl_coef", "kl_type", "log_ratio", "credit",
    "shaping", "reward_map", "curriculum", "times", "slots", "rollout_batch_size", "sampler.sde_window",
    "sampler.sde_window_size", "sampler.sde_window_range", "sampler.flash_tail", "sampler.trained_fraction",
    "sampler.trained_steps", "sampler.solver",
)  # fmt: skip


def main(config: TrainConfig, run: Run) -> bool:
    """Trains to the end or to an interrupt; returns whether it finished. Everything it makes lies in the run folder."""
    loop = Loop(config, run)
    check_reward(loop)
    name = config.objective.name or "draft"
    path_options, loss_options = split_options(name, config.objective.options)
    for iteration in loop:
        batch, schedule = loop.batch(iteration), sampler_of(config.sampler, loop.pipeline)[1]
        path = PATHS[name](schedule.num_steps, seed=config.seed, iteration=iteration, **path_options)
        outputs: list[RewardOutput] = []
        stats = Statistics()
        share = len(batch.own) // config.updates_per_rollout
        for part in range(config.updates_per_rollout):
            # 1. Sample, decode, score and back-propagate, one micro-batch after another.
            gradient = GradientSum(loop.policy, loop.counters, scale_loss=config.pipeline.dtype == "float16")
            live = torch.zeros((), dtype=torch.long, device=run.device)
            for start in range(part * share, (part + 1) * share, loop.geometry.micro_batch_size):
                index = range(start, start + loop.geometry.micro_batch_size)
                with loop.clock("rollout"):
                    latents = sample(loop, batch, index, schedule, path)
                with loop.clock("reward"):
                    images = loop.pipeline.decode(latents, gradient=True)
                    output = score(loop, batch, index, images)
                with loop.clock("update"):
                    loss_b = reward_loss(output.values, **loss_options)
                    stats.add(output.valid, loss=loss_b)
                    live += output.valid.sum().to(run.device)
                    if bool(output.valid.any()):
                        gradient.add(loss_b[output.valid].sum() / (share * run.world))
                outputs.append(detached(output))

            # 2. Update: the mean over the images that have a reward, on all processes.
            with loop.clock("update"):
                count = int(run.accelerator.reduce(live).item())
                if count == 0:
                    continue
                for total in gradient.total:
                    total *= share * run.world / count
                stats.note("grad_norm", gradient.apply(run, loop.optimizer, config.optim.max_grad_norm, iteration))
                loop.updated()

        # 3. Log.
        row = image_row(loop, outputs, iteration) | stats.means(run)
        loop.log(iteration, row | {"trained_calls": len(path.train_steps), "last_step": path.last_step})
    return loop.finished


def sample(loop: Loop, batch: Batch, index: range, schedule: Schedule, path: Path) -> Tensor:
    """Latents `[b, *latent]` of some images of this process, with the graph of the path's network calls."""
    group = batch.group[index.start : index.stop]
    return backprop_sample(
        loop.velocity(batch.cond[batch.local(group)]), loop.start_noise(batch, batch.own[index.start : index.stop]),
        schedule, train_steps=path.train_steps, last_step=path.last_step, stop_input=path.stop_input,
    )  # fmt: skip


def score(loop: Loop, batch: Batch, index: range, images: Tensor) -> RewardOutput:
    """Rewards of decoded images, with their graph."""
    group = batch.group[index.start : index.stop]
    prompts = [batch.prompts[int(row)] for row in batch.local(group)]
    loop.counters["images"] += len(images) * loop.run.world
    numbers = batch.own[index.start : index.stop]
    output = loop.reward(
        reward_inputs(loop.pipeline, prompts, images, group=group, numbers=numbers, iteration=batch.iteration)
    )
    loop.errors.update(output.errors)
    return output


def reward_loss(
    reward_b: Tensor, *, loss: Literal["negative", "hinge"] = "negative", scale: float = 1.0, target: float = 2.0
) -> Tensor:
    """Loss `[b]` of rewards: `-scale r`, or ReFL's `scale max(target - r, 0)`, which lets go of what is good enough.

    Raises:
        ValueError: scale is not positive.
    """
    if not scale > 0:
        raise ValueError(f"scale of the loss must be above 0, got {scale:g}")
    return refl_loss(reward_b, scale=scale, target=target) if loss == "hinge" else -scale * reward_b


def detached(output: RewardOutput) -> RewardOutput:
    """The numbers without their graph."""
    parts = {name: part.detach() for name, part in output.parts.items()}
    return RewardOutput(values=output.values.detach(), valid=output.valid, parts=parts)


def image_row(loop: Loop, outputs: list[RewardOutput], iteration: int) -> dict[str, Any]:
    """The log's means over the images of all processes; stops a run whose reward says nothing."""
    run, output = loop.run, joined(outputs)
    values, valid = run.gather(output.values.to(run.device)), run.gather(output.valid.to(run.device))
    loop.check_rewards(torch.where(valid, values, torch.nan), iteration)
    return reward_row(loop, output.values, output.valid, output.parts)


# ---- what is refused -------------------------------------------------------------------------------------------------


def check(config: TrainConfig) -> None:
    """Refuses settings of this recipe that cannot work, before a model loads.

    Raises:
        ValueError: an unknown path or option, a reward without gradient, or a combination without meaning.
    """
    name, sampler = config.objective.name or "draft", config.sampler
    if name not in PATHS:
        raise ValueError(f"objective.name: {unknown_name('objective of recipe backprop', name, PATHS)}")
    path_options, loss_options = split_options(name, config.objective.options)
    PATHS[name](sampler.num_steps, seed=config.seed, iteration=0, **path_options)
    reward_loss(torch.zeros(1), **loss_options)
    for reward in config.rewards:
        if reward.weight and not can_be_differentiable(reward.name):
            what = reward.name or f"{reward.file}:{reward.function}"
            raise ValueError(_no_gradient(f"reward {what}"))
    if sampler.kernel != "ode":
        raise ValueError(
            f"recipe backprop follows the ODE, but sampler.kernel is {sampler.kernel}: set sampler.kernel=ode"
        )
    refuse_unread(config, _UNREAD, "recipe backprop")


def check_reward(loop: Loop) -> None:
    """Refuses rewards without gradient that only show once they are loaded.

    Raises:
        ValueError: names them.
    """
    members = zip(loop.reward.keys, loop.reward.rewards, loop.reward.weights, strict=True)
    wrong = [key for key, reward, weight in members if weight and not reward.differentiable]
    if wrong:
        raise ValueError(_no_gradient(f"reward {', '.join(wrong)}"))
    if loop.reward.kind not in ("pointwise", "remote"):
        raise ValueError(
            f"recipe backprop scores micro-batches, and reward {loop.reward.name} is {loop.reward.kind}: take rewards "
            "that judge each image by itself"
        )


def _no_gradient(what: str) -> str:
    return (
        f"recipe backprop trains on the gradient of the reward, and {what} has none: take a differentiable one, such "
        "as attributes, or another recipe; with weight 0 any reward is computed and logged"
    )


def split_options(name: str, options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Options of the path and options of the loss, checked; refl has the hinge and its published scale by default.

    Raises:
        ValueError: an unknown name or a wrong type.
    """
    of_path, of_loss = option_parameters(PATHS[name], _OF_RUN), option_parameters(reward_loss)
    for option in options:
        if option not in of_path and option not in of_loss:
            raise ValueError(f"objective {name!r}: {unknown_name('option', option, {**of_path, **of_loss})}")
    path_options = {key: value for key, value in options.items() if key in of_path}
    loss_options = {key: value for key, value in options.items() if key in of_loss}
    if name == "refl":
        loss_options = {"loss": "hinge", **loss_options}
        if loss_options["loss"] == "hinge":
            loss_options = {"scale": 1e-3, **loss_options}
    check_options(PATHS[name], path_options, owner=f"objective {name!r}", reserved=_OF_RUN)
    check_options(reward_loss, loss_options, owner=f"objective {name!r}")
    return path_options, loss_options
