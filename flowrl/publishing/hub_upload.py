"""Uploads listed files to a repository of the hub, in one commit; the only code here that sends anything."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flowrl.publishing.shared_files import Shared

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
