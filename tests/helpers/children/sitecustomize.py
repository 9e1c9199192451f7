"""Read by each interpreter that a test starts, as conftest.py says."""

from __future__ import annotations

import gc

gc.set_threshold(50_000, 10, 10)
