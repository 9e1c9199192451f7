"""Kills training runs at random moments and compares what a resume makes of them with a run that was left alone.

    python tests/trials/kills.py [--trials 30] [--seed 0] [--out docs/research/trials/kills.json]

Runs are tiny (a random Stable Diffusion 3 pipeline, six iterations, three evaluations) and are killed by kill -9: a
third of them at any moment, the others while they evaluate, write the LoRA, a checkpoint or the report; every second
one is a run of two processes. After a resume, LoRA, policy, average, optimizer and counters have to be equal bit for
bit, and metrics but for times. Then ten orders of two commands that want one folder: the second has to be refused with
the process id of the first, and the first has to end as if nothing had been.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests" / "helpers"), str(ROOT / "tests" / "helpers" / "families")]
os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}

import torch  # noqa: E402
from origin import origin  # noqa: E402
from tiny_models import save_tiny_sd3  # noqa: E402
from tiny_runs import TinyRuns, differences, lasting, lora, metrics, tiny_runs  # noqa: E402
from warm_forks import Started, start_forks  # noqa: E402

import flowrl.pages.report as report_module  # noqa: E402
import flowrl.recipes.grpo  # noqa: E402, F401  what a run imports is imported once, here
from flowrl.rendering.terminal_text import align  # noqa: E402
from flowrl.runtime.files import LOCK, write_atomically  # noqa: E402
from flowrl.runtime.progress import progress  # noqa: E402
from flowrl.training import loop as loop_module  # noqa: E402
from flowrl.training import run as run_module  # noqa: E402

STAGES: dict[str, tuple[Any, str]] = {
    "evaluation": (loop_module, "evaluate"),
    "lora": (loop_module, "save_lora"),
    "checkpoint": (run_module, "write_checkpoint"),
    "report": (report_module, "render"),
}
"""What a kill can be aimed at: the module whose name is called, and the name."""
AIMS = ("anywhere", "evaluation", "lora", "anywhere", "checkpoint", "report")
ITERATIONS = 6
SIZES = (
    f"num_iterations={ITERATIONS}", "checkpoint_every=2", "eval_every=2", "eval.num_images=2", "eval.batch_size=2",
    "policy.ema_decay=0.5", "micro_batch_size=4", "rollout_batch_size=4",
)  # fmt: skip


# ---- runs ------------------------------------------------------------------------------------------------------------


class Trials:
    """A folder with the configuration of all runs, and for each number of processes a run that was left alone."""

    def __init__(self, folder: Path) -> None:
        self.runs: TinyRuns = tiny_runs(folder, save_tiny_sd3(folder / "model"))
        self.folder, self.numbers = folder, count()
        self.seconds: dict[int, float] = {}
        self.stages: dict[int, dict[str, list[float]]] = {}
        for processes in (1, 2):
            timing = folder / f"stages-{processes}.json"
            begun = time.monotonic()
            self.finish(self.start(f"whole-{processes}", processes, prepare=partial(_time_stages, timing)))
            self.seconds[processes] = time.monotonic() - begun
            self.stages[processes] = json.loads(timing.read_text())

    def run(self, name: str) -> Path:
        return self.folder / name

    def new(self, name: str) -> list[str]:
        """The command that starts a run."""
        held_out = f"prompts.eval={self.folder / 'prompts.txt'}"
        return ["train", str(self.runs.config), f"out={self.run(name)}", held_out, *SIZES]

    def resume(self, name: str) -> list[str]:
        """The command that continues a run; that which starts it where it had not come so far."""
        begun = (self.run(name) / "config.yaml").is_file()
        return ["train", f"resume={self.run(name)}"] if begun else self.new(name)

    def start(
        self, name: str, processes: int, arguments: Sequence[str] = (), prepare: Callable[[], None] = lambda: None
    ) -> Started:
        log = self.folder / f"{next(self.numbers):04d}-{name}.log"
        return start_forks(arguments or self.new(name), [self.folder] * processes, log, prepare)

    def finish(self, started: Started) -> None:
        """Waits for a command that must come to its end."""
        if set(started.wait(600)) != {0}:
            raise SystemExit(f"a run that nobody disturbed failed:\n{started.said()}")

    def unequal(self, name: str, processes: int) -> list[str]:
        """What of a run differs from the one that was left alone."""
        run, whole = self.run(name), self.run(f"whole-{processes}")
        left = hidden(run) - hidden(whole)  # the lock and the last good LoRA stay
        checks = {
            "LoRA": lora(run) == lora(whole),
            "state": differences(lasting(run), lasting(whole)) == 0,
            "metrics": metrics(run) == metrics(whole),
            "report": (run / "report.html").is_file() and (run / "summary.json").is_file(),
            "nothing left over": not left,
        }
        return [what for what, equal in checks.items() if not equal]


def hidden(run: Path) -> set[Path]:
    """Files of a run folder that are not shown."""
    return {path.relative_to(run) for path in run.rglob(".*")}


def _time_stages(place: Path) -> None:
    """From here on the seconds of every call of a stage are written down, by the main process."""
    if os.environ.get("RANK", "0") != "0":
        return
    seconds: dict[str, list[float]] = {stage: [] for stage in STAGES}

    def timed(stage: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            begun = time.monotonic()
            result = function(*arguments, **options)
            seconds[stage].append(time.monotonic() - begun)
            place.write_text(json.dumps(seconds))
            return result

        return call

    for stage, (module, name) in STAGES.items():
        setattr(module, name, timed(stage, getattr(module, name)))


def _die_in(stage: str, number: int, delay: float, marks: Path) -> None:
    """From here on the main process ends some seconds into a call of a stage; files tell how far it came.

    A timer of the kernel ends it where it is, as kill -9 does: no handler, no `finally`. A thread would come too late.
    """
    if os.environ.get("RANK", "0") != "0":
        return
    module, name = STAGES[stage]
    function, calls = getattr(module, name), 0

    def call(*arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls != number:
            return function(*arguments, **options)
        (marks / "begun").touch()
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, max(delay, 1e-6))
        result = function(*arguments, **options)
        (marks / "ended").touch()
        return result

    setattr(module, name, call)


# ---- kills -----------------------------------------------------------------------------------------------------------


def kill(trials: Trials, number: int, seed: int) -> dict[str, Any]:
    """Starts a run, kills it, continues it, and tells whether it ended as it should."""
    draw = random.Random(f"{seed}-{number}")
    aim, processes = AIMS[number % len(AIMS)], 1 + number // len(AIMS) % 2
    name, marks = f"trial-{number}", trials.folder / f"marks-{number}"
    marks.mkdir()
    found: dict[str, Any] = {"trial": number, "aim": aim, "processes": processes}
    if aim == "anywhere":
        delay = draw.uniform(0, trials.seconds[processes])
        started = trials.start(name, processes)
        time.sleep(delay)
        started.signal(signal.SIGKILL)
    else:
        took = trials.stages[processes][aim]
        call = draw.randrange(len(took))
        delay = draw.uniform(0, 0.9 * min(took))  # the same call may take less this time
        found["call"] = call + 1
        started = trials.start(name, processes, prepare=partial(_die_in, aim, call + 1, delay, marks))
    codes = started.wait(grace=0)
    run = trials.run(name)
    rows = len(metrics(run)) if (run / "metrics.jsonl").exists() and _whole_lines(run) else None
    found |= {
        "delay": round(delay, 4), "killed": min(codes) < 0, "rows_at_kill": rows,
        "inside": None if aim == "anywhere" else (marks / "begun").exists() and not (marks / "ended").exists(),
    }  # fmt: skip
    again = trials.start(name, processes, trials.resume(name))
    if set(again.wait(600)) != {0}:
        return {**found, "unequal": ["the resume failed"], "said": again.said()}
    return {**found, "unequal": trials.unequal(name, processes)}


def _whole_lines(run: Path) -> bool:
    return (run / "metrics.jsonl").read_bytes().endswith(b"\n")


# ---- two commands in one folder --------------------------------------------------------------------------------------


def orders(trials: Trials, advance: Callable[[str], None]) -> list[dict[str, Any]]:
    """Ten orders of two commands that want one folder."""
    found: list[dict[str, Any]] = []

    def add(order: str, refused: bool, unequal: list[str]) -> None:
        found.append({"order": order, "refused": refused, "unequal": unequal})
        advance(order)

    for name, processes, first, others in (
        ("new", 1, "new run", (("new", 1), ("resume", 1), ("new", 2), ("resume", 2))),
        ("continued", 1, "resume", (("new", 1), ("resume", 1), ("resume", 2))),
        ("two", 2, "new run of two processes", (("resume", 1),)),
    ):
        if first == "resume":
            half = trials.start(name, processes, [*trials.new(name), "num_iterations=4"])
            trials.finish(half)
            arguments = ["train", f"resume={trials.run(name)}", f"num_iterations={ITERATIONS}"]
        else:
            arguments = trials.new(name)
        holder = trials.start(name, processes, arguments)
        _wait_until_it_trains(trials.run(name))
        holder.signal(signal.SIGSTOP)  # it must not end before the others have tried
        tried = []
        for kind, several in others:
            second = trials.start(name, several, trials.new(name) if kind == "new" else trials.resume(name))
            refused = 0 not in second.wait() and _names(second, holder)
            tried.append((f"{first}, then {kind} on {several}", refused))
        holder.signal(signal.SIGCONT)
        trials.finish(holder)
        for order, said in tried:
            add(order, said, trials.unequal(name, processes))
    for kind in ("new", "resume"):
        name = f"race-{kind}"
        arguments = trials.new(name)
        if kind == "resume":
            trials.start(name, 1, [*arguments, "num_iterations=4"]).wait()
            arguments = ["train", f"resume={trials.run(name)}", f"num_iterations={ITERATIONS}"]
        pair = [trials.start(name, 1, arguments) for _ in range(2)]
        codes = [started.wait()[0] for started in pair]
        refused = sorted(codes) == [0, 1] and _names(pair[codes.index(1)], pair[codes.index(0)])
        add(f"{kind} and {kind} at once", refused, trials.unequal(name, 1))
        if not refused:
            found[-1]["said"] = [started.said() for started in pair]
    return found


def _wait_until_it_trains(run: Path, seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not (run / "metrics.jsonl").exists() or not (run / LOCK).read_text():
        if time.monotonic() > end:
            raise SystemExit(f"{run} did not begin to train")
        time.sleep(0.01)


def _names(second: Started, first: Started) -> bool:
    """Whether a command said that the process of the other is at work."""
    return f"(process {first.pids[0]} on " in second.said() and "is still at work" in second.said()


# ---- the command -----------------------------------------------------------------------------------------------------


def main() -> int:
    """Makes the trials, prints two tables, writes JSON; returns 0 where everything was as it should be."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--trials", type=int, default=30, help="kills (30)")
    parser.add_argument("--seed", type=int, default=0, help="of the moments (0)")
    parser.add_argument(
        "--out", type=Path, default=ROOT / "docs" / "research" / "trials" / "kills.json", help="JSON file"
    )
    asked = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="kills-") as folder:
        print("two runs that are left alone ...", file=sys.stderr, flush=True)
        trials = Trials(Path(folder))
        with progress("killing", asked.trials + 10) as advance:
            killed = []
            for number in range(asked.trials):
                killed.append(kill(trials, number, asked.seed))
                advance(killed[-1]["aim"])
            ordered = orders(trials, advance)
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    result = origin() | {"seed": asked.seed, "kills": killed, "orders": ordered}
    write_atomically(asked.out, json.dumps(result, indent=1) + "\n")
    print(tables(killed, ordered))
    return 0 if all(not row["unequal"] and row.get("refused", True) for row in (*killed, *ordered)) else 1


def tables(killed: Sequence[dict[str, Any]], ordered: Sequence[dict[str, Any]]) -> str:
    """What came out, for people."""
    rows = [
        [str(row["trial"]), row["aim"], str(row["processes"]), "yes" if row["killed"] else "ended before",
         {None: "", True: "yes", False: "no"}[row["inside"]], ", ".join(row["unequal"]) or "equal"]
        for row in killed
    ]  # fmt: skip
    first = align(["trial", "aimed at", "processes", "killed", "inside", "after the resume"], rows)
    rows = [
        [row["order"], "refused" if row["refused"] else "NOT refused", ", ".join(row["unequal"]) or "equal"]
        for row in ordered
    ]
    second = align(["order", "second command", "first run"], rows)
    equal, refused = sum(not row["unequal"] for row in killed), sum(row["refused"] for row in ordered)
    return (
        f"{first}\n\n{second}\n\n{equal} of {len(killed)} equal after the resume, {refused} of {len(ordered)} refused"
    )


if __name__ == "__main__":
    raise SystemExit(main())
