"""Summary sentence, tiles, curves and tasks of a run, for the report and the live page."""

from __future__ import annotations

import math

import numpy as np

from flowrl.config.rewards import told_apart
from flowrl.rendering import markup
from flowrl.rendering.bars import forest_of_two, stacked_bar
from flowrl.rendering.charts import NARROW, Series, draw_lines, legend, line_chart, smooth, smooth_series, thin
from flowrl.rendering.markup import DASH, bounds, card, duration, esc, estimate, number, plural, section, signed, table
from flowrl.runs.evaluation_rows import GENEVAL, REWARD
from flowrl.runs.held_out_result import HeldOut, conclusion
from flowrl.runs.run_data import RunData, column, keys_below
from flowrl.runs.vital_signs import RECENT, SIGNS, recent_mean
from flowrl.statistics.bootstrap import LEVEL, Interval, student_quantile
from flowrl.statistics.means import ends_of

EXPLAINED = {
    "established improvement": "an <strong>established improvement</strong>: the interval lies above zero",
    "established loss": "an <strong>established loss</strong>: the interval lies below zero",
    "not established": "<strong>not established</strong>: the interval includes zero, so chance alone could do this",
    "not testable": "<strong>not testable</strong>: ",
}
GRADED = f"{GENEVAL}graded"


def summary(run: RunData, held: HeldOut | None) -> str:
    """The effect of the run on the held-out score, in one sentence with its numbers."""
    if held is None:
        start, end = _ends(run)
        text = "No iteration has finished yet."
        if math.isfinite(end):
            counted = plural(len(run.train), "iteration")
            text = (
                f"The training reward went from {number(start)} to {number(end)} in {counted} (means of the first and "
                "the last iterations). There was no held-out evaluation, so nothing can be said about new prompts."
            )
        return f'<p class="summary">{text}</p>'
    text = f"The {run.held_word} {esc(held.label)} "
    if held.after is None:
        text += f"was {estimate(held.before)} {markup.moment(held.first)}; there is no later evaluation yet."
        return f'<p class="summary">{text}</p>'
    steps = plural(held.last - held.first, "iteration")
    text += f"went from {estimate(held.before)} to {estimate(held.after)} in {steps}. "
    if held.difference is None or not held.difference.known:
        text += f"The change of {signed(held.change)} is {EXPLAINED[conclusion(held.difference)]}{esc(held.untold)}."
        return f'<p class="summary">{text}</p>'
    text += (
        f"The paired difference is {estimate(held.difference, sign=True)}, {EXPLAINED[conclusion(held.difference)]}."
    )
    scope = f"{plural(held.num_pairs, run.sample_word)} of the same prompts and seeds were compared"
    if held.num_unpaired:
        scope += f"; {plural(held.num_unpaired, run.sample_word)} without a verdict or a partner were left out"
    return (
        f'<p class="summary">{text}</p><p class="muted">{scope}. The interval covers {esc(held.claim)} and other '
        f"start noise; another training seed can differ by more.</p>"
    )


def tiles(run: RunData, held: HeldOut | None) -> str:
    """The key numbers, a few words each."""
    cells = []
    if held is not None:
        now = held.after or held.before
        since = f"{signed(held.change)} since the first evaluation"
        change = markup.moment(held.first) if held.after is None else since
        cells.append((f"{run.held_word.capitalize()} {held.label}", number(now.mean), change))
    _, graded = column(run.evaluations, GRADED)
    if len(graded):
        change = f"{signed(graded[-1] - graded[0])} since the first evaluation" if len(graded) > 1 else "one evaluation"
        cells.append((f"{run.held_word.capitalize()} graded credit", number(graded[-1]), change))
    start, end = _ends(run)
    if math.isfinite(end):
        change = f"{signed(end - start)} since the first iterations" if len(run.train) > 1 else "first iteration"
        cells.append(("Training reward", number(end), change))
    if run.train:
        planned = run.config.get("num_iterations")
        done = int(run.train[-1]["iteration"]) + 1
        images = int(column(run.train, "num_images")[1].sum())
        drawn = f"{plural(images, run.sample_word)} drawn" if images else "finished"
        cells.append(("Iterations", f"{done} of {planned}" if planned else str(done), drawn))
    _, seconds = column(run.train, "seconds")
    if len(seconds):
        total = float(seconds.sum() + column(run.evaluations, "seconds/eval")[1].sum())
        cells.append(("Time", duration(total), f"{duration(float(np.median(seconds)))} per iteration"))
    return markup.tiles(cells)


def curves(run: RunData, held: HeldOut | None) -> str:
    """Training reward and held-out evaluation over the iterations."""
    figures = []
    if found := training_series(run):
        smoothed, runs = found
        start, end = _ends(run)
        counted = plural(len(column(run.train, "reward")[1]), "iteration")
        text = f"Training reward over {counted}, from {number(start)} to {number(end)}"
        points = "iterations" if runs == 1 else f"means of about {runs:.0f} iterations"
        key = [(points, 1, "raw"), ("smoothed", 1, "line")]
        if len(smoothed.low):
            key.append(("95 % over prompts", 1, "band"))
        figures.append(figure("Training reward", [smoothed], "reward", text, key))
    if held is not None:
        curve = evaluation_series(run, held.metric, held.label, color=1)
        series, y = [curve], curve.y
        key = [(held.label, 1, "line"), *([("95 % interval", 1, "band")] if np.isfinite(curve.low).any() else [])]
        graded_x, graded = column(run.evaluations, GRADED)
        if len(graded):
            series.append(Series(label="graded credit", x=graded_x, y=graded, color=2, dashed=True, markers=True))
            key.append(("graded credit", 2, "dash"))
        counted = plural(len(y), "evaluation")
        text = f"{run.held_word.capitalize()} {held.label} at {counted}, from {number(y[0])} to {number(y[-1])}"
        figures.append(figure("Evaluation", series, "score", text, key))
    figures += _reward_figures(run, held)
    return section("curves", "Learning curves", f'<div class="two">{"".join(figures)}</div>' if figures else "")


def tasks(held: HeldOut | None) -> str:
    """GenEval's tasks before and after, as a chart and as a table."""
    if held is None or not held.tasks_before:
        return ""
    before, after = held.tasks_before, held.tasks_after
    text = "Share of correct images for each task: " + "; ".join(
        f"{name.replace('_', ' ')} {number(interval.mean)}"
        + (f" before, {number(after[name].mean)} after" if name in after else "")
        for name, interval in before.items()
    )
    rows = []
    for name in dict.fromkeys([*before, *after]):
        cells = [_cell(before.get(name))]
        if after:
            cells += [_cell(after.get(name)), _cell(held.task_differences.get(name), sign=True)]
        rows.append([esc(name.replace("_", " ")), *cells])
    chart = forest_of_two(before, after, ("before", "after"), x_label="share of correct images", description=text)
    head = ["Task", "Before", *(["After", "Difference"] if after else [])]
    numbers = table("Score by task with 95 % intervals; the difference is paired", head, rows)
    lead = (
        "The score is the mean over tasks. Intervals of before and after are Wilson's, over prompts where a task has "
        "several: images that are all right or all wrong leave room for what they did not show."
    )
    return section("tasks", "Score by task", f'<div class="two">{card(chart)}{numbers}</div>', lead)


def _cell(interval: Interval | None, *, sign: bool = False) -> str:
    """A mean with its bounds below it."""
    if interval is None:
        return DASH
    mean = signed(interval.mean) if sign else number(interval.mean)
    return f"{mean}<small>{bounds(interval, sign=sign)}</small>"


def _ends(run: RunData) -> tuple[float, float]:
    """Mean training reward of the first and the last iterations: a quarter of the run each, at most ten."""
    _, reward = column(run.train, "reward")
    if not len(reward):
        return math.nan, math.nan
    span = min(10, max(1, len(reward) // 4))
    return float(reward[:span].mean()), float(reward[-span:].mean())


def training_series(run: RunData, *, label: str = "training reward", color: int = 1) -> tuple[Series, float] | None:
    """The smoothed training reward, its 95 % band over prompts, and iterations per point; None before the first."""
    iteration, reward = column(run.train, "reward")
    if not len(reward):
        return None
    error = column(run.train, "reward_error")[1]  # over prompts: the images of one are alike
    # The error of a mean of k neighbours is sqrt(mean of squares / k); thinning takes such means.
    runs = len(reward) / len(thin(reward))
    thinned_error = np.sqrt(thin(error**2) / runs) if len(error) == len(reward) else error[:0]
    x, y = thin(iteration), thin(reward)
    line, spread = smooth(y, thinned_error)
    # Degrees of freedom: prompts minus one, over as many iterations as the curve averages at its ends.
    averaged = 1 / smooth(np.zeros(len(y)), np.ones(len(y)))[1].max() ** 2
    degrees = float(max(1, int(run.config.get("prompts_per_step") or 2) - 1) * runs * averaged)
    half = student_quantile(LEVEL, degrees) * spread if len(spread) else spread
    ends = ends_of(reward, changes=False) or (-math.inf, math.inf)
    series = Series(
        label=label,
        x=x,
        y=line,
        low=np.maximum(line - half, ends[0]) if len(half) else half,
        high=np.minimum(line + half, ends[1]) if len(half) else half,
        raw_x=x,
        raw_y=y,
        color=color,
    )
    return series, runs


def evaluation_series(run: RunData, metric: str, label: str, *, color: int) -> Series:
    """A metric of the evaluations with its bounds, NaN if they were not logged."""
    x, y = column(run.evaluations, metric)
    rows = [row for row in run.evaluations if column([row], metric)[0].size]
    logged = ([row.get(f"{metric}_{end}") for row in rows] for end in ("low", "high"))
    low, high = (np.array([math.nan if value is None else value for value in ends], np.float64) for ends in logged)
    return Series(label=label, x=x, y=y, low=low, high=high, color=color, markers=True)


def _reward_figures(run: RunData, held: HeldOut | None) -> list[str]:
    """Every further reward: held-out ones if measured, and the parts of a training reward with several. Bounds become
    the band of their reward's curve; sub-scores (`reward/<name>/<part>`) are left out."""
    shown = "" if held is None else held.metric
    keys = [key for key in keys_below(run.evaluations, REWARD) if key != shown]
    keys = [key for key in keys if key.count("/") == 2 and not key.endswith(("_low", "_high"))]
    if held is not None:  # GenEval's score is also a reward's, under another name: once is enough
        keys = [key for key in keys if not np.array_equal(column(run.evaluations, key), column(run.evaluations, shown))]
    members = [key for key in keys_below(run.train, "reward/") if key.count("/") == 1]
    figures, told = [], told_apart(run.config)
    for key in keys + (members if len(members) > 1 else []):
        evaluated = key.startswith("eval/")
        x, y = column(run.evaluations if evaluated else run.train, key)
        if len(y):
            name = key.split("reward/", 1)[1]
            name = told.get(name, name)
            title = f"{run.held_word.capitalize() if evaluated else 'Training'} reward: {name}"
            series = evaluation_series(run, key, name, color=3) if evaluated else smooth_series(name, x, y, color=3)
            text = f"{title}, from {number(y[0])} to {number(y[-1])}"
            figures.append(figure(title, [series], "reward", text, []))
    return figures


def figure(title: str, series: list[Series], y_label: str, text: str, key: list[tuple[str, int, str]]) -> str:
    """A chart over iterations with its title and legend; `text` is for readers who cannot see it."""
    chart = line_chart(series, x_label="iteration", y_label=y_label, description=text)
    return card(chart, title=esc(title), below=legend(key))


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
