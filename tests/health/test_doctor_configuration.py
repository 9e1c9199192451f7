"""`flowrl doctor CONFIG` on a random SD3 of a few thousand weights: what stands in the way of a run is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from reward_servers import Answer, health, reward_of, running, scores, scripted
from tiny_runs import TinyRuns, tiny_runs

from flowrl.cli import main
from flowrl.health import machine_checks
from flowrl.health.configuration_checks import diagnose_configuration
from flowrl.health.diagnosis import Check


@pytest.fixture(scope="module")
def tiny(tiny_sd3_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> TinyRuns:
    return tiny_runs(tmp_path_factory.mktemp("doctor"), tiny_sd3_folder, threads=1)


def found_in(tiny: TinyRuns, *overrides: str, step: bool = False) -> dict[str, Check]:
    diagnosis = diagnose_configuration(str(tiny.config), overrides, step=step, offline=True)
    return {check.name: check for check in diagnosis.checks}


def remote(url: str) -> str:
    return f"rewards=[{{name: remote, options: {{url: '{url}', retries: 0}}}}]"


def test_a_good_configuration_passes_with_a_real_step(tiny: TinyRuns) -> None:
    found = found_in(tiny, step=True)
    assert {name: check.state for name, check in found.items()} == dict.fromkeys(
        ("prompts", "settings", "model", "reward brightness", "step"), "ok"
    )
    assert found["prompts"].found == "4 to train on, 0 to evaluate on"
    assert "4 images trained on in " in found["step"].found
    assert "2 iterations of 8 images take about " in found["step"].found


def test_a_dead_reward_server_is_named(tiny: TinyRuns) -> None:
    found = found_in(tiny, remote("http://127.0.0.1:9"), step=True)
    dead = found["reward remote"]
    assert dead.state == "fault"
    assert "no reward server is ready at http://127.0.0.1:9" in dead.found
    assert "flowrl serve" in dead.cure
    assert found["step"].state == "note"


def test_a_server_that_is_up_is_reached_and_timed(tiny: TinyRuns) -> None:
    with running(reward_of()) as server:
        found = found_in(tiny, remote(server.url))["reward remote"]
    assert found.state == "ok"
    assert "scores two images in " in found.found
    with scripted(lambda path, body, number: health() if body is None else _no_score(body)) as broken:
        found = found_in(tiny, remote(broken.url))["reward remote"]
    assert (found.state, "gives no score" in found.found) == ("fault", True)
    assert "flowrl reward score" in found.cure


def _no_score(body: Any) -> Answer:
    return Answer(scores(body, values=lambda _: None))


@pytest.mark.parametrize(
    ("override", "said", "cure"),
    [
        ("prompts.train=nowhere.txt", "nowhere.txt", ""),
        ("prompts.eval={prompts}", "4 of 4 evaluation prompts were also trained on", "take other prompts"),
    ],
)
def test_wrong_prompts_are_named(tiny: TinyRuns, override: str, said: str, cure: str) -> None:
    found = found_in(tiny, override.format(prompts=tiny.folder / "prompts.txt"))["prompts"]
    assert found.state == ("warning" if cure else "fault")
    assert said in found.found
    assert cure in found.cure


def test_prompts_without_the_records_that_the_reward_reads(tiny: TinyRuns) -> None:
    found = found_in(tiny, "rewards=[{name: geneval}]")
    assert found["prompts"].state == "fault"
    assert "needs a GenEval record" in found["prompts"].found
    assert "take a .jsonl file" in found["prompts"].cure
    assert "settings" not in found or "GenEval record" not in found["settings"].found  # it is said once


def test_a_reward_of_nan_is_found_by_the_step(tiny: TinyRuns) -> None:
    every = tiny.rewards("def reward(images, prompts, metadata):\n    return images.mean((1, 2, 3)) * float('nan')\n")
    found = found_in(tiny, every, step=True)["step"]
    assert found.state == "fault"
    assert "4 of 4 images got no valid reward" in found.found
    assert found.cure.startswith("Fix the reward")


def test_rewards_that_fail_now_and_then_are_counted_with_their_reasons(tiny: TinyRuns) -> None:
    half = tiny.rewards(
        "import torch\nfrom flowrl.rewards import RewardOutput\n"
        "def reward(inputs):\n"
        "    valid = torch.arange(len(inputs.images)) % 2 == 0\n"
        "    return RewardOutput(values=torch.where(valid, 1.0, torch.nan), valid=valid, errors={'late': 2})\n"
    )
    found = diagnose_configuration(str(tiny.config), (half, "max_invalid_ratio=0.5"), step=True, offline=True)
    said = [(check.state, check.found) for check in found.checks if check.name == "step"]
    assert ("warning", "50% of the images got no valid reward (reward/late 4)") in said


def test_settings_models_and_files_that_cannot_be(tiny: TinyRuns, tmp_path: Path) -> None:
    assert "learning_rate" in found_in(tiny, "learning_rate=1")["settings"].found
    assert found_in(tiny, "pipeline.device=cuda:7")["device"].state == "fault"
    model = found_in(tiny, "pipeline.model=black-forest-labs/FLUX.1-dev", "pipeline.name=flux", step=True)
    assert model["model"].state == "warning"
    assert "Non-Commercial" in model["licences"].found
    assert "HF_TOKEN" in model["licences"].cure
    assert "flowrl bench" in model["step"].found or model["step"].found.startswith("not tried: put right")
    assert diagnose_configuration(str(tmp_path / "none.yaml"), (), step=True, offline=True).code == 1


def test_a_wrong_name_is_said_before_the_machine_is_looked_at(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "tiny_nfft"]) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert "there is no configuration 'tiny_nfft': did you mean tiny_nft?" in said.err
    assert "or give a run folder" in said.err


def test_the_command_gives_both_parts_as_json(
    tiny: TinyRuns, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(machine_checks, "processes_check", lambda name, gpus: Check(name=name, state="ok", found="met"))
    code = main(["doctor", str(tiny.config), "prompts.train=nowhere.txt", "--offline", "--no-step", "--json"])
    said = json.loads(capsys.readouterr().out)
    assert code == 1
    assert [one["about"].split()[1] for one in said["diagnoses"]] == ["machine", "configuration"]
