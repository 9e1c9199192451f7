"""Vital signs of a run, one table: what is tested, in which words a failure is told, and what helps.

`SIGNS` are numbers of the log, judged when the run is looked at: by the report and by `flowrl doctor`. `ALARMS` are
judged in each iteration or evaluation by what that one knows: the watchdog tells them, and `flowrl doctor` tells which
of them ruin a run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from flowrl.rendering.markup import number
from flowrl.runtime.shapes import Float

Values = Float[np.ndarray, " n"]
RECENT = 10
"""Iterations that a shown value averages."""
MOSTLY = 0.5
"""Share of an iteration's images."""
LARGE_WEIGHT = 20.0
"""Of a LoRA; trained ones stay far below 10."""
COLLAPSED, COLLAPSED_FOR = 0.25, 3
"""Share of the first iterations' diversity, and iterations in a row below it."""
BLURRED = 0.7
"""Share of the first evaluation's JPEG files, in bytes, below which images have lost detail."""
EQUAL_LIMIT = 4
"""Iterations in a row whose groups all agree, each in itself, before the run stops."""
JUMP = 1000.0
"""Times what was usual."""
HUGE = 1e9
"""Of a reward: float32 leaves no digits for what images differ in."""
ALIKE, FAULT = 1e-3, 0.1
"""Nats per latent dimension between the log-densities of a rollout and of its update: bfloat16 in one of two attention
kernels gives up to the first; the second is another policy."""
DISAGREE = (
    "check that both use one pipeline.attention and pipeline.dtype, that the model has no dropout, and that no adapter "
    "was switched on or off in between"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sign:
    """One vital sign: its metric, what it means, what is healthy, the test of that, and what to change."""

    key: str
    title: str
    meaning: str
    healthy: str
    is_healthy: Callable[[Values], bool]
    cure: str
    tested: Callable[[Values], str] = lambda values: f"{number(recent_mean(values))} on average over {_last(values)}"
    """What `is_healthy` looks at, in words."""


def recent_mean(values: Values) -> float:
    """Mean of the last iterations."""
    return float(values[-RECENT:].mean())


def _last(values: Values) -> str:
    return "the iteration" if len(values) == 1 else f"the last {min(len(values), RECENT)} iterations"


def _highest(values: Values) -> str:
    median = number(float(np.median(values)))
    return f"{number(float(values[-RECENT:].max()))} at most over {_last(values)}, with a median of {median}"


def _first_and_recent(values: Values) -> str:
    return (
        f"{number(float(values[0]), 4)} at first and {number(recent_mean(values), 4)} on average over {_last(values)}"
    )


def _without_spikes(values: Values) -> bool:
    """No recent value beyond ten times the run's median; too early to say within the first iterations."""
    return len(values) < 2 * RECENT or bool(values[-RECENT:].max() <= 10 * max(float(np.median(values)), 1e-12))


SIGNS = (
    Sign(
        key="ratio_mean",
        title="Importance ratio",
        meaning="Probability of the drawn steps under the policy that learns, over that under the one that drew them.",
        healthy="1 in the first update of an iteration; later a mean more than 1 % off points to updates too large.",
        is_healthy=lambda values: abs(float(values[0]) - 1) < 0.01 and abs(recent_mean(values) - 1) < 0.01,
        tested=_first_and_recent,
        cure="lower optim.lr or updates_per_rollout; then look at ratio_first_deviation, which should be rounding: "
        + DISAGREE,
    ),
    Sign(
        key="clip_fraction",
        title="Clip fraction",
        meaning="Share of steps whose ratio, the objective's own, left the clip range, so that their gradient was cut.",
        healthy="Below 0.3. Always 0 with one update for each rollout; near 1 the updates are too large.",
        is_healthy=lambda values: recent_mean(values) < 0.3,
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
        is_healthy=lambda values: recent_mean(values) < 0.5,
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Alarm:
    """What is wrong in one iteration or evaluation: its test on numbers, its words, and what to change."""

    test: Callable[..., bool]
    words: str
    """With the names of what is told in braces."""
    cure: str
    ruins: bool = False
    """Whether what the run makes from then on is worth nothing; others may pass."""


_SLOWER = "lower optim.lr or raise kl_coef"
_BOUND = "bound it with clip: [LOW, HIGH], or fix it"
_AGAIN = "stop it, and start again with a {}higher kl_coef"
EQUAL = "every image of a prompt got the same reward as the others of that prompt, in all groups"
COMPARED = (
    "images are compared within their group alone; check that the reward reads the images and not the prompt alone, "
    "and prefer one that grades partial success"
)
ALARMS = {
    "constant_images": Alarm(
        test=lambda share: share > MOSTLY,
        ruins=True,
        cure=_SLOWER,
        words="{share:.0%} of the images have one colour: the policy has left what the model can draw; ",
    ),
    "collapse": Alarm(
        test=lambda steady, narrow: steady and narrow >= COLLAPSED_FOR,
        ruins=True,
        words="images of one prompt differ by {now:.3g}, {share:.0%} of what they did in the first iterations: the "
        "policy draws one image again and again; ",
        cure=_AGAIN.format("lower optim.lr or a "),
    ),
    "exploding_rewards": Alarm(
        test=lambda largest, usual: largest > HUGE or (usual > 0 and largest > JUMP * usual),
        ruins=True,
        cure=_BOUND,
        words="a reward reaches {largest:.3g}{before}: ",
    ),
    "one_image": Alarm(
        test=lambda largest, second: largest > JUMP * max(second, 1.0),
        cure=_BOUND,
        words="one image of {count} holds {share:.0%} of the rewards' variance (image {place}: {value:.3g}, the others "
        "{second:.3g} at most), so its group learns from it alone: ",
    ),
    "vanishing_rewards": Alarm(
        test=lambda spread, eps: 0 < spread < eps,
        cure="scale the reward up with its weight, or lower adv_eps",
        words="the rewards of a prompt have a standard deviation of {spread:.1e} at most, below adv_eps ({eps:g}), so "
        "advantages vanish: ",
    ),
    "large_weights": Alarm(
        test=lambda largest: largest > LARGE_WEIGHT,
        cure="start again with a lower optim.lr",
        words="{reach}, and those of a useful policy stay below {limit:g}: ",
    ),
    "zero_gradient": Alarm(
        test=lambda norm, live, equal: norm == 0 and live > 0 and equal < 1,
        ruins=True,
        words="the gradient is exactly 0 though there are rows to learn from, so nothing is learned: ",
        cure="check the scale of the reward against adv_eps, and the clip range",
    ),
    "ratio_deviation": Alarm(
        test=lambda deviation: deviation > ALIKE,
        words="rollout and update give log-densities that differ by {deviation:.2g} nats per latent dimension, more "
        "than rounding usually does. The first update is not affected; ",
        cure=DISAGREE,
    ),
    "reward_hacking": Alarm(
        test=bool,
        ruins=True,
        cure=f"{_AGAIN.format('')} or a second reward",
        words="{said}: the policy learns to please the reward, not to draw better; ",
    ),
    "blur": Alarm(
        test=lambda sure, share: sure and share < BLURRED,
        ruins=True,
        words="images of the evaluation have lost detail: their JPEG files are {share:.0%} of what they were before "
        "training ({reward} {was:.3g} -> {now:.3g}), so the policy blurs or empties them; ",
        cure=f"{_AGAIN.format('lower optim.lr or a ')}, or go on from the checkpoint before",
    ),
    "equal_groups": Alarm(
        test=lambda iterations, values: iterations >= EQUAL_LIMIT - 1 and len(values) > 1,
        words=EQUAL + " for {iterations} iterations in a row, so nothing is learned: ",
        cure=COMPARED,
    ),
    "diverged": Alarm(test=bool, ruins=True, words="{what}", cure=""),
}
"""Name of a warning -> what it is."""


def alarm(name: str, *tested: object, **told: object) -> dict[str, str]:
    """The warning of that name in words, where its test holds."""
    one = ALARMS[name]
    return {name: f"{one.words.format(**told)}{one.cure}"} if one.test(*tested) else {}
