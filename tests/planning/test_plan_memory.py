"""Memory that `flowrl plan` foretells, against bytes of real tensors on the CPU and by hand."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from counted_operations import one_of, peak_on_cpu
from peak_of_a_call import measured, planned, ratios, wide
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from flowrl.config.base import config_files
from flowrl.config.sections import OptimConfig
from flowrl.config.train import resolve_path
from flowrl.pipelines import family
from flowrl.pipelines.arithmetic.compiling import repeated_blocks
from flowrl.pipelines.shared.cards import Size
from flowrl.pipelines.weights.full_weights import FullWeights
from flowrl.pipelines.weights.lora import Policy
from flowrl.pipelines.weights.quantize import LIBRARIES, quantize_blocks
from flowrl.pipelines.weights.trained_weights import TrainedWeights
from flowrl.planning import traces
from flowrl.planning.hours import gathered_bytes
from flowrl.planning.memory import (
    CARDS,
    GIB,
    OVERHEAD,
    Facts,
    Memory,
    MemorySettings,
    allowed_sizes,
    base_bytes,
    fitting,
    gathered_weights,
    memory_of,
    summed_gradients,
    trained_bytes,
)
from flowrl.planning.network import DenoiserWeights, Network, Trained, few_blocks, measure, weights_of, without_gradient
from flowrl.planning.traces import Trace
from flowrl.recipes.counting import Counts, RolloutRecord
from flowrl.training.learner import GradientSum
from flowrl.training.optimizers import make_optimizer
from flowrl.workers.parcels import lay_down

PRESETS = sorted(name for name in config_files() if re.search(r"_\d+gb$", name))
SD3, WAN = str(resolve_path("asset:tiny-sd3")), str(resolve_path("asset:tiny-wan"))
RANK = 4
FAMILY: Any = family("sd3")


def drawn(denoiser: nn.Module | None) -> Any:
    """A network of the meta device with numbers in it, on the CPU."""
    assert denoiser is not None
    network = denoiser.to_empty(device="cpu")
    for place, weight in enumerate(network.parameters()):
        weight.data.copy_(torch.linspace(-0.1, 0.1, weight.numel()).roll(place).view_as(weight))
    return network


def bytes_of(tensors: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors if isinstance(tensor, Tensor))


# ---- weights, gradients, moments -------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("form", ["none", *LIBRARIES])
def test_bytes_of_a_base_are_those_of_its_tensors(form: str) -> None:
    if form != "none":
        pytest.importorskip(LIBRARIES[form])
    foretold = base_bytes(weights_of(FAMILY.meta_denoiser(SD3)), form, 2)
    network = drawn(FAMILY.meta_denoiser(SD3)).bfloat16()
    tables = bytes_of(network.buffers())  # of positions, which are no weights
    if form != "none":
        quantize_blocks(repeated_blocks(network), form, "cpu")
    assert foretold == bytes_of((*network.parameters(), *network.buffers())) - tables


def of_policy(policy: TrainedWeights, settings: OptimConfig) -> int:
    """Bytes that training adds to a network, after one step: masters, gradients, their sum, moments, copies."""
    total = GradientSum(policy, {}, scale_loss=False)
    optimizer = make_optimizer(settings, policy, torch.device("cuda"))
    loss = torch.stack([weight.float().square().sum() for weight in policy.trained]).sum()
    gradients = torch.autograd.grad(loss, policy.trained)
    for parameter in policy.parameters.values():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    moments = [value for state in optimizer.state.values() for value in state.values()]
    copies = [tensor for slot in policy.slots.values() for tensor in slot.values()]
    return bytes_of((*policy.parameters.values(), *gradients, *total.total, *moments, *copies))


@pytest.mark.slow
@pytest.mark.parametrize(("variant", "slots"), [("lora", 0), ("lora", 2), ("dora", 1)])
def test_bytes_of_a_lora_are_those_of_its_tensors(variant: str, slots: int) -> None:
    trained = Trained(targets=FAMILY.lora_targets, rank=32, magnitudes=variant == "dora")
    denoisers = few_blocks(FAMILY, SD3, FAMILY.lora_targets)
    assert denoisers is not None
    found = measure(denoisers, call_of("sd3", SD3, (16, 16, None)), trained=trained, dtype=torch.float32)
    network = drawn(FAMILY.meta_denoiser(SD3))
    policy = Policy(network, rank=32, alpha=64, targets=FAMILY.lora_targets, seed=0, variant=variant)
    for place in range(slots):
        policy.add_slot(str(place))
    assert found.trained == sum(weight.numel() for weight in policy.parameters.values())
    foretold = trained_bytes(found.trained, slots)
    assert foretold == pytest.approx(of_policy(policy, OptimConfig()), rel=0.05)


def test_moments_in_8_bits_are_those_of_the_library() -> None:
    pytest.importorskip("bitsandbytes")
    network = nn.Module()
    network.inner = nn.Linear(1024, 512, bias=False)
    policy = FullWeights(network)
    foretold = facts(full=True, width=4, trained=1024 * 512)
    for name in ("adamw", "adamw_8bit"):
        held = memory_of(foretold, replace(SETTINGS, optimizer=name)).held
        own = next(size for label, size in held.items() if "gradient" in label)
        real = of_policy(policy, OptimConfig(name=name))  # type: ignore[arg-type]
        assert own == pytest.approx(real - 4 * 1024 * 512, rel=0.05)  # the weights are the denoiser's own


@pytest.mark.slow
@pytest.mark.parametrize("targets", [None, ("attn.to_q", "ff")])
def test_bytes_of_full_training_are_those_of_its_tensors(targets: tuple[str, ...] | None) -> None:
    denoisers = few_blocks(FAMILY, SD3, targets or ())
    assert denoisers is not None
    trained = Trained(targets=targets, rank=0)
    found = measure(denoisers, call_of("sd3", SD3, (16, 16, None)), trained=trained, dtype=torch.bfloat16)
    policy = FullWeights(drawn(FAMILY.meta_denoiser(SD3)).bfloat16(), targets=targets)
    policy.add_slot("ema")
    assert found.trained == sum(weight.numel() for weight in policy.parameters.values())
    held = memory_of(facts(full=True, width=2, trained=found.trained, slots=1), SETTINGS).held
    foretold = next(size for label, size in held.items() if "masters" in label)
    assert foretold == pytest.approx(of_policy(policy, OptimConfig()), rel=0.05)


@pytest.mark.parametrize("full", [False, True])
def test_weights_for_workers_are_those_that_are_laid_down(full: bool) -> None:
    """Of a LoRA, and of all weights in 16 bits, also by one of two learners that hold them between them."""
    network = drawn(FAMILY.meta_denoiser(SD3)).bfloat16()
    lora: dict[str, Any] = {"rank": 32, "alpha": 64, "targets": FAMILY.lora_targets, "seed": 0}
    policy = FullWeights(network) if full else Policy(network, **lora)
    own = facts(full=full, width=2, trained=sum(weight.numel() for weight in policy.parameters.values()))
    held = policy.held()
    for shard in (1, 2) if full else (1,):
        half = {name: replace(one, values=one.values[: len(one.values) // shard]) for name, one in held.items()}
        _, memory = lay_down(half, [], str)
        assert memory is not None
        foretold = memory_of(own, replace(SETTINGS, rollouts=2, shard=shard))
        assert foretold.host["weights laid down for workers"] == pytest.approx(memory.size, rel=0.05)
        assert foretold.sent // shard == foretold.host["weights laid down for workers"]


def test_bytes_of_split_training_are_those_of_a_part() -> None:
    """By hand, of 5 GiB weights that lie split over four: float32 masters, sums and moments, two copies."""
    own = replace(facts(full=True, trained=5 * GIB, slots=1), reference=True)
    settings = replace(SETTINGS, shard=4, processes=4)
    plain, away = (memory_of(own, replace(settings, optim_offload=there)) for there in (False, True))
    assert plain.held["denoiser, float32, 1/4"] == away.held["denoiser, float32, 1/4"] == 5 * GIB
    assert plain.held["gradient, Adam, copies, 1/4"] == (4 + 8 + 4 + 4) * 5 * GIB // 4
    assert away.held["gradient, 1/4"] == 5 * GIB
    assert away.host["weights, gradient, Adam"] == (4 + 4 + 8 + 4 + 4) * 5 * GIB // 4
    # In 16 bits a block is 0.5 GiB, and what lies outside 2; the latter's sum in float32 is most, where the block was.
    units = {"outside": 2 * GIB, "block": GIB // 2, "experts": 1, "number": 4}
    assert gathered_weights(**units, rounded=True) == {
        "outside": 2 * GIB,
        "block": GIB // 2,
        "buffers": 2 * GIB + GIB // 2 + GIB // 8,
    }
    assert summed_gradients(**units, width=2) == {"gradients": 4 * GIB - GIB // 2, "parts": GIB}
    assert plain.update == (2 + 0.5 + 2.625 + 3.5 + 1) * GIB


def test_terms_of_gathered_weights() -> None:
    """By hand, of blocks of 6 bytes: two experts have buffers and parts each; of a moment the most is counted."""
    assert gathered_weights(outside=4, block=6, experts=2, number=3) == {
        "outside": 4,
        "block": 6,
        "buffers": 2 * (6 + 6),
    }
    assert gathered_weights(outside=4, block=6, experts=1, number=4, rounded=True)["buffers"] == 6 + 6 + 2
    # A block's gradients and the sum of the one behind; all of what lies outside, and that sum; the sum of the outside.
    moments = {(2, 8, 2): 8 + 16, (40, 10, 4): 40 - 10 + 10, (40, 10, 2): 80 - 10, (2, 8, 4): 8 + 8}
    for (outside, block, width), gradients in moments.items():
        found = summed_gradients(outside=outside, block=block, experts=2, number=4, width=width)
        assert found == {"gradients": gradients, "parts": 2 * max(outside, block) // width}


@pytest.mark.slow
def test_a_split_network_holds_what_is_planned(tmp_path: Path) -> None:
    """Weights and activations of one of two processes that train all weights, as FSDP2 itself allocates them: by
    streams, and in all."""
    model = wide(tmp_path, "wan")
    with one_of(2) as split:
        own = measured("wan", model, torch.bfloat16, split, full=True)
    for place, found in ratios(own, planned("wan", model, torch.bfloat16, 2, full=True)).items():
        assert found == pytest.approx(dict.fromkeys(found, 1.0), abs=0.05), place


def test_a_machine_has_a_reader_for_each_of_its_copies() -> None:
    """By hand, of 10 GiB of weights in 16 bits, which come after 8 of text encoders, and 4 of libraries."""
    own = facts()
    for shard, context, processes, readers in ((1, 1, 8, 8), (4, 1, 8, 2), (8, 1, 16, 1), (16, 1, 16, 1), (1, 2, 4, 4)):
        settings = replace(SETTINGS, shard=shard, context=context, processes=processes)
        others = min(8, processes) - readers
        assert memory_of(own, settings).machine(settings) == readers * (10 + 4) * GIB + others * (8 + 4) * GIB


def test_what_processes_send_each_other() -> None:
    """By hand: 8 processes in two copies draw 64 images in 10 steps and train 4, by fours, with two rows each."""
    own, rows = facts(full=True, trained=5 * GIB), 64 * 2
    counts = Counts(rollout=10 * rows, update=4 * rows, backward=4 * rows)
    made: Any = SimpleNamespace(
        facts=own, run=SimpleNamespace(total=counts, iterations=1), config=SimpleNamespace(updates_per_rollout=3)
    )
    split = replace(SETTINGS, shard=4, processes=8)
    # 20 calls and 8 with 8 backward passes, each for three quarters of 10 GiB; gradients of 8 passes in float32. Copies
    # send what is missing of their quarters' sum, and receive it.
    assert gathered_bytes(made, split) == ((20 + 8 + 8) * 7.5 * GIB + 8 * 15 * GIB, 3 * 2 * 5 * GIB / 2)
    two = replace(own.network.weights, experts=2)
    made.facts = replace(own, network=replace(own.network, weights=two))
    assert gathered_bytes(made, split)[0] == 195 * GIB
    assert gathered_bytes(made, replace(SETTINGS, processes=1)) == (0, 0)


# ---- activations -----------------------------------------------------------------------------------------------------


def call_of(name: str, model: str, size: tuple[int, int, int | None]) -> dict[str, Any]:
    own: Any = family(name)
    return dict(own.meta_call(model, Size(height=size[0], width=size[1], num_frames=size[2]), 16))


def real_call(call: Mapping[str, Any], rows: int) -> dict[str, Any]:
    """The same arguments for several rows, with numbers in them."""
    return {
        key: torch.ones(rows * len(value), *value.shape[1:]) if isinstance(value, Tensor) else value
        for key, value in call.items()
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "model", "size"), [("sd3", SD3, (64, 64, None)), ("wan", WAN, (64, 64, 17))], ids=["sd3", "wan"]
)
def test_activations_are_those_of_a_network_on_the_cpu(
    name: str, model: str, size: tuple[int, int, int | None]
) -> None:
    from peft import LoraConfig, inject_adapter_in_model

    own, rows = family(name), 4
    call, targets = call_of(name, model, size), own.lora_targets
    denoisers = few_blocks(own, model, targets)
    assert denoisers is not None
    found = measure(denoisers, call, trained=Trained(targets=targets, rank=RANK), dtype=torch.float32)
    network = drawn(own.meta_denoiser(model)).requires_grad_(False)
    inject_adapter_in_model(LoraConfig(r=RANK, target_modules=list(targets)), network)
    lora = [weight for weight in network.parameters() if weight.requires_grad]
    given = real_call(call, rows)
    weights = {tensor.untyped_storage()._cdata for tensor in (*network.parameters(), *network.buffers())}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage()._cdata not in weights:
            kept[tensor.untyped_storage()._cdata] = tensor
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        answer = network(**given)[0]
    saved = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
    assert found.saved == pytest.approx(saved / rows, rel=0.1)
    kept.clear()
    del answer

    def both_passes() -> None:
        torch.autograd.grad(network(**given)[0].sum(), lora)

    @torch.no_grad()
    def without_gradient() -> None:
        network(**given)

    gradients = bytes_of(lora)
    assert found.working == pytest.approx(peak_on_cpu(without_gradient) / rows, rel=0.1)
    assert found.saved + found.beside == pytest.approx((peak_on_cpu(both_passes) - gradients) / rows, rel=0.1)
    network.enable_gradient_checkpointing()
    network.train()
    assert found.saved_checkpointed + found.beside == pytest.approx(peak_on_cpu(both_passes) / rows, rel=0.1)


@pytest.mark.slow
def test_what_was_made_once_is_made_alike() -> None:
    """Counts of a network whose operations were all met before are those of the first time."""
    own: Any = family("wan")
    call, targets = call_of("wan", WAN, (64, 64, 17)), own.lora_targets
    traces._MADE.clear()
    found = []
    for _ in range(2):
        denoisers = few_blocks(own, WAN, targets)
        assert denoisers is not None
        found.append(measure(denoisers, call, trained=Trained(targets=targets, rank=RANK), dtype=torch.bfloat16))
        found.append(replace(found[-1], saved=without_gradient(denoisers, call)[1]))
    assert found[:2] == found[2:]
    assert traces._MADE


def test_an_operation_that_shares_or_writes_is_never_remembered() -> None:
    traces._MADE.clear()
    with Trace():
        x = torch.empty(4, 6, device="meta")
        seen = [x.view(6, 4), x.add_(1.0), x[1:], torch.ones(3) + 1, torch.ops.aten._unsafe_view(x, [24])]
    assert [asked[0] for asked in traces._MADE] == [torch.ops.aten.empty.memory_format]
    assert [tensor.untyped_storage()._cdata == x.untyped_storage()._cdata for tensor in seen] == [
        True, True, True, False, True,
    ]  # fmt: skip
    with Trace():
        wide = [torch.empty(2, device="meta", dtype=torch.int64) * factor for factor in (1, 1.0, 1, 1.0, True)]
    assert [tensor.dtype for tensor in wide] == [torch.int64, torch.float32, torch.int64, torch.float32, torch.int64]


# ---- settings --------------------------------------------------------------------------------------------------------

SETTINGS = MemorySettings(micro_batch_size=4, rollout_batch_size=4, eval_batch_size=4)


def facts(**given: Any) -> Facts:
    """A network of 10 GiB in 16 bits, and round numbers."""
    full, width = given.get("full", False), given.get("width", 2)
    weights = DenoiserWeights(parameters=5 * GIB, blocks=4 * GIB, matrices={(2**15, 2**15): 4}, largest_block=GIB // 4)
    network = Network(
        trained=given.get("trained", GIB // 24), weights=weights, attended=0, forward=1.0, backward=2.0,
        in_attention=0, saved=2 * GIB, outside=0, largest=GIB // 4, beside=GIB // 8, working=GIB // 4, blocks=20,
    )  # fmt: skip
    return Facts(
        network=network, eval_working=GIB // 4, rows=1, passes=(2, 2), keeps=0, decode=(GIB, GIB // 4),
        eval_decode=(GIB, GIB // 4), image=2**20, parts={"vae": GIB // 4, "text_encoder": 4 * GIB},
        rewards=(("me/judge", GIB // 2, 4),), unknown=(), dtype=("bfloat16" if width == 2 else "float32", width),
        full=full, slots=given.get("slots", 0), reference=False, evaluates=True,
    )  # fmt: skip


def test_what_settings_make_of_it() -> None:
    own = facts()
    plain = memory_of(own, SETTINGS)
    assert sum(plain.held.values()) / GIB == pytest.approx(10 + 1 + 8 + 1 + 2, rel=0.01)
    assert plain.configured == 4 * (2 * GIB + GIB // 8)
    assert plain.peak == plain.fixed + plain.configured
    drawn_at_once = 4 * 2 * GIB // 4 + 4 * GIB + 2 * 4 * 2**20  # rows of guidance, a slice of 4, images
    assert plain.stages["sampling, decoding, scoring 4 images"] == drawn_at_once

    def less(**changes: Any) -> float:
        return (plain.peak - memory_of(own, replace(SETTINGS, **changes)).peak) / GIB

    assert less(gradient_checkpointing=True) == pytest.approx(8.5 - 6, abs=0.1)  # then sampling is the most
    assert less(free_text_encoders=True) == 8
    assert less(offload=("rewards",)) == 2
    assert less(optimizer="adamw_8bit") == pytest.approx((8 - 2.03) / 24, rel=0.01)
    assert less(optim_offload=True) == pytest.approx(8 / 24, rel=0.01)
    assert less(shard=2) == pytest.approx(5 - 2 * 2 * (0.25 + 1), abs=0.01)  # a block, what is none, and their buffers
    assert less(context=2) == pytest.approx(8.5 - 5, rel=0.01)  # of 8.5 / 2 and sampling at half of its rows
    assert less(quantize="int8") == pytest.approx(4 - 10, rel=0.01)  # less a matrix of 1 GiB that is restored
    coded = memory_of(own, replace(SETTINGS, quantize="int8"))
    split = memory_of(own, replace(SETTINGS, quantize="int8", shard=2))
    assert (sum(coded.held.values()) - sum(split.held.values())) / GIB == pytest.approx((4 + 2) / 2, rel=0.001)
    assert (split.update - coded.update) / GIB == pytest.approx(2 * (0.25 + 2), rel=0.001)  # blocks come as codes
    assert less(vae_slice=1) == 0
    worker = memory_of(own, replace(SETTINGS, rollouts=2))
    assert worker.worker is not None
    assert worker.worker / GIB == pytest.approx(10 + 1 + 8 + 2, rel=0.01)  # encoders, which are dropped then
    assert "decoding, scoring 4 images" in worker.stages
    assert memory_of(own, replace(SETTINGS, rollouts=2, shard=2)).worker == worker.worker  # it holds all weights
    half = memory_of(own, replace(SETTINGS, rollouts=2, worker_shard=2)).worker
    assert half == worker.worker - 5 * GIB  # while encoders are there; drawing would add blocks, and what is none
    full = replace(own, full=True, parts={"vae": GIB // 4})
    whole, half = (memory_of(full, replace(SETTINGS, rollouts=2, worker_shard=number)).worker for number in (1, 2))
    assert whole is not None
    assert half == whole - 5 * GIB + 2 * (GIB // 2 + 2 * GIB)  # in 16 bits: a worker has no masters
    wide = memory_of(replace(own, eval_working=64 * GIB), replace(SETTINGS, rollouts=2))
    assert wide.worker is not None
    assert wide.worker - worker.worker > 32 * GIB  # it draws evaluations too
    assert wide.peak == worker.peak


def test_every_column_takes_a_power_of_two_by_itself() -> None:
    own, mib = facts(), 2**20

    def host(**record: Any) -> float:
        counted = memory_of(replace(own, latent=mib, record=RolloutRecord(**record)), SETTINGS)
        return counted.host.get("record of a rollout", 0) / mib

    assert host(columns=(600, 700, 0)) == 1024 + 1024
    assert host(columns=(1025, 3)) == 1025 + 4  # what is larger is not pinned
    assert host(columns=(600, 3), rounds=2) == 2 * (1024 + 4) + 2 * 603  # each by itself, then both joined
    assert host() == 0


def test_iterations_drawn_ahead_are_counted() -> None:
    own = replace(facts(), record=RolloutRecord(columns=(600, 3)), latent=2**20)
    ahead = memory_of(own, replace(SETTINGS, rollouts=2, staleness=3))
    assert ahead.host["iterations drawn ahead"] == 3 * (603 * 2**20 + 8 * own.network.trained)


def test_what_is_scored_after_all_is_drawn_is_counted_by_itself() -> None:
    own, mib = facts(), 2**20

    def stages(**record: Any) -> dict[str, int]:
        return dict(memory_of(replace(own, latent=mib, scored=96, record=RolloutRecord(**record)), SETTINGS).stages)

    plain = stages(batches=((10, 48),))["sampling, decoding, scoring 4 images"]
    assert plain == stages()["sampling, decoding, scoring 4 images"] + 10 * 4 * mib
    assert stages(batches=((10, 3),))["sampling, decoding, scoring 4 images"] == plain - 10 * mib  # no fourth row
    apart = stages(batches=((10, 48), (30, 2)), finished=480)
    assert set(apart) == {"sampling", "decoding, scoring 96 images", "evaluating 4 images"}
    assert apart["decoding, scoring 96 images"] == 8 * 2**30 + 96 * 3 * mib
    assert apart["sampling"] == 4 * 2 * 2**30 // 4 + 30 * 2 * mib
    assert "decoding, scoring 7 images" in stages(finished=7)


def test_encoders_that_are_loaded_alone_come_before_the_denoiser() -> None:
    large = replace(facts(), parts={"text_encoder": 30 * GIB})
    found = memory_of(large, replace(SETTINGS, free_text_encoders=True))
    assert (found.start, found.peak) == (60 * GIB, 62 * GIB)


def test_weights_on_the_host_are_not_held() -> None:
    own = facts(full=True, trained=GIB)
    for optim_offload, each in ((False, 2 + 4 + 4 + 8), (True, 2 + 4)):
        held = memory_of(own, replace(SETTINGS, optim_offload=optim_offload)).held
        assert next(size for label, size in held.items() if "gradient" in label) == each * GIB


def test_micro_batches_that_fit() -> None:
    assert allowed_sizes(48, 1) == [1, 2, 3, 4, 6, 8, 12, 16, 24, 48]
    assert allowed_sizes(48, 6) == [6, 12, 24, 48]
    memory = Memory(
        held={"network": 10 * GIB, "LoRA": 1 * GIB}, image=2 * GIB, image_checkpointed=GIB // 8, configured=8 * GIB,
        micro_batch_size=4, stages={"sampling": GIB}, start=25 * GIB, host={},
    )  # fmt: skip
    assert memory.fixed == 11 * GIB + OVERHEAD
    assert memory.peak == 25 * GIB + OVERHEAD  # the text encoders at the start are more than the update
    assert fitting(memory, CARDS[24], allowed_sizes(48, 1), checkpointed=False) == 0  # not even the start
    assert fitting(memory, CARDS[40], allowed_sizes(48, 1), checkpointed=False) == 12
    assert fitting(memory, CARDS[40], allowed_sizes(48, 1), checkpointed=True) == 48
