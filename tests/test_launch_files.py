"""What lies in `launch/` and the container file, as far as it can be tried without Slurm, a cluster or docker.

`tests/training/test_processes.py` trains with one_node.sh and two_nodes.sh.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = sorted((ROOT / "launch").iterdir())
SAYS = f"""#!{sys.executable}
import json, os, sys
kept = {{name: os.environ.get(name) for name in ("NODE", "NODES", "MASTER", "PORT", "RAY_USAGE_STATS_ENABLED")}}
print(json.dumps([sys.argv, kept]))
"""


def run(script: str, *arguments: str, code: int = 0, **environment: str) -> str:
    done = subprocess.run(
        ["bash", str(ROOT / "launch" / script), *arguments], env={**os.environ, **environment}, text=True,
        capture_output=True, check=False,
    )  # fmt: skip
    assert done.returncode == code, done.stderr
    return done.stdout + done.stderr


@pytest.fixture
def says(tmp_path: Path) -> Path:
    """A command that says how it was called."""
    command = tmp_path / "says"
    command.write_text(SAYS)
    command.chmod(0o755)
    return command


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_are_bash_and_stop_at_errors(script: Path) -> None:
    subprocess.run(["bash", "-n", str(script)], check=True)
    text = script.read_text()
    assert os.access(script, os.X_OK)
    assert text.startswith("#!/usr/bin/env bash\n# ")
    assert "\nset -euo pipefail\n" in text
    assert all(len(line) <= 120 for line in text.splitlines())


def test_one_node_and_several_ask_torchrun_for_the_same(says: Path) -> None:
    one = json.loads(run("one_node.sh", "c.yaml", "out=a b", PYTHON=str(says)))[0][1:]
    assert one == ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=gpu", "-m", "flowrl", "train",
                   "c.yaml", "out=a b"]  # fmt: skip
    several = json.loads(run("two_nodes.sh", "c.yaml", PYTHON=str(says), NODE="1", MASTER="10.0.0.1"))[0][1:]
    assert several == ["-m", "torch.distributed.run", "--nnodes=2", "--node-rank=1", "--nproc-per-node=gpu",
                       "--master-addr=10.0.0.1", "--master-port=29400", "-m", "flowrl", "train", "c.yaml"]  # fmt: skip
    assert "NODE: which machine" in run("two_nodes.sh", "c.yaml", PYTHON=str(says), MASTER="a", code=1)


@pytest.mark.parametrize("begun", [False, True])
def test_slurm_starts_a_run_or_goes_on_with_it(says: Path, tmp_path: Path, begun: bool) -> None:
    """With an srun that does on this machine what one task does on the second node."""
    for name, text in {
        "srun": '#!/usr/bin/env bash\nshift\nSLURM_NODEID=1 exec "$@"\n',
        "scontrol": '#!/usr/bin/env bash\n[[ "$*" == "show hostnames gpu[3-4]" ]] && printf "gpu3\\ngpu4\\n"\n',
    }.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    folder = tmp_path / "a run"
    if begun:
        folder.mkdir()
        (folder / "config.yaml").touch()
    job = tmp_path / "slurm_script"  # Slurm runs a copy
    shutil.copy(ROOT / "launch" / "slurm.sbatch", job)
    done = subprocess.run(
        ["bash", str(job), str(folder), "c.yaml", "seed=2"], text=True, capture_output=True, check=False,
        env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHON": str(says),
             "SLURM_JOB_NODELIST": "gpu[3-4]", "SLURM_JOB_NUM_NODES": "2", "SLURM_SUBMIT_DIR": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    arguments, environment = json.loads(done.stdout)
    assert arguments[-3 if begun else -5 :] == (
        ["flowrl", "train", f"resume={folder}"] if begun else ["flowrl", "train", "c.yaml", "seed=2", f"out={folder}"]
    )
    assert {"--nnodes=2", "--node-rank=1", "--master-addr=gpu3"} <= set(arguments)
    assert environment["NODE"] == "1"


def test_a_ray_cluster_has_a_head_and_others_join_it(says: Path) -> None:
    head, environment = json.loads(run("ray_cluster.sh", "head", "--num-gpus=8", RAY=str(says)))
    assert head[1:] == ["start", "--head", "--port=6379", "--include-dashboard=false", "--block", "--num-gpus=8"]
    assert environment["RAY_USAGE_STATS_ENABLED"] == "0"
    join = json.loads(run("ray_cluster.sh", "join", "a:6379", RAY=str(says)))[0]
    assert join[1:] == ["start", "--address=a:6379", "--block"]
    assert "launch/ray_cluster.sh head" in run("ray_cluster.sh", code=2)


def test_the_container_is_made_as_a_checkout_is() -> None:
    """Parsed only: no image was built."""
    text = (ROOT / "Dockerfile").read_text()
    steps = [line.split(maxsplit=1) for line in text.splitlines() if line and not line.startswith("#")]
    commands = [part.strip() for word, rest in steps if word == "RUN" for part in rest.split("&&")]
    targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    version, *made = commands[-1].split()
    assert version == 'SETUPTOOLS_SCM_PRETEND_VERSION_FOR_FLOWRL_TOOLKIT="$VERSION"'
    assert made == ["make", "setup"]
    assert made[1] in targets
    assert [command.split()[0] for command in commands[:-1]] == ["apt-get", "apt-get", "rm"]
    assert commands[1].split()[-2:] == ["make", "git"]  # what the Makefile says is enough, besides Python
    python = re.search(r"ARG BASE=python:(\d+)\.(\d+)", text)
    assert python
    assert (int(python[1]), int(python[2])) >= (3, 11)
    assert "://" not in text
    assert {word for word, _ in steps} <= {"ARG", "FROM", "RUN", "WORKDIR", "COPY", "ENV", "ENTRYPOINT"}
    assert {"requirements.lock", "Makefile", "pyproject.toml"}.isdisjoint(
        (ROOT / ".dockerignore").read_text().splitlines()
    )
