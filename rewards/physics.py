"""Physical foresight coherence: how well V-JEPA 2 foresees a video (MIND-V, arXiv 2512.06628).

A window of frames is cut into context and target; the predictor of V-JEPA 2 (arXiv 2506.09985) guesses the features of
the target from the context alone. It guesses motion well that follows the physics it has seen. Letters: B videos of F
frames, N windows of each, n tokens in time-major order, d features.

The paper gives the soft minimum and its temperature 0.1; windows, pooling and target features are choices made here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from flowrl.benchmarks.temporal import frame_change
from flowrl.config.sections import at_least, positive
from flowrl.rewards.base import FunctionReward, Reward, RewardInputs, RewardOutput, output_of, to_uint8
from flowrl.rewards.base.frames import videos_of
from flowrl.rewards.motion import check_min_change
from flowrl.rewards.networks.pretrained import OneModel, check_model, fingerprint, load_network, load_processor
from flowrl.runtime.placement import widened
from flowrl.runtime.precision import network_autocast
from flowrl.runtime.shapes import Float

_OWNER = "reward 'physics'"
_WINDOWS_PER_CALL = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Physics(OneModel):
    """MIND-V's foresight on a clip: soft minimum over windows of `cos(predictor(encoder(context)), encoder(target))`.

    The encoder is given the context's frames only for the prediction: run over the whole window, its context tokens
    would have seen the target. Frames after the last whole window are not looked at. Parts: `min_similarity` and
    `mean_similarity` over windows, and `frame_change`. Videos shorter than a window are refused.

    A frozen video is foreseen perfectly: watch `frame_change`, and add a reward for motion or set `min_change`.
    """

    judges: ClassVar[tuple[str, ...]] = ("videos",)
    model: str = "facebook/vjepa2-vitl-fpc64-256"
    """A local folder, or an id on the hub."""
    revision: str | None = None
    """Branch, tag or commit on the hub."""
    window: int = 16
    """Frames of a window."""
    context: int = 8
    """The first frames of a window, from which the others are foreseen."""
    stride: int = 4
    """Frames between the starts of windows."""
    pooling: Literal["token", "mean"] = "token"
    """`token` averages the cosines of tokens; `mean` takes the cosine of the mean tokens."""
    target_features: Literal["window", "separate"] = "window"
    """`window` encodes the target within its whole window, as in the model's training; `separate` its frames alone."""
    temperature: float = 0.1
    """Temperature of the soft minimum."""
    min_change: float = 0.0
    """A positive value is multiplied by `min(1, frame_change / min_change)`; 0 for the published formula."""

    def __post_init__(self) -> None:
        if not 0 < self.context < self.window:
            raise ValueError(
                f"context must be at least 1 frame and less than window ({self.window}), because the reward predicts "
                f"the frames after it, got {self.context}."
            )
        at_least(1, self, "stride")
        positive(self, "temperature")
        check_min_change(self.min_change)
        check_model(self.model, what="V-JEPA 2")

    def build(self, device: torch.device) -> Reward:
        """Loads the model."""
        from transformers import AutoVideoProcessor, VJEPA2Model

        given: dict[str, Any] = {"revision": self.revision, "owner": _OWNER, "what": "V-JEPA 2"}
        network = load_network(VJEPA2Model, self.model, device=device, **given)
        processor = load_processor(AutoVideoProcessor, self.model, **given)
        tubelet = network.config.tubelet_size
        if self.window % tubelet or self.context % tubelet:
            raise ValueError(
                f"{_OWNER}: {self.model!r} reads {tubelet} frames per token, so window ({self.window}) and context "
                f"({self.context}) must be multiples of {tubelet}."
            )
        weights = fingerprint([network.predictor.proj.weight, network.get_input_embeddings().proj.weight])

        @torch.no_grad()
        def score(inputs: RewardInputs) -> RewardOutput:
            window, crop = self.window, network.config.crop_size
            videos = videos_of(inputs, owner=_OWNER, at_least=window)
            starts = window_starts(videos.shape[1], window=window, stride=self.stride)
            values: list[float] = []
            parts: dict[str, list[float]] = {"min_similarity": [], "mean_similarity": [], "frame_change": []}
            for video in videos:
                frames = torch.from_numpy(to_uint8(video)).permute(0, 3, 1, 2).to(device)
                pixels = processor([frames], return_tensors="pt", do_sample_frames=False)["pixel_values_videos"][0]
                if pixels.shape[-2:] != (crop, crop):
                    raise ValueError(
                        f"{_OWNER}: the checkpoint's processor gives frames of {list(pixels.shape[-2:])}, and its "
                        f"model counts positions for {crop} x {crop}: take a checkpoint whose preprocessor and config "
                        f"agree."
                    )
                windows = torch.stack([pixels[start : start + window] for start in starts]).to(device)
                with network_autocast(device):
                    s_N = torch.cat([self._similarity(piece, network) for piece in windows.split(_WINDOWS_PER_CALL)])
                value, change = float(soft_min(s_N, temperature=self.temperature)), float(frame_change(video))
                if self.min_change and value > 0:
                    value *= min(1.0, change / self.min_change)
                values.append(value)
                for name, number in zip(parts, (float(s_N.min()), float(s_N.mean()), change), strict=True):
                    parts[name].append(number)
            return output_of(values, inputs, parts)

        version = (
            f"physics:{self.model}@{weights}:window-{self.window}:context-{self.context}:stride-{self.stride}:"
            f"{self.pooling}:target-{self.target_features}:temperature-{self.temperature:g}:"
            f"min_change-{self.min_change:g}:{type(processor).__name__}-{network.config.crop_size}:float32"
        )
        return FunctionReward(name="physics", score=score, needs=frozenset({"videos"}), version=version)

    def _similarity(self, windows: Float[Tensor, " n f 3 h w"], network: Any) -> Float[Tensor, " n"]:
        """[N] similarity of what was foreseen and what came, for windows of processed frames."""
        seen: Tensor = network.get_vision_features(windows[:, : self.context])
        if self.target_features == "window":
            came = network.get_vision_features(windows)[:, seen.shape[1] :]
        else:
            came = network.get_vision_features(windows[:, self.context :])
        # Tokens are numbered through the window; the predictor reads positions off these numbers.
        numbers = torch.arange(seen.shape[1] + came.shape[1], device=seen.device).expand(len(windows), -1)
        foreseen = network.predictor(
            encoder_hidden_states=seen,
            context_mask=[numbers[:, : seen.shape[1]]],
            target_mask=[numbers[:, seen.shape[1] :]],
        ).last_hidden_state
        if self.pooling == "mean":
            foreseen, came = foreseen.mean(1, keepdim=True), came.mean(1, keepdim=True)
        return cosine_similarity(widened(foreseen), widened(came), dim=-1).mean(1)


def soft_min(similarities: Float[Tensor, " n"], *, temperature: float) -> Float[Tensor, ""]:
    """`sum_i softmax_i((1 - s_i) / temperature) s_i`: between the minimum and the mean; small temperatures go lower."""
    weights = ((1 - similarities) / temperature).softmax(0)
    return (weights * similarities).sum()


def window_starts(frames: int, *, window: int, stride: int) -> list[int]:
    """First frames of the windows that fit: 0, stride, 2 stride, …"""
    return list(range(0, frames - window + 1, stride))
