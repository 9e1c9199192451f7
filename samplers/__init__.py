"""Schedules, transition kernels, solvers, windows, rollouts and guidance of samplers: pure functions of tensors."""

from __future__ import annotations

from flowrl.samplers.guidance import Network, Velocity
from flowrl.samplers.kernels import KERNELS, Kernel
from flowrl.samplers.rollout import ode_rollout, rollout
from flowrl.samplers.schedules import build_schedule
from flowrl.samplers.transition import Transition, gaussian_kl, gaussian_log_prob, published_kl

__all__ = [
    "KERNELS",
    "Kernel",
    "Network",
    "Transition",
    "Velocity",
    "build_schedule",
    "gaussian_kl",
    "gaussian_log_prob",
    "ode_rollout",
    "published_kl",
    "rollout",
]
