"""Whether links lead anywhere: those of Markdown files among themselves, and those of the built site.

Anchors of Markdown are what forges make of headings: lower case, spaces as dashes, other signs left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

_FENCE = re.compile(r"^(```|~~~).*?^\1\s*$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(?<!!)\[(?:[^\[\]]|\[[^\]]*\])*\]\(([^()\s]+)(?:\s+\"[^\"]*\")?\)|!\[[^\]]*\]\(([^()\s]+)\)")
_LOADING = {"script": "src", "img": "src", "link": "href", "iframe": "src", "source": "src", "video": "src"}
_REFERRING = {"canonical", "next", "prev", "index", "search", "author"}  # links of a head that load nothing


def markdown_links(text: str) -> Iterator[str]:
    """Targets of links and images outside code."""
    plain = re.sub(r"`[^`\n]*`", "`code`", _FENCE.sub("", text))
    yield from (first or second for first, second in _LINK.findall(plain))


def anchor_of(heading: str) -> str:
    """The anchor that a forge gives a heading.

    >>> anchor_of("What `the` numbers say, and why")
    'what-the-numbers-say-and-why'
    """
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
    return re.sub(r"[^\w\- ]", "", text.strip().lower()).replace(" ", "-")


@cache
def anchors(path: Path) -> frozenset[str]:
    """The anchors of a Markdown file; the second heading of a name has -1 behind it."""
    found: dict[str, int] = {}
    names = set()
    for heading in re.findall(r"^#{1,6}\s+(.*?)\s*#*$", _FENCE.sub("", path.read_text(encoding="utf-8")), re.MULTILINE):
        anchor = anchor_of(heading)
        count = found.get(anchor, 0)
        found[anchor] = count + 1
        names.add(f"{anchor}-{count}" if count else anchor)
    return frozenset(names)


def broken_links(files: Iterable[Path]) -> list[str]:
    """Relative links of Markdown files that lead to no file, or to no heading of one."""
    wrong = []
    for path in files:
        for target in markdown_links(path.read_text(encoding="utf-8")):
            parts = urlsplit(target)
            if parts.scheme or parts.netloc:
                continue
            other = path if not parts.path else path.parent / unquote(parts.path)
            if not other.exists():
                wrong.append(f"{path.name}: {target} leads to no file")
            elif parts.fragment and other.suffix == ".md" and parts.fragment not in anchors(other.resolve()):
                wrong.append(f"{path.name}: {target} leads to no heading of {other.name}")
    return wrong


def faults_of_site(folder: Path) -> tuple[int, list[str]]:
    """How many links a built site has, and what is wrong with it.

    Wrong are a link to a page, file or anchor that is not there, and whatever a page would load from another server:
    scripts, style sheets, fonts, images.
    """
    pages = {path: _Page.of(path) for path in sorted(folder.rglob("*.html"))}
    count, wrong = 0, list[str]()
    for path, page in pages.items():
        name = path.relative_to(folder)
        wrong += [f"{name} loads {what}" for what in page.loads if _is_elsewhere(what)]
        for target in [*page.links, *(what for what in page.loads if not _is_elsewhere(what))]:
            parts = urlsplit(target)
            if _is_elsewhere(target) or parts.scheme in ("data", "mailto", "javascript"):
                continue
            count += 1
            other = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if other.is_dir():
                other = other / "index.html"
            if not other.is_file():
                wrong.append(f"{name}: {target} leads to no file")
            elif parts.fragment and other in pages and unquote(parts.fragment) not in pages[other].ids:
                wrong.append(f"{name}: {target} leads to no anchor")
    for path in sorted(folder.rglob("*.css")):
        for target in re.findall(r"(?:url\(|@import\s+)[\"']?([^\"')\s;]+)", path.read_text(encoding="utf-8")):
            if _is_elsewhere(target):
                wrong.append(f"{path.relative_to(folder)} loads {target}")
    return count, wrong


class _Page(HTMLParser):
    """The anchors of a page, where its links lead, and what it loads."""

    def __init__(self) -> None:
        super().__init__()
        self.ids: set[str] = {"", "top"}  # which browsers scroll to whether or not they are there
        self.links: list[str] = []
        self.loads: list[str] = []

    @classmethod
    def of(cls, path: Path) -> _Page:
        page = cls()
        page.feed(path.read_text(encoding="utf-8"))
        return page

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        if "id" in given:
            self.ids.add(given["id"])
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        elif tag in _LOADING and given.get(_LOADING[tag]) and given.get("rel") not in _REFERRING:
            self.loads.append(given[_LOADING[tag]])


def _is_elsewhere(target: str) -> bool:
    """Whether a target is on another server."""
    return urlsplit(target).scheme in ("http", "https") or target.startswith("//")
