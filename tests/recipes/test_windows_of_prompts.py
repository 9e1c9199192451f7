"""`sampler.sde_window_by: prompt`: stochastic steps that the images of a prompt share, each prompt its own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from recorded_gradients import recorded_gradients
from toy_pipeline import QuickRun, on_threads, quick_run, toy_config, toy_in_place

from flowrl.config.together import check_together
from flowrl.config.train import TrainConfig
from flowrl.credit import CREDIT
from flowrl.recipes import grpo, preference
from flowrl.session.preflight import resolve
from flowrl.training import paths
from flowrl.training.loop import Loop
from flowrl.training.parts import read_run_prompts
from flowrl.training.paths import Paths, draw_request, sample, sample_paths, sampler_at, stochastic_steps
from flowrl.training.record import Recording
from flowrl.trajectory import Trajectory

pytestmark = pytest.mark.usefixtures("numbers_alone")

ONE_OF_FIVE = (
    "prompts_per_step=4",
    "sampler.num_steps=6",
    "sampler.sde_window_size=1",
    "sampler.sde_window_range=[0,5]",
)
BY_PROMPT = (*ONE_OF_FIVE, "sampler.sde_window_by=prompt")
OF_ONE_PROMPT = """
def reward(images, prompts, metadata):
    values = images.mean((1, 2, 3))
    return [float(value) if prompt == WANTED else 0.0 for value, prompt in zip(values, prompts)]
"""


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The toy's configuration, with the toy in the place of a model family."""
    yield from toy_in_place(tmp_path_factory.mktemp("windows"))


def loop_of(config: TrainConfig) -> Loop:
    run: Any = QuickRun(Path())
    return Loop(resolve(config, read_run_prompts(config.prompts)), run)


def test_each_prompt_draws_its_window_uniformly(toy: Path) -> None:
    sampler = toy_config(toy, *BY_PROMPT).sampler
    places = [(iteration, group) for iteration in range(40) for group in range(25)]
    drawn = Counter(stochastic_steps(sampler, 3, *place) for place in places)
    assert sorted(drawn) == [(0,), (1,), (2,), (3,), (4,)]
    assert all(abs(count - 200) < 60 for count in drawn.values())  # 200 with a standard deviation of 13
    assert len({stochastic_steps(sampler, 3, 0, group) for group in range(25)}) == 5
    by_iteration = toy_config(toy, *ONE_OF_FIVE).sampler
    assert len({stochastic_steps(by_iteration, 3, 0, group) for group in range(25)}) == 1


@pytest.mark.parametrize("size", [1, 2])
def test_a_transition_is_of_its_prompt_s_step(toy: Path, size: int) -> None:
    config = toy_config(toy, *BY_PROMPT, f"sampler.sde_window_size={size}", "rollout_batch_size=3")
    loop = loop_of(config)
    kernel, schedule, steps = sampler_at(loop, 0)
    batch = loop.batch(0)
    with torch.no_grad(), loop.scorer.start(batch) as scoring:
        how = Paths(kernel=kernel, schedule=schedule, steps=steps)
        sampled = sample_paths(loop, batch, CREDIT["outcome"], how, scoring)
        scoring.result()
    of_group = {group: stochastic_steps(config.sampler, config.seed, 0, group) for group in range(4)}
    assert len(set(of_group.values())) > 1
    assert [(int(g), int(s)) for g, s in zip(sampled.group, sampled.step, strict=True)] == [
        (group, step) for group in range(4) for _ in range(4) for step in of_group[group]
    ]
    record, ones = Recording(loop, batch.asked, sampled, kernel, schedule), torch.ones(len(sampled), dtype=torch.bool)
    credit: Any = SimpleNamespace(weight=None)
    rows = grpo.rows_of(sampled, credit, torch.ones(1, len(sampled)), ones, (1e-4, 1e-4))
    (blocks,) = grpo.micro_batches(rows, 24, 1)
    torch.testing.assert_close(record.rescore(rows, blocks), sampled.log_prob)


def test_the_gradient_is_the_mean_of_those_of_the_prompts(
    toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each prompt alone, with its window as that of the iteration, and equal rewards for all others."""
    gradients = recorded_gradients(monkeypatch)
    config = toy_config(toy, *BY_PROMPT)
    (row,) = quick_run(config, toy.parent)
    assert row["live_rows"] == 16
    assert row["ratio_first_deviation"] < 1e-6
    asked = loop_of(config).batch(0).asked
    for group, prompt in zip(asked.groups.tolist(), asked.prompts, strict=True):
        file = tmp_path / f"{group}.py"
        file.write_text(OF_ONE_PROMPT.replace("WANTED", repr(prompt.text)))
        (step,) = stochastic_steps(config.sampler, config.seed, 0, group)
        window = f"sampler.sde_window_range=[{step},{step + 1}]"
        quick_run(toy_config(toy, *ONE_OF_FIVE, window, f"rewards=[{{file: {file}, function: reward}}]"), toy.parent)
    whole, *alone = gradients
    assert len(alone) == 4
    torch.testing.assert_close(whole, torch.stack(alone).mean(0), rtol=0, atol=1e-5 * float(whole.abs().max()))


def test_pieces_end_with_their_prompt(toy: Path) -> None:
    batch: Any = SimpleNamespace(own=range(2, 11), iteration=0)
    config = toy_config(toy, *BY_PROMPT)
    pieces = list(paths._drawn_at_once(config, batch, (0,), 3))
    assert [(one.start, one.stop) for one, _ in pieces] == [(2, 4), (4, 7), (7, 8), (8, 11)]
    assert [steps for _, steps in pieces] == [stochastic_steps(config.sampler, 0, 0, group) for group in (0, 1, 1, 2)]
    pieces = list(paths._drawn_at_once(toy_config(toy, *ONE_OF_FIVE), batch, (0,), 3))
    assert pieces == [(range(2, 5), (0,)), (range(5, 8), (0,)), (range(8, 11), (0,))]


def test_workers_draw_what_the_learner_draws(toy: Path) -> None:
    loop = loop_of(toy_config(toy, *BY_PROMPT))
    kernel, schedule, steps = sampler_at(loop, 0)
    batch = loop.batch(0)
    with torch.no_grad():
        how = Paths(kernel=kernel, schedule=schedule, steps=steps)
        whole = sample(loop, batch, how, None)
        asked = paths.requests_of(loop, batch, steps, how, plan=False)
        drawn: list[Any] = [draw_request(loop, request) for request in asked]
    assert [one.steps for one in drawn] == [stochastic_steps(loop.config.sampler, 0, 0, group) for group in range(4)]
    for name, column in whole.columns().items():
        assert torch.equal(column, torch.cat([getattr(one, name) for one in drawn]))


def test_processes_that_share_a_prompt_share_its_step(toy: Path) -> None:
    """Three images each of groups of four: two of the four processes have parts of two prompts."""
    config = toy_config(toy, *BY_PROMPT, "prompts_per_step=3")

    def drawn(run: Any) -> Trajectory:
        loop = Loop(resolve(config, read_run_prompts(config.prompts)), run)
        kernel, schedule, steps = sampler_at(loop, 0)
        with torch.no_grad():
            return sample(loop, loop.batch(0), Paths(kernel=kernel, schedule=schedule, steps=steps), None)

    whole = drawn(QuickRun(Path())).columns()
    parts = [part.columns() for part in on_threads(4, Path(), drawn)]
    for name, column in whole.items():
        torch.testing.assert_close(torch.cat([part[name] for part in parts]), column)


TWO, ALL = "sampler.sde_window_size=2", "sampler.sde_window_size=0"
REFUSED: list[tuple[tuple[str, ...], str]] = [
    (("sampler.sde_window=progressive", TWO, "sampler.sde_window_range=null"), "sde_window is progressive"),
    (("sampler.flash_tail=0.5", "sampler.grid=linspace"), "flash_tail 0.5"),
    ((TWO, "sampler.trained_fraction=0.5"), "trained_fraction 0.5"),
    ((ALL,), "sde_window_size 0 all begin"),
    (("sampler.sde_window_size=5",), "give a size from 1 to 4"),
    (("credit.method=dense_grpo",), "credit method dense_grpo"),
    (("credit.method=tempflow",), "credit method tempflow"),
    (("credit.method=branch_grpo", "credit.splits=[0, 1]"), "credit method branch_grpo"),
]


@pytest.mark.parametrize(
    ("overrides", "told"), REFUSED, ids=lambda value: " ".join(value) if isinstance(value, tuple) else ""
)
def test_what_has_no_window_of_a_prompt_is_refused(toy: Path, overrides: tuple[str, ...], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        grpo.check(toy_config(toy, *BY_PROMPT, *overrides))


def test_pairs_and_split_weights_refuse_windows_of_prompts(toy: Path) -> None:
    d3po = ("recipe=preference", "objective.name=d3po", "same_latent=true")
    with pytest.raises(ValueError, match="sde_window_by is set to 'prompt', but objective d3po"):
        preference.check(toy_config(toy, *BY_PROMPT, *d3po))
    with pytest.raises(
        ValueError, match=r"sampler\.sde_window_by=prompt do not go together, because processes that share weights"
    ):
        check_together(toy_config(toy, *BY_PROMPT, "parallel.shard=2"))
    with pytest.raises(ValueError, match=r"keep_graphs=true and sampler\.sde_window_by=prompt do not go together"):
        check_together(toy_config(toy, *BY_PROMPT, "keep_graphs=true"))
