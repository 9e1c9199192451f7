"""What `flowrl train` refuses before anything loads; `plan`, `doctor` and others ask here too.

Everything that is wrong is told at once. A section is checked by itself, and what sections say together where the whole
configuration could be read.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flowrl.config.base import SETTINGS, config_files
from flowrl.config.overrides import Settings, setting_keys
from flowrl.config.strict_yaml import ConfigError, refuse
from flowrl.config.train import TrainConfig, is_here, load_config
from flowrl.runtime.failures import Faults, found_by

if TYPE_CHECKING:
    from flowrl.config.rewards import RewardConfig
    from flowrl.config.sections import PromptsConfig
    from flowrl.pipelines import ModelFamily
    from flowrl.pipelines.weights.lora_files import Lora
    from flowrl.prompts.loading import Prompt
    from flowrl.rewards.base.specs import CheckedReward
    from flowrl.training.prompting import RunPrompts
    from flowrl.training.ready import Ready


@dataclass(kw_only=True, slots=True)
class Looked:
    """What was looked at."""

    prompts: RunPrompts | None = None
    """Of the run, none of a file that could not be read; None where no file is known."""
    faults: list[str] = field(default_factory=list)
    """All that is wrong, each a sentence of its own."""
    of_prompts: list[str] = field(default_factory=list)
    """Those faults that are about files of prompts."""
    family: ModelFamily | None = None
    """Of the model, where it is known."""
    lora: Lora | None = None
    """That the run starts from, where there is one."""
    rewards: dict[int, CheckedReward] = field(default_factory=dict)
    """Those entries, by identity, whose options are right."""


def recipe_of(config: TrainConfig) -> Any:
    """The module of the recipe.

    `check(config)` refuses settings before anything loads, `objective_of(config)` is what it trains with,
    `counts(config)` what a run will take (`flowrl.recipes.counting.RecipeCounts`), `only_here(config)` why workers
    cannot draw for it, `trained_scale(config)` the guidance of the velocity that is trained, `THROUGH_REWARDS` whether
    gradients come through decoder and rewards, `REGRESSES` whether it trains the network to predict what many
    steps lead to, None where it keeps to the states of its own steps, and `main(ready, run)` trains.
    """
    return importlib.import_module(f"flowrl.recipes.{config.recipe}")


def load_checked(path: str | Path | Mapping[str, Any], overrides: Settings = (), *, here: bool = True) -> TrainConfig:
    """As `load_config`; of a configuration that it refuses, what else is wrong is told too. Raises ConfigError: as
    `load_config`, with what `preflight` would refuse of the sections that are right."""
    try:
        return load_config(path, overrides)
    except ConfigError as error:
        more = more_faults(path, overrides, error, here=here)
        file = SETTINGS if isinstance(path, Mapping) else path
        raise (ConfigError(*error.faults, *more, head=f"{file}:") if more else error) from None


def more_faults(
    path: str | Path | Mapping[str, Any], overrides: Settings, error: ConfigError, *, here: bool = True
) -> list[str]:
    """What else is wrong with a configuration that cannot be read whole.

    Of one that ships nothing is: where every setting on top of it is refused already, nothing is looked at, so that a
    slip in a key is told at once and not after seconds of imports.
    """
    shipped = not isinstance(path, Mapping) and Path(path) in config_files().values()
    if not error.rest or (shipped and all(key in str(error) for key in setting_keys(overrides))):
        return []
    found = look(error.rest, here=here).faults
    return [said for said in found if said not in error.faults]


def preflight(config: TrainConfig, *, here: bool = True, stand_in: bool = False) -> Ready:
    """Checks whatever can be checked without weights, prompt files, rewards, model folder, LoRA targets, device, and
    resolves it once.

    Args:
        here: whether this machine trains; else it may lack the device and the attention kernel.
        stand_in: whether other prompts stand for those of the run, so that it is not asked whether they fit.

    Raises ValueError: all that is wrong: what was given, what is allowed and what to change.
    """
    looked = look(config, here=here, fitting=not stand_in)
    if looked.faults:
        raise Faults(*looked.faults)
    assert looked.prompts is not None
    return resolve(config, looked.prompts, looked)


def resolve(config: TrainConfig, prompts: RunPrompts, looked: Looked | None = None) -> Ready:
    """What a run of settings that work is made of; `looked` is what was found where they were checked."""
    from flowrl.credit import CREDIT
    from flowrl.rewards.base.specs import check_reward
    from flowrl.training.model_files import location_of
    from flowrl.training.parts import init_lora, model_family
    from flowrl.training.processes.launched import num_launched
    from flowrl.training.processes.mesh import layout_of
    from flowrl.training.ready import Ready
    from flowrl.training.sampler_checks import kernel_of

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
    """Looks for all that is wrong with a configuration, or with those sections of one that could be read.

    Args:
        config: the settings, or top-level keys with their values.
        here: whether this machine trains.
        only_here: whether files of prompts that are not here are left out.
        fitting: whether prompts are to fit model and rewards.
    """
    given = config if isinstance(config, Mapping) else {one.name: getattr(config, one.name) for one in fields(config)}
    looked = Looked()
    if "prompts" in given:
        looked.of_prompts += found_by(lambda: _read(given["prompts"], looked, only_here=only_here))
    looked.faults += found_by(*_of_sections(given, looked, here=here))
    if fitting and looked.prompts is not None:
        looked.of_prompts += _of_prompts(given, looked)
    looked.faults = [*looked.of_prompts, *looked.faults]
    if isinstance(config, TrainConfig):
        looked.faults += found_by(*_of_whole(config, looked, here=here))
        if config.policy.teachers and (found := looked.prompts) is not None:
            from flowrl.recipes.visited import teachers_of

            looked.faults += found_by(lambda: teachers_of(config.policy, found.train))
    looked.faults = list(dict.fromkeys(looked.faults))
    return looked


# ---- sections by themselves ------------------------------------------------------------------------------------------


def _of_sections(given: Mapping[str, Any], looked: Looked, *, here: bool) -> Iterator[Callable[[], object]]:
    """Checks of sections that need no other."""
    from flowrl.rewards.base.specs import check_reward
    from flowrl.training.parts import check_pipeline
    from flowrl.training.processes.devices import check_device
    from flowrl.training.sampler_checks import check_sampler
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
    """The rewards of a configuration; with `trained` those of training alone."""
    own: tuple[RewardConfig, ...] = given.get("rewards", ())
    return own if trained or "eval" not in given else (*own, *given["eval"].rewards)


def _read(settings: PromptsConfig, looked: Looked, *, only_here: bool) -> None:
    """Reads all files of prompts that can be read; raises what is wrong with the others."""
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
    """What prompts lack for the model and for the rewards, or have beyond what the model takes."""
    from flowrl.generation.prompt_checks import reward_faults, source_faults, sources_taken
    from flowrl.training.model_files import location_of
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
    """Checks of what sections say together."""
    from flowrl.config.together import check_together
    from flowrl.pipelines.arithmetic.compiling import check_compile
    from flowrl.pipelines.weights.quantize import check_quantize
    from flowrl.rewards.actors.ray_rewards import check_reward_workers
    from flowrl.training.optimizers import check_optimizer
    from flowrl.training.parts import check_attention, check_tokens
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
    yield lambda: _check_number(config, looked)
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
        yield lambda: check_attention(config.pipeline, known, here=here)
        yield lambda: check_tokens(config, known)
    if config.pipeline.offload:
        yield lambda: check_offload(config, through_rewards=recipe.THROUGH_REWARDS)
    if here:
        yield lambda: check_arithmetic(config)
    if here and config.prompts.cache is not None:
        from flowrl.pipelines.weights.embedding_cache import check_cache

        yield partial(check_cache, Path(config.prompts.cache).expanduser())


def _check_number(config: TrainConfig, looked: Looked) -> None:
    """Refuses fewer prompts than are drawn apart in an iteration."""
    train = () if looked.prompts is None else looked.prompts.train
    if config.curriculum.sampling == "gaussian" and 0 < len(train) < config.prompts_per_step:
        raise ValueError(
            f"curriculum.sampling=gaussian draws prompts_per_step ({config.prompts_per_step}) different prompts, "
            f"but {config.prompts.train} holds {len(train)}: lower prompts_per_step or add prompts"
        )


def _check_trained(config: TrainConfig, known: ModelFamily, looked: Looked) -> None:
    """Refuses weights that cannot be trained, or layers that there are none of."""
    from flowrl.pipelines.shared.saved_model import check_full
    from flowrl.pipelines.weights.lora import refuse_other_network
    from flowrl.training.model_files import location_of
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
    """Refuses to leave out, or to recompute, a half of guidance that is not there."""
    from flowrl.training.model_files import location_of

    trained, scale = config.sampler.train_negative, recipe_of(config).trained_scale(config)
    if trained is not True and known.rows(location_of(config.pipeline), scale) == 1:
        key = "sampler" if scale == config.sampler.guidance_scale else "objective.options"
        raise ValueError(
            f"sampler.train_negative is {str(trained).lower()}, but at guidance scale {scale:g} ({key}.guidance_scale) "
            f"this model of family {known.name} is evaluated with the prompt alone, so nothing is negative: remove "
            "train_negative, or set a scale that guides by a negative prompt, where the family has one"
        )


def check_arithmetic(config: TrainConfig) -> None:
    """Refuses an arithmetic of autoencoder or rewards that the device of the run does not have."""
    from flowrl.runtime.precision import refuse_unable
    from flowrl.training.processes.devices import device_kind

    device = config.pipeline.device
    for key, kind in (("pipeline.vae_dtype", config.pipeline.vae_dtype), ("reward_dtype", config.reward_dtype)):
        refuse_unable(kind, device if device.startswith("cuda:") else device_kind(device), key)
