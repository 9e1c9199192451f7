"""`flowrl eval` from its arguments to the table, result.json and the page."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import toy_pipeline
from evaluation_folders import RECORDS, empty, flowrl_eval, mixed, read_rows, settings_of, write_folder
from evaluation_runs import make_run

from flowrl.evaluation.benchmark import Result
from flowrl.evaluation.evaluation_result import as_text, over_models
from flowrl.generation import generate
from flowrl.generation.models import Source
from flowrl.pipelines import PIPELINES
from flowrl.pipelines.places.known_checkpoints import checkpoints
from flowrl.rendering.terminal_text import Table, as_table
from flowrl.runtime.files import plain

MODELS = ("toy", "other/toy", "a/toy", "b/toy", "a/b", "a/c", "d")


@pytest.fixture(autouse=True)
def _toy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The toy stands for every model of SD3's family, and these hub ids are of it."""
    monkeypatch.setitem(PIPELINES, "sd3", "toy_pipeline")
    for model in MODELS:
        monkeypatch.setitem(checkpoints(), model, toy_pipeline.PUBLISHED)


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[Source]:
    """What was loaded; fingerprints are known without it."""
    loaded: list[Source] = []

    def load(source: Source, device: str) -> Any:
        loaded.append(source)
        return toy_pipeline.load(source.model)

    monkeypatch.setattr(generate, "load_source", load)
    monkeypatch.setattr(generate, "fingerprint", lambda source: f"mark of {source.model} {source.lora}")
    return loaded


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    """Six prompts, one of each task."""
    path = tmp_path / "six.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in RECORDS))
    return path


def result_of(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / "result.json").read_text())
    return found


def test_a_folder_of_images(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, out = write_folder(tmp_path / "images", image=mixed, samples=4), tmp_path / "out"
    before = sorted(folder.rglob("*"))
    assert flowrl_eval("--images", folder, "--out", out) == 0
    printed = capsys.readouterr().out
    lines = printed.splitlines()
    assert max(map(len, lines[: lines.index(next(line for line in lines if line.startswith("wrote")))])) <= 80
    assert "GenEval overall 0." in printed
    for name in ("single_object", "color_attr", "overall, macro", "overall, micro", "pass@4", "graded reward"):
        assert re.search(rf"^  {re.escape(name)} +\d\.\d{{3}} +\d\.\d{{3}} to \d\.\d{{3}}$", printed, re.MULTILINE)
    found = result_of(out)
    assert found["benchmark"] == "geneval"
    assert found["metrics"]["eval/geneval/pass_at_4"] == 1.0
    assert found["intervals"]["overall (macro)"]["mean"] == found["metrics"]["eval/geneval/score"]
    assert found["facts"]["judge"] == "shapes-1"
    assert len(read_rows(out / "model" / "rows.jsonl")) == len(read_rows(out / "model" / "results.jsonl")) == 24
    assert sorted(folder.rglob("*")) == before  # nothing is written to a folder that was given


def test_the_page_stands_alone(tmp_path: Path) -> None:
    folder, out = write_folder(tmp_path / "images", image=mixed), tmp_path / "out"
    assert flowrl_eval("--images", folder, "--baseline", write_folder(tmp_path / "other"), "--out", out) == 0
    page = (out / "page.html").read_text()
    assert page.startswith("<!DOCTYPE html>")
    assert "<script" not in page
    assert not re.findall(r'(?:src|href)="(?!data:|#)', page)
    assert "default-src 'none'" in page
    for words in ("Scores with 95 % intervals", "Change from other to images", "What went wrong", "too few"):
        assert words in page
    assert page.count("<svg") == 4  # scores and changes, each for desktop and phone
    assert page.count("data:image/png") >= 6
    assert "expected circle&gt;=3, found 0" in page


def test_a_model_is_drawn_judged_and_continued(
    tmp_path: Path, prompts: Path, loads: list[Source], capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    arguments = ("toy", "--prompts", prompts, "--samples", 2, "--steps", 3, "--guidance", 1, "--out", out)
    assert flowrl_eval(*arguments) == 0
    assert [(source.model, source.num_steps) for source in loads] == [("toy", 3)]
    first, printed = result_of(out), capsys.readouterr().out
    assert len(list((out / "model" / "images").glob("*/samples/*.png"))) == 12
    assert first["facts"]["num_steps"] == 3
    assert flowrl_eval(*arguments) == 0
    assert len(loads) == 1  # everything was there
    again = result_of(out)
    for found in (first, again):
        del found["facts"]["seconds"]
    assert again == first
    assert capsys.readouterr().out == printed
    with pytest.raises(ValueError, match=r"drawn with other settings: seed 0 \(now 1\)"):
        flowrl_eval(*arguments, "--seed", 1)


def test_a_model_is_compared_with_another_on_the_same_noise(
    tmp_path: Path, prompts: Path, loads: list[Source], capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    arguments = ("--prompts", prompts, "--samples", 2, "--steps", 2, "--guidance", 1, "--out", out)
    assert flowrl_eval("toy", "--baseline", "other/toy", *arguments) == 0
    ours, theirs = (sorted((out / name / "images").glob("*/samples/*.png")) for name in ("model", "base"))
    assert [path.read_bytes() for path in ours] == [path.read_bytes() for path in theirs]
    found = result_of(out)
    assert found["names"] == ["toy", "toy (base)"]
    change = found["differences"]["overall (macro)"]
    assert change["mean"] == 0
    assert change["low"] == -change["high"] < 0  # that no verdict changed here does not say that none could
    assert (found["facts"]["gained"], found["facts"]["lost"], found["facts"]["pairs"]) == (0, 0, 12)
    assert "No difference to toy (base) is established" in " ".join(capsys.readouterr().out.split())
    assert [source.model for source in loads] == ["toy", "other/toy"]


def test_drawn_folders_are_compared_as_images_that_share_noise(
    tmp_path: Path, prompts: Path, loads: list[Source], capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("toy", "--prompts", prompts, "--samples", 1, "--steps", 2, "--guidance", 1)
    for name, seed in (("first", 0), ("second", 0), ("third", 1)):
        assert flowrl_eval(*arguments, "--seed", seed, "--out", tmp_path / name) == 0
    capsys.readouterr()
    folders = [tmp_path / name / "model" / "images" for name in ("first", "second", "third")]
    assert flowrl_eval("--images", folders[0], "--baseline", folders[1], "--out", tmp_path / "a") == 0
    assert result_of(tmp_path / "a")["names"] == ["first", "second"]
    assert "share no known" not in capsys.readouterr().out
    assert flowrl_eval("--images", folders[0], "--baseline", folders[2], "--out", tmp_path / "b") == 0
    assert "share no known start noise" in capsys.readouterr().out


def test_a_run_is_compared_with_its_own_base_and_its_prompts_are_searched(
    tmp_path: Path, prompts: Path, loads: list[Source], capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path / "run")
    (run / "prompts.txt").write_text(f"{RECORDS[0]['prompt']}\na photo of a triangle and a square\n")
    out = tmp_path / "out"
    arguments = ("--baseline", "base", "--prompts", prompts, "--samples", 1, "--out", out)
    assert flowrl_eval(run, *arguments) == 0
    assert [(source.lora, source.num_steps) for source in loads] == [(run / "lora", 4), (None, 4)]
    printed = " ".join(capsys.readouterr().out.split())
    assert "2 of 6 prompts were trained on (1 word for word, 1 with the objects swapped)" in printed
    assert result_of(out)["facts"]["overlap"] == {
        "exact": ["a photo of a circle"], "swapped": ["a photo of a square and a triangle"]
    }  # fmt: skip
    assert flowrl_eval(run, *arguments, "--train-prompts", prompts) == 0
    assert len(result_of(out)["facts"]["overlap"]["exact"]) == 6


def test_different_sampling_is_noted(tmp_path: Path, prompts: Path, loads: list[Source]) -> None:
    run = make_run(tmp_path / "run")
    out = tmp_path / "out"
    assert flowrl_eval(run, "--baseline", "toy", "--prompts", prompts, "--samples", 1, "--out", out) == 0
    notes = " ".join(result_of(out)["notes"])
    assert "num_steps 4 and 40" in notes
    assert "guidance_scale 1.0 and 4.5" in notes


def test_several_models_are_trainings_of_one_method(
    tmp_path: Path, prompts: Path, loads: list[Source], capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [make_run(tmp_path / name) for name in ("first", "second")]
    out = tmp_path / "out"
    assert flowrl_eval(*runs, "--baseline", "toy", "--steps", 2, "--guidance", 1, "--prompts", prompts, "--samples", 1,
                       "--out", out) == 0  # fmt: skip
    assert [source.model for source in loads] == ["toy", "toy", "toy"]  # the base once
    assert [source.lora and source.lora.parent.name for source in loads] == ["first", None, "second"]
    found = result_of(out)
    assert found["names"] == ["2 models"]
    assert "Means over 2 models" in capsys.readouterr().out
    for run in runs:
        assert (out / run.name / "page.html").is_file()
        assert found["metrics"]["eval/geneval/score"] == result_of(out / run.name)["metrics"]["eval/geneval/score"]


def test_means_over_models_have_students_interval() -> None:
    def one(score: float, before: float) -> Result:
        return Result(
            headline="", rows=(), metrics={"eval/x/score": score, "eval/x/score_low": 0.0}, tables=(),
            base_metrics={"eval/x/score": before}, notes=("same note",),
        )  # fmt: skip

    whole = over_models([one(0.5, 0.4), one(0.7, 0.4)], ["a", "b"])
    assert whole.intervals["score"].mean == pytest.approx(0.6)
    assert (whole.intervals["score"].low, whole.intervals["score"].high) == (0.0, 1.0)  # of shares
    assert whole.differences["score"].mean == pytest.approx(0.2)
    assert whole.differences["score"].high - 0.2 == pytest.approx(12.7062 * 0.1, rel=1e-4)
    assert whole.notes == ("same note",)
    assert [row[0] for row in whole.tables[0].rows] == ["score"]
    assert whole.tables[1].rows == (("a", "0.500"), ("b", "0.700"))
    assert "score 0.600" in as_text(whole)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("toy", "--images", "x"), "MODEL has no place beside it"),
        (("--images", "x", "--steps", "3", "--dtype", "bfloat16"), "so --steps, --dtype has no place"),
        (("toy", "--benchmark", "genevall"), "--benchmark genevall.*did you mean"),
        (("a/toy", "b/toy"), "two of MODEL have the name 'toy'"),
        (("toy", "--baseline", "base"), "needs MODEL with a LoRA"),
        (("--images", "x", "--baseline", "base"), "needs MODEL with a LoRA"),
        (("toy", "--option", "detector"), "must be KEY=VALUE"),
        (("asset:tiny-wan",), r"asset:tiny-wan makes videos \(family wan\) and flowrl eval judges images"),
        (("toy", "--baseline", "asset:tiny-wan"), "asset:tiny-wan makes videos"),
        (("toy", "--prompts", "nowhere.jsonl"), "there is no 'nowhere.jsonl'"),
        (("toy", "--train-prompts", "nowhere.txt"), "there is no 'nowhere.txt'"),
    ],
)
def test_contradictions_are_refused_before_anything_loads(
    loads: list[Source], arguments: tuple[str, ...], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        flowrl_eval(*arguments)
    assert loads == []


def test_settings_from_arguments(tmp_path: Path) -> None:
    (one,) = settings_of()
    assert one.subject.label == "tiny-sd3"
    assert (one.out, one.subject.folder) == (Path("evaluations/geneval-tiny-sd3"), one.out / "model")
    assert (one.samples, one.seed, one.batch_size, one.base) == (4, 0, 64, None)
    (other,) = settings_of("a/b", "--baseline", "asset:tiny-sd3", "--batch-size", 3, "--option", "detector=x=y")
    assert (other.batch_size, dict(other.options)) == (3, {"detector": "x=y"})
    assert other.base is not None
    assert other.base.folder == other.out / "base"
    assert settings_of("a/b")[0].batch_size == 8
    folder = write_folder(tmp_path / "images", samples=3, image=empty)
    (given,) = settings_of("--images", folder)
    assert (given.samples, given.subject.images, given.subject.source) == (3, folder, None)
    for name, count in (("wise", 1), ("drawbench", 3)):  # wise takes one of the folder's three
        assert settings_of("--images", folder, "--benchmark", name)[0].samples == count
    for name, count in (("drawbench", 5), ("hpdv2", 1), ("wise", 1), ("panel", 4)):
        assert settings_of("a/b", "--benchmark", name)[0].samples == count
    several = settings_of("a/b", "a/c", "--baseline", "d", "--out", "x")
    assert [str(part.out) for part in several] == ["x/b", "x/c"]
    assert {str(part.base.folder) for part in several if part.base is not None} == {"x/base"}


def test_a_baseline_may_be_a_folder_with_published_names(tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "1.png").touch()

    def base_of(benchmark: str) -> Path | None:
        (one,) = settings_of("a/b", "--benchmark", benchmark, "--baseline", mine)
        assert one.base is not None
        return one.base.images

    assert base_of("wise") == base_of("vbench") == mine
    (mine / "model_index.json").write_text(json.dumps({"_class_name": "StableDiffusion3Pipeline"}))
    assert base_of("wise") is None


def test_tables_fit_a_terminal() -> None:
    table = Table(title="T", head=("", "a", "b"), rows=(("x" * 90, "1.0", "2.0"), ("short", "10.0", "20.0")))
    lines = as_table(table).splitlines()
    assert max(map(len, lines)) == 80
    assert "\u2026" in lines[2]
    assert lines[3].endswith("10.0  20.0")


def test_numbers_that_json_does_not_know_are_null() -> None:
    table = Table(title="t", head=("a",), rows=())
    assert plain({"a": float("nan"), "b": (1, float("inf")), "c": table}) == {
        "a": None, "b": [1, None], "c": {"title": "t", "head": ["a"], "rows": [], "note": ""}
    }  # fmt: skip
