"""A model family as one frozen object, and the pipeline that every family has: `Family`, `FamilyPipeline`.

A family's file holds its data and the functions in which it differs; everything else is here, once. Hooks take the
pipeline `p` (or, before weights load, the checkpoint's `Card`) first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from flowrl.config.options import build_options
from flowrl.pipelines.arithmetic.attention_words import UNMASKED, Attends, Known
from flowrl.pipelines.arithmetic.compiling import check_compile, experts_of
from flowrl.pipelines.places import known_checkpoints
from flowrl.pipelines.places.model_folders import check_parts, no_pipeline
from flowrl.pipelines.shared import cards, common, stock_schedules
from flowrl.pipelines.shared.cards import Card, Grid, ImageOptions, Size, VideoOptions
from flowrl.pipelines.shared.like_blocks import block_kinds, fewest, names_a_block, with_blocks
from flowrl.pipelines.shared.prompt_embeddings import FamilyEmbeddings, Sources, num_cut
from flowrl.pipelines.weights import stock_loading
from flowrl.pipelines.weights.loading_choices import AT_ONCE, Loading
from flowrl.pipelines.weights.lora import check_targets
from flowrl.pipelines.weights.quantize import check_quantize
from flowrl.pipelines.weights.stock_loading import Later, Read
from flowrl.runtime.placement import Resting, awake
from flowrl.runtime.precision import in_arithmetic, refuse_unable
from flowrl.samplers.guidance import Network, TrainNegative, Velocity
from flowrl.trajectory import Conditioning, Schedule


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """A model family: its data, and the functions in which it differs from others. Stands in its file as `FAMILY`."""

    name: str
    """Its name, also that of its file."""
    title: str
    """Its name for people."""
    network: Any
    """Class of the denoiser."""
    lora_targets: tuple[str, ...]
    """Layers that published recipes train."""
    encoders: tuple[str, ...]
    """Parts that embed prompts, which can be freed."""
    denoisers: tuple[str, ...] = ("transformer",)
    """Parts that denoise: one, or experts of which a checkpoint may have fewer."""
    exact: tuple[str, ...] = ("vae",)
    """Parts in float32 whatever the dtype."""
    spared: tuple[str, ...] = ()
    """Parts that a checkpoint may lack."""
    options: type[ImageOptions] = ImageOptions
    """Its options."""
    length: int = 512
    """Tokens of a prompt unless told otherwise."""
    num_sources: tuple[int, int] | None = (0, 0)
    """Least and most source images of a prompt; None if checkpoint and options decide, see `count_sources`."""
    sources_option: str | None = None
    """The option that sets their number."""
    clips: tuple[str, ...] = ()
    """Keys of a prompt's row whose clips are sources too, before its images."""
    needed_clips: tuple[str, ...] = ()
    """Those of them that every prompt has."""
    attention: Attends = UNMASKED
    """How its denoiser attends."""
    stock_options: Mapping[str, Any] | None = None
    """Further arguments of the stock class's `from_pretrained`."""

    grid: Callable[[Any], Grid]
    """Layout of latents, of the denoiser's configuration."""
    own_size: Callable[[Card], Size]
    """The default drawn size."""
    embed: Callable[[FamilyPipeline, str, Sequence[Tensor]], dict[str, Tensor]]
    """Tensors of one row for a prompt, and for its source images if `embed_sources` is None."""
    arguments: Callable[[FamilyPipeline, Tensor, Tensor, Conditioning], dict[str, Any]]
    """Arguments of the denoiser, for latents in the pipeline's dtype at timesteps [b]."""
    conditioning: Callable[[FamilyPipeline, int], dict[str, Tensor]]
    """What `embed` and guidance give for one prompt of so many tokens, without numbers (`common.meta`)."""
    schedule: Callable[[FamilyPipeline, int, str, float | None], Schedule]
    """Noise levels for a number of steps, a grid and a shift."""

    read: Callable[[FamilyPipeline, Any, Tensor], Tensor] = lambda p, output, x: output
    """The denoiser's answer as latents."""
    evaluate: Callable[[FamilyPipeline, Tensor, Tensor, Conditioning], Tensor] = common.predict_velocity
    """Velocity in float32."""
    guided: Callable[[FamilyPipeline, common.Guidance], Velocity] = lambda p, asked: common.two_pass_guidance(asked)
    """Guidance of a network."""
    passes: Callable[[Card | None, float], int] = lambda card, scale: 1 if scale == 1 else 2
    """Network rows of guidance at a scale; the card is None for an unknown checkpoint."""
    memory: Callable[[Card, Any, float, int], bool] = lambda card, options, scale, num_steps: False
    """Whether guidance at a scale goes by earlier steps (`flowrl.samplers.path_memory`), in so many steps."""
    decode: Callable[[FamilyPipeline, Tensor], Tensor] = lambda p, z: common.decode(p.pipe.vae, z)
    """Images in [-1, 1] as the autoencoder gives them."""
    encode: Callable[[FamilyPipeline, Tensor], Tensor] = lambda p, x: common.encode(p.pipe.vae, x)
    """Latents of images in [-1, 1] as the autoencoder takes them."""
    factors: Callable[[Mapping[str, Any]], tuple[int, int]] = lambda vae: (common.pixels_per_latent(vae), 1)
    """Pixels of a latent's side and frames of a latent frame, of the autoencoder's configuration."""
    state: Callable[[FamilyPipeline], tuple[int, ...]] = lambda p: p.grid_shape
    """Shape of the denoised tensor, if it is more than the latent of an image or clip."""
    constants: Callable[[FamilyPipeline], dict[str, Tensor]] = lambda p: {}
    """Tensors that a loaded checkpoint keeps on its device."""
    positions: Callable[[FamilyPipeline], dict[str, Tensor]] = lambda p: {}
    """Tensors of the drawn size."""
    embed_sources: Callable[[FamilyPipeline, Sequence[Tensor]], dict[str, Tensor]] | None = None
    """Tensors of one row for a prompt's source images, if they are encoded separately."""
    count_sources: Callable[[Card, Any], tuple[int, int]] | None = None
    """Least and most source images, of checkpoint and options."""
    source_size: Callable[[Card, Any, Size], tuple[int, int]] | None = None
    """Height and width of a source image whose tokens join the drawn ones; None if there are none."""
    tokens: Callable[[Card, Any], int] | None = None
    """Tokens to cut or pad prompts to; None takes `max_sequence_length`, or `length`."""
    longest: Callable[[Card], int] | None = None
    """Most tokens of a prompt, if limited."""
    seen_tokens: Callable[[Card, int], int] = lambda card, length: length
    """Tokens of text that the denoiser reads for prompts of a length."""
    refuse: Callable[[Card], None] = lambda card: None
    """Refuses checkpoints that look like the family's and are not."""
    suits: Callable[[Card, Any], object] = lambda card, options: None
    """Refuses options that the checkpoint does not have."""
    check_scheduler: Callable[[str, Mapping[str, Any]], None] = stock_schedules.check_euler_scheduler
    """Refuses schedulers whose levels `schedule` does not visit."""
    stock_class: Callable[[Card, Any], str | None] = lambda card, options: card.stock
    """The stock class to load with."""
    prepare: Callable[[FamilyPipeline], None] = lambda p: None
    """Changes to loaded denoisers."""
    prepare_encoders: Callable[[FamilyPipeline], None] = lambda p: None
    """Changes to loaded text encoders."""
    sound: common.Sound | None = None
    """How its videos sound, and how a state holds their sound too; None of silent families."""
    parts: Mapping[str, Callable[[FamilyPipeline], tuple[Any, ...]]] = field(default_factory=lambda: cards.HALVES)
    """Parts of a state that rewards can judge, by name, and their regions of it: the halves of images and videos."""

    @property
    def stock(self) -> tuple[str, ...]:
        """Names of the stock classes that the family loads."""
        return tuple(known_checkpoints.tables()["families"][self.name]["stock"])

    @property
    def videos(self) -> bool:
        """Whether the family makes videos."""
        return issubclass(self.options, VideoOptions)

    def card(self, model: str) -> Card | None:
        """A model's card; None for a hub id that is neither listed here nor can be looked up."""
        if (known := known_checkpoints.published(model)) is not None:
            return self._card(model, known.index, known.network, known.vae)
        index = cards.read_part(model, "model_index.json")
        vae = cards.read_part(model, "vae/config.json") or {}
        network = cards.read_part(model, f"{self.denoisers[0]}/config.json")
        return self._card(model, index or {}, network, vae) if index or Path(model).is_dir() else None

    def _card(
        self, model: str, index: Mapping[str, Any], network: Mapping[str, Any] | None, vae: Mapping[str, Any]
    ) -> Card:
        if network is not None:
            network = SimpleNamespace(**{**cards.usual(self.network), **network})  # type: ignore[assignment]
        return Card(model=model, index=index, network=network, vae=vae, factors=self.factors(vae))

    def _denoisers(self, model: str) -> dict[str, dict[str, Any]]:
        """Configurations of the denoiser, or of experts, by name; empty for an unknown model."""
        known = known_checkpoints.published(model)
        if known is None:
            read = {name: cards.read_part(model, f"{name}/config.json") for name in self.denoisers}
            return {name: config for name, config in read.items() if config is not None}
        there = [name for name in self.denoisers if name == self.denoisers[0] or known.index.get(name)]
        return {name: dict(known.network) for name in there}

    def block_kinds(self, model: str) -> dict[str, int]:
        """Blocks of the denoiser that are alike, by kind; empty if experts differ in them or the model is unknown."""
        found = [block_kinds({**cards.usual(self.network), **config}) for config in self._denoisers(model).values()]
        return found[0] if found and all(kinds == found[0] for kinds in found) else {}

    def meta_denoiser(self, model: str, kinds: Mapping[str, int] | None = None) -> nn.Module | None:
        """The denoiser without weights, or experts by name; with so many blocks of `kinds`. None of unknown models."""
        found = {
            name: stock_loading.on_meta(self.network, with_blocks(config, kinds or {}), f"{model}/{name}")
            for name, config in self._denoisers(model).items()
        }
        return nn.ModuleDict(found) if len(found) > 1 else found.get(self.denoisers[0])

    def check(self, model: str, targets: Sequence[str] | None, rank: int | None = None) -> None:
        """Checks what is known before weights load: the model is of this family, every LoRA target binds, at a rank. A
        hub id that cannot be looked up is left to `load`."""
        card = self.card(model)
        if card is None:
            return
        self._check_parts(card)
        if card.network is None:
            return
        self.refuse(card)
        few = {} if names_a_block(targets or ()) else fewest(self.block_kinds(model))
        for expert in experts_of(self.meta_denoiser(model, few) if targets is not None else None):
            check_targets(expert, targets or (), rank)

    def _check_parts(self, card: Card) -> None:
        """Refuses another stock class, a folder that lacks parts, and an unsupported scheduler."""
        model = card.model
        if Path(model).is_dir() and not card.index:
            raise ValueError(no_pipeline(model))
        cards.check_class(card, self.name, self.stock)
        if Path(model).is_dir():
            needed = {self.denoisers[0], *self.encoders, "vae", "scheduler"} - set(self.spared)
            check_parts(model, card.index, needed=needed, given=self.stock_options or {})
        scheduler = cards.read_part(model, "scheduler/scheduler_config.json")
        if scheduler is not None:
            named = dict(zip(("_class_name",), (card.index.get("scheduler") or ())[1:], strict=False))
            self.check_scheduler(model, scheduler | named)  # stock goes by the index

    def chosen(self, options: Mapping[str, Any]) -> Any:
        """The family's options from plain values; a ValueError names one that is unknown or makes no sense."""
        return build_options(self.options, options, owner=f"pipeline {self.name!r}")

    def check_options(self, options: Mapping[str, Any]) -> None:
        """Checks `pipeline.options`, the options without their own key; a ValueError names the option."""
        cards.check_no_keys(options)
        self.chosen(options)

    def attends(self, model: str) -> Known:
        """What is known of a checkpoint's attention before weights load."""
        card = self.card(model)
        return self.attention.known(None if card is None else card.network)

    def load(
        self, model: str, *, dtype: torch.dtype = torch.bfloat16, device: torch.device | str = "cpu",
        attention: str = "auto", compile: str = "none", how: Loading = AT_ONCE, **options: Any,
    ) -> FamilyPipeline:  # fmt: skip
        """Loads a checkpoint from a folder or the hub. `dtype` is that of denoiser and text encoders (autoencoders are
        float32), `attention` a word of `KERNELS` or "auto"; `compile="blocks"` compiles the denoisers' repeated blocks
        at their first call. Raises ValueError: nothing loadable there, an option that it does not have, or nothing to
        compile or quantise with."""
        check_compile(compile, device)
        check_quantize(how.quantize, device, compile=compile)
        chosen = self.chosen(options)
        refuse_unable(chosen.vae_dtype, device, "pipeline.vae_dtype")
        card = self.card(model) or self._card(model, {}, None, {})
        if card.stock is not None:
            cards.check_class(card, self.name, self.stock)
        if card.network is not None:  # all is checked again below, where it was not known before
            self._check(card, chosen)
        gone = [part for part in self.spared if card.index.get(part, "there")[0] is None]
        read: Read = partial(
            stock_loading.load_stock, self.stock_class(card, chosen) or self.stock[0], model, title=self.title,
            dtype=dtype, how=how, exact=self.exact, **(self.stock_options or {}), **dict.fromkeys(gone),
        )  # fmt: skip
        away = (*self.denoisers, *(self.encoders if how.later else ()))
        pipe = read(**dict.fromkeys(away))
        index = {**pipe.config, **stock_loading.index_entries(model, away), "_class_name": type(pipe).__name__}
        network = stock_loading.read_config(self.network, model, self.denoisers[0])
        card = self._card(model, index, network, pipe.vae.config)
        self.check_scheduler(model, {"_class_name": type(pipe.scheduler).__name__, **pipe.scheduler.config})
        self._check(card, chosen)
        stock_loading.freeze(pipe, device, set(pipe.components) - set(self.encoders))
        if self.videos and chosen.vae_tiling:
            pipe.vae.enable_tiling()
        p = FamilyPipeline(self, card, chosen, pipe=pipe, denoisers={}, dtype=dtype, device=torch.device(device))
        p.later = Later(read=read, how=how, attention=attention, compile=compile)
        p.later.rest(p)
        if not how.later:
            p.later.encoders_ready(p)
            p.load_denoiser()
        return p

    def _check(self, card: Card, options: Any) -> None:
        """Refuses options that the checkpoint cannot take, and unsupported checkpoints."""
        self.refuse(card)
        cards.shapes(self.grid(card.network), card, self.size_of(card, options), videos=self.videos)
        self.suits(card, options)
        self.prompt_tokens(card, options)

    def prompt_tokens(self, card: Card, options: Any) -> int:
        """Tokens to cut or pad prompts to. Raises ValueError: another number than the checkpoint takes."""
        if self.tokens is not None:
            return self.tokens(card, options)
        length = self.length if options.max_sequence_length is None else options.max_sequence_length
        most = None if self.longest is None else self.longest(card)
        if length < 1 or (most is not None and length > most):
            allowed = "be at least 1" if most is None else f"lie in 1 .. {most}"
            raise ValueError(f"pipeline.max_sequence_length ({length}) must {allowed} for {card.model}")
        return length

    def size_of(self, card: Card, options: Any) -> Size:
        """The drawn size: from options, else the checkpoint's own."""
        own = self.own_size(card)
        frames, fps = (options.num_frames, options.fps) if self.videos else (None, None)
        return Size(
            height=options.height or own.height,
            width=options.width or own.width,
            num_frames=own.num_frames if frames is None else frames,
            fps=fps or own.fps,
        )

    def planned_size(self, model: str, options: Mapping[str, Any]) -> Size | None:
        """The size that a checkpoint draws with these options; None if unknown."""
        card = self.card(model)
        return None if card is None or card.network is None else self.size_of(card, self.chosen(options))

    def text_tokens(self, model: str, options: Mapping[str, Any]) -> int:
        """Tokens of text that the denoiser reads with these options; the family's usual number if unknown."""
        card, chosen = self.card(model), self.chosen(options)
        if card is None or card.network is None:
            return int(chosen.max_sequence_length or self.length)
        return self.seen_tokens(card, self.prompt_tokens(card, chosen))

    def rows(self, model: str, scale: float) -> int:
        """Network rows that guidance at a scale needs per sample and step."""
        return self.passes(self.card(model), scale)

    def remembers(self, model: str, options: Mapping[str, Any], scale: float, num_steps: int) -> bool:
        return (card := self.card(model)) is not None and self.memory(card, self.chosen(options), scale, num_steps)

    def meta_call(self, model: str, size: Size, text_tokens: int) -> dict[str, Any]:
        card, device = self.card(model), torch.device("meta")
        if card is None or card.network is None:
            raise ValueError(f"nothing is known of {model} without its download")
        frames: dict[str, Any] = {"num_frames": size.num_frames} if self.videos else {}
        options = self.options(height=size.height, width=size.width, **frames)
        p = FamilyPipeline(
            self, card, options, pipe=None, denoisers={}, dtype=torch.float32, device=device, tokens=text_tokens
        )
        cond = Conditioning(self.conditioning(p, text_tokens))
        return self.arguments(p, common.meta(1, *p.latent_shape), common.meta(1), cond) | {"return_dict": False}


class FamilyPipeline:
    """A loaded checkpoint of a family; see `flowrl.pipelines.Pipeline` for what each member is."""

    denoiser: nn.Module
    attention: str
    grid_shape: tuple[int, ...]

    def __init__(
        self, family: Family, card: Card, options: Any, *, pipe: Any, denoisers: Mapping[str, nn.Module],
        dtype: torch.dtype, device: torch.device, tokens: int | None = None,
    ) -> None:  # fmt: skip
        """Takes a loaded stock pipeline; without one it still gives the arguments of a denoiser."""
        self.family = family
        self.card = card
        self.options = options
        self.pipe: Any = pipe
        self.model = card.model
        self.dtype = dtype
        self.device = device
        self.later: Later | None = None
        self.context = 1  # processes that share the tokens of an image
        self.experts: dict[str, Any] = {}
        self.resting: dict[str, Resting] = {}
        self.sizes = WeakSet([self])  # all pipelines that share these networks
        self.take(denoisers)
        self.lora_targets = family.lora_targets
        counted = family.count_sources
        self.num_sources = family.num_sources or (0, 0) if counted is None else counted(card, options)
        self.max_sequence_length = family.prompt_tokens(card, options) if tokens is None else tokens
        size = family.size_of(card, options)
        self.fps = size.fps
        self.constants = {} if pipe is None else family.constants(self)
        self._set_size(size)
        self.embeddings = FamilyEmbeddings(self)

    def _set_size(self, size: Size) -> None:
        grid, videos = self.family.grid(self.card.network), self.family.videos
        self.grid_shape, self.image_shape = cards.shapes(grid, self.card, size, videos=videos)
        self.latent_shape = self.family.sound.packed(self) if self.family.sound else self.family.state(self)
        self.positions = self.family.positions(self)

    def resized(self, height: int | None, width: int | None) -> FamilyPipeline:
        """The same networks drawing another size; None is the checkpoint's own. Embeddings of prompts are shared;
        sources are encoded again, which works after the text encoders are freed too."""
        other = copy(self)
        self.sizes.add(other)
        other._set_size(self.family.size_of(self.card, replace(self.options, height=height, width=width)))
        other.embeddings = FamilyEmbeddings(other, like=self.embeddings)
        return other

    def encode(self, prompts: Sequence[str], sources: Sources | None = None) -> Conditioning:
        """Embeds prompts and their source images, each distinct one once."""
        return self.embeddings.encode(prompts, sources)

    def keeps(self, prompts: Sequence[str], sources: Sources | None = None) -> bool:
        """Whether `encode` of these needs no network."""
        return self.embeddings.keeps(prompts, sources)

    def keep_embeddings(self, folder: Path, encoders: str) -> None:
        """Reads embeddings from a folder and writes new ones into it; `encoders` identifies the encoders."""
        self.embeddings.keep_in(folder, encoders)

    def awake(self, *parts: str) -> AbstractContextManager[None]:
        """Inside, parts that usually rest on the host are on the device: text_encoders, image_encoder, vae."""
        return awake(self.resting, parts)

    def num_cut(self, prompts: Sequence[str]) -> int:
        """How many prompts have more tokens than are read."""
        return num_cut(self.pipe.components, self.max_sequence_length, prompts)

    def load_text_encoders(self) -> None:
        """Loads the text encoders if they were left for later, or freed."""
        if self.later is not None and self.later.text_encoders(self):
            self.embeddings.texts.freed = False

    def load_denoiser(self) -> None:
        """Loads the denoiser if it was left for later, ready to use."""
        if self.later is not None and not self.experts:
            self.later.denoiser(self)

    def take(self, denoisers: Mapping[str, nn.Module], attention: str = "native") -> None:
        """Uses these denoisers, with a kernel for their attention, from now on; so does every other size."""
        self.experts.update(denoisers)
        parts = list(self.experts.values())
        for one in self.sizes:
            one.denoiser = parts[0] if len(parts) == 1 else nn.ModuleDict(self.experts)
            one.attention = attention

    def free_text_encoders(self) -> None:
        """Drops the text encoders from memory; separately encoded sources can still be encoded."""
        self.resting.pop("text_encoders", None)
        self.embeddings.texts.free(self.pipe, self.family.encoders)

    def call(self, x: Tensor, timestep: Tensor, cond: Conditioning, expert: str | None = None) -> Tensor:
        """The denoiser's prediction in the pipeline's dtype, while LoRA weights stay float32."""
        network = self.experts[expert or self.family.denoisers[0]]
        with common.autocast(self.device, self.dtype):
            given = self.family.arguments(self, common.shown(x.to(self.dtype), cond), timestep, cond)
            output = network(**given, return_dict=False)[0]
        return self.family.read(self, output, x)

    def network(self, x: Tensor, timestep: Tensor, cond: Conditioning) -> Tensor:
        """Velocity in float32; at a held first frame it leads straight there."""
        velocity = self.family.evaluate(self, x, timestep, cond)
        if "first_frame" not in cond.tensors:
            return velocity
        return common.held(velocity, x, timestep / self.pipe.scheduler.config.num_train_timesteps, cond)

    def passes(self, scale: float) -> int:
        """Network rows that guidance at a scale needs per sample and step."""
        return self.family.passes(self.card, scale)

    def guided(
        self,
        network: Network,
        cond: Conditioning,
        negative: Conditioning | None,
        scale: float,
        train_negative: TrainNegative = True,
    ) -> Velocity:
        """The family's guidance of a network; a first frame is held by sigma, since timesteps may be rounded."""
        guided = self.family.guided(self, common.Guidance(network, cond, negative, scale, train_negative))
        if "first_frame" not in cond.tensors:
            return guided
        return lambda x, sigma, timestep: common.held(guided(x, sigma, timestep), x, sigma, cond)

    def schedule(self, num_steps: int, grid: str, shift: float | None = None) -> Schedule:
        """Noise levels; grid "diffusers" is what the stock pipeline visits."""
        return self.family.schedule(self, num_steps, grid, shift)

    def decode(self, latents: Tensor, *, gradient: bool = False) -> Tensor:
        """Decodes slice by slice, in the autoencoder's arithmetic; images are float32. Without gradient memory does not
        grow with the batch."""
        decode = in_arithmetic(self.options.vae_dtype, self.device, partial(self.family.decode, self))
        turned = (lambda z: decode(z).transpose(1, 2)) if self.family.videos else decode
        with self.awake("vae"), torch.set_grad_enabled(gradient):
            parts = latents.split(self.options.vae_slice)
            return torch.cat([(turned(part.float()) / 2 + 0.5).clamp(0, 1) for part in parts])

    @property
    def parts(self) -> dict[str, tuple[Any, ...]]:
        """Parts of a state by name, and their indexes in it."""
        return {name: region(self) for name, region in self.family.parts.items()}

    @property
    def sound_rate(self) -> int | None:
        """Samples per second of the sound that videos come with; None of silent families."""
        return self.family.sound.rate(self) if self.family.sound else None

    def decode_sound(self, latents: Tensor) -> Tensor:
        """Sound float32 `[b, channels, samples]` of finished latents."""
        return common.decode_sound(self, latents)

    def encode_images(self, images: Tensor) -> Tensor:
        """Latents of images or clips: the mode of the autoencoder's posterior, scaled as `decode` undoes it."""
        encode = in_arithmetic(self.options.vae_dtype, self.device, partial(self.family.encode, self))
        turned = (lambda x: encode(x.transpose(1, 2))) if self.family.videos else encode
        with self.awake("vae"):
            return common.encode_slices(images, self.image_shape, self.options.vae_slice, turned, self.device)

    def save_lora(self, folder: Path, tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> Path:
        """Writes a LoRA as stock diffusers loads it with `load_lora_weights(folder)`; a second expert's is in a folder,
        for `load_lora_weights(folder / "transformer_2", load_into_transformer_2=True)`."""
        return common.save_lora(type(self.pipe), folder, tensors, config, tuple(self.experts), self.family.denoisers[0])
