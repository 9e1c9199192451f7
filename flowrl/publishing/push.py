"""Shares a run: a model card with the LoRA and its images, in a folder or on the hub; nothing else sends anything."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from safetensors.torch import save

from flowrl.config.bounds import check_counts
from flowrl.config.locations import hub_id
from flowrl.evaluation.board.board import of_one_model
from flowrl.generation.models import Model, Source, Words, check_source, find_lora, place_of, several
from flowrl.pipelines import stock_of
from flowrl.publishing.export import Content, files_of_form
from flowrl.publishing.lora_exports import SavedLora, finite_loras
from flowrl.publishing.model_card import RunCard, settings_without_places, task_of_run, terms_of
from flowrl.publishing.model_index import text_with
from flowrl.publishing.shared_files import README, Shared, image_files, list_files, write_files
from flowrl.runs.held_out_result import held_out
from flowrl.runs.run_data import read_run
from flowrl.runtime.public import public
from flowrl.runtime.scrubbing import say as print

_ID = re.compile(r"[\w][\w.-]*/[\w][\w.-]*")


def check_target(repository: str | None, *, update: bool, public: bool, dry_run: bool) -> None:
    """Refuses an impossible target before anything is written; a dry run does not ask the hub. Raises ValueError: no
    hub id, no token, no internet, or the repository exists and is not what you asked for."""
    if repository is None and (public or update):
        raise ValueError("`public` and `update` are for uploads: say where to with `to` OWNER/NAME")
    if repository is None:
        return
    if not _ID.fullmatch(repository) or Path(repository).exists():
        raise ValueError(
            f"`to` is the name of a repository on the hub, OWNER/NAME such as me/foxes, got {repository!r}: to write a "
            "folder of this machine, leave `to` out (flowrl push RUN FOLDER)"
        )
    if dry_run:
        return
    from huggingface_hub import constants, errors, get_token

    if constants.is_offline_mode():
        raise ValueError("`to` uploads, and HF_HUB_OFFLINE is set: unset it, or leave `to` out")
    if not get_token():
        raise ValueError(
            "`to` uploads, and there is no token: set HF_TOKEN to one that may write, or run 'hf auth login'; without "
            "`to` only the folder is written"
        )
    try:
        info = _api().repo_info(repository, timeout=10)
    except errors.RepositoryNotFoundError:
        return
    except Exception as error:  # the transport raises errors of every kind
        raise ValueError(_unreachable(error)) from error
    if not update:
        raise ValueError(f"{repository} is there already: `update` adds to it, or give another name")
    if not info.private and not public:
        raise ValueError(f"{repository} is public: say `public` to upload there, or give another name")


def upload(repository: str, files: Sequence[Shared], *, public: bool) -> str:
    """Makes a missing repository, uploads all or nothing, returns the address. Raises ValueError: refused or silent."""
    from huggingface_hub import CommitOperationAdd

    api = _api()
    operations = [
        CommitOperationAdd(
            path_in_repo=file.name,
            path_or_fileobj=file.content if isinstance(file.content, bytes) else str(file.content),
        )
        for file in files
    ]
    try:
        address = api.create_repo(repository, private=not public, exist_ok=True)
        private = public or api.repo_info(repository, timeout=10).private
        if not private:  # somebody made it meanwhile, or the owner's settings did not let it be
            raise ValueError(f"{repository} is public and nothing was uploaded: say `public`, or give another name")
        api.create_commit(repository, operations=operations, commit_message="LoRA and model card by flowrl push")
    except ValueError:
        raise
    except Exception as error:  # as above
        raise ValueError(_unreachable(error)) from error
    return str(address)


def _api() -> Any:
    from huggingface_hub import HfApi, constants

    return HfApi(endpoint=constants.ENDPOINT)


def _unreachable(error: Exception) -> str:
    from huggingface_hub import constants

    said = " ".join(str(error).split())[:300] or type(error).__name__
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status in (401, 403):
        return f"{constants.ENDPOINT} refused ({said}): use a token that may write there"
    return f"{constants.ENDPOINT} could not be used ({said}): the folder is complete, upload it when there is a net"


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedRun:
    """The shared files of a run."""

    files: dict[str, int]
    """File name -> bytes."""
    folder: Path | None
    """Where the files are; None if none were written."""
    address: str | None
    """Address of the repository; None if nothing was uploaded."""


@public
def push(
    run: Model,
    folder: str | Path | None = None,
    *,
    dry_run: bool = False,
    results: Words = (),
    base: str | None = None,
    licence: str | None = None,
    pairs: int = 4,
    to: str | None = None,
    public: bool = False,
    update: bool = False,
    show: bool = True,
) -> SharedRun:
    """Lists what you would share of a run, writes it into a folder, and uploads it if you say where to.

    Args:
        run: run folder, or what `train` returned.
        folder: where card, LoRA and images go; None is `RUN/share`.
        dry_run: only list; write and send nothing.
        results: finished evaluations of this model, for the card's numbers.
        base: hub id of the base model, if the run names a folder.
        licence: licence of the LoRA, as the hub calls it; None is what the base demands.
        pairs: pairs of images before and after.
        to: OWNER/NAME of a repository to upload to, private unless `public`.
        public: let everybody see the repository.
        update: add to a repository that exists.
        show: print the list.

    Raises:
        ValueError: the run has no LoRA, an argument is wrong, the folder holds something else, or the hub refuses.
    """
    check_counts(pairs=pairs)
    place = Path(place_of(run))
    data = read_run(place)
    source, lora = find_lora(str(place), "push")
    check_source(source)
    if (place / "lora.diverged").exists():
        print(f"note: {place} diverged; what is shared is its last LoRA whose images were finite")
    check_target(to, update=update, public=public, dry_run=dry_run)

    name = to.partition("/")[2] if to else data.name
    loras = finite_loras(lora, stock_of(source.family, source.model))
    comfyui, extra = _comfyui(loras, source, name)
    images, sampled = image_files(data, pairs)
    base = base or hub_id(source.model)
    card = RunCard(
        name=name, run=data, source=source, base=base, terms=terms_of(base or source.model, licence),
        held=held_out(data), images=images, comfyui=comfyui, task=task_of_run(data),
    )  # fmt: skip
    text, measured = card.text(), [*map(str, several(results))]
    if measured:
        text, _ = text_with(text, name, of_one_model(measured)[1], README)
    config = yaml.safe_dump(settings_without_places(dict(data.config)), sort_keys=False, allow_unicode=True)
    files = [
        Shared(name=README, content=text.encode()),
        *_tensor_files(files_of_form(loras, "diffusers", source, "")),
        *extra,
        Shared(name="config.yaml", content=config.encode()),
        *sampled,
    ]
    if to is not None and card.terms is None:
        raise ValueError(
            f"the licence of {source.model} is not known here: read it, then state that of the LoRA with `licence` ID"
        )
    if not data.finished:
        print(f"note: {place} has not finished, and the card says so")
    sizes, listed = {file.name: file.size for file in files}, f"shared of {place}:\n{list_files(files)}"
    if dry_run:
        print(f"would be {listed}\nnothing was written or sent")
        return SharedRun(files=sizes, folder=None, address=None)
    folder, address = Path(folder or place / "share"), None
    write_files(folder, files)
    print(f"{listed}\nwrote {folder}")
    if to is not None:
        address = upload(to, files, public=public)
        print(f"uploaded to {address}, {'public' if public else 'private'}")
    return SharedRun(files=sizes, folder=folder, address=address)


def _tensor_files(contents: Mapping[str, Content], folder: str = "") -> list[Shared]:
    """Rewrites a LoRA with only tensors, rank, alpha and layers."""
    return [
        Shared(name=f"{folder}{name}", content=save(content[0], metadata={"format": "pt"} | dict(content[1])))
        for name, content in contents.items()
        if not isinstance(content, str)
    ]


def _comfyui(loras: dict[str, SavedLora], source: Source, name: str) -> tuple[str, list[Shared]]:
    """The card's note on ComfyUI, and the files for it if they differ from the LoRA's own."""
    try:
        found = files_of_form(loras, "comfyui", source, name)
    except ValueError as error:
        return f"ComfyUI: no file is here for it ({str(error).replace('`form`', '--format')}).", []
    files = _tensor_files(found, "comfyui/")
    names = " and ".join(f"`{file.name}`" for file in files)
    more = "; the two files belong to the two experts, each with a loader of its own" if len(files) > 1 else ""
    return (
        f"ComfyUI: put {names} into `ComfyUI/models/loras/`, and the node `LoraLoaderModelOnly` between the loader of "
        f"the base model and the sampler, at strength 1{more}."
    ), files
