"""Schedules, transition kernels, solvers, windows, rollouts and guidance of samplers: pure functions of tensors."""

from __future__ import annotations

from flowrl.samplers.guidance import Network as Network
from flowrl.samplers.guidance import Velocity as Velocity
from flowrl.samplers.kernels import KERNELS as KERNELS
from flowrl.samplers.kernels import Kernel as Kernel
from flowrl.samplers.rollout import ode_rollout as ode_rollout
from flowrl.samplers.rollout import rollout as rollout
from flowrl.samplers.schedules import build_schedule as build_schedule
from flowrl.samplers.transition import Transition as Transition
from flowrl.samplers.transition import gaussian_kl as gaussian_kl
from flowrl.samplers.transition import gaussian_log_prob as gaussian_log_prob
from flowrl.samplers.transition import published_kl as published_kl
