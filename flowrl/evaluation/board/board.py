"""Compares finished evaluations: `flowrl.leaderboard`, `flowrl eval --compare`. It draws and judges nothing."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from flowrl.evaluation.board.comparable import group_entries
from flowrl.evaluation.board.finished import BoardEntry, find_entries, tell_apart
from flowrl.evaluation.board.leaderboard import as_content, as_page_of_markdown, as_text
from flowrl.evaluation.board.standings import Ranking, rank
from flowrl.evaluation.evaluation_result import refuse_foreign_files
from flowrl.runtime.call import call_words
from flowrl.runtime.files import write_atomically
from flowrl.runtime.public import public
from flowrl.runtime.versions import version_of

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
    entries = tell_apart(find_entries([str(one) for one in results]))
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
    entries = [entry for entry in find_entries([str(one) for one in results]) if entry.side == "model"]
    names = list(dict.fromkeys(entry.pool or entry.label for entry in entries))
    if len(names) > 1:
        raise ValueError(
            f"the results are of {', '.join(names)}, and a model card is of one model: give those of "
            f"one, or say that they are of one by NAME=FOLDER,FOLDER."
        )
    return names[0], entries
