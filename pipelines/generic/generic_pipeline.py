"""A stock pipeline as recipes need one: its own call, with a stand-in for its scheduler."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from functools import partial, wraps
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from flowrl.config.strict_yaml import read_mapping
from flowrl.pipelines.generic import stock_call
from flowrl.pipelines.generic.stock_call import NEGATIVE, POSITIVE, Asked, Reached
from flowrl.pipelines.generic.stock_classes import call_arguments, scale_argument, takes_frames, usual_sources
from flowrl.pipelines.generic.stock_levels import Levels
from flowrl.pipelines.generic.stock_sources import StockSources
from flowrl.pipelines.generic.stock_texts import Texts, text_id
from flowrl.pipelines.shared import common
from flowrl.pipelines.shared.prompt_embeddings import Sources, check_sources, digest, num_cut
from flowrl.runtime.files import replacing
from flowrl.runtime.precision import in_arithmetic
from flowrl.samplers.guidance import Network, TrainNegative, Velocity, conditioned
from flowrl.trajectory import Conditioning, Schedule

_ROW, _AGAINST, _SCALE = "text_on_host", "negative_text_on_host", "scale_on_host"
_NAMES = read_mapping(Path(__file__).with_suffix(".yaml"))


def found_targets(network: nn.Module) -> tuple[str, ...]:
    """LoRA targets of a network: its attention's projections by the names they usually have, else all layers in blocks.
    Raises ValueError: it has no linear layers."""
    linear = [name for name, module in network.named_modules() if isinstance(module, nn.Linear)]
    others = [name for name, module in network.named_modules() if not isinstance(module, nn.Linear)]

    def ending(end: str, names: Sequence[str]) -> bool:
        return any(name.endswith(f".{end}") for name in names)

    found: tuple[str, ...] = ()
    for ends in _NAMES["projections"]:
        found += tuple(end for end in ends if ending(end, linear) and not ending(end, others))  # PEFT takes no list
        if set(found) & set(_NAMES["queries"]):
            return found
    in_blocks = [name.split(".")[-2:] for name in linear if re.search(r"(^|\.)\d+(\.|$)", name)]
    if last := dict.fromkeys(".".join(part for part in parts if not part.isdigit()) for parts in in_blocks):
        return tuple(end for end in last if ending(end, linear))
    raise ValueError(f"{type(network).__name__} has no linear layers in blocks that a LoRA could be added to")


class GenericPipeline:
    """A loaded stock pipeline; see `flowrl.pipelines.Pipeline` for what each member is."""

    parts: Mapping[str, tuple[Any, ...]] = {}

    def __init__(
        self, model: str, pipe: Any, denoisers: Mapping[str, nn.Module], encoders: Sequence[str], options: Any,
        *, dtype: torch.dtype, device: torch.device,
    ) -> None:  # fmt: skip
        """Takes a stock pipeline on its device."""
        self.model, self.pipe, self.options, self.dtype, self.device = model, pipe, options, dtype, device
        self.experts: dict[str, Any] = dict(denoisers)
        self.encoders = tuple(encoders)
        parts = list(self.experts.values())
        self.denoiser: nn.Module = parts[0] if len(parts) == 1 else nn.ModuleDict(self.experts)
        self.lora_targets = found_targets(parts[0])
        self.attention = "native"
        self.parameters = call_arguments(type(pipe))
        self.levels = Levels.of(pipe.scheduler)
        self.texts = Texts(encode=pipe.encode_prompt)
        count = usual_sources(self.parameters) if options.num_sources is None else options.num_sources
        self.sources, self.num_sources = StockSources(count), (count, count)
        if count and "image" not in self.parameters:
            raise ValueError(
                f"pipeline.options.num_sources is {count}, and {type(pipe).__name__} takes no image: remove it"
            )
        self.keeps_encoders, self.alone = False, False
        self.height, self.width = options.height, options.width
        self.videos = takes_frames(self.parameters)
        self.fps: float | None = None
        if self.videos:
            rate = self.parameters.get("frame_rate")
            usual = 16.0 if rate is None or not isinstance(rate.default, (int, float)) else float(rate.default)
            self.fps = options.fps or usual
        self.latent_shape: tuple[int, ...] = ()
        self.image_shape: tuple[int, ...] = ()
        self._asked: dict[tuple[int, float], Asked] = {}

    # ---- stock's call ------------------------------------------------------------------------------------------------

    @property
    def scale_name(self) -> str | None:
        """The argument or part that sets guidance; None without one."""
        named = scale_argument(self.parameters)
        return "guider" if named is None and getattr(self.pipe, "guider", None) is not None else named

    @property
    def first_source(self) -> str:
        """Some source, for when any will do."""
        return next(iter(self.sources.images), "")

    def arguments(
        self, b: int, scale: float, *, negative: bool, steps: int = 2, source: str | None = None
    ) -> dict[str, Any]:
        """Arguments of stock's call that are the same for all latents; some classes have no schedule of one step.
        Raises ValueError: a guidance scale, and the pipeline takes none."""
        options = self.options
        shown = {}
        if self.sources.count:
            own = None if "height" in self.parameters else self.source_size
            shown["image"] = self.sources.argument(self.first_source if source is None else source, own)
        given: dict[str, Any] = {
            "prompt": [POSITIVE] * b, "num_inference_steps": steps, "output_type": "pt", "return_dict": False,
            "height": self.height, "width": self.width, "frame_rate": options.fps,
            **dict.fromkeys(("num_frames", "frames"), options.num_frames),
            "max_sequence_length": options.max_sequence_length, "negative_prompt": [NEGATIVE] * b if negative else None,
            "use_resolution_binning": False,  # sizes as requested
            "enable_prompt_rewrite": False,  # which the text encoder would do in each call
            **shown,
        }  # fmt: skip
        guider = {}
        if self.scale_name == "guider":
            guider = {"guider": self.pipe.guider.new(guidance_scale=scale)}
        elif self.scale_name is not None:
            given[self.scale_name] = scale
        elif scale != 1:
            raise ValueError(
                f"{type(self.pipe).__name__} takes no guidance scale, got {scale:g}: set sampler.guidance_scale=1 and "
                "eval.guidance_scale=1"
            )
        return guider | {key: value for key, value in given.items() if value is not None and key in self.parameters}

    def asked(self, num_steps: int, scale: float) -> Asked:
        """What stock's call needs at a number of steps and a guidance scale; some text was encoded before."""
        if (num_steps, scale) not in self._asked:
            self._asked[num_steps, scale] = self._probed(num_steps, scale, self.first_source)
        return self._asked[num_steps, scale]

    def _probed(self, num_steps: int, scale: float, source: str) -> Asked:
        heard: list[bool] = []
        one = [next(iter(self.texts.rows))]
        encode = self.texts.standing_in(one, one, self.device, heard)
        given = self.arguments(1, scale, negative=True, steps=num_steps, source=source)
        with self.remembering(source, 1):
            return stock_call.probe(self.pipe, encode, given, list(self.experts.values()), lambda: any(heard))

    def remembering(self, source: str, rows: int) -> AbstractContextManager[None]:
        """Inside, networks that read images reuse their results for a source."""
        if not self.sources.count:
            return nullcontext()
        others = {name: part for name, part in self.pipe.components.items() if isinstance(part, nn.Module)}
        networks = {name: part for name, part in others.items() if name not in (*self.experts, *self.encoders)}
        return self.sources.remembering(source, rows, networks, self.device)

    def made(self, source: str) -> Tensor:
        """Latents of one sample as stock makes them of a source: noise, and numbers held at the image's."""
        kept = self.sources.made_of(source)
        if "made" not in kept:
            kept["made"] = self._probed(2, 1.0, source).made
        found: Tensor = kept["made"]
        return found

    def _handed(
        self, latents: Tensor, t: Tensor, texts: Sequence[int], against: Sequence[int] | None, scale: float
    ) -> tuple[Tensor, Tensor]:
        """What stock's scheduler gets for latents of one level."""
        encode, source = self.texts.standing_in(texts, against, self.device, []), self.sources.of.get(texts[0], "")
        given = self.arguments(len(latents), scale, negative=against is not None, source=source)
        given["latents"] = latents.to(self.dtype)
        with self.remembering(source, len(latents)), common.autocast(self.device, self.dtype):
            return stock_call.evaluate(self.pipe, encode, given, t, float(self.levels.sigma(t)))

    def _evaluated(
        self, x: Tensor, timestep: float, texts: Sequence[int], against: Sequence[int] | None, scale: float
    ) -> Tensor:
        """Velocity of rows of one level and one kind."""
        t = self.levels.timestep(timestep, self.device)
        made = partial(self.made, self.sources.of.get(texts[0], ""))
        latents = self.sources.hold(self.levels.latents(x, t), made)
        output, sample = self._handed(latents, t, texts, against, scale)
        stepped = self.sources.pick(x, sample)
        if output.shape != stepped.shape:
            raise ValueError(
                f"{type(self.pipe).__name__} was given latents {tuple(x.shape)} and hands {tuple(output.shape)} to its "
                "scheduler: latents that are not what its scheduler steps cannot be trained"
            )
        velocity = self.levels.velocity(stepped, output, t)
        return self.sources.lead(velocity, x, made, float(self.levels.sigma(t)))

    def network(self, x: Tensor, timestep: Tensor, cond: Conditioning) -> Tensor:
        """Velocity in float32: one stock call for all rows of one level and source whose prompts have one length.
        `alone` is one for each row, of classes that take one prompt at a time."""
        texts = cond.tensors[_ROW].tolist()
        against = cond.tensors[_AGAINST].tolist() if _AGAINST in cond.tensors else None
        scale = float(cond.tensors[_SCALE][0]) if _SCALE in cond.tensors else 1.0
        groups: dict[Any, list[int]] = {}
        for row, level in enumerate(timestep.tolist()):
            kinds = self.texts.kind(texts[row]), None if against is None else self.texts.kind(against[row])
            groups.setdefault((level, kinds, self.sources.of.get(texts[row]), self.alone and row), []).append(row)
        parts, order = [], []
        for (level, *_), rows in groups.items():
            at = torch.tensor(rows, device=x.device)
            negatives = None if against is None else [against[row] for row in rows]
            own = x if len(rows) == len(x) else x[at]
            parts.append(self._evaluated(own, level, [texts[row] for row in rows], negatives, scale))
            order += rows
        if len(parts) == 1:
            return parts[0]
        return torch.cat(parts)[torch.tensor(order, device=x.device).argsort()]

    # ---- prompts -----------------------------------------------------------------------------------------------------

    def encode(self, prompts: Sequence[str], sources: Sources | None = None) -> Conditioning:
        """Encodes each new prompt by stock's call, up to there; a conditioning has the numbers of its texts."""
        given = check_sources(sources, prompts, self.num_sources, "generic", "num_sources")
        numbers = self._numbers(prompts, given)
        for text, images, number in zip(prompts, given, numbers, strict=True):
            if number not in self.texts.rows:
                self._encode(text, number, images)
        return Conditioning({_ROW: torch.tensor(numbers)})

    def _numbers(self, prompts: Sequence[str], given: Sources) -> list[int]:
        return [text_id(text, list(map(digest, images))) for text, images in zip(prompts, given, strict=True)]

    @torch.no_grad()
    def _encode(self, text: str, number: int, images: Sequence[Tensor]) -> None:
        if self.texts.freed:
            raise ValueError(
                f"prompt {text!r} was not encoded before the text encoders were freed: set "
                "pipeline.free_text_encoders=false"
            )

        if images:
            self.sources.take(number, images)
        source = self.sources.of.get(number, "")

        def returned(times: int) -> Any:
            stock = self.pipe.encode_prompt

            @wraps(stock)
            def ending(*args: Any, **kwargs: Any) -> Any:
                raise Reached(stock(*args, **kwargs))

            scale = 1.0 if self.scale_name is None else 2.0
            given = self.arguments(times, scale, negative=True, source=source)
            named: dict[str, Any] = {key: [text] * times for key in ("prompt", "negative_prompt") if key in given}
            with self.remembering(source, times), common.standing_in(self.pipe, encode_prompt=ending):
                return stock_call.call(self.pipe, {**given, **named})

        self.texts.keep(number, returned(1), partial(returned, 2))

    def keeps(self, prompts: Sequence[str], sources: Sources | None = None) -> bool:
        """Whether all of these are encoded."""
        given = [()] * len(prompts) if sources is None else sources
        return all(number in self.texts.rows for number in self._numbers(prompts, given))

    def keep_embeddings(self, folder: Path, encoders: str) -> None:
        """Refused."""
        raise ValueError("prompts.cache: embeddings of a generic pipeline are not kept in files: remove the key")

    def load_text_encoders(self) -> None:
        """They were loaded with the rest. Raises ValueError: they were freed."""
        if self.texts.freed:
            raise ValueError("the text encoders of a generic pipeline were freed and are not loaded again")

    def load_denoiser(self) -> None:
        """It was loaded with the rest."""

    def awake(self, *parts: str) -> AbstractContextManager[None]:
        """Nothing rests."""
        return nullcontext()

    def num_cut(self, prompts: Sequence[str]) -> int:
        """How many prompts have more tokens than are read; 0 if the call does not tell."""
        own = self.parameters.get("max_sequence_length")
        limit = self.options.max_sequence_length or (None if own is None else own.default)
        return num_cut(self.pipe.components, limit, prompts) if isinstance(limit, int) else 0

    def free_text_encoders(self) -> None:
        """Drops the text encoders, unless stock's call reads something of them at each step."""
        self.texts.freed = True
        if not self.keeps_encoders:
            self.pipe.register_modules(**dict.fromkeys(self.encoders))

    def without_encoders(self) -> AbstractContextManager[None]:
        """Inside, the text encoders are gone."""
        return common.standing_in(self.pipe, **dict.fromkeys(self.encoders))

    # ---- guidance and levels -----------------------------------------------------------------------------------------

    def passes(self, scale: float) -> int:
        """2 if stock's call reads a negative prompt at this scale."""
        if self.scale_name is None:
            return 1
        return 2 if self.asked(2, scale).negative else 1

    def guided(
        self,
        network: Network,
        cond: Conditioning,
        negative: Conditioning | None,
        scale: float,
        train_negative: TrainNegative = True,
    ) -> Velocity:
        """Stock's own guidance: the scale and the negative prompt go to the network, which is stock's whole step.
        Raises ValueError: there is no negative prompt where one is read, or its half is to be trained apart."""
        two = self.passes(scale) == 2
        if two and negative is None:
            raise ValueError(f"guidance at scale {scale} reads a negative prompt, and none was encoded")
        if two and train_negative is not True:
            raise ValueError(
                "sampler.train_negative has to be true for pipeline.name=generic: stock's guidance is one thing there, "
                "and its half without the prompt cannot be left out"
            )
        tensors = {_ROW: cond.tensors[_ROW], _SCALE: torch.full((len(cond),), scale, dtype=torch.float64)}
        if two and negative is not None:
            tensors[_AGAINST] = negative.expand(len(cond)).tensors[_ROW]
        return conditioned(network, Conditioning(tensors))

    def schedule(self, num_steps: int, grid: str, shift: float | None = None) -> Schedule:
        """Levels of the stock scheduler, with the arguments of stock's call."""
        return self.levels.schedule(num_steps, grid, shift, self.asked(num_steps, 1.0).levels)

    # ---- images ------------------------------------------------------------------------------------------------------

    def resized(self, height: int | None, width: int | None) -> GenericPipeline:
        """The same networks drawing another size; None is stock's own."""
        other = self.sized(height, width)
        other.measure()
        return other

    def sized(self, height: int | None, width: int | None) -> GenericPipeline:
        """As `resized`, before shapes are measured."""
        other = copy(self)
        other.height, other.width, other._asked = height, width, {}
        other.latent_shape, other.image_shape = (), ()
        other.sources = copy(self.sources)
        other.sources.kept = OrderedDict()
        return other

    @torch.no_grad()
    def measure(self) -> None:
        """Finds the shapes of latents and images of the drawn size, by stock's own code. Raises ValueError: that code
        draws another size."""
        self._asked = {}
        self.find_latents()
        self.image_shape = tuple(self._decoded(torch.zeros(1, *self.latent_shape, device=self.device)).shape[1:])
        self.check_drawn(self.image_shape[-2:])

    def find_latents(self) -> None:
        """Finds the shape of latents, and which of their numbers the scheduler steps."""
        self.latent_shape = tuple(self.asked(2, 1.0).made.shape[1:])
        if self.sources.count:
            t = self.levels.timestep(float(self.schedule(2, "diffusers").timestep[0]), self.device)
            texts = [next(iter(self.texts.rows))]
            self.sources.find_stepped(
                self.latent_shape, lambda x: self._handed(x.to(self.device), t, texts, None, 1.0)[1]
            )

    @property
    def source_size(self) -> tuple[int, int]:
        """Height and width of source images, if they set the drawn size."""
        _rgb, *drawn = self.image_shape[-3:] or (3, 512, 512)
        return self.height or drawn[0], self.width or drawn[1]

    def check_drawn(self, drawn: tuple[int, ...]) -> None:
        """Refuses another height or width than requested."""
        wanted = self.height, self.width
        if any(one not in (None, own) for one, own in zip(wanted, drawn, strict=True)):
            raise ValueError(
                f"{type(self.pipe).__name__} draws {drawn[0]} x {drawn[1]} where {wanted[0]} x {wanted[1]} pixels are "
                "asked for: set pipeline.height and pipeline.width, and eval's, to a size that it draws"
            )

    def decode(self, latents: Tensor, *, gradient: bool = False) -> Tensor:
        """Stock's call without a step: what it does with finished latents, slice by slice."""
        decode = in_arithmetic(self.options.vae_dtype, self.device, self._decoded)
        size = self.options.vae_slice
        with torch.set_grad_enabled(gradient):
            return torch.cat([decode(part.float()) for part in latents.split(size)])

    def decoding(self, latents: Tensor) -> Any:
        """The result of stock's call for latents when no step is left."""
        vae, b, prepare = self.pipe.vae, len(latents), self.pipe.prepare_latents
        nothing = torch.zeros(0, device=latents.device)
        scheduler = stock_call.scheduler_like(self.pipe.scheduler, nothing, nothing.new_zeros(1), stock_call.end_call)
        encode = self.texts.standing_in([next(iter(self.texts.rows))] * b, None, self.device, [], torch.float32)
        given = {**self.arguments(b, 1.0, negative=False), "latents": latents}
        stock = vae.decode

        @wraps(prepare)
        def finished(*args: Any, **kwargs: Any) -> Any:
            made = prepare(*args, **kwargs)
            return (latents, *made[1:]) if isinstance(made, tuple) else latents  # whatever a source would overwrite

        @wraps(stock)
        def exactly(z: Tensor, *args: Any, **kwargs: Any) -> Any:
            return stock(z.float(), *args, **kwargs)

        with (
            self.remembering(self.first_source, b),
            common.standing_in(self.pipe, scheduler=scheduler, encode_prompt=encode, prepare_latents=finished),
            common.standing_in(vae, decode=exactly),
        ):
            return stock_call.call(self.pipe, given)

    def _decoded(self, latents: Tensor) -> Tensor:
        images = self.decoding(latents)[0]
        found = torch.stack(list(images)) if isinstance(images, (list, tuple)) else images
        return found.float()

    @property
    def sound_rate(self) -> None:
        """Stock pipelines here make no sound."""

    def decode_sound(self, latents: Tensor) -> Tensor:
        """Refused."""
        raise ValueError(f"{type(self.pipe).__name__} makes no sound")

    def encode_images(self, images: Tensor) -> Tensor:
        """Refused."""
        raise ValueError(
            "pipeline.name=generic only decodes: latents of given images, which this recipe needs, are made by "
            "families of their own (docs/families.md)"
        )

    def save_lora(self, folder: Path, tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> Path:
        """Writes `pytorch_lora_weights.safetensors`. Stock loads it with `load_lora_weights(folder)`. Where its class
        has none a PEFT adapter lies beside it, for `peft.PeftModel.from_pretrained(pipe.transformer, folder)`."""
        part, *_ = self.experts
        if len(self.experts) == 1 and not common.takes_lora(type(self.pipe), part):
            from peft import LoraConfig
            from safetensors.torch import save

            folder.mkdir(parents=True, exist_ok=True)
            named = {f"base_model.model.{key}": tensor.contiguous() for key, tensor in tensors.items()}
            with replacing(folder / "adapter_model.safetensors") as stream:
                stream.write(save(named))
            LoraConfig(**config).save_pretrained(str(folder))
        return common.save_lora(type(self.pipe), folder, tensors, config, tuple(self.experts), part)
