"""What rewards need of a prompt, known from the prompt alone: before a model loads and an image is drawn.

Options of a reward that reads more of a prompt than its text have a method `lacks(prompt)`: None if nothing is missing,
otherwise the end of a sentence about the prompt, "needs ..., and has none: what to do". It uses the scoring functions.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from flowrl.benchmarks.geneval.metadata import parse_record
from flowrl.prompts.grids import cell_prompts, grid_shape
from flowrl.prompts.loading import Prompt


@runtime_checkable
class NeedsOfPrompt(Protocol):
    """Options that say what their reward needs of a prompt; others need its text at most."""

    def lacks(self, prompt: Prompt) -> str | None:
        """What a prompt lacks, without which no image of it gets a value; None if nothing is missing."""


@runtime_checkable
class NeedsToLearn(Protocol):
    """Options that say what their reward needs of training prompts, on top of what it needs to score one."""

    def lacks_to_learn(self, prompt: Prompt) -> str | None:
        """What a prompt lacks for the reward to learn from its images; None if nothing is missing."""


def lack_of(options: object, prompt: Prompt, *, trained: bool = True) -> str | None:
    """What a prompt lacks for a reward, or a comparator; with `trained`, for one that learns from its images too."""
    if trained and isinstance(options, NeedsToLearn) and (lack := options.lacks_to_learn(prompt)) is not None:
        return lack
    return options.lacks(prompt) if isinstance(options, NeedsOfPrompt) else None


def no_source(prompt: Prompt, *, one: bool = False) -> str | None:
    """The lack of a source image; with `one`, of a single one."""
    if not prompt.sources:
        return "needs a source image, and has none: name it in the prompt's row under 'source'"
    if one and len(prompt.sources) > 1:
        return f"needs one source image, and has {len(prompt.sources)}: name one in the prompt's row under 'source'"
    return None


def no_reference(prompt: Prompt) -> str | None:
    """The lack of a reference image."""
    if prompt.references:
        return None
    return "needs a reference image, and has none: name it in the prompt's row under 'reference'"


def no_fields(prompt: Prompt, *names: str) -> str | None:
    """The lack of fields of the record."""
    missing = [name for name in names if prompt.metadata.get(name) is None]
    if not missing:
        return None
    return f"needs {' and '.join(map(repr, missing))} in its record, and has none: take a .jsonl file whose rows do"


def no_record(prompt: Prompt) -> str | None:
    """The lack of a GenEval record that can be read."""
    if not {"tag", "include"} & prompt.metadata.keys():
        return (
            "needs a GenEval record (tag, include, prompt), and has none: take a .jsonl file, for instance "
            "asset:prompts/world_train.jsonl"
        )
    try:
        parse_record({"prompt": prompt.text, **prompt.metadata})
    except ValueError as error:
        return f"needs a GenEval record that can be read: {error}"
    return None


def no_grid(prompt: Prompt, grid: str | None) -> str | None:
    """The lack of a grid in the text, if the option `grid` names none for all prompts."""
    if grid_shape(grid or prompt.text) is not None:
        return None
    return "needs a grid of two cells or more in its text, such as 2x2, and names none: name it, or set the option grid"


def no_cells(prompt: Prompt, grid: str | None) -> str | None:
    """The lack of a grid, or of a sub-prompt for each of its cells."""
    shape = grid_shape(grid or prompt.text)
    if shape is None:
        return no_grid(prompt, grid)
    try:
        found = len(cell_prompts(prompt.text, prompt.metadata))
    except ValueError as error:
        return f"needs a sub-prompt for each cell: {error}"
    if found == shape[0] * shape[1]:
        return None
    return (
        f"needs a sub-prompt for each of its {shape[0]}x{shape[1]} cells, and has {found}: label them in the text, or "
        "give the field 'sub_prompts'"
    )
