"""All tiny configurations, with the models they name, on a pretend GPU.

    python tests/trials/pretend_gpu_runs.py [cuda | mps] [NAME ...]

Ten seconds or so each; ends with 1 where a device would have refused something.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from flowrl.config.base import config_files

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "helpers"))

from pretend_runs import OTHERS, more_overrides, said, watched_run  # noqa: E402

SCENE = 64  # pixels of the embedded model's images


def main(kind: str = "cuda", *names: str) -> int:
    """Runs the configurations of these names, all without one, and says what is found."""
    faults = 0
    for name in names or sorted(name for name in config_files() if name.startswith("tiny_")):
        with tempfile.TemporaryDirectory() as folder:
            more = OTHERS.get(name) or more_overrides(name, Path(folder), SCENE)
            watched = watched_run(name, Path(folder), "mps" if kind == "mps" else "cuda", *more)
        faults += len(watched.findings.faults)
        print(said(name, watched), flush=True)
    return int(faults > 0)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
