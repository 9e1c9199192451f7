"""WISE: prompts that need knowledge of the world, each with an explanation that the judge goes by.

Niu et al. 2025 (arXiv 2503.07265); repository PKU-YuanGroup/WISE, which states no licence: the user brings prompts and
words. Two versions, told apart by name, whose numbers do not compare:

    wise            1000 prompts of `WISE_legacy/data`; consistency C, realism R and aesthetic quality A of 0 to 2 each,
                    WiScore = (0.7 C + 0.2 R + 0.1 A) / 2; judged by GPT-4o. What papers of 2025 report.
    wise_verified   1000 repaired prompts of `data_verified`; one verdict, 0 or 1; judged by Qwen3.5-35B-A3B.

The overall number weighs six categories, which are ranges of prompt ids, by their published weights.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from flowrl.benchmarks.judged.cases import FACTS, Ask, Case, CaseFile, Judgement, Protocol, Score, Values, Words
from flowrl.benchmarks.judged.published_words import first_file, messages
from flowrl.benchmarks.judged.score_replies import named_ratings, verdict
from flowrl.prompts.text_checks import check_text
from flowrl.runtime.files import parse_json, read_text

LEGACY_WEIGHTS = {"culture": 0.4, "time": 0.167, "space": 0.133, "biology": 0.1, "physics": 0.1, "chemistry": 0.1}
VERIFIED_WEIGHTS = {"culture": 0.4, "time": 0.12, "space": 0.12, "biology": 0.12, "physics": 0.12, "chemistry": 0.12}
LEGACY_LAST = {"culture": 400, "time": 567, "space": 700, "biology": 800, "physics": 900, "chemistry": 1000}
VERIFIED_LAST = {"culture": 400, "time": 520, "space": 640, "biology": 760, "physics": 880, "chemistry": 1000}
"""The last prompt id of each category."""
CATEGORIES = {"cultural knowledge": "culture", "time": "time", "space": "space", "biology": "biology",
              "physical knowledge": "physics", "chemistry": "chemistry", "ecology": "biology"}  # fmt: skip
"""What a record's own Category, in small letters, calls them; it agrees with the ids in both versions. The rewritten
prompts of the first have one of ecology."""

RATINGS = ("Consistency", "Realism", "Aesthetic Quality")
_FILES = ("cultural_common_sense", "spatio-temporal_reasoning", "natural_science")
_NEEDED = ("prompt_id", "Prompt", "Explanation", "Category", "Subcategory")
_OF_VERSION = {
    False: "wise is of WISE_legacy/data and wise_verified of data_verified: `benchmark` wise_verified takes the latter",
    True: "wise_verified is of data_verified and wise of WISE_legacy/data: `benchmark` wise takes the latter",
}


def wiscore(consistency: float, realism: float, aesthetic: float) -> float:
    """`(0.7 C + 0.2 R + 0.1 A) / 2`, in [0, 1], of ratings of 0 to 2."""
    return (0.7 * consistency + 0.2 * realism + 0.1 * aesthetic) / 2


def read_wise(given: str, _: Path | None, *, verified: bool) -> CaseFile:
    """The cases of a folder with the three published files, or of one file. Raises ValueError: nothing there, a record
    that is not one of WISE's, or the other version's files."""
    place = Path(given)
    last = VERIFIED_LAST if verified else LEGACY_LAST
    files = [place / name for name in _names(verified=verified)[verified:]] if place.is_dir() else [place]
    if lacking := [file.name for file in files if not file.is_file()]:
        folder = "data_verified" if verified else "WISE_legacy/data"
        raise ValueError(
            f"{place} lacks {', '.join(lacking)}: give the folder {folder} of PKU-YuanGroup/WISE, or a JSON file in "
            f"it; {_OF_VERSION[verified]}."
        )
    if place.is_file() and place.name in _names(verified=not verified):  # its 400 cultural ones have the same ids
        raise ValueError(f"{place}: is a file of the other version. {_OF_VERSION[verified]}.")
    found: dict[int, Case] = {}
    for file in files:
        records = parse_json(read_text(file), str(file))
        if not isinstance(records, list) or not records:
            raise ValueError(f"{file}: must be a JSON list of records with {', '.join(_NEEDED)}.")
        for number, record in enumerate(records):
            case = _case(record, f"{file}, record {number}", last, _OF_VERSION[verified])
            if int(case.key) in found:
                raise ValueError(f"{file}, record {number}: prompt_id {case.key} is there twice.")
            found[int(case.key)] = case
    return CaseFile(cases=tuple(found[key] for key in sorted(found)))


def _names(*, verified: bool) -> list[str]:
    """Names of the published files of a version."""
    return ["merge.json"] * verified + [f"{name}{'_verified' * verified}.json" for name in _FILES]


def _case(record: Any, where: str, last: Mapping[str, int], version: str) -> Case:
    if lacking := [key for key in _NEEDED if key not in record] if isinstance(record, dict) else ["all"]:
        raise ValueError(f"{where}: must be an object with {', '.join(_NEEDED)}; lacks {', '.join(lacking)}.")
    number, prompt, explanation, category = (record[key] for key in _NEEDED[:4])
    task = next((name for name, end in last.items() if type(number) is int and 1 <= number <= end), None)
    if task is None or not isinstance(prompt, str) or not isinstance(explanation, str):
        raise ValueError(f"{where}: needs prompt_id 1 to 1000, and texts in Prompt and Explanation, got {number!r}.")
    check_text(prompt, where)
    own = CATEGORIES.get(category.lower()) if isinstance(category, str) else None
    if own is None:
        raise ValueError(f"{where}: Category must be one of {', '.join(CATEGORIES)}, got {category!r}.")
    if own != task:
        raise ValueError(
            f"{where}: prompt_id {number} is of {task} and the Category {category!r}, so it is of the other version. "
            f"{version}."
        )
    fields = {"prompt": prompt, "explanation": explanation}
    ask = Ask(name="score", words="wise", fields=fields)
    return Case(key=str(number), prompt=prompt, task=task, asks=(ask,), record={"Subcategory": record["Subcategory"]})


def wise_words(folders: Sequence[Path], *, verified: bool) -> dict[str, Words]:
    """The published request, out of the script that makes it."""
    names = ("vllm_eval.py",) if verified else ("gpt_eval.py", "WISE_legacy/gpt_eval.py")
    file = first_file(folders, names)
    return {} if file is None else {"wise": messages(file, "build_evaluation_messages")}


def read_verdict(_: str, text: str) -> dict[str, float] | None:
    """0 or 1."""
    found = verdict(text)
    return None if found is None else {"score": found}


def _rating(case: Case, values: Values, *, name: str) -> float:
    return values["score"][name]


def result_files(judgements: Sequence[Judgement], _: str) -> dict[str, str]:
    """`scores.jsonl`, as the published scripts that add up read it; cases without scores are left out."""
    lines = [
        {
            "prompt_id": int(one.case.key),
            "Subcategory": one.case.record["Subcategory"],
            **{name.replace(" ", "_"): value for name, value in one.values["score"].items()},
        }
        for one in judgements
        if one.values is not None
    ]
    return {"scores.jsonl": "".join(json.dumps(line) + "\n" for line in lines)}


WISE = Protocol(
    **FACTS["wise"], read=partial(read_wise, verified=False), words=partial(wise_words, verified=False),
    read_reply=lambda name, text: named_ratings(text, RATINGS, 2),
    scores=(
        Score(name="wiscore", low=0.0, high=1.0, shares=LEGACY_WEIGHTS,
              of=lambda case, values: wiscore(*(values["score"][name.lower()] for name in RATINGS))),
        *(Score(name=name.lower().replace(" ", "_"), low=0.0, high=2.0, of=partial(_rating, name=name.lower()),
                tasks=False, shares=LEGACY_WEIGHTS) for name in RATINGS),
    ),
    files=result_files,
)  # fmt: skip

WISE_VERIFIED = Protocol(
    **FACTS["wise_verified"],
    read=partial(read_wise, verified=True),
    words=partial(wise_words, verified=True),
    read_reply=read_verdict,
    scores=(Score(name="wiscore", low=0.0, high=1.0, of=partial(_rating, name="score"), shares=VERIFIED_WEIGHTS),),
    files=result_files,
)
