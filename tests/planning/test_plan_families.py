"""What each family tells `flowrl plan`: one evaluation of its published networks runs, and costs what was measured."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from diffusers import ZImageTransformer2DModel
from flow_family import published
from torch import nn

from flowrl.pipelines import PIPELINES, family
from flowrl.pipelines.arithmetic.compiling import first_expert
from flowrl.pipelines.families import cogvideox, wan, z_image
from flowrl.pipelines.places.known_checkpoints import checkpoints
from flowrl.pipelines.shared.cards import Size
from flowrl.pipelines.weights.stock_loading import on_meta
from flowrl.planning.network import FewBlocks, Trained, few_blocks, measure, without_gradient
from flowrl.planning.traces import Trace

pytestmark = pytest.mark.slow

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
CHECKPOINTS = [(name, model) for name in PIPELINES for model in (published(family(name))[0], *MORE.get(name, ()))]
FIRST = dict(reversed(CHECKPOINTS))
BLOCKS = ("num_layers", "num_single_layers", "n_layers")
VIDEO = (
    "cogvideox",
    "hunyuan_video",
    "hunyuan_video15",
    "lucy_edit",
    "ltx2",
    "ltx_video",
    "motif_video",
    "sana_video",
    "wan",
    "wan_animate",
    "wan_vace",
)


@functools.cache
def network(name: str, model: str, doubled: str = "") -> Any:
    """A published network with one block of each kind, or two of one kind: they are alike, and the rest is as it is."""
    known = checkpoints()[model]
    short: dict[str, Any] = {key: 1 + (key == doubled) for key in BLOCKS if key in known.network}
    if "transformer_layers_per_block" in known.network:
        short["transformer_layers_per_block"] = 1
    if "vace_layers" in known.network:
        short["vace_layers"] = [0]
    if "inject_face_latents_blocks" in known.network:
        short["inject_face_latents_blocks"] = 1
    with patch.dict(checkpoints(), {model: replace(known, network={**known.network, **short})}):
        denoiser = family(name).meta_denoiser(model)
    assert isinstance(denoiser, nn.Module)
    return first_expert(denoiser)


def call_of(name: str, model: str, *, more: tuple[int, int, int] = (0, 0, 0)) -> dict[str, Any]:
    """Arguments at the checkpoint's own size, or some pixels and frames beyond it."""
    own = family(name).planned_size(model, {})
    assert (own.num_frames is not None) == (name in VIDEO)
    frames = own.num_frames and own.num_frames + more[2]
    size = Size(height=own.height + more[0], width=own.width + more[1], num_frames=frames)
    return family(name).meta_call(model, size, family(name).text_tokens(model, {}))


@pytest.mark.parametrize(("name", "model"), CHECKPOINTS)
def test_the_published_network_takes_the_arguments(name: str, model: str) -> None:
    denoiser = network(name, model)
    with torch.no_grad(), Trace():  # which remembers what torch takes long to derive
        assert len(denoiser(**call_of(name, model))[0]) == 1


@pytest.mark.parametrize("case", MEASURED)
def test_an_evaluation_costs_what_was_measured(case: str) -> None:
    name, model, (height, width, frames), tokens, expected = MEASURED[case]
    call = family(name).meta_call(model, Size(height=height, width=width, num_frames=frames), tokens)

    def flops(doubled: str = "") -> int:
        with torch.no_grad(), Trace() as trace:
            network(name, model, doubled)(**call)
        return trace.total

    one_each, depths = flops(), {key: n for key, n in checkpoints()[model].network.items() if key in BLOCKS}
    total = one_each + sum((count - 1) * (flops(key) - one_each) for key, count in depths.items())
    assert total / 1e12 == pytest.approx(expected, rel=0.02)


MIDDLING = {"num_layers": 4, "num_single_layers": 3, "n_layers": 4, "transformer_layers_per_block": [1, 1, 3]}
"""Fewer blocks than published, and more than those by which many are measured."""


WHOLE = ("sd", "wan_vace", "wan_animate", "motif_video")
"""Families of which no two blocks are alike, or whose memory is not that of a few."""
ALIKE = ("black-forest-labs/FLUX.1-Kontext-dev", "black-forest-labs/FLUX.1-Fill-dev", "Qwen/Qwen-Image-Edit",
         "decart-ai/Lucy-Edit-Dev")  # fmt: skip
"""Networks with the blocks of another family's: only their ends read more channels, or there are more tokens."""


@pytest.mark.parametrize(
    ("name", "model"), [case for case in CHECKPOINTS if case[0] not in WHOLE and case[1] not in ALIKE]
)
def test_few_blocks_tell_exactly_what_all_of_them_take(name: str, model: str) -> None:
    known = checkpoints()[model]
    short = {key: value for key, value in MIDDLING.items() if key in known.network}
    if known.network.get("dual_attention_layers"):
        short |= {"num_layers": 7, "dual_attention_layers": [0, 1, 2]}
    with patch.dict(checkpoints(), {model: replace(known, network={**known.network, **short})}):
        kinds, targets = family(name).block_kinds(model), family(name).lora_targets
        full, few = family(name).meta_denoiser(model), few_blocks(family(name), model, targets)
        assert full is not None
        assert few is not None
        assert 1 <= len(few.more) == len(kinds)
        settings: Any = {"trained": Trained(targets=targets, rank=4), "dtype": torch.bfloat16}
        found = measure(few, call_of(name, model), **settings)
        wanted = measure(FewBlocks(least=full), call_of(name, model), **settings)
        if name == "chroma":  # its table of modulations grows with the blocks: 2 MB of 640 at the published depth
            for key in ("beside", "working"):
                assert getattr(found, key) == pytest.approx(getattr(wanted, key), rel=5e-3)
            found = replace(found, beside=wanted.beside, working=wanted.working)
        assert found == wanted


def test_a_target_that_names_a_block_is_looked_for_in_all_blocks() -> None:
    for targets, alike in (["to_q"], 1), (["to_q", "blocks.1.to_q"], 0):
        few = few_blocks(family("sana"), FIRST["sana"], targets)
        assert few is not None
        assert len(few.more) == alike


@pytest.mark.parametrize("name", PIPELINES)
def test_impossible_sizes_are_refused_with_the_key(name: str) -> None:
    for key, more in {"height": (1, 0, 0), "width": (0, 1, 0), "num_frames": (0, 0, 1)}.items():
        if key != "num_frames" or name in VIDEO:
            with pytest.raises(ValueError, match=rf"pipeline\.{key} "):
                call_of(name, FIRST[name], more=more)


def test_text_that_a_table_of_positions_has_no_place_for_is_refused() -> None:
    size = Size(height=480, width=720, num_frames=49)
    with pytest.raises(ValueError, match=r"pipeline\.max_sequence_length \(128\) must be 226"):
        cogvideox.FAMILY.meta_call("THUDM/CogVideoX-2b", size, 128)


def test_image_to_video_of_wan_2_1_always_reads_a_full_prompt() -> None:
    assert wan.FAMILY.text_tokens(IMAGE, {"max_sequence_length": 128}) == 512
    assert wan.FAMILY.text_tokens(IMAGE_22, {"max_sequence_length": 128}) == 128


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_arguments_and_answers_in_lists_are_measured(dtype: torch.dtype) -> None:
    model = "Tongyi-MAI/Z-Image"
    config = {**checkpoints()[model].network, "n_layers": 1, "n_refiner_layers": 1}
    denoisers = FewBlocks(least=on_meta(ZImageTransformer2DModel, config))
    call = z_image.FAMILY.meta_call(model, Size(height=256, width=256), 64)
    found = measure(denoisers, call, trained=Trained(targets=z_image.LORA_TARGETS, rank=4), dtype=dtype)
    assert found.attended == 256 + 64
    flops, working = without_gradient(denoisers, call)
    assert flops == found.forward
    assert working == pytest.approx(found.working, rel=0.01)  # a copy of an input more or less
