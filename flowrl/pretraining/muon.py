"""The optimizer of the embedded models: Muon for the hidden layers' matrices, AdamW for everything else.

torch's own Muon orthogonalises in bfloat16; a CPU without instructions for it spends four fifths of the time there.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

_FIRST_AND_LAST = re.compile(r"embed|shared|(^|\.)head\.|^\w+\.(proj_out|conv_in|conv_out)\.")
"""Names of layers that read or write tokens and latents: no hidden ones."""
_A, _B, _C = 3.4445, -4.7750, 2.0315
_ITERATIONS = 5


def orthogonalize(matrix: Tensor) -> Tensor:
    """The nearest matrix with singular values about 1: `U V^T` of `matrix = U S V^T`, to 0.7 .. 1.2 after five steps of
    `X <- a X + (b X X^T + c (X X^T)^2) X` from `matrix / |matrix|`. Source: Jordan et al. 2024, "Muon: an optimizer for
    hidden layers in neural networks"."""
    wide = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
    x = wide / (wide.norm() + 1e-7)
    for _ in range(_ITERATIONS):
        square = x @ x.T
        x = torch.addmm(x, torch.addmm(square, square, square, beta=_B, alpha=_C), x, beta=_A)
    return x if matrix.shape[0] <= matrix.shape[1] else x.T


class Muon(torch.optim.Optimizer):
    """`w <- (1 - lr weight_decay) w - 0.2 sqrt(max(n, m)) lr orthogonalized(0.05 g + 0.95 M)`, M the mean of gradients.

    The factor gives an update the size that AdamW's has, so that one learning rate does for both (Liu et al., arXiv
    2502.16982, eq. 4). Filters of convolutions count as matrices, output channels by all else.
    """

    def __init__(self, parameters: Iterable[Tensor], lr: float, weight_decay: float, momentum: float = 0.95) -> None:
        super().__init__(list(parameters), {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """One update; parameters without a gradient stay."""
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                state = self.state[weight]
                average = state.setdefault("momentum", torch.zeros_like(weight))
                average.lerp_(weight.grad, 1 - group["momentum"])
                update = orthogonalize(weight.grad.lerp(average, group["momentum"]).flatten(1))
                size = 0.2 * max(update.shape) ** 0.5
                weight.mul_(1 - group["lr"] * group["weight_decay"])
                weight.sub_(update.view_as(weight), alpha=group["lr"] * size)


def optimizers(
    network: nn.Module, *, lr: float, betas: tuple[float, float], weight_decay: float, muon: bool
) -> list[torch.optim.Optimizer]:
    """AdamW for all that learns; with `muon` for all but the hidden layers' matrices, which get Muon."""
    named = [(name, weight) for name, weight in network.named_parameters() if weight.requires_grad]
    hidden = [w for name, w in named if muon and w.ndim > 1 and not _FIRST_AND_LAST.search(name)]
    chosen = {id(weight) for weight in hidden}
    others = [weight for _, weight in named if id(weight) not in chosen]
    found: list[torch.optim.Optimizer] = [torch.optim.AdamW(others, lr=lr, betas=betas, weight_decay=weight_decay)]
    return [*found, Muon(hidden, lr=lr, weight_decay=weight_decay)] if hidden else found
