"""Benchmarks of models and of folders of images: `flowrl eval MODEL --benchmark NAME`.

A benchmark is a module with two functions, entered in `BENCHMARKS`:

    check(settings)            refuses what can be known to be wrong before weights load (raises ValueError)
    run(settings) -> Result    draws or reads the images of the subject, and of the base if there is one, judges them

`run` takes images from `flowrl.generation.generate`: `images_of(settings, subject, prompts)` draws what is missing
(nothing where the subject is a folder of images) and returns them in order. It keeps a journal of verdicts in
`subject.folder`, so that the same command resumes where it stopped; `flowrl.generation.journal` has one. It writes
no page and prints no table: the command does, from the `Result`.

    out/result.json  out/page.html            written by the command
    out/model/, out/base/                     `subject.folder`: images/, the journal, a benchmark's own result files
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from flowrl.rendering.terminal_text import Table

if TYPE_CHECKING:  # names of commands and options are asked for before anything heavy is loaded
    from flowrl.statistics.bootstrap import Interval

JUDGED = "flowrl.evaluation.judged.judged_runner"
"""The runner of the benchmarks that judge one image of each prompt."""

BENCHMARKS: dict[str, str] = {
    "diversity": "flowrl.evaluation.panel_runner",
    "dpg_bench": "flowrl.evaluation.dpg_bench_runner",
    "drawbench": "flowrl.evaluation.panel_runner",
    "gedit_cn": JUDGED,
    "gedit_en": JUDGED,
    "geneval": "flowrl.evaluation.geneval_runner",
    "geneval2": JUDGED,
    "hpdv2": "flowrl.evaluation.panel_runner",
    "imgedit": JUDGED,
    "ocr": "flowrl.evaluation.panel_runner",
    "panel": "flowrl.evaluation.panel_runner",
    "pick_score_test": "flowrl.evaluation.panel_runner",
    "t2i_compbench": "flowrl.evaluation.t2i_compbench_runner",
    "tiif_long": JUDGED,
    "tiif_short": JUDGED,
    "unigenbench": "flowrl.evaluation.unigenbench_runner",
    "vbench": "flowrl.evaluation.video.vbench_runner",
    "video_align": "flowrl.evaluation.video.video_panel_runner",
    "video_panel": "flowrl.evaluation.video.video_panel_runner",
    "videogen_eval": "flowrl.evaluation.video.video_panel_runner",
    "wise": JUDGED,
    "wise_verified": JUDGED,
}
"""Name -> module with `check` and `run`; a module may serve several names, `settings.benchmark` says which is meant."""

OF_VIDEOS = ("vbench", "video_align", "video_panel", "videogen_eval")
"""The benchmarks that take models of videos; all others take models of images."""

OF_ONE_IMAGE = tuple(name for name, runner in BENCHMARKS.items() if runner == JUDGED)
"""The benchmarks that take one image of each prompt, however many a folder has."""

OF_OWN_NAMES = (*OF_ONE_IMAGE, "vbench")
"""The benchmarks that also take a folder in which images or clips have the published names."""

USUAL_SAMPLES: dict[str, int] = {
    **dict.fromkeys((*OF_ONE_IMAGE, "hpdv2", "ocr", "pick_score_test", "video_align", "videogen_eval"), 1),
    "drawbench": 5, "vbench": 5,
}  # fmt: skip
"""Images or clips per prompt where --samples does not say, the published numbers; 4 for the benchmarks not here."""

_GEDIT = (
    "GEdit-Bench (stepfun-ai/Step1X-Edit): VIEScore's words byte for byte, sums equal to its own script's on rows in "
    "its layout with answers at random; GPT-4.1 was not asked."
)
_TIIF = (
    "TIIF-Bench (arXiv 2506.02161): replies of GPT-4o in its repository are read as its script reads them, sums were "
    "worked by hand; its OCR measure is left out, and no judge was asked."
)
_VIDEO_PROMPTS = (
    "VideoAlign's panel (arXiv 2501.13918) on prompts that you bring; the line of the reward video_align says what "
    "its scores reproduce; no published number was repeated."
)
REPRODUCES: dict[str, str] = {
    "dpg_bench": (
        "DPG-Bench (arXiv 2403.05135): its prompts, dependencies and sums, checked on a file worked by hand; its "
        "judge mPLUG-large is asked by its own script on the grids that are written, another judge gives another "
        "metric."
    ),
    "drawbench": (
        "DrawBench's prompts (arXiv 2205.11487) with the scorers of DiffusionNFT, whose own lines say what each of "
        "them reproduces; the published numbers were not repeated."
    ),
    "gedit_cn": _GEDIT,
    "gedit_en": _GEDIT,
    "geneval": (
        "GenEval (arXiv 2310.11513): the 553 prompts byte for byte, its rules checked against worked examples and an "
        "independent reading; judge `openmmlab` is the benchmark's own detector, its network equal to mmdet 3.3.0's "
        "on random weights; no published score was repeated."
    ),
    "geneval2": (
        "GenEval 2 (facebookresearch/GenEval2): skills and numbers by atoms equal to its own script's on its 800 "
        "prompts with answers at random; its judge, Qwen3-VL-8B-Instruct, was not run."
    ),
    "hpdv2": (
        "The test prompts of HPDv2 (arXiv 2306.09341), whose scorers' own lines say what each of them reproduces; the"
        " published numbers were not repeated."
    ),
    "imgedit": (
        "ImgEdit-Bench, basic suite (arXiv 2505.20275): sums equal to its own script's on its 737 edits with answers "
        "at random; GPT-4.1 was not asked."
    ),
    "ocr": (
        "Flow-GRPO's test of text (arXiv 2505.05470) with the edit distance of its reward; published numbers "
        "were read by PaddleOCR 2.9.1, and the default RapidOCR moves the number."
    ),
    "pick_score_test": (
        "Flow-GRPO's PickScore test (arXiv 2505.05470) as the line of pick_score says; the published numbers were not"
        " repeated."
    ),
    "t2i_compbench": (
        "T2I-CompBench (arXiv 2307.06350): names of images and sums, checked on numbers worked by hand; the detectors"
        " are those of its own scripts, which read what is drawn here."
    ),
    "tiif_long": _TIIF,
    "tiif_short": _TIIF,
    "unigenbench": (
        "UniGenBench (arXiv 2508.20751): question and meanings of test points byte for byte from "
        "CodeGoat24/UniGenBench at 49d0bce; reading of prompt files and replies, sums and result files checked on the"
        " benchmark's own examples; no published judge was asked, and a first try is greedy here."
    ),
    "vbench": (
        "VBench (arXiv 2311.17982): its own package 0.1.5 measures, in an environment of yours; names of clips, "
        "bounds, weights and sums as in its scripts, a worked example of them held by a test; the package was not run"
        " here."
    ),
    "video_align": _VIDEO_PROMPTS,
    "videogen_eval": _VIDEO_PROMPTS,
    "wise": (
        "WISE (arXiv 2503.07265), the prompts and rule of 2025: sums equal to its own script's on its 1000 prompts "
        "with answers at random; GPT-4o was not asked."
    ),
    "wise_verified": (
        "WISE's verified edition (PKU-YuanGroup/WISE): sums equal to its own script's with answers at random; its "
        "judge Qwen3.5-35B-A3B was not run."
    ),
}
"""Benchmark with a published name -> what it reproduces and against what that was checked here, in a line; it goes into
result.json and docs/published.md, as does `reproduces` of the rewards."""

NO_TRAINING = ", not of another training of the same model"


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """What a benchmark found; the command prints it, writes result.json and the page."""

    headline: str
    """The result in one or two sentences of plain text; it opens the output and the page."""
    rows: tuple[Mapping[str, Any], ...]
    """One mapping per image of the subject, of plain JSON values (NaN is written as null)."""
    base_rows: tuple[Mapping[str, Any], ...] = ()
    metrics: Mapping[str, float]
    """`eval/<benchmark>/<metric>` -> number of the subject. Means over several MODELs are taken of these."""
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
