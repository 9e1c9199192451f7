"""What every command prints and writes, recorded and compared: `python tests/trials/command_outputs.py --write FILE`.

The command lines of `command_outputs.txt` run one after another as `python -m flowrl ...`, each in a folder of its own,
on one thread and without network. Kept are the exit code, both outputs, and the files that appear or change, each with
a digest of what it holds. What differs from run to run is replaced by a word first: times, paths, versions, ids.

`--compare FILE` does the same and says how the answers differ from a recording, with exit code 1 where they do. With a
second FILE it compares two recordings and runs nothing. `--root` is the checkout, `--python` its interpreter; without
them both are this one's. It takes about twelve minutes on one core.
"""

from __future__ import annotations

import argparse
import difflib
import fnmatch
import glob
import hashlib
import html
import json
import os
import platform
import re
import shlex
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LIST = Path(__file__).with_suffix(".txt")
LIMIT = 600.0
"""Seconds that a command may take."""
SHOWN = 8
"""Differing lines of an output that are printed."""
Answer = dict[str, Any]

TINY = """\
base: tiny_grpo_geneval
num_iterations: 2
prompts_per_step: 2
group_size: 4
threads: 1
checkpoint_every: 2
eval_every: 2
policy: {lora_rank: 2}
logging: {tensorboard: false}
sampler: {num_steps: 4, sde_window_range: [1, 3]}
eval: {num_prompts: 4, num_steps: 2, samples_per_prompt: 1}
"""
FLOW_FACTORY = """\
model: {model_name_or_path: stabilityai/stable-diffusion-3.5-medium, model_type: sd3, finetune_type: lora}
train: {trainer_type: grpo, resolution: 512, num_inference_steps: 10, guidance_scale: 4.5, group_size: 16}
rewards: [{name: pickscore, reward_model: PickScore}]
"""
_SCRUBBED: tuple[tuple[str, str], ...] = (
    (r"\b\d+\.\d+(\.\d+)?(\.?(dev|post|rc|a|b)\d+)?\+[\w.]+", "VERSION"),
    (r"\b(flowrl|torch|diffusers|transformers|peft|accelerate|Python) \d+(\.\w+)+", r"\1 VERSION"),
    (r"\b[0-9a-f]{8}-[0-9a-f-]{27}\b|\b(?=[a-f]*\d)[0-9a-f]{10,64}(-dirty)?\b", "HEX"),
    (r"\bpeak_memory_gib [\d.]+", "peak_memory_gib N"),
    (r"\b20\d\d-\d\d-\d\d(?:[T ]\d\d:\d\d(?::\d\d)?(?:\.\d+)?(?:Z|[+-]\d\d:?\d\d| UTC)?)?", "DATE"),
    (r"\b\d+(:\d\d){1,2}\b", "CLOCK"),
    (r"(seconds per image|hours for 1000 images) +[\d.e-]+", r"\1 N"),
    (r"\bseconds \{.*?\}+", "seconds N"),
    (r"\b\d[\d.,]*(?:e[-+]?\d+)? ?(ms|s|min|h|seconds?|minutes?|hours?)\b(?!-)", r"N \1"),
    (r"\b\d[\d.,]* a second", "N a second"),
    (r"\b\d[\d.,]* [KMG]iB (free|at /dev/shm|of memory)", r"N \1"),
    (r"\b(pid|process|port) \d+", r"\1 N"),
    (r"(\.tfevents\.\S+)\.\d+\.(\d+)$", r"\1.N.\2"),
    (r"\b(127\.0\.0\.1|localhost):\d+", r"\1:N"),
)  # fmt: skip
_VARYING = re.compile(
    r"time|second|(^|_)(date|at|started|ended|finished|commit|version|host|pid|memory|elapsed|platform|cpu|port|run|machine)($|_)"
    r"|sha256|^hash|_bytes$|pace|speed|per_s|versions|packages|gib|wall|hours|python|torch|root|folder$"
)
"""Keys of JSON files whose values are left out."""
_DIGITLESS = (".lock", ".pt", ".log")
"""Endings of files of which the name alone is kept."""
_PROGRESS = re.compile(r"^(.*?)\s*\d[\d,]*/[\d,]+  left .*$")


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A command line, what of its folder later lines are given, and whether its numbers are this machine's pace."""

    words: str
    kept: tuple[str, ...] = ()
    paced: bool = False

    def needs(self, names: Sequence[str]) -> set[str]:
        """Those of the names that its words speak of."""
        parts = {part for word in shlex.split(self.words) for part in (word, *re.split(r"[=,:/]", word))}
        return parts & set(names)


def read_cases() -> list[Case]:
    """The cases of the list, in its order."""
    cases = []
    for line in LIST.read_text().splitlines():
        if line.strip() and not line.startswith("#"):
            words, _, kept = line.partition(" => ")
            names = tuple(kept.split(",")) if kept else ()
            cases.append(Case(words=words.strip().removeprefix("~ "), kept=names, paced=words.startswith("~ ")))
    return cases


def choose(cases: Sequence[Case], patterns: Sequence[str]) -> list[Case]:
    """Cases whose words match one of the patterns, and those that leave behind what they need."""
    if not patterns:
        return list(cases)
    names = [name for case in cases for name in case.kept]
    chosen, needed = [], set[str]()
    for case in reversed(cases):
        if any(fnmatch.fnmatchcase(case.words, one) for one in patterns) or needed & set(case.kept):
            chosen.append(case)
            needed |= case.needs(names)
    return chosen[::-1]


def png(side: int, number: int) -> bytes:
    """A square image of stripes in a colour of its own."""
    rows = b"".join(
        b"\0" + bytes(value for x in range(side) for value in (37 * number % 256, 8 * (x // 4) % 256, 4 * y % 256))
        for y in range(side)
    )

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def write_inputs(folder: Path) -> None:
    """The files that command lines name: configurations, prompts, pairs, a folder of images."""
    (folder / "images").mkdir(parents=True)
    for number in range(6):
        (folder / "images" / f"{number}.png").write_bytes(png(64, number))
    pair = {"prompt": "a red circle", "winner": "images/0.png", "loser": "images/1.png"}
    (folder / "pairs.jsonl").write_text(f"{json.dumps(pair)}\n" * 4)
    (folder / "prompts.txt").write_text("a red circle\na blue square\n")
    (folder / "tiny.yaml").write_text(TINY)
    (folder / "tiny_twin.yaml").write_text(f"{TINY}kl_coef: 0.01\n")
    (folder / "flow_factory.yaml").write_text(FLOW_FACTORY)


def environment(root: Path, home: Path) -> dict[str, str]:
    """This process's environment without what would change an answer."""
    kept = {
        k: v for k, v in os.environ.items() if not k.startswith(("FLOWRL", "HF_", "CUDA", "XDG", "PYTHON", "WANDB"))
    }
    return kept | {
        "PYTHONPATH": str(root), "PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1", "HOME": str(home),
        "COLUMNS": "80", "TERM": "dumb", "NO_COLOR": "1", "LC_ALL": "C.UTF-8", "TZ": "UTC", "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "",
    }  # fmt: skip


def scrub(text: str, places: dict[str, str]) -> str:
    """A text with words in place of what differs from run to run, and of wrapped lines with a path in them."""
    moved = any(place in text for place in places)
    for place, word in places.items():
        text = text.replace(place, word)
    text = re.sub(rf"\b{re.escape(platform.node())}\b", "HOST", text) if platform.node() else text
    for pattern, word in _SCRUBBED:
        text = re.sub(pattern, word, text)
    lines: list[str] = []
    for line in re.split(r"[\r\n]+" if "\r" in text else r"\n", text):
        line = _PROGRESS.sub(r"progress: \1", line).rstrip()
        if not (line.startswith("progress: ") and line in lines):
            lines.append(line)
    text = "\n".join(lines).strip("\n")
    if moved or "VERSION" in text:  # its length moves line breaks and columns
        text = "\n\n".join(" ".join(part.split()) for part in re.split(r"\n\s*\n", text))
    return text


def without_varying(value: Any) -> Any:
    """A value of a JSON file without what differs from run to run."""
    if isinstance(value, dict):
        return {k: "…" if _VARYING.search(k) else without_varying(v) for k, v in value.items()}
    return [without_varying(one) for one in value] if isinstance(value, list) else value


def digest(path: Path, places: dict[str, str]) -> str:
    """What a file holds, in 12 letters: of a page its words, of JSON its values by sorted keys."""
    if path.name.endswith(_DIGITLESS) or path.is_symlink():
        return ""
    data = path.read_bytes()
    try:
        if path.suffix in (".json", ".jsonl"):
            parts = [data] if path.suffix == ".json" else data.splitlines()
            data = "\n".join(json.dumps(without_varying(json.loads(one)), sort_keys=True) for one in parts).encode()
        elif path.suffix == ".html":
            bare = re.sub(r"(?s)<(style|script).*?</\1>|<[^>]*>", " ", data.decode())
            data = re.sub(r"\b\d[\d.]* %", "N %", " ".join(html.unescape(bare).split())).encode()  # shares of the time
        elif path.suffix == ".safetensors":  # whose head has no fixed order
            length = 8 + int.from_bytes(data[:8], "little")
            head = json.dumps(json.loads(data[8:length]), sort_keys=True)
            return hashlib.sha256(head.encode() + data[length:]).hexdigest()[:12]
        data = scrub(data.decode(), places).encode()
    except ValueError:
        pass  # not text: as it is
    return hashlib.sha256(data).hexdigest()[:12]


def files_of(folder: Path, places: dict[str, str]) -> dict[str, str]:
    """Every file below a folder, with its digest; names lose dates and ids."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return {scrub(str(path.relative_to(folder)), places): digest(path, places) for path in paths}


def ask(case: Case, python: Path, root: Path, store: Path, folder: Path) -> Answer:
    """Runs a case in a folder that is not there yet, and gives its answer."""
    folder.mkdir(parents=True)
    for name in sorted(case.needs([path.name for path in store.iterdir()])):
        source = store / name
        (shutil.copytree if source.is_dir() else shutil.copy2)(source, folder / name)
    home = folder.with_suffix(".home")
    home.mkdir()
    prefix = subprocess.run([python, "-c", "import sys; print(sys.prefix)"], capture_output=True, text=True, check=True)
    places = {
        str(home): "HOME", str(folder.resolve()): "FOLDER", str(folder): "FOLDER", prefix.stdout.strip(): "PYTHON",
        str(root.resolve()): "ROOT", str(root): "ROOT",
    }  # fmt: skip
    before = files_of(folder, places)
    command = [str(python), "-m", "flowrl", *shlex.split(case.words)]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, cwd=folder, env=environment(root, home), stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True,
        start_new_session=True,
    ) as started:  # fmt: skip
        try:
            out, error = started.communicate(timeout=LIMIT)
        except subprocess.TimeoutExpired:
            os.killpg(started.pid, signal.SIGKILL)  # with the trainings that it started
            out, error = started.communicate()
            error += f"\nno end after {LIMIT:.0f} s"
    after = files_of(folder, places)
    for name, text in {"out": out, "error": error}.items():  # as it came, to look at
        folder.with_suffix(f".{name}").write_text(text)
    for name in case.kept:
        if (folder / name).exists():
            shutil.copytree(folder / name, store / name)
    if case.paced:
        out, error = (" ".join(re.sub(r"\d[\d.,]*", "N", text).split()) for text in (out, error))
        after = dict.fromkeys(after, "")
    return {
        "code": started.returncode, "out": scrub(out, places).splitlines(), "error": scrub(error, places).splitlines(),
        "files": {name: value for name, value in after.items() if before.get(name, "absent") != value},
        "removed": sorted(before.keys() - after.keys()),
    }  # fmt: skip


def record(cases: Sequence[Case], python: Path, root: Path, work: Path, file: Path | None) -> dict[str, Answer]:
    """The answers to cases by their words; folders stay in `work`, and a file gets each answer when it is there."""
    store, answers = work / "store", dict[str, Answer]()
    listed = [case.words for case in read_cases()]
    kept: dict[str, Answer] = json.loads(file.read_text()) if file is not None and file.exists() else {}
    write_inputs(store)
    for number, case in enumerate(cases, 1):
        print(f"{number}/{len(cases)} flowrl {case.words}", file=sys.stderr, flush=True)
        answers[case.words] = ask(case, python, root, store, work / f"{number:03d}")
        if file is not None:
            kept |= answers
            ordered = {words: kept[words] for words in listed if words in kept}
            file.write_text(json.dumps(ordered, indent=0, ensure_ascii=False) + "\n")
    return answers


def line_differences(name: str, before: Sequence[str], now: Sequence[str]) -> list[str]:
    """How the lines of an output differ, in words."""
    found = [line for line in difflib.ndiff(before, now) if line[0] in "+-"]
    words = [f"{name}: {'was' if line[0] == '-' else 'is '} {line[2:]}" for line in found]
    more = [f"{name}: {len(words) - SHOWN} more lines differ"] if len(words) > SHOWN else []
    return words[:SHOWN] + more


def differences(before: Answer, now: Answer) -> list[str]:
    """How two answers to a case differ, in words; empty where they are equal."""
    found = [f"exit code: was {before['code']}, is {now['code']}"] if before["code"] != now["code"] else []
    found += line_differences("printed", before["out"], now["out"])
    found += line_differences("said", before["error"], now["error"])
    old, new = before["files"], now["files"]
    found += [f"no longer writes {name}" for name in old.keys() - new.keys()]
    found += [f"also writes {name}" for name in new.keys() - old.keys()]
    found += [f"{name} holds something else" for name in old.keys() & new.keys() if old[name] != new[name]]
    if before["removed"] != now["removed"]:
        found.append(f"removes {now['removed']}, was {before['removed']}")
    return found


def compare(before: dict[str, Answer], now: dict[str, Answer], *, whole: bool) -> int:
    """Prints how two recordings differ, and gives the number of cases that do."""
    found = {words: differences(before[words], answer) for words, answer in now.items() if words in before}
    found |= {words: ["was not recorded"] for words in now.keys() - before.keys()}
    if whole:
        found |= {words: ["is no longer on the list"] for words in before.keys() - now.keys()}
    for words, lines in found.items():
        if lines:
            print(f"flowrl {words}", *(f"  {line}" for line in lines), sep="\n")
    number = sum(map(bool, found.values()))
    print(f"{number} of {len(found)} command lines answer otherwise")
    return number


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, metavar="FILE", help="recording to write, or to add to")
    parser.add_argument("--compare", type=Path, metavar="FILE", nargs="+", help="recording to compare with; two: these")
    parser.add_argument("--python", type=Path, default=Path(sys.executable), help="interpreter")
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parents[2], help="checkout")
    parser.add_argument("--only", nargs="*", default=[], metavar="PATTERN", help="such as 'eval *'")
    parser.add_argument("--missing", action="store_true", help="only the command lines that FILE of --write lacks")
    parser.add_argument("--work", type=Path, help="empty folder in which every command's folder stays")
    asked = parser.parse_args()
    recordings = [json.loads(path.read_text()) for path in asked.compare or []]
    if len(recordings) == 2:
        return int(compare(*recordings, whole=True) > 0)
    if not recordings and asked.write is None:
        parser.error("--write FILE or --compare FILE")
    with tempfile.TemporaryDirectory(prefix="flowrl-outputs-") as temporary:
        work = (asked.work or Path(temporary)).resolve()
        cases = choose(read_cases(), asked.only)
        if asked.missing and asked.write is not None and asked.write.exists():
            there = json.loads(asked.write.read_text())
            cases = choose(cases, [glob.escape(case.words) for case in cases if case.words not in there] or [""])
        answers = record(cases, asked.python.absolute(), asked.root.resolve(), work, asked.write)
    return int(compare(recordings[0], answers, whole=not asked.only) > 0) if recordings else 0


if __name__ == "__main__":
    raise SystemExit(main())
