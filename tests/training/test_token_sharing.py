"""Two processes that share the tokens of every image or video train what one process trains.

Velocities and gradients of more families are compared in `tests/trials/shared_tokens.py`.
"""

from __future__ import annotations

import math
import shutil
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from config_files import as_launched
from split_runs import ROUTED, command
from tiny_runs import differences, lora_tensors, metrics, model_tensors, state
from two_processes import train_on_two

from flowrl import pipelines
from flowrl.cli import main
from flowrl.config.train import TrainConfig, load_config
from flowrl.pipelines.arithmetic.compiling import first_expert
from flowrl.pipelines.places.known_checkpoints import checkpoints
from flowrl.pipelines.shared.cards import Size
from flowrl.pipelines.shared.context_parallel import SPLIT_FAMILIES, image_tokens, refuse_unsplit
from flowrl.pipelines.weights.quantize import LIBRARIES
from flowrl.session.preflight import preflight
from flowrl.training.processes.mesh import Layout
from flowrl.training.run import Run

# Half as many rows in a product add up in another order, and rewards are hundreds.
METRICS, WEIGHTS = 1e-5, 1e-6
# Adam divides by the gradient's size: where that is nearly 0 a step of 1e-8 would be one of rounding.
SMOOTH = "optim.eps=0.01"
FULL = ("policy.train=full", "policy.lora_rank=null", "policy.ema_decay=0.5", "optim.lr=1e-3")
SHORT = ("num_iterations=1", "eval_every=0")
RUNS: dict[str, tuple[str, ...]] = {
    "wan": ("wan", "grpo", "pipeline.gradient_checkpointing=true"),
    "qwen_image": ("qwen_image", "forward", "eval.height=24"),
    "full": ("flux", "grpo", *FULL, "keep_graphs=true"),
    "compiled": ("flux", "grpo", "pipeline.compile=blocks"),
    "gradients": ("flux", "grpo", "keep_graphs=gradients", "policy.lora_variant=dora"),
    **{form: ("flux", "grpo", f"pipeline.quantize={form}", *ROUTED, *SHORT) for form, library in LIBRARIES.items()
       if find_spec(library)},
}  # fmt: skip


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, warm_python: str) -> Path:
    """A folder with each run on one process and shared by two, and one that two began and one goes on with."""
    folder = tmp_path_factory.mktemp("tokens")
    one, two = folder / "one", folder / "two"

    def told(of: Path, *more: str) -> list[tuple[int, bool, list[str]]]:
        return [(0, False, command(folder, family, recipe, of / name, SMOOTH, *settings, *more))
                for name, (family, recipe, *settings) in RUNS.items()]  # fmt: skip

    train_on_two(folder, told(one), processes=1, python=warm_python)
    train_on_two(folder, told(two, "parallel.context=2"), python=warm_python)
    shutil.copytree(two / "wan", two / "one-wan")
    shutil.rmtree(two / "one-wan" / "checkpoints" / "000002")
    assert main(["train", f"resume={two / 'one-wan'}", "parallel.context=1"]) == 0
    return folder


def _close(a: Path, b: Path) -> None:
    for mine, theirs in zip(metrics(a), metrics(b), strict=True):
        assert mine.keys() == theirs.keys()
        for key in mine:
            of_reward = abs(mine.get("reward", 0.0)) if key.startswith("reward") else 0.0
            assert abs(mine[key] - theirs[key]) <= METRICS * max(1.0, abs(mine[key]), of_reward), key
    shipped = lora_tensors if (a / "lora").exists() else model_tensors
    assert differences(shipped(a), shipped(b)) <= WEIGHTS
    assert state(a)["iteration"] == state(b)["iteration"]


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_two_processes_train_together_what_one_trains(runs: Path, name: str) -> None:
    rows = metrics(runs / "two" / name)
    assert any(row.get("grad_norm", 0.0) > 0 for row in rows)
    assert all(row.get("ratio_first_deviation", 0.0) == 0.0 for row in rows)
    _close(runs / "one" / name, runs / "two" / name)


@pytest.mark.slow
def test_one_process_continues_what_two_shared(runs: Path) -> None:
    _close(runs / "one" / "wan", runs / "two" / "one-wan")


# ---- ranks -----------------------------------------------------------------------------------------------------------


class FourProcesses:
    """What one of four processes is told of the others: they have what it has, plus ten times their number."""

    def __init__(self, number: int) -> None:
        self.process_index = number

    def _all(self, mine: torch.Tensor) -> list[torch.Tensor]:
        return [mine + 10 * (number - self.process_index) for number in range(4)]

    def gather(self, mine: torch.Tensor) -> torch.Tensor:
        return torch.stack(self._all(mine)) if mine.ndim == 0 else torch.cat(self._all(mine))

    def reduce(self, mine: torch.Tensor, reduction: str) -> torch.Tensor:
        assert reduction == "sum"
        return sum(self._all(mine), torch.zeros_like(mine))


def _one_of_four(number: int, context: int) -> Run:
    run = Run.__new__(Run)
    run.accelerator = FourProcesses(number)  # type: ignore[assignment]
    run.device, run.processes, run.layout = torch.device("cpu"), 4, Layout(replicate=4 // context, context=context)
    run.rank, within = divmod(number, context)
    run.world, run.first = 4 // context, within == 0
    return run


def test_of_processes_that_share_an_image_the_first_is_heard() -> None:
    """By hand: processes 0 and 1 share images, 2 and 3 do; those of 0 and 2 are gathered, on each of the four."""
    for number in range(4):
        run, mine = _one_of_four(number, 2), torch.tensor([1, 2]) + 10 * number
        assert run.gather(mine).tolist() == [1, 2, 21, 22]
        assert run.gather(mine.view(1, 2)).tolist() == [[1, 2], [21, 22]]
        assert run.gather(mine[0]).tolist() == [1, 21]
        assert run.total_gradient(mine).tolist() == [64, 68]  # 1 + 11 + 21 + 31: gradients are of all
    alone = _one_of_four(3, 1)
    assert alone.gather(torch.tensor([31])).tolist() == [1, 11, 21, 31]


# ---- what is refused -------------------------------------------------------------------------------------------------

REFUSED: dict[str, tuple[tuple[str, ...], str]] = {
    "launched alone": ((), r"parallel.shard \(1\) x parallel.context \(2\) splits one copy of the model over 2"),
    "heads": (("parallel.context=3",), "2 heads do not divide by 3: choose one of 1, 2"),
    "tokens": (("pipeline.height=48", "pipeline.num_frames=1"), "48 x 48 x 1 frames is 9 tokens"),
    "tokens of evaluations": (
        ("pipeline.num_frames=1", "eval.height=48", "eval.width=48"), "48 x 48 x 1 frames is 9 tokens",
    ),
}  # fmt: skip


def _config(folder: Path, family: str, *overrides: str) -> TrainConfig:
    config, _out, *settings = command(folder, family, "grpo", folder / "run", "parallel.context=2", *overrides)
    return load_config(config, settings)


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_shared_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    overrides, message = REFUSED[name]
    config = _config(tmp_path, "wan", *overrides)
    if name != "launched alone":
        as_launched(monkeypatch, config.parallel.context)
    with pytest.raises(ValueError, match=message):
        preflight(config)


@pytest.mark.parametrize(
    ("family", "override", "message"),
    [
        ("sd3", "seed=1", "no plan how to split the tokens of family sd3"),
        ("flux", "pipeline.max_sequence_length=15", "15 tokens of a prompt .* a multiple of 2"),
    ],
)
def test_a_family_or_prompt_that_cannot_be_split_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, override: str, message: str
) -> None:
    as_launched(monkeypatch, 2)
    with pytest.raises(ValueError, match=message):
        preflight(_config(tmp_path, family, override))


EDIT, DEV = "Qwen/Qwen-Image-Edit-2509", "black-forest-labs/FLUX.2-dev"
LARGER = {"source_height": 528, "source_width": 528}  # 33 x 33 tokens; 512 x 512 pixels are 32 x 32
SOURCES: dict[str, tuple[str, str, int, dict[str, int], list[int], str]] = {
    "alike": ("qwen_image_edit", EDIT, 2, {}, [512], ""),
    "another size": ("qwen_image_edit", EDIT, 2, LARGER, [512], "512 x 512 with a source image is 2113 tokens"),
    "two of it": ("qwen_image_edit", EDIT, 2, {**LARGER, "num_sources": 2}, [512], ""),
    "two over four": (
        "qwen_image_edit", EDIT, 4, {**LARGER, "num_sources": 2}, [512], "with 2 source images is 3202 tokens",
    ),
    "evaluations keep the sources of rollouts": (
        "qwen_image_edit", EDIT, 2, {}, [512, 528], "528 x 528 with a source image is 2113 tokens .* of either",
    ),
    "references": ("flux2", DEV, 2, {"max_references": 2}, [512], ""),
    "without references": ("flux2", DEV, 2, {"max_references": 1}, [528], "528 x 528 is 1089 tokens"),
}  # fmt: skip


@pytest.mark.parametrize("name", SOURCES)
def test_the_tokens_of_source_images_are_counted(name: str) -> None:
    known, model, context, more, sides, message = SOURCES[name]
    options = {"height": 512, "width": 512, **more}
    with nullcontext() if not message else pytest.raises(ValueError, match=message):
        refuse_unsplit(
            pipelines.family(known), model, options, context, [Size(height=side, width=side) for side in sides]
        )


def test_tokens_are_those_that_the_network_is_given() -> None:
    """Of every family that is split: as many as `meta_call`, which has one source of the drawn size at most."""
    for model, known in checkpoints().items():
        if known.family in SPLIT_FAMILIES:
            own = pipelines.family(known.family)
            size, text = own.planned_size(model, {}), own.text_tokens(model, {})
            states = own.meta_call(model, size, text)["hidden_states"]
            if states.ndim == 3:
                count = states.shape[1]
            else:
                whole: Any = own.meta_denoiser(model, dict.fromkeys(own.block_kinds(model), 1))
                network: Any = first_expert(whole)
                count = math.prod(states.shape[2:]) // math.prod(network.config.patch_size)
            assert list(image_tokens(own, model, {}, size).values())[-1] == count, model
