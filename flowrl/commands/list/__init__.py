"""`flowrl list`."""
