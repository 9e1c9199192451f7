"""Gradients by each kernel of attention, against softmax written out in float32; of the LoRA's layer against PEFT's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from gpu_networks import WORDS, available, gradients, kernel_of, release, subject_of
from gpu_place import Figures, Place, off_by
from peft import LoraConfig
from peft.tuners.lora import Linear
from torch import Tensor, nn

from flowrl.pipelines.arithmetic.attention import attention_of
from flowrl.pipelines.arithmetic.attention_words import KERNELS
from flowrl.pipelines.arithmetic.lora_linear import Added, LoraLinear, Merged, add_lora
from flowrl.profiling.subject import BenchSubject
from flowrl.training.prompting import guided

LENGTHS = (64, 192, 1216, 4096)
"""Tokens: short ones, one where n % 128 is 64, SD3's at 512 px, FLUX's and Qwen-Image's at 1024 px."""
HEADS = (64, 128)
"""Numbers of a head: SD3's, and those of FLUX, Qwen-Image and Wan."""
TOLERANCE = 0.05
"""Of the largest number: bfloat16's rounding many times over; a gradient that is missing or another's is off by 1."""


@pytest.fixture(scope="module")
def sd3(place: Place) -> Iterator[BenchSubject]:
    """SD3.5-Medium's blocks at 512 px on a card, tiny-sd3 in the CPU form."""
    yield subject_of(place, "sd3")
    release(place)


def drawn(place: Place, tokens: int, head: int, *, rows: int = 2, heads: int = 2) -> list[Tensor]:
    """Query, key, value and the direction of the gradient."""
    generator = torch.Generator().manual_seed(tokens + head)
    shape = (rows, heads, tokens, head)
    return [torch.randn(shape, generator=generator).to(place.device, place.dtype) for _ in range(4)]


def mask_of(place: Place, tokens: int, rows: int = 2) -> Tensor:
    """Keys that are read: the first row's last eighth is not."""
    read = torch.ones(rows, 1, 1, tokens, dtype=torch.bool, device=place.device)
    read[0, ..., -tokens // 8 :] = False
    return read


def with_gradients(attend: Callable[..., Tensor], given: list[Tensor], **options: Any) -> list[Tensor]:
    """Output, and gradients of query, key and value."""
    leaves = [x.detach().clone().requires_grad_() for x in given[:3]]
    out = attend(*leaves, **options)
    return [out.detach(), *torch.autograd.grad(out, leaves, given[3].to(out.dtype))]


def written_out(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None) -> Tensor:
    """`softmax(q k^T / sqrt(d)) v`, where a mask says which keys are read."""
    scores = query @ key.transpose(2, 3) / query.shape[-1] ** 0.5
    if attn_mask is not None:
        scores = scores.masked_fill(~attn_mask, -torch.inf)
    return torch.softmax(scores, -1) @ value


def measure(place: Place, figures: Figures, word: str, given: list[Tensor], name: str, mask: Tensor | None) -> None:
    """Notes how far output and gradients are from those in float32, and refuses what is not finite or far off."""
    found = with_gradients(attention_of(word), given, attn_mask=mask)
    parts = ("output", "d query", "d key", "d value")
    broken = [part for part, x in zip(parts, found, strict=True) if not bool(x.isfinite().all())]
    assert not broken, f"{name}: {', '.join(broken)} not finite by {word}"
    exact = with_gradients(written_out, [x.float() for x in given], attn_mask=mask)
    figures[name] = off = off_by(found, exact)
    assert off < TOLERANCE, f"{name}: {word} is {off:.0%} off"


@pytest.mark.parametrize("word", WORDS)
def check_kernel(place: Place, figures: Figures, word: str) -> None:
    """Output and gradients at four lengths and two sizes of heads."""
    with available(place.device, word, figures):
        for head in HEADS:
            for tokens in place.pick(LENGTHS, LENGTHS[:2]):
                measure(place, figures, word, drawn(place, tokens, head), f"{tokens} x {head}", None)


@pytest.mark.parametrize("word", [word for word in WORDS if KERNELS[word].mask != "none"])
def check_masked_kernel(place: Place, figures: Figures, word: str) -> None:
    """The same with keys that are not read, as Qwen-Image and HunyuanVideo have them."""
    with available(place.device, word, figures):
        for tokens in place.pick(LENGTHS, LENGTHS[:2]):
            measure(place, figures, word, drawn(place, tokens, 128), f"{tokens} masked", mask_of(place, tokens))


@pytest.mark.parametrize("masked", [False, True], ids=["unmasked", "masked"])
@pytest.mark.parametrize("word", WORDS)
def check_extreme_scores(place: Place, figures: Figures, word: str, masked: bool) -> None:
    """Scores of -120, below what the exponential of float32 holds, at 1216 tokens: every gradient stays finite."""
    if masked and KERNELS[word].mask == "none":
        pytest.skip(f"{word} takes no mask")
    for tokens in place.pick((192, 1216), (192,)):
        query, key, value, direction = drawn(place, tokens, 64)
        key = query.abs().mean((0, 1, 2), keepdim=True).expand_as(key).contiguous()
        scale = -120 * 8 / (key.float() ** 2).sum(-1, keepdim=True)  # every score is -120
        given = [(key.float() * scale).to(key.dtype), key, value, direction]
        mask = mask_of(place, tokens) if masked else None
        score = float((given[0].float() @ key.float().transpose(2, 3)).mean() / 8)
        assert -130 < score < -110
        with available(place.device, word, figures):
            found = with_gradients(attention_of(word), given, attn_mask=mask)
        finite = [bool(x.isfinite().all()) for x in found]
        figures[f"finite at {tokens}"] = all(finite)
        assert all(finite), f"{word} at {tokens} tokens: output, d query, d key, d value finite: {finite}"


@pytest.mark.parametrize("rule", [Added, Merged], ids=lambda rule: rule.__name__)
def check_lora_rule(place: Place, figures: Figures, rule: Any) -> None:
    """The LoRA's product and its gradients against the formula in float64."""
    outputs, inputs, rank, scale = 96, 64, 8, 1.5
    dtype = place.pick(torch.bfloat16 if rule is Added else torch.float32, torch.float32)
    make = torch.Generator().manual_seed(3)
    shapes = {"x": (5, 7, inputs), "w": (outputs, inputs), "b": (outputs,), "a": (rank, inputs), "l": (outputs, rank)}
    exact = {name: torch.randn(shape, generator=make).to(dtype).double() for name, shape in shapes.items()}
    here = {name: x.to(place.device, dtype) for name, x in exact.items()}

    def run(x: Tensor, a: Tensor, low: Tensor, answer: Callable[..., Tensor]) -> list[Tensor]:
        leaves = [t.clone().requires_grad_() for t in (x, a, low)]
        out = answer(*leaves)
        return [t.detach().cpu() for t in (out, *torch.autograd.grad(out.square().mean(), leaves))]

    found = run(
        here["x"],
        here["a"],
        here["l"],
        lambda x, a, low: rule.apply(x, here["w"], here["b"], a, low, scale),
    )
    wanted = run(
        exact["x"],
        exact["a"],
        exact["l"],
        lambda x, a, low: x @ (exact["w"] + scale * low @ a).T + exact["b"],
    )
    figures["off"] = off = off_by(found, wanted)
    assert off < (TOLERANCE if dtype == torch.bfloat16 else 1e-4)


def check_lora_layer(place: Place, figures: Figures) -> None:
    """The whole layer under autocast against PEFT's own: the same answer and the same gradients."""
    network = nn.Sequential(nn.Linear(64, 96)).requires_grad_(False).to(place.device, place.dtype)
    add_lora(network, LoraConfig(r=8, lora_alpha=12, target_modules=["0"]), "one")
    layer: Any = network[0]
    assert isinstance(layer, LoraLinear)
    for number, part in enumerate((layer.lora_A["one"], layer.lora_B["one"])):
        part.float()
        shape = part.weight.shape
        part.weight.data.copy_(torch.randn(shape, generator=torch.Generator().manual_seed(number)) / 8)
    x = torch.randn(5, 7, 64, generator=torch.Generator().manual_seed(9)).to(place.device, place.dtype)
    leaves = [layer.lora_A["one"].weight, layer.lora_B["one"].weight]
    cast = torch.autocast("cuda", torch.bfloat16, cache_enabled=False) if place.on_card else nullcontext()
    answers = list[list[Tensor]]()
    stock: Any = Linear
    forwards: list[Callable[[], Tensor]] = [lambda: layer(x), lambda: stock.forward(layer, x)]
    for forward in forwards:
        with cast:
            out = forward()
        answers.append([out.detach(), *torch.autograd.grad(out.float().square().mean(), leaves)])
    figures["off"] = off = off_by(answers[0], answers[1])
    assert off < place.pick(TOLERANCE, 1e-4)


@pytest.mark.seconds(40)
@pytest.mark.parametrize("word", WORDS)
def check_network(place: Place, figures: Figures, sd3: BenchSubject, word: str) -> None:
    """The LoRA's gradient through a network by each kernel, against that by attention in float32."""
    found = list[Tensor]()
    for kernel in (word, place.pick("float32", "math")):
        with kernel_of(sd3, kernel, figures):
            found.append(torch.cat([g.flatten() for g in gradients(sd3, sd3.evaluation(2)())]))
    mine, theirs = found
    assert bool(mine.isfinite().all())
    figures["relative difference"] = off = float((mine - theirs).double().norm() / theirs.double().norm())
    figures["norm"] = float(mine.double().norm())
    assert off < place.pick(0.1, 1e-3)


def check_negative_half(place: Place, figures: Figures, sd3: BenchSubject) -> None:
    """`sampler.train_negative: recompute` has the gradient of `true`, at half its memory."""
    scale, schedule = 3.0, sd3.schedule
    cond, latents, step = sd3.conditioning(2), sd3.latents(2), schedule.num_steps // 2

    def gradient(trained: Any) -> Tensor:
        velocity = guided(sd3.pipeline, sd3.pipeline.network, cond, scale, trained)
        answer = velocity(latents, schedule.sigma[step], schedule.timestep[step])
        return torch.cat([g.flatten() for g in gradients(sd3, answer)]).double()

    both, again = gradient(True), gradient("recompute")
    figures["relative difference"] = off = float((both - again).norm() / both.norm())
    assert float(both.norm()) > 0
    assert off < place.pick(0.05, 1e-4)
