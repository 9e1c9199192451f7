"""From the sampler's settings to its kernel; refuses what a kernel cannot do before a model loads."""

from __future__ import annotations

from dataclasses import replace

from flowrl.config.foreign import foreign_words
from flowrl.config.sections import SamplerConfig
from flowrl.config.spelling import closest
from flowrl.samplers import KERNELS, Kernel


def kernel_of(settings: SamplerConfig) -> Kernel:
    """The kernel with its settings bound, except the schedule's sigma_max. Raises ValueError: unknown kernel, a noise
    level that it does not have, or no published log-probability."""
    name = settings.kernel
    if name not in KERNELS:
        near = foreign_words().kernels.get(name) or closest(name, list(KERNELS))
        hint = f": did you mean {near!r}?" if near else ""
        raise ValueError(f"sampler.kernel must be one of {', '.join(KERNELS)}, got {name!r}{hint}")
    kernel = KERNELS[name]
    if settings.noise_level is not None:
        try:
            kernel = replace(kernel, noise_level=settings.noise_level)
        except ValueError as error:
            raise ValueError(f"sampler.{error}") from None
    if settings.log_prob == "gaussian":
        return kernel
    if kernel.published_log_prob is None:
        have = ", ".join(other.name for other in KERNELS.values() if other.published_log_prob is not None)
        raise ValueError(
            f"sampler.log_prob=published is what released code takes for the log-density of {have}, and "
            f"sampler.kernel is {name}: set sampler.kernel={have}, or sampler.log_prob=gaussian"
        )
    return replace(kernel, log_prob=kernel.published_log_prob)


def check_sampler(settings: SamplerConfig) -> None:
    """Refuses settings that do not fit the kernel."""
    kernel, steps = kernel_of(settings), settings.num_steps
    if not kernel.stochastic:
        if settings.noise_level:
            raise ValueError(
                f"sampler.noise_level is {settings.noise_level:g}, but kernel {kernel.name} adds no noise: remove "
                "noise_level"
            )
        if settings.noise_levels is not None or settings.calibration.iterations:
            key = "calibration" if settings.noise_levels is None else "noise_levels"
            raise ValueError(
                f"sampler.{key} is about the noise of steps, and kernel {kernel.name} adds none: remove it"
            )
        return
    for level in settings.noise_levels or ():
        if level > kernel.highest_level:
            raise ValueError(
                f"sampler.noise_levels of {kernel.name} lie in (0, {kernel.highest_level:g}], got {level:g}: lower it"
            )
    low, high = settings.stochastic_range
    if not 0 <= low < high <= steps:
        raise ValueError(
            f"sampler.sde_window_range [{low}, {high}] is half-open and must satisfy 0 <= low < high <= num_steps "
            f"({steps}): change the range or num_steps"
        )
    if settings.sde_window_size > high - low:
        raise ValueError(
            f"sampler.sde_window_size ({settings.sde_window_size}) is larger than sde_window_range [{low}, {high}], "
            f"which holds {high - low} steps: lower the size, widen the range or raise num_steps ({steps})"
        )
    if kernel.silent_last_step and high == steps:
        raise ValueError(
            f"sampler.sde_window_range [{low}, {high}] includes the last of {steps} steps, where kernel {kernel.name} "
            f"adds no noise (its std is 0 at sigma_next = 0) and so has no density: end the range at {steps - 1}"
        )


def check_density(settings: SamplerConfig, owner: str) -> None:
    """Refuses a sampler without noise if the run needs densities of its steps, and what `check_sampler` refuses."""
    check_sampler(settings)
    if not KERNELS[settings.kernel].stochastic:
        choose = ", ".join(kernel.name for kernel in KERNELS.values() if kernel.stochastic)
        raise ValueError(
            f"sampler.kernel {settings.kernel} has no density, so no importance ratio, and {owner} needs one: "
            f"choose one of {choose}"
        )
    if settings.noise_level == 0:
        raise ValueError(
            f"sampler.noise_level 0 makes kernel {settings.kernel} deterministic: it has no density, so no importance "
            f"ratio, and {owner} needs one; raise it, or remove the key to take the kernel's default"
        )
