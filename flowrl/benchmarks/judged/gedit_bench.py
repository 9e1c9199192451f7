"""GEdit-Bench: 606 edits of 11 kinds with instructions in English and in Chinese, rated as VIEScore does.

Liu et al. 2025, Step1X-Edit (arXiv 2504.17761); data `stepfun-ai/GEdit-Bench`, whose licence is not known: the user
brings them. VIEScore: Ku et al. 2023 (arXiv 2312.14867). Of one image

    semantics  SC = min(success of the edit, no overediting)       both images are seen        0 to 10
    quality    PQ = min(naturalness, freedom from artifacts)       the result alone is seen    0 to 10
    overall    O = sqrt(SC PQ)

and each is averaged over the images of a kind, then over kinds; `intersection` is the same over the images that all
models of the paper would edit. The judge sees the result at its source's size.

The published script guesses a random number where it cannot read a reply twice; here the image has no score, and is
counted. Its judge is GPT-4.1 (or Qwen2.5-VL-72B-Instruct-AWQ), asked at the server's own temperature.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Literal

from flowrl.benchmarks.judged.cases import FACTS, Ask, Case, CaseFile, Judgement, Protocol, Score, Values, Words
from flowrl.benchmarks.judged.published_words import IMAGE, constants, first_file
from flowrl.benchmarks.judged.score_replies import rating_list
from flowrl.prompts.datasets import PREFIX, is_dataset, read_edits
from flowrl.prompts.text_checks import check_text

Language = Literal["en", "cn"]
KINDS = (
    "background_change", "color_alter", "material_alter", "motion_change", "ps_human", "style_change", "subject-add",
    "subject-remove", "subject-replace", "text_change", "tone_transfer",
)  # fmt: skip
COLUMNS = ("task_type", "key", "instruction", "instruction_language", "Intersection_exist")
SEMANTICS, QUALITY = "semantics", "quality"
_CONSTANTS = {
    "gedit_semantics": ("_context_no_delimit", "_prompts_0shot_two_image_edit_rule", "_prompts_0shot_tie_rule_SC"),
    "gedit_quality": ("_context_no_delimit", "_prompts_0shot_rule_PQ"),
}
_IMAGES = {"gedit_semantics": 2 * IMAGE, "gedit_quality": IMAGE}


def read_gedit(given: str, _: Path | None, *, language: Language) -> CaseFile:
    """The cases of one language of the dataset: a folder with its parquet files, or dataset:stepfun-ai/GEdit-Bench.
    Raises ValueError: no such dataset, columns that are missing, or a row of another kind."""
    rows = read_edits(given if is_dataset(given) else f"{PREFIX}{given}", "input_image", COLUMNS)
    found: dict[str, Case] = {}
    for number, row in enumerate(rows):
        if row.get("instruction_language") != language:
            continue
        where = f"{given}, row {number}"
        kind, key, instruction = (row.get(name) for name in COLUMNS[:3])
        if kind not in KINDS:
            raise ValueError(f"{where}: task_type must be one of {', '.join(KINDS)}, got {kind!r}.")
        if not (isinstance(key, str) and key and isinstance(instruction, str) and instruction.strip()):
            raise ValueError(f"{where}: key and instruction must be texts that are not empty.")
        check_text(instruction, where)
        if key in found:
            raise ValueError(f"{where}: the key {key!r} is there twice.")
        asks = (
            Ask(name=SEMANTICS, words="gedit_semantics", fields={"instruction": instruction}, source=True),
            Ask(name=QUALITY, words="gedit_quality", fields={}),
        )
        record = {"language": language, "intersection": bool(row.get("Intersection_exist"))}
        found[key] = Case(key=key, prompt=instruction, task=kind, asks=asks, source=Path(row["source"]), record=record)
    if not found:
        raise ValueError(f"{given}: none of its {len(rows)} rows has the instruction_language {language!r}.")
    ordered = sorted(found.values(), key=lambda case: KINDS.index(case.task))
    return CaseFile(cases=tuple(ordered), keep_sources=True)


def gedit_words(folders: Sequence[Path]) -> dict[str, Words]:
    """The words of the user's copy of `vie_prompts.py`, else those shipped. Raises ValueError: it lacks one."""
    file = first_file(folders, ("vie_prompts.py", "viescore/vie_prompts.py", "GEdit-Bench/viescore/vie_prompts.py"))
    if file is None:
        place = resources.files("flowrl.benchmarks.judged") / "words"
        texts = {name: (place / f"{name}.txt").read_text(encoding="utf-8") for name in _CONSTANTS}
    else:
        known = constants(file)
        if lacking := sorted({part for parts in _CONSTANTS.values() for part in parts} - known.keys()):
            raise ValueError(f"{file}: lacks {', '.join(lacking)}: give the file of stepfun-ai/Step1X-Edit.")
        texts = {name: "\n".join(known[part] for part in parts) for name, parts in _CONSTANTS.items()}
    return {
        name: Words(user=text.replace("<instruction>", "{instruction}") + _IMAGES[name]) for name, text in texts.items()
    }


def read_scores(_: str, text: str) -> dict[str, float] | None:
    """The two ratings of 0 to 10 and their minimum, `score`."""
    ratings = rating_list(text, 2, 10)
    return None if ratings is None else {"first": ratings[0], "second": ratings[1], "score": min(ratings)}


def overall(semantics: float, quality: float) -> float:
    """`sqrt(SC PQ)`."""
    return math.sqrt(semantics * quality)


def _value(case: Case, values: Values, *, name: str, intersection: bool) -> float | None:
    if intersection and not case.record["intersection"]:
        return None
    semantics, quality = values[SEMANTICS]["score"], values[QUALITY]["score"]
    return {SEMANTICS: semantics, QUALITY: quality}.get(name, overall(semantics, quality))


def image_name(case: Case) -> str:
    """`fullset/<kind>/<language>/<key>.png`."""
    return f"fullset/{case.task}/{case.record['language']}/{case.key}.png"


def source_name(case: Case) -> str:
    """The same with `_SRCIMG`."""
    return f"fullset/{case.task}/{case.record['language']}/{case.key}_SRCIMG.png"


def result_files(judgements: Sequence[Judgement], name: str) -> dict[str, str]:
    """A CSV of each kind, where and as `calculate_statistics.py --model_name NAME --backbone gpt4o` reads them."""
    files = {}
    for kind in KINDS:
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(("source_image", "edited_image", "instruction", "sementics_score", "quality_score",
                         "intersection_exist", "instruction_language"))  # fmt: skip
        for one in judgements:
            if one.case.task == kind and one.values is not None:
                writer.writerow((
                    source_name(one.case), image_name(one.case), one.case.prompt, one.values[SEMANTICS]["score"],
                    one.values[QUALITY]["score"], one.case.record["intersection"], one.case.record["language"],
                ))  # fmt: skip
        files[f"gpt4o/eval_results_new/{name}_{kind}_gpt_score.csv"] = text.getvalue()
    return files


def gedit(language: Language) -> Protocol:
    """The rules for the instructions of one language."""
    scores = tuple(
        Score(name=f"{name}_intersection" if shared else name, low=0.0, high=10.0, shares="tasks", subset=shared,
              of=partial(_value, name=name, intersection=shared), tasks=name == "overall" and not shared)
        for shared in (False, True) for name in ("overall", SEMANTICS, QUALITY)
    )  # fmt: skip
    return Protocol(
        **FACTS["gedit"], title=f"GEdit-Bench-{language.upper()}", read=partial(read_gedit, language=language),
        words=gedit_words, read_reply=read_scores, scores=scores, image_name=image_name, source_name=source_name,
        files=result_files,
    )  # fmt: skip


GEDIT_EN, GEDIT_CN = gedit("en"), gedit("cn")
