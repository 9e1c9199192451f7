"""From a configuration to the parts of a run: pipeline, policy, rewards, sampler."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flowrl.config.foreign import foreign_words
from flowrl.config.rewards import RewardConfig, each_once
from flowrl.config.sections import PipelineConfig, PolicyConfig, PromptsConfig, SamplerConfig
from flowrl.config.spelling import closest
from flowrl.config.train import TrainConfig, location_of, resolve_path
from flowrl.credit import Method
from flowrl.pipelines import GENERIC, ModelFamily, Pipeline, family_for, family_name, stock_of
from flowrl.pipelines.arithmetic.attention_words import check_here, check_word, kernels_line
from flowrl.pipelines.weights.full_weights import FullWeights
from flowrl.pipelines.weights.loading_choices import AT_ONCE, Loading, Split
from flowrl.pipelines.weights.lora import Policy, refuse_other_network, refuse_other_variant
from flowrl.pipelines.weights.lora_files import Lora, read_lora
from flowrl.pipelines.weights.trained_weights import TrainedWeights
from flowrl.prompts.loading import Prompt, load_prompts
from flowrl.rewards import Reward
from flowrl.rewards.actors import ray_rewards
from flowrl.rewards.base.specs import CheckedReward
from flowrl.rewards.base.text_limits import cut_line
from flowrl.rewards.compose import Merge, WeightedSum, build_weighted_sum, sum_of
from flowrl.runtime.capabilities import this_machine
from flowrl.runtime.extras import check_extra
from flowrl.runtime.precision import refuse_unable
from flowrl.runtime.scrubbing import say as print
from flowrl.samplers import KERNELS, Kernel
from flowrl.training.model_files import encoders_digest
from flowrl.training.processes.devices import device_kind, on_main, wait_for_everyone
from flowrl.training.processes.mesh import Layout
from flowrl.training.prompting import RunPrompts, encode_all, not_kept
from flowrl.training.run import Run
from flowrl.trajectory import Schedule


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Ready:
    """The parts of a run, resolved once; `flowrl.session.preflight.preflight` makes it."""

    config: TrainConfig
    recipe: Any
    """The module that trains (`flowrl.session.preflight.recipe_of`)."""
    prompts: RunPrompts
    """To train on and to evaluate on."""
    family: ModelFamily
    location: str
    """Of the model, at its revision."""
    rewards: tuple[CheckedReward, ...]
    """That are trained on, with their options."""
    measured: tuple[CheckedReward, ...]
    """Those that evaluations add, `eval.rewards`."""
    kernel: Kernel
    """Of the sampler; its sigma_max is known with the model's schedule."""
    method: Method
    """Of credit assignment, where the recipe assigns credit."""
    objective: Any
    """What the recipe's `objective_of` says."""
    layout: Layout
    """Of the processes as they were launched."""
    lora: Lora | None
    """That the run starts from; None where it starts from none."""


DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


Parts = tuple[Pipeline, TrainedWeights, WeightedSum]
"""What a run trains with."""


def load_parts(
    ready: Ready, device: torch.device, begin: Callable[[Pipeline], None], split: Split | None = None
) -> Parts:
    """Pipeline, policy (with its slots) and rewards, in this order. `begin` gets the pipeline before its denoiser
    loads, with `pipeline.free_text_encoders` also before its text encoders load: `encode_everything` loads and frees
    them. `split` are the processes that share the denoiser's parts."""
    config = ready.config
    refuse_unable(config.reward_dtype, device, "reward_dtype")
    full = config.policy.train == "full"
    how = Loading(later=config.pipeline.free_text_encoders, split=split, masters=full)
    pipeline = load_pipeline(config.pipeline, device, how, known=(ready.family, ready.location))
    begin(pipeline)
    pipeline.load_denoiser()
    policy = load_policy(config, pipeline, ready.lora, split if full else None)
    if config.policy.ema_decay > 0:
        policy.add_slot("ema")
    return pipeline, policy, load_rewards(ready, device)


def load_policy(
    config: TrainConfig, pipeline: Pipeline, lora: Lora | None, split: Split | None = None
) -> TrainedWeights:
    """What a run trains of a loaded pipeline: its denoiser's own weights, which may be `split` over processes, or a
    LoRA on them, which may start from another."""
    settings = config.policy
    if settings.train == "full":
        how: dict[str, Any] = {"targets": settings.target_modules, "offload": config.optim.offload}
        return FullWeights(pipeline.denoiser, split=split, **how)
    rank, alpha, targets = lora_of(settings, pipeline.lora_targets, lora)
    if lora is not None:
        refuse_other_network(pipeline.denoiser, lora)
    policy = Policy(
        pipeline.denoiser, rank=rank, alpha=alpha, targets=targets, seed=config.seed, variant=settings.lora_variant
    )
    if lora is not None:
        policy.initialise_from(lora)
    return policy


def init_lora(config: TrainConfig) -> Lora | None:
    """The LoRA that a run starts from, `policy.init_lora`, or None. Raises ValueError: it is missing, cannot be read,
    or has another variant, rank or alpha than configured."""
    settings = config.policy
    if settings.init_lora is None:
        return None
    lora = lora_at(config, settings.init_lora)
    refuse_other_variant(lora, settings.lora_variant)
    for key, given, found in (("rank", settings.lora_rank, lora.rank), ("alpha", settings.lora_alpha, lora.alpha)):
        if given is not None and given != found:
            raise ValueError(
                f"policy.lora_{key} is {given}, and the LoRA in {settings.init_lora} has {key} {found:g}: remove "
                f"policy.lora_{key}, which is then read from the file, or set it to {found:g}"
            )
    return lora


def lora_at(config: TrainConfig, text: str) -> Lora:
    """A LoRA on the run's model that a configuration names. Raises ValueError: it is missing, or cannot be read."""
    return read_lora(resolve_path(text), stock_of(model_family(config.pipeline).name, location_of(config.pipeline)))


def lora_of(settings: PolicyConfig, targets: Sequence[str], lora: Lora | None) -> tuple[int, float, Sequence[str]]:
    """Rank, alpha and layers of a run's LoRA: from the configuration, else from the LoRA it starts from. `targets` are
    the family's layers, used if neither names any."""
    if lora is None:
        return settings.rank, settings.alpha, settings.target_modules or targets
    return lora.rank, lora.alpha, settings.target_modules or lora.layers


def load_pipeline(
    settings: PipelineConfig,
    device: torch.device | str,
    how: Loading = AT_ONCE,
    *,
    known: tuple[ModelFamily, str] | None = None,
) -> Pipeline:
    """The frozen generator; null settings take the family's values. `known` are its family and location, if known."""
    family, location = known or (model_family(settings), location_of(settings))
    how = replace(how, quantize=settings.quantize, offload=settings.offload, variant=settings.variant)
    return family.load(
        location, dtype=DTYPES[settings.dtype], device=device, attention=settings.attention,
        compile=settings.compile, how=how, **family_options(settings),
    )  # fmt: skip


def model_family(settings: PipelineConfig) -> ModelFamily:
    """The family that a configuration names, or that of its model. Raises ValueError: no family has the name, it is not
    the model's, or the model's is unknown."""
    location = location_of(settings)
    return family_for(family_name(settings.name, location), location)


def family_options(settings: PipelineConfig) -> dict[str, Any]:
    """Options of a family that a configuration gives."""
    names = ("height", "width", "max_sequence_length", "num_frames", "fps", "vae_slice", "vae_dtype",
             "gradient_checkpointing")  # fmt: skip
    given = {name: getattr(settings, name) for name in names}
    return {name: value for name, value in given.items() if value is not None} | settings.options


def check_pipeline(settings: PipelineConfig) -> ModelFamily:
    """The family of a configuration; refuses settings that the family does not have, before weights load."""
    known = model_family(settings)
    for name in ("num_frames", "fps"):
        if getattr(settings, name) is not None and not known.videos:
            raise ValueError(f"pipeline.{name} is set, but family {known.name} makes no videos: remove it")
    if known.videos:
        check_extra("av", f"family {known.name} makes videos, and writing them")
    known.check_options(settings.options)
    return known


def check_attention(settings: PipelineConfig, known: ModelFamily, *, here: bool = True) -> None:
    """Refuses a word of `pipeline.attention` that the model cannot have, or this machine (left out without `here`)."""
    if settings.attention == "auto":
        return
    check_word(settings.attention, DTYPES[settings.dtype], known.attends(location_of(settings)))
    if here:
        check_here(settings.attention, this_machine(device_kind(settings.device)))


def check_tokens(config: TrainConfig, known: ModelFamily) -> None:
    """Refuses a model whose weights or tokens processes cannot share, before weights load. Raises ValueError: a generic
    pipeline is split; or as `flowrl.pipelines.shared.context_parallel.refuse_unsplit`."""
    if known.name in GENERIC and max(config.parallel.shard, config.workers.shard) > 1:
        raise ValueError(
            "pipeline.name=generic loads a model whole onto one device: set parallel.shard=1 and workers.shard=1"
        )
    if config.parallel.context == 1:
        return
    from flowrl.pipelines.shared.context_parallel import refuse_unsplit  # imports diffusers

    model, options = location_of(config.pipeline), family_options(config.pipeline)
    drawn = {"height": config.eval.height, "width": config.eval.width}
    drawn = {key: value for key, value in drawn.items() if value is not None}
    sizes = [known.planned_size(model, {**options, **more}) for more in ({}, drawn)]
    refuse_unsplit(known, model, options, config.parallel.context, sizes)


def check_cached(threshold: float, known: ModelFamily, model: str) -> None:
    """Refuses First-Block Cache, above 0, of a model whose blocks cannot be cached, before weights load."""
    if threshold > 0:
        from flowrl.pipelines.arithmetic.first_block import refuse_uncached  # imports diffusers

        refuse_uncached(known.meta_denoiser(model), model)


def attention_text(settings: PipelineConfig) -> str:
    """What `pipeline.attention` means on this machine, and which words it has."""
    known = model_family(settings).attends(location_of(settings))
    machine = this_machine(device_kind(settings.device))
    return kernels_line(settings.attention, machine, DTYPES[settings.dtype], known)


def at_eval_size(config: TrainConfig, pipeline: Pipeline) -> Pipeline:
    """The pipeline as evaluations draw with it: at `eval.height` and `eval.width` where they are set."""
    height, width = config.eval.height, config.eval.width
    if height is None and width is None:
        return pipeline
    own = pipeline.image_shape[-2:]
    return pipeline.resized(height or own[0], width or own[1])


def eval_schedule(config: TrainConfig, trained: Pipeline, drawn: Pipeline) -> Schedule:
    """Noise levels of evaluations. `eval.shift` "own" is the model's shift at the drawn size, "training" that of
    rollouts, and a number is the shift itself."""
    settings, sampler = config.eval, config.sampler
    steps, grid, shift = settings.num_steps or sampler.num_steps, settings.grid or sampler.grid, settings.shift
    if shift == "training":
        return trained.schedule(steps, grid, sampler.shift)
    return drawn.schedule(steps, grid, sampler.shift if shift == "own" else shift)


def read_prompts(settings: PromptsConfig, text: str) -> list[Prompt]:
    """The prompts that a configuration names, each with a negative prompt."""
    return load_prompts(text, settings.negative, resolve=resolve_path)


def read_run_prompts(settings: PromptsConfig) -> RunPrompts:
    """All prompts that a configuration names."""
    held_out = () if settings.eval is None else tuple(read_prompts(settings, settings.eval))
    return RunPrompts(train=tuple(read_prompts(settings, settings.train)), held_out=held_out)


def load_rewards(ready: Ready, device: torch.device) -> WeightedSum:
    """The rewards to train on, as one; workers answer for those they compute (`workers.rewards`)."""
    config = ready.config
    how = config.reward_aggregation
    merge: Merge = how if how in ("geometric", "harmonic") else "sum"
    rests = "rewards" in config.pipeline.offload
    if config.workers.rewards:
        entries = [entry for entry in (*config.rewards, *config.eval.rewards) if ray_rewards.goes_to_workers(entry)]
        held: list[ray_rewards.Started] = []

        def start() -> ray_rewards.Started:
            held.append(ray_rewards.start_workers(config.workers, entries, dtype=config.reward_dtype, device=device))
            return replace(held[0], actors=())

        started = on_main(start)  # one of the processes starts them for all
        workers = ray_rewards.find_workers(config.workers, entries, held[0] if held else started)
        made = sum_of(_members(ready.rewards, workers, device), merge=merge, partial=config.reward_partial)
    elif not ready.rewards:
        made = sum_of([])
    else:
        made = build_weighted_sum(ready.rewards, device=device, merge=merge, partial=config.reward_partial, rests=rests)
    return replace(made, dtype=config.reward_dtype)


def _members(
    rewards: Sequence[CheckedReward], workers: ray_rewards.RewardWorkers, device: torch.device
) -> list[tuple[Reward, RewardConfig]]:
    """The reward of each entry: a worker's, or one of this process."""
    parts = dict[Hashable, Any]()
    return [
        (workers.of(one.entry) if ray_rewards.goes_to_workers(one.entry) else one.build(device, parts), one.entry)
        for one in rewards
    ]


def evaluation_rewards(ready: Ready, reward: WeightedSum, device: torch.device) -> WeightedSum | None:
    """What evaluations measure, each once: trained rewards that judge single images, and those of `eval.rewards`. A
    reward that compares a group's images says nothing about a model: its mean is the same for every model."""
    trained = [term for term in reward.terms if term.reward.kind not in ("groupwise", "pairwise")]
    kept = {id(one) for one in each_once([term.entry for term in trained] + [one.entry for one in ready.measured])}
    terms = [term for term in trained if id(term.entry) in kept]
    measured = [one for one in ready.measured if id(one.entry) in kept]
    workers = next(
        (term.reward.workers for term in reward.terms if isinstance(term.reward, ray_rewards.WorkerReward)), None
    )
    if measured and workers is not None:
        terms += sum_of(_members(measured, workers, device)).terms
    elif measured:
        terms += build_weighted_sum(measured, device=device, rests="rewards" in ready.config.pipeline.offload).terms
    if not terms:
        return None
    plain = [(term.reward, RewardConfig(name=term.reward.name, label=term.entry.label)) for term in terms]
    return replace(sum_of(plain), dtype=ready.config.reward_dtype)


def sampler_of(
    settings: SamplerConfig, pipeline: Pipeline, levels: Sequence[float] | None = None, kernel: Kernel | None = None
) -> tuple[Kernel, Schedule]:
    """The kernel with its settings bound, and the schedule of a rollout; `levels` are those of a calibration."""
    schedule = pipeline.schedule(settings.num_steps, settings.grid, settings.shift)
    plain = replace(kernel or kernel_of(settings), sigma_max=schedule.sigma_max)
    levels = levels or settings.noise_levels
    if levels is None:
        return plain, schedule
    starts = schedule.sigma[:-1].double()

    def rule(sigma: Tensor, sigma_next: Tensor, noise_level: float, sigma_max: Tensor) -> tuple[Tensor, Tensor]:
        step = int((starts - sigma.flatten()[0]).abs().argmin())
        return plain.rule(sigma, sigma_next, levels[step], sigma_max)

    return replace(plain, rule=rule, noise_level=max(levels)), schedule


def tell_cut_prompts(pipeline: Pipeline, prompts: RunPrompts) -> None:
    """Prints how many prompts are longer than the text encoders read."""
    texts = list({prompt.text for prompt in (*prompts.train, *prompts.more, *prompts.held_out)})
    if count := pipeline.num_cut(texts):
        print(
            f"Note: {count} of {len(texts)} prompts are longer than the model reads, so their ends are "
            "cut off: see pipeline.max_sequence_length.",
            flush=True,
        )


def tell_cut_by_rewards(rewards: Sequence[CheckedReward], prompts: RunPrompts) -> None:
    """Prints which rewards read only the beginning of some prompts."""
    texts = list({prompt.text: None for prompt in (*prompts.train, *prompts.held_out)})
    for line in cut_lines(rewards, texts):
        print(f"Note: {line}.", flush=True)


def cut_lines(rewards: Sequence[CheckedReward], texts: Sequence[str]) -> list[str]:
    """What rewards do not read of prompts: a sentence for each reward that cuts some."""
    found = [cut_line(one.entry.called, one.options, texts) for one in rewards]
    return [line for line in dict.fromkeys(found) if line]


def keep_embeddings(ready: Ready, pipeline: Pipeline) -> None:
    """Lets a pipeline keep its embeddings in `prompts.cache`, if set. Raises ValueError: its weights are unknown."""
    config = ready.config
    if config.prompts.cache is not None:
        others = (*ready.family.denoisers, "scheduler", "safety_checker")
        encoders = encoders_digest(ready.location, others)
        if config.pipeline.variant is not None:  # of the files in the folder, which are read
            encoders = f"{encoders}:{config.pipeline.variant}"
        pipeline.keep_embeddings(Path(config.prompts.cache).expanduser(), encoders)


def encode_everything(pipeline: Pipeline, drawn: Pipeline, prompts: RunPrompts, shared: Run | None = None) -> None:
    """Embeds every prompt that the run can meet, then frees the text encoders; loads them only for prompts not in the
    cache. `drawn` is the pipeline of evaluations. If processes of a `shared` run share a cache, each embeds a part and
    reads the others' parts."""
    wanted = [(pipeline, prompt) for prompt in (*prompts.train, *prompts.more)]
    wanted += [(drawn, prompt) for prompt in prompts.held_out]
    if shared is not None and shared.world > 1:
        _encode(not_kept(wanted[shared.rank :: shared.world]))
        wait_for_everyone()
    _encode(not_kept(wanted))  # all that is new; after the others' parts what they wrote to another disk
    for one in {id(one): one for one in (pipeline, drawn)}.values():
        one.free_text_encoders()


def _encode(missing: Sequence[tuple[Pipeline, Prompt]]) -> None:
    for pipeline in {id(pipeline): pipeline for pipeline, _ in missing}.values():
        pipeline.load_text_encoders()
    for pipeline, group in groupby(missing, key=lambda pair: pair[0]):
        encode_all(pipeline, [prompt for _, prompt in group])


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
            raise ValueError(f"sampler.{key} is about the noise of steps; kernel {kernel.name} adds none: remove it")
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
