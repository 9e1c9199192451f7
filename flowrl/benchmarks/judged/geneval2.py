"""GenEval 2: 800 compositional prompts and, for each atom, a question with an expected answer (Soft-TIFA).

Kamath et al. 2025 (arXiv 2512.16853); repository facebookresearch/GenEval2, CC BY-NC 4.0: the user brings
`geneval2_data.jsonl`. The judge is asked each question for one word, greedily; its score is the probability of the
expected answer at the first token. Of one image

    Soft-TIFA AM   the arithmetic mean of its scores      (atoms)
    Soft-TIFA GM   the geometric mean, 0 if any is 0      (prompts)

and both are averaged over prompts. Skills pool atoms; atomicities are means of GM over prompts of so many atoms.

The published script sums the probabilities of six spellings of a count and of four of yes from the whole vocabulary of
Qwen3-VL-8B-Instruct. A server gives its 20 likeliest tokens, and what is not among them counts as 0.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from flowrl.benchmarks.judged.cases import FACTS, Ask, Case, CaseFile, Judgement, Protocol, Score, Values, Words
from flowrl.prompts.text_checks import check_text
from flowrl.runtime.files import read_json_lines

NUMBERS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
SKILLS = ("object", "attribute", "count", "position", "verb")
ONE_WORD = "<image>{question} Answer in one word."
MASS = "mass"
"""Name of the value of a question: the probability of the expected answer."""


def expected_forms(question: str, answer: str) -> tuple[str, ...]:
    """What counts as the expected answer, without case and surrounding space: a count also as a digit, else yes."""
    if not question.startswith("How many"):
        return ("yes",)
    word = answer.strip().lower()
    return (word, str(NUMBERS.index(word) + 1)) if word in NUMBERS else (word,)


def gm(scores: Sequence[float]) -> float:
    """Soft-TIFA GM: `(prod_i s_i)^(1/n)`, 0 if any is 0."""
    return math.exp(fmean(math.log(score) for score in scores)) if min(scores) > 0 else 0.0


def read_geneval2(given: str, _: Path | None) -> CaseFile:
    """The cases of `geneval2_data.jsonl`. Raises ValueError: no such file, or a line whose four keys do not fit."""
    found: dict[str, Case] = {}
    for number, record in enumerate(read_json_lines(Path(given)), start=1):
        where = f"{given}, record {number}"
        fields: list[Any] = [record.get(key) for key in ("prompt", "atom_count", "vqa_list", "skills")]
        prompt, atoms, listed, skills = fields
        lists = isinstance(listed, list) and isinstance(skills, list) and 0 < len(listed) == len(skills)
        pairs = lists and all(isinstance(pair, list) and [*map(type, pair)] == [str, str] for pair in listed)
        if not (isinstance(prompt, str) and isinstance(atoms, int) and pairs):
            raise ValueError(
                f"{where}: must have prompt, atom_count, vqa_list (pairs of question and answer) and as many "
                f"skills: give geneval2_data.jsonl of facebookresearch/GenEval2."
            )
        check_text(prompt, where)
        if unknown := sorted(set(map(str, skills)) - set(SKILLS)):
            raise ValueError(f"{where}: the skill {unknown[0]!r} is not one of {', '.join(SKILLS)}.")
        if prompt in found:
            raise ValueError(f"{where}: the prompt {prompt!r} is there twice.")
        asks = tuple(
            Ask(name=str(k), words="geneval2", fields={"question": question}, forms=expected_forms(question, answer))
            for k, (question, answer) in enumerate(listed)
        )
        found[prompt] = Case(
            key=str(number), prompt=prompt, task=f"{atoms} atoms", asks=asks, record={"skills": skills}
        )
    return CaseFile(cases=tuple(found.values()))


def scores_of(case: Case, values: Values) -> list[float]:
    """The scores of a case's questions, in their order."""
    return [values[ask.name][MASS] for ask in case.asks]


def _of_skill(case: Case, values: Values, *, skill: str) -> list[float] | None:
    scores = zip(scores_of(case, values), case.record["skills"], strict=True)
    return [100 * score for score, of in scores if of == skill] or None


def result_files(judgements: Sequence[Judgement], _: str) -> dict[str, str]:
    """`image_paths.json` and `score_lists.json` of the published scripts; null for a case without scores."""
    # The script takes any path, by the prompt.
    paths = {one.case.prompt: f"{one.case.key}.png" for one in judgements}
    lists = [None if one.values is None else scores_of(one.case, one.values) for one in judgements]
    return {
        "image_paths.json": json.dumps(paths, indent=1, ensure_ascii=False) + "\n",
        "score_lists.json": json.dumps(lists) + "\n",
    }


GENEVAL2 = Protocol(
    **FACTS["geneval2"], read=read_geneval2, words=lambda folders: {"geneval2": Words(user=ONE_WORD)},
    read_reply=lambda name, text: None,  # no question is read as text
    scores=(
        Score(name="soft_tifa_gm", low=0.0, high=100.0, of=lambda case, values: 100 * gm(scores_of(case, values))),
        Score(name="soft_tifa_am", low=0.0, high=100.0, tasks=False,
              of=lambda case, values: 100 * fmean(scores_of(case, values))),
        *(Score(name=skill, low=0.0, high=100.0, of=partial(_of_skill, skill=skill), tasks=False, subset=True)
          for skill in SKILLS),
    ),
    files=result_files,
)  # fmt: skip
