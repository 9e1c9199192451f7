"""Qwen-VL as a scorer: a small head reads the last hidden state at special tokens (HPSv3, VideoAlign, EditReward).

The text that the model reads is a template with `{prompt}` and one or more reward tokens. The templates in this
package's folder `templates` have the structure that such models expect and wording of their own; a checkpoint's
published scores need the template that it was trained with.

Position ids. Qwen2-VL places the tokens of an image on three axes (M-RoPE). Reward models trained through a forward
pass of their own passed no positions and so trained with plain 0, 1, 2, ... for all tokens: `sequential`. Ports that
call the stock model use the three axes: `mrope`. The two agree on text alone and differ as soon as there is an image.

Letters: b samples, l tokens, k special tokens, d hidden width, o outputs of the head.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from flowrl.config.sections import at_least
from flowrl.rewards.base import Model
from flowrl.rewards.networks import pretrained
from flowrl.rewards.networks.pretrained import model_of
from flowrl.runtime.shapes import Float, Int64, UInt8

PositionMode = Literal["sequential", "mrope"]
Dtype = Literal["bfloat16", "float32"]
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


class QwenFamily(NamedTuple):
    """A generation of Qwen-VL: what messages call it, and its classes in transformers."""

    what: str
    config: str
    processor: str
    model: str


QWEN2_VL = QwenFamily("Qwen2-VL", "Qwen2VLConfig", "Qwen2VLProcessor", "Qwen2VLModel")
QWEN25_VL = QwenFamily("Qwen2.5-VL", "Qwen2_5_VLConfig", "Qwen2_5_VLProcessor", "Qwen2_5_VLModel")
QWEN3_VL = QwenFamily("Qwen3-VL", "Qwen3VLConfig", "Qwen3VLProcessor", "Qwen3VLModel")

HEAD = ("rm_head.",)
PROMPT = "{prompt}"
FACTOR = 28  # pixels of a merged token's side: patches of 14, merged two by two
MAX_ASPECT = 200


def smart_resize(height: int, width: int, *, min_pixels: int, max_pixels: int) -> tuple[int, int]:
    """The size that Qwen2-VL resizes an image to: multiples of 28, nearly the same shape, an area in bounds.

    Both sides are rounded to multiples. If the area is then above `max_pixels`, both sides are divided by
    sqrt(height width / max_pixels) and rounded down; if below `min_pixels`, multiplied likewise and rounded up.

    Raises ValueError: if one side is over 200 times the other.
    """
    if max(height, width) > MAX_ASPECT * min(height, width):
        raise ValueError(f"an image's longer side may be {MAX_ASPECT} times its shorter one, got {height} x {width}.")
    rows, columns = (max(FACTOR, round(side / FACTOR) * FACTOR) for side in (height, width))
    if rows * columns > max_pixels:
        shrink = math.sqrt(height * width / max_pixels)
        rows, columns = (max(FACTOR, math.floor(side / shrink / FACTOR) * FACTOR) for side in (height, width))
    elif rows * columns < min_pixels:
        grow = math.sqrt(min_pixels / (height * width))
        rows, columns = (math.ceil(side * grow / FACTOR) * FACTOR for side in (height, width))
    return rows, columns


def clip_places(num_frames: int, fps: float, *, target_fps: float = 2.0, count: int | None = None) -> list[int]:
    """Which frames of a clip the model sees: an even number, spread uniformly from the first to the last.

    The number is num_frames / fps * target_fps, at least 4 and at most 768 or the clip, rounded to a multiple of 2.

    `count` is a fixed number of frames instead, rounded likewise.
    """
    if num_frames < 2 or not fps > 0:
        raise ValueError(f"a clip needs at least 2 frames and a positive fps, got {num_frames} frames at {fps} fps.")
    if count is None:
        wanted = min(max(num_frames / fps * target_fps, 4), min(768, num_frames) // 2 * 2)
    else:
        wanted = count
    number = round(wanted / 2) * 2
    if not 2 <= number <= num_frames:
        raise ValueError(f"{number} frames are wanted of a clip of {num_frames}: give longer clips.")
    return [round(i * (num_frames - 1) / (number - 1)) for i in range(number)]


def resize_image(image: UInt8[np.ndarray, " h w 3"], *, min_pixels: int, max_pixels: int) -> Image.Image:
    """An image at the size of `smart_resize`, by Pillow's bicubic filter."""
    rows, columns = smart_resize(image.shape[0], image.shape[1], min_pixels=min_pixels, max_pixels=max_pixels)
    return Image.fromarray(image).resize((columns, rows), Image.Resampling.BICUBIC)


def resize_frames(
    frames: UInt8[np.ndarray, " n h w 3"], *, min_pixels: int, max_pixels: int
) -> UInt8[Tensor, " n 3 rows columns"]:
    """A clip's frames at the size of `smart_resize`, by torchvision's bicubic filter with antialiasing."""
    size = smart_resize(frames.shape[1], frames.shape[2], min_pixels=min_pixels, max_pixels=max_pixels)
    pixels = torch.from_numpy(np.ascontiguousarray(frames)).permute(0, 3, 1, 2)
    from torchvision.transforms import InterpolationMode
    from torchvision.transforms import functional as vision

    return vision.resize(pixels, list(size), interpolation=InterpolationMode.BICUBIC, antialias=True)


def newer_name(name: str) -> str:
    """The name of a weight of `Qwen2VLModel` or a later one, from the older `visual.*`, `model.*` or the newer
    `model.visual.*`, `model.language_model.*`.
    """
    if name.startswith("model.") and not name.startswith(("model.visual.", "model.language_model.")):
        return "language_model." + name.removeprefix("model.")
    return name.removeprefix("model.")


def split_weights(
    weights: Mapping[str, Tensor], *, owner: str, heads: tuple[str, ...] = HEAD
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """A checkpoint's weights as transformers' `Qwen2VLModel` names them, without the unread output layer of the
    language model, and those of its head, by the prefixes `heads` (without the prefix if there is one)."""
    backbone, head, unknown = {}, {}, []
    for given, weight in weights.items():
        name = newer_name(given)
        if name.startswith(heads):
            head[name.removeprefix(heads[0]) if len(heads) == 1 else name] = weight
        elif name.startswith(("visual.", "language_model.")):
            backbone[name] = weight
        elif not name.startswith("lm_head."):
            unknown.append(given)
    if unknown or not head:
        what = f"holds {unknown[0]!r}" if unknown else f"has no weights {heads[0]}*"
        raise ValueError(
            f"{owner}: the checkpoint {what}, so it is not a Qwen-VL with a reward head: give another file."
        )
    return backbone, head


def load_base(
    base: str, tokens: Sequence[str], *, revision: str | None, owner: str, family: QwenFamily = QWEN2_VL
) -> tuple[Any, Any, tuple[int, ...]]:
    """The base model's configuration, its processor with the reward tokens added, and the ids of those."""
    import transformers

    load = partial(
        pretrained.load_processor, model=base, revision=revision, owner=owner, option="base", what=family.what
    )
    # Both come by the same call.
    config, processor = load(getattr(transformers, family.config)), load(getattr(transformers, family.processor))
    processor.tokenizer.padding_side = "right"  # causal: what follows a token cannot change it
    processor.tokenizer.add_tokens(list(tokens), special_tokens=True)
    return config, processor, tuple(processor.tokenizer.convert_tokens_to_ids(list(tokens)))


class TokenReward(nn.Module):
    """A Qwen-VL backbone and a float32 head that reads its last hidden state at given tokens."""

    backbone: Any
    head: nn.Module

    def __init__(self, backbone: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = head

    def forward(
        self,
        batch: Mapping[str, Tensor],
        token_ids: Sequence[int],
        *,
        position_mode: PositionMode,
        read: Callable[[Tensor], Tensor] | None = None,
    ) -> Float[Tensor, " b k o"]:
        """The outputs of the head, or of `read`, for a batch of the processor, at each token, in their order."""
        places = token_places(batch["input_ids"], token_ids)
        positions = None
        if position_mode == "sequential":
            b, length = batch["input_ids"].shape
            positions = torch.arange(length, device=batch["input_ids"].device).expand(3, b, length)
        hidden = self.backbone(**batch, position_ids=positions, use_cache=False).last_hidden_state
        rows = torch.arange(len(hidden), device=hidden.device)[:, None]
        return (read or self.head)(hidden[rows, places].float())


def build_network(
    config: Any,
    weights: Mapping[str, Tensor],
    make_head: Callable[[Mapping[str, Tensor]], nn.Module],
    token_ids: Sequence[int],
    *,
    dtype: Dtype,
    device: torch.device,
    owner: str,
    family: QwenFamily = QWEN2_VL,
    heads: tuple[str, ...] = HEAD,
) -> TokenReward:
    """The frozen network of a checkpoint, with the vocabulary of its weights, and `make_head`'s head in float32. Raises
    ValueError: weights or the head are missing or left over, or do not fit the base model."""
    import transformers

    weights, head_weights = split_weights(weights, owner=owner, heads=heads)
    if (name := "language_model.embed_tokens.weight") not in weights:
        raise ValueError(f"{owner}: the checkpoint lacks {name}: give a complete one.")
    rows, width = weights[name].shape
    if width != config.text_config.hidden_size or rows <= max(token_ids):
        raise ValueError(
            f"{owner}: the checkpoint has {rows} tokens of width {width}; the base model's width is "
            f"{config.text_config.hidden_size} and its reward tokens have ids up to {max(token_ids)}: give base: the "
            f"model that the checkpoint was trained from."
        )
    config.text_config.vocab_size = rows
    backbone, info = getattr(transformers, family.model).from_pretrained(
        None, config=config, state_dict=weights, dtype=DTYPES[dtype], output_loading_info=True
    )
    for what in ("missing", "unexpected"):
        if names := sorted(info[f"{what}_keys"]):
            raise ValueError(
                f"{owner}: {len(names)} weights are {what} in the checkpoint (first: {names[0]}): give base: the "
                f"model that it was trained from."
            )
    head = make_head(head_weights)
    try:
        head.load_state_dict({name: weight.float() for name, weight in head_weights.items()})
    except RuntimeError as error:
        raise ValueError(f"{owner}: the checkpoint's head does not fit: {' '.join(str(error).split())}") from error
    return TokenReward(backbone, head).to(device).eval().requires_grad_(False)


def token_places(input_ids: Int64[Tensor, " b l"], token_ids: Sequence[int]) -> Int64[Tensor, " b k"]:
    """The place of each of the tokens in each sample. Raises ValueError: one is missing or there twice."""
    wanted = torch.tensor(list(token_ids), device=input_ids.device)
    found = input_ids[:, None, :] == wanted[None, :, None]
    counts = found.sum(-1)
    if bool((counts != 1).any()):
        sample, token = torch.nonzero(counts != 1)[0].tolist()
        raise ValueError(
            f"sample {sample} holds the reward token with id {token_ids[token]} {int(counts[sample, token])} times; "
            f"it must be there exactly once: correct the template."
        )
    return found.long().argmax(-1)


def encode(
    processor: Any,
    texts: Sequence[str],
    *,
    images: Sequence[Image.Image] | None = None,
    videos: Sequence[Tensor] | None = None,
    resize: bool = False,
) -> dict[str, Tensor]:
    """The input: per sample one user turn of images or clip, if given, then text, and the start of the answer; equally
    many images per sample, one after the other, at their size, or with `resize` at one that the processor takes."""
    kind: list[dict[str, str]] = []
    given: dict[str, Any] = {}
    if images is not None:
        kind = [{"type": "image"}] * (len(images) // len(texts))
        given = {"images": list(images), "images_kwargs": {"do_resize": resize}}
    elif videos is not None:
        kind = [{"type": "video"}]
        given = {"videos": list(videos), "videos_kwargs": {"do_resize": False, "do_sample_frames": False}}
    turns = [[{"role": "user", "content": [*kind, {"type": "text", "text": text}]}] for text in texts]
    chats = processor.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    return dict(processor(text=chats, padding=True, return_tensors="pt", **given))


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenScorer:
    """A loaded `TokenReward`, its processor and template: prompts and images or clips to the head's outputs. `resize`:
    the processor fits images to a size that it takes; `read`: the head, told more than it knows by itself."""

    network: TokenReward
    processor: Any
    token_ids: tuple[int, ...]
    template: str
    position_mode: PositionMode
    device: torch.device
    owner: str
    resize: bool = False
    read: Callable[[Tensor], Tensor] | None = None

    @torch.no_grad()
    def outputs(
        self,
        prompts: Sequence[str],
        *,
        batch_size: int,
        images: Callable[[slice], Sequence[Image.Image]] | None = None,
        videos: Callable[[slice], Sequence[Tensor]] | None = None,
    ) -> Float[Tensor, " b k o"]:
        """The head's outputs at the reward tokens, `batch_size` samples at a time; `images` or `videos` give the
        resized images or clips of some samples, see `encode`."""
        tokens = [token for token in self.processor.tokenizer.get_added_vocab() if token.startswith("<|")]
        for prompt in prompts:  # such a token would end the turn or stand in for an image
            if held := [token for token in tokens if token in prompt]:
                raise ValueError(f"{self.owner}: the prompt {prompt!r} holds the special token {held[0]}: remove it.")
        texts = [self.template.replace(PROMPT, prompt) for prompt in prompts]
        pieces = []
        for start in range(0, len(texts), batch_size):
            part = slice(start, start + batch_size)
            batch = encode(
                self.processor,
                texts[part],
                images=images and images(part),
                videos=videos and videos(part),
                resize=self.resize,
            )
            batch = {name: value.to(self.device) for name, value in batch.items()}
            with torch.autocast(self.device.type, enabled=False):
                pieces.append(self.network(batch, self.token_ids, position_mode=self.position_mode, read=self.read))
        return torch.cat(pieces)


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """A published reward model."""

    name: str
    """Of the reward."""
    tokens: tuple[str, ...]
    """Whose last hidden states are read."""
    make_head: Callable[[int, Mapping[str, Tensor]], nn.Module]
    """The head for a hidden width and the head's weights."""
    family: QwenFamily = QWEN2_VL
    """Of the backbone."""
    heads: tuple[str, ...] = HEAD
    """Prefixes of the head's weights, see `split_weights`."""
    file: str = ""
    """Name of the file of weights."""

    @property
    def owner(self) -> str:
        """The reward, for messages."""
        return f"reward {self.name!r}"


class CheckpointOptions:
    """What options of rewards from a `Checkpoint` share; each states its fields itself."""

    __slots__ = ()
    published: ClassVar[Checkpoint]
    model: str
    revision: str | None
    base: str
    base_revision: str | None
    dtype: Dtype
    batch_size: int

    @property
    def models(self) -> tuple[Model, ...]:
        """The backbone."""
        return (model_of(self.model, DTYPES[self.dtype].itemsize),)

    def check(self) -> None:
        """Refuses a batch of nothing, and models that cannot be there."""
        at_least(1, self, "batch_size")
        pretrained.check_file(self.model, option="model")
        pretrained.check_model(self.base, what=self.published.family.what, option="base")

    def read_weights(self) -> Mapping[str, Tensor]:
        """The checkpoint's weights."""
        owner, file = self.published.owner, self.published.file
        path = pretrained.fetch_file(self.model, file, revision=self.revision, owner=owner, option="model")
        return pretrained.read_weights(path, owner=owner)

    def scorers(
        self,
        texts: Sequence[str],
        device: torch.device,
        *,
        weights: Callable[[], Mapping[str, Tensor]] | None = None,
        identity: tuple[str | None, ...] = (),
        position_mode: PositionMode = "sequential",
        resize: bool = False,
    ) -> list[TokenScorer]:
        """A scorer for each template on one network, shared by rewards of the same model, revision and `identity`."""
        known: dict[str, Any] = {"owner": self.published.owner, "family": self.published.family}
        config, processor, token_ids = load_base(self.base, self.published.tokens, revision=self.base_revision, **known)

        def load() -> TokenReward:
            head = partial(self.published.make_head, config.text_config.hidden_size)
            return build_network(
                config,
                (weights or self.read_weights)(),
                head,
                token_ids,
                dtype=self.dtype,
                device=device,
                heads=self.published.heads,
                **known,
            )

        of_weights = identity or (self.model, self.revision)
        key = (self.published.name, *of_weights, self.base, self.base_revision, str(device), self.dtype)
        shared = partial(
            TokenScorer,
            network=pretrained.shared_network(key, load),
            processor=processor,
            token_ids=token_ids,
            position_mode=position_mode,
            device=device,
            owner=self.published.owner,
            resize=resize,
        )
        return [shared(template=text) for text in texts]
