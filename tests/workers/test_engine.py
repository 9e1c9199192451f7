"""Workers that draw by an engine of the user's: its states are trained on, its densities are not asked for."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kept_workers import Inside
from tiny_runs import TinyRuns, lora, metrics, tiny_runs
from toy_pipeline import toy_config, toy_in_place, write_toy

from flowrl.cli import main
from flowrl.session.preflight import recipe_of
from flowrl.workers import rollouts

REFERENCE = Path(__file__).resolve().parents[2] / "docs" / "engines" / "stock_engine.py"
INSIDE = """
import sys
sys.path.insert(0, {folder!r})
from stock_engine import Stock

class Engine:
    def load(self, config):
        self.stock = Stock(config)
    def take(self, weights):
        self.stock.policy.load(weights)
    def draw(self, asked):
        import torch
        numbers = [asked.guidance_scale, asked.kernel.noise_level, float(asked.kernel.sigma_max)]
        numbers = torch.tensor(numbers, dtype=torch.float64)
        body = dict(start=asked.start, sigma=asked.schedule.sigma, timestep=asked.schedule.timestep, numbers=numbers)
        body |= {{"cond/" + name: tensor for name, tensor in asked.cond.items()}}
        body |= {{f"noise/{{step}}": {noise} for step, tensor in asked.noise.items()}}
        return self.stock.draw(body)["states"]{more}
"""


@pytest.fixture(autouse=True)
def inside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollouts, "RayBackend", Inside)
    monkeypatch.setattr(rollouts, "join_cluster", lambda config, run: "here")


@pytest.fixture
def toy(tmp_path: Path) -> Iterator[TinyRuns]:
    for config in toy_in_place(tmp_path):
        yield TinyRuns(folder=tmp_path, config=config)


def engine(folder: Path, noise: str = "tensor", more: str = "") -> str:
    """The setting of an engine that draws in the worker's process."""
    path = folder / "engine.py"
    path.write_text(INSIDE.format(folder=str(REFERENCE.parent), noise=noise, more=more))
    return f"workers.engine={path}"


def rows(run: Path) -> list[dict[str, Any]]:
    left = ("workers/", "ratio_first_deviation")
    return [{key: value for key, value in row.items() if not key.startswith(left)} for row in metrics(run)]


ODE = ("recipe=visited", "sampler.kernel=ode", "sampler.noise_level=null", "num_iterations=2")


@pytest.mark.parametrize(
    "more",
    [
        ("num_iterations=2",),
        ("num_iterations=3", "sampler.sde_window_size=1", "workers.staleness=1"),
        (*ODE, "objective.name=art"),
        (*ODE, "policy.teachers=[{guidance_scale: 3}]"),
        ("sampler.kernel=cps", "dmd.weight=0.1", "num_iterations=2"),
    ],
)
def test_an_engine_that_draws_the_same_states_trains_the_same_policy(toy: TinyRuns, more: tuple[str, ...]) -> None:
    sizes = ("workers.rollouts=1", "sampler.guidance_scale=2", *more)
    sizes += (f"prompts.eval={toy.folder}/prompts.txt", "eval_every=2", "eval.initial=false")
    plain, drawn = toy.train("plain", *sizes), toy.train("drawn", *sizes, engine(toy.folder))
    assert not any("ratio_first_deviation" in row for row in metrics(drawn))
    for one, other in zip(rows(plain), rows(drawn), strict=True):
        assert {key: (one[key], other[key]) for key in one if one[key] != other[key]} == {}
    assert lora(plain) == lora(drawn)


def test_an_engine_may_draw_noise_of_its_own(toy: TinyRuns) -> None:
    found = toy.train("own", "workers.rollouts=1", "updates_per_rollout=2", engine(toy.folder, noise="tensor.flip(0)"))
    assert rows(found)[0]["ratio_max_deviation"] < 0.5  # the second update compares with the first one's policy
    assert rows(found)[0]["grad_norm"] > 0


def test_states_that_were_not_asked_for_end_the_run(toy: TinyRuns, capsys: pytest.CaptureFixture[str]) -> None:
    out = ["train", str(toy.config), f"out={toy.folder / 'bad'}", "workers.rollouts=1"]
    assert main([*out, engine(toy.folder, more="[:, 1:]")]) != 0
    assert "the engine of workers.engine returned states (8, 4, 3, 2, 2)" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["workers.engine=a.py"], "workers.rollouts is 0: name a number"),
        (["workers.engine=a.py", "workers.rollouts=1", "workers.staleness=2"], r"set workers\.importance_cap=0"),
        (["workers.engine=a.py", "workers.rollouts=1", "credit.method=g2rpo"], r"credit\.method=g2rpo needs more"),
        (["workers.engine=a.py", "workers.rollouts=1", "objective.name=guard"], r"objective\.name=guard needs more"),
        (
            ["workers.engine=a.py", "workers.rollouts=1", "shaping.name=dcpo", "shaping.options.clip=dynamic"],
            r"clip=dynamic needs more",
        ),
        (
            [
                *("workers.engine=a.py", "workers.rollouts=1", "reward_aggregation=each"),
                "rewards=[{name: jpeg_compressibility, routes: [left]}, {name: jpeg_incompressibility}]",
            ],
            r"rewards\.routes needs more",
        ),
        (["workers.engine=a.py", "workers.rollouts=1", "sampler.solver=dpm2"], r"set sampler\.solver=euler"),
    ],
)
def test_what_states_alone_cannot_do_is_refused(tmp_path: Path, settings: list[str], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        recipe_of(config := toy_config(write_toy(tmp_path), *settings)).check(config)


@pytest.mark.slow
def test_the_reference_server_draws_what_the_worker_would(
    tmp_path: Path, tiny_sd3_folder: Path, warm_python: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", warm_python)
    runs = tiny_runs(tmp_path, tiny_sd3_folder)
    sizes = ("num_iterations=2", "rollout_batch_size=4", "sampler.guidance_scale=3", "workers.rollouts=1")
    plain, served = runs.train("plain", *sizes), runs.train("served", *sizes, f"workers.engine={REFERENCE}")
    assert lora(plain) == lora(served)
    assert [row["reward"] for row in rows(plain)] == [row["reward"] for row in rows(served)]
