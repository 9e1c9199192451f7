"""How the embedded models learn: a resumable training loop with averaged weights, optimizers, batches, shared losses.

Every batch is a function of (seed, stage, step), so that a stopped pre-training goes on as if it had not stopped.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from flowrl.pipelines.arithmetic.wide_products import has_products
from flowrl.runtime.files import replacing
from flowrl.runtime.progress import progress
from flowrl.runtime.randomness import counter_seed


@dataclass(frozen=True, kw_only=True, slots=True)
class Making:
    """What can be set of every embedded model's pre-training; each says what is usual for it."""

    out: str
    """Folder of the checkpoints and of the finished pipeline."""
    seed: int = 0
    """Seed of initial weights, of what is drawn, and of noise."""
    threads: int = 1
    """CPU threads."""
    steps: int
    """Updates of the denoiser and its text encoders."""
    batch_size: int = 64
    """Examples per update."""
    lr: float = 1e-3
    """Peak learning rate."""
    prompt_dropout: float = 0.1
    """Share of empty prompts."""
    checkpoint_every: int = 500
    """Updates between checkpoints; each also writes a complete pipeline folder."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WrongCaptions(Making):
    """Settings of a model that learns to draw from right captions, then also from some that are wrong in one thing."""

    label_weight: float = 0.3
    """Weight of the label head's error."""
    num_right: int = 32_768
    """Examples encoded once, all right."""
    num_wrong: int = 8192
    """Examples encoded once for the last stage."""
    wrong: float = 0.45
    """Share of them that is wrong."""
    wrong_steps: int = 500
    """Updates of the last stage."""
    wrong_lr: float = 4e-4
    """Peak learning rate of the last stage."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnAutoencoder(WrongCaptions):
    """What can be set of a model whose autoencoder may learn too."""

    vae_steps: int
    """Updates of the autoencoder."""
    vae_batch_size: int
    """Examples per autoencoder update."""
    vae_lr: float = 2e-3
    """Peak learning rate of the autoencoder."""
    kl_weight: float
    """Weight of the autoencoder's mean KL term."""
    vae: str = ""
    """A pipeline folder (or asset:NAME) whose autoencoder is taken; "" trains one."""
    shift: float = 3.0
    """Shift of the training noise levels."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Noised:
    """A batch for flow matching."""

    x: Tensor
    """`(1 - sigma) clean + sigma noise`, as clean."""
    sigma: Tensor
    """[b], noise levels."""
    velocity: Tensor
    """`noise - clean`, what is learned."""
    prompts: list[str]
    """[b], some of them empty."""
    generator: torch.Generator
    """What further random numbers of the update come from."""


def add_noise(
    clean: Tensor, prompts: Sequence[str], *, seed: int, step: int, shift: float, prompt_dropout: float
) -> Noised:
    """Latents at random levels, `sigma = shift u / (1 + (shift - 1) u)`, u uniform (arXiv 2403.03206, eq. 23)."""
    generator = torch.Generator().manual_seed(counter_seed(seed, "flow matching", step))
    noise = torch.randn(clean.shape, generator=generator)
    uniform = torch.rand(len(clean), generator=generator)
    sigma = shift * uniform / (1 + (shift - 1) * uniform)
    level = sigma.view(-1, *[1] * (clean.ndim - 1))
    return Noised(
        x=(1 - level) * clean + level * noise,
        sigma=sigma,
        velocity=noise - clean,
        prompts=some_empty(prompts, prompt_dropout, generator),
        generator=generator,
    )


def velocity_error(
    clean: Tensor, prompts: Sequence[str], config: Any, step: int, predict: Callable[[Noised], Tensor]
) -> Tensor:
    """Mean squared error of the velocity at one random noise level per item (network in low precision, float32 loss).
    `predict` gives the velocity of a batch; of `config` seed, shift and prompt_dropout are read."""
    batch = add_noise(
        clean, prompts, seed=config.seed, step=step, shift=config.shift, prompt_dropout=config.prompt_dropout
    )
    with in_low_precision(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(counter_seed(config.seed, "dropout", step))  # the T5 encoder's
        velocity = predict(batch)
    return nn.functional.mse_loss(velocity.float(), batch.velocity)


def reconstruct(vae: Any, images: Tensor, seed: int, step: int) -> tuple[Tensor, Tensor]:
    """Images through an autoencoder and a sample of its posterior (in bfloat16), and the posterior's mean KL term."""
    noise = torch.Generator().manual_seed(counter_seed(seed, "vae noise", step))
    with in_low_precision():
        posterior = vae.encode(images).latent_dist
        latents = posterior.mean + posterior.std * torch.randn(posterior.mean.shape, generator=noise)
        decoded = vae.decode(latents).sample
    kl = 0.5 * (posterior.mean.float() ** 2 + posterior.var.float() - 1 - posterior.logvar.float()).mean()
    return decoded.float(), kl


def in_low_precision() -> AbstractContextManager[Any]:
    """The networks' arithmetic: bfloat16 where the CPU has instructions for it, else float32, which is faster there."""
    return torch.autocast("cpu", torch.bfloat16) if has_products(torch.bfloat16) else nullcontext()


def some_empty(prompts: Sequence[str], share: float, generator: torch.Generator) -> list[str]:
    """Prompts of which a random share is left out, as classifier-free guidance needs it."""
    kept = torch.rand(len(prompts), generator=generator) >= share
    return [text if keep else "" for text, keep in zip(prompts, kept.tolist(), strict=True)]


def batch_of(total: int, size: int, seed: int, step: int) -> list[int]:
    """Which examples an update learns from."""
    return np.random.default_rng(counter_seed(seed, "batch", step)).integers(total, size=size).tolist()


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Linear warm-up, of a fifth of the updates and at most 100, then a cosine down to a fiftieth of the peak."""
    warmup = min(100, math.ceil(steps / 5))
    if step < warmup:
        return peak * (step + 1) / warmup
    done = (step - warmup) / max(1, steps - warmup)
    return peak * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * done)))


def save_atomically(state: Any, path: Path) -> None:
    """Writes a torch file; a stop leaves the old one whole."""
    with replacing(path) as stream:
        torch.save(state, stream)


def train_autoencoder(vae: nn.Module, loss_of: Callable[[int], Tensor], config: Any, out: Path) -> None:
    """Trains an autoencoder, without averaging, for the `vae_steps` and at the `vae_lr` of `config`."""
    train_network(
        "autoencoder", vae, loss_of, out / "vae.pt", steps=config.vae_steps, lr=config.vae_lr, betas=(0.9, 0.99),
        weight_decay=0.0, ema_decay=0.0,
    )  # fmt: skip


def train_denoiser(
    pipe: Any, parts: Sequence[str], loss: Callable[..., Tensor], latents: Sequence[Tensor], prompts: Sequence[str],
    config: Making, out: Path, *, name: str = "denoiser", head: nn.Module | None = None,
) -> float:  # fmt: skip
    """Trains parts of a stock pipeline together, and a `head` that is none of them; writes `pipeline-<step>` folders
    with the averaged weights. The loss of an update is `loss(pipe, *latents, prompts, config, step)`, with float32
    latents of its examples. Returns its seconds, with earlier sessions."""

    def loss_of(step: int) -> Tensor:
        chosen = batch_of(len(prompts), config.batch_size, config.seed, step)
        shown = [part[chosen].float() if part.is_floating_point() else part[chosen] for part in latents]
        return loss(pipe, *shown, [prompts[i] for i in chosen], config, step)

    network = nn.ModuleDict({part: getattr(pipe, part) for part in parts} | ({"head": head} if head else {})).train()
    return train_network(
        name,
        network,
        loss_of,
        out / f"{name}.pt",
        lambda done: pipe.save_pretrained(out / f"{name}-{done:05d}"),
        steps=config.steps,
        lr=config.lr,
        checkpoint_every=config.checkpoint_every,
        muon=True,
    )


def train_network(
    name: str, network: nn.Module, loss_of: Callable[[int], Tensor], path: Path,
    save: Callable[[int], None] | None = None, *, steps: int, lr: float, checkpoint_every: int = 200,
    betas: tuple[float, float] = (0.9, 0.98), weight_decay: float = 0.01, ema_decay: float = 0.998, muon: bool = False,
    note: Callable[[], str] = str,
) -> float:  # fmt: skip
    """Minimises a loss, from the checkpoint at `path` if there is one. Returns its seconds, with earlier sessions.

    Args:
        name: for the progress bar.
        network: what is trained; holds the averaged weights afterwards, where there is an average.
        loss_of: the loss of an update by its number.
        save: called with the number of updates at every checkpoint, while the network holds the averaged weights.
        lr: peak learning rate, see `learning_rate`.
        betas: of AdamW.
        weight_decay: share of the weights, times the learning rate, that an update takes away.
        ema_decay: decay of the averaged weights; 0 keeps none.
        muon: whether Muon trains the hidden layers' matrices.
        note: what else is said after an update.
    """
    average = {key: value.detach().clone() for key, value in network.state_dict().items()} if ema_decay else {}
    learners = optimizers(network, lr=lr, betas=betas, weight_decay=weight_decay, muon=muon)
    start, spent = 0, 0.0
    if path.exists():
        saved = torch.load(path, weights_only=True)
        network.load_state_dict(saved["model"])
        for optimizer, state in zip(learners, saved["optimizers"], strict=True):
            optimizer.load_state_dict(state)
        average, start, spent = saved["average"], int(saved["step"]), float(saved["seconds"])
    recent, begun = 0.0, time.monotonic()
    with progress(name, steps, start) as advance:
        for step in range(start, steps):
            loss = loss_of(step)
            _descend(network, loss, learners, learning_rate(step, steps, lr))
            average_weights(network, average, min(ema_decay, (1 + step) / (10 + step)))
            recent = loss.item() if step == start else 0.98 * recent + 0.02 * loss.item()
            advance(f"loss {recent:.4f} {note()}")
            done = step + 1
            if done % checkpoint_every == 0 or done == steps:
                state = {"model": network.state_dict(), "optimizers": [one.state_dict() for one in learners],
                         "average": average, "step": done, "seconds": spent + time.monotonic() - begun}  # fmt: skip
                save_atomically(state, path)
                if save is not None:
                    live = {key: value.detach().clone() for key, value in network.state_dict().items()}
                    network.load_state_dict(average or live)
                    save(done)
                    network.load_state_dict(live)
    if average:
        network.load_state_dict(average)
    return spent + time.monotonic() - begun


def _descend(network: nn.Module, loss: Tensor, learners: Sequence[torch.optim.Optimizer], lr: float) -> None:
    """One step of all optimizers down the clipped gradient of a loss."""
    network.zero_grad(set_to_none=True)
    loss.backward()
    nn.utils.clip_grad_norm_([p for p in network.parameters() if p.requires_grad], 1.0)
    for optimizer in learners:
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()


@torch.no_grad()
def average_weights(network: nn.Module, average: dict[str, Tensor], decay: float) -> None:
    """Sets the averaged weights, where there are any, to `decay average + (1 - decay) current`."""
    for key, value in network.state_dict().items() if average else ():
        if value.is_floating_point():
            average[key].lerp_(value, 1 - decay)


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

    torch's own orthogonalises in bfloat16; a CPU without instructions for it spends four fifths of the time there. The
    factor gives an update the size that AdamW's has, so that one learning rate does for both (Liu et al., arXiv
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
