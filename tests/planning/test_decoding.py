"""Memory of decoding by `flowrl plan` against bytes of a real decoding on the CPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import diffusers
import pytest
import torch
from counted_operations import peak_on_cpu
from tiny_folders import TINY, save_tiny
from torch import Tensor

from flowrl.config.base import find_config
from flowrl.config.train import load_config
from flowrl.pipelines import family
from flowrl.pipelines.shared.family_pipeline import FamilyPipeline
from flowrl.planning.decoding import decode_peaks
from flowrl.planning.memory import GIB
from flowrl.planning.traces import Trace
from flowrl.runtime.files import read_json
from flowrl.training.parts import model_family

pytestmark = pytest.mark.slow


def drawn_vae(model: Path) -> Any:
    config = read_json(model / "vae" / "config.json", finite=False)
    return getattr(diffusers, config["_class_name"]).from_config(config).eval()


@pytest.mark.parametrize("name", TINY)
def test_decoding_makes_what_it_makes_on_the_cpu(name: str, tmp_path: Path) -> None:
    """Of every family: its own `decode` of a tiny autoencoder, with numbers in it."""
    own: Any = family(name)
    model = save_tiny(name, tmp_path / name)
    given: dict[str, Any] = {"height": 64, "width": 64, **({"num_frames": 33} if own.videos else {})}
    found = decode_peaks(own, str(model), (64, 64, given.get("num_frames")))
    assert found is not None

    def constants(p: FamilyPipeline) -> dict[str, Tensor]:
        try:
            found: dict[str, Tensor] = own.constants(p)
        except AttributeError:  # those of a scheduler, which decoding does not ask for
            return {}
        return found

    p = FamilyPipeline(
        replace(own, constants=constants), own.card(str(model)), own.options(**given),
        pipe=SimpleNamespace(vae=drawn_vae(model)), denoisers={}, dtype=torch.float32, device=torch.device("cpu"),
        tokens=1,
    )  # fmt: skip
    latent = torch.zeros(1, *p.latent_shape)
    with torch.no_grad(), Trace() as trace:
        own.decode(p, latent)
    assert found[0] == pytest.approx(trace.peak, rel=0.1)
    if own.videos:  # on a CPU their convolutions take several times as much for a workspace
        return

    @torch.no_grad()
    def decode() -> None:
        own.decode(p, latent)

    seen = peak_on_cpu(decode)
    assert found[0] <= 1.02 * seen


@pytest.mark.parametrize(("model", "gib"), [
    ("Qwen/Qwen-Image", 6.76), ("stabilityai/stable-diffusion-3.5-medium", 3.0),
])  # fmt: skip
def test_decoding_an_image_of_1024_pixels(model: str, gib: float) -> None:
    own: Any = model_family(replace(load_config(find_config("tiny_grpo_geneval")).pipeline, name=None, model=model))
    found = decode_peaks(own, model, (1024, 1024, None))
    assert found is not None
    assert found[0] / GIB == pytest.approx(gib, rel=0.01)


def test_tiles_bound_what_a_long_clip_makes() -> None:
    """480 x 832 x 81 in tiles makes 1.69 GiB when all of it is run, which takes 15 s; whole it makes 7.6."""
    found = decode_peaks(family("wan"), "Wan-AI/Wan2.1-T2V-1.3B-Diffusers", (480, 832, 81))
    assert found is not None
    assert found[0] / GIB == pytest.approx(7.62, rel=0.01)
    assert 1.69 < found[1] / GIB < 2.5
