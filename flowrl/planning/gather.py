"""Gathers a configuration's plan: all that `flowrl.planning.text` prints."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from flowrl.config.locations import split_revision
from flowrl.config.rewards import RewardConfig
from flowrl.config.together import check_together
from flowrl.config.train import Geometry, TrainConfig, is_here, location_of
from flowrl.pipelines import GENERIC, ModelFamily
from flowrl.pipelines.shared import cards
from flowrl.pipelines.weights.quantize import check_quantize
from flowrl.planning import published_models as checkpoints
from flowrl.planning.cost import Cost, RunCounts, cost_of, graph_rows, negative_again, of_run
from flowrl.planning.decoding import Size
from flowrl.planning.family_route import DrawnSample, FamilyRoute, Text
from flowrl.planning.fits import SHARDS, Choices
from flowrl.planning.memory import NODE, Facts, Memory, MemorySettings, allowed_sizes, memory_of
from flowrl.planning.network import FewBlocks, Network, Trained, few_blocks, measure, without_gradient
from flowrl.planning.published_models import Parts
from flowrl.planning.stock_route import StockRoute, stock_route
from flowrl.planning.throughput import Pace
from flowrl.prompts.loading import eval_items
from flowrl.recipes.counting import Passes, RecipeCounts
from flowrl.rewards import models_of, reward_options
from flowrl.session.advice import geometry_of
from flowrl.session.preflight import recipe_of
from flowrl.training.parts import DTYPES, family_options, init_lora, lora_of, read_prompts
from flowrl.training.scoring import check_offload, scored_at_once


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """All that is known of a run before it starts; unknown values are None."""

    name: str
    """Name of the configuration."""
    config: TrainConfig
    model: str
    """Folder or hub id."""
    family: str
    processes: int
    """Number of processes of the run."""
    pace: Pace
    """Pace from which hours are computed."""
    geometry: Geometry
    """Geometry of one process, with the recipe's micro-batch."""
    size: Size | None
    """Size of a sample."""
    latent: tuple[int, ...] = ()
    """Shape of its latent; empty if `network` is None."""
    text: Text
    """Tokens of a prompt."""
    usual_forward: int | None = None
    """FLOPs of a forward pass with a usual prompt; None if all prompts are equally long."""
    network: Network | None = None
    """One evaluation of the denoiser."""
    unknown: str
    """Why `network` is None; empty if it is known."""
    run: RunCounts
    counts: RecipeCounts
    """The recipe's own counts for the run."""
    slots: int
    """Copies of the trained weights."""
    parts: Parts | None
    """Parts of the model besides the denoiser."""
    rewards: tuple[tuple[str, int, int], ...]
    """Models of the rewards, `(model, parameters, bytes per weight)`, each once."""
    unknown_rewards: tuple[str, ...]
    cost: Cost | None = None
    """FLOPs of the run."""
    memory: Memory | None = None
    facts: Facts | None = None
    """Inputs of the memory estimate, None if unknown."""
    settings: MemorySettings
    """Settings that memory depends on."""
    choices: Choices = field(default_factory=Choices)
    """Possible changes of these settings."""
    counted_as: str | None
    """The published checkpoint that stands for a model with an unknown configuration."""
    parts_of: str | None
    """The published checkpoint whose other parts stand for the model's."""
    licence: tuple[str, bool] | None
    """Name, and whether the hub asks to accept it."""
    prompts: int | None
    """Number of training prompts."""
    passes: Passes
    """Network rows of a sample at a guidance scale."""

    @property
    def drawn(self) -> str:
        """The word for one sample."""
        return "image" if self.size is None or self.size[2] is None else "clip"


def gather(config: TrainConfig, name: str, family: ModelFamily, *, processes: int, pace: Pace) -> Plan:
    """Counts and measures a configuration that passed `flowrl.planning.refusals.obstacles`; downloads nothing. `pace`
    gives the hours. Raises ValueError: the model cannot draw the configured size."""
    location = location_of(config.pipeline)
    model = checkpoints.find_counted(family, location)
    ranks = max(1, processes // config.parallel.context)  # those that share an image's tokens draw it together
    options = family_options(config.pipeline)
    given: dict[str, Any] = {"model": model, "options": options, "vae_dtype": config.pipeline.vae_dtype}
    found = stock_route(family, **given)
    route = found if isinstance(found, StockRoute) else FamilyRoute(family=family, **given)
    passes = cache(route.rows)  # asked in every iteration
    prompts, texts, eval_images = _prompts(config)
    text, usual_call = route.text(texts)
    policy = config.policy
    if policy.train == "full":
        trained = Trained(targets=policy.target_modules, rank=0)
    else:  # if a LoRA file is not here, its rank is assumed to be the usual one
        here = policy.init_lora is None or is_here(policy.init_lora)
        rank = lora_of(policy, (), init_lora(config))[0] if here else policy.rank
        dora = policy.lora_variant == "dora"
        trained = Trained(targets=policy.target_modules or route.targets, rank=rank, magnitudes=dora)
    denoisers = few_blocks(family, model, trained.targets or ())
    rewards, unknown_rewards = _reward_models((*config.rewards, *config.eval.rewards))
    counts, geometry = recipe_of(config).counts(config), geometry_of(config, ranks)
    pipeline, usual = config.pipeline, cards.VideoOptions if family.videos else cards.ImageOptions
    settings = MemorySettings(
        processes=processes, micro_batch_size=geometry.micro_batch_size, rollout_batch_size=geometry.rollout_batch_size,
        eval_batch_size=config.eval.batch_size, gradient_checkpointing=pipeline.gradient_checkpointing,
        quantize=pipeline.quantize, offload=pipeline.offload, free_text_encoders=pipeline.free_text_encoders,
        vae_slice=options.get("vae_slice", usual.vae_slice), vae_tiling=options.get("vae_tiling", False),
        optimizer=config.optim.name, optim_offload=config.optim.offload, shard=config.parallel.shard,
        context=config.parallel.context, rollouts=config.workers.rollouts,
        worker_shard=config.workers.shard, staleness=config.workers.staleness,
    )  # fmt: skip
    plan = Plan(
        name=name, config=config, model=split_revision(location)[0], family=family.name, processes=processes, pace=pace,
        geometry=geometry, size=route.size, text=text,
        unknown=found if isinstance(found, str)
        else f"no configuration of {config.pipeline.model} is known without its download",
        run=of_run(config, passes, ranks, eval_images), counts=counts,
        slots=counts.slots + int(config.policy.ema_decay > 0), parts=route.parts, rewards=rewards,
        unknown_rewards=unknown_rewards, settings=settings,
        counted_as=None if model == location else model, parts_of=route.parts_of,
        licence=checkpoints.licence_of(location), prompts=prompts, passes=passes,
    )  # fmt: skip
    if route.size is not None and denoisers is not None:
        plan = _count(plan, route, denoisers, trained, usual_call)
    return replace(plan, choices=_choices(plan, family))


def _count(
    plan: Plan, route: FamilyRoute | StockRoute, denoisers: FewBlocks, trained: Trained, usual: dict[str, Any] | None
) -> Plan:
    """The plan of a model with known dimensions: one network evaluation, and cost and memory from it."""
    config, run, size, passes = plan.config, plan.run, plan.size, plan.passes
    assert size is not None
    pipeline, settings = config.pipeline, config.eval
    drawn = route.drawn(size, plan.text.most)
    network = measure(denoisers, drawn.call, trained=trained, dtype=DTYPES[pipeline.dtype])
    eval_drawn = _eval_drawn(plan, route, drawn)
    eval_forward, eval_working = (
        (network.forward, network.working) if eval_drawn is drawn else without_gradient(denoisers, eval_drawn.call)
    )
    usual_forward = None if usual is None else without_gradient(denoisers, usual)[0]
    decode_cost, decode = drawn.decoding()
    eval_cost, eval_decode = (decode_cost, decode) if eval_drawn is drawn else eval_drawn.decoding()
    again = (pipeline.gradient_checkpointing and network.blocks > 0) + negative_again(config, passes)
    cost = cost_of(network, run, eval_forward=eval_forward, decode=decode_cost, eval_decode=eval_cost, recomputed=again)
    here, full = not config.workers.rewards, config.policy.train == "full"  # else workers hold the models that score
    scale = config.sampler.guidance_scale if settings.guidance_scale is None else settings.guidance_scale
    unknown = [] if route.parts is not None else ["text encoders and autoencoder"]
    unknown += [*route.uncounted, *(f"reward {name}" for name in plan.unknown_rewards if here)]
    facts = Facts(
        network=network, eval_working=eval_working, rows=graph_rows(config, passes),
        passes=(passes(config.sampler.guidance_scale), passes(scale)),
        keeps=plan.geometry.images_per_process // config.updates_per_rollout if config.keep_graphs is True else 0,
        gradients=plan.counts.gradients(), images=config.num_images,
        decode=decode, eval_decode=eval_decode, image=4 * 3 * size[0] * size[1] * (size[2] or 1),
        parts=route.parts or {}, rewards=plan.rewards if here else (), unknown=tuple(unknown),
        dtype=(pipeline.dtype, DTYPES[pipeline.dtype].itemsize), full=full, slots=plan.slots + plan.counts.teachers,
        reference=full and any((run.evaluations, config.policy.teachers, config.kl_coef > 0)),
        evaluates=run.evaluations > 0, at_once=route.at_once, latent=4 * drawn.elements, record=plan.counts.record(),
        scored=scored_at_once(videos=size[2] is not None),
        prompt=drawn.prompt, prompts=plan.prompts, cached=config.prompts.cache is not None,
    )  # fmt: skip
    plan = replace(plan, usual_forward=usual_forward, network=network, latent=drawn.latent, unknown="", cost=cost)
    return replace(plan, facts=facts, memory=memory_of(facts, plan.settings))


# ---- parts of it -----------------------------------------------------------------------------------------------------


def _eval_drawn(plan: Plan, route: FamilyRoute | StockRoute, drawn: DrawnSample) -> DrawnSample:
    """A sample of the evaluations; `drawn`, that of training, if they are the same or there are no evaluations."""
    settings, size = plan.config.eval, plan.size
    assert size is not None
    evaluated = (settings.height or size[0], settings.width or size[1], size[2])
    if evaluated == size or not plan.run.evaluations:
        return drawn
    try:
        return route.drawn(evaluated, plan.text.most)
    except ValueError as error:
        raise ValueError(str(error).replace("pipeline.", "eval.")) from error


def _choices(plan: Plan, family: ModelFamily) -> Choices:
    config, facts = plan.config, plan.facts
    parallel, pipeline = config.parallel, config.pipeline
    sizes = dict[int, list[int]]()
    device = "mps" if pipeline.device == "mps" else None  # others may be on another machine than this one
    copies, own = parallel.replicate or 1, family.name not in GENERIC  # stock pipelines are loaded whole
    offload = tuple(dict.fromkeys((*pipeline.offload, "rewards")))
    for shard in (parallel.shard, *(n for n in SHARDS if n <= max(NODE, plan.processes))):
        ranks = max(shard * copies, plan.processes // parallel.context)
        images, left = divmod(config.num_images, ranks * config.updates_per_rollout)
        if not left and ranks % shard == 0:
            sizes[shard] = allowed_sizes(images, plan.counts.multiple)
    forms = [
        form for form in ("int8", "nf4") if own and _passes(check_quantize, form, device, compile=pipeline.compile)
    ]
    found = Choices(sizes=sizes, videos=family.videos, forms=forms, copies=copies)
    if facts is None:
        return found
    away = replace(config, pipeline=replace(pipeline, offload=offload))
    split = replace(config, parallel=replace(parallel, shard=SHARDS[0]))
    return replace(
        found,
        encoders=set(facts.parts) > {"vae"},
        checkpoints=facts.network.blocks > 0,
        rewards=bool(facts.rewards) and _passes(check_offload, away, through_rewards=plan.counts.through_rewards),
        splits=parallel.context == 1 and own and _passes(check_together, split),
    )


def _passes(check: Callable[..., None], *given: Any, **named: Any) -> bool:
    """Whether settings pass a check of `flowrl train`."""
    try:
        check(*given, **named)
    except ValueError:
        return False
    return True


def _prompts(config: TrainConfig) -> tuple[int | None, list[str] | None, int | None]:
    """The number of training prompts, all texts to embed, and an evaluation's images; None for missing files."""
    named, settings = config.prompts, config.eval
    files = [file for file in (named.train, named.eval) if file is not None]
    rows = {file: read_prompts(named, file) for file in files if is_here(file)}
    texts, items = None, 0 if named.eval is None else None
    if all(file in rows for file in files):
        texts = list(dict.fromkeys(text for file in files for row in rows[file] for text in (row.text, row.negative)))
    if named.eval in rows:
        kept = eval_items(
            rows[named.eval], num_prompts=settings.num_prompts, samples_per_prompt=settings.samples_per_prompt
        )
        items = len(kept)
    return len(rows[named.train]) if named.train in rows else None, texts, items


def _reward_models(rewards: tuple[RewardConfig, ...]) -> tuple[tuple[tuple[str, int, int], ...], tuple[str, ...]]:
    """Models of the rewards, each once, and the names of rewards with unknown models."""
    found: dict[str, tuple[str, int, int]] = {}
    unknown: dict[str, None] = {}
    for reward in rewards:
        models = None
        if reward.name is not None:
            with suppress(ValueError):  # what it loads has to be put in place first
                models = models_of(reward_options(reward.name, reward.options))
        known = None if models is None else checkpoints.reward_models(models)
        if known is None:
            unknown[reward.called] = None
        for entry in known or ():
            found[entry[0]] = entry
    return tuple(found.values()), tuple(unknown)
