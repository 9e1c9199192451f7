"""The inputs of a sweep: the base, its tuned models and the prompts; checked before weights load."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from flowrl.comparing.sweep.sweep_settings import Setting, SweepQuestion
from flowrl.config.locations import at_revision
from flowrl.config.train import TrainConfig, load_config, resolve_path
from flowrl.generation.generate import choose
from flowrl.generation.models import (
    EMBEDDED,
    Source,
    check_lora,
    check_source,
    find_source,
)
from flowrl.generation.sampling_options import SamplingOptions
from flowrl.pipelines.places.lora_places import folder_of_lora, lora_files
from flowrl.prompts.identity import keys_of
from flowrl.prompts.loading import Prompt, load_prompts
from flowrl.training.model_files import MODEL

EMBEDDED_PROMPTS = "asset:prompts/world_heldout.jsonl"


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepPlan:
    """A requested sweep: `source` is base and LoRA, `config` is None if only a LoRA was given, `name` is the name on
    the page, `features` are compared for diversity besides pixels, `samples` is the number of images per prompt."""

    question: SweepQuestion
    source: Source
    config: TrainConfig | None
    name: str
    base_guidance: float
    features: str
    prompts: tuple[Prompt, ...]
    samples: int
    seed: int
    batch_size: int
    device: torch.device
    folder: Path

    @property
    def loras(self) -> dict[str, Path]:
        """LoRA folders: that of the swept model under "", those of other runs under their names."""
        assert self.source.lora is not None
        return {"": self.source.lora, **{name: lora_of(folder) for name, folder in self.question.others}}

    @property
    def rows(self) -> dict[str, Prompt]:
        """The prompts by their keys in the journals."""
        return dict(zip(keys_of(self.prompts), self.prompts, strict=True))

    def evaluations(self, setting: Setting) -> int:
        """Network evaluations for each image that is kept."""
        return setting.evaluations(self.source.num_steps, self.source.guidance_scale, self.base_guidance)


def config_of(folder: Path) -> TrainConfig | None:
    """The configuration of a run folder, or of the run that a LoRA folder belongs to; None for any other LoRA."""
    lora_of(folder)
    files = [path / "config.yaml" for path in (folder, folder.resolve().parent)]
    return next((load_config(file) for file in files if file.is_file()), None)


def tuned_source(folder: Path, base: str | None, sampling: SamplingOptions, config: TrainConfig | None) -> Source:
    """The base model with the LoRA; a given base and given sampling options win. Raises ValueError: the LoRA does not
    name its model, or the model is missing or makes videos."""
    lora = lora_of(folder)
    if config is None and base is not None:
        source = find_source(base, lora=lora, sampling=sampling)
    else:
        try:
            source = find_source(str(folder), sampling=sampling)
        except ValueError as error:
            if config is not None or "LoRA" not in str(error):
                raise
            raise ValueError(
                f"{lora} is a LoRA that does not name its base model: give `base` MODEL, such as `base` {EMBEDDED}."
            ) from error
        source = replace(source, model=base or source.model, lora=lora)
    check_source(source, judging="flowrl sweep")
    return source


def lora_of(folder: Path) -> Path:
    """The LoRA of a run folder, or the folder or file itself. Raises ValueError: there is none."""
    if (folder / MODEL / "model_index.json").is_file():
        raise ValueError(
            f"the run {folder} trained all weights, and 'flowrl sweep' guides by LoRAs beside one base: give a run "
            "with policy.train=lora, or compare the run's images by 'flowrl eval'."
        )
    lora_files(folder)
    return folder_of_lora(folder)


def check_other(name: str, folder: Path, source: Source) -> None:
    """Refuses another run that a sweep cannot draw with its own. Raises ValueError: its base or LoRA does not fit."""
    config = config_of(folder)
    if config is not None and at_revision(config.pipeline.model, config.pipeline.revision) != source.model:
        raise ValueError(
            f"`also` {folder}: {name} was trained on {config.pipeline.model}, this sweep is of {source.model}."
        )
    check_lora(lora_of(folder), source)


def spread_prompts(
    given: str | Path | None, number: int, config: TrainConfig | None, *, negative: str, embedded: bool
) -> tuple[Prompt, ...]:
    """Prompts spread evenly over a file, else the run's or the world's. Raises ValueError: none, or too few."""
    own = config.prompts.eval if config is not None else None
    name = given or own or (EMBEDDED_PROMPTS if embedded else None)
    if name is None:
        raise ValueError("which prompts? No run names any for evaluation: give `prompts` FILE (.txt or .jsonl).")
    chosen = tuple(choose(load_prompts(str(name), negative, resolve=resolve_path), number))
    if len(chosen) < 2:
        raise ValueError(f"{name} holds {len(chosen)} prompt: intervals are over prompts, give at least 2.")
    return chosen
