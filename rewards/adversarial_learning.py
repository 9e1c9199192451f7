"""The learning of an adversarial reward: batches of references and generated images, updates, what is watched.

An iteration of a run: images, rewards with the discriminator as it is, the policy's update, then the discriminator's.
`flowrl.rewards.adversarial` makes the reward and describes its options.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from flowrl.randomness import Part, counter_choice, counter_seed
from flowrl.rewards import RewardInputs, RewardOutput, to_uint8
from flowrl.rewards.networks.discriminators import (
    OWNER,
    Discriminator,
    Logits,
    Loss,
    Pixels,
    discriminator_loss,
    patch_places,
)
from flowrl.rewards.references import References

_AT_ONCE = 16  # images that are judged in one piece
_SNAPSHOT = 64  # images of the first iteration that are kept to be scored again and again


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """How the reward is formed and learns; see `adversarial`. `patches` None: all of them."""

    loss: Loss
    patches: int | None
    class_weight: float
    patch_weight: float
    steps: int
    batch_size: int
    pretrain_steps: int
    update: bool
    max_accuracy: float
    warmup_iterations: int
    seed: int


class _Step(NamedTuple):
    loss: float
    accuracy: float
    margin: float
    learned: bool


class AdversarialReward:
    """A `TrainedReward`; made by `adversarial`. Before it has learned anything, a head gives 0 to every image."""

    name = "adversarial"
    kind = "adversarial"
    needs = frozenset({"images", "prompts", "metadata"})
    differentiable = False
    waits = False

    def __init__(
        self,
        discriminator: Discriminator,
        references: References,
        settings: Settings,
        *,
        optimizer: torch.optim.Optimizer,
        policy_every: int = 1,
        version: str = "adversarial",
    ) -> None:
        self.discriminator = discriminator
        self.references = references
        self.settings = settings
        self.optimizer = optimizer
        self.policy_every = policy_every
        self.version = version
        self._snapshot: dict[str, Any] | None = None  # images of the first iteration, their prompts and records
        self._held_out: tuple[list[str], list[Pixels]] | None = None
        self._warned = False

    def trains_policy(self, iteration: int) -> bool:
        """Whether the policy is updated in an iteration: in the last of every `policy_every`, and after the warm-up."""
        return iteration >= self.settings.warmup_iterations and (iteration + 1) % self.policy_every == 0

    def __call__(self, inputs: RewardInputs) -> RewardOutput:
        logits = self._judge(list(to_uint8(inputs.images)), inputs.prompts, inputs.iteration)
        device = inputs.images.device
        values = self._reward(logits).to(device)
        valid = torch.isfinite(values)
        parts = {}
        if logits.patches.shape[1]:
            parts = {"class": logits.whole.to(device), "patches": logits.patches.mean(dim=1).to(device)}
        return RewardOutput(
            values=torch.where(valid, values, torch.nan),
            valid=valid,
            parts=parts,
            errors={"not_finite": int((~valid).sum())} if not bool(valid.all()) else {},
        )

    def learn(self, inputs: RewardInputs) -> dict[str, float]:
        """Learns from the images of an iteration; the first time it also pre-trains, and keeps a snapshot of them.

        Loss, accuracy and margin are those of batches before they were learned from, without those of pre-training.

        Returns:
            `loss`; `accuracy`, the share of correct signs of the class logit (pairs in order where the loss is
            pairwise; ties count half); `margin`, mean reward of references less that of generated images;
            `reward_references`, of held-out ones, where there are any; `reward_frozen`, of the snapshot; `saturated`,
            1 where `max_accuracy` ended the learning; `steps`, updates made.

        Raises:
            ValueError: a prompt has no reference, or the loss is not finite.
        """
        options = self.settings
        images = list(to_uint8(inputs.images))
        pretrained = 0
        if self._snapshot is None:
            self._snapshot = _snapshot(images, inputs, options.seed)
            pretrained = options.pretrain_steps
            for step in range(pretrained):
                self._learn_batch(images, inputs, ("pretrain", step), update=True)
        steps: list[_Step] = []
        for step in range(options.steps if options.update else 1):
            key = ("learn", inputs.iteration, step)
            steps.append(self._learn_batch(images, inputs, key, update=options.update, limit=options.max_accuracy))
            if not steps[-1].learned:
                break
        saturated = options.update and not steps[-1].learned
        if saturated and not self._warned:
            self._warned = True
            warnings.warn(
                f"{OWNER}: at iteration {inputs.iteration} the discriminator was right on "
                f"{steps[-1].accuracy:.0%} of a batch, above max_accuracy ({options.max_accuracy:g}): it learned no "
                f"further in this iteration, nor will it in others like it (metric: saturated). Images that are told "
                f"apart that surely may all earn the same; lower lr or steps_per_iteration if it lasts.",
                stacklevel=2,
            )
        numbers = np.mean([[step.loss, step.accuracy, step.margin] for step in steps], axis=0).tolist()
        metrics = dict(zip(("loss", "accuracy", "margin"), numbers, strict=True))
        return metrics | self._watched() | {
            "saturated": float(saturated),
            "steps": float(pretrained + sum(step.learned for step in steps)),
        }  # fmt: skip

    def state(self) -> dict[str, Any]:
        """Weights, the optimizer's state and the snapshot: tensors on the host, numbers, text."""
        weights = {name: weight.detach().cpu().clone() for name, weight in self.discriminator.trained.items()}
        return {
            "weights": weights,
            "optimizer": _on_host(self.optimizer.state_dict()),
            "snapshot": self._snapshot,
            "warned": self._warned,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Puts `state()` back.

        Raises:
            ValueError: it is that of another discriminator.
        """
        trained = self.discriminator.trained
        shapes = {name: list(weight.shape) for name, weight in trained.items()}
        saved = {name: list(weight.shape) for name, weight in state["weights"].items()}
        if shapes != saved:
            raise ValueError(
                f"{OWNER}: the saved state is that of another discriminator: it holds {saved}, this one has {shapes}: "
                f"continue with the backbone and model that the run began with."
            )
        with torch.no_grad():
            for name, weight in trained.items():
                weight.copy_(state["weights"][name])
        self.optimizer.load_state_dict(state["optimizer"])
        self._snapshot, self._warned, self._held_out = state["snapshot"], state["warned"], None

    def _reward(self, logits: Logits) -> Tensor:
        """`class_weight` whole + `patch_weight` mean over patches [B]."""
        reward = self.settings.class_weight * logits.whole
        if logits.patches.shape[1]:
            reward = reward + self.settings.patch_weight * logits.patches.mean(dim=1)
        return reward

    @torch.no_grad()
    def _judge(self, images: Sequence[Pixels], prompts: Sequence[str], iteration: int) -> Logits:
        """Logits as they enter the reward. In one iteration all images are read at the same patches."""
        pieces = []
        for first in range(0, len(images), _AT_ONCE):
            piece = images[first : first + _AT_ONCE]
            places = self._places(1, "reward patches", iteration)
            pieces.append(self._logits(piece, prompts[first : first + _AT_ONCE], places, as_reward=True))
        return Logits(*(torch.cat(parts) for parts in zip(*pieces, strict=True)))

    def _places(self, batch: int, *key: Part) -> Tensor | None:
        options = self.settings
        if options.patches is None or not self.discriminator.num_patches:
            return None
        return patch_places(self.discriminator.num_patches, options.patches, batch, counter_seed(options.seed, *key))

    def _logits(
        self, images: Sequence[Pixels], prompts: Sequence[str], places: Tensor | None, *, as_reward: bool
    ) -> Logits:
        if places is not None:
            places = places.expand(len(images), -1)
        device = next(iter(self.discriminator.trained.values())).device
        with torch.autocast(device.type, enabled=False):
            return self.discriminator.judge(images, prompts, places, as_reward=as_reward)

    @torch.enable_grad()
    def _learn_batch(
        self,
        images: Sequence[Pixels],
        inputs: RewardInputs,
        key: tuple[Part, ...],
        *,
        update: bool,
        limit: float = 1.0,
    ) -> _Step:
        """One batch of generated images, each beside a reference, and an update unless it is known too well."""
        options = self.settings
        count = min(options.batch_size, len(images))
        items = counter_choice(len(images), count, options.seed, "batch", *key)
        prompts = [inputs.prompts[i] for i in items]
        real = self.references.pick(prompts, [_record(inputs, i) for i in items], *key)
        both = [*real, *(images[i] for i in items)]
        logits = self._logits(both, prompts * 2, self._places(2 * count, "patches", *key), as_reward=False)
        loss = discriminator_loss(options.loss, logits.whole[:count], logits.whole[count:])
        if logits.patches.shape[1]:
            patches = discriminator_loss(options.loss, logits.patches[:count], logits.patches[count:])
            loss = loss + options.patch_weight * patches
        if not bool(torch.isfinite(loss)):
            raise ValueError(f"{OWNER}: the discriminator's loss is {float(loss)} at {key}: lower lr.")
        accuracy = _accuracy(logits.whole.detach(), options.loss)
        learned = update and accuracy <= limit
        if learned:
            self.optimizer.zero_grad(set_to_none=True)
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        reward = self._reward(logits).detach().double()
        margin = float(reward[:count].mean() - reward[count:].mean())
        return _Step(loss=loss.item(), accuracy=accuracy, margin=margin, learned=learned)

    def _watched(self) -> dict[str, float]:
        """Mean rewards of what no learning sees, or saw once: held-out references and the snapshot."""
        assert self._snapshot is not None
        images, prompts, records = (self._snapshot[key] for key in ("images", "prompts", "records"))
        if self._held_out is None:
            self._held_out = self.references.held_out(prompts, records)
        sets = {"reward_references": self._held_out, "reward_frozen": (prompts, list(images.numpy()))}
        return {
            name: float(self._reward(self._judge(images, texts, 0)).double().mean())
            for name, (texts, images) in sets.items()
            if images
        }


def _accuracy(whole: Tensor, loss: Loss) -> float:
    """Share of correct verdicts among logits of references, then of as many generated images; ties count half."""
    real, fake = whole.chunk(2)
    signs = torch.sign(real - fake) if loss == "pairwise" else torch.cat([torch.sign(real), -torch.sign(fake)])
    return float((signs.double() + 1.0).mean() / 2.0)


def _record(inputs: RewardInputs, item: int) -> dict[str, Any]:
    return {"prompt": inputs.prompts[item], **inputs.metadata[item]}


def _snapshot(images: Sequence[Pixels], inputs: RewardInputs, seed: int) -> dict[str, Any]:
    """Up to 64 of the images as uint8 [n, H, W, 3], with their prompts and records."""
    items = sorted(counter_choice(len(images), min(_SNAPSHOT, len(images)), seed, "snapshot"))
    return {
        "images": torch.from_numpy(np.stack([images[i] for i in items])),
        "prompts": [inputs.prompts[i] for i in items],
        "records": [_record(inputs, i) for i in items],
    }


def _on_host(value: Any) -> Any:
    """A copy of nested dicts and lists with every tensor copied to the host."""
    if isinstance(value, Tensor):
        return value.detach().cpu().clone()
    if isinstance(value, dict):
        return {key: _on_host(item) for key, item in value.items()}
    return [_on_host(item) for item in value] if isinstance(value, list) else value
