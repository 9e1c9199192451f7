"""GRPO for flow-matching generators: `flowrl train configs/tiny_grpo_geneval.yaml [key=value ...]`

An iteration samples G images for each of P prompts with a stochastic kernel, scores them, turns rewards into
group-relative advantages, and updates the LoRA with the clipped surrogate at every stochastic step (Flow-GRPO,
arXiv 2505.05470; windows of stochastic steps: Flow-GRPO-Fast and MixGRPO, arXiv 2507.21802).

Letters: P prompts, G images a prompt, B = P * G, b rows of a micro-batch, K stochastic steps.

Deviations from the published code: the KL is exact (`kl_type: no_dt` is the published one); the last step is an ODE
step (there too it is never trained); groups of equal rewards are masked where they stand rather than re-packed; the
loss is divided by the number of live rows of the whole update, on all processes; gradients are summed in float64 over
micro-batches and processes, so that their number does not change the result.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flowrl.advantages import group_advantages, zero_variance_groups
from flowrl.config import SamplerConfig, TrainConfig, resolve_path
from flowrl.credit import outcome_rows
from flowrl.evaluate import evaluate
from flowrl.learner import GradientSum, Statistics, clock
from flowrl.losses import clipped_above, clipped_below, clipped_surrogate
from flowrl.parts import encode_everything, load_parts, sampler_of
from flowrl.pipelines import Pipeline
from flowrl.pipelines.lora import Policy
from flowrl.progress import progress
from flowrl.prompts import Prompt, eval_items, prompts_of_iteration, read_prompts
from flowrl.randomness import counter_integers, sample_normals
from flowrl.rewards import RewardInputs
from flowrl.rewards.compose import WeightedSum
from flowrl.run import Run
from flowrl.samplers import (
    Kernel,
    Transition,
    Velocity,
    classifier_free_guidance,
    gaussian_kl,
    gaussian_log_prob,
    published_kl,
    rollout,
    window_steps,
)
from flowrl.trajectory import Conditioning, Rows, Schedule, Trajectory

CONSTANT_REWARD_LIMIT = 3  # iterations in a row whose images all got the same reward before the run stops


def main(config: TrainConfig, run: Run) -> bool:
    """Trains to the end or to an interrupt; returns whether it finished. Everything it makes lies in the run folder."""
    geometry = config.resolve_batch(run.world)
    pipeline, policy, reward = load_parts(config, run)
    train_prompts = read_prompts(resolve_path(config.prompts.train))
    kernel, schedule = sampler_of(config.sampler, pipeline)
    negative = pipeline.encode([""])
    if config.pipeline.free_text_encoders:
        encode_everything(config, pipeline, train_prompts)
    optimizer = torch.optim.AdamW(
        policy.parameters.values(), lr=config.optim.lr, betas=config.optim.betas, eps=config.optim.eps,
        weight_decay=config.optim.weight_decay,
    )  # fmt: skip
    state = run.load_checkpoint()
    first = 0 if state is None else restore(state, policy, optimizer)
    counters = {"updates": 0, "constant": 0} if state is None else dict(state["counters"])
    own = range(run.rank * geometry.images_per_process, (run.rank + 1) * geometry.images_per_process)

    def velocity_of(cond: Conditioning) -> Velocity:
        return classifier_free_guidance(pipeline.network, cond, negative, config.sampler.guidance_scale)

    if first == 0 and config.eval_every:
        log_evaluation(config, run, pipeline, policy, reward, 0)
    with progress("training", config.num_iterations, first, enabled=run.main and config.progress) as advance:
        for iteration in range(first, config.num_iterations):
            seconds: dict[str, float] = defaultdict(float)
            begun = time.perf_counter()

            # 1. Rollout: sample with the current policy; keep the states of the stochastic steps and their densities.
            chosen = prompts_of_iteration(len(train_prompts), config.prompts_per_step, config.seed, iteration)
            prompts = [train_prompts[chosen[i // config.group_size]] for i in own]
            cond = pipeline.encode([prompt.text for prompt in prompts])
            steps = stochastic_steps(config.sampler, config.seed, iteration)
            with clock(seconds, "rollout"), torch.no_grad():
                parts = []
                for start in range(0, len(own), geometry.rollout_batch_size):
                    batch = slice(start, start + geometry.rollout_batch_size)
                    x, noise = noise_of(config, pipeline.latent_shape, iteration, own[batch], run.device)
                    parts.append(rollout(velocity_of(cond[batch]), x, schedule, kernel, noise, stochastic=steps))
                trajectory = Trajectory.cat(parts)

            # 2. Rewards and group-relative advantages, over the images of all processes.
            with clock(seconds, "reward"):
                output = reward(reward_inputs(config, prompts, pipeline.decode(trajectory.final), own))
                reward_B, valid_B = run.gather(output.values.to(run.device)), run.gather(output.valid.to(run.device))
            check_rewards(reward_B, valid_B, counters, iteration)
            advantage_B = group_advantages(
                reward_B.double(), config.group_size, config.adv_std, baseline=config.adv_baseline, valid_B=valid_B
            ).clamp(-config.adv_clip_range, config.adv_clip_range)
            dead_P = zero_variance_groups(reward_B, config.group_size, valid_B=valid_B)
            keep_B = valid_B & ~dead_P.repeat_interleave(config.group_size)
            local = slice(own.start, own.stop)
            group_B = torch.arange(own.start, own.stop, device=run.device) // config.group_size
            rows = outcome_rows(
                trajectory, advantage_B[local].float(), group_B, clip_range=config.clip_bounds, keep_B=keep_B[local]
            )

            # 3. Update: score the stored transitions again under the policy that changes.
            with clock(seconds, "update"):
                states, blocks = trajectory.states.flatten(0, 1), row_blocks(rows, geometry.micro_batch_size)
                if geometry.micro_batch_size != geometry.rollout_batch_size:
                    rows = with_old_log_probs(rows, blocks, states, cond, velocity_of, schedule, kernel)
                stats, first_update = Statistics(), True
                for part in range(config.updates_per_rollout):
                    own_blocks = [b for block in blocks[part :: config.updates_per_rollout] for b in block]
                    live = sum(int(rows.keep[index].sum()) for index in own_blocks)
                    live = int(run.accelerator.reduce(torch.tensor(live, device=run.device)).item())
                    if live == 0:
                        continue
                    gradient = GradientSum(policy, counters, scale_loss=config.pipeline.dtype == "float16")
                    for index in own_blocks:
                        batch_rows = rows[index]
                        if not bool(batch_rows.keep.any()):
                            continue
                        velocity = velocity_of(cond[batch_rows.sample])
                        reference = None
                        if config.kl_coef > 0:
                            with torch.no_grad(), policy.under("reference"):
                                reference = replay(batch_rows, states, velocity, schedule, kernel)
                        new = replay(batch_rows, states, velocity, schedule, kernel)
                        loss_b = losses_of(batch_rows, states, new, reference, schedule, config, stats)
                        gradient.add((loss_b * batch_rows.keep).sum() / live)
                    if first_update:
                        check_first_ratio(stats, run, config, iteration)
                        first_update = False
                    stats.note("grad_norm", gradient.apply(run, optimizer, config.optim.max_grad_norm, iteration))
                    counters["updates"] += 1
                    if "ema" in policy.slots and counters["updates"] % config.policy.ema_every == 0:
                        done = counters["updates"] // config.policy.ema_every
                        policy.blend("ema", min(config.policy.ema_decay, (1 + done) / (10 + done)))

            # 4. Log, evaluate, save.
            parts_B = {name: run.gather(value.to(run.device)) for name, value in output.parts.items()}
            row = reward_metrics(reward_B, valid_B, parts_B, advantage_B, dead_P) | stats.means(run)
            row |= {"live_rows": stats.rows(run), "num_images": config.num_images, "lr": config.optim.lr}
            row |= {f"seconds/{stage}": round(value, 4) for stage, value in seconds.items()}
            run.log({"iteration": iteration} | row | {"seconds": round(time.perf_counter() - begun, 4)})
            advance(f"reward {row['reward']:.3f}  {time.perf_counter() - begun:.1f} s/it")
            finished, stop = iteration + 1, run.should_stop()
            last = finished == config.num_iterations
            if config.eval_every and (last or finished % config.eval_every == 0) and not (stop and not last):
                log_evaluation(config, run, pipeline, policy, reward, finished)
            if last or stop or finished % config.checkpoint_every == 0:
                save(config, run, pipeline, policy, optimizer, finished, counters)
            if stop and not last:
                return False
    return True


# ---- rollout ---------------------------------------------------------------------------------------------------------


def stochastic_steps(settings: SamplerConfig, seed: int, iteration: int) -> tuple[int, ...]:
    """Stochastic steps of an iteration: the whole range, or a window whose place is drawn from (seed, iteration)."""
    low, high = settings.stochastic_range
    size = settings.sde_window_size or high - low
    start = counter_integers(low, high - size + 1, seed, "window", iteration)
    return window_steps(settings.num_steps, size, low, high, start)


def noise_of(config: TrainConfig, shape: Sequence[int], iteration: int, images: range, device: torch.device) -> Any:
    """Start noise `[b, *latent]` and the step noise function of some images of an iteration.

    Every number is a function of (seed, iteration, group, image in the group, step).
    """
    places = [(i // config.group_size, 0 if config.same_latent else i % config.group_size) for i in images]
    start = sample_normals(shape, [(config.seed, "start", iteration, group, k) for group, k in places]).to(device)

    def step_noise(step: int) -> Tensor:
        keys = [(config.seed, "step", iteration, i // config.group_size, i % config.group_size, step) for i in images]
        return sample_normals(shape, keys).to(device)

    return start, step_noise


def reward_inputs(config: TrainConfig, prompts: Sequence[Prompt], images: Tensor, own: range) -> RewardInputs:
    """What the rewards see of this process's images."""
    return RewardInputs(
        prompts=[prompt.text for prompt in prompts],
        images=images,
        metadata=[prompt.metadata for prompt in prompts],
        group_ids=torch.tensor([i // config.group_size for i in own]),
        sample_ids=torch.tensor(list(own)),
    )


def check_rewards(reward_B: Tensor, valid_B: Tensor, counters: dict[str, int], iteration: int) -> None:
    """Stops a run whose reward says nothing: no valid value, or the same value for every image again and again."""
    if not bool(valid_B.any()):
        raise ValueError(f"iteration {iteration}: no image got a valid reward, so there is nothing to learn from")
    values = reward_B[valid_B]
    counters["constant"] = counters["constant"] + 1 if bool((values == values[0]).all()) else 0
    if counters["constant"] >= CONSTANT_REWARD_LIMIT:
        raise ValueError(
            f"the reward was {float(values[0]):g} for every image in {CONSTANT_REWARD_LIMIT} iterations in a row, so "
            "nothing can be learned: check that the reward reads the images, and prefer one that grades partial success"
        )


# ---- update ----------------------------------------------------------------------------------------------------------


def row_blocks(rows: Rows, size: int) -> list[list[Tensor]]:
    """Row indexes in micro-batches of `size` rows that share a step, a list a block of samples, steps ascending.

    Order and composition of the samples are those of the rollout, so that equal sizes replay equal batches.
    """
    by_step = [torch.nonzero(rows.step == step).flatten() for step in rows.step.unique(sorted=True)]
    return [list(block) for block in zip(*(index.split(size) for index in by_step), strict=True)]


def replay(rows: Rows, states: Tensor, velocity: Velocity, schedule: Schedule, kernel: Kernel) -> Transition:
    """The transition that a policy gives at the stored states of rows that share a step."""
    step = int(rows.step[0])
    x, sigma = states[rows.source], schedule.sigma[step]
    return kernel(x, velocity(x, sigma, schedule.timestep[step]), sigma, schedule.sigma[step + 1])


@torch.no_grad()
def with_old_log_probs(
    rows: Rows, blocks: list[list[Tensor]], states: Tensor, cond: Conditioning, velocity_of: Any, schedule: Schedule,
    kernel: Kernel,
) -> Rows:  # fmt: skip
    """Rows whose old log-probs are computed in the update's own micro-batches.

    Networks answer a little differently at another batch size; the ratio must not see that.
    """
    old = rows.old_log_prob.clone()
    for index in (b for block in blocks for b in block):
        part = rows[index]
        transition = replay(part, states, velocity_of(cond[part.sample]), schedule, kernel)
        old[index] = gaussian_log_prob(states[part.produced], transition)
    return Rows(**{**rows.columns(), "old_log_prob": old})


def losses_of(
    rows: Rows, states: Tensor, new: Transition, reference: Transition | None, schedule: Schedule, config: TrainConfig,
    stats: Statistics,
) -> Tensor:  # fmt: skip
    """Loss of each row: clipped surrogate plus KL; `log_ratio: mean` takes both per latent dimension."""
    dims = new.mean[0].numel() if config.log_ratio == "mean" else 1
    log_ratio = (gaussian_log_prob(states[rows.produced], new) - rows.old_log_prob) / dims
    policy_loss = clipped_surrogate(log_ratio, rows.advantage, clip_low=rows.clip_low, clip_high=rows.clip_high)
    loss = policy_loss
    if reference is not None:
        step = int(rows.step[0])
        if config.kl_type == "exact":
            kl = gaussian_kl(new, reference) / dims
        else:
            published_step = None if config.sampler.kernel == "cps" else schedule.sigma[step] - schedule.sigma[step + 1]
            kl = published_kl(new, reference, step_size=published_step) / dims
        loss = loss + config.kl_coef * kl
        stats.add(rows.keep, kl=kl)
    above = clipped_above(log_ratio, rows.advantage, clip_high=rows.clip_high)
    below = clipped_below(log_ratio, rows.advantage, clip_low=rows.clip_low)
    stats.add(
        rows.keep, loss=loss, policy_loss=policy_loss, ratio_mean=log_ratio.exp(), clip_fraction=(above | below),
        approx_kl=0.5 * log_ratio.square(),
    )  # fmt: skip
    stats.maximum("ratio_max_deviation", (log_ratio.exp() - 1).abs()[rows.keep])
    return loss * rows.weight


def check_first_ratio(stats: Statistics, run: Run, config: TrainConfig, iteration: int) -> None:
    """Before the first update of an iteration the policy is the one that sampled: its ratio must be 1."""
    deviation = stats.largest("ratio_max_deviation", run)
    stats.note("ratio_first_deviation", torch.tensor(deviation))
    if deviation > min(config.clip_bounds):
        raise ValueError(
            f"iteration {iteration}: before any update the importance ratio differs from 1 by {deviation:.2g}, more "
            f"than clip_range {min(config.clip_bounds):g}: sampling and scoring do not agree (non-deterministic "
            "kernels, dropout, or a dtype too coarse); try pipeline.dtype=float32"
        )


# ---- metrics, evaluation, saving -------------------------------------------------------------------------------------


def reward_metrics(
    reward_B: Tensor, valid_B: Tensor, parts_B: dict[str, Tensor], advantage_B: Tensor, dead_P: Tensor
) -> dict[str, float]:
    """Means over the images of all processes."""
    values = reward_B[valid_B].double()
    row = {"reward": float(values.mean()), "reward_std": float(values.std(correction=0))}
    row |= {name: float(value.double().nanmean()) for name, value in parts_B.items()}
    row |= {"advantage_abs": float(advantage_B.abs().mean()), "zero_std_ratio": float(dead_P.double().mean())}
    return row | {"invalid_ratio": float((~valid_B).double().mean())}


def eval_slot(config: TrainConfig, policy: Policy) -> str:
    """The weights that are evaluated and shipped: the average where there is one."""
    return "ema" if config.eval.ema and "ema" in policy.slots else "policy"


def log_evaluation(
    config: TrainConfig, run: Run, pipeline: Pipeline, policy: Policy, reward: WeightedSum, iteration: int
) -> None:
    """Evaluates the held-out prompts and logs the scores."""
    assert config.prompts.eval is not None
    begun = time.perf_counter()
    settings, sampler = config.eval, config.sampler
    items = eval_items(
        read_prompts(resolve_path(config.prompts.eval)),
        num_prompts=settings.num_prompts, samples_per_prompt=settings.samples_per_prompt,
    )  # fmt: skip
    scale = sampler.guidance_scale if settings.guidance_scale is None else settings.guidance_scale
    schedule = pipeline.schedule(settings.num_steps or sampler.num_steps, settings.grid or sampler.grid)
    with policy.under(eval_slot(config, policy)):
        row = evaluate(
            run, pipeline, reward, items, schedule, iteration=iteration, guidance_scale=scale,
            batch_size=settings.batch_size, seed=settings.seed, num_images=settings.num_images, show=config.progress,
        )  # fmt: skip
    run.log({"iteration": iteration, **row, "seconds/eval": round(time.perf_counter() - begun, 4)})


def save(
    config: TrainConfig, run: Run, pipeline: Pipeline, policy: Policy, optimizer: torch.optim.Optimizer, finished: int,
    counters: dict[str, int],
) -> None:  # fmt: skip
    """Writes a checkpoint, and the LoRA for stock diffusers under `lora/`."""
    state = {
        "iteration": finished,
        "policy": policy.tensors(),
        "slots": {slot: dict(tensors) for slot, tensors in policy.slots.items()},
        "optimizer": optimizer.state_dict(),
        "counters": dict(counters),
    }
    if run.main:  # before the checkpoint: a run that is killed between the two writes both again
        with policy.under(eval_slot(config, policy)):
            save_lora(run.folder / "lora", pipeline, policy)
    run.save_checkpoint(finished, state, config.keep_checkpoints)


def save_lora(folder: Path, pipeline: Pipeline, policy: Policy) -> None:
    """Replaces the LoRA in a folder in one step."""
    staged = pipeline.save_lora(folder.with_name(".lora.writing"), policy.tensors(), policy.config)
    folder.mkdir(exist_ok=True)
    staged.replace(folder / staged.name)
    staged.parent.rmdir()


def restore(state: dict[str, Any], policy: Policy, optimizer: torch.optim.Optimizer) -> int:
    """Puts a checkpoint back; returns the number of finished iterations."""
    policy.load(state["policy"])
    for slot, tensors in state["slots"].items():
        for name, tensor in tensors.items():
            policy.slots[slot][name].copy_(tensor)
    optimizer.load_state_dict(state["optimizer"])
    return int(state["iteration"])
