"""A verifier's training on a Qwen2-VL of a few thousand weights: stages, resume, refusals, and its use as a judge."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

import flowrl
from flowrl.pretraining.tiny_vlm import TABLES
from flowrl.pretraining.train_verifier import LearningJudge, VerifierConfig, joined, parsed
from flowrl.pretraining.verifier_data import drawn_edit, drawn_set
from flowrl.rewards import RewardInputs, build_reward
from flowrl.rewards.judges.templates import parse_template
from flowrl.world.edits import draw_edit, random_edit
from flowrl.world.scenes import COLORS, SHAPES

KEEP = TABLES["keep"]
WORDS = parse_template("{kind}: {principle}")
FEW: dict[str, Any] = {
    "num_pairs": 6,
    "held_out": 3,
    "batch_size": 2,
    "sft_steps": 2,
    "gcpo_steps": 2,
    "gcpo_pairs": 1,
    "traces": 2,
    "max_tokens": 4,
    "checkpoint_every": 1,
    "show": False,
}
SETS = FEW | {"task": "consistency", "gcpo_steps": None}


@pytest.fixture(scope="module")
def edits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return flowrl.pretrain("verifier", out=str(tmp_path_factory.mktemp("edits")), **FEW)


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with pytest.MonkeyPatch.context() as here:
        here.chdir(tmp_path_factory.mktemp("sets"))
        return flowrl.pretrain("verifier", out="runs/sets", **SETS).resolve()


def test_every_stage_is_measured(edits: Path, sets: Path) -> None:
    for folder, stages in ((edits, ["before", "sft", "gcpo"]), (sets, ["before", "sft"])):
        measured = json.loads((folder / "report.json").read_text())["measured"]
        assert list(measured) == stages
        assert all(0 <= one["agreement"] <= 1 and one["pairs"] == 3 for one in measured.values())


def test_it_goes_on_where_it_stopped(edits: Path, tmp_path: Path) -> None:
    """Stopped after the supervised start and after one update of GCPO, it ends with the same weights."""
    for state in (1, 2):
        out = tmp_path / str(state)
        out.mkdir()
        for name in ["sft.pt", "report.json"][:state]:
            (out / name).write_bytes((edits / name).read_bytes())
        flowrl.pretrain("verifier", out=str(out), **FEW)
        first, again = (load_file(folder / "model.safetensors") for folder in (edits, out))
        assert all(torch.equal(first[name], again[name]) for name in first)


def test_other_settings_do_not_go_on(edits: Path) -> None:
    with pytest.raises(ValueError, match=r"begun with other settings \(lr\): give those, or another out=FOLDER"):
        flowrl.pretrain("verifier", out=str(edits), **FEW, lr=1.0)


def test_log_probs_are_those_of_sampling(tmp_path: Path) -> None:
    """Of answers of several lengths, behind questions of several lengths."""
    judge = LearningJudge(VerifierConfig(out=str(tmp_path), num_pairs=2, held_out=1)).judge
    pair = drawn_edit(WORDS, 0, "learn", 0)
    questions = [
        replace(question, temperature=1.0, max_tokens=5, seed=seed, top_logprobs=5)
        for seed, question in enumerate(pair.winner.questions + pair.loser.questions)
    ]
    _, rows, logits, lengths = judge.sample(questions)
    assert len(set(lengths)) == 2
    assert logits is not None
    rows = [row[: len(row) - place % 2] for place, row in enumerate(rows)]
    found, mask = judge.log_probs(questions, rows)
    assert mask.sum(dim=1).tolist() == [len(row) for row in rows]
    wanted = logits.log_softmax(dim=-1)
    for place, row in enumerate(rows):
        own = wanted[place, range(len(row)), row]
        torch.testing.assert_close(found[place, : len(row)], own, rtol=0, atol=1e-5)


def test_drawn_texts_say_what_is_shown() -> None:
    """Of a removal that was carried out, and of one where the shape is still there or another is gone."""
    pair = drawn_edit(WORDS, 0, "learn", 1)
    assert [text.rpartition("\n")[2] for text in pair.winner.answers] == ["Score: 10", "Score: 10"]
    assert pair.loser.answers[1].endswith("Score: 0")
    assert pair.winner.questions[0].parts[2] == f"keep: {KEEP}"
    same = drawn_set(WORDS, 0, "learn", 0)
    assert same.winner.answers[0].startswith("Yes, both show a ")
    assert same.loser.answers[0].startswith("No, first shows a ")
    known = {*TABLES["words"].split(), *COLORS, *SHAPES}
    for text in (*pair.winner.answers, *pair.loser.answers, *same.winner.answers, *same.loser.answers):
        assert {word.strip(",.:") for word in text.split()} <= known | {str(n) for n in range(11)}


def test_scores_are_means_over_questions() -> None:
    pair = drawn_edit(WORDS, 0, "learn", 0)
    assert joined([pair.winner, pair.loser], [1.0, 0.5, 0.0, 0.25]) == [0.75, 0.125]
    assert (parsed("it is.\nScore: 7"), parsed("Score: 12"), parsed("none")) == (0.7, 1.0, None)


def test_it_judges_edits(edits: Path) -> None:
    """Unable to speak after two updates, it fails in words that the reward counts."""
    record = random_edit(np.random.default_rng(0))
    source, result = (torch.tensor(image).permute(2, 0, 1) / 255 for image in draw_edit(record))
    inputs = RewardInputs(
        prompts=[record["prompt"]],
        images=result[None],
        metadata=[record | {"principles": [f"KEEP: {KEEP}"]}],
        group_ids=torch.zeros(1, dtype=torch.int64),
        sample_ids=torch.zeros(1, dtype=torch.int64),
        source_images=[[source]],
    )
    options = {"judge": {"model": str(edits)}, "template": str(edits), "max_tokens": 8}
    output = build_reward("edit_principles", options=options)(inputs)
    assert bool(output.valid[0]) or set(output.errors) <= {"truncated", "unparsed"}


def test_it_judges_sets(sets: Path) -> None:
    """After two updates yes and no may be none of the likeliest first tokens, which is a failure in words too."""
    inputs = RewardInputs(
        prompts=["a 1x2 grid"],
        images=torch.linspace(0, 1, 3 * 64 * 128).reshape(1, 3, 64, 128),
        metadata=[{}],
        group_ids=torch.zeros(1, dtype=torch.int64),
        sample_ids=torch.zeros(1, dtype=torch.int64),
    )
    options = {"judge": {"model": str(sets)}, "template": f"{sets}/consistency.txt"}
    output = build_reward("grid_consistency", options=options)(inputs)
    assert 0 <= float(output.values[0]) <= 1 if bool(output.valid[0]) else set(output.errors) == {"unparsed"}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Six pairs of 28 x 28 pixels with principles and answers."""
    rows = []
    for number in range(6):
        for place, name in enumerate(("source", "winner", "loser")):
            Image.new("RGB", (28, 28), (40 * number, 80 * place, 0)).save(tmp_path / f"{name}{number}.png")
        images = {name: f"{name}{number}.png" for name in ("source", "winner", "loser")}
        rows.append(
            {"prompt": f"edit {number}", "principles": ["KEEP: the ground", "FOLLOW: it"], **images}
            | {f"{side}_answers": ["It is.\nScore: 9", "Not.\nScore: 1"] for side in ("winner", "loser")}
        )
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_pairs_of_a_file_train_a_lora_on_a_given_model(edits: Path, file: Path, tmp_path: Path) -> None:
    out = flowrl.pretrain(
        "verifier",
        model=str(edits),
        pairs=str(file),
        lora_rank=2,
        template=str(edits),
        out=str(tmp_path / "out"),
        **FEW | {"gcpo_steps": 1, "sft_steps": 1, "kl_coef": 0.1},
    )
    first, trained = (load_file(folder / "model.safetensors") for folder in (edits, out))
    assert first.keys() == trained.keys()
    assert any(not torch.equal(first[name], trained[name]) for name in first)
    assert json.loads((out / "report.json").read_text())["measured"]["gcpo"]["pairs"] == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"source": "none.png"}, r"there is no image .*none\.png, the source"),
        ({"source": None}, "needs source"),
        ({"principles": ["it is nice"]}, "principles must be a list of texts"),
        ({"winner_answers": ["one"]}, "winner_answers must be a list of 2 texts"),
        ({"loser_answers": []}, "the supervised start needs winner_answers and loser_answers"),
    ],
)
def test_bad_pairs_are_refused(file: Path, tmp_path: Path, change: dict[str, Any], message: str) -> None:
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    rows = [{key: value for key, value in (row | change).items() if value is not None} for row in rows]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(ValueError, match=message):
        flowrl.pretrain("verifier", pairs=str(file), out=str(tmp_path / "out"), **FEW)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"task": "consistency", "gcpo_steps": 5}, "gcpo_steps is for task edits"),
        ({"traces": 1}, "traces must be at least 2"),
        ({"device": "xyz"}, "device=xyz is not available on this machine"),
        ({"updates": 3, "checkpoint_every": 100}, "must divide checkpoint_every"),
        ({"updates": 0}, r"updates \(0\) must divide checkpoint_every"),
        ({"first_weight": 1.5}, r"first_weight=1.5 must lie in \[0, 1\]"),
        ({"lr": float("nan")}, "lr"),
        ({"sft_steps": -1}, "sft_steps=-1 must be 0 or a finite number above"),
        ({"task": "editing"}, "task must be one of edits, consistency"),
        ({"model": "./none"}, "there is no folder './none'"),
    ],
)
def test_bad_settings_are_refused(tmp_path: Path, wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        flowrl.pretrain("verifier", out=str(tmp_path), show=False, **{"num_pairs": 1, "held_out": 1} | wrong)
