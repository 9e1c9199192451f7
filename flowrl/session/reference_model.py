"""The reference model of the KL if a run starts from a LoRA."""

from __future__ import annotations

from flowrl.config.train import TrainConfig


def reference_notes(config: TrainConfig) -> tuple[str, ...]:
    """A note that the reference of a run from a LoRA is the model without that LoRA; empty for other runs."""
    lora, beyond = config.policy.init_lora, config.num_iterations + 1
    if lora is None or config.kl_coef == 0 or config.kl_reference != "base":
        return ()
    return (
        f"kl_reference=base is the model without {lora}, so the KL pulls back past the LoRA that the run starts from. "
        f"To stay near that LoRA, set kl_reference={beyond}, which no iteration reaches",
    )
