"""The subject of a bench: a configuration's pipeline, LoRA, rewards and prompts, with random weights if necessary."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from flowrl.config.rewards import RewardConfig
from flowrl.config.sections import WorkersConfig
from flowrl.config.train import Geometry, TrainConfig, is_here
from flowrl.generation.drawing import find_device
from flowrl.pipelines import Pipeline
from flowrl.pipelines.random_weights import fewer_blocks, random_pipeline
from flowrl.pipelines.shared.family_pipeline import Family
from flowrl.pipelines.shared.like_blocks import block_kinds
from flowrl.pipelines.weights.lora import Policy
from flowrl.planning.network import FewBlocks, Network, Trained, few_blocks, measure
from flowrl.planning.published_models import in_cache
from flowrl.rewards import FunctionReward, Reward, RewardInputs, RewardOutput, asks_people, models_of
from flowrl.rewards.base.specs import validate_reward_specs
from flowrl.rewards.compose import sum_of
from flowrl.runtime.failures import explain
from flowrl.runtime.precision import refuse_unable
from flowrl.runtime.randomness import counter_normal
from flowrl.session.preflight import preflight
from flowrl.training import parts
from flowrl.training.prompting import RunPrompts, encode_prompts
from flowrl.trajectory import Conditioning, Schedule

STAND_IN_PROMPTS = "asset:prompts/world_train.jsonl"
STAND_IN_REWARD = "jpeg_compressibility"
_LORA_STD = 0.01
CANNOT_LOAD = (ValueError, OSError, ImportError, RuntimeError)
"""Errors of rewards with missing weights, packages or servers."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class BenchSubject:
    """All that phases are measured on."""

    name: str
    config: TrainConfig
    """The measured configuration, with missing parts replaced."""
    family: str
    device: torch.device
    pipeline: Pipeline
    """Pipeline, loaded or with random weights."""
    policy: Policy
    rewards: tuple[tuple[Reward, RewardConfig], ...]
    """Loaded ones, with their entries."""
    absent: tuple[tuple[str, str], ...]
    """Rewards that are not measured, with the reason."""
    prompts: RunPrompts
    """Of a few iterations."""
    network: Network | None
    """Counts of one network evaluation; None if the model is unknown."""
    geometry: Geometry
    """Of one process."""
    text_encoders: bool
    layers: int | None
    """Largest number of blocks of each kind; None keeps all."""
    notes: tuple[str, ...]

    @property
    def parameters(self) -> list[Tensor]:
        """Trained weights."""
        return list(self.policy.parameters.values())

    @property
    def schedule(self) -> Schedule:
        """Noise levels of the rollout."""
        return parts.sampler_of(self.config.sampler, self.pipeline)[1]

    @property
    def passes(self) -> int:
        """Network rows of an image and step."""
        return self.pipeline.passes(self.config.sampler.guidance_scale)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the denoiser's weights."""
        return sum(weight.nbytes for weight in self.pipeline.denoiser.parameters())

    def conditioning(self, rows: int) -> Conditioning:
        """Prompts of so many rows, with their negative prompts, as rollouts have them."""
        cond = encode_prompts(self.pipeline, self.prompts.train[: max(1, rows // self.config.group_size)])
        return cond[torch.arange(rows) % len(cond)]

    def latents(self, rows: int) -> Tensor:
        """Random latents `[rows, *latent]`."""
        return counter_normal((rows, *self.pipeline.latent_shape), "bench").to(self.device)

    def evaluation(self, rows: int) -> Callable[[], Tensor]:
        """One evaluation of so many rows without guidance, in the middle of the schedule, its inputs made before."""
        schedule, latents = self.schedule, self.latents(rows)
        tensors = self.conditioning(rows).tensors
        positive = Conditioning({name: value for name, value in tensors.items() if not name.startswith("negative/")})
        timestep = schedule.timestep[schedule.num_steps // 2].to(self.device).expand(rows)
        return lambda: self.pipeline.network(latents, timestep, positive)

    @property
    def denoisers(self) -> list[Any]:
        """The network, or its experts."""
        whole = self.pipeline.denoiser
        return list(whole.values()) if isinstance(whole, nn.ModuleDict) else [whole]

    def forward_flops(self, rows: int) -> float:
        """FLOPs of a forward pass of so many rows; 0 where they are not known."""
        return 0.0 if self.network is None else self.network.forward * rows

    def backward_flops(self, rows: int) -> float:
        """FLOPs of the backward pass after it."""
        return 0.0 if self.network is None else self.network.backward * rows

    @contextmanager
    def unchanged_weights(self) -> Iterator[None]:
        """A context in which the LoRA may be trained; it is restored afterwards."""
        kept = [weight.detach().clone() for weight in self.parameters]
        try:
            yield
        finally:
            for weight, before in zip(self.parameters, kept, strict=True):
                weight.data.copy_(before)
                weight.grad = None


def prepare(config: TrainConfig, name: str, *, random_weights: bool, layers: int | None) -> BenchSubject:
    """Checks a configuration like `flowrl train`, except for missing prompts and rewards, and loads it.
    `random_weights` are taken even if the checkpoint is here; with them, `layers` blocks of each kind stay (None leaves
    all). Raises ValueError: a setting that cannot work, or an unknown model."""
    notes = list[str]()
    config = _measurable(config, notes)
    config, absent = _with_rewards(config)
    stands_in = config.prompts.train == STAND_IN_PROMPTS
    ready = preflight(config, stand_in=stands_in)
    prompts, model, family = ready.prompts, ready.location, cast(Family, ready.family)
    drawn = random_weights or layers is not None or not (Path(model).is_dir() or in_cache(model))
    device = find_device(config.pipeline.device, "pipeline.device=")
    refuse_unable(config.reward_dtype, device, "reward_dtype")
    card = family.card(model)
    if layers is not None and card is not None and fewer_blocks(card, layers) == block_kinds(vars(card.network)):
        layers = None  # the network has no more blocks of any kind than may stay
    if drawn:
        options = parts.family_options(config.pipeline)
        made: Pipeline = random_pipeline(
            family, model, dtype=parts.DTYPES[config.pipeline.dtype], device=device, layers=layers,
            attention=config.pipeline.attention, compile=config.pipeline.compile,
            quantize=config.pipeline.quantize, options=options,
        )  # fmt: skip
        notes.append(
            f"Random weights of the dimensions of {config.pipeline.model}: prompts are random embeddings, "
            "and images are noise, whose brightness is rewarded too; text encoders are not there"
        )
    else:
        made = parts.load_pipeline(config.pipeline, device)
    if layers is not None:
        notes.append(
            f"SHORTENED: at most {layers} blocks of each kind are left, so no number here is that of the model"
        )
    rank, alpha, targets = parts.lora_of(config.policy, made.lora_targets, parts.init_lora(config))
    targets = targets if layers is None else _present(made.denoiser, targets)
    policy = Policy(
        made.denoiser, rank=rank, alpha=alpha, targets=targets, seed=config.seed, variant=config.policy.lora_variant
    )
    for number, (key, weight) in enumerate(policy.parameters.items()):
        if "lora_B" in key:  # zeros are faster than real numbers on some GPUs
            weight.data.copy_(_LORA_STD * counter_normal(weight.shape, "lora", number))
    if config.policy.ema_decay > 0:
        policy.add_slot("ema")
    rewards, more = _load_rewards(config, device)
    if not rewards:
        entry = RewardConfig(name=STAND_IN_REWARD)
        rewards = [(validate_reward_specs([entry])[0].build(device, {}), entry)]
        notes.append(f"No reward of the configuration is here: iterations are scored by {STAND_IN_REWARD} instead")
    config = replace(config, rewards=tuple(entry for _, entry in rewards))
    few = replace(prompts, train=prompts.train[: 4 * config.prompts_per_step], held_out=())
    return BenchSubject(
        name=name, config=config, family=family.name, device=device, pipeline=made, policy=policy,
        rewards=tuple(rewards),
        absent=(*absent, *more), prompts=few, network=_network(config, family, model, layers),
        geometry=config.resolve_batch(1), text_encoders=not drawn, layers=layers, notes=tuple(notes),
    )  # fmt: skip


def _measurable(config: TrainConfig, notes: list[str]) -> TrainConfig:
    """What a bench measures: one process that trains a LoRA on prompts that are here and evaluates nothing; refuses
    what would be measured as something else."""
    if config.policy.train == "full":
        raise ValueError(
            "policy.train is full, and a bench measures a LoRA alone: set policy.train=lora to measure that, or run "
            "'flowrl train' for a few iterations with num_iterations; its report tells the time of every stage"
        )
    for key, number in (("shard", config.parallel.shard), ("context", config.parallel.context)):
        if number > 1:
            raise ValueError(
                f"parallel.{key} is {number}, and a bench is one process with the whole model: set parallel.{key}=1 to "
                "measure that, or launch 'flowrl train' with torchrun for a few iterations"
            )
    given = {"rollouts": config.workers.rollouts, "rewards": config.workers.rewards}
    named = " and ".join(f"workers.{key}={number}" for key, number in given.items() if number)
    if named:
        notes.append(f"{named} left out: a bench draws and scores in its own process")
    train = config.prompts.train
    if not is_here(train):
        notes.append(f"prompts.train, {train}, is not here: prompts are those of {STAND_IN_PROMPTS}")
        train = STAND_IN_PROMPTS
    return replace(
        config,
        workers=WorkersConfig() if named else config.workers,
        prompts=replace(config.prompts, train=train, eval=None, cache=None),
        eval_every=0,
        eval=replace(config.eval, rewards=(), initial=False),
    )


def _with_rewards(config: TrainConfig) -> tuple[TrainConfig, list[tuple[str, str]]]:
    """The configuration with the rewards that pass their checks, and the others with the reason."""
    kept, absent = list[RewardConfig](), list[tuple[str, str]]()
    for entry in config.rewards:
        options = validate_reward_specs([replace(entry, weight=1.0, schedule=())])[0].options
        try:
            if asks_people(entry.name):
                raise ValueError("a step that is only measured asks no people")
            for model in models_of(options) or ():
                if not (Path(model.name).exists() or in_cache(model.name)):
                    raise ValueError(
                        f"{model.name} is not in the hub's cache, and a bench downloads nothing: fetch it first"
                    )
        except ValueError as error:
            absent.append((entry.called, explain(error)))
        else:
            kept.append(entry)
    more = [] if any(entry.weight for entry in kept) else [RewardConfig(name=STAND_IN_REWARD)]
    return replace(config, rewards=(*kept, *more)), absent


def _load_rewards(
    config: TrainConfig, device: torch.device
) -> tuple[list[tuple[Reward, RewardConfig]], list[tuple[str, str]]]:
    loaded, absent = list[tuple[Reward, RewardConfig]](), list[tuple[str, str]]()
    shared = dict[Hashable, Any]()
    for checked in validate_reward_specs(config.rewards):
        try:
            loaded.append((checked.build(device, shared), checked.entry))
        except CANNOT_LOAD as error:
            absent.append((checked.entry.called, explain(error)))
    return loaded, absent


def _network(config: TrainConfig, family: Family, model: str, layers: int | None) -> Network | None:
    """One evaluation, counted on the meta device."""
    options = parts.family_options(config.pipeline)
    size, card = family.planned_size(model, options), family.card(model)
    if size is None or card is None:
        return None
    rank, _, targets = parts.lora_of(config.policy, family.lora_targets, parts.init_lora(config))
    if layers is None:
        denoisers = few_blocks(family, model, targets)
    else:
        least = family.meta_denoiser(model, fewer_blocks(card, layers))
        denoisers = None if least is None else FewBlocks(least=least)
        targets = targets if least is None else _present(least, targets)
    if denoisers is None:
        return None
    call: dict[str, Any] = family.meta_call(model, size, family.text_tokens(model, options))
    trained = Trained(targets=targets, rank=rank)
    return measure(denoisers, call, trained=trained, dtype=parts.DTYPES[config.pipeline.dtype])


def _present(denoiser: nn.Module, targets: Sequence[str]) -> list[str]:
    """The LoRA's layers that a shortened network still has: the last block of some families lacks a few."""
    names = [name for name, _ in denoiser.named_modules()]
    return [target for target in targets if any(f".{name}".endswith(f".{target}") for name in names)]


def joined_reward(subject: BenchSubject) -> Any:
    """The rewards of a subject as one, as runs have them."""
    how, members = subject.config.reward_aggregation, list(subject.rewards)

    def brightness(inputs: RewardInputs) -> RewardOutput:
        values = 1000 * inputs.images.mean((1, 2, 3))  # no two images of noise have the same
        return RewardOutput(values=values, valid=torch.ones_like(values, dtype=torch.bool))

    if not subject.text_encoders:  # images of noise, which most rewards think equal: nothing would be trained
        reward = FunctionReward(name="brightness", score=brightness, needs=frozenset(), version="bench")
        members.append((reward, RewardConfig(name=reward.name)))
    made = sum_of(
        members,
        merge=how if how in ("geometric", "harmonic") else "sum",
        partial=subject.config.reward_partial,
    )
    return replace(made, dtype=subject.config.reward_dtype)
