"""GenEval on folders of images: verdicts, the published result file, the journal, and what is refused."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from evaluation_folders import RECORDS, empty, mixed, read_rows, right, write_folder
from PIL import Image

from flowrl.benchmarks.geneval.published import published_records
from flowrl.benchmarks.geneval.rules import Detection
from flowrl.evaluation import geneval as evaluation_geneval
from flowrl.evaluation.geneval import benchmark_prompts, judge_images, judge_name, kinds, score_rows
from flowrl.evaluation.runner import check, run
from flowrl.generation.folders import read_folder
from flowrl.generation.models import EMBEDDED, Source
from flowrl.generation.subject import Settings, Subject
from flowrl.rewards import RewardInputs
from flowrl.rewards.geneval import Geneval, Judge
from flowrl.rewards.networks.detectors import detector_options
from flowrl.runtime.journal import Journal

SHAPES = detector_options("shapes").build(torch.device("cpu"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Watched:
    """The judge of shapes, which remembers how many images it was shown at a time."""

    version: str = "watched-1"
    remarks: tuple[str, ...] = ()
    batches: list[tuple[int, ...]] = field(default_factory=list)

    def detect(self, images: Any) -> list[list[Detection]]:
        self.batches.append(images.shape[:3])
        return SHAPES.detect(images)

    def color_of(self, image: Any, detection: Detection) -> str:
        return SHAPES.color_of(image, detection)

    @property
    def seen(self) -> int:
        return sum(shape[0] for shape in self.batches)


def subject(folder: Path, images: Path | None = None, label: str = "model") -> Subject:
    return Subject(label=label, folder=folder, images=images)


def settings(images: Path, out: Path, base: Path | None = None, **options: Any) -> Settings:
    other = None if base is None else subject(out / "base", base, "base")
    given: dict[str, Any] = {"samples": 2} | options
    return Settings(
        benchmark="geneval", subject=subject(out / "model", images), base=other, out=out, **given
    )  # fmt: skip


def test_scenes_that_hold_are_right_and_empty_ones_are_not(tmp_path: Path) -> None:
    result = run(settings(write_folder(tmp_path / "a", samples=8), tmp_path / "out", samples=8))
    assert result.metrics["eval/geneval/score"] >= 0.95  # the detector itself errs in less than one of a hundred
    assert result.metrics["eval/geneval/strict"] == result.metrics["eval/geneval/micro"]
    nothing = run(settings(write_folder(tmp_path / "b", image=empty), tmp_path / "out2"))
    assert nothing.metrics["eval/geneval/score"] == nothing.metrics["eval/geneval/pass_at_2"] == 0
    assert [row["reason"] for row in nothing.rows[::2]] == [
        "expected circle>=1, found 0",
        "expected square>=1, found 0\nexpected triangle>=1, found 0",
        "expected circle>=3, found 0",
        "expected square>=1, found 0",
        "expected circle>=1, found 0\nexpected triangle>=1, found 0",
        "expected circle>=1, found 0\nexpected square>=1, found 0",
    ]


@pytest.mark.parametrize(
    ("limit", "told"),
    [
        (1.3, "With so few images no difference can be relied on to be found: take more prompts."),
        (0.4, "Another model must differ by about 0.400 (macro) to be told apart."),
        (math.nan, "means over images."),
    ],
)
def test_no_difference_above_the_range_is_promised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: float, told: str
) -> None:
    monkeypatch.setattr(evaluation_geneval, "detectable", lambda interval, paired: limit)
    result = run(settings(write_folder(tmp_path / "a", image=mixed), tmp_path / "out"))
    (note,) = [table.note for table in result.tables if "macro" in table.note]
    assert note.endswith(told)


def test_rewards_are_those_that_training_uses(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "a", samples=3, image=lambda record, sample: right(RECORDS[sample], sample))
    rows = run(settings(folder, tmp_path / "out", samples=3)).rows
    files = read_folder(folder)
    images = torch.stack([torch.from_numpy(file.pixels().copy()).permute(2, 0, 1) / 255 for file in files])
    output = Geneval().on(Judge(SHAPES))(
        RewardInputs(
            prompts=[file.prompt for file in files], images=images,
            metadata=[file.record for file in files], group_ids=torch.zeros(len(images), dtype=torch.long),
            sample_ids=torch.arange(len(images)), iteration=0,
        )
    )  # fmt: skip
    for name, key in (("graded", "graded"), ("strict", "strict"), ("official", "correct")):
        expected = [float(row[key]) for row in rows]
        assert output.parts[name].tolist() == pytest.approx(expected, abs=1e-6)
        assert 0 < np.mean(expected) < 1


def test_the_result_file_is_the_published_one(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "a", image=mixed)
    result = run(settings(folder, tmp_path / "out"))
    rows = read_rows(tmp_path / "out" / "model" / "results.jsonl")
    keys = ["filename", "tag", "prompt", "correct", "reason", "metadata", "details"]
    assert all(list(row) == keys for row in rows)
    assert [row["filename"] for row in rows] == [image.file for image in read_folder(folder)]
    assert [json.loads(row["metadata"]) for row in rows[::2]] == RECORDS
    assert all(isinstance(row["correct"], bool) for row in rows)
    details = json.loads(rows[0]["details"])
    ((x1, y1, x2, y2, score),) = details["circle"]
    assert 0 <= x1 < x2 <= 64
    assert 0 <= y1 < y2 <= 64
    assert 0.3 < score <= 1
    assert json.loads(rows[1]["details"]) == {}
    # The summary of the original scripts: images by metadata, tasks by tag.
    by_task = {record["tag"]: [row["correct"] for row in rows if row["tag"] == record["tag"]] for record in RECORDS}
    macro = float(np.mean([np.mean(values) for values in by_task.values()]))
    assert result.metrics["eval/geneval/score"] == pytest.approx(macro)


def test_kept_detections_follow_the_threshold_of_counting(tmp_path: Path) -> None:
    @dataclass(frozen=True)
    class Unsure:
        version: str = "unsure"
        remarks: tuple[str, ...] = ()

        def detect(self, images: Any) -> list[list[Detection]]:
            return [[Detection("circle", box=(0, 0, 9, 9), score=s) for s in (0.95, 0.8, 0.2)] for _ in images]

        def color_of(self, image: Any, detection: Detection) -> str:
            return "red"

    images = read_folder(write_folder(tmp_path / "a", [RECORDS[0], RECORDS[2]], samples=1))
    first, counting = judge_images(images, Unsure(), subject(tmp_path / "out"))
    assert [detail[4] for detail in first["details"]["circle"]] == [0.95, 0.8]
    assert [detail[4] for detail in counting["details"]["circle"]] == [0.95]
    assert first["correct"]
    assert counting["reason"] == "expected circle>=3, found 1"


def test_images_of_several_sizes_are_judged_size_by_size(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "a", image=mixed)
    for index in (1, 4):
        path = folder / f"{index:05d}" / "samples" / "00000.png"
        with Image.open(path) as image:
            larger = image.resize((96, 128), Image.Resampling.NEAREST)
        larger.save(path)
    judge = Watched()
    rows = judge_images(read_folder(folder), judge, subject(tmp_path / "out"))
    assert sorted(judge.batches) == [(2, 128, 96), (10, 64, 64)]
    assert [row["file"] for row in rows] == [image.file for image in read_folder(folder)]


def test_what_was_judged_is_not_judged_again(tmp_path: Path) -> None:
    folder, place = write_folder(tmp_path / "a", image=mixed), subject(tmp_path / "out")
    first = Watched()
    rows = judge_images(read_folder(folder), first, place)
    assert first.seen == 12
    (journal,) = place.folder.glob("journal-*.jsonl")
    lines = journal.read_bytes().split(b"\n")
    assert len(lines) == 1 + 12 + 1
    journal.write_bytes(b"\n".join(lines[:8]) + b"\n" + lines[8][:25])  # killed within the eighth answer
    second = Watched()
    assert judge_images(read_folder(folder), second, place) == rows
    assert second.seen == 12 - 7
    assert len(read_rows(journal)) == 13
    third = Watched()
    assert judge_images(read_folder(folder), third, place) == rows
    assert third.seen == 0


def test_a_changed_image_or_record_or_judge_is_judged_anew(tmp_path: Path) -> None:
    folder, place = write_folder(tmp_path / "a"), subject(tmp_path / "out")
    judge_images(read_folder(folder), Watched(), place)
    path = folder / "00003" / "samples" / "00001.png"
    Image.fromarray(empty(RECORDS[3], 1)).save(path)
    os.utime(path, ns=(1, 1))
    (folder / "00000" / "metadata.jsonl").write_text(
        json.dumps(RECORDS[0] | {"exclude": [{"class": "circle", "count": 1}]})
    )
    judge = Watched()
    rows = judge_images(read_folder(folder), judge, place)
    assert judge.seen == 3
    assert [row["correct"] for row in rows[:2]] == [False, False]
    assert not rows[7]["correct"]
    other = Watched(version="watched-2")
    assert judge_images(read_folder(folder), other, place) == rows
    assert other.seen == 12
    assert len(list(place.folder.glob("journal-*.jsonl"))) == 2


def test_a_damaged_journal_is_refused(tmp_path: Path) -> None:
    with Journal(tmp_path, {"judge": "x"}) as journal:
        journal.add("a", {"value": 1})
        journal.add("b", {"value": 2})
    with Journal(tmp_path, {"judge": "x"}) as again:
        assert again.rows == {"a": {"value": 1}, "b": {"value": 2}}
    lines = journal.path.read_text().splitlines()
    journal.path.write_text("\n".join([lines[0], lines[1][:9], lines[2]]) + "\n")
    with pytest.raises(ValueError, match="line 2 cannot be read: delete the file"):
        Journal(tmp_path, {"judge": "x"})
    with Journal(tmp_path, {"judge": "y"}) as other:
        assert other.rows == {}


def test_kinds_of_failure() -> None:
    reasons = {
        "expected sports ball>=1, found 0": ["too few"],
        "expected bench>=1, found 0\nexpected sports ball>=1, found 0": ["too few", "too few"],
        "expected clock<3, found 16": ["too many"],
        "expected pink car>=1, found 0 pink; and 1 red": ["wrong colour"],
        "expected blue cup>=3, found 1 blue; and 1 green, 1 blue, 1 white": ["wrong colour"],
        "expected dog right of target, found left of target": ["wrong position"],
        "expected dog right of target, found  target": ["wrong position"],
        "expected teddy bear>=1, found 0\nno target for dog to be right of": ["too few", "reference missing"],
        "": [],
    }  # fmt: skip
    assert {reason: kinds(reason) for reason in reasons} == reasons


def test_a_comparison_pairs_prompts_and_samples(tmp_path: Path) -> None:
    ours, theirs = write_folder(tmp_path / "a"), write_folder(tmp_path / "b", image=mixed)
    result = run(settings(ours, tmp_path / "out", theirs))
    change = result.differences["overall (macro)"]
    before, after = (metrics["eval/geneval/score"] for metrics in (result.base_metrics, result.metrics))
    assert change.mean == pytest.approx(after - before)
    assert after - before > 0.3
    assert result.facts["pairs"] == 12
    assert result.facts["gained"] - result.facts["lost"] == round(12 * (after - before))
    table = result.tables[0]
    assert table.head == ("", "base", "model", "change", "95 %")
    assert [row[0] for row in table.rows[6:]] == [
        "overall, macro", "overall, micro", "pass@2", "graded reward", "strict reward"
    ]  # fmt: skip
    assert "share no known start noise" in " ".join(result.notes)
    assert "Intervals cover these prompts." in result.notes  # each task has one
    assert "No difference to base is established: +0.500" in result.headline  # six prompts that agree are no proof


def test_rows_of_one_text_are_numbered_wherever_they_lie(tmp_path: Path) -> None:
    # Folders made row by row hold a prompt under several numbers, one image each.
    rows = [{"task": "t", "prompt": text, "correct": True} for text in ("a", "b", "a", "a")]
    assert [(row.prompt, row.sample) for row in score_rows(rows)] == [("a", 0), ("b", 0), ("a", 1), ("a", 2)]
    folder = write_folder(tmp_path / "a", [RECORDS[0], RECORDS[1], RECORDS[0]], samples=1)
    result = run(settings(folder, tmp_path / "out", samples=1))
    assert result.facts["prompts"] == 2
    assert len(result.rows) == 3


def test_fewer_prompts_and_samples_of_given_images(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "a", samples=4)
    result = run(settings(folder, tmp_path / "out", samples=3, num_prompts=2))
    assert [(row["index"], row["sample"]) for row in result.rows] == [(i, s) for i in (1, 4) for s in range(3)]
    with pytest.raises(ValueError, match="`samples` must be 1 to 4"):
        run(settings(folder, tmp_path / "out", samples=5))


def of_model(model: str, tmp_path: Path, **options: Any) -> Settings:
    source = Source(
        model=model, lora=None, num_steps=2, guidance_scale=1.0, grid="diffusers", max_sequence_length=16,
        dtype="float32",
    )  # fmt: skip
    one = Subject(label="model", folder=tmp_path / "model", source=source)
    return Settings(benchmark="geneval", subject=one, out=tmp_path, **options)


def test_default_prompts_and_judges(tmp_path: Path) -> None:
    world = benchmark_prompts(of_model(EMBEDDED, tmp_path))
    assert len(world) == len({prompt.text for prompt in world}) == 120
    published = [prompt.metadata for prompt in benchmark_prompts(of_model("some/model", tmp_path))]
    assert published == published_records()
    assert benchmark_prompts(of_model("some/model", tmp_path, prompts="world")) == world
    assert len(benchmark_prompts(of_model(EMBEDDED, tmp_path, prompts="published", num_prompts=7))) == 7
    assert judge_name(None, [prompt.metadata for prompt in world]) == "shapes"
    assert judge_name(None, published) == "mask2former"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"options": {"detectr": "x"}}, "unknown key 'detectr'"),
        ({"judge": "shape"}, "shapes"),
        ({"judge": "shapes", "prompts": "published"}, "`judge` shapes does not know airplane.*openmmlab see photos"),
        ({"judge": "mask2former"}, "`judge` mask2former does not know circle"),
        ({"judge": "openmmlab"}, "`judge` openmmlab does not know circle"),
        ({"judge": "openmmlab", "prompts": "published"}, r"has no file to load: give detector: .*743b7d99\.pth"),
        ({"options": {"detector": "x"}}, "detector"),
    ],
)
def test_wrong_settings_are_refused(tmp_path: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        check(of_model(EMBEDDED, tmp_path, **options))


def test_prompts_without_records_or_with_strange_objects_are_refused(tmp_path: Path) -> None:
    (tmp_path / "plain.txt").write_text("a photo of a dog\n")
    with pytest.raises(ValueError, match="lacks tag and include"):
        check(of_model(EMBEDDED, tmp_path, prompts=str(tmp_path / "plain.txt")))
    strange = [RECORDS[0] | {"include": [{"class": "dragon", "count": 1}]}]
    (tmp_path / "strange.jsonl").write_text(json.dumps(strange[0]))
    with pytest.raises(ValueError, match="ask for dragon, which no judge knows"):
        check(of_model(EMBEDDED, tmp_path, prompts=str(tmp_path / "strange.jsonl")))
    with pytest.raises(ValueError, match="there is no"):
        check(of_model(EMBEDDED, tmp_path, prompts=str(tmp_path / "none.jsonl")))
    folder = write_folder(tmp_path / "a")
    with pytest.raises(ValueError, match="leave out `prompts` world"):
        check(settings(folder, tmp_path / "out", prompts="world"))


def test_every_kind_of_failure_has_examples(tmp_path: Path) -> None:
    wrong: Sequence[dict[str, Any]] = [*RECORDS[1:], RECORDS[0]]
    folder = write_folder(tmp_path / "a", image=lambda record, sample: right(wrong[RECORDS.index(record)], sample))
    result = run(settings(folder, tmp_path / "out"))
    failed = {kind for row in result.rows for kind in kinds(row["reason"])}
    assert len(failed) >= 2
    (page,) = result.sections
    for kind in failed:
        assert f"<h3>{kind} " in page
    assert page.count("<img") >= len(failed)
    assert page.count("data:image/png;base64,") == page.count("<img")
    assert {row[0] for row in result.tables[1].rows} == failed
