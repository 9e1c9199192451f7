"""The published scripts that add up judged benchmarks, on the files that `flowrl eval` writes: do they agree?

    python tests/trials/judged_scripts.py --repositories DIR --out docs/research/trials/judged_scripts.json

DIR holds checkouts named WISE, GenEval2, ImgEdit, Step1X-Edit and TIIF-Bench (any part of its `eval-results`). Prompts
and words are the published ones (of GEdit the words alone: its rows are made up in its layout), images are flat, and
the judge answers at random, by what it is asked. The scripts run as they are; `megfile`, which one of them opens files
with, is stood in for.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

HELPERS = Path(__file__).parents[1] / "helpers"
sys.path[:0] = [str(HELPERS), str(HELPERS / "families"), str(HELPERS / "judges"), str(Path(__file__).parent)]

from drawn_images import flat, settings_for  # noqa: E402
from judged_files import write_gedit  # noqa: E402
from origin import origin  # noqa: E402
from scripted_judges import ScriptedJudge  # noqa: E402

from flowrl.benchmarks.judged.gedit_bench import KINDS  # noqa: E402
from flowrl.benchmarks.judged.score_replies import yes_no_lines  # noqa: E402
from flowrl.evaluation import runner  # noqa: E402
from flowrl.evaluation.judged import judged_rules  # noqa: E402
from flowrl.generation.folders import ImageFile  # noqa: E402
from flowrl.rewards.judges.chat import Answer, Question  # noqa: E402
from flowrl.runtime.files import write_atomically  # noqa: E402

MEGFILE = "def smart_open(path, *mode, **more):\n    return open(path, *mode, **more)\n"


def dice(question: Question) -> random.Random:
    """Random numbers that follow from what is asked."""
    words = "".join(part for part in question.parts if isinstance(part, str))
    return random.Random(f"{words}{sum(isinstance(part, np.ndarray) for part in question.parts)}")


def ratings(question: Question) -> Answer:
    """What GEdit's judge answers."""
    drawn = dice(question)
    return Answer(text=json.dumps({"score": [drawn.randint(0, 10), drawn.randint(0, 10)], "reasoning": "so"}))


def lines(question: Question) -> Answer:
    """What ImgEdit's judge answers."""
    drawn = dice(question)
    names = ("Prompt Compliance", "Visual Seamlessness", "Physical & Detail Fidelity")
    return Answer(text="Brief reasoning: so.\n" + "\n".join(f"{name}: {drawn.randint(1, 5)}" for name in names))


def three(question: Question) -> Answer:
    """What WISE's judge answers."""
    drawn = dice(question)
    names = ("Consistency", "Realism", "Aesthetic Quality")
    return Answer(text="\n".join(f"{name}: {drawn.randint(0, 2)}" for name in names))


def binary(question: Question) -> Answer:
    """What the judge of WISE_Verified answers."""
    return Answer(text=f"Score: {dice(question).randint(0, 1)}")


def tokens(question: Question) -> Answer:
    """What GenEval 2's judge answers."""
    likely = 0.05 + 0.8 * dice(question).random()
    found = {"Yes": likely, "two": 0.5 * likely, "3": 0.4 * likely, "one": 0.3 * likely, "No": 0.01}
    return Answer(text="Yes", logprobs=({word: math.log(p) for word, p in found.items()},))


def evaluated(benchmark: str, prompts: Path, answer: Callable[[Question], Answer], out: Path) -> dict[str, float]:
    """The metrics of a benchmark whose images are all one flat file."""
    one = out / "one.png"
    flat(7).save(one)
    vars(runner)["images_of"] = lambda settings, subject, listed, suffix: [
        ImageFile(file=f"{k:05d}.png", path=one, prompt=prompt.text, index=k) for k, prompt in enumerate(listed)
    ]
    vars(judged_rules)["build_chat"] = lambda *given, **more: ScriptedJudge(answer)
    settings = settings_for(out / benchmark, benchmark, judge="{server: http://127.0.0.1:1/v1, model: random}",
                            prompts=str(prompts), samples=1)  # fmt: skip
    result = runner.run(settings)
    return {name.split("/")[-1]: value for name, value in result.metrics.items()}


def script(path: Path, *arguments: object) -> str:
    """What a published script prints."""
    command = [sys.executable, str(path), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def wise(root: Path, out: Path, *, verified: bool) -> dict[str, tuple[float, float]]:
    """Ours and theirs by name; the script prints two digits."""
    name = "wise_verified" if verified else "wise"
    place = root / "WISE" / ("data_verified" if verified else "WISE_legacy/data")
    ours = evaluated(name, place, binary if verified else three, out)
    adds = root / "WISE" / ("calculate_verified.py" if verified else "WISE_legacy/Calculate.py")
    said = script(adds, out / name / "model" / "wise" / "scores.jsonl", "--category", "all")
    theirs = [float(number) for number in said.strip().splitlines()[-1].split()]
    names = ("culture", "time", "space", "biology", "physics", "chemistry", "wiscore")
    return {key: (ours[key], number) for key, number in zip(names, theirs, strict=True)}


def geneval2(root: Path, out: Path) -> dict[str, tuple[float, float]]:
    """Ours and theirs by name; the script prints two digits."""
    data = root / "GenEval2" / "geneval2_data.jsonl"
    ours = evaluated("geneval2", data, tokens, out)
    scores = out / "geneval2" / "model" / "geneval2" / "score_lists.json"
    said = script(root / "GenEval2" / "soft_tifa_analysis.py", "--benchmark_data", data, "--score_data", scores)
    found = dict(re.findall(r"^(?:Results for Atomicity=)?(\w+):?\n([\d.]+)$", said, flags=re.MULTILINE))
    named = {f"{key}_atoms" if key.isdecimal() else key.lower(): float(number) for key, number in found.items()}
    return {key: (ours[key], number) for key, number in named.items()}


def imgedit(root: Path, out: Path) -> dict[str, tuple[float, float]]:
    """Ours and theirs by name; the script rounds to two digits."""
    basic = out / "Basic"
    basic.mkdir()
    for name in ("basic_edit.json", "prompts.json"):
        (basic / name).write_bytes((root / "ImgEdit" / "Benchmark" / "Basic" / name).read_bytes())
    for record in json.loads((basic / "basic_edit.json").read_text()).values():
        place = basic / "singleturn" / record["id"]
        place.parent.mkdir(parents=True, exist_ok=True)
        flat(9).save(place)
    ours = evaluated("imgedit", basic / "basic_edit.json", lines, out)
    replies, average, kinds = out / "imgedit" / "model" / "imgedit" / "result.json", out / "a.json", out / "k.json"
    steps = root / "ImgEdit" / "Benchmark" / "Basic"
    script(steps / "step1_get_avgscore.py", "--result_json", replies, "--average_score_json", average)
    script(steps / "step2_typescore.py", "--average_score_json", average, "--basic_edit", basic / "basic_edit.json",
           "--typescore_json", kinds)  # fmt: skip
    theirs = json.loads(kinds.read_text())
    return {kind: (ours[kind], number) for kind, number in {**theirs, "overall": fmean(theirs.values())}.items()}


def gedit(root: Path, out: Path) -> dict[str, tuple[float, float]]:
    """Ours and theirs by name; the script prints three digits."""
    rows = [(kind, f"{kind}{k}", f"{kind} number {k}", ("en", "cn")[k % 2], k % 3 == 0)
            for kind in KINDS for k in range(12)]  # fmt: skip
    ours = evaluated("gedit_en", write_gedit(out / "GEdit", rows, size=8), ratings, out)
    adds = out / "scripts" / "calculate_statistics.py"
    adds.parent.mkdir()
    adds.write_bytes((root / "Step1X-Edit" / "GEdit-Bench" / "calculate_statistics.py").read_bytes())
    (adds.parent / "megfile.py").write_text(MEGFILE)
    said = script(adds, "--model_name", "model", "--save_path", out / "gedit_en", "--backbone", "gpt4o")
    found: dict[str, tuple[float, float]] = {}
    for name, *numbers in re.findall(r"^([\w\- ]+): ([\d.]+), ([\d.]+), ([\d.]+)$", said, flags=re.MULTILINE):
        if name in KINDS and name not in found:
            found[name] = (ours[name], float(numbers[2]))
        elif name.startswith("Average"):
            ending = "_intersection" if name.endswith("Intersection") else ""
            for key, number in zip(("semantics", "quality", "overall"), numbers, strict=True):
                found[key + ending] = (ours[key + ending], float(number))
    return found


def published_replies(root: Path) -> dict[str, int]:
    """How many replies of GPT-4o that TIIF-Bench's repository holds are read as its script read them."""
    files = sorted((root / "TIIF-Bench" / "eval-results").rglob("*GPT-4o/*/*/*/*.json"))
    alike = 0
    for file in files:
        record = json.loads(file.read_text())
        read = yes_no_lines(record["model_output"])
        alike += read == [answer.lower() for answer in record["model_pred"]]
    return {"replies": len(files), "read_alike": alike}


def main() -> None:
    """Runs all, writes the table, and fails where a number differs by more than the scripts' rounding."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repositories", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parsed = parser.parse_args()
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, run, unit in (
            ("wise", partial(wise, verified=False), 0.01), ("wise_verified", partial(wise, verified=True), 0.01),
            ("geneval2", geneval2, 0.01), ("imgedit", imgedit, 0.01), ("gedit_en", gedit, 0.001),
        ):  # fmt: skip
            out = Path(folder) / name
            out.mkdir()
            pairs = run(parsed.repositories, out)
            worst = max(abs(ours - theirs) for ours, theirs in pairs.values())
            found[name] = {"numbers": len(pairs), "printed_to": unit, "largest_difference": round(worst, 6),
                           "agrees": worst <= unit / 2 + 1e-9,
                           "pairs": {key: [round(pair[0], 6), pair[1]] for key, pair in pairs.items()}}  # fmt: skip
            print(name, {key: value for key, value in found[name].items() if key != "pairs"})
    replies = published_replies(parsed.repositories)
    print("tiif", replies)
    content = {**origin(), "benchmarks": found, "published_replies_of_tiif": replies}
    write_atomically(parsed.out, json.dumps(content, indent=1) + "\n")
    assert all(part["agrees"] for part in found.values())


if __name__ == "__main__":
    main()
