"""rsLoRA and DoRA: their formulas, what stock draws with them, files in both layouts, a run that starts from one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import StableDiffusion3Pipeline
from family_sampling import fill_lora, start_noise
from peft import LoraConfig, get_peft_model
from rounding import assert_same_sum
from tiny_models import ALPHA, PROMPTS, RANK, guided, load_tiny, probe, sample_ode
from tiny_runs import TinyRuns, differences, lasting, metrics, tiny_runs
from torch import Tensor, nn

from flowrl.cli import main
from flowrl.pipelines.arithmetic.quantized_linear import QuantizedLinear
from flowrl.pipelines.families.sd3 import FAMILY
from flowrl.pipelines.shared.family_pipeline import FamilyPipeline
from flowrl.pipelines.weights.loading_choices import Loading
from flowrl.pipelines.weights.lora import JOINT_ATTENTION, Policy, add_saved_lora
from flowrl.pipelines.weights.lora_files import read_lora
from flowrl.pretraining.tiny_sd3 import CONTEXT
from flowrl.training import checkpoints as saving

VARIANTS = ("rslora", "dora")
DTYPES = (torch.float32, torch.bfloat16)


def _with(pipeline: FamilyPipeline, variant: str, *, fill: bool = True) -> Policy:
    policy = Policy(pipeline.denoiser, rank=RANK, alpha=ALPHA, targets=JOINT_ATTENTION, seed=1, variant=variant)
    magnitudes = {name: p.detach().clone() for name, p in policy.parameters.items() if "magnitude" in name}
    if fill:
        fill_lora(policy)  # magnitudes of another size than the weights': none is what it was
        for name, magnitude in magnitudes.items():
            policy.parameters[name].data.add_(magnitude)
    return policy


def _formula(variant: str, w: Tensor, a: Tensor, b: Tensor, m: Tensor | None) -> Tensor:
    if variant == "rslora":
        return w + ALPHA / RANK**0.5 * b @ a
    assert m is not None
    whole = w + ALPHA / RANK * b @ a
    return m[:, None] * whole / whole.norm(dim=1, keepdim=True)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_layer_computes_its_formula(tiny_sd3_folder: Path, variant: str) -> None:
    pipeline = load_tiny(tiny_sd3_folder)
    policy = _with(pipeline, variant)
    name = "transformer_blocks.0.attn.to_q"
    layer: Any = pipeline.denoiser.get_submodule(name)
    own = {key.removeprefix(f"{name}.").split(".")[0]: tensor.double() for key, tensor in policy.tensors().items()
           if key.startswith(f"{name}.")}  # fmt: skip
    w = layer.base_layer.weight.double()
    weight = _formula(variant, w, own["lora_A"], own["lora_B"], own.get("lora_magnitude_vector"))
    x = torch.randn(5, layer.in_features, generator=torch.Generator().manual_seed(3))
    expected = x.double() @ weight.T + layer.base_layer.bias.double()
    assert_same_sum(layer(x).double(), expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_new_one_changes_nothing_slots_hold_all_of_it_and_gradient_and_none_agree(
    tiny_sd3_folder: Path, variant: str, dtype: torch.dtype
) -> None:
    pipeline = load_tiny(tiny_sd3_folder, dtype)
    before = probe(pipeline)
    policy = _with(pipeline, variant, fill=False)
    assert torch.equal(probe(pipeline), before)  # magnitudes are the norms of the weights, in float32 on any base
    policy.add_slot("old")
    fill_lora(policy)
    assert not torch.equal(probe(pipeline), before)
    with policy.under("old"):
        assert torch.equal(probe(pipeline), before)
    with policy.under("reference"):
        assert torch.equal(probe(pipeline), before)
    velocity, x = guided(pipeline, PROMPTS[:2], 1.0), start_noise(pipeline, 2)
    output = velocity(x, torch.tensor(0.7), torch.tensor(700.0))
    with torch.no_grad():
        assert torch.equal(velocity(x, torch.tensor(0.7), torch.tensor(700.0)), output)
    output.square().mean().backward()
    kinds = {name.split("lora_")[1].split(".")[0]: p.grad is not None and bool(p.grad.any())
             for name, p in policy.parameters.items() if "blocks.0.attn.to_q" in name}  # fmt: skip
    assert kinds == dict.fromkeys(("A", "B", *(["magnitude_vector"] if variant == "dora" else [])), True)
    assert {p.dtype for p in policy.parameters.values()} == {torch.float32}


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_stock_draws_the_same_and_it_can_be_added_again(tiny_sd3_folder: Path, tmp_path: Path, variant: str) -> None:
    pipeline = load_tiny(tiny_sd3_folder)
    policy = _with(pipeline, variant)
    saving.save_lora(tmp_path / "lora", pipeline, policy)
    ours = pipeline.decode(sample_ode(pipeline, PROMPTS[:2], 4.5, 4))
    stock = StableDiffusion3Pipeline.from_pretrained(tiny_sd3_folder)
    stock.load_lora_weights(tmp_path / "lora")
    fresh = load_tiny(tiny_sd3_folder)
    theirs = load_tiny(tiny_sd3_folder)
    theirs.pipe.transformer = stock.transformer
    theirs.experts["transformer"] = stock.transformer
    assert_same_sum(theirs.decode(sample_ode(theirs, PROMPTS[:2], 4.5, 4)), ours)
    assert read_lora(tmp_path / "lora").variant == variant
    loaded = add_saved_lora(fresh.denoiser, tmp_path / "lora")
    assert torch.equal(probe(fresh), probe(pipeline))
    assert loaded.config == policy.config | {"target_modules": loaded.config["target_modules"]}
    other = "dora" if variant == "rslora" else "rslora"
    with pytest.raises(
        ValueError, match=rf"lora_variant is {other}.*is a {variant}.*set policy\.lora_variant={variant}"
    ):
        _with(load_tiny(tiny_sd3_folder), other).initialise_from(read_lora(tmp_path / "lora"))


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_those_of_peft_are_read(tiny_sd3_folder: Path, tmp_path: Path, variant: str) -> None:
    """PEFT starts magnitudes at the norms; all tensors are moved from where it has them."""
    other = load_tiny(tiny_sd3_folder)
    config = LoraConfig(
        r=RANK, lora_alpha=ALPHA, target_modules=list(JOINT_ATTENTION), init_lora_weights="gaussian",
        use_rslora=variant == "rslora", use_dora=variant == "dora",
    )  # fmt: skip
    wrapped = get_peft_model(other.denoiser, config)
    for number, (name, parameter) in enumerate(wrapped.named_parameters()):
        if "lora_" in name:
            parameter.data += 0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number))
    wrapped.save_pretrained(tmp_path / "peft")
    other.experts["transformer"] = wrapped
    pipeline = load_tiny(tiny_sd3_folder)
    _with(pipeline, variant, fill=False).initialise_from(read_lora(tmp_path / "peft"))
    assert_same_sum(probe(pipeline), probe(other))
    assert read_lora(tmp_path / "peft").variant == variant


@pytest.mark.slow
@pytest.mark.parametrize("form", ["int8", "nf4"])
def test_a_dora_over_a_quantised_base_is_that_over_the_rounded_one(tiny_sd3_folder: Path, form: str) -> None:
    pytest.importorskip({"int8": "torchao", "nf4": "bitsandbytes"}[form])
    seen = []
    for plain in (False, True):
        pipeline = FAMILY.load(
            str(tiny_sd3_folder), dtype=torch.float32, max_sequence_length=CONTEXT, how=Loading(quantize=form)
        )
        for parent in list(pipeline.denoiser.modules()) if plain else ():
            for name, layer in list(parent.named_children()):
                if isinstance(layer, QuantizedLinear):
                    made = nn.Linear(layer.in_features, layer.out_features, device="meta")
                    made.weight, made.bias = nn.Parameter(layer.weight.clone()), layer.bias
                    setattr(parent, name, made)
        policy = _with(pipeline, "dora")
        output = guided(pipeline, PROMPTS[:1], 1.0)(start_noise(pipeline, 1), torch.tensor(0.7), torch.tensor(700.0))
        gradients = torch.autograd.grad(output.square().mean(), list(policy.parameters.values()), allow_unused=True)
        seen.append((output.detach(), [gradient for gradient in gradients if gradient is not None]))
    (ours, own), (theirs, known) = seen
    assert torch.equal(ours, theirs)
    assert len(own) == len(known) > 20
    assert all(torch.equal(a, b) for a, b in zip(own, known, strict=True))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, tiny_sd3_folder: Path) -> TinyRuns:
    return tiny_runs(
        tmp_path_factory.mktemp("variants"), tiny_sd3_folder, policy={"lora_rank": 2, "ema_decay": 0.5},
        sampler={"kernel": "flow_sde", "num_steps": 2},
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_run_starts_at_ratio_1_resumes_and_begins_from_its_kind(
    runs: TinyRuns, variant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    chosen = f"policy.lora_variant={variant}"
    whole = runs.train(f"{variant}_whole", chosen)
    assert [row["ratio_max_deviation"] for row in metrics(whole)] == [0.0, 0.0]
    halves = runs.train(f"{variant}_halves", chosen, "num_iterations=1")
    assert main(["train", f"resume={halves}", "num_iterations=2"]) == 0
    assert differences(lasting(halves), lasting(whole)) == 0
    start = f"policy.init_lora={whole / 'lora'}"
    assert main(["train", str(runs.config), start, f"out={runs.folder / 'refused'}"]) == 1
    assert f"set policy.lora_variant={variant}" in capsys.readouterr().err
    further = runs.train(f"{variant}_further", chosen, start, "num_iterations=1")
    assert metrics(further)[0]["ratio_max_deviation"] == 0.0
