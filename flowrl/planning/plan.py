"""`flowrl.plan`: what a run will do and need, before anything is downloaded. Nothing heavy is imported at its head."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flowrl.config.base import config_for_card, named_config
from flowrl.config.train import TrainConfig
from flowrl.planning.light_libraries import light_libraries
from flowrl.planning.throughput import pace
from flowrl.runtime.public import public
from flowrl.session.preflight import load_checked

if TYPE_CHECKING:
    from flowrl.planning.gather import Plan
    from flowrl.planning.refusals import Obstacles


CACHE = "data/embeddings"
"""Where a run that fits a card without its text encoders keeps embeddings."""


class RefusedError(ValueError):
    """`flowrl train` would refuse the configuration: `reasons`, a paragraph each."""

    def __init__(self, reasons: Sequence[str]) -> None:
        super().__init__("; ".join(reasons))
        self.reasons = tuple(reasons)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RunPlan:
    """What a run will do and need; estimates from counted tensors and operations, not measurements.

    Attributes:
        name: the name of the configuration.
        text: the whole plan, as `flowrl plan` prints it.
        verdict: whether the run fits a card, and with which settings.
        peak_bytes: the most memory of a process; None if the model's dimensions are not known.
        flops: FLOPs of the whole run, evaluations included; None likewise.
        iterations: iterations of the run.
        missing: what you have to put in place before the run starts.
    """

    name: str
    text: str = field(repr=False)
    verdict: str
    peak_bytes: int | None
    flops: float | None
    iterations: int
    missing: tuple[str, ...]

    def __str__(self) -> str:
        return self.text

    def _repr_html_(self) -> str:
        from flowrl.rendering.markup import code
        from flowrl.rendering.notebook import heading

        return heading(self.name, self.verdict) + code(self.text)


@public
def plan(
    config: str | Path | Mapping[str, Any] = "tiny_g2rpo",
    *,
    card: int | None = None,
    processes: int | None = None,
    tflops: float | None = None,
    bench: str | Path | None = None,
    **settings: Any,
) -> RunPlan:
    """Says what a run will do and need; loads no weights and downloads nothing.

    Args:
        config: a YAML file, the name of one that ships, or a mapping of settings.
        card: memory of the card in GB; None takes the smallest usual card that holds the run as it is.
        processes: number of GPUs; None takes what `parallel.replicate` copies of the model need, or one copy.
        tflops: sustained TFLOP/s of one GPU, to tell the hours.
        bench: a bench.json of `flowrl bench`, or its folder, to tell the hours.
        **settings: replace those of the configuration, as in `train`.

    Raises:
        RefusedError: `flowrl train` would refuse the configuration.
        ValueError: it cannot be read, its processes do not fit together, or its model cannot draw the configured size.

    >>> planned = flowrl.plan("tiny_g2rpo", num_iterations=10)
    >>> planned.iterations, planned.peak_bytes < 4 * 2**30
    (10, True)
    """
    if tflops is not None and not tflops > 0:
        raise ValueError(f"`tflops` must be above 0, got {tflops:g}")
    if tflops is not None and bench is not None:
        raise ValueError("`tflops` and `bench` both say how fast a GPU is: leave one of them out")
    given, card = config_for_card(config if isinstance(config, Mapping) else str(config), card)
    path, name = named_config(given)
    chosen = load_checked(path, settings, here=False)
    processes = _check_processes(chosen, processes)
    with light_libraries(chosen):
        made, found = make_plan(chosen, name, processes, tflops=tflops, bench=None if bench is None else str(bench))
        from flowrl.planning.text import as_text
        from flowrl.planning.verdict import card_of, verdict

        card = card or card_of(name)
        return RunPlan(
            name=made.name,
            text=as_text(made, found, card),
            verdict=" ".join(" ".join(line.split()) for line in verdict(made, card)),
            peak_bytes=None if made.memory is None else made.memory.peak,
            flops=None if made.cost is None else made.cost.total,
            iterations=made.run.iterations,
            missing=(*found.absent, *found.device),
        )


def for_card(config: TrainConfig, name: str, card: int) -> tuple[str, ...]:
    """The least settings, as `key=value`, with which a process of a run fits a card of so many GB; none where it does.

    Embeddings are kept in a folder where text encoders go, so that another run need not encode the prompts again.

    Raises:
        RefusedError: `flowrl train` would refuse the configuration.
        ValueError: no setting makes it fit, or nothing is known of the model.
    """
    from flowrl.planning.verdict import changes_for
    from flowrl.training.processes.launched import num_launched

    made, _ = make_plan(config, name, max(num_launched(), _check_processes(config, None)))
    changes = changes_for(made, card)
    freed = config.pipeline.free_text_encoders or "pipeline.free_text_encoders=true" in changes
    caches = changes and freed and config.prompts.cache is None
    return (*changes, f"prompts.cache={CACHE}") if caches else changes


def make_plan(
    config: TrainConfig, name: str, processes: int, *, tflops: float | None = None, bench: str | None = None
) -> tuple[Plan, Obstacles]:
    """The plan of a run of so many processes, and what stands in its way.

    Raises:
        RefusedError: `flowrl train` would refuse the configuration.
        ValueError: processes do not fit together, or the model cannot draw the configured size.
    """
    from flowrl.planning.gather import gather
    from flowrl.planning.refusals import obstacles
    from flowrl.training.parts import model_family
    from flowrl.training.processes.devices import device_kind
    from flowrl.training.processes.mesh import layout_of

    layout_of(config.parallel, processes)
    family = model_family(config.pipeline)
    found = obstacles(config, family, processes)
    if found.refused:
        raise RefusedError(found.refused)
    found_pace = pace(config, tflops, bench)
    device = config.pipeline.device
    processor = "CPU" if device == "cpu" or (found_pace.measured and device_kind(device) == "cpu") else "GPU"
    return gather(config, name, family, processes=processes, pace=found_pace, processor=processor), found


def _check_processes(config: TrainConfig, processes: int | None) -> int:
    """Processes of a run, checked before anything heavy is imported."""
    parallel = config.parallel
    copy = parallel.shard * parallel.context
    processes = copy * (parallel.replicate or 1) if processes is None else processes
    if processes % copy == 0:  # else `layout_of` refuses it
        config.resolve_batch(processes // parallel.context)
    return processes
