"""What is evaluated, and the settings that a command hands to a benchmark."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from flowrl.generation.models import Source


@dataclass(frozen=True, kw_only=True, slots=True)
class Subject:
    """What is evaluated: a model (`source`) or images that exist (`images`), exactly one of them."""

    label: str
    """Short name in tables."""
    folder: Path
    """Where everything about this subject is written; images that are drawn go to `folder / "images"`."""
    source: Source | None = None
    """The model and how it is sampled; `flowrl.generation.models.load_source` loads it."""
    images: Path | None = None
    """A folder laid out as GenEval's scripts do: NNNNN/metadata.jsonl and NNNNN/samples/<digits>.png."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """What the command hands to a benchmark."""

    benchmark: str
    subject: Subject
    base: Subject | None = None
    """What the subject is compared to, on the same prompts and start noise."""
    out: Path
    prompts: str | None = None
    """As given: a file or a word that the benchmark knows ("published", "world"); None: its default."""
    num_prompts: int | None = None
    """Number of prompts, spread evenly over the list; None takes all."""
    samples: int = 4
    """Images per prompt; of images that exist the first ones."""
    seed: int = 0
    """Of the start noise and of the bootstrap."""
    batch_size: int = 32
    judge: str | None = None
    """As given; None: the benchmark's default."""
    options: Mapping[str, str] = field(default_factory=dict)
    """Values as text; a benchmark refuses those it does not know."""
    train_prompts: Path | None = None
    """The prompts that the subject was trained on, to be searched for the benchmark's."""
    device: str = "cpu"
    """Where models, judges and scorers run."""

    @property
    def subjects(self) -> list[Subject]:
        """The subject, and the base where there is one."""
        return [self.subject, *([self.base] if self.base is not None else [])]
