"""Runnable algorithms, one file each; read one top to bottom."""
