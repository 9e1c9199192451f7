"""Two processes give what one gives, and take over from each other.

Three prompts of four images, so that a group is spread over both processes.
"""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_runs import TinyRuns, differences, lora_tensors, metrics, start, state, tiny_runs
from two_processes import TOLERANCE, close, on_two_processes, train_on_two

from flowrl.cli import main

SIZES = (
    "num_iterations=3", "prompts_per_step=3", "micro_batch_size=3", "rollout_batch_size=3", "keep_checkpoints=9",
    "kl_coef=0.1", "budget.nfe=100000",
)  # fmt: skip
LAUNCH = Path(__file__).resolve().parents[2] / "launch"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, tiny_sd3_folder: Path) -> TinyRuns:
    return tiny_runs(tmp_path_factory.mktemp("processes"), tiny_sd3_folder)


@pytest.fixture(scope="module")
def one(runs: TinyRuns) -> Path:
    return runs.train("one", *SIZES, *_evaluated(runs))


@pytest.fixture(scope="module")
def two(runs: TinyRuns, warm_python: str) -> Path:
    run, where = runs.folder / "two", {"NPROC": "2", "PYTHON_EXEC": warm_python}
    launched = _script(runs.folder, "one_node.sh", str(runs.config), f"out={run}", *SIZES, *_evaluated(runs), **where)
    assert _report_of(launched) == 1  # the main process alone speaks
    return run


def _evaluated(runs: TinyRuns) -> tuple[str, ...]:
    return ("eval_every=3", f"prompts.eval={runs.folder / 'prompts.txt'}", "eval.num_images=3", "eval.batch_size=2")


def _script(folder: Path, name: str, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    """A script of `launch/` with this interpreter."""
    command = "import os, sys; os.execvp(sys.argv[1], sys.argv[1:])"
    python = environment.get("PYTHON_EXEC", sys.executable)
    settings = {"PYTHON": python, "GLOO_SOCKET_IFNAME": "lo", **environment}
    return start(["-c", command, str(LAUNCH / name), *arguments], folder, **settings)


def _report_of(process: subprocess.Popen[str]) -> int:
    """Waits for a launch; how often it told of the report."""
    out, err = process.communicate(timeout=600)
    assert process.returncode == 0, err
    return out.count("Report")


def _free_port() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


@pytest.mark.slow
def test_two_processes_train_what_one_trains(one: Path, two: Path) -> None:
    assert [row["ratio_first_deviation"] for row in metrics(two) if "reward" in row] == [0.0] * 3
    close(one, two)
    assert (two / "samples" / "iteration_000003" / "0002.png").is_file()


@pytest.mark.slow
def test_one_process_continues_what_two_began(runs: TinyRuns, one: Path, two: Path) -> None:
    run = runs.folder / "two-one"
    shutil.copytree(two, run)
    shutil.rmtree(run / "checkpoints" / "000003")
    assert main(["train", f"resume={run}"]) == 0
    close(one, run)


@pytest.mark.slow
def test_two_processes_continue_what_one_began(runs: TinyRuns, one: Path, warm_python: str) -> None:
    run = runs.folder / "one-two"
    shutil.copytree(one, run)
    shutil.rmtree(run / "checkpoints" / "000003")
    shutil.rmtree(run / "checkpoints" / "000002")
    where = {"MASTER": "127.0.0.1", "PORT": _free_port(), "NPROC": "1", "PYTHON_EXEC": warm_python}
    nodes = [_script(runs.folder, "two_nodes.sh", f"resume={run}", NODE=node, **where) for node in ("0", "1")]
    assert sum(map(_report_of, nodes)) == 1
    close(one, run)


@pytest.mark.slow
def test_accelerate_launches_what_torchrun_does_and_workers_score_for_both_processes(
    runs: TinyRuns, two: Path, warm_python: str
) -> None:
    pytest.importorskip("ray")
    run = runs.folder / "accelerated"
    launcher = ["-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes=2", "--main_process_port"]
    command = [*launcher, _free_port(), "-m", "flowrl", "train", str(runs.config), f"out={run}", "workers.rewards=1"]
    settings = {"GLOO_SOCKET_IFNAME": "lo", "PYTHON_EXEC": warm_python}
    assert _report_of(start([*command, *SIZES, *_evaluated(runs)], runs.folder, **settings)) == 1
    assert metrics(run) == metrics(two)
    assert differences(lora_tensors(run), lora_tensors(two)) == 0


# ---- methods, on a toy pipeline --------------------------------------------------------------------------------------

SPLIT = ("prompts_per_step=3", "micro_batch_size=2", "rollout_batch_size=2")  # a group is spread over both processes
WHOLE = ("micro_batch_size=1", "rollout_batch_size=1")  # a group lies on one process, as branches and trees need it
PAIRS = ("prompts_per_step=4", "micro_batch_size=2", "rollout_batch_size=2", "recipe=preference")
ODE = ("sampler.kernel=ode",)
FORWARD = ("recipe=forward", *ODE)
GRADIENT = ("recipe=backprop", *ODE, "rewards=[{name: smooth_brightness}]", "rollout_batch_size=null")
METHODS: dict[str, tuple[str, ...]] = {
    "outcome": SPLIT,
    "dead-groups": (*SPLIT, "FUNCTION=half_fail", "adv_std=global"),
    "rounds": (*SPLIT, "FUNCTION=half_fail", "curriculum.max_rounds=3", "sampler.trained_fraction=0.67",
               "sampler.trained_steps=random"),
    "invalid": (*SPLIT, "FUNCTION=broken_by_value", "adv_baseline=leave_one_out", "shaping.name=a_grae"),
    "dense": (*SPLIT, "credit.method=dense_grpo", "kl_coef=0.1", "loss_aggregation=samples"),
    "balanced": (*SPLIT, "credit.method=vgpo", "loss_aggregation=balanced", "objective.name=guard"),
    "log-tame": (*SPLIT, "FUNCTION=brightness redness", "credit.method=stepwise", "reward_aggregation=log_tame"),
    "gdpo": (*SPLIT, "FUNCTION=brightness redness", "reward_aggregation=gdpo"),
    "dcpo": (*SPLIT, "shaping.name=dcpo", "policy.ema_decay=0.5"),
    "gaussian": (*SPLIT, "curriculum.sampling=gaussian", "curriculum.accuracy_scaled_kl=true", "kl_coef=0.1"),
    "replay": (*SPLIT, "curriculum.sampling=replay", "curriculum.options={cooldown: 1, band: [0.2, 0.8]}"),
    "best": (*SPLIT, "best_of=2", "ratio=mixed", "loss_aggregation=samples"),
    "g2rpo": (*WHOLE, "credit.method=g2rpo", "credit.strides=[1, 2]"),
    "tempflow": (*WHOLE, "credit.method=tempflow", "credit.branches=2", "curriculum.max_rounds=2",
                 "FUNCTION=half_fail"),
    "tree": (*WHOLE, "credit.method=tree_grpo", "loss_aggregation=rows"),
    "branch_grpo": (*WHOLE, "credit.method=branch_grpo", "credit.splits=[0, 1]"),
    "tp_grpo": (*SPLIT, "credit.method=tp_grpo"),
    "gradients": (*SPLIT, "keep_graphs=gradients", "kl_coef=0.1", "sampler.guidance_scale=3"),
    "nft": (*SPLIT, *FORWARD, "objective.name=nft", "kl_coef=0.1"),
    "awm": (*SPLIT, *FORWARD, "objective.name=awm", "objective.options.weighting=uniform", "adv_std=global",
            "kl_coef=0.1"),
    "rft": (*SPLIT, *FORWARD, "objective.name=rft", "FUNCTION=broken_by_value"),
    "rwr": ("prompts_per_step=4", "micro_batch_size=4", *FORWARD, "objective.name=rwr"),
    "dgpo": ("prompts_per_step=4", "micro_batch_size=4", *FORWARD, "objective.name=dgpo"),
    "crd": ("prompts_per_step=4", "micro_batch_size=4", *FORWARD, "objective.name=crd"),
    "dpo": (*PAIRS, *ODE, "objective.name=dpo"),
    "d3po": (*PAIRS, "same_latent=true", "objective.name=d3po"),
    "draft": (*SPLIT, *GRADIENT, "objective.name=draft"),
    "alignprop": (*SPLIT, *GRADIENT, "objective.name=alignprop"),
    "drtune": (*SPLIT, *GRADIENT, "objective.name=drtune"),
    "refl": (*SPLIT, *GRADIENT, "objective.name=refl"),
}  # fmt: skip


@pytest.fixture(scope="module")
def methods(tmp_path_factory: pytest.TempPathFactory, warm_python: str) -> Path:
    """A folder with a run of every method on one process and on two, and one that two began and one goes on with."""
    from toy_pipeline import reward_list, write_toy

    folder = tmp_path_factory.mktemp("methods")
    config = write_toy(folder)
    commands: dict[str, list[tuple[int, bool, list[str]]]] = {"one": [], "two": [], "two-one": []}
    for name, settings in METHODS.items():
        count = 3 if name == "replay" else 2  # what is put aside in the first iteration is drawn in the third
        length = f"num_iterations={count}"
        overrides = [reward_list(folder, *text.removeprefix("FUNCTION=").split()) if "FUNCTION=" in text else text
                     for text in settings]  # fmt: skip
        for processes in ("one", "two"):
            out = f"out={folder / processes / name}"
            commands[processes].append((0, True, [str(config), out, length, "optim.lr=0.1", *overrides]))
        run, later = folder / "two-one" / name, [f"{number:06d}" for number in range(2, count + 1)]
        commands["two-one"] += [
            (0, True, ["copy", str(folder / "two" / name), str(run), *later]), (0, True, [f"resume={run}"]),
        ]  # fmt: skip
    for place, runs in commands.items():
        train_on_two(folder, runs, python=warm_python, processes=2 if place == "two" else 1)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_every_method_trains_on_two_processes_what_it_trains_on_one(methods: Path, name: str) -> None:
    rows = metrics(methods / "one" / name)
    assert len(rows) == (3 if name == "replay" else 2)
    assert all(row.get("ratio_first_deviation", 0.0) < 1e-6 for row in metrics(methods / "two" / name))
    assert any(row.get("grad_norm", 0.0) > 0 for row in rows)
    close(methods / "one" / name, methods / "two" / name)
    close(methods / "one" / name, methods / "two-one" / name)
    assert differences(state(methods / "one" / name)["memory"], state(methods / "two" / name)["memory"]) <= TOLERANCE


# ---- rewards that learn ----------------------------------------------------------------------------------------------

DRIFTING = """
import sys
from types import SimpleNamespace
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from flowrl.rewards import RewardInputs
from flowrl.training.scoring import Scorer
from flowrl.training.stages import Stages

accelerator = Accelerator(cpu=True)
run = SimpleNamespace(processes=accelerator.num_processes, rank=accelerator.process_index, device=accelerator.device,
                      joined=lambda mine: list(gather_object(mine)))

class Drifting:
    kind, weight = "adversarial", torch.zeros(2)
    def learn(self, inputs):
        self.weight += len(inputs.prompts) + 1e-3 * run.rank  # as if devices added up otherwise
        return {}
    def learned(self):
        return {"weight": self.weight.clone()}
    def follow(self, learned):
        self.weight.copy_(learned["weight"])

reward = SimpleNamespace(terms=[SimpleNamespace(key="learning", reward=Drifting())])
scorer = Scorer(run, None, reward, group_size=2, counters={}, stages=Stages(run.device), beside=False)
for iteration in range(2):
    scorer.seen = [RewardInputs(prompts=["a", "b"], images=torch.zeros(2, 3, 2, 2), metadata=[{}, {}],
                   group_ids=torch.zeros(2, dtype=torch.long), sample_ids=torch.arange(2) + 2 * run.rank)]
    scorer.learn(iteration)
found = accelerator.gather(scorer.trained["learning"].weight[None])
assert found.tolist() == [[8.0, 8.0], [8.0, 8.0]], found
accelerator.end_training()  # else gloo's threads may outlive what they use, and the process aborts at its end
"""


@pytest.mark.slow
def test_copies_of_a_reward_that_learns_do_not_drift_apart(tmp_path: Path, warm_python: str) -> None:
    (tmp_path / "drifting.py").write_text(DRIFTING)
    on_two_processes(tmp_path, "drifting.py", python=warm_python)
