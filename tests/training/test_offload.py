"""What rests on the host: no network of it has a weight on the device outside of its use, and no number changes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from pretend_gpu import Pretended, pretend_gpu
from pretend_runs import watched_run
from reward_inputs import inputs_of, random_images
from tiny_folders import SETTINGS, save_tiny
from torch import Tensor, nn

from flowrl.config.train import find_config, load_config
from flowrl.pipelines import family
from flowrl.pipelines.shared.family_pipeline import FamilyPipeline
from flowrl.pipelines.weights.loading_choices import Loading
from flowrl.rewards import FunctionReward, RewardInputs, RewardOutput
from flowrl.rewards.compose import at_rest, build_weighted_sum, networks_of
from flowrl.runtime.placement import Resting
from flowrl.runtime.randomness import counter_normal
from flowrl.session.preflight import preflight

CUDA = torch.device("cuda", 0)
OFFLOAD = ("text_encoders", "vae", "rewards")


def on_device(networks: Any) -> set[bool]:
    """Whether weights and buffers of networks lie on the pretend device."""
    tensors = [tensor for one in networks for tensor in (*one.parameters(), *one.buffers())]
    return {isinstance(tensor, Pretended) for tensor in tensors}


def held(x: Tensor) -> Tensor:
    return x.held if isinstance(x, Pretended) else x


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sd3", "kontext", "flux2"])
def test_parts_rest_and_numbers_stay(name: str, tmp_path: Path) -> None:
    folder = save_tiny(name, tmp_path / "model")

    def drawn(device: Any, how: Loading) -> tuple[dict[str, Tensor], Tensor, FamilyPipeline]:
        settings: dict[str, Any] = SETTINGS.get(name, {})
        p: Any = family(name).load(str(folder), dtype=torch.float32, device=device, how=how, **settings)
        count = min(1, p.num_sources[1])
        cond = p.encode(["a red circle"], [[counter_normal((3, 40, 36), "image").sigmoid()] * count])
        latents = counter_normal((2, *p.latent_shape), "latents").to(device)
        return {key: held(tensor) for key, tensor in cond.tensors.items()}, held(p.decode(latents)), p

    cond, image, _ = drawn("cpu", Loading(offload=OFFLOAD))  # accepted, and nothing else
    with pretend_gpu("cuda") as findings:
        there, decoded, p = drawn(CUDA, Loading(offload=("text_encoders", "vae")))
        encoders = [getattr(p.pipe, part) for part in p.family.encoders]
        assert on_device([*encoders, p.pipe.vae]) == {False}
        assert on_device([p.denoiser]) == {True}
        with p.awake("text_encoders"):
            assert on_device(encoders) == {True}
            with p.awake("text_encoders", "vae"):
                assert on_device([*encoders, p.pipe.vae]) == {True}
            assert on_device(encoders) == {True}  # until the outer use ends
            assert on_device([p.pipe.vae]) == {False}
        assert on_device(encoders) == {False}
        assert not findings.faults
    assert there.keys() == cond.keys()
    assert all(torch.equal(there[key], cond[key]) for key in cond)
    assert torch.equal(decoded, image)


@pytest.mark.slow
def test_a_whole_run_rests(tmp_path: Path, tiny_sd3_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    woken, wake = Counter[str](), Resting._wake

    def counted(self: Resting) -> None:
        assert on_device(self.networks) == {False}
        woken.update(type(network).__name__ for network in self.networks)
        wake(self)

    monkeypatch.setattr(Resting, "_wake", counted)
    short = (
        f"pipeline.model={tiny_sd3_folder}", "pipeline.max_sequence_length=16", "prompts_per_step=1", "group_size=2",
        "micro_batch_size=1", "num_iterations=1", "eval_every=1",
        "sampler.num_steps=2", "sampler.sde_window_range=[0, 1]", "eval.num_prompts=1", "eval.num_steps=1",
        "rewards=[{name: attributes}, {name: jpeg_compressibility, weight: 0.1}]",
    )  # fmt: skip
    runs = {"plain": (), "resting": (f"pipeline.offload=[{', '.join(OFFLOAD)}]",)}
    for name, more in runs.items():
        (tmp_path / name).mkdir()
        assert not woken
        assert not watched_run("tiny_grpo_geneval", tmp_path / name, "cuda", *short, *more).findings.faults
    assert woken["AttributeNet"] == woken["AutoencoderKL"] >= 2
    assert woken["T5EncoderModel"] >= 2
    lora = [(tmp_path / name / "run" / "lora" / "pytorch_lora_weights.safetensors").read_bytes() for name in runs]
    tensors = [data[8 + int.from_bytes(data[:8], "little") :] for data in lora]
    assert tensors[0] == tensors[1]


# ---- rewards ---------------------------------------------------------------------------------------------------------


def test_a_reward_rests_with_what_it_shares() -> None:
    metadata: dict[str, Any] = {"tag": "single_object", "include": [{"class": "circle", "count": 1}]}
    inputs = inputs_of(random_images(2, 32), metadata=[metadata] * 2)
    wanted = build_weighted_sum([{"name": "attributes"}])(inputs).values
    with pretend_gpu("cuda") as findings:
        made = build_weighted_sum([{"name": "attributes"}], device="cuda", rests=True)
        (network,) = networks_of(made)
        assert on_device([network]) == {False}
        on_cuda = replace(inputs, images=inputs.images.to("cuda"))
        assert torch.equal(held(made(on_cuda).values), wanted)
        assert on_device([network]) == {False}
        assert not findings.faults


def scored(inputs: RewardInputs, *, network: Any) -> RewardOutput:
    raise NotImplementedError


def reward_of(score: Any) -> FunctionReward:
    return FunctionReward(name="own", score=score, needs=frozenset(), version="1")


def test_networks_are_found_in_arguments_fields_and_closures() -> None:
    one, two = nn.Linear(2, 2), nn.Linear(2, 2)

    def within(inputs: RewardInputs) -> RewardOutput:
        return scored(inputs, network=two)

    assert list(networks_of(reward_of(partial(scored, network=one)))) == [one]
    assert list(networks_of(reward_of(within))) == [two]
    nested = reward_of(partial(scored, network=[{"a": reward_of(within)}, one, one]))
    assert {id(network) for network in networks_of(nested)} == {id(one), id(two)}


def test_rewards_that_cannot_rest_are_refused_by_name() -> None:
    with pretend_gpu("cuda"):
        with pytest.raises(ValueError, match=r"pipeline\.offload: the networks of reward 'own' were not found: leave"):
            at_rest(reward_of(scored), CUDA, {}, holds=True)
        recurrent = reward_of(partial(scored, network=nn.LSTM(2, 2)))
        with pytest.raises(ValueError, match=r"reward 'own' cannot rest, a LSTM in it holds weights in a form"):
            at_rest(recurrent, CUDA, {}, holds=True)
        plain, known = reward_of(scored), dict[int, Resting]()
        assert at_rest(plain, CUDA, known, holds=False) is plain
        network = nn.Linear(2, 2).to(CUDA)
        for _ in range(2):
            at_rest(reward_of(partial(scored, network=network)), CUDA, known, holds=True)
        assert len(known) == 1


@pytest.mark.parametrize(
    ("config", "override", "message"),
    [
        ("tiny_draft", "pipeline.offload=[vae]", r"names vae, but recipe backprop takes the gradient"),
        ("tiny_adversarial", "pipeline.offload=[rewards]", r"reward 'adversarial' learns on the device"),
        ("tiny_grpo_geneval", "workers", r"names rewards, but workers\.rewards is 2: their networks are on"),
        ("tiny_grpo_geneval", "file", r"names rewards, and reward '?function mine'? is your own code|is your own code"),
    ],
)
def test_what_cannot_rest_is_refused_before_a_model_loads(
    config: str, override: str, message: str, tmp_path: Path
) -> None:
    more: Iterator[str] = iter([override])
    if override == "file":
        path = tmp_path / "mine.py"
        path.write_text("def mine(images, prompts, metadata):\n    return images.mean((1, 2, 3))\n")
        more = iter(["pipeline.offload=[rewards]", f"rewards=[{{file: {path}, function: mine}}]"])
    if override == "workers":
        more = iter(["pipeline.offload=[rewards]", "workers.rewards=2"])
    with pytest.raises(ValueError, match=message):
        preflight(load_config(find_config(config), [*more]))


# ---- the rest itself -------------------------------------------------------------------------------------------------


def test_tied_weights_stay_tied_and_written_buffers_come_back() -> None:
    class Counting(nn.Module):
        calls: Tensor
        scale: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
            self.two.weight = self.one.weight
            self.register_buffer("calls", torch.zeros(1))
            self.register_buffer("scale", torch.full((1,), 2.0))

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return self.two(self.one(x)) * self.scale

    network: Any = Counting().requires_grad_(False)
    weight, wanted = network.one.weight, network(torch.ones(1, 2))
    with pretend_gpu("cuda") as findings:
        torch.__future__.set_overwrite_module_params_on_conversion(False)  # as a real device, which keeps ties
        resting = Resting([network], CUDA)
        for _ in range(2):
            with resting.awake():
                assert network.one.weight is network.two.weight is not weight
                assert torch.equal(held(network(torch.ones(1, 2).to(CUDA))), wanted)
        assert network.one.weight is network.two.weight is weight
        assert on_device([network]) == {False}
        assert not findings.faults
    assert float(network.calls) == 3
    with pretend_gpu("cuda"):
        resting = Resting([network], CUDA)
        with pytest.raises(RuntimeError, match="on purpose"), resting.awake():
            raise RuntimeError("on purpose")
    assert on_device([network]) == {False}
