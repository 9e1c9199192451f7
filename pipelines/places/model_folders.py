"""A model folder before any weight is read: what its index says, which parts are there, what else a path is."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from flowrl.config.locations import split_revision
from flowrl.config.strict_yaml import read_mapping
from flowrl.pipelines.places.hub_files import INDEX
from flowrl.pipelines.places.known_checkpoints import AGAIN
from flowrl.pipelines.places.modular_folders import MODULAR, stock_words
from flowrl.prompts.tokenizer_checks import check_tokenizer_files
from flowrl.runtime.digests import files_below
from flowrl.runtime.files import read_json

_NETWORKS = re.compile(r"(vae|unet|transformer|text_encoder|image_encoder)(_\d+)?")
_PARTS = re.compile(
    r"(vae|unet|transformer|scheduler|tokenizer|text_encoder|image_encoder|feature_extractor|processor)(_\d+)?"
)
_READS_TEXT = re.compile(r"Tokenizer|(?<!Image)(?<!Video)Processor")
_WEIGHTS = re.compile(r"\.(safetensors|bin)$")
_VARIANT = re.compile(r"\w+(-\d+-of-\d+)?\.(?P<variant>[A-Za-z]\w*)(-\d+-of-\d+)?\.(safetensors|bin)")
_PICKLES = (".ckpt", ".pt", ".pth", ".bin")
_FILES: Mapping[str, str] = read_mapping(Path(__file__).with_suffix(".yaml"))


class Faulty(ValueError):
    """A model folder is not what its pipeline needs."""


def read_index(model: str) -> dict[str, Any]:
    """The model_index.json of a folder. Raises Faulty: as `check_index`, or the folder has none."""
    path = Path(model) / INDEX
    if not path.is_file():
        raise Faulty(no_pipeline(model))
    index = read_json(path, AGAIN, finite=False)
    check_index(model, index)
    return index


def check_index(model: str, index: Mapping[str, Any]) -> None:
    """Refuses a model_index.json that no library can read."""
    where, stock = f"{model}/{INDEX}", index.get("_class_name")
    if isinstance(stock, list):
        raise Faulty(
            f"{where} names a class in code of its own, _class_name {stock}, and no code of a model is run: set it to "
            "the class of diffusers that the model is for, and remove the file of code"
        )
    if not isinstance(stock, str) or not stock:
        raise Faulty(
            f"{where} has the _class_name {stock!r}, and it names the class of diffusers that loads the model, such as "
            f'"StableDiffusion3Pipeline": {AGAIN}'
        )
    for part, entry in index.items():
        names = isinstance(entry, list) and any(isinstance(one, str) or one is None for one in entry)
        if not names and not (_PARTS.fullmatch(part) and entry is not None):
            continue
        whole = isinstance(entry, list) and len(entry) == 2 and (entry == [None, None] or _texts(entry))
        if not whole:
            raise Faulty(
                f'{where}: {part} is {entry!r}, and a part is ["LIBRARY", "CLASS"], or [null, null] where it is left '
                f"out: {AGAIN}"
            )


def check_parts(
    model: str, index: Mapping[str, Any], *, needed: Collection[str] = (), given: Mapping[str, Any]
) -> None:
    """Refuses a folder with weights that lacks a part. Parts of `needed` must be there, those of `given` need not."""
    if not any(_WEIGHTS.search(path.name) for path in Path(model).glob("*/*")):
        return  # small files alone, of which a plan can be made
    for part in needed:
        if not _texts(index.get(part)):
            raise Faulty(
                f"{model} has no {part}, its {INDEX} says {index.get(part)!r} of it, and {index.get('_class_name')} "
                f"needs it: copy that part from the model it was saved from, with its entry in {INDEX}"
            )
    for part, entry in index.items():
        if _texts(entry) and part not in given and not part.startswith("_"):
            _check_part(Path(model), part, str(entry[1]))


def _check_part(model: Path, part: str, kind: str) -> None:
    """Refuses a part that lacks its folder, its vocabulary or its settings."""
    if not (model / part).is_dir():
        raise Faulty(f"{model} has no folder {part}, which its {INDEX} names ({kind}): {AGAIN}, with that folder")
    if _READS_TEXT.search(kind):
        try:
            check_tokenizer_files(model / part, AGAIN)
        except ValueError as error:
            raise Faulty(str(error)) from error
    settings = "scheduler_config.json" if part == "scheduler" else "config.json"
    has_settings = part == "scheduler" or _NETWORKS.fullmatch(part) is not None
    if has_settings and not (model / part / settings).is_file():
        raise Faulty(f"{model / part} has no {settings}, which says how its {kind} is made: {AGAIN}, with that file")


def variant_of(name: str) -> str | None:
    """The variant that a file of weights is of, by its name: `NAME.VARIANT.ENDING`, of pieces in either spelling."""
    found = _VARIANT.fullmatch(name)
    return None if found is None else found["variant"]


def part_entries(model: str) -> dict[str, tuple[str, str]]:
    """Parts of a folder that its index names, with library and class."""
    index = read_index(model)
    return {part: (entry[0], entry[1]) for part, entry in index.items() if _texts(entry)}


def part_class(library: str, name: str) -> type | None:
    """The class of a part, of diffusers or transformers; None of another library."""
    import diffusers
    import transformers

    homes = {"diffusers": diffusers, "transformers": transformers}
    home = homes.get(library) or getattr(diffusers.pipelines, library, None)
    found = getattr(home, name, None)
    return found if isinstance(found, type) and hasattr(found, "from_pretrained") else None


def check_weight_files(model: str, part: str, variant: str | None) -> None:
    """Refuses a part without files of weights that can be read."""
    place = Path(model) / part
    names = sorted(path.name for path in place.glob("*"))
    own = [name for name in names if _WEIGHTS.search(name)]
    variants = {found for name in own if (found := variant_of(name)) is not None}
    if variant is not None or any(variant_of(name) is None for name in own):
        return
    if variants:
        which = " or ".join(f"pipeline.variant={name}" for name in sorted(variants))
        raise Faulty(f"{place} has weights of the variant {', '.join(sorted(variants))} alone: set {which}")
    other = [name for name in names if name.endswith((".gguf", ".sft", *_PICKLES))]
    instead = f", but {', '.join(other)}, which is not read" if other else ""
    raise Faulty(f"{place} has no weights (.safetensors){instead}: {AGAIN}, with them")


def no_pipeline(model: str) -> str:
    """Why an existing path is not a model, and what to do about it."""
    path = Path(model)
    ending = path.suffix.lower()
    if (path / MODULAR).is_file():
        return stock_words(model, read_json(path / MODULAR, AGAIN, finite=False))
    if path.is_dir():
        parts = [one.name for one in sorted(path.glob("*")) if (one / "config.json").is_file()]
        lora = [path / name for name in ("pytorch_lora_weights.safetensors", "adapter_config.json")]
        if any(one.is_file() for one in lora):
            cure = "it holds a LoRA: set policy.init_lora to it, and pipeline.model to the model that it belongs to"
        elif (path.parent / INDEX).is_file():
            cure = f"it is a part of {path.parent}: set pipeline.model to that"
        elif single := [one.name for one in sorted(path.glob("*.safetensors"))]:
            cure = f"it holds files of weights: set pipeline.model to {path / single[0]}"
        elif parts:
            cure = f"it holds the parts {', '.join(parts)} without it: {AGAIN}, with that file"
        else:
            cure = f"give the folder that holds {INDEX}; {AGAIN}"
        return f"{model} is not a diffusers pipeline: it has no {INDEX}; {cure}"
    told = _FILES.get(ending, _FILES["pickle" if ending in _PICKLES else "other"])
    return f"{model} {told.format(renamed=path.with_suffix('.safetensors'))}"


def _texts(entry: Any) -> bool:
    """Whether an entry of the index names a library and a class."""
    return isinstance(entry, list | tuple) and len(entry) == 2 and all(isinstance(one, str) and one for one in entry)


SMALL = 2**28
"""Bytes of frozen parts that are copied rather than linked."""


def stock_folder(model: str) -> Path:
    """The folder of a model's files: itself, or that of a hub id in this machine's cache. Raises ValueError: a hub id
    whose files are not in the cache."""
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import try_to_load_from_cache

    repo, revision = split_revision(model)
    index = try_to_load_from_cache(repo, INDEX, revision=revision)
    if not isinstance(index, str):
        raise ValueError(
            f"policy.train=full saves a folder with all parts of {model}, and its files are not in this machine's "
            "cache: download it to a folder, and set pipeline.model to that"
        )
    return Path(index).parent


def take_frozen(source: Path, target: Path, trained: set[str], *, small: int) -> None:
    """Links the parts that the index of a stock folder names, or copies them where they have no more bytes than
    `small`; but for those that are trained."""
    parts = [name for name in read_json(source / INDEX, finite=False) if (source / name).is_dir()]
    files = [path for name in parts if name not in trained for path in files_below(source / name).values()]
    take = shutil.copyfile if sum(path.stat().st_size for path in files) <= small else _link
    shutil.copyfile(source / INDEX, target / INDEX)
    for path in files:
        place = target / path.relative_to(source)
        place.parent.mkdir(parents=True, exist_ok=True)
        take(path.resolve(), place)


def _link(source: Path, target: Path) -> None:
    """A second name of a file, or on another file system a symbolic link to it."""
    try:
        os.link(source, target)
    except OSError:
        target.symlink_to(source)
