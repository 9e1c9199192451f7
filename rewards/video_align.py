"""VideoAlign (VideoReward): visual quality, motion quality and text alignment of clips (Liu et al. 2025).

arXiv 2501.13918. A Qwen2-VL 2B reads up to some frames a second of the clip and a text with the tokens
`<|VQ_reward|>`, `<|MQ_reward|>` and `<|TA_reward|>`; a linear head without bias reads the last hidden state at each.
With the means and standard deviations that the checkpoint's model_config.json holds,

    value = sum over the chosen dimensions k of (output_k - mean_k) / std_k

which for all three is the published Overall. Each normalised dimension is about N(0, 1) and also given as a part.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from flowrl.config.options import unknown_name
from flowrl.rewards import FunctionReward, Reward, RewardInputs, RewardOutput, output_of, to_uint8
from flowrl.rewards.networks import pretrained, qwen_vl
from flowrl.rewards.networks.qwen_vl import DTYPES, Dtype, PositionMode, TokenReward
from flowrl.rewards.networks.video_align_checkpoint import (
    DIMENSIONS,
    OWNER,
    Settings,
    checkpoint_folder,
    checkpoint_of,
    read_settings,
    read_trained_weights,
)

TOKENS = tuple(f"<|{name}_reward|>" for name in DIMENSIONS)
DEFAULT_MODEL = "KwaiVGI/VideoReward"
DEFAULT_BASE = "Qwen/Qwen2-VL-2B-Instruct"
MIN_PIXELS = 128 * 28 * 28  # of a frame, whatever the checkpoint's maximum says: Qwen's own code resizes by this


def check(
    *,
    model: str = DEFAULT_MODEL,
    revision: str | None = None,
    checkpoint: int | None = None,
    base: str = DEFAULT_BASE,
    base_revision: str | None = None,
    dimensions: Sequence[str] = DIMENSIONS,
    normalise: bool = True,
    template: str | None = None,
    position_mode: PositionMode = "sequential",
    dtype: Dtype = "bfloat16",
    batch_size: int = 1,
) -> None:
    """Refuses option values that are wrong, without loading the model."""
    if isinstance(dimensions, str) or not isinstance(dimensions, Sequence) or not dimensions:
        raise ValueError(f"{OWNER}: dimensions must be a list of some of {', '.join(DIMENSIONS)}, got {dimensions!r}.")
    for name in dimensions:
        if name not in DIMENSIONS:
            raise ValueError(f"{OWNER}: {unknown_name('dimension', name, DIMENSIONS)}")
    if len(set(dimensions)) != len(dimensions):
        raise ValueError(f"{OWNER}: dimensions names one twice: {', '.join(dimensions)}.")
    qwen_vl.check_scorer(dtype=dtype, position_mode=position_mode, batch_size=batch_size, owner=OWNER)
    _template(template)
    pretrained.check_file(model, owner=OWNER, option="model")
    pretrained.check_model(base, owner=OWNER, what="Qwen2-VL")


def video_align(
    *,
    device: torch.device,
    model: str = DEFAULT_MODEL,
    revision: str | None = None,
    checkpoint: int | None = None,
    base: str = DEFAULT_BASE,
    base_revision: str | None = None,
    dimensions: Sequence[str] = DIMENSIONS,
    normalise: bool = True,
    template: str | None = None,
    position_mode: PositionMode = "sequential",
    dtype: Dtype = "bfloat16",
    batch_size: int = 1,
) -> Reward:
    """The sum of the chosen dimensions of each clip and prompt; parts VQ, MQ and TA, the same for any choice.

    Frames go to the model as they are; the reference reads an encoded file, whose compression changes them.

    The checkpoint was trained on one template. The one of this package asks for the same things in other words, so its
    scores differ from published ones; for those copy the template of type detailed_special from the repository
    KwaiVGI/VideoAlign (prompt_template.py) into a text file, with `{prompt}` where the prompt goes, and give its path.

    Args:
        device: where the model runs; about 5 GB in bfloat16.
        model: the checkpoint's folder, or a hub id.
        revision: branch, tag or commit of `model` on the hub.
        checkpoint: the number n of checkpoint-<n>, null for the largest.
        base: the Qwen2-VL 2B that it was trained from, a folder or a hub id.
        base_revision: likewise of `base`.
        dimensions: which of VQ, MQ and TA the value sums.
        normalise: whether means and standard deviations of the checkpoint are applied.
        template: a text file instead of this package's.
        position_mode: `sequential` as trained, or `mrope`; see `flowrl.rewards.networks.qwen_vl`.
        dtype: of the backbone; the head runs in float32.
        batch_size: clips that the model sees at once. With one, no score depends on the others; in bfloat16 larger
            batches change the last digits.

    Raises:
        ValueError: if weights or processor cannot be had or do not fit together.
    """
    check(
        model=model, revision=revision, checkpoint=checkpoint, base=base, base_revision=base_revision,
        dimensions=dimensions, normalise=normalise, template=template, position_mode=position_mode, dtype=dtype,
        batch_size=batch_size,
    )  # fmt: skip
    text = _template(template)
    folder = checkpoint_folder(model, revision)
    settings = read_settings(folder, normalise=normalise)
    chosen = checkpoint_of(folder, checkpoint)
    config, processor, token_ids = qwen_vl.load_base(base, TOKENS, revision=base_revision, owner=OWNER)

    def load() -> TokenReward:
        weights = read_trained_weights(chosen, settings, base, base_revision, DTYPES[dtype])
        backbone_weights, head_weights = qwen_vl.split_weights(weights, owner=OWNER)
        backbone = qwen_vl.build_backbone(config, backbone_weights, token_ids, dtype=DTYPES[dtype], owner=OWNER)
        return TokenReward(backbone, _head(head_weights)).to(device).eval().requires_grad_(False)

    # Two rewards of one run often differ in their dimensions only: they share the network.
    key = ("video_align", str(chosen), base, base_revision, str(device), dtype)
    network = pretrained.shared_network(key, load)
    scale = "normalised" if normalise else "raw"
    return FunctionReward(
        name="video_align",
        score=partial(
            _score, network=network, processor=processor, token_ids=token_ids, template=text, settings=settings,
            dimensions=tuple(dimensions), position_mode=position_mode, batch_size=batch_size, device=device,
        ),
        needs=frozenset({"videos", "prompts"}),
        version=f"video_align:{model}/{chosen.name}@{pretrained.fingerprint(network.head.parameters())}:"
        f"{'+'.join(dimensions)}:{scale}:{qwen_vl.template_name(text)}:{position_mode}:{settings.fps:g}fps:"
        f"{settings.max_pixels}px:{dtype}",
    )  # fmt: skip


def _template(path: str | None) -> str:
    return qwen_vl.read_template(path, "video_align.txt", once=(qwen_vl.PROMPT, *TOKENS), owner=OWNER)


def _head(weights: Mapping[str, Tensor]) -> nn.Module:
    outputs, width = weights["weight"].shape if "weight" in weights else (0, 0)
    if outputs not in (1, len(DIMENSIONS)):
        raise ValueError(f"{OWNER}: the checkpoint's head must have 1 or 3 outputs a token, it has {outputs}.")
    return qwen_vl.load_head(nn.Linear(width, outputs, bias=False), weights, owner=OWNER)


@torch.no_grad()
def _score(
    inputs: RewardInputs,
    *,
    network: TokenReward,
    processor: Any,
    token_ids: tuple[int, ...],
    template: str,
    settings: Settings,
    dimensions: tuple[str, ...],
    position_mode: PositionMode,
    batch_size: int,
    device: torch.device,
) -> RewardOutput:
    if inputs.videos is None or inputs.fps is None:
        raise ValueError(f"{OWNER} judges videos with their frames a second: use it with a pipeline that makes them.")
    qwen_vl.check_prompts(inputs.prompts, processor.tokenizer, owner=OWNER)
    texts = [template.replace(qwen_vl.PROMPT, prompt) for prompt in inputs.prompts]
    places = qwen_vl.frame_places(
        inputs.videos.shape[1], inputs.fps, target_fps=settings.fps, count=settings.num_frames
    )
    rows: list[list[float]] = []
    for start in range(0, len(inputs), batch_size):
        clips = [
            qwen_vl.resized_frames(to_uint8(clip[places]), min_pixels=MIN_PIXELS, max_pixels=settings.max_pixels)
            for clip in inputs.videos[start : start + batch_size]
        ]
        batch = qwen_vl.encode(processor, texts[start : start + batch_size], videos=clips)
        with torch.autocast(device.type, enabled=False):
            outputs = network({k: v.to(device) for k, v in batch.items()}, token_ids, position_mode=position_mode)
        # Three outputs a token: each dimension's own at its own token. One output: the token alone tells them apart.
        chosen = outputs.diagonal(dim1=1, dim2=2) if outputs.shape[-1] == len(DIMENSIONS) else outputs[..., 0]
        rows.extend(chosen.double().tolist())
    normal = [[(x - mean) / std for x, (mean, std) in zip(row, settings.constants, strict=True)] for row in rows]
    parts = {name: [row[k] for row in normal] for k, name in enumerate(DIMENSIONS)}
    values = [sum(parts[name][i] for name in dimensions) for i in range(len(inputs))]
    return output_of(values, inputs, parts=parts)
