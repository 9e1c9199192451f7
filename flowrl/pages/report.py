"""Writes one self-contained page about a run from the run's files."""

from __future__ import annotations

import re
from pathlib import Path

from flowrl.pages.run_page import FOOTER, render
from flowrl.runs.run_data import read_run
from flowrl.runtime.files import refuse_foreign, replacing
from flowrl.runtime.public import public

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
