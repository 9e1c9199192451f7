"""Reads run folders: rows, manifest, names of metrics."""
