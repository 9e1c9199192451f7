"""Line charts as inline SVG. Colours are style-sheet variables: one drawing serves the light, dark and printed page.

Every chart is drawn at a desktop and at a phone width, and the style sheet shows one: text has the same size on both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Float

from flowrl.html.markup import MINUS, esc, number

WIDE, NARROW = 540, 330  # drawing widths in CSS pixels: half a page and a phone
MAX_POINTS = (
    400  # more points than this are averaged in runs of neighbours: the eye and the file gain nothing from them
)
EMPTY = np.empty(0)

Values = Float[np.ndarray, " n"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Series:
    """One line: its points, and optionally a band around it and the raw values behind it."""

    label: str
    x: Values
    y: Values
    low: Values = field(default_factory=lambda: EMPTY)
    high: Values = field(default_factory=lambda: EMPTY)
    raw_x: Values = field(default_factory=lambda: EMPTY)
    raw_y: Values = field(default_factory=lambda: EMPTY)
    color: int = 1  # 1 to 6, the palette of the style sheet
    dashed: bool = False
    markers: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Frame:
    """Where data values land on the drawing."""

    width: int
    height: int
    left: int
    x_ticks: tuple[float, ...]
    y_ticks: tuple[float, ...]
    x_range: tuple[float, float]
    y_range: tuple[float, float]
    top: int = 10
    right: int = 14
    bottom: int = 40

    def x(self, value: float) -> float:
        """Pixel column of a data value."""
        low, high = self.x_range
        return self.left + (value - low) / (high - low) * (self.width - self.left - self.right)

    def y(self, value: float) -> float:
        """Pixel row of a data value."""
        low, high = self.y_range
        return self.top + (high - value) / (high - low) * (self.height - self.top - self.bottom)


def responsive(draw: Callable[[int], str]) -> str:
    """The drawing for desktop and phone; the style sheet shows one."""
    return f'<div class="wide">{draw(WIDE)}</div><div class="narrow">{draw(NARROW)}</div>'


def nice_ticks(low: float, high: float, count: int) -> tuple[float, ...]:
    """Round numbers (1, 2 or 5 times a power of ten apart) that cover low to high in about `count` steps."""
    if high - low <= 1e-9 * max(abs(low), abs(high)):  # a constant, up to rounding, is drawn in the middle
        pad = abs(low) * 0.1 or 0.1
        low, high = low - pad, high + pad
    raw = (high - low) / max(count, 1)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= raw * 0.999)
    start, stop = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return tuple(float(f"{index * step:.10g}") for index in range(start, stop + 1))


def thin(values: Values) -> Values:
    """At most `MAX_POINTS` values: means of runs of neighbours."""
    if len(values) <= MAX_POINTS:
        return values
    return np.array([part.mean() for part in np.array_split(values, MAX_POINTS)])


def smooth(values: Values, error: Float[np.ndarray, " m"]) -> tuple[Values, Float[np.ndarray, " m"]]:
    """Gaussian moving average (standard deviation n/20, none below 8 points) and the standard error of that average.

    The error of a weighted mean of independent values is sqrt(sum of weight² · error²); pass none (m = 0) to skip it.
    """
    count = len(values)
    if count < 8:
        return values, error
    index = np.arange(count)
    weight = np.exp(-0.5 * ((index[:, None] - index) / max(1.5, count / 20)) ** 2)
    weight /= weight.sum(axis=1, keepdims=True)
    return weight @ values, np.sqrt(weight**2 @ error**2) if len(error) else error


def line_chart(
    series: Sequence[Series], *, width: int, height: int, x_label: str, y_label: str, description: str,
    x_name: str = "iteration",
) -> str:  # fmt: skip
    """A chart of lines with bands; hovering a point names its value, and its x as `x_name`."""
    frame = _frame(series, width, height)
    parts = [axes(frame, x_label, y_label)]
    for line in series:
        parts += [_band(frame, line), _raw(frame, line)]
    parts += [_line(frame, line, x_name) for line in series]
    return svg(width, height, description, "".join(parts))


def svg(width: int, height: int, description: str, body: str) -> str:
    """An SVG image with a text alternative."""
    return (
        f'<svg viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img" '
        f'aria-label="{esc(description)}">{body}</svg>'
    )


def legend(entries: Sequence[tuple[str, int, str]]) -> str:
    """A key: (label, colour, shape), with shape one of line, dash, band, dot, ring, box."""
    items = "".join(f'<li><i class="key {shape} c{color}"></i>{esc(label)}</li>' for label, color, shape in entries)
    return f'<ul class="legend">{items}</ul>'


def tick_text(value: float) -> str:
    """A tick's number in as few characters as it needs."""
    text = f"{value:.6g}".replace("e-0", "e-").replace("e+0", "e")
    return text.replace("-", MINUS) if len(text) <= 7 else number(value, 2)


def _frame(series: Sequence[Series], width: int, height: int) -> Frame:
    x = np.concatenate([values for line in series for values in (line.x, line.raw_x)])
    y = np.concatenate([values for line in series for values in (line.y, line.low, line.high, line.raw_y)])
    y = y[np.isfinite(y)]  # unknown bounds
    y_ticks = nice_ticks(float(y.min()), float(y.max()), 4 if height < 160 else 5)
    x_low, x_high = float(x.min()), float(x.max())
    if x_high == x_low:
        x_low, x_high = x_low - 1, x_high + 1
    ticks = nice_ticks(x_low, x_high, 6 if width > 400 else 4)
    x_ticks = tuple(tick for tick in ticks if x_low - 1e-9 <= tick <= x_high + 1e-9 and float(tick).is_integer())
    left = 18 + 7 * max(len(tick_text(tick)) for tick in y_ticks)
    return Frame(
        width=width,
        height=height,
        left=left + 16,
        x_ticks=x_ticks,
        y_ticks=y_ticks,
        x_range=(x_low, x_high),
        y_range=(y_ticks[0], y_ticks[-1]),
    )


def axes(frame: Frame, x_label: str, y_label: str, *, x_text: Callable[[float], str] = tick_text) -> str:
    """Grid lines, ticks and labels; `x_text` writes the ticks of x."""
    right, bottom = frame.width - frame.right, frame.height - frame.bottom
    parts = []
    for tick in frame.y_ticks:
        y = frame.y(tick)
        parts.append(f'<path class="grid" d="M{frame.left} {y:.1f}H{right}"/>')
        parts.append(f'<text class="tick end" x="{frame.left - 7}" y="{y + 4:.1f}">{tick_text(tick)}</text>')
    for tick in frame.x_ticks:
        x = frame.x(tick)
        parts.append(f'<path class="axis" d="M{x:.1f} {bottom}v4"/>')
        parts.append(f'<text class="tick mid" x="{x:.1f}" y="{bottom + 17}">{x_text(tick)}</text>')
    parts.append(f'<path class="axis" d="M{frame.left} {bottom}H{right}"/>')
    middle = (frame.top + bottom) / 2
    parts.append(
        f'<text class="label mid" x="{(frame.left + right) / 2:.1f}" y="{frame.height - 5}">{esc(x_label)}</text>'
    )
    parts.append(f'<text class="label mid" transform="translate(12 {middle:.1f}) rotate(-90)">{esc(y_label)}</text>')
    return "".join(parts)


def _path(frame: Frame, x: Values, y: Values) -> str:
    return "L".join(f"{frame.x(a):.1f} {frame.y(b):.1f}" for a, b in zip(x, y, strict=True))


def _band(frame: Frame, line: Series) -> str:
    known = np.isfinite(line.low) & np.isfinite(line.high) if len(line.low) else np.zeros(0, dtype=bool)
    if known.sum() < 2:
        return ""
    x, low, high = line.x[known], line.low[known], line.high[known]
    return f'<path class="band c{line.color}" d="M{_path(frame, x, high)}L{_path(frame, x[::-1], low[::-1])}Z"/>'


def _raw(frame: Frame, line: Series) -> str:
    return "".join(
        f'<circle class="raw c{line.color}" cx="{frame.x(a):.1f}" cy="{frame.y(b):.1f}" r="2.2">'
        f"<title>{tick_text(float(round(a)))}: {number(float(b))}</title></circle>"
        for a, b in zip(line.raw_x, line.raw_y, strict=True)
    )


def _line(frame: Frame, line: Series, x_name: str) -> str:
    style = " dashed" if line.dashed else ""
    parts = (
        [f'<path class="line c{line.color}{style}" d="M{_path(frame, line.x, line.y)}"/>'] if len(line.x) > 1 else []
    )
    if line.markers or len(line.x) == 1:
        for index, (a, b) in enumerate(zip(line.x, line.y, strict=True)):
            x, y, note = frame.x(a), frame.y(b), ""
            if len(line.low) and np.isfinite(line.low[index]) and np.isfinite(line.high[index]):
                low, high = float(line.low[index]), float(line.high[index])
                parts.append(
                    f'<path class="whisker c{line.color}" d="M{x:.1f} {frame.y(low):.1f}V{frame.y(high):.1f}"/>'
                )
                note = f" (95 % {number(low)} to {number(high)})"
            title = f"<title>{esc(line.label)}, {esc(x_name)} {tick_text(float(a))}: {number(float(b))}{note}</title>"
            parts.append(f'<circle class="dot c{line.color}" cx="{x:.1f}" cy="{y:.1f}" r="4">{title}</circle>')
    return "".join(parts)
