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
MAIN = """
import json, runpy, sys
try:
    runpy.run_module("flowrl", run_name="__main__", alter_sys=True)
except SystemExit as end:
    code = end.code
print(json.dumps([code, sorted(name for name, module in sys.modules.items() if module is not None)]), file=sys.stderr)
"""


def command(*words: str) -> tuple[int, set[str], str]:
    """Exit code, imported modules and output of `flowrl` with these words, as a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", MAIN, *words], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    code, names = json.loads(done.stderr.strip().splitlines()[-1])
    return code, set(names), done.stdout


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("--help",), 0),
        (("train", "--help"), 0),
        (("plan", "--help"), 0),
        (("plan", "tiny_grpo_geneval", "--tflop"), 2),
        (("train", "tiny_grpo_geneval", "group_sise=4"), 1),
        (("plan", "tiny_grpo_geneval", "group_sise=4"), 1),
        (("plan", "tiny_grpo_geneval", "micro_batch_size=0"), 1),
    ],
)
def test_help_and_what_a_file_alone_shows_to_be_wrong_need_no_library(words: tuple[str, ...], code: int) -> None:
    found, modules, _ = command(*words)
    assert found == code
    assert not modules & HEAVY


@pytest.mark.slow
def test_a_plan_does_without_libraries_says_the_same_and_leaves_nothing_behind(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, modules, text = command("plan", "tiny_grpo_geneval")
    assert code == 0
    assert {"torch", "diffusers"} <= modules, "which a network is built of"
    absent = HEAVY - {"torch", "numpy", "diffusers", "PIL"} | {"triton", "tensorboard"}
    assert not modules & absent
    assert not [name for name in modules if name.startswith(("torch._inductor", "torch._dynamo"))]
    assert len(modules) < MOST
    assert plan(cli.parse("plan", ("tiny_grpo_geneval",))) == 0
    assert capsys.readouterr().out == text


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
def test_a_script_that_is_not_the_command_can_ask_for_a_plan() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr


AFTERWARDS = """
import sys
from flowrl.cli import main
sys.argv[0] = "flowrl"
for name in sys.argv[2:]:
    assert main(["plan", name]) == 0
print("after")
import torch
assert torch.compiler.disable.__name__ == "disable" and torch.distributed.is_available()
assert not [name for name, module in sys.modules.items() if module is None]
rewards = "rewards=[{file: " + sys.argv[1] + ", function: shade}]"
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
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    names, reward = ("flux_grpo_pickscore", "sdxl_ddpo_pickscore", "wan_t2v_dance_grpo"), tmp_path / "own.py"
    reward.write_text(REWARD)
    done = subprocess.run(
        [sys.executable, "-c", AFTERWARDS, str(reward), *names], cwd=ROOT, capture_output=True, text=True, timeout=300,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for name in names:
        assert plan(cli.parse("plan", (name,))) == 0
    assert done.stdout.split("after\n")[0] == capsys.readouterr().out


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
