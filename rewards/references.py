"""Reference images for a discriminator: files of a folder, files by prompt, or scenes drawn of the embedded world.

Some are held out: the discriminator never learns from them, so its verdict on them shows whether it knows what
references look like or has learned these by heart. Which images are taken is a function of counters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowrl.prompts.loading import spread
from flowrl.rewards.embedded.realism import scene_of
from flowrl.rewards.image_files import image_files, read_image
from flowrl.rewards.networks.discriminators import OWNER, Pixels
from flowrl.runtime.randomness import Part, counter_choice, counter_integers

WORLD = "world"


@dataclass(frozen=True, kw_only=True, slots=True)
class WorldReferences:
    """Scenes of the embedded world, drawn so that each prompt's GenEval record holds; new ones every time."""

    seed: int
    by_prompt: bool = True

    def pick(self, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]], *key: Part) -> list[Pixels]:
        """One image for each prompt, to learn from."""
        return [scene_of(row, self.seed, "learned", *key, i) for i, row in enumerate(metadata)]

    def held_out(self, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[Pixels]]:
        """One image for each prompt that is never learned from, and what each of them shows."""
        return list(prompts), [scene_of(row, self.seed, "held out", i) for i, row in enumerate(metadata)]


@dataclass(frozen=True, kw_only=True, slots=True)
class FileReferences:
    """Files to learn from and files held out, by prompt; under None if they serve every prompt."""

    learned: dict[str | None, tuple[Path, ...]]
    """At least one file for each prompt."""
    reserved: tuple[tuple[str | None, Path], ...]
    """(prompt, file) of those held out."""
    source: str
    """The place that lists them, for messages."""

    @property
    def by_prompt(self) -> bool:
        """Whether references show what a prompt asks for."""
        return None not in self.learned

    def pick(self, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]], *key: Part) -> list[Pixels]:
        """One image for each prompt, to learn from; a prompt without a reference is refused."""
        images = []
        for i, prompt in enumerate(prompts):
            files = self.learned.get(prompt if self.by_prompt else None)
            if files is None:
                raise ValueError(
                    f"{OWNER}: {self.source} has no reference for the prompt {prompt!r}: add some, or give a folder, "
                    f"whose images serve every prompt."
                )
            images.append(read_image(files[counter_integers(0, len(files), "reference", *key, i)], owner=OWNER))
        return images

    def held_out(self, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[Pixels]]:
        """The same files for any prompts, at most as many as prompts are given, and the files' own prompts."""
        rows = [self.reserved[place] for place in spread(len(self.reserved), len(prompts))]
        return [prompt or "" for prompt, _ in rows], [read_image(path, owner=OWNER) for _, path in rows]


References = WorldReferences | FileReferences


def open_references(source: str, *, held_out: float, seed: int) -> References:
    """The references behind an option: `world`, a folder, or a JSON file.

    Of the files of each prompt the share `held_out` is kept from learning, rounded, and never all of them.

    Raises ValueError: as `image_files`, or too few files to hold any out.
    """
    if source == WORLD:
        return WorldReferences(seed=seed)
    learned: dict[str | None, tuple[Path, ...]] = {}
    reserved: list[tuple[str | None, Path]] = []
    for prompt, files in image_files(source, other=f", or {WORLD!r}").items():
        order = counter_choice(len(files), len(files), seed, "held out", prompt or "")
        kept = min(round(held_out * len(files)), len(files) - 1)
        reserved += [(prompt, files[i]) for i in order[:kept]]
        learned[prompt] = tuple(files[i] for i in sorted(order[kept:]))
    if held_out and not reserved:
        raise ValueError(
            f"held_out ({held_out:g}) of the files of a prompt in {source} rounds to none: add files, raise "
            f"held_out, or set it to 0 to go without held-out references."
        )
    return FileReferences(learned=learned, reserved=tuple(reserved), source=source)
