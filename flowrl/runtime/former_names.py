"""Former names: each works for one more version, with a warning that gives today's (docs/upgrading.md).

A change that renames something adds the old name here; it goes after the next release.
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
    """A name, or today's name for a former one, with a warning in the form that users write."""
    if name not in former:
        return name
    warn_of_former(form.format(name), form.format(former[name]))
    return former[name]


def warn_of_former(old: str, new: str) -> None:
    """Warns of a former name: a line from a command's main process, a FutureWarning in Python."""
    text = f"{old} is {new} now: the former name works in this version and in none after it"
    if not call_words().startswith("flowrl "):
        warnings.warn(text, FutureWarning, stacklevel=2)
    elif os.environ.get("RANK", "0") == "0":
        say(f"{speaker()}: {text}", file=sys.stderr)
