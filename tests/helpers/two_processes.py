"""Commands of flowrl on two processes of gloo, many in one launch, and how near what they wrote lies to other runs'."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path

from tiny_runs import differences, lora_tensors, metrics, start, state

TOLERANCE = 1e-6
TRAIN_ALL = """
import json, os, shutil, signal, sys, traceback

sys.path[:0] = sys.argv[1:3]
from accelerate.state import PartialState
from flowrl.cli import main
from flowrl.pipelines import PIPELINES, lora
from flowrl.recipes import backprop, forward, grpo, preference
from flowrl.rewards import REWARDS

def run(rank):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
    stock = dict(PIPELINES)
    REWARDS["smooth_brightness"] = "toy_pipeline:SmoothBrightness"
    for wanted, toy, arguments in json.loads(open(sys.argv[3]).read()):
        PIPELINES["sd3"] = "toy_pipeline" if toy else stock["sd3"]
        if arguments[0] != "copy":
            assert main(["train", *arguments]) == wanted, arguments
            continue
        if rank == 0:
            shutil.copytree(*arguments[1:3])
            shutil.rmtree(os.path.join(arguments[2], "checkpoints", arguments[3]))
        PartialState().wait_for_everyone()

def child(rank):
    if not (pid := os.fork()):
        code = 1
        try:
            run(rank)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(code)
    return pid

pids = {child(rank) for rank in (0, 1)}
signal.signal(signal.SIGTERM, lambda *_: [os.kill(pid, signal.SIGKILL) for pid in pids])
while pids:
    ended, status = os.wait()
    pids.remove(ended)
    if status:
        [os.kill(pid, signal.SIGKILL) for pid in pids]
        sys.exit(1)
"""


def on_two_processes(folder: Path, *arguments: str) -> str:
    """Runs a script, or a module after "-m", by torchrun on two processes in a folder; what they print."""
    ports = ["--master-addr=127.0.0.1", f"--master-port={_free_port()}"]
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node=2", *ports]
    return _finish(start([*launcher, *arguments], folder, GLOO_SOCKET_IFNAME="lo"), 600)


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    return port


def _finish(process: subprocess.Popen[str], seconds: float) -> str:
    """What a command prints that has to succeed within a time; else it and its children are ended."""
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGTERM)
        raise AssertionError(f"still at work after {seconds:g} s:\n{process.communicate()[1][-4000:]}") from None
    assert process.returncode == 0, err
    return out


def train_on_two(folder: Path, commands: Sequence[tuple[int, bool, Sequence[str]]], *, seconds: float = 600) -> None:
    """Runs of `flowrl train`, one after another, all on the same two processes.

    Args:
        folder: where the script is written.
        commands: of each run what it returns, whether sd3 is the toy pipeline, and its arguments; or "copy", a run, its
            copy, and the number of a checkpoint that the copy does without.
        seconds: before they are ended.
    """
    (folder / "train_all.py").write_text(TRAIN_ALL)
    (folder / "commands.json").write_text(json.dumps(commands))
    here, address = Path(__file__).parent, {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
    _finish(
        start(
            ["train_all.py", str(here), str(here / "families"), str(folder / "commands.json")], folder,
            GLOO_SOCKET_IFNAME="lo", **address,
        ),
        seconds,
    )  # fmt: skip


def close(a: Path, b: Path) -> None:
    """Two runs have the same metrics, LoRA and optimizer state, but for the order in which processes add up."""
    for mine, theirs in zip(metrics(a), metrics(b), strict=True):
        assert mine.keys() == theirs.keys()
        for key in mine:
            of_reward = abs(mine.get("reward", 0.0)) if key.startswith("reward") else 0.0
            scale = max(1.0, abs(mine[key]), of_reward)  # rewards are hundreds
            scale *= 5 if key == "diversity" else 1  # of images, which are decoded in other batches
            assert abs(mine[key] - theirs[key]) <= TOLERANCE * scale, key
    assert differences(lora_tensors(a), lora_tensors(b)) <= TOLERANCE
    assert differences(state(a)["optimizer"]["state"], state(b)["optimizer"]["state"]) <= TOLERANCE
