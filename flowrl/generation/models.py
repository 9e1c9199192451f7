"""Finds a model, how to sample it, and its fingerprint, for commands such as `flowrl sample` and `flowrl eval`."""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from flowrl.config.locations import at_revision
from flowrl.config.options import unknown_name
from flowrl.config.strict_yaml import read_mapping
from flowrl.config.train import load_config, model_location
from flowrl.generation.sampling_options import SamplingOptions
from flowrl.prompts.loading import Prompt
from flowrl.rendering.markup import plural
from flowrl.runtime.files import read_json
from flowrl.training.model_files import MODEL, add_file, add_files, files_of, hub_commit

# diffusers and peft take seconds to import, and images that exist are judged without them: functions import them.
if TYPE_CHECKING:
    from flowrl.pipelines import Pipeline
    from flowrl.trajectory import Schedule

EMBEDDED = "asset:tiny-sd3"
WORLD_MODELS = (EMBEDDED, "asset:tiny-sd15")
"""Models that ship with flowrl and draw the embedded world's images."""
EMBEDDED_VIDEO = "asset:tiny-wan"
"""The shipped model that draws the embedded world's clips."""

SHIPPED: dict[str, dict[str, Any]] = read_mapping(Path(__file__).with_name("shipped_models.yaml"))
"""Default sampling of the models that ship with flowrl."""

SAMPLING = "flowrl_sampling.json"
"""File in the folder of a merged model with the sampling settings of its run's evaluations."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """A model to sample, with its usual sampling settings."""

    model: str
    lora: Path | None
    num_steps: int
    guidance_scale: float
    grid: str
    max_sequence_length: int | None
    dtype: str
    quantize: str = "none"
    """Form of the denoiser's weights, `pipeline.quantize` of a run."""
    offload: tuple[str, ...] = ()
    """Parts that rest on the host while unused, `pipeline.offload` of a run."""
    family: str = "sd3"
    options: dict[str, Any] = field(default_factory=dict)
    """Further options of the family: size, frames."""
    variant: str | None = None
    """Ending of the weight files' names, `pipeline.variant` of a run."""
    negative: str = ""
    """Negative prompt for prompts without their own."""
    shift: float | None = None
    """Shift of the noise levels; None takes the model's own."""
    first_block_cache: float = 0.0
    """Threshold of First-Block Cache; 0 is off."""
    training_size: tuple[int | None, int | None] | None = None
    """Height and width that decide the noise levels (a side of None is the model's own); None takes the drawn size."""
    train_prompts: str | None = None
    """Training prompts of a run."""
    trained_from: str | None = None
    """The model before training, if a run trained all weights and so has another `model`."""
    trained_variant: str | None = None
    """Its `variant`."""

    @property
    def tuned(self) -> bool:
        """Whether there is a model before training besides this one."""
        return self.lora is not None or self.trained_from is not None

    @property
    def sampling(self) -> dict[str, Any]:
        """The settings that a folder with the same model must store to be sampled in the same way."""
        names = ("num_steps", "guidance_scale", "grid", "max_sequence_length", "shift")
        size = {name: self.options[name] for name in ("height", "width", "num_frames", "fps") if name in self.options}
        return {name: getattr(self, name) for name in names} | {"options": size}

    @property
    def told(self) -> str:
        """Steps, guidance and cache, in words."""
        cache = f", First-Block Cache {self.first_block_cache:g}" if self.first_block_cache else ""
        return f"{plural(self.num_steps, 'step')}, guidance {self.guidance_scale:g}{cache}"

    def before_training(self) -> Source:
        """The model before training, sampled in the same way."""
        own = self.trained_variant if self.trained_from else self.variant
        return replace(self, model=self.trained_from or self.model, lora=None, trained_from=None, variant=own)

    @property
    def height(self) -> int | None:
        """Pixels; None is the model's own."""
        return self.options.get("height")

    @property
    def width(self) -> int | None:
        """Pixels; None is the model's own."""
        return self.options.get("width")

    @staticmethod
    def of_run(config_file: Path, *, base: bool, lora: Path | None) -> Source:
        """The model and sampling of a run's evaluations, or its model before training with `base`."""
        from flowrl.training.parts import model_family

        config = load_config(config_file)
        scale, full = config.eval.guidance_scale, config.policy.train == "full"
        trained, evaluated = (config.pipeline.height, config.pipeline.width), (config.eval.height, config.eval.width)
        elsewhere = config.eval.shift == "training" and evaluated != (None, None)  # at the rollouts' noise levels
        own = at_revision(config.pipeline.model, config.pipeline.revision)
        drawn: dict[str, Any] = {"height": trained[0], "width": trained[1], "num_frames": config.pipeline.num_frames}
        drawn |= {"fps": config.pipeline.fps, "vae_slice": config.pipeline.vae_slice}
        drawn |= _known({"height": evaluated[0], "width": evaluated[1]})
        drawn["vae_dtype"] = None if config.pipeline.vae_dtype == "float32" else config.pipeline.vae_dtype
        source = Source(
            model=str(config_file.parent / MODEL) if full else own, trained_from=own if full else None,
            trained_variant=config.pipeline.variant if full else None,
            lora=lora if full else lora or config_file.parent / "lora",
            num_steps=config.eval.num_steps or config.sampler.num_steps, grid=config.eval.grid or config.sampler.grid,
            guidance_scale=config.sampler.guidance_scale if scale is None else scale,
            max_sequence_length=config.pipeline.max_sequence_length, dtype=config.pipeline.dtype,
            quantize=config.pipeline.quantize, offload=config.pipeline.offload,
            family=model_family(config.pipeline).name, variant=None if full else config.pipeline.variant,
            options=_known(drawn) | config.pipeline.options, train_prompts=config.prompts.train,
            shift=config.sampler.shift if isinstance(config.eval.shift, str) else config.eval.shift,
            negative=config.prompts.negative, training_size=trained if elsewhere else None,
        )  # fmt: skip
        return source.before_training() if base else source

    @staticmethod
    def of_model(model: str, lora: Path | None) -> Source:
        """A model with its usual sampling."""
        from flowrl.pipelines import GENERIC, family_of
        from flowrl.pipelines.generic.generic_family import FAMILY
        from flowrl.pipelines.places.known_checkpoints import usual_sampling

        family = family_of(model_location(model))
        own = FAMILY.sampling(model) if family in GENERIC else usual_sampling(family, model)
        usual = {"max_sequence_length": None, "grid": "diffusers"} | own | SHIPPED.get(model, {})
        kept = Path(model).expanduser() / SAMPLING
        usual |= read_json(kept) if kept.is_file() else {}
        return Source(model=model, lora=lora, dtype="float32", family=family, **usual)


def find_source(
    model: str, *, base: bool = False, lora: Path | None = None, sampling: SamplingOptions | None = None
) -> Source:
    """Reads a run's own settings, or takes a model with defaults; arguments win. Loads no weights.

    Args:
        model: a run folder, what a run trained (its `lora/` or `model/`), a LoRA in PEFT's layout, which names its
            base, a folder written by diffusers, `asset:tiny-sd3`, or a hub id.
        base: take a run's model before training.
        lora: a LoRA folder to add; it replaces the LoRA of a run.
        sampling: replaces the settings of a run's evaluations, of `SHIPPED`, or the usual ones of the checkpoint or its
            family (16 tokens for the embedded models, float32).

    Raises ValueError: an unknown dtype, or a LoRA folder that does not name its model.
    """
    from flowrl.training.parts import DTYPES

    given = sampling or SamplingOptions()
    if given.dtype is not None and given.dtype not in DTYPES:
        raise ValueError(f"`dtype`: {unknown_name('dtype', given.dtype, DTYPES)}")
    model, lora = _owner_of_lora(model, lora)
    config_file = Path(model) / "config.yaml"
    found = Source.of_run(config_file, base=base, lora=lora) if config_file.is_file() else Source.of_model(model, lora)
    wanted: dict[str, Any] = {
        "num_steps": given.steps,
        "guidance_scale": given.guidance,
        "max_sequence_length": given.max_sequence_length,
        "dtype": given.dtype,
        "first_block_cache": given.first_block_cache,
    }
    size = {"height": given.height, "width": given.width}
    return replace(found, **_known(wanted), options=found.options | _known(size))


def _known(given: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in given.items() if value is not None}


def _owner_of_lora(model: str, lora: Path | None) -> tuple[str, Path | None]:
    """The run or model that the LoRA of a folder belongs to, and the LoRA; other models as they are."""
    from flowrl.pipelines.places.lora_places import CARD, is_lora

    folder = Path(model).expanduser()
    owner = folder.resolve().parent
    if folder.name == MODEL and (folder / "model_index.json").is_file() and (owner / "config.yaml").is_file():
        return str(owner), lora
    if not is_lora(folder):
        return model, lora
    if lora is not None:
        raise ValueError(f"{model} is a LoRA and `lora` gives another: give the model that they belong to instead")
    if (owner / "config.yaml").is_file():
        return str(owner), folder
    card = (folder if folder.is_dir() else folder.parent) / CARD
    said = read_json(card, finite=False) if card.is_file() else {}
    named = said.get("base_model_name_or_path")
    if not named:
        raise ValueError(f"{model} is a LoRA that names no base model: give that one, and `lora` {model}, or a {CARD}")
    return at_revision(str(named), said.get("revision")), folder


def find_lora(model: str, command: str, sampling: SamplingOptions | None = None) -> tuple[Source, Path]:
    """`find_source` of a model and its LoRA, for a `command` that needs one, which the message names. Raises
    ValueError: it has none, or `find_source` refuses it."""
    from flowrl.pipelines.places.lora_places import is_lora

    place = Path(model).expanduser()
    if not place.exists() or is_lora(place) or (place / "config.yaml").is_file() or place.name == MODEL:
        source = find_source(model, sampling=sampling)
        if source.lora is not None:
            return source, source.lora
        if source.trained_from is not None:
            raise ValueError(f"{model} trained all weights, no LoRA to {command}: share {source.model} by 'hf upload'")
    raise ValueError(f"{model} has no LoRA: give a run folder, or the folder of a LoRA that a run wrote")


def check_source(source: Source, *, judging: str | None = None, videos: bool = False) -> None:
    """Refuses a missing or invalid model or LoRA, as far as it can tell without loading weights. `judging` is the
    command that judges the samples, which takes models of videos or of images alone (`videos`); None takes any."""
    from flowrl.pipelines import family, family_for
    from flowrl.training.parts import check_cached

    if source.trained_from is not None and not (Path(source.model) / "model_index.json").is_file():
        run = Path(source.model).parent
        raise ValueError(f"{run} has no {MODEL}/ yet: finish it with 'flowrl train resume={shlex.quote(str(run))}'")
    family(source.family).check(model_location(source.model), None)
    check_cached(source.first_block_cache, family(source.family), model_location(source.model))
    if judging is not None and family_for(source.family, source.model).videos != videos:
        if videos:
            raise ValueError(
                f"{source.model} makes images (family {source.family}) and {judging} judges videos: give a model that "
                "makes videos."
            )
        raise ValueError(
            f"{source.model} makes videos (family {source.family}) and {judging} judges images: give a model that "
            "makes images. Videos are drawn by 'flowrl sample' and scored by 'flowrl eval' with `benchmark` "
            "video_panel and by a run's own evaluations (eval.rewards)."
        )
    if source.lora is not None:
        check_lora(source.lora, source)


def check_lora(place: Path, source: Source) -> None:
    """Reads a LoRA and compares it with the network of a source without its weights. Raises ValueError: there is none,
    it cannot be read, or it belongs to another model."""
    from flowrl.pipelines import family, stock_of
    from flowrl.pipelines.weights.lora import refuse_other_network
    from flowrl.pipelines.weights.lora_files import read_lora

    location = model_location(source.model)
    lora = read_lora(place, stock_of(source.family, location))
    network = family(source.family).meta_denoiser(location)
    if network is not None:
        refuse_other_network(network, lora)


def with_negative(prompts: Sequence[Prompt], source: Source) -> list[Prompt]:
    """The prompts, with the source's negative prompt if theirs is empty."""
    return [prompt if prompt.negative else replace(prompt, negative=source.negative) for prompt in prompts]


def load_source(source: Source, device: str | None = None) -> Pipeline:
    """Loads the pipeline with its LoRA, on the named device or else the best one."""
    import torch

    from flowrl.pipelines import family, stock_of
    from flowrl.pipelines.weights.loading_choices import Loading
    from flowrl.pipelines.weights.lora import add_saved_lora
    from flowrl.training.parts import DTYPES

    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    pipeline = family(source.family).load(
        model_location(source.model),
        dtype=DTYPES[source.dtype],
        device=device,
        how=Loading(quantize=source.quantize, offload=source.offload, variant=source.variant),
        **_known({"max_sequence_length": source.max_sequence_length}),
        **source.options,
    )
    if source.lora is not None:
        add_saved_lora(pipeline.denoiser, source.lora, stock_of(source.family, pipeline.model))
    return pipeline


def schedule_of(source: Source, pipeline: Pipeline) -> Schedule:
    """The usual noise levels of a source, for its loaded pipeline."""
    if source.training_size is not None:
        pipeline = pipeline.resized(*source.training_size)
    return pipeline.schedule(source.num_steps, source.grid, source.shift)


class HasFolder(Protocol):
    """An object with a folder, such as a run that `flowrl.train` returned."""

    @property
    def folder(self) -> Path:
        """The folder."""


Model = str | Path | HasFolder
"""A run folder or what `flowrl.train` returned, a LoRA or model folder, a hub id or `asset:NAME`."""
Words = str | Path | Sequence[str | Path]
"""One or several."""


def place_of(model: Model) -> str:
    """The name of a model; a result of another function stands for its folder."""
    return str(model) if isinstance(model, str | Path) else str(model.folder)


def several(given: Any) -> list[Any]:
    """One or several, as a list.

    >>> several("a red circle"), several((1, 2))
    (['a red circle'], [1, 2])
    """
    return list(given) if isinstance(given, Iterable) and not isinstance(given, str | Mapping) else [given]


def label_of(model: str, lora: Path | None = None) -> str:
    """A short name for tables: the last part of a path or hub id, with that of an added LoRA."""
    path = Path(model.removeprefix("asset:"))
    parts = [part for part in (path.parent.name, path.name) if part] if path.name == "lora" else [path.name]
    return "-".join([*parts, *([lora.name] if lora is not None else [])]) or "model"


def fingerprint(source: Source) -> str | None:
    """A hash of the model's and LoRA's files as `flowrl.training.model_files.add_file` reads them, or a hub id's
    commit; None if the id is not on this machine yet."""
    from flowrl.pipelines.places.lora_places import files_of_lora

    digest = hashlib.sha256()
    location = model_location(source.model)
    folder = Path(location)
    if folder.exists():
        add_files(digest, files_of(folder))
    else:
        commit = hub_commit(location)
        if commit is None:
            return None
        digest.update(f"{location}@{commit}".encode())
    if source.variant is not None:
        digest.update(f"variant {source.variant}".encode())
    if source.lora is not None:
        for path in files_of_lora(source.lora):
            add_file(digest, path, f"lora/{path.name}")
    return digest.hexdigest()[:16]
