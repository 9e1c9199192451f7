"""`flowrl.train`, `evaluate`, `plan` and `read_run`: the commands, called from Python.

Each calls what its command calls, with arguments that the command's own parser has read. What a command refuses, or
ends with, is raised as `flowrl.FlowrlError`, one paragraph; Ctrl-C stays a KeyboardInterrupt. Torch loads with the
first call that needs it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flowrl.interface.argument_words import override_words, parsed_words
from flowrl.runtime.failures import FlowrlError, describe_error
from flowrl.runtime.process_settings import before_libraries_load

if TYPE_CHECKING:
    from flowrl.interface.call_results import RunPlan, TrainedRun
    from flowrl.training.run import Watcher

Config = str | Path | Mapping[str, Any]
"""A YAML file, the name of a configuration that ships with flowrl, or settings as a mapping (it may have a `base`)."""
Words = str | Path | Sequence[str | Path]
"""One or several."""

__all__ = ["plan", "read_run", "train"]


def train(
    config: Config | None = None, *, on_iteration: Watcher | None = None, show: bool = True, **settings: Any
) -> TrainedRun:
    """Trains a model, as `flowrl train` does, and returns what came out.

    Args:
        config: a YAML file, the name of one that ships, or a mapping of settings; None trains the embedded model, and
            is what `resume` needs.
        on_iteration: called after each iteration with its number and its row of metrics (those of `metrics.jsonl`, None
            for what is not finite), on the main process, once the row is written. False from it stops the run as Ctrl-C
            does: it is saved, and `resume` continues it. What it raises ends the run the same way, saved, and is the
            cause of the FlowrlError that comes out.
        show: print what the command prints, and show progress.
        **settings: replace those of the configuration: `num_iterations=10`, `optim={"lr": 1e-4}` (the other keys of
            `optim` stay), `out="runs/first"`; `resume="runs/first"`, or what `train` returned, continues a run.

    Raises:
        FlowrlError: the configuration, a file that it names or the folder is wrong, and nothing was overwritten; or the
            run failed, and how it goes on is said.

    >>> flowrl.train("tiny_g2rp")
    Traceback (most recent call last):
    flowrl.runtime.failures.FlowrlError: there is no configuration 'tiny_g2rp': did you mean tiny_g2rpo? ...
    """
    with _as_own_error(), _shown(show):
        from flowrl.commands.train.run import trained
        from flowrl.interface.run_reading import run_result

        quiet = {} if show or "resume" in settings else {"progress": False}  # a run goes on with its own settings
        given = str(config) if isinstance(config, Path) else config
        if settings.get("resume") is not None:
            settings["resume"] = _place(settings["resume"])
        ended = trained(given, override_words({**quiet, **settings}), on_iteration)
        return run_result(ended.folder, finished=ended.finished)


def read_run(folder: str | Path) -> TrainedRun:
    """Reads a run folder, finished or not, also while the run is at work.

    Raises:
        FlowrlError: there is no such folder, or it holds no run.
    """
    with _as_own_error():
        from flowrl.interface.run_reading import run_result

        return run_result(Path(folder))


def plan(
    config: Config = "tiny_g2rpo", *, card: int | None = None, processes: int | None = None,
    tflops: float | None = None, bench: str | Path | None = None, **settings: Any,
) -> RunPlan:  # fmt: skip
    """Says what a run will do and need, as `flowrl plan` does; no weight is loaded, nothing is downloaded.

    Args:
        config: a YAML file, the name of one that ships, or a mapping of settings.
        card: GB of the card that is to hold the run.
        processes: GPUs of the run.
        tflops: sustained TFLOP/s of one GPU, for the hours.
        bench: a bench.json of `flowrl bench`, or its folder.
        **settings: replace those of the configuration, as in `train`.

    Raises:
        FlowrlError: `flowrl train` would refuse the configuration.

    >>> planned = flowrl.plan("tiny_g2rpo", num_iterations=10)
    >>> planned.iterations, planned.peak_bytes < 4 * 2**30
    (10, True)
    """
    with _as_own_error():
        flags = {"card": card, "processes": processes, "tflops": tflops, "bench": bench}
        parsed = parsed_words("plan", [config], flags)
        parsed.config = config if isinstance(config, Mapping) else str(config)
        parsed.overrides = override_words(settings)
        from flowrl.commands.plan.run import planned

        made = planned(parsed)  # it comes before the next import, whose libraries it may do without
        from flowrl.interface.plan_reading import plan_of

        return plan_of(made)


def _place(model: object) -> str:
    """A model as the command line names it; a run by its folder."""
    folder = getattr(model, "folder", None)
    return str(model if folder is None else folder)


@contextmanager
def _as_own_error() -> Iterator[None]:
    """Tells every error in one paragraph; that of bad input without the frames that found it."""
    before_libraries_load()
    try:
        yield
    except FlowrlError:
        raise
    except (ValueError, OSError) as error:
        raise FlowrlError(describe_error(error)) from error.__cause__
    except (Exception, SystemExit) as error:
        raise FlowrlError(describe_error(error)) from error


@contextmanager
def _shown(show: bool) -> Iterator[None]:
    with ExitStack() as stack:
        if not show:
            nowhere = stack.enter_context(open(os.devnull, "w", encoding="utf-8"))
            stack.enter_context(redirect_stdout(nowhere))
            stack.enter_context(redirect_stderr(nowhere))
        yield
