"""Does foresight see what moves as nothing moves (MIND-V's reward, arXiv 2512.06628)?

    python tests/trials/claims/foresight.py runs/foresight --out docs/research/claims/foresight.json

No V-JEPA 2 has seen the embedded world, so one is made for each of three seeds: `VJEPA2Model` itself, of a million
weights, learns from even clips of the training prompts by guessing, from the tokens that are shown, the features that a
running average of its encoder has of the hidden ones. The average is kept, as in the published checkpoints. What is
hidden is ours: four times of five the later half, which is what the reward asks; else a block through all frames.

Then the reward `physics` scores 200 held-out clips and three others made of each: the shape *jumps* at least 20 pixels
and moves on evenly, it *vanishes*, or it *turns back*, at the sixth, seventh or eighth of nine frames. Decided before
the models that count were made, after looks at others: an effect is the share of the clips that score above what was
made of them, less a half; `mean_*` is how much higher, over the spread among even clips. Beside it the same share of
`temporal_smoothness`, which learned nothing.

A model whose weights are already in the folder is taken as it is.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from scripted import origin
from torch import Tensor, nn

from flowrl.rewards import Reward, RewardInputs, build_reward
from flowrl.runtime.files import write_atomically
from flowrl.runtime.progress import progress
from flowrl.runtime.randomness import counter_seed
from flowrl.world.clips import FRAMES, clip_shapes, draw_clip, motion_records
from flowrl.world.scenes import BACKGROUND, SIZE, Shape

SEEDS, CLIPS, POOL = (0, 1, 2), 200, 4000
WINDOW, CONTEXT, TUBELET, CROP, PATCH, WIDTH = 8, 4, 2, 32, 8, 96
STEPS, BATCH, RATE, DECAY = 1600, 32, 1.5e-3, 0.99
SIDE = CROP // PATCH
TOKENS = torch.arange(WINDOW // TUBELET * SIDE**2)
SHOWN = CONTEXT // TUBELET * SIDE**2
EDGE = 1.5  # pixels between a shape and the border
LEAST_JUMP = 20.0
KINDS = ("jumps", "vanishes", "turns back")


# ---- a model that has seen the world ---------------------------------------------------------------------------------


def processed(processor: Any, clips: np.ndarray) -> Tensor:
    """Clips as the model takes them, [n, frames, 3, crop, crop]."""
    frames = torch.from_numpy(clips).permute(0, 1, 4, 2, 3)
    pixels: Tensor = processor(list(frames), return_tensors="pt", do_sample_frames=False)["pixel_values_videos"]
    return pixels


def shown_and_hidden(rng: np.random.Generator) -> tuple[Tensor, Tensor]:
    """Numbers of the tokens that are shown, and of those to guess."""
    if rng.random() < 0.8:
        return TOKENS[:SHOWN], TOKENS[SHOWN:]
    block = np.zeros((SIDE, SIDE), dtype=bool)
    for _ in range(2):
        height, width = rng.integers(1, SIDE - 1, size=2)
        top, left = rng.integers(0, SIDE - height + 1), rng.integers(0, SIDE - width + 1)
        block[top : top + height, left : left + width] = True
    hidden = torch.from_numpy(np.tile(block.reshape(-1), WINDOW // TUBELET))
    return TOKENS[~hidden], TOKENS[hidden]


def encoded(encoder: Any, pixels: Tensor, numbers: Tensor) -> Tensor:
    """Features of some tokens that have seen each other alone."""
    states = encoder.embeddings(pixels)[:, numbers]
    for layer in encoder.layer:
        states = layer(states, numbers.expand(len(states), -1))[0]
    features: Tensor = encoder.layernorm(states)
    return features


def guessed(model: Any, pixels: Tensor, shown: Tensor, hidden: Tensor) -> Tensor:
    """What the predictor makes of hidden tokens' features from those shown."""
    features = encoded(model.encoder, pixels, shown)
    whole = features.new_zeros(len(pixels), len(TOKENS), WIDTH).index_copy(1, shown, features)
    masks = [[numbers.expand(len(pixels), -1)] for numbers in (shown, hidden)]
    foreseen: Tensor = model.predictor(whole, *masks).last_hidden_state
    return foreseen


def make_model(seed: int, folder: Path) -> None:
    """Trains a V-JEPA 2 on even clips and writes its folder."""
    torch.manual_seed(seed)
    rng = np.random.default_rng(counter_seed(seed, "foresight"))
    config = transformers.VJEPA2Config(
        crop_size=CROP, patch_size=PATCH, frames_per_clip=WINDOW, tubelet_size=TUBELET, hidden_size=WIDTH,
        num_attention_heads=3, num_hidden_layers=4, pred_hidden_size=WIDTH, pred_num_attention_heads=3,
        pred_num_hidden_layers=4, pred_num_mask_tokens=2, pred_zero_init_mask_tokens=False,
    )  # fmt: skip
    model, processor = transformers.VJEPA2Model(config), transformers.VJEPA2VideoProcessor(crop_size=CROP)
    average = copy.deepcopy(model.encoder).requires_grad_(False)
    records = motion_records()[0]
    drawn = [draw_clip(clip_shapes(records[int(rng.integers(len(records)))], rng)) for _ in range(POOL)]
    pool = processed(processor, np.stack(drawn))
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.04, betas=(0.9, 0.98))
    with progress(f"seed {seed}", STEPS) as advance:
        for step in range(STEPS):
            falling = (1 + math.cos(math.pi * step / STEPS)) / 2
            for group in optimizer.param_groups:
                group["lr"] = RATE * min(1.0, (step + 1) / 100) * (0.1 + 0.9 * falling)
            first = int(rng.integers(FRAMES - WINDOW + 1))
            pixels = pool[torch.from_numpy(rng.integers(POOL, size=BATCH))][:, first : first + WINDOW]
            shown, hidden = shown_and_hidden(rng)
            with torch.no_grad():
                target = average(pixel_values_videos=pixels).last_hidden_state[:, hidden]
            error = (guessed(model, pixels, shown, hidden) - nn.functional.layer_norm(target, (WIDTH,))).abs().mean()
            optimizer.zero_grad()
            error.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            with torch.no_grad():
                for slow, fast in zip(average.parameters(), model.encoder.parameters(), strict=True):
                    slow.lerp_(fast, 1 - DECAY)
            advance(f"error {error.item():.3f}")
    model.encoder.load_state_dict(average.state_dict())
    processor.save_pretrained(folder)
    model.save_pretrained(folder)


# ---- clips that move as nothing moves --------------------------------------------------------------------------------


def jumped(shapes: list[Shape], at: int, rng: np.random.Generator) -> list[Shape]:
    """The shape is elsewhere from a frame on, and moves on as before."""
    low, high = shapes[0].radius + EDGE, SIZE - shapes[0].radius - EDGE
    while True:
        x, y = rng.uniform(low, high, size=2)
        moved = [replace(s, x=s.x + x - shapes[at].x, y=s.y + y - shapes[at].y) for s in shapes[at:]]
        far = math.hypot(x - shapes[at].x, y - shapes[at].y) >= LEAST_JUMP
        if far and all(low <= place <= high for shape in moved for place in (shape.x, shape.y)):
            return [*shapes[:at], *moved]


def held_out(seed: int) -> dict[str, np.ndarray]:
    """Even clips, and what was made of each: uint8 [n, frames, size, size, 3]."""
    rng = np.random.default_rng(counter_seed(seed, "foresight", "held out"))
    records = motion_records()[1]
    found: dict[str, list[np.ndarray]] = {kind: [] for kind in ("even", *KINDS)}
    for number in range(CLIPS):
        shapes, at = clip_shapes(records[number % len(records)], rng), 5 + number % 3
        even = draw_clip(shapes)
        found["even"].append(even)
        found["jumps"].append(draw_clip(jumped(shapes, at, rng)))
        gone = even.copy()
        gone[at:] = np.asarray(BACKGROUND, dtype=np.uint8)
        found["vanishes"].append(gone)
        back = [*range(at), *(2 * (at - 1) - frame for frame in range(at, FRAMES))]
        found["turns back"].append(even[back])
    return {kind: np.stack(clips) for kind, clips in found.items()}


def scores(reward: Reward, clips: np.ndarray) -> np.ndarray:
    """The reward of every clip."""
    videos = torch.from_numpy(clips).permute(0, 1, 4, 2, 3).float() / 255
    numbers = torch.arange(len(videos))
    inputs = RewardInputs(
        prompts=[""] * len(videos), images=videos[:, 0], metadata=[{} for _ in clips], group_ids=numbers,
        sample_ids=numbers, videos=videos,
    )  # fmt: skip
    return reward(inputs).values.double().numpy()


def compared(reward: Reward, clips: dict[str, np.ndarray]) -> Iterator[tuple[str, float, float]]:
    """Of each kind, the share of pairs that the even clip wins less a half, and the mean lead in deviations."""
    even = scores(reward, clips["even"])
    for kind in KINDS:
        lead = even - scores(reward, clips[kind])
        share = float(((lead > 0) + 0.5 * (lead == 0)).mean())
        yield kind, share - 0.5, float(lead.mean() / even.std())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    effects: dict[str, dict[str, list[float]]] = {}
    measured: dict[str, list[float]] = {}
    for seed in SEEDS:
        folder = given.models / f"seed{seed}"
        if not (folder / "model.safetensors").exists():
            make_model(seed, folder)
        clips = held_out(seed)
        foresight = {"model": str(folder), "window": WINDOW, "context": CONTEXT, "stride": 1}
        for name, options in (("physics", foresight), ("temporal_smoothness", {})):
            for kind, share, lead in compared(build_reward(name, options=options), clips):
                word = kind.replace(" ", "_")
                if name == "physics":
                    effects.setdefault(word, {"per_seed": []})["per_seed"].append(share)
                    effects.setdefault(f"mean_{word}", {"per_seed": []})["per_seed"].append(lead)
                else:
                    measured.setdefault(f"{name}_{word}", []).append(share)
                print(seed, name, kind, round(share, 3), round(lead, 3), flush=True)
    write_atomically(given.out, json.dumps(origin() | {"measured": measured, "effects": effects}, indent=1) + "\n")


if __name__ == "__main__":
    main()
