"""`flowrl init`."""
