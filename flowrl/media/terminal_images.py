"""Shows a line of small images beside the progress, on terminals that support it and in notebooks.

The environment tells what a terminal can show, because asking the terminal would mean reading your keyboard.
FLOWRL_IMAGES = kitty, sixel or none decides it. tmux and screen would swallow images, so nothing is shown there.
"""

from __future__ import annotations

import base64
import io
import os
import sys
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Literal, cast

import numpy as np
from PIL import Image

from flowrl.media.reading import as_rgb
from flowrl.runtime.progress import draw_above, notebook_display, show_below

Protocol = Literal["kitty", "sixel", "notebook", "none"]

ROWS = 5
"""Rows of text that a line of images takes: 72 pixels in rows of 15 and more."""
HEIGHT = 72
"""Pixels of a line of images."""

_PIECE = 4096  # characters of one escape sequence, which is what kitty's protocol allows
_COLORS = 128  # of a sixel image
_KITTY = {"TERM": ("xterm-kitty", "xterm-ghostty"), "TERM_PROGRAM": ("ghostty", "WezTerm")}
_SIXEL = {"TERM": ("foot", "foot-extra", "mlterm", "contour", "yaft-256color"), "TERM_PROGRAM": ("mintty", "iTerm.app")}


def protocol_here() -> Protocol:
    """How images are shown beside the progress of this process. Raises as `protocol_of`."""
    if sys.stderr.isatty():
        return protocol_of()
    return "none" if notebook_display() is None else "notebook"


def show(images: Sequence[Image.Image], width: int, protocol: Protocol) -> None:
    """Shows a line of images beside the progress."""
    line = line_of(images, width)
    if protocol == "notebook":
        data = base64.b64encode(_png(line)).decode("ascii")
        show_below(f'<img src="data:image/png;base64,{data}" alt="the newest images">')
    elif protocol != "none":
        draw_above(ROWS, escape(line, protocol))


def protocol_of(environment: Mapping[str, str] = os.environ) -> Protocol:
    """The image protocol of an environment's terminal. Raises ValueError: FLOWRL_IMAGES is none of the three words."""
    asked = environment.get("FLOWRL_IMAGES")
    if asked is not None:
        if asked not in ("kitty", "sixel", "none"):
            raise ValueError(
                f"FLOWRL_IMAGES={asked!r} must be kitty, sixel or none: set it to one of them, or unset it"
            )
        return cast(Protocol, asked)
    term = environment.get("TERM", "")
    if "TMUX" in environment or term.startswith(("screen", "tmux")):
        return "none"
    if "KITTY_WINDOW_ID" in environment or "KONSOLE_VERSION" in environment or _named(environment, _KITTY):
        return "kitty"
    return "sixel" if "sixel" in term or _named(environment, _SIXEL) else "none"


def _named(environment: Mapping[str, str], names: Mapping[str, Sequence[str]]) -> bool:
    return any(environment.get(variable) in known for variable, known in names.items())


def line_of(images: Sequence[Image.Image], width: int) -> Image.Image:
    """Images side by side, each `HEIGHT` pixels high, as many as fit into `width` pixels."""
    small = [
        image.resize((max(1, round(image.width * HEIGHT / image.height)), HEIGHT), Image.Resampling.BOX)
        for image in images
    ]
    canvas = Image.new("RGB", (width, HEIGHT), (255, 255, 255))
    left = 0
    for image in small:
        if left + image.width > width:
            break
        canvas.paste(image, (left, 0))
        left += image.width + 4
    return canvas.crop((0, 0, max(1, left - 4), HEIGHT))


def escape(image: Image.Image, protocol: Protocol) -> str:
    """The escape sequence that draws an image and leaves the cursor where it was; "" for none."""
    if protocol != "kitty":
        return f"\x1b7{_sixel(image)}\x1b8" if protocol == "sixel" else ""
    # A PNG in base64, in pieces; C=1 leaves the cursor, q=2 asks for no answer.
    text = base64.standard_b64encode(_png(image)).decode("ascii")
    pieces = [text[start : start + _PIECE] for start in range(0, len(text), _PIECE)]
    last = len(pieces) - 1
    return "".join(
        f"\x1b_G{'' if number else 'a=T,f=100,C=1,q=2,'}m={int(number < last)};{piece}\x1b\\"
        for number, piece in enumerate(pieces)
    )


def _png(image: Image.Image) -> bytes:
    stream = io.BytesIO()
    image.save(stream, format="PNG")
    return stream.getvalue()


def _sixel(image: Image.Image) -> str:
    """The colours of a palette in hundredths, then bands of six rows, in each the colours one over the other."""
    paletted = as_rgb(image).quantize(_COLORS, dither=Image.Dither.NONE)
    colors = np.asarray(paletted.getpalette()).reshape(-1, 3)
    pixels = np.asarray(paletted)
    text = [f'\x1bPq"1;1;{image.width};{image.height}']
    for number in np.unique(pixels):
        red, green, blue = (round(int(level) * 100 / 255) for level in colors[number])
        text.append(f"#{number};2;{red};{green};{blue}")
    for top in range(0, image.height, 6):
        band = pixels[top : top + 6]
        bits = 1 << np.arange(len(band))[:, None]
        rows = []
        for number in np.unique(band):
            codes = ((band == number) * bits).sum(axis=0)
            runs = [(chr(63 + code), len(list(same))) for code, same in groupby(codes.tolist())]
            shown = [f"!{count}{sign}" if count > 3 else sign * count for sign, count in runs]
            rows.append(f"#{number}" + "".join(shown))
        text.append("$".join(rows) + "-")
    return "".join(text) + "\x1b\\"
