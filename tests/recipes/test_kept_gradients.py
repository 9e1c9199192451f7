"""What the gradients of an iteration's images take, on the embedded model, beside what a plan counts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from toy_pipeline import quick_run, reward_list, write_toy

from flowrl.config.base import find_config
from flowrl.config.train import load_config
from flowrl.planning.gather import gather
from flowrl.planning.memory import Memory, pinned
from flowrl.planning.throughput import Pace
from flowrl.planning.traces import Trace
from flowrl.recipes import grpo
from flowrl.training import paths
from flowrl.training.kept_graphs import KeptGradients
from flowrl.training.learner import GradientSum
from flowrl.training.parts import model_family
from flowrl.trajectory import Sampled

GRADIENTS = "keep_graphs=gradients"
PACE = Pace(range=None, told="", processor="CPU")


@pytest.mark.slow
@pytest.mark.usefixtures("numbers_alone")
def test_what_is_kept_of_images_is_what_the_plan_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One transition's graph of one batch is there at once, and what waits for the rewards."""
    write_toy(tmp_path)  # for its rewards
    peaks, kept = list[int](), list[int]()
    sample, add_to = paths.sample_paths, KeptGradients.add_to

    def traced(*given: Any) -> Sampled:
        with Trace() as trace:
            found = sample(*given)
        peaks.append(trace.peak)
        return found

    def counted(self: KeptGradients, gradient: GradientSum) -> None:
        kept.append(sum(total.nbytes for totals in self._sums.values() for total in totals))
        add_to(self, gradient)

    monkeypatch.setattr(grpo, "sample_paths", traced)
    monkeypatch.setattr(KeptGradients, "add_to", counted)
    sizes = (
        "group_size=4",
        "micro_batch_size=4",
        "rollout_batch_size=4",
        "num_iterations=1",
        "eval_every=0",
        "threads=1",
        "progress=false",
        reward_list(tmp_path, "redness"),
        "prompts_per_step=1",
        "sampler.num_steps=4",
        "sampler.sde_window_range=[1,3]",
        "policy.target_modules=[to_q,to_v]",
        f"prompts.train={tmp_path / 'prompts.txt'}",
    )
    plans = list[Memory]()
    for more in "kl_coef=0 prompts_per_step=2 sampler.sde_window_range=[2,3] credit.method=tp_grpo kl_coef=0.1".split():
        config = load_config(find_config("tiny_grpo_geneval"), [*sizes, GRADIENTS, more])
        quick_run(config, tmp_path)
        plan = gather(config, "tiny", model_family(config.pipeline), processes=1, pace=PACE)
        assert plan.memory is not None
        plans.append(plan.memory)
    each = kept[0] // 4
    assert kept == [4 * each, 8 * each, 4 * each, 2 * 4 * each, 2 * 4 * each]  # images, steps, two terms
    for found, memory in zip(kept, plans, strict=True):
        assert memory.host["gradients of its images"] == found // (4 * each) * pinned(4 * each)
    assert [memory.gradients for memory in plans] == [4 * each] * 4 + [8 * each]
    plain, twice, one_step, by_step, with_kl = (peak - own for peak, own in zip(peaks, kept, strict=True))
    for other in (twice, one_step, with_kl):
        assert other == pytest.approx(plain, rel=0.1)
    assert plain < by_step < 1.5 * plain  # it draws completions too
    assert all(peak < one.configured + one.update + own for peak, one, own in zip(peaks, plans, kept, strict=True))
    whole = load_config(find_config("tiny_grpo_geneval"), [*sizes, "keep_graphs=true"])
    quick_run(whole, tmp_path)
    assert peaks[-1] > 2 * peaks[0]  # and more so, the more images there are
