"""Rewards over HTTP: copies, environments."""
