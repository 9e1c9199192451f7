"""One self-contained page about a run, from what the run wrote."""

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
    """Writes the report of a run and returns its path; the run may be finished, stopped, or still at work.

    The page needs no network and no other file: charts are inline SVG, images are embedded, and so are video clips
    up to 3 MB in all; larger ones are linked, so that the page has to stay beside them. The file is replaced as a
    whole.

    Args:
        run_folder: what `flowrl train` made (config.yaml, manifest.json, metrics.jsonl, eval/, samples/).
        out: the HTML file to write; None writes `report.html` into the run folder.

    Raises:
        FlowrlError: there is no such folder, it is no run, or `out` is a file that is no report.
    """
    run = read_run(Path(run_folder))
    if out is not None:
        refuse_foreign(Path(out), own=_REPORT)
    out = Path(run_folder) / "report.html" if out is None else Path(out)
    with replacing(out) as stream:
        stream.write(render(run, out.parent).encode("utf-8"))
    return out
