"""Charts: ticks, smoothing, and where values land on the drawing."""

from __future__ import annotations

import math
import re
from xml.etree import ElementTree

import numpy as np
import pytest

from flowrl.rendering.bars import Mark, forest, forest_of_two, stacked_bar
from flowrl.rendering.charts import MAX_POINTS, Series, line_chart, nice_ticks, smooth, thin
from flowrl.rendering.dots import Dot, log_ticks, scatter
from flowrl.rendering.markup import number, settled
from flowrl.statistics.bootstrap import Interval, point

WHOLE = Interval(mean=0.5, low=0.25, high=0.75)


def drawings(html: str) -> list[ElementTree.Element]:
    """The drawings of a chart, for desktop and phone."""
    return [ElementTree.fromstring(found) for found in re.findall(r"<svg.*?</svg>", html, re.S)]


def circles(html: str, style: str) -> list[tuple[float, float]]:
    """Centres of the dots of a style on the desktop's drawing."""
    return [(float(dot.attrib["cx"]), float(dot.attrib["cy"])) for dot in drawings(html)[0].iter("circle")
            if style in dot.attrib["class"].split()]  # fmt: skip


def texts(html: str, drawing: int = 0) -> list[str]:
    return ["".join(text.itertext()) for text in drawings(html)[drawing].iter("text")]


@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (-3.2, 7.9), (1e-5, 3e-5), (0.5, 0.5), (0.0, 0.0), (1e6, 3e6)])
def test_ticks_cover_the_range_evenly(low: float, high: float) -> None:
    ticks = np.array(nice_ticks(low, high, 5))
    assert ticks[0] <= low <= high <= ticks[-1]
    assert 2 <= len(ticks) <= 8
    np.testing.assert_allclose(np.diff(ticks), ticks[1] - ticks[0], rtol=1e-6)


def test_smoothing_keeps_constants_and_averages_noise() -> None:
    ones, error = smooth(np.ones(50), np.full(50, 0.3))
    np.testing.assert_allclose(ones, 1.0)
    assert (error < 0.3).all()
    noise = np.random.default_rng(0).normal(size=400)
    line, error = smooth(noise, np.ones(400))
    assert float(np.abs(line / error).mean()) == pytest.approx(np.sqrt(2 / np.pi), rel=0.25)
    assert len(thin(np.arange(1000.0))) == MAX_POINTS
    np.testing.assert_allclose(thin(np.arange(2.0 * MAX_POINTS)), np.arange(MAX_POINTS) * 2 + 0.5)


def test_a_single_iteration_is_the_only_tick() -> None:
    series = Series(label="reward", x=np.zeros(1), y=np.ones(1))
    html = line_chart([series], x_label="iteration", y_label="reward", description="")
    assert texts(html)[-3:] == ["0", "iteration", "reward"]
    assert "\u22121" not in texts(html)


@pytest.mark.parametrize(
    ("low", "high", "wanted"),
    [(0.0, 2.0, [1, 2, 5, 10, 20, 50, 100]), (-4.0, 0.5, [1e-4, 1e-3, 1e-2, 0.1, 1]), (1.31, 1.62, [30, 40])],
)
def test_ticks_of_a_logarithm_are_round_values(low: float, high: float, wanted: list[float]) -> None:
    assert [10**tick for tick in log_ticks(low, high)] == pytest.approx(wanted)


def test_rows_lie_on_one_axis_with_their_intervals() -> None:
    rows = [("better", [Mark(interval=WHOLE)]), ("<unknown>", [Mark(interval=point(0.0))])]
    html = forest(rows, x_label="change", description="changes", sign=True, words=True)
    (right, upper), (left, lower) = circles(html, "dot")
    assert left < right
    assert upper < lower
    whisker = next(path for path in drawings(html)[0].iter("path") if "whisker" in path.attrib["class"])
    low, high = (float(x) for x in re.findall(r"[MH]([0-9.]+)", whisker.attrib["d"]))
    assert right == pytest.approx((low + high) / 2, abs=0.1)
    assert right - left == pytest.approx(high - low, abs=0.2)  # 0.5 from 0, and 0.5 wide
    assert "+0.500 (+0.250 to +0.750)" in texts(html)
    assert "+0.500 (+0.250 to +0.750)" not in texts(html, 1), "the phone has no room"
    assert "<unknown>" in texts(html)
    assert forest([], x_label="", description="") == ""


def test_two_marks_of_a_row_are_joined_and_explained() -> None:
    html = forest_of_two(
        {"two_object": point(0.2)}, {"two_object": WHOLE}, ("base", "mine"), x_label="", description=""
    )
    assert len(circles(html, "ring")) == len(circles(html, "dot")) == 1
    assert "two object base: 0.200" in html
    assert "two object mine: 0.500 (95 % 0.250 to 0.750)" in html
    assert ">base</li>" in html
    assert "change" in html


def test_points_are_joined_within_their_line_and_labelled_without_overlap() -> None:
    points = [Dot(x=point(x), y=WHOLE, label=f"at {x:g}", line=x < 50) for x in (1.0, 10.0, 100.0)]
    html = scatter(points, x_label="cost", y_label="score", description="score over cost", log=True)
    (first, _), (second, _), (third, _) = circles(html, "dot")
    assert second - first == pytest.approx(third - second, abs=0.2), "powers of ten are equally far apart"
    lines = [path for path in drawings(html)[0].iter("path") if "line" in path.attrib["class"].split()]
    assert len(lines) == 1, "a line of one point is no line"
    assert {"at 1", "at 10", "at 100"} <= set(texts(html))
    crowded = scatter([*points[:1]] * 30, x_label="", y_label="", description="")
    assert 1 <= sum(text == "at 1" for text in texts(crowded)) <= 6


def test_equal_axes_have_equal_scales() -> None:
    points = [Dot(x=point(x), y=point(y), shape="raw") for x, y in ((0.0, 0.0), (1.0, 1.0), (0.2, 0.4))]
    html = scatter(points, x_label="first", y_label="second", description="", same=True)
    (x0, y0), (x1, y1), (x, y) = circles(html, "raw")
    assert (x - x0) / (x1 - x0) == pytest.approx(0.2, abs=0.01)
    assert (y - y0) / (y1 - y0) == pytest.approx(0.4, abs=0.01)


def test_shares_fill_the_bar() -> None:
    bars = list(drawings(stacked_bar([("a", 30.0), ("b", 10.0)], description=""))[0].iter("rect"))
    first, second = (float(bar.attrib["width"]) + 1.5 for bar in bars)
    assert first / second == pytest.approx(3)
    assert math.isclose(first + second, 540, abs_tol=0.2)


@pytest.mark.parametrize("value", [math.nextafter(0.2125, 0), 0.2125, 0.85 - 0.6375, math.nextafter(0.2125, 1)])
def test_a_difference_is_rounded_without_the_digits_that_sums_leave(value: float) -> None:
    """Pages and terminals show one number for a half that floating point misses on either side."""
    assert settled(value) == 0.2125
    assert number(value) == f"{settled(value):.3f}" == f"{0.2125:.3f}"
