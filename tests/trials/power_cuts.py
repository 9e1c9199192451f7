"""Cuts the power of training runs and compares what a resume makes of the disk with a run that was left alone.

    python tests/trials/power_cuts.py [--seconds 1.4 14 45] [--images 22] [--out docs/research/trials/power_cuts.json]

Runs are tiny (a random Stable Diffusion 3 pipeline, ten iterations, three evaluations, a checkpoint after each
iteration, two of which are kept) and wait in their reward, so that checkpoints are some seconds apart. Each has an ext4
file system of its own in a file. A copy of that file while the run works is what a disk holds when the power is cut:
what was written and not synced is not in it. Every second copy is made while a checkpoint is being written, the others
at any moment. Each is mounted and its run continued: it has to go on unasked, from the newest checkpoint that was
complete, and to end with the same bits: LoRA, policy, average, optimizer, counters, and metrics but for times. Needs
root, for `mount`.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests" / "helpers"), str(ROOT / "tests" / "helpers" / "families")]
os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}

import torch  # noqa: E402
from origin import origin  # noqa: E402
from tiny_models import save_tiny_sd3  # noqa: E402
from tiny_runs import TinyRuns, differences, lasting, lora, metrics, tiny_runs  # noqa: E402
from warm_forks import Started, start_forks  # noqa: E402

import flowrl.pages.report  # noqa: E402
import flowrl.recipes.grpo  # noqa: E402, F401  what a run imports is imported once, here
from flowrl.rendering.terminal_text import align  # noqa: E402
from flowrl.runtime.files import write_atomically  # noqa: E402
from flowrl.runtime.progress import progress  # noqa: E402
from flowrl.training.checkpoints import checkpoints  # noqa: E402

ITERATIONS = 10
BATCH = 8  # images of an iteration; evaluations score fewer, and do not wait
SIZES = (
    f"num_iterations={ITERATIONS}", "checkpoint_every=1", "keep_checkpoints=2", "eval_every=5", "eval.num_images=2",
    "eval.batch_size=4", "policy.ema_decay=0.5", "micro_batch_size=4", f"rollout_batch_size={BATCH}",
)  # fmt: skip
PAUSE = "POWER_CUT_PAUSE"
WAITING = f"""
import os, time

def reward(images, prompts, metadata):
    if len(images) == {BATCH}:
        time.sleep(float(os.environ.get("{PAUSE}", "0")))
    return 100 * images.mean((1, 2, 3))
"""
MEBIBYTES = 32  # of a disk
SAVING = "while saving"


@dataclass(kw_only=True, slots=True)
class Series:
    """A run on a disk of its own, and the moments at which its power is cut."""

    seconds: float
    disk: Path
    place: Path
    started: Started
    draw: random.Random
    moments: list[float]
    aimed: int
    images: list[dict[str, Any]] = field(default_factory=list)
    saving: str = ""

    def is_due(self, now: float) -> str:
        """What an image is taken for now; "" for none."""
        if self.moments and now >= self.moments[0]:
            self.moments.pop(0)
            return "any moment"
        names = [path.name for path in (self.place / "run" / "checkpoints").glob(".[0-9]*")]
        if names and names[0] != self.saving and self.aimed:
            self.saving, self.aimed = names[0], self.aimed - 1
            return SAVING
        return ""

    def cut(self, folder: Path, why: str, now: float) -> None:
        """Copies the disk as it is; at any moment until two copies in a row are equal, while saving at once."""
        saved = checkpoints(self.place / "run")
        if why == SAVING:
            time.sleep(self.draw.uniform(0, 0.03))
        data = self.disk.read_bytes()
        while why != SAVING and (again := self.disk.read_bytes()) != data:
            data = again
        image = folder / f"{self.seconds:g}-{len(self.images):03d}.img"
        image.write_bytes(data)
        self.images.append({
            "seconds_between": self.seconds, "image": image, "aim": why, "at": round(now, 2),
            "saved": int(saved[-1].name) if saved else 0,
        })  # fmt: skip


class Trials:
    """A folder with the configuration of all runs, and a run that was left alone."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.runs: TinyRuns = tiny_runs(folder, save_tiny_sd3(folder / "model"))
        self.reward = self.runs.rewards(WAITING)
        self.whole = folder / "whole"
        whole = self.start("whole", self.new(self.whole))
        if whole.wait(600) != (0,):
            raise SystemExit(f"a run that nobody disturbed failed:\n{whole.said()}")

    def new(self, run: Path) -> list[str]:
        """The command that starts a run."""
        held_out = f"prompts.eval={self.folder / 'prompts.txt'}"
        return ["train", str(self.runs.config), f"out={run}", held_out, self.reward, *SIZES]

    def start(self, name: str, arguments: Sequence[str], pause: float = 0.0) -> Started:
        prepare = partial(os.environ.__setitem__, PAUSE, str(pause))
        return start_forks(arguments, [self.folder], self.folder / f"{name}.log", prepare)

    def unequal(self, run: Path) -> list[str]:
        """What of a run differs from the one that was left alone."""
        checks = {
            "LoRA": lora(run) == lora(self.whole),
            "state": differences(lasting(run), lasting(self.whole)) == 0,
            "metrics": metrics(run) == metrics(self.whole),
            "report": (run / "report.html").is_file() and (run / "summary.json").is_file(),
        }
        return [what for what, equal in checks.items() if not equal]


@contextmanager
def mounted(disk: Path, place: Path) -> Iterator[Path]:
    """A file system in a file, in a folder."""
    place.mkdir(exist_ok=True)
    subprocess.run(["mount", "-o", "loop", str(disk), str(place)], check=True)
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)


def cut(trials: Trials, seconds: Sequence[float], images: int, seed: int) -> list[dict[str, Any]]:
    """Trains all series at once, and takes the images of their disks."""
    if len(seconds) == 0:
        return []
    found: list[Series] = []

    def begin(left: Sequence[float]) -> None:
        if not left:
            _watch(found, trials.folder)
            return
        disk, place = trials.folder / f"disk-{left[0]:g}", trials.folder / f"mount-{left[0]:g}"
        with disk.open("wb") as file:
            file.truncate(MEBIBYTES * 2**20)
        subprocess.run(["mkfs.ext4", "-q", str(disk)], check=True)
        with mounted(disk, place):
            draw = random.Random(f"{seed}-{left[0]}")
            aimed = min(images // 2, ITERATIONS)
            found.append(Series(
                seconds=left[0], disk=disk, place=place, draw=draw, aimed=aimed,
                moments=sorted(draw.uniform(0, ITERATIONS * left[0]) for _ in range(images - aimed)),
                started=trials.start(f"series-{left[0]:g}", trials.new(place / "run"), left[0]),
            ))  # fmt: skip
            begin(left[1:])

    begin(seconds)
    return [image for series in found for image in series.images]


def _watch(found: Sequence[Series], folder: Path) -> None:
    """Takes the images while the runs work; returns when the last has ended."""
    begun, at_work = time.monotonic(), list(found)
    while at_work:
        for series in list(at_work):
            now = time.monotonic() - begun
            if why := series.is_due(now):
                series.cut(folder, why, now)
            answer = series.started.answer(3600)
            if answer is not None:
                at_work.remove(series)
                if answer.code != 0:
                    raise SystemExit(f"a run that nobody disturbed failed:\n{answer.said}")
        time.sleep(0.002)


def resume(trials: Trials, image: dict[str, Any]) -> dict[str, Any]:
    """Mounts an image, continues its run, and tells how that went."""
    disk = Path(image.pop("image"))
    with mounted(disk, trials.folder / "mount") as place:
        run = place / "run"
        begun = (run / "config.yaml").is_file()
        again = trials.start("resume", ["train", f"resume={run}"] if begun else trials.new(run))
        ended = again.wait(600) == (0,)
        if ended:
            manifest = json.loads((run / "manifest.json").read_text())
            on = manifest["resumed"][-1]["iteration"] if manifest.get("resumed") else 0
            aside = sorted(str(path.relative_to(run)) for path in run.glob("damaged-*/*/*"))
            image |= {"refused": False, "went_on_from": on, "aside": aside, "unequal": trials.unequal(run)}
        else:
            image |= {"refused": True, "said": again.said()}
    disk.unlink()
    return image


def main() -> int:
    """Makes the trials, prints a table, writes JSON; returns 0 where everything was as it should be."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument(
        "--seconds", type=float, nargs="+", default=[1.4, 14, 45], help="between checkpoints (1.4 14 45)"
    )
    parser.add_argument("--images", type=int, default=22, help="of each series (22)")
    parser.add_argument("--seed", type=int, default=0, help="of the moments (0)")
    parser.add_argument(
        "--out", type=Path, default=ROOT / "docs" / "research" / "trials" / "power_cuts.json", help="JSON file"
    )
    asked = parser.parse_args()
    if os.geteuid() != 0:
        parser.error("disks are mounted, which needs root")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="power-cuts-") as folder:
        print("a run that is left alone, then the runs whose disks are copied ...", file=sys.stderr, flush=True)
        trials = Trials(Path(folder))
        images = cut(trials, asked.seconds, asked.images, asked.seed)
        rows = []
        with progress("resuming", len(images)) as advance:
            for image in images:
                rows.append(resume(trials, image))
                advance(f"{rows[-1]['seconds_between']:g} s")
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    result = origin() | {"seed": asked.seed, "file_system": "ext4, its defaults, in a file", "cuts": rows}
    write_atomically(asked.out, json.dumps(result, indent=1) + "\n")
    print(table(rows))
    return 0 if not any(row["refused"] or row["unequal"] for row in rows) else 1


def table(rows: Sequence[dict[str, Any]]) -> str:
    """What came out, for people."""
    lines = []
    for seconds in sorted({row["seconds_between"] for row in rows}):
        own = [row for row in rows if row["seconds_between"] == seconds]
        taken = [row for row in own if not row["refused"]]
        lines.append([
            f"{seconds:g}", str(len(own)), str(sum(row["aim"] == SAVING for row in own)),
            str(len(own) - len(taken)), str(sum(row["went_on_from"] >= row["saved"] for row in taken)),
            str(sum(not row["unequal"] for row in taken)),
        ])  # fmt: skip
    head = ["seconds", "images", "while saving", "refused", "from the newest", "equal"]
    return align(head, lines)


if __name__ == "__main__":
    raise SystemExit(main())
