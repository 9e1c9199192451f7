"""Schedules, transition kernels, solvers, windows, rollouts and guidance of samplers: pure functions of tensors."""

from __future__ import annotations

from flowrl.samplers.diffusion import (
    PREDICTIONS,
    DiffusionSchedule,
    ddim,
    leading_schedule,
    scaled_linear_alpha_bar,
)
from flowrl.samplers.guidance import Network, Velocity, classifier_free_guidance, conditioned
from flowrl.samplers.kernels import KERNELS, Kernel
from flowrl.samplers.multistep import dpm_sde_step, dpm_step, solve, solver_order
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
from flowrl.samplers.windows import (
    WINDOW_STRATEGIES,
    branch_start,
    exponential_decay,
    flash_points,
    flash_tail,
    leading,
    linear_decay,
    mixgrpo_window,
    random_subset,
    sub_schedule,
    thinned_steps,
)

__all__ = [
    "GRIDS",
    "KERNELS",
    "PREDICTIONS",
    "WINDOW_STRATEGIES",
    "DiffusionSchedule",
    "Kernel",
    "Network",
    "Transition",
    "Velocity",
    "branch_start",
    "build_schedule",
    "classifier_free_guidance",
    "clean_from_velocity",
    "conditioned",
    "cps_log_prob",
    "ddim",
    "diffusers_sigmas",
    "dpm_sde_step",
    "dpm_step",
    "dynamic_mu",
    "dynamic_sigmas",
    "exponential_decay",
    "flash_points",
    "flash_tail",
    "gaussian_kl",
    "gaussian_log_prob",
    "leading",
    "leading_schedule",
    "linear_decay",
    "linspace_sigmas",
    "mixgrpo_window",
    "noise_from_velocity",
    "published_kl",
    "random_subset",
    "rollout",
    "scaled_linear_alpha_bar",
    "score_from_velocity",
    "shift_sigma",
    "solve",
    "solver_order",
    "sub_schedule",
    "thinned_steps",
    "unipc_flow_sigmas",
    "velocity_from_clean",
    "velocity_from_noise",
    "velocity_from_score",
    "window_starts",
    "window_steps",
]
