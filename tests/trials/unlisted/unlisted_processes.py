"""Cases: processes of one run that were given different things, or do not come."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from PIL import Image
from toy_pipeline import PROMPTS, write_toy
from unlisted_case import Case, Outcome, Silent, refused, refused_call, same

from flowrl.config.train import load_config
from flowrl.rewards.base.user_file import user_file_options
from flowrl.training.agreement import difference, facts_of
from flowrl.training.parts import read_run_prompts
from flowrl.training.processes import meeting
from flowrl.training.processes.launched import Launched, launched
from flowrl.training.processes.meeting import Meeting
from flowrl.training.resume_check import inputs_of

Change = Callable[[Path], object]


@contextmanager
def within(folder: Path) -> Iterator[None]:
    """A working folder, as the one of each node."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def node(folder: Path, **settings: Any) -> Path:
    """What a process of a run is started with."""
    folder.mkdir()
    rewards = [{"file": "toy_rewards.py", "function": "brightness"}]
    write_toy(folder, **{"prompts": {"train": "prompts.txt"}, "rewards": rewards, "num_iterations": 2, **settings})
    return folder


def facts(folder: Path, *words: str, resumed: bool = False) -> Mapping[str, str]:
    """What a process in a folder would say."""
    with within(folder):
        config = load_config(Path("toy.yaml"), words)
        return facts_of(config, inputs_of(config, read_run_prompts(config.prompts)), resumed=resumed)


def differs(name: str, change: Change, *names: str, settings: Mapping[str, Any] | None = None,
            prepare: Change = lambda folder: None) -> Case:  # fmt: skip
    """Two nodes, of which one was changed: the difference is named; without names there is none."""

    def run(folder: Path) -> Outcome:
        nodes = [node(folder / which, **(settings or {})) for which in ("a", "b")]
        for one in nodes:
            prepare(one)
        change(nodes[1])
        said = difference([facts(one) for one in nodes])
        if not names:
            return same(said, "", "difference")
        return refused(int(bool(said)), said, *names)

    return Case(f"processes: {name}", run)


def rewrite(name: str, change: Callable[[str], str]) -> Change:
    """Writes a text file with another text, to the letter."""

    def write(folder: Path) -> None:
        text = (folder / name).read_bytes().decode()
        assert change(text) != text
        (folder / name).write_bytes(change(text).encode())

    return write


def setting(**changed: Any) -> Change:
    """Writes the configuration with other settings."""

    def write(folder: Path) -> None:
        config = yaml.safe_load((folder / "toy.yaml").read_text())
        (folder / "toy.yaml").write_text(yaml.safe_dump(config | changed))

    return write


def as_rows(folder: Path, rows: list[Any]) -> None:
    """Prompts as JSON lines."""
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def _sources(folder: Path) -> None:
    for number in range(len(PROMPTS)):
        Image.new("RGB", (8, 8), (number, 0, 0)).save(folder / f"{number}.png")
    as_rows(folder, [{"prompt": prompt, "metadata": {"n": n, "m": [1, 2]}} for n, prompt in enumerate(PROMPTS)])


def _option(folder: Path) -> None:
    (folder / "toy_rewards.py").write_text(
        "def brightness(images, prompts, metadata, *, table='', many=()):\n    return images.mean((1, 2, 3))\n"
    )
    (folder / "table.json").write_text("{}")
    (folder / "tables").mkdir()
    (folder / "tables" / "one.json").write_text("{}")


def _reward(**options: Any) -> dict[str, Any]:
    return {"rewards": [{"file": "toy_rewards.py", "function": "brightness", "options": options}]}


def _shuffled_keys(folder: Path) -> None:
    config = yaml.safe_load((folder / "toy.yaml").read_text())
    (folder / "toy.yaml").write_text("# ours\n" + yaml.safe_dump(dict(reversed(config.items())), sort_keys=False))


def _linked(folder: Path) -> None:
    (folder / "prompts.txt").rename(folder / "there.txt")
    (folder / "prompts.txt").symlink_to("there.txt")


_ROWS = {"prompts": {"train": "prompts.jsonl"}}
_TWO = {"rewards": [{"file": "toy_rewards.py", "function": name} for name in ("brightness", "redness")]}
DIFFERENT: list[Case] = [
    differs("one letter of a prompt", rewrite("prompts.txt", lambda text: text.replace("red", "rad")), "prompts.train"),
    differs(
        "prompts in another order",
        rewrite("prompts.txt", lambda text: "\n".join(reversed(text.split()))),
        "prompts.train",
    ),
    differs("a prompt more", rewrite("prompts.txt", lambda text: text + "a dog\n"), "prompts.train", "5 rows"),
    differs("a prompt twice", rewrite("prompts.txt", lambda text: text + text.splitlines()[0] + "\n"), "prompts.train"),
    differs(
        "a prompt with a letter and its accent apart",
        rewrite("prompts.txt", lambda text: text.replace("e\u0301", "\xe9")),
        "prompts.train",
        prepare=rewrite("prompts.txt", lambda text: text.replace("red", "re\u0301d")),
    ),
    differs(
        "an accent as two letters and as one, each",
        rewrite("prompts.txt", lambda text: text.replace("blue", "bl\xfce")),
        "prompts.train",
    ),
    differs(
        "metadata of a prompt",
        rewrite("prompts.jsonl", lambda text: text.replace('"n": 3', '"n": 4')),
        "prompts.train",
        settings=_ROWS,
        prepare=_sources,
    ),
    differs(
        "order in a list of metadata",
        rewrite("prompts.jsonl", lambda text: text.replace("[1, 2]", "[2, 1]")),
        "prompts.train",
        settings=_ROWS,
        prepare=_sources,
    ),
    differs(
        "a reward's file with a space more", rewrite("toy_rewards.py", lambda text: text + " \n"), "toy_rewards.py"
    ),
    differs(
        "a file that an option names",
        rewrite("table.json", lambda text: "[]"),
        "table.json",
        settings=_reward(table="table.json"),
        prepare=_option,
    ),
    differs(
        "a file in a list of an option",
        rewrite("table.json", lambda text: "[]"),
        "table.json",
        settings=_reward(many=["x", "./table.json"]),
        prepare=_option,
    ),
    differs(
        "a file within a folder of an option",
        rewrite("tables/one.json", lambda text: "[]"),
        "tables",
        settings=_reward(table="./tables"),
        prepare=_option,
    ),
    differs(
        "a hidden helper in a folder of an option",
        lambda folder: (folder / "tables" / "two.json").write_text("1"),
        "tables",
        settings=_reward(table="./tables"),
        prepare=_option,
    ),
    differs("rewards in another order", setting(rewards=list(reversed(_TWO["rewards"]))), "rewards.0", settings=_TWO),
    differs("a reward less", setting(rewards=_TWO["rewards"][:1]), "rewards.1", settings=_TWO),
    differs(
        "a weight of a reward",
        setting(rewards=[_TWO["rewards"][0] | {"weight": 0.5}, _TWO["rewards"][1]]),
        "weight",
        "0.5",
        settings=_TWO,
    ),
    differs("a number in its last digit", setting(optim={"lr": 0.010000000000000002}), "optim.lr"),
    differs("a group size", setting(group_size=2), "group_size", "4 in process 0", "2 in process 1"),
    differs(
        "an evaluation in one alone",
        setting(eval_every=1, prompts={"train": "prompts.txt", "eval": "prompts.txt"}),
        "eval_every",
        "prompts.eval",
    ),
    differs("a tracker", setting(logging={"tensorboard": True}), "logging.tensorboard"),
    differs("a budget", setting(budget={"images": 100}), "budget"),
    differs("a kernel", setting(sampler={"kernel": "cps", "num_steps": 4}), "sampler.kernel"),
    differs(
        "another dtype",
        setting(pipeline={"name": "sd3", "model": "toy", "dtype": "bfloat16", "device": "cpu"}),
        "pipeline.dtype",
    ),
    differs(
        "the place of a model",
        setting(pipeline={"name": "sd3", "model": "toy-2", "dtype": "float32", "device": "cpu"}),
        "pipeline.model",
    ),
    differs("keys in another order and a comment", _shuffled_keys),
    differs("numbers written in another way", rewrite("toy.yaml", lambda text: text.replace("lr: 0.01", "lr: 1.0e-2"))),
    differs("quotes in YAML", rewrite("toy.yaml", lambda text: text.replace("kernel: flow_sde", 'kernel: "flow_sde"'))),
    differs("a default that is written out", setting(seed=0)),
    differs("prompts with the line ends of Windows", rewrite("prompts.txt", lambda text: text.replace("\n", "\r\n"))),
    differs("prompts with a byte order mark", rewrite("prompts.txt", lambda text: "\ufeff" + text)),
    differs("prompts without the last line's end", rewrite("prompts.txt", lambda text: text.rstrip())),
    differs(
        "keys of a row in another order",
        lambda folder: as_rows(
            folder, [{"metadata": {"m": [1, 2], "n": n}, "prompt": prompt} for n, prompt in enumerate(PROMPTS)]
        ),
        settings=_ROWS,
        prepare=_sources,
    ),
    differs("folders and threads of their own", setting(out="elsewhere", threads=3, progress=True)),
    differs("files that nothing names", lambda folder: (folder / "notes.md").write_text("mine")),
    differs(
        "a prompts' file that is a link",
        _linked,
    ),
]  # fmt: skip


def resumed_in_one(folder: Path) -> Outcome:
    """One process begins, the other continues."""
    one = node(folder / "a")
    said = difference([facts(one), facts(one, resumed=True)])
    return refused(int(bool(said)), said, "resume")


def both_ways(folder: Path) -> Outcome:
    """The words of the difference name each rank once, in eight processes of which two are off."""
    a, b = node(folder / "a"), node(folder / "b")
    setting(seed=9)(b)
    here, there = facts(a), facts(b)
    said = difference([here, there, here, here, here, there, here, here])
    return refused(int(bool(said)), said, "seed: 0 in processes 0, 2, 3, 4 and 2 more, 9 in processes 1, 5")


def helper(folder: Path) -> Outcome:
    """A module beside the reward's file, which that imports: it is part of what the reward is."""
    versions = []
    for name, factor in (("a", 1), ("b", -1)):
        place = node(folder / name)
        (place / "unlisted_helper.py").write_text(f"FACTOR = {factor}\n")
        (place / "toy_rewards.py").write_text(
            "import sys\nfrom pathlib import Path\nsys.path.insert(0, str(Path(__file__).parent))\n"
            "import unlisted_helper\n\ndef brightness(images, prompts, metadata):\n"
            "    return unlisted_helper.FACTOR * images.mean((1, 2, 3))\n"
        )
        import sys

        import torch

        sys.modules.pop("unlisted_helper", None)
        with within(place):
            versions.append(user_file_options("toy_rewards.py", "brightness", {}).build(torch.device("cpu")).version)
    if versions[0] == versions[1]:
        raise Silent(f"two rewards have one version: {versions[0]}")
    return "right", versions[1]


# ---- meetings --------------------------------------------------------------------------------------------------------


class Shelf(dict[str, bytes]):
    """A store in memory; `slow` is how long each write takes to be seen."""

    def set(self, key: str, value: str) -> None:
        """Writes a value."""
        self[key] = value.encode()

    def check(self, keys: list[str]) -> bool:
        """Whether all keys are there."""
        return all(key in self for key in keys)


def meet(world: int, said: Mapping[int, Any], *, limit: float = 1.0) -> tuple[dict[int, str], list[str]]:
    """What each of the processes that come hears, and the lines that they were told; a text leaves with that reason,
    a pair comes after so many seconds."""
    shelf, heard, lines = Shelf(), dict[int, str](), list[str]()
    before = {name: getattr(meeting, name) for name in ("_QUIET", "_LOOK", "_FAREWELL")}
    for name, seconds in {"_QUIET": 0.1, "_LOOK": 0.01, "_FAREWELL": 0.5}.items():
        setattr(meeting, name, seconds)

    def one(rank: int, given: Any) -> None:
        who = Launched(rank=rank, world=world, address="127.0.0.1", port=1)
        here = Meeting(store=shelf, who=who, limit=limit, hosts=rank == 0, tell=lines.append)  # type: ignore[arg-type]
        if isinstance(given, tuple):
            time.sleep(given[0])
            given = given[1]
        try:
            here.leave(given) if isinstance(given, str) else here.agree(given, difference)
            heard[rank] = ""
        except ValueError as error:
            heard[rank] = str(error)
        except Exception as error:
            heard[rank] = f"TRACEBACK {error!r}"

    threads = [threading.Thread(target=one, args=pair) for pair in said.items()]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
    finally:
        for name, value in before.items():
            setattr(meeting, name, value)
    if len(heard) < len(said) or any("TRACEBACK" in text for text in heard.values()):
        raise Silent(f"one waits still, or fell: {heard}")
    return heard, lines


def met(name: str, world: int, said: Mapping[int, Any], *names: str, limit: float = 1.0) -> Case:
    """A meeting at the end of which everybody who came, and can take part, hears the same."""

    def run(folder: Path) -> Outcome:
        heard, lines = meet(world, said, limit=limit)
        texts = {text for rank, text in heard.items() if not isinstance(said[rank], str)}
        if len(texts) != 1:
            raise Silent(f"they heard different things: {heard}")
        text = texts.pop()
        if not names:
            return same(text, "", "verdict")
        return refused(int(bool(text)), text + "\n".join(lines), *names)

    return Case(f"processes: {name}", run)


MEETINGS = [
    met("sixteen that agree", 16, {rank: {"a": "1"} for rank in range(16)}, limit=10.0),
    met("the last of four comes late", 4, {0: {}, 1: {}, 2: {}, 3: (0.4, {})}, limit=5.0),
    met("the first of three comes late", 3, {0: (0.4, {}), 1: {}, 2: {}}, limit=5.0),
    met("two of five do not come", 5, {0: {}, 2: {}, 4: {}}, "processes 1, 3 of 5 did not come", "Waiting for"),
    met("the first does not come, nor another", 4, {1: {}, 2: {}}, "process 0 of 4 did not come"),
    met(
        "one leaves with quotes and lines in its words",
        3,
        {0: {}, 1: {}, 2: 'x.yaml: "no\nsuch" \u202e key \ud800'},
        "process 2 cannot",
    ),
    met("the first leaves", 3, {0: "no such file", 1: {}, 2: {}}, "process 0 cannot", "no such file"),
    met("two leave", 3, {0: {}, 1: "one", 2: "two"}, "cannot take part"),
    met("names of files that are no text", 2, {0: {"file \udcff": "a"}, 1: {"file \udcff": "b"}}, "file"),
    met("values of megabytes", 2, {0: {"a": "x" * 10**6}, 1: {"a": "x" * 10**6 + "y"}}, "a: xxx"),
    met("something that one alone has", 2, {0: {}, 1: {"model file lora.safetensors": "1"}}, "not there in process 0"),
]  # fmt: skip


def variables(name: str, given: Mapping[str, str], *names: str) -> Case:
    """What launchers set, and people with them."""

    def run(folder: Path) -> Outcome:
        known = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
        before = {key: os.environ.pop(key) for key in known if key in os.environ}
        os.environ.update(given)
        try:
            if names:
                return refused_call(launched, *names)
            found = launched()
            return same(found and (found.rank, found.world, found.port), (1, 2, 29500) if given else None)
        finally:
            for key in known:
                os.environ.pop(key, None)
            os.environ.update(before)

    return Case(f"processes: variables, {name}", run)


_FULL = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "node-0", "MASTER_PORT": "29500"}
VARIABLES = [
    variables("none", {}), variables("all", _FULL),
    variables("with blanks", _FULL | {"RANK": " 1 ", "MASTER_PORT": "29500\n"}),
    variables("a rank of srun's own names", _FULL | {"RANK": "$SLURM_PROCID"}, "RANK='$SLURM_PROCID'"),
    variables("a rank in the middle of two", _FULL | {"RANK": "0.5"}, "RANK='0.5'"),
    variables("a negative rank", _FULL | {"RANK": "-1"}, "RANK=-1"),
    variables("an empty address", _FULL | {"MASTER_ADDR": ""}, "MASTER_ADDR"),
    variables("a port of zero", _FULL | {"MASTER_PORT": "0"}, "MASTER_PORT=0"),
]  # fmt: skip


def cases() -> Iterator[Case]:
    """Every case of this file."""
    yield from DIFFERENT
    yield from MEETINGS
    yield from VARIABLES
    yield Case("processes: one continues and the other begins", resumed_in_one)
    yield Case("processes: two of eight are off", both_ways)
    yield Case("processes: a module that a reward imports", helper)
