"""Finds what went wrong in a run, since when, and what to change, from the run's files.

Only a falling reward is judged by a number of this file. Warnings are those of the watchdog, recomputed from the run's
rows; vital signs are those of the report, each with its own test; errors and foreign checkpoints as in `flowrl train`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np

from flowrl.config.train import load_config
from flowrl.health.diagnosis import Check, Examination, State, divided, faulty
from flowrl.rendering.markup import number, plural
from flowrl.runs.run_data import RunData, column, failure_reasons, read_run, warnings_by_kind
from flowrl.runs.vital_signs import ALARMS, SIGNS
from flowrl.training.checkpoints import check_newest
from flowrl.training.watchdog import iteration_warnings, new_history

_FALL = 2.5
"""Standard errors by which a reward may fall below the untrained model's; more happens by chance in 1 of 160 cases."""


def diagnose_run(folder: Path) -> Examination:
    """Finds what is wrong with a finished, stopped or active run. Raises ValueError: the folder is not a run."""
    run, found = read_run(folder), list[Check]()
    if error := run.manifest.get("error"):
        said, cure = divided(str(error))
        found.append(Check("stopped", "fault", f"{said} ({run.manifest.get('failed')})", cure))
    try:
        check_newest(folder)
    except ValueError as damage:
        found.append(faulty("checkpoint", str(damage)))
    found += [*_warnings(run), *_signs(run), *_reward(run)]
    found += [Check("log", "note", note) for note in run.notes if not note.startswith("An error stopped")]
    if not any(check.state in ("fault", "warning") for check in found):
        checked = [sign.title.lower() for sign in SIGNS if len(column(run.train, sign.key)[1])]
        found.insert(0, Check("healthy", "ok", f"nothing is wrong according to {', '.join(checked) or 'its log'}"))
        watched = [one for one in run.config.get("rewards", ()) if one.get("weight") == 0]
        if not watched and not run.config.get("eval", {}).get("rewards"):
            found.append(Check("hacking", "note", "not seen: no reward is only measured", "name one in eval.rewards"))
    ended = "stopped by an error" if error else "finished" if run.finished else "not finished: at work, or stopped"
    rewards = column(run.train, "reward")[1]
    change = f", training reward {number(rewards[0])} to {number(rewards[-1])}" if len(rewards) else ""
    wanted = plural(run.config.get("num_iterations", 0), "iteration")
    about = f"{run.folder}: {ended}, {len(run.train)} of {wanted} logged{change}"
    return Examination(about=about, checks=tuple(found))


def _warnings(run: RunData) -> Iterator[Check]:
    """The first warning of every kind."""
    warnings, config = run.warnings, None
    if not run.warned:
        with suppress(ValueError, OSError):  # of another release, or gone
            config = load_config(run.folder / "config.yaml", ())
    if config is not None:  # what the watchdog says of the log, as far as rows tell: single rewards are not in them
        history = new_history()
        again = ({**row, "warnings": iteration_warnings(history, row, None, config)} for row in run.train)
        warnings = warnings_by_kind(list(again))
    for name, found in warnings.items():
        if name == "diverged" and run.manifest.get("error"):  # the error tells it
            continue
        said = dict(reversed(found))  # of an iteration that was done again, what was said first
        first, last = min(said), max(said)
        when = f"iteration {first}" if first == last else f"iterations {first} to {last}, {len(said)} times"
        words, cure = divided(said[first])
        state: State = "fault" if name in ALARMS and ALARMS[name].ruins else "warning"
        yield Check(name.replace("_", " "), state, f"{when}: {words}", cure)


def _signs(run: RunData) -> Iterator[Check]:
    for sign in SIGNS:
        at, values = column(run.train, sign.key)
        if not len(values) or sign.is_healthy(values):
            continue
        since = len(values) - 1  # from here on it was unhealthy until the end
        while since > 0 and not sign.is_healthy(values[:since]):
            since -= 1
        found = f"{sign.key} is {sign.tested(values)}, unhealthy since iteration {int(at[since])}"
        if sign.key == "invalid_ratio" and (reasons := failure_reasons(run.train)):
            found += f" ({reasons})"
        ruined = sign.key == "zero_std_ratio" and float(values[-1]) == 1
        healthy = sign.healthy.partition(". ")[0].rstrip(".")
        found = f"{found}; healthy: {healthy[:1].lower()}{healthy[1:]}"
        yield Check(sign.title.lower(), "fault" if ruined else "warning", found, sign.cure)


def _reward(run: RunData) -> Iterator[Check]:
    """A fault if a training reward ended below the untrained model's (the first iteration) by more than chance, over
    the last two thirds, with errors over an iteration's prompts (`reward_error`)."""
    rewards, errors = (column(run.train, key)[1] for key in ("reward", "reward_error"))
    if len(rewards) < 3 or len(errors) != len(rewards):
        return
    late = len(rewards) - len(rewards) // 3
    fall = float(rewards[0] - rewards[-late:].mean())
    error = math.hypot(float(errors[0]), float(np.linalg.norm(errors[-late:])) / late)
    if fall > _FALL * error:
        yield Check(
            "reward",
            "warning",
            f"training made it lower: {number(rewards[0])} before the first update, {number(rewards[0] - fall)} "
            f"over the last {plural(late, 'iteration')}, {fall / error if error else math.inf:.1f} standard errors",
            "lower optim.lr, by ten if nothing else was changed; a rate that falls (optim.schedule=cosine) and a "
            "kl_coef above 0 hold a policy too",
        )
