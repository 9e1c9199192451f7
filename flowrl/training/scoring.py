"""Rewards of an iteration's images, asked for as the images are finished, and what to do when rewards fail.

    scoring = Scoring(loop, batch)
    for each piece of the rollout: scoring.add(latents, group, numbers)
    output = scoring.result()

Rewards that wait for another program (a server, a judge) are asked in a background thread while the next images are
sampled. Pieces and their order do not depend on who waits, so that the numbers do not either.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flowrl.config.rewards import RewardConfig
from flowrl.config.train import Geometry, TrainConfig
from flowrl.rewards import RewardInputs, RewardOutput, to_uint8
from flowrl.rewards.compose import WeightedSum
from flowrl.rewards.outputs import joined
from flowrl.training.prompting import reward_inputs

if TYPE_CHECKING:
    from flowrl.training.loop import Batch, Loop

MERGED = ("sum", "geometric", "harmonic")  # ways of reward_aggregation that make one number of an image's rewards
WINDOW = 10  # iterations over which failed images are counted
_SCORED_AT_ONCE = 96  # images that are decoded and scored in one piece where rewards judge them one by one
_CLIPS_AT_ONCE = 12  # likewise of videos, which are many images each
_PENDING = 64  # pieces on their way at most: a slow reward holds the rollout up instead of filling the memory


class Scoring:
    """The rewards of one iteration; see the module."""

    def __init__(self, loop: Loop, batch: Batch) -> None:
        self.loop, self.batch = loop, batch
        self.whole_groups = loop.reward.whole_groups
        self.waiting: list[tuple[Tensor, Tensor, list[int]]] = []  # images of groups that are not complete
        self.pending: list[Callable[[], RewardOutput]] = []
        self.done: list[RewardOutput] = []

    @torch.no_grad()
    def add(self, latents: Tensor, group: Tensor, numbers: Sequence[int]) -> None:
        """Takes finished latents `[F, *latent]` of groups `[F]`; `numbers` name the images."""
        with self.loop.clock("reward"):
            self._add(latents, group, numbers)

    def _add(self, latents: Tensor, group: Tensor, numbers: Sequence[int]) -> None:
        self.loop.counters["images"] += len(latents) * self.loop.run.world
        self.waiting.append((latents, group.cpu(), list(numbers)))
        if not self.whole_groups:
            self._start(sum(len(part[2]) for part in self.waiting))
            return
        together = torch.cat([part[1] for part in self.waiting])
        others = torch.nonzero(together != together[-1]).flatten()
        begun = len(together) - (int(others[-1]) + 1 if len(others) else 0)  # images of the group that came last
        self._start(len(together) - (begun if begun % self.loop.config.group_size else 0))

    def _start(self, count: int) -> None:
        """Decodes and scores the first `count` images of those that wait."""
        if not count:
            return
        latents = torch.cat([part[0] for part in self.waiting])
        group = torch.cat([part[1] for part in self.waiting])
        numbers = [number for part in self.waiting for number in part[2]]
        self.waiting = [(latents[count:], group[count:], numbers[count:])] if count < len(numbers) else []
        size = count if self.whole_groups else _CLIPS_AT_ONCE if self.loop.pipeline.fps else _SCORED_AT_ONCE
        for first in range(0, count, size):
            piece = slice(first, min(first + size, count))
            self._ask(latents[piece], group[piece], numbers[piece])

    def _ask(self, latents: Tensor, group: Tensor, numbers: list[int]) -> None:
        loop, batch = self.loop, self.batch
        prompts = [batch.prompts[int(row)] for row in batch.local(group)]
        inputs = reward_inputs(
            loop.pipeline, prompts, loop.pipeline.decode(latents), group=group, numbers=numbers,
            iteration=batch.iteration,
        )  # fmt: skip
        if loop.trained_rewards:
            kept = replace(inputs, videos=None, fps=None, source_images=None, reference_images=None)
            loop.seen.append(replace(kept, images=inputs.images.detach().cpu()))
        if loop.reward.waits:
            if len(self.pending) - len(self.done) >= _PENDING:
                self.done.append(self.pending[len(self.done)]())
            self.pending.append(loop.reward.start(inputs, loop.executor))
        else:
            self.done.append(loop.reward(inputs))

    @torch.no_grad()
    def result(self) -> RewardOutput:
        """All rewards in the order in which the images were added; waits for those on their way."""
        self._start(sum(len(part[2]) for part in self.waiting))
        self.done += [get() for get in self.pending[len(self.done) :]]
        output = joined(self.done)
        self.loop.errors.update(output.errors)
        return output


def reward_row(loop: Loop, values: Tensor, valid: Tensor, parts: Mapping[str, Tensor]) -> dict[str, Any]:
    """Means for the log over the images of all processes, from this process's rewards `[n]`.

    Images that failed take no part; their share is `invalid_ratio`, and `reward/<key>/invalid_ratio` for each reward.
    """
    run = loop.run
    mine = values.to(run.device)
    values, valid = run.gather(mine), run.gather(valid.to(run.device))
    known = values[valid].double()
    row: dict[str, Any] = {"reward": float(known.mean()), "reward_std": float(known.std(correction=0))}
    for name in _everywhere(loop, parts):
        part = run.gather(parts[name].to(run.device) if name in parts else torch.full_like(mine, torch.nan))
        numbers = part[~part.isnan()].double()
        if len(numbers):
            row[name] = float(numbers.mean())
        if name.count("/") == 1 and len(numbers) < len(part):
            row[f"{name}/invalid_ratio"] = 1 - len(numbers) / len(part)
    return row | {"invalid_ratio": float((~valid).double().mean())}


def _everywhere(loop: Loop, parts: Mapping[str, Tensor]) -> list[str]:
    """The names of all processes' parts: where a server could not be reached, a process lacks some."""
    if loop.run.world == 1:
        return list(parts)
    from accelerate.utils import gather_object

    return list(dict.fromkeys(gather_object(list(parts))))


def trained_channels(loop: Loop, output: RewardOutput) -> tuple[list[Tensor], list[float]]:
    """Rewards as advantages take them, and their weights now: one merged channel, or one for each reward."""
    if loop.config.reward_aggregation in MERGED:
        return [output.values], [1.0]
    now = zip(loop.reward.terms, loop.reward.weights_at(loop.iteration), strict=True)
    used = [(term.key, weight) for term, weight in now if term.weight]
    return [output.parts[f"reward/{key}"] for key, _ in used], [weight for _, weight in used]


def make_executor() -> ThreadPoolExecutor:
    """Threads for rewards that wait; few, since each asks many questions at once by itself."""
    return ThreadPoolExecutor(max_workers=4, thread_name_prefix="reward")


def check_rewards(config: TrainConfig) -> None:
    """Refuses settings of rewards that nothing reads: what the way of aggregating them does not, and those of sums
    for rewards that are only measured.

    Raises:
        ValueError: names the setting and what to change.
    """
    for reward in config.eval.rewards:
        default = RewardConfig(name="unused")
        for key in ("weight", "schedule", "clip", "gate"):
            if getattr(reward, key) != getattr(default, key):
                raise ValueError(
                    f"{key} is set for eval.rewards {reward.name or reward.function}, but an evaluation reports each "
                    f"reward as it is and adds up none: remove it"
                )
    how = config.reward_aggregation
    if how in MERGED:
        return
    if any(reward.gate is not None for reward in config.rewards):
        raise ValueError(
            f"a gate changes the total of an image, and reward_aggregation={how} makes none: set it to "
            f"{', '.join(MERGED)}, or remove the gate"
        )
    if config.reward_partial != "drop":
        raise ValueError(
            f"reward_partial={config.reward_partial} shares out weights in a total, and reward_aggregation={how} makes "
            f"none: set reward_aggregation to one of {', '.join(MERGED)}, or reward_partial to drop"
        )


def check_groups(config: TrainConfig, geometry: Geometry, reward: WeightedSum) -> None:
    """Refuses groups that are spread over processes where a reward looks at whole groups.

    Raises:
        ValueError: with the numbers.
    """
    if reward.whole_groups and geometry.images_per_process % config.group_size:
        raise ValueError(
            f"reward {reward.name} compares the images of a group, but {geometry.images_per_process} images a process "
            f"are no whole groups of {config.group_size}: make prompts_per_step a multiple of the number of processes"
        )


def failures_message(errors: Counter[str]) -> str:
    """Why images failed, most frequent first: "remote/timeout 12, geneval/missing_field 3"."""
    return ", ".join(f"{word} {count}" for word, count in errors.most_common()) or "no reason was given"


def too_many_failures(history: list[tuple[int, int]], limit: float) -> bool:
    """Whether the failed images of the last `WINDOW` iterations exceed `limit` of that many iterations' images.

    Args:
        history: (failed, all) images of iterations, oldest first.
        limit: share in [0, 1].
    """
    recent = history[-WINDOW:]
    failed, scored = sum(f for f, _ in recent), sum(n for _, n in recent)
    return failed > limit * scored * WINDOW / len(recent)


def learned(loop: Loop) -> dict[str, float]:
    """Lets a reward that is trained along learn from this iteration's images of all processes; numbers for the log."""
    metrics: dict[str, float] = {}
    seen, loop.seen = loop.seen, []
    if not seen:
        return metrics
    from accelerate.utils import gather_object

    pixels = to_uint8(torch.cat([inputs.images for inputs in seen]))
    columns = [
        (prompt, metadata, group, number)
        for inputs in seen
        for prompt, metadata, group, number in zip(
            inputs.prompts, inputs.metadata, inputs.group_ids.tolist(), inputs.sample_ids.tolist(), strict=True
        )
    ]
    rows = list(zip(columns, pixels, strict=True))
    if loop.run.world > 1:
        rows = gather_object(rows)
    rows.sort(key=lambda row: row[0][3])  # by number, whichever process made it
    images = torch.stack([torch.from_numpy(image) for _, image in rows]).permute(0, 3, 1, 2).float() / 255
    inputs = RewardInputs(
        prompts=[row[0][0] for row in rows], images=images.to(loop.run.device), metadata=[row[0][1] for row in rows],
        group_ids=torch.tensor([row[0][2] for row in rows]), sample_ids=torch.tensor([row[0][3] for row in rows]),
        iteration=loop.iteration,
    )  # fmt: skip
    for key, reward in loop.trained_rewards.items():
        metrics |= {f"reward/{key}/{name}": value for name, value in reward.learn(inputs).items()}
    return metrics
