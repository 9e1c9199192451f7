"""What can be chosen of how a checkpoint is loaded; nothing heavy is imported here."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Loading:
    """What of a checkpoint is loaded at once, and how it lies on its device.

    Attributes:
        later: whether text encoders and denoisers wait for `load_text_encoders` and `load_denoiser` of the pipeline.
        quantize: form of the denoisers' large weights (`weights/quantize.py`), or "none".
    """

    later: bool = False
    quantize: str = "none"


AT_ONCE = Loading()
"""Everything is loaded at once."""
