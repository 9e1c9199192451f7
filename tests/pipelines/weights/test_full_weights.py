"""A network's own weights as a policy: masters, copies, gradients, and what is refused beside them."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from config_files import minimal_file
from diffusers import SD3Transformer2DModel
from family_sampling import replayed, start_noise
from tiny_models import PROMPTS, guided, load_tiny, probe
from tiny_runs import differences
from toy_pipeline import Net

from flowrl.config.train import load_config
from flowrl.pipelines import family
from flowrl.pipelines.families.sd3 import FAMILY
from flowrl.pipelines.shared.saved_model import check_full
from flowrl.pipelines.weights.full_weights import FullWeights, trained_names
from flowrl.runtime.randomness import counter_normal
from flowrl.training import learner
from flowrl.training.learner import GradientSum

DTYPES = [torch.float32, torch.bfloat16]


def trained_further(policy: FullWeights, by: float = 0.05) -> FullWeights:
    """The policy after a step away from where it was."""
    policy.load({name: tensor + by for name, tensor in policy.tensors().items()})
    return policy


# ---- which weights ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_layers_are_named_by_endings_and_bring_biases_and_norms() -> None:
    network = FAMILY.meta_denoiser("stabilityai/stable-diffusion-3.5-medium")
    assert network is not None
    names = trained_names(network, None)
    assert names == [name for name, _ in network.named_parameters()]
    assert sum(dict(network.named_parameters())[name].numel() for name in names) == 2_243_171_520
    chosen = trained_names(network, ["attn.to_q", "attn.norm_q", "transformer_blocks.23.ff"])
    of_blocks = [name for name in chosen if name.startswith("transformer_blocks.23.")]
    ff = [f"ff.net.{layer}.{kind}" for layer in ("0.proj", "2") for kind in ("weight", "bias")]
    own = ["attn.norm_q.weight", "attn.to_q.weight", "attn.to_q.bias", *ff]
    assert sorted(of_blocks) == sorted(f"transformer_blocks.23.{name}" for name in own)
    assert len(chosen) == 24 * 3 + 4
    with pytest.raises(ValueError, match=r"'attn\.to_w' matches no module of SD3Transformer2DModel that has weights"):
        trained_names(network, ["attn.to_q", "attn.to_w"])


def test_what_is_not_named_is_frozen(tiny_sd3_folder: Path) -> None:
    pipeline = load_tiny(tiny_sd3_folder)
    policy = FullWeights(pipeline.denoiser, targets=["attn.to_q"])
    assert {name for name, p in pipeline.denoiser.named_parameters() if p.requires_grad} == policy.parameters.keys()
    assert {name.rpartition(".")[2] for name in policy.parameters} == {"weight", "bias"}


# ---- masters ---------------------------------------------------------------------------------------------------------


def test_in_float32_a_master_is_the_weight() -> None:
    network = Net()
    policy = FullWeights(network)
    assert all(p is policy.parameters[name] for name, p in network.named_parameters())
    assert policy.trained == list(policy.parameters.values())


def test_in_bfloat16_the_network_holds_the_rounded_masters(tiny_sd3_folder: Path) -> None:
    """Steps far below the dtype's own add up: 16 of them move a weight that none of them moves alone."""
    pipeline = load_tiny(tiny_sd3_folder, torch.bfloat16)
    policy = FullWeights(pipeline.denoiser)
    own = dict(pipeline.denoiser.named_parameters())
    assert {p.dtype for p in policy.parameters.values()} == {torch.float32}
    before = {name: weight.detach().clone() for name, weight in own.items()}
    for count in range(16):
        for master in policy.parameters.values():
            master.data.mul_(1 + 2**-12)
        policy.settle()
        assert all(torch.equal(own[name], master.bfloat16()) for name, master in policy.parameters.items())
        if count == 0:
            assert all(torch.equal(own[name], before[name]) for name in own)
    moved = [name for name in own if not torch.equal(own[name], before[name])]
    assert len(moved) > len(own) / 2


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scale", [1.0, 4.0])
def test_rollout_and_update_see_the_same_weights(tiny_sd3_folder: Path, dtype: torch.dtype, scale: float) -> None:
    """The ratio is exactly 1, with the weights as they were and after they moved."""
    pipeline = load_tiny(tiny_sd3_folder, dtype)
    policy = FullWeights(pipeline.denoiser)
    for _ in range(2):
        log_prob = replayed(pipeline, guided(pipeline, PROMPTS[:2], scale), 2, 4)
        gradients = torch.autograd.grad(log_prob[-1].sum(), policy.trained, allow_unused=True)
        assert sum(float(g.abs().sum()) for g in gradients if g is not None) > 0  # it was a training pass
        trained_further(policy, 0.01)


@pytest.mark.parametrize("offload", [False, True], ids=["on the device", "on the host"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_slots_are_entered_and_left_bit_for_bit(tiny_sd3_folder: Path, dtype: torch.dtype, offload: bool) -> None:
    pipeline = load_tiny(tiny_sd3_folder, dtype)
    base, policy = probe(pipeline), FullWeights(pipeline.denoiser, offload=offload)
    with pytest.raises(ValueError, match="the weights before training were not kept"), policy.under("reference"):
        pass
    policy.keep_reference()
    policy.add_slot("ema")
    trained = probe_of(pipeline, trained_further(policy))
    assert not torch.equal(trained, base)
    policy.add_slot("old")
    policy.blend("ema", 0.5)
    with policy.under("reference"):
        assert torch.equal(probe(pipeline), base)
        with policy.under("old"):
            assert torch.equal(probe(pipeline), trained)
            with policy.under("policy"):
                assert torch.equal(probe(pipeline), trained)
        assert torch.equal(probe(pipeline), base)
        with policy.under("ema"):
            between = probe(pipeline)
    assert torch.equal(probe(pipeline), trained)
    assert not torch.equal(between, trained)
    policy.blend("ema", 0.0)
    with policy.under("ema"):
        assert torch.equal(probe(pipeline), trained)
    with pytest.raises(ValueError, match="no weight slot 'average': there are policy, reference, ema, old"):
        policy.under("average").__enter__()


def probe_of(pipeline: Any, policy: FullWeights) -> torch.Tensor:
    """A fingerprint of the weights at work, under the policy."""
    with policy.under("policy"):
        return probe(pipeline)


def test_saved_tensors_are_copies_and_come_back(tiny_sd3_folder: Path) -> None:
    pipeline = load_tiny(tiny_sd3_folder, torch.bfloat16)
    policy = FullWeights(pipeline.denoiser)
    saved, before = policy.tensors(), probe(pipeline)
    trained_further(policy)
    assert not torch.equal(probe(pipeline), before)
    policy.load(saved)
    assert torch.equal(probe(pipeline), before)
    assert differences(policy.tensors(), saved) == 0
    with pytest.raises(ValueError, match="the saved model does not fit this policy"):
        policy.load({})


# ---- gradients -------------------------------------------------------------------------------------------------------


def test_gradients_are_those_of_autograd_on_the_stock_network(tiny_sd3_folder: Path) -> None:
    """Two micro-batches through the pipeline against one `backward` of diffusers' own class, both in float32."""
    pipeline, counters = load_tiny(tiny_sd3_folder), dict[str, Any]()
    policy = FullWeights(pipeline.denoiser)
    total = GradientSum(policy, counters, scale_loss=False)
    assert {t.dtype for t in total.total} == {torch.float32}
    x, time, cond = start_noise(pipeline, 2), torch.tensor([700.0, 300.0]), pipeline.encode(PROMPTS[:2])
    for row in (torch.tensor([0]), torch.tensor([1])):
        total.add(pipeline.network(x[row], time[row], cond[row]).square().sum())
    stock = SD3Transformer2DModel.from_pretrained(tiny_sd3_folder / "transformer")
    velocity = stock(
        hidden_states=x, timestep=time, encoder_hidden_states=cond.tensors["embeds"],
        pooled_projections=cond.tensors["pooled"], return_dict=False,
    )[0]  # fmt: skip
    velocity.square().sum().backward()
    expected = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in stock.named_parameters()}
    assert list(expected) == list(policy.parameters)
    assert sum(bool(grad.any()) for grad in expected.values()) > 0.9 * len(expected)
    for name, found in zip(policy.parameters, total.total, strict=True):
        torch.testing.assert_close(found, expected[name], rtol=1e-4, atol=1e-5 * float(expected[name].abs().max()))


def test_sums_of_processes_are_joined_in_pieces(tiny_sd3_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of a few tensors, or of one that is larger than a piece; the other process has three times as much."""
    policy, sizes = FullWeights(load_tiny(tiny_sd3_folder).denoiser), list[int]()
    total = GradientSum(policy, {}, scale_loss=False)
    for number, part in enumerate(total.total):
        part.copy_(counter_normal(part.shape, "gradient", number))
    own = [part.clone() for part in total.total]

    def reduce(flat: torch.Tensor, reduction: str = "sum") -> torch.Tensor:
        sizes.append(flat.numel())
        return 4 * flat

    monkeypatch.setattr(learner, "_JOINED", 4 * 1000)
    run: Any = SimpleNamespace(
        world=2, processes=2, accelerator=SimpleNamespace(reduce=reduce), total_gradient=reduce
    )  # fmt: skip
    optimizer = torch.optim.SGD(policy.parameters.values(), lr=1.0)
    before = policy.tensors()
    norm = total.apply(run, optimizer, 1e9, 0)
    assert norm is not None
    assert sum(sizes) == sum(part.numel() for part in own)
    assert len(sizes) > 10
    assert all(size <= 1000 or size in {part.numel() for part in own} for size in sizes)
    for (name, found), part in zip(policy.tensors().items(), own, strict=True):
        assert torch.equal(found, before[name] - 4 * part)


# ---- what is refused -------------------------------------------------------------------------------------------------

FULL = ("policy.train=full", "pipeline.dtype=bfloat16")


def test_layers_that_are_not_there_are_refused(tmp_path: Path, tiny_sd3_folder: Path) -> None:
    read = partial(load_config, minimal_file(tmp_path))
    with pytest.raises(ValueError, match="matches no module of SD3Transformer2DModel"):
        check_full(read([*FULL, "policy.target_modules=[attn.to_w]"]), family("sd3"), str(tiny_sd3_folder))
    check_full(read([*FULL, "policy.target_modules=[attn.to_q]"]), family("sd3"), str(tiny_sd3_folder))
