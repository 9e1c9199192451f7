"""Panels of scorers, diversity, T2I-CompBench and DPG-Bench, from images to a result, without weights."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from drawn_images import draw_flat, flat, settings_for
from PIL import Image
from scripted_judges import ScriptedJudge, level

from flowrl.benchmarks.t2i_compbench import CATEGORIES
from flowrl.evaluation import named_judges, panel, runner, t2i_compbench
from flowrl.evaluation.benchmark import Result
from flowrl.evaluation.evaluation_result import as_text
from flowrl.generation import features, scorers
from flowrl.generation.features import check_features, features_of
from flowrl.generation.folders import ImageFile
from flowrl.pages.evaluation_page import render
from flowrl.rewards import FunctionReward, RewardInputs, RewardOutput, output_of
from flowrl.rewards.judges.chat import Answer, Question


@pytest.fixture(autouse=True)
def _drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "images_of", draw_flat)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    """Three prompts, one of them twice, as circulating lists have them."""
    path = tmp_path / "prompts.txt"
    path.write_text("a red fox\na blue cup\na red fox\nthree dogs\n")
    return path


class Counting:
    """Levels of images as a reward, NaN above 250; counts what it is asked."""

    def __init__(self, kind: str = "pointwise") -> None:
        self.asked = 0
        self.reward = FunctionReward(name="level", score=self.score, needs=frozenset({"images"}), version="level-1",
                                     kind=kind)  # fmt: skip

    def score(self, inputs: RewardInputs) -> RewardOutput:
        self.asked += len(inputs)
        levels = (inputs.images.mean(dim=(1, 2, 3)) * 255).round().tolist()
        return output_of([value if value <= 250 else math.nan for value in levels], inputs)


def scored_by(monkeypatch: pytest.MonkeyPatch, kind: str = "pointwise") -> Counting:
    counting = Counting(kind)
    monkeypatch.setattr(panel, "load_scorers", lambda specs, device: {"level": counting.reward})
    return counting


def run(given: Any) -> Result:
    runner.check(given)
    result = runner.run(given)
    assert max(map(len, as_text(result).splitlines())) <= 80
    return result


# ---- panels ----------------------------------------------------------------------------------------------------------


def test_means_of_a_panel_and_the_change_to_a_base(
    tmp_path: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counting = scored_by(monkeypatch)
    given = settings_for(tmp_path / "out", "drawbench", prompts=str(prompts), samples=2, base=True,
                         options={"rewards": "clip_score"})  # fmt: skip
    result = run(given)
    # Levels 0 1 10 11 20 21, and 100 more for the base.
    assert result.metrics["eval/drawbench/level"] == pytest.approx(10.5)
    assert result.base_metrics["eval/drawbench/level"] == pytest.approx(110.5)
    assert result.differences["level"].mean == pytest.approx(-100.0)
    assert "established for: none of the scorers" in result.headline, "all images agree, which is no certainty"
    assert any("3 prompts, the published list has 200" in note for note in result.notes)
    assert any("not the benchmark's own" in note for note in result.notes)
    assert counting.asked == 12
    assert run(given).metrics == result.metrics
    assert counting.asked == 12  # from the journal


def test_a_single_prompt_has_an_interval_that_speaks_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scored_by(monkeypatch)
    (tmp_path / "one.txt").write_text("a green cup\n")
    given = settings_for(tmp_path / "out", "drawbench", prompts=str(tmp_path / "one.txt"), samples=2)
    result = run(given)
    assert result.intervals["level"].known
    assert "intervals cover these prompts." in as_text(result)
    page = render(result, title="a page", names=["model"], command="flowrl eval")
    assert "Intervals cover these prompts, not another training of the same model." in page
    assert "of this kind" not in page


def test_failed_images_are_in_no_mean_and_are_asked_for_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counting = scored_by(monkeypatch)
    folder = tmp_path / "images"
    folder.mkdir()
    for number, grey in enumerate((10, 20, 255)):
        flat(grey).save(folder / f"{number}.png")
    (tmp_path / "each.txt").write_text("a\na\nb\n")
    given = settings_for(tmp_path / "out", "ocr", images=folder, prompts=str(tmp_path / "each.txt"))
    result = run(given)
    assert result.metrics["eval/ocr/level"] == pytest.approx(15.0)
    assert result.metrics["eval/ocr/level_failed"] == 1
    assert result.rows[2]["error"] == {"level": "not_finite"}
    assert [row["sample"] for row in result.rows] == [0, 1, 0]
    assert any("failed on 1 of 3" in note for note in result.notes)
    run(given)
    assert counting.asked == 4


def test_real_rewards_by_name_and_option(tmp_path: Path, prompts: Path) -> None:
    options = {"rewards": "jpeg_compressibility,jpeg_incompressibility", "jpeg_compressibility.scale": "ddpo"}
    result = run(settings_for(tmp_path / "out", "panel", prompts=str(prompts), samples=1, options=options))
    small, large = (result.metrics[f"eval/panel/jpeg_{name}"] for name in ("compressibility", "incompressibility"))
    assert small == pytest.approx(-large)
    assert large > 0
    assert set(result.facts["versions"]) == {"jpeg_compressibility", "jpeg_incompressibility"}
    assert not result.intervals  # two scales do not share an axis


@pytest.mark.parametrize(
    ("benchmark", "options", "message"),
    [
        ("drawbench", {"rewards": "pick_scor"}, "did you mean 'pick_score'"),
        ("drawbench", {"scorers": "hps"}, "REWARD.OPTION"),
        ("panel", {}, "nothing to measure"),
        ("panel", {"jpeg_compressibility.scale": "ddpo"}, "nothing to measure"),
        ("diversity", {"features": "clp"}, "did you mean 'clip'"),
        ("diversity", {"features": "pixels", "feature_model": "x"}, "leave feature_model out"),
        ("diversity", {"features": "pixels", "hps.version": "2.1"}, "no reward was given"),
    ],
)
def test_bad_options_of_panels_are_refused(
    tmp_path: Path, prompts: Path, benchmark: str, options: dict[str, str], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        runner.check(settings_for(tmp_path / "out", benchmark, prompts=str(prompts), options=options))


def test_panels_without_prompts_or_with_a_judge_are_refused(tmp_path: Path, prompts: Path) -> None:
    with pytest.raises(ValueError, match="DiffusionNFT"):
        runner.check(settings_for(tmp_path / "out", "drawbench"))
    with pytest.raises(ValueError, match="no judge"):
        runner.check(settings_for(tmp_path / "out", "drawbench", prompts=str(prompts), judge="shapes"))
    (tmp_path / "images").mkdir()
    flat(3).save(tmp_path / "images" / "a.png")
    with pytest.raises(ValueError, match="names no prompts"):
        runner.check(settings_for(tmp_path / "out", "drawbench", images=tmp_path / "images"))


def test_rewards_that_compare_a_prompts_images_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Sum:
        terms = (type("Term", (), {"key": "win_rate", "reward": Counting("pairwise").reward})(),)

    monkeypatch.setattr(scorers, "build_weighted_sum", lambda specs, device: Sum())
    with pytest.raises(ValueError, match="the same for every model"):
        scorers.load_scorers([{"name": "jpeg_compressibility"}], "cpu")


# ---- diversity -------------------------------------------------------------------------------------------------------


def test_diversity_of_pixels(tmp_path: Path, prompts: Path) -> None:
    given = settings_for(tmp_path / "out", "diversity", prompts=str(prompts), samples=2, options={"features": "pixels"})
    result = run(given)
    # Two flat images of neighbouring levels: every pixel differs by 1/255.
    assert result.metrics["eval/diversity/diversity"] == pytest.approx(1 / 255)
    assert list(result.intervals) == ["diversity"]
    both = run(settings_for(tmp_path / "both", "diversity", prompts=str(prompts), samples=2, base=True,
                                   options={"features": "pixels"}))  # fmt: skip
    assert both.differences["diversity"].mean == pytest.approx(0.0)


def test_diversity_of_clip_embeddings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The encoder is replaced: what is checked is that each image gets the embedding of its own pixels."""

    def embedded(network: None, processor: None, images: list[np.ndarray]) -> torch.Tensor:
        return torch.stack([torch.tensor(image.mean(axis=(0, 1))).float() for image in images])

    monkeypatch.setattr(features, "load_clip", lambda model, **options: (None, None))
    monkeypatch.setattr(features, "clip_of_pixels", embedded)
    monkeypatch.setattr(features, "clip_fingerprint", lambda network: "none")
    images = []
    for number, grey in enumerate((5, 50, 90)):
        path = tmp_path / f"{number}.png"
        flat(grey).save(path)
        images.append(ImageFile(file=path.name, path=path, prompt="a", index=0, sample=number))
    found, version = features_of(images, "clip", "my/clip")
    assert found.tolist() == [[5.0] * 3, [50.0] * 3, [90.0] * 3]
    assert version == "clip:my/clip@none"
    assert check_features("pixels", None) == "pixels"


# ---- T2I-CompBench ---------------------------------------------------------------------------------------------------


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    folder = tmp_path / "dataset"
    folder.mkdir()
    (folder / "color_val.txt").write_text("a red cube and a blue ball.\na green cup\n")
    (folder / "non_spatial_val.txt").write_text("a man walks his dog\na green cup\n")
    return folder


def test_images_get_the_names_that_the_scripts_read(
    tmp_path: Path, dataset: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counting = Counting()
    monkeypatch.setattr(t2i_compbench, "load_scorers", lambda specs, device: {"clip_score": counting.reward})
    given = settings_for(tmp_path / "out", "t2i_compbench", prompts=str(dataset), samples=2)
    result = run(given)
    folder = tmp_path / "out" / "model" / "t2i_compbench"
    assert sorted(path.name for path in (folder / "color" / "samples").iterdir()) == [
        "a green cup_000002.png", "a green cup_000003.png", "a red cube and a blue ball_000000.png",
        "a red cube and a blue ball_000001.png",
    ]  # fmt: skip
    # Levels: cube 0 1, cup 10 11, man 20 21.
    answers = json.loads((folder / "non_spatial" / "annotation_clip" / "vqa_result.json").read_text())
    assert answers == [{"question_id": i, "answer": float(v)} for i, v in enumerate((20, 21, 10, 11))]
    assert result.metrics == {"eval/t2i_compbench/non_spatial": pytest.approx(15.5)}
    assert any("Waiting for the benchmark's own scripts: color" in note for note in result.notes)

    theirs = folder / "color" / "annotation_blip"
    theirs.mkdir()
    (theirs / "vqa_result.json").write_text(json.dumps([{"question_id": i, "answer": "0.5000"} for i in range(4)]))
    assert run(given).metrics["eval/t2i_compbench/color"] == 0.5
    assert counting.asked == 4
    (theirs / "vqa_result.json").write_text(json.dumps([{"question_id": 9, "answer": 1}]))
    with pytest.raises(ValueError, match="another set of images"):
        runner.run(given)


def test_the_overall_needs_all_eight_categories(tmp_path: Path, dataset: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(t2i_compbench, "load_scorers", lambda specs, device: {"clip_score": Counting().reward})
    for name in t2i_compbench.FILES.values():
        (dataset / name).write_text("a green cup\n")
    given = settings_for(tmp_path / "out", "t2i_compbench", prompts=str(dataset), samples=1, base=True)
    for subject in ("model", "base"):
        for category in CATEGORIES:
            place = tmp_path / "out" / subject / "t2i_compbench" / category / t2i_compbench.RESULTS[category]
            place.mkdir(parents=True)
            (place / "vqa_result.json").write_text('[{"question_id": 0, "answer": 0.25}]')
    result = run(given)
    assert result.metrics["eval/t2i_compbench/overall"] == pytest.approx(100 * 7 * 0.25 / 8)  # the cup's level is 0
    assert result.differences["non_spatial"].mean == -100.0


def test_verdicts_of_one_prompt_that_agree_leave_room(tmp_path: Path, dataset: Path) -> None:
    (dataset / "non_spatial_val.txt").unlink()
    (dataset / "color_val.txt").write_text("a green cup\n")
    given = settings_for(tmp_path / "out", "t2i_compbench", prompts=str(dataset), samples=4, base=True)
    for subject in ("model", "base"):
        place = tmp_path / "out" / subject / "t2i_compbench" / "color" / t2i_compbench.RESULTS["color"]
        place.mkdir(parents=True)
        scores = [{"question_id": number, "answer": 1.0} for number in range(4)]
        (place / "vqa_result.json").write_text(json.dumps(scores))
    result = run(given)
    assert result.differences["color"].low < 0 < result.differences["color"].high
    assert result.intervals["color"].low < 100
    assert "Intervals cover these prompts." in " ".join(as_text(result).split())


def test_bad_input_of_t2i_compbench_is_refused(tmp_path: Path, dataset: Path, prompts: Path) -> None:
    for more, message in (
        ({}, "Karine-Huang"),
        ({"prompts": str(prompts)}, "the names say the category"),
        ({"prompts": str(dataset), "judge": "x"}, "benchmark's own scripts"),
        ({"prompts": str(dataset), "options": {"clip": "x"}}, "clip_model"),
    ):
        given: dict[str, Any] = dict(more)
        with pytest.raises(ValueError, match=message):
            runner.check(settings_for(tmp_path / "out", "t2i_compbench", **given))
    (dataset / "color_val.txt").write_text("either/or\n")
    with pytest.raises(ValueError, match="cannot name a file"):
        runner.check(settings_for(tmp_path / "out", "t2i_compbench", prompts=str(dataset)))


# ---- DPG-Bench -------------------------------------------------------------------------------------------------------


@pytest.fixture
def dense(tmp_path: Path) -> Path:
    path = tmp_path / "dpg.csv"
    with path.open("w", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(["item_id", "text", "proposition_id", "dependency", "tuple", "question_natural_language"])
        writer.writerow(["a", "a red cube", 1, "0", "entity - whole (cube)", "Is there a cube?"])
        writer.writerow(["a", "a red cube", 2, "1", "attribute - color (red)", "Is it red?"])
        writer.writerow(["b", "two dogs", 1, "0", "entity - whole (dogs)", "Are there dogs?"])
    return path


JUDGE = "{server: http://127.0.0.1:1/v1, model: scripted}"


def test_grids_are_written_where_no_judge_is_named(
    tmp_path: Path, dense: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # the text names the folder, and a path longer than a line stays whole
    result = run(settings_for(Path("out"), "dpg_bench", prompts=str(dense)))
    with Image.open(tmp_path / "out" / "model" / "dpg_bench" / "b.png") as grid:
        assert grid.size == (16, 16)
        assert [grid.getpixel(place) for place in ((0, 0), (15, 0), (0, 15), (15, 15))] == [
            (10, 10, 10), (11, 11, 11), (12, 12, 12), (13, 13, 13)
        ]  # fmt: skip
    assert "2 grids" in result.headline
    assert result.metrics == {}  # a count is no score that a leaderboard could rank


def test_a_judge_answers_every_question_about_every_image(
    tmp_path: Path, dense: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def answer(question: Question) -> Answer:
        asked = "".join(part for part in question.parts if isinstance(part, str))
        # No cube in the last image of a (level 3); dogs in two of b's four (levels 10 to 13).
        yes = level(question) != 3 if "cube" in asked else level(question) not in (12, 13)
        return Answer(text="Yes." if yes else "no")

    judge = ScriptedJudge(answer)
    monkeypatch.setattr(named_judges, "build_chat", lambda options, *, device, owner: judge)
    given = settings_for(tmp_path / "out", "dpg_bench", prompts=str(dense), judge=JUDGE, options={"all_rows": "true"})
    result = run(given)
    assert len(judge.asked) == 4 * 3
    # a: 1, 1, 1, and 0 of 2 in the last (red falls with the cube); b: 2 of 4.
    assert result.metrics["eval/dpg_bench/score"] == pytest.approx(100 * (0.75 + 0.5) / 2)
    assert result.metrics["eval/dpg_bench/attribute"] == 100.0  # before dependencies
    assert result.metrics["eval/dpg_bench/entity"] == 0.0  # of the last images
    assert any("not mPLUG-large" in note for note in result.notes)
    run(given)
    assert len(judge.asked) == 12


def test_items_without_all_answers_are_skipped_and_asked_again(
    tmp_path: Path, dense: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    judge = ScriptedJudge(lambda question: Answer(text="Perhaps" if level(question) == 11 else "yes"))
    monkeypatch.setattr(named_judges, "build_chat", lambda options, *, device, owner: judge)
    given = settings_for(tmp_path / "out", "dpg_bench", prompts=str(dense), judge=JUDGE, base=True)
    result = run(given)
    assert result.metrics["eval/dpg_bench/skipped"] == 1
    assert result.rows[1]["score"] is None
    assert result.differences["score"].mean == 0.0
    asked = len(judge.asked)
    run(given)
    assert len(judge.asked) == asked + 1
    judge.answer = lambda question: Answer(error="timeout")
    with pytest.raises(ValueError, match="answered none"):
        runner.run(settings_for(tmp_path / "other", "dpg_bench", prompts=str(dense), judge=JUDGE))


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"prompts": None}, "TencentQQGYLab/ELLA"),
        ({"samples": 2}, "4 images"),
        ({"options": {"crops": "5"}}, "crops must be 1 to 4, got 5"),
        ({"options": {"crop": "1"}}, "did you mean 'crops'"),
        ({"judge": "mplug"}, "unknown judge"),
    ],
)
def test_bad_input_of_dpg_bench_is_refused(tmp_path: Path, dense: Path, more: dict[str, Any], message: str) -> None:
    given = {"prompts": str(dense)} | more
    with pytest.raises(ValueError, match=message):
        runner.check(settings_for(tmp_path / "out", "dpg_bench", **given))
