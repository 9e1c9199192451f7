"""Bad input over all commands, some drawn with a fixed seed and some listed: `python tests/trials/bad_inputs.py`.

Every trial is one command in a copy of one folder, in a process of its own that may take a minute. It fails where a
traceback is shown, where a signal or the minute ends it, where bad input is taken without a word, where a refusal does
not name what was wrong, or where a file that was there is lost or changed.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import random
import re
import resource
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from origin import origin

from flowrl.runtime.progress import progress

sys.path += [str(Path(__file__).with_name("bad_input")), str(Path(__file__).resolve().parents[1] / "helpers")]

from bad_input_draws import Trial, file_trials, flag_trials, slip_trials, value_trials
from bad_input_folder import TRAIN, digests, write_inputs
from bad_input_list import listed_trials
from warm_forks import RAISED, Answer, Started, start_forks

LIMIT = 60.0
"""Seconds that a command may take."""
MEMORY = 8 * 2**30
"""Bytes that a command may ask for beyond what this process has: less than the machine, so that nothing else dies."""
_OWN = re.compile(r"(^|/)(\.lock|error\.log)$")  # what any command may write into a run folder


def all_trials(seed: int) -> list[Trial]:
    """The listed trials and the drawn ones."""
    rng = random.Random(seed)
    drawn = [*value_trials(rng, 70), *slip_trials(rng, 40), *flag_trials(rng, 60), *file_trials(rng, 110)]
    return [*listed_trials(), *drawn]


def warm_up() -> None:
    """Imports what commands need, on one thread, so that forks start with it."""
    import torch

    torch.set_num_threads(1)
    for name in (
        "diffusers", "peft", "transformers", "tensorboard", "flowrl.training.loop", "flowrl.recipes.backprop",
        "flowrl.recipes.forward", "flowrl.recipes.grpo", "flowrl.recipes.preference", "flowrl.pages.report",
        "flowrl.session.train", "flowrl.pipelines.families.sd3",
    ):  # fmt: skip
        importlib.import_module(name)


def start(words: Sequence[str], folder: Path, log: Path) -> Started:
    """Starts `flowrl WORDS` in a folder, with bounded memory."""
    return start_forks(words, [folder], log, _bound_memory)


def _bound_memory() -> None:
    most = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE") + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def verdict(trial: Trial, answer: Answer, before: dict[str, str], after: dict[str, str]) -> str:
    """What is wrong with an answer; empty where nothing is."""
    if answer.code is None:
        return f"hang: no end after {LIMIT:.0f} s"
    if answer.code < 0:
        return f"signal {-answer.code}"
    if "Traceback (most recent call last)" in answer.said or answer.code == RAISED:
        return "traceback"
    lost = [
        name
        for name, held in before.items()
        if after.get(name) != held
        and not _OWN.search(name)
        and not any(name == one or name.startswith(f"{one}/") for one in trial.changes)
    ]
    if lost:
        return f"lost or changed: {', '.join(lost[:4])}"
    if trial.expect == "refused" and answer.code == 0:
        return "taken without a word"
    if trial.expect == "works" and answer.code != 0:
        return "refused, but it is right"
    if not answer.said.strip():
        return "not one word"
    said = answer.said.lower()
    if answer.code != 0 or trial.expect == "works":
        for word in trial.says:
            if not any(one.lower() in said for one in word.split("|")):
                return f"does not name {word}"
    return ""


def run_trials(trials: list[Trial], template: Path, *, jobs: int) -> list[dict[str, object]]:
    """Runs trials, some side by side, and returns a row for each."""
    rows: list[dict[str, object]] = []
    waiting = list(enumerate(trials))
    running: list[tuple[Trial, Path, dict[str, str], Started]] = []
    with progress("trials", len(trials), 0, enabled=sys.stderr.isatty()) as advance:
        while waiting or running:
            while waiting and len(running) < jobs:
                number, trial = waiting.pop(0)
                place = template.parent / f"trial-{number}"
                shutil.copytree(template, place, symlinks=True)
                if trial.prepare is not None:
                    trial.prepare(place)
                log = template.parent / f"trial-{number}.txt"
                running.append((trial, place, digests(place), start(trial.words, place, log)))
            for entry in list(running):
                trial, place, before, started = entry
                if (answer := started.answer(LIMIT)) is None:
                    continue
                wrong = verdict(trial, answer, before, digests(place))
                row: dict[str, object] = {
                    "name": trial.name,
                    "code": answer.code,
                    "seconds": round(answer.seconds, 1),
                    "wrong": wrong,
                }
                rows.append(row | ({"said": answer.said[-1500:].replace(str(place), ".")} if wrong else {}))
                if wrong:
                    print(f"FAIL {trial.name}: {wrong}\n     {answer.said.strip()[-400:]}", flush=True)
                shutil.rmtree(place)
                running.remove(entry)
                advance(f"{sum(bool(row['wrong']) for row in rows)} wrong")
            time.sleep(0.02)
    return rows


def main() -> int:
    """The command; exit code 1 where a trial failed."""
    parser = argparse.ArgumentParser(prog="python tests/trials/bad_inputs.py", description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the drawn trials (default: 0)")
    parser.add_argument("--only", metavar="TEXT", help="trials whose name matches this regular expression")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="trials side by side (default: 2)")
    parser.add_argument("--out", type=Path, metavar="PATH", help="JSON file of all results")
    parsed = parser.parse_args()
    warm_up()
    with tempfile.TemporaryDirectory() as folder:
        template = Path(folder) / "template"
        template.mkdir()
        write_inputs(template)
        for words in ([*TRAIN, "out=run"], [*TRAIN, "out=other", "num_iterations=1", "seed=3"]):
            started = start(words, template, Path(folder) / "template.txt")
            if started.wait(300) != (0,):
                raise SystemExit(f"the runs that trials begin with failed:\n{started.said()}")
        trials = [trial for trial in all_trials(parsed.seed) if re.search(parsed.only or "", trial.name)]
        rows = run_trials(trials, template, jobs=parsed.jobs)
    counts = Counter(str(row["wrong"]).split(":")[0] or "right" for row in rows)
    print(f"{len(rows)} trials: " + ", ".join(f"{word} {count}" for word, count in counts.most_common()))
    print(f"slowest: {max(float(str(row['seconds'])) for row in rows):.1f} s")
    if parsed.out is not None:
        parsed.out.write_text(json.dumps(origin() | {"counts": counts, "trials": rows}, indent=1) + "\n")
    return int(any(row["wrong"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
