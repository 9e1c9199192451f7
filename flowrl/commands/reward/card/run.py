"""`flowrl reward card`: how far a reward can be trusted to train on, measured on a folder of images.

1. Every image is scored twice (the second time as another iteration, so what is random is drawn again), then
   once after each change of `flowrl.media.perturbations`.
2. The differences are set against the spread within prompts, which is all that a group-relative method sees.
3. A pairwise reward's judge is shown neighbouring images of each prompt in both orders.
4. Other rewards score the same images.

The folder of the card gets card.json, card.html and, with --model, the images that were drawn.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from flowrl.commands.sampling_arguments import SAMPLING, given_flags, sampling_options
from flowrl.config.options import unknown_name
from flowrl.config.train import resolve_path
from flowrl.evaluation.reward_card.card_measure import Card, measure
from flowrl.generation.drawing import find_device
from flowrl.generation.generate import choose, draw_folder
from flowrl.generation.image_folder import check_needs, read_items
from flowrl.generation.models import check_source, find_source
from flowrl.generation.named_rewards import reward_label, reward_specs
from flowrl.generation.scorers import has_prompts, load_rewards
from flowrl.media.perturbations import PERTURBATIONS
from flowrl.pages.card_text import summary, verdicts
from flowrl.pages.reward_card_page import render
from flowrl.prompts.loading import load_prompts
from flowrl.rewards import REWARDS, option_names
from flowrl.runtime.files import plain, read_json, refuse_foreign, write_atomically
from flowrl.runtime.scrubbing import say as print

DRAWN_AT_ONCE = 16


def run(parsed: argparse.Namespace) -> int:
    """Measures a reward, writes its card, prints the table; returns 0.

    Args:
        parsed: the command line.

    Raises:
        ValueError: before weights load for what can be known then.
    """
    spec, others, out = _checked(parsed)
    known = _is_card(out / "card.json")
    refuse_foreign(out / "card.json", own=known)
    refuse_foreign(out / "card.html", own=known)
    if parsed.model is None:
        items = read_items(parsed.folder, prompt=parsed.prompt, prompts=parsed.prompts)
    else:
        draw_images(parsed, out / "images")
        items = read_items(out / "images")
    device = find_device(parsed.device)
    rewards = load_rewards([spec, *others], device)
    for key, reward in rewards.items():
        check_needs(reward, items, key=key, prompts_given=has_prompts(items, parsed.prompt))
    changes = _changes(parsed.perturb)
    measured = measure(rewards, items, batch_size=parsed.batch_size, changes=changes, spec=spec, device=device)
    out.mkdir(parents=True, exist_ok=True)
    write_atomically(out / "card.json", json.dumps(as_json(measured), indent=1, ensure_ascii=False) + "\n")
    write_atomically(out / "card.html", render(measured))
    print(summary(measured))
    print(f"wrote {out / 'card.json'} and card.html")
    return 0


def _checked(parsed: argparse.Namespace) -> tuple[dict[str, Any], list[dict[str, Any]], Path]:
    """The reward, the others and the folder of the card."""
    specs = reward_specs(parsed.reward, parsed.option)
    if len(specs) > 1:
        raise ValueError("a card is about one reward: give one, and the rest with --with.")
    _changes(parsed.perturb)
    if (parsed.folder is None) == (parsed.model is None):
        raise ValueError("give either a FOLDER of images or --model, which draws them.")
    if parsed.model is not None and parsed.prompts is None:
        raise ValueError("--model draws images for the prompts of a file: add --prompts FILE.")
    if parsed.model is not None and parsed.samples < 2:
        raise ValueError(f"--samples must be at least 2, got {parsed.samples}: a card compares images of one prompt.")
    if parsed.model is None and (given := given_flags(parsed, SAMPLING)):
        raise ValueError(f"{given[0]} says how --model draws, and there is no --model: leave it out.")
    others = reward_specs(parsed.others) if parsed.others else []
    return without_cache(specs[0]), others, parsed.out or Path(f"reward-card-{reward_label(specs[0])}")


def without_cache(spec: Mapping[str, Any]) -> dict[str, Any]:
    """A reward that keeps answers would repeat itself in the second pass because it looks them up: none are kept."""
    name, options = spec.get("name"), dict(spec.get("options") or {})
    if name in REWARDS and "cache" in option_names(name):
        options["cache"] = 0
    return {**spec, "options": options}


def _changes(names: str) -> list[str]:
    if names in ("all", "none"):
        return list(PERTURBATIONS) if names == "all" else []
    chosen = [name.strip() for name in names.split(",")]
    for name in chosen:
        if name not in PERTURBATIONS:
            raise ValueError(f"--perturb: {unknown_name('change', name, [*PERTURBATIONS, 'all', 'none'])}")
    return list(dict.fromkeys(chosen))


def draw_images(parsed: argparse.Namespace, folder: Path) -> None:
    """Draws what is missing of the images for `--model`; the same command resumes where it stopped.

    Raises:
        ValueError: before weights load: the model is not there or makes videos, or a prompt is bad.
    """
    source = find_source(parsed.model, sampling=sampling_options(parsed))
    check_source(source, judging="flowrl reward card")
    prompts = choose(load_prompts(parsed.prompts, source.negative, resolve=resolve_path), parsed.num_prompts)
    draw_folder(
        source, prompts, folder, label="images", samples=parsed.samples, seed=parsed.seed, batch_size=DRAWN_AT_ONCE,
        device=str(find_device(parsed.device)),
    )  # fmt: skip


def _is_card(path: Path) -> bool:
    """Whether this command wrote a file."""
    try:
        return {"verdicts", "spread", "retest"} <= read_json(path).keys()
    except ValueError:
        return False


def as_json(measured: Card) -> dict[str, Any]:
    """The card as plain numbers, null where unknown, with one entry per image."""
    found = {
        key: plain(getattr(measured, key))
        for key in ("name", "version", "reproduces", "kind", "images", "prompts", "failed", "errors", "mean", "spread",
                    "retest", "repeat", "perturbed", "order", "others", "cost", "notes")
    }  # fmt: skip
    found["repeat"]["signal_to_noise"] = plain(measured.repeat.signal_to_noise)
    found["verdicts"] = [asdict(verdict) for verdict in verdicts(measured)]
    found["values"] = [
        {"file": item.file, "prompt": item.prompt, "first": plain(float(measured.values[i])),
         "second": plain(float(measured.again[i])),
         **{change: plain(float(values[i])) for change, values in measured.changed.items()}}
        for i, item in enumerate(measured.items)
    ]  # fmt: skip
    return found
