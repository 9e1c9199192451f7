"""What is sent to a terminal draws the image: decoded here by the rules of the two protocols."""

from __future__ import annotations

import base64
import io
import re

import numpy as np
import pytest
from PIL import Image
from rich.console import Console

from flowrl.media.terminal_images import HEIGHT, escape, line_of, protocol_of
from flowrl.runtime import progress


def image_of(width: int = 70, height: int = 20, colors: int = 5) -> Image.Image:
    levels = np.random.default_rng(0).integers(0, 6, (colors, 3)) * 51  # whole hundredths, which sixels round to
    return Image.fromarray(levels[np.arange(width * height).reshape(height, width) // 9 % colors].astype(np.uint8))


def shown_by_sixels(text: str) -> np.ndarray:
    """What a terminal would draw of one sixel image."""
    found = re.fullmatch(r'\x1b7\x1bPq"1;1;(\d+);(\d+)(.*)\x1b\\\x1b8', text, re.DOTALL)
    assert found is not None
    width, height = int(found[1]), int(found[2])
    canvas = np.zeros((height + 6, width, 3))
    palette: dict[str, np.ndarray] = {}
    color, x, top = "", 0, 0
    for part in re.finditer(r"#(\d+)(?:;2;(\d+);(\d+);(\d+))?|!(\d+)([?-~])|([?-~])|(\$)|(-)", found[3]):
        if part[2] is not None:
            palette[part[1]] = np.asarray([int(level) * 2.55 for level in part.group(2, 3, 4)])
        elif part[1] is not None:
            color = part[1]
        elif part[8] or part[9]:
            x, top = 0, top + 6 * bool(part[9])
        else:
            count, code = int(part[5] or 1), ord(part[6] or part[7]) - 63
            for row in range(6):
                if code >> row & 1:
                    canvas[top + row, x : x + count] = palette[color]
            x += count
    return canvas[:height].round().astype(np.uint8)


def test_sixels_draw_the_image() -> None:
    image = image_of()
    assert np.abs(shown_by_sixels(escape(image, "sixel")).astype(int) - np.asarray(image)).max() <= 1


def test_kitty_is_sent_the_image_in_pieces_that_leave_the_cursor() -> None:
    noise = np.random.default_rng(0).integers(0, 256, (HEIGHT, 200, 3), dtype=np.uint8)
    pieces = re.findall(r"\x1b_G([^;]*);([^\x1b]*)\x1b\\", escape(Image.fromarray(noise), "kitty"))
    assert len(pieces) > 2
    assert all(len(text) <= 4096 for _, text in pieces)
    assert pieces[0][0] == "a=T,f=100,C=1,q=2,m=1"
    assert [keys for keys, _ in pieces[1:]] == ["m=1"] * (len(pieces) - 2) + ["m=0"]
    with Image.open(io.BytesIO(base64.standard_b64decode("".join(text for _, text in pieces)))) as sent:
        assert np.array_equal(np.asarray(sent), noise)
    assert escape(image_of(), "none") == ""


def test_a_line_holds_as_many_as_fit() -> None:
    images = [image_of(40, 40), image_of(80, 40), image_of(40, 40)]
    assert line_of(images, 400).size == (HEIGHT * 4 + 8, HEIGHT)
    assert line_of(images, HEIGHT * 3 + 4).size == (HEIGHT * 3 + 4, HEIGHT)


@pytest.mark.parametrize(
    ("environment", "wanted"),
    [
        ({}, "none"),
        ({"TERM": "xterm-256color"}, "none"),
        ({"TERM": "xterm-kitty"}, "kitty"),
        ({"TERM": "xterm-256color", "TERM_PROGRAM": "WezTerm"}, "kitty"),
        ({"TERM": "foot"}, "sixel"),
        ({"TERM": "xterm-kitty", "TMUX": "/tmp/tmux"}, "none"),
        ({"TERM": "screen", "KITTY_WINDOW_ID": "1"}, "none"),
        ({"TERM": "foot", "FLOWRL_IMAGES": "none"}, "none"),
        ({"FLOWRL_IMAGES": "sixel"}, "sixel"),
    ],
)
def test_the_environment_says_what_a_terminal_can(environment: dict[str, str], wanted: str) -> None:
    assert protocol_of(environment) == wanted


def test_another_word_is_refused() -> None:
    with pytest.raises(ValueError, match="must be kitty, sixel or none"):
        protocol_of({"FLOWRL_IMAGES": "yes"})


def test_images_are_drawn_above_the_bar_and_leave_the_cursor_below(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    terminal = Console(file=screen, force_terminal=True, width=80)
    monkeypatch.setattr(progress, "Console", lambda **_: terminal)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    progress.draw_above(2, "<before>")
    with progress.progress("training", 2) as advance:
        advance("")
        progress.draw_above(3, "<image>")
    progress.draw_above(2, "<after>")
    assert "\n\n\n\x1b[3A<image>\x1b[3B" in screen.getvalue()
    assert "<before>" not in screen.getvalue()
    assert "<after>" not in screen.getvalue()
