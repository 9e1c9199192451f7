"""`make gpu` without a card: its CPU form passes, its runner survives what checks do, its comparisons can fail."""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

import gpu_kit
import gpu_suite
import pytest
import torch
from check_gradients import drawn, measure
from check_runs import trained
from gpu_journal import SECTIONS, entries, write
from gpu_place import Figures, Place, compare
from gpu_runs import apart
from torch import Tensor

CARD, CPU = (Place(device=torch.device(kind)) for kind in ("cuda", "cpu"))
ENDED = {"section": "machine", "what": "A check.", "limit": 20, "seconds": 0.5, "figures": {}, "form": "cpu", "why": ""}


# ---- the whole -------------------------------------------------------------------------------------------------------


QUICK = ("machine", "gradients", "memory")
"""Sections whose CPU form takes half a minute; `make gpu` runs the others too, in some minutes."""


@pytest.fixture
def warm(warm_python: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks, and what they start, run in forks of a process that has imported everything."""
    monkeypatch.setattr(sys, "executable", warm_python)
    monkeypatch.setenv("CHILDREN_EXEC", warm_python)


@pytest.mark.slow
def test_every_check_passes_in_its_cpu_form_or_says_why_not(warm: None, tmp_path: Path) -> None:
    found = gpu_suite.run_checks(tmp_path / "gpu.json", minutes=60, sections=",".join(QUICK), cpu=True)
    failed = {check["check"]: check["why"] for check in found["checks"] if check["outcome"] == "failed"}
    assert failed == {}
    assert {check["section"] for check in found["checks"] if check["outcome"] == "passed"} == set(QUICK) < set(SECTIONS)
    assert all(check["why"] for check in found["checks"] if check["outcome"] == "skipped")
    assert all(check["what"] for check in found["checks"])
    assert found["counts"]["passed"] >= 30
    assert (found["form"], found["card"]) == ("cpu", None)
    assert json.loads((tmp_path / "gpu.json").read_text()) == found


FAKE = '''
import os, pytest

def check_passes(figures):
    """Notes a figure."""
    figures |= {"form": "pretended", "third": 1 / 3}

def check_fails(place):
    """Is wrong."""
    assert place.on_card, "no card"

def check_ends_the_process():
    """Is worse."""
    os._exit(3)

def check_comes_after():
    """Runs in another process."""

@pytest.mark.parametrize("word", ["a", "b"])
def check_is_left_out(word):
    """Has a reason."""
    pytest.skip(f"no {word} here")
'''


@pytest.mark.slow
def test_a_check_that_ends_its_process_is_failed_and_the_others_run(
    warm: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "check_machine.py").write_text(FAKE)
    monkeypatch.setattr(gpu_suite, "HERE", tmp_path)
    found = gpu_suite.run_checks(tmp_path / "gpu.json", sections="machine", cpu=True)
    ended = {check["check"].removeprefix("machine/"): (check["outcome"], check["why"]) for check in found["checks"]}
    assert ended.pop("fails")[0] == "failed"
    assert ended == {
        "passes": ("passed", ""),
        "comes_after": ("passed", ""),
        "ends_the_process": ("failed", "the process ended with exit code 3"),
        "is_left_out[a]": ("skipped", "no a here"),
        "is_left_out[b]": ("skipped", "no b here"),
    }
    assert found["counts"] == {"passed": 2, "failed": 2, "skipped": 2}
    assert found["checks"][0]["figures"] == {"third": 0.3333}
    assert found["forms"] == {"pretended": 1, "cpu": 1}


# ---- the runner ------------------------------------------------------------------------------------------------------


def test_a_line_that_is_being_written_is_left_out(tmp_path: Path) -> None:
    write(tmp_path / "journal", {"check": "a"})
    with (tmp_path / "journal").open("a") as file:
        file.write('{"check": "b", "outc')
    assert entries(tmp_path / "journal") == [{"check": "a"}]
    assert entries(tmp_path / "none") == []


def test_results_hold_facts_counts_and_checks_and_new_ones_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    journal, out = tmp_path / "gpu.jsonl", tmp_path / "gpu.json"
    write(journal, {"facts": {"card": "H100"}, "checks": 2})
    write(journal, ENDED | {"check": "machine/a", "outcome": "passed", "figures": {"off": 0.123456}})
    told, _ = gpu_suite.write_result(out, journal, time.time(), 0)
    assert "machine/a" in capsys.readouterr().out
    write(journal, ENDED | {"check": "machine/b", "outcome": "skipped", "why": "no card"})
    told, found = gpu_suite.write_result(out, journal, time.time(), told)
    shown = capsys.readouterr().out
    assert "machine/a" not in shown
    assert "no card" in shown
    assert told == 2
    assert (found["card"], found["counts"]) == ("H100", {"passed": 1, "failed": 0, "skipped": 1})
    assert json.loads(out.read_text()) == found
    assert not list(tmp_path.glob("*.part"))


def test_a_check_that_hangs_is_ended_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_suite, "LEAST", 0.1)
    journal, now = tmp_path / "gpu.jsonl", time.time()
    write(journal, {"facts": {"form": "card"}})
    write(journal, {"check": "machine/a", "section": "machine", "what": "", "limit": 0.1, "begun": now})
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
    _, why = gpu_suite.follow(process, tmp_path / "gpu.json", journal, now, 0, now + 60)
    assert process.returncode is not None
    assert why is not None
    gpu_suite.close_begun(journal, why)
    [ended] = gpu_suite.write_result(tmp_path / "gpu.json", journal, now, 0)[1]["checks"]
    assert ended["outcome"] == "failed"
    assert ended["why"].startswith("no end after")


def test_an_unknown_section_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="machinery: choose among machine, exactness"):
        gpu_suite.run_checks(tmp_path / "gpu.json", sections="machinery")


def test_the_result_goes_where_a_machine_wants_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OUT", str(tmp_path))
    assert gpu_suite.parse([]).out == str(tmp_path / "gpu.json")
    monkeypatch.delenv("OUT")
    assert gpu_suite.parse([]).out == str(gpu_suite.ROOT / "build" / "gpu.json")


# ---- what a check calls right ----------------------------------------------------------------------------------------


def test_equal_bits_are_asked_of_a_cpu_and_a_figure_of_a_card() -> None:
    wanted = torch.linspace(-1, 1, 64)
    found, figures = wanted * (1 + 2**-10), Figures()
    compare(CARD, figures, "modes", found, wanted)
    assert figures["modes: bitwise"] is False
    assert 0 < figures["modes: deviation"] < 0.01
    with pytest.raises(AssertionError, match="on a CPU"):
        compare(CPU, {}, "modes", found, wanted)
    compare(CPU, {}, "modes", wanted.clone(), wanted)
    with pytest.raises(AssertionError, match="more than rounding"):
        compare(CARD, {}, "modes", wanted * 1.1, wanted)
    with pytest.raises(AssertionError, match="not finite"):
        compare(CARD, {}, "modes", wanted / 0, wanted)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [(lambda q, k, v: q + k + v, "off"), (lambda q, k, v: (q + k + v) * torch.inf, "not finite")],
    ids=["another's", "infinite"],
)
def test_a_wrong_kernel_fails(monkeypatch: pytest.MonkeyPatch, wrong: Any, message: str) -> None:
    def attention(word: str) -> Any:
        def attend(*given: Tensor, attn_mask: Tensor | None = None) -> Tensor:
            answer: Tensor = wrong(*given)
            return answer

        return attend

    monkeypatch.setattr("check_gradients.attention_of", attention)
    with pytest.raises(AssertionError, match=message):
        measure(CPU, {}, "native", drawn(CPU, 64, 64), "64", None)


def test_a_run_passes_with_a_small_deviation_and_not_with_a_large_one() -> None:
    row = {"seconds": 1.0, "loss": 0.1, "reward": 1.0, "grad_norm": 0.3, "memory/reserved_gib": 3.0}
    figures = Figures()
    trained([row | {"ratio_first_deviation": 0.004}], figures)
    assert (figures["ratio_first_deviation"], figures["memory/reserved_gib"]) == (0.004, 3.0)
    trained([row], {})  # recipes without a ratio
    for wrong in ({"ratio_first_deviation": 0.2}, {"loss": float("nan")}, {"grad_norm": 0.0}):
        with pytest.raises(AssertionError):
            trained([row | wrong], {})


def test_runs_are_apart_by_their_numbers_and_not_by_their_times() -> None:
    first = [{"iteration": 0, "reward": 2.0, "seconds": 1.0, "memory/peak_gib": 3.0}]
    second = [{"iteration": 0, "reward": 2.5, "seconds": 9.0, "memory/peak_gib": 4.0}]
    assert apart(first, second) == pytest.approx(0.2)
    assert apart(first, first) == 0


# ---- the kit ---------------------------------------------------------------------------------------------------------


def test_a_kit_holds_files_and_links_and_refuses_to_be_too_large(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parts: dict[str, bytes | Path] = {
        "flowrl/a.py": b"1\n",
        "flowrl/link": Path("a.py"),
        "run.sh": b"#!/bin/sh\n",
        "wheels/b.whl": b"0" * 99,
    }
    assert gpu_kit.write(tmp_path / "kit.tar", parts) == 0
    with tarfile.open(tmp_path / "kit.tar") as archive:
        found = {entry.name.removeprefix("gpu-kit/"): entry for entry in archive}
        assert found.keys() == parts.keys()
        assert found["flowrl/link"].linkname == "a.py"
        assert found["run.sh"].mode == 0o755
        content = archive.extractfile(found["flowrl/a.py"])
        assert content is not None
        assert content.read() == b"1\n"
    assert gpu_kit.write(tmp_path / "large.tar", parts, most=100) == 1
    assert not (tmp_path / "large.tar").exists()
    assert "wheels/b.whl" in capsys.readouterr().err


def test_a_kit_takes_what_checks_read_at_the_locked_versions() -> None:
    files = gpu_kit.repository(gpu_kit.ROOT)
    assert {"flowrl/__init__.py", "assets/tiny-sd3/model_index.json", "tests/helpers/tiny_runs.py"} <= files.keys()
    assert isinstance(files["flowrl/samplers"], Path)
    assert not [name for name in files if name.startswith(gpu_kit.LEFT_OUT)]
    lock = (gpu_kit.ROOT / "requirements.lock").read_text().splitlines()
    found = gpu_kit.pinned(lock)
    assert {one.partition("==")[0] for one in found} >= {"diffusers", "peft", "pytest", "transformers"}
    assert not [one for one in found if ";" in one or one.startswith("torch==")]


def test_a_kit_without_wheels_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    assert gpu_kit.pack(tmp_path / "kit.tar", wheels=str(tmp_path / "empty"), python="3.12") == 1
    assert "holds no wheel" in capsys.readouterr().err
    assert not (tmp_path / "kit.tar").exists()
