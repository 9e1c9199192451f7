"""Forward and preference losses of other repositories beside ours: the loss, and its gradient by the velocity."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace as Space
from typing import Any

import torch
from published_cutting import Cut, run
from published_losses import ALGOS, FACTORY, ROWS, Info, both, loss_row, train
from published_steps import DIFFUSION_NFT, FLOW_FACTORY, FLOW_GRPO, SHAPE, VERL_OMNI, Pairs, normal
from torch import Tensor

from flowrl.objectives.forward_losses import Awm, Matched, Nft, noised, old_decay
from flowrl.objectives.preference_losses import centred_distillation, diffusion_dpo, group_gate
from flowrl.objectives.terms import matching_log_prob, mean_squared_error, optimality

AWM = ("scxue/advantage_weighted_matching", "be5137232e33a21b449ed65a533211d0deb97ed8")


def matched(draw: torch.Generator, **more: Any) -> Matched:
    """Images noised once each, four of a prompt, and velocities of three policies."""
    shape = (ROWS, *SHAPE[1:])
    clean, noise, velocity, old, reference = (normal(*shape, draw=draw) for _ in range(5))
    return Matched(
        clean=clean,
        noise=noise,
        sigma=0.05 + 0.9 * torch.rand(ROWS, generator=draw),
        velocity=velocity.requires_grad_(),
        old=velocity.detach() + 0.2 * old,
        reference=velocity.detach() + reference,
        advantage=(3 * normal(ROWS, draw=draw)).clamp(-5, 5),
        reward=torch.rand(ROWS, generator=draw),
        group=torch.arange(ROWS) // 4,
        **more,
    )


def nft_inputs(m: Matched) -> dict[str, Tensor]:
    """Names that both NFT losses read."""
    assert m.old is not None
    assert m.reference is not None
    return {
        "forward_prediction": m.velocity,
        "old_prediction": m.old,
        "ref_forward_prediction": m.reference,
        "x0": m.clean,
        "xt": noised(m.clean, m.noise, m.sigma),
        "t_expanded": m.sigma.reshape(-1, 1, 1, 1),
    }


def nft_script(cut: Cut, draw: torch.Generator) -> Pairs:
    """DiffusionNFT's own loss, for each way to read an advantage."""
    code = cut.statements("main", "advantages_clip", "policy_loss")
    for mode in ("all", "positive_only", "negative_only", "one_only", "binary"):
        m = matched(draw)
        found = run(
            code,
            **nft_inputs(m),
            loss_terms={},
            j_idx=0,
            train_sample_batch={"advantages": m.advantage[:, None]},
            config=Space(beta=0.5, train=Space(adv_clip_max=5.0, adv_mode=mode)),
        )
        ours, _ = Nft(beta=0.5, mode=mode)(m)
        yield from both(f"loss, {mode}", m.velocity, ours.mean(), found["policy_loss"])


def verl_nft(cut: Cut, draw: torch.Generator) -> Pairs:
    """The same of verl-omni."""
    m = matched(draw)
    own = Space(mix_beta=0.5, adaptive_weight_min=1e-5, adv_clip_max=5.0, ref_kl_coef=0.0)
    loss, _ = cut.function("DiffusionNFTLoss.compute_loss")(
        None, **nft_inputs(m), reward_prob=optimality(m.advantage), config=Space(diffusion_loss=own)
    )
    yield from both("loss", m.velocity, Nft(beta=0.5)(m)[0].mean(), loss)


def reward_prob(cut: Cut, draw: torch.Generator) -> Pairs:
    """Advantages as probabilities."""
    advantage = 4 * normal(50, draw=draw)
    for mode in ("all", "positive_only", "negative_only", "one_only", "binary"):
        theirs = cut.function("DiffusionNFTLoss._advantage_to_reward_prob")(advantage, 5.0, mode)
        yield mode, optimality(advantage, mode=mode), theirs


def nft_decay(cut: Cut, draw: torch.Generator) -> Pairs:
    """How much of the old policy stays."""
    for kind, name in enumerate(("copy", "linear", "delayed")):
        steps = torch.randint(0, 2000, (30,), generator=draw).tolist()
        yield name, [old_decay(name, s) for s in steps], [cut.function("return_decay")(s, kind) for s in steps]


def crd_decay(cut: Cut, draw: torch.Generator) -> Pairs:
    """The same, and the ramp of CRD's sampling policy."""
    decay = cut.function("_DECAY_PRESETS", "compute_decay")
    for name, kind in (("copy", 0), ("linear", 1), ("delayed", 2), ("crd", "0-0.25-0.005-0.999")):
        steps = torch.randint(0, 2000, (30,), generator=draw).tolist()
        yield name, [old_decay(name, s) for s in steps], [decay(s, kind) for s in steps]


WEIGHTINGS: Any = (("uniform", "Uniform"), ("t", "t"), ("t2", "t**2"), ("huber", "huber"), ("ghuber", "ghuber"))


def awm_log_prob(cut: Cut, draw: torch.Generator) -> Pairs:
    """What stands for a log-probability, for each weighting."""
    for ours, theirs in WEIGHTINGS:
        m = matched(draw)
        found, *_ = cut.function("compute_log_prob_awm")(
            lambda m=m, **given: (m.velocity,),
            None,
            None,
            m.sigma,
            None,
            None,
            Space(train=Space(cfg=False, ghuber_power=0.25)),
            noised(m.clean, m.noise, m.sigma),
            m.clean,
            m.noise,
            theirs,
        )
        error = mean_squared_error(m.velocity, m.target)
        mine = matching_log_prob(error, m.sigma, weighting=ours)
        weight = normal(ROWS, draw=draw)
        yield from both(theirs, m.velocity, (weight * mine).sum(), (weight * found).sum())


def awm_trainer(cut: Cut, draw: torch.Generator) -> Pairs:
    """The same of Flow-Factory."""
    score = cut.function("AWMTrainer.compute_weighted_log_prob", flow_match_sigma=lambda t: (t / 1000).clamp(0, 1))
    for ours, theirs in WEIGHTINGS:
        m, weight = matched(draw), normal(ROWS, draw=draw)
        mine = matching_log_prob(mean_squared_error(m.velocity, m.target), m.sigma, weighting=ours)
        found = score(m.velocity, m.target, 1000 * m.sigma, theirs)
        yield from both(theirs, m.velocity, (weight * mine).sum(), (weight * found).sum())


def awm_script(cut: Cut, draw: torch.Generator) -> Pairs:
    """The clipped loss on it, off policy."""
    m = matched(draw)
    assert m.old is not None
    new, old = (matching_log_prob(mean_squared_error(v, m.target), m.sigma) for v in (m.velocity, m.old))
    own = train(advantage_max=1.0, loss_type="exp_first", train_timesteps=1)
    own.clip_range = 1e-2
    found = run(
        cut.statements("main", "advantages", "policy_loss"),
        config=Space(train=own),
        accelerator=Space(is_main_process=False),
        sample={"advantages": m.advantage[:, None], "log_probs": new[None], "old_log_probs": old[None]},
    )
    ours, _ = Awm(off_policy=True, clip=1e-2)(m)
    yield from both("loss", m.velocity, ours.mean(), found["policy_loss"])


def crd(cut: Cut, draw: torch.Generator) -> Pairs:
    """Centred distillation of one group, with either loss and with a temperature or none."""
    loss_of = cut.function("CRDTrainer._compute_crd_loss")
    losses: Any = (("square", "mse"), ("cross_entropy", "bce"))
    for loss, name in losses:
        for temperature in (None, 0.3):
            implicit, target = normal(ROWS, draw=draw).requires_grad_(), torch.rand(ROWS, generator=draw)
            own = Space(weight_temp=-1 if temperature is None else temperature, crd_loss_type=name, crd_beta=0.7)
            theirs = loss_of(own, target, target, implicit, implicit)
            ours = centred_distillation(
                implicit, target, torch.zeros(ROWS, dtype=torch.long), beta=0.7, loss=loss, temperature=temperature
            )
            yield from both(f"{name}, temperature {temperature}", implicit, ours.mean(), theirs)


def dgpo(cut: Cut, draw: torch.Generator) -> Pairs:
    """The group's gate, and the loss that it weighs."""
    m = matched(draw)
    assert m.reference is not None
    names = ("_compute_per_sample_preference", "_compute_group_dgpo_loss", "_compute_dsm_loss")
    methods = {name: cut.function(f"DGPOTrainer.{name}") for name in names}
    trainer = Space(dpo_beta=3.0, training_args=Space(group_size=4), _reduce_group_sums=lambda sums: sums.detach())
    for name, method in methods.items():
        setattr(trainer, name, partial(method, trainer))
    theirs = trainer._compute_group_dgpo_loss(
        m.reference,
        m.target,
        m.advantage,
        {"num_groups": 3, "local_group_indices": m.group},
        trainer._compute_dsm_loss(m.target, m.velocity),
    )
    error, reference = (mean_squared_error(v, m.target) for v in (m.velocity, m.reference))
    gate = group_gate(error, reference, m.advantage, m.group, beta=3.0)
    yield from both("loss", m.velocity, (gate * m.advantage * error).mean(), theirs)


def dpo_script(cut: Cut, draw: torch.Generator) -> Pairs:
    """flow_grpo's pairs: the better halves first."""
    m = matched(draw)
    half = ROWS // 2
    found = run(
        cut.statements("main", "theta_mse", "loss"),
        model_pred=m.velocity,
        model_pred_ref=m.reference,
        target=m.target,
        bsz=half,
        config=Space(train=Space(beta=5.0)),
        info=Info(),
    )
    pairs = torch.arange(half), torch.arange(half, ROWS)
    assert m.reference is not None
    ours, _ = diffusion_dpo(m.velocity, m.reference, m.target, *pairs, beta=5.0)
    yield from both("loss", m.velocity, ours.mean(), found["loss"])


def verl_dpo(cut: Cut, draw: torch.Generator) -> Pairs:
    """Pairs that follow each other."""
    m = matched(draw)
    assert m.reference is not None
    actor = Space(diffusion_loss=Space(dpo_beta=5.0))
    theirs, _ = cut.function("DPOLoss.compute_loss", Optional=None, DictConfig=None, DiffusionActorConfig=Space)(
        None, m.noise, m.clean, m.velocity, m.reference, torch.tensor([1.0, 0.0] * (ROWS // 2)), actor
    )
    ours, _ = diffusion_dpo(
        m.velocity, m.reference, m.target, torch.arange(0, ROWS, 2), torch.arange(1, ROWS, 2), beta=5.0
    )
    yield from both("loss", m.velocity, ours.mean(), theirs)


MATCHING = (
    loss_row(
        "Diffusion-DPO",
        FLOW_GRPO,
        "scripts/train_sd3_dpo.py",
        "main: theta_mse to loss",
        "preference_losses.diffusion_dpo",
        dpo_script,
    ),
    loss_row("Diffusion-DPO", VERL_OMNI, ALGOS, "DPOLoss.compute_loss", "preference_losses.diffusion_dpo", verl_dpo),
    loss_row("DiffusionNFT", VERL_OMNI, ALGOS, "DiffusionNFTLoss.compute_loss", "forward_losses.Nft", verl_nft),
    loss_row(
        "DiffusionNFT: optimality",
        VERL_OMNI,
        ALGOS,
        "DiffusionNFTLoss._advantage_to_reward_prob",
        "terms.optimality",
        reward_prob,
        gradient=False,
    ),
    loss_row(
        "DiffusionNFT",
        DIFFUSION_NFT,
        "scripts/train_nft_sd3.py",
        "main: advantages_clip to policy_loss",
        "forward_losses.Nft",
        nft_script,
    ),
    loss_row(
        "DiffusionNFT: decay",
        DIFFUSION_NFT,
        "scripts/train_nft_sd3.py",
        "return_decay",
        "forward_losses.old_decay",
        nft_decay,
        gradient=False,
    ),
    loss_row(
        "AWM: log-probability",
        AWM,
        "advantage_weighted_matching/scripts/train_sd3_awm.py",
        "compute_log_prob_awm",
        "terms.matching_log_prob",
        awm_log_prob,
    ),
    loss_row(
        "AWM: clipped loss",
        AWM,
        "advantage_weighted_matching/scripts/train_sd3_awm.py",
        "main: advantages to policy_loss",
        "forward_losses.Awm",
        awm_script,
    ),
    loss_row(
        "AWM: log-probability",
        FLOW_FACTORY,
        f"{FACTORY}/awm.py",
        "AWMTrainer.compute_weighted_log_prob",
        "terms.matching_log_prob",
        awm_trainer,
    ),
    loss_row(
        "CRD",
        FLOW_FACTORY,
        f"{FACTORY}/crd.py",
        "CRDTrainer._compute_crd_loss",
        "preference_losses.centred_distillation",
        crd,
    ),
    loss_row(
        "CRD: decay",
        FLOW_FACTORY,
        f"{FACTORY}/crd.py",
        "compute_decay",
        "forward_losses.old_decay",
        crd_decay,
        gradient=False,
    ),
    loss_row(
        "DGPO",
        FLOW_FACTORY,
        f"{FACTORY}/dgpo.py",
        "DGPOTrainer._compute_group_dgpo_loss",
        "preference_losses.group_gate",
        dgpo,
    ),
)
