"""What a release stands on: a bill of materials of the lock file, and the licence of every package in it."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from dataclasses import dataclass
from email.message import Message
from email.parser import Parser
from importlib import metadata
from pathlib import Path
from typing import Any
from zipfile import ZipFile

from release_part import BIN, ROOT, Broken, Part, run

FAMILIES: dict[str, tuple[str, ...]] = {
    "MIT and the like": ("MIT", "MIT-CMU", "0BSD", "ISC", "HPND", "Zlib", "BSL-1.0", "CC0-1.0", "Unlicense"),
    "BSD": ("BSD", "BSD-2-Clause", "BSD-3-Clause"),
    "Apache 2.0": ("Apache-2.0", "Apache-2.0 WITH LLVM-exception"),
    "Python": ("PSF-2.0", "CNRI-Python"),
    "MPL 2.0, of unchanged files": ("MPL-2.0",),
    "NVIDIA's own, of libraries that torch's wheels name and a release does not hold": (
        "LicenseRef-NVIDIA-Proprietary",
    ),
}
"""The licences that a dependency may have; any other is refused by name."""
WORDS: dict[str, str] = {
    "apache": "Apache-2.0",
    "apache license": "Apache-2.0",
    "apache 2.0": "Apache-2.0",
    "apache 2.0 license": "Apache-2.0",
    "apache license, version 2.0": "Apache-2.0",
    "apache software license": "Apache-2.0",
    "mit license": "MIT",
    "bsd license": "BSD",
    "3-clause bsd license": "BSD-3-Clause",
    "isc license": "ISC",
    "isc license (iscl)": "ISC",
    "mozilla public license 2.0 (mpl 2.0)": "MPL-2.0",
    "python software foundation license": "PSF-2.0",
    "nvidia proprietary software": "LicenseRef-NVIDIA-Proprietary",
}
"""Free words of metadata, in small letters -> the name in the list of SPDX."""
LOOKED_AT: dict[str, tuple[str, str]] = {
    "cuda-toolkit": ("LicenseRef-NVIDIA-Proprietary", "holds no code, names NVIDIA's libraries"),
    "torchao": ("BSD-3-Clause", "its LICENSE file"),
}
"""Packages whose metadata says nothing: licence, and where somebody saw it."""


@dataclass(frozen=True)
class Licensed:
    """A package of the lock file and its licence."""

    name: str
    version: str
    licence: str
    """An SPDX expression, or the words that were found; empty where there are none."""
    where: str
    """What says so."""
    families: tuple[str, ...]
    refused: str = ""


def bill_and_licences(part: Part, scratch: Path, out: Path, version: str) -> None:
    """Writes both beside the archives; refuses what is unknown or restrictive."""
    packages = [licensed(part, scratch, name, pinned) for name, pinned in locked()]
    for package in packages:
        part.refuse(package.refused, package.refused)
    table = out / f"flowrl_toolkit-{version}.licences.md"
    table.write_text(in_a_table(packages), encoding="utf-8")
    bill = out / f"flowrl_toolkit-{version}.cdx.json"
    write_bill(part, bill, packages, version)
    count: dict[str, int] = defaultdict(int)
    for package in packages:
        for family in package.families:
            count[family] += 1
    part.facts |= {"packages": len(packages), "families": dict(count)}
    part.say(f"{len(packages)} packages: " + "; ".join(f"{number} {family}" for family, number in count.items()))


def locked() -> list[tuple[str, str]]:
    """Names and versions of the lock file; two rows where Pythons differ."""
    return re.findall(r"(?m)^([a-z0-9][\w.-]*)==([\w.]+)", (ROOT / "requirements.lock").read_text())


def licensed(part: Part, scratch: Path, name: str, version: str) -> Licensed:
    """A package with its licence, by the metadata of what is installed, else of the wheel of that version."""
    try:
        about = metadata.metadata(name)
        fields: Message | None = about if about["Version"].partition("+")[0] == version else None  # type: ignore[assignment]
    except metadata.PackageNotFoundError:
        fields = None
    fields = fields or fetched(part, scratch, name, version)
    if fields is None:
        return Licensed(name, version, "", "not installed here, and not to be had", ())
    return judged(name, version, *licence_of(name, fields))


def fetched(part: Part, scratch: Path, name: str, version: str) -> Message | None:
    """The metadata of a wheel that is not for this Python or system; None, and the reason noted, without one."""
    folder = scratch / "metadata" / name
    command = (BIN / "python", "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "--dest", folder)
    for other in ((), ("--python-version", "3.14"), ("--python-version", "3.12")):
        try:
            run(*command, *other, f"{name}=={version}", timeout=300)
        except Broken:
            continue
        with ZipFile(next(folder.glob("*.whl"))) as wheel:
            inside = next(entry for entry in wheel.namelist() if entry.endswith(".dist-info/METADATA"))
            return Parser().parsestr(wheel.read(inside).decode("utf-8", "replace"))
    part.leave(
        f"the licence of {name} {version}: it is not installed here, and the index has no wheel of it for this system"
    )
    return None


def licence_of(name: str, fields: Message) -> tuple[str, str]:
    """A licence, and what says so: an expression, words or classifiers of the metadata, or somebody who looked."""
    if expression := fields.get("License-Expression"):
        return expression, "License-Expression"
    said = (fields.get("License") or "").strip()
    classes = [
        text.rpartition(" :: ")[2] for text in fields.get_all("Classifier") or [] if text.startswith("License ::")
    ]
    classes = [text for text in classes if text != "OSI Approved"]
    if said and all(known(term) for term in terms(said)):
        return " ".join(
            WORDS.get(term.lower(), term) for term in re.split(r"\s+(?=AND |OR )|(?<=AND) |(?<=OR) ", said)
        ), "License"
    if classes:
        return " AND ".join(WORDS.get(text.lower(), text) for text in classes), "Classifier"
    if name in LOOKED_AT:
        return LOOKED_AT[name]
    return (said.splitlines() or [""])[0], "License"


def terms(expression: str) -> list[str]:
    """Licences of an expression, without how they are joined."""
    return [term.strip("() ") for term in re.split(r"\s+(?:AND|OR)\s+", expression) if term.strip("() ")]


def known(term: str) -> str | None:
    """The family of a licence; None of one that is not allowed."""
    name = WORDS.get(term.lower(), term)
    return next((family for family, names in FAMILIES.items() if name in names), None)


def judged(name: str, version: str, licence: str, where: str) -> Licensed:
    """A package, refused unless its licence is allowed: each part of an AND, one part of an OR.

    >>> judged("a", "1", "MIT OR GPL-3.0-only", "License-Expression").refused
    ''
    >>> judged("a", "1", "MIT AND GPL-3.0-only", "License-Expression").refused
    "a 1 has the licence 'MIT AND GPL-3.0-only', which is not allowed (GPL-3.0-only)"
    """
    alone = terms(licence)
    unknown = [term for term in alone if known(term) is None]
    joined_by_or = re.search(r"\bOR\b", licence) and not re.search(r"\bAND\b", licence)
    families = tuple(dict.fromkeys(family for term in alone if (family := known(term)) is not None))
    if not alone:
        return Licensed(name, version, licence, where, (), f"{name} {version} says no licence: look, and enter it")
    if unknown and not (joined_by_or and families):
        said = f"{name} {version} has the licence {licence!r}, which is not allowed ({', '.join(unknown)})"
        return Licensed(name, version, licence, where, families, said)
    return Licensed(name, version, licence, where, families)


def in_a_table(packages: list[Licensed]) -> str:
    """A page of Markdown: the families that are allowed, then every package."""
    allowed = [f"| {family} | {', '.join(names)} |" for family, names in FAMILIES.items()]
    rows = [f"| {one.name} | {one.version} | {one.licence or 'unknown'} | {one.where} |" for one in packages]
    head = "# Licences\n\nOf the packages of `requirements.lock`, which a release does not hold. Allowed are:\n\n"
    return "\n".join(
        [
            f"{head}| family | licences |",
            "|---|---|",
            *allowed,
            "",
            "| package | version | licence | said by |",
            "|---|---|---|---|",
            *rows,
            "",
        ]
    )


def write_bill(part: Part, file: Path, packages: list[Licensed], version: str) -> None:
    """The lock file as CycloneDX JSON by the tool of that project, with licences; no address of an index."""
    options = ("--pyproject", ROOT / "pyproject.toml", "--mc-type", "library", "--output-reproducible", "--of", "JSON")
    run(BIN / "cyclonedx-py", "requirements", *options, "--output-file", file, ROOT / "requirements.lock")
    bill: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    bill["metadata"]["component"]["version"] = version
    licences = {(one.name, one.version): one for one in packages}
    for component in bill["components"]:
        component.pop("externalReferences", None)  # where the tool supposes the package to come from
        one = licences.get((component["name"], component["version"]))
        if one is not None and one.licence:
            spdx = all(known(term) and term not in ("BSD",) for term in terms(one.licence))
            component["licenses"] = [{"expression": one.licence} if spdx else {"license": {"name": one.licence}}]
    lacking = licences.keys() - {(component["name"], component["version"]) for component in bill["components"]}
    part.refuse(lacking, f"the bill of materials lacks {sorted(lacking)[:5]}")
    text = json.dumps(bill, indent=2) + "\n"
    file.write_text(text, encoding="utf-8")
    part.refuse(
        faults := schema_faults(text, bill["specVersion"]), f"the bill of materials breaks its schema: {faults}"
    )
    part.say(f"{file.name}: {len(bill['components'])} components, CycloneDX {bill['specVersion']}")


def schema_faults(text: str, version: str) -> str:
    """What is wrong with a bill of materials by its own schema; nothing where it is right."""
    from cyclonedx.schema import SchemaVersion
    from cyclonedx.validation.json import JsonStrictValidator

    return str(JsonStrictValidator(SchemaVersion.from_version(version)).validate_str(text) or "")
