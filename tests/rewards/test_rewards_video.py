"""Rewards on videos: frames of a reward on images, smoothness in closed form, foresight on a tiny random V-JEPA 2."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pretend_gpu import pretend_gpu
from torch import Tensor
from torchvision.transforms.v2 import functional as transforms

from flowrl.benchmarks.temporal import frame_change
from flowrl.config.rewards import Frames
from flowrl.rewards import (
    FunctionReward,
    Reward,
    RewardInputs,
    RewardOutput,
    build_reward,
    reward_options,
    tensor_output,
)
from flowrl.rewards.base.frames import frame_places, framewise
from flowrl.rewards.base.outputs import check_output
from flowrl.rewards.base.specs import parse_reward_specs
from flowrl.rewards.motion import smoothness
from flowrl.rewards.physics import soft_min, window_starts


def inputs_of(videos: Tensor) -> RewardInputs:
    batch = len(videos)
    return RewardInputs(
        prompts=[f"video {i}" for i in range(batch)],
        images=videos[:, 0],
        metadata=[{"number": i} for i in range(batch)],
        group_ids=torch.zeros(batch, dtype=torch.int64),
        sample_ids=torch.arange(batch),
        videos=videos,
        fps=8.0,
    )


def assert_pointwise(reward: Reward, inputs: RewardInputs) -> None:
    whole = check_output(reward(inputs), len(inputs), reward.name).values
    order = list(reversed(range(len(inputs))))
    torch.testing.assert_close(reward(inputs[order]).values, whole[order], rtol=0, atol=1e-5)
    for i in range(len(inputs)):
        torch.testing.assert_close(reward(inputs[[i]]).values, whole[i : i + 1], rtol=0, atol=1e-5)
    assert len(set(whole.tolist())) == len(inputs), "values that do not differ could not show a mix-up"


# Frames of a reward on images: here the red level of an image, and as parts its square and the item it belongs to.


def red_level(inputs: RewardInputs) -> RewardOutput:
    red = inputs.images[:, 0].mean((1, 2))
    valid = red < 0.9
    failed = int((~valid).sum())
    return RewardOutput(
        values=torch.where(valid, red, torch.nan),
        valid=valid,
        parts={"square": red.square(), "number": torch.tensor([float(m["number"]) for m in inputs.metadata])},
        errors={"too_red": failed} if failed else {},
    )


RED = FunctionReward(
    name="red", score=red_level, needs=frozenset({"images", "metadata"}), version="red-1", differentiable=True
)


def red_videos(rows: list[list[float]]) -> Tensor:
    return torch.tensor(rows)[:, :, None, None, None].expand(-1, -1, 3, 2, 2).contiguous()


def test_which_frames_are_looked_at() -> None:
    assert frame_places(9, policy="first") == [0]
    assert frame_places(3, policy="all") == [0, 1, 2]
    assert frame_places(9, policy="every", count=4) == [0, 4, 8]
    assert frame_places(8, policy="every", count=4) == [0, 4]
    assert frame_places(53, policy="uniform", count=4) == [0, 17, 35, 52]
    assert frame_places(16, policy="uniform", count=4) == [0, 5, 10, 15]
    assert frame_places(4, policy="uniform", count=3) == [0, 2, 3]  # 1.5 goes up
    assert frame_places(3, policy="uniform", count=8) == [0, 1, 2]
    assert frame_places(9, policy="uniform", count=1) == [4]
    for frames in range(1, 30):
        for count in range(1, 12):
            places = frame_places(frames, policy="uniform", count=count)
            assert len(set(places)) == min(frames, count)
            assert places == sorted(places)
            assert 0 <= places[0] <= places[-1] < frames


@pytest.mark.parametrize(
    ("options", "value", "square"),
    [
        ({"policy": "first"}, 0.2, 0.04),
        ({"policy": "all"}, 0.35, (0.04 + 0.64 + 0.01 + 0.09) / 4),
        ({"policy": "every", "count": 2, "reducer": "mean"}, 0.15, 0.025),
        ({"policy": "uniform", "count": 2}, 0.25, 0.065),
        ({"reducer": "min"}, 0.1, 0.01),
        ({"reducer": "top_frac", "fraction": 0.5}, 0.55, (0.64 + 0.09) / 2),
        ({"reducer": "top_frac", "fraction": 0.1}, 0.8, 0.64),
        ({"reducer": "positive_mean"}, 0.35, (0.04 + 0.64 + 0.01 + 0.09) / 4),
    ],
)
@pytest.mark.parametrize("frames_per_call", [1, 8, 64])
def test_framewise_values_and_parts(options: dict[str, Any], value: float, square: float, frames_per_call: int) -> None:
    """Red levels 0.2, 0.8, 0.1, 0.3; parts come from the same frames, and metadata stays with its video."""
    inputs = inputs_of(red_videos([[0.5, 0.5, 0.5, 0.5], [0.2, 0.8, 0.1, 0.3], [0.7, 0.7, 0.7, 0.7]]))
    reward = framewise(RED, Frames(frames_per_call=frames_per_call, **options))
    output = check_output(reward(inputs), 3, "red")
    assert output.values.tolist() == pytest.approx([0.5, value, 0.7])
    assert output.parts["square"].tolist() == pytest.approx([0.25, square, 0.49])
    assert output.parts["number"].tolist() == pytest.approx([0.0, 1.0, 2.0])


def test_positive_mean_leaves_frames_of_0_out() -> None:
    inputs = inputs_of(red_videos([[0.0, 0.4, 0.0, 0.2], [0.0, 0.0, 0.0, 0.0]]))
    output = framewise(RED, Frames(reducer="positive_mean"))(inputs)
    assert output.values.tolist() == pytest.approx([0.3, 0.0])
    assert output.parts["number"].tolist() == pytest.approx([0.0, 1.0])


def test_a_failed_frame_fails_its_video_only_where_it_is_looked_at() -> None:
    inputs = inputs_of(red_videos([[0.2, 1.0, 1.0], [0.2, 0.4, 0.6]]))
    output = check_output(framewise(RED, Frames(reducer="top_frac", fraction=0.5))(inputs), 2, "red")
    assert output.valid.tolist() == [False, True]
    assert output.errors == {"too_red": 1}
    assert output.values[1].item() == pytest.approx(0.6)
    assert framewise(RED, Frames(policy="first"))(inputs).values.tolist() == pytest.approx([0.2, 0.2])


@pytest.mark.parametrize("reducer", [{}, {"reducer": "min"}, {"reducer": "positive_mean"}])
def test_where_there_is_no_float64_none_is_used(reducer: dict[str, Any]) -> None:
    """And the values are those of the host, but for the last digits."""
    videos, ids = torch.rand(2, 5, 3, 16, 16, generator=torch.Generator().manual_seed(0)), torch.arange(2)
    brightness = FunctionReward(
        name="bright", score=lambda inputs: tensor_output(inputs.images.mean((1, 2, 3))),
        needs=frozenset({"images"}), version="1",
    )  # fmt: skip
    rewards = (framewise(brightness, Frames(**reducer)), build_reward("temporal_smoothness"))
    on_host = [reward(inputs_of(videos)).values.tolist() for reward in rewards]
    with pretend_gpu("mps") as findings:
        there = videos.to("mps")
        inputs = replace(inputs_of(videos), videos=there, images=there[:, 0], sample_ids=ids.to("mps"))
        on_device = [reward(inputs).values.tolist() for reward in rewards]
    assert not findings.faults
    assert on_device == [pytest.approx(values, abs=1e-6) for values in on_host]


def test_the_top_fraction_is_counted_exactly() -> None:
    """0.29 of 100 frames are 29, though 0.29 * 100 is below 29 in binary."""
    inputs = inputs_of(red_videos([[0.0] * 72 + [0.5] * 28]))
    assert framewise(RED, Frames(reducer="top_frac", fraction=0.29))(inputs).values.item() == pytest.approx(
        0.5 * 28 / 29
    )


def test_framewise_describes_itself_and_passes_gradients() -> None:
    reward = framewise(replace(RED, waits=True), Frames(policy="uniform", count=2, reducer="min"))
    assert (reward.name, reward.version, reward.kind) == ("red", "red-1:frames-uniform-2-min", "pointwise")
    assert reward.needs == {"videos", "metadata"}
    assert (reward.differentiable, reward.waits) == (True, True)
    videos = red_videos([[0.5, 0.1, 0.2]]).requires_grad_()
    reward(inputs_of(videos)).values.sum().backward()
    assert videos.grad is not None
    assert videos.grad[0].sum((1, 2, 3)).tolist() == [0.0, 0.0, 1.0]


def test_framewise_is_pointwise_on_a_real_reward() -> None:
    noise = torch.rand(3, 5, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    videos = noise * torch.tensor([0.2, 0.6, 1.0])[:, None, None, None, None]
    reward = framewise(build_reward("jpeg_compressibility"), Frames(policy="every", count=2))
    assert_pointwise(reward, inputs_of(videos))
    images = build_reward("jpeg_compressibility")
    each = [images(replace(inputs_of(videos), images=videos[:, i], videos=None)).values for i in (0, 2, 4)]
    torch.testing.assert_close(reward(inputs_of(videos)).values, torch.stack(each).mean(0))


def test_frames_that_cannot_work_are_refused() -> None:
    cases: list[tuple[Any, str]] = [
        ("first", "reward 'red': frames must be a mapping of keys to values or null, got 'first'"),
        ({"policy": "last"}, "frames.policy must be one of first, uniform, every, all, got 'last'"),
        ({"reducer": "max"}, "frames.reducer must be one of"),
        ({"polcy": "all"}, "did you mean 'frames.policy'"),
        ({"policy": "uniform"}, "count must be given with policy 'uniform', got None"),
        ({"policy": "first", "count": 2}, "count means nothing with policy 'first', got 2"),
        ({"policy": "every", "count": 0}, "count must be at least 1, got 0"),
        ({"reducer": "top_frac"}, "fraction must be given with reducer 'top_frac', got None"),
        ({"fraction": 0.5}, "fraction means nothing with reducer 'mean', got 0.5"),
        ({"reducer": "top_frac", "fraction": 1.5}, "above 0 and at most 1, got 1.5"),
        ({"frames_per_call": 0}, "frames_per_call must be at least 1, got 0"),
    ]
    for frames, message in cases:
        with pytest.raises(ValueError, match=message):
            parse_reward_specs([{"name": "red", "frames": frames}])
    (entry,) = parse_reward_specs([{"name": "red", "frames": {"policy": "uniform", "count": 4, "reducer": "mean"}}])
    assert entry.frames == Frames(policy="uniform", count=4)
    with pytest.raises(ValueError, match="frames of reward 'red': it is groupwise"):
        framewise(replace(RED, kind="groupwise"), Frames())
    with pytest.raises(ValueError, match="it looks at whole videos itself"):
        framewise(build_reward("temporal_smoothness"), Frames())
    with pytest.raises(ValueError, match="images are made, not videos"):
        framewise(RED, Frames())(replace(inputs_of(red_videos([[0.0]])), videos=None))


# Smoothness.


def square_at(places: list[int], *, side: int = 64, size: int = 16) -> Tensor:
    """A white square on black, its left edge at `places`; float32 [F, 3, side, side]."""
    video = torch.zeros(len(places), 3, side, side)
    for frame, place in zip(video, places, strict=True):
        frame[:, 24 : 24 + size, place : place + size] = 1.0
    return video


def test_smoothness_in_closed_form() -> None:
    ramp = torch.linspace(0, 1, 9)[:, None, None, None].expand(9, 3, 4, 4)
    flicker = torch.tensor([0.0, 1.0] * 4)[:, None, None, None].expand(8, 3, 4, 4)
    start_and_stop = torch.tensor([0.0, 0.0, 1.0, 1.0])[:, None, None, None].expand(4, 3, 4, 4)
    assert float(smoothness(ramp, cell=1)) == pytest.approx(1.0, abs=1e-6)
    assert float(smoothness(flicker, cell=1)) == 0.0
    assert float(smoothness(start_and_stop, cell=1)) == 0.0
    assert float(smoothness(torch.full((4, 3, 4, 4), 0.3), cell=1)) == 1.0
    bent = torch.tensor([0.0, 0.2, 0.6])[:, None, None, None].expand(3, 3, 4, 4)  # rates 0.2 and 0.4
    assert float(smoothness(bent, cell=1)) == pytest.approx(1 - 0.2 / 0.6, abs=1e-6)
    noise = torch.randn(200, 3, 40, 40, generator=torch.Generator().manual_seed(0))
    assert float(smoothness(noise, cell=1)) == pytest.approx(1 - math.sqrt(3) / 2, abs=0.003)


def test_cells_tell_even_motion_from_flicker() -> None:
    """One pixel a frame through cells of 8: each of the two edges lies in a cell whose mean changes at a constant rate,
    but in 1 of 8 pairs of frames crosses into the next; single pixels jump however evenly the edge moves."""
    moving = square_at(list(range(4, 37)))
    assert float(smoothness(moving, cell=8)) == pytest.approx(1 - 1 / 8, abs=0.01)
    assert float(smoothness(moving, cell=1)) == 0.0
    jumping = square_at([4, 36] * 8)
    assert float(smoothness(jumping, cell=8)) == pytest.approx(0.0, abs=1e-6)
    assert 0.0 <= float(smoothness(square_at([3, 9, 4, 20, 7]), cell=5)) <= 1.0  # 64 pixels are not whole cells of 5


def test_frame_change_is_the_mean_difference() -> None:
    video = torch.rand(5, 3, 6, 7, generator=torch.Generator().manual_seed(0))
    frames = video.double().numpy()
    expected = np.mean([np.abs(b - a).mean() for a, b in pairwise(frames)])
    assert float(frame_change(video)) == pytest.approx(expected, abs=1e-7)


def test_a_frozen_video_is_visible_and_not_the_best() -> None:
    """A square of 1/16 of the image: one pixel a frame changes 2 * 16 of 64^2 pixels, 0.78 %, more than the bound."""
    frozen = square_at([20] * 6)
    slow = square_at([20, 20, 20, 21, 21, 21])
    inputs = inputs_of(torch.stack([frozen, slow, square_at(list(range(20, 26)))]))
    output = check_output(build_reward("temporal_smoothness")(inputs), 3, "temporal_smoothness")
    assert output.values[0] == 0.0
    assert output.values[2] == output.values.max() == output.parts["smoothness"][2]
    moved = 32 / 64**2
    assert output.parts["frame_change"].tolist() == pytest.approx([0.0, moved / 5, moved])
    assert output.values[1].item() == pytest.approx(output.parts["smoothness"][1].item() * moved / 5 / 0.005)
    unbounded = build_reward("temporal_smoothness", options={"min_change": 0})(inputs)
    assert unbounded.values[0] == 1.0


def test_temporal_smoothness_is_pointwise_differentiable_and_marks_broken_videos() -> None:
    videos = torch.rand(3, 4, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    reward = build_reward("temporal_smoothness")
    assert_pointwise(reward, inputs_of(videos))
    videos = torch.cat([videos, torch.full_like(videos[:1], 0.5)]).requires_grad_()
    (gradient,) = torch.autograd.grad(reward(inputs_of(videos)).values.sum(), videos)
    assert bool(gradient.isfinite().all())
    assert bool((gradient[:3].abs().sum((1, 2, 3, 4)) > 0).all())
    broken = videos.detach().clone()
    broken[1, 2, 0, 0, 0] = math.nan
    output = check_output(reward(inputs_of(broken)), 4, "temporal_smoothness")
    assert output.valid.tolist() == [True, False, True, True]
    assert output.errors == {"not_finite": 1}


def test_smoothness_options_and_inputs_that_cannot_work_are_refused() -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"cell": 0}, "cell must be at least 1, got 0"),
        ({"min_change": -0.1}, "min_change is a mean change of pixels"),
    ]
    for options, message in cases:
        with pytest.raises(ValueError, match=message):
            reward_options("temporal_smoothness", options)
    reward = build_reward("temporal_smoothness")
    videos = torch.zeros(1, 2, 3, 8, 8)
    with pytest.raises(ValueError, match="at least 3 frames, got 2"):
        reward(inputs_of(videos))
    with pytest.raises(ValueError, match="scores videos, and images were made"):
        reward(replace(inputs_of(videos), videos=None))


# Foresight.


def test_soft_min() -> None:
    s = torch.tensor([0.9, 0.5, 0.7], dtype=torch.float64)
    for temperature, value in [(0.1, 0.529813), (1.0, 0.67351), (1e9, 0.7)]:
        assert float(soft_min(s, temperature=temperature)) == pytest.approx(value, abs=1e-6)
    assert float(soft_min(s, temperature=1e-3)) == pytest.approx(0.5)


def test_windows() -> None:
    assert window_starts(37, window=16, stride=4) == [0, 4, 8, 12, 16, 20]
    assert window_starts(16, window=16, stride=4) == [0]
    assert window_starts(19, window=16, stride=4) == [0]


@pytest.fixture(scope="module")
def tiny_vjepa(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A V-JEPA 2 folder with random weights: frames of 32 pixels, 2 x 2 patches, 2 frames a token."""
    import transformers

    folder = tmp_path_factory.mktemp("vjepa2")
    config = transformers.VJEPA2Config(
        crop_size=32, patch_size=16, frames_per_clip=8, tubelet_size=2, hidden_size=24, num_attention_heads=2,
        num_hidden_layers=2, pred_hidden_size=24, pred_num_attention_heads=2, pred_num_hidden_layers=2,
        pred_num_mask_tokens=2, num_pooler_layers=1,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.VJEPA2Model(config)
    with torch.no_grad():  # so that random features differ enough for a mix-up to show
        for parameter in model.parameters():
            parameter.mul_(6.0) if parameter.ndim > 1 else None
    model.save_pretrained(folder)
    transformers.VJEPA2VideoProcessor(crop_size=32).save_pretrained(folder)
    return folder


def physics(folder: Path, **options: Any) -> Reward:
    return build_reward("physics", options={"model": str(folder), "window": 8, "context": 4, **options})


def random_videos(batch: int = 3, frames: int = 13) -> Tensor:
    return torch.rand(batch, frames, 3, 40, 60, generator=torch.Generator().manual_seed(1))


def by_hand(folder: Path, video: Tensor, start: int, *, pooling: str, separate: bool) -> float:
    """One window's similarity with the model's own parts, frames resized and normalised here."""
    import transformers

    model = transformers.VJEPA2Model.from_pretrained(folder).eval()
    levels = (video[start : start + 8] * 255).round().to(torch.uint8)
    frames = transforms.resize(levels, [36], interpolation=transforms.InterpolationMode.BILINEAR, antialias=True)
    frames = frames[:, :, 2:34, 11:43].double() / 255  # the middle of 36 x 54
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    pixels = ((frames - mean[:, None, None]) / std[:, None, None]).float()[None]
    with torch.no_grad():
        context = model.encoder(pixel_values_videos=pixels[:, :4]).last_hidden_state
        assert context.shape == (1, 2 * 4, 24)
        whole = model.encoder(pixel_values_videos=pixels).last_hidden_state
        target = model.encoder(pixel_values_videos=pixels[:, 4:]).last_hidden_state if separate else whole[:, 8:]
        guess = model.predictor(context, [torch.arange(8)[None]], [torch.arange(8, 16)[None]]).last_hidden_state
    a, b = guess[0].double().numpy(), target[0].double().numpy()
    if pooling == "mean":
        a, b = a.mean(0, keepdims=True), b.mean(0, keepdims=True)
    return float(np.mean((a * b).sum(1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1)))


@pytest.mark.parametrize(
    ("pooling", "target_features"), [("token", "window"), ("mean", "window"), ("token", "separate")]
)
def test_physics_by_hand(pooling: str, target_features: str, tiny_vjepa: Path) -> None:
    video = random_videos(1)
    separate = target_features == "separate"
    s = np.array([by_hand(tiny_vjepa, video[0], start, pooling=pooling, separate=separate) for start in (0, 4)])
    weights = np.exp((1 - s) / 0.1) / np.exp((1 - s) / 0.1).sum()
    output = physics(tiny_vjepa, pooling=pooling, target_features=target_features)(inputs_of(video))
    assert output.values.item() == pytest.approx(float((weights * s).sum()), abs=2e-5)
    assert output.parts["min_similarity"].item() == pytest.approx(s.min(), abs=2e-5)
    assert output.parts["mean_similarity"].item() == pytest.approx(s.mean(), abs=2e-5)
    assert output.parts["frame_change"].item() == pytest.approx(float(frame_change(video[0])), abs=1e-6)
    assert abs(s[0] - s[1]) > 1e-3, "windows that do not differ could not show a mix-up"


def test_physics_is_pointwise_and_lies_between_minimum_and_mean(tiny_vjepa: Path) -> None:
    reward = physics(tiny_vjepa, stride=1)
    shuffled = random_videos(1)[:, torch.tensor([3, 9, 0, 12, 5, 1, 7, 11, 2, 8, 4, 10, 6])]
    still = random_videos(1)[:, :1].expand(-1, 13, -1, -1, -1)
    inputs = inputs_of(torch.cat([random_videos(), shuffled, still]))
    assert_pointwise(reward, inputs)
    output = reward(inputs)
    low, mean = output.parts["min_similarity"], output.parts["mean_similarity"]
    assert bool(((low - 1e-6 <= output.values) & (output.values <= mean + 1e-6)).all())
    assert output.parts["frame_change"][4] == 0.0
    assert low[4].item() == pytest.approx(mean[4].item(), abs=1e-6)  # all windows of a frozen video are alike


def test_physics_can_ask_for_motion(tiny_vjepa: Path) -> None:
    """A positive value shrinks with the change below the bound; a negative one, which would rise, stays."""
    inputs = inputs_of(random_videos())
    free = physics(tiny_vjepa, temperature=10)(inputs)
    assert float(free.values.min()) < 0.0 < float(free.values.max()), "one sign could not show the difference"
    bounded = physics(tiny_vjepa, temperature=10, min_change=0.9)(inputs)
    share = free.parts["frame_change"] / 0.9
    torch.testing.assert_close(bounded.values, torch.minimum(free.values, free.values * share), rtol=0, atol=1e-6)


def test_physics_options_and_videos_that_cannot_work_are_refused(tiny_vjepa: Path, tmp_path: Path) -> None:
    folder = str(tiny_vjepa)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"context": 16}, r"less than window \(16\).*got 16"),
        ({"context": 0}, "at least 1 frame"),
        ({"stride": 0}, "stride must be at least 1"),
        ({"temperature": 0}, "temperature must be above 0"),
        ({"min_change": 2}, "min_change is a mean change of pixels"),
        ({"pooling": "max"}, "must be one of token, mean, got 'max'"),
        ({"model": "./no-such-folder"}, "there is no folder './no-such-folder'"),
    ]
    for options, message in cases:
        with pytest.raises(ValueError, match=message):
            reward_options("physics", {"model": folder, **options})
    with pytest.raises(ValueError, match=r"reads 2 frames per token, so window \(8\) and context \(3\)"):
        physics(tiny_vjepa, context=3)
    with pytest.raises(ValueError, match="could not load the V-JEPA 2 model"):
        physics(tmp_path)
    reward = physics(tiny_vjepa)
    with pytest.raises(ValueError, match="at least 8 frames, got 7"):
        reward(inputs_of(random_videos(frames=7)))
    assert (
        len({reward.version, physics(tiny_vjepa, stride=2).version, physics(tiny_vjepa, pooling="mean").version}) == 3
    )
