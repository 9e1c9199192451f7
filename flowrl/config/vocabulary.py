"""What other toolkits call our configuration keys and values, so that a habit is answered with our name.

Terms of flow_grpo and what was built on it (DiffusionNFT, AWM, DGPO, PaCo-GRPO), DanceGRPO, MixGRPO, BranchGRPO,
Flow-Factory, verl-omni, UniRL, TRL and diffusers' training scripts. A term is refused, never taken over in silence: the
same word often means something else elsewhere.
"""

from __future__ import annotations


def _by_their_names(table: dict[str, str]) -> dict[str, str]:
    """What others say -> our name (or a sentence), from that -> what others say, in one text."""
    return {theirs: ours for ours, words in table.items() for theirs in words.split()}


FOREIGN_KEYS = _by_their_names({
    # images and prompts of one step
    "group_size": "num_generations num_image_per_prompt num_images_per_prompt samples_per_prompt n",
    "prompts_per_step": "unique_sample_num_per_epoch num_prompts_per_step",
    "micro_batch_size (images of one backward pass) or rollout_batch_size (images sampled at once)": "batch_size",
    "rollout_batch_size (flow_grpo's sample.train_batch_size) or micro_batch_size": "train_batch_size",
    "rollout_batch_size and micro_batch_size": "per_device_batch_size",
    "rollout_batch_size": "forward_batch_size sample_batch_size",
    "micro_batch_size": "train_sp_batch_size per_device_train_batch_size ppo_micro_batch_size "
    "ppo_micro_batch_size_per_gpu",
    "updates_per_rollout": "ppo_mini_batch_size gradient_step_per_epoch num_updates_per_batch num_inner_epochs",
    "updates_per_rollout (accumulation follows from it)": "gradient_accumulation_steps",
    "num_iterations": "num_epochs max_epochs max_steps max_train_steps total_epochs num_steps_total",
    # sampling
    "sampler.num_steps": "num_inference_steps sampling_steps",
    "sampler.kernel": "sde_type dynamics_type scheduler",
    "sampler.noise_level": "eta",
    "sampler.guidance_scale": "cfg_infer cfg_scale true_cfg_scale",
    "sampler.sde_window_size": "num_sde_steps num_noise_steps",
    "sampler.sde_window_range": "sde_steps train_steps noise_steps",
    "sampler.trained_fraction with trained_steps: leading (Flow-GRPO) or random (DanceGRPO), or times.fraction (AWM)":
        "timestep_fraction",
    "same_latent": "init_same_noise",
    "sampler.sde_window": "sample_strategy",
    "sampler.sde_window_interval": "iters_per_group",
    "sampler.sde_window_stride (MixGRPO's window size less its overlap)": "prog_overlap_step",
    "sampler.flash_tail": "dpm_post_compress_ratio",
    "sampler.solver (dpm2, after the window)": "dpm_apply_strategy",
    "sampler.solver (euler or dpm2)": "dpm_algorithm_type",
    "sampler.solver (dpm2 is order 2)": "dpm_solver_order",
    # credit
    "credit.splits": "tree_split_points",
    "credit.split_noise": "tree_split_noise_scale",
    "credit.options (weighting: edge of method branch_grpo)": "tree_prob_weighted",
    "credit.options (depth_window of method branch_grpo)": "depth_pruning",
    "credit.options (pruned_width of method branch_grpo)": "width_pruning_mode",
    # objective
    "kl_coef (weight of the KL), or objective.options (beta of nft, dgpo, crd and dpo)": "beta",
    "kl_coef": "kl_beta kl_coeff kl_loss_coef ref_kl_coef",
    "clip_range": "clip_ratio epsilon",
    "clip_range (a pair [low, high])": "clip_range_lt clip_range_gt highclip_range epsilon_high",
    "ratio (step or sequence)": "importance_sampling_level",
    "best_of": "bestofn",
    "reward_aggregation": "multi_reward_mix advantage_aggregation aggregate_fn",
    "adv_clip_range": "adv_clip_max",
    "adv_std (group, global or none)": "global_std adv_use_global_std use_group scale_rewards",
    "adv_std (none switches the division off)": "norm_adv_by_std_in_grpo",
    "recipe": "algorithm trainer_type",
    "objective.name (guard)": "rationorm",
    "objective.options (threshold of objective dppo)": "kl_mask_threshold",
    # noised images: forward methods and preference pairs
    "times.count": "num_train_timesteps train_timesteps",
    "times.kind": "time_type time_sampling_strategy",
    "times.fraction": "timestep_range",
    "times.shift": "time_shift",
    "times.fraction (a share of the schedule: DGPO's 4 of 10 steps is 0.5)": "trunc_steps",
    "objective.options (beta of objective nft)": "nft_beta mix_beta",
    "objective.options (mode of objective nft)": "adv_mode",
    "objective.options (advantage_max of objective awm)": "advantage_max",
    "objective.options (weighting of objective awm)": "weighting",
    "objective.options (power of objective awm)": "ghuber_power",
    "objective.options (old_kl_coef, the pull to the old policy)": "ema_beta beta_ema ema_kl_beta",
    "objective.options (beta of objectives dgpo and dpo)": "beta_dpo dpo_beta",
    "objective.options (beta of objective crd)": "crd_beta",
    "objective.options (reference_guidance_scale)": "kl_cfg",
    "objective.options (ref_update_every, in iterations)": "ref_update_step",
    "slots.old_decay (NFT's 0, 1 and 2 are copy, linear and delayed)": "decay_type",
    "slots.old_decay": "old_policy_decay old_model_decay kl_ema_decay_type",
    "slots.old_decay_value (with old_decay: constant)": "kl_ema_decay",
    # policy and optimiser
    "policy.lora_rank": "rank lora_r",
    "policy.lora_alpha": "alpha",
    "policy.init_lora": "lora_path",
    "policy.ema_decay (0 switches averaging off)": "ema use_ema",
    "optim.lr": "learning_rate",
    "optim.betas": "adam_beta1 adam_beta2",
    "optim.eps": "adam_epsilon",
    "optim.weight_decay": "adam_weight_decay",
    "optim.max_grad_norm": "grad_clip",
    "optim.schedule": "lr_scheduler lr_scheduler_type",
    "optim.warmup": "lr_warmup_steps warmup_steps",
    "optim.name (adamw_8bit)": "use_8bit_adam",
    "optim.name": "optimizer_type",
    "optim.offload": "fsdp_optimizer_offload",
    "policy.train (lora or full)": "use_lora finetune_type",
    "parallel.shard (processes that hold one copy)": "fsdp deepspeed",
    "parallel.context": "sp_size sequence_parallel_size ulysses_degree",
    "kl_reference (base, ema, or iterations between two copies)": "ref_model",
    "pipeline.dtype": "mixed_precision",
    "pipeline.quantize": "load_in_8bit load_in_4bit",
    "pipeline.attention": "attention_backend attn_backend",
    "pipeline.attention (xformers)": "enable_xformers_memory_efficient_attention",
    "pipeline.compile (blocks)": "torch_compile use_torch_compile",
    "pipeline.vae_dtype and reward_dtype (tf32)": "allow_tf32",
    "pipeline.height and pipeline.width": "resolution",
    "pipeline.model": "model_name_or_path pretrained_model_name_or_path pretrained",
    # data, rewards, run
    "prompts.train": "dataset data prompt_file",
    "rewards (a list of {name, weight})": "reward_fn reward reward_models",
    "resume": "resume_from resume_path resume_from_checkpoint",
    "out": "output_dir logdir save_dir run_name",
    "checkpoint_every": "save_freq save_steps checkpointing_steps",
    "keep_checkpoints": "num_checkpoint_limit checkpoints_total_limit",
    "eval_every": "eval_freq eval_steps",
    "eval.num_steps": "eval_num_steps",
    "eval.guidance_scale": "eval_guidance_scale",
    "eval.batch_size": "test_batch_size",
    "logging.tensorboard": "use_tensorboard",
    "logging.wandb (none, offline or online), logging.trackio": "report_to wandb use_wandb",
    "logging.project": "wandb_project",
    "logging.entity": "wandb_entity",
})  # fmt: skip

ABSENT_KEYS = _by_their_names({
    "numbers go to metrics.jsonl, TensorBoard (logging.tensorboard), Weights & Biases (logging.wandb) and trackio":
        "swanlab use_swanlab",
})  # fmt: skip
"""Keys of other toolkits for what there is not here, each with the sentence that says so."""

FOREIGN_VALUES = {
    "pipeline.dtype": _by_their_names({"bfloat16": "bf16", "float16": "fp16 half", "float32": "fp32 no"}),
    "adv_std": _by_their_names({"group": "true True", "global": "batch", "none": "false False"}),
    "recipe": _by_their_names({
        "grpo": "flow_grpo flow-grpo GRPO grpo-guard dppo", "forward": "nft awm dgpo crd rft sft",
        "preference": "dpo d3po", "backprop": "draft refl",
    }),
    "slots.old_decay": _by_their_names({
        "copy": "0", "linear": "1 linear_to_0_5", "delayed": "2 delayed_linear_to_0_999",
    }),
    "times.kind": {"logit-normal": "logit_normal"},
}  # fmt: skip

FOREIGN_KERNELS = _by_their_names({
    "flow_sde": "sde flow Flow-SDE", "dance_sde": "dance Dance-SDE", "cps": "CPS", "ddim_flow": "ddim",
    "ode": "ODE euler",
})  # fmt: skip
"""Names of kernels elsewhere, and ours; the table of kernels itself is not known to the configuration."""
