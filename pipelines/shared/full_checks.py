"""What `policy.train: full` cannot train, told before a model loads."""

from __future__ import annotations

from flowrl.config.train import TrainConfig
from flowrl.pipelines.arithmetic.compiling import experts_of
from flowrl.pipelines.places.single_files import is_single_file
from flowrl.pipelines.shared.contract import ModelFamily
from flowrl.pipelines.weights.full_weights import trained_names


def check_full(config: TrainConfig, known: ModelFamily, location: str) -> None:
    """Refuses models and layers of which the own weights cannot be trained."""
    if is_single_file(location):
        raise ValueError(
            f"policy.train=full ships a folder with all parts of its model, and {location} is a single file: write it "
            "as a folder first (from_single_file and save_pretrained in stock diffusers), or train a LoRA "
            "(policy.train=lora)"
        )
    targets = config.policy.target_modules
    known.check(location, None)
    for expert in experts_of(None if targets is None else known.meta_denoiser(location)):
        trained_names(expert, targets)
