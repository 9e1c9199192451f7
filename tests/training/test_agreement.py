"""Processes of a run compare what they were given before anything loads, and never wait without a word or an end."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from toy_pipeline import toy_in_place, write_toy
from warm_forks import Started, start_forks

from flowrl.cli import main
from flowrl.config.train import load_config
from flowrl.runtime.failures import explain
from flowrl.training.agreement import OWN, difference, facts_of, loaded_facts, rounding_note
from flowrl.training.parts import read_run_prompts
from flowrl.training.processes import meeting
from flowrl.training.processes.launched import Launched, launched
from flowrl.training.processes.meeting import Meeting
from flowrl.training.resume_check import RESUME_KEYS, inputs_of


@pytest.fixture(scope="module")
def toys(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    yield from toy_in_place(tmp_path_factory.mktemp("agreement"))


@pytest.fixture
def toy(toys: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return written(tmp_path)


def written(folder: Path) -> Path:
    """The toy's files, with paths that are those of every node."""
    rewards = [{"file": "toy_rewards.py", "function": "brightness"}]
    write_toy(folder, prompts={"train": "prompts.txt"}, rewards=rewards, num_iterations=2)
    return folder


def facts(*overrides: str) -> dict[str, str]:
    config = load_config(Path("toy.yaml"), overrides)
    return facts_of(config, inputs_of(config, read_run_prompts(config.prompts)), resumed=False)


# ---- what is compared ------------------------------------------------------------------------------------------------

CHANGED = {
    "num_iterations": "9", "checkpoint_every": "7", "keep_checkpoints": "5", "prompts.cache": "cache",
    "pipeline.offload": "[vae]", "optim.offload": "true", "parallel.shard": "2", "parallel.replicate": "2",
    "parallel.context": "2", "workers.rollouts": "2", "workers.shard": "2 workers.rollouts=2",
    "workers.rewards": "2", "workers.address": "1.2.3.4:1 workers.rewards=2",
    "workers.rollout_gpus": "0.5 workers.rollouts=2", "workers.reward_gpus": "0.5 workers.rewards=2",
    "workers.reward_env": "toy.yaml workers.rewards=2",
    "logging.tensorboard": "true", "logging.wandb": "offline", "logging.trackio": "local", "logging.project": "other",
    "logging.entity": "other", "eval_every": "3 prompts.eval=prompts.txt", "seed": "1", "optim.lr": "0.5",
}  # fmt: skip


@pytest.mark.parametrize("key", CHANGED)
def test_a_setting_that_differs_is_named_with_both_values(toy: Path, key: str) -> None:
    here, there = facts(), facts(*f"{key}={CHANGED[key]}".split(" "))
    said = difference([here, there, here])
    assert f"\n  {key}: " in said
    assert " in processes 0, 2, " in said
    assert " in process 1" in said


def test_every_key_that_a_resumed_run_may_change_is_compared_but_those_of_a_machine(toy: Path) -> None:
    assert set(RESUME_KEYS) - set(CHANGED) - set(OWN) == {"resume"}
    assert difference([facts(), facts("threads=1", "progress=true", "out=elsewhere", "pipeline.device=auto")]) == ""
    assert difference([facts("prompts.cache=a"), facts("prompts.cache=b")]) == ""


def test_content_of_prompts_and_of_files_that_settings_name_is_compared(toy: Path) -> None:
    before = facts()
    (toy / "prompts.txt").write_text("another\nand more\n")
    with (toy / "toy_rewards.py").open("a") as file:
        file.write("\n# other\n")
    said = difference([before, facts()])
    assert "content of prompts.train: 4 rows (" in said or "content of prompts.train: " in said
    assert "2 rows (" in said
    assert "content of rewards.0.file (toy_rewards.py): " in said


def test_versions_and_models_are_compared(toy: Path) -> None:
    here = facts()
    there = here | {"version of torch": "1.0", "model file a.safetensors": "0123"}
    said = difference([here, there])
    assert f"version of torch: {here['version of torch']} in process 0, 1.0 in process 1" in said
    assert "model file a.safetensors: not there in process 0, 0123 in process 1" in said
    inputs = {"model": {"commit": "abc"}, "rewards": {"reward mine": 3}}
    assert "version of reward mine: 3 in process 0, 4 in process 1" in difference(
        [loaded_facts(inputs), loaded_facts(inputs | {"rewards": {"reward mine": 4}})]
    )


def test_what_moves_numbers_by_rounding_is_told(toy: Path) -> None:
    here = {"attention": "native", "card": "A"}
    assert rounding_note([here, here]) == ""
    assert "card: A in process 0, B in process 1" in rounding_note([here, here | {"card": "B"}])


def test_many_differences_and_long_values_stay_short() -> None:
    said = difference([{f"key{i}": "x" * 500 for i in range(20)}, {f"key{i}": "x" * 501 for i in range(20)}])
    assert "and 12 more" in said
    assert max(map(len, said.splitlines())) < 250


# ---- the meeting -----------------------------------------------------------------------------------------------------


class Shelf(dict[str, Any]):
    """A store in memory."""

    def set(self, key: str, value: str) -> None:
        self[key] = value.encode()

    def check(self, keys: list[str]) -> bool:
        return all(key in self for key in keys)


def meet_all(
    said: dict[int, dict[str, str]], *, world: int, limit: float = 0.5, leave: dict[int, str] | None = None
) -> tuple[dict[int, str], list[str]]:
    """What each process that comes to a meeting is told in the end, and the lines of those that waited."""
    shelf, heard, lines = Shelf(), dict[int, str](), list[str]()

    def one(rank: int) -> None:
        who = Launched(rank=rank, world=world, address="127.0.0.1", port=1)
        here = Meeting(store=shelf, who=who, limit=limit, hosts=rank == 0, tell=lines.append)  # type: ignore[arg-type]
        try:
            if leave and rank in leave:
                here.leave(leave[rank])
            else:
                here.agree(said[rank], lambda given: difference(given))
            heard[rank] = ""
        except ValueError as error:
            heard[rank] = str(error)

    threads = [threading.Thread(target=one, args=(rank,)) for rank in {*said, *(leave or {})}]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return heard, lines


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in {"_QUIET": 0.1, "_LOOK": 0.01, "_FAREWELL": 0.3}.items():
        monkeypatch.setattr(meeting, name, seconds)


@pytest.mark.usefixtures("quick")
def test_processes_that_agree_go_on_and_others_all_hear_the_same() -> None:
    assert meet_all({rank: {"a": "1"} for rank in range(3)}, world=3)[0] == {0: "", 1: "", 2: ""}
    heard, _ = meet_all({0: {"a": "1"}, 1: {"a": "1"}, 2: {"a": "2"}}, world=3)
    assert len(set(heard.values())) == 1
    assert "a: 1 in processes 0, 1, 2 in process 2" in heard[0]


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("missing", [0, 1])
def test_a_process_that_does_not_come_is_waited_for_by_name_and_not_for_ever(missing: int) -> None:
    heard, lines = meet_all({rank: {} for rank in range(3) if rank != missing}, world=3)
    assert len(heard) == 2
    assert all(f"process {missing} of 3 did not arrive within 0 s" in said for said in heard.values())
    assert any(line.startswith(f"Waiting for process {missing} of 3 ") for line in lines)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("rank", [0, 1])
def test_a_process_that_cannot_take_part_tells_the_others_why(rank: int) -> None:
    heard, _ = meet_all({1 - rank: {}}, world=2, leave={rank: "c.yaml: no such key"}, limit=20)
    assert f"process {rank} cannot take part" in heard[1 - rank]
    assert heard[1 - rank].endswith("c.yaml: no such key")


@pytest.mark.usefixtures("quick")
def test_names_that_are_no_text_and_secrets_are_told_in_letters_to_all() -> None:
    heard, _ = meet_all({0: {"file \udcff": "a"}, 1: {"file \udcff": "https://u:hunter2@h"}}, world=2)
    assert heard[0] == heard[1]
    assert "file \\udcff: a in process 0, https://SECRET@h in process 1" in heard[0]


# ---- launchers' variables --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE='two', which is not a whole number"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE=0, and a run has at least one"),
        ({"WORLD_SIZE": "-1"}, "WORLD_SIZE=-1, and a run has at least one"),
        ({"RANK": "1"}, "RANK=1 and WORLD_SIZE=unset"),
        ({"WORLD_SIZE": "2", "RANK": "2"}, "RANK=2 and WORLD_SIZE=2, and ranks are 0 to"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE=2 but no RANK and no MASTER_ADDR and no MASTER_PORT"),
        ({"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "a"}, "but no MASTER_PORT"),
        ({"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "a", "MASTER_PORT": "99999"}, "MASTER_PORT=99999, and ports"),
    ],
)
def test_variables_without_sense_are_named(
    given: dict[str, str], words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=words.replace("(", r"\(")):
        launched()
    assert main(["train", "tiny_recommended"]) == 1
    assert words in capsys.readouterr().err


def test_no_variables_are_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    assert launched() is None
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("RANK", "0")
    assert launched() is None


@pytest.mark.parametrize("text", ["soon", "0", "-1", "nan"])
def test_a_wait_that_is_no_number_of_seconds_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(meeting.WAIT, text)
    who = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in who.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match="is not a number of seconds"):
        meeting.meet({}, lambda said: "")


# ---- processes -------------------------------------------------------------------------------------------------------


def nodes_of(toy: Path) -> tuple[Path, Path]:
    nodes = (toy / "node0", toy / "node1")
    for node in nodes:
        node.mkdir()
        written(node)
    return nodes


def refused(toy: Path, nodes: tuple[Path, Path], prepare: Callable[[], None] = lambda: None) -> tuple[str, float]:
    """What two processes say that both end by themselves, and after how many seconds."""
    begun = time.monotonic()
    codes = start_forks(["train", "toy.yaml", "out=run"], nodes, toy / "log", prepare).wait(60, grace=60)
    started = Started(pids=(), logs=(toy / "log", toy / "log.1"))
    assert codes == (1, 1), started.said()
    assert not any((node / "run").exists() for node in nodes)
    return started.said(), time.monotonic() - begun


@pytest.mark.slow
def test_two_processes_with_other_files_or_settings_end_both_and_nothing_is_left(toy: Path) -> None:
    nodes = nodes_of(toy)
    with (nodes[1] / "toy_rewards.py").open("a") as file:
        file.write("\n\ndef brightness(images, prompts, metadata):\n    return -images.mean((1, 2, 3))\n")
    said, _ = refused(toy, nodes)
    assert said.count("content of rewards.0.file (toy_rewards.py): ") == 2

    shutil.copy(nodes[0] / "toy_rewards.py", nodes[1] / "toy_rewards.py")
    config = nodes[1] / "toy.yaml"
    config.write_text(config.read_text().replace("checkpoint_every: 1", "checkpoint_every: 2"))
    said, seconds = refused(toy, nodes)
    assert said.count("checkpoint_every: 1 in process 0, 2 in process 1") == 2
    assert seconds < 60

    config.write_text("num_iteration: 3\n")
    said, _ = refused(toy, nodes)
    assert said.count("unknown key") == 2
    assert "process 1 cannot take part, so none trains. It says: toy.yaml" in said


@pytest.mark.slow
def test_a_process_alone_ends_in_words_and_so_does_one_whose_port_is_taken(
    toy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def alone() -> None:
        if os.environ["RANK"] == "1":
            os._exit(1)
        os.environ[meeting.WAIT] = "1"

    def taken() -> None:
        os.environ[meeting.WAIT] = "1"
        os.environ["MASTER_PORT"] = str(port)

    nodes = nodes_of(toy)
    said, _ = refused(toy, nodes, alone)
    assert "process 1 of 2 did not arrive within 1 s, so none trains" in said
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        port = busy.getsockname()[1]
        monkeypatch.setattr(meeting, "_ANSWERS", 0.5)
        said, _ = refused(toy, nodes, taken)
    assert f"process 0 cannot listen at MASTER_ADDR:MASTER_PORT = 127.0.0.1:{port}" in said
    assert "is not a process of this run: another program listens there" in said


@pytest.mark.slow
@pytest.mark.parametrize("how", ["os.kill(os.getpid(), 9)", "raise RuntimeError('the scorer is out of words')"])
def test_who_is_left_says_what_the_other_said_or_that_it_was_killed(toy: Path, how: str) -> None:
    nodes = nodes_of(toy)
    for node in nodes:
        (node / "toy_rewards.py").write_text(
            "import os\ncalls = 0\n\ndef brightness(images, prompts, metadata):\n    global calls\n    calls += 1\n"
            f"    if calls == 2 and os.environ['RANK'] == '1':\n        {how}\n    return images.mean((1, 2, 3))\n"
        )
    started = start_forks(["train", "toy.yaml", "out=run"], nodes, toy / "log")
    codes = started.wait(60, grace=60)
    said = (toy / "log").read_text()
    assert codes[0] == 1
    assert "says itself why" not in said
    if codes[1] == -signal.SIGKILL:
        assert "it was killed from outside" in said
    else:
        assert "process 1 ended: reward toy_rewards" in said
        assert "the scorer is out of words" in said


def test_foreign_words_on_a_lost_process_are_not_shown() -> None:
    said = explain(RuntimeError("[🔥/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:46"))
    assert said.startswith("another process of this run ended or cannot be reached")
    assert "gloo" not in said
    assert said.isascii()
