"""Settings of the recipe visited: its teachers, which prompts each has, and what is refused."""

from __future__ import annotations

from collections.abc import Sequence

from flowrl.config.options import build_options, entry_of
from flowrl.config.readers import refuse_unread
from flowrl.config.sections import PolicyConfig
from flowrl.config.strict_yaml import refuse
from flowrl.config.train import Geometry, TrainConfig
from flowrl.objectives.distillation import VISITED, Opd
from flowrl.pipelines.weights.lora import refuse_other_network, refuse_unheld
from flowrl.pipelines.weights.lora_files import Lora
from flowrl.prompts.loading import Prompt
from flowrl.recipes.counting import STEP, Counts, Passes, RecipeCounts, RolloutRecord, walked
from flowrl.training.model_files import location_of
from flowrl.training.parts import init_lora, lora_at, lora_of, model_family
from flowrl.training.paths import stochastic_steps
from flowrl.training.sampler_checks import kernel_of


def only_here(config: TrainConfig) -> str:
    """Why workers cannot draw for a run."""
    return "recipe visited trains at states of steps without noise, which workers do not send"


def objective_of(config: TrainConfig) -> Opd:
    """What a run minimises.

    Raises:
        ValueError: an unknown name or option, or a bad value.
    """
    name = config.objective.name or "opd"
    options = entry_of(VISITED, name, "objective of recipe visited", owner="objective.name")
    return build_options(options, config.objective.options, owner=f"objective {name!r}")


def trained_steps(config: TrainConfig, iteration: int) -> tuple[int, ...]:
    """Steps whose states an iteration may train: the stochastic ones, or without noise all of them."""
    if kernel_of(config.sampler).stochastic:
        return stochastic_steps(config.sampler, config.seed, iteration)
    return tuple(range(config.sampler.num_steps))


def teachers_of(settings: PolicyConfig, prompts: Sequence[Prompt]) -> list[int]:
    """The place in `policy.teachers` of each prompt's teacher.

    Raises:
        ValueError: a prompt has none, with what its metadata say and what teachers ask for.
    """
    known = {value: place for place, teacher in enumerate(settings.teachers) for value in teacher.prompts}
    if not known:
        return [0] * len(prompts)
    said = [prompt.metadata.get(settings.teacher_key) for prompt in prompts]
    found = [known.get(str(value), -1) for value in said]
    if -1 in found:
        first = found.index(-1)
        raise ValueError(
            f"{found.count(-1)} of {len(prompts)} training prompts have no teacher (first: {prompts[first].text!r}, "
            f"whose metadata have {said[first]!r} under {settings.teacher_key!r}): policy.teachers name the prompts "
            f"{', '.join(known)}; set policy.teacher_key to a key whose values are among them, or name the others too"
        )
    return found


def teacher_loras(config: TrainConfig) -> list[Lora | None]:
    """The LoRA of each teacher, read; None of one that is the model without a LoRA.

    Raises:
        ValueError: there is none, it cannot be read, or the policy's LoRA has no room for it.
    """
    found, settings = list[Lora | None](), config.policy
    for teacher in settings.teachers:
        lora = None if teacher.lora is None else lora_at(config, teacher.lora)
        if lora is not None:
            rank, _, targets = lora_of(settings, model_family(config.pipeline).lora_targets, init_lora(config))
            refuse_unheld(lora, rank=rank, targets=targets, variant=settings.lora_variant)
        found.append(lora)
    return found


def counts(config: TrainConfig) -> RecipeCounts:
    """What a run counts before it starts."""
    sampler, objective, teachers = config.sampler, objective_of(config), config.policy.teachers
    scales = [sampler.guidance_scale if one.guidance_scale is None else one.guidance_scale for one in teachers]
    ode, images = not kernel_of(sampler).stochastic, config.num_images

    def of_iteration(iteration: int, passes: Passes, geometry: Geometry) -> Counts:
        trained = images * len(objective.places(len(trained_steps(config, iteration)), 0))
        return Counts(
            rollout=images * sampler.num_steps * passes(sampler.guidance_scale),
            update=trained * passes(sampler.guidance_scale),
            backward=trained * walked(sampler.train_negative, sampler.guidance_scale, passes),
            reference=trained * max(passes(scale) for scale in scales),
            images=images * bool(config.rewards),
        )

    kept = len(trained_steps(config, 0)) + (not ode)
    return RecipeCounts(
        objective=config.objective.name or "opd",
        of_iteration=of_iteration,
        exact=len(set(scales)) == 1,  # else as if each prompt had the teacher that takes most
        teachers=sum(teacher.lora is not None for teacher in teachers),
        record=lambda: RolloutRecord(columns=(images * kept, images), batches=((kept + 1 + STEP, images),)),
    )


def check(config: TrainConfig) -> None:
    """Refuses settings of this recipe that cannot work, before a model loads.

    Raises:
        ValueError: an unknown loss or option, teachers that cannot teach, or a combination without meaning.
    """
    objective, sampler, policy = objective_of(config), config.sampler, config.policy
    kernel, teachers, steps = kernel_of(sampler), policy.teachers, trained_steps(config, 0)
    refuse_unread(config, ["taught", "rollout", *(["window"] if kernel.stochastic else [])], "recipe visited")
    as_policy = [one.lora is None and one.guidance_scale in (None, sampler.guidance_scale) for one in teachers]
    refuse(
        (
            not teachers,
            "recipe visited learns from policy.teachers, and there are none: list one, such as {guidance_scale: 4.5}, "
            "the model itself under guidance, or {lora: FILE}, a LoRA on it",
        ),
        (
            teachers and all(as_policy) and policy.init_lora is None,
            f"policy.teachers are the model itself at guidance {sampler.guidance_scale:g}, which the policy starts as, "
            "so there is nothing to learn: set the guidance_scale or the lora of one",
        ),
        (
            policy.train == "full" and any(teacher.lora is not None for teacher in teachers),
            "policy.train is full, and a teacher's LoRA takes the place of the policy's own: set policy.train=lora, or "
            "take teachers without a lora",
        ),
        (
            kernel.stochastic and kernel.noise_level == 0,
            f"sampler.noise_level 0 makes kernel {sampler.kernel} the ODE: set sampler.kernel=ode",
        ),
        (
            objective.states != "all" and objective.states > len(steps),
            f"objective.options.states is {objective.states}, and {len(steps)} steps of a path are trained: lower it, "
            "or take all",
        ),
        (
            objective.weight == "kl" and not kernel.stochastic,
            "objective.options.weight kl is the KL of steps with noise, and sampler.kernel is ode: set weight to mean "
            "or velocity, or take a kernel with noise",
        ),
    )
    loras, family = [lora for lora in teacher_loras(config) if lora is not None], model_family(config.pipeline)
    if loras and (network := family.meta_denoiser(location_of(config.pipeline))) is not None:
        for lora in loras:
            refuse_other_network(network, lora)
