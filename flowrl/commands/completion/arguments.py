"""Arguments of `flowrl completion`; nothing heavy is imported here."""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what `flowrl completion` takes."""
    parser.description = (
        "Print what completes commands, configurations and keys in a shell. For this session: "
        'bash: eval "$(flowrl completion bash)"; zsh: eval "$(flowrl completion zsh)"; '
        "fish: flowrl completion fish | source"
    )
    parser.add_argument("shell", choices=("bash", "zsh", "fish"), help="the shell")
