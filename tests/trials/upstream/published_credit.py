"""Advantages and credit of other repositories beside ours, on rewards of several prompts."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace as Space
from typing import Any

import numpy as np
import torch
from published_cutting import Comparison, Cut, run
from published_steps import (
    BRANCH_GRPO,
    DANCE_GRPO,
    DDPO,
    FLOW_FACTORY,
    FLOW_GRPO,
    TP_GRPO,
    UNIRL,
    VERL_OMNI,
    Pairs,
    normal,
)
from torch import Tensor

from flowrl.advantages.normalise import aggregate, group_advantages, normalise, zero_variance_groups
from flowrl.advantages.shaping import RewardHistory, dcpo, dcpo_clip, update_history
from flowrl.credit.tp_grpo import TpGrpo
from flowrl.credit.trees import BranchGrpo
from flowrl.objectives.preference_losses import best_of_group, pairs_of_groups, reward_weights
from flowrl.trajectory import Sampled

DCPO = ("lime-RL/DCPO", "01787b0f61580961162faeb492defeb39f1eba53")
PROMPTS, GROUP = 5, 8
NUMBER = torch.arange(PROMPTS).repeat_interleave(GROUP)
NAMES = [f"prompt {number}" for number in NUMBER.tolist()]


def rewards(draw: torch.Generator) -> Tensor:
    """Rewards in float64; the first prompt's are all equal."""
    found = torch.rand(PROMPTS * GROUP, generator=draw, dtype=torch.float64)
    found[:GROUP] = 0.5
    return found


def tracker(cut: Cut, draw: torch.Generator) -> Pairs:
    """flow_grpo's tracker, for each of its kinds."""
    reward = rewards(draw)
    scopes: Any = (("group", False), ("global", True))
    for scope, wide in scopes:
        theirs = cut.function("PerPromptStatTracker")(wide).update(NAMES, reward.tolist())
        yield f"grpo, {scope}", group_advantages(reward, GROUP, scope), torch.tensor(theirs)

    def weights(kind: str) -> Tensor:
        return torch.tensor(cut.function("PerPromptStatTracker")().update(NAMES, reward.tolist(), type=kind))

    yield "rwr", reward_weights(reward, NUMBER, weights="raw"), weights("rwr")
    yield "sft", best_of_group(reward, NUMBER), weights("sft")
    winner, loser = pairs_of_groups(reward, NUMBER)
    pairs = torch.zeros_like(reward).index_fill(0, winner, 1.0).index_fill(0, loser, -1.0)
    yield "dpo, prompts that differ", pairs[GROUP:], weights("dpo")[GROUP:]


def zero_std(cut: Cut, draw: torch.Generator) -> Pairs:
    """Share of prompts without a signal."""
    reward = rewards(draw)
    share, _ = cut.function("calculate_zero_std_ratio")(NAMES, {"ori_avg": reward.numpy()})
    yield "share", zero_variance_groups(reward, GROUP).double().mean(), share


def ddpo_tracker(cut: Cut, draw: torch.Generator) -> Pairs:
    """DDPO's tracker with full statistics; its divisor is 1e-6 wider."""
    reward = rewards(draw)
    theirs = cut.function("PerPromptStatTracker", deque=lambda maxlen: [])(GROUP, GROUP)
    yield "advantages", group_advantages(reward, GROUP, eps=1e-6), torch.tensor(theirs.update(NAMES, reward.tolist()))


def verl_advantages(cut: Cut, draw: torch.Generator) -> Pairs:
    """With the std of the prompt, of the batch and of nothing; sample std."""
    reward = rewards(draw).float()
    advantage_of = cut.function("compute_flow_grpo_outcome_advantage", defaultdict=Lists, Optional=None)
    for scope, more in (("group", {"global_std": False}), ("global", {}), ("none", {"norm_adv_by_std_in_grpo": False})):
        theirs, _ = advantage_of(reward[:, None], np.array(NAMES), **more)
        yield scope, group_advantages(reward, GROUP, scope, correction=1), theirs[:, 0]  # type: ignore[arg-type]


def verl_nft(cut: Cut, draw: torch.Generator) -> Pairs:
    """The same of its DiffusionNFT."""
    reward = rewards(draw).float()
    advantage_of = cut.function("DiffusionNFTLoss._compute_group_advantages", defaultdict=Lists)
    for scope, wide in (("group", False), ("global", True)):
        theirs = advantage_of(reward, np.array(NAMES), True, wide)
        yield scope, group_advantages(reward, GROUP, scope, correction=1), theirs  # type: ignore[arg-type]


def verl_pairs(cut: Cut, draw: torch.Generator) -> Pairs:
    """Best and worst of each prompt."""
    reward = torch.rand(PROMPTS * GROUP, generator=draw)
    theirs = cut.function("DPOLoss.build_online_dpo_pair_indices", defaultdict=Lists)(
        uids=np.array(NAMES), scores=reward
    )
    yield "indexes", torch.stack(pairs_of_groups(reward, NUMBER), 1).flatten().tolist(), theirs


class Lists(dict[Any, list[Any]]):
    """`defaultdict(list)`."""

    def __init__(self, made: type[list[Any]]) -> None:
        super().__init__()

    def __missing__(self, key: Any) -> list[Any]:
        return self.setdefault(key, [])


def dance(cut: Cut, draw: torch.Generator) -> Pairs:
    """DanceGRPO's groups: sample std, eps 1e-8."""
    reward = rewards(draw).float()
    found = run(
        cut.statements("train_one_step", "n", "group_std"),
        samples={"rewards": reward},
        args=Space(num_generations=GROUP),
    )
    yield "advantages", group_advantages(reward, GROUP, eps=1e-8, correction=1), found["advantages"]


def unirl(cut: Cut, draw: torch.Generator) -> Pairs:
    """Its one function for groups, clipped."""
    reward, groups = rewards(draw).float(), [list(range(k, k + GROUP)) for k in range(0, PROMPTS * GROUP, GROUP)]
    for scope, wide in (("group", False), ("global", True)):
        theirs = cut.function("normalize_grouped", Optional=None)(reward, groups, clip_max=1.0, use_global_std=wide)
        ours = group_advantages(reward, GROUP, scope, eps=1e-8, correction=1).clamp(-1, 1)  # type: ignore[arg-type]
        yield scope, ours, theirs


def factory(name: str, how: str) -> Callable[[Cut, torch.Generator], Pairs]:
    """Flow-Factory's sums of two rewards; no prompt's rewards are all equal, whose std is 1e-6 there."""

    def compare(cut: Cut, draw: torch.Generator) -> Pairs:
        two = (
            torch.rand(2, PROMPTS * GROUP, generator=draw, dtype=torch.float64) * torch.tensor([[1.0], [5.0]]).double()
        )
        weights = torch.tensor([0.7, 0.3]).double()
        own = Space(
            collect_group_rewards=lambda *given: (dict(zip("ab", two.numpy(), strict=True)), NUMBER.numpy()),
            reward_weights={"a": 0.7, "b": 0.3},
            group_on_same_rank=False,
            group_size=GROUP,
            global_std=False,
            _build_weighted_sum_log_data=lambda *given: None,
            _build_gdpo_log_data=lambda *given: None,
            _to_local=torch.as_tensor,
        )
        own._global_mean_std = lambda values: cut.function("AdvantageProcessor._global_mean_std")(own, values)
        scopes = (False, True) if how == "sum" else (False,)
        for wide in scopes:
            own.global_std = wide
            theirs = cut.function(f"AdvantageProcessor.{name}")(own, [], {}, False)
            scope = "global" if wide else "group"
            yield scope, aggregate(two, NUMBER, weights, how, scope=scope, eps=0.0), theirs  # type: ignore[arg-type]

    return compare


def factory_pairs(cut: Cut, draw: torch.Generator) -> Pairs:
    """Best and worst of each prompt."""
    reward = torch.rand(PROMPTS * GROUP, generator=draw)
    samples = [
        Space(unique_id=int(n), advantage=float(r), at=k) for k, (n, r) in enumerate(zip(NUMBER, reward, strict=True))
    ]
    chosen = cut.function(
        "DPOTrainer._form_pairs_from_advantages", DPOTrainer=Space(_get_advantage=lambda one: one.advantage)
    )(samples)
    yield "indexes", torch.stack(pairs_of_groups(reward, NUMBER), 1).tolist(), [[a.at, b.at] for a, b in chosen]


def dcpo_advantages(cut: Cut, draw: torch.Generator) -> Pairs:
    """Three visits, with the release's own merge of variances; it divides by the std alone."""
    history, memory = RewardHistory.start(PROMPTS, merge="release"), [[0, 0.0, 0.0] for _ in range(PROMPTS)]
    advantage_of = cut.function(
        "get_mean_std", "compute_dcpo_outcome_advantage", defaultdict=Lists, print=print_nothing
    )
    for visit in range(3):
        reward = torch.rand(PROMPTS * GROUP, generator=draw, dtype=torch.float64)
        times, mean, std = (np.array([memory[n][k] for n in NUMBER.tolist()]) for k in range(3))
        found = advantage_of(reward[:, None], torch.ones(len(reward), 1), np.array(NAMES), times, mean, std)
        history = update_history(history, reward, NUMBER)
        own = group_advantages(reward, GROUP, eps=0.0, correction=1)
        yield f"visit {visit}", dcpo(reward, own, NUMBER, history, eps=0.0), found["advantages"][:, 0]
        for n in range(PROMPTS):
            name = f"prompt {n}"
            memory[n] = [visit + 1, float(found["uid2mean"][name]), float(found["uid2std"][name])]


def dcpo_bounds(cut: Cut, draw: torch.Generator) -> Pairs:
    """Bounds of the ratio by an action's probability."""
    probability = torch.rand(200, generator=draw).clamp(min=1e-4)
    theirs = cut.function("get_clip_low_high")(probability.log(), 0.16, 0.2, 10)
    yield from zip(("low", "high"), dcpo_clip(probability, eps_low=0.16, eps_high=0.2), theirs, strict=True)


def print_nothing(*given: Any) -> None:
    """Their function prints every group."""


def trajectories(count: int, steps: int) -> Sampled:
    """Trajectories with the ODE's image after every step: what TP-GRPO's rewards are of."""
    rows = torch.arange(count * steps)
    sample, step = rows // steps, rows % steps
    after = torch.cat([torch.cat([torch.tensor([-1]), rows[sample == k]]) for k in range(count)])
    return Sampled(
        states=torch.zeros(1, 1),
        source=torch.zeros_like(rows),
        produced=torch.zeros_like(rows),
        step=step,
        sample=sample,
        group=torch.zeros_like(rows),
        parent=torch.where(step == 0, -1, rows - 1),
        log_prob=torch.zeros(len(rows)),
        finished=torch.zeros(len(after), 1),
        finished_group=torch.zeros_like(after),
        finished_after=after,
    )


def turning(cut: Cut, draw: torch.Generator) -> Pairs:
    """The rewards of steps, without the constraint and with it, balanced and not."""
    code = cut.statements("main", "delta_global", "R_t")
    for constrained, balanced in ((False, False), (True, False), (True, True)):
        count, steps = 12, 6
        values = torch.rand(count, steps + 1, generator=draw)
        own = Space(
            turn_on_bonus_global_step=0,
            apply_first_step_bonus=True,
            use_balanced_bonus=balanced,
            select_first_step_only_from_consistent_trajectory=constrained,
            use_delta_global=True,
            select_inter_step_only_from_consistent_trajectory=constrained,
            take_delta_global_as_main=False,
            select_only_positive_intermediate_step=False,
            propagate_bonus_to_future_steps=False,
            indicator_wo_delta_global_constraint=False,
            use_sde_minus_rt=True,
            drop_original_reward_when_having_bonus=True,
            eta=1.0,
        )
        results = [{"sde_steps_count": k, "rewards": {"avg": values[:, k]}} for k in range(1, steps + 1)]
        found = run(
            code,
            config=own,
            global_step=1,
            batch_size=count,
            sample={
                "rewards": {"avg": values[:, -1]},
                "ode_rewards": {"avg": values[:, 0]},
                "intermediate_results": results,
            },
            sde_reward=values[:, -1],
            ode_reward=values[:, 0],
        )
        credit = TpGrpo(constrained=constrained, balance=balanced)(trajectories(count, steps), values.reshape(1, -1))
        name = f"constrained {constrained}, balanced {balanced}"
        both = [credit.raw.reshape(count, steps), torch.stack(found["timestep_rewards"], 1)]
        if balanced:  # of turning points of one trajectory theirs keeps any, ours the earliest: how many is the same
            gain = values[:, 1:] - values[:, :-1]
            both = [(rewarded != gain).sum(1) for rewarded in both]
        yield name, both[0], both[1]


def tree(cut: Cut, draw: torch.Generator) -> Pairs:
    """A tree that splits twice into three, by the mean of its leaves and by the density of edges; sample std."""
    node_of = cut.function("TreeNode")
    for weighting, by_edge in (("uniform", False), ("edge", True)):
        root = node_of("root", None)
        rows: list[Any] = []
        nodes: list[Any] = []
        levels: list[list[Any]] = [[root]]
        for step, children in enumerate((3, 1, 3, 1)):
            levels.append([])
            for above in levels[step]:
                for _ in range(children):
                    node = node_of(f"{len(nodes)}", None, parent=above, step=step)
                    node.log_prob = normal(1, draw=draw)[0]
                    above.add_child(node)
                    rows.append((step, nodes.index(above) if above in nodes else -1, float(node.log_prob)))
                    nodes.append(node)
                    levels[-1].append(node)
        reward = torch.rand(len(levels[-1]), generator=draw)
        scores_of = cut.function("compute_node_rewards_from_leaves", main_print=print_nothing)
        _, by_depth = scores_of(root, reward, levels[-1], use_prob_weighted=by_edge)
        cut.function("compute_hierarchical_advantages_by_depth", main_print=print_nothing)(by_depth)
        step_M, parent_M = (torch.tensor([row[k] for row in rows]) for k in (0, 1))
        ends = torch.tensor([nodes.index(leaf) for leaf in levels[-1]])
        zero = torch.zeros_like(step_M)
        sampled = Sampled(
            states=torch.zeros(1, 1),
            source=zero,
            produced=zero,
            step=step_M,
            sample=zero,
            group=zero,
            parent=parent_M,
            log_prob=torch.tensor([row[2] for row in rows]),
            finished=torch.zeros(len(ends), 1),
            finished_group=torch.zeros_like(ends),
            finished_after=ends,
        )
        credit = BranchGrpo(weighting=weighting)(sampled, reward[None])  # type: ignore[arg-type]
        advantage = normalise(credit.raw, credit.norm, eps=1e-8, correction=1, min_std=1e-6)
        yield f"rewards, {weighting}", credit.raw[0], torch.stack([node.reward for node in nodes])
        yield f"advantages, {weighting}", advantage[0], torch.stack([node.advantage for node in nodes])


def _credit(
    method: str, source: tuple[str, str], file: str, function: str, ours: str, compare: Any, **more: Any
) -> Comparison:
    return Comparison(method, *source, file, function, ours, compare, **more)


ALGOS = "verl_omni/trainer/diffusion/diffusion_algos.py"
GROUPS = "advantages.normalise.group_advantages"
PAIRS = "objectives.preference_losses.pairs_of_groups"
PROCESSOR = "src/flow_factory/advantage/advantage_processor.py"
CREDITS = (
    _credit(
        "advantages of Flow-GRPO, RWR, SFT, DPO",
        FLOW_GRPO,
        "flow_grpo/stat_tracking.py",
        "PerPromptStatTracker.update",
        GROUPS,
        tracker,
    ),
    _credit(
        "prompts without a signal",
        FLOW_GRPO,
        "scripts/train_sd3.py",
        "calculate_zero_std_ratio",
        "advantages.normalise.zero_variance_groups",
        zero_std,
    ),
    _credit(
        "advantages of DDPO", DDPO, "ddpo_pytorch/stat_tracking.py", "PerPromptStatTracker.update", GROUPS, ddpo_tracker
    ),
    _credit(
        "advantages of Flow-GRPO, Dr.GRPO",
        VERL_OMNI,
        ALGOS,
        "compute_flow_grpo_outcome_advantage",
        GROUPS,
        verl_advantages,
    ),
    _credit(
        "advantages of DiffusionNFT", VERL_OMNI, ALGOS, "DiffusionNFTLoss._compute_group_advantages", GROUPS, verl_nft
    ),
    _credit("pairs of online DPO", VERL_OMNI, ALGOS, "DPOLoss.build_online_dpo_pair_indices", PAIRS, verl_pairs),
    _credit(
        "advantages of DanceGRPO",
        DANCE_GRPO,
        "fastvideo/train_grpo_flux.py",
        "train_one_step: n to group_std",
        GROUPS,
        dance,
    ),
    _credit("advantages of groups", UNIRL, "unirl/algorithms/normalizers.py", "normalize_grouped", GROUPS, unirl),
    _credit(
        "several rewards: weighted sum",
        FLOW_FACTORY,
        PROCESSOR,
        "AdvantageProcessor.compute_weighted_sum",
        "advantages.normalise.aggregate",
        factory("compute_weighted_sum", "sum"),
    ),
    _credit(
        "several rewards: GDPO",
        FLOW_FACTORY,
        PROCESSOR,
        "AdvantageProcessor.compute_gdpo",
        "advantages.normalise.aggregate",
        factory("compute_gdpo", "gdpo"),
    ),
    _credit(
        "pairs of online DPO",
        FLOW_FACTORY,
        "src/flow_factory/trainers/dpo.py",
        "DPOTrainer._form_pairs_from_advantages",
        PAIRS,
        factory_pairs,
    ),
    _credit(
        "DCPO: smooth advantages",
        DCPO,
        "verl/trainer/ppo/core_algos.py",
        "compute_dcpo_outcome_advantage",
        "advantages.shaping.dcpo",
        dcpo_advantages,
    ),
    _credit(
        "DCPO: bounds of the ratio",
        DCPO,
        "verl/trainer/ppo/core_algos.py",
        "get_clip_low_high",
        "advantages.shaping.dcpo_clip",
        dcpo_bounds,
    ),
    _credit(
        "TP-GRPO: turning points",
        TP_GRPO,
        "scripts/my_train_sd3_fast_with_op3.py",
        "main: delta_global to R_t",
        "credit.tp_grpo.TpGrpo",
        turning,
    ),
    _credit(
        "BranchGRPO: rewards of nodes",
        BRANCH_GRPO,
        "fastvideo/train_branchgrpo_flux.py",
        "compute_node_rewards_from_leaves",
        "credit.trees.BranchGrpo",
        tree,
    ),
    _credit(
        "BranchGRPO: advantages by depth",
        BRANCH_GRPO,
        "fastvideo/train_branchgrpo_flux.py",
        "compute_hierarchical_advantages_by_depth",
        "advantages.normalise.normalise",
        tree,
    ),
)
