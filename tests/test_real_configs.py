"""The configurations for Stable Diffusion 3.5 Medium: they load, fit the network, and divide, without any weights."""

from __future__ import annotations

import pytest
import torch

from flowrl.config.base import find_config
from flowrl.config.train import ConfigError, TrainConfig, load_config, resolve_path
from flowrl.pipelines.families.sd3 import FAMILY
from flowrl.pipelines.weights.lora import Policy, check_targets
from flowrl.prompts.loading import read_prompts
from flowrl.rewards.base.specs import validate_reward_specs

GENEVAL, CLIP = "sd35m_grpo_geneval", "sd35m_grpo_clip_24gb"
SD35M = "stabilityai/stable-diffusion-3.5-medium"


def config_of(name: str) -> TrainConfig:
    return load_config(find_config(name))


@pytest.mark.parametrize("name", [GENEVAL, CLIP])
def test_rewards_and_network_are_checked_without_weights(name: str) -> None:
    config = config_of(name)
    assert config.pipeline.model == SD35M
    validate_reward_specs(config.rewards)
    FAMILY.check(config.pipeline.model, config.policy.target_modules or FAMILY.lora_targets)
    assert config.micro_batch_size == config.rollout_batch_size, "else every transition is scored once more"


@pytest.mark.parametrize(("num_processes", "images", "micro_batches"), [(1, 1152, 48), (8, 144, 6), (24, 48, 2)])
def test_published_batch_divides(num_processes: int, images: int, micro_batches: int) -> None:
    geometry = config_of(GENEVAL).resolve_batch(num_processes)
    assert (geometry.images_per_process, geometry.micro_batches_per_update) == (images, micro_batches)


def test_published_batch_divides_on_the_published_32_processes_with_the_published_sizes() -> None:
    overrides = ["rollout_batch_size=9", "micro_batch_size=9"]
    geometry = load_config(find_config(GENEVAL), overrides).resolve_batch(32)
    assert (geometry.images_per_process, geometry.micro_batches_per_update) == (36, 2)


def test_small_batch_is_for_one_card_and_says_so_where_it_does_not_divide() -> None:
    config = config_of(CLIP)
    assert config.resolve_batch(1).micro_batches_per_update == 16
    assert config.resolve_batch(8).micro_batches_per_update == 2
    with pytest.raises(ConfigError, match="128 images do not divide by 24 processes"):
        config.resolve_batch(24)


def test_trained_steps_are_the_published_ones() -> None:
    geneval, clip = config_of(GENEVAL).sampler, config_of(CLIP).sampler
    assert (geneval.kernel, geneval.stochastic_range, geneval.sde_window_size) == ("flow_sde", (0, 9), 0)
    assert (clip.kernel, clip.stochastic_range, clip.sde_window_size) == ("cps", (0, 5), 3)


@pytest.mark.slow
def test_lora_on_the_real_network_without_weights() -> None:
    """2.243 billion frozen numbers; r (in + out) numbers a layer: 8 layers in 24 blocks, of which the last has 7."""
    config = config_of(GENEVAL)
    network = FAMILY.meta_denoiser(SD35M)
    assert network is not None
    assert sum(parameter.numel() for parameter in network.parameters()) == 2_243_171_520
    check_targets(network, FAMILY.lora_targets)
    settings = config.policy
    policy = Policy(network, rank=settings.rank, alpha=settings.alpha, targets=FAMILY.lora_targets, seed=config.seed)
    assert sum(p.numel() for p in policy.parameters.values()) == (8 * 24 - 1) * 32 * (1536 + 1536) == 18_776_064
    assert {p.device.type for p in policy.parameters.values()} == {"meta"}
    assert {p.dtype for p in policy.parameters.values()} == {torch.float32}
    bound = {name.split(".", 2)[2].split(".lora_")[0] for name in policy.parameters}
    assert bound == set(FAMILY.lora_targets), "every target, and not the second attention of the first 13 blocks"
    assert sum(p.numel() for p in network.parameters() if p.requires_grad) == 18_776_064


def test_a_target_that_binds_nowhere_is_refused_before_anything_is_fetched() -> None:
    with pytest.raises(ValueError, match=r"LoRA target 'attn\.to_w' matches no linear layer"):
        FAMILY.check(SD35M, ["attn.to_w"])


def test_everyday_prompts_are_distinct_and_held_out() -> None:
    prompts = config_of(CLIP).prompts
    assert prompts.eval is not None
    train, held_out = ([p.text for p in read_prompts(resolve_path(file))] for file in (prompts.train, prompts.eval))
    assert (len(train), len(held_out)) == (96, 32)
    assert len({*train, *held_out}) == 128
