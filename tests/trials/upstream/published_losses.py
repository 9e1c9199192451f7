"""Objectives of other repositories beside ours: the loss, and its gradient by what the network says.

A micro-batch is twelve rows of one step, some of them beyond the clip range on either side.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace as Space
from typing import Any

import torch
from PIL import Image
from published_cutting import Comparison, Cut, run
from published_steps import (
    ADV_GRPO,
    D3PO,
    DANCE_GRPO,
    DDPO,
    FLOW_FACTORY,
    FLOW_GRPO,
    SHAPE,
    SIGMAS,
    UNIRL,
    VERL_OMNI,
    Pairs,
    normal,
)
from torch import Tensor

from flowrl.objectives.policy_gradient import Clip, Dppo, Guard, Scored, kernel_sensitivity
from flowrl.objectives.preference_losses import d3po
from flowrl.rewards.networks.discriminators import HIDDEN, discriminator_loss
from flowrl.samplers.kernels import KERNELS
from flowrl.samplers.transition import Transition, gaussian_kl, gaussian_log_prob, published_kl

AWM = ("scxue/advantage_weighted_matching", "be5137232e33a21b449ed65a533211d0deb97ed8")
ROWS, RANGE = 12, 7e-4
STEP, THRESHOLD, KL_COEF = 4, 1.95e-3, 4e3


@dataclass(frozen=True)
class Step:
    """Rows of one step: what either side needs of them."""

    velocity: Tensor
    scored: Scored
    log_prob: Tensor
    old_log_prob: Tensor
    reference: Transition
    g: Tensor
    h: Tensor


def step_of(draw: torch.Generator, rows: int = ROWS, clip: float = RANGE) -> Step:
    """A policy that has moved a little since it drew."""
    kernel = replace(KERNELS["flow_sde"], sigma_max=float(SIGMAS[1]))
    shape = (rows, *SHAPE[1:])
    x, velocity = normal(*shape, draw=draw), normal(*shape, draw=draw).requires_grad_()
    sigma, sigma_next = SIGMAS[STEP], SIGMAS[STEP + 1]
    new = kernel(x, velocity, sigma, sigma_next)
    moved = [kernel(x, velocity.detach() + 0.3 * normal(*shape, draw=draw), sigma, sigma_next) for _ in range(2)]
    produced = moved[0].mean + moved[0].std * normal(*shape, draw=draw)
    log_prob, old = (gaussian_log_prob(produced, t) / x[0].numel() for t in (new, moved[0]))
    distance = torch.full((rows,), clip)
    scored = Scored(
        log_ratio=log_prob - old,
        advantage=(3 * normal(rows, draw=draw)).clamp(-5, 5),
        clip_low=distance,
        clip_high=distance,
        new=new,
        old_mean=moved[0].mean,
        produced=produced,
        step_size=float(sigma - sigma_next),
        sensitivity=kernel_sensitivity(kernel, sigma, sigma_next),
    )
    h = sigma - sigma_next
    return Step(velocity, scored, log_prob, old, moved[1], new.std / h.sqrt(), h)


def both(name: str, leaf: Tensor, ours: Tensor, theirs: Tensor) -> Pairs:
    """A loss and its gradient."""
    yield name, ours, theirs
    mine, other = (torch.autograd.grad(loss, leaf, retain_graph=True)[0] for loss in (ours, theirs))
    yield f"gradient of {name}", mine, other


def sample(step: Step, **more: Any) -> dict[str, Tensor]:
    """A batch as the training scripts keep it, with one step."""
    scored = step.scored
    assert scored.old_mean is not None
    return {
        "advantages": scored.advantage[:, None],
        "log_probs": step.old_log_prob[:, None],
        "prev_sample_mean": scored.old_mean[:, None],
        **more,
    }


def train(**more: Any) -> Space:
    """A configuration as the training scripts read it."""
    return Space(adv_clip_max=5.0, clip_range=RANGE, **more)


def clip_script(first: str, within: str = "main", kl: bool = False) -> Callable[[Cut, torch.Generator], Pairs]:
    """The clipped loss of a training script, with flow_grpo's KL if it has one."""

    def compare(cut: Cut, draw: torch.Generator) -> Pairs:
        step, code = step_of(draw), cut.statements(within, first, "loss")
        own = sample(step)
        advantages = own["advantages"][:, 0]
        found = run(
            code,
            sample=own | ({"advantages": advantages} if within == "train_one_step" else {}),
            j=0,
            _=0,
            config=Space(train=train(beta=KL_COEF), rationorm=False),
            args=Space(gradient_accumulation_steps=1),
            log_prob=step.log_prob,
            new_log_probs=step.log_prob,
            prev_sample_mean=step.scored.new.mean,
            prev_sample_mean_ref=step.reference.mean,
            std_dev_t=step.g,
            train_timesteps=1,
            advantages=advantages,
            adv_clip_max=5.0,
            clip_range=RANGE,
        )
        ours = Clip()(step.scored).mean()
        if kl:
            ours = ours + KL_COEF * published_kl(step.scored.new, step.reference, step_size=step.h).mean() / SHAPE_SIZE
        yield from both("loss", step.velocity, ours, found["loss"])

    return compare


SHAPE_SIZE = SHAPE[1] * SHAPE[2] * SHAPE[3]


def guard_script(cut: Cut, draw: torch.Generator) -> Pairs:
    """Row by row, since theirs averages the bias over the batch."""
    code = cut.statements("main", "advantages", "policy_loss")
    for row in range(4):
        step = step_of(draw, rows=1, clip=RANGE)
        found = run(
            code,
            sample=sample(step),
            j=0,
            config=Space(train=train(), rationorm=True),
            log_prob=step.log_prob,
            prev_sample_mean=step.scored.new.mean,
            std_dev_t=step.g,
            sqrt_dt=step.h.sqrt(),
        )
        yield from both(
            f"loss of row {row}", step.velocity, Guard(delta="published")(step.scored).mean(), found["policy_loss"]
        )


def guard_trainer(cut: Cut, draw: torch.Generator) -> Pairs:
    """Row by row, since theirs broadcasts rows against rows."""
    code = cut.statements("GRPOGuardTrainer.optimize", "adv_clip_range", "policy_loss")
    for row in range(4):
        step = step_of(draw, rows=1)
        assert step.scored.old_mean is not None
        output = Space(dt=-step.h, std_dev_t=step.g, next_latents_mean=step.scored.new.mean, log_prob=step.log_prob)
        args = Space(adv_clip_range=(-5.0, 5.0), clip_range=(-RANGE, RANGE))
        found = run(
            code,
            self=Space(training_args=args),
            output=output,
            adv=step.scored.advantage,
            timestep_index=0,
            batch={"advantage": step.scored.advantage, "next_latents_mean": step.scored.old_mean[:, None]},
            callback_index_map=[0],
            old_log_prob=step.old_log_prob,
        )
        yield from both(
            f"loss of row {row}", step.velocity, Guard(delta="none")(step.scored).mean(), found["policy_loss"]
        )


def verl_loss(name: str, ours: Callable[[Scored], Tensor]) -> Callable[[Cut, torch.Generator], Pairs]:
    """A loss of verl-omni's reverse process."""

    def compare(cut: Cut, draw: torch.Generator) -> Pairs:
        step = step_of(draw)
        own = Space(adv_clip_max=5.0, clip_ratio=RANGE, kl_mask_threshold=THRESHOLD, add_kl_coefficient=True)
        more = (
            {}
            if name == "FlowGRPOLoss"
            else {
                "old_prev_sample_mean": step.scored.old_mean,
                "prev_sample_mean": step.scored.new.mean,
                "std_dev_t": step.g.expand(ROWS, 1, 1, 1),
                "sqrt_dt": step.h.sqrt().expand(ROWS),
            }
        )
        loss, _ = cut.function(f"{name}.compute_loss", Optional=None, DiffusionActorConfig=None)(
            Space(_broadcast_sqrt_dt=lambda root, target: root.reshape(-1, 1, 1, 1)),
            old_log_prob=step.old_log_prob,
            log_prob=step.log_prob,
            advantages=step.scored.advantage,
            config=Space(diffusion_loss=own),
            **more,
        )
        yield from both("loss", step.velocity, ours(step.scored).mean(), loss)

    return compare


def unirl_dppo(cut: Cut, draw: torch.Generator) -> Pairs:
    """Flow-DPPO as its authors have it."""
    step = step_of(draw)
    assert step.scored.old_mean is not None
    theirs, metrics = cut.function("_gaussian_kl_div", "_flowdppo_kl_adv_loss")(
        new_logp=step.log_prob[:, None],
        old_logp=step.old_log_prob[:, None],
        new_means=step.scored.new.mean[:, None],
        old_means=step.scored.old_mean[:, None],
        advantages=step.scored.advantage[:, None],
        sigma_t=step.scored.new.std,
        kl_mask_threshold=THRESHOLD,
    )
    objective = Dppo(threshold=THRESHOLD)
    yield from both("loss", step.velocity, objective(step.scored).mean(), theirs.mean())
    yield "masked share", objective.cut(step.scored).float().mean(), metrics["masked_fraction"]


def verl_kl(cut: Cut, draw: torch.Generator) -> Pairs:
    """The divergence to the reference; theirs takes packed latents [b, tokens, channels]."""
    step = step_of(draw)
    packed = [t.flatten(2) for t in (step.scored.new.mean, step.reference.mean)]
    theirs, _ = cut.function("KLLoss.compute_loss")(
        None, prev_sample_mean=packed[0], ref_prev_sample_mean=packed[1], std_dev_t=step.g.expand(ROWS, 1, 1)
    )
    ours = published_kl(step.scored.new, step.reference, step_size=step.h).mean() / SHAPE_SIZE
    exact = gaussian_kl(step.scored.new, step.reference).mean() * step.h / SHAPE_SIZE
    yield from both("KL", step.velocity, ours, theirs)
    yield "exact KL by the step", exact, theirs


def d3po_script(cut: Cut, draw: torch.Generator) -> Pairs:
    """Pairs of steps, some of them beyond the clip."""
    log_ratio, half = (0.1 * normal(ROWS, draw=draw)).requires_grad_(), ROWS // 2
    nothing = torch.zeros(half)
    found = run(
        cut.statements("main", "ratio_0", "loss"),
        total_prob_0=log_ratio[:half],
        total_prob_1=log_ratio[half:],
        total_ref_prob_0=nothing,
        total_ref_prob_1=nothing,
        config=Space(train=Space(eps=0.1, beta=0.5)),
        human_prefer=torch.tensor([[1.0, -1.0]] * half),
    )
    ours, _ = d3po(log_ratio, torch.arange(half), torch.arange(half, ROWS), beta=0.5, clip=0.1)
    yield from both("loss", log_ratio, ours.mean(), found["loss"])


class Info(dict[str, list[Tensor]]):
    """Where a script logs."""

    def __missing__(self, key: str) -> list[Tensor]:
        return []


def discriminator(cut: Cut, draw: torch.Generator) -> Pairs:
    """The hinge loss on class tokens and drawn patches, and the gradient of the head."""
    tokens = [normal(4, 10, 8, draw=draw) for _ in range(2)]
    head = torch.nn.Sequential(torch.nn.Linear(8, HIDDEN), torch.nn.GELU(), torch.nn.Linear(HIDDEN, 1))
    seen = iter(tokens)
    scorer = Space(eval=lambda: None, forward_features=lambda pixels: next(seen))
    quiet = Space(zero_grad=head.zero_grad, step=lambda: None)
    black = [Image.new("RGB", (8, 8))] * 4
    torch.manual_seed(7)
    theirs, _ = cut.function("train_dino")(scorer, head, None, black, black, quiet, Space(device="cpu"), n_patches=6)
    gradient = [p.grad.clone() for p in head.parameters() if p.grad is not None]
    torch.manual_seed(7)
    chosen = [t[:, 1:].gather(1, torch.randint(0, 9, (4, 6))[..., None].expand(-1, -1, 8)) for t in tokens]
    whole = [head(t[:, 0]).squeeze(-1) for t in tokens]
    patches = [head(t).squeeze(-1) for t in chosen]
    ours = discriminator_loss("hinge", *whole) + 0.3 * discriminator_loss("hinge", *patches)
    yield "loss", ours, theirs
    head.zero_grad()
    ours.backward()
    for mine, other in zip(head.parameters(), gradient, strict=True):
        yield "gradient of the head", mine.grad, other


def loss_row(
    method: str, source: tuple[str, str], file: str, function: str, ours: str, compare: Any, **more: Any
) -> Comparison:
    return Comparison(method, *source, file, function, f"objectives.{ours}", compare, **{"gradient": True, **more})


ALGOS = "verl_omni/trainer/diffusion/diffusion_algos.py"
FACTORY = "src/flow_factory/trainers"
LOSSES = (
    loss_row(
        "clipped loss and KL of Flow-GRPO",
        FLOW_GRPO,
        "scripts/train_sd3.py",
        "main: advantages to loss",
        "policy_gradient.Clip",
        clip_script("advantages", kl=True),
    ),
    loss_row(
        "GRPO-Guard",
        FLOW_GRPO,
        "scripts/train_sd3_GRPO_Guard.py",
        "main: advantages to policy_loss",
        "policy_gradient.Guard",
        guard_script,
        bound=1e-4,
    ),
    loss_row(
        "clipped loss",
        VERL_OMNI,
        ALGOS,
        "FlowGRPOLoss.compute_loss",
        "policy_gradient.Clip",
        verl_loss("FlowGRPOLoss", Clip()),
    ),
    loss_row(
        "GRPO-Guard",
        VERL_OMNI,
        ALGOS,
        "GRPOGuardLoss.compute_loss",
        "policy_gradient.Guard",
        verl_loss("GRPOGuardLoss", Guard(delta="published")),
        bound=1e-4,
    ),
    loss_row(
        "Flow-DPPO",
        VERL_OMNI,
        ALGOS,
        "FlowDPPOLoss.compute_loss",
        "policy_gradient.Dppo",
        verl_loss("FlowDPPOLoss", Dppo(threshold=THRESHOLD)),
    ),
    loss_row("KL of Flow-GRPO", VERL_OMNI, ALGOS, "KLLoss.compute_loss", "samplers.transition.published_kl", verl_kl),
    loss_row(
        "Flow-DPPO", UNIRL, "unirl/algorithms/flowdppo.py", "_flowdppo_kl_adv_loss", "policy_gradient.Dppo", unirl_dppo
    ),
    loss_row(
        "clipped loss of DanceGRPO",
        DANCE_GRPO,
        "fastvideo/train_grpo_flux.py",
        "train_one_step: ratio to loss",
        "policy_gradient.Clip",
        clip_script("ratio", "train_one_step"),
    ),
    loss_row(
        "clipped loss of DDPO",
        DDPO,
        "scripts/train.py",
        "main: ratio to loss",
        "policy_gradient.Clip",
        clip_script("ratio"),
    ),
    loss_row("D3PO", D3PO, "scripts/train.py", "main: ratio_0 to loss", "preference_losses.d3po", d3po_script),
    loss_row(
        "GRPO-Guard without rescaling",
        FLOW_FACTORY,
        f"{FACTORY}/grpo.py",
        "GRPOGuardTrainer.optimize: adv_clip_range to policy_loss",
        "policy_gradient.Guard",
        guard_trainer,
        bound=1e-4,
    ),
    loss_row(
        "Adv-GRPO: discriminator",
        ADV_GRPO,
        "scripts/train_sd3_fast_dino_patch.py",
        "train_dino",
        "rewards.networks.discriminators.discriminator_loss",
        discriminator,
    ),
)
