"""The page of a sweep: one file that needs no network, light and dark."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from flowrl.comparing.measure import PIXELS as PIXEL_GRID
from flowrl.comparing.sweep.sweep_draw import FEATURES_TEXT
from flowrl.comparing.sweep.sweep_result import (
    FEATURES,
    PIXELS,
    SettingResult,
    Sweep,
    at_same_cost,
    differences,
    scale_text,
)
from flowrl.comparing.sweep.sweep_settings import Setting, StripRows
from flowrl.rendering.charts import legend, tick_text
from flowrl.rendering.document import document
from flowrl.rendering.dots import Dot, scatter
from flowrl.rendering.embedded_images import image_element, image_table
from flowrl.rendering.markup import DASH, MINUS, card, code, esc, estimate, notes_box, number, section, table
from flowrl.runtime.files import write_atomically
from flowrl.statistics.bootstrap import Interval, point
from flowrl.training.drift import KL_TEXT

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


def write_page(results: Sweep, *, rows: StripRows, facts: Mapping[str, str], command: str) -> None:
    """Writes `sweep.html` of a sweep's folder."""
    write_atomically(results.folder / "sweep.html", render(results, rows=rows, facts=facts, command=command))


def render(results: Sweep, *, rows: StripRows, facts: Mapping[str, str], command: str) -> str:
    """The whole page as HTML: all numbers, images of a few prompts, `facts` on how it was measured, by name, and the
    command or call ("" if unknown)."""
    title = f"RLG sweep of {facts['name']}"
    reading = (
        "RLG mixes the outputs of the base model and the tuned one at each step: scale 0 is the base model, 1 the "
        "tuned one, beyond 1 goes further in the direction of training, at the cost of both."
    )
    scales = results.of_kind("rlg")
    if len(scales) > 2:
        reading += (
            " The best of several scales is picked on these very images, so expect a little less of it on new ones."
        )
    over_scales = _charts(results, against_scale, _diversities(results)) if len(scales) > 1 else ""
    kinds = [one.setting.kind for one in results.of_kind("rlg", "run")]
    said = {key: text for key, text in facts.items() if key not in ("features", "name")}
    roles = {"target": "target, as the run's reward", "heldout": "held out"}
    said["scores"] = "; ".join(f"{measure.name}: {roles[measure.role]}" for measure in results.measures)
    if FEATURES in results.peak.columns:
        of = FEATURES_TEXT[facts["features"]]
        said[FEATURES] = f"mean of 1 \u2212 cosine over pairs of images of a prompt; features: {of}"
    averaged = f"images averaged to {PIXEL_GRID} x {PIXEL_GRID}"
    said[PIXELS] = f"root mean square difference of {averaged}, over pairs of a prompt"
    said["distance"] = f"{KL_TEXT}. At scale w it is w² times that at 1."
    items = "".join(f"<dt>{esc(name)}</dt><dd>{esc(text)}</dd>" for name, text in said.items())
    body = "".join([
        f'<p class="summary">{esc(results.sentence)}</p>',
        f'<p class="muted">{reading}</p>',
        notes_box(results.notes),
        section("quality", "Quality against diversity", _charts(results, against_diversity) + key(kinds),
                "Each dot is a scale, with 95 % intervals over prompts both ways. Up and right is better. The "
                "intervals are wide where prompts differ; differences between scales, which share prompts and start "
                "noise, are surer than they look here and stand in the tables."),
        section("scales", "Scores and diversity against the scale", over_scales),
        section("images", "The same start noise at every scale", strip(rows, ("rlg", "run")),
                "The first image of prompts spread evenly over the list, not picked."),
        _cost(results),
        section("searched", "What search kept", strip(rows, ("best_of", "prune")),
                "For the same prompts; the first candidate has the start noise of the images above."),
        _tables(results),
        section("measured", "How it was measured", f'{code(command)}<dl class="facts">{items}</dl>'),
    ])  # fmt: skip
    lead = f"{esc(facts['images'])} · {esc(facts['sampling'])}"
    footer = "Written by <code>flowrl sweep</code> from the journals of its folder."
    return document(title, body, lead=lead, footer=footer)


def _charts(results: Sweep, draw: Callable[[Sweep, str], str], more: Sequence[str] = ()) -> str:
    """Charts of the target, the judge and more columns, two beside each other."""
    roles = {measure.name: "target" if measure.role == "target" else "held out" for measure in results.measures}
    names = [*dict.fromkeys((results.target.name, results.judge.name)), *more]
    titles = {name: f"{name}, {roles[name]}" if name in roles else name for name in names}
    charts = "".join(card(draw(results, name), title=esc(title)) for name, title in titles.items())
    return f'<div class="two">{charts}</div>'


def _cost(results: Sweep) -> str:
    searches = results.of_kind("best_of", "prune")
    if not searches:
        return ""
    found = at_same_cost(results)
    if found is None:
        below = '<p class="muted">No search costs as much as RLG; best of 2 does where both models are guided.</p>'
    else:
        reference, others = found
        names = [*_measure_names(results), results.diversity]
        rows = [[esc(reference.setting.label), _spent(reference), *(_cell(results, reference, name) for name in names)]]
        for one in others:
            change = differences(one, reference)
            means = {name: number(one.means[name].mean, results.digits(name)) for name in names}
            cells = [f"{mean}<small>{_difference(results, change, name)}</small>" for name, mean in means.items()]
            rows.append([esc(one.setting.label), _spent(one), *cells])
        head = ["Setting", "Evaluations", *map(esc, names)]
        below = (
            f'<p class="muted">At the cost of RLG: its best {esc(scale_text(reference))} by {esc(results.judge.name)}, '
            f"and below it the difference of each search to it.</p>{table('At equal cost', head, rows)}"
        )
    kinds = [one.setting.kind for one in (*results.of_kind("rlg"), *searches)]
    return section(
        "cost",
        "RLG beside search, at equal cost",
        _charts(results, against_cost) + key(kinds) + below,
        "Dots above one another cost the same. A search also decodes and scores every image it looks at, which the "
        "evaluations of the network do not count; the table does.",
    )


def _tables(results: Sweep) -> str:
    names = [*_measure_names(results), *_diversities(results)]
    rows = []
    for one in results.settings:
        best = one.setting.kind == "best_of"
        far = f"<small>KL \u2264 {number(one.kl_bound)}</small>" if best else number(one.drift)
        rows.append([esc(one.setting.label), _spent(one), *(_cell(results, one, name) for name in names), far])
    head = ["Setting", "Evaluations", *map(esc, names), "Distance"]
    parts = "<h3>Every setting, mean and 95 % interval</h3>" + table("Every setting", head, rows)
    for title, changes in (
        ("the tuned model (scale 1)", [one.to_tuned for one in results.settings]),
        ("the base model (scale 0)", [one.to_base for one in results.settings]),
    ):
        cells = [
            [esc(one.setting.label), *(_difference(results, found, name) for name in names)]
            for one, found in zip(results.settings, changes, strict=True)
            if found
        ]
        if cells:
            parts += f"<h3>Difference to {title}, same prompts and start noise</h3>"
            parts += table(f"Difference to {title}", ["Setting", *map(esc, names)], cells)
    lead = (
        "Evaluations of the network, and images scored to choose, for one image that is kept. A triangle marks a "
        "difference whose interval leaves 0 out. Distance is from the base model; of best of N, the bound of its KL "
        "divergence from the model that it draws from."
    )
    return section("tables", "Tables", f'<div class="tables">{parts}</div>', lead)


def _diversities(results: Sweep) -> list[str]:
    return [name for name in (FEATURES, PIXELS) if name in results.peak.columns]


def _measure_names(results: Sweep) -> list[str]:
    return [measure.name for measure in results.measures]


def _spent(one: SettingResult) -> str:
    return f"{one.evaluations}<small>{one.looks} scored</small>" if one.looks else str(one.evaluations)


def _cell(results: Sweep, one: SettingResult, name: str) -> str:
    value, digits = one.means[name], results.digits(name)
    return f"{number(value.mean, digits)}<small>{_bounds(value, digits)}</small>"


def _difference(results: Sweep, change: Mapping[str, Interval], name: str) -> str:
    """The difference, an arrow if its sign is established, and its interval."""
    value, digits = change[name], results.digits(name)
    mark = f' <span class="mark">{"▲" if value.mean > 0 else "▼"}</span>' if value.excludes(0.0) else ""
    return f"{_signed(value.mean, digits)}{mark}<small>{_bounds(value, digits, sign=True)}</small>"


def _bounds(interval: Interval, digits: int, *, sign: bool = False) -> str:
    write = _signed if sign else number
    return f"{write(interval.low, digits)} to {write(interval.high, digits)}" if interval.known else DASH


def _signed(value: float, digits: int) -> str:
    """A number with its sign and the column's number of decimals, also near 0."""
    text = f"{value:+.{digits}f}"
    return (text if any(digit in "123456789" for digit in text) else text[1:]).replace("-", MINUS)
