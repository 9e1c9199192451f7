"""`flowrl completion`."""
