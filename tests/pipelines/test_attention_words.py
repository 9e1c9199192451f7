"""Words of `pipeline.attention` on machines that are described: what they become, and what is refused in words."""

from __future__ import annotations

import pytest
import torch
from diffusers.models.attention_dispatch import AttentionBackendName

from flowrl.config.base import find_config
from flowrl.config.train import load_config
from flowrl.pipelines import family
from flowrl.pipelines.arithmetic.attention_words import (
    KERNELS,
    Known,
    check_here,
    check_word,
    choose,
    kernels_line,
    usable,
)
from flowrl.pipelines.places.known_checkpoints import checkpoints
from flowrl.runtime.capabilities import Machine, at_least_version
from flowrl.session.preflight import preflight
from flowrl.training.parts import attention_text

TINY = find_config("tiny_grpo_geneval")
CPU = Machine(device="cpu")
MPS = Machine(device="mps")
AMPERE = Machine(device="cuda", capability=(8, 6))
HOPPER = Machine(device="cuda", capability=(9, 0), packages={"kernels": "0.17.2", "xformers": "0.0.35"})
BLACKWELL = Machine(device="cuda", capability=(10, 0), packages={"kernels": "0.12.0"})
SD3, LONG = Known(head_sizes=(64,)), Known(head_sizes=(40, 80, 160))
KEYS, BIAS = Known(head_sizes=(128,), mask="keys"), Known(head_sizes=(112,), mask="bias")


@pytest.mark.parametrize(
    ("machine", "dtype", "known", "wanted"),
    [
        (CPU, torch.float32, SD3, "native"),
        (CPU, torch.bfloat16, SD3, "float32"),
        (CPU, torch.float16, BIAS, "float32"),
        (MPS, torch.float16, SD3, "native"),
        (AMPERE, torch.bfloat16, SD3, "native"),
        (HOPPER, torch.bfloat16, SD3, "cudnn"),
        (HOPPER, torch.float32, SD3, "native"),
        (HOPPER, torch.bfloat16, LONG, "native"),
        (HOPPER, torch.bfloat16, KEYS, "native"),
        (HOPPER, torch.bfloat16, Known(), "native"),
        (BLACKWELL, torch.bfloat16, SD3, "native"),
    ],
)
def test_what_auto_is(machine: Machine, dtype: torch.dtype, known: Known, wanted: str) -> None:
    assert choose("auto", machine, dtype, known) == wanted
    assert wanted in usable(machine, dtype, known)
    assert kernels_line("auto", machine, dtype, known).startswith(f"auto -> {wanted} on this machine (usable: native, ")


def test_what_a_machine_has() -> None:
    torchs = ["native", "float32", "math", "efficient", "flash", "cudnn"]
    hub = ["flash_hub", "flash_varlen_hub", "flash_3_hub", "flash_3_varlen_hub", "flash_4_hub"]
    assert usable(CPU, torch.bfloat16, SD3) == ["native", "float32", "math"]
    assert usable(CPU, torch.float32, SD3) == ["native", "math"]
    assert usable(AMPERE, torch.bfloat16, SD3) == torchs
    assert usable(HOPPER, torch.bfloat16, SD3) == [*torchs, "xformers", *hub]
    assert usable(BLACKWELL, torch.bfloat16, SD3) == [*torchs, "flash_hub", "flash_varlen_hub"]
    assert usable(HOPPER, torch.float32, SD3) == ["native", "math", "efficient", "xformers"]


@pytest.mark.parametrize(
    ("word", "dtype", "known", "said"),
    [
        ("sage", torch.bfloat16, SD3, ("no backward pass", "choose cudnn")),
        ("_sage_qk_int8_pv_fp8_cuda", torch.bfloat16, SD3, ("no backward pass",)),
        ("_flash_3", torch.bfloat16, SD3, ("without a backward pass", "flash_3_hub")),
        ("flex", torch.bfloat16, SD3, ("uncompiled", "choose native")),
        ("_native_cudnn", torch.bfloat16, SD3, ("diffusers' name", "cudnn here")),
        ("flash_varlen", torch.bfloat16, SD3, ("diffusers' name", "flash_attn_varlen here")),
        ("nativ", torch.bfloat16, SD3, ("'nativ'", "native")),
        ("flash", torch.float32, SD3, ("pipeline.dtype is float32", "bfloat16 and float16", "native")),
        ("cudnn", torch.bfloat16, LONG, ("at most 128", "heads of 160", "flash")),
        ("efficient", torch.bfloat16, Known(head_sizes=(36,)), ("multiple of 8", "heads of 36", "native")),
        ("flash_hub", torch.bfloat16, KEYS, ("takes no mask", "flash_varlen_hub")),
        ("flash_varlen_hub", torch.bfloat16, BIAS, ("masks of keys alone", "cudnn")),
    ],
)
def test_what_suits_no_machine_is_refused(word: str, dtype: torch.dtype, known: Known, said: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="attention") as error:
        check_word(word, dtype, known)
    for part in said:
        assert part in str(error.value)


@pytest.mark.parametrize(
    ("word", "machine", "said"),
    [
        ("flash", CPU, ("runs on CUDA", "the device is cpu", "or choose among auto, native, float32, math")),
        ("flash_3_hub", AMPERE, ("9.x (Hopper)", "has 8.6")),
        ("flash_3_hub", BLACKWELL, ("9.x (Hopper)", "has 10.0")),
        ("cudnn", Machine(device="cuda", capability=(7, 5)), ("8.0 and later", "has 7.5")),
        ("xformers", AMPERE, ("not installed", "in flowrl's folder, pip install -e '.[gpu]'")),
        ("flash_attn", AMPERE, ("flash-attn 2.6.3", "pip install flash-attn")),
        ("flash_4_hub", BLACKWELL, ("kernels 0.12.3 or newer", "0.12.0 is installed")),
        ("xformers", Machine(device="cuda", capability=(8, 0), packages={"xformers": "0.0.35"},
                             faults={"xformers": "installed, but built for torch 2.9"}), ("built for torch 2.9",)),
    ],
)  # fmt: skip
def test_what_a_machine_lacks_is_refused(word: str, machine: Machine, said: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match=f"pipeline.attention={word}") as error:
        check_here(word, machine)
    for part in said:
        assert part in str(error.value)


def test_diffusers_names_are_answered_with_ours() -> None:
    with pytest.raises(ValueError, match="_native_flash is diffusers' name of what is called flash here: write flash"):
        check_word("_native_flash", torch.bfloat16, SD3)


def test_what_is_right_passes() -> None:
    for word in ("auto", *usable(HOPPER, torch.bfloat16, SD3)):
        check_word(word, torch.bfloat16, SD3)
        check_here(word, HOPPER)


def test_versions_are_compared_by_their_numbers() -> None:
    assert at_least_version("0.12.3", "0.12")
    assert at_least_version("0.9.10+cu132", "0.9.9")
    assert not at_least_version("0.9.9", "0.12")


def test_every_kernel_that_diffusers_has_is_a_word_or_refused() -> None:
    backends = {kernel.backend for kernel in KERNELS.values()}
    for backend in AttentionBackendName:
        if backend.value not in backends:
            with pytest.raises(ValueError, match="choose"):
                check_word(backend.value, torch.bfloat16, SD3)


HEADS: dict[str, set[int]] = {
    "chroma": {128}, "cogvideox": {64}, "flux": {128}, "flux_fill": {128}, "flux2": {128}, "hunyuan_image": {128},
    "hunyuan_video": {128},
    "hunyuan_video15": {128}, "kontext": {128}, "krea2": {128}, "lucy_edit": {128}, "ltx2": {64, 128},
    "ltx_video": {64}, "lumina2": {96}, "motif_video": {128},
    "qwen_image": {128}, "qwen_image_edit": {128}, "qwen_image_21": {128}, "sana": {72, 112},
    "sana_video": {112}, "sd": {40, 64, 80, 160}, "sd3": {64}, "sdxl": {64}, "wan": {128}, "wan_animate": {128},
    "wan_vace": {128},
    "z_image": {128},
}  # fmt: skip
"""Numbers of a head, as the papers and model cards of the published checkpoints give them."""


def test_head_sizes_are_held_of_every_family_with_published_checkpoints() -> None:
    assert set(HEADS) == {known.family for known in checkpoints().values()}


@pytest.mark.parametrize("name", HEADS)
def test_head_sizes_of_published_checkpoints(name: str) -> None:
    models = [model for model, known in checkpoints().items() if known.family == name]
    assert {size for model in models for size in family(name).attends(model).head_sizes} == HEADS[name]


@pytest.mark.parametrize(
    ("settings", "said"),
    [(("pipeline.attention=sage",), "no backward pass"),
     (("pipeline.attention=flash", "pipeline.dtype=bfloat16"), "runs on CUDA devices"),
     (("pipeline.attention=cudnn", "pipeline.dtype=float32"), "pipeline.dtype is float32"),
     (("pipeline.attention=flsh",), "'flsh'")],
)  # fmt: skip
def test_a_run_is_refused_before_anything_loads(settings: tuple[str, ...], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        preflight(load_config(TINY, ["pipeline.device=cpu", *settings]))


def test_a_plan_says_what_auto_is() -> None:
    for dtype, wanted in (("float32", "auto -> native"), ("bfloat16", "auto -> float32")):
        config = load_config(TINY, ["pipeline.device=cpu", f"pipeline.dtype={dtype}"])
        assert attention_text(config.pipeline).startswith(f"{wanted} on this machine (usable: native, ")
