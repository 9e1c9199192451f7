"""Writes docs/research/claims.md's table and figure from claims/claims.yaml and the numbers that it names.

    .venv/bin/python docs/research/scripts/write_claims.py

Evidence is a file of docs/research/claims, or one named from there: what `flowrl compare` wrote as `results.json`, or
what a script of tests/trials/claims wrote. The verdict is computed, by the page's rules:

- The interval of the effect lies above 0, below 0, or holds 0; it is cut to the effect's range (`most`).
- A verdict needs Holm's p below 0.05 as well, over all rows of the page. Rows that have no verdict of their own stay
  among the number of comparisons, and take no rank.
- Seeds that chose a row (`chosen_by`), and evidence from an uncommitted tree, give no verdict.
- Trainings of unlike seeds are compared by Welch's test (`sides`).

Needs `make docs` (or matplotlib) once.
"""

from __future__ import annotations

import json
import math
import posixpath
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from page_parts import fill, is_uncommitted, table

from flowrl.config.strict_yaml import ConfigError
from flowrl.statistics.crossed import estimate_of, holm
from flowrl.statistics.means import Range, bound

RESEARCH = Path(__file__).resolve().parents[1]
FOLDER, PAGE = RESEARCH / "claims", RESEARCH / "claims.md"
REPRODUCED, REFUTED, OPEN = "reproduced", "refuted", "not established here"
LOST, REFUSED, TAKEN_BACK = "not established after correction", "not counted", "not judged"
COLORS = {
    REPRODUCED: "#0072b2",
    REFUTED: "#d55e00",
    LOST: "#56b4e9",
    OPEN: "#777777",
    REFUSED: "#bbbbbb",
    TAKEN_BACK: "#e0c080",
}
LEVEL = 0.05


@dataclass(frozen=True, kw_only=True, slots=True)
class Effect:
    """How far things went the way a claim says: above 0 is its way.

    Attributes:
        mean: of the effect.
        low: of its 95 % interval, uncorrected.
        high: likewise.
        p: of Student's or Welch's test over seeds, two-sided, uncorrected; NaN where seeds agree.
        detectable: the smallest such effect that so many seeds would have found with 80 % power.
        seeds: how many; of two sides with seeds of their own "2 and 5".
    """

    mean: float
    low: float
    high: float
    p: float
    detectable: float
    seeds: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Claim:
    """A row of the table: what is said and where, what was done, in which unit, and where the numbers are.

    Attributes:
        effect: as measured.
        uncommitted: whether the evidence is from a tree with changes that no commit has.
        taken_back: why the row is not judged; empty where it is.
        holm: p after correction over all rows of the page; NaN for rows that are not judged or not counted.
    """

    name: str
    source: str
    says: str
    experiment: str
    unit: str
    command: str
    evidence: str
    effect: Effect
    uncommitted: bool = False
    taken_back: str = ""
    holm: float = math.nan

    @property
    def verdict(self) -> str:
        """By the page's rules."""
        if self.taken_back:
            return TAKEN_BACK
        return REFUSED if self.uncommitted else verdict_of(self.effect, self.holm)

    @property
    def why(self) -> str:
        """The verdict in a cell's words."""
        words = {
            OPEN: f"{OPEN}, because 0 lies within the interval",
            LOST: f"{LOST} (p {p_text(self.effect.p)}, Holm {p_text(self.holm)})",
            REFUSED: f"from an uncommitted tree, {REFUSED}",
            TAKEN_BACK: f"{TAKEN_BACK}: {self.taken_back}",
        }
        return words.get(self.verdict, f"**{self.verdict}** (Holm p {p_text(self.holm)})")


def p_text(p: float) -> str:
    """A p-value in a cell."""
    return "unknown" if math.isnan(p) else f"{p:.3f}" if p >= 0.001 else "below 0.001"


def verdict_of(effect: Effect, corrected: float) -> str:
    """`reproduced` where the whole interval is on the claim's side, `refuted` where it is on the other, if the p after
    correction over all rows is below 0.05 too."""
    if not (effect.low > 0 or effect.high < 0):
        return OPEN
    if not corrected < LEVEL:
        return LOST
    return REPRODUCED if effect.low > 0 else REFUTED


def corrected(claims: Sequence[Claim]) -> list[Claim]:
    """Claims with Holm's p over all of them. Rows that are refused or taken back count among the comparisons with p 1:
    they were looked at, and make none of the others easier."""
    counted = [claim for claim in claims if not (claim.uncommitted or claim.taken_back)]
    told = {claim.name: claim.effect.p for claim in counted}
    found = holm({claim.name: 1.0 for claim in claims} | told)
    return [replace(claim, holm=found[claim.name] if claim.name in told else math.nan) for claim in claims]


def effect_of(evidence: Mapping[str, Any], named: Mapping[str, Any]) -> Effect:
    """The effect that an entry names: a script's `effect` or two of its `sides`, or a comparison's `method`.

    A comparison's `measure` is `difference`, to the baseline and the default, its opposite `deficit`, or `gain`, over
    the model before training. `sides` are two lists of scores under `under` in the evidence; of curves, the score at
    evaluation `at`. `chosen_by` are places of seeds that are left out of the first.

    Raises:
        ConfigError: it is not there, or has fewer than two seeds.
    """
    most, chosen = float(named["most"]), set(named.get("chosen_by", ()))
    if "sides" in named:
        first, second = (scores_of(evidence[named["under"]][side], named.get("at")) for side in named["sides"])
        first = [score for place, score in enumerate(first) if place not in chosen]
        if min(len(first), len(second)) < 2:
            raise ConfigError(f"sides {' and '.join(named['sides'])} need several seeds each")
        return students(first, second, most=most)
    if "effect" in named:
        effect = evidence["effects"].get(named["effect"])
        if effect is None:
            raise ConfigError(f"effect {named['effect']!r} is none of {', '.join(evidence['effects'])}")
        seeds = [value for place, value in enumerate(effect["per_seed"]) if place not in chosen]
        if len(seeds) < 2:
            raise ConfigError(f"effect {named['effect']!r} has one seed, and a claim needs several")
        return students(seeds, most=most)
    method, measure = evidence["methods"].get(named["method"]), named.get("measure", "difference")
    sign = -1 if measure == "deficit" else 1
    measure = "difference" if measure == "deficit" else measure
    if method is None or method[measure] is None:
        raise ConfigError(f"method {named['method']!r} has no {measure}: there are {', '.join(evidence['methods'])}")
    if chosen:  # of the other seeds no images are kept, so that the interval is over seeds alone
        base = evidence["methods"][evidence["baseline"]]["each_seed"]
        others = [sign * (value - base[seed]) for seed, value in method["each_seed"].items() if int(seed) not in chosen]
        return students(others, most=most)
    found = method[measure]
    if found["detectable"] is None or found["interval"] is None:
        raise ConfigError(f"method {named['method']!r} has one seed, and a claim needs several")
    low, high = sorted(sign * end for end in found["interval"])
    cut = bound(sign * found["mean"], low, high, Range(-most, most))
    count = str(len(method["each_seed"]))
    return Effect(mean=cut.mean, low=cut.low, high=cut.high, p=found["p"], detectable=found["detectable"], seeds=count)


def students(first: Sequence[float], second: Sequence[float] = (), *, most: float) -> Effect:
    """The mean of the first numbers, less that of the second where there are any, by Student's t or Welch's."""
    values = np.array([*first, *second], dtype=np.float64)[:, None]
    found = estimate_of({"": (values, np.zeros(1, dtype=np.int64))}, None, by_task=True, against=len(second))
    cut = bound(found.mean, found.seeds.low, found.seeds.high, Range(-most, most))
    seeds = f"{len(first)} and {len(second)}" if second else str(len(first))
    return Effect(mean=cut.mean, low=cut.low, high=cut.high, p=found.p, detectable=found.detectable, seeds=seeds)


def scores_of(side: Sequence[Any], at: int | None) -> list[float]:
    """The score of each seed; of curves (…, score) that at an evaluation."""
    return [float(one) if at is None else float(one[at][-1]) for one in side]


def read_claims(folder: Path) -> list[Claim]:
    """The claims of a folder's claims.yaml with their effects and corrected p, in its order.

    Raises:
        ConfigError: an entry names what is not there.
    """
    claims = []
    for entry in yaml.safe_load((folder / "claims.yaml").read_text(encoding="utf-8")):
        evidence = json.loads((folder / entry["evidence"]).read_text(encoding="utf-8"))
        texts = {key: entry[key] for key in ("name", "source", "says", "experiment", "unit", "command", "evidence")}
        texts["taken_back"] = entry.get("taken_back", "")
        claims.append(Claim(**texts, effect=effect_of(evidence, entry), uncommitted=is_uncommitted(evidence)))
    return corrected(claims)


def rows_of(claims: Sequence[Claim]) -> list[list[str]]:
    """The cells of the table."""
    return [
        [
            f"**{claim.name}**. {claim.says} ({claim.source})",
            claim.experiment,
            f"{claim.effect.mean:+.3f} ({claim.effect.low:+.3f} to {claim.effect.high:+.3f}) {claim.unit}",
            claim.effect.seeds,
            f"{claim.effect.detectable:.3f}",
            claim.why,
            f"[{Path(claim.evidence).stem}]({posixpath.normpath(f'claims/{claim.evidence}')})",
        ]
        for claim in claims
    ]


def draw(claims: Sequence[Claim], path: Path) -> None:
    """Every effect with its interval, each divided by what could have been found, so that units do not matter; an
    arrow for what lies beyond the edge."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 0.8 + 0.33 * len(claims)), layout="constrained")
    edge = 6.0
    for place, claim in enumerate(reversed(claims)):
        scale = claim.effect.detectable or 1e-9  # seeds that agree to the last bit
        low, mean, high = (
            min(edge, max(-edge, value / scale)) for value in (claim.effect.low, claim.effect.mean, claim.effect.high)
        )
        axes.plot([low, high], [place, place], color=COLORS[claim.verdict], linewidth=1.8)
        beyond = abs(claim.effect.mean / scale) > edge
        arrow = ">" if claim.effect.mean > 0 else "<"
        axes.plot([mean], [place], marker=arrow if beyond else "o", color=COLORS[claim.verdict])
    axes.axvline(0, color="black", linewidth=0.8)
    axes.set_yticks(range(len(claims)), [claim.name for claim in reversed(claims)], fontsize=8)
    axes.set(
        xlabel="effect in the claim's direction / smallest that could be found",
        xlim=(-edge - 0.3, edge + 0.3),
        ylim=(-1, len(claims)),
    )
    for verdict, color in COLORS.items():
        axes.plot([], [], marker="o", color=color, label=verdict)
    axes.legend(frameon=False, fontsize=8, loc="lower right")
    axes.grid(axis="x", alpha=0.25)
    axes.spines[["top", "right", "left"]].set_visible(False)
    figure.savefig(path, dpi=110)


def main() -> None:
    """Writes the page's table, its counts, its commands and the figure."""
    claims = read_claims(FOLDER)
    head = ("claim", "experiment", "effect, 95 %", "seeds", "could have found", "verdict", "numbers")
    fill(PAGE, "claims", table(head, rows_of(claims)))
    counts = Counter(claim.verdict for claim in claims)
    told = ", ".join(f"{counts[verdict]} {verdict}" for verdict in COLORS)
    fill(PAGE, "counts", f"{len(claims)} claims: {told}.")
    commands = dict.fromkeys(claim.command for claim in claims)
    fill(PAGE, "commands", "```\n" + "\n".join(commands) + "\n```")
    draw(claims, FOLDER / "effects.png")


if __name__ == "__main__":
    main()
