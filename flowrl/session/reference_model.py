"""Which model the KL of a run that goes on from a LoRA is taken to."""

from __future__ import annotations

from flowrl.config.train import TrainConfig


def reference_notes(config: TrainConfig) -> tuple[str, ...]:
    """That the reference of a run from a LoRA is the model without it; nothing of other runs."""
    lora, beyond = config.policy.init_lora, config.num_iterations + 1
    if lora is None or config.kl_coef == 0 or config.kl_reference != "base":
        return ()
    return (
        f"kl_reference=base is the model without {lora}, so the KL pulls back past the LoRA that the run starts from. "
        f"To stay near that LoRA, set kl_reference={beyond}, which no iteration reaches",
    )
