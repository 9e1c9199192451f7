"""`flowrl compare`: runs what is missing of a comparison, then writes its table and page."""

from __future__ import annotations

import argparse
import os
import platform
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from flowrl import __version__
from flowrl.comparing.question import (
    JOURNAL,
    Question,
    ask,
    command,
    evaluated_rewards,
    is_finished,
    read_journal,
    run_name,
    settings_of,
)
from flowrl.comparing.trainings import Comparison
from flowrl.pages.comparison_files import write
from flowrl.runs.evaluation_rows import GENEVAL, REWARD
from flowrl.runtime.files import refuse_unwritable
from flowrl.session.preflight import preflight


@dataclass(frozen=True, kw_only=True, slots=True)
class Compared:
    """A comparison that was run: its exit code, its question, and how it is looked at."""

    code: int
    question: Question
    view: Mapping[str, str | None]


def run(parsed: argparse.Namespace) -> int:
    """Runs what is missing, then writes table and page; returns 0, 1 where a run failed, 130 when interrupted.

    Raises:
        ValueError: as `compared`.
    """
    return compared(parsed).code


def compared(parsed: argparse.Namespace) -> Compared:
    """Runs what is missing, then writes table and page.

    Raises:
        ValueError: a configuration, option or override is wrong, or the folder holds another comparison.
    """
    folder: Path = parsed.out
    known = read_journal(folder)
    question = ask(parsed, known)
    given = {"baseline": parsed.baseline, "metric": parsed.metric, "targets": parsed.targets}
    view = {**known.get("view", {}), **{key: value for key, value in given.items() if value is not None}}
    if view.get("baseline") not in (None, *question.methods):
        raise ValueError(f"--baseline {view['baseline']} is none of the methods: {', '.join(question.methods)}")
    code = 0
    if not parsed.report_only:
        refuse_unwritable(folder)
        check_same_metric(question, view.get("metric"))
        check_methods(folder, question)
        journal = known or _new_journal()
        journal["jobs"] = parsed.jobs
        journal |= {"question": asdict(question), "view": view, "command": command(question, folder, parsed.jobs)}
        code = Comparison(folder, question, journal).run(parsed.jobs)
    elif not known:
        raise ValueError(f"{folder} holds no comparison ({JOURNAL}): leave --report-only out to start one")
    if code != 130:
        write(folder, question, **view, measured=not parsed.report_only)
    return Compared(code=code, question=question, view=view)


def check_same_metric(question: Question, metric: str | None) -> None:
    """Refuses methods whose evaluations have no common number to compare them by, which a table would find at its end.

    Args:
        question: what is compared.
        metric: that was asked for; None is GenEval's score where the first method has it, else its first reward.

    Raises:
        ValueError: an evaluation does not measure it; names the configuration, and the rewards that all measure.
    """
    measured = {method: evaluated_rewards(settings_of(question, method, 0)) for method in question.methods}
    first, *_ = measured.values()
    if metric is None:
        wanted = "geneval" if "geneval" in first else next(iter(first), None)
    else:
        prefix = next((prefix for prefix in (GENEVAL, REWARD) if metric.startswith(prefix)), None)
        wanted = "geneval" if prefix == GENEVAL else prefix and metric.removeprefix(REWARD).partition("/")[0]
    shared = [name for name in first if all(name in own for own in measured.values())]
    for method, own in measured.items():
        if wanted is None or wanted in own:
            continue
        way = f"give --metric {REWARD}{shared[0]}, which all measure, or " if shared else ""
        raise ValueError(
            f"{question.methods[method]}: its evaluations measure {', '.join(own) or 'no reward'} and not {wanted}, by "
            f"which these methods would be compared: {way}add {wanted} to its eval.rewards"
        )


def check_methods(folder: Path, question: Question) -> None:
    """Refuses before hours are spent what the training of a method that is still to come would refuse.

    Raises:
        ValueError: a setting cannot work, or something is missing; names the configuration.
    """
    to_come = [pair for pair in question.runs if not is_finished(folder / run_name(*pair))]
    for method, seed in dict(to_come).items():
        try:
            preflight(settings_of(question, method, seed))
        except ValueError as error:
            raise ValueError(f"{question.methods[method]}: {error}") from error


def _new_journal() -> dict[str, Any]:
    return {
        "created": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "flowrl": __version__, "python": platform.python_version(),
        "platform": platform.platform(), "cpu_count": os.cpu_count(), "runs": {},
    }  # fmt: skip
