"""`flowrl eval --compare` and `--model-card`: to a leaderboard, or to a model card's metadata."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from flowrl.commands.eval.arguments import add_arguments
from flowrl.evaluation.board.comparable import grouped
from flowrl.evaluation.board.finished import find_entries, told_apart
from flowrl.evaluation.board.leaderboard import as_content, as_page_of_markdown, as_text
from flowrl.evaluation.board.standings import ranked
from flowrl.pages.board_page import render
from flowrl.publishing.model_card import add_to_card
from flowrl.rendering.markup import plural
from flowrl.runtime.files import read_json, refuse_foreign, write_atomically
from flowrl.runtime.scrubbing import say as print
from flowrl.runtime.versions import version_of

OUT = Path("evaluations") / "leaderboard"
NAMES = ("leaderboard.json", "leaderboard.md", "leaderboard.html")
CARD = "README.md"
HEADING = "Leaderboard"


def compare(parsed: argparse.Namespace) -> int:
    """Reads finished evaluations, prints the tables, writes leaderboard.json, .md and .html; returns 0.

    Raises:
        ValueError: nothing to compare, with why.
    """
    _refuse_others(parsed, "compare", ("across", "out"))
    entries = told_apart(find_entries(parsed.compare))
    if len(entries) < 2:
        raise ValueError(f"{entries[0].folder} is the only result: name two or more, or folders that hold them.")
    groups = grouped(entries, parsed.across or ())
    if all(len(group.entries) < 2 for group in groups):
        apart = dict.fromkeys(f"{group.benchmark}, {group.entries[0].label}: {group.apart}" for group in groups
                              if group.apart)  # fmt: skip
        benchmarks = sorted({group.benchmark for group in groups})
        why = "; ".join(apart) if apart else f"they are of {', '.join(benchmarks)}, one model each"
        hint = " Conditions that may differ are named by --across." if apart else ""
        raise ValueError(f"no two of these {len(entries)} results can be compared: {why}.{hint}")
    out = parsed.out or OUT
    _refuse_foreign(out)
    command = shlex.join(["flowrl", *sys.argv[1:]])
    rankings = [ranked(group) for group in groups]
    content = as_content(rankings, command=command, version=version_of("flowrl-toolkit"))
    texts = (
        json.dumps(content, indent=1, ensure_ascii=False) + "\n",
        as_page_of_markdown(rankings, heading=HEADING, command=command),
        render(rankings, heading=HEADING, command=command, out=out),
    )
    for name, text in zip(NAMES, texts, strict=True):
        write_atomically(out / name, text)
    print(as_text(rankings))
    print(f"\nwrote {out / NAMES[-1]}, {NAMES[0]} and {NAMES[1]}")
    return 0


def card(parsed: argparse.Namespace) -> int:
    """Adds finished evaluations of one model to the front matter of a README.md; returns 0.

    Raises:
        ValueError: results of several models, or a README.md that cannot be changed without loss.
    """
    _refuse_others(parsed, "model_card", ("out",))
    entries = [entry for entry in find_entries(parsed.model_card) if entry.side == "model"]
    names = list(dict.fromkeys(entry.pool or entry.label for entry in entries))
    if len(names) > 1:
        raise ValueError(
            f"--model-card: the results are of {', '.join(names)}, and a model card is of one model: give "
            f"those of one, or say that they are of one by NAME=FOLDER,FOLDER."
        )
    place = parsed.out or entries[0].folder
    path = place / CARD if place.is_dir() or place.suffix != ".md" else place
    block, added = add_to_card(path, names[0], entries)
    print(block)
    print(f"wrote {path}: model-index with {plural(added, 'number')} of {plural(len(entries), 'evaluation')}")
    return 0


def _refuse_others(parsed: argparse.Namespace, flag: str, allowed: Sequence[str]) -> None:
    """Nothing is drawn or judged, so that flags which say how have no place here."""
    given = []
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    for name, value in vars(parsed).items():
        if name not in (flag, *allowed) and value != parser.get_default(name):
            given.append("MODEL" if name == "models" else f"--{name.replace('_', '-')}")
    if given:
        hint = " A model is evaluated against another with --baseline." if flag == "compare" else ""
        name = flag.replace("_", "-")
        raise ValueError(
            f"--{name} reads finished evaluations, so {', '.join(given)} has no place beside it: leave it out.{hint}"
        )


def _refuse_foreign(out: Path) -> None:
    try:
        own = "leaderboard" in read_json(out / NAMES[0])
    except ValueError:
        own = False
    for name in NAMES:
        refuse_foreign(out / name, own=own)
