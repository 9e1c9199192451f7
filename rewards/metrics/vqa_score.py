"""VQAScore by CLIP-FlanT5: how likely is Yes, asked whether the image shows the prompt (Lin et al. 2024, 2404.01291)?

The model is LLaVA's arrangement around FLAN-T5: patches of CLIP ViT-L/14 at 336 pixels, from its last layer but one, go
through two linear layers into the encoder's input, where the question says `<image>`. With the answer Yes and its end,

    value = sqrt(P(Yes) P(end | Yes)),      in [0, 1]

as the package t2v_metrics computes it. The checkpoint's parts are held by T5 and CLIP of transformers. For the same
question to any other vision-language model see `yes_no` with `score: mass`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from flowrl.rewards.base import FunctionReward, Model, Reward, RewardInputs, RewardOutput, output_of, to_uint8
from flowrl.rewards.judges.templates import IMAGE, read_template, template_name
from flowrl.rewards.networks import pretrained
from flowrl.rewards.networks.pretrained import model_of
from flowrl.rewards.networks.qwen_vl import DTYPES, PROMPT, Dtype
from flowrl.runtime.files import read_json
from flowrl.runtime.shapes import Float

LONGEST = 2048  # tokens of a question
INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
WHOLE = ("model.safetensors", "pytorch_model.bin")
SHARED = ("shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "embed_tokens.weight")
VISION, PROJECTOR = "vision_tower.vision_tower.", "mm_projector."
OWNER = "reward 'vqa_score'"


@dataclass(frozen=True, kw_only=True, slots=True)
class VqaScore:
    """VQAScore of image and prompt, in [0, 1], on images padded to squares in CLIP's mean colour, with the package's
    question (Apache-2.0); the larger model needs about 24 GB in bfloat16."""

    model: str = "zhiqiulin/clip-flant5-xxl"
    """A folder or a hub id; zhiqiulin/clip-flant5-xl is the smaller one."""
    revision: str | None = None
    """Branch, tag or commit of `model` on the hub."""
    vision: str = "openai/clip-vit-large-patch14-336"
    """The CLIP for image tower and processor, a folder or a hub id; the checkpoint's own weights come first."""
    tokenizer: str | None = None
    """T5's tokenizer, a folder or a hub id; null takes that in `model`, google/flan-t5-xxl is the same."""
    template: str | None = None
    """A text file with the question, `{prompt}` and `<image>` in it, instead of the published one."""
    answer: str = "Yes"
    """The answer whose probability is the value."""
    dtype: Dtype = "bfloat16"
    """Type of the model; probabilities are computed in float32."""

    def __post_init__(self) -> None:
        if not self.answer.strip():
            raise ValueError("answer must be a word, got an empty one: leave it out for Yes.")
        self.text()
        for option, model in (("model", self.model), ("vision", self.vision), ("tokenizer", self.tokenizer)):
            if model is not None:
                pretrained.check_model(model, what="CLIP" if option == "vision" else "T5", option=option)

    @property
    def models(self) -> tuple[Model, ...]:
        return (model_of(self.model, DTYPES[self.dtype].itemsize), model_of(self.vision, DTYPES[self.dtype].itemsize))

    def text(self) -> str:
        """The question, the package's or the user's."""
        return read_template("clip_flant5", self.template, source="t2v_metrics", once=(PROMPT, IMAGE))

    def build(self, device: torch.device) -> Reward:
        """Loads the networks, the tokenizer and the image processor."""
        from transformers import CLIPImageProcessor, T5Tokenizer

        folder = pretrained.fetch_file(self.model, None, revision=self.revision, owner=OWNER, option="model")
        processor = pretrained.load_processor(
            CLIPImageProcessor, self.vision, owner=OWNER, option="vision", what="CLIP"
        )
        tokenizer = pretrained.load_processor(
            T5Tokenizer, self.tokenizer or str(folder), owner=OWNER, option="tokenizer", what="T5"
        )
        key = ("vqa_score", str(folder), self.vision, str(device), self.dtype)
        network = pretrained.shared_network(key, lambda: load_clip_t5(folder, self.vision, DTYPES[self.dtype], device))
        text = self.text()

        @torch.no_grad()
        def score(inputs: RewardInputs) -> RewardOutput:
            answer = tokenizer(self.answer).input_ids
            values = []
            before, after = text.split(IMAGE)
            for image, prompt in zip(to_uint8(inputs.images), inputs.prompts, strict=True):
                # In the middle of a square of CLIP's mean colour.
                height, width = image.shape[:2]
                side = max(height, width)
                top, left = (side - height) // 2, (side - width) // 2
                square = np.empty((side, side, 3), np.uint8)
                square[:] = [int(255 * value) for value in processor.image_mean]
                square[top : top + height, left : left + width] = image
                pixels = pretrained.process_images(processor, [square])
                pieces = [tokenizer(piece.replace(PROMPT, prompt)).input_ids for piece in (before, after)]
                values.append(float(network(pixels, pieces, answer)))
            return output_of(values, inputs)

        version = (
            f"vqa_score:{self.model}@{fingerprint_of(network)}:{self.vision}:{self.tokenizer or 'own'}:"
            f"{self.answer}:{template_name(text)}:{self.dtype}"
        )
        return FunctionReward(name="vqa_score", score=score, needs=frozenset({"images", "prompts"}), version=version)


class ClipT5(nn.Module):
    """CLIP's image tower, the projector and FLAN-T5."""

    language: Any
    vision: Any
    projector: nn.Sequential

    def __init__(self, language: Any, vision: Any, projector: nn.Sequential, layer: int) -> None:
        super().__init__()
        self.language = language
        self.vision = vision
        self.projector = projector
        self.layer = layer

    def forward(
        self, pixels: Float[Tensor, " 1 3 h w"], pieces: Sequence[Sequence[int]], answer: Sequence[int]
    ) -> Float[Tensor, ""]:
        """The geometric mean of the probabilities of an answer's tokens."""
        weight = next(self.projector.parameters())
        seen = self.vision(pixels.to(weight.device, weight.dtype), output_hidden_states=True)
        patches = self.projector(seen.hidden_states[self.layer][:, 1:])  # without the class token
        before, after = ([*piece] for piece in pieces)
        after = after[: max(0, LONGEST - len(before) - 1)]
        embed = self.language.get_input_embeddings()
        texts = [embed(torch.tensor([ids], dtype=torch.long, device=weight.device)) for ids in (before, after)]
        labels = torch.tensor([answer], device=weight.device)
        with torch.autocast(weight.device.type, enabled=False):
            logits = self.language(inputs_embeds=torch.cat([texts[0], patches, texts[1]], 1), labels=labels).logits
        return torch.exp(-nn.functional.cross_entropy(logits[0].float(), labels[0]))


def fingerprint_of(network: ClipT5) -> str:
    """A short hash of the projector, the image tower and T5's output layer."""
    return pretrained.fingerprint(
        [*network.projector.parameters(), *network.vision.parameters(), network.language.lm_head.weight]
    )


def load_clip_t5(folder: Path, vision: str, dtype: torch.dtype, device: torch.device) -> ClipT5:
    """The frozen network of a checkpoint in the published layout."""
    from transformers import CLIPVisionModel, T5Config, T5ForConditionalGeneration

    settings = read_json(folder / "config.json")
    weights = _weights(folder, dtype)
    shared = next((weights[name] for name in SHARED if name in weights), None)
    projected = _below(PROJECTOR, weights)
    tower = {n.removeprefix("vision_model."): w for n, w in _below(VISION, weights).items() if "position_ids" not in n}
    # Without an output layer of its own T5 would silently take its table of tokens for one.
    if shared is None or not projected or "lm_head.weight" not in weights:
        raise ValueError(
            f"{OWNER}: {str(folder)!r} is not a CLIP-FlanT5: it lacks shared.weight, lm_head.weight or mm_projector.*."
        )
    # T5 has the weights that are neither the projector's nor the image tower's.
    spoken = {n: w for n, w in weights.items() if n not in SHARED and not n.startswith((PROJECTOR, "vision_tower."))}
    config = T5Config.from_dict({name: value for name, value in settings.items() if name != "model_type"})
    config.vocab_size = len(shared)
    language, info = T5ForConditionalGeneration.from_pretrained(
        None, config=config, state_dict={"shared.weight": shared, **spoken}, dtype=dtype, output_loading_info=True
    )
    if wrong := sorted({*info["missing_keys"], *info["unexpected_keys"]}):
        raise ValueError(f"{OWNER}: {len(wrong)} weights of T5 are missing or left over (first: {wrong[0]}).")
    seeing = pretrained.load_network(
        CLIPVisionModel,
        vision,
        device=torch.device("cpu"),
        owner=OWNER,
        option="vision",
        what="CLIP",
        shared=False,
        dtype=dtype,
    )
    # Linear layers of the shapes of some weights, with GELU between.
    projector = nn.Sequential()
    for place in sorted({int(name.split(".")[0]) for name in projected}):
        if place:
            projector.append(nn.GELU())
        rows, columns = projected[f"{place}.weight"].shape
        projector.append(nn.Linear(columns, rows))
    try:
        if tower:
            seeing.load_state_dict(tower)
        projector.load_state_dict(projected)
    except (RuntimeError, KeyError) as error:
        raise ValueError(f"{OWNER}: {str(folder)!r} does not fit {vision!r}: {pretrained.first_line(error)}") from error
    network = ClipT5(language, seeing, projector.to(dtype), int(settings.get("mm_vision_select_layer", -2)))
    return network.to(device).eval().requires_grad_(False)


def _below(prefix: str, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights whose names have this prefix, without the prefix."""
    return {n.removeprefix(prefix): w for n, w in weights.items() if n.startswith(prefix)}


def _weights(folder: Path, dtype: torch.dtype) -> dict[str, Tensor]:
    """All weights of a checkpoint that may lie in several files, in one type."""
    for name in INDEXES:
        if (folder / name).is_file():
            files = sorted(set(read_json(folder / name)["weight_map"].values()))
            break
    else:
        files = [name for name in WHOLE if (folder / name).is_file()][:1]
    if not files:
        raise ValueError(f"{OWNER}: {str(folder)!r} holds none of {', '.join((*INDEXES, *WHOLE))}: fetch it again.")
    found: dict[str, Tensor] = {}
    for file in files:
        found |= {n: w.to(dtype) for n, w in pretrained.read_weights(folder / file, owner=OWNER).items()}
    return found
