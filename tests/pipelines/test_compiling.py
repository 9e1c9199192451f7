"""Compiled blocks: the same numbers, no compiling after the first round, refusals before anything loads.

Traced by "aot_eager", which runs the traced operations themselves: what generated code does to numbers is measured by
`tests/trials/compiled_blocks.py`.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from pathlib import Path

import pytest
import torch
from family_sampling import adapted, start_noise
from tiny_models import PROMPTS, load_tiny
from torch import Tensor, nn

from flowrl.config.sections import PipelineConfig
from flowrl.pipelines import PIPELINES, family
from flowrl.pipelines.arithmetic.compiling import check_compile, compile_blocks, repeated_blocks
from flowrl.pipelines.arithmetic.wide_products import checkpoint_blocks, has_products
from flowrl.pipelines.families.sd3 import FAMILY
from flowrl.pipelines.shared.family_pipeline import FamilyPipeline
from flowrl.pipelines.weights.lora import Policy
from flowrl.runtime.failures import explain
from flowrl.runtime.randomness import counter_normal

# ---- what is compiled ------------------------------------------------------------------------------------------------


def published(name: str) -> nn.Module:
    """A family's published network, or its experts, without weights."""
    from flowrl.pipelines.places.known_checkpoints import checkpoints

    model = next(model for model, known in checkpoints().items() if known.family == name)
    network = family(name).meta_denoiser(model)
    assert network is not None
    return network


@pytest.mark.slow
@pytest.mark.parametrize("name", PIPELINES)
def test_every_family_has_blocks_that_hold_most_of_its_weights(name: str) -> None:
    network = published(name)
    blocks = repeated_blocks(network)
    inside = sum(weight.numel() for block in blocks for weight in block.parameters())
    assert len(blocks) > 4
    assert inside > 0.6 * sum(weight.numel() for weight in network.parameters())
    assert not any(block is not other and block in set(other.modules()) for other in blocks for block in blocks)


# ---- one round compiles, the others do not ---------------------------------------------------------------------------


def with_lora(folder: Path, dtype: torch.dtype) -> tuple[FamilyPipeline, Policy]:
    """A pipeline and its LoRA, on a layer of the image and one of the text: each layer more is traced for seconds."""
    pipeline = load_tiny(folder, dtype)
    pipeline.lora_targets = ("attn.to_q", "attn.add_k_proj")
    return pipeline, adapted(pipeline)


def answer(pipeline: FamilyPipeline, count: int) -> Tensor:
    prompts = [PROMPTS[row % len(PROMPTS)] for row in range(count)]
    return pipeline.network(start_noise(pipeline, count), torch.linspace(900, 100, count), pipeline.encode(prompts))


def a_round(pipeline: FamilyPipeline, policy: Policy, rollout: int, update: int, held_out: int) -> list[Tensor]:
    """What an iteration asks of a network: rollout, reference, update, evaluation under a slot."""
    found = []
    with torch.no_grad():
        found.append(answer(pipeline, rollout))
        with policy.under("reference"):
            found.append(answer(pipeline, update))
    policy.network.zero_grad()
    predicted = answer(pipeline, update)
    predicted.square().sum().backward()
    found += [
        predicted.detach(),
        *(weight.grad.clone() for weight in policy.parameters.values() if weight.grad is not None),
    ]
    with torch.no_grad(), policy.under("ema"):
        found.append(answer(pipeline, held_out))
    return found


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the tracer looks at .grad of every tensor
def test_rounds_after_the_first_compile_nothing_and_all_are_equal_to_eager(tiny_sd3_folder: Path) -> None:
    sizes, dtype = [(4, 4, 4), (6, 3, 5), (2, 5, 7)], torch.bfloat16
    eager, policy = with_lora(tiny_sd3_folder, dtype)
    policy.add_slot("ema")
    wanted = [a_round(eager, policy, *size) for size in sizes]
    torch.compiler.reset()
    pipeline, policy = with_lora(tiny_sd3_folder, dtype)
    assert pipeline.attention == "float32"  # the kernel of attention, one of ours, is in the graphs
    names = list(pipeline.denoiser.state_dict())
    compile_blocks(pipeline.denoiser, backend="aot_eager")
    del repeated_blocks(pipeline.denoiser)[-1].forward  # of another kind, which would be traced for as long again
    policy.add_slot("ema")
    graphs = torch._dynamo.utils.counters["stats"]
    before = graphs["unique_graphs"]
    found = [a_round(pipeline, policy, *sizes[0])]
    first = graphs["unique_graphs"] - before
    assert 0 < first <= 3  # with gradient, without it, and without the LoRA
    with torch.compiler.set_stance("fail_on_recompile"):
        policy.load(policy.tensors())  # as resuming does
        found += [a_round(pipeline, policy, *size) for size in sizes[1:]]
        checkpoint_blocks(pipeline.denoiser, "cpu", dtype)
        again = a_round(pipeline, policy, *sizes[2])
    assert graphs["unique_graphs"] - before == first
    assert torch.equal(found[0][0], found[0][2]), "rollout and update differ: the ratio is not 1"
    for one, other in zip(again, found[-1], strict=True):
        assert torch.equal(one, other)
    for ours, eagers in zip(found, wanted, strict=True):
        differing = [(one, other) for one, other in zip(ours, eagers, strict=True) if not torch.equal(one, other)]
        if differing and not has_products(dtype):  # sums of gradients are rounded to 16 bits in another order
            assert all(one.ndim == 2 for one, _ in differing)
            given, own = (torch.cat([tensor.flatten() for tensor in side]) for side in (ours[3:-1], eagers[3:-1]))
            assert float((given - own).norm() / own.norm()) < 0.02
        else:
            assert not differing
    assert list(pipeline.denoiser.state_dict()) == names


class Gated(nn.Module):
    """A block whose steps are rounded one by one in eager code."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(-2, 2, 8).bfloat16())

    def forward(self, x: Tensor) -> Tensor:
        y = x * self.scale + x
        return x + nn.functional.silu(y) * y


class Blocks(nn.Module):
    _repeated_blocks = ("Gated",)

    def __init__(self) -> None:
        super().__init__()
        self.block = Gated()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.block(x)
        return y


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.skipif(shutil.which("g++") is None, reason="code for a CPU is generated in C++")
def test_generated_code_rounds_where_eager_code_does() -> None:
    network, x = Blocks(), counter_normal((64, 8), 0).bfloat16()
    wanted = network(x)
    gradient = torch.autograd.grad(wanted.float().sum(), [network.block.scale])[0]
    compile_blocks(network)
    # Headers are compiled ahead for the graphs to come, and a program for each kind of vectors that the processor has.
    with torch._inductor.config.patch({"cpp_cache_precompile_headers": False, "cpp.vec_isa_ok": True}):
        found = network(x)
        with torch.no_grad():  # generates the same source, which is not built twice
            assert torch.equal(network(x), found)
    assert torch.equal(found, wanted)
    torch.testing.assert_close(torch.autograd.grad(found.float().sum(), [network.block.scale])[0], gradient)


# ---- refusals --------------------------------------------------------------------------------------------------------


def test_what_cannot_compile_is_refused_before_anything_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"pipeline\.device is mps"):
        FAMILY.load("nowhere", device="mps", compile="blocks")
    monkeypatch.setenv("CXX", "no-such-compiler -O2")
    with pytest.raises(ValueError, match=r"no-such-compiler -O2 was not found.*set pipeline\.compile=none"):
        FAMILY.load("nowhere", compile="blocks")
    with pytest.raises(ValueError, match="must be none or blocks, got 'all'"):
        FAMILY.load("nowhere", compile="all")
    check_compile("none", "mps")
    assert PipelineConfig(model="m").compile == "none"


def test_a_c_compiler_is_looked_for_where_triton_needs_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(ValueError, match=r"neither cc nor gcc nor clang was found: install one .*apt install gcc"):
        check_compile("blocks", "cuda")
    assert "CC" not in os.environ
    for name, told in (("cc", "cc"), ("clang", None)):  # Triton itself looks for gcc and clang alone
        (tmp_path / name).touch(mode=0o755)
        check_compile("blocks", "cuda")
        assert os.environ.get("CC") == told
        monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.raises(ValueError, match=r"neither no-such-compiler nor gcc"):
        check_compile("blocks", "cuda")


@pytest.mark.filterwarnings("ignore:.*:DeprecationWarning")
def test_a_block_that_cannot_be_compiled_is_told_with_the_key() -> None:
    def broken(x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return x

    with pytest.raises(RuntimeError) as told:
        torch.compile(broken, backend="aot_eager", fullgraph=True)(torch.ones(2))
    assert "set pipeline.compile=none" in explain(told.value)
