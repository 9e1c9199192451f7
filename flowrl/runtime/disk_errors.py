"""What an error of a disk means and what to change, by the number of the operating system."""

from __future__ import annotations

import errno
import os

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
"""Numbers of the operating system that only who writes meets."""
DISK = {
    errno.ENOSPC: ("no space is left on the disk", "Make room"),
    errno.EDQUOT: ("your quota of the disk is used up", "Make room, or ask for more"),
    errno.EFBIG: (
        "it would be larger than files may be here",
        "Raise the limit of file sizes (ulimit -f), or write to another disk",
    ),
    errno.EROFS: ("the disk can only be read", "Choose a folder on another disk"),
    errno.EIO: (
        "the disk reports an error",
        "Look into the system's log (dmesg) and save what is on that disk; choose a folder on another one",
    ),
    errno.ESTALE: (
        "the server of its network disk does not know it any more (stale handle)",
        "Mount that disk again, or wait until its server is back",
    ),
    errno.ENOLCK: ("its disk has no locks", "Have it mounted with locks, or choose a folder on another disk"),
    errno.ENXIO: ("its device is gone", "See whether the disk is still mounted"),
    errno.ENODEV: ("its device is gone", "See whether the disk is still mounted"),
    errno.EMFILE: ("too many files are open at once", "Raise the limit (ulimit -n)"),
    errno.ENFILE: ("too many files are open on this machine", "Close some, or raise the system's limit (fs.file-max)"),
    errno.ENAMETOOLONG: ("its name is too long", "Choose a shorter name, or a folder that is not as deep"),
    errno.ELOOP: ("links lead in a circle", "Remove one of them"),
    errno.EBUSY: ("another program holds it", "End that program, or choose another place"),
    errno.ETXTBSY: ("another program runs it", "End that program, or choose another place"),
    errno.ETIMEDOUT: (
        "its disk, or a machine on the network, does not answer",
        "See whether that is there, then go on",
    ),
}
"""Number of the operating system -> what is wrong with a file, what to change."""


def system_words(error: OSError) -> str:
    """What the system says, without its number."""
    return str(error.strerror or os.strerror(error.errno or 0))


def disk_words(error: OSError) -> str:
    """What is wrong and what to change; what the system says where that is not known better."""
    what, advice = DISK.get(error.errno or 0, (system_words(error), "See whether it is there and may be read"))
    return f"{what}. {advice}"
