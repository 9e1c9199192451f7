"""Charts as inline SVG: frames and axes, legends, and lines with their bands.

Colours are style-sheet variables: one drawing serves the light, dark and printed page. Every chart is drawn at a
desktop and at a phone width, and the style sheet shows one: text has the same size on both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from flowrl.rendering.markup import MINUS, esc, estimate, number
from flowrl.runtime.shapes import Float
from flowrl.statistics.bootstrap import Interval

WIDE, WIDER, NARROW = 540, 720, 330  # drawing widths in CSS pixels: half a page, a single card, a phone
MAX_POINTS = 400  # more points than this are averaged in runs of neighbours: eye and file gain nothing from them
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
    """Where data values land on the drawing; a logarithmic x has ticks and range in powers of ten."""

    width: int
    height: int
    left: int
    x_ticks: tuple[float, ...]
    y_ticks: tuple[float, ...]
    x_range: tuple[float, float]
    log: bool = False
    top: int = 10
    right: int = 14
    bottom: int = 40

    def x(self, value: float) -> float:
        """Pixel column of a data value."""
        low, high = self.x_range
        place = math.log10(value) if self.log else value
        return self.left + (place - low) / (high - low) * (self.width - self.left - self.right)

    def y(self, value: float) -> float:
        """Pixel row of a data value."""
        low, high = self.y_ticks[0], self.y_ticks[-1]
        return self.top + (high - value) / (high - low) * (self.height - self.top - self.bottom)


def responsive(draw: Callable[[int], str], wide: int = WIDE) -> str:
    """The drawing for desktop and phone; the style sheet shows one."""
    return f'<div class="wide">{draw(wide)}</div><div class="narrow">{draw(NARROW)}</div>'


def nice_ticks(low: float, high: float, count: int) -> tuple[float, ...]:
    """Round numbers (1, 2 or 5 times a power of ten apart) that cover low to high in about `count` steps."""
    if high - low <= 1e-9 * max(abs(low), abs(high)):  # a constant, up to rounding, is drawn in the middle
        pad = abs(low) * 0.1
        low, high = (low - pad, high + pad) if pad else (0.0, 0.1)  # most of what stays 0 is a share
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
    """Gaussian moving average (standard deviation n/20, none below 8 points) and its standard error, the root of the
    sum of weight² · error² of independent values; no errors (m = 0) skip it."""
    count = len(values)
    if count < 8:
        return values, error
    index = np.arange(count)
    weight = np.exp(-0.5 * ((index[:, None] - index) / max(1.5, count / 20)) ** 2)
    weight /= weight.sum(axis=1, keepdims=True)
    return weight @ values, np.sqrt(weight**2 @ error**2) if len(error) else error


def smooth_series(label: str, x: Values, y: Values, *, color: int) -> Series:
    """The moving average of a curve, with its values behind it."""
    thin_x, thin_y = thin(x), thin(y)
    return Series(label=label, x=thin_x, y=smooth(thin_y, y[:0])[0], raw_x=thin_x, raw_y=thin_y, color=color)


def line_chart(
    series: Sequence[Series], *, x_label: str, y_label: str, description: str, height: int = 270,
    x_name: str = "iteration",
) -> str:  # fmt: skip
    """Lines with bands, for desktop and phone; hovering a point names its value, and its x as `x_name`."""
    return responsive(lambda width: draw_lines(series, width, height, x_label, y_label, description, x_name))


def draw_lines(
    series: Sequence[Series], width: int, height: int, x_label: str, y_label: str, description: str,
    x_name: str = "iteration",
) -> str:  # fmt: skip
    """As `line_chart`, at one width."""
    x = np.concatenate([values for line in series for values in (line.x, line.raw_x)])
    y = np.concatenate([values for line in series for values in (line.y, line.low, line.high, line.raw_y)])
    low, high = float(x.min()), float(x.max())
    ticks: Sequence[float] = [low]
    if low == high:
        low, high = low - 1, high + 1
    else:
        ticks = [tick for tick in nice_ticks(low, high, 6 if width > 400 else 4) if float(tick).is_integer()]
    frame = frame_of(width, height, ticks, (low, high), nice_ticks(*finite_ends(y), 4 if height < 160 else 5))
    parts = [draw_axes(frame, x_label, y_label)]
    for line in series:
        known = np.isfinite(line.low) & np.isfinite(line.high) if len(line.low) else np.zeros(0, dtype=bool)
        if known.sum() > 1:
            x, ends = line.x[known], (line.low[known], line.high[known])
            band = f"M{_path(frame, x, ends[1])}L{_path(frame, x[::-1], ends[0][::-1])}Z"
            parts.append(f'<path class="band c{line.color}" d="{band}"/>')
        for at, value in zip(line.raw_x.tolist(), line.raw_y.tolist(), strict=True):
            title = f"{tick_text(float(round(at)))}: {number(value)}"
            parts.append(dot(frame.x(at), frame.y(value), title, line.color, "raw"))
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
    return f'<ul class="legend">{items}</ul>' if items else ""


def tick_text(value: float) -> str:
    """A tick's number in as few characters as it needs."""
    text = f"{value:.6g}".replace("e-0", "e-").replace("e+0", "e")
    return text.replace("-", MINUS) if len(text) <= 7 else number(value, 2)


def dot(x: float, y: float, title: str, color: int, shape: str = "dot") -> str:
    """A dot, ring or small faint dot at a place of the drawing."""
    end = f"><title>{esc(title)}</title></circle>" if title else "/>"
    return f'<circle class="{shape} c{color}" cx="{x:.1f}" cy="{y:.1f}" r="{2.5 if shape == "raw" else 5}"{end}'


def ends_of(intervals: Iterable[Interval], *more: float) -> tuple[float, float]:
    """The smallest and the largest of means, known bounds and further values."""
    return finite_ends(np.array([*(value for part in intervals for value in (part.low, part.mean, part.high)), *more]))


def finite_ends(values: Values) -> tuple[float, float]:
    """The smallest and the largest of those that are known."""
    known = values[np.isfinite(values)]
    return float(known.min()), float(known.max())


def frame_of(
    width: int, height: int, x_ticks: Sequence[float], x_range: tuple[float, float], y_ticks: tuple[float, ...], *,
    log: bool = False,
) -> Frame:  # fmt: skip
    """A frame with room for the numbers of its y axis."""
    low, high = x_range
    return Frame(
        width=width,
        height=height,
        left=34 + 7 * max(len(tick_text(tick)) for tick in y_ticks),
        x_ticks=tuple(tick for tick in x_ticks if low - 1e-9 <= tick <= high + 1e-9),
        y_ticks=y_ticks,
        x_range=x_range,
        log=log,
    )


def draw_axes(frame: Frame, x_label: str, y_label: str) -> str:
    """Grid lines, ticks and labels."""
    right, bottom = frame.width - frame.right, frame.height - frame.bottom
    parts = []
    for tick in frame.y_ticks:
        y = frame.y(tick)
        parts.append(f'<path class="grid" d="M{frame.left} {y:.1f}H{right}"/>')
        parts.append(f'<text class="tick end" x="{frame.left - 7}" y="{y + 4:.1f}">{tick_text(tick)}</text>')
    for tick in frame.x_ticks:
        value = float(f"{10**tick:.3g}") if frame.log else tick
        x = frame.x(10**tick if frame.log else tick)
        parts.append(f'<path class="axis" d="M{x:.1f} {bottom}v4"/>')
        parts.append(f'<text class="tick mid" x="{x:.1f}" y="{bottom + 17}">{tick_text(value)}</text>')
    parts.append(f'<path class="axis" d="M{frame.left} {bottom}H{right}"/>')
    middle = (frame.top + bottom) / 2
    parts.append(
        f'<text class="label mid" x="{(frame.left + right) / 2:.1f}" y="{frame.height - 5}">{esc(x_label)}</text>'
    )
    parts.append(f'<text class="label mid" transform="translate(12 {middle:.1f}) rotate(-90)">{esc(y_label)}</text>')
    return "".join(parts)


def _path(frame: Frame, x: Values, y: Values) -> str:
    return "L".join(f"{frame.x(a):.1f} {frame.y(b):.1f}" for a, b in zip(x, y, strict=True))


def _line(frame: Frame, line: Series, x_name: str) -> str:
    style = " dashed" if line.dashed else ""
    path = f'<path class="line c{line.color}{style}" d="M{_path(frame, line.x, line.y)}"/>'
    parts = [path] if len(line.x) > 1 else []
    if line.markers or len(line.x) == 1:
        low, high = (ends if len(ends) else np.full(len(line.x), math.nan) for ends in (line.low, line.high))
        for x, *ends in zip(line.x.tolist(), line.y.tolist(), low.tolist(), high.tolist(), strict=True):
            y = Interval(mean=ends[0], low=ends[1], high=ends[2])
            if y.known:
                up = f"M{frame.x(x):.1f} {frame.y(y.low):.1f}V{frame.y(y.high):.1f}"
                parts.append(f'<path class="whisker c{line.color}" d="{up}"/>')
            title = f"{line.label}, {x_name} {tick_text(x)}: {estimate(y)}"
            parts.append(dot(frame.x(x), frame.y(y.mean), title, line.color))
    return "".join(parts)
