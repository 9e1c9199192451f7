"""`flowrl.sample`, `evaluate`, `plan` and `compare`: the commands, called from Python.

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
    from flowrl.interface.call_results import RunPlan

Config = str | Path | Mapping[str, Any]
"""A YAML file, the name of a configuration that ships with flowrl, or settings as a mapping (it may have a `base`)."""
Words = str | Path | Sequence[str | Path]
"""One or several."""

__all__ = ["compare", "evaluate", "plan", "sample"]


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
