"""`flowrl doctor`: what would stop a run on this machine, of this configuration, and what went wrong in a run."""
