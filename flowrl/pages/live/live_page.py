"""The page: its frame, which the script fills, the list of runs and the list of commands."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from flowrl.rendering.document import document
from flowrl.rendering.markup import esc, plural
from flowrl.rewards.serving.own_page import POLICY

FOOTER = "Served by <code>flowrl watch</code> to this machine only. It reads run folders and changes nothing."
HEAD = ("Run", "State", "Iterations", "Reward", "Curve", "Per iteration", "Warnings")


def page() -> str:
    """The frame of the page."""
    body = (Path(__file__).parent / "frame.html").read_text(encoding="utf-8").removesuffix("\n")
    return document("flowrl watch", body, footer=FOOTER, policy=POLICY)


def list_of(rows: Sequence[str]) -> str:
    """The table of runs; rows are HTML."""
    if not rows:
        return (
            '<p class="muted">There is no run yet. It appears here when <code>flowrl train</code> has made its '
            "folder.</p>"
        )
    head = "".join(f'<th scope="col">{esc(text)}</th>' for text in HEAD)
    counted = plural(len(rows), "run")
    return f"<table><caption>{counted}</caption><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def command_list(commands: Sequence[tuple[str, str]]) -> str:
    """Commands with what they do, each with a button that copies it."""
    items = "".join(
        f'<div><dt>{esc(words)}</dt><dd><pre tabindex="0"><code>{esc(command)}</code></pre>'
        '<button type="button" class="copy">Copy</button></dd></div>'
        for words, command in commands
    )
    return f'<dl class="commands">{items}</dl>'
