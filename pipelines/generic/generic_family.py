"""The family of all other stock pipelines: what is known of them before weights load, loading, and a test."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from flowrl.config.options import build_options
from flowrl.pipelines.arithmetic.attention_words import Known
from flowrl.pipelines.arithmetic.compiling import check_compile, compile_blocks, experts_of
from flowrl.pipelines.arithmetic.wide_products import checkpoint_blocks
from flowrl.pipelines.generic import stock_call, stock_classes
from flowrl.pipelines.generic.generic_pipeline import GenericPipeline, found_targets
from flowrl.pipelines.generic.stock_classes import OTHER
from flowrl.pipelines.generic.stock_levels import is_flow
from flowrl.pipelines.generic.stock_recording import Recorder, recorder
from flowrl.pipelines.places.known_checkpoints import published
from flowrl.pipelines.places.model_folders import check_index, check_parts, no_pipeline
from flowrl.pipelines.shared import cards, common
from flowrl.pipelines.shared.cards import Size, VideoOptions
from flowrl.pipelines.shared.stock_schedules import check_diffusion_scheduler
from flowrl.pipelines.weights import stock_loading
from flowrl.pipelines.weights.loading_choices import AT_ONCE, Loading
from flowrl.pipelines.weights.lora import check_targets
from flowrl.runtime.failures import out_of_memory
from flowrl.runtime.precision import refuse_unable
from flowrl.runtime.randomness import counter_normal
from flowrl.trajectory import Schedule, start_state


def denoiser_parts(index: Mapping[str, Any]) -> dict[str, str]:
    """Parts of a folder that denoise, and their classes."""
    found = {}
    for part, entry in index.items():
        if part.startswith(("transformer", "unet")) and isinstance(entry, (list, tuple)) and entry[0] is not None:
            found[part] = str(entry[1])
    return found


@dataclass(frozen=True, kw_only=True)
class GenericOptions(VideoOptions):
    """Options of a stock pipeline."""

    num_sources: int | None = None
    """Source images of each prompt; None is 1 if `image` comes before `prompt` in stock's call, else 0."""

    def __post_init__(self) -> None:
        if self.num_sources is not None and self.num_sources < 0:
            raise ValueError(f"pipeline.options.num_sources must be at least 0, got {self.num_sources}")


class GenericFamily:
    """What commands need of a family; see `flowrl.pipelines.ModelFamily`."""

    name = "generic"
    title = "diffusers"
    lora_targets: tuple[str, ...] = ()
    clips: tuple[str, ...] = ()
    needed_clips: tuple[str, ...] = ()
    sources_option = "num_sources"
    denoisers: tuple[str, ...] = ("transformer", "transformer_2", "unet")
    sound = None
    parts: Mapping[str, Any] = {}
    options = GenericOptions

    def __init__(self, *, videos: bool = True, sources: int = 0) -> None:
        """The family of one model, or of any."""
        self.videos, self.num_sources = videos, (sources, sources)

    def of(self, model: str) -> GenericFamily:
        """The family of a model, of videos or images. Raises ValueError: its class cannot be called from outside."""
        if not (index := self._index(model)):
            return GenericFamily()
        taken = stock_classes.call_arguments(self._stock_class(model, index))
        return GenericFamily(videos=stock_classes.takes_frames(taken), sources=stock_classes.usual_sources(taken))

    def card(self, model: str) -> None:
        """A checkpoint has no card here."""
        return None

    def _index(self, model: str) -> dict[str, Any]:
        """What is known of a model's parts: only the class of published ones, nothing of a hub id without an answer."""
        known = published(model)
        found = known.index if known is not None else cards.read_part(model, "model_index.json")
        if found is None and Path(model).is_dir():
            raise ValueError(no_pipeline(model))
        if found is not None and Path(model).is_dir():
            check_index(model, found)
        return dict(found or {})

    def _stock_class(self, model: str, index: Mapping[str, Any]) -> Any:
        return stock_classes.stock_class(str(index.get("_class_name")), model)

    def check(self, model: str, targets: Sequence[str] | None, rank: int | None = None) -> None:
        """Refuses a class that cannot be called from outside, and a LoRA that binds to nothing."""
        index = self._index(model)
        if not index:  # of a hub id while the hub cannot be reached
            return
        cls = self._stock_class(model, index)
        if published(model) is None and not denoiser_parts(index):
            raise ValueError(f"{cls.__name__} has no part named transformer or unet that could be trained: {OTHER}")
        for part in stock_classes.GUIDER_PARTS:
            if (kind := (index.get(part) or [None, None])[1]) is not None:
                stock_classes.check_guider(cls.__name__, str(kind), {})
        if Path(model).is_dir():
            away = dict.fromkeys(part for part in index if not (Path(model) / part).is_dir())
            check_parts(model, index, given=away)  # a plan names what it does not know of those, and loading refuses
            levels = cards.read_part(model, "scheduler/scheduler_config.json")
            if levels is not None and not is_flow(str(levels.get("_class_name")), levels):
                check_diffusion_scheduler(model, levels)
        for network in experts_of(self.meta_denoiser(model)):
            check_targets(network, targets or found_targets(network), rank)

    def sampling(self, model: str) -> dict[str, Any]:
        """Defaults of `num_steps` and `guidance_scale` in stock's call. Raises ValueError: its class
        cannot be called from outside."""
        taken = stock_classes.call_arguments(self._stock_class(model, self._index(model)))
        name = stock_classes.scale_argument(taken)
        scale = 1.0 if name is None else taken[name].default
        return {
            "num_steps": int(taken["num_inference_steps"].default),
            "guidance_scale": float(scale) if isinstance(scale, (int, float)) else 1.0,
        }

    def check_options(self, options: Mapping[str, Any]) -> None:
        """Checks `pipeline.options`, the options without their own key."""
        cards.check_no_keys(options)
        self.chosen(options)

    def chosen(self, options: Mapping[str, Any]) -> Any:
        """Options from plain values."""
        return build_options(GenericOptions, options, owner="pipeline 'generic'")

    def attends(self, model: str) -> Known:
        """Nothing is known of its attention."""
        return Known()

    def block_kinds(self, model: str) -> dict[str, int]:
        """None are known."""
        return {}

    def meta_denoiser(self, model: str, kinds: Mapping[str, int] | None = None) -> nn.Module | None:
        """The denoiser of a folder without weights, or experts by name; None if unknown."""
        import diffusers

        found = {}
        for part, name in denoiser_parts(cards.read_part(model, "model_index.json") or {}).items():
            config, cls = cards.read_part(model, f"{part}/config.json"), getattr(diffusers, name, None)
            if config is not None and cls is not None:
                found[part] = stock_loading.on_meta(cls, config, f"{model}/{part}")
        return nn.ModuleDict(found) if len(found) > 1 else next(iter(found.values()), None)

    def planned_size(self, model: str, options: Mapping[str, Any]) -> Size | None:
        """Stock's own code gives the size, once it is loaded."""
        return None

    def text_tokens(self, model: str, options: Mapping[str, Any]) -> int:
        """From the options, else stock's default, else 512."""
        if (own := self.chosen(options).max_sequence_length) is not None:
            return int(own)
        index = self._index(model)
        taken = stock_classes.call_arguments(self._stock_class(model, index)) if index else {}
        usual = taken["max_sequence_length"].default if "max_sequence_length" in taken else None
        return usual if isinstance(usual, int) else 512

    def rows(self, model: str, scale: float) -> int:
        """2 with guidance, as far as is known before stock's code is loaded."""
        return 1 if scale == 1 else 2

    def remembers(self, model: str, options: Mapping[str, Any], scale: float, num_steps: int) -> bool:
        """Never: such guiders are refused."""
        return False

    def meta_call(self, model: str, size: Any, text_tokens: int) -> dict[str, Any]:
        """Refused."""
        raise ValueError(f"what the network of {model} is called with is known once stock's own code is loaded")

    def recorder(self, model: str, options: Mapping[str, Any]) -> Recorder:
        """A folder's pipeline without weights, from which a plan finds the arguments of its networks. Raises
        ValueError: it is not a folder, or a part cannot be made from it."""
        if not Path(model).is_dir():
            raise ValueError("a folder with its tokenizers and configurations is needed")
        index = self._index(model)
        return recorder(model, self._stock_class(model, index), index, self.chosen(options))

    def load(
        self, model: str, *, dtype: torch.dtype = torch.bfloat16, device: torch.device | str = "cpu",
        attention: str = "auto", compile: str = "none", how: Loading = AT_ONCE, **options: Any,
    ) -> GenericPipeline:  # fmt: skip
        """Loads a checkpoint from a folder or the hub, and tests whether its own call works step by step. It loads
        everything at once: `how.later` has no effect. Raises ValueError: nothing loadable there, or a pipeline that is
        not reproduced, and why."""
        import diffusers

        chosen = self.chosen(options)
        check_compile(compile, device)
        refuse_unable(chosen.vae_dtype, device, "pipeline.vae_dtype")
        if attention not in ("auto", "native"):
            raise ValueError(f"pipeline.attention of a generic pipeline is native, got {attention}: remove the key")
        if how.split is not None or how.quantize != "none" or set(how.offload) - {"rewards"}:
            raise ValueError(
                "pipeline.name=generic loads a model whole onto one device: remove pipeline.quantize, "
                "pipeline.offload of its parts, and the splitting of its weights"
            )
        index = self._index(model)
        if not index:
            raise ValueError(
                f"which stock class {model} is cannot be read here: give a folder, or an id of a hub that this machine "
                "can reach"
            )
        cls = self._stock_class(model, index)
        pipe = stock_loading.load_stock(cls.__name__, model, title=cls.__name__, dtype=dtype, exact=("vae",))
        networks = {name: part for name, part in pipe.components.items() if isinstance(part, nn.Module)}
        denoisers = {name: part for name, part in networks.items() if name.startswith(("transformer", "unet"))}
        if not denoisers or "vae" not in networks:
            raise ValueError(f"{cls.__name__} has not both a transformer or unet and a vae: {OTHER}")
        schedulers = [part for part, one in pipe.components.items() if isinstance(one, diffusers.SchedulerMixin)]
        if schedulers != ["scheduler"]:
            raise ValueError(
                f"{cls.__name__} has the schedulers {', '.join(schedulers)}, and one can be taken: {OTHER}"
            )
        for part in stock_classes.GUIDER_PARTS:
            if (guider := getattr(pipe, part, None)) is not None:
                stock_classes.check_guider(cls.__name__, type(guider).__name__, dict(guider.config))
        stock_loading.freeze(pipe, device)
        encoders = [name for name in networks if name.startswith("text_encoder")]
        return self.made(model, pipe, denoisers, encoders, chosen, dtype, torch.device(device), compile)

    def made(
        self, model: str, pipe: Any, denoisers: Mapping[str, nn.Module], encoders: Sequence[str], chosen: Any,
        dtype: torch.dtype, device: torch.device, compile: str,
    ) -> GenericPipeline:  # fmt: skip
        """A loaded stock pipeline, tested."""
        name = type(pipe).__name__
        p = GenericPipeline(model, pipe, denoisers, encoders, chosen, dtype=dtype, device=device)
        has = {*p.parameters, *(("num_frames",) if p.videos else ()), *(("height", "width") if p.sources.count else ())}
        for option in {"max_sequence_length", "num_frames", "height", "width"} - has:
            if getattr(chosen, option) is not None:
                raise ValueError(f"pipeline.{option} is set, and {name} has no such argument: remove it")
        if p.videos and chosen.vae_tiling:
            pipe.vae.enable_tiling()
        for part in denoisers.values() if chosen.gradient_checkpointing else ():
            checkpoint_blocks(part, device, dtype)
        if compile == "blocks":
            compile_blocks(p.denoiser)
        try:
            p.encode(PROMPTS, p.sources.examples(len(PROMPTS), p.source_size))
            p.measure()
            try:
                check_reproduces(p)
            except (RuntimeError, ValueError) as error:
                if out_of_memory(error):
                    raise
                p.alone = True  # some classes take one prompt at a time; another fault comes up again
                check_reproduces(p)
        except (TypeError, AttributeError, KeyError, IndexError, RuntimeError, AssertionError) as error:
            if out_of_memory(error):
                raise
            raise describe_error(name, error) from error
        return p


PROMPTS = ("a photo of a red fox", "two blue squares on a table beside a cup of tea")
"""What is drawn: two prompts of different lengths in one call of ours, one after the other in stock's."""
WORST = {torch.float32: 1e-5, torch.bfloat16: 5e-2, torch.float16: 1e-2}
"""Largest deviation, relative to stock's latents, by the dtype of the network."""


def check_reproduces(p: Any) -> float:
    """The largest deviation of latents after two steps from those of stock's own call. Raises ValueError: more than
    `WORST`, a repeated call gives other numbers, or there is no gradient."""
    name, scale = type(p.pipe).__name__, 1.0 if p.scale_name is None else 3.0
    schedule = p.schedule(2, "diffusers", None)
    noise = counter_normal((len(PROMPTS), *p.latent_shape), "self-test").to(p.device)
    sources = p.sources.examples(len(PROMPTS), p.source_size)
    cond, against = p.encode(PROMPTS, sources), p.encode([""] * len(PROMPTS), sources)
    velocity = p.guided(p.network, cond, against if p.passes(scale) == 2 else None, scale)
    x = start_state(noise, schedule)
    found = [x]
    with torch.no_grad():
        for step in range(2):
            sigma, after = schedule.sigma[step].to(p.device), schedule.sigma[step + 1].to(p.device)
            x = x + (after - sigma) * velocity(x, sigma, schedule.timestep[step].to(p.device))
            found.append(x)
    worst = 0.0
    for row, prompt in enumerate(PROMPTS):
        source = p.sources.of.get(int(cond.tensors["text_on_host"][row]), "")
        own = _stock(p, prompt, noise[row : row + 1], schedule, scale, source)
        worst = max(worst, float((p.sources.pick(found[-1][row : row + 1], own) - own).norm() / own.norm()))
    if not worst <= WORST[p.dtype]:
        raise ValueError(
            f"{name} cannot be trained by pipeline.name=generic: two steps of its own call and the same two taken one "
            f"by one differ by {worst:.1e} of its latents, where at most {WORST[p.dtype]:g} may be lost to rounding. "
            "It keeps something from step to step, or reads its prompts elsewhere than in encode_prompt"
        )
    x, sigma, timestep = found[1], schedule.sigma[1].to(p.device), schedule.timestep[1].to(p.device)
    with torch.no_grad():
        first = velocity(x, sigma, timestep)
    with torch.enable_grad():
        again = velocity(x.detach().requires_grad_(), sigma, timestep)
    if not again.requires_grad:
        raise ValueError(f"{name} cannot be trained by pipeline.name=generic: no gradient comes through its own call")
    if not torch.equal(first, again.detach()) or not math.isfinite(float(first.sum())):
        raise ValueError(
            f"{name} cannot be trained by pipeline.name=generic: the same latents at the same level give other numbers "
            "the second time, so an importance ratio would not begin at 1"
        )
    try:  # whether stock's call needs its text encoders for more than `encode_prompt`
        with p.without_encoders(), torch.no_grad():
            velocity(x, sigma, timestep)
    except (AttributeError, TypeError, ValueError):
        p.keeps_encoders = True
    return worst


def _stock(p: Any, prompt: str, noise: Tensor, schedule: Schedule, scale: float, source: str) -> Tensor:
    """Stock's own loop for one prompt, its text encoders and all; Euler steps in the place of its solver."""
    levels, last = p.levels, list[Tensor]()

    def step(output: Tensor, timestep: Any, sample: Tensor) -> Tensor:
        k = len(last)
        sigma, after = schedule.sigma[k].item(), schedule.sigma[k + 1].item()
        t, t_after = (levels.timestep(float(schedule.timestep[j]), p.device) for j in (k, min(k + 1, 1)))
        x = levels.from_latents(sample.float(), t) if k == 0 else last[-1]
        last.append(x + (after - sigma) * levels.velocity(x, output, t))
        if k == 1:
            raise stock_call.Reached(last[-1])
        return levels.latents(last[-1], t_after).to(sample.dtype)

    times = torch.cat([levels.timestep(t, p.device) for t in schedule.timestep.tolist()])
    sigmas = 1 - schedule.sigma if levels.inverted else schedule.sigma
    scheduler = stock_call.scheduler_like(p.pipe.scheduler, times, sigmas.to(p.device), step)
    given = p.arguments(1, scale, negative=True, steps=2, source=source)
    texts = {key: [text] for key, text in (("prompt", prompt), ("negative_prompt", "")) if key in given}
    start = levels.latents(start_state(noise, schedule), levels.timestep(float(schedule.timestep[0]), p.device))
    start = p.sources.hold(start, lambda: p.made(source))
    with p.remembering(source, 1), common.standing_in(p.pipe, scheduler=scheduler), torch.no_grad():
        result = stock_call.call(p.pipe, {**given, **texts, "latents": start.to(p.dtype)})
    if not isinstance(result, Tensor):
        raise ValueError(f"{type(p.pipe).__name__} did not take two steps where it was asked for two")
    return result


def describe_error(name: str, error: Exception) -> ValueError:
    """A message for an error that stock code raised when it was called in an unusual way."""
    said = (str(error).strip() or type(error).__name__).splitlines()[0]
    return ValueError(f"{name} cannot be trained by pipeline.name=generic: its own call says {said!r}")


FAMILY = GenericFamily()
