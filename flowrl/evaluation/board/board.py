"""Compares finished evaluations: `flowrl.leaderboard`, `flowrl eval --compare`. It draws and judges nothing."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flowrl.evaluation.board.comparable import PROMPTS, SAMPLES, describe_conditions, group_entries
from flowrl.evaluation.board.finished import BoardEntry, find_entries, tell_apart
from flowrl.evaluation.board.standings import Ranking, Standing, rank
from flowrl.evaluation.evaluation_result import refuse_foreign_files
from flowrl.rendering.markup import DASH, MINUS, plural
from flowrl.rendering.terminal_text import Table, as_markdown, with_note, wrapped
from flowrl.runtime.call import call_words
from flowrl.runtime.files import plain, write_atomically
from flowrl.runtime.public import public
from flowrl.runtime.versions import version_of
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


__all__ = ["Leaderboard", "leaderboard"]

OUT = Path("evaluations") / "leaderboard"
HEADING = "Leaderboard"
JSON, MARKDOWN, PAGE = "leaderboard.json", "leaderboard.md", "leaderboard.html"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Leaderboard:
    """Tables of models under the same conditions."""

    rankings: tuple[Ranking, ...]
    """A table for each benchmark, metric and set of conditions."""
    folder: Path
    """Holds leaderboard.json, .md and .html."""
    text: str = field(repr=False)
    """All tables for a terminal."""


@public
def leaderboard(
    results: Sequence[str | Path],
    *,
    across: Sequence[str] = (),
    out: str | Path | None = None,
    show: bool = True,
    page: Callable[..., str] | None = None,
) -> Leaderboard:
    """Ranks finished evaluations: scores with intervals, the possible ranks of each, differences to the first.

    Args:
        results: result folders, folders that contain some, or `NAME=FOLDER,FOLDER` for trainings of one method.
        across: conditions that may differ among results, such as "num_steps".
        out: folder to write; None is `evaluations/leaderboard`.
        show: show notes.
        page: writes the page of the rankings.

    Raises:
        FlowrlError: nothing can be compared; the message says why.
    """
    entries = tell_apart(find_entries(results))
    if len(entries) < 2:
        raise ValueError(f"{entries[0].folder} is the only result: name two or more, or folders that hold them.")
    groups = group_entries(entries, across)
    if all(len(group.entries) < 2 for group in groups):
        apart = dict.fromkeys(
            f"{group.benchmark}, {group.entries[0].label}: {group.apart}" for group in groups if group.apart
        )
        benchmarks = sorted({group.benchmark for group in groups})
        why = "; ".join(apart) if apart else f"they are of {', '.join(benchmarks)}, one model each"
        hint = " Conditions that may differ are named by `across`." if apart else ""
        raise ValueError(f"no two of these {len(entries)} results can be compared: {why}.{hint}")
    folder = OUT if out is None else Path(out)
    refuse_foreign_files(folder, (JSON, MARKDOWN, PAGE), {"leaderboard"})
    command, rankings = call_words(), [rank(group) for group in groups]
    content = as_content(rankings, command=command, version=version_of("flowrl-toolkit"))
    write_atomically(folder / JSON, json.dumps(content, indent=1, ensure_ascii=False) + "\n")
    write_atomically(folder / MARKDOWN, as_page_of_markdown(rankings, heading=HEADING, command=command))
    if page is not None:
        write_atomically(folder / PAGE, page(rankings, heading=HEADING, command=command, out=folder))
    return Leaderboard(rankings=tuple(rankings), folder=folder, text=as_text(rankings))


def of_one_model(results: Sequence[str | Path]) -> tuple[str, list[BoardEntry]]:
    """The name and the finished evaluations of one model."""
    entries = [entry for entry in find_entries(results) if entry.side == "model"]
    names = list(dict.fromkeys(entry.pool or entry.label for entry in entries))
    if len(names) > 1:
        raise ValueError(
            f"the results are of {', '.join(names)}, and a model card is of one model: give those of "
            f"one, or say that they are of one by NAME=FOLDER,FOLDER."
        )
    return names[0], entries
