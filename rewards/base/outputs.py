"""Checks that every reward's output must pass before it enters a statistic, and the joining of outputs of pieces."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from flowrl.rewards.base import RewardOutput
from flowrl.runtime.scrubbing import without_secrets

_LONGEST_WORD = 60
MOST_WORDS = 64
"""Sub-scores of a reward, and causes of its failures, that a log tells apart."""


def log_word(text: str) -> str:
    """A sub-score's or error's name from a server or a user's function, made fit for a log: at most 60 ASCII letters,
    digits and a few signs, `_` for others, without secrets."""
    return re.sub(r"[^A-Za-z0-9_ ./:+()%-]", "_", without_secrets(text)).strip()[:_LONGEST_WORD] or "unnamed"


def log_words(names: Iterable[str]) -> dict[str, str]:
    """Name -> word in a log; all names after the first `MOST_WORDS` share one word."""
    return {name: log_word(name) if place < MOST_WORDS else "others" for place, name in enumerate(names)}


def check_output(output: object, batch: int, name: str) -> RewardOutput:
    """Checks a reward's output (types, shapes [batch]); NaN and infinity become failed items, whose value is NaN."""
    if not isinstance(output, RewardOutput):
        raise ValueError(f"reward {name!r} must return a RewardOutput, got {type(output).__name__}.")
    tensors = {"values": (output.values, torch.float32), "valid": (output.valid, torch.bool)}
    tensors |= {f"parts[{key!r}]": (part, torch.float32) for key, part in output.parts.items()}
    for field, (tensor, dtype) in tensors.items():
        if not isinstance(tensor, Tensor):
            raise ValueError(f"reward {name!r}: {field} must be a tensor, got {type(tensor).__name__}.")
        if said := lacks_numbers(tensor):
            raise ValueError(f"reward {name!r}: {field} is {said}.")
        if tensor.dtype != dtype or tensor.shape != (batch,):
            raise ValueError(
                f"reward {name!r}: {field} must be {dtype} of shape [{batch}], one number per image, got "
                f"{tensor.dtype} {list(tensor.shape)}."
            )
    if output.valid.device != output.values.device:
        raise ValueError(
            f"reward {name!r}: values are on {output.values.device}, valid on {output.valid.device}: use one device."
        )
    valid = output.valid & torch.isfinite(output.values)
    if not bool(((valid != output.valid) | (~valid & ~output.values.isnan())).any()):  # one wait for a device
        return output
    lost = int((output.valid & ~valid).sum())
    errors = output.errors | ({"not_finite": output.errors.get("not_finite", 0) + lost} if lost else {})
    return replace(output, values=torch.where(valid, output.values, torch.nan), valid=valid, errors=errors)


def lacks_numbers(tensor: Tensor) -> str:
    """What is wrong with a tensor that has no plain numbers, and what to do; empty for a plain one."""
    if tensor.device.type == "meta":
        return "a tensor on the device meta, which holds no numbers: compute it on a real device"
    if tensor.is_quantized:
        return "a quantised tensor: return its dequantize()"
    if tensor.is_nested or tensor.layout != torch.strided:
        return f"a tensor of layout {str(tensor.layout).removeprefix('torch.')}, not a plain one: return its to_dense()"
    return ""


def changed_output(output: RewardOutput, change: Callable[[Tensor], Tensor]) -> RewardOutput:
    """The same output with each of its tensors changed, and its errors."""
    parts = {name: change(part) for name, part in output.parts.items()}
    return replace(output, values=change(output.values), valid=change(output.valid), parts=parts)


def move_output(output: RewardOutput, device: torch.device) -> RewardOutput:
    """The same output with its tensors on a device."""
    return changed_output(output, lambda tensor: tensor.to(device))


def join_outputs(outputs: Sequence[RewardOutput]) -> RewardOutput:
    """Joins one reward's outputs for the pieces of a batch; a sub-score is NaN where a piece lacks it."""
    errors: Counter[str] = Counter()
    for output in outputs:
        errors.update(output.errors)
    names = dict.fromkeys(name for output in outputs for name in output.parts)
    parts = {
        name: torch.cat([o.parts[name] if name in o.parts else torch.full_like(o.values, torch.nan) for o in outputs])
        for name in names
    }
    return RewardOutput(
        values=torch.cat([output.values for output in outputs]),
        valid=torch.cat([output.valid for output in outputs]),
        parts=parts,
        errors=dict(errors),
    )
