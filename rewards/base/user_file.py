"""A user's own reward, loaded from a Python file by path.

    rewards: [{file: my/rewards.py, function: sharpness, weight: 0.5, options: {radius: 3}}]

The number of positional parameters decides how the function is called; options are its keyword-only parameters:

    def sharpness(images, prompts, metadata, *, radius=2):      # three: returns B numbers
    def sharpness(inputs, *, radius=2):                         # one: takes RewardInputs, returns RewardOutput

`images` is a float32 tensor [B, 3, H, W] in [0, 1] without gradient, on the device of the run; `prompts` and `metadata`
are lists of B. The numbers may be a list, an array or a tensor; NaN marks an item as failed. A keyword-only parameter
called `device` receives the device of the run.

The file is imported under a private module name, so it may be called `rewards.py` and collides with nothing. Its folder
is not put on the import path. A relative path starts at the working directory.

A function may write into its arguments, which are copies. Its changes to the process are undone
(`flowrl.rewards.base.user_code`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine, Iterator, Mapping, Set
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flowrl.config.options import build_options, options_class
from flowrl.rewards.base import FunctionReward, Reward, RewardInputs, RewardOutput, output_of, with_images
from flowrl.rewards.base.outputs import changed_output, check_output, lacks_numbers
from flowrl.rewards.base.user_code import call_function, content_of, load_function


@dataclass(frozen=True, kw_only=True, slots=True)
class UserFile:
    """A checked function of a user's file and its options; made by `user_file_options`."""

    file: str
    function: str
    scorer: Callable[..., Any]
    num_arguments: int
    options: Mapping[str, Any]

    def build(self, device: torch.device) -> Reward:
        """Makes the reward; its name is the function's. A keyword-only parameter `device` gets the device."""
        options = dict(self.options)
        if "device" in inspect.signature(self.scorer).parameters:
            options["device"] = device
        content = content_of(self.file)
        scorer = partial(self.scorer, **options)

        def score(inputs: RewardInputs) -> RewardOutput:
            where, own = f"reward {self.file}:{self.function}", copy_inputs(inputs)
            arguments = (own,) if self.num_arguments == 1 else (own.images, own.prompts, own.metadata)
            counters = (
                self.function,
                inputs.iteration,
                *inputs.group_ids[:1].tolist(),
                *inputs.sample_ids[:1].tolist(),
            )
            result = call_function(scorer, *arguments, file=self.file, where=where, counters=counters)
            if self.num_arguments == 1:
                output = check_output(result, len(inputs), where.removeprefix("reward "))
                return changed_output(output, lambda tensor: tensor.detach().clone())
            batch = len(inputs)
            if isinstance(result, Tensor) and (said := lacks_numbers(result)):
                raise ValueError(f"{where} must return {batch} numbers, one per image, and returned {said}.")
            try:
                values = torch.as_tensor(np.array(result) if isinstance(result, np.ndarray) else result)
            except (TypeError, ValueError, RuntimeError, OverflowError) as error:
                raise ValueError(
                    f"{where} must return {batch} numbers, one per image, got {_describe(result)}: {error}"
                ) from error
            if values.is_complex():
                raise ValueError(
                    f"{where} must return {batch} real numbers, got complex ones: return their size, or a part."
                )
            if values.shape != (batch,):
                raise ValueError(f"{where} must return {batch} numbers, one per image, got shape {list(values.shape)}.")
            return output_of(values.detach().float().tolist(), inputs)

        return FunctionReward(
            name=self.function,
            score=score,
            needs=frozenset({"images", "prompts", "metadata", "group_ids", "sample_ids"}),
            version=f"user_file:{Path(self.file).name}:{self.function}:sha256-{content}:"
            f"{dict(sorted(self.options.items()))!r}",
        )


def user_file_options(file: str, function: str, options: Mapping[str, Any]) -> UserFile:
    """Imports the file and checks that the function exists, its parameters, and the options."""
    where = f"reward {file}:{function}"
    scorer = load_function(file, function)
    parameters = inspect.signature(scorer).parameters.values()
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    variable = any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters)
    if len(names) not in (1, 3) or names == ["images"] or variable:
        raise ValueError(
            f"{where}: the parameters must be (images, prompts, metadata) or (inputs), and options after a bare *, got "
            f"{inspect.signature(scorer)}."
        )
    build_options(options_class(scorer, reserved=("device",)), options, owner=where)
    return UserFile(file=file, function=function, scorer=scorer, num_arguments=len(names), options=dict(options))


def copy_inputs(inputs: RewardInputs) -> RewardInputs:
    """A copy of the inputs without gradient: writing into it spoils nothing."""
    return replace(
        with_images(inputs, lambda images: images.detach().clone()),
        prompts=list(inputs.prompts),
        metadata=deepcopy(inputs.metadata),
        group_ids=inputs.group_ids.clone(),
        sample_ids=inputs.sample_ids.clone(),
    )


def _describe(result: Any) -> str:
    """What a function returned instead of numbers, and what to return instead if that is clear."""
    kind = type(result).__name__
    if isinstance(result, (list, tuple, np.ndarray)):
        if any(value is None for value in result):
            return f"{kind} with None in it (give NaN, float('nan'), for an item that failed)"
        return f"{kind} of {', '.join(dict.fromkeys(type(value).__name__ for value in result)) or 'nothing'}"
    if result is None:
        return f"{kind} (is a return missing?)"
    if isinstance(result, Coroutine):
        result.close()
        return f"{kind} (write def, not async def)"
    if isinstance(result, (Iterator, Mapping, Set)):
        return f"{kind} (make a list of its numbers, in the order of the images)"
    return kind
