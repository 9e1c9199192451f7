"""The optimizer of the embedded models against torch's own Muon and against the singular values that it aims at."""

from __future__ import annotations

import torch
from torch import nn

from flowrl.pretraining.network_training import Muon, optimizers, orthogonalize


def random_matrix(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def test_singular_values_come_near_one_and_directions_stay() -> None:
    for shape in ((32, 96), (96, 32), (64, 64)):
        left, values, right = torch.linalg.svd(random_matrix(*shape), full_matrices=False)
        matrix = left @ torch.diag(torch.linspace(0.3, 1.0, len(values))) @ right
        values = torch.diagonal(left.T @ orthogonalize(matrix) @ right.T)
        assert 0.5 < float(values.min()) < float(values.max()) < 1.3
        assert torch.allclose(orthogonalize(matrix), left @ torch.diag(values) @ right, atol=1e-4)


def test_updates_are_those_of_torch_up_to_its_bfloat16() -> None:
    own, other = (nn.Parameter(random_matrix(24, 48)) for _ in range(2))
    ours = Muon([own], lr=0.02, weight_decay=0.1)
    theirs = torch.optim.Muon([other], lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    for step in range(5):
        own.grad = random_matrix(24, 48, seed=step + 1)
        other.grad = own.grad.clone()
        ours.step()
        theirs.step()
    moved = (own.detach() - random_matrix(24, 48)).norm()
    assert float((own - other).detach().norm() / moved) < 0.02


def test_only_hidden_matrices_get_muon_and_every_weight_is_somewhere() -> None:
    network = nn.ModuleDict({
        "transformer": nn.ModuleDict({
            "pos_embed": nn.Linear(4, 4), "block": nn.Sequential(nn.Linear(4, 4), nn.Conv2d(4, 4, 3), nn.LayerNorm(4)),
            "proj_out": nn.Linear(4, 4),
        }),
        "head": nn.Linear(4, 4),
    })  # fmt: skip
    adam, muon = optimizers(network, lr=0.1, betas=(0.9, 0.98), weight_decay=0.0, muon=True)
    hidden = {id(weight) for weight in muon.param_groups[0]["params"]}
    named = {name for name, weight in network.named_parameters() if id(weight) in hidden}
    assert named == {"transformer.block.0.weight", "transformer.block.1.weight"}
    assert len(hidden) + len(adam.param_groups[0]["params"]) == len(list(network.parameters()))
    (alone,) = optimizers(network, lr=0.1, betas=(0.9, 0.98), weight_decay=0.0, muon=False)
    assert len(alone.param_groups[0]["params"]) == len(list(network.parameters()))
    network.get_parameter("transformer.block.1.weight").grad = torch.ones(4, 4, 3, 3)
    muon.step()  # a filter is a matrix of output channels by all else
