"""From the command line to a sweep, everything checked that can be before weights load."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from flowrl.commands.sampling_arguments import sampling_options
from flowrl.comparing.sweep.sweep_settings import Question, Setting, ask
from flowrl.config.locations import at_revision
from flowrl.config.train import TrainConfig, load_config, resolve_path
from flowrl.generation.drawing import find_device
from flowrl.generation.generate import choose
from flowrl.generation.models import (
    EMBEDDED,
    WORLD_MODELS,
    Source,
    check_lora,
    check_source,
    find_source,
    label_of,
)
from flowrl.pipelines.places.lora_places import folder_of_lora, lora_files
from flowrl.prompts.identity import keys_of
from flowrl.prompts.loading import Prompt, load_prompts
from flowrl.training.model_files import MODEL

EMBEDDED_PROMPTS = "asset:prompts/world_heldout.jsonl"


@dataclass(frozen=True, kw_only=True, slots=True)
class Sweep:
    """A sweep that was asked for.

    Attributes:
        question: settings, rewards, other runs.
        source: the base model, the LoRA, and how both are sampled.
        config: of the run, None where a LoRA alone was given.
        name: of the swept model, for the page.
        base_guidance: classifier-free guidance of the base model.
        features: what diversity compares beside pixels.
        prompts: each once.
        samples: images per prompt.
        seed: of the start noise.
        batch_size: images at once.
        device: where everything runs.
        folder: what is written.
    """

    question: Question
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
        """LoRA folders: under "" that of the swept model, under their names those of other runs."""
        assert self.source.lora is not None
        return {"": self.source.lora, **{name: lora_of(folder) for name, folder in self.question.others}}

    @property
    def rows(self) -> dict[str, Prompt]:
        """The prompts by the keys under which journals keep what came of them."""
        return dict(zip(keys_of(self.prompts), self.prompts, strict=True))

    def evaluations(self, setting: Setting) -> int:
        """Of the network, for one image that is kept."""
        return setting.evaluations(self.source.num_steps, self.source.guidance_scale, self.base_guidance)


def prepare(parsed: argparse.Namespace) -> Sweep:
    """Reads and checks the command line.

    Raises:
        ValueError: says what was given, what is allowed and what to change.
    """
    device = find_device(parsed.device)
    folder = Path(parsed.model)
    config = config_of(folder)
    source = tuned_source(parsed, config)
    embedded = source.model in WORLD_MODELS
    question = ask(parsed, embedded=embedded, num_steps=source.num_steps)
    for name, other in question.others:
        _check_other(name, other, source)
    name = label_of(str(folder.resolve()))
    return Sweep(
        question=question, source=source, config=config, name=name, seed=parsed.seed, samples=parsed.samples,
        prompts=_prompts(parsed, config, negative=source.negative, embedded=embedded), batch_size=parsed.batch_size,
        base_guidance=source.guidance_scale if parsed.base_guidance is None else parsed.base_guidance,
        features=parsed.features or ("attributes" if embedded else "clip"), device=device,
        folder=parsed.out or (folder / "sweep" if (folder / "config.yaml").is_file() else Path(f"sweep-{name}")),
    )  # fmt: skip


def config_of(folder: Path) -> TrainConfig | None:
    """The configuration of a run folder, or of the run whose LoRA a folder is; None for another LoRA."""
    lora_of(folder)
    file = next((path / "config.yaml" for path in (folder, folder.resolve().parent) if _is_run(path)), None)
    return None if file is None else load_config(file)


def _is_run(folder: Path) -> bool:
    return (folder / "config.yaml").is_file()


def tuned_source(parsed: argparse.Namespace, config: TrainConfig | None) -> Source:
    """The base model with the LoRA; what the command line says of base and sampling wins.

    Raises:
        ValueError: a LoRA that does not say which model it belongs to, or a model that is not there or makes videos.
    """
    lora, given = lora_of(Path(parsed.model)), sampling_options(parsed)
    if config is None and parsed.base is not None:
        source = find_source(parsed.base, lora=lora, **given)
    else:
        try:
            source = find_source(parsed.model, **given)
        except ValueError as error:
            if config is not None or "LoRA" not in str(error):
                raise
            raise ValueError(
                f"{lora} is a LoRA that does not name its base model: give --base MODEL, such as --base {EMBEDDED}."
            ) from error
        source = replace(source, model=parsed.base or source.model, lora=lora)
    check_source(source, judging="flowrl sweep")
    return source


def lora_of(folder: Path) -> Path:
    """The LoRA of a run folder, or the folder or file itself.

    Raises:
        ValueError: there is none.
    """
    if (folder / MODEL / "model_index.json").is_file():
        raise ValueError(
            f"the run {folder} trained all weights, and 'flowrl sweep' guides by LoRAs beside one base: give a run "
            "with policy.train=lora, or compare the run's images by 'flowrl eval'."
        )
    lora_files(folder)
    return folder_of_lora(folder)


def _check_other(name: str, folder: Path, source: Source) -> None:
    config = config_of(folder)
    if config is not None and at_revision(config.pipeline.model, config.pipeline.revision) != source.model:
        raise ValueError(
            f"--also {folder}: {name} was trained on {config.pipeline.model}, this sweep is of {source.model}."
        )
    check_lora(lora_of(folder), source)


def _prompts(
    parsed: argparse.Namespace, config: TrainConfig | None, *, negative: str, embedded: bool
) -> tuple[Prompt, ...]:
    own = config.prompts.eval if config is not None else None
    name = parsed.prompts or own or (EMBEDDED_PROMPTS if embedded else None)
    if name is None:
        raise ValueError("which prompts? No run names any for evaluation: give --prompts FILE (.txt or .jsonl).")
    chosen = tuple(choose(load_prompts(name, negative, resolve=resolve_path), parsed.num_prompts))
    if len(chosen) < 2:
        raise ValueError(f"{name} holds {len(chosen)} prompt: intervals are over prompts, give at least 2.")
    return chosen
