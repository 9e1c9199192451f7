"""The container: built by docker where there is one, else its steps in a temporary folder that stands for the root."""

from __future__ import annotations

import os
import re
import shutil
import sys
from fnmatch import fnmatch
from pathlib import Path

from release_part import ROOT, Broken, Part, run

DOCKERFILE = ROOT / "Dockerfile"
_HANDED = ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "PIP_CERT", "PIP_CONFIG_FILE", "UV_CACHE_DIR")


def image(part: Part, scratch: Path, version: str) -> None:
    """Builds the image and asks it for its version, or does its steps as far as that goes without docker."""
    if docker_here():
        name = f"flowrl-release-check:{re.sub(r'[^a-z0-9.]', '-', version)}"
        run("docker", "build", "--tag", name, "--build-arg", f"VERSION={version}", ".")
        try:
            told = run("docker", "run", "--rm", name, "--version").strip()
        finally:
            run("docker", "image", "rm", name)
        part.say(f"docker built it: {told}")
        return part.refuse(f"flowrl {version}," not in told, f"the image says {told}")
    part.leave("docker build: there is no docker that answers here; its steps are done in a temporary folder instead")
    return steps_in_a_folder(part, scratch / "root", version)


def docker_here() -> bool:
    """Whether a docker daemon answers."""
    try:
        run("docker", "info", timeout=60)
    except Broken:
        return False
    return True


def instructions(text: str) -> list[tuple[str, str]]:
    """Words of a Dockerfile and what stands behind them; comments left out, continued lines joined."""
    lines = re.sub(r"\\\n\s*", " ", re.sub(r"(?m)^#.*\n", "", text)).splitlines()
    return [(word, rest.strip()) for word, _, rest in (line.strip().partition(" ") for line in lines) if word]


def steps_in_a_folder(part: Part, root: Path, version: str) -> None:
    """Every instruction, with paths of the image below a folder. Packages of Debian are looked up, not installed."""
    environment = {"PATH": f"{Path(sys.executable).resolve().parent}:/usr/bin:/bin", "HOME": str(root)}
    environment |= {name: os.environ[name] for name in _HANDED if name in os.environ}
    environment.setdefault("UV_CACHE_DIR", os.environ.get("UV_CACHE_DIR", str(Path.home() / ".cache" / "uv")))
    folder, told = root, ""
    root.mkdir()
    for word, rest in instructions(DOCKERFILE.read_text()):
        if word == "FROM":
            part.leave(
                f"FROM {rest}: no registry of images is asked; Python {sys.version.split()[0]} of here stands for it"
            )
        elif word == "ARG":
            name, _, value = rest.partition("=")
            environment |= {name: version if name == "VERSION" else value} if value else {}
        elif word == "WORKDIR":
            folder = below(root, rest)
            folder.mkdir(parents=True, exist_ok=True)
        elif word == "COPY":
            part.refuse(rest != ". .", f"COPY {rest}: only the whole context is known to this check")
            part.say(f"COPY: {copy_context(folder)} files, without what .dockerignore names")
        elif word == "ENV":
            name, _, value = rest.partition("=")
            environment[name] = value.replace("/opt/", f"{root}/opt/").replace(f"${name}", environment.get(name, ""))
        elif word == "RUN" and rest.startswith("apt-get"):
            look_up(part, rest)
        elif word == "RUN":
            run("env", "-i", *(f"{key}={value}" for key, value in environment.items()), "bash", "-ec", rest, cwd=folder)
            part.say(f"RUN {rest}: done in {folder.relative_to(root)}")
        elif word == "ENTRYPOINT":
            command = re.findall(r'"([^"]+)"', rest)
            given = (f"{key}={value}" for key, value in environment.items())
            told = run("env", "-i", *given, *command, "--version", cwd=folder).strip()
        else:
            part.refuse(True, f"{word} is not known to this check")
    part.refuse(f"flowrl {version}" not in told, f"the entry point says {told!r}, and the version is {version}")
    part.say(f"ENTRYPOINT: {told}")
    shutil.rmtree(root)


def below(root: Path, path: str) -> Path:
    """A path of the image in the folder that stands for its root."""
    return root / path.lstrip("/")


def copy_context(to: Path) -> int:
    """Copies what git knows, or would, and .dockerignore lets through; how many files that is."""
    ignored = (ROOT / ".dockerignore").read_text().split()
    names = run("git", "ls-files", "--cached", "--others", "--exclude-standard").splitlines()
    kept = [name for name in names if not is_ignored(name, ignored)]
    for name in kept:
        file = to / name
        file.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, file, follow_symlinks=False)
    return len(kept)


def is_ignored(name: str, patterns: list[str]) -> bool:
    """Whether a file, or a folder it lies in, meets a pattern of .dockerignore.

    >>> is_ignored("runs/a/config.yaml", ["runs"]), is_ignored("a/__pycache__/b.pyc", ["**/__pycache__"])
    (True, True)
    """
    parts = Path(name).parts
    above = ["/".join(parts[: depth + 1]) for depth in range(len(parts))]
    return any(fnmatch(path, pattern) or fnmatch(f"/{path}", pattern) for path in above for pattern in patterns)


GIVES = {"libc6-dev": Path("/usr/include/stdio.h")}
"""What a package gives that is no command of its own name."""


def look_up(part: Part, rest: str) -> None:
    """Whether Debian has the packages that are installed, and whether what they give is here."""
    (words,) = re.findall(r"apt-get install ([^&]+)", rest)
    packages = [word for word in words.split() if not word.startswith("-")]
    part.leave(f"apt-get install {' '.join(packages)}: looked up, and what they give found here, not installed")
    try:
        run("apt-cache", "show", "--no-all-versions", *packages)
    except Broken:
        part.leave(f"{packages} in Debian's lists: there are no such lists here, or they lack one (apt-get update)")
    absent = [name for name in packages if not (GIVES[name].exists() if name in GIVES else shutil.which(name))]
    part.refuse(absent, f"commands and headers that the next steps need are not here: {absent}")
