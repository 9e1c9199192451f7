"""Settings of the forward-process recipe: options, copies of the policy, sizes of micro-batches, and their checks."""

from __future__ import annotations

from dataclasses import dataclass

from flowrl.config.methods import TimesConfig
from flowrl.config.options import build_parts, entry_of
from flowrl.config.readers import refuse_unread
from flowrl.config.train import Geometry, TrainConfig, largest_fitting, resolve_path
from flowrl.objectives.forward_losses import FORWARD, ForwardMethod, Loss, Sft, old_decay
from flowrl.prompts.pairs import read_shown
from flowrl.recipes.counting import STEP, Counts, Passes, RecipeCounts, RolloutRecord, draws_nothing, walked
from flowrl.samplers.times import permuted_steps, steps_in_reach, strata
from flowrl.training.assignment import check_advantages, check_routed
from flowrl.training.parts import model_family
from flowrl.training.processes.mesh import data_ranks

_SAMPLING_DECAY = "delayed"  # of crd's second copy, as published


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """Options of every objective of this recipe, besides those of its loss in `objective.options`."""

    guidance_scale: float | None = None
    """Guidance of the trained velocity, and of the old policy's; null takes `sampler.guidance_scale`."""
    reference_guidance_scale: float | None = None
    """Guidance of the reference; null takes that of training."""
    old_kl_coef: float = 0.0
    """Weight of the squared distance to the old policy's velocity (AWM's proximal term)."""

    def __post_init__(self) -> None:
        for name in ("guidance_scale", "reference_guidance_scale", "old_kl_coef"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ValueError(f"option {name} must not be negative, got {value:g}")


@dataclass(frozen=True, kw_only=True, slots=True)
class ForwardObjective:
    """What a run trains with: an entry of `FORWARD`, its loss with options, and those of the recipe."""

    name: str
    method: ForwardMethod
    loss: Loss
    options: Options

    @property
    def images_file(self) -> str | None:
        """The file of the images to train on; None if they are sampled."""
        return self.loss.images if isinstance(self.loss, Sft) else None

    @property
    def keeps_old(self) -> bool:
        """Whether the loss reads the old policy's velocity."""
        return self.loss.reads_old or self.options.old_kl_coef > 0

    @property
    def whole_groups(self) -> bool:
        """Whether a micro-batch must hold whole groups; the best images are chosen from whole groups before."""
        return self.method.group_complete and not self.method.best_only

    @property
    def sampled_by(self) -> str:
        """The weights to sample images with."""
        return self.method.sampled_by or ("old" if self.loss.reads_old else "policy")


def objective_of(config: TrainConfig) -> ForwardObjective:
    """What a configuration trains with. Raises ValueError: an unknown objective or option, or a bad value."""
    name = config.objective.name or "nft"
    method = entry_of(FORWARD, name, "objective of recipe forward", owner="objective.name")
    options, loss = build_parts((Options, method.options), config.objective.options, owner=f"objective {name!r}")
    return ForwardObjective(name=name, method=method, loss=loss, options=options)


def trained_scale(config: TrainConfig) -> float:
    """Guidance of the trained velocity."""
    own = objective_of(config).options.guidance_scale
    return config.sampler.guidance_scale if own is None else own


def only_here(config: TrainConfig) -> str:
    """Why workers cannot draw for a run; empty where they can."""
    return draws_nothing(config, "images") if objective_of(config).images_file else ""


def slot_decays(config: TrainConfig) -> dict[str, str]:
    """The copies of the policy that a method keeps, and how each follows."""
    objective = objective_of(config)
    decays = {"old": config.slots.old_decay} if objective.keeps_old else {}
    return decays | ({"sampling": _SAMPLING_DECAY} if objective.sampled_by == "sampling" else {})


def counts(config: TrainConfig) -> RecipeCounts:
    """What a run counts before it starts."""
    objective, sampler = objective_of(config), config.sampler
    options, method = objective.options, objective.method
    scale = trained_scale(config)
    reference = scale if options.reference_guidance_scale is None else options.reference_guidance_scale
    images = 1 if method.best_only else config.best_of or config.group_size
    drawn = 0 if objective.images_file else config.num_images
    trained = config.prompts_per_step * images * config.times.count

    def of_iteration(iteration: int, passes: Passes, geometry: Geometry) -> Counts:
        others = passes(scale) if objective.keeps_old else 0
        others += passes(reference) if method.needs_reference or config.kl_coef > 0 else 0
        return Counts(
            rollout=drawn * sampler.num_steps * passes(sampler.guidance_scale),
            update=trained * passes(scale),
            backward=trained * walked(sampler.train_negative, scale, passes),
            reference=trained * others,
            images=drawn,
        )

    def record() -> RolloutRecord:
        if objective.images_file:
            return RolloutRecord(held=config.num_images)
        return RolloutRecord(columns=(drawn,), batches=((2 + STEP, drawn),))

    return RecipeCounts(
        objective=objective.name,
        of_iteration=of_iteration,
        exact=True,
        slots=len(slot_decays(config)),
        multiple=config.group_size if objective.whole_groups else 1,
        micro_batch_size=lambda ranks: micro_batch_size(config, ranks),
        record=record,
    )


def decay_of(config: TrainConfig, kind: str, updates: int) -> float:
    """Decay of a copy after so many optimizer updates."""
    return config.slots.old_decay_value if kind == "constant" else old_decay(kind, updates)


def check(config: TrainConfig) -> None:
    """Refuses settings of this recipe that cannot work, before a model loads. Raises ValueError: an unknown method or
    option, or a combination without meaning, with what to change."""
    objective, sampler = objective_of(config), config.sampler
    name, method = objective.name, objective.method
    if "reference_guidance_scale" in config.objective.options and not (method.needs_reference or config.kl_coef > 0):
        raise ValueError(
            f"objective {name!r}: reference_guidance_scale is set, but no reference is evaluated: set kl_coef above 0, "
            "or remove the option"
        )
    if method.needs_reference and config.kl_reference != "base":
        raise ValueError(
            f"objective {name!r} compares with the model as it was loaded, and kl_reference is {config.kl_reference}: "
            "a run evaluates one reference, so remove kl_reference"
        )
    if sampler.kernel != "ode":
        raise ValueError(
            f"recipe forward needs no density of the sampler and samples by the ODE, got sampler.kernel "
            f"{sampler.kernel}: set sampler.kernel=ode, and remove sampler.noise_level"
        )
    readers = ["matching", *readers_of_times(config.times)]
    if objective.images_file is None:
        readers += ["rollout", "tail"]
        readers += [] if method.weighs_rewards else ["advantages"]
        readers += ["best"] if method.best_only else []
        readers += [] if method.group_complete or method.weighs_rewards else ["extremes"]
    else:
        check_images(config, objective.images_file)
    readers += ["copies"] if slot_decays(config) else []
    refuse_unread(config, readers, f"objective {name} of recipe forward")
    check_advantages(config)
    check_routed(config, by_parts=method.by_parts, compares=not method.weighs_rewards)
    check_times(config)
    for kind in slot_decays(config).values():
        decay_of(config, kind, 0)
    micro_batch_size(config, data_ranks(config))


def check_images(config: TrainConfig, file: str) -> None:
    """Refuses a file of images that cannot be read, and models that do not train on single images."""
    read_shown(resolve_path(file))
    family = model_family(config.pipeline)
    if family.videos or (family.num_sources or (0, 0))[0] > 0:
        raise ValueError("objective sft trains on images, and this model makes videos or edits: take a model of images")


def readers_of_times(times: TimesConfig) -> list[str]:
    """Readers of configuration keys in training on noised images (`flowrl.config.readers`)."""
    return ["noised", "continuous" if times.kind in ("logit_normal", "uniform") else "stepped"]


def check_times(config: TrainConfig) -> None:
    """Refuses noise levels that cannot be drawn."""
    times = config.times
    if times.kind in ("logit_normal", "uniform"):
        return
    reach = steps_in_reach(times.kind, config.sampler.num_steps, times.fraction)
    if times.kind == "schedule":
        permuted_steps(reach, times.count, "check")
    else:
        strata(times.kind, reach, times.count)


def micro_batch_size(config: TrainConfig, world: int) -> int:
    """Images of one backward pass; a multiple of the group size if the loss looks at whole groups. Raises
    ValueError: groups cannot be kept whole, with what to change."""
    geometry, group, objective = config.resolve_batch(world), config.group_size, objective_of(config)
    name = objective.name
    if not objective.whole_groups:
        return geometry.micro_batch_size
    part = geometry.images_per_process // config.updates_per_rollout
    if part % group:
        raise ValueError(
            f"objective {name} compares the images of a group, so an update of a process must hold whole groups, and "
            f"{part} images are not a multiple of group_size ({group}): make prompts_per_step a multiple of "
            f"{world * config.updates_per_rollout} (processes times updates_per_rollout)"
        )
    if config.micro_batch_size is not None and config.micro_batch_size < group:
        raise ValueError(
            f"objective {name} compares the images of a group, so micro_batch_size ({config.micro_batch_size}) must "
            f"be a multiple of group_size ({group}), or larger: raise it, or remove it"
        )
    return largest_fitting(config.micro_batch_size, part, group)
