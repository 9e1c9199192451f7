"""`flowrl sample`: images or videos of a base or tuned model."""

from __future__ import annotations

import argparse
from pathlib import Path

import flowrl
from flowrl.commands.sampling_arguments import add_out, add_sampling_arguments, add_several
from flowrl.rendering.markup import plural
from flowrl.runtime.scrubbing import say as print


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what `flowrl sample` takes."""
    add = parser.add_argument
    add(
        "model",
        nargs="?",
        default="asset:tiny-sd3",
        metavar="MODEL",
        help="run folder, LoRA or model folder, hub id or asset:NAME (default: asset:tiny-sd3)",
    )
    add_several(parser, "--prompt", "TEXT", "a prompt", dest="prompts")
    add("--prompts", dest="prompt_file", metavar="FILE", help="file of prompts (.txt, .jsonl or .csv) or asset:NAME")
    add_several(parser, "--source", "FILE", "image that --prompt edits or animates", type=Path)
    add_out(parser, "folder of the image or video files and of grid.png", Path("samples"))
    add("--before-training", action="store_true", help="use the run's model before training")
    add("--lora", type=Path, action="append", default=[], metavar="FOLDER",
        help="LoRA to add; may be repeated with --rlg")  # fmt: skip
    add = parser.add_argument_group("guidance from the base to the tuned model").add_argument
    add("--rlg", metavar="SCALES", help="one scale per LoRA: 0 is the base, 1 the tuned model, beyond 1 further")
    add("--rlg-from", type=int, metavar="M", help="leave the first M steps to the tuned model alone")
    add("--rlg-interval", metavar="LOW,HIGH", help="leave noise levels outside this range to the tuned model alone")
    add_sampling_arguments(parser, batch_size="16, for videos 1", several_seeds=True, base_guidance=True, cache=True)


def run(parsed: argparse.Namespace) -> int:
    """Draws, and prints where the files are."""
    made = flowrl.sample(**vars(parsed))
    what = plural(len(made.prompts), "video" if made.fps else "image") + (" with sound" if made.sound else "")
    print(f"wrote {what} and grid.png to {parsed.out}: {made.drawn_with}")
    return 0
