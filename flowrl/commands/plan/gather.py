"""A configuration's plan: everything that `flowrl.commands.plan.plan_text` prints."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from flowrl.commands.plan import published_models as checkpoints
from flowrl.commands.plan.cost import Cost, cost_of, decode_flops
from flowrl.commands.plan.counts import RunCounts, graph_rows, negative_again, of_run
from flowrl.commands.plan.memory import Memory, trained_bytes
from flowrl.commands.plan.network import FewBlocks, Network, few_blocks, forward_flops, measure
from flowrl.commands.plan.published_models import Parts
from flowrl.commands.plan.refusals import is_here
from flowrl.config.rewards import RewardConfig
from flowrl.config.sections import PolicyConfig
from flowrl.config.train import Geometry, TrainConfig
from flowrl.pipelines import ModelFamily, cards, known_checkpoints
from flowrl.prompts.loading import eval_items
from flowrl.recipes import forward_settings
from flowrl.rewards import models_of, reward_options
from flowrl.training.parts import DTYPES, family_options, lora_of, model_location, read_prompts

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
        tflops: sustained by one GPU, or by the CPU.
        pace: where that number is from, a sentence.
        processor: whose hours are reckoned, GPU or CPU.
        geometry: of one process, with the micro-batch that the recipe takes.
        size: what is drawn.
        text_tokens: of a prompt.
        network: one evaluation of the denoiser.
        unknown: why `network` is None; empty where it is known.
        run: evaluations of the run.
        slots: copies of the trained weights.
        parts: of the model besides the denoiser.
        rewards: models of the rewards, `(model, parameters, bytes per weight)`, each once.
        unknown_rewards: names of those whose models are not known.
        cost: FLOPs of the run.
        memory: of a process.
        licence: name, and whether the hub asks to accept it.
        prompts: number of training prompts.
    """

    name: str
    config: TrainConfig
    model: str
    family: str
    processes: int
    tflops: float
    pace: str
    processor: str
    geometry: Geometry
    size: Size | None
    text_tokens: int
    network: Network | None
    unknown: str
    run: RunCounts
    slots: int
    parts: Parts | None
    rewards: tuple[tuple[str, int, int], ...]
    unknown_rewards: tuple[str, ...]
    cost: Cost | None
    memory: Memory | None
    licence: tuple[str, bool] | None
    prompts: int | None


def gather(
    config: TrainConfig, name: str, family: ModelFamily, *, processes: int, tflops: float, pace: str, processor: str
) -> Plan:  # fmt: skip
    """Counts and measures; nothing is downloaded.

    Args:
        config: settings that passed `flowrl.commands.plan.refusals.obstacles`.
        name: of the configuration.
        family: of the model.
        processes: of the run.
        tflops: sustained by one GPU, or by the CPU.
        pace: where that number is from.
        processor: GPU or CPU.

    Raises:
        ValueError: the model cannot draw the configured size.
    """
    settings, model = config.pipeline, model_location(config.pipeline.model)
    options = family_options(settings)
    items = _eval_items(config)
    passes = partial(family.rows, model)
    run = of_run(config, passes, processes, items)
    tokens = family.text_tokens(model, options)
    size, network, eval_forward = None, None, 0.0
    targets = config.policy.target_modules or family.lora_targets
    drawn, denoisers = family.planned_size(model, options), few_blocks(family, model, targets)
    unknown = f"no configuration of {config.pipeline.model} is known without its download" * (denoisers is None)
    if drawn is not None and denoisers is not None:
        size = (drawn.height, drawn.width, drawn.num_frames)
        network = measure(
            denoisers, family.meta_call(model, drawn, tokens), targets=targets, rank=_rank(config.policy),
            dtype=DTYPES[settings.dtype],
        )  # fmt: skip
        evaluated = _eval_size(config, size)
        eval_forward = network.forward
        if evaluated != size and run.evaluations:
            eval_forward = _forward(family, model, denoisers, evaluated, tokens)
    parts = checkpoints.other_parts(model)
    rewards, unknown_rewards = _reward_models((*config.rewards, *config.eval.rewards))
    cost = memory = None
    slots = _slots(config)
    if network is not None and size is not None:
        cost = cost_of(
            network, run, eval_forward=eval_forward, decode=decode_flops(model, parts, size),
            eval_decode=decode_flops(model, parts, _eval_size(config, size)),
            recomputed=(settings.gradient_checkpointing and network.blocks > 0) + negative_again(config, passes),
        )  # fmt: skip
    geometry = _geometry(config, processes)
    if network is not None:
        memory = _memory(
            config, network, geometry, parts, rewards, unknown_rewards, slots, graph_rows(config, passes, processes)
        )
    known = known_checkpoints.checkpoints().get(model)
    return Plan(
        name=name, config=config, model=model, family=family.name, processes=processes, tflops=tflops, pace=pace,
        processor=processor, geometry=geometry, size=size, text_tokens=tokens, network=network, unknown=unknown,
        run=run, slots=slots, parts=parts, rewards=rewards, unknown_rewards=unknown_rewards, cost=cost, memory=memory,
        licence=None if known is None else (known.licence, known.gated), prompts=_train_prompts(config),
    )  # fmt: skip


def group_multiple(config: TrainConfig) -> int:
    """Images that a micro-batch is a multiple of."""
    if config.recipe == "preference":
        return 2
    return config.group_size if config.recipe == "forward" and forward_settings.objective_of(config).whole_groups else 1


# ---- parts of it -----------------------------------------------------------------------------------------------------


def _eval_size(config: TrainConfig, size: Size) -> Size:
    return config.eval.height or size[0], config.eval.width or size[1], size[2]


def _forward(family: ModelFamily, model: str, denoisers: FewBlocks, size: Size, tokens: int) -> int:
    """FLOPs of an evaluation at the size that evaluations draw; the LoRA is on the networks already."""
    try:
        call = family.meta_call(model, cards.Size(height=size[0], width=size[1], num_frames=size[2]), tokens)
    except ValueError as error:
        raise ValueError(str(error).replace("pipeline.", "eval.")) from error
    return forward_flops(denoisers, call)


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


def _rank(settings: PolicyConfig) -> int:
    """The rank of the LoRA; that of a file that is not here is taken for the usual one."""
    here = settings.init_lora is None or is_here(settings.init_lora)
    return lora_of(settings, ())[0] if here else settings.rank


def _eval_items(config: TrainConfig) -> int | None:
    """Images of an evaluation; None where its prompts are not here."""
    if config.prompts.eval is None:
        return 0
    if not is_here(config.prompts.eval):
        return None
    rows = read_prompts(config.prompts, config.prompts.eval)
    settings = config.eval
    return len(eval_items(rows, num_prompts=settings.num_prompts, samples_per_prompt=settings.samples_per_prompt))


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


def _memory(
    config: TrainConfig, network: Network, geometry: Geometry, parts: Parts | None,
    rewards: tuple[tuple[str, int, int], ...], unknown_rewards: tuple[str, ...], slots: int, rows: int,
) -> Memory:  # fmt: skip
    width = DTYPES[config.pipeline.dtype].itemsize
    held = {f"denoiser, {config.pipeline.dtype}": network.parameters * width}
    held["LoRA, gradient, Adam" + ", copies" * bool(slots)] = trained_bytes(network.lora_parameters, slots)
    encoders, freed = 0, 0
    for name, count in (parts or {}).items():
        if name == "vae":
            held["autoencoder, float32"] = count * 4
        else:
            encoders += count * width
    if config.pipeline.free_text_encoders:
        freed = encoders
    elif encoders:
        held[f"text encoders, {config.pipeline.dtype}"] = encoders
    for model, count, size in rewards:
        held[f"reward's {model.rpartition('/')[2]}"] = count * size
    unknown = tuple(f"reward {name}" for name in unknown_rewards)
    if parts is None:
        unknown = ("text encoders and autoencoder", *unknown)
    each = network.saved_checkpointed if config.pipeline.gradient_checkpointing else network.saved
    return Memory(
        held=held, unknown=unknown, image=network.saved * rows, image_checkpointed=network.saved_checkpointed * rows,
        configured=each * rows * geometry.micro_batch_size, micro_batch_size=geometry.micro_batch_size, freed=freed,
    )  # fmt: skip
