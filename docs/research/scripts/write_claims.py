"""Writes docs/research/claims.md's table and figure from claims/claims.yaml and the numbers that it names.

    .venv/bin/python docs/research/scripts/write_claims.py

Evidence is a file of docs/research/claims: what `flowrl compare` wrote as `results.json`, or what a script of
tests/trials/claims wrote. The verdict is computed: the interval of the effect lies above 0, below 0, or holds 0. Needs
`make docs` (or matplotlib) once.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from page_parts import fill, table

from flowrl.config.strict_yaml import ConfigError
from flowrl.statistics.crossed import crossed_estimate
from flowrl.statistics.means import ScoreRow

RESEARCH = Path(__file__).resolve().parents[1]
FOLDER, PAGE = RESEARCH / "claims", RESEARCH / "claims.md"
REPRODUCED, REFUTED, OPEN = "reproduced", "refuted", "not established here"
COLORS = {REPRODUCED: "#0072b2", REFUTED: "#d55e00", OPEN: "#777777"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Effect:
    """How far things went the way a claim says: above 0 is its way. `detectable` is the smallest such effect that so
    many seeds would have found with 80 % power."""

    mean: float
    low: float
    high: float
    detectable: float
    seeds: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Claim:
    """A row of the table: what is said and where, what was done, in which unit, and where the numbers are."""

    name: str
    source: str
    says: str
    experiment: str
    unit: str
    command: str
    evidence: str
    effect: Effect

    @property
    def verdict(self) -> str:
        """By the interval alone."""
        return verdict_of(self.effect)


def verdict_of(effect: Effect) -> str:
    """`reproduced` where the whole interval is on the claim's side, `refuted` where it is on the other."""
    if effect.low > 0:
        return REPRODUCED
    return REFUTED if effect.high < 0 else OPEN


def effect_of(evidence: Mapping[str, Any], named: Mapping[str, str]) -> Effect:
    """The effect that an entry names: a script's `effect`, or a comparison's `method`, by its `measure`.

    The measure is `difference`, to the baseline and the default, its opposite `deficit`, or `gain`, over the model
    before training.

    Raises:
        ConfigError: it is not there, or has fewer than two seeds.
    """
    if "effect" in named:
        found = evidence["effects"].get(named["effect"])
        if found is None:
            raise ConfigError(f"effect {named['effect']!r} is none of {', '.join(evidence['effects'])}")
        seeds = [[ScoreRow(task="", prompt=0, sample=0, value=value)] for value in found["per_seed"]]
        if len(seeds) < 2:
            raise ConfigError(f"effect {named['effect']!r} has one seed, and a claim needs several")
        estimate = crossed_estimate(seeds, by_task=False)
        return Effect(
            mean=estimate.mean, low=estimate.seeds.low, high=estimate.seeds.high,
            detectable=estimate.detectable, seeds=len(seeds),
        )  # fmt: skip
    method, measure = evidence["methods"].get(named["method"]), named.get("measure", "difference")
    sign = -1 if measure == "deficit" else 1
    measure = "difference" if measure == "deficit" else measure
    if method is None or method[measure] is None:
        raise ConfigError(f"method {named['method']!r} has no {measure}: there are {', '.join(evidence['methods'])}")
    found = method[measure]
    if found["detectable"] is None or found["interval"] is None:
        raise ConfigError(f"method {named['method']!r} has one seed, and a claim needs several")
    low, high = sorted(sign * bound for bound in found["interval"])
    return Effect(
        mean=sign * found["mean"], low=low, high=high, detectable=found["detectable"], seeds=len(method["each_seed"])
    )


def read_claims(folder: Path) -> list[Claim]:
    """The claims of a folder's claims.yaml with their effects, in its order.

    Raises:
        ConfigError: an entry names what is not there.
    """
    claims = []
    for entry in yaml.safe_load((folder / "claims.yaml").read_text(encoding="utf-8")):
        evidence = json.loads((folder / entry["evidence"]).read_text(encoding="utf-8"))
        texts = {key: entry[key] for key in ("name", "source", "says", "experiment", "unit", "command", "evidence")}
        claims.append(Claim(**texts, effect=effect_of(evidence, entry)))
    return claims


def rows_of(claims: Sequence[Claim]) -> list[list[str]]:
    """The cells of the table."""
    return [
        [
            f"**{claim.name}**. {claim.says} ({claim.source})",
            claim.experiment,
            f"{claim.effect.mean:+.3f} ({claim.effect.low:+.3f} to {claim.effect.high:+.3f}) {claim.unit}",
            str(claim.effect.seeds),
            f"{claim.effect.detectable:.3f}",
            f"**{claim.verdict}**" if claim.verdict != OPEN else f"{OPEN}, because 0 lies within the interval",
            f"[{claim.evidence.removesuffix('.json')}](claims/{claim.evidence})",
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
    )
    for verdict, color in COLORS.items():
        axes.plot([], [], marker="o", color=color, label=verdict)
    axes.legend(frameon=False, fontsize=8, loc="lower left")
    axes.grid(axis="x", alpha=0.25)
    axes.spines[["top", "right", "left"]].set_visible(False)
    figure.savefig(path, dpi=110)


def main() -> None:
    """Writes the page's table, its counts, its commands and the figure."""
    claims = read_claims(FOLDER)
    head = ("claim", "experiment", "effect, 95 %", "seeds", "could have found", "verdict", "numbers")
    fill(PAGE, "claims", table(head, rows_of(claims)))
    counts = {verdict: sum(claim.verdict == verdict for claim in claims) for verdict in COLORS}
    told = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
    fill(PAGE, "counts", f"{len(claims)} claims: {told}.")
    commands = dict.fromkeys(claim.command for claim in claims)
    fill(PAGE, "commands", "```\n" + "\n".join(commands) + "\n```")
    draw(claims, FOLDER / "effects.png")


if __name__ == "__main__":
    main()
