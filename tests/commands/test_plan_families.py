"""What each family tells `flowrl plan`: one evaluation of its published networks runs, and costs what was measured."""

from __future__ import annotations

import functools
from typing import Any
from unittest.mock import patch

import pytest
import torch
from diffusers import ZImageTransformer2DModel
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from flowrl.commands.plan.gather import _forward, _text_tokens
from flowrl.commands.plan.network import measure
from flowrl.pipelines import PIPELINES, cogvideox, common, family, wan, z_image
from flowrl.pipelines.common import first_expert

FLUX, QWEN = "black-forest-labs/FLUX.1-dev", "Qwen/Qwen-Image"
WAN_1_3B, WAN_14B = "Wan-AI/Wan2.1-T2V-1.3B-Diffusers", "Wan-AI/Wan2.1-T2V-14B-Diffusers"
IMAGE, IMAGE_22 = "Wan-AI/Wan2.1-I2V-14B-480P-Diffusers", "Wan-AI/Wan2.2-I2V-A14B-Diffusers"

MEASURED = {
    "FLUX.1-dev": ("flux", FLUX, (512, 512, None), 512, 21.50),
    "Qwen-Image, short": ("qwen_image", QWEN, (512, 512, None), 64, 15.67),
    "Qwen-Image, long": ("qwen_image", QWEN, (512, 512, None), 256, 18.62),
    "Wan 1.3B, small": ("wan", WAN_1_3B, (240, 416, 33), 512, 11.54),
    "Wan 1.3B, own size": ("wan", WAN_1_3B, (480, 832, 81), 512, 283.0),
    "Wan 14B": ("wan", WAN_14B, (240, 416, 33), 512, 97.7),
}
"""Family, checkpoint, size, text tokens -> TF of a forward pass, counted independently of these functions."""

MORE = {  # checkpoints whose networks read something else than the first of their family
    "wan": (IMAGE, IMAGE_22, "Wan-AI/Wan2.2-TI2V-5B-Diffusers"),
    "qwen_image_edit": ("Qwen/Qwen-Image-Edit-2511",),
    "cogvideox": ("THUDM/CogVideoX-5b",),
}
CHECKPOINTS = [(name, model) for name in PIPELINES for model in ("first", *MORE.get(name, ()))]
BLOCKS = ("num_layers", "num_single_layers", "n_layers")
VIDEO = ("cogvideox", "hunyuan_video", "ltx_video", "wan")


@functools.cache
def network(name: str, model: str, doubled: str = "") -> Any:
    """A published network with one block of each kind, or two of one kind: they are alike, and the rest is as it is."""
    known = family(name).KNOWN
    model = next(iter(known)) if model == "first" else model
    short = {key: 1 + (key == doubled) for key in BLOCKS if key in known[model]}
    with patch.dict(known, {model: {**known[model], **short}}):
        denoiser = family(name).meta_denoiser(model)
    assert isinstance(denoiser, nn.Module)
    return first_expert(denoiser)


def call_of(name: str, denoiser: Any, *, more: tuple[int, int, int] = (0, 0, 0)) -> dict[str, Any]:
    """Arguments at the family's own size, or some pixels and frames beyond it."""
    module = family(name)
    height, width, frames = module.default_size(denoiser)
    assert (frames is not None) == (name in VIDEO)
    tokens = _text_tokens(module, next(iter(module.KNOWN)), None)
    return dict(module.meta_call(denoiser, height + more[0], width + more[1], frames and frames + more[2], tokens))


@pytest.mark.parametrize(("name", "model"), CHECKPOINTS)
def test_the_published_network_takes_the_arguments(name: str, model: str) -> None:
    denoiser = network(name, model)
    with torch.no_grad():
        assert len(denoiser(**call_of(name, denoiser))[0]) == 1


@pytest.mark.parametrize("case", MEASURED)
def test_an_evaluation_costs_what_was_measured(case: str) -> None:
    name, model, size, tokens, expected = MEASURED[case]
    module = family(name)

    def flops(doubled: str = "") -> int:
        denoiser = network(name, model, doubled)
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            denoiser(**module.meta_call(denoiser, *size, tokens))
        return int(counter.get_total_flops())

    one_each, depths = flops(), {key: count for key, count in module.KNOWN[model].items() if key in BLOCKS}
    total = one_each + sum((count - 1) * (flops(key) - one_each) for key, count in depths.items())
    assert total / 1e12 == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("name", PIPELINES)
def test_impossible_sizes_are_refused_with_the_key(name: str) -> None:
    denoiser = network(name, "first")
    for key, more in {"height": (1, 0, 0), "width": (0, 1, 0), "num_frames": (0, 0, 1)}.items():
        if key != "num_frames" or name in VIDEO:
            with pytest.raises(ValueError, match=rf"pipeline\.{key} "):
                call_of(name, denoiser, more=more)


def test_text_that_a_table_of_positions_has_no_place_for_is_refused() -> None:
    denoiser = network("cogvideox", "first")
    with pytest.raises(ValueError, match=r"pipeline\.max_sequence_length \(128\) must be 226"):
        cogvideox.meta_call(denoiser, 480, 720, 49, 128)


def test_image_to_video_of_wan_2_1_always_reads_a_full_prompt() -> None:
    assert wan.text_tokens(IMAGE, 128) == 512
    assert wan.text_tokens(IMAGE_22, 128) == 128


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_arguments_and_answers_in_lists_are_measured(dtype: torch.dtype) -> None:
    config = {**z_image.Z_IMAGE, "n_layers": 1, "n_refiner_layers": 1}
    denoiser = common.on_meta(ZImageTransformer2DModel, config)
    assert denoiser is not None
    call = z_image.meta_call(denoiser, 256, 256, None, 64)
    found = measure(denoiser, call, targets=z_image.LORA_TARGETS, rank=4, dtype=dtype)
    assert found.latent == (16, 1, 32, 32)
    assert found.attended == 256 + 64
    assert _forward(z_image, denoiser, (256, 256, None), 64) == pytest.approx(found.forward, rel=0.01)
