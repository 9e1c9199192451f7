"""The command line: `flowrl train | sample | report | pretrain`.

Heavy libraries are imported inside the commands, so that `--help` and configuration errors answer at once. Errors that
a user can mend are one paragraph on standard error and exit code 1; an interrupt exits with 130.
"""

from __future__ import annotations

import argparse
import difflib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

COMMANDS = ("train", "sample", "report", "pretrain")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit code."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments and not arguments[0].startswith("-") and arguments[0] not in COMMANDS:
        near = difflib.get_close_matches(arguments[0], COMMANDS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(COMMANDS)}"
        print(f"flowrl: there is no command {arguments[0]!r}: {hint}", file=sys.stderr)
        return 1
    parsed = _parser().parse_args(arguments)
    try:
        return int(parsed.run(parsed))
    except KeyboardInterrupt:
        print(
            "\nStopped. A training run continues from its last checkpoint with 'flowrl train resume=RUN'.",
            file=sys.stderr,
        )
        return 130
    except (ValueError, OSError) as error:
        print(f"flowrl: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="flowrl", description="Reinforcement learning for diffusion and flow models.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    train = commands.add_parser(
        "train", help="train a LoRA with reinforcement learning",
        description="Train a LoRA. Without CONFIG the embedded model is trained, a few minutes on two cores. "
        "resume=RUN continues a run with its own configuration.",
    )  # fmt: skip
    train.add_argument("config", nargs="?", help="a YAML file, or the name of one that ships with flowrl")
    train.add_argument("overrides", nargs="*", metavar="key=value", help="settings that replace the file's")
    train.set_defaults(run=_train)

    sample = commands.add_parser("sample", help="draw images from a base or tuned model")
    sample.add_argument(
        "source", nargs="?", default="asset:tiny-sd3", help="run folder, model folder, hub id or asset:NAME"
    )
    sample.add_argument("--prompt", action="append", default=[], help="a prompt; may be given several times")
    sample.add_argument("--prompts", type=Path, help="a .txt or .jsonl file of prompts")
    sample.add_argument("--seeds", default="0", help="seeds of the start noise: 0,3,7 or 0-3")
    sample.add_argument("--base", action="store_true", help="of a run: the model before training")
    sample.add_argument("--lora", type=Path, help="a LoRA folder to add to a model")
    sample.add_argument("--num-steps", type=int, help="denoising steps (a run's own, embedded model 10, else 40)")
    sample.add_argument(
        "--guidance-scale", type=float, help="classifier-free guidance (a run's own, embedded model 3, else 4.5)"
    )
    sample.add_argument(
        "--max-sequence-length", type=int, help="T5 tokens (a run's own, 16 for the embedded model, else 128)"
    )
    sample.add_argument("--out", type=Path, default=Path("samples"), help="folder of the PNG files and the grid")
    sample.set_defaults(run=_sample)

    report = commands.add_parser("report", help="write a run's report.html")
    report.add_argument("folder", type=Path, help="run folder")
    report.add_argument("--out", type=Path, help="file to write (RUN/report.html)")
    report.set_defaults(run=_report)

    pretrain = commands.add_parser("pretrain", help="make the embedded model from scratch (hours on two cores)")
    pretrain.add_argument("overrides", nargs="*", metavar="key=value", help="settings, for example out=runs/pretrain")
    pretrain.set_defaults(run=_pretrain)
    return parser


def _train(parsed: argparse.Namespace) -> int:
    from flowrl.launch import train

    given = [text for text in (parsed.config, *parsed.overrides) if text is not None]
    config = None if not given or "=" in given[0] else given[0]
    return train(config, given if config is None else given[1:])


def _sample(parsed: argparse.Namespace) -> int:
    from flowrl.sample import sample

    return sample(parsed)


def _report(parsed: argparse.Namespace) -> int:
    from flowrl.report import write_report

    print(f"wrote {write_report(parsed.folder, parsed.out)}")
    return 0


def _pretrain(parsed: argparse.Namespace) -> int:
    from flowrl.recipes.pretrain import main as pretrain
    from flowrl.recipes.pretrain import pretrain_config

    print(f"wrote {pretrain(pretrain_config(parsed.overrides))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
