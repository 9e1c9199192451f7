"""`flowrl watch`: a local page over running and finished runs, read-only."""
