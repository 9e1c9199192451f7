"""`flowrl push`: lists what would be shared of a run, writes it into a folder, and uploads it where that was said."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path

import yaml
from safetensors.torch import save

from flowrl.commands.export.run import exported
from flowrl.config.locations import hub_id
from flowrl.evaluation.board.finished import Entry, find_entries
from flowrl.generation.models import Source, check_source, find_source, lora_of
from flowrl.pipelines import stock_of
from flowrl.publishing.base_licences import said_by_hand, terms_of
from flowrl.publishing.hub_upload import check_target, upload
from flowrl.publishing.lora_exports import SavedLora, finite_loras
from flowrl.publishing.model_card import add_to_card
from flowrl.publishing.model_card_text import Card, card_text, task_of_run
from flowrl.publishing.places import settings_without_places
from flowrl.publishing.shared_files import README, Shared, image_files, listed, write_files
from flowrl.runs.held_out_result import held_out
from flowrl.runs.run_data import RunData, read_run
from flowrl.runtime.scrubbing import say as print


def run(parsed: argparse.Namespace) -> int:
    """Lists, writes, uploads.

    Raises:
        ValueError: there is no LoRA, an option is bad, the folder holds something else, or the hub cannot be used.
    """
    data = read_run(parsed.run)
    source = find_source(str(parsed.run))
    try:
        lora = lora_of(source, str(parsed.run), "push")
    except ValueError as error:
        raise ValueError(f"{error}; 'hf upload OWNER/NAME FOLDER' uploads one") from error
    check_source(source)
    if (parsed.run / "lora.diverged").exists():
        print(f"note: {parsed.run} diverged; what is shared is its last LoRA whose images were finite")
    if parsed.to is not None and not parsed.dry_run:
        check_target(parsed.to, update=parsed.update, public=parsed.public)
    elif parsed.to is None and (parsed.public or parsed.update):
        raise ValueError("--public and --update are of an upload: say where to with --to OWNER/NAME")
    files, licensed = collect(parsed, data, source, lora)
    folder = parsed.folder or parsed.run / "share"
    print(f"{'would be ' if parsed.dry_run else ''}shared of {parsed.run}:")
    print(listed(files))
    if parsed.to is not None and not licensed:
        raise ValueError(
            f"the licence of {source.model} is not known here: read it, then state that of the LoRA with --licence ID"
        )
    if parsed.dry_run:
        print("nothing was written or sent")
        return 0
    write_files(folder, files)
    print(f"wrote {folder}")
    if parsed.to is not None:
        address = upload(parsed.to, files, public=parsed.public)
        print(f"uploaded to {address}, {'public' if parsed.public else 'private'}")
    return 0


def collect(parsed: argparse.Namespace, data: RunData, source: Source, lora: Path) -> tuple[list[Shared], bool]:
    """Everything that is shared, the card first, and whether a licence is known.

    Raises:
        ValueError: as `run`.
    """
    name = parsed.to.partition("/")[2] if parsed.to else data.name
    loras = finite_loras(lora, stock_of(source.family, source.model))
    weights = _lora_files(loras, source)
    base = parsed.base or hub_id(source.model)
    terms = said_by_hand(parsed.licence) if parsed.licence else terms_of(base or source.model)
    comfyui, extra = _comfyui(loras, source, name)
    images, sampled = image_files(data, parsed.pairs)
    entries = _entries(parsed.eval)
    card = Card(
        name=name, run=data, source=source, base=base, terms=terms, held=held_out(data), images=images,
        comfyui=comfyui, task=task_of_run(data),
    )  # fmt: skip
    config = yaml.safe_dump(settings_without_places(dict(data.config)), sort_keys=False, allow_unicode=True)
    text = _with_benchmarks(card_text(card), name, entries)
    front = Shared(name=README, content=text.encode())
    settings = Shared(name="config.yaml", content=config.encode())
    return [front, *weights, *extra, settings, *sampled], terms is not None


def _lora_files(loras: dict[str, SavedLora], source: Source) -> list[Shared]:
    """The LoRA, written again so that nothing but tensors, rank, alpha and layers travels."""
    files = []
    for name, content in exported(loras, "diffusers", source, "").items():
        assert not isinstance(content, str)
        tensors, notes = content
        files.append(Shared(name=name, content=save(tensors, metadata={"format": "pt"} | notes)))
    return files


def _comfyui(loras: dict[str, SavedLora], source: Source, name: str) -> tuple[str, list[Shared]]:
    """What the card says of ComfyUI, and the files for it where they differ from the LoRA's own."""
    try:
        found = exported(loras, "comfyui", source, name)
    except ValueError as error:
        return f"ComfyUI: no file is here for it ({error}).", []
    files = [
        Shared(name=f"comfyui/{file}", content=save(content[0], metadata={"format": "pt"}))
        for file, content in found.items() if not isinstance(content, str)
    ]  # fmt: skip
    names = " and ".join(f"`{file.name}`" for file in files)
    more = "; the two files belong to the two experts, each with a loader of its own" if len(files) > 1 else ""
    return (
        f"ComfyUI: put {names} into `ComfyUI/models/loras/`, and the node `LoraLoaderModelOnly` between the loader of "
        f"the base model and the sampler, at strength 1{more}."
    ), files


def _entries(given: Sequence[str]) -> list[Entry]:
    entries = [entry for entry in find_entries(given) if entry.side == "model"]
    labels = list(dict.fromkeys(entry.pool or entry.label for entry in entries))
    if len(labels) > 1:
        raise ValueError(
            f"--eval: the results are of {', '.join(labels)}, and a card is of one model: give those of one"
        )
    return entries


def _with_benchmarks(text: str, name: str, entries: Sequence[Entry]) -> str:
    """The card with finished evaluations in its metadata."""
    if not entries:
        return text
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / README
        path.write_text(text, encoding="utf-8")
        add_to_card(path, name, entries)
        return path.read_text(encoding="utf-8")
