"""Judged benchmarks: how replies are read, published data and words, and numbers worked out by hand."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path
from statistics import fmean

import pytest
from judged_files import IMGEDIT_WORDS, WISE_SCRIPT, write_gedit, write_geneval2, write_imgedit, write_tiif, write_wise

from flowrl.benchmarks.judged import gedit_bench, geneval2, imgedit_bench, tiif_bench, wise_bench
from flowrl.benchmarks.judged.cases import Case, Judgement
from flowrl.benchmarks.judged.score_replies import labelled_ratings, named_ratings, rating_list, verdict


@pytest.mark.parametrize(
    ("reply", "ratings"),
    [
        ('{"score" : [8, 6], "reasoning" : "fine"}', [8, 6]),
        ('```json\n{\n"score": [8,\n 6],\n"reasoning": "a {brace} within"}\n```', [8, 6]),
        ("[6, 0]", [6, 0]),
        ('<think>maybe {"score": [1, 1]}</think>{"score": [9, 7], "reasoning": ""}', [9, 7]),
        ("{score: [8, 6], reasoning: not JSON}", [8, 6]),
        ('{"score": [8], "reasoning": "one alone"}', None),
        ('{"score": [8, 11]}', None),
        ('{"score": [8, true]}', None),
        ('{"score": "8, 6"}', None),
        ("I would say 8 and 6.", None),
        ("", None),
    ],
)
def test_rating_lists(reply: str, ratings: list[float] | None) -> None:
    assert rating_list(reply, 2, 10) == ratings


@pytest.mark.parametrize(
    ("reply", "ratings"),
    [
        ("Brief reasoning: good: 3 of 4 done.\nPrompt Compliance: 4\nSeamlessness: 3\nDetail Fidelity: 5", [4, 3, 5]),
        ("**Prompt Compliance:** 4\n**Seamlessness**: 3/5\n- Detail: 5.", [4, 3, 5]),
        ("Prompt Compliance: 4\nSeamlessness: 3", None),
        ("A: 4\nB: 3\nC: 5\nD: 5", None),
        ("A: 4\nB: 0\nC: 5", None),
        ("A: 4\nB: 3\nC: 10", None),
    ],
)
def test_labelled_ratings(reply: str, ratings: list[float] | None) -> None:
    assert labelled_ratings(reply, 3, 1, 5) == ratings


@pytest.mark.parametrize(
    ("reply", "ratings"),
    [
        ("Consistency: 2\nRealism: 1\nAesthetic Quality: 0", [2, 1, 0]),
        ("**Consistency:** 2\n**Realism** 1\naesthetic quality\uff1a 2", [2, 1, 2]),
        ("Consistency (0-2): 2\nRealism: 1\nAesthetic Quality: 0", None),  # the scale is no rating
        ("Consistency: 2\nRealism: 3\nAesthetic Quality: 0", None),
        ("Consistency: 2\nRealism: 1", None),
        ("Consistency: 1.5\nRealism: 1\nAesthetic Quality: 0", None),
        ("Consistency: 10\nRealism: 1\nAesthetic Quality: 0", None),
        ("Consistency: 2.\nRealism: 1.\nAesthetic Quality: 0.", [2, 1, 0]),
    ],
)
def test_named_ratings(reply: str, ratings: list[float] | None) -> None:
    found = named_ratings(reply, wise_bench.RATINGS, 2)
    names = ("consistency", "realism", "aesthetic quality")
    assert found == (None if ratings is None else dict(zip(names, ratings, strict=True)))


@pytest.mark.parametrize(
    ("reply", "score"),
    [
        ("Score: 1", 1), ("**Score**: 0", 0), ("x\n 1 \n", 1), ("1\n0", None), ("Score: 10", None),
        ("Score: 0.5", None), ("Score: 1.", 1), ("Score: 1, since\nscore 0 is for wrong ones", 1),
    ],
)  # fmt: skip
def test_verdicts(reply: str, score: float | None) -> None:
    assert verdict(reply) == score


def test_viescore_by_hand() -> None:
    semantics = gedit_bench.read_scores("semantics", '{"score": [8, 6]}')
    quality = gedit_bench.read_scores("quality", '{"score": [9, 7]}')
    assert semantics is not None
    assert quality is not None
    assert (semantics["score"], quality["score"]) == (6, 7)
    assert gedit_bench.overall(6, 7) == pytest.approx(6.480741, abs=1e-6)


def test_imgedit_image_scores_are_rounded_as_published() -> None:
    # The replies of the published readme, which prints 3.333 for the first of them: its script gives 3.
    assert [imgedit_bench.image_score(r) for r in ([1, 4, 4], [1, 1, 1], [1, 5, 5])] == [3, 1, 3.67]


def test_imgedit_overall_is_the_mean_over_kinds() -> None:
    """Rows of the repository's leaderboard: nine kinds, and the overall number printed beside them."""
    rows = {
        (2.84, 1.58, 1.51, 1.97, 1.58, 1.75, 2.38, 1.62, 1.22): 1.83,
        (2.45, 1.83, 1.44, 2.01, 1.50, 1.44, 3.55, 1.20, 1.46): 1.88,
        (3.58, 3.39, 1.73, 3.15, 2.93, 3.08, 3.84, 2.04, 3.68): 3.05,
        (3.88, 3.14, 1.76, 3.40, 2.41, 3.16, 4.63, 2.64, 2.52): 3.06,
        (3.81, 3.59, 1.58, 3.85, 3.16, 3.39, 4.51, 2.67, 4.25): 3.42,
    }
    assert [round(fmean(kinds), 2) for kinds in rows] == list(rows.values())
    assert imgedit_bench.IMGEDIT.scores[0].shares == "tasks"


def test_wiscore_by_hand() -> None:
    assert wise_bench.wiscore(2, 2, 2) == pytest.approx(1)
    assert wise_bench.wiscore(1, 0, 0) == pytest.approx(0.35)
    assert wise_bench.wiscore(2, 1, 0) == pytest.approx(0.8)
    for weights, last in (
        (wise_bench.LEGACY_WEIGHTS, wise_bench.LEGACY_LAST), (wise_bench.VERIFIED_WEIGHTS, wise_bench.VERIFIED_LAST),
    ):  # fmt: skip
        assert math.fsum(weights.values()) == pytest.approx(1)
        ends = [0, *last.values()]
        shares = [(b - a) / 1000 for a, b in pairwise(ends)]
        assert list(weights.values()) == pytest.approx(shares)  # the published weights are the categories' sizes


def test_soft_tifa_by_hand() -> None:
    assert geneval2.gm([0.9, 0.4, 0.6]) == pytest.approx(0.6)  # 0.216 ** (1 / 3)
    assert geneval2.gm([0.9, 0.0]) == 0
    assert geneval2.expected_forms("How many cows are in the image?", "three") == ("three", "3")
    assert geneval2.expected_forms("How many cows are in the image?", "twelve") == ("twelve",)
    assert geneval2.expected_forms("Are the cows plastic?", "Yes") == ("yes",)


def test_gedit_is_read_by_language(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    folder = write_gedit(tmp_path / "GEdit")
    file = gedit_bench.GEDIT_EN.read(str(folder), None)
    assert [case.key for case in file.cases] == ["k1", "k2", "k3"]
    assert [case.task for case in file.cases] == ["color_alter", "color_alter", "subject-remove"]
    assert [case.record["intersection"] for case in file.cases] == [True, False, True]
    assert gedit_bench.image_name(file.cases[2]) == "fullset/subject-remove/en/k3.png"
    (chinese,) = gedit_bench.GEDIT_CN.read(str(folder), None).cases
    assert (chinese.prompt, gedit_bench.source_name(chinese)) == (
        "去掉圆", "fullset/subject-remove/cn/k3cn_SRCIMG.png",
    )  # fmt: skip


def test_gedit_refuses_other_data(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    strange = write_gedit(tmp_path / "strange", [("repaint", "k1", "make it red", "en", True)])
    with pytest.raises(ValueError, match=r"row 0: task_type must be one of background_change, .* got 'repaint'"):
        gedit_bench.GEDIT_EN.read(str(strange), None)
    with pytest.raises(ValueError, match=r"none of its 1 rows has the instruction_language 'cn'"):
        gedit_bench.GEDIT_CN.read(str(strange), None)


def test_shipped_words_of_gedit_are_those_of_a_copy(tmp_path: Path) -> None:
    shipped = gedit_bench.gedit_words([])
    texts = shipped["gedit_semantics"].user, shipped["gedit_quality"].user
    assert texts[0].endswith("Editing instruction: {instruction}\n<image><image>")
    assert texts[1].endswith("[naturalness, artifacts]\n<image>")
    (tmp_path / "vie_prompts.py").write_text(
        '_context_no_delimit = """context"""\n_prompts_0shot_two_image_edit_rule = "two"\n'
        '_prompts_0shot_tie_rule_SC = "rate <instruction>"\n_prompts_0shot_rule_PQ = "natural"\n'
    )
    copy = gedit_bench.gedit_words([tmp_path])
    assert copy["gedit_semantics"].user == "context\ntwo\nrate {instruction}<image><image>"
    assert copy["gedit_quality"].user == "context\nnatural<image>"
    (tmp_path / "vie_prompts.py").write_text("x = 1\n")
    with pytest.raises(ValueError, match=r"lacks _context_no_delimit, "):
        gedit_bench.gedit_words([tmp_path])


def test_imgedit_is_read_with_its_words(tmp_path: Path) -> None:
    path = write_imgedit(tmp_path)
    cases = imgedit_bench.IMGEDIT.read(str(path), None).cases
    assert [(case.key, case.task) for case in cases] == [("1082", "adjust"), ("1068", "adjust"), ("673", "style")]
    assert cases[0].source == path.parent / "singleturn" / "animal" / "a.png"
    words = imgedit_bench.imgedit_words([path.parent])
    assert words["imgedit_style"].user == IMGEDIT_WORDS["style"].replace("<edit_prompt>", "{instruction}") + (
        "<image><image>"
    )
    (path.parent / "singleturn" / "animal" / "b.png").unlink()
    with pytest.raises(ValueError, match=r"lacks 1 of 3 source images \(animal/b.png\).*images_dir"):
        imgedit_bench.IMGEDIT.read(str(path), None)


def test_wise_is_read_with_its_words(tmp_path: Path) -> None:
    place = write_wise(tmp_path, [1, 400, 401, 567, 568, 700, 701, 801, 1000])
    cases = wise_bench.WISE.read(str(place), None).cases
    assert [case.task for case in cases] == [
        "culture", "culture", "time", "time", "space", "space", "biology", "physics", "chemistry",
    ]  # fmt: skip
    words = wise_bench.WISE.words([place.parent])["wise"]
    assert words.system == "You rate images."
    assert words.user == ('Three ratings.\nPROMPT: "{prompt}"\nEXPLANATION: "{explanation}"\nBraces {} stay.<image>')
    verified = write_wise(tmp_path, [400, 521, 641], verified=True)
    assert [case.task for case in wise_bench.WISE_VERIFIED.read(str(verified), None).cases] == [
        "culture", "space", "biology",
    ]  # fmt: skip
    with pytest.raises(ValueError, match=r"lacks cultural_common_sense_verified.json, .*give the folder data_verified"):
        wise_bench.WISE_VERIFIED.read(str(place), None)
    (place.parent / "gpt_eval.py").write_text(WISE_SCRIPT.replace("prompt_data['Prompt']", "str(prompt_data)"))
    with pytest.raises(ValueError, match="put together in a way not known"):
        wise_bench.WISE.words([place.parent])


def test_geneval2_is_read(tmp_path: Path) -> None:
    path = write_geneval2(tmp_path)
    cases = geneval2.GENEVAL2.read(str(path), None).cases
    assert [case.task for case in cases] == ["3 atoms", "3 atoms", "5 atoms"]
    assert [ask.forms for ask in cases[2].asks] == [("four", "4"), ("yes",)]
    record = json.loads(path.read_text().splitlines()[0])
    path.write_text(json.dumps({**record, "skills": ["count"]}) + "\n")
    with pytest.raises(ValueError, match="record 1: must have prompt, atom_count, vqa_list"):
        geneval2.GENEVAL2.read(str(path), None)
    path.write_text(json.dumps({**record, "skills": ["count", "smell", "object"]}) + "\n")
    with pytest.raises(ValueError, match="the skill 'smell' is not one of object, attribute"):
        geneval2.GENEVAL2.read(str(path), None)


def test_what_later_ratings_exceed_is_said() -> None:
    def judged(*ratings: float) -> Judgement:
        values = {"edit": dict(zip(("first", "second", "third"), ratings, strict=True))}
        return Judgement(case=Case(key="1", prompt="p", task="add", asks=()), replies={}, values=values)

    assert imgedit_bench.remarks([judged(4, 3, 4), judged(5, 5, 5)]) == []
    (said,) = imgedit_bench.remarks([judged(1, 4, 4), judged(4, 4, 4)])
    assert said.startswith("In 1 of 2 images the second or third rating exceeds the first")


def test_tiif_is_read_by_length(tmp_path: Path) -> None:
    whole = tiif_bench.weights_of(tiif_bench.GROUP_OF)
    assert len(whole) == 39
    assert math.fsum(whole.values()) == pytest.approx(1)
    some = tiif_bench.weights_of({"shape+color", "shape+texture", "text"})
    assert some == {"shape+color": 0.25, "shape+texture": 0.25, "text": 0.5}
    place = write_tiif(tmp_path)
    file = tiif_bench.TIIF_SHORT.read(str(place), None)
    assert ([case.key for case in file.cases], file.number) == (["shape+color/0", "text/0", "text/1"], 277)
    assert [case.prompt for case in tiif_bench.TIIF_LONG.read(str(place), None).cases] == ["long 0", "long 0", "long 1"]
    words = tiif_bench.tiif_words([place.parent])["tiif"]
    assert words.user == "\nAnswer each line.\n{questions}\nBegin with yes or no.\n<image>"
    with pytest.raises(ValueError, match="must be data/testmini_prompts or data/test_prompts"):
        tiif_bench.TIIF_SHORT.read(str(place.parent), None)
    asked = place.with_name("testmini_eval_prompts") / "text_eval_prompts.jsonl"
    asked.write_text(asked.read_text().splitlines()[0] + "\n")
    with pytest.raises(ValueError, match=r"has 2 prompts, and .* questions of 1"):
        tiif_bench.TIIF_SHORT.read(str(place), None)
