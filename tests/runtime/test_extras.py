"""What a training does without, and what is said where it is wanted."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest

from flowrl.runtime.extras import EXTRAS, check_extra
from flowrl.runtime.failures import explain

ROOT = Path(__file__).resolve().parents[2]
NEEDED = set("accelerate diffusers numpy peft pillow pyyaml rich safetensors torch transformers".split())
HIDDEN = [*EXTRAS, "jaxtyping", "bitsandbytes", "torchao", "ray", "wandb"]
if int(version("huggingface-hub").partition(".")[0]) >= 2:  # which brings it, as 1 does not
    HIDDEN.remove("httpx2")
LACKING = f"""
import sys
from importlib.machinery import PathFinder

class Installed(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        hidden = {HIDDEN!r}
        return None if name.partition(".")[0] in hidden else PathFinder.find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = Installed
"""
"""Python code after which modules of extras are not there."""


def _projects() -> dict[str, list[str]]:
    found = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return {"": found["dependencies"], **found["optional-dependencies"]}


def test_a_training_needs_ten_packages_and_extras_have_what_messages_name() -> None:
    projects = _projects()
    assert {wanted.partition(">")[0] for wanted in projects[""]} == NEEDED
    for module, extra in EXTRAS.items():
        assert any(wanted.startswith(f"{module}>=") for wanted in projects[extra]), module
        assert f",{extra}," in projects["dev"][0].replace("[", ",").replace("]", ",")


def test_a_missing_package_is_told_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    said = explain(ModuleNotFoundError("No module named 'av.video'", name="av.video"))
    assert said.startswith(
        "the Python package 'av.video' is missing: in flowrl's folder, pip install -e '.[video]', or do"
    )
    assert "is missing: install it, or" in explain(ModuleNotFoundError("No module named 'other'", name="other"))
    check_extra("av", "a clip")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        ValueError,
        match=r"a clip needs the package av, which is not installed: in flowrl's folder, pip install -e .*\[video\]'$",
    ):
        check_extra("av", "a clip")


@pytest.mark.slow
def test_a_training_runs_without_extras(tmp_path: Path) -> None:
    """The embedded run with its detector, evaluations, intervals and report, and what wants more says so."""
    script = f"""{LACKING}
from flowrl.cli import main
small = ["num_iterations=1", "prompts_per_step=2", "group_size=2", "updates_per_rollout=1", "eval_every=1",
         "eval.num_prompts=6", "eval.num_images=4", "eval.num_steps=2", "sampler.num_steps=6", "budget.evals=0",
         "progress=false", "threads=1"]
assert main(["train", "tiny_recommended", *small, "out=run"]) == 0
assert main(["train", "tiny_recommended", *small, "out=other", "logging.tensorboard=true"]) == 1
assert main(["train", "tiny_wan_recommended", "out=third"]) == 1
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "report.html").is_file()
    assert not (tmp_path / "run" / "tensorboard").exists()
    assert "logging.tensorboard=true needs the package tensorboard, which is not installed" in done.stderr
    assert "family wan makes videos, and writing them needs the package av" in done.stderr


def test_shapes_come_from_the_file_that_does_without_jaxtyping() -> None:
    own = [
        str(path.relative_to(ROOT))
        for room in ("flowrl", "pipelines", "rewards", "samplers")
        for path in (ROOT / room).rglob("*.py")
        if re.search(r"^\s*(from|import) jaxtyping", path.read_text(encoding="utf-8"), re.MULTILINE)
    ]
    assert own == ["flowrl/runtime/shapes.py"]
