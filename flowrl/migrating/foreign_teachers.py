"""Translates keys of on-policy distillation, whose teachers other toolkits list in their own ways."""

from __future__ import annotations

import re
from typing import Any

from flowrl.migrating.foreign_files import Made

_WEIGHTS = {"xt": "transition", "v": "velocity"}
_PLACE = re.compile(r"((?:backend\.lora_cfg\.frozen_adapters|algorithm\.teachers)\[\d+\])\.(\w+)")


def teachers(keys: dict[str, Any], pattern: str, names: dict[str, str]) -> dict[str, Made]:
    """Translates teachers by keys that match a pattern of teacher and property; `names` has our names of properties."""
    found, made, listed = dict[str, dict[str, Any]](), dict[str, Made](), list[dict[str, Any]]()
    for key, value in keys.items():
        said = re.fullmatch(pattern, key)
        if said is not None and (ours := names.get(said[2])) is not None and value is not None:
            told = [value] if ours == "prompts" and not isinstance(value, list) else value
            found.setdefault(said[1], {})[ours] = told
            made[key] = {"policy.teachers": listed}
    listed += found.values()
    return made


def flow_factory_teachers(keys: dict[str, Any]) -> dict[str, Made]:
    """Flow-Factory: teachers with their data sets, what the loss compares, and the leading share of the steps."""
    found, reach, target = dict[str, Made](), keys.get("train.timestep_range"), keys.get("train.loss_target")
    found["train.loss_target"] = f"- the loss has no target {target}: choose objective.options.weight"
    if target in _WEIGHTS:
        found["train.loss_target"] = {"objective.options.weight": _WEIGHTS[target]}
    found["train.timestep_range"] = "- all steps are trained where none has noise"
    if isinstance(reach, float) and keys.get("scheduler.dynamics_type") != "ODE":
        steps = int(keys.get("train.num_inference_steps") or 2)
        found["train.timestep_range"] = {"sampler.sde_window_range": [0, max(1, min(int(steps * reach), steps - 1))]}
    names = {"path": "lora", "applicable_datasets": "prompts", "guidance_scale": "guidance_scale"}
    return found | teachers(keys, r"train\.teachers\[(\d+)\]\.(\w+)", names)


def unirl_teachers(keys: dict[str, Any]) -> dict[str, Made]:
    """UniRL: a teacher is said in two places by its name, some rollouts are one update, next to no noise is none."""
    found, parts = dict[str, Made](), int(keys.get("accumulate_rollouts") or 1)
    prompts, rollouts, level = (keys.get(key) or 0 for key in ("batch_size", "num_rollouts", "sampling.eta"))
    found["batch_size"] = found["accumulate_rollouts"] = {"prompts_per_step": prompts * parts}
    found["num_rollouts"] = {"num_iterations": rollouts // parts}
    found["sampling.eta"] = {"sampler.noise_level": level}
    if level < 1e-3:
        found["sampling.eta"] = found["pipeline.strategy._target_"] = {"sampler.kernel": "ode"}
    places = {key: said for key in keys if (said := _PLACE.fullmatch(key))}
    by_name = {f"{keys.get(f'{said[1]}.name')}:{said[2]}": keys[key] for key, said in places.items()}
    names = {"path": "lora", "guidance_scale": "guidance_scale", "name": "prompts"}
    made = next(iter(teachers(by_name, r"(.+):(\w+)", names).values()), "! it names no teacher")
    return found | dict.fromkeys(places, made)
