"""Benchmarks with a judge behind a server that behaves as vLLM does: with log-probabilities, busy, failing at times."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from drawn_images import draw_flat, flat, settings_for
from evaluation_folders import flowrl_eval
from judged_files import GEDIT_ROWS, write_gedit, write_geneval2
from served_judge import Served, served_judge
from unigenbench_files import record, write

from flowrl.evaluation import runner

ANSWERS = """
import json


def answer(text, images):
    if "refers to" in text:  # UniGenBench: the first test point is met, the others are not
        points = text.count("refers to")
        return f"<analysis>{['so'] * points}</analysis><score>{[1] + [0] * (points - 1)}</score>"
    if "Answer with one word" in text:  # DPG-Bench
        return "Yes." if "red" in text else "no"
    return json.dumps({"score": [8, 6] if images == 2 else [9, 7], "reasoning": "so"})
"""
"""What the judge says, by the words and the number of images that it is asked with."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A judge that is busy one time in five, and fails one time in ten."""
    file = tmp_path_factory.mktemp("judge") / "answers.py"
    file.write_text(ANSWERS)
    with served_judge(answer=f"{file}:answer", busy=0.2, status_500=0.05, garbage=0.05) as judge:
        yield judge


def mapping(server: Served, **more: Any) -> str:
    """The judge as `--judge` takes it."""
    return json.dumps({"server": server.url, "model": "stub", "concurrency": 4, "retries": 6, **more})


def metrics_of(out: Path) -> dict[str, float]:
    found: dict[str, float] = json.loads((out / "result.json").read_text())["metrics"]
    return found


@pytest.mark.slow
def test_unigenbench(tmp_path: Path, server: Served) -> None:
    points = ["Style", "World Knowledge", "Attribute - Quantity"]
    rows = {index: (f"prompt {index}", record(points[: 1 + index % 3])) for index in range(9)}
    prompts, images = write(tmp_path / "prompts.csv", rows), tmp_path / "images"
    images.mkdir()
    for index in rows:
        flat(index).save(images / f"{index}_0.png")
    before, out = server.stats(), tmp_path / "out"
    command = ("--images", images, "--benchmark", "unigenbench", "--prompts", prompts, "--samples", 1, "--judge",
               mapping(server), "--out", out)  # fmt: skip
    flowrl_eval(*command)
    found, after = metrics_of(out), server.stats()
    assert found["eval/unigenbench/skipped"] == 0
    assert found["eval/unigenbench/style"] == 1
    assert found["eval/unigenbench/world_knowledge"] == 0
    assert after["status_200"] - before.get("status_200", 0) >= 9
    flowrl_eval(*command)
    assert server.stats()["requests"] == after["requests"]  # all of it was in the journal
    body = server.bodies()[-1]
    assert not body.get("stream")
    assert (body["model"], body["max_tokens"], body["temperature"]) == ("stub", 4096, 0.0)
    assert [part["type"] for part in body["messages"][-1]["content"]].count("image_url") == 1


@pytest.mark.slow
def test_dpg_bench(tmp_path: Path, server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "dpg.csv"
    with path.open("w", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(["item_id", "text", "proposition_id", "dependency", "tuple", "question_natural_language"])
        for item in ("a", "b"):
            writer.writerow([item, f"dense {item}", 1, 0, "entity - whole (x)", f"Is {item} there, and red?"])
            writer.writerow([item, f"dense {item}", 2, 1, "attribute - color (x)", "Is it blue?"])
    monkeypatch.setattr(runner, "images_of", draw_flat)
    options = {"all_rows": "true"}
    given = settings_for(tmp_path / "out", "dpg_bench", prompts=str(path), judge=mapping(server), options=options)
    result = runner.run(given)
    assert result.metrics["eval/dpg_bench/skipped"] == 0
    assert result.metrics["eval/dpg_bench/score"] == 50  # of two questions the first is answered yes
    requests = server.stats()["requests"]
    assert runner.run(given).metrics == result.metrics
    assert server.stats()["requests"] == requests


def test_geneval2_reads_probabilities(tmp_path: Path, server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "images_of", draw_flat)
    prompts = str(write_geneval2(tmp_path))
    given = settings_for(tmp_path / "out", "geneval2", prompts=prompts, judge=mapping(server), samples=1)
    result = runner.run(given)
    # The server's candidates: Yes -0.4, " yes" -2, No -1.6, 4 -2.5, 3 -3.
    yes, four = math.exp(-0.4) + math.exp(-2.0), math.exp(-2.5)
    assert result.metrics["eval/geneval2/attribute"] == pytest.approx(100 * yes)
    assert result.metrics["eval/geneval2/count"] == pytest.approx(100 * (0 + four) / 2)
    assert result.metrics["eval/geneval2/soft_tifa_gm"] == pytest.approx(100 * (0 + yes + math.sqrt(four * yes)) / 3)
    body = server.bodies()[-1]
    assert (body["max_tokens"], body["logprobs"], body["top_logprobs"]) == (1, True, 20)


@pytest.mark.slow
def test_gedit_draws_and_judges_the_embedded_editor(tmp_path: Path, server: Served) -> None:
    pytest.importorskip("datasets")
    folder, out = write_gedit(tmp_path / "GEdit", GEDIT_ROWS[:1], size=48), tmp_path / "out"
    command = ("asset:tiny-kontext", "--benchmark", "gedit_en", "--prompts", folder, "--judge", mapping(server),
               "--out", out)  # fmt: skip
    flowrl_eval(*command)
    assert metrics_of(out)["eval/gedit_en/overall"] == pytest.approx(math.sqrt(42))
    assert (out / "sources" / "k1.png").is_file()
    assert (out / "model" / "fullset" / "color_alter" / "en" / "k1_SRCIMG.png").is_file()
    page = (out / "page.html").read_text()
    assert "From top to bottom: source, tiny-kontext." in page
    assert "overall 6.48, semantics 6.00, quality 7.00<br>" in page
    drawn, requests = (out / "model" / "images" / "00000" / "samples" / "00000.png").stat(), server.stats()["requests"]
    flowrl_eval(*command)
    assert (out / "model" / "images" / "00000" / "samples" / "00000.png").stat() == drawn
    assert server.stats()["requests"] == requests


@pytest.mark.slow
def test_a_model_without_sources_is_refused(tmp_path: Path, server: Served) -> None:
    pytest.importorskip("datasets")
    folder = write_gedit(tmp_path / "GEdit", GEDIT_ROWS[:1])
    with pytest.raises(ValueError, match="source image"):
        flowrl_eval("asset:tiny-sd3", "--benchmark", "gedit_en", "--prompts", folder, "--judge", mapping(server),
                    "--out", tmp_path / "out")  # fmt: skip


def test_a_judge_that_is_gone_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "images_of", draw_flat)
    judge = "{server: http://127.0.0.1:9/v1, model: stub, retries: 0}"
    given = settings_for(tmp_path / "out", "geneval2", prompts=str(write_geneval2(tmp_path)), judge=judge, samples=1)
    with pytest.raises(ValueError, match="the judge answered none of 7 questions"):
        runner.run(given)
