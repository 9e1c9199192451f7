"""Whether models and servers that rewards name can be had, asked before anything is drawn for them.

Options of rewards are checked without a look at the hub or at a server, since most of what reads them needs neither.
Within `look_for_models` the same checks look: for a model on the hub in its cache, then on the hub; for a server at
its address. An incomplete model or a server that answers and then fails is found only when loaded or asked.
"""

from __future__ import annotations

import socket
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from urllib.parse import urlsplit

TIMEOUT = 5.0
"""Seconds that a hub or a server has to answer."""
_LOOKING: ContextVar[bool] = ContextVar("looking", default=False)


@contextmanager
def look_for_models() -> Iterator[None]:
    """Inside, checks of options look for what they name."""
    token = _LOOKING.set(True)
    try:
        yield
    finally:
        _LOOKING.reset(token)


def look_for_model(model: str, *, start: str, option: str, what: str) -> None:
    """Refuses a model that is neither here, nor in the hub's cache, nor on a hub that answers."""
    if not _LOOKING.get() or Path(model).expanduser().exists():
        return
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError
    from huggingface_hub.file_download import repo_folder_name

    kept = Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=model, repo_type="model") / "snapshots"
    if any(kept.glob("*/*")):
        return
    if constants.is_offline_mode():
        why = "HF_HUB_OFFLINE is set"
    else:
        try:
            HfApi(endpoint=constants.ENDPOINT).model_info(model, timeout=TIMEOUT)
            return
        except GatedRepoError:
            why = "its licence is to be accepted on the hub, with HF_TOKEN set"
        except (RepositoryNotFoundError, HFValidationError):
            why = "the hub has no such model, or HF_TOKEN does not let you see it"
        except Exception:  # the transport raises errors of every kind
            why = f"{constants.ENDPOINT} does not answer"
    raise ValueError(
        f"{start}the {what} model {model!r} is not on this machine, and {why}: give {option}: a folder that holds it, "
        f"or fetch it beforehand with `hf download {model}`."
    )


def look_for_servers(servers: Sequence[str], *, option: str) -> None:
    """Refuses servers none of which takes a connection; one behind a proxy is not asked."""
    if not _LOOKING.get():
        return
    for server in servers:
        parts = urlsplit(server)
        host, port = parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
        if parts.scheme in urllib.request.getproxies() and not urllib.request.proxy_bypass(host):
            return
        with suppress(OSError), socket.create_connection((host, port), timeout=TIMEOUT):
            return
    raise ValueError(
        f"no server listens at {', '.join(servers)}: start it, or correct the address, option {option}; nothing was "
        "drawn yet."
    )
