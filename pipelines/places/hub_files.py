"""Small files of models on the hub: JSON of a few kilobytes by huggingface_hub, from its cache or the net; no weights.

`HF_HUB_OFFLINE`, `HF_TOKEN`, `HF_ENDPOINT` and the cache's place work as everywhere in that library. A process asks for
each file once, and does not wait a second time for a hub that does not answer.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

from flowrl.config.locations import split_revision
from flowrl.config.strict_yaml import read_mapping
from flowrl.pipelines.places.known_checkpoints import AGAIN, checkpoints
from flowrl.pipelines.places.modular_folders import MODULAR, stock_words
from flowrl.runtime.files import read_json

INDEX = "model_index.json"
TIMEOUT = 5.0
"""Seconds that the hub has to answer."""
Why = Literal["found", "no file", "no repository", "no revision", "gated", "offline", "no id"]
"""What became of a question: a repository is also missing where it is private and no token sees it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """A small file of a hub repository: its path in the cache, or why it is not there."""

    why: Why
    path: Path | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelCard:
    """What the hub says of a repository: its licence, whether you must accept it, and names of its files."""

    licence: str | None
    gated: bool
    files: tuple[str, ...]


_REFUSALS = read_mapping(Path(__file__).with_suffix(".yaml"))
_ANSWERS: dict[tuple[str, ...], Answer] = {}
_CARDS: dict[tuple[str, ...], ModelCard | None] = {}
_SILENT: set[str] = set()  # hubs that did not answer
_HEARD: set[str] = set()  # those that did


def small_json(model: str, name: str) -> dict[str, Any] | None:
    """A hub id's JSON file, perhaps at a revision; None if none is found. Raises ValueError: it is damaged."""
    if name != INDEX and ask(model).path is None:
        return None
    path = ask(model, name).path
    return None if path is None else read_json(path, AGAIN, finite=False)


def ask(model: str, name: str = INDEX) -> Answer:
    """Puts a small JSON file of a hub id into the cache, or tells why it is not there."""
    from huggingface_hub import constants

    assert name.endswith(".json"), name
    repo, revision = split_revision(model)
    offline = constants.is_offline_mode() or constants.ENDPOINT in _SILENT
    key = (constants.ENDPOINT, str(constants.HF_HUB_CACHE), repo, revision or "", name)
    if key not in _ANSWERS:
        offline = offline or not _answers(repo, revision, name)
        found = _ask(repo, revision, name, offline=offline)
        if offline:
            return found  # what is not in the cache now may be there later
        _ANSWERS[key] = found
    return _ANSWERS[key]


def _answers(repo: str, revision: str | None, name: str) -> bool:
    """Whether the hub answers at all: the library itself would try again for half a minute before it gave up."""
    from huggingface_hub import constants, errors, get_hf_file_metadata, hf_hub_url

    if constants.ENDPOINT not in _HEARD:
        try:
            url = hf_hub_url(repo, name, revision=revision, endpoint=constants.ENDPOINT)
            get_hf_file_metadata(url, timeout=TIMEOUT, endpoint=constants.ENDPOINT)
        except errors.HfHubHTTPError:
            pass  # an answer too
        except errors.HFValidationError:
            return True
        except Exception:  # the transport raises errors of every kind
            _SILENT.add(constants.ENDPOINT)
            return False
        _HEARD.add(constants.ENDPOINT)
    return True


def _ask(repo: str, revision: str | None, name: str, *, offline: bool) -> Answer:
    from huggingface_hub import constants, errors, hf_hub_download

    told: tuple[tuple[type[Exception], Why], ...] = (  # the narrower kind of error first
        (errors.HFValidationError, "no id"),
        (errors.GatedRepoError, "gated"),
        (errors.RepositoryNotFoundError, "no repository"),
        (errors.RevisionNotFoundError, "no revision"),
        (errors.LocalEntryNotFoundError, "offline"),
        (errors.EntryNotFoundError, "no file"),
    )
    try:
        path = hf_hub_download(
            repo, name, revision=revision, etag_timeout=TIMEOUT, local_files_only=offline, endpoint=constants.ENDPOINT
        )
    except Exception as error:  # a proxy, a broken answer, a full disk: the transport raises errors of every kind
        why: Why = next((why for kind, why in told if isinstance(error, kind)), "offline")
        if why == "offline" and not offline:
            _SILENT.add(constants.ENDPOINT)
        return Answer(why=why)
    return Answer(why="found", path=Path(path))


def model_card(model: str) -> ModelCard | None:
    """What the hub's page says of a repository, in one question; None offline and where it says nothing."""
    from huggingface_hub import HfApi, constants

    if constants.is_offline_mode() or constants.ENDPOINT in _SILENT:
        return None
    repo, revision = split_revision(model)
    key = (constants.ENDPOINT, repo, revision or "")
    if key not in _CARDS:
        try:
            info = HfApi(endpoint=constants.ENDPOINT).model_info(repo, revision=revision, timeout=TIMEOUT)
            data: Any = info.card_data or {}
            licence = data.get("license_name") or data.get("license")
            _CARDS[key] = ModelCard(
                licence=licence if isinstance(licence, str) else None,
                gated=bool(info.gated),
                files=tuple(file.rfilename for file in info.siblings or ()),
            )
        except Exception:  # as in `_ask`
            _CARDS[key] = None
    return _CARDS[key]


def refusal(model: str, asked: Answer, families: Sequence[str]) -> str:
    """Why a hub id could not be looked up, and what to do about it."""
    from huggingface_hub import constants

    repo, revision = split_revision(model)
    beside = Path(repo).parent
    meant = "" if beside.name == "runs" else did_you_mean(repo)
    names = [one.name for one in beside.iterdir()] if beside.is_dir() else []
    if asked.why in ("no repository", "offline") and not meant and (beside.is_dir() or beside.name == "runs"):
        near = get_close_matches(Path(repo).name, names, n=1)
        return (
            f"there is no run or folder {repo} here{f' (did you mean {beside / near[0]}?)' if near else ''}, and no "
            "model of that id is known: give a run, a folder, OWNER/NAME on the hub, or asset:NAME"
        )
    silence = "HF_HUB_OFFLINE is set" if constants.is_offline_mode() else f"{constants.ENDPOINT} does not answer"
    told: str = _REFUSALS.get(asked.why, _REFUSALS["no id"])
    return told.format(
        model=model,
        repo=repo,
        revision=revision,
        meant=meant,
        silence=silence,
        families=", ".join(families),
        instead=_instead(model) if asked.why == "no file" else "",
    )


def _instead(model: str) -> str:
    """What a repository holds in place of a pipeline, as far as its files tell."""
    card = model_card(model)
    files = () if card is None else card.files
    if MODULAR in files and (modular := ask(model, MODULAR).path) is not None:
        return f"; {stock_words(model, read_json(modular, AGAIN, finite=False))}"
    if {"pytorch_lora_weights.safetensors", "adapter_config.json"} & set(files):
        return ", but a LoRA: set policy.init_lora to a folder with it, and pipeline.model to the model it belongs to"
    single = [name for name in files if name.endswith(".safetensors") and "/" not in name]
    if single:
        return f", but files of weights: download {single[0]} and set pipeline.model to its path"
    return ": give the id of a repository in diffusers' layout (often NAME-diffusers)"


def did_you_mean(repo: str) -> str:
    """A question that suggests published checkpoints with a similar name, or one that `repo` shortens, as sd3.5 does
    stable-diffusion-3.5-medium; empty if there are none, or if `repo` is one."""
    last = {name.lower().rpartition("/")[2]: name for name in checkpoints()}
    word = repo.lower().rpartition("/")[2]
    near = get_close_matches(word, last, n=2, cutoff=0.8) or _lengthened(word, last)[:2]
    return f" (did you mean {' or '.join(last[one] for one in near)}?)" if near and repo not in checkpoints() else ""


def _lengthened(word: str, names: Mapping[str, str]) -> list[str]:
    """The last parts of `names`, the shortest first, that hold a word of three letters and figures or more; else those
    with the beginnings of whose words, from the first on, it is written; three letters leave no word out."""
    sought, parts = re.sub(r"[^a-z0-9]", "", word), re.compile("[A-Z]?[a-z]+|[A-Z]+|[0-9]+")
    plain = {last: " ".join(parts.findall(name.rpartition("/")[2])).lower() for last, name in names.items()}
    within = [last for last, text in plain.items() if sought in text.replace(" ", "")]
    order = f"(?:|{'.*' if len(sought) > 3 else '[^ ]*'} )".join(sought)
    within = within or [last for last, text in plain.items() if re.match(order, text)]
    return sorted(within, key=len) if len(sought) > 2 else []
