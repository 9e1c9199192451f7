"""Serves rewards by several processes behind one port of `flowrl serve`: replicas, or environments of their own.

    rewards:
      - {name: hps}                                                     # in this Python
      - {name: geneval, python: envs/geneval/bin/python}                # where flowrl is installed too
      - {scorer: deqa_score.py, label: deqa, python: envs/deqa/bin/python, environment: {CUDA_VISIBLE_DEVICES: "1"}}

Without such keys, `replicas` processes serve all rewards each.
An entry with `scorer` is a function score(images, prompts, metadata) that `flowrl.rewards.serving.score_server` serves
there, without flowrl. A process that dies is restarted; until then its requests get 503, and other rewards go on.
"""

from __future__ import annotations

import asyncio
import collections
import contextvars
import os
import re
import secrets
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml

from flowrl.config.options import build_options
from flowrl.generation.named_rewards import reward_label
from flowrl.rewards.base.specs import validate_reward_specs
from flowrl.rewards.serving import score_server
from flowrl.rewards.serving.batching import DIRECTORY
from flowrl.rewards.serving.front_door import ServerBackend, look
from flowrl.runtime.scrubbing import say as print
from flowrl.runtime.temporary import TemporaryFolder
from flowrl.serving.served import Rows, ServerSettings, count_death, threads_of

TOKEN = "FLOWRL_SERVE_TOKEN"
"""Environment variable with the token between the processes behind the port and the process that owns it."""
_KEPT_LINES = 20
_OF_OTHERS = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "__PYVENV_LAUNCHER__")
_FOLLOW = (
    "import os, signal, sys, threading\n"
    "def end():\n"
    "    os.read(0, 1)\n"  # not sys.stdin: a thread that holds its lock at the end is a fatal error of Python
    "    os.kill(os.getpid(), signal.SIGTERM)\n"
    "threading.Thread(target=end, daemon=True).start()\n"
    "from flowrl.cli import main\n"
    "sys.exit(main())\n"
)
"""`flowrl`, ended with the process that started it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where an entry of `rewards:` runs: its keys in addition to those of a reward."""

    python: str | None = None
    """The Python of the environment; null for this one."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of the process. It does not inherit PYTHONPATH and its like."""
    scorer: str | None = None
    """FILE.py or FILE.py:FUNCTION, if flowrl is not installed in that environment."""

    def __post_init__(self) -> None:
        if self.python is None and (self.scorer is not None or self.environment):
            raise ValueError("python is missing: the Python of the scorer's environment, such as envs/deqa/bin/python.")
        if self.python is not None and not (Path(self.python).is_file() and os.access(self.python, os.X_OK)):
            raise ValueError(f"python must be a program, got {self.python!r} (looked in {Path.cwd()}).")
        if self.scorer is not None and not Path(self.scorer.partition(".py:")[0].removesuffix(".py") + ".py").is_file():
            raise ValueError(f"scorer must be a Python file or FILE.py:FUNCTION, got {self.scorer!r}.")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Served:
    """How a `scorer` is called; see `flowrl.rewards.serving.score_server`."""

    images: str = "pil"
    """Form of the function's images: pil, numpy or bytes."""
    needs: tuple[str, ...] = ("images", "prompts", "metadata")
    """Fields to send; also possible: videos, source_images and reference_images."""
    version: str | None = None
    """Version of the scorer, which runs record; null takes a digest of the file."""

    def __post_init__(self) -> None:
        if self.images not in ("pil", "numpy", "bytes"):
            raise ValueError(f"images must be pil, numpy or bytes, got {self.images!r}.")
        score_server.check_needs(self.needs)


@dataclass(kw_only=True, slots=True, eq=False)
class _Child:
    """A process behind the port, and its start command."""

    label: str
    command: list[str]
    environment: dict[str, str]
    backend: ServerBackend = field(default_factory=ServerBackend)
    process: subprocess.Popen[str] | None = None
    said: collections.deque[str] = field(default_factory=lambda: collections.deque(maxlen=_KEPT_LINES))
    failed: str | None = None

    def why(self, code: int) -> str:
        """Why it did not start, from its own output."""
        lines = [line for line in self.said if line]
        last = re.sub(r"^(flowrl|score_server|\w*Error): ", "", lines[-1]) if lines else "nothing"
        advice = ""
        if any("No module named 'flowrl" in line for line in lines):
            advice = (
                " Install flowrl in that environment, or serve a function of it by scorer: FILE.py, which needs none."
            )
        return f"{self.label} does not start with {self.command[0]} (code {code}). It said: {last.rstrip('.')}.{advice}"


def has_places(specs: Sequence[Mapping[str, Any]]) -> bool:
    """Whether any entry names an environment."""
    return any(key in spec for spec in specs for key in ("python", "scorer", "environment"))


class Environments:
    """The processes; a context manager that ends all of them, whatever happens. `specs` are the rewards and where they
    run; where no entry says that, each of `devices` gets a process with all of them. Raises ValueError: an entry is
    wrong, as far as this Python can tell."""

    def __init__(
        self, asked: ServerSettings, specs: Sequence[Mapping[str, Any]], devices: Sequence[torch.device] = ()
    ) -> None:
        self.asked, self.token = asked, secrets.token_hex(16)
        self.stopping = threading.Event()
        here, others = list[dict[str, Any]](), list[tuple[Place, dict[str, Any]]]()
        for spec in specs:
            given = {key: value for key, value in spec.items() if key in ("python", "environment", "scorer")}
            rest = {key: value for key, value in spec.items() if key not in given}
            place = build_options(Place, given, owner=f"reward {_label(spec)!r}")
            if place.scorer is not None:
                if unknown := sorted(rest.keys() - {"label", "options"}):
                    raise ValueError(f"a scorer takes label, options, python and environment, got {unknown[0]}.")
                options = build_options(_Served, rest.get("options") or {}, owner=f"scorer {place.scorer!r}")
                rest |= {"label": _label(spec), "options": options}
            if place.python is None:
                here.append(rest)
            else:
                others.append((place, rest))
        if here:
            validate_reward_specs(here)
        self.folder = TemporaryFolder("flowrl-serve-")
        self.replicated = not others
        if self.replicated:
            self.children = [
                self._child(Place(), here, threads_of(asked), f"replica {number}", str(device))
                for number, device in enumerate(devices)
            ]
        else:
            threads = asked.threads or max(1, threads_of(asked) // (len(others) + bool(here)))
            self.children = [self._child(Place(), here, threads)] if here else []
            self.children += [self._child(place, [rest], threads) for place, rest in others]
        self._threads = [
            threading.Thread(
                target=contextvars.copy_context().run, args=(self._keep, child), name=f"keep-{child.label}", daemon=True
            )
            for child in self.children
        ]

    def __enter__(self) -> Environments:
        return self

    def __exit__(self, *_: object) -> None:
        self.stopping.set()
        for child in self.children:
            if child.process is not None:
                child.process.terminate()
        end = time.monotonic() + 10.0
        for child, thread in zip(self.children, self._threads, strict=True):
            if child.process is not None:
                with suppress(subprocess.TimeoutExpired):
                    child.process.wait(max(0.0, end - time.monotonic()))
                child.process.kill()
            if thread.ident is not None:
                thread.join(5.0)
        self.folder.cleanup()

    @property
    def backends(self) -> list[ServerBackend]:
        """The servers behind the port."""
        return [child.backend for child in self.children]

    def start(self) -> Rows:
        """Starts all, waits until each has loaded, and returns what they serve. Raises ValueError: one does not start
        (the message has its output), or two serve rewards with one name."""
        for thread in self._threads:
            thread.start()
        while not all(child.backend.rewards for child in self.children):
            if failed := [child.failed for child in self.children if child.failed is not None]:
                raise ValueError(failed[0])
            time.sleep(0.05)
        rows: list[list[str]] = []
        for child in self.children[:1] if self.replicated else self.children:
            for name, about in child.backend.rewards.items():
                if name in {row[0] for row in rows}:
                    raise ValueError(f"two rewards are called {name}: give one of them a label.")
                rows.append([name, about["kind"], ", ".join(sorted(about["needs"])), about["version"]])
        return rows

    def _child(
        self, place: Place, specs: Sequence[Mapping[str, Any]], threads: int, label: str = "", device: str = ""
    ) -> _Child:
        label, python = label or ", ".join(map(_label, specs)), place.python or sys.executable
        own = {key: value for key, value in os.environ.items() if place.python is None or key not in _OF_OTHERS}
        if place.scorer is not None:  # a stranger's torch takes all cores
            own["OMP_NUM_THREADS"] = str(threads)
        environment = {**own, **place.environment, TOKEN: self.token, "PYTHONUNBUFFERED": "1"}
        if place.scorer is None:
            counts = Path(tempfile.mkdtemp(dir=self.folder.name))
            environment[DIRECTORY] = str(counts)  # those of all its lives
            file = counts.with_suffix(".yaml")
            file.write_text(yaml.safe_dump({"rewards": [dict(spec) for spec in specs]}))
            handed_on = ("replicas", "devices", "device", "batch_size", "queue_size", "max_items", "max_mib",
                         "max_mpixels", "max_video_mib", "max_video_mpixels", "max_images", "grace")  # fmt: skip
            flags: dict[str, object] = {"port": 0, "token_env": TOKEN, "threads": threads}
            flags |= {name: getattr(self.asked, name) for name in handed_on}
            if device:
                flags |= {"replicas": 1, "devices": None, "device": device}
            command = [python, "-c", _FOLLOW, "serve", str(file), *as_flags(flags)]
        else:
            given, limits = specs[0]["options"], self.asked.limits
            flags = {
                "name": label, "port": 0, "token_env": TOKEN, "images": given.images, "needs": ",".join(given.needs),
                "batch_size": limits.batch_size, "max_items": limits.max_items, "max_mib": self.asked.max_mib,
                "max_mpixels": self.asked.max_mpixels, "max_images": limits.max_images,
                "queue_size": limits.queue_size, "version": given.version, "until_stdin_ends": True,
            }  # fmt: skip
            command = [python, score_server.__file__, place.scorer, *as_flags(flags)]
        return _Child(label=label, command=command, environment=environment)

    def _keep(self, child: _Child) -> None:
        """Keeps a child running to the end; forwards its output with its name in front."""
        from prometheus_client.multiprocess import mark_process_dead

        deaths = 0
        while not self.stopping.is_set():
            begun = time.monotonic()
            code = self._run(child)
            child.backend.port = None
            if self.stopping.is_set():
                return
            if DIRECTORY in child.environment and child.process is not None:
                mark_process_dead(child.process.pid, child.environment[DIRECTORY])  # type: ignore[no-untyped-call]
            if not child.backend.rewards:
                child.failed = child.why(code)
                return
            deaths, wait = count_death(deaths, time.monotonic() - begun)
            print(
                f"The process of {child.label} ended (code {code}); it is started again in {wait:g} s.",
                file=sys.stderr,
                flush=True,
            )
            self.stopping.wait(wait)

    def _run(self, child: _Child) -> int:
        """Runs a child once; returns its exit code."""
        child.said.clear()
        try:
            process = subprocess.Popen(
                child.command, env=child.environment, text=True, errors="replace", stdin=subprocess.PIPE,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                start_new_session=True,  # a Ctrl-C in the terminal goes to the door, which says when to stop
            )  # fmt: skip
        except OSError as error:
            child.said.append(str(error))
            return 126
        child.process = process
        if self.stopping.is_set():  # whoever stops all may have looked before this one was there
            process.terminate()
        assert process.stdout is not None
        assert process.stdin is not None
        with process.stdin, process.stdout:
            for line in process.stdout:
                found = re.match(r"Serving at http://127\.0\.0\.1:(\d+)", line)
                if found and child.backend.port is None:
                    child.backend.port = int(found[1])
                    try:
                        asyncio.run(look(child.backend, self.token))
                    except (OSError, ValueError, EOFError, LookupError) as error:
                        child.said.append(f"its /health cannot be read ({type(error).__name__}: {error})")
                        process.kill()
                elif child.backend.port is None or not line.startswith(("  ", "In a configuration", "Stopped.")):
                    child.said.append(line.strip())
                    print(f"[{child.label}] {line}", end="", file=sys.stderr, flush=True)
            return process.wait()


def as_flags(values: Mapping[str, object]) -> list[str]:
    """Values as flags of a command line, in order: None is left out, and True is a flag without a value."""
    words: list[str] = []
    for name, value in values.items():
        flag = f"--{name.replace('_', '-')}"
        words += [] if value is None else [flag] if value is True else [flag, str(value)]
    return words


def _label(spec: Mapping[str, Any]) -> str:
    if spec.get("scorer") and not spec.get("label"):
        return Path(str(spec["scorer"]).partition(".py:")[0]).name.removesuffix(".py")
    return reward_label(spec)
