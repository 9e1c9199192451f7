"""The command line: help without heavy imports, wrong flags answered, one meaning per flag."""

from __future__ import annotations

import argparse
import logging
import os
import re
import subprocess
import sys
from collections import defaultdict

import pytest

from flowrl.cli import COMMANDS, FORMER, command_module, main, parse
from flowrl.config.base import card_memory
from flowrl.runtime.process_settings import before_libraries_load

EXACTLY_ALIKE = (
    "--steps",
    "--guidance",
    "--base-guidance",
    "--max-sequence-length",
    "--dtype",
    "--seed",
    "--device",
    "--height",
    "--width",
)
LIGHT = """
import sys
from flowrl.cli import COMMANDS, main
for name in COMMANDS:
    try:
        main([*name.split(), "--help"])
    except SystemExit as end:
        assert end.code == 0, name
assert main(["--version"]) == 0
assert main(["train", "tiny_flow_grpo", "num_iteration=1"]) == 1
assert not {"torch", "numpy", "diffusers", "transformers"} & set(sys.modules)
"""


def flags_of(name: str) -> dict[str, argparse.Action]:
    """The flags of a command."""
    parser = argparse.ArgumentParser()
    command_module(name).add_arguments(parser)
    return {flag: action for flag, action in parser._option_string_actions.items() if flag not in ("-h", "--help")}


def test_help_and_configuration_errors_import_nothing_heavy() -> None:
    done = subprocess.run([sys.executable, "-c", LIGHT], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "did you mean 'num_iterations'" in done.stderr


def test_a_flag_means_one_thing_in_all_commands() -> None:
    """It takes a value or not, of one kind, written the same way; those of sampling have the same words too."""
    kinds: dict[str, set[tuple[object, ...]]] = defaultdict(set)
    for name in COMMANDS:
        for flag, action in flags_of(name).items():
            words = action.help if flag in EXACTLY_ALIKE else None
            kinds[flag].add((action.nargs == 0, action.type, action.metavar, words))
    assert {flag: found for flag, found in kinds.items() if len(found) > 1} == {}


def test_former_flags_are_gone_and_new_ones_are_there() -> None:
    for former, new in FORMER.items():
        assert any(new in flags_of(name) and former not in flags_of(name) for name in COMMANDS), former


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("sample --stepz 3", "flowrl sample: unknown flag --stepz: did you mean --steps?"),
        ("sample runs/a --num-steps 3", "flowrl sample: unknown flag --num-steps: did you mean --steps?"),
        ("sample --guidance-scale=3", "flowrl sample: unknown flag --guidance-scale: did you mean --guidance?"),
        ("sample runs/a --base", "flowrl sample: unknown flag --base: did you mean --before-training?"),
        (
            "sample a --compare base",
            "flowrl sample: unknown flag --compare: flowrl sample --help lists those there are",
        ),
        ("compare a --compare base", "flowrl compare: unknown flag --compare: did you mean --baseline?"),
        ("compare a --seeds 3", "flowrl compare: unknown flag --seeds: did you mean --num-seeds?"),
        ("reward rubric p --server u", "flowrl reward rubric: unknown flag --server: did you mean --judge?"),
        ("report a --xyzzy", "flowrl report: unknown flag --xyzzy: flowrl report --help lists those there are"),
        ("report a b", "flowrl report: unexpected b: flowrl report --help says what it takes"),
        ("sample --steps 0", "flowrl sample: argument --steps: must be a whole number from 1 to 10,000, got '0'"),
        (
            "train a --num-iterations=3",
            "flowrl train: unknown flag --num-iterations: a setting has no dashes: num_iterations=VALUE",
        ),
        ("plan a --lr 1", "flowrl plan: unknown flag --lr: a setting has no dashes: lr=VALUE"),
        ("plan a --hours 10h", "flowrl plan: argument --hours: must be a number without a unit, such as 10, got '10h'"),
        ("plan", "flowrl plan: the following arguments are required: CONFIG"),
        ("list method", "flowrl list: argument KIND: there is no 'method': did you mean methods?"),
        ("export run --format comfy", "flowrl export: argument --format: there is no 'comfy': did you mean comfyui?"),
        ("completion ksh", "flowrl completion: argument shell: there is no 'ksh': did you mean zsh?"),
        ("completion x", "flowrl completion: argument shell: there is no 'x': there are bash, zsh, fish"),
    ],
)
def test_wrong_arguments_are_answered_in_one_paragraph(
    arguments: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(arguments.split())
    assert end.value.code == 2
    assert capsys.readouterr().err == f"{said}\n"


def test_a_card_is_named_by_its_memory_or_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    named = {"24": 24, "24gb": 24, "24 GiB": 24, "RTX-4090": 24, "h100": 80, "A100-80GB": 80, "NVIDIA H200": 141}
    assert {text: card_memory(text) for text in named} == named
    assert card_memory(24) == 24
    for wrong in ("-5", "0", "40960", "1e3", "H100x2", ""):
        with pytest.raises(ValueError, match="is given by its GB, such as 24"):
            card_memory(wrong)
    assert main(["train", "--card", "3090"]) == 1
    assert "or as 4090 or A100 or L40S or H100 or H200 or B200, got '3090'" in capsys.readouterr().err


def test_arguments_may_stand_in_any_order() -> None:
    given = parse("compare", ["a.yaml", "--out", "x", "b.yaml", "--jobs", "2", "optim.lr=1"])
    assert (given.configs, given.jobs) == (["a.yaml", "b.yaml", "optim.lr=1"], 2)
    assert parse("sample", ["--prompt", "a", "runs/a"]).model == "runs/a"
    assert parse("sample", ["--prompt", "a", "--rlg", "-1,0.5"]).rlg == "-1,0.5"
    assert parse("plan", ["a.yaml", "--processes", "8", "seed=1"]).overrides == ["seed=1"]


def test_the_overview_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(f"\n  {name} " in shown for name in COMMANDS)
    assert max(map(len, shown.splitlines())) <= 80
    assert main([]) == 2
    assert "usage: flowrl COMMAND" in capsys.readouterr().err
    assert main(["reward", "--help"]) == 0
    shown = capsys.readouterr().out
    assert "reward card" in shown
    assert "sample" not in shown
    assert main(["reward", "scor"]) == 1
    assert "did you mean reward score?" in capsys.readouterr().err


def test_the_version_names_the_libraries(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    shown = capsys.readouterr().out
    assert re.fullmatch(r"flowrl [^ ,]+( \(commit \S+\))?, Python 3\.\S+, torch \S+, diffusers \S+, .*\n", shown)


@pytest.mark.parametrize("name", COMMANDS)
def test_help_fits_eighty_columns(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        main([*name.split(), "--help"])
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 80
    assert all(action.help for action in flags_of(name).values())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["sample", "run", "--steps=--"], "--steps has no value"),
        (["train", "resume="], "resume= names no run"),
        (["train", "tiny_g2rpo", "out="], "'out=' gives no value"),
        (["serve", "jpeg_compressibility", "jpeg_compressibility"], "jpeg_compressibility is named twice"),
    ],
)
def test_values_that_are_missing_or_given_twice(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code = 0
    try:
        code = main(words)
    except SystemExit as stop:  # of a wrong flag
        code = int(str(stop.code))
    assert code in (1, 2)
    assert said in capsys.readouterr().err


def test_threads_that_wait_leave_the_core_to_others_unless_the_user_says_how_they_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given: list[dict[str, str]] = [{}, {"GOMP_SPINCOUNT": "7"}, {"OMP_WAIT_POLICY": "active"}]
    for environment in given:
        before_libraries_load(environment)
    assert [environment.get("GOMP_SPINCOUNT") for environment in given] == ["3000", "7", None]
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    assert main(["--version"]) == 0
    assert os.environ["GOMP_SPINCOUNT"] == "3000"  # before torch loads, which reads it only then
    assert not logging.getLogger("bitsandbytes.backends.cpu.ops").isEnabledFor(logging.WARNING)


@pytest.mark.parametrize("words", [["--help"], ["reward", "--help"], ["--version"], ["list", "methods"]])
def test_a_reader_that_has_gone_is_told_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    """As in `flowrl --help | head -1`."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as output, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", output)
        assert main(words) in (0, 1)
    assert capsys.readouterr().err == ""
