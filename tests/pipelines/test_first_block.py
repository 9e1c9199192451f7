"""First-Block Cache: what a step without its blocks gives, empty caches at each start, and networks as they were."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_folders import SETTINGS, TINY, save_tiny
from torch import Tensor

from flowrl.config.train import resolve_path
from flowrl.pipelines import family
from flowrl.pipelines.arithmetic.first_block import first_block_cache, refuse_uncached
from flowrl.samplers import Velocity, ode_rollout
from flowrl.training.prompting import caching, encode_prompts, guided

NEVER, ALWAYS = 1e-12, 1e9
"""Thresholds below which nothing that moves is, and above which no block of these networks gets."""
CACHED = {
    "cogvideox",
    "flux",
    "flux_fill",
    "hunyuan_image",
    "hunyuan_video",
    "kontext",
    "ltx_video",
    "lucy_edit",
    "qwen_image",
    "qwen_image_edit",
    "wan",
    "wan_vace",
}
"""Families whose blocks diffusers can cache; those of a SD3 with more blocks than the tiny one has, too."""


def drawn(pipeline: Any, threshold: float, scale: float = 3.0, apart: bool = False, rows: int = 2) -> Tensor:
    """Finished latents of prompts after four steps."""
    cond = encode_prompts(pipeline, ["a red circle", "two blue squares"][:rows])
    x = torch.randn(rows, *pipeline.latent_shape, generator=torch.Generator().manual_seed(0))
    velocity = guided(pipeline, pipeline.network, cond, scale, not apart)
    with torch.no_grad(), caching(pipeline, threshold) as cached:
        return ode_rollout(cached(velocity), x, pipeline.schedule(4, "diffusers"))


@pytest.fixture(scope="module")
def sd3() -> Any:
    """Four blocks, of which the last returns no text."""
    return family("sd3").load(str(resolve_path("asset:tiny-sd3")), dtype=torch.float32, **SETTINGS["sd3"])


def middle_runs(network: Any) -> list[int]:
    """Counts how often the second block runs, since now."""
    runs: list[int] = []
    part = next(network.transformer_blocks[1].children())
    part.register_forward_hook(lambda *_: runs.append(1))
    return runs


def test_a_step_without_its_blocks_adds_what_they_added_before(sd3: Any) -> None:
    blocks, x = sd3.denoiser.transformer_blocks, torch.randn(2, *sd3.latent_shape)
    cond = encode_prompts(sd3, ["a red circle", "two blue squares"])
    times = [torch.full((2,), 900.0), torch.full((2,), 700.0)]
    with torch.no_grad(), first_block_cache(sd3.denoiser, ALWAYS) as cached:
        velocity: Velocity = cached(lambda x, sigma, timestep: sd3.network(x, timestep, cond))
        found = [velocity(x, time, time) for time in times]

    kept: dict[str, tuple[Tensor, ...]] = {}
    hooks = [
        blocks[0].register_forward_hook(lambda *given: kept.update(first=given[-1])),
        blocks[-2].register_forward_hook(lambda *given: kept.update(last=given[-1])),
    ]
    with torch.no_grad():
        torch.testing.assert_close(sd3.network(x, times[0], cond), found[0], rtol=0, atol=0)
        [hook.remove() for hook in hooks]
        added = [last - first for first, last in zip(kept["first"], kept["last"], strict=True)]

        def text_and_image(*given: Any) -> tuple[Tensor, Tensor]:
            return given[-2]["encoder_hidden_states"], given[-2]["hidden_states"]

        hooks = [blocks[0].register_forward_hook(lambda *given: tuple(map(torch.add, given[-1], added)))]
        hooks += [block.register_forward_hook(text_and_image, with_kwargs=True) for block in blocks[1:-1]]
        expected = sd3.network(x, times[1], cond)
        [hook.remove() for hook in hooks]
        whole = sd3.network(x, times[1], cond)
    torch.testing.assert_close(found[1], expected, rtol=0, atol=1e-5)  # float32 sums in another order
    assert float((found[1] - whole).abs().max()) > 1e-3


def test_caches_begin_empty_and_leave_nothing_behind(sd3: Any) -> None:
    plain, runs = drawn(sd3, 0.0), middle_runs(sd3.denoiser)
    assert torch.equal(drawn(sd3, NEVER), plain)
    assert len(runs) == 4
    first = drawn(sd3, ALWAYS)
    assert len(runs) == 5  # the first step alone
    assert not torch.equal(first, plain)
    assert torch.equal(drawn(sd3, ALWAYS), first)
    with pytest.raises(RuntimeError, match="stopped"), caching(sd3, ALWAYS):
        raise RuntimeError("stopped")
    assert torch.equal(drawn(sd3, 0.0), plain)


def test_the_negative_prompt_has_a_cache_of_its_own(sd3: Any) -> None:
    together, apart = drawn(sd3, ALWAYS), drawn(sd3, ALWAYS, apart=True)
    torch.testing.assert_close(apart, together, rtol=0, atol=1e-4)  # products of b and of 2b rows round apart
    torch.testing.assert_close(drawn(sd3, ALWAYS, 1.0, rows=1), drawn(sd3, ALWAYS, 1.0)[:1], rtol=0, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", TINY)
def test_families_are_cached_or_refused(name: str, tmp_path: Path) -> None:
    folder = save_tiny(name, tmp_path / name)
    known: Any = family(name)
    with nullcontext() if name in CACHED else pytest.raises(ValueError, match="cannot cache the blocks of"):
        refuse_uncached(known.meta_denoiser(str(folder)), str(folder))
    if name not in CACHED:
        return
    pipeline = known.load(str(folder), dtype=torch.float32, **SETTINGS.get(name, {}))
    if pipeline.num_sources[0] == 0:
        assert torch.equal(drawn(pipeline, NEVER), drawn(pipeline, 0.0))
        assert drawn(pipeline, ALWAYS).isfinite().all()
