"""What every recipe does around its own step: parts, prompts, counted network, progress, running average of the
updates (EMA), evaluation, saving, budget.

    loop = Loop(ready, run)
    for iteration in loop:
        batch = loop.batch(iteration)
        ...                            # the recipe: rollout, rewards, update
        loop.log(row)
    return loop.finished

After each pass through the body, where it is due and in this order:

| done | evaluate | save | end |
|---|---|---|---|
| the last iteration, or the budget is used up | yes | yes | finished |
| a stop was requested, also during the evaluation | when the run goes on | yes | not finished |
| any other | `eval_every`, `budget.evals` | `checkpoint_every` | go on |
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor

from flowrl.advantages.routing import Routes
from flowrl.media.kept import LATEST, write_latest
from flowrl.media.terminal_images import HEIGHT, protocol_here, show
from flowrl.pipelines import Pipeline
from flowrl.pipelines.places.known_checkpoints import precision_note
from flowrl.pipelines.shared.context_parallel import share_tokens
from flowrl.pipelines.shared.saved_model import save_model
from flowrl.pipelines.weights.lora import Policy, refuse_not_finite
from flowrl.pipelines.weights.parallelize import denoiser_bytes
from flowrl.prompts.loading import eval_items, prompts_of_iteration
from flowrl.rewards import RewardOutput
from flowrl.runs.vital_signs import MOSTLY
from flowrl.runtime.progress import progress
from flowrl.runtime.randomness import counter_seed
from flowrl.runtime.scrubbing import say as print
from flowrl.training import watchdog
from flowrl.training.budget import Budget
from flowrl.training.checkpoints import AHEAD, own_state, prune, restore, save_lora
from flowrl.training.draws import AskedPrompts, Batch, Draws
from flowrl.training.drift import KL_PROMPTS, BaseSide, base_sides, spread, velocity_distances
from flowrl.training.heldout import Drawing, evaluate
from flowrl.training.learner import GradientSum, NetworkCounter, Statistics, largest_of, total_of
from flowrl.training.model_files import MODEL, hub_commit
from flowrl.training.optimizers import add_learners, make_optimizer, rate_of, set_rate, updates_of
from flowrl.training.parts import (
    Parts,
    Ready,
    at_eval_size,
    encode_everything,
    eval_schedule,
    evaluation_rewards,
    keep_embeddings,
    load_parts,
    tell_cut_by_rewards,
    tell_cut_prompts,
)
from flowrl.training.processes.mesh import Shards, device_mesh, shards_of
from flowrl.training.prompting import encode_prompts
from flowrl.training.resume_check import model_of, reproduced_in, versions_of
from flowrl.training.reward_watch import Compared, RewardWatch
from flowrl.training.run import Run
from flowrl.training.scoring import Scorer, check_groups, open_pages, scored_beside, trained_channels
from flowrl.training.second_kernel import Descend, apply_finite
from flowrl.training.stages import Stages

COPY = "copy"
"""The slot of the policy's copy that `kl_reference: N` takes again every N iterations."""

TEACHER = "teacher "
"""What the slots of teachers begin with. They are read from their files, so that checkpoints hold none of them."""

_IMAGES_EVERY = 30.0  # seconds between lines of images on a terminal or in a notebook


class Loop(Draws):
    """A run's parts and its course. Iterate over it; afterwards `finished` tells whether the run is complete."""

    def __init__(self, ready: Ready, run: Run, *, slots: Sequence[str] = (), needs_reference: bool = False) -> None:
        """Loads everything and continues from the newest checkpoint, if any. `slots` are copies of the policy that the
        recipe keeps besides the average; `needs_reference`: its objective reads the network before training, besides KL
        and evaluations."""
        config = ready.config
        self.ready, self.config, self.run, self.prompts, self.device = ready, config, run, ready.prompts, run.device
        self.protocol = protocol_here() if config.progress else "none"
        self.geometry = config.resolve_batch(run.world)
        self.shards: Shards | None = shards_of(run.layout, run.device)
        parts: Parts = load_parts(ready, run.device, self._begin, self.shards) if run.parts is None else run.parts
        self.pipeline, self.policy, reward = parts
        if run.layout.context > 1:
            share_tokens(self.pipeline, device_mesh(run.layout, run.device.type)["context"])
        if run.parts is not None:
            self._begin(self.pipeline)
        check_groups(config.group_size, self.geometry, reward)
        self.routes = Routes.of(config.routes, self.pipeline.parts)
        self.measured = evaluation_rewards(ready, reward, run.device)
        for slot in (*slots, *([COPY] if isinstance(config.kl_reference, int) else [])):
            self.policy.add_slot(slot)
        evaluates = bool(config.eval_every or config.budget.evals)
        if needs_reference or evaluates or (config.kl_coef > 0 and self.reference_slot == "reference"):
            self.policy.keep_reference()
        self.optimizer = make_optimizer(config.optim, self.policy, self.device)
        self.learners = add_learners(config, self.policy, self.device)
        self.rate = rate_of(config.optim, updates_of(config))
        state = run.load_checkpoint({"model": model_of(config), "rewards": versions_of(reward, self.measured)})
        self.first = 0
        self.counters: dict[str, Any] = {"updates": 0, "constant": 0, "images": 0, "seconds": 0.0}
        self.counters |= {"evals": 0, "evaluated": -1, "failed": []}
        self.memory: dict[str, Any] = {}  # what a method remembers between iterations; saved with checkpoints
        if state is not None:
            state = own_state(state, self.policy.split)
            self.first = restore(state, self.policy, self.optimizer, self.learners)
            advice = "remove it to continue from the one before"
            refuse_not_finite(state["policy"], f"checkpoint {self.first:06d}", advice)
            self.counters |= state["counters"]
            self.memory = state["memory"]
        self.ahead: dict[int, tuple[Sequence[int], Any]] = {}  # what workers draw of iterations: tickets, weights
        self.sent: Any = None  # the weights of this one's images: other learners' workers may still take them
        self.stages = Stages(run.device)
        total, every, evals = config.num_iterations, config.eval_every, config.budget.evals
        self.budget = Budget(config.budget.limits, self.counters, evals=evals, num_iterations=total, eval_every=every)
        self.watch = RewardWatch(self.counters, max_invalid_ratio=config.max_invalid_ratio)
        self.network = NetworkCounter(self.pipeline.network, self.counters)
        self.scorer = Scorer(
            run, self.pipeline, reward, group_size=config.group_size, counters=self.counters, stages=self.stages,
            beside=scored_beside(config.rewards, (config.reward_dtype, config.pipeline.vae_dtype), run.device),
            askers=max(4, 2 * config.workers.rewards),
        )  # fmt: skip
        open_pages(run, reward, total)
        if state is not None:
            self.scorer.restore(state["rewards"])
        self.iteration, self.finished = self.first, False
        self._note = ""  # of the newest iteration, beside the bar of progress
        self._images_shown = -math.inf  # when a terminal last showed images
        self._base: list[BaseSide] | None = None  # of this process's prompts, from the first evaluation on
        self._saved = -1  # finished iterations of the shipped weights, if this process wrote them
        self._write_manifest(reproduced_in(reward, self.measured))
        if state is not None:  # what lies there may be of a later iteration, or of none
            self._save_trained(self.first)

    def _write_manifest(self, reproduces: dict[str, str]) -> None:
        """Has the run record its inputs, now that everything has loaded."""
        held: dict[str, Any] = {}
        if self.shards is not None:
            held["denoiser_bytes"] = denoiser_bytes(self.pipeline.denoiser)
        if self.run.rollouts is not None:
            held["workers"] = self.run.rollouts.layout
        held["reproduces"] = reproduces
        if (commit := hub_commit(self.pipeline.model)) is not None:
            held["model_commit"] = commit
        self.run.begin(self.first, attention=self.pipeline.attention, **held)

    def _begin(self, pipeline: Pipeline) -> None:
        """Runs before the denoiser loads: embeds all prompts if encoders are freed."""
        config, run = self.config, self.run
        keep_embeddings(self.ready, pipeline)
        self.drawn = at_eval_size(config, pipeline)  # what evaluations draw with
        if run.main:
            tell_cut_prompts(pipeline, self.prompts)
            tell_cut_by_rewards((*self.ready.rewards, *self.ready.measured), self.prompts)
            if (note := precision_note(pipeline.model, config.pipeline.dtype)) is not None:
                print(f"Note: {note}.", flush=True)
        if config.pipeline.free_text_encoders:
            encode_everything(pipeline, self.drawn, self.prompts, None if config.prompts.cache is None else run)

    def __iter__(self) -> Iterator[int]:
        config, run, budget, total = self.config, self.run, self.budget, self.config.num_iterations
        if not self._evaluate_first():
            return
        lines = None if run.rollouts is None else run.rollouts.lines
        with progress("training", total, self.first, enabled=run.main and config.progress, more=lines) as advance:
            for iteration in range(self.first, total if budget.spent() < 1 else self.first):
                self._begin_iteration(iteration)
                yield iteration
                self.sent = None
                advance(self._note)
                raised = run.tell(iteration)
                self._show_latest()
                done, stop = iteration + 1, run.should_stop()
                last = done == total or budget.spent() >= 1
                if (last or not stop) and not self._evaluate_if_due(done, last=last):
                    last, stop = False, True
                ends = last or stop
                if ends or done % config.checkpoint_every == 0:
                    self.save(done)
                if ends:
                    if raised is not None:
                        raise raised
                    self.finished = last
                    return
        self.finished = True  # a resumed run had nothing left to do

    def _evaluate_first(self) -> bool:
        """Evaluates before the first iteration: a new run if configured, and a continued run if a quick stop left an
        evaluation out. False after a request to stop."""
        if self.first == 0:
            made = not (self.budget.evaluates and self.config.eval.initial) or self.evaluate(0)
            return made and not self.run.should_stop()
        evaluated = self.counters["evaluated"]
        last = self.first >= self.config.num_iterations or self.budget.spent() >= 1
        if not self._evaluate_if_due(self.first, last=last):
            return False
        if self.counters["evaluated"] != evaluated:
            self.save(self.first)
        return not self.run.should_stop()

    def _begin_iteration(self, iteration: int) -> None:
        self.stages.begin()
        self.scorer.begin()
        self.iteration = iteration
        ahead = self.memory.get(AHEAD)  # which is replaced, never changed
        self._before = deepcopy(self.counters), deepcopy(self.memory, {id(ahead): ahead})
        self._clock = time.perf_counter()
        if COPY in self.policy.slots and iteration % int(self.config.kl_reference) == 0:
            self.policy.blend(COPY, 0.0)

    # ---- an iteration's parts ------------------------------------------------------------------------------------

    def clock(self, stage: str) -> AbstractContextManager[None]:
        """Adds the time spent inside to a stage of this iteration."""
        return self.stages.of(stage)

    def batch(self, iteration: int, *, round: int = 0, prompt_ids: Sequence[int] | None = None) -> Batch:
        """This process's images of an iteration; `round` counts repeated sampling, `prompt_ids` replaces the choice."""
        config, size, train = self.config, self.geometry.images_per_process, self.prompts.train
        groups = config.prompts_per_step
        if prompt_ids is None:
            seed = config.seed if round == 0 else counter_seed(config.seed, "round", round)
            prompt_ids = prompts_of_iteration(len(train), groups, seed, iteration)
        offset = round * config.num_images
        own = range(offset + self.run.rank * size, offset + (self.run.rank + 1) * size)
        first, last = own.start // config.group_size, (own.stop - 1) // config.group_size
        chosen = [int(prompt_ids[group - round * groups]) for group in range(first, last + 1)]
        prompts = tuple(train[i] for i in chosen)
        cond, groups_here = encode_prompts(self.pipeline, prompts), torch.arange(first, last + 1)
        asked = AskedPrompts(groups=groups_here, prompts=prompts, prompt_ids=tuple(chosen), cond=cond)
        group = torch.arange(own.start, own.stop) // config.group_size
        return Batch(iteration=iteration, own=own, group=group, asked=asked)

    def trains_policy(self, iteration: int) -> bool:
        """Whether this iteration updates the policy, or only a jointly trained reward learns."""
        return all(reward.trains_policy(iteration) for reward in self.scorer.trained.values())

    def rewards_of_all(self, output: RewardOutput, *, compared: bool) -> Tensor:
        """[B] rewards of all processes' images, NaN where one failed; stops a run whose reward says nothing.
        `compared`: whether images are compared within their groups alone."""
        reward_B = self.scorer.of_all(output.values, output.valid)
        group_B = torch.arange(len(reward_B)) // self.config.group_size
        seen = reward_B
        if self.routes is not None:
            of_each = trained_channels("each", self.scorer.reward, self.iteration, output)[0]
            seen = torch.stack([self.scorer.of_all(one, output.valid) for one in of_each])
        self.stop_on_dead_reward(reward_B, (seen, group_B) if compared else None)
        return reward_B

    def stop_on_dead_reward(self, reward_B: Tensor, compared: Compared | None) -> None:
        """Stops a run whose reward says nothing (one value again and again) or fails too often. Rewards [B] are of all
        processes, NaN where an image failed; `compared` is all that is compared within groups, completions on the way
        too, None where groups are not all. Raises ValueError: with the reasons; a checkpoint from before this iteration
        is written first, unless the policy has been updated since."""
        self.scorer.reward_B = reward_B
        drawn = f"{self.config.prompts_per_step} prompts x {self.config.group_size} images"
        drawn = drawn if len(reward_B) > self.config.num_images else ""
        reason = self.watch.complaint(reward_B, self.iteration, self.scorer.all_errors(), drawn, compared)
        if not reason:
            return
        constant = self.scorer.image_row().get("constant_ratio", 0.0)
        if constant > MOSTLY:
            left = "the policy has left what the model can draw"
            reason = f"{constant:.0%} of the images have one colour: {left}; {reason}"
        counters, memory = self._before
        # A recipe that updates while it samples has moved the policy: what is left of before is the last checkpoint.
        if self.iteration > self.first and self.counters["updates"] == counters["updates"]:
            self.counters, self.memory = counters, memory
            if self._saved != self.iteration:
                self.save(self.iteration)
        if constant > MOSTLY and self.run.main:
            watchdog.put_back_good(self.run.folder)
        raise ValueError(reason)

    def gradient(self) -> GradientSum:
        """A sum of gradients for one update."""
        return GradientSum(self.policy, self.counters, scale_loss=self.config.pipeline.dtype == "float16")

    def update(self, gradient: GradientSum, stats: Statistics, again: Descend | None = None) -> bool:
        """Takes an optimizer step, counts it and moves the average; returns whether the policy has moved.

        It has not if a float16 gradient overflowed; then nothing else moves either. `again` computes the gradient once
        more: if it is not finite, another kernel of attention is tried.

        Raises NotFinite: as `GradientSum.apply`, under every kernel that could be tried.
        """
        set_rate(self.optimizer, self.rate(self.counters["updates"]))
        how = (self.run, self.optimizer, self.config.optim.max_grad_norm, self.iteration)
        norm = apply_finite(self.ready, self.pipeline, (gradient, stats), again, how)
        if norm is None:
            return False
        stats.shared(grad_norm=norm)
        self.counters["updates"] += 1
        policy = self.config.policy
        if "ema" in self.policy.slots and self.counters["updates"] % policy.ema_every == 0:
            done = self.counters["updates"] // policy.ema_every
            self.policy.blend("ema", min(policy.ema_decay, (1 + done) / (10 + done)))
        return True

    def log(self, iteration: int, row: dict[str, Any]) -> None:
        """Writes an iteration's row, with what it cost and what is wrong; prints the latter. Raises ValueError: the
        weights are not finite, or absurd."""
        row = row | self.scorer.learn(iteration) | self.scorer.image_row() | self.scorer.judge_row() | self._costs()
        largest = largest_of(self.run, watchdog.largest_weight(self.policy.parameters.values())) / self.policy.scale
        watched, reward_B = self.counters["watch"], self.scorer.reward_B
        found = watchdog.iteration_warnings(watched, row, reward_B, self.config, largest_weight=largest)
        if warning := self.watch.warning():
            found["equal_groups"] = warning
        watchdog.say(self.run, watched, found, iteration, moment=iteration)
        self.run.log({"iteration": iteration} | row | ({"warnings": found} if found else {}))
        # The saved weights have drawn images that are finite and not of one colour.
        if self._saved == iteration and self.scorer.looks and "constant_images" not in found:
            self._keep_as_good()
        watchdog.stop_on_absurd_weights(self.run, iteration, largest, full=self.config.policy.train == "full")
        spent = f"  {self.budget.spent():.0%} of the budget" if self.config.budget.limits else ""
        reward = f"reward {row['reward']:.4g}  " if "reward" in row else ""  # offline pairs have none
        self._note = f"{reward}{row['seconds']:.1f} s/it{spent}"

    def _costs(self) -> dict[str, Any]:
        """What an iteration cost, counted up and for the log: images, evaluations of the network, time, memory."""
        errors = self.scorer.all_errors()
        stages = self.stages.seconds()  # waits for the device, which counts towards the iteration's time
        seconds = largest_of(self.run, time.perf_counter() - self._clock)
        self.counters["seconds"] += seconds
        self.network.join(self.run)
        row: dict[str, Any] = {
            "num_images": self.config.num_images,
            "lr": self.rate(max(0, self.counters["updates"] - 1)),
        }
        row |= {f"reward_errors/{word}": count for word, count in sorted(errors.items())}
        row |= {f"nfe/{kind}": count for kind, count in self.network.counts.items()}
        row |= {f"seconds/{stage}": round(value, 4) for stage, value in stages.items()}
        row |= {"seconds": round(seconds, 4)} | self.budget.row()
        if self.run.rollouts is not None:
            numbers = self.run.rollouts.row()
            row |= {f"workers/{name}": total_of(self.run, int(numbers[name])) for name in ("alive", "restarts")}
            row["workers/wait_seconds"] = largest_of(self.run, numbers["wait_seconds"])
        if memory := self.stages.memory():
            memory |= {name: largest_of(self.run, memory[name]) for name in ("peak", "reserved")}
            row |= {f"memory/{stage}_gib": round(value, 3) for stage, value in memory.items()}
        if self.config.pipeline.dtype == "float16":
            row["loss_scale"] = 2.0 ** self.counters.get("loss_scale_log2", 0)
        return row

    def _show_latest(self) -> None:
        """Writes the row of the newest images on the main process, and shows it on its terminal now and then."""
        kept = list(self.scorer.latest.values())
        if not kept or not self.run.main:
            return
        latest = write_latest(self.run.folder / "samples", list(torch.stack(kept).float().cpu()))
        if latest and self.protocol != "none" and time.monotonic() - self._images_shown >= _IMAGES_EVERY:
            self._images_shown = time.monotonic()
            show(latest, LATEST * (HEIGHT + 4), self.protocol)

    # ---- evaluation, saving --------------------------------------------------------------------------------------

    @property
    def reference_slot(self) -> str:
        """The weights that the KL is taken to."""
        return {"base": "reference", "ema": "ema"}.get(str(self.config.kl_reference), COPY)

    @property
    def eval_slot(self) -> str:
        """The weights to evaluate and ship: the average if there is one."""
        return "ema" if self.config.eval.ema and "ema" in self.policy.slots else "policy"

    def _evaluate_if_due(self, done: int, *, last: bool) -> bool:
        """Evaluates if that is due; False if a request to stop has cut it off, so that it stays due."""
        made = self.counters["evals"]
        if not self.budget.evaluation_due(done, last=last) or self.evaluate(done):
            return True
        self.counters["evals"] = made
        return False

    def evaluate(self, iteration: int) -> bool:
        """Evaluates the held-out prompts and logs the scores; False, without a row, after a request to stop."""
        begun = time.perf_counter()
        settings, sampler = self.config.eval, self.config.sampler
        held_out, samples = self.prompts.held_out, settings.samples_per_prompt
        items = eval_items(held_out, num_prompts=settings.num_prompts, samples_per_prompt=samples)
        scale = sampler.guidance_scale if settings.guidance_scale is None else settings.guidance_scale
        schedule = eval_schedule(self.config, self.pipeline, self.drawn)
        how_many: dict[str, Any] = {"seed": settings.seed, "batch_size": settings.batch_size}
        with self.policy.under(self.eval_slot):
            workers = self.config.workers
            alone = self.run.rollouts is None or workers.engine is not None
            ahead = {"ahead": 2 * workers.rollouts, "at_once": workers.shard}
            sent = None if alone else self.run.rollouts.send(self.policy.held(), self.policy.split)
            how = Drawing(schedule=schedule, guidance_scale=scale, weights=sent, **ahead, **how_many)
            row = evaluate(
                self.run,
                self.drawn,
                self.measured,
                items,
                how,
                iteration=iteration,
                num_images=settings.num_images,
                show=self.config.progress,
                in_step=self.shards is not None and alone,
                temporal=settings.temporal,
            )
        if row is None:
            return False
        distinct = spread([item for item in items if item.sample == 0], KL_PROMPTS)
        if self._base is None:
            share = -(-len(distinct) // self.run.world)
            own = distinct[self.run.rank * share : (self.run.rank + 1) * share]
            together = None if self.shards is None else distinct[:share]
            self._base = base_sides(self.drawn, self.policy, own, schedule, scale=scale, in_step=together, **how_many)
        mine = velocity_distances(self.drawn, self.policy, self._base, schedule, scale=scale, slot=self.eval_slot)
        row["eval/kl"] = sum(self.run.joined(mine)) / len(distinct)
        row |= self.budget.row() | {"seconds/eval": round(time.perf_counter() - begun, 4)}
        terms = () if self.measured is None else self.measured.terms
        trained = len(terms) - len(settings.rewards)  # they come first of those that are measured
        weights = {term.key: term.entry.weight if place < trained else 0.0 for place, term in enumerate(terms)}
        found = watchdog.evaluation_warnings(self.counters["watch"], row, weights)
        watchdog.say(self.run, self.counters["watch"], found, iteration, moment=self.counters["watch"]["evaluations"])
        self.run.log({"iteration": iteration, **row} | ({"warnings": found} if found else {}))
        self.run.trackers.show(self.run.folder, iteration)
        self.counters["evaluated"] = iteration
        return True

    def save(self, done: int) -> None:
        """Writes a checkpoint, and for stock diffusers the LoRA under `lora/` or the model under `model/`."""
        own = {
            "policy": {name: parameter.detach() for name, parameter in self.policy.parameters.items()},
            "slots": {n: dict(held) for n, held in self.policy.slots.items() if not n.startswith(TEACHER)},
            "optimizer": self.optimizer.state_dict(),
        }
        rewards, memory = {key: reward.state() for key, reward in self.scorer.trained.items()}, dict(self.memory)
        if self.policy.split is not None:
            own[AHEAD] = memory.pop(AHEAD, {})
        state = {"iteration": done, "counters": dict(self.counters), "memory": memory, "rewards": rewards}
        state["learners"] = {slot: optimizer.state_dict() for slot, optimizer in self.learners.items()}
        if self.policy.split is None:
            state, own = own | state, {}
        self._save_trained(done)  # before the checkpoint: a run killed between the two writes both again
        # The newest one has drawn nothing yet, so the one before stays until it has.
        self.run.save_checkpoint(done, state, max(2, self.config.keep_checkpoints), own)
        if self.counters["evaluated"] == done:
            self._keep_as_good()

    def _save_trained(self, done: int) -> None:
        if self.run.main or (self.policy.split is not None and self.run.in_first_copy):
            with self.policy.under(self.eval_slot):
                if isinstance(self.policy, Policy):
                    save_lora(self.run.folder / "lora", self.pipeline, self.policy)
                else:
                    save_model(self.run.folder / MODEL, self.pipeline, self.policy.split)
        self._saved = done

    def _keep_as_good(self) -> None:
        """Notes that the newest checkpoint, and what is shipped with it, have drawn finite images."""
        if self.run.main:
            watchdog.keep_good(self.run.folder)
            prune(self.run.folder, self.config.keep_checkpoints)
