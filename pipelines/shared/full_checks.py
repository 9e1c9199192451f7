"""What `policy.train: full` cannot be combined with, told before a model loads."""

from __future__ import annotations

from flowrl.config.train import TrainConfig
from flowrl.pipelines.arithmetic.compiling import experts_of
from flowrl.pipelines.places.single_files import is_single_file
from flowrl.pipelines.shared.contract import ModelFamily
from flowrl.pipelines.weights.full_weights import trained_names


def check_full(config: TrainConfig, known: ModelFamily, location: str) -> None:
    """Refuses settings that do not go with training a network's own weights."""
    policy = config.policy
    if policy.init_lora is not None:
        raise ValueError(
            f"policy.train=full starts from the model's own weights, and policy.init_lora is {policy.init_lora}: make "
            "it a part of them first (in stock diffusers pipe.load_lora_weights, pipe.fuse_lora, "
            "pipe.unload_lora_weights and pipe.save_pretrained), and set pipeline.model to the folder"
        )
    for key in ("lora_rank", "lora_alpha"):
        if getattr(policy, key) is not None:
            raise ValueError(
                f"policy.train=full trains no LoRA, but policy.{key} is {getattr(policy, key)}: remove it "
                f"(policy.{key}=null where a base sets it)"
            )
    if is_single_file(location):
        raise ValueError(
            f"policy.train=full ships a folder with all parts of its model, and {location} is a single file: write it "
            "as a folder first (from_single_file and save_pretrained in stock diffusers), or train a LoRA "
            "(policy.train=lora)"
        )
    known.check(location, None)
    for expert in experts_of(None if policy.target_modules is None else known.meta_denoiser(location)):
        trained_names(expert, policy.target_modules)
