"""The shared files of a run: a list that you see first; nothing else is shared."""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from flowrl.publishing.model_card import MADE
from flowrl.rendering.markup import plural
from flowrl.runs.run_data import RunData
from flowrl.runtime.files import free_bytes, leads_out, refuse_foreign, replacing

README = "README.md"


@dataclass(frozen=True, kw_only=True, slots=True)
class Shared:
    """A file of the shared folder: its name there, and its bytes or the file to copy."""

    name: str
    content: bytes | Path

    @property
    def size(self) -> int:
        """Bytes."""
        return len(self.content) if isinstance(self.content, bytes) else self.content.stat().st_size


def image_files(run: RunData, most: int) -> tuple[list[tuple[str, str, str, str]], list[Shared]]:
    """The first pairs of samples before and after: text, seed and the names of both, and the files. Raises ValueError:
    one of them is a link: what it leads to is no image that the run drew."""
    shown, files = list[tuple[str, str, str, str]](), list[Shared]()
    for pair in [pair for pair in run.pairs if pair.after is not None][:most]:
        names = []
        for side, image, clip in (("before", pair.before, pair.before_clip), ("after", pair.after, pair.after_clip)):
            source = clip or image
            assert source is not None
            if source.is_symlink():
                raise ValueError(f"{source} is a link, and what it leads to is not shared: put the image itself there")
            names.append(f"images/{len(shown):03d}_{side}{source.suffix}")
            files.append(Shared(name=names[-1], content=source))
        shown.append((pair.prompt, pair.seed, names[0], names[1]))
    return shown, files


def list_files(files: Sequence[Shared]) -> str:
    """The files with their sizes, and the sum."""
    width = max(len(file.name) for file in files)
    rows = [f"  {file.name:<{width}}  {_size(file.size):>9}" for file in files]
    return "\n".join([*rows, f"  {plural(len(files), 'file')}, {_size(sum(file.size for file in files))}"])


def write_files(folder: Path, files: Sequence[Shared]) -> None:
    """Writes the files into a folder, each whole or not at all. Raises ValueError: the folder has files of another
    program, or there is no room; nothing was written."""
    if found := leads_out(folder):
        raise ValueError(f"{folder}: {found}, and nothing is written through it: give another `folder`")
    own = (folder / README).is_file() and MADE in (folder / README).read_text(encoding="utf-8", errors="replace")
    refuse_foreign(folder / README, own=re.compile(re.escape(MADE)), flag="`folder`")
    for file in files:
        refuse_foreign(folder / file.name, own=own, flag="`folder`")
    need, free = sum(file.size for file in files), free_bytes(folder)
    if need > free:
        raise ValueError(f"{folder} needs {_size(need)}, and its disk has {_size(free)} left: make room first")
    for file in files:
        with replacing(folder / file.name) as stream:
            if isinstance(file.content, bytes):
                stream.write(file.content)
            else:
                with file.content.open("rb") as source:
                    shutil.copyfileobj(source, stream)


def _size(count: int) -> str:
    if count < 1000:
        return f"{count} B"
    return f"{count / 1000:.1f} kB" if count < 10**6 else f"{count / 10**6:.1f} MB"
