"""A configuration's plan: everything that `flowrl.commands.plan.plan_text` prints."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

from flowrl.commands.plan import published_models as checkpoints
from flowrl.commands.plan.cost import Cost, cost_of, decode_flops
from flowrl.commands.plan.counts import RunCounts, graph_rows, negative_again, of_run
from flowrl.commands.plan.decoding import decode_peaks
from flowrl.commands.plan.fits import SHARDS, Choices
from flowrl.commands.plan.memory import Facts, Memory, Settings, allowed_sizes, memory_of
from flowrl.commands.plan.network import Network, Trained, few_blocks, measure, without_gradient
from flowrl.commands.plan.published_models import Parts
from flowrl.commands.plan.refusals import is_here
from flowrl.commands.plan.sent_text import Text, text_of
from flowrl.commands.plan.stock_route import StockRoute, stock_decoding, stock_route
from flowrl.commands.plan.throughput import Pace
from flowrl.config.locations import split_revision
from flowrl.config.rewards import RewardConfig
from flowrl.config.sections import PipelineConfig, PolicyConfig
from flowrl.config.train import Geometry, TrainConfig
from flowrl.pipelines import GENERIC, ModelFamily, cards
from flowrl.pipelines.generic.stock_recording import Recorded
from flowrl.pipelines.weights.quantize import check_quantize
from flowrl.prompts.loading import eval_items
from flowrl.recipes import forward_settings
from flowrl.rewards import models_of, reward_options
from flowrl.training.model_files import location_of
from flowrl.training.parts import DTYPES, family_options, lora_of, read_prompts
from flowrl.training.processes.mesh import check_parallel
from flowrl.training.scoring import check_offload

Size = tuple[int, int, int | None]
"""Height, width and frames; None for images."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What is known of a run before it starts; None is what is not known.

    Attributes:
        name: of the configuration.
        config: its settings.
        model: folder or hub id.
        family: of the model.
        processes: of the run.
        pace: by which hours are reckoned.
        processor: whose hours are reckoned, GPU or CPU.
        geometry: of one process, with the micro-batch that the recipe takes.
        size: what is drawn.
        text: tokens of a prompt.
        usual_forward: FLOPs of a forward pass with a usual prompt; None where all are as long.
        network: one evaluation of the denoiser.
        unknown: why `network` is None; empty where it is known.
        run: evaluations of the run.
        slots: copies of the trained weights.
        parts: of the model besides the denoiser.
        rewards: models of the rewards, `(model, parameters, bytes per weight)`, each once.
        unknown_rewards: names of those whose models are not known.
        cost: FLOPs of the run.
        memory: of a process.
        facts: what memory is reckoned from, None where that is not known.
        settings: those that memory depends on.
        choices: what could be changed of them.
        counted_as: the published checkpoint that stands for the model, of whose configuration nothing is known.
        parts_of: the one whose other parts stand for the model's.
        licence: name, and whether the hub asks to accept it.
        prompts: number of training prompts.
    """

    name: str
    config: TrainConfig
    model: str
    family: str
    processes: int
    pace: Pace
    processor: str
    geometry: Geometry
    size: Size | None
    text: Text
    usual_forward: int | None
    network: Network | None
    unknown: str
    run: RunCounts
    slots: int
    parts: Parts | None
    rewards: tuple[tuple[str, int, int], ...]
    unknown_rewards: tuple[str, ...]
    cost: Cost | None
    memory: Memory | None
    facts: Facts | None
    settings: Settings
    choices: Choices
    counted_as: str | None
    parts_of: str | None
    licence: tuple[str, bool] | None
    prompts: int | None


def gather(config: TrainConfig, name: str, family: ModelFamily, *, processes: int, pace: Pace, processor: str) -> Plan:
    """Counts and measures; nothing is downloaded.

    Args:
        config: settings that passed `flowrl.commands.plan.refusals.obstacles`.
        name: of the configuration.
        family: of the model.
        processes: of the run.
        pace: by which hours are reckoned.
        processor: GPU or CPU.

    Raises:
        ValueError: the model cannot draw the configured size.
    """
    settings, location = config.pipeline, location_of(config.pipeline)
    model = checkpoints.counted_as(family, location)
    ranks = max(1, processes // config.parallel.context)  # those that share an image's tokens draw it together
    options = family_options(settings)
    items = _eval_items(config)
    found = stock_route(family, model, options)
    stock = found if isinstance(found, StockRoute) else None
    passes = cache(partial(family.rows, model) if stock is None else stock.rows)  # asked in every iteration
    run = of_run(config, passes, ranks, items)
    text, usual_call = _text(family, model, options, _prompts(config), stock)
    usual, size, network, evaluated, eval_forward, eval_working = None, None, None, None, 0.0, 0
    trained = _trained(config.policy, family, stock)
    targets = trained.targets or ()
    size, denoisers = _size(family, model, options, stock), few_blocks(family, model, targets)
    unknown = found if isinstance(found, str) else ""
    unknown = unknown or f"no configuration of {config.pipeline.model} is known without its download"
    eval_found = None
    if size is not None and denoisers is not None:
        unknown = ""
        call = _call(family, model, size, text.most) if stock is None else stock.recorded.call
        network = measure(denoisers, call, trained=trained, dtype=DTYPES[settings.dtype])
        evaluated = _eval_size(config, size)
        eval_forward, eval_working = network.forward, network.working
        if evaluated != size and run.evaluations:
            eval_found = None if stock is None else stock.at(*evaluated[:2])
            call = _eval_call(family, model, evaluated, text.most) if eval_found is None else eval_found.call
            eval_forward, eval_working = without_gradient(denoisers, call)
        if usual_call is None and text.usual is not None:
            usual_call = _call(family, model, size, text.usual)
        if usual_call is not None:
            usual = without_gradient(denoisers, usual_call)[0]
    parts = checkpoints.other_parts(model) if stock is None else stock.recorder.parts
    alike = checkpoints.nearest(family, model) if parts is None else None
    parts = checkpoints.other_parts(alike) if alike is not None else parts
    rewards, unknown_rewards = _reward_models((*config.rewards, *config.eval.rewards))
    elsewhere = bool(config.workers.rewards)  # workers hold the models that score
    cost = facts = None
    slots = _slots(config)
    eval_drawn = evaluated if evaluated is not None and run.evaluations else size
    if network is not None and size is not None and eval_drawn is not None:
        decode_cost, decode = _decoding(family, model, parts, size, None if stock is None else stock.recorded, settings)
        eval_cost, eval_decode = decode_cost, decode
        if eval_drawn != size:
            eval_cost, eval_decode = _decoding(family, model, parts, eval_drawn, eval_found, settings)
        cost = cost_of(
            network, run, eval_forward=eval_forward, decode=decode_cost, eval_decode=eval_cost,
            recomputed=(settings.gradient_checkpointing and network.blocks > 0) + negative_again(config, passes),
        )  # fmt: skip
    geometry = _geometry(config, ranks)
    if network is not None and size is not None:
        unknown_parts: tuple[str, ...] = ("text encoders and autoencoder",) if parts is None else ()
        unknown_parts += () if stock is None else stock.recorder.uncounted
        facts = Facts(
            network=network, eval_working=eval_working, rows=graph_rows(config, passes),
            passes=(passes(config.sampler.guidance_scale), passes(_eval_scale(config))),
            keeps=geometry.images_per_process // config.updates_per_rollout if config.keep_graphs else 0,
            decode=decode, eval_decode=eval_decode,
            image=4 * 3 * size[0] * size[1] * (size[2] or 1), parts=parts or {}, rewards=() if elsewhere else rewards,
            unknown=(*unknown_parts, *(f"reward {name}" for name in unknown_rewards if not elsewhere)),
            dtype=(settings.dtype, DTYPES[settings.dtype].itemsize), full=config.policy.train == "full", slots=slots,
            reference=config.policy.train == "full" and (bool(run.evaluations) or config.kl_coef > 0),
            evaluates=run.evaluations > 0, at_once=stock is not None,
        )  # fmt: skip
    own = _settings(config, family, options, geometry, processes)
    return Plan(
        name=name, config=config, model=split_revision(location)[0], family=family.name, processes=processes, pace=pace,
        processor=processor, geometry=geometry, size=size, text=text, usual_forward=usual, network=network,
        unknown=unknown, run=run, slots=slots, parts=parts, rewards=rewards, unknown_rewards=unknown_rewards,
        cost=cost, memory=None if facts is None else memory_of(facts, own), facts=facts, settings=own,
        choices=_choices(config, family, facts, processes), counted_as=None if model == location else model,
        parts_of=alike, licence=checkpoints.licence_of(location), prompts=_train_prompts(config),
    )  # fmt: skip


def group_multiple(config: TrainConfig) -> int:
    """Images that a micro-batch is a multiple of."""
    if config.recipe == "preference":
        return 2
    return config.group_size if config.recipe == "forward" and forward_settings.objective_of(config).whole_groups else 1


# ---- parts of it -----------------------------------------------------------------------------------------------------


def _eval_size(config: TrainConfig, size: Size) -> Size:
    return config.eval.height or size[0], config.eval.width or size[1], size[2]


def _eval_scale(config: TrainConfig) -> float:
    return config.sampler.guidance_scale if config.eval.guidance_scale is None else config.eval.guidance_scale


def _text(
    family: ModelFamily, model: str, options: dict[str, Any], prompts: list[str] | None, stock: StockRoute | None
) -> tuple[Text, dict[str, Any] | None]:
    """What is sent of prompts; of a stock pipeline also the call of a usual prompt, where they differ."""
    return (text_of(family, model, options, prompts), None) if stock is None else stock.text(prompts)


def _size(family: ModelFamily, model: str, options: dict[str, Any], stock: StockRoute | None) -> Size | None:
    """What is drawn."""
    if stock is not None:
        return stock.recorded.size
    drawn = family.planned_size(model, options)
    return None if drawn is None else (drawn.height, drawn.width, drawn.num_frames)


def _call(family: ModelFamily, model: str, size: Size, tokens: int) -> dict[str, Any]:
    return family.meta_call(model, cards.Size(height=size[0], width=size[1], num_frames=size[2]), tokens)


def _eval_call(family: ModelFamily, model: str, size: Size, tokens: int) -> dict[str, Any]:
    """The call at the size that evaluations draw."""
    try:
        return _call(family, model, size, tokens)
    except ValueError as error:
        raise ValueError(str(error).replace("pipeline.", "eval.")) from error


def _decoding(
    family: ModelFamily, model: str, parts: Parts | None, size: Size, found: Recorded | None, settings: PipelineConfig
) -> tuple[float | None, tuple[int, int] | None]:
    """FLOPs of decoding one image, and bytes, whole and in tiles; of a stock pipeline by what was recorded of it."""
    if found is not None:
        return stock_decoding(found, dtype=settings.vae_dtype, videos=family.videos)
    return decode_flops(model, parts, size), decode_peaks(family, model, size, dtype=settings.vae_dtype)


def _geometry(config: TrainConfig, processes: int) -> Geometry:
    geometry = config.resolve_batch(processes)
    if config.recipe != "forward":
        return geometry
    micro = forward_settings.micro_batch_size(config, processes)
    count = geometry.images_per_process // micro
    return Geometry(
        images_per_process=geometry.images_per_process, rollout_batch_size=geometry.rollout_batch_size,
        micro_batch_size=micro,
        micro_batches_per_update=count // config.updates_per_rollout,
    )  # fmt: skip


def _slots(config: TrainConfig) -> int:
    """Copies of the trained weights beside themselves."""
    average = int(config.policy.ema_decay > 0)
    if config.recipe == "forward":
        return average + len(forward_settings.slot_decays(config))
    return average + int(config.recipe == "preference")


def _trained(settings: PolicyConfig, family: ModelFamily, stock: StockRoute | None) -> Trained:
    """What is trained; the rank of a file that is not here is taken for the usual one."""
    if settings.train == "full":
        return Trained(targets=settings.target_modules, rank=0)
    here = settings.init_lora is None or is_here(settings.init_lora)
    rank = lora_of(settings, ())[0] if here else settings.rank
    targets = settings.target_modules or (family.lora_targets if stock is None else stock.targets)
    return Trained(targets=targets, rank=rank, magnitudes=settings.lora_variant == "dora")


def _settings(
    config: TrainConfig, family: ModelFamily, options: Mapping[str, Any], geometry: Geometry, processes: int
) -> Settings:
    pipeline, usual = config.pipeline, cards.VideoOptions if family.videos else cards.ImageOptions
    return Settings(
        processes=processes, micro_batch_size=geometry.micro_batch_size, rollout_batch_size=geometry.rollout_batch_size,
        eval_batch_size=config.eval.batch_size, gradient_checkpointing=pipeline.gradient_checkpointing,
        quantize=pipeline.quantize, offload=pipeline.offload, free_text_encoders=pipeline.free_text_encoders,
        vae_slice=options.get("vae_slice", usual.vae_slice), vae_tiling=options.get("vae_tiling", False),
        optimizer=config.optim.name, optim_offload=config.optim.offload, shard=config.parallel.shard,
        context=config.parallel.context, rollouts=config.workers.rollouts,
    )  # fmt: skip


def _choices(config: TrainConfig, family: ModelFamily, facts: Facts | None, processes: int) -> Choices:
    """What may be changed so that a run fits a card."""
    group, sizes = group_multiple(config), dict[int, list[int]]()
    parallel, pipeline = config.parallel, config.pipeline
    device = "mps" if pipeline.device == "mps" else None  # others may be on another machine than this one
    copies = parallel.replicate or 1
    offload = tuple(dict.fromkeys((*pipeline.offload, "rewards")))
    for shard in (parallel.shard, *SHARDS):
        ranks = max(shard * copies, processes // parallel.context)
        images, left = divmod(config.num_images, ranks * config.updates_per_rollout)
        if not left and ranks % shard == 0:
            sizes[shard] = allowed_sizes(images, group)
    return Choices(
        sizes=sizes, encoders=facts is not None and set(facts.parts) > {"vae"},
        checkpoints=facts is not None and facts.network.blocks > 0, videos=family.videos,
        rewards=facts is not None and bool(facts.rewards)
        and _passes(check_offload, replace(config, pipeline=replace(pipeline, offload=offload))),
        splits=facts is not None and parallel.context == 1 and family.name not in GENERIC  # loaded whole
        and _passes(check_parallel, replace(config, parallel=replace(parallel, shard=SHARDS[0])), None),
        forms=[form for form in ("int8", "nf4") if family.name not in GENERIC
               and _passes(check_quantize, form, device, compile=pipeline.compile)],
        copies=copies,
    )  # fmt: skip


def _passes(check: Callable[..., None], *given: Any, **named: Any) -> bool:
    """Whether a check of `flowrl train` lets settings pass."""
    try:
        check(*given, **named)
    except ValueError:
        return False
    return True


def _eval_items(config: TrainConfig) -> int | None:
    """Images of an evaluation; None where its prompts are not here."""
    if config.prompts.eval is None:
        return 0
    if not is_here(config.prompts.eval):
        return None
    rows = read_prompts(config.prompts, config.prompts.eval)
    settings = config.eval
    return len(eval_items(rows, num_prompts=settings.num_prompts, samples_per_prompt=settings.samples_per_prompt))


def _prompts(config: TrainConfig) -> list[str] | None:
    """All prompts that are embedded; None where some are not here."""
    files = [text for text in (config.prompts.train, config.prompts.eval) if text is not None]
    if not all(map(is_here, files)):
        return None
    rows = [row for text in files for row in read_prompts(config.prompts, text)]
    return list(dict.fromkeys(text for row in rows for text in (row.text, row.negative)))


def _train_prompts(config: TrainConfig) -> int | None:
    return len(read_prompts(config.prompts, config.prompts.train)) if is_here(config.prompts.train) else None


def _reward_models(rewards: tuple[RewardConfig, ...]) -> tuple[tuple[tuple[str, int, int], ...], tuple[str, ...]]:
    """Models of the rewards, each once, and the names of rewards whose models are not known."""
    found: dict[str, tuple[str, int, int]] = {}
    unknown: dict[str, None] = {}
    for reward in rewards:
        models = _models_of(reward)
        if models is None:
            unknown[reward.called] = None
        for entry in models or ():
            found[entry[0]] = entry
    return tuple(found.values()), tuple(unknown)


def _models_of(reward: RewardConfig) -> tuple[tuple[str, int, int], ...] | None:
    """What a reward says that it loads; None where it does not, or has to be put in place first."""
    if reward.name is None:
        return None
    try:
        models = models_of(reward_options(reward.name, reward.options))
    except ValueError:
        return None
    return None if models is None else checkpoints.reward_models(models)
