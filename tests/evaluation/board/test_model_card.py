"""`flowrl eval --model-card`: evaluations in a model card, by the hub's own reader, and what stands there already."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from evaluation_folders import flowrl_eval, mixed, right, write_folder
from huggingface_hub import ModelCard
from huggingface_hub.repocard_data import model_index_to_eval_results

from flowrl.evaluation.board.finished import find_entries
from flowrl.publishing.model_index import add_to_card, split_front, task_of

CARD = """---
# keep this comment
license:   apache-2.0
model-index:
- name: theirs
  results:
  - task: {type: text-to-image}
    dataset: {type: drawbench, name: DrawBench}
    metrics:
    - {type: hps, value: 0.28, verified: true}
    source: {name: paper, url: https://example.org}

# and this one
tags: [lora,   "flow"]
base_model: someone/model
---

# My model

---
Text after a rule.
"""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One model's results on two benchmarks, and another model's."""
    place = tmp_path_factory.mktemp("results")
    images = write_folder(place / "mine", image=mixed)
    assert flowrl_eval("--images", images, "--out", place / "geneval") == 0
    other = ("--benchmark", "diversity", "--option", "features=pixels")
    assert flowrl_eval("--images", images, *other, "--out", place / "diversity") == 0
    assert flowrl_eval("--images", write_folder(place / "yours", image=right), "--out", place / "other") == 0
    return place


def index_of(path: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = ModelCard.load(path).data.to_dict()["model-index"]
    return found


def test_a_new_card_is_what_the_hub_reads(results: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "README.md"
    assert flowrl_eval("--model-card", results / "geneval", results / "diversity", "--out", path) == 0
    assert "model-index with 12 numbers of 2 evaluations" in capsys.readouterr().out
    card = ModelCard.load(path)
    assert card.data.model_name == "mine"
    found = {(result.dataset_type, result.metric_type): result for result in card.data.eval_results or []}
    written = json.loads((results / "geneval" / "result.json").read_text())["metrics"]
    score = found["geneval", "score"]
    assert (score.task_type, score.metric_value) == ("text-to-image", written["eval/geneval/score"])
    low, high = (written[f"eval/geneval/score_{end}"] for end in ("low", "high"))
    assert score.metric_args == {"low": low, "high": high, "level": 0.95}
    assert {"prompts": 6, "images_per_prompt": 2, "judge": "shapes-1"}.items() <= dict(score.dataset_args or {}).items()
    assert found["diversity", "diversity"].metric_args["judge"] == "pixels:16x16"
    assert not any(name.endswith(("_low", "_high")) for _, name in found)


def test_all_else_of_a_card_stays_to_the_byte(results: Path, tmp_path: Path) -> None:
    path = tmp_path / "README.md"
    path.write_text(CARD)
    assert flowrl_eval("--model-card", results / "geneval", "--out", path) == 0
    text = path.read_text()
    before, after = CARD.split("model-index:")[0], CARD[CARD.index("\n# and this one") :]
    assert text.startswith(before)
    assert text.endswith(after)
    (model,) = index_of(path)
    assert model["name"] == "theirs"
    theirs, ours = model["results"]
    assert theirs["metrics"] == [{"type": "hps", "value": 0.28, "verified": True}]
    assert theirs["source"] == {"name": "paper", "url": "https://example.org"}
    assert ours["dataset"]["type"] == "geneval"
    assert flowrl_eval("--model-card", results / "geneval", "--out", path) == 0
    assert path.read_text() == text  # the same numbers once more


def test_new_numbers_replace_those_of_the_same_conditions_alone(results: Path, tmp_path: Path) -> None:
    path = tmp_path / "README.md"
    (entry,) = find_entries([str(results / "geneval")])
    add_to_card(path, "mine", [entry])
    text = re.sub(r"(?<=- type: score\n      value: )[0-9.]+", "0.125", path.read_text())
    assert "0.125" in text
    path.write_text(text)
    add_to_card(path, "mine", [entry])
    assert "0.125" not in path.read_text()
    path.write_text(re.sub("(config: .*?)[0-9a-f]{8}", r"\g<1>00000000", text).replace("shapes-1", "shapes-0"))
    add_to_card(path, "mine", [entry])
    (model,) = index_of(path)
    assert [result["dataset"]["args"]["judge"] for result in model["results"]] == ["shapes-0", "shapes-1"]
    assert "0.125" in path.read_text()


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("mark", ["", "\ufeff"])
@pytest.mark.parametrize(
    "text", ["", "# Title\n\nText\n", "---\n---\n# Title\n", "---\nlicense: mit\n---\nText", "\n---\na: 1\n---"]
)
def test_any_card_keeps_its_text(results: Path, tmp_path: Path, text: str, mark: str, end: str) -> None:
    path = tmp_path / "README.md"
    old = mark + text.replace("\n", end)
    path.write_bytes(old.encode())
    (entry,) = find_entries([str(results / "geneval")])
    add_to_card(path, "mine", [entry])
    new = path.read_bytes().decode()
    assert ("\n" in new.replace("\r\n", "")) == (end == "\n" or not text)
    assert new.startswith(mark)
    _, front, rest = split_front(new, "new")
    model_index_to_eval_results(yaml.safe_load(front)["model-index"])
    for line in (line for line in text.split("\n") if line not in ("", "---")):
        assert line in new
    assert rest.endswith(old.partition("# ")[2])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("---\nlicense: mit\n", "has no second --- that ends it"),
        ("---\na: [1\n---\n", "its front matter is not YAML"),
        ("---\n- a\n---\n", "is not a mapping"),
        ("---\nmodel-index: x\n---\n", "the hub does not understand its model-index"),
        ("---\nmodel-index:\n- name: a\nmodel-index:\n- name: b\n---\n", "understand|2 times"),
        ("---\nmodel-index:\n- name: &n a\n  results: []\nother: *n\n---\n", "cannot be changed without loss|not YAML"),
    ],
)
def test_cards_that_cannot_be_changed_are_refused(results: Path, tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "README.md"
    path.write_text(text)
    with pytest.raises(ValueError, match=said):
        flowrl_eval("--model-card", results / "geneval", "--out", path)
    assert path.read_text() == text


def test_a_card_is_of_one_model(results: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the results are of mine, yours, and a model card is of one model"):
        flowrl_eval("--model-card", results / "geneval", results / "other", "--out", tmp_path / "README.md")
    with pytest.raises(ValueError, match="under the same conditions"):
        flowrl_eval("--model-card", f"m={results / 'geneval'},{results / 'other'}", "--out", tmp_path / "README.md")
    with pytest.raises(ValueError, match="--model-card reads finished evaluations, so --samples, MODEL has no place"):
        flowrl_eval("asset:tiny-sd3", "--samples", 3, "--model-card", results / "geneval")
    assert flowrl_eval("--model-card", results / "geneval", "--out", tmp_path) == 0
    assert (tmp_path / "README.md").is_file()


def test_clips_are_of_another_task(results: Path) -> None:
    from dataclasses import replace

    (entry,) = find_entries([str(results / "geneval")])
    assert task_of(replace(entry, rows=[{"file": "0/a.mp4"}])) == "text-to-video"
    assert task_of(replace(entry, rows=[])) == "text-to-image"
