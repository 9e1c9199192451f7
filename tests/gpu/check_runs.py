"""Short trainings of the embedded models: recipes, dtypes, resume, waits, streams, offload, compiling, workers."""

from __future__ import annotations

import importlib.util
import math
import shutil
import warnings
from collections import Counter
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from gpu_place import Figures, Place
from gpu_runs import (
    DEVIATION,
    DIFFERS,
    MOST_DEVIATION,
    apart,
    command,
    lora_of,
    rows_of,
    train,
    update_by,
    weights_apart,
)

from flowrl.pipelines.arithmetic.compiling import check_compile, compile_blocks
from flowrl.pipelines.weights import stock_loading
from flowrl.runtime import precision
from flowrl.training import loop
from flowrl.training.beside import Beside
from flowrl.training.learner import GradientSum

TINY = "tiny_grpo_geneval"
RECIPES: dict[str, tuple[str, ...]] = {
    "tiny_grpo_geneval": (DIFFERS,),
    "tiny_nft": ("times.count=2",),
    "tiny_dpo": (DIFFERS,),
    "tiny_refl": (),
    "tiny_sd15_grpo": (DIFFERS,),
    "tiny_wan_grpo": ("prompts_per_step=1", "group_size=2", "micro_batch_size=2"),
    "tiny_sd3_full": (),
}
"""One configuration for each recipe, for each embedded family, and for whole weights."""
LOGGED = ("memory/peak_gib", "memory/reserved_gib", "loss_scale")
CLOSE = 1e-3
"""Within which two runs of a card are equal: attention's backward pass adds up in no fixed order there."""
pytestmark = pytest.mark.seconds(30)


def trained(rows: list[dict[str, Any]], figures: Figures) -> None:
    """Notes what a run logs; it must have learnt something finite."""
    figures |= {"iterations": len(rows), "seconds of an iteration": rows[-1]["seconds"]}
    figures |= {key: rows[-1][key] for key in LOGGED if key in rows[-1]}
    deviations = [row[DEVIATION] for row in rows if row.get(DEVIATION) is not None]
    if deviations:
        figures[DEVIATION] = max(deviations)
        assert max(deviations) < MOST_DEVIATION
    for row in rows:
        for key in ("loss", "reward", "grad_norm"):
            assert key not in row or math.isfinite(row[key]), key
    norms = [row["grad_norm"] for row in rows if "grad_norm" in row]
    figures["grad_norm"] = norms[-1] if norms else None
    assert not norms or max(norms) > 0


@pytest.mark.parametrize("name", list(RECIPES))
def check_recipe(place: Place, figures: Figures, tmp_path: Path, name: str) -> None:
    """A configuration trains, in bfloat16 on a card."""
    iterations = place.pick("2", "1")
    rows = train(place, tmp_path / "run", name, f"num_iterations={iterations}", *RECIPES[name])
    trained(rows, figures)
    assert (tmp_path / "run" / ("model" if name.endswith("full") else "lora")).is_dir()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def check_low_precision(place: Place, figures: Figures, tmp_path: Path, dtype: str) -> None:
    """Sixteen bits: the ratio is near 1 before the first update, float16 scales its loss and the scale holds."""
    rows = train(place, tmp_path / "run", TINY, DIFFERS, f"pipeline.dtype={dtype}", "num_iterations=1")
    trained(rows, figures)
    assert (dtype == "float16") == ("loss_scale" in rows[0])
    assert rows[0].get("loss_scale", 2.0) > 1


def check_other_kernel(place: Place, figures: Figures, tmp_path: Path) -> None:
    """The update attends by another right kernel than the rollout: the run goes on, and logs how far they are apart."""
    sizes = (DIFFERS, "clip_range=0.5", "num_iterations=1", "rollout_batch_size=4")
    settings = ("pipeline.dtype=bfloat16", f"pipeline.attention={place.pick('flash', 'float32')}", *sizes)
    with update_by(place.pick("efficient", "native"), figures):
        rows = train(place, tmp_path / "run", TINY, *settings)
    trained(rows, figures)
    assert rows[0][DEVIATION] > 0, "the update attends as the rollout does"


def check_resume(place: Place, figures: Figures, tmp_path: Path) -> None:
    """A run that stops after its first iteration and goes on is the one that did not: to the bit on a CPU."""
    whole = train(place, tmp_path / "whole", TINY, DIFFERS, "checkpoint_every=1", "keep_checkpoints=9")
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    numbered = sorted((tmp_path / "cut" / "checkpoints").iterdir())
    assert len(numbered) > 1
    shutil.rmtree(numbered[-1])
    command(f"resume={tmp_path / 'cut'}")
    again = rows_of(tmp_path / "cut")
    figures |= {"norm": again[-1]["grad_norm"], "rows apart": (rows := apart(again, whole))}
    figures["weights apart"] = weights = weights_apart(tmp_path / "cut", tmp_path / "whole")
    assert max(rows, weights) <= place.pick(CLOSE, 0.0)


def check_repeat(place: Place, figures: Figures, tmp_path: Path) -> None:
    """The same run twice: equal on a CPU; on a card a figure, within what the order of sums makes."""
    first, second = (train(place, tmp_path / name, TINY, DIFFERS, "num_iterations=1") for name in ("a", "b"))
    figures["rows apart"] = rows = apart(first, second)
    figures["weights apart"] = weights_apart(tmp_path / "a", tmp_path / "b")
    assert rows <= place.pick(CLOSE, 0.0)


def check_waits(place: Place, figures: Figures, tmp_path: Path) -> None:
    """A micro-batch of the update waits for the device twice at most; by a pretended card in the CPU form."""
    if not place.on_card:
        from pretend_runs import toy_run

        figures["form"] = "pretended card"
        watched = toy_run(TINY, tmp_path, "cuda")
        assert not watched.findings.faults, watched.findings.faults
        figures |= {"most waits": max(watched.waits, default=0), "an iteration's, a micro-batch": watched.total}
        assert figures["most waits"] <= 2
        return
    add, marks = GradientSum.add, list[int]()
    before = torch.cuda.get_sync_debug_mode()

    def places() -> Counter[str]:
        return Counter(f"{Path(w.filename).name}:{w.lineno}" for w in told if "synchroniz" in str(w.message))

    def counted(self: GradientSum, loss: torch.Tensor) -> None:
        add(self, loss)
        marks.append(places().total())

    with warnings.catch_warnings(record=True) as told, mock.patch.object(GradientSum, "add", counted):
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            train(place, tmp_path / "run", TINY, "group_size=8")
        finally:
            torch.cuda.set_sync_debug_mode(before)
    between = [after - earlier for earlier, after in pairwise(marks)]
    figures |= {"most waits": sorted(between)[len(between) // 2], "places": str(places().most_common(6))}
    assert figures["most waits"] <= 2


def check_beside(place: Place, figures: Figures, tmp_path: Path) -> None:
    """Images decoded and scored on a stream of their own are those of a serial run; a thread in the CPU form."""
    with mock.patch.object(loop, "scored_beside", return_value=False):
        serial = train(place, tmp_path / "serial", TINY, "num_iterations=1")
    started, start = list[int](), Beside.start

    def counted(self: Beside, *args: Any) -> None:
        started.append(1)
        start(self, *args)

    with (
        mock.patch.object(loop, "scored_beside", return_value=True),
        mock.patch.object(Beside, "start", counted),
    ):
        beside = train(place, tmp_path / "beside", TINY, "num_iterations=1")
    assert started, "nothing was scored beside the sampling"
    figures |= {"pieces": len(started), "reward apart": abs(beside[0]["reward"] - serial[0]["reward"])}
    assert beside[0]["reward"] == serial[0]["reward"]


def check_tf32_is_restored(place: Place, figures: Figures, tmp_path: Path) -> None:
    """Settings of the process are after a run what they were before it, also one with the autoencoder in TF32."""

    def state() -> tuple[Any, ...]:
        cuda = torch.backends.cuda.matmul.allow_tf32
        return torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32, cuda

    before = state()
    with precision.arithmetic(place.pick("tf32", "float32")):
        inside = state()
    assert state() == before
    train(place, tmp_path / "run", TINY, "num_iterations=1", f"pipeline.vae_dtype={place.pick('tf32', 'bfloat16')}")
    figures |= {"before": str(before), "inside": str(inside)}
    assert state() == before


def check_offload(place: Place, figures: Figures, tmp_path: Path) -> None:
    """Text encoders, autoencoder and rewards that rest on the host change no number."""
    here = train(place, tmp_path / "here", TINY, DIFFERS, "num_iterations=1")
    away = "pipeline.offload=[text_encoders, vae, rewards]"
    rested = train(place, tmp_path / "rested", TINY, DIFFERS, "num_iterations=1", away)
    figures["rows apart"] = rows = apart(rested, here)
    assert rows <= place.pick(CLOSE, 0.0)


def check_optimizer_offload(place: Place, figures: Figures, tmp_path: Path) -> None:
    """Masters and moments on the host, for whole weights: the run is the same up to its arithmetic."""
    here = train(place, tmp_path / "here", "tiny_sd3_full", "num_iterations=1", "pipeline.dtype=float32")
    settings = ("num_iterations=1", "pipeline.dtype=float32", "optim.offload=true")
    rested = train(place, tmp_path / "rested", "tiny_sd3_full", *settings)
    figures["rows apart"] = rows = apart(rested, here)
    assert rows <= CLOSE


@pytest.mark.seconds(90)
def check_compiled_run(place: Place, figures: Figures, tmp_path: Path) -> None:
    """A run with compiled blocks; traced alone in the CPU form."""
    try:
        check_compile("blocks", place.device)
    except ValueError as error:
        pytest.skip(str(error))
    traced = partial(compile_blocks, backend=place.pick("inductor", "aot_eager"))
    with mock.patch.object(stock_loading, "compile_blocks", traced):
        rows = train(place, tmp_path / "run", TINY, DIFFERS, "num_iterations=1", "pipeline.compile=blocks")
    trained(rows, figures)


@pytest.mark.seconds(60)
def check_workers(place: Place, figures: Figures, tmp_path: Path) -> None:
    """Two workers on Ray draw what the run would have drawn; on one card they share it."""
    if importlib.util.find_spec("ray") is None:
        pytest.skip("the package ray is not installed")
    here = train(place, tmp_path / "here", TINY, DIFFERS, "num_iterations=1")
    share = ("workers.rollout_gpus=0.25",) if place.on_card else ()
    there = train(place, tmp_path / "there", TINY, DIFFERS, "num_iterations=1", "workers.rollouts=1", *share)
    trained(there, figures)
    figures["rows apart"] = rows = apart(there, here)
    assert rows <= place.pick(CLOSE, 0.0)
    assert lora_of(tmp_path / "there")
