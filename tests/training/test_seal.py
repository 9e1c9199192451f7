"""A run folder has one owner, and a run goes on with what it was made with or not at all."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from reward_servers import reward_of, running
from tiny_runs import differences, lasting, lora, metrics, state
from toy_pipeline import toy_in_place, write_toy
from warm_forks import start_forks

from flowrl.cli import main
from flowrl.config.train import load_config
from flowrl.runs.evaluation_rows import evaluations
from flowrl.runtime.files import LOCK, is_taken, locked
from flowrl.training.checkpoints import checkpoints
from flowrl.training.parts import read_run_prompts
from flowrl.training.resume_check import changes, inputs_of, model_of

EVALUATED = ("num_iterations=4", "eval_every=2", "eval.num_images=0", "prompts.eval=prompts.txt")


@pytest.fixture(autouse=True)
def terminal() -> Iterator[None]:
    """Under nohup a closed terminal is nothing; tests may run under it."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.fixture(scope="module")
def toys(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    yield from toy_in_place(tmp_path_factory.mktemp("seal"))


@pytest.fixture
def toy(toys: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The toy's files in a folder of this test, which is the working folder; returns it."""
    monkeypatch.chdir(tmp_path)
    write_toy(
        tmp_path, prompts={"train": "prompts.txt"}, rewards=[{"file": "toy_rewards.py", "function": "brightness"}]
    )
    return tmp_path


def train(*overrides: str, out: str = "run", code: int = 0) -> Path:
    assert main(["train", "toy.yaml", f"out={out}", *overrides]) == code
    return Path(out)


def resume(run: Path, *overrides: str) -> int:
    return main(["train", f"resume={run}", *overrides])


def files(run: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in run.rglob("*") if path.is_file() and path.name != LOCK}


def manifest(run: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run / "manifest.json").read_text())
    return found


def same(a: Path, b: Path) -> None:
    assert metrics(a) == metrics(b)
    assert lora(a) == lora(b)
    assert differences(lasting(a), lasting(b)) == 0


def stopping(toy: Path, call: int, how: str = "SIGINT", first: str = "pass") -> str:
    """The override that takes a reward which does something and then sends a signal, at one of its calls."""
    path = toy / f"stopping_{how}_{call}.py"
    path.write_text(
        "import os, signal\ncalls = 0\n\ndef brightness(images, prompts, metadata):\n    global calls\n"
        f"    calls += 1\n    if calls == {call}:\n        {first}\n        signal.raise_signal(signal.{how})\n"
        "    return 100 * images.mean((1, 2, 3))\n"
    )
    return f"rewards=[{{file: {path.name}, function: brightness}}]"


# ---- one owner -------------------------------------------------------------------------------------------------------


def test_a_run_holds_its_folder_while_it_trains(toy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The reward tries to come in, as a second command would."""
    (toy / "looking.py").write_text(
        "from pathlib import Path\nfrom flowrl.cli import main\n\ndef look(images, prompts, metadata):\n"
        "    assert main(['train', 'resume=run']) == 1\n    assert main(['train', 'toy.yaml', 'out=run']) == 1\n"
        "    return images.mean((1, 2, 3))\n"
    )
    run = train("rewards=[{file: looking.py, function: look}]")
    refused = [line for line in capsys.readouterr().err.splitlines() if "is still at work in run" in line]
    assert len(refused) == 2
    assert all(f"another run is still at work in run (process {os.getpid()} on " in line for line in refused)
    assert (run / LOCK).read_text() == ""
    assert resume(run, "num_iterations=2") == 0  # the lock is free again


def test_a_lock_alone_does_not_make_a_folder_full(toy: Path) -> None:
    with locked(toy / "run", "another run"):
        assert not is_taken(toy / "run")
        assert main(["train", "toy.yaml", "out=run"]) == 1
    train()


def test_without_locks_it_is_said_and_goes_on(
    toy: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def none(file: Any, how: int) -> None:
        raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))

    monkeypatch.setattr(fcntl, "flock", none)
    train()
    assert "run: this file system has no locks" in capsys.readouterr().err


def test_a_home_folder_is_meant_by_its_sign(toy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(toy / "home"))
    train(out="~/runs/x")
    assert (toy / "home" / "runs" / "x" / "config.yaml").is_file()
    assert not (toy / "~").exists()
    assert main(["train", "resume=~/runs/x"]) == 0


def test_the_lora_is_for_whoever_may_read_the_folder(toy: Path) -> None:
    before = os.umask(0o027)
    try:
        run = train()
    finally:
        os.umask(before)
    (path,) = (run / "lora").glob("*.safetensors")
    assert path.stat().st_mode & 0o777 == 0o640


# ---- one run ---------------------------------------------------------------------------------------------------------


def test_another_runs_checkpoint_is_refused(toy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, other = train(), train("seed=1", "num_iterations=2", out="other")
    assert manifest(run)["run"] != manifest(other)["run"]
    assert state(run)["run"] == manifest(run)["run"]
    shutil.copytree(checkpoints(other)[-1], run / "checkpoints" / "000002")
    before = files(run)
    assert resume(run, "num_iterations=4") == 1
    assert "is of another run" in capsys.readouterr().err
    assert files(run) == before
    shutil.rmtree(run / "checkpoints" / "000002")
    assert resume(run, "num_iterations=2") == 0


def test_a_manifest_with_other_inputs_is_refused(toy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = train()
    found = manifest(run)
    (run / "manifest.json").write_text(json.dumps(found | {"inputs_digest": "0"}))
    assert resume(run, "num_iterations=2") == 1
    assert "made with other inputs than manifest.json records" in capsys.readouterr().err
    (run / "manifest.json").write_text("[]")
    assert resume(run, "num_iterations=2") == 1
    assert "run/manifest.json: must hold an object" in capsys.readouterr().err


def test_without_its_manifest_a_run_goes_on_when_told_to(toy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = train()
    (run / "manifest.json").unlink()
    assert resume(run, "num_iterations=2") == 1
    assert "its manifest.json does not say what it was made with" in capsys.readouterr().err
    assert resume(run, "num_iterations=2", "resume_changed=true") == 0
    assert resume(run, "num_iterations=3") == 0
    assert state(run)["run"] == manifest(run)["run"]


def test_the_manifest_keeps_its_history(toy: Path) -> None:
    run = train()
    begun = manifest(run)
    assert resume(run, "num_iterations=2") == 0
    now = manifest(run)
    kept = ("run", "started", "command", "git_commit", "versions", "inputs", "inputs_digest")
    assert {key: now[key] for key in kept} == {key: begun[key] for key in kept}
    (entry,) = now["resumed"]
    assert (entry["iteration"], entry["changes"]) == (1, [])
    assert entry.keys() >= {"started", "command", "git_commit", "versions", "num_processes"}


# ---- one set of inputs -----------------------------------------------------------------------------------------------


def _edit_config(key: str, value: Any) -> None:
    path = Path("run/config.yaml")
    config = yaml.safe_load(path.read_text())
    *parents, last = key.split(".")
    inner = config
    for name in parents:
        inner = inner[name]
    inner[last] = value
    path.write_text(yaml.safe_dump(config))


def _change_prompts() -> None:
    lines = Path("prompts.txt").read_text().splitlines()
    Path("prompts.txt").write_text("\n".join(["a new one", *lines[1:], "one more"]) + "\n")


def _change_reward() -> None:
    path = Path("toy_rewards.py")
    path.write_text(path.read_text() + "\n# another file\n")


CHANGES: dict[str, tuple[Callable[[], None], str]] = {
    "prompts": (_change_prompts, r"prompts.train: of \d+ rows 1 changed, 1 added"),
    "reward": (
        _change_reward,
        r"reward brightness: version .*user_file:toy_rewards.py:.* -> .*user_file:toy_rewards.py:",
    ),
    "learning rate": (lambda: _edit_config("optim.lr", 0.5), r"config: optim.lr 0.01 -> 0.5"),
    "seed": (lambda: _edit_config("seed", 7), r"config: seed 0 -> 7"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_changed_inputs_are_refused_before_a_byte_changes(
    toy: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = train()
    change, words = CHANGES[name]
    change()
    before = files(run)
    assert resume(run, "num_iterations=2") == 1
    said = capsys.readouterr().err
    assert re.search(words, said)
    assert "flowrl train resume=run resume_changed=true" in said
    assert files(run) == before
    assert resume(run, "num_iterations=2", "resume_changed=true") == 0
    assert re.search(words, "\n".join(manifest(run)["resumed"][0]["changes"]))
    assert "resume_changed: false" in (run / "config.yaml").read_text()
    assert resume(run, "num_iterations=3") == 0  # what was allowed once is what the run is made with now


def test_a_changed_learning_rate_is_the_one_that_is_used_and_logged(toy: Path) -> None:
    run = train()
    assert resume(run, "num_iterations=2", "resume_changed=true", "optim.lr=0.5") == 0
    assert [row["lr"] for row in metrics(run)] == [0.01, 0.5]
    assert state(run)["optimizer"]["param_groups"][0]["lr"] == 0.5
    plain = train("num_iterations=2", out="plain")
    assert lora(run) != lora(plain)


@pytest.mark.parametrize("override", ["policy.lora_rank=3", "policy.ema_decay=0.5"])
def test_other_weights_are_refused_whatever_is_allowed(
    toy: Path, override: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = train()
    before = files(run)
    assert resume(run, "num_iterations=2", "resume_changed=true", override) == 1
    assert "the checkpoint holds other weights than the configuration asks for" in capsys.readouterr().err
    assert files(run) == before


def test_the_option_is_for_runs_that_go_on(toy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train("resume_changed=true", code=1)
    assert "belongs beside resume=RUN" in capsys.readouterr().err
    run = train()
    assert resume(run, "optim.lr=0.5") == 1
    assert "add resume_changed=true to change any setting" in capsys.readouterr().err


def test_files_and_lists_are_compared_by_what_they_hold(toy: Path) -> None:
    (toy / "model").mkdir()
    for name in ("weights.bin", "config.json", "README.md"):
        (toy / "model" / name).write_bytes(name.encode() * 10)
    (toy / "pairs.jsonl").write_text('{"prompt": "p", "winner": "a.png", "loser": "b.png"}\n')
    for name in ("a.png", "b.png"):
        (toy / name).write_bytes(name.encode())
    pairs = ("objective.name=dpo_offline", "objective.options.pairs=pairs.jsonl")
    config = load_config(toy / "toy.yaml", ["pipeline.model=./model", "policy.init_lora=./model/weights.bin", *pairs])
    prompts = read_run_prompts(config.prompts)
    before = inputs_of(config, prompts)
    assert changes(before, inputs_of(config, prompts), config) == []
    assert model_of(config).keys() == {"weights.bin", "config.json"}
    (toy / "model" / "weights.bin").write_bytes(b"others")
    (toy / "b.png").write_bytes(b"another")
    Path("prompts.txt").write_text("\n".join(reversed(Path("prompts.txt").read_text().splitlines())))
    assert changes(before, inputs_of(config, read_run_prompts(config.prompts)), config) == [
        f"prompts.train: of {len(prompts.train)} rows the order changed",
        "pairs: of 1 rows 1 changed",
        "model: changed are weights.bin",
        "init_lora: changed are weights.bin",
    ]
    (toy / "images.jsonl").write_text('{"prompt": "p", "image": "a.png"}\n')
    images = ("recipe=forward", "sampler.kernel=ode", "objective.name=sft", "objective.options.images=images.jsonl")
    shown = load_config(toy / "toy.yaml", images)
    sealed = inputs_of(shown, prompts)
    (toy / "a.png").write_bytes(b"another")
    assert changes(sealed, inputs_of(shown, prompts), shown) == ["images: of 1 rows 1 changed"]
    without = inputs_of(load_config(toy / "toy.yaml", ["pipeline.model=./model", *pairs]), prompts)
    assert "init_lora: changed are weights.bin" in changes(without, before, config)
    more = load_config(toy / "toy.yaml", ["eval.seed=3"])
    older = {"config": {key: value for key, value in before["config"].items() if not key.startswith("eval.")}}
    now = inputs_of(more, prompts)
    assert "config: eval.seed not there -> 3" in changes(older, now, more)
    assert not any("eval.batch_size" in line for line in changes(older, now, more))  # a new setting at its default


# ---- stops -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def whole(toy: Path) -> Path:
    return train(*EVALUATED, stopping(toy, 99), out="whole")


@pytest.mark.slow
@pytest.mark.parametrize("how", ["SIGINT", "SIGHUP"])
def test_an_evaluation_that_was_due_at_a_stop_is_made_when_the_run_goes_on(toy: Path, whole: Path, how: str) -> None:
    """And a run that is killed in the middle of it makes it again."""
    run = train(*EVALUATED, stopping(toy, 2, how), code=130)
    assert [row["iteration"] for row in metrics(run) if "reward" not in row] == [0]
    shutil.copytree(run, "killed")
    for folder in (run, Path("killed")):
        if folder.name == "killed":
            with (folder / "metrics.jsonl").open("a") as file:
                file.write('{"iteration": 2, "eval/reward/bri')
        assert resume(folder) == 0
        assert metrics(folder) == metrics(whole)
        assert lora(folder) == lora(whole)


def test_under_nohup_a_closed_terminal_is_nothing(toy: Path) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        train("num_iterations=2", stopping(toy, 1, "SIGHUP"))
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_terminal_that_is_gone_does_not_end_the_run(toy: Path) -> None:
    """Whatever it printed then would fail. The reward of a process of its own closes the other end of its terminal."""
    leader, terminal = os.openpty()

    def take_terminal() -> None:
        os.dup2(terminal, 1)
        os.dup2(terminal, 2)
        os.close(terminal)

    closing = stopping(toy, 2, "SIGHUP", f"os.close({leader})")
    started = start_forks(
        ["train", "toy.yaml", "out=run", "num_iterations=3", closing], [toy], toy / "log", take_terminal
    )
    os.close(terminal)
    os.close(leader)
    assert started.wait(60) == (130,)
    assert len(metrics(toy / "run")) == 2
    assert [path.name for path in checkpoints(toy / "run")][-1] == "000002"


def test_a_run_that_was_ended_before_its_report_gets_it(toy: Path) -> None:
    run = train()
    before = metrics(run), lora(run)
    for name in ("report.html", "summary.json"):
        (run / name).unlink()
    (run / ".report.html.x.tmp").write_text("<ht")
    assert resume(run) == 0
    assert not (run / ".report.html.x.tmp").exists()
    assert (run / "report.html").is_file()
    assert (run / "summary.json").is_file()
    assert (metrics(run), lora(run)) == before


# ---- nodes -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_nodes_without_a_shared_disk_go_on_from_the_main_ones_checkpoint(toy: Path) -> None:
    """Two processes in folders of their own: the second holds no checkpoint."""
    nodes = (toy / "node0", toy / "node1")
    for node in nodes:
        node.mkdir()
        for name in ("toy.yaml", "prompts.txt", "toy_rewards.py"):
            shutil.copy(toy / name, node / name)
    assert start_forks(["train", "toy.yaml", "out=run", *EVALUATED], nodes, toy / "log").wait() == (0, 0)
    assert not (nodes[1] / "run").exists()
    whole = shutil.copytree(nodes[0] / "run", toy / "whole")
    for node, gone in zip(nodes, (("000003", "000004"), ("000001", "000002", "000003", "000004")), strict=True):
        if node == nodes[1]:
            shutil.copytree(whole, node / "run")
        (node / "run" / "summary.json").unlink()
        for name in gone:
            shutil.rmtree(node / "run" / "checkpoints" / name)
    assert start_forks(["train", "resume=run"], nodes, toy / "log").wait() == (0, 0)
    same(nodes[0] / "run", whole)

    config = nodes[1] / "run" / "config.yaml"
    config.write_text(config.read_text().replace("seed: 0", "seed: 1", 1))
    refused = start_forks(["train", "resume=run", "num_iterations=5"], nodes, toy / "log")
    assert 0 not in refused.wait()
    assert refused.said().count("seed: 0 in process 0, 1 in process 1") == 2


def test_evaluations_of_a_dropped_future_are_not_the_result(toy: Path) -> None:
    run = train(*EVALUATED, "checkpoint_every=2")
    shutil.rmtree(run / "checkpoints" / "000004")
    assert evaluations(run) == [0, 2, 4]
    assert resume(run, "resume_changed=true", "num_iterations=3", "optim.lr=0.5") == 0
    assert evaluations(run) == [0, 2, 3]


def test_an_evaluation_made_at_a_resume_is_saved(toy: Path) -> None:
    """Of 4 images one by one: 4 before, 1 in each of two iterations, 4, 1, and then in the last evaluation."""
    settings = (*EVALUATED, "num_iterations=3", "eval.batch_size=1", "checkpoint_every=2")
    run = train(*settings, stopping(toy, 13), code=130)
    assert resume(run) == 0
    assert resume(run, "num_iterations=6") == 0
    assert [row["iteration"] for row in metrics(run) if "reward" not in row] == [0, 2, 3, 4, 6]


def test_a_lora_that_a_run_goes_on_with_is_good_once_it_has_drawn(
    toy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first rollout after the resume is finite; its update takes the weights beyond reason."""
    run = train("checkpoint_every=100", "num_iterations=2")
    saved = lora(run)
    (run / "lora" / "pytorch_lora_weights.safetensors").write_bytes(b"of a later iteration")
    assert resume(run, "resume_changed=true", "num_iterations=9", "optim.lr=1e6") == 1
    assert "the policy has diverged since iteration 2" in (shown := capsys.readouterr().err)
    assert "The last good checkpoint" not in shown
    assert lora(run) == saved


@pytest.mark.slow
def test_a_run_goes_on_where_its_reward_server_has_moved(toy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def at(url: str) -> str:
        return f"rewards=[{{name: remote, options: {{url: '{url}'}}}}]"

    moved = "rewards.0.options.url"
    with running(reward_of()) as before, running(reward_of()) as after, running(reward_of(version="level:2")) as other:
        run = train("num_iterations=1", at(before.url))
        assert resume(run, "num_iterations=2", f"{moved}={other.url}") == 1
        assert 'reward remote: version "remote:flowrl:level:level:1:png-8bit" -> ' in capsys.readouterr().err
        assert resume(run, "num_iterations=2", f"{moved}=[{after.url}, {before.url}]") == 0
        assert resume(run, "num_iterations=3", f"{moved}={after.url}") == 0
        same(run, train("num_iterations=3", at(before.url), out="whole"))
