"""Published functions of flow_grpo, loaded as they stand in a checkout of it: nothing of it lies in this repository.

Its training script wants libraries that nothing here needs, so that its one function is cut out of its syntax tree.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import sys
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

COMMIT = "ac4c86e (2025-07-18)"
_PATCH = "flow_grpo/diffusers_patch/"
PIPELINE, STEP = _PATCH + "sd3_pipeline_with_logprob.py", _PATCH + "sd3_sde_with_logprob.py"
TRACKER, SCRIPT = "flow_grpo/stat_tracking.py", "scripts/train_sd3.py"
TESTED = {
    PIPELINE: "c4a4ae4e5680572df30e8adc905ee3e76d4eaa2e52f68e4ee75617be05941be8",
    STEP: "9392d8978073ea26ad7726806412bd39cc284f16857eb027e8fe991cf0be470e",
    TRACKER: "1708c9a4da6f948ed5ccac9ec844705f470cd551acc99958b1f7736b01b10d27",
    SCRIPT: "d45e92160265a4663e5a9f6e6be9c96dfeccf5577452437e1a08d503ed6ea1ba",
}
"""The files that are read, and their SHA-256 at the commit that the comparison was written against."""
_SCORER = "compute_log_prob"


@dataclass(frozen=True, kw_only=True, slots=True)
class Published:
    """What is taken from a checkout.

    Attributes:
        pipeline_with_logprob: samples, decodes, and gives every latent and log-density on the way.
        compute_log_prob: scores a stored transition again; gradient flows through the prompt's branch alone.
        compute_log_prob_of_both: the same without the `detach` of the negative branch.
        tracker: of rewards of each prompt, makes advantages.
    """

    pipeline_with_logprob: Callable[..., Any]
    compute_log_prob: Callable[..., Any]
    compute_log_prob_of_both: Callable[..., Any]
    tracker: type[Any]


def load_checkout(folder: Path, tested: Mapping[str, str] = TESTED) -> Published:
    """Loads the functions.

    Args:
        folder: a checkout.
        tested: the files that are read, and what they have to hold.

    Raises:
        ValueError: a file is missing, is another version than this was written against, or lacks what is read from it.
    """
    if lacking := [name for name in tested if not (folder / name).is_file()]:
        raise ValueError(
            f"{folder} is no checkout of flow_grpo: it lacks {', '.join(lacking)}; clone it and check out {COMMIT}"
        )
    if other := [name for name, digest in tested.items() if _digest(folder / name) != digest]:
        raise ValueError(
            f"{folder} is not flow_grpo at commit {COMMIT}, which this comparison was written against and tested with: "
            f"{', '.join(other)} differ; check out that commit"
        )
    package = f"_checkout_{_digest(folder / SCRIPT)[:12]}"
    root = types.ModuleType(package)
    root.__path__ = [str(folder / "flow_grpo")]
    sys.modules[package] = root
    names = (Path(name).relative_to("flow_grpo").with_suffix("").parts for name in (PIPELINE, STEP, TRACKER))
    pipeline, step, tracking = (importlib.import_module(".".join((package, *parts))) for parts in names)
    source = (folder / SCRIPT).read_text(encoding="utf-8")
    known = {"torch": torch, "sde_step_with_logprob": step.sde_step_with_logprob}
    return Published(
        pipeline_with_logprob=pipeline.pipeline_with_logprob,
        compute_log_prob=function_of(source, _SCORER, known),
        compute_log_prob_of_both=function_of(source, _SCORER, known, detached=False),
        tracker=tracking.PerPromptStatTracker,
    )


def function_of(source: str, name: str, known: Mapping[str, Any], *, detached: bool = True) -> Callable[..., Any]:
    """One function of a script that is not run.

    Args:
        source: of the script.
        name: of the function.
        known: what the function reads of the script's module.
        detached: false leaves out its statements `x = x.detach()`, of which there must be one.

    Raises:
        ValueError: no such function, or no such statement.
    """
    found = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef) and node.name == name]
    if not found:
        raise ValueError(f"the script has no function {name}: check out {COMMIT}")
    function = found[0]
    if not detached:
        cut = _WithoutDetach()
        function = cut.visit(function)
        if cut.count != 1:
            raise ValueError(f"{name} has {cut.count} statements x = x.detach(), and 1 is expected: check out {COMMIT}")
    space = dict(known)
    exec(compile(ast.fix_missing_locations(ast.Module(body=[function], type_ignores=[])), name, "exec"), space)
    return space[name]


class _WithoutDetach(ast.NodeTransformer):
    """Takes statements `x = x.detach()` out, and counts them."""

    def __init__(self) -> None:
        self.count = 0

    def visit_Assign(self, node: ast.Assign) -> ast.Assign | None:
        target = node.targets[0]
        if isinstance(target, ast.Name) and ast.unparse(node.value) == f"{target.id}.detach()":
            self.count += 1
            return None
        return node


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
