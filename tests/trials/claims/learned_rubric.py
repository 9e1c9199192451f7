"""A rubric learned from pairs, or a judge's plain word (AutoRubric-T2I, arXiv 2605.17602)?

    python tests/trials/claims/learned_rubric.py --out docs/research/claims/learned_rubric.json

The judge is scripted, so this is about the mechanism, given its flaw: asked whether an image matches its prompt, its
log-odds are what is right of three things (both objects, their number, their colours) and 20 times the saturation;
asked about one rule, it sees that alone, and is wrong with probability 0.15. It proposes eight rules for every pair:
the three that matter, two that go with saturation, three that mean nothing. People prefer the image of which more is
right. Pairs are drawn scenes of two coloured objects, one or both with errors; 200 pairs to learn from, 400 others to
measure on, five seeds. Decided before: `agreement` is the share of other pairs in which the learned rubric prefers
what people prefer (a tie is half) less that of the plain word; `over_equal` the same less that of all eight rules
with equal weights.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from scripted import chance, images_of, judge_by, named, origin

from flowrl.config.options import build_options
from flowrl.rewards import RewardInputs, build_reward
from flowrl.rewards.judges.chat import Answer, Question
from flowrl.rewards.judges.rubric import RubricTraining, Rule, save_rubric, train_rubric
from flowrl.runtime.files import write_atomically
from flowrl.world.scenes import COLORS, SHAPES, draw_scene, random_scene

SEEDS, LEARNED, MEASURED, WRONG, LIKING = 5, 200, 400, 0.15, 20.0
JUDGE = {"server": "http://127.0.0.1:1/v1", "model": "scripted"}
MATTER = ("Are both objects there?", "Are there exactly two objects?", "Has every object its colour?")
LIKED = ("Is it colourful?", "Are the objects large?")
NOTHING = ("Is the composition balanced?", "Has it charm?", "Is the light soft?")
RULES = (*MATTER, *LIKED, *NOTHING)


def pairs(seed: int, count: int) -> list[tuple[str, list[tuple[np.ndarray, tuple[bool, ...]]]]]:
    """Prompts with two images each, and what is right of each image, the preferred one first."""
    rng = np.random.default_rng((53, seed))
    found: list[tuple[str, list[tuple[np.ndarray, tuple[bool, ...]]]]] = []
    while len(found) < count:
        a, b = (str(label) for label in rng.permutation(list(SHAPES))[:2])
        first, second = (str(color) for color in rng.permutation(list(COLORS))[:2])
        include = [{"class": a, "count": 1, "color": first}, {"class": b, "count": 1, "color": second}]
        two = [_drawn(include, rng) for _ in range(2)]
        if sum(two[0][1]) != sum(two[1][1]):
            two.sort(key=lambda drawn: -sum(drawn[1]))
            found.append((f"a photo of a {first} {a} and a {second} {b}", two))
    return found


def _drawn(include: list[dict[str, Any]], rng: np.random.Generator) -> tuple[np.ndarray, tuple[bool, ...]]:
    """A scene with errors: each of the three things is wrong with probability 0.4."""
    shapes = list(random_scene({"include": include}, rng))
    wrong = rng.random(3) < 0.4
    if wrong[2]:
        shapes[0] = replace(shapes[0], color=shapes[1].color)
    if wrong[0]:
        (other,) = (label for label in SHAPES if label not in {shape.label for shape in shapes})
        shapes[1] = replace(shapes[1], label=other)
    if wrong[1]:
        shapes.append(replace(shapes[0], x=8.0, y=8.0, radius=float(rng.uniform(4, 7))))
    grow = float(rng.uniform(0.6, 1.4))
    image = draw_scene([replace(shape, radius=shape.radius * grow) for shape in shapes])
    return image, tuple(bool(bad) is False for bad in wrong)


def saturation(image: np.ndarray) -> float:
    """Mean of largest less smallest channel, in [0, 1]."""
    return float((image.max(-1).astype(float) - image.min(-1)).mean() / 255)


def measured(seed: int, folder: Path) -> dict[str, float]:
    """The agreement of the three judges on one seed's pairs."""
    made = pairs(seed, LEARNED + MEASURED)
    facts = {named(image): right for _, two in made for image, right in two}

    def answer(question: Question) -> Answer:
        text = "".join(part for part in question.parts if isinstance(part, str))
        images = images_of(question)
        if len(images) == 2:
            return Answer(text="\n".join(f"RULE: {rule}" for rule in RULES))
        (image,) = images
        right, rule = facts[named(image)], next((rule for rule in RULES if rule in text), None)
        if rule is None:
            odds = sum(right) - 1.5 + LIKING * (saturation(image) - 0.1)
            return _yes(1 / (1 + math.exp(-odds)))
        if rule in MATTER:
            truth = right[MATTER.index(rule)]
        else:
            truth = saturation(image) > 0.1 if rule in LIKED else chance(seed, named(image), rule, "truth") < 0.5
        return _yes(0.95 if truth != (chance(seed, named(image), rule) < WRONG) else 0.05)

    judge_by(answer)
    rows = []
    for number, (prompt, two) in enumerate(made[:LEARNED]):
        files = [f"{number}{side}.png" for side in "ab"]
        for file, (image, _) in zip(files, two, strict=True):
            Image.fromarray(image).save(folder / file)
        rows.append({"prompt": prompt, "winner": files[0], "loser": files[1]})
    write_atomically(folder / "pairs.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    options = build_options(RubricTraining, {"judge": JUDGE, "num_pairs": LEARNED, "rounds": 1}, owner="rubric")
    learned = train_rubric(folder / "pairs.jsonl", folder / "learned.json", options)
    save_rubric(folder / "equal.json", [Rule(text=rule, weight=1.0, answer="yes") for rule in RULES], {})
    rewards = {
        "plain": build_reward("yes_no", options={"judge": JUDGE}),
        "learned": build_reward("rubric", options={"judge": JUDGE, "rules": str(folder / "learned.json")}),
        "equal": build_reward("rubric", options={"judge": JUDGE, "rules": str(folder / "equal.json")}),
    }
    others = made[LEARNED:]
    images = np.stack([image for _, two in others for image, _ in two])
    places = torch.arange(len(images))
    inputs = RewardInputs(
        images=torch.from_numpy(images).permute(0, 3, 1, 2).float() / 255,
        prompts=[prompt for prompt, _ in others for _ in range(2)], metadata=[{} for _ in images],
        group_ids=places // 2, sample_ids=places % 2,
    )  # fmt: skip
    agreed = {}
    for name, reward in rewards.items():
        value = reward(inputs).values.view(-1, 2)
        ahead = value[:, 0] - value[:, 1]
        agreed[name] = float(((ahead > 0).double() + 0.5 * (ahead == 0).double()).mean())
    return agreed | {"rules": float(len(learned.rules))}


def _yes(probability: float) -> Answer:
    return Answer(text="Yes", logprobs=({"Yes": math.log(probability), "No": math.log(1 - probability)},))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    found = []
    for seed in range(SEEDS):
        with tempfile.TemporaryDirectory() as folder:
            found.append(measured(seed, Path(folder)))
    effects = {
        name: {"per_seed": [row["learned"] - row[other] for row in found]}
        for name, other in (("agreement", "plain"), ("over_equal", "equal"))
    }
    write_atomically(given.out, json.dumps(origin() | {"measured": found, "effects": effects}, indent=1) + "\n")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
