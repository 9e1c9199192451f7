"""Two iterations of a configuration by its own recipe, as `flowrl bench` trains them, with as few prompts as can be."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from flowrl.config.train import TrainConfig
from flowrl.health.diagnosis import Check
from flowrl.health.spoken import divided, faulty
from flowrl.planning.published_models import in_cache
from flowrl.profiling.iterations import run_iterations, settings_of, with_prompts
from flowrl.profiling.subject import CANNOT_LOAD, BenchSubject, prepare
from flowrl.runtime.failures import explain
from flowrl.training.model_files import location_of

_ITERATIONS = 2  # the first warms up


def step_checks(config: TrainConfig, name: str, *, hindered: bool) -> Iterator[Check]:
    """Throughput and memory of an iteration, and what the recipe says of it; no weights are downloaded.

    Args:
        hindered: whether something was found that stops a run anyway.
    """
    if why := _left_out(config, hindered=hindered):
        yield Check("step", "note", f"not tried: {why}")
        return
    try:
        subject = prepare(config, name, random_weights=False, layers=None)
        few = fewest(subject)
        rows = run_iterations(subject, replace(few, num_iterations=_ITERATIONS))
    except (*CANNOT_LOAD, MemoryError) as error:
        yield faulty("step", explain(error))
        return
    for reward, reason in subject.absent:
        yield Check("step", "note", f"without the reward {reward}: {reason}")
    yield from _said(rows, config)
    row, images = rows[-1], few.num_images
    seconds, share = row["seconds"], config.prompts_per_step / few.prompts_per_step
    hours = seconds * share * config.num_iterations / 3600
    peak = row.get("memory/peak_gib")
    memory = (
        f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.1f} GiB of memory"
        if peak is None
        else f"{peak:.1f} GiB of the GPU"
    )
    yield Check(
        "step",
        "ok",
        f"{images} images trained on in {seconds:.2g} s ({images / seconds:.2g} a second), with at most {memory}; "
        f"{config.num_iterations} iterations of {config.num_images} images take about {hours:.2g} h on one such "
        "device, without evaluations",
    )


def _left_out(config: TrainConfig, *, hindered: bool) -> str:
    if hindered:
        return "fix what is marked above first"
    if config.policy.train == "full" or config.parallel.shard * config.parallel.context > 1:
        return "this step is for one process that trains a LoRA; run flowrl train with num_iterations=2 instead"
    model = location_of(config.pipeline)
    if not (Path(model).exists() or in_cache(model)):
        return f"the weights of {model} are not here; flowrl bench measures random ones of its size"
    return ""


def fewest(subject: BenchSubject) -> TrainConfig:
    """The configuration of whole iterations with as few prompts as its other settings allow."""
    return next(with_prompts(subject, range(1, subject.config.prompts_per_step)), settings_of(subject))


def _said(rows: list[dict[str, Any]], config: TrainConfig) -> Iterator[Check]:
    """What is wrong in the iterations by their own log."""
    failed = max(row.get("invalid_ratio", 0.0) for row in rows)
    if failed > 0:
        reasons = {key.partition("/")[2] for row in rows for key in row if key.startswith("reward_errors/")}
        yield Check(
            "step",
            "fault" if failed > config.max_invalid_ratio else "warning",
            f"{failed:.0%} of the images got no valid reward ({', '.join(sorted(reasons)) or 'no reason given'})",
            "fix the reward or its server: what fails teaches nothing, and beyond max_invalid_ratio "
            f"({config.max_invalid_ratio:g}) the run stops",
        )
    warned: dict[str, str] = {}
    for row in rows:
        warned = dict(row.get("warnings", {})) | warned
    for sentence in warned.values():
        yield Check("step", "warning", *divided(sentence))
