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
from flowrl.comparing.sweep.sweep_settings import StripRows
from flowrl.pages.sweep_figures import against_cost, against_diversity, against_scale, key, strip
from flowrl.rendering.document import document
from flowrl.rendering.markup import DASH, MINUS, card, code, esc, notes_box, number, section, table
from flowrl.runtime.files import write_atomically
from flowrl.statistics.bootstrap import Interval
from flowrl.training.drift import KL_TEXT


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
