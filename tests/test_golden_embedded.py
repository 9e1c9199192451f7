"""The embedded models give, in two small iterations, the numbers that are recorded for them (`golden_runs.py`)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from golden_runs import compare, leftovers, reproducible

from flowrl.cli import main
from flowrl.config.base import find_config

SMALL = (
    "num_iterations=2", "prompts_per_step=2", "group_size=4", "threads=1", "checkpoint_every=2", "progress=false",
    "policy.lora_rank=2", "logging.tensorboard=false", "eval_every=0",
)  # fmt: skip
EVALUATED = ("eval_every=2", "eval.num_prompts=6", "eval.num_steps=4", "eval.samples_per_prompt=1", "eval.num_images=0")
SHORT = ("sampler.num_steps=4", "sampler.sde_window_range=[1, 3]")
CASES: dict[str, tuple[str, tuple[str, ...]]] = {  # configuration, overrides
    "sd3-grpo": ("tiny_grpo_geneval", (*EVALUATED, *SHORT, "updates_per_rollout=2", "kl_coef=0.01")),
    "sd3-tree": ("tiny_tree_grpo", ("group_size=9", "sampler.num_steps=4")),
    "sd3-dense": ("tiny_dense_grpo", (*SHORT, "credit.completion=1")),
    "sd3-nft": ("tiny_nft", ("times.count=3",)),
    "sd3-dpo": ("tiny_dpo", ("objective.options.ref_update_every=1",)),
    "sd3-draft": ("tiny_draft", ("sampler.num_steps=4",)),
    "sd15-grpo": ("tiny_sd15_grpo", (*EVALUATED, *SHORT)),
    "kontext-grpo": ("tiny_kontext_grpo", (*EVALUATED, *SHORT)),
    "wan-grpo": ("tiny_wan_grpo", (*EVALUATED, *SHORT, "prompts_per_step=1", "eval.num_prompts=3")),
}


pytestmark = pytest.mark.usefixtures("numbers_alone")


@pytest.fixture(autouse=True)
def _reproducible() -> Iterator[None]:
    with reproducible():
        yield


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_run_gives_the_recorded_numbers(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    config, overrides = CASES[name]
    assert main(["train", str(find_config(config)), f"out={tmp_path / 'run'}", *SMALL, *overrides]) == 0
    assert f" {'clips' if 'wan' in name else 'images'}, on the CPU" in capsys.readouterr().out
    compare("embedded", name, tmp_path / "run")


def test_every_record_belongs_to_a_case() -> None:
    assert leftovers("embedded", list(CASES)) == []
