"""What is said of checkpoints that were distilled to few steps."""

from __future__ import annotations

import pytest

from flowrl import cli
from flowrl.config.base import find_config
from flowrl.config.sections import PipelineConfig
from flowrl.config.train import load_config
from flowrl.health.configuration_checks import diagnose_configuration
from flowrl.pipelines.places.known_checkpoints import checkpoints
from flowrl.session.advice import few_step_advice, is_few_step, reference_notes, undistilled
from flowrl.training.optimizers import rate_note

FEW = {
    "black-forest-labs/FLUX.1-schnell": "black-forest-labs/FLUX.1-dev",
    "black-forest-labs/FLUX.2-klein-4B": "black-forest-labs/FLUX.2-klein-base-4B",
    "black-forest-labs/FLUX.2-klein-9B": "black-forest-labs/FLUX.2-klein-base-9B",
    "hunyuanvideo-community/HunyuanImage-2.1-Distilled-Diffusers": "hunyuanvideo-community/HunyuanImage-2.1-Diffusers",
    "krea/Krea-2-Turbo": "krea/Krea-2-Raw",
    "Qwen/Qwen-Image-2.1-Turbo": "Qwen/Qwen-Image-2.1",
    "stabilityai/stable-diffusion-3.5-large-turbo": "stabilityai/stable-diffusion-3.5-large",
    "Tongyi-MAI/Z-Image-Turbo": "Tongyi-MAI/Z-Image",
}
"""Every published checkpoint of the table that is distilled to few steps -> what it was distilled from."""


def test_those_of_the_table_are_known() -> None:
    assert {model for model in checkpoints() if is_few_step(PipelineConfig(model=model))} == set(FEW)
    assert {model: undistilled(model) for model in FEW} == FEW
    assert is_few_step(PipelineConfig(model="lightx2v/Wan2.1-T2V-14B-StepDistill-CfgDistill"))
    assert not is_few_step(PipelineConfig(model="asset:tiny-sd3"))


@pytest.mark.parametrize("name", ["z_image_turbo_grpo", "flux2_klein_grpo", "sd35l_turbo_grpo_pickscore"])
def test_policy_gradients_are_warned_of_and_cps_proposed(name: str) -> None:
    known, advice = few_step_advice(load_config(find_config(name)))
    assert "distilled to few steps" in known
    for part in ("sampler.kernel=cps", "clip_range", "is not distilled", "jpeg_compressibility"):
        assert part in advice


def test_forward_recipes_are_told_to_take_another() -> None:
    turbo = ["pipeline.model=stabilityai/stable-diffusion-3.5-large-turbo", "kl_coef=0"]
    known, advice = few_step_advice(load_config(find_config("sd35m_nft"), turbo))
    assert "blur" in known
    assert "recipe=grpo with sampler.kernel=cps" in advice
    assert "kl_coef above 0" in advice
    watched = ["rewards=[{name: clip_score}, {name: jpeg_compressibility, weight: 0}]", "kl_coef=1e-4"]
    _, less = few_step_advice(load_config(find_config("sd35m_nft"), [turbo[0], *watched]))
    assert "kl_coef above 0" not in less
    assert "jpeg_compressibility" not in less


def test_nothing_is_said_of_other_models_nor_where_a_model_s_own_steps_are_trained() -> None:
    assert few_step_advice(load_config(find_config("sd35m_nft"))) == ()
    turbo = ["pipeline.model=stabilityai/stable-diffusion-3.5-large-turbo"]
    assert few_step_advice(load_config(find_config("sd35m_opd"), turbo)) == ()


@pytest.mark.slow
def test_doctor_and_plan_say_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "z_image_turbo_grpo", "--card", "24"]) == 0
    assert "is distilled to few steps" in " ".join(capsys.readouterr().out.split())
    found = diagnose_configuration("z_image_turbo_grpo", (), step=False, offline=True)
    (check,) = (check for check in found.checks if check.name == "distilled model")
    assert check.state == "warning"
    assert "distilled to few steps" in check.found
    assert "sampler.kernel=cps" in check.cure


def test_the_reference_of_a_run_from_a_lora_is_said_to_be_the_model_without_it() -> None:
    config = load_config(find_config("tiny_grpo_geneval"), ["policy.init_lora=first/lora", "kl_coef=0.01"])
    (said,) = reference_notes(config)
    assert "kl_reference=base is the model without first/lora" in said
    beyond = f"kl_reference={config.num_iterations + 1}"
    assert beyond in said
    held = load_config(find_config("tiny_grpo_geneval"), ["policy.init_lora=first/lora", "kl_coef=0.01", beyond])
    assert reference_notes(held) == ()
    assert reference_notes(load_config(find_config("tiny_grpo_geneval"))) == ()


def test_a_longer_run_says_what_becomes_of_its_rate_and_how_to_hold_one() -> None:
    words = ["optim.schedule=cosine", "optim.lr=0.002", "num_iterations=40"]
    said = rate_note(load_config(find_config("tiny_grpo_geneval"), words), 20, 20)
    assert "was 0 at iteration 20 and continues at 0.001" in said  # half of the peak, halfway through a cosine
    assert "optim.schedule=constant optim.lr=0.001 resume_changed=true" in said
    said = rate_note(load_config(find_config("tiny_grpo_geneval"), words), 30, 15)
    assert "was 0.001 at iteration 15 and continues at 0.00138" in said
