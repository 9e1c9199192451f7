"""A first run of a model: the recommended recipe on its own model, prompts and reward, measured before and after."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from flowrl.config.base import find_config
from flowrl.config.overrides import Settings
from flowrl.config.prompt_sets import PROMPT_SETS, advice_on, set_of_file
from flowrl.config.sections import PipelineConfig
from flowrl.config.train import ConfigError, TrainConfig, is_here, load_config, location_of, mapping_of
from flowrl.pipelines import family_for, family_name
from flowrl.pipelines.places.known_checkpoints import usual_sampling
from flowrl.planning.bases import EVERYDAY, EVERYDAY_EVAL, Wish, base_for
from flowrl.planning.recommended import is_recommended, recommended
from flowrl.planning.written import placed
from flowrl.rendering.markup import plural
from flowrl.session.advice import FEW, SMALL_CLIP, few_step_advice, is_few_step, watches_sharpness
from flowrl.session.preflight import look

SHARPNESS = {"name": "jpeg_compressibility", "weight": 0.0}
"""A reward that is only logged: images that lose detail make smaller files."""

USUAL = {"name": "clip_score", "options": {"model": "openai/clip-vit-large-patch14"}}
"""A reward for any text, whose model requires no licence to be accepted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FirstRun:
    """The settings of a first run, the configuration that they build on, and what to know of them."""

    config: TrainConfig
    base: str
    notes: tuple[str, ...]


def first_run(wish: Wish, settings: Settings = ()) -> FirstRun:
    """A first run with the recommended recipe; a few-step checkpoint gets the policy gradient of its family. `settings`
    replace what follows from the wish; the nearest shipped configuration fills in the rest. Raises ValueError: nothing
    ships for the model, or the settings do not go together."""
    few = is_few_step(PipelineConfig(model=wish.model))
    base = base_for(replace(wish, recommended=not few))
    below = load_config(find_config(base))
    given = mapping_of(below)
    if wish.model != below.pipeline.model:
        given["pipeline"] |= {"model": wish.model, "revision": None, "variant": None}
    if wish.reward is not None and [reward.name for reward in below.rewards] != [wish.reward]:
        file, colon, function = wish.reward.rpartition(":")
        given["rewards"] = [{"file": placed(file), "function": function} if colon else {"name": wish.reward}]
    found, notes = with_prompts(given, wish)
    location = location_of(found.pipeline)
    family = family_for(family_name(found.pipeline.name, location), location)
    if few:
        found = in_few_steps(found, family.name)
    else:
        found = found if is_recommended(found) else recommended(found, partial(family.rows, location))
        unproven = "" if wish.model.startswith("asset:") else ", and is unproven at this size"
        recipe = f"{found.objective.name} with {plural(found.updates_per_rollout, 'update')} a rollout"
        notes.append(f"{recipe} learned most for its cost on the embedded models{unproven}")
    config = measured(found, settings)
    return FirstRun(config=config, base=base, notes=(*notes, *few_step_advice(config)))


def in_few_steps(config: TrainConfig, family: str) -> TrainConfig:
    """The run with its checkpoint's published steps and guidance, and RTDMD's noise and clip range (arXiv 2605.26108).
    The noise of `cps` is finite from the first step on; noise at the last step would stay in the image."""
    usual, given = usual_sampling(family, config.pipeline.model), mapping_of(config)
    steps = int(min(usual["num_steps"], FEW))
    noise = {"kernel": "cps", "noise_level": 0.9}
    if steps > 1:
        noise |= {"sde_window_size": min(2, steps - 1), "sde_window_range": [0, steps - 1]}
    for section in ("sampler", "eval"):
        given[section] |= {"num_steps": steps, "guidance_scale": usual["guidance_scale"]}
    return load_config({**given, "clip_range": SMALL_CLIP, "sampler": {**given["sampler"], **noise}})


def with_prompts(given: dict[str, Any], wish: Wish) -> tuple[TrainConfig, list[str]]:
    """The configuration with the wished prompts, or shipped ones for missing ones. Raises ValueError: none are fit."""
    train = given["prompts"]["train"]
    if wish.prompts is not None:
        given["prompts"] |= {"train": placed(wish.prompts), "eval": wish.eval_prompts and placed(wish.eval_prompts)}
        given, notes = with_reward(given, wish)
        return without_evaluation(given), notes
    if wish.eval_prompts is not None:
        given["prompts"]["eval"] = placed(wish.eval_prompts)
    if is_here(train):
        return without_evaluation(given), []
    key = set_of_file(train)
    ships = (PROMPT_SETS[key].ships if key is not None else None) or (EVERYDAY, EVERYDAY_EVAL)
    prompts = {**given["prompts"], "train": ships[0], "eval": wish.eval_prompts or ships[1]}
    plain, notes = with_reward({**given, "prompts": prompts}, wish)
    if suits(plain):
        said = f"its prompts are {ships[0]}, which ship, in place of {train}: name yours with `prompts`"
        return without_evaluation(plain), [said, *notes]
    return without_evaluation(given), [f"put its prompts at {train} first{'; ' * bool(key)}{advice_on(train)}"]


def with_reward(given: dict[str, Any], wish: Wish) -> tuple[dict[str, Any], list[str]]:
    """The configuration with CLIPScore if you wish for no reward and its own need more than its prompts have."""
    plain = {**given, "rewards": [USUAL]}
    if wish.reward is not None or suits(given) or not suits(plain):
        return given, []
    own = ", ".join(reward["name"] or reward["function"] for reward in given["rewards"])
    return plain, [f"its reward is CLIPScore, because {own} needs more than the text of these prompts"]


def suits(given: dict[str, Any]) -> bool:
    """Whether the available prompts have what model and rewards need."""
    return not look(without_evaluation(given), here=False, only_here=True).of_prompts


def without_evaluation(given: dict[str, Any]) -> TrainConfig:
    """The configuration without evaluation if it has no held-out prompts."""
    if given["prompts"]["eval"] is None:
        given = {**given, "eval_every": 0, "budget": {**given["budget"], "evals": 0}}
    return load_config(given)


def measured(config: TrainConfig, settings: Settings) -> TrainConfig:
    """The run with an evaluation before and after and a logged sharpness, then with your own settings."""
    given = mapping_of(config)
    if config.prompts.eval is not None:
        given |= {"eval_every": config.num_iterations, "budget": {**given["budget"], "evals": 0}}
    if not watches_sharpness(config):
        watched = {**given, "rewards": [*given["rewards"], SHARPNESS]}
        try:
            given = watched if not look(load_config(watched), here=False, only_here=True).faults else given
        except ConfigError:  # rewards that are combined otherwise than by weight
            pass
    return load_config(given, settings)
