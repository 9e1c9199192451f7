"""Clips in place of a model's: a square that moves, in GenEval's layout; and a package vbench that measures names."""

from __future__ import annotations

import json
import stat
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from flowrl.generation.folders import ImageFile, read_folder
from flowrl.generation.subject import Settings, Subject
from flowrl.media.lossless import CLIPS, LOSSLESS, save_lossless
from flowrl.media.videos import save_mp4
from flowrl.prompts.loading import Prompt

SIDE, FRAMES, FPS = 32, 6, 8.0

STAND_IN = '''
import argparse, json, os, sys

parser = argparse.ArgumentParser()
for name in ("output_path", "full_json_dir", "videos_path"):
    parser.add_argument("--" + name, required=True)
parser.add_argument("--dimension", nargs="+", required=True)
parser.add_argument("--load_ckpt_from_local", type=bool)
given = parser.parse_args()
print("asked for", given.dimension)
with open(os.path.join(os.path.dirname(__file__), "calls.txt"), "a") as log:
    log.write(" ".join(given.dimension) + "\\n")
if os.path.exists(os.path.join(os.path.dirname(__file__), "break_" + given.dimension[0])):
    sys.exit("RuntimeError: no weights of " + given.dimension[0])
results = {}
for dimension in given.dimension:
    rows = []
    for entry in json.load(open(given.full_json_dir)):
        for k in range(5):
            path = os.path.join(given.videos_path, f"{entry['prompt_en']}-{k}.mp4")
            if dimension in entry["dimension"] and os.path.exists(path):
                value = (len(entry["prompt_en"]) + k + ("base" in path) * 4) / 50
                rows.append({"video_path": path, "video_results": value})
    results[dimension] = [sum(row["video_results"] for row in rows) / len(rows), rows]
    if dimension == "imaging_quality":
        rows[:] = [{**row, "video_results": 100 * row["video_results"]} for row in rows]
with open(os.path.join(given.output_path, "results_2026-01-01-00:00:00_eval_results.json"), "w") as out:
    json.dump(results, out, indent=4)
'''  # fmt: skip
"""`vbench.launch.evaluate` of version 0.1.5 by its options and files: a video's value is made of its name."""


def clip(number: int, *, jump: int = 0) -> Tensor:
    """A square of 8 pixels that moves by one pixel a frame, in a row of its own, and jumps once by `jump` more."""
    video = torch.full((FRAMES, 3, SIDE, SIDE), 51 / 255)
    for t, frame in enumerate(video):
        left = 2 + t + (jump if t >= FRAMES // 2 else 0)
        frame[:, number % 20 : number % 20 + 8, left : left + 8] = 1.0
    return video


def draw_clips(settings: Settings, subject: Subject, prompts: Sequence[Prompt], suffix: str) -> list[ImageFile]:
    """Stands for `images_of`: even motion, and a jump by 9 of a subject named base."""
    folder = subject.folder / "images"
    for index, prompt in enumerate(prompts):
        place = folder / f"{index:05d}" / "samples"
        place.mkdir(parents=True, exist_ok=True)
        (place.parent / "metadata.jsonl").write_text(json.dumps({**prompt.metadata, "prompt": prompt.text}) + "\n")
        for sample in range(settings.samples):
            path = place / f"{sample:05d}{suffix}"
            if not path.is_file():
                drawn = clip(3 * index + sample, jump=9 if subject.label == "base" else 0)
                (save_lossless if suffix == LOSSLESS else save_mp4)(drawn, path, FPS)
    return read_folder(folder, CLIPS)


def vbench_environment(folder: Path, entries: Sequence[dict[str, object]], version: str = "0.1.5") -> Path:
    """A Python whose package vbench is the stand-in; `calls.txt` in its launch folder tells what was asked."""
    package = folder / "site" / "vbench"
    (package / "launch").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "launch" / "__init__.py").write_text("")
    (package / "launch" / "evaluate.py").write_text(STAND_IN)
    (package / "VBench_full_info.json").write_text(json.dumps(list(entries)))
    metadata = folder / "site" / f"vbench-{version}.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: vbench\nVersion: {version}\n")
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH="{folder / "site"}" exec "{sys.executable}" -S "$@"\n')
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    return python
