"""`flowrl.plan`: what a run will do and need, before anything is downloaded. Nothing heavy is imported at its head."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flowrl.config.base import card_memory, config_for_card, named_config
from flowrl.config.train import TrainConfig
from flowrl.planning.bases import Wish, is_model
from flowrl.planning.light_libraries import light_libraries
from flowrl.planning.throughput import pace
from flowrl.runtime.files import write_atomically
from flowrl.runtime.public import public
from flowrl.session.preflight import load_checked

if TYPE_CHECKING:
    from flowrl.planning.gather import Plan
    from flowrl.planning.outlook import Outlook
    from flowrl.planning.refusals import Obstacles


CACHE = "data/embeddings"
"""Folder for the embeddings of a run that fits a card only without its text encoders."""


Make = Callable[[TrainConfig, str, int], "tuple[Plan, Obstacles]"]
"""The plan of a configuration, a name and a number of processes."""
SMALLER_RANKS = (32, 16)
"""Ranks of a LoRA to try if nothing else makes a first run fit."""


class RefusedError(ValueError):
    """`flowrl train` would refuse the configuration; `reasons` has a paragraph for each reason."""

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
        peak_bytes: the peak memory of a process; None if the model's dimensions are unknown.
        flops: FLOPs of the whole run, evaluations included; None likewise.
        iterations: iterations of the run.
        missing: what you have to put in place before the run starts.
        hours: least, expected and most hours of the run on the card; None if unknown.
        configuration: the YAML of the planned run, if you asked for one that ends within some hours; else None.
    """

    name: str
    text: str = field(repr=False)
    verdict: str
    peak_bytes: int | None
    flops: float | None
    iterations: int
    missing: tuple[str, ...]
    hours: tuple[float, float, float] | None = None
    configuration: str | None = field(default=None, repr=False)

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
    card: int | str | None = None,
    processes: int | None = None,
    cards: str | None = None,
    tflops: float | None = None,
    bench: str | Path | None = None,
    price: float | None = None,
    hours: float | None = None,
    out: str | Path | None = None,
    long: bool = False,
    **settings: Any,
) -> RunPlan:
    """Plans what a run will do and need; loads no weights and downloads nothing.

    Args:
        config: a YAML file, the name of one that ships, a mapping of settings, or a model (a hub id, a folder,
            asset:tiny-sd3), to plan its first run by the recommended recipe.
        card: GB of the card, or its name, "4090"; None takes the smallest usual card that holds the run unchanged.
        processes: number of GPUs; None takes what `parallel.replicate` copies of the model need, or one copy.
        cards: both, as in "8x80", eight cards of 80 GB.
        tflops: sustained TFLOP/s of one GPU, to estimate the hours.
        bench: a bench.json of `flowrl bench`, or its folder, to estimate the hours.
        price: price of one card for an hour, in your currency, to estimate the cost.
        hours: plan the run that fits the card and ends within so many hours, by the rule of `flowrl.planning.shorter`.
        out: file to write that run's configuration to; None writes none.
        long: write all that is known instead of a page.
        **settings: replace those of the configuration, as in `train`.

    Raises:
        RefusedError: `flowrl train` would refuse the configuration.
        ValueError: it cannot be read, its processes do not fit together, its model cannot draw the configured size, or
            nothing of it fits the card and ends within `hours`.

    >>> planned = flowrl.plan("tiny_g2rpo", num_iterations=10)
    >>> planned.iterations, planned.peak_bytes < 4 * 2**30
    (10, True)
    """
    processes, card = number_and_memory(cards, processes, card_memory(card))
    refuse_given(tflops=tflops, bench=bench, price=price, hours=hours, out=out)
    given, card = config_for_card(config if isinstance(config, Mapping) else str(config), card)
    make = partial(make_plan, tflops=tflops, bench=None if bench is None else str(bench))
    with planned_settings(given, card, settings) as (chosen, name, base, ranks):
        from flowrl.planning.outlook import outlook_of, outlook_words
        from flowrl.planning.verdict import card_of
        from flowrl.planning.written import text_of

        card, words, text = card or card_of(name), list[str](), None
        if hours is not None:
            card = card or 24
            chosen, words = in_time(chosen, name, card, hours, ranks=ranks, processes=processes, make=make)
        made, found = make(chosen, name, _check_processes(chosen, processes))
        outlook = outlook_of(made, card, price)
        fits = outlook.found is None or (outlook.found.overrides is not None and not splits(outlook.found.overrides))
        if hours is None and ranks and not fits:
            with suppress(ValueError):  # then no rank does either
                smaller, words = in_time(chosen, name, outlook.card, None, ranks=ranks, processes=processes, make=make)
                if not splits(words):
                    chosen = smaller
                    made, found = make(chosen, name, _check_processes(chosen, processes))
                    fitted = outlook_of(made, card, price)
                    outlook = replace(fitted, advice=(f"set for this card: {' '.join(words)}", *fitted.advice))
        if hours is not None:
            head = [f"Written by flowrl plan for {name} on cards of {card} GB, to end within {hours:g} h."]
            head += [*outlook_words(made, outlook), *outlook.advice]
            text = text_of(chosen, base, head, {word.partition("=")[0] for word in words})
            if out is not None:
                write_atomically(Path(out), text)
        return told(made, found, outlook, text, long=long)


def number_and_memory(cards: str | None, processes: int | None, card: int | None) -> tuple[int | None, int | None]:
    """Number of cards and GB of each, of "8x80". Raises ValueError: it is none, or says again what is given."""
    if cards is None:
        return processes, card
    found = re.fullmatch(r"([1-9]\d*)\s*x\s*(.+)", cards)
    if found is None:
        raise ValueError(f"`cards` is a number of cards and the GB of each, such as 8x80 or 8xH100, got {cards!r}")
    number, memory = int(found[1]), card_memory(found[2])
    if (processes or number, card or memory) != (number, memory):
        raise ValueError(f"`cards` is {cards}, and `processes` or `card` says something else: leave them out")
    return number, memory


def refuse_given(**given: Any) -> None:
    """Refuses arguments of a plan that are impossible or contradict each other."""
    for key in ("tflops", "price", "hours"):
        if given[key] is not None and not given[key] > 0:
            raise ValueError(f"`{key}` must be above 0, got {given[key]:g}")
    if given["tflops"] is not None and given["bench"] is not None:
        raise ValueError("`tflops` and `bench` both say how fast a GPU is: leave one of them out")
    if given["out"] is not None and given["hours"] is None:
        raise ValueError("`out` is written for some `hours`: give both, or neither")
    if given["out"] is not None and Path(given["out"]).exists():
        raise ValueError(f"{given['out']} exists already: name another file with `out`, or move it away")


def in_time(
    config: TrainConfig,
    name: str,
    card: int,
    hours: float | None,
    *,
    ranks: Sequence[int] = (),
    processes: int | None = None,
    make: Make | None = None,
) -> tuple[TrainConfig, list[str]]:
    """The run that fits cards of so many GB and ends within so many hours, and the settings, `key=value`, for this.

    Args:
        hours: None keeps the length.
        ranks: ranks of the LoRA, descending, to try if nothing else makes the run fit.
        make: makes its plan; None is `make_plan`.

    Raises:
        RefusedError: `flowrl train` would refuse the configuration.
        ValueError: nothing makes it fit, or no length ends in time.
    """
    from flowrl.planning.hours import changed
    from flowrl.planning.shorter import settings_in_time
    from flowrl.planning.verdict import changes_for

    policy, fitting = config.policy, None
    for rank in (None, *(one for one in ranks if one < policy.rank)):
        smaller = [] if rank is None else [f"policy.lora_rank={rank}"]
        if rank is not None and policy.lora_alpha is not None:
            smaller.append(f"policy.lora_alpha={max(1, policy.lora_alpha * rank // policy.rank)}")
        tried = changed(config, smaller)
        made, _ = (make or make_plan)(tried, name, _check_processes(tried, processes))
        if made.facts is None:  # nobody knows whether it fits
            return tried, smaller
        try:
            changes = changes_for(made, card)
        except ValueError as error:
            last = error
            continue
        if fitting is None or not splits(changes):
            fitting = tried, made, smaller
        if not splits(changes):  # else a smaller LoRA may do without more cards
            break
    if fitting is None:
        raise last
    tried, made, smaller = fitting
    words = settings_in_time(made, card, hours)
    return changed(tried, words), [*smaller, *words]


def splits(changes: Iterable[str]) -> bool:
    """Whether changes of a run split its denoiser over cards."""
    return any(change.startswith("parallel.shard=") for change in changes)


def told(made: Plan, found: Obstacles, outlook: Outlook, configuration: str | None, *, long: bool) -> RunPlan:
    """A plan in words and numbers for the caller."""
    from flowrl.planning.text import as_text, brief_text
    from flowrl.planning.verdict import verdict

    own = outlook.own
    return RunPlan(
        name=made.name,
        text=(as_text if long else brief_text)(made, found, outlook),
        verdict=" ".join(" ".join(line.split()) for line in verdict(made, outlook.card)),
        peak_bytes=None if made.memory is None else made.memory.peak,
        flops=None if made.cost is None else made.cost.total,
        iterations=made.run.iterations,
        missing=(*found.absent, *found.device),
        hours=None if own is None else (own.hours.least, own.hours.middle, own.hours.most),
        configuration=configuration,
    )


@contextmanager
def planned_settings(
    given: str | Mapping[str, Any], card: int | None, settings: Mapping[str, Any]
) -> Iterator[tuple[TrainConfig, str, str | None, tuple[int, ...]]]:
    """A context with light stand-ins of libraries; gives the settings of a run (or of a model's first run), name, base,
    and further LoRA ranks to try."""
    if isinstance(given, str) and not Path(given).is_file() and is_model(given):
        with light_libraries(None):
            from flowrl.planning.first_run import first_run

            first = first_run(Wish(model=given, card=card or 0, recommended=True), settings)
            yield first.config, Path(given.removeprefix("asset:")).name, first.base, SMALLER_RANKS
        return
    try:
        path, name = named_config(given)
    except ValueError as error:
        from flowrl.pipelines.places.hub_files import did_you_mean

        raise ValueError(f"{error}; or a model{did_you_mean(str(given))}") from None
    chosen = load_checked(path, settings, here=False)
    with light_libraries(chosen):
        yield chosen, name, None if isinstance(path, Mapping) else str(path), ()


def for_card(config: TrainConfig, name: str, card: int) -> tuple[str, ...]:
    """The least settings, as `key=value`, with which a process of a run fits a card of so many GB; none if it fits.

    If text encoders are freed, a folder keeps the embeddings, so that another run need not encode the prompts. Raises
    RefusedError: `flowrl train` would refuse the configuration. Raises ValueError: no setting makes it fit, or nothing
    is known of the model.
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
    """The plan of a run with so many processes, and its obstacles. Raises RefusedError: `flowrl train` would refuse the
    configuration. Raises ValueError: processes do not fit together, or the model cannot draw the configured size."""
    from flowrl.planning.gather import gather
    from flowrl.planning.refusals import obstacles
    from flowrl.training.parts import model_family
    from flowrl.training.processes.mesh import layout_of

    layout_of(config.parallel, processes)
    family = model_family(config.pipeline)
    found = obstacles(config, family, processes)
    if found.refused:
        raise RefusedError(found.refused)
    return gather(config, name, family, processes=processes, pace=pace(config, tflops, bench)), found


def _check_processes(config: TrainConfig, processes: int | None) -> int:
    """Processes of a run, checked before anything heavy is imported."""
    parallel = config.parallel
    copy = parallel.shard * parallel.context
    processes = copy * (parallel.replicate or 1) if processes is None else processes
    if processes % copy == 0:  # else `layout_of` refuses it
        config.resolve_batch(processes // parallel.context)
    return processes
