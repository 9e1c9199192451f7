"""What commands import: seconds before the first word of an answer. Modules are counted, not seconds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from flowrl import cli
from flowrl.commands.plan.run import run as plan

ROOT = Path(__file__).resolve().parents[2]
HEAVY = {"torch", "numpy", "diffusers", "transformers", "peft", "scipy", "accelerate", "torchvision", "PIL", "sympy"}
MAIN = """
import json, sys
from flowrl.cli import main
try:
    code = main()
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
        (("plan", "tiny_grpo_geneval", "micro_batch_size=7"), 1),
    ],
)
def test_help_and_what_a_file_alone_shows_to_be_wrong_need_no_library(words: tuple[str, ...], code: int) -> None:
    found, modules, _ = command(*words)
    assert found == code
    assert not modules & HEAVY


def test_a_plan_in_a_process_of_its_own_does_without_libraries_and_says_the_same(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, modules, text = command("plan", "tiny_grpo_geneval")
    assert code == 0
    assert {"torch", "diffusers"} <= modules, "which a network is built of"
    absent = HEAVY - {"torch", "numpy", "diffusers", "accelerate", "PIL", "sympy"} | {"triton", "tensorboard"}
    assert not modules & absent
    assert not [name for name in modules if name.startswith(("torch._inductor", "torch._dynamo.", "sympy."))]
    assert plan(cli.parse("plan", ("tiny_grpo_geneval",))) == 0
    assert capsys.readouterr().out == text
