"""Computes how long a run takes on a card, as one number and its range in hours, and its cost."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from flowrl.config.base import USUAL
from flowrl.config.train import TrainConfig, load_config, mapping_of
from flowrl.planning.cost import cost_of, negative_again, of_run
from flowrl.planning.gather import Plan
from flowrl.planning.memory import MemorySettings, base_bytes
from flowrl.planning.throughput import PEAKS, SHARES

LINKS = {"4090": 32.0, "A100": 300.0, "L40S": 32.0, "H100": 450.0, "H200": 450.0, "B200": 900.0}
"""GPU -> GB/s that it receives from others of its machine, by the makers' data sheets: NVLink, or PCIe 4."""
NETWORK = 50.0
"""GB/s that a card receives from other machines, with an adapter of 400 Gb/s for each card."""
TOO_LONG = 30 * 24.0
"""Hours beyond which nobody waits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Speed:
    """The hardware of a run: `cards` processors called `name`, each at `slow` to `fast` TFLOP/s."""

    name: str
    slow: float
    fast: float
    cards: int

    def hours(self, flops: float) -> Hours:
        """Time of so many FLOPs, split evenly."""
        most, least = (flops / (pace * 1e12 * self.cards * 3600) for pace in (self.slow, self.fast))
        return Hours(least=least, most=most)

    def __str__(self) -> str:
        return f"one {self.name}" if self.cards == 1 else f"{self.cards} {self.name}s"


@dataclass(frozen=True, kw_only=True, slots=True)
class Hours:
    """A time between `least` and `most`, in hours; `middle`, the number to plan with, is their geometric mean."""

    least: float
    most: float

    @property
    def middle(self) -> float:
        """Geometric mean of `least` and `most`, in hours."""
        return math.sqrt(self.least * self.most)

    def __str__(self) -> str:
        if self.least == self.most:
            return f"about {in_time(self.middle)}"
        least, most = in_time(self.least).split(), in_time(self.most).split()
        return f"about {in_time(self.middle)} ({' '.join(least[: 1 + (least[1] != most[1])])} to {' '.join(most)})"


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """FLOPs of one iteration and of one evaluation, and how many there are."""

    iteration: float
    iterations: int
    evaluation: float
    evaluations: int

    @property
    def total(self) -> float:
        """FLOPs of the run."""
        return self.iteration * self.iterations + self.evaluation * self.evaluations


def speed_of(plan: Plan, card: int | None, cards: int) -> Speed:
    """The pace of a card of so many GB: that of the plan, or else that of its `usual_card`."""
    if plan.pace.range is not None:
        slow, fast = plan.pace.range
        return Speed(name=plan.pace.processor, slow=slow, fast=fast, cards=cards)
    usual = usual_card(card)
    slow, fast = (PEAKS[usual] * share for share in SHARES)
    name = usual if card in (None, *USUAL) else f"{usual}-class card"
    return Speed(name=name, slow=slow, fast=fast, cards=cards)


def usual_card(card: int | None) -> str:
    """The usual GPU with the most memory up to so many GB."""
    return USUAL[max((size for size in USUAL if size <= (card or 0)), default=min(USUAL))]


def gathered_bytes(plan: Plan, chosen: MemorySettings) -> tuple[float, float]:
    """Bytes that each process of split weights receives in an iteration, and that copies of trained weights exchange.

    A network call gathers the parts of one expert, its backward pass once more, and adds gradients up in float32. Calls
    are of full batches. Copies add up their gradients once an update. Raises ValueError: the dimensions are unknown.
    """
    facts, total, shard = plan.facts, plan.run.total, chosen.shard
    if facts is None:
        raise ValueError(f"the traffic of {plan.name} is not known: {plan.unknown}")
    walked = total.backward / chosen.micro_batch_size
    calls = (total.rollout + total.completion) / chosen.rollout_batch_size
    calls += (total.update + total.reference) / chosen.micro_batch_size + walked
    trained = 4 * facts.network.trained * facts.full
    moved = calls * base_bytes(facts.network.weights, chosen.quantize, facts.dtype[1]) + walked * trained
    moved *= (1 - 1 / shard) / facts.network.weights.experts / facts.passes[0] / chosen.ranks / plan.run.iterations
    copies = chosen.processes // (shard * chosen.context)
    return moved, 2 * trained / shard * (1 - 1 / copies) * plan.config.updates_per_rollout


def changed(config: TrainConfig, settings: Sequence[str]) -> TrainConfig:
    """A configuration with other settings, `key=value`, checked like a file. Raises ConfigError: they contradict."""
    return load_config(mapping_of(config), settings)


def work_of(plan: Plan, config: TrainConfig) -> Work:
    """A run's work; settings keep model, size and evaluation prompts. Raises ValueError: dimensions are unknown."""
    network, cost = plan.network, plan.cost
    if network is None or cost is None:
        raise ValueError(f"the time of {plan.name} is not known: {plan.unknown}")
    ranks = max(1, plan.processes // config.parallel.context)
    run = plan.run if config is plan.config else of_run(config, plan.passes, ranks, None)
    recomputed = config.pipeline.gradient_checkpointing and network.blocks > 0
    made = cost_of(
        network,
        run,
        eval_forward=0.0,
        decode=None if cost.decoding is None else cost.decoding / max(1, plan.run.total.images),
        eval_decode=None,
        recomputed=recomputed + negative_again(config, plan.passes),
    )
    return Work(
        iteration=made.training / run.iterations,
        iterations=run.iterations,
        evaluation=(cost.evaluation or 0.0) / max(1, plan.run.evaluations),
        evaluations=run.evaluations,
    )


def in_time(hours: float) -> str:
    """Two digits and a unit: seconds to years."""
    for size, unit in ((2 * 365.25 * 24, "years"), (48.0, "days"), (1.0, "h"), (1 / 60, "min")):
        if hours >= size:
            return f"{rounded(hours / {'years': 365.25 * 24, 'days': 24.0}.get(unit, size))} {unit}"
    return f"{rounded(max(1.0, hours * 3600))} s"


def rounded(value: float) -> str:
    """A number in two digits, with commas."""
    return f"{float(f'{value:.2g}'):,.9g}"
