"""Images inside a page: as data addresses, and in tables of the same prompts."""

from __future__ import annotations

import base64
import io
import os
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote

from flowrl.media.reading import read_rgb
from flowrl.rendering.markup import DASH, esc

SMALL = 128  # up to this side an image is embedded as it is and its pixels are shown as squares
MAX_EMBEDDED = 3_000_000  # bytes of clips that go into the page; beyond that all are linked
LARGE = 448  # longer sides are reduced to this: twice the size at which they are shown


def image_element(path: Path, words: str, large: int = LARGE) -> str:
    """The element of an image embedded in the page, its longer side at most `large`, with `words` for readers who
    cannot see it; empty if the file cannot be read."""
    try:
        image = read_rgb(path)
    except ValueError:  # missing, cut off while being written, or not an image
        return ""
    small = max(image.size) <= SMALL
    image.thumbnail((large, large))
    buffer = io.BytesIO()
    if small:
        image.save(buffer, format="PNG", optimize=True)
    else:
        image.save(buffer, format="JPEG", quality=88)
    source = data_address(buffer.getvalue(), f"image/{'png' if small else 'jpeg'}")
    style = ' class="pixels"' if small else ""
    return f'<img{style} src="{source}" alt="{esc(words)}">'


def image_table(head: Sequence[str], rows: Sequence[tuple[str, Sequence[str]]]) -> str:
    """Images in named rows; `head` names the columns. Cells are HTML, a dash if empty."""
    if not head or not rows:
        return ""
    top = "".join(f"<th scope=col>{esc(name)}</th>" for name in ("", *head))
    body = "".join(
        f"<tr><th scope=row>{esc(name)}</th>{''.join(f'<td>{cell or DASH}</td>' for cell in cells)}</tr>"
        for name, cells in rows
    )
    return (
        f'<div class="scroll shots" role="region" aria-label="Images" tabindex="0"><table><thead><tr>{top}'
        f"</tr></thead><tbody>{body}</tbody></table></div>"
    )


def data_address(content: bytes, kind: str) -> str:
    """Bytes as an address that loads nothing."""
    return f"data:{kind};base64,{base64.b64encode(content).decode('ascii')}"


def clip_addresses(clips: Sequence[Path], home: Path) -> dict[Path, str]:
    """What a page in the folder `home` writes for every clip, as HTML has it: all inside the page, or all as links."""
    if sum(clip.stat().st_size for clip in clips) <= MAX_EMBEDDED:
        return {clip: data_address(clip.read_bytes(), "video/mp4") for clip in clips}
    return {clip: esc(quote(Path(os.path.relpath(clip.resolve(), home.resolve())).as_posix())) for clip in clips}
