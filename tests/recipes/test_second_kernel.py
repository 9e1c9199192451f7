"""A gradient that is not finite is taken under another kernel of attention, and the log says which one failed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_runs import TinyRuns, lora_tensors, metrics, tiny_runs
from torch import Tensor
from torch.nn import functional as F

RECIPES: dict[str, tuple[str, ...]] = {
    "grpo": ("micro_batch_size=4",),
    "kept-graphs": ("micro_batch_size=4", "rollout_batch_size=4", "keep_graphs=true"),
    "forward": ("recipe=forward", "sampler.kernel=ode", "times.count=2"),
    "preference": ("recipe=preference", "sampler.kernel=ode", "times.count=2"),
    "visited": ("recipe=visited", "sampler.kernel=ode", "policy.teachers=[{guidance_scale: 3}]"),
}

CHECKED = (64, 515)  # tokens of the checks that every kernel passes before it is taken


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, tiny_sd3_folder: Path) -> TinyRuns:
    return tiny_runs(tmp_path_factory.mktemp("kernels"), tiny_sd3_folder, num_iterations=1, checkpoint_every=9)


class _Spoiled(torch.autograd.Function):
    """The identity, whose gradient is NaN."""

    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(_: Any, *gradients: Tensor) -> Any:
        return torch.full_like(gradients[0], torch.nan)


def spoil(monkeypatch: pytest.MonkeyPatch, *, every: bool = False) -> None:
    """Torch's own choice of kernel gives no finite gradient; nor does any other where `every` says so."""
    attend: Callable[..., Tensor] = F.scaled_dot_product_attention

    def spoiled(*args: Any, **kwargs: Any) -> Tensor:
        found = attend(*args, **kwargs)
        own_choice = torch.backends.cuda.flash_sdp_enabled()  # kernel "math" is torch's attention with all others off
        spoils = found.requires_grad and (own_choice or (every and found.shape[2] not in CHECKED))
        return _Spoiled.apply(found) if spoils else found  # type: ignore[no-any-return, no-untyped-call]

    monkeypatch.setattr(F, "scaled_dot_product_attention", spoiled)


@pytest.mark.parametrize("recipe", RECIPES)
def test_another_kernel_gives_the_gradient_and_the_log_says_so(
    runs: TinyRuns, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], recipe: str
) -> None:
    whole = runs.train(f"{recipe}-whole", *RECIPES[recipe])
    spoil(monkeypatch)
    run = runs.train(f"{recipe}-spoiled", *RECIPES[recipe])
    said = " ".join(capsys.readouterr().err.split())
    assert said.count("the gradient is not finite under pipeline.attention=native, and under math it is") == 1
    (wanted,), (row,) = metrics(whole), metrics(run)
    assert row["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=1e-4)
    assert row["nfe/update"] == 2 * wanted.get("nfe/update", row["nfe/update"] / 2)  # graphs that are kept take none
    assert {key: value for key, value in row.items() if "nfe" not in key and key != "grad_norm"} == {
        key: value for key, value in wanted.items() if "nfe" not in key and key != "grad_norm"
    }
    for tensor, other in zip(lora_tensors(run).values(), lora_tensors(whole).values(), strict=True):
        assert bool(tensor.isfinite().all())
        assert tensor.shape == other.shape


def test_a_gradient_that_no_kernel_gives_ends_the_run_with_all_of_them(
    runs: TinyRuns, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    spoil(monkeypatch, every=True)
    with pytest.raises(AssertionError):
        runs.train("none")
    said = " ".join(capsys.readouterr().err.split())
    assert "the gradient is not finite under pipeline.attention=native, math" in said
    assert "lower optim.lr" in said
