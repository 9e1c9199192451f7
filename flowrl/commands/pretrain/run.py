"""`flowrl pretrain`: makes an embedded model, or their scorer."""

from __future__ import annotations

import argparse

from flowrl.pretrain.making import pretrain
from flowrl.runtime.scrubbing import say as print


def run(parsed: argparse.Namespace) -> int:
    """Makes what was named and says where it lies; returns 0.

    Raises:
        ValueError: an unknown model or setting.
    """
    print(f"wrote {pretrain(parsed.arguments)}")
    return 0
