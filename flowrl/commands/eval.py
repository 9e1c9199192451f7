"""`flowrl eval`: measures models and folders of images; puts finished evaluations in a leaderboard or a model card."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import flowrl
from flowrl.commands.sampling_arguments import add_out, add_sampling_arguments, add_several, count, option_pairs
from flowrl.evaluation.benchmark import BENCHMARKS
from flowrl.runtime.scrubbing import say as print


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what `flowrl eval` takes."""
    add = parser.add_argument
    parser.description = (
        "Draw images for a benchmark's prompts, judge them, and write a table, result.json and page.html. Several "
        "MODELs count as trainings of one method. The same command resumes where it stopped."
    )
    add(
        "models",
        nargs="*",
        default=[],
        metavar="MODEL",
        help="run folder, LoRA or model folder, hub id or asset:NAME (default: asset:tiny-sd3, for videos "
        "asset:tiny-wan)",
    )
    add("--benchmark", default="geneval", metavar="NAME", help=f"{', '.join(BENCHMARKS)} (default: geneval)")
    add("--images", type=Path, metavar="FOLDER", help="images or clips to judge instead (GenEval's layout)")
    add(
        "--baseline",
        metavar="NAME",
        help="what to compare MODEL with: a model, a folder of images, or 'base', the run's model before training",
    )
    add("--lora", type=Path, metavar="FOLDER", help="LoRA to add to MODEL")
    add("--prompts", metavar="FILE", help="file of prompts, or published or world (default: the benchmark's)")
    add("--num-prompts", type=count, metavar="N", help="number of prompts, spread evenly over the file (default: all)")
    add(
        "--samples",
        type=count,
        metavar="N",
        help="images or clips per prompt (default: the published number: drawbench and vbench 5, those that a judge "
        "reads, hpdv2, ocr, pick_score_test, video_align and videogen_eval 1; else 4)",
    )
    add(
        "--judge",
        metavar="JUDGE",
        help="a judge that the benchmark knows by name, '{server: URL, model: NAME}', or a YAML file with such a "
        "mapping (default: the one that fits the prompts)",
    )
    add_several(parser, "--option", "KEY=VALUE", "option of the benchmark, its judge or a reward", dest="options")
    add("--dry-run", action="store_true", help="estimate what judging would take, draw nothing (unigenbench)")
    add(
        "--compare",
        nargs="+",
        metavar="RESULT",
        help="write a leaderboard of finished evaluations: folders with results, or NAME=FOLDER,FOLDER for "
        "trainings of one method; nothing is drawn or judged",
    )
    add(
        "--across",
        action="append",
        metavar="CONDITION",
        help="with --compare: a condition that may differ among results, such as num_steps; repeatable",
    )
    add(
        "--model-card",
        nargs="+",
        metavar="RESULT",
        help="add finished evaluations of one model to the model-index of a README.md: --out, or the first RESULT's",
    )
    add(
        "--train-prompts",
        metavar="FILE",
        help="training prompts to check for overlap with the benchmark (default: the run's)",
    )
    add_out(parser, "folder to write", "evaluations/BENCHMARK-MODEL, or evaluations/leaderboard")
    add_sampling_arguments(parser, batch_size="64 for embedded models, else 8; for videos 16 and 1", cache=True)


def run(parsed: argparse.Namespace) -> int:
    """Evaluates, or reads finished evaluations, and prints the result; returns 0."""
    given = dict(vars(parsed))
    compared, across, of_card = given.pop("compare"), given.pop("across"), given.pop("model_card")
    if compared is not None:
        _refuse_others(parsed, "compare", ("across", "out"))
        board = flowrl.leaderboard(compared, across=across or (), out=parsed.out)
        print(f"{board.text}\n\nwrote {board.folder / 'leaderboard.html'}, leaderboard.json and leaderboard.md")
        return 0
    if of_card is not None:
        _refuse_others(parsed, "model_card", ("out",))
        print(flowrl.model_card(of_card, out=parsed.out).text)
        return 0
    if across is not None:
        raise ValueError("--across says what may differ under --compare: give that, or leave --across out.")
    found = flowrl.evaluate(**{**given, "options": option_pairs(parsed.options)})
    print(("\n" if len(parsed.models) > 1 else "") + found.text)
    print(f"\nwrote {found.folder / 'page.html'} and result.json")
    return 0


def _refuse_others(parsed: argparse.Namespace, flag: str, allowed: Sequence[str]) -> None:
    """Refuses flags about drawing and judging if nothing is drawn or judged."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    given = [
        f"`{name}`"
        for name, value in vars(parsed).items()
        if name not in (flag, *allowed) and value != parser.get_default(name)
    ]
    if given:
        hint = " A model is evaluated against another with --baseline." if flag == "compare" else ""
        raise ValueError(
            f"`{flag}` reads finished evaluations, so {', '.join(given)} has no place beside it: leave it out.{hint}"
        )
