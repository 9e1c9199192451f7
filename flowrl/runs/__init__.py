"""What a run folder holds and says: rows, manifest, names of metrics."""
