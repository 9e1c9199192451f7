"""UniGenBench from images to a result, with a judge that answers by a function of the question."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from drawn_images import draw_flat, flat, settings_for
from scripted_judges import ScriptedJudge
from unigenbench_files import record, write

from flowrl.benchmarks.unigenbench.items import MEANINGS, Item
from flowrl.evaluation import kept_answers, named_judges, runner
from flowrl.evaluation.benchmark import Result
from flowrl.evaluation.evaluation_result import as_text
from flowrl.evaluation.kept_answers import RETRY_TEMPERATURE
from flowrl.evaluation.named_judges import read_judge
from flowrl.evaluation.unigenbench import unigenbench
from flowrl.evaluation.unigenbench.unigenbench import SECONDS, read_wording
from flowrl.generation.layouts import read_numbered
from flowrl.generation.subject import Settings
from flowrl.rewards.judges.chat import Answer, Question, check_chat, identity_of

JUDGE = "{server: http://127.0.0.1:1/v1, model: scripted}"
ITEMS = {
    0: ("a panda in Egypt, ink wash", ["Style", "World Knowledge", "Attribute - Quantity"]),
    7: ("a cat left of a <image> {prompt} sign", ["Entity Layout - Two-Dimensional Space", "Text Generation"]),
    12: ("no dog", ["Grammar - Negation"]),
}


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    return write(tmp_path / "prompts.csv", {index: (text, record(points)) for index, (text, points) in ITEMS.items()})


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """Two images of each prompt; the level is 2 * row + sample."""
    folder = tmp_path / "images"
    folder.mkdir()
    for row, index in enumerate(ITEMS):
        for sample in range(2):
            flat(2 * row + sample).save(folder / f"{index}_{sample}.png")
    return folder


def reply(scores: list[Any]) -> Answer:
    texts = [f"point {number}" for number in range(len(scores))]
    return Answer(text=f"<analysis>{texts}</analysis><score>{scores}</score>", tokens=100)


def text_of(question: Question) -> str:
    return "".join(part for part in question.parts if isinstance(part, str))


def points_of(question: Question) -> int:
    """How many test points a question asks about: those with a line in its descriptions."""
    return text_of(question).count("refers to")


def level_of(question: Question) -> int:
    (image,) = (part for part in question.parts if isinstance(part, np.ndarray))
    return int(image[0, 0, 0])


def met_if_even(question: Question) -> Answer:
    return reply([int(level_of(question) % 2 == 0)] * points_of(question))


def judged_by(monkeypatch: pytest.MonkeyPatch, answer: Callable[[Question], Answer]) -> ScriptedJudge:
    judge = ScriptedJudge(answer)
    monkeypatch.setattr(named_judges, "build_chat", lambda options, *, device, owner: judge)
    return judge


def settings(out: Path, prompts: Path, images: Path | None = None, **more: Any) -> Settings:
    given: dict[str, Any] = {"samples": 2, "judge": JUDGE} | more
    return settings_for(out, "unigenbench", images=images, prompts=str(prompts), **given)


def run(given: Settings) -> Result:
    runner.check(given)
    return runner.run(given)


# ---- a whole evaluation ----------------------------------------------------------------------------------------------


def test_every_test_point_of_every_image_is_counted(
    tmp_path: Path, prompts: Path, images: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    judge = judged_by(monkeypatch, met_if_even)
    result = run(settings(tmp_path / "out", prompts, images))
    assert len(judge.asked) == 6
    assert result.metrics["eval/unigenbench/overall"] == 0.5  # every first image meets all, every second nothing
    assert result.metrics["eval/unigenbench/entity_layout"] == 0.5
    assert result.metrics["eval/unigenbench/skipped"] == 0
    assert [row["met"] for row in result.rows[:3]] == [[True] * 3, [False] * 3, [True] * 2]
    assert list(result.intervals)[-1] == "overall"
    text = as_text(result)
    assert "Gemini-2.5-Pro" in text
    assert "published words" not in text, "it was asked in these"
    own = as_text(run(settings(tmp_path / "own", prompts, images, options={"definitions": "own"})))
    assert "asked in other than the" in own
    assert max(map(len, text.splitlines())) <= 80


def test_the_result_files_have_the_published_names_and_columns(
    tmp_path: Path, prompts: Path, images: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    judged_by(monkeypatch, met_if_even)
    run(settings(tmp_path / "out", prompts, images))
    folder = tmp_path / "out" / "model" / "results"
    with (folder / "model_en.csv").open(encoding="utf-8", newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert [row["index"] for row in rows] == ["0", "0", "7", "7", "12", "12"]
    assert json.loads(rows[0]["result_json"])["score"] == [1, 1, 1]
    assert rows[3]["img_path"] == str(images / "7_1.png")
    summary = json.loads((folder / "model_en.json").read_text())
    assert summary["primary_dimensions"]["Entity Layout"] == {"correct": 1, "total": 2, "accuracy": 0.5}


def test_the_question_holds_all_that_is_asked_for(
    tmp_path: Path, prompts: Path, images: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    judge = judged_by(monkeypatch, met_if_even)
    run(settings(tmp_path / "out", prompts, images))
    question = judge.asked[2]
    words = text_of(question)
    assert "「a cat left of a <image> {prompt} sign」" in words  # a prompt is never taken for a part of the template
    assert "['Entity Layout - Two-Dimensional Space', 'Text Generation']" in words
    assert "Checkpoints Defination:「\nEntity Layout - Two-Dimensional Space: Arrangement and positioning of" in words
    assert "Text Generation: what Text Generation refers to" in words
    assert (question.max_tokens, question.temperature) == (4096, 0.0)
    assert level_of(question) == 2
    assert isinstance(question.parts[0], np.ndarray)


def test_chinese_prompts_are_asked_about_in_chinese(
    tmp_path: Path, images: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    judge = judged_by(monkeypatch, lambda question: reply([1, 0]))
    path = write(tmp_path / "zh.csv", {0: ("一只熊猫", record(["属性-数量", "风格"], "zh"))}, "_zh")
    result = run(settings(tmp_path / "out", path, images))
    assert result.metrics["eval/unigenbench/attribute"] == 1.0
    assert result.metrics["eval/unigenbench/style"] == 0.0
    assert result.facts["track"] == "zh"
    assert "风格: 艺术、绘画、摄影" in text_of(judge.asked[0])


def test_a_model_is_compared_to_its_base_on_the_same_prompts(
    tmp_path: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "images_of", draw_flat)

    def mostly(question: Question) -> Answer:
        """The model meets all; the base meets the first of three points, else nothing."""
        count = points_of(question)
        return reply([1] * count if level_of(question) < 100 else [int(count == 3), *[0] * (count - 1)])

    judged_by(monkeypatch, mostly)
    result = run(settings(tmp_path / "out", prompts, base=True))
    assert result.metrics["eval/unigenbench/overall"] == 1.0
    assert 0.0 < (base := result.base_metrics["eval/unigenbench/overall"]) < 0.5
    assert result.differences["overall"].mean == pytest.approx(1.0 - base)
    assert "Better than base" in result.headline
    assert "overall 1.0000 (95 % \u2013)" in result.headline, "three prompts that meet all are no certainty"
    assert max(map(len, as_text(result).splitlines())) <= 80
    drawn = sorted(path.name for path in (tmp_path / "out" / "model" / "en").iterdir())
    assert drawn == ["0_0.png", "0_1.png", "12_0.png", "12_1.png", "7_0.png", "7_1.png"]
    results = tmp_path / "out" / "base" / "results"
    assert sorted(path.name for path in results.iterdir()) == ["base_en.csv", "base_en.json"]


def test_images_in_genevals_layout_are_found_by_their_prompts(
    tmp_path: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "images_of", draw_flat)
    judged_by(monkeypatch, met_if_even)
    run(settings(tmp_path / "out", prompts))
    again = run(settings(tmp_path / "again", prompts, tmp_path / "out" / "model" / "images"))
    assert [row["index"] for row in again.rows] == [0, 0, 7, 7, 12, 12]
    assert again.metrics["eval/unigenbench/overall"] == 0.5
    other = write(tmp_path / "other.csv", {0: ("another prompt", record(["Style"]))})
    with pytest.raises(ValueError, match="has 0 images of prompt 0"):
        runner.check(settings(tmp_path / "again", other, tmp_path / "out" / "model" / "images"))


def test_some_prompts_only(tmp_path: Path, prompts: Path, images: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    judge = judged_by(monkeypatch, met_if_even)
    result = run(settings(tmp_path / "out", prompts, images, num_prompts=1, samples=1))
    assert (len(judge.asked), result.rows[0]["index"]) == (1, 7)
    assert any("not 600 with 4" in note for note in result.notes)


def test_prompts_that_were_trained_on_are_told(
    tmp_path: Path, prompts: Path, images: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    judged_by(monkeypatch, met_if_even)
    (tmp_path / "train.txt").write_text("No dog.\nsomething else\n")
    result = run(settings(tmp_path / "out", prompts, images, train_prompts=tmp_path / "train.txt"))
    assert any("1 of 3 prompts were trained on" in note for note in result.notes)


# ---- when the judge fails --------------------------------------------------------------------------------------------


def test_unreadable_replies_are_asked_for_again_with_other_seeds(
    tmp_path: Path, prompts: Path, images: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries: dict[int, int] = {}

    def third_time(question: Question) -> Answer:
        tries[level_of(question)] = tries.get(level_of(question), 0) + 1
        return met_if_even(question) if tries[level_of(question)] == 3 else Answer(text="I see a panda.", tokens=10)

    judge = judged_by(monkeypatch, third_time)
    result = run(settings(tmp_path / "out", prompts, images))
    assert result.metrics["eval/unigenbench/overall"] == 0.5
    assert result.facts["attempts"] == {"model": 3.0}
    assert result.facts["tokens"] == {"model": 6 * 120}
    assert len({question.seed for question in judge.asked}) == 18
    assert {question.temperature for question in judge.asked[6:]} == {RETRY_TEMPERATURE}


def test_images_without_scores_are_skipped_counted_and_kept(
    tmp_path: Path, prompts: Path, images: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never_for_three(question: Question) -> Answer:
        return Answer(text="?") if level_of(question) == 3 else met_if_even(question)

    judge = judged_by(monkeypatch, never_for_three)
    given = settings(tmp_path / "out", prompts, images, options={"attempts": "4"})
    result = run(given)
    assert len(judge.asked) == 5 + 4
    assert result.metrics["eval/unigenbench/skipped"] == 1
    assert result.metrics["eval/unigenbench/entity_layout"] == 1.0  # of the one image that is left
    assert (result.rows[3]["met"], result.rows[3]["error"]) == (None, "unparsed")
    assert any("1 of 6 images have no scores (unparsed 1)" in note for note in result.notes)
    text = (tmp_path / "out" / "model" / "results" / "model_en.csv").read_text()
    assert ",null," in text
    assert run(given).metrics == result.metrics
    assert len(judge.asked) == 9


def test_images_whose_server_failed_are_asked_for_in_the_next_sitting(
    tmp_path: Path, prompts: Path, images: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    down = True

    def fails_for_three(question: Question) -> Answer:
        return Answer(error="status_400") if down and level_of(question) == 3 else met_if_even(question)

    judged_by(monkeypatch, fails_for_three)
    given = settings(tmp_path / "out", prompts, images, options={"attempts": "2"})
    assert run(given).rows[3]["error"] == "status_400"
    down = False
    assert run(given).metrics["eval/unigenbench/skipped"] == 0


def test_a_judge_that_answers_nothing_is_an_error_and_nothing_is_lost(
    tmp_path: Path, prompts: Path, images: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_answers, "AT_ONCE", 2)
    monkeypatch.setattr(kept_answers, "MANY", 2)
    asked = 0

    def dies(question: Question) -> Answer:
        nonlocal asked
        asked += 1
        return met_if_even(question) if asked <= 2 else Answer(error="connection")

    judged_by(monkeypatch, dies)
    with pytest.raises(ValueError, match="the same command resumes"):
        run(settings(tmp_path / "out", prompts, images))
    judge = judged_by(monkeypatch, met_if_even)
    result = run(settings(tmp_path / "out", prompts, images))
    assert len(judge.asked) == 4
    assert result.metrics["eval/unigenbench/overall"] == 0.5


def test_a_judge_whose_replies_are_all_unreadable_is_an_error(
    tmp_path: Path, prompts: Path, images: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    judged_by(monkeypatch, lambda question: Answer(text="A nice image."))
    with pytest.raises(ValueError, match="no readable answer to any image"):
        run(settings(tmp_path / "out", prompts, images, options={"attempts": "1"}))


def test_an_answer_that_was_cut_off_after_its_end_is_read(
    tmp_path: Path, prompts: Path, images: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cut(question: Question) -> Answer:
        answer = met_if_even(question)
        whole = level_of(question) != 0
        return Answer(text=answer.text if whole else answer.text[:-3], error="truncated")

    judged_by(monkeypatch, cut)
    result = run(settings(tmp_path / "out", prompts, images, options={"attempts": "1"}))
    assert [row["error"] for row in result.rows] == ["truncated", None, None, None, None, None]


# ---- going on, and starting again ------------------------------------------------------------------------------------


def test_answers_are_kept_by_image_question_and_judge(
    tmp_path: Path, prompts: Path, images: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    judge = judged_by(monkeypatch, met_if_even)
    run(settings(tmp_path / "out", prompts, images))
    run(settings(tmp_path / "out", prompts, images))
    assert len(judge.asked) == 6
    flat(9, size=4).save(images / "0_0.png")  # another image
    run(settings(tmp_path / "out", prompts, images))
    assert len(judge.asked) == 7
    write(prompts, {i: (text, record(points, descriptions=["refers to"] * len(points)))
                    for i, (text, points) in ITEMS.items()})  # fmt: skip
    run(settings(tmp_path / "out", prompts, images))
    assert len(judge.asked) == 13
    run(settings(tmp_path / "out", prompts, images, judge=JUDGE.replace("scripted", "another")))
    assert len(judge.asked) == 19


def test_how_a_judge_is_reached_is_no_part_of_what_it_is() -> None:
    judge = {"server": "http://a/v1", "model": "m"}
    assert identity_of({**judge, "concurrency": 3, "timeout": 9.0}) == identity_of(judge)
    assert identity_of({**judge, "server": ["http://b/v1", "http://c/v1"]}) == identity_of(judge)
    assert identity_of({**judge, "image_format": "jpeg95"}) == identity_of(judge)  # as by default
    kinds = ({"image_format": "png"}, {"model": "n"}, {"structured": True})
    assert all(identity_of({**judge, **other}) != identity_of(judge) for other in kinds)
    assert identity_of({"model": "m"}) != identity_of(judge)  # weights of this process are not a server's


# ---- a dry run -------------------------------------------------------------------------------------------------------


def test_a_dry_run_asks_nothing_and_counts(
    tmp_path: Path, prompts: Path, images: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    judge = judged_by(monkeypatch, met_if_even)
    dry = settings(tmp_path / "out", prompts, images, options={"dry_run": "true"})
    result = run(dry)
    assert not judge.asked
    assert not (tmp_path / "out").exists()
    assert result.facts["calls"] == 6
    assert result.facts["seconds"] >= SECONDS, "as long as one answer takes at least"
    assert "Nothing was drawn or asked" in result.headline
    assert max(map(len, as_text(result).splitlines())) <= 80
    run(settings(tmp_path / "out", prompts, images))
    after = run(dry)
    assert after.facts["calls"] == 0
    assert after.facts["tokens_per_call"] == 100  # as the judge counted them


# ---- wording and judges ----------------------------------------------------------------------------------------------


def test_the_users_words_take_the_place_of_ours(
    tmp_path: Path, prompts: Path, images: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    judge = judged_by(monkeypatch, lambda question: reply([1] * text_of(question).count(" = ")))
    template = tmp_path / "theirs.txt"
    template.write_text("{testpoints}: {prompt}\n{definitions}\n{descriptions}\n<image>")
    definitions = tmp_path / "theirs.json"
    definitions.write_text(json.dumps({label: f" = {label}" for label in MEANINGS["en"]}))
    result = run(settings(tmp_path / "out", prompts, images,
                          options={"template": str(template), "definitions": str(definitions)}))  # fmt: skip
    assert isinstance(judge.asked[0].parts[0], str)
    assert isinstance(judge.asked[0].parts[1], np.ndarray)
    assert "Style:  = Style" in text_of(judge.asked[0])
    assert not any("own words" in note for note in result.notes)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tempalte": "x"}, "did you mean 'template'"),
        ({"attempts": "0"}, "at least 1"),
        ({"temperature": "hot"}, "temperature must be a finite number"),
        ({"dry_run": "yes"}, "true or false"),
        ({"en_variant": "new"}, "en_variant must be"),
        ({"template": "missing.txt"}, "cannot be read"),
        ({"definitions": "missing.json"}, "cannot be read"),
    ],
)
def test_bad_options_are_refused(
    tmp_path: Path, prompts: Path, images: Path, options: dict[str, str], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        runner.check(settings(tmp_path / "out", prompts, images, options=options))


def test_bad_words_are_refused(tmp_path: Path) -> None:
    template = tmp_path / "theirs.txt"
    template.write_text("{prompt} {testpoints} {definitions}")
    with pytest.raises(ValueError, match=r"\{descriptions\}"):
        read_wording("en", str(template), None)
    template.write_text("{prompt} {testpoints} {definitions} {descriptions} <image> <image>")
    with pytest.raises(ValueError, match="marks 2 places"):
        read_wording("en", str(template), None)
    definitions = tmp_path / "theirs.json"
    definitions.write_text('{"Style": "x"}')
    with pytest.raises(ValueError, match="lacks 26 test points"):
        read_wording("en", None, str(definitions))
    definitions.write_text('["Style"]')
    with pytest.raises(ValueError, match="must hold an object"):
        read_wording("en", None, str(definitions))


def test_a_template_may_have_a_system_turn(tmp_path: Path) -> None:
    template = tmp_path / "theirs.txt"
    template.write_text("Judge {prompt}.\n=== user ===\n{testpoints} {definitions} {descriptions}")
    item = Item(index=0, prompt="a cat", points=("Style",), descriptions=("ink",))
    image = np.zeros((2, 2, 3), dtype=np.uint8)
    question = read_wording("en", str(template), None).question(item, image, max_tokens=9, temperature=0.0, seed=1)
    assert question.system == "Judge a cat."
    assert text_of(question).endswith("Style: ink")


def test_the_named_judges_are_valid() -> None:
    for judge in unigenbench.JUDGES.values():
        check_chat(judge, owner="test")
    assert "server" not in unigenbench.JUDGES["offline"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "needs `judge`"),
        ("gemni", "did you mean 'gemini'"),
        ("{server: http://a/v1}", "model"),
        ("{server: http://a/v1, model: m, sede: 1}", "sede"),
        ("missing.yaml", "no such file"),
    ],
)
def test_bad_judges_are_refused(text: str | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_judge(text, unigenbench.JUDGES, owner="unigenbench")


def test_a_judge_may_stand_in_a_file(tmp_path: Path) -> None:
    (tmp_path / "judge.yaml").write_text("server: http://a/v1\nmodel: m\n")
    assert read_judge(str(tmp_path / "judge.yaml"), {}, owner="test") == {"server": "http://a/v1", "model": "m"}


# ---- images ----------------------------------------------------------------------------------------------------------


def test_a_missing_image_is_an_error_before_anything_is_asked(
    tmp_path: Path, prompts: Path, images: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    judge = judged_by(monkeypatch, met_if_even)
    (images / "7_1.png").unlink()
    given = settings(tmp_path / "out", prompts, images)
    for function in (runner.check, runner.run):
        with pytest.raises(ValueError, match=r"lacks 1 of 6 images \(7_1.png\)"):
            function(given)
    assert not judge.asked
    with pytest.raises(ValueError, match="no folder"):
        read_numbered(tmp_path / "nowhere", {0: "a"}, 1)


def test_missing_prompts_are_refused(tmp_path: Path, images: Path) -> None:
    with pytest.raises(ValueError, match="CodeGoat24/UniGenBench"):
        runner.check(settings_for(tmp_path, "unigenbench", images=images, judge=JUDGE))
