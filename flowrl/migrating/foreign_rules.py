"""Keys of other toolkits that say something only together, or by their toolkit's own rules."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from flowrl.config.foreign import foreign_words
from flowrl.migrating.foreign_files import Foreign, Kind

Made = dict[str, Any] | str
"""Our keys with their values, or why there are none, as in the tables (``- why``, ``! why``)."""
_STAYS = "so that of the base stays"


def apply_rules(given: Foreign) -> dict[str, Made]:
    """What is made of those keys of a file that its table leaves to a rule."""
    return {key: made for key, made in _RULES[given.kind](given).items() if key in given.keys}


def _flow_grpo(given: Foreign) -> dict[str, Made]:
    keys, said = given.keys, given.said
    found = _rewards(given, [(key, key.removeprefix("reward_fn."), value, ()) for key, value in keys.items()
                             if key.startswith("reward_fn.")])  # fmt: skip
    group, batches = _count(keys, "sample.num_image_per_prompt"), _count(keys, "sample.num_batches_per_epoch")
    size, parts = _count(keys, "sample.train_batch_size"), _count(keys, "train.gradient_accumulation_steps")
    images, left = divmod(batches * size * (given.processes or 0), max(group, 1))
    found["sample.num_image_per_prompt"] = (
        {"group_size": group} if group > 1 else f"! one image has no other to be compared with, {_STAYS}"
    )
    found["sample.num_batches_per_epoch"] = (
        {"prompts_per_step": images}
        if images and not left and "sample.mini_num_image_per_prompt" not in keys
        else f"! the file does not say how many GPUs they are times, {_STAYS}: choose prompts_per_step"
    )
    found["train.gradient_accumulation_steps"] = _updates(batches, parts)
    found["num_epochs"] = (
        {"num_iterations": keys.get("num_epochs")}
        if "num_epochs" in said
        else (f"! its default only means that a run is stopped by hand, {_STAYS}")
    )
    found["use_lora"] = {"policy.train": "lora" if keys.get("use_lora") else "full"}
    found["sample.global_std"] = {"adv_std": "global" if keys.get("sample.global_std") else "group"}
    revision = keys.get("pretrained.revision")
    found["pretrained.revision"] = {"pipeline.revision": None if revision == "main" else revision}
    found["train.use_8bit_adam"] = {"optim.name": "adamw_8bit" if keys.get("train.use_8bit_adam") else "adamw"}
    betas = {"optim.betas": [keys.get("train.adam_beta1", 0.9), keys.get("train.adam_beta2", 0.999)]}
    found["train.adam_beta1"] = found["train.adam_beta2"] = betas
    averaged = {"policy.ema_decay": 0.9, "policy.ema_every": 8}
    found["train.ema"] = averaged if keys.get("train.ema") else {"policy.ema_decay": 0.0}
    beta = keys.get("train.beta")
    found["train.beta"] = {"kl_coef": beta, "kl_type": "no_dt"} if beta else {"kl_coef": 0.0}
    found["sample.eval_guidance_scale"] = (
        {"eval.guidance_scale": keys["sample.eval_guidance_scale"]}
        if "sample.eval_guidance_scale" in said
        else "! only its default: sample.guidance_scale is taken"
    )
    return found | _flow_grpo_steps(given) | _flow_grpo_prompts(keys)


def _flow_grpo_steps(given: Foreign) -> dict[str, Made]:
    """Which steps are trained: those of a window that the file names, else the leading share."""
    keys, found, window = given.keys, dict[str, Made](), "sample.sde_window_size" in given.said
    for key, ours in (("size", "sde_window_size"), ("range", "sde_window_range")):
        found[f"sample.sde_window_{key}"] = (
            {f"sampler.{ours}": keys.get(f"sample.sde_window_{key}")}
            if window
            else "! only its default, which its fast scripts alone read"
        )
    steps, fraction = _count(keys, "sample.num_steps"), keys.get("train.timestep_fraction")
    if window:
        found["train.timestep_fraction"] = "! the window says which steps are trained"
    elif not steps > 1 or not isinstance(fraction, (int, float)) or not 0 < fraction <= 1:
        found["train.timestep_fraction"] = f"! no share, {_STAYS}"
    else:  # the share of all steps but the last, so that as many are trained as there
        trained = min(int(steps * fraction), steps - 1)
        share = 1.0 if trained == steps - 1 else (trained + 0.5) / (steps - 1)
        found["train.timestep_fraction"] = {
            "sampler.sde_window_size": 0,
            "sampler.sde_window_range": None,
            "sampler.trained_fraction": round(share, 4),
            "sampler.trained_steps": "leading",
        }
    return found


def _flow_grpo_prompts(keys: dict[str, Any]) -> dict[str, Made]:
    folder, names = str(keys.get("dataset") or ""), {"general_ocr": "{}.txt", "geneval": "{}_metadata.jsonl"}
    file = names.get(str(keys.get("prompt_fn")))
    if not (folder and file):
        return {"dataset": f"- prompts of another kind than its text and GenEval files, {_STAYS}"}
    places = {"prompts.train": "train", "prompts.eval": "test"}
    return {"dataset": {ours: f"{folder}/{file.format(theirs)}" for ours, theirs in places.items()}}


def _flow_factory(given: Foreign) -> dict[str, Made]:
    keys = given.keys
    found: dict[str, Made] = {}
    for section, ours in (("rewards", "rewards"), ("eval_rewards", "eval.rewards")):
        named = [
            key.removesuffix("reward_model")
            for key in keys
            if key.startswith(f"{section}[") and key.endswith("].reward_model")
        ]
        found |= _rewards(given, [(f"{key}reward_model", str(keys[f"{key}reward_model"]), keys.get(f"{key}weight", 1.0),
                                   (f"{key}weight",)) for key in named], ours)  # fmt: skip
    for key, section in (("train.resolution", "pipeline"), ("eval.resolution", "eval")):
        sides = _sides(keys.get(key))
        found[key] = {f"{section}.height": sides[0], f"{section}.width": sides[1]} if sides else f"! no size, {_STAYS}"
    folder = Path(str(keys.get("data.dataset_dir") or "."))
    ending = "txt" if (folder / "train.txt").is_file() and not (folder / "train.jsonl").is_file() else "jsonl"
    found["data.dataset_dir"] = {"prompts.train": f"{folder}/train.{ending}", "prompts.eval": f"{folder}/test.{ending}"}
    found["train.global_std"] = {"adv_std": "global" if keys.get("train.global_std") else "group"}
    found["model.target_modules"] = _modules(keys.get("model.target_modules"))
    lora = keys.get("model.resume_path") and keys.get("model.resume_type") == "lora"
    found["model.resume_path"] = (
        {"policy.init_lora": keys["model.resume_path"]}
        if lora
        else "! a run is continued with resume, when it is started"
    )
    found["log.save_freq"] = _often(keys.get("log.save_freq"))
    for key, ours in (("clip_range", "clip_range"), ("adv_clip_range", "adv_clip_range")):
        found[f"train.{key}"] = _clip(ours, keys.get(f"train.{key}"))
    return found | _flow_factory_kl_and_steps(keys)


def _flow_factory_kl_and_steps(keys: dict[str, Any]) -> dict[str, Made]:
    off, found = not keys.get("train.kl_beta"), dict[str, Made]()
    other = "- the KL here is of transitions (kl_coef), theirs a square of velocities or latents: another number"
    found["train.kl_beta"] = {"kl_coef": 0.0} if off else other
    found["train.kl_type"] = "! there is no KL: kl_beta is 0" if off else "- the KL here is of transitions: kl_type"
    steps = _count(keys, "train.gradient_step_per_epoch")
    if keys.get("train.gradient_accumulation_steps", "auto") == "auto":
        found["train.gradient_step_per_epoch"] = {"updates_per_rollout": steps}
    else:
        found["train.gradient_step_per_epoch"] = (
            f"! not read there beside gradient_accumulation_steps, {_STAYS}: choose updates_per_rollout"
        )
    every = _count(keys, "train.ema_update_interval") * max(steps, 1)
    found["train.ema_update_interval"] = {"policy.ema_every": every} if every else f"! no number, {_STAYS}"
    where, size = keys.get("scheduler.sde_steps"), keys.get("scheduler.num_sde_steps")
    if isinstance(where, list) and where and where == list(range(where[0], where[0] + len(where))):
        found["scheduler.sde_steps"] = {"sampler.sde_window_range": [where[0], where[-1] + 1]}
        found["scheduler.num_sde_steps"] = {"sampler.sde_window_size": size}
    elif where is None:
        found["scheduler.sde_steps"] = {"sampler.sde_window_range": None}
        found["scheduler.num_sde_steps"] = {"sampler.sde_window_size": size}
    else:
        found["scheduler.sde_steps"] = "- steps that are not neighbours are no window here"
        found["scheduler.num_sde_steps"] = f"- counts among those steps, {_STAYS}"
    return found


def _verl(given: Foreign) -> dict[str, Made]:
    keys = given.keys
    actor, model, reward = "actor_rollout_ref.actor.", "actor_rollout_ref.model.", "reward.custom_reward_function.name"
    found = _rewards(given, [(reward, str(keys[reward]), 1.0, ())] if reward in keys else [])
    if reward in found and keys.get("reward.reward_model.enable"):
        found["reward.reward_model.model_path"] = "- a model reads the text there, rapidocr here: scores differ"
    prompts, part = _count(keys, "data.train_batch_size"), _count(keys, f"{actor}ppo_mini_batch_size")
    found[f"{actor}ppo_mini_batch_size"] = _updates(prompts, part)
    rank = keys.get(f"{model}lora_rank")
    found[f"{model}lora_rank"] = (
        {"policy.train": "lora", "policy.lora_rank": rank} if rank else {"policy.train": "full"}
    )
    found[f"{model}target_modules"] = _modules(keys.get(f"{model}target_modules"))
    kl = keys.get(f"{actor}kl_loss_coef") if keys.get(f"{actor}use_kl_loss") else 0.0
    found[f"{actor}kl_loss_coef"] = {"kl_coef": kl}
    window = "actor_rollout_ref.rollout.algo.sde_window_range"
    found[window] = {"sampler.sde_window_range": keys.get(window)}
    found["trainer.save_freq"] = _often(keys.get("trainer.save_freq"))
    often = keys.get("trainer.test_freq")
    found["trainer.test_freq"] = {"eval_every": max(often, 0) if isinstance(often, int) else often}
    over = "global" if keys.get("algorithm.global_std", True) else "group"
    std = {"adv_std": over if keys.get("algorithm.norm_adv_by_std_in_grpo", True) else "none"}
    found["algorithm.global_std"] = found["algorithm.norm_adv_by_std_in_grpo"] = std
    return found


def _dance(given: Foreign) -> dict[str, Made]:
    keys = given.keys
    found = _rewards(given, [(key, key, 1.0, ()) for key in keys if key.startswith("use_") and key[4:] not in (
        "group", "ema", "cpu_offload")])  # fmt: skip
    folder = keys.get("pretrained_model_name_or_path")
    model = foreign_words().models.get(given.script) if folder else None
    found["pretrained_model_name_or_path"] = {"pipeline.model": model or folder}
    each, group = _count(keys, "train_batch_size"), _count(keys, "num_generations")
    shared = max(1, _count(keys, "sp_size"))
    found["sp_size"] = {"parallel.context": shared}
    found["train_batch_size"] = (
        {"prompts_per_step": each * given.processes // shared}
        if given.processes
        else f"! the file does not say how many GPUs it is times, {_STAYS}: choose prompts_per_step"
    )
    found["gradient_accumulation_steps"] = _updates(each * group, _count(keys, "gradient_accumulation_steps"))
    found["t"] = {"pipeline.num_frames": keys.get("t")} if _count(keys, "t") > 1 else "! one frame is an image"
    share = {"sampler.trained_fraction": keys.get("timestep_fraction"), "sampler.trained_steps": "random"}
    found["timestep_fraction"] = share
    return found


_RULES: dict[Kind, Callable[[Foreign], dict[str, Made]]] = {
    "flow_grpo": _flow_grpo,
    "Flow-Factory": _flow_factory,
    "verl-omni": _verl,
    "DanceGRPO": _dance,
}


def _rewards(
    given: Foreign, named: Iterable[tuple[str, str, Any, tuple[str, ...]]], ours: str = "rewards"
) -> dict[str, Made]:
    """Our rewards of what a file calls so; those that are not known here are left out, each with a word.

    Args:
        given: the file.
        named: for each reward its key, its name, its weight, and further keys that say the weight.
        ours: our key.
    """
    table, listed, found = foreign_words().toolkits[given.kind].rewards, list[dict[str, Any]](), dict[str, Made]()
    for key, name, weight, beside in named:
        known = table.get(name.lower())
        if known is not None:
            listed.append({**known, "weight": float(weight)} if isinstance(weight, (int, float)) else {**known})
        for own in (key, *beside):
            found[own] = {ours: listed} if known else f"- no reward here is known to be its {name}: choose rewards"
    return found


def _updates(images: int, part: int) -> Made:
    if part and images and images % part == 0:
        return {"updates_per_rollout": images // part}
    return f"! it does not divide what is sampled, {_STAYS}: choose updates_per_rollout"


def _modules(named: Any) -> Made:
    if isinstance(named, list):
        return {"policy.target_modules": named}
    return "! the layers that are trained are the model's published list: policy.target_modules"


def _sides(size: Any) -> tuple[int, int] | None:
    sides = size if isinstance(size, list) else [size]
    return (sides[0], sides[-1]) if sides and all(isinstance(side, int) for side in sides) else None


def _often(number: Any) -> Made:
    if isinstance(number, int) and number > 0:
        return {"checkpoint_every": number}
    return f"- a run always saves, {_STAYS}"


def _clip(ours: str, value: Any) -> Made:
    """A number, or a pair with the lower part below 0."""
    if not (isinstance(value, list) and len(value) == 2 and all(isinstance(one, (int, float)) for one in value)):
        return {ours: value}
    low, high = abs(value[0]), abs(value[1])
    if low != high and ours != "clip_range":
        return f"- {ours} is the same on both sides, {_STAYS}"
    return {ours: high if low == high else [low, high]}


def _count(keys: dict[str, Any], key: str) -> int:
    value = keys.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) else 0
