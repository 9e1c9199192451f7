"""`flowrl train` called from a test: its errors are raised, and its exit code is returned."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence

from flowrl.commands.train import run


def train(config: str, words: Sequence[str] = ()) -> int:
    """Trains a configuration with `key=value` settings."""
    return run(Namespace(arguments=[config, *words], card=None))
