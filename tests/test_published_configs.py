"""Every configuration passes its recipe's check without a model; those of papers have their settings."""

from __future__ import annotations

import importlib
import re
from dataclasses import replace
from functools import cache

import pytest
from config_files import as_launched

from flowrl.config.base import config_files, find_config
from flowrl.config.train import ConfigError, TrainConfig, load_config
from flowrl.credit import CREDIT
from flowrl.objectives.forward_losses import FORWARD
from flowrl.objectives.policy_gradient import OBJECTIVES
from flowrl.pipelines.shared.saved_model import check_full
from flowrl.recipes.forward_settings import micro_batch_size
from flowrl.rewards.base.specs import validate_reward_specs
from flowrl.samplers.times import steps_in_reach, strata
from flowrl.samplers.windows import flash_tail
from flowrl.training.parts import model_family
from flowrl.training.paths import stochastic_steps
from flowrl.training.processes.mesh import layout_of

EVERY = sorted(config_files())
REAL = [name for name in EVERY if name.startswith("sd35m_")]
SOURCED = [name for name in EVERY if not name.startswith("tiny_")]
PRESETS = [name for name in EVERY if re.search(r"_\d+gb$", name) and name != "sd35m_grpo_clip_24gb"]
"""Other settings for cards of a size: everything else is their base's."""
RUNS = [name for name in SOURCED if name not in PRESETS]
NEEDS_A_FILE = {"tiny_dpo_offline": "there is no 'pairs'", "tiny_sft": "there is no 'scenes'"}
NEEDS_REFERENCES = {
    "sd35m_adv_grpo": "references.json",
    "sd35m_adv_grpo_style": "data/style",
    "sd35m_autorubric": "there is no rubric 'rubric.json'",
}


@cache
def config_of(name: str) -> TrainConfig:
    return load_config(find_config(name))


@pytest.mark.parametrize("name", EVERY)
def test_configuration_passes_its_check_without_a_model(name: str) -> None:
    config = config_of(name)
    if name in NEEDS_REFERENCES:
        with pytest.raises(ValueError, match=NEEDS_REFERENCES[name]):
            validate_reward_specs(config.rewards)
    elif config.rewards:
        validate_reward_specs(config.rewards)
    if config.eval.rewards:
        validate_reward_specs(config.eval.rewards)
    recipe = importlib.import_module(f"flowrl.recipes.{config.recipe}")
    if name in NEEDS_A_FILE:
        with pytest.raises(ConfigError, match=NEEDS_A_FILE[name]):
            recipe.check(config)
    else:
        recipe.check(config)


# ---- settings --------------------------------------------------------------------------------------------------------

# Published number of GPUs, and the batch size that the head names for it where the default does not divide.
PUBLISHED = {
    "sd35m_flow_grpo_fast": (32, 9),
    "sd35m_dance_grpo": (32, 3),
    "sd35m_mixgrpo": (24, 6),
    "sd35m_mixgrpo_flash": (32, 3),
    "sd35m_tp_grpo": (32, 9),
    "sd35m_dense_grpo": (16, 9),
    "sd35m_g2rpo": (16, None),
    "sd35m_tempflow": (8, None),
    "sd35m_branch_grpo": (8, None),
    "sd35m_tree_grpo": (8, None),
    "sd35m_grpo_guard": (16, 9),
    "sd35m_flow_dppo": (8, None),
    "sd35m_nft": (8, 9),
    "sd35m_awm": (8, None),
    "sd35m_dgpo": (4, None),
    "sd35m_crd": (8, None),
    "sd35m_rft": (8, None),
    "sd35m_dpo": (8, None),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_batch_divides_over_the_published_processes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    processes, batch = PUBLISHED[name]
    overrides = [] if batch is None else [f"rollout_batch_size={batch}", f"micro_batch_size={batch}"]
    config = load_config(find_config(name), overrides)
    geometry = config.resolve_batch(processes)
    assert geometry.images_per_process * processes == config.prompts_per_step * config.group_size
    as_launched(monkeypatch, processes)
    importlib.import_module(f"flowrl.recipes.{config.recipe}").check(config)


@pytest.mark.parametrize("name", REAL)
def test_real_configurations_share_model_judge_and_resolution(name: str) -> None:
    config = config_of(name)
    assert config.pipeline.model == "stabilityai/stable-diffusion-3.5-medium"
    assert (config.pipeline.height, config.pipeline.width) == (512, 512)
    judges = [reward.options.get("judge") for reward in config.rewards if reward.name == "geneval"]
    assert judges in ([], ["mask2former"])
    if config.recipe == "grpo":
        assert config.rollout_batch_size == config.micro_batch_size, "else every transition is scored once more"


def test_every_method_has_a_published_configuration() -> None:
    configs = [config_of(name) for name in REAL]
    assert {config.credit.method for config in configs} == set(CREDIT) - {"self_opd"}  # whose settings were not read
    of_grpo = {config.objective.name or "clip" for config in configs if config.recipe == "grpo"}
    assert of_grpo == set(OBJECTIVES) - {"reinforce"}
    assert {config.objective.name for config in configs if config.recipe == "forward"} == set(FORWARD) - {"rwr", "sft"}
    assert {"gdpo", "log_tame"} < {config.reward_aggregation for config in configs}


@pytest.mark.parametrize(
    ("name", "images", "an_update"),
    [
        ("sd35m_dance_grpo", 384, 96),
        ("sd35m_dense_grpo", 1152, 1152),
        ("sd35m_branch_grpo", 256, 128),
        ("sd35m_tree_grpo", 864, 864),
        ("sd35m_flow_dppo", 768, 384),
        ("sd35m_paco", 672, 336),
        ("sd35m_nft", 1152, 1152),
        ("sd35m_awm", 1728, 1728),
        ("sd35m_dgpo", 128, 128),
        ("sd35m_crd", 1152, 576),
    ],
)
def test_images_of_an_iteration_and_of_an_update(name: str, images: int, an_update: int) -> None:
    config = config_of(name)
    assert (config.num_images, config.num_images // config.updates_per_rollout) == (images, an_update)


@pytest.mark.parametrize(
    ("name", "steps", "total"),
    [
        ("sd35m_dance_grpo", range(24), 25),
        ("sd35m_tp_grpo", range(9), 10),
        ("sd35m_g2rpo", range(8), 16),
        ("sd35m_tempflow", range(9), 10),
        ("sd35m_branch_grpo", range(19), 20),
        ("sd35m_paco", [1], 10),
    ],
)
def test_stochastic_steps_are_the_published_ones(name: str, steps: range, total: int) -> None:
    sampler = config_of(name).sampler
    assert sampler.num_steps == total
    assert stochastic_steps(sampler, 0, 0) == tuple(steps)


def test_dance_grpo_trains_fourteen_of_twenty_five_steps() -> None:
    sampler = config_of("sd35m_dance_grpo").sampler
    assert int(len(stochastic_steps(sampler, 0, 0)) * sampler.trained_fraction) == 14


def test_mixgrpo_goes_once_round_and_flash_takes_eleven_steps_at_first() -> None:
    config = config_of("sd35m_mixgrpo")
    windows = [stochastic_steps(config.sampler, 0, iteration) for iteration in range(config.num_iterations + 1)]
    assert (windows[0], windows[149], windows[150]) == ((0, 1, 2, 3), (0, 1, 2, 3), (1, 2, 3, 4))
    assert (windows[-2], windows[-1]) == ((5, 6, 7, 8), (0, 1, 2, 3))
    flash = config_of("sd35m_mixgrpo_flash").sampler
    window = stochastic_steps(flash, 0, 0)
    assert window == (0, 1, 2, 3)
    assert flash_tail(flash.num_steps, max(window), flash.flash_tail or 1.0, shift=3.0).num_steps == 11
    assert stochastic_steps(flash, 0, 20) == (1, 2, 3, 4)


def test_noise_levels_of_forward_methods_are_the_published_ones() -> None:
    awm, dgpo, nft = (config_of(f"sd35m_{name}") for name in ("awm", "dgpo", "nft"))
    assert nft.times.count == int(0.99 * nft.sampler.num_steps) == 9
    assert steps_in_reach("schedule", nft.sampler.num_steps, nft.times.fraction) == 10
    reach = steps_in_reach(awm.times.kind, awm.sampler.num_steps, awm.times.fraction)
    assert [list(r) for r in strata("discrete_wo_init", reach, awm.times.count)] == [
        [1], [2, 3], [4, 5], [6, 7], [8, 9], [10, 11],
    ]  # fmt: skip
    # random.sample(range(5), 4): of the five noisiest steps four different ones, none more often than another
    assert (dgpo.times.kind, dgpo.times.count) == ("schedule", 4)
    assert steps_in_reach("schedule", dgpo.sampler.num_steps, dgpo.times.fraction) == 5
    assert (micro_batch_size(dgpo, 4), micro_batch_size(config_of("sd35m_crd"), 8)) == (16, 24)


def test_dgpo_has_the_released_gate_and_clip() -> None:
    """config/dgpo.py: beta_dpo 100, clip_range 1e-2; velocities without guidance."""
    assert config_of("sd35m_dgpo").objective.options == {"beta": 100.0, "clip": 1.0e-2, "guidance_scale": 1.0}


def test_flow_cps_runs_take_the_released_log_probability() -> None:
    """sde_type "cps": every configuration that its code publishes, and no other."""
    published = {name for name in RUNS if config_of(name).sampler.log_prob == "published"}
    assert published == {
        "sd35m_flow_grpo_fast",
        "flux_flow_grpo_fast",
        "sd35m_tp_grpo",
        "sd35m_votes",
        "sd35m_grpo_clip_24gb",
        "sd35m_adv_grpo",
        "sd35m_adv_grpo_style",
        "sd35m_rtdmd",
    }
    assert published == {name for name in RUNS if config_of(name).sampler.kernel == "cps"}


def test_the_text_reward_keeps_all_that_is_read_as_released() -> None:
    """flow_grpo/ocr.py: `res[1][0] if res[1][1] > 0`."""
    assert [reward.options for reward in config_of("sd35m_grpo_ocr").rewards] == [{"min_confidence": 0.0}]


def test_adv_grpo_is_the_released_one() -> None:
    """config/grpo.py dino_cotrain_sd3_patch_fast: random_timestep 0, two steps, halves of a group from one noise."""
    config = config_of("sd35m_adv_grpo")
    assert stochastic_steps(config.sampler, 0, 0) == stochastic_steps(config.sampler, 0, 7) == (0, 1)
    assert (config.group_size, config.images_per_start) == (16, 8)
    assert (config.sampler.noise_level, config.clip_range, config.kl_coef) == (0.8, 1e-5, 0.0)
    assert config.rewards[0].options["published"] is True


def test_the_mean_is_over_all_rows_where_the_code_keeps_groups_of_equal_rewards() -> None:
    """Flow-GRPO's scripts for SD3, Kontext and Wan, TP-GRPO's and TempFlow's drop them; the others keep them at 0."""
    every = {name for name in RUNS if config_of(name).loss_denominator == "all"}
    assert every == {
        "chroma_grpo_pickscore", "flux2_klein_base_grpo", "flux2_klein_grpo", "flux_branch_grpo_full",
        "flux_dance_grpo_full", "flux_flow_grpo_fast", "flux_g2rpo_full", "flux_grpo_pickscore", "flux_paco_t2is",
        "flux_pref_grpo", "flux_pref_grpo_flex", "hunyuan_image_grpo", "hunyuan_image_distilled_grpo",
        "hunyuan_video_dance_grpo", "hunyuan_video_dance_grpo_full",
        "krea2_grpo", "qwen_image_21_grpo", "qwen_image_dance_grpo_full", "wan22_t2v_grpo_full",
        "qwen_image_edit_grpo", "qwen_image_edit_r1", "qwen_image_grpo_pickscore", "sd14_dance_grpo",
        "sd15_ddpo_aesthetic", "sd15_ddpo_compressibility", "sd35m_branch_grpo", "sd35m_dance_grpo",
        "sd35m_flow_dppo", "sd35m_g2rpo", "sd35m_mixgrpo", "sd35m_mixgrpo_flash", "sd35m_paco", "sd35m_rft",
        "sdxl_ddpo_pickscore", "wan22_i2v_grpo", "wan_i2v_dance_grpo", "wan_t2v_dance_grpo", "z_image_grpo",
        "z_image_turbo_grpo",
    }  # fmt: skip


def test_branch_grpo_has_the_released_bound_of_a_dead_depth() -> None:
    """train_branchgrpo_flux.py: a depth whose sample std is below 1e-6 gets 0, and 1e-8 is added to the others'."""
    config = config_of("sd35m_branch_grpo")
    assert (config.adv_min_std, config.adv_eps, config.adv_correction) == (1e-6, 1e-8, 1)
    assert {name for name in SOURCED if config_of(name).adv_min_std} == {"flux_branch_grpo_full", "sd35m_branch_grpo"}


def test_runs_of_all_weights_have_the_released_learning_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    """--learning_rate and --weight_decay of the scripts; a network in bfloat16 under masters in float32."""
    full = {name: config_of(name) for name in SOURCED if config_of(name).policy.train == "full"}
    found = {name: (config.optim.lr, config.optim.weight_decay, config.pipeline.dtype) for name, config in full.items()}
    assert found == {
        "flux_branch_grpo_full": (1e-5, 1e-4, "bfloat16"), "flux_dance_grpo_full": (1e-5, 1e-4, "bfloat16"),
        "flux_g2rpo_full": (2e-6, 1e-4, "bfloat16"), "hunyuan_video_dance_grpo_full": (1e-5, 1e-4, "bfloat16"),
        "qwen_image_dance_grpo_full": (1e-5, 1e-4, "bfloat16"), "wan22_t2v_grpo_full": (1e-4, 1e-4, "bfloat16"),
    }  # fmt: skip
    for config in full.values():
        assert (config.policy.lora_rank, config.policy.lora_alpha, config.policy.target_modules) == (None, None, None)
        check_full(config, model_family(config.pipeline), config.pipeline.model)
        for processes in (8, 16):
            updates = 1 if (config.credit.method, processes) == ("branch_grpo", 16) else config.updates_per_rollout
            again = replace(config, updates_per_rollout=updates)
            as_launched(monkeypatch, processes)
            importlib.import_module(f"flowrl.recipes.{config.recipe}").check(again)
            images = again.resolve_batch(processes).images_per_process
            assert images * processes == config.num_images
            assert layout_of(config.parallel, processes).replicate == processes // 8


def test_whole_systems_have_what_is_published_of_them() -> None:
    """As far as it is known: each head says what was not read."""
    pref, rewards = config_of("flux_pref_grpo"), config_of("flux_pref_grpo").rewards
    assert (pref.group_size, pref.reward_aggregation, [reward.weight for reward in rewards]) == (8, "each", [0.7, 0.3])
    assert (rewards[0].options["orders"], rewards[0].options["comparator"]["unparsed"]) == ("single", "tie")
    flex = config_of("flux_pref_grpo_flex").rewards
    assert [(reward.name, reward.weight) for reward in flex] == [("win_rate", 0.7), ("clip_score", 0.3)]
    assert (flex[0].options["categories"], flex[0].options["comparator"]["style"]) == (0.7, "categories")
    for name in ("kontext_edit_r1", "qwen_image_edit_r1"):
        edit = config_of(name)
        assert (edit.rewards[0].name, edit.group_size, edit.kl_coef) == ("edit_principles", 24, 0.04)
    digits = config_of("kontext_uniworld_nft")
    assert (digits.rewards[0].name, digits.prompts_per_step, digits.group_size) == ("edit_score", 24, 12)
    assert (digits.objective.name, digits.sampler.num_steps, digits.times.count, digits.kl_coef) == ("nft", 6, 5, 1e-4)
    mind = config_of("wan_mind_v")
    assert [(reward.name, reward.weight) for reward in mind.rewards] == [("physics", 0.2), ("unified_reward", 1.0)]
    assert mind.rewards[0].options["model"] == "facebook/vjepa2-vitg-fpc64-256"
    clips = config_of("wan_i2v_dance_grpo")
    assert (clips.pipeline.height, clips.pipeline.width, clips.pipeline.num_frames) == (400, 640, 53)
    assert (clips.sampler.num_steps, clips.sampler.shift, clips.sampler.noise_level) == (16, 7.0, 0.3)
    assert clips.rewards[0].options == {"dimensions": ["MQ"]}
    style, plain = config_of("sd35m_adv_grpo_style"), config_of("sd35m_adv_grpo")
    assert style.rewards[0].options == {**plain.rewards[0].options, "references": "data/style"}


# ---- where kernel and ratio are in the published code ----------------------------------------------------------------

UNNAMED = {
    "cogvideox_grpo",
    "hunyuan_video15_grpo",
    "hunyuan_video_art",
    "hunyuan_video15_i2v",
    "ltx2_grpo_sound",
    "ltx2_i2v",
    "ltx_video_grpo",
    "sana_video_grpo",
    "sd35m_dense_grpo",
    "sd35m_g2rpo",
    "sd35m_opd",
    "sd35m_rft",
    "sd35m_rvm",
    "sd35m_tempflow",
    "sd35m_tree_grpo",
}
"""Presets that name no function of published code: all of it ours, a method without code at hand, or not looked up."""

SAMPLED_BY = {
    "sd3_sde_with_logprob.py sde_step_with_logprob": {"flow_sde", "cps"},
    "sd3_sde_with_logprob.py sde_step_with_logprob_new": {"cps"},
    "wan_pipeline_with_logprob.py sde_step_with_logprob": {"wan_sde"},
    "wan2_1_pipeline_with_logprob2.py sde_step_with_logprob": {"wan_sde"},
    "sde_with_logprob.py sde_step_with_logprob": {"cps"},
    "sde_denoising_step.py denoising_sde_step_with_logprob": {"flow_sde", "cps"},
    "flow_match_euler_discrete.py FlowMatchEulerDiscreteSDEScheduler.step": {"flow_sde", "cps", "dance_sde"},
    "unipc_multistep.py UniPCMultistepSDEScheduler.step": {"flow_sde", "cps", "dance_sde"},
    "kernels.py FlowSDEStrategy.step": {"flow_sde"},
    "sampling_utils.py flow_grpo_step": {"flow_sde"},
    "train_g2rpo_hps.py flow_grpo_step": {"flow_sde"},
    "train_grpo_flux.py flux_step": {"dance_sde"},
    "train_grpo_hunyuan.py flux_step": {"dance_sde"},
    "train_grpo_qwenimage.py flux_step": {"dance_sde"},
    "train_grpo_wan_2_1.py flux_step": {"dance_sde"},
    "train_branchgrpo_flux.py flux_step_with_split": {"dance_sde"},
    "ddim_with_logprob.py ddim_step_with_logprob": {"ddim_flow"},
    "solver.py dpm_step": {"ode"},
}
"""Function of published code, without its folders -> the kernels that it is (docs/research/trials.md)."""


def sources_of(name: str) -> dict[str, str]:
    """`FILE FUNCTION` of a configuration's own step and loss, from its comments."""
    text = find_config(name).read_text()
    return dict(re.findall(r"^# (kernel, steps|clip range, ratio|loss): (.+)$", text, re.MULTILINE))


def test_a_preset_names_the_function_behind_its_kernel_and_its_ratio() -> None:
    """`# kernel, steps: FILE FUNCTION` where it samples as that code does, `# clip range, ratio:` or `# loss:`."""
    named = {name: sources_of(name) for name in SOURCED}
    assert {name for name, sources in named.items() if not sources} == UNNAMED
    for name in set(named) - UNNAMED:
        assert "loss" in named[name] or "clip range, ratio" in named[name], name
        assert all(re.fullmatch(r"[\w/.-]+\.py [\w.]+", source) for source in named[name].values()), name
        on_policy_gradient = config_of(name).recipe == "grpo"
        assert not on_policy_gradient or set(named[name]) == {"kernel, steps", "clip range, ratio"}, name


def test_the_function_that_a_preset_names_is_its_kernel() -> None:
    for name in set(SOURCED) - UNNAMED:
        config, step = config_of(name), sources_of(name).get("kernel, steps", "")
        kernels = SAMPLED_BY[step.rpartition("/")[2]] if step else {config.sampler.kernel}
        assert config.sampler.kernel in kernels, (name, step)
        assert (config.sampler.solver == "dpm2") or not step.endswith("dpm_step"), name
