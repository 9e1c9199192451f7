"""What the licence of a base model asks of those who pass on a LoRA for it: `base_licences.yaml`, read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from flowrl.config.strict_yaml import read_mapping
from flowrl.pipelines.places.known_checkpoints import published


@dataclass(frozen=True, kw_only=True, slots=True)
class Terms:
    """A licence."""

    title: str
    """What it is called."""
    hub: str = "other"
    """The hub's word for it; "other" where it has none."""
    name: str | None = None
    """`license_name` of a card, for "other"."""
    link: str | None = None
    """Where its text is; None: at the base model's page."""
    demands: str
    """What it asks of a LoRA that is passed on."""


_READ = (
    "This toolkit has no summary of it: read the text at the base model's page before you pass the LoRA on. As a rule "
    "such a licence also binds what is derived from the model."
)
TERMS = {name: Terms(**row) for name, row in read_mapping(Path(__file__).with_suffix(".yaml")).items()}
"""By `licence` of `pipelines/published.json`."""


def terms_of(model: str, licence: str | None = None) -> Terms | None:
    """The terms of a base model; None where its licence is not known here.

    Args:
        model: hub id, `asset:NAME` (which ships with flowrl, under its licence) or a place on this machine.
        licence: that somebody gave in the place of the base's, as the hub calls it.
    """
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
