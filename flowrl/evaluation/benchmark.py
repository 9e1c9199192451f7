"""The benchmarks of `flowrl eval` by name, with what is known of each before anything heavy is loaded; and results.

A benchmark is an entry of `BENCHMARKS`, whose module has `RULES` (`flowrl.evaluation.runner`): how options and prompts
are read, where images lie that exist, who judges, and how verdicts become numbers. Drawing, journals, baselines and
resuming are the runner's.

    out/result.json  out/page.html            `flowrl.evaluation.evaluate`
    out/model/, out/base/                     `subject.folder`: images/, journals, a benchmark's own result files
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from flowrl.rendering.terminal_text import Table

if TYPE_CHECKING:  # names of commands and options are asked for before anything heavy is loaded
    from flowrl.statistics.bootstrap import Interval


@dataclass(frozen=True, kw_only=True, slots=True)
class Benchmark:
    """What a caller has to know of a benchmark before it is run."""

    rules: str
    """Module with `RULES`; several benchmarks may share it, and `settings.benchmark` says which is meant."""
    samples: int = 4
    """Images or clips per prompt where nobody says: the published number."""
    videos: bool = False
    """Whether it takes models of videos; all others take models of images."""
    one_image: bool = False
    """Whether it takes one image of each prompt, however many a folder has."""
    own_names: bool = False
    """Whether it also takes a folder in which images or clips have the published names."""
    reproduces: str | None = None
    """Of a published name: what it reproduces, and against what that was checked here, in a line; it goes into
    result.json and docs/published.md, as does `reproduces` of the rewards."""


_PANEL = Benchmark(rules="flowrl.evaluation.panel")
_VIDEO_PANEL = Benchmark(rules="flowrl.evaluation.video.video_panel", videos=True)
_VIDEO_PROMPTS = replace(
    _VIDEO_PANEL,
    samples=1,
    reproduces="VideoAlign's panel (arXiv 2501.13918) on prompts that you bring; the line of the reward video_align "
    "says what its scores reproduce; no published number was repeated.",
)
_JUDGED = Benchmark(rules="flowrl.evaluation.judged.judged_rules", samples=1, one_image=True, own_names=True)
_GEDIT = replace(
    _JUDGED,
    reproduces="GEdit-Bench (stepfun-ai/Step1X-Edit): VIEScore's words byte for byte, sums equal to its own script's "
    "on rows in its layout with answers at random; GPT-4.1 was not asked.",
)
_TIIF = replace(
    _JUDGED,
    reproduces="TIIF-Bench (arXiv 2506.02161): replies of GPT-4o in its repository are read as its script reads them, "
    "sums were worked by hand; its OCR measure is left out, and no judge was asked.",
)

BENCHMARKS: dict[str, Benchmark] = {
    "diversity": _PANEL,
    "dpg_bench": Benchmark(
        rules="flowrl.evaluation.dpg_bench",
        reproduces="DPG-Bench (arXiv 2403.05135): its prompts, dependencies and sums, checked on a file worked by "
        "hand; its judge mPLUG-large is asked by its own script on the grids that are written, another judge gives "
        "another metric.",
    ),
    "drawbench": replace(
        _PANEL,
        samples=5,
        reproduces="DrawBench's prompts (arXiv 2205.11487) with the scorers of DiffusionNFT, whose own lines say what "
        "each of them reproduces; the published numbers were not repeated.",
    ),
    "gedit_cn": _GEDIT,
    "gedit_en": _GEDIT,
    "geneval": Benchmark(
        rules="flowrl.evaluation.geneval",
        reproduces="GenEval (arXiv 2310.11513): the 553 prompts byte for byte, its rules checked against worked "
        "examples and an independent reading; judge `openmmlab` is the benchmark's own detector, its network equal to "
        "mmdet 3.3.0's on random weights; no published score was repeated.",
    ),
    "geneval2": replace(
        _JUDGED,
        reproduces="GenEval 2 (facebookresearch/GenEval2): skills and numbers by atoms equal to its own script's on "
        "its 800 prompts with answers at random; its judge, Qwen3-VL-8B-Instruct, was not run.",
    ),
    "hpdv2": replace(
        _PANEL,
        samples=1,
        reproduces="The test prompts of HPDv2 (arXiv 2306.09341), whose scorers' own lines say what each of them "
        "reproduces; the published numbers were not repeated.",
    ),
    "imgedit": replace(
        _JUDGED,
        reproduces="ImgEdit-Bench, basic suite (arXiv 2505.20275): sums equal to its own script's on its 737 edits "
        "with answers at random; GPT-4.1 was not asked.",
    ),
    "ocr": replace(
        _PANEL,
        samples=1,
        reproduces="Flow-GRPO's test of text (arXiv 2505.05470) with the edit distance of its reward; published "
        "numbers were read by PaddleOCR 2.9.1, and the default RapidOCR moves the number.",
    ),
    "panel": _PANEL,
    "pick_score_test": replace(
        _PANEL,
        samples=1,
        reproduces="Flow-GRPO's PickScore test (arXiv 2505.05470) as the line of pick_score says; the published "
        "numbers were not repeated.",
    ),
    "t2i_compbench": Benchmark(
        rules="flowrl.evaluation.t2i_compbench",
        reproduces="T2I-CompBench (arXiv 2307.06350): names of images and sums, checked on numbers worked by hand; "
        "the detectors are those of its own scripts, which read what is drawn here.",
    ),
    "tiif_long": _TIIF,
    "tiif_short": _TIIF,
    "unigenbench": Benchmark(
        rules="flowrl.evaluation.unigenbench.unigenbench",
        reproduces="UniGenBench (arXiv 2508.20751): question and meanings of test points byte for byte from "
        "CodeGoat24/UniGenBench at 49d0bce; reading of prompt files and replies, sums and result files checked on the "
        "benchmark's own examples; no published judge was asked, and a first try is greedy here.",
    ),
    "vbench": Benchmark(
        rules="flowrl.evaluation.video.vbench",
        samples=5,
        videos=True,
        own_names=True,
        reproduces="VBench (arXiv 2311.17982): its own package 0.1.5 measures, in an environment of yours; names of "
        "clips, bounds, weights and sums as in its scripts, a worked example of them held by a test; the package was "
        "not run here.",
    ),
    "video_align": _VIDEO_PROMPTS,
    "video_panel": _VIDEO_PANEL,
    "videogen_eval": _VIDEO_PROMPTS,
    "wise": replace(
        _JUDGED,
        reproduces="WISE (arXiv 2503.07265), the prompts and rule of 2025: sums equal to its own script's on its 1000 "
        "prompts with answers at random; GPT-4o was not asked.",
    ),
    "wise_verified": replace(
        _JUDGED,
        reproduces="WISE's verified edition (PKU-YuanGroup/WISE): sums equal to its own script's with answers at "
        "random; its judge Qwen3.5-35B-A3B was not run.",
    ),
}

NO_TRAINING = ", not of another training of the same model"


@dataclass(frozen=True, kw_only=True, slots=True)
class SideResult:
    """What was found of a subject, or of the base."""

    rows: Sequence[Mapping[str, Any]]
    metrics: Mapping[str, float]
    intervals: Mapping[str, Interval]


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """What a benchmark found; the command prints it, result.json and the page are written of it."""

    headline: str
    """The result in one or two sentences of plain text; it opens the output and the page."""
    rows: tuple[Mapping[str, Any], ...]
    """One mapping per image of the subject, of plain JSON values (NaN is written as null)."""
    base_rows: tuple[Mapping[str, Any], ...] = ()
    metrics: Mapping[str, float]
    """`eval/<benchmark>/<metric>` -> number of the subject. Means over several models are taken of these."""
    base_metrics: Mapping[str, float] = field(default_factory=dict)
    intervals: Mapping[str, Interval] = field(default_factory=dict)
    """Scores with intervals, in the order in which the page draws them."""
    base_intervals: Mapping[str, Interval] = field(default_factory=dict)
    differences: Mapping[str, Interval] = field(default_factory=dict)
    """Paired differences, subject minus base, likewise."""
    claim: str = f"prompts of this kind{NO_TRAINING}"
    """What the intervals speak of."""
    tables: tuple[Table, ...]
    notes: tuple[str, ...] = ()
    """Warnings and facts without which the numbers mislead; printed, and on top of the page."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Judge, versions, settings: plain JSON values for result.json and the page's last section."""
    sections: tuple[str, ...] = ()
    """Further parts of the page as HTML, made by `flowrl.rendering.markup.section`; they stand after the tables."""


def result_of(
    benchmark: str, headline: str, sides: Sequence[SideResult], *, changes: Mapping[str, Interval] | None = None,
    tables: Sequence[Table], notes: Sequence[str] = (), facts: Mapping[str, Any], claim: str = "",
    sections: Sequence[str] = (),
) -> Result:  # fmt: skip
    """The result of a subject, or of a subject and a base.

    Args:
        benchmark: which begins the full names of metrics.
        headline: the result in a sentence.
        sides: the subject, and the base if there is one.
        changes: paired differences of the two.
        tables: to print.
        notes: without which the numbers mislead.
        facts: judge, versions, settings.
        claim: what the intervals speak of; empty for prompts of this kind.
        sections: further parts of the page.
    """
    named = [{f"eval/{benchmark}/{name}": value for name, value in side.metrics.items()} for side in sides]
    base = sides[1:]
    return Result(
        headline=headline, rows=tuple(sides[0].rows), base_rows=tuple(base[0].rows) if base else (),
        metrics=named[0], base_metrics=named[1] if base else {}, intervals=sides[0].intervals,
        base_intervals=base[0].intervals if base else {}, differences=dict(changes or {}),
        claim=claim or f"prompts of this kind{NO_TRAINING}", tables=tuple(tables), notes=tuple(notes), facts=facts,
        sections=tuple(sections),
    )  # fmt: skip
