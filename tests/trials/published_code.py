"""Functions of published code beside ours, on random inputs: values, and gradients where there are any.

    python tests/trials/published_code.py CHECKOUTS --out docs/research/trials/published_code.json

CHECKOUTS is a folder of other people's repositories, as git directories or trees that hold the commits named here; this
command fetches nothing. Functions are cut out of their files by syntax tree and run as they are, nothing of them is
kept. It fails where one differs by more than its bound, or where none of the checkouts has it.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE / "upstream")]

from origin import origin  # noqa: E402
from published_credit import CREDITS  # noqa: E402
from published_cutting import Checkouts, Comparison, MissingError, difference  # noqa: E402
from published_losses import LOSSES  # noqa: E402
from published_matching import MATCHING  # noqa: E402
from published_rules import RULES  # noqa: E402
from published_steps import STEPS  # noqa: E402

from flowrl.runtime.files import write_atomically  # noqa: E402

COMPARISONS: tuple[Comparison, ...] = (*STEPS, *LOSSES, *MATCHING, *CREDITS, *RULES)
DRAWS = 5
LICENCES = {
    "yifan123/flow_grpo": "MIT",
    "verl-project/verl-omni": "Apache-2.0",
    "XueZeyue/DanceGRPO": "Apache-2.0",
    "X-GenGroup/Flow-Factory": "Apache-2.0",
    "NVlabs/DiffusionNFT": "Apache-2.0",
    "showlab/Adv-GRPO": "MIT",
    "Tencent-Hunyuan/UniRL": "Apache-2.0",
    "Fredreic1849/BranchGRPO": "Apache-2.0",
    "YunzeTong/TurningPoint-GRPO": "MIT",
    "kvablack/ddpo-pytorch": "MIT",
    "yk7333/d3po": "MIT",
    "scxue/advantage_weighted_matching": "Apache-2.0",
    "lime-RL/DCPO": "Apache-2.0",
    "djghosh13/geneval": "MIT",
    "TencentQQGYLab/ELLA": "Apache-2.0",
    "CodeGoat24/UniGenBench": "CC-BY-4.0",
    "Vchitect/VBench": "Apache-2.0",
}
"""By the LICENSE file of each commit."""
NOT_RUN = {
    "Tencent-Hunyuan/MixGRPO": "MixGRPO; its terms allow academic use alone",
    "CodeGoat24/Pref-GRPO": "the win rate of Pref-GRPO; its terms allow academic use alone",
    "NVlabs/GDPO": "GDPO; its README names a non-commercial licence, its LICENSE file Apache-2.0",
    "X-GenGroup/PaCo-RL": "log-taming of PaCo-GRPO; no licence",
    "Luo-Yihong/DGPO": "DGPO, compared with Flow-Factory's instead; no licence",
    "Shredded-Pork/TempFlow-GRPO": "TempFlow-GRPO; no licence",
    "bcmi/Granular-GRPO": "G2RPO; no licence",
}
"""Public code that is not run here, and why."""
NO_CODE = ("DenseGRPO", "Stepwise-Flow-GRPO", "TreeGRPO", "VGPO")
"""Methods whose code was not found."""


def measured(comparison: Comparison, checkouts: Checkouts) -> dict[str, Any]:
    """A row of the JSON."""
    cut, arrays, worst, where = comparison.cut(checkouts), 0, -1.0, ""
    for seed in range(DRAWS):
        for what, ours, theirs in comparison.compare(cut, torch.Generator().manual_seed(seed)):
            arrays, gap = arrays + 1, difference(ours, theirs)
            if not gap <= worst:
                worst, where = gap, what
    return {
        "method": comparison.method,
        "repository": comparison.repository,
        "commit": comparison.commit,
        "file": comparison.file,
        "function": comparison.function,
        "licence": LICENCES[comparison.repository],
        "ours": f"flowrl.{comparison.ours}",
        "gradient": comparison.gradient,
        "arrays": arrays,
        "worst": float(f"{worst:.2g}"),
        "where": where,
        "bound": comparison.bound,
        "agrees": worst <= comparison.bound,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkouts", type=Path)
    parser.add_argument("--out", type=Path, help="the JSON; without it the rows are printed alone")
    parser.add_argument("--only", default="", help="part of a repository, file or function")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for comparison in COMPARISONS:
        if chosen.only in f"{comparison.repository} {comparison.file} {comparison.function}":
            try:
                rows.append(measured(comparison, Checkouts(chosen.checkouts)))
            except MissingError as error:
                sys.exit(f"{error}: fetch it, or try a part with --only")
            print(json.dumps(rows[-1]), flush=True)
    if chosen.out:
        found = origin() | {"draws": DRAWS, "functions": rows, "not_run": NOT_RUN, "no_public_code": list(NO_CODE)}
        found["command"] = (
            "python tests/trials/published_code.py CHECKOUTS --out docs/research/trials/published_code.json"
        )
        write_atomically(chosen.out, json.dumps(found, indent=1) + "\n")
    if wrong := [row for row in rows if not row["agrees"]]:
        sys.exit(f"{len(wrong)} of {len(rows)} differ by more than their bound")


if __name__ == "__main__":
    main()
