"""The model families that are built by hand, one file each."""
