"""The style sheet. Palette: Okabe and Ito's colours, told apart with any colour vision; lighter ones on a dark page."""

from __future__ import annotations

from pathlib import Path

LIGHT = """
--ink:#1a222c;--muted:#566170;--paper:#f5f6f8;--card:#fff;--edge:#dde2e8;--grid:#e6e9ee;--code:#f0f2f5;
--good:#00674a;--bad:#a33c00;--on1:#fff;--on5:#111;
--p1:#0072b2;--p2:#d55e00;--p3:#009e73;--p4:#e69f00;--p5:#56b4e9;--p6:#cc79a7;
"""
DARK = """
--ink:#e8ecf1;--muted:#a3aebb;--paper:#12161b;--card:#1b2128;--edge:#303943;--grid:#2b333c;--code:#151a20;
--good:#4fd1a5;--bad:#ff9d5c;--on1:#111;--on5:#fff;
--p1:#56b4e9;--p2:#f28c38;--p3:#2bc79a;--p4:#f0c14b;--p5:#2f7fc1;--p6:#dd9cc0;
"""
CSS = f":root{{color-scheme:light dark;{LIGHT}}}@media screen and (prefers-color-scheme:dark){{:root{{{DARK}}}}}\n" + (
    Path(__file__).parent / "style.css"
).read_text(encoding="utf-8")
