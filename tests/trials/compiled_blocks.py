"""What compiling a denoiser's blocks does to numbers and to time, with generated code on this machine's CPU.

    python tests/trials/compiled_blocks.py --out docs/research/trials/compiled_blocks.json

Of a small SD3 network with a LoRA that acts: whether a forward pass without gradient equals one with gradient bit for
bit, as the importance ratio needs; how far it and the gradient are from eager code; how many graphs were compiled; and
CPU seconds of one thread, compiled and eager in turns.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from origin import origin
from torch import Tensor

from flowrl.pipelines.arithmetic.compiling import compile_blocks, repeated_blocks
from flowrl.pipelines.families.sd3 import FAMILY
from flowrl.pipelines.weights.lora import Policy
from flowrl.pretraining.tiny_sd3 import CONTEXT, build_tiny_sd3
from flowrl.runtime.randomness import counter_normal

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def measure(folder: Path, dtype: str, rows: int, repeats: int, rounded: bool) -> dict[str, Any]:
    """One dtype; `rounded` is whether compiled code is told to round where eager code does."""
    torch.compiler.reset()
    pipelines, policies = [], []
    for _ in range(2):
        p = FAMILY.load(str(folder), dtype=DTYPES[dtype], max_sequence_length=CONTEXT)
        policy = Policy(p.denoiser, rank=16, alpha=32, targets=FAMILY.lora_targets, seed=1)
        policy.load({n: counter_normal(t.shape, 0, "lora", n) / 20 for n, t in policy.tensors().items()})
        pipelines.append(p)
        policies.append(policy)
    if rounded:
        compile_blocks(pipelines[1].denoiser)
    else:
        for block in repeated_blocks(pipelines[1].denoiser):
            block.compile(fullgraph=True, dynamic=True, options={"emulate_precision_casts": False})
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]

    def forward(which: int, count: int = rows) -> Tensor:
        p = pipelines[which]
        x = counter_normal((count, *p.latent_shape), 0, "x")
        velocity: Tensor = p.network(x, torch.linspace(900, 100, count), p.encode(["a photo of a red circle"] * count))
        return velocity

    def rollout(which: int, count: int = rows) -> Tensor:
        with torch.no_grad():
            return forward(which, count)

    def update(which: int, count: int = rows) -> tuple[Tensor, Tensor]:
        policies[which].network.zero_grad()
        y = forward(which, count)
        y.square().mean().backward()
        given = [weight.grad.flatten() for weight in policies[which].parameters.values() if weight.grad is not None]
        return y.detach(), torch.cat(given)

    start = time.process_time()
    rolled, (updated, gradient) = rollout(1), update(1)
    result: dict[str, Any] = {"dtype": dtype, "rounded": rounded, "rows": rows}
    result["compile_cpu_s"] = round(time.process_time() - start, 1)
    result["no_grad_equals_grad"] = torch.equal(rolled, updated)
    result["no_grad_against_grad"] = _relative(rolled, updated)
    result["other_rows_equal"] = torch.equal(rollout(1, rows - 1), update(1, rows - 1)[0])
    wanted, wanted_gradient = update(0)
    result["forward_against_eager"] = _relative(updated, wanted)
    result["gradient_against_eager"] = _relative(gradient, wanted_gradient)
    result["graphs"] = torch._dynamo.utils.counters["stats"]["unique_graphs"] - graphs
    for name, call in (("rollout", rollout), ("update", update)):
        for which, kind in enumerate(("eager", "compiled")):
            result[f"{name}_{kind}_ms"] = []
            _timed(call, which)
        for _ in range(repeats):
            for which, kind in enumerate(("eager", "compiled")):
                result[f"{name}_{kind}_ms"].append(round(1e3 * _timed(call, which), 1))
        result[f"{name}_gain"] = round(
            statistics.median(result[f"{name}_eager_ms"]) / statistics.median(result[f"{name}_compiled_ms"]), 3
        )
    return result


def _timed(call: Callable[[int], Any], which: int) -> float:
    start = time.process_time()
    call(which)
    return time.process_time() - start


def _relative(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--rows", type=int, default=24)
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args()
    torch.set_num_threads(1)
    results = []
    with tempfile.TemporaryDirectory() as folder:
        build_tiny_sd3(0, width=given.width, num_layers=given.layers).save_pretrained(folder)
        for dtype in given.dtypes:
            for rounded in (True, False) if dtype == "bfloat16" else (True,):
                results.append(measure(Path(folder), dtype, given.rows, given.repeats, rounded))
                print(json.dumps(results[-1]), flush=True)
                text = json.dumps(origin() | {"results": results}, indent=1) + "\n"
                given.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
