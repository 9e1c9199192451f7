"""Sampling steps of other repositories beside the kernels, solvers and schedules of ours.

Every step of a shifted schedule of ten but the last is taken: mean, standard deviation, log-density (a mean over the
latent, as theirs is) and its gradient by the network's output.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace as Space
from typing import Any

import torch
from diffusers import DDIMScheduler
from diffusers.schedulers.scheduling_ddim import DDIMSchedulerOutput
from published_cutting import Comparison, Cut
from torch import Tensor

from flowrl.samplers.flow_coordinates import flow_sigma, vp_scale
from flowrl.samplers.kernels import KERNELS, Kernel
from flowrl.samplers.multistep import solve
from flowrl.samplers.schedules import dynamic_mu, linspace_sigmas, shift_sigma
from flowrl.trajectory import Schedule

Pairs = Iterator[tuple[str, Any, Any]]
Theirs = Callable[[Tensor, Tensor, Tensor, int, Tensor], tuple[Tensor, Tensor | None, Tensor | None]]
"""(velocity, latent, next latent, step, sigmas) -> log-density, mean, standard deviation; None where it is not told."""

SHAPE = (3, 4, 6, 6)
SIGMAS = linspace_sigmas(10, 3.0)
FLOW_GRPO = ("yifan123/flow_grpo", "9745241cf1101407e9b518dd4f10498092150522")
VERL_OMNI = ("verl-project/verl-omni", "a1139bafffb5b9711f0a6b6edff8ecaa60bfff30")
DANCE_GRPO = ("XueZeyue/DanceGRPO", "15cc71d53cc2e6e18a68ee607d5fb6ba9a99e344")
FLOW_FACTORY = ("X-GenGroup/Flow-Factory", "a0b2bc5a2b4fbf9125429b3fb70c0c5d7631047c")
DIFFUSION_NFT = ("NVlabs/DiffusionNFT", "24af5554898d85e93efa492f42b5e9cdf4156e9b")
ADV_GRPO = ("showlab/Adv-GRPO", "8287f9085a59c4fc48f8e80dbf0528fcf734766e")
UNIRL = ("Tencent-Hunyuan/UniRL", "1a7b501e8fe8517b432a130220d2ff462f9b5afa")
BRANCH_GRPO = ("Fredreic1849/BranchGRPO", "19fbb9fc92ad1857212f3b664d6e9ff80c8b3804")
TP_GRPO = ("YunzeTong/TurningPoint-GRPO", "994d26a63b65dbeba3260286317c137453cf3070")
DDPO = ("kvablack/ddpo-pytorch", "1958463f020112c9a7bc85768d296daacc2e1b4b")
D3PO = ("yk7333/d3po", "40d31758048f62ff49814eaa0403d820493ad374")


def normal(*shape: int, draw: torch.Generator) -> Tensor:
    """Standard normal numbers."""
    return torch.randn(*shape, generator=draw)


def beside(
    kernel: Kernel,
    theirs: Theirs,
    draw: torch.Generator,
    *,
    shape: tuple[int, ...] = SHAPE,
    log_prob: Callable[..., Tensor] | None = None,
    ratio: bool = False,
) -> Pairs:
    """Every step of the schedule, ours and theirs; `ratio` compares the log-densities of two latents' difference."""
    score, kernel = log_prob or kernel.log_prob, replace(kernel, sigma_max=float(SIGMAS[1]))
    for step in range(len(SIGMAS) - 2):
        x, velocity = normal(*shape, draw=draw), normal(*shape, draw=draw).requires_grad_()
        sigma, sigma_next = SIGMAS[step], SIGMAS[step + 1]
        transition = kernel(x, velocity, sigma, sigma_next)
        produced = (transition.mean + transition.std * normal(*shape, draw=draw)).detach()
        found, mean, std = theirs(velocity, x, produced, step, SIGMAS)
        ours = score(produced, transition) / x[0].numel()
        if mean is not None:
            yield f"mean of step {step}", transition.mean, mean
        if std is not None:
            yield f"std of step {step}", transition.std, std.flatten()[0]
        yield f"log-density of step {step}", *((ours - ours[0], found - found[0]) if ratio else (ours, found))
        weight = normal(len(x), draw=draw)
        grads = [torch.autograd.grad((weight * value).sum(), velocity, retain_graph=True)[0] for value in (ours, found)]
        yield f"gradient of step {step}", grads[0], grads[1]


def scheduler(**more: Any) -> Space:
    """What the cut steps ask of a diffusers scheduler; a timestep is the number of its step."""
    return Space(sigmas=SIGMAS.clone(), timesteps=torch.arange(float(len(SIGMAS) - 1)), index_for_timestep=int, **more)


def flow_grpo_step(name: str, kind: str, *, root: bool) -> Callable[[Cut, torch.Generator], Pairs]:
    """flow_grpo's step for SD3 and copies of it; `kind` is the sde_type, or "" where it takes none."""

    def compare(cut: Cut, draw: torch.Generator) -> Pairs:
        step_of = cut.function(name, Optional=None, randn_tensor=None)
        types = {"sde": ["sde"], "cps": ["cps"], "both": ["sde", "cps"], "": [""]}[kind]

        for sde_type in types:

            def theirs(
                velocity: Tensor, x: Tensor, produced: Tensor, step: int, sigmas: Tensor, sde_type: str = sde_type
            ) -> Any:
                more = {"sde_type": sde_type} if kind else {}
                at = torch.full((len(x),), step)
                _, log_prob, mean, std = step_of(scheduler(), velocity, at, x, 0.7, produced, **more)
                std = std * (sigmas[step] - sigmas[step + 1]).sqrt() if sde_type == "sde" and root else std
                return log_prob, mean, std

            cps = sde_type in ("cps", "")
            kernel = replace(KERNELS["cps" if cps else "flow_sde"], noise_level=0.7)
            yield from beside(kernel, theirs, draw, log_prob=kernel.published_log_prob)

    return compare


def wan(cut: Cut, draw: torch.Generator) -> Pairs:
    """Its step for videos, whose noise level is the schedule's."""
    step_of = cut.function("sde_step_with_logprob", Optional=None, randn_tensor=None)

    def theirs(velocity: Tensor, x: Tensor, produced: Tensor, step: int, sigmas: Tensor) -> Any:
        _, log_prob, mean, std = step_of(scheduler(), velocity, torch.full((len(x),), step), x, produced)
        return log_prob, mean, std

    yield from beside(KERNELS["wan_sde"], theirs, draw, shape=(2, 3, 2, 4, 4))


def verl_omni(cut: Cut, draw: torch.Generator) -> Pairs:
    """Its three kinds of noise."""
    step_of = cut.function("FlowMatchSDEDiscreteScheduler.sample_previous_step", randn_tensor=None)
    for sde_type, kernel in (("sde", "flow_sde"), ("cps", "cps"), ("dance_sde", "dance_sde")):

        def theirs(
            velocity: Tensor, x: Tensor, produced: Tensor, step: int, sigmas: Tensor, sde_type: str = sde_type
        ) -> Any:
            _, log_prob, mean, std = step_of(
                scheduler(step_index=step), x, velocity, noise_level=0.7, prev_sample=produced, sde_type=sde_type
            )
            return log_prob, mean, std * (sigmas[step] - sigmas[step + 1]).sqrt() if sde_type == "sde" else std

        bound = replace(KERNELS[kernel], noise_level=0.7)
        yield from beside(bound, theirs, draw, log_prob=bound.published_log_prob)


def flow_factory(name: str) -> Callable[[Cut, torch.Generator], Pairs]:
    """A scheduler's step, with three kinds of noise and none."""

    def compare(cut: Cut, draw: torch.Generator) -> Pairs:
        def spread(value: Any, x: Tensor) -> Tensor:
            return torch.as_tensor(value, dtype=x.dtype).expand(len(x)).reshape(-1, *[1] * (x.ndim - 1))

        step_of = cut.function(
            f"{name}.step", Optional=None, List=list, to_broadcast_tensor=spread, logger=None, randn_tensor=None
        )
        kinds = (("Flow-SDE", "flow_sde"), ("CPS", "cps"), ("Dance-SDE", "dance_sde"))
        for dynamics, kernel in kinds:

            def theirs(
                velocity: Tensor, x: Tensor, produced: Tensor, step: int, sigmas: Tensor, dynamics: str = dynamics
            ) -> Any:
                at = scheduler(is_eval=False, dynamics_type=dynamics)
                values = step_of(
                    at, velocity, torch.full((len(x),), float(step)), x, produced, noise_level=0.6, return_dict=False
                )
                mean, log_prob = (values[1], values[3]) if len(values) == 6 else (values[2], values[1])
                std, step_size = values[-2:]
                return log_prob, mean, std * (1 if dynamics == "CPS" else (-step_size).sqrt())

            bound = replace(KERNELS[kernel], noise_level=0.6)
            yield from beside(bound, theirs, draw, log_prob=bound.published_log_prob)

    return compare


def dance_step(name: str, *more: Any, told: bool = True) -> Callable[[Cut, torch.Generator], Pairs]:
    """DanceGRPO's step and copies; `told` is whether its log-density has the constant."""

    def compare(cut: Cut, draw: torch.Generator) -> Pairs:
        step_of = cut.function(name)

        def theirs(velocity: Tensor, x: Tensor, produced: Tensor, step: int, sigmas: Tensor) -> Any:
            *_, log_prob = step_of(velocity, x, 0.3, sigmas, step, produced, *more)
            return log_prob, None, None

        yield from beside(KERNELS["dance_sde"], theirs, draw, ratio=not told)

    return compare


def nft_step(name: str, kernel: str) -> Callable[[Cut, torch.Generator], Pairs]:
    """A stochastic step of DiffusionNFT's solvers; of DDIM's the mean and std are theirs."""

    def compare(cut: Cut, draw: torch.Generator) -> Pairs:
        step_of = cut.function(name)

        def theirs(velocity: Tensor, x: Tensor, produced: Tensor, step: int, sigmas: Tensor) -> Any:
            if name != "ddim_update":
                return step_of(velocity, x, 0.7, sigmas, step, produced)[2], None, None
            clean = x - sigmas[step] * velocity
            _, mean, level, root = step_of(clean, sigmas.double(), step, x, noise=torch.zeros_like(x), eta=0.7)
            log_prob = torch.distributions.Normal(mean, level * root).log_prob(produced)
            return log_prob.mean((1, 2, 3)), mean, level * root

        yield from beside(replace(KERNELS[kernel], noise_level=0.7), theirs, draw)

    return compare


def dpm(cut: Cut, draw: torch.Generator) -> Pairs:
    """The whole second-order solver, from the first step to clean data, with one linear network."""
    step_of = cut.function(
        "convert_model_output",
        "ddim_update",
        "_sigma_to_alpha_sigma_t",
        "dpm_solver_first_order_update",
        "multistep_dpm_solver_second_order_update",
        "dpm_step",
    )
    state_of = cut.function("DPMState")
    matrix, start = normal(8, 8, draw=draw) / 4, normal(3, 8, draw=draw)

    def network(x: Tensor, sigma: Tensor, timestep: Tensor) -> Tensor:
        return x @ matrix * (1 + sigma) + torch.sin(x)

    schedule = Schedule(sigma=SIGMAS, timestep=1000 * SIGMAS[:-1])
    x, state = start, state_of()
    state.order, state.lower_order_nums = 2, 0
    state.__post_init__()
    for step in range(schedule.num_steps):
        output = network(x, SIGMAS[step], SIGMAS[step])
        x = step_of(2, output, x, step, list(range(schedule.num_steps)), SIGMAS, state)[0].float()
    yield "finished latent", solve(network, start, schedule), x


def unirl(name: str, kernel: str) -> Callable[[Cut, torch.Generator], Pairs]:
    """A strategy's step."""

    def compare(cut: Cut, draw: torch.Generator) -> Pairs:
        step_of, score = (cut.function(f"{name}.{method}") for method in ("step", "compute_log_prob"))

        def theirs(velocity: Tensor, x: Tensor, produced: Tensor, step: int, sigmas: Tensor) -> Any:
            _, mean, std = step_of(
                None, velocity, x, sigmas[step], sigmas[step + 1], 0.7, produced, sigma_max=float(sigmas[1])
            )
            log_prob = score(None, prev_sample=produced, prev_sample_mean=mean, std_var=std)
            return log_prob.mean((1, 2, 3)), mean, std

        bound = replace(KERNELS[kernel], noise_level=0.7)
        yield from beside(bound, theirs, draw, log_prob=bound.published_log_prob)

    return compare


def ddim(cut: Cut, draw: torch.Generator) -> Pairs:
    """DDIM with eta on a diffusion model, which ours takes in flow coordinates: the latent over `vp_scale`."""
    step_of = cut.function(
        "_left_broadcast",
        "_get_variance",
        "ddim_step_with_logprob",
        DDIMScheduler=DDIMScheduler,
        DDIMSchedulerOutput=DDIMSchedulerOutput,
        Optional=None,
        randn_tensor=None,
    )
    stock = DDIMScheduler(
        beta_start=0.00085,
        beta_end=0.012,
        beta_schedule="scaled_linear",
        clip_sample=False,
        set_alpha_to_one=False,
        steps_offset=1,
    )
    stock.set_timesteps(20)
    kernel = replace(KERNELS["ddim_flow"], noise_level=1.0)
    for timestep in stock.timesteps[:-1]:
        alpha, alpha_next = (stock.alphas_cumprod[int(t)].double() for t in (timestep, timestep - 50))
        sigma, sigma_next = flow_sigma(alpha), flow_sigma(alpha_next)
        x, noise = normal(*SHAPE, draw=draw), normal(*SHAPE, draw=draw).requires_grad_()
        clean = (x - (1 - alpha).sqrt() * noise) / alpha.sqrt()
        transition = kernel((x / vp_scale(sigma)).float(), (noise - clean).float(), sigma, sigma_next)
        produced = transition.mean + transition.std * normal(*SHAPE, draw=draw)
        ours = kernel.log_prob(produced, transition) / x[0].numel()
        scaled = (produced * vp_scale(sigma_next)).float().detach()
        _, theirs = step_of(stock, noise, timestep.expand(len(x)), x, eta=1.0, prev_sample=scaled)
        yield f"log-density at {int(timestep)}", ours - ours[0], theirs - theirs[0]
        weight = normal(len(x), draw=draw)
        grads = [torch.autograd.grad((weight * v).sum(), noise, retain_graph=True)[0] for v in (ours, theirs)]
        yield f"gradient at {int(timestep)}", grads[0], grads[1]


def time_shift(cut: Cut, draw: torch.Generator) -> Pairs:
    """The static shift of a schedule."""
    shift, t = 1 + 4 * float(torch.rand((), generator=draw)), torch.rand(50, generator=draw)
    yield "shifted", shift_sigma(t, shift), cut.function("sd3_time_shift")(shift, t)


def dynamic_shift(cut: Cut, draw: torch.Generator) -> Pairs:
    """The logarithm of a resolution's shift."""
    for tokens in torch.randint(64, 9000, (20,), generator=draw).tolist():
        yield f"{tokens} tokens", dynamic_mu(tokens), cut.function("calculate_shift")(tokens)


def _step(
    method: str, source: tuple[str, str], file: str, function: str, kernel: str, compare: Any, **more: Any
) -> Comparison:
    ours = kernel if "." in kernel else f"samplers.kernels.KERNELS[{kernel!r}]"
    return Comparison(method, *source, file, function, ours, compare, **{"gradient": True, **more})


SD3 = "flow_grpo/diffusers_patch/sd3_sde_with_logprob.py"
SOLVER = "flow_grpo/diffusers_patch/solver.py"
STEPS = (
    _step(
        "Flow-SDE and Flow-CPS",
        FLOW_GRPO,
        SD3,
        "sde_step_with_logprob",
        "flow_sde",
        flow_grpo_step("sde_step_with_logprob", "both", root=True),
    ),
    _step(
        "SDE step for Wan",
        FLOW_GRPO,
        "flow_grpo/diffusers_patch/wan_pipeline_with_logprob.py",
        "sde_step_with_logprob",
        "wan_sde",
        wan,
    ),
    _step(
        "Flow-SDE, Flow-CPS, Dance",
        VERL_OMNI,
        "verl_omni/pipelines/schedulers/flow_match_sde.py",
        "FlowMatchSDEDiscreteScheduler.sample_previous_step",
        "flow_sde",
        verl_omni,
    ),
    _step(
        "Dance",
        DANCE_GRPO,
        "fastvideo/train_grpo_flux.py",
        "flux_step",
        "dance_sde",
        dance_step("flux_step", True, True),
    ),
    _step(
        "DDIM with eta",
        DANCE_GRPO,
        "fastvideo/models/stable_diffusion/ddim_with_logprob.py",
        "ddim_step_with_logprob",
        "ddim_flow",
        ddim,
        bound=1e-4,
    ),
    _step(
        "static shift",
        DANCE_GRPO,
        "fastvideo/train_grpo_flux.py",
        "sd3_time_shift",
        "samplers.schedules.shift_sigma",
        time_shift,
        gradient=False,
    ),
    _step(
        "Flow-SDE, Flow-CPS, Dance",
        FLOW_FACTORY,
        "src/flow_factory/scheduler/flow_match_euler_discrete.py",
        "FlowMatchEulerDiscreteSDEScheduler.step",
        "flow_sde",
        flow_factory("FlowMatchEulerDiscreteSDEScheduler"),
    ),
    _step(
        "Flow-SDE, Flow-CPS, Dance",
        FLOW_FACTORY,
        "src/flow_factory/scheduler/unipc_multistep.py",
        "UniPCMultistepSDEScheduler.step",
        "flow_sde",
        flow_factory("UniPCMultistepSDEScheduler"),
    ),
    _step(
        "dynamic shift",
        FLOW_FACTORY,
        "src/flow_factory/scheduler/flow_match_euler_discrete.py",
        "calculate_shift",
        "samplers.schedules.dynamic_mu",
        dynamic_shift,
        gradient=False,
    ),
    _step(
        "Flow-CPS",
        ADV_GRPO,
        "adv_grpo/diffusers_patch/sd3_sde_with_logprob.py",
        "sde_step_with_logprob_new",
        "cps",
        flow_grpo_step("sde_step_with_logprob_new", "", root=False),
    ),
    _step(
        "Flow-SDE and Flow-CPS",
        TP_GRPO,
        SD3,
        "sde_step_with_logprob",
        "flow_sde",
        flow_grpo_step("sde_step_with_logprob", "both", root=True),
    ),
    _step("Flow-SDE", DIFFUSION_NFT, SOLVER, "flow_grpo_step", "flow_sde", nft_step("flow_grpo_step", "flow_sde")),
    _step("Dance", DIFFUSION_NFT, SOLVER, "dance_grpo_step", "dance_sde", dance_step("dance_grpo_step", told=False)),
    _step("DDIM with eta", DIFFUSION_NFT, SOLVER, "ddim_update", "ddim_flow", nft_step("ddim_update", "ddim_flow")),
    _step("DPM-Solver++", DIFFUSION_NFT, SOLVER, "dpm_step", "samplers.multistep.solve", dpm, gradient=False),
    _step(
        "Flow-SDE",
        UNIRL,
        "unirl/sde/kernels.py",
        "FlowSDEStrategy.step",
        "flow_sde",
        unirl("FlowSDEStrategy", "flow_sde"),
    ),
    _step("Flow-CPS", UNIRL, "unirl/sde/kernels.py", "CPSSDEStrategy.step", "cps", unirl("CPSSDEStrategy", "cps")),
    _step(
        "Dance",
        UNIRL,
        "unirl/sde/kernels.py",
        "DanceSDEStrategy.step",
        "dance_sde",
        unirl("DanceSDEStrategy", "dance_sde"),
    ),
    _step(
        "Dance",
        BRANCH_GRPO,
        "fastvideo/train_branchgrpo_flux.py",
        "flux_step_with_split",
        "dance_sde",
        dance_step("flux_step_with_split", True, True),
    ),
    _step(
        "DDIM with eta",
        DDPO,
        "ddpo_pytorch/diffusers_patch/ddim_with_logprob.py",
        "ddim_step_with_logprob",
        "ddim_flow",
        ddim,
        bound=1e-4,
    ),
    _step(
        "DDIM with eta",
        D3PO,
        "d3po_pytorch/diffusers_patch/ddim_with_logprob.py",
        "ddim_step_with_logprob",
        "ddim_flow",
        ddim,
        bound=1e-4,
    ),
)
