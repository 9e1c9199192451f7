"""Former names: each works for one more version, with a warning that says today's (docs/upgrading.md).

A name enters a table with the change that renames it, and leaves it after the release that has it there.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Mapping

from flowrl.runtime.call import call_words
from flowrl.runtime.failures import speaker
from flowrl.runtime.scrubbing import say

KEYS: dict[str, str] = {}
"""Dotted key of a configuration -> today's."""
COMMANDS: dict[str, str] = {}
"""Command, of one word or two -> today's."""
FUNCTIONS: dict[str, str] = {}
"""Function of the package -> today's."""


def name_of_today(name: str, former: Mapping[str, str], form: str = "{}") -> str:
    """A name, or what it is called now where it is a former one, which is said in the form that somebody writes."""
    if name not in former:
        return name
    warn_of_former(form.format(name), form.format(former[name]))
    return former[name]


def warn_of_former(old: str, new: str) -> None:
    """Says that a former name was taken: a line of a command's main process, a FutureWarning of Python."""
    text = f"{old} is {new} now: the former name works in this version and in none after it"
    if not call_words().startswith("flowrl "):
        warnings.warn(text, FutureWarning, stacklevel=2)
    elif os.environ.get("RANK", "0") == "0":
        say(f"{speaker()}: {text}", file=sys.stderr)
