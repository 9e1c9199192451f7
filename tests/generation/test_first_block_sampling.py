"""First-Block Cache in a run, in `flowrl sample` and in an evaluation: what is drawn, resumed, said and kept apart."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tiny_runs import TinyRuns, differences, lasting, lora, metrics, tiny_runs

import flowrl
from flowrl.cli import main
from flowrl.generation.models import find_source
from flowrl.generation.rlg import rlg_settings
from flowrl.generation.sample import load_drawing
from flowrl.generation.sampling_options import SamplingOptions
from flowrl.pretraining.tiny_sd3 import build_tiny_sd3

FORWARD = (
    "recipe=forward",
    "objective.name=nft",
    "sampler.kernel=ode",
    "sampler.noise_level=null",
    "num_iterations=2",
    "sampler.num_steps=4",
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An SD3 with one block more than the tiny one, so that there is one to leave out: its last one always runs."""
    folder = tmp_path_factory.mktemp("model")
    build_tiny_sd3(0, width=32, num_layers=3, vae_channels=(8, 8, 16, 16)).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, model: Path) -> TinyRuns:
    return tiny_runs(tmp_path_factory.mktemp("cached"), model)


@pytest.fixture(scope="module")
def cached(runs: TinyRuns) -> Path:
    return runs.train("cached", *FORWARD, "sampler.first_block_cache=1")


@pytest.mark.slow
def test_a_run_with_a_cache_resumes_to_the_bit(runs: TinyRuns, cached: Path) -> None:
    run = runs.train("resumed", *FORWARD, "sampler.first_block_cache=1", "num_iterations=1")
    assert main(["train", f"resume={run}", "num_iterations=2"]) == 0
    assert metrics(run) == metrics(cached)
    assert lora(run) == lora(cached)
    assert differences(lasting(run), lasting(cached)) == 0
    whole = runs.train("whole", *FORWARD, "num_iterations=1")
    assert metrics(whole)[0]["reward"] != metrics(cached)[0]["reward"]
    assert "first_block_cache: 1.0" in (run / "config.yaml").read_text()
    assert main(["train", f"resume={whole}", "sampler.first_block_cache=0.5"]) == 1


@pytest.mark.slow
def test_samples_and_evaluations_say_so_and_lie_apart(model: Path, tmp_path: Path) -> None:
    how: dict[str, Any] = {"steps": 4, "show": False, "device": "cpu"}
    drawn = [flowrl.sample(str(model), "a red circle", first_block_cache=one, **how) for one in (None, 0, 1e-9, 1)]
    pixels = [one.images[0].tobytes() for one in drawn]
    assert pixels[0] == pixels[1] == pixels[2] != pixels[3]
    assert [", First-Block Cache" in one.drawn_with for one in drawn] == [False, False, True, True]
    with pytest.raises(flowrl.FlowrlError, match=r"`first_block_cache` must lie in \[0, 1\], got 2"):
        flowrl.sample(str(model), "a red circle", first_block_cache=2, **how)
    source = find_source(str(model), sampling=SamplingOptions(first_block_cache=0.1))
    settings = rlg_settings([tmp_path], 2.0)
    with pytest.raises(ValueError, match="`rlg` mixes networks"):
        load_drawing(source, settings, "cpu")

    out = tmp_path / "out"
    asked: dict[str, Any] = {"num_prompts": 1, "samples": 1, "steps": 3, "device": "cpu", "show": False}
    found = flowrl.evaluate(out=out, first_block_cache=0.5, **asked)
    assert any("Drawn with First-Block Cache 0.5: images are not those" in note for note in found.notes)
    told = [json.loads((out / name).read_text()) for name in ("result.json", "model/images/drawn.json")]
    assert told[0]["facts"]["first_block_cache"] == told[1]["first_block_cache"] == 0.5
    with pytest.raises(flowrl.FlowrlError, match=r"drawn with other settings: first_block_cache 0.5 \(now None\)"):
        flowrl.evaluate(out=out, **asked)


@pytest.mark.slow
def test_a_sweep_caches_what_one_network_draws(cached: Path, tmp_path: Path) -> None:
    """Best of two candidates: a threshold that leaves out nothing draws the same images, and one of 1 others."""
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a red circle\ntwo blue squares\n")
    given: dict[str, Any] = {"prompts": prompts, "samples": 2, "features": "none", "device": "cpu", "show": False}
    given |= {"rlg": "1", "best_of": "2", "batch_size": 3, "steps": 4, "rewards": "target=jpeg_compressibility"}
    pixels = []
    for one in (None, 0, 1e-9, 1):
        out = tmp_path / ("whole" if not one else f"{one}")
        found = flowrl.sweep(str(cached), first_block_cache=one, out=out, **given)
        (place,) = (out / "settings" / "best_of_2_rlg_1").glob("images-*/0000.png")
        pixels.append(place.read_bytes())
        assert ("First-Block Cache" in " ".join(found.notes)) == bool(one)
    assert pixels[0] == pixels[1] == pixels[2] != pixels[3]
    alone = tmp_path / "alone"
    shutil.copytree(cached / "lora", alone)
    for wrong, said in (
        ({"rlg": "0,0.5,1"}, "'RLG 0.5' mixes networks"),
        ({"search_rlg": "2"}, "'best of 2, RLG 2' mixes networks"),
        ({"prune": ["4@2"]}, "drops images on the way"),
        ({"first_block_cache": 2}, r"`first_block_cache` must lie in \[0, 1\], got 2"),
        ({"model": str(alone), "base": "asset:tiny-sd15"}, "cannot cache the blocks of UNet2DConditionModel"),
    ):
        with pytest.raises(flowrl.FlowrlError, match=said):
            flowrl.sweep(**{"model": str(cached), "first_block_cache": 0.1, **given, **wrong, "out": tmp_path / "none"})
    assert not (tmp_path / "none").exists()
