"""A bench as data: the contents of `bench.json`, and numbers from them. Nothing heavy is imported here."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

from flowrl.planning.throughput import FILE
from flowrl.runtime.files import read_json, write_atomically

PAGE = "bench.html"
REPEATS, MINUTES = 5, 10.0
"""Repeats of a phase, and minutes of a bench, unless told otherwise."""
FORMAT = 1
SECTIONS = ("ceilings", "text", "network", "guidance", "attention", "parts", "rewards", "iteration", "compile")
"""Sections of a bench, in order."""
WRONG = "WRONG"
"""Start of a note that no speed of the bench means anything."""
WHOLE = "whole"
"""The phase of a whole iteration, on the clock as its stages."""
USED = "whole, in CPU seconds"
"""The same on a CPU, where ceilings are in CPU seconds, so that only this is held against one."""
OUT_OF_MEMORY = "not measured: out of memory"


@dataclass(frozen=True, kw_only=True, slots=True)
class TimeSpread:
    """Seconds of several repeats."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> TimeSpread:
        """The median, the least and the most of at least one number."""
        return cls(median=median(seconds), low=min(seconds), high=max(seconds))


@dataclass(frozen=True, kw_only=True, slots=True)
class Phase:
    """One measurement, or why there is none."""

    section: str
    """One of `SECTIONS`."""
    name: str
    """Unique within its section."""
    seconds: TimeSpread | None = None
    """Of one repeat: CPU seconds of all threads on a CPU, between two events on a GPU, on the clock for a whole
    iteration and its stages; None if not measured."""
    wall: TimeSpread | None = None
    """Seconds on the clock of one repeat."""
    repeats: int = 0
    """Number of repeats behind the medians."""
    rows: int = 0
    """Rows that the network evaluates in one repeat."""
    items: int = 0
    """Images or prompts of one repeat; 0 if it has none."""
    flops: float = 0.0
    """FLOPs of the model with its LoRA, without recomputation; 1 multiply-add is 2."""
    recomputed: float = 0.0
    """FLOPs that gradient checkpointing adds."""
    least_bytes: float = 0.0
    """Smallest number of bytes to move: each weight once, latents, and saved tensors written and read."""
    ceiling: str = ""
    """Name of the ceiling to compare `flops` with."""
    peak_bytes: int | None = None
    """Peak memory on a GPU; None on a CPU."""
    saved_bytes: int | None = None
    """Bytes that autograd saves for the backward pass; None if not counted."""
    operations: int | None = None
    """Operations that torch dispatches, without views; None if not counted."""
    ratio_first_deviation: float | None = None
    """Largest distance of log-densities of rollout and first update, in nats per latent dimension; None if a recipe has
    no ratio, and for all phases but whole iterations."""
    note: str = ""
    """A remark, or why it was not measured."""

    @property
    def key(self) -> str:
        """Unique among all phases."""
        return f"{self.section}: {self.name}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Bench:
    """The measurements of a bench."""

    name: str
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Facts of the machine, the software and the configuration."""
    config: str = ""
    """The measured configuration, as YAML."""
    phases: tuple[Phase, ...] = ()
    notes: tuple[str, ...] = ()
    """What you need to know to read the numbers."""
    finished: bool = False
    """False if something cut the bench off."""
    folder: Path | None = field(default=None, compare=False)

    def phase(self, section: str, name: str) -> Phase | None:
        """A phase by its name."""
        return next((one for one in self.phases if (one.section, one.name) == (section, name)), None)

    def with_phase(self, phase: Phase) -> Bench:
        """The same with one more."""
        return replace(self, phases=(*self.phases, phase))

    # ---- what follows --------------------------------------------------------------------------------------------

    def rate(self, ceiling: str) -> float | None:
        """FLOPs a second of a ceiling, or bytes a second of "copy"; None if not measured. A low dtype takes float32's
        if that is faster: some CPUs have no 16-bit instructions."""
        named = (ceiling, f"{ceiling}, float32")
        found = [one for one in self.phases if one.section == "ceilings" and one.name in named]
        rates = [
            (one.flops or one.least_bytes) / one.seconds.median
            for one in found
            if one.seconds is not None and one.seconds.median
        ]
        return max(rates, default=None)

    def utilisation(self, phase: Phase, *, recomputed: bool = False) -> float | None:
        """Share of its ceiling that a phase reaches, `FLOPs / seconds / ceiling`; perhaps with what is recomputed."""
        rate = self.rate(phase.ceiling)
        if phase.seconds is None or not phase.flops or not phase.seconds.median or rate is None:
            return None
        return (phase.flops + (phase.recomputed if recomputed else 0.0)) / phase.seconds.median / rate

    def roofline(self, phase: Phase) -> float | None:
        """Seconds that a phase takes at least, `max(FLOPs / ceiling, bytes / bandwidth)`."""
        rate, bandwidth = self.rate(phase.ceiling), self.rate("copy")
        if rate is None or bandwidth is None or not phase.flops:
            return None
        return max(phase.flops / rate, phase.least_bytes / bandwidth)

    @property
    def ratio_first_deviation(self) -> float | None:
        """Largest distance of log-densities of rollout and first update; None where it was not measured."""
        return max(
            (one.ratio_first_deviation for one in self.phases if one.ratio_first_deviation is not None), default=None
        )

    @property
    def wrong(self) -> bool:
        """Whether results were wrong, so that speeds mean nothing."""
        return any(phase.note.startswith(WRONG) for phase in self.phases)

    @property
    def throughput(self) -> tuple[float, str] | None:
        """FLOPs a second on the clock, and of which phase: whole iterations, else forward and backward."""
        for section, name in (("iteration", WHOLE), ("network", "forward and backward")):
            found = self.phase(section, name)
            if found is not None and found.wall is not None and found.flops and found.wall.median:
                return found.flops / found.wall.median, name
        return None


def write_bench(folder: Path, bench: Bench) -> None:
    """Writes `bench.json`."""
    found = bench.throughput
    more = {} if found is None else {"tflops": found[0] / 1e12, "tflops_of": found[1]}
    rows = [
        asdict(phase)
        | {
            "derived": {  # what readers of the file would reckon themselves
                "utilisation": bench.utilisation(phase),
                "utilisation_with_recomputation": bench.utilisation(phase, recomputed=True),
                "roofline_seconds": bench.roofline(phase),
            }
        }
        for phase in bench.phases
    ]
    data = {"format": FORMAT} | asdict(bench) | {"phases": rows, "throughput": more}
    del data["folder"]
    write_atomically(folder / FILE, json.dumps(data, indent=1) + "\n")


def read_bench(path: Path) -> Bench:
    """The bench of a folder or file. Raises ValueError: names one that is missing, damaged or of another version."""
    file = path / FILE if path.is_dir() else path
    if not file.is_file():
        raise ValueError(f"there is no {file}: give a folder of flowrl bench, or its {FILE}")
    try:
        data = read_json(file)
        if data["format"] != FORMAT:
            raise ValueError(f"format {data['format']}")
        phases = tuple(_phase(row) for row in data["phases"])
        known = {key: data[key] for key in ("name", "facts", "config", "finished")}
        if [type(value) for value in known.values()] != [str, dict, str, bool]:
            raise ValueError("entries of other types")
        notes = tuple(str(note) for note in data["notes"])
        return Bench(**known, notes=notes, phases=phases, folder=file.parent)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{file} is damaged, or of another version: measure again with flowrl bench") from error


def _phase(row: Mapping[str, Any]) -> Phase:
    given = {key: value for key, value in row.items() if key != "derived"}
    for key in ("seconds", "wall"):
        given[key] = (
            None if row[key] is None else TimeSpread(**{name: float(value) for name, value in row[key].items()})
        )
    for key, value in given.items():
        if isinstance(value, str) != (key in _WORDS) or isinstance(value, list | dict):
            raise ValueError(f"{key} is {value!r}")
    return Phase(**given)


_WORDS = ("section", "name", "ceiling", "note")
