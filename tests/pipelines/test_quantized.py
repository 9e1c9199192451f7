"""Frozen weights in few bits: which layers, the numbers of a model rounded the same way, whole runs, refusals."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import torch
from diffusers import StableDiffusion3Pipeline
from family_sampling import fill_lora, start_noise
from tiny_models import ALPHA, PROMPTS, RANK, guided
from tiny_runs import TinyRuns, differences, lasting, lora, metrics, tiny_runs
from torch import Tensor, nn

from flowrl.cli import main
from flowrl.generation.models import find_source, load_source
from flowrl.pipelines.arithmetic.quantized_linear import QuantizedLinear
from flowrl.pipelines.families.sd3 import FAMILY
from flowrl.pipelines.shared.family_pipeline import FamilyPipeline
from flowrl.pipelines.weights.loading_choices import Loading
from flowrl.pipelines.weights.lora import Policy
from flowrl.pipelines.weights.quantize import LIBRARIES, check_quantize, large_layers, quantize_blocks, quantize_layer
from flowrl.pretraining.tiny_sd3 import CONTEXT

ROUNDED = ("int8", "fp8", "nf4")
"""Forms whose layers compute as plain ones do with the rounded weight."""


def _needs(form: str) -> None:
    pytest.importorskip(LIBRARIES[form])


def _load(folder: Path, form: str, dtype: torch.dtype = torch.float32) -> FamilyPipeline:
    return FAMILY.load(str(folder), dtype=dtype, max_sequence_length=CONTEXT, how=Loading(quantize=form))


def _rounded(network: nn.Module) -> None:
    """Puts plain layers in the places of quantised ones, with the weights that those stand for."""
    for parent in list(network.modules()):
        for name, layer in list(parent.named_children()):
            if isinstance(layer, QuantizedLinear):
                plain = nn.Linear(layer.in_features, layer.out_features, bias=layer.bias is not None, device="meta")
                plain.weight, plain.bias = nn.Parameter(layer.weight.clone(), requires_grad=False), layer.bias
                setattr(parent, name, plain)


@dataclass(frozen=True)
class _Seen:
    velocity: Tensor
    without_gradient: Tensor
    reference: Tensor
    gradients: tuple[Tensor | None, ...]


def _seen(pipeline: FamilyPipeline) -> _Seen:
    """What a pipeline with a LoRA that does something answers, and its gradient."""
    policy = Policy(pipeline.denoiser, rank=RANK, alpha=ALPHA, targets=pipeline.lora_targets, seed=0)
    fill_lora(policy)
    velocity, x = guided(pipeline, PROMPTS[:2], 2.0), start_noise(pipeline, 2)

    def answer() -> Tensor:
        return velocity(x, torch.tensor(0.7), torch.tensor(700.0))

    output = answer()
    gradients = torch.autograd.grad(output.square().mean(), list(policy.parameters.values()), allow_unused=True)
    with torch.no_grad():
        again = answer()
        with policy.under("reference"):
            return _Seen(output.detach(), again, answer(), gradients)


# ---- one layer -------------------------------------------------------------------------------------------------------


_STEPS = {"int8": 1 / 254, "fp8": 1 / 16, "nf4": 0.16, "int8_bnb": 1.2 / 254}
"""Largest error in the largest weight of a row: half a step, in LLM.int8 of codes that were found in float16, half the
widest gap of quantiles in nf4; in fp8, with its three bits of mantissa, in the weight itself."""


@pytest.mark.parametrize("form", _STEPS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_weight_stays_within_a_step_of_its_form(form: str, dtype: torch.dtype) -> None:
    _needs(form)
    layer = nn.Linear(128, 96)
    layer.weight.data = torch.randn(96, 128, generator=torch.Generator().manual_seed(0))
    kept, given = quantize_layer(layer.to(dtype), form), layer.weight.detach().float()
    largest = given.abs().amax(1, keepdim=True)
    rounding = largest * (0 if dtype == torch.float32 else 2**-8)
    bound = _STEPS[form] * (given.abs() + largest / 400 if form == "fp8" else largest) + rounding
    found = (kept.weight.float() - given).abs()
    assert bool((found <= bound * 1.01).all())
    assert float(found.max()) > 0
    assert kept.weight.dtype == dtype
    assert "weight" not in dict(kept.named_parameters())


def test_torchaos_layers_stand_for_what_torchao_says() -> None:
    torchao = pytest.importorskip("torchao")
    configs = {"int8": torchao.quantization.Int8WeightOnlyConfig, "fp8": torchao.quantization.Float8WeightOnlyConfig}
    for form, config in configs.items():
        for dtype in (torch.float32, torch.bfloat16):
            layer = nn.Linear(64, 48).to(dtype).requires_grad_(False)
            mine = quantize_layer(layer, form)
            torchao.quantization.quantize_(layer, config(set_inductor_config=False))
            assert torch.equal(mine.weight, layer.weight.dequantize())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_normal_float_layers_are_those_of_bitsandbytes(dtype: torch.dtype) -> None:
    """Forward and the gradient of the input, which work on a CPU too; its own layer is what stock users have."""
    bnb = pytest.importorskip("bitsandbytes")
    layer = nn.Linear(64, 96).to(dtype).requires_grad_(False)
    own = bnb.nn.Linear4bit(64, 96, compute_dtype=dtype, quant_type="nf4", compress_statistics=True)
    own.weight = bnb.nn.Params4bit(layer.weight.data.clone(), requires_grad=False, quant_type="nf4")
    own.bias = layer.bias
    own = own.to("cpu").train()
    mine = quantize_layer(layer, "nf4")
    x, y = torch.randn(3, 5, 64, generator=torch.Generator().manual_seed(1)).to(dtype).expand(2, 3, 5, 64).unbind()
    x, y = x.clone().requires_grad_(), y.clone().requires_grad_()
    if dtype == torch.float32:  # this CPU may lack products of 16 bits, which the two make up for in different ways
        ours, theirs = mine(x), own(y)
        assert torch.equal(ours, theirs)
        ours.sum().backward()
        theirs.sum().backward()
        assert x.grad is not None
        assert y.grad is not None
        assert torch.equal(x.grad, y.grad)
    assert torch.equal(mine.weight, bnb.functional.dequantize_4bit(own.weight.data, own.weight.quant_state).to(dtype))


def test_llm_int8_rounds_each_row_by_itself() -> None:
    _needs("int8_bnb")
    generator = torch.Generator().manual_seed(0)
    layer = nn.Linear(64, 96)
    mine, x = quantize_layer(layer, "int8_bnb"), torch.randn(6, 64, generator=generator)
    x[3, 7] = 40.0  # what LLM.int8 would call an outlier, for all rows of the batch
    x.requires_grad_()
    together = mine(x)
    alone = torch.cat([mine(row[None]) for row in x])
    assert torch.equal(together, alone)
    scale = x.detach().abs().amax(1, keepdim=True) / 127
    codes = (x.detach() / scale).round()
    expected = (codes @ mine.codes.float().T) * scale * (mine.scale / 127) + layer.bias.detach()
    # Inputs pass through float16 on the way: one code in a few hundred may round the other way.
    assert float((together.detach() - expected).abs().max()) < 0.05 * float(expected.abs().max())
    (gradient,) = torch.autograd.grad(together.sum(), x)
    assert torch.allclose(gradient, torch.ones(6, 96) @ mine.weight, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_llm_int8_takes_inputs_beyond_float16(dtype: torch.dtype) -> None:
    """Rows with a value of 2^17 are rounded as the same rows over 2^17, which is exact; rows of zeros stay."""
    _needs("int8_bnb")
    layer = nn.Linear(64, 96, bias=False).to(dtype).requires_grad_(False)
    mine, x = (
        quantize_layer(layer, "int8_bnb"),
        torch.randn(6, 64, generator=torch.Generator().manual_seed(0)).to(dtype),
    )
    x[3, 7], x[4] = 1e5 / 2**17, 0.0
    large = mine(x * 2**17)
    assert bool(large.isfinite().all())
    assert torch.equal(large, mine(x) * 2**17)
    assert bool((large[4] == 0).all())
    assert float(large.abs().max()) > 65504


# ---- a model ---------------------------------------------------------------------------------------------------------


@cache
def _unrounded(folder: Path, dtype: torch.dtype) -> Tensor:
    """The velocity of the model as it is."""
    return _seen(_load(folder, "none", dtype)).velocity


@pytest.mark.parametrize(
    ("dtype", "form"),
    [(torch.float32, "int8"), (torch.float32, "nf4"), (torch.bfloat16, "fp8"), (torch.bfloat16, "nf4")],
    ids=str,
)
def test_a_quantised_model_is_the_model_rounded_the_same_way(
    tiny_sd3_folder: Path, form: str, dtype: torch.dtype
) -> None:
    """Velocities with and without the LoRA and all gradients, bit for bit; with gradient and without it too."""
    _needs(form)
    kept, plain = (_load(tiny_sd3_folder, form, dtype) for _ in range(2))
    _rounded(plain.denoiser)
    assert not any(isinstance(module, QuantizedLinear) for module in plain.denoiser.modules())
    ours, theirs, unrounded = _seen(kept), _seen(plain), _unrounded(tiny_sd3_folder, dtype)
    assert torch.equal(ours.velocity, ours.without_gradient)
    assert torch.equal(ours.velocity, theirs.velocity)
    assert torch.equal(ours.reference, theirs.reference)
    assert [g is None for g in ours.gradients] == [g is None for g in theirs.gradients]
    pairs = [(a, b) for a, b in zip(ours.gradients, theirs.gradients, strict=True) if a is not None and b is not None]
    assert len(pairs) > 20
    assert all(torch.equal(a, b) and a.dtype == torch.float32 for a, b in pairs)
    error = float((ours.velocity - unrounded).norm() / unrounded.norm())
    assert 0 < error < {"int8": 0.05, "fp8": 0.15, "nf4": 0.5}[form]


def test_graphs_keep_no_restored_weight(tiny_sd3_folder: Path) -> None:
    _needs("int8")
    pipeline, saved = _load(tiny_sd3_folder, "int8"), list[Tensor]()
    Policy(pipeline.denoiser, rank=RANK, alpha=ALPHA, targets=pipeline.lora_targets, seed=0)
    widths = {(layer.out_features, layer.in_features) for layer in pipeline.denoiser.modules()
              if isinstance(layer, QuantizedLinear)}  # fmt: skip

    def keep(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        guided(pipeline, PROMPTS[:1], 1.0)(start_noise(pipeline, 1), torch.tensor(0.7), torch.tensor(700.0))
    assert len(saved) > 20
    assert not [t for t in saved if tuple(t.shape) in widths | {(b, a) for a, b in widths}]


def test_which_layers_are_quantised(tiny_sd3_folder: Path) -> None:
    _needs("int8")
    pipeline = _load(tiny_sd3_folder, "int8")
    named = dict(pipeline.denoiser.named_modules())
    chosen = {name for name, module in named.items() if isinstance(module, QuantizedLinear)}
    others = {name for name, module in named.items() if type(module) is nn.Linear}
    assert {name.rpartition(".")[0].split(".")[0] for name in chosen} == {"transformer_blocks"}
    assert {
        "transformer_blocks.0.attn.to_q",
        "transformer_blocks.0.ff.net.2",
        "transformer_blocks.0.norm1.linear",
    } <= chosen
    assert {"proj_out", "context_embedder", "norm_out.linear"} <= others
    assert not any(name.startswith("transformer_blocks") for name in others)
    assert all(not p.requires_grad for p in pipeline.denoiser.parameters())


def test_projections_of_the_time_in_residual_blocks_and_narrow_layers_stay() -> None:
    block = nn.Module()
    block.time_emb_proj, block.narrow, block.wide = nn.Linear(64, 64), nn.Linear(64, 16), nn.Linear(64, 64)
    assert [name for _, name, _ in large_layers(block)] == ["wide"]
    del block.wide
    with pytest.raises(ValueError, match=r"no linear layer with 32 inputs.*pipeline.quantize=none"):
        quantize_blocks([block], "int8", "cpu")


@pytest.mark.slow
@pytest.mark.parametrize("form", [*ROUNDED, "int8_bnb"])
def test_a_lora_over_a_quantised_base_loads_in_stock(tiny_sd3_folder: Path, tmp_path: Path, form: str) -> None:
    """Stock draws with it what flowrl does; the two bases differ by the form's rounding and no more."""
    _needs(form)
    pipeline = _load(tiny_sd3_folder, form)
    policy = Policy(pipeline.denoiser, rank=RANK, alpha=ALPHA, targets=pipeline.lora_targets, seed=0)
    fill_lora(policy)
    pipeline.save_lora(tmp_path, policy.tensors(), policy.config)
    stock = StableDiffusion3Pipeline.from_pretrained(tiny_sd3_folder)
    stock.load_lora_weights(tmp_path)
    layers = {name: module for name, module in stock.transformer.named_modules() if hasattr(module, "lora_A")}
    assert len(layers) == 15
    for name, layer in layers.items():
        for side in ("lora_A", "lora_B"):
            (theirs,) = getattr(layer, side).values()
            assert torch.equal(theirs.weight, policy.parameters[f"{name}.{side}.default.weight"])


# ---- runs ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, tiny_sd3_folder: Path) -> TinyRuns:
    return tiny_runs(tmp_path_factory.mktemp("quantised"), tiny_sd3_folder, policy={"lora_rank": 2, "ema_decay": 0.5})


@pytest.mark.slow
@pytest.mark.parametrize("form", [*ROUNDED, "int8_bnb"])
def test_a_run_on_a_quantised_base_starts_at_ratio_1_and_resumes_bit_for_bit(
    runs: TinyRuns, form: str, capsys: pytest.CaptureFixture[str]
) -> None:
    _needs(form)
    settings = (f"pipeline.quantize={form}", "sampler.num_steps=2")
    whole = runs.train(f"{form}_whole", *settings)
    rows = metrics(whole)
    assert [row["ratio_max_deviation"] for row in rows] == [0.0, 0.0]
    halves = runs.train(f"{form}_halves", *settings, "num_iterations=1")
    assert main(["train", f"resume={halves}", "num_iterations=2"]) == 0
    assert metrics(halves) == rows
    assert lora(halves) == lora(whole)
    assert differences(lasting(halves), lasting(whole)) == 0
    with torch.no_grad():
        moved = [t for t in lasting(whole)["policy"].values() if bool(t.any())]
    assert len(moved) > 20
    assert main(["train", f"resume={halves}", "pipeline.quantize=none", "num_iterations=3"]) == 1
    assert "pipeline.quantize" in capsys.readouterr().err
    if form == "int8":  # what draws from a run's folder draws from the base that it was trained on
        drawn = load_source(find_source(str(whole)), "cpu")
        assert isinstance(drawn.denoiser.get_submodule("transformer_blocks.0.ff.net.2"), QuantizedLinear)


# ---- refusals --------------------------------------------------------------------------------------------------------


def test_what_cannot_work_is_refused_before_a_model_loads(
    runs: TinyRuns, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    check_quantize("nf4", "cpu")
    check_quantize("nf4", None)
    with pytest.raises(ValueError, match=r"compile=blocks do not go together"):
        check_quantize("nf4", "cpu", compile="blocks")
    with pytest.raises(ValueError, match=r"CUDA and CPU devices.*mps"):
        check_quantize("fp8", "mps")
    with pytest.raises(ValueError, match=r"must be none, int8, fp8, nf4, int8_bnb, got 'int4'"):
        check_quantize("int4", "cpu")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    out = runs.folder / "refused"
    assert main(["train", str(runs.config), "pipeline.quantize=nf4", f"out={out}"]) == 1
    assert (
        "needs the package bitsandbytes, which is not installed: pip install -e '.[quantize]'"
        in capsys.readouterr().err
    )
    assert not out.exists()
