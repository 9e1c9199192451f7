"""Rules that explain preferences, found by a judge and weighed by regression: `flowrl.rubric`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flowrl.evaluation.named_judges import judge_text, read_judge
from flowrl.generation.drawing import find_device
from flowrl.rewards.judges.autorubric import RubricTraining, TrainedRubric, train_rubric
from flowrl.runtime.files import refuse_foreign
from flowrl.runtime.public import public

__all__ = ["rubric"]

_RUBRIC = re.compile(r'"info": \{\s*"')
"""What it notes of how it found the rules; those written by hand have no such notes."""


@public
def rubric(
    pairs: str | Path, *, judge: str | Mapping[str, Any], out: str | Path = "rubric.json", top: int = 20,
    penalty: float = 0.01, rounds: int = 3, seed: int = 0, device: str | None = None, show: bool = True,
) -> TrainedRubric:  # fmt: skip
    """Lets a judge propose rules that explain pairs of images; keeps those a regression needs (AutoRubric-T2I).

    Args:
        pairs: file of lines with prompt, winner and loser (paths of images).
        judge: who proposes and answers: a mapping such as {"server": URL, "model": NAME}, or a YAML file with one.
        out: rubric to write.
        top: rules to keep at most.
        penalty: of the l1 norm; higher keeps fewer rules.
        rounds: of proposing, later ones for hard pairs.
        seed: of all random draws.
        device: where a judge of this process runs.
        show: show progress.

    Raises:
        FlowrlError: bad pairs or settings, a judge that cannot be asked, or no rule that helps.
    """
    asked = read_judge(judge_text(judge), {}, owner="reward rubric")
    options = RubricTraining(judge=asked, rounds=rounds, penalty=penalty, top=top, seed=seed)
    refuse_foreign(Path(out), own=_RUBRIC)
    return train_rubric(Path(pairs), Path(out), options, device=find_device(device))
