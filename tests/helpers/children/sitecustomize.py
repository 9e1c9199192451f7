"""Read by each interpreter that a test starts, as conftest.py says."""

import gc

gc.set_threshold(50_000, 10, 10)
