"""Measures the machine's limits: matrix products, copies, and attention alone at the model's shapes."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from flowrl.profiling.result import Phase
from flowrl.profiling.stopwatch import Stopwatch
from flowrl.profiling.subject import BenchSubject
from flowrl.runtime.randomness import counter_normal
from flowrl.training.parts import DTYPES

GEMM, EXACT, COPY = "matrix product", "matrix product, float32", "copy"
_SIDE = {"cuda": 8192, "cpu": 1024}
_COPIED = {"cuda": 2**32, "cpu": 2**28}  # bytes, far more than caches hold
_KERNELS = {"flash": SDPBackend.FLASH_ATTENTION, "math": SDPBackend.MATH}
_KERNELS_OF_GPUS = {"efficient": SDPBackend.EFFICIENT_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}


def ceilings(subject: BenchSubject, watch: Stopwatch) -> Iterator[Phase]:
    """Matrix products of random numbers in the network's dtype and in float32, a copy, attention by torch's kernels."""
    device, dtype = subject.device, DTYPES[subject.config.pipeline.dtype]
    side = _SIDE[device.type]
    for name, kind in ((GEMM, dtype), (EXACT, torch.float32)):
        if name == EXACT and dtype == torch.float32:
            continue
        a, b = (counter_normal((side, side), "gemm", k).to(device, kind) for k in range(2))
        told = f"{str(kind).removeprefix('torch.')}, {side} x {side}"
        yield watch.phase("ceilings", name, partial(torch.matmul, a, b), flops=2.0 * side**3, note=told)
    source = torch.ones(_COPIED[device.type] // 2, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)  # every byte is read once and written once
    yield watch.phase("ceilings", COPY, lambda: target.copy_(source), least_bytes=2.0 * source.nbytes)
    # Each of torch's kernels at the largest attention of the model, forward and backward.
    with torch.no_grad(), _Shapes() as shapes:
        subject.evaluation(1)()
    if shapes.found is None:  # a model without attention by torch
        return
    query, key = shapes.found
    query = (subject.geometry.micro_batch_size, *query[1:])
    key = (subject.geometry.micro_batch_size, *key[1:])
    q, k, v = (
        counter_normal(shape, "attention", place).to(device, dtype).requires_grad_()
        for place, shape in enumerate((query, key, key))
    )
    flops = 4.0 * query[0] * query[1] * query[2] * key[2] * query[3]
    for name, kernel in (_KERNELS | (_KERNELS_OF_GPUS if device.type == "cuda" else {})).items():

        def both(kernel: SDPBackend = kernel) -> None:
            with sdpa_kernel([kernel]):
                attended = F.scaled_dot_product_attention(q, k, v)
            torch.autograd.grad(attended.float().sum(), (q, k, v))

        label, told = f"attention by {name}", f"[{', '.join(map(str, query))}] to {key[2]} tokens, forward and backward"
        try:
            yield watch.phase("ceilings", label, both, flops=3 * flops, ceiling=GEMM, note=told)
        except RuntimeError as error:  # torch: no available kernel
            yield Phase(section="ceilings", name=label, note=f"not here: {str(error).strip().splitlines()[0]}")


def exact_ceiling(subject: BenchSubject) -> str:
    """The ceiling of parts that compute in float32."""
    return GEMM if subject.config.pipeline.dtype == "float32" else EXACT


class _Shapes(TorchFunctionMode):
    """Notes the shapes of the attention with the most products."""

    def __init__(self) -> None:
        super().__init__()
        self.found: tuple[tuple[int, ...], tuple[int, ...]] | None = None
        self.most = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            named = dict(zip(("query", "key"), args, strict=False)) | kwargs
            query, key = named["query"], named["key"]
            size = query.numel() * key.shape[-2]
            if size > self.most and query.ndim == 4:
                self.most, self.found = size, (tuple(query.shape), tuple(key.shape))
        return func(*args, **kwargs)
