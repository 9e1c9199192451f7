"""Image quality from the words that a vision-language model would go on with: excellent, good, fair, poor or bad.

The model reads the image, a question about its quality, and the beginning of its own answer, so that the next token
is the level. With z the five logits there and w a weight for each level,

    value = sum_k w_k softmax(z)_k

Q-Align (Wu et al. 2023, arXiv 2312.17090) and DeQA (You et al. 2025, arXiv 2501.11561) train models for this. Theirs
need code of their own and an old transformers, so they run behind a server; here the same read-out works on any stock
model of transformers, whose values rank images but are not those scores.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from PIL import Image

from flowrl.config.sections import at_least
from flowrl.rewards.base import FunctionReward, Model, Reward, RewardInputs, RewardOutput, output_of, to_uint8
from flowrl.rewards.judges.answers import expected_level
from flowrl.rewards.judges.local_chat import load_vision_language
from flowrl.rewards.judges.templates import read_template, template_name
from flowrl.rewards.networks.pretrained import check_model, fingerprint, model_of

LEVELS = ("excellent", "good", "fair", "poor", "bad")
WEIGHTS: dict[str, tuple[float, ...]] = {
    "deqa": (5.0, 4.0, 3.0, 2.0, 1.0),
    "qalign": (1.0, 0.75, 0.5, 0.25, 0.0),
    "zero_one": (1.0, 0.8, 0.6, 0.4, 0.2),
}
"""Weights of the levels: DeQA's 5 to 1; Q-Align's, which are (DeQA - 1) / 4; DeQA / 5, as its servers return it."""

DEFAULT_MODEL = "Qwen/Qwen2.5-VL-7B-Instruct"
ANSWER = "<|answer|>"
OWNER = "reward 'level_tokens'"


@dataclass(frozen=True, kw_only=True, slots=True)
class LevelTokens:
    """DeQA-Score or Q-Align: the expected level, in [1, 5] (`deqa`), [0, 1] (`qalign`) or [0.2, 1] (`zero_one`).

    A template is the question, a line `<|answer|>`, and the beginning of the answer, after which the level follows.
    Published scores of Q-Align and DeQA need their models and templates (repositories Q-Future/Q-Align and
    zhiyuanyou/DeQA-Score).
    """

    model: str = DEFAULT_MODEL
    """An image-text-to-text model of transformers with a chat template, a folder or a hub id."""
    revision: str | None = None
    """Branch, tag or commit on the hub."""
    weights: Literal["deqa", "qalign", "zero_one"] = "zero_one"
    """Weights of the five levels; `deqa`, `qalign` or `zero_one`."""
    template: str | None = None
    """A text file instead of this package's own words."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Type of the model; the softmax runs in float64."""
    batch_size: int = 1
    """Images that the model sees at once. With one, no value depends on the others; in bfloat16 larger batches change
    the last digits."""

    def __post_init__(self) -> None:
        at_least(1, self, "batch_size")
        split_template(self.text())
        check_model(self.model, what="vision-language")

    @property
    def models(self) -> tuple[Model, ...]:
        return (model_of(self.model, getattr(torch, self.dtype).itemsize),)

    def text(self) -> str:
        """The template, ours or the user's."""
        return read_template("level_tokens", self.template, once=(ANSWER,))

    def build(self, device: torch.device) -> Reward:
        """Makes the reward."""
        text = self.text()
        question, start = split_template(text)
        network, processor = load_vision_language(
            self.model, revision=self.revision, dtype=getattr(torch, self.dtype), device=device, owner=OWNER
        )
        processor.tokenizer.padding_side = "right"  # causal: what follows a token cannot change it
        levels = level_ids(processor.tokenizer, start)
        turn = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": question}]}]
        chat = processor.apply_chat_template(turn, tokenize=False, add_generation_prompt=True) + start
        rows = network.get_output_embeddings().weight[list(levels)]
        weights = WEIGHTS[self.weights]

        @torch.no_grad()
        def score(inputs: RewardInputs) -> RewardOutput:
            images = [Image.fromarray(image) for image in to_uint8(inputs.images)]
            worth = dict(zip(LEVELS, weights, strict=True))
            values: list[float | None] = []
            for begin in range(0, len(images), self.batch_size):
                part = images[begin : begin + self.batch_size]
                batch = processor(text=[chat] * len(part), images=part, padding=True, return_tensors="pt")
                batch = batch.to(device, network.dtype)  # of whole numbers the device only
                with torch.autocast(device.type, enabled=False):
                    logits = network(**batch, use_cache=False).logits
                last = batch["attention_mask"].sum(-1) - 1
                rows = torch.arange(len(part), device=logits.device)
                for row in logits[rows, last][:, list(levels)].cpu().double().tolist():
                    values.append(expected_level(dict(zip(LEVELS, row, strict=True)), worth))
            return output_of(values, inputs)

        version = (
            f"level_tokens:{self.model}@{fingerprint([rows])}:{self.weights}:"
            f"{template_name(text)}:{type(processor).__name__}:{self.dtype}"
        )
        return FunctionReward(name="level_tokens", score=score, needs=frozenset({"images"}), version=version)


def split_template(text: str) -> tuple[str, str]:
    """The question and the beginning of the answer, without blanks at their ends."""
    question, _, start = (piece.strip() for piece in text.partition(ANSWER))
    if not question or not start:
        raise ValueError(f"the template must have a question before {ANSWER} and an answer's beginning after.")
    return question, start


def level_ids(tokenizer: Any, start: str, words: Sequence[str] = LEVELS) -> tuple[int, ...]:
    """The token of each level where it follows `start` and a blank."""
    before = tokenizer(start, add_special_tokens=False)["input_ids"]
    found: list[int] = []
    for word in words:
        tokens = tokenizer(f"{start} {word}", add_special_tokens=False)["input_ids"]
        if tokens[:-1] != before or tokens[-1] in found:
            raise ValueError(
                f"{OWNER}: the level {word!r} must be one token of its own after {start!r}, the model's tokenizer "
                f"makes {len(tokens) - len(before)}: give another model or another template."
            )
        found.append(tokens[-1])
    return tuple(found)
