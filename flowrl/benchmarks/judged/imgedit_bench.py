"""ImgEdit-Bench, the basic suite: 737 edits of 9 kinds, three ratings of 1 to 5 each.

Ye et al. 2025 (arXiv 2505.20275); repository PKU-YuanGroup/ImgEdit, which states no licence: the user brings
`Benchmark/Basic/basic_edit.json` with `prompts.json` beside it, and the source images of `Benchmark.tar`. Of one image
the score is the mean of its three ratings, rounded to two digits as the published script does; a kind's is the mean
over its images; the overall number is the mean over kinds ("averaging all scores across tasks": nine of the twelve
rows of the repository's leaderboard are that, the others 0.02 to 0.04 less).

The words forbid the second and third rating to exceed the first. No published script enforces it, nor does this one;
in how many images the judge broke it is said in a note.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from flowrl.benchmarks.judged.cases import FACTS, Ask, Case, CaseFile, Judgement, Protocol, Score, Words
from flowrl.benchmarks.judged.published_words import IMAGE, first_file
from flowrl.benchmarks.judged.score_replies import labelled_ratings
from flowrl.prompts.text_checks import check_text
from flowrl.runtime.files import parse_json, read_json, read_text

KINDS = ("add", "adjust", "extract", "replace", "remove", "background", "style", "compose", "action")
_EDIT = "edit"
_RATINGS = ("first", "second", "third")


def read_imgedit(given: str, images_dir: Path | None) -> CaseFile:
    """The cases of `basic_edit.json`. Raises ValueError: no such file, a wrong record, or missing source images."""
    path = Path(given)
    records = read_json(path)
    first = next(iter(records.values()), None)
    name = first.get("id") if isinstance(first, dict) else None
    nearby = [path.parent, *sorted(place for place in path.parent.iterdir() if place.is_dir())]
    has_first = (place for place in nearby if isinstance(name, str) and name and (place / name).is_file())
    root = images_dir or next(has_first, path.parent)
    cases, missing = list[Case](), list[str]()
    for key, record in records.items():
        where = f"{path}, key {key!r}"
        if not isinstance(record, dict) or not all(isinstance(record.get(name), str) for name in ("id", "prompt")):
            raise ValueError(f"{where}: must be an object with id, prompt and edit_type, as basic_edit.json has.")
        kind, prompt, image = record.get("edit_type"), record["prompt"], record["id"]
        if kind not in KINDS:
            raise ValueError(f"{where}: edit_type must be one of {', '.join(KINDS)}, got {kind!r}.")
        check_text(prompt, where)
        asks = (Ask(name=_EDIT, words=f"imgedit_{kind}", fields={"instruction": prompt}, source=True),)
        cases.append(Case(key=key, prompt=prompt, task=kind, asks=asks, source=root / image, record={"id": image}))
        missing += [] if (root / image).is_file() else [image]
    if missing or not cases:
        raise ValueError(
            f"{root} lacks {len(missing)} of {len(cases)} source images ({', '.join(missing[:3])}): unpack "
            f"Benchmark.tar of sysuyy/ImgEdit, and give `options` images_dir=FOLDER, the one with animal/, style/ and "
            f"the like."
        )
    return CaseFile(cases=tuple(cases))


def imgedit_words(folders: Sequence[Path]) -> dict[str, Words]:
    """The published rubrics by kind, of `prompts.json`. Raises ValueError: no object of texts with `<edit_prompt>`."""
    file = first_file(folders, ("prompts.json", "Benchmark/Basic/prompts.json"))
    if file is None:
        return {}
    found = parse_json(read_text(file), str(file))
    if not isinstance(found, dict) or not all(isinstance(t, str) and "<edit_prompt>" in t for t in found.values()):
        raise ValueError(f"{file}: must be an object {{edit_type: text with <edit_prompt>}}, the published file.")
    return {
        f"imgedit_{kind}": Words(user=text.replace("<edit_prompt>", "{instruction}") + 2 * IMAGE)
        for kind, text in found.items()
    }


def read_ratings(_: str, text: str) -> dict[str, float] | None:
    """The three ratings of 1 to 5."""
    ratings = labelled_ratings(text, 3, 1, 5)
    return None if ratings is None else dict(zip(_RATINGS, ratings, strict=True))


def image_score(ratings: Sequence[float]) -> float:
    """The mean of the ratings, rounded to two digits."""
    return round(fmean(ratings), 2)


def remarks(judgements: Sequence[Judgement]) -> list[str]:
    """Says in how many images a later rating exceeds the first, if in any."""
    read = [[one.values[_EDIT][name] for name in _RATINGS] for one in judgements if one.values is not None]
    broken = sum(max(later) > first for first, *later in read)
    if not broken:
        return []
    return [
        f"In {broken} of {len(read)} images the second or third rating exceeds the first, which the words forbid; "
        f"they are taken as they are, as the published scripts do."
    ]


def result_files(judgements: Sequence[Judgement], _: str) -> dict[str, str]:
    """`result.json`, the judge's replies by key, as the published scripts that add up read it; unread ones left out."""
    replies = {one.case.key: one.replies[_EDIT] for one in judgements if one.values is not None}
    return {"result.json": json.dumps(replies, indent=4) + "\n"}


IMGEDIT = Protocol(
    **FACTS["imgedit"], read=read_imgedit, words=imgedit_words, read_reply=read_ratings,
    scores=(
        Score(name="overall", low=1.0, high=5.0, shares="tasks",
              of=lambda case, values: image_score([values[_EDIT][name] for name in _RATINGS])),
    ),
    files=result_files, remarks=remarks,
)  # fmt: skip
