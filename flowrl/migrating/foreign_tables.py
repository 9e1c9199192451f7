"""What keys of other toolkits are here: one table for each toolkit, and all that is known of their names.

An entry is our key, or several that take the same value, with a comma between; ``- why`` of a key that has no
counterpart here; ``! why`` of one that is not taken over; ``= what`` where `flowrl.migrating.foreign_rules` makes
something of several keys. A name that ends in a dot stands for all keys that begin so, ``[]`` for a place in a list.

Read in yifan123/flow_grpo (config/base.py, config/grpo.py, scripts/train_sd3.py), X-GenGroup/Flow-Factory
(src/flow_factory/hparams), verl-project/verl-omni (trainer/config) and XueZeyue/DanceGRPO
(fastvideo/train_grpo_flux.py).
"""

from __future__ import annotations

from typing import Any, Literal

Fate = Literal["translated", "without counterpart", "dropped"]
FATE_OF: dict[str, Fate] = {"- ": "without counterpart", "! ": "dropped"}
"""Sign that an entry begins with -> what becomes of its key, for the reason behind the sign."""

_PLACE = "- how a run is placed on its machines is said when it is started"
_LOADER = "- prompts are read whole, there is no loader to set"
_FOLDER = "! the run folder is chosen when a run is started: out"
_SEED = "! one seed says all: seed"
_TRACKER = "! nothing leaves the machine unasked: choose logging.wandb or logging.tensorboard"
_GROUP = "! rewards are always compared within a prompt"
_TF32 = "! choose pipeline.vae_dtype and reward_dtype: tf32"
_REWARD = "- a reward says such things in its options: flowrl list rewards"
_ENGINE = "- images are drawn by the pipeline that is trained, there is no engine to set"

FLOW_GRPO = {
    "seed": "seed", "save_freq": "checkpoint_every", "eval_freq": "eval_every",
    "num_checkpoint_limit": "keep_checkpoints", "mixed_precision": "pipeline.dtype",
    "resolution": "pipeline.height, pipeline.width", "frames": "pipeline.num_frames", "height": "pipeline.height",
    "width": "pipeline.width", "activation_checkpointing": "pipeline.gradient_checkpointing",
    "fsdp_optimizer_offload": "optim.offload", "use_lora": "= policy.train: lora or full",
    "num_epochs": "= num_iterations, where a function says it: its default only means that a run is stopped by hand",
    "dataset": "= prompts.train and prompts.eval, the files of the folder that prompt_fn reads",
    "prompt_fn": "! says how the files of dataset are read", "prompt_fn_kwargs": "! belongs to prompt_fn",
    "pretrained.model": "pipeline.model", "pretrained.revision": "= pipeline.revision; main is what null means",
    "sample.num_steps": "sampler.num_steps", "sample.eval_num_steps": "eval.num_steps",
    "sample.guidance_scale": "sampler.guidance_scale, eval.guidance_scale",
    "sample.eval_guidance_scale": "= eval.guidance_scale, where a function says it",
    "sample.train_batch_size": "rollout_batch_size", "sample.test_batch_size": "eval.batch_size",
    "sample.num_image_per_prompt": "= group_size",
    "sample.num_batches_per_epoch": "= prompts_per_step: batches x images of a batch x gpu_number / images of a prompt",
    "sample.batch_size": "! its scripts read sample.train_batch_size", "sample.noise_level": "sampler.noise_level",
    "sample.global_std": "= adv_std: global or group", "sample.same_latent": "same_latent",
    "sample.sde_type": "sampler.kernel",
    "sample.sde_window_size": "= sampler.sde_window_size, where a function says it",
    "sample.sde_window_range": "= sampler.sde_window_range, where a function says it",
    "sample.kl_reward": "- there is no KL in the reward: kl_coef is in the loss",
    "train.batch_size": "micro_batch_size", "train.learning_rate": "optim.lr",
    "train.use_8bit_adam": "= optim.name: adamw_8bit or adamw", "train.adam_beta1": "= optim.betas",
    "train.adam_beta2": "= optim.betas", "train.adam_weight_decay": "optim.weight_decay",
    "train.adam_epsilon": "optim.eps", "train.max_grad_norm": "optim.max_grad_norm",
    "train.gradient_accumulation_steps": "= updates_per_rollout: sample.num_batches_per_epoch over it",
    "train.num_inner_epochs": "- images are passed over once; updates_per_rollout splits them",
    "train.adv_clip_max": "adv_clip_range", "train.clip_range": "clip_range",
    "train.timestep_fraction": "= sampler.trained_fraction, of all steps but the last; a window says it else",
    "train.beta": "= kl_coef, with kl_type no_dt, for which theirs is tuned", "train.lora_path": "policy.init_lora",
    "train.ema": "= policy.ema_decay and policy.ema_every, which its code fixes at 0.9 and 8",
    "train.cfg": "! rollout and update always have the same guidance: sampler.guidance_scale",
    "train.clip_range_lt": "! read by its guard scripts only",
    "train.clip_range_gt": "! read by its guard scripts only",
    "train.timestep_shift": "! read for BAGEL only", "train.sft": "- no supervised loss is mixed in",
    "train.sft_batch_size": "- no supervised loss is mixed in", "run_name": _FOLDER, "logdir": _FOLDER,
    "save_dir": _FOLDER, "resume_from": "! a run is continued with resume, when it is started", "allow_tf32": _TF32,
    "per_prompt_stat_tracking": _GROUP, "debug": "! read by none of its scripts", "reward_fn": "= rewards",
    "reward_fn.": "= rewards", "diffusion_loss": "! read by none of its scripts",
}  # fmt: skip
FLOW_FACTORY = {
    "launcher": _PLACE, "config_file": _PLACE, "num_processes": _PLACE, "main_process_port": _PLACE,
    "num_machines": _PLACE, "project": "logging.project", "mixed_precision": "pipeline.dtype",
    "data.dataset_dir": "= prompts.train and prompts.eval: train and test of the folder, .jsonl or .txt",
    "data.preprocessing_batch_size": _LOADER, "data.dataloader_num_workers": _LOADER, "data.sampler_type": _LOADER,
    "data.enable_preprocess": _LOADER,
    "data.force_reprocess": "- embeddings are kept by what they are of: prompts.cache",
    "data.cache_dir": "! embeddings are kept on disk only where prompts.cache says so",
    "data.max_dataset_size": "- a file of prompts is taken whole: shorten the file",
    "model.finetune_type": "policy.train", "model.lora_rank": "policy.lora_rank",
    "model.lora_alpha": "policy.lora_alpha", "model.target_modules": "= policy.target_modules, where it is a list",
    "model.model_name_or_path": "pipeline.model", "model.model_type": "! follows from the model",
    "model.resume_path": "= policy.init_lora, where resume_type is lora",
    "model.resume_type": "! belongs to resume_path", "model.attn_backend": "! choose pipeline.attention",
    "model.master_weight_dtype": "- trained weights are float32",
    "model.target_components": "! what is trained follows from the model",
    "log.run_name": _FOLDER, "log.save_dir": _FOLDER, "log.project": "logging.project", "log.logging_backend": _TRACKER,
    "log.save_freq": "= checkpoint_every", "log.save_model_only": "- checkpoints are whole, so that a run can go on",
    "train.trainer_type": "recipe", "train.advantage_aggregation": "reward_aggregation",
    "train.clip_range": "= clip_range", "train.adv_clip_range": "= adv_clip_range",
    "train.kl_type": "= the KL here is that of transitions, theirs of velocities or latents",
    "train.kl_beta": "= kl_coef, where it is 0: the KLs differ", "train.ref_param_device": _PLACE,
    "train.resolution": "= pipeline.height and pipeline.width", "train.height": "pipeline.height",
    "train.width": "pipeline.width", "train.num_frames": "pipeline.num_frames", "train.frame_rate": "pipeline.fps",
    "train.num_inference_steps": "sampler.num_steps", "train.guidance_scale": "sampler.guidance_scale",
    "train.per_device_batch_size": "rollout_batch_size, micro_batch_size", "train.group_size": "group_size",
    "train.global_std": "= adv_std: global or group", "train.unique_sample_num_per_epoch": "prompts_per_step",
    "train.max_epochs": "num_iterations", "train.num_inner_epochs": "- images are passed over once",
    "train.gradient_step_per_epoch": "= updates_per_rollout, where gradient_accumulation_steps is auto",
    "train.gradient_accumulation_steps": "! follows from the sizes and updates_per_rollout",
    "train.learning_rate": "optim.lr", "train.adam_weight_decay": "optim.weight_decay",
    "train.adam_betas": "optim.betas", "train.adam_epsilon": "optim.eps", "train.max_grad_norm": "optim.max_grad_norm",
    "train.ema_decay": "policy.ema_decay", "train.ema_device": _PLACE,
    "train.ema_update_interval": "= policy.ema_every, in updates: times gradient_step_per_epoch",
    "train.ema_decay_schedule": "- the average rises to its decay as (1 + s) / (10 + s)",
    "train.enable_gradient_checkpointing": "pipeline.gradient_checkpointing", "train.seed": "seed",
    "train.offload_samples_to_cpu": _PLACE, "train.latent_storage_dtype": "- latents are kept as they are drawn",
    "train.shuffle_samples": "- the order of images in an update is that of a counter",
    "train.reward_optimization_overlap": _PLACE, "train.reward_optimization_overlap_mode": _PLACE,
    "train.reward_optimization_overlap_poll_interval": _PLACE, "scheduler.dynamics_type": "sampler.kernel",
    "scheduler.noise_level": "sampler.noise_level", "scheduler.num_sde_steps": "= sampler.sde_window_size",
    "scheduler.sde_steps": "= sampler.sde_window_range, where they are neighbours", "scheduler.seed": _SEED,
    "eval.resolution": "= eval.height and eval.width", "eval.height": "eval.height", "eval.width": "eval.width",
    "eval.per_device_batch_size": "eval.batch_size", "eval.guidance_scale": "eval.guidance_scale",
    "eval.num_inference_steps": "eval.num_steps", "eval.eval_freq": "eval_every", "eval.seed": "eval.seed",
    "rewards[].name": "! a reward goes by its own name here", "rewards[].reward_model": "= rewards",
    "rewards[].weight": "= rewards", "rewards[].": _REWARD,
    "eval_rewards[].name": "! a reward goes by its own name here",
    "eval_rewards[].reward_model": "= eval.rewards", "eval_rewards[].weight": "= eval.rewards",
    "eval_rewards[].": _REWARD,
}  # fmt: skip
_ACTOR, _ROLLOUT, _MODEL = (f"actor_rollout_ref.{part}." for part in ("actor", "rollout", "model"))
VERL_OMNI = {
    "data.train_files": "- parquet is no prompt file here: write .txt or .jsonl, and name it in prompts.train",
    "data.val_files": "- parquet is no prompt file here: write .txt or .jsonl, and name it in prompts.eval",
    "data.train_batch_size": "prompts_per_step", "data.seed": "seed",
    "data.max_prompt_length": "! pipeline.max_sequence_length says it", "data.val_batch_size": "! eval.batch_size",
    "data.": _LOADER, _MODEL + "path": "pipeline.model", _MODEL + "algorithm": "recipe",
    _MODEL + "lora_rank": "= policy.lora_rank; 0 is policy.train: full", _MODEL + "lora_alpha": "policy.lora_alpha",
    _MODEL + "target_modules": "= policy.target_modules, where it is a list",
    _MODEL + "lora_adapter_path": "policy.init_lora", _MODEL + "attn_backend": "! choose pipeline.attention",
    _MODEL + "enable_gradient_checkpointing": "pipeline.gradient_checkpointing", _MODEL: _ENGINE,
    _ACTOR + "optim.lr": "optim.lr", _ACTOR + "optim.weight_decay": "optim.weight_decay",
    _ACTOR + "optim.betas": "optim.betas", _ACTOR + "optim.clip_grad": "optim.max_grad_norm",
    _ACTOR + "optim.lr_warmup_steps": "optim.warmup", _ACTOR + "optim.": "! choose optim.name and optim.schedule",
    _ACTOR + "grad_clip": "optim.max_grad_norm",
    _ACTOR + "ppo_mini_batch_size": "= updates_per_rollout: data.train_batch_size over it",
    _ACTOR + "ppo_micro_batch_size_per_gpu": "micro_batch_size",
    _ACTOR + "ppo_epochs": "- images are passed over once; updates_per_rollout splits them",
    _ACTOR + "diffusion_loss.clip_ratio": "clip_range", _ACTOR + "diffusion_loss.adv_clip_max": "adv_clip_range",
    _ACTOR + "diffusion_loss.": "- belongs to another algorithm", _ACTOR + "use_kl_loss": "! kl_coef above 0 says it",
    _ACTOR + "kl_loss_coef": "= kl_coef, where use_kl_loss is true",
    _ACTOR + "fsdp_config.model_dtype": "pipeline.dtype", _ACTOR + "fsdp_config.optimizer_offload": "optim.offload",
    _ACTOR: _PLACE, "actor_rollout_ref.ref.": "- the reference is the same model without what was trained",
    _ROLLOUT + "n": "group_size", _ROLLOUT + "seed": _SEED,
    _ROLLOUT + "pipeline.height": "pipeline.height", _ROLLOUT + "pipeline.width": "pipeline.width",
    _ROLLOUT + "pipeline.num_frames": "pipeline.num_frames",
    _ROLLOUT + "pipeline.num_inference_steps": "sampler.num_steps",
    _ROLLOUT + "pipeline.true_cfg_scale": "sampler.guidance_scale, eval.guidance_scale",
    _ROLLOUT + "pipeline.guidance_scale": "sampler.guidance_scale, eval.guidance_scale",
    _ROLLOUT + "pipeline.max_sequence_length": "pipeline.max_sequence_length",
    _ROLLOUT + "algo.noise_level": "sampler.noise_level", _ROLLOUT + "algo.sde_type": "sampler.kernel",
    _ROLLOUT + "algo.sde_window_size": "sampler.sde_window_size",
    _ROLLOUT + "algo.sde_window_range": "= sampler.sde_window_range",
    _ROLLOUT + "algo.sde_window_seed": _SEED,
    _ROLLOUT + "val_kwargs.n": "eval.samples_per_prompt",
    _ROLLOUT + "val_kwargs.pipeline.num_inference_steps": "eval.num_steps",
    _ROLLOUT + "val_kwargs.pipeline.true_cfg_scale": "eval.guidance_scale",
    _ROLLOUT + "val_kwargs.pipeline.guidance_scale": "eval.guidance_scale",
    _ROLLOUT + "val_kwargs.pipeline.height": "eval.height", _ROLLOUT + "val_kwargs.pipeline.width": "eval.width",
    _ROLLOUT + "val_kwargs.algo.": "! evaluations are always drawn without noise", _ROLLOUT: _ENGINE,
    "algorithm.global_std": "= adv_std: global or group",
    "algorithm.norm_adv_by_std_in_grpo": "= adv_std: none, where it is false",
    "reward.custom_reward_function.name": "= rewards",
    "reward.custom_reward_function.path": "! a function of yours has other arguments here: rewards, file and function",
    "reward.": "- who serves and asks a judge is said in the options of its reward: flowrl list rewards",
    "trainer.total_training_steps": "num_iterations",
    "trainer.total_epochs": "- num_iterations counts rollouts, not passes over the prompts",
    "trainer.project_name": "logging.project", "trainer.experiment_name": _FOLDER,
    "trainer.default_local_dir": _FOLDER, "trainer.logger": _TRACKER, "trainer.val_before_train": "eval.initial",
    "trainer.log_val_generations": "eval.num_images", "trainer.save_freq": "= checkpoint_every",
    "trainer.test_freq": "= eval_every", "trainer.max_actor_ckpt_to_keep": "keep_checkpoints",
    "trainer.n_gpus_per_node": _PLACE, "trainer.nnodes": _PLACE,
    "trainer.resume_mode": "! a run is continued with resume, when it is started",
    "trainer.resume_from_path": "! a run is continued with resume, when it is started", "trainer.": _PLACE,
    "ray_kwargs.": _PLACE, "transfer_queue.": _PLACE, "global_profiler.": _PLACE,
}  # fmt: skip
DANCE_GRPO = {
    "seed": "seed", "sampler_seed": _SEED,
    "pretrained_model_name_or_path": "= pipeline.model: the published one that the script is for",
    "dit_model_name_or_path": "! the denoiser is the model's own", "vae_model_path": "! the VAE is the model's own",
    "cache_dir": "! where the hub keeps files is said by HF_HOME",
    "data_json_path": "- embeddings made beforehand are no prompts: write .txt or .jsonl, and name it in prompts.train",
    "gradient_checkpointing": "pipeline.gradient_checkpointing", "selective_checkpointing": "- all blocks or none",
    "train_batch_size": "= prompts_per_step: times the GPUs, over sp_size",
    "train_sp_batch_size": "! an image at a time, as its scripts do: micro_batch_size",
    "gradient_accumulation_steps": "= updates_per_rollout: a GPU's images over it",
    "num_latent_t": "! follows from pipeline.num_frames", "sp_size": "= parallel.context",
    "dataloader_num_workers": _LOADER,
    "max_train_steps": "num_iterations", "learning_rate": "optim.lr", "mixed_precision": "pipeline.dtype",
    "checkpointing_steps": "checkpoint_every", "resume_from_checkpoint": "! a run is continued with resume",
    "allow_tf32": _TF32, "cfg": "- the share of captions that are left out in training: none is here",
    "cfg_infer": "sampler.guidance_scale", "output_dir": _FOLDER, "logging_dir": _FOLDER, "h": "pipeline.height",
    "w": "pipeline.width", "t": "= pipeline.num_frames, above 1", "fps": "pipeline.fps",
    "sampling_steps": "sampler.num_steps", "eta": "sampler.noise_level", "shift": "sampler.shift",
    "lr_scheduler": "! choose optim.schedule", "lr_num_cycles": "! choose optim.schedule",
    "lr_power": "! choose optim.schedule", "lr_warmup_steps": "optim.warmup", "max_grad_norm": "optim.max_grad_norm",
    "weight_decay": "optim.weight_decay", "use_hpsv2": "= rewards", "use_pickscore": "= rewards",
    "num_generations": "group_size", "use_group": _GROUP, "ignore_last": "! the last step is never trained",
    "timestep_fraction": "= sampler.trained_fraction, with trained_steps random", "init_same_noise": "same_latent",
    "clip_range": "clip_range", "adv_clip_max": "adv_clip_range", "use_cpu_offload": "! see optim.offload",
    "fsdp_sharding_startegy": "! see parallel.shard", "master_weight_type": "- trained weights are float32",
    "use_ema": "! choose policy.ema_decay and policy.ema_every", "ema_decay": "! choose policy.ema_decay",
    "ema_start_step": "- the average begins with the run", "loss_coef": "- the loss has no factor",
    "precondition_outputs": "- velocities are taken as the network gives them",
}  # fmt: skip

TABLES = {"flow_grpo": FLOW_GRPO, "DanceGRPO": DANCE_GRPO, "Flow-Factory": FLOW_FACTORY, "verl-omni": VERL_OMNI}
"""Toolkit -> its keys, with what they are here."""

DEFAULTS: dict[str, dict[str, Any]] = {
    "flow_grpo": {},  # its base.py says them
    "Flow-Factory": {
        "model.finetune_type": "full", "train.advantage_aggregation": "gdpo", "train.clip_range": 1e-4,
        "train.adv_clip_range": 5.0, "train.kl_beta": 0, "train.resolution": 512, "train.num_inference_steps": 10,
        "train.guidance_scale": 3.5, "train.global_std": True, "train.gradient_step_per_epoch": 2,
        "train.learning_rate": 1e-5, "train.adam_weight_decay": 1e-4, "train.adam_betas": [0.9, 0.999],
        "train.adam_epsilon": 1e-8, "train.max_grad_norm": 1.0, "train.ema_decay": 0.995,
        "train.ema_update_interval": 10, "train.seed": 42, "scheduler.dynamics_type": "Flow-SDE",
        "scheduler.noise_level": 0.7, "scheduler.num_sde_steps": 1, "scheduler.sde_steps": None,
    },
    "verl-omni": {
        _ACTOR + "optim.lr": 1e-6, _ACTOR + "optim.weight_decay": 0.01, _ACTOR + "optim.betas": [0.9, 0.999],
        _ACTOR + "optim.clip_grad": 1.0, _ACTOR + "diffusion_loss.clip_ratio": 1e-4,
        _ACTOR + "diffusion_loss.adv_clip_max": 5.0, _ACTOR + "kl_loss_coef": 0.001, _MODEL + "lora_rank": 0,
        _MODEL + "enable_gradient_checkpointing": True, _ROLLOUT + "pipeline.height": 512,
        _ROLLOUT + "pipeline.width": 512, _ROLLOUT + "pipeline.num_inference_steps": 10,
        _ROLLOUT + "pipeline.true_cfg_scale": 1.0, _ROLLOUT + "pipeline.max_sequence_length": 512,
        _ROLLOUT + "algo.noise_level": 1.0, _ROLLOUT + "algo.sde_type": "sde", _ROLLOUT + "algo.sde_window_size": 0,
        _ROLLOUT + "algo.sde_window_range": None, _ROLLOUT + "val_kwargs.pipeline.num_inference_steps": 50,
        "algorithm.global_std": True,
    },
    "DanceGRPO": {
        "gradient_accumulation_steps": 1, "learning_rate": 1e-4, "lr_warmup_steps": 10, "max_grad_norm": 2.0,
        "gradient_checkpointing": False, "weight_decay": 0.01, "num_generations": 16, "init_same_noise": False,
        "shift": 1.0, "timestep_fraction": 1.0, "clip_range": 1e-4, "adv_clip_max": 5.0,
    },
}  # fmt: skip
"""Toolkit -> its keys that change results -> what they are where a file does not say them."""

_PICK = {"name": "pick_score", "options": {"scale": "flow_grpo"}}
REWARDS: dict[str, dict[str, dict[str, Any]]] = {
    "flow_grpo": {
        "pickscore": _PICK, "clipscore": {"name": "clip_score", "options": {"scale": "logits_30"}},
        "imagereward": {"name": "image_reward"}, "ocr": {"name": "ocr"}, "video_ocr": {"name": "ocr"},
        "aesthetic": {"name": "aesthetic"}, "jpeg_compressibility": {"name": "jpeg_compressibility"},
        "geneval": {"name": "geneval", "options": {"credit": "graded", "judge": "mask2former"}},
    },
    "Flow-Factory": {
        "pickscore": _PICK, "clip": {"name": "clip_score"}, "ocr": {"name": "ocr"},
        "pickscore_rank": {"name": "rank", "options": {
            "reward": "pick_score", "options": {"scale": "flow_grpo"}, "ties": "order", "denominator": "n"}},
    },
    "verl-omni": {"compute_score_ocr": {"name": "ocr"}},
    "DanceGRPO": {
        "use_hpsv2": {"name": "hps", "options": {"version": "v2.1"}},
        "use_pickscore": {"name": "pick_score", "options": {"scale": "cosine"}},
    },
}  # fmt: skip
"""Toolkit -> its name of a reward, in small letters -> ours, on its scale."""

ELSEWHERE = {
    "nft": "sd35m_nft", "diffusion_nft": "sd35m_nft", "awm": "sd35m_awm", "dgpo": "sd35m_dgpo", "crd": "sd35m_crd",
    "dpo": "sd35m_dpo", "dppo": "sd35m_flow_dppo", "grpo-guard": "sd35m_grpo_guard", "grpo_guard": "sd35m_grpo_guard",
    "mix_grpo": "sd35m_mixgrpo", "dance_grpo": "sd35m_dance_grpo",
}  # fmt: skip
"""Algorithms that are not translated -> the shipped configuration that has them."""

MODELS = {
    "train_grpo_flux.py": "black-forest-labs/FLUX.1-dev",
    "runwayml/stable-diffusion-v1-5": "stable-diffusion-v1-5/stable-diffusion-v1-5",
}  # fmt: skip
"""Scripts of DanceGRPO, whose model is a folder of the machine, and models that have moved -> the published model."""
