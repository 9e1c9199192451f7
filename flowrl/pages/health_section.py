"""Whether the run was healthy, and where its time went."""

from __future__ import annotations

from flowrl.rendering.bars import stacked_bar
from flowrl.rendering.charts import NARROW, draw_lines, legend, smooth_series
from flowrl.rendering.markup import card, duration, esc, number, plural, section, table
from flowrl.runs.run_data import RunData, column, keys_below
from flowrl.runs.vital_signs import RECENT, SIGNS, recent_mean


def health(run: RunData) -> str:
    """The run's warnings, and a card for every vital sign that it logged."""
    rows = []
    for name, said in run.warnings.items():
        first, last = said[0][0], said[-1][0]
        when = f"{first}" if first == last else f"{first} to {last}, {len(said)} times"
        rows.append([f'<span class="mark bad">! {esc(name.replace("_", " "))}</span>', esc(when), esc(said[0][1])])
    warned = table("Warnings of the run", ["Warning", "Iterations", "First said"], rows) if rows else ""
    cards = ""
    _, deviation = column(run.train, "ratio_max_deviation")
    for sign in SIGNS:
        x, y = column(run.train, sign.key)
        if not len(y):
            continue
        good = sign.is_healthy(y)
        mark = '<span class="mark good">✓ healthy</span>' if good else '<span class="mark bad">! look here</span>'
        series = smooth_series(sign.title, x, y, color=1 if good else 2)
        text = f"{sign.title} over {plural(len(y), 'iteration')}, last {number(float(y[-1]))}"
        chart = draw_lines([series], NARROW, 150, "iteration", "", text)
        extra = ""
        if sign.key == "ratio_mean" and len(deviation):
            extra = f" Largest departure of a single step in the run: {number(float(deviation.max()))}."
        words = f"<figcaption>{esc(sign.meaning)} <b>Healthy:</b> {esc(sign.healthy)}{extra}</figcaption>"
        value = f'<p class="value">{number(recent_mean(y), 4)}</p>'
        cards += card(f"{value}{chart}", title=f"{esc(sign.title)} {mark}", below=words)
    lead = f"Large numbers are means of the last {RECENT} iterations. The marks are rules of thumb, not proofs."
    return section("health", "Health", warned + (f'<div class="three">{cards}</div>' if cards else ""), lead)


def time_by_stage(run: RunData) -> str:
    """Where the seconds went, as one bar and as a table."""
    whole = ("seconds/eval", "seconds/total")  # of evaluations, and since the start of the run
    names = [key.removeprefix("seconds/") for key in keys_below(run.train, "seconds/") if key not in whole]
    stages = [(name, float(column(run.train, f"seconds/{name}")[1].sum())) for name in names]
    rest = float(column(run.train, "seconds")[1].sum()) - sum(seconds for _, seconds in stages)
    stages.append(("eval", float(column(run.evaluations, "seconds/eval")[1].sum())))
    stages.append(("other", max(rest, 0.0)))
    stages = [(name, seconds) for name, seconds in stages if seconds > 0]
    total = sum(seconds for _, seconds in stages)
    if total <= 0:
        return ""
    rows = [[esc(name), duration(seconds), f"{100 * seconds / total:.1f} %"] for name, seconds in stages]
    rows.append(["all", duration(total), "100 %"])
    shares = ", ".join(f"{name} {100 * seconds / total:.0f} %" for name, seconds in stages)
    text = f"Share of the time by stage: {shares}"
    bar = stacked_bar(stages, description=text)
    key = legend([(name, index % 6 + 1, "box") for index, (name, _) in enumerate(stages)])
    numbers = table("Time by stage", ["Stage", "Time", "Share"], rows)
    body = f'<div class="two">{card(bar, below=key)}{numbers}</div>'
    evaluations = column(run.evaluations, "seconds/eval")[0].size
    counts = f"{plural(len(run.train), 'iteration')} and {plural(evaluations, 'evaluation')}"
    return section("time", "Time by stage", body, f"{counts}; loading the model is not counted.")
