"""Judged benchmarks from the user's data to a result, with a judge that answers by a function of the question."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from drawn_images import draw_flat, flat, settings_for
from judged_files import GENEVAL2, write_gedit, write_geneval2, write_imgedit, write_tiif, write_wise
from scripted_judges import ScriptedJudge, levels, text_of

from flowrl.benchmarks.judged.cases import Case
from flowrl.benchmarks.judged.protocols import PROTOCOLS
from flowrl.evaluation import named_judges, runner
from flowrl.evaluation.benchmark import BENCHMARKS, Result
from flowrl.evaluation.board.comparable import OUTCOMES
from flowrl.evaluation.board.finished import find_entries
from flowrl.evaluation.evaluation_result import as_text, over_models, write_result
from flowrl.evaluation.judged import judged_rules
from flowrl.evaluation.judged.judged_result import is_model
from flowrl.generation.subject import Settings
from flowrl.rewards.judges.chat import Answer, Question

Table = Mapping[int, tuple[Sequence[float], Sequence[float]]]
"""Semantics and quality ratings by the level of the result."""

JUDGE = "{server: http://127.0.0.1:1/v1, model: scripted}"


def judged(
    monkeypatch: pytest.MonkeyPatch, settings: Settings, answer: Callable[[Question], Answer]
) -> tuple[Result, ScriptedJudge]:
    """The result of a benchmark whose images are flat, and what the judge was asked."""
    judge = ScriptedJudge(answer)
    monkeypatch.setattr(named_judges, "build_chat", lambda options, *, device, owner: judge)
    monkeypatch.setattr(runner, "images_of", draw_flat)
    size = (
        rf"{settings.benchmark}: \d+ images? to draw, \d+ prompts? x {settings.samples} a model \(fewer: num_prompts, "
    )
    assert re.match(size, runner.check(settings))
    return runner.run(settings), judge


def settings_of(tmp_path: Path, benchmark: str, where: Path, **more: Any) -> Settings:
    given = {"judge": JUDGE, "prompts": str(where), "samples": 1, **more}
    return settings_for(tmp_path / "out", benchmark, **given)


def scores(*ratings: float) -> Answer:
    return Answer(text=json.dumps({"score": list(ratings), "reasoning": "because"}), tokens=10)


def by_level(table: Table) -> Callable[[Question], Answer]:
    """Semantics and quality ratings of the images of these levels."""

    def answer(question: Question) -> Answer:
        semantics, quality = table[levels(question)[-1]]
        return scores(*(semantics if len(levels(question)) == 2 else quality))

    return answer


def test_every_judged_benchmark_has_rules() -> None:
    assert {name for name, known in BENCHMARKS.items() if known.one_image} == set(PROTOCOLS)


def test_gedit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("datasets")
    settings = settings_of(tmp_path, "gedit_en", write_gedit(tmp_path / "GEdit"))
    # Drawn images have the levels 0, 10, 20; overall sqrt(6 * 7), sqrt(4 * 9), sqrt(9 * 4).
    table: Table = {0: ([8, 6], [9, 7]), 10: ([4, 10], [9, 9]), 20: ([9, 9.5], [4, 8])}
    result, judge = judged(monkeypatch, settings, by_level(table))
    color = (math.sqrt(42) + 6) / 2
    metrics = {name.removeprefix("eval/gedit_en/"): value for name, value in result.metrics.items()}
    assert metrics["color_alter"] == pytest.approx(color)
    assert metrics["overall"] == pytest.approx((color + 6) / 2)
    assert metrics["semantics"] == pytest.approx((5 + 9) / 2)
    assert metrics["quality"] == pytest.approx((8 + 4) / 2)
    assert metrics["overall_intersection"] == pytest.approx((math.sqrt(42) + 6) / 2)
    assert metrics["semantics_intersection"] == pytest.approx((6 + 9) / 2)
    assert metrics["skipped"] == 0
    asked = {name: result.facts[name] for name in ("temperature", "tries", "max_tokens")}
    assert asked == {"temperature": 0.0, "tries": 3, "max_tokens": 1400}
    assert not {"tries", "max_tokens"} & OUTCOMES  # so that leaderboards hold them to be conditions
    assert [row["scores"]["semantics"] for row in result.rows] == [6, 4, 9]
    # The judge saw the source, then the result at its size.
    first, second = judge.asked[:2]
    assert levels(first) == [10, 0]
    assert {part.shape for part in first.parts if not isinstance(part, str)} == {(24, 24, 3)}
    assert levels(second) == [0]
    assert "Editing instruction: make the circle red" in text_of(first)
    assert (first.max_tokens, first.temperature) == (1400, 0.0)
    out = tmp_path / "out" / "model"
    assert (out / "fullset" / "subject-remove" / "en" / "k3.png").is_file()
    assert (out / "fullset" / "subject-remove" / "en" / "k3_SRCIMG.png").is_file()
    table_file = out / "gpt4o" / "eval_results_new" / "model_color_alter_gpt_score.csv"
    assert [line.split(",")[3:6] for line in table_file.read_text().splitlines()[1:]] == [
        ["6.0", "7.0", "True"], ["4.0", "9.0", "False"],
    ]  # fmt: skip
    said = as_text(result)
    assert "published numbers are of gpt-4.1" in said
    assert "3 of 606 published prompts took part" in said
    assert result.sections[0].count("<figure>") == 3
    assert result.sections[0].count("<img") == 6


def test_gedit_against_a_base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("datasets")
    settings = settings_of(tmp_path, "gedit_en", write_gedit(tmp_path / "GEdit"), base=True)
    table: Table = {0: ([9, 9], [4, 4]), 10: ([9, 9], [9, 9]), 20: ([4, 4], [4, 4])}
    before: Table = {level + 100: ([4, 4], [4, 4]) for level in table}
    result, _ = judged(monkeypatch, settings, by_level({**table, **before}))
    change = result.differences["overall"]
    assert change.mean == pytest.approx(((2 + 5) / 2 + 0) / 2)
    assert not change.known  # a kind of a single image: its spread cannot be known
    color = result.differences["color_alter"]
    assert color.mean == pytest.approx(3.5)
    assert (color.low, color.high) == (-10, 10)  # two images, cut to the scale
    assert result.base_metrics["eval/gedit_en/overall"] == pytest.approx(4)
    assert "model against base" in as_text(result)


def test_unread_replies_are_no_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("datasets")
    settings = settings_of(tmp_path, "gedit_en", write_gedit(tmp_path / "GEdit"), options={"attempts": "2"})

    def answer(question: Question) -> Answer:
        return Answer(text="I cannot say.") if levels(question) == [10] else scores(5, 5)

    result, judge = judged(monkeypatch, settings, answer)
    assert len(judge.asked) == 7  # six questions, one asked again
    assert judge.asked[-1].temperature == 0.7
    assert result.metrics["eval/gedit_en/skipped"] == 1
    assert result.metrics["eval/gedit_en/overall"] == 5
    assert result.rows[1]["values"] is None
    assert "1 of 3 images have no scores (unparsed 1)" in as_text(result)
    again, judge = judged(monkeypatch, settings, answer)
    assert judge.asked == []
    assert again.metrics == result.metrics
    with pytest.raises(ValueError, match=r"no readable answer about any image of model \(unparsed 6\)"):
        judged(monkeypatch, settings_of(tmp_path, "gedit_en", tmp_path / "GEdit", options={"attempts": "1"}),
               lambda question: Answer(text="No."))  # fmt: skip


def test_imgedit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = settings_of(tmp_path, "imgedit", write_imgedit(tmp_path))
    ratings = {0: (1, 4, 4), 10: (5, 5, 4), 20: (2, 1, 1)}

    def answer(question: Question) -> Answer:
        first, second, third = ratings[levels(question)[-1]]
        return Answer(text=f"Brief reasoning: so.\nOne: {first}\nTwo: {second}\nThree: {third}")

    result, judge = judged(monkeypatch, settings, answer)
    metrics = {name.removeprefix("eval/imgedit/"): value for name, value in result.metrics.items()}
    assert metrics["adjust"] == pytest.approx((3 + 4.67) / 2)
    assert metrics["overall"] == pytest.approx(((3 + 4.67) / 2 + 1.33) / 2)
    assert (result.intervals["adjust"].low, result.intervals["adjust"].high) == (1, 5)  # two images, cut to the scale
    assert text_of(judge.asked[2]).startswith("Rate this style edit.\nNOTE {json} stays.\nediting instruction is : rem")
    assert [levels(question) for question in judge.asked] == [[10, 0], [11, 10], [12, 20]]
    assert "In 1 of 3 images the second or third rating exceeds the first" in as_text(result)
    replies = json.loads((tmp_path / "out" / "model" / "imgedit" / "result.json").read_text())
    assert list(replies) == ["1082", "1068", "673"]
    assert (tmp_path / "out" / "model" / "imgedit" / "673.png").is_file()


def test_geneval2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = settings_of(tmp_path, "geneval2", write_geneval2(tmp_path))
    mass = {
        "How many circles": {"two": 0.5, " 2": 0.125, "one": 0.3},  # 0.625
        "Are the circles red?": {"Yes": 0.5, " yes": 0.3, "No": 0.2},  # 0.8
        "Are there any circles": {"Yes": 1.0},
        "Are there any squares": {"No": 0.9, "yes": 0.1},  # 0.1
        "How many squares": {"three": 0.9},  # 0
        "above the circle": {"Yes": 0.4},
    }

    def answer(question: Question) -> Answer:
        assert (question.max_tokens, question.top_logprobs, question.temperature) == (1, 20, 0.0)
        (found,) = (lp for words, lp in mass.items() if words in text_of(question))
        return Answer(text="x", logprobs=({word: math.log(p) for word, p in found.items()},))

    result, judge = judged(monkeypatch, settings, answer)
    assert text_of(judge.asked[0]) == "How many circles are in the image? Answer in one word."
    metrics = {name.removeprefix("eval/geneval2/"): value for name, value in result.metrics.items()}
    gm = [0.5 ** (1 / 3), 0.1**0.5, 0]  # 0.625 * 0.8 * 1 = 0.5
    assert metrics["soft_tifa_gm"] == pytest.approx(100 * sum(gm) / 3)
    assert metrics["3_atoms"] == pytest.approx(100 * (gm[0] + gm[1]) / 2)
    assert metrics["5_atoms"] == 0
    assert metrics["soft_tifa_am"] == pytest.approx(100 * (2.425 / 3 + 1.1 / 2 + 0.4 / 2) / 3)
    assert metrics["object"] == pytest.approx(100 * (1 + 0.1 + 1) / 3)
    assert metrics["count"] == pytest.approx(100 * 0.625 / 2)
    assert metrics["position"] == pytest.approx(40)
    assert "verb" not in metrics
    lists = json.loads((tmp_path / "out" / "model" / "geneval2" / "score_lists.json").read_text())
    assert lists == [pytest.approx([0.625, 0.8, 1.0]), pytest.approx([0.1, 1.0]), pytest.approx([0.0, 0.4])]
    paths = json.loads((tmp_path / "out" / "model" / "geneval2" / "image_paths.json").read_text())
    assert list(paths) == [record["prompt"] for record in GENEVAL2]


def test_first_tokens_are_asked_for_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = settings_of(tmp_path, "geneval2", write_geneval2(tmp_path))

    def answer(question: Question) -> Answer:
        known = "above" not in text_of(question)
        return Answer(text="x", logprobs=({"Yes": 0.0},) if known else ())

    result, judge = judged(monkeypatch, settings, answer)
    assert len(judge.asked) == 7
    assert result.metrics["eval/geneval2/skipped"] == 1


def test_a_judge_without_logprobs_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = settings_of(tmp_path, "geneval2", write_geneval2(tmp_path))
    with pytest.raises(ValueError, match=r"answered none of 7 questions \(no_logprobs\)"):
        judged(monkeypatch, settings, lambda question: Answer(text="Yes", error="no_logprobs"))


def test_wise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = [1, 2, 401, 568, 701, 801, 901]
    settings = settings_of(tmp_path, "wise", write_wise(tmp_path, numbers))
    ratings = {"1": (2, 2, 2), "2": (0, 0, 0), "401": (1, 1, 1), "568": (2, 0, 0), "701": (0, 2, 0), "801": (0, 0, 2),
               "901": (0, 0, 0)}  # fmt: skip

    def answer(question: Question) -> Answer:
        assert question.system == "You rate images."
        number = text_of(question).partition('PROMPT: "prompt ')[2].partition('"')[0]
        assert f'EXPLANATION: "meaning {number}"' in text_of(question)
        one, two, three = ratings[number]
        return Answer(text=f"Consistency: {one}\nRealism: {two}\nAesthetic Quality: {three}")

    result, _ = judged(monkeypatch, settings, answer)
    metrics = {name.removeprefix("eval/wise/"): value for name, value in result.metrics.items()}
    assert metrics["culture"] == pytest.approx(0.5)
    wanted = 0.4 * 0.5 + 0.167 * 0.5 + 0.133 * 0.7 + 0.1 * 0.2 + 0.1 * 0.1 + 0.1 * 0
    assert metrics["wiscore"] == pytest.approx(wanted)
    assert metrics["consistency"] == pytest.approx(0.4 * 1 + 0.167 * 1 + 0.133 * 2)
    lines = (tmp_path / "out" / "model" / "wise" / "scores.jsonl").read_text().splitlines()
    assert json.loads(lines[0]) == {"prompt_id": 1, "Subcategory": "y", "consistency": 2.0, "realism": 2.0,
                                    "aesthetic_quality": 2.0}  # fmt: skip


def test_wise_verified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = [1, 2, 401, 521, 641, 761, 881]
    settings = settings_of(tmp_path, "wise_verified", write_wise(tmp_path, numbers, verified=True))
    right = ('"prompt 1"', '"prompt 401"', '"prompt 881"')
    result, judge = judged(
        monkeypatch, settings, lambda question: Answer(text=f"Score: {int(any(r in text_of(question) for r in right))}")
    )
    assert result.metrics["eval/wise_verified/wiscore"] == pytest.approx(0.4 * 0.5 + 0.12 + 0.12)
    assert judge.asked[0].max_tokens == 500


def test_tiif(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = settings_of(tmp_path, "tiif_short", write_tiif(tmp_path), options={"attempts": "1"})
    replies = {
        "red": "Yes, it is.\n2. no, a square\nNo: small", "tea": "yes\n\nno", "'no'": "No, nothing is written.",
    }  # fmt: skip

    def answer(question: Question) -> Answer:
        assert question.system == "You are a professional image critic."
        assert text_of(question).startswith("\nAnswer each line.\nIs ")
        (text,) = (reply for words, reply in replies.items() if words in text_of(question))
        return Answer(text=text)

    result, _ = judged(monkeypatch, settings, answer)
    metrics = {name.removeprefix("eval/tiif_short/"): value for name, value in result.metrics.items()}
    assert metrics["attribute"] == pytest.approx(2 / 3)  # of shape+color
    assert metrics["text_generation"] == pytest.approx(2 / 3)  # 1 of 2 and 1 of 1
    assert metrics["overall"] == pytest.approx(2 / 3)
    assert "overall is the mean of the other 2 of 9 groups" in as_text(result)
    assert "3 of 277 published prompts took part" in as_text(result)
    file = tmp_path / "out" / "model" / "tiif" / "eval_results" / "model" / "text" / "short" / "0.json"
    assert json.loads(file.read_text())["model_pred"] == ["yes", "no"]
    assert (tmp_path / "out" / "model" / "tiif" / "text" / "model" / "short_description" / "1.png").is_file()
    replies["tea"] = "yes"  # one answer to two questions
    again = settings_of(tmp_path, "tiif_short", tmp_path / "TIIF-Bench" / "data" / "testmini_prompts")
    assert judged(monkeypatch, again, answer)[0].metrics["eval/tiif_short/skipped"] == 1
    replies |= {"red": "No\nno\nno", "tea": "yes\nyes"}  # 1 of 3 questions of shape+color, 3 of 3 of text
    last = settings_of(tmp_path / "last", "tiif_short", tmp_path / "TIIF-Bench" / "data" / "testmini_prompts")
    metrics = dict(judged(monkeypatch, last, answer)[0].metrics)
    means = [metrics[f"eval/tiif_short/{group}"] for group in ("attribute", "text_generation")]
    assert means[0] != means[1]
    assert metrics["eval/tiif_short/overall"] == pytest.approx(sum(means) / 2)  # though attribute lacks three of four


@pytest.mark.parametrize(
    ("given", "known", "same"),
    [
        ("Qwen/Qwen3-VL-8B-Instruct", "Qwen3-VL-8B-Instruct", True),
        ("/models/qwen3-vl-8b-instruct/", "Qwen3-VL-8B-Instruct", True),
        ("gpt-4.1-2025-04-14", "gpt-4.1", True),
        ("openai/gpt-4.1", "gpt-4.1", True),
        ("gpt-4.1-mini", "gpt-4.1", False),
        ("gpt-4o", "gpt-4o-2024-05-13", False),
        ("Qwen3-VL-8B-Instruct-2", "Qwen3-VL-8B-Instruct", False),
    ],
)
def test_published_judges_are_known_by_their_names(given: str, known: str, same: bool) -> None:
    assert is_model(given, known) is same


def test_a_base_without_common_images_keeps_its_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = settings_of(tmp_path, "imgedit", write_imgedit(tmp_path), base=True, options={"attempts": "1"})

    def answer(question: Question) -> Answer:
        return Answer(text="A: 2\nB: 2\nC: 2" if levels(question)[-1] in (0, 110, 120) else "no")

    result, _ = judged(monkeypatch, settings, answer)
    assert result.differences == {}
    assert result.base_metrics["eval/imgedit/overall"] == 2
    assert len(result.base_rows) == 3
    assert "model and base have no image in common that has scores, so there is no difference." in result.notes


def test_a_judge_of_this_process_is_known_by_its_weights(tmp_path: Path) -> None:
    plan = judged_rules.plan_of(settings_of(tmp_path, "imgedit", write_imgedit(tmp_path)))
    assert plan.identity("a") == plan.identity("b")
    local = replace(plan, judge={"model": "a/folder"})
    assert local.identity("a") != local.identity("b")


def test_sources_that_are_there_are_compared(tmp_path: Path) -> None:
    made, kept = tmp_path / "made.png", tmp_path / "kept"
    flat(10).save(made)
    case = Case(key="k", prompt="p", task="t", asks=(), source=made)
    (first,) = judged_rules.with_sources([case], kept)
    assert first.source == kept / "k.png"
    for content in (made.read_bytes()[:20], b""):  # of a run that was cut off
        first.source.write_bytes(content)
        judged_rules.with_sources([case], kept)
        assert first.source.read_bytes() == made.read_bytes()
    flat(20).save(made)  # other data
    judged_rules.with_sources([case], kept)
    assert first.source.read_bytes() == made.read_bytes()
    before = first.source.stat().st_ino
    judged_rules.with_sources([case], kept)
    assert first.source.stat().st_ino == before
    assert [path.name for path in kept.iterdir()] == ["k.png"]


def test_images_that_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    for number, key in enumerate(("1082", "1068", "673")):
        flat(50 + number).save(folder / f"{key}.png")
    prompts = write_imgedit(tmp_path)
    settings = settings_of(tmp_path, "imgedit", prompts, images=folder)
    result, judge = judged(monkeypatch, settings, lambda question: Answer(text="A: 2\nB: 2\nC: 2"))
    assert [levels(question)[-1] for question in judge.asked] == [50, 51, 52]
    assert result.metrics["eval/imgedit/overall"] == 2
    (folder / "673.png").unlink()
    with pytest.raises(ValueError, match=r"lacks 1 of 3 images \(673.png\).*nothing was judged"):
        runner.check(settings)


def test_without_a_judge_images_are_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("datasets")
    settings = settings_of(tmp_path, "gedit_cn", write_gedit(tmp_path / "GEdit"), judge=None)
    result, judge = judged(monkeypatch, settings, lambda question: scores(1, 1))
    assert judge.asked == []
    assert "1 image in" in result.headline
    assert result.metrics == {}  # a count is no score that a leaderboard could rank
    write_result(result, tmp_path / "out", "gedit_cn", ["model"], {})
    with pytest.raises(ValueError, match="holds no numbers: the evaluation drew images and judged none"):
        find_entries([str(tmp_path / "out" / "result.json")])
    assert over_models([result, result], ["a", "b"]).metrics == {}
    assert (tmp_path / "out" / "model" / "fullset" / "subject-remove" / "cn" / "k3cn.png").is_file()


def test_own_words_take_the_place_of_published_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = tmp_path / "words"
    words.mkdir()
    (words / "wise.txt").write_text("Strict.\n=== user ===\n<image>Does it show {prompt}, so {explanation}?")
    prompts = write_wise(tmp_path, [1])
    options = {"template_dir": str(words)}
    settings = settings_of(tmp_path, "wise", prompts / "cultural_common_sense.json", options=options)
    ratings = Answer(text="Consistency: 1\nRealism: 1\nAesthetic Quality: 1")
    result, judge = judged(monkeypatch, settings, lambda question: ratings)
    assert text_of(judge.asked[0]) == "Does it show prompt 1, so meaning 1?"
    assert "The judge was asked in other words than the published ones (own words: wise)." in result.notes
    (words / "wise.txt").write_text("Does it show {prompt}?")
    with pytest.raises(ValueError, match=r"must hold \{explanation\}"):
        runner.check(settings)
    (words / "wise.txt").unlink()
    with pytest.raises(ValueError, match=r"published words, which are not shipped. Give `options` template_dir="):
        runner.check(settings)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompts": None}, "needs `prompts`: Benchmark/Basic/basic_edit.json"),
        ({"samples": 4}, "judges 1 image of each prompt, got `samples` 4"),
        ({"options": {"template_dir": "/nowhere"}}, "`options` template_dir: there is no folder /nowhere"),
        ({"options": {"attempts": "0"}}, "attempts and max_tokens must be at least 1"),
        ({"options": {"temperature": "11"}}, "temperature must be 0"),
        ({"options": {"images_folder": "x"}}, "images_dir"),
    ],
)
def test_what_is_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    prompts = write_imgedit(tmp_path)
    with pytest.raises(ValueError, match=message):
        runner.check(settings_of(tmp_path, "imgedit", prompts, **change))
    with pytest.raises(ValueError, match="has no source images apart"):
        runner.check(settings_of(tmp_path, "geneval2", write_geneval2(tmp_path), options={"images_dir": str(tmp_path)}))
