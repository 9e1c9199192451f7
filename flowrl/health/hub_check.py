"""Whether the model hub is asked, answers, and knows the token; the token itself is never shown."""

from __future__ import annotations

from flowrl.health.diagnosis import Check
from flowrl.pipelines.places.hub_files import TIMEOUT


def hub_check(*, offline: bool = False) -> Check:
    """The hub as a run would meet it.

    Args:
        offline: asks nothing.
    """
    from huggingface_hub import constants, get_token

    place = constants.ENDPOINT
    token = get_token()
    said = "a token is set" if token else "no token is set: gated models (FLUX, SD3.5) need HF_TOKEN"
    cached = f"models come from folders and the cache, {constants.HF_HUB_CACHE}"
    if constants.is_offline_mode():
        return Check(
            "hub",
            "note",
            f"HF_HUB_OFFLINE is set, so {cached}",
            "unset HF_HUB_OFFLINE before you download something",
        )
    if offline:
        return Check("hub", "note", f"not asked (`offline`); {said}")
    status = _status(place, token)
    if status is None:
        return Check(
            "hub",
            "warning",
            f"{place} does not answer within {TIMEOUT:g} s: {cached}",
            "set HF_ENDPOINT to a mirror that you reach, or HTTPS_PROXY; without a network set "
            "HF_HUB_OFFLINE=1, so nothing waits for it",
        )
    if token and status in (401, 403):
        return Check(
            "hub",
            "warning",
            f"{place} answers, and refuses the token ({status})",
            "set HF_TOKEN to one that is valid (https://huggingface.co/settings/tokens)",
        )
    return Check("hub", "ok", f"{place} answers; {'the token is valid' if token and status == 200 else said}")


def _status(place: str, token: str | None) -> int | None:
    """The status that the hub answers with, of the page that says whose a token is; None without an answer."""
    import requests

    headers = {"Authorization": f"Bearer {token}"} if token else {}
    try:
        reply = requests.get(f"{place}/api/whoami-v2", headers=headers, timeout=TIMEOUT)
    except requests.RequestException:
        return None
    return reply.status_code
