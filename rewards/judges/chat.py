"""What a judge is asked and what it answers, whichever program runs it: a server, or a model in this process.

A reward's option `judge` says which one:

    judge: {server: http://127.0.0.1:8000/v1, model: UnifiedReward}      an OpenAI-compatible server
    judge: {model: my/folder-or-hub-id}                                  through transformers, in this process
    judge: {model: world:shapes}                                         of the embedded world, by its detector

Each takes `size: 512`, or `size: [height, width]`: every image is resized to that, whatever its shape, before it is
encoded or read, by Pillow's bicubic filter, which is the default of its `resize`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import numpy as np
import torch
from PIL import Image

from flowrl.config.options import build_parts
from flowrl.rewards.base import Model, load_target
from flowrl.rewards.networks.pretrained import model_of
from flowrl.runtime.shapes import UInt8

PRACTICAL = frozenset({
    "server", "api_key_env", "concurrency", "timeout", "deadline", "retries", "batch_size", "seed", "down_after",
    "requests_per_minute", "tokens_per_minute", "max_tokens_total",
})  # fmt: skip
"""Settings of a judge that do not change what it says: where, how and how fast it is reached."""

Pixels = UInt8[np.ndarray, " h w 3"]

MAX_SIDE = 4096  # of an image that a judge is shown
TOP_LOGPROBS = 20
"""Candidates of a token that are asked for, the most that hosted servers give."""

JudgeImageFormat = Literal["jpeg95", "webp", "png"]
"""How images travel to a server."""
DEFAULT_FORMAT: JudgeImageFormat = "jpeg95"

NO_TOKENS = "max_tokens_total"
"""Why a question was not sent: all tokens that the judge may use have been used."""

WORLD_JUDGE = "world:shapes"
CHATS = {
    "local": "flowrl.rewards.judges.local_chat:LocalChat",
    "server": "flowrl.rewards.judges.server_chat:ServerChat",
    "world": "flowrl.rewards.judges.world_judge:WorldJudge",
}
"""Name -> "module:Class", the options of a judge: a frozen dataclass whose `build(device)` makes the `Chat`."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Question:
    """One user turn, and how it is to be answered."""

    parts: tuple[str | np.ndarray, ...]
    """Texts and 8-bit images [H, W, 3], in the order in which the judge reads them."""
    system: str | None = None
    """The system turn, None for none."""
    max_tokens: int = 1
    """Length of the answer at most."""
    temperature: float = 0.0
    """0 is greedy."""
    top_logprobs: int = 0
    """Candidates of every answered token whose log-probabilities are wanted; 0 asks for none."""
    seed: int | None = None
    """For sampled answers."""
    schema: Mapping[str, Any] | None = None
    """JSON schema of the answer, for servers that hold to one (`structured: true`)."""

    @property
    def is_text(self) -> bool:
        """Whether the answer is read as text, so that one which is cut off at `max_tokens` has failed."""
        return self.max_tokens > 1 and not self.top_logprobs


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What came back: the text, for each token its candidates' natural log-probabilities, or why there is nothing."""

    text: str = ""
    """The answer, empty where it failed."""
    logprobs: tuple[Mapping[str, float], ...] = ()
    """A mapping of candidate text to log-probability for each answered token, where asked for."""
    error: str | None = None
    """A short word such as "timeout", "status_500", "truncated" or "garbage"; None where it succeeded."""
    tokens: int = 0
    """Prompt and answer tokens that the server counted, 0 where unknown."""


class Chat(Protocol):
    """A judge that can be asked; `version` says in the run's manifest which model with which settings."""

    @property
    def version(self) -> str: ...

    def ask(self, questions: Sequence[Question]) -> list[Answer]:
        """Answers in the order of the questions. An item that fails has `error`; nothing is raised for it."""


class ChatOptions(Protocol):
    """The options of a judge; see `CHATS`."""

    def build(self, device: torch.device) -> Chat:
        """Makes the judge; loads its weights, if it runs here."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageSize:
    """What a judge's images are resized to, wherever it runs."""

    size: int | tuple[int, int] | None = None
    """The side of the square that every image becomes, or [height, width]; null leaves images as they are."""

    def __post_init__(self) -> None:
        if self.sides is not None and not 1 <= min(self.sides) <= max(self.sides) <= MAX_SIDE:
            raise ValueError(
                f"size must be 1 to {MAX_SIDE} pixels, one number for a square or [height, width], got {self.size}."
            )

    @property
    def sides(self) -> tuple[int, int] | None:
        """Height and width."""
        return (self.size, self.size) if isinstance(self.size, int) else self.size


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ResizingJudge:
    """A judge that sees every image at one size."""

    chat: Chat
    sides: tuple[int, int]

    @property
    def version(self) -> str:
        return f"{self.chat.version}:size-{self.sides[0]}x{self.sides[1]}"

    def ask(self, questions: Sequence[Question]) -> list[Answer]:
        """Answers in the order of the questions; see `Chat`. An image of several questions is resized once."""
        made: dict[int, np.ndarray] = {}  # by identity: the judge encodes what is one image once as well
        for part in (part for question in questions for part in question.parts):
            if not isinstance(part, str) and id(part) not in made:
                made[id(part)] = resize_image(part, *self.sides)
        return self.chat.ask(
            [
                replace(
                    question, parts=tuple(part if isinstance(part, str) else made[id(part)] for part in question.parts)
                )
                for question in questions
            ]
        )


def resize_image(image: Pixels, height: int, width: int) -> Pixels:
    """An image at another size by Pillow's bicubic filter; as it is where it has that size."""
    if image.shape[:2] == (height, width):
        return image
    return np.asarray(Image.fromarray(image).resize((width, height), Image.Resampling.BICUBIC))


def score_schema(count: int, low: int, high: int, *, key: str = "score", whole: bool = True) -> dict[str, Any]:
    """JSON schema of an answer such as `{"reasoning": "...", "score": [20, 18]}`: reasons, then `count` numbers."""
    number = {"type": "integer" if whole else "number", "minimum": low, "maximum": high}
    return object_schema({"reasoning": {"type": "string"}, key: array_schema(number, count)})


def object_schema(properties: Mapping[str, Any]) -> dict[str, Any]:
    """JSON schema of an object with these properties, all of them and no others, as `strict` servers want it."""
    return {
        "type": "object",
        "properties": dict(properties),
        "required": list(properties),
        "additionalProperties": False,
    }


def array_schema(items: Mapping[str, Any], count: int) -> dict[str, Any]:
    """JSON schema of a list of `count` items."""
    return {"type": "array", "items": dict(items), "minItems": count, "maxItems": count}


def is_server(judge: Mapping[str, Any]) -> bool:
    """Whether a judge runs elsewhere, so that asking it means waiting."""
    return "server" in judge


def judge_models(*judges: Mapping[str, Any]) -> tuple[Model, ...]:
    """The models of judges that run in this process, on a GPU in bfloat16 unless they say otherwise."""
    wide = {"float32": 4}
    here = [one for one in judges if not is_server(one) and one["model"] != WORLD_JUDGE]
    return tuple(model_of(str(one["model"]), wide.get(one.get("dtype") or "", 2)) for one in here)


class OneJudge:
    """What options of rewards that ask one `judge` have in common; each states its fields itself."""

    __slots__ = ()
    judge: Mapping[str, Any]

    @property
    def models(self) -> tuple[Model, ...]:
        return judge_models(self.judge)


def identity_of(judge: Mapping[str, Any]) -> dict[str, Any]:
    """What of a judge decides its answers. One on a server is known by its model's name, wherever it runs."""
    found = {key: judge[key] for key in sorted(judge) if key not in PRACTICAL}
    return {"image_format": DEFAULT_FORMAT, **found, "served": True} if is_server(judge) else found


def with_identities(options: Any) -> Any:
    """Options of a reward in which every judge on a server, however deep it stands, is its identity."""
    if isinstance(options, Mapping):
        if {"server", "model"} <= options.keys():
            return identity_of(options)
        return {name: with_identities(value) for name, value in options.items()}
    return [with_identities(value) for value in options] if isinstance(options, list) else options


def check_chat(judge: Mapping[str, Any], *, owner: str = "judge") -> tuple[ChatOptions, ImageSize]:
    """The checked options of a judge, and the size of its images. Neither calls a server nor loads weights."""
    kind = "server" if is_server(judge) else "world" if judge.get("model") == WORLD_JUDGE else "local"
    own = load_target(CHATS[kind])
    made, size = build_parts([own, ImageSize], judge, owner=owner)
    return made, size


def build_chat(judge: Mapping[str, Any], *, device: torch.device, owner: str = "judge") -> Chat:
    """Makes the judge that `judge` describes."""
    options, size = check_chat(judge, owner=owner)
    chat = options.build(device)
    return chat if size.sides is None else ResizingJudge(chat=chat, sides=size.sides)
