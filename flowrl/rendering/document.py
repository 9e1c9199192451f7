"""The frame of every page: one self-contained HTML document."""

from __future__ import annotations

import re
from pathlib import Path

from flowrl.rendering.markup import esc

CSS = (Path(__file__).parent / "style.css").read_text(encoding="utf-8")
LIGHT, DARK = re.findall(r":root\{(?:color-scheme:light dark;)?([^}]*)\}", CSS)
"""The two palettes, for the documentation site."""
# The page may load nothing, from nowhere: what it shows is inside it.
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
MEDIA_POLICY = f"{POLICY}; media-src data: 'self' file:"  # and clips beside it, whether it is served or opened


def document(title: str, body: str, *, footer: str, lead: str = "", policy: str = POLICY) -> str:
    """A whole page: `title` is text, of the window and above the page; `lead` the HTML below it, `body` of the main
    part, `footer` of the last line; `policy` says what the page may load."""
    below = f"<p>{lead}</p>" if lead else ""
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        f'<meta name="color-scheme" content="light dark"><title>{esc(title)}</title><style>{CSS}</style></head>'
        f"<body><header><h1>{esc(title)}</h1>{below}</header><main>{body}</main>"
        f"<footer><p>{footer}</p></footer></body></html>\n"
    )
