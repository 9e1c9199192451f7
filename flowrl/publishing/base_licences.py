"""What the licence of a base model asks of whoever passes on a LoRA for it, and what the hub calls it.

A summary to begin with, of the texts at the links; the texts themselves are what counts.
"""

from __future__ import annotations

from dataclasses import dataclass

from flowrl.pipelines.places.known_checkpoints import published


@dataclass(frozen=True, kw_only=True, slots=True)
class Terms:
    """A licence.

    Attributes:
        title: what it is called.
        hub: the hub's word for it; "other" where it has none.
        name: `license_name` of a card, for "other".
        link: where its text is; None: at the base model's page.
        demands: what it asks of a LoRA that is passed on.
    """

    title: str
    hub: str = "other"
    name: str | None = None
    link: str | None = None
    demands: str


_READ = (
    "This toolkit has no summary of it: read the text at the base model's page before you pass the LoRA on. As a rule "
    "such a licence also binds what is derived from the model."
)
_APACHE = Terms(
    title="Apache-2.0",
    hub="apache-2.0",
    demands="Pass the licence on with the LoRA, keep notices that are there, and say that the model was changed, as "
    "this card does.",
)
_RAIL = (
    "The restrictions on use in its attachment have to be passed on with the LoRA, and whoever gets it is bound by "
    "them; a copy of the licence goes with it, and changes are stated."
)
_NOTICE = 'a copy of the licence and a text file "Notice" with the sentence that it demands'
_FLUX = (
    "For non-commercial purposes only, the LoRA too: pass it on under the same licence, with a copy of it and its "
    "notice of attribution, and say what was changed. The licence speaks of outputs and of filters apart: read it."
)
TERMS: dict[str, Terms] = {
    "Apache-2.0": _APACHE,
    "CreativeML Open RAIL-M": Terms(
        title="CreativeML Open RAIL-M", hub="creativeml-openrail-m", demands=_RAIL,
    ),
    "CreativeML Open RAIL++-M": Terms(title="CreativeML Open RAIL++-M", hub="openrail++", demands=_RAIL),
    "FLUX.1 [dev] Non-Commercial": Terms(
        title="FLUX.1 [dev] Non-Commercial License", name="flux-1-dev-non-commercial-license",
        link="https://huggingface.co/black-forest-labs/FLUX.1-dev/blob/main/LICENSE.md", demands=_FLUX,
    ),
    "Stability AI Community": Terms(
        title="Stability AI Community License", name="stabilityai-ai-community",
        link="https://huggingface.co/stabilityai/stable-diffusion-3.5-medium/blob/main/LICENSE.md",
        demands="Free below 1 million US dollars of yearly revenue, above by a licence of Stability AI; whoever uses "
        f"or distributes it commercially registers there. Whoever passes on a LoRA gives {_NOTICE} with it, and shows "
        "\"Powered by Stability AI\" where it is offered.",
    ),
    "Krea 2 Community": Terms(
        title="Krea 2 Community License", name="krea-2-community-license",
        link="https://huggingface.co/krea/Krea-2-Raw/blob/main/LICENSE.pdf",
        demands="Commercial use is free below 1 million US dollars of yearly revenue. Whoever passes on a LoRA gives "
        f"{_NOTICE} with it, binds whoever gets it to the licence, and begins its name with \"Krea\". Whoever lets "
        "others use it filters content.",
    ),
    "LTX-2 Community License": Terms(
        title="LTX-2 Community License", name="ltx-2-community-license-agreement",
        link="https://huggingface.co/Lightricks/LTX-2/blob/main/LICENSE",
        demands="Free below 10 million US dollars of yearly revenue. Pass the LoRA on under this licence alone, with a "
        "complete copy of it; its restrictions on use bind whoever gets the LoRA. Keep notices and state changes.",
    ),
    "Tencent Hunyuan Community": Terms(
        title="Tencent Hunyuan Community License", name="tencent-hunyuan-community",
        demands="Not for the European Union, the United Kingdom and South Korea, the LoRA too. Whoever passes it on "
        f"gives {_NOTICE} with it. Neither the model nor what it draws may improve other models. With more than 100 "
        "million users a month a licence of Tencent is needed.",
    ),
    "NVIDIA Open Model License, Gemma terms for the text encoder": Terms(
        title="NVIDIA Open Model License", name="nvidia-open-model-license",
        link="https://www.nvidia.com/en-us/agreements/enterprise-software/nvidia-open-model-license/",
        demands=f"Whoever passes on a LoRA gives {_NOTICE} with it; NVIDIA's terms of trustworthy AI hold. The text "
        "encoder, which the LoRA does not change, is under the terms of Gemma.",
    ),
}  # fmt: skip
"""By `licence` of `pipelines/published.json`."""


def terms_of(model: str, licence: str | None = None) -> Terms | None:
    """The terms of a base model; None where its licence is not known here.

    Args:
        model: hub id, `asset:NAME` (which ships with flowrl, under its licence) or a place on this machine.
        licence: that somebody gave in the place of the base's, as the hub calls it.
    """
    if licence:
        demands = "Stated by whoever shares this LoRA; what the base demands holds."
        return Terms(title=licence, hub=licence, demands=demands)
    if model.startswith("asset:"):
        return _APACHE
    known = published(model)
    if known is None:
        return None
    slug = "-".join("".join(c if c.isalnum() else " " for c in known.licence.lower()).split())
    return TERMS.get(known.licence) or Terms(title=known.licence, name=slug, demands=_READ)
