"""The adversarial reward: a discriminator that learns, along with the policy, to tell its images from references.

Adv-GRPO (arXiv 2511.20256). An iteration: images, rewards with the discriminator as it is, the policy's update, then
the discriminator's. Deviations from the published code, which `published: true` takes back for DINOv2:

    features are normalised neither in the reward nor in learning       published: in the reward only
    one preprocessing, antialiased, for both                            published: not antialiased in the reward

and for good: float32 rather than bfloat16, patches and batches named by counters, all patches unless told otherwise.

The published PickScore variant updates the scorer while references score below the policy's images on average.
`backbone: clip` with `max_accuracy: 0.5` comes near that: the scorer learns while fewer than half of the pairs are in
order; the policy's turns are those of `policy_every`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch

from flowrl.rewards import TrainedReward
from flowrl.rewards.adversarial_learning import AdversarialReward, Settings
from flowrl.rewards.networks.discriminators import (
    CLIP_MODEL,
    CLIP_PROCESSOR,
    DINOV2_MODEL,
    DINOV2_SIZE,
    OWNER,
    Backbone,
    Discriminator,
    Loss,
    attributes_discriminator,
    clip_discriminator,
    dinov2_discriminator,
)
from flowrl.rewards.networks.pretrained import check_model
from flowrl.rewards.references import open_references


def adversarial(
    *,
    device: torch.device,
    references: str,
    backbone: Backbone = "dinov2",
    model: str | None = None,
    processor: str | None = None,
    revision: str | None = None,
    image_size: int | None = None,
    loss: Loss | None = None,
    lr: float | None = None,
    betas: Sequence[float] = (0.5, 0.999),
    steps_per_iteration: int = 4,
    batch_size: int = 32,
    patches: int | Literal["all"] = "all",
    class_weight: float | None = None,
    patch_weight: float | None = None,
    held_out: float = 0.1,
    pretrain_steps: int = 50,
    update: bool = True,
    max_accuracy: float = 0.95,
    warmup_iterations: int = 1,
    policy_every: int = 1,
    published: bool = False,
    seed: int = 0,
) -> TrainedReward:
    """What the discriminator makes of an image: `class_weight D(class token) + patch_weight mean D(patches)`.

    Unbounded; trained by the hinge loss it stays within about [-2, 2]. With `backbone: clip` the value is
    exp(logit_scale) cos / 26, PickScore's, with weights that drift. Images are read as 8 bits, so no gradient flows.

    Args:
        device: where it runs, in float32.
        references: a folder of images (they serve every prompt), a .json file {prompt: file or files}, or `world`,
            scenes of the embedded world drawn for each prompt.
        backbone: `dinov2` or `attributes`, frozen with a head of their own, or `clip`, its last vision block trained.
        model: folder or hub id of the backbone; null takes DINOv2-base, or PickScore for `clip`.
        processor: of `clip`: folder or hub id of its processor; null takes the model's, and for PickScore the one
            it was trained with.
        revision: branch, tag or commit of the model on the hub.
        image_size: side that DINOv2 reads images at, a multiple of its patches; null takes 518.
        loss: `hinge` (null, for heads), `logistic`, or `pairwise` (always for `clip`).
        lr: of Adam; null takes 1e-4, for `clip` 5e-6.
        betas: of Adam.
        steps_per_iteration: updates an iteration, each on a batch of its own.
        batch_size: generated images a batch, each with a reference.
        patches: how many are read, drawn anew with replacement (64 in the published code), or `all`.
        class_weight: of the class token in the reward, null 0.7.
        patch_weight: of the patches in the reward, and in the loss beside 1 for the class token; null 0.3.
        held_out: share of reference files that it never learns from, for `reward_references`.
        pretrain_steps: updates on the first iteration's images before any reward counts.
        update: false: what pre-training made stays. A policy finds such a discriminator's blind spots in time.
        max_accuracy: a batch that it judges better than this ends the learning of an iteration. Pre-training goes on.
        warmup_iterations: at the start, in which the policy is not updated.
        policy_every: iterations of which one updates the policy; 10 in the published code.
        published: as the published code: see the module.
        seed: of the head's start, batches, patches and drawn references.
    """
    check(
        references=references,
        backbone=backbone,
        model=model,
        processor=processor,
        revision=revision,
        image_size=image_size,
        loss=loss,
        lr=lr,
        betas=betas,
        steps_per_iteration=steps_per_iteration,
        batch_size=batch_size,
        patches=patches,
        class_weight=class_weight,
        patch_weight=patch_weight,
        held_out=held_out,
        pretrain_steps=pretrain_steps,
        update=update,
        max_accuracy=max_accuracy,
        warmup_iterations=warmup_iterations,
        policy_every=policy_every,
        published=published,
        seed=seed,
    )
    opened = open_references(references, held_out=held_out, seed=seed)
    discriminator: Discriminator
    if backbone == "clip":
        model, processor = model or CLIP_MODEL, processor or (CLIP_PROCESSOR if model in (None, CLIP_MODEL) else model)
        discriminator = clip_discriminator(model=model, processor=processor, revision=revision, device=device)
        class_weight, patch_weight, loss, lr = 1 / 26, 0.0, "pairwise", lr or 5e-6
    elif backbone == "dinov2":
        discriminator = dinov2_discriminator(
            model=model or DINOV2_MODEL, revision=revision, image_size=image_size or DINOV2_SIZE, seed=seed,
            device=device, published=published,
        )  # fmt: skip
    else:
        discriminator = attributes_discriminator(seed=seed, device=device)
    settings = Settings(
        loss=loss or "hinge",
        patches=None if patches == "all" else patches,
        class_weight=0.7 if class_weight is None else class_weight,
        patch_weight=0.3 if patch_weight is None else patch_weight,
        steps=steps_per_iteration,
        batch_size=batch_size,
        pretrain_steps=pretrain_steps,
        update=update,
        max_accuracy=max_accuracy,
        warmup_iterations=warmup_iterations,
        seed=seed,
    )
    optimizer = torch.optim.Adam(discriminator.trained.values(), lr=lr or 1e-4, betas=(betas[0], betas[1]))
    learning = f"lr-{lr or 1e-4:g}:{steps_per_iteration}x{batch_size}:pretrain-{pretrain_steps}"
    version = (
        f"adversarial:{discriminator.version}:{settings.loss}:{settings.class_weight:g}/{settings.patch_weight:g}:"
        f"patches-{patches}:{learning if update else learning + ':fixed'}:published-{published}:seed-{seed}:float32"
    )
    return AdversarialReward(
        discriminator, opened, settings, optimizer=optimizer, policy_every=policy_every, version=version
    )


def check(
    *,
    references: str,
    backbone: Backbone = "dinov2",
    model: str | None = None,
    processor: str | None = None,
    revision: str | None = None,
    image_size: int | None = None,
    loss: Loss | None = None,
    lr: float | None = None,
    betas: Sequence[float] = (0.5, 0.999),
    steps_per_iteration: int = 4,
    batch_size: int = 32,
    patches: int | Literal["all"] = "all",
    class_weight: float | None = None,
    patch_weight: float | None = None,
    held_out: float = 0.1,
    pretrain_steps: int = 50,
    update: bool = True,
    max_accuracy: float = 0.95,
    warmup_iterations: int = 1,
    policy_every: int = 1,
    published: bool = False,
    seed: int = 0,
) -> None:
    """Refuses option values that are wrong or contradict each other, and references that are not there."""
    for name, value, least in (
        ("steps_per_iteration", steps_per_iteration, 1), ("batch_size", batch_size, 1), ("patches", patches, 1),
        ("image_size", image_size, 1), ("pretrain_steps", pretrain_steps, 0), ("policy_every", policy_every, 1),
        ("warmup_iterations", warmup_iterations, 0), ("lr", lr, 0.0), ("class_weight", class_weight, 0.0),
        ("patch_weight", patch_weight, 0.0),
    ):  # fmt: skip
        if isinstance(value, (int, float)) and not (math.isfinite(value) and value >= least):
            raise ValueError(f"{OWNER}: {name} must be at least {least}, got {value}.")
    if lr == 0:
        raise ValueError(f"{OWNER}: lr must be positive, got 0: for a discriminator that stays, set update: false.")
    if not 0 <= held_out < 1:
        raise ValueError(f"{OWNER}: held_out must lie in [0, 1), got {held_out:g}: it is a share of the references.")
    if not 0.5 <= max_accuracy <= 1:
        raise ValueError(f"{OWNER}: max_accuracy must lie in [0.5, 1], got {max_accuracy:g}: 0.5 is guessing.")
    _check_betas(betas)
    given: dict[str, Any] = {"model": model, "processor": processor, "revision": revision, "image_size": image_size}
    given |= {"patches": None if patches == "all" else patches, "class_weight": class_weight}
    _check_backbone(backbone, given | {"patch_weight": patch_weight})
    if backbone == "clip" and loss not in (None, "pairwise"):
        raise ValueError(f"{OWNER}: backbone clip is trained on pairs, got loss {loss!r}: leave loss out.")
    if backbone != "clip" and (class_weight, patch_weight) == (0, 0):
        raise ValueError(f"{OWNER}: class_weight and patch_weight are both 0, so every reward is: raise one.")
    if published and backbone != "dinov2":
        raise ValueError(f"{OWNER}: published is for backbone dinov2 only, got {backbone!r}: leave it out.")
    if not update and (pretrain_steps == 0 or policy_every > 1):
        raise ValueError(
            f"{OWNER}: with update false it learns in pretrain_steps ({pretrain_steps}) only, and the policy need not "
            f"wait: set pretrain_steps to 1 or more and policy_every to 1 (got {policy_every})."
        )
    if backbone != "clip" and warmup_iterations == 0 and policy_every == 1:
        raise ValueError(
            f"{OWNER}: warmup_iterations 0 and policy_every 1 reward the first images by a discriminator that has "
            f"learned nothing: set warmup_iterations to 1 or more."
        )
    opened = open_references(references, held_out=held_out, seed=seed)
    if backbone == "clip" and not opened.by_prompt:
        raise ValueError(
            f"{OWNER}: backbone clip compares images of one prompt, but the folder {references} does not say what "
            f"its images show: give a .json file that maps prompts to files."
        )


def _check_betas(betas: object) -> None:
    numbers = list(betas) if isinstance(betas, (list, tuple)) else []
    if len(numbers) != 2 or not all(isinstance(b, (int, float)) and 0 <= b < 1 for b in numbers):
        raise ValueError(f"{OWNER}: betas must be two numbers in [0, 1), got {betas!r}: [0.5, 0.999] is the default.")


def _check_backbone(backbone: Backbone, given: Mapping[str, Any]) -> None:
    """Refuses options that a backbone has no use for, and a model that cannot be there."""
    foreign = {
        "dinov2": ("processor",),
        "clip": ("image_size", "patches", "class_weight", "patch_weight"),
        "attributes": ("model", "processor", "revision", "image_size"),
    }[backbone]
    for name in foreign:
        if given[name] is not None:
            raise ValueError(f"{OWNER}: backbone {backbone} has no option {name}, got {given[name]!r}: leave it out.")
    if backbone == "dinov2":
        check_model(given["model"] or DINOV2_MODEL, owner=OWNER, what="DINOv2")
    if backbone == "clip":
        check_model(given["model"] or CLIP_MODEL, owner=OWNER, what="CLIP")
