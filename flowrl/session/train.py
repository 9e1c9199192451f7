"""Training: checks what it can before a model loads, runs the recipe, and prints the result."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flowrl.config.base import config_for_card, named_config
from flowrl.config.overrides import Typed, typed_settings
from flowrl.config.strict_yaml import dotted_items
from flowrl.config.train import TrainConfig, to_yaml
from flowrl.rendering.markup import plural
from flowrl.runs.run_folder import RUNS, refuse_no_run, refuse_taken
from flowrl.runtime.failures import describe_error, explain, lost_process
from flowrl.runtime.files import LOCK, refuse_unwritable
from flowrl.runtime.process_settings import deterministic_kernels
from flowrl.runtime.public import public
from flowrl.runtime.scrubbing import say as print
from flowrl.runtime.scrubbing import without_secrets
from flowrl.runtime.versions import untested_line, versions
from flowrl.session.preflight import load_checked, preflight
from flowrl.training.processes.launched import launched
from flowrl.training.processes.meeting import meet, telling_others, words_left
from flowrl.training.resume_check import ALLOW, MOVED, RESUME_KEYS, inputs_of
from flowrl.training.trackers.tracker import FOLDERS

if TYPE_CHECKING:
    from flowrl.runs.trained_run import TrainedRun
    from flowrl.training.parts import Ready
    from flowrl.training.run import Run, Watcher

DEFAULT_CONFIG = "tiny_recommended"
"""The configuration that is trained if you name none."""
Fit = Callable[[TrainConfig, str, int], Sequence[str]]
"""Returns the settings, as `key=value`, that make a run with this name fit a card of so many GB."""
Page = Callable[[Path], object]
"""Writes the report of a run folder and returns its path."""


@public
def train(
    config: str | Path | Mapping[str, Any] | None = None, *, card: int | str | None = None,
    on_iteration: Watcher | None = None, show: bool = True, page: Page | None = None, fit: Fit | None = None,
    **settings: Any,
) -> TrainedRun:  # fmt: skip
    """Trains a model and returns its run.

    Args:
        config: a YAML file, the name of one that ships, or a mapping of settings; None trains the embedded model, and
            is required with `resume`.
        card: GB of a card, or its name, "4090". The run makes the changes that `flowrl.plan` proposes for such a card,
            prints them, and keeps them in its configuration.
        on_iteration: a function that the main process calls after each iteration with the iteration's number and its
            row of metrics, once the row is in `metrics.jsonl` (None for a number that is not finite). If it returns
            False, the run is saved and stops, as after Ctrl-C, and `resume` continues it. If it raises an error, the
            run is saved and stops too, and the error is the cause of the FlowrlError that you get.
        show: print notes and show progress.
        page: writes the report of a run folder; None writes none.
        fit: finds what a card changes (`flowrl.planning.plan.for_card`).
        **settings: replace those of the configuration: `num_iterations=10`, `optim={"lr": 1e-4}` (the other keys of
            `optim` stay), `out="runs/first"`; `resume="runs/first"`, or what `train` returned, continues a run.

    Raises:
        FlowrlError: the configuration, a file that it names or the folder is wrong, and nothing was overwritten; or the
            run failed, and the message says how to continue it; or its processes have different settings or files, or
            one of them did not come.

    >>> flowrl.train("tiny_g2rp")
    Traceback (most recent call last):
    flowrl.runtime.failures.FlowrlError: there is no configuration 'tiny_g2rp': did you mean tiny_g2rpo? ...
    """
    given, card = config_for_card(str(config) if isinstance(config, Path) else config, card)
    with telling_others():
        if card is not None:
            if "resume" in settings:
                raise ValueError("`card` changes a new run, and resume= continues one with its own configuration")
            if fit is None:
                raise ValueError("`card` needs `fit`, which finds what a card changes")
            path, name = named_config(DEFAULT_CONFIG if given in (None, "") else given)
            changed = fit(load_checked(path, settings), name, card)
            if os.environ.get("RANK", "0") == "0":
                print(f"for {card} GB: {' '.join(changed) or 'as it is'}")
            settings = {**settings, **typed_settings(changed)}
        folder, finished, summary = _train(given, settings, on_iteration, page)
    from flowrl.runs.trained_run import TrainedRun, run_in

    if not (folder / "config.yaml").is_file():  # on a node that shares no disk with that of the main process
        return TrainedRun(folder=folder, finished=finished, config={})
    return run_in(folder, finished=finished, summary=summary)


def _train(
    given: str | Mapping[str, Any] | None, settings: Mapping[str, Any], watcher: Watcher | None, page: Page | None
) -> tuple[Path, bool, str]:
    """Starts or continues a run; returns its folder, whether it finished, and the summary."""
    resumed = _resume_folder(given, settings)
    if resumed is None:
        config, name, wanted, text = _new_run(given, settings)
    else:
        others = {key: value for key, value in settings.items() if key != "resume"}
        config = load_checked(resumed / "config.yaml", others)
        name, wanted, text = str(resumed.name), resumed, ""
    ready, again = preflight(config), resumed is not None
    inputs = inputs_of(config, ready.prompts)
    if launched() is not None:
        from flowrl.training.agreement import difference, facts_of
        from flowrl.training.processes.devices import fetch_first

        meet(facts_of(config, inputs, resumed=again), difference)
        fetch_first(config.pipeline, ready.location)
    from flowrl.runtime.placement import torch_threads
    from flowrl.training.processes.devices import on_main  # accelerate takes seconds to import
    from flowrl.training.run import Run, owned_folder

    kept, device = wanted is not None and wanted.exists(), config.pipeline.device
    owned = owned_folder(wanted, name, resumed=again, device=device, config=text)
    with deterministic_kernels(config.deterministic), torch_threads(config.threads), owned as folder:
        if again and on_main(lambda: _is_finished(folder, config)):
            return folder, True, ""
        run = Run(folder, config, name=name, inputs=inputs, resumed=again, watcher=watcher)
        _note_beginning(run, ready, resumed=again)
        try:
            with run.closing, run.watching_interrupts(), with_workers(config, run):
                finished = bool(ready.recipe.main(ready, run))
        except KeyboardInterrupt as stop:
            raise KeyboardInterrupt(f"Stopped at once. {_way_on(folder)}" if run.main else "") from stop
        except (Exception, SystemExit) as error:  # whatever it is, a library's sys.exit too: the run stays in order
            raise ValueError(_close_failed(error, run, page, resumed=again, kept=kept)) from error
        run.finish(finished=finished)
        if not run.main:
            return folder, finished, ""
        from flowrl.session.summary import summarise

        report = None if page is None else Path(str(page(folder)))
        summary = summarise(folder, config, report, finished=finished)
        run.trackers.close(report)
        return folder, finished, summary


def _new_run(
    given: str | Mapping[str, Any] | None, settings: Mapping[str, Any]
) -> tuple[TrainConfig, str, Path | None, str]:
    """Checks what needs no heavy import; returns settings, name, folder and configuration text of a new run."""
    path, name = named_config(DEFAULT_CONFIG if given in (None, "") else given)
    config = load_checked(path, settings)
    if config.resume is not None:
        raise ValueError(
            f"{name if isinstance(path, Mapping) else path}: resume belongs on the command line: "
            f"flowrl train resume={shlex.quote(str(config.resume))}"
        )
    if config.resume_changed:
        raise ValueError(f"{ALLOW}=true belongs beside resume=RUN: a new run has nothing that could have changed")
    _refuse_secrets(config)
    wanted, text = None if config.out is None else Path(config.out).expanduser(), to_yaml(config)
    if wanted is not None:
        refuse_taken(wanted, text)
    if os.environ.get("RANK", "0") == "0":  # the main process alone writes
        refuse_unwritable(wanted or RUNS, flag="out=")  # now, not after seconds of imports
    return config, name, wanted, text


def _note_beginning(run: Run, ready: Ready, *, resumed: bool) -> None:
    """Prints what is trained, and what you may not expect of it."""
    if not run.main:
        return
    config, drawn = ready.config, "clips" if ready.family.videos else "images"
    what = (
        f"{config.recipe} on {config.pipeline.model}, {plural(config.num_iterations, 'iteration')} of "
        f"{plural(config.prompts_per_step, 'prompt')} x {config.group_size} {drawn}, on {run.where}"
    )
    begun = f"Starting {run.folder}"
    if resumed:
        from flowrl.training.checkpoints import checkpoints
        from flowrl.training.optimizers import rate_note

        found, text = checkpoints(run.folder), (run.folder / "config.yaml").read_text(encoding="utf-8")
        begun = f"Continuing {run.folder} at iteration {int(found[-1].name) if found else 0}"
        before = re.search(r"^num_iterations: (\d+)$", text, re.MULTILINE)
        if found and config.optim.schedule != "constant" and before and int(before[1]) != config.num_iterations:
            print(f"Note: {rate_note(config, int(before[1]), int(found[-1].name))}.", flush=True)
    print(f"{begun}: {what}", flush=True)
    from flowrl.session.advice import few_step_advice, reference_notes, sizes_line  # imports the families

    lines = (sizes_line(config, ready.layout.data), untested_line(versions()))
    for line in filter(None, (*lines, *few_step_advice(config), *reference_notes(config))):
        print(f"Note: {line}.", flush=True)
    if resumed:
        return
    from flowrl.prompts.overlap import overlap_of_rows, shared_words

    shared = overlap_of_rows(ready.prompts.train, ready.prompts.held_out)
    run.note(eval_prompts={"number": shared.total, "trained_on": len(shared.exact)})
    if shared.exact and config.eval_every > 0:
        print(f"Note: {shared_words(len(shared.exact), shared.total)}.", flush=True)


@contextmanager
def with_workers(config: TrainConfig, run: Run) -> Iterator[None]:
    """Gives a run the workers that it asks for. However it ends, they end with all that was started for them."""
    workers = config.workers
    if not (workers.rollouts or workers.rewards):
        yield
        return
    from flowrl.runtime.cluster import disconnect
    from flowrl.training.processes.devices import wait_for_everyone
    from flowrl.workers.layout import join_cluster
    from flowrl.workers.rollouts import Rollouts

    try:
        if workers.rollouts:
            run.rollouts = rollouts = Rollouts(config, run)
            try:
                yield
            finally:
                rollouts.close()
        else:  # workers that score start with the rewards
            join_cluster(config, run)
            yield
        wait_for_everyone()  # the main process may be who started Ray
    finally:
        disconnect()


def _refuse_secrets(config: TrainConfig) -> None:
    """Refuses passwords and tokens in settings, because config.yaml, the manifest and trackers would store them."""

    def look(value: Any, key: str) -> None:
        if isinstance(value, Mapping):
            for name, part in value.items():
                look(part, f"{key}.{name}" if key else str(name))
        elif isinstance(value, list | tuple):
            for place, part in enumerate(value):
                look(part, f"{key}.{place}")
        elif isinstance(value, str) and without_secrets(value) != value:
            raise ValueError(
                f"{key} holds a password or token ({without_secrets(value)}), which the run folder would keep: put it "
                "into an environment variable, and name that (token_env, api_key_env) where the setting has such an "
                "option"
            )

    look(asdict(config), "")


def _close_failed(error: BaseException, run: Run, page: Page | None, *, resumed: bool, kept: bool) -> str:
    """Puts the folder of a failed run in order, and says what happened and how to continue.

    A run that had begun gets `error.log`, the error in its manifest, and a report. If a new run had not begun, nothing
    stays except a folder that existed before (`kept`). If a resumed run had not begun, its folder stays as it was.
    """
    from flowrl.training.watchdog import Diverged

    error = _of_another(error)
    first = {"config.yaml", "manifest.json", LOCK, *FOLDERS}  # what every run starts with
    there = {path.name for path in run.folder.iterdir()} if run.folder.is_dir() else set()
    begun = run.begun if resumed else bool(there - first)
    said = describe_error(error, run.folder if begun else None)
    if not run.main or (resumed and not begun):
        return said
    said = re.sub(r"\s*\n\s*", "; ", said).rstrip(".")
    if begun:
        with suppress(Exception):  # on a full disk, say: what counts is the reason for the end
            run.trackers.close(failed=True)
            run.note(failed=time.strftime("%Y-%m-%dT%H:%M:%S%z"), error=explain(error))
            if page is not None:
                page(run.folder)
        way_on = "" if isinstance(error, Diverged) else _way_on(run.folder)
    else:
        run.trackers.close(failed=True)  # before their files go
        with suppress(OSError):  # a folder that somebody else removed
            for path in run.folder.iterdir():
                if path.name in FOLDERS:
                    shutil.rmtree(path)
                else:
                    path.unlink()
            if not kept:
                run.folder.rmdir()
        way_on = "Nothing was trained yet, so start again"
    return f"{said}. {way_on}".strip()


def _of_another(error: BaseException) -> BaseException:
    """The error; if it says only that another process ended, what that process said before."""
    words = words_left() if lost_process(error) else {}
    if not words:
        return error
    ended = ValueError("; ".join(f"process {rank} ended: {said}" for rank, said in words.items()))
    return ended.with_traceback(error.__traceback__)


def _way_on(folder: Path) -> str:
    from flowrl.training.checkpoints import checkpoints

    quoted = shlex.quote(str(folder))
    if found := checkpoints(folder):
        return (
            f"The last good checkpoint is {found[-1]}: continue with 'flowrl train resume={quoted}', and add "
            f"{ALLOW}=true if you changed what the run is made with"
        )
    return f"No checkpoint was complete yet: 'flowrl train resume={quoted}' begins at iteration 0"


def _is_finished(folder: Path, config: TrainConfig) -> bool:
    """Whether a run has nothing left to do; if so, says it. A run without its report still has to write it."""
    from flowrl.runs.evaluation_rows import evaluations, read_rows
    from flowrl.training.budget import share_spent
    from flowrl.training.checkpoints import find_checkpoint

    state = find_checkpoint(folder, changed=config.resume_changed).state
    if state is None:
        return False
    for number in evaluations(folder):
        try:
            if number <= int(state["iteration"]):  # later ones are made again
                read_rows(folder, number)
        except ValueError as error:
            raise ValueError(f"{error}: put the file back, or remove it to go on without that evaluation") from error
    if not (folder / "summary.json").is_file():
        return False
    done, wanted = int(state["iteration"]), config.num_iterations
    if done >= wanted:
        print(
            f"The run in {folder} is finished ({done} of {plural(max(done, wanted), 'iteration')}). To go on, raise "
            f"the number: flowrl train resume={shlex.quote(str(folder))} num_iterations={2 * done}"
        )
    elif share_spent(config.budget.limits, state["counters"]) >= 1:
        limits = ", ".join(f"{name} {limit:g}" for name, limit in config.budget.limits.items())
        print(
            f"The run in {folder} is finished: its budget ({limits}) was used up after {plural(done, 'iteration')}. To "
            "train longer, start a run with a larger one"
        )
    else:
        return False
    return True


def _resume_folder(given: str | Mapping[str, Any] | None, settings: Mapping[str, Any]) -> Path | None:
    """The folder of the run to continue, from `resume`; None if it is not given."""
    wanted = settings.get("resume")
    run = wanted.partition("=")[2] if isinstance(wanted, Typed) else getattr(wanted, "folder", wanted)
    if run is None or (isinstance(wanted, Typed) and run in ("null", "~")):
        return None
    if not str(run):
        raise ValueError("resume= names no run: write resume=RUN, or leave it out to start a run")
    beside = {key: value for key, value in dotted_items(settings) if key not in RESUME_KEYS}
    _refuse_beside(str(run), given, {} if ALLOW in beside else beside)
    folder = Path(run).expanduser()
    refuse_no_run(folder, ": where nodes share no disk, each needs a copy of it" if "WORLD_SIZE" in os.environ else "")
    return folder


def _refuse_beside(run: str, given: str | Mapping[str, Any] | None, settings: Mapping[str, Any]) -> None:
    """Refuses a configuration, or settings that belong to the run itself, together with a run to continue."""
    words = [
        str(value) if isinstance(value, Typed) else f"{key}={value}"
        for key, value in settings.items()
        if not MOVED.fullmatch(key)
    ]
    if given is not None or words:
        what = "a mapping of settings" if isinstance(given, Mapping) else given
        raise ValueError(
            f"resume={run} continues a run with its own configuration, so leave out "
            f"{what or words[0]!r}; allowed are {', '.join(key + '=' for key in RESUME_KEYS[1:])}"
            + (f"; add {ALLOW}=true to change any setting, and the manifest records it" if given is None else "")
        )
