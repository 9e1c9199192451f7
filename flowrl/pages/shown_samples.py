"""Samples of the same prompt and seed before and after: images, edits beside their sources, and playing clips."""

from __future__ import annotations

from collections.abc import Set
from pathlib import Path

from flowrl.media.reading import image_size
from flowrl.media.sound_files import has_sound
from flowrl.rendering.embedded_images import LARGE, clip_addresses, image_element
from flowrl.rendering.markup import esc, moment, section
from flowrl.runs.run_data import BeforeAfter, RunData

MAX_PAIRS = 16
MAX_CLIPS = 8  # prompts of a video run: each plays twice
ROW = 1600  # longer rows of frames are reduced to this


def images(run: RunData, home: Path) -> str:
    """The first pairs in the order of their numbers, never a selection by looks, for a page in the folder `home`."""
    video = run.sample_word == "video"
    chosen = run.pairs[: MAX_CLIPS if video else MAX_PAIRS]
    clips = [clip for pair in chosen for clip in (pair.before_clip, pair.after_clip) if clip is not None]
    address = clip_addresses(clips, home)
    heard = set(filter(has_sound, clips))
    shown = [cell for pair in chosen if (cell := _pair(pair, address, heard))]
    if not shown:
        return ""
    rest = len(run.pairs) - len(shown)
    more = f" {rest} more in samples/." if rest > 0 else ""
    if video:
        more += " Beside each clip are frames spread evenly over it, the first and the last among them."
        more += " Clips with sound wait to be started." * bool(heard)
        if any(not value.startswith("data:") for value in address.values()):
            more += " The clips are files in samples/: keep this page where it is."
    title = "Before and after" if len(run.pair_iterations) > 1 else "Videos" if video else "Images"
    edits = any(pair.sources for pair in chosen)
    style = " clips" if video else " edits" if edits else ""
    return section(
        "images", title, f'<div class="pairs{style}">{"".join(shown)}</div>', _lead(run, video, edits) + more
    )


def _lead(run: RunData, video: bool, edits: bool) -> str:
    first, last = run.pair_iterations[0], run.pair_iterations[-1]
    source = "First the source, which was given with the prompt. " if edits else ""
    if first == last:
        return f"{source}Drawn {moment(first)}; there is no later sampling yet."
    one, other = ("Above", "below") if video else ("Then", "then") if edits else ("Left", "right")
    return (
        f"{source}{one} {moment(first)}, {other} {moment(last)}: same prompt, same start noise. "
        "The first ones in order, not picked."
    )


def _pair(pair: BeforeAfter, address: dict[Path, str], heard: Set[Path]) -> str:
    """A figure of one prompt, with silent clips except those `heard`; empty if an image cannot be read."""
    sides = [("before", pair.before, pair.before_clip)]
    if pair.after is not None:
        sides.append(("after", pair.after, pair.after_clip))
    shots = ""
    try:
        images = "".join(_image("source", path, f"source: {pair.prompt}") for path in pair.sources)
        for side, path, clip in sides:
            words = f"{side} training: {pair.prompt}"
            if clip is None:
                images += _image(side, path, words)
                continue
            # A clip plays by itself where it is silent: browsers start none that would be heard. The row of its
            # frames is for paper and for a still look.
            playing = "" if clip in heard else "muted autoplay "
            shots += (
                f'<div class="shot"><span>{side}</span><video src="{address[clip]}" {playing}loop playsinline '
                f'controls aria-label="{esc(words)}"></video>{_whole(path, f"frames {words}", ROW)}</div>'
            )
    except (OSError, ValueError):
        return ""
    row = f'<div class="sides">{images}</div>' if images else ""
    seed = f' <small class="muted">seed {esc(pair.seed)}</small>' if pair.seed else ""
    return f'<figure class="pair">{row}{shots}<figcaption>{esc(pair.prompt)}{seed}</figcaption></figure>'


def _image(side: str, path: Path, words: str) -> str:
    element = _whole(path, words)
    width, height = image_size(path)
    share = 100 * width / height  # of the row's width, so that all are equally tall
    return f'<div style="--share:{share:.0f}">{element}<span>{side}</span></div>'


def _whole(path: Path, words: str, large: int = LARGE) -> str:
    element = image_element(path, words, large)
    if not element:
        raise OSError(f"{path} is not an image")
    return element
