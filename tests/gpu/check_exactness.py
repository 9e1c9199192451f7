"""A network's answer without gradient, as a rollout has it, against the answer with gradient, as an update has it.

On a CPU both are equal to the bit. On a card kernels may take other ways with gradient and round apart: figures say by
how much, and only more than rounding is a fault.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from gpu_networks import WORDS, both_modes, kernel_of, masked, release, subject_of
from gpu_place import Figures, Place, compare, deviation

from flowrl.pipelines.arithmetic.compiling import check_compile, compile_blocks
from flowrl.pipelines.weights.quantize import LIBRARIES, check_quantize
from flowrl.profiling.network import switch_checkpointing
from flowrl.profiling.subject import BenchSubject
from flowrl.training.beside import Beside

ROWS = 12
pytestmark = pytest.mark.seconds(30)


@pytest.fixture(scope="module")
def sd3(place: Place) -> Iterator[BenchSubject]:
    """SD3.5-Medium's blocks at 512 px on a card, tiny-sd3 in the CPU form."""
    yield subject_of(place, "sd3")
    release(place)


@pytest.mark.parametrize("word", WORDS)
def check_kernel(place: Place, figures: Figures, sd3: BenchSubject, word: str) -> None:
    """SD3's joint attention by each kernel of torch."""
    with kernel_of(sd3, word, figures):
        compare(place, figures, "modes", *both_modes(sd3, ROWS))


@pytest.mark.parametrize("rows", [1, 2, 7])
def check_rows(place: Place, figures: Figures, sd3: BenchSubject, rows: int) -> None:
    """The same at other numbers of rows, odd ones too."""
    compare(place, figures, "modes", *both_modes(sd3, rows))


def check_split_batch(place: Place, figures: Figures, sd3: BenchSubject) -> None:
    """Twelve rows at once against two calls of six: a figure, since no library promises equal bits."""
    latents, cond = sd3.latents(ROWS), sd3.conditioning(ROWS)
    timestep = sd3.schedule.timestep[sd3.schedule.num_steps // 2].to(sd3.device).expand(ROWS)
    positive = type(cond)({name: x for name, x in cond.tensors.items() if not name.startswith("negative/")})
    with torch.no_grad():
        whole = sd3.pipeline.network(latents, timestep, positive)
        parts = [torch.arange(6), torch.arange(6, 12)]
        halves = torch.cat([sd3.pipeline.network(latents[p], timestep[p], positive[p]) for p in parts])
    figures |= {"bitwise": torch.equal(whole, halves), "deviation": (off := deviation(halves, whole))}
    assert off < place.pick(0.05, 1e-3)


def check_checkpointing(place: Place, figures: Figures, sd3: BenchSubject) -> None:
    """Blocks that are recomputed on the way back answer as those that are not."""
    with switch_checkpointing(sd3, False):
        plain, kept = both_modes(sd3, ROWS)
    with switch_checkpointing(sd3, True) as done:
        if not done:
            pytest.skip("this network cannot be checkpointed")
        compare(place, figures, "modes", *both_modes(sd3, ROWS))
        compare(place, figures, "with and without", both_modes(sd3, ROWS)[1], kept)
    compare(place, figures, "and back", both_modes(sd3, ROWS)[0], plain)


def check_repeats(place: Place, figures: Figures, sd3: BenchSubject) -> None:
    """The same call twice gives the same: without it nothing else here means much."""
    call = sd3.evaluation(ROWS)
    with torch.no_grad():
        first, second = call().clone(), call()
    compare(place, figures, "calls", second, first)


def check_beside_decoding(place: Place, figures: Figures, sd3: BenchSubject) -> None:
    """Images are decoded on a stream of their own meanwhile; neither changes the other."""
    latents = sd3.latents(4)
    call = sd3.evaluation(ROWS)
    with torch.no_grad():
        image, alone = sd3.pipeline.decode(latents).clone(), call().clone()
        drawn = list[torch.Tensor]()
        beside = Beside(sd3.device)
        for _ in range(3):
            beside.start(lambda: drawn.append(sd3.pipeline.decode(latents)), latents)
        together = [call().clone() for _ in range(4)]
        beside.finish()
    place.wait()
    for answer in together:
        compare(place, figures, "network", answer, alone)
    assert len(drawn) == 3
    for found in drawn:
        compare(place, figures, "decoder", found, image)


def check_masked_prompts(place: Place, figures: Figures, tmp_path: Path) -> None:
    """Qwen-Image with prompts of two lengths in a batch, whose attention gets a mask."""
    qwen = subject_of(place, "qwen", layers=2, folder=tmp_path)
    rows = place.pick(ROWS, 4)
    cond = masked(qwen, rows)
    compare(place, figures, "modes", *both_modes(qwen, rows, cond))
    open_cond = masked(qwen, rows, out=0)
    without = both_modes(qwen, rows, open_cond)[0]
    with_mask = both_modes(qwen, rows, cond)[0]
    figures["mask acts"] = not torch.equal(with_mask[0], without[0])
    assert figures["mask acts"], "the masked row answers as if it had no mask"


@pytest.mark.parametrize("family", ["unet", "wan"])
def check_other_networks(place: Place, figures: Figures, family: str) -> None:
    """A UNet, whose convolutions have plans of their own, and a video transformer."""
    found = subject_of(place, family)
    rows = place.pick({"unet": ROWS, "wan": 1}[family], 2)
    compare(place, figures, "modes", *both_modes(found, rows))


@pytest.mark.seconds(90)
def check_compiled(place: Place, figures: Figures) -> None:
    """Compiled blocks: by Inductor on a card, traced alone in the CPU form."""
    try:
        check_compile("blocks", place.device)
    except ValueError as error:
        pytest.skip(str(error))
    found = subject_of(place, "sd3")
    eager = both_modes(found, ROWS)[0]
    for part in found.denoisers:
        compile_blocks(part, backend=place.pick("inductor", "aot_eager"))
    plain, kept = both_modes(found, ROWS)
    compare(place, figures, "modes", plain, kept)
    figures["against eager"] = deviation(plain, eager)
    assert figures["against eager"] < place.pick(0.1, 1e-3)


@pytest.mark.parametrize("form", list(LIBRARIES))
def check_quantised(place: Place, figures: Figures, form: str) -> None:
    """A base in few bits, restored for each product; in the CPU form the layers of tiny-sd3."""
    try:
        check_quantize(form, place.device)
    except ValueError as error:
        pytest.skip(str(error).partition(":")[0])
    found = subject_of(place, "sd3", f"pipeline.quantize={form}")
    compare(place, figures, "modes", *both_modes(found, place.pick(ROWS, 2)))
