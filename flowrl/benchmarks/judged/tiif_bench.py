"""TIIF-Bench: prompts in a short and a long wording, and yes-no questions about their images, asked all at once.

Wei et al. 2025 (arXiv 2506.02161); repository A113N-W3I/TIIF-Bench, which states no licence: the user brings it. Two
sets (testmini, 277 prompts, which papers report, and test, 2538) of 39 attributes in nine groups. An attribute's number
is the share of all its questions that are answered as expected; a group's the mean over its attributes; the overall
number the mean over groups, of short and of long prompts apart: `tiif_short` and `tiif_long`.

The published script words its question in one of three ways at random, and asks at temperature 1; here it is the first
of the three. Its measure of rendered text by OCR (GNED) is not part of the overall number and not done here.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

from flowrl.benchmarks.judged.cases import FACTS, Ask, Case, CaseFile, Judgement, Protocol, Score, Values, Words
from flowrl.benchmarks.judged.published_words import IMAGE, constants, first_file
from flowrl.benchmarks.judged.score_replies import yes_no_lines
from flowrl.prompts.text_checks import check_text
from flowrl.runtime.files import read_json, read_json_lines

Length = Literal["short", "long"]
GROUPS: Mapping[str, list[str]] = read_json(Path(__file__).with_name("tiif_groups.json"))
"""The attributes of each group."""
GROUP_OF = {attribute: group for group, attributes in GROUPS.items() for attribute in attributes}
SIZES = {"testmini_prompts": 277, "test_prompts": 2538}
SYSTEM = "You are a professional image critic."
_ASKED, _ENDING = "answers", "_prompts.jsonl"


def read_tiif(given: str, _: Path | None, *, length: Length) -> CaseFile:
    """The cases of `data/testmini_prompts` or `data/test_prompts`, with the questions of the folder beside it. Raises
    ValueError: folders or files that are missing, or prompts and questions that do not belong together."""
    place = Path(given)
    beside = place.with_name(place.name.replace("_prompts", "_eval_prompts"))
    files = sorted(place.glob(f"*{_ENDING}")) if place.is_dir() else []
    if not files or beside == place or not beside.is_dir():
        raise ValueError(
            f"{place} must be data/testmini_prompts or data/test_prompts of A113N-W3I/TIIF-Bench, with "
            f"{beside.name if beside != place else '..._eval_prompts'} beside it."
        )
    cases: list[Case] = []
    for file in files:
        asked = beside / f"{file.name.removesuffix(_ENDING)}_eval{_ENDING}"
        prompts, questions = read_json_lines(file), read_json_lines(asked)
        if len(prompts) != len(questions):
            raise ValueError(f"{file} has {len(prompts)} prompts, and {asked} questions of {len(questions)}.")
        pairs = zip(prompts, questions, strict=True)
        cases += [_case(a, b, number, length, f"{file}, record {number}") for number, (a, b) in enumerate(pairs)]
    keys = Counter(case.key for case in cases)
    if twice := next((key for key, count in keys.items() if count > 1), None):
        raise ValueError(f"{place}: two files hold prompts of the type {twice.rpartition('/')[0]!r}: keep one of them.")
    return CaseFile(cases=tuple(cases), number=SIZES.get(place.name))


def _case(prompt: Mapping[str, Any], asked: Mapping[str, Any], number: int, length: Length, where: str) -> Case:
    attribute, text = prompt.get("type"), prompt.get(f"{length}_description")
    questions, answers = asked.get("yn_question_list"), asked.get("yn_answer_list")
    if attribute not in GROUP_OF or asked.get("type") != attribute or not isinstance(text, str):
        raise ValueError(
            f"{where}: type must be one of the 39 published attributes, here and in its questions, and "
            f"{length}_description a text; got {attribute!r}."
        )
    check_text(text, where)
    if not isinstance(questions, list) or not isinstance(answers, list) or not 0 < len(questions) == len(answers):
        raise ValueError(f"{where}: needs as many yn_answer_list as yn_question_list, one or more.")
    wanted = [str(answer).strip().lower() for answer in answers]
    if strange := [answer for answer in wanted if answer not in ("yes", "no")]:
        raise ValueError(f"{where}: answers are yes or no, got {strange[0]!r}.")
    fields = {"questions": "\n".join(str(question).strip() for question in questions)}
    ask = Ask(name=_ASKED, words="tiif", fields=fields)
    record = {"answers": wanted, "number": number, "length": length, "group": GROUP_OF[attribute]}
    return Case(key=f"{attribute}/{number}", prompt=text, task=attribute, asks=(ask,), record=record)


def weights_of(attributes: Collection[str]) -> dict[str, float]:
    """Weights of some attributes in the overall number: their groups weigh alike, and they within a group."""
    present = Counter(GROUP_OF[name] for name in attributes)
    return {name: 1 / (len(present) * present[GROUP_OF[name]]) for name in attributes}


def remarks(judgements: Sequence[Judgement]) -> list[str]:
    """Names the groups that no number includes, if there are any."""
    found = {one.case.record["group"] for one in judgements if one.values is not None}
    lacking = [group for group in GROUPS if group not in found]
    if not lacking:
        return []
    return [
        f"No image of {', '.join(lacking)} has scores: overall is the mean of the other {len(found)} of "
        f"{len(GROUPS)} groups, which no published number is."
    ]


def tiif_words(folders: Sequence[Path]) -> dict[str, Words]:
    """The first of the three published wordings, from the script that asks. Raises ValueError: it is absent."""
    file = first_file([*folders, *(folder.parent for folder in folders)], ("eval/eval_with_vlm.py", "eval_with_vlm.py"))
    if file is None:
        return {}
    text = constants(file).get("raw_prompt", "")
    if "##YNQuestions##" not in text:
        raise ValueError(f"{file}: lacks raw_prompt with ##YNQuestions##: give the published file.")
    return {"tiif": Words(system=SYSTEM, user=text.replace("##YNQuestions##", "{questions}") + IMAGE)}


def read_answers(_: str, text: str) -> dict[str, float] | None:
    """1 for yes and 0 for no of every line that begins with one of them, by the line's number."""
    found = yes_no_lines(text)
    return {str(place): float(answer == "yes") for place, answer in enumerate(found)} or None


def _right(case: Case, values: Values, *, group: str | None) -> list[float] | None:
    """1 for each question that is answered as expected."""
    if group is not None and case.record["group"] != group:
        return None
    said = values[_ASKED]
    return [float(said[str(k)] == (wanted == "yes")) for k, wanted in enumerate(case.record["answers"])]


def image_name(case: Case) -> str:
    """`<attribute>/model/<length>_description/<number>.png`: the model is called model."""
    return f"{case.task}/model/{case.record['length']}_description/{case.record['number']}.png"


def result_files(judgements: Sequence[Judgement], name: str) -> dict[str, str]:
    """A file for each image, as the published scripts that add up read them."""
    files = {}
    for one in judgements:
        if one.values is not None:
            said = ["yes" if value else "no" for value in one.values[_ASKED].values()]
            content = {
                "attribute": one.case.task,
                "gt_answers": one.case.record["answers"],
                "model_pred": said,
                "model_output": one.replies[_ASKED],
            }
            path = f"eval_results/{name}/{one.case.task}/{one.case.record['length']}/{one.case.record['number']}.json"
            files[path] = json.dumps(content, ensure_ascii=False, indent=2) + "\n"
    return files


def tiif(length: Length) -> Protocol:
    """The rules for the prompts of one wording."""
    return Protocol(
        **FACTS["tiif"], title=f"TIIF-Bench, {length} prompts", read=partial(read_tiif, length=length),
        words=tiif_words, read_reply=read_answers,
        scores=(
            Score(name="overall", low=0.0, high=1.0, of=partial(_right, group=None), tasks=False, shares=weights_of),
            *(Score(name=group, low=0.0, high=1.0, of=partial(_right, group=group), tasks=False, shares="tasks",
                    subset=True) for group in GROUPS),
        ),
        image_name=image_name, files=result_files, remarks=remarks,
        fits=lambda case, values: len(values[_ASKED]) == len(case.record["answers"]),
    )  # fmt: skip


TIIF_SHORT, TIIF_LONG = tiif("short"), tiif("long")
