"""`flowrl eval` of models that make videos: panels with temporal diagnostics, and VBench with a stand-in package."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from drawn_clips import clip, draw_clips, vbench_environment
from drawn_images import settings_for

from flowrl.benchmarks.temporal import NAMES, diagnose
from flowrl.benchmarks.vbench import DIMENSIONS, aggregate
from flowrl.cli import main
from flowrl.evaluation import runner
from flowrl.evaluation.benchmark import Result
from flowrl.evaluation.evaluation_result import as_text
from flowrl.evaluation.video import shown_clips
from flowrl.generation.folders import read_folder
from flowrl.media.lossless import CLIPS, read_clip
from flowrl.pages.evaluation_page import render
from flowrl.prompts.loading import read_prompts


@pytest.fixture(autouse=True)
def _drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "images_of", draw_clips)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.txt"
    path.write_text("a square moves\na box moves\na tile moves\n")
    return path


def run(given: Any) -> Result:
    runner.check(given)
    result = runner.run(given)
    assert max(map(len, as_text(result).splitlines())) <= 80
    return result


def page_of(result: Result) -> str:
    return render(result, title="a page", names=["model", "base"], command="flowrl eval")


# ---- panels ----------------------------------------------------------------------------------------------------------


def test_a_panel_has_rewards_their_parts_and_the_diagnostics(tmp_path: Path, prompts: Path) -> None:
    options = {"rewards": "temporal_smoothness", "temporal_smoothness.min_change": "0.5"}
    given = settings_for(tmp_path / "out", "video_panel", prompts=str(prompts), samples=2, options=options)
    result = run(given)
    expected = diagnose(clip(0))
    for name in NAMES:
        assert result.metrics[f"eval/video_panel/{name}"] == pytest.approx(expected[name], abs=1e-6)
    names = {key.removeprefix("eval/video_panel/") for key in result.metrics if not key.endswith(("_low", "_high"))}
    smooth = "temporal_smoothness"
    assert names == {smooth, f"{smooth}.smoothness", f"{smooth}.frame_change", *NAMES}
    assert len(result.rows) == 6
    assert result.rows[0]["values"].keys() == {"temporal_smoothness", *NAMES}
    assert "6 clips of 3 prompts" in result.headline


def test_a_panel_against_a_base_finds_its_jumps_and_shows_them(tmp_path: Path, prompts: Path) -> None:
    given = settings_for(tmp_path / "out", "video_panel", prompts=str(prompts), samples=1, base=True)
    result = run(given)  # without rewards: the diagnostics alone
    assert result.base_metrics["eval/video_panel/teleport"] == pytest.approx(1 - 1 / 10, abs=1e-4)
    assert "\N{MINUS SIGN}0.9000" in next(line for line in as_text(result).splitlines() if "teleport" in line)
    assert "established for: none of the scorers" in result.headline, "three clips that agree are no certainty"
    page = page_of(result)
    assert page.count("<video") == 2 * (3 + len(re.findall(r"<strong>largest", page)))
    assert 'src="data:video/mp4' in page
    assert (tmp_path / "out" / "model" / "shown" / "00000_00000.mp4").is_file()


def test_clips_are_diagnosed_once(tmp_path: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []

    def counted(video: Any) -> dict[str, float]:
        asked.append(video)
        return diagnose(video)

    monkeypatch.setattr(shown_clips, "diagnose", counted)
    given = settings_for(tmp_path / "out", "video_panel", prompts=str(prompts), samples=1)
    first = run(given)
    assert len(asked) == 3
    assert run(given).metrics == first.metrics
    assert len(asked) == 3


def test_a_damaged_clip_is_in_no_mean(tmp_path: Path, prompts: Path) -> None:
    given = settings_for(tmp_path / "out", "video_panel", prompts=str(prompts), samples=1,
                         options={"rewards": "temporal_smoothness"})  # fmt: skip
    (one, *_) = draw_clips(given, given.subject, read_prompts(prompts), ".mkv")
    one.path.write_bytes(b"cut off")
    result = run(given)
    assert result.metrics["eval/video_panel/flicker_failed"] == 1
    assert result.rows[0]["error"] == {"temporal_smoothness": "unreadable"}
    assert any("failed on 1 of 3 clips" in note for note in result.notes)


def test_a_damaged_clip_leaves_its_place_on_the_page(tmp_path: Path, prompts: Path) -> None:
    given = settings_for(tmp_path / "out", "video_panel", prompts=str(prompts), samples=1, base=True)
    (one, *_) = draw_clips(given, given.subject, read_prompts(prompts), ".mkv")
    one.path.write_bytes(b"cut off")
    page = page_of(run(given))
    assert page.count("<video") == 2 * (3 + len(re.findall(r"<strong>largest", page))) - 1


def test_existing_clips_are_judged_by_their_folder(tmp_path: Path, prompts: Path) -> None:
    drawn = settings_for(tmp_path / "a", "video_panel", prompts=str(prompts), samples=2)
    first = run(drawn)
    given = settings_for(tmp_path / "b", "video_panel", images=tmp_path / "a" / "model" / "images", samples=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(runner, "images_of")
        assert run(given).metrics == first.metrics
    with pytest.raises(ValueError, match="is no folder of clips"):
        runner.check(settings_for(tmp_path / "c", "video_panel", images=tmp_path))
    with pytest.raises(ValueError, match=r"holds no samples with names that end in \.png, but 00000\.mkv"):
        read_folder(tmp_path / "a" / "model" / "images")


def test_rewards_of_images_say_what_they_saw(tmp_path: Path, prompts: Path) -> None:
    options = {"rewards": "jpeg_compressibility"}
    result = run(settings_for(tmp_path / "out", "video_panel", prompts=str(prompts), samples=1, options=options))
    assert any("first frame of each clip" in note for note in result.notes)
    (tmp_path / "panel.yaml").write_text(
        "rewards:\n- {name: jpeg_compressibility, frames: {policy: uniform, count: 3, reducer: mean}}\n"
    )
    options = {"rewards": str(tmp_path / "panel.yaml")}
    framed = run(settings_for(tmp_path / "two", "video_panel", prompts=str(prompts), samples=1, options=options))
    assert not any("first frame" in note for note in framed.notes)
    assert "frames-uniform-3-mean" in framed.facts["versions"]["jpeg_compressibility"]


@pytest.mark.parametrize(
    ("benchmark", "options", "words"),
    [
        ("video_panel", {"rewards": "phisics"}, "did you mean 'physics'"),
        ("video_panel", {"features": "clip"}, "REWARD.OPTION"),
        ("video_panel", {"physics.window": "8"}, "no reward was given"),
        ("video_align", {"rewards": "temporal_smoothness"}, None),
    ],
)
def test_options_of_panels(
    tmp_path: Path, prompts: Path, benchmark: str, options: dict[str, str], words: str | None
) -> None:
    given = settings_for(tmp_path / "out", benchmark, prompts=str(prompts), options=options, samples=1)
    if words is not None:
        with pytest.raises(ValueError, match=words):
            runner.check(given)
        return
    notes = run(given).notes
    assert any("not the benchmark's own, which are video_align" in note for note in notes)
    assert any("3 prompts, the published list has 1000" in note for note in notes)


def test_panels_without_prompts_or_with_a_judge_are_refused(tmp_path: Path, prompts: Path) -> None:
    with pytest.raises(ValueError, match=r"VGenEval_T2V\.xlsx"):
        runner.check(settings_for(tmp_path / "out", "videogen_eval"))
    with pytest.raises(ValueError, match="no judge"):
        runner.check(settings_for(tmp_path / "out", "video_panel", prompts=str(prompts), judge="shapes"))


# ---- vbench ----------------------------------------------------------------------------------------------------------

ENTRIES: list[dict[str, object]] = [
    {"prompt_en": text, "dimension": dimensions}
    for dimensions, texts in (
        ([name for name, known in DIMENSIONS.items() if known.quality], ("a cat runs", "a dog", "two boats sail")),
        ([name for name, known in DIMENSIONS.items() if not known.quality], ("a red car", "a tall man", "an owl")),
    )
    for text in texts
]


def calls(python: Path) -> list[str]:
    log = python.parent / "site" / "vbench" / "launch" / "calls.txt"
    return log.read_text().splitlines() if log.is_file() else []


@pytest.mark.slow
def test_vbench_from_videos_to_the_published_sums(tmp_path: Path) -> None:
    python = vbench_environment(tmp_path / "with a space", ENTRIES)
    given = settings_for(tmp_path / "out", "vbench", samples=2, base=True, options={"python": str(python)})
    result = run(given)
    mean = {True: sum(len(str(e["prompt_en"])) for e in ENTRIES[:3]) / 3, False: sum(
        len(str(e["prompt_en"])) for e in ENTRIES[3:]) / 3}  # fmt: skip
    scores = {name: (mean[known.quality] + 0.5) / 50 for name, known in DIMENSIONS.items()}
    for name, value in (scores | aggregate(scores)).items():
        assert result.metrics[f"eval/vbench/{name}"] == pytest.approx(value), name
    # The stand-in gives 4 / 50 more where "base" is in the path, as it is of the base's links.
    assert result.differences["scene"].mean == pytest.approx(-4 / 50)
    assert list(result.intervals) == ["total", "semantic", "quality"]
    assert result.intervals["total"].known
    videos = tmp_path / "out" / "model" / "vbench" / "videos"
    assert sorted(path.name for path in videos.iterdir())[:2] == ["a cat runs-0.mp4", "a cat runs-1.mp4"]
    assert len(list(videos.iterdir())) == 12
    assert any("6 prompts with 2 videos each; published numbers are of 946 with 5" in note for note in result.notes)
    assert any("temporal_flickering" in note for note in result.notes)
    assert result.facts["vbench"] == "0.1.5"
    assert "eval/vbench/teleport" in result.metrics
    assert len(calls(python)) == 32
    assert run(given).metrics == result.metrics
    assert len(calls(python)) == 32  # from the journal
    assert "<video" in page_of(result)


def test_vbench_goes_on_where_its_package_failed(tmp_path: Path) -> None:
    python = vbench_environment(tmp_path / "env", ENTRIES)
    trap = python.parent / "site" / "vbench" / "launch" / "break_scene"
    trap.touch()
    options = {"python": str(python), "dimensions": "[color, scene]"}
    given = settings_for(tmp_path / "out", "vbench", samples=1, options=options)
    with pytest.raises(ValueError, match=r"ended with status 1 on scene .*(?s:.)*RuntimeError: no weights of scene"):
        run(given)
    trap.unlink()
    result = run(given)
    assert calls(python) == ["color", "scene", "scene"]
    assert any("no quality, semantic, total score" in note for note in result.notes)
    assert "eval/vbench/total" not in result.metrics


@pytest.mark.slow
def test_vbench_of_videos_that_exist(tmp_path: Path) -> None:
    python = vbench_environment(tmp_path / "env", ENTRIES)
    options = {"python": str(python), "dimensions": "[color]"}
    drawn = settings_for(tmp_path / "out", "vbench", samples=2, options=options)
    first = run(drawn)
    folder = tmp_path / "out" / "model" / "vbench" / "videos"
    again = run(settings_for(tmp_path / "again", "vbench", samples=2, options=options, images=folder))
    assert again.metrics == first.metrics
    assert not any("could not be read" in note for note in again.notes)
    mine = tmp_path / "mine"
    shutil.copytree(folder, mine)
    sorted(mine.iterdir())[0].write_bytes(b"cut off")
    torn = run(settings_for(tmp_path / "torn", "vbench", samples=2, options=options, images=mine))
    assert any(note.startswith("1 clip could not be read or had too few frames") for note in torn.notes)
    with pytest.raises(ValueError, match=r"lacks 3 of 9 videos \(such as 'a red car-2\.mp4'\)"):
        runner.check(settings_for(tmp_path / "c", "vbench", samples=3, options=options, images=folder))


def test_another_version_is_told(tmp_path: Path) -> None:
    python = vbench_environment(tmp_path / "env", ENTRIES, version="0.2.0")
    given = settings_for(tmp_path / "out", "vbench", samples=1,
                         options={"python": str(python), "dimensions": "[color]"})  # fmt: skip
    assert any(note.startswith("vbench 0.2.0 measured this") for note in run(given).notes)


def test_what_vbench_refuses_before_anything_is_drawn(tmp_path: Path) -> None:
    python = str(vbench_environment(tmp_path / "env", ENTRIES))
    bare = tmp_path / "bare"
    bare.write_text('#!/bin/sh\necho \'{"folder": null, "version": null}\'\n')
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\necho first >&2\necho 'ImportError: no _ctypes' >&2\nexit 3\n")
    for python_like in (bare, broken):
        python_like.chmod(0o755)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"options": {}}, "an environment of its own: give `options` python="),
        ({"options": {"python": "nowhere/python"}}, "is no program on this machine"),
        ({"options": {"python": str(bare)}}, "has no package vbench"),
        ({"options": {"python": str(broken)}}, r"ended with status 3 \(ImportError: no _ctypes\)"),
        ({"options": {"python": python, "dimensions": "[colour]"}}, "did you mean 'color'"),
        ({"options": {"python": python, "dimensions": "[color, color]"}}, "name each once"),
        ({"options": {"python": python}, "samples": 6}, "reads 5 videos of a prompt"),
        ({"options": {"python": python}, "judge": "x"}, "has no judge"),
        ({"options": {"python": python}, "num_prompts": 1}, "leaves no prompt for"),
    ]
    for more, words in cases:
        with pytest.raises(ValueError, match=words):
            runner.check(settings_for(tmp_path / "out", "vbench", **{"samples": 1, **more}))
    assert not (tmp_path / "out").exists()


# ---- the command -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_command_evaluates_the_embedded_model_of_videos(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()  # it draws itself
    arguments = ["eval", "--benchmark", "video_panel", "--num-prompts", "2", "--samples", "1", "--steps", "2",
                 "--out", str(tmp_path / "out"), "--device", "cpu"]  # fmt: skip
    assert main(arguments) == 0
    assert "motion_verdict.strict" in capsys.readouterr().out
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    assert result["facts"]["model"] == "asset:tiny-wan"
    assert result["facts"]["clips"] == 2
    files = read_folder(tmp_path / "out" / "model" / "images", CLIPS)
    assert [file.file for file in files] == ["00000/samples/00000.mkv", "00001/samples/00000.mkv"]
    assert read_clip(files[0].path).shape == (9, 3, 64, 64)
    times = [file.path.stat().st_mtime_ns for file in files]
    assert main(arguments) == 0
    assert [file.path.stat().st_mtime_ns for file in files] == times
    assert "<video" in (tmp_path / "out" / "page.html").read_text()


def test_models_and_benchmarks_of_two_kinds_do_not_meet(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", "asset:tiny-sd3", "--benchmark", "video_panel", "--out", str(tmp_path / "a")]) != 0
    assert "makes images (family sd3) and flowrl eval judges videos" in " ".join(capsys.readouterr().err.split())
    assert main(["eval", "asset:tiny-wan", "--out", str(tmp_path / "b")]) != 0
    assert "--benchmark video_panel" in " ".join(capsys.readouterr().err.split())
