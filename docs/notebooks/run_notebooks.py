"""Runs the notebooks from top to bottom: python docs/notebooks/run_notebooks.py [NAME …], or `make notebooks`.

Each runs in a folder of its own under build/notebooks and is written there with what its cells gave; those in docs/
hold no outputs, so that nothing in them can be stale. The first cell that fails ends it.
"""

from __future__ import annotations

import shutil
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
OUT = HERE.parents[1] / "build" / "notebooks"
CELL_SECONDS = 900


def main(names: list[str]) -> int:
    """Runs all notebooks, or those that are named; 0, or 1 with the cell that failed."""
    import nbformat
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError

    known = sorted(path.stem for path in HERE.glob("*.ipynb"))
    if unknown := set(names) - set(known):
        print(f"there is no notebook {', '.join(sorted(unknown))}: there are {', '.join(known)}", file=sys.stderr)
        return 1
    for name in names or known:
        folder = OUT / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        notebook = nbformat.read(HERE / f"{name}.ipynb", as_version=4)
        begun = time.monotonic()
        client = NotebookClient(
            notebook, timeout=CELL_SECONDS, resources={"metadata": {"path": str(folder)}},
            extra_arguments=["--log-level=ERROR"],  # else each kernel warns of its connection on this machine
        )  # fmt: skip
        try:
            client.execute()
        except CellExecutionError as error:
            print(f"{name}: a cell failed\n{error}", file=sys.stderr)
            return 1
        finally:
            nbformat.write(notebook, OUT / f"{name}.ipynb")
        print(f"{name}: {time.monotonic() - begun:.0f} s, written to build/notebooks/{name}.ipynb", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
