"""Translates keys of other toolkits that have a meaning only together, or by their toolkit's own rules."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeGuard

from flowrl.config.foreign import foreign_words
from flowrl.config.strict_yaml import refuse
from flowrl.migrating.foreign_files import Foreign, Kind, Made

_STAYS = "so that of the base stays"
_NEVER = 1_000_000  # iterations that no run has
_REWARD = re.compile("use_|[vm]q_coef")  # flags of DanceGRPO that say a reward


def apply_rules(given: Foreign, method: str) -> dict[str, Made]:
    """Translates the keys that a table leaves to a rule, for a file that trains by a method."""
    return {key: made for key, made in _RULES[given.kind](given, method).items() if key in given.keys}


def _flow_grpo(given: Foreign, method: str) -> dict[str, Made]:
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
    found |= _betas(keys, "train.")
    averaged = {"policy.ema_decay": 0.9, "policy.ema_every": 8}
    found["train.ema"] = averaged if keys.get("train.ema") else {"policy.ema_decay": 0.0}
    beta = keys.get("train.beta")
    found["train.beta"] = {"kl_coef": beta, "kl_type": "no_dt"} if beta else {"kl_coef": 0.0}
    found["sample.eval_guidance_scale"] = (
        {"eval.guidance_scale": keys["sample.eval_guidance_scale"]}
        if "sample.eval_guidance_scale" in said
        else "! only its default: sample.guidance_scale is taken"
    )
    every = _count(keys, "train.ref_update_step")
    found["train.ref_update_step"] = {"objective.options.ref_update_every": every if 0 < every < _NEVER else None}
    found |= _flow_grpo_prompts(keys)
    if method == "grpo":
        return found | _flow_grpo_steps(given)
    law = {} if method == "nft" else {"times.kind": "logit_normal", "times.shift": 3.0}
    return found | _share(keys, "train.timestep_fraction", "sample.num_steps", **law)


def _flow_grpo_steps(given: Foreign) -> dict[str, Made]:
    """The trained steps: those of a window in the file, or else the leading share."""
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


def _flow_factory(given: Foreign, method: str) -> dict[str, Made]:
    keys, found = given.keys, dict[str, Made]()
    kind, edits = str(keys.get("model.model_type")), "lucy_edit_grpo or wan_vace_grpo, which edit clips"
    partly = f"model_type {kind} noises a given clip in part, and paths here begin at noise: build on {edits}"
    refuse((kind.endswith("_v2v"), partly))
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
    found |= _flow_factory_kl_and_steps(given, method)
    if method == "opd":
        return found | flow_factory_teachers(keys)
    return found if method in ("grpo", "guard", "dppo") else found | _flow_factory_noised(keys, method)


def _flow_factory_noised(keys: dict[str, Any], method: str) -> dict[str, Made]:
    """Keys of the methods that noise finished images again."""
    found, train = dict[str, Made](), {key.removeprefix("train."): value for key, value in keys.items()}
    reach, count = train.get("timestep_range"), train.get("num_train_timesteps")
    start, end = reach if isinstance(reach, list) and len(reach) == 2 else (0, reach)
    law = train.get("time_sampling_strategy", train.get("weighting_scheme")) in ("logit_normal", "uniform")
    found["train.time_shift"] = {"times.shift": train.get("time_shift")} if law else "! its strategy does not read it"
    found["train.timestep_range"] = {"times.fraction": end}
    if law or start:
        found["train.timestep_range"] = f"- {'a continuous law has no range' if law else 'levels begin at noise'} here"
    steps, share = (
        _count(keys, "train.num_inference_steps"),
        end - start if _is_number(start) and _is_number(end) else 0,
    )
    drawn = count or max(1, int(steps * share))
    found["train.num_train_timesteps"] = {"times.count": drawn}
    return found | _flow_factory_losses(train, method) | _flow_factory_copies(train)


def _flow_factory_losses(train: dict[str, Any], method: str) -> dict[str, Made]:
    """Options of the losses."""
    found, old = dict[str, Made](), train.get("off_policy")
    if method == "awm":
        found["train.off_policy"] = {"objective.options.off_policy": old}
    else:
        found["train.off_policy"] = f"{'!' if old else '-'} images are drawn by the old policy"
    bound = _clip("adv_clip_range", train.get("adv_clip_range"))
    if isinstance(bound, dict):
        most, ranges = bound["adv_clip_range"], ["advantage_range", *(["advantage_max"] if method == "awm" else [])]
        bound |= {f"objective.options.{one}": most for one in ranges}
    found["train.adv_clip_range"] = bound
    clip, heat = train.get("clip_range") if train.get("clip_dsm", True) else None, train.get("weight_temp")
    found["train.clip_range"] = {"objective.options.clip": clip}
    found["train.weight_temp"] = {"objective.options.temperature": heat if _is_number(heat) and heat > 0 else None}
    return found


def _flow_factory_copies(train: dict[str, Any]) -> dict[str, Made]:
    """How a copy of the policy follows it: by schedule, or by start, decay there, slope and end in one text."""
    most, kind = train.get("ema_decay"), train.get("ema_decay_schedule", "power")
    names, made = ["ema_decay", "ema_decay_schedule", "flat_steps", "ramp_rate", "warmup_steps"], _follows(())
    if kind == "constant":
        made = {"slots.old_decay": "constant", "slots.old_decay_value": most}
    elif kind == "piecewise_linear":
        made = _follows((train.get("flat_steps", 0), 0, train.get("ramp_rate", 0.001), most))
    found = {f"train.{name}": made for name in names}
    given = [train.get("ema_ref_max_decay"), train.get("ema_ref_ramp_rate")]
    found |= {f"train.ema_ref_{name}": _follows((0, 0, *given[::-1])) for name in ("max_decay", "ramp_rate")}
    parts = re.findall(r"\d+(?:\.\d+)?", str(train.get("old_model_decay")))
    return found | {"train.old_model_decay": _follows(tuple(map(float, parts)))}


def _flow_factory_kl_and_steps(given: Foreign, method: str) -> dict[str, Made]:
    keys = given.keys
    beta, found = keys.get("train.kl_beta"), dict[str, Made]()
    other: Made = "- the KL here is of transitions or velocities (kl_type), theirs a square of latents: another number"
    if keys.get("train.kl_type") == "v-based":
        other = {"kl_type": "velocity"}
    found["train.kl_beta"] = other if beta and isinstance(other, str) else {"kl_coef": beta or 0.0}
    found["train.kl_type"] = other if beta else "! there is no KL: kl_beta is 0"
    steps, parts = _count(keys, "train.gradient_step_per_epoch"), _count(keys, "train.gradient_accumulation_steps")
    if parts:  # of a process's batches, or of its pairs
        images = _count(keys, "train.unique_sample_num_per_epoch")
        images *= 1 if method == "dpo" else _count(keys, "train.group_size")
        batches = images // max(1, (given.processes or 1) * _count(keys, "train.per_device_batch_size"))
        steps = max(1, batches // parts)
        found["train.gradient_accumulation_steps"] = {"updates_per_rollout": steps}
        found["train.gradient_step_per_epoch"] = "! gradient_accumulation_steps says it"
    else:
        found["train.gradient_step_per_epoch"] = {"updates_per_rollout": steps}
        found["train.gradient_accumulation_steps"] = "! it follows from updates_per_rollout"
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


def _verl(given: Foreign, method: str) -> dict[str, Made]:
    keys = given.keys
    actor, model, reward = "actor_rollout_ref.actor.", "actor_rollout_ref.model.", "reward.custom_reward_function.name"
    found = _rewards(given, [(reward, str(keys[reward]), 1.0, ())] if reward in keys else [])
    if reward in found and keys.get("reward.reward_model.enable"):
        found["reward.reward_model.model_path"] = "- a model reads the text there, rapidocr here: scores differ"
    prompts, part = _count(keys, "data.train_batch_size"), _count(keys, f"{actor}ppo_mini_batch_size")
    found[f"{actor}ppo_mini_batch_size"] = _updates(prompts, part)
    rank = keys.get(f"{model}lora_rank")
    found[f"{model}lora_rank"] = (
        {"policy.train": "lora", "policy.lora_rank": rank}
        if rank
        else {"policy.train": "full", "policy.lora_rank": None}
    )
    for longest in (key for key in keys if key.endswith(".max_sequence_length")):
        fits = _count(keys, longest) <= 4000  # Qwen-Image's positions end a little beyond
        found[longest] = {"pipeline.max_sequence_length": keys[longest]} if fits else "- no prompt is that long"
    found[f"{model}target_modules"] = _modules(keys.get(f"{model}target_modules"))
    kl = keys.get(f"{actor}kl_loss_coef") if keys.get(f"{actor}use_kl_loss") else 0.0
    found[f"{actor}kl_loss_coef"] = {"kl_coef": kl}
    algo = "actor_rollout_ref.rollout.algo."
    interval = keys.get(f"{algo}iters_per_group", 1)
    strategy = "uniform" if interval == 1 else keys.get(f"{algo}sample_strategy", "random")
    moves = strategy != "uniform"
    found[f"{algo}sample_strategy"] = {"sampler.sde_window": strategy}
    found[f"{algo}iters_per_group"] = "! each iteration draws one"
    found[f"{algo}sde_window_range"] = {"sampler.sde_window_range": keys.get(f"{algo}sde_window_range")}
    if moves:
        found[f"{algo}iters_per_group"] = {"sampler.sde_window_interval": interval}
        found[f"{algo}sde_window_range"] = "- a window that moves does so over all steps but the last"
    found |= _share(keys, "algorithm.timestep_fraction", "actor_rollout_ref.rollout.pipeline.num_inference_steps")
    found["trainer.save_freq"] = _often(keys.get("trainer.save_freq"))
    often = keys.get("trainer.test_freq")
    found["trainer.test_freq"] = {"eval_every": max(often, 0) if isinstance(often, int) else often}
    over = "global" if keys.get("algorithm.global_std", True) else "group"
    std = {"adv_std": over if keys.get("algorithm.norm_adv_by_std_in_grpo", True) else "none"}
    found["algorithm.global_std"] = found["algorithm.norm_adv_by_std_in_grpo"] = std
    place = r"(?:distillation\.teacher_models|actor_rollout_ref\.teacher\.models)\.(\w+)\.(\w+|model\.path)"
    return found | teachers(keys, place, {"model_path": "lora", "model.path": "lora", "key": "prompts"})


def _dance(given: Foreign, method: str) -> dict[str, Made]:
    keys = given.keys
    found = _rewards(given, [(key, key, keys[key], ()) for key in keys if keys[key] and _REWARD.match(key)])
    folder = keys.get("pretrained_model_name_or_path")
    model = foreign_words().models.get(given.script) if folder else None
    found["pretrained_model_name_or_path"] = {"pipeline.model": model or folder}
    each, group = _count(keys, "train_batch_size"), _count(keys, "num_generations")
    shared = max(1, _count(keys, "sp_size"))
    found["sp_size"] = {"parallel.context": shared}
    found["lora_rank"] = {"policy.train": "lora", "policy.lora_rank": keys.get("lora_rank")}
    found["train_batch_size"] = (
        {"prompts_per_step": each * given.processes // shared}
        if given.processes
        else f"! the file does not say how many GPUs it is times, {_STAYS}: choose prompts_per_step"
    )
    found["gradient_accumulation_steps"] = _updates(each * group, _count(keys, "gradient_accumulation_steps"))
    found["t"] = {"pipeline.num_frames": keys.get("t")} if _count(keys, "t") > 1 else "! one frame is an image"
    share = {"sampler.trained_fraction": keys.get("timestep_fraction"), "sampler.trained_steps": "random"}
    found["timestep_fraction"] = share
    if given.kind == "MixGRPO":
        weights = {key.removesuffix("_weight"): key for key in keys if key.endswith("_weight")}
        chosen = str(keys.get("reward_model")).replace("hpsv2", "hps")
        named = [name for name in weights if name in chosen or chosen == "multi_reward"]
        found |= {key: "! reward_model leaves it out" for key in weights.values()}
        found |= _rewards(given, [(weights[name], name, keys[weights[name]], ("reward_model",)) for name in named])
        solver = keys.get("dpm_algorithm_type")
        found["dpm_algorithm_type"] = {"sampler.solver": "dpm2" if solver else "euler"}
        found["dpm_post_compress_ratio"] = (
            {"sampler.flash_tail": keys.get("dpm_post_compress_ratio")} if solver else "! dpm_algorithm_type is null"
        )
    return found


def _unirl(given: Foreign, method: str) -> dict[str, Made]:
    keys = given.keys
    rewards = [key for key in keys if key.startswith("reward.backend.config.reward_weights.")]
    scorer = "reward.backend._target_"
    named = [(key, key.rpartition(".")[2], keys[key], (scorer,)) for key in rewards]
    alone = [(scorer, str(keys.get(scorer)).rpartition(".")[2], 1.0, ())]
    found = _rewards(given, named or alone) | _betas(keys, "backend.optimizer_cfg.")
    for key in ("pipeline.strategy._target_", "strategy._target_"):
        name = str(keys.get(key)).rpartition(".")[2]
        found[key] = {"sampler.kernel": foreign_words().kernels.get(name, name)}
    frames, steps = _count(keys, "sampling.num_frames"), _count(keys, "sampling.num_inference_steps")
    found["sampling.num_frames"] = {"pipeline.num_frames": frames} if frames > 1 else "! one frame is an image"
    plan, share = "sampling.scheduler.", keys.get("sampling.scheduler.timestep_fraction")
    low, high = share if isinstance(share, list) and len(share) == 2 and all(map(_is_number, share)) else (0, 1)
    reach = [int(steps * low), min(int(steps * high), steps - 1)]
    found[f"{plan}timestep_fraction"] = {"sampler.sde_window_range": reach}
    found[f"{plan}num_sde_steps"] = {"sampler.sde_window_size": _count(keys, f"{plan}num_sde_steps")}
    stride = _count(keys, f"{plan}config.window_size") - _count(keys, f"{plan}config.overlap_size")
    found[f"{plan}config.overlap_size"] = {"sampler.sde_window_stride": max(1, stride)}
    copy = [keys.get(f"backend.ema_lora_cfg.ema_{name}") for name in ("flat_steps", "uprate", "uphold")]
    made, kind = _follows((copy[0] or 0, 0, *copy[1:])), keys.get("backend.ema_lora_cfg.ema_decay_type")
    if kind == "constant":
        made = {"slots.old_decay": "constant", "slots.old_decay_value": keys.get("backend.ema_lora_cfg.ema_decay")}
    names = ("ema_decay", "ema_decay_type", "ema_flat_steps", "ema_uprate", "ema_uphold")
    found |= {f"backend.ema_lora_cfg.{name}": made for name in names}
    if method == "opd":
        found |= unirl_teachers(keys)
    return found | _share(keys, "algorithm.training_timestep_fraction", "sampling.num_inference_steps")


_RULES: dict[Kind, Callable[[Foreign, str], dict[str, Made]]] = {
    "flow_grpo": _flow_grpo,
    "DiffusionNFT": _flow_grpo,
    "Flow-Factory": _flow_factory,
    "verl-omni": _verl,
    "DanceGRPO": _dance,
    "MixGRPO": _dance,
    "UniRL": _unirl,
}
_FOLLOWS = {
    (0, 0, 0.001, 0.5): "linear",
    (75, 0, 0.0075, 0.999): "delayed",
    (0, 0, 0.001, 0.3): "awm",
    (0, 0.25, 0.005, 0.999): "crd",
}
"""Updates before a copy of the policy begins to follow, its decay there, the slope and the end -> `slots.old_decay`."""


def _follows(rule: tuple[Any, ...]) -> Made:
    kind = next((kind for one, kind in _FOLLOWS.items() if one == rule), None)
    return {"slots.old_decay": kind} if kind else "- no copy of the policy follows it so here: choose slots.old_decay"


def _share(keys: dict[str, Any], share: str, steps: str, **more: Any) -> dict[str, Made]:
    """Noise levels of an image: a share of the steps, and further keys from it."""
    count, part = _count(keys, steps), keys.get(share)
    if not _is_number(part):
        return {share: "! no share: choose times.count"}
    return {share: {"times.count": max(1, int(count * part)), **more}}


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, (int, float))


def _betas(keys: dict[str, Any], section: str) -> dict[str, Made]:
    names = [f"{section}adam_beta1", f"{section}adam_beta2"]
    betas = [keys.get(name, usual) for name, usual in zip(names, (0.9, 0.999), strict=True)]
    return {name: {"optim.betas": betas} for name in names}


def _rewards(
    given: Foreign, named: Iterable[tuple[str, str, Any, tuple[str, ...]]], ours: str = "rewards"
) -> dict[str, Made]:
    """Translates rewards (key, name, weight, further keys of the weight) to our key; unknown ones become notes."""
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
