"""What commands import: seconds before the first word of an answer. Modules are counted, not seconds."""

from __future__ import annotations

import importlib
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from flowrl import cli
from flowrl.commands.plan import run as plan
from flowrl.planning.light_libraries import _NUMBERS
from flowrl.runtime.private_names import SIZES
from flowrl.runtime.process_settings import stand_in

ROOT = Path(__file__).resolve().parents[2]
HEAVY = {"torch", "numpy", "diffusers", "transformers", "peft", "scipy", "accelerate", "torchvision", "PIL", "sympy"}
MOST = 2300
"""Modules that a plan may import; with all libraries there it would be 4,300."""
LATER = ("flux_grpo_pickscore", "sdxl_ddpo_pickscore", "wan_t2v_dance_grpo")
"""Configurations that one process plans after `tiny_grpo_geneval`."""
MAIN = """
import json, runpy, sys

def flowrl(*words):
    sys.argv = ["flowrl", *words]
    try:
        runpy.run_module("flowrl", run_name="__main__", alter_sys=True)
    except SystemExit as end:
        names = sorted(name for name, module in sys.modules.items() if module is not None)
        print(json.dumps([end.code, names]), file=sys.stderr)
"""
ONE_AFTER_ANOTHER = f"""{MAIN}
for words in json.loads(sys.argv[1]):
    flowrl(*words)
"""


def told(code: str, *words: str) -> tuple[str, list[tuple[int, set[str]]]]:
    """What Python code prints in a process of its own, and exit code and imported modules after each command."""
    done = subprocess.run(
        [sys.executable, "-c", code, *words], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stderr.splitlines() if line.startswith("[")]
    return done.stdout, [(code, set(names)) for code, names in lines]


def test_help_and_what_a_file_alone_shows_to_be_wrong_need_no_library() -> None:
    commands = [
        (("--help",), 0),
        (("train", "--help"), 0),
        (("plan", "--help"), 0),
        (("plan", "tiny_grpo_geneval", "--tflop"), 2),
        (("train", "tiny_grpo_geneval", "group_sise=4"), 1),
        (("plan", "tiny_grpo_geneval", "group_sise=4"), 1),
        (("plan", "tiny_grpo_geneval", "micro_batch_size=0"), 1),
    ]
    _, found = told(ONE_AFTER_ANOTHER, json.dumps([words for words, _ in commands]))
    for (words, code), (ended, modules) in zip(commands, found, strict=True):
        assert ended == code, words
        assert not modules & HEAVY, words


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], list[tuple[int, set[str]]]]:
    """Plans of one process, their texts, and what was imported after each; then it imports what it likes."""
    (reward := tmp_path_factory.mktemp("reward") / "own.py").write_text(REWARD)
    text, found = told(AFTERWARDS, str(reward), "tiny_grpo_geneval", *LATER)
    return text.split("after\n"), found


@pytest.mark.slow
def test_a_plan_does_without_libraries_says_the_same_and_leaves_nothing_behind(
    capsys: pytest.CaptureFixture[str], planned: tuple[list[str], list[tuple[int, set[str]]]]
) -> None:
    texts, ((code, modules), *_) = planned
    assert code == 0
    assert {"torch", "diffusers"} <= modules, "which a network is built of"
    absent = HEAVY - {"torch", "numpy", "diffusers", "PIL"} | {"triton", "tensorboard"}
    assert not modules & absent
    assert not [name for name in modules if name.startswith(("torch._inductor", "torch._dynamo"))]
    assert len(modules) < MOST
    assert ("bitsandbytes" in modules) is (importlib.util.find_spec("bitsandbytes") is not None), "its stand-in"
    assert not [name for name in modules if name.startswith("bitsandbytes.")]
    assert plan(cli.parse("plan", ("tiny_grpo_geneval",))) == 0
    assert capsys.readouterr().out == texts[0]


SCRIPT = """
import sys
from flowrl.cli import main
assert main(["plan", "tiny_grpo_geneval"]) == 0
import peft.helpers, peft.import_utils
assert "torch._inductor.compile_fx" not in sys.modules, "which bitsandbytes takes with it"
if peft.import_utils.is_bnb_available():
    from bitsandbytes.nn import Linear4bit
    assert peft.helpers.bnb.nn.Linear4bit is Linear4bit is sys.modules["bitsandbytes"].nn.Linear4bit
"""


@pytest.mark.slow
def test_a_script_that_is_not_the_command_can_ask_for_a_plan(warm_python: str) -> None:
    """In a process that has imported what a training needs, with the same stand-in for bitsandbytes as the command."""
    done = subprocess.run(
        [warm_python, "-c", SCRIPT], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr


AFTERWARDS = f"""{MAIN}
reward, *names = sys.argv[1:]
for name in names:
    flowrl("plan", name)
    print("after")
import torch
assert torch.compiler.disable.__name__ == "disable" and torch.distributed.is_available()
assert not [name for name, module in sys.modules.items() if module is None]
from flowrl.cli import main
rewards = "rewards=[{{file: " + reward + ", function: shade}}]"
assert main(["plan", "tiny_grpo_geneval", rewards, "eval.rewards=[]"]) == 0
assert "torchvision.transforms" in sys.modules
"""
REWARD = """
import scipy.stats, torch._dynamo, torch.nn.attention.flex_attention
import torchvision.transforms


@torch._dynamo.disable
def shade(images, prompts, metadata):
    return images.mean((1, 2, 3)).tolist()
"""


@pytest.mark.slow
def test_families_are_planned_alike_and_a_reward_may_import_what_it_likes(
    capsys: pytest.CaptureFixture[str], planned: tuple[list[str], list[tuple[int, set[str]]]]
) -> None:
    texts, ended = planned
    assert [code for code, _ in ended] == [0] * (1 + len(LATER))
    for name, text in zip(LATER, texts[1:-1], strict=True):
        assert plan(cli.parse("plan", (name,))) == 0
        assert text == capsys.readouterr().out


def test_beside_a_user_s_file_and_in_a_script_libraries_are_all_there(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    reward = tmp_path / "own.py"
    reward.write_text("def shade(images, prompts, metadata):\n    return images.mean((1, 2, 3)).tolist()\n")
    lightly: list[str] = []
    monkeypatch.setattr("flowrl.planning.light_libraries.import_lightly", lambda: lightly.append("light"))
    assert plan(cli.parse("plan", ("tiny_grpo_geneval",))) == 0
    assert lightly == ["light"]
    named = f"rewards=[{{file: {reward}, function: shade}}]"
    assert plan(cli.parse("plan", ("tiny_grpo_geneval", named))) == 0
    assert lightly == ["light"]


def test_sizes_that_are_numbers_are_answered_as_torch_answers() -> None:
    whole = importlib.import_module(SIZES)
    for x in (True, False):
        for name in ("expect_true", "guard_or_false", "guard_or_true", "statically_known_true"):
            assert _NUMBERS[name](x) is getattr(whole, name)(x), name
        for y in (True, False):
            for name in ("sym_and", "sym_or"):
                assert _NUMBERS[name](x, y) is getattr(whole, name)(x, y), name
    sizes: tuple[tuple[object, object], ...] = (
        ((2, 3), (2, 3)), ((2, 3), (2, 4)), ((2,), (2, 3)), ((2, 3), [2, 3]), (4, 4), (4, 5),
    )  # fmt: skip
    for one, other in sizes:
        assert _NUMBERS["sym_eq"](one, other) is bool(whole.sym_eq(one, other)), (one, other)
    assert _NUMBERS["is_nested_int"](3) is whole.is_nested_int(3)
    assert _NUMBERS["has_guarding_hint"](3) is whole.has_guarding_hint(3)
    assert _NUMBERS["guarding_hint_or_throw"](3) == whole.guarding_hint_or_throw(3)
    assert not _NUMBERS["free_unbacked_symbols"](3)
    assert not whole.free_unbacked_symbols(3)


def test_a_stand_in_gives_way_to_the_module_that_it_stands_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "colorsys", stand_in("colorsys", {"ONE_THIRD": 3}))
    assert importlib.import_module("colorsys").ONE_THIRD == 3
    assert not hasattr(importlib.import_module("colorsys"), "__file__")
    assert importlib.import_module("colorsys").hsv_to_rgb(0.0, 0.0, 1.0) == (1.0, 1.0, 1.0)
    assert importlib.import_module("colorsys").ONE_THIRD == 1 / 3


def test_a_part_of_a_package_that_is_stood_for_imports_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "wsgiref.headers", raising=False)
    spec = importlib.util.find_spec("wsgiref")
    monkeypatch.setitem(sys.modules, "wsgiref", stand_in("wsgiref", {"__spec__": spec}))
    assert importlib.util.find_spec("wsgiref") is spec
    assert importlib.import_module("wsgiref.headers").Headers
    assert importlib.import_module("wsgiref").__file__
