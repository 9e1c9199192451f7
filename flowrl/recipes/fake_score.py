"""Distribution matching beside the policy loss of recipe grpo: `flowrl train tiny_rtdmd [key=value ...]`

The last step of a path has no noise, so its ratio is 1 and the policy loss says nothing about it. There the policy
learns to draw as the teacher does, which is the model without the LoRA, under guidance (RTDMD, arXiv 2605.26108, from
DMD2, arXiv 2405.14867). A fake score is a second LoRA on the same weights. It learns by flow matching what the policy
draws; if it and the teacher disagree about a noised image, the policy's distribution is not the teacher's
(`flowrl.objectives.distillation.distribution_matching`).

Deviations from RTDMD's code: the fake score starts as a copy of the policy; levels are even on [0.02, 0.98] for both of
its losses, which have no weight of the level; without AC-DMD's consistency of the fake score (weight 0.01) and the
reward's own gradient (1e-4). AC-DMD noises from the level where a step ends, and the last one ends at 0: that is DMD.
DMD2 draws images for every update of the fake score; here all updates before one of the policy have its images, with
other noise. With `updates_per_rollout` above 1 the noised images are those of a policy that is a few updates old.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flowrl.config.methods import DmdConfig
from flowrl.config.strict_yaml import refuse
from flowrl.config.train import TrainConfig
from flowrl.objectives.distillation import distribution_matching, noise_level
from flowrl.objectives.forward_losses import noised
from flowrl.objectives.terms import mean_squared_error
from flowrl.runtime.placement import sent, taken
from flowrl.runtime.randomness import Part, sample_normals
from flowrl.samplers.parametrization import clean_from_velocity
from flowrl.training.learner import GradientSum, Statistics, total_of
from flowrl.training.optimizers import FAKE
from flowrl.training.record import Recording


def matched_images(record: Recording, update: int) -> Tensor:
    """Images `[n]` of one of an iteration's updates; empty if nothing is matched."""
    count = len(record.sampled.finished) if record.loop.config.dmd.weight > 0 else 0
    return torch.arange(count)[update :: record.loop.config.updates_per_rollout]


def learn(record: Recording, images: Tensor, stats: Statistics) -> None:
    """Updates the fake score before an update of the policy: `mse(v_f, noise - clean)`."""
    loop, count = record.loop, len(images) and total_of(record.loop.run, len(images))
    for number in range(loop.config.dmd.fake_updates if count else 0):
        gradient = loop.gradient()
        with loop.policy.under(FAKE):
            for index in images.split(loop.geometry.micro_batch_size):
                clean, noise, sigma, timestep = _noise(record, index, "fake score", number)
                velocity = loop.velocity(record.asked.cond_of(record.sampled.finished_group[index]), 1.0)
                with loop.network.counting("update"):
                    predicted = velocity(noised(clean, noise, sigma), sigma, timestep)
                error = mean_squared_error(predicted, noise - clean)
                stats.mean(None, fake_error=error)
                gradient.add(error.sum() / count)
            gradient.apply(loop.run, loop.learners[FAKE], loop.config.optim.max_grad_norm, loop.iteration)


def match(record: Recording, images: Tensor, gradient: GradientSum, stats: Statistics) -> None:
    """Adds up the gradient of an update's distribution matching. Teacher and fake score come before the graph, since
    weights must not change between a forward pass and its backward pass."""
    loop, sampled, schedule, settings = record.loop, record.sampled, record.schedule, record.loop.config.dmd
    count, start = total_of(loop.run, len(images)), schedule.sigma[-2]
    before = sampled.produced[sampled.step == schedule.num_steps - 2]  # [n], in the order of the images
    for index in images.split(loop.geometry.micro_batch_size):
        clean, noise, sigma, timestep = _noise(record, index, "matching", 0)
        x, cond = noised(clean, noise, sigma), record.asked.cond_of(sampled.finished_group[index])
        estimates = list[Tensor]()
        for slot, scale in (("reference", settings.guidance_scale), (FAKE, 1.0)):
            with torch.no_grad(), loop.policy.under(slot), loop.network.counting("reference"):
                estimates.append(clean_from_velocity(x, loop.velocity(cond, scale)(x, sigma, timestep), sigma))
        source = record.latents(before[index])
        with loop.network.counting("update"):
            student = clean_from_velocity(source, loop.velocity(cond)(source, start, schedule.timestep[-1]), start)
        loss = distribution_matching(student, clean, *estimates)
        stats.mean(None, dmd_loss=loss)
        gradient.add(settings.weight * loss.sum() / count)


def _noise(record: Recording, index: Tensor, tag: str, number: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Finished latents `[b, *latent]`, their noise, and `[b]` noise levels with the network's times."""
    loop, size = record.loop, record.loop.geometry.images_per_process
    images = index // size * loop.config.num_images + loop.run.rank * size + index % size  # whichever process
    keys: list[tuple[Part, ...]] = [(loop.config.seed, tag, loop.iteration, number, int(i)) for i in images]
    clean = taken(record.sampled.finished, index, loop.device)
    noise = sent(sample_normals(loop.pipeline.latent_shape, keys), clean.device)
    sigma = torch.tensor([noise_level(record.schedule.highest_sigma, "level", *key) for key in keys])
    return clean, noise, sigma, record.schedule.timestep_of(sigma)


def check_dmd(config: TrainConfig) -> None:
    """Refuses settings of distribution matching that cannot work. Raises ConfigError: says what to change."""
    dmd, sampler, last = config.dmd, config.sampler, config.sampler.num_steps - 1
    refuse(
        (
            dmd.weight == 0 and dmd != DmdConfig(),
            "dmd.weight is 0, so there is no fake score: set it above 0, or remove the other keys of dmd",
        ),
        (
            dmd.weight > 0 and (sampler.sde_window_size > 0 or sampler.stochastic_range[1] != last),
            f"dmd.weight is {dmd.weight:g}, so the last step of every path is trained, and the one before it has to "
            f"have noise: set sampler.sde_window_size=0, and let sampler.sde_window_range end at {last} or be null",
        ),
    )
