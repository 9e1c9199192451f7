"""Runs the package vbench in a separate environment, because it needs library versions that exclude flowrl's.

Each dimension runs in one process, `PYTHON -m vbench.launch.evaluate`. The command `vbench evaluate` starts the same
through a shell; run directly, it takes any path and returns its exit status. There is only one process, because over
several GPUs version 0.1.5 takes appearance_style from the last frames instead of all.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
from dataclasses import dataclass
from pathlib import Path

from flowrl.benchmarks.vbench import Measured, read_measured

CHECKED = "0.1.5"
"""The version whose files and arithmetic were checked."""
_FIND = (
    "import importlib.metadata as m, importlib.util as u, json\n"
    "found = u.find_spec('vbench')\n"
    "try: version = m.version('vbench')\n"
    "except m.PackageNotFoundError: version = None\n"
    "print(json.dumps({'folder': list(found.submodule_search_locations)[0] if found else None, 'version': version}))"
)
_PATIENCE = 120  # seconds in which an environment has to say whether it has the package
_LAST = 12  # lines of its output that an error quotes


@dataclass(frozen=True, kw_only=True, slots=True)
class Package:
    """The package: the Python that has it, its version, and its list of prompts."""

    python: str
    version: str
    prompts: Path


def find_package(python: str) -> Package:
    """Finds an environment's package without an import. Raises ValueError: no such Python runs, or it has no vbench."""
    path = shutil.which(Path(python).expanduser())
    advice = (
        f"make an environment for it (python3 -m venv vb && vb/bin/pip install vbench=={CHECKED}) and give "
        f"`options` python=vb/bin/python"
    )
    if path is None:
        raise ValueError(f"`options` python={python} is no program on this machine: {advice}.")
    path = os.path.abspath(path)  # as it is: a link leads to its environment
    try:
        answer = subprocess.run(
            [path, "-c", _FIND], capture_output=True, text=True, timeout=_PATIENCE, env=_environment(), check=False
        )
        if answer.returncode != 0:
            last = answer.stderr.strip().rpartition("\n")[2] or "it said nothing"
            raise ValueError(f"`options` python={python} ended with status {answer.returncode} ({last}): {advice}.")
        said = json.loads(answer.stdout.strip().rpartition("\n")[2])
    except (OSError, subprocess.TimeoutExpired, json.JSONDecodeError) as error:
        raise ValueError(f"`options` python={python} is no Python that runs ({error}): {advice}.") from error
    if not said.get("folder"):
        raise ValueError(f"the Python {python} has no package vbench: {advice}.")
    prompts = Path(said["folder"]) / "VBench_full_info.json"
    return Package(python=path, version=str(said["version"] or "unknown"), prompts=prompts)


def measure(
    package: Package, dimension: str, *, videos: Path, prompts: Path, folder: Path, local: bool = False
) -> Measured:
    """Runs the package on one of `flowrl.benchmarks.vbench.DIMENSIONS`.

    Args:
        videos: a folder that holds only `<prompt>-<k>.mp4`.
        prompts: the list of prompts that it reads.
        folder: output folder; `log.txt` has its output.
        local: take weights only from its own cache.

    Raises ValueError: it failed; the message has the last lines of its output.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*_eval_results.json"):  # of a run that was cut off, or of other videos
        old.unlink()
    command = [
        package.python, "-m", "vbench.launch.evaluate", "--videos_path", str(videos.resolve()), "--output_path",
        str(folder.resolve()), "--full_json_dir", str(prompts.resolve()), "--dimension", dimension,
        *(["--load_ckpt_from_local", "true"] if local else []),
    ]  # fmt: skip
    with socket.socket() as probe:  # a free port: two evaluations at once would fight over the package's own default
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = folder / "log.txt"
    with log.open("wb") as stream:
        done = subprocess.run(
            command,
            stdout=stream,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            cwd=folder,
            check=False,
            env=_environment() | {"MASTER_PORT": str(port)},
        )
    found = sorted(folder.glob("*_eval_results.json"))
    if done.returncode != 0 or not found:
        last = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-_LAST:]
        ended = f"ended with status {done.returncode}" if done.returncode else "wrote no result"
        raise ValueError(
            f"vbench {ended} on {dimension} (the whole output is in {log}). What is measured already is kept: the same "
            f"command goes on. Its last lines:\n" + "\n".join(last)
        )
    return read_measured(found[-1], dimension)


def _environment() -> dict[str, str]:
    """This process's environment, without the variables of its own Python."""
    return {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
