"""The result of a sweep: means with intervals over prompts, paired differences, and one sentence about them.

Letters: P prompts, K samples. A column is a measure, [P, K], or a diversity, [P, 1].
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from flowrl.comparing.sweep.sweep_settings import Measure, Setting
from flowrl.rendering.markup import bounds, number
from flowrl.rendering.notebook import heading, rows_table
from flowrl.rendering.terminal_text import align, cut, wrapped
from flowrl.rewards.base import gives_verdicts
from flowrl.runtime.files import plain
from flowrl.runtime.shapes import Float
from flowrl.samplers.search import best_of_n_kl
from flowrl.statistics.bootstrap import LEVEL, UNKNOWN, Interval
from flowrl.statistics.means import VERDICTS, Range, bound, ends_of, mean_interval

Column = Float[np.ndarray, " p k"]
FEATURES, PIXELS = "diversity", "pixel diversity"
MOST = {FEATURES: 2.0, PIXELS: 1.0, "attributes": 1.0}
"""Largest value of a column beside those of verdicts; the smallest is 0."""
SAME_COST = 1.15  # settings whose cost differs by less than this factor are compared


@dataclass(frozen=True, kw_only=True, slots=True)
class SettingResult:
    """The result of one setting."""

    setting: Setting
    evaluations: int
    """Network evaluations for each image that is kept."""
    drift: float
    """Distance of the velocities from the base's; NaN for a search, which changes no velocity."""
    columns: dict[str, Column]
    """Name -> values; measures by their names, then diversities. NaN: failed."""
    means: dict[str, Interval]
    """Name -> mean and interval over prompts."""
    to_tuned: dict[str, Interval] = field(default_factory=dict)
    """Name -> the same for differences to scale 1; empty if that was not drawn, or is this one."""
    to_base: dict[str, Interval] = field(default_factory=dict)
    """The same for differences to scale 0."""

    @property
    def looks(self) -> int:
        """Images decoded and scored for each image that is kept."""
        return 0 if self.setting.kind in ("rlg", "run") else self.setting.plan.looks

    @property
    def kl_bound(self) -> float:
        """Bound of the KL divergence from the searched distribution, in nats; NaN if no bound is known."""
        if self.setting.kind == "best_of":
            return best_of_n_kl(self.setting.plan.num_candidates)
        return math.nan


@dataclass(frozen=True, kw_only=True, slots=True)
class Sweep:
    """All settings, and the best scale.

    Attributes:
        settings: scales in ascending order, then searches, then other runs.
        measures: the rewards, in the given order.
        judge: the measure that decides the best scale: the first held-out one, or the first target if there is none.
        diversity: the name of the diversity in charts.
        peak: the best scale by the judge.
        level: other scales that may be the best one: their difference to the peak is not established at a level that
            allows for the number of scales. In 95 of 100 sweeps the best of the tried scales is the peak or one of
            these.
        notes: what you need to know to read the numbers.
        folder: holds `sweep.json`, `sweep.html` and the journals of the settings.
    """

    settings: tuple[SettingResult, ...]
    measures: tuple[Measure, ...]
    judge: Measure
    diversity: str
    peak: SettingResult
    level: tuple[SettingResult, ...]
    notes: tuple[str, ...] = ()
    folder: Path = Path()

    def __str__(self) -> str:
        """The sentence, and one line per setting; 80 columns."""
        names = self._shown
        rows = [
            [one.setting.label, str(one.evaluations), *(f"{one.means[n].mean:.{self.digits(n)}f}" for n in names)]
            for one in self.settings
        ]
        heads = [cut(name, 16) for name in names]
        return f"{wrapped(self.sentence)}\n\n{align(['setting', 'evaluations', *heads], rows)}"

    def _repr_html_(self) -> str:
        rows = [
            (
                one.setting.label,
                str(one.evaluations),
                *(f"{number(one.means[name].mean)} ({bounds(one.means[name])})" for name in self._shown),
            )
            for one in self.settings
        ]
        page = f"page: {self.folder / 'sweep.html'}"
        return heading(self.sentence, page) + rows_table(("setting", "evaluations", *self._shown), rows)

    @property
    def _shown(self) -> list[str]:
        return [self.target.name, *([self.judge.name] if self.held_out else []), self.diversity]

    @property
    def target(self) -> Measure:
        """The measure that was trained on."""
        return next(measure for measure in self.measures if measure.role == "target")

    @property
    def held_out(self) -> bool:
        """Whether the judge is a reward that was not trained on."""
        return self.judge.role == "heldout"

    def digits(self, name: str) -> int:
        """Decimals with which a column is written: down to the narrowest interval's half-width, 3 to 6."""
        halves = [(one.means[name].high - one.means[name].low) / 2 for one in self.settings]
        known = [half for half in halves if math.isfinite(half) and half > 0]
        return min(6, max(3, -math.floor(math.log10(min(known))))) if known else 3

    def of_kind(self, *kinds: str) -> tuple[SettingResult, ...]:
        """The settings of some kinds, in their order."""
        return tuple(one for one in self.settings if one.setting.kind in kinds)

    @property
    def sentence(self) -> str:
        """Says where the judge peaks, which scales may be as good, and the loss of diversity there."""
        peak, judge = self.peak, self.judge
        scales = [one.setting.scale for one in self.of_kind("rlg")]
        top, digits = peak.means[judge.name], self.digits(judge.name)
        kind = "held-out score" if self.held_out else "target score (no held-out reward was given)"
        said = f"The {kind}, {judge.name}, is highest at {scale_text(peak)}: {number(top.mean, digits)}"
        said += f" (95 % interval {number(top.low, digits)} to {number(top.high, digits)})" if top.known else ""
        if len(scales) > 1:
            said += f"; {self._level_text}"
        return f"{said}; {self._diversity_text}."

    @property
    def _level_text(self) -> str:
        level = [_scale(one.setting.scale) for one in self.level]
        if not level:
            return "all other scales tried are ruled out as the best one, at 95 % with allowance for the choice"
        if len(level) == len(self.of_kind("rlg")) - 1:
            return "none of the other scales tried is ruled out as the best one"
        listed = " and ".join([", ".join(level[:-1]), level[-1]] if len(level) > 1 else level)
        return (
            f"{'scales' if len(level) > 1 else 'scale'} {listed} may be the best one as well, the others not (95 %, "
            "with allowance for the choice)"
        )

    @property
    def _diversity_text(self) -> str:
        """The loss of diversity at the peak, against the base model, else against the lowest scale."""
        peak, name = self.peak, self.diversity
        lowest = self.of_kind("rlg")[0]
        reference = next((one for one in self.of_kind("rlg") if one.setting.scale == 0), lowest)
        scale = reference.setting.scale
        than = "the base model's" if scale == 0 else f"those at scale {_scale(scale)}"
        if reference is peak:
            return "what diversity other scales cost stands in the table"
        change = differences(peak, reference)[name]
        whole = reference.means[name].mean
        if not change.known or whole <= 0:
            return "what diversity costs is not known"
        low, mean, high = (100 * value / whole for value in (change.low, change.mean, change.high))
        if low <= 0 <= high:
            return (
                f"images of one prompt differ there about as much as {than} (change {_percent(mean)} %, "
                f"95 % interval {_percent(low)} to {_percent(high)} %)"
            )
        word, ends = ("less", (-high, -low)) if mean < 0 else ("more", (low, high))
        return (
            f"images of one prompt differ there {abs(mean):.0f} % {word} from each other than {than} "
            f"({ends[0]:.0f} to {ends[1]:.0f} %)"
        )


def columns_of(rows: Sequence[Mapping[str, Any]], measures: Sequence[Measure]) -> dict[str, Column]:
    """Columns of a setting from its journal rows, in the prompts' order. Raises ValueError: a sub-score is missing."""
    found: dict[str, Column] = {}
    for measure in measures:
        if measure.column not in rows[0]["values"]:
            parts = sorted(name.partition("/")[2] for name in rows[0]["values"] if name.startswith(measure.reward))
            known = ", ".join(part for part in parts if part) or "none"
            raise ValueError(f"reward {measure.reward!r} has no sub-score {measure.part!r}: there are {known}.")
        found[measure.name] = np.array([row["values"][measure.column] for row in rows], dtype=np.float64)
    for name, key in ((FEATURES, "features"), (PIXELS, "pixels")):
        if key in rows[0]["diversity"]:
            found[name] = np.array([[row["diversity"][key]] for row in rows], dtype=np.float64)
    return found


def mean_of(values: Column, *, ends: Range | None = VERDICTS, level: float = LEVEL) -> Interval:
    """Mean over values that did not fail, and its interval over prompts (`mean_interval`); unknown if all failed."""
    known = np.isfinite(values)
    prompt = np.broadcast_to(np.arange(len(values))[:, None], values.shape)
    if not known.any():
        return UNKNOWN
    return mean_interval(values[known], prompt[known], ends=ends, level=level)


def difference_of(column: Column, reference: Column, *, level: float = LEVEL) -> Interval:
    """`mean_of` of the paired differences of two columns, same prompt and sample on both sides."""
    return mean_of(column - reference, ends=ends_of(column, reference, changes=True), level=level)


def differences(one: SettingResult, reference: SettingResult) -> dict[str, Interval]:
    """Paired differences of all columns."""
    return {
        name: within(difference_of(values, reference.columns[name]), name, changes=True)
        for name, values in one.columns.items()
    }


def within(found: Interval, name: str, *, changes: bool = False) -> Interval:
    """An interval of a column, or of its changes, cut where its values end; as it is if no end is known."""
    reward = name.partition(":")[0]
    most = 1.0 if gives_verdicts(reward) else MOST.get(reward)
    if most is None or not found.known:
        return found
    return bound(found.mean, found.low, found.high, Range(-most if changes else 0.0, most))


def may_be_best(scales: Sequence[SettingResult], peak: SettingResult, name: str) -> tuple[SettingResult, ...]:
    """Scales other than the peak of a column that may be the best one.

    The peak is chosen and compared on the same prompts. A scale is ruled out if the peak is above it at 5 % over the
    number of other scales, one-sided (Bonferroni). The best scale is then ruled out in at most 5 % of sweeps, since
    some other scale must lie above it by this much without being better (Hsu 1981).
    """
    others = [one for one in scales if one is not peak]
    level = 1 - 2 * (1 - LEVEL) / max(1, len(others))
    found = [difference_of(peak.columns[name], one.columns[name], level=level) for one in others]
    return tuple(one for one, change in zip(others, found, strict=True) if not (change.known and change.low > 0))


def results_of(
    columns: Mapping[Setting, Mapping[str, Column]],
    measures: Sequence[Measure],
    *,
    evaluations: Mapping[Setting, int],
    drifts: Mapping[str, float],
    notes: Sequence[str] = (),
    folder: Path = Path(),
) -> Sweep:
    """Computes results from columns. `drifts` are distances of the tuned model under "", and of other runs under their
    names; adds the notes that the numbers call for. Raises ValueError: a reward failed on all images of a setting."""
    plain = [
        SettingResult(
            setting=setting,
            evaluations=evaluations[setting],
            drift={"run": drifts.get(setting.run, math.nan), "rlg": setting.scale**2 * drifts.get("", math.nan)}.get(
                setting.kind, math.nan
            ),
            columns=dict(given),
            means={name: within(mean_of(values), name) for name, values in given.items()},
        )
        for setting, given in columns.items()
    ]
    for one in plain:
        for measure in measures:
            if not math.isfinite(one.means[measure.name].mean):
                raise ValueError(
                    f"reward {measure.name} failed on every image of {one.setting.label}: do the prompts have what it "
                    f"reads (GenEval's records for geneval and attributes), and does it work (flowrl reward score)?"
                )
    by_scale = {one.setting.scale: one for one in plain if one.setting.kind == "rlg"}

    def beside(one: SettingResult, scale: float) -> dict[str, Interval]:
        end = by_scale.get(scale, one)
        return {} if end is one else differences(one, end)

    found = [replace(one, to_tuned=beside(one, 1.0), to_base=beside(one, 0.0)) for one in plain]
    judge = min(measures, key=lambda measure: measure.role)  # the first held-out one, or else the first target
    rlg = [one for one in found if one.setting.kind == "rlg"]
    peak = max(rlg, key=lambda one: one.means[judge.name].mean)
    level = may_be_best(rlg, peak, judge.name)
    return Sweep(
        settings=tuple(found),
        measures=tuple(measures),
        judge=judge,
        peak=peak,
        level=level,
        diversity=FEATURES if FEATURES in peak.columns else PIXELS,
        folder=folder,
        notes=(*notes, *_notes(found, measures, judge, peak)),
    )


def _notes(
    found: Sequence[SettingResult], measures: Sequence[Measure], judge: Measure, peak: SettingResult
) -> Iterator[str]:
    """Notes that follow from the numbers: rewards that failed, and a peak at the end of the scales."""
    for measure in measures:
        values = np.concatenate([one.columns[measure.name].ravel() for one in found])
        if failed := int(np.isnan(values).sum()):
            yield f"{measure.name} failed on {failed} of {len(values)} images, which count nowhere."
    scales = [one for one in found if one.setting.kind == "rlg"]
    if len(scales) > 1 and peak is scales[-1]:
        yield f"{judge.name} is highest at the largest scale tried: larger ones may be better still."


def scale_text(one: SettingResult) -> str:
    """ "scale 1.5", with what scales 0 and 1 are."""
    scale = one.setting.scale
    named = {0.0: " (the base model)", 1.0: " (the tuned model as it is)"}.get(scale, "")
    return f"scale {_scale(scale)}{named}"


def _scale(scale: float) -> str:
    return f"{scale:g}".replace("-", "\u2212")


def _percent(value: float) -> str:
    return f"{value:+.0f}".replace("-", "\u2212")


def at_same_cost(results: Sweep) -> tuple[SettingResult, tuple[SettingResult, ...]] | None:
    """The best RLG scale that needs both models, by the judge, and the searches that cost about as much."""
    mixed = [one for one in results.of_kind("rlg") if one.setting.scale not in (0.0, 1.0)]
    if not mixed:
        return None
    reference = max(mixed, key=lambda one: one.means[results.judge.name].mean)
    near = tuple(
        one
        for one in results.of_kind("best_of", "prune")
        if 1 / SAME_COST <= one.evaluations / reference.evaluations <= SAME_COST
    )
    return (reference, near) if near else None


def as_json(results: Sweep) -> dict[str, Any]:
    """All results as plain numbers; unknown ones are null."""
    found: dict[str, Any] = plain({
        "sentence": results.sentence, "judge": results.judge.name, "target": results.target.name,
        "peak": results.peak.setting.scale, "not_told_apart": [one.setting.scale for one in results.level],
        "settings": [
            {
                "key": one.setting.key, "label": one.setting.label, "kind": one.setting.kind,
                "scale": one.setting.scale, "candidates": one.setting.plan.num_candidates,
                "cuts": [{"after_step": step + 1, "kept": kept} for step, kept in one.setting.plan.cuts],
                "evaluations": one.evaluations, "looks": one.looks, "drift": one.drift, "kl_bound": one.kl_bound,
                "scores": one.means, "to_tuned": one.to_tuned, "to_base": one.to_base,
            }
            for one in results.settings
        ],
        "notes": results.notes,
    })  # fmt: skip
    return found
