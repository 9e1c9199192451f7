"""Rules that explain preferences, proposed by a judge and weighted by regression: `flowrl.rubric`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flowrl.evaluation.named_judges import judge_text, read_judge
from flowrl.generation.drawing import find_device
from flowrl.rewards.judges.rubric import RubricTraining, TrainedRubric, train_rubric
from flowrl.runtime.files import refuse_foreign
from flowrl.runtime.public import public

__all__ = ["rubric"]

_RUBRIC = re.compile(r'"info": \{\s*"')
"""Pattern of the notes on how rules were found; a rubric written by hand has none."""


@public
def rubric(
    pairs: str | Path, *, judge: str | Mapping[str, Any], out: str | Path = "rubric.json", top: int = 20,
    penalty: float = 0.01, rounds: int = 3, seed: int = 0, device: str | None = None, show: bool = True,
) -> TrainedRubric:  # fmt: skip
    """Lets a judge propose rules that explain pairs of images, and keeps those that a regression needs.

    The method is AutoRubric-T2I's.

    Args:
        pairs: file with a prompt and the paths of winner and loser on each line.
        judge: the judge that proposes and answers: a mapping such as {"server": URL, "model": NAME}, or a YAML file
            with one.
        out: the file to write.
        top: maximum number of rules to keep.
        penalty: weight of the l1 norm; a higher one keeps fewer rules.
        rounds: rounds of proposing; later ones are about hard pairs.
        seed: the seed of every random draw.
        device: where a judge in this process runs.
        show: show progress.

    Raises:
        FlowrlError: the pairs or a setting are wrong, the judge does not answer, or no rule helps.
    """
    asked = read_judge(judge_text(judge), {}, owner="reward rubric")
    options = RubricTraining(judge=asked, rounds=rounds, penalty=penalty, top=top, seed=seed)
    refuse_foreign(Path(out), own=_RUBRIC)
    return train_rubric(Path(pairs), Path(out), options, device=find_device(device))
