"""The subject of an evaluation, and the settings that a command passes to a benchmark."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from flowrl.generation.models import Source


@dataclass(frozen=True, kw_only=True, slots=True)
class Subject:
    """The subject of an evaluation: a model (`source`) or existing images (`images`), exactly one of them."""

    label: str
    """Short name in tables."""
    folder: Path
    """Folder for all files about this subject; drawn images go to `folder / "images"`."""
    source: Source | None = None
    """The model and how it is sampled; `flowrl.generation.models.load_source` loads it."""
    images: Path | None = None
    """A folder laid out as GenEval's scripts do: NNNNN/metadata.jsonl and NNNNN/samples/<digits>.png."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """The settings that a command passes to a benchmark."""

    benchmark: str
    subject: Subject
    base: Subject | None = None
    """The base to compare the subject with, on the same prompts and start noise."""
    out: Path
    prompts: str | None = None
    """As given: a file or a word that the benchmark knows ("published", "world"); None: its default."""
    num_prompts: int | None = None
    """Number of prompts, spread evenly over the list; None takes all."""
    samples: int = 4
    """Images per prompt; the first ones if images exist."""
    seed: int = 0
    """Seed of the start noise and of the bootstrap."""
    batch_size: int = 32
    judge: str | None = None
    """As given; None: the benchmark's default."""
    options: Mapping[str, str] = field(default_factory=dict)
    """Values as text; a benchmark refuses those it does not know."""
    train_prompts: Path | None = None
    """The subject's training prompts, to check for overlap with the benchmark's."""
    device: str = "cpu"
    """Where models, judges and scorers run."""

    @property
    def subjects(self) -> list[Subject]:
        """The subject, and the base if there is one."""
        return [self.subject, *([self.base] if self.base is not None else [])]
