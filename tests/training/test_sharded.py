"""Two processes that hold one copy of the weights between them train what one process trains, which holds the whole.

They have unequal work (`tests/helpers/split_runs.py`): where one took a call less than the other, both would wait for
ever. The larger table of families and recipes is `tests/trials/sharded_runs.py`.
"""

from __future__ import annotations

import json
import shutil
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from split_runs import FULL, KILLING, RECIPES, ROUTED, RUNS, bytes_of, command, sizes_of_parts
from tiny_runs import differences, lora_tensors, metrics, model_tensors, state
from toy_pipeline import REWARDS as TOY_REWARDS
from toy_pipeline import reward_list, write_toy
from two_processes import close, train_on_two

from flowrl.cli import main
from flowrl.pipelines import PIPELINES
from flowrl.pipelines import family as family_named
from flowrl.pipelines.families.sd3 import FAMILY
from flowrl.pipelines.weights import parallelize
from flowrl.pipelines.weights.quantize import LIBRARIES
from flowrl.planning.memory import base_bytes, checkpoint_bytes
from flowrl.planning.network import weights_of
from flowrl.rewards import REWARDS
from flowrl.training.processes.mesh import Shards, in_step

FORMS = [form for form, library in LIBRARIES.items() if find_spec(library)]
BESIDE = {
    **{form: (f"pipeline.quantize={form}", "policy.lora_variant=rslora") for form in FORMS},
    "kept-routes": ("keep_graphs=true", *ROUTED),
    "gradients-dora": ("keep_graphs=gradients", "policy.lora_variant=dora"),
}
"""What GRPO of sd3 is run beside split weights with: two of them at a time, since a fault of one shows in both."""
FEW_BITS = (
    f"pipeline.quantize={'nf4' if 'nf4' in FORMS else 'none'}",
    "policy.lora_variant=dora",
    "pipeline.dtype=bfloat16",
)
ROUNDS = ("prompts_per_step=3", "micro_batch_size=2", "rollout_batch_size=2", "num_iterations=2", "optim.lr=0.1",
          "curriculum.max_rounds=3", "sampler.trained_fraction=0.67", "sampler.trained_steps=random")  # fmt: skip
FULL_BESIDE = {"kept": ("keep_graphs=true",), "compiled": ("pipeline.compile=blocks",)}
STOPPING = """
import os, signal
calls = []
def reward(images, prompts, metadata):
    calls.append(1)
    if len(calls) == 1:
        os.kill(os.getpid(), signal.SIGTERM)
    return images.mean((1, 2, 3))
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, warm_python: str) -> Path:
    """A folder with each run on one process and on two, and those that went on elsewhere than they had begun."""
    folder = tmp_path_factory.mktemp("sharded")
    one, two = folder / "one", folder / "two"
    (folder / "stopping.py").write_text(STOPPING)
    stopping = f"rewards=[{{file: {folder / 'stopping.py'}, function: reward}}]"
    rounds = [str(folder / "toy.yaml"), *ROUNDS, reward_list(folder, "half_fail")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(REWARDS, "smooth_brightness", "toy_pipeline:SmoothBrightness")
        for family, recipe in RUNS.items():
            assert main(["train", *command(folder, family, recipe, one / family)]) == 0
        for name, settings in BESIDE.items():
            assert main(["train", *command(folder, "sd3", "grpo", one / name, *settings)]) == 0
        patch.setitem(PIPELINES, "sd3", "toy_pipeline")
        assert main(["train", *rounds, f"out={one / 'rounds'}"]) == 0
    commands: list[tuple[int, bool, list[str]]] = [
        *((0, False, command(folder, family, recipe, two / family, "parallel.shard=2"))
          for family, recipe in RUNS.items()),
        *((0, False, command(folder, "sd3", "grpo", two / name, "parallel.shard=2", *settings))
          for name, settings in BESIDE.items()),
        (0, False, command(folder, "sd3", "grpo", two / "few-bits", *FEW_BITS)),
        (0, False, command(folder, "sd3", "grpo", two / "few-bits-split", "parallel.shard=2", *FEW_BITS)),
        (0, True, [*rounds, f"out={two / 'rounds'}", "parallel.shard=2"]),
        (0, False, command(folder, "sd3", "grpo", two / "replicas", "parallel.replicate=2")),
        (0, False, ["copy", str(one / "sd3"), str(two / "one-shard"), "000002"]),
        (0, False, [f"resume={two / 'one-shard'}", "parallel.shard=2"]),
        (0, False, ["copy", str(two / "sd3"), str(two / "shard-replicas"), "000002"]),
        (0, False, [f"resume={two / 'shard-replicas'}", "parallel.shard=1"]),
        (130, False, command(folder, "sd3", "grpo", two / "stopped", "parallel.shard=2", "eval_every=0", stopping)),
    ]  # fmt: skip
    train_on_two(folder, commands, python=warm_python)
    shutil.copytree(two / "sd3", one / "shard-one")
    shutil.rmtree(one / "shard-one" / "checkpoints" / "000002")
    assert main(["train", f"resume={one / 'shard-one'}", "parallel.shard=1"]) == 0
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", [*RUNS, *BESIDE, "rounds"])
def test_split_weights_train_what_whole_ones_train(runs: Path, name: str) -> None:
    rows = metrics(runs / "two" / name)
    assert all(row.get("ratio_first_deviation", 0.0) < 1e-6 for row in rows)
    assert any(row.get("grad_norm", 0.0) > 0 for row in rows)
    close(runs / "one" / name, runs / "two" / name)


@pytest.mark.slow
def test_codes_that_are_split_are_those_of_a_model_that_is_not(runs: Path) -> None:
    """Two processes with the same images each, in bfloat16: every number and bit of the LoRA is the same."""
    whole, split = (runs / "two" / name for name in ("few-bits", "few-bits-split"))
    assert [sorted(row.items()) for row in metrics(split)] == [sorted(row.items()) for row in metrics(whole)]
    assert differences(lora_tensors(split), lora_tensors(whole)) == 0


@pytest.mark.slow
@pytest.mark.parametrize("other", ["two/replicas", "two/one-shard", "two/shard-replicas", "one/shard-one"])
def test_a_run_goes_on_however_its_weights_lie(runs: Path, other: str) -> None:
    close(runs / "one" / "sd3", runs / other)


@pytest.mark.slow
def test_blocks_are_compiled_without_their_gathering(tmp_path: Path, warm_python: str) -> None:
    """Traced, not generated: the backend runs the operations themselves, on two processes of which each has a half."""
    short = ("parallel.shard=2", "num_iterations=1", "eval_every=0")
    words = {"plain": (), "compiled": ("pipeline.compile=blocks",)}
    told = [
        (0, False, command(tmp_path, "sd3", "grpo", tmp_path / name, *short, *more)) for name, more in words.items()
    ]
    train_on_two(tmp_path, told, python=warm_python)
    close(tmp_path / "plain", tmp_path / "compiled")


@pytest.mark.slow
@pytest.mark.parametrize("name", [*RUNS, *FORMS])
def test_a_process_holds_half_of_the_weights(runs: Path, name: str) -> None:
    held = json.loads((runs / "two" / name / "manifest.json").read_text())["denoiser_bytes"]
    # A weight of one row, such as a table of one, lies whole on the first process.
    assert held["whole"] / 2 <= held["held"] <= 0.51 * held["whole"]
    if name in FORMS:
        denoiser = FAMILY.meta_denoiser(str(runs / "model-sd3"))
        assert denoiser is not None
        weights = weights_of(denoiser)
        numbers = 4 * sum(weights.matrices.values()) * (name == "nf4")  # of each layer one that is not split
        assert base_bytes(weights, name, 4) == held["whole"] + numbers


@pytest.mark.slow
def test_a_stop_is_kept_by_both(runs: Path) -> None:
    run = runs / "two" / "stopped"
    assert len(metrics(run)) == 1
    assert [path.name for path in sorted((run / "checkpoints").iterdir())] == ["000001"]
    assert "stopped" in json.loads((run / "manifest.json").read_text())


# ---- trained weights -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory, warm_python: str) -> Path:
    """A folder with runs that train all weights, of which one process holds all or each of two a half, and those that
    went on elsewhere: on one process, on two that hold all, and on two halves again; one on four processes, one that
    four, two, one and four trained for an iteration each, and one of which a process was killed while it saved."""
    folder = tmp_path_factory.mktemp("full")
    one, two, chain = folder / "one", folder / "two", folder / "chain"

    def told(out: Path, family: str, *more: str) -> tuple[int, bool, list[str]]:
        return 0, False, command(folder, family, RUNS[family], out, *FULL, *more)

    def copied(source: Path, copy: Path, *numbers: str) -> tuple[int, bool, list[str]]:
        return 0, False, ["copy", str(source), str(copy), *numbers]

    def resumed(run: Path, *more: str) -> tuple[int, bool, list[str]]:
        return 0, False, [f"resume={run}", *more]

    longer = ("num_iterations=3", "checkpoint_every=1", "keep_checkpoints=9")
    long = {family: longer if family == "sd3" else () for family in RUNS}
    half, whole = "parallel.shard=2", "parallel.shard=1"
    commands = [told(one / name, name, *long[name]) for name in RUNS]
    commands += [told(one / name, "sd3", *longer, *settings) for name, settings in FULL_BESIDE.items()]
    commands += [copied(one / "sd3", one / "longer"), resumed(one / "longer", "num_iterations=4")]
    train_on_two(folder, commands, processes=1, python=warm_python)
    commands = [told(folder / "four", "sd3", half, *longer), told(two / "tokens", "wan", half, "parallel.context=2")]
    commands += [copied(folder / "four", chain, "000002", "000003")]
    train_on_two(folder, commands, processes=4, python=warm_python)
    (folder / "killing.py").write_text(TOY_REWARDS + KILLING)
    killing = f"rewards=[{{file: {folder / 'killing.py'}, function: half_fail}}]"
    with pytest.raises(AssertionError):
        train_on_two(folder, [told(two / "killed", "sd3", half, *longer, killing)], python=warm_python)
    commands = [told(two / name, name, half, *long[name]) for name in RUNS]
    commands += [told(two / name, "sd3", half, *longer, *settings) for name, settings in FULL_BESIDE.items()]
    narrow = (half, "pipeline.dtype=bfloat16", "optim.offload=true")
    commands += [(0, False, command(folder, "wan", "grpo", two / "narrow", *FULL, *narrow))]
    commands += [copied(two / "sd3", two / "replicas", "000002", "000003")]
    commands += [resumed(two / "replicas", whole, "num_iterations=2")]
    commands += [copied(two / "replicas", two / "halves"), resumed(two / "halves", half, "num_iterations=3")]
    commands += [copied(two / "sd3", one / "on-one", "000002", "000003")]
    commands += [resumed(chain, "num_iterations=2"), resumed(two / "killed")]
    train_on_two(folder, commands, python=warm_python)
    commands = [resumed(one / "on-one", whole, "num_iterations=2"), resumed(chain, whole, "num_iterations=3")]
    train_on_two(folder, commands, processes=1, python=warm_python)
    shutil.copytree(one / "on-one", two / "back")
    train_on_two(folder, [resumed(two / "back", half, "num_iterations=3")], python=warm_python)
    quarters = [resumed(chain, "parallel.shard=4", "num_iterations=4")]
    train_on_two(folder, quarters, processes=4, python=warm_python)
    return folder


@pytest.mark.slow
def test_settings_beside_trained_weights_change_no_number(full: Path) -> None:
    """Kept graphs, compiled blocks, processes that share a part and the tokens of its images."""
    for one, other in (("one/kept", "two/kept"), ("one/compiled", "two/compiled"), ("one/wan", "two/tokens")):
        close(full / one, full / other)
    assert all(
        differences(model_tensors(full / "one/sd3"), model_tensors(full / "one" / name)) == 0 for name in FULL_BESIDE
    )


@pytest.mark.slow
@pytest.mark.parametrize("family", RUNS)
def test_halves_of_trained_weights_train_what_the_whole_trains(full: Path, family: str) -> None:
    rows = metrics(full / "two" / family)
    assert any(row.get("grad_norm", 0.0) > 0 for row in rows)
    assert all(row.get("ratio_first_deviation", 0.0) == 0.0 for row in rows)
    close(full / "one" / family, full / "two" / family)
    ours, stock = ((full / of / family / "model").rglob("config.json") for of in ("two", "one"))
    assert [path.read_text() for path in sorted(ours)] == [path.read_text() for path in sorted(stock)]


@pytest.mark.slow
@pytest.mark.parametrize("other", ["two/halves", "two/back", "two/killed", "four"])
def test_a_run_of_trained_weights_goes_on_however_they_lie(full: Path, other: str) -> None:
    """Also where one of two processes was killed with half of its part of the second checkpoint on the disk."""
    close(full / "one" / "sd3", full / other)
    assert (full / "killing.was").exists()


@pytest.mark.slow
def test_four_processes_then_two_then_one_then_four_train_what_one_trains(full: Path) -> None:
    close(full / "one" / "longer", full / "chain")
    counts = {path.name: len(list(path.glob("part-*.pt"))) for path in (full / "chain" / "checkpoints").iterdir()}
    assert counts == {"000001": 2, "000002": 2, "000003": 0, "000004": 4}


@pytest.mark.slow
@pytest.mark.parametrize("family", RUNS)
def test_a_process_holds_and_writes_half_of_the_trained_weights(full: Path, family: str) -> None:
    run = full / "two" / family
    held = json.loads((run / "manifest.json").read_text())["denoiser_bytes"]
    assert held["whole"] / 2 <= held["held"] <= 0.51 * held["whole"]
    sizes = sizes_of_parts(run)
    assert len(sizes) == 2
    assert max(sizes) <= 0.51 * bytes_of({key: state(run)[key] for key in ("policy", "slots", "optimizer")})
    # What a plan says of it: masters in float32, and of each weight 12 bytes and 4 for each copy of the policy.
    network = family_named(family).meta_denoiser(str(full / f"model-{family}"))
    assert network is not None
    weights = weights_of(network)
    assert base_bytes(weights, "none", 4) / 2 == pytest.approx(held["held"], rel=0.05)
    assert checkpoint_bytes(weights.parameters, len(state(run)["slots"])) / 2 == pytest.approx(max(sizes), rel=0.05)


@pytest.mark.slow
def test_halves_are_gathered_in_the_dtypes_of_the_network(full: Path) -> None:
    """Rollout and update see the same rounded weights, some of Wan in float32; masters and copies stay in that."""
    run = full / "two" / "narrow"
    trained = [row for row in metrics(run) if "loss" in row]
    assert [row["ratio_first_deviation"] for row in trained] == [0.0] * len(trained)
    saved, shipped = state(run), model_tensors(run)
    assert {tensor.dtype for tensor in shipped.values()} == {torch.bfloat16, torch.float32}
    assert all(torch.equal(saved["slots"]["ema"][name].to(value.dtype), value) for name, value in shipped.items())
    assert {tensor.dtype for tensor in saved["policy"].values()} == {torch.float32}


# ---- turns -----------------------------------------------------------------------------------------------------------


def test_turns_are_taken_as_they_are_where_nothing_is_split() -> None:
    assert list(in_step(None, [3, 1, 2], idle=lambda key: -1)) == [(3, True), (1, True), (2, True)]


def test_the_one_with_less_to_do_takes_idle_turns() -> None:
    """By hand: of step 0 somebody has three, of step 1 nobody more than this one, of step 2 this one has none."""
    others: Shards = SimpleNamespace(most=lambda counts: {0: 3, 1: 2, 2: 1})  # type: ignore[assignment]
    turns = in_step(others, ["0a", "1a", "0b", "1b"], idle=lambda key: f"idle {key}", key=lambda turn: int(turn[0]))
    expected = [("0a", True), ("0b", True), ("idle 0", False), ("1a", True), ("1b", True), ("idle 2", False)]
    assert list(turns) == expected


@pytest.mark.parametrize("error", [ValueError("no such folder"), RuntimeError("the disk is gone")], ids=repr)
def test_what_stops_the_first_process_is_told_to_the_others(error: Exception) -> None:
    """Those wait for it: it speaks before it ends, whatever it ends by."""
    said: list[Any] = []

    def work() -> None:
        raise error

    def process(rank: int) -> Any:
        def gather(mine: Any) -> list[Any]:
            said.extend([mine] if rank == 0 else [])
            return said

        return SimpleNamespace(mesh=SimpleNamespace(get_local_rank=lambda: rank), gather=gather)

    with pytest.raises(type(error)) as raised:
        parallelize.done_by_first(process(0), work)
    assert raised.value is error
    with pytest.raises(ValueError, match=str(error)):
        parallelize.done_by_first(process(1), work)
    said.clear()
    assert parallelize.done_by_first(process(0), lambda: None)
    assert not parallelize.done_by_first(process(1), work)


def test_a_launch_that_does_not_fit_is_refused_by_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", str(write_toy(tmp_path)), f"out={tmp_path / 'run'}", "parallel.shard=2"]) == 1
    assert "1 process was launched" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
    assert set(RECIPES) == set(RUNS.values())
