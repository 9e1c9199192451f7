"""Evaluations, leaderboards and scores from Python: objects back, provenance in Python's words, silence where asked."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from evaluation_folders import empty, mixed, write_folder

import flowrl
from flowrl.generation.sampling_options import SamplingOptions


def test_an_evaluation_says_how_python_called_it_and_is_silent(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, out = write_folder(tmp_path / "images", image=mixed), tmp_path / "out"
    found = flowrl.evaluate(images=folder, out=out, show=False)
    assert capsys.readouterr() == ("", "")
    assert found.folder == out
    assert found.text.startswith("GenEval overall")
    assert [path.name for path in found.files[:2]] == ["00000.png", "00001.png"]
    written = json.loads((out / "result.json").read_text())
    assert written["command"] == f"flowrl.evaluate(images={str(folder)!r}, out={str(out)!r}, show=False)"
    assert "flowrl.evaluate(images=" in (out / "page.html").read_text()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"models": "toy", "images": "x"}, "so `models` has no place beside it"),
        ({"images": "x", "steps": 3, "dtype": "bfloat16"}, "so `steps`, `dtype` has no place"),
        ({"steps": 0}, "`steps` must be a whole number from 1 to 10,000, got 0"),
        ({"samples": 1.5}, "`samples` must be a whole number"),
        ({"guidance": -1}, "`guidance` must be a number from 0"),
        ({"benchmark": "unigenbench"}, "unigenbench needs `prompts`"),
    ],
)
def test_python_callers_read_the_names_that_they_wrote(
    given: dict[str, object], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(flowrl.FlowrlError, match=words):
        flowrl.evaluate(**given)  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


def test_a_leaderboard_and_a_card_of_what_was_evaluated(tmp_path: Path) -> None:
    for name, image in (("good", mixed), ("bad", empty)):
        images = write_folder(tmp_path / f"{name}-images", image=image)
        flowrl.evaluate(images=images, out=tmp_path / name, show=False)
    board = flowrl.leaderboard([tmp_path / "good", tmp_path / "bad"], out=tmp_path / "board")
    first = board.rankings[0]
    assert first.group.benchmark == "geneval"
    assert first.standings[0].score.mean > first.standings[1].score.mean == 0
    assert {path.name for path in board.folder.iterdir()} == {
        "leaderboard.html", "leaderboard.json", "leaderboard.md"
    }  # fmt: skip
    assert "flowrl.leaderboard(" in json.loads((board.folder / "leaderboard.json").read_text())["command"]
    with pytest.raises(flowrl.FlowrlError, match="is the only result"):
        flowrl.leaderboard([tmp_path / "good"])
    card = flowrl.model_card([tmp_path / "good"], out=tmp_path / "README.md")
    assert card.path == tmp_path / "README.md"
    assert card.block in card.path.read_text()
    with pytest.raises(flowrl.FlowrlError, match="a model card is of one model"):
        flowrl.model_card([tmp_path / "good", tmp_path / "bad"])


def test_scores_of_a_folder(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "images", samples=1)
    found = flowrl.score(["jpeg_compressibility"], folder, options={"scale": "ddpo"}, show=False)
    assert found.file is None
    assert found.failed == ()
    assert len(found.images) == len(found.scores["jpeg_compressibility"].values) == 6
    assert np.isfinite(found.scores["jpeg_compressibility"].values).all()
    assert flowrl.score("jpeg_compressibility", folder, out=tmp_path / "s.csv", show=False).file == tmp_path / "s.csv"
    with pytest.raises(flowrl.FlowrlError, match=r"`out` .*x\.txt: the file is a \.csv or a \.jsonl"):
        flowrl.score("jpeg_compressibility", folder, out=tmp_path / "x.txt")


def test_sampling_knows_what_was_given() -> None:
    sampling = SamplingOptions(steps=3, width=64)
    assert sampling.given == ["steps", "width"]
