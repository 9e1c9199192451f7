"""How far a reward can be trusted to train on, measured on a folder of images: `flowrl.reward_card`.

1. Every image is scored twice (the second time as another iteration, with new random draws), then once after each
change of `flowrl.media.perturbations`. 2. The differences are compared with the spread within prompts, which is all
that a group-relative method sees. 3. A pairwise reward's judge sees neighbouring images of each prompt in both orders.
4. Other rewards score the same images.

The folder of the card gets card.json, card.html and, with a model, the images that were drawn.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from flowrl.config.bounds import check_counts
from flowrl.config.options import unknown_name
from flowrl.config.train import resolve_path
from flowrl.evaluation.evaluation_result import refuse_foreign_files
from flowrl.evaluation.reward_card.card_measure import CardMeasures, measure
from flowrl.evaluation.reward_card.card_text import summary, verdicts
from flowrl.generation.drawing import find_device
from flowrl.generation.generate import choose, draw_folder
from flowrl.generation.image_folder import check_needs, read_items
from flowrl.generation.models import check_source, find_source
from flowrl.generation.named_rewards import reward_label, reward_specs
from flowrl.generation.sampling_options import SamplingOptions
from flowrl.generation.scorers import has_prompts, load_rewards
from flowrl.media.perturbations import PERTURBATIONS
from flowrl.prompts.loading import load_prompts
from flowrl.rewards import REWARDS, option_names
from flowrl.runtime.files import plain, write_atomically
from flowrl.runtime.public import public

__all__ = ["RewardCard", "reward_card"]

DRAWN_AT_ONCE = 16


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RewardCard:
    """The card of a reward."""

    card: CardMeasures
    """Everything that was measured."""
    folder: Path
    """Holds card.json, card.html and drawn images."""
    text: str = field(repr=False)
    """Verdicts and numbers for a terminal."""


@public
def reward_card(
    reward: str | Path, folder: str | Path | None = None, *, options: Mapping[str, object] | None = None,
    prompt: str | None = None, prompts: str | Path | None = None, others: str | Sequence[str] = (),
    perturb: str | Sequence[str] = "all", out: str | Path | None = None, model: str | Path | None = None,
    num_prompts: int = 24, samples: int = 8, seed: int = 0, steps: int | None = None, guidance: float | None = None,
    height: int | None = None, width: int | None = None, dtype: str | None = None,
    max_sequence_length: int | None = None, batch_size: int = 16, device: str | None = None, show: bool = True,
    page: Callable[[CardMeasures], str] | None = None,
) -> RewardCard:  # fmt: skip
    """Measures a reward on images of a folder, or on images that a model draws.

    Args:
        reward: its name, FILE.py:FUNCTION, or a YAML file with a list of one reward.
        folder: a folder of images, several per prompt.
        options: options of the reward.
        prompt: the prompt of all images.
        prompts: a file with the prompt of each image, or with the prompts to draw.
        others: rewards to compare with.
        perturb: changes of the images to test; "all" or "none".
        out: folder to write; None is `reward-card-NAME`.
        model: draws the images in place of `folder`: run folder, LoRA or model folder, hub id or `asset:NAME`.
        num_prompts: how many prompts to draw, spread evenly over the file.
        samples: images to draw per prompt.
        seed: the seed of the start noise.
        steps, guidance, height, width, dtype, max_sequence_length: how to sample the model (`SamplingOptions`).
        batch_size: images scored at once.
        device: "cpu", "cuda" or "cuda:N".
        show: show progress.
        page: writes the page of a card.

    Raises:
        FlowrlError: an argument is wrong; most faults are found before weights load.
    """
    sampling = SamplingOptions(
        steps=steps, guidance=guidance, dtype=dtype, max_sequence_length=max_sequence_length, height=height, width=width
    )
    check_counts(num_prompts=num_prompts, samples=samples, batch_size=batch_size)
    specs = reward_specs(str(reward), [f"{key}={value}" for key, value in (options or {}).items()])
    if len(specs) > 1:
        raise ValueError("a card is about one reward: give one, and the rest as `others`.")
    changes = find_changes(perturb)
    if (folder is None) == (model is None):
        raise ValueError("give either a `folder` of images or `model`, which draws them.")
    check_drawing(model, sampling, prompts=prompts, samples=samples)
    beside = others if isinstance(others, str) else ",".join(others)
    spec, rest = without_cache(specs[0]), reward_specs(beside) if beside else []
    home = Path(out) if out is not None else Path(f"reward-card-{reward_label(spec)}")
    refuse_foreign_files(home, ("card.json", "card.html"), {"verdicts", "spread", "retest"})
    if folder is not None:
        items = read_items(Path(folder), prompt=prompt, prompts=prompts)
    else:
        draw_images(str(model), str(prompts), home / "images", sampling=sampling, num_prompts=num_prompts,
                    samples=samples, seed=seed, device=device)  # fmt: skip
        items = read_items(home / "images")
    where = find_device(device)
    rewards = load_rewards([spec, *rest], where)
    for key, one in rewards.items():
        check_needs(one, items, key=key, prompts_given=has_prompts(items, prompt))
    card = measure(rewards, items, batch_size=batch_size, changes=changes, spec=spec, device=where)
    home.mkdir(parents=True, exist_ok=True)
    write_atomically(home / "card.json", json.dumps(as_json(card), indent=1, ensure_ascii=False) + "\n")
    if page is not None:
        write_atomically(home / "card.html", page(card))
    return RewardCard(card=card, folder=home, text=summary(card))


def without_cache(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Switches off a reward's cache of answers, because the second pass would only look them up."""
    name, options = spec.get("name"), dict(spec.get("options") or {})
    if name in REWARDS and "cache" in option_names(name):
        options["cache"] = 0
    return {**spec, "options": options}


def find_changes(names: str | Sequence[str]) -> list[str]:
    """Changes of images by name."""
    if names in ("all", "none"):
        return list(PERTURBATIONS) if names == "all" else []
    chosen = [name.strip() for name in (names.split(",") if isinstance(names, str) else names)]
    for name in chosen:
        if name not in PERTURBATIONS:
            raise ValueError(f"`perturb`: {unknown_name('change', name, [*PERTURBATIONS, 'all', 'none'])}")
    return list(dict.fromkeys(chosen))


def check_drawing(
    model: str | Path | None, sampling: SamplingOptions, *, prompts: str | Path | None, samples: int
) -> None:
    """Refuses to draw without prompts or with fewer than two images per prompt, and model options without a model."""
    if model is None:
        if sampling.given:
            raise ValueError(f"`{sampling.given[0]}` says how `model` draws, and there is no `model`: leave it out.")
    elif prompts is None:
        raise ValueError("`model` draws images for the prompts of a file: add `prompts`.")
    elif samples < 2:
        raise ValueError(f"`samples` must be at least 2, got {samples}: a card compares images of one prompt.")


def draw_images(
    model: str, prompts: str, folder: Path, *, sampling: SamplingOptions, num_prompts: int, samples: int, seed: int,
    device: str | None,
) -> None:  # fmt: skip
    """Draws a model's missing images; the same call resumes where it stopped."""
    source = find_source(model, sampling=sampling)
    check_source(source, judging="flowrl reward card")
    listed = choose(load_prompts(prompts, source.negative, resolve=resolve_path), num_prompts)
    draw_folder(
        source, listed, folder, label="images", samples=samples, seed=seed, batch_size=DRAWN_AT_ONCE,
        device=str(find_device(device)),
    )  # fmt: skip


def as_json(measured: CardMeasures) -> dict[str, Any]:
    """The card as plain numbers, with one entry per image; unknown numbers are null."""
    found = {
        key: plain(getattr(measured, key))
        for key in ("name", "version", "reproduces", "kind", "images", "prompts", "failed", "errors", "mean", "spread",
                    "retest", "repeat", "perturbed", "order", "others", "cost", "notes")
    }  # fmt: skip
    found["repeat"]["signal_to_noise"] = plain(measured.repeat.signal_to_noise)
    found["verdicts"] = [asdict(verdict) for verdict in verdicts(measured)]
    found["values"] = [
        {
            "file": item.file,
            "prompt": item.prompt,
            "first": plain(float(measured.values[i])),
            "second": plain(float(measured.again[i])),
            **{change: plain(float(values[i])) for change, values in measured.changed.items()},
        }
        for i, item in enumerate(measured.items)
    ]
    return found
