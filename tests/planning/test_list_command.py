"""`flowrl list` and `flowrl completion`: everything that the tables of the code have, without their libraries."""

from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
import sys
from collections.abc import Iterable

import pytest

from flowrl import cli
from flowrl.config.base import config_files
from flowrl.config.key_docs import first_sentence, key_docs
from flowrl.config.source_syntax import classes_in
from flowrl.config.strict_yaml import dotted_keys
from flowrl.config.train import TrainConfig
from flowrl.credit import CREDIT
from flowrl.evaluation.benchmark import BENCHMARKS
from flowrl.objectives.distillation import VISITED
from flowrl.objectives.forward_losses import FORWARD
from flowrl.objectives.gradient_paths import PATHS
from flowrl.objectives.policy_gradient import OBJECTIVES
from flowrl.pipelines import PIPELINES
from flowrl.planning.catalogue import METHODS, entries
from flowrl.recipes.preference_settings import OBJECTIVES as PREFERENCES
from flowrl.rewards import REWARDS


def test_lists_have_what_the_code_has_and_a_line_for_each() -> None:
    assert [entry.name for entry in entries("rewards")] == list(REWARDS)
    assert [entry.name for entry in entries("families")] == list(PIPELINES)
    assert [entry.name for entry in entries("benchmarks")] == list(BENCHMARKS)
    assert [entry.name for entry in entries("keys")] == list(dotted_keys(TrainConfig))
    assert [entry.name for entry in entries("methods")][: len(CREDIT)] == list(CREDIT)
    tables: dict[tuple[str, str], Iterable[str]] = {
        ("objective.name", "grpo"): OBJECTIVES, ("objective.name", "forward"): FORWARD,
        ("objective.name", "preference"): PREFERENCES, ("objective.name", "backprop"): PATHS,
        ("objective.name", "visited"): VISITED,
    }  # fmt: skip
    choices = {(choice.key, choice.recipe): choice for choice in METHODS}
    for key, table in tables.items():
        assert list(classes_in(choices[key].module, choices[key].table)) == list(table)
    chosen = {dict(entry.more)["key"] for entry in entries("methods")}
    assert {
        "objective.name=dpo recipe=preference",
        "objective.name=refl recipe=backprop",
        "dmd.weight above 0",
    } <= chosen
    for kind in ("configs", "rewards", "methods", "families", "benchmarks", "keys"):
        assert [entry.name for entry in entries(kind) if not entry.text] == []


def test_keys_say_what_the_dataclass_says() -> None:
    docs = {doc.key: doc for doc in key_docs(TrainConfig)}
    defaults = {field.name: field.default for field in dataclasses.fields(TrainConfig)}
    assert docs["group_size"].default == "required"
    assert docs["adv_clip_range"].default == str(defaults["adv_clip_range"])
    assert docs["out"].default == "null"
    assert docs["sampler.kernel"].kind == "text"
    assert docs["rewards.0.weight"].default == "1.0"
    assert "one of group, global, none" in docs["adv_std"].kind


def test_a_sentence_ends_at_a_full_stop_and_not_in_a_number() -> None:
    assert first_sentence("CLIP 3.5 is it. More follows.") == "CLIP 3.5 is it"
    assert first_sentence("One line\nand its rest\n\nMore") == "One line and its rest"


def test_one_in_full_and_all_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["list", "rewards", "pick_score"]) == 0
    assert "options." in capsys.readouterr().out
    assert cli.main(["list", "keys", "--json"]) == 0
    assert [entry["name"] for entry in json.loads(capsys.readouterr().out)] == list(dotted_keys(TrainConfig))
    assert cli.main(["list", "configs"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if line.startswith("  ")] == list(config_files())
    folders = [line for line in lines[:-2] if not line.startswith("  ")]
    assert folders == list(dict.fromkeys(path.parent.name for path in config_files().values()))
    assert folders[0] == "embedded"


def test_a_line_is_cut_at_the_width_of_a_terminal_and_whole_in_a_pipe(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def longest(columns: str | None) -> int:
        monkeypatch.setenv("COLUMNS", columns or "")
        monkeypatch.setattr(sys.stdout, "isatty", lambda: columns is not None)
        assert cli.main(["list", "benchmarks"]) == 0
        return max(map(len, capsys.readouterr().out.splitlines()))

    assert longest("80") == 80
    assert longest("120") == 120
    assert longest(None) > 200


def test_a_wrong_name_is_answered_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["list", "rewards", "pickscore"]) == 1
    assert "pick_score" in capsys.readouterr().err


LEADS = {
    "flow_grpo": "told of under: outcome, ",
    "DiffusionNFT": "told of under: nft\n",
    "RTDMD": "told of under: dmd\n",
    "gspo": "a key tells of it, see 'flowrl list keys NAME': ratio\n",
    "mix_grpo": "a key tells of it, see 'flowrl list keys NAME': loss_denominator, sampler.sde_window, ",
}


@pytest.mark.parametrize("given", LEADS)
def test_a_paper_s_name_leads_to_the_setting(given: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["list", "methods", given]) == 1
    assert LEADS[given] in capsys.readouterr().err
    assert cli.main(["list", "methods", "_"]) == 1
    assert "unknown name" in capsys.readouterr().err


def test_methods_stand_under_the_key_that_chooses_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["list", "methods"]) == 0
    lines = capsys.readouterr().out.splitlines()
    heads = [line for line in lines[:-2] if not line.startswith("  ")]
    keys = ["credit.method", "objective.name", "objective.name, recipe=forward"]
    assert [head.rpartition(": ")[2] for head in heads[:3]] == keys
    assert len(heads) == len(METHODS)


def test_a_list_imports_nothing_heavy() -> None:
    code = "import sys; from flowrl.cli import main; main(['list', 'methods']); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_has_commands_configurations_and_keys(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["completion", shell]) == 0
    script = capsys.readouterr().out
    for word in ("compare", "rubric", "tiny_g2rpo", "sampler.kernel="):
        assert word in script
    if shutil.which(shell):
        subprocess.run([shell, "-n"], input=script, text=True, check=True)


def test_bash_completes(capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["completion", "bash"])
    script = capsys.readouterr().out + (
        "COMP_WORDS=(flowrl train tiny_g2); COMP_CWORD=2; _flowrl; echo ${COMPREPLY[@]}\n"
        "COMP_WORDS=(flowrl comp); COMP_CWORD=1; _flowrl; echo ${COMPREPLY[@]}\n"
    )
    done = subprocess.run(["bash"], input=script, text=True, capture_output=True, check=True)
    assert done.stdout.splitlines() == ["tiny_g2rpo", "compare completion"]
