"""The style sheet, and its two palettes for the documentation site."""

from __future__ import annotations

import re
from pathlib import Path

CSS = (Path(__file__).parent / "style.css").read_text(encoding="utf-8")
LIGHT, DARK = re.findall(r":root\{(?:color-scheme:light dark;)?([^}]*)\}", CSS)
