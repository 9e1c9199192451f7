"""`flowrl bench [CONFIG]`: the phases of an iteration timed on this machine."""
