"""One score of an edit, or principles checked one by one (Edit-R1 with a reasoning verifier, arXiv 2604.27505)?

    python tests/trials/claims/edit_principles.py --out docs/research/claims/edit_principles.json

The judge is scripted, so this is about the mechanism, given its flaw: asked how good an edit is (`edit_score`), it
looks whether the instruction was followed and not at the rest of the image; asked about one principle
(`edit_principles`, the principles are given), it looks at what the principle names. Every answer is wrong with
probability 0.15, whichever it is. 200 edits of the embedded world for each of five seeds, in equal parts right, right
with another shape gone or recoloured, undone or failed. Decided before: `area` is the area under the ROC curve
against the true verdict of `edit_principles` less that of `edit_score`; `area_of_rest` the same among edits that were
followed, where the rest alone decides. Added afterwards, since the flaw decides: `area_sure`, the first against a
plain judge that is never wrong about the instruction.
"""

from __future__ import annotations

import argparse
import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scripted import area, chance, images_of, judge_by, named, origin

from flowrl.rewards import RewardInputs, build_reward
from flowrl.rewards.judges.chat import Answer, Question
from flowrl.runtime.files import write_atomically
from flowrl.world.edits import draw_edit, edit_verdict, edited_scene, failed_scene, random_edit, source_scene
from flowrl.world.scenes import COLORS, draw_scene

SEEDS, EDITS, WRONG = 5, 200, 0.15
JUDGE = {"server": "http://127.0.0.1:1/v1", "model": "scripted"}


def made(seed: int) -> list[dict[str, Any]]:
    """Edits with their source, result, verdict and principles, the last with what is true of each."""
    rng = np.random.default_rng((47, seed))
    found: list[dict[str, Any]] = []
    while len(found) < EDITS:
        record, kind = random_edit(rng), len(found) % 3
        others = [place for place in range(len(record["scene"])) if place != record["target"]]
        if not others:
            continue
        source, result = draw_edit(record)
        if kind == 1:
            scene, before = list(edited_scene(record)), source_scene(record)
            victim = next(place for place, shape in enumerate(scene) if shape == before[others[0]])
            free = [color for color in COLORS if color != scene[victim].color]
            if rng.random() < 0.5:
                scene.pop(victim)
            else:
                scene[victim] = replace(scene[victim], color=free[int(rng.integers(len(free)))])
            result = draw_scene(scene)
        elif kind == 2:
            result = draw_scene(failed_scene(record, rng))
        verdict = edit_verdict(result, source, record)
        whole = {
            f"KEEP: the {record['scene'][place]['label']} is as it was": _kept(record, result, place)
            for place in others
        }
        truths = whole | {f"FOLLOW: {record['prompt']}": verdict.done == 1, "QUALITY: shapes are clean": True}
        found.append({"record": record, "source": source, "result": result, "verdict": verdict, "truths": truths})
    return found


def _kept(record: dict[str, Any], result: np.ndarray, place: int) -> bool:
    """Whether one of the other shapes is there as it was, by the middle of its place."""
    shape = source_scene(record)[place]
    alone = draw_scene([shape]).astype(float)
    x, y, r = round(shape.x), round(shape.y), max(1, round(shape.radius * 0.4))
    window = (slice(max(0, y - r), y + r), slice(max(0, x - r), x + r))
    return bool(np.abs(result[window].astype(float) - alone[window]).mean() < 20)


def _seen(truth: bool, *key: object, wrong: float = WRONG) -> bool:
    return truth != (chance(*key) < wrong)


def measured(seed: int, *, plain_wrong: float = WRONG) -> dict[str, float]:
    """The areas of both rewards on one seed's edits, the plain one's answers wrong so often."""
    edits = made(seed)
    known = {named(edit["result"]) + named(edit["source"]): edit for edit in edits}

    def answer(question: Question) -> Answer:
        source, result = images_of(question)
        edit = known[named(result) + named(source)]
        text = "".join(part for part in question.parts if isinstance(part, str))
        checked = re.search(r"Principle to check \((\w+)\): (.+)", text)
        if checked is None:
            digit = (
                "5"
                if _seen(edit["verdict"].done == 1, seed, named(result), named(source), "score", wrong=plain_wrong)
                else "0"
            )
            return Answer(text=digit, logprobs=({digit: math.log(0.98)},))
        words = f"{checked[1].upper()}: {checked[2]}"
        return Answer(
            text=f"Score: {10 if _seen(edit['truths'][words], seed, named(result), named(source), words) else 0}"
        )

    judge_by(answer)
    images = torch.from_numpy(np.stack([edit["result"] for edit in edits])).permute(0, 3, 1, 2).float() / 255
    sources = [[torch.from_numpy(edit["source"]).permute(2, 0, 1).float() / 255] for edit in edits]
    inputs = RewardInputs(
        images=images, prompts=[edit["record"]["prompt"] for edit in edits],
        metadata=[{"principles": list(edit["truths"])} for edit in edits], source_images=sources,
        group_ids=torch.arange(len(edits)), sample_ids=torch.zeros(len(edits), dtype=torch.int64),
    )  # fmt: skip
    right = np.array([edit["verdict"].correct for edit in edits])
    followed = np.array([edit["verdict"].done == 1 for edit in edits])
    plain, checked = (
        build_reward(name, options={"judge": JUDGE, **options})(inputs).values.numpy()
        for name, options in (("edit_score", {"requirement": None}), ("edit_principles", {"aggregate": "mean"}))
    )
    return {
        "plain": area(plain, right), "principles": area(checked, right),
        "plain_rest": area(plain[followed], right[followed]),
        "principles_rest": area(checked[followed], right[followed]),
        "right": float(right.mean()), "followed": float(followed.mean()),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    found = [measured(seed) for seed in range(SEEDS)]
    sure = [measured(seed, plain_wrong=0.0) for seed in range(SEEDS)]
    effects = {
        "area": {"per_seed": [row["principles"] - row["plain"] for row in found]},
        "area_of_rest": {"per_seed": [row["principles_rest"] - row["plain_rest"] for row in found]},
        "area_sure": {"per_seed": [row["principles"] - row["plain"] for row in sure]},
    }
    write_atomically(
        given.out, json.dumps(origin() | {"measured": found, "sure": sure, "effects": effects}, indent=1) + "\n"
    )
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
