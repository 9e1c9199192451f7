"""The adversarial reward: a discriminator, trained jointly with the policy, that tells its images from references.

Adv-GRPO (arXiv 2511.20256). An iteration: images, rewards with the discriminator as it is, the policy's update, then
the discriminator's. Deviations from the published code, which `published: true` takes back for DINOv2:

    features are normalised neither in the reward nor in learning       published: in the reward only
    one preprocessing, antialiased, for both                            published: not antialiased in the reward

and for good: float32 rather than bfloat16, patches and batches named by counters, all patches unless told otherwise.

The published PickScore variant updates the scorer while references score below the policy's images on average.
`backbone: clip` with `max_accuracy: 0.5` comes near that: the scorer learns while fewer than half of the pairs are in
order; `policy_every` decides when the policy is updated.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from flowrl.config.sections import at_least, share
from flowrl.prompts.loading import Prompt
from flowrl.rewards.base import Model, RewardInputs, RewardOutput, TrainedReward, tensor_output, to_uint8
from flowrl.rewards.base.prompt_needs import no_fields
from flowrl.rewards.image_files import no_listed
from flowrl.rewards.networks.dinov2 import DINOV2_MODEL
from flowrl.rewards.networks.discriminators import (
    CLIP_MODEL,
    CLIP_PROCESSOR,
    DINOV2_SIZE,
    OWNER,
    Backbone,
    Discriminator,
    Logits,
    Loss,
    Pixels,
    attributes_discriminator,
    clip_discriminator,
    dinov2_discriminator,
    discriminator_loss,
    patch_places,
)
from flowrl.rewards.networks.pretrained import check_model, model_of
from flowrl.rewards.references import WORLD, References, open_references
from flowrl.runtime.randomness import Part, counter_choice, counter_seed

_AT_ONCE = 16  # images that are judged in one piece
_SNAPSHOT = 64  # images of the first iteration that are kept to be scored again and again
_FOREIGN = {
    "dinov2": ("processor",),
    "clip": ("image_size", "patches", "class_weight", "patch_weight"),
    "attributes": ("model", "processor", "revision", "image_size"),
}
"""Options that a backbone does not use."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Adversarial:
    """Adv-GRPO's discriminator on an image: `class_weight D(class token) + patch_weight mean D(patches)`. Unbounded;
    the hinge loss keeps it within about [-2, 2]. With `backbone: clip` it is exp(logit_scale) cos / 26, PickScore's,
    with weights that drift. Images are read as 8 bits, so no gradient flows."""

    references: str
    """A folder of images or `asset:NAME` (they serve every prompt), a .json file {prompt: file or files}, or `world`,
    scenes of the embedded world drawn for each prompt."""
    backbone: Backbone = "dinov2"
    """`dinov2` or `attributes`, frozen with a head of their own, or `clip`, its last vision block trained."""
    model: str | None = None
    """Folder or hub id of the backbone; null takes DINOv2-base, or PickScore for `clip`."""
    processor: str | None = None
    """Of `clip`: folder or hub id of its processor; null takes the model's, for PickScore that of its training."""
    revision: str | None = None
    """Branch, tag or commit of the model on the hub."""
    image_size: int | None = None
    """Side that DINOv2 reads images at, a multiple of its patches; null takes 518."""
    loss: Loss | None = None
    """`hinge` (null, for heads), `logistic`, or `pairwise` (always for `clip`)."""
    lr: float | None = None
    """Learning rate of Adam; null takes 1e-4, for `clip` 5e-6."""
    betas: tuple[float, float] = (0.5, 0.999)
    """Decay rates of Adam."""
    steps_per_iteration: int = 4
    """Updates per iteration, each on a batch of its own."""
    batch_size: int = 32
    """Generated images per batch, each with a reference."""
    patches: int | Literal["all"] = "all"
    """How many are read, drawn every time with replacement (64 in the published code), or `all`."""
    class_weight: float | None = None
    """Weight of the class token in the reward, null 0.7."""
    patch_weight: float | None = None
    """Weight of the patches in the reward, and in the loss (where the class token has 1); null 0.3."""
    held_out: float = 0.1
    """Share of reference files that it never learns from, below 1, for `reward_references`."""
    pretrain_steps: int = 50
    """Updates on the first iteration's images before any reward counts."""
    update: bool = True
    """False keeps the pre-trained discriminator as it is. In time a policy finds its blind spots."""
    max_accuracy: float = 0.95
    """A batch that it judges better than this ends the learning of an iteration. Pre-training continues."""
    warmup_iterations: int = 1
    """Iterations at the start in which the policy is not updated."""
    policy_every: int = 1
    """One of this many iterations updates the policy; 10 in the published code."""
    published: bool = False
    """As the published code: see the module."""
    seed: int = 0
    """Seed of the head's start, batches, patches and drawn references."""

    def __post_init__(self) -> None:
        at_least(1, self, "steps_per_iteration batch_size patches image_size policy_every")
        at_least(0, self, "pretrain_steps warmup_iterations lr class_weight patch_weight")
        if self.lr == 0:
            raise ValueError("lr must be positive, got 0: for a discriminator that stays, set update: false.")
        share("held_out", self.held_out, open_end=True)
        if not 0.5 <= self.max_accuracy <= 1:
            raise ValueError(f"max_accuracy must lie in [0.5, 1], got {self.max_accuracy:g}")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas must be two numbers in [0, 1), got {self.betas!r}: [0.5, 0.999] is the default.")
        self._check_backbone()
        if self.weights == (0, 0):
            raise ValueError("class_weight and patch_weight are both 0, so every reward is: raise one.")
        if not self.update and (self.pretrain_steps == 0 or self.policy_every > 1):
            raise ValueError(
                f"with update false it learns in pretrain_steps ({self.pretrain_steps}) only, and the policy need not "
                f"wait: set pretrain_steps to 1 or more and policy_every to 1 (got {self.policy_every})."
            )
        for model in self.models:
            check_model(model.name, what={"dinov2": "DINOv2", "clip": "CLIP"}[self.backbone])
        opened = self.open_sources()
        if self.backbone == "clip" and not opened.by_prompt:
            raise ValueError(
                f"backbone clip compares images of one prompt, but the folder {self.references} does not say what its "
                f"images show: give a .json file that maps prompts to files."
            )

    def _check_backbone(self) -> None:
        """Refuses options that the backbone does not have."""
        for name in _FOREIGN[self.backbone]:
            value = getattr(self, name)
            if value is not None and (name, value) != ("patches", "all"):
                raise ValueError(f"backbone {self.backbone} has no option {name}, got {value!r}: leave it out.")
        if self.backbone == "clip" and self.loss not in (None, "pairwise"):
            raise ValueError(f"backbone clip is trained on pairs, got loss {self.loss!r}: leave loss out.")
        if self.published and self.backbone != "dinov2":
            raise ValueError(f"published is for backbone dinov2 only, got {self.backbone!r}: leave it out.")
        if self.backbone != "clip" and self.warmup_iterations == 0 and self.policy_every == 1:
            raise ValueError(
                "warmup_iterations 0 and policy_every 1 reward the first images by a discriminator that has learned "
                "nothing: set warmup_iterations to 1 or more."
            )

    @property
    def models(self) -> tuple[Model, ...]:
        if self.backbone == "attributes":
            return ()
        return (model_of(self.model or {"dinov2": DINOV2_MODEL, "clip": CLIP_MODEL}[self.backbone]),)

    @property
    def weights(self) -> tuple[float, float]:
        """The weights of class token and patches in the reward."""
        if self.backbone == "clip":
            return 1 / 26, 0.0
        return (
            0.7 if self.class_weight is None else self.class_weight,
            0.3 if self.patch_weight is None else self.patch_weight,
        )

    @property
    def effective_loss(self) -> Loss:
        """The named loss, or the backbone's default."""
        return "pairwise" if self.backbone == "clip" else self.loss or "hinge"

    def lacks_to_learn(self, prompt: Prompt) -> str | None:
        """A reference image, or the record from which one is drawn."""
        return no_fields(prompt, "include") if self.references == WORLD else no_listed(prompt.text, self.references)

    def open_sources(self) -> References:
        """The references."""
        return open_references(self.references, held_out=self.held_out, seed=self.seed)

    def build(self, device: torch.device) -> TrainedReward:
        """Loads the backbone; runs in float32."""
        return AdversarialReward(self, self._discriminator(device), self.open_sources())

    def _discriminator(self, device: torch.device) -> Discriminator:
        if self.backbone == "attributes":
            return attributes_discriminator(seed=self.seed, device=device)
        (model,) = self.models
        if self.backbone == "clip":
            processor = self.processor or (CLIP_PROCESSOR if model.name == CLIP_MODEL else model.name)
            return clip_discriminator(model=model.name, processor=processor, revision=self.revision, device=device)
        return dinov2_discriminator(
            model=model.name,
            revision=self.revision,
            image_size=self.image_size or DINOV2_SIZE,
            seed=self.seed,
            device=device,
            published=self.published,
        )


class _Step(NamedTuple):
    loss: float
    accuracy: float
    margin: float
    learned: bool


class AdversarialReward:
    """A `TrainedReward`; made by `Adversarial`. Before it has learned anything, a head gives 0 to every image."""

    name = "adversarial"
    kind = "adversarial"
    needs = frozenset({"images", "prompts", "metadata"})
    differentiable = False
    waits = False

    def __init__(self, options: Adversarial, discriminator: Discriminator, references: References) -> None:
        self.options = options
        self.discriminator = discriminator
        self.references = references
        lr = options.lr or (5e-6 if options.backbone == "clip" else 1e-4)
        self.optimizer = torch.optim.Adam(discriminator.trained.values(), lr=lr, betas=options.betas)
        steps = f"{options.steps_per_iteration}x{options.batch_size}:pretrain-{options.pretrain_steps}"
        class_weight, patch_weight = options.weights
        self.version = (
            f"adversarial:{discriminator.version}:{options.effective_loss}:{class_weight:g}/{patch_weight:g}:"
            f"patches-{options.patches}:lr-{lr:g}:{steps}{'' if options.update else ':fixed'}:"
            f"published-{options.published}:seed-{options.seed}:float32"
        )
        self._snapshot: dict[str, Any] | None = None  # images of the first iteration, their prompts and records
        self._held_out: tuple[list[str], list[Pixels]] | None = None
        self._warned = False

    def trains_policy(self, iteration: int) -> bool:
        """Whether the policy is updated in an iteration: in the last of every `policy_every`, and after the warm-up."""
        options = self.options
        return iteration >= options.warmup_iterations and (iteration + 1) % options.policy_every == 0

    def __call__(self, inputs: RewardInputs) -> RewardOutput:
        logits = self._judge(list(to_uint8(inputs.images)), inputs.prompts, inputs.iteration)
        device = inputs.images.device
        parts = {}
        if logits.patches.shape[1]:
            parts = {"class": logits.whole.to(device), "patches": logits.patches.mean(dim=1).to(device)}
        return tensor_output(self._reward(logits).to(device), parts)

    def learn(self, inputs: RewardInputs) -> dict[str, float]:
        """Learns from the images of an iteration; the first time it also pre-trains, and keeps a snapshot of them.

        Loss, accuracy and margin are measured on each batch before it is learned from, and leave out pre-training.

        Returns:
            `loss`; `accuracy`, the share of correct signs of the class logit (pairs in order if the loss is
            pairwise; ties count half); `margin`, mean reward of references less that of generated images;
            `reward_references`, of held-out ones, if there are any; `reward_frozen`, of the snapshot; `saturated`,
            1 if `max_accuracy` ended the learning; `steps`, updates made.

        Raises ValueError: a prompt has no reference, or the loss is not finite.
        """
        options = self.options
        images = list(to_uint8(inputs.images))
        pretrained = 0
        if self._snapshot is None:
            self._snapshot = _snapshot(images, inputs, options.seed)
            pretrained = options.pretrain_steps
            for step in range(pretrained):
                self._learn_batch(images, inputs, ("pretrain", step), update=True)
        steps: list[_Step] = []
        for step in range(options.steps_per_iteration if options.update else 1):
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
        return (
            metrics
            | self._watch()
            | {"saturated": float(saturated), "steps": float(pretrained + sum(step.learned for step in steps))}
        )

    def learned(self) -> dict[str, Any]:
        """Weights and the optimizer's state: tensors on the host, numbers."""
        return {"weights": _on_host(self.discriminator.trained), "optimizer": _on_host(self.optimizer.state_dict())}

    def follow(self, learned: Mapping[str, Any]) -> None:
        """Puts `learned()` of the same discriminator back."""
        with torch.no_grad():
            for name, weight in self.discriminator.trained.items():
                weight.copy_(learned["weights"][name])
        self.optimizer.load_state_dict(learned["optimizer"])

    def state(self) -> dict[str, Any]:
        """What it has learned, and the snapshot: tensors on the host, numbers, text."""
        return self.learned() | {"snapshot": self._snapshot, "warned": self._warned}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Puts `state()` back."""
        trained = self.discriminator.trained
        shapes = {name: list(weight.shape) for name, weight in trained.items()}
        saved = {name: list(weight.shape) for name, weight in state["weights"].items()}
        if shapes != saved:
            raise ValueError(
                f"{OWNER}: the saved state is that of another discriminator: it holds {saved}, this one has {shapes}: "
                f"continue with the backbone and model that the run began with."
            )
        self.follow(state)
        self._snapshot, self._warned, self._held_out = state["snapshot"], state["warned"], None

    def _reward(self, logits: Logits) -> Tensor:
        """`class_weight` whole + `patch_weight` mean over patches [B]."""
        class_weight, patch_weight = self.options.weights
        reward = class_weight * logits.whole
        if logits.patches.shape[1]:
            reward = reward + patch_weight * logits.patches.mean(dim=1)
        return reward

    @torch.no_grad()
    def _judge(self, images: Sequence[Pixels], prompts: Sequence[str], iteration: int) -> Logits:
        """Logits as they enter the reward. Within an iteration all images are read at the same patches."""
        pieces = []
        for first in range(0, len(images), _AT_ONCE):
            piece = images[first : first + _AT_ONCE]
            places = self._places(1, "reward patches", iteration)
            pieces.append(self._logits(piece, prompts[first : first + _AT_ONCE], places, as_reward=True))
        return Logits(*(torch.cat(parts) for parts in zip(*pieces, strict=True)))

    def _places(self, batch: int, *key: Part) -> Tensor | None:
        options = self.options
        if options.patches == "all" or not self.discriminator.num_patches:
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
        self, images: Sequence[Pixels], inputs: RewardInputs, key: tuple[Part, ...], *, update: bool, limit: float = 1.0
    ) -> _Step:
        """One batch of generated images, each with a reference, and an update unless its accuracy is too high."""
        options = self.options
        count = min(options.batch_size, len(images))
        items = counter_choice(len(images), count, options.seed, "batch", *key)
        prompts = [inputs.prompts[i] for i in items]
        real = self.references.pick(prompts, [_record(inputs, i) for i in items], *key)
        both = [*real, *(images[i] for i in items)]
        logits = self._logits(both, prompts * 2, self._places(2 * count, "patches", *key), as_reward=False)
        loss = discriminator_loss(options.effective_loss, logits.whole[:count], logits.whole[count:])
        if logits.patches.shape[1]:
            patches = discriminator_loss(options.effective_loss, logits.patches[:count], logits.patches[count:])
            loss = loss + options.weights[1] * patches
        if not bool(torch.isfinite(loss)):
            raise ValueError(f"{OWNER}: the discriminator's loss is {float(loss)} at {key}: lower lr.")
        # The share of correct verdicts among references and generated images; ties count half.
        right, wrong = logits.whole.detach().chunk(2)
        pairs = options.effective_loss == "pairwise"
        signs = torch.sign(right - wrong) if pairs else torch.cat([torch.sign(right), -torch.sign(wrong)])
        accuracy = float((signs.cpu().double() + 1.0).mean() / 2.0)
        learned = update and accuracy <= limit
        if learned:
            self.optimizer.zero_grad(set_to_none=True)
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        reward = self._reward(logits).detach().cpu().double()
        margin = float(reward[:count].mean() - reward[count:].mean())
        return _Step(loss=loss.item(), accuracy=accuracy, margin=margin, learned=learned)

    def _watch(self) -> dict[str, float]:
        """Mean rewards of held-out references, which it never learns from, and of the snapshot, which it saw once."""
        assert self._snapshot is not None
        images, prompts, records = (self._snapshot[key] for key in ("images", "prompts", "records"))
        if self._held_out is None:
            self._held_out = self.references.held_out(prompts, records)
        sets = {"reward_references": self._held_out, "reward_frozen": (prompts, list(images.numpy()))}
        return {
            name: float(self._reward(self._judge(images, texts, 0)).cpu().double().mean())
            for name, (texts, images) in sets.items()
            if images
        }


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
