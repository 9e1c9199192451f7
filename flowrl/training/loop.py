"""What every recipe does around its own step: parts, prompts, counted network, progress, evaluation, saving, budget.

    loop = Loop(config, run)
    for iteration in loop:
        batch = loop.batch(iteration)
        ...                            # the recipe: rollout, rewards, update
        loop.log(row)
    return loop.finished

After each pass through the body the loop evaluates and saves where that is due, and ends when the iterations or the
budget are used up or somebody asked for a stop.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from flowrl.config.train import BudgetConfig, TrainConfig
from flowrl.pipelines.lora import Policy
from flowrl.progress import progress
from flowrl.prompts.loading import Prompt, eval_items, prompts_of_iteration
from flowrl.randomness import counter_seed, sample_normals
from flowrl.rewards import RewardInputs, RewardOutput, TrainedReward
from flowrl.samplers import Velocity
from flowrl.training.checkpoints import restore, save_lora
from flowrl.training.drift import KL_PROMPTS, spread, velocity_distance
from flowrl.training.heldout import evaluate
from flowrl.training.learner import NetworkCounter, clock
from flowrl.training.parts import (
    at_eval_size,
    encode_everything,
    eval_schedule,
    evaluation_rewards,
    load_parts,
    read_prompts,
)
from flowrl.training.prompting import encode_prompts, guided
from flowrl.training.run import Run
from flowrl.training.scoring import (
    WINDOW,
    Scoring,
    check_groups,
    failures_message,
    learned,
    make_executor,
    too_many_failures,
)
from flowrl.trajectory import Conditioning

CONSTANT_REWARD_LIMIT = 3  # iterations in a row whose images all got the same reward before the run stops


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Batch:
    """The images that one process makes in one iteration, and their prompts.

    Attributes:
        iteration: counts from 0.
        own: image numbers of this process, consecutive; image i belongs to group `i // group_size`.
        group: [b] group of each image, counted over all processes (and over the rounds of an iteration).
        groups: [p] those numbers once each, ascending.
        prompts: one a group, in the order of the groups.
        prompt_ids: their lines in the prompt file.
        cond: the prompts encoded, one row a group.
    """

    iteration: int
    own: range
    group: Tensor
    groups: Tensor
    prompts: tuple[Prompt, ...]
    prompt_ids: tuple[int, ...]
    cond: Conditioning

    def local(self, group: Tensor) -> Tensor:
        """Row of `cond` for group numbers."""
        return torch.searchsorted(self.groups, group.cpu())

    @staticmethod
    def cat(parts: Sequence[Batch]) -> Batch:
        """Joins the rounds of one iteration; `own` is the first one's."""
        return Batch(
            iteration=parts[0].iteration, own=parts[0].own, group=torch.cat([part.group for part in parts]),
            groups=torch.cat([part.groups for part in parts]),
            prompts=tuple(prompt for part in parts for prompt in part.prompts),
            prompt_ids=tuple(number for part in parts for number in part.prompt_ids),
            cond=Conditioning.cat([part.cond for part in parts]),
        )  # fmt: skip


class Loop:
    """A run's parts and its course. Iterate over it; `finished` tells afterwards whether it came to its end."""

    def __init__(self, config: TrainConfig, run: Run, *, slots: Sequence[str] = ()) -> None:
        """Loads everything, continues from the newest checkpoint if there is one.

        Args:
            config: the run's settings.
            run: its folder and processes.
            slots: copies of the policy that the recipe keeps, besides the average.
        """
        self.config, self.run = config, run
        self.geometry = config.resolve_batch(run.world)
        self.pipeline, self.policy, self.reward = load_parts(config, run)
        check_groups(config, self.geometry, self.reward)
        self.measured = evaluation_rewards(config, self.reward, run.device)
        self.trained_rewards = {
            term.key: cast(TrainedReward, term.reward)
            for term in self.reward.terms if term.reward.kind == "adversarial"
        }  # fmt: skip
        self.executor = make_executor()
        self.seen: list[RewardInputs] = []  # this iteration's images, for rewards that learn
        self.errors: Counter[str] = Counter()  # why this iteration's images failed
        for slot in slots:
            self.policy.add_slot(slot)
        self.drawn = at_eval_size(config, self.pipeline)  # what evaluations draw with
        self.train_prompts = read_prompts(config.prompts, config.prompts.train)
        if config.pipeline.free_text_encoders:
            encode_everything(config, self.pipeline, self.drawn, self.train_prompts)
        optim = config.optim
        self.optimizer = torch.optim.AdamW(
            self.policy.parameters.values(), lr=optim.lr, betas=optim.betas, eps=optim.eps,
            weight_decay=optim.weight_decay,
        )  # fmt: skip
        state = run.load_checkpoint()
        self.first = 0 if state is None else restore(state, self.policy, self.optimizer)
        self.counters: dict[str, Any] = {"updates": 0, "constant": 0, "images": 0, "seconds": 0.0, "evals": 0,
                                         "failed": []}  # fmt: skip
        self.memory: dict[str, Any] = {}  # what a method remembers between iterations; saved with checkpoints
        if state is not None:
            self.counters |= state["counters"]
            self.memory = state.get("memory", {})
            for key, reward in self.trained_rewards.items():
                reward.restore(state["rewards"][key])
        self.network = NetworkCounter(self.pipeline.network, self.counters)
        self.seconds: dict[str, float] = defaultdict(float)
        self.iteration = self.first
        self.finished = False

    def __iter__(self) -> Iterator[int]:
        config, run = self.config, self.run
        if self.first == 0 and (config.eval_every or config.budget.evals) and config.eval.initial:
            self.evaluate(0)
        total = config.num_iterations
        self._advance_note = ""
        with progress("training", total, self.first, enabled=run.main and config.progress) as advance:
            for iteration in range(self.first, total if self.spent() < 1 else self.first):
                self.seconds.clear()
                self.errors.clear()
                self.iteration = iteration
                self._before = deepcopy(self.counters), deepcopy(self.memory)
                self._begun = time.perf_counter()
                yield iteration
                advance(self._advance_note)
                done, stop = iteration + 1, run.should_stop()
                last = done == total or self.spent() >= 1
                if (last or not stop) and self._evaluation_due(done, last):
                    self.evaluate(done)
                if last or stop or done % config.checkpoint_every == 0:
                    self.save(done)
                if last or stop:
                    self.finished = last
                    return
        self.finished = True  # a resumed run had nothing left to do

    # ---- an iteration's parts ------------------------------------------------------------------------------------

    def clock(self, stage: str) -> AbstractContextManager[None]:
        """Adds the time spent inside to a stage of this iteration."""
        return clock(self.seconds, stage)

    def batch(self, iteration: int, *, round: int = 0, prompt_ids: Sequence[int] | None = None) -> Batch:
        """This process's images of an iteration; `round` counts repeated sampling, `prompt_ids` replaces the choice."""
        config, size = self.config, self.geometry.images_per_process
        groups = config.prompts_per_step
        if prompt_ids is None:
            seed = config.seed if round == 0 else counter_seed(config.seed, "round", round)
            prompt_ids = prompts_of_iteration(len(self.train_prompts), groups, seed, iteration)
        offset = round * config.num_images
        own = range(offset + self.run.rank * size, offset + (self.run.rank + 1) * size)
        first, last = own.start // config.group_size, (own.stop - 1) // config.group_size
        chosen = [int(prompt_ids[group - round * groups]) for group in range(first, last + 1)]
        prompts = tuple(self.train_prompts[i] for i in chosen)
        return Batch(
            iteration=iteration, own=own, group=torch.arange(own.start, own.stop) // config.group_size,
            groups=torch.arange(first, last + 1), prompts=prompts, prompt_ids=tuple(chosen),
            cond=encode_prompts(self.pipeline, prompts),
        )  # fmt: skip

    def velocity(self, cond: Conditioning, scale: float | None = None) -> Velocity:
        """The guided, counted velocity of the weights that the network runs under."""
        scale = self.config.sampler.guidance_scale if scale is None else scale
        return guided(self.pipeline, self.network, cond, scale)

    def start_noise(self, batch: Batch, images: range) -> Tensor:
        """Start noise `[b, *latent]` of some images: a function of (seed, iteration, group, image in the group)."""
        size, seed = self.config.group_size, self.config.seed
        places = [(i // size, 0 if self.config.same_latent else i % size) for i in images]
        keys = [(seed, "start", batch.iteration, group, k) for group, k in places]
        return sample_normals(self.pipeline.latent_shape, keys).to(self.run.device)

    def score(self, batch: Batch, latents: Tensor, group: Tensor, numbers: Sequence[int]) -> RewardOutput:
        """Decodes and scores finished latents `[F, *latent]` of groups `[F]`; `numbers` name the images."""
        scoring = Scoring(self, batch)
        scoring.add(latents, group, numbers)
        return scoring.result()

    def trains_policy(self, iteration: int) -> bool:
        """Whether the policy is updated in this iteration, or only a reward that is trained along learns."""
        return all(reward.trains_policy(iteration) for reward in self.trained_rewards.values())

    def check_rewards(self, reward_B: Tensor, iteration: int) -> None:
        """Stops a run whose reward says nothing (one value again and again) or fails too often.

        Args:
            reward_B: [B] of all processes, NaN where an image failed.
            iteration: for the message.

        Raises:
            ValueError: with the reasons; a checkpoint from before this iteration is written first, unless the policy
                has been updated since.
        """
        values = reward_B[~reward_B.isnan()]
        history: list[tuple[int, int]] = [*self.counters["failed"], (len(reward_B) - len(values), len(reward_B))]
        self.counters["failed"] = history[-WINDOW:]
        if len(values) == 0 or too_many_failures(history, self.config.max_invalid_ratio):
            failed, scored = (sum(column) for column in zip(*history[-WINDOW:], strict=True))
            self._stop(
                f"iteration {iteration}: {len(reward_B) - len(values)} of {len(reward_B)} images got no valid reward "
                f"({failed} of {scored} in the last {len(history[-WINDOW:])} iterations; max_invalid_ratio is "
                f"{self.config.max_invalid_ratio:g} of {WINDOW} iterations): "
                f"{failures_message(self._all_errors())}. Mend the reward, or its server, then continue with 'flowrl "
                f"train resume={self.run.folder}'"
            )
        self.counters["constant"] = self.counters["constant"] + 1 if bool((values == values[0]).all()) else 0
        if self.counters["constant"] >= CONSTANT_REWARD_LIMIT:
            self._stop(
                f"the reward was {float(values[0]):g} for every image in {CONSTANT_REWARD_LIMIT} iterations in a row, "
                "so nothing can be learned: check that the reward reads the images, and prefer one that grades partial "
                "success"
            )

    def _stop(self, reason: str) -> None:
        """Keeps what was learned before this iteration, then ends the run with a reason."""
        before, memory = self._before
        # A recipe that updates while it samples has moved the policy: what is left of before is the last checkpoint.
        if self.iteration > self.first and self.counters["updates"] == before["updates"]:
            self.counters, self.memory = before, memory
            self.save(self.iteration)
        raise ValueError(reason)

    def _all_errors(self) -> Counter[str]:
        """Why this iteration's images failed, over all processes."""
        if self.run.world == 1:
            return self.errors
        from accelerate.utils import gather_object

        counts: Counter[str] = Counter()
        for word, count in gather_object(list(self.errors.items())):
            counts[word] += count
        return counts

    def updated(self) -> None:
        """Counts an optimizer update and moves the average."""
        self.counters["updates"] += 1
        policy = self.config.policy
        if "ema" in self.policy.slots and self.counters["updates"] % policy.ema_every == 0:
            done = self.counters["updates"] // policy.ema_every
            self.policy.blend("ema", min(policy.ema_decay, (1 + done) / (10 + done)))

    def log(self, iteration: int, row: dict[str, Any]) -> None:
        """Writes an iteration's row, with what it cost."""
        row = row | learned(self)
        errors = self._all_errors()
        seconds = self._slowest(time.perf_counter() - self._begun)
        self.counters["seconds"] += seconds
        self.network.join(self.run)
        row = row | {"num_images": self.config.num_images, "lr": self.config.optim.lr}
        row |= {f"reward_errors/{word}": count for word, count in sorted(errors.items())}
        row |= {f"nfe/{kind}": count for kind, count in self.network.counts.items()}
        row |= {"nfe/total": self.nfe(), "images": self.counters["images"]}
        row |= {f"seconds/{stage}": round(value, 4) for stage, value in self.seconds.items()}
        row |= {"seconds": round(seconds, 4), "seconds/total": round(self.counters["seconds"], 4)}
        self.run.log({"iteration": iteration} | row)
        spent = f"  {self.spent():.0%} of the budget" if self.config.budget.limits else ""
        reward = f"reward {row['reward']:.3f}  " if "reward" in row else ""  # offline pairs have none
        self._advance_note = f"{reward}{seconds:.1f} s/it{spent}"

    # ---- budget, evaluation, saving ------------------------------------------------------------------------------

    def nfe(self) -> int:
        """Network evaluations of one image up to the last `log`, forward and backward, over all processes."""
        return evaluations(self.counters)

    def spent(self) -> float:
        """Share of the budget that was used up by the last `log`; 0 without one."""
        return share_spent(self.config.budget, self.counters)

    def _slowest(self, seconds: float) -> float:
        """The longest time of all processes, so that all of them end at the same iteration."""
        mine = torch.tensor([seconds], dtype=torch.float32, device=self.run.device)
        return float(self.run.gather(mine).max())

    def _evaluation_due(self, done: int, last: bool) -> bool:
        parts, every = self.config.budget.evals, self.config.eval_every
        if parts:
            reached = min(parts, max(int(self.spent() * parts), done * parts // self.config.num_iterations))
            due = last or reached > self.counters["evals"]
            self.counters["evals"] = max(reached, self.counters["evals"])
            return due
        return bool(every) and (last or done % every == 0)

    def evaluate(self, iteration: int) -> None:
        """Evaluates the held-out prompts and logs the scores."""
        assert self.config.prompts.eval is not None
        begun = time.perf_counter()
        settings, sampler = self.config.eval, self.config.sampler
        items = eval_items(
            read_prompts(self.config.prompts, self.config.prompts.eval),
            num_prompts=settings.num_prompts, samples_per_prompt=settings.samples_per_prompt,
        )  # fmt: skip
        scale = sampler.guidance_scale if settings.guidance_scale is None else settings.guidance_scale
        schedule = eval_schedule(self.config, self.pipeline, self.drawn)
        with self.policy.under(eval_slot(self.config, self.policy)):
            row = evaluate(
                self.run, self.drawn, self.measured, items, schedule, iteration=iteration, guidance_scale=scale,
                batch_size=settings.batch_size, seed=settings.seed, num_images=settings.num_images,
                show=self.config.progress,
            )  # fmt: skip
        distinct = spread([item for item in items if item.sample == 0], KL_PROMPTS)
        row["eval/kl"] = velocity_distance(
            self.drawn, self.policy, distinct, schedule, scale=scale, seed=settings.seed,
            slot=eval_slot(self.config, self.policy), batch_size=settings.batch_size,
        )  # fmt: skip
        row |= {"nfe/total": self.nfe(), "images": self.counters["images"]}
        row |= {"seconds/total": round(self.counters["seconds"], 4)}
        self.run.log({"iteration": iteration, **row, "seconds/eval": round(time.perf_counter() - begun, 4)})

    def save(self, done: int) -> None:
        """Writes a checkpoint, and the LoRA for stock diffusers under `lora/`."""
        state = {
            "iteration": done,
            "policy": self.policy.tensors(),
            "slots": {slot: dict(tensors) for slot, tensors in self.policy.slots.items()},
            "optimizer": self.optimizer.state_dict(),
            "counters": dict(self.counters),
            "memory": self.memory,
            "rewards": {key: reward.state() for key, reward in self.trained_rewards.items()},
        }
        if self.run.main:  # before the checkpoint: a run that is killed between the two writes both again
            with self.policy.under(eval_slot(self.config, self.policy)):
                save_lora(self.run.folder / "lora", self.pipeline, self.policy)
        self.run.save_checkpoint(done, state, self.config.keep_checkpoints)


def evaluations(counters: Mapping[str, Any]) -> int:
    """All network evaluations that a run's counters hold."""
    return sum(int(value) for key, value in counters.items() if key.startswith("nfe/"))


def share_spent(budget: BudgetConfig, counters: Mapping[str, Any]) -> float:
    """Share of a budget that is used up by what a run's counters hold; 0 without one."""
    used = {"nfe": evaluations(counters), "images": counters["images"], "seconds": counters["seconds"]}
    return max((used[name] / limit for name, limit in budget.limits.items()), default=0.0)


def eval_slot(config: TrainConfig, policy: Policy) -> str:
    """The weights that are evaluated and shipped: the average where there is one."""
    return "ema" if config.eval.ema and "ema" in policy.slots else "policy"
