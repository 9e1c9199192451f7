"""An acceptance suite for one NVIDIA card, of ten minutes at most: `make gpu` (docs/gpu.md).

    python tests/gpu/gpu_suite.py [--out FILE] [--minutes 10] [--sections machine,speed] [--cpu] [--kit [FILE]]

Checks run in a process of their own, which is started again behind one that hangs or ends it. Without a card they take
their CPU form on the embedded models. The result is one JSON file, written after every check.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gpu_journal import DEADLINE, JOURNAL, LOST, SECTIONS, entries, write

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PATHS = (ROOT, HERE, HERE.parent / "helpers", HERE.parent / "helpers" / "families")
PATIENCE = 4.0
"""How many times its limit a check may take before its process is ended."""
GRACE = 20.0
"""Seconds that a check may go on after the time is up."""
LEAST = 120.0
"""Seconds that every check may take on a CPU, and to start a process."""
MARKS = {"passed": "ok", "failed": "FAILED", "skipped": "skipped"}


def main(arguments: Sequence[str]) -> int:
    """Runs checks, or packs a kit; exit code 0 where nothing failed."""
    given = parse(arguments)
    if given.kit is not None:
        from gpu_kit import pack

        return pack(Path(given.kit), wheels=given.wheels, python=given.python)
    result = run_checks(Path(given.out), minutes=given.minutes, sections=given.sections, cpu=given.cpu, only=given.only)
    counts = result["counts"]
    print(f"{', '.join(f'{number} {word}' for word, number in counts.items())}, in {result['seconds']:.0f} s")
    print(f"result: {given.out}")
    return 0 if counts["passed"] and not counts["failed"] else 1


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    from_machine = os.environ.get("OUT")
    out = Path(from_machine) / "gpu.json" if from_machine else ROOT / "build" / "gpu.json"
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", default=str(out), help="the result (build/gpu.json, or gpu.json in the folder $OUT)")
    parser.add_argument("--minutes", type=float, default=10.0, help="no check begins afterwards")
    parser.add_argument("--sections", default="", help="some of the sections, separated by commas")
    parser.add_argument("--only", default="", help="checks whose name has these letters")
    parser.add_argument("--cpu", action="store_true", help="the CPU form, also beside a card")
    kit = ROOT / "build" / "gpu-kit.tar"
    parser.add_argument("--kit", nargs="?", const=str(kit), help="pack repository and wheels instead of running")
    parser.add_argument("--wheels", help="folder of wheels for the kit; without it pip fetches them")
    parser.add_argument("--python", default="3.12", help="Python of the machine that the kit goes to")
    return parser.parse_args(arguments)


def run_checks(
    out: Path, *, minutes: float = 10.0, sections: str = "", cpu: bool = False, only: str = ""
) -> dict[str, Any]:
    """Runs checks until none is left; the result, which lies in `out` too.

    Raises:
        SystemExit: no such section, or no check could be started at all.
    """
    wanted = [name for name in sections.split(",") if name] or list(SECTIONS)
    if unknown := set(wanted).difference(SECTIONS):
        raise SystemExit(f"there is no section {min(unknown)}: choose among {', '.join(SECTIONS)}")
    out.parent.mkdir(parents=True, exist_ok=True)
    journal, log = out.with_suffix(".jsonl"), out.with_suffix(".log")
    journal.unlink(missing_ok=True)
    log.unlink(missing_ok=True)
    begun = time.time()
    deadline = begun + 60 * minutes
    command = [sys.executable, "-m", "pytest", *pytest_words(wanted, only)]
    more = {JOURNAL: str(journal), DEADLINE: str(deadline)} | ({"FLOWRL_GPU_CPU": "1"} if cpu else {})
    told = 0
    while True:
        known = len(entries(journal))
        with log.open("a") as file:
            process = subprocess.Popen(
                command, cwd=ROOT, env=environment(more), stdout=file, stderr=file, start_new_session=True
            )
            try:
                told, why = follow(process, out, journal, begun, told, deadline)
            except BaseException:  # an interrupt too: nobody else ends what was started
                stop(process)
                raise
        if why is None and process.returncode in (0, 1, 5):
            break
        why = why or (
            "the card answers no more"
            if process.returncode == LOST
            else f"the process ended with exit code {process.returncode}"
        )
        if len(entries(journal)) == known:
            tail = "\n".join(log.read_text().splitlines()[-20:])
            raise SystemExit(f"no check could be started ({why}); the end of {log}:\n{tail}")
        close_begun(journal, why)
    return write_result(out, journal, begun, told)[1]


def pytest_words(sections: Sequence[str], only: str) -> list[str]:
    """Arguments of pytest: files that no other run collects, without the suite's own conftest."""
    files = [str(HERE / f"check_{name}.py") for name in sections]
    words = ["-q", "--noconftest", "-p", "gpu_plugin", "-p", "no:cacheprovider"]
    words += ["-o", "python_files=check_*.py", "-o", "python_functions=check_*", "-W", "default"]
    return [*words, *(["-k", only] if only else []), *files]


def environment(more: Mapping[str, str]) -> dict[str, str]:
    """Of a process that checks run in: no network, few threads, the checkout and the helpers on the path."""
    paths = [*map(str, PATHS), os.environ.get("PYTHONPATH", "")]
    settled = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    threads = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    return {**os.environ, **settled, **threads, "PYTHONPATH": os.pathsep.join(filter(None, paths)), **more}


def follow(
    process: subprocess.Popen[bytes], out: Path, journal: Path, begun: float, told: int, deadline: float
) -> tuple[int, str | None]:
    """Prints checks as they end until a process ends, or is ended; how many were told, and why it was ended."""
    moved, seen = time.time(), -1
    while process.poll() is None:
        time.sleep(0.2)
        lines = entries(journal)
        if len(lines) != seen:
            moved, seen = time.time(), len(lines)
            told, _ = write_result(out, journal, begun, told)
        limit = max(LEAST, PATIENCE * lines[-1].get("limit", 0.0)) if lines else LEAST * 3
        running = bool(lines) and "begun" in lines[-1]
        on_card = any(line.get("facts", {}).get("form") == "card" for line in lines)
        if on_card and running and time.time() > deadline + GRACE:
            limit = 0.0
        if time.time() - moved > (limit if on_card else 5 * limit):
            stop(process)
            return told, f"no end after {time.time() - moved:.0f} s"
    return write_result(out, journal, begun, told)[0], None


def stop(process: subprocess.Popen[bytes]) -> None:
    """Ends a process with what it started: it leads a group of its own."""
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def close_begun(journal: Path, why: str) -> None:
    """Notes what ended the process in the place of the check that ran."""
    last = entries(journal)[-1]
    if "begun" in last:
        spent = {"seconds": round(time.time() - last.pop("begun"), 2), "figures": {}, "form": "card"}
        write(journal, last | spent | {"outcome": "failed", "why": why})


def write_result(out: Path, journal: Path, begun: float, told: int) -> tuple[int, dict[str, Any]]:
    """Writes what there is, and prints the checks that ended since `told` of them; their number and the result."""
    lines = entries(journal)
    checks = [line for line in lines if "outcome" in line]
    for check in checks[told:]:
        print(line_of(check), flush=True)
    counts = Counter(check["outcome"] for check in checks)
    found: dict[str, Any] = next((line["facts"] for line in lines if "facts" in line), {})
    result = found | {
        "seconds": round(time.time() - begun, 1),
        "counts": {word: counts[word] for word in MARKS},
        "forms": dict(Counter(check["form"] for check in checks if check["outcome"] == "passed")),
        "checks": [{key: value for key, value in check.items() if key != "limit"} for check in checks],
    }
    partial = out.with_suffix(".part")
    partial.write_text(json.dumps(result, indent=1) + "\n")
    partial.replace(out)
    return len(checks), result


def line_of(check: Mapping[str, Any]) -> str:
    """A check in a line: how it ended, its figures, or why not."""
    shown = check["why"] or ", ".join(f"{key} {_short(value)}" for key, value in check["figures"].items())
    head = f"{MARKS[check['outcome']]:8}{check['seconds']:7.1f} s  {check['check']}"
    return f"{head:58}  {' '.join(shown.split())[:200]}".rstrip()


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(main(sys.argv[1:]))
