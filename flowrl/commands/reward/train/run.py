"""`flowrl reward train PAIRS.jsonl`: a preference head on frozen features."""

from __future__ import annotations

import argparse

from flowrl.pretrain.train_head import head_config, summary, train_head
from flowrl.runtime.scrubbing import say as print


def run(parsed: argparse.Namespace) -> int:
    """Trains a head, prints how well it predicts pairs held out; returns 0.

    Raises:
        ValueError: an unknown setting, bad pairs or too few of them, or a folder that is taken.
    """
    config = head_config(parsed.overrides)
    print(summary(train_head(parsed.pairs, config)))
    print(f"wrote {config.out}; in a configuration: {{name: preference_head, options: {{model: {config.out}}}}}")
    return 0
