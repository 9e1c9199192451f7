"""Bytes that a process of split weights holds in a call, against what `flowrl plan` counts.

    python tests/trials/sharded/peak_of_a_call.py --out docs/research/trials/peak_of_a_call.json

Networks of the families of `tests/helpers/split_runs.py`, wide enough that weights outweigh activations, as the first
of two and four processes: a call without gradient, and a call with its backward pass, of a LoRA's split base and of
trained weights, whose gradients add up in sums that are there before. FSDP2 runs in a group of which no other process
exists (`counted_operations.one_of`). Gloo's threads drop tensors where the profiler does not see it, so that counts
with gloo differ from run to run.

Counted are the bytes that torch's profiler sees allocated at once, beside what lies there between calls, twice:

- `gpu`: the sum of the most that is allocated within each of FSDP2's streams, as a GPU's allocator keeps them apart.
  Compared with the plan, which counts a GPU.
- `cpu`: all together. Compared with the plan's terms put together as this backend allocates them (`on_a_cpu`).
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

HELPERS = Path(__file__).resolve().parents[2] / "helpers"
sys.path[:0] = [str(HELPERS), str(HELPERS / "families"), str(Path(__file__).resolve().parents[1])]

import torch  # noqa: E402
from counted_operations import named_streams, one_of, peak_on_cpu  # noqa: E402
from origin import origin  # noqa: E402
from split_runs import FAMILIES  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from flowrl.pipelines import family  # noqa: E402
from flowrl.pipelines.arithmetic.compiling import first_expert  # noqa: E402
from flowrl.pipelines.arithmetic.lora_linear import LoraLinear  # noqa: E402
from flowrl.pipelines.shared.cards import Size  # noqa: E402
from flowrl.pipelines.weights.full_weights import FullWeights  # noqa: E402
from flowrl.pipelines.weights.lora import Policy  # noqa: E402
from flowrl.pipelines.weights.parallelize import denoiser_bytes, split_over  # noqa: E402
from flowrl.pipelines.weights.trained_weights import TrainedWeights  # noqa: E402
from flowrl.planning.memory import Facts, MemorySettings, memory_of  # noqa: E402
from flowrl.planning.network import Network, Trained, few_blocks, measure  # noqa: E402
from flowrl.training.learner import GradientSum  # noqa: E402

WIDER: Mapping[str, Mapping[str, int]] = {
    "sd3": {"num_attention_heads": 12, "caption_projection_dim": 384, "num_layers": 4},
    "flux": {"num_attention_heads": 12, "num_layers": 3, "num_single_layers": 3},
    "qwen_image": {"num_attention_heads": 24, "num_layers": 3},
    "wan": {"num_attention_heads": 16, "num_layers": 3, "ffn_dim": 768},
}
"""What a network is beside the tiny one: at least three blocks of the largest kind, as every real network has."""
SIZES = {"sd3": (16, 16, None), "flux": (16, 16, None), "qwen_image": (16, 16, None), "wan": (16, 16, 5)}
RANK = 4
CASTS = ("fsdp::chunk_cat_mixed_dtype",)
"""Puts gradients together; on a CPU it first casts those of a block in float32, if they are of two dtypes."""
OF_TWO_DTYPES = ("flux", "wan")
"""Families of whose blocks in 16 bits some gradients are in float32: those of norms, or of tables of shifts."""


def wide(folder: Path, name: str) -> str:
    """Writes a family's tiny model whose networks are said to be wider; their weights are never read."""
    FAMILIES[name][0](folder / name)
    for path in (folder / name).glob("transformer*/config.json"):
        path.write_text(json.dumps(json.loads(path.read_text()) | WIDER[name]))
    return str(folder / name)


def call_of(name: str, model: str) -> dict[str, Any]:
    """Arguments of a call for one row, without numbers."""
    height, width, frames = SIZES[name]
    return dict(family(name).meta_call(model, Size(height=height, width=width, num_frames=frames), 4))


def network_of(name: str, model: str, dtype: torch.dtype) -> nn.Module:
    """One expert, with numbers in its weights and tables, as it is before it is split."""
    meta: Any = family(name).meta_denoiser(model)
    found: Any = first_expert(meta)
    network: nn.Module = type(found).from_config(found.config)
    return nn.Module.to(network, dtype).requires_grad_(False)


def planned(name: str, model: str, dtype: torch.dtype, number: int, *, full: bool) -> dict[str, dict[str, int]]:
    """What a plan counts for one expert in one of `number` processes: between calls, and beside that in a call without
    gradient and in an update, on a GPU; and its terms as `on_a_cpu` puts them together."""
    own = family(name)
    targets = None if full else own.lora_targets
    few = few_blocks(own, model, targets or ())
    assert few is not None
    few = replace(few, least=first_expert(few.least), more=[(count, first_expert(one)) for count, one in few.more])
    network = measure(few, call_of(name, model), trained=Trained(targets=targets, rank=RANK * (not full)), dtype=dtype)
    facts = Facts(
        network=network,
        eval_working=0,
        rows=1,
        passes=(1, 1),
        keeps=0,
        decode=None,
        eval_decode=None,
        image=0,
        parts={},
        rewards=(),
        unknown=(),
        dtype=(str(dtype), dtype.itemsize),
        full=full,
        slots=0,
        reference=False,
        evaluates=False,
    )
    one = MemorySettings(micro_batch_size=1, rollout_batch_size=1, eval_batch_size=1, shard=number, processes=number)
    memory = memory_of(facts, one)
    held = next(size for words, size in memory.held.items() if words.startswith("denoiser"))
    came = 4 * network.trained * (not full)  # a LoRA's gradient is counted as held; here it comes and goes
    gpu = {
        "held": held,
        "drawing": max(memory.stages.values()),
        "update": memory.configured + memory.update + came,
    }
    # Activations are counted with the gradient of one weight in flight, which on a CPU is one of its block's.
    weights = [weight.numel() for weight in first_expert(few.least).parameters()]
    own_activations = memory.configured - full * dtype.itemsize * max(weights)
    terms = on_a_cpu(network, dtype.itemsize, number, full=full, cast=name in OF_TWO_DTYPES)
    cpu = {"held": held, "drawing": network.working + terms[0], "update": own_activations + came + terms[1]}
    return {"gpu": gpu, "cpu": cpu}


def on_a_cpu(network: Network, width: int, number: int, *, full: bool, cast: bool) -> tuple[int, int]:
    """Bytes of gathered weights, and of these and their gradients in an update, where all is of one memory: a block's
    weights may take the place of the buffer before, a sum that of the block's weights, and gradients are `cast`."""
    block, outside = network.weights.largest_block, network.weights.parameters - network.weights.blocks
    rounded, cast = full and width < 4, cast and width < 4
    gathered = width * (outside + max(block, outside) + block) + rounded * width * -(-block // number)
    if not full:
        return gathered, gathered
    moments = (
        width * (outside + 3 * block) + 4 * block,  # weights, buffer, gradients; the sum of the block behind
        width * (outside + 2 * block) + 4 * (1 + cast) * block,  # buffer, gradients; their casts, and their sum
        width * 2 * outside + 4 * block,
        width * outside + 4 * (1 + cast) * outside,
    )
    return gathered, max(gathered, *moments)


def measured(name: str, model: str, dtype: torch.dtype, split: Any, *, full: bool) -> dict[str, dict[str, int]]:
    """The same of this process, which is one of `split`."""
    network = network_of(name, model, dtype)
    split_over(network, split, masters=full)
    held = denoiser_bytes(network)["held"]
    given = {
        key: torch.ones(value.shape, dtype=dtype if value.dtype.is_floating_point else value.dtype)
        if isinstance(value, Tensor)
        else value
        for key, value in call_of(name, model).items()
    }
    policy: TrainedWeights
    if full:
        policy = FullWeights(network, split=split)
    else:
        policy = Policy(network, rank=RANK, alpha=RANK, targets=family(name).lora_targets, seed=0)
    total = GradientSum(policy, {}, scale_loss=False)
    # A CPU in float32 adds a LoRA to its layer's weight in each call; a GPU does not.
    layers = [layer.base_layer.weight for layer in network.modules() if isinstance(layer, LoraLinear)]
    merged = max((4 * weight.numel() for weight in layers), default=0)

    @torch.no_grad()
    def drawing() -> None:
        network(**given)

    def update() -> None:
        total.add(network(**given)[0].float().sum())

    found = {"gpu": {"held": held}, "cpu": {"held": held}}
    for words, work in (("drawing", drawing), ("update", update)):
        work()
        found["cpu"][words] = peak_on_cpu(work) - merged
        with named_streams():
            found["gpu"][words] = peak_on_cpu(work, beside=CASTS, streams=True) - merged
    return found


def ratios(own: dict[str, dict[str, int]], plan: dict[str, dict[str, int]]) -> dict[str, dict[str, float]]:
    """Bytes held in all, counted by planned."""

    def in_all(bytes_of: dict[str, int], key: str) -> int:
        return bytes_of[key] + bytes_of["held"] * (key != "held")

    return {
        place: {key: in_all(own[place], key) / in_all(found, key) for key in found} for place, found in plan.items()
    }


def rows(folder: Path, number: int, families: Sequence[str]) -> list[dict[str, Any]]:
    """Of each family what the first of so many processes holds at most, what is planned, and their ratios."""
    found = []
    for name in families:
        model = wide(folder, name)
        for full, dtype in ((False, torch.float32), (True, torch.float32), (True, torch.bfloat16)):
            with one_of(number) as split:
                own = measured(name, model, dtype, split, full=full)
            plan = planned(name, model, dtype, number, full=full)
            trained = {"family": name, "trained": "all weights" if full else "LoRA", "dtype": str(dtype)}
            found.append({**trained, "measured": own, "plan": plan, "ratio": ratios(own, plan)})
            print(number, *trained.values(), found[-1]["ratio"], flush=True)
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSON file of the results")
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--families", nargs="+", default=list(WIDER), choices=list(WIDER))
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    results = {}
    for count in chosen.processes:
        with tempfile.TemporaryDirectory() as place:
            results[f"{count} processes"] = rows(Path(place), count, chosen.families)
    chosen.out.write_text(json.dumps({**origin(), **results}, indent=1) + "\n")
