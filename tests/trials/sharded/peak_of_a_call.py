"""Bytes that a process of split weights holds in a call, on gloo, against what `flowrl plan` counts.

    python tests/trials/sharded/peak_of_a_call.py --out docs/research/trials/peak_of_a_call.json

Networks of the families of `tests/helpers/split_runs.py`, wide enough that weights outweigh activations, over two and
four processes: a call without gradient, and a call with its backward pass, of a LoRA's split base and of trained
weights, whose gradients add up in sums that are there before. Counted are the bytes that torch's profiler sees
allocated at once, beside what lies there between calls. Gloo copies what it sends, which NCCL does not: such
allocations (`gloo_copies`) are left out of the peaks.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HELPERS = Path(__file__).resolve().parents[2] / "helpers"
sys.path[:0] = [str(HELPERS), str(HELPERS / "families"), str(Path(__file__).resolve().parents[1])]

import torch  # noqa: E402
from counted_operations import peak_on_cpu  # noqa: E402
from origin import origin  # noqa: E402
from split_runs import FAMILIES  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from two_processes import on_two_processes  # noqa: E402

from flowrl.pipelines import family  # noqa: E402
from flowrl.pipelines.shared.cards import Size  # noqa: E402
from flowrl.pipelines.weights.full_weights import FullWeights  # noqa: E402
from flowrl.pipelines.weights.lora import Policy  # noqa: E402
from flowrl.pipelines.weights.parallelize import denoiser_bytes, split_over  # noqa: E402
from flowrl.pipelines.weights.trained_weights import TrainedWeights  # noqa: E402
from flowrl.planning.memory import Facts, MemorySettings, memory_of  # noqa: E402
from flowrl.planning.network import Trained, few_blocks, measure  # noqa: E402
from flowrl.training.learner import GradientSum  # noqa: E402
from flowrl.training.processes.mesh import Layout, shards_of  # noqa: E402

WIDER: dict[str, dict[str, int]] = {
    "sd3": {"num_attention_heads": 12, "caption_projection_dim": 384, "num_layers": 3},
    "flux": {"num_attention_heads": 12, "num_layers": 2, "num_single_layers": 3},
    "qwen_image": {"num_attention_heads": 24, "num_layers": 3},
    "wan": {"num_attention_heads": 16, "num_layers": 3, "ffn_dim": 768},
}
"""What a network is beside the tiny one."""
SIZES = {"sd3": (16, 16, None), "flux": (16, 16, None), "qwen_image": (16, 16, None), "wan": (16, 16, 5)}
RANK = 4
GLOO = ("c10d::", "gloo:")


def wide(folder: Path, name: str) -> str:
    """Writes a family's tiny model whose networks are said to be wider; their weights are never read."""
    FAMILIES[name][0](folder / name)
    for path in (folder / name).glob("transformer*/config.json"):
        path.write_text(json.dumps(json.loads(path.read_text()) | WIDER[name]))
    return str(folder / name)


def network_of(name: str, model: str, dtype: torch.dtype, *, first: bool) -> nn.Module:
    """One expert, with numbers in the weights of the first process, as it is before it is split."""
    made = family(name).meta_denoiser(model)
    found: Any = next(iter(made.values())) if isinstance(made, nn.ModuleDict) else made
    nn.Module.to(found, dtype)
    if first:
        found = found.to_empty(device="cpu")
        for place, weight in enumerate(found.parameters()):
            weight.data.copy_(torch.linspace(-0.1, 0.1, weight.numel()).roll(place).view_as(weight))
        for table in found.buffers():
            table.zero_()
    network: nn.Module = found.requires_grad_(False)
    return network


def call_of(name: str, model: str, dtype: torch.dtype) -> dict[str, Any]:
    """Arguments of a call for one row."""
    height, width, frames = SIZES[name]
    call = family(name).meta_call(model, Size(height=height, width=width, num_frames=frames), 4)
    return {
        key: torch.ones(value.shape, dtype=dtype if value.dtype.is_floating_point else value.dtype)
        if isinstance(value, Tensor)
        else value
        for key, value in call.items()
    }


def planned(name: str, model: str, dtype: torch.dtype, processes: int, *, full: bool) -> dict[str, int]:
    """What a plan counts for one expert: between calls, and beside that in a call without gradient and in an update."""
    own = family(name)
    few, targets = few_blocks(own, model, () if full else own.lora_targets), None if full else own.lora_targets
    height, width, frames = SIZES[name]
    call = dict(own.meta_call(model, Size(height=height, width=width, num_frames=frames), 4))
    assert few is not None
    network = measure(few, call, trained=Trained(targets=targets, rank=0 if full else RANK), dtype=dtype)
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
    one = MemorySettings(
        micro_batch_size=1, rollout_batch_size=1, eval_batch_size=1, shard=processes, processes=processes
    )
    memory = memory_of(facts, one)
    held = next(size for words, size in memory.held.items() if words.startswith("denoiser"))
    return {
        "held": held // network.weights.experts,
        "drawing": max(memory.stages.values()),
        # The gradient of a LoRA is counted as held; here it comes and goes.
        "update": memory.configured + memory.update + 4 * network.trained * (not full),
    }


def measured(name: str, model: str, dtype: torch.dtype, *, full: bool) -> dict[str, int]:
    """The same of this process."""
    import torch.distributed as dist

    split = shards_of(Layout(shard=dist.get_world_size()), torch.device("cpu"))
    assert split is not None
    network = network_of(name, model, dtype, first=split.mesh.get_local_rank() == 0)
    split_over(network, split, masters=full)
    held = denoiser_bytes(network)["held"]
    given, targets = call_of(name, model, dtype), family(name).lora_targets
    policy: TrainedWeights
    if full:
        policy = FullWeights(network, split=split)
    else:
        policy = Policy(network, rank=RANK, alpha=RANK, targets=targets, seed=0)
    total = GradientSum(policy, {}, scale_loss=False)

    @torch.no_grad()
    def drawing() -> None:
        network(**given)

    def update() -> None:
        total.add(network(**given)[0].float().sum())

    found = {"held": held}
    for words, work in (("drawing", drawing), ("update", update)):
        work()
        found[words], copies = peak_on_cpu(work, beside=GLOO), peak_on_cpu(work)
        found[f"{words}_gloo_copies"] = copies - found[words]
    return found


def one_process(folder: Path, families: Sequence[str]) -> None:
    """Measures all; the first process prints it."""
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rows = []
    for name in families:
        model = str(folder / name)
        for full, dtype in ((False, torch.float32), (True, torch.float32), (True, torch.bfloat16)):
            own = measured(name, model, dtype, full=full)
            if dist.get_rank() == 0:
                plan = planned(name, model, dtype, dist.get_world_size(), full=full)
                trained = "all weights" if full else "LoRA"
                rows.append({"family": name, "trained": trained, "dtype": str(dtype), "measured": own, "plan": plan})
    if dist.get_rank() == 0:
        print(json.dumps(rows))
    dist.destroy_process_group()


def run(folder: Path, processes: int, families: Sequence[str]) -> list[dict[str, Any]]:
    """Rows of the families over some processes, with the ratio of what is held at most to what is planned."""
    for name in families:
        if not (folder / name).is_dir():
            wide(folder, name)
    said = on_two_processes(folder, str(Path(__file__)), "--measure", str(folder), *families, processes=processes)
    rows: list[dict[str, Any]] = json.loads(said.strip().splitlines()[-1])
    for row in rows:
        own, plan = row["measured"], row["plan"]
        row["ratio"] = {
            "held": own["held"] / plan["held"],
            **{key: (own["held"] + own[key]) / (plan["held"] + plan[key]) for key in ("drawing", "update")},
        }
    return rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON file of the results")
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--families", nargs="+", default=list(WIDER), choices=list(WIDER))
    parser.add_argument("--measure", nargs="+", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.measure:
        one_process(Path(given.measure[0]), given.measure[1:])
    else:
        with tempfile.TemporaryDirectory() as place:
            found = {f"{number} processes": run(Path(place), number, given.families) for number in given.processes}
        given.out.write_text(json.dumps({**origin(), **found}, indent=1) + "\n")
