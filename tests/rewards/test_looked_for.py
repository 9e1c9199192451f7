"""Models and servers that rewards name are looked for before anything is drawn, and only then."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from unigenbench_files import record, write

from flowrl.cli import main
from flowrl.generation.features import check_features
from flowrl.generation.scorers import scorer_specs
from flowrl.rewards.judges.chat import check_chat
from flowrl.rewards.networks.pretrained import look_for_models


@pytest.fixture
def no_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return tmp_path / "cache"


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def test_a_model_that_is_not_here_is_refused_and_one_in_the_cache_is_not(no_hub: Path) -> None:
    check_features("clip", "own/clip")  # options alone look nowhere
    with (
        look_for_models(),
        pytest.raises(ValueError, match=r"CLIP model 'own/clip' is not on this machine, and HF_HUB_OFF"),
    ):
        check_features("clip", "own/clip")
    for rewards in ("pick_score", "aesthetic", "hps", "image_reward"):
        with look_for_models(), pytest.raises(ValueError, match=r"is not on this machine"):
            scorer_specs(rewards, {})
    kept = no_hub / "models--own--clip" / "snapshots" / "abc"
    kept.mkdir(parents=True)
    (kept / "config.json").write_text("{}")
    with look_for_models():
        check_features("clip", "own/clip")


def test_a_hub_that_does_not_answer_is_not_waited_for(no_hub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{free_port()}")
    with (
        look_for_models(),
        pytest.raises(ValueError, match=r"127\.0\.0\.1:\d+ does not answer: give model"),
    ):
        check_features("clip", "own/clip")


def test_a_judge_or_reward_server_that_does_not_listen_is_refused() -> None:
    address = f"http://127.0.0.1:{free_port()}"
    check_chat({"server": f"{address}/v1", "model": "Q"})
    with look_for_models(), pytest.raises(ValueError, match=r"no server listens at http://127.*option server"):
        check_chat({"server": f"{address}/v1", "model": "Q"})
    with look_for_models(), pytest.raises(ValueError, match=r"no server listens at http://127.*option url"):
        scorer_specs("remote", {"remote.url": address})
    with socket.create_server(("127.0.0.1", 0)) as server, look_for_models():
        there = f"http://127.0.0.1:{server.getsockname()[1]}/v1"
        check_chat({"server": [f"{address}/v1", there], "model": "Q"})


def test_eval_looks_before_it_draws(no_hub: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "prompts.txt").write_text("a red circle\n")
    out = tmp_path / "out"
    said = ["eval", "--benchmark", "diversity", "--prompts", str(tmp_path / "prompts.txt"), "--out", str(out)]
    assert main(said) != 0
    assert "is not on this machine" in capsys.readouterr().err
    assert not (out / "model" / "images").exists()
    judge = f"{{server: http://127.0.0.1:{free_port()}/v1, model: Q}}"
    points = write(tmp_path / "points.csv", {0: ("a red circle", record(["Attribute - Color"]))})
    asked = ["eval", "--benchmark", "unigenbench", "--prompts", str(points), "--judge", judge, "--out", str(out)]
    assert main(asked) != 0
    assert "no server listens" in capsys.readouterr().err
    assert not (out / "model" / "images").exists()
