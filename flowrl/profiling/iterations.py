"""Times whole iterations of the recipe itself in a temporary folder: the same code as in `flowrl train`."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from flowrl.config.methods import BudgetConfig
from flowrl.config.train import TrainConfig
from flowrl.planning.cost import of_iteration
from flowrl.profiling.ceilings import GEMM, exact_ceiling
from flowrl.profiling.parts import decoding_flops
from flowrl.profiling.result import USED, WHOLE, Phase, TimeSpread
from flowrl.profiling.stopwatch import Stopwatch
from flowrl.profiling.subject import BenchSubject, joined_reward
from flowrl.recipes.counting import Counts
from flowrl.runtime.temporary import TemporaryFolder
from flowrl.session.advice import sizes_line
from flowrl.session.preflight import recipe_of, resolve
from flowrl.training.resume_check import inputs_of
from flowrl.training.run import Run

ITERATIONS = 3  # of which the first is left out
_RATIO = "ratio_first_deviation"


class _Watched(Run):
    """A run that keeps its rows, and the CPU seconds at each."""

    def log(self, row: Mapping[str, Any]) -> None:
        """Keeps a row with its time, and writes it."""
        self.rows = [*self.__dict__.get("rows", []), dict(row) | {"cpu": time.process_time()}]
        super().log(row)


def iteration(subject: BenchSubject, watch: Stopwatch, pace: float | None) -> Iterator[Phase]:
    """Three iterations with the first left out: the whole, and its stages. `pace` is in FLOPs a second, if known."""
    config, told = fitting(subject, watch.left, pace)
    if config is None:
        yield Phase(section="iteration", name=WHOLE, note=told)
        return
    rows = run_iterations(subject, config)
    if len(rows) < 2:
        yield Phase(section="iteration", name=WHOLE, note="not measured: the recipe logged no second iteration")
        return
    yield from phases_of(subject, config, rows, told)


def run_iterations(subject: BenchSubject, config: TrainConfig) -> list[dict[str, Any]]:
    """The rows that the recipe logs."""
    with TemporaryFolder("flowrl-bench-") as name, subject.unchanged_weights():
        inputs = inputs_of(config, subject.prompts)
        reward = joined_reward(subject)
        run = _Watched(
            Path(name),
            config,
            name=subject.name,
            inputs=inputs,
            resumed=False,
            parts=(subject.pipeline, subject.policy, reward),
        )
        recipe_of(config).main(resolve(config, subject.prompts), run)
        return [row for row in run.rows if "seconds" in row]


def settings_of(subject: BenchSubject) -> TrainConfig:
    """The configuration of whole iterations: nothing is evaluated, and only the end is saved."""
    config = subject.config
    return replace(
        config, num_iterations=ITERATIONS, budget=BudgetConfig(), checkpoint_every=ITERATIONS + 1, progress=False,
        max_invalid_ratio=1.0, out=None, logging=replace(config.logging, tensorboard=False),
    )  # fmt: skip


def with_prompts(subject: BenchSubject, numbers: Iterable[int]) -> Iterator[TrainConfig]:
    """The configuration of whole iterations with each of some numbers of prompts that its other settings allow."""
    for prompts in numbers:
        try:
            config = replace(settings_of(subject), prompts_per_step=prompts)
            config.resolve_batch(1)
            recipe_of(config).check(config)
        except ValueError:  # a number that the settings do not divide into
            continue
        if sizes_line(config, 1) and not sizes_line(subject.config, 1):  # smaller batches than the run's
            continue
        yield config


def fitting(subject: BenchSubject, seconds: float, pace: float | None) -> tuple[TrainConfig | None, str]:
    """The configuration with as many prompts per iteration as time allows; None and the reason if time allows none."""
    wanted = subject.config.prompts_per_step
    for config in with_prompts(subject, [count for count in range(wanted, 0, -1) if wanted % count == 0]):
        if foreseen(subject, config, pace) * ITERATIONS <= seconds:
            prompts = config.prompts_per_step
            fewer = f"{prompts} of {wanted} prompts an iteration, for want of minutes"
            return config, "" if prompts == wanted else fewer
    return None, "not measured: not even one prompt an iteration fits into the minutes that are left"


def foreseen(subject: BenchSubject, config: TrainConfig, pace: float | None) -> float:
    """Seconds of an iteration's network evaluations and decoding at a pace; 0 if unknown."""
    if pace is None:
        return 0.0
    counts = of_iteration(config, 1, subject.pipeline.passes, config.resolve_batch(1))  # as `flowrl plan` counts
    return flops_of(subject, counts) / pace


def flops_of(subject: BenchSubject, counts: Counts) -> float:
    """FLOPs of an iteration's network and decoder."""
    return (
        subject.forward_flops(counts.forward)
        + subject.backward_flops(counts.backward)
        + counts.images * decoding_flops(subject)
    )


def phases_of(subject: BenchSubject, config: TrainConfig, rows: list[dict[str, Any]], told: str) -> Iterator[Phase]:
    """The whole iteration and its stages on the clock, of the rows after the first; `USED` on a CPU."""
    timed = rows[1:]
    used = [after["cpu"] - before["cpu"] for before, after in zip(rows, timed, strict=False)]
    wall = TimeSpread.of([row["seconds"] for row in timed])
    kinds = ("rollout", "completion", "update", "reference", "backward")
    sums = {kind: rows[-1].get(f"nfe/{kind}", 0) - rows[0].get(f"nfe/{kind}", 0) for kind in kinds}  # rows hold totals
    done = {kind: round(total / (len(rows) - 1)) for kind, total in sums.items()}  # by an iteration after the first
    counts = Counts(**done, images=int(timed[-1].get("num_scored", config.num_images)))
    ratio = max((row[_RATIO] for row in rows if row.get(_RATIO) is not None), default=None)
    peak = max((row["memory/peak_gib"] for row in rows if "memory/peak_gib" in row), default=None)
    whole = Phase(
        section="iteration", name=WHOLE, seconds=wall, wall=wall, repeats=len(timed), rows=counts.forward,
        items=config.num_images, flops=flops_of(subject, counts),
        recomputed=subject.forward_flops(counts.backward) * config.pipeline.gradient_checkpointing,
        ceiling=GEMM, note=told,
        peak_bytes=None if peak is None else int(peak * 2**30), ratio_first_deviation=ratio,
    )  # fmt: skip
    on_cpu = subject.device.type == "cpu"
    yield replace(whole, ceiling="") if on_cpu else whole
    if on_cpu:
        yield replace(whole, name=USED, seconds=TimeSpread.of(used), note="", ratio_first_deviation=None)
    drawn, updated = counts.rollout + counts.completion, counts.update + counts.reference
    asked: dict[str, dict[str, Any]] = {
        "reward": {
            "items": counts.images,
            "flops": counts.images * decoding_flops(subject),
            "ceiling": exact_ceiling(subject),
        },
        "rollout": {"rows": drawn, "flops": subject.forward_flops(drawn), "ceiling": GEMM},
        "update": {
            "rows": updated,
            "flops": subject.forward_flops(updated) + subject.backward_flops(counts.backward),
            "recomputed": whole.recomputed,
            "ceiling": GEMM,
        },
    }
    for stage, seconds in _seconds_of_stages(timed).items():
        spread = TimeSpread.of(seconds)
        yield Phase(
            section="iteration",
            name=stage,
            seconds=spread,
            wall=spread,
            repeats=len(timed),
            **asked.get(stage, {}) | ({"ceiling": ""} if on_cpu else {}),
        )


def _seconds_of_stages(rows: list[dict[str, Any]]) -> dict[str, list[float]]:
    """Seconds of each stage, the usual ones first and in their order, and of what is in none."""
    found = {key.removeprefix("seconds/") for row in rows for key in row if key.startswith("seconds/")} - {"total"}
    usual = [name for name in ("pairs", "rollout", "reward", "update") if name in found]
    names = [*usual, *sorted(found.difference(usual))]
    stages = {name: [row.get(f"seconds/{name}", 0.0) for row in rows] for name in names}
    return stages | {"other": [row["seconds"] - sum(parts) for row, *parts in zip(rows, *stages.values(), strict=True)]}
