"""What a run costs, when its budget ends it, when it evaluates, that it continues where it was, memory included, and
what noise it draws."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_runs import differences, lasting, lora, metrics, state
from toy_pipeline import QuickRun, quick_run, reward_list, toy_config, toy_in_place

from flowrl.cli import main
from flowrl.config.base import find_config
from flowrl.config.train import load_config
from flowrl.runtime.files import LOCK
from flowrl.runtime.randomness import counter_normal
from flowrl.session.preflight import resolve
from flowrl.training.assignment import Ends, choose_prompts, remember
from flowrl.training.checkpoints import checkpoints
from flowrl.training.draws import AskedPrompts, Draws
from flowrl.training.learner import NetworkCounter
from flowrl.training.loop import Loop
from flowrl.training.parts import read_run_prompts
from flowrl.trajectory import Conditioning

pytestmark = pytest.mark.usefixtures("numbers_alone")


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The toy's configuration, with the toy in the place of a model family."""
    yield from toy_in_place(tmp_path_factory.mktemp("loop"))


def train(toy: Path, out: Path, *overrides: str) -> Path:
    assert main(["train", str(toy), f"out={out}", *overrides]) == 0
    return out


def same(a: Path, b: Path) -> None:
    """Bit for bit, the time aside."""
    assert metrics(a) == metrics(b)
    assert lora(a) == lora(b)
    assert differences(lasting(a), lasting(b)) == 0


def test_the_manifest_tells_how_a_run_ended_the_last_time_alone(toy: Path, tmp_path: Path) -> None:
    run = train(toy, tmp_path / "run")
    ended = {"stopped": "then", "failed": "then", "error": "no room on the disk"}
    (run / "manifest.json").write_text(json.dumps(json.loads((run / "manifest.json").read_text()) | ended))
    assert main(["train", f"resume={run}", "num_iterations=2"]) == 0
    now = json.loads((run / "manifest.json").read_text())
    assert not now.keys() & ended.keys()
    assert now["finished"]


# ---- what it costs ---------------------------------------------------------------------------------------------------

# 8 images of 4 steps, of which 3 are stochastic: evaluations of rollout, completion, update, backward and reference.
COSTS: dict[str, tuple[tuple[str, ...], tuple[int, int, int, int, int], int]] = {
    "outcome": ((), (8 * 4, 0, 8 * 3, 8 * 3, 0), 8),
    "guided": (("sampler.guidance_scale=3",), (64, 0, 48, 48, 0), 8),
    "one step of a window": (("sampler.sde_window_size=1",), (32, 0, 8, 8, 0), 8),
    "reference": (("kl_coef=0.1",), (32, 0, 24, 24, 24), 8),
    "guided reference": (("kl_coef=0.1", "sampler.guidance_scale=3"), (64, 0, 48, 48, 48), 8),
    "rollout in other pieces": (("micro_batch_size=2",), (32, 0, 24, 24, 0), 8),
    # The update, the second half's old densities in its own pieces, and the same once more before its own update.
    "sequence": (
        ("ratio=sequence", "loss_aggregation=samples", "updates_per_rollout=2"), (32, 0, 24 + 12 + 12, 24, 0), 8
    ),
    # From step j on the completion takes the T - 1 - j steps after the one that the rollout has evaluated.
    "dense": (("credit.method=dense_grpo",), (32, 8 * (3 + 2 + 1), 24, 24, 0), 8 * 4),
    "guided dense": (("credit.method=dense_grpo", "sampler.guidance_scale=3"), (64, 96, 48, 48, 0), 32),
    "dense in 3 steps": (("credit.method=dense_grpo", "credit.completion=3"), (32, 8 * 3 * 2, 24, 24, 0), 32),
    "clean": (("credit.method=vgpo",), (32, 0, 24, 24, 0), 32),
    # One anchor a prompt up to its last branching; 4 branches each; an update evaluates an anchor for all its branches.
    "g2rpo": (("credit.method=g2rpo",), (2 * 3 + 8 * (3 + 2 + 1), 0, 2 * 3, 2 * 3, 0), 8 * 3),
    # The coarser completions stop at evaluations that the others make too.
    "g2rpo, two strides": (("credit.method=g2rpo", "credit.strides=[1, 2]"), (54, 0, 6, 6, 0), 2 * 8 * 3),
    "tempflow": (("credit.method=tempflow", "credit.branches=2"), (4 * 3 + 48, 0, 4 * 3, 4 * 3, 0), 24),
    # The anchors go on to their own images.
    "self_opd": (("credit.method=self_opd", "credit.branches=2"), (4 * 4 + 48, 0, 4 * 3, 4 * 3, 0), 24 + 4),
    # A node is evaluated once, however many children it gets.
    "tree": (("credit.method=tree_grpo", "credit.splits=[0, 2]"), (2 * (1 + 2 + 2 + 4), 0, 10, 10, 0), 8),
    "branch_grpo": (("credit.method=branch_grpo", "credit.splits=[0, 1]"), (2 * (1 + 2 + 4 + 4), 0, 14, 14, 0), 8),
}  # fmt: skip


@pytest.mark.parametrize("name", COSTS)
def test_evaluations_agree_with_hand_counts(toy: Path, name: str) -> None:
    overrides, counted, images = COSTS[name]
    evaluated = (f"prompts.eval={toy.parent / 'prompts.txt'}", "eval_every=1")  # is not counted
    rows = quick_run(toy_config(toy, "num_iterations=2", *overrides, *evaluated), _quiet(toy))
    trained = [row for row in rows if "reward" in row]
    for done, row in enumerate(trained, start=1):
        kinds = ("rollout", "completion", "update", "backward", "reference")
        assert {kind: row.get(f"nfe/{kind}", 0) for kind in kinds} == {
            kind: done * count for kind, count in zip(kinds, counted, strict=True)
        }
        assert row["nfe/total"] == done * sum(counted)
        assert row["images"] == done * images
    assert [row["nfe/total"] for row in rows if "reward" not in row] == [0, sum(counted), 2 * sum(counted)]


def _quiet(toy: Path) -> Path:
    """A folder for what evaluation writes."""
    (toy.parent / "quiet").mkdir(exist_ok=True)
    return toy.parent / "quiet"


def test_every_round_costs(toy: Path) -> None:
    """A round samples and scores again, whether its groups disagree or not; all of them are updated on."""
    rows = quick_run(
        toy_config(toy, reward_list(toy.parent, "half_fail"), "curriculum.max_rounds=3", "num_iterations=4"), toy.parent
    )
    before = dict.fromkeys(("nfe/rollout", "nfe/backward", "images"), 0)
    for row in rows:
        rounds = row["num_scored"] // 8
        spent = {key: row.get(key, 0) - before[key] for key in before}
        # A micro-batch of a round in which no group disagrees is left out.
        assert (spent["nfe/rollout"], spent["images"]) == (32 * rounds, 8 * rounds)
        assert spent["nfe/backward"] <= 24 * rounds
        before = {key: row.get(key, 0) for key in before}


class TwoProcesses:
    """Half of a run of two processes whose other half counted the same."""

    device = torch.device("cpu")

    def total(self, tensor: torch.Tensor) -> torch.Tensor:
        return 2 * tensor


def test_the_counts_of_all_processes_are_joined_once() -> None:
    counters: dict[str, Any] = {"nfe/rollout": 100}  # from a checkpoint
    network = NetworkCounter(lambda x, timestep, cond: x, counters)
    run: Any = TwoProcesses()
    cond = Conditioning({"text": torch.zeros(3, 1)})
    with torch.no_grad():
        network(torch.zeros(3, 2), torch.zeros(3), cond)
        with network.counting("reference"):
            network(torch.zeros(5, 2), torch.zeros(5), cond)
    assert network.counts == {"rollout": 100}
    for _ in range(2):
        network.join(run)
        assert network.counts == {"rollout": 106, "reference": 10}
    with network.counting("update"):
        network(torch.zeros(1, 2), torch.zeros(1), cond)
    network.join(run)
    assert counters == {"nfe/rollout": 106, "nfe/reference": 10, "nfe/update": 2, "nfe/backward": 2}


def test_an_unknown_kind_of_evaluation_is_refused() -> None:
    network = NetworkCounter(lambda x, timestep, cond: x, {})
    with pytest.raises(ValueError, match="rollout, completion, update, reference, backward"), network.counting("eval"):
        pass


# ---- the budget ------------------------------------------------------------------------------------------------------


class SecondsByCall:
    """A clock that moves a second at each look: an iteration, which looks at its begin and at its end, takes one."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        self.now += 1.0
        return self.now


@pytest.fixture
def seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flowrl.training.loop.time", SecondsByCall())


@pytest.mark.usefixtures("seconds")
@pytest.mark.parametrize("budget", ["nfe=161", "nfe=240", "images=17", "images=24", "seconds=2.5", "seconds=3"])
def test_a_budget_ends_the_run_after_the_iteration_that_uses_it_up_and_a_resumed_run_goes_on_counting(
    toy: Path, tmp_path: Path, budget: str
) -> None:
    """80 evaluations, 8 images and a second an iteration."""
    whole = train(toy, tmp_path / "whole", f"budget.{budget}", "num_iterations=9")
    assert [row["iteration"] for row in metrics(whole)] == [0, 1, 2]
    assert json.loads((whole / "summary.json").read_text())["reward"]["last"] == metrics(whole)[-1]["reward"]
    spent = state(whole)["counters"]
    assert (spent["images"], spent["seconds"], sum(spent[key] for key in spent if key.startswith("nfe/"))) == (
        24,
        3,
        240,
    )
    for kept in (1, 2):
        run = tmp_path / f"from-{kept}"
        shutil.copytree(whole, run)
        for folder in checkpoints(run)[kept:]:
            shutil.rmtree(folder)
        assert main(["train", f"resume={run}"]) == 0
        same(run, whole)


def test_a_run_whose_budget_is_used_up_says_so(toy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = train(toy, tmp_path / "run", "budget.images=8", "budget.nfe=1000", "num_iterations=9")
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*") if path.name != LOCK}
    capsys.readouterr()
    assert main(["train", f"resume={run}"]) == 0
    assert "its budget (nfe 1000, images 8) was used up after 1 iteration" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*") if path.name != LOCK} == before


EVALUATIONS = [
    ("budget.nfe=400 budget.evals=2 num_iterations=99", [0, 3, 5]),  # 1/5, 2/5, 3/5 >= 1/2, 4/5, 1
    ("budget.nfe=400 budget.evals=2 num_iterations=99 eval.initial=false", [3, 5]),
    ("budget.images=40 budget.evals=9 num_iterations=99", [0, 1, 2, 3, 4, 5]),
    ("budget.evals=2 num_iterations=5", [0, 3, 5]),
    ("budget.nfe=8000 budget.evals=2 num_iterations=4", [0, 2, 4]),
    ("eval_every=2 num_iterations=3", [0, 2, 3]),
    ("eval_every=2 num_iterations=3 eval.initial=false", [2, 3]),
]


@pytest.mark.parametrize(("overrides", "wanted"), EVALUATIONS)
def test_evaluations_are_spread_over_the_budget(toy: Path, overrides: str, wanted: list[int]) -> None:
    prompts = f"prompts.eval={toy.parent / 'prompts.txt'}"
    rows = quick_run(toy_config(toy, prompts, "eval.num_images=0", *overrides.split()), _quiet(toy))
    assert [row["iteration"] for row in rows if "reward" not in row] == wanted
    assert "eval/reward/brightness" in rows[-1]


def test_an_evaluation_that_a_stop_left_out_is_made_up_for(
    toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = f"prompts.eval={toy.parent / 'prompts.txt'}"
    overrides = (prompts, "budget.nfe=400", "budget.evals=2", "num_iterations=9", f"out={tmp_path / 'run'}")
    with monkeypatch.context() as patch:
        patch.setattr("flowrl.training.run.Run.should_stop", lambda self: len(metrics(self.folder)) == 4)
        assert main(["train", str(toy), *overrides]) == 130
    assert main(["train", f"resume={tmp_path / 'run'}"]) == 0
    assert [row["iteration"] for row in metrics(tmp_path / "run") if "reward" not in row] == [0, 3, 5]


# ---- memory ----------------------------------------------------------------------------------------------------------

REPLAY = ("curriculum.sampling=replay", "curriculum.options={band: [0.1, 0.9], share: 0.5, cooldown: 2}")
WITH_MEMORY: dict[str, tuple[str, ...]] = {
    "dcpo": ("shaping.name=dcpo",),
    "dcpo, release": ("shaping.name=dcpo", "shaping.options={merge: release}"),
    "calibration": ("credit.method=dense_grpo", "sampler.noise_level=0.7", "sampler.calibration.iterations=3"),
    "replay": REPLAY,
    "gaussian": ("curriculum.sampling=gaussian", "curriculum.options={momentum: 0.5, width: 0.1}"),
    "rounds": ("curriculum.sampling=gaussian", "curriculum.max_rounds=2"),
    "random steps": ("sampler.trained_fraction=0.67", "sampler.trained_steps=random", "policy.ema_decay=0.9"),
    "random window": ("sampler.sde_window_size=1", "credit.method=tempflow"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", WITH_MEMORY)
def test_a_run_resumed_after_every_iteration_is_the_run_that_was_never_stopped(
    toy: Path, tmp_path: Path, name: str
) -> None:
    settings = (*WITH_MEMORY[name], "optim.lr=0.1")
    whole = train(toy, tmp_path / "whole", "num_iterations=3", *settings)
    run = train(toy, tmp_path / "run", "num_iterations=1", *settings)
    for number in (2, 3):
        assert main(["train", f"resume={run}", f"num_iterations={number}"]) == 0
    same(run, whole)
    memory = state(whole)["memory"]
    if name.startswith("dcpo"):
        assert memory["reward_history"]["visits"].sum() == 6  # of four prompts, two an iteration
        assert float(memory["reward_history"]["variance"].min()) > 0
    if name in ("gaussian", "rounds"):
        assert len(set(memory["pass_rates"].tolist())) > 2
    if name == "replay":
        assert any(reuses > 0 for *_, reuses in memory["replay"])
    if name.startswith("random"):
        assert memory == {}


# ---- which prompts ---------------------------------------------------------------------------------------------------


def _loop(toy: Path, *overrides: str) -> Loop:
    run: Any = QuickRun(toy.parent)
    config = toy_config(toy, *overrides)
    return Loop(resolve(config, read_run_prompts(config.prompts)), run)


def _ends(reward: list[float], prompt: list[int]) -> Ends:
    numbers = torch.tensor(prompt)
    return Ends(reward=torch.tensor(reward), group=numbers, prompt=numbers)


def test_replayed_prompts_come_first_and_fresh_ones_fill_up(toy: Path) -> None:
    loop = _loop(toy, *REPLAY)
    fresh = [choose_prompts(loop, iteration, 0) or [] for iteration in range(2)]
    assert sorted([*fresh[0], *fresh[1]]) == [0, 1, 2, 3]
    remember(loop, _ends([0.0, 1.0, 1.0, 1.0], [3, 3, 1, 1]))  # prompt 3 has even odds, prompt 1 is too easy
    assert loop.memory["replay"] == [[3, 0.5, 0, 0]]
    assert choose_prompts(loop, 1, 0) == fresh[1]  # it rests for two iterations
    for iteration in (2, 3, 4):
        prompts = choose_prompts(loop, iteration, 0)
        assert prompts is not None
        assert prompts[0] == 3
        assert len(set(prompts)) == 2
    assert choose_prompts(loop, 2, 1) is None  # further rounds are fresh


def test_prompts_near_even_odds_are_drawn_more_often(toy: Path) -> None:
    loop = _loop(toy, "curriculum.sampling=gaussian", "curriculum.options={momentum: 0, width: 0.1}")
    remember(loop, _ends([0.0, 0.0, 1.0, 1.0, 1.0, 0.0], [0, 0, 1, 1, 2, 2]))
    assert loop.memory["pass_rates"].tolist() == [0.0, 1.0, 0.5, 0.5]
    drawn = [choose_prompts(loop, iteration, round) for iteration in range(20) for round in (0, 1)]
    assert all(sorted(prompts or []) == [2, 3] for prompts in drawn)  # exp(-12.5) of the others
    assert {tuple(prompts or []) for prompts in drawn} == {(2, 3), (3, 2)}
    before = loop.memory["pass_rates"].clone()
    remember(loop, _ends([torch.nan, torch.nan, 1.0], [2, 2, 3]))  # nothing valid says nothing
    assert loop.memory["pass_rates"].tolist() == [*before.tolist()[:3], 1.0]


def test_more_different_prompts_than_there_are_cannot_be_drawn(toy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    overrides = ("curriculum.sampling=gaussian", "prompts_per_step=5", f"out={toy.parent / 'refused'}")
    assert main(["train", str(toy), *overrides]) == 1
    assert "prompts_per_step (5)" in capsys.readouterr().err


def test_rewards_that_are_no_success_rates_are_refused(toy: Path) -> None:
    loop = _loop(toy, "curriculum.sampling=gaussian")
    with pytest.raises(ValueError, match=r"lie in \[0, 1\], but there are rewards from 0 to 7"):
        remember(loop, _ends([0.0, 7.0], [0, 0]))


def test_the_rounds_of_an_iteration_have_their_own_groups_and_noise(toy: Path) -> None:
    loop = _loop(toy)
    first, second = (loop.batch(0, round=number) for number in range(2))
    assert (first.asked.groups.tolist(), second.asked.groups.tolist()) == ([0, 1], [2, 3])
    assert (first.own, second.own) == (range(8), range(8, 16))
    joined = AskedPrompts.cat([first.asked, second.asked])
    assert joined.rows(torch.tensor([3, 0, 2])).tolist() == [3, 0, 2]
    assert joined.prompt_ids == (*first.asked.prompt_ids, *second.asked.prompt_ids)
    noises = [loop.start_noise(batch, batch.own) for batch in (first, second)]
    assert len({tuple(noise.flatten().tolist()) for both in noises for noise in both}) == 16


# ---- noise -----------------------------------------------------------------------------------------------------------

NOISE_SHAPE = (2, 3)


def _draws(**config: Any) -> Any:
    found: Any = Draws()
    found.config = SimpleNamespace(**{"seed": 7, "group_size": 2, "same_latent": False} | config)
    found.pipeline, found.device = SimpleNamespace(latent_shape=NOISE_SHAPE), torch.device("cpu")
    return found


@pytest.mark.parametrize(("same", "own"), [(False, [3, 0, 1]), (True, [0, 0, 0]), (2, [1, 0, 0])])
def test_start_noise_is_that_of_an_image_or_of_those_that_share_it(same: bool | int, own: list[int]) -> None:
    config = load_config(find_config("tiny_flow_grpo"), [f"same_latent={str(same).lower()}", "group_size=4"])
    noise = _draws(images_per_start=config.images_per_start, group_size=4).start_noise(
        SimpleNamespace(iteration=5), range(3, 6)
    )
    for place, (group, image) in enumerate(zip([0, 1, 1], own, strict=True)):
        assert torch.equal(noise[place], counter_normal(NOISE_SHAPE, 7, "start", 5, group, image))


def test_step_noise_is_that_of_an_image_and_a_step() -> None:
    noise = _draws(same_latent=True).step_noise(SimpleNamespace(iteration=5), range(1, 4))
    for step in range(3):
        for place, (group, image) in enumerate([(0, 1), (1, 0), (1, 1)]):
            assert torch.equal(noise(step)[place], counter_normal(NOISE_SHAPE, 7, "step", 5, group, image, step))
