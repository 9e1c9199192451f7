"""`flowrl init --from` for methods other than GRPO: keys and values of published files of six toolkits, in small."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import yaml

import flowrl
from flowrl import cli
from flowrl.config.strict_yaml import dotted_items
from flowrl.config.train import load_config
from flowrl.migrating.foreign_files import read_foreign
from flowrl.migrating.foreign_python import Reader
from flowrl.migrating.imported import count_fates, import_foreign, settled, text_of_import
from flowrl.migrating.translated import FATE_OF
from flowrl.planning.written import settings_on
from flowrl.session.preflight import recipe_of

SD35M = "stabilityai/stable-diffusion-3.5-medium"


def factory(train: dict[str, Any], reward: str = "PickScore") -> str:
    """Flow-Factory's YAML with the keys that its methods share."""
    shared = {
        "advantage_aggregation": "sum", "kl_type": "v-based", "kl_beta": 0, "ref_param_device": "cuda",
        "adv_clip_range": 5.0, "resolution": 512, "num_inference_steps": 14, "guidance_scale": 1.0,
        "per_device_batch_size": 8, "group_size": 16, "global_std": False, "unique_sample_num_per_epoch": 48,
        "gradient_step_per_epoch": 1, "gradient_accumulation_steps": "auto", "learning_rate": 1e-4,
        "adam_weight_decay": 1e-4, "adam_betas": [0.9, 0.999], "max_grad_norm": 1.0, "seed": 42,
        "enable_gradient_checkpointing": False, "ema_device": "cuda", "ema_update_interval": 1,
    }  # fmt: skip
    return yaml.safe_dump({
        "launcher": "accelerate", "num_processes": 8, "mixed_precision": "bf16",
        "data": {"dataset_dir": "dataset/pickscore", "max_dataset_size": 1024, "sampler_type": "auto"},
        "model": {"finetune_type": "lora", "lora_rank": 32, "lora_alpha": 64, "target_modules": "default",
                  "model_name_or_path": SD35M, "model_type": "sd3-5", "resume_path": None},
        "log": {"save_dir": "saves/", "save_freq": 20, "logging_backend": "wandb"},
        "train": shared | train,
        "scheduler": {"dynamics_type": "ODE"},
        "eval": {"resolution": 512, "guidance_scale": 1.0, "num_inference_steps": 40, "eval_freq": 20},
        "rewards": [{"name": "r", "reward_model": reward, "weight": 1, "batch_size": 16}],
        "eval_rewards": [{"name": "r", "reward_model": reward, "batch_size": 32}],
    })  # fmt: skip


UNIRL: dict[str, Any] = {
    "num_devices": 8, "batch_size": 48, "adv_use_global_std": True, "num_rollouts": 10000,
    "bundle": {"_target_": "unirl.models.sd3.bundle.SD3Bundle.from_config", "config": {
        "pretrained_model_ckpt_path": f"${{oc.env:PRETRAINED_MODEL,{SD35M}}}", "model_precision": "bf16",
        "logprob_precision": "fp32", "shift": 3.0}},
    "pipeline": {"shift": 3.0, "strategy": {"_target_": "unirl.sde.kernels.FlowSDEStrategy"}},
    "backend": {
        "block_class_names": ["JointTransformerBlock"],
        "fsdp_cfg": {"param_dtype": "bf16", "activation_checkpointing": False, "use_torch_compile": False},
        "optimizer_cfg": {"learning_rate": 3e-4, "adam_beta1": 0.9, "adam_beta2": 0.999, "weight_decay": 1e-4},
        "scheduler_cfg": {"type": "constant", "warmup_steps": 0, "total_steps": 10000},
        "lora_cfg": {"rank": 32, "alpha": 64, "dropout": 0.0, "target_modules": ["attn.to_k", "attn.to_q"]}},
    "rollout": {"forward_batch_size": 8, "stage_attrs": ["diffusion"]},
    "reward": {"backend": {"_target_": "unirl.reward.local.pickscore.PickScoreRewardScorer", "base_device": "cuda"}},
    "algorithm": {"_target_": "unirl.algorithms.flowgrpo.FlowGRPO", "clip_range": 1e-4, "clip_schedule": "constant",
                  "old_logp_source": "replay", "params": "${sampling}"},
    "stack": {"micro_batch_size": 8, "max_grad_norm": 1.0, "num_updates_per_batch": 2},
    "data_source": {"args": {"run": {"data_path": "datasets/pickscore/train.txt", "seed": 42,
                                     "eval_data_path": "datasets/pickscore/test.txt"},
                             "algorithm": {"prompts_per_rollout": "${batch_size}"}}},
    "sampling": {"num_inference_steps": 10, "guidance_scale": 1.0, "height": 512, "width": 512, "eta": 0.7,
                 "samples_per_prompt": 16, "seed": 42, "init_same_noise": True, "scheduler": {
                     "_target_": "unirl.utils.scheduler_utils.WindowScheduler",
                     "num_timesteps": "${..num_inference_steps}",
                     "config": {"strategy": "progressive", "window_size": 4, "iters_per_window": 25, "overlap_size": 1,
                                "init_timestep": 0, "roll_back": True, "max_iters_per_window": 10}}},
    "logging": {"report_to_wandb": "${oc.decode:${oc.env:REPORT_TO_WANDB,true}}", "log_media": True,
                "project_name": "${oc.env:WANDB_PROJECT,unirl-mixgrpo}", "entity": "${oc.env:WANDB_ENTITY,null}"},
}  # fmt: skip


def unirl(algorithm: dict[str, Any], scheduler: dict[str, Any], **backend: Any) -> str:
    """UniRL's YAML by another algorithm."""
    data = deepcopy(UNIRL)
    data["algorithm"], data["sampling"]["scheduler"] = algorithm, scheduler
    data["backend"] |= backend
    return yaml.safe_dump(data)


BASE = """
import ml_collections

def get_config():
    config = ml_collections.ConfigDict()
    config.seed = 42
    config.num_epochs = 100000
    config.mixed_precision = "fp16"
    config.pretrained = pretrained = ml_collections.ConfigDict()
    config.sample = sample = ml_collections.ConfigDict()
    sample.noise_level = 1.0
    sample.global_std = True
    config.train = train = ml_collections.ConfigDict()
    train.learning_rate = 3e-4
    train.adv_clip_max = 5
    train.clip_range = 1e-4
    train.timestep_fraction = 0.99
    train.ema = True
    return config
"""
DIFFUSION_NFT = """
def _get_config(base_model="sd3", n_gpus=1, gradient_step_per_epoch=1, dataset="pickscore", reward_fn={}):
    config = base.get_config()
    assert base_model in ["sd3"]
    config.base_model = base_model
    config.dataset = f"dataset/{dataset}"
    if base_model == "sd3":
        config.pretrained.model = "stabilityai/stable-diffusion-3.5-medium"
        config.sample.num_steps = 10
        config.resolution = 512
        config.train.beta = 0.0001
        bsz = 9
    config.sample.num_image_per_prompt = 24
    num_groups = 48
    while True:
        if bsz < 1:
            assert False, "no batch size"
        if (num_groups * 24 % (n_gpus * bsz) == 0 and bsz * n_gpus % config.sample.num_image_per_prompt == 0):
            n_batch_per_epoch = num_groups * config.sample.num_image_per_prompt // (n_gpus * bsz)
            if n_batch_per_epoch % gradient_step_per_epoch == 0:
                config.sample.train_batch_size = bsz
                config.sample.num_batches_per_epoch = n_batch_per_epoch
                config.train.batch_size = config.sample.train_batch_size
                config.train.gradient_accumulation_steps = n_batch_per_epoch // gradient_step_per_epoch
                break
        bsz -= 1
    config.sample.test_batch_size = 14 if dataset == "geneval" else 16
    config.prompt_fn = "geneval" if dataset == "geneval" else "general_ocr"
    config.reward_fn = reward_fn
    config.decay_type = 1
    config.beta = 1.0
    config.train.adv_mode = "all"
    config.sample.guidance_scale = 1.0
    config.sample.deterministic = True
    config.sample.solver = "dpm2"
    return config

def sd3_ocr():
    config = _get_config(n_gpus=8, gradient_step_per_epoch=2, dataset="ocr", reward_fn={"ocr": 1.0})
    config.beta = 0.1
    config.decay_type = 2
    return config
"""
FLOW_GRPO_DPO = """
def geneval_sd3():
    config = base.get_config()
    config.pretrained.model = "stabilityai/stable-diffusion-3.5-medium"
    config.dataset = "dataset/geneval"
    config.prompt_fn = "geneval"
    config.sample.num_steps = 40
    config.sample.guidance_scale = 4.5
    config.resolution = 512
    config.sample.train_batch_size = 24
    config.sample.num_image_per_prompt = 24
    config.sample.num_batches_per_epoch = 1
    config.train.algorithm = 'dpo'
    config.train.ref_update_step = 10000000
    config.train.batch_size = config.sample.train_batch_size
    config.train.gradient_accumulation_steps = 1
    config.train.beta = 100
    config.reward_fn = {"geneval": 1.0}
    return config
"""
MIXGRPO = """
kl_coeff=0.0
iters_per_group=25
group_size=4
reward_model="multi_reward" # "hpsv2", "multi_reward"
dpm_algorithm_type="dpmsolver++" # "null"
nnodes_custom=4
nproc_per_node_custom=8
pdsh -R ssh -w ^hosts "cd here ;
        echo "nnodes=$nnodes_custom" ;
        torchrun --nnodes $nnodes_custom --nproc_per_node $nproc_per_node_custom --node_rank \\$INDEX \\
            fastvideo/train_grpo_flux.py --seed 714 --pretrained_model_name_or_path ./data/flux \\
            --data_json_path data/prompt.json --gradient_checkpointing --train_batch_size 1 --sp_size 1 \\
            --gradient_accumulation_steps 3 --max_train_steps 300 --learning_rate 1e-5 --mixed_precision bf16 \\
            --h 720 --w 720 --t 1 --sampling_steps 25 --eta 0.7 --num_generations 12 --shift 3 --use_group \\
            --timestep_fraction 0.6 --init_same_noise --clip_range 1e-4 --training_strategy part --kl_coeff $kl_coeff \\
            --iters_per_group $iters_per_group --group_size $group_size --sample_strategy progressive --prog_overlap \\
            --prog_overlap_step 1 --roll_back --reward_model $reward_model --hps_weight 1.0 --clip_score_weight 1.0 \\
            --unified_reward_weight 1.0 --multi_reward_mix advantage_aggr --dpm_algorithm_type $dpm_algorithm_type \\
            --dpm_post_compress_ratio 0.4 --dpm_solver_order 2 --frozen_init_timesteps -1 --flow_grpo_sampling "
            # --drop_last_sample "
"""
VERL = """python3 -m verl_omni.trainer.main_diffusion data.train_batch_size={prompts} \\
    actor_rollout_ref.model.path={model} actor_rollout_ref.model.lora_rank=64 actor_rollout_ref.model.lora_alpha=128 \\
    actor_rollout_ref.actor.optim.lr=3e-4 actor_rollout_ref.actor.ppo_mini_batch_size=4 \\
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8 actor_rollout_ref.actor.fsdp_config.model_dtype=bfloat16 \\
    algorithm.trainer_type=direct_preference trainer.total_training_steps=300 trainer.test_freq=20 {more}
"""
VERL_NFT = VERL.format(prompts=24, model="Qwen/Qwen-Image", more="""algorithm.sample_source=online \\
    actor_rollout_ref.model.algorithm=diffusion_nft actor_rollout_ref.actor.diffusion_loss.loss_mode=diffusion_nft \\
    actor_rollout_ref.actor.diffusion_loss.clip_ratio=1e-5 actor_rollout_ref.actor.diffusion_loss.mix_beta=0.1 \\
    actor_rollout_ref.actor.diffusion_loss.ref_kl_coef=0.0001 actor_rollout_ref.rollout.n=16 \\
    actor_rollout_ref.rollout.rollout_adapter=old actor_rollout_ref.rollout.pipeline.num_inference_steps=10 \\
    algorithm.timestep_fraction=1.0 algorithm.old_policy_decay_schedule=delayed_linear_to_0_999 \\
    algorithm.old_policy_update_interval=2 algorithm.adv_mode=continuous \\
    reward.custom_reward_function.name=compute_score_ocr""")  # fmt: skip
VERL_DPO = VERL.format(prompts=16, model=SD35M, more="""algorithm.sample_source=offline \\
    data.custom_cls.name=OfflineDPODataset actor_rollout_ref.model.algorithm=dpo \\
    actor_rollout_ref.actor.diffusion_loss.loss_mode=dpo actor_rollout_ref.actor.diffusion_loss.dpo_beta=100.0 \\
    actor_rollout_ref.model.pipeline.guidance_scale=4.0""")  # fmt: skip

COPY = {"ema_decay_schedule": "piecewise_linear", "flat_steps": 0, "ramp_rate": 0.001, "ema_decay": 0.5}
LEVELS = {"num_train_timesteps": 4, "time_sampling_strategy": "discrete", "time_shift": 3.0, "timestep_range": 0.5}
NFT = {"trainer_type": "nft", "nft_beta": 1.0, "off_policy": True, **COPY, **LEVELS}
AWM = {
    "trainer_type": "awm", "awm_weighting": "ghuber", "ghuber_power": 0.25, "off_policy": False, "clip_range": 1,
    "adv_clip_range": 1.0, "kl_weight": "Uniform", "kl_beta": 1e-4, "ema_decay_schedule": "linear", "ema_kl_beta": 1,
    "ema_decay": 0.3, "warmup_steps": 1000, "global_std": True, **LEVELS, "num_train_timesteps": 0,
    "time_sampling_strategy": "discrete_wo_init", "timestep_range": 0.9,
}  # fmt: skip
DGPO = {
    "trainer_type": "dgpo", "dpo_beta": 10, "use_shared_noise": True, "clip_dsm": True, "clip_kl": False,
    "switch_ema_ref": 200, "kl_cfg": 1.0, "use_ema_ref": False, "off_policy": False, "ema_decay": 0.9,
    "ema_decay_schedule": "constant", "ema_update_interval": 8, "ema_ref_max_decay": 0.3, "ema_ref_ramp_rate": 0.001,
    "ema_ref_device": "cuda", **LEVELS, "timestep_range": 0.6, "kl_beta": 0.001, "clip_range": 0.05,
    "guidance_scale": 4.5, "per_device_batch_size": 12, "group_size": 24, "unique_sample_num_per_epoch": 24,
}  # fmt: skip
CRD = {
    "trainer_type": "crd", "crd_beta": 1.0, "crd_loss_type": "mse", "use_old_for_loss": True, "adaptive_logp": True,
    "weight_temp": -1.0, "old_model_decay": "0-0.25-0.005-0.999", "sampling_model_decay": "75-0.0-0.0075-0.999",
    **LEVELS, "num_train_timesteps": 20, "timestep_range": 0.99, "kl_beta": 0.1, "kl_cfg": 4.5,
    "reward_adaptive_kl": True, "group_size": 24, "gradient_step_per_epoch": 2,
}  # fmt: skip
DPO = {
    "trainer_type": "dpo", "beta": 100.0, "weighting_scheme": "logit_normal", "logit_mean": 0.0, "logit_std": 1.0,
    "num_train_timesteps": 1, "timestep_range": 0.99, "per_device_batch_size": 24, "group_size": 4,
    "gradient_accumulation_steps": 1, "ema_decay": 0.99, "ema_update_interval": 4,
}  # fmt: skip
SHADOW = {"rank": 32, "alpha": 64, "ema_decay": 0.001, "ema_decay_type": "warmup", "ema_flat_steps": 0,
          "ema_uprate": 0.001, "ema_uphold": 0.5, "timing": "rollout_end"}  # fmt: skip
UNIRL_NFT = {
    "_target_": "unirl.algorithms.diffusionnft.DiffusionNFT", "beta": 1.0, "adv_clip_max": 5.0, "adv_mode": "raw",
    "use_adaptive_weight": True, "train_timestep_mode": "all", "shuffle_train_timesteps": True,
    "apply_time_shift_in_loss": False, "training_timestep_fraction": 0.99, "kl_coef": 0.0,
}  # fmt: skip
UNIRL_DPPO = {"_target_": "unirl.algorithms.flowdppo.FlowDPPO", "kl_mask_threshold": 1e-5, "add_kl_coefficient": True}

SAMPLES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "Flow-Factory nft": ("x.yaml", factory(NFT), {
        "recipe": "forward", "objective.name": "nft", "objective.options.beta": 1.0, "sampler.kernel": "ode",
        "sampler.noise_level": None, "times.kind": "discrete", "times.count": 4, "times.fraction": 0.5,
        "slots.old_decay": "linear", "policy.ema_decay": 0.0, "updates_per_rollout": 1, "clip_range": None}),
    "Flow-Factory awm": ("x.yaml", factory(AWM), {
        "objective.name": "awm", "objective.options.power": 0.25, "objective.options.clip": 1, "times.count": 12,
        "objective.options.advantage_max": 1.0, "objective.options.old_kl_coef": 1, "kl_coef": 1e-4,
        "times.kind": "discrete_wo_init", "adv_std": "global", "slots.old_decay": "awm"}),
    "Flow-Factory dgpo": ("x.yaml", factory(DGPO), {
        "objective.name": "dgpo", "objective.options.beta": 10, "objective.options.clip": 0.05, "kl_coef": 0.001,
        "objective.options.guidance_scale": 1.0, "sampler.guidance_scale": 4.5, "slots.old_decay": "awm",
        "policy.ema_decay": 0.9, "policy.ema_every": 8, "micro_batch_size": None, "rollout_batch_size": 12}),
    "Flow-Factory crd": ("x.yaml", factory(CRD, "OCR"), {
        "objective.name": "crd", "objective.options.loss": "square", "objective.options.temperature": None,
        "objective.options.reference_guidance_scale": 4.5, "slots.old_decay": "crd", "times.count": 20,
        "updates_per_rollout": 2, "rewards.0.name": "ocr", "eval.rewards": []}),
    "Flow-Factory dpo": ("x.yaml", factory(DPO), {
        "recipe": "preference", "objective.name": "dpo", "objective.options.behaviour": "policy",
        "objective.options.beta": 100.0, "times.kind": "logit_normal", "times.count": 1, "updates_per_rollout": 1,
        "policy.ema_decay": 0.99, "kl_coef": 0.0, "adv_std": "group"}),
    "DiffusionNFT": ("x.py", DIFFUSION_NFT, {
        "objective.name": "nft", "objective.options.beta": 0.1, "objective.options.mode": "all", "kl_coef": 1e-4,
        "sampler.solver": "dpm2", "slots.old_decay": "delayed", "prompts_per_step": 48, "updates_per_rollout": 2,
        "rollout_batch_size": 9, "times.count": 9, "times.kind": "schedule", "policy.ema_every": 1,
        "prompts.train": "dataset/ocr/train.txt"}),
    "flow_grpo dpo": ("x.py", FLOW_GRPO_DPO, {
        "objective.name": "dpo", "objective.options.beta": 100, "objective.options.ref_update_every": None,
        "objective.options.behaviour": "old", "times.count": 39, "times.shift": 3.0, "kl_coef": 0.0,
        "sampler.kernel": "ode", "kl_type": "exact", "sampler.guidance_scale": 4.5}),
    "UniRL nft": ("x.yaml", unirl(UNIRL_NFT, {"num_sde_steps": 0}, ema_lora_cfg=SHADOW), {
        "objective.name": "nft", "slots.old_decay": "linear", "objective.options.adaptive": True, "times.count": 9,
        "pipeline.model": SD35M, "num_iterations": 10000, "sampler.grid": "linspace", "policy.ema_decay": 0.0,
        "rewards.0.options.scale": "flow_grpo", "logging.project": "unirl-mixgrpo"}),
    "UniRL mixgrpo": ("x.yaml", yaml.safe_dump(UNIRL), {
        "recipe": "grpo", "sampler.sde_window": "progressive", "sampler.sde_window_size": 4,
        "sampler.sde_window_stride": 3, "sampler.sde_window_interval": 25, "sampler.sde_window_range": None,
        "sampler.kernel": "flow_sde", "same_latent": True, "clip_range": 1e-4, "loss_denominator": "all"}),
    "UniRL dppo": ("x.yaml", unirl(UNIRL_DPPO, {"num_sde_steps": 3, "timestep_fraction": [0.0, 0.5]}), {
        "objective.name": "dppo", "objective.options.threshold": 1e-5, "sampler.sde_window_range": [0, 5],
        "sampler.sde_window_size": 3, "sampler.noise_level": 0.7}),
    "MixGRPO": ("x.sh", MIXGRPO, {
        "pipeline.model": "black-forest-labs/FLUX.1-dev", "policy.train": "full", "sampler.kernel": "flow_sde",
        "sampler.sde_window": "progressive", "sampler.sde_window_size": 4, "sampler.sde_window_stride": 1,
        "sampler.solver": "dpm2", "sampler.flash_tail": 0.4, "sampler.trained_fraction": 1.0, "prompts_per_step": 32,
        "updates_per_rollout": 4, "reward_aggregation": "each", "rewards.1.name": "clip_score", "adv_correction": 1}),
    "verl-omni nft": ("x.sh", VERL_NFT, {
        "objective.name": "nft", "objective.options.beta": 0.1, "slots.old_decay": "delayed", "times.count": 10,
        "kl_coef": 1e-4, "prompts_per_step": 24, "updates_per_rollout": 6, "sampler.sde_window_size": 0}),
    "verl-omni dpo": ("x.sh", VERL_DPO, {
        "objective.name": "dpo_offline", "objective.options.beta": 100.0, "objective.options.pairs": "pairs",
        "group_size": 2, "prompts_per_step": 16, "sampler.guidance_scale": 4.0}),
}  # fmt: skip
"""Toolkit and method -> the file, what it says, and what that is here, worked out by hand."""


def written(sample: str, folder: Path) -> str:
    """A file of a toolkit, and how it is given."""
    name, text, _ = SAMPLES[sample]
    (folder / name).write_text(text)
    (folder / "base.py").write_text(BASE)
    return str(folder / name)


def at(config: Any, dotted: str) -> Any:
    """A value of settings."""
    for part in dotted.split("."):
        config = config[int(part)] if part.isdigit() else config.get(part) if isinstance(config, dict) else None
    return config


@pytest.mark.parametrize("sample", SAMPLES)
def test_a_method_s_keys_are_what_they_mean_there(sample: str, tmp_path: Path) -> None:
    given = written(sample, tmp_path)
    found = settled(import_foreign(given, None, None), [])
    expected = SAMPLES[sample][2]
    config = yaml.safe_load(text_of_import(found, []))
    missing = {key: value for key, value in expected.items() if at(config, key) != value}
    assert missing == {}, {key: at(config, key) for key in missing}
    assert [line.key for line in found.given] == list(read_foreign(given).keys)
    fates = Counter(line.fate for line in found.given)
    assert fates["unknown"] == 0, [line.key for line in found.given if line.fate == "unknown"]
    assert all(line.made if line.fate == "translated" else line.why and not line.made for line in found.given)
    assert str(sum(fates.values())) in count_fates(found)
    # nothing of the base contradicts it: its recipe refuses nothing but that pairs are not here
    built = load_config(settings_on(found.base, found.done.keys))
    with pytest.raises(ValueError, match="there is no 'pairs'") if "pairs" in str(expected) else nullcontext():
        recipe_of(built).check(built)
    assert built.clip_range == 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("sample", SAMPLES)
def test_a_plan_takes_what_is_written(sample: str, tmp_path: Path) -> None:
    ours = tmp_path / "ours.yaml"
    made = flowrl.init(source=written(sample, tmp_path), out=ours)
    assert "fits" in " ".join(made.notes)
    planned = flowrl.plan(ours)
    assert planned.peak_bytes
    objective = SAMPLES[sample][2].get("objective.name")
    assert load_config(ours).objective.name == objective


def test_a_key_that_nobody_knows_is_told_apart(tmp_path: Path) -> None:
    file = tmp_path / "x.yaml"
    file.write_text(factory({**NFT, "nft_gamma": 3}))
    found = import_foreign(str(file), None, None)
    assert [line.key for line in found.given if line.fate == "unknown"] == ["train.nft_gamma"]
    assert "1 unknown" in count_fates(found)
    assert "unknown" in FATE_OF.values()


def test_an_algorithm_that_is_not_translated_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "x.yaml"
    file.write_text(factory({"trainer_type": "opd"}))
    assert cli.main(["init", "--from", str(file), "--out", str(tmp_path / "ours.yaml")]) == 1
    assert "its algorithm is opd, and --from translates grpo, guard" in " ".join(capsys.readouterr().err.split())


@pytest.mark.slow
def test_card_hours_and_settings_go_with_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given, ours = written("UniRL nft", tmp_path), tmp_path / "ours.yaml"
    assert cli.main(["init", "--from", given, "--hours", "5", "--out", str(ours)]) == 1
    assert "give --card" in " ".join(capsys.readouterr().err.split())
    words = ["--card", "48", "--hours", "60", "optim.lr=1e-4", "--out", str(ours)]
    assert cli.main(["init", "--from", given, *words]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "fits 48 GB" in said
    config = load_config(ours)
    assert config.optim.lr == 1e-4
    assert config.num_iterations < 10000
    ours.unlink()
    assert cli.main(["init", "--from", given, "clip_range=0.2", "--out", str(ours)]) == 1
    assert "does not read it" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("body", "keys"),
    [
        ("    x = 3\n    while x > 1:\n        x -= 1\n    return {'x': x}\n", {"x": 1}),
        ("    if 'a' in ['b'] or not True:\n        return {'x': 1}\n    return {'x': 2 if 1 < 2 else 3}\n", {"x": 2}),
        ("    return made(size=4)\ndef made(size, more=2):\n    return {'x': size * more}\n", {"x": 8}),
    ],
)
def test_choices_loops_and_named_arguments_are_followed(body: str, keys: dict[str, int], tmp_path: Path) -> None:
    (tmp_path / "x.py").write_text(f"def f():\n{body}")
    assert Reader(tmp_path / "x.py").call(tmp_path / "x.py", "f") == keys


def test_a_loop_without_an_end_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.py").write_text("def f():\n    while True:\n        pass\n    return {}\n")
    with pytest.raises(ValueError, match="has it no end"):
        Reader(tmp_path / "x.py").call(tmp_path / "x.py", "f")


def test_places_in_a_file_of_unirl_are_resolved(tmp_path: Path) -> None:
    file = tmp_path / "x.yaml"
    data = deepcopy(UNIRL)
    data["rollout"] = {"forward_batch_size": "${stack.micro_batch_size}", "a": "${rollout.b}", "b": "${rollout.a}"}
    file.write_text(yaml.safe_dump(data))
    keys = read_foreign(str(file)).keys
    assert keys["rollout.forward_batch_size"] == 8
    assert keys["logging.report_to_wandb"] is True
    assert keys["logging.entity"] is None
    assert set(dict(dotted_items(data))) == set(keys)
