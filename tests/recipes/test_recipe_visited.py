"""Recipe visited end to end: teachers by guidance and by LoRA, what each prompt learns from, and what is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import toy_pipeline
from recorded_gradients import recorded_gradients
from safetensors.torch import save_file
from tiny_runs import TinyRuns, differences, lasting, lora, metrics, state, tiny_runs
from torch import Tensor, nn
from toy_pipeline import Net, QuickRun, Toy, toy_runs
from two_processes import close, train_on_two

from flowrl.cli import main
from flowrl.config.train import TrainConfig, load_config
from flowrl.objectives.distillation import Opd
from flowrl.pipelines import PIPELINES
from flowrl.pipelines.weights.lora import Policy
from flowrl.pipelines.weights.lora_files import Lora
from flowrl.recipes import visited
from flowrl.runtime.randomness import counter_normal
from flowrl.samplers import KERNELS, rollout
from flowrl.session.preflight import resolve
from flowrl.training.parts import read_run_prompts

pytestmark = pytest.mark.usefixtures("numbers_alone")

WIDTHS = {"inner": (17, 16), "outer": (16, 12)}
GUIDED = "policy.teachers=[{guidance_scale: 3.0}]"
SDE = ("sampler.kernel=flow_sde", "sampler.noise_level=0.7")


def pairs(rank: int, seed: int, layers: Sequence[str] = ("inner", "outer")) -> dict[str, Tensor]:
    """Tensors of a LoRA on the toy, by their portable names."""
    found = {}
    for layer in layers:
        inputs, outputs = WIDTHS[layer]
        for name, shape in (("A", (rank, inputs)), ("B", (outputs, rank))):
            found[f"{layer}.lora_{name}.weight"] = 0.3 * counter_normal(shape, "teacher", seed, layer, name)
    return found


def write_lora(
    place: Path, *, rank: int, alpha: float, seed: int, layers: Sequence[str] = ("inner", "outer"), **more: Any
) -> Path:
    place.mkdir(exist_ok=True)
    stated = {"r": rank, "lora_alpha": alpha, "target_modules": list(layers), **more}
    notes = {"lora_adapter_metadata": json.dumps({f"transformer.{key}": value for key, value in stated.items()})}
    tensors = {f"transformer.{name}": tensor for name, tensor in pairs(rank, seed, layers).items()}
    save_file(tensors, place / "pytorch_lora_weights.safetensors", notes)
    return place


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinyRuns]:
    """Of the toy at guidance 1, whose prompts have a domain each."""
    folder = tmp_path_factory.mktemp("visited")
    rows = [{"prompt": text, "domain": domain} for text, domain in zip(toy_pipeline.PROMPTS, "abab", strict=True)]
    (folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    for name, rank, alpha, seed in (("first", 2, 4.0, 1), ("second", 1, 3.0, 2), ("wide", 3, 3.0, 3)):
        write_lora(folder / name, rank=rank, alpha=alpha, seed=seed)
    settings: dict[str, Any] = {"recipe": "visited", "sampler": {"kernel": "ode", "num_steps": 3}}
    settings |= {"num_iterations": 1, "group_size": 2, "prompts": {"train": str(folder / "prompts.jsonl")}}
    yield from toy_runs(folder, **settings)


def taught_by(runs: TinyRuns, *names: str, **more: Any) -> str:
    """The override that lists LoRAs of the folder as teachers, the first of domain a and the second of b."""
    listed = [{"lora": str(runs.folder / name) if name else None, **more} for name in names]
    if len(names) > 1:
        listed = [one | {"prompts": [domain]} for one, domain in zip(listed, "ab", strict=True)]
    return f"policy.teachers={json.dumps(listed)}"


def config_of(runs: TinyRuns, *overrides: str) -> TrainConfig:
    return load_config(runs.config, overrides)


def quick(runs: TinyRuns, *overrides: str) -> list[dict[str, Any]]:
    """The rows of a run without a run folder."""
    config = config_of(runs, *overrides)
    visited.check(config)
    run: Any = QuickRun(runs.folder)
    assert visited.main(resolve(config, read_run_prompts(config.prompts)), run)
    rows: list[dict[str, Any]] = run.logged
    return rows


@pytest.fixture
def gradients(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The gradient of every optimizer update, as one vector."""
    return recorded_gradients(monkeypatch)


# ---- states of a path ------------------------------------------------------------------------------------------------


def test_a_rollout_keeps_the_states_that_it_is_asked_for() -> None:
    toy = Toy()
    schedule, noise = toy.schedule(3, "diffusers"), counter_normal((2, 3, 2, 2), "start")

    def velocity(x: Tensor, sigma: Tensor, timestep: Tensor) -> Tensor:
        return torch.tanh(x) * (1 + sigma)

    def drawn(**options: Any) -> Any:
        given = {"stochastic": (), **options}
        return rollout(velocity, noise, schedule, KERNELS["ode"], lambda step: noise, **given)

    path, x = drawn(keep_states=range(4)), noise
    assert path.kept == (0, 1, 2, 3)
    for step in range(3):
        torch.testing.assert_close(path.states[:, step], x)
        x = x + (schedule.sigma[step + 1] - schedule.sigma[step]) * velocity(x, schedule.sigma[step], x)
    torch.testing.assert_close(path.final, x)
    assert torch.equal(path.states[:, 3], path.final)
    assert torch.equal(path.final, drawn().final)
    assert drawn(keep_states=[1]).states.shape == (2, 1, 3, 2, 2)
    for wrong in ({"keep_states": [4]}, {"keep_states": [-1]}, {"keep_states": [1], "solver": "dpm2"}):
        with pytest.raises(ValueError, match="of this path can be kept"):
            drawn(**wrong)


# ---- teachers as slots -----------------------------------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize("layers", [("inner", "outer"), ("outer",)])
@pytest.mark.parametrize("variant", ["lora", "rslora"])
def test_under_its_slot_the_network_computes_what_it_does_with_the_teacher_alone(
    variant: str, layers: tuple[str, ...]
) -> None:
    """A policy of rank 4 and alpha 6 holds a teacher of rank 2 and alpha 5, with both kinds of scale."""
    given = counter_normal((3, 3, 2, 2), "x"), torch.tensor([900.0, 500.0, 10.0]), counter_normal((3, 4), "text")
    teacher = Lora(place=Path("teacher"), tensors=pairs(2, 1, layers), rank=2, alpha=5.0, variant=variant)
    alone, base = Net(), Net()
    own = Policy(alone, rank=2, alpha=5, targets=layers, seed=0, variant=variant)
    own.initialise_from(teacher)
    for kind in ("lora", "rslora"):
        network = Net()
        policy = Policy(network, rank=4, alpha=6, targets=("inner", "outer"), seed=0, variant=kind)
        policy.add_lora("teacher 0", teacher)
        before = policy.tensors()
        with policy.under("teacher 0"):
            torch.testing.assert_close(network(*given), alone(*given), rtol=1e-5, atol=1e-6)
            assert float((network(*given) - base(*given)).abs().max()) > 0.1
        torch.testing.assert_close(network(*given), base(*given), rtol=1e-5, atol=1e-6)
        assert all(torch.equal(before[name], now) for name, now in policy.tensors().items())


# ---- what is learned -------------------------------------------------------------------------------------------------


def test_a_policy_that_is_its_teacher_has_no_loss_and_no_gradient(runs: TinyRuns, gradients: list[Tensor]) -> None:
    same = (f"policy.init_lora={runs.folder / 'first'}", "policy.lora_rank=null", taught_by(runs, "first"))
    for kernel in ((), SDE):
        (row,) = quick(runs, *same, *kernel)
        assert row["loss"] == row["error"] == row["grad_norm"] == 0
    assert all(float(gradient.abs().max()) == 0 for gradient in gradients)
    assert quick(runs, *same, "sampler.guidance_scale=2")[0]["loss"] == 0  # its teacher's is the policy's own
    assert quick(runs, *same[:2], taught_by(runs, "first", guidance_scale=2.0))[0]["loss"] > 0


class Linear(nn.Module):
    """A velocity that is linear in latent, time and text."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(17, 12), nn.Linear(1, 1)  # the second is there for its name
        self.inner.weight.data.copy_(0.3 * counter_normal((12, 17), "linear"))
        self.inner.bias.data.zero_()

    def forward(self, x: Tensor, timestep: Tensor, text: Tensor) -> Tensor:
        found: Tensor = self.inner(torch.cat([x.flatten(1), text, timestep[:, None] / 1000], 1))
        return found.view_as(x)


@pytest.mark.parametrize("more", [(), ("objective.options={states: 1, query: [5, 2]}",)])
def test_guidance_is_absorbed(runs: TinyRuns, monkeypatch: pytest.MonkeyPatch, more: tuple[str, ...]) -> None:
    """Guidance of a linear network is linear in the text: for four prompts of four numbers a LoRA can say it."""
    monkeypatch.setattr(toy_pipeline, "Net", Linear)
    given = ("num_iterations=60", "prompts_per_step=4", "policy.lora_rank=8", "policy.target_modules=[inner]")
    learns = ("optim.lr=0.05", "optim.weight_decay=0", "optim.schedule=cosine", "rewards=[]")
    rows = quick(runs, GUIDED, *given, *learns, *more)
    assert rows[-1]["error"] < 0.02 * rows[0]["error"]


def test_each_prompt_learns_from_its_teacher(runs: TinyRuns, gradients: list[Tensor]) -> None:
    """The policy is the model at its start: a teacher without a LoRA has no loss, so that two halves are a whole."""
    whole = quick(runs, taught_by(runs, "first"), "prompts_per_step=4")[0]
    halves = [quick(runs, taught_by(runs, *names), "prompts_per_step=4")[0] for names in (("first", ""), ("", "first"))]
    assert min(half["error"] for half in halves) > 0
    assert sum(half["error"] for half in halves) == pytest.approx(whole["error"], rel=1e-5)
    torch.testing.assert_close(gradients[1] + gradients[2], gradients[0], rtol=1e-4, atol=1e-7)
    both = quick(runs, taught_by(runs, "first", "second"), "prompts_per_step=4")[0]
    other = quick(runs, taught_by(runs, "", "second"), "prompts_per_step=4")[0]
    assert both["error"] == pytest.approx(halves[0]["error"] + other["error"], rel=1e-5)


def test_states_off_the_path_are_the_finished_latent_with_noise_of_their_counters() -> None:
    """The noise itself at level 1, the finished latent at 0, the closed form between; others are the path's own."""
    path = SimpleNamespace(
        kept=(0, 1, 2), states=counter_normal((2, 3, 3, 2, 2), "states"), final=counter_normal((2, 3, 2, 2), "final")
    )
    image, step = torch.arange(2).repeat_interleave(3), torch.tensor([0, 1, 2] * 2)
    schedule, keys = SimpleNamespace(sigma=torch.tensor([1.0, 0.6, 0.0])), [(5, 1, 0, 0), (5, 1, 0, 1)]
    found: Any = SimpleNamespace(path=path, schedule=schedule, keys=keys, image=image, step=step)
    x, own = (visited.states_of(Opd(off_policy=share), found, torch.arange(6)) for share in (1, 0))
    assert torch.equal(own, path.states.flatten(0, 1))
    for row, level in enumerate((1, 0.6, 0, 1, 0.6, 0)):
        noise, final = counter_normal((3, 2, 2), *keys[row // 3], "off policy", row % 3), path.final[row // 3]
        torch.testing.assert_close(x[row], (1 - level) * final + level * noise)
        assert level == 0.6 or torch.equal(x[row], noise if level else final)
    assert torch.equal(visited.states_of(Opd(off_policy=1), found, torch.tensor([4])), x[4:5])
    mixed = visited.states_of(Opd(off_policy=0.5), found, torch.arange(6))
    off = torch.tensor([Opd(off_policy=0.5).noised_again(*keys[row // 3], "off policy", row % 3) for row in range(6)])
    assert 0 < off.sum() < 6
    assert torch.equal(mixed[off], x[off])
    assert torch.equal(mixed[~off], own[~off])


@pytest.mark.parametrize("kernel", [(), (*SDE, "objective.options.weight=kl")])
def test_off_policy_states_that_are_those_of_the_path_have_its_loss(
    runs: TinyRuns, gradients: list[Tensor], monkeypatch: pytest.MonkeyPatch, kernel: tuple[str, ...]
) -> None:
    given, off = (taught_by(runs, "first"), "prompts_per_step=4", *kernel), "objective.options.off_policy=1"
    on_path, elsewhere = quick(runs, *given)[0], quick(runs, *given, off)[0]
    assert elsewhere["error"] != pytest.approx(on_path["error"], rel=1e-3)
    seen, descend = list[Any](), visited.descend

    def noted(loop: Any, found: Any, *more: Any) -> None:
        seen.append(found)
        descend(loop, found, *more)

    def of_the_path(shape: Any, keys: Sequence[tuple[Any, ...]]) -> Tensor:
        """The noise with which a finished latent becomes its path's own state."""
        path, sigma = seen[-1].path, seen[-1].schedule.sigma
        images = [(2 * group + number, step) for *_, group, number, _, step in keys]
        states = [(path.states[i, path.kept.index(s)] - (1 - sigma[s]) * path.final[i]) / sigma[s] for i, s in images]
        return torch.stack(states)

    monkeypatch.setattr(visited, "descend", noted)
    monkeypatch.setattr(visited, "sample_normals", of_the_path)
    alike = quick(runs, *given, off)[0]
    assert alike["loss"] == pytest.approx(on_path["loss"], rel=1e-5)
    torch.testing.assert_close(gradients[2], gradients[0], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("weight", ["kl", "mean", "transition"])
def test_each_step_weighs_what_its_kernel_says(runs: TinyRuns, weight: Any) -> None:
    plain, weighed = (quick(runs, GUIDED, *SDE, f"objective.options.weight={name}")[0] for name in ("velocity", weight))
    schedule = Toy().schedule(3, "diffusers")
    kernel = replace(KERNELS["flow_sde"], noise_level=0.7, sigma_max=schedule.sigma_max)
    for step in (0, 1):
        factor = Opd(weight=weight).weight_of(kernel, schedule.sigma[step], schedule.sigma[step + 1])
        assert weighed[f"loss/step_{step}"] == pytest.approx(factor * plain[f"loss/step_{step}"], rel=1e-6)
    assert plain["loss"] == plain["error"] == weighed["error"]
    assert "loss/step_2" not in plain  # it has no noise, and is not trained


def test_sizes_of_batches_do_not_change_the_result(runs: TinyRuns, gradients: list[Tensor]) -> None:
    given = (taught_by(runs, "first", "second"), "prompts_per_step=4")
    given += ("objective.options={states: 2, off_policy: 0.5}",)  # type: ignore[assignment]
    rows = [quick(runs, *given, *more)[0] for more in ((), ("micro_batch_size=1", "rollout_batch_size=2"))]
    assert rows[0]["loss"] == pytest.approx(rows[1]["loss"], rel=1e-6)
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-4, atol=1e-7)
    assert rows[0]["live_rows"] == rows[1]["live_rows"] == 16


def test_evaluations_are_as_many_as_were_counted(runs: TinyRuns) -> None:
    two = visited.counts(config_of(runs, taught_by(runs, "first", "second")))
    assert (two.teachers, two.slots) == (2, 0)  # which no checkpoint has
    for given in ((GUIDED, *SDE), (taught_by(runs, "first"), "objective.options.states=1", "rewards=[]"), (GUIDED,)):
        config = config_of(runs, *given, "updates_per_rollout=2")
        found = visited.counts(config).of_iteration(0, Toy().passes, config.resolve_batch(1))
        (row,) = quick(runs, *given, "updates_per_rollout=2")
        kinds = ("rollout", "update", "reference", "backward")
        assert {kind: row[f"nfe/{kind}"] for kind in kinds} == {kind: getattr(found, kind) for kind in kinds}
        assert row["images"] == found.images


# ---- whole runs ------------------------------------------------------------------------------------------------------


def test_a_run_goes_on_to_the_bit_with_the_same_teachers_alone(
    runs: TinyRuns, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    teacher = write_lora(tmp_path / "teacher", rank=2, alpha=1.0, seed=5)
    given: tuple[str, ...] = (f"policy.teachers=[{{lora: {teacher}, guidance_scale: 2}}]", "policy.ema_decay=0.9")
    given += ("objective.options={states: 2, off_policy: 0.5}", "updates_per_rollout=2")
    whole = runs.train(str(tmp_path / "whole"), "num_iterations=4", *given)
    run = runs.train(str(tmp_path / "run"), "num_iterations=2", *given)
    assert state(run)["slots"].keys() == {"ema"}
    assert main(["train", f"resume={run}", "num_iterations=4"]) == 0
    assert metrics(run) == metrics(whole)
    assert lora(run) == lora(whole)
    assert differences(lasting(run), lasting(whole)) == 0

    write_lora(teacher, rank=2, alpha=1.0, seed=6)
    capsys.readouterr()
    assert main(["train", f"resume={run}", "num_iterations=5"]) == 1
    refused = capsys.readouterr().err
    assert "teachers: changed are 0/pytorch_lora_weights.safetensors" in refused
    assert main(["train", f"resume={run}", "num_iterations=5", "resume_changed=true"]) == 0


@pytest.mark.slow
def test_two_processes_train_what_one_does(runs: TinyRuns, tmp_path: Path, warm_python: str) -> None:
    """Their prompts have different teachers, so that a process takes idle turns for the other's."""
    given = (
        taught_by(runs, "first", "second"),
        "num_iterations=3",
        "micro_batch_size=1",
        "objective.options={states: 2, off_policy: 0.5}",
    )
    one = runs.train(str(tmp_path / "one"), *given)
    told = [
        (0, True, [str(runs.config), *given, f"out={tmp_path / name}", f"parallel.{name}=2"])
        for name in ("shard", "replicate")
    ]
    train_on_two(tmp_path, told, python=warm_python)
    for name in ("shard", "replicate"):
        close(one, tmp_path / name)


def test_rewards_are_logged_and_not_needed(runs: TinyRuns) -> None:
    logged, without = (quick(runs, GUIDED, "num_iterations=2", *more) for more in ((), ("rewards=[]",)))
    assert [row["loss"] for row in logged] == [row["loss"] for row in without]
    assert all("reward" in row and row["images"] for row in logged)
    assert not any("reward" in row or row["images"] for row in without)
    quick(runs, GUIDED, "group_size=1", "same_latent=false")


@pytest.mark.slow
def test_weights_themselves_learn_from_the_model_under_guidance(
    tmp_path: Path, tiny_sd3_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(PIPELINES, "sd3", "flowrl.pipelines.families.sd3")  # the toy cannot be saved
    full = {"recipe": "visited", "sampler": {"kernel": "ode", "num_steps": 2}, "policy": {"train": "full"}}
    run = tiny_runs(tmp_path, tiny_sd3_folder, **full).train("run", GUIDED, "num_iterations=4", "optim.lr=1e-3")
    errors = [row["error"] for row in metrics(run)]
    assert max(errors[1:]) < errors[0] / 2


# ---- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ((), "or set objective.name=art, which learns from rewards"),
        (("policy.teachers=[{}]",), "the model itself at guidance 1, which the policy starts as"),
        ((GUIDED, "objective.name=opt"), "unknown objective of recipe visited 'opt' (did you mean 'opd'?)"),
        ((GUIDED, "objective.options.weights=kl"), "unknown key 'weights': did you mean 'weight'?"),
        ((GUIDED, "objective.options.weight=kl"), "weight kl is the KL of steps with noise"),
        ((GUIDED, "objective.options.off_policy=2"), "off_policy is a share of states, from 0 to 1, got 2"),
        (("objective={name: art, options: {off_policy: 0.5}}",), "unknown key 'off_policy'"),
        ((GUIDED, "objective.options.states=4"), "states is 4, and 3 steps of a path are trained"),
        ((GUIDED, *SDE, "objective.options.states=3"), "states is 3, and 2 steps of a path are trained"),
        ((GUIDED, "sampler.kernel=flow_sde", "sampler.noise_level=0"), "makes kernel flow_sde the ODE"),
        ((GUIDED, "clip_range=1e-3"), "clip_range is set to 0.001, but objective opd of recipe visited does"),
        ((GUIDED, "sampler.sde_window_size=1"), "sampler.sde_window_size is set to 1, but objective opd of"),
        ((GUIDED, "sampler.solver=dpm2"), "sampler.solver is set to 'dpm2'"),
        ((GUIDED, "recipe=forward"), "policy.teachers is set to"),
        (("policy.teachers=[{guidance_scale: -1}]",), "guidance_scale must lie in [0, 1000], got -1"),
        (("policy.teachers=[{lora: FIRST}, {guidance_scale: 3}]",), "lists 2, and one of them names no prompts"),
        (("policy.teachers=[{lora: FIRST, prompts: [a]}, {prompts: [a]}]",), "name the prompts a twice"),
        (("policy.teachers=[{lora: FIRST, prompts: [a]}]",), "2 of 4 training prompts have no teacher"),
        (("policy.teachers=[{lora: FIRST, prompts: [a, b]}]", "policy.teacher_key=tag"), "have None under 'tag'"),
        (("policy.teachers=[{lora: WIDE}]",), "has rank 3, policy.lora_rank is 2"),
        (("policy.teachers=[{lora: FIRST}]", "policy.target_modules=[outer]"), "the policy has no LoRA on (inner)"),
        (("policy.teachers=[{lora: FIRST}]", "policy.lora_variant=dora"), "no place for trained magnitudes"),
        (("policy.teachers=[{lora: FIRST}]", "policy.train=full", "policy.lora_rank=null"), "set policy.train=lora"),
        (("policy.teachers=[{lora: nowhere}]",), "there is no 'nowhere'"),
        (("group_size=1", "recipe=forward"), "group_size must be at least 2"),
        (("rewards=[]", "recipe=forward"), "rewards is empty"),
    ],
)
def test_what_cannot_work_is_refused_before_a_model_loads(
    runs: TinyRuns,
    overrides: tuple[str, ...],
    said: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(toy_pipeline, "load", None)
    given = [re.sub(r"FIRST|WIDE", lambda name: str(runs.folder / name[0].lower()), text) for text in overrides]
    assert main(["train", str(runs.config), f"out={runs.folder / 'refused'}", *given]) == 1
    assert said in " ".join(capsys.readouterr().err.split())
    assert not (runs.folder / "refused").exists()
