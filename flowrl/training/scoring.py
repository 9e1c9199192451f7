"""Rewards of an iteration's images, computed as the images are finished.

    with scorer.start(batch) as scoring:
        for each piece of the rollout: scoring.add(latents, group, numbers)
        output = scoring.result()

Rewards that wait for another program (a server, a judge) are asked in a background thread while the next images are
sampled; on CUDA decoding and all other rewards go on beside the sampling too (`scored_beside`). Pieces and their order
do not depend on who waits, so that the numbers do not either.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from flowrl.config.rewards import RewardConfig
from flowrl.config.train import Geometry, TrainConfig
from flowrl.media.kept import LATEST
from flowrl.pipelines import Pipeline
from flowrl.rewards import RewardInputs, RewardOutput, TrainedReward, asks_people, to_uint8
from flowrl.rewards.base.outputs import join_outputs, move_output
from flowrl.rewards.compose import WeightedSum
from flowrl.rewards.judges.call_limits import USAGE, usage_row
from flowrl.rewards.serving.server import open_socket
from flowrl.rewards.votes.reward import VotesReward
from flowrl.runtime.placement import sent
from flowrl.training.beside import Beside
from flowrl.training.draws import Batch
from flowrl.training.processes.devices import on_main
from flowrl.training.prompting import reward_inputs
from flowrl.training.run import Run
from flowrl.training.stages import Stages
from flowrl.training.watchdog import Look, diversity_of, look_at, new_history, stop_on_broken

MERGED = ("sum", "geometric", "harmonic")  # ways of reward_aggregation that make one number of an image's rewards
_PENDING = 64  # most pieces in flight: a slow reward holds the rollout up instead of filling the memory


def scored_at_once(*, videos: bool) -> int:
    """Images to decode and score in one piece if rewards judge them one by one; a clip is many of them."""
    return 12 if videos else 96


class Scorer:
    """The rewards of a run: asks them, keeps what jointly trained ones learn from, and the reasons of failures."""

    def __init__(
        self, run: Run, pipeline: Pipeline, reward: WeightedSum, *, group_size: int, counters: dict[str, Any],
        stages: Stages, beside: bool, askers: int = 4,
    ) -> None:  # fmt: skip
        """`counters` are the run's (`images` is counted here); `beside` says that pieces are scored in a thread,
        `askers` how many rewards may wait for another program at a time.
        """
        self.run, self.pipeline, self.reward, self.group_size = run, pipeline, reward, group_size
        self.counters, self.stages, self.beside = counters, stages, beside
        self.trained = {
            term.key: cast(TrainedReward, term.reward) for term in reward.terms if term.reward.kind == "adversarial"
        }
        # Few threads, since each reward asks many questions at once by itself.
        self.executor = ThreadPoolExecutor(max_workers=askers, thread_name_prefix="reward")
        self.seen: list[RewardInputs] = []  # this iteration's images, for rewards that learn
        self.errors: Counter[str] = Counter()  # why this iteration's images failed, on this process
        self.looks: list[tuple[Tensor, Look]] = []  # at this iteration's images, with their groups, on this process
        self.latest: dict[int, Tensor] = {}  # the first image of some groups of this iteration, on this process
        self.reward_B: Tensor | None = None  # this iteration's rewards, of all processes
        counters.setdefault("watch", new_history())
        USAGE.take()  # questions from before the run are not among its costs

    def restore(self, states: Mapping[str, Any]) -> None:
        """Restores what jointly trained rewards had learned; one added since has nothing to restore."""
        for key in self.trained.keys() & states.keys():
            self.trained[key].restore(states[key])

    def begin(self) -> None:
        """Forgets the iteration before."""
        self.errors.clear()
        self.looks.clear()
        self.latest.clear()
        self.reward_B = None

    def start(self, batch: Batch) -> Scoring:
        """Begins to score a batch."""
        return Scoring(self, batch)

    def inputs(
        self, batch: Batch, decoded: Tensor, group: Tensor, numbers: Sequence[int], sounds: Tensor | None = None
    ) -> RewardInputs:
        """The inputs of rewards for decoded images of groups `[b]`."""
        prompts, now = batch.asked.prompts_of(group), batch.iteration
        return reward_inputs(self.pipeline, prompts, decoded, sounds, group=group, numbers=numbers, iteration=now)

    def with_gradient(self, batch: Batch, decoded: Tensor, group: Tensor, numbers: Sequence[int]) -> RewardOutput:
        """Rewards of decoded images, at once and with their graph."""
        self.counters["images"] += len(decoded) * self.run.world
        self.look(decoded, group)
        self.stop_on_broken(batch.iteration)
        output = self.reward(self.inputs(batch, decoded, group, numbers))
        self.errors.update(output.errors)
        return output

    def look(self, decoded: Tensor, group: Tensor) -> bool:
        """Looks at decoded images before a reward does; returns whether all are finite."""
        self.looks.append((group.cpu(), look_at(decoded)))
        for image, own in zip(decoded, group.tolist(), strict=True):
            if own not in self.latest and len(self.latest) < LATEST:
                self.latest[own] = image.detach().clone()  # stays on the device: a copy here would wait for the device
        return not bool(self.looks[-1][1].broken.any())

    def stop_on_broken(self, iteration: int) -> None:
        """Ends a run whose images are not finite; every process calls it. Raises ValueError: as
        `flowrl.training.watchdog.stop_on_broken`."""
        broken = sum(int(look.broken.sum()) for _, look in self.looks)
        total = sum(len(group) for group, _ in self.looks)
        stop_on_broken(self.run, broken, total, iteration, learned=self.counters["updates"] > 0)

    def image_row(self) -> dict[str, float]:
        """How much the iteration's images of one prompt differ, and how many have one colour, for the log."""
        mine = [(group, look.constant, look.small) for group, look in self.looks]
        seen = self.run.joined(mine)
        if not seen:
            return {}
        group, constant, small = (torch.cat(column) for column in zip(*seen, strict=True))
        diversity, share = diversity_of(small, group), float(constant.double().mean())
        return ({} if diversity is None else {"diversity": diversity}) | ({"constant_ratio": share} if share else {})

    def judge_row(self) -> dict[str, float]:
        """Questions to judges on servers since the last row, by all processes and for evaluations too."""
        return usage_row(self.run.joined([USAGE.take()]))

    def all_errors(self) -> Counter[str]:
        """Why this iteration's images failed, over all processes."""
        counts: Counter[str] = Counter()
        for word, count in self.run.joined(list(self.errors.items())):
            counts[word] += count
        return counts

    def of_all(self, values: Tensor, valid: Tensor) -> Tensor:
        """Rewards of all processes' images, from this process's `[n]`, in rank order and on the CPU; NaN if invalid."""
        return self.run.gather(torch.where(valid, values, torch.nan).to(self.run.device)).cpu()

    def row(self, output: RewardOutput, group: Tensor) -> dict[str, Any]:
        """Means for the log over the images of all processes, from this process's rewards; `group` `[n]` are theirs.
        Failed images do not count; their share is `invalid_ratio`, and `reward/<key>/invalid_ratio` for each reward.
        `reward_error` is the standard error of the mean over prompts, from the spread of groups' means."""
        run = self.run
        mine = output.values.cpu()
        values, valid = run.gather(mine), run.gather(output.valid.cpu())
        known = values[valid].double()
        spread = float(known.std(correction=0)) if len(known) else math.nan
        row: dict[str, Any] = {"reward": float(known.mean()), "reward_std": spread}
        _, place, count_G = run.gather(group.cpu())[valid].unique(return_inverse=True, return_counts=True)
        mean_G = torch.zeros(len(count_G), dtype=torch.float64).index_add(0, place, known) / count_G
        if len(mean_G) > 1:
            row["reward_error"] = float(mean_G.std() / len(mean_G) ** 0.5)
        # Where a server could not be reached, a process lacks some names.
        for name in dict.fromkeys(run.joined(list(output.parts))):
            found = output.parts[name].cpu() if name in output.parts else torch.full_like(mine, torch.nan)
            part = run.gather(found)
            numbers = part[~part.isnan()].double()
            if len(numbers):
                row[name] = float(numbers.mean())
            if name.count("/") == 1 and len(numbers) < len(part):
                row[f"{name}/invalid_ratio"] = 1 - len(numbers) / len(part)
        return row | {"invalid_ratio": float((~valid).double().mean())}

    def learn(self, iteration: int) -> dict[str, float]:
        """Updates jointly trained rewards on this iteration's images of all processes; numbers for the log."""
        metrics: dict[str, float] = {}
        seen, self.seen = self.seen, []
        if not self.trained:
            return metrics
        pixels = list(to_uint8(torch.cat([inputs.images for inputs in seen]))) if seen else []
        columns = [
            (prompt, metadata, group, number)
            for inputs in seen
            for prompt, metadata, group, number in zip(
                inputs.prompts, inputs.metadata, inputs.group_ids.tolist(), inputs.sample_ids.tolist(), strict=True
            )
        ]
        rows = self.run.joined(list(zip(columns, pixels, strict=True)))
        if not rows:
            return metrics
        rows.sort(key=lambda row: row[0][3])  # by number, from whatever process
        images = torch.stack([torch.from_numpy(image) for _, image in rows]).permute(0, 3, 1, 2).float() / 255
        prompts, metadata, group_ids, sample_ids = zip(*(row[0] for row in rows), strict=True)
        inputs = RewardInputs(
            prompts=list(prompts),
            images=images.to(self.run.device),
            metadata=list(metadata),
            group_ids=torch.tensor(group_ids),
            sample_ids=torch.tensor(sample_ids),
            iteration=iteration,
        )
        for key, reward in self.trained.items():
            metrics |= {f"reward/{key}/{name}": value for name, value in reward.learn(inputs).items()}
            if self.run.processes > 1:  # devices do not add up alike, and copies would drift apart
                reward.follow(on_main(reward.learned))
        return metrics


class Scoring:
    """The rewards of one batch; see the module. An error inside ends the background work."""

    def __init__(self, scorer: Scorer, batch: Batch) -> None:
        self.scorer, self.batch = scorer, batch
        self.whole_groups = scorer.reward.whole_groups
        self.waiting: list[tuple[Tensor, Tensor, list[int]]] = []  # images of groups that are not complete
        self.pending: list[Callable[[], RewardOutput]] = []
        self.done: list[RewardOutput] = []
        self.beside = Beside(scorer.run.device) if scorer.beside else None

    def __enter__(self) -> Scoring:
        return self

    def __exit__(self, *_: object) -> None:
        if self.beside is not None:
            self.beside.stop()

    @torch.no_grad()
    def add(self, latents: Tensor, group: Tensor, numbers: Sequence[int]) -> None:
        """Takes finished latents `[F, *latent]` of groups `[F]`; `numbers` name the images. Latents on the host go to
        the device piece by piece, as they are scored."""
        with self.scorer.stages.of("reward"):
            self.scorer.counters["images"] += len(latents) * self.scorer.run.world
            self.waiting.append((latents, group.cpu(), list(numbers)))
            together, begun = torch.cat([part[1] for part in self.waiting]), 0
            if self.whole_groups:  # images of the group that came last
                others = torch.nonzero(together != together[-1]).flatten()
                begun = len(together) - (int(others[-1]) + 1 if len(others) else 0)
            self._start(len(together) - (begun if begun % self.scorer.group_size else 0))

    def _start(self, count: int) -> None:
        """Decodes and scores the first `count` waiting images."""
        if not count:
            return
        pieces = [part[0] for part in self.waiting]
        latents = torch.cat(pieces) if len(pieces) > 1 else pieces[0]  # which may be all of an iteration's: no copy
        group = torch.cat([part[1] for part in self.waiting])
        numbers = [number for part in self.waiting for number in part[2]]
        self.waiting = [(latents[count:], group[count:], numbers[count:])] if count < len(numbers) else []
        size = count if self.whole_groups else scored_at_once(videos=bool(self.scorer.pipeline.fps))
        for first in range(0, count, size):
            piece = slice(first, min(first + size, count))
            work = partial(self._ask, latents[piece], group[piece], numbers[piece])
            if self.beside is None:
                work()
            else:
                self.beside.start(work, latents)

    def _ask(self, latents: Tensor, group: Tensor, numbers: list[int]) -> None:
        scorer, reward = self.scorer, self.scorer.reward
        if not scorer.run.first:  # processes that share these images' tokens learn of it in `result`
            return
        latents = sent(latents, scorer.run.device)
        decoded = decode_once(scorer.pipeline, latents)
        if not scorer.look(decoded, group):  # the run ends in `result`, on every process
            return
        heard = "sounds" in reward.needs and scorer.pipeline.sound_rate is not None
        sounds = scorer.pipeline.decode_sound(latents) if heard else None
        inputs = scorer.inputs(self.batch, decoded, group, numbers, sounds)
        if scorer.trained:
            kept = replace(inputs, videos=None, fps=None, sounds=None, source_images=None, reference_images=None)
            scorer.seen.append(replace(kept, images=inputs.images.detach().cpu()))
        if reward.waits:
            if len(self.pending) - len(self.done) >= _PENDING:
                self.done.append(self.pending[len(self.done)]())
            self.pending.append(reward.start(inputs, scorer.executor))
        else:
            self.done.append(reward(inputs))

    @torch.no_grad()
    def result(self) -> RewardOutput:
        """All rewards in the order of the added images; waits for those in flight. Raises ValueError: an image is not
        finite; no reward has seen it."""
        self._start(sum(len(part[2]) for part in self.waiting))
        if self.beside is not None:
            self.beside.finish()
        self.scorer.stop_on_broken(self.batch.iteration)
        self.done += [get() for get in self.pending[len(self.done) :]]
        run = self.scorer.run
        if run.layout.context == 1:
            output = join_outputs(self.done)
        else:
            # Of the processes that share these images' tokens the first one alone has asked: no server is asked twice,
            # and none of them goes on with numbers of its own.
            host = torch.device("cpu")
            mine = [(move_output(join_outputs(self.done), host), self.done[0].values.device.type)] if run.first else []
            [(output, kind)] = run.of_first(mine)
            output = move_output(output, host if kind == "cpu" else run.device)
        self.scorer.errors.update(output.errors)
        return output


def decode_once(pipeline: Pipeline, latents: Tensor) -> Tensor:
    """Images of latents `[b, *latent]`; decodes only one of equal neighbours. A late branch has so few steps left that
    its completions coincide on all strides (`samplers/windows.thinned_steps`)."""
    distinct, place = torch.unique_consecutive(latents, dim=0, return_inverse=True)
    decoded = pipeline.decode(distinct)
    return decoded if len(distinct) == len(latents) else decoded[place]


def trained_channels(
    how: str, reward: WeightedSum, iteration: int, output: RewardOutput
) -> tuple[list[Tensor], list[float]]:
    """Rewards as advantages take them, and their current weights: one merged channel, or one per reward."""
    if how in MERGED:
        return [output.values], [1.0]
    now = zip(reward.terms, reward.weights_at(iteration), strict=True)
    used = [(term.key, weight) for term, weight in now if term.weight]
    return [output.parts[f"reward/{key}"] for key, _ in used], [weight for _, weight in used]


def scored_beside(rewards: Sequence[RewardConfig], arithmetic: Sequence[str], device: torch.device) -> bool:
    """Whether a separate thread decodes and scores finished images while the next are sampled.

    True only on CUDA, where the sampling thread only hands out work. False with a user's function, which may change
    settings of the process that are restored after it, and in TF32, which is such a setting. `arithmetic` is
    `reward_dtype` and `pipeline.vae_dtype`.
    """
    if device.type != "cuda" or not torch.cuda.is_available():
        return False
    own_code = any(reward.file is not None or _names_function(reward.options) for reward in rewards)
    return not own_code and "tf32" not in arithmetic


def _names_function(options: Any) -> bool:
    """Whether a reward's options name a function of a user's file anywhere."""
    if not isinstance(options, Mapping):
        return False
    return {"file", "function"} <= options.keys() or any(map(_names_function, options.values()))


def check_rewards(rewards: Sequence[RewardConfig], measured: Sequence[RewardConfig], how: str, partial: str) -> None:
    """Refuses settings of rewards that nothing reads: those that `reward_aggregation` ignores, and those of sums for
    rewards that are only measured. `partial` is `reward_partial`."""
    for reward in measured:
        default = RewardConfig(name="unused")
        for key in ("weight", "schedule", "clip", "gate", "routes"):
            if getattr(reward, key) != getattr(default, key):
                raise ValueError(
                    f"{key} is set for eval.rewards {reward.name or reward.function}, but an evaluation reports each "
                    f"reward by itself and sums none: remove it"
                )
    if how in MERGED:
        return
    if any(reward.gate is not None for reward in rewards):
        raise ValueError(
            f"a gate changes the total of an image, and reward_aggregation={how} has no total: set it to "
            f"{', '.join(MERGED)}, or remove the gate"
        )
    if partial != "drop":
        raise ValueError(
            f"reward_partial={partial} shares weights out within a total, and reward_aggregation={how} has "
            f"none: set reward_aggregation to one of {', '.join(MERGED)}, or reward_partial to drop"
        )


def check_votes(config: TrainConfig, processes: int, *, here: bool) -> None:
    """Refuses votes that people could not give: in evaluations, by several processes, on a port that is taken."""
    if asking := next((entry.name for entry in config.eval.rewards if asks_people(entry.name)), None):
        raise ValueError(
            f"eval.rewards names {asking}, and people are asked about images of training alone: remove it, and measure "
            "evaluations by another reward"
        )
    for entry in filter(lambda entry: asks_people(entry.name), config.rewards):
        if processes > 1:
            raise ValueError(f"reward {entry.name} has one page, and {processes} processes train: start one process")
        if here and (port := entry.options.get("port")):
            open_socket(port=port, has_token=True).close()


def open_pages(run: Run, reward: WeightedSum, iterations: int) -> None:
    """Opens the pages on which people vote; they close when the run ends."""
    for term in reward.terms:
        if isinstance(term.reward, VotesReward):
            term.reward.open(run.folder / term.key, iterations, run.closing)


def check_routes(rewards: Sequence[RewardConfig], family: str, parts: Collection[str]) -> None:
    """Refuses rewards of parts that a family's states do not have, parts that no reward judges, and gates."""
    routed = {reward.called: reward.routes for reward in rewards if reward.routes}
    there = f"the parts {', '.join(parts)}" if parts else "no parts"
    for name, routes in routed.items():
        if unknown := [part for part in routes if part not in parts]:
            raise ValueError(
                f"the routes of {name} name {', '.join(unknown)}, and a state of family {family} has {there}: "
                "correct them, or remove routes"
            )
    spoken = {part for one in rewards if one.weight for part in one.routes or parts}
    if routed and (silent := [part for part in parts if part not in spoken]):
        raise ValueError(
            f"rewards have routes, and none speaks of {', '.join(silent)}, which nothing would teach: name it in "
            "the routes of a reward, or remove routes"
        )
    if routed and (gate := next((one.called for one in rewards if one.gate is not None), None)):
        raise ValueError(
            f"the gate of {gate} changes the total of an image, and rewards with routes "
            f"({', '.join(routed)}) have none: remove the gate, or routes"
        )


def check_offload(config: TrainConfig, *, through_rewards: bool) -> None:
    """Refuses to lay to rest what cannot move; `through_rewards`: whether gradients come through decoder and rewards.
    Raises ValueError: a recipe that takes gradients through it, rewards of workers, of users' code, one that learns."""
    offload = config.pipeline.offload
    if through_rewards and (held := [part for part in ("vae", "rewards") if part in offload]):
        raise ValueError(
            f"pipeline.offload names {' and '.join(held)}, but recipe {config.recipe} takes the gradient of the reward "
            "through autoencoder and rewards, which stay on the device until its end: set at most "
            "pipeline.offload=[text_encoders]"
        )
    if "rewards" in offload and config.workers.rewards:
        raise ValueError(
            f"pipeline.offload names rewards, but workers.rewards is {config.workers.rewards}: their networks are on "
            "the workers that score, and none is in the learner: leave rewards out of pipeline.offload"
        )
    for entry in (*config.rewards, *config.eval.rewards) if "rewards" in offload else ():
        if entry.file is not None or _names_function(entry.options):
            raise ValueError(
                f"pipeline.offload names rewards, and reward {entry.called!r} is your own code, which places its "
                "networks itself: leave rewards out of pipeline.offload, and move them in your own function"
            )
        if entry.name == "adversarial":
            raise ValueError(
                "pipeline.offload names rewards, and reward 'adversarial' learns on the device: leave rewards out of "
                "pipeline.offload"
            )


def check_groups(group_size: int, geometry: Geometry, reward: WeightedSum) -> None:
    """Refuses groups spread over processes if a reward looks at whole groups."""
    if reward.whole_groups and geometry.images_per_process % group_size:
        raise ValueError(
            f"reward {reward.name} compares the images of a group, but {geometry.images_per_process} images per "
            f"process are not whole groups of {group_size}: make prompts_per_step a multiple of the number of processes"
        )
