"""What a base model's licence demands if you share a LoRA for it, from `base_licences.yaml`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from flowrl.config.strict_yaml import read_mapping
from flowrl.pipelines.places.known_checkpoints import published


@dataclass(frozen=True, kw_only=True, slots=True)
class Terms:
    """A licence."""

    title: str
    hub: str = "other"
    """The hub's word for it; "other" if it has none."""
    name: str | None = None
    """`license_name` of a card, for "other"."""
    link: str | None = None
    """Address of its text; None for the base model's page."""
    demands: str
    """What it demands of a LoRA that you share."""


_READ = (
    "This toolkit has no summary of it: read the text at the base model's page before you pass the LoRA on. As a rule "
    "such a licence also binds what is derived from the model."
)
TERMS = {name: Terms(**row) for name, row in read_mapping(Path(__file__).with_suffix(".yaml")).items()}
"""By `licence` of `pipelines/published.json`."""


def terms_of(model: str, licence: str | None = None) -> Terms | None:
    """The terms of a base model: a hub id, `asset:NAME` (which ships with flowrl, under its licence) or a place on this
    machine. A given `licence`, as the hub calls it, replaces the base's. None if it is unknown here."""
    if licence:
        demands = "Stated by whoever shares this LoRA; the demands of the base model hold too."
        return Terms(title=licence, hub=licence, demands=demands)
    if model.startswith("asset:"):
        return TERMS["Apache-2.0"]
    known = published(model)
    if known is None:
        return None
    slug = "-".join("".join(c if c.isalnum() else " " for c in known.licence.lower()).split())
    return TERMS.get(known.licence) or Terms(title=known.licence, name=slug, demands=_READ)
