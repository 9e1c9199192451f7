"""Functions for Python: what the commands do, with results as objects."""
