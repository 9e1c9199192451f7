"""Arguments that mean the same in every command: drawing, rewards and their prompts, a configuration and its settings.

Nothing heavy is imported here.
"""

from __future__ import annotations

import argparse
import inspect
import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from flowrl.config.bounds import GRACE, GUIDANCE, IMAGES, SIDE, STEPS, THREADS
from flowrl.config.overrides import typed_settings
from flowrl.runtime.private_names import ActionsContainer


def add_sampling_arguments(
    parser: argparse.ArgumentParser,
    *,
    batch_size: str,
    several_seeds: bool = False,
    base_guidance: bool = False,
    cache: bool = False,
) -> None:
    """Adds the flags of a command that draws images.

    Args:
        batch_size: default of `--batch-size`, a number or words.
        several_seeds: take `--seeds LIST` instead of `--seed N`.
        base_guidance: the command guides by two models, which may have different guidance scales.
        cache: the command may draw with First-Block Cache.
    """
    group = parser.add_argument_group("sampling")
    own = "(default: the run's, else what the checkpoint is made for)"
    of_base = "guidance scale of the base model under --rlg (default: that of the tuned model)"
    tokens = "text tokens to read (default: the run's; embedded models 16; else the family's)"
    cached = "leave out blocks at steps where the first one changed by less than this share (default: 0, never)"
    rows: list[tuple[str, Any, str, str]] = [
        ("--steps", steps, "N", f"denoising steps {own}"),
        ("--guidance", scale, "W", f"guidance scale {own}"),
        *[("--base-guidance", scale, "W", of_base)] * base_guidance,
        ("--max-sequence-length", count, "N", tokens),
        ("--dtype", None, "NAME", "network precision: float32, bfloat16 or float16 (default: the run's, else float32)"),
        *[("--first-block-cache", share, "SHARE", cached)] * cache,
        ("--height", pixels, "N", "height in pixels (default: the run's, else the model's)"),
        ("--width", pixels, "N", "width in pixels (default: the run's, else the model's)"),
    ]
    for flag, kind, metavar, said in rows:
        group.add_argument(flag, type=kind, metavar=metavar, help=said)
    if several_seeds:
        several = "seeds of the start noise, such as 0,3,7 or 0-3 (default: 0)"
        group.add_argument("--seeds", default="0", metavar="LIST", help=several)
    else:
        add_seed(group)
    add_batch_size(group, batch_size)
    add_device(group)


def count(text: str, most: int = 1_000_000) -> int:
    """A whole number of at least 1, as a flag's value. Raises argparse.ArgumentTypeError: none, or more than `most`."""
    if not text.isdecimal() or len(text) > 18 or not 1 <= int(text) <= most:
        raise argparse.ArgumentTypeError(f"must be a whole number from 1 to {most:,}, got {text!r}")
    return int(text)


steps, images, pixels, threads = (partial(count, most=most) for most in (STEPS, IMAGES, SIDE, THREADS))
"""`count` of denoising steps, of images, of the pixels of a side and of CPU threads."""


def number(text: str, most: float) -> float:
    """A number from 0 to `most`, as a flag's value. Raises argparse.ArgumentTypeError: it is none."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value <= most:
        raise argparse.ArgumentTypeError(f"must be a number from 0 to {most:g}, got {text!r}")
    return value


scale, seconds, share = (partial(number, most=most) for most in (GUIDANCE, GRACE, 1))
"""A guidance scale; seconds, a day at most; a share."""


def add_count(parser: ActionsContainer, flag: str, default: int, said: str) -> None:
    """Adds a flag for a whole number, which is told with its default."""
    parser.add_argument(flag, type=count, default=default, metavar="N", help=f"{said} (default: {default})")


def add_several(parser: ActionsContainer, flag: str, metavar: str, said: str, **more: Any) -> None:
    """Adds a flag that may be repeated."""
    parser.add_argument(flag, action="append", default=[], metavar=metavar, help=f"{said}; may be repeated", **more)


def add_out(parser: ActionsContainer, said: str, default: Path | str) -> None:
    """Adds `--out`; a default that is a path becomes the flag's value, one in words is only told."""
    value = default if isinstance(default, Path) else None
    parser.add_argument("--out", type=Path, default=value, metavar="PATH", help=f"{said} (default: {default})")


def add_seed(parser: ActionsContainer) -> None:
    """Adds `--seed`."""
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of all random draws (default: 0)")


def add_batch_size(parser: ActionsContainer, default: str) -> None:
    """Adds `--batch-size`; a default that is a number becomes the flag's value."""
    parser.add_argument(
        "--batch-size",
        type=images,
        default=int(default) if default.isdecimal() else None,
        metavar="N",
        help=f"images drawn or scored at once (default: {default})",
    )


def add_device(parser: ActionsContainer) -> None:
    """Adds `--device`."""
    parser.add_argument("--device", metavar="NAME", help="cpu, cuda or cuda:N (default: cuda if there is one)")


def option_pairs(texts: Sequence[str]) -> dict[str, str]:
    """What `--option KEY=VALUE` says, by key. Raises ValueError: a text is no such pair."""
    found = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise ValueError(f"--option {text!r} must be KEY=VALUE, such as --option detector=FOLDER.")
        found[key] = value
    return found


def config_and_settings(words: Sequence[str], function: Callable[..., object]) -> tuple[str | None, dict[str, Any]]:
    """What `[CONFIG] key=value ...` says: the configuration, None where none is named, and settings for a function."""
    named = bool(words) and "=" not in words[0]
    return words[0] if named else None, settings_for(words[1:] if named else words, function)


def settings_for(words: Sequence[str], function: Callable[..., object]) -> dict[str, Any]:
    """`key=value` words as settings of a function, whose own parameters they cannot set."""
    own = inspect.signature(function).parameters.values()
    return typed_settings(words, taken=[one.name for one in own if one.kind is not one.VAR_KEYWORD])


def add_reward(parser: argparse.ArgumentParser, name: str, metavar: str, what: str) -> None:
    """Adds the reward, or rewards, and `--option`."""
    parser.add_argument(name, metavar=metavar, help=f"{what} by name, FILE.py:FUNCTION, or YAML with a list rewards:")
    options = "option of the reward, with several rewards NAME.KEY=VALUE"
    add_several(parser, "--option", "KEY=VALUE", options, dest="options")


def add_prompts(parser: argparse.ArgumentParser) -> None:
    """Adds `--prompt` and `--prompts`."""
    parser.add_argument("--prompt", metavar="TEXT", help="prompt of all images")
    parser.add_argument(
        "--prompts",
        metavar="FILE",
        help="file of prompts: .txt with one line per image, in the order of their names, 2.png before 10.png; .jsonl "
        "with file, prompt and metadata",
    )


def add_pairs(parser: argparse.ArgumentParser) -> None:
    """Adds the file of preferences."""
    parser.add_argument(
        "pairs", type=Path, metavar="PAIRS.jsonl", help="file of lines with prompt, winner and loser (paths of images)"
    )
