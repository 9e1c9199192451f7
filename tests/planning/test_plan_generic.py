"""What `flowrl plan` counts of stock pipelines that no family is written for, against real ones on the CPU."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from generic_plan_proof import bytes_of, counted, plan_proof, real, route
from generic_proof import SETTINGS
from peft import LoraConfig, inject_adapter_in_model
from tiny_folders import SETTINGS as FAMILY_SETTINGS
from tiny_folders import save_tiny
from tiny_generic_later import save_tiny_generic

from flowrl import cli
from flowrl.commands import plan as command
from flowrl.config.sections import PipelineConfig
from flowrl.config.train import load_config
from flowrl.pipelines import family
from flowrl.pipelines.generic.generic_family import FAMILY
from flowrl.pipelines.generic.stock_recording import WORD
from flowrl.planning import gather as gathering
from flowrl.planning.light_libraries import light_libraries
from flowrl.planning.network import FewBlocks, Trained, measure
from flowrl.planning.stock_route import StockRoute, stock_route
from flowrl.planning.throughput import Pace
from flowrl.runtime.randomness import counter_normal
from flowrl.training.parts import model_family

pytestmark = [
    pytest.mark.filterwarnings("ignore:`FluxPosEmbed` is deprecated:FutureWarning"),  # stock Chroma's own
    pytest.mark.filterwarnings("ignore:`LoraLoaderMixin` is deprecated:FutureWarning"),  # stock PRX's own
]
KINDS = ("PixArtSigmaPipeline", "ChromaPipeline", "MochiPipeline", "Lumina2Pipeline", "PRXPipeline")
"""Noise, packed, a clip, a mask that is counted, a prompt a call; all: tests/trials/generic_plan.py."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Any:
    room = tmp_path_factory.mktemp("stock")
    return cache(lambda name: save_tiny_generic(name, room / name))


@pytest.mark.parametrize("name", KINDS)
def test_flops_rows_and_weights_are_those_of_the_real_pipeline(name: str, folders: Any) -> None:
    planned, found = plan_proof(name, folders(name))
    assert planned == found


@pytest.mark.slow
@pytest.mark.parametrize("name", ["AuraFlowPipeline", "PixArtSigmaPipeline"])
def test_training_costs_what_it_does_with_a_lora(name: str, folders: Any) -> None:
    found, p = route(name, folders(name)), real(name, folders(name))
    denoiser = FAMILY.meta_denoiser(str(folders(name)))
    assert denoiser is not None
    network = measure(
        FewBlocks(least=denoiser), found.recorded.call, trained=Trained(targets=found.targets, rank=2),
        dtype=torch.float32,
    )  # fmt: skip
    assert network.weights.parameters * 4 == sum(bytes_of(part) for part in p.experts.values())
    assert found.targets == p.lora_targets
    # PEFT's own layers, as plans of families count them: those that train here merge a LoRA where that is less work.
    inject_adapter_in_model(LoraConfig(r=2, target_modules=list(found.targets)), p.denoiser)
    assert network.trained == sum(one.numel() for one in p.denoiser.parameters() if one.requires_grad)
    for key, parameter in p.denoiser.named_parameters():
        if "lora_B" in key:
            torch.nn.init.normal_(parameter)
    cond = p.encode([WORD * 16])
    schedule, x = p.schedule(2, "diffusers"), counter_normal(p.asked(2, 1.0).made.shape, "x")
    velocity = p.guided(p.network, cond, None, 1.0)
    answer: list[Any] = []
    forward = counted(lambda: answer.append(velocity(x, schedule.sigma[0], schedule.timestep[0])))
    assert network.forward == forward
    assert network.backward == counted(lambda: answer[0].sum().backward())


@pytest.mark.parametrize(
    ("decoded", "latent", "elements"),
    [
        (([(1, 4, 8, 8)], {}), (4, 8, 8), 256),
        (([(6, 4, 8, 8)], {}), (6, 4, 8, 8), 1536),  # frames as a batch
        (([(1, 4, 2, 8, 8)], {"sound": (1, 16, 3)}), (4, 2, 8, 8), 560),
        (([], {}), (), 0),
    ],
)
def test_all_latents_that_are_decoded_count(decoded: Any, latent: tuple[int, ...], elements: int) -> None:
    given = [torch.empty(shape) for shape in decoded[0]]
    recorded = SimpleNamespace(
        call={}, decoded=([*given, 1.0], {key: torch.empty(shape) for key, shape in decoded[1].items()})
    )
    asked: Any = SimpleNamespace(recorded=recorded, size=(64, 64, None), vae_dtype=torch.float32, videos=False)
    found = StockRoute.drawn(asked, (64, 64, None), 4)
    assert (found.latent, found.elements) == (latent, elements)


# ---- against families ------------------------------------------------------------------------------------------------


def config(folder: Path, room: Path, **pipeline: Any) -> Any:
    room.mkdir(exist_ok=True)
    (room / "prompts.txt").write_text("a red fox\na blue cat on a table\n")
    (room / "run.yaml").write_text(yaml.safe_dump({
        "num_iterations": 2, "prompts_per_step": 2, "group_size": 2, "eval_every": 0,
        "pipeline": {"model": str(folder), "dtype": "float32", "device": "cpu", **pipeline},
        "policy": {"lora_rank": 2, "target_modules": ["to_q", "to_k", "to_v"]},
        "sampler": {"kernel": "flow_sde", "num_steps": 3, "guidance_scale": 2.0},
        "prompts": {"train": str(room / "prompts.txt")}, "rewards": [{"name": "jpeg_compressibility"}],
    }))  # fmt: skip
    return load_config(room / "run.yaml", [])


def planned(given: Any) -> gathering.Plan:
    return gathering.gather(given, "run", model_family(given.pipeline), processes=1, pace=Pace(range=None, told=""))


@pytest.mark.parametrize("name", [pytest.param("sd3", marks=pytest.mark.slow), "flux", "sana"])
def test_a_generic_plan_is_that_of_the_family(name: str, tmp_path: Path) -> None:
    folder = save_tiny(name, tmp_path / name)
    own = planned(config(folder, tmp_path / "own", **FAMILY_SETTINGS.get(name, {})))
    assert own.size is not None
    height, width, _ = own.size
    settings = {**FAMILY_SETTINGS.get(name, {}), "height": height, "width": width, "name": "generic"}
    found = planned(config(folder, tmp_path / "generic", **settings))
    assert (found.family, found.size, found.parts) == ("generic", own.size, own.parts)
    assert found.run == own.run
    for plan in (found, own):
        assert plan.network is not None
        assert plan.cost is not None
        assert plan.memory is not None
    for key in ("parameters", "trained", "attended", "forward", "backward", "saved", "saved_checkpointed", "working"):
        assert getattr(found.network, key) == pytest.approx(getattr(own.network, key), rel=0.01), key
    assert found.cost.stages == pytest.approx(own.cost.stages, rel=0.01)  # type: ignore[union-attr, arg-type]
    if name != "sana":  # whose family has a published decoder's FLOPs of a pixel, and the route those of this one
        assert found.cost.decoding == pytest.approx(own.cost.decoding, rel=0.01)  # type: ignore[union-attr]
    assert found.facts.decode[0] == pytest.approx(own.facts.decode[0], rel=0.01)  # type: ignore[union-attr, index]
    for part, size in own.memory.held.items():  # type: ignore[union-attr]
        assert found.memory.held[part] == pytest.approx(size, rel=0.01), part  # type: ignore[union-attr]


# ---- what is not known, and what is not offered ----------------------------------------------------------------------


def test_what_cannot_be_found_is_told_and_not_guessed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = save_tiny_generic("AuraFlowPipeline", tmp_path / "model")
    for file in (folder / "tokenizer").iterdir():
        file.unlink()
    (folder / "tokenizer").rmdir()
    given = config(folder, tmp_path / "run", **SETTINGS["AuraFlowPipeline"])
    found = planned(given)
    assert (found.network, found.cost, found.memory, found.size) == (None, None, None, None)
    assert "its part tokenizer, a " in found.unknown
    assert "is not here" in found.unknown
    capsys.readouterr()
    assert command.run(cli.parse("plan", [str(tmp_path / "run" / "run.yaml"), "--long"])) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert printed.count("not known: what") == 3  # whether it fits, what it costs, what it holds
    assert "its part tokenizer" in printed


def test_a_size_that_stock_changes_is_told(folders: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made = torch.zeros(1, 3, 64, 64)
    monkeypatch.setattr("diffusers.AutoencoderKL.decode", lambda *given, **named: (made,))
    found = stock_route(family("generic"), str(folders("AuraFlowPipeline")), SETTINGS["AuraFlowPipeline"])
    assert isinstance(found, str)
    assert "draws 64 x 64 where 16 x 16 pixels are asked for" in found


def test_only_what_the_route_takes_is_offered(folders: Any, tmp_path: Path) -> None:
    found = planned(config(folders("AuraFlowPipeline"), tmp_path, **SETTINGS["AuraFlowPipeline"],
                           free_text_encoders=True))  # fmt: skip
    assert not found.choices.forms
    assert not found.choices.splits
    assert not found.choices.videos
    assert found.memory is not None
    assert found.network is not None
    assert found.parts is not None
    assert found.memory.start == 4 * (found.network.parameters + sum(found.parts.values()))


@pytest.mark.parametrize(("name", "videos"), [("AuraFlowPipeline", False), ("SkyReelsV2Pipeline", True)])
def test_the_family_makes_what_its_pipeline_makes(name: str, videos: bool, folders: Any) -> None:
    assert model_family(PipelineConfig(model=str(folders(name)))).videos is videos


@pytest.mark.parametrize(("name", "whole"), [("AuraFlowPipeline", True), ("StableDiffusion3Pipeline", False)])
def test_stock_pipelines_are_imported_whole(
    name: str, whole: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the libraries that a plan of a family leaves out there is no class of stock's to call."""
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": name}))
    met: list[str] = []
    monkeypatch.setattr("flowrl.planning.light_libraries.import_lightly", lambda: met.append("light"))
    given = config(tmp_path, tmp_path / "run")
    assert given.pipeline.model == str(tmp_path)
    with light_libraries(given):
        pass
    assert met == ([] if whole else ["light"])
