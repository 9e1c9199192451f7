"""Two processes that share the tokens of every image or video give what one gives."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from launched import on_two_processes
from shared_tokens import CASES
from tiny_runs import TinyRuns, differences, lora_tensors, metrics, state, tiny_runs
from tiny_wan import OPTIONS, save_tiny_wan

from flowrl.cli import main
from flowrl.commands.train.run import check_before_loading
from flowrl.config.train import load_config

# Products with fewer rows add up in another order; the LoRA is a second function of such sums.
TOLERANCE = 1e-6

REWARD = """
def reward(images, prompts, metadata):
    return [100.0 * float(one.mean()) for one in images]
"""

LAUNCHED = """
import json, sys
from pathlib import Path

sys.path[:0] = sys.argv[1:3]
from torch import distributed as dist
from accelerate import Accelerator
from shared_tokens import CASES, compared
from flowrl.cli import main
from flowrl.config.sections import ParallelConfig
from flowrl.training.mesh import device_mesh, layout_of

folder = Path(sys.argv[3])
for arguments in json.loads((folder / "commands.json").read_text()):
    assert main(arguments) == 0, arguments
accelerator = Accelerator(cpu=True)
mesh = device_mesh(layout_of(ParallelConfig(context=2), 2), "cpu")["context"]
found = {name: compared(name, folder, mesh) for name in CASES}
found["bfloat16"] = compared("wan", folder, mesh, dtype=__import__("torch").bfloat16)
if accelerator.is_main_process:
    (folder / "found.json").write_text(json.dumps(found))
accelerator.end_training()
"""

RUNS: dict[str, tuple[str, ...]] = {
    "grpo": ("kl_coef=0.1", "num_iterations=3", "eval_every=3", "eval.num_images=2", "eval.batch_size=2",
             "pipeline.gradient_checkpointing=true"),
    "nft": ("recipe=forward", "objective.name=nft", "sampler.kernel=ode", "times.count=2"),
}  # fmt: skip
SHARED = ("parallel.context=2",)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> TinyRuns:
    folder = tmp_path_factory.mktemp("tokens")
    options: dict[str, Any] = {**OPTIONS, "dtype": "float32", "model": str(save_tiny_wan(folder / "wan"))}
    (folder / "rewards.py").write_text(REWARD)
    rewards = [{"file": str(folder / "rewards.py"), "function": "reward"}]
    return tiny_runs(folder, folder / "wan", pipeline=options, rewards=rewards, prompts_per_step=2, group_size=2)


@pytest.fixture(scope="module")
def launched(runs: TinyRuns) -> dict[str, dict[str, float]]:
    """Every run on one process and shared by two, and what the families gave."""
    evaluated = (f"prompts.eval={runs.folder / 'prompts.txt'}",)
    commands = []
    for name, settings in RUNS.items():
        more = (*settings, *evaluated) if "eval_every=3" in settings else settings
        runs.train(f"one-{name}", *more)
        commands.append(["train", str(runs.config), f"out={runs.folder / f'two-{name}'}", *more, *SHARED])
    (runs.folder / "commands.json").write_text(json.dumps(commands))
    (runs.folder / "launched.py").write_text(LAUNCHED)
    helpers = Path(__file__).parents[1] / "helpers"
    on_two_processes(runs.folder, "launched.py", str(helpers), str(helpers / "families"), str(runs.folder))
    found: dict[str, dict[str, float]] = json.loads((runs.folder / "found.json").read_text())
    return found


def _close(a: Path, b: Path) -> None:
    for mine, theirs in zip(metrics(a), metrics(b), strict=True):
        assert mine.keys() == theirs.keys()
        for key in mine:
            assert abs(mine[key] - theirs[key]) <= 10 * TOLERANCE * max(1.0, abs(mine[key])), key
    assert differences(lora_tensors(a), lora_tensors(b)) <= TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_velocity_and_gradients_are_those_of_one_process(launched: dict[str, dict[str, float]], name: str) -> None:
    assert launched[name]["velocity"] <= 1e-5
    assert launched[name]["gradient"] <= 1e-5


@pytest.mark.slow
def test_half_precision_keeps_its_backward_pass(launched: dict[str, dict[str, float]]) -> None:
    assert max(launched["bfloat16"].values()) <= 2e-2


@pytest.mark.slow
@pytest.mark.usefixtures("launched")
@pytest.mark.parametrize("name", RUNS)
def test_two_processes_train_together_what_one_trains(runs: TinyRuns, name: str) -> None:
    one, two = runs.folder / f"one-{name}", runs.folder / f"two-{name}"
    rows = metrics(two)
    assert any(row.get("grad_norm", 0.0) > 0 for row in rows)
    assert all(row.get("ratio_first_deviation", 0.0) == 0.0 for row in rows)
    _close(one, two)


@pytest.mark.slow
@pytest.mark.usefixtures("launched")
def test_one_process_continues_what_two_shared(runs: TinyRuns) -> None:
    run = runs.folder / "two-one"
    shutil.copytree(runs.folder / "two-grpo", run)
    shutil.rmtree(run / "checkpoints" / "000003")
    assert main(["train", f"resume={run}", "parallel.context=1"]) == 0
    _close(runs.folder / "one-grpo", run)
    assert state(run)["iteration"] == 3


REFUSED: dict[str, tuple[tuple[str, ...], str]] = {
    "launched alone": ((), r"parallel.shard \(1\) x parallel.context \(2\) is 2 processes"),
    "heads": (("parallel.context=3",), "2 heads do not divide by 3: choose one of 1, 2"),
    "tokens": (("pipeline.height=48", "pipeline.width=48", "pipeline.num_frames=1"), r"48 x 48 x 1 frames is 9 tokens"),
    "recipe": (("recipe=backprop",), "take another recipe, or parallel.context=1"),
    "compiled": (("pipeline.compile=blocks",), "set pipeline.compile=none, or parallel.context=1"),
    "sharded": (("parallel.shard=2",), "set one of the two to 1"),
    "workers": (("workers.rollouts=1",), "set workers.rollouts=0"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_shared_is_refused(runs: TinyRuns, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    overrides, message = REFUSED[name]
    config = load_config(runs.config, (*SHARED, *overrides))
    if name != "launched alone":
        monkeypatch.setenv("WORLD_SIZE", str(config.parallel.context * config.parallel.shard))
    with pytest.raises(ValueError, match=message):
        check_before_loading(config)


def test_a_family_that_cannot_be_split_is_refused(
    runs: TinyRuns, tiny_sd3_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    pipeline = ("pipeline.num_frames=null", "pipeline.fps=null", f"pipeline.model={tiny_sd3_folder}")
    config = load_config(runs.config, (*SHARED, *pipeline))
    with pytest.raises(ValueError, match="no plan how to split the tokens of family sd3"):
        check_before_loading(config)
