"""What the client of judges does to a server at full load, and what becomes of questions when servers fail.

    python tests/trials/judge_load.py docs/research/trials/judge_load.json

The server is `served_judge` of the tests' helpers, a process of its own that needs hardly any CPU. CPU times are of
this process, so that they hold, if a little too high, on a machine that has other work too; requests per second and
how many the server has at once do not, and so what is on its way is counted at this end too. The loop is one thread, so
that its CPU bounds the requests per second.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any, get_args

sys.path += [str(Path(__file__).resolve().parents[1] / place) for place in ("helpers", "helpers/judges")]

import numpy as np
import torch
from origin import origin
from served_judge import Served, served_judge

from flowrl.rewards.judges.call_limits import image_part
from flowrl.rewards.judges.chat import Answer, JudgeImageFormat, Question, build_chat
from flowrl.runtime.randomness import counter_seed

SIDE, LATENCY, CONCURRENCY = 1024, 0.05, 64
TOP = 20


def image_of(number: int, *, fine: float = 1.4) -> np.ndarray:
    """An image with detail at all scales: amplitudes fall as frequency to the power of -`fine`.

    At 1.4 a JPEG of quality 95 has half a megabyte, as of a detailed photo; at 1, where random phases make it
    harsher than any photo, 0.87. Each number has its own pixels, by a shift of one image that is kept: a transform
    costs more than what is measured.
    """
    return np.ascontiguousarray(np.roll(_photo(fine), (number * 13, number * 7), axis=(0, 1)))


@cache
def _photo(fine: float) -> np.ndarray:
    draws = np.random.default_rng(counter_seed("judge-load"))
    rows, columns = np.fft.fftfreq(SIDE)[:, None], np.fft.rfftfreq(SIDE)[None]
    power = np.maximum(np.hypot(rows, columns), 1 / SIDE) ** -fine
    grey, *colours = (
        np.fft.irfft2(np.fft.rfft2(draws.standard_normal((SIDE, SIDE))) * power, s=(SIDE, SIDE)) for _ in range(4)
    )
    planes = [grey + 0.3 * colour for colour in colours]  # channels correlate at 0.92, about as of photos
    scaled = [128 + 50 * (plane - plane.mean()) / plane.std() for plane in planes]
    return np.stack(scaled, axis=-1).clip(0, 255).astype(np.uint8)


def questions_of(count: int, *, images: int, fine: float = 1.4) -> list[Question]:
    """Yes or no, about so many distinct images in turn; about none where 0."""
    shown = [image_of(number, fine=fine) for number in range(images)]
    return [
        Question(parts=((shown[i % images],) if images else ()) + (f"Is it good? ({i})",), top_logprobs=TOP)
        for i in range(count)
    ]


def chat_of(*servers: Served, **options: Any) -> Any:
    judge = {"server": [server.url for server in servers], "model": "stub", **options}
    return build_chat(judge, device=torch.device("cpu"))


def lost(answers: list[Answer]) -> dict[str, int]:
    words = [answer.error for answer in answers if answer.error]
    return {word: words.count(word) for word in sorted(set(words))}


def timed(work: Callable[[], Any]) -> tuple[Any, float, float]:
    """A result, seconds, and seconds of CPU of all threads of this process."""
    cpu, begun = time.process_time(), time.monotonic()
    result = work()
    return result, time.monotonic() - begun, time.process_time() - cpu


def watched(chat: Any) -> list[int]:
    """How many requests were on their way, the new one included, whenever one was sent."""
    (line,) = chat.lines.lines
    counts, inner = [0], line.post

    async def post(body: bytes, *, timeout: float) -> Any:
        counts.append(len(line._limits) + 1)
        return await inner(body, timeout=timeout)

    line.post = post
    return counts


def load(count: int, *, images: int, fine: float = 1.4, latency: float = LATENCY, **options: Any) -> dict[str, Any]:
    """Questions at full load; the first ones, which open the connections, are not measured."""
    asked = questions_of(count, images=images, fine=fine)
    with served_judge(latency=latency, read=False) as server:
        chat = chat_of(server, **options)
        chat.ask(questions_of(CONCURRENCY, images=0))
        server.behave()
        most = watched(chat)
        clock = time.pthread_getcpuclockid(chat.lines._thread.ident)
        before = time.clock_gettime(clock)
        answers, seconds, cpu = timed(partial(chat.ask, asked))
        loop = (time.clock_gettime(clock) - before) / count
        stats = server.stats()
    rate = count / seconds
    return {
        "questions": count, "distinct_images": images, "side": SIDE if images else None, "fine": fine if images else
        None, "latency": latency,
        "options": options, "lost": lost(answers),
        "on_their_way_at_once": max(most), "seen_at_once": stats["peak"], "connections": stats["connections"],
        "client_cpu_ms_per_request": round(1e3 * cpu / count, 2), "of_that_the_loop": round(1e3 * loop, 2),
        "loop_alone_allows_per_second": round(1 / loop), "server_cpu_ms_per_request":
        round(1e3 * stats["cpu"] / stats["requests"], 2), "requests_per_second": round(rate, 1),
        "share_of_64_over_latency": round(rate * latency / CONCURRENCY, 3), "load_average": os.getloadavg()[0],
    }  # fmt: skip


def encoders() -> list[dict[str, Any]]:
    """Milliseconds of CPU and bytes of each way to send one image, the median of nine."""
    rows: list[dict[str, Any]] = []
    for fine in (1.4, 1.0):
        rows += _encoders(image_of(0, fine=fine), fine)
    return rows


def _encoders(image: np.ndarray, fine: float) -> list[dict[str, Any]]:
    rows = []
    for image_format in get_args(JudgeImageFormat):
        spent = []
        for _ in range(9):
            part, _, cpu = timed(partial(image_part, image, image_format))
            spent.append(cpu)
        cpu_ms, size = round(1e3 * float(np.median(spent)), 1), len(part) * 3 // 4
        rows.append({"fine": fine, "format": image_format, "cpu_ms": cpu_ms, "bytes_of_file": size})
    return rows


def failures() -> list[dict[str, Any]]:
    """One request in ten goes wrong: half with status 500, half with a page of HTML; then with 429 too."""
    rows = []
    for manner in ({"status_500": 0.05, "garbage": 0.05}, {"busy": 0.1, "retry_after": 0.2}):
        with served_judge(latency=LATENCY, read=False, **manner) as server:
            answers = chat_of(server).ask(questions_of(640, images=0))
            stats = server.stats()
        rows.append({"manner": manner, "questions": 640, "requests": stats["requests"], "lost": lost(answers)})
    return rows


class _Said(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[tuple[float, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append((time.monotonic(), record.getMessage()))


def deaths() -> list[dict[str, Any]]:
    """A server that takes requests and says nothing, one that is killed, and one of two that hangs, under load."""
    said, rows = _Said(), []
    logging.getLogger("flowrl.rewards.judges").addHandler(said)
    for kind in ("hangs", "is killed", "one of two hangs"):
        said.lines.clear()
        with served_judge(latency=LATENCY, read=False) as server, served_judge(latency=LATENCY, read=False) as other:
            chat = chat_of(server, other) if kind == "one of two hangs" else chat_of(server)
            chat.ask(questions_of(CONCURRENCY, images=0))
            when: list[float] = []

            def end(server: Served = server, kind: str = kind, when: list[float] = when) -> None:
                when.append(time.monotonic())
                if kind == "is killed":
                    server.process.kill()
                else:
                    server.behave(hang=True)

            timer = threading.Timer(0.5, end)
            timer.start()
            answers, seconds, _ = timed(partial(chat.ask, questions_of(960, images=0)))
            timer.join()
            row: dict[str, Any] = {
                "server": kind, "questions": 960, "lost": lost(answers), "seconds": round(seconds, 2),
                "noticed_after_seconds": [
                    round(at - when[0], 2) for at, text in said.lines if "has not answered" in text
                ],
                "said": [text.replace(server.url, "URL").replace(other.url, "OTHER") for _, text in said.lines],
            }  # fmt: skip
            if kind != "one of two hangs":
                again, seconds, _ = timed(partial(chat.ask, questions_of(64, images=0)))
                row |= {"next_64_seconds": round(seconds, 3), "next_64_lost": lost(again)}
            if kind == "hangs":
                server.behave(hang=False)
                begun = time.monotonic()
                while chat.lines.dead:
                    time.sleep(0.05)
                row["back_after_seconds"] = round(time.monotonic() - begun, 2)
                row["lost_then"] = lost(chat.ask(questions_of(64, images=0)))
        rows.append(row)
        print(json.dumps(row), flush=True)
    return rows


def main(out: str) -> None:
    """Measures, prints and writes."""
    found: dict[str, Any] = {"encoders": encoders(), "load": []}
    print(json.dumps(found["encoders"]), flush=True)
    for count, given in (
        (640, {"images": 0}),
        (512, {"images": 64}),
        (128, {"images": 128}),
        (128, {"images": 128, "latency": 2.0}),
        (32, {"images": 32, "image_format": "webp"}),
        (32, {"images": 32, "image_format": "png"}),
    ):
        found["load"].append(load(count, **given))  # type: ignore[arg-type]
        print(json.dumps(found["load"][-1]), flush=True)
    found |= {"failures": failures(), "deaths": deaths()}
    print(json.dumps(found["failures"]), flush=True)
    Path(out).write_text(json.dumps({**origin(), **found}, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
