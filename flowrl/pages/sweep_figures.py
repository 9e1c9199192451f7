"""The figures of a sweep: settings with intervals along both axes, joined within a series; and the strip of images."""

from __future__ import annotations

from collections.abc import Sequence

from flowrl.comparing.sweep.sweep_result import SettingResult, Sweep
from flowrl.comparing.sweep.sweep_settings import Setting, StripRows
from flowrl.rendering.charts import legend, tick_text
from flowrl.rendering.dots import Dot, scatter
from flowrl.rendering.embedded_images import image_element, image_table
from flowrl.rendering.markup import estimate
from flowrl.statistics.bootstrap import Interval, point

COLORS = {"rlg": 1, "best_of": 2, "prune": 3, "run": 4}
NAMES = {"rlg": "RLG scales", "best_of": "best of N", "prune": "pruned, N@steps", "run": "other runs, as trained"}
SHAPES = {"rlg": "line", "best_of": "line", "prune": "dot", "run": "ring"}


def key(kinds: Sequence[str]) -> str:
    """The legend of the series that are there."""
    return legend([(NAMES[kind], COLORS[kind], SHAPES[kind]) for kind in NAMES if kind in kinds])


def against_diversity(results: Sweep, name: str) -> str:
    """A measure over diversity: scales joined in order, other runs beside them."""
    points = [_point(one, one.means[results.diversity], name, line="rlg") for one in results.of_kind("rlg", "run")]
    return _chart(points, f"{results.diversity} (right: more different images)", name)


def against_scale(results: Sweep, name: str) -> str:
    """A measure over the RLG scale."""
    points = [_point(one, point(one.setting.scale), name, line="rlg", label="") for one in results.of_kind("rlg")]
    return _chart(points, "RLG scale", name)


def against_cost(results: Sweep, name: str) -> str:
    """A measure over evaluations of the network: RLG, best of N and pruning; the best of several N is joined."""
    found = results.of_kind("rlg", "best_of", "prune")
    points = [_point(one, point(one.evaluations), name, line="best_of") for one in found]
    return _chart(points, "network evaluations per image (log)", name, log=True)


def short(setting: Setting) -> str:
    """A label that fits beside a dot."""
    if setting.kind == "rlg":
        return {0.0: "0 base", 1.0: "1 tuned"}.get(setting.scale, tick_text(setting.scale))
    if setting.kind == "run":
        return setting.run
    cuts = ",".join(str(step + 1) for step, _ in setting.plan.cuts)
    search = f"{setting.plan.num_candidates}{'@' if cuts else ''}{cuts}"
    return search if setting.scale == 1 else f"{search} of {tick_text(setting.scale)}"


def _point(one: SettingResult, x: Interval, name: str, *, line: str, label: str | None = None) -> Dot:
    """A setting on a chart; those of the kind `line` are joined, of best of N within a scale."""
    value, setting = one.means[name], one.setting
    return Dot(
        x=x,
        y=value,
        label=short(setting) if label is None else label,
        color=COLORS[setting.kind],
        shape="ring" if setting.kind == "run" else "dot",
        line=None if setting.kind != line else setting.scale if line == "best_of" else line,
        title=f"{setting.label}: {name} {estimate(value)}, {one.evaluations} evaluations",
    )


def _chart(points: Sequence[Dot], x_label: str, y_label: str, *, log: bool = False) -> str:
    return scatter(points, x_label=x_label, y_label=y_label, description=f"{y_label} against {x_label}", log=log)


def strip(rows: StripRows, kinds: Sequence[str]) -> str:
    """Images of one start noise per row, one setting per column."""
    cells = [
        (prompt, [(setting, path) for setting, path in found if setting.kind in kinds and path.is_file()])
        for prompt, found in rows
    ]
    table = [
        (prompt, [image_element(path, f"{setting.label}: {prompt}") for setting, path in found])
        for prompt, found in cells
    ]
    return image_table([setting.label for setting, _ in cells[-1][1]] if cells else [], table)
