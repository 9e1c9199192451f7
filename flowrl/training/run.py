"""The run: its folder, its processes, its metrics, and interrupts.

Folder: `config.yaml`, `manifest.json`, `metrics.jsonl`, `checkpoints/`, `lora/` or `model/`, `samples/`, `eval/`,
`report.html`.
"""

from __future__ import annotations

import math
import resource
import shlex
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from flowrl.config.train import TrainConfig, to_yaml
from flowrl.runs.evaluation_rows import remove_evaluations
from flowrl.runs.manifest import read_manifest, session_facts, write_manifest
from flowrl.runs.run_folder import make_free_folder, refuse_full, refuse_taken
from flowrl.runtime.failures import explain
from flowrl.runtime.files import locked, replacing, write_atomically
from flowrl.runtime.interrupts import on_interrupt
from flowrl.runtime.scrubbing import say as print
from flowrl.runtime.scrubbing import settings_without_secrets
from flowrl.training.agreement import difference, loaded_facts, rounding_note
from flowrl.training.checkpoints import (
    Continued,
    begin_checkpoint,
    checkpoints,
    find_checkpoint,
    remove_halves,
    reseal,
    sealed_digest,
    state_of,
    write_checkpoint,
    write_part,
)
from flowrl.training.processes.devices import accelerator_of, device_words, on_main, wait_for_everyone
from flowrl.training.processes.mesh import device_mesh, layout_of
from flowrl.training.resume_check import ALLOW, changes, digest_of
from flowrl.training.trackers.metric_rows import ROWS, MetricRows, set_aside
from flowrl.training.trackers.opening import open_trackers
from flowrl.training.trackers.tracker import Trackers

T = TypeVar("T")
Watcher = Callable[[int, Mapping[str, Any]], object]
"""Is given the number of an iteration and its row of metrics; False from it asks for a stop."""


@contextmanager
def owned_folder(folder: Path | None, name: str, *, resumed: bool, device: str, config: str = "") -> Iterator[Path]:
    """The run folder, the same on every process, made if it is missing; no other run is at work in it meanwhile.

    Only the main process holds the lock.

    Args:
        folder: where; None takes the first free `runs/<name>-<n>`.
        resumed: whether the folder holds a run to continue; a new run refuses a folder that holds anything.
        config: the text that a new run would write as its configuration.

    Raises ValueError: the device is not there, or the folder is taken.
    """
    accelerator_of(device)
    with ExitStack() as stack:

        def claim() -> Path:
            if not resumed and folder is not None:
                refuse_taken(folder, config)
            chosen = folder or make_free_folder(name)
            stack.enter_context(locked(chosen, "another run"))
            if not resumed:
                refuse_full(chosen, config)  # another process came and went between the look and the lock
                remove_halves(chosen)
            return chosen

        yield on_main(claim)


class Run:
    """One run on one or more processes; only the main one writes; of a continued run nothing before `begin`."""

    def __init__(
        self, folder: Path, config: TrainConfig, *, name: str, inputs: Mapping[str, Any], resumed: bool,
        parts: Any = None, rollouts: Any = None, watcher: Watcher | None = None,
    ) -> None:  # fmt: skip
        """Opens a run folder.

        Args:
            config: the resolved configuration, written to `config.yaml`.
            inputs: the run's inputs, `flowrl.training.resume_check.inputs_of`.
            parts: the result of `flowrl.training.parts.load_parts`, if already loaded.
            rollouts: workers that draw for this process (`flowrl.training.draws.DrawsElsewhere`), if it has any.
            watcher: called after every iteration, on the main process.

        Raises ValueError: the device is not there, or the inputs of a resumed run have changed.
        """
        self.accelerator = accelerator_of(config.pipeline.device)
        self.device = self.accelerator.device
        self.main, self.processes = self.accelerator.is_main_process, self.accelerator.num_processes
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        self.where = device_words(self.device, self.processes)
        self.layout = layout_of(config.parallel, self.processes)
        # Processes that share an image's tokens are one to all that splits images: `world` such groups, this the
        # `rank`-th, and the first of each speaks for it.
        self.rank, within = divmod(self.accelerator.process_index, self.layout.context)
        self.world, self.first = self.layout.data, within == 0
        self.folder, self.parts, self.rollouts = folder, parts, rollouts
        self._watcher, self._last_row = watcher, dict[str, Any]()
        self.stop_requested = False
        self.begun = False  # whether the folder of a continued run may have changed
        self._config, self._resumed = config, resumed
        self.trackers = Trackers(())  # on the main process, from `begin` on
        self.closing = ExitStack()  # what ends with the recipe, however that ends
        self._first, self._found, self._rows = 0, Continued(), MetricRows(folder)
        self._facts = session_facts(self.device, self.processes) if self.main else {}
        self._manifest: dict[str, Any] = {"run": uuid.uuid4().hex, "config_name": name}
        self._inputs, self._changes = dict(inputs), list[str]()
        if resumed:
            found = on_main(lambda: read_manifest(folder))
            self._known = "run" in found  # not where the file was removed, or an older version wrote it
            self._manifest |= found
            on_main(self._refuse_changes)
        elif self.main:
            self._write()

    def _refuse_changes(self) -> None:
        """Refuses inputs that differ from those of the run's checkpoints."""
        before, saved = self._manifest.get("inputs"), checkpoints(self.folder)
        if before is not None:
            self._changes = changes(before, self._inputs, self._config)
        elif saved:
            self._changes = ["its manifest.json does not say what it was made with, so nothing can be compared"]
        if not self._changes or not saved or self._config.resume_changed:
            return
        listed = "".join(f"\n  {line}" for line in self._changes)
        raise ValueError(
            f"the run in {self.folder} was made with other inputs, and nothing in it was touched:{listed}\n"
            f"Put them back, or start a new run. To go on with the change, which the manifest records: flowrl train "
            f"resume={shlex.quote(str(self.folder))} "
            f"{ALLOW}=true"
        )

    def _write(self) -> None:
        facts, own = {**self._facts, "inputs_digest": digest_of(self._inputs)}, self._manifest
        own["inputs"] = self._inputs
        if self._resumed:
            for end in ("finished", "stopped", "failed", "error"):
                own.pop(end, None)
            own.setdefault("resumed", []).append(facts | {"iteration": self._first, "changes": self._changes})
        else:
            own |= facts
        write_atomically(self.folder / "config.yaml", to_yaml(replace(self._config, resume_changed=False)))
        write_manifest(self.folder, own)

    # ---- metrics -------------------------------------------------------------------------------------------------

    def log(self, row: Mapping[str, Any]) -> None:
        """Appends a row to `metrics.jsonl` and tells trackers; what is not finite becomes null. Raises ValueError: as
        `MetricRows.append`."""
        if not self.main:
            return
        clean = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
        if "warnings" in clean:  # sentences may hold words of servers and errors
            clean["warnings"] = settings_without_secrets(clean["warnings"])
        self._last_row = clean
        self._rows.append(clean)
        self.trackers.log(clean)

    def tell(self, iteration: int) -> Exception | None:
        """Tells the watcher of a logged iteration; False from it asks for a stop. Returns its error, which asks for a
        stop too: the run is saved before the error is raised."""
        if self._watcher is None or not self.main:
            return None
        try:
            self.stop_requested |= self._watcher(iteration, dict(self._last_row)) is False
        except Exception as error:
            self.stop_requested = True
            return error
        return None

    # ---- checkpoints ---------------------------------------------------------------------------------------------

    @property
    def in_first_copy(self) -> bool:
        """Whether this is one of the processes that hold the first copy of the model, a part each."""
        copy, _, context = self.layout.place(self.accelerator.process_index)
        return copy == context == 0

    def save_checkpoint(self, iteration: int, state: Mapping[str, Any], keep: int, own: Mapping[str, Any]) -> None:
        """Writes checkpoint number `iteration` (finished iterations), then removes all but the newest `keep`. The
        `state` is the same on every process; `own` is what this process holds of weights that are split, which those of
        the first copy write, else empty. Raises OSError: as `write_checkpoint`."""
        parts = self._write_parts(iteration, own) if own else ()
        if self.main:
            write_checkpoint(
                self.folder, iteration, state, keep=keep, rows=self._rows.seal(), run=self._manifest["run"],
                inputs=digest_of(self._inputs), parts=parts,
            )  # fmt: skip
        wait_for_everyone()

    def _write_parts(self, iteration: int, own: Mapping[str, Any]) -> list[str]:
        """Has every process of the first copy write its part of a checkpoint; returns the digests."""
        on_main(lambda: str(begin_checkpoint(self.folder, iteration)))
        place = self.layout.place(self.accelerator.process_index)[1]
        digests, failed = list[str](), list[str]()
        try:
            digests += [write_part(self.folder, iteration, place, own)] if self.in_first_copy else []
        except (OSError, RuntimeError) as error:  # torch closes its archive once more
            failed.append(explain(error))
        if words := _gather(failed):
            on_main(lambda: remove_halves(self.folder))
            raise OSError(words[0])
        return list(_gather(digests))

    def load_checkpoint(self, inputs: Mapping[str, Any]) -> dict[str, Any] | None:
        """The state of the newest whole checkpoint on the main process's disk, or None; the same on every process.

        Processes that see the same file read it themselves: of all weights it may have more bytes than a GPU, through
        which it would be sent. Where one does not, all are sent it. `inputs` are what the run is made with, as far as
        that is known only now that everything has loaded. Raises ValueError: processes have loaded different things, or
        the inputs have changed since; or as `find_checkpoint`.
        """
        self._inputs |= inputs
        if self.processes > 1 and (reason := difference(_gather([loaded_facts(inputs)]))):
            raise ValueError(reason)
        if not self._resumed:
            return None

        def find() -> tuple[str, str] | None:
            self._refuse_changes()
            self._found = find_checkpoint(self.folder, changed=self._config.resume_changed)
            if self._found.folder is None or self._found.state is None:
                return None
            if not self._known:
                self._manifest["run"] = self._found.state.get("run")
            return self._found.folder.name, sealed_digest(self._found.folder)

        chosen, state = on_main(find), self._found.state
        if chosen is None or self.processes == 1:
            return state
        if not self.main:
            state = state_of(self.folder / "checkpoints" / chosen[0], chosen[1])
        return state if all(_gather([state is not None])) else on_main(lambda: self._found.state)

    def begin(self, first: int, **facts: Any) -> None:
        """Call it when everything is restored and iteration `first` comes next: from here on the folder changes.

        Drops rows of `metrics.jsonl` written after the checkpoint, later evaluations and the mark of a finished run.
        Moves damaged files into `damaged-<n>` and says so. `facts`, known only now, go into the manifest.
        """
        wait_for_everyone()
        if self.processes > 1:  # they may compute with other kernels, or on other cards
            card = torch.cuda.get_device_name() if self.device.type == "cuda" else str(self.device.type)
            line = rounding_note(_gather([{"attention": str(facts.get("attention")), "card": card}]))
            if line and self.main:
                print(line, flush=True)
        self.begun = True
        self._facts |= facts
        if not self.main:
            return
        self._first = first
        if self._resumed:
            remove_halves(self.folder)
            if said := self._found.said:
                if self._found.damaged:
                    aside = set_aside(self.folder, [*self._found.damaged])
                    said = f"{said}. What was damaged or later is kept in {aside}"
                    self._facts["damaged"] = said
                print(f"Note: {said}.", flush=True)
            (self.folder / "summary.json").unlink(missing_ok=True)
            if (self.folder / ROWS).exists():
                with replacing(self.folder / ROWS) as stream:
                    stream.write(self._found.rows)
            self._rows = MetricRows(self.folder, self._found.rows)
            if self._found.folder is not None and self._found.lost:
                reseal(self._found.folder, self._rows.seal())
            self._found = Continued()  # a state may be large
            remove_evaluations(self.folder, after=first)
        self._write()
        self.trackers = open_trackers(
            asdict(self._config), to_yaml(self._config), self.folder, run=self._manifest["run"], resumed=self._resumed
        )

    # ---- interrupts, end -----------------------------------------------------------------------------------------

    def note(self, **facts: Any) -> None:
        """Adds facts to the manifest."""
        self._manifest |= facts
        if self.main:
            write_manifest(self.folder, self._manifest)

    def finish(self, *, finished: bool) -> None:
        """Notes in the manifest when the run finished or stopped, and its peak memory; checks its rows once more."""
        if self.main:
            self._rows.seal()
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        end = {"finished" if finished else "stopped": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
        self.note(**end, peak_memory_gib=round(peak / 2**30, 2))

    def watching_interrupts(self) -> AbstractContextManager[None]:
        """Inside, the first Ctrl-C asks for a stop after this iteration; a second one stops at once. SIGTERM and
        SIGHUP, a terminal that was closed, do the same; under nohup SIGHUP stays ignored."""

        def stop() -> None:
            if self.stop_requested:
                raise KeyboardInterrupt
            self.stop_requested = True
            if self.main:
                print("\nStopping after this iteration, then saving. Press Ctrl-C again to stop at once.", flush=True)

        return on_interrupt(stop)

    def should_stop(self) -> bool:
        """Whether any process was asked to stop; every process gets the same answer."""
        flag = torch.tensor([int(self.stop_requested)])  # on the host, so no GPU waits
        return bool(self.accelerator.reduce(flag, reduction="sum").item())

    # ---- between processes ---------------------------------------------------------------------------------------

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Joins a tensor `[b, ...]` of every rank along the batch, in rank order; it may live on the host. All
        processes get the same, of each rank what its first process has."""
        if self.processes == 1:
            return tensor
        gathered: torch.Tensor = self.accelerator.gather(tensor.contiguous().to(self.device))
        if self.layout.context > 1:
            rows = len(tensor) if tensor.ndim else 1
            gathered = gathered.unflatten(0, (self.processes, rows))[:: self.layout.context].flatten(0, 1)
        return gathered.to(tensor.device)

    def total(self, tensor: torch.Tensor) -> torch.Tensor:
        """Adds up a tensor of every rank; all processes get the sum."""
        mine = tensor if self.first else torch.zeros_like(tensor)
        summed: torch.Tensor = self.accelerator.reduce(mine, reduction="sum")
        return summed

    def total_gradient(self, gradient: torch.Tensor) -> torch.Tensor:
        """Adds up the gradients of all processes.

        Processes that share an image's tokens have the loss of the whole image, and its gradient by way of their own
        tokens: what is joined behind the network is split again on the way back, and not added up. So their sum is the
        gradient of the image, and that of all processes the gradient of all images.
        """
        if self.processes == 1:
            return gradient
        summed: torch.Tensor = self.accelerator.reduce(gradient, reduction="sum")
        return summed

    def total_of_copies(self, gradient: torch.Tensor) -> torch.Tensor:
        """Adds up, in place, what is there of the gradients of this process's part in every copy of the model, and of
        those that share its images' tokens."""
        for axis, number in (("replicate", self.layout.replicate), ("context", self.layout.context)):
            if number > 1:
                group = device_mesh(self.layout, self.device.type)[axis].get_group()
                torch.distributed.all_reduce(gradient, group=group)
        return gradient

    def joined(self, mine: list[Any]) -> list[Any]:
        """The lists of all ranks, one after another."""
        if self.processes == 1:
            return mine
        return list(_gather(mine if self.first else []))

    def of_all(self, mine: T) -> list[T]:
        """What each process has, in their order, grouped by rank; every process calls it."""
        return [mine] if self.processes == 1 else _gather([mine])

    def of_first(self, mine: T) -> T:
        """What the first process of this rank has; every process calls it."""
        if self.layout.context == 1:
            return mine
        found: T = _gather([mine])[self.rank * self.layout.context]
        return found


def _gather(mine: list[Any]) -> list[Any]:
    """What every process has, in their order."""
    from accelerate.utils import gather_object  # takes a third of a second, and a plan has no processes

    found: list[Any] = gather_object(mine)
    return found
