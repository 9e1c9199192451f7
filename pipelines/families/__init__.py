"""The model families, written by hand, one file each."""
