"""Physical foresight coherence: how well V-JEPA 2 foresees a video (MIND-V, arXiv 2512.06628).

A window of frames is cut into context and target; the predictor of V-JEPA 2 (arXiv 2506.09985) guesses the features of
the target from the context alone. What follows the physics the model has seen is guessed well. Letters: B videos of F
frames, N windows of each, n tokens in time-major order, d features.

The paper gives the soft minimum and its temperature 0.1; windows, pooling and target features are choices made here.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, Literal

import torch
from jaxtyping import Float, Float64
from torch import Tensor
from torch.nn.functional import cosine_similarity

from flowrl.rewards import FunctionReward, Reward, RewardInputs, RewardOutput, output_of, to_uint8
from flowrl.rewards.motion import check_min_change, frame_change, videos_of
from flowrl.rewards.networks.pretrained import cannot_load, check_model, expanded, fingerprint, load_network

Pooling = Literal["token", "mean"]
TargetFeatures = Literal["window", "separate"]
DEFAULT_MODEL = "facebook/vjepa2-vitl-fpc64-256"
_OWNER = "reward 'physics'"
_WINDOWS_PER_CALL = 8


def check(
    *,
    model: str = DEFAULT_MODEL,
    revision: str | None = None,
    window: int = 16,
    context: int = 8,
    stride: int = 4,
    pooling: Pooling = "token",
    target_features: TargetFeatures = "window",
    temperature: float = 0.1,
    min_change: float = 0.0,
) -> None:
    """Refuses option values that are wrong, without loading the model."""
    if not 0 < context < window:
        raise ValueError(
            f"{_OWNER}: context must be at least 1 frame and less than window ({window}), the rest of which is to be "
            f"foreseen, got {context}."
        )
    if stride < 1:
        raise ValueError(f"{_OWNER}: stride must be at least 1 frame, got {stride}.")
    if not (math.isfinite(temperature) and temperature > 0):
        raise ValueError(f"{_OWNER}: temperature must be positive, got {temperature}.")
    check_min_change(min_change, owner=_OWNER)
    check_model(model, owner=_OWNER, what="V-JEPA 2")


def physics(
    *,
    device: torch.device,
    model: str = DEFAULT_MODEL,
    revision: str | None = None,
    window: int = 16,
    context: int = 8,
    stride: int = 4,
    pooling: Pooling = "token",
    target_features: TargetFeatures = "window",
    temperature: float = 0.1,
    min_change: float = 0.0,
) -> Reward:
    """The soft minimum over windows of `s_i = cos(predictor(encoder(context_i)), encoder(target_i))`, in [-1, 1].

    The encoder is given the context's frames only for the prediction: run over the whole window, its context tokens
    would have seen the target. Frames after the last whole window are not looked at. Parts: `min_similarity` and
    `mean_similarity` over windows, and `frame_change`.

    A frozen video is foreseen perfectly: watch `frame_change`, and add a reward that asks for motion or set
    `min_change`.

    Args:
        device: where the model runs.
        model: a local folder, or an id on the Hugging Face hub.
        revision: branch, tag or commit on the hub.
        window: frames of a window.
        context: the first frames of a window, from which the others are foreseen.
        stride: frames between the starts of windows.
        pooling: `token` averages the cosines of tokens; `mean` takes the cosine of the mean tokens.
        target_features: `window` encodes the target within its whole window, as in the model's training; `separate`
            encodes its frames alone.
        temperature: of the soft minimum.
        min_change: a positive value is multiplied by `min(1, frame_change / min_change)`; 0 for the published formula.

    Raises:
        ValueError: if the model cannot be had, or window and context do not fit its tubelets; when called, if there
            are no videos, or they are shorter than a window.
    """
    check(
        model=model, revision=revision, window=window, context=context, stride=stride, pooling=pooling,
        target_features=target_features, temperature=temperature, min_change=min_change,
    )  # fmt: skip
    network, processor = _load(model, revision, device)
    tubelet = network.config.tubelet_size
    if window % tubelet or context % tubelet:
        raise ValueError(
            f"{_OWNER}: {model!r} reads {tubelet} frames a token, so window ({window}) and context ({context}) must "
            f"be multiples of {tubelet}."
        )
    similarity = partial(
        _similarity, network=network, context=context, pooling=pooling, target_features=target_features
    )
    weights = fingerprint([network.predictor.proj.weight, network.get_input_embeddings().proj.weight])
    return FunctionReward(
        name="physics",
        score=partial(
            _score, similarity=similarity, processor=processor, crop=network.config.crop_size, window=window,
            stride=stride, temperature=temperature, min_change=min_change, device=device,
        ),
        needs=frozenset({"videos"}),
        version=f"physics:{model}@{weights}:window-{window}:context-{context}:stride-{stride}:{pooling}:"
        f"target-{target_features}:temperature-{temperature:g}:min_change-{min_change:g}:"
        f"{type(processor).__name__}-{network.config.crop_size}:float32",
    )  # fmt: skip


def soft_min(similarities: Float64[Tensor, " n"], *, temperature: float) -> Float64[Tensor, ""]:
    """`sum_i softmax_i((1 - s_i) / temperature) s_i`: between the minimum and the mean; small temperatures go lower."""
    weights = ((1 - similarities) / temperature).softmax(0)
    return (weights * similarities).sum()


def window_starts(frames: int, *, window: int, stride: int) -> list[int]:
    """First frames of the windows that fit: 0, stride, 2 stride, …"""
    return list(range(0, frames - window + 1, stride))


def _load(model: str, revision: str | None, device: torch.device) -> tuple[Any, Any]:
    from transformers import AutoVideoProcessor, VJEPA2Model

    network = load_network(
        VJEPA2Model, model, device=device, revision=revision, owner=_OWNER, option="model", what="V-JEPA 2"
    )
    try:
        processor = AutoVideoProcessor.from_pretrained(expanded(model), revision=revision)
    except OSError as error:
        raise cannot_load(model, error, owner=_OWNER, option="model", what="V-JEPA 2") from error
    return network, processor


@torch.no_grad()
def _score(
    inputs: RewardInputs,
    *,
    similarity: Any,
    processor: Any,
    crop: int,
    window: int,
    stride: int,
    temperature: float,
    min_change: float,
    device: torch.device,
) -> RewardOutput:
    videos = videos_of(inputs, owner=_OWNER, at_least=window)
    starts = window_starts(videos.shape[1], window=window, stride=stride)
    values: list[float] = []
    parts: dict[str, list[float]] = {"min_similarity": [], "mean_similarity": [], "frame_change": []}
    for video in videos:
        frames = torch.from_numpy(to_uint8(video)).permute(0, 3, 1, 2).to(device)
        pixels = processor([frames], return_tensors="pt", do_sample_frames=False)["pixel_values_videos"][0]
        if pixels.shape[-2:] != (crop, crop):
            raise ValueError(
                f"{_OWNER}: the checkpoint's processor gives frames of {list(pixels.shape[-2:])}, and its model counts "
                f"positions for {crop} x {crop}: take a checkpoint whose preprocessor and config agree."
            )
        windows = torch.stack([pixels[start : start + window] for start in starts]).to(device)
        with torch.autocast(device.type, enabled=False):
            s_N = torch.cat([similarity(piece) for piece in windows.split(_WINDOWS_PER_CALL)])
        value, change = float(soft_min(s_N, temperature=temperature)), float(frame_change(video))
        if min_change and value > 0:
            value *= min(1.0, change / min_change)
        values.append(value)
        for name, number in zip(parts, (float(s_N.min()), float(s_N.mean()), change), strict=True):
            parts[name].append(number)
    return output_of(values, inputs, parts)


def _similarity(
    windows: Float[Tensor, " n f 3 h w"], *, network: Any, context: int, pooling: Pooling, target_features: str
) -> Float64[Tensor, " n"]:
    """[N] similarity of what was foreseen and what came, for windows of processed frames."""
    seen: Tensor = network.get_vision_features(windows[:, :context])
    if target_features == "window":
        came = network.get_vision_features(windows)[:, seen.shape[1] :]
    else:
        came = network.get_vision_features(windows[:, context:])
    # Tokens are numbered through the window; the predictor reads positions off these numbers.
    numbers = torch.arange(seen.shape[1] + came.shape[1], device=seen.device).expand(len(windows), -1)
    foreseen = network.predictor(
        encoder_hidden_states=seen,
        context_mask=[numbers[:, : seen.shape[1]]],
        target_mask=[numbers[:, seen.shape[1] :]],
    ).last_hidden_state
    if pooling == "mean":
        foreseen, came = foreseen.mean(1, keepdim=True), came.mean(1, keepdim=True)
    return cosine_similarity(foreseen.double(), came.double(), dim=-1).mean(1)
