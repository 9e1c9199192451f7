"""Arguments of `flowrl eval`; nothing heavy is imported here."""

from __future__ import annotations

import argparse
from pathlib import Path

from flowrl.commands.sampling_arguments import add_sampling_arguments, count
from flowrl.evaluation.benchmark import BENCHMARKS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what `flowrl eval` takes."""
    add = parser.add_argument
    parser.description = (
        "Draw images for a benchmark's prompts, judge them, and write a table, result.json and page.html. Several "
        "MODELs count as trainings of one method. The same command resumes where it stopped."
    )
    add("models", nargs="*", default=[], metavar="MODEL",
        help="run folder, LoRA or model folder, hub id or asset:NAME (default: asset:tiny-sd3, of videos "
        "asset:tiny-wan)")  # fmt: skip
    add("--benchmark", default="geneval", metavar="NAME", help=f"{', '.join(BENCHMARKS)} (default: geneval)")
    add("--images", type=Path, metavar="FOLDER", help="images or clips to judge instead (GenEval's layout)")
    add(
        "--baseline", metavar="NAME",
        help="what MODEL is compared to: a model, a folder of images, or 'base', the run's model before training",
    )  # fmt: skip
    add("--lora", type=Path, metavar="FOLDER", help="LoRA to add to MODEL")
    add("--prompts", metavar="FILE", help="file of prompts, or published or world (default: the benchmark's)")
    add("--num-prompts", type=count, metavar="N", help="number of prompts, spread evenly over the file (default: all)")
    add("--samples", type=count, metavar="N",
        help="images or clips per prompt (default: the published number: drawbench and vbench 5, those that a judge "
        "reads, hpdv2, ocr, pick_score_test, video_align and videogen_eval 1; else 4)")  # fmt: skip
    add(
        "--judge", metavar="JUDGE",
        help="a judge that the benchmark knows by name, '{server: URL, model: NAME}', or a YAML file with such a "
        "mapping (default: the one that fits the prompts)",
    )  # fmt: skip
    add("--option", action="append", default=[], metavar="KEY=VALUE",
        help="option of the benchmark, its judge or a reward; may be repeated")  # fmt: skip
    add("--dry-run", action="store_true", help="estimate what judging would take, draw nothing (unigenbench)")
    add("--compare", nargs="+", metavar="RESULT",
        help="write a leaderboard of finished evaluations: folders that are or hold results, or NAME=FOLDER,FOLDER for "
        "trainings of one method; nothing is drawn or judged")  # fmt: skip
    add("--across", action="append", metavar="CONDITION",
        help="with --compare: a condition that may differ among results, such as num_steps; repeatable")  # fmt: skip
    add("--model-card", nargs="+", metavar="RESULT",
        help="add finished evaluations of one model to the model-index of a README.md, that of --out or of the first "
        "RESULT")  # fmt: skip
    add("--train-prompts", metavar="FILE",
        help="training prompts to check for overlap with the benchmark (default: the run's)")  # fmt: skip
    add("--out", type=Path, metavar="PATH",
        help="folder to write (default: evaluations/BENCHMARK-MODEL, or evaluations/leaderboard)")  # fmt: skip
    add_sampling_arguments(parser, batch_size="64 for embedded models, else 8; of videos 16 and 1")
