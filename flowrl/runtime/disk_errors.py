"""What a disk error means and what to change, by the operating system's number."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
"""Numbers of the operating system that only who writes meets."""
WORDS: dict[str, Any] = json.loads(Path(__file__).with_name("error_words.json").read_text(encoding="utf-8"))
"""Read at once, since an error of the disk may be what it is read for."""
DISK = {getattr(errno, name): words for name, words in WORDS["disk"].items() if hasattr(errno, name)}
"""Number of the operating system -> what is wrong with a file, what to change."""


def system_words(error: OSError) -> str:
    """What the system says, without its number."""
    return str(error.strerror or os.strerror(error.errno or 0))


def disk_words(error: OSError) -> str:
    """What is wrong and what to change; the system's own words for other errors."""
    what, advice = DISK.get(error.errno or 0, (system_words(error), "See whether it is there and may be read"))
    return f"{what}. {advice}"
