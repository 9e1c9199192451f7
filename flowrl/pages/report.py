"""The report of a run: one self-contained page, made of the run's files."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from flowrl.pages.run_curves import curves, health, summary, tasks, tiles, time_by_stage
from flowrl.pages.shown_samples import images
from flowrl.rendering.document import MEDIA_POLICY, POLICY, document
from flowrl.rendering.markup import code, esc, facts_table, fold, notes_box, plural, section
from flowrl.runs.held_out_result import held_out
from flowrl.runs.run_data import RunData, read_run
from flowrl.runtime.files import refuse_foreign, replacing
from flowrl.runtime.public import public

FOOTER = "Written by <code>flowrl report</code> from the files of the run."
_REPORT = re.compile(f"<footer><p>{re.escape(FOOTER)}</p>")


@public
def report(run_folder: str | Path, out: str | Path | None = None) -> Path:
    """Writes the report of a run and returns its path; the run may be finished, stopped, or still training.

    The page needs no internet and no other file: charts are inline SVG, and images and up to 3 MB of video clips are
    embedded. Larger clips are links, so keep the page beside them. The file is replaced as a whole.

    Args:
        run_folder: the folder of a training (config.yaml, manifest.json, metrics.jsonl, eval/, samples/).
        out: the HTML file to write; None writes `report.html` into the run folder.

    Raises:
        FlowrlError: there is no such folder, it is not a run, or `out` is a file that is not a report.
    """
    run = read_run(Path(run_folder))
    if out is not None:
        refuse_foreign(Path(out), own=_REPORT)
    out = Path(run_folder) / "report.html" if out is None else Path(out)
    with replacing(out) as stream:
        stream.write(render(run, out.parent).encode("utf-8"))
    return out


def render(run: RunData, home: Path) -> str:
    """The whole page as HTML, for a file in the folder `home`."""
    held = held_out(run)
    body = "".join(
        [
            summary(run, held),
            notes_box(run.notes),
            tiles(run, held),
            curves(run, held),
            tasks(held),
            images(run, home),
            health(run),
            time_by_stage(run),
            reproduce(run),
            provenance(run),
        ]
    )
    policy = MEDIA_POLICY if run.sample_word == "video" else POLICY
    return document(run.name, body, lead=status(run), footer=FOOTER, policy=policy)


def status(run: RunData) -> str:
    """The progress of the run, and its machine."""
    done = int(run.train[-1]["iteration"]) + 1 if run.train else 0
    state = '<span class="mark good">✓ finished</span>' if run.finished else '<span class="mark">not finished</span>'
    planned = run.config.get("num_iterations")
    reach = f"{done} of {plural(int(planned), 'iteration')}" if isinstance(planned, int) else plural(done, "iteration")
    facts = [run.manifest.get(key) for key in ("config_name", "device", "started")]
    return " · ".join([state, reach, *(esc(fact) for fact in facts if fact)])


def reproduce(run: RunData) -> str:
    """Commands that repeat the run, continue it, and use its result."""
    folder = str(Path(run.config.get("out") or f"runs/{run.name}").expanduser())
    quoted = shlex.quote(folder)
    lines = []
    commit, command = run.manifest.get("git_commit"), run.manifest.get("command")
    if command:
        text = shlex.join(str(word) for word in command) if isinstance(command, list) else str(command)
        lines += ["# the command of this run", *([f"git checkout {commit}"] if commit else []), text, ""]
    lines += [
        "# the same settings in a new folder",
        f"flowrl train {shlex.quote(folder + '/config.yaml')} out={quoted}-again",
        "",
    ]
    if not run.finished:
        lines += ["# continue from the last complete checkpoint", f"flowrl train resume={quoted}", ""]
    lines += ["# this page, from the files as they are now", f"flowrl report {quoted}"]
    if run.has_lora:
        lines += [
            "",
            "# in Python, with the diffusers pipeline of the base model",
            f"pipeline.load_lora_weights({folder + '/lora'!r})",
        ]
    if run.has_model:
        lines += ["", "# in Python", f"pipeline = diffusers.DiffusionPipeline.from_pretrained({folder + '/model'!r})"]
    lead = "All noise is a function of the seed and of counters, so a run on the same machine repeats itself."
    return section("reproduce", "Run it again", code("\n".join(lines)), lead)


def provenance(run: RunData) -> str:
    """The manifest and the resolved configuration, folded."""
    parts = ""
    if run.manifest:
        parts += fold("Manifest", facts_table("Versions, machine and command", ["Key", "Value"], run.manifest))
    if run.config_text:
        parts += fold("Resolved configuration", code(run.config_text))
    return section("provenance", "Settings and versions", parts)
