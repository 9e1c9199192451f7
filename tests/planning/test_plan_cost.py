"""What `flowrl plan` foretells against what runs count, and against measured FLOPs and activations."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import toy_pipeline
from torch import nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode
from toy_pipeline import PROMPTS, QuickRun, toy_config, write_toy

from flowrl import rewards
from flowrl.config.rewards import RewardConfig
from flowrl.config.train import TrainConfig, resolve_path
from flowrl.pipelines import PIPELINES
from flowrl.pipelines.families.sd3 import FAMILY
from flowrl.pipelines.places.known_checkpoints import tables
from flowrl.pipelines.shared.cards import Size
from flowrl.planning import published_models as checkpoints
from flowrl.planning.cost import cost_of, decode_flops, graph_rows, negative_again, of_iteration, of_run
from flowrl.planning.gather import _reward_models
from flowrl.planning.memory import GIB
from flowrl.planning.network import DenoiserWeights, FewBlocks, Network, Trained, few_blocks, measure
from flowrl.planning.traces import Trace
from flowrl.recipes.counting import Counts
from flowrl.session.preflight import recipe_of, resolve
from flowrl.training.loop import Loop
from flowrl.training.parts import read_run_prompts

KINDS = ("rollout", "completion", "update", "reference", "backward")
TWO_ITERATIONS = "num_iterations=2"


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The toy's configuration, with the toy in the place of a model family, and a reward with gradient."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(PIPELINES, "sd3", "toy_pipeline")
        patch.setitem(rewards.REWARDS, "smooth_brightness", "toy_pipeline:SmoothBrightness")
        yield write_toy(tmp_path_factory.mktemp("plan"))


def trained(config: TrainConfig, folder: Path) -> list[dict[str, Any]]:
    """The rows that a real run of the recipe logs."""
    run: Any = QuickRun(folder)
    recipe = recipe_of(config)
    recipe.check(config)
    assert recipe.main(resolve(config, read_run_prompts(config.prompts)), run)
    logged: list[dict[str, Any]] = run.logged
    return logged


def two_passes(scale: float) -> int:
    return 1 if scale == 1 else 2


# ---- network evaluations ---------------------------------------------------------------------------------------------

FORWARD = ("recipe=forward", "sampler.kernel=ode", "times.count=2")
PAIRS = ("recipe=preference", "sampler.kernel=ode", "times.count=2")
BACKPROP = ("recipe=backprop", "sampler.kernel=ode", "rewards=[{name: smooth_brightness}]")
CASES: dict[str, tuple[str, ...]] = {
    "outcome": (),
    "guided with reference": ("sampler.guidance_scale=3", "kl_coef=0.1"),
    "constant negative": ("sampler.guidance_scale=3", "kl_coef=0.1", "sampler.train_negative=false"),
    "recomputed negative": ("sampler.guidance_scale=3", "kl_coef=0.1", "sampler.train_negative=recompute"),
    "rollout in other pieces": ("micro_batch_size=2",),
    "sequence": ("ratio=sequence", "loss_aggregation=samples", "updates_per_rollout=2"),
    "window": ("sampler.sde_window_size=1",),
    "windows of prompts": ("sampler.sde_window_size=1", "sampler.sde_window_by=prompt", "updates_per_rollout=2"),
    "moving window": ("sampler.num_steps=6", "sampler.sde_window_size=2", "sampler.sde_window=random",
                      "sampler.sde_window_interval=1"),
    "flash": ("sampler.num_steps=8", "sampler.sde_window_size=2", "sampler.sde_window=progressive",
              "sampler.sde_window_interval=1", "sampler.grid=linspace", "sampler.flash_tail=0.5",
              "sampler.solver=dpm2"),
    "leading share": ("sampler.num_steps=6", "sampler.trained_fraction=0.6"),
    "random share": ("sampler.num_steps=6", "sampler.trained_fraction=0.6", "sampler.trained_steps=random"),
    "dense": ("credit.method=dense_grpo", "sampler.guidance_scale=3"),
    "dense in 3 steps": ("credit.method=dense_grpo", "credit.completion=3"),
    "stepwise": ("credit.method=stepwise",),
    "clean": ("credit.method=vgpo",),
    "turning points": ("credit.method=tp_grpo",),
    "branches": ("credit.method=g2rpo", "sampler.num_steps=7", "credit.strides=[1, 2, 3]"),
    "branches of several anchors": ("credit.method=tempflow", "credit.branches=2", "updates_per_rollout=2"),
    "branches against the ODE": ("credit.method=self_opd", "credit.branches=2", "sampler.sde_window_size=1"),
    "tree": ("credit.method=tree_grpo", "sampler.num_steps=6"),
    "tree with splits": ("credit.method=branch_grpo", "credit.splits=[0, 1]", "kl_coef=0.1"),
    "pruned tree": ("credit.method=branch_grpo", "credit.splits=[0, 1]", "credit.options={pruned_depths: [2]}"),
    "published window": ("sampler.num_steps=4", "sampler.sde_window_size=1", "sampler.sde_window=progressive",
                         "sampler.sde_window_interval=1", "sampler.published_window=true", "num_iterations=4"),
    "nft": FORWARD,
    "nft with reference": (*FORWARD, "kl_coef=0.1", "sampler.guidance_scale=3"),
    "awm": (*FORWARD, "objective.name=awm"),
    "matching": ("dmd={weight: 0.1, fake_updates: 3}", "sampler.guidance_scale=3", "updates_per_rollout=2"),
    "awm off policy": (*FORWARD, "objective.name=awm", "objective.options={off_policy: true}"),
    "dgpo without guidance": (*FORWARD, "objective.name=dgpo", "sampler.guidance_scale=3",
                              "objective.options={guidance_scale: 1, clip: 0.0}"),
    "dgpo with guided reference": (*FORWARD, "objective.name=dgpo", "objective.options.reference_guidance_scale=4.5"),
    "crd": (*FORWARD, "objective.name=crd"),
    "rft": (*FORWARD, "objective.name=rft"),
    "nft of the extremes": (*FORWARD, "best_of=2"),
    "nft, constant negative": (*FORWARD, "kl_coef=0.1", "sampler.guidance_scale=3", "sampler.train_negative=false"),
    "dpo": PAIRS,
    "dpo, constant negative": (*PAIRS, "sampler.guidance_scale=3", "sampler.train_negative=false"),
    "d3po": ("recipe=preference", "objective.name=d3po", "same_latent=true", "sampler.guidance_scale=3"),
    "draft": (*BACKPROP, "objective.name=draft", "objective.options={count: 2}", "sampler.guidance_scale=3"),
    "draft, recomputed negative": (*BACKPROP, "objective.options={count: 2}", "sampler.guidance_scale=3",
                                   "sampler.train_negative=recompute"),
    "refl": (*BACKPROP, "objective.name=refl"),
    "refl, constant negative": (*BACKPROP, "objective.name=refl", "sampler.guidance_scale=3",
                                "sampler.train_negative=false"),
    "alignprop": (*BACKPROP, "objective.name=alignprop"),
    "drtune": (*BACKPROP, "objective.name=drtune", "objective.options={count: 2, early_stop: 1}"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_foretold_evaluations_are_those_that_a_run_counts(toy: Path, name: str) -> None:
    config = toy_config(toy, TWO_ITERATIONS, *CASES[name])
    last = trained(config, toy.parent)[-1]
    foretold = of_run(config, two_passes, 1, 0).total
    assert {kind: getattr(foretold, kind) for kind in KINDS} == {kind: last.get(f"nfe/{kind}", 0) for kind in KINDS}
    assert (foretold.total, foretold.images) == (last["nfe/total"], last["images"])


@pytest.mark.parametrize("change", [
    "pipeline.device=auto", "pipeline.device=cuda", "pipeline.dtype=bfloat16", "pipeline.compile=blocks",
    "pipeline.quantize=int8", "workers.rollouts=1",
])  # fmt: skip
def test_what_may_be_scored_again_is_counted(toy: Path, change: str) -> None:
    """Only on one CPU in float32 are rollout and update of equal batches sure to give the same numbers."""
    equal = ("updates_per_rollout=4", "micro_batch_size=2", "rollout_batch_size=2")

    def updates(*more: str) -> int:
        config = toy_config(toy, *equal, *more)
        return of_iteration(config, 0, two_passes, config.resolve_batch(1)).update

    assert updates(change) == updates() + updates() * 3 // 4
    assert updates("micro_batch_size=1", change) == updates("micro_batch_size=1")  # counted anyway


def test_a_run_whose_kernels_differ_does_what_was_foretold(toy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flowrl.recipes.grpo.first_deviation", lambda *_, **__: 1e-6)
    equal = ("updates_per_rollout=4", "micro_batch_size=2", "rollout_batch_size=2", "pipeline.device=auto")
    config = toy_config(toy, *equal)
    assert trained(config, toy.parent)[-1]["nfe/update"] == of_run(config, two_passes, 1, 0).total.update


def test_offline_pairs_are_compared_and_nothing_is_sampled(toy: Path) -> None:
    options = ("objective.name=dpo_offline", "objective.options.pairs=pairs", "group_size=2")
    config = toy_config(toy, *PAIRS, *options)
    assert of_iteration(config, 0, two_passes, config.resolve_batch(1)) == Counts(update=8, reference=8, backward=8)


def test_images_of_files_are_trained_and_nothing_is_sampled(toy: Path) -> None:
    config = toy_config(toy, *FORWARD, "objective.name=sft", "objective.options.images=images", "kl_coef=0.1")
    assert of_iteration(config, 0, two_passes, config.resolve_batch(1)) == Counts(update=16, reference=16, backward=16)


def test_updates_are_the_most_there_can_be(toy: Path) -> None:
    """Two of the prompts teach nothing: micro-batches of theirs are left out."""
    reward = toy_pipeline.reward_list(toy.parent, "half_fail")
    config = toy_config(toy, "prompts_per_step=4", "micro_batch_size=4", "rollout_batch_size=4", reward)
    last, foretold = trained(config, toy.parent)[-1], of_run(config, two_passes, 1, 0).total
    assert (last["nfe/rollout"], last["images"]) == (foretold.rollout, foretold.images)
    assert 2 * last["nfe/backward"] == foretold.backward


@pytest.mark.slow
@pytest.mark.parametrize("overrides", [(), ("budget.evals=3",), ("budget.evals=2", "budget.nfe=300")])
def test_evaluations_on_the_way_and_the_end_of_a_budget(
    toy: Path, overrides: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    every = "eval_every=2" if not overrides else "eval_every=0"
    more = (f"prompts.eval={toy.parent / 'prompts.txt'}", every, "eval.samples_per_prompt=2", "eval.guidance_scale=2")
    config = toy_config(toy, "num_iterations=5", *more, *overrides)
    rows, evaluations = [0], []
    evaluated, network = Loop.evaluate, toy_pipeline.Toy.network

    def counting(self: Any, x: Any, timestep: Any, cond: Any) -> Any:
        rows[0] += len(x)
        return network(self, x, timestep, cond)

    def noted(self: Loop, iteration: int) -> bool:
        before = rows[0]
        made = evaluated(self, iteration)
        evaluations.append(rows[0] - before)
        return made

    monkeypatch.setattr(toy_pipeline.Toy, "network", counting)
    monkeypatch.setattr(Loop, "evaluate", noted)
    logged = [row for row in trained(config, toy.parent) if "reward" in row]
    foretold = of_run(config, two_passes, 1, 2 * len(PROMPTS))
    assert (foretold.iterations, foretold.total.total) == (len(logged), logged[-1]["nfe/total"])
    assert foretold.evaluation_rows is not None
    assert foretold.base_rows is not None
    later = [foretold.evaluation_rows] * (foretold.evaluations - 1)
    assert evaluations == [foretold.evaluation_rows + foretold.base_rows, *later]


def test_a_graph_holds_the_rows_of_guidance_and_of_every_trained_call(toy: Path) -> None:
    assert graph_rows(toy_config(toy, "sampler.guidance_scale=3"), two_passes) == 2
    given = ("objective.options={guidance_scale: 1}", "sampler.guidance_scale=3")
    assert graph_rows(toy_config(toy, *FORWARD, *given), two_passes) == 1
    given = ("objective.options={count: 3}", "sampler.guidance_scale=3")
    assert graph_rows(toy_config(toy, *BACKPROP, *given), two_passes) == 6
    for value, again in (("false", 0.0), ("recompute", 0.5)):
        config = toy_config(toy, *BACKPROP, *given, f"sampler.train_negative={value}")
        assert graph_rows(config, two_passes) == 3
        assert negative_again(config, two_passes) == again


def test_a_constant_negative_saves_half_of_the_backward_pass_and_a_recomputed_one_costs_half_a_forward(
    toy: Path,
) -> None:
    network = Network(
        trained=0, weights=DenoiserWeights(parameters=0), attended=0, forward=1.0, backward=2.0,
        in_attention=0, saved=0, outside=0, largest=0, beside=0, working=0, blocks=1,
    )  # fmt: skip

    def stages(value: str, checkpointing: bool = False) -> dict[str, float]:
        config = toy_config(toy, "sampler.guidance_scale=3", f"sampler.train_negative={value}")
        run = of_run(config, two_passes, 1, 0)
        recomputed = checkpointing + negative_again(config, two_passes)
        cost = cost_of(network, run, eval_forward=0.0, decode=None, eval_decode=None, recomputed=recomputed)
        return dict(cost.stages)

    rows = 2 * 3 * 8  # both halves, three stochastic steps, eight images
    assert stages("true") == {"rollout": 4 / 3 * rows, "update": 3.0 * rows}
    assert stages("false") == {"rollout": 4 / 3 * rows, "update": 2.0 * rows}
    assert stages("recompute")["recomputation"] == rows / 2
    assert stages("recompute", checkpointing=True)["recomputation"] == 3 / 2 * rows


# ---- one evaluation --------------------------------------------------------------------------------------------------

SD35M = "stabilityai/stable-diffusion-3.5-medium"


def sd35m(text_tokens: int, dtype: torch.dtype = torch.bfloat16) -> Network:
    denoisers = few_blocks(FAMILY, SD35M, FAMILY.lora_targets)
    assert denoisers is not None
    call = FAMILY.meta_call(SD35M, Size(height=512, width=512), text_tokens)
    return measure(denoisers, call, trained=Trained(targets=FAMILY.lora_targets, rank=32), dtype=dtype)


@pytest.mark.parametrize(("tokens", "forward", "both", "again"), [(205, 2.247, 4.77, 7.01), (333, 2.468, 5.26, 7.72)])
def test_flops_of_stable_diffusion_35_medium(tokens: int, forward: float, both: float, again: float) -> None:
    found = sd35m(tokens)
    assert (found.parameters, found.trained) == (2_243_171_520, 18_776_064)
    assert (found.attended, found.blocks) == (1024 + tokens, 24)
    assert found.forward / 1e12 == pytest.approx(forward, abs=5e-4)
    assert (found.forward + found.backward) / 1e12 == pytest.approx(both, rel=5e-3)
    assert (2 * found.forward + found.backward) / 1e12 == pytest.approx(again, rel=5e-3)
    assert found.attention == pytest.approx(0.14, abs=0.01)
    # With 205 tokens 1.89 GiB would be saved without the copies that autocast makes, and with checkpointing 0.087 and a
    # block of 0.08.
    share = (1024 + tokens) / 1229
    assert found.saved / GIB / share == pytest.approx(2.25, rel=0.02)
    assert (0.087 + 0.08) * share < found.saved_checkpointed / GIB < (0.087 + 2.25 / 24 + 0.03) * share


SMALL = Trained(targets=("inner", "outer"), rank=2)


class Attending(nn.Module):
    """A projection, attention over 5 tokens in 2 heads of 4, a projection back; a known number of everything."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(8, 24, bias=False), nn.Linear(8, 8, bias=False)

    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor]:
        query, key, value = self.inner(hidden_states).view(1, 5, 3, 2, 4).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value)
        return (self.outer(attended.transpose(1, 2).reshape(1, 5, 8)),)


def test_a_network_that_can_be_counted_by_hand() -> None:
    with torch.device("meta"):
        network, x = FewBlocks(least=Attending()), torch.empty(1, 5, 8)
    found = measure(network, {"hidden_states": x}, trained=SMALL, dtype=torch.float32)
    low_rank = 2 * 5 * 2 * (8 + 24) + 2 * 5 * 2 * (8 + 8)
    attention = 4 * 2 * 5 * 5 * 4
    assert found.trained == 2 * (8 + 24) + 2 * (8 + 8)
    assert found.forward == 2 * 5 * 8 * 24 + 2 * 5 * 8 * 8 + low_rank + attention
    # Both LoRA pairs get gradients of weights and, but for the first A, of inputs; of the frozen, `outer` alone.
    first = 2 * 5 * 2 * 8
    assert found.backward == 2 * 5 * 8 * 8 + 2 * low_rank - first + 2 * attention
    # x; A x, twice; query, key and value in one; the output, in the order of tokens as they are, and its row sums.
    assert found.saved == 4 * (5 * 8 + 2 * 5 * 2 + 5 * 24 + 5 * 8 + 2 * 5)
    assert (found.saved_checkpointed, found.blocks, found.attended) == (found.saved, 0, 5)
    assert found.attention == attention / found.forward


def test_flops_are_those_of_torchs_own_counter() -> None:
    model = str(resolve_path("asset:tiny-sd3"))
    denoiser = FAMILY.meta_denoiser(model)
    assert denoiser is not None
    call = FAMILY.meta_call(model, Size(height=64, width=64), 32)
    with Trace() as own:
        denoiser(**call)[0].sum().backward()
    with FlopCounterMode(display=False) as stock:
        denoiser(**call)[0].sum().backward()
    assert own.total == stock.get_total_flops() > 0


def test_low_precision_halves_what_is_saved_but_for_casts() -> None:
    with torch.device("meta"):
        network, x = FewBlocks(least=Attending()), torch.empty(1, 5, 8)
    found = measure(network, {"hidden_states": x}, trained=SMALL, dtype=torch.bfloat16)
    # The LoRA is float32: what its weights are lowered to is kept, where gradient goes on to an input.
    weights = 2 * (2 * 24 + 2 * (8 + 8))
    assert found.saved == 2 * (5 * 8 + 2 * 5 * 2 + 5 * 24 + 5 * 8 + 5 * 8) + 4 * 2 * 5 + weights


# ---- parts -----------------------------------------------------------------------------------------------------------


def test_sizes_by_heart_are_those_of_the_stock_classes() -> None:
    import transformers
    from diffusers import AutoencoderKL

    t5 = {"d_model": 4096, "d_ff": 10240, "num_layers": 24, "num_heads": 64, "feed_forward_proj": "gated-gelu"}
    large, big = (
        {"hidden_size": width, "intermediate_size": 4 * width, "num_hidden_layers": layers, "projection_dim": width,
         "num_attention_heads": width // 64}
        for width, layers in ((768, 12), (1280, 32))
    )  # fmt: skip
    blocks = {"down_block_types": ["DownEncoderBlock2D"] * 4, "up_block_types": ["UpDecoderBlock2D"] * 4}
    plain = {"latent_channels": 16, "use_quant_conv": False, "use_post_quant_conv": False}
    with torch.device("meta"):
        classes = transformers.T5EncoderModel, transformers.CLIPTextModel, transformers.CLIPTextModelWithProjection
        found = {
            "T5_XXL": classes[0](transformers.T5Config(vocab_size=32128, d_kv=64, **t5)),
            "CLIP_L": classes[1](transformers.CLIPTextConfig(**large)),
            "CLIP_L_PROJECTED": classes[2](transformers.CLIPTextConfig(**large)),
            "CLIP_G": classes[2](transformers.CLIPTextConfig(**big)),
            "VAE_16": AutoencoderKL(block_out_channels=[128, 256, 512, 512], layers_per_block=2, **blocks, **plain),
        }
    counted = {name: sum(parameter.numel() for parameter in part.parameters()) for name, part in found.items()}
    assert counted == {name: tables()["part_parameters"][name] for name in found}


def test_a_folder_is_read_from_the_headers_of_its_files() -> None:
    folder = resolve_path("asset:tiny-sd3")
    parts = checkpoints.folder_parts(folder)
    assert set(parts) == {"text_encoder", "text_encoder_2", "text_encoder_3", "transformer", "vae"}
    denoiser = FAMILY.meta_denoiser(str(folder))
    assert denoiser is not None
    assert parts["transformer"] == sum(t.numel() for t in denoiser.state_dict().values())
    assert "transformer" not in (checkpoints.other_parts(str(folder)) or {})
    assert checkpoints.other_parts("nobody/unheard-of") is None


def test_a_broken_file_of_weights_is_refused(tmp_path: Path) -> None:
    (tmp_path / "vae").mkdir()
    (tmp_path / "vae" / "model.safetensors").write_bytes(b"<html>")
    with pytest.raises(ValueError, match="not a safetensors file"):
        checkpoints.folder_parts(tmp_path)


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("jpeg_compressibility", {}, ()),
        ("clip_score", {}, (("openai/clip-vit-large-patch14", 427_616_513, 4),)),
        ("hpsv3", {}, (("MizzenAI/HPSv3", 8_291_375_616, 2),)),
        ("hpsv3", {"dtype": "float32"}, (("MizzenAI/HPSv3", 8_291_375_616, 4),)),
        ("level_tokens", {}, (("Qwen/Qwen2.5-VL-7B-Instruct", 8_292_166_656, 2),)),
        ("geneval", {}, ()),
        ("geneval", {"judge": "mask2former", "detector": "mine"}, None),
        ("adversarial", {"backbone": "clip", "references": "world"}, (("yuvalkirstain/PickScore_v1", 986_109_441, 4),)),
        ("clip_score", {"model": "./mine"}, None),
        ("noisy", {"reward": "clip_score"}, (("openai/clip-vit-large-patch14", 427_616_513, 4),)),
        ("clip_score", {"scale": "none"}, None),
        (None, {}, None),
    ],
)
def test_models_of_rewards(name: str | None, options: dict[str, Any], expected: Any) -> None:
    own: dict[str, Any] = {"file": "r.py", "function": "f"} if name is None else {"name": name}
    known, unknown = _reward_models((RewardConfig(**own, options=options),))
    assert (known or None if unknown else known) == expected


def test_decoding_is_measured_in_a_folder_and_known_of_published_checkpoints() -> None:
    parts = checkpoints.other_parts(SD35M)
    assert decode_flops(SD35M, parts, (512, 512, None)) == pytest.approx(2.51e12, rel=0.03)
    assert decode_flops(SD35M, parts, (1024, 1024, None)) == pytest.approx(10.5e12, rel=0.03)
    assert decode_flops("nobody/unheard-of", None, (512, 512, None)) is None
    wan = checkpoints.other_parts("Wan-AI/Wan2.1-T2V-14B-Diffusers")
    assert decode_flops("wan", wan, (480, 832, 81)) == pytest.approx(275e12, rel=0.02)
    assert decode_flops("qwen", wan, (512, 512, None)) == pytest.approx(2.84e12, rel=0.02)
    folder = str(resolve_path("asset:tiny-sd3"))
    once = decode_flops(folder, checkpoints.other_parts(folder), (64, 64, None))
    assert once is not None
    assert decode_flops(folder, None, (128, 64, None)) == pytest.approx(2 * once, rel=0.1)
