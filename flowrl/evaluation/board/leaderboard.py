"""Writes a leaderboard as text for a terminal, as Markdown, and as the content of leaderboard.json."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from flowrl.evaluation.board.comparable import PROMPTS, SAMPLES, describe_conditions
from flowrl.evaluation.board.standings import Ranking, Standing
from flowrl.rendering.markup import DASH, MINUS, plural
from flowrl.rendering.terminal_text import Table, as_markdown, with_note, wrapped
from flowrl.runtime.files import plain
from flowrl.statistics.bootstrap import Interval

FORMAT = 1
"""Format version of leaderboard.json."""
RANKS = (
    "Rank 2 to 4 of 5 means that one model is surely better and one surely worse. Surely: the interval of the paired "
    "difference excludes 0, where the intervals of all pairs of a table are widened to hold together at 95 %."
)
RANKS_OF_TWO = (
    "Rank 1 to 2 means that neither is surely better: the 95 % interval of their paired difference includes 0."
)
HEAD = ("model", "rank", "score", "95 %", "to first", "95 % of all pairs")


def title(ranking: Ranking) -> str:
    """Benchmark and metric."""
    group = ranking.group
    metric = group.metric.replace("_", " ")
    return metric if metric == group.benchmark else f"{group.benchmark}: {metric}"


def summary(rankings: Sequence[Ranking]) -> str:
    """One sentence: how many models, metrics and conditions."""
    models = {standing.name for ranking in rankings for standing in ranking.standings}
    benchmarks = {ranking.group.benchmark for ranking in rankings}
    return (
        f"{plural(len(models), 'model')} on {plural(len(benchmarks), 'benchmark')}, {plural(len(rankings), 'table')}."
    )


def rank_text(standing: Standing) -> str:
    """ "2", or "1 to 3"."""
    low, high = standing.rank
    return str(low) if low == high else f"{low} to {high}"


def digits_of(ranking: Ranking) -> int:
    """Digits after the point: two of the smallest standard error, about a quarter of an interval."""
    widths = [line.score.high - line.score.low for line in ranking.standings if line.score.known]
    errors = [width / 4 for width in widths if width > 0]
    return min(max(1 - math.floor(math.log10(min(errors))), 0), 5) if errors else 3


def format_value(value: float, digits: int, *, sign: bool = False) -> str:
    """A number with so many digits; a dash if unknown."""
    return f"{value:{'+' if sign else ''}.{digits}f}".replace("-", MINUS) if math.isfinite(value) else DASH


def range_of(interval: Interval | None, digits: int, *, sign: bool = False) -> str:
    """Bounds as "0.21 to 0.34"; a dash if unknown."""
    if interval is None or not interval.known:
        return DASH
    return f"{format_value(interval.low, digits, sign=sign)} to {format_value(interval.high, digits, sign=sign)}"


def name_of(standing: Standing) -> str:
    """The name, with the number of trainings if there are several."""
    count = len(standing.entries)
    return standing.name if count == 1 else f"{standing.name} \u00d7{count}"


def pairing_text(ranking: Ranking) -> str:
    """Says which images the differences are taken over."""
    if not ranking.images:
        return ""
    group = ranking.group
    if group.shares_noise:
        shared = f"the same prompts and start noise (seed {next(iter(group.seeds))})"
    else:
        shared = "the same prompts; start noise is not known to be shared, which costs precision but biases nothing"
    return f"Differences are paired: {shared}."


def table_of(ranking: Ranking) -> Table:
    """The table of a group with its notes."""
    digits = digits_of(ranking)
    rows = []
    for line in ranking.standings:
        behind = DASH if line.behind is None else format_value(line.behind.mean, digits, sign=True)
        score = format_value(line.score.mean, digits), range_of(line.score, digits)
        rows.append((name_of(line), rank_text(line), *score, behind, range_of(line.behind, digits, sign=True)))
    apart = f"Apart from the table above: {ranking.group.apart}. " if ranking.group.apart else ""
    known = dict(describe_conditions(ranking.group.conditions))
    same = [f"{plural(int(known.pop(PROMPTS)), 'prompt')}, {known.pop(SAMPLES)} samples each"]
    same += [f"{key.replace('_', ' ')} {value}" for key, value in known.items()]
    said = " ".join([f"{apart}{'; '.join(same)}.", pairing_text(ranking), *ranking.notes]).replace("  ", " ")
    return Table(title=title(ranking), head=HEAD, rows=tuple(rows), note=said.strip())


def claims(rankings: Sequence[Ranking]) -> list[str]:
    """Explains how to read the tables."""
    models = max((len(ranking.standings) for ranking in rankings), default=0)
    pooled = any(len(line.entries) > 1 for ranking in rankings for line in ranking.standings)
    one = "Scores of one training have intervals over prompts, which do not cover another training of the same method."
    several = " Those of several (\u00d7 and their number) cover other trainings and prompts together."
    return [RANKS_OF_TWO if models == 2 else RANKS, one + several if pooled else one]


def as_text(rankings: Sequence[Ranking]) -> str:
    """All tables for a terminal of 80 columns."""
    tables = (with_note(table_of(ranking)) for ranking in rankings)
    return "\n\n".join([summary(rankings), *tables, *map(wrapped, claims(rankings))])


def as_page_of_markdown(rankings: Sequence[Ranking], *, heading: str, command: str) -> str:
    """All tables with their notes."""
    parts = [f"# {heading}", summary(rankings)]
    for ranking in rankings:
        table = table_of(ranking)
        parts += [f"## {table.title}", as_markdown(table), table.note]
    return "\n\n".join([*parts, *claims(rankings), "## How it was made", f"```\n{command}\n```"]) + "\n"


def as_content(rankings: Sequence[Ranking], *, command: str, version: str | None) -> dict[str, Any]:
    """The content of leaderboard.json; unknown numbers are null."""
    tables = []
    for ranking in rankings:
        group = ranking.group
        tables.append({
            "benchmark": group.benchmark, "metric": group.metric, "apart_because": group.apart or None,
            "conditions": {key: len(value) if key == PROMPTS else value for key, value in group.conditions.items()},
            "shares_start_noise": group.shares_noise, "paired_images": ranking.images,
            "factor_for_all_pairs": ranking.factor, "notes": list(ranking.notes),
            "standings": [
                {
                    "name": line.name, "score": line.score, "rank": {"least": line.rank[0], "largest": line.rank[1]},
                    "difference_to_first": line.behind, "trainings": len(line.entries),
                    "results": [{"folder": str(entry.folder), "side": entry.side, "label": entry.label,
                                 "seed": None if entry.drawn is None else entry.drawn.get("seed"),
                                 "score": entry.metrics.get(group.metric)} for entry in line.entries],
                }
                for line in ranking.standings
            ],
        })  # fmt: skip
    return plain({
        "leaderboard": FORMAT, "command": command, "version": version, "summary": summary(rankings),
        "claims": claims(rankings), "tables": tables,
    })  # fmt: skip
