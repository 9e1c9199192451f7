"""Schedules, transition kernels, rollouts and guidance of flow-matching samplers: pure functions of tensors."""

from __future__ import annotations

from flowrl.samplers.guidance import Network, Velocity, classifier_free_guidance, conditioned
from flowrl.samplers.kernels import KERNELS, Kernel
from flowrl.samplers.parametrization import (
    clean_from_velocity,
    noise_from_velocity,
    score_from_velocity,
    velocity_from_clean,
    velocity_from_noise,
    velocity_from_score,
)
from flowrl.samplers.rollout import rollout
from flowrl.samplers.schedules import (
    GRIDS,
    build_schedule,
    diffusers_sigmas,
    dynamic_mu,
    dynamic_sigmas,
    linspace_sigmas,
    shift_sigma,
    unipc_flow_sigmas,
    window_starts,
    window_steps,
)
from flowrl.samplers.transition import Transition, cps_log_prob, gaussian_kl, gaussian_log_prob, published_kl

__all__ = [
    "GRIDS",
    "KERNELS",
    "Kernel",
    "Network",
    "Transition",
    "Velocity",
    "build_schedule",
    "classifier_free_guidance",
    "clean_from_velocity",
    "conditioned",
    "cps_log_prob",
    "diffusers_sigmas",
    "dynamic_mu",
    "dynamic_sigmas",
    "gaussian_kl",
    "gaussian_log_prob",
    "linspace_sigmas",
    "noise_from_velocity",
    "published_kl",
    "rollout",
    "score_from_velocity",
    "shift_sigma",
    "unipc_flow_sigmas",
    "velocity_from_clean",
    "velocity_from_noise",
    "velocity_from_score",
    "window_starts",
    "window_steps",
]
