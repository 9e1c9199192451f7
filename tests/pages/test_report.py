"""The report of a synthetic run: its numbers, that it needs nothing else, and the runs that lack something."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flowrl.media.images import save_png
from flowrl.pages import run_curves
from flowrl.pages.report import report
from flowrl.rendering.markup import DASH, MINUS, duration, number, signed
from flowrl.runs.held_out_result import conclusion, held_out
from flowrl.runs.run_data import read_run
from flowrl.runtime.failures import FlowrlError
from flowrl.statistics.means import ScoreRow, stratified_score, task_scores

TASKS = ("single_object", "two_object", "counting", "colors", "position", "color_attr")
PROMPT = 'a photo of <script>alert("x")</script> & a red circle'
VOID = {"meta", "img", "br", "link", "input", "hr"}


class Balance(HTMLParser):
    """Checks that tags nest, and collects the attributes that load something."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loads: list[str] = []
        self.images: list[dict[str, str | None]] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.loads += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "xlink:href", "data")]
        if tag == "img":
            self.images.append(dict(attrs))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def parse(page: str) -> Balance:
    parser = Balance()
    parser.feed(page)
    parser.close()
    assert parser.open == []
    return parser


def image_rows(chance: float, seed: int, prompts: int = 12, samples: int = 2) -> list[dict[str, Any]]:
    """Verdicts of every task; the same uniform draw for each seed, so before and after are correlated."""
    draw = np.random.default_rng(seed).random((len(TASKS), prompts, samples))
    return [
        {
            "prompt_id": task * prompts + prompt,
            "prompt": PROMPT,
            "task": name,
            "sample": sample,
            "correct": bool(draw[task, prompt, sample] < chance * (1.4 - 0.15 * task)),
            "reason": "",
            "graded": 0.5,
            "rewards": {"sharpness": float(draw[task, prompt, sample] + chance)},
        }
        for task, name in enumerate(TASKS)
        for prompt in range(prompts)
        for sample in range(samples)
    ]


def as_score_rows(rows: list[dict[str, Any]]) -> list[ScoreRow]:
    return [
        ScoreRow(task=r["task"], prompt=r["prompt_id"], sample=r["sample"], value=r["correct"])
        for r in rows
        if r["correct"] is not None
    ]


def evaluation_row(iteration: int, rows: list[dict[str, Any]]) -> dict[str, Any]:
    score = stratified_score(as_score_rows(rows))
    tasks = {f"eval/geneval/{task}": interval.mean for task, interval in task_scores(as_score_rows(rows)).items()}
    return {
        "iteration": iteration,
        "eval/geneval/score": score.mean,
        "eval/geneval/score_low": score.low,
        "eval/geneval/score_high": score.high,
        "eval/geneval/graded": 0.4 + iteration / 400,
        "eval/reward/sharpness": 0.5,
        "seconds/eval": 9.5,
        **tasks,
    }


def training_row(iteration: int, rng: np.random.Generator) -> dict[str, Any]:
    return {
        "iteration": iteration,
        "reward": 0.3 + 0.005 * iteration + 0.03 * float(rng.normal()),
        "reward_std": 0.35,
        "reward_error": 0.03,
        "reward/geneval": 0.3,
        "loss": 0.01,
        "policy_loss": 0.01,
        "kl": 1e-5 * iteration,
        "ratio_mean": 1.0,
        "ratio_max_deviation": 2e-4,
        "clip_fraction": 0.08,
        "zero_std_ratio": 0.2,
        "grad_norm": 0.2 + 0.02 * float(rng.normal()),
        "lr": 1e-4,
        "num_images": 96,
        "seconds": 3.0,
        "seconds/rollout": 1.2,
        "seconds/reward": 0.3,
        "seconds/update": 1.4,
        "seconds/total": 3.0 * (iteration + 1),
    }


def write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def make_run(
    folder: Path,
    *,
    iterations: int = 40,
    after: float = 0.6,
    evaluate: bool = True,
    sample: bool = True,
    side: int = 16,
) -> Path:
    """A run folder as `flowrl train` leaves it."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text("num_iterations: 40\nout: runs/demo\nprompt_note: 'a < b & c'\n")
    manifest = {
        "version": "0.1.0",
        "command": "flowrl train tiny",
        "started": "2030-01-01T10:00:00",
        "git_commit": "abc123",
    }
    manifest |= {"finished": "2030-01-01T10:05:00", "device": "cpu", "python": "3.12.1", "config_name": "tiny"}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    rng = np.random.default_rng(0)
    rows = [training_row(iteration, rng) for iteration in range(iterations)]
    if evaluate:
        marks = sorted({0, iterations // 2, iterations})
        verdicts = {mark: image_rows(0.35 + (after - 0.35) * mark / max(iterations, 1), seed=3) for mark in marks}
        for mark, found in verdicts.items():
            rows.append(evaluation_row(mark, found))
            write_lines(folder / "eval" / f"iteration_{mark:06d}.jsonl", found)
    write_lines(folder / "metrics.jsonl", rows)
    if sample:
        for mark in (0, iterations):
            for index in range(3):
                save_png(rng.random((3, side, side)), folder / f"samples/iteration_{mark:06d}/{index:04d}.png")
        prompts = [{"prompt": PROMPT, "seed": 7 + index} for index in range(3)]
        (folder / "samples" / "prompts.json").write_text(json.dumps(prompts))
    return folder


def page_of(folder: Path) -> str:
    return report(folder).read_text(encoding="utf-8")


def test_the_time_by_stage_is_that_of_the_iterations(tmp_path: Path) -> None:
    page = page_of(make_run(tmp_path / "run"))
    rows = dict(re.findall(r"<tr><td>(\w+)</td><td[^>]*>([^<]+)</td><td[^>]*>[\d.]+ %</td></tr>", page))
    stages = page[page.index("Share of the time by stage") :].split('"')[0]
    assert "total" not in stages
    assert "total" not in rows
    assert "rollout 32 %, reward 8 %, update 38 %, eval 19 %, other 3 %" in stages  # of 40 * 3 s and 3 * 9.5 s


def test_prompts_that_were_trained_on_are_not_called_held_out(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    assert "The held-out GenEval score" in page_of(run)
    manifest = json.loads((run / "manifest.json").read_text()) | {"eval_prompts": {"number": 9, "trained_on": 3}}
    (run / "manifest.json").write_text(json.dumps(manifest))
    page = page_of(run)
    assert "3 of 9 evaluation prompts were also trained on: on those the scores say nothing about new prompts" in page
    assert "The evaluation GenEval score" in page
    assert "eld-out" not in page


def test_summary_states_score_paired_difference_and_verdict(tmp_path: Path) -> None:
    page = page_of(make_run(tmp_path / "fine-run"))
    before, after = as_score_rows(image_rows(0.35, 3)), as_score_rows(image_rows(0.6, 3))
    difference = stratified_score(after, base=before)
    assert "<h1>fine-run</h1>" in page
    assert f"went from {number(stratified_score(before).mean)} (95 % " in page
    assert f"to {number(stratified_score(after).mean)} (95 % " in page
    expected = f"{signed(difference.mean)} (95 % {signed(difference.low)} to {signed(difference.high)})"
    assert expected in page
    assert "established improvement" in page
    assert "144 images of the same prompts and seeds" in page


@pytest.mark.parametrize(
    ("after", "word"), [(0.6, "established improvement"), (0.351, "not established"), (0.1, "established loss")]
)
def test_verdict_follows_the_interval(tmp_path: Path, after: float, word: str) -> None:
    found = held_out(read_run(make_run(tmp_path / "r", after=after, sample=False)))
    assert found is not None
    assert conclusion(found.difference) == word


def test_page_stands_alone_and_nests(tmp_path: Path) -> None:
    page = page_of(make_run(tmp_path / "r"))
    parsed = parse(page)
    assert len(parsed.images) == 6
    assert all(value.startswith(("data:image/", "#")) for value in parsed.loads)
    assert not re.search(r"https?://|@import|url\(", page)
    assert "script" not in parsed.tags
    assert parsed.tags.count("h1") == 1
    assert all(image["alt"] for image in parsed.images)
    assert all('role="img"' in tag and "aria-label=" in tag for tag in re.findall(r"<svg[^>]*>", page))


def test_text_from_the_run_is_escaped(tmp_path: Path) -> None:
    page = page_of(make_run(tmp_path / "r<b>"))
    assert "<script>" not in page
    assert "&lt;script&gt;alert(&quot;x&quot;)&lt;/script&gt; &amp; a red circle" in page
    assert "a &lt; b &amp; c" in page
    assert "<h1>r&lt;b&gt;</h1>" in page


def test_small_images_keep_their_pixels_and_large_ones_are_reduced(tmp_path: Path) -> None:
    small = parse(page_of(make_run(tmp_path / "small", side=16))).images
    large = parse(page_of(make_run(tmp_path / "large", side=600))).images
    assert {image.get("class") for image in small} == {"pixels"}
    assert all(str(image["src"]).startswith("data:image/jpeg") and "class" not in image for image in large)
    assert max(len(str(image["src"])) for image in large) < 600 * 600 * 3


def test_time_by_stage_adds_up(tmp_path: Path) -> None:
    page = page_of(make_run(tmp_path / "r"))
    total = 40 * 3.0 + 3 * 9.5
    for stage, seconds in (("rollout", 48.0), ("reward", 12.0), ("update", 56.0), ("eval", 28.5), ("other", 4.0)):
        assert f'<th scope="row">{stage}</th><td>{duration(seconds)}</td><td>{100 * seconds / total:.1f} %</td>' in page
    assert f'<th scope="row">all</th><td>{duration(total)}</td>' in page


def test_health_marks_what_is_off(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "r", evaluate=False)
    assert page_of(folder).count("✓ healthy") == 5
    rng = np.random.default_rng(0)
    write_lines(
        folder / "metrics.jsonl", [training_row(i, rng) | {"ratio_mean": 1.2, "zero_std_ratio": 0.9} for i in range(9)]
    )
    assert page_of(folder).count("! look here") == 2


def test_run_without_evaluation_or_images_claims_nothing(tmp_path: Path) -> None:
    page = page_of(make_run(tmp_path / "r", evaluate=False, sample=False))
    parse(page)
    assert "no held-out evaluation" in page
    assert "Score by task" not in page
    assert "established" not in page
    assert "Before and after" not in page


@pytest.mark.parametrize(
    ("first", "when"), [(0, "before training"), (1, "after 1 iteration"), (4, "after 4 iterations")]
)
def test_run_in_progress_shows_its_first_evaluation(tmp_path: Path, first: int, when: str) -> None:
    folder = make_run(tmp_path / "r", iterations=7)
    (folder / "eval/iteration_000000.jsonl").rename(folder / f"eval/iteration_{first:06d}.jsonl")
    for path in set(folder.glob("eval/*.jsonl")) - {folder / f"eval/iteration_{first:06d}.jsonl"}:
        path.unlink()
    (folder / "manifest.json").write_text(json.dumps({"version": "0.1.0"}))
    rng = np.random.default_rng(0)
    write_lines(
        folder / "metrics.jsonl",
        [evaluation_row(first, image_rows(0.35, 3)), *(training_row(i, rng) for i in range(7))],
    )
    page = page_of(folder)
    parse(page)
    assert f"{when}; there is no later evaluation yet" in page
    assert len(re.findall(rf">{when}<", page)) == 1  # below the score
    assert "not finished" in page
    assert "7 of 40 iterations" in page
    assert "flowrl train resume=runs/demo" in page


def test_run_that_has_just_started(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("num_iterations: 3\n")
    page = page_of(tmp_path)
    parse(page)
    assert "No iteration has finished yet" in page


def test_broken_lines_are_left_out_and_said(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "r")
    with (folder / "metrics.jsonl").open("a") as stream:
        stream.write('{"iteration": 39, "note": "a\u2028b"}\n{"iteration": 40, "rewa')  # the first is a whole line
    page = page_of(folder)
    parse(page)
    assert "1 line of metrics.jsonl could not be read" in page
    assert "40 of 40 iterations" in page


def test_values_that_are_not_finite_are_said(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "r", evaluate=False, sample=False)
    rng = np.random.default_rng(0)
    rows = [training_row(i, rng) | ({"grad_norm": float("nan")} if i == 5 else {}) for i in range(9)]
    write_lines(folder / "metrics.jsonl", rows)
    assert "1 logged number is NaN or infinite and left out of the charts; first: grad_norm at iteration 5" in page_of(
        folder
    )


def test_damaged_side_files_do_not_stop_the_page(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "r")
    (folder / "manifest.json").write_text("{")
    (folder / "config.yaml").write_text("a: [1")
    (folder / "samples/iteration_000040/0001.png").write_bytes(b"\x89PNG broken")
    page = page_of(folder)
    assert len(parse(page).images) == 4
    assert "manifest.json could not be read" in page
    assert "not valid YAML" in page


def test_a_resumed_run_counts_every_iteration_once(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "r", iterations=10)
    rows = [training_row(i, np.random.default_rng(i)) for i in (*range(10), *range(6, 12))]
    write_lines(folder / "metrics.jsonl", rows)
    assert [row["iteration"] for row in read_run(folder).train] == list(range(12))


def test_images_without_a_verdict_are_left_out_of_the_pairs(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "r")
    after = image_rows(0.6, 3)
    after[0]["correct"] = None
    write_lines(folder / "eval/iteration_000040.jsonl", after)
    page = page_of(folder)
    assert "143 images of the same prompts and seeds were compared; 1 image without a verdict" in page


def test_evaluation_of_another_reward_is_the_headline(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "r")
    rng = np.random.default_rng(0)
    rows = [{"iteration": 0, "eval/reward/sharpness": 0.85}, {"iteration": 40, "eval/reward/sharpness": 1.1}]
    write_lines(folder / "metrics.jsonl", [*rows, *(training_row(i, rng) for i in range(40))])
    found = held_out(read_run(folder))
    assert found is not None
    assert found.difference is not None
    assert found.difference.mean == pytest.approx(0.25)
    page = page_of(folder)
    parse(page)
    assert "held-out reward sharpness went from 0.850" in page
    assert "Score by task" not in page


def test_unknown_bounds_and_nulls_are_dashes(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "r")
    row = evaluation_row(0, image_rows(0.35, 3)) | {
        "eval/geneval/score_low": float("nan"),
        "eval/geneval/score_high": None,
    }
    late = row | {"iteration": 40, "eval/geneval/score": 0.5}
    write_lines(folder / "metrics.jsonl", [row, late])
    for path in folder.glob("eval/*.jsonl"):
        path.unlink()
    page = page_of(folder)
    parse(page)
    assert not re.search(r"\bnan\b", page, re.IGNORECASE)
    assert "not testable" in page


def test_a_difference_without_bounds_is_told_with_its_reason(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "r")
    for path in folder.glob("eval/*.jsonl"):  # one task keeps a single image
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        write_lines(
            path, [row for row in rows if row["task"] != TASKS[0] or (row["prompt_id"], row["sample"]) == (0, 0)]
        )
    page = page_of(folder)
    assert "is <strong>not testable</strong>: one task has a single image, whose spread is unknown." in page
    assert "no image rows of both evaluations" not in page
    assert not re.search(r"\bnan\b", page, re.IGNORECASE)


def test_the_page_says_of_which_prompts_the_interval_speaks(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "r")
    assert "The interval covers prompts of this kind and other start noise" in page_of(folder)
    for path in folder.glob("eval/*.jsonl"):
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        write_lines(path, [row for row in rows if row["prompt_id"] % 12 == 0])  # a prompt of each task, two images
    page = page_of(folder)
    assert "The interval covers these prompts and other start noise" in page
    assert "Intervals of before and after are Wilson's, over prompts where a task has several" in page


def test_the_band_of_training_is_over_prompts(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "r", iterations=6)
    assert "95 % over prompts" in page_of(folder)
    figure = run_curves.curves(read_run(folder), None)
    wide = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for row in wide:
        row.pop("reward_error", None)  # a run of before: nothing says how alike a prompt's images were
    write_lines(folder / "metrics.jsonl", wide)
    assert "95 %" not in run_curves.curves(read_run(folder), None)
    assert "95 %" in figure


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FlowrlError, match="give the run folder"):
        report(tmp_path / "absent")
    with pytest.raises(ValueError, match="this one holds nothing"):
        report(tmp_path)
    make_run(tmp_path / "demo", evaluate=False, sample=False)
    with pytest.raises(ValueError, match=r"did you mean .*demo\?"):
        report(tmp_path)


def test_out_is_honoured_and_written_whole(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "r", sample=False)
    out = report(folder, tmp_path / "pages" / "mine.html")
    assert out == tmp_path / "pages" / "mine.html"
    assert [path.name for path in out.parent.iterdir()] == ["mine.html"]
    assert not (folder / "report.html").exists()


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.5, "0.500"),
        (-0.5, f"{MINUS}0.500"),
        (2e-5, f"2.0e{MINUS}5"),
        (float("nan"), DASH),
        (0.0, "0.000"),
        (2e6, "2.0e6"),
    ],
)
def test_numbers_are_written_for_readers(value: float, text: str) -> None:
    assert number(value) == text
