"""Networks that checks are made on: random weights of published dimensions on a card, embedded models in the CPU form.

They are built by `flowrl.profiling.subject.prepare`, as `flowrl bench` builds them, so that LoRA, kernel of attention
and prompts are those of a run.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from gpu_place import Figures, Place
from torch import Tensor

from flowrl.config.base import named_config
from flowrl.config.train import load_config
from flowrl.pipelines.arithmetic.attention import _give, give_kernel
from flowrl.pipelines.arithmetic.attention_words import KERNELS, Known, check_here
from flowrl.profiling.subject import BenchSubject, prepare
from flowrl.runtime.capabilities import this_machine
from flowrl.trajectory import Conditioning

WORDS = ("native", "float32", "math", "efficient", "flash", "cudnn")
"""Kernels of attention that torch itself has."""
PUBLISHED = {
    "sd3": "sd35m_grpo_pickscore",
    "unet": "sd15_ddpo_aesthetic",
    "qwen": "qwen_image_grpo_pickscore",
    "wan": "wan_t2v_grpo_ocr",
    "flux": "flux_grpo_pickscore",
}
"""A family in short -> the configuration whose dimensions a card gets."""
EMBEDDED = {"sd3": "tiny_grpo_geneval", "unet": "tiny_sd15_grpo", "wan": "tiny_wan_grpo"}
"""The same -> the embedded configuration of the CPU form."""


def subject_of(
    place: Place, family: str, *settings: str, layers: int | None = 2, folder: Path | None = None
) -> BenchSubject:
    """A family's network with a LoRA that acts.

    Args:
        place: where.
        family: a key of `PUBLISHED`.
        settings: of the configuration, behind those of the place.
        layers: blocks of each kind that stay of published dimensions; None leaves all. UNets have none to leave out.
        folder: where the CPU form may write a model.
    """
    if place.on_card:
        name, own = PUBLISHED[family], tuple[str, ...]()
        layers = None if family == "unet" else layers
    else:
        name, own = EMBEDDED.get(family, EMBEDDED["sd3"]), ("micro_batch_size=12", *_written(family, folder))
        layers = None
    path, _ = named_config(name)
    config = load_config(path, (*place.settings(), *own, *settings))
    return prepare(config, name, random_weights=place.on_card, layers=layers)


def _written(family: str, folder: Path | None) -> tuple[str, ...]:
    """Settings that name a tiny model of a family without an embedded one, which is written."""
    if family != "qwen":
        return ()
    from tiny_qwen_image import save_tiny_qwen_image

    assert folder is not None
    model = folder / "qwen"
    if not model.is_dir():
        save_tiny_qwen_image(model)
    return f"pipeline.model={model}", "pipeline.name=qwen_image", "pipeline.height=16", "pipeline.width=16"


def release(place: Place) -> None:
    """Gives a network's memory back once nothing names it."""
    gc.collect()
    place.free()


@contextmanager
def kernel_of(subject: Any, word: str, figures: Figures) -> Iterator[None]:
    """Inside, the network attends by another kernel."""
    dtype, before = subject.pipeline.dtype, subject.pipeline.attention
    with available(subject.device, word, figures) as pretended:
        if pretended:  # what the machine and the dtype are refused for is not looked at
            for network in subject.denoisers:
                _give(network, word)
        else:
            give_kernel(subject.denoisers, word, Known(), dtype, subject.device)
        try:
            yield
        finally:
            give_kernel(subject.denoisers, before, Known(), dtype, subject.device)


@contextmanager
def available(device: torch.device, word: str, figures: Figures) -> Iterator[bool]:
    """Inside, a kernel can be called; whether it is pretended.

    On a card a kernel that this machine does not have is skipped, with what it lacks. In the CPU form torch's choice
    stands in for a kernel of CUDA, within diffusers' function for it, so that layouts and masks are looked at.
    """
    if device.type == "cpu" and KERNELS[word].gpu:
        figures["form"] = "pretended kernel"
        with mock.patch("torch.nn.attention.sdpa_kernel", side_effect=lambda *_, **__: nullcontext()):
            yield True
        return
    try:
        check_here(word, this_machine(device.type))
    except ValueError as error:
        pytest.skip(str(error).partition(";")[0])
    yield False


def both_modes(subject: BenchSubject, rows: int, cond: Conditioning | None = None) -> tuple[Tensor, Tensor]:
    """The network's answers without gradient, as a rollout has them, and with it, as an update has them."""
    call = subject.evaluation(rows)
    if cond is not None:
        latents, step = subject.latents(rows), subject.schedule.num_steps // 2
        timestep = subject.schedule.timestep[step].to(subject.device).expand(rows)

        def call() -> Tensor:
            return subject.pipeline.network(latents, timestep, cond)

    with torch.no_grad():
        plain = call().clone()
    kept = call()
    assert kept.requires_grad, "nothing is trained: the network's answer has no graph"
    return plain, kept.detach()


def masked(subject: BenchSubject, rows: int, out: int = 4) -> Conditioning:
    """Prompts of Qwen-Image of two lengths: the first row's is shorter, so that attention gets a mask."""
    cond = subject.conditioning(rows)
    tensors = {name: value.clone() for name, value in cond.tensors.items() if not name.startswith("negative/")}
    longest = int(tensors["length_on_host"].max())
    tensors["length_on_host"][:] = longest
    tensors["mask"][:, :longest] = True
    tensors["length_on_host"][0] = longest - out
    tensors["mask"][0, longest - out :] = False
    return replace(cond, tensors=tensors)


def gradients(subject: BenchSubject, answer: Tensor) -> list[Tensor]:
    """Gradients of the mean square of an answer for the LoRA's weights."""
    found: tuple[Any, ...] = torch.autograd.grad(answer.square().mean(), subject.parameters, allow_unused=True)
    return [gradient.detach().clone() for gradient in found if gradient is not None]  # the last block may drop text
