"""`flowrl train`: checks everything that can be known before a model loads, runs the recipe, and says what came out."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flowrl.config.base import named_config
from flowrl.config.train import TrainConfig, to_yaml
from flowrl.runs.run_folder import RUNS, refuse_no_run, refuse_taken
from flowrl.runtime.failures import describe_error, explain, lost_process
from flowrl.runtime.files import LOCK, plain, refuse_unwritable
from flowrl.runtime.scrubbing import say as print
from flowrl.runtime.scrubbing import without_secrets
from flowrl.runtime.versions import untested_line, versions
from flowrl.session.batch_sizes import sizes_line
from flowrl.session.preflight import check_before_loading, load_checked, recipe_of
from flowrl.training.processes.launched import launched
from flowrl.training.processes.meeting import meet, telling_others, words_left
from flowrl.training.seal import ALLOW, MOVED, RESUME_KEYS, inputs_of
from flowrl.training.trackers.tracker import FOLDERS

if TYPE_CHECKING:
    from flowrl.training.prompting import RunPrompts
    from flowrl.training.run import Run, Watcher

DEFAULT_CONFIG = "tiny_recommended"


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """A training that has ended: its folder, and whether it came to its end or was asked to stop before."""

    folder: Path
    finished: bool


def run(parsed: argparse.Namespace) -> int:
    """`flowrl train [CONFIG] [key=value ...]`; see `train`."""
    named = bool(parsed.arguments) and "=" not in parsed.arguments[0]
    return train(parsed.arguments[0] if named else None, parsed.arguments[1:] if named else parsed.arguments)


def train(config_name: str | None, overrides: Sequence[str]) -> int:
    """Starts or continues a run; returns the exit code: 0 finished, 130 interrupted.

    Raises:
        ValueError: as `trained`.
    """
    return 0 if trained(config_name, overrides).finished else 130


def trained(given: str | Mapping[str, Any] | None, overrides: Sequence[str], watcher: Watcher | None = None) -> Ended:
    """Starts or continues a run.

    Args:
        given: a YAML file, the name of one that ships with flowrl, or settings; None is the embedded model.
        overrides: `key=value` settings that replace them.
        watcher: is given the number and the metrics of each iteration; False from it asks for a stop, and what it
            raises ends the run, saved.

    Raises:
        ValueError: the configuration, a file it names, or the run folder is wrong; nothing was overwritten. Or the
            processes of the run were given different things, or one of them did not come.
    """
    with telling_others():
        return _trained(given, overrides, watcher)


def _trained(given: str | Mapping[str, Any] | None, overrides: Sequence[str], watcher: Watcher | None) -> Ended:
    folder = _resume_folder(given, overrides)
    if folder is None:
        path, name = named_config(given if isinstance(given, Mapping) else given or DEFAULT_CONFIG)
        config = load_checked(path, overrides)
        if config.resume is not None:
            raise ValueError(
                f"{name if isinstance(path, Mapping) else path}: resume belongs on the command line: "
                f"flowrl train resume={shlex.quote(str(config.resume))}"
            )
        if config.resume_changed:
            raise ValueError(f"{ALLOW}=true belongs beside resume=RUN: a new run has nothing that could have changed")
        _refuse_secrets(config)
        wanted = None if config.out is None else Path(config.out).expanduser()
        text = to_yaml(config)
        if wanted is not None:
            refuse_taken(wanted, text)
        if os.environ.get("RANK", "0") == "0":  # the main process alone writes
            refuse_unwritable(wanted or RUNS, flag="out=")  # now, not after seconds of imports
    else:
        config = load_checked(folder / "config.yaml", [text for text in overrides if not text.startswith("resume=")])
        name, wanted, text = str(folder.name), folder, ""
    prompts = check_before_loading(config)
    inputs = inputs_of(config, prompts)
    if launched() is not None:
        from flowrl.training.processes.agreement import difference, facts_of

        meet(facts_of(config, inputs, resumed=folder is not None), difference)
    from flowrl.training.processes.devices import on_main  # accelerate takes seconds to import
    from flowrl.training.run import owned_folder

    kept = wanted is not None and wanted.exists()
    device = config.pipeline.device
    with owned_folder(wanted, name, resumed=folder is not None, device=device, config=text) as owned:
        if folder is not None and on_main(lambda: _is_finished(owned, config)):
            return Ended(folder=owned, finished=True)
        resumed = folder is not None
        finished = _run(config, prompts, inputs, name, owned, resumed=resumed, kept=kept, watcher=watcher)
        return Ended(folder=owned, finished=finished)


def _run(
    config: TrainConfig, prompts: RunPrompts, inputs: Mapping[str, Any], name: str, folder: Path, *, resumed: bool,
    kept: bool, watcher: Watcher | None,
) -> bool:  # fmt: skip
    """Trains in a folder; returns whether the run came to its end."""
    import torch

    from flowrl.training.run import Run

    if config.threads is not None:
        torch.set_num_threads(config.threads)
    run = Run(folder, config, name=name, inputs=inputs, resumed=resumed, watcher=watcher)
    if run.main:
        print(
            f"{_begun_words(run.folder, config) if resumed else f'Starting {run.folder}'}: {describe(config)}",
            flush=True,
        )
        for line in filter(None, (sizes_line(config, run.world), untested_line(versions()))):
            print(f"Note: {line}.", flush=True)
        if not resumed:
            _note_overlap(run, prompts, evaluated=config.eval_every > 0)
    try:
        with run.watching_interrupts(), with_workers(config, run):
            finished = bool(recipe_of(config).main(config, run, prompts))
    except KeyboardInterrupt as stop:
        raise KeyboardInterrupt(f"Stopped at once. {_way_on(run.folder)}" if run.main else "") from stop
    except (Exception, SystemExit) as error:  # whatever it is, a library's sys.exit too: the run stays in order
        raise ValueError(_failed(error, run, resumed=resumed, kept=kept)) from error
    run.finish(finished=finished)
    if run.main:
        from flowrl.pages.report import report as write_report
        from flowrl.session.summary import print_summary

        report = write_report(run.folder)
        print_summary(run.folder, config, report, finished=finished)
        run.trackers.close(report)
    return finished


@contextmanager
def with_workers(config: TrainConfig, run: Run) -> Iterator[None]:
    """Gives a run the workers that it asks for; however it ends, they and what was started for them end with it."""
    workers = config.workers
    if not (workers.rollouts or workers.rewards):
        yield
        return
    from flowrl.runtime.cluster import disconnect
    from flowrl.workers.joining import join_cluster
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
        run.accelerator.wait_for_everyone()  # the main process may be who started Ray
    finally:
        disconnect()


def _begun_words(folder: Path, config: TrainConfig) -> str:
    """What is continued, from which iteration on; and how the learning rate changes where the length does."""
    from flowrl.training.checkpoints import checkpoints

    found = checkpoints(folder)
    before = re.search(r"^num_iterations: (\d+)$", (folder / "config.yaml").read_text(encoding="utf-8"), re.MULTILINE)
    if found and config.optim.schedule != "constant" and before and int(before[1]) != config.num_iterations:
        print(
            f"Note: optim.schedule={config.optim.schedule} now spans {config.num_iterations} iterations and not "
            f"{before[1]}: the learning rate goes on from its place in the longer schedule, which may be far higher.",
            flush=True,
        )
    return f"Continuing {folder} at iteration {int(found[-1].name) if found else 0}"


def _refuse_secrets(config: TrainConfig) -> None:
    """Refuses passwords and tokens among the settings: config.yaml, the manifest and trackers would hold them."""

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

    look(plain(config), "")


def _note_overlap(run: Run, prompts: RunPrompts, *, evaluated: bool) -> None:
    """Says, here and in the manifest, how many prompts of the evaluations are trained on too."""
    from flowrl.prompts.overlap import overlap_of_rows, shared_words

    found = overlap_of_rows(prompts.train, prompts.held_out)
    run.note(eval_prompts={"number": found.total, "trained_on": len(found.exact)})
    if found.exact and evaluated:
        print(f"Note: {shared_words(len(found.exact), found.total)}.", flush=True)


def _failed(error: BaseException, run: Run, *, resumed: bool, kept: bool) -> str:
    """Leaves the folder of a run that an error stopped in order, and says what happened and how to go on.

    A run that had begun gets `error.log`, the error in its manifest, and a report. Of a new one that had not, nothing
    stays but its folder where it was there before (`kept`); one to be continued that had not is left as it was.
    """
    from flowrl.training.watchdog import Diverged

    error = _of_another(error)
    begun = run.begun if resumed else _has_begun(run.folder)
    said = describe_error(error, run.folder if begun else None)
    if not run.main or (resumed and not begun):
        return said
    said = re.sub(r"\s*\n\s*", "; ", said).rstrip(".")
    if begun:
        with suppress(Exception):  # on a full disk, say: what counts is the reason for the end
            run.trackers.close(failed=True)
            run.note(failed=time.strftime("%Y-%m-%dT%H:%M:%S%z"), error=explain(error))
            from flowrl.pages.report import report as write_report

            write_report(run.folder)
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
    """An error, or where it says no more than that another process ended, what that one has said before."""
    words = words_left() if lost_process(error) else {}
    if not words:
        return error
    ended = ValueError("; ".join(f"process {rank} ended: {said}" for rank, said in words.items()))
    return ended.with_traceback(error.__traceback__)


def _has_begun(folder: Path) -> bool:
    """Whether a run folder holds more than what every run starts with."""
    return folder.is_dir() and bool(
        {path.name for path in folder.iterdir()} - {"config.yaml", "manifest.json", LOCK, *FOLDERS}
    )


def _way_on(folder: Path) -> str:
    """How a run that stopped goes on."""
    from flowrl.training.checkpoints import checkpoints

    quoted = shlex.quote(str(folder))
    if found := checkpoints(folder):
        return (
            f"The last good checkpoint is {found[-1]}: continue with 'flowrl train resume={quoted}', and {ALLOW}=true "
            "beside it where you have changed what the run is made with"
        )
    return f"No checkpoint was complete yet: 'flowrl train resume={quoted}' begins at iteration 0"


def _is_finished(folder: Path, config: TrainConfig) -> bool:
    """Whether a run has nothing left to do, which is then said; one that was ended before its report has.

    Raises:
        ValueError: as `find_checkpoint`; or rows of an evaluation, which the report reads, are damaged.
    """
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
            f"The run in {folder} is finished ({done} of {wanted} iterations). To go on, raise the number: "
            f"flowrl train resume={shlex.quote(str(folder))} num_iterations={2 * done}"
        )
    elif share_spent(config.budget, state["counters"]) >= 1:
        print(
            f"The run in {folder} is finished: its budget ({_limits(config)}) was used up after {done} iterations. For "
            "more, start a run with a larger one"
        )
    else:
        return False
    return True


def _limits(config: TrainConfig) -> str:
    return ", ".join(f"{name} {limit:g}" for name, limit in config.budget.limits.items())


def _resume_folder(given_config: str | Mapping[str, Any] | None, overrides: Sequence[str]) -> Path | None:
    """The folder of `resume=RUN`; None where it is not given."""
    given = [text.partition("=")[2] for text in overrides if text.startswith("resume=")]
    if not given or given[-1] in ("null", "~"):
        return None
    if not given[-1]:
        raise ValueError("resume= names no run: write resume=RUN, or leave it out to start a run")
    keys = {text.partition("=")[0] for text in overrides}
    changed = [text for text in overrides if text.partition("=")[0] not in RESUME_KEYS]
    other = [] if ALLOW in keys else [text for text in changed if not MOVED.fullmatch(text.partition("=")[0])]
    config_name = "a mapping of settings" if isinstance(given_config, Mapping) else given_config
    if config_name is not None or other:
        raise ValueError(
            f"resume={given[-1]} continues a run with its own configuration, so {config_name or other[0]!r} has no "
            f"place beside it; allowed are {', '.join(key + '=' for key in RESUME_KEYS[1:])}"
            + (f"; with {ALLOW}=true any setting, which the manifest will tell" if config_name is None else "")
        )
    folder = Path(given[-1]).expanduser()
    refuse_no_run(folder, ": where nodes share no disk, each needs a copy of it" if "WORLD_SIZE" in os.environ else "")
    return folder


def describe(config: TrainConfig) -> str:
    """One line: what is trained, on what, how long."""
    return (
        f"{config.recipe} on {config.pipeline.model}, {config.num_iterations} iterations of "
        f"{config.prompts_per_step} prompts x {config.group_size} images"
    )
