"""A reward's card in words: a verdict for each aspect, and the table for a terminal of 80 columns."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from flowrl.evaluation.reward_card.card_measure import CardMeasures
from flowrl.generation.image_folder import POINTWISE
from flowrl.media.perturbations import PERTURBATIONS
from flowrl.rendering.markup import duration, plural
from flowrl.rendering.terminal_text import align, wrapped
from flowrl.statistics.bootstrap import Interval, point
from flowrl.statistics.reliability import repeats_for

Grade = Literal["good", "fair", "poor", "open"]
"""`open`: a fact without a judgement, or nothing could be measured."""

RELIABLE, USABLE = 0.95, 0.8  # reliability of one value: below these, fair and poor
UNDISTURBED, STEADY, SHAKY = 0.995, 0.9, 0.7  # rank correlation under the worst change, likewise
FLAT_FEW, FLAT_MANY = 0.05, 0.3  # shares of prompts without any advantage: above these, fair and poor
BIAS_SMALL, BIAS_LARGE = 0.05, 0.15  # of the one shown first, likewise
FAILED_FEW = 0.01  # share of failed items above which a reward is poor


GradedWords = tuple[Grade, str]
"""A grade and its words."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CardVerdict:
    """The verdict on one aspect."""

    aspect: str
    grade: Grade
    words: str


Line = tuple[str, str, Interval]
"""One number of the card: its section, its name, and its interval (bounds NaN if there is none)."""


def verdicts(card: CardMeasures) -> list[CardVerdict]:
    """The aspects in the order of the card."""
    found: dict[str, GradedWords] = {
        "failures": ("good", "Every image got a value in both passes."),
        "signal": _signal(card),
        "repeatability": _repeats(card),
    }
    if (failed := card.failed.mean) != 0:
        told = ", ".join(f"{word} {count}" for word, count in card.errors.items())
        words = f"{percent(failed)} of the values failed ({told}); failed images are left out of training."
        found["failures"] = ("fair" if failed <= FAILED_FEW else "poor"), words
    if card.perturbed:
        found["steadiness"] = _steadiness(card)
    if card.order is not None:
        bias, agreement = card.order.first_wins.mean, card.order.agreement.mean
        grade, words = _grade(abs(bias), BIAS_SMALL, BIAS_LARGE), "No pair got a verdict in both orders."
        if math.isfinite(bias):
            words = f"The image shown first wins {percent(0.5 + bias)} of the time; both orders name the same winner "
            words += f"in {percent(agreement)} of the pairs."
            words += " Ask in both orders (orders: both)." * (grade != "good")
        found["order"] = (grade, words)
    if card.others:
        listed = [
            f"{name} {one.within.mean:.2f} (all images {one.overall.mean:.2f})" for name, one in card.others.items()
        ]
        words = f"Rank correlation within prompts: {', '.join(listed)}."
        found["other rewards"] = ("open", words.replace("nan", "unknown"))
    seconds = card.cost.seconds.mean
    took = f"{duration(1000 * seconds)} for 1000 images, {calls(card)}, on this machine at this batch size."
    found["cost"] = ("open", "No image was scored." if math.isnan(seconds) else took)
    return [CardVerdict(aspect=aspect, grade=grade, words=words) for aspect, (grade, words) in found.items()]


def _signal(card: CardMeasures) -> GradedWords:
    flat, between = card.spread.flat_groups.mean, card.spread.between_prompts.mean
    if math.isnan(flat):
        return "open", "No prompt has two images with a value, so nothing can be said of advantages."
    if flat == 1:
        return "poor", "All images of a prompt have the same value, for every prompt: there is nothing to learn from."
    words = f"{percent(1 - flat)} of the prompts have images that differ in value."
    if math.isfinite(between) and card.kind in POINTWISE:
        words += f" {percent(between)} of the variance lies between prompts, where advantages do not see it."
    return _grade(flat, FLAT_FEW, FLAT_MANY), words


def _repeats(card: CardMeasures) -> GradedWords:
    reliability, noise = card.repeat.reliability.mean, card.repeat.noise_share.mean
    if card.retest.count and card.retest.exact:
        return "good", "Both passes gave exactly the same values."
    if math.isnan(reliability):
        return "open", "Without images of one prompt that differ, noise cannot be set against signal."
    words = (
        f"Asked twice it differs by {card.retest.mean.mean:.3g} on average; {percent(noise)} of a group's standard "
        f"deviation is the reward's own noise."
    )
    times = repeats_for(reliability) if reliability < RELIABLE else 1
    if 1 < times < 100:
        words += f" The mean of {times:.0f} values would be 90 % signal."
    elif times > 1:
        words += " No affordable number of repeats would fix that."
    return _grade(-reliability, -RELIABLE, -USABLE), words


def worst_change(card: CardMeasures) -> str | None:
    """The change that harms the order of a prompt's images most, without mirroring, which may change the content."""
    found = {name: row.rank.mean for name, row in card.perturbed.items() if name != "flip"}
    known = {name: rank for name, rank in found.items() if math.isfinite(rank)}
    return min(known, key=lambda name: known[name]) if known else None


def _steadiness(card: CardMeasures) -> GradedWords:
    worst, words = worst_change(card), ""
    grade: Grade = "open"
    if worst is not None:
        rank, done = card.perturbed[worst].rank.mean, PERTURBATIONS[worst][0]
        done = f"saved as {done}" if worst.startswith("jpeg") else done
        done = "halved in size and enlarged again" if worst == "resize" else done
        grade = _grade(-rank, -STEADY, -SHAKY)
        words = (
            "No compression or resizing that was tried disturbs the order of a prompt's images."
            if rank > UNDISTURBED
            else f"The order of a prompt's images suffers most when they are {done}: rank correlation {rank:.2f} with "
            f"the order before."
        )
    mirrored = card.perturbed["flip"].rank.mean if "flip" in card.perturbed else math.nan
    if math.isfinite(mirrored):
        words += f" Mirrored: {mirrored:.2f}; text, and left and right, may rightly lower that."
    return grade, words.strip() or "No prompt has images that differ in value, so there is no order to disturb."


def calls(card: CardMeasures) -> str:
    """ "1 call per image"."""
    return f"{card.cost.calls:.3g} {'call' if card.cost.calls == 1 else 'calls'} per image"


def _grade(value: float, good: float, fair: float) -> Grade:
    return "good" if value <= good else "fair" if value <= fair else "poor"


def overall(found: Sequence[CardVerdict]) -> str:
    """The summary in a sentence."""
    poor = [verdict.aspect for verdict in found if verdict.grade == "poor"]
    fair = [verdict.aspect for verdict in found if verdict.grade == "fair"]
    if poor:
        return f"Poor in {_listed(poor)}: fix that before training on it."
    if fair:
        return f"Usable; watch {_listed(fair)}."
    judged = [verdict.aspect for verdict in found if verdict.grade == "good"]
    return f"Good in all that was judged: {_listed(judged)}." if judged else "Nothing could be judged."


def _listed(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def lines(card: CardMeasures) -> list[Line]:
    """Every number of the card with its interval."""
    rows: list[Line] = [
        ("values", "mean", card.mean),
        ("values", "standard deviation", card.spread.std),
        ("values", "standard deviation within prompts", card.repeat.within_std),
        ("values", "share of variance between prompts", card.spread.between_prompts),
        ("values", "share of prompts without spread", card.spread.flat_groups),
        ("values", "share of failed values", card.failed),
        ("two passes", "mean difference", card.retest.mean),
        ("two passes", "largest difference", point(card.retest.largest)),
        ("two passes", "correlation", card.retest.correlation),
        ("two passes", "noise, standard deviation", card.retest.noise_std),
        ("two passes", "reliability within prompts", card.repeat.reliability),
        ("two passes", "noise share of a group's deviation", card.repeat.noise_share),
        ("two passes", "rank correlation of advantages", card.repeat.rank),
    ]
    for name, found in card.perturbed.items():
        section = PERTURBATIONS[name][0]
        rows += [
            (section, "shift of all values", found.shift),
            (section, "noise share of a group's deviation", found.noise_share),
            (section, "rank correlation of advantages", found.rank),
        ]
    if card.order is not None:
        rows += [
            ("order of pairs", "wins of the first beyond one half", card.order.first_wins),
            ("order of pairs", "agreement of both orders", card.order.agreement),
        ]
    for name, other in card.others.items():
        rows += [(f"with {name}", "rank correlation, all images", other.overall)]
        rows += [(f"with {name}", "rank correlation within prompts", other.within)]
    return [
        *rows,
        ("cost", "seconds per image", card.cost.seconds),
        ("cost", "hours for 1000 images", point(card.cost.hours_per_1000)),
        ("cost", "calls per image", point(card.cost.calls)),
    ]


def short(value: float) -> str:
    """Four digits; a dash if unknown."""
    return f"{value:.4g}" if math.isfinite(value) else "-"


def percent(share: float) -> str:
    """ "12 %"; with a digit more below 1 % and above 99 %."""
    digits = 0 if share in (0, 1) or 0.01 <= share <= 0.99 else 1
    return f"{100 * share:.{digits}f} %"


def summary(card: CardMeasures) -> str:
    """Verdicts and the table; at most 80 columns."""
    found = verdicts(card)
    head = f"{card.name}: {plural(card.images, 'image')} of {plural(card.prompts, 'prompt')}"
    text = [wrapped(f"{head}. {overall(found)}"), ""]
    for verdict in found:
        mark = "" if verdict.grade == "open" else verdict.grade
        text.append(wrapped(verdict.words, f"{verdict.aspect:<14} {mark:<6} ", " " * 22))
    rows, section = [], ""
    for part, name, value in lines(card):
        if part != section:
            section = part
            rows.append([section, "", ""])
        bounds = f"{short(value.low)} to {short(value.high)}" if value.known else ""
        rows.append([f"  {name}", short(value.mean), bounds])
    text += ["", align(["", "value", "95 % over prompts"], rows)]
    if card.reproduces is not None:
        text += ["", wrapped(f"Reproduces: {card.reproduces}")]
    text += [wrapped(f"Note: {note}") for note in card.notes]
    return "\n".join(text)
