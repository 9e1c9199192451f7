"""A judge in this process: any image-and-text model of transformers that has a chat template.

judge: {model: Qwen/Qwen2.5-VL-7B-Instruct, dtype: bfloat16}
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from PIL import Image
from torch import Tensor

from flowrl.config.sections import at_least
from flowrl.rewards.judges.answers import by_text
from flowrl.rewards.judges.chat import Answer, Chat, Question
from flowrl.rewards.networks.pretrained import (
    cannot_load,
    check_model,
    expand_home,
    fingerprint,
    load_network,
    load_processor,
)
from flowrl.runtime.placement import sent_wide, widened
from flowrl.runtime.randomness import counter_seed
from flowrl.runtime.shapes import Float


def load_vision_language(
    model: str, *, revision: str | None, dtype: torch.dtype, device: torch.device, owner: str
) -> tuple[Any, Any]:
    """An image-and-text model of transformers, frozen, and its processor."""
    from transformers import AutoConfig, AutoModelForImageTextToText, AutoProcessor

    try:
        AutoConfig.from_pretrained(expand_home(model), revision=revision)
    except (OSError, ValueError) as error:  # the second for a folder that holds something else
        raise cannot_load(model, OSError(str(error)), owner=owner, option="model", what="vision-language") from error
    given: dict[str, Any] = {"revision": revision, "owner": owner, "what": "vision-language"}
    network = load_network(AutoModelForImageTextToText, model, device=device, dtype=dtype, **given)
    return network, load_processor(AutoProcessor, model, **given)


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalChat:
    """A judge that is a model of this process, its questions put in the words of the checkpoint's own chat template.

    In float32 an answer does not depend on what else is in the batch; in half precision the log-probabilities move in
    the third digit with it. What the checkpoint says about generation (temperature, repetition penalty) is not used. A
    question whose words hold the model's own mark of an image, such as <image> or <|image_pad|>, fails ("image_token").
    """

    model: str
    """A local folder, or an id on the Hugging Face hub."""
    revision: str | None = None
    """Branch, tag or commit on the hub."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Type of weights and arithmetic; null takes bfloat16 on CUDA, where 7 billion weights are then 14 GB, and float32
    elsewhere. The log-probabilities are taken in float32 from the logits."""
    batch_size: int = 8
    """Questions at a time."""
    seed: int = 0
    """Seed of sampled answers to questions without one."""

    def __post_init__(self) -> None:
        at_least(1, self, "batch_size")
        check_model(self.model, what="vision-language")

    def build(self, device: torch.device) -> Chat:
        """Loads the model. Raises ValueError: the model is neither on disk nor on the hub, or has no chat template."""
        dtype = self.dtype or ("bfloat16" if device.type == "cuda" else "float32")
        network, processor = load_vision_language(
            self.model, revision=self.revision, dtype=getattr(torch, dtype), device=device, owner="judge"
        )
        if not processor.chat_template:
            raise ValueError(
                f"judge: {self.model!r} has no chat template: take a model that was tuned to answer questions."
            )
        processor.tokenizer.padding_side = "left"  # so that what comes last in every row is where its answer begins
        if processor.tokenizer.pad_token_id is None:
            processor.tokenizer.pad_token = processor.tokenizer.eos_token
        return LocalJudge(options=replace(self, dtype=dtype), network=network, processor=processor, device=device)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LocalJudge:
    """A model that is loaded, with its processor."""

    options: LocalChat
    network: Any
    processor: Any
    device: torch.device

    @property
    def version(self) -> str:
        weights = fingerprint([self.network.get_output_embeddings().weight.float()])
        return f"local_chat:{self.options.model}@{weights}:{type(self.processor).__name__}:{self.options.dtype}"

    def ask(self, questions: Sequence[Question]) -> list[Answer]:
        """Answers in the order of the questions; see `Chat`."""
        # Only questions of one form go together: every row of a batch has as many images and is answered as long.
        forms: dict[tuple[int, int, bool], list[int]] = {}
        answers = [Answer()] * len(questions)
        token = getattr(self.processor, "image_token", None)
        for place, question in enumerate(questions):
            words = [question.system or "", *(part for part in question.parts if isinstance(part, str))]
            if token and any(token in text for text in words):
                answers[place] = Answer(error="image_token")  # the processor would look for an image there
                continue
            images = sum(not isinstance(part, str) for part in question.parts)
            forms.setdefault((images, question.max_tokens, question.temperature > 0), []).append(place)
        for places in forms.values():
            for start in range(0, len(places), self.options.batch_size):
                batch = places[start : start + self.options.batch_size]
                for place, answer in zip(batch, self._answer([questions[i] for i in batch]), strict=True):
                    answers[place] = answer
        return answers

    def encode(self, questions: Sequence[Question]) -> Any:
        """What the model reads of questions with as many images each, padded on the left, and the answers begun."""
        return self.processor.apply_chat_template(
            [messages_of(question) for question in questions],
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
            processor_kwargs={"padding": True},
        ).to(self.device, dtype=self.network.dtype)

    def log_probs(self, questions: Sequence[Question], rows: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
        """Log-probabilities [b, l] of the tokens of given answers, float32, with gradient; and which there are."""
        inputs, length = dict(self.encode(questions)), max(map(len, rows))
        mask = torch.tensor([[place < len(row) for place in range(length)] for row in rows], device=self.device)
        padded = [[*row, *[self.processor.tokenizer.pad_token_id] * (length - len(row))] for row in rows]
        tokens, asked = torch.tensor(padded, device=self.device), inputs["input_ids"]
        more = {"input_ids": tokens, "attention_mask": mask.to(inputs["attention_mask"].dtype)}
        for name, value in inputs.items():
            if value.shape == asked.shape:  # kinds of tokens too, where a processor tells them
                inputs[name] = torch.cat([value, more.get(name, torch.zeros_like(tokens))], dim=1)
        logits = self.network(**inputs, use_cache=False).logits[:, asked.shape[1] - 1 : -1].float()
        return logits.log_softmax(dim=-1).gather(2, tokens[..., None])[..., 0], mask

    def _answer(self, questions: list[Question]) -> list[Answer]:
        """The answers of one batch."""
        ends, rows, logits, prompt_lengths = self.sample(questions)
        return [
            self._read(question, row, ends, None if logits is None else logits[i], prompt_lengths[i])
            for i, (question, row) in enumerate(zip(questions, rows, strict=True))
        ]

    @torch.no_grad()
    def sample(self, questions: Sequence[Question]) -> tuple[set[int], list[list[int]], Tensor | None, list[int]]:
        """Answers to questions of one form: tokens that end one, tokens up to and with the first of those, logits
        [b, l, v] where asked for, and the lengths of the questions."""
        from transformers import GenerationConfig, LogitsProcessorList

        inputs = self.encode(questions)
        # Tokens that end an answer: a checkpoint may name several, the tokenizer's being one of them.
        given = self.network.generation_config.eos_token_id
        listed = given if isinstance(given, list) else [given]
        ends = {int(token) for token in (*listed, self.processor.tokenizer.eos_token_id) if token is not None}
        # All that a checkpoint might bring along is set, so that the logits are the model's own.
        settings = GenerationConfig(
            max_new_tokens=questions[0].max_tokens,
            do_sample=False,
            num_beams=1,
            repetition_penalty=1.0,
            no_repeat_ngram_size=0,
            temperature=1.0,
            top_k=50,
            top_p=1.0,
            eos_token_id=sorted(ends),
            pad_token_id=self.processor.tokenizer.pad_token_id,
            return_dict_in_generate=True,
            output_logits=True,
        )
        noise = LogitsProcessorList()
        if questions[0].temperature > 0:
            noise.append(GumbelNoise(questions, self.options.seed, prompt_length=inputs["input_ids"].shape[1]))  # type: ignore[arg-type]
        with torch.autocast(self.device.type, enabled=False):
            made = self.network.generate(**inputs, generation_config=settings, logits_processor=noise)
        logits = torch.stack(made.logits, 1) if any(q.top_logprobs for q in questions) else None
        rows = []
        for row in made.sequences[:, inputs["input_ids"].shape[1] :].tolist():
            # What follows the first end token pads it to the longest answer.
            rows.append(row[: next((i + 1 for i, token in enumerate(row) if token in ends), len(row))])
        return ends, rows, logits, inputs["attention_mask"].sum(1).tolist()

    def _read(
        self, question: Question, row: list[int], ends: set[int], logits: Tensor | None, prompt_length: int
    ) -> Answer:
        """One row of a batch."""
        length, ended = len(row), bool(row) and row[-1] in ends
        text = self.processor.tokenizer.decode(row, skip_special_tokens=True)
        logprobs: tuple[dict[str, float], ...] = ()
        if question.top_logprobs and logits is not None:
            if bool(logits[:length].isnan().any()):
                return Answer(error="not_finite")
            logprobs = tuple(self._candidates(position, question.top_logprobs) for position in logits[:length])
        error = "truncated" if question.is_text and not ended else None
        return Answer(text=text, logprobs=logprobs, error=error, tokens=prompt_length + length)

    def _candidates(self, logits: Float[Tensor, " v"], number: int) -> dict[str, float]:
        """The likeliest tokens' log-probabilities by text."""
        values, ids = torch.log_softmax(logits.float(), dim=-1).topk(min(number, len(logits)))
        texts = (self.processor.tokenizer.decode([token]) for token in ids.tolist())
        return by_text(zip(texts, values.tolist(), strict=True))


class GumbelNoise:
    """Makes greedy generation a draw from `softmax(logits / temperature)`: the largest of `logits_v / temperature +
    g_v`, with independent Gumbel noise `g = -log(-log u)` from counters alone. Every row has its own seed, so answers
    do not depend on the rest of the batch."""

    def __init__(self, questions: Sequence[Question], seed: int, *, prompt_length: int) -> None:
        self.temperatures = [question.temperature for question in questions]
        self.seeds = [seed if question.seed is None else question.seed for question in questions]
        self.prompt_length = prompt_length

    def __call__(self, input_ids: Tensor, scores: Float[Tensor, " b v"]) -> Float[Tensor, " b v"]:
        step = input_ids.shape[1] - self.prompt_length
        rows = []
        for temperature, seed, row in zip(self.temperatures, self.seeds, scores, strict=True):
            generator = torch.Generator().manual_seed(counter_seed("answer", seed, step))
            uniform = torch.rand(len(row), generator=generator, dtype=torch.float64).clamp(min=1e-300)
            noise = -torch.log(-torch.log(uniform))
            rows.append(widened(row) / temperature + sent_wide(noise, row.device))
        return torch.stack(rows).to(scores.dtype)


def messages_of(question: Question) -> list[dict[str, Any]]:
    """A question as turns for a chat template, its parts in their order."""
    content: list[dict[str, Any]] = [
        {"type": "text", "text": part} if isinstance(part, str) else {"type": "image", "image": Image.fromarray(part)}
        for part in question.parts
    ]
    turns: list[dict[str, Any]] = [{"role": "user", "content": content}]
    if question.system is not None:
        turns.insert(0, {"role": "system", "content": [{"type": "text", "text": question.system}]})
    return turns
