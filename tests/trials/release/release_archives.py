"""The version that a tag gives, the changelog of a release, and the two archives with what is in them."""

from __future__ import annotations

import hashlib
import re
import tarfile
import zipfile
from email.parser import Parser
from pathlib import Path

from release_part import BIN, ROOT, UV, Broken, Part, run

LARGEST = 48e6
"""Bytes of an archive, as tests/test_packaging.py has it; indexes take 100 MB."""
TAG = "v0.1.0"
NEEDED = ("flowrl/py.typed", "flowrl/__init__.pyi")
DATA = (".yaml", ".json", ".txt", ".md", ".css", ".js", ".html")
"""Endings of the files that packages read: each that is tracked has to be in the wheel."""
MACHINE_PATH = re.compile(rb"[\"'=\s:](?:/root|/home/\w+|/Users/\w+|/work|/tmp/\w+)/\w")
"""A path of one machine; tests and papers tell of such paths on purpose, what travels in a wheel does not."""


def needed() -> set[str]:
    """What the wheel has to hold beside code."""
    tracked = run("git", "ls-files", "flowrl", "rewards", "pipelines", "samplers").split()
    data = {name if name.startswith("flowrl/") else f"flowrl/{name}" for name in tracked if name.endswith(DATA)}
    return data | set(NEEDED)


def version_of_tag(part: Part, scratch: Path) -> None:
    """Without a tag a clone has a development version, with one both archives carry its version."""
    clone = scratch / "clone"
    try:
        run("git", "clone", "--quiet", ROOT, clone)
    except Broken as error:
        return part.leave(
            f"the version of a tag: there is no git history to clone here ({str(error).splitlines()[-1]})"
        )
    if dirty := run("git", "status", "--porcelain"):
        part.leave(f"{len(dirty.splitlines())} changed files are not committed: a tag would not have them")
    for tag in run("git", "tag", cwd=clone).split():
        run("git", "tag", "--delete", tag, cwd=clone)
    part.facts["without a tag"] = untagged = run(BIN / "python", "-m", "setuptools_scm", cwd=clone).strip()
    part.refuse(not re.match(r"\d+\.\d+\.dev\d+\+g", untagged), f"without a tag the version is {untagged}")
    run("git", "tag", TAG, cwd=clone)
    found = build(scratch / "tagged", clone)
    part.facts[f"with {TAG}"] = [path.name for path in found]
    part.facts["versions told"] = told = [metadata(path)["Version"] for path in found]
    part.refuse(set(told) != {TAG[1:]}, f"with the tag {TAG} the archives say {told}")
    part.refuse(not all(f"-{TAG[1:]}" in path.name for path in found), f"with the tag {TAG}: {found}")
    part.say(f"{untagged} without a tag, {' and '.join(told)} in both archives with {TAG}")
    changelog(part, clone)


def changelog(part: Part, clone: Path) -> None:
    """What is under Unreleased becomes the section of a version, and its notes are all of it."""
    before = notes(clone, "Unreleased")
    try:
        run("make", "--no-print-directory", "changelog", f"VERSION={TAG[1:]}", cwd=clone)
        after = notes(clone, TAG[1:])
    except Broken as error:
        return part.refuse(True, str(error))
    part.facts["lines of notes"] = len(after)
    part.refuse(before != after, "the notes of the version are not what stood under Unreleased")
    part.refuse(not any(line.startswith("- ") for line in after), "CHANGELOG.md says nothing of this version")
    return part.say(f"CHANGELOG.md: {len(after)} lines under Unreleased become the section of {TAG[1:]}")


def notes(folder: Path, version: str) -> list[str]:
    """Lines of a section of the changelog, without its head."""
    return run("make", "--no-print-directory", "notes", f"VERSION={version}", cwd=folder).strip().splitlines()[1:]


def build(out: Path, source: Path = ROOT) -> tuple[Path, Path]:
    """The source archive of a checkout, and the wheel that is made from it."""
    run(UV, "build", "--quiet", "--no-build-isolation", "--python", BIN / "python", "--out-dir", out, cwd=source)
    return next(out.glob("*.tar.gz")), next(out.glob("*.whl"))


def metadata(archive: Path) -> dict[str, str]:
    """Fields of METADATA or PKG-INFO that are there once."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as content:
            name = next(name for name in content.namelist() if name.endswith(".dist-info/METADATA"))
            text = content.read(name).decode()
    else:
        with tarfile.open(archive) as content:
            name = next(name for name in content.getnames() if re.fullmatch(r"[^/]+/PKG-INFO", name))
            text = content.extractfile(name).read().decode()  # type: ignore[union-attr]
    return dict(Parser().parsestr(text).items())


def archives(part: Part, scratch: Path, out: Path) -> tuple[Path, Path]:
    """Builds both archives and looks at what is in them; the source archive and the wheel."""
    for old in out.glob("*") if out.is_dir() else ():
        old.unlink()
    archive, wheel = build(out)
    (out / ".gitignore").unlink(missing_ok=True)
    git = (ROOT / ".git").exists()  # a source archive has none
    tagged = [tag for tag in run("git", "tag", "--points-at", "HEAD").split() if re.match(r"v\d", tag)] if git else []
    version = metadata(wheel)["Version"]
    part.refuse(tagged and f"v{version}" not in tagged, f"the tag is {tagged}, and the wheel says {version}")
    run(
        UV,
        "build",
        "--quiet",
        "--no-build-isolation",
        "--python",
        BIN / "python",
        "--wheel",
        "--out-dir",
        scratch / "direct",
    )
    inside, direct = digests(wheel), digests(next((scratch / "direct").glob("*.whl")))
    unlike = sorted(name for name in inside.keys() | direct.keys() if inside.get(name) != direct.get(name))
    part.refuse(unlike, f"the wheel of the source archive is not that of the checkout: {unlike[:5]}")
    if not unlike:
        part.say(f"{len(inside)} files, alike in the wheels that the source archive and the checkout make")
    try:
        run(BIN / "twine", "--no-color", "check", "--strict", archive, wheel)
        part.say("twine check --strict: both pass")
    except Broken as error:
        part.refuse(True, str(error))
    for path in (archive, wheel):
        part.facts[path.name] = size = path.stat().st_size
        part.refuse(size > LARGEST, f"{path.name} has {size / 1e6:.1f} MB, at most {LARGEST / 1e6:.0f}")
        part.say(f"{path.name} {size / 1e6:.1f} MB")
    contents_of_wheel(part, wheel)
    contents_of_source(part, archive)
    return archive, wheel


def digests(wheel: Path) -> dict[str, str]:
    """Files of a wheel and what they hold; without the list that holds the same."""
    with zipfile.ZipFile(wheel) as content:
        return {
            name: hashlib.sha256(content.read(name)).hexdigest()
            for name in content.namelist()
            if not name.endswith(("/", ".dist-info/RECORD"))
        }


def contents_of_wheel(part: Part, wheel: Path) -> None:
    """The package and nothing else, no path of this machine."""
    with zipfile.ZipFile(wheel) as content:
        names = [name for name in content.namelist() if not name.endswith("/")]
        paths = sorted(name for name in names if MACHINE_PATH.search(content.read(name)) and not name.endswith(".png"))
    part.facts["files in the wheel"] = len(names)
    foreign = [name for name in names if not re.match(r"flowrl/|flowrl_toolkit-[^/]*\.dist-info/", name)]
    part.refuse(foreign, f"the wheel holds what is no part of the package: {foreign[:5]}")
    junk = [name for name in names if re.search(r"__pycache__|\.pyc$|/tests?/|/test_[^/]*\.py$", name)]
    part.refuse(junk, f"the wheel holds tests or leftovers: {junk[:5]}")
    part.refuse(missing := needed() - set(names), f"the wheel lacks {sorted(missing)}")
    part.refuse(not any(name.endswith(".dist-info/licenses/LICENSE") for name in names), "the wheel lacks LICENSE")
    for folder in ("assets", "configs"):
        here = {f"flowrl/{path.relative_to(ROOT)}" for path in (ROOT / folder).rglob("*") if path.is_file()}
        here = {name for name in here if "__pycache__" not in name}
        part.refuse(lacking := here - set(names), f"the wheel lacks of {folder}: {sorted(lacking)[:5]}")
        part.say(f"{len(here)} files of {folder} are in the wheel")
    part.refuse(paths, f"the wheel tells paths of a machine: {paths[:5]}")


def contents_of_source(part: Part, archive: Path) -> None:
    """What git has, and no path of this very machine."""
    own = [str(path).encode() for path in (ROOT, Path.home()) if len(path.parts) > 2]
    with tarfile.open(archive) as content:
        names, paths = [], []
        for member in content:
            if member.isfile():
                names.append(member.name.partition("/")[2])
                data = content.extractfile(member).read()  # type: ignore[union-attr]
                paths += [names[-1] for path in own if path in data]
    part.facts["files in the source archive"] = len(names)
    junk = [name for name in names if re.match(r"runs/|build/|dist/|\.venv", name) or "__pycache__" in name]
    part.refuse(junk, f"the source archive holds leftovers: {junk[:5]}")
    part.refuse(paths, f"the source archive tells paths of this machine: {sorted(set(paths))[:5]}")
