"""Lucy Edit, a video changed as a text says: any checkpoint that stock `LucyEditPipeline` loads.

The network is that of Wan 2.2 TI2V-5B; it reads the normalised latents of a prompt's `source_video` beside the noisy
channels. The clip is scaled to cover the drawn size and cut to it, and as many of its first frames are read as are
drawn. Guidance is two-pass classifier-free guidance, whose negative half sees the clip too. Stock feeds every token
the same time (`expand_timesteps`), which here is one number for a sample.
"""

from __future__ import annotations

from dataclasses import replace

from flowrl.pipelines.families import wan
from flowrl.pipelines.families.wan_vace import fit
from flowrl.pipelines.shared import common
from flowrl.pipelines.shared.cards import Card, Size, check_channels

_CLIPS = ("source_video",)


def refuse(card: Card) -> None:
    """Refuses a network that reads no clip."""
    wan.FAMILY.refuse(card)
    check_channels(card, "the noisy ones and those of the source video", in_channels=2 * card.network.out_channels)


FAMILY = replace(
    wan.FAMILY,
    name="lucy_edit",
    title="Lucy Edit",
    exact=("vae",),
    clips=_CLIPS,
    needed_clips=_CLIPS,
    own_size=lambda card: Size(height=480, width=832, num_frames=81, fps=24.0),
    embed_sources=lambda p, shown: {"beside": wan.encode(p, 2 * fit(p, shown[0], p.image_shape[2:]) - 1).to(p.dtype)},
    conditioning=lambda p, tokens: {
        "embeds": common.meta(1, tokens, p.card.network.text_dim),
        "beside": common.meta(1, *p.latent_shape),
    },
    count_sources=lambda card, options: (1, 1),
    refuse=refuse,
    suits=wan.suits_experts,
    stock_class=lambda card, options: card.stock,
)
