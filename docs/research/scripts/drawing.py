"""What the figures of the pages share: their colours and their axes."""

from __future__ import annotations

from typing import Any

COLORS = ("#0072b2", "#d55e00", "#009e73", "#e69f00", "#56b4e9", "#cc79a7", "#555555")  # Okabe and Ito


def plain(axes: Any) -> None:
    """A faint grid, and a frame on the left and below alone."""
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
