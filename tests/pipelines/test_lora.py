"""LoRA policy: where gradients reach, what slots keep apart, and that files mean the same everywhere."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from diffusers import StableDiffusion3Pipeline
from family_sampling import fill_lora, start_noise
from peft import LoraConfig, get_peft_model
from rounding import assert_same_sum
from safetensors.torch import load_file, save_file
from tiny_models import ALPHA, PROMPTS, RANK, adapted, guided, load_tiny, probe, sample_ode
from torch import Tensor

from flowrl.pipelines.shared.family_pipeline import FamilyPipeline
from flowrl.pipelines.weights.lora import JOINT_ATTENTION, Policy, add_saved_lora, check_targets
from flowrl.pipelines.weights.lora_files import read_lora
from flowrl.pretraining.tiny_sd3 import CONTEXT
from flowrl.training import checkpoints as saving

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def new_policy(pipeline: FamilyPipeline, *, rank: int = RANK, alpha: int = ALPHA, seed: int = 1) -> Policy:
    return Policy(pipeline.denoiser, rank=rank, alpha=alpha, targets=JOINT_ATTENTION, seed=seed)


# ---- initial weights and gradients -----------------------------------------------------------------------------------


def test_initial_weights_are_a_function_of_the_seed_alone(tiny_sd3_folder: Path) -> None:
    drawn = []
    for global_seed, seed in ((0, 1), (123, 1), (0, 2)):
        torch.manual_seed(global_seed)
        drawn.append(new_policy(load_tiny(tiny_sd3_folder), rank=16, seed=seed).tensors())
    first, same, other = drawn
    assert all(torch.equal(first[name], same[name]) for name in first)
    assert all(not torch.equal(first[name], other[name]) for name in first if "lora_A" in name)
    assert all(not first[name].any() for name in first if "lora_B" in name)
    values = torch.cat([first[name].flatten() for name in first if "lora_A" in name])
    # 15 tensors of 16 x 32 normals with deviation 1/16; the relative standard error of a deviation is 1 / sqrt(2n).
    assert len(values) == 15 * 16 * 32
    assert abs(float(values.std()) * 16 - 1) < 5 / (2 * len(values)) ** 0.5
    assert abs(float(values.mean())) < 5 / 16 / len(values) ** 0.5
    assert len({float(first[name][0, 0]) for name in first if "lora_A" in name}) == 15  # no two layers share them


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_new_policy_changes_nothing_and_is_float32_on_any_base(tiny_sd3_folder: Path, dtype: torch.dtype) -> None:
    pipeline = load_tiny(tiny_sd3_folder, dtype)
    before = probe(pipeline)
    policy = new_policy(pipeline)
    assert torch.equal(probe(pipeline), before)
    trainable = {name for name, p in pipeline.denoiser.named_parameters() if p.requires_grad}
    assert trainable == set(policy.parameters)
    assert len(trainable) == 2 * 15  # eight targets in two blocks; the last block has no text output projection
    assert {p.dtype for p in policy.parameters.values()} == {torch.float32}
    base = [p for name, p in pipeline.denoiser.named_parameters() if name not in trainable]
    assert {p.dtype for p in base} == {dtype}


@pytest.mark.parametrize(
    ("dtype", "scale"), [(torch.float32, 1.0), (torch.float16, 4.0), (torch.bfloat16, 4.0)], ids=str
)
def test_every_tensor_that_can_act_receives_gradient(tiny_sd3_folder: Path, dtype: torch.dtype, scale: float) -> None:
    pipeline, policy = adapted(tiny_sd3_folder, dtype)
    x = start_noise(pipeline, 2)
    output = guided(pipeline, PROMPTS[:2], scale)(x, torch.tensor(0.7), torch.tensor(700.0))
    output.square().mean().backward()
    silent = {name for name, p in policy.parameters.items() if p.grad is None or not bool(p.grad.any())}
    # The last block drops its text stream, so nothing ever reads the answers to the text tokens' questions.
    assert silent == {f"transformer_blocks.1.attn.add_q_proj.lora_{side}.default.weight" for side in "AB"}
    grads = [p.grad for p in policy.parameters.values() if p.grad is not None]
    assert all(bool(torch.isfinite(g).all()) and g.dtype == torch.float32 for g in grads)


def test_gradients_are_those_of_the_function(tiny_sd3_folder: Path) -> None:
    pipeline, policy = adapted(tiny_sd3_folder)
    x, parameters = start_noise(pipeline, 2), list(policy.parameters.values())
    velocity = guided(pipeline, PROMPTS[:2], 4.0)

    def loss() -> Tensor:
        return velocity(x, torch.tensor(0.7), torch.tensor(700.0)).double().square().mean()

    gradients = torch.autograd.grad(loss(), parameters, allow_unused=True, materialize_grads=True)
    norm = torch.cat([g.flatten() for g in gradients]).norm()
    moved = []
    for step in (1e-2, -1e-2):
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.data += step * gradient / norm
        with torch.no_grad():
            moved.append(float(loss()))
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.data -= step * gradient / norm
    assert (moved[0] - moved[1]) / 2e-2 == pytest.approx(float(norm), rel=1e-2)  # slope along the gradient


# ---- slots -----------------------------------------------------------------------------------------------------------


def state_of(policy: Policy) -> dict[str, tuple[int, bool, bytes]]:
    """What must be as before: which tensors, whether they train, and every bit of them."""
    return {n: (id(p), p.requires_grad, p.detach().numpy().tobytes()) for n, p in policy.parameters.items()}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_reference_is_the_network_without_lora(tiny_sd3_folder: Path, dtype: torch.dtype) -> None:
    pipeline, policy = adapted(tiny_sd3_folder, dtype)
    base, own, state = probe(load_tiny(tiny_sd3_folder, dtype)), probe(pipeline), state_of(policy)
    assert not torch.equal(base, own)
    with policy.under("reference"):
        assert torch.equal(probe(pipeline), base)
        assert state_of(policy) == state
    assert torch.equal(probe(pipeline), own)
    assert state_of(policy) == state


@pytest.mark.parametrize("slot", ["policy", "reference", "ema"])
def test_an_exception_under_a_slot_leaves_the_policy_as_it_was(tiny_sd3_folder: Path, slot: str) -> None:
    pipeline, policy = adapted(tiny_sd3_folder)
    policy.add_slot("ema")
    fill_lora(policy, seed=2)
    own, state, kept = probe(pipeline), state_of(policy), {n: t.clone() for n, t in policy.slots["ema"].items()}
    with pytest.raises(KeyboardInterrupt), policy.under(slot):
        raise KeyboardInterrupt
    assert torch.equal(probe(pipeline), own)
    assert state_of(policy) == state
    assert all(torch.equal(kept[name], policy.slots["ema"][name]) for name in kept)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_slot_keeps_the_weights_it_was_added_with(tiny_sd3_folder: Path, dtype: torch.dtype) -> None:
    pipeline, policy = adapted(tiny_sd3_folder, dtype)
    at_first = probe(pipeline)
    policy.add_slot("ema")
    fill_lora(policy, seed=2)
    own, state = probe(pipeline), state_of(policy)
    assert not torch.equal(own, at_first)
    with policy.under("ema"):
        assert torch.equal(probe(pipeline), at_first)
    assert torch.equal(probe(pipeline), own)
    assert state_of(policy) == state


def test_the_innermost_slot_is_at_work(tiny_sd3_folder: Path) -> None:
    pipeline, policy = adapted(tiny_sd3_folder)
    policy.add_slot("ema")
    fill_lora(policy, seed=2)
    policy.add_slot("old")
    fill_lora(policy, seed=3)
    alone = {}
    for slot in ("policy", "reference", "ema", "old"):
        with policy.under(slot):
            alone[slot] = probe(pipeline)
    assert len({output.numpy().tobytes() for output in alone.values()}) == 4
    for outer, inner in itertools.product(("policy", "reference", "ema"), alone):
        with policy.under(outer):
            with policy.under(inner):
                assert torch.equal(probe(pipeline), alone[inner]), (outer, inner)
            assert torch.equal(probe(pipeline), alone[outer]), (outer, inner)
        assert torch.equal(probe(pipeline), alone["policy"]), (outer, inner)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_cached_casts_do_not_carry_weights_from_slot_to_slot(tiny_sd3_folder: Path, dtype: torch.dtype) -> None:
    pipeline, policy = adapted(tiny_sd3_folder, dtype)
    policy.add_slot("ema")
    fill_lora(policy, seed=2)

    def answers() -> list[Tensor]:
        x, cond, timestep = start_noise(pipeline, 2), pipeline.encode(PROMPTS[:2]), torch.tensor([700.0, 300.0])
        found = []
        for slot in ("policy", "ema", "reference", "policy"):
            with policy.under(slot):  # with gradient: only then does autocast keep its copies
                found.append(pipeline.network(x, timestep, cond).detach())
        fill_lora(policy, seed=3)  # as an optimizer step would
        found.append(pipeline.network(x, timestep, cond).detach())
        fill_lora(policy, seed=2)
        return found

    apart = answers()
    assert torch.equal(apart[0], apart[3])
    assert len({a.numpy().tobytes() for a in apart}) == 4
    with torch.autocast("cpu", dtype):  # a caller's own region keeps the casts alive between the calls
        inside = answers()
    assert all(torch.equal(a, b) for a, b in zip(apart, inside, strict=True))


def test_gradient_survives_an_evaluation_without_gradient(tiny_sd3_folder: Path) -> None:
    pipeline, policy = adapted(tiny_sd3_folder, torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        probe(pipeline)
        velocity = guided(pipeline, PROMPTS[:2], 1.0)
        output = velocity(start_noise(pipeline, 2), torch.tensor(0.7), torch.tensor(700.0))
    assert all(bool(g.any()) for g in torch.autograd.grad(output.sum(), list(policy.parameters.values())[:4]))


def test_blending_moves_a_slot_towards_the_policy(tiny_sd3_folder: Path) -> None:
    _, policy = adapted(tiny_sd3_folder)
    policy.add_slot("ema")
    first = policy.tensors()
    fill_lora(policy, seed=2)
    state = state_of(policy)
    policy.blend("ema", 0.9)
    policy.blend("ema", 0.75)
    for name, second in policy.tensors().items():
        expected = 0.75 * (0.9 * first[name].double() + 0.1 * second.double()) + 0.25 * second.double()
        torch.testing.assert_close(policy.slots["ema"][name].double(), expected, atol=1e-6, rtol=1e-6)
    assert state_of(policy) == state
    policy.blend("ema", 0.0)
    assert all(torch.equal(policy.slots["ema"][name], tensor) for name, tensor in policy.tensors().items())


def test_an_unknown_slot_is_refused_by_name(tiny_sd3_folder: Path) -> None:
    _, policy = adapted(tiny_sd3_folder)
    policy.add_slot("old")
    with pytest.raises(ValueError, match="no weight slot 'ema': there are policy, reference, old"), policy.under("ema"):
        pass


# ---- files -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def saved(tiny_sd3_folder: Path, tmp_path: Path) -> Path:
    """The LoRA of `adapted`, saved as a run saves it."""
    pipeline, policy = adapted(tiny_sd3_folder)
    saving.save_lora(tmp_path / "lora", pipeline, policy)
    assert [path.name for path in tmp_path.iterdir()] == ["lora"]
    return tmp_path / "lora"


def stock_images(folder: Path, lora: Path) -> Tensor:
    pipe = StableDiffusion3Pipeline.from_pretrained(folder)
    pipe.set_progress_bar_config(disable=True)
    pipe.load_lora_weights(lora)
    return pipe(
        prompt=PROMPTS[:2], negative_prompt=["", ""], latents=start_noise(load_tiny(folder), 2), guidance_scale=4.5,
        num_inference_steps=4, max_sequence_length=CONTEXT, output_type="pt",
    ).images  # fmt: skip


def without_metadata(lora: Path) -> None:
    file = lora / "pytorch_lora_weights.safetensors"
    save_file(load_file(file), file)


@pytest.mark.slow
def test_a_saved_lora_draws_the_same_images_in_stock_diffusers(tiny_sd3_folder: Path, saved: Path) -> None:
    pipeline, policy = adapted(tiny_sd3_folder)
    ours = pipeline.decode(sample_ode(pipeline, PROMPTS[:2], 4.5, 4))
    assert_same_sum(stock_images(tiny_sd3_folder, saved), ours)
    with policy.under("reference"):
        assert (pipeline.decode(sample_ode(pipeline, PROMPTS[:2], 4.5, 4)) - ours).abs().max() > 1e-2
    without_metadata(saved)  # alpha is rank then, half of ours
    assert (stock_images(tiny_sd3_folder, saved) - ours).abs().max() > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_saved_lora_can_be_added_again(tiny_sd3_folder: Path, saved: Path, dtype: torch.dtype) -> None:
    pipeline, policy = adapted(tiny_sd3_folder, dtype)
    fresh = load_tiny(tiny_sd3_folder, dtype)
    loaded = add_saved_lora(fresh.denoiser, saved)
    assert (loaded.config["r"], loaded.config["lora_alpha"]) == (RANK, ALPHA)
    assert torch.equal(probe(fresh), probe(pipeline))
    own = policy.tensors()
    assert loaded.parameters.keys() == own.keys()
    assert all(torch.equal(tensor, own[name]) for name, tensor in loaded.tensors().items())


def test_what_is_saved_is_the_slot_that_is_at_work(tiny_sd3_folder: Path, tmp_path: Path) -> None:
    pipeline, policy = adapted(tiny_sd3_folder)
    policy.add_slot("ema")
    at_first = probe(pipeline)
    fill_lora(policy, seed=2)
    saving.save_lora(tmp_path / "lora", pipeline, policy)
    with policy.under("ema"):
        saving.save_lora(tmp_path / "lora", pipeline, policy)  # replaces the first
    fresh = load_tiny(tiny_sd3_folder)
    add_saved_lora(fresh.denoiser, tmp_path / "lora")
    assert torch.equal(probe(fresh), at_first)


def write_peft(folder: Path, target: Path, *, alpha: int = ALPHA, **options: bool) -> Tensor:
    """A LoRA as PEFT (and flow_grpo with it) saves one; returns the fingerprint of the network it belongs to."""
    pipeline = load_tiny(folder)
    config = LoraConfig(
        r=RANK, lora_alpha=alpha, target_modules=list(JOINT_ATTENTION), init_lora_weights="gaussian", **options
    )
    wrapped = get_peft_model(pipeline.denoiser, config)
    generator = torch.Generator().manual_seed(5)
    for name, parameter in wrapped.named_parameters():
        if "lora_" in name:
            parameter.data = 0.3 * torch.randn(parameter.shape, generator=generator)
    wrapped.save_pretrained(target)
    pipeline.denoiser = wrapped
    return probe(pipeline)


@pytest.mark.slow
def test_a_policy_continues_from_the_peft_layout(tiny_sd3_folder: Path, tmp_path: Path) -> None:
    expected = write_peft(tiny_sd3_folder, tmp_path / "peft")
    pipeline = load_tiny(tiny_sd3_folder)
    new_policy(pipeline).initialise_from(read_lora(tmp_path / "peft"))
    assert_same_sum(probe(pipeline), expected)  # PEFT adds in another order
    fresh = load_tiny(tiny_sd3_folder)
    assert add_saved_lora(fresh.denoiser, tmp_path / "peft").config["lora_alpha"] == ALPHA
    assert torch.equal(probe(fresh), probe(pipeline))


@pytest.mark.slow
def test_a_policy_continues_from_the_diffusers_layout(tiny_sd3_folder: Path, saved: Path) -> None:
    expected, pipeline = probe(adapted(tiny_sd3_folder)[0]), load_tiny(tiny_sd3_folder)
    new_policy(pipeline, seed=9).initialise_from(read_lora(saved))
    assert torch.equal(probe(pipeline), expected)


def test_a_lora_that_states_no_alpha_means_what_it_means_to_stock_diffusers(tiny_sd3_folder: Path, saved: Path) -> None:
    without_metadata(saved)
    assert read_lora(saved).alpha == RANK
    fresh = load_tiny(tiny_sd3_folder)
    add_saved_lora(fresh.denoiser, saved)
    images = fresh.decode(sample_ode(fresh, PROMPTS[:2], 4.5, 4))
    assert_same_sum(images, stock_images(tiny_sd3_folder, saved))
    with pytest.raises(ValueError, match=r"alpha 2.*set policy\.lora_alpha=2"):
        new_policy(load_tiny(tiny_sd3_folder)).initialise_from(read_lora(saved))


def test_a_lora_that_does_not_fit_is_refused(tiny_sd3_folder: Path, saved: Path, tmp_path: Path) -> None:
    pipeline = load_tiny(tiny_sd3_folder)
    with pytest.raises(ValueError, match=r"alpha 4.*0\.5 times as strongly; set policy\.lora_alpha=4"):
        new_policy(pipeline, alpha=RANK).initialise_from(read_lora(saved))
    with pytest.raises(ValueError, match=r"set policy\.lora_rank"):
        new_policy(load_tiny(tiny_sd3_folder), rank=4).initialise_from(read_lora(saved))
    fewer = Policy(load_tiny(tiny_sd3_folder).denoiser, rank=RANK, alpha=ALPHA, targets=["attn.to_q"], seed=0)
    with pytest.raises(ValueError, match=r"26 unknown.*policy\.target_modules"):
        fewer.initialise_from(read_lora(saved))
    (saved.parent / "none").mkdir()
    with pytest.raises(ValueError, match=r"no LoRA in .*pytorch_lora_weights.*adapter_model"):
        read_lora(saved.parent / "none")


def test_a_lora_whose_strength_cannot_be_told_is_refused(tiny_sd3_folder: Path, tmp_path: Path) -> None:
    write_peft(tiny_sd3_folder, tmp_path / "rslora", use_rslora=True)  # scales by alpha / sqrt(rank)
    with pytest.raises(ValueError, match=r"set policy\.lora_variant=rslora"):
        new_policy(load_tiny(tiny_sd3_folder)).initialise_from(read_lora(tmp_path / "rslora"))
    write_peft(tiny_sd3_folder, tmp_path / "peft")
    (tmp_path / "peft" / "adapter_config.json").unlink()
    with pytest.raises(ValueError, match=r"adapter_config\.json"):
        add_saved_lora(load_tiny(tiny_sd3_folder).denoiser, tmp_path / "peft")


def test_rank_alpha_and_layers_are_read_from_either_layout(tiny_sd3_folder: Path, saved: Path, tmp_path: Path) -> None:
    write_peft(tiny_sd3_folder, tmp_path / "peft")
    layers = read_lora(saved).layers
    for place in (saved, saved / "pytorch_lora_weights.safetensors", tmp_path / "peft"):
        lora = read_lora(place)
        assert (lora.rank, lora.alpha, lora.layers) == (RANK, ALPHA, layers)
    without_metadata(saved)
    assert (read_lora(saved).rank, read_lora(saved).alpha) == (RANK, RANK)


def test_a_rank_above_the_width_of_every_layer_is_refused(tiny_sd3_folder: Path) -> None:
    network = load_tiny(tiny_sd3_folder).denoiser
    widths = [min(module.weight.shape) for name, module in network.named_modules() if name.endswith("attn.to_q")]
    check_targets(network, ["attn.to_q"], max(widths))
    with pytest.raises(ValueError, match=f"lora_rank is {max(widths) + 1}, .* has width {max(widths)}: lower it"):
        check_targets(network, ["attn.to_q"], max(widths) + 1)
