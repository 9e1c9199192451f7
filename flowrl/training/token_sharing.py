"""Settings that `parallel.context` goes with: several processes draw the same images, each a part of their tokens."""

from __future__ import annotations

from flowrl.config.train import TrainConfig
from flowrl.pipelines import ModelFamily
from flowrl.training.parts import family_options, model_location


def check_context(config: TrainConfig) -> None:
    """Refuses settings that do not go with shared tokens.

    Raises:
        ValueError: names the key, and says what to set instead.
    """
    context = config.parallel.context
    if context == 1:
        return
    faults = {
        "recipe=backprop carries a reward's gradient through images and latents, of which each process has its own "
        "tokens' alone: take another recipe": config.recipe == "backprop",
        "pipeline.compile=blocks compiles blocks without the exchange between processes: set pipeline.compile=none":
            config.pipeline.compile != "none",
        "workers.rollouts draws images on workers, each by itself: set workers.rollouts=0":
            config.workers.rollouts > 0,
    }  # fmt: skip
    for fault, holds in faults.items():
        if holds:
            raise ValueError(f"parallel.context is {context}, but {fault}, or parallel.context=1")


def check_split(config: TrainConfig, known: ModelFamily) -> None:
    """Refuses a model whose tokens cannot be shared, before weights load.

    Raises:
        ValueError: as `flowrl.pipelines.weights.context_parallel.refuse_unsplit`.
    """
    context = config.parallel.context
    if context == 1:
        return
    from flowrl.pipelines.weights.context_parallel import refuse_unsplit  # imports diffusers

    model, options = model_location(config.pipeline.model), family_options(config.pipeline)
    drawn = {key: value for key in ("height", "width") if (value := getattr(config.eval, key)) is not None}
    sizes = [known.planned_size(model, {**options, **more}) for more in ({}, drawn)]
    refuse_unsplit(known, model, options, context, sizes)
