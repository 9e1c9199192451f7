"""Refuses what cannot train before anything loads; `plan`, `doctor` and other commands use the same checks.

Reports all faults at once: each section by itself, and the whole if all of it could be read.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flowrl.config.base import SETTINGS, read_with_base
from flowrl.config.overrides import Settings, setting_keys
from flowrl.config.strict_yaml import ConfigError, dotted_items, refuse
from flowrl.config.train import TrainConfig, is_here, load_config, location_of
from flowrl.runtime.failures import Faults, found_by

if TYPE_CHECKING:
    from flowrl.config.rewards import RewardConfig
    from flowrl.config.sections import PromptsConfig
    from flowrl.pipelines import ModelFamily
    from flowrl.pipelines.weights.lora_files import Lora
    from flowrl.prompts.loading import Prompt
    from flowrl.rewards.base.specs import CheckedReward
    from flowrl.training.parts import Ready
    from flowrl.training.prompting import RunPrompts

_LOOKED_AT = {"pipeline", "prompts", "rewards", "eval", "sampler", "logging"}
"""The sections that `_of_sections` and the prompts' checks look at by themselves."""


@dataclass(kw_only=True, slots=True)
class Looked:
    """What the checks read and found."""

    prompts: RunPrompts | None = None
    """Prompts of the run, without the files that could not be read; None if no file is known."""
    faults: list[str] = field(default_factory=list)
    """All faults, one sentence each."""
    of_prompts: list[str] = field(default_factory=list)
    """The faults among them that concern prompt files."""
    family: ModelFamily | None = None
    """Family of the model, if it is known."""
    lora: Lora | None = None
    """The LoRA that the run starts from, if there is one."""
    rewards: dict[int, CheckedReward] = field(default_factory=dict)
    """The rewards whose options are right, by the identity of their entry."""


def recipe_of(config: TrainConfig) -> Any:
    """The module of the recipe.

    It has `check(config)`, which refuses settings before anything loads; `objective_of(config)`, its loss;
    `counts(config)`, what a run takes (`flowrl.recipes.counting.RecipeCounts`); `only_here(config)`, why workers cannot
    draw for it; `trained_scale(config)`, the guidance of the trained velocity; `THROUGH_REWARDS`, whether gradients
    pass through decoder and rewards; `REGRESSES`, whether the network learns to predict the result of many steps (None
    if it keeps to the states of its own steps); and `main(ready, run)`, which trains.
    """
    return importlib.import_module(f"flowrl.recipes.{config.recipe}")


def load_checked(path: str | Path | Mapping[str, Any], overrides: Settings = (), *, here: bool = True) -> TrainConfig:
    """Loads like `load_config`. Raises ConfigError: adds what `preflight` would refuse in the valid sections."""
    try:
        return load_config(path, overrides)
    except ConfigError as error:
        more = more_faults(path, overrides, error, here=here)
        file = SETTINGS if isinstance(path, Mapping) else path
        raise (ConfigError(*error.faults, *more, head=f"{file}:") if more else error) from None


def more_faults(
    path: str | Path | Mapping[str, Any], overrides: Settings, error: ConfigError, *, here: bool = True
) -> list[str]:
    """Further faults of a configuration that could be read only in part. What ships has none: if each of your own keys
    is refused already, or is one that reading has checked, you learn of a misspelt key before seconds of imports."""
    if not error.rest:
        return []
    own = [*(key for key, _ in dotted_items(read_with_base(path, own=True))), *setting_keys(overrides)]
    if all(key in str(error) or key.partition(".")[0] not in _LOOKED_AT for key in own):
        return []
    found = look(error.rest, here=here).faults
    return [said for said in found if said not in error.faults]


def preflight(config: TrainConfig, *, here: bool = True, stand_in: bool = False) -> Ready:
    """Resolves a configuration; checks what needs no weights: prompts, rewards, model folder, LoRA targets, device.

    If another machine trains (not `here`), this one may lack device and attention kernel; with `stand_in` prompts, it
    is not checked whether they fit. Raises ValueError: all faults, with what was given, is allowed, and to change.
    """
    looked = look(config, here=here, fitting=not stand_in)
    if looked.faults:
        raise Faults(*looked.faults)
    assert looked.prompts is not None
    return resolve(config, looked.prompts, looked)


def resolve(config: TrainConfig, prompts: RunPrompts, looked: Looked | None = None) -> Ready:
    """Resolves valid settings into the parts of a run; `looked` is what the checks found."""
    from flowrl.credit import CREDIT
    from flowrl.rewards.base.specs import check_reward
    from flowrl.training.parts import Ready, init_lora, kernel_of, model_family
    from flowrl.training.processes.launched import num_launched
    from flowrl.training.processes.mesh import layout_of

    found, recipe, parallel = looked or Looked(lora=init_lora(config)), recipe_of(config), config.parallel
    world = max(num_launched(), parallel.shard * parallel.context * (parallel.replicate or 1))

    def checked(entries: Sequence[RewardConfig]) -> tuple[CheckedReward, ...]:
        return tuple(found.rewards.get(id(entry)) or check_reward(entry) for entry in entries)

    return Ready(
        config=config,
        recipe=recipe,
        prompts=prompts,
        family=found.family or model_family(config.pipeline),
        location=location_of(config.pipeline),
        rewards=checked(config.rewards),
        measured=checked(config.eval.rewards),
        kernel=kernel_of(config.sampler),
        method=CREDIT[config.credit.method],
        objective=recipe.objective_of(config),
        layout=layout_of(parallel, world),
        lora=found.lora,
    )


def look(
    config: TrainConfig | Mapping[str, Any], *, here: bool = True, only_here: bool = False, fitting: bool = True
) -> Looked:
    """Looks for all faults of a configuration, or of the top-level keys that could be read. `only_here` skips prompt
    files that are not on this machine; `fitting` checks that prompts fit the model and the rewards."""
    given = config if isinstance(config, Mapping) else {one.name: getattr(config, one.name) for one in fields(config)}
    looked = Looked()
    if "prompts" in given:
        looked.of_prompts += found_by(lambda: _read(given["prompts"], looked, only_here=only_here))
    looked.faults += found_by(*_of_sections(given, looked, here=here))
    if fitting and looked.prompts is not None:
        looked.of_prompts += _of_prompts(given, looked)
    if isinstance(config, TrainConfig):
        looked.faults += found_by(*_of_whole(config, looked, here=here))
        if config.policy.teachers and (found := looked.prompts) is not None:
            from flowrl.recipes.visited import teachers_of

            looked.of_prompts += found_by(lambda: teachers_of(config.policy, found.train))
    looked.faults = list(dict.fromkeys([*looked.of_prompts, *looked.faults]))
    return looked


# ---- sections by themselves ------------------------------------------------------------------------------------------


def _of_sections(given: Mapping[str, Any], looked: Looked, *, here: bool) -> Iterator[Callable[[], object]]:
    """Checks each section that needs no other."""
    from flowrl.rewards.base.specs import check_reward
    from flowrl.training.parts import check_pipeline, check_sampler
    from flowrl.training.processes.devices import check_device
    from flowrl.training.trackers.opening import check_trackers

    def family() -> None:
        looked.family = check_pipeline(given["pipeline"])

    def reward(entry: RewardConfig) -> None:
        looked.rewards[id(entry)] = check_reward(entry)

    if "pipeline" in given:
        yield family
        if here:
            yield lambda: check_device(given["pipeline"].device, model=given["pipeline"].model)
    if here and "logging" in given:
        logged = given["logging"]
        yield lambda: check_trackers(logged.wandb, logged.trackio, logged.tensorboard)
    yield from (partial(reward, entry) for entry in _entries(given))
    if "sampler" in given:
        yield lambda: check_sampler(given["sampler"])


def _entries(given: Mapping[str, Any], *, trained: bool = False) -> tuple[RewardConfig, ...]:
    """The rewards of a configuration, or only those of training if `trained`."""
    own: tuple[RewardConfig, ...] = given.get("rewards", ())
    return own if trained or "eval" not in given else (*own, *given["eval"].rewards)


def _read(settings: PromptsConfig, looked: Looked, *, only_here: bool) -> None:
    """Reads all prompt files that can be read, then raises the faults of the others."""
    from flowrl.training.parts import read_prompts
    from flowrl.training.prompting import RunPrompts

    rows: dict[str, tuple[Prompt, ...]] = {"train": (), "eval": ()}

    def read(key: str, text: str) -> None:
        rows[key] = tuple(read_prompts(settings, text))

    named = {key: text for key in rows if (text := getattr(settings, key)) is not None}
    faults = found_by(*(partial(read, *one) for one in named.items() if not only_here or is_here(one[1])))
    looked.prompts = RunPrompts(train=rows["train"], held_out=rows["eval"])
    if faults:
        raise Faults(*faults)


def _of_prompts(given: Mapping[str, Any], looked: Looked) -> Iterator[str]:
    """What prompts lack for the model and the rewards, or give that the model does not take."""
    from flowrl.generation.prompt_checks import reward_faults, source_faults, sources_taken
    from flowrl.training.parts import family_options

    assert looked.prompts is not None
    known, allowed = looked.family, None
    if known is not None:
        model, options = location_of(given["pipeline"]), family_options(given["pipeline"])
        try:
            allowed = sources_taken(known, model, options)
        except ValueError as error:
            yield str(error)
    alone = given.get("reward_partial") != "renormalise"
    for rows, trained in ((looked.prompts.train, True), (looked.prompts.held_out, False)):
        if known is not None:
            yield from source_faults(rows, known, allowed)
        rewards = [looked.rewards[id(one)] for one in _entries(given, trained=trained) if id(one) in looked.rewards]
        yield from reward_faults(rows, rewards, trained=trained, alone=alone)


# ---- the configuration as a whole ------------------------------------------------------------------------------------


def _of_whole(config: TrainConfig, looked: Looked, *, here: bool) -> Iterator[Callable[[], object]]:
    """Checks whether the sections fit together."""
    from flowrl.config.together import check_together
    from flowrl.pipelines.arithmetic.compiling import check_compile
    from flowrl.pipelines.weights.quantize import check_quantize
    from flowrl.rewards.actors.ray_rewards import check_reward_workers
    from flowrl.training.optimizers import check_optimizer
    from flowrl.training.parts import check_attention, check_cached, check_tokens
    from flowrl.training.processes.devices import device_kind
    from flowrl.training.processes.launched import num_launched
    from flowrl.training.processes.mesh import data_ranks, layout_of
    from flowrl.training.scoring import check_offload, check_rewards, check_routes, check_votes
    from flowrl.workers.layout import check_workers

    kind, recipe = device_kind(config.pipeline.device) if here else None, recipe_of(config)
    yield lambda: check_together(config)
    if here:
        yield lambda: layout_of(config.parallel, num_launched())
    yield lambda: config.resolve_batch(data_ranks(config))
    train = () if looked.prompts is None else looked.prompts.train
    few = (
        f"curriculum.sampling=gaussian draws prompts_per_step ({config.prompts_per_step}) different prompts, but "
        f"{config.prompts.train} holds {len(train)}: lower prompts_per_step or add prompts"
    )
    drawn_once = config.curriculum.sampling == "gaussian"
    yield partial(refuse, (drawn_once and 0 < len(train) < config.prompts_per_step, few))
    yield lambda: check_rewards(config.rewards, config.eval.rewards, config.reward_aggregation, config.reward_partial)
    yield lambda: check_votes(config, data_ranks(config) * config.parallel.context, here=here)
    if len(looked.rewards) == len((*config.rewards, *config.eval.rewards)):
        if config.workers.rewards or config.workers.reward_env is not None:
            yield lambda: check_reward_workers(config.workers, config.rewards, config.recipe)
        yield lambda: recipe.check(config)
    if config.workers.rollouts:
        yield lambda: check_workers(config, recipe.only_here(config), here=here)
    yield lambda: check_compile(config.pipeline.compile, kind)
    yield lambda: check_quantize(config.pipeline.quantize, kind)
    yield lambda: check_optimizer(config, kind)
    if (known := looked.family) is not None:
        stills = f"eval.temporal measures videos, but family {known.name} makes images: remove it"
        yield partial(refuse, (config.eval.temporal and not known.videos, stills))
        yield lambda: check_routes(config.rewards, known.name, known.parts)
        yield lambda: _check_trained(config, known, looked)
        yield lambda: _check_negative(config, known)
        yield lambda: check_memory(config, known)
        yield lambda: check_attention(config.pipeline, known, here=here)
        yield lambda: check_tokens(config, known)
        yield lambda: check_cached(config.sampler.first_block_cache, known, location_of(config.pipeline))
    if config.pipeline.offload:
        yield lambda: check_offload(config, through_rewards=recipe.THROUGH_REWARDS)
    if here:
        yield lambda: check_arithmetic(config)
    if here and config.prompts.cache is not None:
        from flowrl.pipelines.weights.embedding_cache import check_cache

        yield partial(check_cache, Path(config.prompts.cache).expanduser())


def _check_trained(config: TrainConfig, known: ModelFamily, looked: Looked) -> None:
    """Refuses weights that cannot be trained and names of layers that match none."""
    from flowrl.pipelines.shared.saved_model import check_full
    from flowrl.pipelines.weights.lora import refuse_other_network
    from flowrl.training.parts import init_lora, lora_of

    location = location_of(config.pipeline)
    if config.policy.train == "full":
        check_full(config, known, location)
    else:
        lora = looked.lora = init_lora(config)
        rank, _, _ = lora_of(config.policy, known.lora_targets, lora)
        known.check(location, config.policy.target_modules or known.lora_targets, rank)
        if lora is not None and (network := known.meta_denoiser(location)) is not None:
            refuse_other_network(network, lora)


def _check_negative(config: TrainConfig, known: ModelFamily) -> None:
    """Refuses to skip or recompute the negative half of guidance if there is no such half."""

    trained, scale = config.sampler.train_negative, recipe_of(config).trained_scale(config)
    if trained is not True and known.rows(location_of(config.pipeline), scale) == 1:
        key = "sampler" if scale == config.sampler.guidance_scale else "objective.options"
        raise ValueError(
            f"sampler.train_negative is {str(trained).lower()}, but at guidance scale {scale:g} ({key}.guidance_scale) "
            f"this model of family {known.name} is evaluated with the prompt alone, so nothing is negative: remove "
            "train_negative, or set a scale that guides by a negative prompt, where the family has one"
        )


def check_memory(config: TrainConfig, known: ModelFamily) -> None:
    """Refuses to train beside whole paths where guidance goes by earlier steps of a path."""
    from flowrl.credit import CREDIT
    from flowrl.training.parts import family_options

    sampler, recipe, model = config.sampler, recipe_of(config), location_of(config.pipeline)
    beside = {
        f"recipe={config.recipe}": recipe.REGRESSES is not False,
        f"credit.method={config.credit.method}": not CREDIT[config.credit.method].of_outcomes,
        "workers.engine": config.workers.engine is not None,
        "dmd.weight": config.dmd.weight > 0,
    }
    given = family_options(config.pipeline), recipe.trained_scale(config), sampler.num_steps
    if (asks := ", ".join(key for key, does in beside.items() if does)) and known.remembers(model, *given):
        raise ValueError(
            f"family {known.name} guides the later of {sampler.num_steps} steps by the steps before them, and {asks} "
            "evaluates steps by themselves: set pipeline.options.projected=false, fewer sampler.num_steps, or "
            "guidance_scale=1"
        )


def check_arithmetic(config: TrainConfig) -> None:
    """Refuses an arithmetic for autoencoder or rewards that the run's device does not support."""
    from flowrl.runtime.precision import refuse_unable
    from flowrl.training.processes.devices import device_kind

    device = config.pipeline.device
    for key, kind in (("pipeline.vae_dtype", config.pipeline.vae_dtype), ("reward_dtype", config.reward_dtype)):
        refuse_unable(kind, device if device.startswith("cuda:") else device_kind(device), key)
