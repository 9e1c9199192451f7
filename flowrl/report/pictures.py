"""Pictures of the same prompt and seed before and after, embedded in the page."""

from __future__ import annotations

import base64
import io
from pathlib import Path

from PIL import Image

from flowrl.report.data import Pair, RunData
from flowrl.report.markup import esc, plural, section

MAX_PAIRS = 16
SMALL = 128  # up to this side a picture is embedded as it is and its pixels are shown as squares
LARGE = 448  # longer sides are reduced to this: twice the size at which they are shown


def pictures(run: RunData) -> str:
    """The first pairs in the order of their numbers; never a selection by looks."""
    shown = [cell for pair in run.pairs[:MAX_PAIRS] if (cell := _pair(pair))]
    if not shown:
        return ""
    first, last = run.pair_iterations[0], run.pair_iterations[-1]
    rest = len(run.pairs) - len(shown)
    more = f" {rest} more in samples/." if rest > 0 else ""
    start = "before training" if first == 0 else f"after {plural(first, 'iteration')}"
    if first == last:
        lead, title = f"Drawn {start}; there is no later sampling yet.{more}", "Pictures"
    else:
        lead = (
            f"Left {start}, right after {plural(last, 'iteration')}: same prompt, same start noise. "
            f"The first ones in order, not picked.{more}"
        )
        title = "Before and after"
    return section("pictures", title, f'<div class="pairs">{"".join(shown)}</div>', lead)


def embed(path: Path) -> tuple[str, bool] | None:
    """A picture as a data address and whether it is small; None where the file cannot be read."""
    try:
        with Image.open(path) as image:
            image.load()
            picture = image.convert("RGB")
    except OSError:  # cut off while being written, or no picture
        return None
    small = max(picture.size) <= SMALL
    picture.thumbnail((LARGE, LARGE))
    buffer = io.BytesIO()
    if small:
        picture.save(buffer, format="PNG", optimize=True)
    else:
        picture.save(buffer, format="JPEG", quality=88)
    code = base64.b64encode(buffer.getvalue()).decode("ascii")
    return f"data:image/{'png' if small else 'jpeg'};base64,{code}", small


def _pair(pair: Pair) -> str:
    sides = [("before", pair.before), *([("after", pair.after)] if pair.after is not None else [])]
    images, prompt = "", esc(pair.prompt)
    for side, path in sides:
        embedded = embed(path)
        if embedded is None:
            return ""
        source, small = embedded
        style = ' class="pixels"' if small else ""
        images += f'<div><img{style} src="{source}" alt="{side} training: {prompt}"><span>{side}</span></div>'
    seed = f' <small class="muted">seed {esc(pair.seed)}</small>' if pair.seed else ""
    return f'<figure class="pair"><div class="sides">{images}</div><figcaption>{prompt}{seed}</figcaption></figure>'
