"""`flowrl watch` over 20 runs of 2,000 iterations: seconds until its page has everything, and with 10 clients.

    python tests/trials/watch_load.py --folder DIR --out docs/research/trials/watch.json

The folders are written with rows as long as those of a real run of GRPO with three rewards; one run goes on growing
while it is watched. A page is what a browser asks for: page, script, list until no run waits, a run, log and samples.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import requests
from origin import origin
from PIL import Image

from flowrl.runtime.files import write_atomically

REWARDS = ("geneval", "pickscore", "hpsv3")
EVERY = 100
PROMPTS = 8


def row_of(iteration: int, spread: random.Random) -> dict[str, Any]:
    """An iteration's row, of as many keys as training writes."""
    reward = 0.8 - 0.5 * math.exp(-iteration / 600) + spread.gauss(0, 0.03)
    row: dict[str, Any] = {"iteration": iteration, "reward": reward, "reward_std": 0.2, "reward_error": 0.03}
    for name in REWARDS:
        row |= {f"reward/{name}{part}": reward + spread.gauss(0, 0.02) for part in ("", "/graded", "/strict")}
    names = "invalid_ratio advantage_abs loss policy_loss approx_kl ratio_first_deviation ratio_max_deviation diversity"
    row |= {name: abs(spread.gauss(0, 0.01)) for name in names.split()} | {"invalid_ratio": 0.0}
    row |= {"ratio_mean": 1 + spread.gauss(0, 1e-4), "clip_fraction": 0.1 + spread.gauss(0, 0.01)}
    row |= {"kl": iteration * 1e-5 + abs(spread.gauss(0, 1e-3)), "grad_norm": 0.1 + abs(spread.gauss(0, 0.02))}
    row |= {"zero_std_ratio": 0.2, "live_rows": 432, "num_images": 144, "lr": 1e-4, "num_scored": 144}
    row |= {f"nfe/{kind}": 6912 for kind in ("rollout", "update", "backward", "total")} | {"images": 144 * iteration}
    row |= {f"seconds/{stage}": abs(spread.gauss(20, 1)) for stage in ("rollout", "reward", "update")}
    row |= {"seconds": abs(spread.gauss(62, 2)), "seconds/total": 62.0 * iteration}
    row |= {f"memory/{stage}_gib": 17 + spread.random() for stage in ("rollout", "update", "peak")}
    if iteration in (700, 701):
        row["warnings"] = {"collapse": "images of one prompt differ by 0.01, 9% of what they did: stop it"}
    return row


def evaluation_of(iteration: int, spread: random.Random) -> dict[str, Any]:
    row: dict[str, Any] = {"iteration": iteration, "seconds/eval": 200.0}
    for name in REWARDS:
        mean = 0.75 - 0.4 * math.exp(-iteration / 600) + spread.gauss(0, 0.01)
        row |= {f"eval/reward/{name}": mean, f"eval/reward/{name}_low": mean - 0.03}
        row |= {f"eval/reward/{name}_high": mean + 0.03}
    return row


def write_run(folder: Path, iterations: int, seed: int) -> None:
    """A run folder with samples that redden while it goes on."""
    spread = random.Random(seed)
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(f"recipe: grpo\nnum_iterations: {iterations}\nprompts_per_step: 12\n")
    finished = seed % 3 == 0
    (folder / "manifest.json").write_text(json.dumps({"config_name": "trial", "finished": finished}))
    lines = []
    for iteration in range(iterations):
        if iteration % EVERY == 0:
            lines.append(json.dumps(evaluation_of(iteration, spread)))
            shots = folder / "samples" / f"iteration_{iteration:06d}"
            shots.mkdir(parents=True)
            for prompt in range(PROMPTS):
                colour = (30 + 220 * iteration // iterations, 30 * prompt, 120)
                Image.new("RGB", (256, 256), colour).save(shots / f"{prompt:04d}.png")
        lines.append(json.dumps(row_of(iteration, spread)))
    prompts = [{"prompt": f"a photo of {k + 1} red cubes on a table", "seed": k} for k in range(PROMPTS)]
    (folder / "samples" / "prompts.json").write_text(json.dumps(prompts))
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")


def open_page(address: str, number: int) -> dict[str, float]:
    """Asks for what a browser asks for, and says after how many seconds it had what."""
    begun = time.perf_counter()
    seconds = {}
    with requests.Session() as client:
        for name in ("", "page.js"):
            client.get(f"{address}{name}").raise_for_status()
        seconds["frame"] = time.perf_counter() - begun
        first = client.get(f"{address}list").json()
        seconds["list"] = time.perf_counter() - begun
        for name in (f"run/{number}", f"log/{number}", f"samples/{number}"):
            client.get(f"{address}{name}").raise_for_status()
        seconds["first run"] = time.perf_counter() - begun
        while first["waiting"]:
            first = client.get(f"{address}list").json()
        seconds["all runs in the list"] = time.perf_counter() - begun
    return {name: round(value, 3) for name, value in seconds.items()}


def follow(address: str, number: int, seconds: float) -> list[float]:
    """A client that stays: asks for what is new every 3 seconds, and how long each round took."""
    took, marks, end = [], {"list": "", f"run/{number}": ""}, time.monotonic() + seconds
    with requests.Session() as client:
        while time.monotonic() < end:
            begun = time.perf_counter()
            for name, mark in marks.items():
                answer = client.get(f"{address}{name}", params={"since": mark})
                if answer.status_code == 200:
                    marks[name] = answer.json()["mark"]
                else:
                    assert answer.status_code == 204, answer.text
            client.get(f"{address}log/{number}").raise_for_status()
            took.append(time.perf_counter() - begun)
            time.sleep(max(0.0, 3 - took[-1]))
    return took


def grow(folder: Path, stop: threading.Event) -> None:
    """Goes on writing a run, a row a second, each in two halves as a slow disk would show them."""
    spread, iteration = random.Random(1), 2000
    while not stop.wait(0.5):
        line = json.dumps(row_of(iteration, spread)) + "\n"
        with (folder / "metrics.jsonl").open("a") as file:
            for half in (line[:300], line[300:]):
                file.write(half)
                file.flush()
                stop.wait(0.5)
        iteration += 1


def processor_seconds(process: int) -> float:
    """What a process has used of a core so far: the figure that does not depend on what else the machine does."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def serve(folder: Path) -> tuple[subprocess.Popen[str], str, float]:
    begun = time.perf_counter()
    command = [sys.executable, "-m", "flowrl.cli", "watch", str(folder), "--port", "0"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    address = next(line.strip() for line in server.stdout if line.startswith("http://"))
    return server, address, time.perf_counter() - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--iterations", type=int, default=2000)
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=30.0)
    given = parser.parse_args()
    if not given.folder.exists():
        for seed in range(given.runs):
            write_run(given.folder / f"grpo-{seed + 1:02d}", given.iterations, seed)
    size = sum(path.stat().st_size for path in given.folder.glob("*/metrics.jsonl"))
    server, address, started = serve(given.folder)
    stop = threading.Event()
    writer = threading.Thread(target=grow, args=(given.folder / "grpo-02", stop))
    try:
        used = [processor_seconds(server.pid)]
        cold = open_page(address, 1)
        used.append(processor_seconds(server.pid))
        warm = open_page(address, 1)
        writer.start()
        with ThreadPoolExecutor(given.clients) as pool:
            opened = list(pool.map(lambda k: open_page(address, k), range(given.clients)))
            used.append(processor_seconds(server.pid))
            rounds = pool.map(lambda k: follow(address, k % 3, given.seconds), range(given.clients))
            took = sorted(value for client in rounds for value in client)
        used.append(processor_seconds(server.pid))
        usage = Path(f"/proc/{server.pid}/status").read_text()
    finally:
        stop.set()
        server.terminate()
        server.wait()
    write_atomically(given.out, json.dumps(origin() | {
        "runs": given.runs, "iterations": given.iterations, "metrics_mib": round(size / 2**20, 1),
        "seconds_to_start": round(started, 2), "seconds_first_page": cold, "seconds_next_page": warm,
        "server_core_seconds": {
            "start, with all runs read": round(used[0], 2), "first page": round(used[1] - used[0], 2),
            "a round of a client": round((used[3] - used[2]) / len(took), 3),
        },
        "seconds_of_a_page_by_10_clients_at_once": sorted(page["first run"] for page in opened),
        "rounds": len(took), "seconds_of_a_round": {
            "median": round(took[len(took) // 2], 3), "95 %": round(took[int(0.95 * len(took))], 3),
            "longest": round(took[-1], 3),
        },
        "server_peak_mib": int(usage.split("VmHWM:")[1].split()[0]) // 1024,
        "load": Path("/proc/loadavg").read_text().split()[0],
    }, indent=1) + "\n")  # fmt: skip
    print(given.out.read_text())


if __name__ == "__main__":
    main()
