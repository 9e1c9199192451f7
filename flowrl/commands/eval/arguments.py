"""Arguments of `flowrl eval`; nothing heavy is imported here."""

from __future__ import annotations

import argparse
from pathlib import Path

from flowrl.commands.eval.benchmark import BENCHMARKS


def add_eval(parser: argparse.ArgumentParser) -> None:
    """Puts the arguments of `flowrl eval` on its parser; `flowrl.commands.eval.run.evaluate` takes what it parses."""
    parser.add_argument(
        "models", nargs="*", metavar="MODEL",
        help="run folder, LoRA or model folder, hub id or asset:NAME (asset:tiny-sd3); several are trainings of one "
        "method",
    )  # fmt: skip
    parser.add_argument("--benchmark", default="geneval", metavar="NAME", help=f"{', '.join(BENCHMARKS)} (geneval)")
    parser.add_argument("--images", type=Path, metavar="FOLDER", help="judge these images (GenEval's layout) instead")
    parser.add_argument(
        "--compare", metavar="BASE", help="a model or a folder of images; base is a run's model before training"
    )
    parser.add_argument("--lora", type=Path, metavar="FOLDER", help="a LoRA to add to MODEL")
    parser.add_argument("--prompts", metavar="FILE", help="prompts, or published or world (the benchmark's default)")
    parser.add_argument("--num-prompts", type=int, metavar="N", help="only so many, spread evenly over the list")
    parser.add_argument("--samples", type=int, metavar="N", help="images of each prompt (4)")
    parser.add_argument("--steps", type=int, metavar="N", help="denoising steps (a run's own, embedded 10, else 40)")
    parser.add_argument(
        "--guidance", type=float, metavar="W", help="guidance scale (a run's own, embedded 3, else 4.5)"
    )
    parser.add_argument("--max-sequence-length", type=int, metavar="N", help="T5 tokens (a run's own, 16, else 128)")
    parser.add_argument("--dtype", help="of the network: float32, bfloat16, float16 (a run's own, else float32)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the start noise (0)")
    parser.add_argument("--batch-size", type=int, metavar="N", help="images drawn at once (embedded 64, else 8)")
    parser.add_argument("--judge", metavar="NAME", help="the benchmark's judge (the one that fits the prompts)")
    parser.add_argument(
        "--option", action="append", default=[], metavar="KEY=VALUE", help="of benchmark or judge; may be repeated"
    )
    parser.add_argument("--dry-run", action="store_true", help="unigenbench: say what judging would take, and end")
    parser.add_argument("--train-prompts", metavar="FILE", help="search these for the benchmark's (a run's own)")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="where to write (evaluations/BENCHMARK-MODEL)")
