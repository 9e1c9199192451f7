"""`flowrl reward card`: how far a reward can be trusted to train on, measured on a folder of images.

1. Every image is scored twice (the second time as another iteration, so what is drawn at random is drawn again), then
   once after each change of `flowrl.media.perturbations`.
2. The differences are set against the spread within prompts, which is all that a group-relative method sees.
3. A pairwise reward's judge is shown neighbouring images of each prompt in both orders.
4. Other rewards score the same images.

The folder of the card gets card.json, card.html and, with --model, the images that were drawn.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

from flowrl.commands.reward.card_measure import Card, measure
from flowrl.commands.reward.card_page import render
from flowrl.commands.reward.card_text import summary, verdicts
from flowrl.commands.reward.score import check_batch_size, has_prompts, load_rewards
from flowrl.config.options import unknown_name
from flowrl.files import write_atomically
from flowrl.generation.image_folder import check_needs, read_items, reward_specs
from flowrl.media.images import save_png
from flowrl.media.perturbations import PERTURBATIONS
from flowrl.progress import progress
from flowrl.prompts.loading import eval_items, read_prompts
from flowrl.randomness import sample_normals
from flowrl.rewards import REWARDS, option_names

DRAWN_AT_ONCE = 16


def card(parsed: argparse.Namespace) -> int:
    """Measures a reward, writes its card, prints the table; returns 0.

    Args:
        parsed: as `flowrl.commands.reward.arguments.add_card`.

    Raises:
        ValueError: before weights load for what can be known then.
    """
    spec, others, out = _checked(parsed)
    if parsed.model is None:
        items = read_items(parsed.folder, prompt=parsed.prompt, prompts=parsed.prompts)
    else:
        folder = out / "images"
        if folder.exists():
            raise ValueError(f"{folder} is there already: give it as FOLDER without --model, or another --out.")
        draw_images(parsed.model, parsed.prompts, folder, num_prompts=parsed.num_prompts, samples=parsed.samples)
        items = read_items(folder)
    rewards = load_rewards([spec, *others], parsed.device)
    for key, reward in rewards.items():
        check_needs(reward, items, key=key, prompts_given=has_prompts(items, parsed.prompt))
    changes = _changes(parsed.perturb)
    measured = measure(
        rewards, items, batch_size=parsed.batch_size, changes=changes, spec=spec, device=parsed.device
    )  # fmt: skip
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
    check_batch_size(parsed.batch_size)
    _changes(parsed.perturb)
    if (parsed.folder is None) == (parsed.model is None):
        raise ValueError("give either a FOLDER of images or --model, which draws them.")
    if parsed.model is not None and parsed.prompts is None:
        raise ValueError("--model draws images for the prompts of a file: add --prompts FILE.")
    if parsed.model is not None and (parsed.num_prompts < 1 or parsed.samples < 2):
        raise ValueError(
            f"--num-prompts must be at least 1 and --samples 2, got {parsed.num_prompts}, {parsed.samples}."
        )
    others = reward_specs(parsed.others) if parsed.others else []
    label = str(specs[0].get("name") or specs[0].get("function"))
    return without_cache(specs[0]), others, parsed.out or Path(f"reward-card-{label}")


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


def draw_images(model: str, prompts: Path, folder: Path, *, num_prompts: int, samples: int) -> None:
    """Draws images as GenEval lays them out: NNNNN/metadata.jsonl and NNNNN/samples/NNNN.png.

    Prompts are taken evenly from the file, each once. The start noise is a function of prompt and sample.

    Raises:
        ValueError: before weights load: the model is not there or makes videos, or a prompt is bad.
    """
    from flowrl.generation.models import check_images, check_source, find_source, load_source, schedule_of
    from flowrl.training.heldout import generate

    source = find_source(model)
    check_source(source)
    check_images(source, "flowrl reward card")
    rows = list({row.key: row for row in read_prompts(prompts, source.negative)}.values())
    items = eval_items(rows, num_prompts=num_prompts, samples_per_prompt=samples)
    pipeline = load_source(source)
    schedule = schedule_of(source, pipeline)
    with progress("drawing images", len(range(0, len(items), DRAWN_AT_ONCE))) as advance:
        for first in range(0, len(items), DRAWN_AT_ONCE):
            batch = items[first : first + DRAWN_AT_ONCE]
            x = sample_normals(pipeline.latent_shape, [(0, "card", item.prompt.key, item.sample) for item in batch])
            drawn = [item.prompt for item in batch]
            images = generate(pipeline, drawn, x, schedule, guidance_scale=source.guidance_scale).cpu()
            for item, image in zip(batch, images, strict=True):
                place = folder / f"{item.prompt_id:05d}"
                save_png(image, place / "samples" / f"{item.sample:04d}.png")
                write_atomically(place / "metadata.jsonl", json.dumps(item.prompt.record) + "\n")
            advance("")


def as_json(measured: Card) -> dict[str, Any]:
    """The card as plain numbers, null where unknown, with one line per image."""
    plain = {
        key: _plain(getattr(measured, key))
        for key in ("name", "version", "kind", "images", "prompts", "failed", "errors", "mean", "spread", "retest",
                    "repeat", "perturbed", "order", "others", "cost", "notes")
    }  # fmt: skip
    plain["repeat"]["signal_to_noise"] = _plain(measured.repeat.signal_to_noise)
    plain["verdicts"] = [asdict(verdict) for verdict in verdicts(measured)]
    plain["values"] = [
        {"file": item.file, "prompt": item.prompt, "first": _plain(float(measured.values[i])),
         "second": _plain(float(measured.again[i])),
         **{change: _plain(float(values[i])) for change, values in measured.changed.items()}}
        for i, item in enumerate(measured.items)
    ]  # fmt: skip
    return plain


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return _plain(asdict(value))
    if isinstance(value, Mapping):
        return {str(key): _plain(part) for key, part in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
