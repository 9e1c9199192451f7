"""Where the files of a LoRA are: a file by its path, a folder with one, a run, what `flowrl export` wrote."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

LORA_FILE, PEFT_FILE, CARD = "pytorch_lora_weights.safetensors", "adapter_model.safetensors", "adapter_config.json"
_NAMED = (LORA_FILE, PEFT_FILE, "adapter_model.bin", "pytorch_lora_weights.bin")
"""What diffusers and PEFT call the file in a folder, in the order in which they are looked for."""
_ENDINGS = (".safetensors", ".sft", ".bin", ".pt", ".pth", ".ckpt")
_MATRIX = re.compile(r"lora_|_lora\.|\.lora\.|hada_w|lokr_w")
_NOISE = ("high_noise", "low_noise")
"""In the names of two files for the two experts of one model; the first expert is that of high noise."""
EXPERTS = ("transformer", "transformer_2")


def is_lora(place: Path) -> bool:
    """Whether a folder, or a path to a file, is a LoRA; a run folder is not one, but has one."""
    from safetensors import SafetensorError, safe_open

    if not place.is_file():
        return _named(place) is not None and not (place / "config.yaml").is_file()
    if place.name == CARD or place.suffix not in _ENDINGS[:2]:
        return place.name == CARD
    try:  # other files of safetensors are whole models, or damaged
        with safe_open(place, framework="pt") as file:
            return any(_MATRIX.search(name) for name in file.keys())
    except (SafetensorError, OSError):
        return False


def lora_files(place: Path) -> dict[str, Path]:
    """The files with the weights of a LoRA, one for each network of a model of two experts, else under the name "". A
    place is a file; a folder with one (as diffusers, PEFT or `flowrl export` write it, or any one safetensors file); a
    folder with such a folder, which is how PEFT saves an adapter that has a name; a run folder. Raises ValueError:
    nothing is there, no LoRA is, or more than one."""
    folder = place.parent if place.name in _NAMED or place.name == CARD else place
    second = folder / EXPERTS[1]
    if place.name in (*_NAMED, CARD) and place.is_file() and not _named(second):
        return {"": place if place.name in _NAMED else _only(folder)}
    if folder.is_file():
        if folder.suffix in _ENDINGS:
            return {"": folder}
        raise ValueError(
            f"{place} is no LoRA that can be read: give a file that ends in {', '.join(_ENDINGS)}, its folder or a run "
            "folder"
        )
    if not folder.is_dir():
        if folder.name == "lora" and (folder.parent / "config.yaml").is_file():
            _of_run(folder.parent)  # its message says how to finish it
        raise ValueError(f"there is no folder {place}, nor a file: give the file of a LoRA, its folder or a run folder")
    if (folder / "config.yaml").is_file():
        return lora_files(_of_run(folder))
    if _named(second):
        return {EXPERTS[0]: _only(folder), EXPERTS[1]: _only(second)}
    return _pair_by_noise(folder) or {"": _only(folder)}


def _pair_by_noise(folder: Path) -> dict[str, Path]:
    """Two files for the two experts, told apart by their names; empty without such a pair."""
    found = [path for path in _weights(folder) if any(word in path.name for word in _NOISE)]
    if len(found) != 2 or _named(folder):
        return {}
    high, low = sorted(found, key=lambda path: _NOISE[1] in path.name)
    return {EXPERTS[0]: high, EXPERTS[1]: low} if high.name.replace(*_NOISE) == low.name else {}


def files_of_lora(place: Path) -> Iterator[Path]:
    """Every file that is read of a LoRA: its weights, and what states their alpha. Raises as `lora_files`."""
    for path in lora_files(place).values():
        yield path
        if (card := path.with_name(CARD)).is_file():
            yield card


def folder_of_lora(place: Path) -> Path:
    """The identity of a LoRA: for a run folder only its LoRA, else the place itself."""
    return _of_run(place) if (place / "config.yaml").is_file() else place


def _of_run(run: Path) -> Path:
    if (run / "model" / "model_index.json").is_file():
        raise ValueError(f"the run {run} trained all weights and has no LoRA: set pipeline.model to {run / 'model'}")
    if not (run / "lora").is_dir():
        raise ValueError(f"the run {run} has no lora/ yet: finish it with 'flowrl train resume={run}'")
    return run / "lora"


def _named(folder: Path) -> Path | None:
    return next((folder / name for name in _NAMED if (folder / name).is_file()), None)


def _weights(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.suffix in _ENDINGS[:2] and path.is_file())


def _only(folder: Path) -> Path:
    """The one file with weights in a folder, or in one of its folders. Raises ValueError: none, or more than one."""
    if (named := _named(folder)) is not None:
        return named
    if (folder / "model_index.json").is_file():
        raise ValueError(f"{folder} is a whole model, not a LoRA: set pipeline.model to it")
    files = _weights(folder)
    inner = sorted(path for path in folder.iterdir() if path.is_dir() and _named(path) and path.name != EXPERTS[1])
    found = files or [path for one in inner if (path := _named(one)) is not None]
    if len(found) == 1:
        return found[0]
    if found:
        shown = ", ".join(path.name for path in (files or inner)[:4])
        raise ValueError(f"{folder} holds {len(found)} LoRAs ({shown}): give the path of one of them")
    raise ValueError(
        f"there is no LoRA in {folder}: looked for {LORA_FILE} (diffusers), {PEFT_FILE} or .bin (PEFT, flow_grpo), one "
        "other safetensors file, and for these in folders of it"
    )
