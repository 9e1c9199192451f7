"""`flowrl doctor RUN` on real runs of the toy, each with one planted fault: it is named, with its time and its cure."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from toy_pipeline import reward_list, write_toy

from flowrl.cli import main
from flowrl.health.diagnosis import Check, divided
from flowrl.health.run_findings import diagnose_run
from flowrl.pipelines import PIPELINES
from flowrl.rendering.terminal_text import COLUMNS

SOME_NAN = "b[::2] = float('nan'); return b"
BY_PROMPT = "import torch; return torch.tensor([float(len(prompt)) for prompt in prompts])"


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setitem(PIPELINES, "sd3", "toy_pipeline")
    return write_toy(tmp_path)


def train(toy: Path, name: str, *settings: str, code: int = 0) -> Path:
    out = toy.parent / name
    assert main(["train", str(toy), f"out={out}", *settings]) == code
    return out


def written(toy: Path, line: str) -> str:
    """The override that takes a reward of which this is the last line; `b` is the images' brightness."""
    file = toy.parent / "planted.py"
    file.write_text(f"calls = []\ndef reward(images, prompts, metadata):\n    b = images.mean((1, 2, 3))\n    {line}\n")
    return f"rewards=[{{file: {file}, function: reward}}]"


def found_in(run: Path) -> dict[str, Check]:
    return {check.name: check for check in diagnose_run(run).checks}


def test_a_healthy_run_is_called_so(toy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = train(toy, "healthy", "num_iterations=3")
    capsys.readouterr()
    assert main(["doctor", str(run)]) == 0
    shown = capsys.readouterr().out
    assert f"{run}: finished, 3 of 3 iterations logged" in " ".join(shown.split())
    assert "✓ healthy  nothing is wrong according to importance ratio" in shown
    assert main(["doctor", str(run), "group_size=2"]) == 1
    assert "has no effect on the run" in capsys.readouterr().err


def test_a_reward_that_is_nan(toy: Path) -> None:
    later = "calls.append(0); return b * float('nan') if len(calls) > 2 else b"
    dead = train(toy, "dead", "num_iterations=4", written(toy, later), code=1)
    stopped = found_in(dead)["stopped"]
    assert stopped.state == "fault"
    assert "iteration 2: 8 of 8 images got no valid reward" in stopped.found
    assert stopped.cure.startswith("Fix the reward")
    partly = found_in(train(toy, "partly", "num_iterations=3", written(toy, SOME_NAN)))["failed rewards"]
    assert partly.state == "warning"
    assert "unhealthy since iteration 0 (" in partly.found
    assert "fix the reward or its server" in partly.cure


def test_a_rate_of_a_million(toy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = train(toy, "wild", "optim.lr=1e6", "num_iterations=4", code=1)
    capsys.readouterr()
    assert main(["doctor", str(run)]) == 1
    shown = capsys.readouterr().out
    lines = shown.splitlines()
    assert max(len(line) for line in lines if str(run) not in line) <= COLUMNS
    assert len(lines) <= 12
    said = " ".join(shown.split())
    assert "✗ stopped the policy has diverged since iteration 0: weights of the LoRA reach 1e+06, beyond 1000" in said
    assert "→ start again with a smaller optim.lr" in said
    assert said.count("diverged") == 1  # the error tells it, so the warning of the log does not


@pytest.mark.slow
def test_a_hacked_reward(toy: Path) -> None:
    (toy.parent / "held.py").write_text(
        "def darkness(images, prompts, metadata):\n    return -images.mean((1, 2, 3))\n"
    )
    run = train(
        toy, "hacked", "num_iterations=24", "optim.lr=0.05", "policy.lora_rank=8", "checkpoint_every=99",
        "eval_every=8", f"prompts.eval={toy.parent / 'prompts.txt'}", "eval.samples_per_prompt=8",
        "eval.num_images=0", f"eval.rewards=[{{file: {toy.parent / 'held.py'}, function: darkness}}]",
    )  # fmt: skip
    hacked = found_in(run)["reward hacking"]
    assert hacked.state == "fault"
    assert "while every reward that is only measured fell (darkness -0." in hacked.found
    assert hacked.found.startswith("iteration")
    assert "start again with a higher kl_coef or a second reward" in hacked.cure


def test_dead_groups(toy: Path) -> None:
    run = train(toy, "flat", "num_iterations=3", written(toy, BY_PROMPT))
    dead = found_in(run)["groups without contrast"]
    assert dead.state == "fault"
    assert "zero_std_ratio is 1.000 on average over the last 3 iterations, unhealthy since iteration 0" in dead.found
    assert "group_size" in dead.cure
    partly = found_in(train(toy, "half", "num_iterations=4", reward_list(toy.parent, "half_fail")))
    assert partly["groups without contrast"].state == "warning"


def test_a_foreign_checkpoint(toy: Path) -> None:
    mine = train(toy, "mine", "num_iterations=2")
    other = train(toy, "other", "num_iterations=2", "seed=7")
    assert "healthy" in found_in(mine)
    newest = sorted((mine / "checkpoints").iterdir())[-1]
    shutil.rmtree(newest)
    shutil.copytree(other / "checkpoints" / newest.name, newest)
    foreign = found_in(mine)["checkpoint"]
    assert foreign.state == "fault"
    assert "is of another run" in foreign.found
    assert "put the run's own back, or remove" in foreign.cure
    (newest / "checkpoint.json").write_text("{}")
    assert "cannot be read" in found_in(mine)["checkpoint"].found


@pytest.mark.slow
def test_the_time_of_a_fault_and_what_the_log_lacks(toy: Path) -> None:
    run = train(toy, "late", "num_iterations=30", "checkpoint_every=99")
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        row["kl"] = 5.0 if row["iteration"] >= 25 else 0.01
        if row["iteration"] >= 20:
            row["constant_ratio"] = 1.0
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"iteration": 3')
    found = found_in(run)
    assert "since iteration 25" in found["kl to the reference"].found
    assert found["constant images"].found.startswith("iterations 20 to 29, 10 times: 100% of the images")
    assert "1 line of metrics.jsonl could not be read" in found["log"].found


def test_a_reward_that_falls(toy: Path) -> None:
    run = train(toy, "falls", "num_iterations=6")
    path = run / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for error, said in ((0.1, True), (0.3, False)):
        for row in rows:
            row |= {"reward": 0.8 if row["iteration"] == 0 else 0.4, "reward_error": error}
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        found = found_in(run)
        assert ("reward" in found) == said
        assert ("healthy" in found) != said
    # 0.4 lower, with an error of hypot(0.1, 0.1 / sqrt(4)): 3.6 of them
    for row in rows:
        row["reward_error"] = 0.1
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert "0.800 before the first update, 0.400 over the last 4 iterations, 3.6" in found_in(run)["reward"].found


def test_an_error_is_divided_before_its_cure() -> None:
    assert divided("the disk is full: make room") == ("the disk is full", "make room")
    assert divided("reaches 1e30, 3 at most: bound it with clip: [LOW, HIGH], or fix it")[1].startswith("bound it")
    assert divided("8 of 8 failed: nan 8. Fix the reward") == ("8 of 8 failed: nan 8", "Fix the reward")
    assert divided("it is not ready: start it (now), or set wait: false.")[1] == "start it (now), or set wait: false."
    assert divided("nothing else") == ("nothing else", "")
