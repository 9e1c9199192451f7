"""Search at sampling time: what is chosen, what it costs, and that failed scores never win."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from toy_pipeline import Toy

from flowrl.generation.best_of import KeptImages, candidates, prune_steps
from flowrl.generation.drawing import in_batches
from flowrl.media.images import save_png
from flowrl.prompts.loading import Prompt
from flowrl.rewards import FunctionReward, RewardInputs, RewardOutput
from flowrl.runtime.randomness import counter_normal
from flowrl.samplers import Velocity, build_schedule
from flowrl.samplers.search import Pruning, best, best_of_n_kl, pruning, search, survivors
from flowrl.training.heldout import generate
from flowrl.training.prompting import encode_prompts, guided
from flowrl.trajectory import Conditioning

NAN, INF = math.nan, math.inf
SCHEDULE = build_schedule({"shift": 2.0}, 6, grid="diffusers")


# ---- choosing --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("count", "nats"), [(1, 0.0), (2, 0.1931), (4, 0.6363), (16, 1.8351)])
def test_kl_of_best_of_n(count: int, nats: float) -> None:
    assert best_of_n_kl(count) == pytest.approx(nats, abs=5e-5)
    # Of continuous rewards, taken as uniform, the best of N has the density N u^(N-1): the bound is reached.
    u = (np.arange(200_000) + 0.5) / 200_000
    density = count * u ** (count - 1)
    kl = np.where(density > 0, density * np.log(np.maximum(density, 1e-300)), 0.0).mean()
    assert best_of_n_kl(count) == pytest.approx(kl, abs=1e-4)


def test_expected_maximum_of_uniform_rewards() -> None:
    scores = torch.rand(40_000, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for count in (1, 2, 4, 16):
        drawn = scores[:, :count]
        top = drawn.gather(1, best(drawn)[:, None])
        mean = count / (count + 1)
        error = math.sqrt(count / ((count + 1) ** 2 * (count + 2)) / len(scores))
        assert abs(float(top.mean()) - mean) < 4 * error


def test_failed_scores_never_win_and_ties_go_to_the_first() -> None:
    scores = torch.tensor([
        [NAN, 0.1, 0.3, 0.3], [INF, NAN, -5.0, NAN], [NAN, NAN, NAN, NAN], [-INF, -9.0, 2.0, 1.0], [1.0, 1.0, 1.0, 1.0],
    ])  # fmt: skip
    assert best(scores).tolist() == [2, 2, 0, 2, 0]
    assert survivors(scores, 2).tolist() == [[2, 3], [0, 2], [0, 1], [2, 3], [0, 1]]
    assert survivors(scores, 4).tolist() == [[0, 1, 2, 3]] * 5


def test_survivors_are_those_of_a_sort_by_hand() -> None:
    scores = torch.from_numpy(np.random.default_rng(3).integers(0, 4, (50, 7)).astype(np.float64))
    for keep in range(1, 8):
        wanted = [sorted(sorted(range(7), key=lambda n: (-row[n], n))[:keep]) for row in scores.tolist()]
        assert survivors(scores, keep).tolist() == wanted


# ---- costs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("plan", "steps", "evaluations", "looks"), [
    (Pruning(num_candidates=1), 10, 10, 0),
    (Pruning(num_candidates=4), 10, 40, 4),
    (pruning(8, [2, 5]), 10, 8 * 3 + 4 * 3 + 2 * 4, 8 + 4 + 2),
    (pruning(4, [0], 0.25), 6, 4 + 5, 4),
    (pruning(5, [1, 2]), 4, 5 + 5 + 3 + 2, 5 + 3 + 2),
])  # fmt: skip
def test_costs(plan: Pruning, steps: int, evaluations: int, looks: int) -> None:
    assert plan.evaluations(steps) == evaluations
    assert plan.looks == looks


def test_a_fraction_is_rounded_up() -> None:
    assert pruning(30, [1], 0.1).cuts == ((1, 3),)
    assert pruning(7, [0, 3, 4]).cuts == ((0, 4), (3, 2), (4, 1))


@pytest.mark.parametrize(("make", "message"), [
    (lambda: best_of_n_kl(0), "at least 1"),
    (lambda: Pruning(num_candidates=0), "at least 1 candidate"),
    (lambda: Pruning(num_candidates=4, cuts=((3, 2), (3, 1))), "rise"),
    (lambda: Pruning(num_candidates=4, cuts=((-1, 2),)), "rise"),
    (lambda: Pruning(num_candidates=4, cuts=((1, 4),)), "4 -> 4"),
    (lambda: Pruning(num_candidates=4, cuts=((1, 0),)), "4 -> 0"),
    (lambda: pruning(4, [1, 2, 3]), "1 -> 1"),
    (lambda: pruning(4, [1], 1.0), "between 0 and 1"),
    (lambda: pruning(4, [1], NAN), "between 0 and 1"),
    (lambda: pruning(4, [9]).alive(10), "latest is 8"),
])  # fmt: skip
def test_plans_that_cannot_work_are_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


# ---- the search itself -----------------------------------------------------------------------------------------------


class Straight:
    """A flow on straight lines: candidate `row` ends at `clean[row]`, and its prediction says so at every step."""

    def __init__(self, clean: Tensor) -> None:
        self.clean = clean
        self.asked: list[list[int]] = []

    def velocity_of(self, rows: Tensor) -> Velocity:
        self.asked.append(rows.tolist())
        return lambda x, sigma, timestep: (x - self.clean[rows]) / sigma


def test_pruning_keeps_the_best_and_counts_every_step() -> None:
    clean = counter_normal((3 * 5, 2, 2), "clean")
    flow = Straight(clean)
    seen: list[tuple[Tensor, Tensor]] = []

    def score(found: Tensor, rows: Tensor) -> Tensor:
        seen.append((found, rows))
        return found.mean((1, 2))

    x = counter_normal((3, 5, 2, 2), "start")
    done = search(flow.velocity_of, x, SCHEDULE, Pruning(num_candidates=5, cuts=((1, 3), (3, 2))), score)
    value = clean.mean((1, 2)).reshape(3, 5)
    order = value.argsort(dim=1, descending=True)
    assert done.chosen.tolist() == order[:, 0].tolist()
    assert torch.allclose(done.final, clean.reshape(3, 5, 2, 2)[torch.arange(3), done.chosen], atol=1e-6)
    kept = [[sorted(order[p, :n].tolist()) for p in range(3)] for n in (5, 3, 2)]
    assert flow.asked == [[5 * p + n for p in range(3) for n in row[p]] for row in kept]
    for (found, rows), row in zip(seen, kept, strict=True):
        assert rows.tolist() == [5 * p + n for p in range(3) for n in row[p]]
        assert torch.allclose(found, clean[rows], atol=1e-6)
    for cut, row in enumerate(kept):
        for p in range(3):
            finite = [n for n in range(5) if math.isfinite(float(done.scores[cut, p, n]))]
            assert finite == row[p]
            assert torch.allclose(done.scores[cut, p, finite].float(), value[p, finite], atol=1e-6)
    steps = {5: 2, 3: 4, 2: 6}  # evaluations of who was dropped at the first cut, at the second, or never
    for p in range(3):
        wanted = [steps[5 if n not in kept[1][p] else 3 if n not in kept[2][p] else 2] for n in range(5)]
        assert done.evaluations[p].tolist() == wanted
        assert sum(wanted) == Pruning(num_candidates=5, cuts=((1, 3), (3, 2))).evaluations(6)


def test_a_single_survivor_is_not_scored_again() -> None:
    flow = Straight(counter_normal((4, 1), "clean"))
    calls: list[int] = []

    def score(found: Tensor, rows: Tensor) -> Tensor:
        calls.append(len(rows))
        return torch.where(rows == 3, NAN, rows.float())

    done = search(flow.velocity_of, counter_normal((1, 4, 1), "x"), SCHEDULE, pruning(4, [0], 0.25), score)
    assert calls == [4]
    assert done.chosen.tolist() == [2]  # number 3 failed
    assert torch.isnan(done.scores[1]).all()
    assert bool(torch.isnan(done.scores[0, 0, 3]))


def test_start_noise_is_scaled_to_the_first_state() -> None:
    """Of a velocity of 0 the first state is the last one."""
    x = counter_normal((2, 3, 1, 1), "start")
    scaled = replace(SCHEDULE, start_scale=4.0)
    done = search(
        lambda rows: lambda x, sigma, timestep: torch.zeros_like(x), x, scaled, pruning(3, [2]),
        lambda clean, rows: clean[:, 0, 0],
    )  # fmt: skip
    assert torch.equal(done.final, 4 * x.amax(1))


def test_a_search_refuses_what_does_not_fit() -> None:
    flow = Straight(torch.zeros(4, 1))
    x = torch.zeros(1, 4, 1)
    with pytest.raises(ValueError, match="plan is for 3"):
        search(flow.velocity_of, x, SCHEDULE, Pruning(num_candidates=3), lambda clean, rows: clean[:, 0])
    with pytest.raises(ValueError, match="latest is 4"):
        search(flow.velocity_of, x, SCHEDULE, pruning(4, [5]), lambda clean, rows: clean[:, 0])
    with pytest.raises(ValueError, match=r"one number per candidate \[4\]"):
        search(flow.velocity_of, x, SCHEDULE, pruning(4, [1]), lambda clean, rows: clean)


# ---- with a pipeline and a reward ------------------------------------------------------------------------------------

PROMPTS = [Prompt(text=text, metadata={"tag": text[:1]}) for text in ("a red circle", "two squares", "a star")]


class Counted(Toy):
    """Counts the rows that the network sees, and the images that are decoded."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = self.decoded = 0

    def network(self, x: Tensor, timestep: Tensor, cond: Conditioning) -> Tensor:
        self.rows += len(x)
        return super().network(x, timestep, cond)

    def decode(self, latents: Tensor, *, gradient: bool = False) -> Tensor:
        self.decoded += len(latents)
        return super().decode(latents, gradient=gradient)

    def make(self, prompts: Sequence[Prompt]) -> Velocity:
        pipeline: Any = self
        return guided(pipeline, self.network, encode_prompts(pipeline, prompts), 3.0)


class Sourced(Counted):
    """Reads source images, by their brightness."""

    num_sources = (1, 1)

    def encode(self, prompts: Sequence[str], sources: Any = None) -> Conditioning:
        shades = torch.stack([row[0].mean() for row in sources])
        return Conditioning({"text": super().encode(prompts).tensors["text"] + shades[:, None]})


def bright(inputs: RewardInputs) -> RewardOutput:
    """Brightness, and darkness as a part; groups and samples must number the candidates."""
    assert len(set(zip(inputs.group_ids.tolist(), inputs.sample_ids.tolist(), strict=True))) == len(inputs)
    assert [PROMPTS[group].text for group in inputs.group_ids.tolist()] == inputs.prompts
    values = inputs.images.mean((1, 2, 3))
    failed = torch.tensor([prompt == "a star" for prompt in inputs.prompts]) & (inputs.sample_ids != 1)
    valid = ~failed
    return RewardOutput(values=torch.where(valid, values, NAN), valid=valid, parts={"dark": -values})


REWARD = FunctionReward(name="bright", score=bright, needs=frozenset({"images"}), version="1")


def noise(count: int) -> Tensor:
    return counter_normal((3, 4, *Toy.latent_shape), "noise")[:, :count]


def best_of_n(
    pipeline: Any, make: Any, prompts: Any, x: Tensor, schedule: Any, reward: Any, *, part: str | None = None
) -> KeptImages:
    """Best of N is pruning without cuts."""
    return prune_steps(pipeline, make, prompts, x, schedule, reward, Pruning(num_candidates=x.shape[1]), part=part)


def test_best_of_n_takes_the_brightest_and_costs_n_times_as_much() -> None:
    pipeline: Any = Counted()
    found = best_of_n(pipeline, pipeline.make, PROMPTS, noise(4), SCHEDULE, REWARD)
    assert pipeline.rows == 3 * 2 * found.evaluations == 3 * 2 * 4 * 6  # two rows a step with guidance
    assert pipeline.decoded == 3 * found.looks + 3 == 15
    for p, prompt in enumerate(PROMPTS):
        images = generate(pipeline, [prompt.text] * 4, noise(4)[p], SCHEDULE, guidance_scale=3.0)
        value = images.mean((1, 2, 3))
        wanted = 1 if prompt.text == "a star" else int(value.argmax())  # all but number 1 fail
        assert int(found.chosen[p]) == wanted
        assert torch.allclose(found.images[p], images[wanted], atol=1e-6)
        if prompt.text != "a star":
            assert torch.allclose(found.scores[0, p].float(), value, atol=1e-6)
    assert torch.isnan(found.scores[0, 2]).tolist() == [True, False, True, True]


def test_best_of_one_is_plain_sampling() -> None:
    pipeline: Any = Counted()
    found = best_of_n(pipeline, pipeline.make, PROMPTS, noise(1), SCHEDULE, REWARD)
    plain = generate(pipeline, [p.text for p in PROMPTS], noise(1)[:, 0], SCHEDULE, guidance_scale=3.0)
    assert torch.equal(found.images, plain)
    assert found.looks == 0
    assert found.evaluations == 6


def test_the_first_candidates_of_many_are_those_of_few() -> None:
    pipeline: Any = Counted()
    pool = candidates(pipeline, pipeline.make, PROMPTS, noise(4), SCHEDULE, REWARD)
    for count in (1, 2, 3, 4):
        found = best_of_n(pipeline, pipeline.make, PROMPTS, noise(count), SCHEDULE, REWARD)
        assert pool.best(count).tolist() == found.chosen.tolist()
        assert torch.allclose(pool.images[torch.arange(3), found.chosen], found.images, atol=1e-6)


def test_pruning_costs_what_its_plan_says() -> None:
    pipeline: Any = Counted()
    plan = pruning(4, [1, 3])
    found = prune_steps(pipeline, pipeline.make, PROMPTS, noise(4), SCHEDULE, REWARD, plan)
    assert pipeline.rows == 3 * 2 * found.evaluations == 3 * 2 * (4 * 2 + 2 * 2 + 1 * 2)
    assert found.looks == 4 + 2
    assert pipeline.decoded == 3 * found.looks + 3  # and those that are kept
    assert found.chosen[2] == 1  # whose other candidates fail at every look
    assert found.scores.shape == (3, 3, 4)


def test_a_sub_score_can_choose() -> None:
    pipeline: Any = Counted()
    light = best_of_n(pipeline, pipeline.make, PROMPTS[:2], noise(4)[:2], SCHEDULE, REWARD)
    dark = best_of_n(pipeline, pipeline.make, PROMPTS[:2], noise(4)[:2], SCHEDULE, REWARD, part="dark")
    assert torch.allclose(light.scores, -dark.scores)
    assert bool((light.images.mean((1, 2, 3)) > dark.images.mean((1, 2, 3))).all())


def test_small_batches_give_the_same_images() -> None:
    pipeline: Any = Counted()
    whole = prune_steps(pipeline, pipeline.make, PROMPTS, noise(4), SCHEDULE, REWARD, pruning(4, [2]))
    parts = prune_steps(
        pipeline, in_batches(pipeline.make, 5), PROMPTS, noise(4), SCHEDULE, REWARD, pruning(4, [2])
    )  # fmt: skip
    assert parts.chosen.tolist() == whole.chosen.tolist()
    assert torch.allclose(parts.images, whole.images, atol=1e-6)


def test_prompts_keep_what_they_carry(tmp_path: Path) -> None:
    """Negative prompts reach the velocity; of one text, each prompt is drawn and judged with its own image."""
    rows = []
    for shade, name in ((0.25, "dark"), (0.75, "light")):
        save_png(torch.full((3, 2, 2), shade), tmp_path / f"{name}.png")
        rows.append(Prompt(text="paint it", metadata={}, negative=name, sources=(str(tmp_path / f"{name}.png"),)))
    pipeline: Any = Sourced()

    def near(inputs: RewardInputs) -> RewardOutput:
        assert inputs.source_images is not None
        shades = torch.stack([row[0].mean() for row in inputs.source_images])
        assert torch.allclose(shades, torch.where(inputs.group_ids == 0, 0.25, 0.75), atol=0.01)
        values = -(inputs.images.mean((1, 2, 3)) - shades).abs()
        return RewardOutput(values=values, valid=torch.ones(len(inputs), dtype=torch.bool))

    reward = FunctionReward(name="near", score=near, needs=frozenset({"source_images"}), version="1")
    x = noise(4)[:2]
    plain = best_of_n(pipeline, pipeline.make, rows, x, SCHEDULE, reward)
    for p, row in enumerate(rows):
        images = generate(pipeline, [row] * 4, x[p], SCHEDULE, guidance_scale=3.0)
        assert torch.allclose(plain.images[p], images[plain.chosen[p]], atol=1e-6)
    bare = best_of_n(pipeline, pipeline.make, [replace(row, negative="") for row in rows], x, SCHEDULE, reward)
    assert not torch.allclose(bare.scores, plain.scores, atol=1e-4)


def test_unknown_parts_and_other_shapes_are_refused() -> None:
    pipeline: Any = Counted()
    with pytest.raises(ValueError, match=r"no sub-score 'pale': there are dark"):
        best_of_n(pipeline, pipeline.make, PROMPTS, noise(2), SCHEDULE, REWARD, part="pale")
    with pytest.raises(ValueError, match="of 2 prompts"):
        best_of_n(pipeline, pipeline.make, PROMPTS[:2], noise(2), SCHEDULE, REWARD)
