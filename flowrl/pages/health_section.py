"""Whether the run was healthy, and where its time went."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from flowrl.rendering.bars import stacked_bar
from flowrl.rendering.charts import NARROW, draw_lines, legend, smoothed
from flowrl.rendering.markup import card, duration, esc, number, plural, section, table
from flowrl.runs.run_data import RunData, column, keys_below

Values = Float[np.ndarray, " n"]
RECENT = 10  # iterations that a shown value averages


@dataclass(frozen=True, kw_only=True, slots=True)
class Sign:
    """One vital sign: its metric, what it means, what is healthy, the test of that, and what to change."""

    key: str
    title: str
    meaning: str
    healthy: str
    is_healthy: Callable[[Values], bool]
    cure: str
    tested: Callable[[Values], str] = lambda values: f"{number(_recent(values))} on average over {_last(values)}"
    """What `is_healthy` looks at, in words."""


def _recent(values: Values) -> float:
    return float(values[-RECENT:].mean())


def _last(values: Values) -> str:
    return "the iteration" if len(values) == 1 else f"the last {min(len(values), RECENT)} iterations"


def _highest(values: Values) -> str:
    median = number(float(np.median(values)))
    return f"{number(float(values[-RECENT:].max()))} at most over {_last(values)}, with a median of {median}"


def _first_and_recent(values: Values) -> str:
    return f"{number(float(values[0]), 4)} at first and {number(_recent(values), 4)} on average over {_last(values)}"


def _without_spikes(values: Values) -> bool:
    """No recent value beyond ten times the run's median; too early to say within the first iterations."""
    return len(values) < 2 * RECENT or bool(values[-RECENT:].max() <= 10 * max(float(np.median(values)), 1e-12))


SIGNS = (
    Sign(
        key="ratio_mean",
        title="Importance ratio",
        meaning="Probability of the drawn steps under the policy that learns, over that under the one that drew them.",
        healthy="1 before the first update of an iteration; a mean more than 1 % off points to a mismatch of the two.",
        is_healthy=lambda values: abs(float(values[0]) - 1) < 0.01 and abs(_recent(values) - 1) < 0.01,
        tested=_first_and_recent,
        cure="make rollout and update compute alike: one pipeline.attention and dtype, pipeline.compile=none, "
        "no stale rollouts; then look at ratio_first_deviation, which should be 0",
    ),
    Sign(
        key="clip_fraction",
        title="Clip fraction",
        meaning="Share of steps whose ratio, the objective's own, left the clip range, so that their gradient was cut.",
        healthy="Below 0.3. Always 0 with one update for each rollout; near 1 the updates are too large.",
        is_healthy=lambda values: _recent(values) < 0.3,
        cure="lower optim.lr or updates_per_rollout, or widen clip_range, which is in units of the objective's ratio",
    ),
    Sign(
        key="kl",
        title="KL to the reference",
        meaning="How far the policy has moved from where it started, in nats.",
        healthy="A slow rise. A jump often comes before images collapse: lower optim.lr or raise kl_coef.",
        is_healthy=_without_spikes,
        tested=_highest,
        cure="lower optim.lr or raise kl_coef, and go on from a checkpoint before the jump",
    ),
    Sign(
        key="grad_norm",
        title="Gradient norm",
        meaning="Length of the gradient before it is clipped.",
        healthy="Steady, without spikes beyond ten times its median.",
        is_healthy=_without_spikes,
        tested=_highest,
        cure="lower optim.lr or optim.max_grad_norm, and look at the rewards of the iterations that jump",
    ),
    Sign(
        key="zero_std_ratio",
        title="Groups without contrast",
        meaning="Share of prompts whose samples all got the same reward, and so teach nothing.",
        healthy="Below 0.5. Near 1 the prompts are too easy, too hard, or the reward is too coarse.",
        is_healthy=lambda values: _recent(values) < 0.5,
        cure="take prompts of medium difficulty (curriculum), a reward that grades partial success, or more "
        "images of a prompt (group_size)",
    ),
    Sign(
        key="invalid_ratio",
        title="Failed rewards",
        meaning="Share of images that a reward could not score: they teach nothing and enter no statistic.",
        healthy="0. The causes are in metrics.jsonl under reward_errors; beyond max_invalid_ratio the run stops.",
        is_healthy=lambda values: float(values.max()) == 0,
        tested=lambda values: f"{number(float(values.max()))} at most",
        cure="see reward_errors in metrics.jsonl, and fix the reward or its server; what fails is left out, so "
        "the run learns from the rest alone",
    ),
)


def health(run: RunData) -> str:
    """What the run warned of, and a card for every vital sign that it logged."""
    cards = "".join(_sign_card(run, sign) for sign in SIGNS)
    lead = f"Large numbers are means of the last {RECENT} iterations. The marks are rules of thumb, not proofs."
    return section("health", "Health", _warnings(run) + (f'<div class="three">{cards}</div>' if cards else ""), lead)


def _warnings(run: RunData) -> str:
    """Every kind of warning: what was said first, and in which iterations."""
    found = run.warnings
    if not found:
        return ""
    rows = []
    for name, said in found.items():
        first, last = said[0][0], said[-1][0]
        when = f"{first}" if first == last else f"{first} to {last}, {len(said)} times"
        rows.append([f'<span class="mark bad">! {esc(name.replace("_", " "))}</span>', esc(when), esc(said[0][1])])
    return table("Warnings of the run", ["Warning", "Iterations", "First said"], rows)


def time_by_stage(run: RunData) -> str:
    """Where the seconds went, as one bar and as a table."""
    stages = _stages(run)
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


def _sign_card(run: RunData, sign: Sign) -> str:
    x, y = column(run.train, sign.key)
    if not len(y):
        return ""
    good = sign.is_healthy(y)
    mark = '<span class="mark good">✓ healthy</span>' if good else '<span class="mark bad">! look here</span>'
    series = smoothed(sign.title, x, y, color=1 if good else 2)
    text = f"{sign.title} over {plural(len(y), 'iteration')}, last {number(float(y[-1]))}"
    chart = draw_lines([series], NARROW, 150, "iteration", "", text)
    extra = ""
    _, deviation = column(run.train, "ratio_max_deviation")
    if sign.key == "ratio_mean" and len(deviation):
        extra = f" Largest departure of a single step in the run: {number(float(deviation.max()))}."
    words = f"<figcaption>{esc(sign.meaning)} <b>Healthy:</b> {esc(sign.healthy)}{extra}</figcaption>"
    value = f'<p class="value">{number(_recent(y), 4)}</p>'
    return card(f"{value}{chart}", title=f"{esc(sign.title)} {mark}", below=words)


def _stages(run: RunData) -> list[tuple[str, float]]:
    """Seconds of every logged stage of an iteration, of evaluation, and of the rest."""
    whole = ("seconds/eval", "seconds/total")  # of evaluations, and since the start of the run
    names = [key.removeprefix("seconds/") for key in keys_below(run.train, "seconds/") if key not in whole]
    stages = [(name, float(column(run.train, f"seconds/{name}")[1].sum())) for name in names]
    rest = float(column(run.train, "seconds")[1].sum()) - sum(seconds for _, seconds in stages)
    stages.append(("eval", float(column(run.evaluations, "seconds/eval")[1].sum())))
    stages.append(("other", max(rest, 0.0)))
    return [(name, seconds) for name, seconds in stages if seconds > 0]
