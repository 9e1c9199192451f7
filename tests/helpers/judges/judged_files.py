"""Small copies of the judged benchmarks in their published layouts, with words of our own, and what a judge answers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from drawn_images import flat

from flowrl.benchmarks.judged.wise_bench import CATEGORIES, LEGACY_LAST, VERIFIED_LAST

GEDIT_ROWS: Sequence[tuple[str, str, str, str, bool]] = [
    ("color_alter", "k1", "make the circle red", "en", True),
    ("color_alter", "k2", "make the square blue", "en", False),
    ("subject-remove", "k3", "remove the circle", "en", True),
    ("subject-remove", "k3cn", "去掉圆", "cn", True),
]
"""task_type, key, instruction, instruction_language, Intersection_exist."""

IMGEDIT = {
    "1082": {"id": "animal/a.png", "prompt": "make the circle red", "edit_type": "adjust"},
    "1068": {"id": "animal/b.png", "prompt": "make the square green", "edit_type": "adjust"},
    "673": {"id": "style/c.png", "prompt": "remove the circle", "edit_type": "style"},
}
IMGEDIT_WORDS = {
    kind: f"Rate this {kind} edit.\nNOTE {{json}} stays.\nediting instruction is : <edit_prompt>.\n\nThe images:\n"
    for kind in ("adjust", "style")
}

GENEVAL2 = [
    {"prompt": "two red circles", "atom_count": 3,
     "vqa_list": [["How many circles are in the image?", "two"], ["Are the circles red?", "Yes"],
                  ["Are there any circles in the image?", "Yes"]],
     "skills": ["count", "attribute", "object"]},
    {"prompt": "a square and a circle", "atom_count": 3,
     "vqa_list": [["Are there any squares in the image?", "Yes"], ["Are there any circles in the image?", "Yes"]],
     "skills": ["object", "object"]},
    {"prompt": "four blue squares above a circle", "atom_count": 5,
     "vqa_list": [["How many squares are in the image?", "four"], ["Are the squares above the circle?", "Yes"]],
     "skills": ["count", "position"]},
]  # fmt: skip

WISE_SCRIPT = '''
import os


def build_evaluation_messages(prompt_data, image_base64):
    return [
        {"role": "system", "content": [{"type": "text", "text": "You rate images."}]},
        {"role": "user", "content": [
            {"type": "text", "text": f"""Three ratings.
PROMPT: "{prompt_data['Prompt']}"
EXPLANATION: "{prompt_data['Explanation']}"
Braces {{}} stay."""},
            {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{image_base64}"}},
        ]},
    ]
'''


def write_gedit(folder: Path, rows: Sequence[tuple[str, str, str, str, bool]] = GEDIT_ROWS, size: int = 24) -> Path:
    """A dataset folder with one parquet file, images within it; the level of row r's source is 10 + r."""
    import datasets  # type: ignore[import-untyped]

    folder.mkdir(parents=True, exist_ok=True)
    columns: dict[str, Any] = dict(zip(
        ("task_type", "key", "instruction", "instruction_language", "Intersection_exist"),
        (list(column) for column in zip(*rows, strict=True)), strict=True,
    ))  # fmt: skip
    images = [flat(10 + row, size) for row in range(len(rows))]
    table = datasets.Dataset.from_dict({**columns, "input_image": images, "input_image_raw": images})
    table = table.cast_column("input_image", datasets.Image()).cast_column("input_image_raw", datasets.Image())
    table.to_parquet(str(folder / "train-00000-of-00001.parquet"))
    return folder


def write_imgedit(folder: Path, size: int = 24) -> Path:
    """`Benchmark/Basic` with its two JSON files and source images in a folder beside them; returns the list."""
    basic = folder / "Benchmark" / "Basic"
    for row, record in enumerate(IMGEDIT.values()):
        place = basic / "singleturn" / record["id"]
        place.parent.mkdir(parents=True, exist_ok=True)
        flat(10 + row, size).save(place)
    (basic / "prompts.json").write_text(json.dumps(IMGEDIT_WORDS))
    (basic / "basic_edit.json").write_text(json.dumps(IMGEDIT))
    return basic / "basic_edit.json"


def write_geneval2(folder: Path) -> Path:
    """`geneval2_data.jsonl`."""
    path = folder / "geneval2_data.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in GENEVAL2))
    return path


def write_wise(folder: Path, numbers: Sequence[int], *, verified: bool = False) -> Path:
    """The three JSON files of prompts, with the script that holds the words; returns their folder."""
    root = folder / "WISE" if verified else folder / "WISE" / "WISE_legacy"
    place = root / ("data_verified" if verified else "data")
    place.mkdir(parents=True)
    (root / ("vllm_eval.py" if verified else "gpt_eval.py")).write_text(WISE_SCRIPT)
    limits = {"cultural_common_sense": (1, 400), "spatio-temporal_reasoning": (401, 640 if verified else 700),
              "natural_science": (641 if verified else 701, 1000)}  # fmt: skip
    last = VERIFIED_LAST if verified else LEGACY_LAST
    called = {task: category for category, task in reversed(CATEGORIES.items())}
    for name, (low, high) in limits.items():
        records = [
            {"prompt_id": n, "Prompt": f"prompt {n}", "Explanation": f"meaning {n}",
             "Category": called[next(task for task, end in last.items() if n <= end)], "Subcategory": "y"}
            for n in numbers if low <= n <= high
        ]  # fmt: skip
        (place / f"{name}{'_verified' if verified else ''}.json").write_text(json.dumps(records))
    return place


TIIF = {
    "text": [(["Is 'tea' there?", "Is 'eat' there?"], ["Yes", "yes"]), (["Is 'no' there?"], ["no"])],
    "shape+color": [(["Is it red?", "Is it round?", "Is it big?"], ["yes", "yes", "no"])],
}
"""Questions and expected answers of each prompt of some attributes."""
TIIF_SCRIPT = """
raw_prompt = '''
Answer each line.
##YNQuestions##
Begin with yes or no.
'''
raw_prompt_1 = "another"
"""


def write_tiif(folder: Path) -> Path:
    """`data/testmini_prompts` with the questions beside it and the script that holds the words."""
    place, beside = (folder / "TIIF-Bench" / "data" / f"testmini_{name}prompts" for name in ("", "eval_"))
    for made in (place, beside, folder / "TIIF-Bench" / "eval"):
        made.mkdir(parents=True)
    (folder / "TIIF-Bench" / "eval" / "eval_with_vlm.py").write_text(TIIF_SCRIPT)
    for attribute, rows in TIIF.items():
        prompts = [{"type": attribute, "short_description": f"{attribute} {k}", "long_description": f"long {k}"}
                   for k in range(len(rows))]  # fmt: skip
        asked = [{"type": attribute, "yn_question_list": q, "yn_answer_list": a} for q, a in rows]
        (place / f"{attribute}_prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))
        (beside / f"{attribute}_eval_prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in asked))
    return place
