"""Writes the tables of docs/research/methods.md on the methods of 2026 from methods/methods_2026.json.

    .venv/bin/python docs/research/scripts/write_methods_2026.py

The numbers are those of `tests/trials/claims/methods_2026.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from page_parts import committed, fill, table

RESEARCH = Path(__file__).resolve().parents[1]
EVIDENCE, PAGE = RESEARCH / "methods" / "methods_2026.json", RESEARCH / "methods.md"
PAIR_HEAD = ("first side", "second side", "difference", "95 %", "each seed", "p", "Holm p", "could have found")
SIDE_HEAD = ("side", "network evaluations", "iterations", "time", "at the end, each seed", "gain", "95 % of gain")
PARTS = {
    "routes": ("routes",),
    "matching": ("rvm_over_nft", "ram_over_nft", "awm_over_nft", "ram_over_fast"),
    "draw": ("draw_prompt_over_iteration", "draw_prompt_over_image"),
    "art": ("art_over_nft_2", "art_over_fast_2", "art_over_nft_12", "art_over_fast_12"),
    "cold": ("cold_start",),
    "teachers": ("student_over_joint",),
    "votes": ("votes_over_flipped", "votes_four_over_two"),
}
"""A part of the page and the pairs of its table."""


def signed(values: Sequence[float]) -> str:
    """Several numbers with their signs."""
    return " ".join(f"{value:+.3f}" for value in values)


def pair_rows(pairs: Mapping[str, Any], names: Sequence[str]) -> list[list[str]]:
    """The cells of the pairs that were measured."""
    return [
        [
            f"`{pair['sides'][0]}`",
            f"`{pair['sides'][1]}`",
            f"{pair['mean']:+.3f}",
            f"{pair['low']:+.3f} to {pair['high']:+.3f}",
            signed(pair["each_seed"]),
            *(f"{pair[key]:.3f}" for key in ("p", "holm", "detectable")),
        ]
        for pair in (pairs[name] for name in names if name in pairs)
    ]


def side_rows(sides: Mapping[str, Any]) -> list[list[str]]:
    """The cells of every side, a row for each of its measures."""
    rows = []
    for name, side in sides.items():
        for metric, found in ((key, value) for key, value in side.items() if isinstance(value, dict)):
            gain, place = found.get("gain"), metric.removeprefix("eval/reward/")
            shown = f"`{name}`" if metric.startswith("eval/geneval") else f"`{name}`, {place}"
            rows.append(
                [
                    shown,
                    f"{side['nfe'] / 1000:.1f}k",
                    f"{side['iterations']:.0f}",
                    f"{side['seconds']:.0f} s",
                    " ".join(f"{value:.3f}" for value in found["each_seed"]),
                    f"{gain['mean']:+.3f}" if gain else "",
                    f"{gain['low']:+.3f} to {gain['high']:+.3f}" if gain else "",
                ]
            )
    return rows


def main() -> None:
    """Fills every part."""
    found = committed(EVIDENCE)
    for part, names in PARTS.items():
        if rows := pair_rows(found["pairs"], names):
            fill(PAGE, f"2026_{part}", table(PAIR_HEAD, rows, right=3))
    commits = dict.fromkeys(commit for side in found["sides"].values() for commit in side["commits"])
    added = "".join(
        f"\n\nPart {', '.join(one['parts'])}, seeds {', '.join(map(str, one['seeds']))}: {one['date']}, "
        f"commit {one['commit']}, {one['machine']}.\n\n"
        f"```\n{one['command']}\n```"
        for one in found.get("added", ())
    )
    settings = "\n".join(f"{name}: {side['settings']}" for name, side in found["sides"].items())
    fill(PAGE, "2026_sides", table(SIDE_HEAD, side_rows(found["sides"])))
    fill(
        PAGE,
        "2026_made",
        f"{found['date']}, commit {found['commit']}, {found['machine']}, one training at a time, beside other work. "
        f"The trainings are those of commits {', '.join(commits)}; the first of them made the two halves.\n\n"
        f"```\n{found['command']}\n```{added}\n\nAll have `{found['common']}`, and:\n\n```\n{settings}\n```",
    )


if __name__ == "__main__":
    main()
