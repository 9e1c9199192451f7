"""Commands of flowrl on two processes of gloo, many in one launch, and how near what they wrote lies to other runs'.

What such a process imports takes ten seconds each time. `warm_interpreter` is a command that stands for `python` and
takes that time once: launches go through the real launchers, whose processes begin with everything imported.
"""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tiny_runs import differences, lora_tensors, metrics, model_tensors, start, state

TOLERANCE = 1e-6
PATIENCE = 1800
"""Seconds for a launch of many runs: half a minute on idle cores was over five with fifteen others at work on two."""
EPSILON = 2**-23
ROUNDED = {"diversity": 5, "advantage_abs": 10, **dict.fromkeys(("margin", "winner_reward", "loser_reward"), 5)}
"""Metrics that multiply the rounding of a sum -> tolerances that an order of summation may move them by."""
TRAIN_ALL = """
import json, os, shutil, signal, sys, traceback
from functools import partial

sys.path[:0] = sys.argv[1:3]
from accelerate.state import PartialState
from flowrl.cli import main
from flowrl.pipelines import PIPELINES
from flowrl.pipelines.weights import lora, stock_loading
from flowrl.recipes import backprop, forward, grpo, preference
from flowrl.rewards import REWARDS
from flowrl.workers import rollouts
from kept_workers import Inside

count = sys.argv[4]
rollouts.RayBackend, rollouts.join_cluster = Inside, lambda config, run: "here"
vars(os)["fsync"] = os.fstat  # as conftest.py has it
# Generated code takes minutes; this backend runs the traced operations themselves.
stock_loading.compile_blocks = partial(stock_loading.compile_blocks, backend="eager")

def run(rank):
    if count != "1":
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=count, LOCAL_WORLD_SIZE=count)
    stock = dict(PIPELINES)
    REWARDS["smooth_brightness"] = "toy_pipeline:SmoothBrightness"
    for wanted, toy, arguments in json.loads(open(sys.argv[3]).read()):
        PIPELINES["sd3"] = "toy_pipeline" if toy else stock["sd3"]
        if arguments[0] != "copy":
            assert main(["train", *arguments]) == wanted, arguments
            continue
        if rank == 0:
            shutil.copytree(*arguments[1:3])
            for number in arguments[3:]:
                shutil.rmtree(os.path.join(arguments[2], "checkpoints", number))
        PartialState().wait_for_everyone()

def child(rank):
    if not (pid := os.fork()):
        code = 1
        try:
            run(rank)
            code = 0
        except BaseException:  # of an interrupt and of sys.exit too: a fork that ends here tells nobody else
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(code)
    return pid

pids = {child(rank) for rank in range(int(count))}
signal.signal(signal.SIGTERM, lambda *_: [os.kill(pid, signal.SIGKILL) for pid in pids])
while pids:
    ended, status = os.wait()
    pids.remove(ended)
    if status:
        [os.kill(pid, signal.SIGKILL) for pid in pids]
        sys.exit(1)
"""
WARM = """
import array, json, os, runpy, select, signal, socket, sys, traceback

from flowrl.runtime.process_settings import before_libraries_load
before_libraries_load()  # as the command has it
import accelerate.commands.launch, torch.distributed.run
import flowrl.cli, flowrl.session.train, flowrl.pages.report
import flowrl.pipelines.families.sd3, flowrl.pipelines.weights.lora
from flowrl.recipes import backprop, forward, grpo, preference
from flowrl.workers import actor
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel, StableDiffusion3Pipeline
from transformers import CLIPTextModelWithProjection, CLIPTokenizer, T5EncoderModel, T5TokenizerFast

def be(order, streams):
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w", 1, closefd=False), open(2, "w", 1, closefd=False)
    os.environ.clear()
    os.environ.update(order["environment"])
    sys.executable = os.environ.get("CHILDREN_EXEC", sys.executable)
    os.chdir(order["folder"])
    sys.path[:0] = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    words = [word for word in order["words"] if word != "-u"]
    code = 1
    try:
        if words[0] == "-m":
            sys.argv = words[1:]
            sys.path.insert(0, "")
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        elif words[0] == "-c":
            sys.argv = ["-c", *words[2:]]
            exec(words[1], {"__name__": "__main__"})
        else:
            sys.argv = words
            sys.path.insert(0, os.path.dirname(os.path.abspath(words[0])))
            runpy.run_path(words[0], run_name="__main__")
        code = 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:  # KeyboardInterrupt too, as the interpreter in whose place this stands prints it
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

def serve(link):
    # The process between: it tells who asked how the command ended, and ends it when who asked has gone.
    text, streams, _, _ = socket.recv_fds(link, 16, 3)
    size = int(text)
    text = b""
    while len(text) < size:
        text += link.recv(size - len(text))
    if not (pid := os.fork()):
        link.close()
        be(json.loads(text), streams)
    for stream in streams:
        os.close(stream)
    link.sendall(b"%d\\n" % pid)
    ended = os.pidfd_open(pid)
    if ended in select.select([ended, link], [], [])[0]:
        link.sendall(b"%d\\n" % os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    else:
        os.kill(pid, signal.SIGKILL)
    os._exit(0)

signal.signal(signal.SIGCHLD, signal.SIG_IGN)
listening = socket.socket(socket.AF_UNIX)
listening.bind(sys.argv[1])
listening.listen(64)
print("ready", flush=True)
while True:
    link, _ = listening.accept()
    if not os.fork():
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        listening.close()
        serve(link)
    link.close()
"""
ASKING = """#!{python} -IS
import json, os, signal, socket, sys

link = socket.socket(socket.AF_UNIX)
link.connect({address!r})
text = json.dumps(dict(words=sys.argv[1:], folder=os.getcwd(), environment=dict(os.environ))).encode()
socket.send_fds(link, [b"%16d" % len(text)], [0, 1, 2])
link.sendall(text)
lines = link.makefile()
pid = int(lines.readline())
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
    signal.signal(number, lambda number, _: os.kill(pid, number))
code = int(lines.readline() or 1)
if code < 0:
    if code != -signal.SIGKILL:
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
os._exit(code)
"""


@contextmanager
def warm_interpreter() -> Iterator[str]:
    """A command that takes the words of `python` (a script, -m or -c), in a fork of a process that has imported it all.

    It hands over its streams, folder and environment, passes signals on, and ends as the fork ends. Torchrun starts its
    processes with it where the variable PYTHON_EXEC says so, and a fork starts others with it where CHILDREN_EXEC does.
    What is forked has no threads and did nothing but import, so that nothing of one launch is seen by the next.
    """
    with tempfile.TemporaryDirectory() as name:  # the address of a socket is at most a hundred letters long
        (folder := Path(name)).joinpath("warm.py").write_text(WARM)
        command, address = folder / "python", str(folder / "socket")
        command.write_text(ASKING.format(python=sys.executable, address=address))
        command.chmod(0o755)
        process = start(["warm.py", address], folder)
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "ready\n", process.communicate()[1]
            yield str(command)
        finally:
            process.kill()
            process.communicate()


def on_two_processes(folder: Path, *arguments: str, python: str = sys.executable, processes: int = 2) -> str:
    """Runs a script, or a module after "-m", by torchrun on two processes in a folder, or more; what they print."""
    ports = ["--master-addr=127.0.0.1", f"--master-port={_free_port()}"]
    launcher = ["-m", "torch.distributed.run", f"--nproc-per-node={processes}", *ports]
    return _finish(start([*launcher, *arguments], folder, GLOO_SOCKET_IFNAME="lo", PYTHON_EXEC=python), PATIENCE)


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


def train_on_two(
    folder: Path,
    commands: Sequence[tuple[int, bool, Sequence[str]]],
    *,
    seconds: float = PATIENCE,
    python: str = sys.executable,
    processes: int = 2,
) -> None:
    """Runs of `flowrl train`, one after another, all on the same two processes.

    Args:
        folder: where the script is written.
        commands: of each run what it returns, whether sd3 is the toy pipeline, and its arguments; or "copy", a run, its
            copy, and the numbers of the checkpoints that the copy does without.
        seconds: before they are ended.
        python: an interpreter, or `warm_interpreter`.
        processes: 1 for runs alone, without the checks of shapes that this process has, which take as long again.
    """
    (folder / "train_all.py").write_text(TRAIN_ALL)
    (folder / "commands.json").write_text(json.dumps(commands))
    here, address = Path(__file__).parent, {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
    _finish(
        start(
            ["train_all.py", str(here), str(here / "families"), str(folder / "commands.json"), str(processes)], folder,
            GLOO_SOCKET_IFNAME="lo", PYTHON_EXEC=python, **address,
        ),
        seconds,
    )  # fmt: skip


def close(a: Path, b: Path) -> None:
    """Two runs have the same metrics, weights and optimizer state, but for the order in which processes add up."""
    for mine, theirs in zip(metrics(a), metrics(b), strict=True):
        assert mine.keys() == theirs.keys()
        for key in mine:
            of_reward = abs(mine.get("reward", 0.0)) if key.startswith("reward") else 0.0
            scale = max(1.0, abs(mine[key]), of_reward)  # rewards are hundreds
            # Of images, which are decoded in other batches; of rewards, divided by the spread of their group; of errors
            # whose difference beta multiplies. The largest seen, with AMX: 5.5 of advantages, 1.2 of losers' rewards.
            scale *= ROUNDED.get(key, 1)
            # Rewards are rounded in float32 before that: where they hardly differ, it is all that is left.
            spread = max(mine.get("reward_std", 0.0), 1e-3)
            rounding = EPSILON * mine["reward"] / spread if key == "advantage_abs" else 0.0
            assert abs(mine[key] - theirs[key]) <= max(TOLERANCE * scale, abs(rounding)), (
                f"{key}: {mine[key]} and {theirs[key]}"
            )
    shipped = lora_tensors if (a / "lora").exists() else model_tensors
    assert differences(shipped(a), shipped(b)) <= TOLERANCE
    (mine, theirs) = ({key: state(run)[key] for key in ("policy", "slots")} for run in (a, b))
    assert differences(mine, theirs) <= TOLERANCE
    assert differences(state(a)["optimizer"]["state"], state(b)["optimizer"]["state"]) <= TOLERANCE
