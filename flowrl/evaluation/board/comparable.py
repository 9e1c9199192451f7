"""Groups a benchmark's results by their conditions, so that only comparable ones are ranked together.

Conditions are all that a number depends on besides the model: prompts, images per prompt, judge with version, sampling,
options. Start noise is not a condition: other noise gives an equally good sample that is only less well paired.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flowrl.benchmarks import temporal
from flowrl.config.options import unknown_name
from flowrl.evaluation.board.finished import DIVERSITY, BoardEntry, prompt_of

SAMPLED = (
    "num_steps", "guidance_scale", "grid", "shift", "dtype", "quantize", "max_sequence_length", "height", "width",
    "training_size", "options", "negative", "first_block_cache",
)  # fmt: skip
"""Keys of `drawn.json` on how images were sampled."""
OUTCOMES = {
    "seconds", "judging_seconds", "tokens", "attempts", "skipped", "gained", "lost", "pairs", "overlap", "repairs",
    "detectable_difference", "folder", "model", "prompts", "images", "clips", "videos", "samples", "seed", "versions",
    *SAMPLED,
}  # fmt: skip
"""Facts of a result that are not conditions, or that other files state better."""
PROMPTS, SAMPLES, SAMPLING = "prompts", "images per prompt", "sampling"
ELSEWHERE = "images of another program"
UNRANKED = set(temporal.NAMES) - set(temporal.LESS_IS_BETTER)

Conditions = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """Entries of one benchmark and metric under the same conditions."""

    benchmark: str
    metric: str
    entries: tuple[BoardEntry, ...]
    conditions: Mapping[str, Any]
    apart: str = ""
    """Why this group is not compared with the first one of its benchmark and metric; empty for the first."""

    @property
    def seeds(self) -> set[Any]:
        """Seeds of the start noise; None if unknown."""
        return {None if entry.drawn is None else entry.drawn.get("seed") for entry in self.entries}

    @property
    def shares_noise(self) -> bool:
        """Whether all images were drawn from one start noise, by models of one kind."""
        models = {None if entry.drawn is None else entry.drawn.get("model") for entry in self.entries}
        return len(self.seeds) == 1 and None not in self.seeds and len(models) == 1


def group_entries(entries: Sequence[BoardEntry], across: Sequence[str] = ()) -> list[Group]:
    """Groups by benchmark and metric, the largest first, in the order of the entries; conditions in `across` may differ
    within a group. Raises ValueError: `across` names a condition that no entry has."""
    tables: dict[tuple[str, str], list[tuple[BoardEntry, Conditions]]] = {}
    for entry in entries:
        for metric in metrics_of(entry):
            known = conditions(entry, metric)
            tables.setdefault((entry.benchmark, metric), []).append((entry, known))
    everything = {key for listed in tables.values() for _, known in listed for key in known}
    if strange := [name for name in across if name not in everything]:
        raise ValueError(f"`across`: {unknown_name('condition of these results', strange[0], everything)}")
    groups = []
    for (benchmark, metric), listed in tables.items():
        parts: dict[str, list[tuple[BoardEntry, Conditions]]] = {}
        for entry, known in listed:
            kept = {key: value for key, value in known.items() if key not in across}
            seal = {**kept, PROMPTS: sorted(kept.get(PROMPTS, ()))}
            parts.setdefault(json.dumps(seal, sort_keys=True, default=str), []).append((entry, known))
        ordered = sorted(parts.values(), key=len, reverse=True)
        first = _shared(ordered[0])
        for place, part in enumerate(ordered):
            own = _shared(part)
            apart = "; ".join(differences(first, own, across)) if place else ""
            members = tuple(entry for entry, _ in part)
            groups.append(Group(benchmark=benchmark, metric=metric, entries=members, conditions=own, apart=apart))
    return groups


def _shared(part: Sequence[tuple[BoardEntry, Conditions]]) -> Conditions:
    """Conditions of a group; if one differs within the group, as `across` allows, it lists all its values."""
    found = dict(part[0][1])
    for key in found:
        values = {json.dumps(known.get(key), sort_keys=True, default=str): known.get(key) for _, known in part}
        if len(values) > 1 and key != PROMPTS:
            found[key] = " or ".join(map(_describe, values.values()))
    return found


def metrics_of(entry: BoardEntry) -> list[str]:
    """The numbers of an evaluation to rank: the first reported one, and all others that the rows give as means over
    images. Tasks of a score that is ranked itself, and numbers without a direction, are left out."""
    first = next(iter(entry.metrics))
    whole = [name for name, values in entry.values.items() if not values.part]
    known = whole or list(entry.values)
    return [name for name in (known if first in known else [first, *known]) if name not in UNRANKED]


def judge_of(entry: BoardEntry, metric: str) -> Any:
    """The version behind one of several scorers' numbers: its own, that of the scorer whose sub-score it is, or that of
    the diagnostics or features; None if the result names none."""
    versions = entry.facts.get("versions")
    if not isinstance(versions, Mapping):
        return None
    shared = "diagnostics" if metric in temporal.NAMES else "features" if metric == DIVERSITY else ""
    return versions.get(metric) or versions.get(metric.partition(".")[0]) or versions.get(shared)


def conditions(entry: BoardEntry, metric: str) -> Conditions:
    """All that a number depends on besides the model."""
    found: Conditions = {PROMPTS: frozenset(f"{row.get('task', '')}\n{prompt_of(row)}" for row in entry.rows)}
    count = Counter((row.get("task", ""), prompt_of(row)) for row in entry.rows)
    found[SAMPLES] = max(count.values(), default=0)
    versions = entry.facts.get("versions")
    if isinstance(versions, Mapping):
        found["judge"] = judge_of(entry, metric) or dict(versions)
    found |= {key: value for key, value in entry.facts.items() if key not in OUTCOMES}
    found |= {f"judge's {key}": value for key, value in entry.judged.items()}
    if entry.drawn is None:
        # Only a sampled model states its steps: images that exist were made nobody knows how.
        found[SAMPLING] = ELSEWHERE
    else:
        found |= {key: entry.drawn.get(key) for key in SAMPLED if entry.drawn.get(key) is not None}
    if entry.version is not None:
        found["flowrl"] = entry.version
    return found


def differences(first: Mapping[str, Any], second: Mapping[str, Any], across: Sequence[str] = ()) -> list[str]:
    """States in words how the second's conditions differ from the first's."""
    said = []
    for key in dict.fromkeys([*second, *first]):
        ours, theirs = first.get(key), second.get(key)
        if key in across or ours == theirs:
            continue
        if key == PROMPTS:
            ours, theirs = ours or (), theirs or ()
            shared = len(set(ours) & set(theirs))
            said.append(f"other prompts ({len(theirs)}, of which {shared} are among those {len(ours)})")
        elif key == SAMPLES:
            said.append(f"{theirs} images per prompt, not {ours}")
        elif key == "judge":
            said.append(f"another judge: {_describe(theirs)}, not {_describe(ours)}")
        elif key == SAMPLING:
            said.append(
                "images of another program, whose sampling is not known"
                if theirs
                else "images drawn here, not by another program"
            )
        elif key not in SAMPLED or not (SAMPLING in first or SAMPLING in second):
            said.append(f"{key} {_describe(theirs)}, not {_describe(ours)}")
    return said


def describe_conditions(known: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Conditions as names and text."""
    return [(key, str(len(value)) if key == PROMPTS else _describe(value)) for key, value in known.items()]


def _describe(value: Any) -> str:
    if value is None:
        return "none"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
