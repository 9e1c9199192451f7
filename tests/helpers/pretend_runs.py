"""Shipped tiny configurations on a pretend GPU (`pretend_gpu.py`): as short as they can be, with everything they do.

Two iterations of two prompts, forward and backward, with evaluation, LoRA and checkpoint; `toy_run` with the toy
pipeline and its rewards in the place of the embedded models, which is ten times as fast and goes through the same code,
in four steps of the six that most configurations have.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import jaxtyping
import torch
from pretend_gpu import Findings, Kind, pretend_gpu
from toy_pipeline import write_pairs, write_toy

from flowrl.config.strict_yaml import dotted_items, read_mapping
from flowrl.config.train import find_config, load_config
from flowrl.pipelines import PIPELINES
from flowrl.rewards import REWARDS
from flowrl.session.preflight import preflight
from flowrl.training.learner import GradientSum
from flowrl.training.resume_check import inputs_of
from flowrl.training.run import Run
from flowrl.training.stages import Stages

SHORT = (
    "num_iterations=2", "prompts_per_step=2", "group_size=4", "micro_batch_size=4", "eval_every=2",
    "checkpoint_every=2", "eval.num_prompts=1", "eval.num_steps=1", "eval.num_images=1", "eval.samples_per_prompt=1",
    "eval.initial=false", "threads=1", "progress=false", "logging.tensorboard=false", "pipeline.device=auto",
)  # fmt: skip
_GROUPS = {
    "tiny_best_of_n": ("best_of=2",),
    "tiny_branch_grpo": ("group_size=16",),
    "tiny_branch_grpo_pruned": ("group_size=16",),
    "tiny_dense_grpo_calibrated": ("sampler.calibration.iterations=1",),
    "tiny_nft_reused": ("updates_per_rollout=2",),
    "tiny_opd": ("sampler.num_steps=4",),
    "tiny_opd_off_policy": ("sampler.num_steps=4",),
    "tiny_recommended": ("updates_per_rollout=2",),
    "tiny_tempflow": ("credit.branches=2",),
    "tiny_tree_grpo": ("group_size=9", "micro_batch_size=3"),
}
"""Groups that a configuration's way of sampling can be divided into."""
_FEWER = (
    "prompts_per_step=1", "group_size=2", "micro_batch_size=1", "sampler.num_steps=3",
    "sampler.sde_window_range=[0, 2]", "eval.num_prompts=1", "eval.num_steps=1",
)  # fmt: skip
_FEW = (*_FEWER, "num_iterations=1", "eval_every=1")
_FEW_FORWARD = (*_FEW, "updates_per_rollout=1", "sampler.sde_window_range=null", "times.count=1")
OTHERS: dict[str, tuple[str, ...]] = {
    "tiny_adversarial": (*_FEWER, "rewards.0.options.pretrain_steps=1", "rewards.0.options.steps_per_iteration=1"),
    "tiny_adversarial_fixed": (*_FEW, "rewards.0.options.pretrain_steps=1"),
    "tiny_edit_r1": _FEW,
    "tiny_kontext_grpo": _FEW,
    "tiny_kontext_recommended": _FEW_FORWARD,
    "tiny_pairwise": _FEW,
    "tiny_pref_grpo_flex": _FEW,
    "tiny_pointwise_noisy": _FEW,
    "tiny_sd15_grpo": _FEW,
    "tiny_sd15_recommended": _FEW_FORWARD,
    "tiny_wan_grpo": _FEW,
    "tiny_wan_recommended": _FEW_FORWARD,
}
"""What makes configurations short that the toy pipeline cannot stand in for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Watched:
    """A run on a pretend GPU.

    Attributes:
        findings: what its device says of it.
        waits: of each micro-batch that follows another one of the same update, from that one's backward pass to the end
            of its own.
        places: where the last of them waited.
        total: all waits of the last iteration over its micro-batches.
        stages: waits of the last iteration by stage, "" for none of them.
    """

    findings: Findings
    waits: list[int]
    places: Counter[str]
    total: float
    stages: Counter[str]


@contextmanager
def in_short() -> Iterator[None]:
    """One thread, as small tensors are slower on several; shapes unchecked, which pretended tensors make slow.

    Shapes are checked where the same recipes run on the CPU.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        yield
    finally:
        torch.set_num_threads(before)
        jaxtyping.config.update("jaxtyping_disable", False)


def watched_run(name: str, folder: Path, kind: Kind, *overrides: str) -> Watched:
    """Trains a configuration of ours for two iterations; `overrides` come after those that make it short."""
    config = load_config(find_config(name), (*SHORT, *overrides))
    ready, marks, begun = preflight(config), list[tuple[GradientSum, int]](), [0]
    add, begin, turn = GradientSum.add, Stages.begin, Stages._turn_to
    stages, counted = Counter[str](), [0]
    with in_short(), pretend_gpu(kind) as findings:

        def watched_add(self: GradientSum, loss: torch.Tensor) -> None:
            add(self, loss)
            marks.append((self, len(findings.waits)))

        def watched_begin(self: Stages) -> None:
            begin(self)
            stages.clear()
            counted[0] = len(findings.waits)

        def watched_turn(self: Stages, stage: str) -> None:
            stages[self._stage] += len(findings.waits) - counted[0]
            counted[0] = len(findings.waits)
            turn(self, stage)

        def watched_log(self: Run, row: Any) -> None:
            begun.append(len(findings.waits))

        (folder / "run").mkdir()
        run = Run(folder / "run", config, name=name, inputs=inputs_of(config, ready.prompts), resumed=False)
        with (
            mock.patch.object(GradientSum, "add", watched_add), mock.patch.object(Run, "log", watched_log),
            mock.patch.object(Stages, "begin", watched_begin), mock.patch.object(Stages, "_turn_to", watched_turn),
        ):  # fmt: skip
            assert ready.recipe.main(ready, run)
    assert (folder / "run" / "lora").is_dir()
    steps = [(before, after) for (one, before), (same, after) in pairwise(marks) if one is same]
    last = [mark for _, mark in marks if mark > begun[-3]]  # rows: of two iterations and of the evaluation at the end
    return Watched(
        findings=findings, waits=[after - before for before, after in steps],
        places=Counter(findings.waits[slice(*steps[-1])]) if steps else Counter(),
        total=(begun[-2] - begun[-3]) / max(1, len(last)), stages=+stages,
    )  # fmt: skip


def differences(name: str) -> dict[str, Any]:
    """In what a short run of a configuration differs from `tiny_grpo_geneval`'s, but for rewards; by dotted key."""
    own, base = (
        dict(dotted_items(asdict(load_config(find_config(one), (*SHORT, *_GROUPS.get(one, ()))))))
        for one in (name, "tiny_grpo_geneval")
    )
    return {key: value for key, value in own.items() if key != "rewards" and base.get(key) != value}


def settings_of(name: str) -> list[str]:
    """What a configuration sets itself, as overrides, but for its rewards and how many images it draws."""
    left_out = ("base", "rewards", "prompts_per_step", "group_size", "best_of")
    written = read_mapping(find_config(name))
    return [f"{key}={json.dumps(value)}" for key, value in dotted_items(written) if key not in left_out]


def with_rewards_of(name: str, *others: str) -> str:
    """The rewards of several configurations, each of them once, as an override."""
    found = dict[str, Any]()
    for one in (name, *others):
        for reward in read_mapping(find_config(one))["rewards"]:
            found.setdefault(repr((reward["name"], reward.get("options"))), {**reward, "label": f"r{len(found)}"})
    return f"rewards={json.dumps([*found.values()])}"


def toy_run(name: str, folder: Path, kind: Kind, *others: str) -> Watched:
    """`watched_run` of a configuration of family sd3 on the toy pipeline, with what others set besides."""
    path = write_toy(folder)
    rewards = (
        f"{{name: smooth_brightness, weight: 0.75}}, {{file: {folder}/toy_rewards.py, function: redness, weight: 0.25}}"
    )
    own = load_config(find_config(name))
    recipe, fewer = own.recipe, list[str]()
    grown = own.credit.method in ("branch_grpo", "tree_grpo")  # at steps that the configuration names
    if own.sampler.num_steps == 6 and not grown:  # of four, two or three are trained: a step follows another one
        first, end = own.sampler.sde_window_range or (0, 0)
        fewer = ["sampler.num_steps=4", *([f"sampler.sde_window_range=[{first // 2}, {min(end, 3)}]"] if end else [])]
    if recipe == "grpo":
        fewer += ["micro_batch_size=8"]
    elif recipe == "forward" or own.times.count > 4:
        fewer += ["times.count=2"]
    elif recipe == "backprop":
        rewards = "{name: smooth_brightness}"
    if name == "tiny_grpo_geneval":
        fewer += ["eval.initial=true"]  # as one run is enough for what the evaluation at the end does too
    if "tiny_real" in (name, *others):  # of verdicts
        rewards = f"{{file: {folder}/toy_rewards.py, function: success}}"
    for other in others:
        fewer += [*settings_of(other), *more_overrides(other, folder, 2)]
    with (
        mock.patch.dict(PIPELINES, {"sd3": "toy_pipeline"}),
        mock.patch.dict(REWARDS, {"smooth_brightness": "toy_pipeline:SmoothBrightness"}),
    ):
        return watched_run(
            name, folder, kind, "pipeline.model=toy", f"prompts.train={path.parent}/prompts.txt", "eval.rewards=[]",
            f"prompts.eval={path.parent}/prompts.txt", f"rewards=[{rewards}]", *fewer, *more_overrides(name, folder, 2),
        )  # fmt: skip


def more_overrides(name: str, folder: Path, size: int) -> tuple[str, ...]:
    """What a configuration needs besides: groups that a tree fits, images and pairs of them `size` pixels wide."""
    if name == "tiny_dpo_offline":
        write_pairs(folder / "pairs", size)
        return ("group_size=2", f"objective.options.pairs={folder}/pairs")
    if name == "tiny_sft":
        write_pairs(folder / "scenes", size)
        return (f"objective.options.images={folder}/scenes",)
    return _GROUPS.get(name, ())


def said(name: str, watched: Watched) -> str:
    """A line about a run, and one for each fault."""
    most = max(watched.waits, default=0)
    return "\n".join([
        f"{name:32} {len(watched.findings.faults)} faults, at most {most} waits for the device per micro-batch, "
        f"{watched.total:.1f} with all else of an iteration",
        *(f"    {fault}" for fault in watched.findings.faults),
    ])  # fmt: skip
