"""What `policy.train: full` cannot be combined with, told before a model loads."""

from __future__ import annotations

from flowrl.config.train import TrainConfig
from flowrl.pipelines.arithmetic.compiling import experts_of
from flowrl.pipelines.places.single_files import is_single_file
from flowrl.pipelines.shared.contract import ModelFamily
from flowrl.pipelines.weights.full_weights import trained_names


def check_full(config: TrainConfig, known: ModelFamily, location: str) -> None:
    """Refuses settings that do not go with training a network's own weights."""
    policy, pipeline = config.policy, config.pipeline
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
    if policy.lora_variant != "lora":
        raise ValueError(
            f"policy.train=full trains no LoRA, but policy.lora_variant is {policy.lora_variant}: remove it"
        )
    ready = "train a LoRA (policy.train=lora)"
    refused = {
        "pipeline.quantize": (pipeline.quantize != "none", pipeline.quantize, "whose weights take no gradient"),
        "pipeline.dtype": (pipeline.dtype == "float16", "float16", "which takes bfloat16 or float32"),
        "pipeline.compile": (pipeline.compile != "none", pipeline.compile, "which was never tried together"),
        "keep_graphs": (config.keep_graphs is True, "true", "which was never tried together"),
    }
    for key, (given, value, why) in refused.items():
        if given:
            raise ValueError(f"policy.train=full does not go with {key}={value}, {why}: remove it, or {ready}")
    if is_single_file(location):
        raise ValueError(
            f"policy.train=full ships a folder with all parts of its model, and {location} is a single file: write it "
            f"as a folder first (from_single_file and save_pretrained in stock diffusers), or {ready}"
        )
    known.check(location, None)
    for expert in experts_of(None if policy.target_modules is None else known.meta_denoiser(location)):
        trained_names(expert, policy.target_modules)
