"""`flowrl plan`: checks a configuration, prints its plan; exit code 1 where `flowrl train` would refuse it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flowrl.config.base import named_config
from flowrl.config.locations import is_path, split_revision
from flowrl.config.train import TrainConfig
from flowrl.planning.catalogue import families
from flowrl.planning.light_libraries import import_lightly, without_compiler
from flowrl.planning.throughput import pace
from flowrl.runtime.files import read_json
from flowrl.runtime.scrubbing import say as print
from flowrl.session.preflight import load_checked

if TYPE_CHECKING:
    from flowrl.planning.gather import Plan
    from flowrl.planning.refusals import Obstacles


@dataclass(frozen=True, kw_only=True, slots=True)
class Planned:
    """A plan, what stands in its way, and the card in GB that is to hold the run; no plan where it is refused."""

    plan: Plan | None
    found: Obstacles
    card: int | None


def run(parsed: argparse.Namespace) -> int:
    """Prints the plan of a configuration and returns the exit code: 1 where a setting has to be changed.

    Raises:
        ValueError: as `planned`.
    """
    made = planned(parsed)
    from flowrl.planning.plan_text import as_text  # it imports what `planned` imports in its own way

    if made.plan is None:
        for reason in made.found.refused:
            print(f"flowrl: {reason}", file=sys.stderr)
        return 1

    print(as_text(made.plan, made.found, made.card))
    return 0


def planned(parsed: argparse.Namespace) -> Planned:
    """Plans a configuration: `parsed.config` is a file, the name of one that ships, or a mapping of settings.

    Raises:
        ValueError: the configuration cannot be read, its processes do not fit together, or its model cannot draw the
            configured size.
    """
    if parsed.tflops is not None and not parsed.tflops > 0:
        raise ValueError(f"--tflops must be above 0, got {parsed.tflops:g}")
    if parsed.tflops is not None and parsed.bench is not None:
        raise ValueError("--tflops and --bench both say how fast a GPU is: leave one of them out")
    path, name = named_config(parsed.config)
    config = load_checked(path, parsed.overrides, here=False)
    parallel = config.parallel
    copy = parallel.shard * parallel.context
    if parsed.processes is None:
        parsed.processes = copy * (parallel.replicate or 1)
    if parsed.processes % copy == 0:  # else `layout_of` refuses it
        config.resolve_batch(parsed.processes // parallel.context)  # before anything heavy is imported
    if _names_file(asdict(config)) or _is_stock(config):
        return _plan(config, name, parsed)
    import_lightly()
    with without_compiler():
        return _plan(config, name, parsed)


def _plan(config: TrainConfig, name: str, parsed: argparse.Namespace) -> Planned:
    from flowrl.planning.gather import gather
    from flowrl.planning.refusals import obstacles
    from flowrl.planning.verdict import card_of
    from flowrl.training.parts import model_family
    from flowrl.training.processes.devices import device_kind
    from flowrl.training.processes.mesh import layout_of

    layout_of(config.parallel, parsed.processes)
    family = model_family(config.pipeline)
    found = obstacles(config, family, parsed.processes)
    if found.refused:
        return Planned(plan=None, found=found, card=None)
    found_pace = pace(config, parsed.tflops, parsed.bench)
    device = config.pipeline.device
    processor = "CPU" if device == "cpu" or (found_pace.measured and device_kind(device) == "cpu") else "GPU"
    plan = gather(config, name, family, processes=parsed.processes, pace=found_pace, processor=processor)
    return Planned(plan=plan, found=found, card=parsed.card or card_of(name))


def _is_stock(config: TrainConfig) -> bool:
    """Whether stock's own pipeline is called, or may be, which has to be imported whole; known before torch is."""
    name, model = config.pipeline.name, config.pipeline.model
    if name is not None:
        return name == "generic"
    place, known = Path(model).expanduser(), families().values()
    index = place / "model_index.json"
    if index.is_file():
        return read_json(index).get("_class_name") not in {stock for one in known for stock in one["stock"]}
    if place.exists() or is_path(model):  # files and assets are of families
        return False
    return split_revision(model)[0] not in {own for one in known for own in one["checkpoints"]}


def _names_file(settings: Any) -> bool:
    """Whether a user's file is named anywhere in settings: what it imports is not known, and it may load models."""
    if isinstance(settings, Mapping):
        return settings.get("file") is not None or any(map(_names_file, settings.values()))
    return isinstance(settings, Sequence) and not isinstance(settings, str) and any(map(_names_file, settings))
