"""The package as a user gets it: links, the mapping of setuptools, the wheel, and imports from anywhere."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
LINKED = ("assets", "configs", "pipelines", "rewards", "samplers")
LARGEST_ARCHIVE = 48e6
"""Bytes; docs/research/trials.md has what they are. Indexes take 100 MB."""


def settings() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    """Run a command that has to succeed, without the paths of this process."""
    kept = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONHOME")}
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env={**kept, **environment},
        text=True,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def checkout_copy(to: Path) -> Path:
    """The files that git would carry, without build leftovers, links kept as links."""
    shutil.copytree(ROOT, to, symlinks=True, ignore=skipped)
    return to


def skipped(inside: str, names: list[str]) -> set[str]:
    """What git leaves out of a folder."""
    found = shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "*.egg-info")(inside, names)
    return found | ({"runs"} & set(names) if Path(inside) == ROOT else set())


def package_files(root: Path) -> set[str]:
    """Names inside the wheel that the folders of a checkout should give."""
    names = set()
    for package, folder in {"flowrl": "flowrl", **{f"flowrl/{name}": name for name in LINKED}}.items():
        for file in (root / folder).rglob("*"):
            inside = file.relative_to(root / folder).as_posix()
            if (
                file.is_file()
                and "__pycache__" not in inside
                and not (package == "flowrl" and inside.startswith(LINKED))
            ):
                names.add(f"{package}/{inside}")
    return names


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source archive of a checkout that git knows and in which nothing is committed."""
    source = checkout_copy(tmp_path_factory.mktemp("source") / "checkout")
    run("git", "init", "--quiet", cwd=source)
    run("git", "-c", "core.compression=0", "add", "--all", cwd=source)
    code = "import sys; from setuptools.build_meta import build_sdist; build_sdist(sys.argv[1])"
    out = tmp_path_factory.mktemp("archive")
    run(sys.executable, "-c", code, out, cwd=source, PYTHONPATH=os.environ.get("PYTHONPATH", ""))
    (built,) = out.glob("*.tar.gz")
    return built


@pytest.fixture(scope="module")
def wheel(archive: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made from the source archive, as indexes and `make build` do, which shows that the archive lacks nothing."""
    out = tmp_path_factory.mktemp("wheel")
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--disable-pip-version-check"]
    run(sys.executable, "-m", "pip", "wheel", *options, "--wheel-dir", out, archive, cwd=out)
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment that holds the wheel and, behind it, the packages of this one."""
    folder = tmp_path_factory.mktemp("environment") / "venv"
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    target = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder).strip())
    pip = ["--no-deps", "--no-index", "--no-compile", "--quiet", "--disable-pip-version-check"]
    run(sys.executable, "-m", "pip", "--python", python, "install", *pip, wheel, cwd=folder)
    # Plain path lines in a .pth file go to the end of sys.path, so the wheel's copy comes first; an editable install of
    # this checkout is not seen there, because .pth files inside such a folder are not read.
    (target / "packages_of_the_running_environment.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


@pytest.mark.parametrize("name", LINKED)
def test_links_are_relative_and_lead_to_the_real_folders(name: str) -> None:
    link = ROOT / "flowrl" / name
    assert link.is_symlink()
    assert os.readlink(link) == f"../{name}"
    assert link.resolve() == ROOT / name
    assert not (ROOT / name).is_symlink()


def test_every_folder_with_python_is_listed_and_mapped() -> None:
    tool = settings()["tool"]["setuptools"]
    found = {"flowrl", *(f"flowrl.{name}" for name in LINKED)}
    for folder in ("flowrl", *LINKED):
        base = "flowrl" if folder == "flowrl" else f"flowrl.{folder}"
        for file in (ROOT / folder).rglob("*.py"):  # does not go through links
            parts = file.relative_to(ROOT / folder).parent.parts
            found.add(".".join((base, *parts)))
    assert set(tool["packages"]) == found
    assert tool["package-dir"] == {"flowrl": "flowrl", **{f"flowrl.{name}": name for name in LINKED}}
    for package in found - {"flowrl.assets", "flowrl.configs"}:
        assert (ROOT / package.replace(".", "/") / "__init__.py").is_file(), f"{package} has no __init__.py"
    banned = settings()["tool"]["ruff"]["lint"]["flake8-tidy-imports"]["banned-api"]
    assert set(banned) == set(LINKED) - {"assets", "configs"}


def test_requirements_are_names_and_versions_and_lower_bounds_are_what_is_tested() -> None:
    lines = [line for line in (ROOT / "requirements.lock").read_text().splitlines() if not line.startswith("#")]
    pinned: dict[str, str] = {}
    for line in lines:
        match = re.fullmatch(r"([a-z0-9][a-z0-9.-]*)==([0-9][A-Za-z0-9.]*)(?: ; [^@]+)?", line)
        assert match, f"requirements.lock: '{line}' is not NAME==VERSION with at most a marker"
        pinned.setdefault(match[1], match[2])  # where Pythons differ, the older version comes first
    project = settings()["project"]
    extras = project["optional-dependencies"]
    (own, *dev) = extras["dev"]  # the project's own extras that tests need, then packages
    match = re.fullmatch(r"flowrl-toolkit\[([a-z,-]+)\]", own)
    assert match
    packages = [wanted for extra in match[1].split(",") for wanted in extras[extra]]
    for wanted in project["dependencies"] + dev + packages:
        name, bound, above = bounds(wanted)
        have = [int(part) for part in pinned[name].split(".")]
        assert have >= [int(part) for part in bound.split(".")], f"{name}: pinned {pinned[name]}, needs {bound}"
        assert above is None or have[0] < int(above), f"{name}: pinned {pinned[name]}, needs less than {above}"
    oldest = json.loads((ROOT / "docs" / "research" / "trials" / "oldest_versions.json").read_text())["installed"]
    for wanted in project["dependencies"] + packages:
        name, bound, _ = bounds(wanted)
        tested = {pinned[name], oldest.get(name, pinned[name])}
        assert any(f"{version}.".startswith(f"{bound}.") for version in tested), (
            f"{name}: the lowest bound is {bound}, and tested are {' and '.join(tested)}: run make oldest"
        )


def bounds(wanted: str) -> tuple[str, str, str | None]:
    """Name, lower bound and the major release that is too new, of a requirement."""
    match = re.fullmatch(r"([a-z0-9-]+)>=([0-9.]+)(?:,<([0-9]+))?", wanted)
    assert match, f"{wanted}: write NAME>=VERSION or NAME>=VERSION,<MAJOR"
    return match[1], match[2], match[3]


@pytest.mark.slow
def test_the_source_archive_holds_what_git_has_once(archive: Path) -> None:
    with tarfile.open(archive) as content:
        names = {member.name.partition("/")[2] for member in content if not member.isdir()}
    assert archive.stat().st_size <= LARGEST_ARCHIVE
    assert {"requirements.lock", "Makefile", "CHANGELOG.md", "CONTRIBUTING.md", "tests/test_packaging.py"} <= names
    for folder in ("docs", "launch", *LINKED):
        for inside, folders, files in os.walk(ROOT / folder):
            folders[:] = set(folders) - skipped(inside, folders)
            here = Path(inside).relative_to(ROOT)
            assert {f"{here / file}" for file in set(files) - skipped(inside, files)} <= names, inside
    assert not [name for name in names if re.match(rf"flowrl/({'|'.join(LINKED)})/", name)]  # not through the links too
    assert not [
        name for name in names if name.startswith(("runs/", "build/", "dist/", ".venv")) or "__pycache__" in name
    ]


@pytest.mark.slow
def test_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if not name.endswith("/")}
        metadata = next(archive.read(name).decode() for name in names if name.endswith(".dist-info/METADATA"))
    assert wheel.name.startswith("flowrl_toolkit-")
    assert wheel.stat().st_size <= LARGEST_ARCHIVE
    assert "Name: flowrl-toolkit" in metadata
    inside = {name for name in names if ".dist-info/" not in name}
    assert inside == package_files(ROOT)
    assert "flowrl/py.typed" in inside
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)


@pytest.mark.slow
def test_wheel_works_from_another_folder(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "rewards.py").write_text("raise RuntimeError('the user file was imported instead of ours')\n")
    for name in ("samplers", "pipelines", "configs"):
        shutil.copy(tmp_path / "rewards.py", tmp_path / f"{name}.py")
    script = tmp_path / "script.py"
    script.write_text(
        "import importlib.resources, pathlib, sys\n"
        "import flowrl, flowrl.samplers, flowrl.rewards, flowrl.pipelines, flowrl.config.train\n"
        "from flowrl.samplers import KERNELS\n"
        "assert 'flow_sde' in KERNELS\n"
        "root = importlib.resources.files('flowrl')\n"
        "print(pathlib.Path(flowrl.__file__).parent)\n"
        "from flowrl.config.base import config_files\n"
        "print(len(config_files()))\n"
        "print(sum(1 for f in (root / 'assets').iterdir()))\n"
        "assert not {'rewards', 'samplers', 'pipelines', 'configs'} & set(sys.modules)\n"
    )
    where, configs, assets = run(installed, script, cwd=tmp_path).split()
    assert Path(where).is_relative_to(installed.parents[1])
    assert int(configs) == len(list((ROOT / "configs").rglob("*.yaml"))) > 0
    assert int(assets) == len([p for p in (ROOT / "assets").iterdir() if not p.name.startswith((".", "__"))]) > 0
    assert "train" in run(installed, "-m", "flowrl", "--help", cwd=tmp_path.parent)
    assert "train" in run(installed.with_name("flowrl"), "--help", cwd=tmp_path.parent)


@pytest.mark.slow
def test_checkout_works_without_installation_and_next_to_files_of_the_same_names(tmp_path: Path) -> None:
    checkout = checkout_copy(tmp_path / "checkout")
    user = tmp_path / "user"
    user.mkdir()
    (user / "rewards.py").write_text("MINE = True\n")
    (user / "script.py").write_text(
        "import rewards, flowrl, flowrl.rewards, flowrl.samplers\n"
        "assert rewards.MINE and flowrl.rewards is not rewards\n"
        "print(flowrl.__file__)\n"
    )
    out = run(sys.executable, user / "script.py", cwd=user, PYTHONPATH=str(checkout))
    assert Path(out.strip()) == checkout / "flowrl" / "__init__.py"


def test_importing_the_package_is_light() -> None:
    code = "import flowrl, flowrl.config.train, sys; print(sorted({'torch', 'numpy', 'diffusers'} & set(sys.modules)))"
    assert run(sys.executable, "-c", code, cwd=ROOT).strip() == "[]"


def test_no_index_addresses_and_no_machine_paths_in_tooling() -> None:
    for name in ("pyproject.toml", "requirements.lock", "Makefile", ".ci/run", ".gitignore"):
        text = (ROOT / name).read_text()
        assert "://" not in text, name
        assert not re.search(r"(?m)(?<![\w.])/(?:opt|var|home|root)/", text), name


def test_what_runs_before_a_commit_is_make_lint() -> None:
    text = (ROOT / "Makefile").read_text()
    lint = text.partition("\nlint:")[2].partition("\n\n")[0]
    read = re.search(r"^READ := (.+)$", text, re.MULTILINE)
    assert read
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    assert config["default_stages"] == ["pre-commit"]
    *hooks, pushed = config["repos"][0]["hooks"]
    assert [hook["entry"] for hook in hooks] == re.findall(r"^\t@(.+)$", lint.replace("$(READ)", read[1]), re.MULTILINE)
    assert not any("stages" in hook for hook in hooks)
    assert pushed["stages"] == ["pre-push"]
    assert pushed["entry"].split()[1] == "tests/affected.py"


def test_nothing_tells_to_install_the_name_from_an_index() -> None:
    """The package is on no index: whoever takes its name there would be installed and run."""
    told = [
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for folder in ("flowrl", "rewards", "pipelines", "samplers", "docs", "launch", "tests/trials", ".")
        for path in sorted((ROOT / folder).glob("*" if folder == "." else "**/*"))
        if path.suffix in (".py", ".md", ".sh", ".yaml", ".ipynb") and path.is_file()
        for line in path.read_text(encoding="utf-8").splitlines()
        if re.search(r"\b(?:install|add) +(?:-\S+ +)*['\"]?flowrl(?:-toolkit)?(?:\[|['\"` ]|$)", line)
    ]
    assert told == []
