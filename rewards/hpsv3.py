"""HPSv3: human preference by a fine-tuned Qwen2-VL 7B with a regression head (Ma et al. 2025, arXiv 2508.03789).

The image, resized to about 200,704 pixels (256 merged tokens), comes first in one user turn; the text asks for a
rating of quality and agreement with the prompt and ends in the token `<|Reward|>`. The head

    Linear(3584, 1024), ReLU, Dropout 0.05, Linear(1024, 16), ReLU, Linear(16, 2)        3,687,474 parameters

reads the last hidden state there. Its first output is the score, unbounded, about 0 to 15; its second a spread.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import torch
from torch import nn

from flowrl.rewards import FunctionReward, Reward, RewardInputs, RewardOutput, output_of, to_uint8
from flowrl.rewards.networks import pretrained, qwen_vl
from flowrl.rewards.networks.qwen_vl import DTYPES, Dtype, PositionMode, TokenReward

Scale = Literal["raw", "verl_omni"]
SCALES: dict[str, float] = {"raw": 1.0, "verl_omni": 0.1}
DEFAULT_MODEL = "MizzenAI/HPSv3"
DEFAULT_BASE = "Qwen/Qwen2-VL-7B-Instruct"
FILE = "HPSv3.safetensors"
TOKEN = "<|Reward|>"
PIXELS = 256 * 28 * 28
OWNER = "reward 'hpsv3'"


def check(
    *,
    model: str = DEFAULT_MODEL,
    revision: str | None = None,
    base: str = DEFAULT_BASE,
    base_revision: str | None = None,
    scale: Scale = "raw",
    template: str | None = None,
    position_mode: PositionMode = "sequential",
    dtype: Dtype = "bfloat16",
    batch_size: int = 1,
) -> None:
    """Refuses option values that are wrong, without loading the model."""
    if scale not in SCALES:
        raise ValueError(f"{OWNER}: scale must be one of {', '.join(SCALES)}, got {scale!r}.")
    qwen_vl.check_scorer(dtype=dtype, position_mode=position_mode, batch_size=batch_size, owner=OWNER)
    _template(template)
    pretrained.check_file(model, owner=OWNER, option="model")
    pretrained.check_model(base, owner=OWNER, what="Qwen2-VL")


def hpsv3(
    *,
    device: torch.device,
    model: str = DEFAULT_MODEL,
    revision: str | None = None,
    base: str = DEFAULT_BASE,
    base_revision: str | None = None,
    scale: Scale = "raw",
    template: str | None = None,
    position_mode: PositionMode = "sequential",
    dtype: Dtype = "bfloat16",
    batch_size: int = 1,
) -> Reward:
    """The score of image and prompt, times 0.1 with `scale: verl_omni`.

    The checkpoint was trained on one template. The one of this package asks for the same things in other words, so its
    scores differ from published ones; for those copy the instruction and its ending from the repository
    MizzenAI/HPSv3 (hpsv3/dataset/data_collator_qwen.py) into a text file, with `{prompt}` where the prompt goes, and
    give its path. The weights' licence is not established: look at their page.

    Args:
        device: where the model runs; about 16 GB in bfloat16.
        model: the file HPSv3.safetensors, a folder that holds it, or a hub id.
        revision: branch, tag or commit of `model` on the hub.
        base: the Qwen2-VL 7B whose configuration and processor are used, a folder or a hub id; not its weights.
        base_revision: likewise of `base`.
        scale: `raw`, or `verl_omni` for a tenth.
        template: a text file instead of this package's.
        position_mode: `sequential` as trained, or `mrope` as some ports run it; see `flowrl.rewards.networks.qwen_vl`.
        dtype: of the backbone; the head runs in float32.
        batch_size: images that the model sees at once. One, of some 700 tokens, keeps a GPU busy, and then no score
            depends on the others; in bfloat16 larger batches change the last digits.

    Raises:
        ValueError: if weights or processor cannot be had or do not fit together.
    """
    check(
        model=model, revision=revision, base=base, base_revision=base_revision, scale=scale, template=template,
        position_mode=position_mode, dtype=dtype, batch_size=batch_size,
    )  # fmt: skip
    text = _template(template)
    config, processor, token_ids = qwen_vl.load_base(base, [TOKEN], revision=base_revision, owner=OWNER)

    def load() -> TokenReward:
        path = pretrained.fetch_file(model, FILE, revision=revision, owner=OWNER, option="model")
        weights = pretrained.read_weights(path, owner=OWNER)
        backbone_weights, head_weights = qwen_vl.split_weights(weights, owner=OWNER)
        backbone = qwen_vl.build_backbone(config, backbone_weights, token_ids, dtype=DTYPES[dtype], owner=OWNER)
        head = qwen_vl.load_head(preference_head(config.text_config.hidden_size), head_weights, owner=OWNER)
        return TokenReward(backbone, head).to(device).eval().requires_grad_(False)

    network = pretrained.shared_network(("hpsv3", model, revision, base, base_revision, str(device), dtype), load)
    return FunctionReward(
        name="hpsv3",
        score=partial(
            _score, network=network, processor=processor, token_ids=token_ids, template=text,
            factor=SCALES[scale], position_mode=position_mode, batch_size=batch_size, device=device,
        ),
        needs=frozenset({"images", "prompts"}),
        version=f"hpsv3:{model}@{pretrained.fingerprint(network.head.parameters())}:{scale}:"
        f"{qwen_vl.template_name(text)}:{position_mode}:{PIXELS}px:{dtype}",
    )  # fmt: skip


def preference_head(width: int) -> nn.Sequential:
    """The head on hidden states of a width; names of its weights as in the checkpoint."""
    return nn.Sequential(
        nn.Linear(width, 1024), nn.ReLU(), nn.Dropout(0.05), nn.Linear(1024, 16), nn.ReLU(), nn.Linear(16, 2)
    )


def _template(path: str | None) -> str:
    return qwen_vl.read_template(path, "hpsv3.txt", once=(qwen_vl.PROMPT, TOKEN), owner=OWNER)


@torch.no_grad()
def _score(
    inputs: RewardInputs,
    *,
    network: TokenReward,
    processor: Any,
    token_ids: tuple[int, ...],
    template: str,
    factor: float,
    position_mode: PositionMode,
    batch_size: int,
    device: torch.device,
) -> RewardOutput:
    qwen_vl.check_prompts(inputs.prompts, processor.tokenizer, owner=OWNER)
    texts = [template.replace(qwen_vl.PROMPT, prompt) for prompt in inputs.prompts]
    images = [qwen_vl.resized_image(i, min_pixels=PIXELS, max_pixels=PIXELS) for i in to_uint8(inputs.images)]
    values: list[float] = []
    for start in range(0, len(inputs), batch_size):
        part = slice(start, start + batch_size)
        batch = qwen_vl.encode(processor, texts[part], images=images[part])
        with torch.autocast(device.type, enabled=False):
            outputs = network({k: v.to(device) for k, v in batch.items()}, token_ids, position_mode=position_mode)
        values.extend((factor * outputs[:, 0, 0].double()).tolist())
    return output_of(values, inputs)
