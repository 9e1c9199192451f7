"""What a release is made of: its version, the files of its archives, and the definitions that a forge runs."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import yaml

import flowrl
from flowrl.runtime import versions

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
LARGEST, WHOLE = 10e6, 52e6
"""Bytes of one file, and of all files, that travel to every user; indexes take archives of at most 100 MB."""


def git(folder: Path, *arguments: str) -> str:
    who = {f"GIT_{kind}_{what}": "a@b" for kind in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    alone = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
    return subprocess.run(
        ["git", "-C", str(folder), *arguments], env={**os.environ, **who, **alone}, text=True, capture_output=True,
        check=True,
    ).stdout  # fmt: skip


# ---- version ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Two commits without a tag, of what says the version."""
    folder = tmp_path / "repository"
    folder.mkdir()
    for name in ("pyproject.toml", ".gitattributes", ".git_archival.txt"):
        shutil.copy(ROOT / name, folder)
    git(folder, "init", "--quiet", "--initial-branch=main")
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--message=one")
    git(folder, "commit", "--quiet", "--message=two", "--allow-empty")
    return folder


@pytest.mark.slow
def test_the_version_comes_from_tags_and_is_there_without_them(repository: Path, tmp_path: Path) -> None:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("SETUPTOOLS_SCM_")}

    def version(folder: Path) -> str:
        command = [sys.executable, "-m", "setuptools_scm"]
        done = subprocess.run(command, cwd=folder, env=clean, text=True, capture_output=True, check=True)
        return re.sub(r"\+g[0-9a-f]{9,}$", "+g", done.stdout.strip())

    def archive(name: str) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        git(repository, "archive", "--output", str(folder / "all.tar"), "HEAD")
        subprocess.run(["tar", "-xf", "all.tar"], cwd=folder, check=True)
        return folder

    assert version(repository) == "0.1.dev2+g"
    git(repository, "tag", "checkpoint-7")  # is no release
    assert version(repository) == "0.1.dev2+g"
    assert version(archive("untagged archive")) == "0.0"
    git(repository, "tag", "v1.2.3")
    assert version(repository) == "1.2.3"
    assert version(archive("archive of a tag")) == "1.2.3"
    git(repository, "commit", "--quiet", "--message=three", "--allow-empty")
    assert version(repository) == "1.2.4.dev1+g"
    git(tmp_path, "clone", "--quiet", "--depth=1", repository.as_uri(), "shallow")
    assert version(tmp_path / "shallow") == "0.1.dev1+g"
    shutil.rmtree(tmp_path / "shallow" / ".git")
    assert version(tmp_path / "shallow") == "0.0"
    (tmp_path / "shallow" / "PKG-INFO").write_text("Metadata-Version: 2.4\nName: flowrl-toolkit\nVersion: 4.5.6\n")
    assert version(tmp_path / "shallow") == "4.5.6"  # a source archive


def test_the_package_says_the_version_that_was_installed() -> None:
    try:
        assert flowrl.__version__ == metadata.version("flowrl-toolkit")
    except metadata.PackageNotFoundError:
        assert flowrl.__version__ == "0.0"
    assert "version" in PROJECT["dynamic"]


def test_the_commit_is_that_of_flowrls_own_checkout(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    git(repository, "tag", "v1.2.3")
    inside = repository / "flowrl" / "runtime/versions.py"
    monkeypatch.setattr(versions, "__file__", str(inside))
    inside.parent.mkdir(parents=True)
    git_commit = versions.git_commit.__wrapped__  # which a process asks once
    assert git_commit() == git(repository, "rev-parse", "HEAD")[:12]
    (repository / "pyproject.toml").write_text("")
    assert git_commit() == git(repository, "rev-parse", "HEAD")[:12] + "-dirty"
    installed = (
        repository / ".venv" / "lib" / "flowrl" / "runtime/versions.py"
    )  # a wheel, in an environment of a user's project
    installed.parent.mkdir(parents=True)
    monkeypatch.setattr(versions, "__file__", str(installed))
    assert git_commit() is None


# ---- files -----------------------------------------------------------------------------------------------------------


def test_what_travels_to_every_user_stays_small() -> None:
    """The folders of the package, which the wheel holds and nothing else (`tests/test_packaging.py`)."""
    folders = ("flowrl", "assets", "configs", "pipelines", "rewards", "samplers")
    sizes = {
        file: file.stat().st_size for folder in folders for file in (ROOT / folder).rglob("*")
        if file.is_file() and "__pycache__" not in file.parts and not (folder == "flowrl" and linked(file))
    }  # fmt: skip
    assert max(sizes.values()) <= LARGEST, max(sizes, key=lambda file: sizes[file])
    assert sum(sizes.values()) <= WHOLE
    kinds = {file.suffix or file.name for file in sizes}
    assert kinds <= {
        ".json", ".jsonl", ".md", ".png", ".py", ".pyi", ".safetensors", ".txt", ".typed", ".yaml", ".css", ".js",
        ".html", ".svg", "LICENSE", "SOURCE",
    }  # fmt: skip


def linked(file: Path) -> bool:
    return any(parent.is_symlink() for parent in file.parents if parent != ROOT and parent.is_relative_to(ROOT))


# ---- changelog -------------------------------------------------------------------------------------------------------


def test_the_changelog_has_a_section_of_each_release_the_newest_first() -> None:
    heads = re.findall(r"(?m)^## (.*)$", (ROOT / "CHANGELOG.md").read_text())
    assert heads[0] == "[Unreleased]"
    released = [re.fullmatch(r"\[(\d+)\.(\d+)\.(\d+)\S*\] - (\d{4}-\d\d-\d\d)", head) for head in heads[1:]]
    assert all(released), f"write '## [1.2.3] - 2026-01-31': {heads[1:]}"
    numbers = [[int(part) for part in found.groups()[:3]] for found in released if found]
    assert numbers == sorted(numbers, reverse=True)


def test_notes_are_the_section_of_a_version(tmp_path: Path) -> None:
    (tmp_path / "CHANGELOG.md").write_text(
        "# Changelog\n\n## [Unreleased]\n\n## [0.2.0] - 2026-02-01\n\n- b\n\n## [0.1.0] - 2026-01-01\n\n- a\n"
    )

    def notes(version: str) -> subprocess.CompletedProcess[str]:
        command = ["make", "--no-print-directory", "-f", str(ROOT / "Makefile"), "notes", f"VERSION={version}"]
        return subprocess.run(command, cwd=tmp_path, text=True, capture_output=True, check=False)

    assert notes("0.2.0").stdout == "## [0.2.0] - 2026-02-01\n\n- b\n\n"
    assert notes("0.1.0").stdout == "## [0.1.0] - 2026-01-01\n\n- a\n"
    assert notes("0.1").returncode != 0
    assert "no section '## [0.3.0]'" in notes("0.3.0").stderr


# ---- the forge -------------------------------------------------------------------------------------------------------


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


def steps(path: Path) -> Iterator[dict[str, Any]]:
    for job in read(path)["jobs"].values():
        yield from job.get("steps", [])


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_call_what_there_is(path: Path) -> None:
    workflow = read(path)
    assert workflow["name"] == path.stem
    assert workflow["permissions"] == {"contents": "read"}  # more is given to the one job that needs it
    targets = set(re.findall(r"(?m)^([a-z-]+):", (ROOT / "Makefile").read_text()))
    for name, job in workflow["jobs"].items():
        assert set(job.get("needs", [])) <= workflow["jobs"].keys(), name
        if called := job.get("uses"):
            assert "workflow_call" in read(ROOT / called)[True], called  # YAML 1.1 reads the word `on` so
            continue
        assert job["runs-on"] == "ubuntu-latest", name
        assert 0 < job["timeout-minutes"] <= 60, name
    for step in steps(path):
        assert ("run" in step) != ("uses" in step), step
        assert re.fullmatch(r"actions/[a-z-]+@v\d+", step.get("uses", "actions/checkout@v4")), step
        text = step.get("run", "")
        subprocess.run(["bash", "-n"], input=re.sub(r"\$\{\{.*?\}\}", "x", text), text=True, check=True)
        assert not re.search(r"\$\{\{ *github\.(event|head)", text), "what others write never goes into a script"
        assert set(re.findall(r"\bmake ([a-z-]+)", text)) <= targets, text
        for file in re.findall(r"(?:\.ci|tests|launch)/\S+", text):
            assert (ROOT / file).is_file(), file


def test_the_forge_checks_what_is_checked_here_on_both_ends_of_python() -> None:
    check = read(ROOT / ".github" / "workflows" / "check.yml")["jobs"]["check"]
    oldest, newest = check["strategy"]["matrix"]["python"]
    assert f">={oldest}" == PROJECT["requires-python"]
    assert [int(part) for part in newest.split(".")] > [int(part) for part in oldest.split(".")]
    assert check["steps"][-1] == {"run": ".ci/run"}
    assert "\nmake full\n" in (ROOT / ".ci" / "run").read_text()


def test_a_release_is_checked_and_tried_before_it_is_attached() -> None:
    jobs = read(ROOT / ".github" / "workflows" / "release.yml")["jobs"]
    assert set(jobs["attach"]["needs"]) == {"check", "build"}
    assert jobs["attach"]["permissions"] == {"contents": "write"}
    run = [step.get("run", "") for step in jobs["build"]["steps"]]
    order = [next(place for place, text in enumerate(run) if words in text)
             for words in ("make notes", "make release-check", "test -f")]  # fmt: skip
    assert order == sorted(order)
    assert jobs["build"]["steps"][0]["with"] == {"fetch-depth": 0}


def test_forms_ask_for_what_is_needed() -> None:
    for name, words in {"bug": "`flowrl doctor`", "feature": "paper"}.items():
        path = ROOT / ".github" / "ISSUE_TEMPLATE" / f"{name}.yml"
        form = read(path)
        assert {"name", "description", "body"} <= form.keys()
        identifiers = [part["id"] for part in form["body"]]
        assert len(set(identifiers)) == len(identifiers)
        assert all(part["type"] == "textarea" and part["attributes"]["label"] for part in form["body"])
        assert words in path.read_text()
    assert "`make full`" in (ROOT / ".github" / "pull_request_template.md").read_text()


def test_the_citation_file_says_what_the_package_says() -> None:
    citation = read(ROOT / "CITATION.cff")
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()  # what the format requires
    assert citation["cff-version"] == "1.2.0"
    assert citation["type"] == "software"
    assert citation["license"] == PROJECT["license"]
    assert all("name" in author or "family-names" in author for author in citation["authors"])
    assert "version" not in citation  # it would have to be right in every commit; tags say it
    assert all(isinstance(word, str) for word in citation["keywords"])
